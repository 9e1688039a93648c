//! The served endpoints and interfaces: the single element of the map `SCOPE`, held only by the
//! attaching process.
//!
//! [`dns_common::scope`] explains the order of writes.

use std::{
    io,
    mem::offset_of,
    net::IpAddr,
    os::fd::BorrowedFd,
    sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
    time::Duration,
};

use dns_common::scope::{
    BOUNDED, Endpoint, INTERFACE_TRIES, INTERFACES, Interface, MAX_ENDPOINTS, NEAR, Probe,
    SOURCE_WORDS, Scope, VLAN_WORDS, source_hash,
};
use dns_fastpath::map::{half, map_shared, word};
use dns_kit::clock::kernel_monotonic_ns;
use memmap2::MmapRaw;
use zerocopy::transmute;

/// Waits until every program run that began before the call has ended.
pub(crate) type Grace = fn();

/// The `SCOPE` map, mapped.
#[derive(Debug)]
pub(crate) struct ScopePage {
    map: MmapRaw,
    grace: Grace,
    /// Whether a program that reads it may be attached.
    is_read: AtomicBool,
}

/// An interface, as described to the programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Served {
    pub(crate) ifindex: u32,
    pub(crate) address: [u8; 6],
    /// Ethernet address of the master (bridge or bond); without one, the interface's own.
    pub(crate) master: [u8; 6],
    /// Whether the interface's clients run on this machine.
    pub(crate) near: bool,
    /// Whether routes through this interface set an MTU.
    pub(crate) bounded: bool,
}

/// The programs' record of the probes of an interface at an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Probed {
    /// Number of probes passed to userspace.
    pub(crate) count: u64,
    pub(crate) client: IpAddr,
}

impl ScopePage {
    pub(crate) fn map(map: BorrowedFd<'_>, grace: Grace) -> io::Result<Self> {
        Ok(Self {
            map: map_shared(map, size_of::<Scope>())?,
            grace,
            is_read: AtomicBool::new(false),
        })
    }

    /// Expects runs of programs from now on. Must precede attaching the first one.
    pub(crate) fn expect_runs(&self) {
        self.is_read.store(true, Ordering::Relaxed);
    }

    /// Waits until every program run that began before the call has ended.
    fn wait_for_runs(&self) {
        // Each session has a map of its own, which nothing reads before the first attachment. At a
        // start, four grace periods of 7 to 16 ms would precede it.
        if self.is_read.load(Ordering::Relaxed) {
            (self.grace)();
        }
    }

    fn word(&self, offset: usize) -> &AtomicU64 {
        assert!(offset.is_multiple_of(8), "a word of Scope");
        word(&self.map, offset / 8)
    }

    fn half(&self, offset: usize) -> &AtomicU32 {
        assert!(offset.is_multiple_of(4), "a half word of Scope");
        half(&self.map, offset / 4)
    }

    /// Sets the VLANs on which frames are answered.
    pub(crate) fn set_vlans(&self, vlans: &[u16]) {
        let mut words = [0; VLAN_WORDS];
        for &vlan in vlans {
            let (word, bit) = Scope::vlan(vlan);
            words[word] |= bit;
        }
        for (index, word) in words.into_iter().enumerate() {
            self.word(offset_of!(Scope, vlans) + index * 8)
                .store(word, Ordering::Relaxed);
        }
    }

    /// Sets the addresses that are invalid as senders on another machine.
    pub(crate) fn set_refused_sources(&self, addresses: impl Iterator<Item = IpAddr>) {
        let mut words = vec![0_u64; SOURCE_WORDS];
        for address in addresses {
            let (word, bits) = Scope::refused_source(source_hash(words_of(address)));
            words[word] |= bits;
        }
        for (index, wanted) in words.into_iter().enumerate() {
            let word = self.word(offset_of!(Scope, refused_sources) + index * 8);
            // A store would take the cache line from every CPU whose program reads it.
            if word.load(Ordering::Relaxed) != wanted {
                word.store(wanted, Ordering::Relaxed);
            }
        }
    }

