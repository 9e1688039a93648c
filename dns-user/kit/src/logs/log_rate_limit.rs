//! Rate limits for log lines that peers can trigger, by kind and by peer.

use std::{
    collections::VecDeque,
    net::{IpAddr, Ipv4Addr},
    time::{Duration, Instant},
};

use parking_lot::Mutex;

/// Burst size for lines of one kind.
const BURST: f64 = 10.0;

/// Sustained rate of lines of one kind per second.
const PER_SECOND: f64 = 1.0;

/// Minimum time between two lines of one kind about the same peer.
const PEER_PAUSE: Duration = Duration::from_secs(60);

/// Maximum number of peers remembered per kind.
const PEERS: usize = 256;

/// Rate limit for one kind of log line, usually a `static` next to the line.
///
/// A kind gets [`BURST`] lines and then [`PER_SECOND`]; each peer gets one line per [`PEER_PAUSE`].
#[derive(Debug)]
pub struct LineLimit(Mutex<State>);

#[derive(Debug)]
struct State {
    tokens: f64,
    refilled: Option<Instant>,
    /// Peers with a line within the last [`PEER_PAUSE`], oldest first.
    peers: VecDeque<(IpAddr, Instant)>,
    suppressed: u64,
}

impl LineLimit {
    /// Creates a limit with a full burst.
    #[expect(clippy::new_without_default, reason = "made in statics, which need a const fn")]
    pub const fn new() -> Self {
        Self(Mutex::new(State { tokens: BURST, refilled: None, peers: VecDeque::new(), suppressed: 0 }))
    }

    /// Returns whether to log a line about `peer` now: `Some` with the number of lines suppressed
    /// before it.
    pub fn admit(&self, peer: IpAddr) -> Option<u64> {
        self.0.lock().admit(Some(peer), Instant::now())
    }

    /// Like [`Self::admit`], for a line about a single subject: one per [`PEER_PAUSE`].
    pub fn admit_per_minute(&self) -> Option<u64> {
        self.admit(IpAddr::V4(Ipv4Addr::UNSPECIFIED))
    }

    /// Like [`Self::admit`], for a line without a peer.
    pub fn admit_any(&self) -> Option<u64> {
        self.0.lock().admit(None, Instant::now())
    }
}

impl State {
    fn admit(&mut self, peer: Option<IpAddr>, now: Instant) -> Option<u64> {
        let passed = self.refilled.map_or(Duration::ZERO, |before| now.saturating_duration_since(before));
        self.tokens = (self.tokens + passed.as_secs_f64() * PER_SECOND).min(BURST);
        self.refilled = Some(now);
        while self.peers.front().is_some_and(|(_, at)| now.saturating_duration_since(*at) >= PEER_PAUSE) {
            self.peers.pop_front();
        }
        let is_known = peer.is_some_and(|peer| self.peers.iter().any(|(known, _)| *known == peer));
        if is_known || self.tokens < 1.0 {
            self.suppressed += 1;
            return None;
        }
        self.tokens -= 1.0;
        if let Some(peer) = peer {
            if self.peers.len() >= PEERS {
                self.peers.pop_front();
            }
            self.peers.push_back((peer, now));
        }
        Some(std::mem::take(&mut self.suppressed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the number of lines admitted for `peers` peers in `seconds`, with a hundred attempts
    /// per second each.
    fn lines(peers: u32, seconds: u32) -> u64 {
        let limit = LineLimit::new();
        let mut state = limit.0.lock();
        let begun = Instant::now();
        let mut lines = 0;
        for round in 0..seconds * 100 {
            let now = begun + Duration::from_millis(10) * round;
            for peer in 0..peers {
                lines += u64::from(state.admit(Some(IpAddr::from(peer.to_be_bytes())), now).is_some());
            }
        }
        lines
    }

    #[test]
    fn peer_gets_line_per_minute() {
        assert_eq!(lines(1, 59), 1);
        assert_eq!(lines(1, 119), 2);
    }

    #[test]
    fn peers_share_the_kind_limit() {
        let lines = lines(500, 10);
        assert!((BURST as u64..=BURST as u64 + 10).contains(&lines), "{lines}");
    }

    #[test]
    fn suppressed_lines_are_counted() {
        let limit = LineLimit::new();
        let peer = IpAddr::from([192, 0, 2, 1]);
        assert_eq!(limit.admit(peer), Some(0));
        assert_eq!(limit.admit(peer), None);
        assert_eq!(limit.admit(peer), None);
        assert_eq!(limit.admit(IpAddr::from([192, 0, 2, 2])), Some(2));
    }
}
