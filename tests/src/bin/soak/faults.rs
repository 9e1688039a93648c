//! Fault injection: one fault at a time, its kind and length derived from the seed.

use std::{
    collections::BTreeMap,
    fs,
    net::UdpSocket,
    path::Path,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use dns_kit::metrics::names;
use fastrand::Rng;
use hickory_proto::rr::RecordType;
use nix::sys::signal::Signal;
use whole_system_tests::{
    bpffs::Bpffs,
    client, interrupt,
    metrics::Metrics,
    namespace::Namespace,
    process::{capture, memory},
    server::{self, Server},
};

use crate::{
    QUIET,
    forwarded::Forwarded,
    lease,
    load::{Load, SERVER},
    model::Model,
    recursor::{self, Recursor},
    surroundings::Surroundings,
};

/// Limit for operations that should finish quickly.
const LIMIT: Duration = Duration::from_secs(10);

const FAULTS: &[Fault] = &[
    Fault {
        name: "kill -9",
        throw: |faults, random| faults.kill(random),
    },
    Fault {
        name: "SIGSTOP",
        throw: |faults, random| faults.stop(random),
    },
    Fault {
        name: "SIGHUP",
        throw: |faults, random| faults.reload(random),
    },
    Fault {
        name: "records flap",
        throw: |faults, random| faults.flap(random),
    },
    Fault {
        name: "records broken",
        throw: |faults, random| faults.break_records(random),
    },
    Fault {
        name: "alias comes or goes",
        throw: |faults, random| faults.change_alias(random),
    },
    Fault {
        name: "handlers come and go",
        throw: |faults, random| faults.change_handlers(random),
    },
    Fault {
        name: "interfaces come and go",
        throw: |faults, random| faults.change_interfaces(random),
    },
    Fault {
        name: "recursor dies",
        throw: |faults, random| faults.silence_recursor(random),
    },
    Fault {
        name: "recursor flaps",
        throw: |faults, random| faults.flap_recursor(random),
    },
    Fault {
        name: "cache flushed",
        throw: |faults, random| faults.flush(random),
    },
    Fault {
        name: "cache flushed after kill -9",
        throw: |faults, random| faults.flush_early(random),
    },
    Fault {
        name: "certificates rotate",
        throw: |faults, random| faults.rotate(random),
    },
    Fault {
        name: "disk full",
        throw: |faults, random| faults.fill_disk(random),
    },
    Fault {
        name: "clock jumps",
        throw: |faults, random| faults.move_clock(random),
    },
    Fault {
        name: "flood of useless names",
        throw: |faults, random| faults.flood(random),
    },
    Fault {
        name: "hostile packets",
        throw: |faults, random| faults.attack(random),
    },
];

/// A kind of fault.
struct Fault {
    name: &'static str,
    /// Injects the fault and reverts it.
    throw: fn(&mut Faults<'_>, &mut Rng) -> Result<()>,
}

/// The surroundings of a server under test.
type Around<'a> = (
    &'a Namespace,
    &'a Bpffs,
    &'a Surroundings,
    &'a Recursor,
    &'a Forwarded,
);

/// Injects faults into a server.
pub(crate) struct Faults<'a> {
    namespace: &'a Namespace,
    bpffs: &'a Bpffs,
    surroundings: &'a Surroundings,
    recursor: &'a Recursor,
    forwarded: &'a Forwarded,
    server: Server,
    /// Informed of running faults.
    load: &'a Load,
    /// Informed of written files.
    model: &'a Model,
    /// Whether the alias file exists.
    alias: bool,
    /// Number of faults injected, by kind.
    thrown: BTreeMap<&'static str, u32>,
    /// Peak resident memory of the server per minute, in KiB.
    memory: Vec<u64>,
    /// Forwarded answers that interfaces gave: before the last restart, and since.
    forwarded_hits: (u64, u64),
}

