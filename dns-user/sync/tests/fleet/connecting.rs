//! Log lines of connections to NATS that fail: server, cause, consequence, remedy.

use std::{fs, path::Path, process::Command};

use anyhow::{Context as _, Result};

use crate::{
    certificates::Authority,
    lab::{Lab, TIMEOUT},
    process::wait_until,
};

/// Returns the agent `a0` with these certificates and this server.
fn agent(lab: &Lab, server: &str, ca: &Path, pair: &Path) -> Result<Command> {
    let mut command = lab.command(&["agent", "--id", "a0", "--nats", server])?;
    command.args(&lab.blobstore);
    command.arg("--records").arg(lab.records("a0"));
    command.arg("--tls-ca").arg(ca.join("ca.crt"));
    command.arg("--tls-certificate").arg(pair.join("a0.crt"));
    command.arg("--tls-key").arg(pair.join("a0.key"));
    Ok(command)
}

#[test]
fn causes_are_told_apart() -> Result<()> {
    let lab = Lab::new(1)?;
    let stranger = tempfile::tempdir()?;
    let other = Authority::new(stranger.path())?;
    other.issue(stranger.path(), "a0", "a0.agent.bosh-internal")?;
    let unknown = tempfile::tempdir()?;
    lab.authority
        .issue(unknown.path(), "a0", "nobody.agent.bosh-internal")?;
    let ours = lab.path("");
    let nobody = test_support::free_address();
    let (nats, closed) = (lab.nats_url(), format!("tls://{nobody}"));
    for (file, server, ca, pair, cause, remedy) in [
        (
            "closed",
            &closed,
            ours.as_path(),
            ours.as_path(),
            "Connection refused",
            "start nats-server",
        ),
        (
            "refused",
            &nats,
            &ours,
            stranger.path(),
            "received fatal alert",
            "--tls-certificate",
        ),
        (
            "unknown-ca",
            &nats,
            stranger.path(),
            &ours,
            "invalid peer certificate",
            "--tls-ca",
        ),
        (
            "no-user",
            &nats,
            &ours,
            unknown.path(),
            "authorization violation",
            "nats-config",
        ),
    ] {
        let _agent = lab.keep(agent(&lab, server, ca, pair)?, file)?;
        let log = || fs::read_to_string(lab.path(file)).unwrap_or_default();
        let address = server.trim_start_matches("tls://");
        let lines = || {
            let text = log();
            text.lines().any(|line| {
                line.contains(&format!("cannot connect to NATS at {address}: "))
                    && line.contains(cause)
                    && line.contains("the records on this machine stay as they are")
                    && line.contains(remedy)
            })
        };
        wait_until(file, TIMEOUT, lines).with_context(log)?;
    }
    let name = "tls://nats.invalid:4222".to_owned();
    let _agent = lab.keep(agent(&lab, &name, &ours, &ours)?, "no-name")?;
    let log = || fs::read_to_string(lab.path("no-name")).unwrap_or_default();
    wait_until("no name", TIMEOUT, || {
        log().contains("check the names in --nats")
    })
    .with_context(log)?;
    Ok(())
}
