//! Agreement between the test of network cards and the init process of its virtual machine.

use std::net::{Ipv4Addr, Ipv6Addr};

/// A network card of the virtual machine. Cards are identified by their number in [`CARDS`], which
/// ends their MAC address and is part of their networks.
#[derive(Debug)]
pub struct Card {
    /// Name of qemu's device.
    pub device: &'static str,
}

/// All cards of the machine.
pub const CARDS: [Card; 3] = [
    Card {
        device: "virtio-net-pci",
    },
    Card { device: "vmxnet3" },
    Card { device: "e1000e" },
];

/// Values of `xdp.mode`, in the order of the machine.
pub const MODES: [&str; 2] = ["native", "auto"];

/// Sizes of the groups in the records: replies of about 60 to 1,900 bytes.
pub const GROUPS: [u16; 5] = [1, 10, 30, 70, 114];

/// TCP port on which the machine reports on a mode and then starts the next one.
pub const NEXT_MODE: u16 = 7;

impl Card {
    /// Returns the machine's IPv4 address on this card, in a network of 24 bits.
    pub fn v4(&self, number: usize) -> Ipv4Addr {
        Ipv4Addr::new(198, 18, u8::try_from(number).expect("a few cards"), 2)
    }

    /// Returns the machine's IPv6 address on this card, in a network of 64 bits.
    pub fn v6(&self, number: usize) -> Ipv6Addr {
        Ipv6Addr::new(
            0xfd00,
            u16::try_from(number).expect("a few cards"),
            0,
            0,
            0,
            0,
            0,
            2,
        )
    }
}
