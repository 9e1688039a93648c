//! Converts a resolution to the entry from which the programs answer.

use std::net::{Ipv4Addr, Ipv6Addr};

use dns_common::{
    entry::{AnswerPolicy, EntryHeader, HAS_POLICY, Location, MAX_V4, MAX_V6},
    name::MAX_NAME_WORDS,
};
use zerocopy::IntoBytes as _;

use super::{store::EntryMemory, words::Words};

use dns_core::{
    name::Name,
    resolve::{Existence, Resolution},
};

/// RCODE NOERROR (RFC 1035, section 4.1.1).
const NOERROR: u8 = 0;
const FORMERR: u8 = 1;
const NXDOMAIN: u8 = 3;

/// The reason why a name cannot be published. Userspace still answers it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum EntryRefusal {
    /// A label contains a NUL byte, which the program's search would mistake for the end of the name.
    NulByte,
    /// More addresses than an entry holds.
    TooManyAddresses,
}

/// An entry, ready to be written to the store: see [`dns_common::entry`].
#[derive(Debug, Default)]
pub(crate) struct Encoded {
    /// The entry as words, so that it can be stored with aligned writes.
    words: Vec<u64>,
}

impl Encoded {
    /// Encodes the entry of `name` with this hash. Addresses are sorted, so that equal answers have
    /// equal bytes; the last-used time is zero. `policy` describes how replies present the
    /// addresses, if different from the fleet's default.
    pub(crate) fn encode(
        &mut self,
        hash: u64,
        name: &Name,
        resolution: &Resolution,
        policy: Option<AnswerPolicy>,
    ) -> Result<(), EntryRefusal> {
        let Resolution {
            existence,
            v4,
            v6,
            checks: _,
        } = resolution;
        let wire = name.as_wire();
        if name.labels().any(|label| label.contains(&0)) {
            return Err(EntryRefusal::NulByte);
        }
        // bosh-dns answers a name that is no valid query with FORMERR for addresses, and with an
        // empty answer for other types.
        let (rcode, rcode_other) = match existence {
            Existence::Found => (NOERROR, NOERROR),
            Existence::NoSuchName => (NXDOMAIN, NXDOMAIN),
            Existence::Malformed => (FORMERR, NOERROR),
        };
        let (mut v4, mut v6) = match existence {
            Existence::Found => (v4.clone(), v6.clone()),
            Existence::NoSuchName | Existence::Malformed => (Vec::new(), Vec::new()),
        };
        // Not the first ones instead: userspace shuffles all of them, so each has its turn.
        if v4.len() > MAX_V4 || v6.len() > MAX_V6 {
            return Err(EntryRefusal::TooManyAddresses);
        }
        v4.sort_unstable();
        v6.sort_unstable();
        let count =
            |length: usize| u16::try_from(length).expect("lists and names are bounded above");
        let header = EntryHeader {
            last_used_ns: 0,
            hash,
            name_len: count(wire.len()),
            v4_count: count(v4.len()),
            v6_count: count(v6.len()),
            rcode,
            rcode_other: rcode_other | if policy.is_some() { HAS_POLICY } else { 0 },
        };
        // Kept between entries, so that most of them take no allocation.
        self.words.clear();
        self.words.resize(header.size().div_ceil(8), 0);
        let bytes = self.words.as_mut_bytes();
        bytes[..size_of::<EntryHeader>()].copy_from_slice(header.as_bytes());
        bytes[size_of::<EntryHeader>()..][..wire.len()].copy_from_slice(wire);
        if let Some(policy) = policy {
            bytes[header.policy_offset()..][..size_of::<AnswerPolicy>()]
                .copy_from_slice(policy.as_bytes());
        }
        write_addresses(&mut bytes[header.v4_offset()..], &v4, Ipv4Addr::octets);
        write_addresses(&mut bytes[header.v6_offset()..], &v6, Ipv6Addr::octets);
        Ok(())
    }

    /// Returns the words of the entry; the first one is the last-used time.
    pub(crate) fn words(&self) -> &[u64] {
        &self.words
    }

