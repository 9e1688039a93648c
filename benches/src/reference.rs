//! Runs bosh-dns on the same files, started like its BOSH job.

use std::{fs, path::Path, time::Duration};

use anyhow::{Context, Result, bail};
use hickory_proto::rr::RecordType;
use serde_json::{Value, json};
use tempfile::TempDir;
use whole_system_tests::{
    client,
    health::{Authority, write_files},
    process::{Kept, wait_until},
    server,
};

use crate::{
    foundation::Foundation,
    lab::{self, Lab, SERVER_ADDRESS, SERVER_CPU},
};

/// Port of its API on loopback, as its job configures it.
const API_PORT: u16 = 53080;

/// Figures of bosh-dns for runs without its binary: measured earlier, in the same set-ups, on
/// similar machines (two cores, Linux 6.18). Not measured by the current run.
pub mod quoted {
    /// Best rate of one saturated core, in queries per second: 155 group names, kxdpgun.
    pub const SATURATED: f64 = 13_600.0;

    /// Time and place of the measurement of [`SATURATED`].
    pub const SATURATED_ON: &str = "2026-11-22 on an AMD EPYC";

    /// The other figures, as a fact of the report.
    pub const OTHERS: &str = "bosh-dns of August 2026, mixed names, by dnsperf, date not recorded: 19,545 queries/s at \
                              100 instances, 5,963 at 1,000, 670 at 10,000; at 1,000 instances and 2,000 \
                              queries/s 212 µs of CPU for each and a median latency of 232 µs; from a new \
                              records.json to the first new answer 514 ms at 1,000 instances, 620 ms at 10,000";
}

/// bosh-dns running in a lab, stopped when dropped.
#[derive(Debug)]
pub struct Reference {
    process: Kept,
    _folder: TempDir,
}

impl Reference {
    /// Starts the program on the server's CPU and waits for its first answer.
    ///
    /// It requires an API with certificates, which are generated for the run.
    pub fn start(program: &Path, lab: &Lab, foundation: &Foundation) -> Result<Self> {
        let folder = server::folder(&foundation.records, foundation.aliases.as_deref())?;
        let file = folder.path().join("config.json");
        fs::write(&file, serde_json::to_vec_pretty(&config(folder.path())?)?)?;
        let log = folder.path().join("log");
        let output = fs::File::create(&log)?;
        let mut command = lab.server.command(program)?;
        command.arg("--config").arg(&file).stdout(output.try_clone()?).stderr(output);
        let mut process = Kept::spawn(&mut command)?;
        let query = client::query("upcheck.bosh-dns.", RecordType::A, None)?.to_vec()?;
        let answers =
            || client::ask_raw((SERVER_ADDRESS, 53).into(), &query, Duration::from_millis(200)).is_ok();
        let mut ended = None;
        let waited = wait_until("the reference's first answer", Duration::from_secs(20), || {
            ended = process.ended().ok().flatten();
            ended.is_some() || lab.client.run(answers).unwrap_or(false)
        });
        let said = || fs::read_to_string(&log).unwrap_or_default();
        if let Some(status) = ended {
            bail!("{} ended ({status}): {}", program.display(), said().trim());
        }
        waited.with_context(|| format!("{} said: {}", program.display(), said().trim()))?;
        lab::pin(process.pid(), SERVER_CPU)?;
        Ok(Self { process, _folder: folder })
    }

    /// Returns the process id of bosh-dns.
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }
}

/// Returns the configuration that its job would write, with files in `folder`.
fn config(folder: &Path) -> Result<Value> {
    let authority = Authority::new("bench")?;
    let api = write_files(folder, &authority.issue("api.bosh-dns")?, &authority.certificate)?;
    let mut config = server::config(folder, (SERVER_ADDRESS, 53).into());
    let api = json!({
        "port": API_PORT,
        "certificate_file": api.certificate,
        "private_key_file": api.private_key,
        "ca_file": api.ca,
    });
    server::merge(&mut config, &json!({"api": api}));
    Ok(config)
}
