use super::*;
use crate::plan::{retire, transfer};

fn name(text: &str) -> Name {
    Name::parse(text).unwrap()
}

fn apex() -> Name {
    name("example.org")
}

/// Parses `name type target,target`, with a TTL of 60 s.
fn set(line: &str) -> Record {
    let words: Vec<&str> = line.splitn(3, ' ').collect();
    let record_type: RecordType = words[1].parse().unwrap();
    let mut record = Record::new(name(words[0]), record_type, []);
    for target in words[2].split('|') {
        record
            .targets
            .insert(Target::parse(record_type, target).unwrap());
    }
    record.ttl = Some(60);
    record
}

fn owned(line: &str, owner: &str, resource: &str) -> Record {
    let mut record = set(line);
    record.labels = Labels::of(owner, resource);
    record
}

fn mapper(prefix: &str, suffix: &str, wildcard: &str) -> Mapper {
    Mapper::new(prefix, suffix, wildcard).unwrap()
}

#[test]
fn owner_names_match_external_dns() {
    for (affixes, record, record_type, expected) in [
        (("", "", ""), "www.example.org", "A", "a-www.example.org"),
        (
            ("", "", ""),
            "www.example.org",
            "AAAA",
            "aaaa-www.example.org",
        ),
        (("", "", ""), "org", "CNAME", "cname-org"),
        (("", "", ""), "*.example.org", "A", "a-*.example.org"),
        (("", "", "any"), "*.example.org", "A", "a-any.example.org"),
        (("", "", "any"), "www.example.org", "A", "a-www.example.org"),
        (
            ("txt.", "", ""),
            "www.example.org",
            "A",
            "txt.a-www.example.org",
        ),
        (
            (" TXT- ", "", ""),
            "www.example.org",
            "A",
            "txt-a-www.example.org",
        ),
        (
            ("", "-own", ""),
            "www.example.org",
            "MX",
            "mx-www-own.example.org",
        ),
        (("", "-own", ""), "org", "MX", "mx-org-own"),
        (
            ("%{record_type}-own.", "", ""),
            "www.example.org",
            "A",
            "a-own.www.example.org",
        ),
        (
            ("", "-%{record_type}", ""),
            "www.example.org",
            "AAAA",
            "www-aaaa.example.org",
        ),
    ] {
        let (prefix, suffix, wildcard) = affixes;
        let found = mapper(prefix, suffix, wildcard).text_of(record, record_type);
        assert_eq!(found, expected, "{affixes:?}");
    }
}

#[test]
fn unusable_affixes_are_refused() {
    assert_eq!(Mapper::new("a-", "-b", ""), Err(AffixError::Both));
    assert!(Mapper::new("a-", " ", "").is_ok() && Mapper::new(" ", "-b", "").is_ok());
    let error = Mapper::new("a..b", "", "").unwrap_err().to_string();
    assert_eq!(
        error,
        "txt-prefix or txt-suffix produces invalid names: \"a..bcname-x.invalid\" is not a domain name: it has an \
         empty label; remove the extra dot"
    );
    // With `cname-x`, a label of 63 octets and one of 64.
    assert!(Mapper::new("", &"s".repeat(56), "").is_ok());
    assert!(Mapper::new("", &"s".repeat(57), "").is_err());
}

#[test]
fn unfitting_names_get_hashed_owners() {
    let plain = Mapper::default();
    let owner = |record: &Name, apex: &Name| plain.owner_name(record, RecordType::A, apex);
    assert_eq!(
        owner(&name("www.example.org"), &apex()),
        Some(name("a-www.example.org"))
    );
    // `a-example.org` would be beside the zone.
    assert_eq!(
        owner(&apex(), &apex()),
        Some(name("a-bfabc37432958b063360d3ad6461c9c4.example.org"))
    );
    let label = "x".repeat(63);
    assert_eq!(
        owner(&name(&format!("{label}.example.org")), &apex()),
        Some(name("a-0186f5eba6f7b1ec7a251f0a629e9a35.example.org"))
    );
    assert_eq!(owner(&name("org"), &Name::root()), Some(name("a-org")));
    assert_eq!(
        owner(&name(&"y".repeat(63)), &Name::root()),
        Some(name("a-a96b8773f21910f6b1fc287629c1533b"))
    );
    // As many labels are replaced as necessary: the hashed one takes 35 octets with its length.
    let rest = "z".repeat(47);
    let long = format!("b.{label}.{label}.{label}.{rest}.example.org");
    let hashed = owner(&name(&long), &name("example.org")).unwrap();
    let labels: Vec<&str> = hashed.labels().collect();
    assert!(
        labels[0].starts_with("a-") && labels[0].len() == 34,
        "{hashed}"
    );
    assert_eq!(labels[1..], [&label, &label, &rest, "example", "org"]);
    // Not even directly below the apex.
    let wide = name(&format!("{label}.{label}.{label}.{}", "w".repeat(32)));
    let below = name(&format!("{}.{wide}", "v".repeat(27)));
    assert_eq!(owner(&below, &wide), None);
    let fitting = name(&format!("{label}.{label}.{label}.{}", "w".repeat(26)));
    let below = name(&format!("{}.{fitting}", "v".repeat(33)));
    assert!(owner(&below, &fitting).is_some_and(|owner| owner.is_within(&fitting)));
}

