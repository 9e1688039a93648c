//! The server's address on a dummy device, as the job of the release makes it on Ubuntu Noble: local queries travel over
//! `lo` all the same, and `lo` answers them. The machine that runs the other tests may have no dummies.

use std::net::SocketAddr;

use anyhow::{Context as _, Result, ensure};
use dns_kit::metrics::names;
use hickory_proto::rr::RecordType;
use serde_json::json;
use whole_system_tests::{
    client,
    metrics::{Metrics, wait_for_metrics},
    namespace::Namespace,
    process::wait_until,
    server::{self, Server},
};

use crate::{
    modes::{TIMEOUT, status},
    set_ups::{REPLY, REQUIRED_VARIABLE},
};

const ADDRESS: SocketAddr = SocketAddr::new(
    std::net::IpAddr::V4(std::net::Ipv4Addr::new(169, 254, 0, 2)),
    53,
);

/// Queries once `lo` is served.
const QUERIES: u64 = 20;

/// Tries a dummy, and prints a line.
pub(crate) fn try_it() -> Result<()> {
    let tried = lo_answers();
    match &tried {
        Ok(said) => println!("vm-init: dummy: {said}"),
        Err(problem) => println!("vm-init: dummy: FAILED: {problem:#}"),
    }
    tried.map(drop)
}

fn lo_answers() -> Result<String> {
    let host = Namespace::new("dummy")?;
    if let Err(problem) = host.ip("link add bosh-dns type dummy") {
        ensure!(std::env::var_os(REQUIRED_VARIABLE).is_none(), problem);
        return Ok(format!("skipped, the kernel lacks a feature: {problem:#}"));
    }
    let address = format!("{}/32", ADDRESS.ip());
    host.ip(&format!("addr add {address} dev bosh-dns"))?;
    host.ip("link set bosh-dns up")?;
    let folder = server::folder(&server::records_of_groups(&[3]), None)?;
    let settings = json!({
        "metrics": {"enabled": true},
        "control": {"socket": folder.path().join("control.sock")},
    });
    let server = Server::start(Some(&host), folder, ADDRESS, &settings)?;
    wait_for_metrics(&host)?;

    let query = client::query("q-s0.q-g3.bosh.", RecordType::A, None)?.to_vec()?;
    let ask = || -> Result<()> {
        // The kernel drops what `lo` sends while a clsact qdisc is added: a query may be lost once.
        let reply = host.run(|| client::ask_raw(ADDRESS, &query, REPLY))?;
        reply.map(drop).context("no reply to a local query")
    };
    let by_lo = |metrics: &Metrics| {
        let label = "interface=\"lo\"";
        metrics.sum(names::FAST_PATH_INTERFACE_REPLIES_TOTAL, label)
    };
    wait_until("lo to answer", TIMEOUT, || {
        ask().is_ok() && Metrics::read(&host).is_ok_and(|metrics| by_lo(&metrics) > 0)
    })
    .with_context(|| format!("{:?}\n{}", status(&server), server.log()))?;
    let before = Metrics::read(&host)?;
    for _ in 0..QUERIES {
        ask()?;
    }
    let after = Metrics::read(&host)?;
    let given = by_lo(&after) - by_lo(&before);
    let probes = after.probes() - before.probes();
    // Some queries are passed up as probes.
    ensure!(
        given > 0 && given + probes >= QUERIES,
        "{given} of {QUERIES} replies by lo, {probes} probes: {:?}",
        after.outcomes_since(&before)
    );
    Ok(format!(
        "{given} of {QUERIES} replies by lo, {probes} probes"
    ))
}
