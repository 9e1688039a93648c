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