#[test]
fn older_owner_records_have_no_type() {
    for (affixes, record, expected) in [
        (("", "", ""), "www.example.org", Some("www.example.org")),
        (
            ("txt.", "", ""),
            "www.example.org",
            Some("txt.www.example.org"),
        ),
        (
            ("", "-own", ""),
            "www.example.org",
            Some("www-own.example.org"),
        ),
        (("", "", "any"), "*.example.org", Some("any.example.org")),
        (
            ("%{record_type}-own.", "", ""),
            "www.example.org",
            Some("-own.www.example.org"),
        ),
    ] {
        let (prefix, suffix, wildcard) = affixes;
        let found = mapper(prefix, suffix, wildcard).old_owner_name(&name(record));
        assert_eq!(found, expected.map(name), "{affixes:?}");
    }
    let label = "x".repeat(62);
    let long = mapper("", "-own", "").old_owner_name(&name(&format!("{label}.example.org")));
    assert_eq!(long, None);
}

#[test]
fn owner_records_identify_their_records() {
    use RecordType as Type;
    for (affixes, owner, expected) in [
        (
            ("", ""),
            "a-www.example.org",
            Some(("www.example.org", Some(Type::A))),
        ),
        (
            ("", ""),
            "aaaa-www.example.org",
            Some(("www.example.org", Some(Type::AAAA))),
        ),
        (
            ("", ""),
            "cname-www.example.org",
            Some(("www.example.org", Some(Type::CNAME))),
        ),
        (
            ("", ""),
            "ns-www.example.org",
            Some(("www.example.org", Some(Type::NS))),
        ),
        (
            ("", ""),
            "mx-www.example.org",
            Some(("www.example.org", Some(Type::MX))),
        ),
        (
            ("", ""),
            "srv-www.example.org",
            Some(("www.example.org", Some(Type::SRV))),
        ),
        (
            ("", ""),
            "naptr-www.example.org",
            Some(("www.example.org", Some(Type::NAPTR))),
        ),
        // external-dns does not know these.
        (
            ("", ""),
            "txt-www.example.org",
            Some(("txt-www.example.org", None)),
        ),
        (
            ("", ""),
            "ptr-www.example.org",
            Some(("ptr-www.example.org", None)),
        ),
        (("", ""), "www.example.org", Some(("www.example.org", None))),
        (
            ("txt.", ""),
            "txt.a-www.example.org",
            Some(("www.example.org", Some(Type::A))),
        ),
        (("txt.", ""), "a-www.example.org", None),
        (
            ("", "-own"),
            "a-www-own.example.org",
            Some(("www.example.org", Some(Type::A))),
        ),
        (("", "-own"), "a-www-own", Some(("www", Some(Type::A)))),
        (("", "-own"), "a-www.example.org", None),
        (("", "-own"), "a-www.example-own.org", None),
        (
            ("", ".own"),
            "a-www.own.example.org",
            Some(("www.example.org", Some(Type::A))),
        ),
        (("", ".own"), "a-www.own", Some(("www", Some(Type::A)))),
        (
            ("%{record_type}-own.", ""),
            "a-own.www.example.org",
            Some(("www.example.org", Some(Type::A))),
        ),
        (
            ("%{record_type}-own.", ""),
            "aaaa-own.www.example.org",
            Some(("www.example.org", Some(Type::AAAA))),
        ),
        (
            ("%{record_type}-own.", ""),
            "-own.www.example.org",
            Some(("www.example.org", None)),
        ),
        (
            ("", "-%{record_type}"),
            "www-mx.example.org",
            Some(("www.example.org", Some(Type::MX))),
        ),
    ] {
        let found = mapper(affixes.0, affixes.1, "").record_of(&name(owner));
        let expected = expected.map(|(record, record_type)| (record.to_owned(), record_type));
        assert_eq!(found, expected, "{affixes:?} {owner}");
    }
}

