//! The fleet's own certificates: an issuer that knows the fleet, an agent on every machine, and
//! rotation of the CA across all of them.
//!
//! This file decides which names an instance may have in a certificate, according to the fleet's `records.json`.
//! [`trust`] has the steps of a rotation. With I/O: [`rotate_ca`], [`state`] (files of the issuer),
//! [`issuer`], [`agent`]; their calls are JSON over mutual TLS.

pub(crate) mod agent;
pub(crate) mod issuer;
pub mod state;
mod trust;

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Display,
    net::IpAddr,
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

use anyhow::{Context, anyhow, bail};
use http_body_util::Full;
use hyper::{Request, StatusCode, body::Bytes, header};
use rustls::{ClientConfig, RootCertStore};
use rustls_pki_types::{PrivateKeyDer, ServerName, pem::PemObject};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use zeroize::Zeroizing;

use self::{
    state::StateFolder,
    trust::{Direction, Step, Trust},
};
use crate::{
    authority::{CaFiles, Fingerprint, certificates},
    certificate::seconds,
    folder::Pair,
    profile::Profile,
};
use dns_core::catalog::Snapshot;
use dns_kit::{
    foreign::printable,
    http_client::{Limits, exchange},
    tls::{self, ClientIdentity, ServerTrust},
};

/// Builds the refusal of an instance that the records do not contain.
fn unknown_instance(id: &str) -> anyhow::Error {
    anyhow!("no instance {id:?} in records.json; wait for the records, or correct the id")
}

/// Returns the profile of a pair if every requested name and address belongs to the instance.
pub(crate) fn permitted_profile(
    snapshot: &Snapshot,
    roles: &[String],
    request: &PairRequest,
) -> anyhow::Result<Profile> {
    let PairRequest {
        instance,
        role,
        names,
        addresses,
        request: _,
    } = request;
    // An instance whose id is a role's name would get the role's certificate without asking for the
    // role.
    let own = Own::of(snapshot, instance).filter(|_| !roles.contains(instance));
    let own = own.ok_or_else(|| unknown_instance(instance))?;
    for name in names {
        if !own.names.contains(&name.to_ascii_lowercase()) {
            return Err(foreign(instance, name));
        }
    }
    let addresses = match addresses {
        None => own.addresses.iter().copied().collect(),
        Some(addresses) => addresses.clone(),
    };
    for address in &addresses {
        if !own.addresses.contains(address) {
            return Err(foreign(instance, &address.to_string()));
        }
    }
    let common_name = match role {
        None => instance,
        Some(role) if roles.contains(role) => role,
        Some(role) => bail!("{role:?} is not a role; start the issuer with --role {role}"),
    };
    // A role's certificate also names its instance, to distinguish instances in a peer's log.
    let more = std::iter::once(instance).chain(names).map(String::as_str);
    Profile::new(common_name, &[], more, addresses)
}

fn foreign(instance: &str, name: &str) -> anyhow::Error {
    anyhow!(
        "{name:?} does not belong to instance {instance:?} in records.json; request its own names"
    )
}

/// Names and addresses of one instance, on all of its networks.
struct Own {
    names: BTreeSet<String>,
    addresses: BTreeSet<IpAddr>,
}

impl Own {
    fn of(snapshot: &Snapshot, id: &str) -> Option<Self> {
        let mut own = Self {
            names: BTreeSet::new(),
            addresses: BTreeSet::new(),
        };
        for row in snapshot.instances().filter(|row| row.id == id) {
            // Names are compared without regard to case (RFC 4343).
            own.names.insert(id.to_ascii_lowercase());
            let domain = row.domain.trim_end_matches('.');
            let parts = [
                row.id,
                row.instance_group,
                row.network,
                row.deployment,
                domain,
            ];
            // The fleet's DNS has this name only for complete records.
            if parts.iter().all(|part| !part.is_empty()) {
                own.names.insert(parts.join(".").to_ascii_lowercase());
            }
            if !row.agent_id.is_empty() {
                own.names.insert(format!(
                    "{}.bosh-agent-id",
                    row.agent_id.to_ascii_lowercase()
                ));
            }
            own.addresses.extend(row.ip);
        }
        (!own.names.is_empty()).then_some(own)
    }
}

