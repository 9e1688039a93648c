//! Selection of recursors: /etc/resolv.conf as it changes, IPv4 and IPv6, without excluded
//! addresses and the server's own.

use std::{
    fs, io,
    net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV6, UdpSocket},
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use hickory_proto::{op::ResponseCode, rr::RecordType};
use nix::{
    mount::{MsFlags, mount},
    sched::{CloneFlags, unshare},
};
use serde_json::{Value, json};
use tempfile::TempDir;
use whole_system_tests::{
    bpffs::Bpffs, client, metrics::wait_for_fast_path, namespace::Namespace, process::wait_until,
    requires,
};

use super::{
    lab::{LOCAL_NAME, Lab, RECORDS, ensure_code, loopback},
    scripted::Scripted,
};

/// Time limit for noticing a change, reached only on failure.
const LIMIT: Duration = Duration::from_secs(120);

/// Non-loopback addresses of the namespace, for resolv.conf.
const ADDRESSES: [&str; 5] = ["10.9.0.1", "10.9.0.2", "10.9.0.3", "10.9.0.9", "fd09::1"];

/// Returns address `n` of [`ADDRESSES`], on port 53.
fn address(n: usize) -> SocketAddr {
    SocketAddr::new(ADDRESSES[n].parse::<IpAddr>().expect("an address"), 53)
}

/// Returns the answer of the recursor at address `n` of [`ADDRESSES`].
fn answer(n: usize) -> Ipv4Addr {
    Ipv4Addr::new(192, 0, 2, n as u8)
}

/// Creates a namespace with all addresses.
fn addressed(label: &str) -> Result<Namespace> {
    let namespace = Namespace::new(label)?;
    for address in ADDRESSES {
        // Without nodad, an IPv6 address becomes usable only after a delay, even on lo.
        let nodad = if address.contains(':') { "nodad" } else { "" };
        namespace.ip(&format!("addr add {address} dev lo {nodad}"))?;
    }
    Ok(namespace)
}

/// A folder that a server sees as /etc.
pub(crate) struct Etc(TempDir);

impl Etc {
    /// Creates the folder with a resolv.conf.
    pub(crate) fn new(text: &str) -> Result<Self> {
        let etc = Self(TempDir::with_prefix("bdx-etc-")?);
        fs::write(etc.resolv_conf(), text)?;
        Ok(etc)
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.0.path().to_owned()
    }

    fn resolv_conf(&self) -> PathBuf {
        self.0.path().join("resolv.conf")
    }

    /// Replaces resolv.conf atomically, as resolvconf and DHCP clients do.
    fn replace(&self, text: &str) -> Result<()> {
        let new = self.0.path().join("resolv.conf.new");
        fs::write(&new, text)?;
        Ok(fs::rename(new, self.resolv_conf())?)
    }

    /// Starts a server without configured recursors, with this folder as /etc.
    fn server<'a>(&self, namespace: &'a Namespace, extra: &Value) -> Result<Lab<'a>> {
        let mut settings = json!({"address": ADDRESSES[3]});
        whole_system_tests::server::merge(&mut settings, extra);
        let etc = self.0.path().to_owned();
        Lab::start_prepared(namespace, &[], &settings, |command| {
            // SAFETY: plain system calls, allowed between fork and exec.
            unsafe { command.pre_exec(move || show_as_etc(&etc)) };
        })
    }
}

/// Moves this process into a mount namespace in which `folder` is /etc.
pub(crate) fn show_as_etc(folder: &Path) -> io::Result<()> {
    unshare(CloneFlags::CLONE_NEWNS)?;
    let none = None::<&str>;
    // Keeps the following mounts out of other mount namespaces.
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)?;
    Ok(mount(Some(folder), "/etc", none, MsFlags::MS_BIND, none)?)
}

