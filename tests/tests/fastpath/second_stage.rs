//! The tc program behind XDP, which answers what finds no room there.
//!
//! Runs of the program in memory cannot show it: packets of `BPF_PROG_TEST_RUN`
//! have no metadata at tc. So it meets real packets only.

use std::{
    collections::BTreeSet,
    io,
    os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd},
    process::Command,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use aya::programs::{SchedClassifier, TcAttachType, XdpMode};
use dns_common::{counters::Outcome, object};
use dns_core::config::{HookMode, OnStop};
use dns_fastpath::{FastPath, Hook, TapItem, detach_all};
use dns_platform::metrics::names;
use hickory_proto::rr::RecordType;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::sync::watch;
use whole_system_tests::{
    client,
    metrics::{Metrics, wait_for_fast_path},
    process::{capture, wait_until},
    program::Program,
    requirements,
    server::{self, Server},
};

use crate::lab::{Bpffs, List, PATIENCE, Pair, SHORT, ask, attached, config, pass_program, start, v4, wait};

/// A name whose reply finds room at XDP, and its addresses.
const SHORT_LIST: (&str, u16) = ("short.bosh", 1);

/// A name whose reply does not.
const LONG_LIST: (&str, u16) = ("long.bosh", 60);

/// Both names.
fn lists() -> List {
    List::default().counted(SHORT_LIST.0, SHORT_LIST.1).counted(LONG_LIST.0, LONG_LIST.1)
}

/// Asks for A; whether all addresses came.
fn is_answered(pair: &Pair, (name, count): (&str, u16), patience: Duration) -> Result<bool> {
    let reply = ask(&pair.client, v4(), &format!("{name}."), RecordType::A, Some(4096), patience)?;
    Ok(reply.is_some_and(|reply| client::addresses(&reply).len() == usize::from(count)))
}

/// What serves the server's end of the veth: the hook, and that behind it.
fn hooks(fast_path: &FastPath) -> (Option<Hook>, Option<Hook>) {
    let status = fast_path.status().interfaces;
    let found = status.interfaces.iter().find(|interface| interface.name == "srv");
    found.map_or((None, None), |interface| (interface.hook, interface.second))
}

/// What is attached to the server's end of the veth, but for where `ip` shows XDP.
fn on_srv(pair: &Pair) -> Result<BTreeSet<String>> {
    let programs = attached(&pair.server)?;
    let on_srv = programs.iter().filter_map(|line| match line.strip_prefix("srv: ") {
        Some(tc) => Some(tc.to_owned()),
        None if line.contains("srv@") => {
            let kind = line.split_whitespace().find(|word| word.starts_with("xdp"));
            Some(kind.unwrap_or("xdp?").to_owned())
        }
        None => None,
    });
    Ok(on_srv.collect())
}

/// A set of what is attached.
fn set(programs: &[&str]) -> BTreeSet<String> {
    programs.iter().map(|&program| program.to_owned()).collect()
}

#[test]
fn status_counters_and_tap_tell_of_both_stages() -> Result<()> {
    if !requirements::namespaces() || !requirements::bpf() {
        return Ok(());
    }
    let (pair, bpffs) = (Pair::new("both")?, Bpffs::new()?);
    let fast_path = start(&pair.server, &config(HookMode::Generic, &bpffs), &[v4()], lists())?;
    assert_eq!(hooks(&fast_path), (Some(Hook::Generic), Some(Hook::Tcx)));
    let status = fast_path.status().interfaces;
    let lo = status.interfaces.iter().find(|interface| interface.name == "lo").context("lo is served")?;
    assert_eq!((lo.hook, lo.second), (Some(Hook::Generic), Some(Hook::Tcx)));
    assert!(lo.why.contains("behind it tcx"), "{}", lo.why);

    let events = Mutex::new(Vec::new());
    wait(async {
        let (wanted, receiver) = watch::channel(1);
        let tap = fast_path.tap().context("nobody else has it")??;
        let asked = async {
            // The program samples once the tap has said so.
            tokio::time::sleep(Duration::from_millis(100)).await;
            for name in [LONG_LIST, SHORT_LIST, LONG_LIST] {
                ensure!(is_answered(&pair, name, PATIENCE)?, "{name:?}");
            }
            tokio::time::sleep(Duration::from_millis(500)).await;
            drop(wanted);
            Ok(())
        };
        let feeding = tap.feed(receiver, |item| events.lock().push(item));
        tokio::join!(feeding, asked).1
    })?;
    let seen: Vec<(u8, u16)> = events
        .into_inner()
        .iter()
        .map(|item| match item {
            TapItem::Event(event) => (event.outcome, event.answers),
            TapItem::Lost(_) => (u8::MAX, 0),
        })
        .collect();
    let hit = Outcome::Hit as u8;
    assert_eq!(seen, [(hit, 60), (hit, 1), (hit, 60)], "each query once, by what became of it");
    let counters = fast_path.counters();
    assert_eq!((counters.outcome(Outcome::HandedOn), counters.outcome(Outcome::NoRoom)), (2, 0));
    assert_eq!((counters.hits(), counters.interface(pair.server.interface_index("srv")?)), (3, 3));
    Ok(())
}