//----------- Protocol -------------------------------------------------------

/// Body of `POST /v1/pair`: requests a certificate.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct PairRequest {
    /// Id of the instance; must be the client's own.
    pub(crate) instance: String,
    /// Common name shared by the fleet, such as `health.bosh-dns`; `None` for the instance's own pair.
    pub(crate) role: Option<String>,
    /// Additional names; each must belong to the instance.
    pub(crate) names: Vec<String>,
    /// Addresses; each must belong to the instance. `None` requests all of them.
    pub(crate) addresses: Option<Vec<IpAddr>>,
    /// Signing request (RFC 2986), DER in base64: proves possession of the key.
    pub(crate) request: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PairReply {
    /// Leaf and CA, PEM.
    pub(crate) certificate: String,
    /// CAs to trust, and the issuing one.
    #[serde(rename = "orders")]
    pub(crate) desired: DesiredTrust,
}

/// Reply to the report of a [`Member`]: the state that the fleet converges to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct DesiredTrust {
    /// Generation of the trust set; incremented by every change.
    pub(crate) generation: u64,
    /// CAs to trust, PEM.
    pub(crate) bundle: String,
    /// Issuing CA; pairs of any other must be renewed.
    pub(crate) issuing: Fingerprint,
    /// Time of the issuer, in seconds since 1970; `None` from an older issuer.
    #[serde(default)]
    pub(crate) now: Option<u64>,
}

/// Body of an error reply.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Refused {
    pub(crate) error: String,
}

/// An instance that holds certificates; its agent's body of `POST /v1/report`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Member {
    /// Generation of the trust bundle that all its folders have; 0 before the first.
    pub generation: u64,
    /// CAs that issued its pairs.
    pub issuers: BTreeSet<Fingerprint>,
    /// Latest end of validity of its pairs, in seconds since 1970.
    pub not_after: u64,
}

/// All instances that hold certificates, by id, and those whose certificates have expired.
pub type Members = BTreeMap<String, Member>;

/// Returns the number of members with a pair that is valid at `now`.
fn count_valid(members: &Members, now: u64) -> usize {
    members
        .values()
        .filter(|member| member.not_after >= now)
        .count()
}

//----------- Issuer ----------------------------------------------------------

/// Maximum duration of a call.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Maximum size of a reply in bytes.
const MAX_REPLY: usize = 1 << 20;

/// Address of the issuer, and the name in its certificate.
#[derive(Clone, Debug)]
struct IssuerClient {
    address: String,
    name: String,
}

/// Proof of a caller's identity, and the CAs that verify the issuer.
struct Credentials {
    proof: Proof,
    roots: String,
}

enum Proof {
    /// The instance's own pair.
    Pair(Pair),
    Token(Zeroizing<String>),
}

impl IssuerClient {
    async fn call<T: DeserializeOwned>(
        &self,
        path: &str,
        body: &impl Serialize,
        credentials: &Credentials,
    ) -> anyhow::Result<T> {
        let call = self.try_call(path, body, credentials);
        // One limit for connecting, handshake and call: an issuer may accept connections and do
        // nothing.
        let reply = tokio::time::timeout(TIMEOUT, call).await;
        reply
            .context("no reply within 30 s")
            .flatten()
            .with_context(|| format!("issuer {}", self.address))
    }

