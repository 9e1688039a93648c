//! Providers list zones and apply batches of changes, which are verified by what the service holds afterwards.

pub mod aws;
mod azure;
pub mod coredns;
mod definition;
mod parameters;
pub mod rfc2136;
pub mod webhook;

use std::{
    collections::BTreeMap,
    ops::Range,
    path::PathBuf,
    time::{Duration, Instant},
};

use bytes::Bytes;
use dns_core::terminal;
use dns_kit::{
    files::Reading,
    foreign::{cut, redacted_text},
    http_client::{HttpClient, Limits},
    tls::{self, ClientIdentity, ServerTrust},
};
use futures_util::future::BoxFuture;
use http_body_util::Full;
use hyper::{Response, StatusCode, http::request};
use parking_lot::Mutex;
use rustls::{ClientConfig, RootCertStore};

pub use self::{
    definition::Definition,
    parameters::{Parameter, ParameterKind, Parameters, Setting},
};
pub(crate) use self::{
    definition::ProviderSettings,
    parameters::{GENERAL, elements},
};
use crate::record::{Key, Name, Record, RecordType, by_key, has_set};

/// Value of `spec.provider` in a DNS Update Record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ProviderKind {
    /// Amazon Route 53, public or private zones.
    Aws,
    /// AWS Cloud Map (service discovery).
    AwsServiceDiscovery,
    /// Azure DNS, for public zones.
    Azure,
    /// Alternative name of Azure DNS.
    AzureDns,
    /// Azure Private DNS, for virtual networks.
    AzurePrivateDns,
    /// CoreDNS's etcd plugin (SkyDNS format).
    CoreDns,
    /// DNS UPDATE (RFC 2136) with TSIG.
    Rfc2136,
    /// A provider behind external-dns's webhook protocol, an extension of the document.
    Webhook,
}

impl ProviderKind {
    /// All providers, in the order of the document; the extension is the last one.
    pub const ALL: [Self; 8] = [
        Self::Aws,
        Self::AwsServiceDiscovery,
        Self::Azure,
        Self::AzureDns,
        Self::AzurePrivateDns,
        Self::CoreDns,
        Self::Rfc2136,
        Self::Webhook,
    ];

    /// Returns what the provider's folder states about it.
    pub fn definition(self) -> &'static Definition {
        match self {
            Self::Aws => &aws::DEFINITION,
            Self::AwsServiceDiscovery => &aws::SERVICE_DISCOVERY,
            Self::Azure => &azure::DEFINITION,
            Self::AzureDns => &azure::ALTERNATIVE,
            Self::AzurePrivateDns => &azure::PRIVATE,
            Self::CoreDns => &coredns::DEFINITION,
            Self::Rfc2136 => &rfc2136::DEFINITION,
            Self::Webhook => &webhook::DEFINITION,
        }
    }

    /// Returns the name in documents.
    pub fn name(self) -> &'static str {
        self.definition().name
    }

    /// Returns whether the document allows a parameter for the provider.
    pub(crate) fn has(self, parameter: &Parameter) -> bool {
        GENERAL.contains(parameter) || self.definition().parameters.contains(parameter)
    }
}

impl Parameter {
    /// Returns the parameters of all providers, some more than once.
    pub(crate) fn all() -> impl Iterator<Item = &'static Self> {
        let own = ProviderKind::ALL.map(|provider| provider.definition().parameters);
        GENERAL.iter().chain(own.into_iter().flatten())
    }

    pub(crate) fn named(name: &str) -> Option<&'static Self> {
        Self::all().find(|parameter| parameter.name == name)
    }
}

/// A DNS service that holds zones.
pub trait Provider: Send {
    /// Asks the service to adjust wanted records, before [`Provider::adjust`] applies the result.
    fn prepare<'a>(
        &'a mut self,
        _desired: &'a [Record],
    ) -> BoxFuture<'a, Result<(), ProviderError>> {
        Box::pin(async { Ok(()) })
    }

    /// Adjusts wanted records to the capabilities of the service: minimum TTL, aliases, properties.
    /// It runs before the plan, so that a second plan is empty.
    fn adjust(&self, _desired: &mut Vec<Record>) {}

    /// Returns the reason, if any, why the service would refuse a record, as far as the record tells.
    fn unfit(&self, _record: &Record) -> Option<String> {
        None
    }

    /// Returns whether the service may hold records of a name, once it was listed.
    fn serves(&self, _name: &Name) -> bool {
        true
    }

    /// Lists all zones. An error means that not even the zones are known; a zone that cannot be
    /// listed completely carries its own error.
    fn list(&mut self) -> BoxFuture<'_, Result<Vec<Zone>, ProviderError>>;

    /// Applies a batch that was planned on the last listing. `progress` is called with the number of transactions
    /// completed since the last call.
    fn apply<'a>(&'a mut self, batch: &'a Batch, progress: Progress<'a>) -> Results<'a>;
}

/// Results of a batch: one for each transaction, in their order.
pub type Results<'a> = BoxFuture<'a, Vec<TransactionResult>>;

/// Callback for the number of completed transactions.
pub type Progress<'a> = &'a (dyn Fn(usize) + Send + Sync);

/// A zone, with all its record sets at the time of listing.
#[derive(Debug, Clone)]
pub struct Zone<Content = Vec<Record>> {
    /// Identity within the provider.
    pub id: String,
    /// Apex; every name of the zone is at or below it.
    pub apex: Name,
    /// Clients that see the zone.
    pub visibility: Visibility,
    /// Sets of all types, including owner records and foreign ones, or the error if the zone could not be listed.
    pub content: Result<Content, ProviderError>,
    /// Problems of unreadable foreign data, which is left unchanged.
    pub warnings: Vec<String>,
}

impl Zone {
    /// Returns a public zone without content, whose id is its apex.
    fn of(apex: Name) -> Self {
        Self {
            id: apex.to_string(),
            apex,
            visibility: Visibility::Public,
            content: Ok(Vec::new()),
            warnings: Vec::new(),
        }
    }
}

/// Visibility of a zone. A name belongs to the longest public zone, and to every private zone that contains it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Visibility {
    /// Visible to all clients on the Internet.
    #[default]
    Public,
    /// Visible within a private network only.
    Private,
}

/// Transactions in the order in which they are applied.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Batch {
    /// Id of the zone that contains all names.
    pub zone: String,
    /// Treatment of transactions that share a message with a conflicting one.
    pub on_conflict: OnConflict,
    /// Transactions, each applied as a whole or not at all.
    pub transactions: Vec<Transaction>,
}

/// Treatment of transactions that share a message with one in conflict with another writer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum OnConflict {
    /// All of them count as conflicts, and the next listing decides.
    #[default]
    ListAgain,
    /// They are retried in smaller groups.
    Isolate,
}

/// Changes of one name and its owner records, applied atomically.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Transaction {
    /// Name in the documents.
    pub name: Name,
    /// Changes and requirements, applied atomically.
    pub steps: Vec<Step>,
}

