//! Converts forwarded answers and local replies to the entries from which the programs answer, see
//! [`dns_common::forwarded`].

use dns_common::{
    entry::padded,
    forwarded::{
        ANY_LIMIT, AnswerHeader, GROUPS, LOCAL, MAX_ANSWER_SIZE, MAX_BODY_LEN, MAX_GROUP_VARIANTS,
        MAX_RECORDS, MIN_BODY_LEN, NARROW, PLAIN, QueryKey, Variant, WIDE, ones_sum,
    },
    name::hash_name,
};
use zerocopy::IntoBytes as _;

use dns_core::{
    name::{Name, NameRef},
    wire::{ForwardedAnswer, HEADER_LEN},
};

/// Byte of the header that holds opcode, AA, TC and RD.
const TC: u8 = 0x02;
/// RD in the same byte.
const RD: u8 = 0x01;
/// RCODEs that are published: NOERROR and NXDOMAIN.
const RCODES: [u8; 2] = [0, 3];
/// CD in the fourth byte of a header.
const CD: u8 = 0x10;
/// Bytes of the question after its name.
const TYPE_CLASS_LEN: usize = 4;
/// Bytes of a record between its owner and its data.
const FIXED_LEN: usize = 10;
/// TYPE SOA, which a negative answer must have in its authority section (RFC 2308, section 5).
const TYPE_SOA: u16 = 6;
/// Bytes of an SOA after its serial (RFC 1035, section 3.3.13).
const AFTER_SERIAL: usize = 16;

/// A question of class IN with the flags that decide about its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AnswerQuestion<N = Name> {
    /// Name of the question in lower case.
    pub name: N,
    /// Type of the question.
    pub qtype: u16,
    /// DO of the query.
    pub dnssec_ok: bool,
    /// CD of the query.
    pub checking_disabled: bool,
}

/// A question with a borrowed name.
pub type AnswerKey<'n> = AnswerQuestion<NameRef<'n>>;

impl<N> AnswerQuestion<N> {
    fn query_key(&self) -> QueryKey {
        QueryKey::new(self.qtype, self.dnssec_ok, self.checking_disabled)
    }
}

impl AnswerKey<'_> {
    pub(crate) fn key(&self, seed: u64) -> u64 {
        self.query_key().hash(hash_name(seed, self.name.as_wire()))
    }
}

impl AnswerQuestion {
    pub(crate) fn of(answer: &ForwardedAnswer) -> Self {
        let &ForwardedAnswer {
            ref name,
            qtype,
            dnssec_ok,
            checking_disabled,
            ..
        } = answer;
        Self {
            name: name.clone(),
            qtype,
            dnssec_ok,
            checking_disabled,
        }
    }

    pub(crate) fn key(&self, seed: u64) -> u64 {
        self.query_key().hash(hash_name(seed, self.name.as_wire()))
    }
}

/// A local reply in the forms that clients get. Messages are complete replies to queries with RD, without OPT.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LocalReply {
    /// Replies to queries without OPT, which differ in the order and the choice of records.
    pub plain: Vec<Vec<u8>>,
    /// The same for queries with an OPT that accept no more than without it.
    pub narrow: Vec<Vec<u8>>,
    /// The same for queries with an OPT that accept more.
    pub wide: Vec<Vec<u8>>,
    /// Smallest and largest EDNS size for which `wide` is valid, in bytes.
    pub wide_limits: [u16; 2],
    /// Serial of the SOA record at `since_ns`; increases by one each second.
    pub serial: u32,
    /// Time of the replies, in nanoseconds of `CLOCK_BOOTTIME`.
    pub since_ns: u64,
}

impl LocalReply {
    /// Returns whether the reply has no answer.
    pub fn is_negative(&self) -> bool {
        self.plain
            .iter()
            .chain(&self.narrow)
            .chain(&self.wide)
            .all(|message| message.get(6..8) == Some(&[0, 0]))
    }
}

