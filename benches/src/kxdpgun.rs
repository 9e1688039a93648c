//! Open-loop load by kxdpgun: the only generator here that keeps a rate of
//! 100,000 queries per second from one core.

use std::{path::Path, time::Duration};

use anyhow::{Context, Result};
use whole_system_tests::process::capture;

use crate::lab::{CLIENT_INTERFACE, Lab, SERVER_ADDRESS};

/// What came of a load.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sent {
    /// Queries sent.
    pub queries: u64,
    /// Replies received.
    pub replies: u64,
}

/// Sends the queries of a file (`name type` lines) at `rate` per second.
///
/// It brings an XDP program of its own to the client's end, in native mode: so
/// native `XDP_TX` works at the server's end, too. Before and after it sends, it waits for
/// a second each.
pub fn send(lab: &Lab, queries: &Path, rate: u32, duration: Duration) -> Result<Sent> {
    let mut command = lab.client.with_own_sysfs("kxdpgun");
    command
        .args(["-t", &duration.as_secs_f64().to_string(), "-Q", &rate.to_string(), "-b", "10", "-F", "1s1"])
        .args(["-I", CLIENT_INTERFACE, "-i"])
        .arg(queries)
        .arg(SERVER_ADDRESS.to_string());
    let report = capture(&mut command)?;
    // It leaves its program behind.
    lab.client.ip(&["link", "set", "dev", CLIENT_INTERFACE, "xdp", "off"])?;
    parse(&report)
}

/// Reads `total queries:` and `total replies:`.
fn parse(report: &str) -> Result<Sent> {
    let value = |key: &str| {
        let line = report.lines().find_map(|line| line.trim().strip_prefix(key))?;
        line.split_whitespace().next()?.parse().ok()
    };
    let queries = value("total queries:").with_context(|| format!("kxdpgun's report: {report}"))?;
    Ok(Sent { queries, replies: value("total replies:").unwrap_or(0) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_report_is_read() {
        let report = "thread#00: sent 200000, received 191114\ntotal queries:     200000 (100000 pps)\n\
                      total replies:     191114 (95557 pps) (95%)\nduration: 2 s\n";
        let sent = parse(report).unwrap();
        assert_eq!((sent.queries, sent.replies), (200_000, 191_114));
    }
}
