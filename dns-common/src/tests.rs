//! Exact values of what programs and userspace share: an error in a shared function is the same on both sides, so
//! a comparison of the two would not notice it.

use crate::{
    UDP_PAYLOAD_SIZE, XDP_HEAD_ROOM,
    control::{CLIENT_BUCKETS, client_bucket},
    counters::Outcome,
    entry::{
        AnswerPolicy, CELL_SIZE, CHUNK_CELLS, CHUNK_SIZE, EntryHeader, HAS_POLICY, Location,
        MAX_CELLS, MAX_ENTRY_SIZE, padded,
    },
    forwarded::{AnswerHeader, MAX_BODY_LEN, QueryKey, is_answered, ones_sum},
    index::{
        Bucket, Pair, Root, element, overflows, preferred_bucket, tag, with_overflow,
        without_overflow,
    },
    name::{NameHasher, hash_name},
    scope::{Scope, VLAN_WORDS, source_hash},
};

#[test]
fn only_answers_are_hits() {
    use Outcome::{Hit, HitForwarded, HitOther, HitTruncated};
    for outcome in Outcome::ALL.iter().copied() {
        let is_answer = matches!(outcome, Hit | HitTruncated | HitForwarded | HitOther);
        assert_eq!(outcome.is_hit(), is_answer, "{outcome:?}");
    }
}

#[test]
fn policies_are_packed() {
    let policy = AnswerPolicy::new(0x8102_0304, 0x8506, [0x17, 0x28], false, true);
    assert_eq!(policy.0, 0x0187_8506_8102_0304);
    assert_eq!((policy.ttl(), policy.most()), (0x8102_0304, 0x8506));
    assert_eq!((policy.plain(false), policy.plain(true)), (7, 8));
    assert_eq!((policy.never_truncates(), policy.no_recursion()), (1, 0));
    let policy = AnswerPolicy::new(0, 0, [0, 15], true, false);
    assert_eq!(policy.0, 0x02f0_0000_0000_0000);
    assert_eq!((policy.plain(false), policy.plain(true)), (0, 15));
    assert_eq!((policy.never_truncates(), policy.no_recursion()), (0, 1));
}

#[test]
fn entries_are_laid_out() {
    let lengths = [0, 1, 7, 8, 9, 255, 256].map(padded);
    assert_eq!(lengths, [0, 8, 8, 8, 16, 256, 256]);
    let header = |name_len, rcode_other| EntryHeader {
        last_used_ns: 0,
        hash: 0,
        name_len,
        v4_count: 3,
        v6_count: 2,
        rcode: 0,
        rcode_other,
    };
    let offsets = |header: EntryHeader| {
        [
            header.policy_offset(),
            header.v4_offset(),
            header.v6_offset(),
            header.size(),
        ]
    };
    assert_eq!(offsets(header(11, 3)), [40, 40, 56, 88]);
    assert_eq!(offsets(header(11, HAS_POLICY)), [40, 48, 64, 96]);
    assert_eq!(offsets(header(16, HAS_POLICY | 3)), [40, 48, 64, 96]);
    assert!(!header(1, 0x7f).has_policy() && header(1, 0x80).has_policy());
    assert_eq!(MAX_ENTRY_SIZE, 8512);
    assert_eq!(
        (CELL_SIZE, CHUNK_CELLS, CHUNK_SIZE),
        (64, 16_384, 1_065_600)
    );
    for (cell, chunk, offset) in [
        (0, 0, 0),
        (1, 0, 64),
        (16_383, 0, 1_048_512),
        (16_384, 1, 0),
        (32_769, 2, 64),
    ] {
        let location = Location(cell);
        assert_eq!(
            (location.chunk(), location.offset()),
            (chunk, offset),
            "{cell}"
        );
    }
}

