//! Keeps the addresses of host names of recursors and HTTP servers, which are looked up in the background.
//!
//! A query never triggers a look-up; it uses the known address. Each name has a task that resolves
//! it again when its TTL expires or its address fails, and ends once the name is unused.

use std::{
    fmt,
    net::IpAddr,
    sync::{
        Arc, Weak,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use futures_util::future::BoxFuture;
use tokio::sync::{Notify, watch};

use crate::own::OwnAddresses;

/// Minimum interval between look-ups of a name, regardless of its TTL.
pub(crate) const MIN_LOOK_UP_INTERVAL: Duration = Duration::from_secs(5);
/// Maximum interval between look-ups of a name, regardless of its TTL.
pub(crate) const MAX_LOOK_UP_INTERVAL: Duration = Duration::from_secs(600);
/// Pause after a failed look-up.
const RETRY: Duration = Duration::from_secs(1);

/// The host names in use, looked up at one source.
#[derive(Debug, Default)]
pub struct HostNames {
    /// Knows the addresses of names; without it, every name is unknown.
    source: Option<Box<dyn HostLookup>>,
    /// Addresses of this server.
    pub(crate) own: OwnAddresses,
}

/// Looks up host names.
pub(crate) trait HostLookup: fmt::Debug + Send + Sync {
    /// Resolves a host name to its addresses and their TTL; `None` if the source does not know it.
    fn look_up<'a>(&'a self, host: &'a str) -> BoxFuture<'a, Option<(Vec<IpAddr>, Duration)>>;
}

/// A host name, resolved repeatedly until dropped.
#[derive(Debug)]
pub struct HostName {
    /// Addresses from the last successful look-up; empty before the first.
    addresses: watch::Sender<Arc<[IpAddr]>>,
    /// Number of failures, which selects the address to use.
    failures: AtomicUsize,
    /// Triggers an early look-up.
    again: Arc<Notify>,
}

impl HostNames {
    /// Creates a resolver of host names that `source` knows, beside the server at `own`.
    pub(crate) fn from_source(source: Box<dyn HostLookup>, own: OwnAddresses) -> Self {
        Self {
            source: Some(source),
            own,
        }
    }

    /// Starts resolving a name. Must be called inside a tokio runtime.
    pub fn follow(self: &Arc<Self>, host: &str) -> Arc<HostName> {
        let again = Arc::new(Notify::new());
        let addresses = watch::Sender::new(Arc::from([]));
        let name = Arc::new(HostName {
            addresses,
            failures: AtomicUsize::new(0),
            again: Arc::clone(&again),
        });
        tokio::spawn(resolve_repeatedly(
            Arc::clone(self),
            host.to_owned(),
            Arc::downgrade(&name),
            again,
        ));
        name
    }

    async fn look_up(&self, host: &str) -> Option<(Vec<IpAddr>, Duration)> {
        // An address needs no source.
        if let Ok(address) = host.parse() {
            return Some((vec![address], MAX_LOOK_UP_INTERVAL));
        }
        self.source.as_ref()?.look_up(host).await
    }
}

impl HostName {
    /// Returns the current address; waits for the first look-up if necessary, for at most
    /// `patience`.
    pub async fn address(&self, patience: Duration) -> Option<IpAddr> {
        let mut addresses = self.addresses.subscribe();
        let is_known = addresses.wait_for(|known| !known.is_empty());
        tokio::time::timeout(patience, is_known).await.ok()?.ok()?;
        self.known()
    }

    /// Returns the current address; `None` before the first look-up.
    pub(crate) fn known(&self) -> Option<IpAddr> {
        let known = self.addresses.borrow();
        let turn = self
            .failures
            .load(Ordering::Relaxed)
            .checked_rem(known.len())?;
        known.get(turn).copied()
    }

    /// Reports the current address as unreachable: the next one is used, and the name is looked up
    /// again.
    pub fn failed(&self) {
        // The number selects among the addresses known, so the next one is used at once.
        self.failures.fetch_add(1, Ordering::Relaxed);
        self.again.notify_one();
    }
}

impl Drop for HostName {
    fn drop(&mut self) {
        // The task would otherwise sleep until the TTL has passed.
        self.again.notify_one();
    }
}

/// Resolves a name repeatedly while it is in use.
async fn resolve_repeatedly(
    hosts: Arc<HostNames>,
    host: String,
    name: Weak<HostName>,
    again: Arc<Notify>,
) {
    let mut is_known = true;
    while name.strong_count() > 0 {
        let found = hosts.look_up(&host).await;
        // Weak until here: this task itself must not keep the name in use.
        let Some(name) = name.upgrade() else { return };
        let pause = match found {
            Some((addresses, ttl)) => {
                is_known = true;
                name.addresses.send_if_modified(|known| {
                    let is_new = known[..] != addresses[..];
                    if is_new {
                        *known = addresses.into();
                    }
                    is_new
                });
                ttl
            }
            None => {
                if is_known {
                    tracing::warn!(
                        host,
                        "cannot look up the host name of a recursor or handler; the current addresses stay \
                         in use; trying again every second"
                    );
                }
                is_known = false;
                RETRY
            }
        };
        drop(name);
        // Limits the rate of look-ups, however many queries fail.
        tokio::time::sleep(RETRY).await;
        let _early = tokio::time::timeout(pause.saturating_sub(RETRY), again.notified()).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::until;

    /// Longer than any test takes.
    const LONG: Duration = Duration::from_secs(3600);

    /// Knows the addresses of `ns.test`, and counts look-ups.
    #[derive(Debug, Default)]
    struct Known {
        count: Arc<AtomicUsize>,
    }

    impl HostLookup for Known {
        fn look_up<'a>(&'a self, host: &'a str) -> BoxFuture<'a, Option<(Vec<IpAddr>, Duration)>> {
            self.count.fetch_add(1, Ordering::Relaxed);
            let mut found = None;
            if host == "ns.test" {
                let addresses = [1, 2, 3].map(|last| IpAddr::from([192, 0, 2, last]));
                found = Some((addresses.to_vec(), LONG));
            }
            Box::pin(std::future::ready(found))
        }
    }

    #[tokio::test]
    async fn failing_addresses_take_turns() {
        let known = Known::default();
        let count = Arc::clone(&known.count);
        let hosts = HostNames::from_source(Box::new(known), OwnAddresses::default());
        let hosts = Arc::new(hosts);
        let name = hosts.follow("ns.test");
        assert_eq!(name.known(), None, "not looked up yet");
        for last in [1, 2, 3, 1, 2] {
            let expected = Some(IpAddr::from([192, 0, 2, last]));
            assert_eq!(name.address(LONG).await, expected);
            assert_eq!(name.known(), expected);
            name.failed();
        }
        // A failure causes another look-up, long before the TTL has passed.
        until(|| count.load(Ordering::Relaxed) >= 2).await;
        // The task of a name ends with it, in spite of its TTL.
        drop(name);
        until(|| Arc::strong_count(&hosts) == 1).await;
    }

    #[tokio::test]
    async fn addresses_need_no_source() {
        let hosts = Arc::<HostNames>::default();
        for (host, expected) in [
            ("192.0.2.9", Some(IpAddr::from([192, 0, 2, 9]))),
            ("::1", Some(IpAddr::from([0, 0, 0, 0, 0, 0, 0, 1u16]))),
        ] {
            assert_eq!(hosts.follow(host).address(LONG).await, expected);
            let (addresses, ttl) = hosts.look_up(host).await.unwrap();
            assert_eq!(addresses, Vec::from_iter(expected));
            assert_eq!(ttl, MAX_LOOK_UP_INTERVAL);
        }
        assert_eq!(hosts.look_up("ns.test").await, None);
        let unknown = hosts.follow("ns.test");
        assert_eq!(unknown.address(Duration::from_millis(1)).await, None);
        let source = Box::new(Known::default());
        let hosts = HostNames::from_source(source, OwnAddresses::default());
        assert_eq!(hosts.look_up("other.test").await, None);
        assert_eq!(hosts.look_up("ns.test").await.unwrap().0.len(), 3);
    }
}
