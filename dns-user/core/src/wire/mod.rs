//! DNS messages: parsing, encoding, truncation, EDNS. Pure.
//!
//! A plain query (a header, one question, at most one OPT) is parsed in place and a local reply is
//! written byte by byte, without allocation and with the same bytes as from hickory's encoder.
//! Other messages go through hickory-proto.
//!
//! * [`parse_from`]: parsing of queries, and immediate error replies.
//! * [`reply`]: construction of local replies, and fitting of foreign ones to the client's limits.
//! * [`options`]: EDNS options and extended errors.
//! * [`ForwardedAnswer`]: a cached answer of another server.

mod options;
pub mod reply;

use std::{net::IpAddr, ops::Range};

pub use dns_common::{MIN_UDP_SIZE, UDP_PAYLOAD_SIZE, forwarded::remaining_ttl};
pub use options::{
    EdnsOption, EdnsOptions, ExtendedError, InfoCode, OPTION_CLIENT_SUBNET, OPTION_COOKIE,
    OPTION_EXTENDED_ERROR, OPTION_NSID, OPTION_PADDING, push_option,
};
pub use reply::{
    QUESTION_NAME, ReplyFlags, Shuffle, append_opt, begin_reply, empty_reply, error_reply,
    local_reply, opt_record, owner_of_answers, truncate_to_client,
};

use hickory_proto::{
    op::ResponseCode,
    rr::Record,
    serialize::binary::{BinDecodable, BinDecoder},
};
use smallvec::SmallVec;

use self::reply::questionless_reply;
use crate::name::Name;

/// Length of a message header in bytes (RFC 1035, section 4.1.1).
pub const HEADER_LEN: usize = 12;

/// Length of an OPT without options (RFC 6891, section 6.1.2).
pub const OPT_LEN: usize = 11;

/// Length of the longest reply without records and options: header, question and OPT.
const MAX_BARE_REPLY: usize = HEADER_LEN + dns_common::name::MAX_NAME_LEN + 4 + OPT_LEN;

/// Maximum payload of a UDP datagram over IPv4: 65,535 less the headers of IP (20) and UDP (8).
/// IPv6 would allow 20 bytes more.
pub const MAX_UDP_SIZE: usize = 65_507;

/// Maximum message size over TCP: the length field has 16 bits (RFC 1035, section 4.2.2).
pub const MAX_TCP_SIZE: usize = 65_535;

/// TYPE A, an IPv4 address (RFC 1035).
pub const TYPE_A: u16 = 1;
/// TYPE SOA, the start of a zone (RFC 1035).
pub const TYPE_SOA: u16 = 6;
/// TYPE PTR, for reverse lookups (RFC 1035).
pub const TYPE_PTR: u16 = 12;
/// TYPE TXT, free-form strings (RFC 1035).
pub const TYPE_TXT: u16 = 16;
/// TYPE AAAA, an IPv6 address (RFC 3596).
pub const TYPE_AAAA: u16 = 28;
/// TYPE OPT, the pseudo-record of EDNS (RFC 6891).
pub const TYPE_OPT: u16 = 41;
/// TYPE DS, which is stored in the parent zone of its owner (RFC 4034).
pub const TYPE_DS: u16 = 43;
/// QTYPE ANY, all records of a name (RFC 8482).
pub const TYPE_ANY: u16 = 255;
/// CLASS IN, the Internet (RFC 1035).
pub const CLASS_IN: u16 = 1;
/// QCLASS ANY, every class (RFC 1035).
pub const CLASS_ANY: u16 = 255;
/// CLASS CH, used for server identification (RFC 4892).
pub const CLASS_CH: u16 = 3;

/// The transport protocol of a query and its reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Transport {
    /// One message per datagram.
    Udp,
    /// A stream of messages with length prefixes.
    Tcp,
}

/// The result of parsing an incoming message.
#[derive(Debug)]
pub enum Parsed<'a> {
    /// A valid query with one question.
    Query(Query<'a>),
    /// A finished error reply: FORMERR, NOTIMP or BADVERS.
    Reply(Vec<u8>),
    /// No reply: the message is shorter than a header, or a response itself.
    Drop,
}

