//! Cost of the BPF programs per packet by `BPF_PROG_TEST_RUN`, with the bare reflector measured in
//! the same run.
//!
//! A run restores the packet and runs the program on it. The cost of restoring is measured
//! separately and subtracted. The rounds of all rows are interleaved, and the shortest one counts:
//! every disturbance adds time, and a neighbour on the same core may disturb for seconds. The
//! median in the next column shows how much.

use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};

use anyhow::{Context as _, Result, ensure};
use aya::{
    Ebpf, TestRun as _, TestRunOptions,
    maps::{Array, MapData, ProgramArray},
    programs::{ProgramFd, SchedClassifier, Xdp},
};
use bench_programs::reset::{MAX_LEN, MAX_PACKETS, Original, Turn};
use bosh_dns_xdp_benches::is_wanted;
use dns_common::{XDP_HEAD_ROOM, counters::Outcome, entry::AnswerPolicy};
use dns_core::name::Name;
use dns_fastpath::{
    AnswerQuestion,
    forwarded::{LocalReply, encode_local},
};
use whole_system_tests::{
    checksum::udp_frame,
    cpu::stay_on,
    program::{Hook, Program, Published},
    requires,
    yardstick::{self, Yardstick},
};
use zerocopy::IntoBytes as _;

/// Runs per measurement: about a millisecond, short enough to be undisturbed often.
const REPEAT: u32 = 5_000;
/// Measurements of each row.
const ROUNDS: usize = 100;
/// Other published names, as in a fleet of 1,000 instances.
const OTHER_NAMES: u32 = 1_300;
const A: u16 = 1;
const TXT: u16 = 16;
/// Lengths of the queried names in bytes.
const NAME_LENGTHS: [usize; 3] = [14, 40, 90];
/// Numbers of addresses of the mixed names, in turn.
const MIXED_ANSWERS: [u32; 4] = [1, 3, 6, 10];
/// Offsets of the IP header's protocol and of UDP's destination port in a frame.
const PROTOCOL_AND_PORT: (usize, usize) = (14 + 9, 14 + 20 + 2);
const SERVER: Ipv4Addr = Ipv4Addr::new(169, 254, 0, 2);
/// Source address of the frames.
const CLIENT: Ipv4Addr = Ipv4Addr::new(169, 254, 0, 1);

fn main() -> Result<()> {
    requires!(bpf);
    // `cargo bench --bench program -- TEXT` runs only rows with this text in their label.
    let wanted: Vec<String> = std::env::args()
        .skip(1)
        .filter(|word| !word.starts_with('-'))
        .collect();
    measure(ROUNDS, &wanted)
}

/// Measures the rows whose label contains one of `wanted` and prints them.
pub(crate) fn measure(rounds: usize, wanted: &[String]) -> Result<()> {
    // A run on another CPU would begin with cold caches.
    stay_on_one_cpu()?;
    let mut program = Program::load()?;
    program.set_endpoints(&[SocketAddr::from((SERVER, 53))]);
    for number in 0..OTHER_NAMES {
        let name = wire(&format!("other-{number}.q-g0.bosh"));
        program.publish(&name, &addresses(8))?;
    }
    let mut reset = Reset::load()?;
    for (label, measured, hook) in [
        ("xdp", Hook::Xdp, yardstick::Hook::Native),
        ("tc", Hook::Tc, yardstick::Hook::Tc),
    ] {
        let reflector = Reflector::load(hook)?;
        let mut rows = rows(measured, program.fd(measured)?, reflector.fd()?)?;
        // These stay whatever is wanted: `print` subtracts them from the others.
        let is_yardstick = |row: &Row| matches!(row.expected, Expected::Nothing);
        rows.retain(|row| {
            is_yardstick(row) || is_wanted(wanted, &format!("{label}: {}", row.label))
        });
        for row in &rows {
            match row.expected {
                Expected::Counted(Outcome::Hit) => {
                    for (name, answers) in row.names(0).iter().zip(row.answers()) {
                        program.publish(
                            name,
                            &Published {
                                policy: row.policy,
                                ..addresses(answers)
                            },
                        )?;
                    }
                }
                Expected::Counted(Outcome::HitOther) => {
                    let seed = program.control().hash_seed;
                    let entry = local_reply(&row.names(0)[0], row.answers - 200, seed)?;
                    program.publish_answer(entry.as_bytes())?;
                }
                _ => {}
            }
        }
        for round in 0..rounds {
            for row in &mut rows {
                row.measure(round, &mut program, &mut reset)?;
            }
        }
        print(label, &rows);
    }
    Ok(())
}

