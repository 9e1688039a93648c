//! The report: data, and its text for terminals of 80 columns.

use std::{fmt::Write, net::SocketAddr};

use serde::Serialize;

use crate::{
    hide::Disclosure,
    judge::{Example, Group, GroupCause, Tally, Verdicts},
    latency::LatencyReport,
    pairs::Unpaired,
    reply::Reply,
};

/// The page that explains documented differences.
pub const PAGE: &str = "docs/differences.md";

/// The result of a shadow.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Name and version of this program.
    pub program: String,
    /// `watch`, or `ask` with the address asked.
    pub mode: String,
    /// Duration of the observation in seconds.
    pub seconds: f64,
    /// Addresses of the observed server.
    pub addresses: Vec<SocketAddr>,
    /// How health was followed.
    pub health: String,
    /// Number of instances in the records.
    pub instances: usize,
    /// Packets on the interfaces.
    pub seen: Seen,
    /// Results of the comparisons.
    pub verdicts: Verdicts,
    /// Differences, unexplained ones first.
    pub differences: Vec<Difference>,
    /// Compared queries by the source that answers them here.
    pub routes: Vec<(String, u64)>,
    /// Queries that an interface would have answered, and the others by reason.
    pub interface: InterfaceShare,
    /// Latency of the observed server.
    pub latency: LatencyReport,
    /// CPU of the observed server and ours.
    pub cpu: Cpu,
    /// Remarks on what was not measured.
    pub remarks: Vec<String>,
    /// The failure that ended the observation early.
    pub failure: Option<String>,
}

/// What a report proves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Queries were compared, and every difference has an explanation.
    Equal,
    /// Differences have no explanation.
    Different,
    /// Differences wait for their second judgement.
    Unjudged,
    /// The observation ended by a failure.
    Failed,
    /// No query was compared.
    Nothing,
}

impl Outcome {
    /// Returns the outcome in words.
    pub fn text(self) -> &'static str {
        match self {
            Self::Equal => "no unexplained difference",
            Self::Different => "unexplained differences",
            Self::Unjudged => "differences were not judged: repeat the comparison",
            Self::Failed => "the observation failed: repeat the comparison",
            Self::Nothing => "nothing was compared",
        }
    }
}

/// Numbers of packets that were seen on the interfaces.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Seen {
    /// Queries, as far as they were sampled.
    pub queries: u64,
    /// Queries in all, estimated from the samples.
    pub estimated_queries: u64,
    /// Share of the queries that were compared, 0 to 1.
    pub sampled_share: f64,
    /// Queries without a reply.
    pub unanswered: u64,
    /// Packets that the kernel dropped, because this process was to use no more CPU.
    pub dropped: u64,
    /// TCP segments that hold parts of messages.
    pub split_segments: u64,
    /// Fragments of datagrams, which are not reassembled.
    pub fragments: u64,
    /// Packets that cannot be read.
    pub malformed: u64,
    /// Messages that made no pair.
    #[serde(flatten)]
    pub unpaired: Unpaired,
}

/// Differences with the same cause.
#[derive(Clone, Debug, Serialize)]
pub struct Difference {
    /// The cause in words.
    pub cause: String,
    /// Section and row of docs/differences.md; `None` if unexplained.
    pub documented: Option<[String; 2]>,
    /// Number of queries with this difference.
    pub count: u64,
    /// The first of them.
    pub examples: Vec<ShownExample>,
}

/// A difference, with what the report may show of it.
#[derive(Clone, Debug, Serialize)]
pub struct ShownExample {
    /// Name of the question.
    pub name: String,
    /// Type, class and EDNS.
    pub about: String,
    /// Client; `None` unless clients are shown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub client: Option<String>,
    /// Differences of the replies in words.
    pub findings: Vec<String>,
    /// The observed reply in lines.
    pub theirs: Vec<String>,
    /// Our reply in lines.
    pub ours: Vec<String>,
    /// The source that answers the name here.
    pub route: String,
    /// How the name resolves here, in lines.
    pub steps: Vec<String>,
}

/// The share of interfaces.
#[derive(Clone, Debug, Default, Serialize)]
pub struct InterfaceShare {
    /// Queries that an interface would have answered.
    pub answered: u64,
    /// The others by reason.
    pub others: Vec<(String, u64)>,
}