/// Waits until answers come from the recursor at address `n`.
fn wait_for(lab: &Lab<'_>, n: usize) -> Result<()> {
    let answered = || {
        let reply = lab.ask_for("www.test.", RecordType::A);
        reply.is_ok_and(|reply| client::addresses(&reply) == [answer(n)])
    };
    wait_until(&format!("answers of {}", ADDRESSES[n]), LIMIT, answered)
        .map_err(|error| error.context(lab.server.log()))
}

#[test]
fn resolv_conf_changes_are_followed() -> Result<()> {
    requires!(namespaces);
    let namespace = addressed("resolv")?;
    let recursors = [0, 1, 2, 4].map(|n| Scripted::answering(&namespace, address(n), answer(n)));
    let [first, excluded, third, sixth] = recursors;
    let (first, excluded, third, sixth) = (first?, excluded?, third?, sixth?);
    // The server's own address and loopback, an excluded address, and a usable one.
    let etc = Etc::new(
        "search test\nnameserver 10.9.0.9\nnameserver 127.0.0.53\nnameserver 10.9.0.2\nnameserver 10.9.0.1\n",
    )?;
    let lab = etc.server(&namespace, &json!({"excluded_recursors": ["10.9.0.2"]}))?;
    wait_for(&lab, 0)?;
    etc.replace("nameserver 10.9.0.2\nnameserver fd09::1\n")?;
    wait_for(&lab, 4)?;
    fs::write(etc.resolv_conf(), "nameserver 10.9.0.3\n")?;
    wait_for(&lab, 2)?;

    // A file without nameservers changes nothing: it is probably being rewritten.
    let asked = third.count();
    fs::remove_file(etc.resolv_conf())?;
    lab.server.wait_for_log("recursors stay in use")?;
    let reply = lab.ask_for("www.test.", RecordType::A)?;
    ensure!(client::addresses(&reply) == [answer(2)], "{reply}");
    ensure!(third.count() > asked);
    etc.replace("nameserver 10.9.0.1\n")?;
    wait_for(&lab, 0)?;

    ensure!(excluded.count() == 0, "the excluded recursor was queried");
    let asked = first.asked().len() + third.asked().len() + sixth.asked().len();
    ensure!(asked < 1000, "{asked} queries: the server queried itself");
    Ok(())
}

#[test]
fn exclusions_apply_to_configured_recursors() -> Result<()> {
    requires!(namespaces);
    let namespace = addressed("exclude")?;
    let excluded = Scripted::answering(&namespace, address(0), answer(0))?;
    let sixth = Scripted::answering(&namespace, address(4), answer(4))?;
    let settings = json!({
        "recursors": ["10.9.0.1:53", "[fd09::1]:53"],
        "excluded_recursors": ["10.9.0.1"],
    });
    let lab = Lab::start(&namespace, &[], &settings)?;
    for by_tcp in [false, true] {
        let query = client::query("www.test.", RecordType::A, None)?;
        let reply = if by_tcp {
            lab.ask_tcp(&query)?
        } else {
            lab.ask(&query)?
        };
        ensure!(client::addresses(&reply) == [answer(4)], "{reply}");
    }
    let by_tcp: Vec<bool> = sixth.asked().iter().map(|asked| asked.by_tcp).collect();
    ensure!(
        by_tcp == [false, true],
        "the recursor is queried over the client's transport: {by_tcp:?}"
    );
    ensure!(excluded.count() == 0, "the excluded recursor was queried");
    Ok(())
}

#[test]
fn missing_recursors_give_servfail() -> Result<()> {
    requires!(namespaces);
    let namespace = addressed("nobody")?;
    let etc = Etc::new("# none\n")?;
    let lab = etc.server(&namespace, &json!({}))?;
    let reply = lab.ask_for("www.test.", RecordType::A)?;
    ensure_code(&reply, ResponseCode::ServFail)?;
    let _late = Scripted::answering(&namespace, address(0), answer(0))?;
    etc.replace("nameserver 10.9.0.1\n")?;
    wait_for(&lab, 0)
}

