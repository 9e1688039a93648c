//! The client subnet option (RFC 7871).

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use dns_core::wire::{HEADER_LEN, Query, TYPE_OPT};

/// Option code of the client subnet.
const CLIENT_SUBNET: u16 = 8;

/// Where a client says it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ClientSubnet<'a> {
    /// The address, bits behind the prefix clear.
    pub(crate) address: IpAddr,
    /// How many of its bits count.
    pub(crate) prefix: u8,
    /// Family, prefixes and address as they came.
    option: &'a [u8],
}

impl ClientSubnet<'_> {
    /// Appends the option as a reply has it: that of the query, with the scope that
    /// the answer is good for.
    pub(crate) fn write(&self, scope: u8, out: &mut Vec<u8>) {
        out.extend_from_slice(&CLIENT_SUBNET.to_be_bytes());
        // It came behind a length of 16 bits.
        out.extend_from_slice(&(self.option.len() as u16).to_be_bytes());
        let start = out.len();
        out.extend_from_slice(self.option);
        out[start + 3] = scope;
    }
}

/// The client subnet option of a query.
pub(crate) fn client_subnet<'a>(query: &Query<'a>) -> Option<ClientSubnet<'a>> {
    query.edns?;
    // Clients send the OPT right behind the question; whatever else there may be is
    // no reason to look further.
    let opt = query.message.get(HEADER_LEN + query.question.wire_len()..)?;
    let [0, type_high, type_low, ..] = *opt else { return None };
    if u16::from_be_bytes([type_high, type_low]) != TYPE_OPT {
        return None;
    }
    let length = u16::from_be_bytes(*opt.get(9..)?.first_chunk()?);
    let mut options = opt.get(11..11 + usize::from(length))?;
    while let Some(&[code_high, code_low, length_high, length_low]) = options.first_chunk() {
        let end = 4 + usize::from(u16::from_be_bytes([length_high, length_low]));
        let option = options.get(4..end)?;
        if u16::from_be_bytes([code_high, code_low]) == CLIENT_SUBNET {
            return read(option);
        }
        options = &options[end..];
    }
    None
}

/// Family, source prefix, scope prefix, as many bytes of the address as the prefix takes.
fn read(option: &[u8]) -> Option<ClientSubnet<'_>> {
    let (&[family_high, family_low, prefix, _scope], bytes) = option.split_first_chunk()?;
    let address = match u16::from_be_bytes([family_high, family_low]) {
        1 => IpAddr::V4(Ipv4Addr::from(padded::<4>(bytes)?)),
        2 => IpAddr::V6(Ipv6Addr::from(padded::<16>(bytes)?)),
        _ => return None,
    };
    Some(ClientSubnet { address, prefix, option })
}

/// The bytes, with zeros behind them; `None`: there are too many.
fn padded<const N: usize>(bytes: &[u8]) -> Option<[u8; N]> {
    let mut whole = [0; N];
    whole.get_mut(..bytes.len())?.copy_from_slice(bytes);
    Some(whole)
}
