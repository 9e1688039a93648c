//! The Debian packages, built from `deploy/debian`, `deploy/systemd` and `deploy/identity`.

use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};

use super::{
    Release,
    architecture::{Architecture, Built, run_with_emulator},
    archive, binary, name,
};
use crate::{
    docs,
    process::{capture, root, run},
};

/// Contact in the packages' control files and changelogs.
const MAINTAINER: &str = "bosh-dns-xdp maintainers <bosh-dns-xdp@users.noreply.github.com>";

pub(super) fn write(release: &Release, built: &Built) -> Result<()> {
    write_server(release, built)?;
    write_identity(release, &built.identity)?;
    write_load(release, &built.load)
}

/// Writes the package of server, publisher and record distribution.
fn write_server(release: &Release, built: &Built) -> Result<()> {
    let server = &built.server;
    let package = release.staging("deb")?;
    put_files(&package, server)?;
    for (name, program) in built.companions() {
        archive::copy(program, &package.join("usr/bin").join(name), 0o755)?;
        put_manual(&package, program)?;
        put_completions(&package, program, name)?;
    }
    archive::put(
        &package.join("DEBIAN/conffiles"),
        // dpkg asks before it replaces a file of this list that the operator has changed.
        "/etc/bosh-dns-xdp/config.json\n",
        0o644,
    )?;
    let text = "Recommends: bind9-dnsutils\n\
         Description: DNS server for the VMs of a BOSH-managed fleet\n \
         A drop-in replacement for bosh-dns. A BPF program on the interface answers\n \
         hot names from a map; everything else goes to a full resolver in userspace.\n";
    pack(
        release,
        &package,
        "bosh-dns-xdp",
        server,
        text,
        Some("deploy/debian"),
    )
}

/// Writes the package of `bosh-dns-identity`; `program` is the stripped binary.
fn write_identity(release: &Release, program: &Path) -> Result<()> {
    let package = release.staging("deb-identity")?;
    let source = root().join("deploy/identity");
    archive::copy(program, &package.join("usr/bin/bosh-dns-identity"), 0o755)?;
    put_units(&source, &package)?;
    let documents = package.join("usr/share/doc/bosh-dns-identity");
    for (from, to) in [
        (
            "deploy/identity/prometheus/rules.yml",
            // Beside those of the server's package, in one folder of Prometheus.
            "examples/prometheus-identity-rules.yml",
        ),
        ("deploy/identity/debian/run.env", "examples/run.env"),
        ("deploy/identity/debian/issuer.env", "examples/issuer.env"),
        ("deploy/identity/debian/agent.env", "examples/agent.env"),
        ("docs/identity.md", "identity.md"),
        (
            "docs/reference/identity-metrics.md",
            "reference/identity-metrics.md",
        ),
    ] {
        archive::copy(&root().join(from), &documents.join(to), 0o644)?;
    }
    // Empty: without its .env file a unit does not start, so nothing is issued unasked.
    fs::create_dir_all(package.join("etc/bosh-dns-identity"))?;
    let text = "Description: certificates for instances, renewed automatically\n \
         Issues certificates that identify containers and machines, renews them\n \
         before they expire, and rotates the CA of a fleet's health checks without a\n \
         redeploy.\n";
    pack(
        release,
        &package,
        "bosh-dns-identity",
        program,
        text,
        Some("deploy/identity/debian"),
    )
}

/// Copies the units of systemd below `source`.
fn put_units(source: &Path, package: &Path) -> Result<()> {
    let units = package.join("usr/lib/systemd/system");
    for unit in archive::files(&source.join("systemd"))? {
        archive::copy(&unit, &units.join(&*name(&unit)), 0o644)?;
    }
    Ok(())
}

/// Writes the package of `bosh-dns-xdp-load`; `program` is the stripped binary.
fn write_load(release: &Release, program: &Path) -> Result<()> {
    let package = release.staging("deb-load")?;
    archive::copy(program, &package.join("usr/bin/bosh-dns-xdp-load"), 0o755)?;
    let page = "usr/share/doc/bosh-dns-xdp-load/load-testing.md";
    archive::copy(
        &root().join("docs/load-testing.md"),
        &package.join(page),
        0o644,
    )?;
    let text = "Recommends: iproute2\nSuggests: dnsperf, knot-dnsutils\n\
         Description: load generator for DNS servers\n \
         Sends DNS queries from inside the kernel at a rate or saturating, counts and\n \
         times replies, searches for the highest rate without loss, compares servers,\n \
         and writes query files for dnsperf and kxdpgun.\n";
    pack(release, &package, "bosh-dns-xdp-load", program, text, None)
}

