//! A machine of a fleet: namespaces with a private network, bpffs and `/var/vcap`, and a user vcap.

use std::{
    fs,
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, ensure};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::{Value, json};
use tempfile::TempDir;
use whole_system_tests::{
    process::{Kept, capture, run, status_line},
    server,
};

/// Sets up the namespaces; `$1` is the folder that becomes `/var/vcap`.
const SET_UP: &str = r#"
set -eu
ip link set lo up
mount -t bpf -o mode=0700 bpf /sys/fs/bpf
mount -t overlay -o "lowerdir=/etc,upperdir=$1/etc,workdir=$1/work" overlay /etc
mount -t tmpfs tmpfs /var
# Servers of other tests may pin below /run, where each attacher takes over the owner of all pins.
mount -t tmpfs tmpfs /run
mkdir /var/vcap /var/tmp
mount --bind "$1/vcap" /var/vcap
echo ready
exec sleep infinity
"#;

/// The namespaces, removed on drop.
pub(crate) struct Machine {
    /// A process that keeps the namespaces alive; ended first.
    holder: Kept,
    /// Contents of `/var/vcap`, and changed files of `/etc`.
    folder: TempDir,
}

impl Machine {
    /// Creates a machine with the package and the records of an instance, but without a job.
    pub(crate) fn new() -> Result<Self> {
        let folder = TempDir::with_prefix("bdx-vcap-")?;
        // The user vcap must reach its files.
        run(Command::new("chmod").arg("755").arg(folder.path()))?;
        let etc = folder.path().join("etc");
        fs::create_dir(&etc)?;
        fs::create_dir(folder.path().join("work"))?;
        let with = |file: &str, line: &str| -> Result<()> {
            let text = fs::read_to_string(Path::new("/etc").join(file))?;
            Ok(fs::write(etc.join(file), format!("{text}{line}\n"))?)
        };
        with("passwd", "vcap:x:2001:2001::/home/vcap:/bin/bash")?;
        with("group", "vcap:x:2001:")?;
        let vcap = folder.path().join("vcap");
        for below in ["jobs", "instance/dns", "sys/log", "sys/run", "data"] {
            fs::create_dir_all(vcap.join(below))?;
        }
        fs::write(
            vcap.join("instance/dns/records.json"),
            server::records_of_groups(&[1, 3]),
        )?;
        fs::write(
            vcap.join("instance/health.json"),
            json!({"state": "running"}).to_string(),
        )?;
        install_package(&vcap)?;

        let mut command = Command::new("unshare");
        command.args([
            "--mount",
            "--net",
            "--propagation=private",
            "sh",
            "-c",
            SET_UP,
            "sh",
        ]);
        command
            .arg(folder.path())
            .stdin(Stdio::null())
            .stdout(Stdio::piped());
        let mut child = command.spawn()?;
        let mut said = String::new();
        BufReader::new(child.stdout.take().context("no standard output")?).read_line(&mut said)?;
        let holder = Kept::from(child);
        ensure!(said == "ready\n", "the namespaces could not be set up");
        Ok(Self { holder, folder })
    }

    pub(crate) fn vcap(&self) -> PathBuf {
        self.folder.path().join("vcap")
    }

    pub(crate) fn command(&self, program: &str) -> Command {
        let mut command = Command::new("nsenter");
        command
            .arg("--target")
            .arg(self.holder.pid().to_string())
            .args(["--mount", "--net", "--", program]);
        let path = std::env::var("PATH").unwrap_or_default();
        command.env("PATH", format!("/var/vcap/packages/bosh-dns/bin:{path}"));
        command
    }

    /// Runs a shell command inside; returns its output.
    pub(crate) fn run(&self, line: &str) -> Result<String> {
        capture(self.command("bash").args(["-c", line]))
    }

    /// Runs a shell command inside until this is dropped; `log` is a file in `/var/vcap/data`, where it runs.
    pub(crate) fn spawn(&self, line: &str, log: &str) -> Result<Kept> {
        let script = format!("cd /var/vcap/data && exec {line} >{log} 2>&1");
        Kept::spawn(self.command("sh").args(["-c", &script]))
    }

    /// Runs the script of a job that monit runs, with an order such as `start`.
    pub(crate) fn control(&self, job: &str, order: &str) -> Result<String> {
        let script = job.replace('-', "_");
        self.run(&format!("/var/vcap/jobs/{job}/bin/{script}_ctl {order}"))
    }

    /// Returns the file with the process id of a job.
    pub(crate) fn pid_file(&self, job: &str) -> PathBuf {
        self.vcap().join(format!("sys/run/{job}/{job}.pid"))
    }

    /// Returns the process id of a job, which runs as vcap.
    pub(crate) fn pid(&self, job: &str) -> Result<String> {
        let pid = fs::read_to_string(self.pid_file(job))?.trim().to_owned();
        let users = status_line(&pid, "Uid")?;
        ensure!(users.contains("2001"), "not vcap: {users}");
        Ok(pid)
    }

