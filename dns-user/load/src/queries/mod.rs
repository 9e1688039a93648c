//! Queries: from a query file in the format of dnsperf or kxdpgun, from a capture, or from records.json; and the order
//! in which they are sent.

use std::{collections::HashMap, fmt, path::Path, str::FromStr};

use anyhow::{Context as _, Result, bail, ensure};
use dns_core::{
    catalog::{AliasFiles, Records, Snapshot},
    listing::published_names,
    name::Name,
    wire::{CLASS_IN, TYPE_OPT},
};
use dns_kit::files::bounded;
use hickory_proto::rr::RecordType;

mod capture;

/// Maximum size of a query file or a capture.
const MAX_FILE_LEN: u64 = 1 << 30;

/// Maximum number of different queries: each takes some hundred bytes of the kernel's memory.
const MAX_QUERIES: usize = 1 << 20;

/// Maximum number of queries before the order repeats.
const MAX_SEQUENCE: usize = 1 << 22;

/// Number of queries before a random order repeats, unless there are many different ones.
const MIN_RANDOM: usize = 1 << 17;

/// UDP size of an OPT that a query file asks for, as kxdpgun's and dnsperf's.
const OPT_SIZE: u16 = 1232;

/// A query to send.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Query {
    /// Name and type.
    text: String,
    /// The message with the id 0.
    pub(crate) message: Vec<u8>,
}

impl fmt::Display for Query {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// OPT record of a query.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Opt {
    size: u16,
    dnssec_ok: bool,
}

impl Query {
    /// Builds a message as stub resolvers send it. Letters of the name stay as written: clients that randomize them
    /// (0x20) are measured with what they send.
    fn new(text: String, wire: &[u8], record_type: RecordType, opt: Option<Opt>) -> Self {
        // Id; RD; one question.
        let mut message = vec![0, 0, 1, 0, 0, 1, 0, 0, 0, 0, 0, u8::from(opt.is_some())];
        message.extend_from_slice(wire);
        message.extend_from_slice(&u16::from(record_type).to_be_bytes());
        message.extend_from_slice(&CLASS_IN.to_be_bytes());
        if let Some(Opt { size, dnssec_ok }) = opt {
            message.push(0);
            message.extend_from_slice(&TYPE_OPT.to_be_bytes());
            message.extend_from_slice(&size.to_be_bytes());
            // Extended RCODE, version; DO is the first flag (RFC 3225).
            message.extend_from_slice(&[0, 0, u8::from(dnssec_ok) << 7, 0, 0, 0]);
        }
        Self { text, message }
    }
}

/// Different queries, and the order in which they are sent, as indices.
#[derive(Debug, Default)]
pub(crate) struct Workload {
    pub(crate) queries: Vec<Query>,
    pub(crate) sequence: Vec<u32>,
}

impl Workload {
    /// Takes queries in their order; equal ones become one.
    pub(crate) fn of(all: Vec<Query>) -> Result<Self> {
        let mut workload = Self::default();
        let mut known: HashMap<Vec<u8>, u32> = HashMap::new();
        ensure!(
            all.len() <= MAX_SEQUENCE,
            "more than {MAX_SEQUENCE} queries"
        );
        for query in all {
            // A query has one place in the kernel, with its counters, however often it is asked.
            let next = workload.queries.len() as u32;
            let index = *known.entry(query.message.clone()).or_insert(next);
            if index == next {
                workload.queries.push(query);
            }
            workload.sequence.push(index);
        }
        ensure!(
            workload.queries.len() <= MAX_QUERIES,
            "more than {MAX_QUERIES} different queries"
        );
        Ok(workload)
    }

