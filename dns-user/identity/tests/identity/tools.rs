//! openssl as an independent implementation.

use std::{
    io::Write,
    path::Path,
    process::{Command, Stdio},
};

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
    if output.status.success() { Ok(text(&output.stdout)) } else { Err(text(&output.stderr)) }
}

pub(crate) fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Adds the running test to the list of tests not run; fails in CI, or without a list.
pub(crate) fn not_run(reason: &str) {
    let test = std::thread::current().name().unwrap_or("a test").to_owned();
    assert!(std::env::var_os("CI").is_none(), "{test}: {reason}");
    let list = std::env::var_os("BOSH_DNS_NOT_RUN").unwrap_or_else(|| {
        panic!("{test} cannot be run: {reason} (`cargo xtask test` lists it and continues)")
    });
    let mut list = std::fs::File::options().create(true).append(true).open(list).unwrap();
    writeln!(list, "{test}: {reason}").unwrap();
}

/// Returns whether promtool lets the alert fire for these metrics, as scraped from a process, if they
/// stay as they are for 40 minutes.
pub(crate) fn fires(scraped: &str, alert: &str) -> bool {
    let rules = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/identity/prometheus/rules.yml");
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs_f64();
    let series: Vec<_> = scraped
        .lines()
        .filter(|line| !line.starts_with('#'))
        .filter_map(|line| {
            let (series, value) = line.rsplit_once(' ')?;
            let value: f64 = value.parse().ok()?;
            // promtool's clock begins at 0.
            let is_time = series.contains("_timestamp_seconds") && value > 0.0;
            let value = if is_time { value - now } else { value };
            Some(serde_json::json!({ "series": series, "values": format!("{value}x60") }))
        })
        .collect();
    let expression = format!(r#"max(ALERTS{{alertname="{alert}",alertstate="firing"}})"#);
    let test = serde_json::json!({
        "rule_files": [rules],
        "evaluation_interval": "1m",
        "tests": [{
            "interval": "1m",
            "input_series": series,
            "promql_expr_test": [
                { "expr": expression, "eval_time": "40m", "exp_samples": [{ "labels": "{}", "value": 1 }] },
            ],
        }],
    });
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), test.to_string()).unwrap();
    let output = Command::new("promtool").args(["test", "rules"]).arg(file.path()).output().unwrap();
    let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    assert!(output.status.success() || said.contains("exp:"), "{said}");
    output.status.success()
}
