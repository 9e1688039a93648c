//! Every name that is listed, in its order, and the names that are listed because of a row.

use super::*;
use crate::catalog::{AliasFiles, RECORD_KEYS, Records};

/// Instances with several networks, groups and domains, and with texts that no name can contain.
fn snapshot() -> Snapshot {
    let rows = [
        r#"["a","1","web",["1"],"z1","1","net","1","dep","10.0.0.1","bosh","x",0]"#,
        r#"["a","1","web",["1"],"z1","1","net2","2","dep","10.1.0.1","bosh","x",0]"#,
        r#"["b",null,"web",["1","2"],"z1","1","net","1","dep","10.0.0.2","bosh","x",1]"#,
        r#"["q-c","3","web",["2"],"z1","1","net","1","dep","10.0.0.3","bosh","x",2]"#,
        r#"["D","1","web",["1"],"z1","1","net","1","dep","10.0.0.4","bosh","x",3]"#,
        r#"["e.f","5","web",["1"],"z1","1","net","1","dep","10.0.0.5","bosh","x",4]"#,
        r#"["g","7","q-g1",[],"z1","1","net","1","dep","10.0.0.6","bosh","x",5]"#,
        r#"["h","8","web",["1"],"z1","1","net","1","dep","10.0.0.7","Cap","x",6]"#,
        r#"["i","1","web",["1"],"z1","1","net","1","dep","10.0.0.8","other.","x",7]"#,
    ];
    let keys = RECORD_KEYS.map(|key| format!("{key:?}")).join(",");
    let file = format!(
        r#"{{"record_keys": [{keys}], "record_infos": [{}]}}"#,
        rows.join(",")
    );
    let aliases = br#"{"a.web.net.dep.bosh": ["10.0.0.9"], "_.any.alias": ["_.web.net.dep.bosh"],
        "b.any.alias": ["10.0.0.9"], "_.far.alias": ["_.example"], "_.address.alias": ["10.0.0.9"]}"#;
    let (records, warnings) = Records::parse(file.as_bytes()).unwrap();
    assert_eq!(warnings, [""; 0]);
    let (aliases, _) = AliasFiles::parse([("aliases.json", &aliases[..])]).unwrap();
    Snapshot::build(records, &aliases).0
}

fn texts(names: &[Name]) -> Vec<String> {
    names.iter().map(Name::to_string).collect()
}

#[test]
fn aliases_precede_groups_and_instances() {
    let names: Vec<Name> = published_names(&snapshot()).collect();
    let mut texts = texts(&names);
    texts[..2].sort_unstable();
    let expected = [
        // Each alias once, whatever else its name means.
        "a.web.net.dep.bosh.",
        "b.any.alias.",
        "a.any.alias.",
        "q-c.any.alias.",
        "q-s0.q-g1.bosh.",
        "q-s0.q-g1.other.",
        "q-s0.q-g2.bosh.",
        "q-s0.web.net.dep.bosh.",
        "q-s0.web.net2.dep.bosh.",
        "q-s0.web.net.dep.other.",
        "a.web.net2.dep.bosh.",
        "b.web.net.dep.bosh.",
        "i.web.net.dep.other.",
        "q-m1s0.q-g1.bosh.",
        "a.q-g1.bosh.",
        "b.q-g1.bosh.",
        "b.q-g2.bosh.",
        "q-m3s0.q-g2.bosh.",
        "q-m5s0.q-g1.bosh.",
        "q-m1s0.q-g1.other.",
        "i.q-g1.other.",
    ];
    assert_eq!(texts, expected);
}

#[test]
fn row_lists_its_own_names() {
    let snapshot = snapshot();
    for (row, expected) in [
        (
            0,
            &[
                "q-s0.web.net.dep.bosh.",
                "a.web.net.dep.bosh.",
                "q-s0.q-g1.bosh.",
                "q-m1s0.q-g1.bosh.",
                "a.q-g1.bosh.",
                "a.any.alias.",
            ][..],
        ),
        // The alias selects instances of another network.
        (
            1,
            &[
                "q-s0.web.net2.dep.bosh.",
                "a.web.net2.dep.bosh.",
                "q-s0.q-g1.bosh.",
                "q-m1s0.q-g1.bosh.",
                "a.q-g1.bosh.",
            ],
        ),
        (
            2,
            &[
                "q-s0.web.net.dep.bosh.",
                "b.web.net.dep.bosh.",
                "q-s0.q-g1.bosh.",
                "b.q-g1.bosh.",
                "q-s0.q-g2.bosh.",
                "b.q-g2.bosh.",
                "b.any.alias.",
            ],
        ),
        (
            3,
            &[
                "q-s0.web.net.dep.bosh.",
                "q-s0.q-g2.bosh.",
                "q-m3s0.q-g2.bosh.",
            ],
        ),
        (
            4,
            &[
                "q-s0.web.net.dep.bosh.",
                "q-s0.q-g1.bosh.",
                "q-m1s0.q-g1.bosh.",
            ],
        ),
        (6, &[]),
        (7, &[]),
        (
            8,
            &[
                "q-s0.web.net.dep.other.",
                "i.web.net.dep.other.",
                "q-s0.q-g1.other.",
                "q-m1s0.q-g1.other.",
                "i.q-g1.other.",
            ],
        ),
    ] {
        assert_eq!(texts(&names_of_row(&snapshot, row)), expected, "row {row}");
    }
}

#[test]
fn plain_texts_are_lower_case_labels() {
    let longest = "a".repeat(63);
    for (text, is_plain) in [
        ("a", true),
        ("a_b-1", true),
        ("é", true),
        (&longest, true),
        (&"a".repeat(64), false),
        ("", false),
        ("aB", false),
        ("a.b", false),
        ("a*", false),
        ("A.*", false),
    ] {
        assert_eq!(plain(text), is_plain.then_some(text.as_bytes()), "{text}");
    }
}
