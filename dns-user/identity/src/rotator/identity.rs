//! One identity of a rotator: its schedule, its folder, and the files of a generation.
//! The set of all identities keeps the order in which they are due: a step costs the same for ten
//! identities and for ten thousand.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Display,
    fs,
    ops::Bound,
    path::PathBuf,
    sync::Arc,
    time::{Duration, SystemTime},
};

use anyhow::anyhow;
use serde::{Deserialize, Serialize};
use serde_json::json;
use zeroize::Zeroizing;

use crate::{
    authority::{Fingerprint, encode_all, parse_chain, validity},
    certificate::{seconds, unix},
    folder::{Entry, FolderError, IdentityFolder, Pair, read_pair},
    profile::{Container, Guid},
    schedule::{Failure, Schedule, Share},
};

/// Type of the resources, Envoy API v3.
const SECRET: &str = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.Secret";

/// An identity and the state of its pair.
pub(super) struct Identity {
    pub(super) container: Container,
    pub(super) folder: IdentityFolder,
    pub(super) schedule: Schedule,
    /// Time in the queue of all identities, at or before the due time.
    pub(super) queued: SystemTime,
    /// CA of the pair in use; `None` without a pair.
    pub(super) issuer: Option<IssuedBy>,
    /// Trust bundle in the folder.
    pub(super) bundle: Arc<str>,
}

/// The CA of a pair.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct IssuedBy {
    pub(super) fingerprint: Fingerprint,
    /// CA certificates, the issuer first, PEM.
    pub(super) chain: Arc<str>,
}

impl Identity {
    pub(super) fn new(container: Container, folder: IdentityFolder) -> Self {
        Self {
            schedule: Schedule::new(Share::of(container.guid.as_str()), None),
            container,
            folder,
            queued: SystemTime::UNIX_EPOCH,
            issuer: None,
            bundle: Arc::from(""),
        }
    }

    /// Reads an identity written by an earlier process; `None` if the folder is of another kind.
    pub(super) fn take_over(folder: IdentityFolder) -> anyhow::Result<Option<Self>> {
        // The folder of identities also holds other entries, such as the list of former CAs.
        let Some(data) = folder.current() else {
            return Ok(None);
        };
        let description = fs::read(data.join(CONTAINER)).map_err(unusable)?;
        let container = serde_json::from_slice(&description).map_err(unusable)?;
        // The pair is complete without these links, and the next change renews them.
        if let Err(error) = folder.complete_change() {
            tracing::warn!("links of an interrupted change are not renewed: {error}");
        }
        let mut identity = Self::new(container, folder);
        // Without a readable pair, the identity is due immediately.
        if let Ok(pair) = read_pair(&identity.folder.path, "instance")
            && pair.is_matching()
            && let Ok((ders, parsed)) = parse_chain(pair.certificate.as_bytes())
        {
            let share = Share::of(identity.container.guid.as_str());
            identity.schedule = Schedule::new(share, Some(validity(&parsed[0])));
            // Encoded again, because chains are compared as texts and a file may have other line
            // ends.
            let chain = encode_all(&ders[1..]);
            identity.issuer = ders.get(1).map(|issuer| IssuedBy {
                fingerprint: Fingerprint::of(issuer),
                chain: Arc::from(chain),
            });
            // An unreadable bundle equals no other, so the first step writes it again.
            identity.bundle = Arc::from(fs::read_to_string(data.join(BUNDLE)).unwrap_or_default());
        }
        Ok(Some(identity))
    }

    /// Returns whether certificate and key can be opened by their names.
    pub(super) fn has_files(&self) -> bool {
        // `exists` follows the links, so it also notices a generation that was removed.
        ["instance.key", "instance.crt"]
            .iter()
            .all(|name| self.folder.path.join(name).exists())
    }

    pub(super) fn is_from(&self, authority: &Fingerprint) -> bool {
        self.issuer
            .as_ref()
            .is_some_and(|issuer| issuer.fingerprint == *authority)
    }

