//! The node-local cache of docs/kubernetes.md: the manifest's configuration on a node between a pod, kube-dns (a
//! scripted recursor) and the outside.

use std::{
    fs,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    os::unix::process::CommandExt as _,
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
    metrics::wait_for_metrics,
    pair::{self, Pair},
    process::{Kept, capture, wait_until},
    requires,
    server::{self, Server},
};

use super::{lab::Lab, scripted::Scripted};

/// The address in the manifest, which pods ask.
const NODE_LOCAL: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(169, 254, 20, 10)), 53);

/// A cluster's service, whose address the scripted kube-dns gives for 30 seconds, as CoreDNS does.
const SERVICE: &str = "web.shop.svc.cluster.local.";

/// Where the container of the manifest has its configuration.
const MOUNTED: &str = "/etc/bosh-dns-xdp";

const MANIFEST: &str = include_str!("../../../deploy/kubernetes/node-local-dns.yml");

/// The two documents of the manifest.
struct Manifest {
    /// Files of the ConfigMap.
    files: Value,
    /// Containers of the DaemonSet.
    server: Value,
    attacher: Value,
}

/// Numbers of the capabilities in the manifest (`include/uapi/linux/capability.h`).
const CAPABILITIES: [(&str, libc::c_ulong); 8] = [
    ("CHOWN", 0),
    ("SETGID", 6),
    ("SETUID", 7),
    ("SETPCAP", 8),
    ("NET_BIND_SERVICE", 10),
    ("NET_ADMIN", 12),
    ("PERFMON", 38),
    ("BPF", 39),
];

/// Runs a command as root with only the capabilities of a container, and without gaining others.
fn confine(command: &mut Command, container: &Value) -> Result<()> {
    let security = &container["securityContext"];
    ensure!(
        security["capabilities"]["drop"] == json!(["ALL"]),
        "{security}"
    );
    ensure!(
        security["allowPrivilegeEscalation"] == json!(false),
        "{security}"
    );
    ensure!(
        security["readOnlyRootFilesystem"] == json!(true),
        "{security}"
    );
    let mut kept = Vec::new();
    for name in security["capabilities"]["add"]
        .as_array()
        .context("added capabilities")?
    {
        let known = CAPABILITIES.iter().find(|(known, _)| name == known);
        kept.push(known.with_context(|| format!("{name} is unknown"))?.1);
    }
    let drop_others = move || {
        for capability in (0..64).filter(|number| !kept.contains(number)) {
            // SAFETY: takes numbers. Fails for those that the kernel does not have.
            unsafe { libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0) };
        }
        // SAFETY: takes numbers.
        match unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) } {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        }
    };
    // SAFETY: makes only system calls.
    unsafe { command.pre_exec(drop_others) };
    Ok(())
}

impl Manifest {
    fn read() -> Result<Self> {
        let path =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/kubernetes/node-local-dns.yml");
        let script = "print JSON.generate(YAML.load_stream(File.read(ARGV[0])))";
        let text = capture(
            Command::new("ruby")
                .args(["-EUTF-8", "-ryaml", "-rjson", "-e", script])
                .arg(&path),
        )?;
        let documents: Value = serde_json::from_str(&text)?;
        let pod = &documents[1]["spec"]["template"]["spec"];
        let container = |name: &str| {
            let mut containers = pod["containers"].as_array()?.iter();
            containers
                .find(|container| container["name"] == name)
                .cloned()
        };
        Ok(Self {
            files: documents[0]["data"].clone(),
            server: container("bosh-dns-xdp").context("the server's container")?,
            attacher: container("attacher").context("the attacher's container")?,
        })
    }

    /// Returns a file of the ConfigMap, mounted at `folder`.
    fn file(&self, name: &str, folder: &Path) -> Result<Value> {
        let text = self.files[name]
            .as_str()
            .with_context(|| format!("the ConfigMap has no {name}"))?;
        Ok(serde_json::from_str(
            &text.replace(MOUNTED, &folder.display().to_string()),
        )?)
    }
}

