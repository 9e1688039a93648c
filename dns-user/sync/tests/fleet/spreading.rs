//! From an inventory to the files of agents.

use std::{
    fs,
    os::unix::fs::MetadataExt,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use serde_json::Value;

use crate::{
    lab::{Lab, TIMEOUT},
    process::wait_until,
};

/// A version reaches all agents by blob, the next one by patch, and the files equal the dataset.
#[test]
fn changes_reach_the_fleet() -> Result<()> {
    let lab = Lab::new(3)?;
    let hosts = lab.path("hosts");
    fs::write(&hosts, "192.0.2.1 mine\n")?;
    let hosts_words = [
        "--hosts",
        "block",
        "--hosts-file",
        &hosts.display().to_string(),
    ]
    .map(str::to_owned);
    let hosts_words: Vec<&str> = hosts_words.iter().map(String::as_str).collect();
    let replaced = lab.path("replaced");
    fs::write(&replaced, "192.0.2.1 mine\n")?;
    let replaced_words = [
        "--hosts",
        "replaced",
        "--hosts-file",
        &replaced.display().to_string(),
    ]
    .map(str::to_owned);
    let replaced_words: Vec<&str> = replaced_words.iter().map(String::as_str).collect();
    // Only root can change a file's owner; other users keep it.
    let owner = if nix::unistd::geteuid().is_root() {
        1234
    } else {
        nix::unistd::geteuid().as_raw()
    };
    let owner_words = ["--mode", "604", "--user", &owner.to_string()].map(str::to_owned);
    let owner_words: Vec<&str> = owner_words.iter().map(String::as_str).collect();
    let _agents = [
        lab.agent("a0", &hosts_words)?,
        lab.agent("a1", &replaced_words)?,
        lab.agent("a2", &owner_words)?,
    ];

    let published = lab.publish(&[])?;
    let said = String::from_utf8_lossy(&published.stdout).into_owned();
    ensure!(
        published.status.success(),
        "{said}{}",
        String::from_utf8_lossy(&published.stderr)
    );
    assert_eq!(
        said,
        "3 of 3 agents have this version, 0 failing, 0 silent\n"
    );
    for id in ["a0", "a1", "a2"] {
        assert_eq!(fs::read(lab.records(id))?, lab.dataset(1)?);
        let facts = fs::metadata(lab.records(id))?;
        let (mode, user) = if id == "a2" {
            (0o604, owner)
        } else {
            (0o640, nix::unistd::geteuid().as_raw())
        };
        assert_eq!((facts.mode() & 0o7777, facts.uid()), (mode, user), "{id}");
        assert!(lab.log(id).contains("by=\"blob\""), "{}", lab.log(id));
    }
    assert!(
        fs::read_to_string(&hosts)?
            .contains("192.0.2.1 mine\n# BEGIN bosh-dns-sync\n10.0.0.1 i0.web-server.")
    );

    let text = fs::read_to_string(&replaced)?;
    assert!(
        text.starts_with("127.0.0.1 localhost ")
            && text.ends_with("10.0.0.3 i2.web-server.default.dep.bosh\n"),
        "{text}"
    );
    assert!(!text.contains("mine"), "{text}");

    lab.instance(&["move", "i1", "10.9.9.9"])?;
    ensure!(lab.publish(&[])?.status.success());
    for id in ["a0", "a1", "a2"] {
        let bytes = fs::read(lab.records(id))?;
        assert_eq!(bytes, lab.dataset(2)?);
        assert!(String::from_utf8_lossy(&bytes).contains("10.9.9.9"));
        assert!(lab.log(id).contains("by=\"patch\""), "{}", lab.log(id));
    }
    // Nothing changed: no version is made.
    ensure!(lab.publish(&[])?.status.success());
    assert!(lab.dataset(3).is_err());

    let state = lab.path("state").display().to_string();
    assert!(
        lab.run(&["status", "--state", &state])?
            .contains("version 2, ")
    );
    let names = ["--state", &state, "--deployment", "dep"];
    let address = [
        &["address"],
        &names[..],
        &["--link", "web-http", "--az", "z1", "--status", "healthy"],
    ]
    .concat();
    assert_eq!(lab.run(&address)?, "q-a1n1s3.q-g2.bosh\n");
    let one = [
        &["address"],
        &names[..],
        &["--instance-group", "web_server", "--long", "--uuid", "i0"],
    ]
    .concat();
    assert_eq!(lab.run(&one)?, "i0.web-server.default.dep.bosh\n");
    let san = [
        &["san"],
        &names[..],
        &["--instance-group", "web_server", "--long", "--wildcard"],
    ]
    .concat();
    assert_eq!(lab.run(&san)?, "*.web-server.default.dep.bosh\n");

    // Committed, and not announced yet.
    let path = lab.path("state").join("state.json");
    let mut committed: Value = serde_json::from_slice(&fs::read(&path)?)?;
    committed["versions"][1]["version"] = 3.into();
    fs::write(&path, committed.to_string())?;
    let status = lab.command(&["status", "--state", &state])?.output()?;
    let said = String::from_utf8_lossy(&status.stdout);
    assert!(said.contains("announcing version 3\n"), "{said}");
    assert!(!status.status.success());
    Ok(())
}

/// A stopped agent delays no other agent, and catches up later.
#[test]
fn absent_agents_catch_up() -> Result<()> {
    let lab = Lab::new(3)?;
    let _others = [lab.agent("a0", &[])?, lab.agent("a1", &[])?];
    let _publisher = lab.watch(&[])?;
    lab.wait_for("a0", 1)?;
    for version in 2..5 {
        lab.instance(&["move", "i2", &format!("10.9.9.{version}")])?;
        lab.wait_for("a0", version)?;
        lab.wait_for("a1", version)?;
    }
    let late = lab.agent("a2", &[])?;
    lab.wait_for("a2", 4)?;
    drop(late);
    lab.instance(&["remove", "i1"])?;
    lab.wait_for("a0", 5)?;
    let _again = lab.agent("a2", &[])?;
    lab.wait_for("a2", 5)?;
    assert_eq!(fs::read(lab.records("a2"))?, lab.dataset(5)?);
    assert!(!String::from_utf8_lossy(&lab.dataset(5)?).contains("\"i1\""));
    Ok(())
}

/// `--mute` checks and neither writes nor replies.
#[test]
fn mute_agent_only_listens() -> Result<()> {
    let lab = Lab::new(1)?;
    let _mute = lab.agent("a0", &["--mute"])?;
    let _publisher = lab.watch(&[])?;
    lab.wait_for_log(
        "a0",
        "new version of the records installed version=1 by=\"blob\" mute=true",
    )?;
    lab.wait_for_log("publisher", "new version of the records created")?;
    assert!(!lab.records("a0").exists());
    let state = lab.path("state").display().to_string();
    assert!(
        lab.run(&["status", "--state", &state]).is_err(),
        "a mute agent must not count as synced"
    );
    Ok(())
}

/// A single machine without NATS.
#[test]
fn local_mode_needs_no_nats() -> Result<()> {
    let lab = Lab::new(0)?;
    let nodes = lab.path("nodes");
    fs::write(&nodes, "10.0.0.1 web1\n10.0.0.2 web2.example\n")?;
    let file = lab.path("local.json");
    let words = [&nodes, &lab.path("local-state"), &file].map(|path| path.display().to_string());
    lab.run(&[
        "publish", "--nodes", &words[0], "--state", &words[1], "--local", &words[2],
    ])?;
    let text = fs::read_to_string(&file)?;
    assert!(
        text.contains(r#"["10.0.0.2","web2.node.default.fleet.bosh"]],"version":1,"#),
        "{text}"
    );
    fs::write(&nodes, "ten web1\n")?;
    let refused = lab.run(&[
        "publish", "--nodes", &words[0], "--state", &words[1], "--local", &words[2],
    ]);
    assert!(refused.is_err_and(|error| {
        error
            .to_string()
            .contains("line 1: \"ten\" is not an IP address")
    }));
    assert_eq!(fs::read_to_string(&file)?, text);
    Ok(())
}

/// Blobs in JetStream's object store, with the generated permissions.
#[test]
fn jetstream_serves_blobs() -> Result<()> {
    let mut lab = Lab::new(2)?;
    lab.use_jetstream()?;
    let _agents = [lab.agent("a0", &[])?, lab.agent("a1", &[])?];
    let published = lab.publish(&[])?;
    ensure!(
        published.status.success(),
        "{}{}{}",
        String::from_utf8_lossy(&published.stderr),
        lab.log("a0"),
        lab.nats_log()
    );
    assert_eq!(fs::read(lab.records("a1"))?, lab.dataset(1)?);
    assert!(!lab.nats_log().contains("Violation"), "{}", lab.nats_log());
    Ok(())
}

#[test]
fn patches_respect_bandwidth() -> Result<()> {
    const AGENTS: usize = 4;
    /// Bytes per second. A message has several hundred.
    const BANDWIDTH: &str = "200";
    /// The messages after the first need far longer; without a limit all four arrive within
    /// milliseconds.
    const LEAST: Duration = Duration::from_secs(3);
    let lab = Lab::new(AGENTS)?;
    let ids: Vec<String> = (0..AGENTS).map(|agent| format!("a{agent}")).collect();
    let _agents = ids
        .iter()
        .map(|id| lab.agent(id, &[]))
        .collect::<Result<Vec<_>>>()?;
    ensure!(lab.publish(&[])?.status.success());
    let _publisher = lab.watch(&["--bandwidth", BANDWIDTH])?;
    lab.wait_for_log("publisher", "publishing starts")?;
    // From before the first message: a test that sees it late must not measure less.
    let begun = Instant::now();
    lab.instance(&["move", "i0", "10.9.9.9"])?;
    let has_it = |id: &String| lab.version(id).is_ok_and(|found| found == 2);
    wait_until("all agents", TIMEOUT, || ids.iter().all(has_it))?;
    println!(
        "{AGENTS} patches at {BANDWIDTH} bytes/s: {:?}",
        begun.elapsed()
    );
    ensure!(
        begun.elapsed() > LEAST,
        "all had it within {:?}",
        begun.elapsed()
    );
    for id in &ids {
        lab.wait_for_log(id, "installed version=2 by=\"patch\"")?;
    }
    Ok(())
}
