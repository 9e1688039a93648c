//! Rules and sets of nftables as dumped by the kernel (`linux/netfilter/nf_tables.h`): expressions, verdicts, sets, maps and
//! verdict maps.

use std::net::SocketAddr;

use super::{matches, walk::Action};
use crate::attach::netlink::{Attributes, address_at, array_at, text};

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Expression {
    pub(super) name: String,
    pub(super) data: Vec<u8>,
}

/// The verdict of a rule, or of an element of a verdict map.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Plain(Action),
    /// Continues in the chain of this name, then returns.
    Jump(String),
    /// Continues in the chain of this name and does not return.
    Goto(String),
}

impl Verdict {
    pub(super) fn chain(&self) -> Option<&str> {
        match self {
            Self::Plain(_) => None,
            Self::Jump(name) | Self::Goto(name) => Some(name),
        }
    }
}

/// Parses `NFTA_RULE_EXPRESSIONS`, without counters and comments.
pub(super) fn expressions(list: &[u8]) -> Vec<Expression> {
    let mut expressions = Vec::new();
    for (_, value) in Attributes(list) {
        let fields = Fields(value);
        let name = fields.text(1);
        // A counter that packets advance must not look like a changed rule.
        if name != "counter" {
            let data = fields.get(2).unwrap_or_default().to_vec();
            expressions.push(Expression { name, data });
        }
    }
    expressions
}

pub(super) fn value(data: &[u8]) -> Vec<u8> {
    Fields(data).get(1).unwrap_or_default().to_vec()
}

pub(super) fn verdict(data: &[u8]) -> Option<Verdict> {
    let fields = Fields(Fields(data).get(2)?);
    // NF_DROP, NF_ACCEPT, NF_QUEUE; NFT_CONTINUE, NFT_BREAK, NFT_JUMP, NFT_GOTO, NFT_RETURN.
    Some(match (fields.number(1)?.cast_signed(), fields.name(2)) {
        (0, _) => Verdict::Plain(Action::Drop),
        (1, _) => Verdict::Plain(Action::Accept),
        (-1 | -2, _) => Verdict::Plain(Action::Continue),
        (-3, Some(chain)) => Verdict::Jump(chain),
        (-4, Some(chain)) => Verdict::Goto(chain),
        (-5, _) => Verdict::Plain(Action::Return),
        _ => Verdict::Plain(Action::Unknown("queue")),
    })
}

/// Returns the only IPv4 or IPv6 destination and UDP port that a rule matches, if it compares with both.
pub(super) fn only_destination(rule: &[Expression]) -> Option<SocketAddr> {
    // The header field in the register, as base, offset and length.
    let mut field = None;
    let mut ip = None;
    let mut port = None;
    for expression in rule {
        let fields = Fields(&expression.data);
        match expression.name.as_str() {
            "payload" => {
                field = Some((fields.number(2), fields.number(3), fields.number(4)));
            }
            "cmp" if fields.number(2) == Some(0) => {
                let wanted = fields.value(3);
                match field.take() {
                    Some((Some(1), Some(16), Some(4))) => ip = address_at(&wanted, 0, false),
                    Some((Some(1), Some(24), Some(16))) => ip = address_at(&wanted, 0, true),
                    Some((Some(2), Some(2), Some(2))) => {
                        port = array_at(&wanted, 0).map(u16::from_be_bytes)
                    }
                    _ => {}
                }
            }
            // `iptables-nft` keeps the ports in a match.
            "match" if fields.text(1) == "udp" => {
                port = port.or(matches::only_udp_port(fields.get(3).unwrap_or_default()));
            }
            // A changed register no longer holds the header field.
            _ => field = None,
        }
    }
    Some(SocketAddr::new(ip?, port?))
}

/// Attributes by their type: the first of each.
pub(super) struct Fields<'a>(pub(super) &'a [u8]);

impl<'a> Fields<'a> {
    pub(super) fn get(&self, wanted: u16) -> Option<&'a [u8]> {
        let (_, value) = Attributes(self.0).find(|(kind, _)| *kind == wanted)?;
        Some(value)
    }

    /// Returns the value of an attribute that holds data; empty if it is missing.
    pub(super) fn value(&self, wanted: u16) -> Vec<u8> {
        self.get(wanted).map(value).unwrap_or_default()
    }

    /// Returns a number in network order.
    pub(super) fn number(&self, wanted: u16) -> Option<u32> {
        array_at(self.get(wanted)?, 0).map(u32::from_be_bytes)
    }

    pub(super) fn name(&self, wanted: u16) -> Option<String> {
        self.get(wanted).map(text)
    }

    /// Returns a string; empty if it is missing.
    pub(super) fn text(&self, wanted: u16) -> String {
        self.name(wanted).unwrap_or_default()
    }

    /// Returns the first byte of a data register: four of sixteen bytes (1 to 4), or sixteen of
    /// four bytes (8 to 23), which share their storage.
    pub(super) fn register(&self, wanted: u16) -> Option<usize> {
        match self.number(wanted)? {
            register @ 1..=4 => Some((register as usize - 1) * 16),
            // `NFT_REG32_00` and on: newer tools number registers by words.
            register @ 8..=23 => Some((register as usize - 8) * 4),
            _ => None,
        }
    }
}

