//! Acting as the machine's resolver, with Debian's real resolvconf and real systemd-resolved.

#![expect(
    clippy::unwrap_used,
    reason = "a test that cannot use its machine has failed"
)]

use std::{fs, process::Command, time::Duration};

use serde_json::json;
use whole_system_tests::{
    debian::Debian,
    process::{run, wait_until},
    server,
};

/// Time limit for changes; resolvconf is polled every three seconds.
const TIMEOUT: Duration = Duration::from_secs(120);

/// Boots a machine with the binary as `/shared/bosh-dns-xdp` and one of the two packages that
/// manage `/etc/resolv.conf`.
fn machine(package: &str) -> Option<Debian> {
    let machine = Debian::boot().unwrap()?;
    let binary = machine.shared().join("bosh-dns-xdp");
    run(Command::new("objcopy")
        .arg("--strip-debug")
        .arg(server::program().unwrap())
        .arg(binary))
    .unwrap();
    machine
        .run(&format!(
            "dpkg --install /var/cache/resolvers/{package}_*.deb"
        ))
        .unwrap();
    Some(machine)
}

/// Runs a command of the binary as a service with this name.
fn serve(machine: &Debian, name: &str, arguments: &str) {
    machine
        .run(&format!(
            "systemd-run --quiet --unit={name} /shared/bosh-dns-xdp {arguments}"
        ))
        .unwrap();
}

/// Waits until the output of a shell command satisfies `holds`.
fn wait_for(machine: &Debian, line: &str, holds: impl Fn(&str) -> bool) {
    let waited = wait_until(line, TIMEOUT, || {
        machine.run(line).is_ok_and(|said| holds(&said))
    });
    waited.unwrap_or_else(|error| {
        panic!(
            "{error}: {:?}\n{}",
            machine.run(line),
            machine.run("journalctl --no-pager -n 100").unwrap()
        )
    });
}

/// Returns records.json of one instance in this domain.
fn records(domain: &str) -> String {
    json!({
        "record_keys": ["id", "instance_group", "az", "network", "deployment", "ip", "domain", "group_ids"],
        "record_infos": [["a", "web", "z1", "net", "dep", "10.0.1.7", domain, ["1"]]],
        "version": 1,
    })
    .to_string()
}

#[test]
fn resolvconf_lists_server_first() {
    /// Effective lines of resolv.conf.
    const SERVERS: &str = "grep ^nameserver /etc/resolv.conf || true";
    let Some(machine) = machine("resolvconf") else {
        return;
    };
    let first =
        |said: &str, server: &str| said.lines().next() == Some(&format!("nameserver {server}"));
    machine
        .run("ln -sf /run/resolvconf/resolv.conf /etc/resolv.conf && systemctl restart resolvconf")
        .unwrap();
    machine
        .run("echo nameserver 10.0.0.53 | resolvconf -a eth0.dhclient")
        .unwrap();
    wait_for(&machine, SERVERS, |said| first(said, "10.0.0.53"));
    let head = "cat /etc/resolvconf/resolv.conf.d/head";
    let found = machine.run(head).unwrap();

    serve(&machine, "resolver", "resolver --address 127.0.0.2");
    wait_for(&machine, SERVERS, |said| {
        first(said, "127.0.0.2") && said.contains("10.0.0.53")
    });
    // A DHCP lease with another server does not take precedence.
    machine
        .run("echo nameserver 10.0.0.54 | resolvconf -a eth1.dhclient")
        .unwrap();
    wait_for(&machine, SERVERS, |said| {
        first(said, "127.0.0.2") && said.contains("10.0.0.54")
    });
    // A manually removed entry is also restored.
    machine
        .run(": >/etc/resolvconf/resolv.conf.d/head && resolvconf -u")
        .unwrap();
    wait_for(&machine, SERVERS, |said| first(said, "127.0.0.2"));
    machine
        .run(&format!(
            "printf '{}' >/etc/resolvconf/resolv.conf.d/head",
            "# of the operator\\n"
        ))
        .unwrap();
    machine.run("resolvconf -u").unwrap();
    wait_for(&machine, head, |said| {
        said.contains("127.0.0.2") && said.ends_with("# of the operator\n")
    });

    machine.run("systemctl stop resolver").unwrap();
    assert_eq!(machine.run(head).unwrap(), "# of the operator\n");
    let servers = machine.run(SERVERS).unwrap();
    assert!(
        !servers.contains("127.0.0.2") && servers.contains("10.0.0.53"),
        "{servers}"
    );
    assert_ne!(found, "", "Debian's head says that the file is made");
}

#[test]
fn resolved_routes_follow_domains() {
    let Some(machine) = machine("systemd-resolved") else {
        return;
    };
    let shared = machine.shared();
    fs::write(shared.join("records.json"), records("bosh")).unwrap();
    let config = json!({
        "address": "169.254.0.2", "port": 53, "records_file": "/shared/records.json",
        "handlers_files_glob": "/shared/*.handlers", "upcheck_domains": ["upcheck.bosh-dns."],
        "disable_recursors": true, "xdp": {"enabled": false},
    });
    fs::write(shared.join("config.json"), config.to_string()).unwrap();
    // It was started before D-Bus had read its policy for the name.
    machine.run("systemctl restart systemd-resolved").unwrap();
    // If the kernel lacks dummy interfaces, a veth of the same name takes its place.
    let makes = machine
        .run("ip link add bosh-dns type dummy && ip link delete bosh-dns")
        .is_ok();
    if !makes {
        machine
            .run("ip link add bosh-dns type veth peer name far && ip link set far up")
            .unwrap();
    }
    serve(
        &machine,
        "resolver",
        "resolver --systemd-resolved --config /shared/config.json",
    );
    let domains = "resolvectl domain bosh-dns";
    wait_for(&machine, domains, |said| {
        said.contains("~bosh ") && said.contains("~bosh-dns")
    });
    serve(&machine, "server", "run --config /shared/config.json");
    // Queries the machine's resolver, which alone knows the routing.
    let query = |name: &str| format!("resolvectl query --cache=no --legend=no {name}");
    wait_for(&machine, &query("q-s0.q-g1.bosh"), |said| {
        said.contains("10.0.1.7")
    });
    let asked = machine.run("resolvectl default-route bosh-dns").unwrap();
    assert!(asked.trim().ends_with("no"), "{asked}");

    // Added domains are routed, removed ones are not.
    fs::write(shared.join("new"), records("later.internal")).unwrap();
    fs::rename(shared.join("new"), shared.join("records.json")).unwrap();
    wait_for(&machine, domains, |said| {
        said.contains("~later.internal") && !said.contains("~bosh ")
    });
    wait_for(&machine, &query("q-s0.q-g1.later.internal"), |said| {
        said.contains("10.0.1.7")
    });
    let deny = r#"[{"domain": "corp.example.", "source": {"type": "deny"}}]"#;
    fs::write(shared.join("a.handlers"), deny).unwrap();
    wait_for(&machine, domains, |said| said.contains("~corp.example"));
    // A restarted systemd-resolved is configured again.
    machine.run("systemctl restart systemd-resolved").unwrap();
    wait_for(&machine, domains, |said| said.contains("~corp.example"));

    machine.run("systemctl stop resolver").unwrap();
    let left = machine
        .run("resolvectl domain bosh-dns 2>&1 || true")
        .unwrap();
    assert!(!left.contains('~'), "{left}");
    assert_eq!(
        machine.run("ip link show dev bosh-dns").is_err(),
        makes,
        "its changes are reverted"
    );
}