    /// Sets the last-used time, taken from an earlier entry.
    pub(crate) fn set_last_used_ns(&mut self, last_used_ns: u64) {
        self.words[0] = last_used_ns;
    }

    pub(crate) fn size(&self) -> usize {
        self.words.len() * 8
    }
}

/// Writes addresses one after the other, in network order.
fn write_addresses<A, const LENGTH: usize>(
    bytes: &mut [u8],
    addresses: &[A],
    octets: fn(&A) -> [u8; LENGTH],
) {
    for (place, address) in bytes.chunks_exact_mut(LENGTH).zip(addresses) {
        place.copy_from_slice(&octets(address));
    }
}

/// Reads the name back from an entry; `None` if the entry is not well-formed.
pub(crate) fn read_name<W: Words>(memory: &EntryMemory<W>, location: Location) -> Option<Name> {
    let mut words = [0; NAME_END_WORDS];
    let wire = read_wire(memory, location, &mut words)?;
    let (name, used) = Name::from_wire(wire).ok()?;
    // Bytes after the name: the entry is damaged, or was overwritten while it was read.
    (used == wire.len()).then_some(name)
}

pub(crate) fn is_named<W: Words>(memory: &EntryMemory<W>, location: Location, name: &Name) -> bool {
    read_wire(memory, location, &mut [0; NAME_END_WORDS]) == Some(name.as_wire())
}

/// Reads the header of an entry; `None` if it lies outside the store.
pub(crate) fn read_header<W: Words>(
    memory: &EntryMemory<W>,
    location: Location,
) -> Option<EntryHeader> {
    let mut words = [0; HEADER_WORDS];
    memory.read_to(location, &mut words)?;
    zerocopy::FromBytes::read_from_bytes(words.as_bytes()).ok()
}

const HEADER_WORDS: usize = size_of::<EntryHeader>() / 8;

/// Words of an entry up to the end of the longest name.
const NAME_END_WORDS: usize = HEADER_WORDS + MAX_NAME_WORDS;

/// Reads the name of an entry to `words` and returns its wire format; `None` if the entry is not well-formed.
fn read_wire<'w, W: Words>(
    memory: &EntryMemory<W>,
    location: Location,
    words: &'w mut [u64; NAME_END_WORDS],
) -> Option<&'w [u8]> {
    let length = usize::from(read_header(memory, location)?.name_len);
    let words = words.get_mut(..HEADER_WORDS + length.div_ceil(8))?;
    memory.read_to(location, words)?;
    words
        .as_bytes()
        .get(size_of::<EntryHeader>()..)?
        .get(..length)
}

#[cfg(test)]
mod tests {
    use dns_common::entry::{CHUNK_SIZE, Location};
    use zerocopy::FromBytes as _;

    use super::*;
    use dns_core::resolve::Checks;

