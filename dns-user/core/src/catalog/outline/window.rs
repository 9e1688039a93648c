//! A window that moves over a file: the part of the text that is being read, instead of the whole of it.

use std::io;

/// Bytes that are read at once. A buffer of a whole file would be 27 MB of fresh pages for 100,000 instances, whose
/// page faults cost more than reading (performance.md); a window stays in the processor's cache.
const WINDOW: usize = 256 << 10;

/// Maximum depth of nested values; far below the limit of the parser.
const MAX_DEPTH: usize = 32;

/// Reads JSON text from the beginning to the end.
pub(super) struct Window<R> {
    source: R,
    /// Text is in `at..end`; the window grows for a value that is longer.
    buffer: Vec<u8>,
    at: usize,
    end: usize,
    /// Whether the source has ended, or failed: the file is then read as a whole, which reports the error.
    is_over: bool,
}

impl<R: io::Read> Window<R> {
    pub(super) fn new(source: R) -> Self {
        Self {
            source,
            buffer: vec![0; WINDOW],
            at: 0,
            end: 0,
            is_over: false,
        }
    }

    /// Returns the next `length` bytes without advancing; `None` if the file has fewer.
    #[inline]
    pub(super) fn peek(&mut self, length: usize) -> Option<&[u8]> {
        if self.end - self.at < length && !self.fill(length) {
            return None;
        }
        Some(&self.buffer[self.at..self.at + length])
    }

    /// Passes over bytes that [`Self::peek`] has returned.
    #[inline]
    pub(super) fn advance(&mut self, length: usize) {
        self.at += length;
        debug_assert!(self.at <= self.end);
    }

    /// Returns whether everything has been read.
    pub(super) fn is_at_end(&mut self) -> bool {
        self.peek(1).is_none()
    }

    /// Reads until `length` bytes are available; returns whether they are.
    #[cold]
    fn fill(&mut self, length: usize) -> bool {
        self.buffer.copy_within(self.at..self.end, 0);
        self.end -= self.at;
        self.at = 0;
        while self.end < length && !self.is_over {
            if self.end == self.buffer.len() {
                // Doubled, so that a long value is not copied for each window that it fills.
                self.buffer.resize(2 * self.end, 0);
            }
            match self.source.read(&mut self.buffer[self.end..]) {
                Ok(0) => self.is_over = true,
                Ok(count) => self.end += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => self.is_over = true,
            }
        }
        self.end >= length
    }

    /// Skips white space.
    #[inline]
    pub(super) fn skip_space(&mut self) {
        while let Some(&[b' ' | b'\n' | b'\r' | b'\t']) = self.peek(1) {
            self.at += 1;
        }
    }

    /// Skips white space and reads a byte.
    #[inline]
    fn byte(&mut self) -> Option<u8> {
        self.skip_space();
        let byte = self.peek(1)?[0];
        self.at += 1;
        Some(byte)
    }

    /// Skips white space and this byte.
    pub(super) fn expect(&mut self, byte: u8) -> Option<()> {
        if self.byte()? != byte {
            return None;
        }
        Some(())
    }

    /// Skips white space, and this byte if it follows; returns whether it does.
    pub(super) fn skips(&mut self, byte: u8) -> bool {
        self.skip_space();
        let follows = self.peek(1) == Some(&[byte]);
        if follows {
            self.at += 1;
        }
        follows
    }

    /// Skips white space and a comma, or the end of the list or object; returns whether it was a comma.
    #[inline]
    pub(super) fn has_more(&mut self, end: u8) -> Option<bool> {
        match self.byte()? {
            b',' => Some(true),
            byte if byte == end => Some(false),
            _ => None,
        }
    }

    /// Reads a text without escapes.
    pub(super) fn word(&mut self) -> Option<Vec<u8>> {
        self.expect(b'"')?;
        let mut word = Vec::new();
        loop {
            let byte = self.peek(1)?[0];
            self.at += 1;
            match byte {
                b'"' => return Some(word),
                b'\\' => return None,
                _ => word.push(byte),
            }
        }
    }

    /// Reads a number of decimal digits.
    pub(super) fn number(&mut self) -> Option<u64> {
        self.skip_space();
        let mut digits = String::new();
        while let byte @ b'0'..=b'9' = self.peek(1)?[0] {
            digits.push(char::from(byte));
            self.at += 1;
        }
        // The parser refuses leading zeros.
        if digits.len() > 1 && digits.starts_with('0') {
            return None;
        }
        digits.parse().ok()
    }

