//! `cargo xtask dist`: reproducible release artifacts in `dist/`.
//!
//! | File | For |
//! |---|---|
//! | `bosh-dns-xdp_VERSION_amd64.deb` | one Debian or Ubuntu machine |
//! | `bosh-dns-identity_VERSION_amd64.deb` | one Debian or Ubuntu machine, for certificates |
//! | `bosh-dns-xdp-VERSION.tgz` | a BOSH director: the release with the jobs `bosh-dns`, `bosh-dns-sync` and `bosh-dns-publish` |
//! | `bosh-dns-xdp-VERSION-oci.tar` | containers: `scratch`, the server and bosh-dns-sync, both static |
//! | `bosh-dns-xdp` | the bare binary, for glibc 2.31 and newer |
//! | `bosh-dns-xdp.debug` | debug information of the binary, found by build id |
//! | `bosh-dns-xdp.cdx.json` | CycloneDX bill of materials of all programs |
//! | `LICENSE`, `third-party-notices.txt` | licences of the programs; each archive contains them too |
//! | `SHA256SUMS` | checksums of all artifacts |
//!
//! The same commit, toolchain and Debian packages produce the same bytes: times are the commit's
//! (or `SOURCE_DATE_EPOCH`), paths of the build machine are removed, and archives are sorted and
//! owned by root. `--twice` verifies it.

mod again;
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

use crate::{
    packages::make_anew,
    process::{capture, root},
};

/// Programs beside the server: package and binary name.
const COMPANIONS: [[&str; 2]; 3] = [binary::PUBLISHER, binary::IDENTITY, binary::SYNC];

/// Options of `cargo xtask dist`.
#[derive(Debug, clap::Args)]
pub(crate) struct Dist {
    #[command(flatten)]
    programs: Programs,
    /// Build only this program, as a bare binary for glibc 2.31 and newer; may be repeated
    #[arg(long, value_name = "PROGRAM", conflicts_with_all = ["binary", "twice"],
        value_parser = clap::builder::PossibleValuesParser::new(COMPANIONS.map(|[_, program]| program)))]
    only: Vec<String>,
    /// Output folder, deleted first if it exists
    #[arg(long, value_name = "FOLDER")]
    out: Option<PathBuf>,
    /// Build a second time in a fresh clone and fail if any byte differs. Takes twice as long
    #[arg(long, conflicts_with = "binary")]
    twice: bool,
}

/// Programs that were built before, to test the packages.
#[derive(Debug, clap::Args)]
pub(crate) struct Programs {
    /// Pack this binary instead of building one, to test the packages
    #[arg(long, value_name = "FILE")]
    pub(crate) binary: Option<PathBuf>,
    /// Pack this `bosh-dns-publish` with `--binary`; without it the package has none
    #[arg(long, value_name = "FILE", requires = "binary")]
    publisher: Option<PathBuf>,
    /// Pack this `bosh-dns-identity` into a separate package; without it `--binary` builds no such
    /// package
    #[arg(long, value_name = "FILE", requires = "binary")]
    identity: Option<PathBuf>,
    /// Pack this `bosh-dns-sync` with `--binary`; without it the packages have none
    #[arg(long, value_name = "FILE", requires = "binary")]
    sync: Option<PathBuf>,
    /// Pack this statically linked server, and `--sync`, into an image; without it `--binary` builds none
    #[arg(long, value_name = "FILE", requires_all = ["binary", "sync"])]
    image: Option<PathBuf>,
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
        let Self { programs, only, out, twice } = self;
        let out = out.unwrap_or_else(|| root().join("dist"));
        if !only.is_empty() {
            make_anew(&out)?;
            let release = Release::of_this_commit(out.canonicalize()?, false, None)?;
            for program in COMPANIONS.into_iter().filter(|[_, name]| only.iter().any(|wanted| wanted == name))
            {
                let built = binary::build_companion(&release, program)?;
                archive::copy(&built, &release.out.join(program[1]), 0o755)?;
            }
            return list(&release);
        }
        let out = build(programs, out, None)?;
        if twice {
            again::build_and_compare(&Release::of_this_commit(out, false, None)?)?;
        }
        Ok(())
    }
}

