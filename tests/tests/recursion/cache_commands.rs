//! `bosh-dns-xdp cache` against a server with cached answers.

use std::net::Ipv4Addr;

use anyhow::{Context, Result, ensure};
use hickory_proto::{op::ResponseCode, rr::RecordType};
use serde_json::{Value, json};
use whole_system_tests::{client, namespace::Namespace, requires};

use super::{
    lab::{Lab, loopback},
    scripted::Scripted,
};

const ADDRESS: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);

/// Runs a `cache` command; returns exit code, standard output and standard error.
fn cache(lab: &Lab<'_>, arguments: &[&str]) -> Result<(i32, String, String)> {
    lab.cli(&[&["cache"], arguments].concat())
}

/// Returns the names and types of the cached answers that a listing shows.
fn listed(lab: &Lab<'_>, arguments: &[&str]) -> Result<Vec<(String, String)>> {
    let (code, text, problem) = cache(lab, &[&["list", "--json"], arguments].concat())?;
    ensure!(code == 0, "{problem}");
    let listing: Value = serde_json::from_str(&text)?;
    let field = |entry: &Value, key: &str| entry[key].as_str().unwrap_or_default().to_owned();
    let entries = listing["entries"]
        .as_array()
        .context("there are no entries")?;
    Ok(entries
        .iter()
        .map(|entry| (field(entry, "name"), field(entry, "type")))
        .collect())
}

#[test]
fn answers_are_listed_and_flushed() -> Result<()> {
    requires!(namespaces);
    let namespace = Namespace::new("cachecli")?;
    let recursor = Scripted::start(&namespace, loopback(10), |asked| {
        vec![match asked.name().to_ascii_lowercase().split('.').next() {
            Some("nowhere") => asked.deny(ResponseCode::NXDomain, 900, 60).into(),
            _ => asked.answer(ADDRESS, 300).into(),
        }]
    })?;
    let sockets = tempfile::tempdir()?;
    let settings = json!({
        "cache": {"enabled": true},
        "control": {"socket": sockets.path().join("control.sock")},
        "handlers": [{
            "domain": "corp.test", "cache": {"enabled": true},
            "source": {"type": "dns", "recursors": [loopback(10)]},
        }],
    });
    let lab = Lab::start(&namespace, &[loopback(10)], &settings)?;
    let fill = || -> Result<()> {
        for name in [
            "www.shop.test.",
            "API.shop.test.",
            "nowhere.test.",
            "db.corp.test.",
        ] {
            lab.ask_for(name, RecordType::A)?;
        }
        lab.ask_for("api.shop.test.", RecordType::AAAA)?;
        let mut signed = client::query("www.shop.test.", RecordType::A, Some(1232))?;
        signed
            .edns
            .as_mut()
            .context("the query has an OPT")?
            .set_dnssec_ok(true);
        lab.ask(&signed)?;
        Ok(())
    };
    let rows = |rows: &[(&str, &str)]| -> Vec<(String, String)> {
        rows.iter()
            .map(|(name, kind)| ((*name).to_owned(), (*kind).to_owned()))
            .collect()
    };
    fill()?;
    let all = rows(&[
        ("db.corp.test.", "A"),
        ("nowhere.test.", "A"),
        ("api.shop.test.", "A"),
        ("api.shop.test.", "AAAA"),
        ("www.shop.test.", "A"),
        ("www.shop.test.", "A"),
    ]);
    assert_eq!(listed(&lab, &[])?, all);
    assert_eq!(
        listed(&lab, &["--zone", "shop.test", "--type", "aaaa"])?,
        rows(&[("api.shop.test.", "AAAA")])
    );
    assert_eq!(listed(&lab, &["--limit", "2"])?, all[..2]);
    let (_, text, _) = cache(&lab, &["list", "--limit", "2"])?;
    ensure!(
        text.contains("corp.test.") && text.ends_with("4 more; see --limit\n"),
        "{text}"
    );

    let (code, text, _) = cache(&lab, &["lookup", "WWW.shop.test"])?;
    ensure!(
        code == 0 && text.contains("for queries with DO") && text.contains("192.0.2.1"),
        "{text}"
    );
    let (_, text, _) = cache(&lab, &["lookup", "nowhere.test", "A", "--json"])?;
    let found: Value = serde_json::from_str(&text)?;
    let entry = &found["entries"][0];
    assert_eq!(
        (&entry["rcode"], &entry["records"]),
        (&json!("NXDOMAIN"), &json!([]))
    );
    assert_eq!(entry["recursor"], json!(loopback(10)));
    ensure!(
        (50..=60).contains(&entry["ttl"].as_u64().unwrap_or_default()),
        "{entry}"
    );
    let (code, _, problem) = cache(&lab, &["lookup", "www.shop.test", "MX"])?;
    ensure!(
        code == 1 && problem.contains("nothing is cached"),
        "{problem}"
    );

    for (arguments, expected, left) in [
        (&["www.shop.test"][..], 2, &all[..4]),
        (&["api.shop.test", "--type", "AAAA"], 1, &all[..3]),
        (&["--zone", "corp.test"], 1, &all[1..3]),
        (&["--type", "A"], 2, &[]),
    ] {
        let (code, text, problem) = cache(&lab, &[&["flush", "--json"], arguments].concat())?;
        ensure!(code == 0, "{problem}");
        assert_eq!(
            serde_json::from_str::<Value>(&text)?,
            json!({"flushed": expected}),
            "{arguments:?}"
        );
        assert_eq!(listed(&lab, &[])?, left, "{arguments:?}");
    }
    let before = recursor.count();
    fill()?;
    ensure!(
        recursor.count() == before + 6,
        "flushed answers are requested again"
    );
    let (_, text, _) = cache(&lab, &["flush", "all"])?;
    ensure!(text == "6 cached answers dropped\n", "{text}");
    assert_eq!(listed(&lab, &[])?, []);

    for wrong in [
        &["flush"][..],
        &["flush", "a.test", "--zone", "test"],
        &["list", "--type", "BOGUS"],
    ] {
        assert_eq!(cache(&lab, wrong)?.0, 2, "{wrong:?}");
    }
    let (code, _, problem) = cache(&lab, &["flush", "a..b"])?;
    ensure!(
        code == 1 && problem.contains("is not a domain name"),
        "{problem}"
    );
    Ok(())
}
