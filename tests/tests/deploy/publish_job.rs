//! The job `bosh-dns-publish`: rendered as a director does, and run on an isolated machine with a real BIND.

use std::{fs, path::Path, time::Duration};

use dns_publish::config::Config;
use serde_json::{Value, json};
use whole_system_tests::{process::wait_until, requires};

use crate::{
    job::{self, Files},
    machine::Machine,
};

const JOB: &str = "bosh-dns-publish";

/// Time limit that is reached only on failure.
const TIMEOUT: Duration = Duration::from_secs(120);

const SECRET: &str = "c2VjcmV0IG9mIHRoZSB0dXRvcmlhbCwgMzIgb2N0ZXRzIQ==";

/// Documents of a record for BIND on port 5300, and of names with this address.
fn documents(names: &[&str], address: &str) -> Value {
    let parameters = json!({
        "rfc2136-host": "127.0.0.1:5300", "rfc2136-zone": "example.org", "rfc2136-tsig-keyname": "publisher",
        "rfc2136-tsig-secret": SECRET, "rfc2136-tsig-secret-alg": "hmac-sha256", "txt-owner-id": "job",
        "interval": "1s",
    });
    let spec = json!({"provider": "rfc2136", "external-dns-parameters": parameters});
    let mut all = vec![json!({
        "apiVersion": "bosh-dns-publish/v1", "kind": "DNSUpdateRecord", "metadata": {"name": "bind"}, "spec": spec,
    })];
    if !names.is_empty() {
        let endpoint = |name: &&str| json!({"dnsName": name, "recordType": "A", "recordTTL": 60, "targets": [address]});
        let endpoints: Vec<Value> = names.iter().map(endpoint).collect();
        all.push(json!({
            "apiVersion": "externaldns.k8s.io/v1alpha1", "kind": "DNSEndpoint",
            "metadata": {"name": "web", "labels": {"dnsprovider": "bind"}}, "spec": {"endpoints": endpoints},
        }));
    }
    all.into()
}

#[test]
fn publish_properties_become_configuration() {
    let tls = json!({"ca": "CA", "certificate": "CERT", "private_key": "KEY"});
    let jobs = [
        json!({}),
        json!({
            "use_bpm": true, "documents": documents(&["a.example.org"], "192.0.2.1"),
            "documents_paths": ["/var/vcap/store/names"], "managed_record_types": ["A", "TXT"],
            "provider_settings": {"default/bind": {"min-ttl": "60s", "create-ptr": true}},
            "server_config_file": "/var/vcap/jobs/bosh-dns/config/config.json", "txt_encryption_key": "KEY OF TXT",
            "state_folder": "/var/vcap/store/p", "metrics": {"enabled": true, "port": 9100},
            "api": {"address": "0.0.0.0:8443", "tls": tls, "clients": ["operator"]},
        }),
    ];
    let files: Vec<Files> = job::render_properties(JOB, &jobs)
        .into_iter()
        .map(Result::unwrap)
        .collect();
    let folder = tempfile::tempdir().unwrap();
    let configs: Vec<Config> = (0..2)
        .map(|index| {
            let path = folder.path().join(format!("{index}.json"));
            fs::write(&path, &files[index]["config/publish.json"]).unwrap();
            Config::load(&path).unwrap()
        })
        .collect();
    let data = Path::new("/var/vcap/data/bosh-dns-publish");
    assert_eq!(configs[0].documents, [data.join("documents")]);
    assert_eq!(
        configs[0].store,
        Path::new("/var/vcap/store/bosh-dns-publish/store")
    );
    assert!(
        configs[0].server.is_none() && configs[0].api.is_none() && configs[0].metrics.is_none()
    );
    let Config {
        documents,
        server,
        store,
        socket,
        api,
        metrics,
        managed,
        txt_encryption_key,
        ..
    } = &configs[1];
    assert_eq!(documents[1], Path::new("/var/vcap/store/names"));
    assert_eq!(
        server.as_deref(),
        Some(Path::new("/var/vcap/jobs/bosh-dns/config/config.json"))
    );
    assert_eq!(
        (store.as_path(), socket),
        (
            Path::new("/var/vcap/store/p/store"),
            &data.join("control.sock")
        )
    );
    assert_eq!(
        api.as_ref().unwrap().clients,
        Some(vec!["operator".to_owned()])
    );
    assert_eq!(
        (metrics.unwrap().to_string(), managed.len()),
        ("127.0.0.1:9100".to_owned(), 2)
    );
    assert!(
        txt_encryption_key
            .as_ref()
            .unwrap()
            .ends_with("config/txt_encryption_key")
    );
    assert_eq!(
        configs[1].provider_settings["default/bind"]["create-ptr"],
        "true"
    );
    assert_eq!(files[1]["config/txt_encryption_key"].trim(), "KEY OF TXT");
    assert_eq!(files[1]["config/certs/api.key"].trim(), "KEY");
    assert!(
        files[0]["monit"].contains("bosh_dns_publish_ctl start")
            && files[1]["monit"].contains("bpm start")
    );
    for path in [
        "\"/var/vcap/store/p\"",
        "\"/var/vcap/store/names\"",
        "\"/var/vcap/data/bosh-dns-xdp/control\"",
    ] {
        assert!(files[1]["config/bpm.yml"].contains(path), "{path}");
    }
    assert!(!files[0]["config/bpm.yml"].contains("unrestricted_volumes"));
}

