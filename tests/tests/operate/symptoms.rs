//! `docs/troubleshooting.md`, executed: for each symptom a fault is injected, and the first lines of `status`,
//! `/readyz`, the log and the alert must name the cause in the words that the page quotes.

use std::{
    collections::BTreeSet,
    fs,
    net::UdpSocket,
    path::Path,
    process::Command,
    thread,
    time::{Duration, SystemTime},
};

use anyhow::{Context as _, Result, ensure};
use dns_health::HEALTH_NAME;
use nix::{
    mount::{MsFlags, mount},
    sched::{CloneFlags, unshare},
};
use rcgen::{CertificateParams, KeyPair, date_time_ymd};
use serde_json::{Value, json};
use whole_system_tests::{
    fleet,
    health::{Authority, Fleet, instance, write_files},
    namespace::Namespace,
    process::wait_until,
    requires,
    server::{self, Server},
};

use crate::{
    conditions,
    prometheus::Prometheus,
    running::{METRICS_PORT, RECORDS, Running, write_certificates},
};

/// Time limit, reached only on failure.
const TIMEOUT: Duration = Duration::from_secs(120);

/// The page, each paragraph on one line.
fn page() -> Result<String> {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/troubleshooting.md");
    Ok(fs::read_to_string(page)?
        .split_whitespace()
        .collect::<Vec<_>>()
        .join(" "))
}

/// Returns the messages that the page quotes.
fn quoted(page: &str) -> Vec<&str> {
    // Code contains quotation marks of its own.
    page.split('`')
        .step_by(2)
        .flat_map(|prose| prose.split('"').skip(1).step_by(2))
        .collect()
}

/// A server with a fault, and the Prometheus that watches it.
struct Patient<'a> {
    running: &'a Running,
    prometheus: Prometheus<'a>,
}

impl<'a> Patient<'a> {
    /// Starts to watch.
    fn watch(running: &'a Running) -> Result<Self> {
        Ok(Self {
            running,
            prometheus: Prometheus::start(&running.namespace, &[("bosh-dns-xdp", METRICS_PORT)])?,
        })
    }

    /// Waits until every place names the cause of a condition: words that the page quotes, in `/readyz`, `status` and
    /// the log.
    fn assert_shown(&self, condition: &str, cause: &str) -> Result<()> {
        ensure!(
            quoted(&page()?).contains(&cause),
            "the page does not quote {cause:?}"
        );
        conditions::assert_found(self.running, &self.prometheus, condition, cause)?;
        self.running.server.wait_for_log(cause)?;
        let log = self.running.server.log();
        let line = log
            .lines()
            .find(|line| line.contains(cause))
            .unwrap_or_default();
        ensure!(line.contains("WARN") || line.contains("ERROR"), "{line}");
        Ok(())
    }
}

#[test]
fn quotations_have_faults() -> Result<()> {
    let page = page()?;
    let (injected, elsewhere) = page
        .split_once("## Not injected")
        .context("the page names the rest")?;
    let source = concat!(include_str!("symptoms.rs"), include_str!("conditions.rs"));
    let quotations = quoted(injected);
    ensure!(quotations.len() > 15, "{quotations:?}");
    for message in quotations {
        // The words of a condition: the test of its name reads them from the table.
        let is_of_table = injected.contains(&format!("| `{message}` |"));
        ensure!(
            is_of_table
                || source.contains(&format!("\"{message}\""))
                || quoted(elsewhere).contains(&message),
            "no test injects {message:?}, and the page does not say so"
        );
    }
    Ok(())
}

/// Conditions that cannot be provoked from outside: a defect, a process that has no thread left although others were
/// started before, and a main loop that stands still. Each with the file and the test that finds it by the real counter or report.
const FOUND_IN_UNIT_TESTS: [(&str, &str, &str); 3] = [
    (
        "panicked",
        "dns-user/resolver/src/daemon/failures.rs",
        "caught_panic_is_a_condition",
    ),
    (
        "dnstap_off",
        "dns-user/resolver/src/ops/readiness.rs",
        "parts_that_stay_off_are_conditions",
    ),
    (
        "loop_stalled",
        "dns-user/resolver/src/ops/readiness.rs",
        "stalled_main_loop_is_a_condition",
    ),
];

