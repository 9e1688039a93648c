//! Clients of the control socket that do not read.

use std::{
    io::{Read as _, Write as _},
    os::unix::net::UnixStream,
    path::Path,
    thread,
    time::Duration,
};

use serde_json::json;
use whole_system_tests::{
    namespace::Namespace,
    process::{memory, wait_until},
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
    wait_until("the control socket", Duration::from_secs(120), || {
        socket.exists()
    })
    .unwrap();
    let resident = || memory(server.pid(), "VmRSS").unwrap();
    // Warms the allocator.
    (0..4).for_each(|_| assert_eq!(read_all(&socket), INSTANCES));
    let before = resident();
    let silent: Vec<UnixStream> = (0..CLIENTS).map(|_| ask(&socket)).collect();
    // A client that reads is served as well, once the others' responses have stalled; until then the
    // server refuses it.
    let reader = thread::spawn(move || {
        wait_until("all instances", LIMIT, || read_all(&socket) == INSTANCES)
    });
    let mut peak = 0;
    while !reader.is_finished() {
        peak = peak.max(resident());
        thread::sleep(Duration::from_millis(5));
    }
    reader
        .join()
        .unwrap()
        .expect("a client that reads is served");
    let growth = peak.saturating_sub(before);
    println!(
        "{CLIENTS} clients that do not read: {} KiB more",
        growth >> 10
    );
    assert!(growth < MOST_GROWTH, "{} MiB more", growth >> 20);
    drop(silent);
}

fn ask(socket: &Path) -> UnixStream {
    let mut stream = UnixStream::connect(socket).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    stream
        .write_all(b"GET /instances HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        .unwrap();
    stream
}

/// Reads all instances; returns their number, or of those before the connection was closed.
fn read_all(socket: &Path) -> usize {
    let mut text = Vec::new();
    if let Err(error) = ask(socket).read_to_end(&mut text) {
        assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
    }
    text.split(|&byte| byte == b'\n')
        .filter(|line| line.ends_with(b"}"))
        .count()
}
