//! The BOSH job: its table of manifests, and real ERB.

#![expect(
    clippy::unwrap_used,
    reason = "a test that cannot render a job has failed"
)]

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    io::Write,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, ensure};
use serde::Deserialize;
use serde_json::{Value, json};
use whole_system_tests::server::merge;

/// A rendered job: texts by path below the job's folder, including `monit`.
pub(crate) type Files = BTreeMap<String, String>;

#[derive(Deserialize)]
pub(crate) struct Table {
    /// Output of bosh-dns's job for an empty manifest.
    pub(crate) defaults: Defaults,
    /// Manifests that render successfully.
    pub(crate) rendered: Vec<Rendered>,
    /// Manifests that are refused.
    pub(crate) refused: Vec<Refused>,
}

/// Configuration files of bosh-dns.
#[derive(Deserialize)]
pub(crate) struct Defaults {
    pub(crate) config: Value,
    pub(crate) health_server: Value,
}

/// A manifest with its expected output.
#[derive(Deserialize)]
pub(crate) struct Rendered {
    pub(crate) about: String,
    /// Properties, without the API's certificates.
    properties: Value,
    /// Whether the API has certificates.
    #[serde(default = "yes")]
    certificates: bool,
    /// The instance, if relevant.
    #[serde(default)]
    spec: Value,
    /// Differences of config.json from the default.
    pub(crate) config: Value,
    /// Differences of the health server's configuration from the default.
    #[serde(default)]
    pub(crate) health_server: Option<Value>,
    pub(crate) aliases: Option<Value>,
    pub(crate) handlers: Option<Value>,
    /// Required text by file.
    #[serde(default)]
    pub(crate) contains: BTreeMap<String, String>,
    /// Forbidden text by file.
    #[serde(default)]
    pub(crate) lacks: BTreeMap<String, String>,
}

#[derive(Deserialize)]
pub(crate) struct Refused {
    /// Properties, without the API's certificates.
    pub(crate) properties: Value,
    /// Whether the API has certificates.
    #[serde(default = "yes")]
    certificates: bool,
    /// Texts that the error must contain.
    pub(crate) refused: Vec<String>,
}

fn yes() -> bool {
    true
}

impl Table {
    pub(crate) fn read() -> Result<Self> {
        Ok(serde_json::from_str(include_str!("manifests.json"))?)
    }
}

impl Rendered {
    /// Returns the renderer's input.
    pub(crate) fn manifest(&self) -> Value {
        let properties = with_certificates(&self.properties, self.certificates);
        json!({"properties": properties, "spec": self.spec})
    }
}

impl Refused {
    /// Returns the renderer's input.
    pub(crate) fn manifest(&self) -> Value {
        json!({"properties": with_certificates(&self.properties, self.certificates)})
    }
}

/// Returns the properties, with certificates of the API if it has any.
fn with_certificates(properties: &Value, has_certificates: bool) -> Value {
    let mut all = if has_certificates {
        certificates("api", "CERT")
    } else {
        json!({})
    };
    merge(&mut all, properties);
    all
}

/// Returns certificates for both ends of the API or of health checks, all with the same text.
pub(crate) fn certificates(of: &str, pem: &str) -> Value {
    let tls = json!({"tls": {"ca": pem, "certificate": pem, "private_key": pem}});
    json!({of: {"server": tls, "client": tls}})
}

/// Returns the folder of the BOSH release's sources.
pub(crate) fn bosh() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/bosh")
}

/// Renders the job `bosh-dns` for each manifest; returns the error text for refused ones.
pub(crate) fn render(manifests: &[Value]) -> Result<Vec<Result<Files, String>>> {
    render_job("bosh-dns", manifests)
}

/// Renders a job for each manifest; returns the error text for refused ones.
pub(crate) fn render_job(job: &str, manifests: &[Value]) -> Result<Vec<Result<Files, String>>> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/deploy/render.rb");
    let mut ruby = Command::new("ruby")
        // Templates are UTF-8, whatever the locale.
        .arg("-EUTF-8")
        .arg(script)
        .arg(bosh().join("jobs").join(job))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .context("ruby is needed: `cargo xtask test` installs it")?;
    // Ruby reads its whole input before it prints.
    ruby.stdin
        .take()
        .context("no standard input")?
        .write_all(&serde_json::to_vec(manifests)?)?;
    let output = ruby.wait_with_output()?;
    ensure!(output.status.success(), "ruby failed ({})", output.status);
    let results: Vec<BTreeMap<String, Value>> = serde_json::from_slice(&output.stdout)?;
    results
        .into_iter()
        .map(|result| match result.get("files") {
            Some(files) => Ok(Ok(serde_json::from_value(files.clone())?)),
            None => Ok(Err(result
                .get("error")
                .and_then(Value::as_str)
                .unwrap_or_default()
                .to_owned())),
        })
        .collect()
}

/// Renders a job with each of these properties as instance `instance-7`; returns the error text for refused ones.
pub(crate) fn render_properties(job: &str, properties: &[Value]) -> Vec<Result<Files, String>> {
    let mut manifests = Vec::new();
    for one in properties {
        manifests.push(json!({"properties": one, "spec": {"id": "instance-7"}}));
    }
    render_job(job, &manifests).unwrap()
}

/// Checks that the error of each properties names its problem.
pub(crate) fn assert_refused(job: &str, rows: &[(Value, &str)]) {
    let properties: Vec<Value> = rows.iter().map(|(one, _)| one.clone()).collect();
    for ((properties, named), result) in rows.iter().zip(render_properties(job, &properties)) {
        let problem = result.expect_err("not refused");
        assert!(
            problem.contains(named),
            "{properties}: {problem:?} does not name {named:?}"
        );
    }
}

/// Checks the scripts of rendered jobs, and further ones in files.
pub(crate) fn assert_shellcheck_passes<'a>(
    jobs: impl IntoIterator<Item = &'a Files>,
    mut scripts: Vec<PathBuf>,
) {
    let folder = tempfile::tempdir().unwrap();
    // Many manifests render the same scripts.
    let mut texts = BTreeSet::new();
    for files in jobs {
        let of_job = files.iter().filter(|(path, _)| path.starts_with("bin/"));
        texts.extend(of_job.map(|(_, text)| text));
    }
    assert!(!texts.is_empty(), "no script");
    for (number, text) in texts.into_iter().enumerate() {
        let script = folder.path().join(number.to_string());
        fs::write(&script, text).unwrap();
        scripts.push(script);
    }
    // SC2016: manifest values are in single quotes precisely so that the shell does not expand them.
    let checked = Command::new("shellcheck")
        .arg("--exclude=SC2016")
        .args(scripts)
        .output()
        .unwrap();
    assert!(
        checked.status.success(),
        "{}",
        String::from_utf8_lossy(&checked.stdout)
    );
}

/// Writes a rendered job below `folder`, as the agent does.
pub(crate) fn write(files: &Files, folder: &Path) -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    for (path, text) in files {
        let path = folder.join(path);
        let below = path.parent().context("a file without a folder")?;
        fs::create_dir_all(below)?;
        fs::write(&path, text)?;
        let mode = if below.ends_with("bin") { 0o750 } else { 0o640 };
        fs::set_permissions(&path, fs::Permissions::from_mode(mode))?;
    }
    Ok(())
}