/// Facts about a message that only its receiver knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestInfo {
    /// Address of the client; `None` for a query of this server itself.
    pub client: Option<IpAddr>,
    /// The transport of the query and its reply.
    pub transport: Transport,
}

/// A query with opcode QUERY and one question, and all that decides about the form of its reply. Made by
/// [`parse_from`], and never changed.
#[derive(Clone, Copy, Debug)]
pub struct Query<'a> {
    /// The whole message as received.
    pub message: &'a [u8],
    /// Message id, to be echoed.
    pub id: u16,
    /// The second 16 bits of the header as received.
    pub flags: u16,
    /// The only question of the message.
    pub question: Question<'a>,
    /// The OPT pseudo-record, if present.
    pub edns: Option<Edns>,
    /// Address of the client; `None` for a query of this server itself.
    pub client: Option<IpAddr>,
    /// The transport of the query and its reply.
    pub transport: Transport,
    /// Maximum size of the reply in bytes.
    limit: usize,
    /// Bytes of it that are kept free for options.
    reserved: usize,
    /// Whether the reply's OPT repeats the client's size with DO clear.
    echo_client_opt: bool,
}

/// Settings of a server that change its replies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplySettings {
    /// Limit for replies over UDP in bytes, in addition to the client's own.
    pub max_udp_reply: usize,
    /// Whether the reply's OPT repeats the client's size with DO clear, as in bosh-dns.
    pub echo_client_opt: bool,
}

impl Default for ReplySettings {
    fn default() -> Self {
        Self {
            max_udp_reply: MAX_UDP_SIZE,
            echo_client_opt: false,
        }
    }
}

/// A [`Query`] that owns its message.
#[derive(Clone, Debug)]
pub struct OwnedQuery {
    /// Nearly all queries fit, and then need no allocation.
    message: SmallVec<[u8; 96]>,
    /// Length of the question's name, which follows the header.
    name_len: usize,
    /// The query without message and name.
    fields: Query<'static>,
}

impl OwnedQuery {
    /// Returns the original query without parsing the message again.
    pub fn as_query(&self) -> Query<'_> {
        let Self {
            message,
            name_len,
            fields,
        } = self;
        let raw_name = &message[HEADER_LEN..HEADER_LEN + name_len];
        Query {
            message,
            question: Question {
                raw_name,
                ..fields.question
            },
            ..*fields
        }
    }
}

/// The question of a query.
#[derive(Clone, Copy, Debug)]
pub struct Question<'a> {
    /// Name as sent: uncompressed wire format with its letter case and root label.
    pub raw_name: &'a [u8],
    /// QTYPE as sent, possibly unknown.
    pub qtype: u16,
    /// QCLASS as sent, possibly unknown.
    pub qclass: u16,
}

/// The OPT pseudo-record (RFC 6891, section 6.1.2) of a query, always of version 0; others were
/// answered with BADVERS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Edns {
    /// UDP payload size of the client as sent; values below 512 mean 512.
    pub udp_size: u16,
    /// DO: the client accepts DNSSEC records (RFC 3225).
    pub dnssec_ok: bool,
    /// Range of the options in the message, which are well-formed.
    pub options: (u16, u16),
}

impl<'a> Query<'a> {
    /// Copies the query with its message, so that it outlives the receive buffer.
    pub fn to_owned(&self) -> OwnedQuery {
        let fields = Query {
            message: &[],
            question: Question {
                raw_name: &[],
                ..self.question
            },
            ..*self
        };
        OwnedQuery {
            message: SmallVec::from_slice(self.message),
            name_len: self.question.raw_name.len(),
            fields,
        }
    }

    /// Returns RD: the client wants recursion.
    pub fn recursion_desired(&self) -> bool {
        self.flags & flag::RD != 0
    }

    /// Returns CD: the client wants no DNSSEC validation.
    pub fn checking_disabled(&self) -> bool {
        self.flags & flag::CD != 0
    }

    /// Returns whether the client understands AD in replies: it set AD or DO (RFC 6840, section
    /// 5.8).
    pub fn wants_authentic_data(&self) -> bool {
        self.flags & flag::AD != 0 || self.dnssec_ok()
    }

    /// Returns DO (RFC 3225); false without an OPT.
    pub fn dnssec_ok(&self) -> bool {
        self.edns.is_some_and(|edns| edns.dnssec_ok)
    }

