//! A Prometheus in a namespace, fed by the programs there.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use anyhow::{Result, ensure};
use serde_json::Value;
use tempfile::TempDir;
use whole_system_tests::{
    namespace::Namespace,
    process::{Kept, capture, wait_until},
};

/// Port of Prometheus in the namespace.
const PORT: u16 = 9090;

/// Returns the folder of dashboards and rules.
pub(crate) fn deploy() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy")
}

pub(crate) struct Prometheus<'a> {
    /// Ended before its folder is removed.
    process: Kept,
    namespace: &'a Namespace,
    _folder: TempDir,
}

impl<'a> Prometheus<'a> {
    /// Starts it with jobs, each a name and a port of 127.0.0.1, and waits until it has scraped all of them.
    /// Alerts of `deploy/prometheus/rules.yml` fire immediately instead of after their time (`for`).
    pub(crate) fn start(namespace: &'a Namespace, jobs: &[(&str, u16)]) -> Result<Self> {
        let folder = TempDir::with_prefix("bdx-prometheus-")?;
        let rules = fs::read_to_string(deploy().join("prometheus/rules.yml"))?;
        let is_delay = |line: &&str| line.trim_start().starts_with("for: ");
        let rules: Vec<&str> = rules.lines().filter(|line| !is_delay(line)).collect();
        fs::write(folder.path().join("rules.yml"), rules.join("\n"))?;
        let mut config =
            "global: {scrape_interval: 1s, evaluation_interval: 1s}\nrule_files: [rules.yml]\n\
                          scrape_configs:\n"
                .to_owned();
        for (job, port) in jobs {
            config.push_str(&format!(
                "- job_name: {job}\n  static_configs: [{{targets: ['127.0.0.1:{port}']}}]\n"
            ));
        }
        fs::write(folder.path().join("prometheus.yml"), config)?;
        let mut command = namespace.command("prometheus")?;
        command
            .args(["--config.file=prometheus.yml", "--storage.tsdb.path=tsdb"])
            .arg(format!("--web.listen-address=127.0.0.1:{PORT}"))
            .current_dir(&folder)
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let started = Self {
            process: Kept::spawn(&mut command)?,
            namespace,
            _folder: folder,
        };
        for (job, _) in jobs {
            wait_until(
                &format!("Prometheus to scrape {job}"),
                Duration::from_secs(120),
                || started.number(&format!("up{{job=\"{job}\"}}")) == Some(1.0),
            )?;
        }
        Ok(started)
    }

    fn get(&self, path: &str, arguments: &[&str]) -> Result<Value> {
        let mut curl = self.namespace.command("curl")?;
        curl.args(["-sS", "--max-time", "10"]).args(arguments);
        Ok(serde_json::from_str(&capture(
            curl.arg(format!("http://127.0.0.1:{PORT}/api/v1/{path}")),
        )?)?)
    }

    /// Evaluates an expression; the response is successful.
    pub(crate) fn query(&self, expression: &str) -> Result<Value> {
        let answer = self.get(
            "query",
            &["--data-urlencode", &format!("query={expression}")],
        )?;
        ensure!(answer["status"] == "success", "{expression}: {answer}");
        Ok(answer)
    }

    /// Returns the values of all series of an expression that are numbers.
    pub(crate) fn values(&self, expression: &str) -> Result<Vec<f64>> {
        let answer = self.query(expression)?;
        let series = answer["data"]["result"].as_array().into_iter().flatten();
        let values = series.filter_map(|series| series["value"][1].as_str()?.parse().ok());
        Ok(values.filter(|value: &f64| value.is_finite()).collect())
    }

    /// Returns the value of the first series of an expression.
    pub(crate) fn number(&self, expression: &str) -> Option<f64> {
        self.values(expression).ok()?.first().copied()
    }

    /// Waits until an alert fires; returns its summary and action.
    pub(crate) fn wait_for_alert(&self, name: &str) -> Result<String> {
        self.wait_for(name, None)
    }

    /// Waits until the alert of a condition fires; returns its summary and action.
    pub(crate) fn wait_for_condition(&self, name: &str, condition: &str) -> Result<String> {
        self.wait_for(name, Some(condition))
    }

    fn wait_for(&self, name: &str, condition: Option<&str>) -> Result<String> {
        let mut text = None;
        let waited = wait_until(
            &format!("the alert {name}"),
            Duration::from_secs(120),
            || {
                let Ok(answer) = self.get("alerts", &[]) else {
                    return false;
                };
                let alerts = answer["data"]["alerts"]
                    .as_array()
                    .cloned()
                    .unwrap_or_default();
                let found = alerts.iter().find(|alert| {
                    let labels = &alert["labels"];
                    labels["alertname"] == name
                        && condition.is_none_or(|condition| labels["condition"] == condition)
                });
                text = found.map(|alert| alert["annotations"].to_string());
                text.is_some()
            },
        );
        waited.map_err(|error| error.context(format!("{:?}", self.get("alerts", &[]))))?;
        Ok(text.unwrap_or_default())
    }

    pub(crate) fn stop(mut self) -> Result<()> {
        self.process.stop(Duration::from_secs(120)).map(drop)
    }
}
