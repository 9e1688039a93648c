use super::*;

/// Returns the document as JSON without spaces; repeated members are written twice.
fn json(text: &str) -> String {
    fn write(json: &Json) -> String {
        let list = |items: Vec<String>| items.join(",");
        match json {
            Json::List(items) => format!("[{}]", list(items.iter().map(write).collect())),
            Json::Object(members) => {
                let member = |(name, value): &(String, Json)| format!("{name:?}:{}", write(value));
                format!("{{{}}}", list(members.iter().map(member).collect()))
            }
            other => other.to_string(),
        }
    }
    write(&parse(text).unwrap_or_else(|error| panic!("{text}: {error}")))
}

#[test]
fn members_need_no_line_ends() {
    let expected = r#"{"a":{"b":1,"c":{"d":true}},"e":[1,"x",{"f":2}]}"#;
    for text in [
        r#"a { b = 1 c { d = true } } e = [1, "x", {f = 2}]"#,
        "a = {\n  \"b\" = 1,\n  c {\n    d = true\n  }\n}\ne = [\n  1,\n  \"x\", # one\n  { f = 2 },\n]\n",
        "\u{feff}a{b=1,c{d=true}},e=[1,\"x\",{\"f\":2}]// end",
        "/* a */ a { /* { */ b = 1 // }\n c { d = true } }\r\n e = [ 1 , \"x\" , { f = 2 } ]",
    ] {
        assert_eq!(json(text), expected, "{text}");
    }
    assert_eq!(json(""), "{}");
    assert_eq!(
        json(r#"a "b" c { d = 1 } a = 2"#),
        r#"{"a":{"b":{"c":{"d":1}}},"a":2}"#
    );
    assert_eq!(json("connect-proxy.x = 1"), r#"{"connect-proxy.x":1}"#);
}

#[test]
fn values_are_read_exactly() {
    for (text, expected) in [
        ("0", "0"),
        ("-17", "-17"),
        ("0x1F", "31"),
        ("010", "8"),
        ("1.5", "1.5"),
        ("1e3", "1000.0"),
        ("-0.5", "-0.5"),
        (r#""a\"b\\c\td\u00e9\x41\101""#, r#""a\"b\\c\tdéAA""#),
        (
            r#""\a\b\f\n\r\v\U0001f600""#,
            r#""\u{7}\u{8}\u{c}\n\r\u{b}😀""#,
        ),
        (r#""urlprefix-${HOST}/a""#, r#""urlprefix-${HOST}/a""#),
        (
            r#""${lookup("a", {b = 1})}-$x}""#,
            r#""${lookup(\"a\", {b = 1})}-$x}""#,
        ),
        (r#""${x \"y\"}""#, r#""${x \"y\"}""#),
        ("<<EOT\n  one\ntwo\nEOT\n", r#""  one\ntwo\n""#),
        ("<<-EOT\n    one\n      two\n    EOT\n", r#""one\n  two\n""#),
        ("<<-EOT\n  one\n    EOT", r#""  one\n""#),
        ("[]", "[]"),
    ] {
        assert_eq!(
            json(&format!("a = {text}")),
            format!("{{\"a\":{expected}}}"),
            "{text}"
        );
    }
}

#[test]
fn errors_have_a_position() {
    for (text, expected) in [
        ("a = \n}", "line 2, column 1: a value was expected"),
        ("a {\n b = 1\n", "line 1, column 3: the object has no end"),
        ("a = 10s", "line 1, column 5: 10s is not a number"),
        ("a = 09", "line 1, column 5: 09 is not a number"),
        (
            "é = \"x\ny\"",
            "line 1, column 5: the text has no closing quote",
        ),
        (
            "a = \"${b",
            "line 1, column 5: the text has no closing quote",
        ),
        ("a = \"\\q\"", "line 1, column 6: unknown escape sequence"),
        (
            "a = yes",
            "line 1, column 5: yes is not a value; write \"yes\"",
        ),
        (
            "a \"b\" = 1",
            "line 1, column 7: \"=\" or \"{\" was expected",
        ),
        ("a = [1 2]", "line 1, column 8: \",\" or \"]\" was expected"),
        ("/* a", "line 1, column 1: the comment has no end"),
        (
            "a = <<EOT\nb",
            "line 1, column 5: the text has no end; close it with EOT",
        ),
        ("} a = 1", "line 1, column 1: a key was expected"),
        ("1 = 2", "line 1, column 1: a key was expected"),
        ("a = 1 /", "line 1, column 7: a key was expected"),
    ] {
        let error = parse(text).expect_err(text).to_string();
        assert!(error.starts_with(expected), "{text}: {error}");
    }
    let deep = "a = ".to_owned() + &"[".repeat(100_000);
    assert!(
        parse(&deep)
            .expect_err("too deep")
            .to_string()
            .contains("more than 64")
    );
}

#[test]
fn damaged_documents_never_panic() {
    let text =
        "service { name = \"é${a}\" port = -0x1 } /* x */ t = <<-E\n é\n E\n l = [1, {a = 2}] # z";
    for (cut, _) in text.char_indices() {
        let _ = parse(&text[..cut]);
        let _ = parse(&text[cut..]);
        for letter in ['"', '{', '}', '\\', '<', 'é', '\n'] {
            let _ = parse(&format!("{}{letter}{}", &text[..cut], &text[cut..]));
        }
    }
}

#[test]
fn numbers_and_texts_have_exact_forms() {
    for (text, expected) in [
        ("false", "false"),
        ("-1.5", "-1.5"),
        ("-0x10", "-16"),
        ("0X1f", "31"),
        ("-010", "-8"),
        ("0.25", "0.25"),
        ("2E2", "200.0"),
        ("9223372036854775807", "9223372036854775807"),
        // Braces and dollar signs outside of an interpolation are plain text.
        (r#""a{b""#, r#""a{b""#),
        (r#""a{b}c}d""#, r#""a{b}c}d""#),
        (r#""$5 and $x""#, r#""$5 and $x""#),
        // Within one, only its own closing brace ends it; quotes, line ends and escapes are kept.
        (r#""${a({b = 1}, "c")} $""#, r#""${a({b = 1}, \"c\")} $""#),
        (r#""${a {${b} "c"}}""#, r#""${a {${b} \"c\"}}""#),
        ("\"${a\nb}\"", r#""${a\nb}""#),
        (r#""${a\nb}\t""#, r#""${a\\nb}\t""#),
        ("<<EOT\nEOT\n", r#""""#),
        ("<<E\nE E\n  E \n", r#""E E\n""#),
        ("<<-E\n    a\n  b\n  E\n", r#""  a\nb\n""#),
        ("<<-E\n a\nb\n E\n", r#"" a\nb\n""#),
    ] {
        assert_eq!(
            json(&format!("a = {text}")),
            format!("{{\"a\":{expected}}}"),
            "{text}"
        );
    }
    // The parser continues on the line after a text of several lines.
    assert_eq!(
        json("a = <<-E\n  é\n  E\nb = 2 c = [<<F\nx\n F\n, 3]"),
        r#"{"a":"é\n","b":2,"c":["x\n",3]}"#
    );
    assert_eq!(json("a: 1, b: [true]"), r#"{"a":1,"b":[true]}"#);
    assert_eq!(json("_a.b-c1 = 1 é = 2"), r#"{"_a.b-c1":1,"é":2}"#);
}

#[test]
fn errors_state_the_remedy() {
    for (text, expected) in [
        (
            "a = +1",
            "line 1, column 5: +1 is not a number; write \"+1\" for a text",
        ),
        (
            "a = --1",
            "line 1, column 5: --1 is not a number; write \"--1\" for a text",
        ),
        (
            "a = -+1",
            "line 1, column 5: -+1 is not a number; write \"-+1\" for a text",
        ),
        (
            "a = 0x-1",
            "line 1, column 5: 0x-1 is not a number; write \"0x-1\" for a text",
        ),
        (
            "a = 0x+1",
            "line 1, column 5: 0x+1 is not a number; write \"0x+1\" for a text",
        ),
        (
            "a = 0xg",
            "line 1, column 5: 0xg is not a number; write \"0xg\" for a text",
        ),
        (
            "a = 10_0",
            "line 1, column 5: 10_0 is not a number; write \"10_0\" for a text",
        ),
        (
            "a = 9223372036854775808",
            "line 1, column 5: 9223372036854775808 is not a number; write \"9223372036854775808\" for a text",
        ),
        (
            "a = 1e999",
            "line 1, column 5: 1e999 is not a number; write \"1e999\" for a text",
        ),
        (
            "a = -inf",
            "line 1, column 5: -inf is not a number; write \"-inf\" for a text",
        ),
        (
            "a = -infinity.e",
            "line 1, column 5: -infinity.e is not a number; write \"-infinity.e\" for a text",
        ),
        (
            "a = <<\nb",
            "line 1, column 5: a value was expected; a text of several lines begins with <<MARKER",
        ),
        (
            "a = <<-\nb",
            "line 1, column 5: a value was expected; a text of several lines begins with <<MARKER",
        ),
        (
            "a = <b\nb",
            "line 1, column 5: a value was expected; a text of several lines begins with <<MARKER",
        ),
        (
            "a = <<E",
            "line 1, column 5: a value was expected; a text of several lines begins with <<MARKER",
        ),
        (
            "a = <<E\nE2\n",
            "line 1, column 5: the text has no end; close it with E on a line of its own",
        ),
        (
            "a = <<E\nx\n  E\n = 1",
            "line 4, column 2: a key was expected: a word or a text in quotes",
        ),
        (
            "\n é = [\n 1,\n yes]",
            "line 4, column 2: yes is not a value; write \"yes\"",
        ),
        (
            "a = \"\\",
            "line 1, column 6: unknown escape sequence; write \"\\\\\" for a backslash",
        ),
        (
            "a = \"\\x4\"",
            "line 1, column 6: unknown escape sequence; write \"\\\\\" for a backslash",
        ),
        (
            "a = \"\\ud800\"",
            "line 1, column 6: unknown escape sequence; write \"\\\\\" for a backslash",
        ),
        (
            "a = \"b",
            "line 1, column 5: the text has no closing quote on its line",
        ),
        (
            "a b",
            "line 1, column 4: \"=\" or \"{\" was expected after \"a\"",
        ),
        (
            "a \"b\" = 1",
            "line 1, column 7: \"=\" or \"{\" was expected after \"a\"",
        ),
        (
            "a { b = 1",
            "line 1, column 3: the object has no end; close it with \"}\"",
        ),
        (
            "a = [1",
            "line 1, column 7: \",\" or \"]\" was expected after an item of a list",
        ),
        ("a = [1,", "line 1, column 8: a value was expected"),
        (
            "/* a\n",
            "line 1, column 1: the comment has no end; close it with */",
        ),
        (
            "a = 1 }",
            "line 1, column 7: a key was expected; remove the surplus \"}\" or quote the text",
        ),
    ] {
        assert_eq!(parse(text).expect_err(text).to_string(), expected, "{text}");
    }
}

#[test]
fn only_depth_is_limited() {
    let nested = |levels: usize| format!("a = {}{}", "[".repeat(levels), "]".repeat(levels));
    assert!(parse(&nested(64)).is_ok());
    assert_eq!(
        parse(&nested(65)).unwrap_err().to_string(),
        "line 1, column 69: more than 64 objects and lists in each other"
    );
    // The labels of a block are objects too.
    let labels = |count: usize| format!("a {}{{ }}", "b ".repeat(count));
    assert!(parse(&labels(63)).is_ok());
    assert_eq!(
        parse(&labels(64)).unwrap_err().to_string(),
        "line 1, column 131: more than 64 objects and lists in each other"
    );
    let beside = "a = [[], {}] b { } c \"d\" { }\n".repeat(200);
    let Json::Object(members) = parse(&beside).unwrap() else {
        panic!("an object")
    };
    assert_eq!(members.len(), 600);
}
