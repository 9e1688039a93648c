//! The job's scripts on a machine of their own: start, wait, update under load, stop.

#![expect(clippy::unwrap_used, reason = "a test that cannot use its machine has failed")]

use std::{fs, thread, time::Duration};

use serde_json::{Value, json};
use whole_system_tests::{process::wait_until, requirements, server};

use crate::{job, machine::Machine};

/// The job's folder, as its scripts name it.
const JOB: &str = "/var/vcap/jobs/bosh-dns";

/// A name of the records, and its address.
const NAME: (&str, &str) = ("q-s0.q-g1.bosh", "10.0.1.0");

/// Properties without the parts that change the machine beyond its namespaces.
fn properties(extra: &Value) -> Value {
    let mut properties = job::certificates("api", "no certificate");
    server::merge(&mut properties, &json!({"override_nameserver": false, "xdp": {"interfaces": ["lo"]}}));
    server::merge(&mut properties, extra);
    properties
}

/// One query by dig, which tries no second time; its answer.
fn dig(machine: &Machine) -> String {
    let (name, _) = NAME;
    machine
        .run(&format!("dig @169.254.0.2 {name} +short +tries=1 +timeout=1 || true"))
        .unwrap()
        .trim()
        .to_owned()
}

#[test]
fn the_job_starts_serves_and_stops() {
    if !requirements::namespaces() {
        return;
    }
    let machine = Machine::new().unwrap();
    machine.deploy(properties(&json!({"xdp": {"on_stop": "detach"}}))).unwrap();
    machine.run(&format!("{JOB}/bin/pre-start")).unwrap();
    machine.run(&format!("{JOB}/bin/post-start")).unwrap();
    assert_eq!(dig(&machine), NAME.1);

    let run = machine.vcap().join("sys/run/bosh-dns");
    let pid = || fs::read_to_string(run.join("bosh-dns.pid")).unwrap().trim().to_owned();
    let first = pid();
    let status = fs::read_to_string(format!("/proc/{first}/status")).unwrap();
    let user = status.lines().find(|line| line.starts_with("Uid:")).unwrap();
    assert!(user.contains("2001"), "the server is not vcap: {user}");
    // monit starts what pre-start has started already.
    machine.run(&format!("{JOB}/bin/bosh_dns_ctl start")).unwrap();
    assert_eq!(pid(), first);
    // Without certificates of any use, by the control socket.
    let status = machine.run("bosh-dns-xdp status --json").unwrap();
    let status: Value = serde_json::from_str(&status).unwrap();
    assert_eq!(status["ready"], json!(true), "{status}");
    let address = machine.run("ip -oneline address show dev lo").unwrap();
    assert!(address.contains("169.254.0.2/32"), "{address}");
    let other =
        machine.command("bash").args(["-c", &format!("{JOB}/bin/is-system-resolver")]).status().unwrap();
    assert_eq!(other.code(), Some(1));

    machine.run(&format!("{JOB}/bin/bosh_dns_ctl stop")).unwrap();
    assert!(!fs::exists(format!("/proc/{first}")).unwrap() && !run.join("bosh-dns.pid").exists());
    let address = machine.run("ip -oneline address show dev lo").unwrap();
    assert!(!address.contains("169.254.0.2"), "{address}");
    machine.run(&format!("{JOB}/bin/bosh_dns_ctl stop")).unwrap();
    let logs = machine.vcap().join("sys/log/bosh-dns");
    let log = fs::read_to_string(logs.join("bosh_dns_ctl.stdout.log")).unwrap();
    assert!(log.contains("Z] started bosh_dns (pid ") && log.contains("Z] stopped process "), "{log}");
    assert!(
        fs::read_to_string(logs.join("bosh_dns.stdout.log")).unwrap().contains("serving on 169.254.0.2:53")
    );
}

#[test]
fn an_update_leaves_no_hot_name_unanswered() {
    if !requirements::namespaces() || !requirements::bpf() {
        return;
    }
    let machine = Machine::new().unwrap();
    machine.deploy(properties(&json!({}))).unwrap();
    machine.run(&format!("{JOB}/bin/pre-start && {JOB}/bin/wait")).unwrap();
    let fast = || -> u64 {
        let status = machine.run("bosh-dns-xdp status --json").unwrap();
        serde_json::from_str::<Value>(&status).unwrap()["replies"]["fast"].as_u64().unwrap()
    };
    wait_until("an answer of the interface", Duration::from_secs(60), || {
        dig(&machine);
        fast() > 0
    })
    .unwrap();
    thread::scope(|scope| {
        let update = scope.spawn(|| {
            machine.run(&format!("{JOB}/bin/bosh_dns_ctl stop")).unwrap();
            machine.deploy(properties(&json!({"log_level": "DEBUG"}))).unwrap();
            machine.run(&format!("{JOB}/bin/pre-start && {JOB}/bin/wait")).unwrap();
        });
        let mut asked = 0;
        while !update.is_finished() || asked < 20 {
            assert_eq!(dig(&machine), NAME.1, "query {asked} was not answered");
            asked += 1;
        }
    });
    machine.run(&format!("{JOB}/bin/bosh_dns_ctl stop")).unwrap();
}

