//! The kernel's filter of the packet socket: a classic BPF program (Documentation/networking/filter.rst).
//!
//! It passes UDP and TCP to and from the observed endpoints. When there are more packets than the process may compare,
//! it passes a share of them, chosen by the message's id and the client's port, so that a query and its reply are passed
//! both or not at all.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use dns_core::config::wildcard_receives;

/// An instruction of classic BPF.
pub type Instruction = libc::sock_filter;

/// Maximum number of endpoints; each takes at most 44 of the kernel's 4,096 instructions (`BPF_MAXINSNS`).
pub const MAX_ENDPOINTS: usize = 64;

/// The share of packets that passes: of 65,536 values, those below this one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share(u32);

/// Values that a packet may have.
const WHOLE: u32 = 1 << 16;
/// Spreads ids and ports that follow each other over all values (the golden ratio of 2^16).
const SPREAD: u32 = 40_503;

impl Share {
    /// Every packet passes.
    pub const ALL: Self = Self(WHOLE);

    /// No packet passes.
    pub const NONE: Self = Self(0);

    /// Returns the share from 0 to 1.
    pub fn fraction(self) -> f64 {
        f64::from(self.0) / f64::from(WHOLE)
    }

    /// Returns half of it, at least one value of 65,536.
    pub fn halved(self) -> Self {
        Self((self.0 / 2).max(1))
    }

    /// Returns a quarter more, at most all.
    pub fn raised(self) -> Self {
        Self((self.0 + self.0 / 4 + 1).min(WHOLE))
    }

    /// Returns whether the filter passes a message with this id and port of the client.
    #[cfg(test)]
    fn holds(self, id: u16, port: u16) -> bool {
        (u32::from(id) + u32::from(port)).wrapping_mul(SPREAD) & (WHOLE - 1) < self.0
    }
}

// Modes of loads and forms of jumps; libc has their parts.
const LOAD_WORD: u32 = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
const LOAD_HALF: u32 = libc::BPF_LD | libc::BPF_H | libc::BPF_ABS;
const LOAD_BYTE: u32 = libc::BPF_LD | libc::BPF_B | libc::BPF_ABS;
const LOAD_HALF_AT_X: u32 = libc::BPF_LD | libc::BPF_H | libc::BPF_IND;
const JUMP_EQUAL: u32 = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
const JUMP_SET: u32 = libc::BPF_JMP | libc::BPF_JSET | libc::BPF_K;
const JUMP_NOT_BELOW: u32 = libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K;
const RETURN: u32 = libc::BPF_RET | libc::BPF_K;

/// Offset of the packet's EtherType in the kernel's ancillary data (`SKF_AD_OFF + SKF_AD_PROTOCOL`).
const ETHERTYPE: u32 = -0x1000_i32 as u32;
/// Whole packets are passed.
const PASS: u32 = 0x4_0000;

const UDP: u32 = 17;
const TCP: u32 = 6;

/// Returns the program for these endpoints.
pub fn program(endpoints: &[SocketAddr], share: Share) -> Vec<Instruction> {
    let mut program = Vec::new();
    for (ethertype, is_v6) in [(0x0800, false), (0x86dd, true)] {
        let body = family(endpoints, is_v6, share);
        program.push(instruction(LOAD_HALF, ETHERTYPE));
        // A conditional jump reaches 255 instructions; the body may be longer.
        program.push(jump(JUMP_EQUAL, ethertype, 1, 0));
        let length = u32::try_from(body.len()).unwrap_or(u32::MAX);
        program.push(instruction(libc::BPF_JMP | libc::BPF_JA, length));
        program.extend(body);
    }
    program.push(instruction(RETURN, 0));
    program
}

