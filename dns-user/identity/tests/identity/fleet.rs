//! A fleet: an issuer, agents and the rotation of their CA, as processes over real TLS.

use std::{
    fs,
    net::SocketAddr,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    process::{Command, Output},
    thread,
    time::Duration,
};
use test_support::{free_address, requirements::root};

use dns_identity::{fleet::state::StateFolder, folder::read_pair};
use tempfile::TempDir;

use crate::{
    authorities::TestAuthority,
    program::{Running, assert_hidden, get, program, until},
    rotator::{matches, memory},
    tools::{openssl, text},
};

const RECORDS: &str = r#"{"record_keys":["id","instance_group","network","deployment","ip","domain"],
    "record_infos":[["i1","web","default","app","10.0.0.1","bosh"],
                    ["i2","web","default","app","10.0.0.2","bosh"],
                    ["i3","web","default","app","10.0.0.3","bosh"]]}"#;

pub(crate) struct Fleet {
    pub(crate) folder: TempDir,
    pub(crate) authority: TestAuthority,
    pub(crate) address: SocketAddr,
    pub(crate) issuer: Running,
    pub(crate) agents: Vec<Running>,
    /// Environment of agents that start from now on.
    pub(crate) environment: Vec<(&'static str, String)>,
}

impl Fleet {
    pub(crate) fn start() -> Self {
        let (folder, authority) = (memory(), TestAuthority::new("old"));
        let path = |name: &str| folder.path().join(name);
        fs::write(path("records.json"), RECORDS).unwrap();
        fs::write(path("trust.crt"), authority.certificate()).unwrap();
        let address = free_address();
        let (ca, key) = (authority.certificate_path(), authority.key_path());
        let issuer = issuer(
            folder.path(),
            address,
            &["--ca", text(&ca), "--ca-key", text(&key)],
        );
        let fleet = Self {
            folder,
            authority,
            address,
            issuer,
            agents: Vec::new(),
            environment: Vec::new(),
        };
        until("the issuer", || {
            std::net::TcpStream::connect(address).is_ok()
        });
        fleet
    }

