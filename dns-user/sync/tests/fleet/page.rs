//! The commands of docs/sync.md, executed.

use std::{env, fs, path::Path, process::Command};

use anyhow::{Context, Result, ensure};
use test_support::free_address;

#[test]
fn documented_fleet_starts() -> Result<()> {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/sync.md");
    let page = fs::read_to_string(page)?;
    let (_, section) = page
        .split_once("\n### A fleet on one machine\n")
        .context("the section")?;
    let section = section
        .split("\n### ")
        .next()
        .context("the section's end")?;
    let blocks: Vec<&str> = section
        .split("```sh\n")
        .skip(1)
        .filter_map(|block| block.split("```").next())
        .collect();
    ensure!(blocks.len() == 4, "{} blocks", blocks.len());
    // The page's ports may be in use.
    let script = [(":4222", free_address()), (":25250", free_address())]
        .into_iter()
        .fold(blocks.concat(), |script, (port, free)| {
            script.replace(port, &format!(":{}", free.port()))
        });
    let folder = tempfile::tempdir()?;
    // nginx switches to an unprivileged user.
    fs::set_permissions(
        folder.path(),
        std::os::unix::fs::PermissionsExt::from_mode(0o755),
    )?;
    let program = Path::new(env!("CARGO_BIN_EXE_bosh-dns-sync"))
        .parent()
        .context("the program's folder")?;
    let path = format!("{}:{}:/usr/sbin", program.display(), env::var("PATH")?);
    let script = format!("trap 'kill $(jobs -p) 2>/dev/null || true; wait' EXIT\n{script}");
    let output = Command::new("timeout")
        .args(["180", "bash", "-euo", "pipefail", "-c", &script])
        .current_dir(folder.path())
        .env("PATH", path)
        .output()?;
    let said =
        String::from_utf8_lossy(&[&output.stdout[..], &output.stderr[..]].concat()).into_owned();
    ensure!(output.status.success(), "{said}");
    ensure!(said.contains("1 of 1 agents have it"), "{said}");
    Ok(())
}
