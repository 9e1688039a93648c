//! Names of services that interfaces answer. Userspace does not see these queries, but the live
//! source must know which services are in use.

use std::{collections::HashMap, time::Duration};

use dns_consul::catalog::Place;
use dns_core::name::Name;
use parking_lot::Mutex;

/// Maximum number of names kept, the same as the default limit of published names.
const MOST: usize = 65_536;

/// A name answered within this time is in use.
const IN_USE: Duration = Duration::from_secs(60);

/// Location and service in lower case, by name.
#[derive(Debug, Default)]
pub(super) struct Used(Mutex<HashMap<Name, (Place, String)>>);

impl Used {
    /// Records the service of a name that is passed to the publisher.
    pub(super) fn note(&self, name: &Name, service: (Place, String)) {
        let mut names = self.0.lock();
        if names.len() < MOST || names.contains_key(name) {
            names.insert(name.clone(), service);
        }
    }

    /// Returns the services of names that an interface answered recently. `age` returns the time
    /// since the last answer for a name; names without one are dropped when room is scarce.
    pub(super) fn recent(&self, age: impl Fn(&Name) -> Option<Duration>) -> Vec<(Place, String)> {
        let mut names = self.0.lock();
        let crowded = names.len() >= MOST / 2;
        let mut services = Vec::new();
        names.retain(|name, service| match age(name) {
            Some(age) if age < IN_USE => {
                services.push(service.clone());
                true
            }
            _ => !crowded,
        });
        services.sort_unstable();
        services.dedup();
        services
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recently_answered_services_are_reported() {
        let used = Used::default();
        let key = |service: &str| (Place::Datacenter("dc1".into()), service.to_owned());
        for name in ["web.service.consul", "v1.web.service.consul", "db.service.consul", "old.service.consul"]
        {
            let name = Name::from_text(name).expect("a name");
            let service = if name.to_string().contains("web") { "web" } else { "other" };
            used.note(&name, key(service));
        }
        let age = |name: &Name| match name.to_string() {
            text if text.contains("web") => Some(Duration::from_secs(5)),
            text if text.starts_with("db") => Some(Duration::from_secs(61)),
            _ => None,
        };
        assert_eq!(used.recent(age), [key("web")]);
        assert_eq!(used.0.lock().len(), 4);
    }
}