    //----------- Endpoints ----------------------------------------------------

    fn endpoint(&self, slot: usize) -> Option<Endpoint> {
        let at = endpoint_offset(slot);
        let load = |at: usize| self.word(at).load(Ordering::Relaxed);
        let endpoint: Endpoint = transmute!([load(at), load(at + 8), load(at + META)]);
        (endpoint.family != 0).then_some(endpoint)
    }

    pub(crate) fn slot_of(&self, endpoint: &Endpoint) -> Option<usize> {
        (0..MAX_ENDPOINTS).find(|&slot| self.endpoint(slot).as_ref() == Some(endpoint))
    }

    /// Serves exactly these endpoints, at most [`MAX_ENDPOINTS`]. Once this returns, only program
    /// runs that began before still answer for other endpoints. Endpoints that remain keep their
    /// slots. Interfaces serve a new endpoint once [`Self::admit`] is called.
    pub(crate) fn set_endpoints(&self, endpoints: &[Endpoint]) {
        let wanted = &endpoints[..endpoints.len().min(MAX_ENDPOINTS)];
        self.remove_other_endpoints(wanted);
        let mut added = wanted.to_vec();
        added.retain(|endpoint| self.slot_of(endpoint).is_none());
        if added.is_empty() {
            return;
        }
        // From here on no run reads a slot that was valid before.
        self.wait_for_runs();
        let free = (0..MAX_ENDPOINTS).filter(|&slot| self.endpoint(slot).is_none());
        // Collected before the first is written, which would no longer be free.
        let placed: Vec<(usize, Endpoint)> = free.zip(added).collect();
        for (slot, endpoint) in &placed {
            let words: [u64; 2] = transmute!(endpoint.address);
            for (half, word) in words.into_iter().enumerate() {
                self.word(endpoint_offset(*slot) + half * 8)
                    .store(word, Ordering::Relaxed);
            }
        }
        // From here on every run that finds a slot valid sees its address.
        self.wait_for_runs();
        for (slot, endpoint) in &placed {
            let [_, _, meta]: [u64; 3] = transmute!(*endpoint);
            self.word(endpoint_offset(*slot) + META)
                .store(meta, Ordering::Release);
        }
        // Not lowered when endpoints only go: an empty slot has family 0, which no packet has.
        let slots = (0..MAX_ENDPOINTS)
            .rev()
            .find(|&slot| self.endpoint(slot).is_some())
            .map_or(0, |last| last + 1);
        let slots = u32::try_from(slots).expect("at most MAX_ENDPOINTS");
        self.half(offset_of!(Scope, endpoint_slots))
            .store(slots, Ordering::Release);
    }

    /// Empties the slots of all endpoints but these, and withdraws them from the interfaces.
    fn remove_other_endpoints(&self, wanted: &[Endpoint]) {
        let mut removed = 0_u64;
        for slot in 0..MAX_ENDPOINTS {
            if self
                .endpoint(slot)
                .is_some_and(|found| !wanted.contains(&found))
            {
                self.word(endpoint_offset(slot) + META)
                    .store(0, Ordering::Relaxed);
                removed |= 1 << slot;
            }
        }
        // A bit means a slot: a later endpoint in the same slot must not inherit the interfaces of
        // this one.
        if removed != 0 {
            for slot in 0..INTERFACES {
                let mask = self.word(interface_offset(slot) + offset_of!(Interface, endpoints));
                let admitted = mask.load(Ordering::Relaxed);
                if admitted & removed != 0 {
                    mask.store(admitted & !removed, Ordering::Relaxed);
                }
            }
        }
    }

    //----------- Interfaces ---------------------------------------------------

    pub(crate) fn interface(&self, ifindex: u32) -> Option<usize> {
        let number =
            |slot: usize| self.half(interface_offset(slot) + offset_of!(Interface, ifindex));
        tries(ifindex).find(|&slot| number(slot).load(Ordering::Relaxed) == ifindex)
    }