#[test]
fn owner_texts_are_recognized() {
    for (text, expected) in [
        (
            "heritage=external-dns,external-dns/owner=me,external-dns/resource=crd/shop/one",
            Some(&[("owner", "me"), ("resource", "crd/shop/one")][..]),
        ),
        (
            "\"heritage=external-dns,external-dns/owner=me\"",
            Some(&[("owner", "me")]),
        ),
        (
            "external-dns/owner=me,heritage=external-dns",
            Some(&[("owner", "me")]),
        ),
        ("heritage=external-dns", Some(&[])),
        (
            "heritage=external-dns,external-dns/x=a=b,external-dnsy=1,other=2,word",
            Some(&[("external-dnsy", "1"), ("x", "a=b")]),
        ),
        (
            "heritage=external-dns,external-dns/owner=a,external-dns/owner=b",
            Some(&[("owner", "b")]),
        ),
        ("heritage=other,external-dns/owner=me", None),
        ("heritage=external-dns,heritage=other", None),
        ("external-dns/owner=me", None),
        ("v=spf1 -all", None),
        ("", None),
    ] {
        let expected = expected.map(|labels| {
            let mut found = Labels::default();
            for (label, value) in labels {
                found.0.insert((*label).to_owned(), (*value).to_owned());
            }
            found
        });
        assert_eq!(parse_labels(text), expected, "{text}");
    }
    let labels = Labels::of("me", "crd/shop/one");
    let text = "heritage=external-dns,external-dns/owner=me,external-dns/resource=crd/shop/one";
    assert_eq!(write_labels(&labels), text);
    assert_eq!(write_labels(&Labels::default()), "heritage=external-dns");
}

#[test]
fn separators_are_refused_in_labels() {
    for text in ["", "me", "a b", "crd/shop/one", "a=b", "~!'*"] {
        assert_eq!(check_value(text), Ok(()), "{text}");
    }
    for (text, character) in [
        ("a,b", "','"),
        ("a\"", "'\"'"),
        ("a\\b", "'\\\\'"),
        ("a\n", "'\\n'"),
        ("a\u{7f}", "'\\u{7f}'"),
        ("é", "'é'"),
    ] {
        assert_eq!(
            check_value(text).unwrap_err().to_string(),
            format!(
                "owner or resource {text:?} contains {character}, which separates labels; choose another text"
            )
        );
    }
}

fn read(records: &[Record]) -> View {
    Registry::default().read(&apex(), records.to_vec())
}

/// Returns the records of a view as `record of owner`, and its notes.
fn shown(view: &View) -> (Vec<String>, Vec<String>) {
    let mut records = Vec::new();
    for record in &view.records {
        records.push(format!("{record} of {:?}", record.labels.owner()));
    }
    (
        records,
        view.notes.iter().map(ToString::to_string).collect(),
    )
}

const OWN: &str = "heritage=external-dns,external-dns/owner=me";

#[test]
fn records_have_adjacent_owners() {
    let view = read(&[
        set("www.example.org A 192.0.2.1"),
        set("www.example.org AAAA 2001:db8::1"),
        set(&format!("a-www.example.org TXT {OWN}|a note")),
        set("free.example.org A 192.0.2.2"),
    ]);
    let (records, notes) = shown(&view);
    assert_eq!(
        records,
        [
            "www.example.org 60 A 192.0.2.1 of \"me\"",
            "www.example.org 60 AAAA 2001:db8::1 of \"\"",
            "a-www.example.org 60 TXT a note of \"\"",
            "free.example.org 60 A 192.0.2.2 of \"\"",
        ]
    );
    assert_eq!((notes.len(), view.orphans.len()), (0, 0));
    assert_eq!(view.apex, apex());
    for (at, record_type, expected) in [
        ("www.example.org", RecordType::A, true),
        ("www.example.org", RecordType::MX, false),
        ("a-www.example.org", RecordType::TXT, true),
        ("example.org", RecordType::A, false),
        ("x.example.org", RecordType::A, false),
    ] {
        assert_eq!(view.has(&name(at), record_type), expected, "{at}");
    }
}

