//! What the packet core needs of the hook that it runs at.

use dns_common::{control::Control, counters::Outcome};

use crate::reply::Plan;

/// Memory from `start` to `end`.
#[derive(Clone, Copy)]
pub struct Span {
    /// Address of the first byte.
    pub start: usize,
    /// Address after the last byte.
    pub end: usize,
}

/// A packet at a hook. Addresses are valid until [`Hook::grow`].
pub trait Hook {
    /// tc: packets may be only partly readable, and their checksums unfinished.
    const IS_TC: bool;

    /// Address of the first byte that can be read directly.
    fn data(&self) -> usize;

    /// Address after the last byte that can be read directly.
    fn data_end(&self) -> usize;

    /// Bytes of the whole frame, those included that cannot be read directly.
    fn length(&self) -> usize;

    /// Interface that the packet came in by.
    fn ifindex(&self) -> u32;

    /// Makes the first `len` bytes readable directly; false where that fails.
    /// Addresses taken before are void.
    fn pull(&self, len: usize) -> bool;

    /// Address of the first byte, if `len` bytes can be read directly.
    #[inline(always)]
    fn reach(&self, len: usize) -> Option<usize> {
        let data = self.data();
        if data + len <= self.data_end() {
            return Some(data);
        }
        if !Self::IS_TC || self.length() < len || !self.pull(len) {
            return None;
        }
        let data = self.data();
        (data + len <= self.data_end()).then_some(data)
    }

    /// The interface's MTU if it is smaller than `packet_len` bytes of IP packet.
    fn mtu_below(&self, packet_len: usize) -> Option<usize>;

    /// Gives the frame the reply's length. The packet is untouched if that fails.
    fn grow(&self, plan: &Plan) -> bool;

    /// What becomes of a packet that could not be grown.
    #[inline(always)]
    fn without_room(&self, _control: &Control) -> Outcome {
        Outcome::NoRoom
    }

    /// Makes the first `len` bytes, the headers of the query, ready to be turned
    /// into the reply's. `len` is a constant and not beyond the question.
    fn begin(&self, len: usize) -> Option<()>;

    /// From the first byte of the frame; holds all headers, DNS among them.
    fn head(&self) -> Option<Span>;

    /// From the first byte of the question.
    fn question(&self, plan: &Plan) -> Option<Span>;

    /// From the first byte after the question: answers and OPT go there.
    fn answers(&self, plan: &Plan) -> Option<Span>;

    /// Puts what was written into the packet, where it is not already.
    fn finish(&self, plan: &Plan) -> Option<()>;
}
