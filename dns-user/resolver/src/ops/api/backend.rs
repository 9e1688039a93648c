//! The server state that the API reads and modifies.

use std::{collections::BTreeMap, net::IpAddr, path::PathBuf, sync::Arc, time::Duration};

use anyhow::Context as _;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::sync::{mpsc, oneshot};

use super::local_groups::LocalJobs;
use crate::{
    ops::{
        metrics::Metrics,
        readiness::{CheckResult, Readiness},
        service_status::{Event, FileState, Kind, Reloaded, ServiceReport, ServiceStatus},
        status::{
            CertificateStatus, FastPathView, OverloadSource, RecordsStatus, RepliesStatus,
            ServerStatus,
        },
        tap::Tap,
        version,
    },
    state::{ByDomain, Route, ServerState},
};
use dns_core::{
    catalog::Snapshot,
    name::{self, Name},
    resolve::explain,
    wire::{TYPE_A, TYPE_AAAA, TYPE_ANY, TYPE_PTR, TYPE_TXT},
};
use dns_fastpath::{AnswerKey, HeldReply};
use dns_health::HealthService;
use dns_kit::{
    logs::Logs,
    metrics::{
        labels::{type_label, type_text},
        names,
    },
    tls::RotatingTls,
};
use dns_upstream::Selection;

/// Maximum number of interfaces that an explanation names.
const MAX_NAMED_INTERFACES: usize = 4;

/// Time limit for a reload requested through the API.
const RELOAD_LIMIT: Duration = Duration::from_secs(25);

/// Requests reloads from the main loop, which sends back the results.
pub(crate) type ReloadOrders = mpsc::Sender<oneshot::Sender<Reloaded>>;

/// The server state that the API reads and modifies.
pub struct Backend {
    pub(crate) readiness: Readiness,
    pub(crate) logs: Logs,
    pub(crate) metrics: Metrics,
    pub(crate) server_state: Arc<ServerState>,
    /// `None` without `jobs_dir`.
    pub(crate) jobs: Option<Arc<LocalJobs>>,
    pub(crate) reloads: ReloadOrders,
    pub(crate) overload: OverloadSource,
    pub(crate) tap: Tap,
}

impl Backend {
    pub(super) fn status(&self) -> ServerStatus {
        let (last_reload, last_failure) = last_events(&self.readiness.service_status);
        let ServiceReport {
            listen,
            fast_path_off,
            files,
            notes,
            ..
        } = self.readiness.service_status.state();
        let checks = self.readiness.checks();
        let config = first_file(&files, Kind::Config);
        ServerStatus {
            server_version: version::VERSION.to_owned(),
            commit: version::COMMIT.to_owned(),
            pid: std::process::id(),
            // Commands compare it with the file that they were given, from another folder.
            config: config.and_then(|config| std::path::absolute(config).ok()),
            ready: checks.iter().all(|check| check.ok),
            degraded: checks
                .iter()
                .any(|check| check.result == CheckResult::Degraded),
            checks,
            started: self.readiness.service_status.started_at(),
            uptime_seconds: self.readiness.service_status.uptime().as_secs_f64(),
            listen: listen.iter().map(ToString::to_string).collect(),
            records: self.records_status(first_file(&files, Kind::Records)),
            replies: self.replies(),
            fast_path: self
                .server_state
                .fast_path
                .get()
                .map(|fast_path| FastPathView::of(&fast_path)),
            fast_path_off: fast_path_off.as_ref().map(|off| off.why().to_owned()),
            overload: self.overload.status(),
            recursors: self.readiness.upstreams.recursors(),
            consul: self
                .readiness
                .consul
                .as_ref()
                .map(|names| names.view())
                .unwrap_or_default(),
            cache: json!(self.readiness.upstreams.cache()),
            health: self
                .readiness
                .health
                .as_ref()
                .map_or(Value::Null, |checks| health_status(checks)),
            certificates: self
                .readiness
                .certificates
                .iter()
                .map(|tls| certificate(tls))
                .collect(),
            last_reload,
            last_failure,
            files: json!(files),
            problems: self.logs.problems(),
            notes,
            logging: self.logs.status(),
        }
    }

    fn records_status(&self, file: Option<&PathBuf>) -> RecordsStatus {
        let snapshot = self.server_state.snapshot();
        let age = self.readiness.service_status.records_age();
        RecordsStatus {
            file: file.map(|file| file.display().to_string()),
            version: snapshot.version(),
            age_seconds: age.map(|age| age.as_secs_f64()),
            instances: snapshot.instances().len(),
            domains: snapshot.domains().map(ToString::to_string).collect(),
            aliases: snapshot.alias_count(),
        }
    }