#[test]
fn publish_mistakes_are_named() {
    let rows = [
        (
            json!({"documents": {"kind": "DNSEndpoint"}}),
            "expected a list of documents",
        ),
        (
            json!({"documents": [{"metadata": {"name": "x"}}]}),
            "documents[0] has no kind",
        ),
        (json!({"api": {"address": "0.0.0.0:8443"}}), "api.tls.ca"),
    ];
    job::assert_refused(JOB, &rows);
}

#[test]
fn publish_scripts_pass_shellcheck() {
    let jobs = [json!({}), json!({"documents": documents(&[], "")})];
    let files = job::render_properties(JOB, &jobs);
    let files: Vec<&Files> = files.iter().map(|files| files.as_ref().unwrap()).collect();
    let scripts = files.iter().flat_map(|files| files.keys());
    assert_eq!(scripts.filter(|path| path.starts_with("bin/")).count(), 4);
    job::assert_shellcheck_passes(files, Vec::new());
}

#[test]
fn publish_job_follows_deployments() {
    requires!(namespaces);
    let machine = Machine::new().unwrap();
    let data = machine.vcap().join("data");
    let named = data.join("named");
    fs::create_dir(&named).unwrap();
    let key = format!("key publisher {{ algorithm hmac-sha256; secret \"{SECRET}\"; }};");
    let options = "options { directory \".\"; listen-on port 5300 { 127.0.0.1; }; listen-on-v6 { none; }; recursion no; \
                   pid-file none; session-keyfile none; }; controls { };";
    let zone = "zone example.org { type primary; file \"zone\"; allow-transfer { key publisher; }; \
                update-policy { grant publisher zonesub ANY; }; };";
    fs::write(
        named.join("named.conf"),
        format!("{key}\n{options}\n{zone}\n"),
    )
    .unwrap();
    let text = "$TTL 60\n@ SOA ns.example.org. admin.example.org. 1 3600 600 86400 60\n@ NS ns.example.org.\nns A 127.0.0.1\n";
    fs::write(named.join("zone"), text).unwrap();
    let _server = machine
        .spawn("env --chdir=named named -g -c named.conf", "named.log")
        .unwrap();

    let start = |documents: Value| {
        let properties = json!({"documents": documents, "metrics": {"enabled": true}});
        machine.deploy_job(JOB, properties).unwrap();
        machine.control(JOB, "start").unwrap();
    };
    let stop = || machine.control(JOB, "stop").unwrap();
    let logs = || {
        let run = "cat /var/vcap/sys/log/bosh-dns-publish/* /var/vcap/data/named.log";
        machine.run(run).unwrap_or_else(|error| error.to_string())
    };
    let addresses = |name: &str| {
        let dig = format!("dig @127.0.0.1 -p 5300 +short +tries=1 +time=5 {name}");
        machine
            .run(&dig)
            .map(|said| said.trim().to_owned())
            .unwrap_or_default()
    };
    let wait = |event: &str, is_so: &dyn Fn() -> bool| {
        wait_until(event, TIMEOUT, is_so).unwrap_or_else(|error| panic!("{error}: {}", logs()));
    };
    let command = |words: &str| machine.run(&format!("/var/vcap/jobs/{JOB}/bin/{JOB} {words}"));

    start(documents(&["a.example.org", "b.example.org"], "192.0.2.1"));
    wait("the names", &|| {
        addresses("a.example.org") == "192.0.2.1" && addresses("b.example.org") == "192.0.2.1"
    });
    wait("the status", &|| {
        command("status").is_ok_and(|said| said.contains("published, 2 record sets wanted"))
    });
    let pid = machine.pid(JOB).unwrap();
    let metrics = machine.metrics(7979).unwrap();
    assert!(metrics.contains("external_dns_registry_records{provider=\"default/bind\"} 2"));
    assert!(
        data.join("bosh-dns-publish/documents/job.json.status")
            .is_file()
    );

    // An update as performed by monit.
    stop();
    assert!(!Path::new(&format!("/proc/{pid}")).exists() && !machine.pid_file(JOB).exists());
    start(documents(&["a.example.org", "b.example.org"], "192.0.2.2"));
    wait("the new address", &|| {
        addresses("a.example.org") == "192.0.2.2" && addresses("b.example.org") == "192.0.2.2"
    });
    stop();
    // A deployment without names: the deletion of everything waits for a confirmation.
    start(documents(&[], ""));
    wait("the guard", &|| {
        // Exit code 1: something is not published.
        command("status || true").is_ok_and(|said| said.contains("--confirm-deletions 2"))
    });
    assert_eq!(addresses("a.example.org"), "192.0.2.2");
    assert!(
        command("apply --confirm-deletions 2")
            .unwrap()
            .contains("2 names changed")
    );
    wait("the deletion", &|| {
        addresses("a.example.org").is_empty() && addresses("b.example.org").is_empty()
    });
    stop();
    stop();
    // Without documents nothing is left to publish from.
    start(json!([]));
    wait("the start", &|| {
        command("status").is_ok_and(|said| said.contains("no documents"))
    });
    assert!(!data.join("bosh-dns-publish/documents/job.json").exists());
    stop();
}
