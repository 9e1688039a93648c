//! Renders Kubernetes manifests: a Deployment of external-dns per DNS Update Record, and
//! `DNSEndpoint` resources that its label filter selects. Pure.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{anyhow, bail};
use serde_json::{Value, json};

use crate::{
    endpoint,
    provider::{Definition, Parameter, ParameterKind, Setting, elements},
    publication::{Publication, Target},
    record::Labels,
    update_record::{PROVIDER_LABEL, UpdateRecord},
    webhook::Endpoint,
};

pub(crate) const IMAGE: &str = "registry.k8s.io/external-dns/external-dns:v0.22.0";

/// Arguments that the publisher applies itself if external-dns only serves the provider.
const NOT_OF_WEBHOOK: [&str; 4] = ["policy", "registry", "txt-", "interval"];

/// Returns the command that makes external-dns serve a record's provider to the publisher.
pub(crate) fn webhook_command(record: &UpdateRecord) -> Vec<String> {
    let mut words = vec![
        "external-dns".to_owned(),
        "--webhook-server".to_owned(),
        format!("--provider={}", record.provider.name()),
    ];
    for (parameter, setting) in record.parameters.iter() {
        let is_of_process = NOT_OF_WEBHOOK
            .iter()
            .any(|start| parameter.name.starts_with(start));
        if parameter.without_effect.is_none() && !is_of_process {
            words.extend(arguments_of(
                record.provider.definition(),
                parameter,
                setting,
            ));
        }
    }
    words
}

/// Renders every provider. Returns YAML by file name.
pub(crate) fn manifests(
    publication: &Publication,
    image: &str,
) -> anyhow::Result<BTreeMap<String, String>> {
    let mut files = BTreeMap::new();
    let mut names = BTreeSet::new();
    for target in publication.targets.values() {
        let name = kubernetes_name(&[&target.id.namespace, &target.id.name]);
        let deployment = yaml(&deployment(target, image))?;
        let before = files.insert(format!("{name}-deployment.yaml"), deployment);
        if before.is_some() {
            bail!("two DNS Update Records have the Kubernetes name {name}; rename one of them");
        }
        let endpoints: Vec<String> = endpoints(target, &mut names)?
            .iter()
            .map(yaml)
            .collect::<anyhow::Result<_>>()?;
        if !endpoints.is_empty() {
            files.insert(format!("{name}-endpoints.yaml"), endpoints.join("---\n"));
        }
    }
    Ok(files)
}

fn deployment(target: &Target, image: &str) -> Value {
    let Target { id, record, .. } = target;
    let name = kubernetes_name(&["external-dns", &id.name]);
    let labels = json!({ "app.kubernetes.io/name": "external-dns", PROVIDER_LABEL: id.name });
    let mut arguments = vec![
        "--source=crd".to_owned(),
        format!("--crd-source-apiversion={}", endpoint::API_VERSION),
        "--crd-source-kind=DNSEndpoint".to_owned(),
        format!("--namespace={}", id.namespace),
        format!("--label-filter={PROVIDER_LABEL}={}", id.name),
        format!("--provider={}", record.provider.name()),
    ];
    let parameters = &record.parameters;
    // external-dns 0.22 requires it; the document has a default.
    if !parameters.iter().any(|(own, _)| own.name == "policy") {
        arguments.push("--policy=sync".to_owned());
    }
    let definition = record.provider.definition();
    for name in definition.switches {
        if !parameters.iter().any(|(own, _)| own.name == *name) {
            arguments.push(format!("--{name}"));
        }
    }
    let mut environment = Vec::new();
    for (parameter, setting) in record.parameters.iter() {
        if parameter.kind == ParameterKind::Secret {
            // external-dns also reads every flag from the environment, and a manifest must not contain a secret.
            environment.push(json!({
                "name": format!("EXTERNAL_DNS_{}", parameter.name.to_uppercase().replace('-', "_")),
                "valueFrom": { "secretKeyRef": { "name": name, "key": parameter.name } },
            }));
        } else {
            arguments.extend(arguments_of(definition, parameter, setting));
        }
    }
    let mut container = json!({ "name": "external-dns", "image": image, "args": arguments });
    if !environment.is_empty() {
        container["env"] = environment.into();
    }
    json!({
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": { "name": name, "namespace": id.namespace, "labels": labels },
        "spec": {
            // Two with the same owner would undo each other's changes: external-dns has no compare-and-set.
            "replicas": 1,
            "strategy": { "type": "Recreate" },
            "selector": { "matchLabels": labels },
            "template": {
                "metadata": { "labels": labels },
                "spec": { "serviceAccountName": "external-dns", "containers": [container] },
            },
        },
    })
}

