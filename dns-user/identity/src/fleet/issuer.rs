//! `issuer`: issues the fleet's certificates to agents, over mutual TLS.

use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    fs::File,
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, SystemTime},
};

use anyhow::Context;
use axum::{
    Extension, Json, Router,
    extract::{self, DefaultBodyLimit, State as Extract},
    http::{HeaderMap, StatusCode, header},
    middleware::{self, Next},
    response::{IntoResponse, Response},
    routing::post,
};
use base64::{Engine, engine::general_purpose::STANDARD};
use dns_core::catalog::Snapshot;
use dns_kit::{
    files::FileStamp,
    http_server::{Client, Listener, Server, ServerLimits},
    logs::LineLimit,
    tls,
};
use nix::fcntl::Flock;
use parking_lot::Mutex;
use prometheus::proto::MetricFamily;
use rustls::ServerConfig;
use rustls_pki_types::{PrivateKeyDer, pem::PemObject};
use serde::Serialize;
use tokio::{net::TcpListener, sync::Semaphore};

use super::{
    DesiredTrust, Member, Members, PairReply, PairRequest, Refused,
    state::{IssuerFacts, MembersFile, StateFolder, TokenError},
    trust::Trust,
};
use crate::{
    authority::{self, Authority, CaFiles, Fingerprint, certificates},
    certificate::{Validity, seconds, verify_request},
    check::snapshot,
    descriptions::RemovalGuard,
    keys::{KeyType, PrivateKey},
    metrics,
    profile::Profile,
};

/// Maximum number of open connections: of 10,000 agents, some 100 report at the same time.
const MAX_CONNECTIONS: usize = 1024;

/// Maximum size of a call in bytes.
const MAX_CALL: usize = 64 << 10;

/// Validity of the issuer's own certificate, which is renewed at half of it. It starts as long before
/// it is issued, so that agents with slow clocks can connect.
const OWN_VALIDITY: Duration = Duration::from_secs(24 * 3600);

/// Maximum number of CAs that an agent's pairs are from.
const MAX_ISSUERS: usize = 8;

/// Command-line options of the subcommand `issuer`.
#[derive(Debug, clap::Args)]
pub(crate) struct IssuerOptions {
    /// State folder (CAs, keys, members, tokens); only the issuer's user may have access
    #[arg(long, value_name = "FOLDER")]
    state: PathBuf,
    /// PEM file of the first CA; needed once, `rotate-ca` installs later ones
    #[arg(long, value_name = "FILE", requires = "ca_key")]
    ca: Option<PathBuf>,
    /// PEM file of the first CA's private key
    #[arg(long, value_name = "FILE", requires = "ca")]
    ca_key: Option<PathBuf>,
    /// The fleet's records.json, which proves names and addresses
    #[arg(long, value_name = "FILE")]
    records: PathBuf,
    /// Address and port for agents
    #[arg(long, value_name = "ADDRESS", default_value = "0.0.0.0:8854")]
    listen: SocketAddr,
    /// Name in the issuer's own certificate, which agents verify
    #[arg(long, value_name = "NAME", default_value = "identity.bosh-dns")]
    name: String,
    /// Common name that every instance may request; repeatable
    #[arg(long = "role", value_name = "NAME", default_values = ["health.bosh-dns", "api.bosh-dns"])]
    roles: Vec<String>,
    /// Validity of certificates, at least 1h, such as 24h or 90m
    #[arg(long, value_name = "TIME", default_value = "24h", value_parser = crate::run::parse_validity)]
    validity: Duration,
    /// Time by which certificates start before now, for machines with slow clocks
    #[arg(long, value_name = "TIME", default_value = "5m", value_parser = crate::run::parse_time)]
    backdate: Duration,
    /// Serve Prometheus metrics at http://ADDRESS/metrics
    #[arg(long, value_name = "ADDRESS")]
    metrics: Option<SocketAddr>,
}

/// State shared by all connections.
struct IssuerService {
    state: StateFolder,
    _lock: Flock<File>,
    options: IssuerOptions,
    /// Locked before the shared state, so that older members never replace newer ones.
    file: Mutex<MembersFile>,
    shared: Mutex<IssuerState>,
    /// Permits for calls that are executed, of clients that have disconnected as well.
    calls: Arc<Semaphore>,
}

