//! Listen addresses that are unavailable at the start or lost while the server runs.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use hickory_proto::rr::RecordType;
use serde_json::json;
use whole_system_tests::{
    client,
    namespace::Namespace,
    process::wait_until,
    requires,
    server::{self, Server},
};

use crate::running::RECORDS;

/// An address that remains available.
const STAYS: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(10, 9, 0, 1)), 53);
/// An address that is removed and restored.
const GOES: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(10, 9, 1, 1)), 53);

#[test]
fn lost_address_stops_no_server() -> Result<()> {
    requires!(namespaces);
    let namespace = Namespace::new("lost")?;
    for address in ["10.9.0.1/32", "10.9.1.1/32"] {
        namespace.ip(&["addr", "add", address, "dev", "lo"])?;
    }
    let folder = server::folder(RECORDS.as_bytes(), None)?;
    std::fs::write(
        folder.path().join("addresses/more.json"),
        r#"[{"address": "10.9.1.1", "port": 53}]"#,
    )?;
    let settings = json!({"xdp": {"mode": "off"}, "metrics": {"enabled": true}});
    let mut server = Server::start(Some(&namespace), folder, STAYS, &settings)?;
    let query = client::query("q-s0.q-g1.bosh.", RecordType::A, None)?.to_vec()?;
    let answers = |address| {
        let asked = || client::ask_raw(address, &query, Duration::from_secs(5)).is_ok();
        namespace.run(asked).unwrap_or(false)
    };
    // The addresses are listened on one after the other.
    wait_until("both addresses", Duration::from_secs(60), || {
        answers(STAYS) && answers(GOES)
    })?;

    // Lost while the server runs.
    namespace.ip(&["addr", "del", "10.9.1.1/32", "dev", "lo"])?;
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(36) {
        ensure!(
            server.process().ended()?.is_none(),
            "the server ended:\n{}",
            server.log()
        );
        ensure!(answers(STAYS), "{}", server.log());
        std::thread::sleep(Duration::from_millis(500));
    }
    server.wait_for_log("10.9.1.1:53")?;

    // Missing at the start, available later.
    server.process().stop(Duration::from_secs(60))?;
    server.restart(Some(&namespace))?;
    ensure!(answers(STAYS) && !answers(GOES), "{}", server.log());
    namespace.ip(&["addr", "add", "10.9.1.1/32", "dev", "lo"])?;
    wait_until(
        "the address that came back",
        Duration::from_secs(60),
        || answers(GOES),
    )?;

    // Without any listen address the server cannot start.
    server.process().stop(Duration::from_secs(60))?;
    for address in ["10.9.0.1/32", "10.9.1.1/32"] {
        namespace.ip(&["addr", "del", address, "dev", "lo"])?;
    }
    ensure!(
        server.restart(Some(&namespace)).is_err(),
        "it starts without any usable listen address"
    );
    Ok(())
}
