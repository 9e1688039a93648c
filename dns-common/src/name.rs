//! Wire-format names (RFC 1035, section 3.1), lower-cased and hashed eight
//! bytes at a time.

/// Longest name in wire format, root label included (RFC 1035, section 2.3.4).
pub const MAX_NAME_LEN: usize = 255;

/// Words of eight bytes that hold the longest name.
pub const MAX_NAME_WORDS: usize = MAX_NAME_LEN.div_ceil(8);

/// A byte with only its lowest bit set, eight times.
pub(crate) const ONES: u64 = 0x0101_0101_0101_0101;
/// A byte with only its highest bit set, eight times.
pub(crate) const HIGHS: u64 = 0x8080_8080_8080_8080;

/// Lower-cases the ASCII letters among eight bytes of a wire-format name.
///
/// Length bytes may be lower-cased blindly along with the labels: they are at
/// most 63, and so never in `A`..=`Z` (65..=90).
#[inline(always)]
pub const fn lower8(word: u64) -> u64 {
    let low7 = word & !HIGHS;
    let from_a = low7 + ONES * (128 - b'A' as u64);
    let after_z = low7 + ONES * (128 - b'Z' as u64 - 1);
    let upper = (from_a ^ after_z) & HIGHS & !word;
    word | (upper >> 2)
}

/// The lowest set bit marks the first zero byte of `word` (its 0x80 bit); 0 if
/// there is none. Bits above the lowest one are not to be believed.
#[inline(always)]
pub const fn zero_byte(word: u64) -> u64 {
    word.wrapping_sub(ONES) & !word & HIGHS
}

/// Place of the byte whose 0x80 bit is the lowest one set in `marks` (not zero, and
/// all others of such bits as well), as in what [`zero_byte`] says.
#[inline(always)]
pub const fn first_zero(marks: u64) -> usize {
    // The lowest bit is 0x80 of byte k: 1 << 8k moves k's own digit of the
    // multiplier to the top.
    let lowest = (marks & marks.wrapping_neg()) >> 7;
    (lowest.wrapping_mul(0x0001_0203_0405_0607) >> 56) as usize
}

/// Hash of a name, fed with its lower-cased words of eight bytes in little
/// endian, the last one padded with zeros.
///
/// Seeded anew at every load, so that nobody can choose names that collide. A
/// collision costs a miss, never a wrong answer: the program compares names.
#[derive(Clone, Copy, Debug)]
pub struct NameHasher(u64);

impl NameHasher {
    /// An odd multiplier with well-spread bits: 2^64 divided by the golden ratio.
    const MULTIPLIER: u64 = 0x9e37_79b9_7f4a_7c15;

    /// A hasher that has seen nothing yet.
    #[inline(always)]
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Takes in the next eight bytes.
    #[inline(always)]
    pub const fn write(&mut self, word: u64) {
        let mixed = (self.0 ^ word).wrapping_mul(Self::MULTIPLIER);
        self.0 = mixed ^ (mixed >> 32);
    }

    /// The hash of all that was taken in.
    #[inline(always)]
    pub const fn finish(self) -> u64 {
        self.0
    }
}

/// Hash of a whole lower-cased name in wire format, root label included.
pub fn hash_name(seed: u64, lower_wire: &[u8]) -> u64 {
    let mut hasher = NameHasher::new(seed);
    for chunk in lower_wire.chunks(8) {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        hasher.write(u64::from_le_bytes(word));
    }
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn lower8_equals_bytewise_lowercase(bytes: [u8; 8]) {
            let lowered = lower8(u64::from_le_bytes(bytes)).to_le_bytes();
            prop_assert_eq!(lowered, bytes.map(|b| b.to_ascii_lowercase()));
        }

        #[test]
        fn zero_byte_finds_the_first_zero(bytes: [u8; 8]) {
            let found = zero_byte(u64::from_le_bytes(bytes));
            let position = (found != 0).then(|| found.trailing_zeros() as usize / 8);
            prop_assert_eq!(position, bytes.iter().position(|&b| b == 0));
        }
    }
}
