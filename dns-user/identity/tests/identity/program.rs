//! The program as a process: sources of identities, sockets, kills, and commands.

use std::{
    fs,
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    path::{Path, PathBuf},
    process::{Child, Command, Output},
    thread,
    time::{Duration, Instant},
};
use test_support::{free_address, requirements::met};

use dns_identity::{
    folder::read_pair,
    run::{self, ControlCommand as Order, Reply},
};
use serde_json::json;
use tempfile::TempDir;

use crate::{
    authorities::TestAuthority,
    rotator::{container, guid, joined, matches, memory},
    tools::{fires, text},
};

/// Longer than any step takes on a busy machine.
const LIMIT: Duration = Duration::from_secs(600);

pub(crate) fn program() -> Command {
    Command::new(env!("CARGO_BIN_EXE_bosh-dns-identity"))
}

/// A process that is killed at the end of the test.
pub(crate) struct Running(pub(crate) Child);

impl Drop for Running {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Running {
    /// Starts the program; everything it logs is appended to `log`.
    pub(crate) fn start(arguments: &[&str], log: &Path) -> Self {
        Self::start_with(arguments, log, &[])
    }

    pub(crate) fn start_with(
        arguments: &[&str],
        log: &Path,
        environment: &[(&str, String)],
    ) -> Self {
        let log = fs::File::options()
            .create(true)
            .append(true)
            .open(log)
            .unwrap();
        let mut program = program();
        program
            .args(arguments)
            .env("RUST_LOG", "trace")
            .envs(environment.iter().cloned());
        Self(program.stderr(log).spawn().unwrap())
    }

    /// Sends SIGTERM; returns whether the process exited successfully.
    pub(crate) fn stop(&mut self) -> bool {
        let id = nix::unistd::Pid::from_raw(self.0.id().cast_signed());
        nix::sys::signal::kill(id, nix::sys::signal::Signal::SIGTERM).unwrap();
        self.0.wait().unwrap().success()
    }
}

pub(crate) fn until(what: &str, mut ready: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !ready() {
        assert!(begun.elapsed() < LIMIT, "{what}: not within {LIMIT:?}");
        thread::sleep(Duration::from_millis(20));
    }
}

/// Asserts that a log has content but no secrets: keys in PEM, or tokens.
pub(crate) fn assert_hidden(log: &Path, secrets: &[impl AsRef<str>]) {
    let log = fs::read_to_string(log).unwrap();
    assert!(log.contains("INFO"), "{log}");
    assert!(!log.contains("PRIVATE KEY"), "{log}");
    let lines = secrets
        .iter()
        .flat_map(|secret| secret.as_ref().lines())
        .map(str::trim);
    for line in lines.filter(|line| !line.is_empty() && !line.starts_with("-----")) {
        assert!(!log.contains(line), "a secret is in the log");
    }
}

/// Body of a GET by HTTP/1.0.
pub(crate) fn get(address: SocketAddr, path: &str) -> Option<String> {
    let mut stream = TcpStream::connect(address).ok()?;
    write!(stream, "GET {path} HTTP/1.0\r\n\r\n").ok()?;
    let mut text = String::new();
    stream.read_to_string(&mut text).ok()?;
    text.split_once("\r\n\r\n").map(|(_, body)| body.to_owned())
}

struct World {
    authority: TestAuthority,
    folder: TempDir,
    process: Running,
}

impl World {
    fn start(source: &str) -> Self {
        let (authority, folder) = (TestAuthority::new("program"), memory());
        fs::create_dir(folder.path().join("containers")).unwrap();
        let process = Self::run(&authority, folder.path(), source);
        let world = Self {
            authority,
            folder,
            process,
        };
        world.ready();
        world
    }

