//! Faults that an operator must see: in the log, in `status`, at `/readyz`.

use std::{
    fs,
    net::UdpSocket,
    process::Command,
    thread,
    time::{Duration, SystemTime},
};

use anyhow::{Result, ensure};
use hickory_proto::rr::RecordType;
use nix::{
    mount::{MsFlags, mount},
    sched::{CloneFlags, unshare},
    sys::signal::Signal,
};
use serde_json::{Value, json};
use whole_system_tests::{
    client,
    namespace::Namespace,
    process::wait_until,
    requires,
    server::{self, Server},
};

use crate::{
    dnsmasq,
    running::{METRICS_PORT, RECORDS, Running, write_certificates},
};

/// Time limit, reached only on failure.
const TIMEOUT: Duration = Duration::from_secs(120);

/// Returns status and body of `/readyz`.
fn readyz(running: &Running) -> Result<(String, String)> {
    let url = format!("http://127.0.0.1:{METRICS_PORT}/readyz");
    let text = running.curl(&["-w", "%{http_code}", &url])?;
    let (body, status) = text.rsplit_once('\n').unwrap_or(("", &text));
    Ok((status.to_owned(), body.to_owned()))
}

/// Waits until `/readyz` has this status and a line that begins with `line`.
fn wait_for_readyz(running: &Running, status: &str, line: &str) -> Result<()> {
    let mut last = None;
    let waited = wait_until(line, TIMEOUT, || {
        last = readyz(running).ok();
        last.as_ref().is_some_and(|(found, body)| {
            found == status && body.lines().any(|found| found.starts_with(line))
        })
    });
    waited.map_err(|error| error.context(format!("{last:?}\n{}", running.server.log())))
}

fn metric(running: &Running, name: &str) -> Result<String> {
    let text = running.curl(&[&format!("http://127.0.0.1:{METRICS_PORT}/metrics")])?;
    Ok(text
        .lines()
        .find_map(|line| line.strip_prefix(&format!("{name} ")))
        .unwrap_or("absent")
        .to_owned())
}

#[test]
fn missing_interface_degrades() -> Result<()> {
    requires!(namespaces, bpf);
    let running = Running::start(
        "eth99",
        &json!({"xdp": {"mode": "tc", "interfaces": ["eth99"]}}),
    )?;
    wait_for_readyz(
        &running,
        "200",
        "warn fast path: on no interface: xdp.interfaces names eth99",
    )?;
    running
        .server
        .wait_for_log("WARN  [main] no interface is served")?;
    let (code, text, _) = running.cli(&["status"])?;
    ensure!(
        code == 0 && text.contains("ready, degraded") && text.contains("  warn  fast path"),
        "{code}: {text}"
    );
    ensure!(metric(&running, "bosh_dns_xdp_fast_path_degraded")? == "1");
    // The interface appears: the state ends.
    running
        .namespace
        .ip("link add eth99 type veth peer name eth98")?;
    running.namespace.ip("link set eth99 up")?;
    wait_for_readyz(&running, "200", "ok   fast path: on")?;
    ensure!(metric(&running, "bosh_dns_xdp_fast_path_degraded")? == "0");
    Ok(())
}

#[test]
fn wildcards_wait_for_queries() -> Result<()> {
    requires!(namespaces, bpf);
    let running = Running::start(
        "wild",
        &json!({"xdp": {"mode": "tc", "interfaces": ["w-*"]}}),
    )?;
    wait_for_readyz(&running, "200", "ok   fast path: on no interface yet")?;
    running.ask("q-s0.q-g1.bosh.", 20)?;
    thread::sleep(Duration::from_secs(1));
    wait_for_readyz(&running, "200", "ok   fast path: on no interface yet")?;
    ensure!(
        !running.server.log().contains("no interface is served"),
        "{}",
        running.server.log()
    );
    Ok(())
}

