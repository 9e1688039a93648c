//! DNS Cookies: dig as a client, and BIND as another server with the same secret.

use std::{
    fs,
    io::Write as _,
    net::SocketAddr,
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use hickory_proto::{
    op::{Message, ResponseCode},
    rr::{RData, Record, RecordType, rdata::A},
};
use serde_json::json;
use tempfile::TempDir;
use whole_system_tests::{
    bpffs::Bpffs,
    client,
    metrics::Metrics,
    namespace::Namespace,
    process::{Kept, capture, wait_until},
    requirements, requires, server,
};

use super::{
    interface_cache::start,
    lab::{LOCAL_NAME, Lab, OURS, loopback},
    scripted::Scripted,
};

const LIMIT: Duration = Duration::from_secs(120);
/// The secret of both servers.
const SECRET: &str = "e5e973e5a6b2a43f48e7dc849e37bfcf";

/// Returns dig's output; `cookie` is `+cookie`, or `+cookie=` and a cookie in hexadecimal digits.
fn dig(namespace: &Namespace, server: SocketAddr, name: &str, options: &[&str]) -> Result<String> {
    let mut command = namespace.command("dig")?;
    command.args([
        format!("@{}", server.ip()),
        "-p".into(),
        server.port().to_string(),
        name.into(),
        "A".into(),
    ]);
    capture(
        command
            .args(["+tries=2", "+timeout=20", "+nobadcookie"])
            .args(options),
    )
}

/// Returns the cookie that dig shows, and dig's verdict.
fn cookie(output: &str) -> Result<(&str, &str)> {
    let line = output
        .lines()
        .find_map(|line| line.strip_prefix("; COOKIE: "))
        .context(output.to_owned())?;
    line.split_once(' ').context("a cookie and dig's verdict")
}

#[test]
fn dig_accepts_cookies() -> Result<()> {
    requires!(namespaces, programs(&["dig"]));
    let namespace = Namespace::new("cookies")?;
    let off = Lab::start(&namespace, &[], &json!({}))?;
    let output = dig(&namespace, OURS, LOCAL_NAME, &["+cookie=0102030405060708"])?;
    ensure!(cookie(&output).is_err(), "{output}");
    drop(off);
    let settings = json!({"cookies": {"enabled": true}, "disable_recursors": true});
    let _lab = Lab::start(&namespace, &[], &settings)?;
    // Local names (also from the cache), refusals and class CH, by UDP and TCP.
    for (name, options) in [
        (LOCAL_NAME, &["+noall"][..]),
        (LOCAL_NAME, &["+noall"]),
        (LOCAL_NAME, &["+tcp"]),
        ("outside.test.", &["+noall"]),
        ("version.bind.", &["-c", "CH", "-t", "TXT"]),
        ("other.bind.", &["-c", "CH", "-t", "TXT"]),
    ] {
        let shown = ["+all", "+cookie=0102030405060708"];
        let first = dig(&namespace, OURS, name, &[options, &shown].concat())?;
        let (first, verdict) = cookie(&first)?;
        ensure!(
            verdict == "(good)" && first.len() == 48 && first.starts_with("0102030405060708"),
            "{first}"
        );
        let again = dig(
            &namespace,
            OURS,
            name,
            &[options, &["+all", &format!("+cookie={first}")]].concat(),
        )?;
        ensure!(cookie(&again)? == (first, "(good)"), "{again}");
    }
    // A query without a question only asks for a cookie.
    for transport in ["+notcp", "+tcp"] {
        let only = |cookie: &str| {
            dig(
                &namespace,
                OURS,
                LOCAL_NAME,
                &["+header-only", transport, cookie],
            )
        };
        let first = only("+cookie=0102030405060708")?;
        let given = cookie(&first)?;
        ensure!(
            first.contains("NOERROR") && first.contains("QUERY: 0, ANSWER: 0"),
            "{first}"
        );
        let again = only(&format!("+cookie={}", given.0))?;
        ensure!(
            again.contains("NOERROR") && cookie(&again)? == (given.0, "(good)"),
            "{again}"
        );
        let wrong = only(&format!("+cookie={}0000", &given.0[..44]))?;
        ensure!(
            wrong.contains("BADCOOKIE") && cookie(&wrong)?.1 == "(good)",
            "{wrong}"
        );
    }
    let malformed = dig(
        &namespace,
        OURS,
        LOCAL_NAME,
        &["+nocookie", "+ednsopt=10:0102"],
    )?;
    ensure!(malformed.contains("FORMERR"), "{malformed}");
    Ok(())
}

/// Starts a named that answers only queries with a cookie of [`SECRET`].
fn named(namespace: &Namespace, folder: &TempDir, address: SocketAddr) -> Result<Kept> {
    let here = folder.path().display();
    let config = format!(
        "options {{ directory \"{here}\"; listen-on port {} {{ {}; }}; listen-on-v6 {{ none; }}; recursion no; \
         pid-file none; session-keyfile none; cookie-algorithm siphash24; cookie-secret \"{SECRET}\"; \
         require-server-cookie yes; }};\ncontrols {{ }};\nzone \"test\" {{ type primary; file \"{here}/zone\"; }};\n",
        address.port(),
        address.ip(),
    );
    fs::write(folder.path().join("named.conf"), config)?;
    fs::write(
        folder.path().join("zone"),
        "@ 60 IN SOA a.test. b.test. 1 1 1 1 1\n@ 60 IN NS a.test.\na 60 IN A 192.0.2.1\n",
    )?;
    namespace.ip(&format!("addr replace {}/8 dev lo", address.ip()))?;
    let mut command = namespace.command("named")?;
    command
        .args(["-g", "-n", "1", "-c"])
        .arg(folder.path().join("named.conf"));
    let log = fs::File::create(folder.path().join("log"))?;
    let process = Kept::spawn(
        command
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log),
    )?;
    let query = client::query("a.test.", RecordType::A, None)?;
    wait_until("named", LIMIT, || {
        namespace
            .run(|| client::ask_tcp(address, &query))
            .is_ok_and(|reply| reply.is_ok())
    })
    .with_context(|| fs::read_to_string(folder.path().join("log")).unwrap_or_default())?;
    Ok(process)
}

