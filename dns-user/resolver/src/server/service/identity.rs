//! The server's identity: `version.bind`, `hostname.bind` and similar names in class CH, and NSID
//! (RFC 5001).
//!
//! bosh-dns refuses the former and does not support the latter (observed). Tools that query them
//! (dig, delv) send EDNS, so by default only queries with an OPT get an answer; plain queries get
//! the same reply as from bosh-dns.

use hickory_proto::{
    op::{Message, ResponseCode},
    rr::{DNSClass, Name as MessageName, RData, Record, rdata::TXT},
};

use crate::ops::version;
use dns_core::{
    config::Identity as Setting,
    name::Name,
    wire::{
        OPTION_NSID, Query, ReplyFlags, TYPE_ANY, TYPE_TXT, empty_reply, push_option,
        truncate_to_client,
    },
};

/// The identity, and the clients that may read it.
#[derive(Clone, Debug)]
pub struct Identity {
    setting: Setting,
    hostname: String,
    version: String,
}

impl Identity {
    /// Creates an identity with the name of this host.
    pub fn of_this_host(setting: Setting) -> Self {
        let hostname = nix::unistd::gethostname()
            .ok()
            .and_then(|name| name.into_string().ok());
        Self {
            setting,
            hostname: hostname.unwrap_or_else(|| "unknown".to_owned()),
            version: format!("bosh-dns-xdp {}", version::VERSION),
        }
    }

    /// Returns the text for a query of class CH, such as `version.bind. TXT`; `None` if the query is
    /// handled like any other.
    pub(super) fn chaos_text(&self, query: &Query<'_>, name: &Name) -> Option<&str> {
        if !matches!(query.question.qtype, TYPE_TXT | TYPE_ANY) {
            return None;
        }
        self.chaos(name, query.edns.is_some())
    }

    fn chaos(&self, name: &Name, has_edns: bool) -> Option<&str> {
        let is_readable = match self.setting {
            Setting::Always => true,
            Setting::Edns => has_edns,
            Setting::Off => false,
        };
        if !is_readable {
            return None;
        }
        match name.as_wire() {
            // BIND's names, `id.server` of RFC 4892, and `version.server`, which NSD and unbound
            // know, too.
            b"\x07version\x04bind\0" | b"\x07version\x06server\0" => Some(&self.version),
            b"\x08hostname\x04bind\0" | b"\x02id\x06server\0" => Some(&self.hostname),
            _ => None,
        }
    }

    /// Adds the host's name to the OPT of a reply if the query requested it and it fits (RFC 5001).
    pub(super) fn add_nsid(&self, query: &Query<'_>, reply: &mut Vec<u8>) {
        if self.is_nsid_wanted(query) {
            let limit = query.limit_with_options();
            push_option(reply, limit, OPTION_NSID, &[self.hostname.as_bytes()]);
        }
    }

    /// Returns the length of the option in the reply to a query; 0 without one.
    pub(super) fn nsid_len(&self, query: &Query<'_>) -> usize {
        if self.is_nsid_wanted(query) {
            4 + self.hostname.len()
        } else {
            0
        }
    }

    fn is_nsid_wanted(&self, query: &Query<'_>) -> bool {
        self.setting != Setting::Off && query.option(OPTION_NSID).is_some()
    }
}

/// Builds a TXT record of class CH; longer texts are split into strings of 255 bytes.
pub(super) fn chaos_reply(query: &Query<'_>, text: &str) -> Vec<u8> {
    let plain = empty_reply(query, ResponseCode::NoError, ReplyFlags::LOCAL);
    let Ok(mut reply) = Message::from_vec(&plain) else {
        return plain;
    };
    let owner = reply
        .queries
        .first()
        .map_or_else(MessageName::root, |question| question.name().clone());
    // A character string has a length of one byte (RFC 1035, section 3.3).
    let strings: Vec<&[u8]> = text.as_bytes().chunks(255).collect();
    let mut record = Record::from_rdata(owner, 0, RData::TXT(TXT::from_bytes(strings)));
    record.dns_class = DNSClass::CH;
    reply.add_answer(record);
    // `truncate_to_client` removes and restores the OPT and thereby preserves the client's size.
    reply.edns = None;
    reply
        .to_vec()
        .map_or(plain, |reply| truncate_to_client(query, reply))
}

