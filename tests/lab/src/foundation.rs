//! A foundation as files, and the resolution of its names: the same data for this server and its
//! peers.

use std::{fs, net::Ipv4Addr, path::Path};

use anyhow::{Context, Result};
use dns_core::{
    catalog::{AliasFiles, Records, Snapshot},
    name::Name,
    resolve::{AllRunning, resolve},
};

use crate::fleet::Fleet;

/// A name with its addresses, final dot included.
pub type Entry = (String, Vec<Ipv4Addr>);

/// Records and aliases as files, and the snapshot that the server makes of them.
#[derive(Debug)]
pub struct Foundation {
    /// Content of records.json.
    pub records: Vec<u8>,
    /// Content of the alias file, if there is one.
    pub aliases: Option<Vec<u8>>,
    /// The names and instances of the files, as the server resolves them.
    pub snapshot: Snapshot,
    /// `max_names` of the server; three quarters of it are for listed names.
    pub max_names: u32,
}

/// `max_names` unless configured otherwise.
const DEFAULT_MAX_NAMES: u32 = 65_536;

/// A change of an instance's address.
#[derive(Clone, Debug)]
pub struct Change {
    /// A name that resolves to the instance, among others; with the final dot.
    pub name: String,
    /// The address before the change.
    pub from: String,
    /// The address after the change.
    pub to: Ipv4Addr,
}

impl Foundation {
    /// Reads a foundation from files.
    pub fn read(records: &Path, aliases: Option<&Path>) -> Result<Self> {
        let read = |path: &Path| fs::read(path).with_context(|| path.display().to_string());
        Self::parse(read(records)?, aliases.map(read).transpose()?)
    }

    /// Generates a foundation with this many instances.
    pub fn generate(instances: usize) -> Result<Self> {
        let fleet = Fleet::generate(instances, 1);
        Self::parse(fleet.records_json(), Some(fleet.aliases_json()))
    }

    /// Parses records.json and, if given, an alias file.
    pub fn parse(records: Vec<u8>, aliases: Option<Vec<u8>>) -> Result<Self> {
        let (parsed, _) = Records::parse(&records).context("records")?;
        let files = aliases.iter().map(|aliases| ("aliases.json", &aliases[..]));
        let (alias_files, _) = AliasFiles::parse(files).context("aliases")?;
        let (snapshot, _) = Snapshot::build(parsed, &alias_files);
        Ok(Self {
            records,
            aliases,
            snapshot,
            max_names: DEFAULT_MAX_NAMES,
        })
    }

    /// Returns the published names in order of priority.
    pub fn names(&self) -> impl Iterator<Item = Name> {
        dns_core::listing::published_names(&self.snapshot)
    }

    /// Returns names with their IPv4 addresses, for servers with static data: at most `limit`.
    pub fn entries(&self, limit: usize) -> Vec<Entry> {
        let resolved = self.names().filter_map(|name| {
            let resolution = resolve(&self.snapshot, &AllRunning, &name)?;
            (!resolution.v4.is_empty()).then(|| (name.to_string(), resolution.v4))
        });
        resolved.take(limit).collect()
    }

    /// Moves the first instance to the address `to`, and increments the version of the records.
    pub fn recreate_one(&mut self, to: Ipv4Addr) -> Result<Change> {
        self.recreate(0, to)
    }

    /// Moves an instance to the address `to`, and increments the version of the records. The rest of the file
    /// stays as it is, as when a director writes it.
    pub fn recreate(&mut self, row: u32, to: Ipv4Addr) -> Result<Change> {
        let instance = self
            .snapshot
            .instance(row)
            .context("the records hold no such instance")?;
        let group = instance
            .group_ids()
            .next()
            .context("the instance is in no group")?;
        let name = format!("q-s0.q-g{group}.{}", instance.domain);
        let from = instance
            .ip
            .context("the instance has no address")?
            .to_string();
        let text = str::from_utf8(&self.records).context("records.json")?;
        let mut text = text.replace(&format!("\"{from}\""), &format!("\"{to}\""));
        if let Some(version) = self.snapshot.version() {
            let [old, new] = [version, version + 1].map(|version| format!("\"version\":{version}"));
            text = text.replacen(&old, &new, 1);
        }
        let changed = Self::parse(text.into_bytes(), self.aliases.take())?;
        *self = Self {
            max_names: self.max_names,
            ..changed
        };
        Ok(Change { name, from, to })
    }
}
