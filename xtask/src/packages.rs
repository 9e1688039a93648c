//! Debian packages required by the commands.

use std::{
    ffi::{OsStr, OsString},
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, bail};

use crate::process::{capture, on_path, root, run};

/// Packages for `cargo xtask demo`: namespaces, dig, load, and a recursor to forward to.
pub(crate) const DEMO: &str = "bind9-dnsutils dnsmasq-base dnsperf ethtool iproute2";

/// Packages for the tests: the demo's, real peers, Prometheus, and virtual machines with other kernels.
pub(crate) const TEST: &str = "\
    bind9 bind9-dnsutils bind9-utils binutils bpftool cpio crun curl debootstrap dnsmasq-base dnsperf \
    etcd-client etcd-server ethtool faketime fstrm-bin iproute2 ipset iptables knot knot-dnsutils knot-resolver \
    libnginx-mod-http-js lintian lz4 nats-server nftables nginx-light nsd openjdk-17-jdk-headless \
    openssh-client openssl pdns-backend-sqlite3 pdns-server podman prometheus python3 python3-venv \
    qemu-system-x86 ruby shellcheck sqlite3 systemd unbound xz-utils zstd";

/// Packages for building and running virtual machines with other kernels.
pub(crate) const KERNEL_TEST: &str =
    "binutils cpio ethtool gzip iproute2 lz4 qemu-system-x86 xz-utils zstd";

/// Packages for the benches, including the servers to compare with.
pub(crate) const BENCH: &str = "\
    bind9-dnsutils dnsmasq-base dnsperf ethtool iperf3 iproute2 knot knot-resolver nsd unbound";

/// Mirror for suites other than this machine's.
const DEBIAN_MIRROR: &str = "http://deb.debian.org/debian";

/// Architecture of this machine, in Debian's words.
pub(crate) const THIS_ARCHITECTURE: &str = "amd64";

/// Keyring of the mirror's signatures, from the package `debian-archive-keyring`.
const DEBIAN_KEYS: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// Installs missing packages, whose names are separated by spaces, with apt-get.
pub(crate) fn ensure(packages: &str) -> Result<()> {
    let missing = missing(&packages.split_whitespace().collect::<Vec<_>>())?;
    if missing.is_empty() {
        return Ok(());
    }
    // Only root may install; how a developer becomes root is left to them.
    if !on_path("apt-get") || !nix::unistd::geteuid().is_root() {
        bail!(
            "missing Debian packages; install them as root: {}",
            missing.join(" ")
        );
    }
    println!("installing Debian packages: {}", missing.join(" "));
    // Debian starts a server when it is installed, and several of these listen on port 53.
    let _quiet = NoServices::enforce()?;
    apt(&["update", "-qq"])?;
    apt(&[
        &["install", "-qq", "--yes", "--no-install-recommends"],
        &missing[..],
    ]
    .concat())
}

fn missing<'a>(packages: &[&'a str]) -> Result<Vec<&'a str>> {
    if !on_path("dpkg-query") {
        bail!(
            "this is not a Debian system; install the programs of these packages: {}",
            packages.join(" ")
        );
    }
    // dpkg-query fails if a package is unknown, but still lists the others.
    let listed = Command::new("dpkg-query")
        .args([
            "--show",
            "--showformat",
            "${Package} ${db:Status-Status}\\n",
        ])
        .args(packages)
        .output()
        .context("cannot run dpkg-query")?;
    let listed = String::from_utf8_lossy(&listed.stdout);
    let installed: Vec<&str> = listed.lines().collect();
    let mut missing = packages.to_vec();
    // A removed package whose configuration stays is listed, too, as `config-files`.
    missing.retain(|package| !installed.contains(&&*format!("{package} installed")));
    Ok(missing)
}

/// Runs apt-get non-interactively.
pub(crate) fn apt(arguments: &[&str]) -> Result<()> {
    run(Command::new("apt-get")
        .args(arguments)
        // debconf would wait for an answer to a hidden question.
        .env("DEBIAN_FRONTEND", "noninteractive")
        .stdin(Stdio::null())
        .stdout(Stdio::null()))
}

/// Returns the version of a package that apt would install; `None` if unknown.
pub(crate) fn candidate(package: &str) -> Result<Option<String>> {
    let policy = capture(Command::new("apt-cache").args(["policy", package]))?;
    let version = policy
        .lines()
        .find_map(|line| line.trim().strip_prefix("Candidate: "));
    Ok(version
        .filter(|version| *version != "(none)")
        .map(str::to_owned))
}

