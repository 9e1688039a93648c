//! The CAs that a fleet trusts and the one that issues: the steps of a rotation, and their convergence. Pure.
//!
//! Step 1 trusts the new CA in addition to the old one, step 2 issues from the new one, step 3
//! stops trusting the old one. Before each step, the whole fleet must have completed the previous
//! one. Going back takes the same steps towards the old CA.

use anyhow::Context as _;
use serde::{Deserialize, Serialize};

use super::Members;
use crate::authority::Fingerprint;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Trust {
    /// Number of the state, from 1; incremented by every change.
    pub generation: u64,
    /// CAs that every instance trusts.
    pub trusted: Vec<Fingerprint>,
    pub issuing: Fingerprint,
    /// The CA that issued before the current rotation, or before the last one.
    pub origin: Option<Fingerprint>,
    /// The current rotation; `None` once it is complete.
    pub rotation: Option<Rotation>,
}

/// A rotation in progress, recorded so that it can be resumed in the same direction.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rotation {
    /// The CA that issues at the end, and is then the only trusted one.
    pub target: Fingerprint,
    /// Whether the rotation returns to the CA that issued before.
    pub returns: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Direction {
    /// To the CA with this fingerprint.
    To(Fingerprint),
    /// To the CA that issued before the last rotation.
    Back,
    /// To the target of the interrupted rotation.
    Resume,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Trust the target in addition to the current CA.
    Trust,
    /// Issue from the target.
    Issue,
    /// Trust the target only.
    Retire,
}

impl Trust {
    pub fn new(authority: Fingerprint) -> Self {
        Self {
            generation: 1,
            trusted: vec![authority.clone()],
            issuing: authority,
            origin: None,
            rotation: None,
        }
    }

    /// Returns the rotation for `direction`. [`Direction::Back`] during a return continues it.
    pub fn rotation_to(&self, direction: Direction) -> anyhow::Result<Rotation> {
        match (direction, &self.rotation) {
            // Also during another rotation: the steps lead to the target from any state.
            (Direction::To(target), _) => Ok(Rotation {
                target,
                returns: false,
            }),
            (Direction::Back, Some(rotation)) if rotation.returns => Ok(rotation.clone()),
            (Direction::Back, _) => {
                let target = self
                    .origin
                    .clone()
                    .context("no rotation to return from; begin one with --ca and --ca-key")?;
                Ok(Rotation {
                    target,
                    returns: true,
                })
            }
            (Direction::Resume, rotation) => rotation
                .clone()
                .context("no rotation was interrupted; begin one with --ca and --ca-key"),
        }
    }

    /// Returns the state after a complete rotation: there is nothing to resume, and nothing to go
    /// back to if the issuing CA is the one that issued before.
    pub fn completed(&self) -> Self {
        let origin = self.origin.clone().filter(|origin| *origin != self.issuing);
        Self {
            origin,
            rotation: None,
            ..self.clone()
        }
    }

    /// Returns whether the change from one state to the other affects members.
    pub fn differs_for_members(&self, other: &Self) -> bool {
        let Self {
            generation,
            trusted,
            issuing,
            origin: _,
            rotation: _,
        } = self;
        // The other fields only guide `rotate-ca`.
        (generation, trusted, issuing) != (&other.generation, &other.trusted, &other.issuing)
    }

    /// Returns the next step towards `target` and the state after it; `None` if only `target` is
    /// trusted and issues.
    pub fn next(&self, target: &Fingerprint) -> Option<(Step, Self)> {
        let mut next = Self {
            generation: self.generation + 1,
            ..self.clone()
        };
        if !self.trusted.contains(target) {
            next.trusted.push(target.clone());
            // From the first step on there is something to return to.
            next.origin = Some(self.issuing.clone());
            return Some((Step::Trust, next));
        }
        if self.issuing != *target {
            next.issuing = target.clone();
            return Some((Step::Issue, next));
        }
        // This also retires the target of a rotation that was given up.
        if self.trusted.len() > 1 {
            next.trusted = vec![target.clone()];
            return Some((Step::Retire, next));
        }
        None
    }