struct IssuerState {
    trust: Trust,
    authority: Arc<Authority>,
    bundle: String,
    fleet: Arc<Fleet>,
    fleet_stamp: Option<FileStamp>,
    /// New records that are not in use yet.
    pending: Option<Arc<Fleet>>,
    guard: RemovalGuard,
    members: Members,
    /// Members that differ from the file.
    unsaved: BTreeSet<String>,
    tls: Arc<ServerConfig>,
    /// Renewal time of the issuer's own certificate.
    tls_until: SystemTime,
    issued: u64,
    refused: BTreeMap<&'static str, u64>,
    /// Limits of the log lines about refusals, by reason.
    logged: BTreeMap<&'static str, LineLimit>,
    /// The last error of a file that is read, so that each is reported once.
    problem: Option<String>,
    /// The last error of the file of members.
    save_problem: Option<String>,
}

struct Fleet {
    snapshot: Snapshot,
    /// Ids of all instances: every report looks one up.
    ids: HashSet<String>,
}

impl Fleet {
    fn read(records: &Path) -> anyhow::Result<Self> {
        let snapshot = snapshot(records, &[])?;
        let ids = snapshot.instances().map(|row| row.id.to_owned()).collect();
        Ok(Self { snapshot, ids })
    }
}

/// Common name of a client's verified certificate.
#[derive(Clone, Debug)]
struct Peer(Option<String>);

/// The reply to a rejected call.
struct Refusal {
    status: StatusCode,
    reason: &'static str,
    error: String,
}

impl Refusal {
    fn new(status: StatusCode, reason: &'static str, error: impl ToString) -> Self {
        Self {
            status,
            reason,
            error: error.to_string(),
        }
    }

    fn of_token(error: TokenError) -> Self {
        Self::new(StatusCode::FORBIDDEN, "token", error)
    }

    /// Returns the refusal of a call that another issuer, or this one later, may accept.
    fn unable(error: impl ToString) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "authority", error)
    }
}

/// Serves agents until SIGTERM or SIGINT.
pub(crate) async fn run(options: IssuerOptions) -> anyhow::Result<()> {
    // A connection needs a descriptor, and the usual limit of descriptors equals our limit of connections.
    dns_kit::limits::raise_file_limit();
    let listen = options.listen;
    let metrics = options.metrics;
    let service = Arc::new(IssuerService::open(options, SystemTime::now())?);
    if let Some(address) = metrics {
        let service = service.clone();
        metrics::serve(address, move || service.metrics()).await?;
    }
    let listener = TcpListener::bind(listen)
        .await
        .with_context(|| format!("cannot listen at {listen}"))?;
    tracing::info!(address = %listener.local_addr()?, "issuer started");
    let _ = sd_notify::notify(false, &[sd_notify::NotifyState::Ready]);
    tokio::spawn(refresh(service.clone()));
    tokio::select! {
        () = accept(listener, service.clone()) => {}
        () = dns_kit::until_ended() => {}
    }
    Ok(())
}

async fn accept(listener: TcpListener, service: Arc<IssuerService>) {
    let router = Router::new()
        .route("/v1/pair", post(pair))
        .route("/v1/report", post(report))
        // The layer that is added last runs first: proof is required before a body is read.
        .layer(DefaultBodyLimit::max(MAX_CALL))
        .layer(middleware::from_fn_with_state(
            service.clone(),
            require_proof,
        ))
        .with_state(service.clone());
    // Asked for each connection, because the certificate is renewed while the issuer runs.
    let listener = Listener::Tls(
        listener,
        Box::new(move || service.shared.lock().tls.clone()),
    );
    let limits = ServerLimits {
        connections: MAX_CONNECTIONS,
        body: MAX_CALL,
        ..ServerLimits::default()
    };
    Server::new("the issuer", listener)
        .with_limits(limits)
        .run(
            move |client: &Client| router.clone().layer(Extension(Peer(client.common_name()))),
            std::future::pending(),
        )
        .await;
}

/// Reloads changed files and renews the issuer's own certificate.
async fn refresh(service: Arc<IssuerService>) {
    let mut ticks = tokio::time::interval(Duration::from_secs(1));
    loop {
        ticks.tick().await;
        let service = service.clone();
        // A panic in the task logs its own message; the next tick continues.
        let _ = tokio::task::spawn_blocking(move || service.follow(SystemTime::now())).await;
    }
}

/// Returns the certificates of all trusted CAs, PEM, without duplicates.
fn bundle(state: &StateFolder, trust: &Trust) -> anyhow::Result<String> {
    let mut ders = Vec::new();
    for fingerprint in &trust.trusted {
        ders.extend(certificates(state.chain(fingerprint)?.as_bytes())?);
    }
    Ok(authority::bundle(ders))
}

