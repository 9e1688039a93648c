//! The client subnet option (RFC 7871).

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use dns_core::wire::Query;

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
    /// Appends the reply's option: a copy of the query's, with the scope for which the answer is valid.
    pub(crate) fn write(&self, scope: u8, out: &mut Vec<u8>) {
        out.extend_from_slice(&CLIENT_SUBNET.to_be_bytes());
        // It came behind a length of 16 bits.
        out.extend_from_slice(&(self.option.len() as u16).to_be_bytes());
        let start = out.len();
        out.extend_from_slice(self.option);
        out[start + 3] = scope;
    }
}

/// The Client Subnet option of a query.
pub(crate) fn client_subnet<'a>(query: &Query<'a>) -> Option<ClientSubnet<'a>> {
    // Code and length come first.
    read(query.client_subnet()?.get(4..)?)
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
