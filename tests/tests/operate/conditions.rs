//! The conditions of the server: each is made true in a real server, and `status`, `/readyz`, the metric, the alert
//! of a real Prometheus and the table of docs/troubleshooting.md must agree.

use std::{
    fs,
    io::{Read as _, Write as _},
    net::TcpListener,
    path::Path,
    process::Stdio,
    thread,
    time::{Duration, SystemTime},
};

use anyhow::{Context as _, Result, ensure};
use dns_core::config::TlsFiles;
use dns_health::HEALTH_NAME;
use hickory_proto::{op::ResponseCode, rr::RecordType};
use nix::sys::signal::Signal;
use rcgen::{BasicConstraints, CertificateParams, IsCa, KeyPair};
use serde_json::{Value, json};
use whole_system_tests::{
    client, fleet,
    health::{Authority, Fleet, Says, instance, write_files},
    namespace::Namespace,
    process::wait_until,
    requirements, requires,
    server::{self, Server},
    thread::HeldThread,
};

use crate::{
    prometheus::Prometheus,
    running::{METRICS_PORT, RECORDS, Running},
    symptoms::recursor,
};

/// Time limit, reached only on failure.
const TIMEOUT: Duration = Duration::from_secs(120);

/// A row of the page's table.
pub(crate) struct Row {
    /// Name of the check, and the word before it in `/readyz`.
    check: String,
    word: String,
    words: String,
    pub(crate) consequence: String,
    remedy: String,
    alert: String,
}

impl Row {
    /// Reads the row of a condition.
    pub(crate) fn of(condition: &str) -> Result<Self> {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/troubleshooting.md");
        let page = fs::read_to_string(path)?.replace("\\|", "\u{1}");
        let begin = format!("| `{condition}` |");
        let line = page
            .lines()
            .find(|line| line.starts_with(&begin))
            .with_context(|| format!("the page has no row of {condition}"))?;
        let cells: Vec<String> = line
            .split('|')
            .map(|cell| cell.trim().replace('\u{1}', "|"))
            .collect();
        let [_, _, check, words, consequence, remedy, alert, _] = &cells[..] else {
            anyhow::bail!("{line}");
        };
        let (check, result) = check.split_once(", ").context("check and result")?;
        let word = result.split(':').next().unwrap_or_default();
        Ok(Self {
            check: check.to_owned(),
            word: word.to_owned(),
            words: words.trim_matches('`').to_owned(),
            consequence: consequence.clone(),
            remedy: remedy.clone(),
            alert: alert.trim_matches('`').to_owned(),
        })
    }
}

/// Waits until every place shows the condition, with these words of the cause.
pub(crate) fn assert_found(
    running: &Running,
    prometheus: &Prometheus<'_>,
    condition: &str,
    cause: &str,
) -> Result<()> {
    let row = Row::of(condition)?;
    let url = |path: &str| format!("http://127.0.0.1:{METRICS_PORT}/{path}");
    let begin = format!("{:<4} {}: ", row.word, row.check);
    let mut last = String::new();
    let mut line = String::new();
    wait_until(condition, TIMEOUT, || {
        last = running.curl(&[&url("readyz")]).unwrap_or_default();
        let found = last.lines().find(|line| {
            line.starts_with(&begin) && line.contains(&row.words) && line.contains(cause)
        });
        line = found.unwrap_or_default().to_owned();
        found.is_some()
    })
    .with_context(|| format!("{condition}: /readyz: {last}\n{}", running.server.log()))?;
    ensure!(
        line.ends_with(&format!("{}; {}", row.consequence, row.remedy)),
        "{condition}: {line}"
    );
    assert_in_status(running, condition, cause)?;
    let sample = format!("bosh_dns_xdp_condition{{condition=\"{condition}\"}} 1\n");
    let metrics = running.curl(&[&url("metrics")])?;
    ensure!(metrics.contains(&sample), "{condition}: {metrics}");
    let text = prometheus.wait_for_condition(&row.alert, condition)?;
    ensure!(text.contains(&row.consequence), "{condition}: {text}");
    Ok(())
}