    /// Adds interfaces, not serving any endpoint yet, and updates the address of interfaces already
    /// known. Returns the interfaces for which every possible slot is taken.
    pub(crate) fn add_interfaces(&self, interfaces: &[Served]) -> Vec<u32> {
        let mut new = Vec::new();
        for interface in interfaces {
            match self.interface(interface.ifindex) {
                // The address and the flags are each written as one word.
                Some(slot) => self.describe(slot, interface),
                None => new.push(interface),
            }
        }
        if new.is_empty() {
            return Vec::new();
        }
        // From here on no run uses a slot removed earlier.
        self.wait_for_runs();
        let mut placed = Vec::new();
        let mut left = Vec::new();
        for interface in new {
            let free = tries(interface.ifindex).find(|&slot| {
                let number = self.half(interface_offset(slot) + offset_of!(Interface, ifindex));
                // The slots of this batch get their numbers only at the end.
                let is_taken = placed.iter().any(|&(taken, _)| taken == slot);
                number.load(Ordering::Relaxed) == 0 && !is_taken
            });
            let Some(slot) = free else {
                left.push(interface.ifindex);
                continue;
            };
            let at = interface_offset(slot);
            self.word(at + offset_of!(Interface, endpoints))
                .store(0, Ordering::Relaxed);
            self.word(at + offset_of!(Interface, heard_only))
                .store(0, Ordering::Relaxed);
            for word in 0..MAX_ENDPOINTS * size_of::<Probe>() / 8 {
                self.word(at + offset_of!(Interface, probes) + word * 8)
                    .store(0, Ordering::Relaxed);
            }
            self.describe(slot, interface);
            placed.push((slot, interface));
        }
        self.wait_for_runs();
        // From here on every run that finds a number sees the rest of its slot.
        for (slot, interface) in placed {
            let number = self.half(interface_offset(slot) + offset_of!(Interface, ifindex));
            number.store(interface.ifindex, Ordering::Release);
        }
        left
    }

    /// Writes the properties that may change while an interface is served.
    fn describe(&self, slot: usize, interface: &Served) {
        let at = interface_offset(slot);
        self.word(at + offset_of!(Interface, address))
            .store(padded_address(interface.address), Ordering::Relaxed);
        self.word(at + offset_of!(Interface, master))
            .store(padded_address(interface.master), Ordering::Relaxed);
        let flags =
            if interface.near { NEAR } else { 0 } | if interface.bounded { BOUNDED } else { 0 };
        self.half(at + offset_of!(Interface, flags))
            .store(flags, Ordering::Relaxed);
    }

    /// Serves an interface for exactly these endpoints, given as bits of their slots, and only heard clients at those in
    /// `heard_only`.
    pub(crate) fn admit(&self, ifindex: u32, endpoints: u64, heard_only: u64) {
        let Some(slot) = self.interface(ifindex) else {
            return;
        };
        let at = interface_offset(slot);
        // In this order: a run between both stores must not answer clients that have not been
        // heard.
        self.word(at + offset_of!(Interface, heard_only))
            .store(heard_only, Ordering::Release);
        self.word(at + offset_of!(Interface, endpoints))
            .store(endpoints, Ordering::Release);
    }

    /// Removes an interface: its queries pass to the network stack from now on.
    pub(crate) fn remove_interface(&self, ifindex: u32) {
        let Some(slot) = self.interface(ifindex) else {
            return;
        };
        // The rest of the slot stays as it is, because a run may be reading it; it is cleared
        // before its next use.
        let number = self.half(interface_offset(slot) + offset_of!(Interface, ifindex));
        number.store(0, Ordering::Relaxed);
    }