    /// Returns the members that have not adopted this state: their trust bundle differs, or
    /// one of their pairs is from another CA. Members whose pairs have all expired are ignored.
    pub fn lagging<'a>(&'a self, members: &'a Members, now: u64) -> impl Iterator<Item = &'a str> {
        members.iter().filter_map(move |(id, member)| {
            // Every pair counts, because peers of the next state refuse one of another CA.
            let taken = member.generation == self.generation
                && member.issuers.iter().all(|issuer| *issuer == self.issuing);
            (member.not_after >= now && !taken).then_some(id.as_str())
        })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::fleet::Member;

    fn ca(name: &str) -> Fingerprint {
        Fingerprint::of(name.as_bytes())
    }

    #[test]
    fn rotation_takes_three_steps() {
        let mut trust = Trust::new(ca("old"));
        let mut steps = Vec::new();
        while let Some((step, next)) = trust.next(&ca("new")) {
            assert_eq!(next.generation, trust.generation + 1);
            assert!(
                next.trusted.contains(&next.issuing),
                "the issuing CA is trusted"
            );
            if step == Step::Issue {
                assert_eq!(
                    next.trusted, trust.trusted,
                    "trust spreads before the issuer changes"
                );
            }
            steps.push(step);
            trust = next;
        }
        assert_eq!(steps, [Step::Trust, Step::Issue, Step::Retire]);
        assert_eq!((trust.trusted, trust.issuing), (vec![ca("new")], ca("new")));
    }

    #[test]
    fn rotation_goes_back_from_every_step() {
        for (taken, back) in [
            (1, vec![Step::Retire]),
            (2, vec![Step::Issue, Step::Retire]),
            (3, vec![Step::Trust, Step::Issue, Step::Retire]),
        ] {
            let mut trust = Trust::new(ca("old"));
            for _ in 0..taken {
                trust = trust.next(&ca("new")).unwrap().1;
            }
            let origin = trust.origin.clone().unwrap();
            assert_eq!(origin, ca("old"));
            let mut steps = Vec::new();
            while let Some((step, next)) = trust.next(&origin) {
                steps.push(step);
                trust = next;
            }
            assert_eq!(steps, back, "after {taken} steps");
            assert_eq!((trust.trusted, trust.issuing), (vec![ca("old")], ca("old")));
        }
    }

    /// Takes up to `count` steps in a direction, as `rotate-ca` does.
    fn rotate(trust: &Trust, direction: Direction, count: usize) -> Trust {
        let rotation = trust.rotation_to(direction).unwrap();
        let mut trust = Trust {
            rotation: Some(rotation.clone()),
            ..trust.clone()
        };
        for _ in 0..count {
            match trust.next(&rotation.target) {
                Some((_, next)) => trust = next,
                None => return trust.completed(),
            }
        }
        trust
    }

    #[test]
    fn stopped_rotation_keeps_direction() {
        const ALL: usize = 4;
        for forward in 0..=ALL {
            let there = rotate(&Trust::new(ca("old")), Direction::To(ca("new")), forward);
            if forward < ALL {
                assert_eq!(
                    rotate(&there, Direction::Resume, ALL).issuing,
                    ca("new"),
                    "{forward}"
                );
            }
            // Without a first step there is nothing to go back from.
            for back in (0..ALL).filter(|_| forward > 0) {
                let stopped = rotate(&there, Direction::Back, back);
                if stopped.rotation.is_none() {
                    continue;
                }
                for direction in [Direction::Resume, Direction::Back] {
                    let ended = rotate(&stopped, direction, ALL);
                    assert_eq!(
                        ended.trusted,
                        [ca("old")],
                        "{forward} steps, then {back} back"
                    );
                    assert_eq!((ended.issuing.clone(), &ended.rotation), (ca("old"), &None));
                    let error = ended
                        .rotation_to(Direction::Resume)
                        .unwrap_err()
                        .to_string();
                    assert!(error.starts_with("no rotation was interrupted"), "{error}");
                }
                // The return itself can be reversed.
                assert_eq!(
                    rotate(&stopped, Direction::To(ca("new")), ALL).trusted,
                    [ca("new")]
                );
            }
        }
        let error = Trust::new(ca("old"))
            .rotation_to(Direction::Back)
            .unwrap_err()
            .to_string();
        assert!(error.starts_with("no rotation to return from"), "{error}");
    }

    #[test]
    fn members_lag_until_report() {
        let trust = Trust {
            generation: 3,
            ..Trust::new(ca("new"))
        };
        let member = |generation, issuer: &str, not_after| Member {
            generation,
            issuers: BTreeSet::from([ca(issuer)]),
            not_after,
        };
        let members = Members::from([
            ("converged".to_owned(), member(3, "new", 200)),
            ("old-bundle".to_owned(), member(2, "new", 200)),
            ("old-pair".to_owned(), member(3, "old", 200)),
            ("expired".to_owned(), member(1, "old", 100)),
        ]);
        let in_the_last_second = trust.lagging(&members, 100);
        assert_eq!(in_the_last_second.count(), 3);
        assert_eq!(
            trust.lagging(&members, 101).collect::<Vec<_>>(),
            ["old-bundle", "old-pair"]
        );
    }

    #[test]
    fn members_notice_trust_alone() {
        let trust = Trust::new(ca("a"));
        assert!(!trust.differs_for_members(&trust.clone()));
        let with = |change: fn(&mut Trust)| {
            let mut other = trust.clone();
            change(&mut other);
            trust.differs_for_members(&other)
        };
        for (differs, is_noticed) in [
            (with(|trust| trust.generation += 1), true),
            (with(|trust| trust.trusted.push(ca("b"))), true),
            (with(|trust| trust.issuing = ca("b")), true),
            (with(|trust| trust.origin = Some(ca("b"))), false),
        ] {
            assert_eq!(differs, is_noticed);
        }
    }
}
