//! Recorded sessions of `status`, `top`, `tap`, `resolve` and `check`, in health and in fault, compared with
//! the files in `sessions/`. Figures that differ from run to run are normalised.
//!
//! `UPDATE_SESSIONS=1 cargo nextest run -p whole-system-tests sessions` writes the files again.

use std::{env, fs, net::SocketAddr, path::Path, thread, time::Duration};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use serde_json::json;
use whole_system_tests::{
    metrics::wait_for_fast_path, namespace::Namespace, process::wait_until, requires,
};

use crate::{
    dnsmasq,
    running::{API_PORT, METRICS_PORT, Running},
};

/// Time limit, reached only on failure.
const TIMEOUT: Duration = Duration::from_secs(120);

/// A session: command lines with their output and exit codes.
struct Session<'a> {
    name: &'static str,
    running: &'a Running,
    text: String,
}

impl<'a> Session<'a> {
    fn new(name: &'static str, running: &'a Running) -> Self {
        Self {
            name,
            running,
            text: String::new(),
        }
    }

    /// Runs a command and records it.
    fn run(mut self, arguments: &[&str]) -> Result<Self> {
        let result = self.running.cli(arguments)?;
        self.record(arguments, result);
        Ok(self)
    }

    /// Runs a command while `meanwhile` is called repeatedly, and records it.
    fn run_while(mut self, arguments: &[&str], meanwhile: impl Fn() -> Result<()>) -> Result<Self> {
        let result = thread::scope(|scope| {
            let command = scope.spawn(|| self.running.cli(arguments));
            while !command.is_finished() {
                meanwhile()?;
                thread::sleep(Duration::from_millis(20));
            }
            command.join().expect("the commands do not panic")
        })?;
        self.record(arguments, result);
        Ok(self)
    }

    fn record(&mut self, arguments: &[&str], (code, output, errors): (i32, String, String)) {
        let folder = self.running.folder();
        self.text
            .push_str(&format!("$ bosh-dns-xdp {}\n", arguments.join(" ")));
        self.text.push_str(&normalised(&output, folder));
        self.text.push_str(&normalised(&errors, folder));
        self.text.push_str(&format!("[exit code {code}]\n\n"));
    }

    /// Compares the session with its file, or writes the file.
    fn check(self) -> Result<()> {
        let path = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("tests/operate/sessions")
            .join(self.name);
        if env::var_os("UPDATE_SESSIONS").is_some() {
            fs::write(&path, &self.text)?;
        }
        let recorded = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        ensure!(
            recorded == self.text,
            "{} differs; UPDATE_SESSIONS=1 updates it. Recorded:\n{recorded}\nNow:\n{}",
            self.name,
            self.text
        );
        Ok(())
    }
}

/// Headings of tables whose figures differ from run to run.
const VOLATILE: &[&str] = &[
    "INTERFACES",
    "WAITING",
    "LEFT",
    "OUTCOME",
    "PROGRAM",
    "RECURSOR",
    "PER",
    "CERTIFICATE",
    "FILES",
    "cache",
];

/// Headings of tables whose rows differ from run to run.
const UNSTABLE_ROWS: &[&str] = &["OUTCOME", "PASSED"];

/// Replaces times, paths, ports and volatile figures; columns are separated by two spaces.
fn normalised(text: &str, folder: &Path) -> String {
    let text = text.replace(&folder.display().to_string(), "DIR");
    let mut out = String::new();
    let (mut volatile, mut left_out) = (false, false);
    for line in text.lines() {
        let first = line.split_whitespace().next().unwrap_or_default();
        if line.is_empty() {
            (volatile, left_out) = (false, false);
        }
        if UNSTABLE_ROWS.iter().any(|heading| line.contains(heading)) {
            // With its empty line: the table is absent if it has no rows.
            out.truncate(out.trim_end().len() + 1);
            left_out = true;
        }
        // The line appears only while queries wait or were refused.
        if left_out || first == "overload" {
            continue;
        }
        let all =
            volatile || ["replies", "fast"].contains(&first) || line.contains("/s: fast path");
        let indent = line.len() - line.trim_start().len();
        let columns = line
            .trim_start()
            .split("  ")
            .filter(|column| !column.trim().is_empty());
        let columns: Vec<String> = columns.map(|column| normal_column(column, all)).collect();
        out.push_str(&" ".repeat(indent));
        out.push_str(&columns.join("  "));
        out.push('\n');
        volatile |= VOLATILE.contains(&first);
    }
    out
}

