//! Recursors and HTTP servers that accept connections and then hang: descriptors are bounded, come back, and suffice
//! for everything else.

use std::{
    fs,
    io::{self, Read, Write},
    net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    os::unix::process::CommandExt as _,
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use hickory_proto::{op::ResponseCode, rr::RecordType};
use nix::{
    sys::{
        resource::{Resource, setrlimit},
        signal::{Signal, kill},
    },
    unistd::Pid,
};
use serde_json::{Value, json};
use whole_system_tests::{client, namespace::Namespace, process::wait_until, requires};

use super::{
    encrypted::{Files, NAME, unbound},
    lab::{LOCAL_NAME, Lab, OURS, loopback},
    scripted::{Asked, Say, Scripted},
};

/// Queries of a test, as many as leaked 400 descriptors once.
const QUERIES: usize = 1000;
/// Queries in flight at a time.
const BURST: usize = 100;
/// Maximum number of connections to one recursor or HTTP server.
const MAX_CONNECTIONS: usize = 64;
/// Descriptors that a query needs besides: sockets of the next recursor, a client, a file.
const OTHERS: usize = 30;
/// Time limit for everything that should happen within seconds, reached only on failure.
const LIMIT: Duration = Duration::from_secs(120);

/// Time limits of the server, which tarpits reach: of one try, and of a query.
const TRY: &str = "400ms";
const QUERY: &str = "5s";

/// Behaviour of a tarpit on a connection that it has accepted.
type Hang = dyn Fn(TcpStream, &AtomicBool) + Send + Sync;

/// Accepts connections and hangs, until dropped.
pub(crate) struct Tarpit {
    ended: Arc<AtomicBool>,
    accepted: Arc<AtomicUsize>,
    /// Number of connections that the server has not closed.
    open: Arc<AtomicUsize>,
    thread: Option<JoinHandle<()>>,
}

impl Tarpit {
    /// Listens on an address of the namespace, and never writes.
    pub(crate) fn silent(namespace: &Namespace, address: SocketAddr) -> Result<Self> {
        Self::start(namespace, address, |stream, ended| {
            // The peer closes the connection.
            let _ = read_to_end(stream, ended);
        })
    }

    fn start(
        namespace: &Namespace,
        address: SocketAddr,
        hang: impl Fn(TcpStream, &AtomicBool) + Send + Sync + 'static,
    ) -> Result<Self> {
        let listener = namespace.run(|| TcpListener::bind(address))??;
        listener.set_nonblocking(true)?;
        let (ended, accepted) = (Arc::<AtomicBool>::default(), Arc::<AtomicUsize>::default());
        let hang: Arc<Hang> = Arc::new(hang);
        let open = Arc::<AtomicUsize>::default();
        let (until, count) = (Arc::clone(&ended), Arc::clone(&accepted));
        let all_open = Arc::clone(&open);
        let thread = thread::spawn(move || {
            while !until.load(Ordering::Relaxed) {
                let Ok((stream, _)) = listener.accept() else {
                    thread::sleep(Duration::from_millis(1));
                    continue;
                };
                count.fetch_add(1, Ordering::Relaxed);
                let (hang, until) = (Arc::clone(&hang), Arc::clone(&until));
                let open = Arc::clone(&all_open);
                open.fetch_add(1, Ordering::Relaxed);
                thread::spawn(move || {
                    hang(stream, &until);
                    open.fetch_sub(1, Ordering::Relaxed);
                });
            }
        });
        Ok(Self {
            ended,
            accepted,
            open,
            thread: Some(thread),
        })
    }

    pub(crate) fn open(&self) -> usize {
        self.open.load(Ordering::Relaxed)
    }

    pub(crate) fn accepted(&self) -> usize {
        self.accepted.load(Ordering::Relaxed)
    }
}

impl Drop for Tarpit {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // A panic shows as a missing connection in the test.
            let _ = thread.join();
        }
    }
}

