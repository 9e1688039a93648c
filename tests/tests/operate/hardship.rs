//! A machine short of inotify instances or memory, and one whose clock jumps.

use std::{
    fs, io,
    net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket},
    os::unix::{fs::chown, process::CommandExt as _},
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use hickory_proto::{op::Message, rr::RecordType};
use nix::unistd::{Uid, setuid};
use serde_json::json;
use whole_system_tests::{
    client::{addresses, ask, query},
    fleet::Fleet,
    namespace::Namespace,
    process::wait_until,
    requirements, requires,
    server::{self, Server},
};

use crate::running::RECORDS;

/// Listen address of the server, on a port that needs no privilege.
const OURS: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 5353);

/// Time limit for a change to be noticed, reached only on failure.
const LIMIT: Duration = Duration::from_secs(120);

/// Replaces the records of a server, and waits until it answers with the new address of `db`.
fn move_instance(namespace: &Namespace, server: &Server, address: [u8; 4]) -> Result<()> {
    let file = server.folder.path().join("records.json");
    let text = RECORDS.replace("10.0.0.4", &Ipv4Addr::from(address).to_string());
    fs::write(file.with_extension("new"), text)?;
    fs::rename(file.with_extension("new"), &file)?;
    wait_until("the new records", LIMIT, || {
        let asked = namespace.run(|| ask(OURS, &query("q-s0.q-g2.bosh.", RecordType::A, None)?));
        matches!(asked, Ok(Ok(reply)) if addresses(&reply) == [IpAddr::from(address)])
    })
    .with_context(|| server.log())
}

#[test]
fn inotify_exhaustion_spares_updates() -> Result<()> {
    /// A user without other processes: the kernel's limit is per user.
    const USER: u32 = 64_998;
    requires!(namespaces);
    let namespace = Namespace::new("inotify")?;
    let folder = server::folder(RECORDS.as_bytes(), None)?;
    for path in [folder.path().to_owned(), folder.path().join("records.json")] {
        chown(path, Some(USER), Some(USER))?;
    }
    let settings = json!({"xdp": {"mode": "off"}});
    let server = Server::start_prepared(Some(&namespace), folder, OURS, &settings, |command| {
        // SAFETY: plain system calls, allowed between fork and exec.
        unsafe { command.pre_exec(exhaust_inotify) };
    })?;
    move_instance(&namespace, &server, [10, 0, 0, 44])?;
    server.wait_for_log("inotify is unavailable")?;
    Ok(())
}

/// Becomes another user and takes all its inotify instances, which the program then inherits.
fn exhaust_inotify() -> io::Result<()> {
    setuid(Uid::from_raw(64_998))?;
    // SAFETY: the call takes no pointer.
    while unsafe { libc::inotify_init1(0) } >= 0 {}
    let error = io::Error::last_os_error();
    if error.raw_os_error() == Some(libc::EMFILE) {
        Ok(())
    } else {
        Err(error)
    }
}

/// Debian's library that gives a program another wall clock.
const FAKETIME: &str = "/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1";

#[test]
fn clock_jumps_change_no_answer() -> Result<()> {
    requires!(namespaces);
    if !requirements::met("faketime", fs::metadata(FAKETIME).map(drop)) {
        return Ok(());
    }
    let namespace = Namespace::new("clock")?;
    let upstream = namespace.run(|| UdpSocket::bind("127.0.0.1:5300"))??;
    upstream.set_read_timeout(Some(Duration::from_millis(50)))?;
    let folder = server::folder(RECORDS.as_bytes(), None)?;
    let offset = folder.path().join("offset");
    fs::write(&offset, "+0\n")?;
    let settings = json!({
        "xdp": {"mode": "off"}, "disable_recursors": false, "recursors": ["127.0.0.1:5300"],
        "cache": {"enabled": true},
    });
    let clock = offset.clone();
    let server = Server::start_prepared(Some(&namespace), folder, OURS, &settings, |command| {
        command
            .env("LD_PRELOAD", FAKETIME)
            .env("FAKETIME_TIMESTAMP_FILE", clock);
        command
            .env("FAKETIME_NO_CACHE", "1")
            .env("DONT_FAKE_MONOTONIC", "1");
        command.env("FAKETIME_DONT_FAKE_MONOTONIC", "1");
    })?;
    let asked = |name: &str| -> Result<(Message, usize)> {
        thread::scope(|scope| {
            let answering = scope.spawn(|| answer_all(&upstream));
            let reply = namespace.run(|| ask(OURS, &query(name, RecordType::A, None)?))?;
            let count = answering.join().expect("no panic");
            Ok((reply?, count))
        })
    };
    let (reply, count) = asked("kept.test.")?;
    ensure!(count == 1 && reply.answers.len() == 1, "{reply}");
    for (number, jump) in ["+400d", "-4000d", "+0"].into_iter().enumerate() {
        fs::write(&offset, format!("{jump}\n"))?;
        let (reply, count) = asked("kept.test.")?;
        ensure!(count == 0, "{jump}: the cached answer was lost: {reply}");
        let ttl = reply.answers.first().map_or(0, |record| record.ttl);
        ensure!((3000..=3600).contains(&ttl), "{jump}: TTL {ttl}");
        let (reply, count) = asked(&format!("n{number}.test."))?;
        ensure!(count == 1 && reply.answers.len() == 1, "{jump}: {reply}");
        move_instance(&namespace, &server, [10, 0, 1, number as u8])?;
    }
    Ok(())
}