#[test]
fn earlier_owner_forms_are_read() {
    // Without a type, at the name itself: of all but AAAA and TXT.
    let view = read(&[
        set("old.example.org A 192.0.2.1"),
        set("old.example.org AAAA 2001:db8::1"),
        set("old.example.org MX 10 mail.example.org"),
        set(&format!("old.example.org TXT {OWN}|a note")),
    ]);
    assert_eq!(
        shown(&view).0,
        [
            "old.example.org 60 A 192.0.2.1 of \"me\"",
            "old.example.org 60 AAAA 2001:db8::1 of \"\"",
            "old.example.org 60 MX 10 mail.example.org of \"me\"",
            "old.example.org 60 TXT a note of \"\"",
        ]
    );
    assert_eq!(shown(&view).1, [] as [&str; 0]);
    // Of an alias of Route 53, under the type CNAME.
    let mut alias = set("lb.example.org A 192.0.2.1");
    let owner = set(&format!("cname-lb.example.org TXT {OWN}"));
    for (property, expected) in [("true", "me"), ("false", ""), ("", "")] {
        alias.set_property("alias", property);
        let view = read(&[alias.clone(), owner.clone()]);
        assert_eq!(view.records[0].labels.owner(), expected, "{property}");
    }
    let mut six = set("lb.example.org AAAA 2001:db8::1");
    six.set_property("alias", "true");
    assert_eq!(read(&[six, owner]).records[0].labels.owner(), "");
}

#[test]
fn foreign_earlier_owner_is_an_orphan() {
    let theirs = "heritage=external-dns,external-dns/owner=you";
    for (text, orphans) in [(OWN, 0), (theirs, 1)] {
        let view = read(&[
            set("www.example.org A 192.0.2.1"),
            set(&format!("a-www.example.org TXT {OWN}")),
            set(&format!("www.example.org TXT {text}")),
        ]);
        assert_eq!(view.records[0].labels.owner(), "me");
        assert_eq!(
            (view.orphans.len(), view.notes.len()),
            (orphans, orphans),
            "{text}"
        );
    }
}

#[test]
fn shared_owner_record_owns_nothing() {
    // `a-team` is the owner record of `team`, and in the older form the one of `a-team`.
    let records = [
        set("a-team.example.org A 192.0.2.1"),
        set("team.example.org A 192.0.2.2"),
        set(&format!("a-team.example.org TXT {OWN}")),
    ];
    let (found, notes) = shown(&read(&records));
    assert_eq!(
        found,
        [
            "a-team.example.org 60 A 192.0.2.1 of \"\"",
            "team.example.org 60 A 192.0.2.2 of \"\"",
        ]
    );
    let text = "its owner record also matches another record; neither changes until `adopt` names the owner";
    assert_eq!(
        notes,
        [
            format!("a-team.example.org A: {text}"),
            format!("team.example.org A: {text}")
        ]
    );
    // With an owner record of its own, the first one is not in question.
    let own = set(&format!("a-a-team.example.org TXT {OWN}"));
    let (found, notes) = shown(&read(&[&records[..], &[own]].concat()));
    assert_eq!(
        found,
        [
            "a-team.example.org 60 A 192.0.2.1 of \"me\"",
            "team.example.org 60 A 192.0.2.2 of \"me\"",
        ]
    );
    assert_eq!(notes, [] as [&str; 0]);
}

#[test]
fn orphans_are_noted_in_order() {
    let view = read(&[
        set(&format!(
            "cname-z.example.org TXT {OWN}|heritage=external-dns,external-dns/owner=another"
        )),
        set(&format!("a-b.example.org TXT {OWN}")),
    ]);
    let orphans: Vec<String> = view
        .orphans
        .iter()
        .map(|orphan| format!("{} {}", orphan.name, orphan.labels.owner()))
        .collect();
    assert_eq!(
        orphans,
        [
            "a-b.example.org me",
            "cname-z.example.org another",
            "cname-z.example.org me"
        ]
    );
    assert_eq!(view.records, []);
    assert_eq!(view.notes.len(), 3);
    assert_eq!(
        view.notes[0].to_string(),
        "a-b.example.org TXT: the owner record of owner \"me\" has no record; if its publisher is gone, \
         `retire --orphans=me` deletes it"
    );
}

/// Returns the steps of the transaction of a change on a zone.
fn steps_of(registry: &Registry, zone: &[Record], change: &NameChange) -> Vec<String> {
    let view = registry.read(&apex(), zone.to_vec());
    let transaction = registry.transaction(&view, change).unwrap();
    assert_eq!(transaction.name, change.name);
    let mut shown = Vec::new();
    for step in &transaction.steps {
        shown.push(match step {
            Step::Create(record) => format!("+ {record}"),
            Step::Replace { before, after } => format!("~ {before} > {after}"),
            Step::Delete(record) => format!("- {record}"),
            Step::Require(record) => format!("= {record}"),
            Step::RequireAbsent(name, record_type) => format!("! {name} {record_type}"),
        });
    }
    shown
}

