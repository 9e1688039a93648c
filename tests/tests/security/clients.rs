//! Clients of the control socket that do not read.

use std::{
    fs,
    io::{Read as _, Write as _},
    os::unix::net::UnixStream,
    path::Path,
    time::{Duration, Instant},
};

use serde_json::json;
use whole_system_tests::{
    namespace::Namespace,
    process::wait_until,
    requires,
    server::{self, Server},
};

/// Instances in the records: `/instances` takes about 3 MB.
const INSTANCES: usize = 200 * 201 / 2;

const CLIENTS: usize = 64;

/// Twice the bytes that may wait, and room for the two replies that are being made.
const MOST_GROWTH: u64 = 40 << 20;

#[test]
fn unread_replies_take_bounded_memory() {
    requires!(namespaces);
    Namespace::new("unread").unwrap().run(unread).unwrap();
}

fn unread() {
    let sizes: Vec<u16> = (1..=200).collect();
    let folder = server::folder(&server::records_of_groups(&sizes), None).unwrap();
    let socket = folder.path().join("control.sock");
    let settings = json!({"control": {"socket": socket}, "xdp": {"mode": "off"}});
    let server = Server::start(None, folder, ([127, 0, 0, 1], 53).into(), &settings).unwrap();
    wait_until("the control socket", Duration::from_secs(30), || socket.exists()).unwrap();
    // Warms the allocator.
    (0..4).for_each(|_| assert_eq!(read_all(&socket), INSTANCES));
    let before = resident(server.pid());
    let silent: Vec<UnixStream> = (0..CLIENTS).map(|_| ask(&socket)).collect();
    let (begun, mut peak) = (Instant::now(), 0);
    while begun.elapsed() < Duration::from_secs(5) {
        peak = peak.max(resident(server.pid()));
        std::thread::sleep(Duration::from_millis(5));
    }
    let growth = peak.saturating_sub(before);
    println!("{CLIENTS} clients that do not read: {} KiB more", growth >> 10);
    assert!(growth < MOST_GROWTH, "{} MiB more", growth >> 20);
    // A client that reads is served meanwhile.
    assert_eq!(read_all(&socket), INSTANCES);
    drop(silent);
}

/// Requests all instances.
fn ask(socket: &Path) -> UnixStream {
    let mut stream = UnixStream::connect(socket).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    stream.write_all(b"GET /instances HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
    stream
}

/// Reads all instances; returns their number.
fn read_all(socket: &Path) -> usize {
    let mut text = String::new();
    ask(socket).read_to_string(&mut text).unwrap();
    text.lines().filter(|line| line.starts_with('{')).count()
}

/// Returns the resident memory of a process in bytes.
fn resident(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}
