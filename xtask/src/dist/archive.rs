//! Folders, archives and sums that are the same every time.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};

use super::{Release, name};
use crate::process::{capture, run};

/// Makes an empty folder.
pub(super) fn make_anew(folder: &Path) -> Result<()> {
    if folder.exists() {
        fs::remove_dir_all(folder).with_context(|| folder.display().to_string())?;
    }
    fs::create_dir_all(folder).with_context(|| folder.display().to_string())
}

/// Writes a file with its folders; `mode` as of chmod.
pub(super) fn put(path: &Path, contents: impl AsRef<[u8]>, mode: u32) -> Result<()> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
    }
    fs::write(path, contents).with_context(|| path.display().to_string())?;
    Ok(fs::set_permissions(path, fs::Permissions::from_mode(mode))?)
}

/// Copies a file with its folders.
pub(super) fn copy(from: &Path, to: &Path, mode: u32) -> Result<()> {
    put(to, fs::read(from).with_context(|| from.display().to_string())?, mode)
}

/// Packs all of `folder` into the tar `to`, sorted, dated and owned by root.
pub(super) fn tar(release: &Release, folder: &Path, to: &Path) -> Result<()> {
    // Folders as umask leaves them would be told apart.
    run(Command::new("find").arg(folder).args(["-type", "d", "-exec", "chmod", "755", "{}", "+"]))?;
    run(Command::new("tar")
        .args(["--create", "--sort=name", "--format=gnu", "--owner=0", "--group=0", "--numeric-owner"])
        .arg(format!("--mtime=@{}", release.epoch))
        .arg("--file")
        .arg(to)
        .arg("--directory")
        .arg(folder)
        .arg("."))
}

/// The same, compressed: gzip without name and time.
pub(super) fn tgz(release: &Release, folder: &Path, to: &Path) -> Result<()> {
    let plain = to.with_extension("tar");
    tar(release, folder, &plain)?;
    let effort = if release.is_trial { "--fast" } else { "--best" };
    run(Command::new("gzip").args(["--no-name", effort, "--force"]).arg(&plain))?;
    fs::rename(plain.with_extension("tar.gz"), to).with_context(|| to.display().to_string())
}

/// SHA-256 of a file, as hexadecimal digits.
pub(super) fn sha256(file: &Path) -> Result<String> {
    let said = capture(Command::new("sha256sum").arg("--").arg(file))?;
    Ok(said.split_whitespace().next().context("sha256sum said nothing")?.to_owned())
}

/// Writes SHA256SUMS of all files in a folder, as `sha256sum --check` reads it.
pub(super) fn sums(folder: &Path) -> Result<()> {
    let mut files: Vec<PathBuf> =
        fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect::<Result<_>>()?;
    files.sort();
    let lines = files.iter().map(|file| Ok(format!("{}  {}\n", sha256(file)?, name(file))));
    put(&folder.join("SHA256SUMS"), lines.collect::<Result<String>>()?, 0o644)
}
