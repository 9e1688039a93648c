//! The job `bosh-dns-sync`: rendered as a director does, and run on an isolated machine with a real nats-server.

#![expect(
    clippy::unwrap_used,
    reason = "a test that cannot use its machine has failed"
)]

use std::{fs, path::Path, process::Command, time::Duration};

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DistinguishedName, DnType, IsCa, KeyPair,
    SanType,
};
use serde_json::{Value, json};
use whole_system_tests::{
    process::{Kept, status_line, wait_until},
    requires, server,
};

use crate::{
    job::{self, Files},
    machine::Machine,
};

const JOB: &str = "/var/vcap/jobs/bosh-dns-sync";

/// Time limit that is reached only on failure.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Properties that both roles need.
fn common(extra: &Value) -> Value {
    let tls = json!({"ca": "CA", "certificate": "CERT", "private_key": "KEY"});
    let mut properties = json!({
        "nats": {"servers": ["tls://127.0.0.1:4222"], "tls": tls}, "blobstore": {"url": "file:///blobs"},
    });
    server::merge(&mut properties, extra);
    properties
}

fn render(properties: &[Value]) -> Vec<Result<Files, String>> {
    let manifests: Vec<Value> = properties
        .iter()
        .map(|one| json!({"properties": one, "spec": {"id": "instance-7"}}))
        .collect();
    job::render_job("bosh-dns-sync", &manifests).unwrap()
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
    let files: Vec<Files> = render(&roles)
        .into_iter()
        .map(|result| result.unwrap())
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
    for (properties, named) in [
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
fn sync_scripts_pass_shellcheck() {
    let roles = ["publisher", "agent"].map(|role| {
        common(&json!({"role": role, "publisher": {"inventory": {"deployments": []}}}))
    });
    let folder = tempfile::tempdir().unwrap();
    let mut scripts = Vec::new();
    for (role, files) in render(&roles).into_iter().enumerate() {
        for (path, text) in files
            .unwrap()
            .iter()
            .filter(|(path, _)| path.starts_with("bin/"))
        {
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

/// Writes a certificate for 127.0.0.1 with a director's kind of subject; returns it with its key.
fn issue(ca: &CertifiedIssuer<'_, KeyPair>, name: &str) -> (String, String) {
    let mut params = CertificateParams::new(Vec::<String>::new()).unwrap();
    params.distinguished_name = subject(name);
    params.subject_alt_names = vec![SanType::IpAddress([127, 0, 0, 1].into())];
    let key = KeyPair::generate().unwrap();
    (
        params.signed_by(&key, ca).unwrap().pem(),
        key.serialize_pem(),
    )
}

fn subject(name: &str) -> DistinguishedName {
    let mut subject = DistinguishedName::new();
    subject.push(DnType::CountryName, "USA");
    subject.push(DnType::OrganizationName, "Cloud Foundry");
    subject.push(DnType::CommonName, name);
    subject
}

#[test]
fn sync_job_distributes_records() {
    requires!(namespaces);
    let machine = Machine::new().unwrap();
    let mut params = CertificateParams::new(Vec::<String>::new()).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.distinguished_name = subject("ca");
    let ca = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
    let data = machine.vcap().join("data");
    let write = |name: &str, text: &str| fs::write(data.join(name), text).unwrap();
    write("ca.crt", &ca.pem());
    for (file, name) in [
        ("nats", "default.nats.bosh-internal"),
        ("a0", "a0.agent.bosh-internal"),
    ] {
        let (certificate, key) = issue(&ca, name);
        write(&format!("{file}.crt"), &certificate);
        write(&format!("{file}.key"), &key);
    }
    let inventory = |address: &str| {
        let instance = json!({"id": "i0", "agent_id": "a0", "networks": {"default": address}});
        json!({"deployments": [{"name": "dep", "instance_groups": [{"name": "web", "instances": [instance]}]}]})
    };
    write("inventory.json", &inventory("10.0.0.1").to_string());
    machine
        .run("mkdir /var/vcap/data/blobs && chown vcap:vcap /var/vcap/data/blobs")
        .unwrap();
    let nats_config = "bosh-dns-sync nats-config --listen 127.0.0.1:4222 --inventory inventory.json --tls-ca ca.crt \
                       --tls-certificate nats.crt --tls-key nats.key --output nats.conf";
    machine
        .run(&format!("cd /var/vcap/data && {nats_config}"))
        .unwrap();
    let mut nats = machine.command("sh");
    nats.args([
        "-c",
        "cd /var/vcap/data && exec nats-server -c nats.conf >nats.log 2>&1",
    ]);
    let _nats = Kept::spawn(&mut nats).unwrap();

    let (certificate, private_key) = issue(&ca, "default.director.bosh-internal");
    let properties = |address: &str| {
        json!({
            "role": "publisher", "blobstore": {"url": "file:///var/vcap/data/blobs"},
            "nats": {
                "servers": ["tls://127.0.0.1:4222"],
                "tls": {"ca": ca.pem(), "certificate": certificate, "private_key": private_key},
            },
            "publisher": {"inventory": inventory(address)}, "metrics": {"enabled": true},
        })
    };
    let start = |address: &str| {
        machine
            .deploy_job("bosh-dns-sync", properties(address))
            .unwrap();
        machine
            .run(&format!("{JOB}/bin/bosh_dns_sync_ctl start"))
            .unwrap();
    };
    let logs = || {
        let run = "cat /var/vcap/sys/log/bosh-dns-sync/* /var/vcap/data/nats.log /var/vcap/data/agent.log";
        machine.run(run).unwrap_or_else(|error| error.to_string())
    };
    start("10.0.0.1");
    let pid_file = machine
        .vcap()
        .join("sys/run/bosh-dns-sync/bosh-dns-sync.pid");
    let pid = fs::read_to_string(&pid_file).unwrap().trim().to_owned();
    // The agent of another VM.
    let mut agent = machine.command("sh");
    let options = "--id a0 --nats tls://127.0.0.1:4222 --tls-ca ca.crt --tls-certificate a0.crt --tls-key a0.key \
                   --blobstore file:///var/vcap/data/blobs --records a0.json";
    agent.args([
        "-c",
        &format!("cd /var/vcap/data && exec bosh-dns-sync agent {options} >agent.log 2>&1"),
    ]);
    let _agent = Kept::spawn(&mut agent).unwrap();
    let holds = |address: &str| {
        fs::read_to_string(data.join("a0.json")).is_ok_and(|text| text.contains(address))
    };
    let synced = || {
        machine
            .run(&format!("{JOB}/bin/status"))
            .is_ok_and(|text| text.contains("1 of 1 agents have it"))
    };
    wait_until("the records", TIMEOUT, || holds("10.0.0.1") && synced())
        .unwrap_or_else(|_| panic!("{}", logs()));
    // Only now is it certain that the process of this id is no longer setpriv.
    assert!(
        status_line(&pid, "Uid").unwrap().contains("2001"),
        "not vcap"
    );
    let metrics = machine.run(
        "exec 3<>/dev/tcp/127.0.0.1/53091; printf 'GET /metrics HTTP/1.0\\r\\n\\r\\n' >&3; cat <&3",
    );
    assert!(metrics.unwrap().contains("bosh_dns_sync_agents_synced 1"));

    // An update as performed by monit: the state on the persistent disk is kept.
    machine
        .run(&format!("{JOB}/bin/bosh_dns_sync_ctl stop"))
        .unwrap();
    assert!(!Path::new(&format!("/proc/{pid}")).exists() && !pid_file.exists());
    start("10.0.0.2");
    wait_until("the new records", TIMEOUT, || holds("10.0.0.2") && synced())
        .unwrap_or_else(|_| panic!("{}", logs()));
    let records: Value = serde_json::from_slice(&fs::read(data.join("a0.json")).unwrap()).unwrap();
    assert_eq!(records["version"], 2);
    machine
        .run(&format!(
            "{JOB}/bin/bosh_dns_sync_ctl stop && {JOB}/bin/bosh_dns_sync_ctl stop"
        ))
        .unwrap();
}