/// Pins this thread, and with it the runs, to its current CPU.
fn stay_on_one_cpu() -> Result<()> {
    // SAFETY: no precondition.
    let cpu = usize::try_from(unsafe { libc::sched_getcpu() }).context("no number of this CPU")?;
    stay_on(cpu)
}

/// A program with a packet.
struct Row {
    label: String,
    /// The program; `None` measures restoring the packet alone.
    subject: Option<ProgramFd>,
    /// Hook of the program that restores the packet.
    at: Hook,
    queried: Queried,
    /// Number of addresses of the name.
    answers: u32,
    /// How addresses are sent, if not with the default policy.
    policy: Option<AnswerPolicy>,
    /// Generation of whole answers, for which the program looks unless it is 0.
    generation: u64,
    frame: Frame,
    /// The expected result of each run.
    expected: Expected,
    /// Time of one run by round, in ns.
    times: Vec<u128>,
}

/// The queried names.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Queried {
    /// One name of this length in bytes, so that branches are predicted.
    One(usize),
    /// [`MAX_PACKETS`] names of different lengths and numbers of addresses, in turn.
    Mixed,
}

/// The kind of packet.
#[derive(Clone, Copy)]
enum Frame {
    Query,
    /// A query of type TXT.
    OtherType,
    Segment,
    /// A UDP datagram for another service.
    OtherPort,
}

/// The result of a run.
#[derive(Clone, Copy)]
enum Expected {
    /// The program counts no outcome.
    Nothing,
    /// The program counts this outcome.
    Counted(Outcome),
}

/// Returns all rows of a hook: the reflector, restoring alone, other traffic, misses and hits.
fn rows(at: Hook, measured: &ProgramFd, reflector: &ProgramFd) -> Result<Vec<Row>> {
    let hook = HookPrograms {
        at,
        measured,
        reflector,
    };
    let mut rows = hook.baselines()?;
    rows.extend(hook.other_traffic()?);
    rows.extend(hook.misses()?);
    rows.extend(hook.hits()?);
    rows.extend(hook.mixed_names()?);
    rows.extend(hook.consul_services()?);
    rows.extend(hook.other_types()?);
    Ok(rows)
}

/// The programs at a hook, from which rows are made.
struct HookPrograms<'p> {
    at: Hook,
    measured: &'p ProgramFd,
    reflector: &'p ProgramFd,
}

