//! The fuzz target `table` (`tests/fuzz`): compares the table with a model of the permitted
//! answers. Called from nowhere else.
//!
//! Snapshots, queries, health and other steps come in any order. The interface's answer for a name
//! must follow the newest snapshot under the current health or, while the publisher is installing
//! it, an earlier snapshot. If all names fit, every listed name is present in the end.

pub(super) mod machine;

use std::{
    net::{IpAddr, Ipv4Addr},
    sync::Arc,
    time::Instant,
};

use dns_core::resolve::Existence;

use self::machine::{Failing, Fixed, Machine, name};
use crate::publish::{lease::GracePeriods, source::NameSource as _};

const NAMES: [&str; 9] = [
    "bosh",
    "a.bosh",
    "b.bosh",
    "c.bosh",
    "q-s0.g-1.bosh",
    "q-s4.g-1.bosh",
    "sub.bosh",
    "a.sub.bosh",
    "b.sub.bosh",
];

/// The domain whose names change separately.
const DOMAIN: &str = "sub.bosh";

/// Instances: 10.0.0.1 and so on.
const INSTANCES: u8 = 6;

const NXDOMAIN: u8 = 3;

/// An answer: the last bytes of the addresses, or the RCODE.
type Answer = Result<Vec<u8>, u8>;

/// Runs the steps encoded in these bytes on a table. Panics at the first difference.
pub fn table(bytes: &[u8]) {
    let mut bytes = bytes.iter().copied();
    let Some(first) = bytes.next() else { return };
    let mut trial = Trial::new(first & 1 == 0);
    while let Some(step) = bytes.next() {
        trial.step(step, &mut bytes);
        trial.check();
    }
    trial.finish();
}

/// A table, and the permitted answers.
struct Trial {
    machine: Machine,
    health: Arc<Failing>,
    /// Snapshots whose answers are permitted, the newest last.
    valid: Vec<Fixed>,
    /// Whether all names fit.
    is_roomy: bool,
    /// Names withdrawn since the last pass began.
    withdrawn: Vec<&'static str>,
    /// The clock of last-used times.
    now_ns: u64,
}

impl Trial {
    /// Returns an empty table with room for all names or for a few.
    fn new(is_roomy: bool) -> Self {
        let health = Arc::new(Failing::default());
        let (max_names, negative) = if is_roomy { (64, 64) } else { (4, 2) };
        let grace = GracePeriods::start(|| true).expect("a thread can be started");
        let machine = Machine::with(max_names, negative, 1, health.clone(), grace);
        let valid = vec![Fixed::default()];
        Self {
            machine,
            health,
            valid,
            is_roomy,
            withdrawn: Vec::new(),
            now_ns: 0,
        }
    }

    fn step(&mut self, step: u8, bytes: &mut impl Iterator<Item = u8>) {
        let text = NAMES[usize::from(step >> 4) % NAMES.len()];
        match step & 15 {
            kind @ 0..=2 => self.install(kind == 0, bytes),
            3 => self.change_domain(bytes),
            4 | 5 => self.go_on(),
            6..=8 => self.learn(text),
            9 | 10 => self.toggle_health(step >> 4),
            11 => {
                self.machine.table.withdraw(&[name(text)]);
                self.withdrawn.push(text);
            }
            12 | 13 => self.machine.table.reclaim(),
            _ => {
                self.now_ns += 1;
                if self.machine.place(text).is_some() {
                    self.machine.use_at(text, self.now_ns);
                }
            }
        }
    }

    /// Installs a new snapshot: one byte for each name, of which comparable ones change three.
    fn install(&mut self, is_incomparable: bool, bytes: &mut impl Iterator<Item = u8>) {
        let mut snapshot = match is_incomparable {
            true => NAMES.iter().fold(Fixed::default(), |snapshot, text| {
                with(snapshot, text, bytes.next().unwrap_or(0))
            }),
            false => (0..3).fold(self.newest().clone(), |mut snapshot, _| {
                let text = NAMES[usize::from(bytes.next().unwrap_or(0)) % NAMES.len()];
                snapshot.names.remove(&name(text));
                with(snapshot, text, bytes.next().unwrap_or(0))
            }),
        };
        snapshot.is_incomparable = is_incomparable;
        self.valid.push(snapshot.clone());
        if is_incomparable && !self.machine.table.is_installing() {
            self.withdrawn.clear();
        }
        self.machine.table.install(Arc::new(snapshot), &mut || {});
        self.forget_replaced();
    }

