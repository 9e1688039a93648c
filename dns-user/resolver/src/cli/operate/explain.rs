//! `resolve`: explains the resolution of a name.

use clap::Args;
use serde_json::Value;

use super::{
    Problem,
    client::{escaped, get},
    connection::Connection,
    print, print_json,
    tap::query_type,
};

#[derive(Debug, Args)]
pub(in crate::cli) struct Resolve {
    /// Where the server is.
    #[command(flatten)]
    connection: Connection,
    /// Name to look up; the final dot is optional
    name: String,
    /// Query type: A, AAAA, PTR, TYPE65, ... [default: both types of addresses]
    #[arg(long = "type", value_name = "TYPE", value_parser = query_type)]
    query_type: Option<String>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

impl Resolve {
    /// Prints the explanation; a nonexistent or malformed name is a negative result.
    pub(super) fn run(self) -> Result<(), Problem> {
        let Self { connection, name, query_type, json } = self;
        let query_type = query_type.map(|text| format!("&type={}", escaped(&text))).unwrap_or_default();
        let path = format!("/resolve?name={}{query_type}", escaped(&name));
        let explanation: Value = get(&connection, &path)?.json()?;
        if json {
            print_json(&(serde_json::to_string_pretty(&explanation).unwrap_or_default() + "\n"))?;
        } else {
            let [text, answered_by] =
                ["text", "answered_by"].map(|key| explanation[key].as_str().unwrap_or_default());
            print(&format!("{}\nanswered by: {answered_by}\n", text.trim_end()))?;
        }
        match explanation.get("rcode").and_then(Value::as_str) {
            Some(rcode) if rcode != "NOERROR" => Err(Problem::BadAnswer(format!("{name}: {rcode}"))),
            _ => Ok(()),
        }
    }
}
