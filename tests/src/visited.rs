//! The functions that a running program enters for one event, found by breakpoints (ptrace(2)): the program needs
//! its symbols, but no debug information, and runs at nearly its usual speed.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, File},
    os::unix::fs::FileExt as _,
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use nix::{
    errno::Errno,
    sys::{
        ptrace::{self, Options},
        signal::Signal,
        wait::{WaitPidFlag, WaitStatus, waitpid},
    },
    unistd::Pid,
};

use crate::process::capture;

/// The instruction int3.
const BREAKPOINT: u8 = 0xcc;

/// Time limit for one event, many times what a busy machine needs.
const TIMEOUT: Duration = Duration::from_secs(120);

/// Pause between two looks at the program.
const NAP: Duration = Duration::from_micros(300);

/// Consecutive looks in which every thread sleeps, after which the program is done.
const QUIET: usize = 3;

/// Length of code in bytes from which a function does more than to return a member, which its name says already.
const MORE_THAN_ACCESS: u64 = 64;

/// Traits that are mostly derived. Their functions are no step of a flow.
const DERIVED: [&str; 8] = [
    "clone::Clone",
    "cmp::",
    "hash::Hash",
    "fmt::Debug",
    "default::Default",
    "zerocopy::",
    "serde",
    "marker::",
];

/// A traced program. The thread that attached must also drive it; at its end the kernel kills the program.
pub struct Traced {
    process: Pid,
    threads: BTreeSet<Pid>,
    memory: File,
    functions: BTreeMap<u64, Function>,
    /// Breakpoints that a thread of another flow has removed.
    passed: Vec<u64>,
}

/// A function of this workspace in a program.
struct Function {
    /// Name as printed by `nm`, for messages.
    name: String,
    /// Length of its code in bytes.
    length: u64,
    /// Its source file, relative to the workspace.
    file: PathBuf,
    first_byte: u8,
    is_armed: bool,
}

/// Code that repeated events visited.
#[derive(Debug, Default)]
pub struct Visits {
    /// Files that every event visited, and the program hardly ever without one.
    pub own: BTreeSet<PathBuf>,
    /// In addition, files that the program also visits in the background.
    pub all: BTreeSet<PathBuf>,
    /// The functions of [`Self::own`], for messages.
    pub functions: BTreeMap<PathBuf, BTreeSet<String>>,
}

impl Traced {
    /// Attaches to all threads of a process that runs `program`.
    pub fn attach(process: u32, program: &Path) -> Result<Self> {
        let process = Pid::from_raw(process.cast_signed());
        let program = program.canonicalize()?;
        let base = load_address(process, &program)?;
        let memory = File::options()
            .read(true)
            .write(true)
            .open(format!("/proc/{process}/mem"))?;
        let mut functions = BTreeMap::new();
        for (address, mut function) in functions_of(&program)? {
            let mut first_byte = [0];
            memory
                .read_exact_at(&mut first_byte, base + address)
                .with_context(|| function.name.clone())?;
            function.first_byte = first_byte[0];
            functions.insert(base + address, function);
        }
        let mut traced = Self {
            process,
            threads: BTreeSet::new(),
            memory,
            functions,
            passed: Vec::new(),
        };
        // A thread that starts meanwhile is found by the next look, or traced by its parent.
        while let new @ 1.. = traced.seize_threads()? {
            let _ = new;
        }
        Ok(traced)
    }

    fn seize_threads(&mut self) -> Result<usize> {
        let before = self.threads.len();
        for entry in fs::read_dir(format!("/proc/{}/task", self.process))? {
            let thread = Pid::from_raw(entry?.file_name().to_string_lossy().parse()?);
            if self.threads.contains(&thread) {
                continue;
            }
            match ptrace::seize(
                thread,
                Options::PTRACE_O_TRACECLONE | Options::PTRACE_O_EXITKILL,
            ) {
                // It has ended, or its parent passed the tracing on.
                Ok(()) | Err(Errno::EPERM) => self.threads.insert(thread),
                Err(Errno::ESRCH) => false,
                Err(error) => return Err(error).context("PTRACE_SEIZE"),
            };
        }
        Ok(self.threads.len() - before)
    }

