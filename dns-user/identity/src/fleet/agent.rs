//! `agent`: renews the pairs of one machine by requests to the issuer.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, SystemTime},
};

use anyhow::Context;
use base64::{Engine, engine::general_purpose::STANDARD};
use dns_kit::files::bounded;
use parking_lot::Mutex;
use prometheus::proto::MetricFamily;
use zeroize::Zeroizing;

use super::{
    Credentials, DesiredTrust, IssuerClient, Member, PairReply, PairRequest, Proof, trusted_roots,
};
use crate::{
    authority::{Fingerprint, parse_chain, validity},
    certificate::{Validity, ValidityState, seconds, signing_request},
    folder::{IdentityFolder, Pair, make_folders, read_pair},
    keys::{KeyType, PrivateKey},
    metrics::{self, PairState},
    profile::{Guid, Owner},
    schedule::{Schedule, Share},
};

/// Name of the folder with the pair that authenticates the agent.
const OWN: &str = "instance";

/// Command-line options of the subcommand `agent`.
#[derive(Debug, clap::Args)]
pub(crate) struct AgentOptions {
    /// Host and port of the issuer
    #[arg(long, value_name = "HOST:PORT")]
    issuer: String,
    /// Name in the issuer's certificate
    #[arg(long, value_name = "NAME", default_value = "identity.bosh-dns")]
    issuer_name: String,
    /// Id of this instance, as in records.json
    #[arg(long, value_name = "ID")]
    instance: String,
    /// Folder for certificates and keys: `instance` and one folder per role
    #[arg(long, value_name = "FOLDER")]
    folder: PathBuf,
    /// Common name to hold a certificate for; repeatable
    #[arg(long = "role", value_name = "NAME", default_values = ["health.bosh-dns", "api.bosh-dns"])]
    roles: Vec<String>,
    /// PEM file of the issuer's CA, for the first contact
    #[arg(long, value_name = "FILE")]
    trust: PathBuf,
    /// File with the bootstrap token, for the first contact; removed after use
    #[arg(long, value_name = "FILE")]
    token: Option<PathBuf>,
    /// User that owns the keys of the roles, such as bosh-dns-xdp; default: the agent's user
    #[arg(long, value_name = "USER", value_parser = find_user)]
    owner: Option<Owner>,
    /// Key type
    #[arg(long, value_enum, value_name = "TYPE", default_value = "p-256")]
    key_type: KeyType,
    /// Seconds between two reports to the issuer
    #[arg(long, value_name = "SECONDS", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=3600))]
    interval: u64,
    /// Seconds over which the fleet's agents renew after a change of the CA
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u64).range(0..=86_400))]
    spread: u64,
    /// Serve Prometheus metrics at http://ADDRESS/metrics
    #[arg(long, value_name = "ADDRESS")]
    metrics: Option<SocketAddr>,
}

fn find_user(name: &str) -> anyhow::Result<Owner> {
    let user = nix::unistd::User::from_name(name)?.context("no such user")?;
    Ok(Owner {
        uid: user.uid.as_raw(),
        gid: user.gid.as_raw(),
    })
}

struct Agent {
    issuer: IssuerClient,
    options: AgentOptions,
    /// Pairs by role; `None` is the instance's own pair.
    pairs: BTreeMap<Option<String>, ManagedPair>,
    /// Generation of the trust bundle that all folders have.
    generation: u64,
    /// Reason why the last contact with the issuer failed; `None` after a success.
    problem: Option<String>,
    status: Arc<Mutex<AgentStatus>>,
}

struct ManagedPair {
    folder: IdentityFolder,
    /// Owner of the key; `None` for the agent's user.
    owner: Option<Owner>,
    schedule: Schedule,
    share: Share,
    issuer: Option<Fingerprint>,
    /// Hash of the files that were verified last; `None` without a usable pair.
    verified: Option<Fingerprint>,
}

#[derive(Default)]
struct AgentStatus {
    pairs: Vec<PairState>,
    renewals: u64,
    failures: BTreeMap<&'static str, u64>,
    connected: bool,
    /// Lead of the issuer's clock in seconds.
    skew: i64,
}

/// Runs an agent until SIGTERM or SIGINT.
pub(crate) async fn run(options: AgentOptions) -> anyhow::Result<()> {
    let agent = Agent::open(options)?;
    agent.show();
    if let Some(address) = agent.options.metrics {
        let status = agent.status.clone();
        metrics::serve(address, move || status.lock().metrics()).await?;
    }
    let runtime = tokio::runtime::Handle::current();
    let interrupted = dns_kit::until_ended();
    // A thread of its own, because a folder may hang. The process may end at any time: files are replaced atomically.
    let rounds = tokio::task::spawn_blocking(move || runtime.block_on(agent.rounds()));
    tokio::select! {
        ended = rounds => ended?,
        () = interrupted => {}
    }
    Ok(())
}

