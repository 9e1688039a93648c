//! The Debian package on a bare Debian machine with real systemd: installed, started and queried as
//! in the README, and upgraded under load.

#![expect(
    clippy::unwrap_used,
    reason = "a test that cannot use its machine has failed"
)]

use std::{
    fs,
    net::SocketAddr,
    path::Path,
    process::Command,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use aya::{
    maps::{Array, Map, MapData},
    programs::{ProgramInfo, SchedClassifier, TcAttachType},
};
use dns_common::control::Control;
use hickory_proto::{op::Message, rr::RecordType};
use serde_json::{Value, json};
use whole_system_tests::{
    client,
    debian::Debian,
    process::{run, wait_until},
    requires, server,
};

use crate::packages::{FIRST, NEWER, package};

/// A name in the records, and its address.
const NAME: (&str, &str) = ("q-s0.q-g1.bosh", "10.0.1.0");

/// Listen address in the package.
const SERVER: ([u8; 4], u16) = ([127, 0, 0, 2], 53);

/// Time limit that is reached only on failure.
const TIMEOUT: Duration = Duration::from_secs(120);

/// Returns the five commands of the README, as typed by a reader.
fn commands() -> Vec<String> {
    let readme =
        fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../README.md")).unwrap();
    let (_, after) = readme.split_once("five commands as root:\n\n").unwrap();
    let block: Vec<String> = after
        .lines()
        .map_while(|line| line.strip_prefix("    "))
        .map(str::to_owned)
        .collect();
    assert_eq!(block.len(), 5, "{block:?}");
    block
}

fn status(machine: &Debian) -> Value {
    serde_json::from_str(
        &machine
            .run("bosh-dns-xdp status --json || test $? = 1")
            .unwrap(),
    )
    .unwrap()
}

/// Returns the number of replies from the interface.
fn by_the_interface(machine: &Debian) -> u64 {
    status(machine)["replies"]["fast"].as_u64().unwrap()
}

/// Returns a machine after the five commands, with the output of the fourth and the fifth.
fn installed(folder: &Path) -> Option<(Debian, String, String)> {
    let machine = Debian::boot().unwrap()?;
    let dist = machine.shared().join("dist");
    fs::create_dir(&dist).unwrap();
    let deb = package(FIRST, folder, "bosh-dns-xdp");
    fs::copy(&deb, dist.join(deb.file_name().unwrap())).unwrap();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "tgz") {
            fs::copy(&path, dist.join(path.file_name().unwrap())).unwrap();
        }
    }
    fs::write(
        machine.shared().join("records.json"),
        server::records_of_groups(&[1, 3]),
    )
    .unwrap();
    let said: Vec<String> = commands()
        .iter()
        .map(|command| {
            let command = command.replace("NAME", NAME.0);
            machine.run(&command).unwrap_or_else(|error| {
                panic!("{command}: {error}\n{}", machine.journal("bosh-dns-xdp"))
            })
        })
        .collect();
    assert!(
        said[0].contains("enabled but not started: copy records.json"),
        "{}",
        said[0]
    );
    Some((machine, said[3].clone(), said[4].clone()))
}

