//! Every command against a running server.

use std::{fs, net::UdpSocket, process::Command, thread, time::Duration};

use anyhow::{Result, ensure};
use hickory_proto::rr::RecordType;
use serde_json::{Value, json};
use whole_system_tests::{
    client,
    namespace::Namespace,
    requirements, requires,
    server::{self, Server},
};

use super::{
    conditions,
    prometheus::Prometheus,
    running::{METRICS_PORT, RECORDS, Running},
};

/// Parses standard output as JSON.
fn parsed(output: &str) -> Value {
    serde_json::from_str(output).unwrap_or_else(|error| panic!("{error}: {output}"))
}

#[test]
fn commands_serve_people_and_scripts() -> Result<()> {
    requires!(namespaces);
    let recursion = json!({"disable_recursors": false, "recursors": ["127.0.0.1:1"], "cache": {"enabled": true}});
    let records = RECORDS.replacen(
        "\"version\"",
        "\"records\": [[\"10.0.9.9\", \"named.test\"]], \"version\"",
        1,
    );
    let aliases = br#"{"web.alias": ["*.web.net.dep.bosh"]}"#;
    let folder = server::folder(records.as_bytes(), Some(aliases))?;
    let running = Running::start_with(Namespace::new("cli")?, folder, &recursion)?;

    let (code, text, _) = running.cli(&["status"])?;
    assert_eq!(code, 0, "{text}");
    assert!(
        text.contains(": ready") && text.contains("version 7"),
        "{text}"
    );
    let status = parsed(&running.cli(&["status", "--json"])?.1);
    assert_eq!(
        (&status["ready"], &status["records"]["instances"]),
        (&json!(true), &json!(4))
    );
    assert_eq!(status["certificates"][0]["purpose"], "api");

    let (code, text, _) = running.cli(&["instances"])?;
    assert_eq!((code, text.lines().count()), (0, 5), "{text}");
    let (code, text, _) = running.cli(&["instances", "--json", "--address", "q-a1s0.q-g1.bosh"])?;
    assert_eq!((code, text.lines().count()), (0, 2), "{text}");
    assert!(text.ends_with('\n'), "a shell's `read` omits the last line");
    let (code, _, problem) = running.cli(&["instances", "--address", "nosuch.q-g1.bosh"])?;
    assert_eq!(code, 1);
    assert!(problem.contains("no instance matches"), "{problem}");

    let (code, text, _) = running.cli(&["local-groups"])?;
    assert!(code == 0 && text.contains("web"), "{text}");
    let (code, text, _) = running.cli(&["local-groups", "--json"])?;
    assert!(code == 0 && text.ends_with('\n'), "{text}");
    let longest = u64::MAX.to_string();
    let (code, _, problem) = running.cli(&["tap", "--count", "0", "--seconds", &longest])?;
    assert_eq!(code, 0, "{problem}");

    let (code, text, _) = running.cli(&["resolve", "web.alias"])?;
    assert_eq!(code, 0);
    for part in ["web.alias", "web", "10.0.0.1", "answered by"] {
        assert!(text.contains(part), "{part} in {text}");
    }
    assert_eq!(running.cli(&["resolve", "nosuch.web.net.dep.bosh"])?.0, 1);
    let explained = parsed(&running.cli(&["resolve", "--json", "q-s0.q-g2.bosh"])?.1);
    assert_eq!(explained["result"]["addresses"], json!(["10.0.0.4"]));

    for (name, answerer) in [
        ("upcheck.bosh-dns", "an up-check name"),
        ("1.0.0.10.in-addr.arpa", "reverse names"),
        ("example.org", "recursors, 127.0.0.1:1 first"),
    ] {
        let (_, text, _) = running.cli(&["resolve", name])?;
        assert!(text.contains(answerer), "{name}: {text}");
    }
    assert_eq!(running.cli(&["resolve", "upcheck.bosh-dns"])?.0, 0);
    for (query_type, part) in [
        ("A", "A: 10.0.0.4"),
        ("AAAA", "AAAA: no data"),
        ("TYPE4242", "TYPE4242: no data"),
    ] {
        let (code, text, _) = running.cli(&["resolve", "q-s0.q-g2.bosh", "--type", query_type])?;
        assert!(code == 0 && text.contains(part), "{query_type}: {text}");
    }
    // As `dig -x` is answered.
    let (code, text, _) = running.cli(&["resolve", "4.0.0.10.in-addr.arpa", "--type", "PTR"])?;
    assert!(
        code == 0 && text.contains("reverse name of 10.0.0.4, with 0 names"),
        "{text}"
    );
    let (code, text, _) = running.cli(&["resolve", "9.9.0.10.in-addr.arpa"])?;
    assert!(code == 0 && text.contains("    + named.test."), "{text}");
    let (code, _, problem) = running.cli(&["tap", "--type", "BOGUS"])?;
    assert!(
        code == 2 && problem.contains("unknown query type"),
        "{code}: {problem}"
    );

    let (code, text, _) = running.cli(&[
        "address", "--group", "1", "--az", "z2", "--status", "healthy",
    ])?;
    assert_eq!((code, text.as_str()), (0, "q-a2s3.q-g1.bosh\n"));
    let (_, text, _) = running.cli(&["instances", "--json", "--address", text.trim()])?;
    assert_eq!(parsed(text.trim())["id"], "b");

    assert_eq!(
        parsed(&running.cli(&["flush", "--json"])?.1),
        json!({"flushed": 0})
    );
    Ok(())
}

