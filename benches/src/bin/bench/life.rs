//! The life of a server: time to the first answer from the interface, memory, and reloads.

use std::{
    fs,
    io::ErrorKind,
    net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use bosh_dns_xdp_benches::{
    cpu::{CpuTime, map_memory},
    foundation::{Change, Foundation},
    lab::{CLIENT_CPU, Lab, SERVER_ADDRESS},
    report::Rounds,
};
use hickory_proto::{op::Message, rr::RecordType};
use whole_system_tests::{client, cpu::on_cpu, metrics::wait_for_fast_path, process};

use crate::{
    Plan,
    part::{Order, Selection, Setting, Table},
    subject::{Cell, Running, Subject},
};

/// Time limit for an event that must occur.
const LIMIT: Duration = Duration::from_secs(20);

/// Sizes of the foundation in instances.
pub(crate) fn sizes(plan: &Plan) -> Vec<usize> {
    plan.pick(&[1_000, 10_000], &[100, 1_000, 10_000, 100_000])
}

/// Start-up and memory by size.
pub(crate) fn footprint(plan: &Plan, subject: &Subject, table: &mut Table) -> Result<()> {
    /// Idle time before the memory of a server is read: temporary memory of the start returns to the
    /// system.
    const PAUSE: Duration = Duration::from_secs(1);
    let has_fast_path = subject.mode() != Some("off");
    for (point, size) in sizes(plan).into_iter().enumerate() {
        let setting = Setting::new(size, Selection::Shared, &[Order::AsListed])?;
        // The last name to be published.
        let name = setting
            .foundation
            .names()
            .last()
            .context("a foundation has names")?
            .to_string();
        let lab = Lab::split()?;
        let _program = subject.program_of_client(&lab)?;
        let cell = Cell::begin(lab, subject, &setting.foundation, 0)?;
        let process = *cell.processes.first().context("ours is a process")?;
        if has_fast_path {
            wait_for_interface(&cell.lab, process, &name)?;
        }
        let Running::Server(server) = &cell.running else {
            bail!("ours is a server")
        };
        // Before that, the bench writes the server's files.
        let start = server.started.elapsed().as_secs_f64() * 1e3;
        let cpu = CpuTime::of_processes(&server.processes())?;
        cell.warm_up(setting.queries()?)?;
        thread::sleep(PAUSE);
        let mebibytes = |bytes: u64| Rounds(vec![bytes as f64 / f64::from(1 << 20)]);
        let maps = if has_fast_path {
            mebibytes(map_memory(process)?)
        } else {
            Rounds::default()
        };
        let resident = mebibytes(process::memory(process, "VmRSS")?);
        let mut shares = 0;
        for process in server.processes() {
            shares += process::proportional_set_size(process)?;
        }
        table.put(
            &subject.label(),
            point,
            &[
                Rounds(vec![start]),
                Rounds(vec![cpu.0.as_secs_f64() * 1e3]),
                resident,
                mebibytes(shares),
                maps,
            ],
        );
    }
    Ok(())
}

/// Queries `name` until a reply arrives that no socket of the server has caused.
fn wait_for_interface(lab: &Lab, process: u32, name: &str) -> Result<()> {
    /// Pause between two queries. Without it they would take the CPU from the thread that loads the
    /// programs, which has a lower priority.
    const BETWEEN: Duration = Duration::from_micros(500);
    let query = client::query(name, RecordType::A, Some(1232))?.to_vec()?;
    let ask = || -> Result<()> {
        let socket = socket()?;
        let started = Instant::now();
        while started.elapsed() < LIMIT {
            let before = process::datagrams_received(process)?;
            socket.send(&query)?;
            // Read the reply, whatever its source, before the next query is sent.
            let replied = socket.recv(&mut [0; 4096]).is_ok();
            if replied && process::datagrams_received(process)? == before {
                return Ok(());
            }
            thread::sleep(BETWEEN);
        }
        bail!("no answer from the interface for {name} within {LIMIT:?}")
    };
    lab.client.run(|| on_cpu(CLIENT_CPU, ask))?
}

/// Returns a socket to the server that waits a tenth of a second for replies.
fn socket() -> Result<UdpSocket> {
    let socket = UdpSocket::bind("0.0.0.0:0")?;
    socket.connect(SocketAddr::from((SERVER_ADDRESS, 53)))?;
    socket.set_read_timeout(Some(Duration::from_millis(100)))?;
    Ok(socket)
}

//----------- Reload ---------------------------------------------------------

/// Sizes of the foundation in instances.
pub(crate) const RELOAD_SIZES: [usize; 3] = [1_000, 10_000, 100_000];

/// Time from new records to the first new answer, for a name that is queried all the time and one that was never
/// queried; the slowest query meanwhile; and CPU time.
pub(crate) fn reload(plan: &Plan, subject: &Subject, table: &mut Table) -> Result<()> {
    let reloads: u8 = if plan.quick { 3 } else { 9 };
    for (point, size) in RELOAD_SIZES.into_iter().enumerate() {
        let mut foundation = Foundation::generate(size)?;
        let mut seen = Vec::new();
        let mut cold = Vec::new();
        if let Subject::Peer(peer) = subject {
            // Their zones of the largest foundation take minutes.
            if size > 10_000 {
                continue;
            }
            let lab = Lab::plain()?;
            let running = peer.start(&lab, &foundation.entries(usize::MAX))?;
            for turn in 1..=reloads {
                let change = foundation.recreate_one(Ipv4Addr::new(10, 255, 255, turn))?;
                running.write_names(&foundation.entries(usize::MAX))?;
                seen.push(watch(&lab, &[], &change, || running.signal_reload())?);
            }
        } else {
            let cell = Cell::begin(Lab::plain()?, subject, &foundation, 0)?;
            wait_for_fast_path(&cell.lab.server)?;
            let Running::Server(server) = &cell.running else {
                bail!("ours is a server")
            };
            let file = server.folder.path().join("records.json");
            let processes = server.processes();
            for turn in 1..=reloads {
                for is_hot in [true, false] {
                    let to = Ipv4Addr::new(10, 255, 253 + u8::from(is_hot), turn);
                    // Far enough apart to be in different groups.
                    let row = if is_hot { 0 } else { u32::from(turn) * 100 };
                    let change = foundation.recreate(row, to)?;
                    let next = file.with_extension("next");
                    fs::write(&next, &foundation.records)?;
                    let times = watch(&cell.lab, &processes, &change, || {
                        Ok(fs::rename(&next, &file)?)
                    })?;
                    if is_hot {
                        seen.push(times)
                    } else {
                        cold.push(times)
                    }
                }
            }
        }
        let column =
            |list: &[Times], value: fn(&Times) -> f64| Rounds(list.iter().map(value).collect());
        let milliseconds = [
            column(&seen, |times| times.first),
            column(&cold, |times| times.first),
            column(&seen, |times| times.slowest),
            column(&cold, |times| times.cpu),
        ];
        table.put(&subject.label(), point, &milliseconds);
    }
    Ok(())
}

/// Times of a reload in milliseconds.
struct Times {
    /// Until the first new answer.
    first: f64,
    /// The slowest of all consecutive replies.
    slowest: f64,
    /// CPU time within two seconds, less the CPU time of two idle seconds.
    cpu: f64,
}

/// Makes a change and queries the changed name until the answer is the new one.
fn watch(
    lab: &Lab,
    processes: &[u32],
    change: &Change,
    make: impl FnOnce() -> Result<()> + Send,
) -> Result<Times> {
    /// Pause before the change, in which slower work on the previous one ends, and the CPU time of an idle server
    /// is measured. Longer than the tenth of a second in which the serial of the peers' zones is counted.
    const PAUSE: Duration = Duration::from_secs(2);
    let milliseconds = |time: Duration| time.as_secs_f64() * 1e3;
    thread::sleep(PAUSE);
    let before = CpuTime::of_processes(processes)?;
    thread::sleep(PAUSE);
    let idle = CpuTime::of_processes(processes)? - before;
    let query = client::query(&change.name, RecordType::A, Some(1232))?.to_vec()?;
    let ask = || -> Result<[Duration; 2]> {
        let socket = socket()?;
        let mut buffer = [0; 4096];
        let mut slowest = Duration::ZERO;
        // Before the change: rename(2) frees the pages of the file that it replaces before it returns, which takes
        // longer than some reloads.
        let started = Instant::now();
        make()?;
        loop {
            let sent = Instant::now();
            socket.send(&query)?;
            let length = loop {
                match socket.recv(&mut buffer) {
                    Ok(length) => break length,
                    Err(error) if error.kind() == ErrorKind::WouldBlock => {
                        ensure!(sent.elapsed() < LIMIT, "no reply during the reload");
                    }
                    Err(error) => return Err(error).context("during the reload"),
                }
            };
            slowest = slowest.max(sent.elapsed());
            let reply = Message::from_vec(&buffer[..length])?;
            if client::addresses(&reply).contains(&IpAddr::V4(change.to)) {
                return Ok([started.elapsed(), slowest]);
            }
            ensure!(
                started.elapsed() < LIMIT,
                "{} did not change within {LIMIT:?}",
                change.name
            );
        }
    };
    let before = CpuTime::of_processes(processes)?;
    // On a separate CPU: a client that queries without a pause would take half of the server's.
    let [first, slowest] = lab.client.run(|| on_cpu(CLIENT_CPU, ask))??;
    thread::sleep(PAUSE);
    let cpu = (CpuTime::of_processes(processes)? - before).saturating_sub(idle);
    Ok(Times {
        first: milliseconds(first),
        slowest: milliseconds(slowest),
        cpu: milliseconds(cpu),
    })
}
