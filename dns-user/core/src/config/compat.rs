//! `compat`: behaviour of bosh-dns that is off by default.

use super::{ConfigError, reader::Reader};

macro_rules! compat {
    ($($(#[doc = $doc:literal])+ $option:ident;)+) => {
        /// Behaviour of bosh-dns that violates RFCs or confuses clients. All options are off by
        /// default; docs/differences.md describes each.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct Compat {
            $($(#[doc = $doc])+ pub $option: bool,)+
        }

        impl Compat {
            /// All options on: the behaviour of bosh-dns.
            pub const REFERENCE: Self = Self { $($option: true),+ };

            /// Returns the options by name.
            fn members(&mut self) -> impl Iterator<Item = (&'static str, &mut bool)> {
                [$((stringify!($option), &mut self.$option)),+].into_iter()
            }
        }
    };
}

compat! {
    /// `nxdomain_for_failures`: NXDOMAIN without records if no recursor answers with NOERROR;
    /// NXDOMAIN is not cached.
    nxdomain_for_failures;
    /// `forget_failures`: failed resolutions are not cached (contrary to RFC 9520).
    forget_failures;
    /// `wait_for_silent_recursors`: a query with an NXDOMAIN or error so far also waits for
    /// recursors that have stopped answering.
    wait_for_silent_recursors;
    /// `accept_other_questions`: a reply with the right id and address but another question is
    /// accepted unless a better one arrives in time.
    accept_other_questions;
    /// `nxdomain_is_failure`: NXDOMAIN counts as a failure of the preferred recursor.
    nxdomain_is_failure;
    /// `transparent_forwarding`: queries without EDNS are forwarded without EDNS, AD is copied from
    /// the client, each TCP query uses a new connection; RD, RA, TC and OPT of the recursor's reply
    /// reach the client.
    transparent_forwarding;
    /// `cache_as_authority`: cached answers have AA set, and the cache ignores the class.
    cache_as_authority;
    /// `cache_zero_ttl`: answers with TTL 0 are cached for five seconds.
    cache_zero_ttl;
    /// `retired_handlers`: a handler is removed for good once the records contain its domain.
    retired_handlers;
    /// `require_health_certificates`: the server refuses to start without usable certificates.
    require_health_certificates;
    /// `require_alias_files`: the server refuses to start with an invalid alias file.
    require_alias_files;
    /// `formerr_for_malformed_names`: FORMERR for names below a records domain that violate the
    /// query language.
    formerr_for_malformed_names;
    /// `nxdomain_for_empty_non_terminals`: NXDOMAIN for names without addresses that have names
    /// below them.
    nxdomain_for_empty_non_terminals;
    /// `any_class`: the class of a question is ignored.
    any_class;
    /// `echo_opt`: the OPT of a reply repeats the client's size and clears DO.
    echo_opt;
}

impl Compat {
    /// Reads `compat`. Its predecessor `recursor_errors: nxdomain` means [`Self::REFERENCE`];
    /// members of `compat` override it.
    pub(super) fn read(root: &Reader<'_>) -> Result<Self, ConfigError> {
        let choices = [("truthful", Self::default()), ("nxdomain", Self::REFERENCE)];
        let mut compat = root.choice("recursor_errors", &choices)?.unwrap_or_default();
        let object = root.object("compat")?;
        for (name, member) in compat.members() {
            if let Some(value) = object.boolean(name)? {
                *member = value;
            }
        }
        Ok(compat)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::json::Json;

    fn read(text: &str) -> Compat {
        let json = Json::parse(text.as_bytes()).unwrap();
        Compat::read(&Reader::document("config.json", &json).unwrap()).unwrap()
    }

    #[test]
    fn members_override_the_old_key() {
        assert_eq!(read("{}"), Compat::default());
        assert_eq!(read(r#"{"recursor_errors": "nxdomain"}"#), Compat::REFERENCE);
        assert_eq!(
            read(r#"{"recursor_errors": "nxdomain", "compat": {"any_class": false}}"#),
            Compat { any_class: false, ..Compat::REFERENCE }
        );
        assert_eq!(read(r#"{"compat": {"echo_opt": true}}"#), Compat { echo_opt: true, ..Compat::default() });
    }
}
