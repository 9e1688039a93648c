//! `run`: sources, API, status, and the state after a kill.

use serde_json::{Value, json};

use crate::{
    etcd::Etcd,
    name_server::{NameServer, Program},
    publisher::{Publisher, Running, read, update_record},
};

const RECORDS: &str = "/v2/project/default/dns-update-records/";

fn has(server: &NameServer, text: &str) -> bool {
    server.transfer("example.org").contains(text)
}

#[test]
fn changes_are_published_at_once() {
    let server = NameServer::start(Program::Bind);
    let publisher = Publisher::new();
    publisher.write(
        "publish.yml",
        "documents: [documents]\nstore: state/store\ncontrol: {socket: control.sock}\n",
    );
    publisher.endpoints("web", &[("a.example.org", "192.0.2.1")]);
    let running = publisher.start();
    // The provider is created through the API with an interval of a minute, so only the event can be the
    // cause.
    let (code, _) = running
        .ask("POST", RECORDS, Some(&update_record(&server)))
        .unwrap();
    assert_eq!(code, 201);
    running.wait_until("the first record", || has(&server, "192.0.2.1\n"));
    publisher.endpoints("web", &[("a.example.org", "192.0.2.2")]);
    running.wait_until("the change", || {
        has(&server, "192.0.2.2\n") && !has(&server, "192.0.2.1\n")
    });
    let status = publisher.path("documents/web.json.status");
    let synced = |generation: u64| {
        let status: Value = read(&status);
        let document = &status["documents"][0];
        document["observedGeneration"] == generation
            && document["providers"]["default/bind"]["synced"] == true
    };
    running.wait_until("the status", || synced(2));
    publisher.write("documents/web.json", "{\"kind\": \"DNSEndpoint\"");
    running.wait_until("the error", || {
        read(&status)["problems"][0]
            .as_str()
            .is_some_and(|text| text.contains("web.json:1"))
    });
    assert!(has(&server, "192.0.2.2\n"));
    let (code, body) = running.get("/healthz");
    assert_eq!((code, body), (200, json!("OK\n")));
    let (_, metrics) = running.get("/metrics");
    let metrics = metrics.as_str().unwrap();
    for family in [
        "external_dns_controller_last_sync_timestamp_seconds{provider=\"default/bind\"}",
        "external_dns_controller_last_reconcile_timestamp_seconds{provider=\"default/bind\"}",
        "external_dns_controller_consecutive_soft_errors{provider=\"default/bind\"} 0",
        "external_dns_registry_endpoints_total{provider=\"default/bind\"}",
        "external_dns_registry_records{provider=\"default/bind\"} 1",
        "external_dns_source_invalid_endpoints 1",
        "external_dns_source_errors_total",
    ] {
        assert!(metrics.contains(family), "{family}: {metrics}");
    }
    let (_, record) = running.get(&format!("{RECORDS}bind"));
    assert_eq!(record["status"]["ready"], true, "{record}");
    assert_eq!(
        publisher.expect(1, "status").out.lines().next().unwrap(),
        "default/bind (rfc2136): published, 0 record sets wanted, 1 names owned"
    );
    running.stop();
    assert!(has(&server, "192.0.2.2\n"));
}

