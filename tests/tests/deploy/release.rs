//! A release, made with a throw-away key: complete, of exactly one version, verifiable, installable; its image
//! runs in a container.

use std::{
    fs::{self, File},
    net::SocketAddr,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use hickory_proto::rr::RecordType;
use serde_json::Value;
use tempfile::TempDir;
use whole_system_tests::{
    client,
    debian::Debian,
    namespace::Namespace,
    process::{capture, run, wait_until},
    requires, server,
};

use crate::packages::{FIRST, artifact, dist, once_per_run};

/// Version of the workspace, and as Debian writes it.
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Time limit that is reached only on failure.
const TIMEOUT: Duration = Duration::from_secs(120);

/// Listen address of the image's configuration.
const SERVER: ([u8; 4], u16) = ([127, 0, 0, 2], 53);

/// Packs a release of the workspace's version, signed by a new key, into `folder/dist`.
fn release(folder: &Path) -> Result<PathBuf> {
    let out = folder.join("dist");
    once_per_run("release", &out, |out| {
        let folder = TempDir::with_prefix("bdx-key-")?;
        let key = folder.path().join("key");
        run(Command::new("ssh-keygen")
            .args(["-q", "-t", "ed25519", "-N", "", "-f"])
            .arg(&key))?;
        let key = key.to_str().context("a path in UTF-8")?;
        dist(&["release", VERSION, "--key", key, "--image"], FIRST, out)
    })?;
    Ok(out)
}

/// Returns the output of a shell script with these arguments.
fn shell(script: &str, arguments: &[&Path]) -> Result<String> {
    capture(
        Command::new("bash")
            .args(["-euo", "pipefail", "-c", script, "sh"])
            .args(arguments),
    )
}

/// Whether ssh-keygen accepts the signature of the checksums.
fn is_signed(out: &Path) -> Result<bool> {
    let verified = Command::new("ssh-keygen")
        .args([
            "-Y",
            "verify",
            "-n",
            "bosh-dns-xdp-release",
            "-I",
            "releases@bosh-dns-xdp",
            "-f",
        ])
        .arg(out.join("allowed_signers"))
        .arg("-s")
        .arg(out.join("SHA256SUMS.sig"))
        .stdin(File::open(out.join("SHA256SUMS"))?)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()?;
    Ok(verified.success())
}

#[test]
fn release_is_signed_and_installable() {
    let folder = TempDir::with_prefix("bdx-release-").unwrap();
    let Some(machine) = Debian::boot().unwrap() else {
        return;
    };
    let out = release(folder.path()).unwrap();

    // Checksums cover every file but their own, and the signature covers the checksums.
    run(Command::new("sha256sum")
        .args(["--quiet", "--check", "SHA256SUMS"])
        .current_dir(&out))
    .unwrap();
    let sums = fs::read_to_string(out.join("SHA256SUMS")).unwrap();
    for entry in fs::read_dir(&out).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        let is_signature =
            ["SHA256SUMS", "SHA256SUMS.sig", "allowed_signers"].contains(&name.as_str());
        assert!(
            is_signature || sums.contains(&format!("  {name}\n")),
            "{name}: {sums}"
        );
    }
    assert!(is_signed(&out).unwrap());
    fs::write(out.join("SHA256SUMS"), sums.replacen("0", "1", 1)).unwrap();
    assert!(!is_signed(&out).unwrap(), "changed checksums are accepted");
    fs::write(out.join("SHA256SUMS"), sums).unwrap();

    // Licences and notices are in each artifact.
    let debian_version = VERSION.replacen('-', "~", 1);
    let packages = ["bosh-dns-xdp", "bosh-dns-identity", "bosh-dns-xdp-load"]
        .map(|name| (out.join(format!("{name}_{debian_version}_amd64.deb")), name));
    for (package, name) in &packages {
        let notices = format!("./usr/share/doc/{name}/third-party-notices.gz");
        let script =
            format!("dpkg-deb --fsys-tarfile \"$1\" | tar --extract --to-stdout {notices} | zcat");
        assert_noticed(&shell(&script, &[package]).unwrap());
        let copyright = format!("./usr/share/doc/{name}/copyright");
        let script =
            format!("dpkg-deb --fsys-tarfile \"$1\" | tar --extract --to-stdout {copyright}");
        assert!(shell(&script, &[package]).unwrap().contains(&notices[1..]));
    }
    let bosh = out.join(format!("bosh-dns-xdp-{VERSION}.tgz"));
    let license = "tar --extract --to-stdout --gzip --file \"$1\" ./license.tgz | tar --extract --to-stdout --gzip";
    assert_noticed(&shell(&format!("{license} ./NOTICE"), &[&bosh]).unwrap());
    assert!(
        shell(&format!("{license} ./LICENSE"), &[&bosh])
            .unwrap()
            .contains("Apache License")
    );
    let manifest = shell(
        "tar --extract --to-stdout --gzip --file \"$1\" ./release.MF",
        &[&bosh],
    )
    .unwrap();
    assert!(
        manifest.contains(&format!("version: {VERSION}\n")) && manifest.contains("\nlicense:\n"),
        "{manifest}"
    );
    // The errand's package has another name than that of the release bosh-dns, and is compiled from ours.
    let errand = manifest
        .split("- name: ")
        .find(|part| part.starts_with("shadow\n"));
    assert!(
        errand.is_some_and(|part| part.contains("packages: [bosh-dns-shadow]")),
        "{manifest}"
    );
    let package = manifest
        .split("- name: ")
        .find(|part| part.starts_with("bosh-dns-shadow\n"));
    assert!(
        package.is_some_and(|part| part.contains("dependencies: [bosh-dns]")),
        "{manifest}"
    );
    for (archive, files) in [
        ("jobs/shadow", "./job.MF ./monit ./templates/run.erb"),
        ("packages/bosh-dns-shadow", "./packaging"),
    ] {
        let script = format!(
            "tar --extract --to-stdout --gzip --file \"$1\" ./{archive}.tgz | tar --list --gzip | grep -v /$ | xargs"
        );
        assert_eq!(shell(&script, &[&bosh]).unwrap().trim(), files);
    }
    let image = out.join(format!("bosh-dns-xdp-{VERSION}-oci.tar"));
    let layer = "for blob in $(tar --list --file \"$1\" | grep blobs/sha256/.); do tar --extract --to-stdout --file \"$1\" \
                 \"$blob\" | tar --extract --to-stdout ./licenses/third-party-notices.txt 2>/dev/null && exit; done";
    assert_noticed(&shell(layer, &[&image]).unwrap());
    assert_noticed(&fs::read_to_string(out.join("third-party-notices.txt")).unwrap());

    // The bill of materials is of this version, and names the programs of each crate.
    let bill: Value =
        serde_json::from_slice(&fs::read(out.join("bosh-dns-xdp.cdx.json")).unwrap()).unwrap();
    assert_eq!(bill["metadata"]["component"]["version"], VERSION);
    let components = bill["components"].as_array().unwrap();
    let programs_of = |name: &str| {
        let of_name = components
            .iter()
            .find(|component| component["name"] == name)
            .unwrap();
        of_name["properties"][0]["value"].as_str().unwrap()
    };
    assert!(
        programs_of("async-nats") == "bosh-dns-sync"
            && programs_of("aya-ebpf") == "bosh-dns-xdp bosh-dns-xdp-load"
    );

    // The package of exactly this version.
    for (package, _) in &packages {
        fs::copy(package, machine.shared().join(package.file_name().unwrap())).unwrap();
    }
    machine.run("dpkg --install *.deb").unwrap();
    for (_, package) in packages {
        let installed = machine
            .run(&format!(
                "dpkg-query --show --showformat '${{Version}}' {package}"
            ))
            .unwrap();
        assert_eq!(installed.trim(), debian_version);
        let said = machine.run(&format!("{package} --version")).unwrap();
        assert!(said.split_whitespace().nth(1) == Some(VERSION), "{said}");
        let manual = machine
            .run(&format!("zcat /usr/share/man/man[18]/{package}.[18].gz"))
            .unwrap();
        assert!(manual.contains(VERSION), "{manual}");
        machine
            .run(&format!(
                "bash -n /usr/share/bash-completion/completions/{package}"
            ))
            .unwrap();
    }
}

