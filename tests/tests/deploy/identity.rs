//! The package of `bosh-dns-identity` on a bare Debian machine: its services start once they are
//! configured, an upgrade keeps the pairs, and a purge leaves nothing.

#![expect(
    clippy::unwrap_used,
    reason = "a test that cannot use its machine has failed"
)]

use std::{fs, time::Duration};

use serde_json::Value;
use whole_system_tests::{debian::Debian, pki::Authority, process::wait_until};

use crate::packages::{FIRST, NEWER, package};

/// Time limit that is reached only on failure.
const TIMEOUT: Duration = Duration::from_secs(120);

/// The services, and the files of options without which they do not start.
const SERVICES: [(&str, &str); 3] = [
    ("bosh-dns-identity", "run.env"),
    ("bosh-dns-identity-issuer", "issuer.env"),
    ("bosh-dns-identity-agent", "agent.env"),
];

const ISSUER: &str = "OPTIONS=--state /var/lib/bosh-dns-identity/issuer --records /shared/records.json \
                      --ca /shared/ca.crt --ca-key /shared/ca.key --listen 127.0.0.1:8854\n";

const AGENT: &str = "OPTIONS=--issuer 127.0.0.1:8854 --instance i1 --trust /shared/ca.crt \
                     --token /var/lib/bosh-dns-identity/token --folder /var/lib/bosh-dns-identity/pairs \
                     --owner www-data --interval 1\n";

const RECORDS: &str = r#"{"record_keys":["id","instance_group","network","deployment","ip","domain"],
    "record_infos":[["i1","web","default","app","10.0.0.1","bosh"]]}"#;

fn start(machine: &Debian, service: &str) {
    machine
        .run(&format!("systemctl start {service}"))
        .unwrap_or_else(|error| panic!("{error}\n{}", machine.journal(service)));
    assert_eq!(
        state(machine, service),
        "active",
        "{}",
        machine.journal(service)
    );
}

fn state(machine: &Debian, service: &str) -> String {
    machine
        .run(&format!("systemctl is-active {service} || true"))
        .unwrap()
        .trim()
        .to_owned()
}

fn pid(machine: &Debian, service: &str) -> String {
    machine
        .run(&format!(
            "systemctl show --property=MainPID --value {service}"
        ))
        .unwrap()
        .trim()
        .to_owned()
}

/// Waits until a command succeeds; the journal of `service` explains a failure.
fn wait_for(machine: &Debian, service: &str, command: &str) {
    wait_until(command, TIMEOUT, || machine.run(command).is_ok())
        .unwrap_or_else(|error| panic!("{error}\n{}", machine.journal(service)));
}