#[test]
fn intent_publishes_through_lists() {
    let server = NameServer::start(Program::Knot);
    let publisher = Publisher::new();
    let running = publisher.start();
    let created = |path: &str, body: Value| {
        let (code, answer) = running.ask("POST", path, Some(&body)).unwrap();
        assert_eq!(code, 201, "{answer}");
    };
    let list =
        json!({"metadata": {"name": "dns-update-record-list"}, "spec": {"kv": [{"key1": "bind"}]}});
    created(RECORDS, update_record(&server));
    created(
        "/v2/projects/default/logical-clouds/lc1/kv-pairs",
        list.clone(),
    );
    created("/v2/cluster-providers/p/clusters/edge/kv-pairs", list);
    let cluster = json!({"cluster": "p/edge", "publicAddresses": ["192.0.2.7"], "localAddresses": ["10.0.0.7"]});
    let intent = json!({
        "metadata": {"name": "shop"},
        "spec": {
            "app": "shop", "externalName": "shop", "publicDomain": "example.org", "localDomain": "edge.example.org",
            "ttl": 60, "placements": [{"logicalCloud": "lc1", "clusters": [cluster]}],
        },
    });
    created("/v2/projects/default/inbound-intents", intent);
    let is_published = |name: &str, address: &str| {
        server
            .transfer("example.org")
            .lines()
            .any(|line| line.starts_with(name) && line.ends_with(address))
    };
    running.wait_until("the public name", || {
        is_published("shop.example.org.", "192.0.2.7")
    });
    running.wait_until("the local name", || {
        is_published("shop.edge.example.org.", "10.0.0.7")
    });
    assert!(has(&server, "external-dns/resource=intent/default/shop"));
    // The record is in use, so it cannot be deleted; removing the intent removes its names.
    assert_eq!(
        running
            .ask("DELETE", &format!("{RECORDS}bind"), None)
            .unwrap()
            .0,
        409
    );
    assert_eq!(
        running
            .ask("DELETE", "/v2/projects/default/inbound-intents/shop", None)
            .unwrap()
            .0,
        204
    );
    let (_, refused) = running.get("/status");
    assert!(
        refused["providers"]["default/bind"].is_object(),
        "{refused}"
    );
    running.wait_until("the refusal", || {
        let (_, status) = running.get("/status");
        status.to_string().contains("--confirm-deletions 2")
    });
    publisher.expect(0, "apply --confirm-deletions 2");
    assert!(!has(&server, "192.0.2.7"));
    running.stop();
}

#[test]
fn planted_status_link_is_not_followed() {
    let publisher = Publisher::new();
    publisher.endpoints("web", &[("a.example.org", "192.0.2.1")]);
    publisher.write("precious", "root's");
    let status = publisher.path("documents/web.json.status");
    std::os::unix::fs::symlink(publisher.path("precious"), &status).unwrap();
    // A kill between the write and the rename of an earlier process.
    publisher.write("documents/.web.json.status.part-abc123", "{");
    let running = publisher.start();
    running.wait_until("the status", || {
        status.symlink_metadata().unwrap().is_file()
    });
    let documents = read(&status);
    assert_eq!(documents["documents"][0]["name"], "web", "{documents}");
    let precious = std::fs::read_to_string(publisher.path("precious")).unwrap();
    assert_eq!(precious, "root's");
    assert!(
        !publisher
            .path("documents/.web.json.status.part-abc123")
            .exists()
    );
    running.stop();
}

#[test]
fn unreachable_provider_fails_health() {
    let server = NameServer::start(Program::Knot);
    let publisher = Publisher::of(&server);
    publisher.provider(
        &server,
        &json!({"rfc2136-tsig-secret": "d3Jvbmc=", "interval": "1s"}),
    );
    publisher.endpoints("web", &[("a.example.org", "192.0.2.1")]);
    let running = publisher.start();
    let errors = || {
        let (_, metrics) = running.get("/metrics");
        metrics
            .as_str()
            .unwrap()
            .contains("consecutive_soft_errors{provider=\"default/bind\"} 2")
    };
    running.wait_until("two failed rounds", errors);
    let said = publisher.expect(1, "status --json");
    let status: Value = serde_json::from_str(&said.out).unwrap();
    assert_eq!(status["providers"]["default/bind"]["synced"], false);
    let problem = status["providers"]["default/bind"]["problems"][0]
        .as_str()
        .unwrap();
    assert!(problem.contains("rfc2136-tsig-secret"), "{problem}");
    // With the right key the next round succeeds without a restart.
    publisher.provider(&server, &json!({"interval": "1s"}));
    running.wait_until("the record", || has(&server, "192.0.2.1\n"));
    running.stop();
}