fn assert_noticed(notices: &str) {
    assert!(
        notices.lines().any(|line| line.starts_with("tokio ")),
        "{} bytes",
        notices.len()
    );
}

/// Containers of podman, with storage of their own.
struct Podman {
    folder: TempDir,
    namespace: Namespace,
}

/// Runs podman with `$1` as its folder and a unified hierarchy of control groups, which crun demands.
const PODMAN: &str = r#"mount -t cgroup2 cgroup2 /sys/fs/cgroup
folder=$1
shift
exec podman --storage-driver vfs --cgroup-manager cgroupfs --events-backend none --root "$folder/storage" \
  --runroot "$folder/run" "$@""#;

/// Limits that a machine without CAP_SYS_RESOURCE can set, where podman's defaults are above its own; without a
/// control group, for which crun raises a limit.
const LIMITS: [&str; 8] = [
    "--cgroups",
    "disabled",
    "--ulimit",
    "nofile=4096:4096",
    "--ulimit",
    "nproc=1000:1000",
    "--log-driver",
    "k8s-file",
];

impl Podman {
    fn run(&self, arguments: &[&str]) -> Result<String> {
        let mut podman = self.namespace.command("unshare")?;
        podman
            .args([
                "--mount",
                "--propagation",
                "private",
                "sh",
                "-euc",
                PODMAN,
                "sh",
            ])
            .arg(self.folder.path());
        capture(podman.args(arguments))
    }
}