/// Encodes an answer as an entry of `generation`; `None` if userspace must answer it: other RCODEs, truncated
/// answers, negative ones without SOA, too many records, too long a body, or a NUL byte in the name.
pub fn encode(answer: &ForwardedAnswer, seed: u64, generation: u64) -> Option<Vec<u64>> {
    let ForwardedAnswer {
        name,
        qtype,
        dnssec_ok,
        checking_disabled,
        message,
        ttls,
        ttl,
        lifetime,
        since_ns,
    } = answer;
    let body_at = HEADER_LEN + name.as_wire().len() + TYPE_CLASS_LEN;
    let form = Form::of(message, body_at)?;
    // A truncated answer holds no complete set of records (RFC 2181, section 9). Every record
    // must have a TTL that the programs count down.
    if form.flags[0] & TC != 0 || form.records() != ttls.len() || form.records() > MAX_RECORDS {
        return None;
    }
    let mut offsets = Vec::with_capacity(ttls.len());
    let mut has_soa = false;
    for &at in ttls {
        let at = usize::from(at).checked_sub(body_at)?;
        // Type and class precede the TTL.
        has_soa |= form.body.get(at.checked_sub(4)?..at - 2)? == TYPE_SOA.to_be_bytes();
        offsets.push(u16::try_from(at).ok()?);
    }
    // A denial without SOA must not be kept (RFC 2308, section 5).
    if form.counts[0] == [0, 0] && !has_soa {
        return None;
    }
    let header = EntryHeader {
        name,
        key: QueryKey::new(*qtype, *dnssec_ok, *checking_disabled),
        since_ns: *since_ns,
        generation,
        number: *ttl,
        lifetime: *lifetime,
        numbers_at: &offsets,
        variants: [[0, 1]; GROUPS],
        wide_limits: ANY_LIMIT,
    };
    header.encode(vec![form], seed)
}

/// Encodes a local reply as an entry; `None` if userspace must answer it: other RCODEs, too long a
/// body, or a NUL byte in the name. Forms for which an entry has no room are left out.
pub fn encode_local(reply: &LocalReply, question: &AnswerQuestion, seed: u64) -> Option<Vec<u64>> {
    let name = &question.name;
    let LocalReply {
        plain,
        narrow,
        wide,
        wide_limits,
        serial,
        since_ns,
    } = reply;
    let body_at = HEADER_LEN + name.as_wire().len() + TYPE_CLASS_LEN;
    // A reply repeats RD and CD of its query (RFC 1035, section 4.1.1; RFC 4035, section 3.2.2),
    // and the entry is for queries with these.
    let copied = RD | if question.checking_disabled { CD } else { 0 };
    // A reply too long for one group of clients leaves the others to the programs.
    let by_group = [plain, narrow, wide]
        .map(|messages| Form::all_of(messages, body_at, copied).unwrap_or_default());
    let mut room = MAX_ANSWER_SIZE - AnswerHeader::variants_offset(name.as_wire().len());
    let mut all = Vec::new();
    let mut variants = [[0; 2]; GROUPS];
    for (turn, group) in GROUPS_BY_USE.into_iter().enumerate() {
        let mut earlier = GROUPS_BY_USE[..turn].iter();
        // Groups with equal forms share them, because an entry has little room.
        variants[group] = match earlier.find(|&&earlier| by_group[earlier] == by_group[group]) {
            Some(&earlier) => variants[earlier],
            None => append_fitting(&mut all, &by_group[group], &mut room),
        };
    }
    let serial_at = all.first()?.serial_at();
    for form in &all {
        // An entry has one list of places at which numbers change, for all forms.
        if form.serial_at() != serial_at {
            return None;
        }
        if let Some(at) = serial_at
            && !form.body[usize::from(at)..].starts_with(&serial.to_be_bytes())
        {
            return None;
        }
    }
    let numbers_at: Vec<u16> = serial_at.into_iter().collect();
    // Entries of the same reply are equal unless a serial counts from some time on.
    let (number, since_ns) = if serial_at.is_some() {
        (*serial, *since_ns)
    } else {
        (0, 0)
    };
    let header = EntryHeader {
        name,
        key: question.query_key(),
        since_ns,
        generation: LOCAL,
        number,
        lifetime: u32::MAX,
        numbers_at: &numbers_at,
        variants,
        wide_limits: *wide_limits,
    };
    header.encode(all, seed)
}

