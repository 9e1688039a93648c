//! The documented differences: rows of docs/differences.md, identified by their first cell.

use dns_core::wire::{TYPE_A, TYPE_AAAA, TYPE_ANY, TYPE_PTR};

use crate::{
    compare::{Cause, Finding},
    reference::Nature,
};

/// A row of docs/differences.md.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Row {
    /// Setting `formerr_for_malformed_names`.
    MalformedNames,
    /// Setting `nxdomain_for_empty_non_terminals`, names of the fleet.
    EmptyNonTerminals,
    /// The same setting, names above the fleet's.
    NamesAbove,
    /// Setting `any_class`.
    AnyClass,
    /// Setting `echo_opt`.
    EchoOpt,
    /// Replies without an OPT.
    OptOmitted,
    /// EDNS versions above 0.
    EdnsVersion,
    /// Several OPTs.
    SeveralOpts,
    /// An OPT whose owner is not the root.
    OptOwner,
    /// Replies larger than allowed.
    LargeReplies,
    /// Malformed messages.
    MalformedMessages,
    /// Suffixes of names that are not whole labels.
    TextualSuffix,
    /// Rows whose `ip` is not an address.
    NoAddress,
    /// IPv6 addresses as targets of aliases.
    AliasToIpv6,
    /// Instances that several targets match.
    RepeatedTargets,
    /// Reverse names: IPv6.
    ReverseIpv6,
    /// Reverse names: types.
    ReverseTypes,
    /// Names below `arpa` that are not reverse names.
    ReverseOthers,
    /// Reverse replies are never truncated.
    ReverseTruncation,
    /// Reverse names without recursors.
    ReverseRefused,
    /// Setting `retired_handlers`.
    RetiredHandlers,
}

impl Row {
    /// Returns the section and the first cell of the row.
    pub fn place(self) -> (&'static str, &'static str) {
        (self.section(), self.cell())
    }

    fn section(self) -> &'static str {
        match self {
            Self::MalformedNames
            | Self::EmptyNonTerminals
            | Self::NamesAbove
            | Self::AnyClass
            | Self::EchoOpt
            | Self::OptOmitted
            | Self::EdnsVersion
            | Self::SeveralOpts
            | Self::OptOwner
            | Self::LargeReplies
            | Self::MalformedMessages => "Replies",
            Self::TextualSuffix | Self::NoAddress | Self::AliasToIpv6 | Self::RepeatedTargets => {
                "Names and aliases"
            }
            Self::ReverseIpv6
            | Self::ReverseTypes
            | Self::ReverseOthers
            | Self::ReverseTruncation
            | Self::ReverseRefused => "Reverse names",
            Self::RetiredHandlers => "Recursion, handlers, cache",
        }
    }

    fn cell(self) -> &'static str {
        match self {
            Self::MalformedNames => {
                "FORMERR for a name below a records domain that is not a valid query, such as `www.bosh`. musl then \
                 waits five seconds, c-ares stops its search, and BIND and unbound answer SERVFAIL."
            }
            Self::EmptyNonTerminals => {
                "NXDOMAIN for empty non-terminals, such as `bosh` and `network.deployment.bosh`; a resolver that \
                 minimises query names then does not find the names below."
            }
            Self::NamesAbove => {
                "Forwards names above its own ones, such as `service.cf.internal` above an alias, and passes the \
                 denial on."
            }
            Self::AnyClass => "Answers every class with records of class IN.",
            Self::EchoOpt => "The OPT repeats the client's size, and DO is clear.",
            Self::OptOmitted => "Omits the OPT in some replies to queries with an OPT.",
            Self::EdnsVersion => "Answers EDNS versions above 0 as if they were 0.",
            Self::SeveralOpts => "Takes the last of several OPTs.",
            Self::OptOwner => "Accepts an OPT whose owner is not the root.",
            Self::LargeReplies => {
                "In some cases sends UDP replies larger than a datagram or the client's size."
            }
            Self::MalformedMessages => {
                "Answers or drops some malformed messages, depending on its message parser."
            }
            Self::TextualSuffix => {
                "Any textual suffix counts as the domain of a name (`xbosh` ends with `bosh`), in random order."
            }
            Self::NoAddress => {
                "A row whose `ip` is not an address yields an AAAA record without data."
            }
            Self::AliasToIpv6 => {
                "An IPv6 address among the targets of an alias makes the alias FORMERR."
            }
            Self::RepeatedTargets => {
                "Answers an instance that n targets of an alias match n x n times."
            }
            Self::ReverseIpv6 => "Compares IPv6 addresses as text, and drops some hex digits.",
            Self::ReverseTypes => "Answers every type with PTR records.",
            Self::ReverseOthers => {
                "Answers names below `arpa` that are not reverse names, instead of forwarding them."
            }
            Self::ReverseTruncation => "Never truncates a reverse reply.",
            Self::ReverseRefused => "REFUSED for addresses of the fleet if recursors are disabled.",
            Self::RetiredHandlers => {
                "A handler stays inactive when a records domain of the same name disappears."
            }
        }
    }

    /// Every row, for the test that finds them in the page.
    #[cfg(test)]
    const ALL: [Self; 21] = [
        Self::MalformedNames,
        Self::EmptyNonTerminals,
        Self::NamesAbove,
        Self::AnyClass,
        Self::EchoOpt,
        Self::OptOmitted,
        Self::EdnsVersion,
        Self::SeveralOpts,
        Self::OptOwner,
        Self::LargeReplies,
        Self::MalformedMessages,
        Self::TextualSuffix,
        Self::NoAddress,
        Self::AliasToIpv6,
        Self::RepeatedTargets,
        Self::ReverseIpv6,
        Self::ReverseTypes,
        Self::ReverseOthers,
        Self::ReverseTruncation,
        Self::ReverseRefused,
        Self::RetiredHandlers,
    ];
}