#[test]
fn a_second_stage_that_somebody_detached_comes_back() -> Result<()> {
    if !requirements::namespaces() || !requirements::bpf() {
        return Ok(());
    }
    let (pair, bpffs) = (Pair::new("back")?, Bpffs::new()?);
    let fast_path = start(&pair.server, &config(HookMode::Generic, &bpffs), &[v4()], lists())?;
    let srv = pair.server.interface_index("srv")?;
    let pin = bpffs.pinned().into_iter().find(|path| path.ends_with(format!("{srv}-tcx")));
    let pin = pin.context("the second stage's link is pinned")?;
    capture(Command::new("bpftool").args(["link", "detach", "pinned"]).arg(&pin))?;
    assert_eq!(on_srv(&pair)?, set(&["xdpgeneric"]));
    assert!(is_answered(&pair, SHORT_LIST, PATIENCE)?);
    assert!(!is_answered(&pair, LONG_LIST, SHORT)?, "it goes up, where nobody is here");
    // Looked after every ten seconds.
    wait_until("the second stage", Duration::from_secs(15), || {
        is_answered(&pair, LONG_LIST, SHORT).is_ok_and(|answered| answered)
    })?;
    assert_eq!(on_srv(&pair)?, set(&["xdpgeneric", object::TC_SECOND_PROGRAM]));
    fast_path.stop();
    assert_eq!(on_srv(&pair)?, set(&[]));
    assert_eq!(bpffs.pinned(), Vec::<std::path::PathBuf>::new());
    Ok(())
}

#[test]
fn other_modes_take_over_what_there_is() -> Result<()> {
    if !requirements::namespaces() || !requirements::bpf() {
        return Ok(());
    }
    let (pair, bpffs) = (Pair::new("modes")?, Bpffs::new()?);
    let _pass = pass_program(&pair.client, "cli", XdpMode::Driver)?;
    let second = object::TC_SECOND_PROGRAM;
    for (mode, programs) in [
        (HookMode::Tc, set(&[object::TC_PROGRAM])),
        (HookMode::Native, set(&["xdp", second])),
        (HookMode::Generic, set(&["xdpgeneric", second])),
        (HookMode::Generic, set(&["xdpgeneric", second])),
        (HookMode::Auto, set(&[object::TC_PROGRAM])),
        (HookMode::Generic, set(&["xdpgeneric", second])),
        (HookMode::Native, set(&["xdp", second])),
    ] {
        let mut keep = config(mode, &bpffs);
        keep.on_stop = OnStop::Keep;
        let fast_path = start(&pair.server, &keep, &[v4()], lists())?;
        assert_eq!(on_srv(&pair)?, programs, "{mode:?}");
        for name in [SHORT_LIST, LONG_LIST] {
            assert!(is_answered(&pair, name, PATIENCE)?, "{mode:?}: {name:?}");
        }
        let counters = fast_path.counters();
        let handed_on = if hooks(&fast_path).1.is_some() { 1 } else { 0 };
        assert_eq!((counters.hits(), counters.outcome(Outcome::HandedOn)), (2, handed_on), "{mode:?}");
        fast_path.stop();
        assert!(is_answered(&pair, LONG_LIST, PATIENCE)?, "{mode:?}: kept until the lease ends");
    }
    let keep = config(HookMode::Native, &bpffs);
    let detached = pair.server.run(|| detach_all(&keep, &[v4()]))??;
    assert_eq!(detached.links, 3, "two of srv, one of lo");
    assert_eq!(on_srv(&pair)?, set(&[]));
    assert_eq!(bpffs.pinned(), Vec::<std::path::PathBuf>::new());
    Ok(())
}