impl ManagedPair {
    fn take_over(folder: IdentityFolder, owner: Option<Owner>, share: Share) -> Self {
        if let Err(error) = folder.complete_change() {
            tracing::warn!("links of an interrupted change are not renewed: {error}");
        }
        let schedule = Schedule::new(share, None);
        let mut managed = Self {
            folder,
            owner,
            schedule,
            share,
            issuer: None,
            verified: None,
        };
        managed.verify();
        managed
    }

    fn read(&self) -> io::Result<Pair> {
        read_pair(&self.folder.path, OWN)
    }

    /// Writes the same pair with another trust bundle.
    fn rewrite(&self, bundle: &str) -> anyhow::Result<()> {
        Ok(self
            .folder
            .replace_pair(&self.read()?, bundle, self.owner)?)
    }

    /// Records the pair that was just written.
    fn adopt(&mut self, now: SystemTime) {
        if let Ok(pair) = self.read()
            && let Some((validity, issuer)) = facts(&pair)
        {
            self.schedule.succeeded(now, validity);
            self.issuer = Some(issuer);
            self.verified = Some(hash(&pair));
        }
    }

    /// Checks the files. A pair that is lost or damaged is due at once; one that another program
    /// installed is taken over.
    fn verify(&mut self) {
        let pair = self.read();
        let hash = pair.as_ref().ok().map(hash);
        // A new schedule would forget requests and failures of a pair that is known.
        if hash.is_some() && hash == self.verified {
            return;
        }
        let matching = pair.ok().filter(Pair::is_matching);
        match matching.as_ref().and_then(facts) {
            Some((validity, issuer)) => {
                self.schedule = Schedule::new(self.share, Some(validity));
                self.issuer = Some(issuer);
                self.verified = hash;
            }
            None => {
                if self.verified.is_some() {
                    tracing::warn!(
                        "{}: certificate or key is missing or damaged; a new pair is requested",
                        self.folder.path.display()
                    );
                }
                // A report must not name the CA of a pair that is gone: a rotation would wait for
                // its renewal.
                self.schedule.lost();
                self.issuer = None;
                self.verified = None;
            }
        }
    }
}

fn hash(pair: &Pair) -> Fingerprint {
    Fingerprint::of(pair.joined().as_bytes())
}

fn facts(pair: &Pair) -> Option<(Validity, Fingerprint)> {
    let (ders, parsed) = parse_chain(pair.certificate.as_bytes()).ok()?;
    // The issuer sends the CA's certificate after the leaf.
    Some((validity(&parsed[0]), Fingerprint::of(ders.get(1)?)))
}

impl Agent {
    /// Takes over the pairs that are in the folder.
    fn open(options: AgentOptions) -> anyhow::Result<Self> {
        make_folders(&options.folder).with_context(|| options.folder.display().to_string())?;
        let mut pairs = BTreeMap::new();
        for role in std::iter::once(None).chain(options.roles.iter().cloned().map(Some)) {
            let name = role.as_deref().unwrap_or(OWN);
            // The name is used as a folder name.
            let name = Guid::try_from(name.to_owned())?;
            let share = Share::of(&format!("{}/{name}", options.instance));
            let folder = IdentityFolder::new(options.folder.join(name.as_str()));
            // The instance's own key authenticates the agent, so no service gets it.
            let owner = options.owner.filter(|_| role.is_some());
            pairs.insert(role, ManagedPair::take_over(folder, owner, share));
        }
        let issuer = IssuerClient {
            address: options.issuer.clone(),
            name: options.issuer_name.clone(),
        };
        Ok(Self {
            issuer,
            options,
            pairs,
            generation: 0,
            problem: None,
            status: Arc::new(Mutex::new(AgentStatus::default())),
        })
    }

    async fn rounds(mut self) {
        let mut ticks = tokio::time::interval(Duration::from_secs(self.options.interval));
        // A round in which the issuer is silent takes longer than the interval; missed rounds need not
        // be made up.
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut ready = false;
        loop {
            ticks.tick().await;
            self.round().await;
            let mut pairs = self.pairs.values();
            if !ready && pairs.all(|managed| managed.schedule.validity.is_some()) {
                ready = true;
                let _ = sd_notify::notify(false, &[sd_notify::NotifyState::Ready]);
            }
        }
    }

    /// Reports to the issuer, applies the fleet's trust, and renews pairs that are due.
    async fn round(&mut self) {
        let now = SystemTime::now();
        for managed in self.pairs.values_mut() {
            managed.verify();
        }
        // The issuer decides whether the pair is valid: this machine's clock may be wrong.
        if self.pairs[&None].verified.is_some() {
            // The second report confirms that the state of the first was adopted.
            for _ in 0..2 {
                match self.report().await {
                    Ok(desired) => {
                        self.connected(None);
                        let before = self.generation;
                        self.follow(&desired, now);
                        if self.generation == before {
                            break;
                        }
                    }
                    Err(error) => {
                        self.connected(Some(format!("{error:#}")));
                        break;
                    }
                }
            }
        }
        if self.problem.is_some() && self.read_token().is_ok() {
            // The fleet's CA may have changed while the machine was off: the token leads back.
            self.pairs
                .entry(None)
                .and_modify(|own| own.schedule.request(now, Duration::ZERO));
        }
        // `None` sorts first: the instance's own pair is renewed before those that it requests.
        let roles: Vec<Option<String>> = self.pairs.keys().cloned().collect();
        let mut renewed = false;
        for role in roles {
            if self.pairs[&role].schedule.due(now) <= now {
                renewed |= self.renew(&role, now).await;
            }
        }
        // Report at once, so that the rotation does not wait for the next round.
        if renewed {
            match self.report().await {
                Ok(_) => self.connected(None),
                // The next round repeats the report, and warns if that fails, too.
                Err(error) => tracing::debug!("report after a renewal failed: {error:#}"),
            }
        }
        self.show();
    }

