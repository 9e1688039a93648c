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

    /// Parses `key = value`, or a block.
    fn member(&mut self) -> Result<(String, Json), SyntaxError> {
        let name = self.key()?;
        self.skip_blank()?;
        // Version 2 and JSON also have a colon.
        let value = if self.take('=') || self.take(':') {
            self.skip_blank()?;
            self.value()?
        } else {
            self.block(&name)?
        };
        Ok((name, value))
    }

    /// Parses the object of a block and the labels before it: `a "b" "c" { }` is `a = { b = { c = { } } }`.
    fn block(&mut self, name: &str) -> Result<Json, SyntaxError> {
        self.skip_blank()?;
        match self.peek() {
            Some('{') => self.value(),
            Some(letter) if letter == '"' || is_key_start(letter) => self.nested(|parser| {
                let label = parser.key()?;
                Ok(Json::Object(vec![(label, parser.block(name)?)]))
            }),
            _ => Err(self.error(&format!("\"=\" or \"{{\" was expected after {name:?}"))),
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
        let parsed = parse(self)?;
        self.depth -= 1;
        Ok(parsed)
    }

    fn object(&mut self) -> Result<Json, SyntaxError> {
        let start = self.at;
        self.at += 1;
        let members = self.members()?;
        if self.take('}') {
            return Ok(Json::Object(members));
        }
        self.at = start;
        Err(self.error("the object has no end; close it with \"}\""))
    }

    fn list(&mut self) -> Result<Json, SyntaxError> {
        self.at += 1;
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
mod tests;
