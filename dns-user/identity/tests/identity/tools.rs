//! openssl as an independent implementation.

use std::{
    collections::BTreeMap,
    fs,
    io::Write,
    path::Path,
    process::{Command, Stdio},
};

use serde_json::{Value, json};
use test_support::requirements::met;

/// Runs openssl on `input`; returns standard output, or standard error if it fails.
pub(crate) fn openssl(arguments: &[&str], input: &[u8]) -> Result<String, String> {
    openssl_at(0, arguments, input)
}

/// Replaces the wall clock of a process, and no other clock.
pub(crate) const FAKETIME: &str = "/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1";

/// Environment of a process whose clock is `seconds` ahead.
pub(crate) fn clock(seconds: i64) -> Vec<(&'static str, String)> {
    if seconds == 0 {
        return Vec::new();
    }
    vec![
        ("LD_PRELOAD", FAKETIME.to_owned()),
        ("FAKETIME", format!("{seconds:+}s")),
        ("FAKETIME_DONT_FAKE_MONOTONIC", "1".to_owned()),
        ("NO_FAKE_STAT", "1".to_owned()),
    ]
}

/// Like [`openssl`], with a clock that is `ahead` seconds ahead.
pub(crate) fn openssl_at(ahead: i64, arguments: &[&str], input: &[u8]) -> Result<String, String> {
    let mut child = Command::new("openssl")
        .args(arguments)
        .envs(clock(ahead))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // A program that does not read its input closes the pipe.
    let _ = child.stdin.take().unwrap().write_all(input);
    let output = child.wait_with_output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    if output.status.success() {
        Ok(text(&output.stdout))
    } else {
        Err(text(&output.stderr))
    }
}

pub(crate) fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Returns whether the wall clock of a process can be replaced.
///
/// # Panics
///
/// Like [`met`].
pub(crate) fn has_faketime() -> bool {
    met("libfaketime", fs::metadata(FAKETIME).map(drop))
}

/// Returns whether promtool lets the alert fire for these metrics, as scraped from a process, if they
/// stay as they are for 40 minutes.
pub(crate) fn fires(scraped: &str, alert: &str) -> bool {
    let now = now();
    let series = samples(scraped).map(|(series, value)| {
        // promtool's clock begins at 0.
        let value = if is_time(series, value) {
            value - now
        } else {
            value
        };
        json!({ "series": series, "values": format!("{value}x60") })
    });
    let expression = format!(r#"max(ALERTS{{alertname="{alert}",alertstate="firing"}})"#);
    promtool(
        series.collect(),
        &expression,
        40,
        json!([{ "labels": "{}", "value": 1 }]),
    )
    .is_ok()
}

/// Metrics of several processes, as Prometheus collects them once a minute.
#[derive(Default)]
pub(crate) struct History {
    series: BTreeMap<String, Vec<String>>,
    length: usize,
}

impl History {
    /// Adds a scrape of each instance; `None` for one that did not answer.
    pub(crate) fn add(&mut self, scraped: &[(&str, Option<String>)]) {
        let now = now();
        for (instance, text) in scraped {
            for (series, value) in samples(text.as_deref().unwrap_or_default()) {
                let minutes = f64::from(u32::try_from(self.length).unwrap());
                let value = if is_time(series, value) {
                    value - now + 60.0 * minutes
                } else {
                    value
                };
                let name = match series.split_once('{') {
                    Some((name, labels)) => format!("{name}{{instance=\"{instance}\",{labels}"),
                    None => format!("{series}{{instance=\"{instance}\"}}"),
                };
                let values = self.series.entry(name).or_default();
                values.resize(self.length, "_".to_owned());
                values.push(value.to_string());
            }
        }
        self.length += 1;
    }

    pub(crate) fn len(&self) -> usize {
        self.length
    }

    /// Returns whether a series had this value in the last `count` scrapes.
    pub(crate) fn held(&self, series: &str, value: i64, count: usize) -> bool {
        let Some(values) = self.series.get(series) else {
            return false;
        };
        let last = values.iter().rev().take(count);
        values.len() == self.length
            && values.len() >= count
            && last.clone().all(|held| *held == value.to_string())
    }

    /// Asserts that these alerts fired, each for an instance.
    pub(crate) fn assert_fired(&self, expected: &[(&str, &str)]) {
        let fired = expected.iter().map(|(alert, instance)| {
            firing(&format!(
                r#"alertname="BoshDnsIdentity{alert}",instance="{instance}","#
            ))
        });
        self.check_fired(&fired.collect::<Vec<_>>().join(" or "), expected);
    }

    /// Asserts that exactly these alerts fired.
    pub(crate) fn assert_nothing_else_fired(&self, expected: &[(&str, &str)]) {
        self.check_fired(&firing(""), expected);
    }

    fn check_fired(&self, expression: &str, expected: &[(&str, &str)]) {
        let series = self
            .series
            .iter()
            .map(|(series, values)| json!({ "series": series, "values": values.join(" ") }));
        let expected = expected.iter().map(|(alert, instance)| {
            json!({ "labels": format!("{{alertname=\"BoshDnsIdentity{alert}\",instance=\"{instance}\"}}"), "value": 1 })
        });
        let checked = promtool(
            series.collect(),
            expression,
            self.length,
            expected.collect(),
        );
        assert!(checked.is_ok(), "{}", checked.unwrap_err());
    }
}

/// Returns the query for alerts with these labels that have fired.
fn firing(labels: &str) -> String {
    format!(
        r#"max by (alertname, instance) (max_over_time(ALERTS{{{labels}alertstate="firing"}}[1d]))"#
    )
}

fn now() -> f64 {
    std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap()
        .as_secs_f64()
}

fn samples(scraped: &str) -> impl Iterator<Item = (&str, f64)> {
    scraped
        .lines()
        .filter(|line| !line.starts_with('#'))
        .filter_map(|line| {
            let (series, value) = line.rsplit_once(' ')?;
            Some((series, value.parse().ok()?))
        })
}

fn is_time(series: &str, value: f64) -> bool {
    series.contains("_timestamp_seconds") && value > 0.0
}

/// Compares the value of an expression with the expected one; the error is promtool's output.
fn promtool(
    series: Vec<Value>,
    expression: &str,
    minutes: usize,
    expected: Value,
) -> Result<(), String> {
    let rules =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/identity/prometheus/rules.yml");
    let test = json!({
        "rule_files": [rules],
        "evaluation_interval": "1m",
        "tests": [{
            "interval": "1m",
            "input_series": series,
            "promql_expr_test": [
                { "expr": expression, "eval_time": format!("{minutes}m"), "exp_samples": expected },
            ],
        }],
    });
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(file.path(), test.to_string()).unwrap();
    let output = Command::new("promtool")
        .args(["test", "rules"])
        .arg(file.path())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    assert!(output.status.success() || said.contains("exp:"), "{said}");
    if output.status.success() {
        Ok(())
    } else {
        Err(said)
    }
}
