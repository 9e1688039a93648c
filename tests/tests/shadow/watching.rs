//! Watching real packets of a real server.

use std::{
    fs,
    net::{Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
    path::PathBuf,
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use hickory_proto::rr::RecordType;
use nix::sys::signal::Signal;
use serde_json::json;
use whole_system_tests::{
    client::{ask_raw, ask_tcp_raw, query},
    namespace::Namespace,
    process::{capture, wait_until},
    requires,
    server::{self, Server},
    terminal::Terminal,
};

use crate::{
    double::{Double, PATIENCE, Shadow, count, unexplained},
    faults::write_atomically,
};

const LISTEN: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 53);

/// Returns the records of a version: four instances, one of which moves with every version.
fn records(version: u32) -> Vec<u8> {
    let last = version % 200 + 10;
    let rows: Vec<_> = (1..=4)
        .map(|number| {
            let last = if number == 4 { last } else { number };
            json!([
                format!("id-{number}"),
                "web",
                "net",
                "dep",
                format!("10.0.0.{last}"),
                "bosh",
                ["1"]
            ])
        })
        .collect();
    json!({
        "record_keys": ["id", "instance_group", "network", "deployment", "ip", "domain", "group_ids"],
        "record_infos": rows, "version": version,
    })
    .to_string()
    .into_bytes()
}

fn start(label: &str, extra: serde_json::Value) -> Result<(Namespace, Server)> {
    let namespace = Namespace::new(label)?;
    let folder = server::folder(&records(1), None)?;
    fs::create_dir_all(folder.path().join("addresses"))?;
    let further = json!([{"address": "::1", "port": 53}]).to_string();
    fs::write(folder.path().join("addresses/a.json"), further)?;
    let server = Server::start(Some(&namespace), folder, LISTEN, &extra)?;
    Ok((namespace, server))
}

/// Returns a query whose id is unlike others'.
fn message(name: &str, edns: Option<u16>) -> Result<Vec<u8>> {
    Ok(query(name, RecordType::A, edns)?.to_vec()?)
}

/// Both families and transports on `lo`, where the kernel shows each packet twice.
#[test]
fn every_packet_on_lo_counts_once() -> Result<()> {
    requires!(namespaces);
    let (namespace, server) = start("watchlo", json!({"xdp": {"mode": "off"}}))?;
    let folder = server.folder.path();
    let config = folder.join("config.json");
    let mut shadow = Shadow::start(&namespace, folder, &config, &["--for", "10m", "--clients"])?;
    shadow.wait_until_watching()?;
    let v6 = SocketAddr::from((Ipv6Addr::LOCALHOST, 53));
    namespace.run(|| -> Result<()> {
        for _ in 0..10 {
            for name in [
                "q-s0.q-g1.bosh.",
                "id-1.web.net.dep.bosh.",
                "upcheck.bosh-dns.",
            ] {
                for server in [LISTEN, v6] {
                    ask_raw(server, &message(name, None)?, PATIENCE)?;
                    ask_raw(server, &message(name, Some(1232))?, PATIENCE)?;
                    ask_tcp_raw(server, &message(name, None)?)?;
                }
            }
        }
        Ok(())
    })??;
    let (code, report) = shadow.stop()?;
    ensure!(code == 0, "{}", unexplained(&report));
    // The server's own up-checks are queries, too.
    let compared = count(&report, "/verdicts/compared");
    ensure!(compared >= 180, "{}", report["verdicts"]);
    ensure!(
        count(&report, "/verdicts/equal") == compared,
        "{}",
        report["verdicts"]
    );
    ensure!(count(&report, "/seen/queries") >= 180, "{}", report["seen"]);
    ensure!(count(&report, "/seen/copies") == 0, "{}", report["seen"]);
    ensure!(report["seen"]["sampled_share"] == 1.0, "{}", report["seen"]);
    ensure!(
        count(&report, "/latency/replies") == compared,
        "{}",
        report["latency"]
    );
    let process = &report["cpu"]["process"];
    ensure!(process[0] == server.pid(), "{process}");
    ensure!(process[1] == "bosh-dns-xdp", "{process}");
    Ok(())
}

/// A query on a veth is seen there; the share of interfaces depends on the transport.
#[test]
fn packets_of_other_interfaces_are_compared() -> Result<()> {
    requires!(namespaces);
    let namespace = Namespace::new("watchveth")?;
    let client = Namespace::new("watchclient")?;
    namespace.ip(&format!(
        "link add v0 type veth peer name v1 netns {}",
        client.name()
    ))?;
    namespace.ip("addr add 192.0.2.1/24 dev v0")?;
    namespace.ip("link set v0 up")?;
    client.ip("addr add 192.0.2.2/24 dev v1")?;
    client.ip("link set v1 up")?;
    namespace.wait_for_link("v0")?;
    let folder = server::folder(&records(1), None)?;
    let listen = SocketAddr::from(([192, 0, 2, 1], 53));
    let extra = json!({"xdp": {"mode": "off"}});
    let server = Server::start(Some(&namespace), folder, listen, &extra)?;
    let folder = server.folder.path();
    // The shadow reads another configuration, in which interfaces answer.
    let mut config = server.settings()?;
    config["xdp"] = json!({"mode": "auto"});
    let path = folder.join("shadow.json");
    fs::write(&path, config.to_string())?;
    let mut shadow = Shadow::start(&namespace, folder, &path, &[])?;
    shadow.wait_until_watching()?;
    client.run(|| -> Result<()> {
        for _ in 0..20 {
            ask_raw(listen, &message("q-s0.q-g1.bosh.", None)?, PATIENCE)?;
            ask_tcp_raw(listen, &message("q-s0.q-g1.bosh.", None)?)?;
        }
        Ok(())
    })??;
    let (code, report) = shadow.stop()?;
    ensure!(code == 0, "{}", unexplained(&report));
    ensure!(
        count(&report, "/interface/answered") == 20,
        "{}",
        report["interface"]
    );
    ensure!(
        count(&report, "/verdicts/equal") >= 40,
        "{}",
        report["verdicts"]
    );
    // No client's address without --clients.
    ensure!(!report.to_string().contains("192.0.2.2"), "{report}");
    Ok(())
}

/// A server at a wildcard, and another one at the same port of another machine, which knows no name: its clients are not
/// the observed server's.
#[test]
fn other_servers_are_not_compared() -> Result<()> {
    requires!(namespaces);
    const ASKED: u64 = 10;
    let namespace = Namespace::new("watchany")?;
    let other = Namespace::new("watchelse")?;
    namespace.ip(&format!(
        "link add v0 type veth peer name v1 netns {}",
        other.name()
    ))?;
    namespace.ip("addr add 192.0.2.1/24 dev v0")?;
    namespace.ip("link set v0 up")?;
    other.ip("addr add 192.0.2.2/24 dev v1")?;
    other.ip("link set v1 up")?;
    namespace.wait_for_link("v0")?;
    let elsewhere = SocketAddr::from(([192, 0, 2, 2], 53));
    let denies = |message: &[u8], _: bool| {
        let mut reply = message.to_vec();
        // QR, AA, RD, RA and NXDOMAIN.
        reply[2..4].copy_from_slice(&[0x85, 0x83]);
        Some(reply)
    };
    let _double = other.run(|| Double::start(elsewhere, Arc::new(denies)))??;
    let folder = server::folder(&records(1), None)?;
    let listen = SocketAddr::from((Ipv4Addr::UNSPECIFIED, 53));
    let extra = json!({"xdp": {"mode": "off"}});
    let server = Server::start(Some(&namespace), folder, listen, &extra)?;
    let folder = server.folder.path();
    let config = folder.join("config.json");
    let mut shadow = Shadow::start(&namespace, folder, &config, &[])?;
    shadow.wait_until_watching()?;
    namespace.run(|| -> Result<()> {
        for _ in 0..ASKED {
            let query = message("q-s0.q-g1.bosh.", None)?;
            ask_raw(elsewhere, &query, PATIENCE)?;
            for own in [[192, 0, 2, 1], [127, 0, 0, 77]] {
                ask_raw(SocketAddr::from((own, 53)), &query, PATIENCE)?;
            }
        }
        Ok(())
    })??;
    let (code, report) = shadow.stop()?;
    ensure!(code == 0, "{}", unexplained(&report));
    ensure!(
        count(&report, "/routes/0/1") >= 2 * ASKED,
        "{}",
        report["routes"]
    );
    Ok(())
}

/// Records that change five times per second: both servers read each file at another time, and no reply of the
/// unchanged server is called different.
#[test]
fn changing_records_cause_no_difference() -> Result<()> {
    requires!(namespaces);
    const VERSIONS: u32 = 100;
    let (namespace, server) = start("watchchange", json!({"xdp": {"mode": "off"}}))?;
    let folder = server.folder.path();
    let config = folder.join("config.json");
    let mut shadow = Shadow::start(&namespace, folder, &config, &["--cpu", "100"])?;
    shadow.wait_until_watching()?;
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| -> Result<()> {
        let client = scope.spawn(|| {
            namespace.run(|| -> Result<u32> {
                let mut asked = 0;
                while !is_over.load(Ordering::Relaxed) {
                    ask_raw(LISTEN, &message("q-s0.q-g1.bosh.", None)?, PATIENCE)?;
                    asked += 1;
                    thread::sleep(Duration::from_millis(2));
                }
                Ok(asked)
            })
        });
        for version in 2..VERSIONS {
            write_atomically(&folder.join("records.json"), &records(version))?;
            thread::sleep(Duration::from_millis(200));
        }
        is_over.store(true, Ordering::Relaxed);
        let asked = client.join().ok().context("the client panicked")???;
        ensure!(asked > 500, "{asked}");
        Ok(())
    })?;
    let (code, report) = shadow.stop()?;
    ensure!(
        code == 0,
        "{}\n{}",
        report["verdicts"],
        unexplained(&report)
    );
    ensure!(
        count(&report, "/verdicts/unjudged") == 0,
        "{}",
        report["verdicts"]
    );
    ensure!(
        count(&report, "/verdicts/compared") > 500,
        "{}",
        report["verdicts"]
    );
    Ok(())
}