#[test]
fn recursor_failures_are_logged_once() -> Result<()> {
    requires!(namespaces);
    let namespace = Namespace::new("failing")?;
    let (silent, silent_address) = dnsmasq::start(&namespace, 10)?;
    let (_refusing, refusing_address) = dnsmasq::start(&namespace, 11)?;
    let settings = json!({
        "disable_recursors": false, "recursors": [silent_address, refusing_address],
        "recursor_selection": "smart", "recursor_timeout": "100ms",
    });
    let running = Running::start_in(namespace, &settings)?;
    silent.signal(Signal::SIGSTOP)?;
    for number in 0..40 {
        running.ask(&format!("n{number}.elsewhere.test."), 1)?;
    }
    running.server.wait_for_log("reason=timeout")?;
    running.server.wait_for_log("reason=refused")?;
    let log = running.server.log();
    // On a busy machine, the refusing recursor may be late, too.
    let of = |address: std::net::SocketAddr, reason: &str| {
        let recursor = format!("recursor={address}");
        let is_it = |line: &&str| line.contains(&recursor) && line.contains(reason);
        log.lines()
            .filter(is_it)
            .filter(|line| line.contains("WARN  [ForwardHandler]"))
            .count()
    };
    ensure!(
        of(
            silent_address,
            "a query to a recursor failed: no reply in time"
        ) == 1,
        "{log}"
    );
    ensure!(
        of(silent_address, "reason=timeout") == 1 && of(refusing_address, "reason=refused") == 1,
        "{log}"
    );
    let status: Value = serde_json::from_str(&running.cli(&["status", "--json"])?.1)?;
    for (address, reason) in [(silent_address, "timeout"), (refusing_address, "refused")] {
        let recursors = status["recursors"].as_array().into_iter().flatten();
        let recursor = recursors
            .into_iter()
            .find(|one| one["address"] == address.to_string());
        let recursor = recursor.unwrap_or(&Value::Null);
        ensure!(
            recursor["failures"][reason].as_u64() >= Some(5),
            "{recursor}"
        );
        // The preference has moved, and operators still see why.
        ensure!(
            recursor["recent_failures"].as_u64() >= Some(5),
            "{recursor}"
        );
    }
    let (_, text, _) = running.cli(&["status"])?;
    ensure!(
        text.contains("timeout ") && text.contains("refused "),
        "{text}"
    );
    running
        .server
        .wait_for_log("queries to a recursor failed within 10 s: timeout")?;
    silent.signal(Signal::SIGCONT)?;
    Ok(())
}

#[test]
fn dead_recursors_degrade() -> Result<()> {
    requires!(namespaces);
    let settings = json!({
        "disable_recursors": false, "recursors": ["127.0.0.8:53", "127.0.0.9:53"], "recursor_timeout": "100ms",
    });
    let running = Running::start("dead", &settings)?;
    ensure!(
        !readyz(&running)?.1.contains("recursors"),
        "no query was sent yet"
    );
    for number in 0..3 {
        running.ask(&format!("n{number}.elsewhere.test."), 1)?;
    }
    wait_for_readyz(
        &running,
        "200",
        "warn recursors: no recursor answers (127.0.0.8:53, 127.0.0.9:53)",
    )?;
    let (code, text, _) = running.cli(&["status"])?;
    ensure!(
        code == 0 && text.contains("ready, degraded") && text.contains("warn  recursors"),
        "{text}"
    );
    // One that answers, even with an error, ends the state.
    let _recursor = running.namespace.run(|| -> Result<_> {
        let socket = UdpSocket::bind("127.0.0.8:53")?;
        Ok(thread::spawn(move || {
            let mut message = [0; 512];
            while let Ok((length, client)) = socket.recv_from(&mut message) {
                // QR set, RCODE SERVFAIL.
                (message[2], message[3]) = (message[2] | 0x80, 2);
                let _ = socket.send_to(&message[..length], client);
            }
        }))
    })??;
    wait_until("the recursor's reply", TIMEOUT, || {
        let asked = running.ask("n.elsewhere.test.", 1);
        asked.is_ok()
            && readyz(&running).is_ok_and(|(_, body)| !body.contains("no recursor answers"))
    })
}