/// Completes a staged package and builds the `.deb`. `text` contains the fields after the dependencies; `scripts`
/// is the folder of the maintainer scripts, if it has any.
fn pack(
    release: &Release,
    package: &Path,
    name: &str,
    program: &Path,
    text: &str,
    scripts: Option<&str>,
) -> Result<()> {
    put_copyright(package, name)?;
    put_notices(package, release, name)?;
    put_manual(package, program)?;
    put_completions(package, program, name)?;
    put_changelog(package, release, name)?;
    let control = package.join("DEBIAN");
    if let Some(folder) = scripts {
        for script in ["preinst", "postinst", "prerm", "postrm"] {
            archive::copy(
                &root().join(folder).join(script),
                &control.join(script),
                0o755,
            )?;
        }
    }
    // After all files, which it lists.
    archive::put(&control.join("md5sums"), md5sums(package)?, 0o644)?;
    archive::put(
        &control.join("control"),
        description(release, package, program, name, text)?,
        0o644,
    )?;
    let architecture = Architecture::of(program)?.name();
    let file = format!("{name}_{}_{architecture}.deb", release.debian_version());
    run(Command::new("dpkg-deb")
        // Without fakeroot the files would belong to the user who builds.
        .args(["--root-owner-group", "--uniform-compression"])
        .args(if release.is_trial {
            ["-Zgzip", "-z1"]
        } else {
            ["-Zxz", "-z6"]
        })
        .arg("--build")
        .arg(package)
        .arg(release.out.join(file))
        .env("SOURCE_DATE_EPOCH", release.epoch.to_string())
        .stdout(std::process::Stdio::null()))
}

/// Stages the installed files below `package`.
fn put_files(package: &Path, server: &Path) -> Result<()> {
    let source = root().join("deploy");
    archive::copy(server, &package.join("usr/bin/bosh-dns-xdp"), 0o755)?;
    // A multi-call binary: it is selected by the name used to start it.
    symlink("bosh-dns-xdp", package.join("usr/bin/bosh-dns-xdp-health"))?;
    put_units(&source, package)?;
    let documents = package.join("usr/share/doc/bosh-dns-xdp");
    let examples = documents.join("examples");
    for (from, to) in [
        ("grafana/bosh-dns-xdp.json", "grafana.json"),
        ("debian/publish.yml", "publish.yml"),
        ("grafana/bosh-dns-publish.json", "grafana-publish.json"),
        ("grafana/bosh-dns-sync.json", "grafana-sync.json"),
        ("debian/sync-agent.env", "sync-agent.env"),
        ("debian/sync-publisher.env", "sync-publisher.env"),
        ("prometheus/prometheus.yml", "prometheus.yml"),
        ("prometheus/rules.yml", "prometheus-rules.yml"),
        (
            "prometheus/publish-rules.yml",
            "prometheus-publish-rules.yml",
        ),
        ("prometheus/sync-rules.yml", "prometheus-sync-rules.yml"),
    ] {
        archive::copy(&source.join(from), &examples.join(to), 0o644)?;
    }
    let settings = package.join("etc/bosh-dns-xdp");
    for (from, to) in [
        ("sysusers.conf", "usr/lib/sysusers.d/bosh-dns-xdp.conf"),
        ("tmpfiles.conf", "usr/lib/tmpfiles.d/bosh-dns-xdp.conf"),
        ("config.json", "etc/bosh-dns-xdp/config.json"),
    ] {
        let from = source.join("debian").join(from);
        archive::copy(&from, &package.join(to), 0o644)?;
    }
    for folder in ["aliases.d", "handlers.d", "addresses.d", "publish.d"] {
        fs::create_dir_all(settings.join(folder))?;
    }
    docs::put_pages(&documents)
}

fn put_copyright(package: &Path, name: &str) -> Result<()> {
    let text = fs::read_to_string(root().join("deploy/debian/copyright"))?;
    let text = text.replace("/doc/bosh-dns-xdp/", &format!("/doc/{name}/"));
    archive::put(
        &package.join("usr/share/doc").join(name).join("copyright"),
        text,
        0o644,
    )
}