    async fn try_call<T: DeserializeOwned>(
        &self,
        path: &str,
        body: &impl Serialize,
        credentials: &Credentials,
    ) -> anyhow::Result<T> {
        let config = client_config(credentials)?;
        let stream = TcpStream::connect(&self.address).await?;
        // The certificate has the name of `--issuer-name`; address and host name of the issuer may
        // change.
        let name = ServerName::try_from(self.name.clone())?;
        let connected = TlsConnector::from(Arc::new(config))
            .connect(name, stream)
            .await;
        let stream = connected.map_err(explain)?;
        let mut request = Request::post(path)
            .header(header::HOST, &self.name)
            .header(header::CONTENT_TYPE, "application/json");
        if let Proof::Token(token) = &credentials.proof {
            request = request.header(header::AUTHORIZATION, format!("Bearer {}", token.as_str()));
        }
        let request = request.body(Full::new(Bytes::from(serde_json::to_vec(body)?)))?;
        let response = exchange(
            stream,
            request,
            Limits {
                time: TIMEOUT,
                body: MAX_REPLY,
            },
        )
        .await?;
        let status = response.status();
        let body = response.into_body();
        if status == StatusCode::OK {
            return Ok(serde_json::from_slice(&body)?);
        }
        let reason = match serde_json::from_slice::<Refused>(&body) {
            // The text goes to a log and may come from whoever answers at this address.
            Ok(refused) => printable(&refused.error),
            Err(_) => "no reason given".to_owned(),
        };
        bail!("{status}: {reason}")
    }
}

/// Adds the remedy to a certificate that this machine's clock rejects.
fn explain(error: std::io::Error) -> anyhow::Error {
    let text = error.to_string();
    if text.contains("not valid yet") || text.contains("expired") {
        anyhow::Error::from(error).context("check the clocks of this machine and of the issuer")
    } else {
        error.into()
    }
}

fn client_config(credentials: &Credentials) -> anyhow::Result<ClientConfig> {
    let Credentials { proof, roots } = credentials;
    let identity = match proof {
        Proof::Token(_) => ClientIdentity::Anonymous,
        Proof::Pair(pair) => {
            let chain = certificates(pair.certificate.as_bytes())?;
            let key = PrivateKeyDer::from_pem_slice(pair.key.as_bytes())?;
            ClientIdentity::Pair(chain, key)
        }
    };
    let trust = ServerTrust::Roots(trusted_roots(roots)?);
    Ok(tls::client_config(trust, identity)?)
}

/// Parses a trust bundle, PEM, as connections use it.
fn trusted_roots(bundle: &str) -> anyhow::Result<RootCertStore> {
    let mut roots = RootCertStore::empty();
    for root in certificates(bundle.as_bytes())? {
        roots.add(root)?;
    }
    Ok(roots)
}

//----------- Rotation -------------------------------------------------------

#[derive(Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("direction").required(true).args(["ca", "back", "resume"]))]
pub(crate) struct RotateOptions {
    /// State folder of the issuer, which keeps running
    #[arg(long, value_name = "FOLDER")]
    state: PathBuf,
    /// PEM file of the new CA
    #[arg(long, value_name = "FILE", requires = "ca_key")]
    ca: Option<PathBuf>,
    /// PEM file of the new CA's private key
    #[arg(long, value_name = "FILE", requires = "ca")]
    ca_key: Option<PathBuf>,
    /// Return to the previous CA; also continues an interrupted return
    #[arg(long)]
    back: bool,
    /// Continue an interrupted rotation or return
    #[arg(long)]
    resume: bool,
    /// Seconds to wait after each step, so that services reload their files and late agents report
    #[arg(long, value_name = "SECONDS", default_value_t = 10)]
    settle: u64,
    /// Maximum seconds for a step; after that, stop in a consistent state
    #[arg(long, value_name = "SECONDS")]
    patience: Option<u64>,
}