/// Returns the program for packets of one family; it always returns.
fn family(endpoints: &[SocketAddr], is_v6: bool, share: Share) -> Vec<Instruction> {
    let mut program = Vec::new();
    let protocol_at = if is_v6 { 6 } else { 9 };
    program.push(instruction(LOAD_BYTE, protocol_at));
    program.push(jump(JUMP_EQUAL, UDP, 2, 0));
    program.push(jump(JUMP_EQUAL, TCP, 1, 0));
    program.push(instruction(RETURN, 0));
    if is_v6 {
        // X: length of the header.
        program.push(instruction(libc::BPF_LDX | libc::BPF_IMM, 40));
    } else {
        // Later fragments have no ports. First ones pass and are counted.
        program.push(instruction(LOAD_HALF, 6));
        program.push(jump(JUMP_SET, 0x1fff, 0, 1));
        program.push(instruction(RETURN, 0));
        program.push(instruction(libc::BPF_LDX | libc::BPF_B | libc::BPF_MSH, 0));
    }
    let address_at = if is_v6 { [8, 24] } else { [12, 16] };
    for endpoint in endpoints {
        // `watch::Endpoints` leaves out other servers at a wildcard's port.
        let is_of_family = endpoint.is_ipv6() == is_v6
            || !is_v6 && wildcard_receives(*endpoint, Ipv4Addr::UNSPECIFIED.into(), &[]);
        if !is_of_family {
            continue;
        }
        // As the source with the client's port second, then as the destination.
        for (side, (own, clients)) in [(0, (0, 2)), (1, (2, 0))] {
            let mut accept = chosen(clients, protocol_at, share);
            let mut test = Vec::new();
            for (word, at) in words(endpoint, address_at[side]) {
                test.push(instruction(LOAD_WORD, at));
                test.push(jump(JUMP_EQUAL, word, 0, u8::MAX));
            }
            test.push(instruction(LOAD_HALF_AT_X, own));
            test.push(jump(JUMP_EQUAL, u32::from(endpoint.port()), 0, u8::MAX));
            test.append(&mut accept);
            resolve_misses(&mut test);
            program.append(&mut test);
        }
    }
    program.push(instruction(RETURN, 0));
    program
}

/// Returns the words of an address with their offsets; none for a wildcard.
fn words(endpoint: &SocketAddr, at: u32) -> Vec<(u32, u32)> {
    let octets = match endpoint.ip() {
        // Any address of the machine may be meant; the port alone decides.
        address if address.is_unspecified() => return Vec::new(),
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    };
    let words = octets.chunks_exact(4).map(|word| {
        let word: [u8; 4] = word.try_into().expect("chunks of four");
        u32::from_be_bytes(word)
    });
    words.zip((at..).step_by(4)).collect()
}

/// Returns the end of a test: passes the share of the packets.
fn chosen(clients_port_at: u32, protocol_at: u32, share: Share) -> Vec<Instruction> {
    /// Offset of a message's id behind the UDP header.
    const ID: u32 = 8;
    // Without a choice, packets are spared the test of id and port.
    if share == Share::ALL {
        return vec![instruction(RETURN, PASS)];
    }
    vec![
        instruction(LOAD_HALF_AT_X, clients_port_at),
        instruction(libc::BPF_ST, 0),
        // The messages of a TCP connection are chosen by its port alone: their ids are at no fixed place.
        instruction(LOAD_BYTE, protocol_at),
        jump(JUMP_EQUAL, UDP, 0, 4),
        instruction(LOAD_HALF_AT_X, ID),
        instruction(libc::BPF_LDX | libc::BPF_MEM, 0),
        instruction(libc::BPF_ALU | libc::BPF_ADD | libc::BPF_X, 0),
        instruction(libc::BPF_JMP | libc::BPF_JA, 1),
        instruction(libc::BPF_LD | libc::BPF_MEM, 0),
        instruction(libc::BPF_ALU | libc::BPF_MUL | libc::BPF_K, SPREAD),
        instruction(libc::BPF_ALU | libc::BPF_AND | libc::BPF_K, WHOLE - 1),
        jump(JUMP_NOT_BELOW, share.0, 1, 0),
        instruction(RETURN, PASS),
        instruction(RETURN, 0),
    ]
}

