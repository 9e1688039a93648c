//! `cargo xtask dist`: what is handed out, made the same way every time, below `dist/`.
//!
//! | File | For |
//! |---|---|
//! | `bosh-dns-xdp_VERSION_amd64.deb` | one Debian or Ubuntu machine |
//! | `bosh-dns-identity_VERSION_amd64.deb` | the same, with the program for certificates |
//! | `bosh-dns-xdp-VERSION.tgz` | a BOSH director: the release with the job `bosh-dns` |
//! | `bosh-dns-xdp-VERSION-oci.tar` | containers: `scratch`, the server and bosh-dns-sync, both static |
//! | `bosh-dns-xdp` | the binary alone, for glibc 2.31 and newer |
//! | `bosh-dns-xdp.debug` | its debug information, found by build id |
//! | `bosh-dns-xdp.cdx.json` | CycloneDX bill of materials |
//! | `SHA256SUMS` | sums of all of them |
//!
//! The same commit, toolchain and Debian packages give the same bytes: times are those of the
//! commit (`SOURCE_DATE_EPOCH` if it is set), paths of the machine that builds do not get in,
//! and archives are sorted and owned by root. `--twice` shows it.

mod again;
mod archive;
mod binary;
mod bosh;
mod deb;
mod glibc;
mod notices;
mod oci;
mod sbom;

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};

use crate::process::{capture, root};

/// What `cargo xtask dist` is told.
#[derive(Debug, clap::Args)]
pub(crate) struct Dist {
    /// Pack this binary instead of building one: for tests of the packages. No image then.
    #[arg(long, value_name = "FILE")]
    binary: Option<PathBuf>,
    /// Pack this `bosh-dns-publish` beside `--binary`; without it the package has none
    #[arg(long, value_name = "FILE", requires = "binary")]
    publisher: Option<PathBuf>,
    /// Pack this `bosh-dns-identity` into a package of its own; without it `--binary` makes none
    #[arg(long, value_name = "FILE", requires = "binary")]
    identity: Option<PathBuf>,
    /// Pack this `bosh-dns-sync` beside `--binary`; without it the packages have none
    #[arg(long, value_name = "FILE", requires = "binary")]
    sync: Option<PathBuf>,
    /// Where to put everything; made anew.
    #[arg(long, value_name = "FOLDER")]
    out: Option<PathBuf>,
    /// Build a second time, in a fresh clone, and fail unless all bytes are the same. Takes twice as long.
    #[arg(long, conflicts_with = "binary")]
    twice: bool,
}

/// What all artifacts tell of themselves.
struct Release {
    /// Version of the workspace, date and commit: `0.1.0+20261122.214105.git3f2a9c1d0`. Later ones sort later.
    version: String,
    /// Full commit.
    commit: String,
    /// Seconds since 1970 that every file is dated.
    epoch: u64,
    /// Where finished artifacts go.
    out: PathBuf,
    /// Whether they are only tried: then they are packed in seconds, not tightly.
    is_trial: bool,
}

impl Dist {
    /// Builds and packs everything, and lists it.
    pub(crate) fn run(self) -> Result<()> {
        let Self { binary, publisher, identity, sync, out, twice } = self;
        let out = out.unwrap_or_else(|| root().join("dist"));
        archive::make_anew(&out)?;
        let release = Release::of_this_commit(out.canonicalize()?, binary.is_some())?;
        let (server, publisher, identity, sync) = match &binary {
            Some(given) => (binary::split(given, &release)?, publisher, identity, sync),
            None => (
                binary::build(&release)?,
                Some(binary::build_companion(&release, ["dns-external", "bosh-dns-publish"])?),
                Some(binary::build_companion(&release, ["dns-identity", "bosh-dns-identity"])?),
                Some(binary::build_companion(&release, binary::SYNC)?),
            ),
        };
        sbom::write(&release)?;
        deb::write(&release, &server, publisher.as_deref(), sync.as_deref())?;
        if let Some(identity) = &identity {
            deb::write_identity(&release, identity)?;
        }
        bosh::write(&release, &server, sync.as_deref())?;
        if binary.is_none() {
            let [server, sync] =
                [binary::SERVER, binary::SYNC].map(|program| binary::build_static(&release, program));
            oci::write(&release, &server?, &sync?)?;
        }
        archive::sums(&release.out)?;
        list(&release)?;
        if twice { again::build_and_compare(&release) } else { Ok(()) }
    }
}

impl Release {
    /// Version, commit and date from git.
    fn of_this_commit(out: PathBuf, is_trial: bool) -> Result<Self> {
        let commit = commit()?;
        let epoch = match std::env::var("SOURCE_DATE_EPOCH") {
            Ok(text) => text,
            Err(_) => git(&["log", "-1", "--format=%ct"])?,
        };
        let date =
            capture(Command::new("date").args(["-u", "+%Y%m%d.%H%M%S", "-d"]).arg(format!("@{epoch}")))?;
        let short: String = commit.chars().take(9).collect();
        let changed = if commit.ends_with(CHANGED) { ".changed" } else { "" };
        Ok(Self {
            version: format!("{}+{}.git{short}{changed}", env!("CARGO_PKG_VERSION"), date.trim_end()),
            commit,
            epoch: epoch.parse().context("SOURCE_DATE_EPOCH has to be seconds since 1970")?,
            out,
            is_trial,
        })
    }

    /// A new folder for what goes into an artifact, below `target`.
    fn staging(&self, name: &str) -> Result<PathBuf> {
        // Beside other runs' folders: the tests pack while a person builds.
        let folder = root().join("target/dist").join(format!("{}-{name}", std::process::id()));
        archive::make_anew(&folder)?;
        Ok(folder.canonicalize()?)
    }
}

/// Ends the commit of a tree with changes that are not committed.
const CHANGED: &str = "-changed";

/// The commit that is built; `-changed` follows where files differ from it.
pub(crate) fn commit() -> Result<String> {
    let commit = git(&["rev-parse", "HEAD"])?;
    let changed = !git(&["status", "--porcelain", "--untracked-files=no"])?.is_empty();
    Ok(if changed { commit + CHANGED } else { commit })
}

/// What git says, without the end of the line.
fn git(arguments: &[&str]) -> Result<String> {
    let said = capture(Command::new("git").args(arguments).current_dir(root()))?;
    Ok(said.trim_end().to_owned())
}

/// Prints every artifact with its size and what it holds.
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

/// A path's last part.
fn name(path: &Path) -> std::borrow::Cow<'_, str> {
    path.file_name().unwrap_or_default().to_string_lossy()
}
