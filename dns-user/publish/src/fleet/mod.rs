//! Fleet names published under external names, as `FleetName` documents list them.
//!
//! Addresses come from [`dns_core::resolve`] on `records.json`, as in the server's own answers.
//! Health comes from the running server; an address is withdrawn only after it has been unhealthy
//! for the hold time, and health never empties a record set.
//!
//! In the other direction, an external-dns writes names of the fleet: [`AliasWriter`].

mod health;
mod writer;

use std::{collections::BTreeSet, time::Duration};

use dns_core::{config::values::parse_duration, name::Name as FleetDomain};

pub use self::health::{
    FleetFiles, HealthBook, Resolved, SavedHealth, ServerClient, ServerError, SourceError, resolve,
};
pub(crate) use self::writer::{AliasWriter, WriteError};
use crate::{
    endpoint::{LONGEST_TTL, read_name},
    record::Name,
    text::{Fields, Reader},
};

/// Default time for which an address must be unhealthy before it is withdrawn.
const DEFAULT_HOLD: Duration = Duration::from_secs(30);

/// Mapping of one external name to instances of the fleet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FleetName {
    /// External name to publish.
    pub external: Name,
    /// Fleet name that the server resolves: an alias, or a query.
    pub internal: FleetDomain,
    /// TTL of the records in seconds.
    pub ttl: Option<u32>,
    /// Time for which an address must be unhealthy before it is withdrawn.
    pub hold: Duration,
}

/// The mappings of a document.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FleetNames {
    /// Mappings that passed validation; the others are reported.
    pub names: Vec<FleetName>,
    /// External names of invalid entries, whose records stay unchanged.
    pub damaged: Vec<Name>,
    /// Whether the name of an entry is unreadable, so that all records of the document stay
    /// unchanged.
    pub is_unreadable: bool,
}

const MEMBERS: [&str; 6] = ["name", "alias", "group", "query", "ttl", "hold"];

/// Parses `spec.names`. An invalid entry does not affect the others.
pub fn read(spec: &Reader<'_>) -> FleetNames {
    let mut found = FleetNames::default();
    let Some(mut fields) = spec.fields() else { return found };
    let names = fields.required("names").and_then(|names| names.items());
    let mut seen = BTreeSet::new();
    for item in names.into_iter().flatten() {
        let before = item.problems().count();
        let (external, name) = item.fields().map_or((None, None), |fields| read_entry(fields, &mut seen));
        match name {
            Some(name) if item.problems().count() == before => found.names.push(name),
            _ => match external {
                Some(external) => found.damaged.push(external),
                None => found.is_unreadable = true,
            },
        }
    }
    fields.finish(&["names"]);
    found
}

fn read_entry(mut fields: Fields<'_>, seen: &mut BTreeSet<Name>) -> (Option<Name>, Option<FleetName>) {
    let entry = fields.map().clone();
    let external = fields.required("name").and_then(|name| read_name(&name));
    let sources = ["alias", "group", "query"].map(|member| (member, fields.optional(member)));
    let ttl = fields.optional("ttl").and_then(|ttl| ttl.integer(1..=LONGEST_TTL));
    let hold = fields.optional("hold").map_or(Some(DEFAULT_HOLD), |hold| read_hold(&hold));
    fields.finish(&MEMBERS);
    let mut given = sources.into_iter().filter_map(|(member, reader)| Some((member, reader?)));
    let internal = match (given.next(), given.next()) {
        (Some((member, reader)), None) => read_internal(member, &reader),
        (first, _) => {
            let reason = if first.is_some() { "set more than one of" } else { "set none of" };
            entry.problem(format!("{reason} alias, group and query"), "give exactly one of them");
            None
        }
    };
    if let Some(name) = &external
        && !seen.insert(name.clone())
    {
        entry.problem(format!("{name} occurs twice in this document"), "keep one of the two entries");
    }
    let name = (|| Some(FleetName { external: external.clone()?, internal: internal?, ttl, hold: hold? }))();
    (external, name)
}

fn read_hold(reader: &Reader<'_>) -> Option<Duration> {
    let text = reader.text()?;
    match parse_duration(text) {
        Ok(hold) => Some(hold),
        Err(error) => {
            reader.problem(format!("{text:?} {error}"), "use a number with a unit, such as 30s");
            None
        }
    }
}

/// Parses an alias, a query, or a group as `GROUP.NETWORK.DEPLOYMENT.DOMAIN`.
fn read_internal(member: &str, reader: &Reader<'_>) -> Option<FleetDomain> {
    let text = reader.filled_text()?;
    let name = match member {
        "group" => {
            let labels = text.trim_end_matches('.').split('.').count();
            if labels < 4 {
                reader.problem(
                    format!("{text:?} is not a group"),
                    "write it as GROUP.NETWORK.DEPLOYMENT.DOMAIN, such as router.default.cf.bosh",
                );
                return None;
            }
            // Smart health filter, as for an alias without `health_filter`.
            format!("q-s0.{text}")
        }
        _ => text.to_owned(),
    };
    match FleetDomain::from_text(&name) {
        Ok(name) => Some(name),
        Err(error) => {
            reader.problem(format!("{text:?} is not a domain name: {error}"), "use a name of the fleet");
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::{Problems, documents, parse};

    #[test]
    fn bad_mapping_spares_good_mappings() {
        let problems = Problems::of("names.yml");
        let text = "names:\n- {name: Router.example.org, alias: gorouter.cf.internal, ttl: 60, hold: 10s}\n\
                    - {name: db.example.org, group: mysql.default.cf.bosh}\n\
                    - {name: all.example.org, query: q-s4.q-g1.bosh, alias: x.y}\n\
                    - {name: none.example.org}\n- {name: bad.example.org, group: mysql}\n\
                    - {name: router.example.org, alias: other.internal}\n- {name: h.example.org, alias: a.b, hold: '30'}\n";
        let node = parse(documents(text)[0], &problems).unwrap();
        let found = read(&Reader::root(&node, &problems));
        assert_eq!(found.names.len(), 2);
        let [router, database] = &found.names[..] else { panic!("{found:?}") };
        assert_eq!((router.external.as_str(), router.ttl), ("router.example.org", Some(60)));
        assert_eq!(router.hold, Duration::from_secs(10));
        assert_eq!(database.internal.to_string().trim_end_matches('.'), "q-s0.mysql.default.cf.bosh");
        assert_eq!(database.hold, DEFAULT_HOLD);
        assert_eq!(found.damaged.len(), 5);
        let problems = problems.into_vec();
        let lines: Vec<_> = problems.iter().map(|problem| problem.line).collect();
        assert_eq!(lines, [4, 5, 6, 7, 8], "{problems:?}");
    }
}