    pub(super) fn read(&self, name: &str) -> Result<Pair, FolderError> {
        read_pair(&self.folder.path, name).map_err(|cause| FolderError {
            path: self.folder.path.join(name),
            cause,
        })
    }

    /// Writes the same pairs with another trust bundle.
    pub(super) fn rewrite(&self, bundle: &str, envoy: bool) -> Result<(), FolderError> {
        let pair = self.read("instance")?;
        let second = match self.container.internal_routes {
            Some(_) => Some(self.read("c2c")?),
            None => None,
        };
        Contents {
            pair: &pair,
            second: second.as_ref(),
            bundle,
            container: &self.container,
            envoy,
        }
        .write(&self.folder)
    }

    pub(super) fn status(&self, now: SystemTime) -> IdentityStatus {
        let validity = self.schedule.validity;
        IdentityStatus {
            guid: self.container.guid.clone(),
            folder: self.folder.path.to_owned(),
            not_before: validity.map(|validity| seconds(validity.not_before)),
            not_after: validity.map(|validity| seconds(validity.not_after)),
            renews_at: self.schedule.due(now),
            renew_by: self.schedule.deadline().map(seconds),
            issuer: self
                .issuer
                .as_ref()
                .map(|issuer| issuer.fingerprint.clone()),
            failure: self.schedule.failure.clone().map(|failure| Failure {
                // By the present clock, which may have been corrected since.
                retry_at: self.schedule.retry_at(now).unwrap_or(failure.retry_at),
                ..failure
            }),
        }
    }
}

fn unusable(cause: impl Display) -> anyhow::Error {
    anyhow!("{CONTAINER}: {cause}; the folder stays unchanged: remove it, or restore its files")
}

/// State of one identity.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct IdentityStatus {
    /// Id of the identity.
    pub guid: Guid,
    /// Folder that holds its files.
    pub folder: PathBuf,
    /// Start of validity of the pair in use, in seconds since 1970.
    pub not_before: Option<u64>,
    /// End of validity of the pair in use, in seconds since 1970.
    pub not_after: Option<u64>,
    /// Time of the next renewal or retry.
    #[serde(with = "unix")]
    pub renews_at: SystemTime,
    /// End of the renewal window, in seconds since 1970: a healthy rotator renews before.
    pub renew_by: Option<u64>,
    /// CA of the pair in use.
    pub issuer: Option<Fingerprint>,
    /// The current failure; `None` after a success.
    pub failure: Option<Failure>,
}

//----------- Contents --------------------------------------------------------

/// The description that the pair was issued for; a restarted rotator continues from it.
const CONTAINER: &str = "container.json";

/// CAs that a peer's certificate may be issued by, PEM.
const BUNDLE: &str = "ca.crt";

pub(super) struct Contents<'a> {
    pub(super) pair: &'a Pair,
    pub(super) second: Option<&'a Pair>,
    pub(super) bundle: &'a str,
    pub(super) container: &'a Container,
    pub(super) envoy: bool,
}

