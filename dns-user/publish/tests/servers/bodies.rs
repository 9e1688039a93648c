//! Messages to the webhook port that never end: the publisher's memory has a bound, and it goes on answering.

use std::{
    fs,
    io::{ErrorKind, Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    time::Duration,
};

use serde_json::json;
use test_support::free_address;

use crate::publisher::{Publisher, Running};

const MEDIA_TYPE: &str = "application/external.dns.webhook+json;version=1";

/// Number of messages that never end.
const MESSAGES: usize = 30;

/// Bytes sent of each.
const SENT: usize = 31 << 20;

/// Greatest growth of the publisher's memory in MiB: one message in a growing buffer, and those of the connections.
const MAX_GROWTH: u64 = 96;

/// Returns a size of the publisher's memory in MiB.
fn memory(running: &Running, name: &str) -> u64 {
    let status = fs::read_to_string(format!("/proc/{}/status", running.child.id())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(name));
    let kib = line.unwrap().trim().trim_end_matches(" kB").parse::<u64>();
    kib.unwrap() >> 10
}

fn descriptors(running: &Running) -> usize {
    fs::read_dir(format!("/proc/{}/fd", running.child.id()))
        .unwrap()
        .count()
}

/// Sends a part of a message; the rest never follows.
fn unfinished(address: SocketAddr, declared: usize, sent: usize) -> TcpStream {
    let mut stream = TcpStream::connect(address).unwrap();
    let head = format!(
        "POST /records HTTP/1.1\r\nhost: x\r\naccept: {MEDIA_TYPE}\r\ncontent-type: {MEDIA_TYPE}\r\n\
         content-length: {declared}\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).unwrap();
    // A message that has no room is refused, and its connection closed.
    let _ = stream.write_all(&vec![b' '; sent]);
    stream
}

#[test]
fn endless_messages_take_bounded_memory() {
    let publisher = Publisher::new();
    let webhook = free_address();
    fs::create_dir(publisher.path("aliases")).unwrap();
    let server = json!({"port": 53, "alias_files_glob": publisher.path("aliases/*"), "control": {"socket": publisher.path("none.sock")}});
    publisher.write("config.json", &server.to_string());
    let config = json!({
        "documents": ["documents"],
        "store": "state/store",
        "control": {"socket": "control.sock"},
        "server": "config.json",
        "webhook": {
            "address": webhook.to_string(),
            "domains": ["apps.internal"],
            "alias_file": publisher.path("aliases/external-dns.json"),
        },
    });
    publisher.write("publish.yml", &config.to_string());
    let running = publisher.start();
    running.wait_until("the webhook's port", || TcpStream::connect(webhook).is_ok());
    let (before, open) = (memory(&running, "VmRSS:"), descriptors(&running));
    let mut clients = Vec::new();
    for _ in 0..MESSAGES {
        clients.push(unfinished(webhook, SENT + 1, SENT));
    }
    let grown = memory(&running, "VmHWM:").saturating_sub(before);
    println!("{grown} MiB for {MESSAGES} messages of {} MiB", SENT >> 20);
    assert!(grown < MAX_GROWTH, "{grown} MiB");
    // A short message is read beside them.
    let text = "{}";
    let mut short = unfinished(webhook, text.len(), 0);
    short.write_all(text.as_bytes()).unwrap();
    let mut status = [0; 12];
    short.read_exact(&mut status).unwrap();
    assert_eq!(&status, b"HTTP/1.1 204");
    // Each is ended by the publisher: the one that had room after its time, the others at once.
    drop(short);
    for mut client in clients {
        client
            .set_read_timeout(Some(Duration::from_secs(60)))
            .unwrap();
        let ended = client.read_to_end(&mut Vec::new());
        let kind = ended.err().map(|error| error.kind());
        assert_ne!(kind, Some(ErrorKind::WouldBlock), "a message is still held");
    }
    running.wait_until("the descriptors", || descriptors(&running) <= open + 1);
}