/// CPU times of the observed server, of ours and of this process.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Cpu {
    /// The observed process: its number and name.
    pub process: Option<(i32, String)>,
    /// CPU seconds that it used meanwhile.
    pub observed_seconds: Option<f64>,
    /// CPU seconds that our server would have used, estimated.
    pub estimated_seconds: Option<f64>,
    /// How that was estimated.
    pub method: String,
    /// Share of a core that this process used for receiving and comparing.
    pub own_share: f64,
}

impl Cpu {
    /// Returns the CPU time of the observed server in words.
    pub fn observed(&self) -> String {
        match (&self.process, self.observed_seconds) {
            (Some((number, name)), Some(seconds)) => {
                format!("{seconds:.2} s, process {number} ({name})")
            }
            (Some((number, name)), None) => {
                format!("not known: process {number} ({name}) has ended")
            }
            (None, _) => "not known: no process with this socket is visible".to_owned(),
        }
    }

    /// Returns the CPU time that our server would have used in words.
    pub fn estimated(&self) -> String {
        match self.estimated_seconds {
            Some(seconds) => format!("{seconds:.2} s, estimated: {}", self.method),
            None => "not estimated".to_owned(),
        }
    }

    /// Returns the share of a core that this process used in words.
    pub fn own(&self) -> String {
        format!("{:.1} % of a core", self.own_share * 100.0)
    }
}

impl Seen {
    /// Returns the queries seen in words.
    pub fn text(&self) -> String {
        format!(
            "{} of about {} ({:.1} %)",
            self.queries,
            self.estimated_queries,
            self.sampled_share * 100.0
        )
    }

    /// Returns what was seen and cannot be compared in words; `None` if there was nothing.
    pub fn left_out(&self) -> Option<String> {
        let mut reasons = Vec::new();
        for (count, reason) in [
            (self.split_segments, "TCP segments with parts of messages"),
            (self.fragments, "fragments"),
            (self.malformed, "unreadable packets"),
            (self.unpaired.orphans, "replies to earlier queries"),
            (
                self.unpaired.excess,
                "queries beyond the limit of waiting ones",
            ),
            (
                self.unpaired.ambiguous,
                "messages with an id in use for another question",
            ),
            (self.dropped, "packets beyond the share of CPU"),
        ] {
            if count > 0 {
                reasons.push(format!("{count} {reason}"));
            }
        }
        (!reasons.is_empty()).then(|| reasons.join(", "))
    }
}

impl Report {
    /// Sets what follows from the tally.
    pub fn add_tally(&mut self, tally: &Tally, disclosure: &Disclosure) {
        self.verdicts = tally.verdicts;
        self.differences = tally
            .groups
            .iter()
            .map(|(cause, group)| difference(cause, group, disclosure))
            .collect();
        // Unexplained ones first: they decide whether a migration is safe.
        self.differences
            .sort_by_key(|found| (found.documented.is_some(), std::cmp::Reverse(found.count)));
        self.routes = tally
            .routes
            .iter()
            .map(|(route, &count)| (route.text().to_owned(), count))
            .collect();
        self.interface.answered = tally.from_interface;
        for (reason, &count) in &tally.not_from_interface {
            self.interface.others.push(((*reason).to_owned(), count));
        }
        let others = &mut self.interface.others;
        others.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
    }

    /// Returns what the report proves: the gravest that applies.
    pub fn outcome(&self) -> Outcome {
        if self.verdicts.unexplained > 0 {
            Outcome::Different
        } else if self.verdicts.unjudged > 0 {
            Outcome::Unjudged
        } else if self.failure.is_some() {
            Outcome::Failed
        } else if self.verdicts.compared == 0 {
            Outcome::Nothing
        } else {
            Outcome::Equal
        }
    }

    /// Returns the report for a terminal.
    pub fn text(&self) -> String {
        let mut text = String::new();
        // Writing to a string cannot fail.
        let _ = self.write_text(&mut text);
        text
    }

