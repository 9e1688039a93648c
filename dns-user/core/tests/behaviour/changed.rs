//! Names that are listed, the differences between two snapshots, and names of addresses.

use std::{collections::BTreeSet, net::Ipv4Addr, ops::Range};

use dns_core::{
    catalog::{AliasFiles, IndexedRecords, Records, Snapshot},
    changes::{self, Changes, Facet},
    listing::published_names,
    name::Name,
    resolve::is_above_local,
};

use super::{fleet, name, row, snapshot_of};

const OLD: [(&str, u8, &str); 3] = [("a", 1, "web"), ("b", 2, "web"), ("c", 3, "db")];

fn texts<'n>(names: impl IntoIterator<Item = &'n Name>) -> Vec<String> {
    names.into_iter().map(ToString::to_string).collect()
}

#[test]
fn names_are_listed_once() {
    let rows = [
        row("a", 1, "web"),
        row("b", 2, "db"),
        row("q-b", 2, "db"),
        row("B.c", 4, "Db"),
    ];
    let snapshot = snapshot_of(&rows.each_ref().map(String::as_str), "");
    let names: Vec<_> = published_names(&snapshot).collect();
    let found: BTreeSet<String> = texts(&names).into_iter().collect();
    assert_eq!(found.len(), names.len());
    let expected = [
        "web.alias.",
        "fixed.alias.",
        "c.alias.",
        "a.any.alias.",
        "q-s0.q-g1.bosh.",
        "q-s0.q-g2.bosh.",
        "q-s0.web.net.dep.bosh.",
        "q-s0.db.net.dep.bosh.",
        "a.web.net.dep.bosh.",
        "b.db.net.dep.bosh.",
        "a.q-g1.bosh.",
        "b.q-g2.bosh.",
        "q-m1s0.q-g1.bosh.",
        "q-m2s0.q-g2.bosh.",
        "q-m4s0.q-g2.bosh.",
    ];
    // An id that looks like a filter, and texts that are no labels, have no names.
    assert_eq!(found, expected.map(str::to_owned).into());
}

#[test]
fn equal_snapshots_have_no_changes() {
    let old = fleet(&OLD);
    for new in [&old, &fleet(&OLD)] {
        let changes = changes::between(&old, new).unwrap();
        assert!(
            changes.is_empty() && !changes.concern(Facet::ANY),
            "{changes:?}"
        );
    }
    assert!(Changes::default().is_empty());
    let changed = Changes {
        renewed: vec![name("a")],
        ..Changes::default()
    };
    assert!(!changed.is_empty());
}

/// Returns the names that are new, gone, and possibly in both snapshots.
fn differences(old: &Snapshot, new: &Snapshot) -> [Vec<String>; 3] {
    let changes = changes::between(old, new).unwrap();
    assert!(!changes.is_empty() && changes.concern(Facet::ANY));
    [&changes.listed, &changes.unlisted, &changes.still_listed].map(texts)
}

#[test]
fn changed_rows_name_what_they_change() {
    let old = fleet(&OLD);
    let more = fleet(&[OLD[0], OLD[1], OLD[2], ("d", 4, "web")]);
    let of_d = [
        "d.any.alias.",
        "d.q-g1.bosh.",
        "d.web.net.dep.bosh.",
        "q-m4s0.q-g1.bosh.",
    ];
    let kept = ["q-s0.q-g1.bosh.", "q-s0.web.net.dep.bosh.", "web.alias."];
    let sorted = |names: [Vec<String>; 3]| {
        names.map(|mut names| {
            names.sort_unstable();
            names
        })
    };
    assert_eq!(
        sorted(differences(&old, &more)),
        [&of_d[..], &[], &kept].map(to_texts)
    );
    assert_eq!(
        sorted(differences(&more, &old)),
        [&kept[..0], &of_d, &kept].map(to_texts)
    );
    // Names of other groups share no facet with the change.
    let changes = changes::between(&old, &more).unwrap();
    let is_concerned = |text: &str| {
        changes::facets(&old, &name(text))
            .iter()
            .any(|&facet| changes.concern(facet))
    };
    for (text, expected) in [
        ("q-s0.q-g1.bosh", true),
        ("q-s0.web.net.dep.bosh", true),
        ("q-s0.we*.net.dep.bosh", true),
        ("q-m4s0.q-g1.bosh", true),
        ("d.web.net.dep.bosh", true),
        ("web.alias", true),
        ("agent-d.bosh-agent-id", true),
        ("q-s0.q-g2.bosh", false),
        ("q-s0.db.net.dep.bosh", false),
        ("q-m3s0.q-g2.bosh", false),
        ("c.db.net.dep.bosh", false),
        ("a.web.net.dep.bosh", false),
        ("fixed.alias", false),
        ("agent-a.bosh-agent-id", false),
    ] {
        assert_eq!(is_concerned(text), expected, "{text}");
    }
}