/// Normalises the words of one column.
fn normal_column(column: &str, all: bool) -> String {
    let is_unit = |word: &str| ["ms", "us", "s"].contains(&word.trim_end_matches([',', ';']));
    let is_amount = |word: &str| word.parse::<f64>().is_ok();
    let words: Vec<&str> = column.split_whitespace().collect();
    let mut normal: Vec<String> = Vec::new();
    for (place, word) in words.iter().enumerate() {
        let before = place.checked_sub(1).map(|before| words[before]);
        let after = words.get(place + 1).copied();
        if is_unit(word) && before.is_some_and(is_amount) {
            // The unit of the time before; its punctuation stays.
            let tail = word.trim_start_matches(|c: char| c.is_ascii_alphabetic());
            normal
                .iter_mut()
                .last()
                .into_iter()
                .for_each(|time| time.push_str(tail));
        } else if is_amount(word) && after.is_some_and(is_unit) {
            normal.push("TIME".to_owned());
        } else if before == Some("bosh-dns-xdp") && word.starts_with(|c: char| c.is_ascii_digit()) {
            normal.push("VERSION".to_owned());
        } else if before == Some("pid") {
            normal.push("PID,".to_owned());
        } else {
            normal.push(normal_word(word, all));
        }
    }
    normal.dedup_by(|one, other| one == other && one == "TIME");
    normal.join(" ")
}

/// Normalises one word; `all` also replaces plain numbers.
fn normal_word(word: &str, all: bool) -> String {
    let ends = |c: char| ",;:()".contains(c);
    let (bare, tail) = word.split_at(word.trim_end_matches(ends).len());
    let is_number = |text: &str| {
        text.starts_with(|c: char| c.is_ascii_digit())
            && text
                .chars()
                .all(|c| c.is_ascii_digit() || c == ',' || c == '.')
            && text.parse::<std::net::IpAddr>().is_err()
    };
    let unit = |unit: &str| bare.strip_suffix(unit).is_some_and(is_number);
    let core = bare.trim_start_matches('(');
    let head = &bare[..bare.len() - core.len()];
    let is_stamp = core.len() > 10 && core.ends_with('Z') && core.contains(':');
    let is_chosen = |address: &SocketAddr| {
        address.port() >= 32_768 && ![API_PORT, METRICS_PORT].contains(&address.port())
    };
    let port = core.parse::<SocketAddr>().ok().filter(is_chosen);
    // A build outside of a repository says "unknown".
    let is_commit = head == "("
        && core.len() >= 7
        && (core == "unknown"
            || core
                .trim_end_matches("-dirty")
                .chars()
                .all(|c| c.is_ascii_hexdigit()));
    let normal = if is_stamp || ["s", "m", "h", "d"].into_iter().any(unit) {
        "TIME".to_owned()
    } else if let Some(address) = port {
        format!("{}:PORT", address.ip())
    } else if is_commit {
        "COMMIT".to_owned()
    } else if core.strip_suffix("/s").is_some_and(is_number) {
        "N/s".to_owned()
    } else if core.starts_with('±') || (all && is_number(core)) {
        "N".to_owned()
    } else {
        core.to_owned()
    };
    format!("{head}{normal}{tail}")
}