/// Creates the TLS configuration with a certificate that the issuer signs for itself. Client
/// certificates are optional, but verified if present.
fn server_config(
    authority: &Authority,
    bundle: &str,
    name: &str,
    now: SystemTime,
) -> anyhow::Result<ServerConfig> {
    // Never written to a disk: a restart generates another.
    let key = PrivateKey::generate(KeyType::P256)?;
    let profile = Profile::new(name, &[], [], [])?;
    let validity = Validity::backdated(now, OWN_VALIDITY, OWN_VALIDITY);
    let issued = authority.issue(&profile, key.public_key_info(), validity)?;
    let chain = certificates(issued.pem.as_bytes())?;
    let key = PrivateKeyDer::from_pem_slice(key.to_pem()?.as_bytes())?;
    let roots = Arc::new(super::trusted_roots(bundle)?);
    let identity = tls::certified_key(chain, key)?;
    let clients = tls::ClientCertificates::Optional;
    Ok(tls::server_config(identity, roots, clients)?)
}

impl IssuerService {
    /// Reads the state; imports the first CA.
    fn open(options: IssuerOptions, now: SystemTime) -> anyhow::Result<Self> {
        let (state, lock) = StateFolder::create(options.state.clone())?;
        let file = MembersFile::open(&state)?;
        let trust = match (
            state.trust()?,
            options.ca.clone().zip(options.ca_key.clone()),
        ) {
            (Some(trust), _) => trust,
            // Another CA would shut out all of them.
            (None, _) if !file.held.is_empty() => return Err(state.lost_trust(file.held.len())),
            (None, Some((certificate, key))) => {
                let trust = Trust::new(state.import(&CaFiles { certificate, key }, now)?);
                state.set_trust(&trust)?;
                trust
            }
            (None, None) => anyhow::bail!("no CA is installed; start once with --ca and --ca-key"),
        };
        state.set_facts(&IssuerFacts {
            records: std::path::absolute(&options.records)?,
        })?;
        // Taken before the file is read, so that no change in between is missed.
        let fleet_stamp = FileStamp::of(&options.records);
        let fleet = Arc::new(Fleet::read(&options.records)?);
        let authority = state.authority(&trust.issuing, now)?;
        let bundle = bundle(&state, &trust)?;
        let tls = Arc::new(server_config(&authority, &bundle, &options.name, now)?);
        let shared = IssuerState {
            trust,
            authority: Arc::new(authority),
            bundle,
            // Instances may have left while no issuer ran: the guard judges these records like new
            // ones.
            pending: Some(fleet.clone()),
            fleet,
            fleet_stamp,
            guard: RemovalGuard::default(),
            members: file.held.clone(),
            unsaved: BTreeSet::new(),
            tls,
            tls_until: now + OWN_VALIDITY / 2,
            issued: 0,
            refused: BTreeMap::new(),
            logged: BTreeMap::new(),
            problem: None,
            save_problem: None,
        };
        Ok(Self {
            state,
            _lock: lock,
            options,
            file: Mutex::new(file),
            shared: Mutex::new(shared),
            // Each connection has one call at a time, so only a disk that hangs uses up all.
            calls: Arc::new(Semaphore::new(MAX_CONNECTIONS)),
        })
    }

    /// Reads changed files; if a file cannot be used, the last good state stays.
    fn follow(&self, now: SystemTime) {
        let trust = self.follow_trust(now);
        // Also without a usable trust: new machines need certificates, by the last good one.
        let records = self.follow_records(now);
        let problem = trust.and(records).err();
        let problem = problem.map(|error| format!("{error:#}"));
        let before = std::mem::replace(&mut self.shared.lock().problem, problem.clone());
        if problem != before
            && let Some(problem) = problem
        {
            tracing::error!("the last good state stays in use: {problem}");
        }
        self.save();
    }

