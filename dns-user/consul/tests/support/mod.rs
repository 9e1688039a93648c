//! Reads the cases below `tests/cases`, or in the folder named by `BOSH_DNS_CONSUL_CASES`, and compares
//! replies with the expectations. The format is described in `tests/cases/README.md`.

pub(crate) mod expect;
pub(crate) mod scenario;

pub(crate) use scenario::{Case, Scenario};

use hickory_proto::{
    op::{Edns, Message, MessageType, OpCode, Query},
    rr::{
        Name, RecordType,
        rdata::opt::{ClientSubnet, EdnsOption},
    },
};

/// The query of a case.
pub(crate) fn query_of(case: &Case, id: u16) -> Vec<u8> {
    let kind: RecordType = case.kind.parse().expect("a type that hickory knows");
    let mut name = Name::from_ascii(&case.q).expect("a name");
    name.set_fqdn(true);
    let mut message = Message::new(id, MessageType::Query, OpCode::Query);
    message.metadata.recursion_desired = true;
    message.add_query(Query::query(name, kind));
    if let Some(size) = case.edns {
        let mut edns = Edns::new();
        edns.set_max_payload(size);
        if let Some(ecs) = &case.ecs {
            let subnet = ClientSubnet::new(ecs.address, ecs.prefix, 0);
            edns.options_mut().insert(EdnsOption::Subnet(subnet));
        }
        message.set_edns(edns);
    }
    let mut bytes = message.to_vec().expect("an encodable query");
    if let Some(size) = case.edns {
        raw_udp_size(&mut bytes, size);
    }
    bytes
}

/// Hickory raises sizes below 512, so the case's own size is written into the OPT.
fn raw_udp_size(bytes: &mut [u8], size: u16) {
    let at = bytes
        .windows(3)
        .rposition(|window| window == [0, 0, 41])
        .expect("an OPT")
        + 3;
    bytes[at..at + 2].copy_from_slice(&size.to_be_bytes());
}
