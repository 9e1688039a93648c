//! docs/migration.md, followed from top to bottom on one machine. A server of this release with other settings stands for
//! bosh-dns, and this test for the director.

#![expect(
    clippy::unwrap_used,
    reason = "a test that cannot follow the page has failed"
)]

use std::{fs, time::Duration};

use serde_json::{Value, json};
use whole_system_tests::{process::wait_until, requires, server};

use crate::{errand, job, machine::Machine, rendering};

const PAGE: &str = include_str!("../../../docs/migration.md");
const JOB: &str = "/var/vcap/jobs/bosh-dns";

/// A name in the records, and its address.
const NAME: (&str, &str) = ("q-s0.q-g1.bosh", "10.0.1.0");

/// Time limit that is reached only on failure.
const TIMEOUT: Duration = Duration::from_secs(120);

fn section(title: &str) -> &'static str {
    let (_, rest) = PAGE.split_once(&format!("\n## {title}\n")).unwrap();
    rest.split("\n## ").next().unwrap()
}

/// Returns the commands of a section without their remarks; lines that continue are joined.
fn commands(title: &str) -> Vec<String> {
    let text = section(title).replace("\\\n", " ");
    let mut found = Vec::new();
    for line in text.lines() {
        let command = line.trim_start();
        let is_code = line.len() - command.len() >= 4;
        let is_command = command.starts_with("bosh") || command.starts_with("cd ");
        if is_code && is_command {
            let command = command.split(" #").next().unwrap_or_default();
            found.push(command.split_whitespace().collect::<Vec<_>>().join(" "));
        }
    }
    found
}

struct Migration {
    machine: Machine,
    runtime_config: Value,
}

impl Migration {
    fn dig(&self) -> String {
        let (name, _) = NAME;
        let line = format!("dig @169.254.0.2 {name} +short +tries=1 +timeout=30 || true");
        self.machine.run(&line).unwrap().trim().to_owned()
    }

    fn start(&self) {
        let line = format!("{JOB}/bin/pre-start && {JOB}/bin/post-start && {JOB}/bin/wait");
        self.machine.run(&line).unwrap();
        assert_eq!(self.dig(), NAME.1);
    }

    fn deploy(&self, xdp: &Value) {
        let mut properties = job::certificates("api", "no certificate");
        let extra = json!({"override_nameserver": false, "xdp": xdp});
        server::merge(&mut properties, &extra);
        self.machine.deploy(properties).unwrap();
        self.start();
    }

    fn stop(&self) {
        self.machine
            .run(&format!("{JOB}/bin/bosh_dns_ctl stop"))
            .unwrap();
    }

    /// Makes the configuration that of bosh-dns, which is deployed again.
    fn forget_additional_objects(&self) {
        let file = self.machine.vcap().join("jobs/bosh-dns/config/config.json");
        let mut config: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
        for name in ["xdp", "control"] {
            config.as_object_mut().unwrap().remove(name).unwrap();
        }
        fs::write(file, config.to_string()).unwrap();
    }

    /// Does what the director does for a command of its user.
    fn direct(&mut self, command: &str) {
        if command.contains(" update-runtime-config ") {
            let (_, file) = command.split_once("--ops-file ").unwrap();
            let file = file.split(' ').next().unwrap();
            rendering::apply(file, &mut self.runtime_config).unwrap();
        } else if command.contains(" deploy ") {
            let jobs = self.runtime_config["addons"][0]["jobs"].as_array().unwrap();
            let errand = json!({"name": "shadow", "release": "bosh-dns-xdp", "properties": {}});
            assert!(jobs.contains(&errand), "{jobs:?}");
            let properties = json!({"ask": "169.254.0.2", "rate": 2000});
            self.machine.deploy_job("shadow", properties).unwrap();
        } else if command.contains(" run-errand shadow ") {
            let output = errand::command(&self.machine).output().unwrap();
            let text = errand::said(&output);
            assert!(output.status.success(), "{text}");
            assert!(text.contains("no unexplained difference"), "{text}");
        } else if let Some((_, line)) = command.split_once("bosh ssh -c 'sudo ") {
            self.machine.run(line.trim_end_matches('\'')).unwrap();
        } else {
            panic!("nobody follows {command}");
        }
    }

    /// Runs `shadow` for less time than an operator would, while a client asks.
    fn shadow(&self, command: &str) {
        let (_, ask) = command.split_once(" shadow ").unwrap();
        let ask = ask.replace("--for 24h ", "");
        let line = format!("cd /var/vcap/data && bosh-dns-xdp shadow {ask} --for 8s");
        let text = std::thread::scope(|scope| {
            let shadow = scope.spawn(|| self.machine.run(&line).unwrap());
            while !shadow.is_finished() {
                assert_eq!(self.dig(), NAME.1);
            }
            shadow.join().unwrap()
        });
        assert!(text.contains("no unexplained difference"), "{text}");
    }

    fn follow(&mut self, command: &str) {
        let command = command.replace("NAME", NAME.0);
        if command.starts_with("bosh ") {
            self.direct(&command);
        } else if command.starts_with("bosh-dns-xdp shadow ") {
            self.shadow(&command);
        } else {
            self.machine.run(&command).unwrap();
        }
    }
}

#[test]
fn migration_is_followed_and_undone() {
    requires!(namespaces, bpf);
    let mut migration = Migration {
        machine: errand::machine(),
        runtime_config: serde_json::from_str(rendering::RUNTIME_CONFIG).unwrap(),
    };

    let proof = commands("Proof on your own traffic");
    assert_eq!(proof.len(), 6, "{proof:?}");
    for command in proof {
        migration.follow(&command);
    }
    let page = migration.machine.run("cat /var/vcap/data/shadow.html");
    assert!(page.unwrap().contains("No unexplained difference"));

    let before = commands("Before");
    assert_eq!(before.len(), 1, "{before:?}");
    for command in before {
        migration.follow(&command);
    }

    let during = section("During");
    assert!(during.contains("`deploy/bosh/ops/use-bosh-dns-xdp.yml`"));
    rendering::apply("use-bosh-dns-xdp.yml", &mut migration.runtime_config).unwrap();
    let job = &migration.runtime_config["addons"][0]["jobs"][0];
    assert_eq!(job["release"], "bosh-dns-xdp");
    let mut invalid = job::certificates("api", "no certificate");
    server::merge(&mut invalid, &json!({"recursor_timeout": "2"}));
    let problem = job::render(&[json!({"properties": invalid})]).unwrap();
    let problem = problem[0].as_ref().unwrap_err();
    assert!(during.contains(problem), "{problem}");
    migration.stop();
    migration.deploy(&json!({"interfaces": ["lo"], "lease": "60s"}));
    wait_until("an answer of the interface", TIMEOUT, || {
        migration.dig();
        let status = migration.machine.run("bosh-dns-xdp status --json || true");
        let status: Value = serde_json::from_str(&status.unwrap()).unwrap();
        status["replies"]["fast"].as_u64() > Some(0)
    })
    .unwrap();

    let after = commands("After");
    assert_eq!(after.len(), 3, "{after:?}");
    for command in after {
        migration.follow(&command);
    }

    migration.stop();
    migration.forget_additional_objects();
    let back = commands("Rolling back");
    assert_eq!(back.len(), 1, "{back:?}");
    for command in back {
        migration.follow(&command);
    }
    // Nothing answers any more, although the lease has not ended.
    let unanswered = format!("dig @169.254.0.2 {} +tries=1 +timeout=1", NAME.0);
    assert!(migration.machine.run(&unanswered).is_err());
    migration.deploy(&json!({"enabled": false}));
    migration.stop();
}
