//! Reads the state that the agent of this VM writes to `health.json`.

use std::{
    fs,
    io::Read,
    path::{Path, PathBuf},
};

use parking_lot::Mutex;

use dns_core::config::json::Json;
use dns_kit::files::FileStamp;

/// Maximum number of bytes read from the file.
const MAX_FILE: u64 = 1 << 20;

/// The agent's file, read again when it changes.
#[derive(Debug)]
pub(super) struct AgentFile {
    path: PathBuf,
    /// Stamp of the file at the last read (`None` if it did not exist), and the state it contained.
    last: Mutex<(Option<FileStamp>, bool)>,
}

impl AgentFile {
    /// Creates a reader of the file at `path`, which need not exist.
    pub(super) fn new(path: PathBuf) -> Self {
        Self { path, last: Mutex::new((None, false)) }
    }

    /// Returns whether the agent reports `running`; a missing or invalid file does not count as
    /// such (observed).
    pub(super) fn is_running(&self) -> bool {
        let stamp = FileStamp::of(&self.path);
        // A panic cannot leave the value half changed.
        let mut last = self.last.lock();
        if last.0 != stamp {
            *last = (stamp, stamp.is_some() && read(&self.path).is_some_and(|bytes| says_running(&bytes)));
        }
        last.1
    }
}

/// Reads the file at `path`; `None` on any error.
fn read(path: &Path) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    fs::File::open(path).ok()?.take(MAX_FILE).read_to_end(&mut bytes).ok()?;
    Some(bytes)
}

/// Returns whether the content reports `running`. The member name matches in any letter case, the
/// state only in this one.
fn says_running(bytes: &[u8]) -> bool {
    let Ok(Json::Object(members)) = Json::parse(bytes) else { return false };
    let mut running = false;
    for (name, value) in &members {
        if name.eq_ignore_ascii_case("state") {
            match value {
                Json::Text(text) => running = text == "running",
                Json::Null => {}
                _ => return false,
            }
        }
    }
    running
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_running_is_running() {
        assert!(says_running(br#"{"state":"running"}"#));
        assert!(says_running(br#"{"STATE":"running","vm":{"x":1}}"#));
        let odd: [&[u8]; 8] = [
            b"",
            b"{",
            b"{}",
            b"[]",
            br#"{"state":1}"#,
            br#"{"state":"Running"}"#,
            br#"{"state":"failing"}"#,
            br#"{"state":"running"} x"#,
        ];
        assert!(odd.iter().all(|bytes| !says_running(bytes)));
    }

    #[test]
    fn changes_are_seen_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("health.json");
        let file = AgentFile::new(path.clone());
        assert!(!file.is_running());
        fs::write(&path, r#"{"state":"running"}"#).unwrap();
        assert!(file.is_running() && file.is_running());
        fs::write(&path, r#"{"state":"failing!"}"#).unwrap();
        assert!(!file.is_running());
        fs::write(&path, r#"{"state":"running"}"#).unwrap();
        assert!(file.is_running());
        fs::remove_file(&path).unwrap();
        assert!(!file.is_running());
    }
}