/// Waits until one of the first three lines of `status` names the condition, with these words of the cause.
pub(crate) fn assert_in_status(running: &Running, condition: &str, cause: &str) -> Result<()> {
    let row = Row::of(condition)?;
    let mut last = None;
    wait_until(condition, TIMEOUT, || {
        last = running.cli(&["status"]).ok();
        last.as_ref().is_some_and(|(_, status, _)| {
            let mut first = status.lines().take(3);
            first.any(|line| line.contains(&row.words) && line.contains(cause))
        })
    })
    .with_context(|| format!("{condition}: status: {last:?}"))?;
    ensure!(holds(running, condition)?, "{condition}: {last:?}");
    Ok(())
}

/// Returns whether `status` names the condition for programs.
fn holds(running: &Running, condition: &str) -> Result<bool> {
    let status: Value = serde_json::from_str(&running.cli(&["status", "--json"])?.1)?;
    let mut checks = status["checks"].as_array().into_iter().flatten();
    Ok(checks.any(|check| check["condition"] == condition))
}

/// Waits until the server no longer shows the condition.
pub(crate) fn assert_gone(running: &Running, condition: &str) -> Result<()> {
    wait_until(&format!("the end of {condition}"), TIMEOUT, || {
        holds(running, condition).is_ok_and(|holds| !holds)
    })
    .with_context(|| format!("{:?}", running.cli(&["status"])))
}

//----------- Health checks --------------------------------------------------

/// A server that checks three instances, and the instances.
struct Checked {
    running: Running,
    fleet: Fleet,
    /// The server's files.
    own: TlsFiles,
}

impl Checked {
    /// Starts both; with `is_foreign` the instances trust another CA than that of the server.
    fn start(label: &str, is_foreign: bool) -> Result<Self> {
        let namespace = Namespace::new(label)?;
        let records = fleet::records(1, (0..3).map(|number| (1, instance(number))));
        let folder = server::folder(&records, None)?;
        let (known, foreign) = (Authority::new("known")?, Authority::new("foreign")?);
        let trusted = if is_foreign { &foreign } else { &known };
        let files = |name: &str, authorities: &str| {
            let own = folder.path().join(name);
            fs::create_dir(&own)?;
            write_files(&own, &known.issue(HEALTH_NAME)?, authorities)
        };
        let instances = files("instances", &trusted.certificate)?;
        let own = files("client", &known.certificate)?;
        let fleet = namespace.run(|| Fleet::start(&instances))??;
        let settings = json!({"health": {
            "enabled": true, "port": fleet.port, "check_interval": "200ms", "ca_file": own.ca,
            "certificate_file": own.certificate, "private_key_file": own.private_key,
        }});
        let running = Running::start_with(namespace, folder, &settings)?;
        running.ask("q-s0.q-g1.bosh.", 1)?;
        Ok(Self {
            running,
            fleet,
            own,
        })
    }
}

#[test]
fn refused_client_certificate_degrades() -> Result<()> {
    requires!(namespaces, prometheus);
    // Under TLS 1.3 the instances refuse the certificate after the client's handshake.
    let Checked { running, fleet, .. } = Checked::start("c-refused", true)?;
    let prometheus = Prometheus::start(&running.namespace, &[("bosh-dns-xdp", METRICS_PORT)])?;
    assert_found(&running, &prometheus, "health_refused", "3 of 3 refuse it")?;
    ensure!(fleet.failed_handshakes() > 0);
    running.server.wait_for_log("UnknownCA")?;
    let metrics = running.curl(&[&format!("http://127.0.0.1:{METRICS_PORT}/metrics")])?;
    ensure!(
        metrics.contains("\nbosh_dns_xdp_health_blind 1\n"),
        "{metrics}"
    );
    Ok(())
}

#[test]
fn useless_health_answers_degrade() -> Result<()> {
    requires!(namespaces, prometheus);
    let Checked {
        running,
        fleet,
        own,
    } = Checked::start("c-useless", false)?;
    let prometheus = Prometheus::start(&running.namespace, &[("bosh-dns-xdp", METRICS_PORT)])?;
    for number in 0..3 {
        fleet.says(instance(number), Says::Redirect("/elsewhere".to_owned()));
    }
    assert_found(&running, &prometheus, "health_unusable", "status 302 Found")?;
    // One state ends the condition.
    fleet.says(instance(0), Says::state("failing"));
    assert_gone(&running, "health_unusable")?;
    // The thread of the checks stands still, and no other one.
    let held = HeldThread::of(running.server.pid(), "health")?;
    assert_found(&running, &prometheus, "health_stalled", " s)")?;
    drop(held);
    assert_gone(&running, "health_stalled")?;
    let key = KeyPair::generate()?;
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.not_after = rcgen::date_time_ymd(2020, 1, 1);
    fs::write(&own.ca, params.self_signed(&key)?.pem())?;
    assert_found(
        &running,
        &prometheus,
        "health_authorities",
        "health.ca_file",
    )
}

