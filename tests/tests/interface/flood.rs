//! A flood of valid names neither delays new records nor ends the lease, and takes a bounded amount
//! of memory.

use std::{
    fs,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    path::Path,
    sync::atomic::{AtomicBool, AtomicU32, Ordering},
    thread,
    time::Duration,
};

use anyhow::{Result, ensure};
use dns_kit::metrics::names::{FAST_PATH_PACKETS_TOTAL, FAST_PATH_WRITES_TOTAL};
use hickory_proto::rr::RecordType;
use serde_json::json;
use whole_system_tests::{
    bpffs::Bpffs,
    client, fleet,
    metrics::{Metrics, wait_for_fast_path},
    namespace::Namespace,
    process::{memory, wait_until},
    requires,
    server::{self, Server},
};

/// Listen address of the server.
const ADDRESS: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 53);

/// Number of names in the flood.
const NAMES: u32 = 20_000;

/// Instances in the group behind all of these names.
const INSTANCES: u16 = 250;

/// A steadily used name of a one-instance group, whose address encodes the version of the records.
const HOT: &str = "q-s0.q-g2.bosh.";

/// Minimum number of record versions during the flood.
const VERSIONS: u32 = 20;

/// Maximum entries written between the first TCP reply with new records and the first such UDP
/// reply: one pass over the published names, without repetition because of the flood.
const MOST_WRITES: u64 = 2 * (NAMES as u64 + 1000);

/// Generous time limit for a busy machine.
const LIMIT: Duration = Duration::from_secs(120);

/// Maximum memory added by the flood in MiB, as stated in docs/operating.md.
const MOST_MEMORY: u64 = 96;

/// Returns records.json of this version.
fn records(version: u32) -> Vec<u8> {
    let [_, high, middle, low] = version.to_be_bytes();
    let crowd = (0..INSTANCES).map(|number| {
        let [high, low] = number.to_be_bytes();
        (1, [10, 0, high, low])
    });
    fleet::records(
        version.into(),
        crowd.chain([(2, [10, 1 + high, middle, low])]),
    )
}

fn write(folder: &Path, version: u32) -> Result<()> {
    let (file, new) = (folder.join("records.json"), folder.join("records.new"));
    fs::write(&new, records(version))?;
    Ok(fs::rename(new, file)?)
}

/// Returns the version encoded in the hot name's address.
fn version(by_tcp: bool) -> Result<u32> {
    let query = client::query(HOT, RecordType::A, None)?;
    let reply = if by_tcp {
        client::ask_tcp(ADDRESS, &query)
    } else {
        client::ask(ADDRESS, &query)
    }?;
    match client::addresses(&reply)[..] {
        [IpAddr::V4(address)] => Ok((u32::from(address) & 0x00ff_ffff) - (1 << 16)),
        ref other => anyhow::bail!("{other:?}"),
    }
}

/// Queries all names of the flood repeatedly until `done` is set.
fn flood(done: &AtomicBool, asked: &AtomicU32) -> Result<()> {
    while !done.load(Ordering::Relaxed) {
        for number in 0..NAMES {
            let query = client::query(
                &format!("q-s0x{number}.q-g1.bosh."),
                RecordType::A,
                Some(1232),
            )?;
            // Only the header is read: decoding so many long replies would take most of the test's time.
            let reply = client::ask_raw(ADDRESS, &query.to_vec()?, LIMIT)?;
            ensure!(
                reply.get(6..8).is_some_and(|count| count != [0; 2]),
                "no answer to name {number}"
            );
            asked.fetch_add(1, Ordering::Relaxed);
            if done.load(Ordering::Relaxed) && asked.load(Ordering::Relaxed) >= NAMES {
                return Ok(());
            }
        }
    }
    Ok(())
}

#[test]
fn name_flood_delays_no_update() -> Result<()> {
    requires!(namespaces, bpf);
    let (namespace, bpffs) = (Namespace::new("flood")?, Bpffs::new()?);
    let settings = json!({
        "metrics": {"enabled": true},
        // By design the lease ends while a change is behind by its length: longer than a busy machine takes.
        "xdp": {"interfaces": ["lo"], "bpffs": bpffs.path(), "lease": "60s"},
    });
    let server = Server::start(
        Some(&namespace),
        server::folder(&records(1), None)?,
        ADDRESS,
        &settings,
    )?;
    wait_for_fast_path(&namespace)?;
    let before = memory(server.pid(), "RssAnon")? >> 20;
    let (done, asked) = (AtomicBool::new(false), AtomicU32::new(0));
    let mut most_behind = 0;
    namespace.run(|| {
        thread::scope(|scope| -> Result<()> {
            let handle = scope.spawn(|| namespace.run(|| flood(&done, &asked)));
            let mut rounds = || -> Result<()> {
                let mut next = 2;
                while next < VERSIONS || asked.load(Ordering::Relaxed) < NAMES {
                    write(server.folder.path(), next)?;
                    let new = || version(true).is_ok_and(|version| version == next);
                    wait_until("the new records by TCP", LIMIT, new)?;
                    let writes =
                        || Ok::<_, anyhow::Error>(Metrics::here()?.sum(FAST_PATH_WRITES_TOTAL, ""));
                    let before = writes()?;
                    let new = || version(false).is_ok_and(|version| version == next);
                    wait_until("the new records by UDP", LIMIT, new)?;
                    let written = writes()?.saturating_sub(before);
                    ensure!(
                        written <= MOST_WRITES,
                        "{written} entries were written before the new records"
                    );
                    most_behind = most_behind.max(written);
                    next += 1;
                    thread::sleep(Duration::from_millis(100));
                }
                Ok(())
            };
            let went = rounds();
            done.store(true, Ordering::Relaxed);
            let flooded = handle
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            went.and(flooded?)
        })
    })??;
    let after = memory(server.pid(), "RssAnon")? >> 20;
    let asked = asked.into_inner();
    println!(
        "{asked} names asked, UDP {most_behind} entries behind at most, {before} MiB, then {after}"
    );
    let expired =
        Metrics::read(&namespace)?.sum(FAST_PATH_PACKETS_TOTAL, "outcome=\"lease_expired\"");
    ensure!(
        expired == 0,
        "the lease ended: {expired} queries were passed up"
    );
    ensure!(
        after.saturating_sub(before) <= MOST_MEMORY,
        "{before} MiB before the flood, {after} after"
    );
    Ok(())
}
