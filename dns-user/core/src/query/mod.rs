//! The query language: the selection of instances encoded in the labels of a name. Knows the
//! domains, but no instances.

use std::collections::HashMap;

use smallvec::SmallVec;

use crate::name::Name;

/// The domain of agents' names, `<agent-id>.bosh-agent-id.`.
pub(crate) const AGENT_DOMAIN: &[u8] = b"\x0dbosh-agent-id\0";

/// The selection of instances encoded in a name.
#[derive(Debug, PartialEq, Eq)]
#[expect(
    clippy::large_enum_variant,
    reason = "lives on the stack for one look-up; nearly all are `Within`"
)]
pub(crate) enum QueryTarget<'n> {
    /// `<agent-id>.bosh-agent-id.`
    Agent(&'n [u8]),
    /// Outside every domain: an instance id, searched in the whole fleet. `None` for the root,
    /// which selects every instance (observed).
    Anywhere(Option<&'n [u8]>),
    /// Below a domain of the records.
    Within(DomainNumber, QueryCriteria<'n>),
}

/// Conditions on the instances of a domain; all must hold.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct QueryCriteria<'n> {
    pub(crate) id: Option<&'n [u8]>,
    /// Filter given by the first label.
    pub(crate) filter: Filter<'n>,
    /// Id of the required group: `1` for `q-g1`.
    pub(crate) group: Option<&'n [u8]>,
    /// Middle labels of the long form: instance group, network, deployment.
    pub(crate) place: Option<[Pattern<'n>; 3]>,
}

/// A filter label, `q-...`. Values are strings of digits; values of the same letter are
/// alternatives, different letters must all match.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Filter<'n> {
    /// `a`: numeric ids of availability zones.
    pub(crate) az_ids: Values<'n>,
    pub(crate) indexes: Values<'n>,
    /// `m`: numeric ids of instances.
    pub(crate) num_ids: Values<'n>,
    /// `n`: numeric ids of networks.
    pub(crate) network_ids: Values<'n>,
    pub(crate) strategy: Strategy,
    /// Whether the first `y` is `y1`: wait for the first health checks.
    pub(crate) synchronous: bool,
}

/// Alternatives; empty means any value.
pub(crate) type Values<'n> = SmallVec<[&'n [u8]; 2]>;

/// The health filter of a name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Strategy {
    /// `s0`, no `s`, and unknown numbers: running and unchecked instances; all if there are none.
    #[default]
    Smart,
    Unhealthy,
    Healthy,
    All,
}

/// A middle label of the long form, as a pattern.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pattern<'n> {
    Any,
    /// `x*`: strings that start with x.
    Prefix(&'n [u8]),
    /// `*x`: strings that end with x.
    Suffix(&'n [u8]),
    /// A label without a star: only the same string.
    Exact(&'n [u8]),
    /// A star elsewhere, as in `x*y`: matches nothing (observed).
    Nothing,
}

/// The reason why a name below a domain is invalid; the reply is FORMERR.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Malformed {
    /// The number of labels between the first label and the domain is neither one nor three.
    #[error(
        "between the first label and the domain there must be one label (short form) or three (long form)"
    )]
    Form,
    /// The first label starts like a filter but contains no criterion.
    #[error("the first label is a filter without any of a, i, m, n, s, y followed by digits")]
    Filter,
}

impl<'n> QueryTarget<'n> {
    pub(crate) fn read(name: &'n Name, domains: &Domains) -> Result<Self, Malformed> {
        let labels: SmallVec<[&[u8]; 8]> = name.labels().collect();
        // With more labels it is no agent's name, but outside every domain: an instance id is
        // searched.
        if let [agent, _] = labels[..]
            && name.suffixes().nth(1) == Some(AGENT_DOMAIN)
        {
            return Ok(Self::Agent(agent));
        }
        let Some((domain, domain_labels)) = domains.longest(name) else {
            return Ok(Self::Anywhere(labels.first().copied()));
        };
        // Only the root has no label: here the records have the root as a domain.
        let Some((&first, rest)) = labels.split_first() else {
            return Ok(Self::Within(domain, QueryCriteria::default()));
        };
        let middle: SmallVec<[&[u8]; 8]> = match rest.len().checked_sub(domain_labels) {
            Some(count @ 1..) if domain_labels > 0 => rest[..count].into(),
            // bosh-dns does not strip the domain if it directly follows the first label, and never
            // strips the root: the domain's labels then count as middle labels, the root as an
            // empty one (observed: `bosh` queries the instance with that id, `x.bosh` is malformed,
            // and with the root as a domain `x.web.net` is the long form without a deployment).
            _ => rest.iter().copied().chain([&b""[..]]).collect(),
        };
        QueryCriteria::read(first, &middle).map(|criteria| Self::Within(domain, criteria))
    }
}

