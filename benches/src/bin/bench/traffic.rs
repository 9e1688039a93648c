//! Cost of the fast path for other traffic: bulk TCP, and packets of another UDP service on the
//! same interfaces.

use std::{process::Stdio, time::Duration};

use anyhow::{Context, Result};
use bosh_dns_xdp_benches::{
    foundation::Foundation,
    lab::{CLIENT_CPU, CLIENT_INTERFACE, Lab, SERVER_ADDRESS, SERVER_CPU, SERVER_INTERFACE},
    report::Rounds,
};
use serde_json::Value;
use whole_system_tests::{
    cpu::on_cpu,
    metrics::wait_for_fast_path,
    process::{Kept, capture, run, wait_until},
    server,
};

use crate::{
    Plan,
    part::Table,
    subject::{Subject, start_build},
};

const PORT: &str = "5201";

/// Traffic that passes the programs, as much as possible: bulk TCP, or datagrams of 64 bytes;
/// over the veth pair or within the server's namespace.
pub(crate) struct Kind {
    /// TCP streams; `None`: datagrams.
    streams: Option<u32>,
    loopback: bool,
}

/// All kinds of traffic over both interfaces.
pub(crate) const KINDS: [Kind; 6] = [
    Kind {
        streams: Some(1),
        loopback: false,
    },
    Kind {
        streams: Some(8),
        loopback: false,
    },
    Kind {
        streams: None,
        loopback: false,
    },
    Kind {
        streams: Some(1),
        loopback: true,
    },
    Kind {
        streams: Some(8),
        loopback: true,
    },
    Kind {
        streams: None,
        loopback: true,
    },
];

impl Kind {
    pub(crate) fn label(&self) -> String {
        let over = if self.loopback { "lo" } else { "veth" };
        match self.streams {
            Some(1) => format!("bulk TCP, one stream, {over}"),
            Some(streams) => format!("bulk TCP, {streams} streams, {over}"),
            None => format!("datagrams, {over}"),
        }
    }

    /// Measures throughput with iperf3: Gbit/s of TCP, or packets per second received over UDP.
    fn throughput(&self, lab: &Lab) -> Result<f64> {
        let mut command = lab.server.command("iperf3")?;
        command
            .args(["--server", "--one-off", "--port", PORT])
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let mut server = on_cpu(SERVER_CPU, || Kept::spawn(&mut command))?;
        wait_until("iperf3", Duration::from_secs(5), || {
            let sockets = lab.server.capture("ss -Hltn");
            sockets.is_ok_and(|sockets| sockets.contains(PORT))
        })?;
        let (from, to) = if self.loopback {
            (&lab.server, "127.0.0.1".to_owned())
        } else {
            (&lab.client, SERVER_ADDRESS.to_string())
        };
        let mut client = from.command("iperf3")?;
        client.args(["--client", &to, "--port", PORT, "--time", "1", "--json"]);
        match self.streams {
            Some(streams) => client.args(["--parallel", &streams.to_string()]),
            None => client.args(["--udp", "--bitrate", "0", "--length", "64"]),
        };
        let report: Value = serde_json::from_str(&on_cpu(CLIENT_CPU, || capture(&mut client))?)?;
        // It ends with its client (`--one-off`), and the next one needs the port.
        server.wait(Duration::from_secs(5))?;
        let end = &report["end"];
        let number = |value: &Value| value.as_f64().context("iperf3's report");
        match self.streams {
            Some(_) => Ok(number(&end["sum_received"]["bits_per_second"])? / 1e9),
            None => {
                // `packets` were sent; only those that arrived have passed the programs.
                let sum = &end["sum"];
                Ok((number(&sum["packets"])? - number(&sum["lost_packets"])?)
                    / number(&sum["seconds"])?)
            }
        }
    }
}

/// Measures throughput alternately without a program and with the programs attached. All share the
/// interfaces: memory addresses and sockets of two labs would differ by more than the measured effect.
pub(crate) fn measure(_plan: &Plan, subjects: &[Subject], table: &mut Table) -> Result<()> {
    let foundation = Foundation::generate(1_000)?;
    for (point, kind) in KINDS.iter().enumerate() {
        let lab = Lab::plain()?;
        for (namespace, interface) in [
            (&lab.server, SERVER_INTERFACE),
            (&lab.client, CLIENT_INTERFACE),
        ] {
            run(namespace
                .with_own_sysfs("ethtool")
                .args(["-K", interface, "gro", "on", "tso", "on"]))?;
        }
        let mut values = vec![Rounds::default(); subjects.len()];
        for round in 0..3 {
            // Rotate the order, so that no subject is always first or last.
            for turn in 0..subjects.len() {
                let column = (turn + round) % subjects.len();
                // Stopped at the end of its turn, and its programs with it.
                let start = |mode| start_build(server::program()?, &lab, &foundation, mode);
                let server = subjects[column].mode().map(start).transpose()?;
                if server.is_some() {
                    wait_for_fast_path(&lab.server)?;
                }
                values[column].0.push(kind.throughput(&lab)?);
            }
        }
        for (subject, value) in subjects.iter().zip(&values) {
            // Round by round, so that a drift of the machine's speed cancels out.
            let mut relative = value.ratio_to(&values[0]);
            for share in &mut relative.0 {
                *share *= 100.0;
            }
            // The columns of TCP and of datagrams; the other one stays empty.
            let mut columns = [relative, Rounds::default(), Rounds::default()];
            columns[if kind.streams.is_some() { 1 } else { 2 }] = value.clone();
            table.put(&subject.label(), point, &columns);
        }
    }
    Ok(())
}
