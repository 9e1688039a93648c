//! Follows records.json and the alias files. New contents become the next snapshot; invalid
//! contents are reported, and the last good snapshot stays.

use std::{path::PathBuf, time::Instant};

use tracing::{error, info, warn};

use super::followed_file::{ChangedRecords, Followed, Reading, Sources, error_lines};
use crate::ops::service_status::{Kind, ServiceStatus};
use dns_core::{
    catalog::{AliasError, AliasFiles, IndexedRecords, NameRules, Records, Snapshot},
    config::{ConfigError, ParsedFiles},
};
use dns_kit::files::watch::Writes;

/// Maximum number of warnings logged individually per load; the rest are only counted.
const LOGGED_WARNINGS: usize = 20;

/// The files from which snapshots are built.
pub(super) struct CatalogFiles {
    records: Followed,
    aliases: Followed,
    /// The records in use, which are combined with other aliases if only those change.
    good_records: IndexedRecords,
    /// Whether the last read of the file found `good_records`.
    are_current: bool,
    good_aliases: AliasFiles,
    rules: NameRules,
    /// Writes that the kernel reports in the files' folders.
    writes: Option<Writes>,
    service_status: ServiceStatus,
}

impl CatalogFiles {
    /// Creates the source and reads it for the first time.
    ///
    /// Missing or invalid records, and invalid alias files, are reported and not served. With
    /// `require_alias_files` the errors of alias files are returned.
    pub(super) fn start(
        sources: &Sources,
        service_status: &ServiceStatus,
    ) -> (Self, Snapshot, Vec<ConfigError>) {
        let mut files = Self {
            records: Followed::new(sources.records.clone()),
            aliases: Followed::new(sources.aliases.clone()),
            good_records: Records::default().into(),
            are_current: false,
            good_aliases: AliasFiles::default(),
            rules: sources.rules,
            writes: None,
            service_status: service_status.clone(),
        };
        let begun = Instant::now();
        let mut aliases = None;
        let mut fatal = Vec::new();
        if let Some(ParsedFiles {
            valid: read,
            errors,
        }) = files.read_aliases(Reading::Always)
        {
            fatal = errors;
            if fatal.is_empty() {
                aliases = Some(read);
            } else {
                log_warnings("alias files", &read.warnings);
                files.good_aliases = read.valid;
            }
        }
        if !sources.require_alias_files {
            let others = "the others are served, and this one once it is valid";
            for line in error_lines("alias files", &fatal, others) {
                error!("{line}");
            }
            fatal.clear();
        }
        let records = files.read_records(Reading::Always);
        let snapshot = files.build(aliases, records, begun);
        (files, snapshot, fatal)
    }

    pub(super) fn refresh(&mut self, reading: Reading) -> Option<Snapshot> {
        let begun = Instant::now();
        let aliases = self.read_aliases(reading).and_then(|read| {
            let stay = "the current aliases stay in use";
            for line in error_lines("alias files", &read.errors, stay) {
                error!("{line}");
            }
            // One wrong file keeps all aliases as they are: half of an edit that touches two files
            // would be served otherwise.
            read.whole().ok()
        });
        let records = self.read_records(reading);
        (aliases.is_some() || records.is_some()).then(|| self.build(aliases, records, begun))
    }

    /// Replaces the followed sources; the next [`Self::refresh`] reads them.
    pub(super) fn follow(&mut self, sources: &Sources) {
        self.records = Followed::new(sources.records.clone());
        self.aliases = Followed::new(sources.aliases.clone());
        self.are_current = false;
        if let Some(writes) = self.writes.clone() {
            self.rely_on(writes);
        }
    }

    /// Relies on the kernel's reports of writes to the records file. Other files are small: reading them twice costs
    /// nothing.
    pub(super) fn rely_on(&mut self, writes: Writes) {
        self.records.rely_on(writes.clone());
        self.writes = Some(writes);
    }

    /// Starts reading all files in the background, for the next [`Self::refresh`].
    pub(super) fn look_ahead(&mut self, reading: Reading) {
        let base = self.are_current.then_some(&self.good_records);
        self.records.look_ahead(reading, base);
        self.aliases.look_ahead(reading, None);
    }

    pub(super) fn followed(&self) -> [&Followed; 2] {
        [&self.records, &self.aliases]
    }

    fn read_aliases(&mut self, reading: Reading) -> Option<ParsedFiles<Read<AliasFiles>>> {
        let (contents, parsed) = self.aliases.parsed(reading, parse_aliases)?;
        let ParsedFiles {
            valid: (valid, warnings),
            errors,
        } = parsed;
        let files = contents.paths();
        if !errors.is_empty() {
            self.service_status
                .refused(Kind::Aliases, files.clone(), &errors);
        }
        Some(ParsedFiles {
            valid: Read {
                files,
                valid,
                warnings,
            },
            errors,
        })
    }