#[test]
fn five_commands_reach_interface_answer() {
    requires!(bpf);
    let folder = tempfile::tempdir().unwrap();
    let Some((machine, dug, shown)) = installed(folder.path()) else {
        return;
    };
    assert!(
        dug.contains("status: NOERROR") && dug.contains(NAME.1),
        "{dug}"
    );
    let contents = machine
        .run("dpkg-deb --contents dist/bosh-dns-xdp_*.deb")
        .unwrap();
    let documents = "usr/share/doc/bosh-dns-xdp";
    for path in [
        format!("{documents}/THIRD-PARTY.md"),
        format!("{documents}/third-party-notices.gz"),
        format!("{documents}/README.md"),
        format!("{documents}/docs/reference/configuration.md"),
        format!("{documents}/docs/measurements/intel/report.md"),
        "usr/share/man/man5/bosh-dns-xdp-config.json.5.gz".to_owned(),
        // Record distribution.
        "usr/bin/bosh-dns-sync".to_owned(),
        "usr/lib/systemd/system/bosh-dns-sync-agent.service".to_owned(),
        "usr/lib/systemd/system/bosh-dns-sync-publisher.service".to_owned(),
        "usr/share/man/man1/bosh-dns-sync.1.gz".to_owned(),
        format!("{documents}/examples/prometheus.yml"),
        format!("{documents}/examples/prometheus-sync-rules.yml"),
        format!("{documents}/examples/grafana-sync.json"),
    ] {
        assert!(
            contents.contains(&format!("./{path}\n")),
            "{path}: {contents}"
        );
    }
    // Files for developers, to which pages link.
    for part in ["/deny.toml", "/doc/bosh-dns-xdp/tests/"] {
        assert!(!contents.contains(part), "{part}: {contents}");
    }
    let release = "tar --extract --to-stdout --gzip --file dist/bosh-dns-xdp-*.tgz";
    for (part, path) in [
        ("./packages/bosh-dns.tgz", "bosh-dns/x86_64/bosh-dns-sync"),
        (
            "./packages/bosh-dns.tgz",
            "bosh-dns/x86_64/bosh-dns-publish",
        ),
        (
            "./packages/bosh-dns.tgz",
            "bosh-dns/x86_64/bosh-dns-identity",
        ),
        ("./jobs/bosh-dns-identity.tgz", "monit"),
        ("./jobs/bosh-dns-sync.tgz", "monit"),
        ("./jobs/bosh-dns-publish.tgz", "monit"),
    ] {
        let listed = machine
            .run(&format!("{release} {part} | tar --list --gzip"))
            .unwrap();
        assert!(
            listed
                .lines()
                .any(|line| line.trim_start_matches("./") == path),
            "{path}: {listed}"
        );
    }
    assert!(
        shown.lines().next().unwrap().ends_with(": ready"),
        "{shown}"
    );
    assert!(!shown.contains("  FAIL  "), "{shown}");
    // The programs load while userspace answers the first queries.
    let mut before = by_the_interface(&machine);
    wait_until("an answer of the interface", TIMEOUT, || {
        let answer = machine
            .run(&format!("dig @127.0.0.2 +short +timeout=30 {}", NAME.0))
            .unwrap();
        assert_eq!(answer.trim(), NAME.1);
        std::mem::replace(&mut before, by_the_interface(&machine)) < before
    })
    .unwrap();
    let said = machine.run("bosh-dns-xdp status").unwrap();
    println!("{said}");
    assert!(
        !said.contains("  FAIL  ") && !said.contains("newest warnings"),
        "{said}"
    );
    // As in the unit: another user, with one capability. The attacher pins the programs on a
    // private BPF file system, because only root can use systemd's.
    let pid = status(&machine)["pid"].as_u64().unwrap();
    let owner = machine.run(&format!("ps -o user= -p {pid}")).unwrap();
    assert_eq!(owner.trim(), "bosh-dns-xdp");
    assert!(
        status(&machine)["fast_path"]["internals"]["pinned_at"].is_string(),
        "{said}{}",
        machine.journal("bosh-dns-xdp-attach")
    );
    let held = machine
        .run(&format!("grep CapBnd /proc/{pid}/status"))
        .unwrap();
    assert!(
        held.trim().ends_with(&format!("{:016x}", 1 << 10)),
        "{held}"
    );
    assert!(
        machine
            .run("stat --format=%a /sys/fs/bpf")
            .unwrap()
            .trim()
            .ends_with("700")
    );
    for unit in ["bosh-dns-xdp", "bosh-dns-xdp-attach"] {
        let exposure = machine
            .run(&format!(
                "systemd-analyze security --no-pager {unit} | tail -1"
            ))
            .unwrap();
        println!("{exposure}");
        let level = exposure
            .split_whitespace()
            .find_map(|word| word.parse::<f64>().ok())
            .unwrap();
        assert!(level < 2.0, "{exposure}");
    }
    // The attacher never is root, yet it sees rules of legacy iptables: the unit hands their lists over.
    let rule = |change: &str| {
        let mut command = Command::new("iptables-legacy");
        command.args([
            change, "INPUT", "-p", "udp", "--dport", "53", "-m", "limit", "--limit", "1/s", "-j",
            "DROP",
        ]);
        machine.in_network(|| run(&mut command)).unwrap().unwrap();
    };
    rule("-A");
    wait_until("lo to be left to userspace", TIMEOUT, || {
        // The rule also drops the server's up-checks: meanwhile it may not be ready.
        let shown = machine.run("bosh-dns-xdp status || test $? = 1").unwrap();
        shown.contains("the packet filter limits its queries")
    })
    .unwrap_or_else(|error| panic!("{error}\n{}", machine.journal("bosh-dns-xdp-attach")));
    rule("-D");
    let mut before = by_the_interface(&machine);
    wait_until("an answer of the interface", TIMEOUT, || {
        machine
            .run(&format!("dig @127.0.0.2 +short +timeout=30 {}", NAME.0))
            .unwrap();
        std::mem::replace(&mut before, by_the_interface(&machine)) < before
    })
    .unwrap_or_else(|error| panic!("{error}\n{}", machine.journal("bosh-dns-xdp-attach")));
    // Whichever service ends, the pinned programs answer until the services are back.
    let both = "bosh-dns-xdp bosh-dns-xdp-attach";
    for (signal, units) in [
        ("KILL", "bosh-dns-xdp"),
        ("TERM", "bosh-dns-xdp"),
        ("KILL", both),
        ("TERM", both),
    ] {
        let first = status(&machine)["pid"].as_u64().unwrap();
        machine
            .run(&format!("systemctl kill --signal={signal} {units}"))
            .unwrap();
        if signal == "KILL" {
            // A probe in the socket of a dying server is lost with it.
            machine
                .run(&format!("while test -d /proc/{first}; do sleep 0.02; done"))
                .unwrap();
        }
        let answered = (0..20)
            .filter(|_| {
                // `dig` fails when the query is refused.
                let answer = machine.run(&format!("dig @127.0.0.2 +short +tries=1 {}", NAME.0));
                answer.is_ok_and(|answer| answer.trim() == NAME.1)
            })
            .count();
        assert_eq!(answered, 20, "of 20 queries, after SIG{signal} to {units}");
        wait_until("the services to be back", TIMEOUT, || {
            // The new server serves the interface once queries have arrived through it.
            let _ = machine.run(&format!("dig @127.0.0.2 +short +tries=1 {}", NAME.0));
            machine.run("bosh-dns-xdp status").is_ok()
                && status(&machine)["pid"] != first
                && by_the_interface(&machine) > 0
        })
        .unwrap_or_else(|error| {
            panic!(
                "SIG{signal} to {units}: {error}\n{}",
                machine.journal("bosh-dns-xdp")
            )
        });
    }
    assert!(
        machine
            .run("ls /run/bosh-dns-xdp-pins/*/links")
            .unwrap()
            .contains("1-tcx")
    );

    // Reloading needs no kill(1) of procps.
    machine
        .run("rm --force /usr/bin/kill && ! command -v /usr/bin/kill")
        .unwrap();
    machine.run("systemctl reload bosh-dns-xdp").unwrap();
    wait_until("the reload", TIMEOUT, || {
        machine
            .journal("bosh-dns-xdp")
            .contains("SIGHUP: reload finished")
    })
    .unwrap();

    // The journal has a priority per line and no second time stamp.
    machine
        .run("echo broken > /var/lib/bosh-dns-xdp/records.json")
        .unwrap();
    let journal = |priority: &str| {
        machine
            .run(&format!(
                "journalctl --unit=bosh-dns-xdp --output=cat --priority={priority}..{priority}"
            ))
            .unwrap()
    };
    wait_until("a line about broken records", TIMEOUT, || {
        ["err", "warning"]
            .iter()
            .any(|priority| journal(priority).contains("[RecordsRepo]"))
    })
    .unwrap();
    let informative = journal("info");
    assert!(
        informative.lines().any(|line| line.starts_with("[main] ")),
        "{informative}"
    );
    assert!(!informative.contains(" INFO "), "{informative}");

    machine.run("apt-get remove --yes bosh-dns-xdp").unwrap();
    assert!(
        machine
            .run("systemctl is-active bosh-dns-xdp || true")
            .unwrap()
            .contains("inactive")
    );
    let pins = machine
        .run("ls -A /run/bosh-dns-xdp-pins 2>/dev/null || true")
        .unwrap();
    assert_eq!(pins, "", "something stays attached");
    assert!(
        machine
            .run("test -e /etc/bosh-dns-xdp/config.json && echo there")
            .unwrap()
            .contains("there")
    );
    machine.run("apt-get purge --yes bosh-dns-xdp").unwrap();
    machine
        .run("test ! -e /etc/bosh-dns-xdp/config.json && test ! -e /var/lib/bosh-dns-xdp")
        .unwrap();
    let left = machine.run(
        "getent passwd bosh-dns-xdp bosh-dns-xdp-attach bosh-dns-publish bosh-dns-sync || true",
    );
    assert_eq!(left.unwrap(), "", "users stay");
    let left = machine
        .run("getent group bosh-dns-control bosh-dns-xdp || true")
        .unwrap();
    assert_eq!(left, "", "groups stay");
}