/// Rotates until only the target is trusted; SIGINT and SIGTERM stop it in a consistent state.
pub(crate) async fn rotate_ca(options: RotateOptions) -> anyhow::Result<()> {
    let RotateOptions {
        state,
        ca,
        ca_key,
        back,
        resume: _,
        settle,
        patience,
    } = options;
    let state = StateFolder::open(state)?;
    let _lock = state
        .lock_rotation()?
        .context("another rotate-ca is running; wait for it or stop it")?;
    let trust = state
        .trust()?
        .context("no CA is installed; start the issuer with --ca first")?;
    let now = SystemTime::now();
    let direction = match (ca.zip(ca_key), back) {
        (Some((certificate, key)), _) => {
            Direction::To(state.import(&CaFiles { certificate, key }, now)?)
        }
        (None, true) => Direction::Back,
        (None, false) => Direction::Resume,
    };
    let rotation = trust.rotation_to(direction)?;
    let target = rotation.target.clone();
    // Verified before anything is recorded: the CA may have expired since its import.
    state.authority(&target, now)?;
    // Recorded before the first step, so that after a kill `--resume` knows the direction.
    if trust.rotation.as_ref() != Some(&rotation) {
        state.set_trust(&Trust {
            rotation: Some(rotation),
            ..trust
        })?;
    }
    let steps = Steps {
        state,
        target,
        settle: Duration::from_secs(settle),
        patience,
    };
    tokio::select! {
        // Dropping it at an await is safe: `set_trust` replaces the file atomically between two of
        // them.
        done = steps.run() => done,
        () = dns_kit::until_ended() => bail!(
            "interrupted between two steps, which is safe; continue with --resume, or return with --back"
        ),
    }
}

struct Steps {
    state: StateFolder,
    target: Fingerprint,
    settle: Duration,
    patience: Option<u64>,
}

impl Steps {
    async fn run(&self) -> anyhow::Result<()> {
        let mut changed = false;
        loop {
            let trust = self
                .state
                .trust()?
                .context("trust.json is missing; restore it from a backup")?;
            self.converge(&trust).await?;
            if changed {
                // Services have their own pace of reloading files, and agents that were off may
                // report.
                tokio::time::sleep(self.settle).await;
                self.converge(&trust).await?;
            }
            // The target is verified again, because days may have passed since its import.
            self.state.authority(&self.target, SystemTime::now())?;
            let Some((step, next)) = trust.next(&self.target) else {
                let trust = trust.completed();
                // First: a rotation that is recorded as complete cannot be resumed, and after a kill the keys would stay.
                self.state.forget_keys(&trust)?;
                self.state.set_trust(&trust)?;
                say(format_args!("done: only CA {} is trusted", self.target));
                return Ok(());
            };
            self.state.set_trust(&next)?;
            say(describe(step));
            changed = true;
        }
    }

    /// Waits until every member has adopted the state.
    async fn converge(&self, trust: &Trust) -> anyhow::Result<()> {
        let begun = Instant::now();
        let mut shown = None;
        loop {
            let members = self.state.members()?;
            let now = seconds(SystemTime::now());
            let lagging: Vec<&str> = trust.lagging(&members, now).collect();
            if lagging.is_empty() {
                break;
            }
            if shown != Some(lagging.len()) {
                let count = lagging.len();
                let all = count_valid(&members, now);
                let first = lagging[..count.min(3)].join(", ");
                say(format_args!(
                    "  waiting for {count} of {all} instances, such as {first}"
                ));
                shown = Some(count);
            }
            if self
                .patience
                .is_some_and(|patience| begun.elapsed() > Duration::from_secs(patience))
            {
                bail!(
                    "instances that have not followed: {}, such as {}; check their agents' logs, then use --resume \
                     or --back",
                    lagging.len(),
                    lagging[0]
                );
            }
            // The issuer is another process, which learns of members and writes their file.
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
        if shown.is_some() {
            say("  the fleet has followed");
        }
        Ok(())
    }
}

/// Prints progress. A terminal or a pipe that is gone must not end a rotation in the middle.
fn say(line: impl Display) {
    let _ = dns_command_line::print(format!("{line}\n").as_bytes());
}

fn describe(step: Step) -> &'static str {
    match step {
        Step::Trust => "step 1 of 3: the fleet trusts both CAs",
        Step::Issue => "step 2 of 3: the new CA issues",
        Step::Retire => "step 3 of 3: only one CA remains trusted",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::TestCa;
    use dns_core::catalog::{AliasFiles, Records};

    fn fleet() -> Snapshot {
        let text = r#"{"record_keys":["id","instance_group","network","deployment","ip","domain","agent_id"],
            "record_infos":[["i1","web","default","app","10.0.0.1","bosh","a1"],
                            ["i1","web","other","app","10.1.0.1","bosh","a1"],
                            ["i2","web","default","app","10.0.0.2","bosh","a2"],
                            ["health.bosh-dns","web","default","app","10.0.0.3","bosh","a3"]]}"#;
        let (records, _) = Records::parse(text.as_bytes()).unwrap();
        Snapshot::build(records, &AliasFiles::default()).0
    }

