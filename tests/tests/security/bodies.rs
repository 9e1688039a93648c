//! Requests to the server's API whose bodies never end, by a member of the control socket's group: memory and
//! descriptors have a bound, and other requests are served.

use std::{
    fs,
    io::{ErrorKind, Read as _, Write as _},
    net::Ipv4Addr,
    os::unix::net::UnixStream,
    path::Path,
    time::Duration,
};

use serde_json::json;
use whole_system_tests::{
    fleet,
    namespace::Namespace,
    process::{memory, wait_until},
    requires,
    server::{self, Server},
};

/// Requests that never end.
const REQUESTS: usize = 64;

/// Bytes sent of each.
const SENT: usize = 8 << 20;

/// Greatest growth of the server's memory in MiB.
const MAX_GROWTH: u64 = 64;

/// Sends a part of a request's body; the rest never follows.
fn unfinished(socket: &Path, path: &str, declared: usize, sent: usize) -> UnixStream {
    let mut stream = UnixStream::connect(socket).unwrap();
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n\
         content-length: {declared}\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).unwrap();
    // A body that has no room is refused, and its connection closed.
    let _ = stream.write_all(&vec![b' '; sent]);
    stream
}

#[test]
fn endless_bodies_take_bounded_memory() {
    requires!(namespaces);
    let namespace = Namespace::new("bodies").unwrap();
    let records = fleet::records(1, [(1, Ipv4Addr::new(10, 0, 0, 1))]);
    let folder = server::folder(&records, None).unwrap();
    let socket = folder.path().join("control.sock");
    let settings = json!({"xdp": {"mode": "off"}, "control": {"socket": socket}});
    let address = (Ipv4Addr::LOCALHOST, 53).into();
    let server = Server::start(Some(&namespace), folder, address, &settings).unwrap();
    let descriptors = || {
        let folder = format!("/proc/{}/fd", server.pid());
        fs::read_dir(folder).unwrap().count()
    };
    let (before, open) = (memory(server.pid(), "VmRSS").unwrap(), descriptors());
    let mut clients = Vec::new();
    for _ in 0..REQUESTS {
        clients.push(unfinished(&socket, "/addresses", SENT, SENT - 1));
    }
    let peak = memory(server.pid(), "VmHWM").unwrap();
    let grown = peak.saturating_sub(before) >> 20;
    println!("{grown} MiB for {REQUESTS} bodies of {} MiB", SENT >> 20);
    assert!(grown < MAX_GROWTH, "{grown} MiB");
    let mut short = unfinished(&socket, "/addresses", 2, 0);
    short.write_all(b"[]").unwrap();
    let mut status = [0; 12];
    short.read_exact(&mut status).unwrap();
    assert_eq!(&status, b"HTTP/1.1 200");
    drop(short);
    // Each is ended by the server: the one that had room after its time, the others at once.
    for mut client in clients {
        client
            .set_read_timeout(Some(Duration::from_secs(120)))
            .unwrap();
        let ended = client.read_to_end(&mut Vec::new());
        let kind = ended.err().map(|error| error.kind());
        assert_ne!(kind, Some(ErrorKind::WouldBlock), "a request is still held");
    }
    let limit = Duration::from_secs(120);
    let has_returned = || descriptors() <= open + 1;
    wait_until("the descriptors", limit, has_returned).unwrap();
}