/// Builds and packs all artifacts with exactly this version, if one is given; returns their folder.
pub(crate) fn build(programs: Programs, out: PathBuf, version: Option<&str>) -> Result<PathBuf> {
    make_anew(&out)?;
    let release = Release::of_this_commit(out.canonicalize()?, programs.binary.is_some(), version)?;
    let Programs { binary, publisher, identity, sync, image } = programs;
    let (server, publisher, identity, sync) = match &binary {
        Some(given) => (binary::split(given, &release)?, publisher, identity, sync),
        None => (
            binary::build(&release)?,
            Some(binary::build_companion(&release, binary::PUBLISHER)?),
            Some(binary::build_companion(&release, binary::IDENTITY)?),
            Some(binary::build_companion(&release, binary::SYNC)?),
        ),
    };
    crates::write_bill(&release)?;
    let notices = release.out.join("third-party-notices.txt");
    archive::put(&notices, crates::notices()?, 0o644)?;
    archive::copy(&root().join("LICENSE"), &release.out.join("LICENSE"), 0o644)?;
    deb::write(&release, &server, publisher.as_deref(), sync.as_deref())?;
    if let Some(identity) = &identity {
        deb::write_identity(&release, identity)?;
    }
    let companions = [(binary::SYNC[1], sync.as_deref()), (binary::PUBLISHER[1], publisher.as_deref())];
    bosh::write(&release, &server, &companions)?;
    match (&binary, image, &sync) {
        (Some(_), Some(server), Some(sync)) => oci::write(&release, &server, sync)?,
        (Some(_), ..) => {}
        (None, ..) => {
            let [server, sync] =
                [binary::SERVER, binary::SYNC].map(|program| binary::build_static(&release, program));
            oci::write(&release, &server?, &sync?)?;
        }
    }
    archive::sums(&release.out)?;
    list(&release)?;
    Ok(release.out)
}

impl Release {
    /// Determines version, commit and date from git.
    fn of_this_commit(out: PathBuf, is_trial: bool, version: Option<&str>) -> Result<Self> {
        let commit = commit()?;
        let epoch = match std::env::var("SOURCE_DATE_EPOCH") {
            Ok(text) => text,
            Err(_) => git(&["log", "-1", "--format=%ct"])?,
        };
        let date =
            capture(Command::new("date").args(["-u", "+%Y%m%d.%H%M%S", "-d"]).arg(format!("@{epoch}")))?;
        let short: String = commit.chars().take(9).collect();
        let changed = if commit.ends_with(CHANGED) { ".changed" } else { "" };
        let core = env!("CARGO_PKG_VERSION").split('-').next().unwrap_or_default();
        Ok(Self {
            version: version
                .map_or_else(|| format!("{core}-dev.{}.git{short}{changed}", date.trim_end()), str::to_owned),
            commit,
            epoch: epoch.parse().context("SOURCE_DATE_EPOCH must be seconds since 1970")?,
            out,
            is_trial,
        })
    }

    /// Returns the version as Debian compares it: what follows `~` comes before the release.
    fn debian_version(&self) -> String {
        self.version.replacen('-', "~", 1)
    }

    /// Creates a staging folder for an artifact below `target`.
    fn staging(&self, name: &str) -> Result<PathBuf> {
        // Separate for each process, because tests may pack during another build.
        let folder = root().join("target/dist").join(format!("{}-{name}", std::process::id()));
        make_anew(&folder)?;
        Ok(folder.canonicalize()?)
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
    let mut files: Vec<PathBuf> =
        fs::read_dir(&release.out)?.map(|entry| Ok(entry?.path())).collect::<Result<_>>()?;
    files.sort();
    for file in files {
        let size = fs::metadata(&file)?.len() as f64 / f64::from(1 << 20);
        println!("{size:9.2} MiB  {}", name(&file));
    }
    Ok(())
}

fn name(path: &Path) -> std::borrow::Cow<'_, str> {
    path.file_name().unwrap_or_default().to_string_lossy()
}