/// Reads and discards until the peer closes the connection.
fn read_to_end(mut stream: TcpStream, ended: &AtomicBool) -> io::Result<()> {
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(Duration::from_millis(100)))?;
    let mut buffer = [0; 4096];
    while !ended.load(Ordering::Relaxed) {
        match stream.read(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Returns the number of open descriptors of a process.
pub(crate) fn descriptors(process: u32) -> Result<usize> {
    Ok(fs::read_dir(format!("/proc/{process}/fd"))?.count())
}

/// Sends the queries of a test in bursts, each for another name below `domain`, and waits for the replies. Returns the
/// largest number of descriptors seen.
fn flood(lab: &Lab<'_>, domain: &str) -> Result<usize> {
    let ended = AtomicBool::new(false);
    thread::scope(|scope| {
        let watching = scope.spawn(|| -> Result<usize> {
            let mut most = 0;
            while !ended.load(Ordering::Relaxed) {
                most = most.max(descriptors(lab.server.pid())?);
                thread::sleep(Duration::from_millis(2));
            }
            Ok(most)
        });
        let asked = lab.namespace.run(|| ask_in_bursts(domain));
        ended.store(true, Ordering::Relaxed);
        let most = watching.join().expect("no panic")?;
        asked??;
        Ok(most)
    })
}

fn ask_in_bursts(domain: &str) -> Result<()> {
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))?;
    socket.connect(OURS)?;
    socket.set_read_timeout(Some(LIMIT))?;
    let mut buffer = [0; 4096];
    for burst in 0..QUERIES / BURST {
        for number in 0..BURST {
            let name = format!("n{burst}-{number}.{domain}");
            socket.send(&client::query(&name, RecordType::A, None)?.to_vec()?)?;
        }
        for number in 0..BURST {
            socket
                .recv(&mut buffer)
                .with_context(|| format!("reply {number} of burst {burst}"))?;
        }
    }
    Ok(())
}

/// Returns whether a name is answered with an address.
fn is_answered(lab: &Lab<'_>, name: &str) -> bool {
    let reply = lab.ask_for(name, RecordType::A);
    reply.is_ok_and(|reply| {
        reply.metadata.response_code == ResponseCode::NoError && !reply.answers.is_empty()
    })
}

/// Waits until as many descriptors are open as before a flood.
fn wait_for_return(lab: &Lab<'_>, before: usize) -> Result<()> {
    let returned = wait_until("the descriptors' return", LIMIT, || {
        descriptors(lab.server.pid()).is_ok_and(|now| now <= before)
    });
    returned.with_context(|| {
        let now = descriptors(lab.server.pid());
        format!("{now:?} descriptors, {before} before\n{}", lab.server.log())
    })
}

/// Limits the open files of a server.
fn limit_files(command: &mut Command, files: u64) {
    // SAFETY: setrlimit is a plain system call, allowed between fork and exec.
    unsafe {
        command.pre_exec(move || Ok(setrlimit(Resource::RLIMIT_NOFILE, files, files)?));
    }
}

#[test]
fn unfinished_handshakes_keep_no_descriptor() -> Result<()> {
    requires!(namespaces, programs(&["unbound"]));
    let namespace = Namespace::new("tarpit")?;
    let (files, address) = (Files::new()?, SocketAddr::new(loopback(31).ip(), 853));
    let tarpit = Tarpit::silent(&namespace, address)?;
    let ca = files.path("ca.crt");
    let settings = json!({
        "recursors": [format!("tls://{address}#{NAME}")], "recursor_timeout": TRY, "request_timeout": QUERY,
    });
    let lab = Lab::start_prepared(&namespace, &[], &settings, move |command| {
        command.env("SSL_CERT_FILE", ca).env_remove("SSL_CERT_DIR");
    })?;
    let before = descriptors(lab.server.pid())?;
    let most = flood(&lab, "tarpit.test.")?;
    let accepted = tarpit.accepted();
    ensure!(accepted > 0, "no connection reached the tarpit");
    ensure!(
        most <= before + MAX_CONNECTIONS + OTHERS,
        "{before} descriptors before, at most {most} with {accepted} connections"
    );
    wait_for_return(&lab, before)?;
    // The recursor works again, at the same address.
    drop(tarpit);
    let _unbound = unbound(&namespace, &files, address)?;
    wait_until("an answer of the recursor", LIMIT, || {
        is_answered(&lab, "recovered.encrypted.test.")
    })
    .with_context(|| lab.server.log())
}

/// A recursor that answers by UDP with TC and no record, and by TCP byte by byte, while it `trickles`.
pub(crate) struct Trickling {
    tarpit: Tarpit,
    ended: Arc<AtomicBool>,
    truncating: Option<JoinHandle<()>>,
}

