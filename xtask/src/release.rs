//! `cargo xtask release VERSION`: a checked, complete and signed set of artifacts.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, bail, ensure};

use crate::{
    Profile, arm64,
    dist::{self, Programs},
    docs, packages,
    process::{capture, root, run as run_command},
    test,
};

/// Namespace of the signature (ssh-keygen(1), `-Y sign`): a signature for another purpose is not valid here.
const NAMESPACE: &str = "bosh-dns-xdp-release";

/// Name of the signer in `allowed_signers`.
const SIGNER: &str = "releases@bosh-dns-xdp";

/// Checks, builds, and signs a release.
///
/// The tree must be clean, Cargo.toml must name this version and CHANGELOG.md describe it. After the full check, the
/// same on arm64 in emulated machines and an hour of soak tests all artifacts of `cargo xtask dist --arm64` are built
/// with exactly this version, and SHA256SUMS is signed.
#[derive(Debug, clap::Args)]
pub(crate) struct ReleaseArguments {
    /// Version, as in Cargo.toml, such as 1.0.0 or 1.0.0-rc.1
    version: String,
    /// SSH key that signs SHA256SUMS (ssh-keygen -Y): a private key, or a public key whose private part
    /// ssh-agent holds
    #[arg(long, value_name = "FILE", required_unless_present = "unsigned")]
    key: Option<PathBuf>,
    /// Leave the release unsigned
    #[arg(long, conflicts_with = "key")]
    unsigned: bool,
    /// Skip the full check and the soak tests, for a commit that has just passed them
    #[arg(long)]
    checked: bool,
    #[command(flatten)]
    programs: Programs,
    /// Output folder, deleted first if it exists
    #[arg(long, value_name = "FOLDER")]
    out: Option<PathBuf>,
}

pub(crate) fn run(arguments: ReleaseArguments) -> Result<()> {
    let ReleaseArguments {
        version,
        key,
        unsigned: _,
        checked,
        programs,
        out,
    } = arguments;
    let root = root();
    // First of all: the checks take hours.
    check_version(&version, env!("CARGO_PKG_VERSION"))?;
    // Tests pack what they are given, from a tree that may be in work.
    let is_trial = programs.built.is_some();
    if !is_trial {
        let changelog = fs::read_to_string(root.join("CHANGELOG.md")).context("CHANGELOG.md")?;
        check_changelog(&version, &changelog)?;
        let changes = dist::git(&["status", "--porcelain"])?;
        ensure!(
            changes.is_empty(),
            "a release is built from a clean tree; commit or remove:\n{changes}"
        );
        if !checked {
            // The cheapest of these checks.
            docs::build()?;
            test::run(&[], Profile::Release)?;
            arm64::Arm64::Test { unit: false }.run()?;
            test::run_soaks()?;
        }
    }
    packages::ensure("openssh-client")?;
    let out = dist::build(
        programs,
        &dist::BOTH,
        out.unwrap_or_else(|| root.join("dist")),
        Some(&version),
    )?;
    if let Some(key) = &key {
        sign(&out, key)?;
    }
    println!("\n{version} is in {}.", out.display());
    if !is_trial {
        println!(
            "Next: git tag --sign v{version}, push the tag, upload these files, and put the text of\n\
             docs/release-notes.md for this version above them."
        );
    }
    Ok(())
}

/// Fails unless Cargo.toml, from which every program takes its version, names this one.
fn check_version(wanted: &str, ours: &str) -> Result<()> {
    ensure!(
        wanted == ours,
        "Cargo.toml: `version` of the workspace is {ours}, not {wanted}: change it there and in CHANGELOG.md, \
         and commit"
    );
    Ok(())
}

/// Fails unless the changelog has a section with content for the version, or for the release that a candidate
/// precedes, and nothing that is unreleased.
fn check_changelog(version: &str, changelog: &str) -> Result<()> {
    let core = version.split('-').next().unwrap_or(version);
    // A candidate is described by the section of the release that it precedes.
    let described = section(changelog, version).or_else(|| section(changelog, core));
    ensure!(
        described.is_some_and(|body| !body.is_empty()),
        "CHANGELOG.md: there is no section `## {core}` with a text; add one"
    );
    if let Some(body) = section(changelog, "Unreleased") {
        let entries = body.lines().filter(|line| line.starts_with("- ")).count();
        ensure!(
            entries == 0,
            "CHANGELOG.md: \"Unreleased\" has {entries} entries: move them to `## {core}`"
        );
    }
    Ok(())
}

/// Returns the text of a section; only the date may follow its title.
fn section<'a>(changelog: &'a str, title: &str) -> Option<&'a str> {
    let (_, after) = changelog.split_once(&format!("\n## {title}"))?;
    let (heading, after) = after.split_once('\n')?;
    let mut rest = heading.trim_start().chars();
    if !rest.all(|letter| letter.is_ascii_digit() || "-– ()".contains(letter)) {
        return None;
    }
    Some(after.split("\n## ").next().unwrap_or_default().trim())
}

/// Signs SHA256SUMS, writes the public key in the form that a verifier needs, and verifies the signature.
fn sign(out: &Path, key: &Path) -> Result<()> {
    let sums = out.join("SHA256SUMS");
    run_command(
        Command::new("ssh-keygen")
            .args(["-Y", "sign", "-q", "-n", NAMESPACE, "-f"])
            .arg(key)
            .arg(&sums)
            .stdin(Stdio::null()),
    )
    .with_context(|| format!("cannot sign with {}", key.display()))?;
    let public = match key.extension() {
        Some(extension) if extension == "pub" => {
            fs::read_to_string(key).with_context(|| key.display().to_string())?
        }
        _ => capture(Command::new("ssh-keygen").arg("-y").arg("-f").arg(key))?,
    };
    let signers = out.join("allowed_signers");
    let line = format!("{SIGNER} namespaces=\"{NAMESPACE}\" {}\n", public.trim());
    fs::write(&signers, line).with_context(|| signers.display().to_string())?;
    // With the file that users get: a wrong namespace or key would otherwise be found by them.
    let verified = Command::new("ssh-keygen")
        .args(["-Y", "verify", "-n", NAMESPACE, "-I", SIGNER, "-f"])
        .arg(&signers)
        .arg("-s")
        .arg(out.join("SHA256SUMS.sig"))
        .stdin(fs::File::open(&sums)?)
        .stdout(Stdio::null())
        .status()?;
    if !verified.success() {
        bail!(
            "the signature of {} cannot be verified with the key that made it",
            sums.display()
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_own_version_is_released() {
        check_version("1.0.0", "1.0.0").unwrap();
        let error = check_version("1.0.0", "0.9.0").unwrap_err().to_string();
        assert!(
            error.contains("Cargo.toml") && error.contains("0.9.0, not 1.0.0"),
            "{error}"
        );
    }

    #[test]
    fn changelog_must_describe_release() {
        let text = |unreleased: &str, body: &str| {
            format!(
                "# Changelog\n\n## Unreleased\n{unreleased}\n## 1.0.0 (2026-11-30)\n{body}\n## 0.9.0\n- old\n"
            )
        };
        for version in ["1.0.0", "1.0.0-rc.1"] {
            check_changelog(version, &text("", "- first")).unwrap();
        }
        let error =
            |version: &str, text: &str| check_changelog(version, text).unwrap_err().to_string();
        assert!(error("1.0.0", &text("", "")).contains("no section `## 1.0.0`"));
        assert!(error("1.0.1", &text("", "- first")).contains("no section `## 1.0.1`"));
        assert!(error("1.0.0", &text("- new\n", "- first")).contains("1 entries"));
    }
}
