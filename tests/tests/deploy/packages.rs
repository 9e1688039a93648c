//! Packages of the debug programs, shared by the tests of a run.

#![expect(clippy::unwrap_used, reason = "a test that cannot pack has failed")]

use std::{
    env,
    fmt::Write as _,
    fs::{self, File},
    io::ErrorKind,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result};
use whole_system_tests::{process::run, requires, server};

/// The programs beside the server.
const COMPANIONS: [&str; 4] = [
    "bosh-dns-publish",
    "bosh-dns-sync",
    "bosh-dns-identity",
    "bosh-dns-xdp-load",
];

/// Date of the packages that most tests install. The version is derived from it.
pub(crate) const FIRST: u32 = 1_700_000_000;

/// Date of the packages to which tests upgrade.
pub(crate) const NEWER: u32 = FIRST + 60;

/// Runs a command of xtask that packs all programs into `folder`.
pub(crate) fn dist(command: &[&str], epoch: u32, folder: &Path) -> Result<()> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut dist = Command::new("cargo");
    dist.args(["run", "--quiet", "--package", "xtask", "--"])
        .args(command)
        .arg("--out")
        .arg(folder);
    let stripped = tempfile::tempdir()?;
    for (name, program) in programs()? {
        // Packing the debug information of a debug build would take a minute.
        run(Command::new("objcopy")
            .arg("--strip-all")
            .arg(&program)
            .arg(stripped.path().join(name)))?;
    }
    run(dist
        .arg("--built")
        .arg(stripped.path())
        .current_dir(root)
        .env("SOURCE_DATE_EPOCH", epoch.to_string()))
}

/// Returns the server and its companions by their names.
fn programs() -> Result<Vec<(&'static str, PathBuf)>> {
    let mut programs = vec![("bosh-dns-xdp", server::program()?)];
    for name in COMPANIONS {
        programs.push((name, server::companion(name)?));
    }
    Ok(programs)
}

/// Fills `folder` with the packages of all programs; later dates make newer versions.
pub(crate) fn artifacts(epoch: u32, folder: &Path) -> Result<()> {
    once_per_run(&format!("dist-{epoch}"), folder, |out| {
        dist(&["dist"], epoch, out)
    })
}

/// Like [`artifacts`]; returns the path of the Debian package `name`.
pub(crate) fn package(epoch: u32, folder: &Path, name: &str) -> PathBuf {
    artifacts(epoch, folder).unwrap();
    artifact(folder, &format!("{name}_"), ".deb").unwrap()
}

/// Returns the path of the artifact whose name begins and ends like this.
pub(crate) fn artifact(folder: &Path, begin: &str, end: &str) -> Result<PathBuf> {
    let names = fs::read_dir(folder)?.map(|entry| entry.map(|entry| entry.path()));
    let is_it = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with(begin) && name.ends_with(end)
    };
    names
        .collect::<Result<Vec<_>, _>>()?
        .into_iter()
        .find(is_it)
        .context(format!("{begin}*{end}"))
}

/// Fills `folder` with the files that `make` writes into an empty one.
///
/// nextest runs each test in its own process: the first one calls `make`, and the others wait for it and copy its
/// files. Another run, or another build of the programs, calls it again. `slot` names what is made.
pub(crate) fn once_per_run(
    slot: &str,
    folder: &Path,
    make: impl FnOnce(&Path) -> Result<()>,
) -> Result<()> {
    let Ok(run) = env::var("NEXTEST_RUN_ID") else {
        return make(folder);
    };
    let kept = Path::new(env!("CARGO_TARGET_TMPDIR")).join(slot);
    let (files, stamp) = (kept.join("files"), kept.join("made-from"));
    fs::create_dir_all(&kept)?;
    // Until the end of the function.
    let lock = File::create(kept.join("lock"))?;
    lock.lock()?;
    let inputs = run + &identities()?;
    if !fs::read_to_string(&stamp).is_ok_and(|made_from| made_from == inputs) {
        remove(fs::remove_file(&stamp))?;
        remove(fs::remove_dir_all(&files))?;
        fs::create_dir(&files)?;
        make(&files)?;
        // The last step: without it, as after a failure, the files are not used.
        fs::write(&stamp, inputs)?;
    }
    fs::create_dir_all(folder)?;
    for file in fs::read_dir(&files)? {
        let file = file?;
        fs::copy(file.path(), folder.join(file.file_name()))?;
    }
    Ok(())
}

/// Accepts that there was nothing to remove.
fn remove(removed: std::io::Result<()>) -> std::io::Result<()> {
    removed.or_else(|error| {
        if error.kind() == ErrorKind::NotFound {
            Ok(())
        } else {
            Err(error)
        }
    })
}

/// Returns path, size and time of modification of all programs.
fn identities() -> Result<String> {
    let mut text = String::new();
    for (_, program) in programs()? {
        let metadata = fs::metadata(&program)?;
        write!(
            text,
            "\n{} {} {:?}",
            program.display(),
            metadata.len(),
            metadata.modified()?
        )?;
    }
    Ok(text)
}

#[test]
fn package_build_is_reproducible() {
    let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    artifacts(FIRST, folders[0].path()).unwrap();
    dist(&["dist"], FIRST, folders[1].path()).unwrap();
    let files = |folder: &Path| {
        let files = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap());
        let mut files: Vec<_> = files
            .map(|file| (file.file_name(), fs::read(file.path()).unwrap()))
            .collect();
        files.sort();
        files
    };
    let [first, second] = [files(folders[0].path()), files(folders[1].path())];
    assert!(
        first.len() >= 6,
        "package, release, binary, its debug information, bill, sums"
    );
    for ((name, bytes), (other, again)) in first.iter().zip(&second) {
        assert_eq!(name, other);
        assert!(bytes == again, "{} differs", name.display());
    }
    assert_eq!(first.len(), second.len());
}

#[test]
fn packages_pass_lintian() {
    requires!(programs(&["lintian"]));
    let folder = tempfile::tempdir().unwrap();
    let packages = ["bosh-dns-xdp", "bosh-dns-identity", "bosh-dns-xdp-load"];
    artifacts(FIRST, folder.path()).unwrap();
    let packages =
        packages.map(|name| artifact(folder.path(), &format!("{name}_"), ".deb").unwrap());
    let output = Command::new("lintian")
        .args(["--allow-root", "--fail-on", "error,warning"])
        .args(packages)
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stdout)
    );
}