#[test]
fn records_without_instances_degrade() -> Result<()> {
    requires!(namespaces);
    let running = Running::start("nobody", &json!({}))?;
    wait_for_readyz(&running, "200", "ok   records: 4 instances")?;
    let empty = r#"{"record_keys": ["id"], "record_infos": [], "version": 8}"#;
    fs::write(running.folder().join("records.json"), empty)?;
    wait_for_readyz(&running, "200", "warn records: ")?;
    let (code, text, _) = running.cli(&["status"])?;
    ensure!(
        code == 0 && text.contains("records.json has no instance"),
        "{text}"
    );
    Ok(())
}

#[test]
fn expired_api_certificate_degrades() -> Result<()> {
    requires!(namespaces);
    let folder = server::folder(RECORDS.as_bytes(), None)?;
    let socket = folder.path().join("control.sock");
    let settings = json!({"control": {"socket": socket}});
    let running = Running::start_with(Namespace::new("expired")?, folder, &settings)?;
    let (key, path) = (
        rcgen::KeyPair::generate()?,
        running.folder().join("certificates"),
    );
    let mut params = rcgen::CertificateParams::new(["api.bosh-dns".to_owned()])?;
    params.not_after = rcgen::date_time_ymd(2020, 1, 1);
    fs::write(path.join("server.crt"), params.self_signed(&key)?.pem())?;
    fs::write(path.join("server.key"), key.serialize_pem())?;
    // Until both files are read, they do not match.
    let certificate = path.join("server.crt");
    let expired = format!(
        "warn certificates: api: {} is not valid now: it has expired",
        certificate.display()
    );
    wait_for_readyz(&running, "200", &expired)?;
    // A set that cannot be used is not in use, but must not go unnoticed.
    fs::write(path.join("server.crt"), "half a file")?;
    wait_until("the error of the new files", TIMEOUT, || {
        readyz(&running).is_ok_and(|(_, body)| body.contains("warn certificates: api: "))
    })?;
    let (code, text, _) = running.cli(&["status", "--socket", "control.sock"])?;
    ensure!(code == 0 && text.contains("warn  certificates"), "{text}");
    Ok(())
}

#[test]
fn unchecked_health_degrades() -> Result<()> {
    requires!(namespaces);
    let namespace = Namespace::new("silent")?;
    let folder = server::folder(RECORDS.as_bytes(), None)?;
    let certificates = folder.path().join("health");
    fs::create_dir(&certificates)?;
    write_certificates(&certificates)?;
    // No instance has a route, let alone a health server.
    let settings = json!({"health": {
        "enabled": true, "port": 2345, "synchronous_check_timeout": "200ms",
        "certificate_file": certificates.join("client.crt"), "ca_file": certificates.join("ca.crt"),
        "private_key_file": certificates.join("client.key"),
    }});
    let running = Running::start_with(namespace, folder, &settings)?;
    wait_for_readyz(&running, "200", "ok   health checks: ")?;
    running.ask("q-s0.q-g1.bosh.", 1)?;
    wait_for_readyz(
        &running,
        "200",
        "warn health checks: no checked instance answers",
    )?;
    // New files that cannot be used.
    fs::write(certificates.join("client.crt"), "half a file")?;
    wait_for_readyz(
        &running,
        "200",
        "warn certificates: health_client: the new files cannot be used",
    )
}

#[test]
fn missing_jobs_dir_is_intended() -> Result<()> {
    requires!(namespaces);
    let running = Running::start("nojobs", &json!({"jobs_dir": ""}))?;
    wait_for_readyz(&running, "200", "ok   sockets")?;
    let (_, body) = readyz(&running)?;
    ensure!(!body.contains("warn"), "{body}");
    let (code, text, _) = running.cli(&["status"])?;
    ensure!(
        code == 0 && text.contains("note  jobs_dir is not configured"),
        "{text}"
    );
    Ok(())
}

#[test]
fn standstill_is_logged() -> Result<()> {
    requires!(namespaces);
    let running = Running::start("stopped", &json!({}))?;
    // The clocks are read once before the stop.
    thread::sleep(Duration::from_secs(2));
    nix::sys::signal::kill(
        nix::unistd::Pid::from_raw(running.server.pid().cast_signed()),
        Signal::SIGSTOP,
    )?;
    thread::sleep(Duration::from_secs(5));
    nix::sys::signal::kill(
        nix::unistd::Pid::from_raw(running.server.pid().cast_signed()),
        Signal::SIGCONT,
    )?;
    running.server.wait_for_log("the process stood still for")
}

