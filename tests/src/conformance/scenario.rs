//! What the files of a scenario say. A member that is not known here is an error:
//! an expectation that nobody checks would be a case that passes by itself.

use std::{collections::BTreeMap, fmt, fs, net::IpAddr, path::Path};

use anyhow::{Context, Result};
use serde::{Deserialize, Deserializer, de::DeserializeOwned};
use serde_json::Value;

//----------- Scenario -------------------------------------------------------

/// `scenario.json`: the server's configuration and its surroundings.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Scenario {
    /// Name of the folder.
    pub name: String,
    /// What is shown.
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
    /// What instances say about their health.
    #[serde(default)]
    pub health: BTreeMap<IpAddr, HealthScript>,
    /// Instances whose health port is closed.
    #[serde(default)]
    pub health_dead_ips: Vec<IpAddr>,
    /// Addresses that the server listens on beside 127.0.0.1.
    #[serde(default)]
    pub listen_addresses: Vec<IpAddr>,
    /// Further placeholders of ports.
    #[serde(default)]
    pub extra_ports: Vec<String>,
    /// Files to be made executable.
    #[serde(default)]
    pub executable_files: Vec<String>,
    /// Folders to be made.
    #[serde(default)]
    pub make_dirs: Vec<String>,
    /// Environment variables of the server.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    /// Which server is asked.
    #[serde(default)]
    pub server: Kind,
    /// Placeholder of the TCP port that tells that the server is up.
    #[serde(default = "default_port")]
    pub ready_port: String,
    /// Address of that port.
    #[serde(default = "default_address")]
    pub ready_addr: IpAddr,
}

fn default_settle() -> u64 {
    300
}

/// The DNS server's own port.
fn default_port() -> String {
    "PORT".to_owned()
}

/// Where nearly everything listens.
fn default_address() -> IpAddr {
    IpAddr::from([127, 0, 0, 1])
}

/// Which of the two servers a scenario is about.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    #[default]
    Dns,
    Health,
}

//----------- Scripts --------------------------------------------------------

/// What a recursor does.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RecursorScript {
    /// The first that matches decides.
    #[serde(default)]
    pub rules: Vec<Rule>,
    /// What happens where no rule matches; NXDOMAIN, if not said.
    pub default: Option<Action>,
    /// The port stays closed.
    #[serde(default)]
    pub not_listening: bool,
}

/// What a recursor does with some queries.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rule {
    /// A name, `*.x` for all below x, or `*`.
    #[serde(default = "any")]
    pub name: String,
    /// A record type, or `*`.
    #[serde(default = "any", rename = "type")]
    pub qtype: String,
    #[serde(default = "any")]
    pub proto: String,
    /// What to do.
    pub action: Option<Action>,
    /// What to do with the n-th query; the last one goes on.
    pub seq: Option<Vec<Action>>,
}

fn any() -> String {
    "*".to_owned()
}

/// A reply, or none.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Action {
    /// NOERROR, if not said.
    pub rcode: Option<String>,
    #[serde(default)]
    pub aa: bool,
    #[serde(default)]
    pub tc: bool,
    /// RA; set, if not said.
    pub ra: Option<bool>,
    #[serde(default)]
    pub ad: bool,
    /// RD; the query's, if not said.
    pub rd: Option<bool>,
    /// CD; the query's, if not said.
    pub cd: Option<bool>,
    /// The owner `@` is the name asked for.
    #[serde(default)]
    pub answers: Vec<Record>,
    #[serde(default)]
    pub authority: Vec<Record>,
    #[serde(default)]
    pub additional: Vec<Record>,
    /// A row of addresses after the answers.
    pub many_a: Option<ManyA>,
    /// An OPT.
    pub opt: Option<ScriptedOpt>,
    /// Milliseconds before the reply is sent.
    #[serde(default)]
    pub delay_ms: u64,
    #[serde(default)]
    pub drop: bool,
    #[serde(default)]
    pub wrong_id: bool,
    /// A reply without a question.
    #[serde(default)]
    pub no_question: bool,
    /// Another question: name and type.
    pub question: Option<(String, String)>,
    /// The whole message as hexadecimal digits; the id is filled in.
    pub raw: Option<String>,
    /// How many bytes of the reply are sent.
    pub cut: Option<usize>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ManyA {
    /// How many.
    pub count: u32,
    /// The first one.
    pub base: std::net::Ipv4Addr,
    /// TTL of each.
    pub ttl: u32,
}

