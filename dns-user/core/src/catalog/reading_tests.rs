//! Meaning of records and alias files, and their differences from the file before.

use super::*;
use crate::catalog::columns::Piece;
use crate::catalog::records::AliasDefinition;
use crate::resolve::{AllRunning, Existence, resolve};

fn name(text: &str) -> Name {
    Name::from_text(text).unwrap()
}

/// Returns a file of rows with all columns, and of these further members.
fn file(rows: &[String], more: &str) -> Vec<u8> {
    let keys = RECORD_KEYS.map(|key| format!("{key:?}")).join(",");
    let rows = rows.join(",");
    format!(r#"{{"record_keys":[{keys}],"record_infos":[{rows}]{more}}}"#).into_bytes()
}

fn row(id: &str) -> String {
    format!(r#"["{id}","1","web",["1"],"z1","2","net","3","dep","10.0.0.1","bosh","agent-{id}",4]"#)
}

fn snapshot(file: &[u8]) -> Snapshot {
    let (records, _) = Records::parse(file).unwrap();
    Snapshot::build(records, &AliasFiles::default()).0
}

//----------- Records --------------------------------------------------------

/// Id, zone, groups and index of an instance.
type Cells = (String, String, Vec<String>, Option<i64>);

/// Parses a row of these cells; returns its warnings, and the instance unless the row was dropped.
fn cells(cells: &str) -> (Vec<String>, Option<Cells>) {
    let file = format!(
        r#"{{"record_keys": ["instance_group", "network", "deployment", "ip", "domain", "ignored", "id", "az",
        "group_ids", "instance_index"],
        "record_infos": [["web", "net", "dep", "10.0.0.1", "bosh", {{"any": [1]}}, {cells}]]}}"#
    );
    let (records, warnings) = Records::parse(file.as_bytes()).unwrap();
    let snapshot = Snapshot::build(records, &AliasFiles::default()).0;
    let found = snapshot.instance(0).map(|instance: Instance<'_>| {
        let [id, az] = [instance.id, instance.az].map(str::to_owned);
        let groups = instance.group_ids().map(str::to_owned).collect();
        (id, az, groups, instance.index)
    });
    (warnings, found)
}