/// The groups of clients, the one with the fewest clients last: an entry may lack room for all.
const GROUPS_BY_USE: [usize; GROUPS] = [PLAIN, WIDE, NARROW];

/// Appends the forms of a group that fit in the `room` of an entry, in bytes, and deducts them from it.
/// Returns the first one's number and their count.
fn append_fitting(all: &mut Vec<Form>, forms: &[Form], room: &mut usize) -> [u8; 2] {
    let first = all.len();
    for form in forms.iter().take(MAX_GROUP_VARIANTS) {
        let size = size_of::<Variant>() + padded(form.body.len());
        if size > *room {
            break;
        }
        *room -= size;
        all.push(form.clone());
    }
    // At most `MAX_VARIANTS`.
    [first as u8, (all.len() - first) as u8]
}

/// One form of an answer: the parts of a message that the programs send.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Form {
    flags: [u8; 2],
    counts: [[u8; 2]; 3],
    body: Vec<u8>,
}

impl Form {
    /// Reads a message whose body begins at `body_at`; `None` if the programs cannot send it.
    fn of(message: &[u8], body_at: usize) -> Option<Self> {
        let header = message.get(..HEADER_LEN)?;
        let body = message.get(body_at..)?;
        let flags = [header[2], header[3]];
        let counts = [
            [header[6], header[7]],
            [header[8], header[9]],
            [header[10], header[11]],
        ];
        // One question, since the programs send the client's own in its place.
        let is_fitting = header[4..6] == [0, 1]
            && RCODES.contains(&(flags[1] & 0x0f))
            && (body.is_empty() || (MIN_BODY_LEN..=MAX_BODY_LEN).contains(&body.len()));
        is_fitting.then(|| Self {
            flags,
            counts,
            body: body.to_vec(),
        })
    }

    /// Reads the messages for a group of clients; `None` if the programs cannot send one of them, or if a query with
    /// other flags than `copied` would get one.
    fn all_of(messages: &[Vec<u8>], body_at: usize, copied: u8) -> Option<Vec<Self>> {
        let mut forms = Vec::with_capacity(messages.len());
        for message in messages {
            let form = Self::of(message, body_at)?;
            if (form.flags[0] & RD) | (form.flags[1] & CD) != copied {
                return None;
            }
            forms.push(form);
        }
        Some(forms)
    }

    fn records(&self) -> usize {
        self.counts
            .iter()
            .map(|&count| usize::from(u16::from_be_bytes(count)))
            .sum()
    }

    /// Returns the offset of the first SOA's serial in the body.
    fn serial_at(&self) -> Option<u16> {
        let mut rest = &self.body[..];
        for _ in 0..self.records() {
            let record = WireRecord::read(rest)?;
            if record.kind == TYPE_SOA {
                let end = self.body.len() - rest.len() + record.len;
                return u16::try_from(end.checked_sub(AFTER_SERIAL + 4)?).ok();
            }
            rest = &rest[record.len..];
        }
        None
    }
}

/// A record at the start of some bytes.
struct WireRecord {
    kind: u16,
    /// Length of the whole record in bytes.
    len: usize,
}

impl WireRecord {
    fn read(bytes: &[u8]) -> Option<Self> {
        let mut at = 0;
        let fixed = loop {
            match *bytes.get(at)? {
                0 => break at + 1,
                length @ 1..=63 => at += usize::from(length) + 1,
                // A pointer ends the name (RFC 1035, section 4.1.4).
                0xc0..=0xff => break at + 2,
                // 64 to 191: no kind of label that anybody uses (RFC 6891, section 5).
                _ => return None,
            }
        };
        let fields = bytes.get(fixed..fixed + FIXED_LEN)?;
        let len = fixed + FIXED_LEN + usize::from(u16::from_be_bytes([fields[8], fields[9]]));
        (len <= bytes.len()).then_some(Self {
            kind: u16::from_be_bytes([fields[0], fields[1]]),
            len,
        })
    }
}

/// Returns the first record of a message after a question with a name of `name_len` bytes.
pub(crate) fn first_record(message: &[u8], name_len: usize) -> Option<&[u8]> {
    let body = message.get(HEADER_LEN + name_len + TYPE_CLASS_LEN..)?;
    body.get(..WireRecord::read(body)?.len)
}