    /// Returns the range of the question in the message: name, type, class.
    pub fn question_range(&self) -> Range<usize> {
        HEADER_LEN..HEADER_LEN + self.question.wire_len()
    }

    /// Returns the EDNS options; none without an OPT.
    pub fn options(&self) -> EdnsOptions<'a> {
        let (start, end) = self.edns.map_or((0, 0), |edns| edns.options);
        EdnsOptions(
            self.message
                .get(usize::from(start)..usize::from(end))
                .unwrap_or_default(),
        )
    }

    /// Returns whether the query has any EDNS option.
    #[inline]
    pub fn has_options(&self) -> bool {
        self.edns
            .is_some_and(|edns| edns.options.0 != edns.options.1)
    }

    /// Returns the first option with this code.
    pub fn option(&self, code: u16) -> Option<EdnsOption<'a>> {
        self.options().find(|option| option.code == code)
    }

    /// Returns the Client Subnet option with its code and length (RFC 7871, section 6).
    pub fn client_subnet(&self) -> Option<&'a [u8]> {
        self.option(OPTION_CLIENT_SUBNET).map(|option| option.whole)
    }

    /// Returns the OPT of a reply to this query, without options; `None` if the query has none (RFC
    /// 6891, section 6.1.1). DO is copied (RFC 3225, section 3).
    pub fn reply_opt(&self, extended_rcode: u8) -> Option<[u8; OPT_LEN]> {
        let edns = self.edns?;
        Some(if self.echo_client_opt {
            opt_record(edns.udp_size, extended_rcode, false)
        } else {
            opt_record(UDP_PAYLOAD_SIZE, extended_rcode, edns.dnssec_ok)
        })
    }

    /// Returns the maximum size of the reply in bytes, without the bytes that are reserved for options.
    pub fn limit(&self) -> usize {
        self.limit - self.reserved
    }

    /// Returns the maximum size of the reply in bytes with the options for which bytes are reserved.
    pub fn limit_with_options(&self) -> usize {
        self.limit
    }

    /// Returns the query with this many bytes of the reply kept free for options. Records are left out
    /// before them.
    pub fn with_room_for_options(self, bytes: usize) -> Self {
        // The shortest limit has room for the longest question.
        let reserved = bytes.min(self.limit.saturating_sub(MAX_BARE_REPLY));
        Self { reserved, ..self }
    }

    /// Returns the query of a client whose replies only the client itself limits.
    pub fn without_server_limit(self) -> Self {
        Self {
            limit: self.client_limit(),
            ..self
        }
    }

    fn client_limit(&self) -> usize {
        match (self.transport, self.edns) {
            (Transport::Tcp, _) => MAX_TCP_SIZE,
            // The limit of DNS without EDNS (RFC 1035, section 4.2.1).
            (Transport::Udp, None) => MIN_UDP_SIZE,
            (Transport::Udp, Some(edns)) => {
                // Sizes below 512 mean 512 (RFC 6891, section 6.2.3).
                usize::from(edns.udp_size).clamp(MIN_UDP_SIZE, MAX_UDP_SIZE)
            }
        }
    }
}

impl Question<'_> {
    /// Returns the name in lower case, for comparison and lookup.
    pub fn name(&self) -> Name {
        // `parse` accepts only well-formed names.
        Name::from_wire(self.raw_name).map_or_else(|_| Name::root(), |(name, _)| name)
    }

    /// Returns the length of the question in the message: name, type, class.
    pub fn wire_len(&self) -> usize {
        self.raw_name.len() + 4
    }
}

//----------- Parsing ---------------------------------------------------------

/// Parses a query of this server itself by UDP.
pub fn parse(message: &[u8]) -> Parsed<'_> {
    parse_by(Transport::Udp, message)
}

/// Parses a query of this server itself.
pub fn parse_by(transport: Transport, message: &[u8]) -> Parsed<'_> {
    parse_from(
        message,
        RequestInfo {
            client: None,
            transport,
        },
        &ReplySettings::default(),
    )
}

