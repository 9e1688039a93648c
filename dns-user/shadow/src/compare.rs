//! The findings in which two replies to the same query differ. Pure.

use std::{cmp::Ordering, collections::BTreeMap, fmt::Display};

use hickory_proto::rr::RecordType;

use crate::reply::{FLAGS, Record, Reply};

/// A way in which the observed reply differs from ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Cause {
    /// It cannot be parsed.
    Unparsable,
    /// There is none, and we would send one.
    NoReply,
    /// Another source answered, such as a recursor instead of the fleet.
    Route,
    /// The RCODE differs.
    Rcode,
    /// Another opcode or flag than TC.
    Flags,
    /// Another question, or the question in another letter case.
    Question,
    /// Addresses that we would return are missing.
    MissingAddresses,
    /// Addresses that we would not return.
    ExtraAddresses,
    /// An address occurs more often or more rarely.
    RepeatedAddresses,
    /// Records other than addresses, or owners or classes, differ.
    Records,
    /// The TTLs of the answers differ.
    Ttl,
    /// The authority or additional section differs.
    OtherSections,
    /// TC is clear although we would truncate.
    TcMissing,
    /// TC is set although the answer fits.
    TcUnneeded,
    /// Truncated to fewer records than fit.
    TruncatedTooFar,
    /// Larger than the client accepts.
    TooLarge,
    /// The OPT is missing.
    OptMissing,
    /// An OPT to a query without one.
    OptUnasked,
    /// Another payload size in the OPT.
    OptSize,
    /// Another DO in the OPT.
    OptDo,
    /// Another version in the OPT.
    OptVersion,
    /// Other options in the OPT.
    OptOptions,
    /// The answers are always in the same order.
    OrderFixed,
}

impl Cause {
    /// Returns whether other records or another health of instances can be the reason.
    pub fn is_of_answer(self) -> bool {
        matches!(
            self,
            Self::Rcode
                | Self::MissingAddresses
                | Self::ExtraAddresses
                | Self::RepeatedAddresses
                | Self::Records
                | Self::TcMissing
                | Self::TcUnneeded
                | Self::TruncatedTooFar
        )
    }

    /// Returns the cause in words.
    pub fn text(self) -> &'static str {
        match self {
            Self::Unparsable => "reply cannot be parsed",
            Self::NoReply => "no reply",
            Self::Route => "answered by another source",
            Self::Rcode => "another RCODE",
            Self::Flags => "another flag",
            Self::Question => "another question, or in another letter case",
            Self::MissingAddresses => "addresses missing",
            Self::ExtraAddresses => "further addresses",
            Self::RepeatedAddresses => "addresses repeated",
            Self::Records => "other records",
            Self::Ttl => "another TTL",
            Self::OtherSections => "other authority or additional records",
            Self::TcMissing => "TC missing",
            Self::TcUnneeded => "TC although the answer fits",
            Self::TruncatedTooFar => "truncated to fewer records than fit",
            Self::TooLarge => "larger than the client accepts",
            Self::OptMissing => "OPT missing",
            Self::OptUnasked => "OPT to a query without one",
            Self::OptSize => "another size in the OPT",
            Self::OptDo => "another DO in the OPT",
            Self::OptVersion => "another version in the OPT",
            Self::OptOptions => "other EDNS options",
            Self::OrderFixed => "answers always in the same order",
        }
    }
}

/// A cause with the values that differ.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// The kind of difference.
    pub cause: Cause,
    /// Observed value and ours.
    pub detail: String,
}

impl Finding {
    /// Returns a finding with its values.
    pub fn new(cause: Cause, detail: impl Into<String>) -> Self {
        Self {
            cause,
            detail: detail.into(),
        }
    }

    /// Returns a finding of an observed value that differs from ours.
    pub fn of_values(cause: Cause, theirs: impl Display, ours: impl Display) -> Self {
        Self::new(cause, format!("{theirs} instead of {ours}"))
    }
}

/// Compares an observed reply with ours. `whole` is our reply without truncation; the client accepts `limit` bytes.
pub fn compare(theirs: &Reply, ours: &Reply, whole: &Reply, limit: usize) -> Vec<Finding> {
    let mut found = Vec::new();
    if theirs.rcode != ours.rcode {
        found.push(Finding::of_values(
            Cause::Rcode,
            theirs.rcode_name(),
            ours.rcode_name(),
        ));
    }
    // TC is compared with the records, because only they tell whether it is right.
    for (bit, name) in FLAGS {
        if (theirs.flags ^ ours.flags) & bit != 0 {
            let state = if theirs.flags & bit == 0 {
                "clear"
            } else {
                "set"
            };
            found.push(Finding::new(Cause::Flags, format!("{name} is {state}")));
        }
    }
    if theirs.question != ours.question {
        found.push(Finding::of_values(
            Cause::Question,
            asked_in(theirs),
            asked_in(ours),
        ));
    }
    if theirs.length > limit {
        let detail = format!("{} bytes, {limit} accepted", theirs.length);
        found.push(Finding::new(Cause::TooLarge, detail));
    }
    compare_answers(theirs, ours, whole, &mut found);
    compare_opt(theirs, ours, &mut found);
    if (&theirs.authority, &theirs.additional) != (&ours.authority, &ours.additional) {
        let detail = format!(
            "{} and {} instead of {} and {} records",
            theirs.authority.len(),
            theirs.additional.len(),
            ours.authority.len(),
            ours.additional.len()
        );
        found.push(Finding::new(Cause::OtherSections, detail));
    }
    found
}

