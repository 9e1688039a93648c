//! Changes of a name's type, which servers may ignore although they answer NOERROR (RFC 2136, section 3.4.2.2), in
//! signed and unsigned zones.

use std::{
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream},
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};

use serde_json::{Value, json};

use crate::{
    name_server::{NameServer, Options, Program, SECRET},
    power_dns::PowerDns,
    process::run,
    publisher::Publisher,
};

/// Names that change their type.
const NAMES: usize = 6;

#[test]
fn changes_of_type_arrive_at_bind() {
    for is_signed in [false, true] {
        let server = NameServer::with(Program::Bind, signed(is_signed));
        change_types(server.address, is_signed);
    }
}

#[test]
fn changes_of_type_arrive_at_knot() {
    for is_signed in [false, true] {
        let server = NameServer::with(Program::Knot, signed(is_signed));
        change_types(server.address, is_signed);
    }
}

#[test]
fn changes_of_type_arrive_at_power_dns() {
    for is_signed in [false, true] {
        let server = PowerDns::start(is_signed);
        change_types(server.address, is_signed);
    }
}

fn signed(is_signed: bool) -> Options {
    Options {
        is_signed,
        ..Options::default()
    }
}

/// Returns all records of the zone as dig prints them.
fn transfer(server: SocketAddr) -> String {
    let key = format!("hmac-sha256:publisher:{SECRET}");
    let (ip, port) = (format!("@{}", server.ip()), server.port().to_string());
    let arguments = [
        "-y",
        &key,
        &ip,
        "-p",
        &port,
        "example.org",
        "AXFR",
        "+noall",
        "+answer",
    ];
    run(Command::new("dig").args(arguments), "")
}

/// Writes a document in which all names have records of one type.
fn want(publisher: &Publisher, record_type: &str, target: &str) {
    let endpoints: Vec<Value> = (0..NAMES)
        .map(|number| {
            json!({"dnsName": format!("t{number}.example.org"), "recordTTL": 60, "recordType": record_type,
                "targets": [target]})
        })
        .collect();
    let document = json!({
        "apiVersion": "externaldns.k8s.io/v1alpha1", "kind": "DNSEndpoint",
        "metadata": {"name": "types", "labels": {"dnsprovider": "bind"}}, "spec": {"endpoints": endpoints},
    });
    publisher.write("documents/types.json", &document.to_string());
}

fn change_types(server: SocketAddr, is_signed: bool) {
    let publisher = Publisher::new();
    publisher.provider_at(server, &json!({}));
    let (address, host) = ("192.0.2.1", "www.example.org");
    for (record_type, target) in [
        ("A", address),
        ("CNAME", host),
        ("A", address),
        ("AAAA", "2001:db8::1"),
        ("CNAME", host),
        ("AAAA", "2001:db8::1"),
        ("CNAME", host),
    ] {
        want(&publisher, record_type, target);
        let said = publisher.expect(0, "apply");
        assert_eq!(
            said.out,
            format!("default/bind: {NAMES} names changed\n"),
            "{said:?}"
        );
        let zone = transfer(server);
        for number in 0..NAMES {
            let name = format!("t{number}.example.org.");
            let types: Vec<&str> = zone
                .lines()
                .filter(|line| line.starts_with(&name))
                .filter_map(|line| line.split_whitespace().nth(3))
                .filter(|found| !["RRSIG", "NSEC", "NSEC3"].contains(found))
                .collect();
            assert_eq!(types, [record_type], "{name}: {zone}");
        }
        assert_eq!(zone.contains("RRSIG"), is_signed, "{zone}");
        publisher.expect(0, "plan");
    }
    publisher.expect(0, &format!("retire --confirm-deletions {NAMES}"));
    let zone = transfer(server);
    assert!(!zone.contains("heritage") && !zone.contains(host), "{zone}");
}

#[test]
fn ignored_changes_are_an_error() {
    let options = Options {
        is_open: true,
        ..Options::default()
    };
    let server = NameServer::with(Program::Bind, options);
    let ignores = Arc::new(AtomicBool::new(true));
    let proxy = proxy(server.address, ignores.clone());
    let publisher = Publisher::new();
    publisher.provider_at(proxy, &json!({"rfc2136-insecure": true}));
    publisher.endpoints("web", &[("a.example.org", "192.0.2.1")]);
    let said = publisher.expect(1, "apply");
    assert_eq!(said.out, "default/bind: 0 names changed\n");
    assert!(
        said.errors
            .contains("a.example.org: accepted, but the records are not as requested"),
        "{said:?}"
    );
    ignores.store(false, Ordering::Relaxed);
    assert_eq!(
        publisher.expect(0, "apply").out,
        "default/bind: 1 names changed\n"
    );
    ignores.store(true, Ordering::Relaxed);
    publisher.expect(1, "retire --confirm-deletions 1");
    assert!(server.ask("a.example.org", dns_publish::record::RecordType::A) == (0, 1));
    ignores.store(false, Ordering::Relaxed);
    publisher.expect(0, "retire --confirm-deletions 1");
}

/// Forwards unsigned messages to a server, updates without their changes while `ignores` is set.
fn proxy(server: SocketAddr, ignores: Arc<AtomicBool>) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || {
        for client in listener.incoming() {
            let mut client = client.unwrap();
            let mut upstream = TcpStream::connect(server).unwrap();
            let (mut responses, mut to_client) =
                (upstream.try_clone().unwrap(), client.try_clone().unwrap());
            // Either side may close the connection at any time.
            thread::spawn(move || std::io::copy(&mut responses, &mut to_client));
            while let Some(mut message) = receive(&mut client) {
                if ignores.load(Ordering::Relaxed) {
                    leave_out_changes(&mut message);
                }
                let length = u16::try_from(message.len()).unwrap().to_be_bytes();
                upstream
                    .write_all(&[&length[..], &message].concat())
                    .unwrap();
            }
            // The server answers what it has received, and closes.
            let _ = upstream.shutdown(std::net::Shutdown::Write);
        }
    });
    address
}

fn receive(stream: &mut TcpStream) -> Option<Vec<u8>> {
    let mut length = [0; 2];
    stream.read_exact(&mut length).ok()?;
    let mut message = vec![0; usize::from(u16::from_be_bytes(length))];
    stream.read_exact(&mut message).ok()?;
    Some(message)
}

/// Cuts an update after its prerequisites.
fn leave_out_changes(message: &mut Vec<u8>) {
    let word = |message: &[u8], at: usize| u16::from_be_bytes([message[at], message[at + 1]]);
    const UPDATE: u8 = 5;
    if (message[2] >> 3) & 0xf != UPDATE {
        return;
    }
    let mut at = skip_name(message, 12) + 4;
    for _ in 0..word(message, 6) {
        at = skip_name(message, at);
        at += 10 + usize::from(word(message, at + 8));
    }
    message.truncate(at);
    message[8..12].fill(0);
}

fn skip_name(message: &[u8], mut at: usize) -> usize {
    loop {
        match message[at] {
            0 => return at + 1,
            192.. => return at + 2,
            length => at += 1 + usize::from(length),
        }
    }
}