//----------- Upstreams ------------------------------------------------------

/// Answers every request with this status, on a port of the namespace.
fn http_server(namespace: &Namespace, status: &'static str) -> Result<u16> {
    let listener = namespace.run(|| TcpListener::bind("127.0.0.1:0"))??;
    let port = listener.local_addr()?.port();
    // Ends with the process.
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let mut stream = stream;
            let _ = stream.read(&mut [0; 4096]);
            let reply =
                format!("HTTP/1.1 {status}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
            let _ = stream.write_all(reply.as_bytes());
        }
    });
    Ok(port)
}

/// Queries different names below a domain, whose failures are not cached together.
fn ask_below(running: &Running, domain: &str, times: u32) -> Result<()> {
    for number in 0..times {
        running.ask(&format!("n{number}.{domain}"), 1)?;
    }
    Ok(())
}

#[test]
fn failing_upstreams_degrade() -> Result<()> {
    requires!(namespaces, prometheus);
    let namespace = Namespace::new("c-upstreams")?;
    // SERVFAIL and REFUSED.
    recursor(&namespace, "127.0.0.8:53", 2, false)?;
    recursor(&namespace, "127.0.0.9:53", 5, false)?;
    // NOERROR.
    recursor(&namespace, "127.0.0.10:53", 0, false)?;
    let port = http_server(&namespace, "500 Internal Server Error")?;
    let folder = server::folder(RECORDS.as_bytes(), None)?;
    let url = format!("http://127.0.0.1:{port}/");
    let handlers = json!([
        {"domain": "corp.example.", "source": {"type": "dns", "recursors": ["127.0.0.9:53"]}},
        {"domain": "web.example.", "source": {"type": "http", "url": url}},
    ]);
    fs::write(
        folder.path().join("handlers/handlers.json"),
        handlers.to_string(),
    )?;
    let settings = json!({
        "disable_recursors": false, "recursors": ["127.0.0.8:53", "127.0.0.9:53"],
    });
    let running = Running::start_with(namespace, folder, &settings)?;
    let prometheus = Prometheus::start(&running.namespace, &[("bosh-dns-xdp", METRICS_PORT)])?;
    ask_below(&running, "elsewhere.test.", 6)?;
    assert_found(
        &running,
        &prometheus,
        "recursors_failing",
        "127.0.0.8:53: servfail 6, 127.0.0.9:53: refused 6",
    )?;
    ask_below(&running, "corp.example.", 8)?;
    ask_below(&running, "web.example.", 8)?;
    assert_found(
        &running,
        &prometheus,
        "handler_fails",
        "corp.example. (127.0.0.9:53: refused 8)",
    )?;
    assert_found(
        &running,
        &prometheus,
        "handler_fails",
        "status 500 Internal Server Error",
    )?;
    // Another recursor ends the first condition.
    let recursors = json!(["127.0.0.8:53", "127.0.0.10:53"]);
    running
        .server
        .change_settings(|settings| settings["recursors"] = recursors)?;
    ensure!(running.cli(&["reload"])?.0 == 0);
    ask_below(&running, "again.test.", 1)?;
    assert_gone(&running, "recursors_failing")?;
    // The first recursor still fails in every query.
    fs::remove_file(running.folder().join("handlers/handlers.json"))?;
    assert_gone(&running, "handler_fails")?;
    ask_below(&running, "more.test.", 6)?;
    assert_found(&running, &prometheus, "recursor_out", "127.0.0.8:53")
}

