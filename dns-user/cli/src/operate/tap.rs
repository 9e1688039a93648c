//! `tap`: shows live queries, including those answered at the interface, which tcpdump does not
//! see.

use std::time::Duration;

use clap::{Args, ValueEnum};
use dns_core::terminal;
use serde::Deserialize;
use tokio::time::{Instant, timeout_at};

use super::{
    Problem,
    client::{Client, Connection, escaped, not_understood, wait_for},
    print, print_json,
};
use dns_kit::{logs::time_of, metrics::labels::type_text};
use dns_resolver::ops::tap::{TapLine, TapPath, parse_type};

#[derive(Debug, Args)]
pub(crate) struct TapArgs {
    #[command(flatten)]
    connection: Connection,
    #[command(flatten)]
    filter: Filter,
    /// Also show queries that the fast path passed to userspace, with the reason; they appear again as
    /// userspace queries
    #[arg(long)]
    misses: bool,
    /// Show one query in this many
    #[arg(long, value_name = "N", default_value_t = 1)]
    every: u32,
    /// Maximum lines per second; suppressed lines are counted
    #[arg(long, value_name = "LINES", default_value_t = 1000)]
    rate: u32,
    /// Exit after this many lines
    #[arg(long, value_name = "N")]
    count: Option<u64>,
    /// Exit after this many seconds
    #[arg(long, value_name = "S")]
    seconds: Option<u64>,
    /// Print one JSON object per query
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Debug, Default, Args)]
pub(super) struct Filter {
    /// Only names that contain this text
    #[arg(long, value_name = "TEXT")]
    pub(super) name: Option<String>,
    /// Only clients whose address starts with this text
    #[arg(long, value_name = "ADDRESS", value_parser = start_of_address)]
    pub(super) client: Option<String>,
    #[command(flatten)]
    pub(super) query_type: TypeOption,
    /// Only queries answered on this path
    #[arg(long, value_enum)]
    pub(super) path: Option<PathFilter>,
}

/// The option of commands that concern queries of one type.
#[derive(Clone, Debug, Default, Args)]
pub(super) struct TypeOption {
    /// Only this query type: A, AAAA, TYPE65, ...
    #[arg(long = "type", value_name = "TYPE", value_parser = query_type)]
    pub(super) query_type: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum PathFilter {
    /// Answered by the interface's program
    Fast,
    /// Answered by the server's sockets
    Userspace,
}

/// Parses the beginning of an IP address, as addresses are written.
fn start_of_address(text: &str) -> Result<String, String> {
    let expected = "expected an IP address or its beginning, such as 10.0.3. or fd00:";
    // `fd` may be the beginning of an IPv6 address, and 10 of either.
    let is_v6 = text.contains(':') || text.bytes().all(|byte| byte.is_ascii_hexdigit());
    // The server compares texts, so a wrong beginning would match nothing, silently.
    let is_v4 = text.split('.').count() <= 4
        && text
            .split('.')
            .all(|part| part.is_empty() || part.parse::<u8>().is_ok());
    let has_v6_letters = text
        .bytes()
        .all(|byte| byte.is_ascii_hexdigit() || byte == b':');
    if !text.is_empty() && (is_v4 || (is_v6 && has_v6_letters)) {
        Ok(text.to_owned())
    } else {
        Err(expected.to_owned())
    }
}

impl Filter {
    pub(super) fn path(&self, every: u32, rate: u32, misses: bool) -> String {
        let Self {
            name,
            client,
            query_type: TypeOption { query_type },
            path,
        } = self;
        let mut text = format!("/tap?every={every}&rate={rate}");
        if misses {
            text.push_str("&misses=1");
        }
        for (key, value) in [("name", name), ("client", client), ("type", query_type)] {
            if let Some(value) = value {
                text.push_str(&format!("&{key}={}", escaped(value)));
            }
        }
        match path {
            Some(PathFilter::Fast) => text.push_str("&path=fast"),
            Some(PathFilter::Userspace) => text.push_str("&path=userspace"),
            None => {}
        }
        text
    }
}

/// Parses the mnemonic of a query type; returns it in the server's spelling.
pub(super) fn query_type(text: &str) -> Result<String, &'static str> {
    parse_type(text)
        .map(type_text)
        .ok_or("unknown query type; use a name such as AAAA or TYPE65")
}

/// A line received from the API.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub(super) enum ReceivedLine {
    /// A query, with its weight if sampled.
    Query(TapLine),
    /// Report of suppressed lines.
    Suppressed {
        /// Number of suppressed lines.
        suppressed: u64,
    },
}