#[test]
fn answers_are_laid_out() {
    assert_eq!(usize::from(UDP_PAYLOAD_SIZE), 1232);
    assert_eq!(MAX_BODY_LEN, 1215);
    assert_eq!((MAX_CELLS, XDP_HEAD_ROOM, VLAN_WORDS), (8_388_608, 192, 64));
    assert_eq!(size_of::<AnswerHeader>(), 112);
    assert_eq!(AnswerHeader::variants_offset(11), 128);
    assert_ne!(QueryKey::new(1, true, false), QueryKey::new(1, false, true));
    assert_eq!(QueryKey::new(255, true, true).hash(7), {
        let mut hasher = NameHasher::new(7);
        hasher.write(0x3_00ff);
        hasher.finish()
    });
    assert_eq!(ones_sum(&[1, 2, 3]), u16::from_ne_bytes([4, 2]));
    assert_eq!(ones_sum(&[0xff; 4]), 0xffff);
}

#[test]
fn index_is_laid_out() {
    assert_eq!((size_of::<Bucket>(), size_of::<Pair>()), (64, 128));
    assert_eq!(size_of::<Root>(), 128);
    assert_eq!((element(0x1_0000_0005, 4), element(0x16, 16)), (5, 22));
    assert_eq!(
        (preferred_bucket(1 << 55), preferred_bucket(!(1 << 55))),
        (1, 0)
    );
    assert_eq!((tag(0x80 << 56), tag(0x01 << 56)), (0x80, 1));
    let full = 0x0000_0002_1111_1111;
    assert_eq!(overflows(full), 2);
    assert_eq!(with_overflow(full), 0x0000_0003_1111_1111);
    assert_eq!(without_overflow(full), 0x0000_0001_1111_1111);
}

#[test]
fn names_are_hashed_by_words() {
    let step = |state: u64, word: u64| {
        let mixed = (state ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        mixed ^ (mixed >> 32)
    };
    let first = u64::from_le_bytes(*b"\x04q-s0\x04q-");
    let second = u64::from_le_bytes(*b"g1\x04bosh\0");
    let name = b"\x04q-s0\x04q-g1\x04bosh\0";
    assert_eq!(hash_name(7, name), step(step(7, first), second));
    assert_eq!(hash_name(7, b"\0"), step(7, 0));
}

#[test]
fn scopes_are_laid_out() {
    assert_eq!((Scope::first_slot(7), Scope::first_slot(2055)), (7, 7));
    assert_eq!(Scope::vlan(0), (0, 1));
    assert_eq!(Scope::vlan(100), (1, 1 << 36));
    assert_eq!(Scope::vlan(130), (2, 4));
    assert_eq!(Scope::vlan(0xe000 | 4095), (63, 1 << 63));
    let (word, bits) = Scope::refused_source(0xabcd_e123);
    assert_eq!(word, 0xabc);
    // 0x23, 0x04, 0x1e + 0x20 in groups of six bits.
    assert_eq!(bits, 1 << 0x23 | 1 << 0x04 | 1 << 0x1e);
    // Equal bits count once.
    for (hash, bits) in [
        (0, 0b1),
        (0x1000, 0b11),
        (0x1040, 0b11),
        (0x1001, 0b11),
        (0x2040, 0b111),
    ] {
        assert_eq!(Scope::refused_source(hash), (0, bits), "{hash:x}");
    }
    for (words, hash) in [
        ([0, 0, 0, 1], 0x6727_47ac),
        ([0, 0, 1, 0], 0x2e3b_5b35),
        ([0, 1, 0, 0], 0x35e0_04f0),
        ([1, 0, 0, 0], 0xc930_443c),
        ([1, 2, 3, 4], 0x6c89_dcd0),
    ] {
        assert_eq!(source_hash(words), hash, "{words:?}");
    }
    let buckets = [[10, 0, 0, 1], [10, 0, 0, 2], [10, 0, 1, 1], [10, 1, 0, 1]].map(client_bucket);
    assert_eq!(buckets, [54, 29, 3, 20]);
    assert!(buckets.iter().all(|&bucket| bucket < CLIENT_BUCKETS));
}

/// The programs leave OPT, DS, and question and meta types to userspace (`41 | 43 | 128..=254` in their parser); ANY
/// they answer, but from local replies only, so that forwarded answers of it must not be stored.
#[test]
fn forwarded_answers_are_of_data_types() {
    for qtype in 0..=u16::MAX {
        let is_left_to_userspace = matches!(qtype, 41 | 43 | 128..=254);
        let is_any = qtype == 255;
        assert_eq!(
            is_answered(qtype),
            !is_left_to_userspace && !is_any,
            "type {qtype}"
        );
    }
}