    /// Explains a name; without a type for both types of addresses.
    pub(super) fn explain(
        &self,
        name: &str,
        query_type: Option<u16>,
    ) -> Result<Value, NameRefused> {
        let name = parse(name)?;
        let state = self.server_state.state_full();
        let consul = self
            .readiness
            .consul
            .as_ref()
            .filter(|_| state.is_consuls(&name));
        if let Some(explanation) = consul.and_then(|names| names.zone().explain(&name)) {
            return Ok(self.explain_consuls(&name, explanation));
        }
        let mut explanation = explain(&state.snapshot, &*self.server_state.health, &name);
        // Without health checks a query starts none, whatever the name asks for.
        if self.readiness.health.is_none()
            && let Some(result) = &mut explanation.result
        {
            (result.tracked, result.synchronous) = (false, false);
        }
        let route = Route::of(&state, &name, query_type.unwrap_or(TYPE_A));
        let reverse = if matches!(route, Route::Reverse(_)) {
            ReverseNames::of(&state.snapshot, &name)
        } else {
            None
        };
        let is_of_records = reverse
            .as_ref()
            .is_some_and(|reverse| !reverse.names.is_empty());
        let handler = domain_of_handler(&state.routes.handlers, &name);
        let rcode = match route {
            Route::Upcheck => Some("NOERROR"),
            Route::Reverse(_) => is_of_records.then_some("NOERROR"),
            _ => explanation.result.as_ref().map(|result| result.rcode),
        };
        let forwarding = match &route {
            Route::Recursors(_) => self.readiness.upstreams.explain(None, &name),
            Route::Handler(_) => self.readiness.upstreams.explain(Some(&handler), &name),
            _ => None,
        };
        let mut text = match &reverse {
            Some(reverse) => reverse.text(&name),
            None => explanation.to_string(),
        };
        if let (Some(query_type), Some(result)) = (query_type, &explanation.result) {
            let data = data_of_type(&result.addresses, query_type);
            text = format!("{}\n  {}: {data}\n", text.trim_end(), type_text(query_type));
        }
        if let Some(forwarding) = &forwarding {
            text = format!("{}\n{forwarding}", text.trim_end());
        }
        let mut value = json!(explanation);
        value["forwarding"] = json!(forwarding);
        value["answered_by"] = self
            .answered_by(&name, &route, &handler, is_of_records)
            .into();
        value["rcode"] = rcode.into();
        value["reverse"] = json!(reverse.map(|reverse| reverse.names));
        value["text"] = text.into();
        Ok(value)
    }

    fn explain_consuls(&self, name: &Name, explanation: dns_consul::Explanation) -> Value {
        let mut types = self.held_types(name);
        if self.server_state.fast_path.is_published(name) {
            types.insert(0, "addresses");
        }
        let answered_by = match self.serving_interfaces() {
            Some(at) if !types.is_empty() => format!(
                "the interface (fast path) for {} over UDP{at}; userspace for everything else",
                types.join(" and ")
            ),
            _ => "userspace".to_owned(),
        };
        let dns_consul::Explanation {
            domain,
            text,
            rcode,
        } = explanation;
        json!({
            "name": name.to_string(), "zone": domain, "text": text, "rcode": rcode, "answered_by": answered_by,
        })
    }

    /// Describes the part that answers a name: `handler` is the domain of its handler; `is_of_records`: it is the reverse name
    /// of an address in the records.
    fn answered_by(
        &self,
        name: &Name,
        route: &Route,
        handler: &Name,
        is_of_records: bool,
    ) -> String {
        let answered_by = match route {
            Route::Upcheck => "userspace: an up-check name, always 127.0.0.1 and ::1".to_owned(),
            Route::Local if self.server_state.fast_path.is_published(name) => {
                match self.serving_interfaces() {
                    Some(at) => format!("the interface (fast path), for A and AAAA over UDP{at}"),
                    None => {
                        let state = self.server_state.fast_path.in_words();
                        format!("userspace: the fast path is {state}")
                    }
                }
            }
            Route::Local => match self.readiness.service_status.state().fast_path_off {
                Some(off) => format!("userspace: the fast path is off ({})", off.why()),
                None => "userspace; the fast path learns the name when it is queried".to_owned(),
            },
            Route::Consul(_) => "userspace: Consul's names".to_owned(),
            Route::Handler(_) => format!("userspace: the handler for {handler}"),
            Route::Reverse(_) if is_of_records => {
                "userspace: reverse names of the records".to_owned()
            }
            Route::Reverse(_) => {
                "userspace: reverse names of the records, then recursors".to_owned()
            }
            Route::Recursors(_) => match self.readiness.upstreams.recursors().first() {
                Some(first) => {
                    format!(
                        "recursors, {} first: the name is not one of the fleet",
                        first.address
                    )
                }
                None => "recursors, but none are known: the reply is SERVFAIL".to_owned(),
            },
            Route::Refused => "no server: recursion is off, the reply is REFUSED".to_owned(),
        };
        let held = match route {
            Route::Handler(_) | Route::Recursors(_) | Route::Reverse(_) => {
                self.held_types(name).join(" and ")
            }
            _ => return answered_by,
        };
        let Some(at) = self.serving_interfaces().filter(|_| !held.is_empty()) else {
            return answered_by;
        };
        let until = if is_of_records {
            "; else"
        } else {
            " until the cached answer expires; then"
        };
        format!("the interface (fast path), for {held} over UDP{at}{until} {answered_by}")
    }

