//! Renders the job as a director does: a table of manifests with the output of bosh-dns's job
//! (`manifests.json`).

use std::{fs, process::Command};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use whole_system_tests::{process::capture, server};

use crate::{
    job::{self, Defaults, Files, Rendered, Table},
    machine::Machine,
};

/// Renders the valid manifests.
fn rendered() -> Result<(Table, Vec<Files>)> {
    let table = Table::read()?;
    let manifests: Vec<Value> = table.rendered.iter().map(Rendered::manifest).collect();
    let results = job::render(&manifests)?;
    let files =
        table.rendered.iter().zip(results).map(|(row, result)| {
            result.map_err(|problem| anyhow::anyhow!("{}: {problem}", row.about))
        });
    let files = files.collect::<Result<_>>()?;
    Ok((table, files))
}

#[test]
fn rendered_configuration_matches_reference() {
    let (
        Table {
            defaults:
                Defaults {
                    config,
                    health_server,
                },
            rendered,
            ..
        },
        files,
    ) = rendered().unwrap();
    assert!(rendered.len() >= 30);
    for (row, files) in rendered.iter().zip(&files) {
        let json = |path: &str| -> Value { serde_json::from_str(&files[path]).unwrap() };
        let mut expected = config.clone();
        server::merge(&mut expected, &row.config);
        let mut found = json("config/config.json");
        found.as_object_mut().unwrap().remove("control");
        // bosh-dns has no such object; the row's expectations on it are checked below.
        let (ours, own) = (
            found.as_object_mut().unwrap().remove("xdp").unwrap(),
            row.config.get("xdp"),
        );
        expected.as_object_mut().unwrap().remove("xdp");
        assert_eq!(found, expected, "{}: config.json", row.about);
        for (key, value) in own.and_then(Value::as_object).into_iter().flatten() {
            assert_eq!(&ours[key], value, "{}: xdp.{key}", row.about);
        }
        let mut expected = health_server.clone();
        server::merge(
            &mut expected,
            row.health_server
                .as_ref()
                .unwrap_or(&Value::Object(Default::default())),
        );
        assert_eq!(
            json("config/health_server_config.json"),
            expected,
            "{}: health server",
            row.about
        );
        let empty = (Value::Object(Default::default()), Value::Array(Vec::new()));
        assert_eq!(
            &json("dns/aliases.json"),
            row.aliases.as_ref().unwrap_or(&empty.0),
            "{}",
            row.about
        );
        assert_eq!(
            &json("dns/handlers.json"),
            row.handlers.as_ref().unwrap_or(&empty.1),
            "{}",
            row.about
        );
        for (path, part) in &row.contains {
            assert!(
                files[path].contains(part),
                "{}: {path} lacks {part:?}:\n{}",
                row.about,
                files[path]
            );
        }
        for (path, part) in &row.lacks {
            assert!(
                !files[path].contains(part),
                "{}: {path} has {part:?}:\n{}",
                row.about,
                files[path]
            );
        }
    }
}

#[test]
fn invalid_properties_are_named() {
    let table = Table::read().unwrap();
    let manifests: Vec<Value> = table.refused.iter().map(job::Refused::manifest).collect();
    for (row, result) in table.refused.iter().zip(job::render(&manifests).unwrap()) {
        let problem = result.expect_err(&format!("not refused: {}", row.properties));
        for part in &row.refused {
            assert!(
                problem.contains(part),
                "{}: {problem:?} does not name {part:?}",
                row.properties
            );
        }
    }
}

#[test]
fn scripts_pass_shellcheck() {
    let (_, files) = rendered().unwrap();
    let mut scripts = vec![
        job::bosh().join("packages/bosh-dns/packaging"),
        job::bosh().join("packages/bosh-dns/process.sh"),
    ];
    for package in ["../debian", "../identity/debian"] {
        let folder = job::bosh().join(package);
        scripts.extend(["postinst", "prerm", "postrm"].map(|script| folder.join(script)));
    }
    job::assert_shellcheck_passes(&files, scripts);
}

