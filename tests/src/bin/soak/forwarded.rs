//! Judges answers for the recursor's names: none past its TTL, none from before a flush.
//!
//! Every reply of the recursor holds a serial number. The first reply with a serial number that a
//! client receives proves that the server had that answer by then, so its TTL must have run out at
//! the latest a TTL later, however long the recursor's reply had been on its way.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use hickory_proto::op::Message;
use parking_lot::{Mutex, MutexGuard};

use crate::{
    load::addresses,
    recursor::{self, Recursor},
};

/// Most answers of one name that are remembered.
const REMEMBERED: usize = 64;

/// The answers for the recursor's names that clients have seen.
pub(crate) struct Forwarded {
    state: Mutex<State>,
}

struct State {
    names: HashMap<u8, NameState>,
    /// Number of correct answers.
    right: u64,
    flushes: u64,
    /// Smallest remaining TTL of an answer at the time of the query.
    least_left: Option<Duration>,
}

#[derive(Default)]
struct NameState {
    /// Serial number and first arrival of each answer, in that order.
    seen: Vec<(u16, Instant)>,
    /// Begin of the last completed flush of the name.
    flushed: Option<Instant>,
}

impl Forwarded {
    pub(crate) fn new() -> Self {
        let state = State {
            names: HashMap::new(),
            right: 0,
            flushes: 0,
            least_left: None,
        };
        Self {
            state: Mutex::new(state),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Records a completed flush of these names that began at `begin`.
    pub(crate) fn flushed(&self, names: impl Iterator<Item = u8>, begin: Instant) {
        let mut state = self.state();
        state.flushes += 1;
        for number in names {
            state.names.entry(number).or_default().flushed = Some(begin);
        }
    }

    /// Returns the time before which no answer to a query sent from now on may have been sent by the
    /// recursor.
    pub(crate) fn not_before(&self, number: u8) -> Option<Instant> {
        self.state().names.get(&number)?.flushed
    }

    /// Judges a reply received now to a query sent at `asked`; `not_before` was read earlier.
    pub(crate) fn judge(
        &self,
        recursor: &Recursor,
        number: u8,
        reply: &Message,
        (asked, not_before): (Instant, Option<Instant>),
    ) -> Result<(), String> {
        let found = addresses(reply);
        let serial = match found.as_slice() {
            [address] => recursor::serial(number, *address),
            _ => None,
        };
        let Some(serial) = serial else {
            return Err(format!("{} {found:?}", reply.metadata.response_code));
        };
        let sent = recursor
            .sent(number, serial)
            .ok_or(format!("the recursor never sent {found:?}"))?;
        if let Some(begin) = not_before.filter(|begin| sent < *begin) {
            return Err(format!("sent {:?} before a completed flush", begin - sent));
        }
        let mut state = self.state();
        let seen = &mut state.names.entry(number).or_default().seen;
        let first = match seen.iter().find(|(other, _)| *other == serial) {
            Some((_, first)) => *first,
            None => {
                if seen.len() == REMEMBERED {
                    seen.remove(0);
                }
                seen.push((serial, Instant::now()));
                asked
            }
        };
        let age = asked.saturating_duration_since(first);
        let (full, ttl) = (
            recursor::ttl(number),
            reply.answers.first().map_or(0, |record| record.ttl),
        );
        let lifetime = Duration::from_secs(full.into());
        if age >= lifetime {
            return Err(format!("{age:?} old, with a TTL of {full} s"));
        }
        if ttl == 0 || u64::from(ttl) + age.as_secs() > u64::from(full) {
            return Err(format!("TTL {ttl} of {full} s at an age of {age:?}"));
        }
        state.right += 1;
        let left = lifetime - age;
        state.least_left = Some(state.least_left.map_or(left, |least| least.min(left)));
        Ok(())
    }

    /// Prints the counts; returns whether there was anything to judge.
    pub(crate) fn report(&self, by_interfaces: u64) -> bool {
        let state = self.state();
        let left = state.least_left.unwrap_or_default();
        println!(
            "forwarded: {} correct, {by_interfaces} replies from interfaces; {} flushes; at least {:.3} s of \
             a TTL left",
            state.right,
            state.flushes,
            left.as_secs_f64()
        );
        state.right > 0 && by_interfaces > 0
    }
}

#[cfg(test)]
mod tests {
    use hickory_proto::rr::RecordType;
    use whole_system_tests::client;

    use super::*;

    /// Returns a query's reply from the recursor with its TTL changed.
    fn reply(recursor: &Recursor, number: u8, ttl: u32) -> Message {
        let query = client::query(&recursor::name(number), RecordType::A, None).unwrap();
        let bytes = recursor.reply(&query.to_vec().unwrap()).unwrap();
        let mut reply = Message::from_vec(&bytes).unwrap();
        reply.answers[0].ttl = ttl;
        reply
    }

    #[test]
    fn old_answers_are_wrong() {
        let (forwarded, recursor) = (Forwarded::new(), Recursor::new());
        let full = recursor::ttl(3);
        let first = reply(&recursor, 3, full);
        let judge = |reply: &Message, after: u64| {
            let asked = Instant::now() + Duration::from_millis(after);
            forwarded.judge(&recursor, 3, reply, (asked, None))
        };
        assert_eq!(judge(&first, 0), Ok(()));
        assert!(
            judge(&reply(&recursor, 3, full + 1), 0).is_err(),
            "a TTL above the recursor's"
        );
        let mut later = first.clone();
        later.answers[0].ttl = full - 2;
        assert_eq!(judge(&later, 2100), Ok(()));
        assert!(judge(&first, 2100).is_err(), "the TTL was not counted down");
        later.answers[0].ttl = 1;
        assert!(
            judge(&later, u64::from(full) * 1000 + 100).is_err(),
            "expired"
        );
    }

    #[test]
    fn flushed_answers_are_wrong() {
        let (forwarded, recursor) = (Forwarded::new(), Recursor::new());
        let before = reply(&recursor, 3, recursor::ttl(3));
        let begin = Instant::now();
        let after = reply(&recursor, 3, recursor::ttl(3));
        forwarded.flushed([3].into_iter(), begin);
        let asked = (Instant::now(), forwarded.not_before(3));
        assert!(forwarded.judge(&recursor, 3, &before, asked).is_err());
        assert_eq!(forwarded.judge(&recursor, 3, &after, asked), Ok(()));
        assert_eq!(forwarded.not_before(4), None);
    }
}
