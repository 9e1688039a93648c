//! The generator allocates nothing for a query.

use std::time::Duration;

use anyhow::{Result, ensure};
use dns_load::{
    frames::Route,
    generator::{Generator, Load, Responder, Settings},
};
use test_lab::{
    lab::{CLIENT_INTERFACE, Lab, SERVER_INTERFACE},
    process::wait_until,
};
use test_support::allocations::Counting;
use whole_system_tests::requirements;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Queries that the load has at least: more than a thousand times the allocations that its start may take.
const MIN_QUERIES: u64 = 100_000;

/// Allocations of a thread that starts: its place in a list, and the system call's arguments.
const MAX_ALLOCATIONS: u64 = 100;

#[test]
fn queries_need_no_allocation() -> Result<()> {
    if !requirements::namespaces() || !requirements::bpf() {
        return Ok(());
    }
    let lab = Lab::split()?;
    let _responder = lab
        .server
        .run(|| Responder::new(SERVER_INTERFACE, [53; 2], false))??;
    let route = Route {
        hardware: lab.hardware_addresses()?,
        source: lab.client_address(),
        server: lab.endpoint(),
    };
    let query = b"\0\0\x01\0\0\x01\0\0\0\0\0\0\x01a\x04bosh\0\0\x01\0\x01";
    let frame = route.frame(query)?.expect("a short query");
    let settings = Settings {
        interface: CLIENT_INTERFACE,
        cpus: &[0],
        ports: 2048..=2063,
        addresses: 1,
        servers: [53; 2],
        frames: &[frame],
        sequence: &[0],
    };
    let counts = lab.client.run(|| -> Result<_> {
        let generator = Generator::new(&settings)?;
        generator.order(Load::Saturate, generator.whole())?;
        let count = || -> Result<()> {
            Counting::count_thread();
            Ok(())
        };
        generator.during(&count, || {
            wait_until("many queries", Duration::from_secs(120), || {
                generator.counts().is_ok_and(|counts| {
                    counts.sent > MIN_QUERIES && counts.received() > MIN_QUERIES / 100
                })
            })
        })?;
        generator.counts()
    })??;
    let allocations = Counting::take();
    ensure!(
        (1..=MAX_ALLOCATIONS).contains(&allocations),
        "{allocations} allocations for {} queries",
        counts.sent
    );
    Ok(())
}
