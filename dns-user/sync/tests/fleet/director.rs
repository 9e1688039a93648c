//! A director's calls, sent by the test, and the agent's replies: cases in `calls.json`.

use std::{fs, time::Duration};

use anyhow::{Context, Result, ensure};
use dns_kit::hex;
use ring::digest::{Algorithm, SHA1_FOR_LEGACY_USE_ONLY, SHA256, SHA512, digest};
use serde_json::{Value, json};

use crate::{lab::Lab, speaker::Speaker};

/// Returns the bytes of a version.
fn dataset(version: u64) -> String {
    format!(
        r#"{{"records":[],"version":{version},"record_keys":["id"],"record_infos":[],"aliases":{{}}}}"#
    )
}

#[test]
fn an_agent_replies_to_a_director() -> Result<()> {
    let lab = Lab::new(1)?;
    let mut director = Speaker::new(&lab, "director", "director.>")?;
    let _agent = lab.agent("a0", &[])?;
    // The agent subscribes before it reports its start.
    assert_eq!(
        director.hear()?.subject.as_str(),
        "director.bosh-dns-sync.a0.hello"
    );
    let of = |algorithm: &'static Algorithm, text: &str| {
        hex(digest(algorithm, text.as_bytes()).as_ref())
    };
    let mut places = vec![("BLOBS".to_owned(), lab.path("blobs").display().to_string())];
    for (blob, name, text) in [
        ("blob-1", "1", dataset(1)),
        ("blob-2", "2", dataset(2)),
        ("blob-3", "3", dataset(3)),
        ("text", "text", "no dataset".to_owned()),
    ] {
        fs::write(lab.path("blobs").join(blob), &text)?;
        places.push((
            format!("SHA256-{name}"),
            format!("sha256:{}", of(&SHA256, &text)),
        ));
        places.push((
            format!("SHA512-{name}"),
            format!("sha512:{}", of(&SHA512, &text)),
        ));
        places.push((format!("SHA1-{name}"), of(&SHA1_FOR_LEGACY_USE_ONLY, &text)));
        places.push((format!("HEX-{name}"), of(&SHA256, &text)));
    }
    let filled = |text: String| {
        places
            .iter()
            .fold(text, |text, (name, value)| text.replace(name, value))
    };

    let cases: Vec<Value> = serde_json::from_str(include_str!("calls.json"))?;
    for (number, case) in cases.iter().enumerate() {
        let why = case["why"].as_str().context("why")?;
        let reply_to = format!("director.by-hand.a0.{number}");
        let call = match case["call"].as_str() {
            Some(raw) => raw.to_owned(),
            None => json!({"protocol": 3, "method": case["method"], "arguments": case["arguments"],
                "reply_to": reply_to})
            .to_string(),
        };
        director.say("agent.a0", &filled(call))?;
        let Some(golden) = case["reply"].as_str() else {
            ensure!(
                director.is_silent_for(Duration::from_millis(300)),
                "{why}: a reply"
            );
            continue;
        };
        let reply = director.hear_reply().context(why.to_owned())?;
        assert_eq!(reply.subject.as_str(), reply_to, "{why}");
        assert_eq!(
            String::from_utf8_lossy(&reply.payload),
            filled(golden.to_owned()),
            "{why}"
        );
        if let Some(version) = case["version"].as_u64() {
            assert_eq!(lab.version("a0")?, version, "{why}");
        }
    }
    Ok(())
}
