//! A foundation as files, and what its names resolve to: the same data for our
//! server and for its peers.

use std::{fs, net::Ipv4Addr, path::Path};

use anyhow::{Context, Result};
use dns_core::{
    catalog::{AliasFiles, Records, Snapshot},
    name::Name,
    resolve::{AllRunning, resolve},
};
use serde_json::Value;

use crate::{fleet::Fleet, peers::Entry};

/// Records and aliases as files, and what the server will make of them.
#[derive(Debug)]
pub struct Foundation {
    /// records.json.
    pub records: Vec<u8>,
    /// An alias file.
    pub aliases: Option<Vec<u8>>,
    /// What they mean.
    pub snapshot: Snapshot,
    /// `max_names` of the server that serves it; three quarters are for names that it lists.
    pub max_names: u32,
}

/// `max_names` where nobody says otherwise.
const DEFAULT_MAX_NAMES: u32 = 65_536;

/// An instance that got another address.
#[derive(Clone, Debug)]
pub struct Change {
    /// A name that resolves to it, among others; final dot included.
    pub name: String,
    /// Its address until now.
    pub from: String,
    /// Its address from now on.
    pub to: Ipv4Addr,
}

impl Foundation {
    /// Reads a foundation from files.
    pub fn read(records: &Path, aliases: Option<&Path>) -> Result<Self> {
        let read = |path: &Path| fs::read(path).with_context(|| path.display().to_string());
        Self::parse(read(records)?, aliases.map(read).transpose()?)
    }

    /// A generated foundation of so many instances.
    pub fn generate(instances: usize) -> Result<Self> {
        let fleet = Fleet::generate(instances, 1);
        Self::parse(fleet.records_json(), Some(fleet.aliases_json()))
    }

    /// Parses a foundation.
    pub fn parse(records: Vec<u8>, aliases: Option<Vec<u8>>) -> Result<Self> {
        let (parsed, _) = Records::parse(&records).context("records")?;
        let files = aliases.iter().map(|aliases| ("aliases.json", &aliases[..]));
        let (alias_files, _) = AliasFiles::parse(files).context("aliases")?;
        let (snapshot, _) = Snapshot::build(parsed, &alias_files);
        Ok(Self { records, aliases, snapshot, max_names: DEFAULT_MAX_NAMES })
    }

    /// The names that are published, in the order of their use.
    pub fn names(&self) -> impl Iterator<Item = Name> {
        dns_core::listing::published_names(&self.snapshot)
    }

    /// Names with IPv4 addresses, for servers that want to be told: at most `limit`.
    pub fn entries(&self, limit: usize) -> Vec<Entry> {
        let resolved = self.names().filter_map(|name| {
            let resolution = resolve(&self.snapshot, &AllRunning, &name)?;
            (!resolution.v4.is_empty()).then(|| (name.to_string(), resolution.v4))
        });
        resolved.take(limit).collect()
    }

    /// Gives the first instance another address, `to`, and a higher version to the records.
    pub fn recreate_one(&mut self, to: Ipv4Addr) -> Result<Change> {
        let mut records: Value = serde_json::from_slice(&self.records)?;
        let column = |name: &str| records["record_keys"].as_array()?.iter().position(|key| key == name);
        let (Some(ip), Some(groups), Some(domain)) = (column("ip"), column("group_ids"), column("domain"))
        else {
            anyhow::bail!("the records lack one of the columns ip, group_ids, domain");
        };
        let row = records["record_infos"].get_mut(0).context("the records hold no instance")?;
        let group = row[groups][0].as_str().context("the first instance is in no group")?;
        let name = format!("q-s0.q-g{group}.{}.", row[domain].as_str().unwrap_or_default());
        let from = row[ip].as_str().unwrap_or_default().to_owned();
        row[ip] = to.to_string().into();
        if let Some(version) = records["version"].as_u64() {
            records["version"] = (version + 1).into();
        }
        let changed = Self::parse(serde_json::to_vec(&records)?, self.aliases.take())?;
        *self = Self { max_names: self.max_names, ..changed };
        Ok(Change { name, from, to })
    }
}
