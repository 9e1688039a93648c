//! The client subnet option (RFC 7871).

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use dns_core::wire::Query;

/// Option code of the client subnet.
const CLIENT_SUBNET: u16 = 8;

/// Client subnet of a query.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ClientSubnet<'a> {
    /// Address with the bits after the prefix cleared.
    pub(crate) address: IpAddr,
    pub(crate) prefix: u8,
    /// Option data as received: family, prefixes and address.
    option: &'a [u8],
}

impl ClientSubnet<'_> {
    /// Appends the reply's option: a copy of the query's, with the scope for which the answer is
    /// valid.
    pub(crate) fn write(&self, scope: u8, out: &mut Vec<u8>) {
        out.extend_from_slice(&CLIENT_SUBNET.to_be_bytes());
        // The received length also had 16 bits.
        out.extend_from_slice(&(self.option.len() as u16).to_be_bytes());
        let start = out.len();
        out.extend_from_slice(self.option);
        out[start + 3] = scope;
    }
}

/// Returns the client subnet of a query; `None` if it is missing or malformed.
pub(crate) fn client_subnet<'a>(query: &Query<'a>) -> Option<ClientSubnet<'a>> {
    // Skips option code and length.
    read(query.client_subnet()?.get(4..)?)
}

/// Parses the option data: family, source prefix, scope prefix, and as many address bytes as the
/// prefix needs.
fn read(option: &[u8]) -> Option<ClientSubnet<'_>> {
    let (&[family_high, family_low, prefix, _scope], bytes) = option.split_first_chunk()?;
    let address = match u16::from_be_bytes([family_high, family_low]) {
        1 => IpAddr::V4(Ipv4Addr::from(padded::<4>(bytes)?)),
        2 => IpAddr::V6(Ipv6Addr::from(padded::<16>(bytes)?)),
        _ => return None,
    };
    Some(ClientSubnet { address, prefix, option })
}

/// Returns the bytes padded with zeros; `None` if there are too many.
fn padded<const N: usize>(bytes: &[u8]) -> Option<[u8; N]> {
    let mut whole = [0; N];
    whole.get_mut(..bytes.len())?.copy_from_slice(bytes);
    Some(whole)
}