/// Formats a parameter for external-dns's command line, whose syntax differs from the document's
/// for some parameters.
fn arguments_of(definition: &Definition, parameter: &Parameter, setting: &Setting) -> Vec<String> {
    let name = parameter.name;
    let Setting::Text(text) = setting else {
        // `--no-no-x` is no flag of external-dns.
        return match (name.strip_prefix("no-"), setting) {
            (Some(positive), Setting::Boolean(false)) => vec![format!("--{positive}")],
            _ => vec![setting.argument(name)],
        };
    };
    match parameter.kind {
        ParameterKind::List => {
            let parts = elements(text);
            parts.map(|part| format!("--{name}={part}")).collect()
        }
        ParameterKind::Switch | ParameterKind::SwitchOrBoolean => {
            // The document has texts in place of booleans here; these are the ones that mean no.
            let is_off = matches!(text.trim(), "" | "false" | "no" | "disabled");
            vec![Setting::Boolean(!is_off).argument(name)]
        }
        _ => (definition.arguments)(name, text).unwrap_or_else(|| vec![setting.argument(name)]),
    }
}

/// Returns the `DNSEndpoint` resources of a target, one per document. `names` are the ones of all targets.
fn endpoints(target: &Target, names: &mut BTreeSet<String>) -> anyhow::Result<Vec<Value>> {
    let mut resources = Vec::new();
    for (resource, mut records) in target.desired.by_resource() {
        // An entry that is kept unchanged here would be an empty set in external-dns, which
        // withdraws the name.
        records.retain(|record| !record.targets.is_empty());
        if records.is_empty() {
            continue;
        }
        let (kind, document) = resource.split_once('/').unwrap_or(("", resource));
        // The namespace is that of the manifest.
        let document = document.rsplit('/').next().unwrap_or(document);
        let name = match kind {
            "crd" => kubernetes_name(&[document, &target.id.name]),
            _ => kubernetes_name(&[kind, document, &target.id.name]),
        };
        // Of two resources Kubernetes would keep one, and external-dns would delete the names of the other.
        if !names.insert(format!("{}/{name}", target.id.namespace)) {
            bail!("two documents have the Kubernetes name {name}; rename one of them");
        }
        let mut entries = Vec::new();
        for record in records {
            let mut record = record.clone();
            // external-dns sets the resource itself.
            record.labels.0.remove(Labels::RESOURCE);
            // Texts have no quotes here.
            let targets = record.targets.iter().map(ToString::to_string).collect();
            entries.push(Endpoint {
                targets,
                ..Endpoint::of(&record)
            });
        }
        resources.push(json!({
            "apiVersion": endpoint::API_VERSION,
            "kind": "DNSEndpoint",
            "metadata": {
                "name": name,
                "namespace": target.id.namespace,
                "labels": { PROVIDER_LABEL: target.id.name },
            },
            "spec": { "endpoints": entries },
        }));
    }
    Ok(resources)
}

/// Joins words to a valid Kubernetes name (RFC 1123, up to 63 octets).
fn kubernetes_name(words: &[&str]) -> String {
    let name = words.join("-").to_ascii_lowercase();
    let mut name = name.replace(|letter: char| !letter.is_ascii_alphanumeric(), "-");
    // Before the dashes at the end are trimmed, because the cut may leave one there.
    name.truncate(63);
    name.trim_matches('-').to_owned()
}

