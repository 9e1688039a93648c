//! Losses that an interface counts: those that the kernel has for every interface, and those of its driver
//! (`ethtool -S`).

use std::{
    collections::BTreeMap,
    fs,
    os::fd::{AsRawFd as _, OwnedFd},
};

use anyhow::{Context as _, Result, bail};
use nix::{
    errno::Errno,
    libc,
    sys::socket::{AddressFamily, SockFlag, SockType, socket},
};
use serde::Serialize;

/// Counters of the kernel for each interface of the thread's namespace: sums of the files below
/// `/sys/class/net/*/statistics`, which show the namespace that sysfs was mounted in.
const INTERFACES: &str = "/proc/thread-self/net/dev";

/// Commands of SIOCETHTOOL, and the set of strings that names the statistics (include/uapi/linux/ethtool.h).
const ETHTOOL_GSTRINGS: u32 = 0x1b;
const ETHTOOL_GSTATS: u32 = 0x1d;
const ETHTOOL_GSSET_INFO: u32 = 0x37;
const ETH_SS_STATS: u32 = 1;

/// Length of a name, `ETH_GSTRING_LEN`.
const NAME_LEN: usize = 32;

/// Length of the headers of `struct ethtool_gstrings` and `struct ethtool_stats`.
const STRINGS_HEADER: usize = 12;
const STATS_HEADER: usize = 8;

/// Maximum number of counters, far above what cards with hundreds of queues have.
const MAX_COUNTERS: usize = 32_768;

/// Counters with one of these in their names count lost packets: words of drivers for full rings (`rx_missed_errors`,
/// `rx_no_buffer_count`, `rx_out_of_buffer`, `alloc_rx_buff_failed`, `fifo`) and for a cloud's limits
/// (`pps_allowance_exceeded` of ena).
const LOSSES: [&str; 11] = [
    "drop",
    "discard",
    "miss",
    "error",
    "_err",
    "fail",
    "no_buf",
    "out_of_buf",
    "fifo",
    "overrun",
    "exceeded",
];

/// Packets that an XDP program dropped: the replies that the load's own program has counted.
const OWN_DROPS: &str = "xdp_drop";

/// Packets that an interface dropped for want of room.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Drops {
    pub(crate) received: u64,
    pub(crate) sent: u64,
}

impl Drops {
    /// Returns the drops in the text of [`INTERFACES`].
    fn of(text: &str, interface: &str) -> Self {
        for line in text.lines() {
            let Some((name, fields)) = line.split_once(':') else {
                continue;
            };
            if name.trim() != interface {
                continue;
            }
            // Received: bytes, packets, errs, drop, fifo, frame, compressed, multicast; then the same of sent ones.
            let fields: Vec<u64> = fields.split_whitespace().flat_map(str::parse).collect();
            return Self {
                received: sum_of(&fields, [3, 4]),
                sent: sum_of(&fields, [11, 12]),
            };
        }
        Self::default()
    }
}

/// Returns the sum of two fields; one that is missing is 0.
fn sum_of(fields: &[u64], places: [usize; 2]) -> u64 {
    let mut sum = 0;
    for place in places {
        sum += fields.get(place).copied().unwrap_or(0);
    }
    sum
}

/// All losses that an interface has counted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Losses {
    pub(crate) drops: Drops,
    /// The driver's counters by name.
    pub(crate) of_driver: BTreeMap<String, u64>,
}

impl Losses {
    /// Returns the losses since an earlier reading, of the driver those counters only that have changed.
    pub(crate) fn since(&self, earlier: &Self) -> Self {
        let mut of_driver = BTreeMap::new();
        for (name, now) in &self.of_driver {
            let before = earlier.of_driver.get(name).copied().unwrap_or(0);
            // A card that was reset counts from 0.
            let more = now.saturating_sub(before);
            if more > 0 {
                of_driver.insert(name.clone(), more);
            }
        }
        let before = earlier.drops;
        Self {
            drops: Drops {
                received: self.drops.received.saturating_sub(before.received),
                sent: self.drops.sent.saturating_sub(before.sent),
            },
            of_driver,
        }
    }
}

/// An interface whose losses are read.
#[derive(Debug)]
pub(crate) struct Interface {
    name: String,
    /// Any socket of the interface's namespace.
    socket: OwnedFd,
    /// Number of the driver's counters, and names of those of losses by place.
    count: usize,
    losses: Vec<(usize, String)>,
}

