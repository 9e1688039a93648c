//! Clients of the control socket that do not read, or slowly.

use std::{
    fs,
    io::{Read as _, Write as _},
    os::unix::net::UnixStream,
    path::Path,
    sync::{
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread,
    time::Duration,
};

use serde_json::json;
use whole_system_tests::{
    namespace::Namespace,
    process::wait_until,
    requires,
    server::{self, Server},
};

/// Groups in the records, each larger by one instance.
const GROUPS: u16 = 180;

/// Instances in the records: `/instances` takes 2.5 MB.
const INSTANCES: usize = GROUPS as usize * (GROUPS as usize + 1) / 2;

const CLIENTS: usize = 64;

/// Longer than all replies take to make on a busy machine.
const LIMIT: Duration = Duration::from_secs(300);

/// The bytes that may wait, the replies that are being made, and loss by fragmentation. All replies
/// take 160 MB.
const MOST_GROWTH: u64 = 72 << 20;

#[test]
fn unread_replies_take_bounded_memory() {
    requires!(namespaces);
    Namespace::new("unread").unwrap().run(unread).unwrap();
}

fn unread() {
    let sizes: Vec<u16> = (1..=GROUPS).collect();
    let folder = server::folder(&server::records_of_groups(&sizes), None).unwrap();
    let socket = folder.path().join("control.sock");
    let settings = json!({"control": {"socket": socket}, "xdp": {"mode": "off"}});
    let server = Server::start(None, folder, ([127, 0, 0, 1], 53).into(), &settings).unwrap();
    wait_until("the control socket", Duration::from_secs(30), || socket.exists()).unwrap();
    // Warms the allocator.
    (0..4).for_each(|_| assert_eq!(read_all(&socket), INSTANCES));
    let before = resident(server.pid());
    let silent: Vec<UnixStream> = (0..CLIENTS).map(|_| ask(&socket)).collect();
    // A client that reads is served as well, once the others' responses have stalled; until then the
    // server refuses it.
    let reader = thread::spawn(move || wait_until("all instances", LIMIT, || read_all(&socket) == INSTANCES));
    let mut peak = 0;
    while !reader.is_finished() {
        peak = peak.max(resident(server.pid()));
        thread::sleep(Duration::from_millis(5));
    }
    reader.join().unwrap().expect("a client that reads is served");
    let growth = peak.saturating_sub(before);
    println!("{CLIENTS} clients that do not read: {} KiB more", growth >> 10);
    assert!(growth < MOST_GROWTH, "{} MiB more", growth >> 20);
    drop(silent);
}

#[test]
fn slow_user_leaves_room_for_others() {
    requires!(namespaces);
    Namespace::new("slow").unwrap().run(slow).unwrap();
}

fn slow() {
    const NOBODY: u32 = 65534;
    let sizes: Vec<u16> = (1..=GROUPS).collect();
    let folder = server::folder(&server::records_of_groups(&sizes), None).unwrap();
    fs::set_permissions(folder.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let socket = folder.path().join("run/control.sock");
    let settings = json!({"control": {"socket": socket, "user": "nobody"}, "xdp": {"mode": "off"}});
    let _server = Server::start(None, folder, ([127, 0, 0, 1], 53).into(), &settings).unwrap();
    wait_until("the control socket", Duration::from_secs(30), || socket.exists()).unwrap();
    let is_answered = AtomicBool::new(false);
    let (refused, is_refused) = mpsc::channel();
    thread::scope(|scope| {
        let slow = scope.spawn(|| {
            // Of this thread alone; nix changes all of them. The server sees the user at connect(2).
            // SAFETY: a plain system call.
            let changed = unsafe { libc::syscall(libc::SYS_setresuid, NOBODY, NOBODY, NOBODY) };
            assert_eq!(changed, 0);
            // Holds as much as the server admits and takes it in small parts, so that nothing stalls.
            let mut held: Vec<UnixStream> = Vec::new();
            while !is_answered.load(Ordering::Relaxed) {
                let mut stream = ask(&socket);
                let mut head = [0; 16];
                stream.read_exact(&mut head).unwrap();
                match &head {
                    b"HTTP/1.1 200 OK\r" => held.push(stream),
                    _ => _ = refused.send(()),
                }
                held.retain_mut(|stream| matches!(stream.read(&mut [0; 16 << 10]), Ok(1..)));
                thread::sleep(Duration::from_millis(50));
            }
        });
        let limit = is_refused.recv_timeout(LIMIT);
        let read = limit.is_ok().then(|| read_all(&socket));
        is_answered.store(true, Ordering::Relaxed);
        slow.join().unwrap();
        assert_eq!(read, Some(INSTANCES), "while the slow user is refused");
    });
}

fn ask(socket: &Path) -> UnixStream {
    let mut stream = UnixStream::connect(socket).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    stream.write_all(b"GET /instances HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
    stream
}

/// Reads all instances; returns their number, or of those before the connection was closed.
fn read_all(socket: &Path) -> usize {
    let mut text = Vec::new();
    if let Err(error) = ask(socket).read_to_end(&mut text) {
        assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
    }
    text.split(|&byte| byte == b'\n').filter(|line| line.ends_with(b"}")).count()
}

/// Returns the resident memory of a process in bytes.
fn resident(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}
