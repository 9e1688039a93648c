//! File format of scenarios. An unknown member is an error, because an unchecked expectation would
//! pass silently.

use std::{collections::BTreeMap, fmt, fs, net::IpAddr, path::Path};

use anyhow::{Context, Result};
use serde::{Deserialize, Deserializer, de::DeserializeOwned};
use serde_json::Value;

//----------- Scenario -------------------------------------------------------

/// `scenario.json`: the server's configuration and its surroundings.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Scenario {
    pub name: String,
    pub about: String,
    /// The server's config.json, with placeholders.
    pub config: Value,
    /// Milliseconds between the first accepted TCP connection and the first query.
    #[serde(default = "default_settle")]
    pub settle_ms: u64,
    /// Scripted recursors by placeholder.
    #[serde(default)]
    pub recursors: BTreeMap<String, RecursorScript>,
    /// Scripted DNS-over-JSON servers by placeholder.
    #[serde(default)]
    pub http: BTreeMap<String, HttpScript>,
    /// Scripted health servers by instance.
    #[serde(default)]
    pub health: BTreeMap<IpAddr, HealthScript>,
    /// Instances whose health port is closed.
    #[serde(default)]
    pub health_dead_ips: Vec<IpAddr>,
    /// Listen addresses of the server besides 127.0.0.1.
    #[serde(default)]
    pub listen_addresses: Vec<IpAddr>,
    /// Further placeholders of ports.
    #[serde(default)]
    pub extra_ports: Vec<String>,
    /// Files to mark as executable.
    #[serde(default)]
    pub executable_files: Vec<String>,
    #[serde(default)]
    pub make_dirs: Vec<String>,
    /// Environment variables of the server.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    /// The server under test.
    #[serde(default)]
    pub server: Kind,
    /// Placeholder of the TCP port that is open once the server is ready.
    #[serde(default = "default_port")]
    pub ready_port: String,
    /// Address of that port.
    #[serde(default = "default_address")]
    pub ready_addr: IpAddr,
}

fn default_settle() -> u64 {
    300
}

/// Port of the DNS server.
fn default_port() -> String {
    "PORT".to_owned()
}

fn default_address() -> IpAddr {
    IpAddr::from([127, 0, 0, 1])
}

/// The server that a scenario tests.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    #[default]
    Dns,
    Health,
}

impl Kind {
    /// Returns the name in the certificate of the server's HTTPS port.
    pub fn certificate_name(self) -> &'static str {
        match self {
            Self::Dns => "api.bosh-dns",
            Self::Health => "health.bosh-dns",
        }
    }
}

//----------- Scripts --------------------------------------------------------

/// Script of a recursor.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RecursorScript {
    /// The first match applies.
    #[serde(default)]
    pub rules: Vec<Rule>,
    /// Action if no rule matches; NXDOMAIN by default.
    pub default: Option<Action>,
    /// Keeps the port closed.
    #[serde(default)]
    pub not_listening: bool,
}

/// Reaction of a recursor to matching queries.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rule {
    /// A name, `*.x` for all names below x, or `*`.
    #[serde(default = "any")]
    pub name: String,
    /// A record type, or `*`.
    #[serde(default = "any", rename = "type")]
    pub qtype: String,
    #[serde(default = "any")]
    pub proto: String,
    pub action: Option<Action>,
    /// Actions for successive queries; the last one repeats.
    pub seq: Option<Vec<Action>>,
}

fn any() -> String {
    "*".to_owned()
}

/// A reply, or none.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Action {
    /// Defaults to NOERROR if absent.
    pub rcode: Option<String>,
    #[serde(default)]
    pub aa: bool,
    #[serde(default)]
    pub tc: bool,
    /// RA; set by default.
    pub ra: Option<bool>,
    #[serde(default)]
    pub ad: bool,
    /// RD; copied from the query by default.
    pub rd: Option<bool>,
    /// CD; copied from the query by default.
    pub cd: Option<bool>,
    /// The owner `@` means the queried name.
    #[serde(default)]
    pub answers: Vec<Record>,
    #[serde(default)]
    pub authority: Vec<Record>,
    #[serde(default)]
    pub additional: Vec<Record>,
    /// Consecutive addresses after the answers.
    pub many_a: Option<ManyA>,
    pub opt: Option<ScriptedOpt>,
    /// Delay of the reply in milliseconds.
    #[serde(default)]
    pub delay_ms: u64,
    #[serde(default)]
    pub drop: bool,
    #[serde(default)]
    pub wrong_id: bool,
    #[serde(default)]
    pub no_question: bool,
    /// Replaces the question: name and type.
    pub question: Option<(String, String)>,
    /// The whole message as hexadecimal digits; the id is filled in.
    pub raw: Option<String>,
    /// Number of bytes of the reply that are sent.
    pub cut: Option<usize>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ManyA {
    pub count: u32,
    pub base: std::net::Ipv4Addr,
    /// TTL of each record.
    pub ttl: u32,
}