    /// Starts the stopped issuer again, with metrics.
    pub(crate) fn start_issuer(&mut self, metrics: SocketAddr) {
        self.issuer = issuer(
            self.folder.path(),
            self.address,
            &["--metrics", &metrics.to_string()],
        );
        until("the issuer", || {
            std::net::TcpStream::connect(self.address).is_ok()
        });
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn token(&self, instance: &str) -> String {
        let state = self.path("state");
        let output = program()
            .args(["token", "--state", text(&state), "--instance", instance])
            .args(["--minutes", "30"])
            .output()
            .unwrap();
        assert!(output.status.success());
        String::from_utf8(output.stdout).unwrap()
    }

    pub(crate) fn agent(&mut self, instance: &str, token: &str, more: &[&str]) {
        let file = self.path(&format!("{instance}.token"));
        fs::write(&file, token).unwrap();
        let agent = self.start_agent(instance, more);
        self.agents.push(agent);
    }

    /// Starts an agent with the token that its file has.
    pub(crate) fn start_agent(&self, instance: &str, more: &[&str]) -> Running {
        let file = self.path(&format!("{instance}.token"));
        let (issuer, folder, trust) = (
            self.address.to_string(),
            self.path(instance),
            self.path("trust.crt"),
        );
        let mut arguments = vec![
            "agent",
            "--issuer",
            &issuer,
            "--instance",
            instance,
            "--folder",
            text(&folder),
            "--trust",
            text(&trust),
            "--token",
            text(&file),
            "--interval",
            "1",
        ];
        if !more.contains(&"--spread") {
            arguments.extend(["--spread", "5"]);
        }
        arguments.extend(more);
        Running::start_with(&arguments, &self.path("log"), &self.environment)
    }

    pub(crate) fn pair(&self, instance: &str, role: &str) -> PathBuf {
        self.path(instance).join(role)
    }

    pub(crate) fn has_pairs(&self, instance: &str) -> bool {
        ["instance", "health.bosh-dns", "api.bosh-dns"]
            .iter()
            .all(|role| read_pair(&self.pair(instance, role), "instance").is_ok())
    }

    pub(crate) fn rotate(&self, arguments: &[&str]) -> Command {
        let state = self.path("state");
        let mut command = program();
        command.args(["rotate-ca", "--state", text(&state)]);
        if !arguments.contains(&"--settle") {
            command.args(["--settle", "1"]);
        }
        command.args(arguments);
        command
    }

    /// Returns whether every pair of an instance is issued by the CA and trusts these CAs.
    pub(crate) fn follows(
        &self,
        instance: &str,
        issuer: &TestAuthority,
        trusted: &[&TestAuthority],
    ) -> bool {
        ["instance", "health.bosh-dns", "api.bosh-dns"]
            .iter()
            .all(|role| {
                let folder = self.pair(instance, role);
                let pair = read_pair(&folder, "instance").unwrap();
                assert!(matches(&pair));
                let bundle = fs::read_to_string(folder.join("ca.crt")).unwrap();
                pair.certificate.ends_with(&issuer.certificate())
                    && bundle
                        == trusted
                            .iter()
                            .map(|ca| ca.certificate())
                            .collect::<String>()
            })
    }
}

fn issuer(folder: &Path, address: SocketAddr, more: &[&str]) -> Running {
    let (state, records) = (folder.join("state"), folder.join("records.json"));
    let words = [
        "issuer",
        "--state",
        text(&state),
        "--records",
        text(&records),
        "--listen",
    ];
    Running::start(
        &[&words[..], &[&address.to_string()], more].concat(),
        &folder.join("log"),
    )
}

pub(crate) fn said(output: &Output) -> String {
    String::from_utf8_lossy(&[output.stdout.as_slice(), &output.stderr].concat()).into_owned()
}

fn certificate(folder: &Path) -> String {
    let pair = read_pair(folder, "instance").unwrap();
    openssl(
        &["x509", "-noout", "-subject", "-ext", "subjectAltName"],
        pair.certificate.as_bytes(),
    )
    .unwrap()
}

#[test]
fn agents_obtain_only_own_names() {
    let mut fleet = Fleet::start();
    let token = fleet.token("i1");
    let metrics = free_address();
    fleet.agent("i1", &token, &["--metrics", &metrics.to_string()]);
    until("the pairs of i1", || fleet.has_pairs("i1"));
    let own = certificate(&fleet.pair("i1", "instance"));
    assert!(own.contains("CN = i1") || own.contains("CN=i1"), "{own}");
    assert!(
        own.contains("DNS:i1") && own.contains("IP Address:10.0.0.1"),
        "{own}"
    );
    let role = certificate(&fleet.pair("i1", "health.bosh-dns"));
    assert!(
        role.contains("DNS:health.bosh-dns, DNS:i1, IP Address:10.0.0.1"),
        "{role}"
    );
    until("the token's end", || !fleet.path("i1.token").exists());
    until("metrics", || {
        get(metrics, "/metrics")
            .is_some_and(|text| text.contains("bosh_dns_identity_renewals_total 3"))
    });

    // An operator sees what the agent has got, until when.
    let log = fs::read_to_string(fleet.path("log")).unwrap();
    for pair in ["instance", "health.bosh-dns", "api.bosh-dns"] {
        let is_told = |line: &str| {
            line.contains("INFO")
                && line.contains("certificate issued")
                && line.contains(&format!("pair=\"{pair}\""))
                && line.contains("ends=")
        };
        assert!(log.lines().any(is_told), "{pair}: {log}");
    }

    // The token was used; it also belongs to another instance.
    fleet.agent("i2", &token, &[]);
    thread::sleep(Duration::from_secs(3));
    assert!(!fleet.pair("i2", "instance").exists());
    fs::write(fleet.path("i2.token"), fleet.token("i2")).unwrap();
    until("the pairs of i2", || fleet.has_pairs("i2"));

    // With the pair of i1, the pair of i2 and names of i2 are refused.
    let folder = fleet.pair("i1", "instance");
    let request = |body: &str| {
        let (crt, key, ca) = (
            folder.join("instance.crt"),
            folder.join("instance.key"),
            folder.join("ca.crt"),
        );
        let address = fleet.address;
        let output = Command::new("curl")
            .args([
                "--silent",
                "--cert",
                text(&crt),
                "--key",
                text(&key),
                "--cacert",
                text(&ca),
            ])
            .args([
                "--connect-to",
                &format!("identity.bosh-dns:443:{address}"),
                "--data",
                body,
            ])
            .args([
                "--header",
                "content-type: application/json",
                "https://identity.bosh-dns/v1/pair",
            ])
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", said(&output));
        said(&output)
    };
    let body = |instance: &str, names: &str| {
        format!(
            r#"{{"instance":"{instance}","role":null,"names":[{names}],"addresses":null,"request":""}}"#
        )
    };
    let answer = request(&body("i2", ""));
    assert!(answer.contains("does not permit requests for"), "{answer}");
    let answer = request(&body("i1", r#""i2.web.default.app.bosh""#));
    assert!(answer.contains("does not belong to instance"), "{answer}");
    let answer = request(&body("i1", ""));
    assert!(answer.contains("not signed with its key"), "{answer}");
    // A role's certificate does not identify an instance.
    let folder = fleet.pair("i1", "health.bosh-dns");
    let (crt, key) = (folder.join("instance.crt"), folder.join("instance.key"));
    let output = Command::new("curl")
        .args([
            "--silent",
            "--insecure",
            "--cert",
            text(&crt),
            "--key",
            text(&key),
            "--data",
            &body("i1", ""),
        ])
        .args([
            "--header",
            "content-type: application/json",
            &format!("https://{}/v1/pair", fleet.address),
        ])
        .output()
        .unwrap();
    assert!(
        said(&output).contains("does not permit requests for"),
        "{}",
        said(&output)
    );

    let mut secrets = vec![token, String::from_utf8(fleet.authority.key()).unwrap()];
    for (instance, role) in [
        ("i1", "instance"),
        ("i1", "api.bosh-dns"),
        ("i2", "instance"),
    ] {
        secrets.push(
            read_pair(&fleet.pair(instance, role), "instance")
                .unwrap()
                .key
                .to_string(),
        );
    }
    assert_hidden(&fleet.path("log"), &secrets);
}

#[test]
fn owner_gets_keys_of_roles() {
    if !root() {
        return;
    }
    let nobody = nix::unistd::User::from_name("nobody").unwrap().unwrap();
    let mut fleet = Fleet::start();
    let token = fleet.token("i1");
    fleet.agent("i1", &token, &["--owner", "nobody"]);
    until("the pairs of i1", || fleet.has_pairs("i1"));
    for (role, file, owner, mode) in [
        ("instance", "instance.key", 0, 0o600),
        (
            "health.bosh-dns",
            "instance.key",
            nobody.uid.as_raw(),
            0o600,
        ),
        ("api.bosh-dns", "instance.pem", nobody.uid.as_raw(), 0o600),
        ("api.bosh-dns", "instance.crt", 0, 0o644),
    ] {
        let facts = fs::metadata(fleet.pair("i1", role).join(file)).unwrap();
        assert_eq!(
            (facts.uid(), facts.mode() & 0o777),
            (owner, mode),
            "{role}/{file}"
        );
    }
    let refused = program()
        .args([
            "agent",
            "--issuer",
            "h:1",
            "--instance",
            "i",
            "--folder",
            "f",
            "--trust",
            "t",
        ])
        .args(["--owner", "no-such-user"])
        .output()
        .unwrap();
    assert!(
        !refused.status.success() && said(&refused).contains("no such user"),
        "{}",
        said(&refused)
    );
}

/// A fleet whose agents have their pairs and have reported them.
pub(crate) fn converged(instances: &[&str]) -> Fleet {
    let mut fleet = Fleet::start();
    for instance in instances {
        let token = fleet.token(instance);
        fleet.agent(instance, &token, &[]);
    }
    until("all pairs", || {
        instances.iter().all(|instance| fleet.has_pairs(instance))
    });
    until("reports of all agents", || {
        let members = StateFolder::open(fleet.path("state"))
            .unwrap()
            .members()
            .unwrap();
        members
            .values()
            .filter(|member| member.generation == 1)
            .count()
            == instances.len()
    });
    fleet
}

#[test]
fn stopped_return_resumes() {
    let mut fleet = converged(&["i1", "i2"]);
    let (new, both) = (TestAuthority::new("new"), ["i1", "i2"]);
    let (ca, key) = (new.certificate_path(), new.key_path());
    let rotate = |fleet: &Fleet, arguments: &[&str]| {
        let output = fleet.rotate(arguments).output().unwrap();
        (output.status.success(), said(&output))
    };
    let (done, text) = rotate(&fleet, &["--ca", text(&ca), "--ca-key", text(&key)]);
    assert!(done && text.contains("step 3 of 3"), "{text}");
    assert!(
        both.iter()
            .all(|instance| fleet.follows(instance, &new, &[&new]))
    );

    // An agent is down: the return waits after its first step and is interrupted by a signal.
    fleet.agents[1].0.kill().unwrap();
    fleet.agents[1].0.wait().unwrap();
    for arguments in [["--back"], ["--resume"]] {
        let log = fleet.path("rotation.log");
        let file = fs::File::create(&log).unwrap();
        let mut rotation = Running(fleet.rotate(&arguments).stdout(file).spawn().unwrap());
        until("the wait for i2", || {
            fs::read_to_string(&log)
                .unwrap()
                .contains("waiting for 1 of 2")
        });
        assert!(!rotation.stop(), "a stopped rotation is not a success");
        until("trust in both", || {
            fleet.follows("i1", &new, &[&new, &fleet.authority])
        });
    }
    // The rotation continues in its direction, although the issuing CA is the new one.
    fleet.agents.remove(1);
    fleet.agent("i2", "", &[]);
    let (done, text) = rotate(&fleet, &["--resume"]);
    assert!(
        done && text.contains("step 2 of 3") && !text.contains("step 1"),
        "{text}"
    );
    assert!(both.iter().all(|instance| fleet.follows(
        instance,
        &fleet.authority,
        &[&fleet.authority]
    )));
    let (done, text) = rotate(&fleet, &["--resume"]);
    assert!(
        !done && text.contains("no rotation was interrupted"),
        "{text}"
    );
}

#[test]
fn authority_rotates_and_returns() {
    let all = ["i1", "i2", "i3"];
    let mut fleet = converged(&all);
    let new = TestAuthority::new("new");
    let (ca, key) = (new.certificate_path(), new.key_path());

    // A CA with a defect changes nothing.
    let foreign = TestAuthority::new("foreign");
    let output = fleet
        .rotate(&["--ca", text(&ca), "--ca-key", text(&foreign.key_path())])
        .output()
        .unwrap();
    assert!(
        !output.status.success() && said(&output).contains("does not match"),
        "{}",
        said(&output)
    );

    // An agent that is down stops the rotation after the first step; going back restores the start.
    fleet.agents[2].0.kill().unwrap();
    fleet.agents[2].0.wait().unwrap();
    let output = fleet
        .rotate(&["--ca", text(&ca), "--ca-key", text(&key), "--patience", "3"])
        .output()
        .unwrap();
    let text_of = said(&output);
    assert!(
        !output.status.success() && text_of.contains("i3"),
        "{text_of}"
    );
    assert!(
        text_of.contains("step 1 of 3") && !text_of.contains("step 2 of 3"),
        "{text_of}"
    );
    until("trust in both", || {
        ["i1", "i2"]
            .iter()
            .all(|instance| fleet.follows(instance, &fleet.authority, &[&fleet.authority, &new]))
    });
    // The token file of i3 is missing, but not needed, because its pair is valid.
    fleet.agents.remove(2);
    fleet.agent("i3", "", &[]);
    let output = fleet.rotate(&["--back"]).output().unwrap();
    assert!(output.status.success(), "{}", said(&output));
    assert!(all.iter().all(|instance| fleet.follows(
        instance,
        &fleet.authority,
        &[&fleet.authority]
    )));

    // All three steps, while a reader finds only pairs that every bundle of the fleet verifies.
    let mut rotation = Running(
        fleet
            .rotate(&["--ca", text(&ca), "--ca-key", text(&key)])
            .stdout(std::process::Stdio::null())
            .spawn()
            .unwrap(),
    );
    let mut read = 0;
    let status = loop {
        for (server, client) in [("i1", "i2"), ("i2", "i3"), ("i3", "i1")] {
            let pair = read_pair(&fleet.pair(server, "health.bosh-dns"), "instance").unwrap();
            let bundle = fleet.pair(client, "health.bosh-dns").join("ca.crt");
            let leaf = fleet.path("leaf.crt");
            fs::write(&leaf, &pair.certificate).unwrap();
            openssl(&["verify", "-CAfile", text(&bundle), text(&leaf)], b"").unwrap();
            read += 1;
        }
        if let Some(status) = rotation.0.try_wait().unwrap() {
            break status;
        }
        thread::sleep(Duration::from_millis(50));
    };
    assert!(
        status.success() && read > 10,
        "{status}, {read} pairs verified"
    );
    assert!(
        all.iter()
            .all(|instance| fleet.follows(instance, &new, &[&new]))
    );
}

#[test]
fn closed_output_ends_no_rotation() {
    let fleet = Fleet::start();
    let new = TestAuthority::new("new");
    let (certificate, key) = (new.certificate_path(), new.key_path());
    let arguments = ["--ca", text(&certificate), "--ca-key", text(&key)];
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let status = fleet.rotate(&arguments).stdout(writer).status().unwrap();
    assert!(status.success(), "{status}");
}
