//! What the BPF programs cost per packet, by `BPF_PROG_TEST_RUN`: beside the
//! bare reflector, in the same run.
//!
//! A run makes the packet anew and runs the program on it. What the reset costs is
//! measured alone and taken off. Rounds of all rows take turns, and the shortest
//! counts: whatever disturbs a round adds to its time, and a neighbour on the same
//! core does so for seconds on end. The median beside it tells how much that was.

use std::{net::Ipv4Addr, net::SocketAddr, path::Path};

use anyhow::{Context as _, Result, ensure};
use aya::{
    Ebpf, TestRun as _, TestRunOptions,
    maps::{Array, MapData, ProgramArray},
    programs::{ProgramFd, SchedClassifier, Xdp},
};
use bosh_dns_xdp_benches::is_wanted;
use dns_common::{
    XDP_HEAD_ROOM,
    counters::Outcome,
    entry::Rules,
    reset::{MAX_LEN, Original},
};
use whole_system_tests::{
    cpu::stay_on,
    program::{Hook, Program, Published},
    requires,
    yardstick::{self, Yardstick},
};

/// Runs of one measurement: about a millisecond, which often goes undisturbed.
const REPEAT: u32 = 5_000;
/// Measurements of each row.
const ROUNDS: usize = 100;
/// Names that are published beside those asked for, as in a fleet of 1,000 instances.
const OTHER_NAMES: u32 = 1_300;
/// Bytes of the names asked for.
const NAME_LENGTHS: [usize; 3] = [14, 40, 90];
/// Where the IP header's protocol stands in a frame, and UDP's destination port.
const PROTOCOL_AND_PORT: (usize, usize) = (14 + 9, 14 + 20 + 2);
const SERVER: Ipv4Addr = Ipv4Addr::new(169, 254, 0, 2);
/// Where they come from.
const CLIENT: Ipv4Addr = Ipv4Addr::new(169, 254, 0, 1);

fn main() -> Result<()> {
    requires!(bpf);
    stay_on_one_cpu()?;
    let mut program = Program::load()?;
    program.set_endpoints(&[SocketAddr::from((SERVER, 53))]);
    for number in 0..OTHER_NAMES {
        let name = wire(&format!("other-{number}.q-g0.bosh"));
        program.publish(&name, &addresses(8))?;
    }
    let mut reset = Reset::load()?;
    // `cargo bench --bench program -- TEXT`: only rows with this in their label.
    let wanted: Vec<String> = std::env::args().skip(1).filter(|word| !word.starts_with('-')).collect();
    for (label, measured, hook) in [
        ("xdp", Hook::Xdp, yardstick::Hook::Native),
        ("generic", Hook::XdpGeneric, yardstick::Hook::Generic),
        ("tc", Hook::Tc, yardstick::Hook::Tc),
    ] {
        let reflector = Reflector::load(hook)?;
        let mut rows = rows(measured, program.fd(measured)?, reflector.fd()?)?;
        let is_yardstick = |row: &Row| matches!(row.expected, Expected::Nothing);
        rows.retain(|row| is_yardstick(row) || is_wanted(&wanted, &format!("{label}: {}", row.label)));
        for row in &rows {
            if let Expected::Counted(Outcome::Hit) = row.expected {
                program.publish(&row.name(0), &Published { rules: row.rules, ..addresses(row.answers) })?;
            }
        }
        for round in 0..ROUNDS {
            for row in &mut rows {
                row.measure(round, &mut program, &mut reset)?;
            }
        }
        print(label, &rows);
    }
    Ok(())
}

/// Keeps this thread, and with it the runs, where it is now.
fn stay_on_one_cpu() -> Result<()> {
    // SAFETY: no precondition.
    let cpu = usize::try_from(unsafe { libc::sched_getcpu() }).context("no number of this CPU")?;
    stay_on(cpu)
}

/// One program with one packet.
struct Row {
    label: String,
    /// The program, or none: the reset alone.
    subject: Option<ProgramFd>,
    /// The hook of the reset.
    at: Hook,
    /// Bytes of the name asked for.
    name_len: usize,
    /// Addresses that the name has.
    answers: u32,
    /// How the name's addresses are given, where not as those of the fleet.
    rules: Option<Rules>,
    frame: Frame,
    /// What each run must come to.
    expected: Expected,
    /// Time of one run in each round so far, ns.
    times: Vec<u128>,
}

/// What passes a program.
#[derive(Clone, Copy)]
enum Frame {
    Query,
    Segment,
    /// A datagram of another UDP service.
    OtherPort,
}

/// What a run comes to.
#[derive(Clone, Copy)]
enum Expected {
    /// The program counts nothing.
    Nothing,
    /// The program counts this.
    Counted(Outcome),
}

