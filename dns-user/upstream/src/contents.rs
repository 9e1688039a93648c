//! The contents of caches, for operators: listed, looked up and flushed by name, type and zone.

use std::time::Duration;

use hickory_proto::{op::Message, rr::DNSClass};

use serde::{Deserialize, Serialize};

use super::{
    cache::{Cache, Entry},
    message::{Flags, KeyFields},
};
use dns_core::name::Name;
use dns_kit::metrics::labels::{rcode_label, type_text};

/// Selects cached answers; an absent criterion admits all.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Selection {
    /// Only answers for this name.
    pub name: Option<Name>,
    /// The names at and below this one.
    pub zone: Option<Name>,
    /// Only answers of this query type.
    pub query_type: Option<u16>,
}

/// A cached answer, as `cache list` shows it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CachedAnswer {
    /// Domain of the handler whose cache contains it; absent for the configured recursors.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub handler: Option<String>,
    /// Queried name, with a trailing dot.
    pub name: String,
    /// Query type, as mnemonic if it has one.
    #[serde(rename = "type")]
    pub query_type: String,
    /// Query class in text form.
    pub class: String,
    /// Whether it answers queries with DO.
    pub dnssec_ok: bool,
    /// Whether it answers queries with CD.
    pub checking_disabled: bool,
    /// RCODE of the reply.
    pub rcode: String,
    /// Remaining time in seconds for which it is fresh; 0 for an expired answer that may be served
    /// stale.
    pub fresh_seconds: u64,
    /// TTL in a reply sent now.
    pub ttl: u32,
    /// Seconds since the recursor's reply.
    pub age_seconds: u64,
    /// Length of the reply without OPT.
    pub bytes: usize,
    /// Address of the recursor that sent it; absent for the answer of an HTTP handler.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub recursor: Option<String>,
    /// Whether the fast path answers with it.
    pub on_interface: bool,
    /// Answer section in presentation format, only if a single name is looked up.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub records: Option<Vec<String>>,
}

/// Selected answers, sorted by name.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Listing {
    /// The answers, at most as many as requested.
    pub entries: Vec<CachedAnswer>,
    /// Number of further answers.
    pub omitted: usize,
}

impl Selection {
    /// Returns whether the answer with this key is selected.
    pub(crate) fn admits(&self, fields: &KeyFields<'_>) -> bool {
        let Self {
            name,
            zone,
            query_type,
        } = self;
        if let Some(wanted) = *query_type
            && wanted != fields.qtype
        {
            return false;
        }
        if let Some(wanted) = name
            && wanted.as_wire() != fields.name
        {
            return false;
        }
        match zone {
            Some(zone) => Name::from_wire(fields.name).is_ok_and(|(name, _)| name.is_within(zone)),
            None => true,
        }
    }
}

impl Listing {
    /// Collects the selected answers of caches, each with the domain of its handler.
    pub(crate) fn of<'a>(
        caches: impl Iterator<Item = (Option<&'a Name>, &'a Cache)>,
        selection: &Selection,
        limit: usize,
    ) -> Self {
        let mut found: Vec<(Name, CachedAnswer)> = Vec::new();
        for (handler, cache) in caches {
            cache.for_each(|fields, entry, age| {
                if selection.admits(fields)
                    && let Ok((name, _)) = Name::from_wire(fields.name)
                    && let Some(mut answer) = CachedAnswer::of(handler, &name, fields, entry, age)
                {
                    answer.on_interface = cache.question_on_interface(*fields).is_some();
                    if selection.name.is_some() {
                        answer.records = Some(records(&entry.message, answer.ttl));
                    }
                    found.push((name, answer));
                }
            });
        }
        // Names are compared from the root, so that each zone is contiguous.
        found.sort_by_cached_key(|(name, answer)| {
            let mut labels = Vec::new();
            for label in name.labels() {
                labels.push(label.to_vec());
            }
            labels.reverse();
            (
                labels,
                answer.query_type.clone(),
                answer.dnssec_ok,
                answer.checking_disabled,
            )
        });
        // Not limited before: only the order tells which answers come first.
        let omitted = found.len().saturating_sub(limit);
        found.truncate(limit);
        let mut entries = Vec::with_capacity(found.len());
        for (_, answer) in found {
            entries.push(answer);
        }
        Self { entries, omitted }
    }
}