/// One change of a record set, or a requirement.
///
/// Every change states the old set: a provider refuses the transaction if the set differs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// Creates a set, which must not exist.
    Create(Record),
    /// Replaces a set, which must be as listed.
    Replace {
        /// Record set as the provider listed it.
        before: Record,
        /// Record set that replaces `before`.
        after: Record,
    },
    /// Deletes a set, which must be as listed.
    Delete(Record),
    /// Requires a set to be as listed, without a change.
    Require(Record),
    /// Requires that no set of this name and type exists.
    RequireAbsent(Name, RecordType),
}

impl Step {
    /// Returns whether the step changes a set.
    fn is_change(&self) -> bool {
        !matches!(self, Self::Require(_) | Self::RequireAbsent(..))
    }

    /// Returns whether what the step states about the sets before holds.
    fn holds(&self, found: &Found) -> bool {
        match self {
            Self::Create(record) => !found.contains_key(&record.key()),
            Self::Replace { before: record, .. } | Self::Delete(record) | Self::Require(record) => {
                is_same(found.get(&record.key()), record)
            }
            Self::RequireAbsent(name, record_type) => !has_set(found, name, *record_type),
        }
    }

    /// Returns whether the sets are as the step leaves them.
    fn is_done(&self, found: &Found) -> bool {
        match self {
            Self::Create(record) | Self::Replace { after: record, .. } => {
                is_same(found.get(&record.key()), record)
            }
            Self::Delete(record) => !is_same(found.get(&record.key()), record),
            Self::Require(_) | Self::RequireAbsent(..) => true,
        }
    }
}

/// Returns whether a set has the wanted data. Services may keep other TTLs and properties.
fn is_same(found: Option<&Record>, wanted: &Record) -> bool {
    found.is_some_and(|found| found.targets == wanted.targets)
}

/// Result of a transaction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TransactionResult {
    /// All changes were applied, and nothing else can have happened.
    Applied,
    /// All changes were accepted, without a proof that the service made them. The error is the result if they turn
    /// out not to be there.
    Unproven(ProviderError),
    /// The zone has changed since it was listed; list and plan again.
    Conflict,
    /// The provider refused it, or its outcome is unknown (the next listing decides).
    Failed(ProviderError),
}

impl TransactionResult {
    /// Returns whether every other message would fail as well, because no name is at fault.
    fn is_of_service(&self) -> bool {
        use ProviderError::{Settings, Throttled, Unreachable};
        matches!(
            self,
            Self::Failed(Unreachable { .. } | Throttled { .. } | Settings(_))
        )
    }
}

/// Failure of a provider, for status and log.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum ProviderError {
    #[error("{0}")]
    Settings(String),
    #[error("{}: {}", redacted_text(server), shown(reason))]
    Unreachable { server: String, reason: String },
    #[error("{} refused: {}", redacted_text(server), shown(reason))]
    Refused { server: String, reason: String },
    #[error("{}: invalid response: {}", redacted_text(server), shown(reason))]
    BadAnswer { server: String, reason: String },
    #[error("{} is throttling; the next round tries again", redacted_text(server))]
    Throttled { server: String },
    #[error("{name}: {reason}")]
    Unfit { name: Name, reason: String },
}

/// Maximum number of characters that are shown of a failure's reason, in which a peer's text may be.
const MAX_REASON: usize = 1_000;

/// Returns a reason for a terminal, a log and a file: on one line, cut, with escaped control characters.
fn shown(reason: &str) -> String {
    terminal::line(&cut(reason, MAX_REASON)).into_owned()
}

/// Returns the error of a setting; `problem` names it with a remedy.
pub(crate) fn settings(problem: impl Into<String>) -> ProviderError {
    ProviderError::Settings(problem.into())
}

/// Returns the error of changes of a name that a service accepted and did not make.
fn not_made(server: &str, name: &Name, remedy: &str) -> ProviderError {
    bad_answer(
        server,
        format!(
            "{name}: accepted, but the records are not as requested, also after a second attempt; {remedy}"
        ),
    )
}

/// Returns the error of a name's records, which the service cannot have.
fn unfit(name: &Name, reason: impl Into<String>) -> ProviderError {
    ProviderError::Unfit {
        name: name.clone(),
        reason: reason.into(),
    }
}

fn bad_answer(server: &str, reason: impl ToString) -> ProviderError {
    ProviderError::BadAnswer {
        server: server.to_owned(),
        reason: reason.to_string(),
    }
}

/// Number of refused groups in a batch after which failing transactions are no longer isolated.
const MAX_REFUSALS: usize = 64;

/// Sends groups of transactions, each in one message, which succeeds or fails as a whole.
trait GroupSender: Send {
    /// A transaction in the provider's form.
    type Item: Send + Sync;

    /// Returns how many of the first transactions fit into one message; at least 1.
    fn fitting(&self, transactions: &[Self::Item]) -> usize;

    /// Number of messages that may wait for their responses at the same time.
    const WINDOW: usize = 1;

    /// Sends at most [`Self::WINDOW`] groups, at least one; returns a result for each.
    fn send(
        &mut self,
        groups: &[&[Self::Item]],
    ) -> impl Future<Output = Vec<TransactionResult>> + Send;
}

/// Time within which the responses to a window let it grow.
const QUICK: Duration = Duration::from_secs(1);

/// Sends all transactions; one that must not be sent has its result in place of its form.
///
/// A refused group is halved until its failing transactions are isolated; a group in conflict with
/// another writer is halved only with [`OnConflict::Isolate`]. If the server is unreachable, if settings are wrong, or
/// after too many refusals, the rest fails with the last error: no name is at fault.
///
/// One message is sent first, and more at once only while all are applied.
async fn send_groups<Sender: GroupSender>(
    sender: &mut Sender,
    transactions: Vec<Result<Sender::Item, TransactionResult>>,
    on_conflict: OnConflict,
    progress: Progress<'_>,
) -> Vec<TransactionResult> {
    let mut items = Vec::with_capacity(transactions.len());
    let mut others = Vec::new();
    for (place, transaction) in transactions.into_iter().enumerate() {
        match transaction {
            Ok(item) => items.push(item),
            Err(result) => others.push((place, result)),
        }
    }
    let mut results = send_all(sender, &items, on_conflict, progress).await;
    // Each has its place among the results before it, which are complete.
    for (place, result) in others {
        results.insert(place, result);
    }
    results
}

/// Takes at most `count` groups off the ranges of transactions that wait, of which the first one is the last entry.
fn take_groups<Sender: GroupSender>(
    sender: &Sender,
    transactions: &[Sender::Item],
    waiting: &mut Vec<Range<usize>>,
    count: usize,
) -> Vec<Range<usize>> {
    let mut groups = Vec::with_capacity(count);
    while groups.len() < count
        && let Some(Range { start, end }) = waiting.pop()
    {
        let fitting = sender.fitting(&transactions[start..end]);
        let middle = start + fitting.clamp(1, end - start);
        if middle < end {
            waiting.push(middle..end);
        }
        groups.push(start..middle);
    }
    groups
}

