//! HCL version 1, the language of Consul's own configuration files.
//!
//! Version 2 (Terraform) is another language: it refuses several attributes on a line, quoted keys
//! of attributes and nested blocks on a line, and evaluates `${...}`, which is plain text here.

use std::fmt;

use dns_core::config::reader::Json;

/// Maximum depth of objects and lists.
const MAX_DEPTH: usize = 64;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SyntaxError {
    /// Number of the line, counted from 1.
    line: usize,
    /// Character of the line, from 1.
    column: usize,
    problem: String,
}

impl fmt::Display for SyntaxError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "line {}, column {}: {}",
            self.line, self.column, self.problem
        )
    }
}

/// Parses a document. Repeated keys stay repeated members, in their order; a block with labels
/// becomes objects within objects.
pub(super) fn parse(text: &str) -> Result<Json, SyntaxError> {
    // Some editors begin UTF-8 files with a byte order mark.
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let mut parser = Parser {
        text,
        at: 0,
        depth: 0,
    };
    let members = parser.members()?;
    match parser.peek() {
        None => Ok(Json::Object(members)),
        Some(_) => {
            Err(parser.error("a key was expected; remove the surplus \"}\" or quote the text"))
        }
    }
}

struct Parser<'a> {
    text: &'a str,
    /// Offset of the next byte.
    at: usize,
    depth: usize,
}

impl<'a> Parser<'a> {
    /// Parses members up to the end of their object or of the document.
    fn members(&mut self) -> Result<Vec<(String, Json)>, SyntaxError> {
        let mut members = Vec::new();
        loop {
            self.skip_blank()?;
            match self.peek() {
                None | Some('}') => return Ok(members),
                Some(_) => members.push(self.member()?),
            }
            self.skip_blank()?;
            // A comma between two members is optional.
            self.take(',');
        }
    }

    /// Parses `key = value`, or keys followed by an object.
    fn member(&mut self) -> Result<(String, Json), SyntaxError> {
        let name = self.key()?;
        let mut labels = Vec::new();
        loop {
            self.skip_blank()?;
            match self.peek() {
                // Version 2 and JSON also have a colon.
                Some('=' | ':') if labels.is_empty() => {
                    self.at += 1;
                    self.skip_blank()?;
                    return Ok((name, self.value()?));
                }
                Some('{') => {
                    let block = self.value()?;
                    // `a "b" "c" { }` is `a = { b = { c = { } } }`.
                    let mut inner = block;
                    for label in labels.into_iter().rev() {
                        inner = Json::Object(vec![(label, inner)]);
                    }
                    return Ok((name, inner));
                }
                Some(letter) if letter == '"' || is_key_start(letter) => labels.push(self.key()?),
                _ => {
                    return Err(self.error(&format!("\"=\" or \"{{\" was expected after {name:?}")));
                }
            }
        }
    }

    fn key(&mut self) -> Result<String, SyntaxError> {
        match self.peek() {
            Some('"') => self.string(),
            Some(letter) if is_key_start(letter) => Ok(self.word().to_owned()),
            _ => Err(self.error("a key was expected: a word or a text in quotes")),
        }
    }

    fn value(&mut self) -> Result<Json, SyntaxError> {
        match self.peek() {
            Some('"') => Ok(Json::Text(self.string()?)),
            Some('<') => Ok(Json::Text(self.heredoc()?)),
            Some('[') => self.nested(Self::list),
            Some('{') => self.nested(Self::object),
            Some('0'..='9' | '-' | '+' | '.') => self.number(),
            Some(letter) if is_key_start(letter) => {
                let start = self.at;
                match self.word() {
                    "true" => Ok(Json::Bool(true)),
                    "false" => Ok(Json::Bool(false)),
                    word => {
                        // The error names the position of the word, not of what follows.
                        self.at = start;
                        Err(self.error(&format!("{word} is not a value; write \"{word}\"")))
                    }
                }
            }
            _ => Err(self.error("a value was expected")),
        }
    }

    fn nested(
        &mut self,
        parse: impl FnOnce(&mut Self) -> Result<Json, SyntaxError>,
    ) -> Result<Json, SyntaxError> {
        // Each level is a call, and the stack has an end.
        if self.depth == MAX_DEPTH {
            return Err(self.error(&format!(
                "more than {MAX_DEPTH} objects and lists in each other"
            )));
        }
        self.depth += 1;
        // The bracket.
        self.at += 1;
        let parsed = parse(self)?;
        self.depth -= 1;
        Ok(parsed)
    }