fn change(actions: Vec<Action>) -> NameChange {
    NameChange {
        name: actions[0].record().name.clone(),
        actions,
    }
}

fn steps(zone: &[Record], actions: Vec<Action>) -> Vec<String> {
    steps_of(&Registry::default(), zone, &change(actions))
}

#[test]
fn new_records_include_owner_records() {
    let www = owned("www.example.org A 192.0.2.1", "me", "r");
    let text = format!("{OWN},external-dns/resource=r");
    let created = [
        "! www.example.org CNAME".to_owned(),
        format!("+ a-www.example.org 60 TXT {text}"),
        "+ www.example.org 60 A 192.0.2.1".to_owned(),
    ];
    assert_eq!(steps(&[], vec![Action::Create(www.clone())]), created);
    // Without ownership, there is no owner record.
    assert_eq!(
        steps(
            &[],
            vec![Action::Create(set("www.example.org A 192.0.2.1"))]
        ),
        [
            "! a-www.example.org TXT",
            "! www.example.org CNAME",
            "+ www.example.org 60 A 192.0.2.1"
        ]
    );
    // The own text without a record is taken over, and other texts stay.
    let orphan = set(&format!("a-www.example.org TXT {OWN}|a note"));
    assert_eq!(
        steps(std::slice::from_ref(&orphan), vec![Action::Create(www)]),
        [
            "! www.example.org CNAME".to_owned(),
            format!("~ {orphan} > a-www.example.org 60 TXT a note,{text}"),
            "+ www.example.org 60 A 192.0.2.1".to_owned(),
        ]
    );
    let alias = owned("www.example.org CNAME b.example.net", "me", "");
    assert_eq!(
        steps(&[], vec![Action::Create(alias)]),
        [
            "! www.example.org A".to_owned(),
            "! www.example.org AAAA".to_owned(),
            "! www.example.org MX".to_owned(),
            "! www.example.org NAPTR".to_owned(),
            "! www.example.org NS".to_owned(),
            "! www.example.org PTR".to_owned(),
            "! www.example.org SRV".to_owned(),
            "! www.example.org TXT".to_owned(),
            format!("+ cname-www.example.org 60 TXT {OWN}"),
            "+ www.example.org 60 CNAME b.example.net".to_owned(),
        ]
    );
}

fn update(before: &Record, line: &str) -> Action {
    let after = Record {
        labels: before.labels.clone(),
        ..set(line)
    };
    Action::Update {
        before: before.clone(),
        after,
    }
}

#[test]
fn updates_require_listed_records() {
    let listed = set("www.example.org A 192.0.2.1");
    let text = set(&format!("a-www.example.org TXT {OWN}"));
    let zone = [listed.clone(), text.clone()];
    let before = owned("www.example.org A 192.0.2.1", "me", "");
    assert_eq!(
        steps(&zone, vec![update(&before, "www.example.org A 192.0.2.2")]),
        [
            format!("= {text}"),
            format!("~ {listed} > www.example.org 60 A 192.0.2.2"),
        ]
    );
    // A wanted set without a TTL keeps the one that it has, and is not written for its sake.
    let with_ttl = |ttl: Option<u32>, target: &str| {
        let mut after = owned(&format!("www.example.org A {target}"), "me", "");
        after.ttl = ttl;
        let before = before.clone();
        steps(&zone, vec![Action::Update { before, after }])
    };
    let unchanged = [format!("= {text}"), format!("= {listed}")];
    assert_eq!(with_ttl(None, "192.0.2.1"), unchanged);
    assert_eq!(with_ttl(Some(60), "192.0.2.1"), unchanged);
    assert_eq!(
        with_ttl(Some(61), "192.0.2.1")[1],
        format!("~ {listed} > www.example.org 61 A 192.0.2.1")
    );
    assert_eq!(
        with_ttl(None, "192.0.2.9")[1],
        format!("~ {listed} > www.example.org 60 A 192.0.2.9")
    );
    let mut weighed = before.clone();
    weighed.set_property("aws/weight", "1");
    let changed = Action::Update {
        before: before.clone(),
        after: weighed,
    };
    assert_eq!(
        steps(&zone, vec![changed])[1],
        format!("~ {listed} > {listed}")
    );
    // Only the owner changes.
    let moved = transfer([&before], "you").changes.remove(0);
    assert_eq!(
        steps_of(&Registry::default(), &zone, &moved),
        [
            format!("= {listed}"),
            format!(
                "~ {text} > a-www.example.org 60 TXT heritage=external-dns,external-dns/owner=you"
            ),
        ]
    );
}

