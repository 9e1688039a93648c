//! Start, stop, crash and takeover; interfaces that appear and disappear; the lease.

use std::{
    collections::BTreeSet,
    fs,
    net::IpAddr,
    os::unix::net::UnixStream,
    path::PathBuf,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use aya::programs::{Xdp, XdpMode, links::FdLink};
use dns_attacher::{Authority, ReadAuthority, detach_all};
use dns_core::config::{HookMode, OnStop};
use hickory_proto::rr::RecordType;
use whole_system_tests::{
    bpffs::{Bpffs, config},
    client,
    namespace::{End, Namespace, join},
    pair::{Pair, SHORT, TIMEOUT, addresses, ask, v4},
    process::wait_until,
    requires,
    yardstick::{self, Yardstick},
};

use crate::lab::{List, ask_unclear, deliver, handle_of, name_of, start, wait};

/// Time limit for hundreds of interfaces to be attached, each of which waits for the RTNL lock.
const ALL_ATTACHED: Duration = Duration::from_secs(400);

/// Returns a list of one name with one address.
fn one(last: u8) -> List {
    List::default().with("a.bosh", [IpAddr::from([10, 0, 0, last])])
}

const NOTHING: [&str; 0] = [];

#[test]
fn stop_detaches_shared_programs() -> Result<()> {
    requires!(namespaces, bpf);
    let (pair, bpffs) = (Pair::new("held")?, Bpffs::new()?);
    let fast_path = start(
        &pair.server,
        &config(HookMode::Auto, &bpffs),
        &[v4()],
        one(1),
    )?;
    // A scrape of the metrics holds the fast path the same way.
    let held = fast_path.clone();
    fast_path.stop();
    assert_eq!(pair.server.attached_programs()?, NOTHING);
    assert!(held.is_ready() && held.status().interfaces.interfaces.is_empty());
    assert!(!handle_of(&held).is_published(&name_of("a.bosh")));
    Ok(())
}

/// Returns the numbers of the programs that this process holds.
fn held_programs() -> BTreeSet<String> {
    let files = fs::read_dir("/proc/self/fdinfo")
        .into_iter()
        .flatten()
        .flatten();
    // A descriptor may be closed meanwhile.
    let texts = files.filter_map(|file| fs::read_to_string(file.path()).ok());
    texts
        .filter_map(|text| {
            Some(
                text.split_once("prog_id:")?
                    .1
                    .lines()
                    .next()?
                    .trim()
                    .to_owned(),
            )
        })
        .collect()
}

#[test]
fn own_attacher_loads_before_request() -> Result<()> {
    requires!(namespaces, bpf);
    let bpffs = Bpffs::new()?;
    let (ours, servers) = UnixStream::pair()?;
    let authority = Authority {
        xdp: config(HookMode::Auto, &bpffs),
        main: v4(),
        listen: vec![v4()],
    };
    let read: ReadAuthority = Box::new(move || Ok(authority.clone()));
    let attacher = thread::spawn(move || dns_attacher::serve(&ours, &read));
    // The server reads its files and asks for nothing, while the kernel verifies the programs of tc. Those that
    // answer are held by the map from which they are called; the last one that is loaded is held here.
    wait_until("a loaded program", ALL_ATTACHED, || {
        !held_programs().is_empty()
    })?;
    assert_eq!(
        bpffs.pinned(),
        Vec::<PathBuf>::new(),
        "pins of a running server are not touched"
    );
    drop(servers);
    let served = attacher.join().expect("no panic");
    assert!(served.is_err(), "the server has ended without a request");
    Ok(())
}

#[test]
fn stop_removes_pins_and_links() -> Result<()> {
    requires!(namespaces, bpf);
    let pair = Pair::new("stop")?;
    for mode in [HookMode::Auto, HookMode::Native] {
        let bpffs = Bpffs::new()?;
        let fast_path = start(&pair.server, &config(mode, &bpffs), &[v4()], one(1))?;
        assert!(!bpffs.pinned().is_empty());
        if mode != HookMode::Native {
            assert!(addresses(&pair.client, v4(), "a.bosh", TIMEOUT)?.is_some());
        }
        fast_path.stop();
        assert_eq!(pair.server.attached_programs()?, NOTHING, "{mode:?}");
        assert_eq!(bpffs.pinned(), Vec::<PathBuf>::new(), "{mode:?}");
        assert_eq!(addresses(&pair.client, v4(), "a.bosh", SHORT)?, None);
    }
    Ok(())
}

#[test]
fn earlier_generic_link_is_dropped() -> Result<()> {
    requires!(namespaces, bpf);
    let (pair, bpffs) = (Pair::new("skb")?, Bpffs::new()?);
    let mut keep = config(HookMode::Auto, &bpffs);
    keep.on_stop = OnStop::Keep;
    start(&pair.server, &keep, &[v4()], one(1))?.stop();
    // Earlier versions attached to generic XDP and pinned such links in the same folder.
    let folder = bpffs
        .links()
        .first()
        .and_then(|link| link.parent())
        .context("no links")?
        .to_owned();
    let ifindex = pair.server.interface_index("srv")?;
    let (mut object, name) = Yardstick::Pass.load(yardstick::Hook::Native)?;
    pair.server.run(|| -> Result<()> {
        let program: &mut Xdp = object
            .program_mut(name)
            .context("no such program")?
            .try_into()?;
        let link = program.attach("srv", XdpMode::Skb)?;
        FdLink::try_from(program.take_link(link)?)?
            .pin(folder.join(format!("{ifindex}-generic")))?;
        Ok(())
    })??;
    let with_generic = pair.server.attached_programs()?;
    keep.on_stop = OnStop::Detach;
    let fast_path = start(&pair.server, &keep, &[v4()], one(2))?;
    let attached = pair.server.attached_programs()?;
    assert_eq!(
        attached.len() + 1,
        with_generic.len(),
        "{attached:?}, before {with_generic:?}"
    );
    assert_eq!(
        addresses(&pair.client, v4(), "a.bosh", TIMEOUT)?,
        Some(vec![[10, 0, 0, 2].into()])
    );
    fast_path.stop();
    assert_eq!(pair.server.attached_programs()?, NOTHING);
    Ok(())
}

#[test]
fn silent_runtime_loses_lease() -> Result<()> {
    requires!(namespaces, bpf);
    let (pair, bpffs) = (Pair::new("lease")?, Bpffs::new()?);
    let mut short = config(HookMode::Auto, &bpffs);
    short.lease = Duration::from_secs(1);
    let fast_path = start(&pair.server, &short, &[v4()], one(1))?;
    let answers =
        || addresses(&pair.client, v4(), "a.bosh", SHORT).is_ok_and(|found| found.is_some());
    thread::sleep(Duration::from_millis(1500));
    wait_until("the publisher to renew", TIMEOUT, answers)?;
    fast_path.heartbeat(Duration::ZERO);
    thread::sleep(Duration::from_millis(1500));
    assert!(!answers(), "no further heartbeat came");
    wait_until("answers after a heartbeat", TIMEOUT, || {
        fast_path.heartbeat(Duration::ZERO);
        answers()
    })
}

#[test]
fn successor_adopts_kept_programs() -> Result<()> {
    requires!(namespaces, bpf);
    let pair = Pair::new("keep")?;
    let bpffs = Bpffs::new()?;
    let mut keep = config(HookMode::Auto, &bpffs);
    keep.on_stop = OnStop::Keep;
    keep.lease = Duration::from_secs(60);
    let answers = one(1).unlisted("learned.bosh", [10, 0, 0, 9].into());
    let fast_path = start(&pair.server, &keep, &[v4()], answers.clone())?;
    let handle = handle_of(&fast_path);
    handle.learn(&name_of("learned.bosh"));
    wait(handle.flushed());
    fast_path.stop();
    assert_eq!(
        addresses(&pair.client, v4(), "a.bosh", TIMEOUT)?,
        Some(vec![[10, 0, 0, 1].into()])
    );

    // Queries without pause while another instance takes over: no query is lost and no answer
    // is wrong.
    let (done, asked) = (AtomicBool::new(false), AtomicU64::new(0));
    let lost = thread::scope(|scope| -> Result<u64> {
        let client = scope.spawn(|| -> Result<u64> {
            let known = [1, 2].map(|last| vec![IpAddr::from([10, 0, 0, last])]);
            let mut lost = 0;
            while !done.load(Ordering::Relaxed) {
                for reply in [
                    ask(&pair.client, v4(), "a.bosh.", RecordType::A, None, TIMEOUT)?,
                    ask_unclear(&pair.client, v4(), "a.bosh.", RecordType::A, TIMEOUT)?,
                ] {
                    match reply.map(|reply| client::addresses(&reply)) {
                        Some(found) => assert!(known.contains(&found), "{found:?}"),
                        None => lost += 1,
                    }
                    asked.fetch_add(1, Ordering::Relaxed);
                }
            }
            Ok(lost)
        });
        let answers = one(2).unlisted("learned.bosh", [10, 0, 0, 9].into());
        keep.on_stop = OnStop::Detach;
        let successor = start(&pair.server, &keep, &[v4()], answers);
        let checked = successor.and_then(|successor| {
            let before = asked.load(Ordering::Relaxed);
            wait_until("more queries", TIMEOUT, || {
                asked.load(Ordering::Relaxed) > before + 20
            })
            .with_context(|| format!("{:?}", successor.counters()))?;
            let learned = addresses(&pair.client, v4(), "learned.bosh", TIMEOUT)?;
            assert_eq!(
                learned,
                Some(vec![[10, 0, 0, 9].into()]),
                "learned names are taken over"
            );
            let now = addresses(&pair.client, v4(), "a.bosh", TIMEOUT)?;
            assert_eq!(now, Some(vec![[10, 0, 0, 2].into()]));
            Ok(successor)
        });
        done.store(true, Ordering::Relaxed);
        let lost = client.join().expect("the client does not panic")?;
        checked?.stop();
        Ok(lost)
    })?;
    assert_eq!(lost, 0, "of {} queries", asked.load(Ordering::Relaxed));
    assert_eq!(pair.server.attached_programs()?, NOTHING);
    Ok(())
}

#[test]
fn detach_removes_orphaned_programs() -> Result<()> {
    requires!(namespaces, bpf);
    let (pair, bpffs) = (Pair::new("detach")?, Bpffs::new()?);
    let mut keep = config(HookMode::Auto, &bpffs);
    keep.on_stop = OnStop::Keep;
    start(&pair.server, &keep, &[v4()], one(1))?.stop();
    assert_eq!(
        pair.server.attached_programs()?,
        ["lo: dns_tc", "srv: dns_tc"]
    );
    let detached = pair.server.run(|| detach_all(&keep, v4()))??;
    assert_eq!(detached.links, 2, "srv and lo");
    assert_eq!(pair.server.attached_programs()?, NOTHING);
    assert_eq!(bpffs.pinned(), Vec::<PathBuf>::new());
    let again = pair.server.run(|| detach_all(&keep, v4()))??;
    assert_eq!(
        (again.links, again.filters),
        (0, 0),
        "nothing is left to detach"
    );
    Ok(())
}

#[test]
fn old_server_respects_takeover() -> Result<()> {
    requires!(namespaces, bpf);
    let (pair, bpffs) = (Pair::new("swap")?, Bpffs::new()?);
    let old = start(
        &pair.server,
        &config(HookMode::Auto, &bpffs),
        &[v4()],
        one(1),
    )?;
    let new = start(
        &pair.server,
        &config(HookMode::Auto, &bpffs),
        &[v4()],
        one(2),
    )?;
    old.stop();
    assert_eq!(
        addresses(&pair.client, v4(), "a.bosh", TIMEOUT)?,
        Some(vec![[10, 0, 0, 2].into()])
    );
    assert!(!bpffs.pinned().is_empty());
    new.stop();
    assert_eq!(pair.server.attached_programs()?, NOTHING);
    assert_eq!(bpffs.pinned(), Vec::<PathBuf>::new());
    Ok(())
}

#[test]
fn new_interfaces_are_served_quickly() -> Result<()> {
    requires!(namespaces, bpf);
    let (host, bpffs) = (Namespace::new("come")?, Bpffs::new()?);
    host.ip("addr add 169.254.0.2/32 dev lo")?;
    let mut globbed = config(HookMode::Auto, &bpffs);
    globbed.interfaces = Some(vec!["lo".to_owned(), "w-*".to_owned()]);
    let fast_path = start(&host, &globbed, &[v4()], one(1))?;
    let served = |name: &str| {
        let status = fast_path.status().interfaces;
        status
            .interfaces
            .iter()
            .any(|interface| interface.name == name && interface.hook.is_some())
    };
    assert!(served("lo"));
    for round in 0..3 {
        let container = Namespace::new("box")?;
        join(
            End::new(&host, "w-one", &["10.9.0.1/24"]),
            End::new(&container, "eth0", &["10.9.0.2/24"]),
        )?;
        container.ip("route add default via 10.9.0.1")?;
        deliver(&fast_path, &host, "w-one")?;
        wait_until("the interface to be served", ALL_ATTACHED, || {
            served("w-one")
        })?;
        // Until then, the server's last report allows probes, which no server answers here.
        thread::sleep(Duration::from_secs(1));
        assert!(
            addresses(&container, v4(), "a.bosh", TIMEOUT)?.is_some(),
            "round {round}"
        );
        host.ip("link set w-one down")?;
        host.ip("link set w-one name other")?;
        wait_until("a renamed interface to be left", ALL_ATTACHED, || {
            !served("other") && !served("w-one")
        })?;
        host.ip("link set other name w-two")?;
        wait_until("a renamed interface to be served", ALL_ATTACHED, || {
            served("w-two")
        })?;
        host.ip("link del w-two")?;
        wait_until("a deleted interface to be forgotten", ALL_ATTACHED, || {
            !served("w-two")
        })?;
    }
    assert_eq!(bpffs.links().len(), 1, "only that of lo is left");
    Ok(())
}

#[test]
fn thousand_veths_share_a_program() -> Result<()> {
    const COUNT: usize = 1000;
    requires!(namespaces, bpf);
    let (host, bpffs) = (Namespace::new("many")?, Bpffs::new()?);
    host.ip("addr add 169.254.0.2/32 dev lo")?;
    let mut named = config(HookMode::Auto, &bpffs);
    let ends = (0..COUNT / 2).flat_map(|n| [format!("x{n}"), format!("y{n}")]);
    named.interfaces = Some(ends.chain(["lo".to_owned()]).collect());
    let fast_path = start(&host, &named, &[v4()], one(1))?;
    let script: String = (0..COUNT / 2)
        .map(|n| format!("link add x{n} type veth peer name y{n}\n"))
        .collect();
    let batch = tempfile::NamedTempFile::new()?;
    fs::write(batch.path(), script)?;
    let begun = Instant::now();
    host.ip(&format!(
        "-batch {}",
        batch.path().to_str().context("a plain path")?
    ))?;
    let made = begun.elapsed();
    let served = || {
        let status = fast_path.status().interfaces;
        status
            .interfaces
            .iter()
            .filter(|interface| interface.hook.is_some())
            .count()
    };
    wait_until("all of them to be served", ALL_ATTACHED, || {
        served() == COUNT + 1
    })?;
    let all_served = begun.elapsed();
    // No interface delays the others.
    host.ip("link del x7")?;
    wait_until("two less to be served", ALL_ATTACHED, || {
        served() == COUNT - 1
    })?;
    assert_eq!(host.attached_programs()?.len(), COUNT - 1);
    let begun = Instant::now();
    fast_path.stop();
    println!(
        "made in {made:?}, all served {all_served:?} after the first, left in {:?}",
        begun.elapsed()
    );
    // The server stops without waiting for the last ones on a busy machine, and the attacher goes on.
    wait_until("all programs to be detached", ALL_ATTACHED, || {
        host.attached_programs().is_ok_and(|left| left == NOTHING)
    })
}

#[test]
fn interface_events_are_batched() -> Result<()> {
    /// Number of veth pairs; the number of interfaces is twice that.
    const PAIRS: u32 = 256;
    requires!(namespaces, bpf);
    let (namespace, bpffs) = (Namespace::new("many")?, Bpffs::new()?);
    namespace.ip("addr add 169.254.0.2/32 dev lo")?;
    let names = List::default().with("one.bosh", [[10, 0, 0, 1].into()]);
    let mut named = config(HookMode::Auto, &bpffs);
    let ends = (0..PAIRS).flat_map(|n| [format!("n{n}"), format!("f{n}")]);
    named.interfaces = Some(ends.chain(["lo".to_owned()]).collect());
    let fast_path = start(&namespace, &named, &[v4()], names)?;
    let polls = || fast_path.status().interfaces.polls;
    let (before, begun) = (polls(), Instant::now());
    // One by one, as container runtimes do.
    for pair in 0..PAIRS {
        let (near, far) = (format!("n{pair}"), format!("f{pair}"));
        namespace.ip(&format!("link add {near} type veth peer name {far}"))?;
    }
    let served = || {
        fast_path
            .status()
            .interfaces
            .interfaces
            .iter()
            .filter(|one| one.hook.is_some())
            .count()
    };
    // Plus `lo`.
    let all = 1 + 2 * PAIRS as usize;
    wait_until("all of them to be served", ALL_ATTACHED, || served() == all)?;
    for pair in 0..PAIRS {
        namespace.ip(&format!("link del n{pair}"))?;
    }
    wait_until("all of them to be gone", ALL_ATTACHED, || served() == 1)?;
    let (polls, took) = (polls() - before, begun.elapsed());
    println!("{polls} polls in {took:?}");
    // Twelve until the slow pace is reached, after each of the two idle periods; then one per 640
    // ms; one per ten seconds without events.
    let most = 2 * 12 + took.as_millis() / 500;
    assert!(u128::from(polls) <= most, "{polls} polls in {took:?}");
    fast_path.stop();
    Ok(())
}
