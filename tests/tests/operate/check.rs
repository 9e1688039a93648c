//! `check` decides as the server does at its start: a table of broken configurations, each given to
//! both.

use std::{fs, path::Path, process::Command};

use anyhow::Result;
use dns_core::config::keys::{KEYS, Key};
use serde_json::{Map, Value, json};
use whole_system_tests::server;

/// Returns a configuration with every feature enabled, so that every key is read.
fn complete(folder: &Path) -> Value {
    let file = |name: &str| folder.join(name).display().to_string();
    let tls = |port: u16| {
        json!({
            "port": port, "certificate_file": file("c"), "private_key_file": file("k"), "ca_file": file("a"),
        })
    };
    let mut health = tls(8853);
    health["enabled"] = json!(true);
    json!({
        "address": "127.0.0.1", "port": 53, "records_file": file("records.json"),
        "alias_files_glob": "", "handlers_files_glob": "", "addresses_files_glob": "",
        "upcheck_domains": ["upcheck.bosh-dns."], "disable_recursors": true,
        "internal_upcheck_domain": {"enabled": true, "dns_query": "a.bosh."},
        "logging": {"tags": [{"name": "main", "log_level": "INFO"}]},
        "api": tls(53080), "health": health, "metrics": {"enabled": true}, "cache": {"enabled": true},
        "control": {"socket": file("control.sock")}, "xdp": {"mode": "off"},
    })
}

/// Sets a key such as `logging.tags[].name` to `value`.
fn set(config: &mut Value, path: &str, value: Value) {
    match path.split_once('.') {
        None => config[path] = value,
        Some((first, rest)) => match first.strip_suffix("[]") {
            Some(list) => set(&mut config[list][0], rest, value),
            None => {
                if config[first].is_null() {
                    config[first] = Value::Object(Map::new());
                }
                set(&mut config[first], rest, value);
            }
        },
    }
}

/// Returns invalid values for a key: of another type, and out of range.
fn wrong_values(key: &Key) -> Vec<Value> {
    let mut values = vec![json!({"wrong": "type"})];
    let form = key.form;
    if form.starts_with("duration") {
        values.extend([json!("5"), json!("-1s")]);
    } else if form.contains("port") && !form.contains("IP") {
        values.extend([json!(0), json!(65_536), json!("53")]);
    } else if form.starts_with("number") || form.starts_with("bytes") {
        values.extend([json!(-1), json!("many")]);
    } else if form.contains(" or ") && !form.starts_with("list") {
        values.push(json!("nonsense"));
    } else if form == "boolean" {
        values.push(json!("true"));
    } else if form.starts_with("list of") {
        values.push(json!([{"wrong": "item"}]));
    } else if form == "path with * ? [a-z]" {
        values.push(json!("/etc/["));
    } else if form == "IP address" {
        values.push(json!("10.0.0"));
    }
    values
}

/// Returns exit code and standard error of a server command with this configuration.
fn outcome(command: &str, config: &Path) -> Result<(Option<i32>, String)> {
    let output = Command::new(server::program()?).args([command, "--config"]).arg(config).output()?;
    Ok((output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned()))
}

#[test]
fn check_agrees_with_startup() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let config = folder.path().join("config.json");
    let mut cases = 0;
    for key in KEYS {
        for value in wrong_values(key) {
            let mut broken = complete(folder.path());
            set(&mut broken, key.path, value.clone());
            fs::write(&config, broken.to_string())?;
            let name = key.path.replace("[]", "[0]");
            let case = format!("{name} = {value}");
            let (code, problem) = outcome("check", &config)?;
            assert_eq!(code, Some(1), "{case}: {problem}");
            // Both must print the same line with file, key and problem.
            let line = problem
                .lines()
                .find(|line| line.contains(&format!("config.json: {name}")))
                .unwrap_or_else(|| panic!("{case}: no line about it: {problem}"))
                .to_owned();
            let (code, problem) = outcome("run", &config)?;
            assert!(code.is_some_and(|code| code != 0), "{case}: start-up accepts it");
            assert!(problem.contains(&line), "{case}: check reports {line:?}, start-up {problem:?}");
            cases += 1;
        }
    }
    assert!(cases >= 100, "{cases} cases");
    Ok(())
}

#[test]
fn check_reports_surroundings() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let config = folder.path().join("config.json");
    let records = folder.path().join("records.json");
    let mut broken = complete(folder.path());
    fs::write(&records, "{\"record_keys\": [")?;
    broken["address"] = json!("203.0.113.77");
    broken["recursor_timout"] = json!("1s");
    broken["control"]["group"] = json!("no-such-group");
    broken["xdp"] = json!({"interfaces": ["eth99", "veth*"]});
    fs::write(&config, broken.to_string())?;
    let output =
        Command::new(server::program()?).args(["check", "--json", "--config"]).arg(&config).output()?;
    assert_eq!(output.status.code(), Some(1));
    let report: Value = serde_json::from_slice(&output.stdout)?;
    let errors = report["errors"].to_string();
    for part in ["records.json", "203.0.113.77", "no-such-group", "eth99"] {
        assert!(errors.contains(part), "{part}: {errors}");
    }
    assert!(!errors.contains("veth*"), "{errors}");
    assert!(report["warnings"].to_string().contains("did you mean recursor_timeout?"), "{report}");
    Ok(())
}

#[test]
fn alias_loop_names_files() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let config = folder.path().join("config.json");
    fs::write(folder.path().join("one.aliases"), r#"{"a.x": ["b.x"]}"#)?;
    fs::write(folder.path().join("two.aliases"), r#"{"b.x": ["a.x"]}"#)?;
    let mut looped = complete(folder.path());
    looped["alias_files_glob"] = json!(folder.path().join("*.aliases"));
    fs::write(&config, looped.to_string())?;
    let (code, problem) = outcome("check", &config)?;
    assert_eq!(code, Some(1));
    assert!(problem.contains("one.aliases") && problem.contains("two.aliases"), "{problem}");
    Ok(())
}