fn to_texts(names: &[&str]) -> Vec<String> {
    names.iter().map(|&name| name.to_owned()).collect()
}

#[test]
fn any_column_makes_a_row_differ() {
    let unchanged = row("a", 1, "web");
    let old = snapshot_of(&[&unchanged, &row("b", 2, "web")], "");
    for (from, to) in [
        (r#"["a""#, r#"["x""#),
        (r#""1", "web""#, r#""7", "web""#),
        (r#"["1"]"#, r#"["3"]"#),
        (r#"["1"]"#, r#"["1", "3"]"#),
        (r#""z1""#, r#""z9""#),
        (r#""z1""#, "null"),
        ("10.0.0.1", "10.0.0.8"),
        ("agent-a", "agent-x"),
        (", 1,", ", 5,"),
        (r#""web""#, r#""db""#),
        (r#""net""#, r#""other""#),
        (r#""dep""#, r#""other""#),
    ] {
        let changed = unchanged.replacen(from, to, 1);
        assert_ne!(changed, unchanged);
        let new = snapshot_of(&[&changed, &row("b", 2, "web")], "");
        for [old, new] in [[&old, &new], [&new, &old]] {
            let changes = changes::between(old, new).unwrap();
            assert!(changes.concern(Facet::ANY), "{from} {to}");
        }
    }
}

/// A fleet of instances with these numbers.
fn many(numbers: Range<usize>) -> Snapshot {
    with_other_rows(numbers, 0)
}

/// The same, of which the first rows have another id.
fn with_other_rows(numbers: Range<usize>, others: usize) -> Snapshot {
    let rows: Vec<String> = numbers
        .map(|number| match number < others {
            true => row(&format!("other{number}"), 1, "web"),
            false => row(&format!("i{number}"), 1, "web"),
        })
        .collect();
    snapshot_of(&rows.iter().map(String::as_str).collect::<Vec<_>>(), "")
}

#[test]
fn many_changes_are_not_compared() {
    // Each changed row counts twice; 256 changes, or an eighth of the rows, are compared.
    for (rows, most) in [(200, 128), (4096, 256)] {
        let old = many(0..rows);
        assert!(changes::between(&old, &with_other_rows(0..rows, most)).is_some());
        assert!(changes::between(&old, &with_other_rows(0..rows, most + 1)).is_none());
    }
}

#[test]
fn runs_of_rows_are_recognised() {
    let all = many(0..200);
    let later = many(64..200);
    // Instances list their long and short forms, and their alias.
    let [listed, unlisted, _] = differences(&all, &later);
    assert_eq!((listed.len(), unlisted.len()), (0, 3 * 64));
    let [listed, unlisted, _] = differences(&later, &all);
    assert_eq!((listed.len(), unlisted.len()), (3 * 64, 0));
    // From a longer run on, all rows differ.
    assert!(changes::between(&all, &many(65..200)).is_none());
}

#[test]
fn other_rules_and_aliases_change_everything() {
    let old = fleet(&OLD);
    let mut rules = old.rules();
    rules.formerr_for_malformed = !rules.formerr_for_malformed;
    assert!(changes::between(&old, &fleet(&OLD).with_rules(rules)).is_none());
    let other = snapshot_of(
        &[&row("a", 1, "web")],
        r#", "aliases": {"new.alias": [{"group_id": "1", "root_domain": "bosh"}]}"#,
    );
    assert!(changes::between(&old, &other).is_none());
}

#[test]
fn followed_files_tell_their_edits() {
    let file = |rows: &[(&str, u8, &str)]| {
        let rows: Vec<String> = rows
            .iter()
            .map(|(id, number, group)| row(id, *number, group))
            .collect();
        format!(
            r#"{{"record_keys": ["id", "num_id", "instance_group", "group_ids", "az", "network", "ip", "agent_id",
                "instance_index", "deployment", "domain"], "record_infos": [{}], "version": 7}}"#,
            rows.join(", ")
        )
    };
    let empty = IndexedRecords::from(Records::default());
    let (first, _) = empty.next(file(&OLD).as_bytes()).unwrap();
    let (again, _) = first.next(file(&OLD).as_bytes()).unwrap();
    assert!(again.equals_previous(&first) && !first.equals_previous(&empty));
    let replaced = [OLD[0], ("b", 9, "web"), OLD[2]];
    let next = first.follow(file(&replaced).as_bytes()).unwrap();
    assert!(!next.equals_previous(&first));
    let [old, new] =
        [first, next].map(|records| Snapshot::build(records, &AliasFiles::default()).0);
    assert_eq!((old.version(), new.version()), (Some(7), Some(7)));
    let [listed, unlisted, _] = differences(&old, &new);
    assert_eq!(listed, ["q-m9s0.q-g1.bosh."]);
    assert_eq!(unlisted, ["q-m2s0.q-g1.bosh."]);
    assert_eq!(new.instance(1).unwrap().ip, Some([10, 0, 0, 9].into()));
    assert!(new.instance(2).is_some() && new.instance(3).is_none());
}

#[test]
fn addresses_have_names() {
    let pairs = r#", "records": [["10.0.0.1", "a.web.net.dep.bosh"], ["10.0.0.1", "Other.Name.bosh"],
        ["10.0.0.1", "a.web.net.dep.bosh"], ["10.0.0.2", "x..y"], ["::ffff:10.0.0.3", "c.db.net.dep.bosh"],
        [null, "n.bosh"], ["10.0.0.4", ""]]"#;
    let rows = [row("a", 1, "web"), row("c", 3, "db")];
    let snapshot = snapshot_of(&rows.each_ref().map(String::as_str), pairs);
    let names = |last: u8| snapshot.reverse([10, 0, 0, last].into());
    let wire = |text: &str| Name::wire_as_written(text).unwrap().into_boxed_slice();
    // Letters stay as written.
    assert_eq!(
        names(1),
        [wire("a.web.net.dep.bosh"), wire("Other.Name.bosh")]
    );
    // With the aliases that lead to the name.
    assert_eq!(names(3), [wire("c.db.net.dep.bosh"), wire("c.alias")]);
    assert_eq!(names(9), [wire("fixed.alias")]);
    for last in [0, 2, 4, 255] {
        assert_eq!(names(last), [], "{last}");
    }
    let mapped = Ipv4Addr::new(10, 0, 0, 3).to_ipv6_mapped();
    assert_eq!(snapshot.reverse(mapped.into()), names(3));
}

#[test]
fn names_above_the_fleet_are_known() {
    let snapshot = fleet(&OLD);
    let mut rules = snapshot.rules();
    for is_reference in [true, false] {
        rules.nxdomain_for_empty_non_terminals = is_reference;
        let snapshot = fleet(&OLD).with_rules(rules);
        for (text, is_above) in [
            ("alias", true),
            ("any.alias", true),
            ("bosh", true),
            ("x.bosh", false),
            ("other", false),
            (".", false),
        ] {
            let found = is_above_local(&snapshot, &name(text));
            assert_eq!(found, is_above && !is_reference, "{text} {is_reference}");
        }
    }
    assert_eq!(snapshot.alias_count(), 4);
    assert_eq!(texts(snapshot.domains()), ["bosh."]);
    for (text, zone) in [
        ("a.bosh", Some("bosh.")),
        ("x.any.alias", Some("any.alias.")),
        ("web.alias", Some("web.alias.")),
        ("a.bosh-agent-id", Some("bosh-agent-id.")),
        ("alias", None),
        (".", None),
    ] {
        let found = snapshot.local_zone(&name(text)).map(ToString::to_string);
        assert_eq!(found.as_deref(), zone, "{text}");
    }
    assert_eq!(Snapshot::empty().instances().len(), 0);
}

#[test]
fn dropped_rows_are_named() {
    let parse = |columns: &str, rows: &[&str]| {
        let text = format!(
            r#"{{"record_keys": [{columns}], "record_infos": [{}]}}"#,
            rows.join(", ")
        );
        Records::parse(text.as_bytes()).unwrap().1
    };
    let columns = r#""id", "instance_group", "network", "deployment", "ip", "domain""#;
    let good = r#"["i", "g", "n", "d", "10.0.0.1", "bosh"]"#;
    assert_eq!(parse(columns, &[good]), [] as [&str; 0]);
    let short = r#"["i", "g"]"#;
    assert_eq!(
        parse(
            columns,
            &[good, short, r#"["i", "g", "n", "d", "10.0.0", "bosh"]"#]
        ),
        [
            "row 2 has 2 cells for 6 columns and is dropped",
            "row 3: ip is \"10.0.0\", which is not an address; the row's names have no address",
        ]
    );
    let number = parse(columns, &[r#"[7, "g", "n", "d", "10.0.0.1", "bosh"]"#]);
    assert!(
        number.len() == 1 && number[0].starts_with("row 1: id must be "),
        "{number:?}"
    );
    assert_eq!(
        parse(r#""id", "ip""#, &[short, short]),
        ["record_keys lacks the column instance_group: all 2 rows are dropped"]
    );
    assert_eq!(parse(r#""id", "ip""#, &[]), [] as [&str; 0]);
    for (rows, lines, last) in [
        (1000, 1000, "row 1000 has 2 cells"),
        (1001, 1001, "and 1 more rows"),
        (1005, 1001, "and 5 more rows"),
    ] {
        let warnings = parse(columns, &vec![short; rows]);
        assert_eq!(warnings.len(), lines);
        assert!(warnings.last().unwrap().starts_with(last), "{rows}");
    }
}
