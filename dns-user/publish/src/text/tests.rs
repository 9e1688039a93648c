use super::{reader::remedy_for_unknown, *};

fn problems_of(text: &str, read: impl Fn(&Reader<'_>)) -> Vec<String> {
    let problems = Problems::of("zone.yml");
    for document in documents(text) {
        if let Some(node) = parse(document, &problems) {
            read(&Reader::root(&node, &problems));
        }
    }
    problems.into_vec().iter().map(Problem::to_string).collect()
}

#[test]
fn documents_keep_lines() {
    let text = "# head\n---\na: 1\n--- # second\nb: 2\n---\n...\nc: 3\n";
    let found: Vec<_> =
        documents(text).iter().map(|document| (document.line, document.text.trim())).collect();
    assert_eq!(found, [(2, "a: 1"), (4, "# second\nb: 2"), (8, "c: 3")]);
}

#[test]
fn lines_count_within_file() {
    let found = problems_of("a: 1\n---\nb:\n- {c: 2}\n- d\n", |root| {
        let mut fields = root.fields().unwrap();
        if let Some(list) = fields.optional("b") {
            for item in list.items().unwrap() {
                if let Some(mut item) = item.fields() {
                    item.required("c").unwrap().text();
                }
            }
        }
    });
    assert_eq!(
        found,
        [
            "zone.yml:4: b[0].c: 2 instead of text; put it in quotes: \"2\"",
            "zone.yml:5: b[1]: the text \"d\" instead of a map; give a map",
        ]
    );
}

#[test]
fn syntax_error_stays_in_document() {
    let mut seen = std::cell::Cell::new(0);
    let found = problems_of("a: [1\n---\nb: 2\n---\nc: 1\nc: 2\n", |_| seen.set(seen.get() + 1));
    assert_eq!(*seen.get_mut(), 1);
    assert_eq!(found.len(), 2, "{found:?}");
    assert!(found[0].starts_with("zone.yml:"), "{found:?}");
    assert!(found[1].starts_with("zone.yml:6: not valid YAML or JSON: duplicate"), "{found:?}");
}

#[test]
fn json_reads_like_yaml() {
    let found = problems_of("{\n  \"ttl\": 9999999999,\n  \"tll\": true\n}\n", |root| {
        let mut fields = root.fields().unwrap();
        fields.required("ttl").unwrap().integer(0..=i32::MAX.cast_unsigned());
        fields.finish(&["ttl", "dnsName"]);
    });
    assert_eq!(
        found,
        [
            "zone.yml:2: ttl: 9999999999 is out of range; give a whole number from 0 to 2147483647",
            "zone.yml:3: tll: unknown member \"tll\"; did you mean \"ttl\"? If not, remove it",
        ]
    );
}

#[test]
fn distant_names_are_not_suggested() {
    assert_eq!(
        remedy_for_unknown("colour", &["ttl", "dnsName"]),
        "remove it; known members are ttl, dnsName"
    );
    assert!(remedy_for_unknown("dnsname", &["ttl", "dnsName"]).contains("\"dnsName\""));
}