#[test]
fn reload_reports_rejected_files() -> Result<()> {
    requires!(namespaces);
    let running = Running::start("reload", &json!({}))?;
    assert_eq!(running.cli(&["reload"])?.0, 0);
    fs::write(running.folder().join("records.json"), "{ broken")?;
    let (code, text, problem) = running.cli(&["reload"])?;
    assert_eq!(code, 1, "{text}{problem}");
    assert!(
        text.contains("failed  records") && problem.contains("last good state"),
        "{text}{problem}"
    );
    let (code, text, _) = running.cli(&["status"])?;
    assert_eq!(code, 1);
    assert!(
        text.contains("NOT READY") && text.contains("FAIL  records"),
        "{text}"
    );
    assert_eq!(running.cli(&["instances"])?.1.lines().count(), 5);
    Ok(())
}

#[test]
fn log_levels_change_at_runtime() -> Result<()> {
    requires!(namespaces);
    let running = Running::start("log", &json!({}))?;
    let lines = || {
        running
            .server
            .log()
            .lines()
            .filter(|line| line.contains("[RequestLoggerHandler] request"))
            .count()
    };
    running.ask("q-s0.q-g1.bosh.", 3)?;
    let change = [
        "log",
        "--tag",
        "RequestLoggerHandler",
        "--level",
        "debug",
        "--requests-per-second",
        "5",
    ];
    assert_eq!(running.cli(&change)?.0, 0);
    assert_eq!(lines(), 0);
    running.ask("q-s0.q-g1.bosh.", 200)?;
    running.server.wait_for_log("suppressed")?;
    // 200 queries take a second or two, with five lines per second.
    assert!((5..150).contains(&lines()), "{} lines", lines());
    running
        .server
        .wait_for_log("name=q-s0.q-g1.bosh. type=A rcode=NOERROR")?;
    let levels = parsed(&running.cli(&["log", "--json"])?.1);
    assert_eq!(levels["levels"]["tags"]["RequestLoggerHandler"], "DEBUG");
    assert_eq!(
        running
            .cli(&["log", "--tag", "RequestLoggerHandler", "--level", "default"])?
            .0,
        0
    );
    let (code, _, problem) = running.cli(&["log", "--tag", "nonsense", "--level", "debug"])?;
    assert!(code == 2 && problem.contains("ForwardHandler"), "{problem}");
    // Without a tag, the general level returns to the configured one.
    for (level, shown) in [("error", "ERROR"), ("Default", "INFO")] {
        assert_eq!(running.cli(&["log", "--level", level])?.0, 0);
        assert_eq!(
            parsed(&running.cli(&["log", "--json"])?.1)["levels"]["level"],
            shown
        );
    }
    let (code, _, problem) = running.cli(&["log", "--level", "loud"])?;
    assert!(code == 2 && problem.contains("WARN"), "{problem}");
    Ok(())
}