impl Trickling {
    pub(crate) fn start(
        namespace: &Namespace,
        address: SocketAddr,
        trickles: &Arc<AtomicBool>,
    ) -> Result<Self> {
        let udp = namespace.run(|| UdpSocket::bind(address))??;
        udp.set_read_timeout(Some(Duration::from_millis(20)))?;
        let ended = Arc::<AtomicBool>::default();
        let until = Arc::clone(&ended);
        let truncating = thread::spawn(move || {
            let mut buffer = [0; 1500];
            while !until.load(Ordering::Relaxed) {
                let Ok((length, from)) = udp.recv_from(&mut buffer) else {
                    continue;
                };
                // QR and TC.
                buffer[2] |= 0x82;
                let _ = udp.send_to(&buffer[..length], from);
            }
        });
        let hangs = Arc::clone(trickles);
        let tarpit = Tarpit::start(namespace, address, move |stream, ended| {
            // The server closes the connection.
            let _ = trickle(stream, ended, &hangs);
        })?;
        Ok(Self {
            tarpit,
            ended,
            truncating: Some(truncating),
        })
    }

    pub(crate) fn tarpit(&self) -> &Tarpit {
        &self.tarpit
    }
}

impl Drop for Trickling {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Relaxed);
        if let Some(thread) = self.truncating.take() {
            // A panic shows as a missing reply in the test.
            let _ = thread.join();
        }
    }
}

/// Serves one connection of a recursor that trickles, or has recovered.
fn trickle(mut stream: TcpStream, ended: &AtomicBool, hangs: &AtomicBool) -> io::Result<()> {
    let from = stream.peer_addr()?;
    stream.set_nonblocking(false)?;
    while !ended.load(Ordering::Relaxed) {
        let mut length = [0; 2];
        stream.read_exact(&mut length)?;
        let mut query = vec![0; usize::from(u16::from_be_bytes(length))];
        stream.read_exact(&mut query)?;
        while hangs.load(Ordering::Relaxed) && !ended.load(Ordering::Relaxed) {
            // A length of 65,535 bytes first.
            stream.write_all(&[0xff])?;
            thread::sleep(Duration::from_millis(100));
        }
        let asked = Asked::parse(&query, from, true).ok_or(io::ErrorKind::InvalidData)?;
        let Say { bytes, .. } = asked.answer(Ipv4Addr::new(192, 0, 2, 1), 300).into();
        let length = u16::try_from(bytes.len()).map_err(io::Error::other)?;
        stream.write_all(&[&length.to_be_bytes()[..], &bytes].concat())?;
    }
    Ok(())
}

#[test]
fn trickling_recursors_keep_no_descriptor() -> Result<()> {
    requires!(namespaces);
    let namespace = Namespace::new("trickle")?;
    let trickles = Arc::new(AtomicBool::new(true));
    let recursor = Trickling::start(&namespace, loopback(10), &trickles)?;
    let lab = Lab::start(
        &namespace,
        &[loopback(10)],
        &json!({"recursor_timeout": TRY, "request_timeout": QUERY}),
    )?;
    // The sockets for UDP stay open for a while.
    ensure!(!is_answered(&lab, "first.test."));
    let before = descriptors(lab.server.pid())?;
    let most = flood(&lab, "trickle.test.")?;
    let accepted = recursor.tarpit().accepted();
    ensure!(accepted > 1, "no connection reached the tarpit");
    ensure!(
        most <= before + MAX_CONNECTIONS + OTHERS,
        "{before} descriptors before, at most {most} with {accepted} connections"
    );
    wait_for_return(&lab, before)?;
    trickles.store(false, Ordering::Relaxed);
    wait_until("an answer of the recursor", LIMIT, || {
        is_answered(&lab, "recovered.test.")
    })
    .with_context(|| lab.server.log())
}

/// Checks that everything works that needs a descriptor and no recursor.
fn check_service(lab: &Lab<'_>) -> Result<()> {
    let query = client::query(LOCAL_NAME, RecordType::A, None)?;
    let reply = lab.ask_tcp(&query)?;
    ensure!(reply.answers.len() == 1, "{reply}");
    lab.metric("bosh_dns_xdp_tcp_sessions", "")?;
    let (_, text, problem) = lab.cli(&["status", "--json"])?;
    let status: Value = serde_json::from_str(&text).with_context(|| problem)?;
    ensure!(status["server_version"].is_string(), "{status}");
    Ok(())
}