#[test]
fn wildcard_listener_excludes_own_addresses() -> Result<()> {
    requires!(namespaces);
    let namespace = addressed("wildcard")?;
    // The server's own address, as on every BOSH VM, although it is not in the configuration.
    let etc = Etc::new("nameserver 10.9.0.9\nnameserver fd09::1\n")?;
    let lab = etc.server(&namespace, &json!({"address": "0.0.0.0"}))?;
    let reply = lab.ask_for("www.test.", RecordType::A)?;
    ensure_code(&reply, ResponseCode::ServFail)?;
    let external = || lab.metric("boshdns_requests_external_total", "");
    // The metrics may lag behind the first answers.
    wait_until("the query to be counted", LIMIT, || {
        external().is_ok_and(|queries| queries > 0)
    })?;
    // On a busy machine a client may retry; a loop would cause thousands of queries.
    let queries = external()?;
    ensure!(queries < 10, "one query became {queries}");
    Ok(())
}

#[test]
fn unknown_host_names_occupy_no_threads() -> Result<()> {
    /// Queries for each unknown host name.
    const QUERIES: u16 = 100;
    requires!(namespaces);
    let namespace = addressed("hosts")?;
    let resolver = Scripted::silent(&namespace, address(0))?;
    let etc = Etc::new(&format!("nameserver {}\n", ADDRESSES[0]))?;
    let settings = json!({
        "recursors": ["ns.example.test:53"],
        "handlers": [{"domain": "http.", "source": {"type": "http", "url": "http://www.example.test/"}}],
    });
    let lab = etc.server(&namespace, &settings)?;
    let folder = format!("/proc/{}/task", lab.server.pid());
    let threads = || -> Result<usize> { Ok(fs::read_dir(&folder)?.count()) };
    let before = threads()?;
    namespace.run(|| -> Result<()> {
        let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
        for number in 0..QUERIES {
            for domain in ["test", "http"] {
                let query = client::query(&format!("n{number}.{domain}."), RecordType::A, None)?;
                socket.send_to(&query.to_vec()?, lab.server.address)?;
            }
        }
        Ok(())
    })??;
    wait_until("the queries to wait", LIMIT, || {
        lab.metric("bosh_dns_xdp_requests_in_flight", "")
            .is_ok_and(|waiting| waiting == 2 * u64::from(QUERIES))
    })?;
    // Threads that read files may come and go.
    let during = threads()?;
    ensure!(
        during <= before + 8,
        "{during} threads, {before} before the queries"
    );
    let new = RECORDS
        .replace("10.0.0.1", "10.0.0.2")
        .replace("\"version\": 1", "\"version\": 2");
    let file = lab.server.folder.path().join("records.json");
    fs::write(file.with_extension("new"), new)?;
    fs::rename(file.with_extension("new"), &file)?;
    wait_until("the new records", LIMIT, || {
        let reply = lab.ask_for(LOCAL_NAME, RecordType::A);
        reply.is_ok_and(|reply| client::addresses(&reply) == [Ipv4Addr::new(10, 0, 0, 2)])
    })?;
    let look_ups = resolver.count();
    ensure!((1..50).contains(&look_ups), "{look_ups} look-ups");
    Ok(())
}

#[test]
fn link_local_recursors_are_asked() -> Result<()> {
    requires!(namespaces);
    let namespace = Namespace::new("linklocal")?;
    namespace.ip("addr add fe80::2/64 dev lo nodad")?;
    let index = namespace.run(|| nix::net::if_::if_nametoindex("lo"))??;
    let at = SocketAddrV6::new("fe80::2".parse()?, 53, 0, index);
    let _recursor = Scripted::answering(&namespace, at.into(), answer(1))?;
    for (recursor, rcode) in [
        ("[fe80::2%lo]:53", ResponseCode::NoError),
        ("[fe80::2%missing]:53", ResponseCode::ServFail),
    ] {
        let lab = Lab::start(&namespace, &[], &json!({"recursors": [recursor]}))?;
        let reply = lab.ask_for("www.test.", RecordType::A)?;
        ensure!(reply.metadata.response_code == rcode, "{recursor}: {reply}");
    }
    Ok(())
}