/// Lets every test that fails continue behind the program part: the marker [`u8::MAX`] becomes the distance.
fn resolve_misses(test: &mut [Instruction]) {
    let length = test.len();
    for (at, instruction) in test.iter_mut().enumerate() {
        if instruction.jf == u8::MAX {
            // A part has at most 24 instructions.
            instruction.jf = u8::try_from(length - at - 1).expect("a short part");
        }
    }
}

fn instruction(code: u32, value: u32) -> Instruction {
    jump(code, value, 0, 0)
}

fn jump(code: u32, value: u32, if_true: u8, if_false: u8) -> Instruction {
    Instruction {
        // The codes of classic BPF have 16 bits.
        code: code as u16,
        jt: if_true,
        jf: if_false,
        k: value,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A machine for the instructions that [`program`] uses.
    fn passes(program: &[Instruction], ethertype: u16, packet: &[u8]) -> bool {
        let mut a = 0_u32;
        let mut x = 0_u32;
        let mut cell = 0_u32;
        let mut at = 0_usize;
        let load = |at: u32, bytes: usize| -> Option<u32> {
            let at = at as usize;
            let slice = packet.get(at..at + bytes)?;
            Some(
                slice
                    .iter()
                    .fold(0, |sum, byte| sum << 8 | u32::from(*byte)),
            )
        };
        loop {
            let Instruction { code, jt, jf, k } = program[at];
            at += 1;
            let code = u32::from(code);
            let loaded = match code {
                LOAD_HALF if k == ETHERTYPE => Some(u32::from(ethertype)),
                LOAD_WORD => load(k, 4),
                LOAD_HALF => load(k, 2),
                LOAD_BYTE => load(k, 1),
                LOAD_HALF_AT_X => load(x + k, 2),
                _ => Some(a),
            };
            // The kernel drops a packet on a load beyond its end.
            let Some(loaded) = loaded else { return false };
            a = loaded;
            let holds = match code {
                JUMP_EQUAL => a == k,
                JUMP_SET => a & k != 0,
                JUMP_NOT_BELOW => a >= k,
                RETURN => return k > 0,
                _ => {
                    match code {
                        c if c == libc::BPF_JMP | libc::BPF_JA => at += k as usize,
                        c if c == libc::BPF_LDX | libc::BPF_IMM => x = k,
                        c if c == libc::BPF_LDX | libc::BPF_MEM => x = cell,
                        c if c == libc::BPF_LDX | libc::BPF_B | libc::BPF_MSH => {
                            x = u32::from(packet[k as usize] & 15) * 4;
                        }
                        c if c == libc::BPF_ST => cell = a,
                        c if c == libc::BPF_LD | libc::BPF_MEM => a = cell,
                        c if c == libc::BPF_ALU | libc::BPF_ADD | libc::BPF_X => {
                            a = a.wrapping_add(x);
                        }
                        c if c == libc::BPF_ALU | libc::BPF_MUL | libc::BPF_K => {
                            a = a.wrapping_mul(k);
                        }
                        c if c == libc::BPF_ALU | libc::BPF_AND | libc::BPF_K => a &= k,
                        LOAD_WORD | LOAD_HALF | LOAD_BYTE | LOAD_HALF_AT_X => {}
                        other => panic!("unknown code {other:#x}"),
                    }
                    continue;
                }
            };
            at += usize::from(if holds { jt } else { jf });
        }
    }

    /// Returns a packet with options in its IPv4 header.
    fn packet(
        protocol: u8,
        source: SocketAddr,
        destination: SocketAddr,
        id: u16,
    ) -> (u16, Vec<u8>) {
        let mut transport = Vec::new();
        transport.extend(source.port().to_be_bytes());
        transport.extend(destination.port().to_be_bytes());
        transport.extend([0, 20, 0, 0]);
        transport.extend(id.to_be_bytes());
        transport.extend([0; 10]);
        match (source.ip(), destination.ip()) {
            (IpAddr::V4(source), IpAddr::V4(destination)) => {
                let mut bytes = vec![0x46, 0, 0, 44, 0, 0, 0x40, 0, 64, protocol, 0, 0];
                bytes.extend(source.octets());
                bytes.extend(destination.octets());
                bytes.extend([1, 1, 1, 1]);
                bytes.extend(transport);
                (0x0800, bytes)
            }
            (IpAddr::V6(source), IpAddr::V6(destination)) => {
                let mut bytes = vec![0x60, 0, 0, 0, 0, 20, protocol, 64];
                bytes.extend(source.octets());
                bytes.extend(destination.octets());
                bytes.extend(transport);
                (0x86dd, bytes)
            }
            _ => panic!("one family"),
        }
    }

    fn endpoint(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    #[test]
    fn only_packets_of_the_endpoints_pass() {
        let endpoints = [
            endpoint("169.254.0.2:53"),
            endpoint("[fd00::2]:53"),
            endpoint("10.0.0.9:5353"),
        ];
        let program = program(&endpoints, Share::ALL);
        for (from, to, expected) in [
            ("10.1.1.1:4000", "169.254.0.2:53", true),
            ("169.254.0.2:53", "10.1.1.1:4000", true),
            ("10.1.1.1:4000", "169.254.0.3:53", false),
            ("10.1.1.1:4000", "169.254.0.2:54", false),
            ("10.1.1.1:4000", "10.0.0.9:5353", true),
            ("10.1.1.1:4000", "10.0.0.9:53", false),
            ("[fd00::1]:4000", "[fd00::2]:53", true),
            ("[fd00::2]:53", "[fd00::1]:4000", true),
            ("[fd00::1]:53", "[fd00::3]:53", false),
        ] {
            for protocol in [6, 17] {
                let (ethertype, bytes) = packet(protocol, endpoint(from), endpoint(to), 7);
                assert_eq!(passes(&program, ethertype, &bytes), expected, "{from} {to}");
            }
            let (ethertype, bytes) = packet(1, endpoint(from), endpoint(to), 7);
            assert!(!passes(&program, ethertype, &bytes), "not UDP or TCP");
            assert!(!passes(&program, 0x0806, &bytes), "not IP");
        }
    }

    #[test]
    fn wildcards_of_ipv6_cover_ipv4() {
        let program = program(&[endpoint("[::]:53")], Share::ALL);
        for (from, to) in [
            ("10.1.1.1:4000", "10.0.0.2:53"),
            ("[fd00::1]:9", "[fd00::2]:53"),
        ] {
            let (ethertype, bytes) = packet(17, endpoint(from), endpoint(to), 7);
            assert!(passes(&program, ethertype, &bytes), "{from} {to}");
        }
    }

    /// Also a client that counts its ids up on one port is sampled evenly.
    #[test]
    fn a_share_passes_with_query_and_reply() {
        let client = endpoint("10.1.1.1:4000");
        let server = endpoint("10.0.0.2:53");
        let share = Share::ALL.halved().halved().halved();
        let program = program(&[server], share);
        let mut passed = 0;
        for id in 0..8000 {
            let (ethertype, query) = packet(17, client, server, id);
            let (_, reply) = packet(17, server, client, id);
            let is_chosen = passes(&program, ethertype, &query);
            assert_eq!(is_chosen, passes(&program, ethertype, &reply), "{id}");
            assert_eq!(is_chosen, share.holds(id, 4000), "{id}");
            passed += u32::from(is_chosen);
        }
        assert!((900..1100).contains(&passed), "{passed}");
    }

    #[test]
    fn the_largest_program_fits() {
        let endpoints: Vec<SocketAddr> = (0..MAX_ENDPOINTS)
            .map(|number| endpoint(&format!("[fd00::{number:x}]:53")))
            .collect();
        let length = program(&endpoints, Share::ALL.halved()).len();
        assert!(length <= 4096, "{length}");
    }
}
