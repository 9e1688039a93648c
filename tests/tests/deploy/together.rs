//! One machine: every package of one build in one Debian with systemd, whose services work for each other.

#![expect(
    clippy::unwrap_used,
    reason = "a test that cannot use its machine has failed"
)]

use std::{
    fs,
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};

use serde_json::{Value, json};
use whole_system_tests::{
    debian::Debian,
    pki::Authority,
    process::{Kept, capture, wait_until},
    requires, server,
};

use crate::packages::{FIRST, artifact, artifacts};

/// Time limit that is reached only on failure.
const TIMEOUT: Duration = Duration::from_secs(120);

/// The only instance of the fleet: this machine.
const ADDRESS: &str = "10.0.77.1";

const INVENTORY: &str = r#"{"deployments": [{"name": "app", "instance_groups": [
    {"name": "web", "instances": [{"id": "i1", "networks": {"default": "10.0.77.1"}}]}]}]}"#;

const SYNC: &str = "OPTIONS=--inventory /etc/bosh-dns-xdp/inventory.json --local /var/lib/bosh-dns-xdp/records.json\n";

const ISSUER: &str = "OPTIONS=--state /var/lib/bosh-dns-identity/issuer --records /var/lib/bosh-dns-xdp/records.json \
                      --ca /shared/ca.crt --ca-key /shared/ca.key --listen 127.0.0.1:8854\n";

const AGENT: &str = "OPTIONS=--issuer 127.0.0.1:8854 --instance i1 --trust /shared/ca.crt \
                     --token /var/lib/bosh-dns-identity/token --folder /var/lib/bosh-dns-identity/pairs \
                     --owner bosh-dns-xdp --interval 1\n";

const PAIR: &str = "/var/lib/bosh-dns-identity/pairs/health.bosh-dns";

const TAP: &str = "/run/bosh-dns-xdp-dnstap/dnstap.sock";

const DOCUMENTS: &str = "
apiVersion: bosh-dns-publish/v1
kind: DNSUpdateRecord
metadata: {name: etcd}
spec: {provider: coredns, external-dns-parameters: {interval: 1s}}
---
apiVersion: bosh-dns-publish/v1
kind: FleetName
metadata: {name: web, labels: {dnsprovider: etcd}}
spec: {names: [{name: web.example.org, query: q-s0.q-g1.bosh, ttl: 60, hold: 1s}]}
";

const PUBLISHER: &str = "
documents: [/etc/bosh-dns-xdp/publish.d]
server: /etc/bosh-dns-xdp/config.json
provider_settings: {default/etcd: {etcd-urls: 'http://127.0.0.1:2379'}}
";

/// Copies a program of the test machine, with its libraries, into the shared folder.
fn share_program(shared: &Path, program: &str) {
    let path = capture(Command::new("sh").args(["-c", "command -v \"$0\"", program])).unwrap();
    fs::copy(path.trim(), shared.join(program)).unwrap();
    let libraries = shared.join("lib");
    fs::create_dir_all(&libraries).unwrap();
    for word in capture(Command::new("ldd").arg(path.trim()))
        .unwrap()
        .split_whitespace()
    {
        let library = Path::new(word);
        // Not the C library, which the machine has.
        if library.is_absolute()
            && ["libfstrm", "libevent"]
                .iter()
                .any(|name| word.contains(name))
        {
            fs::copy(library, libraries.join(library.file_name().unwrap())).unwrap();
        }
    }
}

struct Together {
    machine: Debian,
}

impl Together {
    /// Runs a command that must succeed; its failure shows the journals of all services.
    fn run(&self, line: &str) -> String {
        self.machine
            .run(line)
            .unwrap_or_else(|error| panic!("{line}: {error}\n{}", self.journals()))
    }

    fn wait_for(&self, what: &str, ready: impl FnMut() -> bool) {
        wait_until(what, TIMEOUT, ready)
            .unwrap_or_else(|error| panic!("{error}\n{}", self.journals()));
    }

    fn journals(&self) -> String {
        let run = "journalctl --no-pager --lines=150 --unit='bosh-dns-*' --unit=health --unit=dnstap; \
                   bosh-dns-xdp status; ls -laR /var/lib/bosh-dns-xdp /run/bosh-dns-xdp-dnstap";
        self.machine
            .run(run)
            .unwrap_or_else(|error| error.to_string())
    }

