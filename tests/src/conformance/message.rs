//! DNS messages in the format of recorded cases. Hickory rejects malformed messages, but the cases
//! send them, and a reply must be shown exactly as received: rdata that does not fit its type
//! appears in the generic form of RFC 3597, `\# length hex`. Hickory 0.26 also reads and writes `\046` in octal,
//! where RFC 1035 and the cases have decimal digits, and parses neither `TYPE65280` nor `NXDOMAIN`.

use std::{fmt::Write as _, net::Ipv4Addr, net::Ipv6Addr};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use super::scenario::{Opt, Query, Record};

/// Record types by name.
const TYPES: &[(&str, u16)] = &[
    ("A", 1),
    ("NS", 2),
    ("CNAME", 5),
    ("SOA", 6),
    ("PTR", 12),
    ("HINFO", 13),
    ("MX", 15),
    ("TXT", 16),
    ("AAAA", 28),
    ("SRV", 33),
    ("NAPTR", 35),
    ("OPT", 41),
    ("DS", 43),
    ("RRSIG", 46),
    ("NSEC", 47),
    ("DNSKEY", 48),
    ("SVCB", 64),
    ("HTTPS", 65),
    ("SPF", 99),
    ("IXFR", 251),
    ("AXFR", 252),
    ("ANY", 255),
    ("CAA", 257),
];

const CLASSES: &[(&str, u16)] = &[("IN", 1), ("CH", 3), ("HS", 4), ("NONE", 254), ("ANY", 255)];

/// Response codes by name.
const RCODES: &[(&str, u16)] = &[
    ("NOERROR", 0),
    ("FORMERR", 1),
    ("SERVFAIL", 2),
    ("NXDOMAIN", 3),
    ("NOTIMP", 4),
    ("REFUSED", 5),
    ("YXDOMAIN", 6),
    ("NOTAUTH", 9),
    ("BADVERS", 16),
];

const OPT: u16 = 41;

/// A received message, decomposed without validation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    pub id: u16,
    pub flags: Flags,
    /// Response code by name, extended by the OPT.
    pub rcode: String,
    /// Name, type and class of each question.
    pub question: Vec<(String, String, String)>,
    pub answers: Vec<Record>,
    pub authority: Vec<Record>,
    /// Additional section without the OPT.
    pub additional: Vec<Record>,
    pub opt: Option<Opt>,
    /// Total size in bytes.
    pub size: usize,
    /// Number of bytes after the end of the message.
    pub trailing: usize,
}

/// The second 16 bits of a header, without the response code (RFC 1035, section 4.1.1; RFC 4035,
/// section 3).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flags {
    pub qr: bool,
    pub opcode: u8,
    pub aa: bool,
    pub tc: bool,
    pub rd: bool,
    pub ra: bool,
    pub z: bool,
    pub ad: bool,
    pub cd: bool,
}

impl Flags {
    fn read(bits: u16) -> Self {
        let bit = |number: u32| bits >> number & 1 == 1;
        Self {
            qr: bit(15),
            opcode: (bits >> 11 & 15) as u8,
            aa: bit(10),
            tc: bit(9),
            rd: bit(8),
            ra: bit(7),
            z: bit(6),
            ad: bit(5),
            cd: bit(4),
        }
    }

    /// Encodes the flags; the lowest four bits are left free for the response code.
    pub fn write(self) -> u16 {
        let Self {
            qr,
            opcode,
            aa,
            tc,
            rd,
            ra,
            z,
            ad,
            cd,
        } = self;
        let bits = [
            (qr, 15),
            (aa, 10),
            (tc, 9),
            (rd, 8),
            (ra, 7),
            (z, 6),
            (ad, 5),
            (cd, 4),
        ];
        let opcode = u16::from(opcode & 15) << 11;
        bits.into_iter()
            .fold(opcode, |sum, (set, number)| sum | u16::from(set) << number)
    }
}