/// Returns whether a function of these tests calls one of the functions that compare every place, with the name
/// of the condition.
fn is_compared(source: &str, condition: &str) -> bool {
    let named = format!("\"{condition}\"");
    source.split("\nfn ").any(|function| {
        let compares = ["assert_found(", "assert_shown(", "assert_in_status("];
        function.contains(&named) && compares.iter().any(|call| function.contains(call))
    })
}

#[test]
fn conditions_have_proofs() -> Result<()> {
    let page = page()?;
    let (_, table) = page
        .split_once("| Condition |")
        .context("the page has the table")?;
    let rows: BTreeSet<&str> = table
        .split(" | | `")
        .skip(1)
        .filter_map(|row| row.split('`').next())
        .collect();
    ensure!(rows.len() >= 40, "{rows:?}");
    let sources = [
        include_str!("symptoms.rs"),
        include_str!("conditions.rs"),
        include_str!("outages.rs"),
        include_str!("cli.rs"),
    ];
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut proven = BTreeSet::new();
    for (condition, file, test) in FOUND_IN_UNIT_TESTS {
        let source = fs::read_to_string(root.join(file))?;
        ensure!(
            source.contains(&format!("fn {test}()"))
                && source.contains(&format!("\"{condition}\"")),
            "{file} has no test {test} of {condition}"
        );
        proven.insert(condition);
    }
    for &condition in &rows {
        if sources.iter().any(|source| is_compared(source, condition)) {
            proven.insert(condition);
        }
    }
    ensure!(proven == rows, "no test proves {:?}", &rows - &proven);
    Ok(())
}

#[test]
fn unusable_records_are_named() -> Result<()> {
    requires!(namespaces, prometheus);
    // None were ever good: names of the fleet do not resolve.
    let folder = server::folder("{ broken".as_bytes(), None)?;
    let running = Running::start_with(Namespace::new("s-records")?, folder, &json!({}))?;
    let patient = Patient::watch(&running)?;
    patient.assert_shown("records_unusable", "key must be a string")?;
    patient.prometheus.wait_for_alert("BoshDnsXdpNoRecords")?;
    let records = running.folder().join("records.json");
    let empty = r#"{"record_keys": ["id"], "record_infos": [], "version": 8}"#;
    fs::write(&records, empty)?;
    patient.assert_shown("records_empty", "has no instance")?;
    fs::write(&records, RECORDS)?;
    running.server.wait_for_log("version 7")?;
    fs::write(&records, "{ broken")?;
    patient.assert_shown("records_unusable", "key must be a string")?;
    running
        .server
        .wait_for_log("the current records stay in use")
}

#[test]
fn useless_aliases_are_named() -> Result<()> {
    requires!(namespaces);
    let running = Running::start("s-aliases", &json!({}))?;
    let aliases = json!({
        "*.apps.example": ["q-s0.q-g1.bosh"], "empty.example": [], "far.example": ["www.example.org"],
        "lab.example": ["*.web.net.cf_lab.bosh"],
    });
    fs::write(
        running.folder().join("aliases/useless.json"),
        aliases.to_string(),
    )?;
    // The records may hold aliases as well.
    let mut records: Value = serde_json::from_str(RECORDS)?;
    records["version"] = json!(8);
    records["aliases"] = json!({"*.fleet.example": [{"group_id": "1", "root_domain": "bosh"}]});
    fs::write(running.folder().join("records.json"), records.to_string())?;
    running.server.wait_for_log("version 8")?;
    let (_, text, problem) = running.cli(&["check"])?;
    for cause in [
        "the star stands for itself",
        "records.json: alias \"*.fleet.example\": the star stands for itself",
        "has no target",
        "is in no domain of the records",
        "BOSH replaces underscores by hyphens",
    ] {
        running.server.wait_for_log(cause)?;
        ensure!(
            text.contains(cause) || problem.contains(cause),
            "{cause}: {text}{problem}"
        );
    }
    Ok(())
}

