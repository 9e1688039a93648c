//! The load generator's programs: what this kernel's verifier processes, and that queries leave, come back as replies and
//! are counted.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use aya::{Ebpf, programs::Xdp, util::KernelVersion};
use dns_load::{
    frames::Route,
    generator::{Generator, Load, OBJECT, Responder, Settings},
};
use whole_system_tests::{pair::Pair, process::wait_until, requirements};

/// Most instructions that the verifier may process for one of the programs. `generate`, the largest, has 834 on Linux 6.1,
/// 558 on 6.12 and 555 on 6.18.
const MAX_VERIFIED: u32 = 2_000;

/// Replies after which the programs count as working.
const MIN_REPLIES: u64 = 20;

/// Returns whether the kernel has what the load generator needs (`bpf_xdp_store_bytes`, live frames).
fn kernel_has_live_frames() -> Result<bool> {
    Ok(KernelVersion::current()? >= KernelVersion::new(5, 18, 0))
}

#[test]
fn generator_is_accepted() -> Result<()> {
    if !requirements::bpf() {
        return Ok(());
    }
    let mut object = Ebpf::load(OBJECT)?;
    for name in ["generate", "count", "respond"] {
        let program: &mut Xdp = object.program_mut(name).context(name)?.try_into()?;
        let loaded = program.load();
        if !kernel_has_live_frames()? {
            // `count` and `respond` alone would measure nothing.
            ensure!(name != "generate" || loaded.is_err(), "the page says 5.18");
            continue;
        }
        loaded.context(name)?;
        let verified = program.info()?.verified_instruction_count();
        println!("{name}: {verified:?} instructions processed by the verifier");
        ensure!(verified <= Some(MAX_VERIFIED), "{name}: {verified:?}");
    }
    Ok(())
}

#[test]
fn generator_gets_its_replies() -> Result<()> {
    if !requirements::namespaces() || !requirements::bpf() || !kernel_has_live_frames()? {
        return Ok(());
    }
    let pair = Pair::joined("load", ("s0", &["10.9.0.2/24"]), ("c0", &["10.9.0.1/24"]))?;
    let hardware = [[2, 0, 0, 0, 0, 2], [2, 0, 0, 0, 0, 1]];
    let server = "02:00:00:00:00:02";
    pair.server.ip(&format!("link set s0 address {server}"))?;
    let responder = pair.server.run(|| Responder::new("s0", [53; 2], false))??;
    let route = Route {
        hardware,
        source: [10, 9, 0, 1].into(),
        server: ([10, 9, 0, 2], 53).into(),
    };
    let query = b"\0\0\x01\0\0\x01\0\0\0\0\0\0\x01a\x04bosh\0\0\x01\0\x01";
    let frame = route.frame(query)?.context("a short query")?;
    let settings = Settings {
        interface: "c0",
        cpus: &[0],
        ports: 2048..=2063,
        addresses: 1,
        servers: [53; 2],
        frames: &[frame],
        sequence: &[0],
    };
    let rate = Load::Rate {
        rate: 100,
        burst: 1,
    };
    let counts = pair.client.run(|| -> Result<_> {
        let generator = Generator::new(&settings)?;
        generator.order(rate, generator.whole())?;
        generator.during(&|| Ok(()), || {
            // An emulated machine takes its time.
            wait_until("replies", Duration::from_secs(600), || {
                generator
                    .counts()
                    .is_ok_and(|counts| counts.received() >= MIN_REPLIES)
            })
        })?;
        generator.counts()
    })??;
    println!("{} queries, {} replies", counts.sent, counts.received());
    ensure!(counts.no_error() == counts.received(), "{counts:?}");
    ensure!(counts.sent <= responder.answered()?, "{counts:?}");
    Ok(())
}