#[test]
fn foreign_texts_survive_changes() {
    let listed = set(&format!("cname-t.example.org TXT {OWN}|a note"));
    // The record set without the owner text, as a view has it.
    let note = owned("cname-t.example.org TXT a note", "me", "");
    let owner = set(&format!("txt-cname-t.example.org TXT {OWN}"));
    let alias = set("t.example.org CNAME b.example.net");
    let zone = [listed.clone(), owner.clone(), alias.clone()];
    assert_eq!(
        steps(&zone, vec![update(&note, "cname-t.example.org TXT a memo")]),
        [
            format!("= {owner}"),
            format!("~ {listed} > cname-t.example.org 60 TXT a memo,{OWN}"),
        ]
    );
    assert_eq!(
        steps(&zone, vec![Action::Delete(note)]),
        [
            format!("- {owner}"),
            format!("~ {listed} > cname-t.example.org 60 TXT {OWN}"),
        ]
    );
    let owned_alias = owned("t.example.org CNAME b.example.net", "me", "");
    assert_eq!(
        steps(&zone, vec![Action::Delete(owned_alias.clone())]),
        [
            format!("- {alias}"),
            format!("~ {listed} > cname-t.example.org 60 TXT a note"),
        ]
    );
    assert_eq!(
        steps(&zone, vec![Action::Release(owned_alias)]),
        [
            format!("= {alias}"),
            format!("~ {listed} > cname-t.example.org 60 TXT a note"),
        ]
    );
}

#[test]
fn deletions_take_the_owner_record_along() {
    let listed = set("www.example.org A 192.0.2.1");
    let text = set(&format!("a-www.example.org TXT {OWN}"));
    let zone = [listed.clone(), text.clone()];
    let own = owned("www.example.org A 192.0.2.1", "me", "");
    let retired = retire([&own], "me").changes.remove(0);
    assert_eq!(
        steps_of(&Registry::default(), &zone, &retired),
        [format!("- {text}"), format!("- {listed}")]
    );
    assert_eq!(
        steps(&zone, vec![Action::Release(own)]),
        [format!("= {listed}"), format!("- {text}")]
    );
    // A record without an owner has no owner record to delete.
    assert_eq!(
        steps(
            &zone,
            vec![Action::Delete(set("www.example.org A 192.0.2.1"))]
        ),
        [format!("- {listed}")]
    );
}

#[test]
fn orphan_removal_respects_new_records() {
    let text = set(&format!("a-gone.example.org TXT {OWN}|a note"));
    let view = read(std::slice::from_ref(&text));
    let dropped = vec![Action::DropOrphan(view.orphans[0].clone())];
    assert_eq!(
        steps(std::slice::from_ref(&text), dropped.clone()),
        [
            "! a-gone.example.org A",
            "! a-gone.example.org CNAME",
            "! a-gone.example.org AAAA",
            "! gone.example.org A",
            &format!("~ {text} > a-gone.example.org 60 TXT a note"),
        ]
    );
    // A record that is there now is required as it is; the provider compares it.
    let came = set("gone.example.org A 192.0.2.1");
    let zone = [text, came.clone()];
    assert!(steps(&zone, dropped).contains(&format!("= {came}")));
    // A name beside the zone is none of its records.
    let outside = Registry {
        mapper: mapper("", ".own.example.org", ""),
        cipher: None,
    };
    let text = set(&format!("a-org.own.example.org TXT {OWN}"));
    let view = outside.read(&apex(), vec![text.clone()]);
    let dropped = change(vec![Action::DropOrphan(view.orphans[0].clone())]);
    assert_eq!(
        steps_of(&outside, std::slice::from_ref(&text), &dropped),
        [
            "! a-org.own.example.org A".to_owned(),
            "! a-org.own.example.org CNAME".to_owned(),
            "! a-org.own.example.org AAAA".to_owned(),
            format!("- {text}"),
        ]
    );
}