impl CachedAnswer {
    /// Describes an entry without its records; `None` once it can no longer be served.
    fn of(
        handler: Option<&Name>,
        name: &Name,
        fields: &KeyFields<'_>,
        entry: &Entry,
        age: Duration,
    ) -> Option<Self> {
        // Expired, and not removed yet by an insertion.
        if age >= entry.lifetime + entry.stale {
            return None;
        }
        Some(Self {
            handler: handler.map(ToString::to_string),
            name: name.to_string(),
            query_type: type_text(fields.qtype),
            class: class_text(fields.qclass),
            dnssec_ok: fields.dnssec_ok,
            checking_disabled: fields.checking_disabled,
            rcode: rcode_label(Flags::of(&entry.message).rcode()).into_owned(),
            fresh_seconds: entry.lifetime.saturating_sub(age).as_secs(),
            ttl: entry.ttl_at(age),
            age_seconds: age.as_secs(),
            bytes: entry.message.len(),
            recursor: entry.recursor.as_deref().map(str::to_owned),
            on_interface: false,
            records: None,
        })
    }
}

fn class_text(class: u16) -> String {
    match class {
        // `compat.cache_as_authority` leaves the class out of the key.
        0 => "*".to_owned(),
        class => DNSClass::from(class).to_string(),
    }
}