impl<'n> QueryCriteria<'n> {
    /// Parses the first label and the labels between it and the domain.
    fn read(first: &'n [u8], middle: &[&'n [u8]]) -> Result<Self, Malformed> {
        let place = match *middle {
            // The short form. A label other than `q-g<digits>` selects the whole domain (observed).
            [_] => None,
            [instance_group, network, deployment] => {
                Some([instance_group, network, deployment].map(Pattern::read))
            }
            _ => return Err(Malformed::Form),
        };
        // An instance whose id starts with `q-` cannot be named: every such label is a filter.
        let (id, filter) = match first.strip_prefix(b"q-") {
            Some(text) => (None, Filter::read(text).ok_or(Malformed::Filter)?),
            None => (Some(first), Filter::default()),
        };
        Ok(Self {
            id,
            filter,
            // In the long form as well: `q-g2` must be both the group and the instance group's name
            // there (observed). The match above leaves one or three labels.
            group: group_id(middle[0]),
            place,
        })
    }
}

impl<'n> Filter<'n> {
    /// Parses the text after `q-`: every known letter followed by digits counts, other text is
    /// skipped; `None` if there is no such pair.
    fn read(text: &'n [u8]) -> Option<Self> {
        let mut filter = Self::default();
        let mut strategy = None;
        let mut synchronous = None;
        let mut found = false;
        let mut rest = text;
        while let Some((&letter, tail)) = rest.split_first() {
            let digits = tail.iter().take_while(|byte| byte.is_ascii_digit()).count();
            // A pair may stand anywhere, and other text is skipped: `q-xa1` selects zone 1
            // (observed).
            if digits == 0 || !b"aimnsy".contains(&letter) {
                rest = tail;
                continue;
            }
            let (value, tail) = tail.split_at(digits);
            rest = tail;
            found = true;
            match letter {
                b'a' => filter.az_ids.push(value),
                b'i' => filter.indexes.push(value),
                b'm' => filter.num_ids.push(value),
                b'n' => filter.network_ids.push(value),
                // Of several `s` or `y` the first counts; values of other letters are alternatives
                // (observed).
                b's' => _ = strategy.get_or_insert(value),
                _ => _ = synchronous.get_or_insert(value),
            }
        }
        filter.strategy = strategy.map_or(Strategy::Smart, Strategy::of);
        filter.synchronous = synchronous == Some(b"1");
        found.then_some(filter)
    }
}

impl Strategy {
    /// Returns the strategy with this number.
    fn of(number: &[u8]) -> Self {
        match number {
            b"1" => Self::Unhealthy,
            b"3" => Self::Healthy,
            b"4" => Self::All,
            // Every other text is smart (observed: s2, s01).
            _ => Self::Smart,
        }
    }
}

impl<'n> Pattern<'n> {
    /// Parses a label. An empty one means the root if the domain stayed part of the labels;
    /// as in the short form it matches everything.
    fn read(label: &'n [u8]) -> Self {
        match label {
            b"*" | b"" => Self::Any,
            // A second star belongs to the text, and no name of the records has one: `*x*` matches
            // nothing.
            [b'*', suffix @ ..] => Self::Suffix(suffix),
            [prefix @ .., b'*'] => Self::Prefix(prefix),
            _ if label.contains(&b'*') => Self::Nothing,
            _ => Self::Exact(label),
        }
    }

    pub(crate) fn fits(self, text: &[u8]) -> bool {
        match self {
            Self::Any => true,
            Self::Prefix(prefix) => text.starts_with(prefix),
            Self::Suffix(suffix) => text.ends_with(suffix),
            Self::Exact(exact) => text == exact,
            Self::Nothing => false,
        }
    }
}

/// Returns the group id in a label `q-g<digits>`.
pub(crate) fn group_id(label: &[u8]) -> Option<&[u8]> {
    label
        .strip_prefix(b"q-g")
        .filter(|id| !id.is_empty() && id.iter().all(u8::is_ascii_digit))
}

//----------- Domains ------------------------------------------------------
//
// The domains of the records.

/// Number of a domain in the records' dictionary of domains.
pub(crate) type DomainNumber = u32;

/// The domains of the records, parsed as names.
#[derive(Debug, Default)]
pub(crate) struct Domains {
    /// All valid domains in lower case; names below them are local.
    names: HashMap<Name, Option<DomainNumber>, foldhash::fast::FixedState>,
    /// Name by number, unless no query can end in this domain.
    by_number: Vec<Option<Name>>,
}

