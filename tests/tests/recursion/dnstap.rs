//! The log of queries in the format dnstap, read by Debian's fstrm_capture and dnstap-read.

use std::{
    fs,
    io::{Read as _, Write as _},
    os::unix::net::UnixListener,
    path::Path,
    process::{Command, Stdio},
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};
use dns_kit::metrics::names;
use hickory_proto::rr::RecordType;
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use tempfile::TempDir;
use whole_system_tests::{
    bpffs::Bpffs,
    client,
    metrics::Metrics,
    namespace::Namespace,
    process::{Kept, capture, wait_until},
    requires,
};

use super::{
    interface_cache::start,
    lab::{LOCAL_NAME, Lab, OURS, loopback},
    scripted::Scripted,
};

/// Time limit for whatever a busy machine delays.
const LIMIT: Duration = Duration::from_secs(120);
/// A name that the recursor answers.
const OUTSIDE: &str = "www.shop.test.";

/// Programs that receive and show dnstap.
const DNSTAP: &[&str] = &["fstrm_capture", "dnstap-read"];

fn recursor(namespace: &Namespace) -> Result<Scripted> {
    Scripted::answering(namespace, loopback(10), [192, 0, 2, 1].into())
}

/// Starts fstrm_capture with a socket and a file in `folder`.
fn reader(folder: &Path) -> Result<Kept> {
    let socket = folder.join("tap.sock");
    let mut command = Command::new("fstrm_capture");
    command
        .args(["-t", "protobuf:dnstap.Dnstap", "-u"])
        .arg(&socket)
        .arg("-w")
        .arg(folder.join("captured"));
    let process = Kept::spawn(command.stdout(Stdio::null()).stderr(Stdio::null()))?;
    wait_until("the reader's socket", LIMIT, || socket.exists())?;
    Ok(process)
}

/// Returns one line for each message of a file: type, addresses, name.
fn read(file: &Path) -> Result<String> {
    capture(Command::new("dnstap-read").arg(file))
}

/// Returns how many messages have this type (`CQ`, `CR`, `FQ`, `FR`), in its own column.
fn count(lines: &str, kind: &str, words: &[&str]) -> usize {
    let has = |line: &&str| {
        line.split_whitespace().any(|word| word == kind)
            && words.iter().all(|word| line.contains(word))
    };
    lines.lines().filter(has).count()
}

fn is_open(namespace: &Namespace) -> bool {
    Metrics::read(namespace).is_ok_and(|metrics| metrics.sum(names::DNSTAP_UP, "") == 1)
}

#[test]
fn readers_understand_both_paths() -> Result<()> {
    requires!(namespaces, bpf, programs(DNSTAP));
    let namespace = Namespace::new("dnstap")?;
    let (folder, _recursor) = (TempDir::with_prefix("bdx-dnstap-")?, recursor(&namespace)?);
    let mut reader = reader(folder.path())?;
    let settings = json!({"dnstap": {
        "socket": folder.path().join("tap.sock"), "identity": "cell-7", "version": "v1", "interface_sample": 1,
    }});
    let mut lab = start(&namespace, Bpffs::new()?, &[loopback(10)], &settings)?;
    wait_until("the stream", LIMIT, || is_open(&namespace)).with_context(|| lab.server.log())?;
    lab.ask_for(OUTSIDE, RecordType::A)?;
    lab.ask_tcp(&client::query(LOCAL_NAME, RecordType::A, Some(1232))?)?;
    // A message without a readable question is logged as it was sent.
    namespace.run(|| client::ask_raw(OURS, b"\x12\x34\x01\0\0\0\0\0\0\0\0\0", LIMIT))??;
    let local = client::query(LOCAL_NAME, RecordType::AAAA, None)?;
    wait_until("an answer from the interface", LIMIT, || {
        lab.ask(&local).is_ok()
            && Metrics::read(&namespace).is_ok_and(|metrics| metrics.fast_path_replies() > 0)
    })?;
    let logged = || fs::read(folder.path().join("captured")).unwrap_or_default();
    let at_interface = b"path=interface sample=1/1 interface=lo answers=0 messages=question_only";
    wait_until("a message of the interface", LIMIT, || {
        let _ = lab.ask(&local);
        Metrics::read(&namespace)
            .is_ok_and(|metrics| metrics.sum(names::DNSTAP_MESSAGES_TOTAL, "") > 8)
    })?;
    ensure!(lab.metric(names::DNSTAP_LOST_TOTAL, "")? == 0);
    // A clean stop ends the stream, and fstrm_capture flushes its file when it ends.
    lab.server.process().stop(LIMIT)?;
    reader.signal(Signal::SIGINT)?;
    reader.wait(LIMIT)?;
    let lines = read(&folder.path().join("captured"))?;
    for (kind, words) in [
        ("CQ", &["www.shop.test/IN/A", "UDP"][..]),
        ("CR", &["www.shop.test/IN/A", "UDP"]),
        ("FQ", &["www.shop.test/IN/A", "127.0.0.10:53"]),
        ("FR", &["www.shop.test/IN/A", "127.0.0.10:53"]),
        ("CQ", &["q-s0.q-g1.bosh/IN/A", "TCP", "127.0.0.1:53"]),
        ("CR", &["q-s0.q-g1.bosh/IN/A", "TCP"]),
        ("CR", &["q-s0.q-g1.bosh/IN/AAAA", "UDP"]),
    ] {
        ensure!(count(&lines, kind, words) > 0, "{kind} {words:?}\n{lines}");
    }
    let captured = logged();
    let contains = |text: &[u8]| captured.windows(text.len()).any(|window| window == text);
    for text in [
        &at_interface[..],
        b"path=userspace answered_by=local",
        b"recursor=127.0.0.10:53",
        b"cell-7",
    ] {
        ensure!(contains(text), "{}\n{lines}", String::from_utf8_lossy(text));
    }
    Ok(())
}

