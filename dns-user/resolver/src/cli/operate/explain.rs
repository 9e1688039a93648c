//! `resolve`: explains the resolution of a name.

use clap::Args;
use serde_json::Value;

use super::{
    Problem,
    client::{escaped, get},
    connection::Connection,
    print, print_json,
};

#[derive(Debug, Args)]
pub(in crate::cli) struct Resolve {
    /// Where the server is.
    #[command(flatten)]
    connection: Connection,
    /// Name to look up; the final dot is optional
    name: String,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

impl Resolve {
    /// Prints the explanation; a nonexistent or malformed name is a negative result.
    pub(super) fn run(self) -> Result<(), Problem> {
        let Self { connection, name, json } = self;
        let path = format!("/resolve?name={}", escaped(&name));
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
