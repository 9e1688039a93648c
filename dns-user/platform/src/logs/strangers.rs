//! Log lines that a peer can cause as often as it likes, bounded by kind and by peer.

use std::{
    collections::VecDeque,
    net::IpAddr,
    time::{Duration, Instant},
};

use parking_lot::Mutex;

/// Lines of one kind that may follow one another at once.
const BURST: f64 = 10.0;

/// Lines of one kind per second after a burst.
const PER_SECOND: f64 = 1.0;

/// Least time between two lines of one kind about one peer.
const PEER_PAUSE: Duration = Duration::from_secs(60);

/// Peers of one kind that are remembered.
const PEERS: usize = 256;

/// Bounds one kind of log line, usually as a `static` beside the line.
///
/// A kind gets [`BURST`] lines at once and [`PER_SECOND`] after that, of which one peer gets one in
/// [`PEER_PAUSE`].
pub struct LineLimit(Mutex<State>);

struct State {
    tokens: f64,
    refilled: Option<Instant>,
    /// Peers that had a line within the last [`PEER_PAUSE`], oldest first.
    peers: VecDeque<(IpAddr, Instant)>,
    left_out: u64,
}

impl LineLimit {
    /// A kind that has logged nothing yet.
    #[expect(clippy::new_without_default, reason = "made in statics, which need a const fn")]
    pub const fn new() -> Self {
        Self(Mutex::new(State { tokens: BURST, refilled: None, peers: VecDeque::new(), left_out: 0 }))
    }

    /// Whether to log a line about `peer` now: `Some` with the number of lines left out before it.
    pub fn admit(&self, peer: IpAddr) -> Option<u64> {
        self.0.lock().admit(Some(peer), Instant::now())
    }

    /// The same for a line about no peer.
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
            self.left_out += 1;
            return None;
        }
        self.tokens -= 1.0;
        if let Some(peer) = peer {
            if self.peers.len() >= PEERS {
                self.peers.pop_front();
            }
            self.peers.push_back((peer, now));
        }
        Some(std::mem::take(&mut self.left_out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lines that `peers` peers get in `seconds`, each trying a hundred times a second.
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
    fn one_peer_gets_one_line_a_minute() {
        assert_eq!(lines(1, 59), 1);
        assert_eq!(lines(1, 119), 2);
    }

    #[test]
    fn many_peers_share_the_lines_of_a_kind() {
        let lines = lines(500, 10);
        assert!((BURST as u64..=BURST as u64 + 10).contains(&lines), "{lines}");
    }

    #[test]
    fn left_out_lines_are_counted() {
        let limit = LineLimit::new();
        let peer = IpAddr::from([192, 0, 2, 1]);
        assert_eq!(limit.admit(peer), Some(0));
        assert_eq!(limit.admit(peer), None);
        assert_eq!(limit.admit(peer), None);
        assert_eq!(limit.admit(IpAddr::from([192, 0, 2, 2])), Some(2));
    }
}