/// OPT of a scripted reply.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
pub enum ScriptedOpt {
    /// `echo`: an OPT of 1232 bytes with the query's DO bit, if the query has an OPT.
    Echo(Echo),
    Given(Opt),
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Echo {
    Echo,
}

/// Script of a DNS-over-JSON server.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HttpScript {
    /// The first match applies.
    #[serde(default)]
    pub rules: Vec<HttpRule>,
    /// Action if no rule matches; status 404 by default.
    pub default: Option<HttpAction>,
    /// Keeps the port closed.
    #[serde(default)]
    pub not_listening: bool,
}

/// Reaction of a DNS-over-JSON server to matching requests.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HttpRule {
    #[serde(default = "any")]
    pub name: String,
    /// Number of a type, or `*`.
    #[serde(default = "any_value", rename = "type")]
    pub qtype: Value,
    pub action: HttpAction,
}

fn any_value() -> Value {
    "*".into()
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HttpAction {
    /// Defaults to 200 if absent.
    pub status: Option<u16>,
    /// The body as a document.
    pub json: Option<Value>,
    /// The body as text.
    pub body: Option<String>,
    /// A body with consecutive addresses.
    pub many_a: Option<ManyA>,
    /// Delay of the response in milliseconds.
    #[serde(default)]
    pub delay_ms: u64,
}

/// Script of an instance's health server.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HealthScript {
    /// Defaults to `running` if absent.
    pub state: Option<String>,
    #[serde(default)]
    pub group_state: BTreeMap<String, String>,
    /// Defaults to 200 if absent.
    pub http_status: Option<u16>,
    pub body: Option<String>,
    /// Delay of the response in milliseconds.
    #[serde(default)]
    pub delay_ms: u64,
    /// Certificate, `health_server` by default.
    pub cert: Option<String>,
    #[serde(default)]
    pub refuse: bool,
}

//----------- Cases ----------------------------------------------------------

/// A query and bosh-dns's answer; a line of `cases.jsonl`, or a step.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Case {
    pub id: String,
    #[serde(default)]
    pub why: String,
    pub q: Query,
    /// The recorded answer; `None` if the query is sent only for its effect.
    pub expect: Option<Expect>,
    /// Recorded answers, any of which is correct.
    pub expect_any: Option<Vec<Expect>>,
    /// For readers: the reason for `expect_any`.
    #[serde(default)]
    pub nondeterministic: bool,
    /// For readers: the order of answers varied.
    #[serde(default)]
    pub shuffled: bool,
    /// Number of queries received by each scripted server, by transport.
    pub upstream: Option<Counts>,
    /// The last query received by each scripted server, reduced to the members given.
    pub upstream_last: Option<BTreeMap<String, Value>>,
    /// Reply timeout in milliseconds.
    pub timeout_ms: Option<u64>,
    /// Delay in milliseconds before the queries of scripted servers are counted.
    #[serde(default)]
    pub count_after_ms: u64,
    /// Time until the reply, in milliseconds.
    pub elapsed_ms: Option<Between>,
    /// Reason for which the server may answer differently.
    pub quirk: Option<String>,
}

/// Counts by scripted server and transport.
pub type Counts = BTreeMap<String, BTreeMap<String, u64>>;

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Query {
    /// The whole message as hexadecimal digits; replaces all members but the transport.
    pub raw: Option<String>,
    /// Name in presentation form.
    pub name: Option<String>,
    /// Name or number of a type.
    #[serde(rename = "type")]
    pub qtype: Option<Value>,
    /// Defaults to IN if absent.
    pub class: Option<Value>,
    /// Defaults to `udp` if absent.
    pub proto: Option<Proto>,
    /// RD; set by default.
    pub rd: Option<bool>,
    #[serde(default)]
    pub ad: bool,
    #[serde(default)]
    pub cd: bool,
    /// QUERY (0) by default.
    #[serde(default)]
    pub opcode: u8,
    pub edns: Option<Opt>,
    /// 127.0.0.1 by default.
    pub addr: Option<IpAddr>,
    /// Placeholder of the port; `PORT` by default.
    pub port: Option<String>,
    /// The length prefix on TCP; the message's length by default.
    pub tcp_length: Option<u16>,
}

