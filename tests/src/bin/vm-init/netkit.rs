//! A container behind a netkit device, as Cilium creates them: it is of this machine, so the interface gives
//! large replies, too.

use std::net::SocketAddr;

use anyhow::{Context as _, Result, ensure};
use aya::util::KernelVersion;
use hickory_proto::{op::Message, rr::RecordType};
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

/// Address of the server, which belongs to no interface shared with the container.
const ADDRESS: [u8; 4] = [169, 254, 0, 2];

/// Addresses per reply: a message above 1,232 bytes, which only near clients get from an interface.
const LARGE: u16 = 85;

/// Queries for each size of reply.
const QUERIES: u64 = 20;

/// Tries netkit, and prints a line.
pub(crate) fn try_it() -> Result<()> {
    if KernelVersion::current()? < KernelVersion::new(6, 7, 0) {
        println!("vm-init: netkit: needs Linux 6.7");
        return Ok(());
    }
    let tried = interface_answers();
    match &tried {
        Ok(said) => println!("vm-init: netkit: {said}"),
        Err(problem) => println!("vm-init: netkit: FAILED: {problem:#}"),
    }
    tried.map(drop)
}

fn interface_answers() -> Result<String> {
    let (host, container) = (Namespace::new("nk-host")?, Namespace::new("nk-container")?);
    host.forward()?;
    // The kernel names the container's end.
    if let Err(problem) = host.ip("link add srv type netkit") {
        ensure!(std::env::var_os(REQUIRED_VARIABLE).is_none(), problem);
        return Ok(format!("skipped, the kernel lacks a feature: {problem:#}"));
    }
    host.ip(&format!("link set nk0 netns {}", container.name()))?;
    host.ip("addr add 10.9.0.1/24 dev srv")?;
    host.ip("addr add 169.254.0.2/32 dev lo")?;
    host.ip("link set srv up")?;
    container.ip("addr add 10.9.0.2/24 dev nk0")?;
    container.ip("link set nk0 up")?;
    container.ip("route add 169.254.0.2/32 via 10.9.0.1")?;

    let folder = server::folder(&server::records_of_groups(&[3, LARGE]), None)?;
    let settings = json!({
        "metrics": {"enabled": true},
        "control": {"socket": folder.path().join("control.sock")},
    });
    let server = Server::start(Some(&host), folder, (ADDRESS, 53).into(), &settings)?;
    wait_for_metrics(&host)?;
    let ask = |instances: u16| -> Result<()> {
        let query = client::query(
            &format!("q-s0.q-g{instances}.bosh."),
            RecordType::A,
            Some(4096),
        )?
        .to_vec()?;
        let to = SocketAddr::from((ADDRESS, 53));
        let reply = container
            .run(|| client::ask_raw(to, &query, REPLY))?
            .context("no reply over netkit")?;
        let found = client::addresses(&Message::from_vec(&reply)?).len();
        ensure!(
            found == usize::from(instances),
            "{found} addresses over netkit, not {instances}"
        );
        Ok(())
    };
    // Large replies need the complete program.
    wait_until("all programs", TIMEOUT, || {
        Metrics::read(&host).is_ok_and(|metrics| metrics.is_fast_path_up())
    })?;
    let hits = || -> Result<u64> { Ok(Metrics::read(&host)?.fast_path_replies()) };
    wait_until("the interface to answer", TIMEOUT, || {
        let before = hits();
        let asked = ask(3).and_then(|()| ask(LARGE));
        asked.is_ok() && matches!((before, hits()), (Ok(before), Ok(after)) if after > before)
    })
    .with_context(|| format!("{:?}\n{}", status(&server), server.log()))?;
    let mut said = Vec::new();
    for instances in [3, LARGE] {
        let before = Metrics::read(&host)?;
        for _ in 0..QUERIES {
            ask(instances)?;
        }
        let after = Metrics::read(&host)?;
        let (given, probes) = (
            after.fast_path_replies() - before.fast_path_replies(),
            after.probes() - before.probes(),
        );
        ensure!(
            given + probes >= QUERIES && given >= QUERIES / 2,
            "{given} of {QUERIES} replies with {instances} addresses by the interface, {probes} probes: {:?}",
            after.outcomes_since(&before)
        );
        said.push(format!(
            "{given} of {QUERIES} replies with {instances} addresses by the interface"
        ));
    }
    Ok(said.join(", "))
}
