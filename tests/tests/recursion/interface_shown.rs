//! Commands and metrics show answers that the interface gives to names of the outside.

use std::{thread, time::Duration};

use anyhow::{Context, Result, ensure};
use dns_kit::metrics::names;
use hickory_proto::rr::RecordType;
use serde_json::{Value, json};
use whole_system_tests::{
    bpffs::Bpffs, client, metrics::Metrics, namespace::Namespace, process::wait_until, requires,
};

use super::{
    interface_cache::{ask_interface, hits, settle, start},
    lab::{LOCAL_NAME, Lab, OURS, loopback},
    scripted::Scripted,
};

const NAME: &str = "www.shop.test.";

/// Starts a recursor that gives every name an address for five minutes.
fn recursor(namespace: &Namespace) -> Result<Scripted> {
    Scripted::answering(namespace, loopback(10), [192, 0, 2, 1].into())
}

/// Runs a command that must succeed; returns its output.
fn run(lab: &Lab<'_>, arguments: &[&str]) -> Result<String> {
    let (code, text, problem) = lab.cli(arguments)?;
    ensure!(code == 0, "{arguments:?}: {code}, {problem}");
    Ok(text)
}

/// Runs a command while a client sends this query again and again.
fn run_while_asked(lab: &Lab<'_>, query: &[u8], arguments: &[&str]) -> Result<String> {
    thread::scope(|scope| {
        let command = scope.spawn(|| run(lab, arguments));
        while !command.is_finished() {
            lab.namespace
                .run(|| client::ask_raw(OURS, query, Duration::from_secs(5)))??;
            thread::sleep(Duration::from_millis(20));
        }
        command.join().expect("commands do not panic")
    })
}

#[test]
fn commands_show_interface_answers() -> Result<()> {
    requires!(namespaces, bpf);
    let namespace = Namespace::new("ishown")?;
    let _recursor = recursor(&namespace)?;
    let lab = start(&namespace, Bpffs::new()?, &[loopback(10)], &json!({}))?;
    let query = client::query(NAME, RecordType::A, Some(1232))?.to_vec()?;
    settle(&lab, &query)?;

    let status: Value = serde_json::from_str(&run(&lab, &["status", "--json"])?)?;
    let fast_path = &status["fast_path"];
    assert_eq!(
        (
            &fast_path["forwarded_answers"],
            &fast_path["max_forwarded_answers"]
        ),
        (&json!(1), &json!(8192))
    );
    let text = run(&lab, &["status"])?;
    ensure!(text.contains("; 1 of 8,192 forwarded answers;"), "{text}");

    let text = run(&lab, &["resolve", NAME])?;
    let expected =
        "the interface (fast path), for A over UDP at lo until the cached answer expires";
    ensure!(text.contains(expected), "{text}");

    let tap = [
        "tap",
        "--json",
        "--path",
        "fast",
        "--name",
        "shop",
        "--count",
        "2",
        "--seconds",
        "20",
    ];
    let lines = run_while_asked(&lab, &query, &tap)?;
    assert_eq!(lines.lines().count(), 2, "{lines}");
    for line in lines.lines() {
        let line: Value = serde_json::from_str(line)?;
        let shown =
            ["name", "type", "interface", "outcome", "rcode", "answers"].map(|key| &line[key]);
        let expected = [NAME, "A", "lo", "hit_forwarded", "NOERROR"].map(Value::from);
        assert_eq!(
            (&shown[..5], shown[5]),
            (&expected.each_ref()[..], &json!(1)),
            "{line}"
        );
    }

    let page = run_while_asked(&lab, &query, &["top", "--json", "--seconds", "2"])?;
    let page: Value = serde_json::from_str(&page)?;
    let hottest = &page["names"][0];
    ensure!(
        hottest["name"] == NAME && hottest["fast"].as_f64() > hottest["userspace"].as_f64(),
        "{page}"
    );

    let listing: Value = serde_json::from_str(&run(&lab, &["cache", "list", "--json"])?)?;
    let entry = &listing["entries"][0];
    assert_eq!(
        (&entry["name"], &entry["on_interface"]),
        (&json!(NAME), &json!(true)),
        "{listing}"
    );
    let text = run(&lab, &["cache", "list"])?;
    let row: Vec<&str> = text
        .lines()
        .nth(1)
        .context("a row")?
        .split_whitespace()
        .collect();
    ensure!(
        row[0] == NAME && row[row.len() - 2..] == ["yes", "-"],
        "{text}"
    );
    let text = run(&lab, &["cache", "lookup", NAME])?;
    ensure!(text.contains(", answered by the interface"), "{text}");
    run(&lab, &["cache", "flush", NAME])?;
    let (code, _, problem) = lab.cli(&["cache", "lookup", NAME])?;
    ensure!(
        code == 1 && problem.contains("nothing is cached"),
        "{problem}"
    );
    let text = run(&lab, &["resolve", NAME])?;
    ensure!(!text.contains("the interface (fast path)"), "{text}");
    wait_until("status after the flush", Duration::from_secs(120), || {
        run(&lab, &["status"]).is_ok_and(|text| text.contains("; 0 of 8,192 forwarded answers;"))
    })?;
    ensure!(
        !ask_interface(&lab, &query)?.1,
        "an answer from before the flush"
    );
    Ok(())
}

