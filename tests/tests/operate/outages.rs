//! Outages made from outside, each named by `status`, `/readyz`, the metric, the alert and the page alike: see
//! `conditions.rs`.

use std::{
    fs::{self, File, OpenOptions},
    io::{Read as _, Write as _},
    net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    path::Path,
    process::{Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use anyhow::{Result, ensure};
use hickory_proto::rr::{DNSClass, RecordType};
use nix::{sys::stat::Mode, unistd::mkfifo};
use serde_json::{Value, json};
use tempfile::TempDir;
use whole_system_tests::{
    bpffs::Bpffs,
    cell::feed,
    client,
    cpu::on_cpu,
    metrics::wait_for_fast_path,
    namespace::Namespace,
    process::{Kept, run, wait_until},
    requires,
    server::{self, Server},
};

use crate::{
    conditions::{Row, assert_found, assert_gone, assert_in_status},
    prometheus::Prometheus,
    running::{API_PORT, METRICS_PORT, RECORDS, Running},
};

/// Time limit, reached only on failure.
const TIMEOUT: Duration = Duration::from_secs(120);

/// Listen address of the servers.
const OURS: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 53);

/// Returns the settings of a server with metrics and a control socket in `folder`, and without API.
fn settings(folder: &Path, more: &Value) -> Value {
    let mut settings = json!({
        "xdp": {"mode": "off"},
        "metrics": {"enabled": true, "address": "127.0.0.1", "port": METRICS_PORT},
        "control": {"socket": folder.join("control.sock")},
    });
    server::merge(&mut settings, more);
    settings
}

fn watch(namespace: &Namespace) -> Result<Prometheus<'_>> {
    Prometheus::start(namespace, &[("bosh-dns-xdp", METRICS_PORT)])
}

//----------- Outside the process ----------------------------------------------

/// Copies the log from a pipe to the file in which tests look for lines, until it is told to stop.
fn copy_log(pipe: &Path, file: &Path, stalled: Arc<AtomicBool>) -> Result<JoinHandle<File>> {
    // For writing as well, so that opening does not wait for the server.
    let mut pipe = OpenOptions::new().read(true).write(true).open(pipe)?;
    let mut file = OpenOptions::new().create(true).append(true).open(file)?;
    Ok(thread::spawn(move || {
        let mut bytes = [0; 4096];
        while !stalled.load(Ordering::Relaxed) {
            let length = pipe.read(&mut bytes).expect("the pipe is open");
            file.write_all(&bytes[..length]).expect("room for the log");
        }
        // Stays open: without a reader the pipe would break.
        pipe
    }))
}

/// Lets accepting a TCP connection fail for lack of descriptors.
fn exhaust_descriptors(running: &Running) -> Result<()> {
    let process = format!("--pid={}", running.server.pid());
    let set = |limit: &str| run(Command::new("prlimit").args([process.as_str(), limit]));
    set("--nofile=3:")?;
    let _waiting = running.namespace.run(|| TcpStream::connect(OURS))??;
    running
        .server
        .wait_for_log("cannot accept a TCP connection")?;
    set("--nofile=4096:")
}

#[test]
fn outages_around_the_process_are_named() -> Result<()> {
    requires!(namespaces, prometheus);
    let namespace = Namespace::new("o-around")?;
    let folder = server::folder(RECORDS.as_bytes(), None)?;
    let definitions = folder.path().join("consul");
    fs::create_dir(&definitions)?;
    // Nobody listens at Consul's port.
    let consul = json!({"consul": {"sources": {
        "files": [definitions.join("*.json")], "http": {"addresses": ["http://127.0.0.1:8500"]},
    }}});
    let (pipe, stalled) = (folder.path().join("pipe"), Arc::new(AtomicBool::new(false)));
    mkfifo(&pipe, Mode::S_IRUSR | Mode::S_IWUSR)?;
    let log = copy_log(&pipe, &folder.path().join("log"), stalled.clone())?;
    let wrapper = folder.path().join("with-pipe");
    let program = server::program()?;
    let script = format!(
        "#!/bin/sh\nexec {} \"$@\" >{} 2>&1\n",
        program.display(),
        pipe.display()
    );
    fs::write(&wrapper, script)?;
    let executable = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    fs::set_permissions(&wrapper, executable)?;
    let settings = settings(folder.path(), &consul);
    let server = Server::start_program(wrapper, Some(&namespace), folder, OURS, &settings, |_| {})?;
    let running = Running { server, namespace };
    let prometheus = watch(&running.namespace)?;
    assert_found(&running, &prometheus, "consul_outdated", "not current")?;
    let broken = definitions.join("broken.json");
    fs::write(&broken, "{ broken")?;
    assert_found(
        &running,
        &prometheus,
        "consul_files_unusable",
        "broken.json",
    )?;
    fs::remove_file(&broken)?;
    assert_gone(&running, "consul_files_unusable")?;

    exhaust_descriptors(&running)?;
    assert_found(
        &running,
        &prometheus,
        "connections_refused",
        "since the start",
    )?;

    // The reader of the log stops: its pipe is full first, then the queue of lines.
    let every_request = [
        "log",
        "--level",
        "debug",
        "--requests-per-second",
        "1000000",
    ];
    ensure!(running.cli(&every_request)?.0 == 0);
    stalled.store(true, Ordering::Relaxed);
    running.ask("q-s0.q-g1.bosh.", 1)?;
    let _pipe = log.join().expect("no panic");
    running.ask("q-s0.q-g1.bosh.", 12_000)?;
    assert_found(&running, &prometheus, "log_lines_lost", "since the start")?;

    // No query arrives. After six rounds of self-checks the process would end.
    let dropping = "table inet outage { chain in { type filter hook input priority 0; \
                    meta l4proto { tcp, udp } th dport 53 drop; }; }\n";
    feed(&running.namespace, &["nft", "-f", "-"], dropping)?;
    assert_found(&running, &prometheus, "sockets_silent", "no reply within")?;
    feed(&running.namespace, &["nft", "flush", "ruleset"], "")?;
    assert_gone(&running, "sockets_silent")
}