/// A killed shadow leaves no socket, no program and no file.
#[test]
fn killed_shadow_leaves_nothing() -> Result<()> {
    requires!(namespaces);
    let (namespace, server) = start("watchkill", json!({"xdp": {"mode": "off"}}))?;
    let folder = server.folder.path();
    let config = folder.join("config.json");
    let output = tempfile::tempdir()?;
    let packet_sockets = || -> Result<usize> {
        let table = capture(namespace.command("ss")?.args(["-0", "-an", "-H"]))?;
        Ok(table.lines().filter(|line| line.contains("p_dgr")).count())
    };
    let files = names(folder)?;
    ensure!(packet_sockets()? == 0, "the namespace is new");
    let mut shadow = Shadow::start(&namespace, output.path(), &config, &[])?;
    shadow.wait_until_watching()?;
    ensure!(packet_sockets()? == 1, "the packet socket is visible");
    // No socket but that one: nothing is bound.
    let own = capture(Command::new("sh").args([
        "-c",
        &format!(
            "ls -l /proc/{}/fd | grep -c 'socket:'",
            shadow.process.pid()
        ),
    ]))?;
    let own: u32 = own.trim().parse()?;
    ensure!(own <= 4, "{own} sockets");
    shadow.process.kill(PATIENCE)?;
    wait_until("the sockets to be gone", PATIENCE, || {
        packet_sockets().is_ok_and(|left| left == 0)
    })?;
    ensure!(names(folder)? == files, "files changed");
    Ok(())
}

