use std::{fs, path::Path};

use super::*;

const GOOD: &str = "apiVersion: externaldns.k8s.io/v1alpha1\nkind: DNSEndpoint\nmetadata: {name: NAME}\n\
                    spec: {endpoints: [{dnsName: NAME.example.org, targets: [192.0.2.1]}]}\n";

fn endpoint(name: &str) -> String {
    GOOD.replace("NAME", name)
}

fn write(folder: &Path, file: &str, documents: &[&str]) {
    fs::write(folder.join(file), documents.join("---\n")).unwrap();
}

fn names(scan: &Scan) -> Vec<String> {
    scan.documents
        .iter()
        .map(|document| document.id.to_string())
        .collect()
}

fn problems(scan: &Scan) -> Vec<String> {
    let of_file = |text: String| {
        text.rsplit_once('/')
            .map_or(text.clone(), |(_, rest)| rest.to_owned())
    };
    scan.problems()
        .map(|problem| {
            let text = problem.to_string();
            let file = of_file(problem.file.to_string());
            text.replacen(&*problem.file, &file, 1)
        })
        .collect()
}

#[test]
fn bad_document_affects_only_itself() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    write(
        path,
        "a.yml",
        &[&endpoint("one"), "kind: [\n", &endpoint("two")],
    );
    write(
        path,
        "b.yaml",
        &[
            "kind: Service\napiVersion: v1\nmetadata: {name: x}\n",
            &endpoint("three"),
        ],
    );
    write(
        path,
        "c.json",
        &[
            "{\"kind\": \"DNSEndpoint\", \"apiVersion\": \"v1\", \"metadata\": {\"name\": \"four\"}}",
        ],
    );
    write(path, "ignored.txt", &["kind: [\n"]);
    write(path, ".hidden.yml", &["kind: [\n"]);
    let scan = Folder::new(vec![path.to_owned()]).scan();
    assert_eq!(
        names(&scan),
        [
            "DNSEndpoint default/one",
            "DNSEndpoint default/two",
            "DNSEndpoint default/three"
        ]
    );
    let problems = problems(&scan);
    assert_eq!(problems.len(), 4, "{problems:#?}");
    assert!(
        problems[0].starts_with("a.yml:") && problems[0].contains("not valid YAML"),
        "{problems:#?}"
    );
    assert!(
        problems[1].starts_with("b.yaml:1: kind: unknown kind \"Service\"; "),
        "{problems:#?}"
    );
    assert!(
        problems[2].contains("write apiVersion: externaldns.k8s.io/v1alpha1"),
        "{problems:#?}"
    );
    assert!(
        problems[3].contains("member \"spec\" is missing"),
        "{problems:#?}"
    );
    assert!(scan.held.contains("crd/default/four"));
}

#[test]
fn damaged_document_holds_records() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    write(path, "a.yml", &[&endpoint("one"), &endpoint("two")]);
    let mut followed = Folder::new(vec![path.to_owned()]);
    assert!(followed.scan().held.is_empty());
    write(path, "a.yml", &[&endpoint("one"), "kind: [\n"]);
    for _ in 0..2 {
        let scan = followed.scan();
        assert_eq!(names(&scan), ["DNSEndpoint default/one"]);
        assert_eq!(scan.held.iter().collect::<Vec<_>>(), ["crd/default/two"]);
    }
    // Once the damaged part is removed, the document is gone.
    write(path, "a.yml", &["# alone\n", &endpoint("one")]);
    assert!(followed.scan().held.is_empty());
}