//----------- Fast path --------------------------------------------------------

/// Sends queries that only userspace answers, as fast as possible, until `done`.
fn flood(done: &AtomicBool) -> Result<()> {
    let socket = UdpSocket::bind((Ipv4Addr::new(127, 0, 0, 66), 0))?;
    socket.connect(OURS)?;
    let mut query = client::query("q-s0.q-g1.bosh.", RecordType::A, None)?;
    query.queries[0].set_query_class(DNSClass::ANY);
    let query = query.to_vec()?;
    while !done.load(Ordering::Relaxed) {
        // A full receive queue, since no reply is read, is not an error of the sender.
        let _ = socket.send(&query);
    }
    Ok(())
}

/// Floods the server until an interface has dropped queries.
fn overload(running: &Running) -> Result<()> {
    let done = AtomicBool::new(false);
    let is_shedding = || {
        running
            .cli(&["status", "--json"])
            .is_ok_and(|(_, text, _)| {
                let status: Value = serde_json::from_str(&text).unwrap_or_default();
                status["overload"]["shed"].as_u64() > Some(0)
            })
    };
    thread::scope(|scope| {
        let mut floods = Vec::new();
        for _ in 0..2 {
            floods.push(scope.spawn(|| running.namespace.run(|| flood(&done))));
        }
        let waited = wait_until("something to be shed", TIMEOUT, is_shedding);
        done.store(true, Ordering::Relaxed);
        for flood in floods {
            flood.join().expect("no panic")??;
        }
        waited
    })
}

/// Starts the service that attaches programs.
fn start_attacher(running: &Running) -> Result<Kept> {
    let mut command = running.namespace.command(server::program()?)?;
    command
        .args(["attach", "--config", "config.json"])
        .current_dir(running.folder())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    Kept::spawn(&mut command)
}

#[test]
fn outages_of_the_fast_path_are_named() -> Result<()> {
    requires!(namespaces, bpf, prometheus);
    let (namespace, bpffs) = (Namespace::new("o-fast")?, Bpffs::new()?);
    // More names than the map has room for.
    let folder = server::folder(&server::records_of_groups(&Vec::from_iter(1..=40)), None)?;
    let attach = folder.path().join("attach.sock");
    let xdp = json!({"xdp": {
        "mode": "tc", "interfaces": ["lo"], "bpffs": bpffs.path(), "max_names": 50, "attach_socket": attach,
    }});
    let settings = settings(folder.path(), &xdp);
    // A single UDP thread, which two clients saturate.
    let server = on_cpu(0, || {
        Server::start(Some(&namespace), folder, OURS, &settings)
    })?;
    let running = Running { server, namespace };
    let prometheus = watch(&running.namespace)?;
    assert_found(&running, &prometheus, "fast_path_off", "attach.sock")?;

    let mut attacher = start_attacher(&running)?;
    assert_found(&running, &prometheus, "map_nearly_full", "without room")?;

    let file = running.folder().join("addresses/many.json");
    let addresses: Vec<Value> = (1..=20)
        .map(|last| json!({"address": format!("127.0.1.{last}"), "port": 53}))
        .collect();
    fs::write(&file, Value::Array(addresses).to_string())?;
    assert_found(
        &running,
        &prometheus,
        "too_many_addresses",
        "5 of them omitted",
    )?;
    fs::remove_file(&file)?;
    assert_gone(&running, "too_many_addresses")?;

    overload(&running)?;
    assert_found(&running, &prometheus, "sheds", "since the start")?;

    // An attacher that is lost before its programs answer leaves nothing attached.
    wait_for_fast_path(&running.namespace)?;
    attacher.kill(TIMEOUT)?;
    assert_found(&running, &prometheus, "attacher_lost", "attach.sock")
}

