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