fn names(folder: &std::path::Path) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        names.push(format!(
            "{:?} {:?}",
            entry.file_name(),
            entry.metadata()?.len()
        ));
    }
    names.retain(|name| !name.contains("log"));
    names.sort();
    Ok(names)
}

/// CAP_NET_RAW suffices, and the error names it.
#[test]
fn only_cap_net_raw_is_needed() -> Result<()> {
    requires!(namespaces);
    let (namespace, server) = start("watchcap", json!({"xdp": {"mode": "off"}}))?;
    let folder = server.folder.path();
    capture(Command::new("chmod").args(["-R", "a+rX"]).arg(folder))?;
    let run = |capabilities: &[&str]| -> Result<std::process::Output> {
        let mut command = namespace.command("setpriv")?;
        command
            .args(["--reuid=65534", "--regid=65534", "--clear-groups"])
            .args(capabilities)
            .arg(server::program()?)
            .args(["shadow", "--for", "1s", "--config"])
            .arg(folder.join("config.json"));
        Ok(command.output()?)
    };
    let refused = run(&[])?;
    let error = String::from_utf8_lossy(&refused.stderr).into_owned();
    ensure!(refused.status.code() == Some(1), "{error}");
    ensure!(error.contains("CAP_NET_RAW and no other"), "{error}");
    let allowed = run(&["--inh-caps=+net_raw", "--ambient-caps=+net_raw"])?;
    let error = String::from_utf8_lossy(&allowed.stderr).into_owned();
    // 3 if not even the server's own up-check came in that second: nothing was compared.
    let printed = String::from_utf8_lossy(&allowed.stdout).into_owned();
    let is_empty = printed.contains("nothing was compared");
    let expected = if is_empty { 3 } else { 0 };
    ensure!(
        allowed.status.code() == Some(expected),
        "{printed}\n{error}"
    );
    Ok(())
}

/// Writes a configuration with other records than the server's, so that there are differences to show.
fn with_other_records(server: &Server) -> Result<PathBuf> {
    let folder = server.folder.path();
    fs::write(folder.join("other.json"), records(99))?;
    let mut config = server.settings()?;
    config["records_file"] = json!(folder.join("other.json"));
    let path = folder.join("shadow.json");
    fs::write(&path, config.to_string())?;
    Ok(path)
}

