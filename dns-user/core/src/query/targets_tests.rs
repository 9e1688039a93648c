//! Tests of the instances that each form of a name selects.

use super::*;

fn domains(texts: &[&str]) -> Domains {
    Domains::new((0..).zip(texts.iter().copied()))
}

fn values<'n>(values: &[&'n str]) -> Values<'n> {
    values.iter().map(|value| value.as_bytes()).collect()
}

/// Returns the criteria of an instance's id.
fn id(id: &str) -> QueryCriteria<'_> {
    QueryCriteria {
        id: Some(id.as_bytes()),
        ..QueryCriteria::default()
    }
}

fn check(text: &str, domains: &Domains, expected: &Result<QueryTarget<'static>, Malformed>) {
    // Criteria and names compare only if they live equally long.
    let name: &'static Name = Box::leak(Box::new(Name::from_text(text).unwrap()));
    assert_eq!(&QueryTarget::read(name, domains), expected, "{text}");
}

#[test]
fn labels_select_instances() {
    use Pattern::{Any, Exact, Nothing, Prefix, Suffix};
    use QueryTarget::{Agent, Anywhere, Within};
    let domains = domains(&["bosh.", "my.tld.", "Cap."]);
    let smart = || QueryCriteria {
        filter: Filter::default(),
        ..QueryCriteria::default()
    };
    let at = |place| QueryCriteria {
        place: Some(place),
        ..id("x")
    };
    for (text, expected) in [
        ("a.bosh-agent-id", Ok(Agent(b"a"))),
        ("a.b.bosh-agent-id", Ok(Anywhere(Some(b"a")))),
        ("bosh-agent-id", Ok(Anywhere(Some(b"bosh-agent-id")))),
        (".", Ok(Anywhere(None))),
        ("x.elsewhere", Ok(Anywhere(Some(b"x")))),
        ("x.elsewhere.other", Ok(Anywhere(Some(b"x")))),
        // A domain with capitals is never matched.
        ("x.q-g1.cap", Ok(Anywhere(Some(b"x")))),
        // The labels of a domain that follows the first label directly count as middle labels.
        ("bosh", Ok(Within(0, id("bosh")))),
        ("x.bosh", Err(Malformed::Form)),
        ("my.tld", Err(Malformed::Form)),
        (
            "x.my.tld",
            Ok(Within(1, at([Exact(b"my"), Exact(b"tld"), Any]))),
        ),
        ("x.web.bosh", Ok(Within(0, id("x")))),
        ("x.web.my.tld", Ok(Within(1, id("x")))),
        (
            "x.q-g1.bosh",
            Ok(Within(
                0,
                QueryCriteria {
                    group: Some(b"1"),
                    ..id("x")
                },
            )),
        ),
        ("x.a.b.bosh", Err(Malformed::Form)),
        (
            "x.a.b.c.bosh",
            Ok(Within(0, at([Exact(b"a"), Exact(b"b"), Exact(b"c")]))),
        ),
        (
            "x.*.b*.*c.bosh",
            Ok(Within(0, at([Any, Prefix(b"b"), Suffix(b"c")]))),
        ),
        (
            "x.a*b.**.*.bosh",
            Ok(Within(0, at([Nothing, Suffix(b"*"), Any]))),
        ),
        (
            "x.q-g2.b.c.bosh",
            Ok(Within(
                0,
                QueryCriteria {
                    group: Some(b"2"),
                    ..at([Exact(b"q-g2"), Exact(b"b"), Exact(b"c")])
                },
            )),
        ),
        ("x.a.b.c.d.bosh", Err(Malformed::Form)),
        ("q-s0.web.bosh", Ok(Within(0, smart()))),
        (
            "q-s0.q-g1.bosh",
            Ok(Within(
                0,
                QueryCriteria {
                    group: Some(b"1"),
                    ..smart()
                },
            )),
        ),
        ("q-.q-g1.bosh", Err(Malformed::Filter)),
        ("q-x.q-g1.bosh", Err(Malformed::Filter)),
        // The form is looked at first.
        ("q-x.bosh", Err(Malformed::Form)),
    ] {
        check(text, &domains, &expected);
    }
}

#[test]
fn root_domain_is_empty_label() {
    let domains = domains(&["."]);
    let within = |criteria| Ok(QueryTarget::Within(0, criteria));
    for (text, expected) in [
        (".", within(QueryCriteria::default())),
        ("x", within(id("x"))),
        ("x.y", Err(Malformed::Form)),
        (
            "x.web.net",
            within(QueryCriteria {
                place: Some([Pattern::Exact(b"web"), Pattern::Exact(b"net"), Pattern::Any]),
                ..id("x")
            }),
        ),
        ("x.web.net.dep", Err(Malformed::Form)),
    ] {
        check(text, &domains, &expected);
    }
}

