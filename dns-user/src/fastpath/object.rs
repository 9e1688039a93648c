//! Loading the BPF object: maps sized by the configuration, programs verified.

use std::{
    fs, io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
};

use aya::{
    Ebpf, EbpfLoader,
    maps::{Map, MapError, ProgramArray},
    programs::{ProgramError, ProgramFd, SchedClassifier, Xdp},
};
use dns_common::{
    entry::{CHUNK_CELLS, CHUNK_SIZE, MAX_CELLS, MAX_ENTRY_SIZE},
    object,
};

use super::{
    FastPathError, OBJECT,
    arena::ArenaMemory,
    index::{self, IndexMemory},
    maps::{ControlPage, CounterPages, map_arena, map_index},
    messages::{self, Messages},
    table::Limits,
};

/// Bytes of arena set aside for each name: a header, a name of some 90 bytes
/// and a dozen addresses. Names of a foundation need 130 bytes on average
/// (observed on generated foundations); the rest is for groups of many.
const BYTES_PER_NAME: usize = 192;

/// Most bytes of arena, whatever `max_names` says. Memory that is never
/// written to is allocated by the kernel all the same.
const MAX_ARENA: usize = 512 << 20;

/// Least bytes of arena: room for some of the largest entries even where few names are wanted.
const MIN_ARENA: usize = 2 << 20;

/// One of this many useful names may only be a learned one.
const LEARNED_SHARE: usize = 4;

/// Negative names get one more place for this many useful ones, and [`MIN_NEGATIVE`] at least.
const NEGATIVE_SHARE: usize = 16;

/// Least places for negative names.
const MIN_NEGATIVE: usize = 64;

