//! `check` decides as the server does at its start: a table of broken configurations, each given to
//! both.

use std::{fs, path::Path, process::Command};

use anyhow::{Result, ensure};
use dns_core::config::keys::{ConfigKey, KEYS};
use serde_json::{Map, Value, json};
use whole_system_tests::{
    namespace::Namespace,
    requires,
    server::{self, Server},
};

use crate::running::RECORDS;

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
fn wrong_values(key: &ConfigKey) -> Vec<Value> {
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
    let output = Command::new(server::program()?)
        .args([command, "--config"])
        .arg(config)
        .output()?;
    Ok((
        output.status.code(),
        String::from_utf8_lossy(&output.stderr).into_owned(),
    ))
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
            assert!(
                code.is_some_and(|code| code != 0),
                "{case}: start-up accepts it"
            );
            assert!(
                problem.contains(&line),
                "{case}: check reports {line:?}, start-up {problem:?}"
            );
            cases += 1;
        }
    }
    assert!(cases >= 100, "{cases} cases");
    Ok(())
}

/// Several invalid files of one kind, which lie beside a valid one.
struct Wrong {
    folder: &'static str,
    /// Names and contents.
    files: &'static [(&'static str, &'static str)],
    /// Parts of the errors, one per line.
    errors: &'static [&'static str],
}