#[test]
fn identity_services_start_and_upgrade() {
    let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let Some(machine) = Debian::boot().unwrap() else {
        return;
    };
    let shared = machine.shared();
    for (epoch, folder, name) in [
        (FIRST, &folders[0], "identity.deb"),
        (NEWER, &folders[1], "newer.deb"),
    ] {
        fs::copy(
            package(epoch, folder.path(), "bosh-dns-identity"),
            shared.join(name),
        )
        .unwrap();
    }
    Authority::new("instance identity")
        .and_then(|authority| authority.write(&shared))
        .unwrap();
    fs::write(shared.join("records.json"), RECORDS).unwrap();
    fs::write(
        shared.join("web.json"),
        r#"{"guid": "web-1", "internal_ip": "10.255.0.7"}"#,
    )
    .unwrap();
    fs::write(shared.join("issuer.env"), ISSUER).unwrap();
    fs::write(shared.join("agent.env"), AGENT).unwrap();

    machine.run("dpkg --install identity.deb").unwrap();
    for (service, options) in SERVICES {
        machine.run(&format!("systemctl start {service}")).unwrap();
        assert_eq!(
            state(&machine, service),
            "inactive",
            "{service} has no {options} yet"
        );
        assert_eq!(
            machine
                .run(&format!("systemctl is-enabled {service}"))
                .unwrap()
                .trim(),
            "enabled"
        );
    }

    // The rotator, with the options of the package.
    machine
        .run("cp ca.crt ca.key /etc/bosh-dns-identity && chmod 600 /etc/bosh-dns-identity/ca.key")
        .unwrap();
    machine
        .run("cp /usr/share/doc/bosh-dns-identity/examples/run.env /etc/bosh-dns-identity")
        .unwrap();
    start(&machine, "bosh-dns-identity");
    let control = "--control /run/bosh-dns-identity/control";
    machine
        .run(&format!("bosh-dns-identity create {control} web.json"))
        .unwrap_or_else(|error| panic!("{error}\n{}", machine.journal("bosh-dns-identity")));
    let pair = "/run/bosh-dns-identity/identities/web-1";
    let check = format!("bosh-dns-identity check --folder {pair}");
    assert_eq!(machine.run(&check).unwrap(), "no defect found\n");
    assert_eq!(
        machine
            .run(&format!(
                "stat --dereference --format=%a {pair}/instance.key"
            ))
            .unwrap(),
        "600\n"
    );
    // The unit's filter of system calls lets the pool choose SCHED_IDLE, policy 5.
    let rotator = pid(&machine, "bosh-dns-identity");
    let policies = machine.run(&format!(
        "cat /proc/{rotator}/task/*/stat | grep key-pool | cut --delimiter=' ' --fields=41"
    ));
    assert_eq!(policies.unwrap().trim(), "5");
    let status: Value = serde_json::from_str(
        &machine
            .run(&format!("bosh-dns-identity status --json {control}"))
            .unwrap(),
    )
    .unwrap();
    assert_eq!(status["identities"][0]["guid"], "web-1", "{status}");

    // Issuer and agent on one machine; the keys of roles belong to another user.
    machine
        .run("cp issuer.env agent.env /etc/bosh-dns-identity")
        .unwrap();
    start(&machine, "bosh-dns-identity-issuer");
    machine
        .run(
            "umask 077; bosh-dns-identity token --state /var/lib/bosh-dns-identity/issuer --instance i1 \
             >/var/lib/bosh-dns-identity/token",
        )
        .unwrap();
    start(&machine, "bosh-dns-identity-agent");
    let pairs = "/var/lib/bosh-dns-identity/pairs";
    for role in ["health.bosh-dns", "api.bosh-dns"] {
        wait_for(
            &machine,
            "bosh-dns-identity-agent",
            &format!("test -e {pairs}/{role}/instance.pem"),
        );
        // The user reaches its keys, although the issuer's state beside them is private.
        let read = machine.run(&format!(
            "setpriv --reuid=www-data --clear-groups cat {pairs}/{role}/instance.key"
        ));
        assert!(read.unwrap().contains("PRIVATE KEY"));
    }
    machine
        .run("! setpriv --reuid=www-data --clear-groups ls /var/lib/bosh-dns-identity/issuer 2>/dev/null")
        .unwrap();
    machine
        .run("test ! -e /var/lib/bosh-dns-identity/token")
        .unwrap();
    for (service, _) in SERVICES {
        let exposure = machine
            .run(&format!(
                "systemd-analyze security --no-pager {service} | tail -1"
            ))
            .unwrap();
        println!("{exposure}");
    }

    // After a kill it restarts with the same identities; an upgrade replaces all three.
    machine
        .run("systemctl kill --signal=KILL bosh-dns-identity")
        .unwrap();
    let listed = format!("bosh-dns-identity status {control} | grep -q ^web-1");
    wait_for(&machine, "bosh-dns-identity", &listed);
    let certificate = format!("cat {pair}/instance.crt {pairs}/health.bosh-dns/instance.crt");
    let before = (
        SERVICES.map(|(service, _)| pid(&machine, service)),
        machine.run(&certificate).unwrap(),
    );
    machine.run("dpkg --install newer.deb").unwrap();
    let after = SERVICES.map(|(service, _)| pid(&machine, service));
    assert!(
        before.0.iter().zip(&after).all(|(old, new)| old != new),
        "{:?} {after:?}",
        before.0
    );
    for (service, _) in SERVICES {
        assert_eq!(
            state(&machine, service),
            "active",
            "{}",
            machine.journal(service)
        );
    }
    assert_eq!(
        machine.run(&certificate).unwrap(),
        before.1,
        "the upgrade renews nothing"
    );
    wait_for(&machine, "bosh-dns-identity", &listed);

    // Certificates stay for their users until the purge.
    machine.run("dpkg --remove bosh-dns-identity").unwrap();
    for (service, _) in SERVICES {
        assert_ne!(state(&machine, service), "active");
    }
    machine
        .run(&format!("test -e {pairs}/health.bosh-dns/instance.pem"))
        .unwrap();
    machine.run("dpkg --purge bosh-dns-identity").unwrap();
    machine
        .run("test ! -e /var/lib/bosh-dns-identity && test ! -e /etc/bosh-dns-identity && test ! -e /run/bosh-dns-identity")
        .unwrap();
}