    /// Postpones an interface's next probe until `pause` from now; zero: it is due. A program overwrites
    /// the time only when a probe is due.
    pub(crate) fn defer_probe(&self, ifindex: u32, endpoint: usize, pause: Duration) {
        let Some(slot) = self.interface(ifindex) else {
            return;
        };
        let at = interface_offset(slot)
            + offset_of!(Interface, probes)
            + endpoint % MAX_ENDPOINTS * size_of::<Probe>();
        let pause = u64::try_from(pause.as_nanos()).unwrap_or(u64::MAX);
        let due = if pause == 0 {
            0
        } else {
            kernel_monotonic_ns().saturating_add(pause)
        };
        self.word(at + offset_of!(Probe, due_ns))
            .store(due, Ordering::Relaxed);
    }

    pub(crate) fn probed(&self, ifindex: u32, endpoint: usize) -> Option<Probed> {
        let at = interface_offset(self.interface(ifindex)?)
            + offset_of!(Interface, probes)
            + endpoint % MAX_ENDPOINTS * size_of::<Probe>();
        let count = self.word(at + offset_of!(Probe, count));
        loop {
            // The record has no lock. Probes are a second apart, so a few tries suffice.
            let before = count.load(Ordering::Acquire);
            let client_at = at + offset_of!(Probe, client);
            let client = [client_at, client_at + 8].map(|at| self.word(at).load(Ordering::Acquire));
            let client: [u8; 16] = transmute!(client);
            // An unchanged count means that no other probe was written in between.
            if count.load(Ordering::Acquire) == before {
                return Some(Probed {
                    count: before,
                    client: IpAddr::from(client).to_canonical(),
                });
            }
        }
    }
}

/// Offset of the word with port and family in an endpoint.
const META: usize = offset_of!(Endpoint, port);

const fn endpoint_offset(slot: usize) -> usize {
    offset_of!(Scope, endpoints) + slot * size_of::<Endpoint>()
}

const fn interface_offset(slot: usize) -> usize {
    offset_of!(Scope, interfaces) + slot * size_of::<Interface>()
}

/// Returns an Ethernet address as a word, so that the programs compare it at once.
fn padded_address([a, b, c, d, e, f]: [u8; 6]) -> u64 {
    u64::from_ne_bytes([a, b, c, d, e, f, 0, 0])
}

/// Returns the slots that an interface may occupy.
fn tries(ifindex: u32) -> impl Iterator<Item = usize> {
    (0..INTERFACE_TRIES).map(move |step| (Scope::first_slot(ifindex) + step) % INTERFACES)
}

/// Returns an address as the programs store and compare it, in one length: IPv4 as `::ffff:a.b.c.d`.
pub(crate) fn address_bytes(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
        IpAddr::V6(ip) => ip.octets(),
    }
}

/// Returns an address in the form that the programs hash.
fn words_of(address: IpAddr) -> [u32; 4] {
    match address {
        IpAddr::V4(ip) => [0, 0, 0, u32::from_ne_bytes(ip.octets())],
        IpAddr::V6(ip) => transmute!(ip.octets()),
    }
}

#[cfg(test)]
mod tests {
    use std::{
        cell::Cell,
        net::{Ipv4Addr, Ipv6Addr},
    };

    use memmap2::MmapOptions;

    use super::*;

    thread_local! {
        /// Number of grace periods waited for.
        static GRACE_PERIODS: Cell<usize> = const { Cell::new(0) };
    }

    impl ScopePage {
        /// Returns a page that no program reads.
        pub(crate) fn anonymous() -> Self {
            page()
        }
    }

    /// Returns a page in anonymous memory.
    fn page() -> ScopePage {
        let map = MmapOptions::new()
            .len(size_of::<Scope>())
            .map_anon()
            .unwrap();
        ScopePage {
            map: MmapRaw::from(map),
            grace: || GRACE_PERIODS.with(|count| count.set(count.get() + 1)),
            is_read: AtomicBool::new(false),
        }
    }

    fn endpoint(last: u8) -> Endpoint {
        Endpoint {
            address: [last; 16],
            port: [0, 53],
            family: 4,
            padding: [0; 5],
        }
    }

