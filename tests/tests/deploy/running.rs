//! The job's scripts on an isolated machine: start, wait, update under load, stop.

#![expect(
    clippy::unwrap_used,
    reason = "a test that cannot use its machine has failed"
)]

use std::{
    fs, thread,
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use whole_system_tests::{
    process::{status_line, wait_until},
    requires, server,
};

use crate::{job, machine::Machine};

/// Folder of the job, as its scripts name it.
const JOB: &str = "/var/vcap/jobs/bosh-dns";

/// A name in the records, and its address.
const NAME: (&str, &str) = ("q-s0.q-g1.bosh", "10.0.1.0");

/// Properties without the parts that change the machine outside its namespaces.
fn properties(extra: &Value) -> Value {
    let mut properties = job::certificates("api", "no certificate");
    // A lease that outlasts a standstill of the machine.
    let xdp = json!({"interfaces": ["lo"], "lease": "60s"});
    server::merge(
        &mut properties,
        &json!({"override_nameserver": false, "xdp": xdp}),
    );
    server::merge(&mut properties, extra);
    properties
}

/// Returns the answer to one query by dig, without retries: a lost query is never answered. A late answer counts,
/// because a busy machine may take seconds to start a server whose socket already holds the query.
fn dig(machine: &Machine) -> String {
    let (name, _) = NAME;
    machine
        .run(&format!(
            "dig @169.254.0.2 {name} +short +tries=1 +timeout=30 || true"
        ))
        .unwrap()
        .trim()
        .to_owned()
}

/// How long programs answer at least after the attacher's end: ten seconds (`UNWATCHED`) after its last sign of
/// life, which it gives every two seconds, or later on a busy machine.
const ANSWERED: Duration = Duration::from_secs(5);

/// Queries while the server is stopped and started, until `is_over`.
///
/// On a slow machine that takes longer than [`ANSWERED`]; then nobody answers until the new server listens.
fn ask_on(machine: &Machine, is_over: impl Fn() -> bool) {
    let begun = Instant::now();
    let mut answered = 0;
    loop {
        let was_over = is_over();
        if was_over && answered >= 20 {
            return;
        }
        let answer = dig(machine);
        let elapsed = begun.elapsed();
        if answer == NAME.1 {
            answered += 1;
            continue;
        }
        let is_excused = elapsed > ANSWERED && !was_over && answer.contains("connection refused");
        assert!(
            is_excused,
            "query {answered}, {elapsed:?} after the stop, over: {was_over}: {answer}\n{}",
            machine
                .run("date --rfc-3339=ns; tail -n 25 /var/vcap/sys/log/bosh-dns/*.log")
                .unwrap()
        );
    }
}

/// Returns the server's status, ready or not.
fn status(machine: &Machine) -> Value {
    let config = format!("{JOB}/config/config.json");
    let status = machine.run(&format!(
        "bosh-dns-xdp status --json --config {config} || test $? = 1"
    ));
    serde_json::from_str(&status.unwrap()).unwrap()
}

#[test]
fn job_starts_serves_and_stops() {
    requires!(namespaces);
    let machine = Machine::new().unwrap();
    machine
        .deploy(properties(&json!({"xdp": {"on_stop": "detach"}})))
        .unwrap();
    machine.run(&format!("{JOB}/bin/pre-start")).unwrap();
    machine.run(&format!("{JOB}/bin/post-start")).unwrap();
    assert_eq!(dig(&machine), NAME.1);

    let run = machine.vcap().join("sys/run/bosh-dns");
    let pid = || {
        fs::read_to_string(run.join("bosh-dns.pid"))
            .unwrap()
            .trim()
            .to_owned()
    };
    let first = pid();
    let user = status_line(&first, "Uid").unwrap();
    assert!(user.contains("2001"), "the server is not vcap: {user}");
    // monit starts the service that pre-start has already started.
    machine
        .run(&format!("{JOB}/bin/bosh_dns_ctl start"))
        .unwrap();
    assert_eq!(pid(), first);
    // Over the control socket, because there are no usable certificates.
    let status = machine.run("bosh-dns-xdp status --json").unwrap();
    let status: Value = serde_json::from_str(&status).unwrap();
    assert_eq!(status["ready"], json!(true), "{status}");
    let address = machine.run("ip -oneline address show dev lo").unwrap();
    assert!(address.contains("169.254.0.2/32"), "{address}");
    let other = machine
        .command("bash")
        .args(["-c", &format!("{JOB}/bin/is-system-resolver")])
        .status()
        .unwrap();
    assert_eq!(other.code(), Some(1));

    machine
        .run(&format!("{JOB}/bin/bosh_dns_ctl stop"))
        .unwrap();
    assert!(!fs::exists(format!("/proc/{first}")).unwrap() && !run.join("bosh-dns.pid").exists());
    let address = machine.run("ip -oneline address show dev lo").unwrap();
    assert!(!address.contains("169.254.0.2"), "{address}");
    machine
        .run(&format!("{JOB}/bin/bosh_dns_ctl stop"))
        .unwrap();
    let logs = machine.vcap().join("sys/log/bosh-dns");
    let log = fs::read_to_string(logs.join("bosh_dns_ctl.stdout.log")).unwrap();
    assert!(
        log.contains("Z] started bosh_dns (pid ") && log.contains("Z] stopped process "),
        "{log}"
    );
    assert!(
        fs::read_to_string(logs.join("bosh_dns.stdout.log"))
            .unwrap()
            .contains("serving on 169.254.0.2:53")
    );
}

/// Checks that the attacher runs as the user that the scripts created, with CAP_BPF, CAP_NET_ADMIN and
/// CAP_PERFMON.
fn attacher_is_confined(machine: &Machine, pid: &str) {
    let user = machine.run("id --user bosh-dns-xdp-attach").unwrap();
    for (field, wanted) in [
        ("Uid", [user.trim(); 4].join("\t")),
        ("CapPrm", "000000c000001000".to_owned()),
        ("CapBnd", "000000c000001000".to_owned()),
        ("NoNewPrivs", "1".to_owned()),
        ("Seccomp", "2".to_owned()),
    ] {
        assert_eq!(status_line(pid.trim(), field).unwrap(), wanted, "{field}");
    }
}

#[test]
fn root_scripts_ignore_vcap_links() {
    requires!(namespaces);
    let machine = Machine::new().unwrap();
    machine
        .deploy(properties(&json!({"xdp": {"enabled": false}})))
        .unwrap();
    // Folders as an earlier release left them, with links that vcap can create there.
    let plant = "cd /var/vcap/sys; mkdir -p run/bosh-dns log/bosh-dns; echo precious >/var/vcap/precious
        for name in bosh_dns_ctl.stdout bosh_dns_ctl.stderr bosh_dns.stdout bosh_dns.stderr; do
            ln -s /var/vcap/precious log/bosh-dns/$name.log
        done
        ln -s /var/vcap/precious run/bosh-dns/bosh-dns.pid
        sleep 600 </dev/null >/dev/null 2>&1 & echo $! | tee run/bosh-dns/bosh_dns_health.pid >/var/vcap/victim
        chown -R vcap:vcap run/bosh-dns log/bosh-dns";
    machine.run(plant).unwrap();
    machine
        .run(&format!("{JOB}/bin/bosh_dns_ctl start && {JOB}/bin/wait"))
        .unwrap();
    machine
        .run(&format!(
            "{JOB}/bin/bosh_dns_health_ctl stop && {JOB}/bin/bosh_dns_ctl stop"
        ))
        .unwrap();
    assert_eq!(machine.run("cat /var/vcap/precious").unwrap(), "precious\n");
    machine
        .run("kill $(cat /var/vcap/victim)")
        .expect("a process of root's was killed");
    let owners = machine
        .run("stat --format=%u /var/vcap/sys/run/bosh-dns /var/vcap/sys/log/bosh-dns")
        .unwrap();
    assert_eq!(owners.split_whitespace().collect::<Vec<_>>(), ["0", "0"]);
}

#[test]
fn update_keeps_hot_names_answered() {
    requires!(namespaces, bpf);
    let machine = Machine::new().unwrap();
    machine.deploy(properties(&json!({}))).unwrap();
    machine
        .run(&format!("{JOB}/bin/pre-start && {JOB}/bin/wait"))
        .unwrap();
    let fast = || status(&machine)["replies"]["fast"].as_u64().unwrap();
    wait_until(
        "an answer of the interface",
        Duration::from_secs(120),
        || {
            dig(&machine);
            fast() > 0
        },
    )
    .unwrap();
    let server = machine
        .run("cat /var/vcap/sys/run/bosh-dns/bosh-dns.pid")
        .unwrap();
    let server = server.trim();
    attacher_is_confined(
        &machine,
        &machine
            .run(&format!("cat /proc/{server}/task/{server}/children"))
            .unwrap(),
    );
    thread::scope(|scope| {
        let update = scope.spawn(|| {
            machine
                .run(&format!("{JOB}/bin/bosh_dns_ctl stop"))
                .unwrap();
            machine
                .deploy(properties(&json!({"log_level": "DEBUG"})))
                .unwrap();
            machine
                .run(&format!("{JOB}/bin/pre-start && {JOB}/bin/wait"))
                .unwrap();
        });
        ask_on(&machine, || update.is_finished());
    });
    machine
        .run(&format!("{JOB}/bin/bosh_dns_ctl stop"))
        .unwrap();
}

/// A double of BPM as called by the job's scripts: runs the server as vcap with the capability from
/// its configuration, in a mount and a process namespace that contain only BPM's standard files
/// (bpm-release, 2026) and the volumes of `bpm.yml`.
const BPM: &str = r##"#!/bin/bash
set -euo pipefail
job=/var/vcap/jobs/bosh-dns
tmp=/var/vcap/data/bosh-dns/tmp
holder=/var/vcap/sys/run/bpm/bosh-dns/holder
volumes='
  process = YAML.load_file(ARGV[0])["processes"].find { |process| process["name"] == "bosh-dns" }
  additional = process.fetch("additional_volumes", [])
  allowed = additional.all? { |volume| volume["path"].start_with?("/var/vcap/data/", "/var/vcap/store/") }
  allowed or abort "additional_volumes: only below /var/vcap/data and /var/vcap/store"
  unrestricted = process.dig("unsafe", "unrestricted_volumes") || []
  found = unrestricted.flat_map { |volume| Dir.glob(volume["path"]).map { |path| volume.merge("path" => path) } }
  (additional + found).each { |volume| puts "#{volume["path"]} #{volume["writable"] ? "rw" : "ro"}" }
'
container='
  set -eu
  root=$(mktemp -d /var/tmp/bpm.XXXXXX)
  mount -t tmpfs tmpfs "$root"
  show() {
    mkdir -p "$root$2"
    mount --bind "$1" "$root$2"
    [ "$3" = rw ] || mount -o remount,bind,ro "$root$2"
  }
  mkdir "$root/proc" "$root/dev"
  mount -t proc proc "$root/proc"
  for device in null random urandom zero; do
    touch "$root/dev/$device"
    mount --bind "/dev/$device" "$root/dev/$device"
  done
  for place in /bin /etc /lib /lib64 /sbin /usr /var/vcap/packages/bosh-dns "$1"; do show "$place" "$place" ro; done
  for place in /tmp /var/tmp "$2"; do show "$2" "$place" rw; done
  show /var/vcap/sys/log/bosh-dns /var/vcap/sys/log/bosh-dns rw
  while read -r place how; do show "$place" "$place" "$how"; done
  exec chroot "$root" setpriv --reuid=vcap --regid=vcap --clear-groups --no-new-privs \
    --bounding-set=-all,+net_bind_service --inh-caps=-all,+net_bind_service --ambient-caps=-all,+net_bind_service -- \
    sh -c "cd $1 && exec /var/vcap/packages/bosh-dns/bin/bosh-dns --config $1/config/config.json"
'
case $1 in
  start)
    mkdir -p "$(dirname "${holder}")" "${tmp}"
    chown vcap "${tmp}"
    listed=$(ruby -ryaml -e "${volumes}" "${job}/config/bpm.yml")
    unshare --mount --pid --fork --propagation=private sh -c "${container}" sh "${job}" "${tmp}" \
      >>/var/vcap/sys/log/bosh-dns/bosh-dns.log 2>&1 <<<"${listed}" &
    echo "$!" >"${holder}"
    ;;
  pid)
    pid=$(cat "${holder}")
    cat "/proc/${pid}/task/${pid}/children"
    ;;
  stop)
    pid=$("$0" pid)
    # As words: one with a blank behind it.
    # shellcheck disable=SC2086
    kill ${pid}
    while [ -d "/proc/$(cat "${holder}")" ]; do sleep 0.1; done
    ;;
