//! The server's binary: built for old systems, with separate debug information.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail, ensure};

use super::{
    Release,
    architecture::{Architecture, Built},
    archive::copy,
    glibc,
};
use crate::{
    IDENTITY, LOAD, PUBLISHER, SERVER, SYNC, arm64, packages,
    process::{capture, cargo_home, root, run},
    toolchain,
};

pub(super) fn build_all(release: &Release, architecture: Architecture) -> Result<Built> {
    Ok(Built {
        architecture,
        server: build(release, architecture)?,
        publisher: build_companion(release, PUBLISHER, architecture)?,
        identity: build_companion(release, IDENTITY, architecture)?,
        load: build_companion(release, LOAD, architecture)?,
        sync: build_companion(release, SYNC, architecture)?,
    })
}

/// Maximum size of the server, stripped.
const MAX_SIZE: u64 = 12_000_000;

/// Builds the binary against the old C library and verifies that it starts with it.
fn build(release: &Release, architecture: Architecture) -> Result<PathBuf> {
    let old = glibc::ensure(architecture)?;
    let flags = glibc::link_arguments(&old, architecture);
    let server = split(
        &cargo(release, SERVER, &flags, architecture)?,
        release,
        architecture,
    )?;
    check_symbols(&server)?;
    check_start(&server, &old, architecture)?;
    let size = fs::metadata(&server)?.len();
    ensure!(
        // Only x86-64 folds equal functions, so arm64 programs are larger.
        architecture != Architecture::Amd64 || size <= MAX_SIZE,
        "{} has {size} bytes; at most {MAX_SIZE} are allowed",
        server.display()
    );
    Ok(server)
}

/// Builds another program (package, binary) against the old C library, without debug information.
fn build_companion(
    release: &Release,
    program: [&str; 2],
    architecture: Architecture,
) -> Result<PathBuf> {
    let old = glibc::ensure(architecture)?;
    let built = cargo(
        release,
        program,
        &glibc::link_arguments(&old, architecture),
        architecture,
    )?;
    let stripped = strip(release, &built, program[0], architecture)?;
    check_symbols(&stripped)?;
    check_start(&stripped, &old, architecture)?;
    Ok(stripped)
}

/// Builds a program statically, for images without a C library. Other builds link dynamically,
/// because the machine's name service (nsswitch.conf) loads modules.
pub(super) fn build_static(
    release: &Release,
    program: [&str; 2],
    architecture: Architecture,
) -> Result<PathBuf> {
    let built = cargo(
        release,
        program,
        &["-Ctarget-feature=+crt-static".to_owned()],
        architecture,
    )?;
    let stripped = strip(
        release,
        &built,
        &format!("static-{}", program[1]),
        architecture,
    )?;
    // A dependency's build script may link a library dynamically in spite of the flag.
    let sections = capture(architecture.binutils("objdump").arg("-p").arg(&stripped))?;
    ensure!(
        !sections.contains("NEEDED"),
        "{} is not static",
        stripped.display()
    );
    Ok(stripped)
}

/// Copies a program without symbols into a separate folder.
fn strip(
    release: &Release,
    built: &Path,
    folder: &str,
    architecture: Architecture,
) -> Result<PathBuf> {
    let name = built.file_name().context("a program has a name")?;
    let stripped = release
        .staging(&format!("{folder}-{}", architecture.name()))?
        .join(name);
    run(architecture
        .binutils("objcopy")
        .arg("--strip-all")
        .args([built, &stripped]))?;
    Ok(stripped)
}

/// Moves debug information and symbols of `built` into `dist/`; returns the stripped binary there.
///
/// Debuggers find the file by build id and name.
pub(super) fn split(
    built: &Path,
    release: &Release,
    architecture: Architecture,
) -> Result<PathBuf> {
    let name = match architecture {
        Architecture::Amd64 => "bosh-dns-xdp",
        Architecture::Arm64 => "bosh-dns-xdp-arm64",
    };
    let server = release.out.join(name);
    let debug = release.out.join(format!("{name}.debug"));
    let keep = ["--only-keep-debug", "--compress-debug-sections"];
    run(architecture
        .binutils("objcopy")
        .args(keep)
        .args([built, &debug]))?;
    copy(built, &server, 0o755)?;
    run(architecture
        .binutils("objcopy")
        .arg("--strip-all")
        // objcopy stores the checksum of this file, so it must exist by now and stay unchanged.
        .arg(format!("--add-gnu-debuglink={name}.debug"))
        .arg(&server)
        // The link holds a name without a folder, which objcopy opens here.
        .current_dir(&release.out))?;
    Ok(server)
}