    fn follow_trust(&self, now: SystemTime) -> anyhow::Result<()> {
        let trust = self
            .state
            .trust()?
            .context("trust.json is missing; restore it from a backup")?;
        let (changed, old) = {
            let shared = self.shared.lock();
            (
                trust.differs_for_members(&shared.trust),
                // The second condition: the clock was set back, so the certificate may begin in an
                // agent's future.
                shared.tls_until <= now || now + OWN_VALIDITY < shared.tls_until,
            )
        };
        if changed || old {
            // Without the lock on the state, so that calls go on while the CA is verified.
            let authority = Arc::new(self.state.authority(&trust.issuing, now)?);
            let bundle = bundle(&self.state, &trust)?;
            let tls = Arc::new(server_config(&authority, &bundle, &self.options.name, now)?);
            let mut shared = self.shared.lock();
            if changed {
                tracing::info!(generation = trust.generation, issuing = %trust.issuing, "the fleet's trust \
                                                                                         changed");
            }
            (shared.trust, shared.authority, shared.bundle) = (trust, authority, bundle);
            (shared.tls, shared.tls_until) = (tls, now + OWN_VALIDITY / 2);
        }
        Ok(())
    }

    fn follow_records(&self, now: SystemTime) -> anyhow::Result<()> {
        let stamp = FileStamp::of(&self.options.records);
        if stamp != self.shared.lock().fleet_stamp {
            let fleet = Arc::new(Fleet::read(&self.options.records)?);
            let mut shared = self.shared.lock();
            (shared.pending, shared.fleet_stamp) = (Some(fleet), stamp);
        }
        let confirmed = self.state.take_confirmation();
        let mut shared = self.shared.lock();
        if let Some(number) = confirmed {
            shared.guard.confirm(number);
        }
        // Members whose pairs have expired by this clock stay: it may be wrong for a while. They count no more.
        if let Some(fleet) = shared.pending.take() {
            let known = shared.members.len();
            let ids = shared.members.keys();
            let missing = ids.filter(|id| !fleet.ids.contains(*id)).count();
            // Until the guard agrees, instances that may return keep their names and addresses.
            if let Err(held) = shared.guard.check(known, missing, now) {
                shared.pending = Some(fleet);
                anyhow::bail!(
                    "{}: instances with certificates: {held}",
                    self.options.records.display()
                );
            }
            let IssuerState {
                members, unsaved, ..
            } = &mut *shared;
            for (id, _) in members.extract_if(.., |id, _| !fleet.ids.contains(id)) {
                unsaved.insert(id);
            }
            shared.fleet = fleet;
        }
        Ok(())
    }

    /// Writes changed members to the file for `rotate-ca` and for the next start; returns whether the file is up
    /// to date. Calls that wait for each other are written together.
    fn save(&self) -> bool {
        // Held until the file is written, so that no later call writes its members before.
        let mut file = self.file.lock();
        let mut changes = BTreeMap::new();
        {
            let mut shared = self.shared.lock();
            for id in std::mem::take(&mut shared.unsaved) {
                let member = shared.members.get(&id).cloned();
                changes.insert(id, member);
            }
        }
        if changes.is_empty() {
            return true;
        }
        let saved = file.save(&changes);
        let mut shared = self.shared.lock();
        let Err(error) = saved else {
            shared.save_problem = None;
            return true;
        };
        // Repeated every second.
        shared.unsaved.extend(changes.into_keys());
        let before = shared.save_problem.replace(format!("{error:#}"));
        if shared.save_problem != before {
            tracing::error!(
                "members not saved; rotate-ca misses the newest reports, and a restart forgets them: {error:#}"
            );
        }
        false
    }

    fn desired_trust(&self, now: SystemTime) -> DesiredTrust {
        let shared = self.shared.lock();
        DesiredTrust {
            generation: shared.trust.generation,
            bundle: shared.bundle.clone(),
            issuing: shared.trust.issuing.clone(),
            now: Some(seconds(now)),
        }
    }

    fn metrics(&self) -> Vec<MetricFamily> {
        let shared = self.shared.lock();
        let now = seconds(SystemTime::now());
        let lagging = shared.trust.lagging(&shared.members, now).count();
        let are_usable = shared.problem.is_none() && shared.save_problem.is_none();
        let refused = shared.refused.iter();
        let refused = refused.map(|(reason, count)| ([*reason], *count));
        vec![
            metrics::MEMBERS.is(super::count_valid(&shared.members, now) as f64),
            metrics::LAGGING.is(lagging as f64),
            metrics::TRUSTED_CAS.is(shared.trust.trusted.len() as f64),
            metrics::CA_EXPIRY.is(metrics::timestamp(shared.authority.validity.not_after)),
            metrics::FILES_USABLE.is(f64::from(are_usable)),
            metrics::ISSUED.is(shared.issued),
            metrics::REFUSED.of(refused),
        ]
    }