#[test]
fn tap_shows_live_queries() -> Result<()> {
    requires!(namespaces);
    let running = Running::start("tap", &json!({}))?;
    let (code, text, problem) = thread::scope(|scope| {
        let tap = scope.spawn(|| {
            running.cli(&[
                "tap",
                "--json",
                "--name",
                "q-g2",
                "--count",
                "3",
                "--seconds",
                "20",
            ])
        });
        while !tap.is_finished() {
            running.ask("q-s0.q-g1.bosh.", 1)?;
            running.ask("q-s0.q-g2.bosh.", 1)?;
            thread::sleep(Duration::from_millis(20));
        }
        tap.join().expect("the commands do not panic")
    })?;
    assert_eq!((code, text.lines().count()), (0, 3), "{text}{problem}");
    for line in text.lines().map(parsed) {
        assert_eq!(
            (&line["name"], &line["path"]),
            (&json!("q-s0.q-g2.bosh."), &json!("userspace"))
        );
    }
    let (code, text, problem) = thread::scope(|scope| {
        let top = scope.spawn(|| running.cli(&["top", "--json", "--seconds", "2"]));
        while !top.is_finished() {
            running.ask("q-s0.q-g1.bosh.", 4)?;
            running.ask("q-s0.q-g2.bosh.", 1)?;
            thread::sleep(Duration::from_millis(20));
        }
        top.join().expect("the commands do not panic")
    })?;
    assert_eq!(code, 0, "{problem}");
    let page = parsed(&text);
    assert_eq!(page["names"][0]["name"], "q-s0.q-g1.bosh.", "{page}");
    // Counts this small are exact.
    let asked = |number: usize| {
        page["names"][number]["userspace"]
            .as_i64()
            .unwrap_or_default()
    };
    assert!((asked(0) - 4 * asked(1)).abs() <= 4, "{page}");
    assert_eq!(page["clients"][0]["client"], "127.0.0.1");
    assert!(
        page["per_second"]["userspace"].as_f64() > Some(0.0),
        "{page}"
    );
    Ok(())
}

#[test]
fn cli_accepts_reference_environment() -> Result<()> {
    requires!(namespaces);
    let running = Running::start("env", &json!({}))?;
    let certificates = running.folder().join("certificates");
    let mut command = running.namespace.command(server::program()?)?;
    command
        .args(["instances", "--json"])
        .env(
            "DNS_API_ADDRESS",
            format!("https://127.0.0.1:{}", super::running::API_PORT),
        )
        .env("DNS_API_TLS_CA_CERT_PATH", certificates.join("ca.crt"))
        .env(
            "DNS_API_TLS_CERTIFICATE_PATH",
            certificates.join("client.crt"),
        )
        .env(
            "DNS_API_TLS_PRIVATE_KEY_PATH",
            certificates.join("client.key"),
        );
    let output = command.output()?;
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    assert_eq!(String::from_utf8(output.stdout)?.lines().count(), 4);
    let (code, _, problem) = running.cli(&["status", "--api", "127.0.0.1:1"])?;
    assert_eq!(code, 3, "{problem}");
    Ok(())
}

#[test]
fn completions_and_manual_cover_commands() -> Result<()> {
    let program = server::program()?;
    for (arguments, part) in [
        (&["completions", "bash"][..], "local-groups"),
        (&["completions", "zsh"], "local-groups"),
        (&["man"], ".TH"),
        (&["--help"], "resolve"),
    ] {
        let output = Command::new(&program).args(arguments).output()?;
        assert!(output.status.success());
        assert!(
            String::from_utf8(output.stdout)?.contains(part),
            "{arguments:?}"
        );
    }
    let pages = tempfile::tempdir()?;
    let written = Command::new(&program)
        .args(["man", "--folder"])
        .arg(pages.path())
        .status()?;
    assert!(written.success());
    assert!(pages.path().join("bosh-dns-xdp-status.8").exists());
    assert_eq!(
        Command::new(&program)
            .arg("nonsense")
            .output()?
            .status
            .code(),
        Some(2)
    );
    assert_eq!(
        Command::new(&program).output()?.status.code(),
        Some(2),
        "a bare call"
    );
    Ok(())
}

#[test]
fn commands_change_no_other_server() -> Result<()> {
    requires!(namespaces);
    let folder = server::folder(RECORDS.as_bytes(), None)?;
    let socket = folder.path().join("control.sock");
    let running = Running::start_with(
        Namespace::new("other")?,
        folder,
        &json!({"control": {"socket": socket}}),
    )?;
    // A second configuration that leads to the running server's socket; its own server is down.
    let mut other = running.server.settings()?;
    other["port"] = json!(5353);
    fs::write(running.folder().join("other.json"), other.to_string())?;
    let program = server::program()?;
    let program = program.to_str().unwrap_or_default();
    for command in [
        &["cache", "flush", "all"][..],
        &["reload"],
        &["log", "--level", "debug"],
        &["status"],
    ] {
        let output = running.output(program, &[command, &["--config", "other.json"]].concat())?;
        let problem = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(output.status.code() == Some(3), "{command:?}: {output:?}");
        ensure!(
            problem.contains("config.json, not with other.json"),
            "{command:?}: {problem}"
        );
    }
    ensure!(
        !running.server.log().contains("API: reloading"),
        "{}",
        running.server.log()
    );
    let output = running.output(
        program,
        &[
            "status",
            "--config",
            "other.json",
            "--socket",
            "control.sock",
        ],
    )?;
    ensure!(output.status.success(), "{output:?}");
    Ok(())
}