    fn write_text(&self, text: &mut String) -> std::fmt::Result {
        let addresses: Vec<String> = self.addresses.iter().map(ToString::to_string).collect();
        writeln!(
            text,
            "{} ({}), {:.0} s",
            self.program, self.mode, self.seconds
        )?;
        row(text, "observed server", &addresses.join(", "))?;
        row(text, "instances", &self.instances.to_string())?;
        row(text, "health", &self.health)?;
        row(text, "queries seen", &self.seen.text())?;
        row(text, "unanswered", &self.seen.unanswered.to_string())?;
        if let Some(left_out) = self.seen.left_out() {
            row(text, "not comparable", &left_out)?;
        }
        let verdicts = &self.verdicts;
        row(text, "compared", &verdicts.compared.to_string())?;
        for (name, count) in verdicts.rows() {
            let name = format!("  {name}");
            row(text, &name, &share(count, verdicts.compared))?;
        }
        self.write_differences(text)?;
        writeln!(text)?;
        row(
            text,
            "from interfaces",
            &share(self.interface.answered, verdicts.compared),
        )?;
        for (reason, count) in &self.interface.others {
            row(
                text,
                &format!("  {reason}"),
                &share(*count, verdicts.compared),
            )?;
        }
        self.write_costs(text)?;
        for remark in &self.remarks {
            row(text, "remark", remark)?;
        }
        if let Some(failure) = &self.failure {
            row(text, "failure", failure)?;
        }
        row(text, "result", self.outcome().text())
    }

    fn write_differences(&self, text: &mut String) -> std::fmt::Result {
        for difference in &self.differences {
            writeln!(text)?;
            match &difference.documented {
                Some([section, cell]) => {
                    let head = format!("documented, {} times: {cell}", difference.count);
                    paragraph(text, "", &head)?;
                    paragraph(text, "  ", &format!("{PAGE}, {section}"))?;
                }
                None => {
                    let head = format!(
                        "UNEXPLAINED, {} times: {}",
                        difference.count, difference.cause
                    );
                    paragraph(text, "", &head)?;
                }
            }
            for example in &difference.examples {
                write_example(text, example, difference.documented.is_none())?;
            }
        }
        Ok(())
    }

    fn write_costs(&self, text: &mut String) -> std::fmt::Result {
        let median = microseconds(self.latency.median_us);
        let p99 = microseconds(self.latency.p99_us);
        let latency = format!("median {median}, 99 of 100 {p99}");
        row(text, "their latency", &latency)?;
        row(text, "their CPU", &self.cpu.observed())?;
        row(text, "our CPU", &self.cpu.estimated())?;
        row(text, "CPU of shadow", &self.cpu.own())
    }
}

fn microseconds(bound: Option<u64>) -> String {
    match bound {
        Some(bound) => format!("<= {bound} us"),
        None => "not measured".to_owned(),
    }
}

/// Width of the first column, and of a line.
const COLUMN: usize = 26;
const WIDTH: usize = 80;

fn row(text: &mut String, name: &str, value: &str) -> std::fmt::Result {
    let lines = wrapped(value, WIDTH - COLUMN - 1);
    for (number, line) in lines.iter().enumerate() {
        let name = if number == 0 { name } else { "" };
        writeln!(text, "{name:<COLUMN$} {line}")?;
    }
    Ok(())
}

fn paragraph(text: &mut String, indent: &str, words: &str) -> std::fmt::Result {
    for line in wrapped(words, WIDTH - indent.len()) {
        writeln!(text, "{indent}{line}")?;
    }
    Ok(())
}

/// Breaks text at spaces into lines of at most `width` characters; longer words stay whole.
fn wrapped(words: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in words.split_whitespace() {
        let last = lines.last_mut().expect("there is always a line");
        if last.is_empty() {
            last.push_str(word);
        // Characters, because names may have others than ASCII.
        } else if last.chars().count() + 1 + word.chars().count() <= width {
            last.push(' ');
            last.push_str(word);
        } else {
            lines.push(word.to_owned());
        }
    }
    lines
}

fn write_example(text: &mut String, example: &ShownExample, is_whole: bool) -> std::fmt::Result {
    let client = example
        .client
        .as_deref()
        .map(|client| format!(", from {client}"));
    let head = format!(
        "{} {}{}",
        example.name,
        example.about,
        client.unwrap_or_default()
    );
    paragraph(text, "  ", &head)?;
    // A documented difference needs no proof; its examples only tell where it was seen.
    if !is_whole {
        return Ok(());
    }
    for finding in &example.findings {
        paragraph(text, "    ", &format!("* {finding}"))?;
    }
    for (side, lines) in [("theirs", &example.theirs), ("ours", &example.ours)] {
        for line in lines {
            paragraph(text, &format!("    {side:<6} "), line)?;
        }
    }
    for line in &example.steps {
        // The indentation shows the depth of a step, and must survive the break of a long line.
        let depth = line.len() - line.trim_start().len();
        paragraph(text, &format!("    | {:depth$}", ""), line)?;
    }
    Ok(())
}

