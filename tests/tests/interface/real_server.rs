//! The real server with its fast path: killed, stopped, queried by the C library, run as another
//! user.

use std::{
    collections::BTreeSet,
    fs,
    mem::offset_of,
    net::IpAddr,
    os::unix::fs::{MetadataExt as _, symlink},
    path::Path,
    process::Command,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use aya::maps::{Array, Map, MapData};
use dns_common::{
    control::Control,
    entry::{CHUNK_SIZE, EntryHeader},
    name::hash_name,
    object,
};
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use whole_system_tests::{
    bpffs::Bpffs,
    mapping::{Mapping, header_at, offset_in_arena},
    metrics::{Metrics, wait_for_fast_path},
    names::Names,
    namespace::Namespace,
    pair::{Pair, SHORT, TIMEOUT, addresses, v4},
    process::{capture, status_line, wait_until},
    requires,
    resolv_conf::ResolvConf,
    server::{self, Server},
};
use zerocopy::FromBytes as _;

use crate::gated::child;

/// A name in the records.
const NAME: &str = "q-s0.q-g1.bosh.";

/// Two instances of one group.
const RECORDS: &str = r#"{
    "record_keys": ["id", "num_id", "instance_group", "group_ids", "az", "az_id", "network", "network_id",
        "deployment", "ip", "domain", "agent_id", "instance_index"],
    "record_infos": [
        ["a", "1", "web", ["1"], "z1", "1", "net", "1", "dep", "10.0.0.1", "bosh", "agent-a", 0],
        ["b", "2", "web", ["1"], "z2", "2", "net", "1", "dep", "10.0.0.2", "bosh", "agent-b", 1]
    ],
    "version": 1
}"#;

fn published() -> Vec<IpAddr> {
    vec![[10, 0, 0, 1].into(), [10, 0, 0, 2].into()]
}

/// A server on a veth, with private pins.
struct Running {
    server: Server,
    /// Dropped before the namespaces.
    bpffs: Bpffs,
    /// Namespaces of the server and its clients.
    pair: Pair,
}

impl Running {
    /// Starts the server; `xdp` is merged into that section of its configuration.
    fn start(label: &str, xdp: Value) -> Result<Self> {
        let (pair, bpffs) = (Pair::new(label)?, Bpffs::new()?);
        let mut settings = json!({
            "metrics": {"enabled": true},
            "xdp": {"mode": "auto", "bpffs": bpffs.path()},
        });
        server::merge(&mut settings, &json!({"xdp": xdp}));
        let folder = server::folder(RECORDS.as_bytes(), None)?;
        // The server runs as another user and reads files here.
        fs::set_permissions(
            folder.path(),
            std::os::unix::fs::PermissionsExt::from_mode(0o755),
        )?;
        let server = Server::start(Some(&pair.server), folder, v4(), &settings)?;
        wait_for_fast_path(&pair.server).with_context(|| server.log())?;
        Ok(Self {
            server,
            bpffs,
            pair,
        })
    }

    /// Like [`Self::start`], in a time namespace whose monotonic clock is `seconds` ahead.
    fn start_ahead(label: &str, seconds: i64, xdp: &Value) -> Result<Self> {
        let (pair, bpffs) = (Pair::new(label)?, Bpffs::new()?);
        let mut settings = json!({"metrics": {"enabled": true}, "xdp": {"bpffs": bpffs.path()}});
        server::merge(&mut settings, &json!({"xdp": xdp}));
        let folder = server::folder(RECORDS.as_bytes(), None)?;
        let wrapper = folder.path().join("ahead");
        let program = server::program()?;
        let script = format!(
            "#!/bin/sh\nexec unshare --time --monotonic {seconds} -- {} \"$@\"\n",
            program.display()
        );
        fs::write(&wrapper, script)?;
        fs::set_permissions(
            &wrapper,
            std::os::unix::fs::PermissionsExt::from_mode(0o755),
        )?;
        let server =
            Server::start_program(wrapper, Some(&pair.server), folder, v4(), &settings, |_| {})?;
        wait_for_fast_path(&pair.server).with_context(|| server.log())?;
        Ok(Self {
            server,
            bpffs,
            pair,
        })
    }

    /// Queries once from the client's namespace; `None` on timeout.
    fn ask(&self, patience: Duration) -> Result<Option<Vec<IpAddr>>> {
        addresses(&self.pair.client, v4(), NAME, patience)
    }