/// Formats a value as YAML. All text is quoted: Kubernetes reads YAML 1.1, in which `no` is a boolean.
fn yaml(value: &Value) -> anyhow::Result<String> {
    serde_saphyr::to_string_with_options(value, serde_saphyr::ser_options! { quote_all: true })
        .map_err(|error| anyhow!("a manifest cannot be written: {error}"))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::provider::ProviderKind;
    use crate::{documents::Folder, publication::publish};

    const DOCUMENTS: &str = "
apiVersion: bosh-dns-publish/v1
kind: DNSUpdateRecord
metadata: {name: Corp_BIND, namespace: shop}
spec:
  provider: rfc2136
  external-dns-parameters:
    rfc2136-host: ns.example.org:5353
    rfc2136-zone: example.org, example.net
    rfc2136-tsig-keyname: key
    rfc2136-tsig-secret: c2VjcmV0
    rfc2136-tsig-axfr: axfr
    policy: upsert-only
    compatibility: mate
    dry-run: false
---
apiVersion: externaldns.k8s.io/v1alpha1
kind: DNSEndpoint
metadata: {name: abc, namespace: shop, labels: {dnsprovider: Corp_BIND}}
spec: {endpoints: [{dnsName: abc.example.org, recordTTL: 180, recordType: A, targets: [1.2.3.4, 5.6.7.8]}]}
";

    #[test]
    fn manifests_carry_parameters() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("a.yml"), DOCUMENTS).unwrap();
        let scan = Folder::new(vec![folder.path().to_owned()]).scan();
        assert_eq!(scan.problems().count(), 0);
        let files = manifests(&publish(&scan, &|_| Ok(Vec::new())), "image:1").unwrap();
        assert_eq!(
            files.keys().collect::<Vec<_>>(),
            [
                "shop-corp-bind-deployment.yaml",
                "shop-corp-bind-endpoints.yaml"
            ]
        );
        let deployment = &files["shop-corp-bind-deployment.yaml"];
        let read: Value = serde_saphyr::from_str(deployment).unwrap();
        assert_eq!(read["metadata"]["labels"]["dnsprovider"], "Corp_BIND");
        let container = &read["spec"]["template"]["spec"]["containers"][0];
        let arguments: Vec<_> = container["args"]
            .as_array()
            .unwrap()
            .iter()
            .map(|text| text.as_str().unwrap())
            .collect();
        assert_eq!(
            arguments,
            [
                "--source=crd",
                "--crd-source-apiversion=externaldns.k8s.io/v1alpha1",
                "--crd-source-kind=DNSEndpoint",
                "--namespace=shop",
                "--label-filter=dnsprovider=Corp_BIND",
                "--provider=rfc2136",
                "--compatibility=mate",
                "--no-dry-run",
                "--policy=upsert-only",
                "--rfc2136-host=ns.example.org",
                "--rfc2136-port=5353",
                "--rfc2136-tsig-axfr",
                "--rfc2136-tsig-keyname=key",
                "--rfc2136-zone=example.org",
                "--rfc2136-zone=example.net",
            ]
        );
        assert!(!deployment.contains("c2VjcmV0"), "{deployment}");
        assert_eq!(
            container["env"][0]["valueFrom"]["secretKeyRef"]["name"],
            "external-dns-corp-bind"
        );
        let endpoint: Value =
            serde_saphyr::from_str(&files["shop-corp-bind-endpoints.yaml"]).unwrap();
        assert_eq!(endpoint["metadata"]["labels"]["dnsprovider"], "Corp_BIND");
        assert_eq!(
            endpoint["spec"]["endpoints"][0],
            json!({"dnsName": "abc.example.org", "recordTTL": 180, "recordType": "A", "targets": ["1.2.3.4", "5.6.7.8"]})
        );
    }

    #[test]
    fn targets_of_texts_have_no_quotes() {
        let folder = tempfile::tempdir().unwrap();
        let text = "recordType: TXT, targets: ['\"a b\"']";
        let documents = DOCUMENTS.replace("recordType: A, targets: [1.2.3.4, 5.6.7.8]", text);
        fs::write(folder.path().join("a.yml"), documents).unwrap();
        let scan = Folder::new(vec![folder.path().to_owned()]).scan();
        let files = manifests(&publish(&scan, &|_| Ok(Vec::new())), "image:1").unwrap();
        let endpoints = &files["shop-corp-bind-endpoints.yaml"];
        let read: Value = serde_saphyr::from_str(endpoints).unwrap();
        assert_eq!(read["spec"]["endpoints"][0]["targets"], json!(["a b"]));
    }

    #[test]
    fn ambiguous_text_is_quoted() {
        for text in ["true", "No", "12", "a: b", "", "#x", "-x", "1.2.3.4", "*"] {
            let read: Value =
                serde_saphyr::from_str(&yaml(&json!({ "m": text })).unwrap()).unwrap();
            assert_eq!(read["m"], text);
        }
    }

    #[test]
    fn negated_switch_turns_positive() {
        let rendered = |name, setting: &Setting| {
            let parameter = Parameter::named(name).unwrap();
            arguments_of(ProviderKind::Rfc2136.definition(), parameter, setting)
        };
        let arguments = |name, value| rendered(name, &Setting::Boolean(value));
        assert_eq!(
            arguments("no-aws-evaluate-target-health", true),
            ["--no-aws-evaluate-target-health"]
        );
        assert_eq!(
            arguments("no-aws-evaluate-target-health", false),
            ["--aws-evaluate-target-health"]
        );
        assert_eq!(arguments("once", false), ["--no-once"]);
        let host = rendered(
            "rfc2136-host",
            &Setting::Text("tls://ns.example.org:853".to_owned()),
        );
        assert_eq!(
            host,
            [
                "--rfc2136-host=ns.example.org",
                "--rfc2136-port=853",
                "--rfc2136-use-tls"
            ]
        );
    }

    #[test]
    fn names_are_valid_in_kubernetes() {
        for (words, expected) in [
            (&["shop", "Corp_BIND"][..], "shop-corp-bind"),
            (&["external-dns", "a.b"], "external-dns-a-b"),
            (&["", "-a-"], "a"),
            (&[&"x".repeat(64)], &"x".repeat(63)),
            // The cut leaves a dash at the end.
            (&[&"x".repeat(62), "y"], &"x".repeat(62)),
        ] {
            assert_eq!(kubernetes_name(words), expected);
        }
    }

    #[test]
    fn settings_become_flags() {
        let rendered = |name, setting: Setting| {
            let parameter = Parameter::named(name).unwrap();
            arguments_of(ProviderKind::Aws.definition(), parameter, &setting)
        };
        let text = |name, text: &str| rendered(name, Setting::Text(text.to_owned()));
        assert_eq!(
            text("domain-filter", "a, b,,"),
            ["--domain-filter=a", "--domain-filter=b"]
        );
        assert_eq!(text("domain-filter", " "), [] as [&str; 0]);
        assert_eq!(text("txt-owner-id", "me"), ["--txt-owner-id=me"]);
        assert_eq!(
            rendered("aws-api-retries", Setting::Integer(3)),
            ["--aws-api-retries=3"]
        );
        assert_eq!(rendered("dry-run", Setting::Boolean(true)), ["--dry-run"]);
        for (value, expected) in [
            ("", "--no-publish-host-ip"),
            (" false ", "--no-publish-host-ip"),
            ("no", "--no-publish-host-ip"),
            ("disabled", "--no-publish-host-ip"),
            ("true", "--publish-host-ip"),
            ("x", "--publish-host-ip"),
        ] {
            assert_eq!(text("publish-host-ip", value), [expected], "{value}");
        }
        assert_eq!(text("rfc2136-tsig-axfr", "axfr"), ["--rfc2136-tsig-axfr"]);
    }

    fn rendered(documents: &str) -> BTreeMap<String, Value> {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("a.yml"), documents).unwrap();
        let scan = Folder::new(vec![folder.path().to_owned()]).scan();
        assert_eq!(scan.problems().count(), 0);
        let files = manifests(&publish(&scan, &|_| Ok(Vec::new())), "image:1").unwrap();
        let parse = |text: &String| {
            let documents = text
                .split("---\n")
                .map(|one| serde_saphyr::from_str(one).unwrap());
            Value::Array(documents.collect())
        };
        files
            .iter()
            .map(|(name, text)| (name.clone(), parse(text)))
            .collect()
    }

    #[test]
    fn a_deployment_is_complete() {
        let record = "apiVersion: bosh-dns-publish/v1\nkind: DNSUpdateRecord\nmetadata: {name: etcd, namespace: shop}\n\
                      spec: {provider: coredns}\n";
        let files = rendered(record);
        assert_eq!(files.len(), 1, "no endpoints");
        let labels = json!({"app.kubernetes.io/name": "external-dns", "dnsprovider": "etcd"});
        let arguments = json!([
            "--source=crd",
            "--crd-source-apiversion=externaldns.k8s.io/v1alpha1",
            "--crd-source-kind=DNSEndpoint",
            "--namespace=shop",
            "--label-filter=dnsprovider=etcd",
            "--provider=coredns",
            "--policy=sync",
        ]);
        assert_eq!(
            files["shop-etcd-deployment.yaml"][0],
            json!({
                "apiVersion": "apps/v1",
                "kind": "Deployment",
                "metadata": {"name": "external-dns-etcd", "namespace": "shop", "labels": labels},
                "spec": {
                    "replicas": 1,
                    "strategy": {"type": "Recreate"},
                    "selector": {"matchLabels": labels},
                    "template": {
                        "metadata": {"labels": labels},
                        "spec": {
                            "serviceAccountName": "external-dns",
                            "containers": [{"name": "external-dns", "image": "image:1", "args": arguments}],
                        },
                    },
                },
            })
        );
        // A zone must be listed, or external-dns deletes nothing.
        let bind = DOCUMENTS.replace("    rfc2136-tsig-axfr: axfr\n", "");
        let files = rendered(&bind);
        let container = &files["shop-corp-bind-deployment.yaml"][0]["spec"]["template"]["spec"]["containers"]
            [0];
        let arguments = container["args"].as_array().unwrap();
        assert_eq!(
            arguments
                .iter()
                .filter(|text| **text == "--rfc2136-tsig-axfr")
                .count(),
            1
        );
        assert_eq!(
            container["env"],
            json!([{
                "name": "EXTERNAL_DNS_RFC2136_TSIG_SECRET",
                "valueFrom": {"secretKeyRef": {"name": "external-dns-corp-bind", "key": "rfc2136-tsig-secret"}},
            }])
        );
    }

    #[test]
    fn lossy_names_are_refused() {
        let error = |documents: &str| {
            let folder = tempfile::tempdir().unwrap();
            fs::write(folder.path().join("a.yml"), documents).unwrap();
            let scan = Folder::new(vec![folder.path().to_owned()]).scan();
            assert_eq!(scan.problems().count(), 0);
            let rendered = manifests(&publish(&scan, &|_| Ok(Vec::new())), "image:1");
            rendered.unwrap_err().to_string()
        };
        let (record, endpoint) = DOCUMENTS.split_once("---").unwrap();
        assert_eq!(
            error(&format!(
                "{DOCUMENTS}---{}",
                record.replace("Corp_BIND", "corp.bind")
            )),
            "two DNS Update Records have the Kubernetes name shop-corp-bind; rename one of them"
        );
        let named = |name: &str| endpoint.replace("name: abc", &format!("name: {name}"));
        assert_eq!(
            error(&format!("{record}---{}---{}", named("a.b"), named("a-b"))),
            "two documents have the Kubernetes name a-b-corp-bind; rename one of them"
        );
    }

    #[test]
    fn documents_become_resources() {
        let more = "---
apiVersion: externaldns.k8s.io/v1alpha1
kind: DNSEndpoint
metadata: {name: def, namespace: shop, labels: {dnsprovider: Corp_BIND}}
spec: {endpoints: [{dnsName: d.example.org, targets: [192.0.2.1]}, {dnsName: e.example.org, targets: []}]}
";
        let files = rendered(&format!("{DOCUMENTS}{more}"));
        let endpoints = &files["shop-corp-bind-endpoints.yaml"];
        let resource = |name: &str, entries: Value| {
            json!({
                "apiVersion": "externaldns.k8s.io/v1alpha1",
                "kind": "DNSEndpoint",
                "metadata": {"name": name, "namespace": "shop", "labels": {"dnsprovider": "Corp_BIND"}},
                "spec": {"endpoints": entries},
            })
        };
        assert_eq!(
            *endpoints,
            json!([
                resource(
                    "abc-corp-bind",
                    json!([{"dnsName": "abc.example.org", "recordTTL": 180, "recordType": "A",
                            "targets": ["1.2.3.4", "5.6.7.8"]}])
                ),
                resource(
                    "def-corp-bind",
                    json!([{"dnsName": "d.example.org", "recordType": "A", "targets": ["192.0.2.1"]}])
                ),
            ])
        );
    }
}