impl Seen {
    /// Parses a message.
    ///
    /// # Errors
    ///
    /// Fails if the message ends before its records do, or a name is malformed.
    pub fn parse(message: &[u8]) -> Result<Self> {
        let mut reader = Reader { message, offset: 0 };
        let (id, flags) = (reader.u16()?, reader.u16()?);
        let counts = [reader.u16()?, reader.u16()?, reader.u16()?, reader.u16()?];
        let mut seen = Self {
            id,
            flags: Flags::read(flags),
            size: message.len(),
            ..Self::default()
        };
        let mut rcode = flags & 15;
        for _ in 0..counts[0] {
            let name = reader.name()?;
            let question = (name, type_name(reader.u16()?), class_name(reader.u16()?));
            seen.question.push(question);
        }
        for (section, count) in [&mut seen.answers, &mut seen.authority, &mut seen.additional]
            .into_iter()
            .zip(&counts[1..])
        {
            for _ in 0..*count {
                let name = reader.name()?;
                let (rtype, class, ttl) = (reader.u16()?, reader.u16()?, reader.u32()?);
                let length = usize::from(reader.u16()?);
                let (start, data) = (reader.offset, reader.take(length)?);
                if rtype == OPT {
                    rcode |= ((ttl >> 24) as u16) << 4;
                    seen.opt = Some(read_opt(class, ttl, data));
                } else {
                    let rdata = show_rdata(message, rtype, start, data);
                    let class = (class != 1).then(|| class_name(class));
                    section.push(Record(name, type_name(rtype), ttl, rdata, class));
                }
            }
        }
        seen.rcode = name_of(RCODES, rcode).map_or_else(|| format!("RCODE{rcode}"), str::to_owned);
        seen.trailing = message.len() - reader.offset;
        Ok(seen)
    }
}

/// Encodes a recorded query.
///
/// # Errors
///
/// Fails on a label that is too long or an unknown type.
pub fn write_query(query: &Query, id: u16) -> Result<Vec<u8>> {
    if let Some(raw) = &query.raw {
        return from_hex(raw);
    }
    let flags = Flags {
        opcode: query.opcode,
        rd: query.rd.unwrap_or(true),
        ad: query.ad,
        cd: query.cd,
        ..Flags::default()
    };
    let counts = [1, 0, 0, u16::from(query.edns.is_some())];
    let mut message = write_header(id, flags.write(), counts);
    let name = query.name.as_deref().context("a query without a name")?;
    write_name(&mut message, name)?;
    let qtype = query.qtype.as_ref().context("a query without a type")?;
    message.extend(type_number(qtype)?.to_be_bytes());
    message.extend(
        query
            .class
            .as_ref()
            .map_or(Ok(1), class_number)?
            .to_be_bytes(),
    );
    if let Some(opt) = &query.edns {
        write_opt(&mut message, opt)?;
    }
    Ok(message)
}

pub fn write_header(id: u16, flags: u16, counts: [u16; 4]) -> Vec<u8> {
    let [questions, answers, authority, additional] = counts;
    [id, flags, questions, answers, authority, additional]
        .into_iter()
        .flat_map(u16::to_be_bytes)
        .collect()
}

/// Appends an OPT.
///
/// # Errors
///
/// Fails if the data of an option is not hexadecimal.
pub fn write_opt(message: &mut Vec<u8>, opt: &Opt) -> Result<()> {
    let Opt {
        udp_size,
        dnssec_ok,
        version,
        options,
    } = opt;
    let mut data = Vec::new();
    for (code, hex) in options {
        let bytes = from_hex(hex)?;
        data.extend(code.to_be_bytes());
        data.extend(u16::try_from(bytes.len())?.to_be_bytes());
        data.extend(bytes);
    }
    message.push(0);
    message.extend(OPT.to_be_bytes());
    message.extend(udp_size.to_be_bytes());
    message.extend([
        0,
        version.unwrap_or(0),
        if dnssec_ok.unwrap_or(false) { 0x80 } else { 0 },
        0,
    ]);
    message.extend(u16::try_from(data.len())?.to_be_bytes());
    message.extend(data);
    Ok(())
}