async fn send_all<Sender: GroupSender>(
    sender: &mut Sender,
    transactions: &[Sender::Item],
    on_conflict: OnConflict,
    progress: Progress<'_>,
) -> Vec<TransactionResult> {
    let mut results: Vec<Option<TransactionResult>> = vec![None; transactions.len()];
    let mut window = 1;
    let mut refusals = 0;
    let mut waiting = Vec::new();
    if !transactions.is_empty() {
        waiting.push(0..transactions.len());
    }
    let mut failure = None;
    while failure.is_none() && !waiting.is_empty() {
        let groups = take_groups(sender, transactions, &mut waiting, window);
        let contents: Vec<&[Sender::Item]> = groups
            .iter()
            .map(|group| &transactions[group.clone()])
            .collect();
        let begin = Instant::now();
        let sent = sender.send(&contents).await;
        // A slow server must not get more work at once, and after a refusal the transaction at
        // fault is looked for one message at a time.
        let is_quick =
            begin.elapsed() < QUICK && sent.iter().all(|one| *one == TransactionResult::Applied);
        window = if is_quick {
            (2 * window).min(Sender::WINDOW)
        } else {
            1
        };
        // Backwards, so that the first group's halves come first again.
        for (group, result) in groups.into_iter().zip(sent).rev() {
            let is_broken = result.is_of_service();
            refusals += usize::from(result != TransactionResult::Applied);
            let is_divided = match result {
                TransactionResult::Applied | TransactionResult::Unproven(_) => false,
                TransactionResult::Conflict => on_conflict == OnConflict::Isolate,
                TransactionResult::Failed(_) => true,
            };
            // Each isolated transaction takes several messages; a server that refuses everything
            // would get thousands.
            if is_broken || refusals > MAX_REFUSALS {
                failure = Some(result);
            } else if is_divided && group.len() > 1 {
                let middle = group.start + group.len() / 2;
                waiting.extend([middle..group.end, group.start..middle]);
            } else {
                progress(group.len());
                results[group].fill(Some(result));
            }
        }
    }
    // Without a failure every transaction has a result.
    let rest = failure.unwrap_or(TransactionResult::Conflict);
    let results = results.into_iter();
    results
        .map(|result| result.unwrap_or_else(|| rest.clone()))
        .collect()
}

/// Record sets of a zone.
type Found = BTreeMap<Key, Record>;

/// Applies a batch and verifies it by what the service holds afterwards. Every result is final: no transaction stays
/// [`TransactionResult::Unproven`].
pub(crate) async fn apply_verified(
    provider: &mut dyn Provider,
    batch: &Batch,
    progress: Progress<'_>,
) -> Vec<TransactionResult> {
    // "Accepted" is no proof: a server may answer NOERROR and leave a record out (RFC 2136, section
    // 3.4.2.2), and the webhook protocol has no result for a single record. What a provider cannot
    // prove itself is listed; what the listing lacks is repeated once, and listed once more.
    let mut results = provider.apply(batch, progress).await;
    let mut is_repeated = false;
    loop {
        let unproven = unproven(&results);
        if unproven.is_empty() {
            return results;
        }
        let found = match list_zone(provider, &batch.zone).await {
            Ok(found) => found,
            Err(error) => {
                // It is unknown whether the service made the change, so nothing may be repeated.
                for (place, _) in unproven {
                    results[place] = TransactionResult::Failed(error.clone());
                }
                return results;
            }
        };
        let mut rest = Vec::new();
        for (place, reason) in unproven {
            match remainder(&batch.transactions[place], &found) {
                Remainder::Nothing => results[place] = TransactionResult::Applied,
                // Listing and planning again is the same answer as to any other writer.
                Remainder::Changed => results[place] = TransactionResult::Conflict,
                Remainder::Steps(_) if is_repeated => {
                    results[place] = TransactionResult::Failed(reason);
                }
                Remainder::Steps(steps) => rest.push((place, steps)),
            }
        }
        is_repeated = true;
        repeat(provider, batch, rest, &mut results).await;
    }
}

/// Returns the places of unproven results, with the error that each becomes.
fn unproven(results: &[TransactionResult]) -> Vec<(usize, ProviderError)> {
    let mut found = Vec::new();
    for (place, result) in results.iter().enumerate() {
        if let TransactionResult::Unproven(reason) = result {
            found.push((place, reason.clone()));
        }
    }
    found
}

async fn list_zone(provider: &mut dyn Provider, id: &str) -> Result<Found, ProviderError> {
    let zones = provider.list().await?;
    let Some(zone) = zones.into_iter().find(|zone| zone.id == id) else {
        return Err(ProviderError::Settings(format!(
            "the zone {id} is no longer served; the changes are unknown, and the next round decides"
        )));
    };
    Ok(by_key(zone.content?))
}

/// Sends what is left of transactions again: all deletions, then the rest of each whose deletions were accepted.
async fn repeat(
    provider: &mut dyn Provider,
    batch: &Batch,
    rest: Vec<(usize, Vec<Step>)>,
    results: &mut [TransactionResult],
) {
    let mut deletions = Vec::new();
    let mut additions = Vec::new();
    for (place, steps) in rest {
        let (deleted, added): (Vec<Step>, Vec<Step>) = steps
            .into_iter()
            .partition(|step| matches!(step, Step::Delete(_)));
        if !deleted.is_empty() {
            deletions.push((place, deleted));
        }
        if added.iter().any(Step::is_change) {
            additions.push((place, added));
        }
    }
    // Knot with automatic signing counts the signatures of deleted records as other data at the
    // name, and ignores a CNAME in the same message; in the next one they are gone.
    for part in [deletions, additions] {
        let mut places = Vec::new();
        let mut transactions = Vec::new();
        for (place, steps) in part {
            // The additions of a transaction must not be sent if its deletions were refused.
            if matches!(results[place], TransactionResult::Unproven(_)) {
                let name = batch.transactions[place].name.clone();
                places.push(place);
                transactions.push(Transaction { name, steps });
            }
        }
        if transactions.is_empty() {
            continue;
        }
        let repeated = Batch {
            zone: batch.zone.clone(),
            // A conflict of one must not fail the others, which are repeated only once.
            on_conflict: OnConflict::Isolate,
            transactions,
        };
        let outcomes = provider.apply(&repeated, &|_| {}).await;
        for (place, outcome) in places.into_iter().zip(outcomes) {
            // Accepted steps stay unproven: the next listing proves the whole transaction.
            if matches!(
                outcome,
                TransactionResult::Conflict | TransactionResult::Failed(_)
            ) {
                results[place] = outcome;
            }
        }
    }
}