/// Accepts a stream and never reads its messages.
fn stuck_reader(
    socket: &Path,
) -> Result<thread::JoinHandle<Result<std::os::unix::net::UnixStream>>> {
    let listener = UnixListener::bind(socket)?;
    Ok(thread::spawn(move || {
        let (mut stream, _) = listener.accept()?;
        let mut ready = [0; 42];
        stream.read_exact(&mut ready)?;
        // ACCEPT is READY with another type.
        ready[11] = 1;
        stream.write_all(&ready)?;
        Ok(stream)
    }))
}

#[test]
fn slow_reader_delays_no_answer() -> Result<()> {
    requires!(namespaces, programs(DNSTAP));
    let namespace = Namespace::new("dnstapslow")?;
    let folder = TempDir::with_prefix("bdx-dnstap-")?;
    let socket = folder.path().join("tap.sock");
    let stuck = stuck_reader(&socket)?;
    let settings = json!({"dnstap": {"socket": socket}});
    let lab = Lab::start(&namespace, &[], &settings)?;
    let stuck = stuck.join().expect("the reader does not panic")?;
    wait_until("the stream", LIMIT, || is_open(&namespace))?;
    // A long question fills the queue's 16 MiB and the socket's buffer soon.
    let mut query = client::query(LOCAL_NAME, RecordType::A, Some(1232))?.to_vec()?;
    let padding = vec![0; 3800];
    let options = 4 + padding.len() as u16;
    let length = query.len();
    query[length - 2..].copy_from_slice(&options.to_be_bytes());
    query.extend_from_slice(&[0, 12]);
    query.extend_from_slice(&(padding.len() as u16).to_be_bytes());
    query.extend_from_slice(&padding);
    let (mut asked, mut all_answered) = (0, true);
    wait_until("losses", LIMIT, || {
        // Every query is answered, and a full queue is no reason to wait.
        let answered = namespace.run(|| {
            (0..500)
                .all(|_| client::ask_raw(OURS, &query, LIMIT).is_ok_and(|reply| reply.len() > 12))
        });
        asked += 500;
        all_answered &= answered.is_ok_and(|answered| answered);
        lab.metric(names::DNSTAP_LOST_TOTAL, "queue")
            .is_ok_and(|lost| lost > 100)
    })
    .with_context(|| format!("{asked} queries\n{}", lab.server.log()))?;
    ensure!(all_answered, "{}", lab.server.log());
    ensure!(
        asked < 15_000,
        "{asked} messages of 4 KB fit into the queue"
    );
    // The next reader gets what is queued, and everything new.
    drop(stuck);
    fs::remove_file(&socket)?;
    let _reader = reader(folder.path())?;
    let written = lab.metric(names::DNSTAP_MESSAGES_TOTAL, "")?;
    wait_until("the next stream", LIMIT, || {
        lab.metric(names::DNSTAP_MESSAGES_TOTAL, "")
            .is_ok_and(|now| now > written + 1000)
    })
    .with_context(|| lab.server.log())
}

#[test]
fn moved_file_is_begun_again() -> Result<()> {
    requires!(namespaces, programs(DNSTAP));
    let namespace = Namespace::new("dnstapfile")?;
    let folder = TempDir::with_prefix("bdx-dnstap-")?;
    let (file, moved) = (
        folder.path().join("queries"),
        folder.path().join("queries.1"),
    );
    let settings: Value = json!({"dnstap": {"file": file, "messages": ["client_response"]}});
    let mut lab = Lab::start(&namespace, &[], &settings)?;
    let written = |lab: &Lab<'_>, number: u64| {
        wait_until("messages in the file", LIMIT, || {
            lab.metric(names::DNSTAP_MESSAGES_TOTAL, "")
                .is_ok_and(|count| count >= number)
        })
    };
    wait_until("the file", LIMIT, || is_open(&namespace))?;
    lab.ask_for(LOCAL_NAME, RecordType::A)?;
    written(&lab, 1)?;
    fs::rename(&file, &moved)?;
    wait_until("the next file", LIMIT, || file.exists())?;
    let before = lab.metric(names::DNSTAP_MESSAGES_TOTAL, "")?;
    lab.ask_for(LOCAL_NAME, RecordType::AAAA)?;
    written(&lab, before + 1)?;
    lab.server.process().stop(LIMIT)?;
    for (file, name) in [
        (&moved, "q-s0.q-g1.bosh/IN/A"),
        (&file, "q-s0.q-g1.bosh/IN/AAAA"),
    ] {
        let lines = read(file)?;
        ensure!(
            count(&lines, "CR", &[name]) > 0,
            "{}: {lines}",
            file.display()
        );
        ensure!(count(&lines, "CQ", &[]) == 0, "{}: {lines}", file.display());
    }
    // The next start keeps the former file.
    lab.server.restart(Some(&namespace))?;
    wait_until("the file", LIMIT, || is_open(&namespace))?;
    let old = folder.path().join("queries.old");
    if !old.exists() {
        bail!("no {}", old.display());
    }
    ensure!(count(&read(&old)?, "CR", &["q-s0.q-g1.bosh/IN/AAAA"]) > 0);
    Ok(())
}
