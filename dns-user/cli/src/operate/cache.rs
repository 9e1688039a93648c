//! `cache`: lists, looks up and flushes cached answers.

use bytes::Bytes;
use clap::{Args, Subcommand};
use serde_json::Value;

use super::{
    Problem,
    client::{Answer, Connection, escaped, get, post},
    print, print_json, table,
    tap::{TypeOption, query_type},
};
use dns_command_line::table::Table;
use dns_core::terminal;
use dns_resolver::ops::api::{CacheContents, CacheFlush, LocalReply};
use dns_upstream::CachedAnswer;

#[derive(Debug, Args)]
pub(crate) struct Cache {
    #[command(subcommand)]
    action: Action,
}

/// Commands for cached answers.
#[derive(Debug, Subcommand)]
enum Action {
    /// List cached answers, sorted by name
    List(List),
    /// Show the cached answers for a name, with their records
    Lookup(Lookup),
    /// Remove cached answers; returns once they are no longer served
    Flush(FlushArguments),
}

#[derive(Debug, Args)]
struct List {
    #[command(flatten)]
    connection: Connection,
    #[command(flatten)]
    zone: ZoneOption,
    #[command(flatten)]
    query_type: TypeOption,
    /// Maximum number of answers
    #[arg(long, value_name = "COUNT", default_value_t = 10_000)]
    limit: usize,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// The option of commands that concern the answers for some names.
#[derive(Debug, Args)]
struct ZoneOption {
    /// Only names at and below this one
    #[arg(long, value_name = "NAME")]
    zone: Option<String>,
}

#[derive(Debug, Args)]
struct Lookup {
    #[command(flatten)]
    connection: Connection,
    /// Name to look up; the final dot is optional
    name: String,
    /// Only this query type: A, AAAA, TYPE65, ...
    #[arg(value_name = "TYPE", value_parser = query_type)]
    query_type: Option<String>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
#[command(group = clap::ArgGroup::new("selected").args(["name", "query_type", "zone"]).required(true).multiple(true))]
struct FlushArguments {
    #[command(flatten)]
    connection: Connection,
    /// The name to remove, or the word `all` for every answer
    #[arg(conflicts_with = "zone")]
    name: Option<String>,
    #[command(flatten)]
    query_type: TypeOption,
    #[command(flatten)]
    zone: ZoneOption,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

impl Cache {
    pub(super) fn run(self) -> Result<(), Problem> {
        match self.action {
            Action::List(list) => list.run(),
            Action::Lookup(lookup) => lookup.run(),
            Action::Flush(flush) => flush.run(),
        }
    }
}

impl List {
    fn run(self) -> Result<(), Problem> {
        let Self {
            connection,
            zone: ZoneOption { zone },
            query_type: TypeOption { query_type },
            limit,
            json,
        } = self;
        let limit = limit.to_string();
        let parameters = [("zone", zone), ("type", query_type), ("limit", Some(limit))];
        let answer = fetch(&connection, parameters)?;
        if json {
            return print_json(&format!("{}\n", answer.json::<Value>()?));
        }
        let CacheContents {
            listing,
            local_replies,
        } = answer.json()?;
        let headings = "NAME TYPE CLASS FLAGS RCODE FRESH TTL BYTES INTERFACE HANDLER";
        let mut table = Table::new(headings.split(' '));
        for entry in listing.entries {
            table.line([
                entry.name.clone(),
                entry.query_type.clone(),
                entry.class.clone(),
                flags(entry.dnssec_ok, entry.checking_disabled),
                entry.rcode.clone(),
                freshness(&entry),
                entry.ttl.to_string(),
                entry.bytes.to_string(),
                if entry.on_interface { "yes" } else { "-" }.to_owned(),
                table::or_dash(entry.handler),
            ]);
        }
        for reply in local_replies {
            let flags = flags(reply.dnssec_ok, reply.checking_disabled);
            let name = reply.name.as_str();
            let bytes = reply.bytes.to_string();
            let cells = [
                name,
                &reply.query_type,
                "IN",
                &flags,
                "-",
                // A local reply has no age: a change of its records withdraws it.
                "until a change",
                "-",
                &bytes,
                "yes",
                "-",
            ];
            table.line(cells.map(str::to_owned));
        }
        print(&table.text(0))?;
        match listing.omitted {
            0 => Ok(()),
            count => print(&format!(
                "{} more; see --limit\n",
                table::count(count as u64)
            )),
        }
    }
}

impl Lookup {
    /// Prints the answers with their records; a name that is not cached is a negative result.
    fn run(self) -> Result<(), Problem> {
        let Self {
            connection,
            name,
            query_type,
            json,
        } = self;
        let parameters = [("name", Some(name.clone())), ("type", query_type)];
        let answer = fetch(&connection, parameters)?;
        let CacheContents {
            listing,
            local_replies,
        } = answer.json()?;
        // Before the lists are consumed; the exit code is the same with `--json`.
        let found = !listing.entries.is_empty() || !local_replies.is_empty();
        if json {
            print_json(&format!("{}\n", answer.json::<Value>()?))?;
        } else {
            for entry in &listing.entries {
                print(&entry_text(entry))?;
            }
            for LocalReply {
                name,
                query_type,
                bytes,
                ..
            } in local_replies
            {
                print(&format!(
                    "{name} IN {query_type}: a local reply, answered by the interface until a change, {bytes} bytes\n"
                ))?;
            }
        }
        if found {
            Ok(())
        } else {
            Err(Problem::BadAnswer(format!("{name}: nothing is cached")))
        }
    }
}

fn entry_text(entry: &CachedAnswer) -> String {
    let CachedAnswer {
        name,
        class,
        query_type,
        rcode,
        bytes,
        age_seconds,
        ..
    } = entry;
    let fresh = freshness(entry);
    let mut text = format!(
        "{name} {class} {query_type}: {rcode}, {fresh}, {bytes} bytes, {age_seconds} s old"
    );
    match flags(entry.dnssec_ok, entry.checking_disabled).as_str() {
        "-" => {}
        flags => text.push_str(&format!(", for queries with {flags}")),
    }
    if let Some(recursor) = &entry.recursor {
        text.push_str(&format!(", from {recursor}"));
    }
    if entry.on_interface {
        text.push_str(", answered by the interface");
    }
    if let Some(handler) = &entry.handler {
        text.push_str(&format!(", cache of the handler for {handler}"));
    }
    text.push('\n');
    for record in entry.records.iter().flatten() {
        // Records come from servers on the internet and may contain escape sequences.
        text.push_str(&format!("  {}\n", terminal::line(record)));
    }
    text
}

impl FlushArguments {
    fn run(self) -> Result<(), Problem> {
        let Self {
            connection,
            name,
            query_type: TypeOption { query_type },
            zone: ZoneOption { zone },
            json,
        } = self;
        let mut selection = CacheFlush {
            name,
            zone,
            query_type,
            all: false,
        };
        if selection.name.as_deref() == Some("all") {
            selection.name = None;
            // With a type, it is every answer of this type.
            selection.all = selection.query_type.is_none();
        }
        flush(&connection, &selection, json)
    }
}

pub(super) fn flush(
    connection: &Connection,
    selection: &CacheFlush,
    json: bool,
) -> Result<(), Problem> {
    let body = Bytes::from(serde_json::to_vec(selection).unwrap_or_default());
    let answer = post(connection, "/cache/flush", body)?;
    if json {
        return print_json(&(answer.text() + "\n"));
    }
    match answer.json::<Value>()?["flushed"].as_u64() {
        Some(count) => print(&format!("{} cached answers dropped\n", table::count(count))),
        // Not an error: afterwards nothing is cached, as was asked for.
        None => print("there is no cache\n"),
    }
}

fn fetch<const COUNT: usize>(
    connection: &Connection,
    parameters: [(&str, Option<String>); COUNT],
) -> Result<Answer, Problem> {
    let mut given = Vec::new();
    for (key, value) in parameters {
        // An empty parameter would be a criterion that nothing meets.
        if let Some(value) = value {
            given.push(format!("{key}={}", escaped(&value)));
        }
    }
    get(connection, &format!("/cache?{}", given.join("&")))
}

/// Returns the flags of the queries that an answer is for.
fn flags(dnssec_ok: bool, checking_disabled: bool) -> String {
    match (dnssec_ok, checking_disabled) {
        (false, false) => "-",
        (true, false) => "DO",
        (false, true) => "CD",
        (true, true) => "DO+CD",
    }
    .to_owned()
}

fn freshness(entry: &CachedAnswer) -> String {
    match entry.fresh_seconds {
        // Kept for `cache.serve_stale`, and not given while a recursor answers.
        0 => "stale".to_owned(),
        seconds => format!("fresh for {}", table::duration(seconds as f64)),
    }
}