/// Writes a self-signed certificate of the health client that is valid between two years.
fn write_client_certificate(folder: &Path, from: i32, to: i32) -> Result<()> {
    let key = KeyPair::generate()?;
    let mut params = CertificateParams::new([HEALTH_NAME.to_owned()])?;
    (params.not_before, params.not_after) = (date_time_ymd(from, 1, 1), date_time_ymd(to, 1, 1));
    fs::write(folder.join("client.crt"), params.self_signed(&key)?.pem())?;
    fs::write(folder.join("client.key"), key.serialize_pem())?;
    Ok(())
}

#[test]
fn failing_health_checks_are_named() -> Result<()> {
    requires!(namespaces, prometheus);
    let namespace = Namespace::new("s-health")?;
    let folder = server::folder(RECORDS.as_bytes(), None)?;
    let certificates = folder.path().join("health");
    fs::create_dir(&certificates)?;
    write_certificates(&certificates)?;
    // No instance has a route.
    let settings = json!({"health": {
        "enabled": true, "port": 2345, "synchronous_check_timeout": "200ms", "check_interval": "500ms",
        "certificate_file": certificates.join("client.crt"), "ca_file": certificates.join("ca.crt"),
        "private_key_file": certificates.join("client.key"),
    }});
    let running = Running::start_with(namespace, folder, &settings)?;
    let patient = Patient::watch(&running)?;
    running.ask("q-s0.q-g1.bosh.", 1)?;
    patient.assert_shown(
        "health_silent",
        "no checked instance answers its health check",
    )?;
    fs::write(certificates.join("client.crt"), "half a file")?;
    patient.assert_shown("certificate_unusable", "the new files cannot be used")?;
    let year = 1970 + i32::try_from(SystemTime::UNIX_EPOCH.elapsed()?.as_secs() / 31_556_952)?;
    for (from, to, cause) in [
        (
            2019,
            2020,
            "the health client's own certificate has expired",
        ),
        (
            year + 2,
            year + 3,
            "is not valid yet (is this machine's clock right?)",
        ),
    ] {
        write_client_certificate(&certificates, from, to)?;
        patient.assert_shown("health_own_certificate", cause)?;
    }
    Ok(())
}

#[test]
fn foreign_authority_is_named() -> Result<()> {
    requires!(namespaces, prometheus);
    let namespace = Namespace::new("s-foreign")?;
    let folder = server::folder(
        &fleet::records(1, (0..3).map(|number| (1, instance(number)))),
        None,
    )?;
    let mut files = Vec::new();
    for name in ["instances", "client"] {
        let (own, authority) = (folder.path().join(name), Authority::new(name)?);
        fs::create_dir(&own)?;
        files.push(write_files(
            &own,
            &authority.issue(HEALTH_NAME)?,
            &authority.certificate,
        )?);
    }
    let fleet = namespace.run(|| Fleet::start(&files[0]))??;
    let settings = json!({"health": {
        "enabled": true, "port": fleet.port, "check_interval": "200ms", "ca_file": files[1].ca,
        "certificate_file": files[1].certificate, "private_key_file": files[1].private_key,
    }});
    let running = Running::start_with(namespace, folder, &settings)?;
    let patient = Patient::watch(&running)?;
    running.ask("q-s0.q-g1.bosh.", 1)?;
    patient.assert_shown("health_untrusted", "no checked instance can be reached")
}

/// Replies to queries on a socket with the given RCODE; with `needs_plain` it ignores queries with EDNS.
pub(crate) fn recursor(
    namespace: &Namespace,
    address: &str,
    rcode: u8,
    needs_plain: bool,
) -> Result<()> {
    let socket = namespace.run(|| UdpSocket::bind(address))??;
    // Ends with the process; the namespace lives as long as its sockets.
    thread::spawn(move || {
        let mut message = [0; 512];
        while let Ok((length, client)) = socket.recv_from(&mut message) {
            // ARCOUNT is the number of OPT records.
            if needs_plain && message[11] > 0 {
                continue;
            }
            (message[2], message[3]) = (message[2] | 0x80, rcode);
            let _ = socket.send_to(&message[..length], client);
        }
    });
    Ok(())
}