#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum Proto {
    #[default]
    Udp,
    Tcp,
}

impl fmt::Display for Proto {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Udp => "udp",
            Self::Tcp => "tcp",
        })
    }
}

/// OPT (RFC 6891). Absent members are not compared, except for `options`: absent means none.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct Opt {
    /// The sender's UDP payload size.
    pub udp_size: u16,
    #[serde(rename = "do")]
    pub dnssec_ok: Option<bool>,
    pub version: Option<u8>,
    /// Option codes with their data as hexadecimal digits.
    #[serde(default)]
    pub options: Vec<(u16, String)>,
}

/// `[name, type, ttl, rdata]`, followed by the class unless it is IN.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, PartialOrd, Ord)]
pub struct Record(
    pub String,
    pub String,
    pub u32,
    /// Rdata in presentation form.
    pub String,
    #[serde(default)] pub Option<String>,
);

/// A recorded reply; absent members are not compared.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Expect {
    #[serde(default)]
    pub no_response: bool,
    /// Error of the client.
    pub error: Option<String>,
    /// Set if the reply cannot be parsed.
    pub unparsable: Option<Value>,
    /// Whether the reply has the id of the query; true by default.
    pub id_echoed: Option<bool>,
    /// Response code, extended by the OPT.
    pub rcode: Option<String>,
    pub aa: Option<bool>,
    pub ra: Option<bool>,
    pub tc: Option<bool>,
    pub rd: Option<bool>,
    pub ad: Option<bool>,
    pub cd: Option<bool>,
    /// QUERY (0) by default.
    #[serde(default)]
    pub opcode: u8,
    #[serde(default)]
    pub z: bool,
    /// Absent: not compared; `null`: no OPT; otherwise the OPT.
    #[serde(default, deserialize_with = "said")]
    pub opt: Option<Option<Opt>>,
    /// Whether the question has the letter case of the query.
    #[serde(default)]
    pub question_echoed_case: bool,
    /// Name, type and class of each question.
    pub question: Option<Vec<(String, String, String)>>,
    #[serde(default)]
    pub answers: Vec<Record>,
    /// File with the answers; the owner `@` means the queried name.
    pub answers_ref: Option<String>,
    /// Comparison of the answers.
    #[serde(default)]
    pub answers_mode: AnswersMode,
    /// Number of answers, for `subset_of`.
    pub count: Option<Between>,
    #[serde(default)]
    pub authority: Vec<Record>,
    /// Additional section without the OPT.
    #[serde(default)]
    pub additional: Vec<Record>,
    /// Maximum size of the reply in bytes.
    pub size_max: Option<usize>,
    /// For readers: bosh-dns exceeded the client's size.
    pub size_over_limit: Option<Value>,
    /// Allowed TTL difference in seconds.
    #[serde(default)]
    pub ttl_slack: u32,
    /// Number of bytes after the message.
    #[serde(default)]
    pub trailing: usize,
}

/// Distinguishes `null` from an absent member.
fn said<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Option<Opt>>, D::Error> {
    Option::deserialize(deserializer).map(Some)
}

#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum AnswersMode {
    /// The same records as a multiset, in any order.
    #[default]
    ExactSet,
    /// A subset of the recorded answers.
    SubsetOf,
    None,
}

#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct Between {
    pub min: u64,
    pub max: u64,
}

impl Between {
    /// Returns whether a number is within the bounds.
    pub fn holds(self, number: u64) -> bool {
        (self.min..=self.max).contains(&number)
    }
}

//----------- Files ----------------------------------------------------------

/// Reads a JSON file.
///
/// # Errors
///
/// Fails if the file cannot be read or contains unknown members.
pub fn read_json<T: DeserializeOwned>(path: &Path) -> Result<T> {
    let bytes = fs::read(path).with_context(|| path.display().to_string())?;
    serde_json::from_slice(&bytes).with_context(|| path.display().to_string())
}

/// Reads a file of JSON lines; `None` if it does not exist.
///
/// # Errors
///
/// Same as [`read_json`]; the error contains the line number.
pub fn read_json_lines<T: DeserializeOwned>(path: &Path) -> Result<Option<Vec<T>>> {
    if !path.exists() {
        return Ok(None);
    }
    let text = fs::read_to_string(path).with_context(|| path.display().to_string())?;
    let lines = text
        .lines()
        .enumerate()
        .filter(|(_, line)| !line.trim().is_empty());
    let parsed = lines.map(|(number, line)| {
        serde_json::from_str(line)
            .with_context(|| format!("{}: line {}", path.display(), number + 1))
    });
    parsed.collect::<Result<_>>().map(Some)
}
