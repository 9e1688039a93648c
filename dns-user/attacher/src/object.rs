//! Loads the BPF object, with maps sized by the configuration. Each of its programs is verified
//! when it is needed ([`crate::programs`]).

use std::{
    fs, io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
    thread,
};

use dns_common::{
    entry::{CELL_SIZE, CHUNK_CELLS, CHUNK_SIZE, MAX_CELLS, MAX_ENTRY_SIZE},
    object,
};

use dns_core::config::XdpConfig;
use dns_fastpath::{
    MAX_REPLIES, REPLY_BYTES, WITHOUT_MEMBARRIER,
    map::{CounterPages, elements},
    protocol::Limits,
};
use dns_kit::logs::with_causes;

use crate::{
    OBJECT, bpf, during,
    image::{Image, ImageError},
    scope::ScopePage,
};

/// Bytes of store per name: a header, a name of about 90 bytes and a dozen addresses. Names of a
/// foundation take 105 to 110 bytes on average, in whole cells (observed on generated foundations
/// and on one modelled on a production one); the rest is for large groups.
const BYTES_PER_NAME: usize = 144;

/// Upper limit of the store for any `max_names`: the kernel allocates all of it, even if unused.
const MAX_ARENA: usize = 512 << 20;

/// Lower limit of the store: enough for some of the largest entries even if few names are configured.
const MIN_ARENA: usize = 2 << 20;

/// One in this many names is reserved for learned names.
const LEARNED_SHARE: usize = 4;

/// Negative names get one additional entry per this many other names, at least [`MIN_NEGATIVE`].
const NEGATIVE_SHARE: usize = 16;

/// Minimum number of entries for negative names.
const MIN_NEGATIVE: usize = 64;

/// Number of maps that the programs need as long as they are attached.
pub(crate) const KEPT_MAPS: usize = 10;

