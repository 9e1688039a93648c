//! Names, types, targets and their texts, at their limits.

use std::collections::BTreeSet;

use dns_publish::{
    ownership::Cipher,
    plan::{Action, Note, Plan, PlanRules, Policy, Reason, drop_orphans, retire, transfer},
    provider::{Parameters, ProviderError},
    record::{DomainFilter, Key, Labels, Name, Record, RecordType, Target},
};

fn name(text: &str) -> Name {
    Name::parse(text).unwrap()
}

fn record(owner: &str, record_type: RecordType, targets: &[&str]) -> Record {
    let mut record = Record::parse("a.example.org", record_type, targets.iter().copied()).unwrap();
    record.labels = Labels::of(owner, "");
    record
}

#[test]
fn names_have_one_form() {
    for (text, expected) in [
        ("A.Example.ORG.", "a.example.org"),
        (" a ", "a"),
        (".", "."),
        (r"a\.b.c", r"a\.b.c"),
        (r"\065\098", "ab"),
        (r"x\255\000", r"x\255\000"),
        (r"a\;b\@c", r"a\;b\@c"),
        ("a(b)$", r"a\(b\)\$"),
    ] {
        assert_eq!(name(text).as_str(), expected, "{text}");
        assert_eq!(name(name(text).as_str()), name(text));
    }
    let longest = "a".repeat(63);
    let name_of = |labels: usize, rest: usize| {
        let labels = vec!["a".repeat(63); labels].join(".");
        format!("{labels}.{}", "b".repeat(rest))
    };
    assert!(Name::parse(&longest).is_ok() && Name::parse(&name_of(3, 61)).is_ok());
    for (text, problem) in [
        (longest + "a", "a label has 64 octets"),
        (name_of(3, 62), "it takes 256 octets on the wire"),
        ("a..b".to_owned(), "empty label"),
        (".a".to_owned(), "empty label"),
        (String::new(), "empty label"),
        ("a b".to_owned(), "a space or a character"),
        ("ä".to_owned(), "a space or a character"),
        (r"a\".to_owned(), "a backslash is followed by"),
        (r"a\25".to_owned(), "a backslash is followed by"),
        (r"a\256".to_owned(), "a backslash is followed by"),
        (r"a\ b".to_owned(), "a backslash is followed by"),
    ] {
        let error = Name::parse(&text).unwrap_err().to_string();
        assert!(
            error.contains(problem) && error.contains("is not a domain name"),
            "{text}: {error}"
        );
    }
}

#[test]
fn names_lie_below_others() {
    let root = Name::root();
    assert!(root.is_root() && !name("a").is_root() && root.parent().is_none());
    assert_eq!(root.labels().count(), 0);
    let text = r"x\.y.a.b";
    assert_eq!(name(text).labels().collect::<Vec<_>>(), [r"x\.y", "a", "b"]);
    assert_eq!(name(text).raw_labels().next().unwrap(), b"x.y");
    assert_eq!(name(text).parent(), Some(name("a.b")));
    assert_eq!(name("b").parent(), Some(root.clone()));
    for (below, zone, expected) in [
        ("a.b", "b", true),
        ("b", "b", true),
        ("b", ".", true),
        (".", ".", true),
        (".", "b", false),
        ("ab", "b", false),
        ("b", "a.b", false),
        (r"a\.b", "b", false),
        (r"a\\.b", "b", true),
    ] {
        assert_eq!(
            name(below).is_within(&name(zone)),
            expected,
            "{below} {zone}"
        );
    }
}

#[test]
fn types_have_names_and_numbers() {
    for (text, number, shown) in [
        ("a", 1, "A"),
        (" Cname ", 5, "CNAME"),
        ("TYPE28", 28, "AAAA"),
        ("type65280", 65280, "TYPE65280"),
        ("NAPTR", 35, "NAPTR"),
    ] {
        let parsed: RecordType = text.parse().unwrap();
        assert_eq!((parsed.0, parsed.to_string()), (number, shown.to_owned()));
    }
    assert_eq!(format!("[{:6}]", RecordType::A), "[A     ]");
    for text in ["TYPE", "TYPE65536", "X", ""] {
        assert!(text.parse::<RecordType>().is_err(), "{text}");
    }
    for (record_type, is_alias, is_address) in [
        (RecordType::A, false, true),
        (RecordType::AAAA, false, true),
        (RecordType::CNAME, true, false),
        (RecordType::DNAME, true, false),
        (RecordType::TXT, false, false),
    ] {
        assert_eq!(
            (record_type.is_alias(), record_type.is_address()),
            (is_alias, is_address)
        );
    }
}

#[test]
fn targets_have_one_form() {
    for (record_type, text, expected) in [
        (RecordType::A, " 192.0.2.1 ", Some("192.0.2.1")),
        (RecordType::A, "::1", None),
        (RecordType::AAAA, "2001:DB8:0::1", Some("2001:db8::1")),
        (RecordType::AAAA, "192.0.2.1", None),
        (RecordType::CNAME, "B.Example.org.", Some("b.example.org")),
        (RecordType::NS, "a..b", None),
        (RecordType::TXT, r#""a" "b""#, Some("ab")),
        (RecordType::TXT, r#"plain "text""#, Some(r#"plain "text""#)),
        (RecordType::TXT, r#""\"\065\\""#, Some(r#""A\\"#)),
        (RecordType::TXT, r#""a"b""#, None),
        (RecordType::TXT, r#"""#, Some(r#"""#)),
        (RecordType::TXT, "a\tb", Some(r"a\009b")),
        (RecordType::MX, "010  Mail.", Some("10 mail")),
        (RecordType::MX, "65535 a", Some("65535 a")),
        (RecordType::MX, "65536 a", None),
        (RecordType::MX, "10", None),
        (RecordType::MX, "10 a b", None),
        (RecordType::SRV, "1 2 3 a.", Some("1 2 3 a")),
        (RecordType::SRV, "1 2 a.", None),
        (RecordType::SRV, "1 2 3", None),
        (
            RecordType::NAPTR,
            r#"1 2 "s" "x" "" a."#,
            Some(r#"1 2 "s" "x" "" a"#),
        ),
        (RecordType::NAPTR, r#"1 "s" "x" "" a."#, None),
        (RecordType::NAPTR, r#"1 2 "s" "x" a."#, None),
        (RecordType::NAPTR, r#"1 2 "s" "x" "" "#, None),
        (RecordType::NAPTR, "1 2 a", None),
        (RecordType(65280), r"\# 2 AB cd", Some(r"\# 2 abcd")),
        (RecordType(65280), r"\# 0", Some(r"\# 0")),
        (RecordType(65280), r"\# 2 ab", None),
        (RecordType(65280), r"\# 1 xy", None),
        (RecordType(65280), "2 abcd", None),
    ] {
        let found = Target::parse(record_type, text);
        let found = found.as_ref().map(Target::as_str);
        assert_eq!(found.ok(), expected, "{record_type} {text}");
    }
    let octets = b"a\\\x00\xff\x7f\xc3\xa4";
    assert_eq!(Target::text(octets).as_str(), r"a\\\000\255\127ä");
    assert_eq!(Target::text(octets).text_octets(), octets);
    let error = Target::parse(RecordType::A, "x").unwrap_err().to_string();
    assert_eq!(
        error,
        r#""x" is not valid data for a record of type A: it is not an IPv4 address"#
    );
}

#[test]
fn records_are_shown_in_a_line() {
    let mut addresses = record("", RecordType::A, &["192.0.2.2", "192.0.2.1"]);
    assert_eq!(
        addresses.to_string(),
        "a.example.org 0 A 192.0.2.1,192.0.2.2"
    );
    (addresses.ttl, addresses.set_identifier) = (Some(60), "eu".to_owned());
    assert_eq!(
        addresses.to_string(),
        "a.example.org 60 A 192.0.2.1,192.0.2.2 set=eu"
    );
    let key = Key {
        name: name("a.example.org"),
        set_identifier: "eu".to_owned(),
        record_type: RecordType::A,
    };
    assert_eq!(addresses.key(), key);
    let alias = |target: &str| record("", RecordType::CNAME, &[target]);
    assert!(alias("A.example.org.").is_self_alias() && !alias("b.example.org").is_self_alias());
    let two = Record::parse("a", RecordType::CNAME, ["b", "c"]).unwrap_err();
    assert!(
        two.to_string().contains("must have exactly one target"),
        "{two}"
    );
    assert!(Record::parse("a", RecordType::CNAME, ["b", "B."]).is_ok());
    let labels = Labels::of("me", "");
    assert_eq!(
        (labels.owner(), labels.resource(), labels.0.len()),
        ("me", "", 1)
    );
    assert_eq!(Labels::of("", "r").resource(), "r");
}

#[test]
fn actions_say_what_changes() {
    let before = record("me", RecordType::A, &["192.0.2.1"]);
    let shown = |change: fn(&mut Record)| {
        let mut after = before.clone();
        change(&mut after);
        let before = before.clone();
        Action::Update { before, after }.to_string()
    };
    let head = "~ a.example.org A: ";
    assert_eq!(
        shown(|after| after.ttl = Some(60)),
        format!("{head}ttl 0 -> 60")
    );
    let moved = shown(|after| {
        after.targets = BTreeSet::from([Target::parse(RecordType::A, "192.0.2.2").unwrap()]);
    });
    assert_eq!(moved, format!("{head}-192.0.2.1, +192.0.2.2"));
    let owner = shown(|after| after.labels = Labels::of("you", ""));
    assert_eq!(owner, format!("{head}owner \"me\" -> \"you\""));
    let none = shown(|after| after.labels = Labels::default());
    assert_eq!(none, format!("{head}owner \"me\" -> none"));
    let property = shown(|after| drop(after.properties.insert("k".to_owned(), "v".to_owned())));
    assert_eq!(
        property,
        format!("{head}properties {{}} -> {{\"k\": \"v\"}}")
    );
    let line = before.to_string();
    assert_eq!(shown(|_| {}), format!("~ {line} -> {line}"));
    for (action, expected) in [
        (Action::Create(before.clone()), format!("+ {line}")),
        (Action::Delete(before.clone()), format!("- {line}")),
        (
            Action::Release(before.clone()),
            format!("= {line}: remains without an owner"),
        ),
        (
            Action::DropOrphan(before.clone()),
            "- a.example.org A: owner record of \"me\"".to_owned(),
        ),
    ] {
        assert_eq!(action.to_string(), expected);
    }
    let note = Note {
        name: before.name.clone(),
        record_type: RecordType::A,
        reason: Reason::Foreign {
            owner: String::new(),
        },
    };
    assert!(
        note.to_string()
            .starts_with("a.example.org A: the name has a record of no owner;"),
        "{note}"
    );
}

#[test]
fn ownership_changes_hands() {
    let records = [
        record("me", RecordType::A, &["192.0.2.1"]),
        record("you", RecordType::AAAA, &["::1"]),
        record("", RecordType::TXT, &["x"]),
    ];
    let shown = |plan: Plan| -> Vec<String> {
        assert!(plan.changes.len() <= 1 && plan.notes.is_empty());
        assert_eq!(plan.is_empty(), plan.changes.is_empty());
        plan.actions()
            .map(|action| action.to_string()[..1].to_owned())
            .collect()
    };
    for (plan, expected) in [
        (transfer(&records, "me"), &["~", "~"][..]),
        (transfer(&records, ""), &["=", "="]),
        (transfer(&records[..1], "me"), &[]),
        (retire(&records, "me"), &["-"]),
        (retire(&records, ""), &[]),
        (retire(&records, "other"), &[]),
        (drop_orphans(&records, "you"), &["-"]),
        (drop_orphans(&records, ""), &["-"]),
    ] {
        assert_eq!(shown(plan), expected);
    }
    for (text, policy) in [
        ("sync", Some(Policy::Sync)),
        ("upsert-only", Some(Policy::UpsertOnly)),
        ("create-only", Some(Policy::CreateOnly)),
        ("Sync", None),
    ] {
        assert_eq!(Policy::named(text), policy);
    }
    let rules = PlanRules::of("me");
    assert_eq!(
        (rules.min_ttl, rules.creates_pointers, rules.policy),
        (0, false, Policy::Sync)
    );
}

#[test]
fn filters_take_suffixes() {
    for (include, exclude, asked, expected) in [
        (&[][..], &[][..], "x", true),
        (&["b"], &[], "a.b", true),
        (&["b"], &[], "b", true),
        (&["b"], &[], "ab", false),
        (&[".b"], &[], "b", false),
        (&[".b"], &[], "a.b", true),
        (&["b", "c"], &[], "c", true),
        (&["b"], &["a.b"], "x.a.b", false),
        (&["b"], &[".a.b"], "a.b", true),
        (&[], &["b"], "c", true),
    ] {
        let filter = DomainFilter::new(include.iter().copied(), exclude.iter().copied()).unwrap();
        assert_eq!(
            filter.matches(&name(asked)),
            expected,
            "{include:?} {exclude:?} {asked}"
        );
    }
    let filter = DomainFilter::new(["a.b"], []).unwrap();
    for (apex, expected) in [
        ("b", true),
        ("a.b", true),
        ("x.a.b", true),
        ("c.b", false),
        (".", true),
    ] {
        assert_eq!(filter.may_contain(&name(apex)), expected, "{apex}");
    }
    assert!(DomainFilter::default().may_contain(&name("x")));
    let pattern = filter.with_patterns(Some("x"), None).unwrap();
    assert!(pattern.may_contain(&name("c.b")) && pattern.overlaps(&DomainFilter::default(), &[]));
}

#[test]
fn parameters_are_read_by_kind() {
    let pairs = [
        ("text", " a "),
        ("empty", "  "),
        ("list", "a, ,b,"),
        ("yes", "true"),
        ("no", "false"),
        ("number", "7"),
        ("time", "1m"),
    ];
    let parameters = Parameters(
        pairs
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .into(),
    );
    let second = std::time::Duration::from_secs(1);
    assert_eq!(
        (
            parameters.text("text"),
            parameters.text("empty"),
            parameters.text("none")
        ),
        (Some("a"), None, None)
    );
    assert_eq!(
        (parameters.list("list"), parameters.list("none")),
        (vec!["a", "b"], vec![])
    );
    assert_eq!(parameters.path("text"), Some("a".into()));
    for (name, expected) in [
        ("yes", Some(true)),
        ("no", Some(false)),
        ("none", Some(false)),
        ("text", None),
    ] {
        assert_eq!(parameters.flag(name).ok(), expected, "{name}");
    }
    for (name, expected) in [("number", Some(7)), ("none", Some(9)), ("text", None)] {
        assert_eq!(parameters.number(name, 9).ok(), expected, "{name}");
    }
    for (name, ttl, duration) in [
        ("number", Some(7), None),
        ("time", Some(60), Some(60 * second)),
        ("none", Some(0), Some(9 * second)),
        ("text", None, None),
    ] {
        assert_eq!(parameters.ttl(name).ok(), ttl, "{name}");
        assert_eq!(
            parameters.duration(name, 9 * second).ok(),
            duration,
            "{name}"
        );
    }
    assert_eq!(parameters.required("text").unwrap(), "a");
    let missing: ProviderError = parameters.required("empty").unwrap_err();
    assert!(
        missing.to_string().contains("empty is missing"),
        "{missing}"
    );
}

#[test]
fn other_keys_do_not_decrypt() {
    let cipher = Cipher::new(&"k".repeat(32)).unwrap();
    let text = "heritage=external-dns,external-dns/owner=me";
    let sealed = cipher.encrypt(text).unwrap();
    assert_ne!(sealed, text);
    assert_eq!(cipher.decrypt(&sealed).as_deref(), Some(text));
    let other = Cipher::new(&"x".repeat(32)).unwrap();
    assert_eq!(other.decrypt(&sealed), None);
    for damaged in ["", "x", &sealed[1..], &sealed[..sealed.len() - 4]] {
        assert_eq!(cipher.decrypt(damaged), None, "{damaged}");
    }
}
