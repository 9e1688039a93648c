//! The session: what is typed, and what is waited for.

use std::{
    fs::File,
    io::{Read, Write},
    path::Path,
    process::{Child, Command, Stdio},
    sync::mpsc::{Receiver, RecvTimeoutError, channel},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use nix::pty::{OpenptyResult, Winsize, openpty};

use super::{
    MARK_DIG, MARK_TOP,
    recording::{COLUMNS, ROWS, Recording},
};

/// Makes the namespaces into a machine with nothing but `lo`, on which `$1` is installed, and begins
/// a shell. Who this machine's resolvers are is nobody's business: there are none.
const MACHINE: &str = r#"
set -eu
ip link set lo up
hostname debian
mount -t tmpfs tmpfs /usr/local/bin
touch /usr/local/bin/bosh-dns-xdp
mount --bind "$1" /usr/local/bin/bosh-dns-xdp
mount -t tmpfs tmpfs /root
mount --bind /dev/null /etc/resolv.conf
cd /root
exec env -i HOME=/root TERM=xterm-256color PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
  PS1='\[\e[1;32m\]root@debian\[\e[0m\]:\w# ' bash --norc --noprofile -i
"#;

/// Longest wait for anything.
const PATIENCE: Duration = Duration::from_secs(60);

/// Time between two keys.
const KEY: Duration = Duration::from_millis(35);

/// Time to read what is new.
const READING: Duration = Duration::from_millis(1500);

/// Queries a second that dnsperf sends.
const RATE: &str = "20000";

/// Records the session with this program.
pub(super) fn record(program: &Path) -> Result<Recording> {
    let mut person = Person::begin(program)?;
    person.wait_for("# ", "a prompt")?;
    person.enter("bosh-dns-xdp try &")?;
    person.wait_for("top --config", "the words of `try`")?;
    person.look(READING)?;
    let (port, config) = person.told()?;
    person.key("\n")?;

    person.enter(&format!("dig @127.0.0.1 -p {port} web.internal +noall +answer +stats"))?;
    person.wait_for("MSG SIZE", "an answer")?;
    person.look(READING)?;
    person.recording.mark(MARK_DIG);

    person.enter("echo web.internal A >names")?;
    let load = format!("dnsperf -s 127.0.0.1 -p {port} -d names -l 60 -Q {RATE} >load.txt 2>&1 &");
    person.enter(&load)?;
    person.look(READING)?;
    person.enter(&format!("bosh-dns-xdp top --config {config}"))?;
    // A while, for the curve.
    person.wait_for("web.internal", "the hot name")?;
    person.look(6 * READING)?;
    person.recording.mark(MARK_TOP);
    person.look(READING)?;
    person.key("q")?;
    person.wait_for("# ", "a prompt")?;
    person.enter("kill %2 %1; wait")?;
    person.look(READING)?;
    person.enter("exit")?;
    person.end()
}

/// Somebody at a terminal.
struct Person {
    /// The namespaces and all that runs in them; ended when dropped.
    shell: Child,
    /// What is typed goes here.
    keyboard: File,
    output: Receiver<Vec<u8>>,
    screen: vt100::Parser,
    recording: Recording,
}

impl Person {
    fn begin(program: &Path) -> Result<Self> {
        let size = Winsize { ws_row: ROWS, ws_col: COLUMNS, ws_xpixel: 0, ws_ypixel: 0 };
        let OpenptyResult { master, slave } = openpty(Some(&size), None)?;
        let mut command = Command::new("setsid");
        command
            .args(["--ctty", "--wait", "unshare", "--net", "--mount", "--uts", "--pid", "--fork"])
            .args(["--kill-child", "--mount-proc", "--propagation=private", "sh", "-c", MACHINE, "sh"])
            .arg(program)
            .stdin(Stdio::from(slave.try_clone()?))
            .stdout(Stdio::from(slave.try_clone()?))
            .stderr(Stdio::from(slave));
        let shell = command.spawn().context("cannot run setsid and unshare")?;
        // The command holds the other end; with it gone, reading ends with the shell.
        drop(command);
        let (keyboard, mut terminal) = (File::from(master.try_clone()?), File::from(master));
        let (sender, output) = channel();
        thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(count @ 1..) = terminal.read(&mut bytes) {
                if sender.send(bytes[..count].to_vec()).is_err() {
                    return;
                }
            }
        });
        let screen = vt100::Parser::new(ROWS.try_into()?, COLUMNS.try_into()?, 0);
        let recording = Recording::begin("bosh-dns-xdp: try, dig, top");
        Ok(Self { shell, keyboard, output, screen, recording })
    }

    /// Looks at the screen for so long; whether there is still somebody at the other end.
    fn look(&mut self, time: Duration) -> Result<bool> {
        let end = Instant::now() + time;
        loop {
            match self.output.recv_timeout(end.saturating_duration_since(Instant::now())) {
                Ok(bytes) => {
                    self.recording.add(&bytes);
                    self.screen.process(&bytes);
                }
                Err(RecvTimeoutError::Timeout) => return Ok(true),
                Err(RecvTimeoutError::Disconnected) => return Ok(false),
            }
        }
    }

    /// Waits until a text is on the screen.
    fn wait_for(&mut self, text: &str, what: &str) -> Result<()> {
        let begun = Instant::now();
        while !self.screen.screen().contents().contains(text) {
            let screen = self.screen.screen().contents();
            ensure!(begun.elapsed() < PATIENCE, "waited {PATIENCE:?} in vain for {what}:\n{screen}");
            ensure!(self.look(Duration::from_millis(20))?, "the shell has ended:\n{screen}");
        }
        Ok(())
    }

    fn enter(&mut self, line: &str) -> Result<()> {
        for character in line.chars() {
            self.key(character.encode_utf8(&mut [0; 4]))?;
            self.look(KEY)?;
        }
        self.look(10 * KEY)?;
        self.key("\n")?;
        self.look(10 * KEY)?;
        Ok(())
    }

    fn key(&mut self, key: &str) -> Result<()> {
        Ok(self.keyboard.write_all(key.as_bytes())?)
    }

    /// Port and configuration as `try` tells them.
    fn told(&self) -> Result<(String, String)> {
        let screen = self.screen.screen().contents();
        let word_after = |text: &str| {
            let rest = screen.split_once(text)?.1;
            rest.split_whitespace().next().map(str::to_owned)
        };
        let port = word_after("-p ").context("no port")?;
        Ok((port, word_after("top --config ").context("no configuration")?))
    }

    fn end(mut self) -> Result<Recording> {
        let begun = Instant::now();
        while self.look(Duration::from_millis(100))? {
            ensure!(begun.elapsed() < PATIENCE, "the shell does not end");
        }
        let recording = std::mem::replace(&mut self.recording, Recording::begin(""));
        let status = self.shell.wait()?;
        ensure!(status.success(), "the shell ended with {status}");
        Ok(recording)
    }
}

impl Drop for Person {
    fn drop(&mut self) {
        // It has ended, or all that it began ends with it.
        let _ = self.shell.kill();
        let _ = self.shell.wait();
    }
}