/// Parses a message. The rules are bosh-dns's (observed), in this order, except for BADVERS. Trailing bytes are ignored.
/// Settings do not concern the replies to malformed messages.
pub fn parse_from<'m>(
    message: &'m [u8],
    from: RequestInfo,
    settings: &ReplySettings,
) -> Parsed<'m> {
    let Some([id, flags, questions, counts @ ..]) = read_header(message) else {
        return Parsed::Drop;
    };
    // An answer to a response could start a loop of two servers.
    if flags & flag::QR != 0 {
        return Parsed::Drop;
    }
    if flags & flag::OPCODE != 0 {
        // Without the question (observed).
        return Parsed::Reply(questionless_reply(id, flags, ResponseCode::NotImp));
    }
    let [answers, authorities, additionals] = counts;
    // The limits of miekg/dns, the library of bosh-dns: NOTIFY has a SOA among the answers (RFC
    // 1996, section 3.7), IXFR has one in the authority section (RFC 1995, section 3).
    if questions != 1 || answers > 1 || authorities > 1 || additionals > 2 {
        return Parsed::Reply(questionless_reply(id, flags, ResponseCode::FormErr));
    }
    // A question that is compressed or cut off is not repeated either (observed).
    let Some((question, end)) = read_question(message) else {
        return Parsed::Reply(questionless_reply(id, flags, ResponseCode::FormErr));
    };
    let transport = from.transport;
    let mut query = Query {
        message,
        id,
        flags,
        question,
        edns: None,
        client: from.client,
        transport,
        limit: 0,
        reserved: 0,
        echo_client_opt: false,
    };
    // A second OPT is one too (RFC 6891, section 6.1.1), and one whose owner is not the root (section 6.1.2).
    let Some(opt) = read_records(message, end, counts) else {
        let reply = empty_reply(&query, ResponseCode::FormErr, ReplyFlags::ERROR);
        return Parsed::Reply(reply);
    };
    if let Some(Opt { edns, version }) = opt {
        query.edns = Some(edns);
        // RFC 6891, section 6.1.3.
        if version != 0 {
            let reply = empty_reply(&query, ResponseCode::BADVERS, ReplyFlags::ERROR);
            return Parsed::Reply(reply);
        }
    }
    // The handshake of TCP has proved the client's address, so a long reply cannot hit a third
    // party.
    let most = match transport {
        Transport::Udp => settings.max_udp_reply,
        Transport::Tcp => MAX_TCP_SIZE,
    };
    query.limit = query.client_limit().min(most);
    query.echo_client_opt = settings.echo_client_opt;
    Parsed::Query(query)
}

/// Reads ID, flags and the numbers of records in the sections.
fn read_header(message: &[u8]) -> Option<[u16; HEADER_LEN / 2]> {
    let header = message.first_chunk::<HEADER_LEN>()?;
    let mut words = [0; HEADER_LEN / 2];
    for (word, octets) in words.iter_mut().zip(header.as_chunks::<2>().0) {
        *word = u16::from_be_bytes(*octets);
    }
    Some(words)
}

/// Reads the OPT of a query that has neither a question nor other records, which only asks for a cookie (RFC 7873,
/// section 5.4); [`parse`] answers it with FORMERR.
pub fn opt_without_question(message: &[u8]) -> Option<(Edns, EdnsOptions<'_>)> {
    /// QDCOUNT to ARCOUNT.
    const COUNTS: [u8; 8] = [0, 0, 0, 0, 0, 0, 0, 1];
    if message.get(4..HEADER_LEN)? != COUNTS || u16_at(message, 2)? & (flag::QR | flag::OPCODE) != 0
    {
        return None;
    }
    let Opt { edns, version } = read_records(message, HEADER_LEN, [0, 0, 1])??;
    let (start, end) = edns.options;
    let options = EdnsOptions(message.get(usize::from(start)..usize::from(end))?);
    (version == 0).then_some((edns, options))
}

/// An OPT whose version is not checked yet.
struct Opt {
    edns: Edns,
    version: u8,
}

/// Parses the question behind the header; also returns its end.
fn read_question(message: &[u8]) -> Option<(Question<'_>, usize)> {
    let rest = message.get(HEADER_LEN..)?;
    let name_len = name_len(rest)?;
    let raw_name = rest.get(..name_len)?;
    let fields = HEADER_LEN + name_len;
    let question = Question {
        raw_name,
        qtype: u16_at(message, fields)?,
        qclass: u16_at(message, fields + 2)?,
    };
    Some((question, fields + 4))
}

