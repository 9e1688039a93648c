//! The job `bosh-dns-identity`: rendered as a director does, and run on an isolated machine in each role.

#![expect(
    clippy::unwrap_used,
    reason = "a test that cannot use its machine has failed"
)]

use std::{fs, process::Command, time::Duration};

use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, KeyPair, KeyUsagePurpose};
use serde_json::{Value, json};
use whole_system_tests::{
    process::{Kept, status_line, wait_until},
    requires, server,
};

use crate::{
    job::{self, Files},
    machine::Machine,
};

const JOB: &str = "/var/vcap/jobs/bosh-dns-identity";

/// Time limit that is reached only on failure.
const TIMEOUT: Duration = Duration::from_secs(60);

const RECORDS: &str = r#"{"record_keys":["id","instance_group","network","deployment","ip","domain"],
    "record_infos":[["id-1","web","default","app","10.0.0.1","bosh"]]}"#;

fn render(properties: &[Value]) -> Vec<Result<Files, String>> {
    let manifests: Vec<Value> = properties
        .iter()
        .map(|one| json!({"properties": one, "spec": {"id": "instance-7"}}))
        .collect();
    job::render_job("bosh-dns-identity", &manifests).unwrap()
}

/// Properties of every role, with all their options.
fn roles() -> [Value; 3] {
    let ca = json!({"certificate": "CERT", "private_key": "KEY"});
    [
        json!({"role": "issuer", "ca": ca, "metrics": {"address": "127.0.0.1:53092"}}),
        json!({
            "role": "agent", "use_bpm": true,
            "agent": {"issuer": "10.0.0.6:8854", "trust": "TRUST", "roles": ["health.bosh-dns"]},
        }),
        json!({
            "role": "rotator", "ca": ca,
            "rotator": {"containers": "/var/vcap/data/containers", "also_trust": "OTHER", "envoy": true},
        }),
    ]
}

#[test]
fn identity_properties_become_arguments() {
    let files: Vec<Files> = render(&roles()).into_iter().map(Result::unwrap).collect();
    let program = server::companion("bosh-dns-identity").unwrap();
    for (files, parts) in files.iter().zip([
        &[
            "issuer --state /var/vcap/store/bosh-dns-identity-issuer",
            "--records /var/vcap/instance/dns/records.json",
            "--metrics 127.0.0.1:53092",
        ][..],
        &[
            "--issuer 10.0.0.6:8854",
            "--instance instance-7",
            "--owner vcap",
            "--role health.bosh-dns",
            "--token /var/vcap/store/bosh-dns-identity/token",
        ],
        &[
            "run --ca /var/vcap/jobs/bosh-dns-identity/config/certs/ca.crt",
            "--containers /var/vcap/data/containers",
            "--also-trust /var/vcap/jobs/bosh-dns-identity/config/certs/also_trust.crt",
            "--envoy",
        ],
    ]) {
        let words: Vec<&str> = files["config/arguments"].lines().collect();
        for part in parts {
            assert!(words.join(" ").contains(part), "{part:?}: {words:?}");
        }
        // Every option exists; the user does not, on this machine.
        let words: Vec<String> = words
            .iter()
            .map(|word| word.replace("vcap", "root"))
            .collect();
        let output = Command::new(&program)
            .args(&words)
            .arg("--help")
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{words:?}: {said}");
    }
    assert!(files[0]["monit"].contains("bin/bosh_dns_identity_ctl start"));
    assert!(files[1]["monit"].contains("bpm start bosh-dns-identity"));
    assert!(files[1]["config/bpm.yml"].contains("\"/var/vcap/store/bosh-dns-identity\""));
    assert_eq!(files[1]["config/certs/trust.crt"].trim(), "TRUST");
}

#[test]
fn identity_mistakes_are_named() {
    for (properties, named) in [
        (
            json!({"role": "server"}),
            "expected issuer, agent or rotator",
        ),
        (
            json!({"role": "issuer"}),
            "ca: the issuer needs certificate and private_key",
        ),
        (
            json!({"role": "rotator", "use_bpm": true}),
            "the role rotator has no process for BPM",
        ),
        (
            json!({"role": "agent", "agent": {"issuer": "10.0.0.6:8854"}}),
            "agent.trust: is missing",
        ),
        (
            json!({"role": "agent", "agent": {"issuer": "10.0.0.6", "trust": "T"}}),
            "agent.issuer is \"10.0.0.6\"; expected HOST:PORT",
        ),
    ] {
        let problem = render(std::slice::from_ref(&properties))
            .remove(0)
            .expect_err("not refused");
        assert!(
            problem.contains(named),
            "{problem:?} does not name {named:?}"
        );
    }
}