/// All rows of a hook: the reflector, the reset alone, what is not for us, misses and hits.
fn rows(at: Hook, measured: &ProgramFd, reflector: &ProgramFd) -> Result<Vec<Row>> {
    let row = |label: String, subject: Option<&ProgramFd>, name_len, answers, expected| -> Result<Row> {
        let subject = subject.map(ProgramFd::try_clone).transpose()?;
        let (rules, frame) = (None, Frame::Query);
        Ok(Row { label, subject, at, name_len, answers, rules, frame, expected, times: Vec::new() })
    };
    let mut rows = vec![row("reflector".into(), Some(reflector), 14, 0, Expected::Nothing)?];
    for name_len in NAME_LENGTHS {
        let label = format!("reset alone, name of {name_len} bytes");
        rows.push(row(label, None, name_len, 0, Expected::Nothing)?);
    }
    // What the program costs its neighbours.
    for (label, frame) in [("TCP segment", Frame::Segment), ("another UDP service", Frame::OtherPort)] {
        let not_ours = Expected::Counted(Outcome::NotOurs);
        rows.push(Row { frame, ..row(label.into(), Some(measured), 14, 0, not_ours)? });
    }
    for name_len in NAME_LENGTHS {
        let label = format!("miss, name of {name_len} bytes");
        rows.push(row(label, Some(measured), name_len, 0, Expected::Counted(Outcome::NotPublished))?);
    }
    for answers in [1, 3, 10, 24] {
        for name_len in NAME_LENGTHS {
            let label = format!("{answers} answers, name of {name_len} bytes");
            rows.push(row(label, Some(measured), name_len, answers, Expected::Counted(Outcome::Hit))?);
        }
    }
    // As a service of Consul's: with a TTL, and as many as its defaults give a client without EDNS.
    for (answers, plain) in [(3, 3), (24, 3), (24, 0)] {
        let all = if plain == 0 { String::new() } else { format!("{plain} of ") };
        let label = format!("{all}{answers} answers by Consul's rules, name of 40 bytes");
        let hit = Expected::Counted(Outcome::Hit);
        let rules = Some(Rules::new(7, 0, [plain; 2], false, false));
        rows.push(Row { rules, ..row(label, Some(measured), 40, answers, hit)? });
    }
    Ok(rows)
}

impl Row {
    /// The name asked for in a round. Of names that are not published some have a tag
    /// in the index in common with one that is, and cost a look at that: each round has
    /// one of its own.
    fn name(&self, round: usize) -> Vec<u8> {
        match self.expected {
            Expected::Counted(Outcome::NotPublished) => name_of(self.name_len, 1000 + round as u32),
            // Its own for each number of answers and kind of rules.
            _ => name_of(
                self.name_len,
                self.answers + self.rules.map_or(0, |rules| 100 + 100 * rules.plain(false) as u32),
            ),
        }
    }

    /// Measures a round, and sees that each run came to what it should.
    fn measure(&mut self, round: usize, program: &mut Program, reset: &mut Reset) -> Result<()> {
        let packet = self.frame.bytes(&self.name(round));
        reset.prepare(self.at, self.subject.as_ref(), &packet)?;
        let before = program.counters().outcomes;
        let time = reset.run(self.at, &packet)?;
        let after = program.counters().outcomes;
        for &outcome in Outcome::ALL {
            let counted = after[outcome as usize] - before[outcome as usize];
            let expected = match self.expected {
                Expected::Counted(expected) if expected == outcome => u64::from(REPEAT),
                _ => 0,
            };
            ensure!(counted == expected, "{}: {counted} times {outcome:?}, not {expected}", self.label);
        }
        self.times.push(time);
        Ok(())
    }

    /// Shortest of the rounds, ns.
    fn shortest(&self) -> f64 {
        self.times.iter().min().map_or(0.0, |&time| time as f64)
    }

    /// Median of the rounds, ns.
    fn median(&self) -> f64 {
        let mut times = self.times.clone();
        times.sort_unstable();
        times[times.len() / 2] as f64
    }
}

/// Prints the rows of a hook; the first is the reflector, and a row of the reset alone
/// is there for each length of a name.
fn print(label: &str, rows: &[Row]) {
    let [reflector, ..] = rows else { return };
    let reset = |row: &Row| {
        let alone = rows.iter().find(|other| other.subject.is_none() && other.name_len == row.name_len);
        alone.map_or(0.0, Row::shortest)
    };
    let reflected = reflector.shortest() - reset(reflector);
    println!(
        "\n{label:<31}  with reset  (median)   without   over the reflector   reflector = 1, with reset"
    );
    for row in rows {
        let (whole, alone) = (row.shortest(), row.shortest() - reset(row));
        println!(
            "{:<31} {whole:>8.0} ns {:>9} {alone:>6.0} ns {:>17.0} ns {:>12.2}",
            row.label,
            format!("({:.0})", row.median()),
            alone - reflected,
            whole / reflector.shortest(),
        );
    }
}

/// The bare reflector of a hook.
struct Reflector {
    /// The object, which keeps the program.
    object: Ebpf,
    /// The program's name in it.
    name: &'static str,
}

impl Reflector {
    fn load(hook: yardstick::Hook) -> Result<Self> {
        let (object, name) = Yardstick::Reflector.load(hook)?;
        Ok(Self { object, name })
    }

    fn fd(&self) -> Result<&ProgramFd> {
        Ok(self.object.program(self.name).context("loaded by this name")?.fd()?)
    }
}

