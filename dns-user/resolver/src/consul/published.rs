//! The part of Consul's names that interfaces may answer.

use std::{
    net::{Ipv4Addr, Ipv6Addr},
    sync::Arc,
};

use dns_common::entry::{AnswerPolicy, MAX_V4, MAX_V6};

use dns_consul::{Publishable, Zone};
use dns_core::name::Name;

/// Consul's names at one moment.
pub(crate) struct Published {
    pub(super) zone: Arc<Zone>,
    /// Whether replies set RA, because there are recursors.
    pub(super) recursion: bool,
    /// Seed for the choice of addresses if there are more than an entry holds.
    pub(super) seed: u64,
}

impl Published {
    /// Returns the addresses of a name and the policy for sending them; `None` if interfaces must
    /// not answer it.
    pub(crate) fn look_up(&self, name: &Name) -> Option<(Vec<Ipv4Addr>, Vec<Ipv6Addr>, AnswerPolicy)> {
        let Publishable { mut v4, mut v6, ttl, most, plain_v4, plain_v6, truncates } =
            self.zone.publishable(name)?;
        let policy = AnswerPolicy::new(ttl, most, [plain_v4, plain_v6], truncates, self.recursion);
        self.sample(&mut v4, MAX_V4);
        self.sample(&mut v6, MAX_V6);
        Some((v4, v6, policy))
    }

    /// Selects as many addresses as an entry holds. Each server makes a different choice, but
    /// always the same one for the same list, so that an entry changes only with the list.
    fn sample<T: Ord>(&self, addresses: &mut Vec<T>, most: usize) {
        if addresses.len() > most {
            addresses.sort_unstable();
            fastrand::Rng::with_seed(self.seed).shuffle(addresses);
            addresses.truncate(most);
        }
    }
}