/// The page needs nothing else, and hashed reports show neither names nor addresses.
#[test]
fn shared_report_names_nobody() -> Result<()> {
    requires!(namespaces);
    let (namespace, server) = start("watchhash", json!({"xdp": {"mode": "off"}}))?;
    let folder = server.folder.path();
    let path = with_other_records(&server)?;
    let page = folder.join("report.html");
    let page_text = page.display().to_string();
    let address = LISTEN.to_string();
    let arguments = [
        "--ask",
        &address,
        "--rate",
        "1000",
        "--hash-names",
        "--html",
        &page_text,
    ];
    let mut shadow = Shadow::start(&namespace, folder, &path, &arguments)?;
    let (code, report) = shadow.finish()?;
    ensure!(code == 3, "{report}");
    let html = fs::read_to_string(&page)?;
    for text in [report.to_string(), html.clone()] {
        for secret in ["10.0.0.", "web.net", "id-1", "127.0.0.1"] {
            ensure!(!text.contains(secret), "{secret}: {text}");
        }
        ensure!(text.to_lowercase().contains("q-g1."), "{text}");
    }
    for outside in ["http:", "https:", "src=", "url(", "<script"] {
        ensure!(!html.contains(outside), "{outside}");
    }
    ensure!(
        html.contains("class=\"stack\"") && html.ends_with("</html>"),
        "{html}"
    );
    Ok(())
}

/// A client is in the report only with `--clients`, and with `--hash-names` only as a hash.
#[test]
fn clients_are_shown_on_request() -> Result<()> {
    requires!(namespaces);
    const CLIENT: &str = "127.0.0.77";
    let (namespace, server) = start("watchclients", json!({"xdp": {"mode": "off"}}))?;
    let folder = server.folder.path();
    let path = with_other_records(&server)?;
    let mut shadows = Vec::new();
    for (number, arguments) in [&[][..], &["--clients"], &["--clients", "--hash-names"]]
        .into_iter()
        .enumerate()
    {
        let page = folder.join(format!("{number}.html"));
        let page_text = page.display().to_string();
        let arguments = [arguments, &["--html", &page_text]].concat();
        let mut shadow = Shadow::start(&namespace, folder, &path, &arguments)?;
        shadow.wait_until_watched_by(number + 1)?;
        shadows.push((shadow, page));
    }
    let query = message("q-s0.q-g1.bosh.", None)?;
    namespace.run(|| -> Result<()> {
        let socket = UdpSocket::bind((CLIENT, 0))?;
        socket.set_read_timeout(Some(PATIENCE))?;
        socket.send_to(&query, LISTEN)?;
        socket.recv(&mut [0; 512])?;
        Ok(())
    })??;
    // All at once: each waits for its second judgement.
    for (shadow, _) in &shadows {
        shadow.process.signal(Signal::SIGINT)?;
    }
    let mut shown = Vec::new();
    for (shadow, page) in &mut shadows {
        let (code, report) = shadow.finish()?;
        ensure!(code == 3, "{report}");
        let client = &report["differences"][0]["examples"][0]["client"];
        let html = fs::read_to_string(page)?;
        ensure!(
            report.to_string().contains(CLIENT) == html.contains(CLIENT),
            "{html}"
        );
        shown.push((client.as_str().map(str::to_owned), html.contains(CLIENT)));
    }
    let [nobody, named, hashed] = <[_; 3]>::try_from(shown).ok().context("three reports")?;
    ensure!(nobody == (None, false), "{nobody:?}");
    ensure!(named == (Some(CLIENT.to_owned()), true), "{named:?}");
    let (Some(hash), false) = hashed else {
        anyhow::bail!("{hashed:?}");
    };
    ensure!(hash.starts_with('#'), "{hash}");
    Ok(())
}

/// Counts while it runs, then the report; neither is wider than a terminal.
#[test]
fn progress_is_shown_on_a_terminal() -> Result<()> {
    requires!(namespaces);
    const COLUMNS: usize = 80;
    let (namespace, server) = start("watchbar", json!({"xdp": {"mode": "off"}}))?;
    let mut command = namespace.command(server::program()?)?;
    command
        .args(["shadow", "--ask", "127.0.0.1", "--rate", "50", "--config"])
        .arg(server.folder.path().join("config.json"));
    let terminal = Terminal::start(command, (COLUMNS, 50))?;
    let (status, written) = terminal.finish(PATIENCE)?;
    ensure!(status.code() == Some(0), "{status}: {written}");
    let progress = "\r\x1b[K0 unexplained, 0 documented, 0 in transition, ";
    ensure!(written.matches(progress).count() > 1, "{written:?}");
    let (_, report) = written.rsplit_once("\x1b[K").context("no progress")?;
    ensure!(report.contains("no unexplained difference"), "{report}");
    for line in written.split(['\r', '\n']) {
        let is_path = line.contains("config.json");
        ensure!(is_path || line.chars().count() <= COLUMNS, "{line:?}");
    }
    Ok(())
}