impl HookPrograms<'_> {
    fn row(
        &self,
        label: String,
        subject: Option<&ProgramFd>,
        name_len: usize,
        answers: u32,
        expected: Expected,
    ) -> Result<Row> {
        Ok(Row {
            label,
            subject: subject.map(ProgramFd::try_clone).transpose()?,
            at: self.at,
            queried: Queried::One(name_len),
            answers,
            policy: None,
            generation: 0,
            frame: Frame::Query,
            expected,
            times: Vec::new(),
        })
    }

    /// Returns a row of the measured program, which counts `outcome` for each packet.
    fn counted(
        &self,
        label: String,
        name_len: usize,
        answers: u32,
        outcome: Outcome,
    ) -> Result<Row> {
        let expected = Expected::Counted(outcome);
        self.row(label, Some(self.measured), name_len, answers, expected)
    }

    /// Returns what the other rows are compared with: the reflector, and restoring alone.
    fn baselines(&self) -> Result<Vec<Row>> {
        let reflector = Some(self.reflector);
        let mut rows = vec![self.row("reflector".into(), reflector, 14, 0, Expected::Nothing)?];
        // Restoring copies the packet, so its cost depends on the length.
        for name_len in NAME_LENGTHS {
            let label = format!("reset alone, name of {name_len} bytes");
            rows.push(self.row(label, None, name_len, 0, Expected::Nothing)?);
        }
        Ok(rows)
    }

    /// Returns the cost for traffic that is not DNS.
    fn other_traffic(&self) -> Result<Vec<Row>> {
        let mut rows = Vec::new();
        for (label, frame) in [
            ("TCP segment", Frame::Segment),
            ("another UDP service", Frame::OtherPort),
        ] {
            rows.push(Row {
                frame,
                ..self.counted(label.into(), 14, 0, Outcome::NotOurs)?
            });
        }
        Ok(rows)
    }

    fn misses(&self) -> Result<Vec<Row>> {
        let mut rows = Vec::new();
        for name_len in NAME_LENGTHS {
            let label = format!("miss, name of {name_len} bytes");
            rows.push(self.counted(label, name_len, 0, Outcome::NotPublished)?);
        }
        for name_len in NAME_LENGTHS {
            let label = format!("miss also of whole answers, name of {name_len} bytes");
            rows.push(Row {
                generation: 1,
                ..self.counted(label, name_len, 0, Outcome::NotPublished)?
            });
        }
        Ok(rows)
    }

    fn hits(&self) -> Result<Vec<Row>> {
        let mut rows = Vec::new();
        for answers in [1, 3, 10, 24] {
            for name_len in NAME_LENGTHS {
                let label = format!("{answers} answers, name of {name_len} bytes");
                rows.push(self.counted(label, name_len, answers, Outcome::Hit)?);
            }
        }
        Ok(rows)
    }

    /// Returns the cost of names that take turns, and of restoring their packets.
    fn mixed_names(&self) -> Result<Vec<Row>> {
        let label = "reset alone, 64 names in turn".to_owned();
        let reset = self.row(label, None, 0, 0, Expected::Nothing)?;
        let label = "1 to 10 answers, 64 names in turn".to_owned();
        let hits = self.counted(label, 0, 0, Outcome::Hit)?;
        let mut rows = vec![reset, hits];
        for row in &mut rows {
            row.queried = Queried::Mixed;
        }
        Ok(rows)
    }

    /// Returns rows like Consul services: with a TTL, and as many addresses as its defaults send to a client
    /// without EDNS.
    fn consul_services(&self) -> Result<Vec<Row>> {
        let mut rows = Vec::new();
        for (answers, plain) in [(3, 3), (24, 3), (24, 0)] {
            let all = if plain == 0 {
                String::new()
            } else {
                format!("{plain} of ")
            };
            let label = format!("{all}{answers} answers with Consul's policy, name of 40 bytes");
            rows.push(Row {
                policy: Some(AnswerPolicy::new(7, 0, [plain; 2], false, false)),
                ..self.counted(label, 40, answers, Outcome::Hit)?
            });
        }
        Ok(rows)
    }

    /// Returns the cost of whole answers, with as many bytes as these answers of type A.
    fn other_types(&self) -> Result<Vec<Row>> {
        let mut rows = Vec::new();
        for answers in [3, 10, 24] {
            let label = format!("another type, like {answers} answers, name of 40 bytes");
            rows.push(Row {
                generation: 1,
                frame: Frame::OtherType,
                // `measure` takes the 200 off again: with it, no other row has this name.
                ..self.counted(label, 40, 200 + answers, Outcome::HitOther)?
            });
        }
        Ok(rows)
    }
}

impl Row {
    /// Returns the names queried in a round. Some unpublished names share a tag in the index with a
    /// published one and cost an additional comparison, so each round uses another name.
    fn names(&self, round: usize) -> Vec<Vec<u8>> {
        let len = match self.queried {
            Queried::One(len) => len,
            Queried::Mixed => {
                // Room for three digits in the last label.
                let lens = (NAME_LENGTHS[0]..=NAME_LENGTHS[2])
                    .filter(|len| !(1..=3).contains(&((len - 6) % 21)));
                let names = (500..).zip(lens).map(|(number, len)| name_of(len, number));
                return names.take(MAX_PACKETS as usize).collect();
            }
        };
        let number = match self.expected {
            Expected::Counted(Outcome::NotPublished) => 1000 + round as u32,
            // A distinct name for each number of answers and policy.
            _ => {
                self.answers
                    + self
                        .policy
                        .map_or(0, |policy| 100 + 100 * policy.plain(false) as u32)
            }
        };
        vec![name_of(len, number)]
    }

    /// Returns the number of addresses of each name.
    fn answers(&self) -> Vec<u32> {
        match self.queried {
            Queried::One(_) => vec![self.answers],
            Queried::Mixed => MIXED_ANSWERS
                .into_iter()
                .cycle()
                .take(MAX_PACKETS as usize)
                .collect(),
        }
    }

