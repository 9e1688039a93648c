//! Reads the server's metrics port as Prometheus would.

use std::{
    io::{Read, Write},
    net::{Ipv4Addr, SocketAddr, TcpStream},
    time::Duration,
};

use anyhow::{Context, Result};
use dns_common::counters::Outcome;
use dns_kit::metrics::names;

use crate::{namespace::Namespace, process::wait_until};

/// Metrics port in the default configuration.
const PORT: u16 = 53088;

#[derive(Clone, Debug)]
pub struct Metrics(String);

impl Metrics {
    /// Scrapes the server in `namespace`.
    pub fn read(namespace: &Namespace) -> Result<Self> {
        namespace
            .run(Self::here)?
            .context("cannot read the server's metrics")
    }

    /// Scrapes the server in the caller's namespace.
    pub fn here() -> Result<Self> {
        Self::at((Ipv4Addr::LOCALHOST, PORT).into())
    }

    /// Scrapes the server whose metrics endpoint has this address.
    pub fn at(address: SocketAddr) -> Result<Self> {
        let mut stream = TcpStream::connect(address)?;
        stream.set_read_timeout(Some(Duration::from_secs(120)))?;
        stream
            .write_all(b"GET /metrics HTTP/1.0\r\nHost: localhost\r\nConnection: close\r\n\r\n")?;
        let mut reply = String::new();
        stream.read_to_string(&mut reply)?;
        let (_, body) = reply.split_once("\r\n\r\n").context("no HTTP reply")?;
        Ok(Self(body.to_owned()))
    }

    /// Sums all samples of a family whose labels contain `label`, such as `outcome="hit"`.
    pub fn sum(&self, family: &str, label: &str) -> u64 {
        let samples = self.0.lines().filter(|line| line.starts_with(family));
        let wanted = samples
            .filter(|line| line[family.len()..].starts_with(['{', ' ']) && line.contains(label));
        wanted
            .filter_map(|line| line.rsplit_once(' ')?.1.parse::<f64>().ok())
            .sum::<f64>() as u64
    }

    /// Returns the number of packets since `before`, by outcome; omits zeros.
    pub fn outcomes_since(&self, before: &Self) -> Vec<(&'static str, u64)> {
        let count = |metrics: &Self, outcome: Outcome| {
            metrics.sum(
                names::FAST_PATH_PACKETS_TOTAL,
                &format!("outcome=\"{}\"", outcome.label()),
            )
        };
        let grown = Outcome::ALL.iter().map(|&outcome| {
            (
                outcome.label(),
                count(self, outcome).saturating_sub(count(before, outcome)),
            )
        });
        grown.filter(|&(_, count)| count > 0).collect()
    }

    /// Returns the number of replies from the BPF program.
    pub fn fast_path_replies(&self) -> u64 {
        self.sum(names::REPLIES_TOTAL, "path=\"fast\"")
    }

    /// Returns the number of answerable queries that the program passed up as probes: at most one per
    /// second and interface.
    pub fn probes(&self) -> u64 {
        self.sum(names::FAST_PATH_PACKETS_TOTAL, "outcome=\"probe\"")
    }

    /// Returns whether the fast path is attached and has entries, and all of its programs.
    pub fn is_fast_path_up(&self) -> bool {
        let loading = self.sum(names::FAST_PATH_PROGRAM_INFO, "state=\"loading\"");
        let is_attached = self.sum(names::FAST_PATH_UP, "") > 0;
        is_attached && self.sum(names::FAST_PATH_ENTRIES, "") > 0 && loading == 0
    }

    /// Returns the number of replies from userspace.
    pub fn userspace_replies(&self) -> u64 {
        self.sum(names::REPLIES_TOTAL, "path=\"userspace\"")
    }
}

/// Waits until the metrics of the server in `namespace` are available, which is shortly after its
/// first answer.
pub fn wait_for_metrics(namespace: &Namespace) -> Result<()> {
    wait_until("the metrics", Duration::from_secs(120), || {
        Metrics::read(namespace).is_ok()
    })
}

/// Waits until the fast path of the server in `namespace` is attached and has entries. It loads in
/// the background, so that DNS does not wait for the verifier.
pub fn wait_for_fast_path(namespace: &Namespace) -> Result<()> {
    wait_until("the fast path", Duration::from_secs(120), || {
        Metrics::read(namespace).is_ok_and(|metrics| metrics.is_fast_path_up())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_sum_by_label() {
        let text = "# HELP x\nx_total{a=\"1\",b=\"2\"} 3\nx_total{a=\"1\"} 4\nx_total{a=\"2\"} 5\nx_total_other{a=\"1\"} 9\n";
        let metrics = Metrics(text.to_owned());
        assert_eq!(metrics.sum("x_total", "a=\"1\""), 7);
    }
}
