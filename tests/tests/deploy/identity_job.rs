//! The job `bosh-dns-identity`: rendered as a director does, and run on an isolated machine in each role.

use std::{fs, process::Command, time::Duration};

use serde_json::{Value, json};
use whole_system_tests::{pki::Authority, process::wait_until, requires, server};

use crate::{
    job::{self, Files},
    machine::Machine,
};

const JOB: &str = "bosh-dns-identity";

/// The command line of the job.
const CLI: &str = "/var/vcap/jobs/bosh-dns-identity/bin/cli";

/// Time limit that is reached only on failure.
const TIMEOUT: Duration = Duration::from_secs(120);

const RECORDS: &str = r#"{"record_keys":["id","instance_group","network","deployment","ip","domain"],
    "record_infos":[["id-1","web","default","app","10.0.0.1","bosh"]]}"#;

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
    let files: Vec<Files> = job::render_properties(JOB, &roles())
        .into_iter()
        .map(Result::unwrap)
        .collect();
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
    let rows = [
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
    ];
    job::assert_refused(JOB, &rows);
}

#[test]
fn identity_scripts_pass_shellcheck() {
    let files = job::render_properties(JOB, &roles());
    job::assert_shellcheck_passes(
        files.iter().map(|files| files.as_ref().unwrap()),
        Vec::new(),
    );
}

fn control(machine: &Machine, order: &str) {
    machine
        .control(JOB, order)
        .unwrap_or_else(|error| panic!("{error}\n{}", logs(machine)));
}

fn logs(machine: &Machine) -> String {
    let run = "cat /var/vcap/sys/log/bosh-dns-identity/* /var/vcap/data/*.log";
    machine.run(run).unwrap_or_else(|error| error.to_string())
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
    let authority = Authority::new("instance identity").unwrap();
    let (certificate, private_key) = (&authority.certificate, &authority.key);
    let data = machine.vcap().join("data");
    fs::write(data.join("records.json"), RECORDS).unwrap();
    authority.write(&data).unwrap();
    let spawn = |arguments: &str, log: &str| {
        let line = format!("bosh-dns-identity {arguments}");
        machine.spawn(&line, log).unwrap()
    };

    // The issuer as a job, with the agent of another machine.
    let issuer = json!({
        "role": "issuer", "ca": {"certificate": certificate, "private_key": private_key},
        "issuer": {"records_file": "/var/vcap/data/records.json", "address": "127.0.0.1:8854"},
    });
    machine.deploy_job(JOB, issuer).unwrap();
    control(&machine, "start");
    let token = format!("{CLI} token --instance id-1");
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
    machine.pid(JOB).unwrap();
    drop(agent);
    control(&machine, "stop");

    // An agent as a job, with the issuer of another machine.
    let _issuer = spawn(
        "issuer --state /var/vcap/data/issuer --records records.json --ca ca.crt --ca-key ca.key --listen 127.0.0.1:8854",
        "issuer.log",
    );
    let agent =
        json!({"role": "agent", "agent": {"issuer": "127.0.0.1:8854", "trust": certificate}});
    machine.deploy_job(JOB, agent).unwrap();
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
    machine.pid(JOB).unwrap();
    machine.run(CLI).unwrap();
    control(&machine, "stop");
}

#[test]
fn identity_job_rotates_on_two_cells() {
    requires!(namespaces);
    let authorities = [0, 1].map(|_| Authority::new("instance identity").unwrap());
    for (own, other) in [(0, 1), (1, 0)] {
        let machine = Machine::new().unwrap();
        let Authority {
            certificate, key, ..
        } = &authorities[own];
        let rotator = json!({
            "role": "rotator", "ca": {"certificate": certificate, "private_key": key},
            "rotator": {"also_trust": authorities[other].certificate, "key_type": "p-256"},
        });
        machine.deploy_job(JOB, rotator).unwrap();
        control(&machine, "start");
        fs::write(
            machine.vcap().join("data/web.json"),
            r#"{"guid": "web-1", "internal_ip": "10.255.0.7", "owner": {"uid": 4321, "gid": 4321}}"#,
        )
        .unwrap();
        let create = format!("{CLI} create /var/vcap/data/web.json");
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
        let status = machine.run(&format!("{CLI} status")).unwrap();
        assert!(status.contains("web-1"), "{status}");
        control(&machine, "stop");
    }
}