/// The programs that make the packet anew (`dns-ebpf/src/bin/reset.rs`).
struct Reset {
    ebpf: Ebpf,
}

impl Reset {
    /// Loads the object, which is built together with that of the server.
    fn load() -> Result<Self> {
        let path =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../dns-ebpf/target/bpfel-unknown-none/release/reset");
        let mut ebpf = Ebpf::load_file(&path).with_context(|| path.display().to_string())?;
        for (_, program) in ebpf.programs_mut() {
            match program {
                aya::programs::Program::Xdp(program) => program.load()?,
                aya::programs::Program::SchedClassifier(program) => program.load()?,
                other => anyhow::bail!("a program of type {:?}", other.prog_type()),
            }
        }
        Ok(Self { ebpf })
    }

    /// Sets the packet, and the program that runs on it (none: the reset alone).
    fn prepare(&mut self, at: Hook, subject: Option<&ProgramFd>, packet: &[u8]) -> Result<()> {
        ensure!(packet.len() <= MAX_LEN, "a packet longer than the reset knows");
        let mut bytes = [0; MAX_LEN];
        bytes[..packet.len()].copy_from_slice(packet);
        let original = Original {
            len: packet.len() as u32,
            head_room: if at == Hook::Xdp { XDP_HEAD_ROOM as u32 } else { 0 },
            bytes: zerocopy::transmute!(bytes),
        };
        let words: [u64; size_of::<Original>() / 8] = zerocopy::transmute!(original);
        let mut map: Array<&mut MapData, [u64; size_of::<Original>() / 8]> =
            self.ebpf.map_mut("ORIGINAL").context("no map ORIGINAL")?.try_into()?;
        map.set(0, words, 0)?;
        let name = if at.is_xdp() { "SUBJECT_XDP" } else { "SUBJECT_TC" };
        let mut subjects: ProgramArray<&mut MapData> =
            self.ebpf.map_mut(name).context("no map of subjects")?.try_into()?;
        match subject {
            Some(subject) => subjects.set(0, subject, 0)?,
            None => subjects.clear_index(&0).or_else(|error| match error {
                aya::maps::MapError::SyscallError(ref call)
                    if call.io_error.kind() == std::io::ErrorKind::NotFound =>
                {
                    Ok(())
                }
                error => Err(error),
            })?,
        }
        Ok(())
    }

    /// Time of one run of many over `packet`, ns.
    fn run(&self, at: Hook, packet: &[u8]) -> Result<u128> {
        let options = TestRunOptions { data_in: Some(packet), repeat: REPEAT, ..Default::default() };
        let program = |name| self.ebpf.program(name).context("a program is missing in the object");
        let result = if at.is_xdp() {
            <&Xdp>::try_from(program("reset_xdp")?)?.test_run(options)?
        } else {
            <&SchedClassifier>::try_from(program("reset_tc")?)?.test_run(options)?
        };
        Ok(result.duration.as_nanos())
    }
}

fn addresses(count: u32) -> Published {
    Published {
        v4: (0..count).map(|number| Ipv4Addr::from(0x0a00_0001 + number)).collect(),
        ..Default::default()
    }
}

/// A name of `len` bytes in wire format, its own for each number of answers.
fn name_of(len: usize, answers: u32) -> Vec<u8> {
    const END: &str = "bosh";
    let mut left = len - END.len() - 2;
    let mut text = String::new();
    while left > 0 {
        let label = left.min(21) - 1;
        left -= label + 1;
        text += &format!("{answers:a>label$}.");
    }
    let name = wire(&(text + END));
    assert_eq!(name.len(), len, "lengths are chosen so that no label is empty");
    name
}

/// A name in wire format.
fn wire(name: &str) -> Vec<u8> {
    let labels = name.split('.').flat_map(|label| std::iter::once(label.len() as u8).chain(label.bytes()));
    labels.chain([0]).collect()
}

impl Frame {
    /// The frame; a query asks for `name`, the others are as long as it.
    fn bytes(self, name: &[u8]) -> Vec<u8> {
        let mut frame = query(name);
        let (protocol, port) = PROTOCOL_AND_PORT;
        match self {
            Self::Query => {}
            Self::Segment => frame[protocol] = 6,
            Self::OtherPort => frame[port..port + 2].copy_from_slice(&8080u16.to_be_bytes()),
        }
        frame
    }
}

/// The frame of a query of type A for `name`, over IPv4.
fn query(name: &[u8]) -> Vec<u8> {
    let message = [&[0x12, 0x34, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0], name, &[0, 1, 0, 1]].concat();
    let udp_len = 8 + message.len() as u16;
    let [total, total_low] = (20 + udp_len).to_be_bytes();
    let mut frame = vec![0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 2, 8, 0];
    frame.extend([0x45, 0, total, total_low, 0, 0, 0x40, 0, 64, 17, 0, 0]);
    frame.extend(CLIENT.octets());
    frame.extend(SERVER.octets());
    frame.extend(40_000u16.to_be_bytes());
    frame.extend(53u16.to_be_bytes());
    frame.extend(udp_len.to_be_bytes());
    // No checksum.
    frame.extend([0, 0]);
    frame.extend(message);
    frame
}