pub(super) fn split(message: &[u8]) -> Option<(u8, Fields<'_>)> {
    let (header, attributes) = message.split_first_chunk::<4>()?;
    Some((header[0], Fields(attributes)))
}

/// A set, map or verdict map.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Set {
    /// Family, table and name.
    pub(super) id: (u8, String, String),
    /// `NFT_SET_*` flags: intervals, and updates by packets.
    pub(super) flags: u32,
    /// Length of a key in bytes.
    pub(super) key_length: usize,
    pub(super) elements: Vec<Element>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Element {
    /// The key, or the first key of a range.
    key: Vec<u8>,
    /// The last key of a range, in sets of concatenations.
    last: Option<Vec<u8>>,
    /// Whether this key ends the preceding range, exclusively.
    ends: bool,
    /// Whether this is the catch-all element.
    is_rest: bool,
    /// The value of this key, in a map.
    data: Vec<u8>,
    /// The verdict of this key, in a verdict map.
    verdict: Option<Verdict>,
}

/// The result of a look-up in a set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Found<'a> {
    Nothing,
    Element(&'a [u8], Option<&'a Verdict>),
    /// Unknown: any element, or none.
    Unknown,
}

impl Set {
    const INTERVAL: u32 = 4;
    /// `NFT_SET_TIMEOUT` and `NFT_SET_EVAL`: time removes elements, packets add them.
    const CHANGING: u32 = 0x10 | 0x20;

    /// Looks up a key; `None`: the key is unknown.
    pub(super) fn find(&self, key: Option<&[u8]>) -> Found<'_> {
        // An empty set has no member, whatever the key.
        if self.elements.is_empty() && self.flags & Self::CHANGING == 0 {
            return Found::Nothing;
        }
        // The elements read may have changed by now, so the caller asks the kernel.
        let Some(key) = key.filter(|_| self.flags & Self::CHANGING == 0) else {
            return Found::Unknown;
        };
        let mut best: Option<&Element> = None;
        for element in self.elements.iter().filter(|element| !element.is_rest) {
            let is_met = match &element.last {
                Some(last) => concatenation_contains(&element.key, last, key),
                None if self.flags & Self::INTERVAL != 0 => {
                    // The greatest bound that does not exceed the key decides.
                    if element.key.as_slice() <= key
                        && best.is_none_or(|best| {
                            (best.key.as_slice(), !best.ends)
                                <= (element.key.as_slice(), !element.ends)
                        })
                    {
                        best = Some(element);
                    }
                    false
                }
                None => element.key == key,
            };
            if is_met {
                return Found::Element(&element.data, element.verdict.as_ref());
            }
        }
        // The catch-all element counts only if no other matches, wherever it stands.
        let rest = self.elements.iter().find(|element| element.is_rest);
        match best.filter(|element| !element.ends).or(rest) {
            Some(element) => Found::Element(&element.data, element.verdict.as_ref()),
            None => Found::Nothing,
        }
    }

    pub(super) fn data(&self) -> impl Iterator<Item = &[u8]> {
        self.elements.iter().map(|element| element.data.as_slice())
    }

    pub(super) fn verdicts(&self) -> impl Iterator<Item = &Verdict> {
        self.elements
            .iter()
            .filter_map(|element| element.verdict.as_ref())
    }
}

/// Returns whether a concatenated key lies within a range: every field must lie within its own.
/// Fields are padded to four bytes and compared word by word.
fn concatenation_contains(first: &[u8], last: &[u8], key: &[u8]) -> bool {
    let words = first.chunks(4).zip(last.chunks(4)).zip(key.chunks(4));
    first.len() == key.len()
        && words
            .into_iter()
            .all(|((first, last), key)| (first..=last).contains(&key))
}

/// Parses `NFT_MSG_NEWSETELEM`.
pub(super) fn elements(message: &[u8]) -> Vec<Element> {
    let Some((_, fields)) = split(message) else {
        return Vec::new();
    };
    let elements = Attributes(fields.get(3).unwrap_or_default());
    elements.map(|(_, value)| element(value)).collect()
}

fn element(attributes: &[u8]) -> Element {
    let fields = Fields(attributes);
    let data = fields.get(2).unwrap_or_default();
    let flags = fields.number(3).unwrap_or(0);
    Element {
        key: fields.value(1),
        last: fields.get(10).map(value),
        ends: flags & 1 != 0,
        is_rest: flags & 2 != 0,
        data: value(data),
        verdict: verdict(data),
    }
}