/// Returns the question that a reply repeats.
fn asked_in(reply: &Reply) -> String {
    match &reply.question {
        Some((name, qtype, class)) => format!("{name} {class} {qtype}"),
        None => "none".to_owned(),
    }
}

fn compare_answers(theirs: &Reply, ours: &Reply, whole: &Reply, found: &mut Vec<Finding>) {
    match (theirs.is_truncated(), ours.is_truncated()) {
        (false, true) => found.push(Finding::new(Cause::TcMissing, "")),
        (true, false) => found.push(Finding::new(Cause::TcUnneeded, "")),
        // Which records fit is a matter of chance, their number is not.
        (true, true) if theirs.answers.len() < ours.answers.len() => {
            let detail = format!(
                "{} instead of {} records",
                theirs.answers.len(),
                ours.answers.len()
            );
            found.push(Finding::new(Cause::TruncatedTooFar, detail));
        }
        _ => {}
    }
    // Each truncated reply holds other records, all of the whole answer.
    let reference = if theirs.is_truncated() || ours.is_truncated() {
        whole
    } else {
        ours
    };
    // How often each record is in both.
    let mut counts: BTreeMap<Fields<'_>, [usize; 2]> = BTreeMap::new();
    for (side, reply) in [theirs, reference].into_iter().enumerate() {
        for record in &reply.answers {
            counts.entry(Fields::of(record)).or_default()[side] += 1;
        }
    }
    let mut by_cause: BTreeMap<Cause, Vec<String>> = BTreeMap::new();
    for (record, [observed, expected]) in counts {
        let cause = match observed.cmp(&expected) {
            Ordering::Greater => record.cause(expected, Cause::ExtraAddresses),
            // Truncation leaves records out by itself.
            Ordering::Less if !theirs.is_truncated() => {
                record.cause(observed, Cause::MissingAddresses)
            }
            Ordering::Less | Ordering::Equal => continue,
        };
        by_cause.entry(cause).or_default().push(record.shown());
    }
    for (cause, mut records) in by_cause {
        let more = records.len().saturating_sub(MAX_DETAILS);
        records.truncate(MAX_DETAILS);
        let mut detail = records.join(", ");
        if more > 0 {
            detail += &format!(" and {more} more");
        }
        found.push(Finding::new(cause, detail));
    }
    compare_ttl(theirs, reference, found);
}

/// Maximum number of records in the detail of a finding.
const MAX_DETAILS: usize = 4;

/// Compares the TTLs of records that are in both.
fn compare_ttl(theirs: &Reply, ours: &Reply, found: &mut Vec<Finding>) {
    let Some(first) = ours.answers.first() else {
        return;
    };
    // Local answers have one TTL. If ours differ, theirs are not compared with any of them.
    let is_uniform = ours.answers.iter().all(|record| record.ttl == first.ttl);
    let other = theirs.answers.iter().find(|record| record.ttl != first.ttl);
    if is_uniform && let Some(other) = other {
        found.push(Finding::of_values(Cause::Ttl, other.ttl, first.ttl));
    }
}

fn compare_opt(theirs: &Reply, ours: &Reply, found: &mut Vec<Finding>) {
    let (theirs, ours) = match (&theirs.opt, &ours.opt) {
        (None, None) => return,
        (None, Some(_)) => return found.push(Finding::new(Cause::OptMissing, "")),
        (Some(_), None) => return found.push(Finding::new(Cause::OptUnasked, "")),
        (Some(theirs), Some(ours)) => (theirs, ours),
    };
    if theirs.size != ours.size {
        found.push(Finding::of_values(Cause::OptSize, theirs.size, ours.size));
    }
    if theirs.dnssec_ok != ours.dnssec_ok {
        found.push(Finding::new(Cause::OptDo, ""));
    }
    if theirs.version != ours.version {
        found.push(Finding::of_values(
            Cause::OptVersion,
            theirs.version,
            ours.version,
        ));
    }
    if theirs.options != ours.options {
        let detail = format!("{:?} instead of {:?}", theirs.options, ours.options);
        found.push(Finding::new(Cause::OptOptions, detail));
    }
}

/// A record without its TTL.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Fields<'a> {
    owner: &'a str,
    rtype: RecordType,
    class: u16,
    data: &'a str,
}

impl<'a> Fields<'a> {
    fn of(record: &'a Record) -> Self {
        Self {
            owner: &record.owner,
            rtype: record.rtype,
            class: record.class,
            data: &record.data,
        }
    }

    /// Returns the cause of a different number of this record; `alone` is that of an address which the other reply
    /// lacks.
    fn cause(self, in_other: usize, alone: Cause) -> Cause {
        match (self.rtype, in_other) {
            // Names of the fleet have addresses only, so these are told apart by what is wrong with
            // them.
            (RecordType::A | RecordType::AAAA, 0) => alone,
            (RecordType::A | RecordType::AAAA, _) => Cause::RepeatedAddresses,
            _ => Cause::Records,
        }
    }

    fn shown(self) -> String {
        format!("{} {}", self.rtype, self.data)
    }
}
