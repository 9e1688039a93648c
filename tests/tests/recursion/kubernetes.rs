//! The node-local cache of docs/kubernetes.md: the manifest's configuration on a node between a pod, kube-dns (a
//! scripted recursor) and the outside.

use std::{
    fs,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    path::Path,
    process::Command,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use dns_kit::metrics::names;
use hickory_proto::rr::RecordType;
use serde_json::{Value, json};
use whole_system_tests::{
    bpffs::Bpffs,
    client,
    metrics::wait_for_fast_path,
    pair::{self, Pair},
    process::{capture, wait_until},
    requirements,
    server::{self, Server},
};

use super::{interface_cache::hits, lab::Lab, scripted::Scripted};

/// The address in the manifest, which pods ask.
const NODE_LOCAL: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(169, 254, 20, 10)), 53);

/// A cluster's service, whose address the scripted kube-dns gives for 30 seconds, as CoreDNS does.
const SERVICE: &str = "web.shop.svc.cluster.local.";

/// Returns a file in the manifest's ConfigMap.
fn file_of_manifest(name: &str) -> Result<Value> {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/kubernetes/node-local-dns.yml");
    let script = "print YAML.load_stream(File.read(ARGV[0])).find { |part| part['kind'] == 'ConfigMap' }['data'][ARGV[1]]";
    let text = capture(Command::new("ruby").args(["-ryaml", "-e", script]).arg(&manifest).arg(name))?;
    serde_json::from_str(&text).with_context(|| format!("{}: {name}: {text}", manifest.display()))
}

#[test]
fn node_answers_hot_cluster_names() -> Result<()> {
    if !requirements::namespaces() || !requirements::bpf() {
        return Ok(());
    }
    let pair = Pair::joined("k8s", ("pod0", &["10.42.0.1/24"]), ("eth0", &["10.42.0.7/24"]))?;
    let node = &pair.server;
    node.forward()?;
    // The manifest creates a dummy interface; not every kernel that runs the tests has that driver.
    node.ip(&["address", "add", "169.254.20.10/32", "dev", "lo"])?;
    pair.client.ip(&["route", "add", "default", "via", "10.42.0.1"])?;
    // The cluster's service addresses belong to the node here; kube-proxy's rules are not the subject.
    for address in ["10.96.0.10/32", "10.0.0.2/32"] {
        node.ip(&["address", "add", address, "dev", "lo"])?;
    }
    let kube_dns = Scripted::start(node, (Ipv4Addr::new(10, 96, 0, 10), 53).into(), |asked| {
        vec![asked.answer(Ipv4Addr::new(10, 43, 7, 7), 30).into()]
    })?;
    let outside = Scripted::start(node, (Ipv4Addr::new(10, 0, 0, 2), 53).into(), |asked| {
        vec![asked.answer(Ipv4Addr::new(192, 0, 2, 80), 300).into()]
    })?;

    let bpffs = Bpffs::new()?;
    let mut config = file_of_manifest("config.json")?;
    let listens = format!("{}:{}", config["address"].as_str().unwrap_or_default(), config["port"]);
    ensure!(listens == NODE_LOCAL.to_string(), "{listens}");
    ensure!(config["cache"]["enabled"] == true, "the manifest switches the cache on: {config}");
    ensure!(config["recursors"] == json!(["10.0.0.2"]), "the scripted recursor's address: {config}");
    // Paths and ports are the test's; everything else is the manifest's.
    for path in ["address", "port", "records_file", "alias_files_glob", "handlers_files_glob"] {
        config.as_object_mut().context("an object")?.remove(path);
    }
    config["disable_recursors"] = json!(false);
    config["control"] = json!({"socket": bpffs.path().with_extension("sock")});
    config["xdp"]["bpffs"] = json!(bpffs.path());
    let folder = server::folder(file_of_manifest("records.json")?.to_string().as_bytes(), None)?;
    let handlers = file_of_manifest("handlers.json")?;
    fs::write(folder.path().join("handlers/handlers.json"), handlers.to_string())?;
    let server = Server::start(Some(node), folder, NODE_LOCAL, &config)?;
    let lab = Lab { server, namespace: node, bpffs: Some(bpffs) };
    wait_for_fast_path(node).with_context(|| lab.server.log())?;

    for (name, address) in
        [(SERVICE, Ipv4Addr::new(10, 43, 7, 7)), ("www.outside.test.", Ipv4Addr::new(192, 0, 2, 80))]
    {
        let before = hits(&lab)?;
        wait_until("the node's interface to answer", Duration::from_secs(30), || {
            let reply =
                pair::ask(&pair.client, NODE_LOCAL, name, RecordType::A, Some(1232), Duration::from_secs(5));
            let addresses = reply.ok().flatten().map(|reply| client::addresses(&reply));
            assert_eq!(addresses, Some(vec![address.into()]), "{name}");
            hits(&lab).is_ok_and(|now| now > before)
        })
        .with_context(|| format!("{name}\n{}", lab.server.log()))?;
    }
    ensure!(lab.metric(names::FAST_PATH_PACKETS_TOTAL, "outcome=\"hit_forwarded\"")? >= 2);
    drop((kube_dns, outside));
    Ok(())
}
