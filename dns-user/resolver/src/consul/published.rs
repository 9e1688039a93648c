//! The part of Consul's names that interfaces may answer.

use std::{
    net::{Ipv4Addr, Ipv6Addr},
    sync::Arc,
};

use dns_common::entry::{MAX_V4, MAX_V6, Rules};

use dns_consul::{Publishable, Zone};
use dns_core::name::Name;

/// Consul's names at one moment.
pub(crate) struct Published {
    pub(super) zone: Arc<Zone>,
    /// Whether replies tell that there are recursors.
    pub(super) recursion: bool,
    /// Which addresses are taken where there are more than an entry holds.
    pub(super) seed: u64,
}

impl Published {
    /// Addresses of a name, and how they are given; `None`: interfaces do not answer it.
    pub(crate) fn look_up(&self, name: &Name) -> Option<(Vec<Ipv4Addr>, Vec<Ipv6Addr>, Rules)> {
        let Publishable { mut v4, mut v6, ttl, most, plain_v4, plain_v6, truncates } =
            self.zone.publishable(name)?;
        let rules = Rules::new(ttl, most, [plain_v4, plain_v6], truncates, self.recursion);
        self.sample(&mut v4, MAX_V4);
        self.sample(&mut v6, MAX_V6);
        Some((v4, v6, rules))
    }

    /// Leaves as many addresses as an entry holds. Each server draws its own, and always the
    /// same of the same list, so that an entry changes only when the list does.
    fn sample<T: Ord>(&self, addresses: &mut Vec<T>, most: usize) {
        if addresses.len() > most {
            addresses.sort_unstable();
            fastrand::Rng::with_seed(self.seed).shuffle(addresses);
            addresses.truncate(most);
        }
    }
}
