//! Metrics: one registry and its exposition.
//!
//! Each module owns its counters (`metrics.rs`, `register`) and exposes the families declared in
//! [`dns_kit::metrics::names`]. The fast path's replies bypass userspace; their counters are
//! read from the BPF maps on each scrape and added to the families that count all replies. They include the
//! replies of earlier programs of the process, so that no sum falls when the attacher restarts.

use std::{
    borrow::Cow,
    future::pending,
    io,
    net::SocketAddr,
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

use axum::{
    Router,
    extract::State,
    http::{StatusCode, header},
    response::{IntoResponse, Response},
    routing::get,
};
use prometheus::{
    Registry, TextEncoder,
    proto::{Counter, MetricFamily},
};
use tokio::net::TcpListener;

use super::{
    conditions::table::checks,
    readiness::{Check, Readiness},
    service_status::{self, DURATIONS},
    status::share,
    version,
};
use dns_common::counters::Outcome;
use dns_core::terminal;
use dns_fastpath::{
    AnswersStatus, Counters, FastPath, FastPathHandle, FastPathStatus, Hook, InterfaceStatus,
    ProgramStatus, TableStatus, Work,
};
use dns_kit::{
    http_server::{Listener, Server},
    logs::Logs,
    metrics::{
        families, histogram,
        labels::{self, rcode_label},
        register_process,
    },
    tls::RotatingTls,
};

//----------- Metrics --------------------------------------------------------

/// All metrics of this process. Clones share the registry.
#[derive(Clone)]
pub struct Metrics {
    shared: Arc<MetricsShared>,
}

struct MetricsShared {
    registry: Registry,
    /// The fast path, whose counters are read on each scrape.
    fast_path: FastPathHandle,
    /// Value of the label `server`.
    server: String,
}

impl Metrics {
    /// Creates a registry with the metrics of the process and of the fast path. `server` is the
    /// value of the label of that name ([`dns_kit::metrics::labels::server_label`]).
    pub fn new(server: String, fast_path: FastPathHandle) -> prometheus::Result<Self> {
        let registry = Registry::new();
        register_own_process(&registry)?;
        register_fast_path(&registry, fast_path.clone())?;
        Ok(Self {
            shared: Arc::new(MetricsShared {
                registry,
                fast_path,
                server,
            }),
        })
    }

    /// Returns the registry for further collectors.
    pub fn registry(&self) -> &Registry {
        &self.shared.registry
    }

    /// Returns the value of the label `server`.
    pub fn server(&self) -> &str {
        &self.shared.server
    }

    /// Collects all families, including the fast path's replies.
    pub fn gather(&self) -> Vec<MetricFamily> {
        let mut families = self.shared.registry.gather();
        // Without a fast path the families have userspace's samples only, as in bosh-dns.
        if !self.shared.fast_path.is_empty() {
            let counters = self.shared.fast_path.counters();
            let forwarded = counters.outcome(Outcome::HitForwarded);
            add_fast_replies(
                &mut families,
                &self.shared.server,
                &counters.replies(),
                forwarded,
            );
        }
        families
    }

    /// Returns the metrics in text exposition format, version 0.0.4.
    pub fn text(&self) -> prometheus::Result<String> {
        TextEncoder::new().encode_to_string(&self.gather())
    }
}

//----------- Port --------------------------------------------------------------

/// The bound metrics port: `/metrics` for Prometheus, `/healthz` and `/readyz` for supervisors and load
/// balancers.
pub struct MetricsServer {
    server: Server,
    served: Served,
}

/// State shared by the handlers.
#[derive(Clone)]
struct Served {
    metrics: Metrics,
    probe: Arc<Readiness>,
}

impl MetricsServer {
    /// Binds the metrics port to `address`.
    pub async fn bind(
        address: SocketAddr,
        metrics: Metrics,
        probe: Arc<Readiness>,
    ) -> io::Result<Self> {
        let listener = TcpListener::bind(address).await?;
        let server = Server::new("the metrics port", Listener::Plain(listener));
        Ok(Self {
            server,
            served: Served { metrics, probe },
        })
    }

    /// Serves until the process ends.
    pub async fn run(self) {
        let routes = Router::new()
            .route("/metrics", get(exposition))
            .route("/healthz", get(alive))
            .route("/readyz", get(ready))
            .with_state(self.served);
        self.server.run(move |_| routes.clone(), pending()).await;
    }
}

async fn exposition(State(served): State<Served>) -> Response {
    match served.metrics.text() {
        Ok(text) => (
            [(
                header::CONTENT_TYPE,
                "text/plain; version=0.0.4; charset=utf-8",
            )],
            text,
        )
            .into_response(),
        Err(error) => {
            tracing::error!(%error, "cannot encode the metrics");
            (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response()
        }
    }
}

/// Handles `/healthz`: 503 if a restart would help.
async fn alive(State(served): State<Served>) -> Response {
    verdict(
        served
            .probe
            .checks()
            .into_iter()
            // Missing records or a dead recursor survive a restart, and a restart would interrupt
            // what still works.
            .filter(|check| check.name == checks::SOCKETS),
    )
}

/// Handles `/readyz`: 200 if the server also has all data needed for correct answers. A degraded
/// server is ready, because its answers are correct.
async fn ready(State(served): State<Served>) -> Response {
    verdict(served.probe.checks().into_iter())
}

/// Builds a response with one line per check; 503 if one fails.
fn verdict(checks: impl Iterator<Item = Check>) -> Response {
    let mut status = StatusCode::OK;
    let mut text = String::new();
    for Check {
        name,
        condition: _,
        ok,
        result,
        detail,
    } in checks
    {
        if !ok {
            status = StatusCode::SERVICE_UNAVAILABLE;
        }
        // Errors of other machines may be part of it, and must not look like lines of checks.
        let detail = terminal::line(&detail);
        text.push_str(&format!("{:<4} {name}: {detail}\n", result.word()));
    }
    (status, text).into_response()
}

//----------- Server ------------------------------------------------------------

/// Registers the families that belong to no single module.
pub fn register_server(
    registry: &Registry,
    logs: Logs,
    readiness: Readiness,
) -> prometheus::Result<()> {
    families::UPTIME_SECONDS.scrape(registry, move || {
        let status = &readiness.service_status;
        let service_status::ServiceReport {
            records_version,
            instances,
            aliases,
            ..
        } = status.state();
        // Without records there is no age: 0 would say that they are new.
        let age = status.records_age().map(|age| ([""; 0], age.as_secs_f64()));
        let kinds = status.reloads();
        let mut done = Vec::new();
        let mut failures = Vec::new();
        let mut durations = Vec::new();
        for (kind, reloads) in &kinds {
            done.push(([*kind], reloads.count));
            failures.push(([*kind], reloads.failures));
            // A histogram of zeros for each kind of file that is not configured would only cost
            // series.
            if reloads.count > 0 {
                let took = reloads.took.as_secs_f64();
                durations.push(([*kind], histogram(&DURATIONS, reloads.durations, took)));
            }
        }
        vec![
            families::UPTIME_SECONDS.is(status.uptime().as_secs_f64()),
            families::RECORDS_VERSION.is(records_version.unwrap_or(0) as f64),
            families::RECORDS_AGE_SECONDS.of(age),
            families::RECORDS_INSTANCES.is(instances as f64),
            families::RECORDS_ALIASES.is(aliases as f64),
            families::RELOADS_TOTAL.of(done),
            families::RELOAD_FAILURES_TOTAL.of(failures),
            families::RELOAD_DURATION_SECONDS.of(durations),
            families::LOG_LINES_LOST_TOTAL.is(logs.dropped()),
            families::FAST_PATH_DEGRADED.is(f64::from(readiness.is_fast_path_degraded())),
            families::CONDITION
                .of(readiness.conditions().into_iter().map(|(condition, line)| {
                    ([condition.name], f64::from(u8::from(line.is_some())))
                })),
        ]
    })
}

//----------- Certificates ------------------------------------------------------

/// Registers the metric families of these certificates.
pub fn register_certificates(
    registry: &Registry,
    certificates: Vec<Arc<RotatingTls>>,
) -> prometheus::Result<()> {
    families::CERTIFICATE_EXPIRY_SECONDS
        .scrape(registry, move || certificate_families(&certificates))
}

fn certificate_families(certificates: &[Arc<RotatingTls>]) -> Vec<MetricFamily> {
    let mut ends = Vec::new();
    let mut warnings = Vec::new();
    let mut failures = Vec::new();
    for tls in certificates {
        let purpose = tls.purpose;
        let material = tls.current();
        let own = &material.certificate;
        ends.push(([purpose, "certificate"], seconds(own.not_after)));
        warnings.push(([purpose, "certificate"], seconds(own.warns_from())));
        if let Some(end) = material.authorities_not_after() {
            ends.push(([purpose, "authority"], seconds(end)));
        }
        if let Some(from) = material.authorities_warn_from() {
            warnings.push(([purpose, "authority"], seconds(from)));
        }
        failures.push(([purpose], tls.failures()));
    }
    vec![
        families::CERTIFICATE_EXPIRY_SECONDS.of(ends),
        families::CERTIFICATE_WARNING_SECONDS.of(warnings),
        families::CERTIFICATE_LOAD_FAILURES_TOTAL.of(failures),
    ]
}

fn seconds(moment: SystemTime) -> f64 {
    moment
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
        .as_secs() as f64
}

//----------- Replies of the fast path ------------------------------------------

/// Adds the replies of the BPF programs, by query type label and RCODE, to the families in `all`; `forwarded` of
/// them are from forwarded answers. The programs do not count by address family, so the label `family` is empty for
/// their share.
fn add_fast_replies(
    all: &mut Vec<MetricFamily>,
    server: &str,
    replies: &[(&'static str, u8, u64)],
    forwarded: u64,
) {
    let total: u64 = replies.iter().map(|(_, _, count)| count).sum();
    // The counters are read one after the other while the programs run.
    let internal = total.saturating_sub(forwarded);
    add(all, families::REQUESTS_INTERNAL_TOTAL.is(internal));
    add(all, families::REQUESTS_EXTERNAL_TOTAL.is(forwarded));
    add(all, families::REPLIES_TOTAL.of([(["fast"], total)]));
    let mut requests = Vec::new();
    let mut responses = Vec::new();
    for &(query_type, rcode, count) in replies {
        if count == 0 {
            continue;
        }
        let common = [server, labels::ZONE, labels::VIEW];
        let [server, zone, view] = common;
        requests.push(([server, zone, view, "udp", "", query_type], count));
        let [server, zone, view] = common.map(Cow::Borrowed);
        responses.push((
            [server, zone, view, rcode_label(rcode), "xdp".into()],
            count,
        ));
    }
    add(all, families::COREDNS_REQUESTS_TOTAL.of(requests));
    add(all, families::COREDNS_RESPONSES_TOTAL.of(responses));
}

/// Adds the counters of a family, keeping the families sorted by name.
fn add(all: &mut Vec<MetricFamily>, mut family: MetricFamily) {
    let place = match all.binary_search_by(|known| known.name().cmp(family.name())) {
        Ok(place) => place,
        Err(_) if family.get_metric().is_empty() => return,
        Err(place) => {
            let mut empty = family.clone();
            empty.set_metric(Vec::new());
            all.insert(place, empty);
            place
        }
    };
    let known = all[place].mut_metric();
    for metric in family.take_metric() {
        match known
            .iter_mut()
            // Two samples with the same labels in one scrape would be two values of one series.
            .find(|known| known.get_label() == metric.get_label())
        {
            Some(known) => {
                let mut sum = Counter::default();
                sum.set_value(known.get_counter().get_value() + metric.get_counter().get_value());
                known.set_counter(sum);
            }
            None => known.push(metric),
        }
    }
}

//----------- Fast path ---------------------------------------------------------

/// Registers the metric families of the fast path in use, without keeping the fast path alive.
fn register_fast_path(registry: &Registry, fast_path: FastPathHandle) -> prometheus::Result<()> {
    families::FAST_PATH_UP.scrape(registry, move || match fast_path.get() {
        Some(current) => fast_path_families(&current, &fast_path.counters()),
        // Switched off, or never loaded: 0 stands for a fast path that was lost.
        None if fast_path.is_empty() => Vec::new(),
        None => vec![families::FAST_PATH_UP.is(0.0)],
    })
}

fn fast_path_families(fast_path: &FastPath, counters: &Counters) -> Vec<MetricFamily> {
    let FastPathStatus {
        interfaces,
        programs,
        names,
        answers,
        lease,
        pinned_at: _,
    } = fast_path.status();
    let interfaces = &interfaces.interfaces;
    let (bytes_in, bytes_out) = counters.bytes();
    let attached = interfaces
        .iter()
        .filter(|interface| interface.hook.is_some())
        .count();
    // After the lease attached programs answer nothing.
    let up = attached > 0 && lease.remaining_ms > 0;
    let mut replies = Vec::new();
    for (query_type, rcode, count) in counters.replies() {
        replies.push(([query_type.into(), rcode_label(rcode)], count));
    }
    let mut families = vec![
        families::FAST_PATH_UP.is(f64::from(up)),
        families::FAST_PATH_PACKETS_TOTAL.of(counters
            .outcomes()
            .map(|(outcome, count)| ([Outcome::label(outcome)], count))),
        families::FAST_PATH_REPLIES_TOTAL.of(replies),
        families::FAST_PATH_BYTES_TOTAL.of([(["in"], bytes_in), (["out"], bytes_out)]),
        families::FAST_PATH_LEASE_SECONDS.is(lease.remaining_ms as f64 / 1000.0),
    ];
    // Other programs assign the slots otherwise.
    let by_slot = fast_path.counters();
    families.extend(families_of_interfaces(interfaces, &by_slot));
    families.extend(families_of_programs(&programs));
    families.extend(families_of_attacher(&fast_path.attacher_work()));
    families.extend(families_of_names(&names));
    families.extend(families_of_answers(&answers));
    families
}

fn families_of_interfaces(
    interfaces: &[InterfaceStatus],
    counters: &Counters,
) -> [MetricFamily; 2] {
    let mut replies = Vec::new();
    let mut hooks = Vec::new();
    for InterfaceStatus {
        name, slot, hook, ..
    } in interfaces
    {
        let count = slot.map_or(0, |slot| counters.interface(slot));
        replies.push(([name.as_str()], count));
        hooks.push(([name.as_str(), hook.map_or("none", Hook::label)], 1.0));
    }
    [
        families::FAST_PATH_INTERFACE_REPLIES_TOTAL.of(replies),
        families::FAST_PATH_INTERFACE_INFO.of(hooks),
    ]
}

fn families_of_programs(programs: &[ProgramStatus]) -> [MetricFamily; 3] {
    let mut infos = Vec::new();
    let mut times = Vec::new();
    let mut sizes = Vec::new();
    for program in programs {
        let name = program.name.as_ref();
        let reason = [program.why.as_slice(), &program.verifier]
            .concat()
            .join("\n");
        infos.push((
            [name, program.state.label(), &reason].map(str::to_owned),
            1.0,
        ));
        // Both are unknown of a program that was not loaded.
        if let Some(took) = program.load_ms {
            times.push(([name], took / 1000.0));
        }
        if let Some(count) = program.instructions {
            sizes.push(([name], f64::from(count)));
        }
    }
    [
        families::FAST_PATH_PROGRAM_INFO.of(infos),
        families::FAST_PATH_PROGRAM_LOAD_SECONDS.of(times),
        families::FAST_PATH_PROGRAM_VERIFIED_INSTRUCTIONS.of(sizes),
    ]
}

fn families_of_attacher(work: &Work) -> [MetricFamily; 2] {
    let mut times = Vec::new();
    let mut durations = Vec::new();
    for (operation, effort) in work.iter() {
        times.push(([operation.label()], effort.times));
        durations.push(([operation.label()], effort.ns / 1000));
    }
    [
        families::FAST_PATH_ATTACHER_OPERATIONS_TOTAL.of(times),
        families::FAST_PATH_ATTACHER_MICROSECONDS_TOTAL.of(durations),
    ]
}

fn families_of_names(names: &TableStatus) -> [MetricFamily; 6] {
    let store = &names.store;
    [
        families::FAST_PATH_ENTRIES.of([
            (["learned"], names.learned as f64),
            (["negative"], names.negative as f64),
            (["published"], names.published as f64),
        ]),
        families::FAST_PATH_UNFITTING_NAMES.is(names.unfitting.total() as f64),
        families::FAST_PATH_MAP_FILL_RATIO
            .is(share(names.published + names.learned, names.max_names)),
        // Memory in quarantine has been freed, but programs may still read it.
        families::FAST_PATH_ARENA_FILL_RATIO.is(share(store.used + store.quarantined, store.total)),
        families::FAST_PATH_EVICTIONS_TOTAL.is(names.evicted),
        families::FAST_PATH_WRITES_TOTAL.is(names.written),
    ]
}

fn families_of_answers(answers: &AnswersStatus) -> [MetricFamily; 8] {
    let replies = &answers.replies;
    [
        families::FAST_PATH_FORWARDED_ANSWERS.is(answers.entries as f64),
        families::FAST_PATH_FORWARDED_EVICTIONS_TOTAL.is(answers.evicted),
        families::FAST_PATH_FORWARDED_UNFITTING_TOTAL.is(answers.unfitting),
        families::FAST_PATH_FORWARDED_RENEWALS_TOTAL.is(answers.renewals),
        families::FAST_PATH_LOCAL_REPLIES.is(replies.entries as f64),
        families::FAST_PATH_LOCAL_EVICTIONS_TOTAL.is(replies.evicted),
        families::FAST_PATH_LOCAL_WITHDRAWN_TOTAL.is(replies.withdrawn),
        families::FAST_PATH_LOCAL_UNFITTING_TOTAL.is(replies.unfitting),
    ]
}

fn register_own_process(registry: &Registry) -> prometheus::Result<()> {
    register_process(registry)?;
    let build = families::BUILD_INFO.gauges()?;
    build
        .with_label_values(&[version::VERSION, version::COMMIT])
        .set(1);
    registry.register(Box::new(build))
}

#[cfg(test)]
mod tests {
    use prometheus::IntCounter;
    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt},
        net::TcpStream,
    };

    use super::*;
    use crate::ops::{
        conditions::RecentEvents,
        service_status::{Kind, ServiceStatus},
    };
    use dns_core::config::ConfigError;
    use dns_kit::metrics::names;

    #[test]
    fn exposition_holds_registered_metrics() {
        let metrics = Metrics::new("dns://127.0.0.1:53".into(), FastPathHandle::default()).unwrap();
        let counter = IntCounter::new("test_total", "For the test.").unwrap();
        counter.inc_by(7);
        metrics.registry().register(Box::new(counter)).unwrap();
        let text = metrics.text().unwrap();
        assert!(text.contains("\ntest_total 7\n"), "{text}");
        assert!(text.contains("process_resident_memory_bytes"), "{text}");
        assert!(!text.contains("fast_path"), "{text}");
    }

    #[test]
    fn fast_path_replies_are_included() {
        let metrics = Metrics::new("dns://127.0.0.1:53".into(), FastPathHandle::default()).unwrap();
        let internal = IntCounter::new(names::REQUESTS_INTERNAL_TOTAL, "Internal.").unwrap();
        internal.inc_by(2);
        metrics.registry().register(Box::new(internal)).unwrap();
        let mut families = metrics.gather();
        let replies = [("A", 0, 40), ("AAAA", 0, 1)];
        add_fast_replies(&mut families, metrics.server(), &replies, 5);
        let text = TextEncoder::new().encode_to_string(&families).unwrap();
        assert!(
            text.contains("\nboshdns_requests_internal_total 38\n"),
            "{text}"
        );
        assert!(
            text.contains("\nboshdns_requests_external_total 5\n"),
            "{text}"
        );
        assert!(
            text.contains(
                "coredns_dns_responses_total{plugin=\"xdp\",rcode=\"NOERROR\",server=\"dns://127.0.0.1:53\",\
                 view=\"\",zone=\".\"} 41"
            ),
            "{text}"
        );
        assert!(
            text.contains("bosh_dns_xdp_replies_total{path=\"fast\"} 41"),
            "{text}"
        );
        // Repeated gathering does not accumulate the fast path's counts in the registry.
        assert!(
            metrics
                .text()
                .unwrap()
                .contains("\nboshdns_requests_internal_total 2\n")
        );
    }

    /// Returns the state of a server that is alive but not ready because no records were read.
    fn half() -> Arc<Readiness> {
        let service_status = ServiceStatus::default();
        service_status.refused(
            Kind::Records,
            Vec::new(),
            &[ConfigError::of_file(
                "records.json",
                "none read yet\nok   everything: fine",
            )],
        );
        Arc::new(Readiness::of(service_status, RecentEvents::default()))
    }

    /// Returns the complete response to a GET request.
    async fn get(address: SocketAddr, path: &str) -> String {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let request = format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        answer
    }

    #[tokio::test]
    async fn metrics_port_serves_probes() {
        let metrics = Metrics::new("dns://127.0.0.1:53".into(), FastPathHandle::default()).unwrap();
        let address = test_support::free_address();
        let server = MetricsServer::bind(address, metrics, half()).await.unwrap();
        tokio::spawn(server.run());
        let text = get(address, "/metrics").await;
        assert!(text.starts_with("HTTP/1.1 200"), "{text}");
        assert!(text.contains("bosh_dns_xdp_build_info{"), "{text}");
        assert!(get(address, "/healthz").await.starts_with("HTTP/1.1 200"));
        let text = get(address, "/readyz").await;
        assert!(text.starts_with("HTTP/1.1 503"), "{text}");
        assert!(
            text.contains(
                "fail records: records.json: none read yet\\nok   everything: fine; the newest"
            ),
            "{text}"
        );
        assert!(!text.contains("\nok   everything"), "{text}");
        assert!(get(address, "/other").await.starts_with("HTTP/1.1 404"));
    }
}