/// Adds the manual pages, generated by the binary itself, each to the folder of its section.
fn put_manual(package: &Path, server: &Path) -> Result<()> {
    let manual = package.join("usr/share/man");
    let fresh = manual.join("fresh");
    fs::create_dir_all(&fresh)?;
    // The program's own pages cannot differ from its options.
    run(run_with_emulator(server)?
        .args(["man", "--folder"])
        .arg(&fresh))?;
    for page in archive::files(&fresh)? {
        let section = page
            .extension()
            .and_then(|section| section.to_str())
            .context("a page has a section")?;
        let folder = manual.join(format!("man{section}"));
        fs::create_dir_all(&folder)?;
        archive::gzip(&page, "--best")?;
        let packed = format!("{}.gz", name(&page));
        fs::rename(fresh.join(&packed), folder.join(&packed))?;
    }
    Ok(fs::remove_dir(fresh)?)
}

/// Adds the licences of the linked crates.
fn put_notices(package: &Path, release: &Release, name: &str) -> Result<()> {
    let notices = package
        .join("usr/share/doc")
        .join(name)
        .join("third-party-notices");
    archive::copy(
        &release.out.join("third-party-notices.txt"),
        &notices,
        0o644,
    )?;
    archive::gzip(&notices, "--best")
}

/// Adds the shell completions, generated by the binary itself.
fn put_completions(package: &Path, program: &Path, name: &str) -> Result<()> {
    for (shell, file) in [
        (
            "bash",
            format!("usr/share/bash-completion/completions/{name}"),
        ),
        ("zsh", format!("usr/share/zsh/vendor-completions/_{name}")),
        (
            "fish",
            format!("usr/share/fish/vendor_completions.d/{name}.fish"),
        ),
    ] {
        let text = capture(run_with_emulator(program)?.args(["completions", shell]))?;
        archive::put(&package.join(file), text, 0o644)?;
    }
    Ok(())
}

/// Adds the changelog that Debian requires in every package.
fn put_changelog(package: &Path, release: &Release, name: &str) -> Result<()> {
    let date = capture(
        Command::new("date")
            // RFC 5322's form, which deb-changelog(5) demands, in UTC, so that the builder's zone
            // does not matter.
            .args(["-R", "-u", "-d"])
            .arg(format!("@{}", release.epoch)),
    )?;
    let version = release.debian_version();
    let commit = &release.commit;
    let text = format!(
        "{name} ({version}) unstable; urgency=medium\n\n  * Built from commit {commit}.\n\n \
         -- {MAINTAINER}  {date}"
    );
    let file = package.join("usr/share/doc").join(name).join("changelog");
    archive::put(&file, text, 0o644)?;
    archive::gzip(&file, "--best")
}

/// Returns the checksums of all installed files, for `dpkg --verify`.
fn md5sums(package: &Path) -> Result<String> {
    let mut files = capture(
        Command::new("find")
            .args(["usr", "-type", "f", "-printf", "%p\n"])
            .current_dir(package),
    )?
    .lines()
    .map(PathBuf::from)
    .collect::<Vec<_>>();
    // find(1) lists files in the order of the file system.
    files.sort();
    capture(Command::new("md5sum").args(files).current_dir(package))
}

/// Returns the `control` file; `text` contains the fields after the dependencies.
fn description(
    release: &Release,
    package: &Path,
    program: &Path,
    name: &str,
    text: &str,
) -> Result<String> {
    let size = capture(
        Command::new("du")
            // Not the blocks in use, which depend on the builder's file system.
            .args(["--summarize", "--apparent-size", "--block-size=1024"])
            .arg(package),
    )?;
    let size = size.split_whitespace().next().context("du said nothing")?;
    // Measured, so that the package neither installs where it cannot run nor is refused where it
    // could.
    let (major, minor) = binary::needed_glibc(program)?;
    let architecture = Architecture::of(program)?.name();
    Ok(format!(
        "Package: {name}\n\
         Version: {}\n\
         Architecture: {architecture}\n\
         Maintainer: {MAINTAINER}\n\
         Section: net\n\
         Priority: optional\n\
         Installed-Size: {size}\n\
         Depends: libc6 (>= {major}.{minor}), libgcc-s1\n\
         {text}",
        release.debian_version()
    ))
}
