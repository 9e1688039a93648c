//! Texts of other parties, made safe for logs, terminals, reports and files: escaped, cut, and without secrets.
//!
//! A response's body is bounded while it is read ([`crate::http_client::Limits`]); here is what may be shown of it.

use std::borrow::Cow;

use dns_core::terminal;
use url::Url;

/// Maximum number of characters that are shown of a peer's text.
pub const MAX_TEXT: usize = 300;

/// The text that is shown in place of a secret.
const MASK: &str = "***";

/// Returns a peer's text for a log or a terminal: at most [`MAX_TEXT`] characters, on one line, with escaped
/// control characters.
pub fn printable(text: &str) -> String {
    terminal::line(&cut(text.trim(), MAX_TEXT)).into_owned()
}

/// Returns what [`printable`] does for bytes that should be text, such as an error in a response's body.
pub fn printable_bytes(bytes: &[u8]) -> String {
    // A character has at most four bytes; the rest would be cut, and need not be decoded.
    let shown = bytes.get(..4 * (MAX_TEXT + 1)).unwrap_or(bytes);
    printable(&String::from_utf8_lossy(shown))
}

/// Returns at most `max` characters of a text, followed by `…` if there are more.
pub fn cut(text: &str, max: usize) -> Cow<'_, str> {
    match text.char_indices().nth(max) {
        Some((end, _)) => Cow::Owned(format!("{}…", &text[..end])),
        None => Cow::Borrowed(text),
    }
}

/// Returns a URL for logs and reports, without user, password and the values of its query, which may be secret.
pub fn redacted(url: &Url) -> String {
    let mut shown = url.clone();
    if !shown.username().is_empty() || shown.password().is_some() {
        // This cannot fail for a URL that has a user.
        let _ = shown.set_username(MASK);
        let _ = shown.set_password(None);
    }
    if shown.query().is_some() {
        shown.set_query(Some(MASK));
    }
    shown.into()
}

/// Returns a text that should be a URL without its secrets, also if it is none.
pub fn redacted_text(text: &str) -> String {
    if let Ok(url) = Url::parse(text)
        && url.has_host()
    {
        let shown = redacted(&url);
        // The standard form of a URL without a path ends with a slash that is not in the configuration.
        let is_added = url.path() == "/" && url.query().is_none() && !text.ends_with('/');
        return if is_added {
            shown.trim_end_matches('/').to_owned()
        } else {
            shown
        };
    }
    // The text before an @ may be a password with a character that a URL does not allow in it.
    let (scheme, rest) = text.split_once("://").unwrap_or(("", text));
    let rest = match rest.rsplit_once('@') {
        Some((_, rest)) => format!("{MASK}@{rest}"),
        None => rest.to_owned(),
    };
    let shown = match rest.split_once('?') {
        Some((path, _)) => format!("{path}?{MASK}"),
        None => rest,
    };
    if scheme.is_empty() {
        shown
    } else {
        format!("{scheme}://{shown}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn url_secrets_are_redacted() {
        let cases = [
            (
                "https://user:password@dns.example:8443/x/?key=secret&a=b",
                "https://***@dns.example:8443/x/?***",
            ),
            ("http://dns.example/x/", "http://dns.example/x/"),
            ("http://localhost:8888", "http://localhost:8888"),
            ("http://:secret@a/", "http://***@a/"),
            // None of these is a URL with a host.
            ("http://user:s/e@c:ret@a:1/x", "http://***@a:1/x"),
            ("user:secret@host", "***@host"),
            ("host/x?secret", "host/x?***"),
            ("http://secret @a/?secret", "http://***@a/?***"),
            ("", ""),
        ];
        for (text, shown) in cases {
            assert_eq!(redacted_text(text), shown, "{text}");
        }
    }

    #[test]
    fn texts_of_peers_are_escaped_and_cut() {
        assert_eq!(printable(" a\u{1b}[2J\nb\u{7}\n"), "a\\u{1b}[2J\\nb\\u{7}");
        assert_eq!(printable_bytes(b"\xff ok"), "\u{fffd} ok");
        let long = printable_bytes("é\u{1b}".repeat(50_000).as_bytes());
        assert_eq!(long.matches('é').count(), MAX_TEXT / 2);
        assert!(long.ends_with('…') && !long.contains('\u{1b}'));
        assert_eq!(cut("abc", 3), "abc");
        assert_eq!(cut("abcd", 3), "abc…");
    }

    #[test]
    fn texts_end_at_the_limit() {
        for (length, is_cut) in [(MAX_TEXT, false), (MAX_TEXT + 1, true)] {
            let text = "ä".repeat(length);
            assert_eq!(cut(&text, MAX_TEXT).ends_with('…'), is_cut, "{length}");
            assert_eq!(cut(&text, MAX_TEXT).chars().count(), length);
            assert_eq!(printable_bytes(text.as_bytes()), cut(&text, MAX_TEXT));
        }
        for (text, expected) in [
            ("http://u:p@h/x?q", "http://***@h/x?***"),
            ("http://h", "http://h"),
            ("http://h/", "http://h/"),
            ("http://h?q", "http://h/?***"),
            ("http://:p@h", "http://***@h"),
            ("u:p@h", "***@h"),
            ("u:p^@q@h?x", "***@h?***"),
            ("x y://u:p@h z", "x y://***@h z"),
            ("plain", "plain"),
        ] {
            assert_eq!(redacted_text(text), expected, "{text}");
        }
    }

    #[test]
    fn wide_characters_are_not_cut_early() {
        for (length, is_cut) in [(MAX_TEXT, false), (MAX_TEXT + 1, true)] {
            let shown = printable_bytes("😀".repeat(length).as_bytes());
            assert_eq!(shown.matches('😀').count(), MAX_TEXT, "{length}");
            assert_eq!(shown.ends_with('…'), is_cut, "{length}");
        }
    }
}
