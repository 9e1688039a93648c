//! The server's own files: `records.json` and the alias files.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use dns_core::catalog::{AliasFiles, Records, Snapshot};
use dns_kit::files::{FileStamp, bounded, glob::glob};

/// Follows the files; the last valid state of each stays in use.
#[derive(Debug)]
pub struct FleetFiles {
    records: PathBuf,
    /// Glob pattern of the alias files; empty for none.
    aliases: String,
    /// Stamps of the files at the last refresh.
    stamps: Vec<(PathBuf, Option<FileStamp>)>,
    good_records: Option<Vec<u8>>,
    good_aliases: AliasFiles,
    snapshot: Option<Arc<Snapshot>>,
    problem: Option<SourceError>,
}

/// Failure to read the fleet's files. The last valid state stays in use.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}: {reason}", file.display())]
pub struct SourceError {
    file: PathBuf,
    reason: String,
}

impl FleetFiles {
    /// Follows `records.json` and the alias files that match a glob pattern.
    pub fn new(records: PathBuf, aliases: String) -> Self {
        Self {
            records,
            aliases,
            stamps: Vec::new(),
            good_records: None,
            good_aliases: AliasFiles::default(),
            snapshot: None,
            problem: None,
        }
    }

    /// Reads changed files. Returns the latest valid state, if any, and the problem of the current
    /// files.
    pub fn refresh(&mut self) -> (Option<Arc<Snapshot>>, Option<SourceError>) {
        let files = self.files();
        let stamps: Vec<_> = files.iter().map(|path| (path.clone(), FileStamp::of(path))).collect();
        if stamps != self.stamps || self.problem.is_some() {
            self.stamps = stamps;
            self.problem = self.read(&files[1..]).err();
        }
        (self.snapshot.clone(), self.problem.clone())
    }

    /// Returns `records.json`, followed by the alias files in order of precedence.
    pub fn files(&self) -> Vec<PathBuf> {
        let mut files = vec![self.records.clone()];
        // A malformed pattern matches no file; the server reports it.
        files.extend(glob(&self.aliases).unwrap_or_default());
        files
    }

    fn read(&mut self, alias_files: &[PathBuf]) -> Result<(), SourceError> {
        let records = read(&self.records);
        let mut contents = Vec::new();
        let mut problem = None;
        for path in alias_files {
            match read(path) {
                Ok(bytes) => contents.push((path.display().to_string(), bytes)),
                Err(error) => problem = Some(error),
            }
        }
        if problem.is_none() {
            let files = contents.iter().map(|(file, bytes)| (file.as_str(), bytes.as_slice()));
            match AliasFiles::parse(files) {
                Ok((aliases, _)) => self.good_aliases = aliases,
                Err(error) => {
                    problem =
                        Some(SourceError { file: PathBuf::from(&self.aliases), reason: error.to_string() });
                }
            }
        }
        let refused = |reason: String| SourceError { file: self.records.clone(), reason };
        match records.and_then(|bytes| match Records::parse(&bytes) {
            Ok(parsed) => Ok((bytes, parsed)),
            Err(error) => Err(refused(error.to_string())),
        }) {
            Ok((bytes, (records, _))) => {
                self.good_records = Some(bytes);
                self.snapshot = Some(Arc::new(Snapshot::build(records, &self.good_aliases).0));
            }
            Err(error) => {
                problem = Some(error);
                // New aliases apply to the last valid records, which were parsed successfully
                // before.
                let good = self.good_records.as_deref().and_then(|bytes| Records::parse(bytes).ok());
                if let Some((records, _)) = good {
                    self.snapshot = Some(Arc::new(Snapshot::build(records, &self.good_aliases).0));
                }
            }
        }
        problem.map_or(Ok(()), Err)
    }
}

fn read(path: &Path) -> Result<Vec<u8>, SourceError> {
    bounded::read(path)
        .map_err(|error| SourceError { file: path.to_owned(), reason: format!("cannot be read: {error}") })
}