fn read_opt(udp_size: u16, ttl: u32, mut data: &[u8]) -> Opt {
    let mut options = Vec::new();
    while let [code_high, code_low, length_high, length_low, rest @ ..] = data {
        let length = usize::from(u16::from_be_bytes([*length_high, *length_low])).min(rest.len());
        options.push((
            u16::from_be_bytes([*code_high, *code_low]),
            to_hex(&rest[..length]),
        ));
        data = &rest[length..];
    }
    Opt {
        udp_size,
        dnssec_ok: Some(ttl & 0x8000 != 0),
        version: Some((ttl >> 16) as u8),
        options,
    }
}

//----------- Records --------------------------------------------------------

/// Appends a record; its owner is a pointer to the question if it equals `question`.
///
/// # Errors
///
/// Fails if the record of a script cannot be encoded.
pub fn write_record(message: &mut Vec<u8>, record: &Record, question: Option<&str>) -> Result<()> {
    let Record(name, rtype, ttl, rdata, class) = record;
    if question == Some(name) {
        message.extend([0xc0, 12]);
    } else {
        write_name(message, name)?;
    }
    let class = class
        .as_ref()
        .map_or(Ok(1), |class| class_number(&Value::from(class.as_str())))?;
    let data = write_rdata(rtype, rdata).with_context(|| format!("rdata {rdata:?} of {rtype}"))?;
    message.extend(type_number(&Value::from(rtype.as_str()))?.to_be_bytes());
    message.extend(class.to_be_bytes());
    message.extend(ttl.to_be_bytes());
    message.extend(u16::try_from(data.len())?.to_be_bytes());
    message.extend(data);
    Ok(())
}

/// Encodes rdata given in presentation form.
fn write_rdata(rtype: &str, text: &str) -> Result<Vec<u8>> {
    let mut data = Vec::new();
    let mut words = text.split_whitespace();
    if text.starts_with("\\#") {
        return from_hex(&words.skip(2).collect::<String>());
    }
    // Number of leading integers, names and trailing integers in the rdata.
    let (numbers, names, more_numbers) = match rtype {
        "A" => return Ok(text.parse::<Ipv4Addr>()?.octets().to_vec()),
        "AAAA" => return Ok(text.parse::<Ipv6Addr>()?.octets().to_vec()),
        "TXT" => {
            let bytes = text.trim_matches('"').as_bytes();
            for part in bytes.chunks(255) {
                data.push(u8::try_from(part.len())?);
                data.extend(part);
            }
            if bytes.is_empty() {
                data.push(0);
            }
            return Ok(data);
        }
        "NS" | "CNAME" | "PTR" => (0, 1, 0),
        "MX" => (1, 1, 0),
        "SRV" => (3, 1, 0),
        "SOA" => (0, 2, 5),
        _ => bail!("type {rtype} is not known here"),
    };
    for _ in 0..numbers {
        data.extend(
            words
                .next()
                .context("too short")?
                .parse::<u16>()?
                .to_be_bytes(),
        );
    }
    for _ in 0..names {
        write_name(&mut data, words.next().context("too short")?)?;
    }
    for _ in 0..more_numbers {
        data.extend(
            words
                .next()
                .context("too short")?
                .parse::<u32>()?
                .to_be_bytes(),
        );
    }
    ensure!(words.next().is_none(), "too long");
    Ok(data)
}

/// Returns rdata in presentation form.
fn show_rdata(message: &[u8], rtype: u16, start: usize, data: &[u8]) -> String {
    let generic = || match data.len() {
        0 => "\\# 0".to_owned(),
        length => format!("\\# {length} {}", to_hex(data)),
    };
    show_known_rdata(message, rtype, start, data).unwrap_or_else(generic)
}

