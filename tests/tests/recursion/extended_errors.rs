//! Extended DNS Errors (RFC 8914), as dig shows them: one reply for each reason.

use std::{
    net::Ipv4Addr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use hickory_proto::{op::ResponseCode, rr::rdata::opt::EdnsOption};
use serde_json::json;
use whole_system_tests::{
    namespace::Namespace,
    process::{capture, wait_until},
    requires,
};

use super::{
    lab::{LOCAL_NAME, Lab, OURS, loopback},
    scripted::{Asked, Say, Scripted},
};

/// A recursor that passes on an error of its own, answers two names until it is silenced, and is otherwise silent.
fn script(asked: &Asked, is_silenced: &AtomicBool) -> Vec<Say> {
    let is_silenced = is_silenced.load(Ordering::Relaxed);
    match asked.name().to_lowercase().as_str() {
        "bogus.test." => {
            let mut reply = asked.reply(ResponseCode::ServFail);
            if let Some(edns) = &mut reply.edns {
                // INFO-CODE 6, DNSSEC Bogus, and a text.
                edns.options_mut()
                    .insert(EdnsOption::Unknown(15, b"\0\x06bad signature".to_vec()));
            }
            vec![reply.into()]
        }
        "stale.test." if !is_silenced => vec![asked.answer(Ipv4Addr::new(192, 0, 2, 1), 5).into()],
        "gone.test." if !is_silenced => vec![asked.deny(ResponseCode::NXDomain, 5, 5).into()],
        _ => Vec::new(),
    }
}

/// Returns dig's output.
fn dig(lab: &Lab<'_>, words: &str) -> Result<String> {
    let mut command = lab.namespace.command("dig")?;
    command
        .arg(format!("@{}", OURS.ip()))
        .args(["+tries=1", "+timeout=20"])
        .args(words.split(' '));
    capture(&mut command)
}

/// Whether dig shows this RCODE and this error, and, if the second is empty, no error.
fn shows(output: &str, rcode: &str, error: &str) -> bool {
    let mut shown = output
        .lines()
        .filter_map(|line| line.strip_prefix("; EDE: "));
    let matches = if error.is_empty() {
        shown.next().is_none()
    } else {
        shown.any(|one| one.starts_with(error))
    };
    output.contains(&format!("status: {rcode},")) && matches
}

#[test]
fn dig_shows_reasons_of_failures() -> Result<()> {
    requires!(namespaces, programs(&["dig"]));
    let namespace = Namespace::new("ede")?;
    let is_silenced = Arc::new(AtomicBool::new(false));
    let silenced = Arc::clone(&is_silenced);
    let _recursor = Scripted::start(&namespace, loopback(10), move |asked| {
        script(asked, &silenced)
    })?;
    let settings = json!({
        "cache": {"enabled": true, "serve_stale": "1h"}, "recursor_timeout": "1s", "request_timeout": "30s",
        "handlers": [
            {"domain": "denied.test.", "source": {"type": "deny", "response": "REFUSED"}},
            {"domain": "http.test.", "source": {"type": "http", "url": "http://127.0.0.1:9"}},
        ],
    });
    let lab = Lab::start(&namespace, &[loopback(10)], &settings)?;
    for (words, rcode, error) in [
        ("silent.test. A", "SERVFAIL", "22 (No Reachable Authority)"),
        (
            "bogus.test. A",
            "SERVFAIL",
            "6 (DNSSEC Bogus): (bad signature)",
        ),
        ("denied.test. A", "REFUSED", "15 (Blocked)"),
        ("http.test. A", "SERVFAIL", "23 (Network Error)"),
        ("unknown.test. CH TXT", "REFUSED", "21 (Not Supported)"),
        ("stale.test. A", "NOERROR", ""),
        ("gone.test. A", "NXDOMAIN", ""),
        (&format!("{LOCAL_NAME} A"), "NOERROR", ""),
        ("q-s0.q-g9.bosh. A +nsid", "NXDOMAIN", "0 (Other)"),
        // A client without EDNS cannot read it.
        ("silent.test. A +noedns", "SERVFAIL", ""),
    ] {
        let output = dig(&lab, words)?;
        ensure!(
            shows(&output, rcode, error),
            "{words}: not {rcode} with {error:?}\n{output}"
        );
    }
    // A failure is cached for one second, which two queries of a busy machine may exceed.
    wait_until("a cached failure", Duration::from_secs(120), || {
        let output = dig(&lab, "silent.test. A").unwrap_or_default();
        shows(&output, "SERVFAIL", "13 (Cached Error)")
    })?;
    is_silenced.store(true, Ordering::Relaxed);
    for (words, rcode, error) in [
        ("stale.test. A", "NOERROR", "3 (Stale Answer)"),
        ("gone.test. A", "NXDOMAIN", "19 (Stale NXDOMAIN Answer)"),
    ] {
        let mut last = String::new();
        wait_until("the answer to expire", Duration::from_secs(120), || {
            last = dig(&lab, words).unwrap_or_default();
            shows(&last, rcode, error)
        })
        .with_context(|| format!("{words}: not {rcode} with {error:?}\n{last}"))?;
    }
    drop(lab);
    let lab = Lab::start(&namespace, &[], &json!({"disable_recursors": true}))?;
    let output = dig(&lab, "outside.test. A")?;
    ensure!(
        shows(&output, "REFUSED", "20 (Not Authoritative)"),
        "{output}"
    );
    Ok(())
}