#[test]
fn letters_of_a_filter_are_criteria() {
    for (text, expected) in [
        (
            "a1i2m3n4",
            Filter {
                az_ids: values(&["1"]),
                indexes: values(&["2"]),
                num_ids: values(&["3"]),
                network_ids: values(&["4"]),
                ..Filter::default()
            },
        ),
        (
            "m1a2m30a20m1",
            Filter {
                az_ids: values(&["2", "20"]),
                num_ids: values(&["1", "30", "1"]),
                ..Filter::default()
            },
        ),
        ("s0", Filter::default()),
        ("y0", Filter::default()),
        ("y2", Filter::default()),
        ("y0y1", Filter::default()),
        (
            "y1y0",
            Filter {
                synchronous: true,
                ..Filter::default()
            },
        ),
        (
            "s4y1",
            Filter {
                strategy: Strategy::All,
                synchronous: true,
                ..Filter::default()
            },
        ),
    ] {
        assert_eq!(Filter::read(text.as_bytes()), Some(expected), "{text}");
    }
    for (text, strategy) in [
        ("s0", Strategy::Smart),
        ("s1", Strategy::Unhealthy),
        ("s2", Strategy::Smart),
        ("s3", Strategy::Healthy),
        ("s4", Strategy::All),
        ("s5", Strategy::Smart),
        ("s01", Strategy::Smart),
        ("s11", Strategy::Smart),
        ("s3s1", Strategy::Healthy),
        ("sx3s1", Strategy::Unhealthy),
        ("a3", Strategy::Smart),
    ] {
        let filter = Filter::read(text.as_bytes()).unwrap();
        assert_eq!(filter.strategy, strategy, "{text}");
    }
}

#[test]
fn patterns_fit_ends_or_wholes() {
    for (label, fitting, others) in [
        ("*", &["", "a", "a*b"][..], &[][..]),
        ("", &["", "a"], &[]),
        ("ab*", &["ab", "abc"], &["a", "xab", ""]),
        ("*ab", &["ab", "xab"], &["b", "abx", ""]),
        ("ab", &["ab"], &["a", "abc", "xab", ""]),
        ("a*b", &[], &["ab", "a*b", "axb"]),
    ] {
        let pattern = Pattern::read(label.as_bytes());
        for text in fitting {
            assert!(pattern.fits(text.as_bytes()), "{label} {text}");
        }
        for text in others {
            assert!(!pattern.fits(text.as_bytes()), "{label} {text}");
        }
    }
}

#[test]
fn domains_are_alike_by_their_names() {
    let of = domains;
    for (one, other, expected) in [
        (&["bosh.", "my.tld."][..], &["my.tld.", "bosh."][..], true),
        (&[], &[], true),
        (&["bosh."], &["bosh.", "my.tld."], false),
        (&["bosh.", "my.tld."], &["bosh."], false),
        (&["bosh."], &["other."], false),
        (&["bosh."], &["Bosh."], false),
        (&["Bosh."], &["BOSH."], true),
        (&["Bosh.", "bosh."], &["bosh."], true),
        (&["a..b.", "bosh."], &["bosh."], true),
    ] {
        assert_eq!(
            of(one).are_named_like(&of(other)),
            expected,
            "{one:?} {other:?}"
        );
        assert_eq!(
            of(other).are_named_like(&of(one)),
            expected,
            "{one:?} {other:?}"
        );
    }
    let domains = of(&["a..b.", "Cap.", "bosh."]);
    let name = |text: &str| Name::from_text(text).unwrap();
    assert_eq!(
        [0, 1, 2, 3].map(|number| domains.name(number).cloned()),
        [None, None, Some(name("bosh")), None]
    );
    assert_eq!(domains.get(b"\x03cap\0"), Some(&name("cap")));
    assert_eq!(domains.get(b"\x05other\0"), None);
    let mut names: Vec<String> = domains.names().map(Name::to_string).collect();
    names.sort_unstable();
    assert_eq!(names, ["bosh.", "cap."]);
    for (text, longest) in [("x.y.bosh", Some((2, 1))), ("x.cap", None), ("a.b", None)] {
        assert_eq!(domains.longest(&name(text)), longest, "{text}");
    }
}

#[test]
fn malformed_names_have_a_reason() {
    assert_eq!(
        Malformed::Form.to_string(),
        "between the first label and the domain there must be one label (short form) or three (long form)"
    );
    assert_eq!(
        Malformed::Filter.to_string(),
        "the first label is a filter without any of a, i, m, n, s, y followed by digits"
    );
}