/// Steps that remain of a transaction that a service accepted.
#[derive(Debug, PartialEq)]
enum Remainder {
    Nothing,
    /// Another writer has changed the records.
    Changed,
    Steps(Vec<Step>),
}

fn remainder(transaction: &Transaction, found: &Found) -> Remainder {
    let mut steps = Vec::new();
    let mut is_done = true;
    for step in &transaction.steps {
        if step.is_done(found) {
            continue;
        }
        is_done = false;
        match step {
            // The set before is deleted, but the one after is missing.
            Step::Create(record) | Step::Replace { after: record, .. }
                if !found.contains_key(&record.key()) =>
            {
                steps.push(Step::Create(record.clone()));
            }
            // Nothing has happened to this set: the service has ignored the step.
            Step::Replace { .. } | Step::Delete(_) if step.holds(found) => steps.push(step.clone()),
            _ => return Remainder::Changed,
        }
    }
    if is_done {
        Remainder::Nothing
    } else {
        Remainder::Steps(steps)
    }
}

/// Maximum size of a response of Route 53 or etcd in octets.
const MAX_BODY: usize = 256 << 20;

/// Returns whether a response is about the service or the time of a request, so that no name is at fault.
fn is_temporary(status: StatusCode) -> bool {
    status.is_server_error()
        || matches!(
            status,
            StatusCode::REQUEST_TIMEOUT | StatusCode::TOO_MANY_REQUESTS
        )
}

/// Maximum number of pages of a listing: 300,000 record sets of Route 53, or 4 million keys of etcd.
const MAX_PAGES: usize = 1_000;

/// Pages of a listing, of which a faulty service could have any number.
#[derive(Default)]
struct Pages {
    count: usize,
    octets: usize,
}

impl Pages {
    /// Counts a page, behind which another one follows.
    fn add(&mut self, server: &str, page: &[u8]) -> Result<(), ProviderError> {
        self.count += 1;
        self.octets += page.len();
        let problem = if self.count == MAX_PAGES {
            format!("its listing does not end after {MAX_PAGES} pages")
        } else if self.octets > MAX_BODY {
            format!("its listing is larger than {} MiB", MAX_BODY >> 20)
        } else {
            return Ok(());
        };
        Err(bad_answer(server, problem))
    }
}

/// Puts the next server first if this one was unreachable. What one server refuses, the next one refuses as well.
fn try_next<S, T>(servers: &mut [S], result: &Result<T, ProviderError>) -> bool {
    let is_unreachable = matches!(result, Err(ProviderError::Unreachable { .. }));
    if is_unreachable {
        servers.rotate_left(1);
    }
    is_unreachable
}

/// Time limit of a read of a provider's files. Longer than a busy machine takes: without them, the round fails.
const MAX_READ: Duration = Duration::from_secs(5);

/// A read of a provider's files, which may be on a mount that hangs.
pub(crate) type Loading<T> = tokio::sync::Mutex<Reading<Result<T, ProviderError>>>;

/// Returns what `read` makes of files, which an error calls `files`.
pub(crate) async fn load<T: Send + 'static>(
    loading: &Loading<T>,
    files: &str,
    read: impl FnOnce() -> Result<T, ProviderError> + Send + 'static,
) -> Result<T, ProviderError> {
    let read = loading.lock().await.result_within(MAX_READ, read).await;
    read.unwrap_or_else(|error| Err(settings(format!("{files}: {error}"))))
}

struct Http {
    client: Mutex<HttpClient>,
    /// Files of the client, if a server needs them.
    files: Option<TlsFiles>,
    loading: Loading<HttpClient>,
    limits: Limits,
}

impl Http {
    /// Creates a client of servers at `urls`; reads the TLS files only for `https`.
    fn new<'a>(
        mut urls: impl Iterator<Item = &'a str>,
        files: &TlsFiles,
        limits: Limits,
    ) -> Result<Self, ProviderError> {
        let is_secure = urls.any(|url| url.starts_with("https:"));
        let files = is_secure.then(|| files.clone());
        Ok(Self {
            client: Mutex::new(http_client(files.as_ref())?),
            files,
            loading: Loading::default(),
            limits,
        })
    }

    /// Sends a request with a body and reads the whole response. `server` identifies the server in errors.
    async fn send(
        &self,
        server: &str,
        request: request::Builder,
        body: impl Into<Bytes>,
    ) -> Result<Response<Bytes>, ProviderError> {
        let request = request.body(Full::new(body.into())).map_err(|error| {
            let server = redacted_text(server);
            settings(format!("{server}: {error}; correct the URL"))
        })?;
        let client = self.client.lock().clone();
        let error = match client.send(request, self.limits).await {
            Ok(response) => return Ok(response),
            Err(error) => error,
        };
        // The files may have been replaced since they were read: with an expired certificate, every further
        // request would fail as well.
        if let Some(files) = self.files.clone() {
            let read = move || http_client(Some(&files));
            if let Ok(client) = load(&self.loading, "TLS files", read).await {
                *self.client.lock() = client;
            }
        }
        Err(ProviderError::Unreachable {
            server: server.to_owned(),
            reason: error.to_string(),
        })
    }
}

/// Creates a client; without files it trusts no server of `https`.
fn http_client(files: Option<&TlsFiles>) -> Result<HttpClient, ProviderError> {
    let config = match files {
        Some(files) => files.config()?,
        // The system may have no CA certificates.
        None => tls::client_config(
            ServerTrust::Roots(RootCertStore::empty()),
            ClientIdentity::Anonymous,
        )
        .map_err(|error| settings(error.to_string()))?,
    };
    // Connections are kept: a round makes many requests to one server.
    Ok(HttpClient::new(config, usize::MAX))
}

/// Files of a TLS client.
#[derive(Debug, Clone, Default)]
pub struct TlsFiles {
    /// CA certificates for the server's certificate; the system's if absent.
    pub ca: Option<PathBuf>,
    /// Client certificate and its key.
    pub identity: Option<(PathBuf, PathBuf)>,
}

impl TlsFiles {
    /// Parses `tls-ca`, `tls-client-cert` and `tls-client-cert-key`.
    pub fn from_parameters(parameters: &Parameters) -> Result<Self, ProviderError> {
        let identity = parameters.pair("tls-client-cert", "tls-client-cert-key")?;
        let identity = identity.map(|(certificate, key)| (certificate.into(), key.into()));
        Ok(Self {
            ca: parameters.path("tls-ca"),
            identity,
        })
    }

