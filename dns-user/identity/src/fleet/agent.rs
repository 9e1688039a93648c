//! `agent`: renews the pairs of one machine by requests to the issuer.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    net::SocketAddr,
    path::PathBuf,
    sync::Arc,
    time::{Duration, SystemTime},
};

use anyhow::Context;
use base64::{Engine, engine::general_purpose::STANDARD};
use parking_lot::Mutex;
use zeroize::Zeroizing;

use super::{
    client::Issuer,
    message::{Orders, PairReply, PairRequest, Report},
};
use crate::{
    authority::{Fingerprint, certificates, date, parse_all, validity},
    certificate::{Validity, seconds, signing_request},
    folder::{IdentityFolder, Pair, read_pair},
    keys::{KeyType, PrivateKey},
    metrics::{self, Exposition},
    profile::{Guid, Owner},
    schedule::Schedule,
    window::Share,
};

/// Name of the folder with the pair that authenticates the agent.
const OWN: &str = "instance";

/// Command-line options of the subcommand `agent`.
#[derive(Debug, clap::Args)]
pub struct AgentOptions {
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
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    spread: u64,
    /// Serve Prometheus metrics at http://ADDRESS/metrics
    #[arg(long, value_name = "ADDRESS")]
    metrics: Option<SocketAddr>,
}

/// Looks up a user by name.
fn find_user(name: &str) -> Result<Owner, String> {
    match nix::unistd::User::from_name(name) {
        Ok(Some(user)) => Ok(Owner { uid: user.uid.as_raw(), gid: user.gid.as_raw() }),
        Ok(None) => Err("no such user".to_owned()),
        Err(error) => Err(error.to_string()),
    }
}

struct Agent {
    issuer: Issuer,
    instance: String,
    trust: PathBuf,
    token: Option<PathBuf>,
    owner: Option<Owner>,
    key_type: KeyType,
    spread: Duration,
    /// Pairs by role; `None` is the instance's own pair.
    pairs: BTreeMap<Option<String>, Kept>,
    /// Generation of the trust bundle that all folders have.
    generation: u64,
    /// Reason why the last contact with the issuer failed; `None` after a success.
    problem: Option<String>,
    shown: Arc<Mutex<Shown>>,
}

/// A pair that the agent renews.
struct Kept {
    folder: IdentityFolder,
    schedule: Schedule,
    issuer: Option<Fingerprint>,
}

#[derive(Default)]
struct Shown {
    expiry: BTreeMap<String, i64>,
    renewals: u64,
    failures: BTreeMap<&'static str, u64>,
    connected: bool,
}

/// Runs an agent until SIGTERM or SIGINT.
pub async fn run(options: AgentOptions) -> anyhow::Result<()> {
    let AgentOptions {
        issuer,
        issuer_name,
        instance,
        folder,
        roles,
        trust,
        token,
        owner,
        key_type,
        interval,
        spread,
        metrics,
    } = options;
    let shown = Arc::new(Mutex::new(Shown::default()));
    if let Some(address) = metrics {
        let shown = shown.clone();
        metrics::serve(address, move || shown.lock().metrics()).await?;
    }
    fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
    let mut pairs = BTreeMap::new();
    for role in std::iter::once(None).chain(roles.into_iter().map(Some)) {
        let name = role.as_deref().unwrap_or(OWN);
        // The name is used as a folder name.
        let name = Guid::try_from(name.to_owned())?;
        let share = Share::of(&format!("{instance}/{name}"));
        pairs.insert(role.clone(), Kept::take_over(IdentityFolder::new(folder.join(name.as_str())), share));
    }
    let issuer = Issuer { address: issuer, name: issuer_name };
    let (generation, problem) = (0, None);
    let spread = Duration::from_secs(spread);
    let mut agent =
        Agent { issuer, instance, trust, token, owner, key_type, spread, pairs, generation, problem, shown };
    let mut ticks = tokio::time::interval(Duration::from_secs(interval));
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let ended = dns_kit::signals::ended();
    tokio::pin!(ended);
    let mut ready = false;
    loop {
        tokio::select! {
            _ = ticks.tick() => {}
            () = &mut ended => return Ok(()),
        }
        tokio::select! {
            () = agent.round() => {}
            () = &mut ended => return Ok(()),
        }
        if !ready && agent.pairs.values().all(|kept| kept.schedule.validity().is_some()) {
            ready = true;
            let _ = sd_notify::notify(false, &[sd_notify::NotifyState::Ready]);
        }
    }
}

