//! Sets, maps and verdict maps of nftables as dumped by the kernel.

use super::nft_rule::{self, Verdict, number, split, verdict};
use crate::attach::netlink::Attributes;

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

/// An element of a set.
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
    /// The data and the verdict of an element.
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
        if self.elements.is_empty() && self.flags & Self::CHANGING == 0 {
            return Found::Nothing;
        }
        let Some(key) = key.filter(|_| self.flags & Self::CHANGING == 0) else { return Found::Unknown };
        let mut best: Option<&Element> = None;
        for element in self.elements.iter().filter(|element| !element.is_rest) {
            let is_met = match &element.last {
                Some(last) => concatenation_contains(&element.key, last, key),
                None if self.flags & Self::INTERVAL != 0 => {
                    // The greatest bound that does not exceed the key decides.
                    if element.key.as_slice() <= key
                        && best.is_none_or(|best| {
                            (best.key.as_slice(), !best.ends) <= (element.key.as_slice(), !element.ends)
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
        let rest = || self.elements.iter().find(|element| element.is_rest);
        match best.filter(|element| !element.ends).or_else(rest) {
            Some(element) => Found::Element(&element.data, element.verdict.as_ref()),
            None => Found::Nothing,
        }
    }

    /// Returns the data of all elements.
    pub(super) fn data(&self) -> impl Iterator<Item = &[u8]> {
        self.elements.iter().map(|element| element.data.as_slice())
    }

    /// Returns the verdicts of all elements.
    pub(super) fn verdicts(&self) -> impl Iterator<Item = &Verdict> {
        self.elements.iter().filter_map(|element| element.verdict.as_ref())
    }
}

/// Returns whether a concatenated key lies within a range: every field must lie within its own.
/// Fields are padded to four bytes and compared word by word.
fn concatenation_contains(first: &[u8], last: &[u8], key: &[u8]) -> bool {
    let words = first.chunks(4).zip(last.chunks(4)).zip(key.chunks(4));
    first.len() == key.len() && words.into_iter().all(|((first, last), key)| (first..=last).contains(&key))
}

/// Parses `NFT_MSG_NEWSETELEM`.
pub(super) fn elements(message: &[u8]) -> Vec<Element> {
    let Some((_, attributes)) = split(message) else { return Vec::new() };
    let lists = attributes.filter(|(attribute, _)| *attribute == 3);
    lists.flat_map(|(_, list)| Attributes(list).map(|(_, value)| element(value))).collect()
}

fn element(value: &[u8]) -> Element {
    let mut element =
        Element { key: Vec::new(), last: None, ends: false, is_rest: false, data: Vec::new(), verdict: None };
    for (attribute, value) in Attributes(value) {
        match attribute {
            1 => element.key = nft_rule::value(value),
            2 => {
                element.data = nft_rule::value(value);
                element.verdict = verdict(value);
            }
            3 => {
                let flags = number(value).unwrap_or(0);
                (element.ends, element.is_rest) = (flags & 1 != 0, flags & 2 != 0);
            }
            10 => element.last = Some(nft_rule::value(value)),
            _ => {}
        }
    }
    element
}