#[test]
fn closed_output_is_no_panic() -> Result<()> {
    requires!(namespaces);
    let running = Running::start("output", &json!({}))?;
    let program = server::program()?.display().to_string();
    for command in [
        "check --config config.json",
        "check --json --config config.json",
        "config --default",
    ] {
        let line = format!("'{program}' {command} | true");
        let output = running.output("bash", &["-c", &format!("set -o pipefail; {line}")])?;
        let problem = String::from_utf8_lossy(&output.stderr);
        ensure!(
            output.status.success() && problem.is_empty(),
            "{command}: {output:?}"
        );
        let output = running.output(
            "bash",
            &["-c", &format!("'{program}' {command} > /dev/full")],
        )?;
        let problem = String::from_utf8_lossy(&output.stderr);
        ensure!(
            output.status.code() == Some(1) && problem.contains("standard output"),
            "{output:?}"
        );
    }
    let output = running.output(
        "bash",
        &[
            "-c",
            &format!("'{program}' status --config config.json > /dev/full"),
        ],
    )?;
    ensure!(output.status.code() == Some(1), "{output:?}");
    Ok(())
}

/// Gives this process a private, empty /run.
fn private_run() -> std::io::Result<()> {
    use nix::mount::{MsFlags, mount};
    nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNS)?;
    let none = None::<&str>;
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)?;
    Ok(mount(
        Some("tmpfs"),
        "/run",
        Some("tmpfs"),
        MsFlags::empty(),
        none,
    )?)
}

#[test]
fn control_socket_exists_by_default() -> Result<()> {
    requires!(namespaces);
    let namespace = Namespace::new("control")?;
    let folder = server::folder(RECORDS.as_bytes(), None)?;
    let config = folder.path().join("config.json");
    let settings = json!({"xdp": {"mode": "off"}});
    let server = Server::start_prepared(
        Some(&namespace),
        folder,
        ([127, 0, 0, 1], 53).into(),
        &settings,
        |command| {
            // As an operator's file without the object.
            let text = fs::read(&config).expect("the configuration was written");
            let mut parsed: Value = serde_json::from_slice(&text).expect("JSON");
            parsed.as_object_mut().expect("an object").remove("control");
            fs::write(&config, parsed.to_string()).expect("a writable folder");
            // SAFETY: plain system calls, allowed between fork and exec.
            unsafe { std::os::unix::process::CommandExt::pre_exec(command, private_run) };
        },
    )?;
    let pid = server.pid().to_string();
    let program = server::program()?;
    let inside = |user: &[&str], words: &[&str]| {
        let mut command = Command::new("nsenter");
        command
            .args(["--target", &pid, "--mount", "--net", "--"])
            .args(user)
            .args(words)
            .output()
    };
    let config = server.folder.path().join("config.json");
    let status = [
        &*program.to_string_lossy(),
        "status",
        "--config",
        &*config.to_string_lossy(),
    ];
    let output = inside(&[], &status)?;
    let text = String::from_utf8_lossy(&output.stdout);
    ensure!(
        output.status.success() && text.contains("overload"),
        "{output:?}"
    );
    let output = inside(
        &[],
        &["stat", "-c", "%a %u", "/run/bosh-dns-xdp/control.sock"],
    )?;
    ensure!(output.stdout == b"600 0\n", "{output:?}");
    // Other users are not admitted.
    let output = inside(&["setpriv", "--reuid", "65534", "--clear-groups"], &status)?;
    ensure!(!output.status.success(), "{output:?}");
    // A file that cannot be read leads to no other server.
    let unreadable = server.folder.path().join("missing.json");
    let reload = [
        &*program.to_string_lossy(),
        "reload",
        "--config",
        &*unreadable.to_string_lossy(),
    ];
    let output = inside(&[], &reload)?;
    ensure!(output.status.code() == Some(3), "{output:?}");
    ensure!(!server.log().contains("API: reloading"), "{}", server.log());
    Ok(())
}

