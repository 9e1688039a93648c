//! The packet programs under `BPF_PROG_TEST_RUN`: the real programs on packets in memory, without
//! an interface.
//!
//! - [`fixtures`]: an extensible table of packets.
//! - [`random`]: random and mutated packets, and every length of names and frames.
//! - [`interfaces`]: packets on an interface other than `lo`.
//! - [`forwarded`]: replies from forwarded answers, compared with userspace's.
//! - [`local_replies`]: replies of other types, compared with the model.
//! - [`lookup`]: lookup of entries.
//! - [`overload`]: load shedding.
//! - [`preemption`]: a run that interrupts another.
//! - [`shuffle`]: the order of answers, statistically.
//! - [`differential`]: random packets in random set-ups, with and without the fast path.
//! - [`object`]: the object's requirements on the kernel.
//! - [`generator`]: the load generator's programs.
//! - [`other_kernel`]: all of these on other kernels, in a virtual machine.
//! - [`kernel_image`]: the kernel inside a compressed image.
//! - [`network_cards`]: the server behind emulated network cards, in a virtual machine.
//! - [`model`]: a plain model of the programs, the reference for table and random packets.

mod differential;
mod fixtures;
mod forwarded;
mod generator;
mod interfaces;
mod kernel_image;
mod local_replies;
mod lookup;
mod model;
mod network_cards;
mod object;
mod other_kernel;
mod overload;
mod packet;
mod preemption;
mod random;
mod random_replies;
mod shuffle;

use std::{
    net::{IpAddr, SocketAddr},
    sync::OnceLock,
};

use dns_common::XDP_HEAD_ROOM;
use parking_lot::{Mutex, MutexGuard};
use whole_system_tests::{
    program::{Hook, Program, TC_ACT_REDIRECT, TC_ACT_UNSPEC, XDP_PASS, XDP_TX},
    requirements,
};

use crate::model::World;

/// Usable buffer end in an XDP test run: a page without 256 bytes before the packet and 320 behind
/// it.
const XDP_TAIL: usize = 4096 - 256 - 320;

/// Longest frame in an XDP test run: the program moves the start forward by at most 192 bytes.
const XDP_ROOM: usize = XDP_TAIL + XDP_HEAD_ROOM;

/// The hooks that answer.
const HOOKS: [Hook; 2] = [Hook::Xdp, Hook::Tc];

/// Returns the object, loaded once per process and reset to its initial state; `None` where BPF is
/// unavailable and the test may be skipped.
fn load() -> Option<MutexGuard<'static, Program>> {
    // Serialises the tests, because they read counters shared by all CPUs.
    static LOADED: OnceLock<Mutex<Program>> = OnceLock::new();
    if std::env::var_os("DNS_EBPF_OBJECT").is_none() && !requirements::bpf() {
        return None;
    }
    let loaded = LOADED.get_or_init(|| {
        Mutex::new(Program::load().expect("the object loads where BPF is available"))
    });
    let mut program = loaded.lock();
    program.reset().expect("the maps can be written to");
    Some(program)
}

/// Publishes the state in `world`.
fn install(program: &mut Program, world: &World) {
    let endpoints: Vec<_> = world
        .endpoints
        .iter()
        .map(|&(ip, port): &(IpAddr, u16)| SocketAddr::new(ip, port))
        .collect();
    program.set_endpoints(&endpoints);
    program.set_control(|control| {
        control.lease_deadline_ns = if world.lease { u64::MAX } else { 1 };
        control.max_reply = world.max_reply.unwrap_or(0) as u32;
        control.edns = world.edns();
    });
    program.set_scope(|scope| {
        scope.vlans.fill(0);
        for &vlan in &world.vlans {
            scope.vlans[usize::from(vlan) / 64] |= 1 << (vlan % 64);
        }
    });
    for (name, published) in &world.published {
        program
            .publish(name, published)
            .expect("the test's store has room");
    }
}

/// Runs a packet at a hook and compares the outcome with the model.
fn check(program: &Program, world: &World, hook: Hook, frame: &[u8]) -> Result<bool, String> {
    let run = match program.run(hook, frame) {
        Ok(run) => run,
        // For tc, the kernel rejects test packets shorter than an IP header.
        Err(_) if hook == Hook::Tc && frame.len() < 14 + 40 => return Ok(false),
        Err(error) => return Err(format!("{error:#}")),
    };
    let expected = model::reply(world, hook, frame);
    let answered = match (hook.is_xdp(), run.verdict) {
        (true, XDP_TX) | (false, TC_ACT_REDIRECT) => true,
        (true, XDP_PASS) | (false, TC_ACT_UNSPEC) => false,
        (_, verdict) => return Err(format!("verdict {verdict}")),
    };
    match (answered, expected) {
        (false, None) if run.packet == frame => Ok(false),
        (false, None) => Err("passed, but changed".into()),
        (true, Some(expected)) => model::compare(&expected, &run.packet).map(|()| true),
        (true, None) => Err(format!("answered, but should not be: {:02x?}", run.packet)),
        (false, Some(expected)) if expected.frame_len() > room(hook) => Ok(false),
        (false, Some(_)) => Err("not answered, but should be".into()),
    }
}

/// Returns the length of the longest possible frame.
const fn room(hook: Hook) -> usize {
    match hook {
        // XDP has one page for the frame, headroom and tailroom.
        Hook::Xdp => XDP_ROOM,
        Hook::Tc => usize::MAX,
    }
}