    /// Updates the metrics of the pairs.
    fn show(&self) {
        let mut pairs = Vec::new();
        for (role, managed) in &self.pairs {
            let validity = managed.schedule.validity;
            pairs.push(PairState {
                guid: role.as_deref().unwrap_or(OWN).to_owned(),
                not_after: validity.map(|validity| seconds(validity.not_after)),
                renew_by: managed.schedule.deadline().map(seconds),
                failing: managed.schedule.failure.is_some(),
            });
        }
        self.status.lock().pairs = pairs;
    }

    /// Logs each change of the connection's state once.
    fn connected(&mut self, problem: Option<String>) {
        if problem != self.problem {
            match &problem {
                Some(problem) => {
                    *self.status.lock().failures.entry("issuer").or_default() += 1;
                    tracing::warn!(
                        "issuer unreachable; certificates stay in use and the report is retried: {problem}"
                    );
                }
                None => tracing::info!("issuer reachable again"),
            }
        }
        self.status.lock().connected = problem.is_none();
        self.problem = problem;
    }

    async fn report(&self) -> anyhow::Result<DesiredTrust> {
        let mut report = Member {
            generation: self.generation,
            issuers: BTreeSet::new(),
            not_after: 0,
        };
        for managed in self.pairs.values() {
            report.issuers.extend(managed.issuer.clone());
            if let Some(validity) = managed.schedule.validity {
                report.not_after = report.not_after.max(seconds(validity.not_after));
            }
        }
        let desired = self
            .issuer
            .call("/v1/report", &report, &self.with_pair()?)
            .await?;
        self.check(&desired)?;
        Ok(desired)
    }

    /// Measures the issuer's clock, and checks its trust bundle: with an unusable one, peers would refuse all connections.
    fn check(&self, desired: &DesiredTrust) -> anyhow::Result<()> {
        if let Some(theirs) = desired.now {
            let theirs = i64::try_from(theirs).unwrap_or(i64::MAX);
            let own = i64::try_from(seconds(SystemTime::now())).unwrap_or(i64::MAX);
            self.status.lock().skew = theirs.saturating_sub(own);
        }
        trusted_roots(&desired.bundle).context("the issuer's trust bundle is unusable")?;
        Ok(())
    }

    /// Returns this instance's pair, with the trust bundle in use; a damaged bundle is replaced by `--trust`.
    fn with_pair(&self) -> anyhow::Result<Credentials> {
        let own = &self.pairs[&None];
        let bundle = fs::read_to_string(own.folder.path.join("ca.crt"));
        let roots = match bundle {
            Ok(bundle) if trusted_roots(&bundle).is_ok() => bundle,
            _ => self.read_trust()?,
        };
        Ok(Credentials {
            proof: Proof::Pair(own.read()?),
            roots,
        })
    }

    /// Returns the token, with `--trust`: the bundle in use may be older than the last rotation.
    fn with_token(&self) -> anyhow::Result<Credentials> {
        Ok(Credentials {
            proof: Proof::Token(self.read_token()?),
            roots: self.read_trust()?,
        })
    }

    fn read_trust(&self) -> anyhow::Result<String> {
        read_text(&self.options.trust).with_context(|| {
            format!(
                "{}: set --trust to the issuer's CA",
                self.options.trust.display()
            )
        })
    }

    /// Returns the ways to prove the instance's identity, the first to try first.
    fn credentials(
        &self,
        role: &Option<String>,
        now: SystemTime,
    ) -> anyhow::Result<Vec<Credentials>> {
        let own = &self.pairs[&None];
        let Some(validity) = own.schedule.validity else {
            anyhow::ensure!(role.is_none(), "the instance's certificate comes first");
            return Ok(vec![self.with_token()?]);
        };
        if role.is_some() {
            return Ok(vec![self.with_pair()?]);
        }
        // The token comes second, because it works only once.
        let mut ways = vec![self.with_pair()?];
        ways.extend(self.with_token());
        // Expired by this machine's clock, which may be wrong: the issuer decides about the pair.
        if validity.standing(now) == ValidityState::Expired {
            ways.reverse();
        }
        Ok(ways)
    }