    /// Issues a pair to a client that has proved to be the instance.
    fn pair(
        &self,
        peer: &Peer,
        token: Option<&str>,
        request: &PairRequest,
        now: SystemTime,
    ) -> Result<PairReply, Refusal> {
        check_proof(peer, token, request)?;
        let (fleet, authority) = {
            let shared = self.shared.lock();
            (shared.fleet.clone(), shared.authority.clone())
        };
        // The names come from the fields of the request; of the signing request only the key
        // counts.
        let profile = super::permitted_profile(&fleet.snapshot, &self.options.roles, request)
            .map_err(|error| Refusal::new(StatusCode::FORBIDDEN, "names", error))?;
        // Text that is not base64 is no request either.
        let der = STANDARD.decode(&request.request).unwrap_or_default();
        let Some(proved) = verify_request(&der) else {
            let error = "the signing request is damaged or not signed with its key";
            return Err(Refusal::new(StatusCode::BAD_REQUEST, "request", error));
        };
        if !authority.is_valid_at(now) {
            return Err(Refusal::unable("the CA expired; rotate to a new one"));
        }
        let wanted = Validity::backdated(now, self.options.validity, self.options.backdate);
        let issued = authority
            .issue(&profile, &proved, wanted)
            .map_err(Refusal::unable)?;
        // A caller with its own certificate does not consume the token that it also sends.
        let token = token.filter(|_| peer.0.as_ref() != Some(&request.instance));
        // Checked before the member is recorded, because only a valid token may create one.
        if let Some(token) = token {
            self.state
                .check_token(token, &request.instance, now)
                .map_err(Refusal::of_token)?;
        }
        let end = seconds(issued.validity.not_after);
        self.remember(&request.instance, &authority.fingerprint, end)
            .map_err(Refusal::unable)?;
        // The token is used last, so that a rejected request does not consume it; a certificate
        // that loses the race for it never leaves the issuer.
        if let Some(token) = token {
            self.state
                .use_token(token, &request.instance, now)
                .map_err(Refusal::of_token)?;
        }
        self.shared.lock().issued += 1;
        Ok(PairReply {
            certificate: issued.pem,
            desired: self.desired_trust(now),
        })
    }

    /// Records that a member gets a pair of a CA that ends at `end`; the error says why it must not get it.
    fn remember(&self, instance: &str, issuer: &Fingerprint, end: u64) -> Result<(), String> {
        let mut shared = self.shared.lock();
        let before = shared.members.get(instance).cloned();
        let is_new = before.is_none();
        let mut member = before.unwrap_or(Member {
            generation: 0,
            issuers: BTreeSet::new(),
            not_after: end,
        });
        member.issuers.insert(issuer.clone());
        // Another pair of the member may end later.
        member.not_after = member.not_after.max(end);
        shared.set_member(instance.to_owned(), member);
        drop(shared);
        // A rotation must know a member, and until when, before the member gets the certificate. That of a member
        // that is known already is not held back by a full disk: the fleet would lose its certificates.
        if !self.save() && is_new {
            return Err("the issuer cannot save its members; see its log".to_owned());
        }
        Ok(())
    }

    fn report(
        &self,
        peer: &Peer,
        mut report: Member,
        now: SystemTime,
    ) -> Result<DesiredTrust, Refusal> {
        let Some(instance) = peer.0.clone() else {
            let error = "present the instance's certificate";
            return Err(Refusal::new(StatusCode::UNAUTHORIZED, "identity", error));
        };
        let mut shared = self.shared.lock();
        // The certificate of an instance that has left the fleet is valid for a while, but does not
        // make it a member again.
        if !shared.fleet.ids.contains(&instance) {
            let error = super::unknown_instance(&instance);
            return Err(Refusal::new(StatusCode::FORBIDDEN, "identity", error));
        }
        // All of it is kept in memory and in the file of members.
        let issuers = &report.issuers;
        if issuers.len() > MAX_ISSUERS || !issuers.iter().all(Fingerprint::is_well_formed) {
            let error = format!(
                "a report names at most {MAX_ISSUERS} CAs by their SHA-256; update the agent"
            );
            return Err(Refusal::new(StatusCode::BAD_REQUEST, "report", error));
        }
        // No pair ends later than the last one issued; a rotation would wait for it.
        let known = shared.members.get(&instance);
        let issued = known.map_or(0, |member| member.not_after);
        let latest = issued.max(seconds(now + self.options.validity));
        report.not_after = report.not_after.min(latest);
        shared.set_member(instance, report);
        drop(shared);
        // Before the reply: what was reported must not be older after a restart.
        self.save();
        Ok(self.desired_trust(now))
    }