    /// Returns the list that follows, without advancing.
    pub(super) fn list_text(&mut self) -> Option<&[u8]> {
        if self.peek(1)? != b"[" {
            return None;
        }
        let length = self.value_length()?;
        self.peek(length)
    }

    /// Returns the length of the list or object that follows. Brackets are only counted.
    pub(super) fn value_length(&mut self) -> Option<usize> {
        let mut depth = 0;
        let mut length = 0;
        let mut is_in_string = false;
        loop {
            // The text that has been read, so that no byte of it asks for more.
            let text = &self.buffer[self.at..self.end];
            while let Some(&byte) = text.get(length) {
                // Most of a file is inside strings, so eight characters are passed over at a time.
                if is_in_string && let Some(eight) = text[length..].first_chunk() {
                    let characters = plain_characters(u64::from_le_bytes(*eight));
                    if characters > 0 {
                        length += characters;
                        continue;
                    }
                }
                length += 1;
                match byte {
                    b'"' => is_in_string = !is_in_string,
                    // The character behind it may be a quotation mark. It may also be beyond the
                    // window, which `fill` then moves.
                    b'\\' if is_in_string => length += 1,
                    _ if is_in_string => {}
                    b'[' | b'{' => {
                        depth += 1;
                        // Such a file goes to the parser, whose limit of 128 then reports it.
                        if depth > MAX_DEPTH {
                            return None;
                        }
                    }
                    b']' | b'}' => {
                        depth = depth.checked_sub(1)?;
                        if depth == 0 {
                            return Some(length);
                        }
                    }
                    _ => {}
                }
                if depth == 0 {
                    return None;
                }
            }
            if !self.fill(length + 1) {
                return None;
            }
        }
    }
}