#[test]
fn own_address_is_never_asked() -> Result<()> {
    requires!(namespaces, prometheus);
    let namespace = Namespace::new("c-own")?;
    recursor(&namespace, "127.0.0.8:53", 0, false)?;
    let folder = server::folder(RECORDS.as_bytes(), None)?;
    let handlers = json!([
        {"domain": "corp.example.", "source": {"type": "dns", "recursors": ["127.0.0.2:53"]}},
    ]);
    fs::write(
        folder.path().join("handlers/handlers.json"),
        handlers.to_string(),
    )?;
    // Both must not be asked: the configured address, and one that the server gets later.
    let settings = json!({
        "disable_recursors": false, "recursors": ["127.0.0.1:53", "127.0.0.8:53"],
        // A busy machine is slow, too.
        "recursor_timeout": "30s", "request_timeout": "60s",
        "control": {"socket": folder.path().join("control.sock")},
    });
    let running = Running::start_with(namespace, folder, &settings)?;
    fs::write(
        running.folder().join("addresses/more.json"),
        r#"[{"address": "127.0.0.2", "port": 53}]"#,
    )?;
    running.server.wait_for_log("listening on 127.0.0.2:53")?;
    let rcode = |name: &str| -> Result<ResponseCode> {
        let query = client::query(name, RecordType::A, None)?;
        let reply = running
            .namespace
            .run(|| client::ask(running.server.address, &query))??;
        Ok(reply.metadata.response_code)
    };
    for number in 0..5 {
        let name = format!("n{number}.elsewhere.test.");
        ensure!(rcode(&name)? == ResponseCode::NoError, "{name}");
        let name = format!("n{number}.corp.example.");
        ensure!(rcode(&name)? == ResponseCode::ServFail, "{name}");
    }
    let (_, text, _) = running.cli(&["status", "--json"])?;
    let status: Value = serde_json::from_str(&text)?;
    // A loop would repeat each query until it times out.
    ensure!(
        status["replies"]["userspace"].as_u64() < Some(100),
        "{text}"
    );
    for recursor in status["recursors"].as_array().into_iter().flatten() {
        let is_other = recursor["address"] == "127.0.0.8:53";
        let is_asked = recursor["tries"].as_u64() > Some(0);
        ensure!(is_asked == is_other, "{recursor}");
    }
    let (code, text, problem) = running.cli(&["check"])?;
    let named = "the handler for corp.example.: 127.0.0.2:53 is an address of this server";
    ensure!(code == 1 && (text + &problem).contains(named), "{problem}");
    let prometheus = Prometheus::start(&running.namespace, &[("bosh-dns-xdp", METRICS_PORT)])?;
    let both = "127.0.0.1:53, 127.0.0.2:53";
    assert_found(&running, &prometheus, "recursor_own", both)
}

//----------- Files and parts ------------------------------------------------