#[test]
fn broken_configuration_is_not_ready() -> Result<()> {
    requires!(namespaces);
    let running = Running::start("broken", &json!({}))?;
    let path = running.folder().join("config.json");
    let good = fs::read(&path)?;
    running
        .server
        .change_settings(|settings| settings["recursor_timeout"] = json!("5"))?;
    let (code, text, problem) = running.cli(&["reload"])?;
    ensure!(
        code == 1 && text.contains("failed  config"),
        "{code}: {text}{problem}"
    );
    wait_for_readyz(&running, "503", "fail configuration: ")?;
    running
        .server
        .wait_for_log("WARN  [main] API: reload finished with 1 failures")?;
    let log = running.server.log();
    ensure!(!log.contains("INFO  [main] API: reload finished"), "{log}");
    // The command finds the server by the rest of the file.
    let (code, text, problem) = running.cli(&["status"])?;
    ensure!(
        code == 1 && text.contains("NOT READY") && problem.contains("recursor_timeout"),
        "{text}{problem}"
    );
    fs::write(&path, good)?;
    ensure!(running.cli(&["reload"])?.0 == 0);
    wait_for_readyz(&running, "200", "ok   configuration")?;
    // A cured failure is no longer shown.
    let (_, text, _) = running.cli(&["status"])?;
    ensure!(!text.contains("FAILED"), "{text}");
    fs::write(running.folder().join("addresses/wrong.json"), "{")?;
    wait_for_readyz(&running, "503", "fail addresses: ")?;
    ensure!(running.cli(&["reload"])?.0 == 1);
    Ok(())
}