/// Returns rdata of a known type in presentation form; `None` if it does not fit the type.
fn show_known_rdata(message: &[u8], rtype: u16, start: usize, data: &[u8]) -> Option<String> {
    let end = start + data.len();
    let mut reader = Reader {
        message,
        offset: start,
    };
    let shown = match type_name(rtype).as_str() {
        "A" => return Some(Ipv4Addr::from(<[u8; 4]>::try_from(data).ok()?).to_string()),
        "AAAA" => return Some(Ipv6Addr::from(<[u8; 16]>::try_from(data).ok()?).to_string()),
        "TXT" => return show_text(data),
        "NS" | "CNAME" | "PTR" => reader.name().ok()?,
        "MX" => format!("{} {}", reader.u16().ok()?, reader.name().ok()?),
        "SRV" => {
            let numbers = [reader.u16().ok()?, reader.u16().ok()?, reader.u16().ok()?];
            let [priority, weight, port] = numbers;
            format!("{priority} {weight} {port} {}", reader.name().ok()?)
        }
        "SOA" => {
            let mut shown = format!("{} {}", reader.name().ok()?, reader.name().ok()?);
            for _ in 0..5 {
                write!(shown, " {}", reader.u32().ok()?).ok()?;
            }
            shown
        }
        _ => return None,
    };
    (reader.offset == end).then_some(shown)
}

/// Returns the strings of a TXT record in quotes, one character per byte.
fn show_text(mut data: &[u8]) -> Option<String> {
    let mut strings = Vec::new();
    while let [length, rest @ ..] = data {
        let (string, after) = rest.split_at_checked(usize::from(*length))?;
        strings.push(format!(
            "\"{}\"",
            string
                .iter()
                .map(|&byte| char::from(byte))
                .collect::<String>()
        ));
        data = after;
    }
    (!strings.is_empty()).then(|| strings.join(" "))
}

//----------- Names ----------------------------------------------------------

/// Normalises a name as a round trip through wire format would: escapes in one form, a final dot.
///
/// # Errors
///
/// Fails if the name is malformed.
pub fn canonical(name: &str) -> Result<String> {
    let mut bytes = Vec::new();
    write_name(&mut bytes, name)?;
    Reader {
        message: &bytes,
        offset: 0,
    }
    .name()
}

/// Appends a name in presentation form, uncompressed; understands `\.` and `\046`.
///
/// # Errors
///
/// Fails if a label is empty or too long, or the name is too long.
pub fn write_name(message: &mut Vec<u8>, name: &str) -> Result<()> {
    let start = message.len();
    let mut label = Vec::new();
    let mut end_label = |label: &mut Vec<u8>| -> Result<()> {
        ensure!((1..64).contains(&label.len()), "bad label in {name:?}");
        message.push(u8::try_from(label.len())?);
        message.append(label);
        Ok(())
    };
    let mut rest = if name == "." { &[] } else { name.as_bytes() };
    while let Some((&byte, after)) = rest.split_first() {
        rest = after;
        match (byte, after) {
            (b'.', _) => end_label(&mut label)?,
            (b'\\', [one, two, three, after @ ..])
                if [one, two, three].into_iter().all(u8::is_ascii_digit) =>
            {
                label.push(std::str::from_utf8(&[*one, *two, *three])?.parse()?);
                rest = after;
            }
            (b'\\', [escaped, after @ ..]) => {
                label.push(*escaped);
                rest = after;
            }
            _ => label.push(byte),
        }
    }
    if !label.is_empty() {
        end_label(&mut label)?;
    }
    message.push(0);
    ensure!(
        message.len() - start <= 255,
        "the name {name:?} is too long"
    );
    Ok(())
}

/// Appends a label in presentation form.
fn show_label(shown: &mut String, label: &[u8]) {
    for &byte in label {
        match byte {
            b'.' | b'\\' | b'"' | b'(' | b')' | b';' | b'@' | b'$' => {
                shown.push('\\');
                shown.push(char::from(byte));
            }
            33..=126 => shown.push(char::from(byte)),
            // Writing to a string cannot fail.
            _ => drop(write!(shown, "\\{byte:03}")),
        }
    }
    shown.push('.');
}

