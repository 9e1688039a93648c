//! Open-loop load by kxdpgun: the only generator here that one core drives to millions
//! of queries per second.

use std::{path::Path, time::Duration};

use anyhow::{Context, Result};
use whole_system_tests::process::capture;

use crate::lab::{CLIENT_CPU, CLIENT_INTERFACE, Lab, SERVER_ADDRESS};

/// How hard to ask.
#[derive(Clone, Copy, Debug)]
pub struct Load<'a> {
    /// File of `name type` lines, asked for in this order again and again.
    pub queries: &'a Path,
    /// Queries per second, kept whether they are answered or not.
    pub rate: u32,
    /// Queries that are sent at a time: one system call.
    pub batch: u32,
    /// How long to go on.
    pub duration: Duration,
}

/// What kxdpgun saw.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// Queries sent: handed to the client's end of the veth.
    pub sent: u64,
    /// Replies that its socket received.
    pub received: u64,
    /// Those of them with RCODE NOERROR.
    pub no_error: u64,
}

impl Load<'_> {
    /// Sends the queries from the client's CPU.
    ///
    /// kxdpgun brings an XDP program of its own to the client's end, in native mode: so
    /// native `XDP_TX` works at the server's end, too. Before and after it sends, it waits
    /// for a second each.
    pub fn run(&self, lab: &Lab) -> Result<Seen> {
        let mut command = lab.client.with_own_sysfs("kxdpgun");
        command
            .args(["-t", &self.duration.as_secs_f64().to_string(), "-Q", &self.rate.to_string()])
            .args(["-b", &self.batch.to_string(), "-F", &format!("{CLIENT_CPU}s1"), "-I", CLIENT_INTERFACE])
            .arg("-i")
            .arg(self.queries)
            .arg(SERVER_ADDRESS.to_string());
        let report = capture(&mut command)?;
        // It leaves its program behind.
        lab.client.ip(&["link", "set", "dev", CLIENT_INTERFACE, "xdp", "off"])?;
        parse(&report).with_context(|| format!("kxdpgun's report: {report}"))
    }
}

/// Reads the sums at the end of its report.
fn parse(report: &str) -> Option<Seen> {
    let first = |key: &str| {
        let value = report.lines().find_map(|line| line.trim().strip_prefix(key)?.strip_prefix(':'));
        value?.split_whitespace().next()?.parse().ok()
    };
    Some(Seen {
        sent: first("total queries")?,
        received: first("total replies")?,
        // Not printed where there was none.
        no_error: first("responded NOERROR").unwrap_or(0),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_report_is_read() {
        let report = "using interface bdxc, XDP threads: 1, UDP, native mode\n\
            thread#00: sent 100, received 90\ntotal queries:     100 (1000 pps)\n\
            total replies:     90 (900 pps) (90%)\naverage DNS reply size: 69 B\n\
            responded NOERROR: 80\nresponded NXDOMAIN: 10\nduration: 0 s\n";
        assert_eq!(parse(report), Some(Seen { sent: 100, received: 90, no_error: 80 }));
        assert_eq!(parse("no sums"), None);
    }
}
