//! Mode and owner of the records on this machine.

use std::{fs, os::unix::fs::MetadataExt as _, path::Path};

use dns_kit::files::atomic::Attributes;

/// Mode and owner of records.json, of the agent's and of `publish --local`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::Args)]
pub(crate) struct FileOptions {
    /// Mode of the file in octal notation
    #[arg(long, value_name = "MODE", default_value = "640", value_parser = octal)]
    mode: u32,
    /// Owner of the file, by number; default: the process's user
    #[arg(long, value_name = "UID")]
    user: Option<u32>,
    /// Group of the file, by number; default: the process's group, or as root the folder's
    #[arg(long, value_name = "GID")]
    group: Option<u32>,
}

impl FileOptions {
    /// Returns the attributes of the file at `path`.
    pub(crate) fn of(&self, path: &Path) -> Attributes {
        let Self { mode, user, group } = *self;
        Attributes {
            mode,
            user,
            group: group.or_else(|| group_of_folder(path)),
        }
    }
}

/// Returns the group of a file's folder, if the process is root. Root's own group has no reader that needs it: the
/// DNS server runs as another user, which reads its folder by the folder's group.
fn group_of_folder(path: &Path) -> Option<u32> {
    if !nix::unistd::geteuid().is_root() {
        return None;
    }
    let folder = path
        .parent()
        .filter(|folder| !folder.as_os_str().is_empty());
    let facts = fs::metadata(folder.unwrap_or(Path::new("."))).ok()?;
    Some(facts.gid())
}

/// Parses an octal file mode.
fn octal(text: &str) -> Result<u32, &'static str> {
    match u32::from_str_radix(text, 8) {
        // No bits for set-user-ID or the like, which a data file never needs.
        Ok(mode) if mode <= 0o777 => Ok(mode),
        _ => Err("expected an octal mode such as 640"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn group_is_that_of_the_folder() {
        let folder = tempfile::tempdir().unwrap();
        let is_root = nix::unistd::geteuid().is_root();
        if is_root {
            std::os::unix::fs::chown(folder.path(), None, Some(4242)).unwrap();
        }
        let path = folder.path().join("records.json");
        assert_eq!(group_of_folder(&path), is_root.then_some(4242));
        let here = fs::metadata(".").unwrap().gid();
        assert_eq!(group_of_folder(Path::new("x")), is_root.then_some(here));
        assert_eq!(group_of_folder(&folder.path().join("none/x")), None);
        let options = FileOptions {
            mode: 0o640,
            user: Some(1),
            group: Some(7),
        };
        assert_eq!(options.of(&path).group, Some(7));
    }

    #[test]
    fn modes_are_octal() {
        for (text, expected) in [
            ("640", Some(0o640)),
            ("777", Some(0o777)),
            ("0", Some(0)),
            ("1000", None),
            ("8", None),
            ("", None),
        ] {
            assert_eq!(octal(text).ok(), expected, "{text}");
        }
    }
}