    /// Returns a resolution of these addresses.
    fn resolution(existence: Existence, v4: &[[u8; 4]], v6: &[u16]) -> Resolution {
        Resolution {
            existence,
            v4: v4.iter().map(|&octets| octets.into()).collect(),
            v6: v6
                .iter()
                .map(|&last| Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, last))
                .collect(),
            checks: Checks::default(),
        }
    }

    #[test]
    fn an_entry_is_laid_out_as_documented() {
        let name: Name = "a.bosh".parse().unwrap();
        let mut entry = Encoded::default();
        entry
            .encode(
                7,
                &name,
                &resolution(
                    Existence::Found,
                    &[[10, 0, 0, 2], [10, 0, 0, 1], [9, 9, 9, 9]],
                    &[7],
                ),
                None,
            )
            .unwrap();
        let bytes = entry.words().as_bytes();
        let header = EntryHeader::read_from_bytes(&bytes[..24]).unwrap();
        assert_eq!(
            (
                header.hash,
                header.name_len,
                header.v4_count,
                header.v6_count
            ),
            (7, 8, 3, 1)
        );
        assert_eq!(&bytes[24..32], name.as_wire());
        assert_eq!(
            &bytes[32..48],
            [9, 9, 9, 9, 10, 0, 0, 1, 10, 0, 0, 2, 0, 0, 0, 0]
        );
        assert_eq!(bytes[header.v6_offset() + 15], 7);
        assert_eq!(header.size(), entry.size());
    }

    #[test]
    fn rules_lie_between_the_name_and_the_addresses() {
        let name: Name = "a.bosh".parse().unwrap();
        let mut entry = Encoded::default();
        let policy = AnswerPolicy::new(30, 6, [3, 2], false, true);
        let resolution = resolution(Existence::Found, &[[10, 0, 0, 2]], &[7]);
        entry.encode(7, &name, &resolution, Some(policy)).unwrap();
        let bytes = entry.words().as_bytes();
        let header = EntryHeader::read_from_bytes(&bytes[..24]).unwrap();
        assert!(header.has_policy() && header.rcode_other & 15 == 0);
        assert_eq!(
            AnswerPolicy::read_from_bytes(&bytes[32..40]).unwrap(),
            policy
        );
        assert_eq!(
            (
                policy.ttl(),
                policy.most(),
                policy.plain(false),
                policy.plain(true)
            ),
            (30, 6, 3, 2)
        );
        assert_eq!((policy.never_truncates(), policy.no_recursion()), (1, 0));
        assert_eq!(&bytes[40..44], [10, 0, 0, 2]);
        assert_eq!((header.v4_offset(), header.size()), (40, entry.size()));
    }

    #[test]
    fn existence_becomes_rcodes() {
        let name: Name = "a.bosh".parse().unwrap();
        let mut entry = Encoded::default();
        for (existence, rcodes) in [
            (Existence::Found, (0, 0)),
            (Existence::NoSuchName, (3, 3)),
            (Existence::Malformed, (1, 0)),
        ] {
            entry
                .encode(7, &name, &resolution(existence, &[[1, 2, 3, 4]], &[]), None)
                .unwrap();
            let header = EntryHeader::read_from_bytes(&entry.words().as_bytes()[..24]).unwrap();
            assert_eq!((header.rcode, header.rcode_other), rcodes);
            assert_eq!(
                header.v4_count,
                u16::from(existence == Existence::Found),
                "no addresses beside an error"
            );
        }
    }

    #[test]
    fn unfitting_answers_are_refused() {
        let mut entry = Encoded::default();
        let nul = Name::from_text("a\\000b.bosh").unwrap();
        assert_eq!(
            entry.encode(7, &nul, &resolution(Existence::Found, &[], &[]), None),
            Err(EntryRefusal::NulByte)
        );
        let many: Vec<[u8; 4]> = (0..=MAX_V4 as u32).map(|n| n.to_be_bytes()).collect();
        let name: Name = "a.bosh".parse().unwrap();
        assert_eq!(
            entry.encode(7, &name, &resolution(Existence::Found, &many, &[]), None),
            Err(EntryRefusal::TooManyAddresses)
        );
        assert_eq!(
            entry.encode(
                7,
                &name,
                &resolution(Existence::Found, &many[1..], &[]),
                None
            ),
            Ok(())
        );
    }

    #[test]
    fn names_are_read_back() {
        let memory: EntryMemory =
            EntryMemory::new(memmap2::MmapMut::map_anon(CHUNK_SIZE).unwrap().into());
        let place = Location(2);
        for text in [".", "a", "seven77.example", "q-s0.q-g1.bosh"] {
            let name: Name = text.parse().unwrap();
            let mut entry = Encoded::default();
            entry
                .encode(
                    7,
                    &name,
                    &resolution(Existence::Found, &[[1, 2, 3, 4]], &[]),
                    None,
                )
                .unwrap();
            memory.write(place, entry.words());
            assert!(is_named(&memory, place, &name));
            assert!(!is_named(&memory, place, &"other.example".parse().unwrap()));
            assert_eq!(read_name(&memory, place), Some(name));
        }
        assert_eq!(read_name(&memory, Location(64)), None, "zeros are no entry");
    }
}