    /// Loads the files.
    pub fn config(&self) -> Result<ClientConfig, ProviderError> {
        let identity = self
            .identity
            .as_ref()
            .map(|(certificate, key)| (certificate.as_path(), key.as_path()));
        tls::client_config_of_files(self.ca.as_deref(), identity).map_err(|error| {
            // Else the error may be one of the client's own files.
            let remedy = if self.ca.is_none() && self.identity.is_none() {
                "; set tls-ca if the system has no CAs"
            } else {
                ""
            };
            settings(format!("{error}{remedy}"))
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use dns_core::config::values::parse_duration;

    use super::*;

    #[test]
    fn names_are_unique_and_defaults_fit() {
        for provider in ProviderKind::ALL {
            let own = provider.definition().parameters;
            let mut names = Vec::new();
            for parameter in GENERAL.iter().chain(own) {
                let Parameter {
                    name,
                    kind,
                    default,
                    ..
                } = *parameter;
                assert!(!names.contains(&name), "{provider:?}: {name}");
                assert_eq!(Parameter::named(name), Some(parameter), "{provider:?}");
                names.push(name);
                let Some(text) = default else { continue };
                let fits = match kind {
                    ParameterKind::Duration => parse_duration(text).is_ok(),
                    ParameterKind::Boolean => text.parse::<bool>().is_ok(),
                    ParameterKind::Integer => text.parse::<u32>().is_ok(),
                    ParameterKind::Choice(words) => words.contains(&text),
                    ParameterKind::Text
                    | ParameterKind::List
                    | ParameterKind::Secret
                    | ParameterKind::Switch
                    | ParameterKind::SwitchOrBoolean => true,
                };
                assert!(fits, "{name}: {text}");
            }
            for name in provider.definition().required {
                assert!(names.contains(name), "{provider:?}: {name}");
            }
        }
    }

    #[test]
    fn a_provider_reads_only_its_own_environment() {
        for provider in ProviderKind::ALL {
            let definition = provider.definition();
            for (_, setting) in definition.environment {
                let is_own = definition.settings.contains(setting);
                assert!(is_own, "{provider:?}: {setting}");
            }
        }
    }

    /// A server that takes three items per message and refuses messages with an item in `refused`.
    #[derive(Default)]
    struct Server {
        refused: Vec<u8>,
        /// The connection breaks at this item.
        broken: Option<u8>,
        /// Messages by the calls that sent them.
        sent: Vec<Vec<Vec<u8>>>,
    }

    impl Server {
        /// Sends 20 items; returns the results as letters.
        async fn take_all(&mut self) -> String {
            let items: Vec<u8> = (0..20).collect();
            let results = send_all(self, &items, OnConflict::ListAgain, &|_| {}).await;
            results
                .iter()
                .map(|result: &TransactionResult| match result {
                    TransactionResult::Applied | TransactionResult::Unproven(_) => 'A',
                    TransactionResult::Conflict => 'C',
                    TransactionResult::Failed(ProviderError::Unreachable { .. }) => 'U',
                    TransactionResult::Failed(_) => 'F',
                })
                .collect()
        }

        fn counts(&self) -> Vec<usize> {
            self.sent.iter().map(Vec::len).collect()
        }
    }

    impl GroupSender for Server {
        type Item = u8;

        const WINDOW: usize = 4;

        fn fitting(&self, transactions: &[u8]) -> usize {
            transactions.len().min(3)
        }

        async fn send(&mut self, groups: &[&[u8]]) -> Vec<TransactionResult> {
            self.sent
                .push(groups.iter().map(|group| group.to_vec()).collect());
            groups.iter().map(|group| self.result(group)).collect()
        }
    }

    impl Server {
        fn result(&self, group: &[u8]) -> TransactionResult {
            let server = "server".to_owned();
            let reason = "test".to_owned();
            if self
                .broken
                .is_some_and(|broken| group.iter().any(|item| *item >= broken))
            {
                TransactionResult::Failed(ProviderError::Unreachable { server, reason })
            } else if group.iter().any(|item| self.refused.contains(item)) {
                TransactionResult::Failed(ProviderError::Refused { server, reason })
            } else {
                TransactionResult::Applied
            }
        }
    }

    #[tokio::test]
    async fn window_grows_while_all_is_applied() {
        let mut server = Server::default();
        assert_eq!(server.take_all().await, "A".repeat(20));
        assert_eq!(server.counts(), [1, 2, 4]);
        assert_eq!(
            server.sent.concat().concat(),
            (0..20).collect::<Vec<u8>>(),
            "in order"
        );
    }

    #[tokio::test]
    async fn refused_items_are_isolated_one_by_one() {
        let mut server = Server {
            refused: vec![4, 16],
            ..Server::default()
        };
        assert_eq!(server.take_all().await, "AAAAFAAAAAAAAAAAFAAA");
        let next = server
            .sent
            .iter()
            .skip_while(|call| !call.concat().contains(&4))
            .nth(1)
            .unwrap();
        assert_eq!(
            *next,
            [[3]],
            "a refusal ends sending several messages at once"
        );
    }

    #[tokio::test]
    async fn broken_connection_fails_the_rest() {
        let mut server = Server {
            broken: Some(10),
            ..Server::default()
        };
        assert_eq!(server.take_all().await, "AAAAAAAAAUUUUUUUUUUU");
        assert_eq!(server.counts(), [1, 2, 4], "nothing is sent afterwards");
    }

    #[test]
    fn only_other_targets_are_missing() {
        let record = |targets: &[&str]| {
            Record::parse("a.org", RecordType::A, targets.iter().copied()).unwrap()
        };
        let wanted = record(&["192.0.2.1", "192.0.2.2"]);
        let mut other_ttl = record(&["192.0.2.2", "192.0.2.1"]);
        other_ttl.ttl = Some(7);
        for (found, expected) in [
            (None, false),
            (Some(record(&["192.0.2.1"])), false),
            (Some(record(&["192.0.2.1", "192.0.2.3"])), false),
            (Some(other_ttl), true),
            (Some(wanted.clone()), true),
        ] {
            assert_eq!(is_same(found.as_ref(), &wanted), expected, "{found:?}");
        }
    }

    #[test]
    fn failures_name_the_server() {
        let server = "http://u:secret@peer".to_owned();
        let reason = "a\nb".to_owned();
        let name = Name::parse("a.example.org").unwrap();
        let shown = |error: ProviderError| error.to_string();
        assert_eq!(shown(settings("x; y")), "x; y");
        assert_eq!(
            shown(ProviderError::Unreachable {
                server: "s".to_owned(),
                reason: reason.clone()
            }),
            "s: a\\nb"
        );
        let refused = shown(ProviderError::Refused {
            server,
            reason: "x".repeat(1_001),
        });
        let ending = format!(" refused: {}…", "x".repeat(1_000));
        assert!(
            refused.ends_with(&ending) && !refused.contains("secret"),
            "{refused}"
        );
        assert_eq!(shown(bad_answer("s", reason)), "s: invalid response: a\\nb");
        assert_eq!(
            shown(ProviderError::Throttled {
                server: "s".to_owned()
            }),
            "s is throttling; the next round tries again"
        );
        assert_eq!(shown(unfit(&name, "too long")), "a.example.org: too long");
        assert_eq!(
            shown(not_made("s", &name, "see its log")),
            "s: invalid response: a.example.org: accepted, but the records are not as requested, also after a second \
             attempt; see its log"
        );
    }

    #[test]
    fn service_and_name_failures_differ() {
        let server = || "s".to_owned();
        let reason = || "r".to_owned();
        let name = Name::parse("a").unwrap();
        for (result, expected) in [
            (TransactionResult::Applied, false),
            (TransactionResult::Conflict, false),
            (TransactionResult::Unproven(settings("x")), false),
            (TransactionResult::Failed(settings("x")), true),
            (
                TransactionResult::Failed(ProviderError::Unreachable {
                    server: server(),
                    reason: reason(),
                }),
                true,
            ),
            (
                TransactionResult::Failed(ProviderError::Throttled { server: server() }),
                true,
            ),
            (TransactionResult::Failed(unfit(&name, "x")), false),
            (TransactionResult::Failed(bad_answer("s", "x")), false),
            (
                TransactionResult::Failed(ProviderError::Refused {
                    server: server(),
                    reason: reason(),
                }),
                false,
            ),
        ] {
            assert_eq!(result.is_of_service(), expected, "{result:?}");
        }
    }

    /// Parses `name target,target`.
    fn set(line: &str) -> Record {
        let (name, targets) = line.split_once(' ').unwrap();
        Record::parse(name, RecordType::A, targets.split(',')).unwrap()
    }

    #[test]
    fn steps_are_compared_with_service_contents() {
        let found = by_key(vec![set("a 192.0.2.1"), set("b 192.0.2.2")]);
        let replaced = |before: &str, after: &str| Step::Replace {
            before: set(before),
            after: set(after),
        };
        let absent =
            |name: &str, record_type| Step::RequireAbsent(Name::parse(name).unwrap(), record_type);
        for (step, holds, is_done, is_change) in [
            (Step::Create(set("a 192.0.2.1")), false, true, true),
            (Step::Create(set("a 192.0.2.9")), false, false, true),
            (Step::Create(set("c 192.0.2.1")), true, false, true),
            (Step::Delete(set("a 192.0.2.1")), true, false, true),
            (Step::Delete(set("a 192.0.2.9")), false, true, true),
            (Step::Delete(set("c 192.0.2.1")), false, true, true),
            (replaced("a 192.0.2.1", "a 192.0.2.9"), true, false, true),
            (replaced("a 192.0.2.9", "a 192.0.2.1"), false, true, true),
            (replaced("c 192.0.2.1", "c 192.0.2.9"), false, false, true),
            (Step::Require(set("a 192.0.2.1")), true, true, false),
            (Step::Require(set("a 192.0.2.9")), false, true, false),
            (Step::Require(set("c 192.0.2.1")), false, true, false),
            (absent("a", RecordType::A), false, true, false),
            (absent("a", RecordType::AAAA), true, true, false),
            (absent("c", RecordType::A), true, true, false),
        ] {
            let seen = (step.holds(&found), step.is_done(&found), step.is_change());
            assert_eq!(seen, (holds, is_done, is_change), "{step:?}");
        }
    }

    #[test]
    fn ignored_steps_stay_unaccepted() {
        let found = by_key(vec![set("a 192.0.2.1"), set("b 192.0.2.2")]);
        let replaced = |before: &str, after: &str| Step::Replace {
            before: set(before),
            after: set(after),
        };
        for (steps, expected) in [
            (vec![], Remainder::Nothing),
            (vec![Step::Create(set("a 192.0.2.1"))], Remainder::Nothing),
            (
                vec![Step::Create(set("c 192.0.2.1"))],
                Remainder::Steps(vec![Step::Create(set("c 192.0.2.1"))]),
            ),
            // Somebody else has created it.
            (vec![Step::Create(set("a 192.0.2.9"))], Remainder::Changed),
            // The old set is gone, and the new one missing.
            (
                vec![replaced("c 192.0.2.1", "c 192.0.2.2")],
                Remainder::Steps(vec![Step::Create(set("c 192.0.2.2"))]),
            ),
            (
                vec![replaced("a 192.0.2.1", "a 192.0.2.2")],
                Remainder::Steps(vec![replaced("a 192.0.2.1", "a 192.0.2.2")]),
            ),
            (
                vec![replaced("a 192.0.2.8", "a 192.0.2.9")],
                Remainder::Changed,
            ),
            (
                vec![
                    Step::Require(set("b 192.0.2.9")),
                    Step::Delete(set("a 192.0.2.1")),
                    Step::Create(set("b 192.0.2.2")),
                ],
                Remainder::Steps(vec![Step::Delete(set("a 192.0.2.1"))]),
            ),
            (vec![Step::Delete(set("a 192.0.2.9"))], Remainder::Nothing),
        ] {
            let transaction = Transaction {
                name: Name::parse("a").unwrap(),
                steps,
            };
            assert_eq!(remainder(&transaction, &found), expected, "{transaction:?}");
        }
    }

    /// A service that ignores some changes, and answers as its list of results says.
    struct Forgetful {
        sets: Found,
        /// Names whose steps are ignored, with the number of times.
        ignored: BTreeMap<Name, usize>,
        /// Failure of the listing.
        unlisted: Option<ProviderError>,
        /// Result of repeated transactions in place of unproven.
        repeated: Option<TransactionResult>,
        /// Batches that were applied, as lines.
        applied: Vec<String>,
    }

    impl Forgetful {
        fn new(sets: Vec<Record>) -> Self {
            Self {
                sets: by_key(sets),
                ignored: BTreeMap::new(),
                unlisted: None,
                repeated: None,
                applied: Vec::new(),
            }
        }
    }

    impl Provider for Forgetful {
        fn list(&mut self) -> BoxFuture<'_, Result<Vec<Zone>, ProviderError>> {
            let content = match self.unlisted.clone() {
                Some(error) => Err(error),
                None => Ok(self.sets.values().cloned().collect()),
            };
            let zone = Zone {
                content,
                ..Zone::of(Name::root())
            };
            Box::pin(async { Ok(vec![zone]) })
        }

        fn apply<'a>(&'a mut self, batch: &'a Batch, _: Progress<'a>) -> Results<'a> {
            let mut results = Vec::new();
            let mut line = format!("{:?}", batch.on_conflict);
            for transaction in &batch.transactions {
                line.push_str(&format!(
                    " {}:{}",
                    transaction.name,
                    transaction.steps.len()
                ));
                if let (Some(result), false) = (&self.repeated, self.applied.is_empty()) {
                    results.push(result.clone());
                    continue;
                }
                results.push(TransactionResult::Unproven(settings("not made")));
                let left = self.ignored.entry(transaction.name.clone()).or_default();
                if *left > 0 {
                    *left -= 1;
                    continue;
                }
                for step in &transaction.steps {
                    match step {
                        Step::Create(record) | Step::Replace { after: record, .. } => {
                            self.sets.insert(record.key(), record.clone());
                        }
                        Step::Delete(record) => drop(self.sets.remove(&record.key())),
                        Step::Require(_) | Step::RequireAbsent(..) => {}
                    }
                }
            }
            self.applied.push(line);
            Box::pin(async { results })
        }
    }