/// Builds with this machine's paths removed; returns the binary's path.
fn cargo(
    release: &Release,
    [package, program]: [&str; 2],
    flags: &[String],
    architecture: Architecture,
) -> Result<PathBuf> {
    packages::ensure("binutils")?;
    toolchain::ensure()?;
    let here = root();
    let mut all = flags.to_vec();
    // A hash of the contents: debuginfod and core dumps find the debug information by it.
    all.push("-Clink-arg=-Wl,--build-id=sha1".to_owned());
    if architecture == Architecture::Amd64 {
        // Equal functions once: Rust does not promise that their addresses differ. The cross linker cannot.
        all.push("-Clink-arg=-Wl,--icf=all".to_owned());
    }
    all.push(format!(
        // Panic messages contain the paths of sources.
        "--remap-path-prefix={}=/usr/src/bosh-dns-xdp",
        here.display()
    ));
    if let Some(home) = cargo_home() {
        all.push(format!(
            "--remap-path-prefix={}=/usr/src/cargo",
            home.display()
        ));
    }
    let target = architecture.target();
    run(architecture
        .cargo()?
        .args([
            "rustc",
            "--profile",
            "dist",
            "--locked",
            "--package",
            package,
            "--bin",
            program,
        ])
        .args(["--target", target, "--"])
        // Of the program itself, which is a few lines, and of inlining between crates: each function keeps the level
        // of its crate.
        .arg("-Copt-level=z")
        // Paths may contain spaces, which separate flags in RUSTFLAGS.
        .env("CARGO_ENCODED_RUSTFLAGS", all.join("\u{1f}"))
        // Assertions in C code contain the paths of their source files.
        .env(
            "CFLAGS",
            format!("-ffile-prefix-map={}=/usr/src/bosh-dns-xdp", here.display()),
        )
        .env("BOSH_DNS_XDP_COMMIT", &release.commit)
        .env("SOURCE_DATE_EPOCH", release.epoch.to_string())
        .current_dir(here))?;
    Ok(here.join("target").join(target).join("dist").join(program))
}

/// Fails if the binary needs a symbol newer than [`glibc::VERSION`].
fn check_symbols(server: &Path) -> Result<()> {
    let newest = needed_glibc(server)?;
    println!("  needs glibc {}.{}", newest.0, newest.1);
    if newest > glibc::VERSION {
        bail!(
            "{} needs glibc {}.{}; at most {:?} is allowed",
            server.display(),
            newest.0,
            newest.1,
            glibc::VERSION
        );
    }
    Ok(())
}

/// Returns the minimum glibc version of a binary.
pub(super) fn needed_glibc(server: &Path) -> Result<(u32, u32)> {
    let symbols = capture(
        Architecture::of(server)?
            .binutils("objdump")
            .arg("-T")
            .arg(server),
    )?;
    newest_glibc(&symbols).context("no symbol of glibc: is the binary static?")
}

/// Returns the newest glibc version among the dynamic symbols listed by objdump.
fn newest_glibc(symbols: &str) -> Option<(u32, u32)> {
    let versions = symbols.split("GLIBC_").skip(1).filter_map(|rest| {
        let version = rest
            .split(|c: char| !c.is_ascii_digit() && c != '.')
            .next()?;
        let mut parts = version.split('.').map(str::parse);
        Some((parts.next()?.ok()?, parts.next()?.ok()?))
    });
    versions.max()
}

/// Runs the binary in the old root, which has only the old C library.
fn check_start(server: &Path, old: &Path, architecture: Architecture) -> Result<()> {
    let inside = old.join("program");
    // A link would lead out of the new root.
    fs::copy(server, &inside)?;
    let mut start = Command::new("chroot");
    start.arg(old);
    if architecture == Architecture::Arm64 {
        fs::copy(
            Path::new("/usr/bin").join(arm64::EMULATOR),
            old.join("emulator"),
        )?;
        start.arg("/emulator");
    }
    let said = capture(start.args(["/program", "--version"]));
    // Before the result is looked at, so that nothing is left in the folder, which later builds
    // use.
    fs::remove_file(&inside)?;
    println!(
        "  starts beside glibc {}.{}: {}",
        glibc::VERSION.0,
        glibc::VERSION.1,
        said?.trim()
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn newest_symbol_is_found() {
        let symbols =
            "0 DF *UND* 0 (GLIBC_2.2.5) malloc\n0 DF *UND* 0 (GLIBC_2.34) dlsym\n0 (GLIBC_2.9) x\n";
        assert_eq!(newest_glibc(symbols), Some((2, 34)));
        assert_eq!(newest_glibc("nothing"), None);
    }
}