/// BPM as the job's scripts call it, without its containers: the server as vcap, with the one
/// capability that its configuration asks for.
const BPM: &str = r#"#!/bin/bash
set -euo pipefail
pid_file=/var/vcap/sys/run/bpm/bosh-dns/bosh-dns.pid
case $1 in
  start)
    mkdir -p "$(dirname "${pid_file}")"
    cd /var/vcap/jobs/bosh-dns
    setpriv --reuid=vcap --regid=vcap --clear-groups --no-new-privs --bounding-set=-all,+net_bind_service \
      --inh-caps=-all,+net_bind_service --ambient-caps=-all,+net_bind_service -- \
      /var/vcap/packages/bosh-dns/bin/bosh-dns --config /var/vcap/jobs/bosh-dns/config/config.json \
      >>/var/vcap/sys/log/bosh-dns/bosh-dns.log 2>&1 </dev/null &
    echo "$!" >"${pid_file}"
    ;;
  stop)
    pid=$(cat "${pid_file}")
    kill "${pid}"
    while [ -d "/proc/${pid}" ]; do sleep 0.1; done
    ;;
esac
"#;

#[test]
fn under_bpm_another_process_attaches_and_an_update_leaves_no_hot_name_unanswered() {
    if !requirements::namespaces() || !requirements::bpf() {
        return;
    }
    let machine = Machine::new().unwrap();
    let bpm = machine.vcap().join("jobs/bpm/bin/bpm");
    fs::create_dir_all(bpm.parent().unwrap()).unwrap();
    fs::write(&bpm, BPM).unwrap();
    fs::set_permissions(&bpm, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    machine.deploy(properties(&json!({"use_bpm": true}))).unwrap();
    machine.run(&format!("{JOB}/bin/pre-start && {JOB}/bin/wait")).unwrap();
    let status = || -> Value {
        let status = machine.run(&format!("bosh-dns-xdp status --json --config {JOB}/config/config.json"));
        serde_json::from_str(&status.unwrap()).unwrap()
    };
    let fast = || status()["replies"]["fast"].as_u64().unwrap();
    let of_the_interface = || {
        wait_until("an answer of the interface", Duration::from_secs(60), || {
            assert_eq!(dig(&machine), NAME.1);
            fast() > 0
        })
        .unwrap();
    };
    of_the_interface();
    let server = status()["pid"].as_u64().unwrap();
    let held = fs::read_to_string(format!("/proc/{server}/status")).unwrap();
    // CAP_NET_BIND_SERVICE.
    assert!(held.contains("CapPrm:\t0000000000000400") && held.contains("Uid:\t2001"), "{held}");
    thread::scope(|scope| {
        let update = scope.spawn(|| {
            let bpm = "/var/vcap/jobs/bpm/bin/bpm";
            machine.run(&format!("{bpm} stop bosh-dns && {JOB}/bin/bosh_dns_attach_ctl stop")).unwrap();
            machine.deploy(properties(&json!({"use_bpm": true, "log_level": "DEBUG"}))).unwrap();
            machine.run(&format!("{JOB}/bin/pre-start && {JOB}/bin/wait")).unwrap();
        });
        let mut asked = 0;
        while !update.is_finished() || asked < 20 {
            assert_eq!(dig(&machine), NAME.1, "query {asked} was not answered");
            asked += 1;
        }
    });
    assert_ne!(status()["pid"].as_u64().unwrap(), server);
    of_the_interface();
    machine
        .run(&format!("/var/vcap/jobs/bpm/bin/bpm stop bosh-dns; {JOB}/bin/bosh_dns_attach_ctl stop"))
        .unwrap();
}

#[test]
fn waiting_in_vain_ends() {
    if !requirements::namespaces() {
        return;
    }
    let machine = Machine::new().unwrap();
    let command =
        "bosh-dns-wait --address 127.0.0.1 --port 53 --checkDomain up. --timeout 1s --logFormat rfc3339";
    let problem = machine.run(command).unwrap_err().to_string();
    assert!(problem.contains("up. was not resolved by the server at 127.0.0.1:53 within 1s"), "{problem}");
}