impl Contents<'_> {
    /// Replaces the folder's files atomically.
    pub(super) fn write(&self, folder: &IdentityFolder) -> Result<(), FolderError> {
        let Self {
            pair,
            second,
            bundle,
            container,
            envoy,
        } = self;
        let description = serde_json::to_vec(container).expect("a description has text keys");
        let joined = pair.joined();
        let joined_second = second.map(Pair::joined);
        let mut entries = vec![
            Entry::public("instance.crt", pair.certificate.as_bytes()),
            Entry::secret("instance.key", pair.key.as_bytes()),
            Entry::secret("instance.pem", joined.as_bytes()),
            Entry::public(BUNDLE, bundle.as_bytes()),
            Entry::public(CONTAINER, &description),
        ];
        if let (Some(second), Some(joined)) = (second, &joined_second) {
            entries.push(Entry::public("c2c.crt", second.certificate.as_bytes()));
            entries.push(Entry::secret("c2c.key", second.key.as_bytes()));
            entries.push(Entry::secret("c2c.pem", joined.as_bytes()));
        }
        // Files of Envoy's secret discovery service.
        let mut secrets = Vec::new();
        if *envoy {
            let identity = envoy_certificate("id-cert-and-key", pair);
            secrets.push(("sds-id-cert-and-key.json", identity));
            if let Some(second) = second {
                let second = envoy_certificate("c2c-cert-and-key", second);
                secrets.push(("sds-c2c-cert-and-key.json", second));
            }
            let validation = envoy_validation("id-validation-context", bundle);
            secrets.push(("sds-id-validation-context.json", validation));
        }
        for (name, contents) in &secrets {
            entries.push(Entry::secret(name, contents.as_bytes()));
        }
        folder.replace(&entries, container.owner)
    }
}