    /// Changes only the answers within one domain.
    fn change_domain(&mut self, bytes: &mut impl Iterator<Item = u8>) {
        let domain = name(DOMAIN);
        let within: Vec<(&str, u8)> = NAMES
            .into_iter()
            .filter(|text| name(text).is_within(&domain))
            .map(|text| (text, bytes.next().unwrap_or(0)))
            .collect();
        for snapshot in &mut self.valid {
            for &(text, byte) in &within {
                let was_listed = snapshot
                    .names
                    .remove(&name(text))
                    .is_some_and(|(listed, _)| listed);
                *snapshot = with(std::mem::take(snapshot), text, byte);
                if let Some((listed, _)) = snapshot.names.get_mut(&name(text)) {
                    *listed = was_listed;
                }
            }
        }
        let newest = self.newest().clone();
        self.machine
            .table
            .refresh_within(Arc::new(newest), &[domain], &mut || {});
        self.withdrawn.extend(within.iter().map(|&(text, _)| text));
    }

    /// Continues the current pass.
    fn go_on(&mut self) {
        let was_outdated = self.machine.table.is_outdated;
        self.machine.table.go_on(Instant::now());
        if was_outdated && !self.machine.table.is_outdated {
            self.withdrawn.clear();
        }
        self.forget_replaced();
    }

    /// Once the map is up to date, only answers of the newest snapshot are permitted.
    fn forget_replaced(&mut self) {
        if !self.machine.table.is_installing() {
            self.valid.drain(..self.valid.len() - 1);
        }
    }

    /// Simulates a query answered in userspace.
    fn learn(&mut self, text: &'static str) {
        let was_there = self.machine.place(text).is_some();
        self.machine.table.learn(&name(text));
        if self.is_roomy && !was_there {
            assert_eq!(
                self.machine.answer(text),
                self.expected(self.newest(), text),
                "{text} after its query"
            );
        }
    }

    fn toggle_health(&mut self, number: u8) {
        let instance = instance(number % INSTANCES);
        {
            let mut failing = self.health.0.lock();
            match failing.iter().position(|&ip| ip == instance) {
                Some(index) => drop(failing.remove(index)),
                None => failing.push(instance),
            }
        }
        self.machine.table.health_changed(&[instance], &mut || {});
    }

    /// Checks the invariants that hold after every step.
    fn check(&self) {
        self.machine.check();
        for text in NAMES {
            let Some(answer) = self.machine.answer(text) else {
                continue;
            };
            let may_be = self
                .valid
                .iter()
                .any(|snapshot| self.expected(snapshot, text).as_ref() == Some(&answer));
            assert!(
                may_be,
                "{text} is answered {answer:?}, which no snapshot in force says"
            );
        }
    }

    /// Checks the invariants that hold once the publisher is idle.
    fn finish(mut self) {
        while self.machine.table.is_installing() {
            self.go_on();
        }
        self.check();
        if !self.is_roomy {
            return;
        }
        for text in NAMES {
            let is_listed = matches!(self.newest().names.get(&name(text)), Some((true, Some(_))));
            if is_listed && !self.withdrawn.contains(&text) {
                assert!(
                    self.machine.answer(text).is_some(),
                    "{text} is listed and not in the map"
                );
            }
        }
    }

    fn newest(&self) -> &Fixed {
        self.valid.last().expect("there is always one")
    }

    /// Returns a snapshot's answer for a name under the current health; `None` if the name is not ours.
    fn expected(&self, snapshot: &Fixed, text: &str) -> Option<Answer> {
        let resolution = snapshot.resolve(&*self.health, &name(text))?;
        Some(match resolution.existence {
            Existence::Found => Ok(resolution.v4.iter().map(|ip| ip.octets()[3]).collect()),
            Existence::NoSuchName | Existence::Malformed => Err(NXDOMAIN),
        })
    }
}

/// Adds a name to a snapshot. The byte encodes whether the name is foreign, unknown, has instances,
/// or is also listed.
fn with(snapshot: Fixed, text: &str, byte: u8) -> Fixed {
    let instances: Vec<u8> = (0..INSTANCES)
        .filter(|number| byte >> (2 + number) & 1 == 1)
        .map(|n| n + 1)
        .collect();
    match byte & 3 {
        0 => snapshot,
        1 => snapshot.without(text),
        kind => snapshot.with(text, kind == 3, &instances),
    }
}

/// Returns the address of an instance.
fn instance(number: u8) -> IpAddr {
    Ipv4Addr::new(10, 0, 0, number + 1).into()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn table_agrees_with_model(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
            super::table(&bytes);
        }
    }
}
