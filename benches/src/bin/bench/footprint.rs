//! Resources of the server itself: time to the first answer from the interface, and memory.

use std::{
    fs,
    net::{SocketAddr, UdpSocket},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use bosh_dns_xdp_benches::{
    cpu::map_memory,
    foundation::Foundation,
    lab::{CLIENT_CPU, Lab, SERVER_ADDRESS},
    report::{Data, Figure, Sweep, number},
};
use hickory_proto::rr::RecordType;
use whole_system_tests::{client, cpu::on_cpu, process};

use crate::{
    Plan,
    cell::Cell,
    queries::{self, Queries},
    subject::Subject,
};

/// Title of the figure of memory.
pub(super) const MEMORY_TITLE: &str = "Resident memory of the process by size";

/// Title of the figure of starts.
pub(super) const START_TITLE: &str = "Start-up by size";

const STARTS: usize = 5;

/// Idle time before the memory of a server is read: temporary memory of the start returns to the
/// system.
const PAUSE: Duration = Duration::from_secs(1);

/// Start-up and memory by size, with the fast path and without.
pub(super) fn measure(plan: &Plan) -> Result<Vec<Figure>> {
    let places: Vec<String> = plan.sizes.iter().map(|&size| number(size as f64)).collect();
    let new = || Sweep::new("instances", places.clone(), true);
    let (mut memory, mut maps, mut starts) = (new(), new(), new());
    for (place, &size) in plan.sizes.iter().enumerate() {
        let foundation = Foundation::generate(size)?;
        let queries = Queries::write(&queries::for_names(&foundation, queries::is_shared))?;
        // The last name to be published.
        let name = foundation.names().last().context("a foundation has names")?.to_string();
        for _ in 0..STARTS {
            for subject in [Subject::Ours("tc"), Subject::Userspace] {
                let lab = Lab::split()?;
                let started = Instant::now();
                let running = subject.begin(&lab, &foundation)?;
                let process = *running.processes.first().context("ours is a process")?;
                if subject != Subject::Userspace {
                    wait_for_interface(&lab, process, &name)?;
                }
                starts.push(&subject.label(), true, place, started.elapsed().as_secs_f64() * 1e3);
                let cell = Cell { subject: &subject, running, lab };
                cell.asker()?.warm_up(&queries)?;
                thread::sleep(PAUSE);
                let mebibytes = |bytes: u64| bytes as f64 / f64::from(1 << 20);
                memory.push(&subject.label(), true, place, mebibytes(process::memory(process, "VmRSS")?));
                if subject != Subject::Userspace {
                    maps.push(&subject.label(), true, place, mebibytes(map_memory(process)?));
                }
            }
        }
    }
    for (what, sweep) in [("ms to start", &starts), ("MiB", &memory)] {
        for line in &sweep.series {
            let medians: Vec<String> = line.values.iter().map(|value| number(value.median())).collect();
            println!("{:<22} {what}: {}", line.label, medians.join(", "));
        }
    }
    Ok(vec![
        Figure::new(
            START_TITLE,
            "From process start to the first answer; with the fast path, to the first answer from the \
             interface (userspace answers meanwhile). On one CPU.",
            "ms",
            Data::Sweep(starts),
        ),
        Figure::new(
            MEMORY_TITLE,
            "Including mapped BPF maps, after some thousand queries and a pause.",
            "MiB",
            Data::Sweep(memory),
        ),
        Figure::new(
            "Memory of the BPF maps by size",
            "As accounted by the kernel (memlock). The maps are allocated for max_names at startup, so a \
             growing fleet needs no further memory.",
            "MiB",
            Data::Sweep(maps),
        ),
    ])
}

/// Pause between two queries. Without it they would take the CPU from the thread that loads the
/// programs, which has a lower priority.
const BETWEEN: Duration = Duration::from_micros(500);

/// Queries `name` until a reply arrives that the server's process has not sent.
fn wait_for_interface(lab: &Lab, process: u32, name: &str) -> Result<()> {
    let query = client::query(name, RecordType::A, Some(1232))?.to_vec()?;
    let ask = || -> Result<()> {
        let socket = UdpSocket::bind("0.0.0.0:0")?;
        socket.connect(SocketAddr::from((SERVER_ADDRESS, 53)))?;
        socket.set_read_timeout(Some(Duration::from_millis(100)))?;
        let started = Instant::now();
        while started.elapsed() < Duration::from_secs(20) {
            let before = datagrams_received(process)?;
            socket.send(&query)?;
            // Read the reply, whatever its source, before the next query is sent.
            let replied = socket.recv(&mut [0; 4096]).is_ok();
            if replied && datagrams_received(process)? == before {
                return Ok(());
            }
            thread::sleep(BETWEEN);
        }
        bail!("no answer from the interface for {name} within 20 s")
    };
    lab.client.run(|| on_cpu(CLIENT_CPU, ask))?
}

/// Returns the datagrams that sockets in the network namespace of a process have received
/// (`InDatagrams`).
fn datagrams_received(process: u32) -> Result<u64> {
    let text = fs::read_to_string(format!("/proc/{process}/net/snmp"))?;
    let mut lines = text.lines().filter_map(|line| line.strip_prefix("Udp: "));
    let (names, values) = lines.next().zip(lines.next()).context("no line of UDP in snmp")?;
    let place = names.split(' ').position(|name| name == "InDatagrams").context("no InDatagrams in snmp")?;
    Ok(values.split(' ').nth(place).context("a value for each name in snmp")?.parse()?)
}