#[test]
fn bind_shares_our_secret() -> Result<()> {
    requires!(namespaces, programs(&["named", "dig"]));
    let namespace = Namespace::new("cookiebind")?;
    let (folder, theirs) = (TempDir::with_prefix("bdx-cookies-")?, loopback(40));
    let _named = named(&namespace, &folder, theirs)?;
    let settings = json!({"cookies": {"enabled": true, "secrets": [SECRET]}});
    let _lab = Lab::start(&namespace, &[], &settings)?;
    let ask = |server, name: &str, cookie: &str| {
        dig(&namespace, server, name, &[&format!("+cookie={cookie}")])
    };

    let refused = ask(theirs, "a.test.", "0102030405060708")?;
    ensure!(refused.contains("BADCOOKIE"), "{refused}");
    let made_by_named = cookie(&refused)?.0;
    // A valid cookie is returned as it is; another one would be replaced.
    let ours = ask(OURS, LOCAL_NAME, made_by_named)?;
    ensure!(
        cookie(&ours)? == (made_by_named, "(good)"),
        "{made_by_named}\n{ours}"
    );

    let ours = ask(OURS, LOCAL_NAME, "1112131415161718")?;
    let made_by_us = cookie(&ours)?.0;
    let accepted = ask(theirs, "a.test.", made_by_us)?;
    ensure!(
        accepted.contains("NOERROR") && accepted.contains("192.0.2.1"),
        "{accepted}"
    );
    let wrong = format!("{}0000", &made_by_us[..44]);
    let refused = ask(theirs, "a.test.", &wrong)?;
    ensure!(refused.contains("BADCOOKIE"), "{refused}");
    Ok(())
}

#[test]
fn interface_leaves_cookies_to_userspace() -> Result<()> {
    requires!(namespaces, bpf, programs(&["dig"]));
    let namespace = Namespace::new("cookieif")?;
    for enabled in [false, true] {
        let settings = json!({"cookies": {"enabled": enabled}, "cache": {"enabled": false}});
        let _lab = start(&namespace, Bpffs::new()?, &[], &settings)?;
        let replies = || Ok::<_, anyhow::Error>(Metrics::read(&namespace)?.fast_path_replies());
        let by_interface = |options: &[&str]| {
            let before = replies()?;
            let output = dig(&namespace, OURS, LOCAL_NAME, options)?;
            ensure!(output.contains("10.0.0.1"), "{output}");
            Ok((replies()? > before, output))
        };
        wait_until("an answer from the interface", LIMIT, || {
            by_interface(&["+nocookie"]).is_ok_and(|(by_interface, _)| by_interface)
        })?;
        // Once a second, a query is passed up as a probe of the interface.
        let cookie_option = ["+cookie=0102030405060708"];
        if enabled {
            for _ in 0..3 {
                let (by_interface, output) = by_interface(&cookie_option)?;
                ensure!(!by_interface && cookie(&output)?.1 == "(good)", "{output}");
            }
        } else {
            wait_until("an answer to a cookie", LIMIT, || {
                by_interface(&cookie_option)
                    .is_ok_and(|(hit, output)| hit && cookie(&output).is_err())
            })?;
        }
    }
    Ok(())
}

