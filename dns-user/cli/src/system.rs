//! Makes the server the machine's resolver through `/etc/resolv.conf`, with or without resolvconf,
//! or through systemd-resolved. Every change can be undone.

use std::{
    fs, io,
    net::IpAddr,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use anyhow::anyhow;
use dns_kit::files::atomic::{self, Attributes};
use tokio::{
    process::Command,
    time::{Instant, sleep, timeout},
};

/// Time limit of a program.
const MAX_RUN: Duration = Duration::from_secs(30);

/// Time within which a program that must succeed before this process ends is run again.
const MAX_UNDOING: Duration = Duration::from_secs(10);

/// Pause between two runs.
const PAUSE: Duration = Duration::from_millis(100);

/// Runs a program that undoes a change, while this process is being stopped.
///
/// To stop a unit, systemd sends SIGTERM to all its processes until no new one appears, so a
/// program started then may be killed before it has done anything (observed with systemd 252: the
/// machine kept using a server that was gone). The program is therefore run again.
async fn run_while_stopping(program: &str, arguments: &[&str]) -> anyhow::Result<()> {
    let end = Instant::now() + MAX_UNDOING;
    loop {
        match run(program, arguments).await {
            Err(_) if Instant::now() < end => sleep(PAUSE).await,
            result => return result.map(drop),
        }
    }
}

/// Runs a program to completion; returns its standard output. The program ends with the wait for it.
async fn run(program: &str, arguments: &[&str]) -> anyhow::Result<String> {
    let output = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output();
    // A hook of resolvconf may hang, or leave a process behind that holds the pipe of the output.
    let problem = match timeout(MAX_RUN, output).await {
        Ok(Ok(output)) if output.status.success() => {
            return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
        }
        Ok(Ok(output)) => {
            let complaint = String::from_utf8_lossy(&output.stderr);
            format!("{} ({})", complaint.trim(), output.status)
        }
        Ok(Err(error)) => error.to_string(),
        Err(_) => format!("not finished within {MAX_RUN:?}"),
    };
    Err(anyhow!(
        "{program} {} failed: {problem}",
        arguments.join(" ")
    ))
}

//----------- resolv.conf -------------------------------------------------------

/// The file that the C library reads.
const RESOLV_CONF: &str = "/etc/resolv.conf";

/// Text that resolvconf puts at the beginning of the file.
const HEAD: &str = "/etc/resolvconf/resolv.conf.d/head";

/// Comment above the server's line.
const COMMENT: &str =
    "# Inserted by bosh-dns-xdp; the next line is removed when bosh-dns-xdp resolver exits";

/// Number and interval of checks for the update of the file by resolvconf, as in bosh-dns.
const LOOKS: u32 = 8;
const BETWEEN_LOOKS: Duration = Duration::from_secs(2);

/// Keeps the server's line first.
#[derive(Debug)]
pub(crate) struct ResolvConf {
    address: IpAddr,
    /// [`RESOLV_CONF`], or a test's file.
    file: PathBuf,
    /// [`HEAD`], or a test's file.
    head: PathBuf,
}

impl ResolvConf {
    /// Prepares for a server at `address` without changing anything.
    pub(crate) fn new(address: IpAddr) -> Self {
        Self {
            address,
            file: RESOLV_CONF.into(),
            head: HEAD.into(),
        }
    }

    /// Puts the server's line first if it is not first already.
    pub(crate) async fn apply(&self) -> anyhow::Result<()> {
        if self.is_first()? {
            return Ok(());
        }
        // resolvconf would write the file again without our line, which its own `head` keeps.
        if self.head.parent().is_some_and(Path::is_dir) {
            self.change(&self.head, |text| self.with_us(text))?;
            return self.update().await;
        }
        if let Some(manager) = self.manager()? {
            // It would undo the change.
            return Err(self.managed(manager));
        }
        self.change(&self.file, |text| self.with_us(text))
    }

    /// Removes the server's line.
    pub(crate) async fn put_back(&self) -> anyhow::Result<()> {
        if self.head.parent().is_some_and(Path::is_dir) {
            self.change(&self.head, |text| self.without_us(text))?;
            return run_while_stopping("resolvconf", &["-u"]).await;
        }
        self.change(&self.file, |text| self.without_us(text))
    }

    /// Returns whether the first `nameserver` is the server.
    fn is_first(&self) -> anyhow::Result<bool> {
        let text = read(&self.file)?;
        for line in text.lines() {
            let mut words = line.split_whitespace();
            if words.next() == Some("nameserver") {
                let first = words.next().unwrap_or_default();
                return Ok(first.parse() == Ok(self.address));
            }
        }
        Ok(false)
    }

    /// Makes resolvconf rewrite the file and waits for the result.
    async fn update(&self) -> anyhow::Result<()> {
        run("resolvconf", &["-u"]).await?;
        for look in 1..=LOOKS {
            if self.is_first()? {
                return Ok(());
            }
            if look < LOOKS {
                sleep(BETWEEN_LOOKS).await;
            }
        }
        let other = (
            "something other than resolvconf",
            "make it a symbolic link to /run/resolvconf/resolv.conf",
        );
        Err(self.managed(self.manager()?.unwrap_or(other)))
    }

    fn managed(&self, (who, remedy): (&str, &str)) -> anyhow::Error {
        anyhow!("{} is written by {who}: {remedy}", self.file.display())
    }

    /// Returns the program that manages the file, according to its link target and content, with
    /// advice to the operator.
    fn manager(&self) -> anyhow::Result<Option<(&'static str, &'static str)>> {
        // A plain file is no link, which is no error here.
        let target = fs::read_link(&self.file).unwrap_or_default();
        let target = target.to_string_lossy();
        let text = read(&self.file)?;
        Ok(
            if target.contains("systemd/resolve")
                || text.contains("managed by man:systemd-resolved")
            {
                Some((
                    "systemd-resolved",
                    "use resolver --systemd-resolved (BOSH: configure_systemd_resolved)",
                ))
            } else if text.contains("Generated by NetworkManager") {
                Some((
                    "NetworkManager",
                    "set dns=none in /etc/NetworkManager/NetworkManager.conf, or use resolvconf",
                ))
            } else {
                None
            },
        )
    }

    /// Returns a file's text with the server's lines first.
    fn with_us(&self, text: &str) -> String {
        format!("{}{}", self.lines(), self.without_us(text))
    }

    fn without_us(&self, text: &str) -> String {
        text.replace(&self.lines(), "")
    }

    fn lines(&self) -> String {
        format!("{COMMENT}\nnameserver {}\n", self.address)
    }

    /// Replaces a file atomically if its text changes: a reader sees either the old or the new
    /// text.
    fn change(&self, file: &Path, change: impl Fn(&str) -> String) -> anyhow::Result<()> {
        let before = read(file)?;
        let after = change(&before);
        if after == before {
            return Ok(());
        }
        atomic::sweep(file);
        let mode =
            // The file's own mode stays: programs of every user read it.
            fs::metadata(file).map_or(Attributes::PUBLIC.mode, |facts| facts.mode() & 0o7777);
        let attributes = Attributes {
            mode,
            ..Attributes::PUBLIC
        };
        // Of a symbolic link the target is replaced, not the link.
        match atomic::replace(file, after.as_bytes(), attributes) {
            Ok(_) => Ok(()),
            // In a container the file may be a mount, which cannot be replaced.
            Err(error) if error.cause.kind() == io::ErrorKind::ResourceBusy => {
                fs::write(file, &after).map_err(|problem| in_file(file, &problem))
            }
            Err(error) => Err(in_file(file, &error.cause)),
        }
    }
}

/// Returns a file's text; empty if the file does not exist.
fn read(file: &Path) -> anyhow::Result<String> {
    match fs::read_to_string(file) {
        Err(problem) if problem.kind() == io::ErrorKind::NotFound => Ok(String::new()),
        other => other.map_err(|problem| in_file(file, &problem)),
    }
}

fn in_file(file: &Path, problem: &io::Error) -> anyhow::Error {
    anyhow!("{}: {problem}", file.display())
}

//----------- systemd-resolved --------------------------------------------------

/// The interface, named as in bosh-dns, so that this server takes over an existing one.
const INTERFACE: &str = "bosh-dns";

/// Keeps systemd-resolved's configuration up to date.
#[derive(Debug)]
pub(crate) struct Resolved {
    address: IpAddr,
    /// Whether this process has created the interface.
    made: bool,
    /// The last domains set; `None` before the first call.
    domains_set: Option<Vec<String>>,
}

impl Resolved {
    /// Prepares for a server at `address` without changing anything.
    pub(crate) fn new(address: IpAddr) -> Self {
        Self {
            address,
            made: false,
            domains_set: None,
        }
    }

    /// Creates the interface if it does not exist, and configures it and `domains` in
    /// systemd-resolved if they have changed. A restarted systemd-resolved is configured again.
    pub(crate) async fn apply(&mut self, domains: &[String]) -> anyhow::Result<()> {
        let address = self.address.to_string();
        let shown = run("ip", &["link", "show", "dev", INTERFACE]).await;
        if shown.is_err() {
            // Beforehand: a signal may end the wait when the interface has just been made. It may also be ours
            // already: the command that shows it fails for other reasons, too.
            let was_made = std::mem::replace(&mut self.made, true);
            let added = run("ip", &["link", "add", INTERFACE, "type", "dummy"]).await;
            self.made = was_made || added.is_ok();
            added?;
            // systemd-resolved forgets the settings of an interface with it.
            self.domains_set = None;
        }
        let shown = run("ip", &["-oneline", "address", "show", "dev", INTERFACE]).await?;
        if !shown.contains(&format!(" {address}/")) {
            let prefix = if self.address.is_ipv4() { 32 } else { 128 };
            let prefix = format!("{address}/{prefix}");
            run("ip", &["address", "add", &prefix, "dev", INTERFACE]).await?;
            run("ip", &["link", "set", INTERFACE, "up"]).await?;
        }
        let servers = run("resolvectl", &["dns", INTERFACE]).await?;
        // systemd-resolved forgets its links' settings when it restarts.
        let is_set = servers.split_whitespace().any(|word| word == address);
        if is_set && self.domains_set.as_deref() == Some(domains) {
            return Ok(());
        }
        run("resolvectl", &["dns", INTERFACE, &address]).await?;
        // All other names stay with the servers of other interfaces.
        run("resolvectl", &["default-route", INTERFACE, "no"]).await?;
        // With `~`, a domain only routes, and is not appended to short names (systemd.network(5)).
        let routing: Vec<String> = domains.iter().map(|domain| format!("~{domain}")).collect();
        let mut arguments = vec!["domain", INTERFACE];
        arguments.extend(routing.iter().map(String::as_str));
        if routing.is_empty() {
            // Without a domain the command would only list the current ones.
            arguments.push("");
        }
        run("resolvectl", &arguments).await?;
        self.domains_set = Some(domains.to_vec());
        Ok(())
    }

    /// Removes the interface, with its configuration in systemd-resolved, if this process has
    /// created it.
    pub(crate) async fn put_back(&mut self) -> anyhow::Result<()> {
        if !self.made {
            // bosh-dns's job may have made the interface and still needs it.
            return run_while_stopping("resolvectl", &["revert", INTERFACE]).await;
        }
        run_while_stopping("ip", &["link", "delete", INTERFACE]).await
    }
}

#[cfg(test)]
mod tests {
    use tokio::{io::AsyncReadExt as _, net::unix::pipe};

    use super::*;

    #[tokio::test]
    async fn hung_program_ends_with_the_wait() {
        let folder = tempfile::tempdir().unwrap();
        let fifo = folder.path().join("fifo");
        nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
        let mut reader = pipe::OpenOptions::new().open_receiver(&fifo).unwrap();
        let script = format!("exec >'{}'; echo begun; exec sleep 1000000", fifo.display());
        let arguments = ["-c", script.as_str()];
        let mut text = [0; 6];
        tokio::select! {
            ended = run("sh", &arguments) => panic!("{ended:?}"),
            read = reader.read_exact(&mut text) => assert_eq!(read.unwrap(), 6),
        }
        // The end of the last process that writes.
        assert_eq!(reader.read(&mut text).await.unwrap(), 0);
    }

    /// Returns a resolv.conf with this text, on a machine without resolvconf.
    fn plain(text: &str) -> (tempfile::TempDir, ResolvConf) {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("resolv.conf");
        let head = folder.path().join("none/head");
        fs::write(&file, text).unwrap();
        (
            folder,
            ResolvConf {
                address: IpAddr::from([169, 254, 0, 2]),
                file,
                head,
            },
        )
    }

    #[tokio::test]
    async fn plain_file_is_changed_and_restored() {
        let found = "search example\nnameserver 10.0.0.2\noptions ndots:1\n";
        let (_folder, resolv_conf) = plain(found);
        for _ in 0..2 {
            resolv_conf.apply().await.unwrap();
            let text = read(&resolv_conf.file).unwrap();
            assert_eq!(text, format!("{COMMENT}\nnameserver 169.254.0.2\n{found}"));
        }
        resolv_conf.put_back().await.unwrap();
        assert_eq!(read(&resolv_conf.file).unwrap(), found);
    }

    #[tokio::test]
    async fn replacement_keeps_mode_and_follows_no_planted_link() {
        use std::os::unix::fs::{PermissionsExt as _, symlink};

        let (folder, resolv_conf) = plain("nameserver 10.0.0.2\n");
        let file = &resolv_conf.file;
        let precious = folder.path().join("precious");
        fs::set_permissions(file, fs::Permissions::from_mode(0o640)).unwrap();
        fs::write(&precious, "root's").unwrap();
        // The name that was written to before it was renamed, and what a kill leaves now.
        symlink(&precious, folder.path().join("resolv.bosh-dns-xdp")).unwrap();
        symlink(&precious, folder.path().join(".resolv.conf.part-aaaaaa")).unwrap();
        resolv_conf.apply().await.unwrap();
        assert_eq!(fs::read_to_string(&precious).unwrap(), "root's");
        assert_eq!(fs::metadata(file).unwrap().mode() & 0o777, 0o640);
        assert!(!folder.path().join(".resolv.conf.part-aaaaaa").exists());
    }

    #[tokio::test]
    async fn foreign_line_above_is_detected() {
        let (_folder, resolv_conf) = plain("nameserver 10.0.0.2\n");
        resolv_conf.apply().await.unwrap();
        let ours = read(&resolv_conf.file).unwrap();
        fs::write(&resolv_conf.file, format!("nameserver 10.0.0.9\n{ours}")).unwrap();
        resolv_conf.apply().await.unwrap();
        let text = read(&resolv_conf.file).unwrap();
        assert!(resolv_conf.is_first().unwrap());
        assert_eq!(text.matches("169.254.0.2").count(), 1, "{text}");
    }

    #[tokio::test]
    async fn other_manager_is_reported() {
        let (_folder, resolv_conf) = plain("# Generated by NetworkManager\nnameserver 10.0.0.2\n");
        let problem = resolv_conf.apply().await.unwrap_err().to_string();
        assert!(
            problem.contains("NetworkManager") && problem.contains("dns=none"),
            "{problem}"
        );
    }

    #[tokio::test]
    async fn missing_file_is_created() {
        let (_folder, resolv_conf) = plain("");
        fs::remove_file(&resolv_conf.file).unwrap();
        resolv_conf.apply().await.unwrap();
        assert!(resolv_conf.is_first().unwrap());
    }
}
