//! Names of BOSH links: the inverse of [`crate::query`]. Used for the `address` commands of both
//! programs and for the names in certificates; `tests/link_addresses.json` has the cases.
//!
//! Short form `q-<criteria>.q-g<group>.<domain>`, long form
//! `q-<criteria>.<group>.<network>.<deployment>.<domain>`. The criteria are sorted as strings, so
//! `a10` precedes `a2` (observed with a director). `s` is always present, `y` only if requested.

use std::fmt;

/// The name of a link, in parts; `Display` writes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinkAddress {
    /// The instance group, as an id or by names.
    pub group: AddressGroup,
    /// The first label, which selects among the group's instances.
    pub first: FirstLabel,
    /// Domain; a final dot is dropped from the name.
    pub domain: String,
}

/// The group part of a link's name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AddressGroup {
    /// Short form: the id of a link group.
    Id(String),
    /// Long form: canonical names of group, network and deployment.
    Names {
        /// Canonical name of the instance group.
        instance_group: String,
        /// Canonical name of the network.
        network: String,
        /// Canonical name of the deployment.
        deployment: String,
    },
}

/// The first label of a link's name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FirstLabel {
    /// The id of a single instance.
    Instance(String),
    /// A filter: `q-` followed by the criteria.
    Query(Criteria),
    /// `*`, for use in certificates.
    Wildcard,
}

/// The criteria of a filter; several values of one kind are alternatives.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Criteria {
    /// Numeric ids of availability zones (`a`).
    pub zones: Vec<String>,
    /// Instance indexes within the group (`i`).
    pub indexes: Vec<u64>,
    /// Numeric ids of instances (`m`).
    pub numbers: Vec<u64>,
    /// Numeric ids of networks (`n`).
    pub networks: Vec<u64>,
    /// Filter by health (`s`), always written.
    pub status: LinkStatus,
    /// Whether the first query waits for the first health checks (`y`); `None` leaves it out.
    pub synchronous: Option<bool>,
}

/// Health filter: `status` of a link's address, `health_filter` of an alias.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LinkStatus {
    /// Healthy instances, or all if there are none (`s0`).
    #[default]
    Smart,
    /// Only failing instances (`s1`).
    Unhealthy,
    /// Only healthy instances (`s3`).
    Healthy,
    /// All instances regardless of health (`s4`).
    All,
}

impl LinkStatus {
    /// Returns the digit after `s` that encodes the filter.
    pub fn digit(self) -> u8 {
        match self {
            Self::Smart => 0,
            Self::Unhealthy => 1,
            Self::Healthy => 3,
            Self::All => 4,
        }
    }
}

impl LinkAddress {
    /// Returns the name for a certificate, with no criteria or with `*` as the first label.
    pub fn san(self, wildcard: bool) -> Self {
        let first = if wildcard {
            FirstLabel::Wildcard
        } else {
            FirstLabel::Query(Criteria::default())
        };
        Self { first, ..self }
    }
}

impl fmt::Display for LinkAddress {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.first {
            FirstLabel::Instance(id) => out.write_str(id)?,
            FirstLabel::Query(criteria) => write!(out, "q-{criteria}")?,
            FirstLabel::Wildcard => out.write_str("*")?,
        }
        match &self.group {
            AddressGroup::Id(id) => write!(out, ".q-g{id}")?,
            AddressGroup::Names {
                instance_group,
                network,
                deployment,
            } => {
                write!(out, ".{instance_group}.{network}.{deployment}")?;
            }
        }
        // Certificates and links have names without the final dot.
        write!(out, ".{}", self.domain.trim_end_matches('.'))
    }
}

impl fmt::Display for Criteria {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            zones,
            indexes,
            numbers,
            networks,
            status,
            synchronous,
        } = self;
        let mut parts: Vec<String> = zones.iter().map(|zone| format!("a{zone}")).collect();
        for (letter, values) in [('i', indexes), ('m', numbers), ('n', networks)] {
            for value in values {
                parts.push(format!("{letter}{value}"));
            }
        }
        parts.push(format!("s{}", status.digit()));
        if let Some(wait) = synchronous {
            parts.push(format!("y{}", u8::from(*wait)));
        }
        // As strings: a director writes `a10` before `a2` (observed), and a certificate must have
        // its name.
        parts.sort_unstable();
        out.write_str(&parts.concat())
    }
}

//----------- Canonical ----------------------------------------------------
//
// Canonical names of instance groups, networks and deployments.