    /// Queries until the interface answers: a single query may be passed up as a probe.
    fn wait_for_interface_reply(&self) -> Result<()> {
        let before = self.fast_path_replies()?;
        wait_until(
            "a reply from the interface",
            Duration::from_secs(120),
            || {
                matches!(self.ask(TIMEOUT), Ok(Some(found)) if found == published())
                    && self
                        .fast_path_replies()
                        .is_ok_and(|replies| replies > before)
            },
        )
        .with_context(|| self.server.log())
    }

    /// Returns the output of `bosh-dns-xdp detach`.
    fn detach(&self) -> Result<Value> {
        let said = self.server.cli(&self.pair.server, &["detach", "--json"])?;
        Ok(serde_json::from_str(&said)?)
    }

    /// Returns the number of replies from the program.
    fn fast_path_replies(&self) -> Result<u64> {
        Ok(Metrics::read(&self.pair.server)?.fast_path_replies())
    }
}

/// Queries without pause until `done`, repeating each query until it is answered, as stub resolvers
/// do; returns the number of repetitions.
fn ask_on(client: &Namespace, done: &AtomicBool, answered: &AtomicU64) -> Result<u64> {
    let mut repeated = 0;
    while !done.load(Ordering::Relaxed) {
        let begun = Instant::now();
        loop {
            if let Some(found) = addresses(client, v4(), NAME, SHORT)? {
                ensure!(found == published(), "a wrong answer: {found:?}");
                break;
            }
            ensure!(begun.elapsed() < Duration::from_secs(120), "never answered");
            repeated += 1;
        }
        answered.fetch_add(1, Ordering::Relaxed);
    }
    Ok(repeated)
}

#[test]
fn kills_under_load_are_invisible() -> Result<()> {
    requires!(namespaces, bpf);
    let mut running = Running::start("kill", json!({"lease": "30s"}))?;
    let (done, answered) = (AtomicBool::new(false), AtomicU64::new(0));
    let Running { server, pair, .. } = &mut running;
    let more = |what: &str| {
        let before = answered.load(Ordering::Relaxed);
        wait_until(what, Duration::from_secs(120), || {
            answered.load(Ordering::Relaxed) > before + 100
        })
    };
    let repeated = thread::scope(|scope| {
        let client = scope.spawn(|| ask_on(&pair.client, &done, &answered));
        let mut rounds = || -> Result<()> {
            for round in 0..3 {
                more("answers from a running server")?;
                server.process().kill(Duration::from_secs(120))?;
                more("answers from the dead server's programs")?;
                server.restart(Some(&pair.server))?;
                wait_for_fast_path(&pair.server).with_context(|| format!("round {round}"))?;
            }
            more("answers from the last server")
        };
        let outcome = rounds();
        done.store(true, Ordering::Relaxed);
        let repeated = client.join().expect("the client does not panic")?;
        outcome.map(|()| repeated)
    })?;
    println!(
        "{repeated} of {} queries had to be repeated",
        answered.load(Ordering::Relaxed)
    );
    Ok(())
}

#[test]
fn hung_server_falls_silent() -> Result<()> {
    requires!(namespaces, bpf);
    let mut running = Running::start("hang", json!({"lease": "15s"}))?;
    running.wait_for_interface_reply()?;
    running.server.process().signal(Signal::SIGSTOP)?;
    // If the first query is a probe, it is lost; the second is not a probe.
    let seconds = Duration::from_secs(4);
    let answered =
        (0..2).any(|_| matches!(running.ask(seconds), Ok(Some(found)) if found == published()));
    ensure!(answered, "within the lease the program answers");
    // A single unanswered query may just be slow.
    let silent = || (0..8).all(|_| matches!(running.ask(SHORT), Ok(None)));
    wait_until("the lease to end", Duration::from_secs(120), silent)?;
    running.server.process().signal(Signal::SIGCONT)?;
    wait_until(
        "answers from userspace",
        Duration::from_secs(120),
        || matches!(running.ask(SHORT), Ok(Some(found)) if found == published()),
    )?;
    let before = running.fast_path_replies()?;
    wait_until("answers from the program", Duration::from_secs(120), || {
        let right = matches!(running.ask(SHORT), Ok(Some(found)) if found == published());
        right
            && running
                .fast_path_replies()
                .is_ok_and(|replies| replies > before)
    })
}