/// The fields of an entry's header other than those computed from its forms.
struct EntryHeader<'a> {
    name: &'a Name,
    key: QueryKey,
    since_ns: u64,
    generation: u64,
    number: u32,
    lifetime: u32,
    /// Offsets in the body of the fields with a number that changes by the second.
    numbers_at: &'a [u16],
    variants: [[u8; 2]; GROUPS],
    wide_limits: [u16; 2],
}

impl EntryHeader<'_> {
    fn encode(self, mut forms: Vec<Form>, seed: u64) -> Option<Vec<u64>> {
        let Self {
            name,
            key,
            since_ns,
            generation,
            number,
            lifetime,
            numbers_at,
            variants,
            wide_limits,
        } = self;
        // The programs take the first zero byte for the end of a name.
        if name.labels().any(|label| label.contains(&0)) {
            return None;
        }
        let wire = name.as_wire();
        let mut ttls = [0; MAX_RECORDS];
        ttls.get_mut(..numbers_at.len())?
            .copy_from_slice(numbers_at);
        let header = AnswerHeader {
            last_used_ns: 0,
            hash: key.hash(hash_name(seed, wire)),
            since_ns,
            generation,
            key,
            ttl: number,
            lifetime,
            name_len: u16::try_from(wire.len()).ok()?,
            ttl_count: u8::try_from(numbers_at.len()).ok()?,
            // A number at an odd offset enters the checksum with its bytes swapped (RFC 1071).
            odd_ttls: u8::try_from(numbers_at.iter().filter(|&at| at % 2 == 1).count()).ok()?,
            variants,
            wide_limits,
            padding: [0; 6],
            ttls,
        };
        let variants_at = AnswerHeader::variants_offset(wire.len());
        let mut body_at = variants_at + forms.len() * size_of::<Variant>();
        let size = body_at
            + forms
                .iter()
                .map(|form| padded(form.body.len()))
                .sum::<usize>();
        if size > MAX_ANSWER_SIZE {
            return None;
        }
        let mut words = vec![0_u64; size / 8];
        let bytes = words.as_mut_bytes();
        bytes[..size_of::<AnswerHeader>()].copy_from_slice(header.as_bytes());
        bytes[size_of::<AnswerHeader>()..][..wire.len()].copy_from_slice(wire);
        for (
            index,
            Form {
                flags,
                counts,
                body,
            },
        ) in forms.iter_mut().enumerate()
        {
            for &at in numbers_at {
                // Zero, because the programs add the current number to the sum of the rest.
                body.get_mut(usize::from(at)..)?.get_mut(..4)?.fill(0);
            }
            let variant = Variant {
                flags: *flags,
                counts: *counts,
                body_at: u16::try_from(body_at).ok()?,
                body_len: u16::try_from(body.len()).ok()?,
                body_sum: ones_sum(body),
                padding: [0; 2],
            };
            let start = variants_at + index * size_of::<Variant>();
            bytes[start..][..size_of::<Variant>()].copy_from_slice(variant.as_bytes());
            bytes[body_at..][..body.len()].copy_from_slice(body);
            body_at += padded(body.len());
        }
        Some(words)
    }
}

#[cfg(test)]
mod tests {
    use dns_core::wire::{Parsed, parse};
    use test_support::forwarded::{model, models};
    use zerocopy::FromBytes as _;

    use super::*;

    /// Returns an answer with one A record of a TTL of 300 s, owned by the question's name.
    fn answer() -> ForwardedAnswer {
        let message = b"\0\0\x81\xa0\0\x01\0\x01\0\0\0\0\x02ok\0\0\x01\0\x01\xc0\x0c\0\x01\0\x01\0\0\x01\x2c\0\x04\x0a\0\0\x01";
        ForwardedAnswer {
            name: "ok".parse().unwrap(),
            qtype: 1,
            dnssec_ok: false,
            checking_disabled: false,
            message: message[..].into(),
            ttls: [26].into(),
            ttl: 300,
            lifetime: 300,
            since_ns: 5,
        }
    }