/// Returns a discovery response with a `tls_certificate`.
fn envoy_certificate(name: &str, pair: &Pair) -> Zeroizing<String> {
    // Formatted by hand around the key, because a JSON value would keep a copy that is not wiped.
    // In PEM only the line ends need escaping.
    let before = json!({
        "resources": [{
            "@type": SECRET,
            "name": name,
            "tls_certificate": { "certificate_chain": { "inline_string": pair.certificate } },
        }],
    })
    .to_string();
    // Large enough for every line end to become two characters: a text that grows is moved, and its
    // old memory is not wiped.
    let mut text = Zeroizing::new(String::with_capacity(
        before.len() + 2 * pair.key.len() + 64,
    ));
    // Always found, because `json!` has just written it.
    let (head, tail) = before.split_at(before.find(r#"{"certificate_chain""#).unwrap_or(0) + 1);
    text.push_str(head);
    text.push_str(r#""private_key":{"inline_string":""#);
    for line in pair.key.lines() {
        text.push_str(line);
        text.push_str("\\n");
    }
    text.push_str("\"},");
    text.push_str(tail);
    text
}

/// Returns a discovery response with a `validation_context`.
fn envoy_validation(name: &str, bundle: &str) -> Zeroizing<String> {
    let resource = json!({
        "@type": SECRET,
        "name": name,
        "validation_context": { "trusted_ca": { "inline_string": bundle } },
    });
    Zeroizing::new(json!({ "resources": [resource] }).to_string())
}

/// Maximum number of overdue identities that are queued at once.
const MAX_BACKLOG: usize = 256;

/// Period over which identities are reissued after a change of the CA.
pub(super) const REISSUE_SPREAD: Duration = Duration::from_secs(300);

/// Identities by guid, and by the time at which they are due.
pub(super) struct Identities {
    /// Changes that may make identities due earlier are made by the functions below.
    pub(super) all: BTreeMap<Guid, Identity>,
    /// Each identity once. The times are lower bounds: a failed attempt delays an identity, but moves
    /// it in the queue only at its turn.
    queue: BTreeSet<(SystemTime, Guid)>,
    /// Latest time at which a step began.
    latest: SystemTime,
}

impl Identities {
    pub(super) fn new(now: SystemTime) -> Self {
        Self {
            all: BTreeMap::new(),
            queue: BTreeSet::new(),
            latest: now,
        }
    }

    /// Adds an identity, or replaces the one with its guid.
    pub(super) fn insert(&mut self, mut identity: Identity, now: SystemTime) {
        let guid = identity.container.guid.clone();
        // An earlier identity of this guid has an entry of its own in the queue.
        self.remove(&guid);
        identity.queued = identity.schedule.due(now);
        self.queue.insert((identity.queued, guid.clone()));
        self.all.insert(guid, identity);
    }

    pub(super) fn remove(&mut self, guid: &Guid) -> Option<Identity> {
        let (guid, identity) = self.all.remove_entry(guid)?;
        self.queue.remove(&(identity.queued, guid));
        Some(identity)
    }

    /// Applies a change to all identities, which may make them due earlier.
    pub(super) fn change_all(&mut self, now: SystemTime, mut change: impl FnMut(&mut Identity)) {
        self.queue.clear();
        for (guid, identity) in &mut self.all {
            change(identity);
            identity.queued = identity.schedule.due(now);
            self.queue.insert((identity.queued, guid.clone()));
        }
    }

    /// Applies a change, which may make identities due earlier, to the next `count` identities after
    /// a guid; returns the last one, or `None` at the end.
    pub(super) fn change_next(
        &mut self,
        after: Option<&Guid>,
        count: usize,
        now: SystemTime,
        mut change: impl FnMut(&Guid, &mut Identity),
    ) -> Option<Guid> {
        let from = after.map_or(Bound::Unbounded, Bound::Excluded);
        let mut passed = 0;
        let mut last = None;
        for (guid, identity) in self
            .all
            .range_mut::<Guid, _>((from, Bound::Unbounded))
            .take(count)
        {
            (passed, last) = (passed + 1, Some(guid));
            change(guid, identity);
            let due = identity.schedule.due(now);
            // A later time can stay, because the queue's times are lower bounds.
            if due < identity.queued {
                self.queue.remove(&(identity.queued, guid.clone()));
                identity.queued = due;
                self.queue.insert((due, guid.clone()));
            }
        }
        // If fewer were left, the next call begins with the first identity again.
        last.filter(|_| passed == count).cloned()
    }

    /// Notices a clock that was set back, which makes identities due earlier.
    pub(super) fn begin_step(&mut self, now: SystemTime) {
        // Then a pair may start in the future and be due now, before its time in the queue.
        if now < self.latest {
            self.change_all(now, |_| {});
        }
        self.latest = now;
    }

    /// Returns a time before which no identity is due; `None` without identities.
    pub(super) fn next_due(&self) -> Option<SystemTime> {
        self.queue.first().map(|(at, _)| *at)
    }

    /// Returns the most urgent identities that are due, the first to renew last: those at the end of
    /// their window, then by due time.
    pub(super) fn overdue(&mut self, now: SystemTime) -> Vec<Guid> {
        let mut due = Vec::new();
        let mut delayed = Vec::new();
        // An identity whose last attempt failed is at its old place in the queue, but not due yet.
        for (_, guid) in self.queue.iter().take_while(|(at, _)| *at <= now) {
            let schedule = &self.all[guid].schedule;
            match schedule.due(now) {
                at if at <= now => due.push((schedule.can_wait(now, REISSUE_SPREAD), at, guid)),
                _ => delayed.push(guid.clone()),
            }
        }
        // Selecting takes linear time: after an outage all identities may be overdue, at every
        // call.
        if due.len() > MAX_BACKLOG {
            due.select_nth_unstable(MAX_BACKLOG);
            due.truncate(MAX_BACKLOG);
        }
        due.sort_unstable_by(|one, other| other.cmp(one));
        let due = due.into_iter().map(|(_, _, guid)| guid.clone()).collect();
        for guid in delayed {
            if let Some(identity) = self.remove(&guid) {
                self.insert(identity, now);
            }
        }
        due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resources_carry_pair_inline() {
        let key = Zeroizing::new("-----BEGIN X-----\nAA==\n-----END X-----\n".to_owned());
        let pair = Pair {
            certificate: "-----BEGIN C-----\n".to_owned(),
            key,
        };
        let text = envoy_certificate("id", &pair);
        let value: serde_json::Value = serde_json::from_str(&text).unwrap();
        let resource = &value["resources"][0];
        assert_eq!(resource["@type"], SECRET);
        assert_eq!(resource["name"], "id");
        let held = &resource["tls_certificate"];
        assert_eq!(held["private_key"]["inline_string"], pair.key.as_str());
        assert_eq!(held["certificate_chain"]["inline_string"], pair.certificate);
    }
}
