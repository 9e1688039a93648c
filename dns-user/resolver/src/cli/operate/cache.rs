//! `cache`: lists, looks up and flushes cached answers.

use bytes::Bytes;
use clap::{Args, Subcommand};
use serde_json::Value;

use super::{
    Problem,
    client::{Connection, escaped, get, post},
    print, print_json,
    table::{self, Table},
    tap::query_type,
};
use crate::ops::api::{CacheFlush, Criteria};

#[derive(Debug, Args)]
pub(in crate::cli) struct Cache {
    /// The command for cached answers.
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
    Flush(Flush),
}

#[derive(Debug, Args)]
struct List {
    /// Where the server is.
    #[command(flatten)]
    connection: Connection,
    /// Only names at and below this one
    #[arg(long, value_name = "NAME")]
    zone: Option<String>,
    /// Only this query type: A, AAAA, TYPE65, ...
    #[arg(long = "type", value_name = "TYPE", value_parser = query_type)]
    query_type: Option<String>,
    /// Maximum number of answers
    #[arg(long, value_name = "COUNT", default_value_t = 10_000)]
    limit: usize,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
struct Lookup {
    /// Where the server is.
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
#[command(group = clap::ArgGroup::new("selected").required(true).multiple(true))]
struct Flush {
    /// Where the server is.
    #[command(flatten)]
    connection: Connection,
    /// The name to remove, or the word `all` for every answer
    #[arg(group = "selected")]
    name: Option<String>,
    /// Only this query type: A, AAAA, TYPE65, ...
    #[arg(long = "type", value_name = "TYPE", value_parser = query_type, group = "selected")]
    query_type: Option<String>,
    /// Only names at and below this one
    #[arg(long, value_name = "NAME", conflicts_with = "name", group = "selected")]
    zone: Option<String>,
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
        let Self { connection, zone, query_type, limit, json } = self;
        let limit = limit.to_string();
        let parameters = [("zone", zone), ("type", query_type), ("limit", Some(limit))];
        let listing = fetch(&connection, parameters)?;
        if json {
            return print_json(&format!("{listing}\n"));
        }
        let mut table = Table::new(&[
            "NAME",
            "TYPE",
            "CLASS",
            "FLAGS",
            "RCODE",
            "FRESH",
            "TTL",
            "BYTES",
            "INTERFACE",
            "HANDLER",
        ]);
        for entry in entries(&listing) {
            table.line([
                table::plain(&entry["name"]),
                table::plain(&entry["type"]),
                table::plain(&entry["class"]),
                flags(entry),
                table::plain(&entry["rcode"]),
                freshness(entry),
                table::plain(&entry["ttl"]),
                table::plain(&entry["bytes"]),
                if entry["on_interface"] == true { "yes" } else { "-" }.to_owned(),
                entry["handler"].as_str().unwrap_or("-").to_owned(),
            ]);
        }
        for reply in local_replies(&listing) {
            let [name, query_type, bytes] = ["name", "type", "bytes"].map(|key| table::plain(&reply[key]));
            let [class, unknown, fresh, on_interface] =
                ["IN", "-", "until a change", "yes"].map(str::to_owned);
            let flags = flags(reply);
            table.line([
                name,
                query_type,
                class,
                flags,
                unknown.clone(),
                fresh,
                unknown.clone(),
                bytes,
                on_interface,
                unknown,
            ]);
        }
        print(&table.text(0))?;
        match listing["left_out"].as_u64() {
            Some(count @ 1..) => print(&format!("{} more; see --limit\n", table::count(count))),
            _ => Ok(()),
        }
    }
}

impl Lookup {
    /// Prints the answers with their records; a name that is not cached is a negative result.
    fn run(self) -> Result<(), Problem> {
        let Self { connection, name, query_type, json } = self;
        let listing =
            fetch(&connection, [("name", Some(name.clone())), ("type", query_type), ("zone", None)])?;
        if json {
            print_json(&format!("{listing}\n"))?;
        }
        let mut found = false;
        for entry in entries(&listing) {
            found = true;
            if json {
                continue;
            }
            let mut text = format!(
                "{} {} {}: {}, {}, {} bytes, {} s old",
                table::plain(&entry["name"]),
                table::plain(&entry["class"]),
                table::plain(&entry["type"]),
                table::plain(&entry["rcode"]),
                freshness(entry),
                table::plain(&entry["bytes"]),
                table::plain(&entry["age_seconds"]),
            );
            match flags(entry).as_str() {
                "-" => {}
                flags => text.push_str(&format!(", for queries with {flags}")),
            }
            if let Some(recursor) = entry["recursor"].as_str() {
                text.push_str(&format!(", from {recursor}"));
            }
            if entry["on_interface"] == true {
                text.push_str(", answered by the interface");
            }
            if let Some(handler) = entry["handler"].as_str() {
                text.push_str(&format!(", cache of the handler for {handler}"));
            }
            text.push('\n');
            for record in entry["records"].as_array().into_iter().flatten() {
                text.push_str(&format!("  {}\n", table::plain(record)));
            }
            print(&text)?;
        }
        for reply in local_replies(&listing).filter(|_| !json) {
            found = true;
            let [name, query_type, bytes] = ["name", "type", "bytes"].map(|key| table::plain(&reply[key]));
            print(&format!(
                "{name} IN {query_type}: a local reply, answered by the interface until a change, {bytes} bytes\n"
            ))?;
        }
        if found { Ok(()) } else { Err(Problem::BadAnswer(format!("{name}: nothing is cached"))) }
    }
}

impl Flush {
    fn run(self) -> Result<(), Problem> {
        let Self { connection, name, query_type, zone, json } = self;
        let all = name.as_deref() == Some("all");
        let name = name.filter(|_| !all);
        let all = all && query_type.is_none();
        flush(&connection, &CacheFlush { all, criteria: Criteria { name, zone, query_type } }, json)
    }
}

pub(super) fn flush(connection: &Connection, selection: &CacheFlush, json: bool) -> Result<(), Problem> {
    let body = Bytes::from(serde_json::to_vec(selection).unwrap_or_default());
    let answer = post(connection, "/cache/flush", body)?;
    if json {
        return print_json(&(answer.text() + "\n"));
    }
    match answer.json::<Value>()?.get("flushed").and_then(Value::as_u64) {
        Some(count) => print(&format!("{} cached answers dropped\n", table::count(count))),
        None => print("there is no cache\n"),
    }
}

fn fetch(connection: &Connection, parameters: [(&str, Option<String>); 3]) -> Result<Value, Problem> {
    let given =
        parameters.iter().filter_map(|(key, value)| Some(format!("{key}={}", escaped(value.as_ref()?))));
    let path = format!("/cache?{}", given.collect::<Vec<_>>().join("&"));
    get(connection, &path)?.json()
}

fn entries(listing: &Value) -> impl Iterator<Item = &Value> {
    listing["entries"].as_array().into_iter().flatten()
}

fn local_replies(listing: &Value) -> impl Iterator<Item = &Value> {
    listing["local_replies"].as_array().into_iter().flatten()
}

/// Returns the flags of the queries that an answer is for.
fn flags(entry: &Value) -> String {
    let set: Vec<&str> = [("dnssec_ok", "DO"), ("checking_disabled", "CD")]
        .into_iter()
        .filter(|(key, _)| entry[*key] == true)
        .map(|(_, flag)| flag)
        .collect();
    if set.is_empty() { "-".to_owned() } else { set.join("+") }
}

/// Describes how long an answer is fresh.
fn freshness(entry: &Value) -> String {
    match entry["fresh_seconds"].as_u64() {
        Some(seconds @ 1..) => format!("fresh for {}", table::duration(seconds as f64)),
        _ => "stale".to_owned(),
    }
}