/// The properties of an exchange that decide which rows apply.
#[derive(Clone, Copy, Debug)]
pub struct Circumstances {
    /// Whether the question is of another class than IN.
    pub is_other_class: bool,
    /// Type of the question.
    pub qtype: u16,
    /// Whether the name is below `arpa`.
    pub is_reverse: bool,
    /// Whether it is below `ip6.arpa`.
    pub is_of_ipv6: bool,
    /// Whether the fleet answers the name here.
    pub is_fleet: bool,
    /// Properties of the name.
    pub nature: Nature,
    /// Whether the message is malformed or unusual, so that our parser rejected it.
    pub is_rejected: bool,
    /// Whether the name has bytes that parsers treat differently.
    pub is_odd: bool,
    /// Whether the observed reply has an AAAA record without data.
    pub has_empty_address: bool,
    /// Whether the observed reply looks forwarded.
    pub looks_forwarded: bool,
    /// Number of OPTs of the query.
    pub opts: usize,
    /// RCODE of the observed reply, and of ours.
    pub rcodes: (u16, u16),
}

const NOERROR: u16 = 0;
const FORMERR: u16 = 1;
const NXDOMAIN: u16 = 3;
const REFUSED: u16 = 5;
const BADVERS: u16 = 16;

/// Returns the row that explains a finding. `is_restored` says that the finding is gone when our server answers with
/// all compatibility settings, so a setting restores what was observed.
pub fn explain(finding: &Finding, is_restored: bool, given: &Circumstances) -> Option<Row> {
    match finding.cause {
        // bosh-dns omits it in some replies, whatever the name.
        Cause::OptMissing => return Some(Row::OptOmitted),
        Cause::TooLarge if given.is_reverse => return Some(Row::ReverseTruncation),
        Cause::TooLarge => return Some(Row::LargeReplies),
        Cause::OptSize | Cause::OptDo | Cause::OptOptions if is_restored => {
            return Some(Row::EchoOpt);
        }
        Cause::Unparsable if given.has_empty_address => return Some(Row::NoAddress),
        _ => {}
    }
    if is_restored && given.is_other_class {
        return Some(Row::AnyClass);
    }
    // bosh-dns answers as to version 0, so everything differs.
    if given.rcodes.1 == BADVERS {
        return Some(Row::EdnsVersion);
    }
    if given.is_rejected {
        return Some(match given.opts {
            0 => Row::MalformedMessages,
            1 => Row::OptOwner,
            _ => Row::SeveralOpts,
        });
    }
    if given.is_odd {
        return Some(Row::MalformedMessages);
    }
    if given.is_reverse {
        return explain_reverse(finding, given);
    }
    explain_name(finding, given)
}