/// Answers the queries of a moment with an address and a TTL of an hour; returns their number.
fn answer_all(socket: &UdpSocket) -> usize {
    let mut buffer = [0; 1500];
    let (mut count, mut silent) = (0, 0);
    while silent < 6 {
        let Ok((length, client)) = socket.recv_from(&mut buffer) else {
            silent += 1;
            continue;
        };
        count += 1;
        let Ok(mut reply) = Message::from_vec(&buffer[..length]) else {
            continue;
        };
        let name = reply.queries[0].name().clone();
        reply.metadata.message_type = hickory_proto::op::MessageType::Response;
        let data = hickory_proto::rr::RData::A(hickory_proto::rr::rdata::A::new(192, 0, 2, 1));
        reply.add_answer(hickory_proto::rr::Record::from_rdata(name, 3600, data));
        let _ = socket.send_to(&reply.to_vec().expect("a reply built by the test"), client);
    }
    count
}

/// A memory cgroup (version 1 or 2), removed on drop.
struct MemoryGroup {
    folder: PathBuf,
    is_v2: bool,
}

impl MemoryGroup {
    /// Creates a group with a limit in bytes.
    fn new(limit: u64) -> io::Result<Self> {
        let name = format!("bdx-{}", std::process::id());
        let v1 = Path::new("/sys/fs/cgroup/memory");
        let is_v2 = !v1.is_dir();
        let root = if is_v2 {
            Path::new("/sys/fs/cgroup")
        } else {
            v1
        };
        let group = Self {
            folder: root.join(name),
            is_v2,
        };
        fs::create_dir(&group.folder)?;
        fs::write(
            group.folder.join(if is_v2 {
                "memory.max"
            } else {
                "memory.limit_in_bytes"
            }),
            limit.to_string(),
        )?;
        Ok(group)
    }

    /// Returns the highest use of memory so far, in bytes.
    fn peak(&self) -> Result<u64> {
        let file = if self.is_v2 {
            "memory.peak"
        } else {
            "memory.max_usage_in_bytes"
        };
        Ok(fs::read_to_string(self.folder.join(file))?.trim().parse()?)
    }
}

impl Drop for MemoryGroup {
    fn drop(&mut self) {
        // The processes of the group may still be ending.
        let _ = wait_until("the end of a cgroup", Duration::from_secs(120), || {
            fs::remove_dir(&self.folder).is_ok()
        });
    }
}

#[test]
fn small_memory_suffices() -> Result<()> {
    const MEMORY: u64 = 64 << 20;
    requires!(namespaces);
    let group = MemoryGroup::new(MEMORY);
    if !requirements::met(
        "memory cgroups",
        group.as_ref().map(drop).map_err(ToString::to_string),
    ) {
        return Ok(());
    }
    let group = group?;
    let namespace = Namespace::new("small")?;
    let fleet = Fleet::generate(1000, 3);
    let folder = server::folder(&fleet.records_json(), Some(&fleet.aliases_json()))?;
    let settings = json!({
        "xdp": {"mode": "off"}, "disable_recursors": false, "recursors": ["127.0.0.9:53"], "cache": {"enabled": true},
    });
    let members = group.folder.join("cgroup.procs");
    let mut server =
        Server::start_prepared(Some(&namespace), folder, OURS, &settings, move |command| {
            // SAFETY: writes a file; the number 0 means the writing process.
            unsafe { command.pre_exec(move || fs::write(&members, "0")) };
        })?;
    // A flood of names that get no answer, and every name of the fleet.
    let silent = namespace.run(|| UdpSocket::bind("127.0.0.9:53"))??;
    let names = fleet.names();
    namespace.run(|| -> Result<()> {
        let flooding = UdpSocket::bind("127.0.0.1:0")?;
        for (number, name) in names.iter().cycle().take(20_000).enumerate() {
            let flood = query(&format!("f{number}.test."), RecordType::A, None)?;
            flooding.send_to(&flood.to_vec()?, OURS)?;
            if number % 10 == 0 {
                let reply = ask(OURS, &query(name, RecordType::A, Some(1232))?)?;
                ensure!(!reply.answers.is_empty(), "{name}: {reply}");
            }
        }
        Ok(())
    })??;
    drop(silent);
    ensure!(
        server.process().ended()?.is_none(),
        "the server ended:\n{}",
        server.log()
    );
    println!("peak memory of the group: {} MiB", group.peak()? >> 20);
    drop(server);
    Ok(())
}