#[test]
fn a_reply_passes_the_second_stage_of_somebody_else() -> Result<()> {
    if !requirements::namespaces() || !requirements::bpf() {
        return Ok(());
    }
    let mut theirs = Program::load()?;
    theirs.set_endpoints(&[v4()]);
    for mode in [HookMode::Generic, HookMode::Native] {
        let (pair, bpffs) = (Pair::new("theirs")?, Bpffs::new()?);
        let _pass = pass_program(&pair.client, "cli", XdpMode::Driver)?;
        let program: &mut SchedClassifier =
            theirs.ebpf().program_mut(object::TC_SECOND_PROGRAM).context("in the object")?.try_into()?;
        pair.client.run(|| program.attach("cli", TcAttachType::Ingress).map(drop))??;
        let before = theirs.counters().outcomes;
        let _fast_path = start(&pair.server, &config(mode, &bpffs), &[v4()], lists())?;
        for _ in 0..3 {
            ensure!(is_answered(&pair, LONG_LIST, PATIENCE)?, "{mode:?}");
        }
        let after = theirs.counters().outcomes;
        // Whether a reply keeps its tag is up to the kernel; that it is no query is not.
        let tagged = after[Outcome::NotOurs as usize] - before[Outcome::NotOurs as usize];
        println!("{mode:?}: {tagged} of 3 replies kept their tag");
        assert_eq!(after.iter().sum::<u64>() - before.iter().sum::<u64>(), tagged);
    }
    Ok(())
}

/// As many programs as tcx takes on the interface of this number (63 on Linux 6.18,
/// observed), all of which pass every packet; gone when dropped.
fn fill_tcx(ifindex: u32) -> io::Result<Vec<OwnedFd>> {
    /// More than it takes.
    const MORE: usize = 100;
    /// `BPF_PROG_LOAD`, `BPF_LINK_CREATE`.
    const LOAD: libc::c_long = 5;
    /// See [`LOAD`].
    const CREATE: libc::c_long = 28;
    // `BPF_PROG_TYPE_SCHED_CLS`, `BPF_TCX_INGRESS`.
    let (kind, place) = (3, 46);
    let call = |command: libc::c_long, attributes: [u64; 16]| {
        // SAFETY: the attributes outlive the call, and so do instructions and license.
        let fd =
            unsafe { libc::syscall(libc::SYS_bpf, command, &raw const attributes, size_of_val(&attributes)) };
        let fd = i32::try_from(fd).map_err(io::Error::other)?;
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: made for us just now.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    };
    // r0 = -1 (TC_ACT_UNSPEC); exit.
    let instructions: [u64; 2] = [0xffff_ffff_0000_00b7, 0x95];
    let mut links = Vec::new();
    for _ in 0..MORE {
        let mut load = [0; 16];
        load[0] = kind | (instructions.len() as u64) << 32;
        load[1] = instructions.as_ptr() as u64;
        load[2] = c"GPL".as_ptr() as u64;
        let program = call(LOAD, load)?;
        let mut create = [0; 16];
        create[0] = program.as_raw_fd() as u64 | u64::from(ifindex) << 32;
        create[1] = place;
        match call(CREATE, create) {
            Ok(link) => links.push(link),
            Err(error) if error.raw_os_error() == Some(libc::ERANGE) => return Ok(links),
            Err(error) => return Err(error),
        }
    }
    Err(io::Error::other("there was room for all of them"))
}