    /// Returns which interfaces answer, such as " at lo, eth0"; `None` if none does. A name may be
    /// published long before an interface has a program.
    fn serving_interfaces(&self) -> Option<String> {
        let status = self.server_state.fast_path.get()?.status();
        // Programs stay attached after their lease and pass every query to userspace.
        if status.lease.remaining_ms == 0 {
            return None;
        }
        let served = status
            .interfaces
            .interfaces
            .into_iter()
            .filter(|interface| interface.hook.is_some());
        let names: Vec<String> = served.map(|interface| interface.name).collect();
        match names.len() {
            0 => None,
            1..=MAX_NAMED_INTERFACES => Some(format!(" at {}", names.join(", "))),
            count => Some(format!(
                " at {} and {} more",
                names[..MAX_NAMED_INTERFACES].join(", "),
                count - MAX_NAMED_INTERFACES
            )),
        }
    }

    pub(super) async fn reload(&self) -> anyhow::Result<Reloaded> {
        let (done, result) = oneshot::channel();
        // The main loop drops both ends when it ends.
        const ENDING: &str = "the server is shutting down";
        let reload = async {
            // The queue may be full: the main loop reloads for others, or stands still.
            self.reloads.send(done).await.ok()?;
            result.await.ok()
        };
        tokio::time::timeout(RELOAD_LIMIT, reload)
            .await
            .with_context(|| {
                format!(
                    "the reload takes longer than {RELOAD_LIMIT:?}; it continues in the background, unless `status` \
                     shows that the main loop stands still"
                )
            })?
            .context(ENDING)
    }

    pub(super) async fn local_replies(&self, selection: &Selection) -> Vec<LocalReply> {
        let Selection {
            name,
            zone,
            query_type,
        } = selection;
        let mut replies = Vec::new();
        for HeldReply {
            question,
            bytes,
            is_denial,
        } in self.server_state.fast_path.local_replies().await
        {
            let is_selected = name.as_ref().is_none_or(|name| *name == question.name)
                && zone
                    .as_ref()
                    .is_none_or(|zone| question.name.is_within(zone))
                && query_type.is_none_or(|wanted| wanted == question.qtype);
            if is_selected {
                replies.push(LocalReply {
                    name: question.name.to_string(),
                    query_type: type_text(question.qtype),
                    dnssec_ok: question.dnssec_ok,
                    checking_disabled: question.checking_disabled,
                    bytes,
                    denial: is_denial,
                });
            }
        }
        // The maps are a hash table; a listing must not change its order from call to call.
        replies.sort_unstable();
        replies
    }

    /// Returns the most usual types of the whole answers for a name that interfaces hold.
    fn held_types(&self, name: &Name) -> Vec<&'static str> {
        let mut held = Vec::new();
        for qtype in [TYPE_A, TYPE_AAAA, 33, TYPE_TXT, TYPE_PTR, 64, 65, TYPE_ANY] {
            let is_held = [false, true].into_iter().any(|dnssec_ok| {
                let key = AnswerKey {
                    name: name.into(),
                    qtype,
                    dnssec_ok,
                    // Clients that set CD are rare, and a name may be held for both.
                    checking_disabled: false,
                };
                self.server_state.fast_path.holds_answer(&key)
            });
            if is_held {
                held.push(type_label(qtype));
            }
        }
        held
    }

    /// Removes the selected answers from all caches; returns their number, `None` without a cache.
    /// Also invalidates all answers cached by interfaces, and returns when no interface gives one.
    pub(super) async fn flush(&self, selection: &Selection) -> Option<u64> {
        let flushed = self.readiness.upstreams.flush(selection);
        // After the caches: in the other order a query in between could publish an answer again
        // from a cache that is about to be emptied.
        self.server_state.fast_path.void_answers();
        // Programs of an earlier process know nothing of this flush; they end with their lease.
        self.server_state.fast_path.earlier_answers_ended().await;
        flushed
    }
}

