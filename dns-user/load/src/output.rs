//! Shows reports: lines and a progress bar for people, JSON Lines for programs.

use std::{
    io::{self, IsTerminal as _},
    time::Duration,
};

use anyhow::Result;
use indicatif::{ProgressBar, ProgressStyle};
use nix::errno::Errno;
use serde::Serialize;

use crate::report::Report;

/// Where reports go.
pub(crate) struct Output {
    json: bool,
    bar: ProgressBar,
    has_heading: bool,
}

impl Output {
    /// With a progress bar over this time, if standard error is a terminal.
    pub(crate) fn new(json: bool, length: Option<Duration>) -> Result<Self> {
        let bar = match length {
            // The bar is drawn on standard error: standard output, with the report, may go to a file.
            Some(length) if io::stderr().is_terminal() => {
                let bar = ProgressBar::new(length.as_millis() as u64);
                bar.set_style(ProgressStyle::with_template("{bar:40} {percent} %, {msg}")?);
                bar
            }
            _ => ProgressBar::hidden(),
        };
        Ok(Self {
            json,
            bar,
            has_heading: false,
        })
    }

    /// Shows a part of a measurement.
    pub(crate) fn line(&mut self, report: &Report) -> Result<()> {
        self.progress(report);
        if self.json {
            return self.json(report);
        }
        let mut text = String::new();
        if !self.has_heading {
            self.has_heading = true;
            text +=
                "seconds    rate/s    sent/s  received/s     lost    p50 µs    p99 µs  RCODEs\n";
        }
        self.print(&(text + &row(report)))
    }

    /// Shows in the progress bar that a part is done.
    pub(crate) fn progress(&self, report: &Report) {
        self.bar.inc((report.seconds * 1e3).round() as u64);
        self.bar
            .set_message(format!("{:.0}/s answered", report.received_per_second));
    }

    /// Shows an object as a line of JSON.
    pub(crate) fn json(&self, object: &impl Serialize) -> Result<()> {
        self.print(&(serde_json::to_string(object)? + "\n"))
    }

    /// Shows the result of a measurement.
    pub(crate) fn total(&self, report: &Report) -> Result<()> {
        self.finish();
        if self.json {
            return self.json(report);
        }
        self.print(&table(report))
    }

    /// Ends the progress bar.
    pub(crate) fn finish(&self) {
        self.bar.finish_and_clear();
    }

    /// Prints above the progress bar.
    pub(crate) fn print(&self, text: &str) -> Result<()> {
        let printed = self
            .bar
            .suspend(|| dns_command_line::print(text.as_bytes()));
        Ok(printed?)
    }

    /// Whether programs read the output.
    pub(crate) fn is_json(&self) -> bool {
        self.json
    }
}

fn row(report: &Report) -> String {
    let rate = match report.rate {
        Some(rate) => rate.to_string(),
        None => "all".to_owned(),
    };
    let (p50, p99) = match &report.latency {
        Some(latency) => (format!("{:.1}", latency.p50), format!("{:.1}", latency.p99)),
        None => ("-".to_owned(), "-".to_owned()),
    };
    format!(
        "{:7.2} {rate:>9} {:9.0} {:11.0} {:7.3}% {p50:>9} {p99:>9}  {}\n",
        report.seconds,
        report.sent_per_second,
        report.received_per_second,
        report.loss * 100.0,
        rcodes(report) + &pauses(report),
    )
}

fn pauses(report: &Report) -> String {
    match report.pauses {
        Some(pauses) if pauses.count > 0 => format!(
            "; pauses {}, up to {:.1} ms, {} lost",
            pauses.count, pauses.longest, pauses.lost
        ),
        _ => String::new(),
    }
}

fn rcodes(report: &Report) -> String {
    let mut texts = Vec::new();
    for (name, count) in &report.rcodes {
        texts.push(format!("{name} {count}"));
    }
    texts.join(", ")
}

