//! `bosh-dns-publish apply` killed between any two messages of a run.

use std::{
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream},
    sync::mpsc::{Receiver, Sender, channel},
    thread,
    time::Duration,
};

use serde_json::json;

use crate::{
    name_server::{NameServer, Program},
    publisher::Publisher,
};

const NAMES: usize = 900;

/// Messages of the server after which the publisher is killed: the transfer's, and one per update.
const MESSAGES: usize = 5;

#[test]
fn killed_apply_to_bind_leaves_no_orphan() {
    (1..=MESSAGES).for_each(|messages| kill_after(Program::Bind, messages));
}

#[test]
fn killed_apply_to_knot_leaves_no_orphan() {
    (1..=MESSAGES).for_each(|messages| kill_after(Program::Knot, messages));
}

fn kill_after(program: Program, messages: usize) {
    let server = NameServer::start(program);
    let publisher = Publisher::of(&server);
    let names: Vec<String> = (0..NAMES)
        .map(|number| format!("n{number}.example.org"))
        .collect();
    let addresses: Vec<(&str, &str)> = names
        .iter()
        .map(|name| (name.as_str(), "192.0.2.1"))
        .collect();
    publisher.endpoints("names", &addresses);

    apply_until(&publisher, &server, messages);
    let zone = server.transfer("example.org");
    let (records, owners) = (
        zone.matches("192.0.2.1").count(),
        zone.matches("owner=").count(),
    );
    assert_eq!(
        records, owners,
        "{program:?}, killed after {messages} messages"
    );
    publisher.expect(0, "apply");
    assert_eq!(publisher.expect(0, "plan").errors, "");
    let zone = server.transfer("example.org");
    assert_eq!(
        (
            zone.matches("192.0.2.1").count(),
            zone.matches("owner=").count()
        ),
        (NAMES, NAMES)
    );
}

/// Kills `apply` when this message of the server arrives.
fn apply_until(publisher: &Publisher, server: &NameServer, messages: usize) {
    let (proxy, reached) = proxy(server.address, messages);
    publisher.provider(server, &json!({"rfc2136-host": proxy.to_string()}));
    let mut apply = publisher.spawn("apply");
    // Without the signal the run ended before that many messages.
    while reached.recv_timeout(Duration::from_millis(50)).is_err() {
        if apply.try_wait().unwrap().is_some() {
            break;
        }
    }
    // SIGKILL. The process may have ended already.
    let _ = apply.kill();
    apply.wait().unwrap();
    publisher.provider(server, &json!({}));
}

#[test]
fn deletions_of_a_killed_apply_count() {
    let names: Vec<String> = (0..20)
        .map(|number| format!("n{number}.example.org"))
        .collect();
    let mut addresses = Vec::new();
    for name in &names {
        addresses.push((name.as_str(), "192.0.2.1"));
    }
    let mut was_killed_after_deletions = false;
    for messages in 1..=3 {
        let server = NameServer::start(Program::Bind);
        let publisher = Publisher::of(&server);
        let count = || server.transfer("example.org").matches("192.0.2.1").count();
        publisher.endpoints("names", &addresses);
        publisher.expect(0, "apply");
        publisher.endpoints("names", &addresses[..12]);
        apply_until(&publisher, &server, messages);
        was_killed_after_deletions |= count() == 12;
        // Eight more: in an hour at most ten may go.
        publisher.endpoints("names", &addresses[..4]);
        let said = publisher.expect(1, "apply");
        assert!(said.errors.contains("above the limit of 10"), "{said:?}");
        assert!(count() >= 10, "killed after {messages} messages");
    }
    assert!(was_killed_after_deletions);
}

/// Forwards connections. Holds back the last of `messages` from the server and everything after it, and
/// reports its arrival.
fn proxy(server: SocketAddr, messages: usize) -> (SocketAddr, Receiver<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let (report, reached) = channel();
    thread::spawn(move || {
        // One run uses several connections, one after the other.
        let mut left = messages;
        while left > 0 {
            let Ok((client, _)) = listener.accept() else {
                return;
            };
            left = pass(client, server, left, &report);
        }
    });
    (address, reached)
}

/// Forwards one connection; returns the number of messages left.
fn pass(client: TcpStream, server: SocketAddr, mut left: usize, report: &Sender<()>) -> usize {
    let mut upstream = TcpStream::connect(server).unwrap();
    let (mut requests, mut to_server) =
        (client.try_clone().unwrap(), upstream.try_clone().unwrap());
    thread::spawn(move || {
        // Either side may close the connection at any time.
        let _ = std::io::copy(&mut requests, &mut to_server);
        let _ = to_server.shutdown(std::net::Shutdown::Write);
    });
    let mut to_client = client;
    loop {
        let mut length = [0; 2];
        if upstream.read_exact(&mut length).is_err() {
            return left;
        }
        let mut message = vec![0; usize::from(u16::from_be_bytes(length))];
        upstream.read_exact(&mut message).unwrap();
        left -= 1;
        if left == 0 {
            // The receiver is gone if the test has failed.
            let _ = report.send(());
            // The connection stays open until the publisher is dead.
            let _ = upstream.read(&mut length);
            return 0;
        }
        if to_client
            .write_all(&[&length[..], &message].concat())
            .is_err()
        {
            return left;
        }
    }
}