/// Returns the length of the uncompressed name at the start of `bytes`; `None` if invalid.
fn name_len(bytes: &[u8]) -> Option<usize> {
    let mut end = 0;
    loop {
        match *bytes.get(end)? {
            0 => return Some(end + 1),
            length @ 1..=63 => end += usize::from(length) + 1,
            // Nothing precedes the question that a pointer could refer to, and the other two types
            // of label are reserved (RFC 1035, section 4.1.4).
            _ => return None,
        }
        // One byte must be left for the root label.
        if end >= dns_common::name::MAX_NAME_LEN {
            return None;
        }
    }
}

/// Finds the OPT among the records from `at` on, so many in each section; the outer `None` means that they are
/// unparsable.
fn read_records(message: &[u8], at: usize, counts: [u16; 3]) -> Option<Option<Opt>> {
    match counts {
        [0, 0, 0] => Some(None),
        // Nearly every client with EDNS sends an OPT and no other record.
        [0, 0, 1] if message.get(at) == Some(&0) => match u16_at(message, at + 1)? {
            TYPE_OPT => Some(Some(read_opt(message, at + 1)?.0)),
            _ => walk_records(message, at, counts),
        },
        _ => walk_records(message, at, counts),
    }
}

/// Parses the OPT whose TYPE is at `at`; also returns its end.
fn read_opt(message: &[u8], at: usize) -> Option<(Opt, usize)> {
    let fixed: &[u8; 10] = message.get(at..)?.first_chunk()?;
    let [
        _,
        _,
        size_high,
        size_low,
        _extended_rcode,
        version,
        flags_high,
        _,
        length_high,
        length_low,
    ] = *fixed;
    let start = at + fixed.len();
    let end = start + usize::from(u16::from_be_bytes([length_high, length_low]));
    let options = message.get(..end)?;
    let mut next = start;
    // Checked once here, so that iterators over the options of a query need no errors.
    while next < end {
        next += 4 + usize::from(u16_at(options, next + 2)?);
    }
    if next > end {
        return None;
    }
    // A message is not longer than 65,535 bytes.
    let range = (u16::try_from(start).ok()?, u16::try_from(end).ok()?);
    let udp_size = u16::from_be_bytes([size_high, size_low]);
    let edns = Edns {
        udp_size,
        dnssec_ok: flags_high & 0x80 != 0,
        options: range,
    };
    Some((Opt { edns, version }, end))
}

/// Like [`read_records`], for everything that a plain query does not contain. The records are
/// ignored but must be well-formed.
fn walk_records(message: &[u8], start: usize, counts: [u16; 3]) -> Option<Option<Opt>> {
    let mut decoder = BinDecoder::new(message);
    decoder.read_slice(start).ok()?;
    let mut found = None;
    let [answers, authorities, additionals] = counts;
    // At most four records after the check of the counts, so the sums cannot overflow.
    let before_additionals = answers + authorities;
    for number in 0..before_additionals + additionals {
        let type_at = skip_name(message, decoder.index())?;
        if u16_at(message, type_at)? == TYPE_OPT {
            let owner = decoder.index();
            let (opt, end) = read_opt(message, type_at)?;
            decoder.read_slice(end - owner).ok()?;
            // An OPT outside the additional section is ignored (observed).
            if number >= before_additionals && (message[owner] != 0 || found.replace(opt).is_some())
            {
                return None;
            }
        } else {
            Record::read(&mut decoder).ok()?;
        }
    }
    Some(found)
}

//----------- Positions in messages -------------------------------------------

/// Bits of the second 16 bits of a header (RFC 1035, section 4.1.1; RFC 4035, section 3).
pub(crate) mod flag {
    pub(crate) const QR: u16 = 0x8000;
    pub(crate) const AA: u16 = 0x0400;
    pub(crate) const TC: u16 = 0x0200;
    pub(crate) const RD: u16 = 0x0100;
    pub(crate) const AD: u16 = 0x0020;
    pub(crate) const RA: u16 = 0x0080;
    pub(crate) const CD: u16 = 0x0010;
    /// Bits that every reply copies from its query.
    pub(crate) const COPIED: u16 = RD | CD;
    /// Mask of the opcode.
    pub(crate) const OPCODE: u16 = 0x7800;
}