#[test]
fn time_namespace_keeps_lease_length() -> Result<()> {
    requires!(namespaces, bpf);
    let since_start = fs::read_to_string("/proc/uptime")?;
    let since_start: f64 = since_start
        .split_whitespace()
        .next()
        .context("two numbers")?
        .parse()?;
    // As far behind as possible: a monotonic clock cannot be negative.
    for seconds in [100_000, -(since_start as i64) + 10] {
        let mut running = Running::start_ahead("ahead", seconds, &json!({"lease": "15s"}))?;
        running
            .wait_for_interface_reply()
            .with_context(|| format!("{seconds} s ahead"))?;
        running.server.process().kill(Duration::from_secs(120))?;
        ensure!(
            running.ask(TIMEOUT)? == Some(published()),
            "{seconds} s ahead: within the lease"
        );
        let silent = || (0..8).all(|_| matches!(running.ask(SHORT), Ok(None)));
        wait_until("the lease to end", Duration::from_secs(120), silent)?;
    }
    Ok(())
}

#[test]
fn getaddrinfo_is_answered_at_interface() -> Result<()> {
    const PROGRAM: &str = "import socket, sys
for _ in range(10):
    found = socket.getaddrinfo(sys.argv[1], 80, type=socket.SOCK_STREAM)
    print(*sorted(entry[4][0] for entry in found))";
    requires!(namespaces, bpf);
    let running = Running::start("libc", json!({}))?;
    let _file = ResolvConf::new(&running.pair.client, v4().ip())?;
    let before = running.fast_path_replies()?;
    let mut python = running.pair.client.with_own_sysfs("python3");
    let said = capture(python.args(["-c", PROGRAM, NAME.trim_end_matches('.')]))?;
    let lines: BTreeSet<&str> = said.lines().collect();
    assert_eq!(
        (said.lines().count(), lines),
        (10, BTreeSet::from(["10.0.0.1 10.0.0.2"]))
    );
    // A and AAAA each time; at most one query in four is a probe.
    ensure!(running.fast_path_replies()? - before >= 15, "of 20");
    Ok(())
}

#[test]
fn service_user_keeps_port_capability() -> Result<()> {
    /// CAP_NET_BIND_SERVICE (docs/capabilities.md).
    const SERVER: u64 = 1 << 10;
    const ATTACHER: u64 = 1 << 12 | 1 << 38 | 1 << 39;
    requires!(namespaces, bpf);
    let running = Running::start("user", json!({"user": "nobody"}))?;
    let pid = running.server.pid();
    let users = status_line(pid, "Uid")?;
    ensure!(
        users.split_whitespace().all(|user| user == "65534"),
        "users {users}"
    );
    let attacher = child(pid)?;
    for (pid, kept) in [(pid, SERVER), (attacher, ATTACHER)] {
        for set in ["CapEff", "CapPrm", "CapBnd"] {
            let held = u64::from_str_radix(&status_line(pid, set)?, 16)?;
            ensure!(held == kept, "{set}: {held:#x}, not {kept:#x}");
        }
        ensure!(status_line(pid, "Seccomp")? == "2" && status_line(pid, "NoNewPrivs")? == "1");
    }
    running.wait_for_interface_reply()?;
    // New interfaces are served as well.
    running
        .pair
        .server
        .ip("link add late type veth peer name etal")?;
    wait_until(
        "the late interface to be served",
        Duration::from_secs(120),
        || {
            let family = dns_kit::metrics::names::FAST_PATH_INTERFACE_INFO;
            Metrics::read(&running.pair.server)
                .is_ok_and(|metrics| metrics.sum(family, "interface=\"late\"") == 1)
        },
    )
}

