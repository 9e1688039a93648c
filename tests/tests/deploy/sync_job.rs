//! The job `bosh-dns-sync`: rendered as a director does, and run on an isolated machine with a real nats-server.

use std::{fs, path::Path, process::Command, time::Duration};

use serde_json::{Value, json};
use whole_system_tests::{pki::write_director_files, process::wait_until, requires, server};

use crate::{
    job::{self, Files},
    machine::Machine,
};

const JOB: &str = "bosh-dns-sync";

/// Time limit that is reached only on failure.
const TIMEOUT: Duration = Duration::from_secs(120);

/// Properties that both roles need.
fn common(extra: &Value) -> Value {
    let tls = json!({"ca": "CA", "certificate": "CERT", "private_key": "KEY"});
    let mut properties = json!({
        "nats": {"servers": ["tls://127.0.0.1:4222"], "tls": tls}, "blobstore": {"url": "file:///blobs"},
    });
    server::merge(&mut properties, extra);
    properties
}

#[test]
fn sync_properties_become_arguments() {
    let inventory = json!({"deployments": []});
    let roles = [
        common(&json!({"role": "publisher", "publisher": {"inventory": inventory}})),
        common(&json!({
            "role": "publisher", "use_bpm": true, "metrics": {"enabled": true, "port": 9100},
            "publisher": {"inventory_path": "/var/vcap/store/inventory", "api": {"address": "0.0.0.0:53092"}},
        })),
        common(
            &json!({"role": "agent", "blobstore": {"credentials": {"user": "u"}, "ca": "BLOB CA"}}),
        ),
        common(
            &json!({"role": "agent", "agent": {"id": "a0", "mute": true, "records_file": "/data/r.json"}}),
        ),
    ];
    let files: Vec<Files> = job::render_properties(JOB, &roles)
        .into_iter()
        .map(Result::unwrap)
        .collect();
    let arguments = |role: usize| {
        files[role]["config/arguments"]
            .lines()
            .collect::<Vec<_>>()
            .join(" ")
    };
    for (role, parts) in [
        (
            0,
            &["publish --watch --inventory /var/vcap/jobs/bosh-dns-sync/config/inventory.json"][..],
        ),
        (
            0,
            &[
                "--state /var/vcap/store/bosh-dns-sync",
                "--nats tls://127.0.0.1:4222",
                "--keep-bytes 268435456",
            ],
        ),
        (
            1,
            &[
                "--inventory /var/vcap/store/inventory ",
                "--metrics 127.0.0.1:9100",
            ],
        ),
        (
            1,
            &["--api 0.0.0.0:53092 --api-clients default.director.bosh-internal"],
        ),
        (
            2,
            &["agent --id instance-7 --records /var/vcap/data/bosh-dns-sync/records.json"],
        ),
        (
            2,
            &[
                "--blobstore-credentials /var/vcap/jobs",
                "--blobstore-ca /var/vcap/jobs",
            ],
        ),
        (3, &["agent --id a0 --records /data/r.json", "--mute"]),
    ] {
        for part in parts {
            assert!(
                arguments(role).contains(part),
                "{part:?}: {}",
                arguments(role)
            );
        }
    }
    assert!(
        files[0]["monit"].contains("bin/bosh_dns_sync_ctl start")
            && files[1]["monit"].contains("bpm start")
    );
    assert!(files[1]["config/bpm.yml"].contains("\"/var/vcap/store/inventory\""));
    assert_eq!(files[2]["config/certs/blobstore_ca.crt"].trim(), "BLOB CA");
    // Every option exists.
    let program = server::companion("bosh-dns-sync").unwrap();
    for files in &files {
        let words: Vec<&str> = files["config/arguments"].lines().collect();
        let output = Command::new(&program)
            .args(&words)
            .arg("--help")
            .output()
            .unwrap();
        assert!(
            output.status.success(),
            "{words:?}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
    }
}

#[test]
fn sync_mistakes_are_named() {
    let publisher = json!({"role": "publisher", "publisher": {"inventory": {"deployments": []}}});
    let rows = [
        (
            common(&json!({"role": "observer"})),
            "expected publisher or agent",
        ),
        (
            common(&json!({"role": "publisher"})),
            "one of publisher.inventory and publisher.inventory_path",
        ),
        (
            common(&json!({"role": "agent", "nats": {"servers": ["10.0.0.6:4222"]}})),
            "is not tls://HOST:PORT",
        ),
        (
            common(&json!({"role": "agent", "agent": {"id": "a\nb"}})),
            "holds a line break",
        ),
        (publisher, "nats.servers"),
    ];
    job::assert_refused(JOB, &rows);
}

#[test]
fn sync_scripts_pass_shellcheck() {
    let roles = ["publisher", "agent"].map(|role| {
        common(&json!({"role": role, "publisher": {"inventory": {"deployments": []}}}))
    });
    let files = job::render_properties(JOB, &roles);
    job::assert_shellcheck_passes(
        files.iter().map(|files| files.as_ref().unwrap()),
        Vec::new(),
    );
}

#[test]
fn sync_job_distributes_records() {
    requires!(namespaces);
    let machine = Machine::new().unwrap();
    let data = machine.vcap().join("data");
    write_director_files(&data).unwrap();
    let inventory = |address: &str| {
        let instance = json!({"id": "i0", "agent_id": "a0", "networks": {"default": address}});
        json!({"deployments": [{"name": "dep", "instance_groups": [{"name": "web", "instances": [instance]}]}]})
    };
    fs::write(
        data.join("inventory.json"),
        inventory("10.0.0.1").to_string(),
    )
    .unwrap();
    machine
        .run("mkdir /var/vcap/data/blobs && chown vcap:vcap /var/vcap/data/blobs")
        .unwrap();
    let nats_config = "bosh-dns-sync nats-config --listen 127.0.0.1:4222 --inventory inventory.json --tls-ca ca.crt \
                       --tls-certificate nats.crt --tls-key nats.key --output nats.conf";
    machine
        .run(&format!("cd /var/vcap/data && {nats_config}"))
        .unwrap();
    let _nats = machine
        .spawn("nats-server -c nats.conf", "nats.log")
        .unwrap();

    let [ca, certificate, private_key] = ["ca.crt", "director.crt", "director.key"]
        .map(|file| fs::read_to_string(data.join(file)).unwrap());
    let properties = |address: &str| {
        json!({
            "role": "publisher", "blobstore": {"url": "file:///var/vcap/data/blobs"},
            "nats": {
                "servers": ["tls://127.0.0.1:4222"],
                "tls": {"ca": ca, "certificate": certificate, "private_key": private_key},
            },
            "publisher": {"inventory": inventory(address)}, "metrics": {"enabled": true},
        })
    };
    let start = |address: &str| {
        machine.deploy_job(JOB, properties(address)).unwrap();
        machine.control(JOB, "start").unwrap();
    };
    let logs = || {
        let run = "cat /var/vcap/sys/log/bosh-dns-sync/* /var/vcap/data/nats.log /var/vcap/data/agent.log";
        machine.run(run).unwrap_or_else(|error| error.to_string())
    };
    start("10.0.0.1");
    // The agent of another VM.
    let options = "--id a0 --nats tls://127.0.0.1:4222 --tls-ca ca.crt --tls-certificate a0.crt --tls-key a0.key \
                   --blobstore file:///var/vcap/data/blobs --records a0.json";
    let _agent = machine
        .spawn(&format!("bosh-dns-sync agent {options}"), "agent.log")
        .unwrap();
    let holds = |address: &str| {
        fs::read_to_string(data.join("a0.json")).is_ok_and(|text| text.contains(address))
    };
    let synced = || {
        machine
            .run("/var/vcap/jobs/bosh-dns-sync/bin/status")
            .is_ok_and(|text| text.contains("1 of 1 agents have it"))
    };
    wait_until("the records", TIMEOUT, || holds("10.0.0.1") && synced())
        .unwrap_or_else(|_| panic!("{}", logs()));
    // Only now is it certain that the process of this id is no longer setpriv.
    let pid = machine.pid(JOB).unwrap();
    let metrics = machine.metrics(53091).unwrap();
    assert!(metrics.contains("bosh_dns_sync_agents_synced 1"));

    // An update as performed by monit: the state on the persistent disk is kept.
    machine.control(JOB, "stop").unwrap();
    assert!(!Path::new(&format!("/proc/{pid}")).exists() && !machine.pid_file(JOB).exists());
    start("10.0.0.2");
    wait_until("the new records", TIMEOUT, || holds("10.0.0.2") && synced())
        .unwrap_or_else(|_| panic!("{}", logs()));
    let records: Value = serde_json::from_slice(&fs::read(data.join("a0.json")).unwrap()).unwrap();
    assert_eq!(records["version"], 2);
    machine.control(JOB, "stop").unwrap();
    machine.control(JOB, "stop").unwrap();
}