/// The reason why a name has no canonical form.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotCanonical {
    /// No valid character remains.
    #[error("it has no letter, digit or hyphen")]
    Empty,
    /// The canonical form starts with a hyphen, which is invalid for a label.
    #[error("its canonical form cannot start with a hyphen")]
    LeadingHyphen,
    /// The canonical form ends with a hyphen, which is invalid for a label.
    #[error("its canonical form cannot end with a hyphen")]
    TrailingHyphen,
    /// The canonical form exceeds a label (RFC 1035, section 2.3.4).
    #[error("its canonical form is longer than a label, 63 bytes")]
    TooLong,
}

/// Returns the form of a name that directors use in domain names: lower case, `_` replaced by `-`,
/// other characters outside `[a-z0-9-]` dropped.
pub fn canonical(name: &str) -> Result<String, NotCanonical> {
    let kept = name
        .chars()
        .filter_map(|letter| match letter.to_ascii_lowercase() {
            '_' => Some('-'),
            letter if letter.is_ascii_lowercase() || letter.is_ascii_digit() || letter == '-' => {
                Some(letter)
            }
            _ => None,
        });
    let kept: String = kept.collect();
    if kept.is_empty() {
        return Err(NotCanonical::Empty);
    }
    if kept.starts_with('-') {
        return Err(NotCanonical::LeadingHyphen);
    }
    if kept.ends_with('-') {
        return Err(NotCanonical::TrailingHyphen);
    }
    if kept.len() > 63 {
        return Err(NotCanonical::TooLong);
    }
    Ok(kept)
}

#[cfg(test)]
mod canonical_tests {
    use super::*;

    #[test]
    fn names_become_labels() {
        assert_eq!(canonical("Diego_Cell.2"), Ok("diego-cell2".to_owned()));
        assert_eq!(canonical("a b/c"), Ok("abc".to_owned()));
    }

    #[test]
    fn unusable_names_are_refused() {
        for (name, error) in [
            ("_x", NotCanonical::LeadingHyphen),
            ("x-", NotCanonical::TrailingHyphen),
            ("...", NotCanonical::Empty),
            ("", NotCanonical::Empty),
        ] {
            assert_eq!(canonical(name), Err(error), "{name}");
        }
        let longest = "a".repeat(63);
        assert_eq!(canonical(&longest), Ok(longest.clone()));
        assert_eq!(canonical(&(longest + "a")), Err(NotCanonical::TooLong));
    }

    #[test]
    fn criteria_are_sorted_as_texts() {
        let of = |status: LinkStatus, synchronous: Option<bool>| Criteria {
            zones: vec!["2".to_owned(), "10".to_owned()],
            indexes: vec![3],
            numbers: vec![4, 30],
            networks: vec![5],
            status,
            synchronous,
        };
        for (criteria, expected) in [
            (of(LinkStatus::Smart, None), "a10a2i3m30m4n5s0"),
            (of(LinkStatus::Unhealthy, Some(true)), "a10a2i3m30m4n5s1y1"),
            (of(LinkStatus::Healthy, Some(false)), "a10a2i3m30m4n5s3y0"),
            (of(LinkStatus::All, None), "a10a2i3m30m4n5s4"),
        ] {
            assert_eq!(criteria.to_string(), expected);
            let address = LinkAddress {
                group: AddressGroup::Names {
                    instance_group: "web".to_owned(),
                    network: "net".to_owned(),
                    deployment: "dep".to_owned(),
                },
                first: FirstLabel::Query(criteria),
                domain: "bosh".to_owned(),
            };
            assert_eq!(
                address.to_string(),
                format!("q-{expected}.web.net.dep.bosh")
            );
        }
        for (reason, text) in [
            (NotCanonical::Empty, "it has no letter, digit or hyphen"),
            (
                NotCanonical::LeadingHyphen,
                "its canonical form cannot start with a hyphen",
            ),
            (
                NotCanonical::TrailingHyphen,
                "its canonical form cannot end with a hyphen",
            ),
            (
                NotCanonical::TooLong,
                "its canonical form is longer than a label, 63 bytes",
            ),
        ] {
            assert_eq!(reason.to_string(), text);
        }
    }

    #[test]
    fn certificates_have_names_without_criteria() {
        let address = LinkAddress {
            group: AddressGroup::Id("7".to_owned()),
            first: FirstLabel::Instance("i".to_owned()),
            domain: "bosh.".to_owned(),
        };
        assert_eq!(address.to_string(), "i.q-g7.bosh");
        assert_eq!(address.clone().san(true).to_string(), "*.q-g7.bosh");
        assert_eq!(address.san(false).to_string(), "q-s0.q-g7.bosh");
    }
}
