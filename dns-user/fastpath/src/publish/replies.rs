//! Local replies that are no address lists, as userspace would write them: all the forms that clients
//! get, computed from the installed names.
//!
//! Userspace shuffles the records of a reply. The programs cannot, because records differ in length and point
//! to each other, so an entry holds the reply in up to [`ORDERS`] orders, each with another record first.

use std::time::{SystemTime, UNIX_EPOCH};

use dns_common::{entry::AnswerPolicy, forwarded::MAX_GROUP_VARIANTS};
use dns_core::wire::{
    CLASS_IN, HEADER_LEN, OPT_LEN, Parsed, Query, UDP_PAYLOAD_SIZE, opt_record, parse,
};
use dns_kit::clock::BootInstant;
use hashbrown::HashSet;

use super::source::NameSource;
use crate::map::answer::{AnswerQuestion, LocalReply, first_record};

/// Maximum number of orders of a reply. With at most this many records, each comes first equally often.
const ORDERS: usize = MAX_GROUP_VARIANTS;

/// Draws without a new first record after which no further one is expected.
const FUTILE_DRAWS: u64 = 24;

/// Bytes of complete replies that are drawn for one entry, because other names wait: a reply of thousands of
/// instances takes a millisecond.
const DRAWN_BYTES: usize = 256 << 10;

/// Smallest EDNS size that differs from none.
pub(super) const MIN_WIDE: u16 = 513;

/// Largest EDNS size.
const MAX_WIDE: u16 = u16::MAX;

/// The EDNS size of clients that are not known yet.
const COMMON_SIZE: u16 = UDP_PAYLOAD_SIZE;

/// Length of a question after its name.
const TYPE_CLASS_LEN: usize = 4;

/// A local reply in the maps, for operators.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeldReply {
    /// The question that it answers.
    pub question: AnswerQuestion,
    /// Size of its entry in bytes, with all orders of its records.
    pub bytes: usize,
    /// Whether it has no answer.
    pub is_denial: bool,
}

/// A local reply to publish.
pub(crate) struct Drawn {
    pub(crate) reply: LocalReply,
    /// Whether the orders show only some of the records, so that others are due after a while.
    pub(crate) is_sample: bool,
}

/// Returns the replies of `source` to a question; `None` if only userspace can give them. `size` is the
/// EDNS size of the client, if known. Equal seeds yield equal replies as long as the answer is the same.
pub(crate) fn draw(
    source: &dyn NameSource,
    question: &AnswerQuestion,
    size: Option<u16>,
    seed: u64,
) -> Option<Drawn> {
    let (serial, since_ns) = second();
    let mut drawer = Drawer {
        source,
        question,
        serial,
        seed,
        most_draws: 0,
    };
    // The reply to a client without limit has all records, so it tells how many orders are wanted.
    let complete = drawer.reply(Some(MAX_WIDE), 0)?;
    let total = answer_count(&complete);
    drawer.most_draws = (DRAWN_BYTES / complete.len().max(1)) as u64;
    // DO is a bit of the OPT (RFC 3225), so such a query has one.
    let plain = if question.dnssec_ok {
        Orders::default()
    } else {
        drawer.orders(None, total)?
    };
    let narrow = drawer.orders(Some(MIN_WIDE - 1), total)?;
    let size = size.unwrap_or(COMMON_SIZE).max(MIN_WIDE);
    let wide = drawer.orders(Some(size), total)?;
    // If the replies are the same for a client without limit, they are for any client for which they fit.
    let mut is_whole = true;
    let mut longest = 0;
    for (turn, reply) in &wide.replies {
        is_whole = is_whole && drawer.reply(Some(MAX_WIDE), *turn).as_ref() == Some(reply);
        longest = longest.max(reply.len() + OPT_LEN + AnswerPolicy::SPARE);
    }
    let wide_limits = match u16::try_from(longest) {
        Ok(longest) if is_whole => [longest.max(MIN_WIDE), MAX_WIDE],
        _ => [size, size],
    };
    let is_sample = plain.is_sample || narrow.is_sample || wide.is_sample || !is_whole;
    let [plain, narrow, wide] = [plain, narrow, wide]
        .map(|orders| orders.replies.into_iter().map(|(_, reply)| reply).collect());
    Some(Drawn {
        reply: LocalReply {
            plain,
            narrow,
            wide,
            wide_limits,
            serial,
            since_ns,
        },
        is_sample,
    })
}

fn answer_count(message: &[u8]) -> usize {
    message.get(6..8).map_or(0, |count| {
        usize::from(u16::from_be_bytes([count[0], count[1]]))
    })
}

