//! The errand `shadow`: rendered as a director does, and run beside a server as an agent runs it.

#![expect(
    clippy::unwrap_used,
    reason = "a test that cannot use its machine has failed"
)]

use std::{
    collections::BTreeMap,
    fs,
    path::Path,
    process::{Command, Output, Stdio},
    time::Duration,
};

use nix::sys::signal::Signal;
use serde_json::{Value, json};
use whole_system_tests::{
    process::{Kept, run, status_line, wait_until},
    requires, server,
};

use crate::{job, machine::Machine};

const RUN: &str = "/var/vcap/jobs/shadow/bin/run";

/// Report as a page, and its folder, which the agent makes for vcap.
const LOGS: &str = "/var/vcap/sys/log/shadow";

/// Time limit that is reached only on failure.
const TIMEOUT: Duration = Duration::from_secs(120);

/// CAP_NET_RAW.
const CAPABILITIES: &str = "0000000000002000";

fn render(properties: &[Value]) -> Vec<Result<String, String>> {
    let manifests: Vec<Value> = properties
        .iter()
        .map(|one| json!({"properties": one}))
        .collect();
    let rendered = job::render_job("shadow", &manifests).unwrap();
    rendered
        .into_iter()
        .map(|result| Ok(result?["bin/run"].clone()))
        .collect()
}

#[test]
fn errand_properties_become_arguments() {
    let config = "'--config' '/var/vcap/jobs/bosh-dns/config/config.json'";
    let table = [
        (json!({}), "'--for' '10m' '--health' 'none' '--cpu' '5')\n"),
        (
            json!({"duration": "24h", "health": "ask", "cpu": 50, "clients": true}),
            "'--for' '24h' '--health' 'ask' '--cpu' '50' '--clients')\n",
        ),
        (
            json!({"ask": "169.254.0.2", "rate": 50, "hash_names": true, "json": true}),
            "'--ask' '169.254.0.2' '--rate' '50' '--hash-names' '--json')\n",
        ),
        (json!({"ask": "[fd00::2]:5353"}), "'--ask' '[fd00::2]:5353'"),
        (json!({"ask": "10.0.0.2:5353"}), "'--ask' '10.0.0.2:5353'"),
        (json!({"html": true}), "ARGUMENTS+=(--html \"${PAGE}\")"),
    ];
    let properties: Vec<Value> = table
        .iter()
        .map(|(properties, _)| properties.clone())
        .collect();
    let folder = tempfile::tempdir().unwrap();
    let mut scripts = vec![job::bosh().join("packages/bosh-dns-shadow/packaging")];
    for ((properties, part), script) in table.iter().zip(render(&properties)) {
        let script = script.unwrap();
        assert!(
            script.contains(config) && script.contains(part),
            "{properties}: {script}"
        );
        let file = folder.path().join(scripts.len().to_string());
        fs::write(&file, script).unwrap();
        scripts.push(file);
    }
    run(Command::new("shellcheck").args(scripts)).unwrap();
    let plain = render(&[json!({"html": false, "config": "/data/it's/config.json"})]);
    let plain = plain[0].as_ref().unwrap();
    assert!(
        !plain.contains("--html") && plain.contains("'/data/it'\\''s/config.json'"),
        "{plain}"
    );
}

#[test]
fn invalid_properties_of_errand_are_named() {
    let refused = BTreeMap::from([
        ("config", json!("config.json")),
        ("duration", json!("10 minutes")),
        ("ask", json!("dns.example.org")),
        ("rate", json!(0)),
        ("health", json!("guess")),
        ("cpu", json!(101)),
        ("clients", json!("yes")),
        ("hash_names", json!(1)),
        ("json", json!("true")),
        ("html", json!("/tmp/page.html")),
    ]);
    let mut properties = Vec::new();
    for (name, value) in &refused {
        // The rate counts with ask only.
        let mut one = json!({"ask": "169.254.0.2"});
        one[*name] = value.clone();
        properties.push(one);
    }
    for ((name, value), result) in refused.iter().zip(render(&properties)) {
        let problem = result.expect_err(name);
        assert!(
            problem.starts_with(&format!("{name}: is {value}; expected ")),
            "{problem}"
        );
    }
}

/// Returns a machine whose server answers, with the errand's package compiled as on a worker.
pub(crate) fn machine() -> Machine {
    let machine = Machine::new().unwrap();
    let compile = machine.vcap().join("data/compile-shadow");
    let packaging = job::bosh().join("packages/bosh-dns-shadow/packaging");
    fs::copy(packaging, &compile).unwrap();
    machine
        .run("BOSH_INSTALL_TARGET=/var/vcap/packages/bosh-dns-shadow bash /var/vcap/data/compile-shadow")
        .unwrap();
    let mut properties = job::certificates("api", "no certificate");
    let extra = json!({"override_nameserver": false, "xdp": {"enabled": false}});
    server::merge(&mut properties, &extra);
    machine.deploy(properties).unwrap();
    machine
        .run("/var/vcap/jobs/bosh-dns/bin/pre-start && /var/vcap/jobs/bosh-dns/bin/wait")
        .unwrap();
    machine
}

/// Returns a command as an agent runs an errand: as root, with these variables only.
pub(crate) fn command(machine: &Machine) -> Command {
    let mut command = machine.command("env");
    command
        .args(["-i", "PATH=/usr/sbin:/usr/bin:/sbin:/bin", RUN])
        .stdin(Stdio::null());
    command
}