    fn batch(transactions: &[(&str, Vec<Step>)]) -> Batch {
        let mut batch = Batch {
            zone: ".".to_owned(),
            ..Batch::default()
        };
        for (name, steps) in transactions {
            batch.transactions.push(Transaction {
                name: Name::parse(name).unwrap(),
                steps: steps.clone(),
            });
        }
        batch
    }

    #[tokio::test]
    async fn ignored_changes_are_repeated_once() {
        let made = || TransactionResult::Applied;
        let failed = || TransactionResult::Failed(settings("not made"));
        for (times, result, applied) in [
            (0, made(), &["ListAgain a:1"][..]),
            (1, made(), &["ListAgain a:1", "Isolate a:1"]),
            (2, failed(), &["ListAgain a:1", "Isolate a:1"]),
        ] {
            let mut provider = Forgetful::new(Vec::new());
            provider.ignored.insert(Name::parse("a").unwrap(), times);
            let batch = batch(&[("a", vec![Step::Create(set("a 192.0.2.1"))])]);
            let found = apply_verified(&mut provider, &batch, &|_| {}).await;
            assert_eq!(found, [result]);
            assert_eq!(provider.applied, applied);
        }
    }

    #[tokio::test]
    async fn deletions_are_repeated_before_additions() {
        let old = set("a 192.0.2.1");
        let steps = vec![
            Step::Require(set("c 192.0.2.7")),
            Step::Delete(old.clone()),
            Step::Create(set("b 192.0.2.2")),
        ];
        let other = vec![Step::Delete(set("d 192.0.2.4"))];
        let mut provider = Forgetful::new(vec![old.clone(), set("d 192.0.2.4")]);
        for name in ["a", "d"] {
            provider.ignored.insert(Name::parse(name).unwrap(), 1);
        }
        let whole = batch(&[("a", steps.clone()), ("d", other)]);
        let found = apply_verified(&mut provider, &whole, &|_| {}).await;
        assert_eq!(
            found,
            [TransactionResult::Applied, TransactionResult::Applied]
        );
        assert_eq!(
            provider.applied,
            ["ListAgain a:3 d:1", "Isolate a:1 d:1", "Isolate a:1"]
        );
        // The second refusal is final, and the additions of its group are not sent.
        for result in [
            TransactionResult::Conflict,
            TransactionResult::Failed(settings("no")),
        ] {
            let mut provider = Forgetful::new(vec![old.clone()]);
            provider.ignored.insert(Name::parse("a").unwrap(), 1);
            provider.repeated = Some(result.clone());
            let found =
                apply_verified(&mut provider, &batch(&[("a", steps.clone())]), &|_| {}).await;
            assert_eq!(found, [result]);
            assert_eq!(provider.applied, ["ListAgain a:3", "Isolate a:1"]);
        }
    }

