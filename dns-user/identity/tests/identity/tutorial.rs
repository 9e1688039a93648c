//! The commands of the tutorial in docs/identity.md have the documented results.

use std::{
    env, fs,
    path::Path,
    process::{Command, Stdio},
};

use crate::rotator::memory;

#[test]
fn tutorial_commands_succeed() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/identity.md");
    let page = fs::read_to_string(page).unwrap();
    let (_, tutorial) = page.split_once("\n## Tutorial\n").unwrap();
    let (tutorial, _) = tutorial.split_once("\n## ").unwrap();
    let blocks: Vec<&str> = tutorial
        .split("```sh\n")
        .skip(1)
        .map(|after| after.split_once("```").unwrap().0)
        .collect();
    assert_eq!(blocks.len(), 5, "{blocks:?}");
    // The rotator is stopped with the script, even if a command fails.
    let script = format!(
        "trap 'kill $(jobs -p) 2>/dev/null || true' EXIT\n{}",
        blocks.concat()
    );
    let program = Path::new(env!("CARGO_BIN_EXE_bosh-dns-identity"))
        .parent()
        .unwrap();
    let path = format!("{}:{}", program.display(), env::var("PATH").unwrap());
    let folder = memory();
    let output = Command::new("timeout")
        .args(["120", "bash", "-euo", "pipefail", "-c", &script])
        .current_dir(folder.path())
        .env("PATH", path)
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let said = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (stdout, stderr) = (said(&output.stdout), said(&output.stderr));
    assert!(output.status.success(), "{stdout}\n{stderr}");
    let loose = stdout.replace(" = ", "=");
    for expected in [
        "no defect found",
        "web-1/instance.crt: OK",
        "OU=app:c3d4",
        "DNS:web-1, IP Address:10.255.0.7",
        "web-1  ends",
    ] {
        assert!(loose.contains(expected), "{expected}: {stdout}\n{stderr}");
    }
}