/// Largest group, and largest answer of the recursor.
const MOST: u16 = 200;
/// The client's part of the cookie.
const CLIENT: &[u8; 8] = b"a client";
/// Option codes of a cookie and of the server's name, and the length of a complete cookie.
const COOKIE: [u8; 4] = [0, 10, 0, 24];
const NSID: [u8; 2] = [0, 3];

/// Returns a query with a cookie, and one for the server's name.
fn query_with_options(name: &str, size: u16) -> Result<Vec<u8>> {
    let mut query = client::query(name, RecordType::A, None)?.to_vec()?;
    // One additional record: an OPT with 16 bytes of options.
    query[11] = 1;
    query.extend_from_slice(&[0, 0, 41]);
    query.extend_from_slice(&size.to_be_bytes());
    query.extend_from_slice(&[0, 0, 0, 0, 0, 16, 0, 10, 0, 8]);
    query.extend_from_slice(CLIENT);
    query.extend_from_slice(&[0, 3, 0, 0]);
    Ok(query)
}

/// Asks for a group or a forwarded name; returns whether the reply was truncated.
fn has_options(lab: &Lab<'_>, name: &str, size: u16) -> Result<bool> {
    let query = query_with_options(name, size)?;
    let reply = lab
        .namespace
        .run(|| client::ask_raw(OURS, &query, LIMIT))??;
    ensure!(reply.len() <= size.into(), "{name}: {} bytes", reply.len());
    let message = Message::from_vec(&reply)?;
    let what = || format!("{name}, {size} bytes: {message}");
    let hostname = nix::unistd::gethostname()?;
    let name_of_server = [&NSID[..], &(hostname.len() as u16).to_be_bytes()].concat();
    for option in [[&COOKIE[..], CLIENT].concat(), name_of_server] {
        let is_there = reply.windows(option.len()).any(|bytes| bytes == option);
        ensure!(is_there, "{option:?} is missing in the reply to {}", what());
    }
    // Nothing else is left out than what has no room.
    let room = usize::from(size) - reply.len();
    ensure!(
        !message.metadata.truncation || room < 16,
        "{room} bytes left: {}",
        what()
    );
    Ok(message.metadata.truncation)
}

#[test]
fn truncated_replies_carry_cookies() -> Result<()> {
    requires!(namespaces);
    let namespace = Namespace::new("cutcookie")?;
    let recursor = many_addresses(&namespace)?;
    let records = server::records_of_groups(&(1..=MOST).collect::<Vec<_>>());
    let settings = json!({"cookies": {"enabled": true}, "cache": {"enabled": true}});
    let lab = Lab::start(&namespace, &[loopback(10)], &settings)?;
    fs::write(lab.server.folder.path().join("records.json"), records)?;
    wait_until("the groups", LIMIT, || {
        let reply = lab.ask_for(&format!("q-s0.q-g{MOST}.bosh."), RecordType::A);
        reply.is_ok_and(|reply| !reply.answers.is_empty())
    })?;
    let (mut truncated, mut asked) = (0, 0);
    for size in [512, 1232] {
        for count in 1..=MOST {
            for name in [
                format!("q-s0.q-g{count}.bosh."),
                format!("n{count}.many.test."),
                // From the cache.
                format!("n{count}.many.test."),
            ] {
                truncated += u32::from(has_options(&lab, &name, size)?);
                asked += 1;
            }
        }
    }
    println!("{truncated} of {asked} replies were truncated");
    ensure!(truncated > 600, "{truncated} of {asked}");
    drop(recursor);
    Ok(())
}