#[test]
fn attacher_ends_with_server() -> Result<()> {
    requires!(namespaces, bpf);
    let mut running = Running::start("orphan", json!({"lease": "30s", "on_stop": "detach"}))?;
    let attacher = child(running.server.pid())?;
    let is_there = || Path::new(&format!("/proc/{attacher}")).exists();
    // Service managers and terminals send signals to the whole group.
    for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP] {
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(attacher.cast_signed()), signal)?;
    }
    ensure!(running.ask(TIMEOUT)? == Some(published()) && is_there());
    running.server.process().stop(Duration::from_secs(120))?;
    wait_until("the attacher's end", TIMEOUT, || !is_there())?;
    ensure!(
        running.pair.server.attached_programs()?.is_empty(),
        "the server requested a detach"
    );
    running.server.restart(Some(&running.pair.server))?;
    wait_for_fast_path(&running.pair.server)?;
    let attacher = child(running.server.pid())?;
    running.server.process().kill(Duration::from_secs(120))?;
    wait_until("the attacher's end", TIMEOUT, || {
        !Path::new(&format!("/proc/{attacher}")).exists()
    })?;
    ensure!(
        running.ask(TIMEOUT)? == Some(published()),
        "the programs stay"
    );
    Ok(())
}

#[test]
fn killed_server_without_pins_falls_silent() -> Result<()> {
    requires!(namespaces, bpf);
    // A folder that cannot be created, as in a container without CAP_SYS_ADMIN.
    let mut running = Running::start(
        "unpinned",
        json!({"lease": "60s", "bpffs": "/proc/no/pins"}),
    )?;
    running.wait_for_interface_reply()?;
    running
        .server
        .wait_for_log("programs are detached when this process ends")?;
    running.server.process().kill(Duration::from_secs(120))?;
    // The attacher ends with the server, and its programs with it.
    wait_until("the programs to go", Duration::from_secs(120), || {
        running
            .pair
            .server
            .attached_programs()
            .is_ok_and(|programs| programs.is_empty())
    })?;
    ensure!(running.ask(SHORT)?.is_none());
    Ok(())
}

#[test]
fn killed_attacher_is_replaced() -> Result<()> {
    requires!(namespaces, bpf);
    let running = Running::start("alone", json!({"lease": "60s"}))?;
    let attacher = child(running.server.pid())?;
    let standby = child(attacher)?;
    let kill = |pid: u32| {
        nix::sys::signal::kill(
            nix::unistd::Pid::from_raw(pid.cast_signed()),
            Signal::SIGKILL,
        )
    };
    // The first attempt to replace it fails.
    let permit_files = |limit: u32| -> Result<()> {
        let mut command = Command::new("prlimit");
        command.args([format!("--pid={standby}"), format!("--nofile={limit}:")]);
        ensure!(command.status()?.success());
        Ok(())
    };
    permit_files(3)?;
    kill(attacher)?;
    running
        .server
        .wait_for_log("cannot start the attacher again")?;
    permit_files(1024)?;
    // Interfaces that appear later are served only by an attacher.
    running
        .pair
        .server
        .ip("link add late type veth peer name etal")?;
    wait_until(
        "the late interface to be served",
        Duration::from_secs(120),
        || {
            let family = dns_kit::metrics::names::FAST_PATH_INTERFACE_INFO;
            Metrics::read(&running.pair.server)
                .is_ok_and(|metrics| metrics.sum(family, "interface=\"late\"") == 1)
        },
    )
    .with_context(|| running.server.log())?;
    running.wait_for_interface_reply()?;
    let pid = running.server.pid();
    let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"))?;
    ensure!(children.is_empty(), "a zombie: {children}");

    // Without the process that replaces it, the loss is final, and userspace answers.
    let second = child(standby)?;
    kill(standby)?;
    kill(second)?;
    running.server.wait_for_log("the attacher has ended")?;
    let userspace =
        || -> Result<u64> { Ok(Metrics::read(&running.pair.server)?.userspace_replies()) };
    let by_userspace = || -> Result<bool> {
        let before = userspace()?;
        for _ in 0..20 {
            ensure!(running.ask(TIMEOUT)? == Some(published()));
        }
        Ok(userspace()? - before >= 20)
    };
    // The publisher ends the lease after the line in the log.
    wait_until(
        "userspace to give every answer",
        Duration::from_secs(120),
        || by_userspace().unwrap_or(false),
    )
}