    fn refused(&self, refusal: Refusal) -> Response {
        let Refusal {
            status,
            reason,
            error,
        } = refusal;
        let mut shared = self.shared.lock();
        *shared.refused.entry(reason).or_default() += 1;
        let line = shared.logged.entry(reason).or_insert_with(LineLimit::new);
        // Strangers can be refused as often as they like, but must not fill the log.
        if let Some(suppressed) = line.admit_per_minute() {
            tracing::warn!(reason, suppressed, "request refused: {error}");
        }
        drop(shared);
        (status, Json(Refused { error })).into_response()
    }
}

const NO_PROOF: &str = "present the instance's certificate, or a bootstrap token";

/// Refuses a request without a proof: the instance's certificate, or for its own pair a token, which is
/// checked when it is used.
fn check_proof(peer: &Peer, token: Option<&str>, request: &PairRequest) -> Result<(), Refusal> {
    let instance = &request.instance;
    let (status, error) = match (&peer.0, token) {
        (Some(name), _) if name == instance => return Ok(()),
        // The token proves the instance, whatever certificate the connection has.
        (_, Some(_)) if request.role.is_none() => return Ok(()),
        (Some(name), None) => (
            StatusCode::FORBIDDEN,
            format!("the certificate of {name:?} does not permit requests for {instance:?}"),
        ),
        (None, None) => (StatusCode::UNAUTHORIZED, NO_PROOF.to_owned()),
        (_, Some(_)) => (
            StatusCode::FORBIDDEN,
            "a bootstrap token permits only the instance's own certificate".to_owned(),
        ),
    };
    Err(Refusal::new(status, "identity", error))
}

impl IssuerState {
    /// Records a member, and marks it as unsaved if it changed.
    fn set_member(&mut self, instance: String, member: Member) {
        let before = self.members.insert(instance.clone(), member);
        if before.as_ref() != self.members.get(&instance) {
            self.unsaved.insert(instance);
        }
    }
}

async fn pair(
    Extract(service): Extract<Arc<IssuerService>>,
    Extension(peer): Extension<Peer>,
    headers: HeaderMap,
    Json(request): Json<PairRequest>,
) -> Response {
    let token = bearer_token(&headers).map(str::to_owned);
    reply(service, move |service| {
        service.pair(&peer, token.as_deref(), &request, SystemTime::now())
    })
    .await
}

async fn report(
    Extract(service): Extract<Arc<IssuerService>>,
    Extension(peer): Extension<Peer>,
    Json(report): Json<Member>,
) -> Response {
    reply(service, move |service| {
        service.report(&peer, report, SystemTime::now())
    })
    .await
}

/// Answers a request on a blocking thread, because the members are saved before the reply.
async fn reply<T: Serialize + Send + 'static>(
    service: Arc<IssuerService>,
    answer: impl FnOnce(&IssuerService) -> Result<T, Refusal> + Send + 'static,
) -> Response {
    // A call whose client has disconnected goes on. If the disk hangs, agents would add calls without end.
    let Ok(permit) = service.calls.clone().try_acquire_owned() else {
        let error = "too many calls wait for the issuer's disk";
        return service.refused(Refusal::unable(error));
    };
    let worker = service.clone();
    let called = tokio::task::spawn_blocking(move || {
        let _permit = permit;
        answer(&worker)
    });
    match called.await {
        Ok(Ok(reply)) => Json(reply).into_response(),
        Ok(Err(refusal)) => service.refused(refusal),
        // The task panicked, which is logged.
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

fn bearer_token(headers: &HeaderMap) -> Option<&str> {
    let value = headers.get(header::AUTHORIZATION)?.to_str().ok()?;
    value.strip_prefix("Bearer ")
}

/// Refuses calls without a certificate of the fleet or a known token before their body is read.
async fn require_proof(
    Extract(service): Extract<Arc<IssuerService>>,
    Extension(peer): Extension<Peer>,
    request: extract::Request,
    next: Next,
) -> Response {
    if peer.0.is_some() {
        return next.run(request).await;
    }
    let refusal = match bearer_token(request.headers()) {
        Some(token) if service.state.knows_token(token) => return next.run(request).await,
        Some(_) => Refusal::of_token(TokenError::Unknown),
        None => Refusal::new(StatusCode::UNAUTHORIZED, "identity", NO_PROOF),
    };
    service.refused(refusal)
}

#[cfg(test)]
pub(super) mod tests;