impl Drop for Podman {
    fn drop(&mut self) {
        // Mounts of containers would keep the folder.
        let _ = self.run(&["rm", "--all", "--force", "--time", "0"]);
    }
}

/// Options of the documented command that give the container its privileges.
const PRIVILEGES: [&str; 8] = [
    "--cap-add",
    "BPF",
    "--cap-add",
    "NET_ADMIN",
    "--cap-add",
    "PERFMON",
    "--security-opt",
    "seccomp=unconfined",
];

/// Returns podman's options for what the compose file permits.
fn composed() -> Vec<String> {
    let compose = include_str!("../../../deploy/container/compose.yml");
    for line in [
        "network_mode: host",
        "cap_drop: [ALL]",
        "security_opt: [seccomp=unconfined]",
        "read_only: true",
        "tmpfs: [/run]",
    ] {
        assert!(compose.contains(line), "{line}");
    }
    let mut options = [
        "--cap-drop",
        "ALL",
        "--security-opt",
        "seccomp=unconfined",
        "--read-only",
    ]
    .map(str::to_owned)
    .to_vec();
    options.extend(["--tmpfs".to_owned(), "/run".to_owned()]);
    let (_, added) = compose.split_once("cap_add: [").expect("capabilities");
    let (added, _) = added.split_once(']').expect("the end of the list");
    for capability in added.split(", ") {
        options.extend(["--cap-add".to_owned(), capability.to_owned()]);
    }
    options
}

#[test]
fn image_answers_with_and_without_privileges() {
    requires!(namespaces, bpf, programs(&["podman"]));
    for page in [
        include_str!("../../../README.md"),
        include_str!("../../../docs/one-machine.md"),
    ] {
        assert!(
            page.contains(&PRIVILEGES.join(" ")),
            "the documented command has other options"
        );
    }
    let composed = composed();
    let composed: Vec<&str> = composed.iter().map(String::as_str).collect();
    let folder = TempDir::with_prefix("bdx-image-").unwrap();
    let out = release(folder.path()).unwrap();
    let podman = Podman {
        folder: TempDir::with_prefix("bdx-podman-").unwrap(),
        namespace: Namespace::new("image").unwrap(),
    };
    let image = artifact(&out, "bosh-dns-xdp-", "-oci.tar").unwrap();
    podman
        .run(&["load", "--input", image.to_str().unwrap()])
        .unwrap();
    let records = folder.path().join("records");
    fs::create_dir(&records).unwrap();
    fs::write(
        records.join("records.json"),
        server::records_of_groups(&[1]),
    )
    .unwrap();
    let volume = format!("{}:/var/lib/bosh-dns-xdp:ro", records.display());
    for (name, privileges, path) in [
        ("fast", &PRIVILEGES[..], "interface"),
        ("composed", &composed[..], "interface"),
        ("plain", &[], "userspace"),
    ] {
        let common = [
            "run",
            "--detach",
            "--name",
            name,
            "--network",
            "host",
            "--volume",
            &volume,
        ];
        podman
            .run(&[&common[..], &LIMITS, privileges, &["bosh-dns-xdp"]].concat())
            .unwrap();
        let explained = || {
            podman
                .run(&["logs", name])
                .unwrap_or_else(|error| error.to_string())
        };
        let status = || -> Result<Value> {
            // Exit code 1 reports a failed part.
            let said = podman.run(&["exec", name, "/bosh-dns-xdp", "status", "--json"])?;
            Ok(serde_json::from_str(&said)?)
        };
        wait_until("the container's answer", TIMEOUT, || {
            ask(&podman.namespace).is_ok()
        })
        .unwrap_or_else(|error| panic!("{name}: {error}\n{}", explained()));
        if path == "interface" {
            wait_until("an answer of the interface", TIMEOUT, || {
                let _ = ask(&podman.namespace);
                status().is_ok_and(|status| status["replies"]["fast"].as_u64() > Some(0))
            })
            .unwrap_or_else(|error| panic!("{name}: {error}\n{}", explained()));
        } else {
            wait_until("the reason", TIMEOUT, || {
                explained().contains("CAP_BPF") && explained().contains("seccomp")
            })
            .unwrap_or_else(|error| panic!("{name}: {error}\n{}", explained()));
        }
        podman
            .run(&["rm", "--force", "--time", "10", name])
            .unwrap();
    }
}

