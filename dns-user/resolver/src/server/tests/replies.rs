//! Local replies of other types as interfaces give them: up to the order of records, the bytes that
//! userspace sends for the same state.

use std::collections::BTreeSet;

use dns_consul::{config::Config as ConsulConfig, definition::Definitions};
use dns_core::wire::{Parsed, opt_record, parse};
use dns_fastpath::{AnswerQuestion, forwarded::local_entry};
use hickory_proto::rr::Record;
use test_support::forwarded::models;

use super::*;
use crate::consul::{Catalogs, ConsulNames};

const NAMES: [&str; 17] = [
    "web.service.consul",
    "_web._tcp.service.consul",
    "blue.web.service.consul",
    "ext.service.consul",
    "none.service.consul",
    "web.service.dc2.consul",
    "here.node.consul",
    "nobody.node.consul",
    "consul",
    "service.consul",
    "ns.consul",
    "0a000001.addr.dc1.consul",
    "0.0.0.10.in-addr.arpa",
    "1.0.0.10.in-addr.arpa",
    "9.0.0.10.in-addr.arpa",
    "q-s0.q-g1.bosh",
    "nobody.bosh",
];

const TYPES: [u16; 11] = [1, 2, 5, 6, 12, 16, 28, 33, 64, 65, TYPE_ANY];

/// EDNS sizes of clients.
const SIZES: [Option<u16>; 7] = [
    None,
    Some(0),
    Some(512),
    Some(600),
    Some(1232),
    Some(4096),
    Some(u16::MAX),
];