impl Interface {
    pub(crate) fn open(name: &str) -> Result<Self> {
        let flags = SockFlag::SOCK_CLOEXEC;
        let socket = socket(AddressFamily::Inet, SockType::Datagram, flags, None)?;
        let mut interface = Self {
            name: name.to_owned(),
            socket,
            count: 0,
            losses: Vec::new(),
        };
        interface.count = match interface.counter_count() {
            Ok(count) => count,
            // A driver without counters of its own.
            Err(Errno::EOPNOTSUPP) => 0,
            Err(error) => return Err(error).with_context(|| format!("counters of {name}")),
        };
        if interface.count > MAX_COUNTERS {
            bail!("{name} has {} counters", interface.count);
        }
        if interface.count > 0 {
            interface.losses = losses(&interface.counter_names()?);
        }
        Ok(interface)
    }

    /// Reads all losses so far.
    pub(crate) fn read(&self) -> Result<Losses> {
        let mut of_driver = BTreeMap::new();
        if self.count > 0 {
            let counters = self.counters()?;
            for (place, name) in &self.losses {
                // Names may repeat, such as those of queues in old drivers.
                *of_driver.entry(name.clone()).or_default() += counters[*place];
            }
        }
        Ok(Losses {
            drops: Drops::of(&fs::read_to_string(INTERFACES)?, &self.name),
            of_driver,
        })
    }

    fn counter_count(&self) -> Result<usize, Errno> {
        // `struct ethtool_sset_info`: the command, 4 unused bytes, the mask of sets; then the number for each set.
        let mut message = [0; 20];
        message[..4].copy_from_slice(&ETHTOOL_GSSET_INFO.to_ne_bytes());
        message[8..16].copy_from_slice(&(1_u64 << ETH_SS_STATS).to_ne_bytes());
        self.request(&mut message)?;
        // The mask comes back empty where the driver has none.
        if message[8..16] == [0; 8] {
            return Ok(0);
        }
        Ok(word_at(&message, 16) as usize)
    }

    fn counter_names(&self) -> Result<Vec<String>> {
        let mut message = message(
            ETHTOOL_GSTRINGS,
            STRINGS_HEADER + MAX_COUNTERS * 2 * NAME_LEN,
        );
        message[4..8].copy_from_slice(&ETH_SS_STATS.to_ne_bytes());
        self.request(&mut message)?;
        let mut names = Vec::with_capacity(self.count);
        for name in message[STRINGS_HEADER..]
            .chunks_exact(NAME_LEN)
            .take(self.count)
        {
            let end = name.iter().position(|&byte| byte == 0);
            let name = &name[..end.unwrap_or(NAME_LEN)];
            names.push(String::from_utf8_lossy(name).trim().to_owned());
        }
        Ok(names)
    }

    fn counters(&self) -> Result<Vec<u64>> {
        let mut message = message(ETHTOOL_GSTATS, STATS_HEADER + MAX_COUNTERS * 2 * 8);
        self.request(&mut message)
            .with_context(|| format!("counters of {}", self.name))?;
        // `ethtool -L` changes their number with that of the queues.
        if word_at(&message, 4) as usize != self.count {
            bail!("the counters of {} have changed during the load", self.name);
        }
        let mut counters = Vec::with_capacity(self.count);
        for counter in message[STATS_HEADER..].chunks_exact(8).take(self.count) {
            let bytes = counter.try_into().context("eight bytes")?;
            counters.push(u64::from_ne_bytes(bytes));
        }
        Ok(counters)
    }

    fn request(&self, message: &mut [u8]) -> Result<(), Errno> {
        // SAFETY: a structure of numbers and pointers, for which zeros are valid.
        let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
        // The last byte stays 0.
        let room = request.ifr_name.len() - 1;
        for (to, from) in request.ifr_name[..room].iter_mut().zip(self.name.bytes()) {
            *to = from as libc::c_char;
        }
        request.ifr_ifru.ifru_data = message.as_mut_ptr().cast();
        // SAFETY: the kernel writes the header and as many elements as the driver has. The message has room for twice
        // the maximum, should their number change meanwhile.
        let done =
            unsafe { libc::ioctl(self.socket.as_raw_fd(), libc::SIOCETHTOOL, &raw mut request) };
        Errno::result(done)?;
        Ok(())
    }
}

/// Returns an empty message for a command.
fn message(command: u32, length: usize) -> Vec<u8> {
    let mut message = vec![0; length];
    message[..4].copy_from_slice(&command.to_ne_bytes());
    message
}

fn word_at(message: &[u8], at: usize) -> u32 {
    let mut word = [0; 4];
    word.copy_from_slice(&message[at..at + 4]);
    u32::from_ne_bytes(word)
}