/// With stripped arm64 programs in the folder `ARM64_PROGRAMS`, which run in an emulator here.
#[test]
#[ignore = "`cargo xtask arm64 test` builds the programs"]
fn artifacts_hold_both_architectures() {
    requires!(namespaces);
    let programs = PathBuf::from(std::env::var_os("ARM64_PROGRAMS").unwrap());
    let folder = TempDir::with_prefix("bdx-arm64-").unwrap();
    let out = folder.path().join("dist");
    let options = [
        "dist",
        "--image",
        "--built-arm64",
        programs.to_str().unwrap(),
    ];
    dist(&options, FIRST, &out).unwrap();
    for package in ["bosh-dns-xdp", "bosh-dns-identity", "bosh-dns-xdp-load"] {
        let deb = artifact(&out, &format!("{package}_"), "_arm64.deb").unwrap();
        assert_eq!(
            shell("dpkg-deb --field \"$1\" Architecture", &[&deb])
                .unwrap()
                .trim(),
            "arm64"
        );
        let unpacked = folder.path().join(package);
        run(Command::new("dpkg").arg("-x").arg(&deb).arg(&unpacked)).unwrap();
        let program = unpacked.join("usr/bin").join(package);
        let said = capture(
            Command::new("qemu-aarch64-static")
                .args(["-L", "/usr/aarch64-linux-gnu"])
                .arg(program)
                .arg("--version"),
        );
        assert_eq!(said.unwrap().split_whitespace().nth(1), Some(VERSION));
        run(Command::new("lintian")
            .args(["--allow-root", "--fail-on", "error,warning"])
            .arg(deb))
        .unwrap();
    }
    let bosh = artifact(&out, "bosh-dns-xdp-", ".tgz").unwrap();
    let listed = "tar --extract --to-stdout --gzip --file \"$1\" ./packages/bosh-dns.tgz | tar --list --gzip";
    let listed = shell(listed, &[&bosh]).unwrap();
    for machine in ["x86_64", "aarch64"] {
        for program in ["bosh-dns-xdp", "bosh-dns-sync"] {
            assert!(
                listed.contains(&format!("bosh-dns/{machine}/{program}\n")),
                "{listed}"
            );
        }
    }
    let image = artifact(&out, "bosh-dns-xdp-", "-oci.tar").unwrap();
    let podman = Podman {
        folder: TempDir::with_prefix("bdx-podman-").unwrap(),
        namespace: Namespace::new("images").unwrap(),
    };
    let source = format!("oci-archive:{}", image.display());
    for architecture in ["amd64", "arm64"] {
        let id = podman
            .run(&["pull", "--quiet", "--arch", architecture, &source])
            .unwrap();
        let shown = podman
            .run(&[
                "image",
                "inspect",
                "--format",
                "{{.Architecture}}",
                id.trim(),
            ])
            .unwrap();
        assert_eq!(shown.trim(), architecture);
    }
}

/// Looks up the only name in the namespace of the containers.
fn ask(namespace: &Namespace) -> Result<()> {
    let query = client::query("q-s0.q-g1.bosh.", RecordType::A, None)?;
    let reply = namespace.run(|| client::ask(SocketAddr::from(SERVER), &query))??;
    ensure!(!client::addresses(&reply).is_empty(), "no address");
    Ok(())
}
