//! The skeleton: the server's programs without the jobs that a mere lookup could do without (`IS_SKELETON` in `dns-ebpf`),
//! with names that the bench publishes. It shows what those jobs cost: checking checksums and sender, comparing the name,
//! choosing an order, and counting.

use std::net::Ipv4Addr;

use anyhow::Result;
use dns_common::{
    object,
    scope::{NEAR, Scope},
};
use dns_core::name::Name;
use nix::net::if_::if_nametoindex;
use whole_system_tests::{
    program::{Program, Published},
    yardstick::{self, Hook},
};

use crate::lab::{Lab, SERVER_INTERFACE};

/// Loads the programs with these names, and attaches them to the server's interface until they are dropped.
pub fn start(lab: &Lab, hook: Hook, names: &[(String, Vec<Ipv4Addr>)]) -> Result<Program> {
    let mut program = Program::load_object(bench_programs::SKELETON, false)?;
    let [address, _client] = lab.hardware_addresses()?;
    let ifindex = lab.server.run(|| if_nametoindex(SERVER_INTERFACE))??;
    program.set_endpoints(&[lab.endpoint()]);
    program.set_scope(|scope| {
        let interface = &mut scope.interfaces[Scope::first_slot(ifindex)];
        interface.ifindex = ifindex;
        // The client is on this machine, as the server finds out by itself.
        interface.flags = NEAR;
        // No gate opens endpoints here: nothing observes which queries reach userspace.
        interface.endpoints = u64::MAX;
        interface.address[..address.len()].copy_from_slice(&address);
    });
    for (name, addresses) in names {
        let published = Published {
            v4: addresses.clone(),
            ..Published::default()
        };
        program.publish(Name::from_text(name)?.as_wire(), &published)?;
    }
    let name = match hook {
        Hook::Native => object::XDP_PROGRAM,
        Hook::Tc => object::TC_PROGRAM,
    };
    yardstick::attach(program.ebpf(), name, hook, &lab.server, SERVER_INTERFACE)?;
    Ok(program)
}
