//! `cargo xtask dist`: reproducible release artifacts in `dist/`.
//!
//! | File | For |
//! |---|---|
//! | `bosh-dns-xdp_VERSION_ARCHITECTURE.deb` | one Debian or Ubuntu machine |
//! | `bosh-dns-identity_VERSION_ARCHITECTURE.deb` | one Debian or Ubuntu machine, for certificates |
//! | `bosh-dns-xdp-load_VERSION_ARCHITECTURE.deb` | machines that send load to DNS servers |
//! | `bosh-dns-xdp-VERSION.tgz` | a BOSH director: the release with the jobs `bosh-dns`, `bosh-dns-sync`, `bosh-dns-publish` and `bosh-dns-identity`, and the errand `shadow` |
//! | `bosh-dns-xdp-VERSION-oci.tar` | containers: `scratch`, the server and bosh-dns-sync, both static; an index |
//! | `bosh-dns-xdp`, `bosh-dns-xdp-arm64` | the bare binary, for glibc 2.31 and newer |
//! | `bosh-dns-xdp.debug`, `bosh-dns-xdp-arm64.debug` | debug information of the binary, found by build id |
//! | `bosh-dns-xdp.cdx.json` | CycloneDX bill of materials of all programs |
//! | `LICENSE`, `third-party-notices.txt` | licences of the programs; each archive contains them too |
//! | `SHA256SUMS` | checksums of all artifacts |
//!
//! ARCHITECTURE is amd64 and, with `--arm64`, arm64. The BOSH release contains the programs of each, and its package
//! picks the compilation worker's. A release always has both.
//!
//! The same commit, toolchain and Debian packages produce the same bytes: times are the commit's
//! (or `SOURCE_DATE_EPOCH`), paths of the build machine are removed, and archives are sorted and
//! owned by root. `--twice` verifies it.

mod again;
mod architecture;
pub(crate) mod archive;
mod binary;
mod bosh;
mod crates;
mod deb;
mod glibc;
mod oci;

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};

use self::architecture::{Architecture, Built};
use crate::{
    packages::recreate_folder,
    process::{capture, root},
};

/// Options of `cargo xtask dist`.
#[derive(Debug, clap::Args)]
pub(crate) struct Dist {
    #[command(flatten)]
    programs: Programs,
    /// Build everything for arm64 as well, with Debian's cross compiler
    #[arg(long, conflicts_with = "built")]
    arm64: bool,
    /// Output folder, deleted first if it exists
    #[arg(long, value_name = "FOLDER")]
    out: Option<PathBuf>,
    /// Build a second time in a fresh clone and fail if any byte differs. Takes twice as long
    #[arg(long, conflicts_with = "built")]
    twice: bool,
}

/// Programs that were built before, to test the packages.
#[derive(Debug, clap::Args)]
pub(crate) struct Programs {
    /// Pack the programs in this folder instead of building them, to test the packages
    #[arg(long, value_name = "FOLDER")]
    pub(crate) built: Option<PathBuf>,
    /// Pack the programs in this folder as arm64 programs (`cargo xtask arm64 build`)
    #[arg(long, value_name = "FOLDER", requires = "built")]
    built_arm64: Option<PathBuf>,
    /// Pack them into an image, too
    #[arg(long, requires = "built")]
    image: bool,
}

/// Properties common to all artifacts.
struct Release {
    /// Version of the release, or of the workspace with date and commit, such as
    /// `1.0.0-dev.20261122.214105.git3f2a9c1d0`: later builds sort later, and before candidates and the
    /// release.
    version: String,
    /// Full hash of the commit.
    commit: String,
    /// Time stamp of all files, in seconds since 1970.
    epoch: u64,
    /// Output folder of finished artifacts.
    out: PathBuf,
    /// Whether the artifacts are only for tests: compressed quickly instead of well.
    is_trial: bool,
}

impl Dist {
    /// Builds and packs all artifacts, and lists them.
    pub(crate) fn run(self) -> Result<()> {
        let Self {
            programs,
            arm64,
            out,
            twice,
        } = self;
        let out = out.unwrap_or_else(|| root().join("dist"));
        let architectures: &[Architecture] = if arm64 { &BOTH } else { &BOTH[..1] };
        let out = build(programs, architectures, out, None)?;
        if twice {
            again::build_and_compare(&Release::of_this_commit(out, false, None)?, architectures)?;
        }
        Ok(())
    }
}

pub(crate) const BOTH: [Architecture; 2] = [Architecture::Amd64, Architecture::Arm64];