impl ReceivedLine {
    pub(super) fn parse(line: &[u8]) -> Result<Self, Problem> {
        serde_json::from_slice(line).map_err(|error| not_understood(&error))
    }
}

impl TapArgs {
    pub(super) fn run(self) -> Result<(), Problem> {
        let Self {
            connection,
            filter,
            misses,
            every,
            rate,
            count,
            seconds,
            json,
        } = self;
        wait_for(async {
            let mut lines = Client::new(&connection)
                .await?
                .lines(&filter.path(every, rate, misses))
                .await?;
            let seconds = seconds.map(Duration::from_secs);
            // Beyond the end of the clock there is no limit.
            let end = seconds.and_then(|seconds| Instant::now().checked_add(seconds));
            let mut shown = 0;
            while count.is_none_or(|count| shown < count) {
                let line = match end {
                    Some(end) => match timeout_at(end, lines.next()).await {
                        Ok(line) => line?,
                        // The time is over, which is what the user asked for.
                        Err(_) => break,
                    },
                    None => lines.next().await?,
                };
                if json {
                    // Passed on unparsed, so that a newer server's members reach the reader.
                    print_json(&(String::from_utf8_lossy(&line).into_owned() + "\n"))?;
                    shown += 1;
                    continue;
                }
                match ReceivedLine::parse(&line)? {
                    ReceivedLine::Query(line) => {
                        print(&text(&line))?;
                        shown += 1;
                    }
                    ReceivedLine::Suppressed { suppressed } => {
                        print(&format!("... {suppressed} lines suppressed\n"))?
                    }
                }
            }
            Ok(())
        })
    }
}

/// Formats a line: time of day, path, interface, client, question, answer.
fn text(line: &TapLine) -> String {
    // UTC, as in the server's log; local time would need the time zone's database.
    let time = time_of(line.time);
    // From the hours to the milliseconds of `2026-01-02T03:04:05.678901Z`.
    let of_day = time.get(11..23).unwrap_or_default();
    let path = match line.path {
        TapPath::Fast => "fast",
        TapPath::Userspace => "user",
    };
    let interface = line.interface.as_deref().unwrap_or("-");
    let answer = match (&line.rcode, line.micros) {
        (Some(rcode), Some(micros)) => format!(
            "{rcode} {} by {} in {micros} us",
            line.answers, line.outcome
        ),
        (Some(rcode), None) => format!("{rcode} {} {}", line.answers, line.outcome),
        (None, _) => format!("passed on: {}", line.outcome),
    };
    format!(
        "{of_day}Z {path} {interface:<8} {:<21} {:<3} {:<5} {} {answer}\n",
        line.client,
        line.transport,
        line.query_type,
        terminal::line(&line.name)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_are_addresses() {
        for good in [
            "10",
            "10.0.3.",
            "10.0.3.4",
            "fd00:",
            "fe",
            "::1",
            "2001:db8::",
        ] {
            assert_eq!(start_of_address(good), Ok(good.to_owned()));
        }
        for bad in [
            "300.1.1.1",
            "",
            "10.0.0.1.2",
            "host",
            "10.0.0.1:53",
            "fd00::g",
        ] {
            assert!(start_of_address(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn line_shows_client_question_and_path() {
        let line = TapLine {
            time: 86_400.0 * 3.0 + 3_723.5,
            path: TapPath::Fast,
            interface: Some("lo".into()),
            client: "10.0.0.1:5353".parse().unwrap(),
            transport: "udp".into(),
            name: "a.bosh.".into(),
            query_type: "A".into(),
            outcome: "hit".into(),
            rcode: Some("NOERROR".into()),
            answers: 3,
            micros: None,
            weight: 1,
        };
        assert_eq!(
            text(&line),
            "01:02:03.500Z fast lo       10.0.0.1:5353         udp A     a.bosh. NOERROR 3 hit\n"
        );
    }

    #[test]
    fn unknown_types_are_refused() {
        assert_eq!(query_type("aaaa").unwrap(), "AAAA");
        assert_eq!(query_type("TYPE1").unwrap(), "A");
        assert_eq!(query_type("type4242").unwrap(), "TYPE4242");
        for wrong in ["BOGUS", "", "TYPE65536", "TYPEX"] {
            assert!(query_type(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn filters_are_escaped() {
        let filter = Filter {
            name: Some("a&b".into()),
            path: Some(PathFilter::Fast),
            ..Filter::default()
        };
        assert_eq!(
            filter.path(1, 10, true),
            "/tap?every=1&rate=10&misses=1&name=a%26b&path=fast"
        );
    }
}