/// RD, the flag of a query that wants recursion (RFC 1035, section 4.1.1).
pub const FLAG_RD: u16 = flag::RD;
/// CD, the flag of a query that wants no DNSSEC validation (RFC 4035, section 3.2.2).
pub const FLAG_CD: u16 = flag::CD;

/// Builds a query of class IN without an OPT, for a name in wire format. `flags` are the second 16 bits of the header.
pub fn query_message(id: u16, flags: u16, name: &[u8], qtype: u16) -> Vec<u8> {
    let mut message = Vec::with_capacity(HEADER_LEN + name.len() + 4 + OPT_LEN);
    for field in [id, flags, 1, 0, 0, 0] {
        message.extend_from_slice(&field.to_be_bytes());
    }
    message.extend_from_slice(name);
    message.extend_from_slice(&qtype.to_be_bytes());
    message.extend_from_slice(&CLASS_IN.to_be_bytes());
    message
}

/// Reads two bytes in network order; `None` past the end.
pub fn u16_at(message: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(*message.get(at..)?.first_chunk()?))
}

/// Returns the end of the name at `at`, which may contain a pointer.
fn skip_name(message: &[u8], mut at: usize) -> Option<usize> {
    loop {
        match *message.get(at)? {
            0 => return Some(at + 1),
            length @ 1..=63 => at += usize::from(length) + 1,
            // The second octet may be missing. Every caller reads behind the name, which fails
            // then.
            0xc0..=0xff => return Some(at + 2),
            _ => return None,
        }
    }
}

/// Offset of ARCOUNT in the header.
const ADDITIONAL_COUNT_AT: usize = 10;

/// Offsets and counts of a reply's parts.
struct Layout {
    /// Start and end of each record.
    records: Vec<(usize, usize)>,
    /// Number of answer, authority and additional records.
    counts: [u16; 3],
    /// Start of the records, which is the end of the questions.
    start: usize,
    end: usize,
    /// Start and end of the OPT.
    opt: Option<(usize, usize)>,
}

impl Layout {
    /// Scans a message; `None` if it is cut short.
    fn read(message: &[u8]) -> Option<Self> {
        let mut at = HEADER_LEN;
        for _ in 0..u16_at(message, 4)? {
            at = skip_name(message, at)? + 4;
        }
        let start = at;
        let counts = [
            u16_at(message, 6)?,
            u16_at(message, 8)?,
            u16_at(message, ADDITIONAL_COUNT_AT)?,
        ];
        let before_additionals = usize::from(counts[0]) + usize::from(counts[1]);
        let mut records = Vec::new();
        let mut opt = None;
        for number in 0..before_additionals + usize::from(counts[2]) {
            let fields = skip_name(message, at)?;
            let end = fields + 10 + usize::from(u16_at(message, fields + 8)?);
            if end > message.len() {
                return None;
            }
            if number >= before_additionals && u16_at(message, fields)? == TYPE_OPT {
                opt = Some((at, end));
            }
            records.push((at, end));
            at = end;
        }
        (at <= message.len()).then_some(Self {
            records,
            counts,
            start,
            end: at,
            opt,
        })
    }
}

/// A cached answer of another server, with everything that decides about a client's reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ForwardedAnswer {
    /// Name of the question.
    pub name: Name,
    /// Type of the question; its class is IN.
    pub qtype: u16,
    /// DO of the queries that get this answer.
    pub dnssec_ok: bool,
    /// CD of the queries that get this answer.
    pub checking_disabled: bool,
    /// The message without OPT. Every reply to such a query with RD has its flags, except
    /// for AD, which only a client that understands it gets (RFC 6840, section 5.8).
    pub message: Box<[u8]>,
    /// Offsets of the TTLs in the message.
    pub ttls: Box<[u16]>,
    /// TTL of all records at the arrival, in seconds.
    pub ttl: u32,
    /// Time for which the answer is valid, in seconds.
    pub lifetime: u32,
    /// Arrival in nanoseconds of the kernel's `CLOCK_BOOTTIME`.
    pub since_ns: u64,
}

#[cfg(test)]
mod tests;
