//! The BPF programs of `bosh-dns-xdp`: they answer queries for published names
//! where the packet comes in, and let everything else go up the stack untouched.
//!
//! One packet core serves both hooks ([`hook::Hook`]), in small steps:
//! [`filter`] (is it a datagram to one of our addresses?), [`question`] (is it
//! a plain query, and for which name?), [`lookup`] (the entry of that name),
//! [`reply`] (what fits, growing the packet, writing the reply).
#![no_std]
#![no_main]
#![feature(asm_experimental_arch)]

mod bytes;
mod checksum;
mod clock;
mod core_path;
mod filter;
mod hook;
mod lookup;
mod maps;
mod messages;
mod partial;
mod question;
mod reflector;
mod reply;
mod shuffle;
mod tap;
mod tc;
mod xdp;

use aya_ebpf::{
    bindings::xdp_action,
    helpers::bpf_redirect,
    macros::{classifier, xdp},
    programs::{TcContext, XdpContext},
};

use crate::{
    core_path::Means,
    tc::{TC_ACT_UNSPEC, Tc},
    xdp::{Generic, Native, Xdp},
};

/// Answers at XDP in the driver.
#[xdp]
pub fn dns_xdp(context: XdpContext) -> u32 {
    answer_at_xdp(&Native::new(context))
}

/// Answers at XDP in generic mode.
#[xdp]
pub fn dns_xdp_generic(context: XdpContext) -> u32 {
    answer_at_xdp(&Generic::new(context))
}

/// Answers at XDP.
#[inline(always)]
fn answer_at_xdp<const NATIVE: bool>(hook: &Xdp<NATIVE>) -> u32 {
    let answered = Means::get().is_some_and(|means| core_path::answer(hook, &means));
    if answered { xdp_action::XDP_TX } else { xdp_action::XDP_PASS }
}

/// Answers at the ingress of tc (tcx and clsact), by [`dns_tc_answer`].
#[classifier]
pub fn dns_tc(context: TcContext) -> i32 {
    Tc::new(context).go_on_if_for_us();
    TC_ACT_UNSPEC
}

/// Answers what XDP found no room for, at the ingress of tc behind it; all other
/// packets go by.
#[classifier]
pub fn dns_tc_second(context: TcContext) -> i32 {
    let hook = Tc::new(context);
    if hook.is_handed_on() {
        hook.go_on_if_for_us();
    }
    TC_ACT_UNSPEC
}

/// Answers what either of the two has found to be for us; never attached itself.
#[classifier]
pub fn dns_tc_answer(context: TcContext) -> i32 {
    let hook = Tc::new(context);
    let answered = Means::get().is_some_and(|means| core_path::answer_found(&hook, &means));
    if answered { hook.redirect() } else { TC_ACT_UNSPEC }
}

/// Lets every packet go up the stack: for the client's end of a veth pair,
/// where native `XDP_TX` needs NAPI on the peer.
#[xdp]
pub fn dns_pass(_context: XdpContext) -> u32 {
    xdp_action::XDP_PASS
}

/// The bare reflector at XDP, see [`reflector`].
#[xdp]
pub fn dns_reflector(context: XdpContext) -> u32 {
    match reflector::reflect(context.data(), context.data_end()) {
        Some(()) => xdp_action::XDP_TX,
        None => xdp_action::XDP_PASS,
    }
}

/// The bare reflector at tc.
#[classifier]
pub fn dns_tc_reflector(context: TcContext) -> i32 {
    match reflector::reflect(context.data(), context.data_end()) {
        // SAFETY: the context is the kernel's own; the helper has no precondition.
        Some(()) => unsafe { bpf_redirect((*context.skb.skb).ifindex, 0) as i32 },
        None => TC_ACT_UNSPEC,
    }
}

/// Nothing here can panic; the compiler wants a handler all the same.
#[panic_handler]
fn panic(_info: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}