#[test]
fn emptied_or_cut_file_is_unreadable() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let whole = [endpoint("one"), endpoint("two")].join("---\n");
    write(path, "a.yml", &[&whole]);
    let mut followed = Folder::new(vec![path.to_owned()]);
    followed.scan();
    let second = whole.find("---").unwrap();
    for (cut, reason) in [
        ("", "the file is empty, but held 2 documents"),
        ("# later\n", "the file is empty, but held 2 documents"),
        // Both are valid documents, the latter with another address.
        (&whole[..second], "the file ends within its earlier text"),
        (
            &whole[..whole.len() - 5],
            "the file ends within its earlier text",
        ),
    ] {
        write(path, "a.yml", &[cut]);
        for _ in 0..2 {
            let scan = followed.scan();
            assert_eq!(
                scan.held.iter().collect::<Vec<_>>(),
                ["crd/default/one", "crd/default/two"],
                "{cut:?}"
            );
            assert!(problems(&scan)[0].contains(reason), "{:?}", problems(&scan));
        }
    }
    // A file that stays so is intended.
    write(path, "a.yml", &[&whole[..second]]);
    let hour_ago = SystemTime::now() - Duration::from_hours(1);
    fs::File::open(path.join("a.yml"))
        .unwrap()
        .set_modified(hour_ago)
        .unwrap();
    let scan = followed.scan();
    assert_eq!((names(&scan).len(), scan.held.len()), (1, 0));
    // A new process knows the documents from the status file.
    let id = scan.documents[0].id.clone();
    let status = DocumentStatus {
        id,
        observed_generation: 1,
        digest: String::new(),
        providers: Default::default(),
        last_error: None,
        remarks: Vec::new(),
    };
    StatusFile {
        documents: vec![status],
        problems: Vec::new(),
    }
    .write(&path.join("a.yml"))
    .unwrap();
    write(path, "a.yml", &[""]);
    assert_eq!(Folder::new(vec![path.to_owned()]).scan().held.len(), 1);
}

#[test]
fn kubernetes_lists_are_read() {
    let folder = tempfile::tempdir().unwrap();
    let item = |name: &str| endpoint(name).replace('\n', "\n  ");
    let list = format!(
        "apiVersion: v1\nkind: List\nitems:\n- {}\n- {}\n- kind: Pod\n",
        item("one"),
        item("two")
    );
    write(folder.path(), "a.yml", &[&list]);
    let scan = Folder::new(vec![folder.path().to_owned()]).scan();
    assert_eq!(
        names(&scan),
        ["DNSEndpoint default/one", "DNSEndpoint default/two"]
    );
    assert_eq!(problems(&scan).len(), 1, "{:?}", problems(&scan));
    assert!(
        problems(&scan)[0].contains("items[2].kind: unknown kind"),
        "{:?}",
        problems(&scan)
    );
}

#[test]
fn long_files_are_read() {
    let folder = tempfile::tempdir().unwrap();
    let entries: String = (0..24_000)
        .map(|number| {
            format!(
                "- {{dnsName: n{number}.example.org, recordTTL: 60, recordType: A, targets: [192.0.2.1]}}\n"
            )
        })
        .collect();
    let head = "apiVersion: externaldns.k8s.io/v1alpha1\nkind: DNSEndpoint\nmetadata: {name: many}\nspec:\n  endpoints:\n";
    let entries: String = entries.lines().map(|line| format!("  {line}\n")).collect();
    fs::write(folder.path().join("a.yml"), format!("{head}{entries}")).unwrap();
    let scan = Folder::new(vec![folder.path().to_owned()]).scan();
    assert!(problems(&scan).is_empty(), "{:?}", problems(&scan));
    let Some(Content::Endpoints(endpoints)) = &scan.documents[0].content else {
        panic!()
    };
    assert_eq!(endpoints.records.len(), 24_000);
}

#[test]
fn status_survives_restart() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    write(path, "a.yml", &[&endpoint("one")]);
    let id = Folder::new(vec![path.to_owned()]).scan().documents[0]
        .id
        .clone();
    let status = DocumentStatus {
        id,
        observed_generation: 3,
        digest: "d".to_owned(),
        providers: BTreeMap::from([(
            "default/bind".to_owned(),
            ProviderResult {
                synced: true,
                records: 1,
                problems: Vec::new(),
            },
        )]),
        last_error: None,
        remarks: Vec::new(),
    };
    let file = StatusFile {
        documents: vec![status],
        problems: Vec::new(),
    };
    file.write(&path.join("a.yml")).unwrap();
    let text = fs::read_to_string(path.join("a.yml.status")).unwrap();
    assert!(
        text.contains("\"observedGeneration\": 3") && text.contains("\"kind\": \"DNSEndpoint\""),
        "{text}"
    );
    assert_eq!(StatusFile::read(&path.join("a.yml")), Some(file));
    write(path, "a.yml", &["kind: [\n"]);
    let scan = Folder::new(vec![path.to_owned()]).scan();
    assert_eq!(scan.held.iter().collect::<Vec<_>>(), ["crd/default/one"]);
    fs::remove_file(path.join("a.yml")).unwrap();
    StatusFile::sweep(path);
    assert_eq!(fs::read_dir(path).unwrap().count(), 0);
}

