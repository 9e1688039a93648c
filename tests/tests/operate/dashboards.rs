//! The panels of the dashboards: their queries, against a Prometheus that is fed by real programs under load.

use std::{
    fs,
    path::Path,
    process::Stdio,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use dns_health::HEALTH_NAME;
use hickory_proto::rr::RecordType;
use serde_json::{Value, json};
use whole_system_tests::{
    client, fleet,
    health::{Authority, Fleet, Says, instance, write_files},
    namespace::Namespace,
    pki::write_director_files,
    process::{Kept, run, wait_until},
    requires,
    server::{self, Server},
};

use crate::{
    dnsmasq,
    prometheus::{Prometheus, deploy},
    running::{METRICS_PORT, Running},
};

/// Returns title and queries of each panel, with Grafana's variables replaced.
fn panels(dashboard: &str) -> Result<Vec<(String, Vec<String>)>> {
    let file = deploy().join("grafana").join(dashboard);
    let dashboard: Value = serde_json::from_slice(&fs::read(file)?)?;
    let panels = dashboard["panels"]
        .as_array()
        .context("the dashboard has panels")?;
    let queries = |panel: &Value| -> Vec<String> {
        let targets = panel["targets"].as_array().into_iter().flatten();
        let plain = |text: &str| {
            text.replace("$__rate_interval", "15s")
                .replace("$instance", ".+")
        };
        targets
            .filter_map(|target| target["expr"].as_str())
            .map(plain)
            .collect()
    };
    let with_queries = panels.iter().map(|panel| {
        (
            panel["title"].as_str().unwrap_or_default().to_owned(),
            queries(panel),
        )
    });
    Ok(with_queries
        .filter(|(_, queries)| !queries.is_empty())
        .collect())
}

/// Waits until every panel has shown a value. Panels may show theirs at different times.
fn wait_for_panels(prometheus: &Prometheus<'_>, dashboard: &str) -> Result<()> {
    let mut empty = panels(dashboard)?;
    ensure!(
        empty.len() >= 8,
        "{dashboard} has lost its panels: {empty:?}"
    );
    let waited = wait_until("every panel", Duration::from_secs(120), || {
        empty.retain(|(_, queries)| {
            !queries.iter().any(|query| {
                prometheus
                    .values(query)
                    .is_ok_and(|values| !values.is_empty())
            })
        });
        empty.is_empty()
    });
    waited.with_context(|| format!("empty panels of {dashboard}: {empty:#?}"))
}

/// Sends queries of every kind until `done`.
fn load(server: &Server, done: &AtomicBool) -> Result<()> {
    let names = [
        "q-s0.q-g1.bosh.",
        "nosuch.q-g1.bosh.",
        "www.example.org.",
        "other.example.org.",
    ];
    let mut queries = Vec::new();
    for name in names {
        for record_type in [RecordType::A, RecordType::AAAA, RecordType::MX] {
            queries.push(client::query(name, record_type, None)?);
        }
    }
    let mut fresh = 0;
    while !done.load(Ordering::Relaxed) {
        // A busy machine may lose one.
        let patience = Duration::from_millis(500);
        for query in &queries {
            let _ = client::ask_raw(server.address, &query.to_vec()?, patience);
        }
        let _ = client::ask_tcp(server.address, &queries[0]);
        // Not in the cache.
        fresh += 1;
        let query = client::query(&format!("n{fresh}.example.org."), RecordType::A, None)?;
        let _ = client::ask_raw(server.address, &query.to_vec()?, patience);
        thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

/// Starts a server with every part in use: an interface, recursors of which one is dead, cache and checks.
fn busy_server(namespace: Namespace, files: &Path, port: u16, recursor: &str) -> Result<Running> {
    let folder = server::folder(
        &fleet::records(1, (0..3).map(|number| (1, instance(number)))),
        Some(br#"{"web.alias": ["q-s0.q-g1.bosh"]}"#),
    )?;
    let settings = json!({
        "disable_recursors": false, "recursors": ["127.0.0.9:53", recursor], "recursor_timeout": "50ms",
        "cache": {"enabled": true}, "xdp": {"mode": "tc", "interfaces": ["lo"]},
        "health": {
            "enabled": true, "port": port, "check_interval": "200ms",
            "certificate_file": files.join("certificate.pem"), "private_key_file": files.join("key.pem"),
            "ca_file": files.join("ca.pem"),
        },
    });
    Running::start_with(namespace, folder, &settings)
}

#[test]
fn busy_server_fills_every_panel() -> Result<()> {
    requires!(namespaces, bpf, prometheus);
    let namespace = Namespace::new("panels")?;
    let (_recursor, recursor) = dnsmasq::start(&namespace, 10)?;
    let files = tempfile::tempdir()?;
    let authority = Authority::new("ca")?;
    let tls = write_files(
        files.path(),
        &authority.issue(HEALTH_NAME)?,
        &authority.certificate,
    )?;
    let fleet = namespace.run(|| Fleet::start(&tls))??;
    fleet.says(instance(2), Says::state("failing"));
    let running = busy_server(namespace, files.path(), fleet.port, &recursor.to_string())?;
    let prometheus = Prometheus::start(&running.namespace, &[("bosh-dns-xdp", METRICS_PORT)])?;
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let clients = scope.spawn(|| running.namespace.run(|| load(&running.server, &done)));
        let reloads = scope.spawn(|| {
            // Files that change, so that reloads have a duration.
            let mut version = 2;
            while !done.load(Ordering::Relaxed) {
                let records = fleet::records(version, (0..3).map(|number| (1, instance(number))));
                let file = running.folder().join("records.json");
                fs::write(file.with_extension("new"), records)?;
                fs::rename(file.with_extension("new"), &file)?;
                version += 1;
                thread::sleep(Duration::from_secs(1));
            }
            Ok::<_, anyhow::Error>(())
        });
        let waited = wait_for_panels(&prometheus, "bosh-dns-xdp.json");
        done.store(true, Ordering::Relaxed);
        clients.join().expect("clients do not panic")??;
        reloads.join().expect("reloads do not panic")?;
        waited
    })
    .with_context(|| running.server.log())?;
    prometheus.stop()
}

/// Port of a companion's metrics.
const COMPANION_PORT: u16 = 7979;

/// Starts a program in a namespace, with its output in the file `log` of `folder`.
fn spawn(
    namespace: &Namespace,
    folder: &Path,
    program: &str,
    arguments: &[&str],
    log: &str,
) -> Result<Kept> {
    let log = fs::File::create(folder.join(log))?;
    let path = match program.starts_with("bosh-dns-") {
        true => server::companion(program)?,
        false => program.into(),
    };
    let mut command = namespace.command(path)?;
    command
        .args(arguments)
        .current_dir(folder)
        .stdin(Stdio::null());
    Kept::spawn(command.stdout(log.try_clone()?).stderr(log))
}

#[test]
fn busy_publisher_fills_every_panel() -> Result<()> {
    requires!(namespaces, prometheus);
    let documents = "
apiVersion: bosh-dns-publish/v1
kind: DNSUpdateRecord
metadata: {name: etcd}
spec: {provider: coredns, external-dns-parameters: {interval: 1s}}
---
apiVersion: bosh-dns-publish/v1
kind: FleetName
metadata: {name: cf, labels: {dnsprovider: etcd}}
spec: {names: [{name: router.example.org, query: q-s0.q-g1.bosh, ttl: 60, hold: 1s}]}
";
    let namespace = Namespace::new("p-panels")?;
    let folder = server::folder(crate::running::RECORDS.as_bytes(), None)?;
    let settings = json!({"control": {"socket": folder.path().join("control.sock")}});
    let running = Running::start_with(namespace, folder, &settings)?;
    let folder = running.folder();
    let publisher = format!(
        "documents: [documents]\nserver: config.json\nmetrics: {{address: '127.0.0.1:{COMPANION_PORT}'}}\n\
         provider_settings: {{default/etcd: {{etcd-urls: 'http://127.0.0.1:2379'}}}}\n"
    );
    fs::create_dir(folder.join("documents"))?;
    fs::write(folder.join("documents/cf.yml"), documents)?;
    fs::write(folder.join("publish.yml"), publisher)?;
    let urls = ["http://127.0.0.1:2379", "http://127.0.0.1:2380"];
    let cluster = format!("default={}", urls[1]);
    let options = [
        "--data-dir",
        "etcd",
        "--unsafe-no-fsync",
        "--listen-client-urls",
        urls[0],
        "--advertise-client-urls",
        urls[0],
        "--listen-peer-urls",
        urls[1],
        "--initial-advertise-peer-urls",
        urls[1],
        "--initial-cluster",
        &cluster,
    ];
    let _etcd = spawn(&running.namespace, folder, "etcd", &options, "etcd.log")?;
    let options = ["run", "--config", "publish.yml"];
    let _publisher = spawn(
        &running.namespace,
        folder,
        "bosh-dns-publish",
        &options,
        "publish.log",
    )?;
    let prometheus =
        Prometheus::start(&running.namespace, &[("bosh-dns-publish", COMPANION_PORT)])?;
    wait_for_panels(&prometheus, "bosh-dns-publish.json")
        .with_context(|| fs::read_to_string(folder.join("publish.log")).unwrap_or_default())?;
    prometheus.stop()
}

#[test]
fn busy_distribution_fills_every_panel() -> Result<()> {
    requires!(namespaces, prometheus);
    const AGENT_PORT: u16 = 7980;
    let (namespace, folder) = (Namespace::new("d-panels")?, tempfile::tempdir()?);
    let folder = folder.path();
    write_director_files(folder)?;
    fs::create_dir(folder.join("blobs"))?;
    let inventory = |version: u8| -> Result<()> {
        let instance = json!({"id": "i0", "agent_id": "a0", "networks": {"default": format!("10.0.0.{version}")}});
        let groups = json!([{"name": "web", "instances": [instance]}]);
        let text = json!({"deployments": [{"name": "dep", "instance_groups": groups}]}).to_string();
        fs::write(folder.join("inventory.new"), text)?;
        Ok(fs::rename(
            folder.join("inventory.new"),
            folder.join("inventory.json"),
        )?)
    };
    inventory(1)?;
    let tls = |name: &str| {
        let (certificate, key) = (format!("{name}.crt"), format!("{name}.key"));
        [
            "--tls-ca",
            "ca.crt",
            "--tls-certificate",
            &certificate,
            "--tls-key",
            &key,
        ]
        .map(str::to_owned)
    };
    let words = |fixed: &str, tls: [String; 6]| -> Vec<String> {
        fixed.split(' ').map(str::to_owned).chain(tls).collect()
    };
    let start = |program: &str, words: &[String], log: &str| {
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        spawn(&namespace, folder, program, &words, log)
    };
    let nats = "nats-config --listen 127.0.0.1:4222 --inventory inventory.json --output nats.conf";
    let mut command = namespace.command(server::companion("bosh-dns-sync")?)?;
    run(command.args(words(nats, tls("nats"))).current_dir(folder))?;
    let _nats = spawn(
        &namespace,
        folder,
        "nats-server",
        &["-c", "nats.conf"],
        "nats.log",
    )?;
    let blobs = format!(
        "--nats tls://127.0.0.1:4222 --blobstore file://{}/blobs",
        folder.display()
    );
    let publisher = format!(
        "publish --watch --inventory inventory.json --state state {blobs} --metrics 127.0.0.1:{COMPANION_PORT}"
    );
    let agent = format!(
        "agent --id a0 {blobs} --records a0.json --ask-every 1 --metrics 127.0.0.1:{AGENT_PORT}"
    );
    let _publisher = start(
        "bosh-dns-sync",
        &words(&publisher, tls("director")),
        "publisher.log",
    )?;
    let _agent = start("bosh-dns-sync", &words(&agent, tls("a0")), "agent.log")?;
    let prometheus = Prometheus::start(
        &namespace,
        &[
            ("bosh-dns-sync", COMPANION_PORT),
            ("bosh-dns-sync-agent", AGENT_PORT),
        ],
    )?;
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let changes = scope.spawn(|| -> Result<()> {
            for version in (1..=250)
                .cycle()
                .take_while(|_| !done.load(Ordering::Relaxed))
            {
                inventory(version)?;
                thread::sleep(Duration::from_secs(1));
            }
            Ok(())
        });
        let waited = wait_for_panels(&prometheus, "bosh-dns-sync.json");
        done.store(true, Ordering::Relaxed);
        changes.join().expect("changes do not panic")?;
        waited
    })
    .with_context(|| {
        let logs = ["publisher.log", "agent.log", "nats.log"];
        logs.map(|log| fs::read_to_string(folder.join(log)).unwrap_or_default())
            .concat()
    })?;
    prometheus.stop()
}