#[test]
fn changed_names_get_current_owners() {
    let address = set("old.example.org A 192.0.2.1");
    let mail = set("old.example.org MX 10 m.example.org");
    let text = set(&format!("old.example.org TXT {OWN}"));
    let other = set("other.example.org A 192.0.2.7");
    let zone = [
        address.clone(),
        mail.clone(),
        text.clone(),
        other,
        set(&format!("other.example.org TXT {OWN}")),
    ];
    let before = owned("old.example.org A 192.0.2.1", "me", "");
    assert_eq!(
        steps(&zone, vec![update(&before, "old.example.org A 192.0.2.2")]),
        [
            format!("= {mail}"),
            format!("- {text}"),
            format!("~ {address} > old.example.org 60 A 192.0.2.2"),
            format!("+ a-old.example.org 60 TXT {OWN}"),
            format!("+ mx-old.example.org 60 TXT {OWN}"),
        ]
    );
}

fn error(zone: &[Record], record: &Record) -> String {
    let registry = Registry::default();
    let view = registry.read(&record.name.parent().unwrap(), zone.to_vec());
    let created = change(vec![Action::Create(record.clone())]);
    registry
        .transaction(&view, &created)
        .unwrap_err()
        .to_string()
}

#[test]
fn refusals_name_record_and_remedy() {
    let theirs = set("a-www.example.org TXT heritage=external-dns,external-dns/owner=you");
    assert_eq!(
        error(&[theirs], &owned("www.example.org A 192.0.2.1", "me", "")),
        "www.example.org: the owner record a-www.example.org belongs to \"you\" and has no record; if that publisher \
         is gone, delete it with `retire --orphans=you`"
    );
    assert_eq!(
        error(&[], &owned("www.example.org A 192.0.2.1", "a,b", "")),
        "owner or resource \"a,b\" contains ',', which separates labels; choose another text"
    );
    let label = "x".repeat(63);
    let long = format!(
        "{}.{label}.{label}.{label}.{}",
        "v".repeat(27),
        "w".repeat(32)
    );
    assert_eq!(
        error(&[], &owned(&format!("{long} A 192.0.2.1"), "me", "")),
        format!(
            "{long}: the name of its owner record exceeds 255 octets; use a shorter name or txt-prefix"
        )
    );
    let collision = OwnershipError::Collision {
        name: name("www.example.org"),
        at: name("a-www.example.org"),
    };
    assert_eq!(
        collision.to_string(),
        "www.example.org: a-www.example.org would hold a CNAME and an owner record; choose another name, or set \
         txt-prefix"
    );
    assert_eq!(
        OwnershipError::Cipher.to_string(),
        "cannot encrypt an owner record: no random numbers"
    );
}

/// Removes the collisions of new records. Returns the names that remain, and the others with their places.
fn collisions(zone: &[Record], actions: &[Action]) -> (Vec<String>, Vec<String>) {
    let registry = Registry::default();
    let view = read(zone);
    let mut transactions = Vec::new();
    for action in actions {
        let change = change(vec![action.clone()]);
        transactions.push(registry.transaction(&view, &change).unwrap());
    }
    let mut removed = Vec::new();
    for (name, error) in remove_collisions(&view, &mut transactions) {
        let OwnershipError::Collision { name: named, at } = error else {
            panic!("{error}")
        };
        assert_eq!(named, name);
        removed.push(format!("{name} at {at}"));
    }
    let left = transactions
        .iter()
        .map(|one| one.name.to_string())
        .collect();
    (left, removed)
}