/// Ways in which the attacher's user can lead root from its pins to those of another server: each a shell
/// command in the folder of the server's pins.
const PLANTED: [&str; 3] = [
    "ln -s $OTHER/links/1-tcx links/90-tcx && cd maps-* && ln -s $OTHER/links/1-tcx PLANTED",
    "mv links moved && ln -s $OTHER/links links",
    "cd .. && mv $OWN moved && ln -s $OTHER $OWN",
];

#[test]
fn removal_spares_planted_links() {
    requires!(bpf);
    let folder = tempfile::tempdir().unwrap();
    let Some((machine, ..)) = installed(folder.path()) else {
        return;
    };
    // Programs of another server, which has ended: no other process answers.
    let other = json!({
        "address": "127.0.0.3", "port": 53, "records_file": "/shared/records.json", "metrics": {"enabled": false},
        "control": {"socket": "/run/other/control.sock"},
        "xdp": {"interfaces": ["lo"], "bpffs": "/sys/fs/bpf/other", "lease": "1h"},
    });
    fs::write(machine.shared().join("other.json"), other.to_string()).unwrap();
    machine
        .run("systemd-run --unit=other bosh-dns-xdp run --config /shared/other.json")
        .unwrap();
    let answers = |server: &str| {
        let answer = machine.run(&format!(
            "dig @{server} +short +tries=1 +timeout=1 {}",
            NAME.0
        ));
        answer.is_ok_and(|answer| answer.trim() == NAME.1)
    };
    wait_until("the other server's programs", TIMEOUT, || {
        answers("127.0.0.3");
        let status = machine.run("bosh-dns-xdp status --json --config /shared/other.json");
        let status = status
            .ok()
            .and_then(|text| serde_json::from_str::<Value>(&text).ok());
        status.is_some_and(|status| status["replies"]["fast"].as_u64() > Some(0))
    })
    .unwrap_or_else(|error| panic!("{error}\n{}", machine.journal("other")));
    machine.run("systemctl kill --signal=KILL other").unwrap();
    wait_until("the other server's end", TIMEOUT, || {
        machine
            .run("systemctl is-active other || true")
            .unwrap()
            .trim()
            == "failed"
    })
    .unwrap();
    // Ten seconds after its end they fall silent (`UNWATCHED`), before a slow machine comes to look. What shows
    // that they are spared is that they stay attached, with the same lease.
    let theirs = attached(&machine);
    assert_eq!(theirs.len(), 1, "its programs remain");
    let control = control_of_other(&machine);

    for planted in PLANTED {
        machine.run("systemctl start bosh-dns-xdp").unwrap();
        let pinned = "ls -d /run/bosh-dns-xdp-pins/*/links/1-tcx";
        wait_until("pinned links", TIMEOUT, || {
            // Queries tell which interfaces to serve.
            answers("127.0.0.2");
            machine.run(pinned).is_ok() && attached(&machine).len() == 2
        })
        .unwrap_or_else(|error| panic!("{error}\n{}", machine.journal("bosh-dns-xdp-attach")));
        // Killed, so that only `detach` removes its programs, and masked, so that nothing starts again.
        machine
            .run("systemctl mask --runtime bosh-dns-xdp bosh-dns-xdp-attach")
            .unwrap();
        machine
            .run("systemctl kill --signal=KILL bosh-dns-xdp bosh-dns-xdp-attach")
            .unwrap();
        machine
            .run(&format!(
                "OTHER=$(echo /sys/fs/bpf/other/*-53-*) && cd /run/bosh-dns-xdp-pins/*-53-* && export OTHER \
                 OWN=$(basename $PWD) && setpriv --reuid bosh-dns-xdp-attach --clear-groups sh -ec '{planted}'"
            ))
            .unwrap();
        machine
            .run("sh /var/lib/dpkg/info/bosh-dns-xdp.prerm remove")
            .unwrap();
        assert_eq!(
            attached(&machine),
            theirs,
            "{planted}: only the own programs are detached"
        );
        assert_eq!(control_of_other(&machine), control, "{planted}");
        assert!(!answers("127.0.0.2"), "{planted}: nobody answers");
        let left = machine
            .run("ls -A /run/bosh-dns-xdp-pins 2>/dev/null || true")
            .unwrap();
        assert_eq!(left, "", "{planted}");
        machine
            .run("systemctl unmask --runtime bosh-dns-xdp bosh-dns-xdp-attach")
            .unwrap();
    }
    machine.run("apt-get remove --yes bosh-dns-xdp").unwrap();
    assert_eq!(
        attached(&machine),
        theirs,
        "the package is gone, the other server's programs are not"
    );
    assert_eq!(control_of_other(&machine), control);
}

