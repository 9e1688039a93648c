//! Which CAs a fleet trusts and which one issues: the steps of a rotation, and their convergence.
//! Pure.
//!
//! Step 1 trusts the new CA beside the old one, step 2 issues by the new one, step 3 stops to trust
//! the old one. Between two steps the whole fleet must have taken the former one. Going back takes
//! the same steps towards the old CA.

use serde::{Deserialize, Serialize};

use super::message::Members;
use crate::authority::Fingerprint;

/// CAs of a fleet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Trust {
    /// Counts changes, from 1.
    pub generation: u64,
    /// CAs that every instance trusts.
    pub trusted: Vec<Fingerprint>,
    /// The CA that issues.
    pub issuing: Fingerprint,
    /// The CA that issued before the rotation under way, or before the last one.
    pub origin: Option<Fingerprint>,
}

/// A step of a rotation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Trust the target beside the current CA.
    Trust,
    /// Issue by the target.
    Issue,
    /// Trust the target alone.
    Retire,
}

impl Trust {
    /// A fleet with a single CA.
    pub fn new(authority: Fingerprint) -> Self {
        Self { generation: 1, trusted: vec![authority.clone()], issuing: authority, origin: None }
    }

    /// Returns the next step towards `target` and the state after it; `None` if only `target` is
    /// trusted and issues.
    pub fn next(&self, target: &Fingerprint) -> Option<(Step, Self)> {
        let mut next = Self { generation: self.generation + 1, ..self.clone() };
        if !self.trusted.contains(target) {
            next.trusted.push(target.clone());
            next.origin = Some(self.issuing.clone());
            return Some((Step::Trust, next));
        }
        if self.issuing != *target {
            next.issuing = target.clone();
            return Some((Step::Issue, next));
        }
        if self.trusted.len() > 1 {
            next.trusted = vec![target.clone()];
            return Some((Step::Retire, next));
        }
        None
    }

    /// Returns the members that have not taken this state yet: another trust bundle, or a pair of
    /// another CA. Members whose pairs have all expired do not count.
    pub fn lagging<'a>(&'a self, members: &'a Members, now: u64) -> impl Iterator<Item = &'a str> {
        members.iter().filter_map(move |(id, member)| {
            let taken = member.generation == self.generation
                && member.issuers.iter().all(|issuer| *issuer == self.issuing);
            (member.not_after > now && !taken).then_some(id.as_str())
        })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::fleet::message::Member;

    fn ca(name: &str) -> Fingerprint {
        Fingerprint::of(name.as_bytes())
    }

    #[test]
    fn rotation_takes_three_steps() {
        let mut trust = Trust::new(ca("old"));
        let mut steps = Vec::new();
        while let Some((step, next)) = trust.next(&ca("new")) {
            assert_eq!(next.generation, trust.generation + 1);
            assert!(next.trusted.contains(&next.issuing), "the issuing CA is trusted");
            if step == Step::Issue {
                assert_eq!(next.trusted, trust.trusted, "trust spreads before the issuer changes");
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

    #[test]
    fn members_lag_until_report() {
        let trust = Trust { generation: 3, ..Trust::new(ca("new")) };
        let member = |generation, issuer: &str, not_after| Member {
            generation,
            issuers: BTreeSet::from([ca(issuer)]),
            not_after,
            reported_at: 0,
        };
        let members = Members::from([
            ("converged".to_owned(), member(3, "new", 200)),
            ("old-bundle".to_owned(), member(2, "new", 200)),
            ("old-pair".to_owned(), member(3, "old", 200)),
            ("expired".to_owned(), member(1, "old", 100)),
        ]);
        assert_eq!(trust.lagging(&members, 100).collect::<Vec<_>>(), ["old-bundle", "old-pair"]);
    }
}