#[test]
fn owner_records_and_aliases_never_meet() {
    let www = Action::Create(owned("www.example.org A 192.0.2.1", "me", ""));
    let meeting = Action::Create(owned("a-www.example.org CNAME b.example.net", "me", ""));
    let other = Action::Create(owned("b.example.org CNAME b.example.net", "me", ""));
    // The owner record wins over a new CNAME.
    let (left, removed) = collisions(&[], &[www.clone(), meeting.clone(), other.clone()]);
    assert_eq!(left, ["www.example.org", "b.example.org"]);
    assert_eq!(removed, ["a-www.example.org at a-www.example.org"]);
    // An existing CNAME over a new owner record.
    let alias = set("a-www.example.org CNAME b.example.net");
    let (left, removed) = collisions(&[alias], &[www.clone(), other.clone()]);
    assert_eq!(left, ["b.example.org"]);
    assert_eq!(removed, ["www.example.org at a-www.example.org"]);
    // An existing text over a new CNAME.
    let text = set("a-www.example.org TXT a note");
    let (left, removed) = collisions(std::slice::from_ref(&text), &[meeting, other]);
    assert_eq!(left, ["b.example.org"]);
    assert_eq!(removed, ["a-www.example.org at a-www.example.org"]);
    // Neither is in the way if the same transaction deletes it.
    let view = read(std::slice::from_ref(&text));
    let mut replaced = vec![Transaction {
        name: name("a-www.example.org"),
        steps: vec![
            Step::Delete(text),
            Step::Create(set("a-www.example.org CNAME b.example.net")),
        ],
    }];
    assert_eq!(remove_collisions(&view, &mut replaced), []);
    assert_eq!(replaced.len(), 1);
    let alias = set("a-www.example.org CNAME b.example.net");
    let view = read(std::slice::from_ref(&alias));
    let mut replaced = vec![Transaction {
        name: name("a-www.example.org"),
        steps: vec![
            Step::Delete(alias),
            Step::Create(set("a-www.example.org TXT a note")),
        ],
    }];
    assert_eq!(remove_collisions(&view, &mut replaced), []);
    // The deletion of another set is not enough.
    let alias = set("a-www.example.org CNAME b.example.net");
    let view = read(&[alias]);
    let mut beside = vec![Transaction {
        name: name("a-www.example.org"),
        steps: vec![
            Step::Delete(set("a-www.example.org A 192.0.2.1")),
            Step::Delete(set("b.example.org CNAME b.example.net")),
            Step::Create(set("a-www.example.org TXT a note")),
        ],
    }];
    assert_eq!(remove_collisions(&view, &mut beside).len(), 1);
    assert_eq!(beside, []);
}

#[test]
fn owner_records_share_routing() {
    let mut record = owned("www.example.org A 192.0.2.1", "me", "");
    record.set_identifier = "eu".to_owned();
    for (property, value) in [
        ("alias", "true"),
        ("aws/evaluate-target-health", "true"),
        ("aws/target-hosted-zone", "Z1"),
        ("aws/weight", "10"),
    ] {
        record.set_property(property, value);
    }
    let registry = Registry::default();
    let created = change(vec![Action::Create(record)]);
    let transaction = registry.transaction(&read(&[]), &created).unwrap();
    let text = transaction
        .steps
        .iter()
        .find_map(|step| match step {
            Step::Create(record) if record.record_type == RecordType::TXT => Some(record),
            _ => None,
        })
        .unwrap();
    assert_eq!(
        text.to_string(),
        format!("a-www.example.org 60 TXT {OWN} set=eu")
    );
    let properties = BTreeMap::from([("aws/weight".to_owned(), "10".to_owned())]);
    assert_eq!(text.properties, properties);
    // Owner texts under another identifier are another record's.
    let listed = Record {
        set_identifier: "us".to_owned(),
        ..text.clone()
    };
    let mut address = set("www.example.org A 192.0.2.1");
    address.set_identifier = "eu".to_owned();
    let view = read(&[listed, address]);
    assert_eq!(view.records[0].labels.owner(), "");
    assert_eq!(view.orphans[0].set_identifier, "us");
}

#[test]
fn encrypted_owner_records_are_kept() {
    let cipher = Cipher::new(&"k".repeat(Cipher::KEY_LEN)).unwrap();
    let sealed = cipher.encrypt(OWN).unwrap();
    let registry = Registry {
        mapper: Mapper::default(),
        cipher: Some(cipher),
    };
    assert_eq!(registry.parse(&sealed), Some(Labels::of("me", "")));
    assert_eq!(
        registry.parse(OWN),
        Some(Labels::of("me", "")),
        "from before"
    );
    assert_eq!(registry.parse("a note"), None);
    assert_eq!(Registry::default().parse(&sealed), None);
    let listed = set("www.example.org A 192.0.2.1");
    let text = set(&format!("a-www.example.org TXT {sealed}"));
    let before = owned("www.example.org A 192.0.2.1", "me", "");
    let updated = change(vec![update(&before, "www.example.org A 192.0.2.2")]);
    assert_eq!(
        steps_of(&registry, &[listed.clone(), text.clone()], &updated),
        [
            format!("= {text}"),
            format!("~ {listed} > www.example.org 60 A 192.0.2.2"),
        ]
    );
    // A new one is encrypted as well.
    let created = change(vec![Action::Create(before)]);
    let steps = steps_of(&registry, &[], &created);
    let (_, value) = steps[1].split_once(" TXT ").unwrap();
    assert_eq!(registry.parse(value), Some(Labels::of("me", "")));
    assert_eq!(parse_labels(value), None, "{value}");
}
