//! Files that are invalid at the start, and a FIFO in place of a file, which would block its reader.

use std::{fs, net::IpAddr, process::Command, time::Duration};

use anyhow::{Result, ensure};
use hickory_proto::rr::RecordType;
use nix::{
    sys::{signal::Signal, stat::Mode},
    unistd::mkfifo,
};
use serde_json::json;
use whole_system_tests::{
    client::{addresses, ask, query},
    namespace::Namespace,
    process::wait_until,
    requires,
    server::{self, Server},
};

use crate::running::RECORDS;

/// Generous time limit for noticing a file change.
const TIMEOUT: Duration = Duration::from_secs(120);

#[test]
fn fifo_alias_file_is_harmless() -> Result<()> {
    let namespace = Namespace::new("fifo")?;
    let folder = server::folder(
        RECORDS.as_bytes(),
        Some(br#"{"db.alias": ["*.db.net.dep.bosh"]}"#),
    )?;
    let mut server = Server::start(
        Some(&namespace),
        folder,
        ([127, 0, 0, 1], 53).into(),
        &json!({"xdp": {"mode": "off"}}),
    )?;
    mkfifo(&server.folder.path().join("aliases/zz.json"), Mode::S_IRWXU)?;
    let moved = RECORDS.replace("10.0.0.4", "10.0.0.44");
    fs::write(server.folder.path().join("records.json"), moved)?;
    let answer = |server: &Server, name: &str| -> Result<Vec<_>> {
        namespace.run(|| {
            Ok(addresses(&ask(
                server.address,
                &query(name, RecordType::A, None)?,
            )?))
        })?
    };
    let is_moved = |server: &Server| {
        ["q-s0.db.net.dep.bosh.", "db.alias."].iter().all(|name| {
            answer(server, name).is_ok_and(|found| found == [IpAddr::from([10, 0, 0, 44])])
        })
    };
    wait_until("the new records", TIMEOUT, || is_moved(&server))?;
    server.wait_for_log("zz.json is not a regular file")?;
    server.process().signal(Signal::SIGTERM)?;
    let status = server.process().wait(TIMEOUT)?;
    ensure!(status.success(), "{status}");
    // The same with the FIFO present at the start.
    server.restart(Some(&namespace))?;
    ensure!(is_moved(&server), "{}", server.log());
    Ok(())
}

#[test]
fn invalid_files_keep_dns_up() -> Result<()> {
    requires!(namespaces);
    let namespace = Namespace::new("invalid")?;
    let folder = server::folder(
        RECORDS.as_bytes(),
        Some(br#"{"db.alias": ["*.db.net.dep.bosh"]}"#),
    )?;
    let write = |file: &str, text: &str| fs::write(folder.path().join(file), text);
    fs::create_dir(folder.path().join("consul"))?;
    write("aliases/wrong.json", "")?;
    write(
        "addresses/good.json",
        r#"[{"address": "127.0.0.7", "port": 53}]"#,
    )?;
    write("addresses/wrong.json", r#"[{"address": "127.0.0.8"}]"#)?;
    write(
        "consul/good.json",
        r#"{"service": {"name": "web", "address": "10.9.0.1", "port": 80}}"#,
    )?;
    write("consul/wrong.json", r#"{"service": {"name": 7}}"#)?;
    let definitions = folder.path().join("consul/*.json").display().to_string();
    let settings = json!({
        "xdp": {"mode": "off"}, "metrics": {"enabled": true},
        "consul": {"node_name": "here", "advertise_addr": "10.9.0.9", "sources": {"files": [definitions]}},
    });
    let server = Server::start(
        Some(&namespace),
        folder,
        ([127, 0, 0, 1], 53).into(),
        &settings,
    )?;
    let answer = |address: [u8; 4], name: &str| -> Result<Vec<IpAddr>> {
        let asked = query(name, RecordType::A, None)?;
        namespace.run(|| Ok(addresses(&ask((address, 53).into(), &asked)?)))?
    };
    for address in [[127, 0, 0, 1], [127, 0, 0, 7]] {
        for name in ["q-s0.q-g2.bosh.", "db.alias."] {
            ensure!(
                answer(address, name)? == [IpAddr::from([10, 0, 0, 4])],
                "{name}: {}",
                server.log()
            );
        }
    }
    ensure!(
        answer([127, 0, 0, 1], "web.service.consul.")? == [IpAddr::from([10, 9, 0, 1])],
        "{}",
        server.log()
    );
    let mut curl = namespace.command("curl")?;
    let ready = curl
        .args(["-sS", "--max-time", "10", "http://127.0.0.1:53088/readyz"])
        .output()?;
    let ready = String::from_utf8(ready.stdout)?;
    let config = server.folder.path().join("config.json");
    let check = Command::new(server::program()?)
        .arg("check")
        .arg("--config")
        .arg(&config)
        .output()?;
    ensure!(check.status.code() == Some(1), "{check:?}");
    let check = String::from_utf8(check.stderr)?;
    for (kind, problem) in [
        ("aliases", "aliases/wrong.json: line 1, column 0"),
        (
            "addresses",
            "addresses/wrong.json: addresses[0].port: is missing",
        ),
        ("Consul files", "consul/wrong.json: service[0].name: is 7"),
    ] {
        let line = ready
            .lines()
            .find(|line| line.starts_with(&format!("fail {kind}: ")));
        ensure!(
            line.is_some_and(|line| line.contains(problem)),
            "{problem}: {ready}"
        );
        ensure!(check.contains(problem), "{problem}: {check}");
        server.wait_for_log(problem)?;
    }
    // Once the files are valid, everything is served.
    let write = |file: &str, text: &str| fs::write(server.folder.path().join(file), text);
    write(
        "aliases/wrong.json",
        r#"{"late.alias": ["*.db.net.dep.bosh"]}"#,
    )?;
    write(
        "addresses/wrong.json",
        r#"[{"address": "127.0.0.8", "port": 53}]"#,
    )?;
    write(
        "consul/wrong.json",
        r#"{"service": {"name": "late", "address": "10.9.0.2", "port": 80}}"#,
    )?;
    wait_until("the cured files", TIMEOUT, || {
        answer([127, 0, 0, 8], "late.alias.")
            .is_ok_and(|found| found == [IpAddr::from([10, 0, 0, 4])])
            && answer([127, 0, 0, 1], "late.service.consul.")
                .is_ok_and(|found| found == [IpAddr::from([10, 9, 0, 2])])
    })
}

#[test]
fn invalid_handlers_end_start() -> Result<()> {
    let folder = server::folder(RECORDS.as_bytes(), None)?;
    fs::write(
        folder.path().join("handlers/wrong.json"),
        r#"[{"domain": "corp.example."}]"#,
    )?;
    let mut settings = server::config(folder.path(), ([127, 0, 0, 1], 5399).into());
    server::merge(&mut settings, &json!({"xdp": {"mode": "off"}}));
    let config = folder.path().join("config.json");
    fs::write(&config, settings.to_string())?;
    for command in ["check", "run"] {
        let output = Command::new(server::program()?)
            .arg(command)
            .arg("--config")
            .arg(&config)
            .output()?;
        // The server's log is on standard output.
        let problem = String::from_utf8([output.stdout, output.stderr].concat())?;
        ensure!(output.status.code() == Some(1), "{command}: {problem}");
        ensure!(
            problem.contains("handlers/wrong.json: handlers[0].source.type: is missing"),
            "{command}: {problem}"
        );
    }
    Ok(())
}
