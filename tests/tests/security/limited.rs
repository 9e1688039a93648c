//! Log lines of one kind, which are limited for all peers together and for each of them.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
    time::Instant,
};

/// The lines of one kind in a log.
#[derive(Debug)]
pub(crate) struct Limited {
    by_peer: BTreeMap<IpAddr, u64>,
    /// Number of events: with a line each, or counted by a later line.
    pub(crate) events: u64,
    /// Number of lines of other kinds.
    others: u64,
}

impl Limited {
    /// Reads the lines that contain `kind`; `field` holds the peer.
    pub(crate) fn of(log: &str, kind: &str, field: &str) -> Self {
        let mut limited = Self {
            by_peer: BTreeMap::new(),
            events: 0,
            others: 0,
        };
        for line in log.lines() {
            if !line.contains(kind) {
                limited.others += 1;
                continue;
            }
            let value = |name: &str| {
                let (_, after) = line
                    .split_once(name)
                    .unwrap_or_else(|| panic!("{name}: {line}"));
                after.split([' ', ',']).next().unwrap()
            };
            let peer = value(field);
            let peer = peer
                .parse()
                .or_else(|_| peer.parse().map(|address: SocketAddr| address.ip()));
            *limited.by_peer.entry(peer.unwrap()).or_default() += 1;
            limited.events += 1 + value("suppressed=").parse::<u64>().unwrap();
        }
        limited
    }

    /// Requires that there are few lines for the time since the server's start.
    pub(crate) fn assert_bounded(&self, begun: Instant) {
        let seconds = begun.elapsed().as_secs() + 1;
        let lines: u64 = self.by_peer.values().sum();
        println!(
            "{lines} lines about {} events in {seconds} s, {} others",
            self.events, self.others
        );
        // A burst of ten lines, then one per second; one per minute and peer.
        assert!(lines <= 10 + seconds, "{lines} lines in {seconds} s");
        assert!(
            self.by_peer
                .values()
                .all(|&lines| lines <= 1 + seconds / 60),
            "{self:?}"
        );
        assert!(self.others < 50, "{self:?}");
    }
}