    fn run(authority: &TestAuthority, folder: &Path, source: &str) -> Running {
        let path = |name: &str| text(&folder.join(name)).to_owned();
        let (ca, key) = (authority.certificate_path(), authority.key_path());
        let mut arguments = vec![
            "run",
            "--ca",
            text(&ca),
            "--ca-key",
            text(&key),
            "--key-type",
            "p-256",
        ];
        let (identities, control, containers) =
            (path("identities"), path("control"), path("containers"));
        arguments.extend([
            "--folder",
            &identities,
            "--control",
            &control,
            "--pool",
            "2",
        ]);
        let words: Vec<String> = source
            .split_whitespace()
            .map(|word| word.replace("CONTAINERS", &containers))
            .collect();
        arguments.extend(words.iter().map(String::as_str));
        Running::start(&arguments, &folder.join("log"))
    }

    fn restart(&mut self, source: &str) {
        self.process = Self::run(&self.authority, self.folder.path(), source);
        self.ready();
    }

    fn control(&self) -> PathBuf {
        self.folder.path().join("control")
    }

    fn ready(&self) {
        until("the control socket", || {
            run::send_command(&self.control(), &Order::Status).is_ok()
        });
    }

    fn identity(&self, guid: &str) -> PathBuf {
        self.folder.path().join("identities").join(guid)
    }