#[test]
fn where_tcx_is_full_clsact_is_taken_and_where_that_is_taken_xdp_goes_on_alone() -> Result<()> {
    if !requirements::namespaces() || !requirements::bpf() {
        return Ok(());
    }
    let (pair, bpffs) = (Pair::new("full")?, Bpffs::new()?);
    let srv = pair.server.interface_index("srv")?;
    let foreign = pair.server.run(|| fill_tcx(srv))??;
    let before = attached(&pair.server)?;
    assert_eq!(before.len(), foreign.len());

    let generic = config(HookMode::Generic, &bpffs);
    let fast_path = start(&pair.server, &generic, &[v4()], lists())?;
    assert_eq!(hooks(&fast_path), (Some(Hook::Generic), Some(Hook::Clsact)));
    assert!(is_answered(&pair, SHORT_LIST, PATIENCE)? && is_answered(&pair, LONG_LIST, PATIENCE)?);
    assert_eq!(fast_path.counters().outcome(Outcome::HandedOn), 1);
    fast_path.stop();
    let filters = || -> Result<String> {
        let mut tc = Command::new("tc");
        capture(tc.args(["-n", pair.server.name(), "filter", "show", "dev", "srv", "ingress"]))
    };
    assert_eq!(filters()?, "");

    // A filter of another kind with the priority that ours would have: ours is the next one.
    let main = v4().to_string();
    let first = 0xb000 | (dns_common::name::hash_name(0, main.as_bytes()) % 0x1000);
    let take = |priority: u64| {
        let mut tc = Command::new("tc");
        tc.args(["-n", pair.server.name(), "filter", "add", "dev", "srv", "ingress", "prio"]);
        tc.arg((0xb000 | (priority & 0xfff)).to_string());
        capture(tc.args(["protocol", "all", "u32", "match", "u32", "0", "0"]))
    };
    take(first)?;
    let theirs = filters()?;
    let fast_path = start(&pair.server, &generic, &[v4()], lists())?;
    assert_eq!(hooks(&fast_path), (Some(Hook::Generic), Some(Hook::Clsact)));
    assert!(filters()?.contains(&theirs) && is_answered(&pair, LONG_LIST, PATIENCE)?);
    fast_path.stop();
    assert_eq!(filters()?, theirs);
    // All that would be tried.
    for step in 1..16 {
        take(first + step)?;
    }
    let theirs = filters()?;
    let fast_path = start(&pair.server, &generic, &[v4()], lists())?;
    assert_eq!(hooks(&fast_path), (Some(Hook::Generic), None));
    let status = fast_path.status().interfaces;
    let why = status.interfaces.iter().find(|found| found.name == "srv").map(|found| found.why.clone());
    let why = why.unwrap_or_default();
    assert!(why.contains("nothing behind it") && why.contains("tcx:") && why.contains("clsact:"), "{why}");
    assert!(is_answered(&pair, SHORT_LIST, PATIENCE)?);
    assert!(!is_answered(&pair, LONG_LIST, SHORT)?, "it goes up, where nobody is here");
    let counters = fast_path.counters();
    assert_eq!((counters.outcome(Outcome::HandedOn), counters.outcome(Outcome::NoRoom)), (0, 1));
    fast_path.stop();
    assert_eq!((attached(&pair.server)?, filters()?), (before, theirs), "what others have there stays");
    Ok(())
}

/// A name of the whole server's with so many instances.
fn group(count: u16) -> String {
    format!("q-s0.q-g{count}.bosh.")
}

/// The whole server in this mode.
fn whole_server(pair: &Pair, bpffs: &Bpffs, mode: &str) -> Result<Server> {
    let settings = json!({
        "metrics": {"enabled": true},
        "xdp": {"mode": mode, "bpffs": bpffs.path(), "lease": "60s"},
    });
    let records = server::records_of_groups(&[2, 24, 60]);
    let server = Server::start(Some(&pair.server), server::folder(&records, None)?, v4(), &settings)?;
    wait_for_fast_path(&pair.server).with_context(|| server.log())?;
    Ok(server)
}

/// Asks for the addresses of all groups, with and without EDNS, over IPv4; returns
/// how many queries that were.
fn ask_groups(pair: &Pair) -> Result<u64> {
    let mut asked = 0;
    for (count, edns) in [(2, None), (2, Some(1232)), (24, None), (24, Some(1232)), (60, Some(1232))] {
        let reply = ask(&pair.client, v4(), &group(count), RecordType::A, edns, PATIENCE)?;
        let found = reply.map_or(0, |reply| client::addresses(&reply).len());
        ensure!(found == usize::from(count), "{found} addresses of {count}");
        asked += 1;
    }
    Ok(asked)
}