fn share(count: u64, of: u64) -> String {
    if of == 0 {
        return count.to_string();
    }
    format!("{count} ({:.2} %)", count as f64 / of as f64 * 100.0)
}

fn difference(cause: &GroupCause, group: &Group, disclosure: &Disclosure) -> Difference {
    let (cause, documented) = match cause {
        GroupCause::Documented(row) => {
            let (section, cell) = row.place();
            (cell.to_owned(), Some([section.to_owned(), cell.to_owned()]))
        }
        GroupCause::Unexplained(causes) => {
            let words: Vec<&str> = causes.iter().map(|cause| cause.text()).collect();
            (words.join("; "), None)
        }
    };
    Difference {
        cause,
        documented,
        count: group.count,
        examples: group
            .examples
            .iter()
            .map(|example| shown(example, disclosure))
            .collect(),
    }
}

fn shown(example: &Example, disclosure: &Disclosure) -> ShownExample {
    let findings = example
        .findings
        .iter()
        .map(|finding| match disclosure.text(&finding.detail) {
            "" => finding.cause.text().to_owned(),
            detail => format!("{}: {detail}", finding.cause.text()),
        });
    // Names may stand anywhere in it, so it is left out as a whole where they are hidden.
    let steps = disclosure.text(&example.steps);
    ShownExample {
        name: disclosure.name(&example.question.name),
        about: example.question.about(),
        client: disclosure
            .shows_clients
            .then(|| disclosure.data(&example.client.to_string())),
        findings: findings.collect(),
        theirs: lines(example.theirs.as_ref(), disclosure),
        ours: lines(example.ours.as_ref(), disclosure),
        route: example.route.text().to_owned(),
        steps: steps.lines().map(ToOwned::to_owned).collect(),
    }
}

fn lines(reply: Option<&Reply>, disclosure: &Disclosure) -> Vec<String> {
    let Some(reply) = reply else {
        return Vec::new();
    };
    if !disclosure.is_hashed() {
        return reply.lines();
    }
    let mut hidden = reply.clone();
    let sections = [
        &mut hidden.answers,
        &mut hidden.authority,
        &mut hidden.additional,
    ];
    for record in sections.into_iter().flatten() {
        record.owner = disclosure.name(&record.owner);
        record.data = disclosure.data(&record.data);
    }
    hidden.lines()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_compared_is_counted() {
        let mut report = Report {
            program: String::new(),
            mode: String::new(),
            seconds: 1.0,
            addresses: Vec::new(),
            health: String::new(),
            instances: 0,
            seen: Seen::default(),
            verdicts: Verdicts::default(),
            differences: Vec::new(),
            routes: Vec::new(),
            interface: InterfaceShare::default(),
            latency: crate::latency::Latencies::default().report(),
            cpu: Cpu::default(),
            remarks: Vec::new(),
            failure: None,
        };
        assert!(!report.text().contains("not comparable"));
        report.seen.split_segments = 2;
        report.seen.dropped = 7;
        let text = report.text();
        let words: Vec<&str> = text.split_whitespace().collect();
        let reasons = "not comparable 2 TCP segments with parts of messages, 7 packets beyond the share of CPU";
        assert!(words.join(" ").contains(reasons), "{text}");

        // An observation without a query proves nothing.
        assert_eq!(report.outcome(), Outcome::Nothing);
        assert!(report.text().contains("nothing was compared"));
        report.verdicts.compared = 1;
        assert_eq!(report.outcome(), Outcome::Equal);
        report.failure = Some("packet socket: out of memory".to_owned());
        assert_eq!(report.outcome(), Outcome::Failed);
        assert!(report.text().contains("out of memory"));
        report.verdicts.unjudged = 1;
        assert_eq!(report.outcome(), Outcome::Unjudged);
        assert!(report.text().contains("differences were not judged"));
    }
}
