//! Files that change under a running server: served data, log messages, fallback to the last good
//! state.

use std::{
    fs,
    net::SocketAddr,
    path::Path,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
    time::Duration,
};

use anyhow::{Result, ensure};
use hickory_proto::{op::ResponseCode, rr::RecordType};
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use whole_system_tests::{
    client, fleet,
    namespace::Namespace,
    process::wait_until,
    requires,
    server::{Server, folder},
};

/// Listen address of every server here, in a private namespace.
const ADDRESS: SocketAddr =
    SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 5353);

/// Time limit that is reached only on failure.
const LIMIT: Duration = Duration::from_secs(120);

/// A name whose answers reveal the served version of the records.
const NAME: &str = "q-s0.q-g1.bosh.";

/// Returns records.json with the instances 10.0.`third`.1 to .`count` in group 1.
fn records(third: u8, count: u8) -> Vec<u8> {
    fleet::records(
        third.into(),
        (1..=count).map(|number| (1, [10, 0, third, number])),
    )
}

/// Starts a server without a fast path on three instances 10.0.1.x.
fn start(namespace: &Namespace, extra: &Value) -> Result<Server> {
    let mut config = json!({"xdp": {"mode": "off"}});
    whole_system_tests::server::merge(&mut config, extra);
    Server::start(
        Some(namespace),
        folder(&records(1, 3), None)?,
        ADDRESS,
        &config,
    )
}

/// Returns the third byte of the answers to [`NAME`]; fails unless it is the same in all of them.
fn served(at: SocketAddr) -> Result<u8> {
    let reply = client::ask(at, &client::query(NAME, RecordType::A, None)?)?;
    let thirds: Vec<u8> = client::addresses(&reply)
        .iter()
        .filter_map(|address| match address {
            std::net::IpAddr::V4(address) => Some(address.octets()[2]),
            std::net::IpAddr::V6(_) => None,
        })
        .collect();
    ensure!(!thirds.is_empty(), "no answer: {reply}");
    ensure!(
        thirds.iter().all(|third| *third == thirds[0]),
        "answers of two files: {reply}"
    );
    Ok(thirds[0])
}

/// Waits until 10.0.`third`.x are served.
fn wait_for(namespace: &Namespace, third: u8) -> Result<()> {
    namespace.run(|| {
        wait_until("the new records", LIMIT, || {
            served(ADDRESS).is_ok_and(|found| found == third)
        })
    })?
}

/// Replaces a file atomically, as the BOSH agent does.
fn replace(path: &Path, contents: &[u8]) -> Result<()> {
    let beside = path.with_extension("new");
    fs::write(&beside, contents)?;
    Ok(fs::rename(beside, path)?)
}

#[test]
fn rewritten_records_are_served() -> Result<()> {
    requires!(namespaces);
    let namespace = Namespace::new("live")?;
    let server = start(&namespace, &json!({}))?;
    let file = server.folder.path().join("records.json");
    wait_for(&namespace, 1)?;
    replace(&file, &records(2, 3))?;
    wait_for(&namespace, 2)?;
    fs::write(&file, records(3, 3))?;
    wait_for(&namespace, 3)?;
    // A lower version is accepted like any other.
    replace(&file, &records(1, 3))?;
    wait_for(&namespace, 1)
}

#[test]
fn broken_records_keep_old_answers() -> Result<()> {
    requires!(namespaces);
    let namespace = Namespace::new("broken")?;
    let server = start(&namespace, &json!({}))?;
    let file = server.folder.path().join("records.json");
    replace(&file, b"{\"version\": 5,\n \"record_keys\": [\"id\"")?;
    server.wait_for_log(&format!("{}: line 2, column", file.display()))?;
    server.wait_for_log("the current records stay in use")?;
    ensure!(namespace.run(|| served(ADDRESS))?? == 1);
    fs::remove_file(&file)?;
    server.wait_for_log("cannot be read")?;
    ensure!(namespace.run(|| served(ADDRESS))?? == 1);
    replace(&file, &records(4, 3))?;
    wait_for(&namespace, 4)
}