/// Explains what follows from the meaning of a name.
fn explain_name(finding: &Finding, given: &Circumstances) -> Option<Row> {
    let nature = given.nature;
    // bosh-dns finds no data of other types before it reads the query (observed).
    let is_of_addresses = matches!(given.qtype, TYPE_A | TYPE_AAAA | TYPE_ANY);
    match given.rcodes {
        (FORMERR, NXDOMAIN) if nature.is_malformed => return Some(Row::MalformedNames),
        (NOERROR, NXDOMAIN) if nature.is_malformed && !is_of_addresses => {
            return Some(Row::MalformedNames);
        }
        // NOERROR for a name that is no query: it has names below it (RFC 8020).
        (FORMERR | NXDOMAIN, NOERROR) if nature.is_malformed => {
            return Some(Row::EmptyNonTerminals);
        }
        (NXDOMAIN | REFUSED, NOERROR) if nature.is_above_ours && !given.is_fleet => {
            return Some(Row::NamesAbove);
        }
        (NXDOMAIN, NOERROR) if nature.is_above_ours => return Some(Row::EmptyNonTerminals),
        _ => {}
    }
    // bosh-dns takes any domain that is a suffix of the text, in random order.
    if finding.cause.is_of_answer() && nature.has_other_domain {
        return Some(Row::TextualSuffix);
    }
    match finding.cause {
        // An instance that n targets match is answered n times n times.
        Cause::RepeatedAddresses if nature.is_alias => Some(Row::RepeatedTargets),
        Cause::Rcode if nature.is_alias && given.rcodes.0 == FORMERR => Some(Row::AliasToIpv6),
        _ => None,
    }
}

fn explain_reverse(finding: &Finding, given: &Circumstances) -> Option<Row> {
    let is_of_type = matches!(given.qtype, TYPE_PTR | TYPE_ANY);
    match (finding.cause, given.rcodes.0) {
        // bosh-dns truncates no reverse reply.
        (Cause::TcMissing, _) => Some(Row::ReverseTruncation),
        (Cause::Rcode, REFUSED) => Some(Row::ReverseRefused),
        (Cause::Rcode, FORMERR | NXDOMAIN) if given.rcodes.1 == REFUSED => Some(Row::ReverseOthers),
        (Cause::Records | Cause::Rcode | Cause::Route | Cause::Flags | Cause::Ttl, _)
            if !is_of_type =>
        {
            Some(Row::ReverseTypes)
        }
        // It found none, and asked a recursor.
        _ if given.is_of_ipv6 && given.looks_forwarded => Some(Row::ReverseIpv6),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// Reports quote the page, so each row must be there, once, in its section.
    #[test]
    fn every_row_is_in_the_page() {
        let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/differences.md");
        let page = fs::read_to_string(page).unwrap();
        for row in Row::ALL {
            let (section, cell) = row.place();
            let heading = format!("\n## {section}\n");
            let (_, rest) = page.split_once(&heading).unwrap();
            let body = rest.split("\n## ").next().unwrap();
            let begin = format!("\n| {cell} |");
            assert_eq!(body.matches(&begin).count(), 1, "{section}: {cell}");
        }
    }
}