#[test]
fn identity_scripts_pass_shellcheck() {
    let folder = tempfile::tempdir().unwrap();
    let mut scripts = Vec::new();
    for (role, files) in render(&roles()).into_iter().enumerate() {
        let files = files.unwrap();
        for (path, text) in files.iter().filter(|(path, _)| path.starts_with("bin/")) {
            let script = folder
                .path()
                .join(format!("{role}-{}", path.replace('/', "-")));
            fs::write(&script, text).unwrap();
            scripts.push(script);
        }
    }
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

/// Returns a CA and its key.
fn authority() -> (String, String) {
    let key = KeyPair::generate().unwrap();
    let mut params = CertificateParams::default();
    params
        .distinguished_name
        .push(DnType::CommonName, "instance identity");
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    (params.self_signed(&key).unwrap().pem(), key.serialize_pem())
}

fn control(machine: &Machine, order: &str) {
    machine
        .run(&format!("{JOB}/bin/bosh_dns_identity_ctl {order}"))
        .unwrap_or_else(|error| panic!("{error}\n{}", logs(machine)));
}

fn logs(machine: &Machine) -> String {
    let run = "cat /var/vcap/sys/log/bosh-dns-identity/* /var/vcap/data/*.log";
    machine.run(run).unwrap_or_else(|error| error.to_string())
}

/// Returns the user ids of the job's process.
fn users(machine: &Machine) -> String {
    let file = machine
        .vcap()
        .join("sys/run/bosh-dns-identity/bosh-dns-identity.pid");
    status_line(fs::read_to_string(file).unwrap().trim(), "Uid").unwrap()
}

/// Waits until an agent holds its pairs.
fn wait_for_pairs(machine: &Machine, folder: &str) {
    for role in ["instance", "health.bosh-dns", "api.bosh-dns"] {
        let check = format!("bosh-dns-identity check --folder {folder}/{role}");
        wait_until(role, TIMEOUT, || machine.run(&check).is_ok())
            .unwrap_or_else(|error| panic!("{error}\n{}", logs(machine)));
    }
}

#[test]
fn identity_job_issues_and_renews() {
    requires!(namespaces);
    let machine = Machine::new().unwrap();
    let (certificate, private_key) = authority();
    let data = machine.vcap().join("data");
    fs::write(data.join("records.json"), RECORDS).unwrap();
    fs::write(data.join("ca.crt"), &certificate).unwrap();
    fs::write(data.join("ca.key"), &private_key).unwrap();
    let spawn = |arguments: &str, log: &str| {
        let mut command = machine.command("sh");
        let script = format!("cd /var/vcap/data && exec bosh-dns-identity {arguments} >{log} 2>&1");
        Kept::spawn(command.args(["-c", &script])).unwrap()
    };

    // The issuer as a job, with the agent of another machine.
    let issuer = json!({
        "role": "issuer", "ca": {"certificate": certificate, "private_key": private_key},
        "issuer": {"records_file": "/var/vcap/data/records.json", "address": "127.0.0.1:8854"},
    });
    machine.deploy_job("bosh-dns-identity", issuer).unwrap();
    control(&machine, "start");
    let token = format!("{JOB}/bin/cli token --instance id-1");
    wait_until("a token", TIMEOUT, || {
        machine
            .run(&format!("{token} >/var/vcap/data/token"))
            .is_ok()
    })
    .unwrap_or_else(|error| panic!("{error}\n{}", logs(&machine)));
    let agent = spawn(
        "agent --issuer 127.0.0.1:8854 --instance id-1 --trust ca.crt --token token --folder pairs --interval 1",
        "agent.log",
    );
    wait_for_pairs(&machine, "/var/vcap/data/pairs");
    assert!(users(&machine).contains("2001"), "not vcap");
    drop(agent);
    control(&machine, "stop");

    // An agent as a job, with the issuer of another machine.
    let _issuer = spawn(
        "issuer --state /var/vcap/data/issuer --records records.json --ca ca.crt --ca-key ca.key --listen 127.0.0.1:8854",
        "issuer.log",
    );
    let agent =
        json!({"role": "agent", "agent": {"issuer": "127.0.0.1:8854", "trust": certificate}});
    machine.deploy_job("bosh-dns-identity", agent).unwrap();
    control(&machine, "start");
    // A token for an agent that runs already, as an operator writes it.
    let folder = "/var/vcap/store/bosh-dns-identity";
    let token = "bosh-dns-identity token --state /var/vcap/data/issuer --instance id-1";
    wait_until("a token", TIMEOUT, || {
        machine
            .run(&format!(
                "{token} >{folder}/token && chown vcap {folder}/token"
            ))
            .is_ok()
    })
    .unwrap_or_else(|error| panic!("{error}\n{}", logs(&machine)));
    wait_for_pairs(&machine, folder);
    assert!(users(&machine).contains("2001"), "not vcap");
    machine.run(&format!("{JOB}/bin/cli")).unwrap();
    control(&machine, "stop");
}

#[test]
fn identity_job_rotates_on_two_cells() {
    requires!(namespaces);
    let authorities = [authority(), authority()];
    for (own, other) in [(0, 1), (1, 0)] {
        let machine = Machine::new().unwrap();
        let (certificate, private_key) = &authorities[own];
        let rotator = json!({
            "role": "rotator", "ca": {"certificate": certificate, "private_key": private_key},
            "rotator": {"also_trust": authorities[other].0, "key_type": "p-256"},
        });
        machine.deploy_job("bosh-dns-identity", rotator).unwrap();
        control(&machine, "start");
        fs::write(
            machine.vcap().join("data/web.json"),
            r#"{"guid": "web-1", "internal_ip": "10.255.0.7", "owner": {"uid": 4321, "gid": 4321}}"#,
        )
        .unwrap();
        let create = format!("{JOB}/bin/cli create /var/vcap/data/web.json");
        wait_until("the rotator", TIMEOUT, || machine.run(&create).is_ok())
            .unwrap_or_else(|error| panic!("{error}\n{}", logs(&machine)));
        let pair = "/var/vcap/sys/run/bosh-dns-identity/identities/web-1";
        let owner = machine.run(&format!(
            "stat --dereference --format=%u {pair}/instance.key"
        ));
        assert_eq!(owner.unwrap().trim(), "4321");
        // Containers of either cell accept each other.
        let trusted = machine
            .run(&format!("grep -c BEGIN {pair}/ca.crt"))
            .unwrap();
        assert_eq!(trusted.trim(), "2");
        let status = machine.run(&format!("{JOB}/bin/cli status")).unwrap();
        assert!(status.contains("web-1"), "{status}");
        control(&machine, "stop");
    }
}
