//! The BPF programs of `bosh-dns-xdp`: they answer queries for published names at the interface and
//! pass every other packet to the network stack, unmodified.
//!
//! One packet core ([`pipeline`]) serves both hooks ([`hook::Hook`]) in small steps: [`filter`]
//! (is it a datagram to one of our addresses?), [`parse`] (is it a plain query, and for which
//! name?), [`lookup`] (find the entry of that name), [`reply`] (fit the answers, grow the packet,
//! write the reply). Each step hands a plain value to the next: [`frame::Frame`],
//! [`question::Question`], [`lookup::Entry`], [`question::Plan`]. A separate program ([`forwarded`])
//! looks up other names among the forwarded answers, so that each program stays below the
//! verifier's limits.
#![no_std]
#![no_main]
#![feature(asm_experimental_arch)]

mod bytes;
mod checksum;
mod filter;
mod forwarded;
mod frame;
mod hook;
mod lookup;
mod maps;
mod parse;
mod pipeline;
mod question;
mod reply;
mod shuffle;
mod tap;
mod tc;
mod xdp;

use aya_ebpf::{
    bindings::xdp_action,
    macros::{classifier, xdp},
    programs::{TcContext, XdpContext},
};

use crate::{
    frame::Frame,
    maps::Context,
    pipeline::Verdict,
    tc::{TC_ACT_SHOT, TC_ACT_UNSPEC, Tc},
    xdp::Xdp,
};

/// Whether this is the bench's skeleton: the same programs without the jobs that a mere lookup could do without, which
/// are checking checksums and sender, comparing the name, choosing an order, and counting. Never part of the server.
const IS_SKELETON: bool = cfg!(feature = "skeleton");

/// Answers at XDP in the driver. Inlined: the kernel refuses a tail call in a function without BTF.
#[xdp]
#[inline(always)]
pub fn dns_xdp(context: XdpContext) -> u32 {
    let hook = Xdp::new(context);
    xdp_action_of(Context::get().map_or(Verdict::Pass, |context| pipeline::answer(&hook, &context)))
}

#[inline(always)]
fn xdp_action_of(verdict: Verdict) -> u32 {
    match verdict {
        Verdict::Reply => xdp_action::XDP_TX,
        Verdict::Pass => xdp_action::XDP_PASS,
        Verdict::Drop => xdp_action::XDP_DROP,
    }
}

/// Answers at tc ingress (tcx and clsact), by tail-calling [`dns_tc_answer`].
#[classifier]
pub fn dns_tc(context: TcContext) -> i32 {
    Tc::<false>::new(context).tail_call_if_ours();
    TC_ACT_UNSPEC
}

/// Answers a datagram that [`dns_tc`] found to be for us; never attached by itself.
#[classifier]
pub fn dns_tc_answer(context: TcContext) -> i32 {
    answer_at_tc(&Tc::<false>::new(context))
}

/// Takes the place of [`dns_tc_answer`] until the kernel has verified it, see [`hook::Hook::IS_FIRST`].
#[classifier]
pub fn dns_tc_first(context: TcContext) -> i32 {
    answer_at_tc(&Tc::<true>::new(context))
}

#[inline(always)]
fn answer_at_tc<const IS_FIRST: bool>(hook: &Tc<IS_FIRST>) -> i32 {
    let answer =
        |context: Context| pipeline::answer_datagram(hook, &context, Frame::load(context.scratch));
    match Context::get().map_or(Verdict::Pass, answer) {
        Verdict::Reply => hook.redirect(),
        Verdict::Pass => TC_ACT_UNSPEC,
        Verdict::Drop => TC_ACT_SHOT,
    }
}

/// Answers a query for an unpublished name from a forwarded answer; tail-called by
/// [`dns_tc_answer`].
#[classifier]
pub fn dns_tc_forwarded(context: TcContext) -> i32 {
    let hook = Tc::<false>::new(context);
    match Context::get().map_or(Verdict::Pass, |context| forwarded::answer(&hook, &context)) {
        Verdict::Reply => hook.redirect(),
        Verdict::Pass => TC_ACT_UNSPEC,
        Verdict::Drop => TC_ACT_SHOT,
    }
}

/// Like [`dns_tc_forwarded`], at XDP in the driver; tail-called by [`dns_xdp`].
#[xdp]
pub fn dns_xdp_forwarded(context: XdpContext) -> u32 {
    let hook = Xdp::new(context);
    xdp_action_of(
        Context::get().map_or(Verdict::Pass, |context| forwarded::answer(&hook, &context)),
    )
}

/// Unreachable: nothing here can panic, but `no_std` requires a handler.
#[panic_handler]
fn panic(_info: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}