/// Returns the seconds since 1970, and the time at which the current one began by `CLOCK_BOOTTIME`.
fn second() -> (u32, u64) {
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    let begun = BootInstant::now()
        .kernel_ns()
        .saturating_sub(now.subsec_nanos().into());
    // Serials are numbers modulo 2^32 (RFC 1982).
    (now.as_secs() as u32, begun)
}

/// A reply in different orders.
#[derive(Default)]
struct Orders {
    /// The replies with the draws that yielded them.
    replies: Vec<(u64, Vec<u8>)>,
    /// Whether they show only some of the records or orders.
    is_sample: bool,
}

struct Drawer<'a> {
    source: &'a dyn NameSource,
    question: &'a AnswerQuestion,
    serial: u32,
    seed: u64,
    /// Maximum number of draws for replies of one kind.
    most_draws: u64,
}

impl Drawer<'_> {
    /// Returns the reply in different orders; without limits it would have `total` answers.
    fn orders(&self, size: Option<u16>, total: usize) -> Option<Orders> {
        let mut replies = vec![(0, self.reply(size, 0)?)];
        let shown = answer_count(&replies[0].1);
        let wanted = total.min(ORDERS);
        if wanted <= 1 || shown == 0 {
            // The other sections may still differ from draw to draw.
            let is_sample = self.reply(size, 1)? != replies[0].1;
            return Some(Orders { replies, is_sample });
        }
        let name_len = self.question.name.as_wire().len();
        let mut firsts: HashSet<Vec<u8>> = HashSet::new();
        firsts.insert(first_record(&replies[0].1, name_len)?.to_vec());
        let mut turn = 1;
        let mut last_new = 0;
        while replies.len() < wanted && turn - last_new <= FUTILE_DRAWS && turn < self.most_draws {
            let reply = self.reply(size, turn)?;
            if firsts.insert(first_record(&reply, name_len)?.to_vec()) {
                replies.push((turn, reply));
                last_new = turn;
            }
            turn += 1;
        }
        // If no draw has another record first, userspace does not shuffle this answer.
        let is_shuffled = replies.len() > 1 || turn >= self.most_draws;
        // With all records in each reply, as many orders as records give each the first place once.
        let is_sample =
            is_shuffled && (replies.len() == ORDERS || replies.len() < wanted || shown < total);
        Some(Orders { replies, is_sample })
    }

    /// Returns one reply without its OPT; `None` if it depends on more than the question.
    fn reply(&self, size: Option<u16>, turn: u64) -> Option<Vec<u8>> {
        let body_at = HEADER_LEN + self.question.name.as_wire().len() + TYPE_CLASS_LEN;
        let seed = self.seed.wrapping_add(turn);
        // By userspace's own code, so that both give the same bytes.
        let mut reply = self.reply_to(&self.query(size, false), seed)?;
        if turn == 0 {
            // The reply must not spell out the name: its letter case is the client's.
            let other = self.reply_to(&self.query(size, true), seed)?;
            if reply.get(body_at..) != other.get(body_at..) {
                return None;
            }
        }
        // The OPT is the last record that userspace writes; the programs write one for each client.
        if size.is_some() {
            let count = u16::from_be_bytes([*reply.get(10)?, *reply.get(11)?]).checked_sub(1)?;
            reply[10..12].copy_from_slice(&count.to_be_bytes());
            reply.truncate(reply.len().checked_sub(OPT_LEN)?);
        }
        (reply.len() >= body_at).then_some(reply)
    }

    fn reply_to(&self, message: &[u8], seed: u64) -> Option<Vec<u8>> {
        let Parsed::Query(query) = parse(message) else {
            return None;
        };
        self.source.reply(&query, self.serial, seed)
    }

    fn query(&self, size: Option<u16>, upper_case: bool) -> Vec<u8> {
        let AnswerQuestion {
            name,
            qtype,
            dnssec_ok,
            checking_disabled,
        } = self.question;
        let flags = [1, u8::from(*checking_disabled) << 4];
        let mut message = vec![
            0,
            0,
            flags[0],
            flags[1],
            0,
            1,
            0,
            0,
            0,
            0,
            0,
            u8::from(size.is_some()),
        ];
        let start = message.len();
        message.extend_from_slice(name.as_wire());
        if upper_case {
            // Length bytes are at most 63, and so never letters.
            message[start..].make_ascii_uppercase();
        }
        message.extend_from_slice(&qtype.to_be_bytes());
        message.extend_from_slice(&CLASS_IN.to_be_bytes());
        if let Some(size) = size {
            message.extend_from_slice(&opt_record(size, 0, *dnssec_ok));
        }
        message
    }
}

/// Returns whether the programs may answer such a query from a local reply: RD is set, the class is IN,
/// and there are no EDNS options.
pub fn is_answerable(query: &Query<'_>) -> bool {
    query.recursion_desired() && query.question.qclass == CLASS_IN && !query.has_options()
}