#[test]
fn refused_plan_fails_health() {
    let etcd = Etcd::start(None);
    let publisher = Publisher::new();
    publisher.write(
        "publish.yml",
        &json!({
            "documents": ["documents"],
            "store": "state/store",
            "control": {"socket": "control.sock"},
            "provider_settings": {"default/etcd": {"etcd-urls": etcd.url}},
        })
        .to_string(),
    );
    publisher.write(
        "documents/etcd.yml",
        "apiVersion: bosh-dns-publish/v1\nkind: DNSUpdateRecord\nmetadata: {name: etcd}\n\
         spec: {provider: coredns, selector: dnsprovider=bind, external-dns-parameters: {interval: 1s}}\n",
    );
    publisher.endpoints("web", &[("a.example.org", "192.0.2.1")]);
    // The limit for a complete round is a minute plus three intervals.
    let running = publisher.start_fast(10);
    running.wait_until("the record", || etcd.keys().len() == 2);
    running.wait_until("health", || running.get("/healthz") == (200, json!("OK\n")));
    publisher.endpoints("web", &[]);
    running.wait_until("the refusal in the status", || {
        running
            .get("/status")
            .1
            .to_string()
            .contains("--confirm-deletions 1")
    });
    running.wait_until("the refusal in the health", || {
        let (code, reason) = running.get("/healthz");
        code == 503
            && reason
                .as_str()
                .is_some_and(|text| text.contains("--confirm-deletions 1"))
    });
    let (_, metrics) = running.get("/metrics");
    let waiting = "bosh_dns_publish_deletions_awaiting_confirmation{provider=\"default/etcd\"} 1";
    assert!(metrics.as_str().unwrap().contains(waiting), "{metrics}");
    assert_eq!(etcd.keys().len(), 2, "nothing was deleted");
    publisher.expect(0, "apply --confirm-deletions 1");
    running.wait_until("health again", || running.get("/healthz").0 == 200);
    assert_eq!(etcd.keys().len(), 0);
    running.stop();
}

/// Acknowledged resources, and resources whose outcome is unknown.
fn store_until_killed(
    running: Running,
    round: usize,
    acknowledged: &mut Vec<String>,
) -> Option<String> {
    let kill_after = fastrand::usize(1..20);
    for index in 0..kill_after {
        let name = format!("r{round}-{index}");
        let body = json!({"metadata": {"name": name}, "spec": {"provider": "coredns"}});
        let (code, _) = running.ask("POST", RECORDS, Some(&body)).unwrap();
        assert_eq!(code, 201);
        acknowledged.push(name);
    }
    // A request is in flight when the process is killed.
    let name = format!("r{round}-open");
    std::thread::scope(|scope| {
        let asked = &running;
        let open = name.clone();
        let request = scope.spawn(move || {
            let body = json!({"metadata": {"name": open}, "spec": {"provider": "coredns"}});
            asked
                .ask("POST", RECORDS, Some(&body))
                .map(|(code, _)| code)
        });
        std::thread::sleep(std::time::Duration::from_micros(fastrand::u64(0..8_000)));
        asked.kill_now();
        match request.join().unwrap() {
            Some(code) => {
                assert_eq!(code, 201);
                acknowledged.push(name.clone());
                None
            }
            None => Some(name.clone()),
        }
    })
}

#[test]
fn acknowledged_resources_survive_kill() {
    let publisher = Publisher::new();
    let mut acknowledged = Vec::new();
    let mut open = Vec::new();
    for round in 0..8 {
        open.extend(store_until_killed(
            publisher.start(),
            round,
            &mut acknowledged,
        ));
    }
    let running = publisher.start();
    let (_, list) = running.get(RECORDS);
    let names: Vec<&str> = list
        .as_array()
        .unwrap()
        .iter()
        .map(|record| record["metadata"]["name"].as_str().unwrap())
        .collect();
    for name in &acknowledged {
        assert!(
            names.contains(&name.as_str()),
            "{name} was acknowledged and is lost"
        );
    }
    for name in names {
        assert!(
            acknowledged.iter().chain(&open).any(|known| known == name),
            "{name} was never sent"
        );
    }
    running.kill();
}

#[test]
fn commands_see_resources_of_the_running_publisher() {
    let server = NameServer::start(Program::Bind);
    let publisher = Publisher::new();
    let running = publisher.start();
    running
        .ask("POST", RECORDS, Some(&update_record(&server)))
        .unwrap();
    publisher.endpoints("web", &[("a.example.org", "192.0.2.1")]);
    running.wait_until("the record", || has(&server, "192.0.2.1\n"));
    assert_eq!(
        publisher.expect(0, "plan").out,
        "default/bind:\n  nothing to do\n"
    );
    running.stop();
    assert_eq!(
        publisher.expect(0, "plan").out,
        "default/bind:\n  nothing to do\n"
    );
}