    /// Writes a changed trust bundle, and requests renewals if another CA issues now.
    fn follow(&mut self, desired: &DesiredTrust, now: SystemTime) {
        let mut complete = true;
        for managed in self.pairs.values_mut() {
            if managed.verified.is_none() {
                // The next pair brings the bundle with it.
                continue;
            }
            let held = fs::read_to_string(managed.folder.path.join("ca.crt")).unwrap_or_default();
            if held != desired.bundle
                && let Err(error) = managed.rewrite(&desired.bundle)
            {
                complete = false;
                tracing::error!("trust bundle not written; retrying: {error:#}");
            }
            if managed.issuer.as_ref() != Some(&desired.issuing) {
                managed
                    .schedule
                    .request(now, Duration::from_secs(self.options.spread));
            }
        }
        // The report states that every folder has the bundle: the next step of a rotation relies on
        // it.
        if complete {
            self.generation = desired.generation;
        }
    }

    /// Requests a new pair; returns whether it is in use.
    async fn renew(&mut self, role: &Option<String>, now: SystemTime) -> bool {
        let renewed = self.try_renew(role, now).await;
        let name = role.as_deref().unwrap_or(OWN).to_owned();
        let Some(managed) = self.pairs.get_mut(role) else {
            return false;
        };
        match renewed {
            Ok(()) => {
                let is_first = managed.schedule.validity.is_none();
                managed.adopt(now);
                self.status.lock().renewals += 1;
                let ends = managed.schedule.ends();
                let done = if is_first { "issued" } else { "renewed" };
                tracing::info!(pair = name, ends, "certificate {done}");
                true
            }
            Err(error) => {
                if managed.schedule.failed(now, format!("{error:#}")) {
                    *self.status.lock().failures.entry("renewal").or_default() += 1;
                    let ends = managed.schedule.ends();
                    tracing::error!(
                        pair = name,
                        ends,
                        "certificate not renewed; the current one stays in use and the renewal is retried: \
                         {error:#}"
                    );
                }
                false
            }
        }
    }

    async fn try_renew(&self, role: &Option<String>, now: SystemTime) -> anyhow::Result<()> {
        let credentials = self.credentials(role, now)?;
        let kind = self.options.key_type;
        // An RSA key takes up to hundreds of milliseconds, in which a thread of the runtime would
        // be blocked.
        let key = tokio::task::spawn_blocking(move || PrivateKey::generate(kind)).await??;
        let request = PairRequest {
            instance: self.options.instance.clone(),
            role: role.clone(),
            names: Vec::new(),
            addresses: None,
            request: STANDARD.encode(signing_request(&key, &self.options.instance)?),
        };
        let mut problems = Vec::new();
        for credentials in &credentials {
            match self
                .issuer
                .call::<PairReply>("/v1/pair", &request, credentials)
                .await
            {
                Ok(reply) => {
                    self.install(role, reply, &key)?;
                    if let (Proof::Token(_), Some(path)) = (&credentials.proof, &self.options.token)
                    {
                        // The issuer rejects it from now on.
                        let _ = fs::remove_file(path);
                    }
                    return Ok(());
                }
                Err(error) => problems.push(match credentials.proof {
                    Proof::Pair(_) => format!("with the instance's pair: {error:#}"),
                    Proof::Token(_) => format!("with the token: {error:#}"),
                }),
            }
        }
        anyhow::bail!("{}", problems.join("; "))
    }

    /// Writes the issued pair.
    fn install(
        &self,
        role: &Option<String>,
        reply: PairReply,
        key: &PrivateKey,
    ) -> anyhow::Result<()> {
        self.check(&reply.desired)?;
        let pair = Pair {
            certificate: reply.certificate,
            key: key.to_pem()?,
        };
        facts(&pair).context("the issuer's reply holds no certificate with its CA")?;
        anyhow::ensure!(
            pair.is_matching(),
            "the issuer's certificate is for another key; the pair is not used"
        );
        let ManagedPair { folder, owner, .. } = &self.pairs[role];
        Ok(folder.replace_pair(&pair, &reply.desired.bundle, *owner)?)
    }

    fn read_token(&self) -> anyhow::Result<Zeroizing<String>> {
        let path = self.options.token.as_ref().context(
            "this instance has no valid certificate; create a token at the issuer and pass it with --token",
        )?;
        let token = read_text(path)
            .with_context(|| format!("{}: create a token at the issuer", path.display()))?;
        let token = Zeroizing::new(token);
        anyhow::ensure!(
            !token.trim().is_empty(),
            "{}: empty; create a token at the issuer",
            path.display()
        );
        Ok(Zeroizing::new(token.trim().to_owned()))
    }
}

/// Reads a file that an operator named: opening a FIFO would hold the agent up.
fn read_text(path: &Path) -> io::Result<String> {
    String::from_utf8(bounded::read(path)?).map_err(io::Error::other)
}