/// A local reply that interfaces give until a change withdraws it.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct LocalReply {
    /// Queried name, with a trailing dot.
    pub name: String,
    /// Query type, as mnemonic if it has one.
    #[serde(rename = "type")]
    pub query_type: String,
    /// Whether it answers queries with DO.
    pub dnssec_ok: bool,
    /// Whether it answers queries with CD.
    pub checking_disabled: bool,
    /// Size of all forms of the reply.
    pub bytes: usize,
    /// Whether it has no answer.
    pub denial: bool,
}

/// The names of an address in the records and aliases.
struct ReverseNames {
    address: IpAddr,
    names: Vec<String>,
}

impl ReverseNames {
    /// Returns the names of the address whose reverse name this is; `None` if it is none.
    fn of(snapshot: &Snapshot, name: &Name) -> Option<Self> {
        let address = name::address_of(name.as_wire())?;
        let mut names = Vec::new();
        for name in snapshot.reverse(address) {
            if let Ok((name, _)) = Name::from_wire(&name) {
                names.push(name.to_string());
            }
        }
        Some(Self { address, names })
    }

    fn text(&self, name: &Name) -> String {
        let Self { address, names } = self;
        let mut text = format!(
            "{name}\n  reverse name of {address}, with {} names in the records\n",
            names.len()
        );
        for name in names {
            text.push_str(&format!("    + {name}\n"));
        }
        text
    }
}

impl Backend {
    fn replies(&self) -> RepliesStatus {
        // From the exposition, so that `status` and Prometheus cannot disagree.
        let families = self.metrics.gather();
        let sum = |name: &str, label: Option<(&str, &str)>| {
            let metrics = families
                .iter()
                .find(|family| family.name() == name)
                .map(|family| family.get_metric());
            let wanted = metrics.unwrap_or_default().iter().filter(|metric| {
                label.is_none_or(|(key, value)| {
                    metric
                        .get_label()
                        .iter()
                        .any(|label| label.name() == key && label.value() == value)
                })
            });
            wanted
                .map(|metric| metric.get_counter().get_value() as u64)
                .sum()
        };
        RepliesStatus {
            fast: sum(names::REPLIES_TOTAL, Some(("path", "fast"))),
            userspace: sum(names::REPLIES_TOTAL, Some(("path", "userspace"))),
            internal: sum(names::REQUESTS_INTERNAL_TOTAL, None),
            external: sum(names::REQUESTS_EXTERNAL_TOTAL, None),
        }
    }
}

fn first_file<'a>(files: &'a BTreeMap<&'static str, FileState>, kind: Kind) -> Option<&'a PathBuf> {
    files.get(kind.label())?.files.first()
}

/// Returns the last reload of each kind of file, and the last that failed.
fn last_events(status: &ServiceStatus) -> (BTreeMap<String, Event>, BTreeMap<String, Event>) {
    let mut done = BTreeMap::new();
    let mut failed = BTreeMap::new();
    for (kind, reloads) in status.reloads() {
        if let Some(event) = reloads.last {
            done.insert(kind.to_owned(), event);
        }
        if let Some(event) = reloads.last_failure {
            failed.insert(kind.to_owned(), event);
        }
    }
    (done, failed)
}

/// Returns the addresses that are records of this type.
fn data_of_type(addresses: &[IpAddr], query_type: u16) -> String {
    let mut data = Vec::new();
    for address in addresses {
        let is_of_type = match query_type {
            TYPE_A => address.is_ipv4(),
            TYPE_AAAA => address.is_ipv6(),
            // The fleet's names have addresses only.
            _ => false,
        };
        if is_of_type {
            data.push(address.to_string());
        }
    }
    if data.is_empty() {
        return "no data".to_owned();
    }
    data.join(" ")
}

/// Returns the domain of the handler that would answer for a name: the longest, or the root.
fn domain_of_handler(handlers: &ByDomain, name: &Name) -> Name {
    for suffix in name.suffixes() {
        if let Some((domain, _)) = handlers.get_key_value(suffix) {
            return domain.clone();
        }
    }
    Name::root()
}

pub(super) fn parse(text: &str) -> Result<Name, NameRefused> {
    Name::from_text(text)
        .map_err(|error| NameRefused(format!("{text:?} is not a domain name: {error}")))
}

fn health_status(checks: &HealthService) -> Value {
    let [running, failing, unknown, unchecked] = checks.states().counts();
    json!({
        "tracked_names": checks.tracker().name_count(),
        "running": running, "failing": failing, "unknown": unknown, "unchecked": unchecked,
    })
}

fn certificate(tls: &RotatingTls) -> CertificateStatus {
    let facts = &tls.current().certificate;
    let not_after = facts
        .not_after
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap_or_default();
    CertificateStatus {
        purpose: tls.purpose.to_owned(),
        subject: facts.common_name.clone(),
        not_after: not_after.as_secs_f64(),
        error: tls.last_error(),
    }
}

/// Reason why a name cannot be looked up.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct NameRefused(pub String);