#[test]
fn status_needs_no_configuration() -> Result<()> {
    requires!(namespaces);
    let namespace = Namespace::new("nojson")?;
    let folder = server::folder(RECORDS.as_bytes(), None)?;
    // A private /run for the default control socket.
    let private_run = |command: &mut Command| {
        use std::os::unix::process::CommandExt as _;
        let enter = || {
            unshare(CloneFlags::CLONE_NEWNS)?;
            mount(
                None::<&str>,
                "/",
                None::<&str>,
                MsFlags::MS_REC | MsFlags::MS_PRIVATE,
                None::<&str>,
            )?;
            Ok(mount(
                Some("tmpfs"),
                "/run",
                Some("tmpfs"),
                MsFlags::empty(),
                None::<&str>,
            )?)
        };
        // SAFETY: only plain system calls between fork and exec.
        unsafe { command.pre_exec(enter) };
    };
    let settings =
        json!({"xdp": {"mode": "off"}, "control": {"socket": "/run/bosh-dns-xdp/control.sock"}});
    let server = Server::start_prepared(
        Some(&namespace),
        folder,
        ([127, 0, 0, 1], 53).into(),
        &settings,
        private_run,
    )?;
    let config = server.folder.path().join("config.json");
    let status = || {
        let mut command = Command::new("nsenter");
        command
            .args(["--target", &server.pid().to_string(), "--net", "--mount"])
            .arg(server::program()?);
        Ok::<_, anyhow::Error>(command.args(["status", "--config"]).arg(&config).output()?)
    };
    wait_until("the control socket", TIMEOUT, || {
        status().is_ok_and(|output| output.status.success())
    })?;
    fs::write(&config, "{ \"address\": ")?;
    let output = status()?;
    let (text, problem) = (
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    ensure!(
        output.status.success() && text.contains("pid"),
        "{text}{problem}"
    );
    ensure!(
        problem.contains("trying the default control socket"),
        "{problem}"
    );
    Ok(())
}

#[test]
fn empty_alias_file_spares_dns() -> Result<()> {
    requires!(namespaces);
    let namespace = Namespace::new("alias")?;
    let folder = server::folder(
        RECORDS.as_bytes(),
        Some(br#"{"db.alias": ["*.db.net.dep.bosh"]}"#),
    )?;
    fs::write(folder.path().join("aliases/empty.json"), "")?;
    let running = Running::start_with(namespace, folder, &json!({}))?;
    running.server.wait_for_log("empty.json")?;
    running.server.wait_for_log("the others are served")?;
    wait_for_readyz(&running, "503", "fail aliases: ")?;
    let query = client::query("db.alias.", RecordType::A, None)?;
    let reply = running
        .namespace
        .run(|| client::ask(running.server.address, &query))??;
    ensure!(
        client::addresses(&reply) == [std::net::IpAddr::from([10, 0, 0, 4])],
        "{reply}"
    );
    let (code, _, problem) = running.cli(&["check"])?;
    ensure!(code == 1 && problem.contains("empty.json"), "{problem}");
    fs::write(running.folder().join("aliases/empty.json"), "{}")?;
    wait_for_readyz(&running, "200", "ok   aliases")
}

#[test]
fn fatal_error_is_printed_once() -> Result<()> {
    requires!(namespaces);
    let running = Running::start("twice", &json!({}))?;
    let program = server::program()?;
    let output = running.output(
        &program.display().to_string(),
        &["run", "--config", "config.json"],
    )?;
    ensure!(output.status.code() == Some(1), "{output:?}");
    let all = [output.stdout, output.stderr].concat();
    let all = String::from_utf8_lossy(&all);
    let lines = all
        .lines()
        .filter(|line| line.contains("127.0.0.1:53") && line.contains("in use"));
    ensure!(lines.count() == 1, "{all}");
    Ok(())
}

#[test]
fn outside_names_are_explained() -> Result<()> {
    requires!(namespaces);
    let namespace = Namespace::new("outside")?;
    let (_recursor, address) = dnsmasq::start(&namespace, 10)?;
    let settings = json!({
        "disable_recursors": false, "recursors": [address, "127.0.0.1:9"], "recursor_selection": "serial",
        "cache": {"enabled": true},
    });
    let running = Running::start_in(namespace, &settings)?;
    let (code, text, _) = running.cli(&["resolve", "www.example.org"])?;
    ensure!(code == 0, "{text}");
    for part in [
        "recursor 127.0.0.10:53: asked first",
        "recursor 127.0.0.1:9: asked next",
        "cache: no A",
    ] {
        ensure!(text.contains(part), "{part}: {text}");
    }
    running.ask("www.example.org.", 1)?;
    let explained: Value =
        serde_json::from_str(&running.cli(&["resolve", "--json", "www.example.org"])?.1)?;
    let cached = &explained["forwarding"]["cached"][0];
    ensure!(
        cached["type"] == "A" && cached["state"] == "fresh",
        "{explained}"
    );
    ensure!(cached["recursor"] == "127.0.0.10:53", "{explained}");
    ensure!(
        (200..=300).contains(&cached["ttl_seconds"].as_u64().unwrap_or_default()),
        "{explained}"
    );
    let (_, text, _) = running.cli(&["resolve", "www.example.org"])?;
    ensure!(
        text.contains("cache: A answer from 127.0.0.10:53, TTL ")
            && text.contains("cache: no AAAA"),
        "{text}"
    );
    Ok(())
}

#[test]
fn handled_names_are_explained() -> Result<()> {
    requires!(namespaces);
    let namespace = Namespace::new("handled")?;
    let folder = server::folder(RECORDS.as_bytes(), None)?;
    let handlers = json!([
        {"domain": "corp.example.", "source": {"type": "dns", "recursors": ["127.0.0.10:53"]}},
        {"domain": "gone.example.", "source": {"type": "deny"}},
    ]);
    fs::write(
        folder.path().join("handlers/handlers.json"),
        handlers.to_string(),
    )?;
    let running = Running::start_with(namespace, folder, &json!({}))?;
    for (name, answerer) in [
        (
            "www.corp.example",
            "answered by: userspace: the handler for corp.example.",
        ),
        (
            "www.gone.example",
            "answered by: userspace: the handler for gone.example.",
        ),
    ] {
        let (_, text, problem) = running.cli(&["resolve", name])?;
        ensure!(text.contains(answerer), "{name}: {text}{problem}");
    }
    Ok(())
}

#[test]
fn detach_without_pins_is_refused() -> Result<()> {
    requires!(namespaces, bpf);
    let namespace = Namespace::new("nopins")?;
    let folder = server::folder(RECORDS.as_bytes(), None)?;
    let settings = json!({
        "xdp": {"mode": "tc", "interfaces": ["lo"], "bpffs": "/proc/none"},
        "control": {"socket": folder.path().join("control.sock")},
    });
    let running = Running::start_with(namespace, folder, &settings)?;
    wait_for_readyz(&running, "200", "ok   fast path: on")?;
    let (code, text, problem) = running.cli(&["detach"])?;
    ensure!(
        code == 1 && problem.contains("nothing was detached: the server is running"),
        "{text}{problem}"
    );
    wait_for_readyz(&running, "200", "ok   fast path: on")
}

#[test]
fn tap_omits_earlier_sessions() -> Result<()> {
    requires!(namespaces, bpf);
    let running = Running::start(
        "earlier",
        &json!({"xdp": {"mode": "tc", "interfaces": ["lo"]}}),
    )?;
    wait_for_readyz(&running, "200", "ok   fast path: on")?;
    // The short program, which answers until the kernel has verified the complete one, takes no samples.
    wait_until("the complete program", TIMEOUT, || {
        let Ok((_, text, _)) = running.cli(&["status", "--json"]) else {
            return false;
        };
        let status: Value = serde_json::from_str(&text).unwrap_or_default();
        let programs = status["fast_path"]["programs"].as_array();
        programs.is_some_and(|programs| programs.iter().all(|one| one["state"] == "loaded"))
    })?;
    // The time is for a viewer that sees nothing; on a busy machine three seconds passed before the first line.
    let tap = [
        "tap",
        "--json",
        "--path",
        "fast",
        "--seconds",
        "60",
        "--count",
    ];
    // The first viewer leaves after one line, while the interface answers as fast as it can.
    thread::scope(|scope| {
        let first = scope.spawn(|| running.cli(&[&tap[..], &["1"]].concat()));
        while !first.is_finished() {
            running.ask("q-s0.q-g1.bosh.", 1000)?;
        }
        let (code, text, problem) = first.join().expect("no panic")?;
        ensure!(code == 0 && text.lines().count() == 1, "{text}{problem}");
        Ok(())
    })?;
    running.ask("q-s0.q-g1.bosh.", 1000)?;
    thread::sleep(Duration::from_secs(2));
    let begun = SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)?
        .as_secs_f64();
    let (code, text, problem) = thread::scope(|scope| {
        let second = scope.spawn(|| running.cli(&[&tap[..], &["20"]].concat()));
        while !second.is_finished() {
            running.ask("q-s0.q-g2.bosh.", 5)?;
            thread::sleep(Duration::from_millis(50));
        }
        second.join().expect("no panic")
    })?;
    ensure!(code == 0 && text.lines().count() == 20, "{text}{problem}");
    for line in text.lines() {
        let line: Value = serde_json::from_str(line)?;
        ensure!(
            line["name"] == "q-s0.q-g2.bosh.",
            "a query from before the session: {line}"
        );
        // Clocks are converted to the wall clock, so allow a little.
        ensure!(line["time"].as_f64() > Some(begun - 0.5), "{line}");
    }
    Ok(())
}

#[test]
fn unserved_name_is_answered_by_userspace() -> Result<()> {
    requires!(namespaces, bpf);
    let running = Running::start(
        "unserved",
        &json!({"xdp": {"mode": "tc", "interfaces": ["w-*"]}}),
    )?;
    wait_for_readyz(&running, "200", "ok   fast path: on no interface yet")?;
    // The name is published, but no interface has a program.
    wait_until("the names to be published", TIMEOUT, || {
        running
            .cli(&["status", "--json"])
            .is_ok_and(|(_, text, _)| !text.contains("\"published\":0,"))
    })?;
    let (_, text, problem) = running.cli(&["resolve", "web.alias"])?;
    ensure!(
        text.contains("answered by: userspace: the fast path is on no interface yet"),
        "{text}{problem}"
    );
    Ok(())
}