/// OPT of a scripted reply.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
pub enum ScriptedOpt {
    /// `echo`: one of 1232 bytes with the query's DO bit, if the query has one.
    Echo(Echo),
    Given(Opt),
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Echo {
    Echo,
}

/// What a DNS-over-JSON server does.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HttpScript {
    /// The first that matches decides.
    #[serde(default)]
    pub rules: Vec<HttpRule>,
    /// What happens where no rule matches; status 404, if not said.
    pub default: Option<HttpAction>,
    /// The port stays closed.
    #[serde(default)]
    pub not_listening: bool,
}

/// What a DNS-over-JSON server does with some requests.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HttpRule {
    #[serde(default = "any")]
    pub name: String,
    /// A type's number, or `*`.
    #[serde(default = "any_value", rename = "type")]
    pub qtype: Value,
    /// What to do.
    pub action: HttpAction,
}

fn any_value() -> Value {
    "*".into()
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HttpAction {
    /// 200, if not said.
    pub status: Option<u16>,
    /// The body as a document.
    pub json: Option<Value>,
    /// The body as text.
    pub body: Option<String>,
    /// A body of addresses.
    pub many_a: Option<ManyA>,
    /// Milliseconds before the response is sent.
    #[serde(default)]
    pub delay_ms: u64,
}

/// What an instance's health server does.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HealthScript {
    /// `running`, if not said.
    pub state: Option<String>,
    #[serde(default)]
    pub group_state: BTreeMap<String, String>,
    /// 200, if not said.
    pub http_status: Option<u16>,
    /// Another body.
    pub body: Option<String>,
    /// Milliseconds before the response is sent.
    #[serde(default)]
    pub delay_ms: u64,
    /// Another certificate than `health_server`.
    pub cert: Option<String>,
    /// The port is closed.
    #[serde(default)]
    pub refuse: bool,
}

//----------- Cases ----------------------------------------------------------

/// A query and what the reference answered; a line of `cases.jsonl`, or a step.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Case {
    /// Names the case.
    pub id: String,
    #[serde(default)]
    pub why: String,
    /// The query.
    pub q: Query,
    /// What was recorded; none: asked for its effect alone.
    pub expect: Option<Expect>,
    /// Any of these is right.
    pub expect_any: Option<Vec<Expect>>,
    /// For readers: why there is `expect_any`.
    #[serde(default)]
    pub nondeterministic: bool,
    /// For readers: the order of answers varied.
    #[serde(default)]
    pub shuffled: bool,
    /// How many queries each scripted server received, by transport.
    pub upstream: Option<Counts>,
    /// What each scripted server saw last, cut down to the members given.
    pub upstream_last: Option<BTreeMap<String, Value>>,
    /// How long to wait for a reply.
    pub timeout_ms: Option<u64>,
    /// How long to wait before the scripted servers' queries are counted.
    #[serde(default)]
    pub count_after_ms: u64,
    /// How long the reply took.
    pub elapsed_ms: Option<Between>,
    /// Why the server may answer otherwise.
    pub quirk: Option<String>,
}

/// By scripted server and transport.
pub type Counts = BTreeMap<String, BTreeMap<String, u64>>;

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Query {
    /// The whole message as hexadecimal digits, in place of all but the transport.
    pub raw: Option<String>,
    /// In presentation form.
    pub name: Option<String>,
    /// A type's name or number.
    #[serde(rename = "type")]
    pub qtype: Option<Value>,
    /// IN, if not said.
    pub class: Option<Value>,
    /// `udp`, if not said.
    pub proto: Option<Proto>,
    /// RD; set, if not said.
    pub rd: Option<bool>,
    #[serde(default)]
    pub ad: bool,
    #[serde(default)]
    pub cd: bool,
    /// QUERY (0), if not said.
    #[serde(default)]
    pub opcode: u8,
    /// An OPT.
    pub edns: Option<Opt>,
    /// 127.0.0.1, if not said.
    pub addr: Option<IpAddr>,
    /// Placeholder of the port; `PORT`, if not said.
    pub port: Option<String>,
    /// What the two bytes before a message on TCP say; its length, if not said.
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

/// OPT (RFC 6891); what is not said does not matter, but `options`: absent means none.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct Opt {
    /// The sender's UDP size.
    pub udp_size: u16,
    #[serde(rename = "do")]
    pub dnssec_ok: Option<bool>,
    /// The EDNS version.
    pub version: Option<u8>,
    /// Code and data as hexadecimal digits.
    #[serde(default)]
    pub options: Vec<(u16, String)>,
}

