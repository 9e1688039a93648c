//! A client's query as this room sees it, and the finishing of replies to it.

use std::ops::Range;

use super::message::{self, Flags, Outline};
use dns_core::wire::Transport;

/// EDNS option code of Client Subnet (RFC 7871): answers may depend on it.
const OPTION_CLIENT_SUBNET: u16 = 8;

/// A client's query: one question, opcode QUERY.
#[derive(Clone, Debug)]
pub(crate) struct Ask<'a> {
    /// The message up to the end of its last record.
    pub(crate) message: &'a [u8],
    /// How it came, and so how it goes on.
    pub(crate) transport: Transport,
    /// Where the question lies: name, type, class.
    pub(crate) question: Range<usize>,
    /// Where its OPT lies.
    opt: Option<Range<usize>>,
}

impl<'a> Ask<'a> {
    /// Looks at a client's message; `None` where it is no single question.
    pub(crate) fn new(message: &'a [u8], transport: Transport) -> Option<Self> {
        let outline = Outline::of(message)?;
        let question = message::question_range(message)?;
        Some(Self { message: &message[..outline.end], transport, question, opt: outline.opt })
    }

    /// Name in wire format as the client wrote it.
    pub(crate) fn name(&self) -> &'a [u8] {
        &self.message[self.question.start..self.question.end - 4]
    }

    /// QTYPE.
    pub(crate) fn qtype(&self) -> u16 {
        message::u16_at(self.message, self.question.end - 4).unwrap_or(0)
    }

    /// QCLASS.
    pub(crate) fn qclass(&self) -> u16 {
        message::u16_at(self.message, self.question.end - 2).unwrap_or(0)
    }

    /// The flags.
    pub(crate) fn flags(&self) -> Flags {
        Flags::of(self.message)
    }

    /// The UDP size that the client's OPT names, as it stands there; `None`: no EDNS.
    pub(crate) fn udp_size(&self) -> Option<u16> {
        message::u16_at(self.message, self.opt.as_ref()?.start + 3)
    }

    /// DO (RFC 3225).
    pub(crate) fn dnssec_ok(&self) -> bool {
        self.opt.as_ref().and_then(|opt| self.message.get(opt.start + 7)).is_some_and(|byte| byte & 0x80 != 0)
    }

    /// Largest reply that client and transport take.
    pub(crate) fn reply_limit(&self) -> usize {
        match self.transport {
            Transport::Tcp => usize::from(u16::MAX),
            Transport::Udp => self.udp_size().map_or(512, |size| usize::from(size).max(512)),
        }
    }

    /// Whether the answer may be one for this client alone: EDNS Client Subnet.
    pub(crate) fn is_personal(&self) -> bool {
        let Some(opt) = &self.opt else { return false };
        let mut options = self.message.get(opt.start + 11..opt.end).unwrap_or_default();
        while let (Some(code), Some(length)) = (message::u16_at(options, 0), message::u16_at(options, 2)) {
            if code == OPTION_CLIENT_SUBNET {
                return true;
            }
            options = options.get(4 + usize::from(length)..).unwrap_or_default();
        }
        false
    }

    /// Makes an upstream's reply, whose sections are known to be whole, one for
    /// this client: its id and its letter case.
    pub(crate) fn finish(&self, reply: &mut Vec<u8>, outline: &Outline) {
        reply.truncate(outline.end);
        message::set_id(reply, message::id(self.message));
        self.restore_case(reply);
    }

    /// Overwrites the name of the reply's question with the client's.
    pub(crate) fn restore_case(&self, reply: &mut [u8]) {
        let Some(theirs) = message::question_range(reply) else { return };
        let ours = &self.message[self.question.clone()];
        if message::same_question(ours, &reply[theirs.clone()]) {
            reply[theirs].copy_from_slice(ours);
        }
    }

    /// Adds an OPT if the client sent one (RFC 6891, section 6.1.1).
    pub(crate) fn add_opt(&self, reply: &mut Vec<u8>) {
        if let Some(size) = self.udp_size() {
            message::append_opt(reply, size);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A query for `oK.example. A` with an OPT of the given options.
    fn query(options: &[u8]) -> Vec<u8> {
        let mut query = b"\x12\x34\x01\x10\0\x01\0\0\0\0\0\0\x02oK\x07example\0\0\x01\0\x01".to_vec();
        message::append_opt(&mut query, 1232);
        let length = query.len();
        query[length - 4] = 0x80;
        query[length - 1] = options.len() as u8;
        query.extend_from_slice(options);
        query
    }

    #[test]
    fn the_parts_of_a_query_are_found() {
        let query = query(b"\0\x0a\0\x01x\0\x08\0\x04\0\x01\0\0");
        let ask = Ask::new(&query, Transport::Udp).unwrap();
        assert_eq!(ask.name(), b"\x02oK\x07example\0");
        assert_eq!((ask.qtype(), ask.qclass()), (1, 1));
        assert_eq!(ask.udp_size(), Some(1232));
        assert!(ask.dnssec_ok() && ask.flags().checking_disabled() && ask.flags().recursion_desired());
        assert!(ask.is_personal());
        assert_eq!(ask.reply_limit(), 1232);
    }

    #[test]
    fn a_reply_becomes_the_clients() {
        let query = query(b"");
        let ask = Ask::new(&query, Transport::Udp).unwrap();
        assert!(!ask.is_personal());
        let mut reply = b"\xff\xff\x81\x80\0\x01\0\0\0\0\0\0\x02ok\x07EXAMPLE\0\0\x01\0\x01junk".to_vec();
        let outline = Outline::of(&reply).unwrap();
        ask.finish(&mut reply, &outline);
        ask.add_opt(&mut reply);
        assert_eq!(&reply[..24], b"\x12\x34\x81\x80\0\x01\0\0\0\0\0\x01\x02oK\x07example\0");
        assert_eq!(&reply[28..], b"\0\0\x29\x04\xd0\0\0\0\0\0\0");
    }
}