impl<'a> Faults<'a> {
    pub(crate) fn new(
        (namespace, bpffs, surroundings, recursor, forwarded): Around<'a>,
        server: Server,
        load: &'a Load,
        model: &'a Model,
    ) -> Self {
        let (thrown, memory) = (BTreeMap::new(), Vec::new());
        Self {
            namespace,
            bpffs,
            surroundings,
            recursor,
            forwarded,
            server,
            load,
            model,
            alias: false,
            thrown,
            memory,
            forwarded_hits: (0, 0),
        }
    }

    /// Injects faults until `length` has passed: those whose names contain a word of `only`, or all.
    pub(crate) fn throw(
        &mut self,
        only: &[String],
        mut random: Rng,
        begin: Instant,
        length: Duration,
    ) -> Result<()> {
        let is_wanted =
            |fault: &&Fault| only.is_empty() || only.iter().any(|word| fault.name.contains(word));
        let faults: Vec<&Fault> = FAULTS.iter().filter(is_wanted).collect();
        ensure!(!faults.is_empty(), "no fault matches {only:?}");
        thread::sleep(QUIET);
        while begin.elapsed() + QUIET < length {
            ensure!(!interrupt::requested(), "interrupted");
            let fault = faults[random.usize(..faults.len())];
            *self.thrown.entry(fault.name).or_default() += 1;
            self.load.fault_begins(fault.name);
            (fault.throw)(self, &mut random)
                .with_context(|| format!("{}\n{}", fault.name, self.log_end()))?;
            thread::sleep(Duration::from_millis(random.u64(100..1500)));
            self.note_memory(begin)?;
            self.note_hits();
            self.surroundings.shorten_log()?;
        }
        thread::sleep(QUIET);
        Ok(())
    }