#[test]
fn handler_names_reach_interface() -> Result<()> {
    /// Short form for every instance below the domain, until a handler takes the domain over.
    const BELOW: &str = "q-s0.sub.bosh.";
    requires!(namespaces, bpf);
    let mut running = Running::start("routes", json!({"on_stop": "keep"}))?;
    let ask = |running: &Running| addresses(&running.pair.client, v4(), BELOW, TIMEOUT);
    let is_answered_by_the_interface = |running: &Running| -> Result<bool> {
        let before = running.fast_path_replies()?;
        ensure!(ask(running)? == Some(published()));
        Ok(running.fast_path_replies()? > before)
    };
    wait_until("the name to be learned", Duration::from_secs(120), || {
        is_answered_by_the_interface(&running).unwrap_or(false)
    })?;
    let handler = running.server.folder.path().join("handlers/deny.json");
    let deny = r#"[{"domain": "sub.bosh.", "source": {"type": "deny"}}]"#;
    fs::write(&handler, deny)?;
    // A single query may be a probe, which userspace answers before the publisher has followed.
    wait_until("the handler", Duration::from_secs(120), || {
        (0..3).all(|_| ask(&running).is_ok_and(|found| found == Some(vec![])))
    })?;
    for _ in 0..100 {
        ensure!(
            ask(&running)? == Some(vec![]),
            "the interface contradicts the route in force"
        );
    }
    // The successor learns its predecessor's learned names, under the current routes.
    running.server.process().stop(Duration::from_secs(120))?;
    running.server.restart(Some(&running.pair.server))?;
    wait_for_fast_path(&running.pair.server)?;
    for _ in 0..100 {
        ensure!(
            ask(&running)? == Some(vec![]),
            "after a restart the interface contradicts the route"
        );
    }
    fs::remove_file(&handler)?;
    wait_until(
        "the name to belong to the fleet again",
        Duration::from_secs(120),
        || is_answered_by_the_interface(&running).unwrap_or(false),
    )
}

#[test]
fn root_ignores_links_among_pins() -> Result<()> {
    requires!(namespaces, bpf);
    let mut running = Running::start("links", json!({"attach_user": "daemon", "on_stop": "keep"}))?;
    running.server.process().stop(Duration::from_secs(120))?;
    // The attacher's user may do this, because it owns the folder.
    let victims = tempfile::tempdir()?;
    let victim = victims.path().join("victim");
    fs::write(&victim, "of root")?;
    let pinned = running.bpffs.links();
    let pin = pinned.first().context("the link was kept")?;
    let links = pin.parent().context("pins are in a folder")?;
    let shared = links
        .parent()
        .and_then(Path::parent)
        .context("servers share a folder")?;
    symlink(&victim, links.join("99-tcx"))?;
    symlink(victims.path(), links.with_file_name("maps-999"))?;
    symlink(victims.path(), shared.join("0_0_0_0-53-1"))?;
    running.server.restart(Some(&running.pair.server))?;
    wait_for_fast_path(&running.pair.server).with_context(|| running.server.log())?;
    for path in [victims.path(), &victim] {
        ensure!(
            fs::metadata(path)?.uid() == 0,
            "{} was given away",
            path.display()
        );
    }
    ensure!(
        fs::symlink_metadata(pin)?.uid() == 1,
        "the attacher's pins are handed over"
    );
    Ok(())
}

#[test]
fn running_server_reattaches_after_detach() -> Result<()> {
    requires!(namespaces, bpf);
    let mut running = Running::start("again", json!({"lease": "60s"}))?;
    assert_eq!(running.detach()?["links"], 2);
    let before = running.fast_path_replies()?;
    ensure!(
        running.ask(TIMEOUT)? == Some(published()),
        "userspace answers meanwhile"
    );
    wait_until("answers from the program", Duration::from_secs(120), || {
        let right = matches!(running.ask(SHORT), Ok(Some(found)) if found == published());
        right
            && running
                .fast_path_replies()
                .is_ok_and(|replies| replies > before)
    })?;
    wait_until(
        "the links to be pinned again",
        Duration::from_secs(120),
        || running.bpffs.links().len() == 2,
    )?;
    wait_until(
        "the maps to be pinned again",
        Duration::from_secs(120),
        || running.bpffs.pinned().len() == 2 + 10,
    )?;
    running.server.process().kill(Duration::from_secs(120))?;
    ensure!(
        running.ask(TIMEOUT)? == Some(published()),
        "reattached programs also outlive the server"
    );
    Ok(())
}

#[test]
fn detach_cleans_up_killed_server() -> Result<()> {
    cleans_up("gone", json!({"lease": "60s"}))
}