#[test]
fn cells_are_read_by_their_columns() {
    for (text, id, az, groups, index) in [
        (r#""i", "z", ["1", "2"], 3"#, "i", "z", &["1", "2"][..], 3),
        (r#""i", null, [], -3"#, "i", "", &[], -3),
        (r#""", "", ["1", "1", "2"], 1.9"#, "", "", &["1", "2"], 1),
        (r#""\u0041", "\n", ["\u0042"], -1.9"#, "A", "\n", &["B"], -1),
        (r#""i", "z", [""], 1e3"#, "i", "z", &[""], 1000),
        (
            r#""i", "z", [], 9223372036854775807"#,
            "i",
            "z",
            &[],
            i64::MAX,
        ),
        (
            r#""i", "z", [], 9223372036854775808"#,
            "i",
            "z",
            &[],
            i64::MAX,
        ),
        (
            r#""i", "z", [], 18446744073709551616"#,
            "i",
            "z",
            &[],
            i64::MAX,
        ),
        (
            r#""i", "z", [], -9223372036854775808"#,
            "i",
            "z",
            &[],
            i64::MIN,
        ),
        (r#""i", "z", [], "5""#, "i", "z", &[], 0),
        (r#""i", "z", [], null"#, "i", "z", &[], 0),
        (r#""i", "z", [], true"#, "i", "z", &[], 0),
        (r#""i", "z", [], [7]"#, "i", "z", &[], 0),
        (r#""i", "z", [], {"a": 7}"#, "i", "z", &[], 0),
    ] {
        let groups = groups.iter().map(|&group| group.to_owned()).collect();
        let expected = (id.to_owned(), az.to_owned(), groups, Some(index));
        assert_eq!(cells(text), (vec![], Some(expected)), "{text}");
    }
}

#[test]
fn mistyped_cells_drop_the_row() {
    for (text, warning) in [
        (r#"7, "z", [], 0"#, "row 1: id must be a text"),
        (r#"null, "z", [], 0"#, "row 1: id must be a text"),
        (r#"["i"], "z", [], 0"#, "row 1: id must be a text"),
        (r#""i", 7, [], 0"#, "row 1: az must be a text or null"),
        (r#""i", ["z"], [], 0"#, "row 1: az must be a text or null"),
        (r#""i", false, [], 0"#, "row 1: az must be a text or null"),
        (
            r#""i", "z", "1", 0"#,
            "row 1: group_ids must be a list of texts",
        ),
        (
            r#""i", "z", ["1", 2], 0"#,
            "row 1: group_ids must be a list of texts",
        ),
        (
            r#""i", "z", [["1"]], 0"#,
            "row 1: group_ids must be a list of texts",
        ),
        (
            r#""i", "z", null, 0"#,
            "row 1: group_ids must be a list of texts",
        ),
        // The first one is named.
        (r#"7, 7, 7, 0"#, "row 1: id must be a text"),
    ] {
        assert_eq!(
            cells(text),
            (vec![format!("{warning}; the row is dropped")], None)
        );
    }
    for (text, count) in [
        (r#""i", "z", []"#, 9),
        (r#""i", "z", [], 0, 0"#, 11),
        (r#""i", "z", [], 0, 0, {"x": [1]}"#, 12),
    ] {
        let warning = format!("row 1 has {count} cells for 10 columns and is dropped");
        assert_eq!(cells(text), (vec![warning], None), "{text}");
    }
    let (_, warnings) = Records::parse(&file(&["null".to_owned(), row("a")], "")).unwrap();
    assert_eq!(
        warnings,
        ["row 1 has 0 cells for 13 columns and is dropped"]
    );
}

#[test]
fn missing_columns_are_named() {
    let columns = [
        "id",
        "instance_group",
        "network",
        "deployment",
        "ip",
        "domain",
    ];
    let warnings = |columns: &[&str], row: &str| {
        let columns: Vec<String> = columns.iter().map(|name| format!("{name:?}")).collect();
        let file = format!(
            r#"{{"record_keys": [{}], "record_infos": [{row}]}}"#,
            columns.join(",")
        );
        Records::parse(file.as_bytes()).unwrap().1
    };
    let row = r#"["a", "web", "net", "dep", "10.0.0.1", "bosh"]"#;
    assert_eq!(warnings(&columns, row), [""; 0]);
    for missing in columns {
        let mut others = columns;
        others
            .iter_mut()
            .filter(|name| **name == missing)
            .for_each(|name| *name = "other");
        let expected = format!("record_keys lacks the column {missing}: all 1 rows are dropped");
        assert_eq!(warnings(&others, row), [expected]);
    }
    assert_eq!(
        warnings(&["domain", "network"], row),
        ["record_keys lacks the column id: all 1 rows are dropped"]
    );
    assert_eq!(warnings(&["domain"], ""), [""; 0]);
}

#[test]
fn last_columns_and_keys_count() {
    let rows = r#"[["old", "a", "web", "net", "dep", "10.0.0.1", "bosh"]]"#;
    let keys = r#"["id", "id", "instance_group", "network", "deployment", "ip", "domain"]"#;
    for file in [
        format!(r#"{{"record_keys": {keys}, "record_infos": {rows}}}"#),
        // Rows that precede their keys, or are read with others first, are read again.
        format!(r#"{{"record_infos": {rows}, "record_keys": {keys}}}"#),
        format!(r#"{{"record_keys": ["x"], "record_infos": {rows}, "RECORD_KEYS": {keys}}}"#),
        format!(r#"{{"Record_Keys": {keys}, "record_infos": [[1]], "RECORD_INFOS": {rows}}}"#),
        format!(r#"{{"record_keys": {keys}, "other": {{"a": [1]}}, "record_infos": {rows}}}"#),
    ] {
        let snapshot = snapshot(file.as_bytes());
        let ids: Vec<&str> = snapshot.instances().map(|instance| instance.id).collect();
        assert_eq!(ids, ["a"], "{file}");
        let instance = snapshot.instance(0).unwrap();
        assert_eq!((instance.index, instance.num_id), (None, ""));
    }
    for empty in [
        "null",
        "{}",
        r#"{"record_keys": null, "record_infos": null, "records": null, "aliases": null, "version": null}"#,
    ] {
        let (records, warnings) = Records::parse(empty.as_bytes()).unwrap();
        assert_eq!(warnings, [""; 0]);
        assert_eq!(records.version, None);
        assert_eq!(records.pairs, []);
        assert_eq!(records.aliases, []);
        let snapshot = Snapshot::build(records, &AliasFiles::default()).0;
        assert_eq!(snapshot.instances().len(), 0, "{empty}");
    }
}

#[test]
fn instances_have_row_values() {
    let file = file(
        &[row("a"), row("b").replace("10.0.0.1", "::ffff:10.0.0.2")],
        "",
    );
    let snapshot = snapshot(&file);
    let instance = snapshot.instance(1).unwrap();
    let texts = [
        instance.id,
        instance.num_id,
        instance.instance_group,
        instance.az,
        instance.az_id,
        instance.network,
        instance.network_id,
        instance.deployment,
        instance.domain,
        instance.agent_id,
    ];
    assert_eq!(
        texts,
        [
            "b", "1", "web", "z1", "2", "net", "3", "dep", "bosh.", "agent-b"
        ]
    );
    assert_eq!(instance.ip, Some([10, 0, 0, 2].into()));
    assert_eq!(instance.index, Some(4));
    assert_eq!(instance.group_ids().collect::<Vec<_>>(), ["1"]);
    assert_eq!(snapshot.instances().len(), 2);
    assert!(snapshot.instance(2).is_none() && snapshot.instance(3).is_none());
    // One wrong byte spoils one letter.
    let mut damaged = file.clone();
    let at = damaged
        .windows(5)
        .position(|part| part == b"[\"a\",")
        .unwrap();
    damaged[at + 2] = 0xff;
    let snapshot = self::snapshot(&damaged);
    assert_eq!(snapshot.instance(0).unwrap().id, "\u{fffd}");
}

#[test]
fn errors_have_position_and_reason() {
    for (text, reason) in [
        (
            "7",
            "invalid type: integer `7`, expected an object with record_keys and record_infos",
        ),
        (
            r#"{"record_infos": 7}"#,
            "invalid type: integer `7`, expected a list of rows",
        ),
        (
            r#"{"record_infos": ["x"]}"#,
            "invalid type: string \"x\", expected a row (a list)",
        ),
        (
            r#"{"records": [7]}"#,
            "invalid type: integer `7`, expected a list of an address and a name",
        ),
        (
            r#"{"records": [[7, "a"]]}"#,
            "invalid type: integer `7`, expected a text",
        ),
        (
            r#"{"records": [["10.0.0.1", "a", 7]]}"#,
            "invalid type: integer `7`, expected a text",
        ),
        (
            r#"{"aliases": 7}"#,
            "invalid type: integer `7`, expected an object of aliases, each with a list of targets",
        ),
        (
            r#"{"aliases": {"a": [7]}}"#,
            "invalid type: integer `7`, expected an object with group_id and root_domain",
        ),
        (
            r#"{"aliases": {"a": [{"group_id": 7}]}}"#,
            "invalid type: integer `7`, expected a text",
        ),
        (
            r#"{"version": -1}"#,
            "invalid value: integer `-1`, expected u64",
        ),
    ] {
        let error = Records::parse(text.as_bytes()).unwrap_err();
        assert_eq!((error.line, error.reason.as_str()), (1, reason), "{text}");
    }
    for (text, error) in [
        (
            "{\"version\": 1}x",
            "line 1, column 15: trailing characters",
        ),
        (
            "{\n\n\"version\": 1}\n x",
            "line 4, column 2: trailing characters",
        ),
        ("{", "line 1, column 1: EOF while parsing an object"),
    ] {
        assert_eq!(
            Records::parse(text.as_bytes()).unwrap_err().to_string(),
            error
        );
        let empty = IndexedRecords::from(Records::default());
        assert_eq!(empty.next(text.as_bytes()).unwrap_err().to_string(), error);
    }
}

#[test]
fn pairs_need_address_and_name() {
    let text = br#"{"records": [["10.0.0.9", "lost"]], "RECORDS": [["10.0.0.1", "a"], ["::ffff:10.0.0.2", "b"], ["x", "c"],
        ["10.0.0.3", ""], ["10.0.0.4"], [], null, ["10.0.0.5", "d", "more", null], [null, "e"], ["fd00::1", "A.b."]]}"#;
    let (records, _) = Records::parse(text).unwrap();
    let found: Vec<(String, &str)> = records
        .pairs
        .iter()
        .map(|(address, name)| (address.to_string(), &**name))
        .collect();
    let expected = [
        ("10.0.0.1", "a"),
        ("10.0.0.2", "b"),
        ("10.0.0.5", "d"),
        ("fd00::1", "A.b."),
    ];
    assert_eq!(
        found,
        expected.map(|(address, name)| (address.to_owned(), name))
    );
}

#[test]
fn definitions_of_aliases_are_read() {
    let text = br#"{"aliases": {"a.x": [{"group_id": "0"}], "b.x": [{"group_id": "1", "ROOT_DOMAIN": "bosh",
            "placeholder_type": "uuid", "health_filter": "all", "initial_health_check": "synchronous", "other": [1]},
            null, {"group_id": null}]},
        "Aliases": {"a.x": [{"group_id": "2"}], "c.x": null}}"#;
    let (records, _) = Records::parse(text).unwrap();
    let of_group = |group_id: &str| AliasDefinition {
        group_id: group_id.to_owned(),
        ..AliasDefinition::default()
    };
    let whole = AliasDefinition {
        group_id: "1".to_owned(),
        root_domain: "bosh".to_owned(),
        placeholder_type: "uuid".to_owned(),
        health_filter: "all".to_owned(),
        initial_health_check: "synchronous".to_owned(),
    };
    let expected = [
        ("b.x", vec![whole, of_group(""), of_group("")]),
        ("a.x", vec![of_group("2")]),
        ("c.x", vec![]),
    ];
    assert_eq!(
        records.aliases,
        expected.map(|(alias, definitions)| (alias.to_owned(), definitions))
    );
    let (records, _) = Records::parse(
        br#"{"aliases": {"a.x": []}, "ALIASES": null, "version": 18446744073709551615}"#,
    )
    .unwrap();
    assert_eq!((records.aliases, records.version), (vec![], Some(u64::MAX)));
}

//----------- Following ------------------------------------------------------

fn first(file: &[u8]) -> IndexedRecords {
    let empty = IndexedRecords::from(Records::default());
    assert!(empty.follow(file).is_none(), "there is no file before");
    let (first, warnings) = empty.next(file).unwrap();
    assert_eq!(warnings, [""; 0]);
    first
}

/// Returns the number of changes that following finds in the rows; `None` if the file must be parsed as a whole.
fn edits(old: &[String], new: &[String]) -> Option<usize> {
    let outline = first(&file(old, "")).outline.unwrap();
    let (_, difference) = outline.follow(&file(new, "")[..])?;
    Some(difference.rows.edits.count())
}

#[test]
fn following_ends_at_its_limits() {
    let rows = |kinds: &[(&str, std::ops::Range<usize>)]| -> Vec<String> {
        let mut rows = Vec::new();
        for (kind, numbers) in kinds {
            rows.extend(
                numbers
                    .clone()
                    .map(|number| row(&format!("{kind}{number}"))),
            );
        }
        rows
    };
    for (old, new, count) in [
        // Up to 256 changes, of which a replaced row is two, or an eighth of the rows.
        (
            rows(&[("i", 0..300)]),
            rows(&[("i", 0..172), ("x", 0..128)]),
            Some(256),
        ),
        (
            rows(&[("i", 0..300)]),
            rows(&[("i", 0..171), ("x", 0..129)]),
            None,
        ),
        (rows(&[("i", 0..300)]), rows(&[("i", 0..44)]), Some(256)),
        (rows(&[("i", 0..300)]), rows(&[("i", 0..43)]), None),
        (rows(&[("i", 0..44)]), rows(&[("i", 0..300)]), Some(256)),
        (rows(&[("i", 0..43)]), rows(&[("i", 0..300)]), None),
        (
            rows(&[("i", 0..2400)]),
            rows(&[("i", 0..2250), ("x", 0..150)]),
            Some(300),
        ),
        (
            rows(&[("i", 0..2400)]),
            rows(&[("i", 0..2249), ("x", 0..151)]),
            None,
        ),
        // Behind a longer run than 64 no row is recognised.
        (
            rows(&[("i", 0..200)]),
            rows(&[("i", 0..100), ("i", 164..200)]),
            Some(64),
        ),
        (
            rows(&[("i", 0..200)]),
            rows(&[("i", 0..100), ("i", 165..200)]),
            Some(135),
        ),
        (
            rows(&[("i", 0..200)]),
            rows(&[("i", 0..100), ("x", 0..2), ("i", 100..200)]),
            Some(2),
        ),
    ] {
        assert_eq!(edits(&old, &new), count);
    }
}

#[test]
fn other_forms_are_not_followed() {
    let keys = RECORD_KEYS.map(|key| format!("{key:?}")).join(",");
    let members = [
        format!(r#""record_keys":[{keys}]"#),
        format!(r#""record_infos":[{}]"#, row("a")),
        r#""records":[["10.0.0.1","a.web.net.dep.bosh"]]"#.to_owned(),
        r#""aliases":{"a.x":[{"group_id":"1","root_domain":"bosh"}]}"#.to_owned(),
        r#""version":2"#.to_owned(),
    ];
    let text = |members: &[&str]| format!("{{{}}}", members.join(","));
    let all = members.each_ref().map(String::as_str);
    let first = first(text(&all).as_bytes());
    let follows = |text: &str| first.follow(text.as_bytes()).is_some();
    assert!(follows(&text(&all)));
    let mut reversed = all;
    reversed.reverse();
    let spaced = all.join(" ,\n ").replace("\":[[", "\" :\t[[");
    assert!(follows(&format!(" {{ {spaced}\r}}\t\n")));
    for (number, member) in all.iter().enumerate() {
        let mut others = all.to_vec();
        others.remove(number);
        assert!(!follows(&text(&others)), "{member} is missing");
        assert!(
            !follows(&text(&[&all[..], &[member]].concat())),
            "{member} is repeated"
        );
    }
    for (from, to) in [
        ("\"version\":2", "\"Version\":2"),
        ("\"version\":2", "\"version\":null"),
        ("\"version\":2", "\"version\":2.0"),
        ("\"version\":2", "\"version\":02"),
        ("\"version\":2", "\"version\":2,\"other\":1"),
        ("\"version\":2}", "\"version\":2}x"),
        ("\"version\":2}", "\"version\":2"),
        ("\"version\":2}", "\"version\":2,}"),
        ("\"id\",\"num_id\"", "\"num_id\",\"id\""),
        ("\"group_id\":\"1\"", "\"group_id\":\"2\""),
        // Rows and pairs that a complete reading leaves out or warns of.
        ("[[\"a\"", "[[\"b\"],[\"a\""),
        ("\"10.0.0.1\",\"bosh\"", "\"10.0.0\",\"bosh\""),
        ("[[\"10.0.0.1\",", "[[\"10.0.0\","),
        ("\"records\":[", "\"records\":[null,"),
        ("\"records\":[", "\"records\":[7,"),
    ] {
        let whole = text(&all);
        let other = whole.replacen(from, to, 1);
        assert_ne!(other, whole);
        assert!(!follows(&other), "{other}");
    }
}

#[test]
fn unchanged_files_are_equal() {
    let text = |id: &str, pair: &str, version: u8| {
        file(
            &[row(id)],
            &format!(r#","records":[["10.0.0.1","{pair}"]],"version":{version}"#),
        )
    };
    let before = first(&text("a", "x", 1));
    for (next, expected) in [
        (text("a", "x", 1), true),
        (text("b", "x", 1), false),
        (text("a", "y", 1), false),
        (text("a", "x", 2), false),
    ] {
        let next = before.follow(&next[..]).unwrap();
        assert_eq!(next.equals_previous(&before), expected);
        assert_eq!(before.equals_previous(&next), expected);
    }
    assert!(
        !before.equals_previous(&first(&text("a", "x", 1))),
        "not followed"
    );
}

#[test]
fn edits_tell_where_elements_are() {
    let mut edits = Edits::default();
    assert!(edits.is_empty());
    edits.keep(0);
    edits.keep(1);
    assert!(edits.is_empty() && edits.positions(2).is_none());
    edits.remove(2..4);
    assert!(!edits.is_empty());
    edits.add();
    edits.keep(4);
    edits.add();
    edits.add();
    edits.keep(5);
    let pieces = [
        Piece::Kept(0..2),
        Piece::Added(0),
        Piece::Kept(4..5),
        Piece::Added(1),
        Piece::Added(2),
        Piece::Kept(5..6),
    ];
    assert_eq!(edits.pieces(), pieces);
    assert_eq!(edits.removed(), [2, 3]);
    assert_eq!(edits.added().collect::<Vec<_>>(), [(2, 0), (4, 1), (5, 2)]);
    assert_eq!((edits.len(), edits.count()), (7, 5));
    assert_eq!(
        edits.positions(6),
        Some(vec![Some(0), Some(1), None, None, Some(3), Some(6)])
    );
    let old: Arc<[u8]> = [10, 11, 12, 13, 14, 15].into();
    assert_eq!(
        *edits.apply(&old, &[20, 21, 22]),
        [10, 11, 20, 14, 21, 22, 15]
    );
    assert!(!edits.replace_all(|_| true));

    let mut replaced = Edits::default();
    replaced.keep(0);
    replaced.remove(1..2);
    replaced.add();
    replaced.keep(2);
    let pieces = [Piece::Kept(0..1), Piece::Added(0), Piece::Kept(2..3)];
    assert_eq!(replaced.pieces(), pieces);
    assert_eq!(replaced.positions(3), None, "all others stay");
    assert!(replaced.replace_all(|pair| pair == (1, 0)));
    assert!(!replaced.replace_all(|pair| pair != (1, 0)));
    let old: Arc<[u8]> = [1, 2, 3].into();
    assert!(Arc::ptr_eq(&replaced.apply(&old, &[2]), &old));
    assert_eq!(*replaced.apply(&old, &[9]), [1, 9, 3]);

    let mut appended = Edits::default();
    appended.add();
    assert!(!appended.is_empty());
    assert_eq!((appended.len(), appended.count()), (1, 1));
}

//----------- Reverse --------------------------------------------------------

#[test]
fn addresses_list_names_once() {
    let records = file(
        &[row("a")],
        r#","records":[["10.0.0.1","B.x"],["10.0.0.1","a.web.net.dep.bosh"],["10.0.0.1","b.X"],
            ["10.0.0.1","A\\.b.C"],["10.0.0.1","a..b"],["10.0.0.2","other.x"]]"#,
    );
    let (records, _) = Records::parse(&records).unwrap();
    let aliases = br#"{"both.x": ["10.0.0.1", "a.web.net.dep.bosh"], "chain.x": ["both.x"], "named.x": ["b.x"],
        "b.x": ["10.0.0.1"], "_.below.x": ["10.0.0.1"], "mapped.x": ["::ffff:10.0.0.1"], "far.x": ["10.0.0.3"]}"#;
    let (aliases, _) = AliasFiles::parse([("a.json", &aliases[..])]).unwrap();
    let snapshot = Snapshot::build(records, &aliases).0;
    let names = |address: [u8; 4]| snapshot.reverse(IpAddr::from(address));
    let mut found = names([10, 0, 0, 1]);
    let of_records = [
        &b"\x01B\x01x\0"[..],
        b"\x01a\x03web\x03net\x03dep\x04bosh\0",
        // With an escape the letters are not where the text has them.
        b"\x03a.b\x01c\0",
    ];
    assert_eq!(found[..3], of_records.map(Box::from));
    found[3..].sort_unstable();
    let aliases = [
        &b"\x04both\x01x\0"[..],
        b"\x05chain\x01x\0",
        b"\x05named\x01x\0",
        b"\x06mapped\x01x\0",
    ];
    assert_eq!(found[3..], aliases.map(Box::from));
    assert_eq!(names([10, 0, 0, 2]), [Box::from(&b"\x05other\x01x\0"[..])]);
    assert_eq!(names([10, 0, 0, 3]), [Box::from(&b"\x03far\x01x\0"[..])]);
    assert_eq!(names([10, 0, 0, 0]), []);
    assert_eq!(names([10, 0, 0, 4]), []);
}

//----------- Aliases --------------------------------------------------------

fn address(last: u8) -> FileTarget {
    FileTarget::Address([10, 0, 0, last].into())
}

fn target(text: &str) -> FileTarget {
    FileTarget::Name(name(text))
}

#[test]
fn file_targets_are_followed() {
    let files: [(&str, &[u8]); 3] = [
        (
            "a.json",
            br#"{"a.x": ["10.0.0.1", "::ffff:10.0.0.2", "*.web.net.dep.bosh", "b.x", "_.y", "B.X.", "a..b", ""],
                "b.x": ["lost.bosh"], "B.x": ["c.bosh"], "b.x": ["c.bosh"],
                "_.w.x": ["_.y", "*.y", "a.x", "10.0.0.3", "_..y"], "none.x": null}"#,
        ),
        ("b.json", br#"{"A.x": ["10.0.0.9"], "_.W.x": [], "_.v.x": ["_.z"]}"#),
        ("c.json", b"null"),
    ];
    let (aliases, warnings) = AliasFiles::parse(files).unwrap();
    let exact: Vec<(String, &str, &[FileTarget])> = aliases
        .exact
        .iter()
        .map(|(name, alias)| (name.to_string(), &*alias.file, &alias.targets[..]))
        .collect();
    let of_a = [
        address(1),
        address(2),
        target("q-s0.web.net.dep.bosh"),
        target("c.bosh"),
        target("_.y"),
        target("c.bosh"),
    ];
    assert_eq!(
        exact,
        [
            ("a.x.".to_owned(), "a.json", &of_a[..]),
            ("b.x.".to_owned(), "a.json", &[target("c.bosh")]),
            ("none.x.".to_owned(), "a.json", &[]),
        ]
    );
    let below: Vec<(String, &[FileTarget])> = aliases
        .below
        .iter()
        .map(|(name, alias)| (name.to_string(), &alias.targets[..]))
        .collect();
    let of_w = [
        FileTarget::Label(name("y")),
        target("q-s0.y"),
        target("a.x"),
        address(3),
    ];
    assert_eq!(
        below,
        [
            ("v.x.".to_owned(), &[FileTarget::Label(name("z"))][..]),
            ("w.x.".to_owned(), &of_w),
        ]
    );
    assert_eq!(
        warnings,
        [
            "a.json: alias \"a.x\": target \"a..b\" is not a domain name and is skipped: empty label",
            "a.json: alias \"a.x\": target \"\" is not a domain name and is skipped: empty label",
            "a.json: alias \"_.w.x\": target \"_..y\" is not a domain name and is skipped: empty label",
            "a.json: alias \"none.x\": has no target, so it never has an address",
        ]
    );
    assert_eq!((aliases.len(), aliases.is_empty()), (5, false));
    let none = AliasFiles::default();
    assert_eq!((none.len(), none.is_empty()), (0, true));
    let (one, _) = AliasFiles::parse([("a.json", &br#"{"_.a": ["_.b"]}"#[..])]).unwrap();
    assert_eq!((one.len(), one.is_empty()), (1, false));
}

#[test]
fn chains_of_aliases_have_limits() {
    // The first in order is looked at first, so its chain has all links.
    let chain = |count: usize| {
        let mut members = Vec::new();
        for number in 0..count - 1 {
            members.push(format!(r#""a{number:03}.x": ["a{:03}.x"]"#, number + 1));
        }
        members.push(format!(r#""a{:03}.x": ["10.0.0.1"]"#, count - 1));
        format!("{{{}}}", members.join(","))
    };
    let parse = |text: &str| AliasFiles::parse([("a.json", text.as_bytes())]);
    let (aliases, _) = parse(&chain(500)).unwrap();
    assert!(
        aliases
            .exact
            .values()
            .all(|alias| alias.targets == [address(1)])
    );
    let problem = "leads to more than 100000 targets, or through more than 500 other aliases, or with all others to \
                   more than 500000 targets";
    assert_eq!(
        parse(&chain(501)).unwrap_err().to_string(),
        format!("a.json: the alias a000.x. {problem}")
    );
    // Five layers of ten targets each.
    let layers = |more: &str| {
        let ten = |target: &str| vec![format!("{target:?}"); 10].join(",");
        format!(
            r#"{{"e.x": [{}{more}], "d.x": [{}], "c.x": [{}], "b.x": [{}], "a.x": [{}]}}"#,
            ten("d.x"),
            ten("c.x"),
            ten("b.x"),
            ten("a.x"),
            ten("10.0.0.1")
        )
    };
    let (aliases, _) = parse(&layers("")).unwrap();
    assert_eq!(aliases.exact[&name("e.x")].targets.len(), 100_000);
    assert_eq!(
        parse(&layers(r#","10.0.0.2""#)).unwrap_err().to_string(),
        format!("a.json: the alias e.x. {problem}")
    );
    // Four more of 100,000 targets are too many together with the five layers.
    let first = layers("");
    let second = r#"{"f1.x": ["e.x"], "f2.x": ["e.x"], "f3.x": ["e.x"], "f4.x": ["e.x"]}"#;
    let files = [("a.json", first.as_bytes()), ("b.json", second.as_bytes())];
    let (aliases, _, errors) = AliasFiles::parse_valid(files);
    assert_eq!(aliases.len(), 5, "the aliases of the first file");
    let errors: Vec<String> = errors.iter().map(ToString::to_string).collect();
    assert_eq!(errors, [format!("b.json: the alias f4.x. {problem}")]);
}

#[test]
fn loops_name_their_files() {
    let files: [(&str, &[u8]); 2] = [
        (
            "a.json",
            br#"{"a.x": ["b.x"], "b.x": ["c.x"], "d.x": ["a.x", "10.0.0.1"]}"#,
        ),
        ("b.json", br#"{"c.x": ["a.x"]}"#),
    ];
    assert_eq!(
        AliasFiles::parse(files).unwrap_err().to_string(),
        "a.json, b.json: the aliases a.x. -> b.x. -> c.x. -> a.x. form a loop; remove one of them"
    );
    let into = br#"{"a.x": ["b.x"], "b.x": ["c.x"], "c.x": ["b.x"]}"#;
    assert_eq!(
        AliasFiles::parse([("a.json", &into[..])])
            .unwrap_err()
            .to_string(),
        "a.json: the aliases b.x. -> c.x. -> b.x. form a loop; remove one of them"
    );
}

/// Builds a snapshot of these aliases, and instances of three rows; returns the warnings, too.
fn with_aliases(files: &str, definitions: &str) -> (Snapshot, Vec<String>) {
    let rows = [
        r#"["a","1","web",["1"],"z1","1","net","1","dep_1","10.0.0.1","bosh","x",0]"#.to_owned(),
        r#"["b",null,"web",["1"],null,"1","net","1","dep_1","10.0.0.2","bosh","x",1]"#.to_owned(),
        r#"["_","x1","web",["1"],"z2","1","net2","1","dep_1","10.0.0.3","bosh","x",1]"#.to_owned(),
    ];
    let (records, _) =
        Records::parse(&file(&rows, &format!(r#","aliases":{{{definitions}}}"#))).unwrap();
    let (files, warnings) = AliasFiles::parse([("a.json", files.as_bytes())]).unwrap();
    assert_eq!(warnings, [""; 0]);
    Snapshot::build(records, &files)
}

#[test]
fn doubtful_targets_are_reported() {
    let form = "between the first label and the domain there must be one label (short form) or three (long form)";
    let elsewhere = "is in no domain of the records, so it has no address; a target is a name of the fleet, or an address";
    for (alias, target, warning) in [
        ("known.x", "a.elsewhere", None),
        ("known.x", "a.web.net.dep_1.bosh", None),
        ("known.x", "q-s0.web*.net.dep_1.bosh", None),
        ("known.x", "q-s0.gone.other.dep.bosh", None),
        ("known.x", "q-s0.q-g9.bosh", None),
        ("_.known.x", "_.elsewhere", None),
        ("gone.x", "c.elsewhere", Some(format!("\"gone.x.\": target c.elsewhere. {elsewhere}"))),
        (
            "_.gone.x",
            "c.elsewhere",
            Some(format!("\"_.gone.x.\": target c.elsewhere. {elsewhere}")),
        ),
        ("form.x", "x.bosh", Some(format!("\"form.x.\": target x.bosh. is skipped: {form}"))),
        ("_.form.x", "_.bosh", Some(format!("\"_.form.x.\": target x.bosh. is skipped: {form}"))),
        (
            "under.x",
            "q-s0.my_web.net.dep_1.bosh",
            Some(
                "\"under.x.\": target q-s0.my_web.net.dep_1.bosh. never matches: the records have no instance group \
                 \"my_web\"; BOSH replaces underscores by hyphens, write \"my-web\""
                    .to_owned(),
            ),
        ),
        (
            "under.x",
            "q-s0.web.my_net.dep_1.bosh",
            Some(
                "\"under.x.\": target q-s0.web.my_net.dep_1.bosh. never matches: the records have no network \
                 \"my_net\"; BOSH replaces underscores by hyphens, write \"my-net\""
                    .to_owned(),
            ),
        ),
        (
            "under.x",
            "q-s0.web.net.dep_2.bosh",
            Some(
                "\"under.x.\": target q-s0.web.net.dep_2.bosh. never matches: the records have no deployment \
                 \"dep_2\"; BOSH replaces underscores by hyphens, write \"dep-2\""
                    .to_owned(),
            ),
        ),
    ] {
        let (_, warnings) = with_aliases(&format!(r#"{{"{alias}": ["{target}"]}}"#), "");
        let expected: Vec<String> = warning
            .iter()
            .map(|warning| format!("a.json: alias {warning}"))
            .collect();
        assert_eq!(warnings, expected, "{alias} {target}");
    }
    // Before the first records every target is in no domain.
    let (files, _) = AliasFiles::parse([("a.json", &br#"{"gone.x": ["c.bosh"]}"#[..])]).unwrap();
    assert_eq!(Snapshot::build(Records::default(), &files).1, [""; 0]);
}

#[test]
fn definitions_become_targets() {
    for (filter, check, label) in [
        ("", "", "q-s0"),
        ("smart", "other", "q-s0"),
        ("unhealthy", "asynchronous", "q-s1y0"),
        ("healthy", "synchronous", "q-s3y1"),
        ("all", "", "q-s4"),
    ] {
        let definition = format!(
            r#""x.alias": [{{"group_id": "1", "root_domain": "bosh", "health_filter": "{filter}",
                "initial_health_check": "{check}"}}]"#
        );
        let (snapshot, warnings) = with_aliases("{}", &definition);
        assert_eq!(warnings, [""; 0]);
        let expected = Target::Name(name(&format!("{label}.q-g1.bosh")));
        assert_eq!(
            snapshot.aliases().exact(&name("x.alias")),
            Some(&[expected][..])
        );
    }
    // Names of the aliases of each kind, and the instances that they select.
    for (kind, names) in [
        ("uuid", &["a", "b", "_"][..]),
        ("index", &["0", "1"]),
        ("az", &["z1", "z2"]),
        ("availability_zone", &["z1", "z2"]),
        ("network", &["net", "net2"]),
    ] {
        let definition = format!(
            r#""_.p.alias": [{{"group_id": "1", "root_domain": "bosh", "placeholder_type": "{kind}"}}]"#
        );
        let (snapshot, warnings) = with_aliases("{}", &definition);
        assert_eq!(warnings, [""; 0], "{kind}");
        assert_eq!(snapshot.alias_count(), names.len(), "{kind}");
        for text in names {
            let alias = name(&format!("{text}.p.alias"));
            assert!(snapshot.aliases().exact(&alias).is_some(), "{alias}");
        }
    }
    let uuid = r#""_.p.alias": [{"group_id": "1", "root_domain": "bosh", "placeholder_type": "uuid"},
        {"group_id": "9", "root_domain": "bosh", "placeholder_type": "uuid"},
        {"group_id": "1", "root_domain": "bosh.", "placeholder_type": "uuid"}]"#;
    let (snapshot, _) = with_aliases("{}", uuid);
    let targets = |text: &str| snapshot.aliases().exact(&name(text)).unwrap().to_vec();
    let addresses = |text: &str| {
        let found = resolve(&snapshot, &AllRunning, &name(text)).unwrap();
        let mut lasts: Vec<u8> = found.v4.iter().map(|address| address.octets()[3]).collect();
        lasts.sort_unstable();
        lasts
    };
    assert_eq!(addresses("a.p.alias"), [1]);
    // An instance without number stands for its group; a text becomes part of the filter.
    assert_eq!(targets("b.p.alias"), [Target::Name(name("q-s0.q-g1.bosh"))]);
    assert_eq!(addresses("b.p.alias"), [1, 2, 3]);
    assert_eq!(
        targets("_.p.alias"),
        [Target::Name(name("q-mx1s0.q-g1.bosh"))]
    );
    assert_eq!(snapshot.aliases().below(&name("c.p.alias")), None);
}

#[test]
fn unusable_definitions_are_reported() {
    let (snapshot, warnings) = with_aliases(
        r#"{"file.x": ["10.0.0.9"], "_.file.x": ["10.0.0.8"]}"#,
        r#""*.star.x": [], "a..x": [{"group_id": "1", "root_domain": "bosh"}],
            "bad.x": [{"group_id": "1", "root_domain": "a..b"}],
            "_.bad.x": [{"group_id": "1", "root_domain": "a..b", "placeholder_type": "uuid"}],
            "file.x": [{"group_id": "1", "root_domain": "bosh"}],
            "_.file.x": [{"group_id": "1", "root_domain": "bosh"}],
            "_.below.x": [{"group_id": "1", "root_domain": "bosh"}, {"group_id": "1", "root_domain": "bosh"}],
            "twice.x": [{"group_id": "1", "root_domain": "bosh"}, {"group_id": "1", "root_domain": "bosh"}]"#,
    );
    assert_eq!(
        warnings,
        [
            "records.json: alias \"*.star.x\": the star stands for itself, not for any label, so no usual name \
             matches; write \"_.star.x\"",
            "records.json: alias \"a..x\": \"a..x\" is not a domain name and is skipped: empty label",
            "records.json: alias \"bad.x\": it expands to \"q-s0.q-g1.a..b\", which is skipped: empty label",
            "records.json: alias \"_.bad.x\": it expands to \"q-s0.q-g1.a..b\", which is skipped: empty label",
        ]
    );
    let aliases = snapshot.aliases();
    let fleet = Target::Name(name("q-s0.q-g1.bosh"));
    for (text, expected) in [
        // It exists without an address, so that recursors are not asked for it.
        ("bad.x", Some(vec![])),
        ("file.x", Some(vec![Target::Address([10, 0, 0, 9].into())])),
        ("twice.x", Some(vec![fleet.clone()])),
        ("a.bad.x", None),
        ("star.x", None),
    ] {
        assert_eq!(
            aliases.exact(&name(text)).map(<[Target]>::to_vec),
            expected,
            "{text}"
        );
    }
    for (text, expected) in [
        (
            "y.file.x",
            Some(vec![Target::Address([10, 0, 0, 8].into())]),
        ),
        ("y.below.x", Some(vec![fleet])),
        ("y.z.below.x", None),
        ("x", None),
    ] {
        assert_eq!(aliases.below(&name(text)), expected, "{text}");
    }
    for (text, is_covered, zone) in [
        ("file.x", true, Some("file.x.")),
        ("y.file.x", true, Some("file.x.")),
        ("y.below.x", true, Some("below.x.")),
        ("below.x", false, Some("below.x.")),
        ("z.y.below.x", false, Some("below.x.")),
        ("x", false, None),
        (".", false, None),
        ("other.bosh", false, Some("bosh.")),
        ("a.bosh-agent-id", false, Some("bosh-agent-id.")),
    ] {
        assert_eq!(aliases.covers(&name(text)), is_covered, "{text}");
        let found = snapshot.local_zone(&name(text)).map(Name::to_string);
        assert_eq!(found.as_deref(), zone, "{text}");
    }
    assert_eq!(snapshot.alias_count(), 5);
    let found = resolve(&snapshot, &AllRunning, &name("bad.x")).unwrap();
    assert_eq!(found.existence, Existence::NoSuchName);
    let mut fixed: Vec<String> = aliases.fixed().map(|name: Name| name.to_string()).collect();
    fixed.sort_unstable();
    assert_eq!(
        fixed,
        [
            "_.below.x.",
            "_.file.x.",
            "bad.x.",
            "file.x.",
            "file.x.",
            "twice.x."
        ]
    );
}

#[test]
fn label_of_overlong_target_selects_nothing() {
    let long = [&"a".repeat(63)[..], &"b".repeat(63), &"c".repeat(62)].join(".");
    let (snapshot, warnings) = with_aliases(&format!(r#"{{"_.l.x": ["_.{long}"]}}"#), "");
    assert_eq!(warnings, [""; 0]);
    // 63 + 63 + 62 bytes with their lengths are 191, and the root one more: 62 bytes are left for the label.
    let label = "d".repeat(62);
    for (label, count) in [(&label[..], 1), (&"d".repeat(63), 0)] {
        let targets = snapshot.aliases().below(&name(&format!("{label}.l.x")));
        assert_eq!(targets.unwrap().len(), count);
    }
}

//----------- Followed files -------------------------------------------------

/// Returns what records mean: the instances with the rows found by their values, and the names of addresses.
fn meaning(records: &IndexedRecords) -> Vec<String> {
    let snapshot = Snapshot::build(records.clone(), &AliasFiles::default()).0;
    let index = snapshot.instance_index();
    let mut lines = Vec::new();
    for (row, instance) in (0..).zip(snapshot.instances()) {
        let groups: Vec<&str> = instance.group_ids().collect();
        let by_index = instance.index.map(|number| index.rows_with_index(number));
        let by_id = index.id.rows_with(instance.id.as_bytes());
        lines.push(format!(
            "{} {:?} {:?} {groups:?} {by_index:?} {by_id:?} {}",
            index.long_form(row),
            instance.ip,
            (
                instance.num_id,
                instance.az,
                instance.az_id,
                instance.network_id,
                instance.agent_id
            ),
            index.by_domain.rows(index.place_of(row).domain).len(),
        ));
    }
    for (group, text) in index.groups.iter() {
        lines.push(format!("{text} {:?}", index.by_group.rows(group)));
    }
    for last in 0..4 {
        lines.push(format!(
            "{last} {:?}",
            snapshot.reverse([10, 0, 0, last].into())
        ));
    }
    lines
}

#[test]
fn followed_file_equals_complete_reading() {
    let [a, b, c] = ["a", "b", "c"].map(row);
    let long = |id: &str| format!("{id}.web.net.dep.bosh");
    let pairs = |pairs: &[(u8, &str)]| {
        let pairs: Vec<String> = pairs
            .iter()
            .map(|(last, name)| format!(r#"["10.0.0.{last}","{name}"]"#))
            .collect();
        format!(r#","records":[{}],"version":1"#, pairs.join(","))
    };
    let three = pairs(&[(1, &long("a")), (2, &long("b")), (3, "odd")]);
    let before = first(&file(&[a.clone(), b.clone(), c.clone()], &three));
    let many: Vec<(u8, String)> = (0..70)
        .map(|number| (1 + number % 3, format!("n{number}")))
        .collect();
    let many: Vec<(u8, &str)> = many
        .iter()
        .map(|(last, name)| (*last, name.as_str()))
        .collect();
    for (rows, pairs) in [
        (
            vec![a.clone(), b.clone(), c.clone()],
            pairs(&[(3, &long("a")), (2, &long("b")), (1, "odd")]),
        ),
        (
            vec![a.clone(), b.clone(), c.clone()],
            pairs(&[(1, "new"), (1, &long("a")), (2, &long("b")), (3, "odd")]),
        ),
        (vec![a.clone(), b.clone(), c.clone()], pairs(&many)),
        (vec![a.clone(), b.clone(), c.clone()], pairs(&[])),
        // The long form of a pair is another row's, or no row's any more.
        (vec![b.clone(), c.clone()], three.clone()),
        (vec![c.clone(), a.clone(), b.clone()], three.clone()),
        (vec![row("x"), b.clone(), c.clone()], three.clone()),
        (vec![row("b"), b.clone(), c.clone()], three.clone()),
        // Values of a row that keeps its place.
        (
            vec![a.replace("[\"1\"]", "[\"2\"]"), b.clone(), c.clone()],
            three.clone(),
        ),
        (
            vec![a.replace("[\"1\"]", "[\"1\",\"2\"]"), b.clone(), c.clone()],
            three.clone(),
        ),
        (
            vec![a.clone(), b.replace(",4]", ",5]"), c.clone()],
            three.clone(),
        ),
        (
            vec![a.clone(), b.replace("\"z1\"", "null"), c.clone()],
            three.clone(),
        ),
        (
            vec![
                a.clone(),
                b.replace("\"10.0.0.1\"", "\"10.0.0.3\""),
                c.clone(),
                row("d"),
            ],
            three.clone(),
        ),
    ] {
        let text = file(&rows, &pairs);
        let followed = before.follow(&text[..]).unwrap();
        let complete = IndexedRecords::from(Records::parse(&text).unwrap().0);
        assert_eq!(
            meaning(&followed),
            meaning(&complete),
            "{}",
            text.escape_ascii()
        );
    }
}

#[test]
fn neighbouring_rows_keep_separate_places() {
    let other = row("b")
        .replace("\"web\"", "\"db\"")
        .replace("\"net\"", "\"net2\"")
        .replace("\"dep\"", "\"dep2\"")
        .replace("\"bosh\"", "\"other\"");
    let snapshot = snapshot(&file(&[row("a"), other, row("c")], ""));
    let forms: Vec<String> = (0..3)
        .map(|row| snapshot.instance_index().long_form(row))
        .collect();
    assert_eq!(
        forms,
        [
            "a.web.net.dep.bosh",
            "b.db.net2.dep2.other",
            "c.web.net.dep.bosh"
        ]
    );
}

#[test]
fn warnings_of_many_rows_are_counted() {
    let short = vec!["[1]".to_owned(); 1005];
    for (count, lines, last) in [
        (
            999,
            999,
            "row 999 has 1 cells for 13 columns and is dropped",
        ),
        (
            1000,
            1000,
            "row 1000 has 1 cells for 13 columns and is dropped",
        ),
        (1001, 1001, "and 1 more rows that cannot be used"),
        (1005, 1001, "and 5 more rows that cannot be used"),
    ] {
        let (_, warnings) = Records::parse(&file(&short[..count], "")).unwrap();
        assert_eq!(warnings.len(), lines);
        assert_eq!(warnings.last().map(String::as_str), Some(last));
        assert_eq!(
            warnings[0],
            "row 1 has 1 cells for 13 columns and is dropped"
        );
    }
}

#[test]
fn omitted_pairs_force_complete_reading() {
    // Positions of edits count every pair of the file.
    for (pairs, follows) in [
        (r#"["10.0.0.1","x"],["10.0.0.2","y"]"#, true),
        (r#"["nowhere","x"],["10.0.0.2","y"]"#, false),
        (r#"["10.0.0.1",""]"#, false),
        ("", true),
    ] {
        let text = file(&[row("a")], &format!(r#","records":[{pairs}]"#));
        let before = first(&text);
        assert_eq!(before.follow(&text[..]).is_some(), follows, "{pairs}");
        assert!(before.next(&text).is_ok());
    }
}

#[test]
fn unread_columns_hold_anything() {
    for cell in ["1e999", "null", "[[{}]]", "-0.0"] {
        let text = format!(
            r#"{{"record_keys": ["x", "id", "instance_group", "network", "deployment", "ip", "domain"],
            "record_infos": [[{cell}, "a", "web", "net", "dep", "10.0.0.1", "bosh"]]}}"#
        );
        let (records, warnings) = Records::parse(text.as_bytes()).unwrap();
        assert_eq!(warnings, [""; 0]);
        let snapshot = Snapshot::build(records, &AliasFiles::default()).0;
        assert_eq!(snapshot.instance(0).unwrap().id, "a", "{cell}");
    }
}

//----------- Places ---------------------------------------------------------

#[test]
fn patterns_find_places_in_ascending_order() {
    use crate::query::Pattern::{Any, Exact, Nothing, Prefix, Suffix};
    let places = [
        ("web", "net", "dep", "bosh"),
        ("webby", "net", "dep", "bosh"),
        ("web", "net2", "dep", "bosh"),
        ("web", "net", "dep2", "bosh"),
        ("web", "net", "dep", "other"),
    ];
    let mut rows = Vec::new();
    for (group, network, deployment, domain) in places {
        let row = row("a")
            .replace("\"web\"", &format!("{group:?}"))
            .replace("\"net\"", &format!("{network:?}"))
            .replace("\"dep\"", &format!("{deployment:?}"))
            .replace("\"bosh\"", &format!("{domain:?}"));
        rows.push(row);
    }
    let snapshot = snapshot(&file(&rows, ""));
    let places = &snapshot.instance_index().places;
    assert_eq!(places.len(), 5);
    for (domain, patterns, expected) in [
        (0, [Any, Any, Any], &[0, 1, 2, 3][..]),
        (1, [Any, Any, Any], &[4]),
        (2, [Any, Any, Any], &[]),
        (0, [Exact(b"web"), Any, Any], &[0, 2, 3]),
        (1, [Exact(b"web"), Any, Any], &[4]),
        (0, [Prefix(b"web"), Any, Any], &[0, 1, 2, 3]),
        (0, [Suffix(b"by"), Any, Any], &[1]),
        (0, [Any, Exact(b"net2"), Any], &[2]),
        (0, [Any, Prefix(b"net"), Any], &[0, 1, 2, 3]),
        (0, [Any, Any, Exact(b"dep2")], &[3]),
        (0, [Any, Any, Suffix(b"p")], &[0, 1, 2]),
        (0, [Exact(b"web"), Exact(b"net"), Exact(b"dep")], &[0]),
        (1, [Exact(b"web"), Exact(b"net"), Exact(b"dep")], &[4]),
        (0, [Exact(b"web"), Exact(b"net"), Exact(b"gone")], &[]),
        (0, [Exact(b"webby"), Exact(b"net2"), Exact(b"dep")], &[]),
        (0, [Exact(b"web"), Exact(b"net2"), Any], &[2]),
        (0, [Prefix(b"we"), Any, Exact(b"dep2")], &[3]),
        (0, [Exact(b"webby"), Any, Exact(b"dep2")], &[]),
        (0, [Any, Suffix(b"2"), Suffix(b"p")], &[2]),
        (0, [Exact(b"gone"), Any, Any], &[]),
        (0, [Nothing, Any, Any], &[]),
        (0, [Any, Nothing, Any], &[]),
        (0, [Any, Any, Nothing], &[]),
    ] {
        let found = places.find(domain, &patterns);
        assert_eq!(found[..], *expected, "{domain} {patterns:?}");
    }
}

#[test]
fn snapshots_tell_version_domains_and_rules() {
    let rows = [row("a"), row("b").replace("\"bosh\"", "\"My.Tld\"")];
    let snapshot = snapshot(&file(&rows, r#","version":7"#));
    assert_eq!(snapshot.version(), Some(7));
    assert_eq!(Snapshot::empty().version(), None);
    let mut domains: Vec<String> = snapshot.domains().map(Name::to_string).collect();
    domains.sort_unstable();
    assert_eq!(domains, ["bosh.", "my.tld."]);
    assert_eq!(snapshot.alias_count(), 0);
    assert_eq!(snapshot.rules(), NameRules::default());
    let rules = NameRules {
        formerr_for_malformed: false,
        nxdomain_for_empty_non_terminals: true,
    };
    let again = Snapshot::build(snapshot.records(), &AliasFiles::default())
        .0
        .with_rules(rules);
    assert_eq!(again.rules(), rules);
    assert_eq!(again.instances().len(), 2);
    let existence = |snapshot: &Snapshot| {
        resolve(snapshot, &AllRunning, &name("x.bosh")).map(|found| found.existence)
    };
    assert_eq!(existence(&snapshot), Some(Existence::Malformed));
    assert_eq!(existence(&again), Some(Existence::NoSuchName));
    let zone = |text: &str| {
        Snapshot::empty()
            .local_zone(&name(text))
            .map(Name::to_string)
    };
    assert_eq!(zone("a.bosh-agent-id").as_deref(), Some("bosh-agent-id."));
    assert_eq!(zone("a.bosh"), None);
}
