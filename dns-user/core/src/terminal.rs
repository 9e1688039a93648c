//! Escaping of foreign text for terminals and logs.
//!
//! Terminals interpret control characters (C0, DEL, and C1 as single UTF-8 characters), and
//! bidirectional formatting characters change the apparent order of a line.

use std::{borrow::Cow, fmt::Write as _};

/// Returns whether a terminal interprets a character instead of showing it.
pub fn is_active(character: char) -> bool {
    character.is_control()
        || matches!(
            character,
            '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}' | '\u{2029}'
                | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}'
        )
}

/// Escapes all active characters, so the text stays on one line.
pub fn line(text: &str) -> Cow<'_, str> {
    escape(text, is_active, |out, character| {
        write!(out, "{}", character.escape_default())
    })
}

/// Escapes all active characters except line feeds and tabs.
pub fn lines(text: &str) -> Cow<'_, str> {
    escape(
        text,
        |character| is_active(character) && character != '\n' && character != '\t',
        |out, character| write!(out, "{}", character.escape_default()),
    )
}

/// Escapes active characters in JSON without changing its value.
pub fn json(text: &str) -> Cow<'_, str> {
    // All of them are in the Basic Multilingual Plane, so four digits suffice.
    escape(
        text,
        |character| is_active(character) && !matches!(character, '\n' | '\r' | '\t'),
        |out, character| write!(out, "\\u{:04x}", u32::from(character)),
    )
}

fn escape(
    text: &str,
    is_active: impl Fn(char) -> bool,
    write: impl Fn(&mut String, char) -> std::fmt::Result,
) -> Cow<'_, str> {
    if !text.chars().any(&is_active) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len() + 16);
    for character in text.chars() {
        if is_active(character) {
            // Writing to a string cannot fail.
            let _ = write(&mut out, character);
        } else {
            out.push(character);
        }
    }
    Cow::Owned(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn active_characters_are_escaped() {
        assert_eq!(
            line("a\u{1b}[2J\n\u{9b}2J\u{202e}b\u{7f}é"),
            "a\\u{1b}[2J\\n\\u{9b}2J\\u{202e}b\\u{7f}é"
        );
        assert_eq!(lines("a\tb\nc\r\u{85}"), "a\tb\nc\\r\\u{85}");
        assert!(matches!(line("plain text, ünïcödé"), Cow::Borrowed(_)));
    }

    #[test]
    fn formatting_of_json_stays() {
        assert_eq!(
            json("{\n\t\"a\": \"\u{9b}\u{7f}\"\r\n}"),
            "{\n\t\"a\": \"\\u009b\\u007f\"\r\n}"
        );
        for (character, expected) in [
            ('\u{1f}', true),
            (' ', false),
            ('~', false),
            ('\u{7f}', true),
            ('\u{9f}', true),
            ('\u{a0}', false),
            ('\u{61b}', false),
            ('\u{61c}', true),
            ('\u{200d}', false),
            ('\u{200e}', true),
            ('\u{200f}', true),
            ('\u{2028}', true),
            ('\u{202e}', true),
            ('\u{202f}', false),
            ('\u{2065}', false),
            ('\u{2066}', true),
            ('\u{2069}', true),
            ('\u{206a}', false),
        ] {
            assert_eq!(is_active(character), expected, "{character:?}");
        }
    }

    #[test]
    fn json_value_is_preserved() {
        let text = serde_json::to_string("a\u{1b}\u{9b}\u{2066}é").unwrap();
        let escaped = json(&text);
        assert!(!escaped.chars().any(is_active), "{escaped}");
        assert_eq!(
            serde_json::from_str::<String>(&escaped).unwrap(),
            "a\u{1b}\u{9b}\u{2066}é"
        );
    }
}