    /// Lets `event` happen `rounds` times and waits each time until `is_done` and all threads sleep. In between the
    /// program idles for as long as the event took, which shows what it does in the background.
    /// Threads whose names do not satisfy `is_part` belong to other flows.
    pub fn visits(
        &mut self,
        rounds: usize,
        is_part: &dyn Fn(&str) -> bool,
        mut event: impl FnMut(usize) -> Result<()>,
        mut is_done: impl FnMut() -> Result<bool>,
    ) -> Result<Visits> {
        let mut counts: BTreeMap<u64, (usize, usize)> = BTreeMap::new();
        let mut length = Duration::ZERO;
        for round in 0..rounds {
            let begin = Instant::now();
            for address in self.entered(is_part, || Ok(()), || Ok(begin.elapsed() >= length))? {
                counts.entry(address).or_default().1 += 1;
            }
            let begin = Instant::now();
            for address in self.entered(is_part, || event(round), &mut is_done)? {
                counts.entry(address).or_default().0 += 1;
            }
            length = begin.elapsed();
        }
        let mut visits = Visits::default();
        for (address, (with_event, without)) in counts {
            let Function {
                name, file, length, ..
            } = &self.functions[&address];
            if with_event * 10 < rounds * 9 {
                continue;
            }
            visits.all.insert(file.clone());
            if without * 10 <= rounds && *length >= MORE_THAN_ACCESS {
                visits.own.insert(file.clone());
                visits
                    .functions
                    .entry(file.clone())
                    .or_default()
                    .insert(name.clone());
            }
        }
        Ok(visits)
    }

    /// Returns the functions that threads of this flow entered from `event` until `is_done` and all threads sleep.
    fn entered(
        &mut self,
        is_part: &dyn Fn(&str) -> bool,
        event: impl FnOnce() -> Result<()>,
        mut is_done: impl FnMut() -> Result<bool>,
    ) -> Result<BTreeSet<u64>> {
        let all: Vec<u64> = self.functions.keys().copied().collect();
        self.arm(&all)?;
        event()?;
        let begin = Instant::now();
        let (mut entered, mut done, mut quiet) = (BTreeSet::new(), false, 0);
        while quiet < QUIET {
            if self.resume_stopped(is_part, &mut entered)? {
                quiet = 0;
                continue;
            }
            let mut passed = std::mem::take(&mut self.passed);
            passed.retain(|address| !entered.contains(address));
            self.arm(&passed)?;
            done = done || is_done()?;
            quiet = if done && self.all_sleep() {
                quiet + 1
            } else {
                0
            };
            ensure!(
                begin.elapsed() < TIMEOUT,
                "the program is not done after {TIMEOUT:?}"
            );
            thread::sleep(NAP);
        }
        Ok(entered)
    }

    fn arm(&mut self, addresses: &[u64]) -> Result<()> {
        for address in addresses {
            let Some(function) = self
                .functions
                .get_mut(address)
                .filter(|function| !function.is_armed)
            else {
                continue;
            };
            self.memory.write_all_at(&[BREAKPOINT], *address)?;
            function.is_armed = true;
        }
        Ok(())
    }

    /// Lets stopped threads continue; returns whether there was one.
    fn resume_stopped(
        &mut self,
        is_part: &dyn Fn(&str) -> bool,
        entered: &mut BTreeSet<u64>,
    ) -> Result<bool> {
        let mut any = false;
        for thread in self.threads.clone() {
            let signal = match waitpid(thread, Some(WaitPidFlag::WNOHANG | WaitPidFlag::__WALL)) {
                Ok(WaitStatus::StillAlive) => continue,
                Ok(WaitStatus::Stopped(_, Signal::SIGTRAP)) => {
                    match self.leave_breakpoint(thread)? {
                        Some(address) => {
                            let name = fs::read_to_string(format!("/proc/{thread}/comm"))
                                .unwrap_or_default();
                            if is_part(name.trim_end()) {
                                entered.insert(address);
                            } else {
                                self.passed.push(address);
                            }
                            None
                        }
                        None => Some(Signal::SIGTRAP),
                    }
                }
                Ok(WaitStatus::Stopped(_, signal)) => Some(signal),
                Ok(WaitStatus::PtraceEvent(_, _, libc::PTRACE_EVENT_CLONE)) => {
                    self.threads
                        .insert(Pid::from_raw(ptrace::getevent(thread)?.try_into()?));
                    None
                }
                Ok(WaitStatus::PtraceEvent(..)) => None,
                Ok(WaitStatus::Exited(..) | WaitStatus::Signaled(..)) | Err(Errno::ECHILD) => {
                    ensure!(thread != self.process, "the program has ended");
                    self.threads.remove(&thread);
                    continue;
                }
                Ok(other) => bail!("unexpected {other:?}"),
                Err(error) => return Err(error).context("waitpid"),
            };
            ptrace::cont(thread, signal).context("PTRACE_CONT")?;
            any = true;
        }
        Ok(any)
    }

