//! Wire-format names (RFC 1035, section 3.1), lower-cased and hashed in words of eight bytes.

/// Longest name in wire format, root label included (RFC 1035, section 2.3.4).
pub const MAX_NAME_LEN: usize = 255;

/// Number of eight-byte words that hold the longest name.
pub const MAX_NAME_WORDS: usize = MAX_NAME_LEN.div_ceil(8);

/// Eight bytes with only their lowest bit set.
pub(crate) const ONES: u64 = 0x0101_0101_0101_0101;
/// Eight bytes with only their highest bit set.
pub(crate) const HIGHS: u64 = 0x8080_8080_8080_8080;

/// Lower-cases the ASCII letters among eight bytes of a wire-format name.
///
/// Length bytes may be processed like the labels: they are at most 63, so never in `A`..=`Z`
/// (65..=90).
#[inline(always)]
pub const fn lower8(word: u64) -> u64 {
    // Most names are lower-case: no byte is in 0x40..=0x5f.
    if word & (ONES << 6) & !(word << 1) == 0 {
        return word;
    }
    lower8_branchless(word)
}

/// Like [`lower8`], but in the same steps for every word, so that a verifier follows one path instead of two.
#[inline(always)]
pub const fn lower8_branchless(word: u64) -> u64 {
    // Each sum sets a byte's highest bit from one character on, `A` or the one after `Z`. The bytes
    // have seven bits, so no carry leaves them.
    let low7 = word & !HIGHS;
    let from_a = low7 + ONES * (128 - b'A' as u64);
    let after_z = low7 + ONES * (128 - b'Z' as u64 - 1);
    // Bytes of 128 and more are no letters: only ASCII has a case (RFC 4343).
    let upper = (from_a ^ after_z) & HIGHS & !word;
    // 0x20, by which small letters differ.
    word | (upper >> 2)
}

/// Marks the first zero byte of `word`: the lowest set bit of the result is its 0x80 bit. Returns 0
/// if there is no zero byte. Higher bits of the result are undefined.
#[inline(always)]
pub const fn zero_byte(word: u64) -> u64 {
    word.wrapping_sub(ONES) & !word & HIGHS
}

/// Returns the index of the byte marked by the lowest set bit of `marks`, a non-zero result of
/// [`zero_byte`].
#[inline(always)]
pub const fn first_zero(marks: u64) -> usize {
    // The lowest bit is 0x80 of byte k: 1 << 8k moves k's digit of the multiplier to the top.
    let lowest = (marks & marks.wrapping_neg()) >> 7;
    (lowest.wrapping_mul(0x0001_0203_0405_0607) >> 56) as usize
}

/// Hash of a name over its lower-cased words of eight bytes in little endian, the last one
/// zero-padded.
///
/// The seed is random and changes with every load, so clients cannot construct names that collide.
/// A collision causes a miss, never a wrong answer, because the program compares names.
#[derive(Clone, Copy, Debug)]
pub struct NameHasher(u64);

impl NameHasher {
    /// An odd multiplier with well-spread bits: 2^64 divided by the golden ratio.
    const MULTIPLIER: u64 = 0x9e37_79b9_7f4a_7c15;

    /// Returns a hasher without input.
    #[inline(always)]
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Adds the next eight bytes.
    #[inline(always)]
    pub const fn write(&mut self, word: u64) {
        // A product carries upwards only; the shift brings its best bits down to where the pair is
        // chosen.
        let mixed = (self.0 ^ word).wrapping_mul(Self::MULTIPLIER);
        self.0 = mixed ^ (mixed >> 32);
    }

    /// Returns the hash of the input so far.
    #[inline(always)]
    pub const fn finish(self) -> u64 {
        self.0
    }
}

/// Returns the hash of a complete lower-cased name in wire format, root label included.
pub fn hash_name(seed: u64, lower_wire: &[u8]) -> u64 {
    let mut hasher = NameHasher::new(seed);
    for chunk in lower_wire.chunks(8) {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        // As the programs load it, which are compiled for little endian.
        hasher.write(u64::from_le_bytes(word));
    }
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn letters_are_lowered_beside_any_bytes() {
        for (word, lower) in [
            (b"abcdefgh", b"abcdefgh"),
            (b"ABCDWXYZ", b"abcdwxyz"),
            (b"@[`{/:\x7f\0", b"@[`{/:\x7f\0"),
            (
                b"\xc1\xda\xe1\xff\x80\xc0\x81\x9f",
                b"\xc1\xda\xe1\xff\x80\xc0\x81\x9f",
            ),
            // The highest bit of a byte is not the letter's behind it.
            (b"\xc0C@@@@@@", b"\xc0c@@@@@@"),
            (b"\xc0G@\xc0O@@@", b"\xc0g@\xc0o@@@"),
        ] {
            let [word, lower] = [word, lower].map(|bytes: &[u8; 8]| u64::from_le_bytes(*bytes));
            assert_eq!(lower8(word), lower, "{word:x}");
            assert_eq!(lower8_branchless(word), lower, "{word:x}");
        }
    }

    proptest! {
        #[test]
        fn lower8_equals_bytewise_lowercase(bytes: [u8; 8]) {
            let lowered = lower8(u64::from_le_bytes(bytes)).to_le_bytes();
            prop_assert_eq!(lowered, bytes.map(|b| b.to_ascii_lowercase()));
        }

        #[test]
        fn zero_byte_finds_first_zero(bytes: [u8; 8]) {
            let found = zero_byte(u64::from_le_bytes(bytes));
            let position = (found != 0).then(|| found.trailing_zeros() as usize / 8);
            prop_assert_eq!(position, bytes.iter().position(|&b| b == 0));
        }
    }
}