    #[tokio::test]
    async fn unlisted_zone_is_no_success() {
        let create = batch(&[("a", vec![Step::Create(set("a 192.0.2.1"))])]);
        let mut provider = Forgetful::new(Vec::new());
        provider.unlisted = Some(settings("unlisted"));
        let found = apply_verified(&mut provider, &create, &|_| {}).await;
        assert_eq!(found, [TransactionResult::Failed(settings("unlisted"))]);
        let mut elsewhere = create.clone();
        elsewhere.zone = "z".to_owned();
        let found = apply_verified(&mut Forgetful::new(Vec::new()), &elsewhere, &|_| {}).await;
        let gone =
            "the zone z is no longer served; the changes are unknown, and the next round decides";
        assert_eq!(found, [TransactionResult::Failed(settings(gone))]);
        // Another writer was quicker.
        let mut provider = Forgetful::new(vec![set("a 192.0.2.9")]);
        provider.ignored.insert(Name::parse("a").unwrap(), 9);
        let found = apply_verified(&mut provider, &create, &|_| {}).await;
        assert_eq!(found, [TransactionResult::Conflict]);
    }

    /// A server that refuses everything, or reports conflicts.
    struct Stubborn {
        result: TransactionResult,
        sent: usize,
    }

    impl GroupSender for Stubborn {
        type Item = usize;

        fn fitting(&self, _: &[usize]) -> usize {
            0
        }

        async fn send(&mut self, groups: &[&[usize]]) -> Vec<TransactionResult> {
            assert_eq!((groups.len(), groups[0].len()), (1, 1));
            self.sent += 1;
            vec![self.result.clone(); groups.len()]
        }
    }

    #[tokio::test]
    async fn refusing_server_is_left_alone() {
        let refused = TransactionResult::Failed(ProviderError::Refused {
            server: "s".to_owned(),
            reason: "r".to_owned(),
        });
        for (result, sent) in [
            (refused, 65),
            (TransactionResult::Conflict, 65),
            (TransactionResult::Applied, 100),
            (TransactionResult::Failed(settings("x")), 1),
        ] {
            let mut server = Stubborn {
                result: result.clone(),
                sent: 0,
            };
            let done = std::sync::atomic::AtomicUsize::new(0);
            let count = |number: usize| {
                done.fetch_add(number, std::sync::atomic::Ordering::Relaxed);
            };
            let items: Vec<usize> = (0..100).collect();
            let found = send_all(&mut server, &items, OnConflict::Isolate, &count).await;
            assert_eq!((found, server.sent), (vec![result; 100], sent));
            assert_eq!(done.into_inner(), if sent == 100 { 100 } else { sent - 1 });
        }
    }

    /// A server in conflict about item 5.
    struct Contested(Vec<Vec<u8>>);

    impl GroupSender for Contested {
        type Item = u8;

        fn fitting(&self, transactions: &[u8]) -> usize {
            transactions.len().min(8)
        }

        async fn send(&mut self, groups: &[&[u8]]) -> Vec<TransactionResult> {
            self.0.push(groups[0].to_vec());
            let result = if groups[0].contains(&5) {
                TransactionResult::Conflict
            } else {
                TransactionResult::Applied
            };
            vec![result]
        }
    }

    #[tokio::test]
    async fn second_conflict_is_isolated() {
        for (on_conflict, conflicts, messages) in [
            (OnConflict::ListAgain, (0..8).collect::<Vec<usize>>(), 2),
            (OnConflict::Isolate, vec![5], 8),
        ] {
            let mut server = Contested(Vec::new());
            let mut items: Vec<Result<u8, TransactionResult>> = (0..10).map(Ok).collect();
            items.push(Err(TransactionResult::Failed(settings("unfit"))));
            items.push(Ok(11));
            let found = send_groups(&mut server, items, on_conflict, &|_| {}).await;
            for (place, result) in found.iter().enumerate() {
                let expected = match place {
                    10 => TransactionResult::Failed(settings("unfit")),
                    place if conflicts.contains(&place) => TransactionResult::Conflict,
                    _ => TransactionResult::Applied,
                };
                assert_eq!(*result, expected, "{place} {on_conflict:?}");
            }
            assert_eq!(
                (found.len(), server.0.len()),
                (12, messages),
                "{:?}",
                server.0
            );
        }
    }