const WRONG: [Wrong; 4] = [
    Wrong {
        folder: "aliases",
        files: &[
            ("good.json", r#"{"good.alias": ["10.0.0.9"]}"#),
            ("half.json", r#"{"half.alias": ["#),
            ("loop-1.json", r#"{"l.alias": ["m.alias"]}"#),
            ("loop-2.json", r#"{"m.alias": ["l.alias"]}"#),
            (
                "names.json",
                r#"{"a..b": ["10.0.0.9"], "fine.alias": ["10.0.0.9"], "": ["10.0.0.9"]}"#,
            ),
        ],
        errors: &[
            "aliases/half.json: line 1, column ",
            "aliases/names.json: alias \"a..b\" is not a domain name",
            "aliases/names.json: alias \"\" is not a domain name",
            "aliases/loop-2.json: the aliases l.alias. -> m.alias. -> l.alias. form a loop",
        ],
    },
    Wrong {
        folder: "handlers",
        files: &[
            (
                "good.json",
                r#"[{"domain": "good.example.", "source": {"type": "deny"}}]"#,
            ),
            (
                "kinds.json",
                r#"[{"domain": "b.example."}, {"domain": "a..b", "source": {"type": "file"}}]"#,
            ),
            ("object.json", "{}"),
        ],
        errors: &[
            "handlers/kinds.json: handlers[0].source.type: is missing",
            "handlers/kinds.json: handlers[1].domain: \"a..b\"",
            "handlers/kinds.json: handlers[1].source.type: \"file\" is unknown",
            "handlers/object.json: is an object; expected a list of handlers",
        ],
    },
    Wrong {
        folder: "addresses",
        files: &[
            ("empty.json", ""),
            (
                "entries.json",
                r#"[{"address": "nowhere"}, {"address": "127.0.0.7", "port": 53}, 7]"#,
            ),
            ("good.json", r#"[{"address": "127.0.0.8", "port": 53}]"#),
        ],
        errors: &[
            "addresses/empty.json: is not JSON",
            "addresses/entries.json: addresses[0].address: \"nowhere\" is not an IP address",
            "addresses/entries.json: addresses[0].port: is missing",
            "addresses/entries.json: addresses[2]: is 7; expected an object",
        ],
    },
    Wrong {
        folder: "consul",
        files: &[
            ("block.hcl", "service {"),
            (
                "good.json",
                r#"{"service": {"name": "web", "address": "10.9.0.1", "port": 80}}"#,
            ),
            (
                "members.json",
                r#"{"services": [{"name": 7}, {"name": "a"}, {"port": 1}], "nodes": [{}]}"#,
            ),
        ],
        errors: &[
            "consul/block.hcl: is not HCL",
            "consul/members.json: services[0].name: is 7",
            "consul/members.json: services[2].name: is missing",
            "consul/members.json: nodes[0].node: is missing",
        ],
    },
];

#[test]
fn every_invalid_file_is_reported() -> Result<()> {
    requires!(namespaces);
    // Every combination of kinds, with alias files required or not.
    for case in 1_u32..32 {
        let is_wrong = |folder: &str| {
            WRONG
                .iter()
                .position(|wrong| wrong.folder == folder)
                .is_some_and(|kind| case & 1 << kind != 0)
        };
        let requires_aliases = case & 16 != 0;
        if requires_aliases && !is_wrong("aliases") {
            continue;
        }
        let folder = server::folder(RECORDS.as_bytes(), None)?;
        fs::create_dir(folder.path().join("consul"))?;
        let mut expected: Vec<&str> = Vec::new();
        for wrong in WRONG.iter().filter(|wrong| is_wrong(wrong.folder)) {
            for (name, text) in wrong.files {
                fs::write(folder.path().join(wrong.folder).join(name), text)?;
            }
            expected.extend(wrong.errors);
        }
        let settings = json!({
            "xdp": {"mode": "off"}, "compat": {"require_alias_files": requires_aliases},
            "consul": {
                "node_name": "here", "advertise_addr": "10.9.0.9",
                "sources": {"files": [folder.path().join("consul/*")]},
            },
        });
        let address = ([127, 0, 0, 1], 53).into();
        let mut whole = server::config(folder.path(), address);
        server::merge(&mut whole, &settings);
        let config = folder.path().join("config.json");
        fs::write(&config, whole.to_string())?;
        let (code, problem) = outcome("check", &config)?;
        ensure!(code == Some(1), "case {case}: {code:?} {problem}");
        let lines: Vec<&str> = problem.lines().collect();
        ensure!(lines.len() == expected.len(), "case {case}: {problem}");
        for error in expected {
            let found = lines.iter().filter(|line| line.contains(error)).count();
            ensure!(
                found == 1,
                "case {case}: {error:?} in {found} lines: {problem}"
            );
        }
        // Start-up reports the same; these kinds end it.
        let fatal: Vec<&str> = [("aliases", requires_aliases), ("handlers", true)]
            .into_iter()
            .filter_map(|(kind, is_fatal)| (is_fatal && is_wrong(kind)).then_some(kind))
            .collect();
        let errors = lines
            .iter()
            .map(|line| line.strip_prefix("bosh-dns-xdp: ").unwrap_or(line));
        let (_server, log) = if fatal.is_empty() {
            let namespace = Namespace::new(&format!("wrong{case}"))?;
            let server = Server::start(Some(&namespace), folder, address, &settings)?;
            errors
                .clone()
                .try_for_each(|error| server.wait_for_log(error))?;
            let log = server.log();
            (Some((server, namespace)), log)
        } else {
            let output = Command::new(server::program()?)
                .args(["run", "--config"])
                .arg(&config)
                .output()?;
            ensure!(output.status.code() == Some(1), "case {case}: {output:?}");
            (
                None,
                String::from_utf8([output.stdout, output.stderr].concat())?,
            )
        };
        for error in errors {
            ensure!(
                log.matches(error).count() == 1,
                "case {case}: {error:?}: {log}"
            );
        }
    }
    Ok(())
}

#[test]
fn every_wrong_setting_is_reported() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let config = folder.path().join("config.json");
    let addresses = folder.path().join("addresses.json");
    let mut broken = complete(folder.path());
    broken["recursor_timeout"] = json!("5");
    broken["xdp"]["lease"] = json!(-1);
    broken["logging"]["tags"] = json!([
        {"name": "main", "log_level": "LOUD"}, {"name": "main", "log_level": "INFO"},
        {"name": "ForwardHandler", "log_level": "QUIET"},
    ]);
    broken["consul"] = json!({"domain": "a..b", "datacenter": "d c"});
    broken["addresses_files_glob"] = json!(addresses);
    fs::write(&addresses, "{")?;
    fs::write(&config, broken.to_string())?;
    let (code, problem) = outcome("check", &config)?;
    ensure!(code == Some(1), "{code:?} {problem}");
    let (code, log) = outcome("run", &config)?;
    ensure!(code == Some(1), "{code:?} {log}");
    for key in [
        "recursor_timeout",
        "xdp.lease",
        "logging.tags[0].log_level",
        "logging.tags[2].log_level",
        "consul.domain",
        "consul.datacenter",
    ] {
        let lines: Vec<&str> = problem
            .lines()
            .filter(|line| line.contains(&format!("config.json: {key}: ")))
            .collect();
        ensure!(lines.len() == 1, "{key}: {problem}");
        let error = lines[0].strip_prefix("bosh-dns-xdp: ").unwrap_or(lines[0]);
        ensure!(
            log.matches(error).count() == 1,
            "{key}: check reports {error:?}, start-up {log}"
        );
    }
    // Also the files named by the settings that remain.
    ensure!(problem.contains("addresses.json: is not JSON"), "{problem}");
    Ok(())
}

#[test]
fn foreign_address_fails_alike() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let config = folder.path().join("config.json");
    fs::write(folder.path().join("records.json"), RECORDS)?;
    let mut foreign = complete(folder.path());
    foreign["address"] = json!("203.0.113.77");
    fs::write(&config, foreign.to_string())?;
    let error = "cannot listen on 203.0.113.77:53 (TCP): Cannot assign requested address (os error 99); no interface \
                 has this address; add it, or change the configuration";
    for command in ["check", "run"] {
        let output = Command::new(server::program()?)
            .args([command, "--config"])
            .arg(&config)
            .output()?;
        let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
        ensure!(
            output.status.code() == Some(1) && said.contains(error),
            "{command}: {}, {said}",
            output.status
        );
    }
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
    broken["xdp"] = json!({"interfaces": ["eth99", "veth*"], "user": "no-such-user"});
    broken["cache"] = json!({"enbled": true});
    broken["metrics"] = json!({"enabled": true, "prot": 53088});
    fs::write(&config, broken.to_string())?;
    let output = Command::new(server::program()?)
        .args(["check", "--json", "--config"])
        .arg(&config)
        .output()?;
    assert_eq!(output.status.code(), Some(1));
    let report: Value = serde_json::from_slice(&output.stdout)?;
    let errors = report["errors"].to_string();
    for part in [
        "records.json",
        "203.0.113.77",
        "no-such-group",
        "no-such-user",
        "eth99",
    ] {
        assert!(errors.contains(part), "{part}: {errors}");
    }
    assert!(!errors.contains("veth*"), "{errors}");
    for key in ["recursor_timeout", "cache.enabled", "metrics.port"] {
        let hint = format!("did you mean {key}?");
        assert!(
            report["warnings"].to_string().contains(&hint),
            "{key}: {report}"
        );
    }
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
    assert!(
        problem.contains("one.aliases") && problem.contains("two.aliases"),
        "{problem}"
    );
    Ok(())
}

#[test]
fn taken_port_is_found() -> Result<()> {
    requires!(namespaces);
    let namespace = Namespace::new("taken")?;
    let folder = server::folder(RECORDS.as_bytes(), None)?;
    let config = folder.path().join("config.json");
    let address: std::net::SocketAddr = ([127, 0, 0, 1], 53).into();
    let mut settings = server::config(folder.path(), address);
    settings["xdp"] = json!({"mode": "off"});
    settings["control"]["socket"] = json!(folder.path().join("control.sock"));
    fs::write(&config, settings.to_string())?;
    let check = || -> Result<(Option<i32>, String)> {
        let mut command = namespace.command(server::program()?)?;
        let output = command.args(["check", "--config"]).arg(&config).output()?;
        let text = [output.stdout, output.stderr].concat();
        Ok((
            output.status.code(),
            String::from_utf8_lossy(&text).into_owned(),
        ))
    };
    let (code, text) = check()?;
    ensure!(code == Some(0), "{text}");
    let other = namespace.run(|| std::net::UdpSocket::bind(address))??;
    let (code, text) = check()?;
    ensure!(
        code == Some(1) && text.contains("another process listens there"),
        "{text}"
    );
    drop(other);
    // The running server gives the address up to its successor.
    let running = Server::start(Some(&namespace), folder, address, &settings)?;
    let (code, text) = check()?;
    ensure!(code == Some(0), "{text}{}", running.log());
    Ok(())
}

#[test]
fn invalid_configuration_is_not_ok() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let config = folder.path().join("config.json");
    let mut settings = complete(folder.path());
    settings["recursor_timeout"] = json!("5");
    fs::write(&config, settings.to_string())?;
    let output = Command::new(server::program()?)
        .args(["check", "--config"])
        .arg(&config)
        .output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    ensure!(
        text.contains("config: not usable: ") && !text.contains("config: ok"),
        "{text}"
    );
    Ok(())
}