#[test]
fn record_changes_lose_no_answer() -> Result<()> {
    requires!(namespaces);
    let namespace = Namespace::new("load")?;
    let server = start(&namespace, &json!({}))?;
    let file = server.folder.path().join("records.json");
    let (done, asked) = (AtomicBool::new(false), AtomicU64::new(0));
    let ask = || -> Result<()> {
        while !done.load(Ordering::Relaxed) {
            // Fails on a lost reply, an empty one, and a mix of two files.
            let third = served(ADDRESS)?;
            ensure!((1..=20).contains(&third));
            asked.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    };
    thread::scope(|scope| -> Result<()> {
        let clients: Vec<_> = (0..3)
            .map(|_| scope.spawn(|| namespace.run(ask)?))
            .collect();
        let changing = (|| {
            for third in 2..=20 {
                replace(&file, &records(third, 3))?;
                thread::sleep(Duration::from_millis(40));
            }
            wait_for(&namespace, 20)?;
            wait_until("queries enough for a result", LIMIT, || {
                asked.load(Ordering::Relaxed) > 100
            })
        })();
        done.store(true, Ordering::Relaxed);
        for client in clients {
            client
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        }
        changing
    })
}

#[test]
fn broken_alias_files_are_ignored() -> Result<()> {
    requires!(namespaces);
    let namespace = Namespace::new("alias")?;
    let server = start(&namespace, &json!({}))?;
    let ask = |name: &str| -> Result<(ResponseCode, usize)> {
        let reply = namespace
            .run(|| client::ask(ADDRESS, &client::query(name, RecordType::A, None)?))??;
        Ok((
            reply.metadata.response_code,
            client::addresses(&reply).len(),
        ))
    };
    ensure!(ask("web.alias.")?.0 == ResponseCode::Refused);
    let file = server.folder.path().join("aliases/web.json");
    replace(&file, br#"{"web.alias": ["*.web-1.default.dep.bosh"]}"#)?;
    wait_until("the alias", LIMIT, || {
        ask("web.alias.").is_ok_and(|found| found == (ResponseCode::NoError, 3))
    })?;
    replace(&file, br#"{"web.alias": "no list"}"#)?;
    server.wait_for_log("the current aliases stay in use")?;
    ensure!(ask("web.alias.")? == (ResponseCode::NoError, 3));
    fs::remove_file(&file)?;
    wait_until("the alias to go", LIMIT, || {
        ask("web.alias.").is_ok_and(|(rcode, _)| rcode == ResponseCode::Refused)
    })
}

#[test]
fn addresses_files_are_followed() -> Result<()> {
    requires!(namespaces);
    let namespace = Namespace::new("addresses")?;
    let server = start(&namespace, &json!({}))?;
    let further: SocketAddr = "127.0.0.7:5354".parse()?;
    let file = server.folder.path().join("addresses/more.json");
    replace(&file, br#"[{"address": "127.0.0.7", "port": 5354}]"#)?;
    namespace.run(|| wait_until("the new address", LIMIT, || served(further).is_ok()))??;
    replace(&file, b"[{}]")?;
    server.wait_for_log("the current listen addresses stay in use")?;
    ensure!(namespace.run(|| served(further))?.is_ok());
    fs::remove_file(&file)?;
    let message = client::query(NAME, RecordType::A, None)?.to_vec()?;
    let gone = || client::ask_raw(further, &message, Duration::from_millis(200)).is_err();
    namespace.run(|| wait_until("the address to go", LIMIT, gone))??;
    ensure!(namespace.run(|| served(ADDRESS))?.is_ok());
    Ok(())
}

#[test]
fn wildcards_of_both_families_coexist() -> Result<()> {
    requires!(namespaces);
    let namespace = Namespace::new("wildcards")?;
    let server = start(&namespace, &json!({"address": "0.0.0.0"}))?;
    let file = server.folder.path().join("addresses/v6.json");
    replace(&file, br#"[{"address": "::", "port": 5353}]"#)?;
    let by_v6: SocketAddr = "[::1]:5353".parse()?;
    namespace.run(|| wait_until("IPv6", LIMIT, || served(by_v6).is_ok()))??;
    ensure!(namespace.run(|| served(ADDRESS))?? == namespace.run(|| served(by_v6))??);
    Ok(())
}

#[test]
fn sighup_reloads_and_reports_restarts() -> Result<()> {
    requires!(namespaces);
    let namespace = Namespace::new("hup")?;
    let mut server = start(&namespace, &json!({}))?;
    let other = server.folder.path().join("other.json");
    fs::write(&other, records(9, 2))?;
    server.change_settings(|settings| {
        settings["records_file"] = json!(other);
        settings["port"] = json!(5355);
    })?;
    server.process().signal(Signal::SIGHUP)?;
    wait_for(&namespace, 9)?;
    server.wait_for_log("only after a restart: address, port")?;
    fs::write(server.config_file(), b"{\"port\": ")?;
    server.process().signal(Signal::SIGHUP)?;
    server.wait_for_log("the current configuration stays in use")?;
    ensure!(namespace.run(|| served(ADDRESS))?? == 9);
    Ok(())
}

#[test]
fn signals_stop_server_cleanly() -> Result<()> {
    requires!(namespaces);
    for signal in [Signal::SIGTERM, Signal::SIGINT] {
        let namespace = Namespace::new("end")?;
        let mut server = start(&namespace, &json!({}))?;
        server.process().signal(signal)?;
        let status = server.process().wait(LIMIT)?;
        ensure!(
            status.code() == Some(0),
            "{signal}: {status}\n{}",
            server.log()
        );
    }
    Ok(())
}

#[test]
fn missing_fast_path_is_reported() -> Result<()> {
    requires!(namespaces);
    let namespace = Namespace::new("plain")?;
    let server = start(&namespace, &json!({}))?;
    server.wait_for_log("fast path off: xdp.mode is off")?;
    ensure!(namespace.run(|| served(ADDRESS))?? == 1);
    Ok(())
}