/// Downloads packages (`name` or `name=version`) into `folder`, which is emptied first.
pub(crate) fn download(names: &[impl AsRef<OsStr>], folder: &Path) -> Result<()> {
    Lists::of_this_machine().download(names, folder)
}

/// A set of apt package lists.
pub(crate) struct Lists {
    /// Options that make apt's programs use these lists.
    options: Vec<String>,
}

impl Lists {
    pub(crate) const fn of_this_machine() -> Self {
        Self {
            options: Vec::new(),
        }
    }

    /// Downloads the lists of a single Debian suite for an architecture to `folder`, without changing this
    /// machine's sources.
    pub(crate) fn of_suite(suite: &str, architecture: &str, folder: &Path) -> Result<Self> {
        for below in ["lists/partial", "cache"] {
            fs::create_dir_all(folder.join(below))?;
        }
        let sources = folder.join("suite.sources");
        let repository = if suite.ends_with("-security") {
            "-security"
        } else {
            ""
        };
        let text = format!(
            "Types: deb\nURIs: {DEBIAN_MIRROR}{repository}\nSuites: {suite}\nComponents: main\nSigned-By: {DEBIAN_KEYS}\n"
        );
        fs::write(&sources, text).with_context(|| sources.display().to_string())?;
        // Without installed packages, because a newer one would be preferred.
        let status = folder.join("cache/status");
        fs::write(&status, "").with_context(|| status.display().to_string())?;
        let options = [
            ("Dir::Etc::SourceList", PathBuf::from("/dev/null")),
            ("Dir::Etc::SourceParts", folder.to_owned()),
            ("Dir::State::Lists", folder.join("lists")),
            ("Dir::State::Status", status),
            ("Dir::Cache", folder.join("cache")),
            ("APT::Architecture", PathBuf::from(architecture)),
            ("APT::Architectures", PathBuf::from(architecture)),
        ];
        Ok(Self {
            options: options
                .map(|(name, value)| format!("-o{name}={}", value.display()))
                .into(),
        })
    }

    pub(crate) fn update(&self) -> Result<()> {
        let words = ["update", "-qq"]
            .into_iter()
            .chain(self.options.iter().map(String::as_str));
        apt(&words.collect::<Vec<_>>())
    }

    pub(crate) fn cache(&self, arguments: &[&str]) -> Result<String> {
        capture(
            Command::new("apt-cache")
                .args(&self.options)
                .args(arguments),
        )
    }

    pub(crate) fn download(&self, names: &[impl AsRef<OsStr>], folder: &Path) -> Result<()> {
        recreate_folder(folder)?;
        if self.get(names, folder).is_err() {
            // The lists are older than the mirror.
            self.update()?;
            self.get(names, folder)?;
        }
        Ok(())
    }

    fn get(&self, names: &[impl AsRef<OsStr>], folder: &Path) -> Result<String> {
        let mut command = Command::new("apt-get");
        command
            .args(["download", "-qq"])
            .args(&self.options)
            .args(names);
        // apt-get download writes to the current folder, and has no option for another one.
        capture(command.current_dir(folder))
    }
}

/// Unpacks the packages in `downloads` into `folder` without installing them, and deletes
/// `downloads`. `folder` only exists after success.
pub(crate) fn unpack(downloads: &Path, folder: &Path) -> Result<()> {
    let part = folder.with_extension("part");
    recreate_folder(&part)?;
    for package in fs::read_dir(downloads)? {
        run(Command::new("dpkg")
            .arg("-x")
            .arg(package?.path())
            .arg(&part))?;
    }
    fs::rename(&part, folder).with_context(|| folder.display().to_string())?;
    Ok(fs::remove_dir_all(downloads)?)
}

/// Creates an empty folder, deleting the remains of an interrupted run.
pub(crate) fn recreate_folder(folder: &Path) -> Result<()> {
    if folder.exists() {
        fs::remove_dir_all(folder)?;
    }
    fs::create_dir_all(folder).with_context(|| folder.display().to_string())
}

/// Prevents the start of newly installed DNS servers as services during its lifetime.
///
/// Debian runs `/usr/sbin/policy-rc.d` before starting a service; exit status 101 denies it.
struct NoServices {
    /// Whether this process created the policy file and must remove it.
    ours: bool,
}

impl NoServices {
    const POLICY: &str = "/usr/sbin/policy-rc.d";