/// The loaded programs and maps.
pub(super) struct Object {
    /// The XDP program that was asked for.
    pub(super) xdp: ProgramFd,
    /// The tc program.
    pub(super) tc: ProgramFd,
    /// The tc program behind XDP.
    pub(super) tc_second: ProgramFd,
    /// The maps to keep by name. `TC_ANSWER` is one of them: the kernel empties it with
    /// its last descriptor or pin, and the tc programs answer nothing any more.
    pub(super) kept_maps: [(&'static str, OwnedFd); 5],
    /// `NAMES`, mapped.
    pub(super) index: Arc<IndexMemory>,
    /// `ARENA`, mapped.
    pub(super) arena: Arc<ArenaMemory>,
    /// `CONTROL`, mapped.
    pub(super) control: Arc<ControlPage>,
    /// `COUNTERS`, mapped.
    pub(super) counters: Arc<CounterPages>,
    /// `TAP`; `None`: the object has none.
    pub(super) tap: Option<Map>,
    /// Messages of the programs; `None`: the object has no map for them.
    pub(super) messages: Option<Messages>,
    /// How many names fit.
    pub(super) limits: Limits,
}

impl Object {
    /// Loads everything, of the two XDP programs the one of this name. Nothing is
    /// attached, and the lease is over.
    pub(super) fn load(max_names: u32, xdp_program: &'static str) -> Result<Self, FastPathError> {
        let limits = limits(max_names);
        let chunks = chunks(max_names);
        let cpus = possible_cpus().map_err(|error| FastPathError::io("reading the possible CPUs", error))?;
        let names = u32::try_from(limits.useful + limits.negative).unwrap_or(u32::MAX);
        // There cannot be more entries than cells.
        let elements = index::elements(names.min(chunks * CHUNK_CELLS));
        let mut ebpf = EbpfLoader::new()
            .map_max_entries(object::NAMES, elements)
            .map_max_entries(object::ARENA, chunks)
            .map_max_entries(object::COUNTERS, cpus)
            .map_max_entries(messages::MAP, messages::BUFFER_SIZE)
            .override_global(aya_log::LEVEL, &messages::LEVEL, true)
            .load(OBJECT)
            .map_err(load_error)?;
        let xdp = load_xdp(&mut ebpf, xdp_program)?;
        let tc = load_tc(&mut ebpf, object::TC_PROGRAM)?;
        let tc_second = load_tc(&mut ebpf, object::TC_SECOND_PROGRAM)?;
        let tc_answer = load_tc(&mut ebpf, object::TC_ANSWER_PROGRAM)?;
        let tc_answer_fd = take_caller_of(&mut ebpf, &tc_answer)?;
        let names_fd = take_fd(&mut ebpf, object::NAMES)?;
        let arena_fd = take_fd(&mut ebpf, object::ARENA)?;
        let control_fd = take_fd(&mut ebpf, object::CONTROL)?;
        let counters_fd = take_fd(&mut ebpf, object::COUNTERS)?;
        let mapped = |what: &str, error| FastPathError::io(&format!("mapping {what}"), error);
        let arena = map_arena(arena_fd.as_fd()).map_err(|error| mapped(object::ARENA, error))?;
        let arena = Arc::new(arena);
        let index =
            map_index(names_fd.as_fd(), arena.clone()).map_err(|error| mapped(object::NAMES, error))?;
        let control = ControlPage::map(control_fd.as_fd()).map_err(|error| mapped(object::CONTROL, error))?;
        let counters =
            CounterPages::map(counters_fd.as_fd()).map_err(|error| mapped(object::COUNTERS, error))?;
        let tap = ebpf.take_map(object::TAP);
        let messages = Messages::of(&mut ebpf);
        Ok(Self {
            xdp,
            tc,
            tc_second,
            kept_maps: [
                (object::TC_ANSWER, tc_answer_fd),
                (object::NAMES, names_fd),
                (object::ARENA, arena_fd),
                (object::CONTROL, control_fd),
                (object::COUNTERS, counters_fd),
            ],
            index: Arc::new(index),
            arena,
            control: Arc::new(control),
            counters: Arc::new(counters),
            tap,
            messages,
            limits,
        })
    }
}

/// How many names of which kind for this `max_names`.
fn limits(max_names: u32) -> Limits {
    let useful = max_names.max(1) as usize;
    Limits {
        useful,
        listed: useful - useful / LEARNED_SHARE,
        negative: (useful / NEGATIVE_SHARE).max(MIN_NEGATIVE),
    }
}

/// Chunks of arena for this `max_names`.
fn chunks(max_names: u32) -> u32 {
    let bytes = (max_names as usize).saturating_mul(BYTES_PER_NAME).clamp(MIN_ARENA, MAX_ARENA);
    const { assert!(MAX_ARENA / CHUNK_SIZE * CHUNK_CELLS as usize + CHUNK_CELLS as usize <= MAX_CELLS as usize) };
    const { assert!(MIN_ARENA > 16 * MAX_ENTRY_SIZE && CHUNK_SIZE > MAX_ENTRY_SIZE) };
    u32::try_from(bytes.div_ceil(CHUNK_SIZE)).expect("MAX_ARENA is a few hundred chunks")
}

/// CPUs that there may ever be: the program counts at the index of its own.
fn possible_cpus() -> io::Result<u32> {
    let text = fs::read_to_string("/sys/devices/system/cpu/possible")?;
    parse_cpu_list(&text).ok_or_else(|| io::Error::other(format!("not a list of CPUs: {text:?}")))
}

/// The highest CPU number of a list like `0-3,8`, plus one.
fn parse_cpu_list(text: &str) -> Option<u32> {
    let highest = text.trim().rsplit([',', '-']).next()?;
    highest.parse::<u32>().ok()?.checked_add(1)
}

/// Verifies an XDP program.
fn load_xdp(ebpf: &mut Ebpf, name: &'static str) -> Result<ProgramFd, FastPathError> {
    let program: &mut Xdp = ebpf
        .program_mut(name)
        .ok_or(FastPathError::Incomplete(name))?
        .try_into()
        .map_err(|_| FastPathError::Incomplete(name))?;
    program.load().and_then(|()| own_fd(program.fd()?)).map_err(|error| load_error(error.into()))
}

/// Verifies a tc program.
fn load_tc(ebpf: &mut Ebpf, name: &'static str) -> Result<ProgramFd, FastPathError> {
    let program: &mut SchedClassifier = ebpf
        .program_mut(name)
        .ok_or(FastPathError::Incomplete(name))?
        .try_into()
        .map_err(|_| FastPathError::Incomplete(name))?;
    program.load().and_then(|()| own_fd(program.fd()?)).map_err(|error| load_error(error.into()))
}

/// A descriptor of our own for a program, which outlives aya's object.
fn own_fd(fd: &ProgramFd) -> Result<ProgramFd, ProgramError> {
    fd.try_clone().map_err(ProgramError::IOError)
}

/// Puts the program where the tc programs find it; a descriptor of our own for that map.
fn take_caller_of(ebpf: &mut Ebpf, program: &ProgramFd) -> Result<OwnedFd, FastPathError> {
    let name = object::TC_ANSWER;
    let Some(Map::ProgramArray(data)) = ebpf.take_map(name) else {
        return Err(FastPathError::Incomplete(name));
    };
    let fd = own_map_fd(data.fd().as_fd(), name)?;
    ProgramArray::try_from(Map::ProgramArray(data))
        .and_then(|mut programs| programs.set(0, program, 0))
        .map_err(|error| load_error(error.into()))?;
    Ok(fd)
}

/// A descriptor of our own for a map.
fn take_fd(ebpf: &mut Ebpf, name: &'static str) -> Result<OwnedFd, FastPathError> {
    match ebpf.take_map(name) {
        Some(Map::Array(data)) => own_map_fd(data.fd().as_fd(), name),
        _ => Err(FastPathError::Incomplete(name)),
    }
}

/// A descriptor of our own for a map, which outlives aya's object.
fn own_map_fd(fd: BorrowedFd<'_>, name: &str) -> Result<OwnedFd, FastPathError> {
    fd.try_clone_to_owned().map_err(|error| FastPathError::io(&format!("keeping map {name}"), error))
}

/// Tells a missing privilege from everything else that loading may meet.
fn load_error(error: aya::EbpfError) -> FastPathError {
    let code = match &error {
        aya::EbpfError::MapError(MapError::CreateError { io_error, .. })
        | aya::EbpfError::ProgramError(ProgramError::LoadError { io_error, .. }) => io_error.raw_os_error(),
        aya::EbpfError::MapError(MapError::SyscallError(call)) => call.io_error.raw_os_error(),
        aya::EbpfError::ProgramError(ProgramError::SyscallError(call)) => call.io_error.raw_os_error(),
        _ => None,
    };
    match code {
        Some(libc::EPERM | libc::EACCES) => FastPathError::NotPermitted(reason(&error)),
        _ => FastPathError::Load(reason(&error)),
    }
}

/// An error with its causes, in one line, cut where a verifier log would flood the log.
fn reason(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        text = format!("{text}: {inner}");
        cause = inner.source();
    }
    let lines: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
    // The verifier says at the end what it did not like.
    match &lines[..] {
        [first, .., before, last] if lines.len() > 3 => format!("{first} … {before} / {last}"),
        lines => lines.join(" / "),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_lists_are_read() {
        assert_eq!(parse_cpu_list("0-1\n"), Some(2));
        assert_eq!(parse_cpu_list("0\n"), Some(1));
        assert_eq!(parse_cpu_list("0-3,8-127"), Some(128));
        assert_eq!(parse_cpu_list(""), None);
    }

    #[test]
    fn sizes_follow_max_names_within_bounds() {
        assert_eq!(limits(65_536), Limits { useful: 65_536, listed: 49_152, negative: 4096 });
        assert_eq!(limits(0), Limits { useful: 1, listed: 1, negative: MIN_NEGATIVE });
        assert_eq!(chunks(65_536), 12);
        assert_eq!(chunks(1), 2);
        assert_eq!(chunks(u32::MAX), 504);
    }
}