    /// Returns the metrics of a job at a port.
    pub(crate) fn metrics(&self, port: u16) -> Result<String> {
        self.run(&format!(
            "exec 3<>/dev/tcp/127.0.0.1/{port}; printf 'GET /metrics HTTP/1.0\\r\\n\\r\\n' >&3; cat <&3"
        ))
    }

    /// Renders the job `bosh-dns` with these properties and installs it.
    pub(crate) fn deploy(&self, properties: Value) -> Result<()> {
        self.deploy_job("bosh-dns", properties)
    }

    /// Renders a job with these properties and installs it.
    pub(crate) fn deploy_job(&self, name: &str, properties: Value) -> Result<()> {
        let results = crate::job::render_job(name, &[json!({"properties": properties})])?;
        let files = results.into_iter().next().context("nothing was rendered")?;
        let job = self.vcap().join("jobs").join(name);
        fs::remove_dir_all(&job).ok();
        crate::job::write(&files.map_err(anyhow::Error::msg)?, &job)?;
        run(Command::new("chown").args(["-R", "root:2001"]).arg(job))
    }
}

impl Drop for Machine {
    /// Ends what the scripts of jobs started, also after a failure: servers leave the shell that starts them.
    fn drop(&mut self) {
        let holder = PathBuf::from(format!("/proc/{}", self.holder.pid()));
        let Ok(ours) = fs::read_link(holder.join("ns/mnt")) else {
            return;
        };
        for process in fs::read_dir("/proc").into_iter().flatten().flatten() {
            let is_ours = fs::read_link(process.path().join("ns/mnt")).is_ok_and(|its| its == ours);
            let number = process
                .file_name()
                .to_str()
                .and_then(|name| name.parse().ok());
            if let (true, Some(number)) = (is_ours, number) {
                // It may have ended meanwhile.
                let _ = kill(Pid::from_raw(number), Signal::SIGKILL);
            }
        }
    }
}

/// Compiles the package as a BOSH worker does: with its packaging script.
fn install_package(vcap: &Path) -> Result<()> {
    let source = crate::job::bosh().join("packages/bosh-dns");
    let work = vcap.join("data/compile");
    let programs = work.join("bosh-dns").join(std::env::consts::ARCH);
    fs::create_dir_all(&programs)?;
    fs::copy(source.join("process.sh"), work.join("bosh-dns/process.sh"))?;
    let program = server::program()?;
    let stripped = programs.join("bosh-dns-xdp");
    run(Command::new("objcopy")
        .arg("--strip-debug")
        .arg(&program)
        .arg(stripped))?;
    for name in ["bosh-dns-sync", "bosh-dns-publish", "bosh-dns-identity"] {
        let program = server::companion(name)?;
        run(Command::new("objcopy")
            .arg("--strip-debug")
            .arg(program)
            .arg(programs.join(name)))?;
    }
    run(Command::new("bash")
        .arg(source.join("packaging"))
        .env("BOSH_INSTALL_TARGET", vcap.join("packages/bosh-dns"))
        .current_dir(&work))?;
    Ok(fs::remove_dir_all(work)?)
}

#[test]
fn packaging_refuses_unsuitable_stemcell() {
    let folder = tempfile::tempdir().unwrap();
    let source = crate::job::bosh().join("packages/bosh-dns");
    let write = |path: &Path, text: &str| {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
        fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    };
    write(&folder.path().join("bosh-dns/process.sh"), "");
    // As the dynamic linker of an older system fails.
    let old = "#!/bin/sh\necho \"version GLIBC_2.31 not found\" >&2\nexit 1\n";
    write(&folder.path().join("bosh-dns/x86_64/bosh-dns-xdp"), old);
    write(
        &folder.path().join("bosh-dns/aarch64/bosh-dns-xdp"),
        "#!/bin/sh\nexit 0\n",
    );
    for (machine, problem) in [
        (
            "x86_64",
            Some("does not start on this stemcell: it needs glibc 2.31"),
        ),
        (
            "s390x",
            Some("no programs for a stemcell of s390x, only for: aarch64 x86_64\n"),
        ),
        ("aarch64", None),
    ] {
        write(
            &folder.path().join("tools/uname"),
            &format!("#!/bin/sh\necho {machine}\n"),
        );
        let path = std::env::var("PATH").unwrap();
        let packaged = Command::new("bash")
            .arg(source.join("packaging"))
            .env("BOSH_INSTALL_TARGET", folder.path().join("target"))
            .env(
                "PATH",
                format!("{}:{path}", folder.path().join("tools").display()),
            )
            .current_dir(folder.path())
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&packaged.stderr);
        let is_installed = folder.path().join("target/bin/bosh-dns-xdp").exists();
        assert_eq!(
            (packaged.status.success(), is_installed),
            (problem.is_none(), problem.is_none()),
            "{said}"
        );
        assert!(
            said.contains(problem.unwrap_or_default()),
            "{machine}: {said}"
        );
    }
}