impl AgentStatus {
    fn metrics(&self) -> Vec<MetricFamily> {
        let Self {
            pairs,
            renewals,
            failures,
            connected,
            skew,
        } = self;
        let mut families = metrics::of_pairs(pairs);
        families.extend([
            metrics::ISSUER_REACHED.is(f64::from(*connected)),
            metrics::CLOCK_SKEW.is(*skew as f64),
            metrics::RENEWALS.is(*renewals),
            metrics::FAILURES.of(failures.iter().map(|(reason, count)| ([*reason], *count))),
        ]);
        families
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::{
        authority::{Authority, certificates},
        fleet::issuer::tests::Served,
        profile::Profile,
        tests::{START, TestCa, at},
    };

    #[test]
    fn foreign_certificates_are_rejected() -> anyhow::Result<()> {
        let own = PrivateKey::generate(KeyType::P256)?;
        let other = PrivateKey::generate(KeyType::P256)?;
        let pair = |key: &PrivateKey| -> anyhow::Result<Pair> {
            let signed = rcgen::KeyPair::from_pem(&key.to_pem()?)?;
            let certificate =
                rcgen::CertificateParams::new(["i1".to_owned()])?.self_signed(&signed)?;
            Ok(Pair {
                certificate: certificate.pem(),
                key: key.to_pem()?,
            })
        };
        assert!(pair(&own)?.is_matching());
        assert!(
            !Pair {
                key: other.to_pem()?,
                ..pair(&own)?
            }
            .is_matching()
        );
        let damaged = Pair {
            certificate: "-----BEGIN CERTIFICATE-----".to_owned(),
            key: own.to_pem()?,
        };
        assert!(!damaged.is_matching());
        Ok(())
    }

    #[derive(clap::Parser)]
    struct CommandLine {
        #[command(flatten)]
        agent: AgentOptions,
    }

    /// Returns an agent of instance `i1` without roles.
    fn agent(folder: &Path, more: &str) -> Agent {
        let place = folder.display();
        let words = format!(
            "agent --issuer 127.0.0.1:1 --instance i1 --folder {place}/pairs --trust {place}/trust.crt \
             --role health.bosh-dns {more}"
        );
        let words = words.split_whitespace();
        Agent::open(CommandLine::parse_from(words).agent).unwrap()
    }

    const ROLE: &str = "health.bosh-dns";

    fn role() -> Option<String> {
        Some(ROLE.to_owned())
    }

    /// Lets the CA issue a pair of this length, and installs it with a bundle.
    fn install(agent: &mut Agent, ca: &TestCa, role: &Option<String>, length: u64, bundle: &str) {
        let authority =
            Authority::parse(ca.chain.as_bytes(), ca.key.as_bytes(), at(START)).unwrap();
        let key = PrivateKey::generate(KeyType::P256).unwrap();
        let profile = Profile::new("i1", &[], [], []).unwrap();
        let wanted = Validity::starting(at(START), Duration::from_secs(length));
        let issued = authority
            .issue(&profile, key.public_key_info(), wanted)
            .unwrap();
        let reply = PairReply {
            certificate: issued.pem,
            desired: desired(ca, 1, bundle),
        };
        agent.install(role, reply, &key).unwrap();
        agent.pairs.get_mut(role).unwrap().adopt(at(START));
    }

    fn desired(ca: &TestCa, generation: u64, bundle: &str) -> DesiredTrust {
        DesiredTrust {
            generation,
            bundle: bundle.to_owned(),
            issuing: Fingerprint::of(&certificates(ca.chain.as_bytes()).unwrap()[0]),
            now: None,
        }
    }

    #[test]
    fn installed_pair_is_verified() {
        let place = tempfile::tempdir_in("/dev/shm").unwrap();
        let mut agent = agent(place.path(), "");
        let ca = TestCa::new("ca");
        let own = None;
        assert_eq!(agent.pairs[&own].verified, None);
        install(&mut agent, &ca, &own, 7200, &ca.chain);
        let managed = agent.pairs.get_mut(&own).unwrap();
        let validity = Validity::starting(at(START), Duration::from_secs(7200));
        assert_eq!(managed.schedule.validity, Some(validity));
        let fingerprint = desired(&ca, 1, "").issuing;
        assert_eq!(managed.issuer, Some(fingerprint.clone()));
        let pair = managed.read().unwrap();
        assert_eq!(managed.verified, Some(hash(&pair)));
        // A known pair keeps its failures.
        managed.schedule.failed(at(START), "x".to_owned());
        managed.verify();
        assert!(managed.schedule.failure.is_some());
        // Another program installs a pair.
        let folder = managed.folder.clone();
        let again = ManagedPair::take_over(folder.clone(), None, Share::of("x"));
        assert_eq!(again.verified, Some(hash(&pair)));
        assert_eq!(again.issuer, Some(fingerprint));
        assert_eq!(again.schedule.validity, Some(validity));
        let other = PrivateKey::generate(KeyType::P256)
            .unwrap()
            .to_pem()
            .unwrap();
        fs::write(folder.path.join("instance.key"), other.as_bytes()).unwrap();
        managed.verify();
        assert_eq!(managed.verified, None);
        assert_eq!(managed.issuer, None);
        assert_eq!(managed.schedule.validity, None);
        // Nor is the pair of a damaged certificate, or one without its CA, taken over.
        let leaf = pair.certificate.strip_suffix(&ca.chain).unwrap();
        for certificate in ["x", leaf] {
            let pair = Pair {
                certificate: certificate.to_owned(),
                key: pair.key.clone(),
            };
            folder.replace_pair(&pair, "", None).unwrap();
            assert!(facts(&pair).is_none());
            let managed = ManagedPair::take_over(folder.clone(), None, Share::of("x"));
            assert_eq!(managed.verified, None);
        }
    }

    #[test]
    fn foreign_replies_are_not_installed() {
        let place = tempfile::tempdir_in("/dev/shm").unwrap();
        let mut agent = agent(place.path(), "");
        let ca = TestCa::new("ca");
        install(&mut agent, &ca, &None, 7200, &ca.chain);
        let pair = agent.pairs[&None].read().unwrap();
        let key = PrivateKey::generate(KeyType::P256).unwrap();
        let reply = |certificate: &str| PairReply {
            certificate: certificate.to_owned(),
            desired: desired(&ca, 1, &ca.chain),
        };
        let refused = |certificate: &str| {
            let done = agent.install(&None, reply(certificate), &key);
            done.unwrap_err().to_string()
        };
        assert_eq!(
            refused(&pair.certificate),
            "the issuer's certificate is for another key; the pair is not used"
        );
        assert_eq!(
            refused("x"),
            "the issuer's reply holds no certificate with its CA"
        );
        let mut own = reply(&pair.certificate);
        own.desired.bundle = "x".to_owned();
        let key = PrivateKey::from_pem(pair.key.as_bytes()).unwrap();
        let done = agent.install(&None, own, &key);
        assert_eq!(
            done.unwrap_err().to_string(),
            "the issuer's trust bundle is unusable"
        );
        assert_eq!(
            agent.pairs[&None].read().unwrap().certificate,
            pair.certificate
        );
    }

    #[test]
    fn proofs_are_tried_in_order() {
        let place = tempfile::tempdir_in("/dev/shm").unwrap();
        let token = place.path().join("token");
        let option = format!("--token {}", token.display());
        let mut agent = agent(place.path(), &option);
        let trust = place.path().join("trust.crt");
        let ca = TestCa::new("ca");
        let error = |agent: &Agent, role| {
            let failed = agent.credentials(&role, at(START)).err().unwrap();
            format!("{failed:#}")
        };
        let missing = "No such file or directory (os error 2)";
        assert_eq!(
            error(&agent, role()),
            "the instance's certificate comes first"
        );
        assert_eq!(
            error(&agent, None),
            format!(
                "{}: create a token at the issuer: {missing}",
                token.display()
            )
        );
        fs::write(&token, " \n").unwrap();
        assert_eq!(
            error(&agent, None),
            format!("{}: empty; create a token at the issuer", token.display())
        );
        fs::write(&token, " secret\n").unwrap();
        assert_eq!(
            error(&agent, None),
            format!(
                "{}: set --trust to the issuer's CA: {missing}",
                trust.display()
            )
        );
        fs::write(&trust, "first contact").unwrap();
        let shown = |agent: &Agent, role, now| {
            let mut shown = Vec::new();
            for Credentials { proof, roots } in agent.credentials(&role, at(now)).unwrap() {
                shown.push(match proof {
                    Proof::Pair(_) => format!("pair, {roots}"),
                    Proof::Token(token) => format!("{}, {roots}", *token),
                });
            }
            shown
        };
        let by_token = "secret, first contact".to_owned();
        assert_eq!(shown(&agent, None, START), vec![by_token.clone()]);
        install(&mut agent, &ca, &None, 7200, &ca.chain);
        let by_pair = format!("pair, {}", ca.chain);
        for (now, expected) in [
            (START, [&by_pair, &by_token]),
            (START - 100, [&by_pair, &by_token]),
            (START + 7200, [&by_pair, &by_token]),
            (START + 7201, [&by_token, &by_pair]),
        ] {
            let shown = shown(&agent, None, now);
            assert_eq!(shown.iter().collect::<Vec<_>>(), expected);
        }
        assert_eq!(shown(&agent, role(), START + 7201), vec![by_pair.clone()]);
        fs::remove_file(&token).unwrap();
        assert_eq!(shown(&agent, None, START + 7201), [by_pair]);
        // A damaged bundle is replaced by the first one.
        let no_certificate = "-----BEGIN CERTIFICATE-----\nMAA=\n-----END CERTIFICATE-----\n";
        for bundle in ["x", no_certificate] {
            fs::write(place.path().join("pairs/instance/ca.crt"), bundle).unwrap();
            assert_eq!(
                shown(&agent, None, START),
                ["pair, first contact".to_owned()]
            );
        }
        agent.options.token = None;
        assert_eq!(
            agent.read_token().unwrap_err().to_string(),
            "this instance has no valid certificate; create a token at the issuer and pass it with --token"
        );
    }

    #[test]
    fn fifo_does_not_hold_agent_up() {
        let place = tempfile::tempdir_in("/dev/shm").unwrap();
        let fifo = place.path().join("trust.crt");
        nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
        let agent = agent(place.path(), &format!("--token {}", fifo.display()));
        for (error, remedy) in [
            (
                agent.read_trust().unwrap_err(),
                "set --trust to the issuer's CA",
            ),
            (
                agent.read_token().unwrap_err(),
                "create a token at the issuer",
            ),
        ] {
            let fifo = fifo.display();
            let expected = format!("{fifo}: {remedy}: it is not a regular file");
            assert_eq!(format!("{error:#}"), expected);
        }
    }

    #[test]
    fn fleets_trust_is_followed() {
        let place = tempfile::tempdir_in("/dev/shm").unwrap();
        let mut agent = agent(place.path(), "--spread 100");
        let [old, new] = ["old", "new"].map(TestCa::new);
        install(&mut agent, &old, &None, 86_400, &old.chain);
        let bundle = |agent: &Agent, role: Option<String>| {
            fs::read_to_string(agent.pairs[&role].folder.path.join("ca.crt")).ok()
        };
        agent.follow(&desired(&old, 5, &old.chain), at(START));
        assert_eq!(agent.generation, 5);
        let due = |agent: &Agent| {
            let due = agent.pairs[&None].schedule.due(at(START));
            seconds(due) - START
        };
        // Its share of the window is 0.7206.
        assert_eq!(due(&agent), 82_800 + 1729);
        let both = old.chain.clone() + &new.chain;
        agent.follow(&desired(&old, 6, &both), at(START));
        assert_eq!(agent.generation, 6);
        assert_eq!(bundle(&agent, None), Some(both.clone()));
        // A pair that does not exist gets the bundle with its certificate.
        assert_eq!(bundle(&agent, role()), None);
        assert_eq!(due(&agent), 82_800 + 1729);
        agent.follow(&desired(&new, 7, &both), at(START));
        assert_eq!(agent.generation, 7);
        assert_eq!(due(&agent), 72);
        // Without the bundle in every folder, the generation is not reached.
        let path = agent.pairs[&None].folder.path.clone();
        fs::rename(path.join("..data"), path.join("away")).unwrap();
        agent.follow(&desired(&new, 8, &new.chain), at(START));
        assert_eq!(agent.generation, 7);
        fs::rename(path.join("away"), path.join("..data")).unwrap();
        agent.follow(&desired(&new, 8, &new.chain), at(START));
        assert_eq!(agent.generation, 8);
        assert_eq!(bundle(&agent, None), Some(new.chain));
    }

    #[test]
    fn state_is_shown_in_metrics() {
        let place = tempfile::tempdir_in("/dev/shm").unwrap();
        let mut agent = agent(place.path(), "");
        let ca = TestCa::new("ca");
        install(&mut agent, &ca, &role(), 7200, &ca.chain);
        let failed = agent.pairs.get_mut(&None).unwrap();
        failed.schedule.failed(at(START), "x".to_owned());
        for problem in [None, Some("a"), Some("a"), Some("b"), None] {
            agent.connected(problem.map(str::to_owned));
            assert_eq!(agent.status.lock().connected, problem.is_none());
            assert_eq!(agent.problem.as_deref(), problem);
        }
        agent.show();
        let status = agent.status.lock();
        assert_eq!(status.failures, BTreeMap::from([("issuer", 2)]));
        let mut shown = Vec::new();
        for pair in &status.pairs {
            let PairState {
                guid,
                not_after,
                renew_by,
                failing,
            } = pair;
            shown.push((guid.as_str(), *not_after, *renew_by, *failing));
        }
        assert_eq!(
            shown,
            [
                ("instance", None, None, true),
                (ROLE, Some(START + 7200), Some(START + 6600), false),
            ]
        );
        drop(status);
        let status = AgentStatus {
            renewals: 3,
            failures: BTreeMap::from([("renewal", 4)]),
            connected: true,
            skew: -5,
            ..AgentStatus::default()
        };
        let families = status.metrics();
        let value = |name: &str| {
            let mut families = families.iter();
            let family = families.find(|family| family.name() == name).unwrap();
            let metric = &family.get_metric()[0];
            metric.get_gauge().get_value() + metric.get_counter().get_value()
        };
        for (name, expected) in [
            ("bosh_dns_identity_issuer_reached", 1.0),
            ("bosh_dns_identity_clock_skew_seconds", -5.0),
            ("bosh_dns_identity_renewals_total", 3.0),
            ("bosh_dns_identity_failures_total", 4.0),
            ("bosh_dns_identity_failing", 0.0),
        ] {
            assert_eq!(value(name).to_bits(), f64::to_bits(expected), "{name}");
        }
    }

    #[test]
    fn issuers_lead_is_the_skew() {
        let place = tempfile::tempdir_in("/dev/shm").unwrap();
        let agent = agent(place.path(), "");
        let ca = TestCa::new("ca");
        let mut desired = desired(&ca, 1, &ca.chain);
        agent.check(&desired).unwrap();
        assert_eq!(agent.status.lock().skew, 0);
        let now = seconds(SystemTime::now());
        desired.now = Some(now + 100_000);
        agent.check(&desired).unwrap();
        assert!((90_000..=100_000).contains(&agent.status.lock().skew));
        desired.now = Some(now - 100_000);
        agent.check(&desired).unwrap();
        assert!((-110_000..=-100_000).contains(&agent.status.lock().skew));
        desired.now = Some(u64::MAX);
        agent.check(&desired).unwrap();
        assert!(agent.status.lock().skew > i64::MAX / 2);
    }

    #[tokio::test]
    async fn silent_issuer_costs_attempts_only() {
        let place = tempfile::tempdir_in("/dev/shm").unwrap();
        let token = place.path().join("token");
        fs::write(&token, "secret").unwrap();
        let option = format!("--token {}", token.display());
        let mut agent = agent(place.path(), &option);
        let ca = TestCa::new("ca");
        fs::write(place.path().join("trust.crt"), &ca.chain).unwrap();
        agent.round().await;
        let failure = |agent: &Agent, role| {
            let failure = agent.pairs[&role].schedule.failure.clone().unwrap();
            (failure.attempts, failure.message)
        };
        let refused = "issuer 127.0.0.1:1: Connection refused (os error 111)";
        assert_eq!(
            failure(&agent, None),
            (1, format!("with the token: {refused}"))
        );
        assert_eq!(
            failure(&agent, role()),
            (1, "the instance's certificate comes first".to_owned())
        );
        let status = |agent: &Agent| {
            let status = agent.status.lock();
            (status.failures.clone(), status.renewals, status.connected)
        };
        assert_eq!(status(&agent), (BTreeMap::from([("renewal", 2)]), 0, false));
        assert!(token.exists());
        // With a pair, the report fails as well, and the token may lead back.
        install(&mut agent, &ca, &None, 7200, &ca.chain);
        let now = SystemTime::now();
        agent.pairs.get_mut(&None).unwrap().schedule = Schedule::new(
            Share::of("x"),
            Some(Validity::starting(now, Duration::from_secs(7200))),
        );
        agent.round().await;
        assert_eq!(
            failure(&agent, None),
            (
                1,
                format!("with the instance's pair: {refused}; with the token: {refused}")
            )
        );
        assert_eq!(agent.problem.as_deref(), Some(refused));
        let (failures, renewals, connected) = status(&agent);
        assert_eq!((failures["issuer"], renewals, connected), (1, 0, false));
        assert!(failures["renewal"] >= 3);
    }

    #[test]
    fn only_known_users_own_keys() {
        let root = find_user("root").unwrap();
        assert_eq!(root, Owner { uid: 0, gid: 0 });
        let error = find_user("nobody-of-this-name").unwrap_err();
        assert_eq!(error.to_string(), "no such user");
    }

    #[tokio::test]
    async fn agent_follows_a_rotation() {
        let place = tempfile::tempdir_in("/dev/shm").unwrap();
        let served = Served::start(place.path()).await;
        let token = place.path().join("token");
        fs::write(&token, served.token()).unwrap();
        fs::copy(place.path().join("ca.crt"), place.path().join("trust.crt")).unwrap();
        let more = format!(
            "--token {} --spread 0 --issuer-name issuer",
            token.display()
        );
        let mut agent = agent(place.path(), &more);
        agent.options.instance = Served::id();
        agent.issuer.address = served.address.to_string();
        agent.round().await;
        let status = |agent: &Agent| {
            let status = agent.status.lock();
            (status.renewals, status.failures.clone(), status.connected)
        };
        assert_eq!(status(&agent), (2, BTreeMap::new(), true));
        assert!(!token.exists(), "it works once");
        let first = served.desired();
        let issuers = |desired: &DesiredTrust| BTreeSet::from([desired.issuing.clone()]);
        let held = |agent: &Agent, role| {
            let pair = agent.pairs[&role].read().unwrap();
            let bundle = agent.pairs[&role].folder.path.join("ca.crt");
            (
                parse_chain(pair.certificate.as_bytes()).unwrap().0[1].clone(),
                fs::read_to_string(bundle).unwrap(),
            )
        };
        assert_eq!(served.member(), (0, issuers(&first)));
        // The second round adopts the generation, and says so at once.
        agent.round().await;
        assert_eq!(served.member(), (1, issuers(&first)));
        let next = tempfile::tempdir_in("/dev/shm").unwrap();
        let ca = TestCa::new("next");
        let files = ca.write(next.path());
        served.rotate(&files);
        agent.round().await;
        let both = served.desired();
        assert_eq!(served.member(), (2, issuers(&first)));
        for role in [None, role()] {
            assert_eq!(held(&agent, role).1, both.bundle);
        }
        served.rotate(&files);
        agent.round().await;
        let issuing = served.desired();
        assert_eq!(served.member(), (3, issuers(&issuing)));
        let new = certificates(ca.chain.as_bytes()).unwrap().remove(0);
        for role in [None, role()] {
            assert_eq!(held(&agent, role), (new.clone(), both.bundle.clone()));
        }
        served.rotate(&files);
        agent.round().await;
        assert_eq!(served.member(), (4, issuers(&issuing)));
        for role in [None, role()] {
            assert_eq!(held(&agent, role), (new.clone(), ca.chain.clone()));
        }
        assert_eq!(status(&agent), (4, BTreeMap::new(), true));
        served.stop().await;
        agent.round().await;
        let failures = BTreeMap::from([("issuer", 1)]);
        assert_eq!(status(&agent), (4, failures, false));
    }
}