    fn object(&mut self) -> Result<Json, SyntaxError> {
        let start = self.at - 1;
        let members = self.members()?;
        if self.take('}') {
            return Ok(Json::Object(members));
        }
        self.at = start;
        Err(self.error("the object has no end; close it with \"}\""))
    }

    fn list(&mut self) -> Result<Json, SyntaxError> {
        let mut items = Vec::new();
        loop {
            self.skip_blank()?;
            if self.take(']') {
                return Ok(Json::List(items));
            }
            items.push(self.value()?);
            self.skip_blank()?;
            if !self.take(',') && self.peek() != Some(']') {
                return Err(self.error("\",\" or \"]\" was expected after an item of a list"));
            }
        }
    }

    fn number(&mut self) -> Result<Json, SyntaxError> {
        let start = self.at;
        // Also characters that belong to no number, so that an error shows the whole word.
        let length = self
            .rest()
            .find(|letter: char| !(letter.is_ascii_alphanumeric() || "+-._".contains(letter)))
            .unwrap_or(self.rest().len());
        let text = &self.rest()[..length];
        let (sign, digits) = match text.strip_prefix('-') {
            Some(digits) => (-1, digits),
            None => (1, text),
        };
        // Rust parses a sign of its own, which would allow two.
        let is_plain = !digits.starts_with(['+', '-']);
        let whole = match digits
            .strip_prefix("0x")
            .or_else(|| digits.strip_prefix("0X"))
        {
            Some(hex) if hex.starts_with(['+', '-']) => None,
            Some(hex) => i64::from_str_radix(hex, 16).ok(),
            // A number with a leading 0 is octal (Go's strconv.ParseInt with base 0).
            None if digits.len() > 1
                && digits.starts_with('0')
                && !digits.contains(['.', 'e', 'E']) =>
            {
                i64::from_str_radix(digits, 8).ok()
            }
            None => digits.parse::<i64>().ok(),
        };
        // Rust also parses `inf` and `nan`.
        let is_decimal = digits
            .bytes()
            .all(|byte| byte.is_ascii_digit() || b"+-.eE".contains(&byte));
        let number = match whole.filter(|_| is_plain) {
            Some(whole) => Some((sign * whole).into()),
            None if is_decimal && digits.contains(['.', 'e', 'E']) => {
                let fraction = digits.parse::<f64>().ok();
                fraction.and_then(|number| serde_json::Number::from_f64(sign as f64 * number))
            }
            None => None,
        };
        match number {
            Some(number) => {
                self.at = start + length;
                Ok(Json::Number(number))
            }
            None => Err(self.error(&format!(
                "{text} is not a number; write \"{text}\" for a text"
            ))),
        }
    }

    /// Parses a text in quotes. `${...}` may hold quotes and line ends, and is not unescaped, except
    /// for `\"`.
    fn string(&mut self) -> Result<String, SyntaxError> {
        let start = self.at;
        self.at += 1;
        let mut text = String::new();
        let mut braces = 0_usize;
        while let Some(letter) = self.peek() {
            match letter {
                '"' if braces == 0 => {
                    self.at += 1;
                    return Ok(text);
                }
                // A forgotten quote must not turn the rest of the file into a text.
                '\n' if braces == 0 => break,
                '\\' if braces == 0 => {
                    text.push(self.escaped()?);
                    continue;
                }
                '\\' if self.rest().starts_with("\\\"") => self.at += 1,
                '$' if braces == 0 && self.rest().starts_with("${") => {
                    text.push('$');
                    self.at += 1;
                    braces = 1;
                }
                '{' if braces > 0 => braces += 1,
                '}' if braces > 0 => braces -= 1,
                _ => {}
            }
            // The character at the offset; an escape or "$" has advanced it.
            if let Some(letter) = self.peek() {
                text.push(letter);
                self.at += letter.len_utf8();
            }
        }
        self.at = start;
        Err(self.error("the text has no closing quote on its line"))
    }

    fn escaped(&mut self) -> Result<char, SyntaxError> {
        let rest = &self.rest()[1..];
        let found = match rest.chars().next() {
            Some('a') => Some(('\u{7}', 2)),
            Some('b') => Some(('\u{8}', 2)),
            Some('f') => Some(('\u{c}', 2)),
            Some('n') => Some(('\n', 2)),
            Some('r') => Some(('\r', 2)),
            Some('t') => Some(('\t', 2)),
            Some('v') => Some(('\u{b}', 2)),
            Some(letter @ ('\\' | '"')) => Some((letter, 2)),
            Some('x') => coded(rest, 1, 2, 16),
            Some('u') => coded(rest, 1, 4, 16),
            Some('U') => coded(rest, 1, 8, 16),
            Some('0'..='7') => coded(rest, 0, 3, 8),
            _ => None,
        };
        let (letter, length) = found
            .ok_or_else(|| self.error("unknown escape sequence; write \"\\\\\" for a backslash"))?;
        self.at += length;
        Ok(letter)
    }