esac
"##;

#[test]
fn bpm_update_spares_hot_names() {
    requires!(namespaces, bpf);
    let machine = Machine::new().unwrap();
    let bpm = machine.vcap().join("jobs/bpm/bin/bpm");
    fs::create_dir_all(bpm.parent().unwrap()).unwrap();
    fs::write(&bpm, BPM).unwrap();
    fs::set_permissions(&bpm, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    machine
        .deploy(properties(&json!({"use_bpm": true})))
        .unwrap();
    machine
        .run(&format!("{JOB}/bin/pre-start && {JOB}/bin/wait"))
        .unwrap();
    let fast = || status(&machine)["replies"]["fast"].as_u64().unwrap();
    let of_the_interface = || {
        wait_until(
            "an answer of the interface",
            Duration::from_secs(120),
            || dig(&machine) == NAME.1 && fast() > 0,
        )
        .unwrap();
    };
    of_the_interface();
    // The process id outside the server's PID namespace.
    let server = || {
        machine
            .run("/var/vcap/jobs/bpm/bin/bpm pid")
            .unwrap()
            .trim()
            .to_owned()
    };
    let first = server();
    // CAP_NET_BIND_SERVICE.
    assert_eq!(status_line(&first, "CapPrm").unwrap(), "0000000000000400");
    assert!(status_line(&first, "Uid").unwrap().contains("2001"));
    attacher_is_confined(
        &machine,
        &machine
            .run("cat /var/vcap/sys/run/bosh-dns/bosh_dns_attach.pid")
            .unwrap(),
    );
    thread::scope(|scope| {
        let update = scope.spawn(|| {
            let bpm = "/var/vcap/jobs/bpm/bin/bpm";
            machine
                .run(&format!(
                    "{bpm} stop bosh-dns && {JOB}/bin/bosh_dns_attach_ctl stop"
                ))
                .unwrap();
            machine
                .deploy(properties(&json!({"use_bpm": true, "log_level": "DEBUG"})))
                .unwrap();
            machine
                .run(&format!("{JOB}/bin/pre-start && {JOB}/bin/wait"))
                .unwrap();
        });
        ask_on(&machine, || update.is_finished());
    });
    assert_ne!(server(), first);
    of_the_interface();
    // The agent replaces the file by renaming; BPM mounts its folder, so the server sees the new
    // file.
    let records = machine.vcap().join("instance/dns/records.json");
    let moved = fs::read_to_string(&records)
        .unwrap()
        .replace(NAME.1, "10.9.9.9");
    let moved = moved.replace(r#""version":1"#, r#""version":2"#);
    fs::write(records.with_extension("new"), moved).unwrap();
    fs::rename(records.with_extension("new"), &records).unwrap();
    wait_until("the new address", Duration::from_secs(120), || {
        dig(&machine) == "10.9.9.9"
    })
    .unwrap();
    machine
        .run(&format!(
            "/var/vcap/jobs/bpm/bin/bpm stop bosh-dns; {JOB}/bin/bosh_dns_attach_ctl stop"
        ))
        .unwrap();
}

#[test]
fn start_wait_has_a_limit() {
    requires!(namespaces);
    let machine = Machine::new().unwrap();
    let command = "bosh-dns-wait --address 127.0.0.1 --port 53 --checkDomain up. --timeout 1s --logFormat rfc3339";
    let problem = machine.run(command).unwrap_err().to_string();
    assert!(
        problem.contains("up. did not resolve within 1s (the server at 127.0.0.1:53)"),
        "{problem}"
    );
}