#[test]
fn burst_of_connections_stays_within_limit() -> Result<()> {
    const FILES: u64 = 300;
    const BURST: usize = 400;
    /// A quarter of the files are for TCP, and a quarter of that for one client.
    const MAX_OF_CLIENT: usize = 19;
    /// The connection that has just been accepted, and those of self-checks with both ends.
    const BESIDES: usize = 1 + 8;
    requires!(namespaces);
    let namespace = Namespace::new("tcpburst")?;
    let sockets = tempfile::tempdir()?;
    let settings = json!({"control": {"socket": sockets.path().join("control.sock")}});
    let lab = Lab::start_prepared(&namespace, &[], &settings, |command| {
        limit_files(command, FILES);
    })?;
    let process = lab.server.pid();
    let before = descriptors(process)?;
    // They wait in the kernel and arrive at once.
    let server = Pid::from_raw(process.cast_signed());
    kill(server, Signal::SIGSTOP)?;
    let connect = || -> io::Result<TcpStream> {
        let stream = TcpStream::connect(OURS)?;
        stream.set_nonblocking(true)?;
        Ok(stream)
    };
    let mut waiting = namespace.run(|| {
        (0..BURST)
            .map(|_| connect())
            .collect::<io::Result<Vec<_>>>()
    })??;
    kill(server, Signal::SIGCONT)?;
    let mut most = 0;
    while waiting.len() > MAX_OF_CLIENT {
        most = most.max(descriptors(process)?);
        // Any read returns the end of the connection.
        waiting.retain_mut(|stream| {
            let read = stream.read(&mut [0]);
            read.is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock)
        });
    }
    ensure!(
        most <= before + MAX_OF_CLIENT + BESIDES,
        "{before} descriptors before, at most {most}"
    );
    ensure!(waiting.len() == MAX_OF_CLIENT, "{} are left", waiting.len());
    check_service(&lab)
}

#[test]
fn hanging_recursors_leave_descriptors() -> Result<()> {
    requires!(namespaces);
    let namespace = Namespace::new("fewfiles")?;
    let recursors: Vec<SocketAddr> = (31..36)
        .map(|last| SocketAddr::new(loopback(last).ip(), 853))
        .collect();
    let tarpits = recursors
        .iter()
        .map(|&at| Tarpit::silent(&namespace, at))
        .collect::<Result<Vec<_>>>()?;
    let names: Vec<String> = recursors.iter().map(|at| format!("tls://{at}")).collect();
    let sockets = tempfile::tempdir()?;
    let settings = json!({
        "recursor_timeout": TRY, "request_timeout": QUERY,
        "recursors": names,
        "control": {"socket": sockets.path().join("control.sock")},
    });
    let lab = Lab::start_prepared(&namespace, &[], &settings, |command| {
        limit_files(command, 300);
    })?;
    check_service(&lab)?;
    let before = descriptors(lab.server.pid())?;
    let served = thread::scope(|scope| -> Result<usize> {
        let flooding = scope.spawn(|| flood(&lab, "tarpit.test."));
        let mut served = 0;
        while !flooding.is_finished() {
            check_service(&lab)?;
            served += 1;
        }
        let most = flooding.join().expect("no panic")?;
        ensure!(
            most <= before + 300 / 4 + OTHERS,
            "{before} descriptors before, at most {most}"
        );
        Ok(served)
    });
    let served = served.with_context(|| lab.server.log())?;
    ensure!(served > 0, "nothing was checked");
    ensure!(tarpits.iter().any(|tarpit| tarpit.accepted() > 0));
    wait_for_return(&lab, before + 2)?;
    check_service(&lab)
}

#[test]
fn hanging_http_servers_keep_no_descriptor() -> Result<()> {
    requires!(namespaces);
    let namespace = Namespace::new("httppit")?;
    let healthy = Scripted::answering(&namespace, loopback(10), Ipv4Addr::new(192, 0, 2, 1))?;
    let servers = [(41, "http"), (42, "https")];
    let mut tarpits = Vec::new();
    let mut handlers = Vec::new();
    for (last, scheme) in servers {
        let address = SocketAddr::new(loopback(last).ip(), 8080);
        tarpits.push(Tarpit::silent(&namespace, address)?);
        handlers.push(json!({
            "domain": format!("{scheme}.test"),
            "source": {"type": "http", "url": format!("{scheme}://{address}")},
        }));
    }
    let settings = json!({"handlers": handlers, "request_timeout": "1s"});
    let lab = Lab::start(&namespace, &[loopback(10)], &settings)?;
    let before = descriptors(lab.server.pid())?;
    for (tarpit, (_, scheme)) in tarpits.iter().zip(servers) {
        let most = flood(&lab, &format!("{scheme}.test."))?;
        let accepted = tarpit.accepted();
        ensure!(accepted > 0, "no connection reached the tarpit");
        ensure!(
            most <= before + MAX_CONNECTIONS + OTHERS,
            "{scheme}: {before} descriptors before, at most {most} with {accepted} connections"
        );
        wait_for_return(&lab, before)?;
    }
    ensure!(
        is_answered(&lab, "other.test."),
        "the recursor still answers"
    );
    ensure!(healthy.count() == 1);
    Ok(())
}