struct Reader<'a> {
    message: &'a [u8],
    offset: usize,
}

impl<'a> Reader<'a> {
    fn take(&mut self, length: usize) -> Result<&'a [u8]> {
        let end = self.offset + length;
        let bytes = self
            .message
            .get(self.offset..end)
            .context("the message ends too early")?;
        self.offset = end;
        Ok(bytes)
    }

    fn u16(&mut self) -> Result<u16> {
        Ok(u16::from_be_bytes(self.take(2)?.try_into()?))
    }

    fn u32(&mut self) -> Result<u32> {
        Ok(u32::from_be_bytes(self.take(4)?.try_into()?))
    }

    /// Reads a name, compressed or not, and returns it in presentation form.
    fn name(&mut self) -> Result<String> {
        let mut shown = String::new();
        let mut after = None;
        let mut jumps = 0;
        loop {
            let length = self.take(1)?[0];
            match length {
                0 => break,
                1..=63 => show_label(&mut shown, self.take(usize::from(length))?),
                192..=255 => {
                    let low = self.take(1)?[0];
                    after.get_or_insert(self.offset);
                    self.offset = usize::from(u16::from_be_bytes([length & 0x3f, low]));
                    jumps += 1;
                    ensure!(jumps <= 64, "pointers go round");
                }
                _ => bail!("a label of an unknown kind"),
            }
        }
        if let Some(after) = after {
            self.offset = after;
        }
        if shown.is_empty() {
            shown.push('.');
        }
        Ok(shown)
    }
}

//----------- Tables ---------------------------------------------------------

fn name_of(table: &[(&'static str, u16)], number: u16) -> Option<&'static str> {
    table
        .iter()
        .find(|(_, known)| *known == number)
        .map(|(name, _)| *name)
}

/// Looks up a number given as a name, as `PREFIX123` or as a number.
fn number_of(table: &[(&str, u16)], prefix: &str, given: &Value) -> Result<u16> {
    let number = match given {
        Value::Number(number) => number.as_u64().and_then(|number| number.try_into().ok()),
        Value::String(name) => {
            let known = table
                .iter()
                .find(|(known, _)| known == name)
                .map(|(_, number)| *number);
            known.or_else(|| name.strip_prefix(prefix)?.parse().ok())
        }
        _ => None,
    };
    number.with_context(|| format!("{given} is not known here"))
}

pub fn type_name(number: u16) -> String {
    name_of(TYPES, number).map_or_else(|| format!("TYPE{number}"), str::to_owned)
}

/// Returns the number of a record type.
///
/// # Errors
///
/// Fails if the name is unknown.
pub fn type_number(given: &Value) -> Result<u16> {
    number_of(TYPES, "TYPE", given)
}

pub fn class_name(number: u16) -> String {
    name_of(CLASSES, number).map_or_else(|| format!("CLASS{number}"), str::to_owned)
}

/// Returns the number of a class.
///
/// # Errors
///
/// Fails if the name is unknown.
pub fn class_number(given: &Value) -> Result<u16> {
    number_of(CLASSES, "CLASS", given)
}

/// Returns the number of a response code.
///
/// # Errors
///
/// Fails if the name is unknown.
pub fn rcode_number(name: &str) -> Result<u16> {
    number_of(RCODES, "RCODE", &Value::from(name))
}

/// Decodes hexadecimal digits.
///
/// # Errors
///
/// Fails on other characters or an odd number of digits.
pub fn from_hex(digits: &str) -> Result<Vec<u8>> {
    ensure!(
        digits.is_ascii() && digits.len().is_multiple_of(2),
        "{digits:?} is not hexadecimal"
    );
    let byte = |at: usize| u8::from_str_radix(&digits[at..at + 2], 16);
    (0..digits.len())
        .step_by(2)
        .map(|at| byte(at).context("not hexadecimal"))
        .collect()
}

pub fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
