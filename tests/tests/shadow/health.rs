//! Health, asked from the API of the observed server or checked by `shadow`: flips are no difference, a failing
//! instance among the answers is one.

use std::{
    fs,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    sync::Arc,
    thread,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use hickory_proto::{
    op::Message,
    rr::{RData, RecordType, rdata},
};
use serde_json::{Value, json};
use whole_system_tests::{
    client::{ask_raw, query},
    conformance::{
        Recorded,
        scenario::{HealthScript, Scenario, read_json},
        world::World,
    },
    namespace::Namespace,
    requires, server,
};

use crate::double::{Double, PATIENCE, Shadow, causes, count, unexplained};

/// Only running instances; the records name no group, so the API tells their states.
const NAME: &str = "q-s3.web.net.dep.bosh.";
/// An instance that fails.
const FAILING: Ipv4Addr = Ipv4Addr::new(127, 10, 1, 2);
/// An instance whose health flips.
const FLIPPING: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 10, 1, 1));

/// Queries, one each [`PAUSE`].
const QUERIES: u32 = 400;
const PAUSE: Duration = Duration::from_millis(40);

/// Events while the server is watched.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Event {
    /// An instance changes its state every second.
    Flips,
    /// The relay before the server adds a failing instance to each answer.
    WrongHealth,
}

/// Watches a server with checked instances; returns exit code and report.
fn watch(source: &'static str, event: Event) -> Result<(i32, Value)> {
    let namespace = Namespace::new("shadowhealth")?;
    namespace.run(|| watch_inside(&namespace, source, event))?
}

fn watch_inside(namespace: &Namespace, source: &str, event: Event) -> Result<(i32, Value)> {
    let recorded = Recorded::own();
    let folder = recorded.scenarios.join("10a_health_states");
    let mut scenario: Scenario = read_json(&folder.join("scenario.json"))?;
    let extra = json!({"xdp": {"mode": "off"}, "control": {"socket": ""}});
    server::merge(&mut scenario.config, &extra);
    let mut world = World::new(scenario, &folder, &recorded.certificates)?;
    world.write_config()?;
    world.launch(&format!(
        "{} --config {{config}}",
        server::program()?.display()
    ))?;
    ensure!(world.wait_until_ready(PATIENCE)?, "{}", world.log());
    let port = *world.ports.get("PORT").context("a port")?;
    let behind = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let relay = SocketAddr::from((Ipv4Addr::LOCALHOST, 5353));
    let replies = move |query: &[u8], _: bool| {
        let reply = ask_raw(behind, query, PATIENCE).ok()?;
        let mut message = Message::from_vec(&reply).ok()?;
        if event == Event::WrongHealth
            && let Some(first) = message.answers.first()
        {
            let mut record = first.clone();
            record.data = RData::A(rdata::A(FAILING));
            message.answers.push(record);
            return message.to_vec().ok();
        }
        Some(reply)
    };
    let _relay = Double::start(relay, Arc::new(replies))?;

    // The shadow's configuration names the relay.
    let mut config: Value = serde_json::from_slice(&fs::read(world.config_file())?)?;
    config["port"] = json!(relay.port());
    let path = world.folder.path().join("shadow.json");
    fs::write(&path, config.to_string())?;
    let arguments = ["--health", source, "--cpu", "100"];
    let output = tempfile::tempdir()?;
    let mut shadow = Shadow::start(namespace, output.path(), &path, &arguments)?;
    shadow.wait_until_watching()?;
    for number in 0..QUERIES {
        let message = query(NAME, RecordType::A, None)?.to_vec()?;
        ask_raw(relay, &message, PATIENCE)?;
        if event == Event::Flips && number % 25 == 0 {
            let state = if number % 50 == 0 {
                "failing"
            } else {
                "running"
            };
            let script = HealthScript {
                state: Some(state.to_owned()),
                ..HealthScript::default()
            };
            world.set_health(FLIPPING, Some(script))?;
        }
        thread::sleep(PAUSE);
    }
    shadow.stop()
}

fn flips_are_no_difference(source: &'static str) -> Result<()> {
    let (code, report) = watch(source, Event::Flips)?;
    ensure!(
        code == 0,
        "{}\n{}",
        report["verdicts"],
        unexplained(&report)
    );
    ensure!(
        count(&report, "/verdicts/compared") >= 400,
        "{}",
        report["verdicts"]
    );
    let health = report["health"].as_str().unwrap_or_default();
    ensure!(
        !health.contains("not followed") && !health.contains("error"),
        "{health}"
    );
    Ok(())
}

fn wrong_health_is_found(source: &'static str) -> Result<()> {
    let (code, report) = watch(source, Event::WrongHealth)?;
    ensure!(code == 3, "{}: {}", report["health"], report["verdicts"]);
    let causes = causes(&report, false);
    ensure!(causes == ["further addresses"], "{causes:?}");
    ensure!(
        count(&report, "/verdicts/unexplained") > 10,
        "{}",
        report["verdicts"]
    );
    Ok(())
}

#[test]
fn asked_health_flips_without_difference() -> Result<()> {
    requires!(namespaces);
    flips_are_no_difference("ask")
}

#[test]
fn checked_health_flips_without_difference() -> Result<()> {
    requires!(namespaces);
    flips_are_no_difference("watch")
}

#[test]
fn asked_health_shows_wrong_selection() -> Result<()> {
    requires!(namespaces);
    wrong_health_is_found("ask")
}

#[test]
fn checked_health_shows_wrong_selection() -> Result<()> {
    requires!(namespaces);
    wrong_health_is_found("watch")
}

/// Without health any selection of a name's instances is accepted, and no other address.
#[test]
fn ignored_health_accepts_any_selection() -> Result<()> {
    requires!(namespaces);
    let (code, report) = watch("none", Event::WrongHealth)?;
    ensure!(code == 0, "{}", unexplained(&report));
    let health = report["health"].as_str().unwrap_or_default();
    ensure!(health.contains("not followed"), "{health}");
    Ok(())
}