    #[test]
    fn listings_have_a_limit() {
        let mut pages = Pages::default();
        let page = vec![0; MAX_BODY / 2];
        assert_eq!(pages.add("s", &page), Ok(()));
        assert_eq!(pages.add("s", &page), Ok(()));
        assert_eq!(
            pages.add("s", b"x").unwrap_err().to_string(),
            "s: invalid response: its listing is larger than 256 MiB"
        );
        let mut pages = Pages::default();
        for _ in 1..MAX_PAGES {
            assert_eq!(pages.add("s", b"x"), Ok(()));
        }
        assert_eq!(
            pages.add("s", b"x").unwrap_err().to_string(),
            "s: invalid response: its listing does not end after 1000 pages"
        );
    }

    #[test]
    fn only_unreachable_servers_have_substitutes() {
        let unreachable = || ProviderError::Unreachable {
            server: String::new(),
            reason: String::new(),
        };
        for (result, expected) in [
            (Ok(()), ["a", "b", "c"]),
            (Err(settings("no")), ["a", "b", "c"]),
            (Err(unreachable()), ["b", "c", "a"]),
        ] {
            let mut servers = ["a", "b", "c"];
            assert_eq!(try_next(&mut servers, &result), expected[0] == "b");
            assert_eq!(servers, expected);
        }
    }

    #[tokio::test]
    async fn hanging_files_are_named() {
        let (release, released) = std::sync::mpsc::channel();
        let loading = Loading::default();
        let hanging = move || {
            released.recv().unwrap();
            Ok(1)
        };
        let error = load(&loading, "the key", hanging).await.unwrap_err();
        let shown = error.to_string();
        assert!(
            shown.starts_with("the key: not finished within 5s"),
            "{shown}"
        );
        // The read that hangs is waited for, and no other one is begun.
        release.send(()).unwrap();
        let mut result = load(&loading, "the key", || Ok(2)).await;
        while result.is_err() {
            tokio::task::yield_now().await;
            result = load(&loading, "the key", || Ok(2)).await;
        }
        assert_eq!(result, Ok(1));
        assert_eq!(load(&loading, "the key", || Ok(3)).await, Ok(3));
        let refused = load(&loading, "the key", || Err(settings("no"))).await;
        assert!(refused.is_err_and(|error| error == settings("no")));
    }

    #[test]
    fn files_of_tls_come_in_pairs() {
        let with = |pairs: &[(&str, &str)]| {
            let mut parameters = Parameters::default();
            for (name, value) in pairs {
                parameters.0.insert((*name).to_owned(), (*value).to_owned());
            }
            TlsFiles::from_parameters(&parameters).map_err(|error| error.to_string())
        };
        let found = with(&[
            ("tls-ca", "/ca"),
            ("tls-client-cert", "/c"),
            ("tls-client-cert-key", "/k"),
        ])
        .unwrap();
        assert_eq!(found.ca, Some(PathBuf::from("/ca")));
        assert_eq!(
            found.identity,
            Some((PathBuf::from("/c"), PathBuf::from("/k")))
        );
        let none = with(&[]).unwrap();
        assert_eq!((none.ca, none.identity), (None, None));
        for name in ["tls-client-cert", "tls-client-cert-key"] {
            assert_eq!(
                with(&[(name, "/f")]).unwrap_err(),
                "tls-client-cert and tls-client-cert-key require each other; set both or neither"
            );
        }
        let missing = TlsFiles {
            ca: Some(PathBuf::from("/nowhere/ca")),
            identity: None,
        };
        let error = missing.config().unwrap_err().to_string();
        assert!(
            error.contains("/nowhere/ca") && !error.contains("set tls-ca"),
            "{error}"
        );
    }

    #[test]
    fn parameters_belong_to_providers() {
        let host = Parameter::named("rfc2136-host").unwrap();
        let policy = Parameter::named("policy").unwrap();
        for provider in ProviderKind::ALL {
            assert!(provider.has(policy), "{provider:?}");
            assert_eq!(
                provider.has(host),
                provider == ProviderKind::Rfc2136,
                "{provider:?}"
            );
        }
        assert_eq!(Parameter::named("x"), None);
        assert_eq!(
            ProviderKind::ALL.map(ProviderKind::name),
            [
                "aws",
                "aws-sd",
                "azure",
                "azure-dns",
                "azure-private-dns",
                "coredns",
                "rfc2136",
                "webhook"
            ]
        );
        let peers = ProviderKind::ALL.map(|provider| provider.definition().is_peer);
        assert_eq!(peers, [false, true, true, true, true, false, false, false]);
        let empty = Parameters::default();
        let azure = ProviderKind::AzurePrivateDns.definition();
        assert_eq!(
            azure.all_obstacles(&empty),
            [
                "azure-resource-group is missing; add it",
                "azure-subscription-id is missing; add it"
            ]
        );
        assert_eq!((azure.arguments)("x", "y"), None);
        assert_eq!((azure.remarks)(&empty), [] as [&str; 0]);
    }

    /// A server on loopback that answers requests with one response after the other, and notes them.
    pub(super) struct Scripted {
        pub(super) url: String,
        asked: Arc<Mutex<Vec<String>>>,
    }

    impl Scripted {
        pub(super) async fn new(responses: &[(u16, &str)]) -> Self {
            use dns_kit::http_server::{Listener, Server};
            let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
            let url = format!("http://{}", listener.local_addr().unwrap());
            let mut rest: std::collections::VecDeque<(u16, String)> = Default::default();
            for (code, body) in responses {
                rest.push_back((*code, (*body).to_owned()));
            }
            let rest = Arc::new(Mutex::new(rest));
            let asked = Arc::new(Mutex::new(Vec::new()));
            let noted = asked.clone();
            let routes =
                axum::Router::new().fallback(move |request: axum::extract::Request| async move {
                    let (parts, body) = request.into_parts();
                    let body = axum::body::to_bytes(body, usize::MAX).await.unwrap();
                    let body = String::from_utf8_lossy(&body);
                    let line = format!("{} {} {body}", parts.method, parts.uri);
                    noted.lock().push(line.trim_end().to_owned());
                    let next = rest.lock().pop_front();
                    let (code, text) = next.unwrap_or((500, "nothing is left".to_owned()));
                    (StatusCode::from_u16(code).unwrap(), text)
                });
            let server = Server::new("a test", Listener::Plain(listener));
            tokio::spawn(server.run(move |_| routes.clone(), std::future::pending()));
            Self { url, asked }
        }

        /// Returns what was asked: method, path and body.
        pub(super) fn asked(&self) -> Vec<String> {
            self.asked.lock().clone()
        }
    }
}
