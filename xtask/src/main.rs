//! The entry point for developers: `cargo xtask <command>`.
//!
//! Each command sets up its requirements, reports installations, and does no set-up work if
//! everything is present.

use std::{
    path::{Path, PathBuf},
    process::{Command as Process, ExitCode},
};

use anyhow::Result;
use clap::{Parser, Subcommand};

mod arm64;
mod dist;
mod docs;
mod fuzz;
mod kernel;
mod mutants;
mod packages;
mod process;
mod release;
mod test;
mod toolchain;

#[path = "../../benches/src/bin/bench/arguments.rs"]
mod bench_arguments;
#[path = "../../benches/demo/src/arguments.rs"]
mod demo_arguments;

/// Build, demonstrate, test and measure bosh-dns-xdp.
#[derive(Parser)]
#[command(name = "cargo xtask")]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Build the BPF programs and the server, installing the BPF toolchain if it is missing.
    Build {
        /// Build without optimisation, for development.
        #[arg(long)]
        debug: bool,
    },
    /// Run the real server on a generated foundation between two network namespaces and show its behaviour.
    #[command(disable_help_flag = true)]
    Demo {
        /// Further arguments of the demo: `--help` lists them.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// Run all checks: format, lints, links, unit tests, packet fixtures, whole-system tests.
    Test {
        /// Run only tests whose name contains one of these, and none of the other checks.
        filters: Vec<String>,
        /// Run only format, lints, unit tests and the recorded cases on both paths: the loop for a first
        /// patch. Leaves out documentation, packages, virtual machines and the other whole-system tests.
        #[arg(long, conflicts_with = "filters")]
        quick: bool,
        /// Test the optimised server, as before a release. Without it, the server is built with the tests, and its
        /// arithmetic is checked for overflow.
        #[arg(long, conflicts_with = "quick")]
        optimised: bool,
    },
    /// Test the BPF programs and the real server on another kernel, in a virtual machine.
    ///
    /// Runs all packet fixtures at every hook, then the server in each mode. Prints a line per mode: how the
    /// programs were loaded (verified instructions, time), which hooks serve `lo` and a veth, whether they
    /// answer, also after kill -9, and whether a new server takes over. The machine is emulated: a run takes
    /// a minute or two, and times are several times higher than on hardware.
    KernelTest {
        /// Kernel image, an x86-64 bzImage.
        image: PathBuf,
        /// Folder that contains the kernel's modules (veth, sch_ingress, cls_bpf), unless they are built in.
        modules: Option<PathBuf>,
    },
    /// Build all programs for arm64 from this x86-64 machine, or test them there.
    ///
    /// Installs Debian's cross compiler and unpacks Debian's Rust libraries for arm64. `test` runs unit tests
    /// of the wire format under qemu-user, then the packet fixtures and the server in every mode in virtual
    /// machines with Debian's arm64 kernels (6.1 and 6.12). The machines are emulated: expect some minutes.
    Arm64 {
        #[command(subcommand)]
        command: arm64::Arm64,
    },
    /// Build the release artifacts into dist/: Debian package, BOSH release, image, bill of
    /// materials, checksums.
    Dist(dist::Dist),
    /// Check, build, and sign a release: the artifacts of `dist` with exactly this version.
    Release(release::ReleaseArguments),
    /// Build the documentation book into target/book and the crates' API documentation into target/doc; check every
    /// link.
    Docs,
    /// Run the fuzz targets from their corpora, the BPF programs against their model, or a server with
    /// the fast path against one without.
    ///
    /// The targets of tests/fuzz are libFuzzer targets of userspace code. With --program, random and mutated
    /// packets run through each BPF program in this kernel (BPF_PROG_TEST_RUN), and every reply is compared
    /// with the model in tests/tests/packets/model.rs. With --interfaces, random packets reach two servers in
    /// random set-ups (paths, addresses, MTU, packet filter rules), and the one with the fast path must
    /// answer exactly as the other. With --replies, random and mutated replies of recursors are cached and
    /// written for the interface, and the reply to a random client at a random age must be the same from
    /// both. The same seed generates the same inputs.
    Fuzz(fuzz::Fuzz),
    /// Change the code in one place at a time, in a copy, and name the changes that no test notices.
    ///
    /// A crate is changed by cargo-mutants and judged by its own tests. With --program, the BPF programs are
    /// changed (operators, numbers, conditions and calls, one line at a time) and judged by the packet tests in
    /// this kernel. The same seed chooses the same changes. Changes known to make no difference are listed
    /// with their reasons in xtask/src/mutants.rs.
    Mutants(mutants::Mutants),
    /// Run the real server under load with random faults.
    ///
    /// A model built from the same files judges every reply. The report contains the seed, the
    /// number of each fault, the kinds of replies, and the worst moments. Needs root.
    Soak {
        /// Duration in minutes (the default unit).
        #[arg(long, default_value_t = 2.0)]
        minutes: f64,
        /// Duration in hours instead of minutes.
        #[arg(long, conflicts_with = "minutes")]
        hours: Option<f64>,
        /// Seed of the faults; chosen at random and printed if not given.
        #[arg(long)]
        seed: Option<u64>,
        /// Only faults whose names contain one of these, such as recursor or flush
        faults: Vec<String>,
    },
    /// Run all benchmarks side by side and write the report.
    #[command(disable_help_flag = true)]
    Bench {
        /// Further arguments of the bench: `--help` lists them.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
}

fn main() -> ExitCode {
    match run(Arguments::parse().command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Without the backtrace of `Debug`: the causes name the failure, and xtask's own position would not help.
            eprintln!("cargo xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> Result<()> {
    match command {
        Command::Build { debug } => {
            toolchain::ensure()?;
            let profile = if debug {
                Profile::Dev
            } else {
                Profile::Release
            };
            build(profile, &PROGRAMS)
        }
        Command::Demo { arguments } => {
            // A typing error is reported before minutes of building.
            parse_or_exit::<demo_arguments::Arguments>("cargo xtask demo", &arguments);
            set_up(packages::DEMO)?;
            process::run(&mut build_of_demo()?)?;
            run_program("demo", arguments)
        }
        Command::Test {
            filters,
            quick,
            optimised,
        } => {
            if quick {
                debug_assert!(filters.is_empty());
                toolchain::ensure()?;
                return test::run_quick();
            }
            let profile = if optimised {
                Profile::Release
            } else {
                Profile::Dev
            };
            test::run(&filters, profile)
        }
        Command::KernelTest { image, modules } => {
            packages::ensure(packages::KERNEL_TEST)?;
            toolchain::ensure()?;
            build(Profile::Release, &[SERVER])?;
            kernel::test(&image, modules.as_deref(), None)
        }
        Command::Arm64 { command } => command.run(),
        Command::Dist(dist) => dist.run(),
        Command::Release(arguments) => release::run(arguments),
        Command::Docs => docs::build(),
        Command::Fuzz(fuzz) => fuzz.run(),
        Command::Mutants(mutants) => mutants.run(),
        Command::Soak {
            minutes,
            hours,
            seed,
            faults,
        } => {
            packages::ensure(packages::DEMO)?;
            toolchain::ensure()?;
            soak(hours.map_or(minutes, |hours| hours * 60.0), seed, faults)
        }
        Command::Bench { arguments } => bench(arguments),
    }
}

fn bench(arguments: Vec<String>) -> Result<()> {
    parse_or_exit::<bench_arguments::Arguments>("cargo xtask bench", &arguments);
    packages::ensure(packages::BENCH)?;
    toolchain::ensure()?;
    build(
        Profile::Release,
        &[&PROGRAMS[..], &[["bosh-dns-xdp-benches", "bench"]]].concat(),
    )?;
    run_program("bench", arguments)
}

/// Runs a built program of the repository.
fn run_program(name: &str, arguments: Vec<String>) -> Result<()> {
    let mut program = Process::new(process::root().join("target/release").join(name));
    name_server(&mut program, Profile::Release)
        .args(arguments)
        .current_dir(process::root());
    process::run(&mut program)
}

/// Exits with the help or the error that these arguments cause, before anything is installed or built.
fn parse_or_exit<A: Parser>(program: &str, arguments: &[String]) {
    if let Err(error) =
        A::try_parse_from(std::iter::once(program).chain(arguments.iter().map(String::as_str)))
    {
        error.exit();
    }
}

/// Builds the server and the soak test, and runs the test.
fn soak(minutes: f64, seed: Option<u64>, faults: Vec<String>) -> Result<()> {
    build(Profile::Release, &[SERVER, ["whole-system-tests", "soak"]])?;
    let seed = seed.map_or_else(|| "-".to_owned(), |seed| seed.to_string());
    let mut arguments = vec![minutes.to_string(), seed];
    arguments.extend(faults);
    run_program("soak", arguments)
}

/// Makes a command use the server's build of `profile`: the other one may be newer.
fn name_server(command: &mut Process, profile: Profile) -> &mut Process {
    command.env(
        "BOSH_DNS_XDP",
        process::root()
            .join("target")
            .join(profile.folder())
            .join(SERVER[1]),
    )
}

// Package and binary name of each program.
pub(crate) const SERVER: [&str; 2] = ["dns-cli", "bosh-dns-xdp"];
pub(crate) const HEALTH: [&str; 2] = ["dns-health", "bosh-dns-xdp-health"];
pub(crate) const SYNC: [&str; 2] = ["dns-sync", "bosh-dns-sync"];
pub(crate) const PUBLISHER: [&str; 2] = ["dns-publish", "bosh-dns-publish"];
pub(crate) const IDENTITY: [&str; 2] = ["dns-identity", "bosh-dns-identity"];
pub(crate) const LOAD: [&str; 2] = ["dns-load", "bosh-dns-xdp-load"];
pub(crate) const PROGRAMS: [[&str; 2]; 6] = [SERVER, HEALTH, SYNC, PUBLISHER, IDENTITY, LOAD];

/// How programs are built.
#[derive(Clone, Copy)]
enum Profile {
    /// Fast to build; all tests use it.
    Dev,
    /// Optimised.
    Release,
}

impl Profile {
    /// Returns the name of the folder below cargo's target folder.
    fn folder(self) -> &'static str {
        match self {
            Self::Dev => "debug",
            Self::Release => "release",
        }
    }
}

/// Builds programs, each given by package and binary name.
fn build(profile: Profile, programs: &[[&str; 2]]) -> Result<()> {
    process::run(&mut cargo_build(profile, programs)?)
}

fn cargo_build(profile: Profile, programs: &[[&str; 2]]) -> Result<Process> {
    build_with(Process::new("cargo"), profile, programs)
}

/// Makes a cargo build programs.
fn build_with(mut cargo: Process, profile: Profile, programs: &[[&str; 2]]) -> Result<Process> {
    cargo.arg("build").current_dir(process::root());
    if let Profile::Release = profile {
        cargo
            .arg("--release")
            // Not for development: each commit would build the crates that name it again.
            .env("BOSH_DNS_XDP_COMMIT", dist::commit()?);
    }
    for [package, program] in programs {
        cargo.args(["--package", package, "--bin", program]);
    }
    Ok(cargo)
}

/// Returns the command that builds the demo and its server, which needs neither the screen of `top` nor a live
/// Consul: a first demo compiles half as many crates without them.
fn build_of_demo() -> Result<Process> {
    let mut cargo = cargo_build(Profile::Release, &[SERVER, ["bosh-dns-xdp-demo", "demo"]])?;
    if !is_built(&process::root().join("target/release")) {
        cargo.arg("--no-default-features");
    }
    Ok(cargo)
}

/// Returns whether `cargo xtask build` filled this folder. The README then uses its server, with everything, so the
/// demo must not replace it.
fn is_built(folder: &Path) -> bool {
    PROGRAMS
        .iter()
        .all(|[_, program]| folder.join(program).exists())
}

#[cfg(test)]
#[test]
fn demo_keeps_a_complete_build() {
    let folder = tempfile::tempdir().expect("a folder");
    // After a demo.
    std::fs::write(folder.path().join(SERVER[1]), "").expect("a file");
    assert!(!is_built(folder.path()));
    for [_, program] in PROGRAMS {
        std::fs::write(folder.path().join(program), "").expect("a file");
    }
    assert!(is_built(folder.path()));
}

/// Installs packages and the BPF toolchain for the demo, and meanwhile compiles what needs neither.
fn set_up(packages: &'static str) -> Result<()> {
    let is_first = !process::root().join("target/release").exists();
    if is_first {
        println!(
            "set-up: the first build compiles about 200 crates: three to four minutes on two fast cores, up to \
             ten on slow ones"
        );
    }
    let tools = process::Step::start("Debian packages and BPF toolchain", move || {
        packages::ensure(packages)?;
        toolchain::ensure()
    });
    if is_first {
        // Fails at the BPF programs if the toolchain is not ready by then; the build after this goes on.
        let mut early = build_of_demo()?;
        let _ = early
            .args(["--keep-going", "--quiet"])
            .stderr(std::process::Stdio::null())
            .status();
    }
    tools.finish()
}