/// Returns the ids of the tcx programs on the machine's `lo`.
fn attached(machine: &Debian) -> Vec<u32> {
    let found = machine.in_network(|| SchedClassifier::query_tcx("lo", TcAttachType::Ingress));
    let (_, programs) = found.unwrap().unwrap();
    programs.iter().map(ProgramInfo::id).collect()
}

/// Returns the lease, and all else that the other server tells its programs.
fn control_of_other(machine: &Debian) -> [u8; size_of::<Control>()] {
    let pinned = machine.run("echo /sys/fs/bpf/other/*-53-*/maps-*/CONTROL");
    let path = format!("{}{}", machine.root().display(), pinned.unwrap().trim());
    let map = MapData::from_pin(path).unwrap();
    let control: Array<_, [u8; size_of::<Control>()]> = Map::Array(map).try_into().unwrap();
    control.get(&0, 0).unwrap()
}

/// A record for a provider that is unreachable.
const PUBLISHED: &str = "apiVersion: bosh-dns-publish/v1
kind: DNSUpdateRecord
metadata: {name: etcd}
spec: {provider: coredns}
---
apiVersion: externaldns.k8s.io/v1alpha1
kind: DNSEndpoint
metadata: {name: web, labels: {dnsprovider: etcd}}
spec: {endpoints: [{dnsName: www.example.org, targets: [192.0.2.1]}]}
";

