//! The metrics, with Prometheus and promtool.

use std::{collections::BTreeSet, fs, path::PathBuf, process::Command, time::Duration};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use whole_system_tests::{
    metrics::Metrics,
    process::{run, wait_until},
    requires,
};

use crate::{
    prometheus::{Prometheus, deploy},
    running::{METRICS_PORT, Running},
};

/// Returns all expressions of the dashboard.
fn dashboard_expressions() -> Result<Vec<String>> {
    let dashboard: Value =
        serde_json::from_slice(&fs::read(deploy().join("grafana/bosh-dns-xdp.json"))?)?;
    let panels = dashboard["panels"]
        .as_array()
        .context("the dashboard has panels")?;
    let targets = panels
        .iter()
        .filter_map(|panel| panel["targets"].as_array())
        .flatten();
    Ok(targets
        .filter_map(|target| target["expr"].as_str())
        .map(str::to_owned)
        .collect())
}

#[test]
fn alert_rules_fire_as_intended() -> Result<()> {
    requires!(prometheus);
    let rules = deploy().join("prometheus");
    let identity = deploy().join("identity/prometheus");
    for (folder, name) in [
        (&rules, "rules"),
        (&rules, "sync-rules"),
        (&identity, "rules"),
    ] {
        run(Command::new("promtool")
            .args(["check", "rules", &format!("{name}.yml")])
            .current_dir(folder))?;
        run(Command::new("promtool")
            .args(["test", "rules", &format!("{name}_test.yml")])
            .current_dir(folder))?;
    }
    run(Command::new("promtool")
        .args(["check", "config", "prometheus.yml"])
        .current_dir(&rules))?;
    jobs_of_rules_are_scraped(&[rules, identity])
}

/// An alert on a job that nothing scrapes never fires.
fn jobs_of_rules_are_scraped(folders: &[PathBuf]) -> Result<()> {
    let config = fs::read_to_string(deploy().join("prometheus/prometheus.yml"))?;
    let mut found = 0;
    for folder in folders {
        for file in fs::read_dir(folder)? {
            let path = file?.path();
            let text = fs::read_to_string(&path)?;
            for after in text.split("{job=\"").skip(1) {
                let job = after.split('"').next().unwrap_or_default();
                ensure!(
                    config.contains(&format!("job_name: {job}\n")),
                    "{}: {job}",
                    path.display()
                );
                found += 1;
            }
        }
    }
    ensure!(found > 5, "{found} jobs");
    Ok(())
}

#[test]
fn versions_count_agents() -> Result<()> {
    requires!(prometheus);
    let dashboard: Value =
        serde_json::from_slice(&fs::read(deploy().join("grafana/bosh-dns-sync.json"))?)?;
    let panels = dashboard["panels"].as_array().into_iter().flatten();
    let panel = panels
        .into_iter()
        .find(|panel| panel["title"] == "Versions on the agents");
    let expression = panel
        .and_then(|panel| panel["targets"][0]["expr"].as_str())
        .context("no such panel")?;
    let series = |agent: u8, version: u8| json!({"series": format!("bosh_dns_sync_agent_version{{agent=\"{agent}\"}}"), "values": version.to_string()});
    let sample = |version: u8, agents: u8| json!({"labels": format!("{{value=\"{version}\"}}"), "value": agents});
    // JSON is valid YAML.
    let test = json!({"tests": [{
        "interval": "1m",
        "input_series": [series(1, 7), series(2, 7), series(3, 7), series(4, 8)],
        "promql_expr_test": [{"expr": expression, "eval_time": "0m", "exp_samples": [sample(7, 3), sample(8, 1)]}],
    }]});
    let folder = tempfile::tempdir()?;
    fs::write(folder.path().join("test.yml"), test.to_string())?;
    run(Command::new("promtool")
        .args(["test", "rules", "test.yml"])
        .current_dir(folder.path()))
}

#[test]
fn dashboard_metrics_exist() -> Result<()> {
    let names = include_str!("../../../dns-user/kit/src/metrics/names.rs");
    let known: BTreeSet<&str> = names.split('"').filter(|text| text.contains('_')).collect();
    let rules = fs::read_to_string(deploy().join("prometheus/rules.yml"))?;
    let expressions = dashboard_expressions()?;
    ensure!(expressions.len() > 30, "the dashboard has lost its panels");
    for text in expressions.iter().chain([&rules]) {
        let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
        for word in words.filter(|word| {
            ["bosh_dns_xdp_", "boshdns_", "coredns_"]
                .iter()
                .any(|p| word.starts_with(p))
        }) {
            let family = ["_bucket", "_sum", "_count"]
                .iter()
                .find_map(|end| word.strip_suffix(end))
                .unwrap_or(word);
            assert!(
                known.contains(word) || known.contains(family),
                "{word} is no metric of ours: {text}"
            );
        }
    }
    Ok(())
}