    /// Reads records.json if it may have changed; returns the records if they are valid.
    fn read_records(&mut self, reading: Reading) -> Option<Read<IndexedRecords>> {
        let base = self.are_current.then_some(&self.good_records);
        let contents = match self.records.changed_records(reading, base)? {
            ChangedRecords::Edited { files, records } => {
                // There are none: a file with anything to warn about is parsed as a whole.
                return Some(Read {
                    files,
                    valid: records,
                    warnings: Vec::new(),
                });
            }
            ChangedRecords::Text(contents) => contents,
        };
        let good_records = &self.good_records;
        let (contents, parsed) = self
            .records
            .parse(contents, |files| parse_records(good_records, files));
        let files = contents.paths();
        // A file with errors is no base to compare with: its rows were not kept.
        self.are_current = parsed.errors.is_empty();
        match parsed.whole() {
            Ok((valid, warnings)) => Some(Read {
                files,
                valid,
                warnings,
            }),
            Err(problems) => {
                let in_use = self.service_status.is_in_use(Kind::Records);
                let stays = if in_use {
                    "the current records stay in use"
                } else {
                    "no records are served"
                };
                error!("records: {problems}; {stays}");
                self.service_status
                    .refused(Kind::Records, files, &problems.0);
                None
            }
        }
    }

    fn build(
        &mut self,
        aliases: Option<Read<AliasFiles>>,
        records: Option<Read<IndexedRecords>>,
        begun: Instant,
    ) -> Snapshot {
        let new_aliases = aliases.map(|read| {
            self.good_aliases = read.valid;
            (read.files, read.warnings)
        });
        let new_records = records.map(|read| {
            self.good_records = read.valid;
            (read.files, read.warnings)
        });
        let (snapshot, mut skipped) =
            Snapshot::build(self.good_records.clone(), &self.good_aliases);
        let snapshot = snapshot.with_rules(self.rules);

        let instances = snapshot.instances().len();
        let aliases = snapshot.alias_count();
        let version = snapshot
            .version()
            .map_or_else(|| "none".to_owned(), |version| version.to_string());
        info!("serving records version {version}: {instances} instances, {aliases} aliases");
        self.service_status.change(|state| {
            state.records_version = snapshot.version();
            (state.instances, state.aliases) = (instances, aliases);
        });
        // They depend on records and alias files together, and belong to what was read.
        if let Some((files, mut warnings)) = new_records {
            warnings.append(&mut skipped);
            log_warnings("records", &warnings);
            let detail = format!("version {version}, {instances} instances");
            self.service_status
                .loaded(Kind::Records, files, warnings, begun.elapsed(), &detail);
        }
        if let Some((files, mut warnings)) = new_aliases {
            warnings.append(&mut skipped);
            log_warnings("alias files", &warnings);
            let detail = format!("{aliases} aliases");
            self.service_status
                .loaded(Kind::Aliases, files, warnings, begun.elapsed(), &detail);
        }
        snapshot
    }
}

/// Something that was read, with the paths of its files and the warnings about skipped items.
struct Read<T> {
    /// Empty if none is configured.
    files: Vec<PathBuf>,
    valid: T,
    warnings: Vec<String>,
}

type ParsedRecords = (IndexedRecords, Vec<String>);

/// Parses records.json, which follows the file of `good`; empty records if no file is configured.
fn parse_records(good: &IndexedRecords, files: &[(&str, &[u8])]) -> ParsedFiles<ParsedRecords> {
    // Without `records_file` there are no records, which is no error.
    let empty = || (Records::default().into(), Vec::new());
    let parsed = files.first().map_or_else(
        || Ok(empty()),
        |(file, bytes)| {
            good.next(bytes)
                .map_err(|error| ConfigError::of_file(*file, error.to_string()))
        },
    );
    match parsed {
        Ok(valid) => ParsedFiles {
            valid,
            errors: Vec::new(),
        },
        Err(error) => ParsedFiles {
            valid: empty(),
            errors: vec![error],
        },
    }
}

/// Parses the alias files; also returns a warning for each skipped item.
fn parse_aliases(files: &[(&str, &[u8])]) -> ParsedFiles<(AliasFiles, Vec<String>)> {
    let (aliases, warnings, errors) = AliasFiles::parse_valid(files.iter().copied());
    ParsedFiles {
        valid: (aliases, warnings),
        errors: errors
            .into_iter()
            .map(|AliasError { files, problem }| ConfigError::of_file(files.join(", "), problem))
            .collect(),
    }
}

/// Logs up to [`LOGGED_WARNINGS`] warnings and the number of the others.
fn log_warnings(what: &str, warnings: &[String]) {
    for warning in warnings.iter().take(LOGGED_WARNINGS) {
        warn!("{what}: {warning}");
    }
    if let Some(more) = warnings.len().checked_sub(LOGGED_WARNINGS + 1) {
        warn!("{what}: and {} more", more + 1);
    }
}
