//! The BOSH release, built from `deploy/bosh`: a tarball for `bosh upload-release`.
//!
//! The package contains only the finished binary, so compilation workers need no compiler.
//! Fingerprints are checksums of the reproducible archives.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::Result;

use super::{Release, archive};
use crate::process::root;

/// Name of the job and of the package, the same as in bosh-dns, because other jobs use its path.
const NAME: &str = "bosh-dns";

/// Writes the release; `server` is the stripped binary.
pub(super) fn write(release: &Release, server: &Path, sync: Option<&Path>) -> Result<()> {
    let tarball = release.staging("bosh")?;
    let source = root().join("deploy/bosh");
    let job = pack_job(release, &source.join("jobs").join(NAME), &tarball)?;
    let package = pack_package(release, &source.join("packages").join(NAME), server, sync, &tarball)?;
    archive::put(&tarball.join("release.MF"), manifest(release, &job, &package), 0o644)?;
    let name = format!("bosh-dns-xdp-{}.tgz", release.version);
    archive::tgz(release, &tarball, &release.out.join(name))
}

/// Packs the job, whose `spec` becomes `job.MF`; returns the checksum of the archive.
fn pack_job(release: &Release, source: &Path, tarball: &Path) -> Result<String> {
    let job = release.staging("bosh-job")?;
    archive::copy(&source.join("spec"), &job.join("job.MF"), 0o644)?;
    archive::copy(&source.join("monit"), &job.join("monit"), 0o644)?;
    for file in files(&source.join("templates"))? {
        let name = file.strip_prefix(source)?;
        archive::copy(&file, &job.join(name), 0o644)?;
    }
    pack(release, &job, &tarball.join("jobs"))
}

/// Packs the package: the binary and its packaging script; returns the checksum of the archive.
fn pack_package(
    release: &Release,
    source: &Path,
    server: &Path,
    sync: Option<&Path>,
    tarball: &Path,
) -> Result<String> {
    let package = release.staging("bosh-package")?;
    archive::copy(&source.join("packaging"), &package.join("packaging"), 0o755)?;
    archive::copy(&source.join("process.sh"), &package.join("bosh-dns/process.sh"), 0o644)?;
    archive::copy(server, &package.join("bosh-dns/bosh-dns-xdp"), 0o755)?;
    if let Some(sync) = sync {
        archive::copy(sync, &package.join("bosh-dns/bosh-dns-sync"), 0o755)?;
    }
    pack(release, &package, &tarball.join("packages"))
}

/// Packs `contents` as `folder/bosh-dns.tgz`; returns its SHA-256.
fn pack(release: &Release, contents: &Path, folder: &Path) -> Result<String> {
    fs::create_dir_all(folder)?;
    let archive = folder.join(format!("{NAME}.tgz"));
    archive::tgz(release, contents, &archive)?;
    archive::sha256(&archive)
}

/// Returns all files below a folder.
fn files(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() { found.extend(files(&path)?) } else { found.push(path) }
    }
    Ok(found)
}

fn manifest(release: &Release, job: &str, package: &str) -> String {
    let Release { version, commit, .. } = release;
    let changed = commit.ends_with(super::CHANGED);
    format!(
        "---\n\
         name: bosh-dns-xdp\n\
         version: {version}\n\
         commit_hash: {}\n\
         uncommitted_changes: {changed}\n\
         jobs:\n\
         - name: {NAME}\n  version: {job}\n  fingerprint: {job}\n  sha1: sha256:{job}\n  packages: [{NAME}]\n\
         packages:\n\
         - name: {NAME}\n  version: {package}\n  fingerprint: {package}\n  sha1: sha256:{package}\n  \
         dependencies: []\n",
        commit.get(..9).unwrap_or(commit)
    )
}
