//! Cost of the fast path for other traffic: bulk TCP, and packets of another UDP service on the
//! same interfaces.

use std::{
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::{Context, Result};
use bosh_dns_xdp_benches::{
    foundation::Foundation,
    lab::{CLIENT_CPU, CLIENT_INTERFACE, Lab, SERVER_ADDRESS, SERVER_CPU, SERVER_INTERFACE},
    report::{Bar, Data, Figure, Rounds, Sweep},
};
use serde_json::Value;
use whole_system_tests::{
    cpu::on_cpu,
    namespace::Namespace,
    process::{Kept, capture, run, wait_until},
};

use crate::{Plan, subject::Subject};

const PORT: &str = "5201";

/// Common beginning of the titles.
pub(super) const TITLE: &str = "Other traffic:";

/// Title of the figure with all measurements.
pub(super) const MAIN_TITLE: &str = "Throughput of other traffic with the fast path";

/// Label of the bar without any program.
pub(super) const NOTHING: &str = "nothing attached";

/// Measured modes of the fast path.
const MODES: [Option<&str>; 2] = [None, Some("auto")];

/// Traffic that passes the programs.
#[derive(Clone, Copy)]
enum Traffic {
    /// Bulk TCP on this many streams.
    Tcp(u32),
    /// UDP datagrams of 64 bytes, as many as possible.
    Udp,
}

/// The interface that the traffic passes.
#[derive(Clone, Copy)]
enum Over {
    /// From the client's namespace to the server's.
    Veth,
    /// Within the server's namespace.
    Loopback,
}

/// All kinds of traffic over both interfaces.
const KINDS: [(Traffic, Over); 6] = [
    (Traffic::Tcp(1), Over::Veth),
    (Traffic::Tcp(8), Over::Veth),
    (Traffic::Udp, Over::Veth),
    (Traffic::Tcp(1), Over::Loopback),
    (Traffic::Tcp(8), Over::Loopback),
    (Traffic::Udp, Over::Loopback),
];

/// Measures throughput without a program, and with the programs attached.
pub(super) fn measure(plan: &Plan) -> Result<Vec<Figure>> {
    let foundation = Foundation::generate(1_000)?;
    let mut values = KINDS.map(|_| MODES.map(|_| Rounds::default()));
    let turns = if plan.quick { 3 } else { 9 };
    for (&(traffic, over), row) in KINDS.iter().zip(&mut values) {
        // All modes share the interfaces: the memory addresses and sockets of two labs would differ
        // by more than the measured effect.
        let lab = Lab::plain()?;
        for (namespace, interface) in [(&lab.server, SERVER_INTERFACE), (&lab.client, CLIENT_INTERFACE)] {
            run(namespace.with_own_sysfs("ethtool").args(["-K", interface, "gro", "on", "tso", "on"]))?;
        }
        for turn in 0..turns {
            // Rotate the order, so that no mode is always first or last.
            for column in (0..MODES.len()).map(|column| (column + turn) % MODES.len()) {
                let subject = MODES[column].map(Subject::Ours);
                let _running = subject.map(|subject| subject.start(&lab, &foundation)).transpose()?;
                row[column].0.push(throughput(&lab, traffic, over)?);
            }
        }
    }
    let places =
        KINDS.iter().map(|(traffic, over)| format!("{}, {}", traffic.label(), over.label())).collect();
    let mut kept = Sweep::new("traffic", places, false);
    for (place, row) in values.iter().enumerate() {
        let [nothing, with @ ..] = row;
        for (mode, value) in MODES.iter().skip(1).zip(with) {
            for share in value.ratio_to(nothing).0 {
                kept.push(&label(*mode), true, place, share * 100.0);
            }
        }
    }
    let kept = Figure::new(
        MAIN_TITLE,
        "Relative to the throughput without a program, in alternating turns over the same interfaces; \
         iperf3 with one core per end, GRO and TSO on, no DNS load.",
        "%",
        Data::Sweep(kept),
    );
    let figures = KINDS.iter().zip(values).map(|((traffic, over), row)| {
        let bars: Vec<Bar> = MODES
            .iter()
            .zip(row)
            .map(|(mode, value)| Bar { label: label(*mode), value, ours: mode.is_some() })
            .collect();
        let unit = match traffic {
            Traffic::Tcp(_) => "Gbit/s",
            Traffic::Udp => "packets/s",
        };
        let (what, over) = (traffic.label(), over.label());
        let title = format!("{TITLE} {what} over {over}");
        for bar in &bars {
            println!("{title:<58} {:<18} {:>9.2} {unit}", bar.label, bar.value.median());
        }
        Figure::new(
            title,
            "iperf3, GRO and TSO on, no DNS load: the cost of passing every packet through the \
             program, which is attached to both interfaces.",
            unit,
            Data::Bars(bars),
        )
    });
    Ok([kept].into_iter().chain(figures).collect())
}

impl Traffic {
    /// Returns the label of the traffic.
    fn label(self) -> String {
        match self {
            Self::Tcp(1) => "bulk TCP, one stream".to_owned(),
            Self::Tcp(streams) => format!("bulk TCP, {streams} streams"),
            Self::Udp => "datagrams of another UDP service".to_owned(),
        }
    }
}

impl Over {
    /// Returns the label of the interface.
    fn label(self) -> &'static str {
        match self {
            Self::Veth => "veth",
            Self::Loopback => "lo",
        }
    }
}

/// Returns the label of a mode.
fn label(mode: Option<&str>) -> String {
    mode.map_or(NOTHING.to_owned(), |mode| format!("ours, {mode}"))
}

/// Measures throughput with iperf3: Gbit/s of TCP, or packets per second received over UDP.
fn throughput(lab: &Lab, traffic: Traffic, over: Over) -> Result<f64> {
    let mut command = lab.server.command("iperf3")?;
    command.args(["--server", "--one-off", "--port", PORT]).stdout(Stdio::null()).stderr(Stdio::null());
    let mut server = on_cpu(SERVER_CPU, || Kept::spawn(&mut command))?;
    wait_until("iperf3", Duration::from_secs(5), || listens(&lab.server))?;
    let (from, to) = match over {
        Over::Veth => (&lab.client, SERVER_ADDRESS.to_string()),
        Over::Loopback => (&lab.server, "127.0.0.1".to_owned()),
    };
    let mut client = from.command("iperf3")?;
    client.args(["--client", &to, "--port", PORT, "--time", "1", "--json"]);
    match traffic {
        Traffic::Tcp(streams) => client.args(["--parallel", &streams.to_string()]),
        Traffic::Udp => client.args(["--udp", "--bitrate", "0", "--length", "64"]),
    };
    let report: Value = serde_json::from_str(&on_cpu(CLIENT_CPU, || capture(&mut client))?)?;
    server.wait(Duration::from_secs(5))?;
    let end = &report["end"];
    let number = |value: &Value| value.as_f64().context("iperf3's report");
    match traffic {
        Traffic::Tcp(_) => Ok(number(&end["sum_received"]["bits_per_second"])? / 1e9),
        Traffic::Udp => {
            let sum = &end["sum"];
            Ok((number(&sum["packets"])? - number(&sum["lost_packets"])?) / number(&sum["seconds"])?)
        }
    }
}

/// Returns whether a process listens on [`PORT`] in the namespace.
fn listens(namespace: &Namespace) -> bool {
    let sockets = Command::new("ip").args(["netns", "exec", namespace.name(), "ss", "-Hltn"]).output();
    sockets.is_ok_and(|sockets| String::from_utf8_lossy(&sockets.stdout).contains(PORT))
}