fn table(report: &Report) -> String {
    let mut text = format!(
        "\nsent      {:>12}  {:>12.0}/s\nreceived  {:>12}  {:>12.0}/s\nlost      {:>12}  {:>12.3}%\n\
         skipped   {:>12}  {:>12} at once\n\
         late      {:>12}\ndifferent {:>12}\nRCODEs    {}\n",
        report.sent,
        report.sent_per_second,
        report.received,
        report.received_per_second,
        report.lost,
        report.loss * 100.0,
        report.skipped,
        report.stalled,
        report.late,
        report.different,
        rcodes(report),
    );
    for (name, times) in [
        ("latency", report.latency),
        ("service", report.service_time),
    ] {
        let Some(times) = times else {
            continue;
        };
        text += &format!(
            "{name}   mean {:.1} µs, p50 {:.1} µs, p90 {:.1} µs, p99 {:.1} µs, p99.9 {:.1} µs, max {:.1} µs\n",
            times.mean, times.p50, times.p90, times.p99, times.p999, times.max
        );
    }
    for of_cpu in &report.cpus {
        text += &format!(
            "CPU {:<5} sent {}, skipped {}, received {}\n",
            of_cpu.cpu, of_cpu.sent, of_cpu.skipped, of_cpu.received
        );
    }
    text += &format!(
        "generator {:.3} µs of CPU time per query, waited for its CPU {:.1} % of the time\ninterface dropped {} received and \
         {} sent packets\n",
        report.cpu_per_query,
        report.cpu_waited * 100.0,
        report.dropped.received,
        report.dropped.sent,
    );
    for (name, count) in &report.counters {
        text += &format!("counter {name} {count}\n");
    }
    for (&error, count) in &report.errors {
        let error = Errno::from_raw(error);
        text += &format!("error {error}, {count} times; {}\n", remedy(error));
    }
    if report.received == 0 && report.errors.is_empty() {
        text += "no reply: does the server answer these queries, and no packet filter drop them? Without --sockets: does the \
                 driver transmit XDP frames, and the other end of a veth pair receive them (ethtool -K INTERFACE gro on)?\n";
    }
    text
}

