//! Compares the names of a certificate with a fleet, to find those that no instance answers.

use std::{collections::BTreeSet, fmt, net::IpAddr};

use dns_core::{
    catalog::Snapshot,
    name::Name,
    resolve::{AllRunning, Existence, resolve},
};

/// A name or address of a certificate that has no counterpart in the fleet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unresolved {
    /// The name is in a domain of the fleet, but no instance answers it.
    Name(String),
    /// The name does not follow the query language.
    Malformed(String),
    /// No instance has the address.
    Address(IpAddr),
}

impl fmt::Display for Unresolved {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name(name) => {
                write!(out, "{name}: no instance has this name; deploy the group or correct the name")
            }
            Self::Malformed(name) => write!(out, "{name}: not a valid query of a fleet's domain; correct it"),
            Self::Address(address) => {
                write!(out, "{address}: no instance has this address; reissue with the current one")
            }
        }
    }
}

/// Returns the names and addresses that are not in the fleet. Names outside the fleet's domains are
/// ignored. A wildcard resolves if `q-s0` in its place does.
pub fn unresolved(snapshot: &Snapshot, names: &[String], addresses: &[IpAddr]) -> Vec<Unresolved> {
    let mut missing: Vec<Unresolved> = names.iter().filter_map(|name| check(snapshot, name)).collect();
    if !addresses.is_empty() {
        let known: BTreeSet<IpAddr> = snapshot.instances().filter_map(|instance| instance.ip).collect();
        let unknown = addresses.iter().filter(|address| !address.is_loopback() && !known.contains(address));
        missing.extend(unknown.map(|address| Unresolved::Address(*address)));
    }
    missing
}

fn check(snapshot: &Snapshot, text: &str) -> Option<Unresolved> {
    let asked = match text.strip_prefix("*.") {
        Some(rest) => format!("q-s0.{rest}"),
        None => text.to_owned(),
    };
    let Ok(name) = Name::from_text(&asked) else { return Some(Unresolved::Malformed(text.to_owned())) };
    match resolve(snapshot, &AllRunning, &name)?.existence {
        Existence::Found => None,
        Existence::NoSuchName => Some(Unresolved::Name(text.to_owned())),
        Existence::Malformed => Some(Unresolved::Malformed(text.to_owned())),
    }
}