//----------- Parts for operators ----------------------------------------------

/// Holds a port, and answers HTTP requests there as a healthy server would, until `is_over`.
fn hold_port(namespace: &Namespace, port: u16, is_over: Arc<AtomicBool>) -> Result<()> {
    let listener = namespace.run(|| TcpListener::bind((Ipv4Addr::LOCALHOST, port)))??;
    // Ends with the process.
    thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let _ = stream.read(&mut [0; 4096]);
            let status = if is_over.load(Ordering::Relaxed) {
                "500 Internal Server Error"
            } else {
                "200 OK"
            };
            let reply = format!(
                "HTTP/1.1 {status}\r\ncontent-type: text/plain\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
            );
            let _ = stream.write_all(reply.as_bytes());
        }
    });
    Ok(())
}

/// Starts the server again with other settings.
fn restart(server: &mut Server, namespace: &Namespace, more: &Value) -> Result<()> {
    server.process().stop(TIMEOUT)?;
    server.change_settings(|settings| server::merge(settings, more))?;
    server.restart(Some(namespace))
}

#[test]
fn parts_for_operators_are_missed() -> Result<()> {
    requires!(namespaces, prometheus);
    let folder: TempDir = server::folder(RECORDS.as_bytes(), None)?;
    let control = json!({"control": {"socket": folder.path().join("control.sock")}});
    let jobs = folder.path().join("jobs");
    let mut running = Running::start_with(Namespace::new("o-parts")?, folder, &control)?;
    let prometheus = watch(&running.namespace)?;
    hold_port(&running.namespace, API_PORT + 1, Arc::default())?;
    let nowhere = running.folder().join("nowhere");
    let missing = json!({"api": {"port": API_PORT + 1}, "jobs_dir": nowhere});
    restart(&mut running.server, &running.namespace, &missing)?;
    assert_found(
        &running,
        &prometheus,
        "api_off",
        "cannot listen on 127.0.0.1",
    )?;
    assert_found(&running, &prometheus, "local_groups_off", "no such folder")?;
    fs::create_dir(&nowhere)?;
    assert_gone(&running, "local_groups_off")?;

    // A file where the folder of the socket should be.
    let socket = running.folder().join("records.json/control.sock");
    let lost = running.folder().join("missing.pem");
    let health = json!({"enabled": true, "port": 2345, "certificate_file": lost, "private_key_file": lost,
        "ca_file": lost});
    let missing = json!({"api": {"port": API_PORT}, "jobs_dir": jobs, "control": {"socket": socket},
        "health": health});
    restart(&mut running.server, &running.namespace, &missing)?;
    assert_found(
        &running,
        &prometheus,
        "control_off",
        "records.json/control.sock",
    )?;
    assert_found(&running, &prometheus, "health_off", "missing.pem")?;

    // Nobody reads at the socket.
    let tap = running.folder().join("tap.sock");
    let missing = json!({"health": {"enabled": false}, "dnstap": {"socket": tap}});
    restart(&mut running.server, &running.namespace, &missing)?;
    assert_found(&running, &prometheus, "dnstap_closed", "messages lost")
}

#[test]
fn missing_metrics_are_named() -> Result<()> {
    requires!(namespaces, prometheus);
    let namespace = Namespace::new("o-metrics")?;
    let is_over = Arc::new(AtomicBool::new(false));
    hold_port(&namespace, METRICS_PORT, is_over.clone())?;
    let folder = server::folder(RECORDS.as_bytes(), None)?;
    let settings = settings(folder.path(), &json!({}));
    let server = Server::start(Some(&namespace), folder, OURS, &settings)?;
    let running = Running { server, namespace };
    assert_in_status(&running, "metrics_off", "cannot listen on 127.0.0.1")?;
    // The metric is missing as well, so another alert than that of the condition must fire, which the row names.
    let prometheus = watch(&running.namespace)?;
    is_over.store(true, Ordering::Relaxed);
    prometheus.wait_for_alert("BoshDnsXdpDown")?;
    ensure!(
        Row::of("metrics_off")?
            .consequence
            .contains("BoshDnsXdpDown")
    );
    Ok(())
}