#[test]
fn unusable_files_are_not_ready() -> Result<()> {
    requires!(namespaces, prometheus);
    let running = Running::start("c-files", &json!({}))?;
    let prometheus = Prometheus::start(&running.namespace, &[("bosh-dns-xdp", METRICS_PORT)])?;
    for (condition, file) in [
        ("aliases_unusable", "aliases/broken.json"),
        ("handlers_unusable", "handlers/broken.json"),
        ("addresses_unusable", "addresses/broken.json"),
    ] {
        let path = running.folder().join(file);
        fs::write(&path, "{ broken")?;
        assert_found(&running, &prometheus, condition, file)?;
        fs::remove_file(&path)?;
        assert_gone(&running, condition)?;
    }
    // An address of another machine.
    let path = running.folder().join("addresses/foreign.json");
    fs::write(&path, r#"[{"address": "192.0.2.1", "port": 53}]"#)?;
    assert_found(&running, &prometheus, "address_silent", "192.0.2.1:53")?;
    fs::remove_file(&path)?;
    assert_gone(&running, "address_silent")?;
    let server = &running.server;
    server.change_settings(|settings| settings["identity"] = json!("off"))?;
    running.cli(&["reload"])?;
    assert_found(&running, &prometheus, "restart_pending", "identity")?;
    server.change_settings(|settings| settings["consul"] = json!({"domain": "corp"}))?;
    running.cli(&["reload"])?;
    assert_found(&running, &prometheus, "restart_pending", "consul")?;
    server.change_settings(|settings| settings["recursor_timeout"] = json!("5"))?;
    running.cli(&["reload"])?;
    assert_found(&running, &prometheus, "config_unusable", "recursor_timeout")
}

#[test]
fn invalid_certificate_of_api_degrades() -> Result<()> {
    requires!(namespaces, prometheus);
    let folder = server::folder(RECORDS.as_bytes(), None)?;
    let control = folder.path().join("control.sock");
    let settings = json!({"control": {"socket": control}});
    let running = Running::start_with(Namespace::new("c-cert")?, folder, &settings)?;
    let prometheus = Prometheus::start(&running.namespace, &[("bosh-dns-xdp", METRICS_PORT)])?;
    let certificates = running.folder().join("certificates");
    let write = |params: &CertificateParams| -> Result<()> {
        let key = KeyPair::generate()?;
        fs::write(
            certificates.join("server.crt"),
            params.self_signed(&key)?.pem(),
        )?;
        Ok(fs::write(
            certificates.join("server.key"),
            key.serialize_pem(),
        )?)
    };
    let mut params = CertificateParams::new(["api.bosh-dns".to_owned()])?;
    let now = rcgen::date_time_ymd(1970, 1, 1) + SystemTime::UNIX_EPOCH.elapsed()?;
    params.not_after = now + Duration::from_secs(3 * 3600);
    write(&params)?;
    // Until both files are read, they do not match.
    assert_found(&running, &prometheus, "certificate_ends_soon", "in 2 hours")?;
    params.not_after = rcgen::date_time_ymd(2020, 1, 1);
    write(&params)?;
    assert_found(
        &running,
        &prometheus,
        "certificate_invalid",
        "it has expired",
    )?;
    let reply = running.namespace.run(|| {
        let query = client::query("q-s0.q-g1.bosh.", RecordType::A, None)?;
        client::ask(running.server.address, &query)
    })??;
    ensure!(client::addresses(&reply).len() == 3, "{reply}");
    Ok(())
}

//----------- Control socket, commands ---------------------------------------

#[test]
fn group_that_cannot_be_set_is_left_out() -> Result<()> {
    requires!(namespaces);
    let namespace = Namespace::new("c-group")?;
    let folder = server::folder(RECORDS.as_bytes(), None)?;
    let readable = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    fs::set_permissions(folder.path(), readable)?;
    // As the unit of the package: another user, with the capability for port 53.
    let own = folder.path().join("run");
    fs::create_dir(&own)?;
    std::os::unix::fs::chown(&own, Some(65534), Some(65534))?;
    let wrapper = folder.path().join("as-nobody");
    let program = server::program()?;
    let script = format!(
        "#!/bin/sh\nexec setpriv --reuid=65534 --regid=65534 --clear-groups \
         --inh-caps=+net_bind_service --ambient-caps=+net_bind_service {} \"$@\"\n",
        program.display()
    );
    fs::write(&wrapper, script)?;
    let executable = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    fs::set_permissions(&wrapper, executable)?;
    let settings = json!({
        "xdp": {"mode": "off"},
        "metrics": {"enabled": true, "address": "127.0.0.1", "port": METRICS_PORT},
        "control": {"socket": own.join("control.sock"), "group": "adm"},
    });
    let address = ([127, 0, 0, 1], 53).into();
    let server = Server::start_program(
        wrapper,
        Some(&namespace),
        folder,
        address,
        &settings,
        |_| {},
    )?;
    let running = Running { server, namespace };
    running.server.wait_for_log("bound without the group")?;
    if requirements::prometheus() {
        let prometheus = Prometheus::start(&running.namespace, &[("bosh-dns-xdp", METRICS_PORT)])?;
        assert_found(&running, &prometheus, "control_group_missing", "\"adm\"")?;
    }
    let (_, text, problem) = running.cli(&["check"])?;
    ensure!(
        (text + &problem).contains("is no member of group \"adm\""),
        "{problem}"
    );
    Ok(())
}

#[test]
fn hung_server_is_named_while_waiting() -> Result<()> {
    requires!(namespaces);
    let folder = server::folder(RECORDS.as_bytes(), None)?;
    let settings = json!({"control": {"socket": folder.path().join("control.sock")}});
    let running = Running::start_with(Namespace::new("c-hung")?, folder, &settings)?;
    let pid = running.server.pid();
    let signal = |signal| {
        let pid = nix::unistd::Pid::from_raw(pid.cast_signed());
        nix::sys::signal::kill(pid, signal)
    };
    let mut command = running.namespace.command(server::program()?)?;
    command.args(["tap", "--config", "config.json"]);
    let pipes = command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut tap = pipes.current_dir(running.folder()).spawn()?;
    let mut shown = tap.stdout.take().context("its output")?;
    // A line shows that the stream has begun.
    let first = thread::spawn(move || shown.read_exact(&mut [0]).map(|()| shown));
    while !first.is_finished() {
        running.ask("q-s0.q-g1.bosh.", 1)?;
    }
    let _reader = first.join().expect("it only reads")?;
    signal(Signal::SIGSTOP)?;
    let (code, _, problem) = running.cli(&["status"])?;
    let tap = tap.wait_with_output()?;
    signal(Signal::SIGCONT)?;
    let tap_problem = String::from_utf8(tap.stderr)?;
    ensure!(
        tap.status.code() == Some(3) && tap_problem.contains("has sent nothing for 30s"),
        "{}: {tap_problem}",
        tap.status
    );
    let lines: Vec<&str> = problem.lines().collect();
    let named = format!("process {pid} (");
    let is_named = |line: &&str| line.contains(&named) && line.contains("is stopped by a signal");
    ensure!(
        code == 3 && lines.len() == 2 && lines.iter().all(is_named),
        "{code}: {problem}"
    );
    ensure!(
        lines[0].contains("waiting for an answer from") && lines[1].contains("no answer within"),
        "{problem}"
    );
    Ok(())
}

#[test]
fn commands_tell_the_truth_without_fast_path() -> Result<()> {
    requires!(namespaces);
    let folder = server::folder(RECORDS.as_bytes(), None)?;
    let settings = json!({
        "control": {"socket": folder.path().join("control.sock")}, "xdp": {"enabled": false},
        "disable_recursors": false, "recursors": ["127.0.0.1:53"],
    });
    let running = Running::start_with(Namespace::new("c-truth")?, folder, &settings)?;
    let (code, text, problem) = running.cli(&["detach"])?;
    ensure!(
        code == 0 && text.contains("nothing was attached") && !text.contains("attaches"),
        "{text}{problem}"
    );
    let (_, text, problem) = running.cli(&["resolve", "q-s0.q-g1.bosh"])?;
    ensure!(!text.contains("starts health checks"), "{text}{problem}");
    // The only recursor is the server itself.
    let (code, text, problem) = running.cli(&["check"])?;
    ensure!(
        code == 1 && (text + &problem).contains("127.0.0.1:53 is an address of this server"),
        "{problem}"
    );
    let (code, _, problem) = running.cli(&["tap", "--client", "300.1.1.1", "--seconds", "1"])?;
    ensure!(
        code == 2 && problem.contains("expected an IP address"),
        "{problem}"
    );
    Ok(())
}

#[test]
fn status_reference_lists_every_member() -> Result<()> {
    requires!(namespaces);
    let running = Running::start("c-json", &json!({}))?;
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/reference/status.md");
    let page = fs::read_to_string(path)?;
    let documented = |name: &str| -> Result<Vec<String>> {
        let (_, section) = page
            .split_once(&format!("## {name}\n"))
            .with_context(|| format!("the page has no section {name}"))?;
        let section = section.split("\n## ").next().unwrap_or_default();
        let rows = section.lines().filter_map(|line| line.strip_prefix("| `"));
        let mut members: Vec<String> = rows
            .filter_map(|row| Some(row.split_once('`')?.0.to_owned()))
            .collect();
        members.sort();
        Ok(members)
    };
    let status: Value = serde_json::from_str(&running.cli(&["status", "--json"])?.1)?;
    for (name, value) in [
        ("ServerStatus", &status),
        ("Check", &status["checks"][0]),
        ("RecordsStatus", &status["records"]),
        ("RepliesStatus", &status["replies"]),
        ("OverloadStatus", &status["overload"]),
        ("CertificateStatus", &status["certificates"][0]),
    ] {
        let object = value.as_object().context("an object")?;
        let mut members: Vec<String> = object.keys().cloned().collect();
        members.sort();
        ensure!(members == documented(name)?, "{name}: {members:?}");
    }
    Ok(())
}
