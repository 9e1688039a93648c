//! The BOSH release, built from `deploy/bosh`: a tarball for `bosh upload-release`.
//!
//! The package contains only the finished binary, so compilation workers need no compiler.
//! Fingerprints are checksums of the reproducible archives.

use std::{fs, path::Path};

use anyhow::Result;

use super::{Release, architecture::Built, archive};
use crate::process::root;

/// Name of the server's job and of the package, the same as in bosh-dns, because other jobs use its path.
const NAME: &str = "bosh-dns";

/// Names of the errand and of its package, which is installed beside the package of the release bosh-dns.
const SHADOW: &str = "shadow";
const SHADOW_PACKAGE: &str = "bosh-dns-shadow";

/// Names of all jobs.
const JOBS: [&str; 5] = [
    NAME,
    crate::SYNC[1],
    crate::PUBLISHER[1],
    crate::IDENTITY[1],
    SHADOW,
];

/// Writes the release with the programs of these architectures.
pub(super) fn write(release: &Release, built: &[Built]) -> Result<()> {
    let tarball = release.staging("bosh")?;
    let source = root().join("deploy/bosh");
    let mut jobs = Vec::with_capacity(JOBS.len());
    for job in JOBS {
        let packed = pack_job(release, &source.join("jobs"), job, &tarball)?;
        jobs.push((job, packed));
    }
    let packages = source.join("packages");
    let package = pack_package(release, &packages.join(NAME), built, &tarball)?;
    let shadow = pack_shadow(release, &packages.join(SHADOW_PACKAGE), &tarball)?;
    let license = pack_license(release, &tarball)?;
    archive::put(
        &tarball.join("release.MF"),
        manifest(release, &jobs, [&package, &shadow], &license),
        0o644,
    )?;
    let name = format!("bosh-dns-xdp-{}.tgz", release.version);
    archive::tgz(release, &tarball, &release.out.join(name))
}

/// Packs a job, whose `spec` becomes `job.MF`; returns the checksum of the archive.
fn pack_job(release: &Release, jobs: &Path, name: &str, tarball: &Path) -> Result<String> {
    let source = &jobs.join(name);
    let job = release.staging(&format!("bosh-job-{name}"))?;
    // A director reads the job's specification under this name; the CLI renames it in the same way.
    archive::copy(&source.join("spec"), &job.join("job.MF"), 0o644)?;
    archive::copy(&source.join("monit"), &job.join("monit"), 0o644)?;
    copy_all(&source.join("templates"), &job.join("templates"))?;
    pack(release, &job, &tarball.join("jobs"), name)
}

/// Packs the package: the binaries in a folder for each architecture, and the packaging script; returns the checksum
/// of the archive.
fn pack_package(
    release: &Release,
    source: &Path,
    built: &[Built],
    tarball: &Path,
) -> Result<String> {
    let package = release.staging("bosh-package")?;
    archive::copy(&source.join("packaging"), &package.join("packaging"), 0o755)?;
    archive::copy(
        &source.join("process.sh"),
        &package.join("bosh-dns/process.sh"),
        0o644,
    )?;
    // The packaging script of the compilation worker picks its architecture.
    for built in built {
        let folder = package.join("bosh-dns").join(built.architecture.machine());
        archive::copy(&built.server, &folder.join("bosh-dns-xdp"), 0o755)?;
        for (name, program) in built.jobs() {
            archive::copy(program, &folder.join(name), 0o755)?;
        }
    }
    pack(release, &package, &tarball.join("packages"), NAME)
}

/// Packs the errand's package, whose script installs a binary of the other package.
fn pack_shadow(release: &Release, source: &Path, tarball: &Path) -> Result<String> {
    let package = release.staging("bosh-package-shadow")?;
    archive::copy(&source.join("packaging"), &package.join("packaging"), 0o755)?;
    pack(release, &package, &tarball.join("packages"), SHADOW_PACKAGE)
}

/// Packs the licences, as a director shows them; returns the checksum of the archive.
fn pack_license(release: &Release, tarball: &Path) -> Result<String> {
    let license = release.staging("bosh-license")?;
    for (from, to) in [
        ("LICENSE", "LICENSE"),
        ("third-party-notices.txt", "NOTICE"),
    ] {
        archive::copy(&release.out.join(from), &license.join(to), 0o644)?;
    }
    pack(release, &license, tarball, "license")
}

/// Packs `contents` as `folder/NAME.tgz`; returns its SHA-256.
fn pack(release: &Release, contents: &Path, folder: &Path, name: &str) -> Result<String> {
    fs::create_dir_all(folder)?;
    let archive = folder.join(format!("{name}.tgz"));
    archive::tgz(release, contents, &archive)?;
    archive::sha256(&archive)
}

/// Copies the files at or below a folder.
fn copy_all(from: &Path, to: &Path) -> Result<()> {
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let to = to.join(entry.file_name());
        if entry.path().is_dir() {
            copy_all(&entry.path(), &to)?;
        } else {
            archive::copy(&entry.path(), &to, 0o644)?;
        }
    }
    Ok(())
}

fn manifest(
    release: &Release,
    jobs: &[(&str, String)],
    packages: [&str; 2],
    license: &str,
) -> String {
    let Release {
        version, commit, ..
    } = release;
    let changed = commit.ends_with(super::CHANGED);
    let mut listed = String::new();
    for (name, sum) in jobs {
        let package = if *name == SHADOW {
            SHADOW_PACKAGE
        } else {
            NAME
        };
        listed += &format!(
            // The member keeps its old name `sha1`; a prefix tells the director the algorithm.
            // Equal fingerprints let it skip what it has.
            "- name: {name}\n  version: {sum}\n  fingerprint: {sum}\n  sha1: sha256:{sum}\n  packages: [{package}]\n"
        );
    }
    let [package, shadow] = packages;
    format!(
        "---\n\
         name: bosh-dns-xdp\n\
         version: {version}\n\
         commit_hash: {}\n\
         uncommitted_changes: {changed}\n\
         jobs:\n\
         {listed}\
         packages:\n\
         - name: {NAME}\n  version: {package}\n  fingerprint: {package}\n  sha1: sha256:{package}\n  \
         dependencies: []\n\
         - name: {SHADOW_PACKAGE}\n  version: {shadow}\n  fingerprint: {shadow}\n  sha1: sha256:{shadow}\n  \
         dependencies: [{NAME}]\n\
         license:\n  version: {license}\n  fingerprint: {license}\n  sha1: sha256:{license}\n",
        commit.get(..9).unwrap_or(commit)
    )
}