    fn describe(&self, name: &str, contents: &str) {
        let containers = self.folder.path().join("containers");
        fs::write(containers.join(".next"), contents).unwrap();
        fs::rename(containers.join(".next"), containers.join(name)).unwrap();
    }
}

#[test]
fn folder_of_descriptions_is_followed() {
    let metrics = free_address();
    let mut world = World::start(&format!("--containers CONTAINERS --metrics {metrics}"));
    world.describe("g1.json", r#"{"guid":"g1","internal_ip":"10.0.0.1"}"#);
    world.describe("g2.json", r#"{"guid":"g2"}"#);
    until("two pairs", || {
        ["g1", "g2"]
            .iter()
            .all(|name| read_pair(&world.identity(name), "instance").is_ok())
    });
    let certificate =
        |name: &str| read_pair(&world.identity(name), "instance").map(|pair| pair.certificate);
    let [first, second] = ["g1", "g2"].map(|name| certificate(name).unwrap());
    // A damaged description changes nothing; a corrected one does.
    world.describe("g1.json", r#"{"guid":"g1","#);
    world.describe("g2.json", r#"{"guid":"g2","ous":["app:a"]}"#);
    until("the second description", || {
        certificate("g2").unwrap() != second
    });
    assert_eq!(certificate("g1").unwrap(), first);
    fs::remove_file(world.folder.path().join("containers/g2.json")).unwrap();
    until("the end of g2", || !world.identity("g2").exists());
    assert!(world.identity("g1").exists());
    // A description without an identity is visible everywhere.
    world.describe("g9.json", r#"{"guid":"g8"}"#);
    let described = || {
        let Ok(Reply::Status(status)) = run::send_command(&world.control(), &Order::Status) else {
            panic!()
        };
        status.problems
    };
    until("the description without identity", || {
        described().len() == 2
    });
    let problem = described().remove(1);
    assert!(problem.message.contains("named after g9"), "{problem:?}");
    until("metrics of the problem", || {
        get(metrics, "/metrics")
            .is_some_and(|text| text.contains("bosh_dns_identity_without_identity 2"))
    });
    let scraped = get(metrics, "/metrics").unwrap();
    assert!(
        fires(&scraped, "BoshDnsIdentityWithoutIdentity"),
        "{scraped}"
    );
    assert!(
        scraped.contains("bosh_dns_identity_pair_failing{guid=\"g1\"} 0"),
        "{scraped}"
    );
    let (well, said) = output(&["status", "--control", text(&world.control())]);
    assert!(!well && said.contains("g9.json: no identity"), "{said}");
    fs::remove_file(world.folder.path().join("containers/g9.json")).unwrap();
    // The folder determines the identities; commands are refused.
    let create = Order::Create {
        container: container(json!({ "guid": "g3" })),
    };
    let Reply::Error(problem) = run::send_command(&world.control(), &create).unwrap() else {
        panic!()
    };
    assert!(problem.contains("--containers"), "{problem}");
    until("metrics", || {
        get(metrics, "/metrics").is_some_and(|text| {
            text.contains("bosh_dns_identity_identities 1")
                && text.contains("bosh_dns_identity_expiry_timestamp_seconds{guid=\"g1\"}")
                && text.contains("bosh_dns_identity_pool_size 2")
        })
    });
    // Reading the folder causes no further reading, except one triggered by the clock.
    let readings = || {
        let log = fs::read_to_string(world.folder.path().join("log")).unwrap();
        log.matches("reading descriptions").count()
    };
    let before = readings();
    thread::sleep(Duration::from_secs(1));
    assert!(
        before > 0 && readings() <= before + 1,
        "{before} readings, then {}",
        readings()
    );
    assert!(world.process.stop());
    let keys = [
        read_pair(&world.identity("g1"), "instance")
            .unwrap()
            .key
            .to_string(),
        { String::from_utf8(world.authority.key()).unwrap() },
    ];
    assert_hidden(&world.folder.path().join("log"), &keys);
}

#[test]
fn kill_at_any_moment_keeps_pairs() {
    let mut world = World::start("");
    let order = |number: u32| Order::Create {
        container: container(json!({ "guid": "g1", "ous": [format!("app:{number}")] })),
    };
    assert!(matches!(
        run::send_command(&world.control(), &order(0)).unwrap(),
        Reply::Done
    ));
    let path = world.identity("g1");
    let mut number = 0;
    for round in 0..25_u64 {
        // Pairs change as fast as possible while the process is killed.
        let control = world.control();
        thread::scope(|scope| {
            let writer = scope.spawn(move || {
                let mut sent = number;
                loop {
                    sent += 1;
                    if run::send_command(&control, &order(sent)).is_err() {
                        return sent;
                    }
                }
            });
            thread::sleep(Duration::from_millis(3 + round * 2));
            world.process.0.kill().unwrap();
            world.process.0.wait().unwrap();
            number = writer.join().unwrap();
        });
        assert!(
            matches(&read_pair(&path, "instance").unwrap()),
            "round {round}"
        );
        assert!(matches(&joined(&path).unwrap()), "round {round}");
        world.restart("");
        let Reply::Status(status) = run::send_command(&world.control(), &Order::Status).unwrap()
        else {
            panic!()
        };
        assert_eq!(status.identities.len(), 1, "round {round}");
    }
    assert!(number > 25, "{number} changes");
    // The next change removes all remains.
    assert!(matches!(
        run::send_command(&world.control(), &order(number + 1)).unwrap(),
        Reply::Done
    ));
    let names: Vec<_> = fs::read_dir(&path)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.starts_with("..pair-"))
        .collect();
    assert!(names.len() <= 2, "{names:?}");
    assert!(matches!(
        run::send_command(&world.control(), &Order::Destroy { guid: guid("g1") }).unwrap(),
        Reply::Done
    ));
    assert_eq!(
        fs::read_dir(world.folder.path().join("identities"))
            .unwrap()
            .count(),
        0
    );
}

fn output(arguments: &[&str]) -> (bool, String) {
    let Output {
        status,
        stdout,
        stderr,
    } = program().args(arguments).output().unwrap();
    (
        status.success(),
        String::from_utf8_lossy(&[stdout, stderr].concat()).into_owned(),
    )
}

#[test]
fn commands_issue_and_check() {
    let (authority, folder) = (TestAuthority::new("issuing"), memory());
    let (ca, key) = (authority.certificate_path(), authority.key_path());
    let description = folder.path().join("container.json");
    fs::write(
        &description,
        r#"{"guid":"g1","internal_ip":"10.0.0.1","ous":["app:a"]}"#,
    )
    .unwrap();
    let out = folder.path().join("out");
    let issue = [
        "issue",
        "--ca",
        text(&ca),
        "--ca-key",
        text(&key),
        "--container",
        text(&description),
        "--folder",
        text(&out),
        "--key-type",
        "p-256",
    ];
    assert_eq!(output(&issue), (true, String::new()));
    assert!(matches(&read_pair(&out, "instance").unwrap()));
    let sound = (true, "no defect found\n".to_owned());
    assert_eq!(output(&["check", "--folder", text(&out)]), sound);
    assert_eq!(
        output(&["check", "--ca", text(&ca), "--ca-key", text(&key)]),
        sound
    );
    assert_eq!(output(&["check", "--ca", text(&ca)]), sound);
    let other = TestAuthority::new("other");
    let (well, said) = output(&[
        "check",
        "--ca",
        text(&ca),
        "--ca-key",
        text(&other.key_path()),
    ]);
    assert!(
        !well && said.contains("does not match the CA certificate"),
        "{said}"
    );
    // A key that others can read.
    let (well, said) = output(&["check", "--folder", text(folder.path())]);
    assert!(
        !well && said.contains("no certificate and key found"),
        "{said}"
    );
    fs::set_permissions(
        out.join("instance.key"),
        std::os::unix::fs::PermissionsExt::from_mode(0o644),
    )
    .unwrap();
    let (well, said) = output(&["check", "--folder", text(&out)]);
    assert!(
        !well && said.contains("mode 644 lets others read the key"),
        "{said}"
    );
    // Names that no instance has.
    let records = folder.path().join("records.json");
    fs::write(
        &records,
        r#"{"record_keys":["id","instance_group","network","deployment","ip","domain"],
        "record_infos":[["i1","server-ig","default","app-service","10.0.0.2","bosh"]]}"#,
    )
    .unwrap();
    let certificate = out.join("instance.crt");
    let check = [
        "check",
        "--certificate",
        text(&certificate),
        "--records",
        text(&records),
    ];
    let (well, said) = output(&check);
    assert!(
        well && said.contains("10.0.0.1: no instance has this address"),
        "{said}"
    );
    assert!(!output(&[&check[..], &["--strict"]].concat()).0);
    let (well, said) = output(&[
        "san",
        "--deployment",
        "app-service",
        "--instance-group",
        "server_ig",
        "--wildcard",
        "--records",
        text(&records),
        "--strict",
    ]);
    assert_eq!(
        (well, said.as_str()),
        (true, "*.server-ig.default.app-service.bosh\n")
    );
    let (well, said) = output(&[
        "san",
        "--deployment",
        "app-service",
        "--instance-group",
        "nobody",
        "--records",
        text(&records),
        "--strict",
    ]);
    assert!(
        !well && said.contains("no instance has this name"),
        "{said}"
    );
    // An alias has the name of the manual link.
    let manual = ["san", "--manual", "web.alias", "--strict"];
    let with_records = [&manual[..], &["--records", text(&records)]].concat();
    let aliases = folder.path().join("aliases.json");
    fs::write(
        &aliases,
        r#"{"web.alias": ["*.server-ig.default.app-service.bosh"]}"#,
    )
    .unwrap();
    let with_aliases = [&with_records[..], &["--aliases", text(&aliases)]].concat();
    assert_eq!(output(&with_aliases), (true, "web.alias\n".to_owned()));
    let ids = ["--network-id", "3", "--group-id", "7"];
    let link = ["san", "--link", "web-http", "--deployment", "app-service"];
    let short = [&link[..], &ids[..]].concat();
    assert_eq!(output(&short), (true, "q-n3s0.q-g7.bosh\n".to_owned()));
}

#[test]
fn records_give_short_names() {
    let folder = memory();
    let (manifest, records) = (
        folder.path().join("manifest.yml"),
        folder.path().join("records.json"),
    );
    let write = |feature: &str, groups: &str| {
        let text = format!(
            r#"
name: app-service
features: {{ {feature}: true }}
instance_groups:
- name: server_ig
  networks: [{{ name: default }}]
  jobs: [{{ name: server, provides: {{ address: {{ as: web }} }} }}]
variables:
- {{ name: cert, type: certificate, consumes: {{ alternative_name: {{ from: web }} }} }}
"#
        );
        fs::write(&manifest, text).unwrap();
        let text = format!(
            r#"{{"record_keys":["id","instance_group","group_ids","network","network_id","deployment","ip","domain"],
            "record_infos":[["i1","server-ig",{groups},"default","3","app-service","10.0.0.2","bosh"]]}}"#
        );
        fs::write(&records, text).unwrap();
    };
    let san = |more: &[&str]| output(&[&["san", "--manifest", text(&manifest)], more].concat());
    let known = ["--records", text(&records), "--strict"];
    write("use_short_dns_addresses", r#"["7"]"#);
    assert_eq!(
        san(&known),
        (true, "cert\n  DNS  q-n3s0.q-g7.bosh\n".to_owned())
    );
    let (well, said) = san(&[]);
    assert!(
        !well && said.contains("variable cert") && said.contains("--ids web=NETWORK-ID/GROUP-ID"),
        "{said}"
    );
    // The records do not show which of several groups belongs to the link.
    for (feature, groups) in [
        ("use_short_dns_addresses", r#"["7","9"]"#),
        ("use_link_dns_names", r#"["7"]"#),
    ] {
        write(feature, groups);
        let (well, said) = san(&known);
        assert!(
            !well && said.contains("does not show which group"),
            "{said}"
        );
        let (well, said) = san(&[&known[..], &["--ids", "web=3/7"]].concat());
        assert_eq!(
            (well, said.as_str()),
            (true, "cert\n  DNS  q-n3s0.q-g7.bosh\n")
        );
    }
    write("use_short_dns_addresses", "[]");
    let (well, said) = san(&known);
    assert!(
        !well && said.contains("no instance of server_ig.default.app-service"),
        "{said}"
    );
    assert!(!san(&["--ids", "web=x"]).0);
    let (well, said) = san(&[&known[..], &["--ids", "web=3/8"]].concat());
    assert!(
        !well && said.contains("no instance has this name"),
        "{said}"
    );
}

#[test]
fn manual_pages_cover_commands() {
    let folder = memory();
    assert!(output(&["man", "--folder", text(folder.path())]).0);
    let pages = fs::read_dir(folder.path()).unwrap().count();
    assert!(pages > 10, "{pages} pages");
    assert!(output(&["completions", "bash"]).1.contains("rotate-ca"));
}

#[test]
fn systemd_units_are_valid() {
    let installed = Command::new("systemd-analyze").arg("--version").output();
    if !met("systemd-analyze", installed.map(drop)) {
        return;
    }
    let units = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/identity/systemd");
    let folder = memory();
    let mut checked = 0;
    for unit in fs::read_dir(units).unwrap() {
        let unit = unit.unwrap();
        let installed = fs::read_to_string(unit.path()).unwrap();
        let path = folder.path().join(unit.file_name());
        fs::write(
            &path,
            installed.replace(
                "/usr/bin/bosh-dns-identity",
                env!("CARGO_BIN_EXE_bosh-dns-identity"),
            ),
        )
        .unwrap();
        let output = Command::new("systemd-analyze")
            .args(["verify", "--man=no", text(&path)])
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(
            output.status.success() && !said.contains(text(&path)),
            "{said}"
        );
        checked += 1;
    }
    assert_eq!(checked, 3);
}

#[test]
fn results_need_no_reader() {
    for arguments in [
        "san --instance-group web --deployment app",
        "check --folder /missing",
    ] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let mut program = program();
        program.args(arguments.split(' ')).stdout(writer);
        let output = program.output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stderr), "", "{arguments}");
    }
}