    #[test]
    fn body_has_zero_ttls() {
        let words = encode(&answer(), 7, 3).unwrap();
        let (header, rest) = AnswerHeader::read_from_prefix(words.as_bytes()).unwrap();
        let (variant, _) = Variant::read_from_prefix(&rest[8..]).unwrap();
        assert_eq!(
            (
                header.name_len,
                variant.body_len,
                header.ttl_count,
                header.odd_ttls
            ),
            (4, 16, 1, 0)
        );
        assert_eq!(
            (header.ttls[0], header.generation, header.since_ns),
            (6, 3, 5)
        );
        assert_eq!(&rest[..8], b"\x02ok\0\0\0\0\0");
        assert_eq!(
            &rest[24..40],
            b"\xc0\x0c\0\x01\0\x01\0\0\0\0\0\x04\x0a\0\0\x01"
        );
        assert_eq!(header.hash, AnswerQuestion::of(&answer()).key(7));
    }

    #[test]
    fn incomplete_answers_are_refused() {
        let with = |change: &dyn Fn(&mut ForwardedAnswer)| {
            let mut answer = answer();
            change(&mut answer);
            encode(&answer, 7, 3)
        };
        assert!(with(&|_| {}).is_some());
        assert!(
            with(&|answer| answer.message[2] |= TC).is_none(),
            "truncated"
        );
        assert!(with(&|answer| answer.message[3] |= 2).is_none(), "SERVFAIL");
        assert!(
            with(&|answer| answer.message[7] = 2).is_none(),
            "a record without TTL"
        );
        assert!(
            with(&|answer| answer.ttls[0] = 40).is_none(),
            "a TTL behind the end"
        );
        assert!(
            with(&|answer| answer.message[7..10].copy_from_slice(&[0, 0, 1])).is_none(),
            "no SOA"
        );
        assert!(with(&|answer| answer.name = Name::from_text("a\\000").unwrap()).is_none());
    }

    /// Returns a reply to "ok" with these records, without OPT.
    fn message(counts: [u8; 3], body: &[u8]) -> Vec<u8> {
        let [answers, authority, additional] = counts;
        let header = [
            0, 0, 0x85, 0x80, 0, 1, 0, answers, 0, authority, 0, additional,
        ];
        [&header[..], b"\x02ok\0\0\x21\0\x01", body].concat()
    }

    fn question() -> AnswerQuestion {
        AnswerQuestion {
            name: "ok".parse().unwrap(),
            qtype: 33,
            dnssec_ok: false,
            checking_disabled: false,
        }
    }

    fn local(plain: &[Vec<u8>], wide: &[Vec<u8>]) -> LocalReply {
        LocalReply {
            plain: plain.to_vec(),
            narrow: plain.to_vec(),
            wide: wide.to_vec(),
            wide_limits: [600, 4096],
            serial: 7,
            since_ns: 5,
        }
    }

    fn single(plain: &Vec<u8>, wide: &Vec<u8>) -> LocalReply {
        local(std::slice::from_ref(plain), std::slice::from_ref(wide))
    }

    fn ask(entry: &[u64], size: Option<u16>) -> Vec<Vec<u8>> {
        let mut message = b"\x12\x34\x01\0\0\x01\0\0\0\0\0\0\x02Ok\0\0\x21\0\x01".to_vec();
        if let Some(size) = size {
            message[11] = 1;
            message.extend(dns_core::wire::opt_record(size, 0, false));
        }
        let Parsed::Query(query) = parse(&message) else {
            panic!("a query")
        };
        models(entry, &query, 9_000_000_005)
    }

