use std::fs;

use super::*;
use crate::documents::Folder;

const PROVIDERS: &str = "
apiVersion: bosh-dns-publish/v1
kind: DNSUpdateRecord
metadata: {name: bind, namespace: shop}
spec: {provider: rfc2136}
---
apiVersion: bosh-dns-publish/v1
kind: DNSUpdateRecord
metadata: {name: etcd, namespace: shop}
spec: {provider: coredns, selector: 'tier in (edge)'}
---
";

fn published(text: &str) -> Publication {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("all.yml"), format!("{PROVIDERS}{text}")).unwrap();
    let scan = Folder::new(vec![folder.path().to_owned()]).scan();
    publish(&scan, &[], &|name| match name.internal.to_string().trim_end_matches('.') {
        "router.internal" => {
            Ok(vec![Record::parse(name.external.as_str(), RecordType::A, ["10.0.0.1"]).unwrap()])
        }
        _ => Err("matches no instance; correct the name".to_owned()),
    })
}

fn wishes(publication: &Publication, target: &str) -> Vec<String> {
    let records = &publication.targets[target].desired.records;
    records.iter().map(|record| format!("{record} of {}", record.labels.resource())).collect()
}

#[test]
fn labels_select_providers() {
    let publication = published(
        "apiVersion: externaldns.k8s.io/v1alpha1\nkind: DNSEndpoint\n\
         metadata: {name: one, namespace: shop, labels: {dnsprovider: bind, tier: edge}}\n\
         spec: {endpoints: [{dnsName: a.example.org, targets: [192.0.2.1]}]}\n---\n\
         apiVersion: externaldns.k8s.io/v1alpha1\nkind: DNSEndpoint\n\
         metadata: {name: two, namespace: other, labels: {dnsprovider: bind}}\n\
         spec: {endpoints: [{dnsName: b.example.org, targets: [192.0.2.2]}]}\n",
    );
    let wanted = ["a.example.org 0 A 192.0.2.1 of crd/shop/one"];
    assert_eq!(wishes(&publication, "shop/bind"), wanted);
    assert_eq!(wishes(&publication, "shop/etcd"), wanted);
    let problems: Vec<_> =
        publication.problems.iter().map(|(id, problems)| format!("{id}: {}", problems[0])).collect();
    assert_eq!(
        problems,
        ["DNSEndpoint other/two: no DNS Update Record of project other selects it; add the label \
          dnsprovider: NAME"]
    );
}

#[test]
fn unresolved_name_keeps_records() {
    let publication = published(
        "apiVersion: bosh-dns-publish/v1\nkind: FleetName\n\
         metadata: {name: f, namespace: shop, labels: {dnsprovider: bind}}\n\
         spec: {names: [{name: r.example.org, alias: router.internal}, {name: g.example.org, alias: gone.internal}]}\n",
    );
    assert_eq!(
        wishes(&publication, "shop/bind"),
        [
            "r.example.org 0 A 10.0.0.1 of fleet/shop/f",
            "g.example.org 0 A  of fleet/shop/f",
            "g.example.org 0 AAAA  of fleet/shop/f",
        ]
    );
    let problems: Vec<_> = publication.problems.into_values().flatten().collect();
    assert_eq!(
        problems,
        ["g.example.org: matches no instance; correct the name; its records stay unchanged"]
    );
}

#[test]
fn folder_wins_over_store() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("all.yml"), PROVIDERS).unwrap();
    let scan = Folder::new(vec![folder.path().to_owned()]).scan();
    let of_store = |name: &str| {
        let id = DocumentId { kind: Kind::UpdateRecord, namespace: "shop".to_owned(), name: name.to_owned() };
        let body = serde_json::json!({"metadata": {"name": name}, "spec": {"provider": "aws"}});
        Document::of_resource(&id, &body).unwrap()
    };
    let publication = publish(&scan, &[of_store("bind"), of_store("route53")], &|_| Ok(Vec::new()));
    let providers: Vec<_> = publication
        .targets
        .iter()
        .map(|(name, target)| format!("{name} {}", target.record.provider))
        .collect();
    assert_eq!(providers, ["shop/bind rfc2136", "shop/etcd coredns", "shop/route53 aws"]);
}