/// The maps of a loaded object.
pub(crate) struct Object {
    /// Maps to keep open, by name, including the arrays for tail calls: the kernel empties those
    /// when their last descriptor or pin is gone, and the tc programs then answer nothing.
    pub(crate) kept_maps: [(&'static str, OwnedFd); KEPT_MAPS],
    /// The ring buffer `TAP`.
    pub(crate) tap: OwnedFd,
    /// The map `HEARD_CLIENTS`. Programs keep it open, and entries of another session are worthless.
    pub(crate) heard_clients: OwnedFd,
    pub(crate) scope: Arc<ScopePage>,
    pub(crate) counters: Arc<CounterPages>,
    pub(crate) limits: Limits,
}

impl Object {
    /// Creates the maps. No program of the object is loaded yet, and the lease has expired. The programs
    /// refer to the maps by the descriptors that the object holds.
    pub(crate) fn load(config: &XdpConfig) -> io::Result<(Image, Self)> {
        let max_names = config.max_names;
        let replies = if config.other_types { MAX_REPLIES } else { 0 };
        let limits = Limits {
            answers: config.cache_entries as usize,
            replies,
            ..limits(max_names)
        };
        let chunks = chunks(max_names);
        let answer_chunks = answer_chunks(config);
        // Possible ones and not those online: a CPU that is added later counts as well.
        let cpus = possible_cpus().map_err(|error| during("reading the possible CPUs", error))?;
        let names = u32::try_from(limits.max_names + limits.negative).unwrap_or(u32::MAX);
        // Every entry takes at least one cell.
        let name_elements = elements(names.min(chunks * CHUNK_CELLS));
        let answer_elements = elements(config.cache_entries + replies as u32);
        let sizes = [
            (object::NAMES, name_elements),
            (object::ENTRIES, chunks),
            (object::ANSWER_NAMES, answer_elements),
            (object::ANSWER_ENTRIES, answer_chunks),
            (object::COUNTERS, cpus),
        ];
        let globals = [(object::PREEMPTIBLE, u8::from(is_preemptible()))];
        let image = Image::load(OBJECT, &sizes, &globals).map_err(load_error)?;
        let map = |name| own_map_fd(&image, name);
        let kept_maps: [_; KEPT_MAPS] = [
            (object::TC_ANSWER, map(object::TC_ANSWER)?),
            (object::TC_FORWARDED, map(object::TC_FORWARDED)?),
            (object::XDP_FORWARDED, map(object::XDP_FORWARDED)?),
            (object::ANSWER_NAMES, map(object::ANSWER_NAMES)?),
            (object::ANSWER_ENTRIES, map(object::ANSWER_ENTRIES)?),
            (object::NAMES, map(object::NAMES)?),
            (object::ENTRIES, map(object::ENTRIES)?),
            (object::CONTROL, map(object::CONTROL)?),
            (object::SCOPE, map(object::SCOPE)?),
            (object::COUNTERS, map(object::COUNTERS)?),
        ];
        let tap = map(object::TAP)?;
        let heard_clients = map(object::HEARD_CLIENTS)?;
        let [.., (_, scope), (_, counters)] = &kept_maps;
        let scope = ScopePage::map(scope.as_fd(), wait_for_runs)
            .map_err(|error| during("mapping SCOPE", error))?;
        let counters = bpf::map_shape(counters.as_fd())
            .and_then(|shape| CounterPages::map(counters.as_fd(), shape))
            .map_err(|error| during("mapping COUNTERS", error))?;
        let scope = Arc::new(scope);
        let counters = Arc::new(counters);
        Ok((
            image,
            Self {
                kept_maps,
                tap,
                heard_clients,
                scope,
                counters,
                limits,
            },
        ))
    }
}

impl Object {
    pub(crate) fn kept_map(&self, name: &str) -> Option<BorrowedFd<'_>> {
        let (_, map) = self.kept_maps.iter().find(|(known, _)| *known == name)?;
        Some(map.as_fd())
    }
}

/// Returns whether one run of a program may interrupt another on the same CPU: on kernels with
/// PREEMPT_RT, which name it in their version (`uname -v`).
fn is_preemptible() -> bool {
    rustix::system::uname()
        .version()
        .to_string_lossy()
        .contains("PREEMPT_RT")
}

/// Waits until every program run that began before the call has ended.
fn wait_for_runs() {
    if bpf::rcu_grace_period().is_err() {
        // A run takes microseconds, so the margin is wide, but this is no proof.
        thread::sleep(WITHOUT_MEMBARRIER);
    }
}

fn limits(max_names: u32) -> Limits {
    let max_names = max_names.max(1) as usize;
    Limits {
        max_names,
        max_precomputed: max_names - max_names / LEARNED_SHARE,
        negative: (max_names / NEGATIVE_SHARE).max(MIN_NEGATIVE),
        answers: 0,
        replies: 0,
    }
}

fn chunks(max_names: u32) -> u32 {
    let bytes = (max_names as usize)
        .saturating_mul(BYTES_PER_NAME)
        .clamp(MIN_ARENA, MAX_ARENA);
    // The constants of both crates must fit: cells have numbers below `MAX_CELLS`, in whole chunks.
    const {
        assert!(
            MAX_ARENA / CHUNK_SIZE * CHUNK_CELLS as usize + CHUNK_CELLS as usize
                <= MAX_CELLS as usize
        )
    };
    // The smallest store holds some of the largest entries, and a chunk at least one.
    const { assert!(MIN_ARENA > 16 * MAX_ENTRY_SIZE && CHUNK_SIZE > MAX_ENTRY_SIZE) };
    u32::try_from(bytes.div_ceil(CHUNK_SIZE)).expect("MAX_ARENA is a few hundred chunks")
}

/// Returns the number of chunks of the store of whole answers: at least one, because no map is empty.
fn answer_chunks(config: &XdpConfig) -> u32 {
    let replies = if config.other_types {
        REPLY_BYTES as u64
    } else {
        0
    };
    let bytes = replies
        + if config.cache_entries == 0 {
            0
        } else {
            config.cache_bytes
        };
    // The end of each chunk holds no entry, see `CHUNK_SIZE`.
    let usable = u64::from(CHUNK_CELLS) * CELL_SIZE as u64;
    u32::try_from(bytes.div_ceil(usable))
        .unwrap_or(u32::MAX)
        .clamp(1, MAX_CELLS / CHUNK_CELLS)
}

/// Returns the number of possible CPUs: each CPU uses the element with its own number for its counters.
fn possible_cpus() -> io::Result<u32> {
    let text = fs::read_to_string("/sys/devices/system/cpu/possible")?;
    parse_cpu_list(&text).ok_or_else(|| io::Error::other(format!("not a list of CPUs: {text:?}")))
}

/// Returns the highest CPU number in a list like `0-3,8`, plus one.
fn parse_cpu_list(text: &str) -> Option<u32> {
    // The kernel sorts the list, so the last number is the highest.
    let highest = text.trim().rsplit([',', '-']).next()?;
    highest.parse::<u32>().ok()?.checked_add(1)
}

/// Duplicates the descriptor of a map, so that the map outlives the image. The image's own
/// descriptor stays open, because programs loaded later refer to it by number.
fn own_map_fd(image: &Image, name: &'static str) -> io::Result<OwnedFd> {
    let map = image
        .map(name)
        .ok_or_else(|| io::Error::other(format!("the embedded BPF object has no {name}")))?;
    map.try_clone_to_owned()
        .map_err(|error| during(&format!("keeping map {name}"), error))
}

/// Distinguishes a missing privilege from all other load errors.
fn load_error(error: ImageError) -> io::Error {
    let code = match &error {
        ImageError::Map { source, .. } => source.raw_os_error(),
        ImageError::Parse(_) | ImageError::Relocation(_) => None,
    };
    let reason = with_causes(&error);
    io::Error::other(match code {
        Some(libc::EPERM | libc::EACCES) => format!(
            "loading BPF programs is not permitted: needs root, or CAP_BPF, CAP_NET_ADMIN and CAP_PERFMON, and in a \
             container a seccomp profile that allows bpf(2) ({reason})"
        ),
        _ => format!("the kernel rejected the maps of the BPF object: {reason}"),
    })
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
        assert_eq!(
            limits(65_536),
            Limits {
                max_names: 65_536,
                max_precomputed: 49_152,
                negative: 4096,
                answers: 0,
                replies: 0
            }
        );
        assert_eq!(
            limits(0),
            Limits {
                max_names: 1,
                max_precomputed: 1,
                negative: MIN_NEGATIVE,
                answers: 0,
                replies: 0
            }
        );
        assert_eq!(chunks(65_536), 9);
        assert_eq!(chunks(1), 2);
        assert_eq!(chunks(u32::MAX), 504);
    }
}
