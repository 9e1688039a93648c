//! Measures large answers of one service over TCP, without sockets (`cargo bench -p dns-consul`):
//! the fastest of each, because other load of the machine only adds to the time.

#![expect(
    clippy::unwrap_used,
    reason = "a measurement that cannot set up has failed"
)]

use std::{
    net::{IpAddr, Ipv4Addr},
    time::{Duration, Instant},
};

use dns_consul::{Asker, Zone, catalog::Catalog, config::Config, definition::Definitions};
use dns_core::{
    config::reader::{Json, ObjectReader},
    wire::{Parsed, TYPE_A, Transport, parse_by},
};
use hashbrown::HashMap;
use serde_json::json;

const TYPE_SRV: u16 = 33;

/// Duration of each measurement.
const DURATION: Duration = Duration::from_secs(1);

fn main() {
    for size in [1_300, 5_000] {
        let zone = zone(size);
        for (label, qtype) in [("A", TYPE_A), ("SRV", TYPE_SRV)] {
            let mut query =
                b"\x12\x34\x01\0\0\x01\0\0\0\0\0\0\x03web\x07service\x06consul\0".to_vec();
            query.extend_from_slice(&qtype.to_be_bytes());
            query.extend_from_slice(&1_u16.to_be_bytes());
            // The same draws in every run.
            let mut random = fastrand::Rng::with_seed(7);
            let begun = Instant::now();
            let mut fastest = DURATION;
            let mut length = 0;
            while begun.elapsed() < DURATION {
                let sent = Instant::now();
                length = reply(&zone, &query, &mut random).len();
                fastest = fastest.min(sent.elapsed());
            }
            println!("{size} instances, {label}, TCP: {fastest:.1?} for {length} bytes");
        }
    }
}

/// Returns the reply to a query over TCP.
fn reply(zone: &Zone, message: &[u8], random: &mut fastrand::Rng) -> Vec<u8> {
    let Parsed::Query(query) = parse_by(Transport::Tcp, message) else {
        panic!("the message is a query")
    };
    let client = IpAddr::V4(Ipv4Addr::LOCALHOST);
    let asker = Asker {
        client,
        recursion: false,
        serial: 1,
    };
    let draft = zone.answer(&query, &asker, random).unwrap();
    draft.finish(&query, &zone.config.dns, &HashMap::new())
}

/// Returns a zone with one service of `size` instances, each on its own node.
fn zone(size: u32) -> Zone {
    let json = Json::parse(b"{}").unwrap();
    let (config, _) = Config::read(&ObjectReader::document("bench", &json).unwrap()).unwrap();
    let mut nodes = Vec::new();
    let mut services = Vec::new();
    for number in 0..size {
        let node = format!("n{number}");
        let address = Ipv4Addr::from_bits(0x0a00_0101 + number).to_string();
        nodes.push(json!({"node": node, "address": address}));
        services.push(json!({"node": node, "service": "web", "port": 8000}));
    }
    let text = json!({"nodes": nodes, "services": services}).to_string();
    let definitions = Definitions::read([("catalog.json", text.as_bytes())], &config)
        .whole()
        .unwrap();
    let catalog = Catalog::build(
        definitions.registrations,
        &config,
        config.visibility.clone(),
    );
    Zone { config, catalog }
}