pub(crate) fn said(output: &Output) -> String {
    String::from_utf8_lossy(&[&output.stdout[..], &output.stderr[..]].concat()).into_owned()
}

/// Returns what is left of a packet socket in the machine.
fn packet_sockets(machine: &Machine) -> usize {
    let table = machine.run("cat /proc/net/packet").unwrap();
    table.lines().skip(1).count()
}

#[test]
fn errand_asks_and_prints_report() {
    requires!(namespaces);
    let machine = machine();
    let server = machine
        .run("cat /var/vcap/sys/run/bosh-dns/bosh-dns.pid")
        .unwrap();
    // A link that vcap has planted in the folder of logs.
    machine
        .run(&format!(
            "echo precious >/var/vcap/precious; mkdir {LOGS}; ln -s /var/vcap/precious {LOGS}/shadow.html; \
             chown -R vcap:vcap {LOGS}"
        ))
        .unwrap();
    let ask = json!({"ask": "169.254.0.2", "rate": 2000, "duration": "2m"});
    machine.deploy_job("shadow", ask).unwrap();
    let output = command(&machine).output().unwrap();
    let text = said(&output);
    assert!(output.status.success(), "{text}");
    assert!(
        text.contains("no unexplained difference") && text.contains("(bosh-dns"),
        "{text}"
    );
    let long = text.lines().find(|line| line.chars().count() > 80);
    assert_eq!(long, None, "wider than 80 columns");
    assert_eq!(machine.run("cat /var/vcap/precious").unwrap(), "precious\n");
    let page = machine.run(&format!("cat {LOGS}/shadow.html")).unwrap();
    assert!(page.contains("No unexplained difference"), "{page}");

    // Records of another time: the director's user sees the exit code, and a report that may be shared.
    let other = machine.vcap().join("data/other/config");
    fs::create_dir_all(&other).unwrap();
    let config = machine.vcap().join("jobs/bosh-dns/config/config.json");
    let mut config: Value = serde_json::from_str(&fs::read_to_string(config).unwrap()).unwrap();
    config["records_file"] = json!("/var/vcap/data/other/records.json");
    fs::write(other.join("config.json"), config.to_string()).unwrap();
    let records = server::records_of_groups(&[2, 3]);
    fs::write(machine.vcap().join("data/other/records.json"), records).unwrap();
    let different = json!({
        "ask": "169.254.0.2:53", "rate": 2000, "json": true, "hash_names": true, "html": false,
        "config": "/var/vcap/data/other/config/config.json",
    });
    machine.deploy_job("shadow", different).unwrap();
    let output = command(&machine).output().unwrap();
    assert_eq!(output.status.code(), Some(3), "{}", said(&output));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(
        report["verdicts"]["unexplained"].as_u64() > Some(0),
        "{report}"
    );
    assert!(!report.to_string().contains("q-g1.bosh"), "{report}");

    let after = machine
        .run("cat /var/vcap/sys/run/bosh-dns/bosh-dns.pid")
        .unwrap();
    assert_eq!(after, server, "the server was restarted");
    assert_eq!(packet_sockets(&machine), 0);
}

#[test]
fn errand_watches_as_vcap_with_one_capability() {
    requires!(namespaces);
    let machine = machine();
    machine
        .deploy_job("shadow", json!({"json": true, "cpu": 100}))
        .unwrap();
    let output = machine.vcap().join("data/report.json");
    let mut command = command(&machine);
    command
        .stdout(fs::File::create(&output).unwrap())
        .stderr(Stdio::inherit());
    let mut errand = Kept::spawn(&mut command).unwrap();
    wait_until("the packet socket", TIMEOUT, || {
        packet_sockets(&machine) == 1 || errand.ended().unwrap().is_some()
    })
    .unwrap();
    // The script has become the program.
    for (field, wanted) in [
        ("CapPrm", CAPABILITIES),
        ("CapEff", CAPABILITIES),
        ("CapInh", "0000000000000000"),
        ("CapAmb", "0000000000000000"),
        ("NoNewPrivs", "1"),
        ("Uid", "2001\t2001\t2001\t2001"),
        ("Groups", ""),
    ] {
        assert_eq!(status_line(errand.pid(), field).unwrap(), wanted, "{field}");
    }
    for _ in 0..10 {
        machine
            .run("dig @169.254.0.2 q-s0.q-g1.bosh +short +tries=1 +timeout=30")
            .unwrap();
    }
    // As the agent cancels an errand.
    errand.signal(Signal::SIGTERM).unwrap();
    let status = errand.wait(TIMEOUT).unwrap();
    let text = fs::read_to_string(&output).unwrap();
    assert!(status.success(), "{text}");
    let report: Value = serde_json::from_str(&text).unwrap();
    assert!(report["verdicts"]["equal"].as_u64() >= Some(10), "{report}");
    let process = &report["cpu"]["process"];
    let server = machine
        .run("cat /var/vcap/sys/run/bosh-dns/bosh-dns.pid")
        .unwrap();
    assert_eq!(process[0].to_string(), server.trim(), "{report}");
    assert!(report["cpu"]["observed_seconds"].is_number(), "{report}");
    let page = machine.vcap().join("sys/log/shadow/shadow.html");
    assert!(Path::new(&page).exists());
    assert_eq!(packet_sockets(&machine), 0);
}