#[test]
fn status_follows_no_planted_link_and_leaves_no_unfinished_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    fs::write(path.join("precious"), "root's").unwrap();
    std::os::unix::fs::symlink(path.join("precious"), path.join("a.yml.status")).unwrap();
    let file = StatusFile::default();
    // A link that leads to a status is no status either: the file itself must be there.
    file.write(&path.join("a.yml")).unwrap();
    assert_eq!(fs::read(path.join("precious")).unwrap(), b"root's");
    let written = fs::symlink_metadata(path.join("a.yml.status")).unwrap();
    assert!(written.is_file());
    for name in [".a.yml.status.part-abc123", ".gone.yml.status.part-abc123"] {
        fs::write(path.join(name), "{").unwrap();
    }
    // Of the operator's own programs.
    fs::write(path.join(".a.yml.part-abc123"), "kind: [").unwrap();
    StatusFile::sweep_unfinished(path);
    let mut left: Vec<_> = fs::read_dir(path)
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    left.sort();
    assert_eq!(left, [".a.yml.part-abc123", "a.yml.status", "precious"]);
}

#[test]
fn planted_fifo_blocks_no_scan() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), "a.yml", &[&endpoint("a")]);
    // A scan reads the status that an earlier process has left.
    let status = folder.path().join("a.yml.status");
    nix::unistd::mkfifo(&status, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let scan = Folder::new(vec![folder.path().to_owned()]).scan();
    assert_eq!(scan.documents.len(), 1);
    StatusFile::default()
        .write(&folder.path().join("a.yml"))
        .unwrap();
    assert_eq!(
        StatusFile::read(&folder.path().join("a.yml")),
        Some(StatusFile::default())
    );
}

#[test]
fn good_provider_stays_while_damaged() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let record = "apiVersion: bosh-dns-publish/v1\nkind: DNSUpdateRecord\nmetadata: {name: etcd}\nspec: {provider: coredns}\n";
    write(path, "a.yml", &[record]);
    let mut followed = Folder::new(vec![path.to_owned()]);
    let before = followed.scan();
    for damaged in [record.replace("coredns", "bind9"), "kind: [\n".to_owned()] {
        write(path, "a.yml", &[&damaged]);
        let scan = followed.scan();
        assert_eq!(scan.documents, before.documents);
        assert_eq!(problems(&scan).len(), 1);
    }
}

#[test]
fn first_of_two_definitions_counts() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), "a.yml", &[&endpoint("one")]);
    write(folder.path(), "b.yml", &["# second\n", &endpoint("one")]);
    let scan = Folder::new(vec![folder.path().to_owned()]).scan();
    assert_eq!(names(&scan).len(), 1);
    let problems = problems(&scan);
    assert!(
        problems[0].starts_with("b.yml:") && problems[0].contains("is already defined at"),
        "{problems:?}"
    );
}

#[test]
fn unknown_member_is_reported() {
    let folder = tempfile::tempdir().unwrap();
    let record = "apiVersion: bosh-dns-publish/v1\nkind: DNSUpdateRecord\nmetadata: {name: etcd}\n\
                  spec: {provider: coredns}\nstatus: {}\n";
    write(
        folder.path(),
        "a.yml",
        &[
            record,
            &record.replace("etcd", "other").replace("status", "speck"),
        ],
    );
    let scan = Folder::new(vec![folder.path().to_owned()]).scan();
    let problems = problems(&scan);
    assert_eq!(problems.len(), 1, "{problems:?}");
    assert!(
        problems[0].starts_with("a.yml:11: speck: ")
            && problems[0].contains("did you mean \"spec\"?"),
        "{problems:?}"
    );
}

#[test]
fn vanished_folder_holds_everything() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("publish.d");
    fs::create_dir(&path).unwrap();
    write(&path, "a.yml", &[&endpoint("one")]);
    let mut followed = Folder::new(vec![path.clone()]);
    followed.scan();
    fs::rename(&path, folder.path().join("elsewhere")).unwrap();
    let scan = followed.scan();
    assert_eq!(scan.held.iter().collect::<Vec<_>>(), ["crd/default/one"]);
    assert!(problems(&scan)[0].contains("cannot be read"));
}