#[test]
fn dead_recursors_are_named() -> Result<()> {
    requires!(namespaces, prometheus);
    let settings = json!({
        "disable_recursors": false, "recursors": ["127.0.0.8:53", "127.0.0.9:53"], "recursor_timeout": "100ms",
    });
    let running = Running::start("s-dead", &settings)?;
    let patient = Patient::watch(&running)?;
    for number in 0..5 {
        running.ask(&format!("n{number}.elsewhere.test."), 1)?;
    }
    patient.assert_shown("recursors_silent", "no recursor answers")?;
    let (_, text, _) = running.cli(&["status"])?;
    let line = text.lines().find(|line| line.starts_with("127.0.0.8:53"));
    // Nothing listens there.
    ensure!(
        line.is_some_and(|line| line.contains("unreachable ")),
        "{text}"
    );
    Ok(())
}

#[test]
fn failing_recursor_is_named() -> Result<()> {
    requires!(namespaces, prometheus);
    let namespace = Namespace::new("s-servfail")?;
    recursor(&namespace, "127.0.0.8:53", 2, false)?;
    let settings = json!({
        "disable_recursors": false, "recursors": ["127.0.0.8:53"], "recursor_timeout": "5s",
    });
    let running = Running::start_in(namespace, &settings)?;
    let patient = Patient::watch(&running)?;
    // The alert needs one per second, over five minutes.
    running.ask("broken.elsewhere.test.", 600)?;
    let text = patient.prometheus.wait_for_alert("BoshDnsXdpServfail")?;
    ensure!(text.contains("of the replies are SERVFAIL"), "{text}");
    let (_, text, _) = running.cli(&["resolve", "broken.elsewhere.test"])?;
    ensure!(
        text.contains("recursor 127.0.0.8:53: asked first"),
        "{text}"
    );
    let (_, text, _) = running.cli(&["status"])?;
    ensure!(text.contains("servfail "), "{text}");
    Ok(())
}

#[test]
fn recursor_without_edns_is_named() -> Result<()> {
    requires!(namespaces, prometheus);
    let namespace = Namespace::new("s-edns")?;
    recursor(&namespace, "127.0.0.8:53", 3, true)?;
    let settings = json!({
        "disable_recursors": false, "recursors": ["127.0.0.8:53"], "recursor_timeout": "100ms",
        "recursor_max_retries": 3,
    });
    let running = Running::start_in(namespace, &settings)?;
    let mut number = 0;
    wait_until("the status", TIMEOUT, || {
        number += 1;
        let asked = running.ask(&format!("n{number}.elsewhere.test."), 1);
        asked.is_ok()
            && running
                .cli(&["status"])
                .is_ok_and(|(_, text, _)| text.contains("warn  recursors: 127.0.0.8:53 drops EDNS"))
    })
    .with_context(|| format!("{:?}", running.cli(&["status"])))?;
    let patient = Patient::watch(&running)?;
    let prometheus = &patient.prometheus;
    conditions::assert_found(&running, prometheus, "recursor_drops_edns", "127.0.0.8:53")
}