/// Returns places and names of the counters of losses.
fn losses(names: &[String]) -> Vec<(usize, String)> {
    let mut losses = Vec::new();
    for (place, name) in names.iter().enumerate() {
        let lower = name.to_lowercase();
        if LOSSES.iter().any(|word| lower.contains(word)) && !lower.contains(OWN_DROPS) {
            losses.push((place, name.clone()));
        }
    }
    losses
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drops_are_those_of_the_interface() {
        let text = "Inter-| Receive | Transmit\n face |bytes packets\n  lo: 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16\n c0: 1 2 3 40 50 6 7 8 9 10 11 120 130 14 15 16\n";
        assert_eq!(
            Drops::of(text, "c0"),
            Drops {
                received: 90,
                sent: 250
            }
        );
        assert_eq!(Drops::of(text, "c1"), Drops::default());
    }

    #[test]
    fn names_tell_losses() {
        let names = [
            "rx_packets",
            "rx_queue_0_drops",
            "rx_queue_0_xdp_drops",
            "rx0_xdp_drop",
            "tx_queue_0_xdp_xmit_errors",
            "rx_missed_errors",
            "rx_no_buffer_count",
            "rx_out_of_buffer",
            "pps_allowance_exceeded",
            "port.rx_Discards",
            "tx_bytes",
        ]
        .map(str::to_owned);
        let mut places = Vec::new();
        for (place, name) in losses(&names) {
            assert_eq!(name, names[place]);
            places.push(place);
        }
        assert_eq!(places, [1, 4, 5, 6, 7, 8, 9]);
    }

    #[test]
    fn changes_are_since_the_earlier_reading() {
        let losses = |received, sent, of_driver: &[(&str, u64)]| Losses {
            drops: Drops { received, sent },
            of_driver: of_driver
                .iter()
                .map(|&(name, count)| (name.to_owned(), count))
                .collect(),
        };
        let earlier = losses(1, 9, &[("same", 5), ("more", 5), ("reset", 5)]);
        let now = losses(4, 0, &[("same", 5), ("more", 8), ("reset", 2), ("new", 1)]);
        let expected = losses(3, 0, &[("more", 3), ("new", 1)]);
        assert_eq!(now.since(&earlier), expected);
    }

    /// Loopback's driver has no counters; an interface that is missing is an error.
    #[test]
    fn interfaces_are_read() {
        let loopback = Interface::open("lo").unwrap();
        assert!(loopback.losses.is_empty(), "{loopback:?}");
        assert!(loopback.read().unwrap().of_driver.is_empty());
        let error = Interface::open("no-interface").unwrap_err();
        assert!(format!("{error:#}").contains("no-interface"), "{error:#}");
    }

    /// A driver with thousands of counters: seven and more for each queue of a veth pair.
    #[test]
    fn counters_of_a_driver_are_read() {
        if !test_support::requirements::root() {
            return;
        }
        let alone = || {
            nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
            let pair = "link add pair-of-queues numrxqueues 320 type veth peer name other";
            let added = std::process::Command::new("ip")
                .args(pair.split(' '))
                .status()
                .unwrap();
            assert!(added.success());
            let mut interface = Interface::open("pair-of-queues").unwrap();
            let names = interface.counter_names().unwrap();
            let counters = interface.counters().unwrap();
            assert!(interface.count > 7 * 320, "{}", interface.count);
            assert_eq!([names.len(), counters.len()], [interface.count; 2]);
            // The only counter that is none (drivers/net/veth.c).
            let other = u64::from(nix::net::if_::if_nametoindex("other").unwrap());
            assert_eq!((names[0].as_str(), counters[0]), ("peer_ifindex", other));
            let unnamed = names.iter().filter(|name| name.is_empty()).count();
            assert_eq!(unnamed, 0);
            for name in ["rx_queue_0_drops", "rx_queue_319_drops"] {
                let place = names.iter().position(|found| found == name).unwrap();
                assert!(interface.losses.contains(&(place, name.to_owned())));
                assert_eq!(interface.read().unwrap().of_driver[name], 0);
            }
            // Names may repeat.
            interface.losses = vec![(0, "both".to_owned()), (0, "both".to_owned())];
            let read = interface.read().unwrap();
            assert_eq!(read.of_driver, [("both".to_owned(), 2 * other)].into());
            interface.count -= 1;
            let problem = interface.read().unwrap_err().to_string();
            assert_eq!(
                problem,
                "the counters of pair-of-queues have changed during the load"
            );
        };
        std::thread::scope(|scope| scope.spawn(alone).join().unwrap());
    }
}
