//! Targets of x_tables (`linux/netfilter/xt_*.h`), for legacy tables and `iptables-nft`.

use std::net::{IpAddr, SocketAddr};

use super::{
    matches::{u16_at, u32_at},
    packet::{Mark, Packet},
    walk::{Action, Meets},
};

/// A target with its parameters.
pub(super) struct Target<'a> {
    pub(super) name: &'a str,
    pub(super) revision: u8,
    pub(super) info: &'a [u8],
    /// Whether its rule is one of ip6tables.
    pub(super) v6: bool,
}

impl Target<'_> {
    /// Returns its action on a packet to this address; `None`: any packet.
    pub(super) fn action(&self, to: Option<SocketAddr>) -> Action {
        match self.name {
            "REJECT" => Action::Drop,
            "DNAT" | "REDIRECT" => {
                let is_same = |to| self.new_target().is_some_and(|target| target.is_exactly(to));
                if to.is_some_and(is_same) { Action::Accept } else { Action::Divert }
            }
            "NETMAP" | "TPROXY" | "SYNPROXY" | "DNPT" => Action::Divert,
            "MASQUERADE" | "SNAT" | "SNPT" => Action::Translate,
            // Later rules still see the packet; these targets change nothing that matters here.
            "LOG" | "NFLOG" | "ULOG" | "TRACE" | "AUDIT" | "MARK" | "CONNMARK" | "CONNSECMARK"
            | "SECMARK" | "CT" | "NOTRACK" | "DSCP" | "TOS" | "TTL" | "HL" | "ECN" | "CHECKSUM"
            | "CLASSIFY" | "TCPMSS" | "TCPOPTSTRIP" | "SET" | "TEE" | "RATEEST" | "IDLETIMER" | "LED"
            | "HMARK" => Action::Continue,
            "NFQUEUE" | "QUEUE" => Action::Unknown("NFQUEUE"),
            "CLUSTERIP" => Action::Unknown("CLUSTERIP"),
            _ => Action::Unknown("a target unknown to the server"),
        }
    }

    /// Returns whether the target may redirect packets for other machines to `endpoint`.
    pub(super) fn leads_to(&self, endpoint: SocketAddr) -> bool {
        match self.name {
            "DNAT" | "REDIRECT" => self.new_target().is_none_or(|target| target.may_be(endpoint)),
            "NETMAP" => true,
            _ => false,
        }
    }

    /// Applies the target's changes to a packet that meets its rule, perhaps.
    pub(super) fn change(&self, meets: Meets, packet: &mut Packet) {
        let Packet { mark, flow_mark, .. } = *packet;
        let (mut new_mark, mut new_flow_mark) = (mark, flow_mark);
        match self.name {
            "MARK" => new_mark = self.marked(mark).unwrap_or(Mark::UNKNOWN),
            // A packet without connection tracking has no flow.
            "CONNMARK" if packet.untracked => {}
            "CONNMARK" => match self.flow_marked(mark, flow_mark) {
                Some(changed) => (new_mark, new_flow_mark) = changed,
                None => (new_mark, new_flow_mark) = (Mark::UNKNOWN, Mark::UNKNOWN),
            },
            "HMARK" => new_mark = Mark::UNKNOWN,
            // `struct xt_set_info_target_v3`: the third set may hold marks; 0xffff means none.
            "SET" if self.revision >= 3 && u16_at(self.info, 8) != Some(0xffff) => new_mark = Mark::UNKNOWN,
            // `struct xt_ct_target_info`: flags, of which the first means notrack.
            "CT" if self.info.first().is_some_and(|flags| flags & 1 == 0) => {}
            "CT" | "NOTRACK" => packet.untracked |= meets == Meets::Yes,
            _ => {}
        }
        if meets != Meets::Yes {
            (new_mark, new_flow_mark) = (new_mark.or_else(mark), new_flow_mark.or_else(flow_mark));
        }
        (packet.mark, packet.flow_mark) = (new_mark, new_flow_mark);
    }

    /// Evaluates `struct xt_mark_tginfo2`: mark, mask.
    fn marked(&self, mark: Mark) -> Option<Mark> {
        (self.revision == 2).then_some(())?;
        let (new, mask) = (u32_at(self.info, 0)?, u32_at(self.info, 4)?);
        Some(mark.and(!mask).xor(Mark::known(new)))
    }

    /// Evaluates `struct xt_connmark_tginfo1` and `2`: returns the marks of packet and flow.
    fn flow_marked(&self, mark: Mark, flow_mark: Mark) -> Option<(Mark, Mark)> {
        const SET: u8 = 0;
        const SAVE: u8 = 1;
        let word = |at| u32_at(self.info, at);
        let (new, flow_mask, mask) = (word(0)?, word(4)?, word(8)?);
        let mode = match self.revision {
            1 => *self.info.get(12)?,
            // Shifted marks are not evaluated.
            2 if *self.info.get(13)? == 0 => *self.info.get(14)?,
            _ => return None,
        };
        Some(match mode {
            SET => (mark, flow_mark.and(!flow_mask).xor(Mark::known(new))),
            SAVE => (mark, flow_mark.and(!flow_mask).xor(mark.and(mask))),
            _ => (mark.and(!mask).xor(flow_mark.and(flow_mask)), flow_mark),
        })
    }

    /// Returns the destination of DNAT or REDIRECT.
    fn new_target(&self) -> Option<NewTarget> {
        NewTarget::read(self.name, self.revision, self.info, self.v6)
    }
}