    fn served(ifindex: u32) -> Served {
        Served {
            ifindex,
            address: [2; 6],
            master: [2; 6],
            near: true,
            bounded: false,
        }
    }

    #[test]
    fn endpoint_keeps_slot() {
        let page = page();
        page.set_endpoints(&[endpoint(1), endpoint(2), endpoint(3)]);
        page.add_interfaces(&[served(7)]);
        page.admit(7, 0b111, 0);
        page.set_endpoints(&[endpoint(3), endpoint(4), endpoint(1)]);
        assert_eq!(
            [1, 2, 3, 4].map(|last| page.slot_of(&endpoint(last))),
            [Some(0), None, Some(2), Some(1)]
        );
        let slot = page.interface(7).unwrap();
        let mask = page.word(interface_offset(slot) + offset_of!(Interface, endpoints));
        assert_eq!(
            mask.load(Ordering::Relaxed),
            0b101,
            "the new endpoint is admitted by nobody yet"
        );
    }

    #[test]
    fn grace_periods_begin_with_the_first_attachment() {
        let page = page();
        page.set_endpoints(&[endpoint(1)]);
        page.add_interfaces(&[served(7), served(8)]);
        assert_eq!(GRACE_PERIODS.get(), 0, "no program reads the map");
        page.expect_runs();
        page.set_endpoints(&[endpoint(1)]);
        page.add_interfaces(&[served(7)]);
        assert_eq!(GRACE_PERIODS.get(), 0, "nothing is new");
        page.add_interfaces(&[served(7), served(9)]);
        assert_eq!(GRACE_PERIODS.get(), 2);
        page.set_endpoints(&[endpoint(2)]);
        assert_eq!(GRACE_PERIODS.get(), 4);
    }

    #[test]
    fn few_clients_seem_local() {
        let page = page();
        // Gateways and broadcast addresses of a dense cell's containers, and their link-local addresses.
        let network = |number: u32| 0x0af0_0000 + 4 * number;
        let local = (0..333).flat_map(|number| {
            let mac = 0x02aa_00ff_fe00_0000 | u64::from(number);
            let link_local = Ipv6Addr::from_bits(0xfe80 << 112 | u128::from(mac));
            [1, 3]
                .map(|last| Ipv4Addr::from_bits(network(number) + last).into())
                .into_iter()
                .chain([link_local.into()])
        });
        page.set_refused_sources(local);
        let is_refused = |address: Ipv4Addr| {
            let (word, bits) = Scope::refused_source(source_hash(words_of(address.into())));
            page.word(offset_of!(Scope, refused_sources) + word * 8)
                .load(Ordering::Relaxed)
                & bits
                == bits
        };
        assert!((0..333).all(|number| is_refused(Ipv4Addr::from_bits(network(number) + 3))));
        let clients = (0..20_000).map(|number| Ipv4Addr::from_bits(network(number) + 2));
        let refused = clients.filter(|&client| is_refused(client)).count();
        assert!(refused <= 10, "{refused} of 20,000");
    }

    #[test]
    fn colliding_interfaces_get_separate_slots() {
        let page = page();
        let numbers: Vec<u32> = (0..17).map(|round| 5 + round * INTERFACES as u32).collect();
        let all: Vec<Served> = numbers.iter().map(|&number| served(number)).collect();
        assert_eq!(
            page.add_interfaces(&all),
            [numbers[16]],
            "the seventeenth finds no slot"
        );
        let mut slots: Vec<usize> = numbers[..16]
            .iter()
            .map(|&number| page.interface(number).unwrap())
            .collect();
        slots.dedup();
        assert_eq!(slots.len(), 16);
        page.remove_interface(numbers[3]);
        assert!(page.add_interfaces(&[served(numbers[16])]).is_empty());
        assert_eq!(page.interface(numbers[16]), Some(slots[3]));
        assert_eq!(page.interface(numbers[15]), Some(slots[15]), "behind a gap");
    }
}