/// Returns a state with random instances of the fleet and of Consul's services.
fn random_state(random: &mut fastrand::Rng) -> Arc<ServerState> {
    let document =
        br#"{"consul": {"node_name": "here", "advertise_addr": "10.0.0.1", "node_meta": {"rack": "a b"}}}"#;
    let (config, _) = ConsulConfig::of_document("config.json", document)
        .valid
        .expect("a configuration");
    let mut services = vec![
        r#"{"name": "ext", "address": "q-s0.q-g1.bosh", "port": 7}"#.to_owned(),
        r#"{"name": "other", "address": "fd00::5", "port": 7}"#.to_owned(),
    ];
    services.extend((0..random.usize(..40)).map(|index| {
        let (port, tag) = (random.u16(1..), if random.bool() { "blue" } else { "a-longer-tag" });
        format!(
            r#"{{"name": "web", "id": "web-{index}", "address": "10.1.0.{index}", "port": {port}, "tags": ["{tag}"]}}"#
        )
    }));
    let text = format!(r#"{{"services": [{}]}}"#, services.join(", "));
    let definitions = Definitions::read([("a.json", text.as_bytes())], &config);
    assert!(definitions.errors.is_empty(), "{:?}", definitions.errors);
    let catalogs = Catalogs::new(config);
    catalogs.set_files(definitions.valid.registrations);
    let consul = Arc::new(ConsulNames::new(catalogs.zone(), FastPathHandle::default()));
    let state = Arc::new(ServerState::new(
        snapshot(0, random.u8(..5)),
        Arc::new(AllRunning),
        FastPathHandle::default(),
        None,
        Some(consul.clone()),
    ));
    let domain = Name::from_text("consul").expect("a name");
    let consul: ByDomain = [(domain, consul as Arc<dyn Answer>)].into_iter().collect();
    let fallback = Routes::reverse_fallback(None, &ByDomain::default());
    state.set_routes(Routes {
        consul,
        reverse: Some(fallback),
        ..Routes::default()
    });
    state
}

/// Returns a query as clients send it.
fn message_of(
    name: &str,
    qtype: u16,
    size: Option<u16>,
    dnssec_ok: bool,
    checking_disabled: bool,
) -> Vec<u8> {
    let mut message = query(7, name, qtype, CLASS_IN);
    message[3] |= u8::from(checking_disabled) << 4;
    if let Some(size) = size {
        message[11] = 1;
        message.extend(opt_record(size, 0, dnssec_ok));
    }
    message
}

/// A reply without the order of its records: header, question and OPT, and the records by section.
type Unordered = (Vec<u8>, [Vec<String>; 3]);

fn unordered(reply: &[u8]) -> Unordered {
    let message = Message::from_vec(reply).unwrap_or_else(|error| panic!("{error}: {reply:02x?}"));
    let text = |record: &Record| {
        let mut record = record.clone();
        if let RData::SOA(soa) = &mut record.data {
            // Counts seconds.
            soa.serial = 0;
        }
        record.to_string()
    };
    let sections = [&message.answers, &message.authorities, &message.additionals].map(|section| {
        let mut records: Vec<String> = section.iter().map(text).collect();
        records.sort_unstable();
        records
    });
    let question_len = reply[12..]
        .iter()
        .position(|&byte| byte == 0)
        .expect("a name")
        + 5;
    let opt = format!("{:?}", message.edns);
    (
        [&reply[..12 + question_len], opt.as_bytes()].concat(),
        sections,
    )
}

#[tokio::test]
async fn interface_replies_equal_userspace() {
    let random = &mut fastrand::Rng::with_seed(54);
    let (mut published, mut compared) = (BTreeSet::new(), 0);
    for round in 0..60 {
        let state = random_state(random);
        let source = state.published_names();
        let identity = Arc::new(Identity::of_this_host(Setting::Always));
        let metrics = ServerMetrics::new("dns://test".into());
        let handler = QueryHandler::new(state, identity, metrics, Options::default());
        let userspace = |message: &[u8]| -> Option<Vec<u8>> {
            let Parsed::Query(query) = parse(message) else {
                panic!("a query")
            };
            let mut out = Vec::new();
            let shuffle = &mut dns_core::wire::Shuffle::default();
            match handler.answer_at_once(&query, &query.question.name(), shuffle, &mut out) {
                service::Immediate::Replied { .. } => Some(out),
                service::Immediate::Deferred(_) => None,
            }
        };
        for name in NAMES {
            let qtype = TYPES[random.usize(..TYPES.len())];
            let (dnssec_ok, checking_disabled) = (random.u8(..4) == 0, random.u8(..4) == 0);
            let question = AnswerQuestion {
                name: Name::from_text(name).expect("a name"),
                qtype,
                dnssec_ok,
                checking_disabled,
            };
            let learned = SIZES[random.usize(..SIZES.len())];
            let Some(entry) = local_entry(&*source, &question, learned, random.u64(..)) else {
                continue;
            };
            published.insert((name, qtype));
            let spelled = if random.bool() {
                name.to_ascii_uppercase()
            } else {
                name.to_owned()
            };
            for size in SIZES {
                let message = message_of(&spelled, qtype, size, dnssec_ok, checking_disabled);
                let Parsed::Query(query) = parse(&message) else {
                    panic!("a query")
                };
                let ours: Vec<Unordered> = models(&entry, &query, 0)
                    .iter()
                    .map(|reply| unordered(reply))
                    .collect();
                if ours.is_empty() {
                    continue;
                }
                let ask = || unordered(&userspace(&message).expect("a reply at once"));
                let theirs: Vec<Unordered> = (0..32).map(|_| ask()).collect();
                let about = || {
                    format!(
                        "round {round}: {spelled} {qtype}, size {size:?}, learned by {learned:?}"
                    )
                };
                // Which of many records userspace chooses differs from reply to reply.
                let complete = message_of(
                    &spelled,
                    qtype,
                    Some(u16::MAX),
                    dnssec_ok,
                    checking_disabled,
                );
                let all = unordered(&userspace(&complete).expect("a reply at once")).1;
                for (start, sections) in &ours {
                    compared += 1;
                    let is_equal = theirs.contains(&(start.clone(), sections.clone()));
                    let is_choice = theirs.iter().any(|(other, _)| other == start)
                        && sections[0].len() < all[0].len()
                        && sections[0].iter().all(|record| all[0].contains(record));
                    assert!(
                        is_equal || is_choice,
                        "{}:\n{start:02x?} {sections:?}\n{:?}",
                        about(),
                        theirs[0]
                    );
                }
            }
        }
    }
    assert!(
        compared > 1_000 && published.len() > 60,
        "{compared} replies, {}",
        published.len()
    );
}