#[test]
fn unknown_recursors_are_named() -> Result<()> {
    requires!(namespaces, prometheus);
    let namespace = Namespace::new("s-none")?;
    let folder = server::folder(RECORDS.as_bytes(), None)?;
    let resolv_conf = folder.path().join("resolv.conf");
    fs::write(&resolv_conf, "nameserver 127.0.0.1\n")?;
    let certificates = folder.path().join("certificates");
    fs::create_dir(&certificates)?;
    write_certificates(&certificates)?;
    let settings = json!({
        "disable_recursors": false, "xdp": {"mode": "off"},
        "metrics": {"enabled": true, "address": "127.0.0.1", "port": METRICS_PORT},
        "control": {"socket": folder.path().join("control.sock")},
    });
    // Private mounts, with a resolv.conf that names only this server.
    let with_file = |command: &mut Command| {
        use std::os::unix::process::CommandExt as _;
        let enter = move || {
            unshare(CloneFlags::CLONE_NEWNS)?;
            mount(
                None::<&str>,
                "/",
                None::<&str>,
                MsFlags::MS_REC | MsFlags::MS_PRIVATE,
                None::<&str>,
            )?;
            let (from, bind) = (Some(resolv_conf.as_path()), MsFlags::MS_BIND);
            Ok(mount(
                from,
                "/etc/resolv.conf",
                None::<&str>,
                bind,
                None::<&str>,
            )?)
        };
        // SAFETY: only plain system calls between fork and exec.
        unsafe { command.pre_exec(enter) };
    };
    let address = ([127, 0, 0, 1], 53).into();
    let server = Server::start_prepared(Some(&namespace), folder, address, &settings, with_file)?;
    let running = Running { server, namespace };
    let patient = Patient::watch(&running)?;
    running.ask("www.elsewhere.test.", 600)?;
    patient.assert_shown("recursors_unknown", "no recursor is known")?;
    let (_, text, _) = running.cli(&["resolve", "www.elsewhere.test"])?;
    ensure!(
        text.contains("recursors, but none are known") && text.contains("not a local name"),
        "{text}"
    );
    Ok(())
}

#[test]
fn untrusted_handler_is_named() -> Result<()> {
    requires!(namespaces);
    let namespace = Namespace::new("s-handler")?;
    let folder = server::folder(RECORDS.as_bytes(), None)?;
    let (files, authority) = (folder.path().join("web"), Authority::new("unknown")?);
    fs::create_dir(&files)?;
    let tls = write_files(
        &files,
        &authority.issue("web.example")?,
        &authority.certificate,
    )?;
    // Any TLS server with a certificate from an unknown CA.
    let fleet = namespace.run(|| Fleet::start(&tls))??;
    let url = format!("https://{}:{}", instance(0), fleet.port);
    let handlers = json!([{"domain": "web.example.", "source": {"type": "http", "url": url}}]);
    fs::write(
        folder.path().join("handlers/handlers.json"),
        handlers.to_string(),
    )?;
    let running = Running::start_with(namespace, folder, &json!({}))?;
    running.ask("www.web.example.", 1)?;
    running.server.wait_for_log("UnknownIssuer")
}

#[test]
fn missing_interface_is_named() -> Result<()> {
    requires!(namespaces, bpf, prometheus);
    let running = Running::start(
        "s-eth99",
        &json!({"xdp": {"mode": "tc", "interfaces": ["eth99"]}}),
    )?;
    let patient = Patient::watch(&running)?;
    patient.assert_shown("fast_path_unserved", "does not exist on this machine")?;
    let (_, text, _) = running.cli(&["status"])?;
    ensure!(text.contains("on no interface"), "{text}");
    running.ask("q-s0.q-g1.bosh.", 5)
}

#[test]
fn failing_commands_name_cause() -> Result<()> {
    requires!(namespaces);
    let folder = server::folder(RECORDS.as_bytes(), None)?;
    fs::set_permissions(
        folder.path(),
        std::os::unix::fs::PermissionsExt::from_mode(0o755),
    )?;
    let socket = folder.path().join("control.sock");
    let running = Running::start_with(
        Namespace::new("s-command")?,
        folder,
        &json!({"control": {"socket": socket}}),
    )?;
    let program = server::program()?.display().to_string();
    let socket = socket.display().to_string();
    let status = [&program, "status", "--socket", &socket];
    // Another user.
    let output = running.output(
        "setpriv",
        &[&["--reuid=65534", "--clear-groups"], &status[..]].concat(),
    )?;
    let problem = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(output.status.code() == Some(3), "{output:?}");
    for words in [
        "cannot connect to the server at",
        "Permission denied",
        "use sudo, or join the group",
    ] {
        ensure!(problem.contains(words), "{words}: {problem}");
    }
    // The configuration of a server that does not run, with the socket of one that does.
    fs::copy(
        running.server.config_file(),
        running.folder().join("other.json"),
    )?;
    let output = running.output(&program, &["status", "--config", "other.json"])?;
    let problem = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(
        output.status.code() == Some(3) && problem.contains("whose server is not running"),
        "{problem}"
    );
    // A second server on the same port.
    let (code, text, problem) = running.cli(&["check"])?;
    ensure!(
        code == 0,
        "the port is the running server's own: {text}{problem}"
    );
    let output = running.output(&program, &["run", "--config", "other.json"])?;
    let all = [output.stdout, output.stderr].concat();
    let all = String::from_utf8_lossy(&all);
    ensure!(all.contains("another process listens there"), "{all}");
    // No server at all, and a metric of one that is gone.
    let Running { server, namespace } = running;
    let nobody = server.folder.path().join("nobody.sock");
    let mut command = namespace.command(&program)?;
    let output = command.args(["status", "--socket"]).arg(&nobody).output()?;
    let problem = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(
        problem.contains("is the server running (systemctl status bosh-dns-xdp)?"),
        "{problem}"
    );
    Ok(())
}

