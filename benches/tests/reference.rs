//! bosh-dns is started like its BOSH job. Its program is not part of this project: the tests use a
//! double that makes the same checks and then runs this server.

use std::{fs, os::unix::fs::PermissionsExt as _, path::Path};

use anyhow::Result;
use bosh_dns_xdp_benches::{foundation::Foundation, lab::Lab, servers::start_reference};
use tempfile::TempDir;
use whole_system_tests::{requires, server};

/// Checks of bosh-dns before it listens: an API with a port and three existing PEM files, and every
/// folder named in its configuration.
const DOUBLE: &str = r#"#!/usr/bin/env python3
import json, os, sys
config = json.load(open(sys.argv[sys.argv.index("--config") + 1]))
api = config.get("api") or sys.exit("api: is missing")
isinstance(api.get("port"), int) or sys.exit("api.port: is missing")
for key in ["certificate_file", "private_key_file", "ca_file"]:
    path = api.get(key) or sys.exit(f"api.{key}: is missing")
    "-----BEGIN " in open(path).read() or sys.exit(f"{path}: no PEM")
for key in ["alias_files_glob", "handlers_files_glob", "addresses_files_glob"]:
    os.path.isdir(os.path.dirname(config[key])) or sys.exit(f"{key}: no such folder")
os.path.isdir(config["jobs_dir"]) or sys.exit("jobs_dir: no such folder")
os.path.isfile(config["records_file"]) or sys.exit("records_file: no such file")
os.execv("PROGRAM", ["PROGRAM"] + sys.argv[1:])
"#;

#[test]
fn bosh_dns_start_checks_pass() -> Result<()> {
    requires!(namespaces);
    let folder = TempDir::new()?;
    let double = write(
        folder.path(),
        &DOUBLE.replace("PROGRAM", &server::program()?.display().to_string()),
    )?;
    let lab = Lab::plain()?;
    start_reference(&double, &lab, &Foundation::generate(10)?)?;
    Ok(())
}

#[test]
fn early_exit_reports_output() -> Result<()> {
    requires!(namespaces);
    let folder = TempDir::new()?;
    let double = write(
        folder.path(),
        "#!/bin/sh\necho it does not like this >&2\nexit 3\n",
    )?;
    let lab = Lab::plain()?;
    let error = start_reference(&double, &lab, &Foundation::generate(10)?)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("it does not like this") && error.contains('3'),
        "{error}"
    );
    Ok(())
}

fn write(folder: &Path, text: &str) -> Result<std::path::PathBuf> {
    let path = folder.join("bosh-dns");
    fs::write(&path, text)?;
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?;
    Ok(path)
}