    /// Starts the server with the packaged configuration and these changes.
    fn configure(&self, changes: &Value) {
        let packaged = include_str!("../../../deploy/debian/config.json");
        let mut config: Value = serde_json::from_str(packaged).unwrap();
        server::merge(&mut config, changes);
        fs::write(
            self.machine.shared().join("config.json"),
            config.to_string(),
        )
        .unwrap();
        self.run("cp config.json /etc/bosh-dns-xdp/config.json && systemctl restart bosh-dns-xdp");
        self.wait_for("the server", || {
            self.machine
                .run("dig @127.0.0.2 +short +timeout=30 q-s0.q-g1.bosh")
                .is_ok_and(|said| said.trim() == ADDRESS)
        });
    }
}

#[test]
fn all_packages_work_together() {
    requires!(programs(&["fstrm_capture"]));
    let folder = tempfile::tempdir().unwrap();
    let Some(machine) = Debian::boot().unwrap() else {
        return;
    };
    let shared = machine.shared();
    artifacts(FIRST, folder.path()).unwrap();
    for name in ["bosh-dns-xdp", "bosh-dns-identity", "bosh-dns-xdp-load"] {
        let deb = artifact(folder.path(), &format!("{name}_"), ".deb").unwrap();
        fs::copy(deb, shared.join(format!("{name}.deb"))).unwrap();
    }
    Authority::new("fleet")
        .and_then(|authority| authority.write(&shared))
        .unwrap();
    share_program(&shared, "fstrm_capture");
    let health = json!({
        "port": 8853, "ca_file": format!("{PAIR}/ca.crt"), "certificate_file": format!("{PAIR}/instance.crt"),
        "private_key_file": format!("{PAIR}/instance.key"), "health_file_name": "/shared/state.json",
        "health_executable_path": "bin/dns/healthy", "health_executable_interval": "1s", "jobs_dir": "/shared",
    });
    for (name, text) in [
        ("inventory.json", INVENTORY),
        ("sync-publisher.env", SYNC),
        ("issuer.env", ISSUER),
        ("agent.env", AGENT),
        ("web.yml", DOCUMENTS),
        ("publish.yml", PUBLISHER),
        ("state.json", r#"{"state": "running"}"#),
        ("health.json", &health.to_string()),
    ] {
        fs::write(shared.join(name), text).unwrap();
    }
    let together = Together { machine };
    let machine = &together.machine;
    together.run("dpkg --install bosh-dns-xdp.deb bosh-dns-identity.deb bosh-dns-xdp-load.deb");
    together.run(&format!("ip address add {ADDRESS}/32 dev lo"));

    // Records: bosh-dns-sync, as its own user, into the server's folder.
    together.run("cp inventory.json sync-publisher.env /etc/bosh-dns-xdp && systemctl start bosh-dns-sync-publisher");
    together.wait_for("records.json", || {
        machine
            .run("test -s /var/lib/bosh-dns-xdp/records.json")
            .is_ok()
    });
    let owner = together.run("stat --format='%U %G %a' /var/lib/bosh-dns-xdp/records.json");
    assert_eq!(owner.trim(), "bosh-dns-sync bosh-dns-xdp 640");

    // Certificates: issuer and agent; the pairs belong to the server's user.
    together.run("cp issuer.env agent.env /etc/bosh-dns-identity && systemctl start bosh-dns-identity-issuer");
    together.run(
        "umask 077; bosh-dns-identity token --state /var/lib/bosh-dns-identity/issuer --instance i1 \
         >/var/lib/bosh-dns-identity/token",
    );
    together.run("systemctl start bosh-dns-identity-agent");
    together.wait_for("the pair", || {
        machine.run(&format!("test -e {PAIR}/instance.pem")).is_ok()
    });
    together.run("systemd-run --unit=health bosh-dns-xdp-health /shared/health.json");

    // A reader of dnstap, as documented for the package.
    together.run(&format!(
        "systemd-run --unit=dnstap --property=UMask=0007 --setenv=LD_LIBRARY_PATH=/shared/lib \
         /shared/fstrm_capture -t protobuf:dnstap.Dnstap -u {TAP} -w /shared/queries.tap"
    ));
    together.wait_for("the reader", || {
        machine.run(&format!("test -S {TAP}")).is_ok()
    });

    let settings = json!({
        "control": {"group": "bosh-dns-control"},
        "dnstap": {"socket": TAP},
        "health": {
            "enabled": true, "port": 8853, "certificate_file": format!("{PAIR}/instance.crt"),
            "private_key_file": format!("{PAIR}/instance.key"), "ca_file": format!("{PAIR}/ca.crt"),
            "check_interval": "200ms",
        },
    });
    together.configure(&settings);
    // Health: the checks use the agent's certificates.
    together.wait_for("a running instance", || {
        // Of healthy instances only: the health of a single instance decides nothing else.
        let asked = machine.run("dig @127.0.0.2 +short +timeout=30 q-s3.q-g1.bosh");
        let status = machine.run("bosh-dns-xdp status");
        asked.is_ok() && status.is_ok_and(|status| status.contains("running: 1"))
    });
    let checked = machine.run("bosh-dns-xdp check").unwrap_or_default();
    assert!(!checked.contains("dnstap"), "{checked}");

    // The publisher asks the server through the control group.
    let data = folder.path().join("etcd");
    let start_etcd = || {
        let [clients, peers] = ["http://127.0.0.1:2379", "http://127.0.0.1:2380"];
        let mut etcd = Command::new("etcd");
        etcd.arg("--data-dir").arg(&data).arg("--unsafe-no-fsync");
        etcd.args([
            "--listen-client-urls",
            clients,
            "--advertise-client-urls",
            clients,
        ]);
        etcd.args([
            "--listen-peer-urls",
            peers,
            "--initial-advertise-peer-urls",
            peers,
        ]);
        etcd.args(["--initial-cluster", &format!("default={peers}")]);
        Kept::spawn(
            etcd.stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(Stdio::null()),
        )
    };
    let _etcd = machine.in_network(start_etcd).unwrap().unwrap();
    together.run("cp web.yml /etc/bosh-dns-xdp/publish.d && cp publish.yml /etc/bosh-dns-xdp && systemctl start bosh-dns-publish");
    let published = || {
        let mut get = Command::new("etcdctl");
        get.env("ETCDCTL_API", "3");
        get.args([
            "--endpoints",
            "127.0.0.1:2379",
            "get",
            "/skydns/org/example/web/",
            "--prefix",
        ]);
        machine
            .in_network(|| capture(&mut get))
            .unwrap()
            .unwrap_or_default()
    };
    together.wait_for("the published address", || published().contains(ADDRESS));
    together.run("setpriv --reuid=bosh-dns-publish --regid=bosh-dns-publish --init-groups bosh-dns-xdp status");
    let journal = machine.journal("bosh-dns-publish");
    assert!(
        !journal.contains("the fleet's addresses and health are unknown"),
        "{journal}"
    );

    // The queries were captured. Stopped, the reader has written everything.
    together.run("systemctl stop bosh-dns-xdp dnstap");
    let captured = capture(Command::new("dnstap-read").arg(shared.join("queries.tap"))).unwrap();
    assert!(captured.contains("q-s0.q-g1.bosh"), "{captured}");

    // The same into a file, where the unit may write; elsewhere `check` warns before the restart.
    let mut settings = settings;
    settings["dnstap"] = json!({"file": "/var/log/bosh-dns-xdp/queries.tap"});
    together.configure(&settings);
    together.wait_for("the file", || {
        let asked = machine.run("dig @127.0.0.2 +short +timeout=30 q-s0.q-g1.bosh");
        asked.is_ok()
            && machine
                .run("test -s /var/log/bosh-dns-xdp/queries.tap")
                .is_ok()
    });
    let elsewhere = settings
        .to_string()
        .replace("/var/log/bosh-dns-xdp/", "/var/log/");
    let mut elsewhere: Value = serde_json::from_str(&elsewhere).unwrap();
    server::merge(
        &mut elsewhere,
        &json!({"address": "127.0.0.9", "port": 53, "xdp": {"user": "bosh-dns-xdp"}}),
    );
    fs::write(shared.join("elsewhere.json"), elsewhere.to_string()).unwrap();
    let checked = together.run("bosh-dns-xdp check --config elsewhere.json 2>&1 || true");
    assert!(checked.contains("/var/log/bosh-dns-xdp"), "{checked}");

    // The load generator loads the server that this machine runs only as far as its link reaches.
    let refused = together.run(
        "echo 'q-s0.q-g1.bosh. A' >queries; \
         bosh-dns-xdp-load run --server 192.0.2.1 --interface lo --queries queries 2>&1 || true",
    );
    assert!(refused.contains("--public"), "{refused}");
}