#[test]
fn server_accepts_rendered_configuration() {
    if !whole_system_tests::requirements::namespaces() {
        return;
    }
    let (table, files) = rendered().unwrap();
    let machine = Machine::new().unwrap();
    // A row names it in xdp.interfaces.
    machine
        .run("ip link add eth0 type veth peer name eth0-peer")
        .unwrap();
    // The scripts create it before the server starts.
    machine
        .run("source /var/vcap/packages/bosh-dns/lib/process.sh; add_attach_user")
        .unwrap();
    for (row, files) in table.rendered.iter().zip(&files) {
        let job = machine.vcap().join("jobs/bosh-dns");
        fs::remove_dir_all(&job).ok();
        job::write(files, &job).unwrap();
        // bosh_dns_ctl adds the address before the server starts.
        let config: Value = serde_json::from_str(&files["config/config.json"]).unwrap();
        let address = config["address"].as_str().unwrap();
        machine
            .run(&format!("ip address replace '{address}' dev lo"))
            .unwrap();
        let checked = machine
            .run(
                "cd /var/vcap/jobs/bosh-dns && bosh-dns-xdp check --json --config config/config.json || true",
            )
            .unwrap();
        let checked: Value = serde_json::from_str(&checked).unwrap();
        // The records file named by the table does not exist here; everything else must be valid.
        let errors: Vec<&str> = checked["errors"]
            .as_array()
            .unwrap()
            .iter()
            .filter_map(Value::as_str)
            .filter(|error| !error.starts_with("/data/records.json"))
            .collect();
        assert!(errors.is_empty(), "{}: {errors:?}", row.about);
        let warnings = checked["warnings"].to_string();
        assert!(!warnings.contains("unknown"), "{}: {warnings}", row.about);
    }
}

/// The add-ons of bosh-deployment's `runtime-configs/dns.yml`, without properties.
pub(crate) const RUNTIME_CONFIG: &str = r#"{
    "addons": [
        {"name": "bosh-dns", "jobs": [{"name": "bosh-dns", "release": "bosh-dns", "properties": {}}]},
        {"name": "bosh-dns-windows", "jobs": [{"name": "bosh-dns-windows", "release": "bosh-dns"}]}
    ],
    "releases": [{"name": "bosh-dns", "version": "1.39.0"}]
}"#;

/// Applies an operations file as `bosh` does, as far as our files need it.
pub(crate) fn apply(file: &str, config: &mut Value) -> Result<()> {
    let script = "puts JSON.generate(YAML.load_file(ARGV[0]))";
    let json = capture(
        Command::new("ruby")
            .args(["-EUTF-8", "-ryaml", "-rjson", "-e", script])
            .arg(job::bosh().join("ops").join(file)),
    )?;
    for operation in serde_json::from_str::<Vec<Value>>(&json)? {
        ensure!(operation["type"] == "replace", "{operation}");
        let path = operation["path"].as_str().context("a path")?;
        let mut place = &mut *config;
        for word in path.split('/').skip(1) {
            let Some((key, value)) = word.split_once('=') else {
                place = &mut place[word];
                continue;
            };
            let rows = place.as_array_mut().context("a list")?;
            let name = value.trim_end_matches('?');
            let mut at = rows.iter().position(|row| row[key] == name);
            // A question mark adds what is missing.
            if at.is_none() && value.ends_with('?') {
                rows.push(Value::Null);
                at = Some(rows.len() - 1);
            }
            place = &mut rows[at.with_context(|| path.to_owned())?];
        }
        *place = operation["value"].clone();
    }
    Ok(())
}

#[test]
fn ops_files_change_one_add_on() {
    let released = json!({"name": "bosh-dns-xdp", "version": "((bosh_dns_xdp_version))"});
    let names = |config: &Value| -> Vec<String> {
        let jobs = config["addons"][0]["jobs"].as_array().unwrap();
        jobs.iter()
            .map(|job| format!("{}/{}", job["release"], job["name"]).replace('"', ""))
            .collect()
    };
    let mut config: Value = serde_json::from_str(RUNTIME_CONFIG).unwrap();
    apply("add-shadow.yml", &mut config).unwrap();
    assert_eq!(names(&config), ["bosh-dns/bosh-dns", "bosh-dns-xdp/shadow"]);
    assert_eq!(config["releases"][1], released);
    // Together, and each twice.
    for file in [
        "use-bosh-dns-xdp.yml",
        "add-shadow.yml",
        "use-bosh-dns-xdp.yml",
    ] {
        apply(file, &mut config).unwrap();
        assert_eq!(
            names(&config),
            ["bosh-dns-xdp/bosh-dns", "bosh-dns-xdp/shadow"]
        );
        assert_eq!(config["releases"].as_array().unwrap().len(), 2, "{config}");
        assert_eq!(config["addons"][1]["jobs"][0]["release"], "bosh-dns");
    }
}