#[test]
fn prometheus_scrapes_server_metrics() -> Result<()> {
    requires!(namespaces, prometheus);
    let recursion = json!({"disable_recursors": false, "recursors": ["127.0.0.1:1"], "cache": {"enabled": true}});
    let running = Running::start("prom", &recursion)?;
    let folder = running.folder().to_owned();
    let prometheus = Prometheus::start(&running.namespace, &[("bosh-dns-xdp", METRICS_PORT)])?;

    let exposition = running.curl(&[&format!("http://127.0.0.1:{METRICS_PORT}/metrics")])?;
    fs::write(folder.join("metrics.txt"), &exposition)?;
    // promtool also objects to metric names inherited from CoreDNS; only parse errors matter here.
    let checked = Command::new("sh")
        .args(["-c", "promtool check metrics < metrics.txt"])
        .current_dir(&folder)
        .output()?;
    let opinions = String::from_utf8_lossy(&checked.stderr).into_owned();
    assert!(
        !opinions.contains("error while linting") && !opinions.contains("parsing"),
        "{opinions}"
    );
    let ours: Vec<&str> = opinions
        .lines()
        .filter(|line| line.starts_with("bosh_dns_xdp_"))
        .collect();
    assert!(ours.is_empty(), "{ours:?}");

    let query = |expression: &str| prometheus.query(expression);
    let number = |expression: &str| prometheus.number(expression);
    running.ask("q-s0.q-g1.bosh.", 11)?;
    running.ask("nosuch.web.net.dep.bosh.", 2)?;
    wait_until("the counters", Duration::from_secs(120), || {
        number("boshdns_requests_internal_total") == Some(13.0)
    })?;
    let nxdomain = "sum(coredns_dns_responses_total{rcode=\"NXDOMAIN\"})";
    assert_eq!(
        number(nxdomain),
        Some(2.0),
        "{}",
        query("coredns_dns_responses_total")?
    );
    assert_eq!(number("bosh_dns_xdp_records_version"), Some(7.0));
    assert_eq!(number("bosh_dns_xdp_records_instances"), Some(4.0));
    assert_eq!(number("count(coredns_cache_entries)"), Some(2.0));
    let left = "bosh_dns_xdp_certificate_expiry_timestamp_seconds{use=\"api\", part=\"certificate\"} - time()";
    assert!(
        number(left).is_some_and(|seconds| seconds > 0.0),
        "{}",
        query(left)?
    );
    assert_eq!(
        number("bosh_dns_xdp_certificate_load_failures_total{use=\"api\"}"),
        Some(0.0)
    );
    prometheus.stop()
}

#[test]
fn probes_separate_liveness_from_readiness() -> Result<()> {
    requires!(namespaces);
    let running = Running::start("probe", &json!({}))?;
    let status = |path: &str| {
        let url = format!("http://127.0.0.1:{METRICS_PORT}{path}");
        running.curl(&["-o", "/dev/null", "-w", "%{http_code}", &url])
    };
    assert_eq!(
        (status("/healthz")?.as_str(), status("/readyz")?.as_str()),
        ("200", "200")
    );
    fs::write(running.folder().join("records.json"), "{ broken")?;
    wait_until(
        "the broken file to be noticed",
        Duration::from_secs(120),
        || status("/readyz").is_ok_and(|status| status == "503"),
    )?;
    assert_eq!(status("/healthz")?, "200");
    Ok(())
}

#[test]
fn interface_replies_are_counted() -> Result<()> {
    requires!(namespaces, bpf);
    let running = Running::start(
        "fast",
        &json!({"xdp": {"mode": "auto", "interfaces": ["lo"]}}),
    )?;
    let metric = |name: &str| -> Option<f64> {
        let text = running
            .curl(&[&format!("http://127.0.0.1:{METRICS_PORT}/metrics")])
            .ok()?;
        let value = text
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(' '))?;
        value.parse().ok()
    };
    wait_until("the programs", Duration::from_secs(120), || {
        metric("bosh_dns_xdp_fast_path_up") == Some(1.0)
    })?;
    let before = metric("boshdns_requests_internal_total").context("there is a total")?;
    running.ask("q-s0.q-g1.bosh.", 9)?;
    assert_eq!(
        metric("boshdns_requests_internal_total"),
        Some(before + 9.0)
    );
    let fast = metric("bosh_dns_xdp_replies_total{path=\"fast\"}").context("there is a total")?;
    let probes = Metrics::read(&running.namespace)?.probes();
    assert!(
        fast > 0.0 && fast + probes as f64 >= 9.0,
        "{fast} and {probes} probes"
    );
    assert_eq!(
        metric("bosh_dns_xdp_fast_path_interface_replies_total{interface=\"lo\"}"),
        Some(fast)
    );
    let (code, text, _) = running.cli(&["resolve", "q-s0.q-g1.bosh"])?;
    assert!(
        code == 0 && text.contains("answered by: the interface"),
        "{text}"
    );
    let (code, text, problem) = std::thread::scope(|scope| {
        let tap = scope.spawn(|| {
            running.cli(&[
                "tap",
                "--json",
                "--path",
                "fast",
                "--count",
                "2",
                "--seconds",
                "20",
            ])
        });
        while !tap.is_finished() {
            running.ask("q-s0.q-g1.bosh.", 1)?;
            std::thread::sleep(Duration::from_millis(20));
        }
        tap.join().expect("the commands do not panic")
    })?;
    assert_eq!((code, text.lines().count()), (0, 2), "{text}{problem}");
    let line: Value = serde_json::from_str(text.lines().next().context("two lines")?)?;
    assert_eq!(
        (&line["interface"], &line["outcome"]),
        (&json!("lo"), &json!("hit"))
    );
    let status: Value = serde_json::from_str(&running.cli(&["status", "--json"])?.1)?;
    assert_eq!(status["fast_path"]["interfaces"][0]["name"], "lo");
    Ok(())
}