#[test]
fn list_names_owner() {
    let folder = tempfile::tempdir().unwrap();
    let list = |spec: &str| {
        format!(
            "apiVersion: bosh-dns-publish/v1\nkind: DNSUpdateRecordList\n\
             metadata: {{name: dns-update-record-list, namespace: shop}}\nspec: {{{spec} kv: [{{key1: etcd}}]}}\n"
        )
    };
    write(
        folder.path(),
        "a.yml",
        &[
            &list("logicalCloud: lc1,"),
            &list("cluster: p/edge,"),
            &list(""),
        ],
    );
    let scan = Folder::new(vec![folder.path().to_owned()]).scan();
    assert_eq!(
        names(&scan),
        [
            "DNSUpdateRecordList shop/logical-cloud/lc1",
            "DNSUpdateRecordList /cluster/p/edge"
        ]
    );
    assert!(problems(&scan)[0].contains("set either logicalCloud or cluster"));
}

#[tokio::test]
async fn change_wakes_the_watch() {
    let folder = tempfile::tempdir().unwrap();
    let other = tempfile::tempdir().unwrap();
    let single = other.path().join("single");
    fs::write(&single, "{}").unwrap();
    let mut watch = Watch::start(&[folder.path().to_owned(), single.clone()]);
    for path in [folder.path().join("new.yml"), single] {
        fs::write(path, "{}").unwrap();
        tokio::time::timeout(Duration::from_secs(20), watch.changed())
            .await
            .unwrap();
    }
}

#[test]
fn problems_belong_to_the_document_of_their_line() {
    let folder = tempfile::tempdir().unwrap();
    let bad = |name: &str| endpoint(name).replace("192.0.2.1", "300.0.0.1");
    write(
        folder.path(),
        "a.yml",
        &[&endpoint("one"), &bad("two"), "kind: [\n", &bad("four")],
    );
    let scan = Folder::new(vec![folder.path().to_owned()]).scan();
    let (of_documents, of_files) = scan.problems_by_document();
    let found: Vec<(String, usize)> = of_documents
        .iter()
        .map(|(id, problems)| (id.to_string(), problems.len()))
        .collect();
    let names = names(&scan);
    assert_eq!(found, [&names[2], &names[1]].map(|name| (name.clone(), 1)));
    assert_eq!(of_files.len(), 1, "{of_files:?}");
}

#[test]
fn reads_and_other_files_wake_nobody() {
    use notify::{Error, Event, EventKind, event::AccessKind, event::CreateKind};

    let created = EventKind::Create(CreateKind::File);
    let read = EventKind::Access(AccessKind::Read);
    let single = [PathBuf::from("/d/single")];
    for (kind, path, expected) in [
        (created, "/d/a.yml", true),
        (created, "/d/single", true),
        (created, "/d/a.txt", false),
        (read, "/d/a.yml", false),
        (read, "/d/single", false),
    ] {
        let event = Event::new(kind).add_path(path.into());
        let found = may_change_documents(&Ok(event), &single);
        assert_eq!(found, expected, "{kind:?} {path}");
    }
    let overflow = Err(Error::generic("overflow"));
    assert!(may_change_documents(&overflow, &single));
}

#[test]
fn kinds_have_name_word_and_version() {
    let own = "bosh-dns-publish/v1";
    let theirs = "externaldns.k8s.io/v1alpha1";
    for (kind, name, word, version) in [
        (Kind::Endpoint, "DNSEndpoint", "crd", theirs),
        (Kind::Fleet, "FleetName", "fleet", own),
        (Kind::UpdateRecord, "DNSUpdateRecord", "update-record", own),
        (Kind::List, "DNSUpdateRecordList", "list", own),
        (Kind::Intent, "InboundIntent", "intent", own),
    ] {
        let id = DocumentId {
            kind,
            namespace: "shop".to_owned(),
            name: "one".to_owned(),
        };
        assert_eq!(Kind::named(name), Some(kind));
        assert_eq!((kind.name(), kind.api_version()), (name, version));
        assert_eq!(id.resource(), format!("{word}/shop/one"));
        assert_eq!(id.to_string(), format!("{name} shop/one"));
        let json = serde_json::to_value(&id).unwrap();
        assert_eq!(
            json,
            serde_json::json!({"kind": name, "namespace": "shop", "name": "one"})
        );
    }
    assert_eq!(Kind::named("Pod"), None);
    let cloud = DocumentId::of_list(&ListOwner::LogicalCloud {
        project: "shop".to_owned(),
        name: "lc1".to_owned(),
    });
    assert_eq!(cloud.resource(), "list/shop/logical-cloud/lc1");
    let cluster = DocumentId::of_list(&ListOwner::Cluster {
        provider: "p".to_owned(),
        name: "edge".to_owned(),
    });
    assert_eq!(cluster.resource(), "list//cluster/p/edge");
}