    fn ask(instance: &str, role: Option<&str>, names: &[&str]) -> PairRequest {
        PairRequest {
            instance: instance.to_owned(),
            role: role.map(str::to_owned),
            names: names.iter().map(|name| (*name).to_owned()).collect(),
            addresses: None,
            request: String::new(),
        }
    }

    #[test]
    fn own_names_are_granted() {
        let roles = ["health.bosh-dns".to_owned()];
        let names = ["i1.web.other.app.bosh", "a1.bosh-agent-id"];
        let granted = permitted_profile(&fleet(), &roles, &ask("i1", None, &names)).unwrap();
        assert_eq!(granted.common_name, "i1");
        assert_eq!(
            granted.dns_names,
            ["i1", "i1.web.other.app.bosh", "a1.bosh-agent-id"]
        );
        assert_eq!(granted.addresses.len(), 2);
        let granted =
            permitted_profile(&fleet(), &roles, &ask("i2", Some("health.bosh-dns"), &[])).unwrap();
        assert_eq!(granted.common_name, "health.bosh-dns");
        assert_eq!(granted.dns_names, ["health.bosh-dns", "i2"]);
    }

    #[test]
    fn foreign_names_are_refused() {
        let roles = ["health.bosh-dns".to_owned()];
        let refused = |request: &PairRequest, why: &str| {
            let error = permitted_profile(&fleet(), &roles, request)
                .unwrap_err()
                .to_string();
            assert!(error.contains(why), "{request:?}: {error}");
        };
        for name in [
            "i2",
            "i2.web.default.app.bosh",
            "*.web.default.app.bosh",
            "q-s0.web.default.app.bosh",
            "health.bosh-dns",
            "a2.bosh-agent-id",
            "example.org",
            "",
        ] {
            refused(&ask("i1", None, &[name]), "does not belong to instance");
        }
        let mut request = ask("i1", None, &[]);
        request.addresses = Some(vec!["10.0.0.2".parse().unwrap()]);
        refused(&request, "does not belong to instance");
        refused(&ask("i1", Some("api.bosh-dns"), &[]), "is not a role");
        refused(&ask("i9", None, &[]), "no instance");
        // An instance named like a role could pose as any instance.
        refused(&ask("health.bosh-dns", None, &[]), "no instance");
    }

    #[tokio::test]
    async fn rotation_ends_with_its_keys() {
        let place = tempfile::tempdir_in("/dev/shm").unwrap();
        let (state, _lock) = StateFolder::create(place.path().join("state")).unwrap();
        let [old, new] = ["old", "new"].map(|name| {
            let files = TestCa::new(name).write(place.path());
            state.import(&files, SystemTime::now()).unwrap()
        });
        let begun = Trust::new(old);
        let rotation = begun.rotation_to(Direction::To(new.clone())).unwrap();
        let begun = Trust {
            rotation: Some(rotation.clone()),
            ..begun
        };
        state.set_trust(&begun).unwrap();
        // A key that cannot be removed.
        let key = place.path().join("state/authorities/other/ca.key");
        std::fs::create_dir_all(&key).unwrap();
        let steps = Steps {
            state,
            target: new.clone(),
            settle: Duration::ZERO,
            patience: None,
        };
        assert!(steps.run().await.is_err());
        let trust = steps.state.trust().unwrap().unwrap();
        assert_eq!(trust.rotation, Some(rotation), "it can be resumed");
        std::fs::remove_dir(&key).unwrap();
        steps.run().await.unwrap();
        let trust = steps.state.trust().unwrap().unwrap();
        assert_eq!((trust.rotation, trust.trusted), (None, vec![new]));
    }