    /// Changes the order.
    pub(crate) fn arrange(&mut self, order: Order) {
        let exponent = match order {
            Order::File => return,
            Order::Random => 0.0,
            Order::Zipf(exponent) => exponent,
        };
        let mut sums = Vec::with_capacity(self.queries.len());
        let mut sum = 0.0;
        for rank in 1..=self.queries.len() {
            sum += (rank as f64).powf(-exponent);
            sums.push(sum);
        }
        // The same order in each run, so that runs can be compared.
        let mut random = fastrand::Rng::with_seed(1);
        // So long that most of many queries are in it, and few have their shares nearly exactly.
        let length = (2 * self.queries.len()).clamp(MIN_RANDOM, MAX_SEQUENCE);
        self.sequence.clear();
        for _ in 0..length {
            let drawn = random.f64() * sum;
            let index = sums.partition_point(|&sum| sum <= drawn);
            self.sequence.push(index.min(sums.len() - 1) as u32);
        }
    }
}

/// Order of sending.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Order {
    /// As in the file.
    File,
    /// Each query as often as any other.
    Random,
    /// The query at rank r as often as r to the power of minus this exponent.
    Zipf(f64),
}

impl FromStr for Order {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "file" => Ok(Self::File),
            "random" => Ok(Self::Random),
            "zipf" => Ok(Self::Zipf(1.0)),
            _ => {
                let exponent = text
                    .strip_prefix("zipf:")
                    .and_then(|text| text.parse().ok());
                match exponent {
                    Some(exponent) if (0.0..=10.0).contains(&exponent) => Ok(Self::Zipf(exponent)),
                    _ => bail!("expected file, random, zipf, or zipf:EXPONENT up to 10"),
                }
            }
        }
    }
}

impl fmt::Display for Order {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File => f.write_str("file"),
            Self::Random => f.write_str("random"),
            Self::Zipf(exponent) => write!(f, "zipf:{exponent}"),
        }
    }
}

/// Reads a query file or a capture. Lines have the form `name type`, with the flags of kxdpgun: `E` adds an OPT, `D` one
/// with the flag DO. Empty lines and comments (`;`, `#`) are skipped. `edns` is the size of an OPT in all other queries.
pub(crate) fn of_file(path: &Path, edns: Option<u16>) -> Result<Vec<Query>> {
    let file = path.display();
    let bytes = bounded::read_at_most(path, MAX_FILE_LEN).with_context(|| file.to_string())?;
    // Told by its content: one option names both kinds, and a magic number is no text.
    if capture::is_capture(&bytes) {
        return capture::queries(&bytes).with_context(|| file.to_string());
    }
    let text = std::str::from_utf8(&bytes).with_context(|| file.to_string())?;
    parse(text, edns).with_context(|| file.to_string())
}

fn parse(text: &str, edns: Option<u16>) -> Result<Vec<Query>> {
    let mut queries = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with([';', '#']) {
            continue;
        }
        let query =
            parse_line(line, edns).with_context(|| format!("line {}: {line:?}", number + 1))?;
        queries.push(query);
    }
    ensure!(
        !queries.is_empty(),
        "no query; expected lines such as \"q-s0.q-g1.bosh. A\""
    );
    Ok(queries)
}

fn parse_line(line: &str, edns: Option<u16>) -> Result<Query> {
    let mut words = line.split_whitespace();
    let name = words.next().unwrap_or_default();
    let record_type = words.next().context("no type after the name")?;
    let dnssec_ok = match words.next() {
        None => None,
        Some("E") => Some(false),
        Some("D") => Some(true),
        Some(other) => bail!("unknown flag {other:?}; kxdpgun knows E and D"),
    };
    // A mistake in a line would otherwise measure another query than the one meant.
    ensure!(words.next().is_none(), "more than name, type and flag");
    let opt = match dnssec_ok {
        Some(dnssec_ok) => Some(Opt {
            size: edns.unwrap_or(OPT_SIZE),
            dnssec_ok,
        }),
        None => of_size(edns),
    };
    let wire =
        Name::wire_as_written(name).map_err(|problem| anyhow::anyhow!("no name: {problem}"))?;
    let record_type = parse_type(record_type)?;
    let text = format!("{} {record_type}", Name::from_text(name)?);
    Ok(Query::new(text, &wire, record_type, opt))
}

fn of_size(edns: Option<u16>) -> Option<Opt> {
    Some(Opt {
        size: edns?,
        dnssec_ok: false,
    })
}

