//! Model of the files as written, which judges replies.
//!
//! Every address encodes the group and the version of records.json: `10.<version>.<version>.<group
//! and instance>`. A reply that mixes versions, belongs to another group or is outdated is
//! therefore recognised from its addresses.

use std::{
    collections::HashMap,
    net::Ipv4Addr,
    time::{Duration, Instant},
};

use parking_lot::{Mutex, MutexGuard};
use serde_json::json;
use whole_system_tests::fleet;

/// Number of groups in the records.
pub(crate) const GROUPS: u8 = 20;

pub(crate) const INSTANCES: u8 = 6;

/// An alias that is added and removed.
pub(crate) const ALIAS: &str = "web.alias.";

/// The alias's target group.
const ALIAS_GROUP: u8 = 3;

/// Contents of the files over time.
pub(crate) struct Model {
    state: Mutex<State>,
}

struct State {
    /// Version of the records written last.
    version: u16,
    /// Start of writing by version, and the time at which the next version had replaced it.
    versions: HashMap<u16, (Instant, Option<Instant>)>,
    /// Whether the alias exists, and since when.
    alias: (bool, Instant),
}

/// The model's judgement of a reply.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Judgement {
    /// Correct; the answer had been outdated for this long when the query was sent.
    Right(Duration),
    Wrong(String),
}

impl Model {
    /// Creates a model without records and without the alias.
    pub(crate) fn new() -> Self {
        let state = State {
            version: 0,
            versions: HashMap::new(),
            alias: (false, Instant::now()),
        };
        Self {
            state: Mutex::new(state),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Returns the next records.json. Write it immediately: its answers are allowed from now on.
    pub(crate) fn next_records(&self) -> Vec<u8> {
        let mut state = self.state();
        state.version = state.version.wrapping_add(1);
        let version = state.version;
        state.versions.insert(version, (Instant::now(), None));
        drop(state);
        let instances =
            (0..GROUPS).flat_map(|group| (0..INSTANCES).map(move |instance| (group, instance)));
        let rows =
            instances.map(|(group, instance)| (group.into(), address(version, group, instance)));
        fleet::records(version.into(), rows)
    }

    /// The records of [`Self::next_records`] are installed; older versions are outdated now.
    pub(crate) fn records_written(&self) {
        let mut state = self.state();
        let before = state.version.wrapping_sub(1);
        if let Some((_, outdated)) = state.versions.get_mut(&before) {
            *outdated = Some(Instant::now());
        }
    }

    /// The alias is being added or removed.
    pub(crate) fn alias_changes(&self, there: bool) {
        self.state().alias = (there, Instant::now());
    }

    /// Returns whether the alias exists, or `None` if it changed less than `enough` ago.
    pub(crate) fn settled_alias(&self, enough: Duration) -> Option<bool> {
        let (there, since) = self.state().alias;
        (since.elapsed() > enough).then_some(there)
    }

    /// Judges the addresses in a reply for a group; `asked` is the time of the query.
    pub(crate) fn judge(&self, group: u8, addresses: &[Ipv4Addr], asked: Instant) -> Judgement {
        let Some(first) = addresses.first() else {
            return Judgement::Wrong("no address".to_owned());
        };
        let [_, high, low, _] = first.octets();
        let version = u16::from_be_bytes([high, low]);
        let mut wanted: Vec<Ipv4Addr> = (0..INSTANCES)
            .map(|instance| address(version, group, instance))
            .collect();
        wanted.sort();
        if addresses != wanted {
            return Judgement::Wrong(format!(
                "group {group} is {wanted:?}, answered {addresses:?}"
            ));
        }
        match self.state().versions.get(&version) {
            None => Judgement::Wrong(format!("records of version {version} were never written")),
            Some((_, None)) => Judgement::Right(Duration::ZERO),
            Some((_, Some(outdated))) => {
                Judgement::Right(asked.saturating_duration_since(*outdated))
            }
        }
    }

    /// Judges the addresses in a reply for the alias.
    pub(crate) fn judge_alias(&self, addresses: &[Ipv4Addr], asked: Instant) -> Judgement {
        self.judge(ALIAS_GROUP, addresses, asked)
    }

    pub(crate) fn alias_file() -> Vec<u8> {
        let alias = ALIAS.trim_end_matches('.');
        json!({alias: [format!("q-s0.q-g{ALIAS_GROUP}.bosh")]})
            .to_string()
            .into_bytes()
    }
}

fn address(version: u16, group: u8, instance: u8) -> Ipv4Addr {
    let [high, low] = version.to_be_bytes();
    Ipv4Addr::new(10, high, low, group * 8 + instance)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn model_rejects_mixed_addresses() {
        let model = Model::new();
        for _ in 0..2 {
            model.next_records();
            model.records_written();
        }
        let answer = |version, group| -> Vec<Ipv4Addr> {
            (0..INSTANCES)
                .map(|instance| address(version, group, instance))
                .collect()
        };
        let later = Instant::now() + Duration::from_secs(3);
        assert_eq!(
            model.judge(1, &answer(2, 1), later),
            Judgement::Right(Duration::ZERO)
        );
        let Judgement::Right(age) = model.judge(1, &answer(1, 1), later) else {
            panic!("an old answer")
        };
        assert!(age > Duration::from_secs(2), "{age:?}");
        let mut mixed = answer(2, 1);
        mixed[1] = address(1, 1, 1);
        for wrong in [
            mixed,
            answer(2, 2),
            answer(9, 1),
            answer(2, 1)[1..].to_vec(),
            Vec::new(),
        ] {
            assert!(
                matches!(model.judge(1, &wrong, later), Judgement::Wrong(_)),
                "{wrong:?}"
            );
        }
    }
}