#[test]
fn killed_server_leaves_removable_programs() -> Result<()> {
    requires!(namespaces, bpf);
    let pins = whole_system_tests::bpffs::Bpffs::new()?;
    let folder = server::folder(RECORDS.as_bytes(), None)?;
    let settings = json!({
        "xdp": {"mode": "tc", "interfaces": ["lo"], "bpffs": pins.path(), "lease": "1h"},
        "control": {"socket": folder.path().join("control.sock")},
    });
    let mut running = Running::start_with(Namespace::new("s-killed")?, folder, &settings)?;
    let is_fast = |running: &Running| -> Result<bool> {
        running.ask("q-s0.q-g1.bosh.", 2)?;
        let status: Value = serde_json::from_str(&running.cli(&["status", "--json"])?.1)?;
        Ok(status["replies"]["fast"].as_u64() > Some(0))
    };
    wait_until("the interface", TIMEOUT, || {
        is_fast(&running).unwrap_or(false)
    })?;
    // It holds its programs by pins, and attaches them again.
    let (code, text, problem) = running.cli(&["detach"])?;
    ensure!(code == 0 && text.contains("detached"), "{text}{problem}");
    ensure!(
        text.contains("the server is running and attaches its programs again"),
        "{text}{problem}"
    );
    running.server.process().kill(TIMEOUT)?;
    let (code, text, problem) = running.cli(&["detach"])?;
    ensure!(
        code == 0 && !text.contains("the server is running"),
        "{text}{problem}"
    );
    ensure!(pins.links().is_empty(), "{:?}", pins.links());
    Ok(())
}

#[test]
fn change_without_effect_is_named() -> Result<()> {
    requires!(namespaces);
    let running = Running::start("s-effect", &json!({}))?;
    running
        .server
        .change_settings(|settings| settings["port"] = json!(5353))?;
    running.cli(&["reload"])?;
    running
        .server
        .wait_for_log("changed, but takes effect only after a restart")
}

#[test]
fn tap_shows_arriving_queries() -> Result<()> {
    requires!(namespaces);
    let running = Running::start("s-other", &json!({}))?;
    let lines = thread::scope(|scope| {
        let tap = scope
            .spawn(|| running.cli(&["tap", "--name", "q-g1", "--count", "1", "--seconds", "20"]));
        while !tap.is_finished() {
            running.ask("q-s0.q-g1.bosh.", 1)?;
            thread::sleep(Duration::from_millis(50));
        }
        tap.join().expect("no panic")
    })?;
    ensure!(
        lines.0 == 0 && lines.1.contains("q-s0.q-g1.bosh"),
        "{lines:?}"
    );
    // The pages name this command for a path, and not NSID, whose queries always go to userspace.
    for page in [
        include_str!("../../../docs/operating.md"),
        include_str!("../../../docs/faq.md"),
    ] {
        ensure!(page.contains("`bosh-dns-xdp tap --name NAME`"));
        ensure!(page.contains("`dig +nsid` does not show it"));
    }
    Ok(())
}