impl Kept {
    fn take_over(folder: IdentityFolder, share: Share) -> Self {
        let mut kept = Self { folder, schedule: Schedule::new(share, None), issuer: None };
        if let Ok(pair) = kept.read()
            && let Some((validity, issuer)) = facts(&pair)
        {
            kept.schedule.succeeded(validity);
            kept.issuer = Some(issuer);
        }
        kept
    }

    fn read(&self) -> std::io::Result<Pair> {
        read_pair(self.folder.path(), OWN)
    }
}

/// Returns the validity of a pair and the fingerprint of its CA.
fn facts(pair: &Pair) -> Option<(Validity, Fingerprint)> {
    let ders = certificates(pair.certificate.as_bytes()).ok()?;
    let parsed = parse_all(&ders).ok()?;
    Some((validity(&parsed[0]), Fingerprint::of(ders.get(1)?)))
}

/// Returns whether the pair's certificate contains the public key of `key`.
fn is_of(pair: &Pair, key: &PrivateKey) -> bool {
    let ders = certificates(pair.certificate.as_bytes());
    let parsed = ders.as_ref().ok().and_then(|ders| parse_all(ders).ok());
    parsed.is_some_and(|parsed| parsed[0].public_key().raw == key.public_key_info())
}

impl Agent {
    /// Reports to the issuer, applies the fleet's trust, and renews pairs that are due.
    async fn round(&mut self) {
        let now = SystemTime::now();
        let own_is_valid = self.pairs[&None]
            .schedule
            .validity()
            .is_some_and(|validity| now < validity.not_after && validity.not_before <= now);
        if own_is_valid {
            // The second report confirms that the orders of the first were carried out.
            for _ in 0..2 {
                match self.report().await {
                    Ok(orders) => {
                        self.connected(None);
                        let before = self.generation;
                        self.obey(&orders, now);
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
        let roles: Vec<Option<String>> = self.pairs.keys().cloned().collect();
        let mut renewed = false;
        for role in roles {
            if self.pairs[&role].schedule.due(now) <= now {
                renewed |= self.renew(&role, now).await;
            }
        }
        // Report at once, so that the rotation does not wait for the next round.
        if renewed && let Err(error) = self.report().await {
            tracing::debug!("report after a renewal failed: {error:#}");
        }
    }

    /// Logs each change of the connection's state once.
    fn connected(&mut self, problem: Option<String>) {
        if problem != self.problem {
            match &problem {
                Some(problem) => {
                    *self.shown.lock().failures.entry("issuer").or_default() += 1;
                    tracing::warn!(
                        "issuer unreachable; certificates stay in use and the report is retried: {problem}"
                    );
                }
                None => tracing::info!("issuer reachable again"),
            }
        }
        self.shown.lock().connected = problem.is_none();
        self.problem = problem;
    }

    async fn report(&self) -> anyhow::Result<Orders> {
        let issuers: BTreeSet<_> = self.pairs.values().filter_map(|kept| kept.issuer.clone()).collect();
        let ends = self.pairs.values().filter_map(|kept| kept.schedule.validity());
        let not_after = ends.map(|validity| seconds(validity.not_after)).max().unwrap_or(0);
        let report = Report { generation: self.generation, issuers, not_after };
        let pair = self.pairs[&None].read()?;
        self.issuer.call("/v1/report", &report, &self.roots()?, Some(&pair), None).await
    }

    /// Returns the trust bundle in use; before the first, the file of the options.
    fn roots(&self) -> anyhow::Result<String> {
        let own = self.pairs[&None].folder.path().join("ca.crt");
        fs::read_to_string(own)
            .or_else(|_| fs::read_to_string(&self.trust))
            .with_context(|| format!("{}: set --trust to the issuer's CA", self.trust.display()))
    }

    /// Writes a changed trust bundle, and requests renewals if another CA issues now.
    fn obey(&mut self, orders: &Orders, now: SystemTime) {
        let mut complete = true;
        for (role, kept) in &mut self.pairs {
            let owner = self.owner.filter(|_| role.is_some());
            if kept.schedule.validity().is_none() {
                continue;
            }
            let held = fs::read_to_string(kept.folder.path().join("ca.crt")).unwrap_or_default();
            if held != orders.bundle {
                let written = kept
                    .read()
                    .map_err(anyhow::Error::from)
                    .and_then(|pair| Ok(kept.folder.replace_pair(&pair, &orders.bundle, owner)?));
                if let Err(error) = written {
                    complete = false;
                    tracing::error!("trust bundle not written; retrying: {error:#}");
                }
            }
            if kept.issuer.as_ref() != Some(&orders.issuing) {
                kept.schedule.request(now, self.spread);
            }
        }
        if complete {
            self.generation = orders.generation;
        }
    }

    /// Requests a new pair; returns whether it is in use.
    async fn renew(&mut self, role: &Option<String>, now: SystemTime) -> bool {
        let renewed = self.try_renew(role, now).await;
        let name = role.as_deref().unwrap_or(OWN).to_owned();
        let Some(kept) = self.pairs.get_mut(role) else { return false };
        match renewed {
            Ok((validity, issuer)) => {
                kept.schedule.succeeded(validity);
                kept.issuer = Some(issuer);
                let mut shown = self.shown.lock();
                shown.renewals += 1;
                shown.expiry.insert(name, metrics::timestamp(validity.not_after));
                true
            }
            Err(error) => {
                if kept.schedule.failed(now, format!("{error:#}")) {
                    *self.shown.lock().failures.entry("renewal").or_default() += 1;
                    let ends = kept.schedule.validity().map(|validity| date(validity.not_after));
                    let ends = ends.unwrap_or_else(|| "-".to_owned());
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

    async fn try_renew(
        &self,
        role: &Option<String>,
        now: SystemTime,
    ) -> anyhow::Result<(Validity, Fingerprint)> {
        let own = &self.pairs[&None];
        let own_is_valid = own.schedule.validity().is_some_and(|validity| now < validity.not_after);
        let (pair, token) = match own_is_valid {
            true => (Some(own.read()?), None),
            false if role.is_some() => anyhow::bail!("the instance's certificate comes first"),
            false => (None, Some(self.read_token()?)),
        };
        let kind = self.key_type;
        let key = tokio::task::spawn_blocking(move || PrivateKey::generate(kind)).await??;
        let request = PairRequest {
            instance: self.instance.clone(),
            role: role.clone(),
            names: Vec::new(),
            addresses: None,
            request: STANDARD.encode(signing_request(&key, &self.instance)?),
        };
        let (roots, token) = (self.roots()?, token.as_ref().map(|token| token.as_str()));
        let reply: PairReply = self.issuer.call("/v1/pair", &request, &roots, pair.as_ref(), token).await?;
        let pair = Pair { certificate: reply.certificate, key: key.to_pem()? };
        let (validity, issuer) = facts(&pair).context("the issuer's reply holds no certificate")?;
        anyhow::ensure!(
            is_of(&pair, &key),
            "the issuer's certificate is for another key; the pair is not used"
        );
        let owner = self.owner.filter(|_| role.is_some());
        self.pairs[role].folder.replace_pair(&pair, &reply.orders.bundle, owner)?;
        if token.is_some()
            && let Some(path) = &self.token
        {
            // The issuer rejects it from now on.
            let _ = fs::remove_file(path);
        }
        Ok((validity, issuer))
    }

    fn read_token(&self) -> anyhow::Result<Zeroizing<String>> {
        let path = self.token.as_ref().context(
            "this instance has no valid certificate; create a token at the issuer and pass it with --token",
        )?;
        let token = fs::read_to_string(path)
            .map(Zeroizing::new)
            .with_context(|| format!("{}: create a token at the issuer", path.display()))?;
        Ok(Zeroizing::new(token.trim().to_owned()))
    }
}

impl Shown {
    fn metrics(&self) -> prometheus::Result<Exposition> {
        let shown = Exposition::default();
        let expiry = self.expiry.iter().map(|(pair, end)| (vec![pair.as_str()], *end));
        shown.gauge(&metrics::EXPIRY, expiry)?;
        shown.gauge(&metrics::ISSUER_REACHED, [(vec![], i64::from(self.connected))])?;
        shown.counter(&metrics::RENEWALS, [(vec![], self.renewals)])?;
        let failures = self.failures.iter().map(|(reason, count)| (vec![*reason], *count));
        shown.counter(&metrics::FAILURES, failures)?;
        Ok(shown)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn foreign_certificates_are_rejected() -> anyhow::Result<()> {
        let (own, other) = (PrivateKey::generate(KeyType::P256)?, PrivateKey::generate(KeyType::P256)?);
        let pair = |key: &PrivateKey| -> anyhow::Result<Pair> {
            let signed = rcgen::KeyPair::from_pem(&key.to_pem()?)?;
            let certificate = rcgen::CertificateParams::new(["i1".to_owned()])?.self_signed(&signed)?;
            Ok(Pair { certificate: certificate.pem(), key: key.to_pem()? })
        };
        assert!(is_of(&pair(&own)?, &own) && !is_of(&pair(&other)?, &own));
        let damaged = Pair { certificate: "-----BEGIN CERTIFICATE-----".to_owned(), key: own.to_pem()? };
        assert!(!is_of(&damaged, &own));
        Ok(())
    }
}