#[cfg(test)]
mod tests {
    use super::*;
    use dns_core::wire::{Parsed, parse};

    /// Returns an identity with a fixed host name.
    fn identity(setting: Setting) -> Identity {
        Identity {
            hostname: "vm-7".into(),
            ..Identity::of_this_host(setting)
        }
    }

    /// Builds a query for `a.` A with an OPT of 1232 bytes that contains `options`.
    fn query(options: &[u8]) -> Vec<u8> {
        let mut message =
            b"\0\x01\x01\0\0\x01\0\0\0\0\0\x01\x01a\0\0\x01\0\x01\0\0\x29\x04\xd0\0\0\0\0".to_vec();
        message.extend_from_slice(&(options.len() as u16).to_be_bytes());
        message.extend_from_slice(options);
        message
    }

    /// Returns the reply to [`query`] after NSID was added.
    fn tagged(setting: Setting, options: &[u8], mut reply: Vec<u8>) -> Vec<u8> {
        let message = query(options);
        let Parsed::Query(query) = parse(&message) else {
            panic!("not a query")
        };
        identity(setting).add_nsid(&query, &mut reply);
        reply
    }

    /// A cookie, then NSID.
    const OPTIONS: &[u8] = b"\0\x0a\0\x08abcdefgh\0\x03\0\0";

    #[test]
    fn nsid_is_sent_on_request() {
        let reply = query(b"");
        let with_nsid = tagged(Setting::Edns, OPTIONS, reply.clone());
        assert_eq!(with_nsid[..reply.len() - 2], reply[..reply.len() - 2]);
        assert_eq!(with_nsid[reply.len() - 2..], *b"\0\x08\0\x03\0\x04vm-7");
        assert_eq!(
            tagged(Setting::Edns, b"\0\x0a\0\x08abcdefgh", reply.clone()),
            reply
        );
        assert_eq!(tagged(Setting::Off, OPTIONS, reply.clone()), reply);
    }

    #[test]
    fn replies_without_opt_are_unchanged() {
        let plain = b"\0\x01\x81\0\0\x01\0\0\0\0\0\0\x01a\0\0\x01\0\x01".to_vec();
        assert_eq!(tagged(Setting::Always, OPTIONS, plain.clone()), plain);
        assert_eq!(
            tagged(Setting::Always, OPTIONS, Vec::new()),
            Vec::<u8>::new()
        );
    }

    #[test]
    fn malformed_options_are_rejected_earlier() {
        for options in [&b"\0\x0a\0\xff\0\x03\0\0"[..], b"\0\x03"] {
            assert!(
                matches!(parse(&query(options)), Parsed::Reply(_)),
                "{options:?} was taken for a query"
            );
        }
    }

    #[test]
    fn chaos_requires_edns_by_default() {
        let version = Name::from_text("Version.Bind").unwrap();
        assert_eq!(identity(Setting::Edns).chaos(&version, false), None);
        assert!(
            identity(Setting::Edns)
                .chaos(&version, true)
                .unwrap()
                .starts_with("bosh-dns-xdp ")
        );
        assert!(identity(Setting::Always).chaos(&version, false).is_some());
        assert_eq!(identity(Setting::Off).chaos(&version, true), None);
        let host = Name::from_text("hostname.bind").unwrap();
        assert_eq!(identity(Setting::Edns).chaos(&host, true), Some("vm-7"));
        assert_eq!(
            identity(Setting::Always).chaos(&Name::from_text("a.bind").unwrap(), true),
            None
        );
    }
}
