//! `rotate-ca`: the three steps of a CA rotation; each starts after the fleet has completed the
//! previous one.

use std::{
    path::PathBuf,
    time::{Duration, Instant, SystemTime},
};

use anyhow::Context;

use super::{
    state::StateFolder,
    trust::{Direction, Step, Trust},
};
use crate::{
    authority::{CaFiles, Fingerprint},
    certificate::seconds,
};

/// Options of `rotate-ca`.
#[derive(Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("direction").required(true).args(["ca", "back", "resume"]))]
pub struct RotateOptions {
    /// State folder of the issuer, which keeps running
    #[arg(long, value_name = "FOLDER")]
    state: PathBuf,
    /// PEM file of the new CA
    #[arg(long, value_name = "FILE", requires = "ca_key")]
    ca: Option<PathBuf>,
    /// PEM file of the new CA's private key
    #[arg(long, value_name = "FILE", requires = "ca")]
    ca_key: Option<PathBuf>,
    /// Return to the previous CA; also continues an interrupted return
    #[arg(long)]
    back: bool,
    /// Continue an interrupted rotation or return
    #[arg(long)]
    resume: bool,
    /// Seconds to wait after each step, so that services reload their files and late agents report
    #[arg(long, value_name = "SECONDS", default_value_t = 10)]
    settle: u64,
    /// Maximum seconds for a step; after that, stop in a consistent state
    #[arg(long, value_name = "SECONDS")]
    patience: Option<u64>,
}

/// Rotates until only the target is trusted; SIGINT and SIGTERM stop it in a consistent state.
pub async fn rotate_ca(options: RotateOptions) -> anyhow::Result<()> {
    let RotateOptions { state, ca, ca_key, back, resume: _, settle, patience } = options;
    let state = StateFolder::open(state)?;
    let _lock = state.lock_rotation()?.context("another rotate-ca is running; wait for it or stop it")?;
    let trust = state.trust()?.context("no CA is installed; start the issuer with --ca first")?;
    let now = SystemTime::now();
    let direction = match (ca.zip(ca_key), back) {
        (Some((certificate, key)), _) => Direction::To(state.import(&CaFiles { certificate, key }, now)?),
        (None, true) => Direction::Back,
        (None, false) => Direction::Resume,
    };
    let rotation = trust.rotation_to(direction)?;
    let target = rotation.target.clone();
    state.authority(&target, now)?;
    if trust.rotation.as_ref() != Some(&rotation) {
        state.set_trust(&Trust { rotation: Some(rotation), ..trust })?;
    }
    let steps = Steps { state, target, settle: Duration::from_secs(settle), patience };
    tokio::select! {
        done = steps.run() => done,
        () = dns_kit::signals::ended() => anyhow::bail!(
            "interrupted between two steps, which is safe; continue with --resume, or return with --back"
        ),
    }
}

struct Steps {
    state: StateFolder,
    target: Fingerprint,
    settle: Duration,
    patience: Option<u64>,
}

impl Steps {
    async fn run(&self) -> anyhow::Result<()> {
        let mut changed = false;
        loop {
            let trust = self.state.trust()?.context("trust.json is missing; restore it from a backup")?;
            self.converge(&trust).await?;
            if changed {
                tokio::time::sleep(self.settle).await;
                self.converge(&trust).await?;
            }
            // The target is verified again, because days may have passed since its import.
            self.state.authority(&self.target, SystemTime::now())?;
            let Some((step, next)) = trust.next(&self.target) else {
                let trust = trust.completed();
                self.state.set_trust(&trust)?;
                self.state.forget_keys(&trust)?;
                println!("done: only CA {} is trusted", self.target);
                return Ok(());
            };
            self.state.set_trust(&next)?;
            println!("{}", describe(step));
            changed = true;
        }
    }

    /// Waits until every member has adopted the state.
    async fn converge(&self, trust: &Trust) -> anyhow::Result<()> {
        let begun = Instant::now();
        let mut shown = None;
        loop {
            let members = self.state.members()?;
            let now = seconds(SystemTime::now());
            let lagging: Vec<&str> = trust.lagging(&members, now).collect();
            if lagging.is_empty() {
                break;
            }
            if shown != Some(lagging.len()) {
                let (count, all) = (lagging.len(), members.len());
                let first = lagging.iter().take(3).copied().collect::<Vec<_>>().join(", ");
                println!("  waiting for {count} of {all} instances, such as {first}");
                shown = Some(count);
            }
            if self.patience.is_some_and(|patience| begun.elapsed() > Duration::from_secs(patience)) {
                anyhow::bail!(
                    "{} instances have not followed, such as {}; check their agents' logs, then use --resume \
                     or --back",
                    lagging.len(),
                    lagging[0]
                );
            }
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
        if shown.is_some() {
            println!("  the fleet has followed");
        }
        Ok(())
    }
}

fn describe(step: Step) -> &'static str {
    match step {
        Step::Trust => "step 1 of 3: the fleet trusts both CAs",
        Step::Issue => "step 2 of 3: the new CA issues",
        Step::Retire => "step 3 of 3: only one CA remains trusted",
    }
}
