//! Computes the wanted records of each provider from documents and resources. Pure.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use crate::{
    documents::{Content, Document, DocumentId, Kind, Scan},
    fleet::{FleetName, FleetNames, FleetQuery, ResolveError},
    plan::Desired,
    record::{Labels, Name, Record, RecordType, TargetSets},
    update_record::{PROVIDER_LABEL, UpdateRecord},
};

/// A provider with all records wanted there.
#[derive(Clone, Debug, PartialEq)]
pub struct Target {
    pub id: DocumentId,
    pub record: UpdateRecord,
    pub desired: Desired,
    /// Entries that wait for the provider's default targets.
    pub untargeted: Vec<(DocumentId, Record)>,
    /// Documents that want each name.
    pub origins: BTreeMap<Name, BTreeSet<DocumentId>>,
    pub counts: BTreeMap<DocumentId, usize>,
    /// Reason why another DNS Update Record forbids to publish there.
    pub rival: Option<String>,
}

#[derive(Clone, Debug, Default)]
pub struct Publication {
    /// Providers, by `PROJECT/RECORD`.
    pub targets: BTreeMap<String, Arc<Target>>,
    pub problems: BTreeMap<DocumentId, Vec<String>>,
}

/// Function that returns the records of a fleet name, or the reason why there are none.
pub(crate) type ResolveFleet<'a> = &'a dyn Fn(&FleetName) -> Result<Vec<Record>, ResolveError>;

impl Target {
    /// Returns the name in status, metrics and commands: `PROJECT/RECORD`.
    pub fn name(&self) -> String {
        format!("{}/{}", self.id.namespace, self.id.name)
    }

    /// Returns whether another state of the target wants the same.
    pub fn wants_the_same(&self, other: &Self) -> bool {
        // `origins` and `counts` are for display and change no record.
        self.record == other.record && self.rival == other.rival && self.desired == other.desired
    }
}

pub(crate) fn publish(scan: &Scan, resolve_fleet: ResolveFleet<'_>) -> Publication {
    let mut publication = Publication::default();
    let mut targets = targets(scan);
    let mut lists = BTreeMap::new();
    for document in &scan.documents {
        // All lists first: an intent may precede the list that it uses.
        if let Some(Content::List(owner, list)) = &document.content {
            lists.insert(owner.clone(), list.clone());
        }
    }

    for document in &scan.documents {
        let Some(content) = &document.content else {
            continue;
        };
        match content {
            Content::Endpoints(endpoints) => {
                publication.select(document, &mut targets, |target| {
                    target.add(document, endpoints.records.clone());
                    for record in target.mark(document, endpoints.untargeted.clone()) {
                        target.untargeted.push((document.id.clone(), record));
                    }
                });
            }
            Content::Fleet(names) => {
                let records = publication.resolve(document, names, resolve_fleet);
                publication.select(document, &mut targets, |target| {
                    target.add(document, records.clone())
                });
            }
            Content::Intent(intent) => {
                let project = document.id.namespace.as_str();
                let outcome = intent.bindings(project, &lists, |name: &str| {
                    targets.contains_key(&format!("{project}/{name}"))
                });
                if !outcome.problems.is_empty() {
                    let problems = publication.problems.entry(document.id.clone());
                    problems.or_default().extend(outcome.problems);
                    // The missing part of an intent is unknown, so nothing of it may be deleted.
                    hold(&mut targets, &document.id);
                }
                for (update_record, records) in outcome.bindings {
                    if let Some(target) = targets.get_mut(&format!("{project}/{update_record}")) {
                        target.add(document, records);
                    }
                }
            }
            Content::UpdateRecord(_) | Content::List(..) => {}
        }
        // An unreadable list or intent may want any record.
        if scan.holds_intents && document.id.kind == Kind::Intent {
            hold(&mut targets, &document.id);
        }
    }
    for (name, target) in targets {
        publication.targets.insert(name, Arc::new(target));
    }
    publication
}

/// Returns a target without records for each DNS Update Record.
fn targets(scan: &Scan) -> BTreeMap<String, Target> {
    let mut known = None;
    if scan.holds_unknown {
        let documents = scan.documents.iter();
        // With an illegible file, a record whose document is not found may be wanted by that file.
        known = Some(documents.map(|document| document.id.resource()).collect());
    }
    let mut targets: BTreeMap<String, Target> = BTreeMap::new();
    for document in &scan.documents {
        if let Some(Content::UpdateRecord(record)) = &document.content {
            let target = Target {
                id: document.id.clone(),
                record: record.clone(),
                desired: Desired {
                    held: scan.held.clone(),
                    known: known.clone(),
                    ..Desired::default()
                },
                untargeted: Vec::new(),
                origins: BTreeMap::new(),
                counts: BTreeMap::new(),
                rival: None,
            };
            targets.insert(target.name(), target);
        }
    }
    targets
}