#[test]
fn digests_are_stable_across_versions() {
    assert_eq!(digest(""), "e3b0c44298fc1c14");
    assert_eq!(digest("abc"), "ba7816bf8f01cfea");
}

/// Returns the problems of documents in one file, without the folder.
fn problems_of(documents: &[&str]) -> Vec<String> {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), "a.yml", documents);
    problems(&Folder::new(vec![folder.path().to_owned()]).scan())
}

#[test]
fn problems_have_place_cause_and_remedy() {
    for (document, expected) in [
        (
            "kind: DNSEndpont\napiVersion: v1\n".to_owned(),
            "a.yml:1: kind: unknown kind \"DNSEndpont\"; did you mean \"DNSEndpoint\"? If not, remove it",
        ),
        (
            endpoint("one").replace("v1alpha1", "v2"),
            "a.yml:1: apiVersion: DNSEndpoint has another apiVersion; write apiVersion: externaldns.k8s.io/v1alpha1",
        ),
        (
            endpoint("one").replace("{name: one}", "{}"),
            "a.yml:3: metadata: member \"name\" is missing; add \"name\"",
        ),
        (
            endpoint("one").replace("metadata", "spek: 1\nmetadata"),
            "a.yml:3: spek: unknown member \"spek\"; did you mean \"spec\"? If not, remove it",
        ),
        (
            endpoint("one").replace("{name: one}", "{name: one, namespace: 'a b'}"),
            "a.yml:3: metadata.namespace: \"a b\" is not a valid name; use up to 63 letters, digits, dashes, dots and \
             underscores, with a letter or digit at both ends",
        ),
        (
            endpoint("one").replace("{name: one}", "{name: one, generation: -1}"),
            "a.yml:3: metadata.generation: -1 is out of range; give a whole number from 0 to 18446744073709551615",
        ),
        ("- 1\n".to_owned(), "a.yml:1: a list instead of a map; give a map"),
        (
            "apiVersion: v1\nkind: List\nitems: 1\n".to_owned(),
            "a.yml:3: items: 1 instead of a list; give a list",
        ),
        (
            "apiVersion: bosh-dns-publish/v1\nkind: DNSUpdateRecordList\nmetadata: {name: dns-update-record-list}\n\
             spec: {cluster: edge, kv: []}\n"
                .to_owned(),
            "a.yml:4: spec.cluster: \"edge\" is not a cluster; write it as PROVIDER/NAME",
        ),
        (
            "apiVersion: bosh-dns-publish/v1\nkind: DNSUpdateRecordList\nmetadata: {name: dns-update-record-list}\n\
             spec: {cluster: p/edge, logicalCloud: lc, kv: []}\n"
                .to_owned(),
            "a.yml:4: spec: the owner of the list is ambiguous; set either logicalCloud or cluster (PROVIDER/NAME)",
        ),
        (
            "apiVersion: bosh-dns-publish/v1\nkind: DNSUpdateRecordList\nmetadata: {name: other}\n\
             spec: {cluster: p/edge, kv: []}\n"
                .to_owned(),
            "a.yml:3: metadata.name: a list named \"other\" has no effect; name it dns-update-record-list",
        ),
    ] {
        assert_eq!(problems_of(&[&document]), [expected]);
    }
    let twice = problems_of(&[&endpoint("one"), &endpoint("one")]);
    assert_eq!(twice.len(), 1);
    assert!(
        twice[0]
            .starts_with("a.yml:6: metadata.name: DNSEndpoint default/one is already defined at ")
            && twice[0].ends_with("a.yml:1; remove or rename one of them"),
        "{twice:?}"
    );
    assert_eq!(
        problems_of(&["# nothing\n"]),
        [] as [&str; 0],
        "a file that waits for documents"
    );
    assert_eq!(
        problems_of(&[" \n"]),
        ["a.yml:1: the file is empty; write documents to it, or remove the file"]
    );
}