/// Builds and packs all artifacts with exactly this version, if one is given; returns their folder. Programs that were
/// built before are packed instead of `architectures`.
pub(crate) fn build(
    programs: Programs,
    architectures: &[Architecture],
    out: PathBuf,
    version: Option<&str>,
) -> Result<PathBuf> {
    recreate_folder(&out)?;
    let is_trial = programs.built.is_some();
    let release = Release::of_this_commit(out.canonicalize()?, is_trial, version)?;
    let mut built = Vec::new();
    let mut images = Vec::new();
    if is_trial {
        for (architecture, folder) in [
            (Architecture::Amd64, programs.built),
            (Architecture::Arm64, programs.built_arm64),
        ] {
            let Some(folder) = folder else { continue };
            built.push(given(&release, &folder, architecture)?);
            if programs.image {
                images.push(oci::ImagePrograms {
                    architecture,
                    server: folder.join(crate::SERVER[1]),
                    sync: folder.join(crate::SYNC[1]),
                });
            }
        }
    } else {
        for architecture in architectures {
            built.push(binary::build_all(&release, *architecture)?);
            images.push(oci::ImagePrograms {
                architecture: *architecture,
                server: binary::build_static(&release, crate::SERVER, *architecture)?,
                sync: binary::build_static(&release, crate::SYNC, *architecture)?,
            });
        }
    }
    // Before the packages, which contain the notices.
    let linked = crates::linked_crates()?;
    crates::write_bill(&release, &linked)?;
    let notices = release.out.join("third-party-notices.txt");
    archive::put(&notices, crates::notices(&linked)?, 0o644)?;
    archive::copy(&root().join("LICENSE"), &release.out.join("LICENSE"), 0o644)?;
    for built in &built {
        deb::write(&release, built)?;
    }
    bosh::write(&release, &built)?;
    if !images.is_empty() {
        oci::write(&release, &images)?;
    }
    // Last, so that it covers every artifact.
    archive::sums(&release.out)?;
    list(&release)?;
    Ok(release.out)
}

/// Returns the programs in a folder.
fn given(release: &Release, folder: &Path, architecture: Architecture) -> Result<Built> {
    let server = folder.join(crate::SERVER[1]);
    Ok(Built {
        architecture,
        server: binary::split(&server, release, architecture)?,
        publisher: folder.join(crate::PUBLISHER[1]),
        identity: folder.join(crate::IDENTITY[1]),
        load: folder.join(crate::LOAD[1]),
        sync: folder.join(crate::SYNC[1]),
    })
}

impl Release {
    /// Determines version, commit and date from git.
    fn of_this_commit(out: PathBuf, is_trial: bool, version: Option<&str>) -> Result<Self> {
        let commit = commit()?;
        let epoch = match std::env::var("SOURCE_DATE_EPOCH") {
            Ok(text) => text,
            // The commit's time, not the build's: a second build has the same bytes
            // (reproducible-builds.org).
            Err(_) => git(&["log", "-1", "--format=%ct"])?,
        };
        let date = capture(
            Command::new("date")
                .args(["-u", "+%Y%m%d.%H%M%S", "-d"])
                .arg(format!("@{epoch}")),
        )?;
        let short: String = commit.chars().take(9).collect();
        let changed = if commit.ends_with(CHANGED) {
            ".changed"
        } else {
            ""
        };
        let core = env!("CARGO_PKG_VERSION")
            .split('-')
            .next()
            .unwrap_or_default();
        Ok(Self {
            version: version.map_or_else(
                || format!("{core}-dev.{}.git{short}{changed}", date.trim_end()),
                str::to_owned,
            ),
            commit,
            epoch: epoch
                .parse()
                .context("SOURCE_DATE_EPOCH must be seconds since 1970")?,
            out,
            is_trial,
        })
    }

    /// Returns the version as Debian compares it: what follows `~` comes before the release.
    fn debian_version(&self) -> String {
        // deb-version(7): a hyphen would begin Debian's own revision, and a tilde sorts before
        // everything.
        self.version.replacen('-', "~", 1)
    }

    /// Creates a staging folder for an artifact below `target`.
    fn staging(&self, name: &str) -> Result<PathBuf> {
        // Separate for each process, because tests may pack during another build.
        let folder = root()
            .join("target/dist")
            .join(format!("{}-{name}", std::process::id()));
        recreate_folder(&folder)?;
        Ok(folder)
    }
}

/// Suffix of the commit if the tree has uncommitted changes.
const CHANGED: &str = "-changed";

/// Returns the commit being built, followed by `-changed` if files differ from it.
pub(crate) fn commit() -> Result<String> {
    let commit = git(&["rev-parse", "HEAD"])?;
    let changed = !git(&["status", "--porcelain", "--untracked-files=no"])?.is_empty();
    Ok(if changed { commit + CHANGED } else { commit })
}

/// Returns the output of git without its final newline.
pub(crate) fn git(arguments: &[&str]) -> Result<String> {
    let said = capture(Command::new("git").args(arguments).current_dir(root()))?;
    Ok(said.trim_end().to_owned())
}

/// Prints every artifact with its size and purpose.
fn list(release: &Release) -> Result<()> {
    println!("\n{} ({})", release.out.display(), release.version);
    for file in archive::files(&release.out)? {
        let size = fs::metadata(&file)?.len() as f64 / f64::from(1 << 20);
        println!("{size:9.2} MiB  {}", name(&file));
    }
    Ok(())
}

fn name(path: &Path) -> std::borrow::Cow<'_, str> {
    path.file_name().unwrap_or_default().to_string_lossy()
}