    /// Parses `<<MARKER` with the lines up to `MARKER`. `<<-` removes the indentation of the closing
    /// marker if every line has it.
    fn heredoc(&mut self) -> Result<String, SyntaxError> {
        let rest = self.rest();
        let opening = rest.split_once('\n').and_then(|(first, body)| {
            let marker = first.strip_prefix("<<")?.trim_end();
            Some((
                marker.strip_prefix('-').unwrap_or(marker),
                marker.starts_with('-'),
                body,
            ))
        });
        let Some((marker, is_indented, body)) = opening.filter(|(marker, ..)| !marker.is_empty())
        else {
            return Err(
                self.error("a value was expected; a text of several lines begins with <<MARKER")
            );
        };
        let mut end = 0;
        for line in body.split_inclusive('\n') {
            // The closing marker may be indented.
            if line.trim() == marker {
                let indent = &line[..line.len() - line.trim_start().len()];
                let lines = body[..end].split_inclusive('\n');
                let stripped: Option<String> =
                    lines.map(|line| line.strip_prefix(indent)).collect();
                let text = stripped
                    .filter(|_| is_indented)
                    .unwrap_or_else(|| body[..end].to_owned());
                // The line end of the marker stays, as a separator.
                self.at = self.text.len() - body.len() + end + line.trim_end().len();
                return Ok(text);
            }
            end += line.len();
        }
        Err(self.error(&format!(
            "the text has no end; close it with {marker} on a line of its own"
        )))
    }

    /// Skips white space and comments.
    fn skip_blank(&mut self) -> Result<(), SyntaxError> {
        loop {
            let rest = self.rest();
            self.at = self.text.len() - rest.trim_start().len();
            let rest = self.rest();
            if rest.starts_with('#') || rest.starts_with("//") {
                self.at += rest.find('\n').unwrap_or(rest.len());
            } else if rest.starts_with("/*") {
                match rest.find("*/") {
                    Some(end) => self.at += end + 2,
                    None => return Err(self.error("the comment has no end; close it with */")),
                }
            } else {
                return Ok(());
            }
        }
    }

    /// Takes the characters of a key or a boolean, at least one.
    fn word(&mut self) -> &'a str {
        let rest = self.rest();
        let length = rest
            .find(|letter: char| !(letter.is_alphanumeric() || "_-.".contains(letter)))
            .unwrap_or(rest.len());
        self.at += length;
        &rest[..length]
    }

    fn take(&mut self, letter: char) -> bool {
        let is_next = self.peek() == Some(letter);
        if is_next {
            self.at += letter.len_utf8();
        }
        is_next
    }

    fn peek(&self) -> Option<char> {
        self.rest().chars().next()
    }

    fn rest(&self) -> &'a str {
        &self.text[self.at..]
    }

    fn error(&self, problem: &str) -> SyntaxError {
        let before = &self.text[..self.at];
        let line_start = before.rfind('\n').map_or(0, |at| at + 1);
        SyntaxError {
            line: before.matches('\n').count() + 1,
            column: before[line_start..].chars().count() + 1,
            problem: problem.to_owned(),
        }
    }
}

/// Reads a character's code behind a backslash; returns the character and its length with the backslash.
fn coded(rest: &str, start: usize, digits: usize, radix: u32) -> Option<(char, usize)> {
    let code = rest.get(start..start + digits)?;
    let code = u32::from_str_radix(code, radix).ok()?;
    Some((char::from_u32(code)?, 1 + start + digits))
}

fn is_key_start(letter: char) -> bool {
    letter.is_alphabetic() || letter == '_'
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the document as JSON without spaces; repeated members are written twice.
    fn json(text: &str) -> String {
        fn write(json: &Json) -> String {
            let list = |items: Vec<String>| items.join(",");
            match json {
                Json::List(items) => format!("[{}]", list(items.iter().map(write).collect())),
                Json::Object(members) => {
                    let member =
                        |(name, value): &(String, Json)| format!("{name:?}:{}", write(value));
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
        let text = "service { name = \"é${a}\" port = -0x1 } /* x */ t = <<-E\n é\n E\n l = [1, {a = 2}] # z";
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
        let beside = "a = [[], {}] b { }\n".repeat(200);
        let Json::Object(members) = parse(&beside).unwrap() else {
            panic!("an object")
        };
        assert_eq!(members.len(), 400);
    }
}