/// `[name, type, ttl, rdata]`, and the class unless it is IN.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, PartialOrd, Ord)]
pub struct Record(
    /// Owner.
    pub String,
    /// Type.
    pub String,
    /// TTL in seconds.
    pub u32,
    /// Rdata in presentation form.
    pub String,
    #[serde(default)] pub Option<String>,
);

/// What was recorded of a reply.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Expect {
    #[serde(default)]
    pub no_response: bool,
    /// The client's error.
    pub error: Option<String>,
    /// The reply cannot be walked.
    pub unparsable: Option<Value>,
    /// Whether the id is the query's; yes, if not said.
    pub id_echoed: Option<bool>,
    /// The response code, the OPT's part included.
    pub rcode: Option<String>,
    /// AA.
    pub aa: Option<bool>,
    /// RA.
    pub ra: Option<bool>,
    /// TC.
    pub tc: Option<bool>,
    /// RD.
    pub rd: Option<bool>,
    /// AD.
    pub ad: Option<bool>,
    /// CD.
    pub cd: Option<bool>,
    /// QUERY (0), if not said.
    #[serde(default)]
    pub opcode: u8,
    #[serde(default)]
    pub z: bool,
    /// The OPT: not looked at, none, or this one.
    #[serde(default, deserialize_with = "said")]
    pub opt: Option<Option<Opt>>,
    /// The question is the query's, in its letter case.
    #[serde(default)]
    pub question_echoed_case: bool,
    /// The questions: name, type, class.
    pub question: Option<Vec<(String, String, String)>>,
    #[serde(default)]
    pub answers: Vec<Record>,
    /// A file that holds the answers; the owner `@` is the name asked for.
    pub answers_ref: Option<String>,
    /// How the answers are compared.
    #[serde(default)]
    pub answers_mode: AnswersMode,
    /// For `subset_of`: how many there are.
    pub count: Option<Between>,
    #[serde(default)]
    pub authority: Vec<Record>,
    /// The additional section without the OPT.
    #[serde(default)]
    pub additional: Vec<Record>,
    /// Most bytes of the reply.
    pub size_max: Option<usize>,
    /// For readers: the reference exceeded the client's size.
    pub size_over_limit: Option<Value>,
    /// By how many seconds TTLs may differ.
    #[serde(default)]
    pub ttl_slack: u32,
    /// How many bytes follow the message.
    #[serde(default)]
    pub trailing: usize,
}

/// `null` is something that was said.
fn said<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Option<Opt>>, D::Error> {
    Option::deserialize(deserializer).map(Some)
}

/// How answers are compared.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum AnswersMode {
    /// The same ones, as often, in any order.
    #[default]
    ExactSet,
    /// A part of them.
    SubsetOf,
    None,
}

#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct Between {
    /// The least.
    pub min: u64,
    /// The most.
    pub max: u64,
}

impl Between {
    /// Whether a number is within the bounds.
    pub fn holds(self, number: u64) -> bool {
        (self.min..=self.max).contains(&number)
    }
}

//----------- Files ----------------------------------------------------------

/// Reads a JSON file.
///
/// # Errors
///
/// Where it cannot be read or holds something that is not known here.
pub fn read_json<T: DeserializeOwned>(path: &Path) -> Result<T> {
    let bytes = fs::read(path).with_context(|| path.display().to_string())?;
    serde_json::from_slice(&bytes).with_context(|| path.display().to_string())
}

/// Reads a file of JSON lines; none, if there is no such file.
///
/// # Errors
///
/// As [`read_json`]; the line is named.
pub fn read_json_lines<T: DeserializeOwned>(path: &Path) -> Result<Option<Vec<T>>> {
    if !path.exists() {
        return Ok(None);
    }
    let text = fs::read_to_string(path).with_context(|| path.display().to_string())?;
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let parsed = lines.map(|(number, line)| {
        serde_json::from_str(line).with_context(|| format!("{}: line {}", path.display(), number + 1))
    });
    parsed.collect::<Result<_>>().map(Some)
}
