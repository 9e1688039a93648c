//! A FIFO in place of a file, which would block its reader.

use std::{fs, net::IpAddr, time::Duration};

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
    server::{self, Server},
};

use crate::running::RECORDS;

/// Generous time limit for noticing a file change.
const PATIENCE: Duration = Duration::from_secs(20);

#[test]
fn fifo_alias_file_is_harmless() -> Result<()> {
    let namespace = Namespace::new("fifo")?;
    let folder = server::folder(RECORDS.as_bytes(), Some(br#"{"db.alias": ["*.db.net.dep.bosh"]}"#))?;
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
        namespace.run(|| Ok(addresses(&ask(server.address, &query(name, RecordType::A, None)?)?)))?
    };
    let is_moved = |server: &Server| {
        ["q-s0.db.net.dep.bosh.", "db.alias."]
            .iter()
            .all(|name| answer(server, name).is_ok_and(|found| found == [IpAddr::from([10, 0, 0, 44])]))
    };
    wait_until("the new records", PATIENCE, || is_moved(&server))?;
    ensure!(server.log().contains("zz.json is not a regular file"), "{}", server.log());
    server.process().signal(Signal::SIGTERM)?;
    let status = server.process().wait(PATIENCE)?;
    ensure!(status.success(), "{status}");
    // The same with the FIFO present at the start.
    server.restart(Some(&namespace))?;
    ensure!(is_moved(&server), "{}", server.log());
    Ok(())
}