/// Keeps the records of a document at every provider.
fn hold(targets: &mut BTreeMap<String, Target>, id: &DocumentId) {
    for target in targets.values_mut() {
        target.desired.held.insert(id.resource());
    }
}

impl Publication {
    /// Calls `add` with the targets that select the document.
    fn select(
        &mut self,
        document: &Document,
        targets: &mut BTreeMap<String, Target>,
        add: impl Fn(&mut Target),
    ) {
        let mut is_selected = false;
        for target in targets.values_mut() {
            // Other projects must not use the credentials of this one.
            if target.id.namespace == document.id.namespace
                && target.record.selects(&document.labels)
            {
                add(target);
                is_selected = true;
            }
        }
        if !is_selected {
            self.problems.entry(document.id.clone()).or_default().push(format!(
                "no DNS Update Record of project {} selects it; add the label {PROVIDER_LABEL}: NAME",
                document.id.namespace
            ));
        }
    }

    /// Resolves fleet names. A name without addresses keeps its existing records.
    fn resolve(
        &mut self,
        document: &Document,
        names: &FleetNames,
        resolve: ResolveFleet<'_>,
    ) -> Vec<Record> {
        let mut records = Vec::new();
        let mut kept: Vec<&Name> = names.damaged.iter().collect();
        for name in &names.names {
            match resolve(name) {
                Ok(found) => records.extend(found),
                Err(problem) => {
                    kept.push(&name.external);
                    let problem =
                        format!("{}: {problem}; its records stay unchanged", name.external);
                    self.problems
                        .entry(document.id.clone())
                        .or_default()
                        .push(problem);
                }
            }
        }
        for name in kept {
            // A record set without targets leaves the existing set unchanged.
            for record_type in [RecordType::A, RecordType::AAAA] {
                records.push(Record::new(name.clone(), record_type, []));
            }
        }
        records
    }
}

impl Target {
    fn add(&mut self, document: &Document, records: Vec<Record>) {
        let wanted = records
            .iter()
            .filter(|record| !record.targets.is_empty())
            .count();
        *self.counts.entry(document.id.clone()).or_default() += wanted;
        let records = self.mark(document, records);
        self.desired.records.extend(records);
    }

    /// Notes the document as the origin of records, and labels them with it.
    fn mark(&mut self, document: &Document, mut records: Vec<Record>) -> Vec<Record> {
        let resource = document.id.resource();
        for record in &mut records {
            self.origins
                .entry(record.name.clone())
                .or_default()
                .insert(document.id.clone());
            record
                .labels
                .0
                .insert(Labels::RESOURCE.to_owned(), resource.clone());
        }
        records
    }

    /// Takes the targets of all entries of `DNSEndpoint`s away, so that [`Target::fill`] replaces them.
    pub(crate) fn clear_targets(&mut self) {
        for id in self.counts.keys() {
            // external-dns's default targets concern its sources; fleet names and intents have
            // addresses of their own.
            if id.kind != Kind::Endpoint {
                continue;
            }
            let resource = id.resource();
            let cleared = self.desired.records.extract_if(.., |record| {
                let is_host =
                    record.record_type.is_address() || record.record_type == RecordType::CNAME;
                // A default target is an address or a host, so other types keep their data.
                is_host && !record.targets.is_empty() && record.labels.resource() == resource
            });
            for record in cleared {
                self.untargeted.push((id.clone(), record));
            }
        }
    }

    /// Gives default targets to the entries without any. Returns the entries that remain without a target;
    /// their published records stay.
    pub(crate) fn fill(&mut self, defaults: &TargetSets) -> Vec<(DocumentId, Name)> {
        let untargeted = std::mem::take(&mut self.untargeted);
        if defaults.is_empty() {
            let mut names = Vec::new();
            for (id, record) in untargeted {
                names.push((id, record.name.clone()));
                self.desired.records.push(record);
            }
            return names;
        }
        let mut filled = BTreeMap::new();
        for (id, record) in untargeted {
            for (record_type, targets) in defaults {
                let record = Record {
                    record_type: *record_type,
                    targets: targets.clone(),
                    ..record.clone()
                };
                // Entries of a name for A and AAAA get the same defaults: one is enough.
                filled.insert((record.key(), id.clone()), record);
            }
        }
        self.desired.records.extend(filled.into_values());
        Vec::new()
    }
}