#[test]
fn the_whole_server_leaves_long_replies_to_the_interface() -> Result<()> {
    if !requirements::namespaces() || !requirements::bpf() {
        return Ok(());
    }
    for mode in ["native", "generic"] {
        let (pair, bpffs) = (Pair::new("whole")?, Bpffs::new()?);
        let _pass = pass_program(&pair.client, "cli", XdpMode::Driver)?;
        let _server = whole_server(&pair, &bpffs, mode)?;
        let before = Metrics::read(&pair.server)?;
        let asked = ask_groups(&pair)?;
        let after = Metrics::read(&pair.server)?;
        let fast = after.fast_path_replies() - before.fast_path_replies();
        // Names of the fleet, on both paths; late up-checks of the start are none.
        let all = |metrics: &Metrics| metrics.sum(names::REQUESTS_INTERNAL_TOTAL, "");
        let userspace = all(&after) - all(&before) - fast;
        ensure!((fast, userspace) == (asked, 0), "{mode}: {fast} and {userspace} of {asked}");
        let handed_on =
            |metrics: &Metrics| metrics.sum(names::FAST_PATH_PACKETS_TOTAL, "outcome=\"handed_on\"");
        ensure!(handed_on(&after) > handed_on(&before), "{mode}: nothing was handed on");
    }
    Ok(())
}

#[test]
fn both_stages_outlive_a_killed_server_and_are_taken_over_or_detached() -> Result<()> {
    if !requirements::namespaces() || !requirements::bpf() {
        return Ok(());
    }
    for (mode, xdp) in [("native", "xdp"), ("generic", "xdpgeneric")] {
        let (pair, bpffs) = (Pair::new("killed")?, Bpffs::new()?);
        let _pass = pass_program(&pair.client, "cli", XdpMode::Driver)?;
        let mut server = whole_server(&pair, &bpffs, mode)?;
        let both = set(&[xdp, object::TC_SECOND_PROGRAM]);
        ensure!(on_srv(&pair)? == both, "{:?}", on_srv(&pair)?);
        let links = || -> Result<BTreeSet<String>> {
            let srv = pair.server.interface_index("srv")?;
            let pins = bpffs.pinned();
            let ours = pins.iter().filter(|path| path.to_string_lossy().contains(&format!("/links/{srv}-")));
            // "N: xdp …": the number of the link.
            ours.map(|path| {
                let shown = capture(Command::new("bpftool").args(["link", "show", "pinned"]).arg(path))?;
                Ok(shown.split([':', ' ']).next().unwrap_or_default().to_owned())
            })
            .collect()
        };
        let before = links()?;
        ensure!(before.len() == 2, "{before:?}");

        server.process().kill(Duration::from_secs(5))?;
        ask_groups(&pair).context("answers of the dead server's programs")?;
        server.restart(Some(&pair.server))?;
        wait_for_fast_path(&pair.server)?;
        let begun = Metrics::read(&pair.server)?.fast_path_replies();
        let asked = ask_groups(&pair)?;
        ensure!(
            Metrics::read(&pair.server)?.fast_path_replies() - begun == asked,
            "answers of the new programs"
        );
        ensure!(links()? == before, "{mode}: other links than before: {:?}, {before:?}", links()?);

        server.process().kill(Duration::from_secs(5))?;
        let mut command: Command = pair.server.command(server::program()?)?;
        let said = capture(
            command.args(["detach", "--json", "--config"]).arg(server.folder.path().join("config.json")),
        )?;
        // lo has tcx alone with native, both stages with generic.
        let expected = if mode == "native" { 3 } else { 4 };
        ensure!(serde_json::from_str::<Value>(&said)?["links"] == expected, "{said}");
        ensure!(on_srv(&pair)? == set(&[]), "{:?}", on_srv(&pair)?);
        ensure!(bpffs.pinned().is_empty(), "{:?}", bpffs.pinned());
    }
    Ok(())
}