fn parse_type(text: &str) -> Result<RecordType> {
    let text = text.trim().to_ascii_uppercase();
    // Types without a name (RFC 3597, section 5).
    if let Some(Ok(number)) = text.strip_prefix("TYPE").map(str::parse::<u16>) {
        return Ok(number.into());
    }
    text.parse()
        .map_err(|_| anyhow::anyhow!("{text:?} is no type"))
}

/// Returns queries for the names of records.json, each name with all types.
pub(crate) fn of_records(
    path: &Path,
    types: &[String],
    names: Option<usize>,
    edns: Option<u16>,
) -> Result<Vec<Query>> {
    let file = path.display();
    let bytes = bounded::read(path).with_context(|| file.to_string())?;
    // Rows that a server leaves out, with a warning, are no names to ask for.
    let (records, _unusable_rows) = Records::parse(&bytes).with_context(|| file.to_string())?;
    let (snapshot, _unusable_aliases) = Snapshot::build(records, &AliasFiles::default());
    let mut parsed = Vec::with_capacity(types.len());
    for text in types {
        parsed.push(parse_type(text)?);
    }
    let mut queries = Vec::new();
    for name in published_names(&snapshot).take(names.unwrap_or(usize::MAX)) {
        for &record_type in &parsed {
            let text = format!("{name} {record_type}");
            queries.push(Query::new(text, name.as_wire(), record_type, of_size(edns)));
        }
    }
    ensure!(!queries.is_empty(), "{file}: no names");
    Ok(queries)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_become_queries() {
        let queries = parse("; a comment\nA.bOsH. a\n\n  b.bosh\tTYPE65  \n", Some(1232)).unwrap();
        let shown: Vec<String> = queries.iter().map(ToString::to_string).collect();
        assert_eq!(shown[0], "a.bosh. A");
        assert_eq!(shown.len(), 2);
        assert_eq!(
            queries[0].message,
            b"\0\0\x01\0\0\x01\0\0\0\0\0\x01\x01A\x04bOsH\0\0\x01\0\x01\0\0\x29\x04\xd0\0\0\0\0\0\0"
        );
        for (text, expected) in [
            ("", "no query"),
            ("a.bosh.\n", "line 1"),
            ("a. A\na..b A", "line 2"),
            ("a. X9", "line 1"),
            ("a. A E F", "more than"),
            ("a. A X", "unknown flag"),
        ] {
            let error = format!("{:#}", parse(text, None).unwrap_err());
            assert!(error.contains(expected), "{text:?}: {error}");
        }
    }

    #[test]
    fn flags_are_those_of_kxdpgun() {
        let queries = parse("a. A\na. A E\na. A D\n", None).unwrap();
        let opts = queries.iter().map(|query| &query.message[19..]);
        let expected: [&[u8]; 3] = [
            b"",
            b"\0\0\x29\x04\xd0\0\0\0\0\0\0",
            b"\0\0\x29\x04\xd0\0\0\x80\0\0\0",
        ];
        assert!(opts.eq(expected), "{queries:?}");
    }

    #[test]
    fn equal_queries_become_one() {
        let queries = parse("a. A\nb. A\na. A\na. AAAA\n", None).unwrap();
        let workload = Workload::of(queries).unwrap();
        assert_eq!(workload.queries.len(), 3);
        assert_eq!(workload.sequence, [0, 1, 0, 2]);
    }

    #[test]
    fn orders_have_their_frequencies() {
        let lines: String = (0..100).map(|number| format!("n{number}. A\n")).collect();
        let counts = |order: &str| {
            let mut workload = Workload::of(parse(&lines, None).unwrap()).unwrap();
            workload.arrange(order.parse().unwrap());
            let mut counts = [0_usize; 100];
            for index in workload.sequence {
                counts[index as usize] += 1;
            }
            counts
        };
        assert_eq!(counts("file"), [1; 100]);
        // 1,311 each are expected, and 36 is the standard deviation.
        assert!(
            counts("random")
                .iter()
                .all(|count| (1100..1500).contains(count))
        );
        // The hundredth name is asked for a hundredth as often as the first: 253 and 25,267.
        let zipf = counts("zipf");
        assert!(
            (24_500..26_000).contains(&zipf[0]) && (150..350).contains(&zipf[99]),
            "{zipf:?}"
        );
        assert!("zipf:x".parse::<Order>().is_err() && "zipf:-1".parse::<Order>().is_err());
    }

    #[test]
    fn options_of_queries_follow_file_and_command_line() {
        let opt = |flag: &str, edns: Option<u16>| {
            let queries = parse(&format!("a. A {flag}\n"), edns).unwrap();
            queries[0].message[19..].to_vec()
        };
        let record =
            |size: [u8; 2], dnssec: u8| vec![0, 0, 41, size[0], size[1], 0, 0, dnssec, 0, 0, 0];
        assert!(opt("", None).is_empty());
        assert_eq!(opt("", Some(512)), record([2, 0], 0));
        assert_eq!(opt("E", Some(512)), record([2, 0], 0));
        assert_eq!(opt("D", Some(512)), record([2, 0], 0x80));
        assert_eq!(opt("D", None), record([4, 0xd0], 0x80));
        for (text, number) in [("a", 1), ("AAAA", 28), (" type257 ", 257), ("TYPE0", 0)] {
            assert_eq!(u16::from(parse_type(text).unwrap()), number, "{text}");
        }
        for text in ["TYPE", "TYPE65536", "TYPEX", ""] {
            assert!(parse_type(text).is_err(), "{text}");
        }
    }

    #[test]
    fn orders_have_names() {
        for (text, order) in [
            ("file", Order::File),
            ("random", Order::Random),
            ("zipf", Order::Zipf(1.0)),
            ("zipf:0", Order::Zipf(0.0)),
            ("zipf:10", Order::Zipf(10.0)),
        ] {
            assert_eq!(text.parse::<Order>().unwrap(), order);
            assert_eq!(order.to_string().parse::<Order>().unwrap(), order);
        }
        assert_eq!(Order::Zipf(0.5).to_string(), "zipf:0.5");
        for text in ["zipf:10.1", "zipf:", "File", ""] {
            assert!(text.parse::<Order>().is_err(), "{text}");
        }
        let length = |queries: usize| {
            let query = Query::new(String::new(), b"\0", RecordType::A, None);
            let mut workload = Workload {
                queries: vec![query; queries],
                sequence: Vec::new(),
            };
            workload.arrange(Order::Random);
            workload.sequence.len()
        };
        assert_eq!(length(1), MIN_RANDOM);
        assert_eq!(length(MIN_RANDOM), 2 * MIN_RANDOM);
    }

    #[test]
    fn records_give_names_and_types() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("records.json");
        let records = r#"{"record_keys": ["id", "instance_group", "group_ids", "network", "deployment", "ip",
            "domain"], "record_infos": [["a", "web", ["1"], "net", "dep", "10.0.0.1", "bosh"]]}"#;
        std::fs::write(&file, records).unwrap();
        let types = ["A".to_owned(), "SRV".to_owned()];
        let all = of_records(&file, &types, None, None).unwrap();
        let shown: Vec<String> = all.iter().map(ToString::to_string).collect();
        assert!(
            shown.contains(&"a.web.net.dep.bosh. SRV".to_owned()),
            "{shown:?}"
        );
        assert_eq!(of_records(&file, &types, Some(2), None).unwrap(), all[..4]);
        let with_opt = of_records(&file, &types, Some(1), Some(1232)).unwrap();
        assert_eq!(with_opt[0].message.len(), all[0].message.len() + 11);
        assert!(of_records(&file, &["X".to_owned()], None, None).is_err());
        let none = of_records(&file, &types, Some(0), None).unwrap_err();
        assert!(none.to_string().contains("no names"), "{none}");
        // Both kinds of query files.
        std::fs::write(&file, "a. A\n").unwrap();
        assert_eq!(of_file(&file, None).unwrap().len(), 1);
        std::fs::write(&file, [0xd4, 0xc3, 0xb2, 0xa1]).unwrap();
        let error = format!("{:#}", of_file(&file, None).unwrap_err());
        assert!(error.contains("the header is cut off"), "{error}");
    }
}