    /// Writes the policy unless the machine already has one.
    fn enforce() -> Result<Self> {
        let ours = !Path::new(Self::POLICY).exists();
        if ours {
            fs::write(Self::POLICY, "#!/bin/sh\nexit 101\n").context(Self::POLICY)?;
            fs::set_permissions(Self::POLICY, fs::Permissions::from_mode(0o755))
                .context(Self::POLICY)?;
        }
        Ok(Self { ours })
    }
}

impl Drop for NoServices {
    fn drop(&mut self) {
        if self.ours && fs::remove_file(Self::POLICY).is_err() {
            eprintln!("could not remove {}: remove it manually", Self::POLICY);
        }
    }
}

/// pip requirement, used if no server is on the path.
const MOTO_REQUIREMENT: &str = "moto[server]==5.2.1";

fn moto_environment() -> PathBuf {
    root().join("target/moto")
}

/// Installs moto, a server that emulates Amazon's services, if it is missing.
pub(crate) fn ensure_moto() -> Result<()> {
    if on_path("moto_server") {
        return Ok(());
    }
    install_from_pypi(&moto_environment(), MOTO_REQUIREMENT)
}

/// pip requirement of the binding of c-ares, which contains the library: Debian's is older than its DNS Cookies.
const PYCARES_REQUIREMENT: &str = "pycares==4.9.0";

/// Installs c-ares with its binding for Python, the client in a test of DNS Cookies, if it is missing.
pub(crate) fn ensure_pycares() -> Result<()> {
    install_from_pypi(&root().join("target/pycares"), PYCARES_REQUIREMENT)
}

/// Installs a package that Debian does not have from PyPI, into a virtual environment, unless it is there.
fn install_from_pypi(folder: &Path, requirement: &str) -> Result<()> {
    let note = folder.join("installed");
    if fs::read_to_string(&note).is_ok_and(|installed| installed == requirement) {
        return Ok(());
    }
    println!("installing {requirement}");
    recreate_folder(folder)?;
    run(Command::new("python3").args(["-m", "venv"]).arg(folder))?;
    run(Command::new(folder.join("bin/pip")).args(["install", "--quiet", requirement]))?;
    // Written last: an interrupted installation leaves a folder that looks complete.
    Ok(fs::write(note, requirement)?)
}

/// Returns the search path with the server's folder appended.
pub(crate) fn moto_search_path() -> Result<OsString> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::env::split_paths(&path).chain([moto_environment().join("bin")]);
    std::env::join_paths(folders).context("PATH has a folder with a colon")
}

/// Packages in addition to the essential ones: an init system, and dig, which the package recommends.
const DEBIAN_INCLUDED: &str = "bind9-dnsutils,dbus,iproute2,libgcc-s1,procps,systemd,systemd-sysv";

/// Packages stored in the root's `/var/cache/resolvers` for installation by tests. They conflict,
/// because both manage `/etc/resolv.conf`.
const DEBIAN_RESOLVERS: [&str; 2] = ["resolvconf", "systemd-resolved"];

/// Creates, if necessary, a minimal Debian root in `.toolchain/debian` by debootstrap, in which tests install the
/// packages. It boots with systemd in namespaces, isolated from the machine.
pub(crate) fn ensure_debian_root() -> Result<()> {
    let folder = root().join(".toolchain/debian");
    if folder.exists() {
        return Ok(());
    }
    ensure("debootstrap")?;
    let suite = debian_suite()?;
    println!("creating a root of Debian {suite} to test the packages in");
    let downloads = folder.with_extension("debs");
    download(&DEBIAN_RESOLVERS, &downloads)?;
    let part = folder.with_extension("part");
    recreate_folder(&part)?;
    capture(
        Command::new("debootstrap")
            .args([
                "--variant=minbase",
                &format!("--include={DEBIAN_INCLUDED}"),
                &suite,
            ])
            .arg(&part),
    )?;
    let resolvers = part.join("var/cache/resolvers");
    run(Command::new("mv").arg(&downloads).arg(&resolvers))?;
    fs::rename(&part, &folder).with_context(|| folder.display().to_string())
}

/// Returns the release of this machine, on which its builds start.
fn debian_suite() -> Result<String> {
    let text = fs::read_to_string("/etc/os-release")?;
    let suite = text
        .lines()
        .find_map(|line| line.strip_prefix("VERSION_CODENAME="));
    Ok(suite
        .context("/etc/os-release names no release")?
        .trim_matches('"')
        .to_owned())
}
