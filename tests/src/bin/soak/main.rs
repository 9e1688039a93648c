//! `cargo xtask soak`: runs the real server in a namespace, under load, with randomly seeded
//! faults; a model built from the same files decides which answers are allowed at any moment.
//!
//! - `model`: the files as written, and the judgement of replies.
//! - `load`: clients that query and verify every reply.
//! - `lease`: how long interfaces answer without userspace.
//! - `recursor`: a recursor that dies and returns; `forwarded`: the judgement of its answers.
//! - `surroundings`: disk, certificates, clock.
//! - `faults`: fault injection, one fault at a time.

use std::{
    process::ExitCode,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use fastrand::Rng;
use serde_json::json;
use whole_system_tests::{
    bpffs::Bpffs,
    interrupt,
    namespace::Namespace,
    server::{Server, folder, merge},
};

mod faults;
mod forwarded;
mod lease;
mod load;
mod model;
mod recursor;
mod surroundings;

use faults::Faults;
use forwarded::Forwarded;
use load::Load;
use model::Model;
use recursor::Recursor;
use surroundings::Surroundings;

/// Length of the lease, and so the age limit of an answer (the default of `xdp.lease`).
const LEASE: Duration = Duration::from_secs(10);

/// Fault-free period before the first fault and after the last.
const QUIET: Duration = Duration::from_secs(3);

/// Command line: `MINUTES SEED|- [FAULT...]`.
struct Arguments {
    length: Duration,
    /// Determines the faults, their order and their lengths.
    seed: u64,
    /// Only faults whose names contain one of these; all if empty.
    only: Vec<String>,
}

impl Arguments {
    fn read() -> Result<Self> {
        let mut words = std::env::args().skip(1);
        let minutes: f64 = words
            .next()
            .map_or(Ok(2.0), |word| word.parse())
            .context("how many minutes")?;
        let seed = words.next().filter(|word| word != "-");
        let seed = seed
            .map_or_else(|| Ok(fastrand::u64(..)), |word| word.parse())
            .context("seed")?;
        ensure!(minutes > 0.0, "a number of minutes above zero");
        Ok(Self {
            length: Duration::from_secs_f64(minutes * 60.0),
            seed,
            only: words.collect(),
        })
    }
}

fn main() -> Result<ExitCode> {
    let Arguments { length, seed, only } = Arguments::read()?;
    interrupt::install()?;
    println!(
        "soak: {:.1} minutes, seed {seed}",
        length.as_secs_f64() / 60.0
    );
    let (namespace, bpffs) = (Namespace::new("soak")?, Bpffs::new()?);
    let model = Arc::new(Model::new());
    let files = folder(&model.next_records(), None)?;
    model.records_written();
    let surroundings = Surroundings::new(files.path())?;
    let mut config = json!({
        "disable_recursors": false,
        "recursors": [recursor::RECURSOR.to_string()],
        "cache": {"enabled": true},
        "control": {"socket": bpffs.path().with_extension("sock")},
        "metrics": {"enabled": true},
        "xdp": {"interfaces": ["lo"], "bpffs": bpffs.path(), "lease": format!("{}s", LEASE.as_secs())},
    });
    merge(&mut config, &surroundings.settings());
    let program = surroundings.program();
    let server = Server::start_program(
        program,
        Some(&namespace),
        files,
        load::SERVER,
        &config,
        |_| {},
    )?;
    let begin = Instant::now();
    let recursor = Arc::new(Recursor::new());
    let recursor_socket = namespace.run(Recursor::bind)??;
    let forwarded = Arc::new(Forwarded::new());
    let load = Load::new(
        Arc::clone(&model),
        Arc::clone(&recursor),
        Arc::clone(&forwarded),
    );
    let faults = thread::scope(|scope| -> Result<Faults<'_>> {
        for number in 0..load::CLIENTS {
            let (namespace, load) = (&namespace, &load);
            scope.spawn(move || namespace.run(|| load.ask_until_ended(number)));
        }
        {
            let (namespace, load, recursor, socket) =
                (&namespace, &load, &recursor, &recursor_socket);
            scope.spawn(move || namespace.run(|| load.ask_recursed_until_ended()));
            scope.spawn(move || recursor.run(socket, || load.is_ended()));
        }
        let around = (&namespace, &bpffs, &surroundings, &*recursor, &*forwarded);
        let mut faults = Faults::new(around, server, &load, &model);
        let thrown = faults.throw(&only, Rng::with_seed(seed), begin, length);
        load.end();
        thrown.map(|()| faults)
    })?;
    println!(
        "\nsoak of {:.0} s, seed {seed}",
        begin.elapsed().as_secs_f64()
    );
    faults.report();
    let holds = forwarded.report(faults.forwarded_hits()) & load.report(LEASE);
    println!("{}", if holds { "holds" } else { "DOES NOT HOLD" });
    Ok(if holds {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}