    /// Measures a round and checks the result of every run.
    fn measure(&mut self, round: usize, program: &mut Program, reset: &mut Reset) -> Result<()> {
        let packets: Vec<_> = self
            .names(round)
            .iter()
            .map(|name| self.frame.bytes(name))
            .collect();
        // Rows with and without whole answers take turns on the same programs.
        program.set_control(|control| control.answer_generation = self.generation);
        reset.prepare(self.at, self.subject.as_ref(), &packets)?;
        let before = program.counters().outcomes;
        let time = reset.run(self.at, &packets[0])?;
        let after = program.counters().outcomes;
        for &outcome in Outcome::ALL {
            // A run that ended in another way has another cost, so it must not be among the times.
            let counted = after[outcome as usize] - before[outcome as usize];
            let expected = match self.expected {
                Expected::Counted(expected) if expected == outcome => u64::from(REPEAT),
                _ => 0,
            };
            ensure!(
                counted == expected,
                "{}: {counted} times {outcome:?}, not {expected}",
                self.label
            );
        }
        self.times.push(time);
        Ok(())
    }

    /// Returns the shortest round in ns.
    fn shortest(&self) -> f64 {
        self.times.iter().min().map_or(0.0, |&time| time as f64)
    }

    /// Returns the median of the rounds in ns.
    fn median(&self) -> f64 {
        let mut times = self.times.clone();
        times.sort_unstable();
        times[times.len() / 2] as f64
    }
}