/// Starts a recursor that answers `n7.many.test` with seven addresses.
fn many_addresses(namespace: &Namespace) -> Result<Scripted> {
    Scripted::start(namespace, loopback(10), |asked| {
        let name = asked.name().to_ascii_lowercase();
        let count = name.trim_start_matches('n').split('.').next();
        let count: u8 = count.and_then(|count| count.parse().ok()).unwrap_or(0);
        let mut reply = asked.reply(ResponseCode::NoError);
        for last in 0..count {
            let address = RData::A(A::new(192, 0, 2, last));
            reply.add_answer(Record::from_rdata(
                asked.message.queries[0].name().clone(),
                300,
                address,
            ));
        }
        vec![reply.into()]
    })
}

/// c-ares with its binding for Python, as `cargo xtask test` installs it.
fn pycares() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/pycares/bin/python")
}

/// Asks for groups and forwarded names of every size, with cookies, and prints the number of addresses of each name.
const SCRIPT: &str = r#"
import os, select, sys, pycares

def run(channel, pending):
    while pending:
        readers, writers = channel.getsock()
        if not readers and not writers:
            break
        ready, writable, _ = select.select(readers, writers, [], channel.timeout(1.0))
        for descriptor in ready:
            channel.process_fd(descriptor, pycares.ARES_SOCKET_BAD)
        for descriptor in writable:
            channel.process_fd(pycares.ARES_SOCKET_BAD, descriptor)
        if not ready and not writable:
            channel.process_fd(pycares.ARES_SOCKET_BAD, pycares.ARES_SOCKET_BAD)

# c-ares derives its timeout from the latency of earlier replies (250 ms at the least, 5 s at the most) and takes the
# given one only before the first: three tries ended after 1.5 s, which a busy machine exceeds. A reply that is dropped
# fails each try.
channel = pycares.Channel(servers=["127.0.0.1"], timeout=5.0, tries=20, rotate=False)
failed = []
for name in sys.stdin.read().split():
    pending = {name}
    def done(result, error, name=name):
        pending.discard(name)
        if error is not None:
            failed.append(name)
        print(name, len(result) if error is None else pycares.errno.errorcode[error])
    channel.query(name, pycares.QUERY_TYPE_A, done)
    run(channel, pending)
    if failed:
        break
sys.stdout.flush()
# The binding waits for its threads for ever.
os._exit(0)
"#;

#[test]
fn cares_resolves_truncated_names() -> Result<()> {
    let python = pycares();
    let installed = python
        .try_exists()
        .map_err(anyhow::Error::from)
        .and_then(|exists| {
            ensure!(exists, "{} is missing", python.display());
            Ok(())
        });
    if !requirements::met("pycares", installed) {
        return Ok(());
    }
    requires!(namespaces);
    let namespace = Namespace::new("cares")?;
    let _recursor = many_addresses(&namespace)?;
    let mut names = String::new();
    for count in 1..=MOST {
        names.push_str(&format!("q-s0.q-g{count}.bosh\nn{count}.many.test\n"));
    }
    for enabled in [true, false] {
        let records = server::records_of_groups(&(1..=MOST).collect::<Vec<_>>());
        let settings = json!({
            "cookies": {"enabled": enabled},
            "recursor_timeout": "10s",
            "request_timeout": "30s",
        });
        let lab = Lab::start(&namespace, &[loopback(10)], &settings)?;
        fs::write(lab.server.folder.path().join("records.json"), records)?;
        wait_until("the groups", LIMIT, || {
            let reply = lab.ask_for(&format!("q-s0.q-g{MOST}.bosh."), RecordType::A);
            reply.is_ok_and(|reply| !reply.answers.is_empty())
        })?;
        let mut command = namespace.command(&python)?;
        command
            .args(["-c", SCRIPT])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut process = command.spawn()?;
        let mut input = process.stdin.take().context("a pipe")?;
        input.write_all(names.as_bytes())?;
        drop(input);
        let output = process.wait_with_output()?;
        let text = String::from_utf8(output.stdout)?;
        let mut wrong = Vec::new();
        for line in text.lines() {
            let (name, found) = line.split_once(' ').context("a name and a number")?;
            let digits: String = name
                .chars()
                .skip_while(|c| *c != 'g' && *c != 'n')
                .skip(1)
                .take_while(char::is_ascii_digit)
                .collect();
            if found != digits {
                wrong.push(line);
            }
        }
        ensure!(wrong.is_empty(), "cookies {enabled}: {wrong:?}");
        ensure!(text.lines().count() == 2 * usize::from(MOST), "{text}");
    }
    Ok(())
}