/// Returns how many of eight characters, the lowest byte first, precede a quotation mark or backslash.
fn plain_characters(eight: u64) -> usize {
    const ONES: u64 = u64::from_le_bytes([1; 8]);
    const HIGH: u64 = u64::from_le_bytes([0x80; 8]);
    let mut found = 0;
    for byte in [b'"', b'\\'] {
        let difference = eight ^ (ONES * u64::from(byte));
        // The lowest byte that is zero sets its high bit; only those above may set it as well without being zero.
        found |= difference.wrapping_sub(ONES) & !difference & HIGH;
    }
    found.trailing_zeros() as usize / 8
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Yields a text in parts of a few bytes, so that every value crosses a boundary.
    struct Trickle<'t>(&'t [u8]);

    impl io::Read for Trickle<'_> {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            let count = 3.min(self.0.len()).min(buffer.len());
            let (now, later) = self.0.split_at(count);
            buffer[..count].copy_from_slice(now);
            self.0 = later;
            Ok(count)
        }
    }

    #[test]
    fn values_cross_reads() {
        let mut window = Window::new(Trickle(br#" {"name" : 120, "l":[ ["a]\"", {}],[] ] } "#));
        window.expect(b'{').unwrap();
        assert_eq!(window.word().unwrap(), b"name");
        window.expect(b':').unwrap();
        assert_eq!(window.number(), Some(120));
        assert_eq!(window.has_more(b'}'), Some(true));
        assert_eq!(window.word().unwrap(), b"l");
        window.expect(b':').unwrap();
        window.expect(b'[').unwrap();
        assert!(!window.skips(b']'));
        let text = window.list_text().unwrap().to_owned();
        assert_eq!(text, br#"["a]\"", {}]"#);
        window.advance(text.len());
        assert_eq!(window.has_more(b']'), Some(true));
        assert_eq!(window.list_text().unwrap(), b"[]");
        window.advance(2);
        assert_eq!(window.has_more(b']'), Some(false));
        assert_eq!(window.has_more(b'}'), Some(false));
        window.skip_space();
        assert!(window.is_at_end());
    }

    #[test]
    fn long_value_widens_window() {
        let text = format!("[\"{}\"] ", "x".repeat(3 * WINDOW));
        let mut window = Window::new(text.as_bytes());
        assert_eq!(window.list_text().unwrap().len(), 3 * WINDOW + 4);
    }

    #[test]
    fn quotation_mark_is_found_at_every_place() {
        for other in 0..=u8::MAX {
            let is_plain = !matches!(other, b'"' | b'\\');
            let first = if is_plain { 8 } else { 0 };
            assert_eq!(plain_characters(u64::from_le_bytes([other; 8])), first);
            for place in 0..if is_plain { 8 } else { 0 } {
                for character in [b'"', b'\\'] {
                    let mut eight = [other; 8];
                    eight[place] = character;
                    assert_eq!(plain_characters(u64::from_le_bytes(eight)), place);
                }
            }
        }
        for length in 0..40 {
            let text = format!(r#"["{}","a\"]"]"#, "é".repeat(length));
            let length = Window::new(text.as_bytes()).value_length();
            assert_eq!(length, Some(text.len()), "{text}");
        }
    }

    #[test]
    fn unusual_values_are_refused() {
        for text in ["007,", "18446744073709551616,", ",", "1"] {
            assert_eq!(Window::new(text.as_bytes()).number(), None, "{text}");
        }
        for text in ["[", "]", "1", "[\"", "[\"\\\"]"] {
            assert_eq!(Window::new(text.as_bytes()).value_length(), None, "{text}");
        }
        let deep = "[".repeat(MAX_DEPTH + 1) + &"]".repeat(MAX_DEPTH + 1);
        assert_eq!(Window::new(deep.as_bytes()).value_length(), None);
        assert_eq!(Window::new(&b"\"a\\\"\""[..]).word(), None);
    }

    #[test]
    fn values_end_at_their_limits() {
        for (text, number) in [
            ("0,", Some(0)),
            ("00,", None),
            ("10,", Some(10)),
            ("18446744073709551615,", Some(u64::MAX)),
        ] {
            assert_eq!(Window::new(text.as_bytes()).number(), number, "{text}");
        }
        let deep = "[".repeat(MAX_DEPTH) + &"]".repeat(MAX_DEPTH);
        for (text, length) in [
            (&deep[..], Some(2 * MAX_DEPTH)),
            ("[] ]", Some(2)),
            ("{\"a\": [1, {}]}, 2", Some(14)),
            // A backslash outside a text is left to the parser.
            (r"[\]]", Some(3)),
            (r#"["\\"]]"#, Some(6)),
            (r#"["\"]]", "]"]"#, Some(13)),
            ("[\"]\"]]", Some(5)),
            ("\"[\"]", None),
        ] {
            assert_eq!(
                Window::new(text.as_bytes()).value_length(),
                length,
                "{text}"
            );
        }
        for (text, list) in [
            ("[1]]", Some(&b"[1]"[..])),
            ("{}", None),
            (" []", None),
            ("", None),
        ] {
            assert_eq!(Window::new(text.as_bytes()).list_text(), list, "{text}");
        }
        for (text, has_more) in [
            (" ,", Some(true)),
            ("]", Some(false)),
            ("}", None),
            ("", None),
        ] {
            assert_eq!(
                Window::new(text.as_bytes()).has_more(b']'),
                has_more,
                "{text}"
            );
        }
        let mut window = Window::new(&b"abc"[..]);
        assert_eq!(window.peek(4), None);
        assert_eq!(window.peek(3), Some(&b"abc"[..]));
        window.advance(2);
        assert_eq!(window.peek(1), Some(&b"c"[..]));
        assert_eq!(window.peek(2), None);
        assert!(!window.is_at_end());
        window.advance(1);
        assert!(window.is_at_end());
    }

    #[test]
    fn interrupted_reads_are_repeated() {
        struct Interrupted(u8);
        impl io::Read for Interrupted {
            fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
                self.0 += 1;
                match self.0 {
                    1 | 3 => Err(io::ErrorKind::Interrupted.into()),
                    2 | 4 => {
                        buffer[0] = b'0' + self.0;
                        Ok(1)
                    }
                    _ => Ok(0),
                }
            }
        }
        let mut window = Window::new(Interrupted(0));
        assert_eq!(window.peek(2), Some(&b"24"[..]));
        window.advance(2);
        assert!(window.is_at_end());
    }

    #[test]
    fn failing_source_ends_text() {
        struct Failing;
        impl io::Read for Failing {
            fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
                Err(io::Error::other("the disk has failed"))
            }
        }
        assert!(Window::new(Failing).is_at_end());
    }
}