    /// Removes the breakpoint at which the thread stopped, and returns its address; `None` if it stopped elsewhere.
    fn leave_breakpoint(&mut self, thread: Pid) -> Result<Option<u64>> {
        let mut registers = ptrace::getregs(thread)?;
        let address = registers.rip - 1;
        let Some(function) = self.functions.get_mut(&address) else {
            return Ok(None);
        };
        // Another thread that stopped here at the same time finds it removed, and only goes back.
        if function.is_armed {
            self.memory.write_all_at(&[function.first_byte], address)?;
            function.is_armed = false;
        }
        registers.rip = address;
        ptrace::setregs(thread, registers)?;
        Ok(Some(address))
    }

    /// Returns whether every thread waits for an event. A thread that waits for a CPU does not.
    fn all_sleep(&self) -> bool {
        self.threads.iter().all(|thread| {
            let stat = fs::read_to_string(format!("/proc/{}/task/{thread}/stat", self.process));
            // A thread that has ended needs no CPU.
            stat.map_or(true, |stat| {
                stat.rsplit_once(") ")
                    .is_some_and(|(_, fields)| fields.starts_with('S'))
            })
        })
    }
}

/// Returns the difference of addresses in memory to addresses in the file.
fn load_address(process: Pid, program: &Path) -> Result<u64> {
    let maps = fs::read_to_string(format!("/proc/{process}/maps"))?;
    let program = program.display().to_string();
    let first = maps
        .lines()
        .find(|line| line.ends_with(&program))
        .context("the program is not mapped")?;
    let address = first
        .split('-')
        .next()
        .context("a line without an address")?;
    Ok(u64::from_str_radix(address, 16)?)
}

/// Returns the functions of this workspace in `program` with their addresses in the file.
fn functions_of(program: &Path) -> Result<Vec<(u64, Function)>> {
    let root = workspace();
    let mut nm = Command::new("nm");
    let listed = capture(
        nm.args(["--defined-only", "--demangle", "--print-size"])
            .arg(program),
    )?;
    let mut files = BTreeMap::new();
    let mut found = Vec::new();
    for line in listed.lines() {
        let fields: Vec<&str> = line.splitn(4, ' ').collect();
        let &[address, length, "t" | "T", name] = &fields[..] else {
            continue;
        };
        let Some(module) = module_of(name) else {
            continue;
        };
        let file = files
            .entry(module.clone())
            .or_insert_with(|| source_file(&root, &module));
        if let Some(file) = file {
            let [address, length] = [address, length].map(|number| u64::from_str_radix(number, 16));
            let (name, file) = (name.to_owned(), file.clone());
            found.push((
                address?,
                Function {
                    name,
                    length: length?,
                    file,
                    first_byte: 0,
                    is_armed: false,
                },
            ));
        }
    }
    ensure!(
        found.len() > 1000,
        "{} has no symbols of this workspace",
        program.display()
    );
    Ok(found)
}

/// Returns the root folder of the sources.
pub fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Returns the path of a function's item: crate, modules, then types and functions. An implementation of a trait is
/// in the module of its type, unless the name says otherwise.
fn module_of(name: &str) -> Option<Vec<String>> {
    let (of_type, of_trait) = match name.strip_prefix('<') {
        Some(inner) => inner.split_once(" as ").unwrap_or((inner, "")),
        None => (name, ""),
    };
    let is_derived =
        DERIVED.iter().any(|derived| of_trait.contains(derived)) || name.contains("::_::<impl");
    if is_derived {
        return None;
    }
    let is_ours = |path: &&str| path.starts_with("dns_");
    let of_type = of_type
        .trim_start_matches(['&', '*'])
        .trim_start_matches("mut ");
    let path = [of_type, of_trait].into_iter().find(is_ours)?;
    let end = path
        .find(|c: char| !(c.is_ascii_alphanumeric() || c == '_' || c == ':'))
        .unwrap_or(path.len());
    Some(
        path[..end]
            .split("::")
            .filter(|part| !part.is_empty())
            .map(str::to_owned)
            .collect(),
    )
}

/// Returns the file of an item, relative to the workspace: its innermost module's.
fn source_file(root: &Path, item: &[String]) -> Option<PathBuf> {
    let (crate_name, path) = item.split_first()?;
    let folder = match crate_name.strip_prefix("dns_")? {
        "common" => "dns-common".to_owned(),
        other => format!("dns-user/{}", other.replace('_', "-")),
    };
    let sources = Path::new(&folder).join("src");
    (0..=path.len()).rev().find_map(|length| {
        let below: PathBuf = path[..length].iter().collect();
        let candidates = match length {
            0 => [sources.join("lib.rs"), sources.join("main.rs")],
            _ => [
                sources.join(&below).with_extension("rs"),
                sources.join(&below).join("mod.rs"),
            ],
        };
        candidates
            .into_iter()
            .find(|file| root.join(file).is_file())
    })
}