/// Sends a message of external-dns.
const POST: &str = r#"exec 3<>/dev/tcp/127.0.0.1/8888
body='{"create":[{"dnsName":"a.apps.internal","recordType":"A","targets":["10.0.0.9"]}]}'
printf 'POST /records HTTP/1.0\r\nContent-Type: application/external.dns.webhook+json;version=1\r\n' >&3
printf 'Content-Length: %s\r\n\r\n%s' ${#body} "$body" >&3
cat <&3
"#;

/// Opens a connection to the metrics as root, then more than the publisher permits as another user, and uses the first.
const CROWD: &str = r#"exec 3<>/dev/tcp/127.0.0.1/7979
coproc setpriv --reuid=65534 --clear-groups bash -c \
  'for i in {1..160}; do exec {fd}<>/dev/tcp/127.0.0.1/7979; done; echo ready; read'
read -r ready <&"${COPROC[0]}"
printf 'GET /metrics HTTP/1.0\r\n\r\n' >&3
head -n 1 <&3
"#;

/// Reads the metrics as root while another user holds more connections than the publisher permits.
fn assert_crowd_spares_root(machine: &Debian) {
    fs::write(machine.shared().join("crowd.sh"), CROWD).unwrap();
    let said = machine.run("bash crowd.sh").unwrap();
    assert!(
        said.contains(" 200 "),
        "root's connection was closed: {said}"
    );
}

/// Has external-dns write a name through the publisher, after the commands of the page.
fn assert_aliases_are_written(machine: &Debian) {
    let page = include_str!("../../../docs/external-dns.md");
    let (_, recipe) = page
        .split_once("In the Debian package the publisher may not")
        .unwrap();
    let lines = recipe.lines().skip_while(|line| !line.starts_with("    "));
    let commands: Vec<&str> = lines.map_while(|line| line.strip_prefix("    ")).collect();
    assert_eq!(commands.len(), 5, "{commands:?}");
    let (_, settings) = page.split_once("```yaml\nserver: ").unwrap();
    let (_, settings) = settings.split_once('\n').unwrap();
    let (settings, _) = settings.split_once("```").unwrap();
    let shared = machine.shared();
    fs::write(shared.join("webhook.yml"), settings).unwrap();
    fs::write(shared.join("post.sh"), POST).unwrap();
    machine
        .run("cat webhook.yml >>/etc/bosh-dns-xdp/publish.yml")
        .unwrap();
    for command in commands {
        machine
            .run(command)
            .unwrap_or_else(|error| panic!("{error}\n{}", machine.journal("bosh-dns-publish")));
    }
    let said = machine.run("bash post.sh").unwrap();
    assert!(
        said.contains(" 204 "),
        "{said}\n{}",
        machine.journal("bosh-dns-publish")
    );
    let read = "setpriv --reuid=bosh-dns-xdp --regid=bosh-dns-xdp --init-groups cat";
    let aliases = machine.run(&format!(
        "{read} /etc/bosh-dns-xdp/aliases.d/external-dns.json"
    ));
    assert!(aliases.unwrap().contains("10.0.0.9"));
}

#[test]
fn publisher_runs_as_separate_user() {
    let folder = tempfile::tempdir().unwrap();
    let Some(machine) = Debian::boot().unwrap() else {
        return;
    };
    let deb = package(FIRST, folder.path(), "bosh-dns-xdp");
    fs::copy(&deb, machine.shared().join("new.deb")).unwrap();
    fs::write(machine.shared().join("web.yml"), PUBLISHED).unwrap();
    machine.run("dpkg --install /shared/new.deb").unwrap();
    machine.run("systemctl start bosh-dns-publish").unwrap();
    let state = || {
        machine
            .run("systemctl is-active bosh-dns-publish || true")
            .unwrap()
    };
    assert_eq!(state().trim(), "inactive", "it has no configuration yet");
    machine
        .run("cd /etc/bosh-dns-xdp && cp /usr/share/doc/bosh-dns-xdp/examples/publish.yml . && cp /shared/web.yml publish.d")
        .unwrap();
    machine
        .run("systemctl start bosh-dns-publish")
        .unwrap_or_else(|error| {
            panic!("{error}\n{}", machine.journal("bosh-dns-publish"));
        });
    assert_eq!(state().trim(), "active");
    let file = "/etc/bosh-dns-xdp/publish.d/web.yml.status";
    let status = || machine.run(&format!("cat {file} || true")).unwrap();
    wait_until("the error in the status file", TIMEOUT, || {
        status().contains("lastError")
    })
    .unwrap_or_else(|error| {
        panic!(
            "{error}: {}\n{}",
            status(),
            machine.journal("bosh-dns-publish")
        );
    });
    let owner = machine
        .run(&format!(
            "stat -c %U {file} /var/lib/bosh-dns-publish/store"
        ))
        .unwrap();
    assert_eq!(owner, "bosh-dns-publish\nbosh-dns-publish\n");
    let said = machine.run("bosh-dns-publish status || true").unwrap();
    assert!(
        said.contains("default/etcd (coredns): NOT PUBLISHED, 1 record sets wanted"),
        "{said}"
    );
    assert_crowd_spares_root(&machine);
    assert_aliases_are_written(&machine);
    assert!(
        machine
            .run("zcat /usr/share/man/man1/bosh-dns-publish.1.gz")
            .unwrap()
            .contains("transfer")
    );
    machine.run("dpkg --purge bosh-dns-xdp").unwrap();
    machine
        .run("test ! -e /var/lib/bosh-dns-publish && test ! -e /usr/bin/bosh-dns-publish")
        .unwrap();
}

#[test]
fn upgrade_keeps_hot_names_answered() {
    requires!(bpf);
    let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let Some((machine, ..)) = installed(folders[0].path()) else {
        return;
    };
    let newer = package(NEWER, folders[1].path(), "bosh-dns-xdp");
    fs::copy(&newer, machine.shared().join("newer.deb")).unwrap();
    wait_until("an answer of the interface", TIMEOUT, || {
        machine
            .run(&format!("dig @127.0.0.2 +timeout=30 {}", NAME.0))
            .unwrap();
        by_the_interface(&machine) > 0
    })
    .unwrap();
    let pid = |machine: &Debian| status(machine)["pid"].as_u64().unwrap();
    let version = |machine: &Debian| machine.run("dpkg-query --show bosh-dns-xdp").unwrap();
    let first = (pid(&machine), version(&machine));
    let upgraded = AtomicBool::new(false);
    let asked = thread::scope(|scope| {
        let load = scope.spawn(|| {
            machine.in_network(|| {
                ask_on(SocketAddr::from(SERVER), || {
                    upgraded.load(Ordering::Relaxed)
                })
            })
        });
        let said = machine.run("dpkg --install newer.deb");
        // Until the programs of the second server answer as well.
        let served = said.and_then(|_| {
            wait_until("the second server's answers", TIMEOUT, || {
                // The new server serves the interface once queries have arrived through it.
                machine
                    .run(&format!(
                        "dig @127.0.0.2 +short +tries=1 +timeout=30 {}",
                        NAME.0
                    ))
                    .unwrap();
                machine.run("bosh-dns-xdp status").is_ok() && by_the_interface(&machine) > 0
            })
        });
        upgraded.store(true, Ordering::Relaxed);
        let asked = load.join().unwrap().unwrap();
        served.unwrap_or_else(|error| panic!("{error}\n{}", machine.journal("bosh-dns-xdp")));
        asked
    });
    println!("{asked} queries while the package was upgraded, all answered");
    let second = (pid(&machine), version(&machine));
    assert!(
        first.0 != second.0 && first.1 != second.1,
        "{first:?} {second:?}"
    );
    // A manually edited configuration is kept without a prompt.
    let kept = json!({"address": "127.0.0.2", "port": 53, "log_level": "DEBUG"}).to_string();
    machine
        .run(&format!(
            "echo '{kept}' >/etc/bosh-dns-xdp/config.json; dpkg --install newer.deb"
        ))
        .unwrap();
    assert_eq!(
        machine
            .run("cat /etc/bosh-dns-xdp/config.json")
            .unwrap()
            .trim(),
        kept
    );
}

/// A removal stops the services; another installation of the same or of a newer version starts them again. An
/// upgrade leaves a service stopped that an operator has stopped.
#[test]
fn services_start_again_after_removal() {
    let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let Some((machine, ..)) = installed(folders[0].path()) else {
        return;
    };
    let newer = package(NEWER, folders[1].path(), "bosh-dns-xdp");
    fs::copy(&newer, machine.shared().join("newer.deb")).unwrap();
    let active = || {
        machine
            .run("systemctl is-active bosh-dns-xdp || true")
            .unwrap()
    };
    for package in ["dist/bosh-dns-xdp_*.deb", "newer.deb"] {
        machine.run("apt-get remove --yes bosh-dns-xdp").unwrap();
        machine.run(&format!("dpkg --install {package}")).unwrap();
        assert_eq!(
            active().trim(),
            "active",
            "{}",
            machine.journal("bosh-dns-xdp")
        );
        let answer = machine
            .run(&format!("dig @127.0.0.2 +short +timeout=30 {}", NAME.0))
            .unwrap();
        assert_eq!(answer.trim(), NAME.1);
    }
    machine.run("systemctl stop bosh-dns-xdp").unwrap();
    machine.run("dpkg --install newer.deb").unwrap();
    assert_eq!(active().trim(), "inactive");
    machine
        .run("test ! -e /run/bosh-dns-xdp.installed-again")
        .unwrap();
}

/// Queries the hot name until `done`, without retries; returns the number of queries.
fn ask_on(server: SocketAddr, done: impl Fn() -> bool) -> u64 {
    let message = client::query(&format!("{}.", NAME.0), RecordType::A, None)
        .unwrap()
        .to_vec()
        .unwrap();
    let mut asked = 0;
    while !done() {
        // A lost query is never answered; a busy machine may answer late.
        let reply = client::ask_raw(server, &message, Duration::from_secs(120));
        let reply = reply.unwrap_or_else(|error| panic!("query {asked} was not answered: {error}"));
        let found = client::addresses(&Message::from_vec(&reply).unwrap());
        assert_eq!(
            found,
            [NAME.1.parse::<std::net::IpAddr>().unwrap()],
            "query {asked}"
        );
        asked += 1;
        thread::sleep(Duration::from_millis(1));
    }
    asked
}