/// Returns the fleet names that documents refer to.
pub(crate) fn fleet_names<'a>(
    documents: impl IntoIterator<Item = &'a Document>,
) -> BTreeSet<FleetQuery> {
    let mut found = BTreeSet::new();
    for document in documents {
        if let Some(Content::Fleet(names)) = &document.content {
            for name in &names.names {
                found.insert((name.internal.clone(), name.hold));
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use std::fs;

    use dns_core::resolve::NoAddresses;

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
        publish(
            &scan,
            &|name| match name.internal.to_string().trim_end_matches('.') {
                "router.internal" => Ok(vec![
                    Record::parse(name.external.as_str(), RecordType::A, ["10.0.0.1"]).unwrap(),
                ]),
                _ => Err(ResolveError::Unresolved(
                    name.internal.clone(),
                    NoAddresses::NoInstance,
                )),
            },
        )
    }

    fn wishes(publication: &Publication, target: &str) -> Vec<String> {
        let records = &publication.targets[target].desired.records;
        records
            .iter()
            .map(|record| format!("{record} of {}", record.labels.resource()))
            .collect()
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
        let problems: Vec<_> = publication
            .problems
            .iter()
            .map(|(id, problems)| format!("{id}: {}", problems[0]))
            .collect();
        assert_eq!(
            problems,
            [
                "DNSEndpoint other/two: no DNS Update Record of project other selects it; add the label \
          dnsprovider: NAME"
            ]
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
            [
                "g.example.org: gone.internal. matches no instance; correct the name; its records stay unchanged"
            ]
        );
    }

    const ENTRIES: &str = "apiVersion: externaldns.k8s.io/v1alpha1\nkind: DNSEndpoint\n\
         metadata: {name: one, namespace: shop, labels: {dnsprovider: bind}}\n\
         spec: {endpoints: [{dnsName: a.example.org, targets: [192.0.2.1]}, \
         {dnsName: b.example.org, targets: []}, \
         {dnsName: b.example.org, recordType: AAAA, targets: []}, \
         {dnsName: c.example.org, recordType: CNAME, targets: [x.example.net]}, \
         {dnsName: m.example.org, recordType: MX, targets: ['10 x.example.net']}, \
         {dnsName: d.example.org, targets: [bad]}]}\n---\n\
         apiVersion: bosh-dns-publish/v1\nkind: FleetName\n\
         metadata: {name: f, namespace: shop, labels: {dnsprovider: bind}}\n\
         spec: {names: [{name: r.example.org, alias: router.internal}]}\n";

    fn target() -> Target {
        (*published(ENTRIES).targets["shop/bind"]).clone()
    }

    fn lines(target: &Target) -> Vec<String> {
        let records = target.desired.records.iter();
        records
            .map(|record| format!("{record} of {}", record.labels.resource()))
            .collect()
    }

    #[test]
    fn default_targets_fill_empty_entries() {
        let mut filled = target();
        let id = filled.untargeted[0].0.clone();
        assert_eq!(id.to_string(), "DNSEndpoint shop/one");
        let own = [
            "a.example.org 0 A 192.0.2.1 of crd/shop/one",
            "c.example.org 0 CNAME x.example.net of crd/shop/one",
            "m.example.org 0 MX 10 x.example.net of crd/shop/one",
            "d.example.org 0 A  of crd/shop/one",
            "r.example.org 0 A 10.0.0.1 of fleet/shop/f",
        ];
        assert_eq!(lines(&filled), own);
        let counts: Vec<usize> = filled.counts.values().copied().collect();
        assert_eq!(counts, [3, 1], "sets that are wanted now");
        assert_eq!(filled.origins.len(), 6);
        let defaults = crate::record::host_sets(["198.51.100.1", "2001:db8::1"])
            .unwrap()
            .unwrap();
        assert_eq!(filled.fill(&defaults), []);
        assert_eq!(
            lines(&filled)[own.len()..],
            [
                "b.example.org 0 A 198.51.100.1 of crd/shop/one",
                "b.example.org 0 AAAA 2001:db8::1 of crd/shop/one",
            ]
        );
        assert_eq!(filled.untargeted, []);
        // Without defaults, the entries keep what is published.
        let mut unfilled = target();
        let names: Vec<String> = unfilled
            .fill(&TargetSets::new())
            .iter()
            .map(|(id, name)| format!("{id} {name}"))
            .collect();
        assert_eq!(names, ["DNSEndpoint shop/one b.example.org"; 2]);
        assert_eq!(
            lines(&unfilled)[own.len()..],
            [
                "b.example.org 0 A  of crd/shop/one",
                "b.example.org 0 AAAA  of crd/shop/one"
            ]
        );
        // They may take the place of the entries' own hosts.
        let mut forced = target();
        forced.clear_targets();
        assert_eq!(lines(&forced), [own[2], own[3], own[4]]);
        let cleared: Vec<&str> = forced
            .untargeted
            .iter()
            .map(|(_, record)| record.name.as_str())
            .collect();
        assert_eq!(
            cleared,
            [
                "b.example.org",
                "b.example.org",
                "a.example.org",
                "c.example.org"
            ]
        );
    }

    #[test]
    fn wanted_values_make_targets_equal() {
        let one = target();
        assert!(one.wants_the_same(&one.clone()));
        let differs = |change: &dyn Fn(&mut Target)| {
            let mut other = one.clone();
            change(&mut other);
            !one.wants_the_same(&other)
        };
        assert!(differs(&|other| other.rival = Some("x".to_owned())));
        assert!(differs(&|other| other.record.metadata.name = "x".to_owned()));
        assert!(differs(&|other| drop(other.desired.records.pop())));
        assert!(!differs(&|other| other.counts.clear()));
        assert!(!differs(&|other| other.origins.clear()));
        assert_eq!(one.name(), "shop/bind");
    }

    #[test]
    fn fleet_names_are_asked_once() {
        let folder = tempfile::tempdir().unwrap();
        let second = ENTRIES
            .replace("name: f,", "name: g,")
            .replace("name: one,", "name: two,");
        fs::write(
            folder.path().join("a.yml"),
            format!("{ENTRIES}---\n{second}"),
        )
        .unwrap();
        let scan = Folder::new(vec![folder.path().to_owned()]).scan();
        let names: Vec<String> = fleet_names(&scan.documents)
            .iter()
            .map(|(name, hold)| format!("{name} {}", hold.as_secs()))
            .collect();
        assert_eq!(names, ["router.internal. 30"]);
    }

    const INTENT: &str = "apiVersion: bosh-dns-publish/v1\nkind: InboundIntent\n\
         metadata: {name: front, namespace: shop}\n\
         spec: {app: front, externalName: shop, publicDomain: example.org, placements: [{logicalCloud: lc1, \
         clusters: [{cluster: p/x, publicAddresses: [192.0.2.1]}]}]}\n";

    #[test]
    fn intents_are_published_through_their_list() {
        let list = "apiVersion: bosh-dns-publish/v1\nkind: DNSUpdateRecordList\n\
             metadata: {name: dns-update-record-list, namespace: shop}\nspec: {logicalCloud: lc1, kv: [{k: etcd}]}\n";
        let publication = published(&format!("{INTENT}---\n{list}"));
        assert_eq!(
            wishes(&publication, "shop/etcd"),
            ["shop.example.org 0 A 192.0.2.1 of intent/shop/front"]
        );
        assert_eq!(wishes(&publication, "shop/bind"), [] as [&str; 0]);
        assert!(publication.problems.is_empty());
        // Without the list, what the intent published stays.
        let publication = published(INTENT);
        let problems: Vec<&String> = publication.problems.values().flatten().collect();
        assert_eq!(
            problems,
            [
                "logical cloud lc1 of project shop has no dns-update-record-list; without one nothing is published there"
            ]
        );
        for target in publication.targets.values() {
            assert!(target.desired.held.contains("intent/shop/front"));
            assert_eq!(target.desired.known, None);
        }
    }

    #[test]
    fn unreadable_documents_hold_possible_names() {
        let folder = tempfile::tempdir().unwrap();
        let resolve: ResolveFleet<'_> = &|_| Ok(Vec::new());
        let mut list = "apiVersion: bosh-dns-publish/v1\nkind: DNSUpdateRecordList\n\
             metadata: {name: dns-update-record-list, namespace: shop}\nspec: {logicalCloud: lc1, kv: [{k: etcd}]}\n"
            .to_owned();
        let held = |list: &str| {
            fs::write(
                folder.path().join("a.yml"),
                format!("{PROVIDERS}{INTENT}---\n{list}"),
            )
            .unwrap();
            let scan = Folder::new(vec![folder.path().to_owned()]).scan();
            let publication = publish(&scan, resolve);
            let target = &publication.targets["shop/bind"];
            (
                target.desired.held.iter().cloned().collect::<Vec<_>>(),
                target.desired.known.clone().map(|known| known.len()),
            )
        };
        assert_eq!(held(&list), (vec![], None));
        // The list of another cloud is damaged.
        list.push_str("---\n");
        list.push_str(
            &list
                .clone()
                .replace("lc1, kv: [{k: etcd}]", "lc2, kv: 1")
                .replace("---\n", ""),
        );
        assert_eq!(held(&list).0, ["intent/shop/front"]);
        // A damaged document keeps its own records.
        let damaged = "apiVersion: externaldns.k8s.io/v1alpha1\nkind: DNSEndpoint\n\
             metadata: {name: bad, namespace: shop}\n";
        assert_eq!(
            held(damaged),
            (
                vec!["crd/shop/bad".to_owned(), "intent/shop/front".to_owned()],
                None
            )
        );
        // A document that cannot be identified may want any record that no other one wants.
        assert_eq!(held("kind: [\n").1, Some(3));
    }
}