/// The destination of a NAT rule.
#[derive(Debug)]
struct NewTarget {
    /// Range of addresses; `None`: the address stays, or becomes a local one.
    addresses: Option<(IpAddr, IpAddr)>,
    /// Range of ports; `None`: the port stays.
    ports: Option<(u16, u16)>,
    /// Whether the new address is the interface's, or 127.0.0.1 and ::1 at OUTPUT.
    is_redirect: bool,
}

impl NewTarget {
    /// Parses the target's data.
    fn read(name: &str, revision: u8, info: &[u8], v6: bool) -> Option<Self> {
        let is_redirect = name == "REDIRECT";
        // `struct nf_nat_ipv4_multi_range_compat`: a count, then one range; ports in network order.
        let (flags, address, ports) = if !v6 && (is_redirect || revision == 0) {
            let ip = |at: usize| info.get(at..)?.first_chunk::<4>().map(|octets| IpAddr::from(*octets));
            (u32_at(info, 4)?, (ip(8)?, ip(12)?), (info.get(16..20)?))
        } else {
            // `struct nf_nat_range`, `struct nf_nat_range2`.
            let ip = |at: usize| {
                let octets = info.get(at..)?.first_chunk::<16>()?;
                Some(if v6 { IpAddr::from(*octets) } else { IpAddr::from(*octets.first_chunk::<4>()?) })
            };
            (u32_at(info, 0)?, (ip(4)?, ip(20)?), (info.get(36..40)?))
        };
        let port = |bytes: &[u8]| u16::from_be_bytes([bytes[0], bytes[1]]);
        Some(Self {
            addresses: (flags & 1 != 0 && !is_redirect).then_some(address),
            ports: (flags & 2 != 0).then(|| (port(&ports[..2]), port(&ports[2..]))),
            is_redirect,
        })
    }

    /// Returns whether the rule leaves every packet's destination unchanged.
    fn is_exactly(&self, to: SocketAddr) -> bool {
        !self.is_redirect
            && self.addresses.is_none_or(|range| range == (to.ip(), to.ip()))
            && self.ports.is_none_or(|range| range == (to.port(), to.port()))
    }

    /// Returns whether a packet for another machine may be redirected to this endpoint.
    fn may_be(&self, endpoint: SocketAddr) -> bool {
        let port = self.ports.is_none_or(|(from, to)| (from..=to).contains(&endpoint.port()));
        let address = match self.addresses {
            Some((from, to)) => (from..=to).contains(&endpoint.ip()),
            None => self.is_redirect && endpoint.ip().is_loopback(),
        };
        port && address
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Targets of Linux 6.18 for either family, except the end of a chain (`/proc/net/ip_tables_targets`,
    /// `ip6_tables_targets`).
    const OF_KERNEL: &str = "AUDIT CHECKSUM CLASSIFY CONNMARK CONNSECMARK CT DNAT DNPT DSCP ECN HL HMARK IDLETIMER LED LOG \
        MARK MASQUERADE NETMAP NFLOG NFQUEUE NOTRACK RATEEST REDIRECT REJECT SECMARK SET SNAT SNPT SYNPROXY TCPMSS \
        TCPOPTSTRIP TEE TOS TPROXY TRACE TTL";

    #[test]
    fn kernel_targets_are_known() {
        let action = |name| Target { name, revision: 0, info: &[], v6: true }.action(None);
        for name in OF_KERNEL.split_whitespace() {
            assert_ne!(action(name), action("NEW"), "{name}");
        }
        assert!(matches!(action("NEW"), Action::Unknown(_)));
    }
}
