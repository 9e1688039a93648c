//! The questions that the files define, for `--ask`.

use std::{collections::BTreeSet, ops::RangeInclusive};

use dns_core::{
    catalog::Snapshot,
    listing::published_names,
    name::{Name, reverse_of},
    resolve::{AllRunning, resolve},
    wire::{TYPE_A, TYPE_AAAA, TYPE_ANY, TYPE_PTR, TYPE_TXT},
};
use dns_resolver::daemon::shadow::FollowedFleet;

/// Type HTTPS (RFC 9460), which browsers ask for, and MX: types without data.
const OTHER_TYPES: [u16; 2] = [65, 15];

/// Names with further types and criteria: every type of every name would take hours.
const MAX_VARIED: usize = 200;

/// Returns the questions that the files define, each once: published names, criteria in use, reverse names,
/// up-checks, and names that have no answer.
pub(super) fn questions(fleet: &FollowedFleet) -> Vec<(Name, u16)> {
    let snapshot = &*fleet.snapshot();
    let mut questions = Questions::default();
    for (number, name) in published_names(snapshot).enumerate() {
        if number < MAX_VARIED {
            for qtype in [TYPE_AAAA, TYPE_ANY, TYPE_TXT]
                .into_iter()
                .chain(OTHER_TYPES)
            {
                questions.add(name.clone(), qtype);
            }
        }
        questions.add(name, TYPE_A);
    }
    criteria(snapshot, &mut questions);
    for instance in snapshot.instances() {
        if let Some(address) = instance.ip {
            questions.add(reverse_of(address), TYPE_PTR);
        }
    }
    for name in &fleet.config.upcheck_domains {
        questions.add(name.clone(), TYPE_A);
        questions.add(name.clone(), TYPE_AAAA);
    }
    for domain in snapshot.domains() {
        let domain = domain.to_string();
        for label in [
            "www",
            "no-such-id.q-g999999",
            "q-s0.no-such-group.none.none",
        ] {
            questions.add_text(&format!("{label}.{domain}"), TYPE_A);
        }
        // The domain itself, above all names: empty non-terminals differ from bosh-dns.
        questions.add_text(&domain, TYPE_A);
    }
    // Reserved names (RFC 2606), and a reverse name for documentation (RFC 5737).
    questions.add_text("shadow.invalid.", TYPE_A);
    questions.add_text("1.2.0.192.in-addr.arpa.", TYPE_PTR);
    questions.list
}

/// Returns a few names with several addresses, whose order should be random.
pub(super) fn shuffled(fleet: &FollowedFleet) -> Vec<Name> {
    const MAX_NAMES: usize = 3;
    /// A random order of many addresses does not fit every size, so which ones are seen varies.
    const ADDRESSES: RangeInclusive<usize> = 2..=16;
    let snapshot = &*fleet.snapshot();
    let mut names = Vec::new();
    for name in published_names(snapshot).take(MAX_VARIED) {
        let found = resolve(snapshot, &AllRunning, &name);
        if found.is_some_and(|found| ADDRESSES.contains(&found.v4.len())) {
            names.push(name);
        }
        if names.len() == MAX_NAMES {
            break;
        }
    }
    names
}

/// Adds queries by each criterion that the records use.
fn criteria(snapshot: &Snapshot, questions: &mut Questions) {
    for instance in snapshot.instances() {
        let domain = instance.domain.trim_end_matches('.');
        for group in instance.group_ids() {
            let base = format!("q-g{group}.{domain}.");
            // `s0` smart, `s1` unhealthy, `s3` healthy, `s4` all. Links never have `s2`, but a
            // query may.
            for strategy in 0..5 {
                questions.add_text(&format!("q-s{strategy}.{base}"), TYPE_A);
            }
            if let Some(index) = instance.index {
                questions.add_text(&format!("q-i{index}s0.{base}"), TYPE_A);
            }
            for (letter, value) in [
                ('a', instance.az_id),
                ('n', instance.network_id),
                ('m', instance.num_id),
            ] {
                if !value.is_empty() {
                    questions.add_text(&format!("q-{letter}{value}s0.{base}"), TYPE_A);
                }
            }
        }
        if !instance.agent_id.is_empty() {
            questions.add_text(&format!("{}.bosh-agent-id.", instance.agent_id), TYPE_A);
        }
    }
}

#[derive(Default)]
struct Questions {
    list: Vec<(Name, u16)>,
    known: BTreeSet<(Vec<u8>, u16)>,
}

impl Questions {
    fn add(&mut self, name: Name, qtype: u16) {
        if self.known.insert((name.as_wire().to_vec(), qtype)) {
            self.list.push((name, qtype));
        }
    }

    /// Adds a name unless the values of a row make it too long or no name at all.
    fn add_text(&mut self, text: &str, qtype: u16) {
        if let Ok(name) = Name::from_text(text) {
            self.add(name, qtype);
        }
    }
}