#[test]
fn detach_removes_pins_of_attach_user() -> Result<()> {
    cleans_up("theirs", json!({"lease": "60s", "attach_user": "daemon"}))
}

/// Kills a server and requires that `detach`, as root, removes its programs.
fn cleans_up(label: &str, xdp: Value) -> Result<()> {
    requires!(namespaces, bpf);
    let mut running = Running::start(label, xdp)?;
    running.server.process().kill(Duration::from_secs(120))?;
    ensure!(
        running.ask(TIMEOUT)? == Some(published()),
        "the programs stay"
    );
    // Links of lo and srv.
    assert_eq!(running.detach()?["links"], 2);
    ensure!(running.ask(SHORT)?.is_none(), "no interface answers");
    assert_eq!(running.detach()?["links"], 0);
    running.server.restart(Some(&running.pair.server))?;
    wait_for_fast_path(&running.pair.server)?;
    ensure!(running.ask(TIMEOUT)? == Some(published()));
    Ok(())
}

/// `detach` is also what the package's `prerm` calls, as root.
#[test]
fn detach_spares_links_of_others() -> Result<()> {
    requires!(namespaces, bpf);
    let mut running = Running::start("removed", json!({"lease": "60s"}))?;
    let other = Running::start("other", json!({}))?;
    running.server.process().kill(Duration::from_secs(120))?;
    let pins = running.bpffs.links();
    let links = pins
        .first()
        .and_then(|pin| pin.parent())
        .context("pins are in a folder")?;
    let foreign = other.bpffs.links();
    ensure!(foreign.len() == 2, "{foreign:?}");
    for (number, foreign) in foreign.iter().enumerate() {
        symlink(foreign, links.join(format!("{}-tcx", number + 90)))?;
    }
    assert_eq!(running.detach()?["links"], 2);
    ensure!(running.ask(SHORT)?.is_none(), "its own programs are gone");
    let before = other.fast_path_replies()?;
    for _ in 0..20 {
        ensure!(other.ask(TIMEOUT)? == Some(published()));
    }
    ensure!(
        other.fast_path_replies()? > before,
        "the other server's programs are still attached"
    );
    Ok(())
}

#[test]
fn hash_collision_is_logged() -> Result<()> {
    requires!(namespaces, bpf);
    let running = Running::start("collide", json!({}))?;
    let pinned = |name: &str| -> Result<MapData> {
        let path = running
            .bpffs
            .pinned()
            .into_iter()
            .find(|path| path.ends_with(name));
        Ok(MapData::from_pin(
            path.with_context(|| format!("{name} is not pinned"))?,
        )?)
    };
    let control: Array<_, [u8; size_of::<Control>()]> =
        Map::Array(pinned(object::CONTROL)?).try_into()?;
    let seed = Control::read_from_bytes(&control.get(&0, 0)?)
        .expect("as long as it is")
        .hash_seed;
    let mut names = Names::from_pin(pinned(object::NAMES)?)?;
    let hash = |name: &str| {
        hash_name(
            seed,
            name.parse::<dns_core::name::Name>()
                .expect("a name")
                .as_wire(),
        )
    };
    // Lets another name find the entry of the published one, as if both had the same hash.
    let mut entries = Mapping::of(&pinned(object::ENTRIES)?, CHUNK_SIZE)?;
    let places = names.get(hash(NAME))?;
    let mut places = places.into_iter();
    let found = places.find(|&place| header_at(&mut entries, place).hash == hash(NAME));
    let place = found.context("not published")?;
    names.set(hash("q-s0.q-g9.bosh."), place, None)?;
    let start = offset_in_arena(place) + offset_of!(EntryHeader, hash);
    entries.bytes_mut()[start..start + 8].copy_from_slice(&hash("q-s0.q-g9.bosh.").to_ne_bytes());
    for name in ["q-s0.q-g9.bosh.", NAME] {
        let found = addresses(&running.pair.client, v4(), name, TIMEOUT)?;
        let expected = if name == NAME {
            published()
        } else {
            Vec::new()
        };
        ensure!(found == Some(expected), "{name}: {found:?}");
    }
    let messages = || {
        running
            .server
            .log()
            .lines()
            .filter(|line| line.contains("[ebpf]"))
            .count()
    };
    wait_until("the message", TIMEOUT, || messages() > 0)?;
    ensure!(messages() == 1, "{}", running.server.log());
    Ok(())
}