/// Returns the cause of an error of sending or receiving, or where to look.
fn remedy(error: Errno) -> &'static str {
    match error {
        Errno::ECONNREFUSED => {
            "no program has the server's port any more, or a packet filter rejects"
        }
        Errno::EPERM | Errno::EACCES => {
            "a packet filter of this machine drops what leaves (nft list ruleset)"
        }
        Errno::ENOBUFS | Errno::EAGAIN => {
            "the interface takes no more: a lower --rate, or a longer queue (ip link set dev INTERFACE txqueuelen N)"
        }
        Errno::ENETUNREACH | Errno::EHOSTUNREACH | Errno::ENETDOWN => {
            "the way to the server is gone (ip route get SERVER)"
        }
        _ => "see send(2) and udp(7)",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        pauses::Pauses,
        report::{Latency, tests::report},
    };

    #[test]
    fn silence_has_its_remedy() {
        assert!(table(&report(10, 0)).contains("no reply: "));
        let found = table(&report(2000, 1600));
        assert!(
            !found.contains("no reply: ") && found.contains("NOERROR 1600"),
            "{found}"
        );
        assert!(row(&report(2000, 1600)).contains("20.000%"));
        let mut refused = report(10, 0);
        refused.errors = [(Errno::ECONNREFUSED as i32, 7), (Errno::EPERM as i32, 1)].into();
        let found = table(&refused);
        for part in [
            "error ECONNREFUSED: Connection refused, 7 times; no program has the server's port",
            "error EPERM: Operation not permitted, 1 times; a packet filter",
        ] {
            assert!(found.contains(part), "{found}");
        }
        // The error is the reason.
        assert!(!found.contains("no reply: "), "{found}");
    }

    #[test]
    fn lines_have_their_columns() {
        let mut found = report(2000, 1600);
        assert_eq!(
            row(&found),
            "   2.00      1000      1000         800  20.000%         -         -  NOERROR 1600\n"
        );
        found.rate = None;
        found.rcodes.insert("REFUSED".to_owned(), 3);
        found.latency = Some(Latency {
            mean: 1.0,
            p50: 2.0,
            p90: 3.0,
            p99: 4.0,
            p999: 5.0,
            max: 6.0,
        });
        let line = row(&found);
        assert!(
            line.contains(" all ") && line.ends_with("  2.0       4.0  NOERROR 1600, REFUSED 3\n"),
            "{line}"
        );
        found.service_time = Some(Latency {
            p50: 1.5,
            ..found.latency.unwrap()
        });
        found.cpu_waited = 0.125;
        found.counters.insert("rx_queue_0_drops".to_owned(), 7);
        found.pauses = Some(Pauses {
            count: 2,
            seconds: 0.05,
            longest: 30.0,
            lost: 9,
        });
        let line = row(&found);
        assert!(
            line.ends_with("REFUSED 3; pauses 2, up to 30.0 ms, 9 lost\n"),
            "{line}"
        );
        let text = table(&found);
        for part in [
            "latency   mean 1.0 µs, p50 2.0 µs, p90 3.0 µs, p99 4.0 µs, p99.9 5.0 µs, max 6.0 µs",
            "service   mean 1.0 µs, p50 1.5 µs, ",
            "CPU 1     sent 2000, skipped 0, received 1600\n",
            "waited for its CPU 12.5 % of the time",
            "interface dropped 0 received and 0 sent packets\ncounter rx_queue_0_drops 7\n",
            "      20.000%\n",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(
            Output::new(true, None).unwrap().is_json()
                && !Output::new(false, None).unwrap().is_json()
        );
    }

    #[test]
    fn existing_pauses_are_shown() {
        let mut found = report(2000, 1600);
        for (count, expected) in [(0, ""), (1, "; pauses 1, up to 2.5 ms, 3 lost")] {
            found.pauses = Some(Pauses {
                count,
                seconds: 0.0025,
                longest: 2.5,
                lost: 3,
            });
            assert_eq!(pauses(&found), expected);
        }
    }

    #[test]
    fn progress_follows_time() {
        let output = Output {
            json: true,
            bar: ProgressBar::hidden(),
            has_heading: false,
        };
        output.bar.set_length(10_000);
        for position in [2000, 4000] {
            output.progress(&report(2000, 1600));
            assert_eq!(output.bar.position(), position);
            assert_eq!(output.bar.message(), "800/s answered");
        }
        assert!(!output.bar.is_finished());
        output.finish();
        assert!(output.bar.is_finished());
    }

    /// Returns what the process of this test prints in a form.
    fn printed(form: &str) -> String {
        let output = std::process::Command::new(std::env::current_exe().unwrap())
            .args([
                "output::tests::reports_are_printed",
                "--exact",
                "--nocapture",
                // With one, its name is in the first line.
                "--test-threads=2",
            ])
            .env("PRINTED_FORM", form)
            .output()
            .unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success(), "{text}");
        text
    }

    #[test]
    fn reports_are_printed() {
        if let Ok(form) = std::env::var("PRINTED_FORM") {
            let mut output = Output::new(form == "json", Some(Duration::from_secs(4))).unwrap();
            for _ in 0..2 {
                output.line(&report(2000, 1600)).unwrap();
            }
            output.total(&report(4000, 3200)).unwrap();
            assert!(output.bar.is_finished());
            return;
        }
        let text = printed("text");
        let row = row(&report(2000, 1600));
        let heading =
            "seconds    rate/s    sent/s  received/s     lost    p50 µs    p99 µs  RCODEs\n";
        let total = table(&report(4000, 3200));
        assert!(
            text.contains(&format!("{heading}{row}{row}{total}")),
            "{text}"
        );
        let mut received = Vec::new();
        for line in printed("json").lines().filter(|line| line.starts_with('{')) {
            let object: serde_json::Value = serde_json::from_str(line).unwrap();
            received.push(object["received"].as_u64());
        }
        assert_eq!(received, [Some(1600), Some(1600), Some(3200)]);
    }
}
