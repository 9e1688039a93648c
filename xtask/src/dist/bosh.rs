//! The BOSH release, from `deploy/bosh`: a tarball that `bosh upload-release` takes.
//!
//! The package's only content is the finished binary, so that compilation workers need
//! no compiler. Fingerprints are sums of the archives, which are the same every time.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::Result;

use super::{Release, archive};
use crate::process::root;

/// Name of the job, and of the package whose path other jobs know: those of the reference.
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

/// Packs the job: its `spec` is called `job.MF` in a release. The sum of the archive.
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

/// Packs the package: the binary and the script that puts it in place. The sum of the archive.
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

/// Packs `contents` as `folder/bosh-dns.tgz`; its SHA-256.
fn pack(release: &Release, contents: &Path, folder: &Path) -> Result<String> {
    fs::create_dir_all(folder)?;
    let archive = folder.join(format!("{NAME}.tgz"));
    archive::tgz(release, contents, &archive)?;
    archive::sha256(&archive)
}

/// All files below a folder.
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
