//! A miss takes at most four allocations: the client's query, the query in flight, the cached answer and its message.

#![expect(clippy::unwrap_used, reason = "a test that cannot run has failed")]

use std::{net::UdpSocket, sync::mpsc, thread, time::Duration};

use dns_core::{
    config::Config,
    wire::{OwnedQuery, Parsed, Query, parse},
};
use dns_upstream::{Answer as _, NoInterfaces, OwnAddresses, Upstream, WaitingQuery};
use futures_util::future::BoxFuture;
use test_support::allocations::Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Queries that are counted.
const QUERIES: usize = 2000;
/// Queries before, which open all sockets and let tables grow.
const WARM_UP: usize = 2000;
/// Allocations per miss, with and without the cache. A debug build also checks the form of a cached name.
const PER_MISS: [(bool, u64); 2] = [(true, 4 + cfg!(debug_assertions) as u64), (false, 2)];
/// Tables that grow, and what the runtime does in the meantime.
const OTHERS: u64 = 100;

#[test]
fn misses_take_few_allocations() {
    let recursor = UdpSocket::bind("127.0.0.1:0").unwrap();
    let address = recursor.local_addr().unwrap();
    thread::spawn(move || answer_forever(&recursor));
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let _inside = runtime.enter();
    for (cached, most) in PER_MISS {
        let config = format!(
            r#"{{"port": 53, "recursors": ["{address}"], "cache": {{"enabled": {cached}}}}}"#
        );
        let config = Config::parse("config.json", config.as_bytes())
            .unwrap()
            .config;
        let upstream = Upstream::new(&config, &OwnAddresses::default(), &NoInterfaces::shared());
        let source = upstream.recursors().unwrap();
        let queries: Vec<Vec<u8>> = (0..WARM_UP + QUERIES).map(query).collect();
        // Room for the only reply in flight.
        let (replies, received) = mpsc::sync_channel(1);
        for (number, query) in queries.iter().enumerate() {
            if number == WARM_UP {
                Counting::count_all(true);
            }
            let Parsed::Query(query) = parse(query) else {
                panic!("a query of our own making");
            };
            source.begin(Box::new(Client {
                query: query.to_owned(),
                replies: replies.clone(),
            }));
            let (id, is_answer) = received.recv_timeout(Duration::from_secs(60)).unwrap();
            assert!(id == query.id && is_answer);
        }
        Counting::count_all(false);
        let allocations = Counting::take();
        let all = most * QUERIES as u64;
        assert!(
            allocations <= all + OTHERS,
            "{allocations} allocations for {QUERIES} misses, cached: {cached}"
        );
        let totals = source.admission();
        assert_eq!(totals.waiting, 0);
    }
}

/// Returns the query for a name of its own.
fn query(number: usize) -> Vec<u8> {
    let mut query = b"\0\0\x01\0\0\x01\0\0\0\0\0\0\x0b".to_vec();
    query[..2].copy_from_slice(&(number as u16).to_be_bytes());
    query.extend_from_slice(format!("cold-{number:06}").as_bytes());
    query.extend_from_slice(b"\x07example\0\0\x01\0\x01");
    query
}

/// Answers every query with one address, without an allocation.
fn answer_forever(recursor: &UdpSocket) {
    let mut message = [0; 512];
    while let Ok((length, client)) = recursor.recv_from(&mut message) {
        let address = b"\xc0\x0c\0\x01\0\x01\0\0\x01\x2c\0\x04\xc0\0\x02\x01";
        // In place of the OPT.
        let end = length - 11 + address.len();
        message[length - 11..end].copy_from_slice(address);
        message[2] |= 0x80;
        message[7] = 1;
        message[11] = 0;
        recursor.send_to(&message[..end], client).unwrap();
    }
}

struct Client {
    query: OwnedQuery,
    /// Gets the id of the reply, and whether it has an answer.
    replies: mpsc::SyncSender<(u16, bool)>,
}

impl WaitingQuery for Client {
    fn query(&self) -> Query<'_> {
        self.query.as_query()
    }

    fn time_limit(&self) -> Duration {
        Duration::MAX
    }

    fn reply(self: Box<Self>, reply: &mut Vec<u8>) {
        let id = u16::from_be_bytes([reply[0], reply[1]]);
        self.replies.send((id, reply[7] == 1)).unwrap();
    }

    fn wait(self: Box<Self>, _begun: Option<BoxFuture<'static, Vec<u8>>>) {
        panic!("a task would be needed");
    }
}