    #[test]
    fn local_replies_depend_on_edns() {
        let srv = |port: u8| {
            [
                b"\xc0\x0c\0\x21\0\x01\0\0\0\0\0\x09\0\x01\0\x01\0",
                &[port][..],
                b"\x01a\0",
            ]
            .concat()
        };
        let [first, second] = [1, 2].map(|port| message([1, 0, 0], &srv(port)));
        let both = [
            [first.clone(), second.clone()].to_vec(),
            vec![first.clone()],
        ];
        let entry = encode_local(&local(&both[0], &both[1]), &question(), 7).unwrap();
        let body = |reply: &Vec<u8>| reply[20..41].to_vec();
        assert_eq!(
            ask(&entry, None).iter().map(body).collect::<Vec<_>>(),
            [srv(1), srv(2)]
        );
        assert_eq!(
            ask(&entry, Some(1232)).iter().map(body).collect::<Vec<_>>(),
            [srv(1)]
        );
        assert_eq!(ask(&entry, Some(1232))[0].len(), 41 + 11);
        assert!(ask(&entry, Some(599)).is_empty() && ask(&entry, Some(4097)).is_empty());
        let same = encode_local(&local(&both[0], &both[0]), &question(), 7).unwrap();
        assert_eq!(
            (ask(&same, Some(600)).len(), ask(&same, None).len()),
            (2, 2)
        );
        assert!(same.len() < entry.len(), "equal forms are stored once");
        for size in [0, 511, 512] {
            let narrow = ask(&entry, Some(size));
            assert_eq!(
                narrow.iter().map(body).collect::<Vec<_>>(),
                [srv(1), srv(2)]
            );
        }
        let of_each = LocalReply {
            narrow: vec![second.clone()],
            ..local(&both[0], &both[1])
        };
        let entry = encode_local(&of_each, &question(), 7).unwrap();
        let bodies = |size| ask(&entry, size).iter().map(body).collect::<Vec<_>>();
        assert_eq!(bodies(None), [srv(1), srv(2)]);
        assert_eq!(bodies(Some(512)), [srv(2)]);
        assert_eq!(
            bodies(Some(513)),
            [] as [Vec<u8>; 0],
            "below the smallest limit"
        );
        assert_eq!(bodies(Some(600)), [srv(1)]);
    }

    #[test]
    fn serial_counts_seconds() {
        let soa = |serial: u8| {
            [
                &b"\0\0\x06\0\x01\0\0\0\x05\0\x16\0\0\0\0\0"[..],
                &[serial],
                &[0; 16],
            ]
            .concat()
        };
        let denial = message([0, 1, 0], &soa(7));
        let entry = encode_local(&single(&denial, &denial), &question(), 7).unwrap();
        assert_eq!(ask(&entry, None)[0][20..], soa(16));
        let other = message([0, 1, 0], &soa(8));
        assert_eq!(
            encode_local(&single(&other, &other), &question(), 7),
            None,
            "another clock"
        );
    }

    #[test]
    fn long_forms_are_left_out() {
        let long = |len: usize| {
            message(
                [1, 0, 0],
                &[&b"\0\0\x10\0\x01\0\0\0\0\x04"[..], &vec![b'x'; len]].concat(),
            )
        };
        let fits = long(1100);
        let large = long(1300);
        let entry = encode_local(&single(&fits, &large), &question(), 7).unwrap();
        assert_eq!(ask(&entry, Some(4096)), [] as [Vec<u8>; 0]);
        assert_eq!(encode_local(&single(&large, &large), &question(), 7), None);
        let many = vec![fits; 8];
        let entry = encode_local(&local(&many, &many), &question(), 7).unwrap();
        assert!(entry.len() * 8 <= MAX_ANSWER_SIZE && ask(&entry, Some(4096)).len() == 7);
    }

    #[test]
    fn model_counts_the_ttl_down() {
        let words = encode(&answer(), 7, 3).unwrap();
        let message = b"\x12\x34\x01\0\0\x01\0\0\0\0\0\0\x02Ok\0\0\x01\0\x01";
        let Parsed::Query(query) = parse(message) else {
            panic!("a query")
        };
        let reply = model(&words, &query, 299_999_999_999).unwrap();
        assert_eq!(
            reply[..12],
            *b"\x12\x34\x81\x80\0\x01\0\x01\0\0\0\0",
            "AD is hidden"
        );
        assert_eq!(reply[12..26], *b"\x02Ok\0\0\x01\0\x01\xc0\x0c\0\x01\0\x01");
        assert_eq!(reply[26..30], [0, 0, 0, 1]);
        assert_eq!(model(&words, &query, 300_000_000_000), None);
    }
}