impl Domains {
    /// Parses the domains.
    pub(crate) fn new<'t>(domains: impl Iterator<Item = (DomainNumber, &'t str)>) -> Self {
        let mut names: HashMap<Name, Option<DomainNumber>, _> = HashMap::default();
        let mut by_number = Vec::new();
        for (number, text) in domains {
            by_number.resize(by_number.len().max(number as usize + 1), None);
            // No query can name such a domain. Its rows stay, because they are found by agent and
            // id.
            let Ok(name) = Name::from_text(text) else {
                continue;
            };
            let plain = !text.bytes().any(|byte| byte.is_ascii_uppercase());
            let known = names.entry(name.clone()).or_default();
            // A domain with capitals makes its names local, but bosh-dns compares lower-cased names with
            // the records as written, so nothing matches it (observed): such a domain has no number here.
            if plain {
                *known = Some(number);
                by_number[number as usize] = Some(name);
            }
        }
        Self { names, by_number }
    }

    /// Returns whether the other domains have the same names, which queries match alike.
    pub(crate) fn are_named_like(&self, other: &Self) -> bool {
        if self.names.len() != other.names.len() {
            return false;
        }
        for (name, number) in &self.names {
            match other.names.get(name) {
                Some(known) if known.is_some() == number.is_some() => {}
                _ => return false,
            }
        }
        true
    }

    pub(crate) fn names(&self) -> impl Iterator<Item = &Name> {
        self.names.keys()
    }

    /// Returns the domain with this wire-format name, regardless of letter case.
    pub(crate) fn get(&self, wire: &[u8]) -> Option<&Name> {
        self.names.get_key_value(wire).map(|(name, _)| name)
    }

    /// Returns the domain with this number if queries can match it.
    pub(crate) fn name(&self, number: DomainNumber) -> Option<&Name> {
        self.by_number.get(number as usize)?.as_ref()
    }

    /// Returns the longest domain that contains the name, and the number of its labels.
    pub(crate) fn longest(&self, name: &Name) -> Option<(DomainNumber, usize)> {
        let labels = name.label_count();
        // Whole labels, the longest suffix first. bosh-dns compares texts, so that `xbosh` belongs
        // to `bosh`, in random order of the domains (docs/differences.md).
        name.suffixes().enumerate().find_map(|(left, suffix)| {
            let number = (*self.names.get(suffix)?)?;
            Some((number, labels - left))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_filter_letters_are_skipped() {
        let filter = Filter::read(b"xa1-a3b2g7aai00s3s1y1y0n").unwrap();
        assert_eq!(filter.az_ids[..], [b"1", b"3"]);
        assert_eq!(filter.indexes[..], [b"00"]);
        assert_eq!(filter.strategy, Strategy::Healthy);
        assert!(filter.synchronous);
        for none in ["", "1", "x", "g1", "s", "-a", "b1"] {
            assert_eq!(Filter::read(none.as_bytes()), None, "{none}");
        }
    }

    #[test]
    fn inner_stars_never_match() {
        assert_eq!(Pattern::read(b"*"), Pattern::Any);
        assert!(Pattern::read(b"foo*").fits(b"foo"));
        assert!(Pattern::read(b"*foo").fits(b"barfoo"));
        assert!(!Pattern::read(b"m*r").fits(b"monitor"));
        assert!(!Pattern::read(b"m*r").fits(b"m*r"));
        assert!(!Pattern::read(b"*oo*").fits(b"foo"));
    }

    #[test]
    fn groups_are_digits_only() {
        assert_eq!(group_id(b"q-g01"), Some(&b"01"[..]));
        for none in ["q-g", "q-g1x", "q-g-1", "xq-g1", "foo", ""] {
            assert_eq!(group_id(none.as_bytes()), None, "{none}");
        }
    }
}

#[cfg(test)]
mod domains_tests {
    use super::*;

    #[test]
    fn longest_domain_wins() {
        let texts = [
            (0, "bosh."),
            (1, "inner.bosh."),
            (2, "Upper.bosh."),
            (3, "a..b."),
        ];
        let domains = Domains::new(texts.into_iter());
        let longest = |text: &str| domains.longest(&Name::from_text(text).unwrap());
        assert_eq!(longest("x.inner.bosh"), Some((1, 2)));
        assert_eq!(longest("xinner.bosh"), Some((0, 1)));
        assert_eq!(longest("bosh"), Some((0, 1)));
        assert_eq!(longest("xbosh"), None);
        assert_eq!(longest("x.upper.bosh"), Some((0, 1)));
        assert!(
            domains
                .get(Name::from_text("upper.bosh").unwrap().as_wire())
                .is_some()
        );
    }
}

#[cfg(test)]
mod targets_tests;