#[test]
fn node_answers_hot_cluster_names() -> Result<()> {
    requires!(namespaces, bpf);
    let manifest = Manifest::read()?;
    let pair = Pair::joined(
        "k8s",
        ("pod0", &["10.42.0.1/24"]),
        ("eth0", &["10.42.0.7/24"]),
    )?;
    let node = &pair.server;
    node.forward()?;
    // The manifest creates a dummy interface; not every kernel that runs the tests has that driver.
    node.ip("address add 169.254.20.10/32 dev lo")?;
    pair.client.ip("route add default via 10.42.0.1")?;
    // The cluster's service address belongs to the node here; kube-proxy's rules are not the subject.
    for address in ["10.96.0.10/32", "10.0.0.2/32"] {
        node.ip(&format!("address add {address} dev lo"))?;
    }
    let kube_dns = Scripted::start(node, (Ipv4Addr::new(10, 96, 0, 10), 53).into(), |asked| {
        vec![asked.answer(Ipv4Addr::new(10, 43, 7, 7), 30).into()]
    })?;
    let outside = Scripted::start(node, (Ipv4Addr::new(10, 0, 0, 2), 53).into(), |asked| {
        vec![asked.answer(Ipv4Addr::new(192, 0, 2, 80), 300).into()]
    })?;

    let bpffs = Bpffs::new()?;
    let folder = server::folder(b"", None)?;
    let handlers = manifest.file("handlers.json", folder.path())?;
    fs::write(folder.path().join("handlers.json"), handlers.to_string())?;
    let mut config = manifest.file("config.json", folder.path())?;
    let listens = format!(
        "{}:{}",
        config["address"].as_str().unwrap_or_default(),
        config["port"]
    );
    ensure!(listens == NODE_LOCAL.to_string(), "{listens}");
    ensure!(
        config["recursors"] == json!(["10.0.0.2"]),
        "the scripted recursor's address: {config}"
    );
    // Folders of this machine; and defaults where the test's configuration has something else.
    config["control"]["socket"] = json!(bpffs.path().with_extension("sock"));
    config["xdp"]["bpffs"] = json!(bpffs.path());
    config["xdp"]["attach_socket"] = json!(folder.path().join("attacher/attach.sock"));
    // Users of the image, as those of this machine.
    ensure!(
        config["xdp"]["user"] == "bosh-dns-xdp"
            && config["xdp"]["attach_user"] == "bosh-dns-xdp-attach"
    );
    config["xdp"]["user"] = json!("nobody");
    config["xdp"]["attach_user"] = json!("daemon");
    fs::set_permissions(
        folder.path(),
        std::os::unix::fs::PermissionsExt::from_mode(0o755),
    )?;
    config["xdp"]["interfaces"] = Value::Null;
    config["disable_recursors"] = json!(false);
    // Empty records would be a condition, whose alert pages somebody.
    ensure!(config["records_file"].is_null(), "{config}");
    config["records_file"] = json!("");
    let mut confined = Ok(());
    let server = Server::start_prepared(Some(node), folder, NODE_LOCAL, &config, |command| {
        confined = confine(command, &manifest.server);
    })?;
    confined?;
    let mut attach = node.command(server::program()?)?;
    attach
        .args(["attach", "--config"])
        .arg(server.folder.path().join("config.json"));
    confine(&mut attach, &manifest.attacher)?;
    let _attacher = Kept::spawn(&mut attach)?;
    let lab = Lab {
        server,
        namespace: node,
        bpffs: Some(bpffs),
    };
    wait_for_metrics(node).with_context(|| lab.server.log())?;

    for (name, address) in [
        (SERVICE, Ipv4Addr::new(10, 43, 7, 7)),
        ("www.outside.test.", Ipv4Addr::new(192, 0, 2, 80)),
    ] {
        let hits = || {
            lab.metric(
                names::FAST_PATH_INTERFACE_REPLIES_TOTAL,
                "interface=\"pod0\"",
            )
        };
        let before = hits()?;
        let mut replies = Vec::new();
        wait_until(
            "the pod's interface to answer",
            Duration::from_secs(120),
            || {
                let reply = pair::ask(
                    &pair.client,
                    NODE_LOCAL,
                    name,
                    RecordType::A,
                    Some(1232),
                    Duration::from_secs(5),
                );
                replies.push(reply.map(|reply| reply.map(|reply| client::addresses(&reply))));
                hits().is_ok_and(|now| now > before)
            },
        )
        .with_context(|| format!("{name}\n{}\n{:?}", lab.server.log(), lab.cli(&["status"])))?;
        for reply in replies {
            assert_eq!(reply?, Some(vec![address.into()]), "{name}");
        }
    }
    ensure!(lab.metric(names::FAST_PATH_PACKETS_TOTAL, "outcome=\"hit_forwarded\"")? >= 2);
    ensure!(!kube_dns.asked().is_empty() && !outside.asked().is_empty());
    let (code, status, _) = lab.cli(&["status"])?;
    ensure!(code == 0 && !status.contains("degraded"), "{status}");
    Ok(())
}

#[test]
fn manifest_starts_the_server() -> Result<()> {
    let Manifest {
        server, attacher, ..
    } = Manifest::read()?;
    let files = "{name: bpffs, mountPath: /sys/fs/bpf/bosh-dns-xdp}";
    ensure!(MANIFEST.matches("/sys/fs/bpf").count() == 3 && MANIFEST.contains(files));
    for container in [server, attacher] {
        understands(&container)?;
    }
    Ok(())
}

/// Metrics listen on 127.0.0.1, which no scrape from outside of the node reaches.
#[test]
fn manifest_announces_no_unreachable_metrics() -> Result<()> {
    let config = Manifest::read()?.file("config.json", Path::new(MOUNTED))?;
    let address = config["metrics"]["address"].as_str().unwrap_or("127.0.0.1");
    ensure!(
        address == "127.0.0.1" && !MANIFEST.contains("prometheus.io/"),
        "{config}"
    );
    Ok(())
}

/// Requires that the program understands a container's arguments, which name the mounted configuration.
fn understands(container: &Value) -> Result<()> {
    let arguments = container["args"]
        .as_array()
        .context("the container has arguments")?;
    let arguments: Vec<&str> = arguments.iter().filter_map(Value::as_str).collect();
    ensure!(
        arguments.last() == Some(&format!("{MOUNTED}/config.json").as_str()),
        "{arguments:?}"
    );
    let mounts = container["volumeMounts"]
        .as_array()
        .context("the container has mounts")?;
    ensure!(
        mounts.iter().any(|mount| mount["mountPath"] == MOUNTED),
        "{mounts:?}"
    );
    // Understood, but there is no such file: code 2 would say that the call is not understood.
    let output = Command::new(server::program()?)
        .args(&arguments[..arguments.len() - 1])
        .arg("/nonexistent/config.json")
        .output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(
        output.status.code() == Some(1) && said.contains("/nonexistent/config.json"),
        "{output:?}"
    );
    Ok(())
}