/// Prints the rows of a hook. The first row must be the reflector, and every name length needs a
/// row for restoring alone.
fn print(label: &str, rows: &[Row]) {
    let [reflector, ..] = rows else { return };
    let reset = |row: &Row| {
        let alone = rows
            .iter()
            .find(|other| other.subject.is_none() && other.queried == row.queried);
        alone.map_or(0.0, Row::shortest)
    };
    let reflected = reflector.shortest() - reset(reflector);
    println!(
        "\n{label:<31}  with reset  (median)   without   over the reflector   reflector = 1, with reset"
    );
    for row in rows {
        let whole = row.shortest();
        let alone = row.shortest() - reset(row);
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
    /// The object that owns the program.
    object: Ebpf,
    /// Name of the program in the object.
    name: &'static str,
}

impl Reflector {
    fn load(hook: yardstick::Hook) -> Result<Self> {
        let (object, name) = Yardstick::Reflector.load(hook)?;
        Ok(Self { object, name })
    }

    fn fd(&self) -> Result<&ProgramFd> {
        Ok(self
            .object
            .program(self.name)
            .context("loaded by this name")?
            .fd()?)
    }
}

/// The programs that restore the packet (`benches/programs/ebpf/src/reset.rs`).
struct Reset {
    ebpf: Ebpf,
}

impl Reset {
    fn load() -> Result<Self> {
        let mut ebpf = Ebpf::load(bench_programs::RESET)?;
        for (_, program) in ebpf.programs_mut() {
            match program {
                aya::programs::Program::Xdp(program) => program.load()?,
                aya::programs::Program::SchedClassifier(program) => program.load()?,
                other => anyhow::bail!("a program of type {:?}", other.prog_type()),
            }
        }
        Ok(Self { ebpf })
    }

    /// Sets the packets, which take turns, and the program to run on them (`None` restores only). The
    /// number of packets must be a power of two.
    fn prepare(
        &mut self,
        at: Hook,
        subject: Option<&ProgramFd>,
        packets: &[Vec<u8>],
    ) -> Result<()> {
        for (index, packet) in (0..).zip(packets) {
            ensure!(
                packet.len() <= MAX_LEN,
                "a packet longer than the reset knows"
            );
            let mut bytes = [0; MAX_LEN];
            bytes[..packet.len()].copy_from_slice(packet);
            let original = Original {
                len: packet.len() as u32,
                head_room: if at == Hook::Xdp {
                    XDP_HEAD_ROOM as u32
                } else {
                    0
                },
                bytes: zerocopy::transmute!(bytes),
            };
            let words: [u64; size_of::<Original>() / 8] = zerocopy::transmute!(original);
            self.set("ORIGINAL", index, words)?;
        }
        let turn = Turn {
            count: 0,
            mask: packets.len() as u32 - 1,
            len: packets[0].len() as u32,
        };
        let words: [u32; size_of::<Turn>() / 4] = zerocopy::transmute!(turn);
        self.set("TURN", 0, words)?;
        let name = if at.is_xdp() {
            "SUBJECT_XDP"
        } else {
            "SUBJECT_TC"
        };
        let mut subjects: ProgramArray<&mut MapData> = self
            .ebpf
            .map_mut(name)
            .context("no map of subjects")?
            .try_into()?;
        match subject {
            Some(subject) => subjects.set(0, subject, 0)?,
            // Clearing an empty slot is an error (ENOENT), and the first row to restore alone finds
            // it empty.
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

    /// Sets an element of an array of the reset programs.
    fn set(&mut self, name: &str, index: u32, element: impl aya::Pod) -> Result<()> {
        let map = self
            .ebpf
            .map_mut(name)
            .with_context(|| format!("no map {name}"))?;
        Ok(Array::<&mut MapData, _>::try_from(map)?.set(index, element, 0)?)
    }

    /// Returns the mean time of one run, the first one over `packet`, in ns.
    fn run(&self, at: Hook, packet: &[u8]) -> Result<u128> {
        let options = TestRunOptions {
            data_in: Some(packet),
            repeat: REPEAT,
            ..Default::default()
        };
        let program = |name| {
            self.ebpf
                .program(name)
                .context("a program is missing in the object")
        };
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
        v4: (0..count)
            .map(|number| Ipv4Addr::from(0x0a00_0001 + number))
            .collect(),
        ..Default::default()
    }
}

/// Returns the entry of a reply with as many TXT records of 16 bytes each, in eight orders.
fn local_reply(name: &[u8], records: u32, seed: u64) -> Result<Vec<u64>> {
    let message = |turn: u32| {
        let mut message = [
            &[0, 0, 0x85, 0x80, 0, 1, 0, records as u8, 0, 0, 0, 0],
            name,
            &[0, 16, 0, 1],
        ]
        .concat();
        for record in 0..records {
            let text = [3, b'a', b'a', b'a' + ((record + turn) % records) as u8];
            message.extend([&[0xc0, 12, 0, 16, 0, 1, 0, 0, 0, 0, 0, 4][..], &text].concat());
        }
        message
    };
    let orders: Vec<Vec<u8>> = (0..8).map(message).collect();
    let (name, _) = Name::from_wire(name)?;
    let question = AnswerQuestion {
        name,
        qtype: TXT,
        dnssec_ok: false,
        checking_disabled: false,
    };
    let wide = orders.clone();
    let wide_limits = [513, u16::MAX];
    let reply = LocalReply {
        plain: orders.clone(),
        narrow: orders,
        wide,
        wide_limits,
        serial: 0,
        since_ns: 0,
    };
    encode_local(&reply, &question, seed).context("the programs can give it")
}

/// Returns a name of `len` bytes in wire format, distinct for each number of answers.
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
    assert_eq!(
        name.len(),
        len,
        "lengths are chosen so that no label is empty"
    );
    name
}

fn wire(name: &str) -> Vec<u8> {
    let labels = name
        .split('.')
        .flat_map(|label| std::iter::once(label.len() as u8).chain(label.bytes()));
    labels.chain([0]).collect()
}

impl Frame {
    /// Returns the frame. A query contains `name`; frames of other kinds have the same length.
    fn bytes(self, name: &[u8]) -> Vec<u8> {
        let mut frame = query(
            name,
            if matches!(self, Self::OtherType) {
                TXT
            } else {
                A
            },
        );
        let (protocol, port) = PROTOCOL_AND_PORT;
        match self {
            Self::Query | Self::OtherType => {}
            Self::Segment => frame[protocol] = 6,
            Self::OtherPort => frame[port..port + 2].copy_from_slice(&8080u16.to_be_bytes()),
        }
        frame
    }
}

/// Returns the frame of a query for `name` over IPv4.
fn query(name: &[u8], qtype: u16) -> Vec<u8> {
    let [high, low] = qtype.to_be_bytes();
    let message = [
        &[0x12, 0x34, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0],
        name,
        &[high, low, 0, 1],
    ]
    .concat();
    udp_frame(
        [[0; 6], [2, 0, 0, 0, 0, 2]],
        SocketAddrV4::new(CLIENT, 40_000),
        SocketAddrV4::new(SERVER, 53),
        &message,
    )
}