#[test]
fn metrics_count_interface_answers() -> Result<()> {
    requires!(namespaces, bpf);
    let namespace = Namespace::new("icounted")?;
    let _recursor = recursor(&namespace)?;
    let lab = start(&namespace, Bpffs::new()?, &[loopback(10)], &json!({}))?;
    let outside = client::query(NAME, RecordType::A, None)?.to_vec()?;
    settle(&lab, &outside)?;
    let local = client::query(LOCAL_NAME, RecordType::A, None)?.to_vec()?;
    let families = [
        ("boshdns_requests_internal_total", ""),
        ("boshdns_requests_external_total", ""),
        (names::REPLIES_TOTAL, ""),
        (names::COREDNS_REQUESTS_TOTAL, "type=\"A\""),
        (names::COREDNS_RESPONSES_TOTAL, "rcode=\"NOERROR\""),
    ];
    for (query, expected) in [(local, [50, 0, 50, 50, 50]), (outside, [0, 50, 50, 50, 50])] {
        // Without the replies to the server's own up-checks, which count as neither internal nor external.
        let read = || -> Result<Vec<u64>> {
            let metrics = Metrics::read(lab.namespace)?;
            let own = metrics.sum(names::COREDNS_RESPONSES_TOTAL, "plugin=\"upcheck\"");
            let value = |(number, (family, label)): (usize, &(&str, &str))| {
                metrics.sum(family, label) - if number < 2 { 0 } else { own }
            };
            Ok(families.iter().enumerate().map(value).collect())
        };
        let (before, fast) = (read()?, lab.metric(names::REPLIES_TOTAL, "path=\"fast\"")?);
        let forwarded = hits(&lab)?;
        for _ in 0..50 {
            lab.namespace
                .run(|| client::ask_raw(OURS, &query, Duration::from_secs(5)))??;
        }
        let added: Vec<u64> = read()?
            .iter()
            .zip(before)
            .map(|(after, before)| after - before)
            .collect();
        assert_eq!(added, expected, "{families:?}");
        let fast = lab.metric(names::REPLIES_TOTAL, "path=\"fast\"")? - fast;
        ensure!(fast > 25, "{fast} of 50 by the interface");
        let forwarded = hits(&lab)? - forwarded;
        ensure!(
            forwarded == if expected[1] > 0 { fast } else { 0 },
            "{forwarded} forwarded of {fast}"
        );
    }
    assert_eq!(lab.metric(names::FAST_PATH_FORWARDED_ANSWERS, "")?, 1);
    Ok(())
}

#[test]
fn late_cache_needs_restart() -> Result<()> {
    requires!(namespaces, bpf);
    let namespace = Namespace::new("ilate")?;
    let _recursor = recursor(&namespace)?;
    let lab = start(
        &namespace,
        Bpffs::new()?,
        &[loopback(10)],
        &json!({"cache": {"enabled": false}}),
    )?;
    lab.server
        .change_settings(|settings| settings["cache"]["enabled"] = true.into())?;
    run(&lab, &["reload"])?;
    lab.server
        .wait_for_log("takes effect only after a restart: cache.enabled for interfaces")?;
    for _ in 0..5 {
        lab.ask_for(NAME, RecordType::A)?;
    }
    ensure!(
        lab.metric("coredns_cache_hits_total", "")? == 4,
        "userspace caches at once"
    );
    assert_eq!(hits(&lab)?, 0);
    Ok(())
}

/// Names are counted from a sample, so their counts are estimates: the binomial deviation of 30,000 queries, of which
/// one in 200 counts, is 2,443.
#[test]
fn hottest_names_have_counters() -> Result<()> {
    requires!(namespaces, bpf);
    let namespace = Namespace::new("itop")?;
    let _recursor = recursor(&namespace)?;
    let settings = json!({"metrics": {"enabled": true, "top_names": 2}});
    let lab = start(&namespace, Bpffs::new()?, &[loopback(10)], &settings)?;
    let [hot, warm] = [NAME, LOCAL_NAME].map(|name| {
        client::query(name, RecordType::A, Some(1232)).and_then(|query| Ok(query.to_vec()?))
    });
    let (hot, warm) = (hot?, warm?);
    settle(&lab, &hot)?;
    let counted =
        |name: &str| lab.metric(names::TOP_NAME_QUERIES_TOTAL, &format!("name=\"{name}\""));
    let mut asked = 0;
    while asked < 30_000 {
        lab.namespace.run(|| {
            for number in 0..2_000 {
                let query = if number % 5 == 0 { &warm } else { &hot };
                client::ask_raw(OURS, query, Duration::from_secs(120))?;
            }
            anyhow::Ok(())
        })??;
        asked += 2_000;
    }
    // Events are read ten times a second.
    wait_until("counts of both names", Duration::from_secs(120), || {
        [NAME, LOCAL_NAME]
            .iter()
            .all(|name| counted(name).is_ok_and(|count| count > 0))
    })?;
    let all = lab.metric(names::TOP_NAME_QUERIES_TOTAL, "")?;
    ensure!(
        counted(NAME)? > counted(LOCAL_NAME)?,
        "{} of {all}",
        counted(NAME)?
    );
    ensure!(
        (10_000..).contains(&all) && all <= asked + 20_000,
        "{all} counted, {asked} asked"
    );
    Ok(())
}