#[test]
fn members_of_metadata_are_read() {
    let folder = tempfile::tempdir().unwrap();
    let metadata =
        "{name: one, namespace: shop, labels: {a: b, n: '1'}, generation: 7, annotations: {x: y}}";
    let list = endpoint("two").replace('\n', "\n  ");
    write(
        folder.path(),
        "a.yml",
        &[
            &format!(
                "{}status: {{x: 1}}\n",
                endpoint("one").replace("{name: one}", metadata)
            ),
            &format!(
                "apiVersion: v1\nkind: DNSEndpointList\nitems:\n- {list}\n- {}\n",
                list.replace("two", "three")
            ),
        ],
    );
    let scan = Folder::new(vec![folder.path().to_owned()]).scan();
    let found: Vec<(String, Option<u64>, u64, u64, usize)> = scan
        .documents
        .iter()
        .map(|document| {
            let Document {
                id,
                labels,
                generation,
                line,
                last_line,
                ..
            } = document;
            (id.to_string(), *generation, *line, *last_line, labels.len())
        })
        .collect();
    assert_eq!(
        found,
        [
            ("DNSEndpoint shop/one".to_owned(), Some(7), 1, 6, 2),
            ("DNSEndpoint default/two".to_owned(), None, 10, 14, 0),
            ("DNSEndpoint default/three".to_owned(), None, 15, 20, 0),
        ]
    );
    assert_eq!(scan.documents[0].labels["a"], "b");
    assert_eq!(problems(&scan), [] as [String; 0]);
}

#[test]
fn extensions_mark_document_files() {
    for (path, expected) in [
        ("/d/a.yml", true),
        ("/d/a.yaml", true),
        ("/d/a.json", true),
        ("/d/a.YML", false),
        ("/d/a.yml~", false),
        ("/d/.a.yml", false),
        ("/d/yml", false),
        ("/", false),
    ] {
        assert_eq!(is_document_file(Path::new(path)), expected, "{path}");
    }
    let folder = tempfile::tempdir().unwrap();
    for name in ["b.yml", "a.json", ".c.yml", "d.txt"] {
        fs::write(folder.path().join(name), "x").unwrap();
    }
    let path = |name: &str| folder.path().join(name);
    assert_eq!(
        files_of(folder.path()).unwrap(),
        [path("a.json"), path("b.yml")]
    );
    assert_eq!(
        files_of(&path("d.txt")).unwrap(),
        [path("d.txt")],
        "a file may have any name"
    );
    assert!(files_of(&path("none")).is_err());
    assert_eq!(path_beside(&path("a.yml")), path("a.yml.status"));
}

#[test]
fn large_and_foreign_files_are_unreadable() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("a.yml");
    let large = fs::File::create(&file).unwrap();
    large.set_len((64 << 20) + 1).unwrap();
    let error = |path: &Path| read_text(path).unwrap_err().to_string();
    assert_eq!(error(&file), "it is larger than 64 MiB");
    fs::write(&file, b"\xff").unwrap();
    assert_eq!(error(&file), "it is not UTF-8");
    let state = unreadable(&file, &io::Error::other("cause"));
    assert_eq!((state.documents.len(), &state.path), (0, &file));
    assert_eq!(
        state.problems[0].to_string(),
        format!(
            "{}:1: cannot be read: cause; correct the path or its permissions; the records of its documents stay \
             unchanged",
            file.display()
        )
    );
}

#[test]
fn cut_texts_are_noticed() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("a.yml");
    fs::write(&file, "x").unwrap();
    let whole = "a: 1\nb: 2\n";
    let cut = Some("write the file completely, and end it with a line break");
    let wait = Some("wait a minute if that is intended; the file may still be being written");
    for (text, expected) in [
        (whole, None),
        ("a: 1\nc: 2\n", None),
        ("a: 1\nb: 2\nc: 3\n", None),
        ("a: 1\nb: 2", wait),
        ("a: 1\nb", cut),
        ("a: 1\n", wait),
        ("a", cut),
    ] {
        assert_eq!(missing_end(&file, text, whole), expected, "{text:?}");
    }
    // After a minute, what is left is intended, but for a line that is cut.
    let old = fs::File::options().write(true).open(&file).unwrap();
    old.set_modified(SystemTime::now() - WRITING).unwrap();
    assert_eq!(missing_end(&file, "a: 1\n", whole), None);
    assert_eq!(missing_end(&file, "a", whole), cut);
    old.set_modified(SystemTime::now() + WRITING).unwrap();
    assert_eq!(
        missing_end(&file, "a: 1\n", whole),
        None,
        "a time in the future"
    );
}