#[test]
fn healthy_sessions_are_as_recorded() -> Result<()> {
    requires!(namespaces, bpf);
    let namespace = Namespace::new("healthy")?;
    let (_recursor, address) = dnsmasq::start(&namespace, 10)?;
    let running = Running::start_in(
        namespace,
        &json!({
            // Every use of an outside name is shown by userspace.
            "xdp": {"mode": "tc", "interfaces": ["lo"], "cache_entries": 0}, "disable_recursors": false,
            "recursors": [address], "recursor_selection": "serial", "cache": {"enabled": true},
        }),
    )?;
    wait_for_fast_path(&running.namespace)?;
    running.ask("www.example.org.", 1)?;
    // The program for whole answers is loaded after the interface answers.
    wait_until("all programs to be loaded", TIMEOUT, || {
        running
            .cli(&["status"])
            .is_ok_and(|(_, output, _)| !output.contains("  loading"))
    })?;
    Session::new("status-healthy.txt", &running)
        .run(&["status"])?
        .check()?;
    Session::new("resolve-healthy.txt", &running)
        .run(&["resolve", "web.alias"])?
        .run(&["resolve", "q-s0.q-g2.bosh"])?
        .run(&["resolve", "www.example.org"])?
        .check()?;
    Session::new("check-healthy.txt", &running)
        .run(&["check"])?
        .check()?;
    let ask = |name: &'static str| {
        let running = &running;
        move || running.ask(name, 1)
    };
    Session::new("tap-healthy.txt", &running)
        .run_while(
            &["tap", "--path", "fast", "--name", "q-g2", "--count", "2"],
            ask("q-s0.q-g2.bosh."),
        )?
        .run_while(
            &[
                "tap",
                "--path",
                "userspace",
                "--name",
                "example",
                "--count",
                "2",
            ],
            ask("www.example.org."),
        )?
        .check()?;
    Session::new("top-healthy.txt", &running)
        .run_while(&["top", "--once", "--name", "q-g"], || {
            running.ask("q-s0.q-g1.bosh.", 8)?;
            running.ask("q-s0.q-g2.bosh.", 2)
        })?
        .check()
}

#[test]
fn faulty_sessions_are_as_recorded() -> Result<()> {
    requires!(namespaces, bpf);
    let namespace = Namespace::new("faulty")?;
    let (recursor, address) = dnsmasq::start(&namespace, 10)?;
    let running = Running::start_in(
        namespace,
        &json!({
            "xdp": {"mode": "tc", "interfaces": ["eth99"]}, "disable_recursors": false, "recursors": [address],
            "recursor_selection": "serial", "recursor_timeout": "100ms", "recursor_timout": "1s",
        }),
    )?;
    running.server.wait_for_log("no interface is served")?;
    recursor.signal(Signal::SIGSTOP)?;
    fs::write(running.folder().join("records.json"), "{ broken")?;
    running.server.wait_for_log("records: ")?;
    for number in 0..3 {
        running.ask(&format!("n{number}.example.org."), 1)?;
    }
    // Arrivals are reported in intervals, and forgotten between two up-checks. Checks are logged with these.
    let mut shown = None;
    wait_until("lo and the outage in the status", TIMEOUT, || {
        let status = running.cli(&["status"]).ok();
        shown = status.filter(|(_, output, _)| {
            // Its own attacher loads the programs of the mode before it knows the interfaces.
            let has_programs = output.matches("  loaded ").count() == 4;
            output.contains("LEFT TO USERSPACE")
                && output.contains("[main] recursors: ")
                && has_programs
        });
        shown.is_some()
    })?;
    let mut session = Session::new("status-faulty.txt", &running);
    session.record(&["status"], shown.context("just seen")?);
    session.check()?;
    Session::new("resolve-faulty.txt", &running)
        .run(&["resolve", "nosuch.web.net.dep.bosh"])?
        .run(&["resolve", "www.example.org"])?
        .run(&["resolve", "not..a.name"])?
        .check()?;
    Session::new("check-faulty.txt", &running)
        .run(&["check"])?
        .check()?;
    Session::new("tap-faulty.txt", &running)
        .run_while(&["tap", "--name", "fresh", "--count", "1"], || {
            running.ask("fresh.example.org.", 1)
        })?
        .run(&["tap", "--type", "BOGUS"])?
        .check()?;
    Session::new("top-faulty.txt", &running)
        .run_while(&["top", "--once", "--name", "q-g"], || {
            running.ask("q-s0.q-g1.bosh.", 3)
        })?
        .check()?;
    recursor.signal(Signal::SIGCONT)
}