#[test]
fn status_lists_recursors_by_preference() -> Result<()> {
    requires!(namespaces);
    let namespace = Namespace::new("preferred")?;
    // The one configured first never replies.
    let [_silent, _good] = [
        Scripted::start(&namespace, loopback(10), |_| Vec::new())?,
        Scripted::start(&namespace, loopback(11), |asked| {
            vec![asked.answer(Ipv4Addr::new(192, 0, 2, 1), 0).into()]
        })?,
    ];
    let sockets = TempDir::with_prefix("bdx-control-")?;
    let control = json!({"socket": sockets.path().join("control.sock")});
    let settings =
        json!({"recursor_selection": "smart", "recursor_timeout": "100ms", "control": control});
    let lab = Lab::start(&namespace, &[loopback(10), loopback(11)], &settings)?;
    let mut asked = 0;
    wait_until("the second to be preferred", LIMIT, || {
        asked += 1;
        let reply = lab.ask_for(&format!("n{asked}.example.com."), RecordType::A);
        let status = lab.cli(&["status", "--json"]);
        let status = status
            .ok()
            .and_then(|(_, text, _)| serde_json::from_str::<Value>(&text).ok());
        let first =
            status.and_then(|status| Some(status["recursors"][0]["address"].as_str()?.to_owned()));
        reply.is_ok() && first.is_some_and(|first| first.starts_with("127.0.0.11"))
    })
    .with_context(|| format!("{:?}", lab.cli(&["status"])))?;
    let (_, text, _) = lab.cli(&["status"])?;
    let rows: Vec<Vec<&str>> = text
        .lines()
        .map(|line| line.split_whitespace().collect())
        .filter(|row: &Vec<_>| row.len() > 1)
        .collect();
    let first = rows.iter().position(|row| row[0].starts_with("127.0.0.11"));
    let second = rows.iter().position(|row| row[0].starts_with("127.0.0.10"));
    ensure!(
        first.is_some() && first.map(|row| row + 1) == second,
        "{text}"
    );
    let roles: Vec<&str> = [first, second]
        .into_iter()
        .flatten()
        .map(|row| rows[row][1])
        .collect();
    ensure!(roles == ["first", "next"], "{text}");
    Ok(())
}

#[test]
fn replaced_nameservers_void_answers() -> Result<()> {
    requires!(namespaces, bpf);
    let namespace = addressed("void")?;
    let recursors = [0, 1].map(|n| Scripted::answering(&namespace, address(n), answer(n)));
    let [_one, _other] = recursors.map(|recursor| recursor.expect("free addresses"));
    let etc = Etc::new("nameserver 10.9.0.1\n")?;
    let bpffs = Bpffs::new()?;
    let lab = etc.server(
        &namespace,
        &json!({
            "cache": {"enabled": true},
            "control": {"socket": bpffs.path().with_extension("sock")},
            "xdp": {"mode": "tc", "interfaces": ["lo"], "bpffs": bpffs.path()},
        }),
    )?;
    wait_for_fast_path(&namespace).with_context(|| lab.server.log())?;
    wait_for(&lab, 0)?;
    let by_interface = || super::interface_cache::hits(&lab).unwrap_or(0);
    wait_until("an answer from the interface", LIMIT, || {
        let before = by_interface();
        lab.ask_for("www.test.", RecordType::A).is_ok() && by_interface() > before
    })?;
    // The answer is valid for five minutes, but only among the servers that gave it.
    for n in [1, 0] {
        etc.replace(&format!("nameserver {}\n", ADDRESSES[n]))?;
        wait_for(&lab, n)?;
        for _ in 0..5 {
            let reply = lab.ask_for("www.test.", RecordType::A)?;
            ensure!(client::addresses(&reply) == [answer(n)], "{reply}");
        }
    }
    Ok(())
}