#[test]
fn state_file_may_be_missing() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("state.json");
    let read = || read_json::<Vec<u8>>(&file);
    assert_eq!(read(), Ok(vec![]));
    fs::write(&file, "[1, 2]").unwrap();
    assert_eq!(read(), Ok(vec![1, 2]));
    fs::write(&file, "[1").unwrap();
    assert!(read().is_err());
    assert!(
        read_json::<Vec<u8>>(folder.path()).is_err(),
        "a folder is not missing"
    );
    write_pretty(&file, &vec![3], Attributes::PUBLIC).unwrap();
    assert_eq!(fs::read_to_string(&file).unwrap(), "[\n  3\n]\n");
}

#[test]
fn status_files_have_a_form() {
    let folder = tempfile::tempdir().unwrap();
    let documents = folder.path().join("a.yml");
    let status = DocumentStatus {
        id: DocumentId {
            kind: Kind::Endpoint,
            namespace: "shop".to_owned(),
            name: "one".to_owned(),
        },
        observed_generation: 2,
        digest: "d".to_owned(),
        providers: BTreeMap::new(),
        last_error: None,
        remarks: Vec::new(),
    };
    let file = StatusFile {
        documents: vec![status],
        problems: Vec::new(),
    };
    file.write(&documents).unwrap();
    let text = fs::read_to_string(path_beside(&documents)).unwrap();
    assert_eq!(
        serde_json::from_str::<serde_json::Value>(&text).unwrap(),
        serde_json::json!({"documents": [
            {"kind": "DNSEndpoint", "namespace": "shop", "name": "one", "observedGeneration": 2, "digest": "d"}
        ]})
    );
    // An equal status is not written again.
    fs::write(path_beside(&documents), text.replace('\n', " ")).unwrap();
    file.write(&documents).unwrap();
    assert!(
        !fs::read_to_string(path_beside(&documents))
            .unwrap()
            .contains('\n')
    );
    let mut other = file.clone();
    other.problems.push("x".to_owned());
    other.write(&documents).unwrap();
    assert_eq!(StatusFile::read(&documents), Some(other));
    assert_eq!(StatusFile::read(&folder.path().join("none.yml")), None);
    // Only the status files of documents that are gone are removed.
    for name in [
        "x.txt.status",
        "b.yml.status",
        "c.yml.status",
        "c.yml",
        "d.yml.other",
    ] {
        fs::write(folder.path().join(name), "x").unwrap();
    }
    StatusFile::sweep(folder.path());
    StatusFile::sweep(&folder.path().join("none"));
    let mut left: Vec<_> = fs::read_dir(folder.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    left.sort();
    assert_eq!(
        left,
        ["c.yml", "c.yml.status", "d.yml.other", "x.txt.status"]
    );
}

#[test]
fn unreadable_documents_hold_every_intent() {
    let folder = tempfile::tempdir().unwrap();
    let version = "apiVersion: bosh-dns-publish/v1\n";
    let of_endpoints = format!("apiVersion: {}\nkind: DNSEndpoint\n", endpoint::API_VERSION);
    for (document, holds_intents, held) in [
        (
            format!("{of_endpoints}metadata: {{name: e}}\nspec: {{endpoint: []}}\n"),
            false,
            1,
        ),
        (
            format!("{of_endpoints}metadata: {{name: e}}\nspec: {{endpoints: [], more: []}}\n"),
            false,
            1,
        ),
        (
            format!("{of_endpoints}metadata: {{name: e}}\nspec: x\n"),
            false,
            1,
        ),
        (
            format!(
                "{of_endpoints}metadata: {{name: e, labels: {{edge: 1}}}}\nspec: {{endpoints: []}}\n"
            ),
            false,
            1,
        ),
        (
            format!("{of_endpoints}metadata: {{name: e, labels: x}}\nspec: {{endpoints: []}}\n"),
            false,
            1,
        ),
        (
            format!("{version}kind: FleetName\nmetadata: {{name: f}}\nspec: {{names: {{}}}}\n"),
            false,
            1,
        ),
        (
            format!("{version}kind: FleetName\nmetadata: {{name: f}}\nspec: []\n"),
            false,
            1,
        ),
        (
            format!("{version}kind: InboundIntent\nmetadata: {{name: i}}\nspec: {{}}\n"),
            true,
            0,
        ),
        (
            format!(
                "{version}kind: DNSUpdateRecordList\nmetadata: {{name: dns-update-record-list}}\n\
                 spec: {{cluster: p/x, kv: 1}}\n"
            ),
            true,
            0,
        ),
        (
            format!("{version}kind: DNSUpdateRecord\nmetadata: {{name: r}}\nspec: {{}}\n"),
            false,
            0,
        ),
        (
            format!("{version}kind: FleetName\nmetadata: {{name: f}}\n"),
            false,
            1,
        ),
        (
            format!(
                "{version}kind: FleetName\nmetadata: {{name: f}}\nspec: {{names: [{{alias: a}}]}}\n"
            ),
            false,
            1,
        ),
        (
            format!(
                "{version}kind: FleetName\nmetadata: {{name: f}}\nspec: {{names: [{{name: a.b}}]}}\n"
            ),
            false,
            0,
        ),
    ] {
        write(folder.path(), "a.yml", &[&document]);
        let scan = Folder::new(vec![folder.path().to_owned()]).scan();
        assert_eq!(
            (scan.holds_intents, scan.held.len()),
            (holds_intents, held),
            "{document}"
        );
        assert!(
            !problems(&scan).is_empty() && !scan.holds_unknown,
            "{document}"
        );
    }
    // A document that cannot even be identified may want anything, unless it was known before.
    write(folder.path(), "a.yml", &["kind: [\n"]);
    let mut followed = Folder::new(vec![folder.path().to_owned()]);
    assert!(followed.scan().holds_unknown);
    write(folder.path(), "a.yml", &[&endpoint("one")]);
    assert!(!followed.scan().holds_unknown);
    write(folder.path(), "a.yml", &["kind: [\n"]);
    let scan = followed.scan();
    assert!(!scan.holds_unknown);
    assert_eq!(scan.held.iter().collect::<Vec<_>>(), ["crd/default/one"]);
    // So may a folder that was never read.
    assert!(
        Folder::new(vec![folder.path().join("none")])
            .scan()
            .holds_unknown
    );
}

#[tokio::test(start_paused = true)]
async fn unchanged_watch_is_silent() {
    let (sender, events) = mpsc::channel(1);
    let mut watch = Watch {
        _watcher: None,
        events,
    };
    let hour = Duration::from_hours(1);
    assert!(tokio::time::timeout(hour, watch.changed()).await.is_err());
    sender.send(()).await.unwrap();
    assert!(tokio::time::timeout(hour, watch.changed()).await.is_ok());
    // Without a watcher, the interval remains.
    drop(sender);
    assert!(tokio::time::timeout(hour, watch.changed()).await.is_err());
}

/// Notes the folders that are watched.
#[derive(Debug, Default)]
struct Noted(Vec<PathBuf>);

impl Watcher for Noted {
    fn new<F: notify::EventHandler>(_: F, _: notify::Config) -> notify::Result<Self> {
        Ok(Self::default())
    }

    fn watch(&mut self, path: &Path, mode: RecursiveMode) -> notify::Result<()> {
        assert_eq!(mode, RecursiveMode::NonRecursive);
        self.0.push(path.to_owned());
        Ok(())
    }

    fn unwatch(&mut self, _: &Path) -> notify::Result<()> {
        Ok(())
    }

    fn kind() -> notify::WatcherKind {
        notify::WatcherKind::NullWatcher
    }
}

#[test]
fn folders_of_documents_are_watched_once() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    for name in ["a", "b"] {
        fs::create_dir(path(name)).unwrap();
    }
    fs::write(path("b/single"), "x").unwrap();
    let documents = [
        path("a"),
        path("b/single"),
        path("b/other"),
        path("b"),
        path("none/x"),
        "x".into(),
    ];
    let mut watcher = Noted::default();
    watch_folders(&mut watcher, &documents).unwrap();
    assert_eq!(watcher.0, [path("a"), path("b"), PathBuf::from(".")]);
}