    #[test]
    fn steps_are_numbered() {
        let steps = [Step::Trust, Step::Issue, Step::Retire].map(describe);
        for (number, step) in (1..).zip(steps) {
            assert!(step.starts_with(&format!("step {number} of 3: ")), "{step}");
        }
    }

    #[test]
    fn only_complete_rows_have_names() {
        let text = r#"{"record_keys":["id","instance_group","network","deployment","ip","domain","agent_id"],
            "record_infos":[["I1","Web","default","app","10.0.0.1","bosh.","A1"],
                            ["i2","","default","app","10.0.0.2","bosh",""]]}"#;
        let (records, _) = Records::parse(text.as_bytes()).unwrap();
        let fleet = Snapshot::build(records, &AliasFiles::default()).0;
        let own = |id: &str| {
            let own = Own::of(&fleet, id)?;
            let addresses = own.addresses.iter().map(IpAddr::to_string);
            Some((
                own.names.into_iter().collect::<Vec<_>>().join(" "),
                addresses.collect::<Vec<_>>().join(" "),
            ))
        };
        let found = |names: &str, addresses: &str| Some((names.to_owned(), addresses.to_owned()));
        assert_eq!(
            own("I1"),
            found("a1.bosh-agent-id i1 i1.web.default.app.bosh", "10.0.0.1")
        );
        assert_eq!(own("i2"), found("i2", "10.0.0.2"));
        assert_eq!(own("i1"), None);
        // Names of any case belong to the instance, and only its own addresses.
        let mut request = ask("I1", None, &["I1.WEB.default.app.bosh"]);
        request.addresses = Some(Vec::new());
        let granted = permitted_profile(&fleet, &[], &request).unwrap();
        assert_eq!(granted.addresses, [] as [IpAddr; 0]);
        assert_eq!(granted.dns_names, ["I1", "I1.WEB.default.app.bosh"]);
        request.addresses = Some(vec!["10.0.0.1".parse().unwrap()]);
        let granted = permitted_profile(&fleet, &[], &request).unwrap();
        assert_eq!(granted.addresses.len(), 1);
    }

    #[test]
    fn refusals_name_a_remedy() {
        let error = |request: &PairRequest| {
            permitted_profile(&fleet(), &[], request)
                .unwrap_err()
                .to_string()
        };
        assert_eq!(
            error(&ask("i9", None, &[])),
            "no instance \"i9\" in records.json; wait for the records, or correct the id"
        );
        assert_eq!(
            error(&ask("i1", None, &["i2"])),
            "\"i2\" does not belong to instance \"i1\" in records.json; request its own names"
        );
        assert_eq!(
            error(&ask("i1", Some("x"), &[])),
            "\"x\" is not a role; start the issuer with --role x"
        );
        let clocks = "check the clocks of this machine and of the issuer";
        for (text, shown) in [
            (
                "certificate not valid yet",
                format!("{clocks}: certificate not valid yet"),
            ),
            (
                "certificate expired: x",
                format!("{clocks}: certificate expired: x"),
            ),
            ("broken pipe", "broken pipe".to_owned()),
        ] {
            let explained = explain(std::io::Error::other(text));
            assert_eq!(format!("{explained:#}"), shown);
        }
    }

    #[test]
    fn last_pair_ends_a_member() {
        let member = |not_after| Member {
            generation: 0,
            issuers: BTreeSet::new(),
            not_after,
        };
        let members = Members::from([
            ("a".to_owned(), member(9)),
            ("b".to_owned(), member(10)),
            ("c".to_owned(), member(11)),
        ]);
        for (now, count) in [(0, 3), (9, 3), (10, 2), (11, 1), (12, 0)] {
            assert_eq!(count_valid(&members, now), count, "{now}");
        }
    }

    /// The state of an issuer with one CA.
    fn issuing(place: &std::path::Path) -> (StateFolder, Fingerprint) {
        let folder = place.join("old");
        std::fs::create_dir(&folder).unwrap();
        let (state, _) = StateFolder::create(place.join("state")).unwrap();
        let files = TestCa::new("old").write(&folder);
        let old = state.import(&files, SystemTime::now()).unwrap();
        state.set_trust(&Trust::new(old.clone())).unwrap();
        (state, old)
    }

    /// Options to rotate to a CA, or back.
    fn rotation(place: &std::path::Path, to: Option<&CaFiles>, back: bool) -> RotateOptions {
        RotateOptions {
            state: place.join("state"),
            ca: to.map(|files| files.certificate.clone()),
            ca_key: to.map(|files| files.key.clone()),
            back,
            resume: false,
            settle: 0,
            patience: Some(0),
        }
    }

    #[tokio::test]
    async fn fleet_without_members_rotates_at_once() {
        let place = tempfile::tempdir_in("/dev/shm").unwrap();
        let (state, old) = issuing(place.path());
        let files = TestCa::new("new").write(place.path());
        rotate_ca(rotation(place.path(), Some(&files), false))
            .await
            .unwrap();
        let new = state.import(&files, SystemTime::now()).unwrap();
        let trust = |generation, issuing: &Fingerprint, origin: &Fingerprint| Trust {
            generation,
            trusted: vec![issuing.clone()],
            issuing: issuing.clone(),
            origin: Some(origin.clone()),
            rotation: None,
        };
        assert_eq!(state.trust().unwrap(), Some(trust(4, &new, &old)));
        rotate_ca(rotation(place.path(), None, true)).await.unwrap();
        assert_eq!(state.trust().unwrap(), Some(trust(7, &old, &new)));
        // Back once more.
        rotate_ca(rotation(place.path(), None, true)).await.unwrap();
        assert_eq!(state.trust().unwrap(), Some(trust(10, &new, &old)));
        let third = TestCa::new("third").write(place.path());
        rotate_ca(rotation(place.path(), Some(&third), false))
            .await
            .unwrap();
        // The key of the CA before the last is gone.
        assert!(state.chain(&old).is_err() && state.chain(&new).is_ok());
    }

    #[tokio::test]
    async fn rotation_waits_for_members() {
        let place = tempfile::tempdir_in("/dev/shm").unwrap();
        let (state, old) = issuing(place.path());
        let files = TestCa::new("new").write(place.path());
        let mut members = state::MembersFile::open(&state).unwrap();
        let member = |generation| Member {
            generation,
            issuers: BTreeSet::from([old.clone()]),
            not_after: seconds(SystemTime::now()) + 1000,
        };
        let changes = |generation| BTreeMap::from([("i1".to_owned(), Some(member(generation)))]);
        members.save(&changes(1)).unwrap();
        let failed = |options| async { rotate_ca(options).await.unwrap_err().to_string() };
        let late = "instances that have not followed: 1, such as i1; check their agents' logs, then use --resume or --back";
        assert_eq!(
            failed(rotation(place.path(), Some(&files), false)).await,
            late
        );
        let trust = state.trust().unwrap().unwrap();
        assert_eq!((trust.generation, trust.trusted.len()), (2, 2));
        assert_eq!(trust.issuing, old);
        let target = trust.rotation.unwrap();
        assert!(target.target != old && !target.returns);
        // The next step follows the report.
        members.save(&changes(2)).unwrap();
        assert_eq!(failed(rotation(place.path(), None, false)).await, late);
        let trust = state.trust().unwrap().unwrap();
        assert_eq!((trust.generation, trust.issuing), (3, target.target));
        let lock = state.lock_rotation().unwrap();
        assert_eq!(
            failed(rotation(place.path(), None, false)).await,
            "another rotate-ca is running; wait for it or stop it"
        );
        drop(lock);
        // Expired members are not waited for.
        let mut gone = member(2);
        gone.not_after = 0;
        members
            .save(&BTreeMap::from([("i1".to_owned(), Some(gone))]))
            .unwrap();
        rotate_ca(rotation(place.path(), None, false))
            .await
            .unwrap();
        assert_eq!(
            failed(rotation(place.path(), None, false)).await,
            "no rotation was interrupted; begin one with --ca and --ca-key"
        );
    }
}