#[test]
fn limited_clients_are_shown() -> Result<()> {
    requires!(namespaces);
    let settings = json!({
        "disable_recursors": false, "recursors": ["127.0.0.9:53"], "recursor_timeout": "4s",
    });
    let running = Running::start("limited", &settings)?;
    let address = running.server.address;
    let [_silent, flooding] = running.namespace.run(|| -> Result<[UdpSocket; 2]> {
        Ok([
            UdpSocket::bind("127.0.0.9:53")?,
            UdpSocket::bind("127.0.0.7:0")?,
        ])
    })??;
    // A busy machine loses a part of a flood.
    let mut text = String::new();
    for flood in 0..20 {
        for number in 0..6000 {
            let query = client::query(&format!("f{flood}-{number}.test."), RecordType::A, None)?;
            flooding.send_to(&query.to_vec()?, address)?;
            if number % 50 == 0 {
                thread::sleep(Duration::from_millis(3));
            }
        }
        text = running.cli(&["status"])?.1;
        if text.contains("127.0.0.7") {
            break;
        }
    }
    let line = text
        .lines()
        .find(|line| line.contains("127.0.0.7") && line.contains("ago"));
    ensure!(
        line.is_some_and(|line| line.contains("recursors")),
        "{text}"
    );
    let (_, text, _) = running.cli(&["status", "--json"])?;
    let budgets = &parsed(&text)["overload"]["budgets"];
    ensure!(
        budgets[1]["name"] == "recursors" && budgets[1]["limited"][0]["client"] == "127.0.0.7",
        "{budgets}"
    );
    if requirements::prometheus() {
        let prometheus = Prometheus::start(&running.namespace, &[("bosh-dns-xdp", METRICS_PORT)])?;
        let cause = "among them 127.0.0.7";
        conditions::assert_found(&running, &prometheus, "clients_limited", cause)?;
    }
    let (_, text, _) = running.cli(&["top", "--once", "--seconds", "1"])?;
    ensure!(
        text.lines()
            .any(|line| line.contains("127.0.0.7") && line.contains("recursors")),
        "{text}"
    );
    Ok(())
}

/// Returns the names of a command's subcommands, from its help.
fn subcommands(help: &str) -> Vec<String> {
    let is_command = |line: &&str| {
        line.starts_with("  ") && !line.starts_with("   ") && !line.starts_with("  -")
    };
    let commands = help.split("\nOptions:").next().unwrap_or_default();
    let names = commands
        .lines()
        .filter(is_command)
        .filter_map(|line| line.split_whitespace().next());
    names
        .filter(|name| *name != "help")
        .map(str::to_owned)
        .collect()
}

#[test]
fn help_fits_narrow_terminal() -> Result<()> {
    let programs = [
        server::program()?,
        server::companion("bosh-dns-sync")?,
        server::companion("bosh-dns-publish")?,
        server::companion("bosh-dns-identity")?,
    ];
    for program in programs {
        let help = |words: &[String]| -> Result<String> {
            let mut command = Command::new(&program);
            // The width of a terminal, for programs whose output is none.
            let output = command
                .args(words)
                .arg("--help")
                .env("COLUMNS", "80")
                .output()?;
            ensure!(output.status.success(), "{words:?}: {output:?}");
            Ok(String::from_utf8(output.stdout)?)
        };
        let mut commands: Vec<Vec<String>> = vec![Vec::new()];
        let mut seen = 0;
        while let Some(words) = commands.get(seen).cloned() {
            seen += 1;
            let text = help(&words)?;
            // A usage line is copied as a whole.
            let mut prose = text.lines().filter(|line| !line.starts_with("Usage: "));
            let long = prose.find(|line| line.chars().count() > 80);
            ensure!(long.is_none(), "{} {words:?}: {long:?}", program.display());
            if text.contains("Commands:") || words.is_empty() {
                commands.extend(subcommands(&text).into_iter().map(|name| {
                    let mut words = words.clone();
                    words.push(name);
                    words
                }));
            }
        }
        ensure!(seen > 3, "{}: {commands:?}", program.display());
    }
    Ok(())
}

#[test]
fn fatal_start_error_has_priority() -> Result<()> {
    use std::os::unix::fs::MetadataExt as _;
    let folder = server::folder(RECORDS.as_bytes(), None)?;
    fs::write(folder.path().join("config.json"), "{ \"port\": ")?;
    let fatal = |journal: &fs::File| -> Result<String> {
        let metadata = journal.metadata()?;
        let mut command = Command::new(server::program()?);
        command
            .args(["run", "--config", "config.json"])
            .current_dir(&folder)
            .stderr(journal.try_clone()?);
        // How systemd says that standard error is the journal's.
        command.env(
            "JOURNAL_STREAM",
            format!("{}:{}", metadata.dev(), metadata.ino()),
        );
        ensure!(command.status()?.code() == Some(1));
        Ok(fs::read_to_string(folder.path().join("journal"))?)
    };
    let text = fatal(&fs::File::create(folder.path().join("journal"))?)?;
    ensure!(text.starts_with("<3>bosh-dns-xdp: config.json: "), "{text}");
    Ok(())
}