/// Returns the answer section in presentation format, with the TTL of a reply sent now.
fn records(message: &[u8], ttl: u32) -> Vec<String> {
    // Validated on arrival, but not every type that hickory parses.
    let Ok(message) = Message::from_vec(message) else {
        return Vec::new();
    };
    let mut records = Vec::new();
    for mut record in message.answers {
        record.ttl = ttl;
        records.push(record.to_string());
    }
    records
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        message::MessageIndex,
        tests::{form, parsed, query, small_cache},
    };
    use dns_core::config::Compat;

    const NAME: &[u8] = b"\x04more\x02ok\x07example\0";

    #[test]
    fn every_criterion_must_be_met() {
        let fields = KeyFields {
            dnssec_ok: false,
            checking_disabled: false,
            qtype: 28,
            qclass: 1,
            name: NAME,
        };
        let none = Selection::default();
        let name = |text: &str| Some(text.parse().unwrap());
        for (selection, expected) in [
            (none.clone(), true),
            (
                Selection {
                    query_type: Some(28),
                    ..none.clone()
                },
                true,
            ),
            (
                Selection {
                    query_type: Some(1),
                    ..none.clone()
                },
                false,
            ),
            (
                Selection {
                    name: name("More.ok.example"),
                    ..none.clone()
                },
                true,
            ),
            (
                Selection {
                    name: name("ok.example"),
                    ..none.clone()
                },
                false,
            ),
            (
                Selection {
                    zone: name("OK.example"),
                    ..none.clone()
                },
                true,
            ),
            (
                Selection {
                    zone: name("less.example"),
                    ..none.clone()
                },
                false,
            ),
            (
                Selection {
                    name: name("more.ok.example"),
                    zone: name("example"),
                    query_type: Some(28),
                },
                true,
            ),
            (
                Selection {
                    name: name("more.ok.example"),
                    zone: name("example"),
                    query_type: Some(1),
                },
                false,
            ),
            (
                Selection {
                    name: name("more.ok.example"),
                    zone: name("other"),
                    query_type: Some(28),
                },
                false,
            ),
        ] {
            assert_eq!(selection.admits(&fields), expected, "{selection:?}");
        }
        let broken = KeyFields {
            name: b"\x09x",
            ..fields
        };
        let zone = Selection {
            zone: name("example"),
            ..none
        };
        assert!(!zone.admits(&broken));
    }

    /// Returns a cache with one answer for [`NAME`], of TTL 300.
    fn cache(compat: Compat, serve_stale: Option<Duration>) -> Cache {
        let config = small_cache(serve_stale);
        let cache = Cache::new(&config, form(compat), compat);
        let message = query(NAME, 1);
        let query = parsed(&message);
        let mut reply = message.clone();
        reply[2..4].copy_from_slice(&[0x81, 0x80]);
        reply[7] = 1;
        reply.extend_from_slice(b"\xc0\x0c\0\x01\0\x01\0\0\x01\x2c\0\x04\xc0\0\x02\x01");
        let mut index = MessageIndex::of(&reply).unwrap();
        let key = cache.key(&query).unwrap();
        let parts = (&mut reply, &mut index);
        let recursor = Some("192.0.2.53:53".into());
        cache.admit(&key, &query, parts, recursor, cache.generation());
        cache
    }

    #[test]
    fn listed_answers_have_every_field() {
        for (cache_as_authority, class) in [(false, "IN"), (true, "*")] {
            let compat = Compat {
                cache_as_authority,
                ..Compat::default()
            };
            let cache = cache(compat, None);
            let handler: Name = "example.".parse().unwrap();
            let named = Selection {
                name: Some("more.ok.example.".parse().unwrap()),
                ..Selection::default()
            };
            let caches = [(Some(&handler), &cache)].into_iter();
            let listing = Listing::of(caches, &named, 1);
            let expected = CachedAnswer {
                handler: Some("example.".to_owned()),
                name: "more.ok.example.".to_owned(),
                query_type: "A".to_owned(),
                class: class.to_owned(),
                dnssec_ok: false,
                checking_disabled: false,
                rcode: "NOERROR".to_owned(),
                fresh_seconds: listing.entries[0].fresh_seconds,
                ttl: listing.entries[0].ttl,
                age_seconds: listing.entries[0].age_seconds,
                bytes: 33 + 16,
                recursor: Some("192.0.2.53:53".to_owned()),
                on_interface: false,
                records: Some(vec![format!(
                    "more.ok.example. {} IN A 192.0.2.1",
                    listing.entries[0].ttl
                )]),
            };
            assert_eq!(
                (&listing.entries[..], listing.omitted),
                (&[expected][..], 0)
            );
            let unnamed = Listing::of([(None, &cache)].into_iter(), &Selection::default(), 0);
            assert_eq!((unnamed.entries.len(), unnamed.omitted), (0, 1));
            let unnamed = Listing::of([(None, &cache)].into_iter(), &Selection::default(), 9);
            assert_eq!(unnamed.entries[0].records, None);
            assert_eq!(unnamed.entries[0].handler, None);
        }
    }

    #[test]
    fn age_decides_about_listing() {
        let day = Duration::from_secs(86_400);
        for (stale, age, expected) in [
            (None, 0, Some((300, 300))),
            (None, 299, Some((1, 1))),
            (None, 300, None),
            (Some(day), 300, Some((0, 30))),
            (Some(day), 86_699, Some((0, 30))),
            (Some(day), 86_700, None),
        ] {
            let cache = cache(Compat::default(), stale);
            let name: Name = "more.ok.example.".parse().unwrap();
            cache.for_each(|fields, entry, _| {
                let age = Duration::from_secs(age);
                let found = CachedAnswer::of(None, &name, fields, entry, age);
                if let Some(answer) = &found {
                    assert_eq!(answer.age_seconds, age.as_secs());
                }
                let seconds = found.map(|answer| (answer.fresh_seconds, answer.ttl));
                assert_eq!(seconds, expected, "{stale:?} {age:?}");
            });
        }
    }

    #[test]
    fn unreadable_messages_have_no_records() {
        assert_eq!(records(b"\0\0", 9), Vec::<String>::new());
        assert_eq!(
            (class_text(3), class_text(254)),
            ("CH".to_owned(), "NONE".to_owned())
        );
    }
}