    /// Returns the last lines of the server's log.
    fn log_end(&self) -> String {
        let log = self.server.log();
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(12)..].join("\n")
    }

    /// Records the server's resident memory.
    fn note_memory(&mut self, begin: Instant) -> Result<()> {
        let kib = memory(self.server.pid(), "VmRSS")? >> 10;
        let minute = (begin.elapsed().as_secs() / 60) as usize;
        self.memory.resize(self.memory.len().max(minute + 1), 0);
        self.memory[minute] = self.memory[minute].max(kib);
        Ok(())
    }

    /// Records how many forwarded answers interfaces gave; a server that is not ready gives no count.
    fn note_hits(&mut self) {
        let Ok(metrics) = Metrics::read(self.namespace) else {
            return;
        };
        let hits = metrics.sum(names::FAST_PATH_PACKETS_TOTAL, "outcome=\"hit_forwarded\"");
        let (before, since) = &mut self.forwarded_hits;
        if hits < *since {
            *before += *since;
        }
        *since = hits;
    }

    /// Returns how many forwarded answers interfaces gave, at least.
    pub(crate) fn forwarded_hits(&self) -> u64 {
        self.forwarded_hits.0 + self.forwarded_hits.1
    }

    /// Prints the injected faults and the server's memory.
    pub(crate) fn report(&self) {
        for (name, count) in &self.thrown {
            println!("{count:6} × {name}");
        }
        let mib: Vec<String> = self
            .memory
            .iter()
            .map(|kib| format!("{:.0}", *kib as f64 / 1024.0))
            .collect();
        println!("memory, most of each minute, MiB: {}", mib.join(" "));
    }

    /// Reports that userspace stopped, and until when interfaces answer.
    fn userspace_went(&self) -> Result<()> {
        self.load.interfaces_answer_until(lease::ends(self.bpffs)?);
        Ok(())
    }

    /// Kills the server and restarts it before the lease expires.
    fn kill(&mut self, random: &mut Rng) -> Result<()> {
        self.load.userspace_goes();
        self.server.process().kill(LIMIT)?;
        self.userspace_went()?;
        thread::sleep(Duration::from_millis(random.u64(0..4000)));
        self.server.restart(Some(self.namespace))?;
        self.load.userspace_is_back();
        Ok(())
    }

    /// Stops the server with SIGSTOP for less than the lease.
    fn stop(&mut self, random: &mut Rng) -> Result<()> {
        self.load.userspace_goes();
        self.server.process().signal(Signal::SIGSTOP)?;
        self.userspace_went()?;
        thread::sleep(Duration::from_millis(random.u64(100..5000)));
        self.server.process().signal(Signal::SIGCONT)?;
        self.load.userspace_is_back();
        Ok(())
    }

    fn reload(&mut self, random: &mut Rng) -> Result<()> {
        for _ in 0..random.u8(1..20) {
            self.server.process().signal(Signal::SIGHUP)?;
            thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }

    /// Replaces the records 50 times per second.
    fn flap(&mut self, random: &mut Rng) -> Result<()> {
        for _ in 0..random.u16(1..250) {
            self.write_records()?;
            thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    /// Installs unreadable records, then valid ones.
    fn break_records(&mut self, random: &mut Rng) -> Result<()> {
        let file = self.server.folder.path().join("records.json");
        let good = fs::read(&file)?;
        replace(&file, &good[..random.usize(..good.len())])?;
        thread::sleep(Duration::from_millis(random.u64(0..2000)));
        self.write_records()
    }

    /// Installs the next version of the records.
    fn write_records(&self) -> Result<()> {
        replace(
            &self.server.folder.path().join("records.json"),
            &self.model.next_records(),
        )?;
        self.model.records_written();
        Ok(())
    }

    /// Creates or removes the alias file.
    fn change_alias(&mut self, _: &mut Rng) -> Result<()> {
        let file = self.server.folder.path().join("aliases/web.json");
        self.alias = !self.alias;
        self.model.alias_changes(self.alias);
        if self.alias {
            replace(&file, &Model::alias_file())
        } else {
            Ok(fs::remove_file(file)?)
        }
    }

    /// Creates and removes handlers for names without queries.
    fn change_handlers(&mut self, random: &mut Rng) -> Result<()> {
        let file = self.server.folder.path().join("handlers/deny.json");
        for number in 0..random.u8(1..6) {
            let handler =
                format!(r#"[{{"domain": "n{number}.test.", "source": {{"type": "deny"}}}}]"#);
            replace(&file, handler.as_bytes())?;
            thread::sleep(Duration::from_millis(random.u64(0..500)));
        }
        Ok(fs::remove_file(file)?)
    }

    /// Creates and removes interfaces.
    fn change_interfaces(&mut self, random: &mut Rng) -> Result<()> {
        for _ in 0..random.u8(1..8) {
            self.namespace
                .ip("link add soak0 type veth peer name soak1")?;
            self.namespace.ip("addr add 169.254.9.1/24 dev soak0")?;
            self.namespace.ip("link set soak0 up")?;
            thread::sleep(Duration::from_millis(random.u64(0..300)));
            self.namespace.ip("link del soak0")?;
        }
        Ok(())
    }

    /// Queries valid names, each only once.
    fn flood(&mut self, random: &mut Rng) -> Result<()> {
        let count = random.u32(1000..20_000);
        let begin = random.u32(..);
        self.send(count, |number| {
            let name = format!("q-s0x{}.q-g1.bosh.", begin.wrapping_add(number));
            Ok(client::query(&name, RecordType::A, None)?.to_vec()?)
        })
    }

    /// Sends noise and queries with a few bytes modified or cut off.
    fn attack(&mut self, random: &mut Rng) -> Result<()> {
        let query = client::query("q-s0.q-g1.bosh.", RecordType::A, Some(1232))?.to_vec()?;
        let mut random = random.fork();
        self.send(random.u32(1000..20_000), |_| {
            let mut bytes = query.clone();
            for _ in 0..random.u8(1..6) {
                let place = random.usize(..bytes.len());
                bytes[place] = random.u8(..);
            }
            bytes.truncate(random.usize(..=bytes.len() * 2));
            Ok(bytes)
        })
    }

    /// The recursor stops answering.
    fn silence_recursor(&mut self, random: &mut Rng) -> Result<()> {
        self.recursor.live(false);
        thread::sleep(Duration::from_millis(random.u64(100..8000)));
        self.recursor.live(true);
        Ok(())
    }

    /// The recursor stops answering and returns again and again.
    fn flap_recursor(&mut self, random: &mut Rng) -> Result<()> {
        for _ in 0..random.u8(2..12) {
            self.recursor.live(false);
            thread::sleep(Duration::from_millis(random.u64(10..1500)));
            self.recursor.live(true);
            thread::sleep(Duration::from_millis(random.u64(10..1500)));
        }
        Ok(())
    }

    /// Flushes the caches, or one name, several times.
    fn flush(&mut self, random: &mut Rng) -> Result<()> {
        for _ in 0..random.u8(1..12) {
            let number = random.u8(..recursor::NAMES);
            let name = recursor::name(number);
            let (arguments, names): (&[&str], _) = match random.u8(..3) {
                0 => (&["all"], 0..recursor::NAMES),
                1 => (&["--zone", "recursed.test"], 0..recursor::NAMES),
                _ => (&[&name], number..number + 1),
            };
            let begin = Instant::now();
            let mut command = self.namespace.command(server::program()?)?;
            command.args(["cache", "flush"]).args(arguments);
            command
                .arg("--config")
                .arg(self.server.folder.path().join("config.json"));
            capture(&mut command)?;
            self.forwarded.flushed(names, begin);
            thread::sleep(Duration::from_millis(random.u64(..1000)));
        }
        Ok(())
    }

    /// Kills and restarts the server, and flushes its caches as soon as it answers.
    fn flush_early(&mut self, random: &mut Rng) -> Result<()> {
        self.kill(random)?;
        self.flush(random)
    }

    /// Rotates certificates; some of the new ones are unusable at first.
    fn rotate(&mut self, random: &mut Rng) -> Result<()> {
        for _ in 0..random.u8(1..5) {
            if random.bool() {
                self.surroundings.spoil_certificates(random)?;
                thread::sleep(Duration::from_millis(random.u64(0..2000)));
            }
            self.surroundings.rotate()?;
            thread::sleep(Duration::from_millis(random.u64(0..2000)));
        }
        Ok(())
    }

    /// Fills the disk of the log while the server logs a lot.
    fn fill_disk(&mut self, random: &mut Rng) -> Result<()> {
        self.surroundings.fill_disk()?;
        let done = self.reload(random);
        thread::sleep(Duration::from_millis(random.u64(0..2000)));
        self.surroundings.free_disk()?;
        done
    }

    /// Like [`Self::kill`], but the restarted server sees another monotonic clock. The wall clock stays
    /// unchanged because it belongs to the whole machine.
    fn move_clock(&mut self, random: &mut Rng) -> Result<()> {
        self.surroundings.set_clock_ahead(random.u32(..1_000_000))?;
        self.kill(random)
    }

    /// Sends `count` messages without waiting for replies.
    fn send(
        &self,
        count: u32,
        mut message: impl FnMut(u32) -> Result<Vec<u8>> + Send,
    ) -> Result<()> {
        self.namespace.run(|| -> Result<()> {
            let socket = UdpSocket::bind("127.0.0.1:0")?;
            for number in 0..count {
                // A full send queue is expected here.
                let _ = socket.send_to(&message(number)?, SERVER);
                if number.is_multiple_of(64) {
                    thread::sleep(Duration::from_millis(1));
                }
            }
            Ok(())
        })?
    }
}

/// Replaces a file atomically, as the BOSH agent does.
fn replace(path: &Path, contents: &[u8]) -> Result<()> {
    let beside = path.with_extension("new");
    fs::write(&beside, contents)?;
    Ok(fs::rename(beside, path)?)
}
