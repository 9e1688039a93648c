//! `issue`, `check`, `san`, `token` and `confirm-removals`.

use std::{
    collections::BTreeSet,
    fs,
    path::PathBuf,
    process::ExitCode,
    time::{Duration, SystemTime},
};

use anyhow::{Context, bail};
use dns_command_line::print;
use dns_core::{catalog::Snapshot, link_address::canonical};

use super::order;
use crate::{
    authority::CaFiles,
    certificate::Validity,
    check::{self, Findings, is_host_name, snapshot, unresolved},
    descriptions::read_any,
    fleet::state::StateFolder,
    folder::{IdentityFolder, Pair},
    keys::PrivateKey,
    run::{ControlCommand, LeafOptions},
    san::{self, Ids, Link, Names, Provider},
};

#[derive(Debug, clap::Args)]
pub(super) struct Issue {
    #[command(flatten)]
    ca: CaFiles,
    /// JSON file that describes the container
    #[arg(long, value_name = "FILE")]
    container: PathBuf,
    /// Folder for instance.crt, instance.key, instance.pem and ca.crt
    #[arg(long, value_name = "FOLDER")]
    folder: PathBuf,
    #[command(flatten)]
    leaf: LeafOptions,
}

#[derive(Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("what").required(true).args(["ca", "folder", "certificate"]))]
pub(super) struct Check {
    /// PEM file of a CA
    #[arg(long, value_name = "FILE")]
    ca: Option<PathBuf>,
    /// Private key of the CA; without it, the certificate alone is checked
    #[arg(long, value_name = "FILE", requires = "ca")]
    ca_key: Option<PathBuf>,
    /// Folder of an identity
    #[arg(long, value_name = "FOLDER")]
    folder: Option<PathBuf>,
    /// Certificate whose names must resolve in the fleet of --records
    #[arg(long, value_name = "FILE", requires = "records")]
    certificate: Option<PathBuf>,
    /// The fleet's records.json
    #[arg(long, value_name = "FILE")]
    records: Option<PathBuf>,
    /// Alias file of the fleet; repeatable
    #[arg(long, value_name = "FILE")]
    aliases: Vec<PathBuf>,
    /// Also exit with code 1 if a name does not resolve
    #[arg(long)]
    strict: bool,
}

impl Issue {
    pub(super) fn run(self) -> anyhow::Result<()> {
        let Self {
            ca,
            container,
            folder,
            leaf,
        } = self;
        let now = SystemTime::now();
        let authority = ca.load(now)?;
        if let Some(caution) = authority.caution(now, leaf.validity) {
            eprintln!("warning: {}: {caution}", ca.certificate.display());
        }
        let container = read_any(&container).with_context(|| container.display().to_string())?;
        let key = PrivateKey::generate(leaf.key_type)?;
        let wanted = Validity::backdated(now, leaf.validity, leaf.backdate);
        let issued = authority.issue(&container.identity()?, key.public_key_info(), wanted)?;
        let pair = Pair {
            certificate: issued.pem,
            key: key.to_pem()?,
        };
        let folder = IdentityFolder::new(folder);
        Ok(folder.replace_pair(&pair, &authority.chain_pem(), container.owner)?)
    }
}

impl Check {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        let Self {
            ca,
            ca_key,
            folder,
            certificate,
            records,
            aliases,
            strict,
        } = self;
        let now = SystemTime::now();
        let mut found = Findings::default();
        match (ca, ca_key, folder, certificate.zip(records)) {
            (Some(certificate), Some(key), _, _) => {
                found = check::authority(&CaFiles { certificate, key }, now);
            }
            (Some(certificate), None, _, _) => {
                found = check::authority_certificate(&certificate, now)
            }
            (None, _, Some(folder), _) => found = check::folder(&folder, now),
            (None, _, None, Some((certificate, records))) => {
                let missing = check::names(&certificate, &records, &aliases)?;
                // By default only warnings, because the group of a name may be about to be
                // deployed.
                if strict {
                    found.errors = missing
                } else {
                    found.warnings = missing
                }
            }
            // The command line rules this out: one of the three is required, and `--certificate`
            // requires `--records`.
            (None, _, None, None) => {
                anyhow::bail!("one of --ca, --folder or --certificate is required")
            }
        }
        let Findings { errors, warnings } = found;
        let mut text = String::new();
        for warning in &warnings {
            text += &format!("warning: {warning}\n");
        }
        for error in &errors {
            text += &format!("error: {error}\n");
        }
        if text.is_empty() {
            text += "no defect found\n";
        }
        print(text.as_bytes())?;
        Ok(if errors.is_empty() {
            ExitCode::SUCCESS
        } else {
            ExitCode::FAILURE
        })
    }
}

/// Options of `token`.
#[derive(Debug, clap::Args)]
pub(super) struct Token {
    /// State folder of the issuer
    #[arg(long, value_name = "FOLDER")]
    state: PathBuf,
    /// Id of the instance, as in records.json
    #[arg(long, value_name = "ID")]
    instance: String,
    /// Minutes for which the token is valid
    #[arg(long, value_name = "MINUTES", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=10080))]
    minutes: u64,
    /// Create the token although records.json does not have the instance yet
    #[arg(long)]
    allow_unknown: bool,
}

impl Token {
    pub(super) fn run(self) -> anyhow::Result<()> {
        let Self {
            state,
            instance,
            minutes,
            allow_unknown,
        } = self;
        let state = StateFolder::open(state)?;
        // The token of a mistyped id could never be used, and the agent would only learn that its
        // token is unknown.
        if let (Some(facts), false) = (state.facts()?, allow_unknown) {
            let fleet = snapshot(&facts.records, &[])?;
            anyhow::ensure!(
                fleet.instances().any(|row| row.id == instance),
                "no instance {instance:?} in {}; correct the id, wait for the records, or add --allow-unknown",
                facts.records.display()
            );
        }
        let token = state.create_token(
            &instance,
            SystemTime::now(),
            Duration::from_secs(minutes * 60),
        )?;
        // Nothing else is printed, so that scripts can capture it.
        print(token.as_bytes())?;
        Ok(print(b"\n")?)
    }
}

/// Options of `confirm-removals`.
#[derive(Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("process").required(true).args(["control", "state"]))]
pub(super) struct ConfirmRemovals {
    /// Number of identities or instances, as logged
    number: usize,
    /// Control socket of the rotator
    #[arg(long, value_name = "SOCKET")]
    control: Option<PathBuf>,
    /// State folder of the issuer
    #[arg(long, value_name = "FOLDER")]
    state: Option<PathBuf>,
}

impl ConfirmRemovals {
    pub(super) fn run(self) -> anyhow::Result<()> {
        let Self {
            number,
            control,
            state,
        } = self;
        // The issuer has no control socket: it finds the confirmation in its folder.
        if let Some(state) = state {
            StateFolder::open(state)?.confirm_removals(number)?;
        }
        if let Some(control) = control {
            order(&control, &ControlCommand::ConfirmRemovals { number })?;
        }
        Ok(())
    }
}

#[derive(Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("provider").required(true)
    .args(["instance_group", "link", "manual", "manifest"]))]
pub(super) struct San {
    /// BOSH manifest; prints the names for each variable of type certificate
    #[arg(long, value_name = "FILE")]
    manifest: Option<PathBuf>,
    /// Deployment of the provider
    #[arg(long, value_name = "NAME", default_value = "")]
    deployment: String,
    /// Instance group of the provider
    #[arg(long, value_name = "NAME", requires = "deployment")]
    instance_group: Option<String>,
    /// Link of the provider, as NAME-TYPE (use_link_dns_names); needs the ids
    #[arg(long, value_name = "NAME-TYPE", requires_all = ["network_id", "group_id"])]
    link: Option<String>,
    /// Address of a manual link
    #[arg(long, value_name = "NAME")]
    manual: Option<String>,
    /// Network of the provider
    #[arg(long, value_name = "NAME", default_value = "default")]
    network: String,
    /// Domain that the names end in
    #[arg(long, value_name = "NAME", default_value = "bosh")]
    domain: String,
    /// Id of the network, for the short form
    #[arg(long, value_name = "ID", requires = "group_id")]
    network_id: Option<u64>,
    /// Id of the group, for the short form
    #[arg(long, value_name = "ID", requires = "network_id")]
    group_id: Option<u64>,
    /// With --manifest: ids of a link's provider that --records does not contain, for short names; repeatable
    #[arg(long, value_name = "LINK=NETWORK-ID/GROUP-ID", requires = "manifest", value_parser = parse_ids)]
    ids: Vec<(String, Ids)>,
    /// Put `*` in place of the first label
    #[arg(long)]
    wildcard: bool,
    /// The fleet's records.json; reports names that no instance has
    #[arg(long, value_name = "FILE")]
    records: Option<PathBuf>,
    /// Alias file of the fleet; repeatable
    #[arg(long, value_name = "FILE", requires = "records")]
    aliases: Vec<PathBuf>,
    /// Exit with code 1 if a name does not resolve
    #[arg(long, requires = "records")]
    strict: bool,
}

impl San {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        let fleet = match &self.records {
            Some(records) => Some(snapshot(records, &self.aliases)?),
            None => None,
        };
        let mut text = String::new();
        let mut missing = false;
        if let Some(path) = &self.manifest {
            let manifest = fs::read_to_string(path).with_context(|| path.display().to_string())?;
            let variables = san::variables(&manifest, &self.domain, &|link, provider| match self
                .ids
                .iter()
                .find(|(of, _)| of == link)
            {
                // The operator's options precede the records, which may be ambiguous.
                Some((_, ids)) => Ok(*ids),
                None => recorded_ids(fleet.as_ref(), link, provider),
            });
            for variable in variables.with_context(|| path.display().to_string())? {
                show(&variable, &mut text);
                missing |= report(fleet.as_ref(), &variable.names, &mut text);
            }
        } else {
            let name = self.link().name(self.wildcard)?;
            text += &format!("{name}\n");
            let names = Names {
                dns: vec![name],
                ..Names::default()
            };
            missing = report(fleet.as_ref(), &names, &mut text);
        }
        print(text.as_bytes())?;
        Ok(if missing && self.strict {
            ExitCode::FAILURE
        } else {
            ExitCode::SUCCESS
        })
    }

    fn link(&self) -> Link {
        if let Some(address) = &self.manual {
            return Link::Manual(address.clone());
        }
        let ids = self.network_id.zip(self.group_id);
        // One of both is given: the command line requires it, and the other kinds are handled
        // before.
        let group = self.instance_group.as_ref().or(self.link.as_ref());
        Link::Group {
            instance_group: group.cloned().unwrap_or_default(),
            network: self.network.clone(),
            deployment: self.deployment.clone(),
            domain: self.domain.clone(),
            ids: ids.map(|(network, group)| Ids { network, group }),
        }
    }
}

/// Parses `LINK=NETWORK-ID/GROUP-ID`.
fn parse_ids(text: &str) -> Result<(String, Ids), &'static str> {
    split_ids(text).ok_or("use LINK=NETWORK-ID/GROUP-ID, such as my-link=3/7")
}

fn split_ids(text: &str) -> Option<(String, Ids)> {
    let (link, ids) = text.split_once('=')?;
    let (network, group) = ids.split_once('/')?;
    let ids = Ids {
        network: network.parse().ok()?,
        group: group.parse().ok()?,
    };
    Some((link.to_owned(), ids))
}

/// Looks up ids in the fleet's records. These do not distinguish the group of a link from the group
/// of its instances, so an instance in several groups yields no result.
fn recorded_ids(fleet: Option<&Snapshot>, link: &str, provider: &Provider) -> anyhow::Result<Ids> {
    let fleet = fleet.with_context(|| {
        format!(
            "short names need ids, which a manifest does not contain; use --records, or add the ids: --ids \
             {link}=NETWORK-ID/GROUP-ID"
        )
    })?;
    let Provider {
        instance_group,
        network,
        deployment,
        uses_link_group,
    } = provider;
    let mut networks = BTreeSet::new();
    let mut groups = BTreeSet::new();
    for row in fleet.instances() {
        let is_provider = is_same(row.instance_group, instance_group)
            && is_same(row.network, network)
            && is_same(row.deployment, deployment);
        if is_provider {
            // Text that is no number is no id of the short form.
            networks.extend(row.network_id.parse::<u64>());
            for group in row.group_ids() {
                groups.extend(group.parse::<u64>());
            }
        }
    }
    let networks: Vec<u64> = networks.into_iter().collect();
    let groups: Vec<u64> = groups.into_iter().collect();
    match (&networks[..], &groups[..]) {
        ([network], [group]) if !uses_link_group => Ok(Ids {
            network: *network,
            group: *group,
        }),
        ([], _) | (_, []) => bail!(
            "records.json has no instance of {instance_group}.{network}.{deployment} with ids; deploy it, or add \
             the ids: --ids {link}=NETWORK-ID/GROUP-ID"
        ),
        _ => bail!(
            "records.json has networks {networks:?} and groups {groups:?} of {instance_group}, and does not show \
             which group belongs to the link; add the ids: --ids {link}=NETWORK-ID/GROUP-ID"
        ),
    }
}

/// Returns whether a name in records stands for the one in the manifest.
fn is_same(recorded: &str, stated: &str) -> bool {
    canonical(recorded).ok() == canonical(stated).ok()
}

fn show(variable: &san::Variable, text: &mut String) {
    *text += &format!("{}\n", variable.name);
    let Names {
        common_name,
        dns,
        addresses,
    } = &variable.names;
    if let Some(name) = common_name {
        *text += &format!("  CN   {name}\n");
    }
    for name in dns {
        *text += &format!("  DNS  {name}\n");
    }
    for address in addresses {
        *text += &format!("  IP   {address}\n");
    }
}

/// Lists the names that do not resolve; returns whether there are any.
fn report(fleet: Option<&Snapshot>, names: &Names, text: &mut String) -> bool {
    let Some(fleet) = fleet else { return false };
    let mut dns = names.dns.clone();
    dns.extend(names.common_name.clone().filter(|name| is_host_name(name)));
    let missing = unresolved(fleet, &dns, &names.addresses);
    for name in &missing {
        *text += &format!("warning: {name}\n");
    }
    !missing.is_empty()
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use dns_core::catalog::{AliasFiles, Records};

    use super::*;
    use crate::tests::TestCa;

    #[test]
    fn common_names_that_are_names_are_looked_up() {
        let records =
            br#"{"record_keys": ["id", "instance_group", "network", "deployment", "ip", "domain"],
            "record_infos": [["a", "web", "net", "dep", "10.0.0.1", "bosh"]]}"#;
        let (records, _) = Records::parse(records).unwrap();
        let fleet = Snapshot::build(records, &AliasFiles::default()).0;
        for (common_name, dns, expected) in [
            (None, "a.web.net.dep.bosh", false),
            (None, "b.web.net.dep.bosh", true),
            (Some("b.web.net.dep.bosh"), "a.web.net.dep.bosh", true),
            (Some("a.web.net.dep.bosh"), "a.web.net.dep.bosh", false),
            (Some("our b.web.net.dep.bosh"), "a.web.net.dep.bosh", false),
            (Some("bosh"), "a.web.net.dep.bosh", false),
            (Some("www.example.org"), "a.web.net.dep.bosh", false),
        ] {
            let names = Names {
                common_name: common_name.map(str::to_owned),
                dns: vec![dns.to_owned()],
                addresses: Vec::new(),
            };
            let mut text = String::new();
            assert_eq!(
                report(Some(&fleet), &names, &mut text),
                expected,
                "{common_name:?} {dns}"
            );
            assert_eq!(text.starts_with("warning: "), expected, "{text}");
            assert!(!report(None, &names, &mut text));
        }
    }

    #[derive(clap::Parser)]
    struct CommandLine {
        #[command(subcommand)]
        command: Command,
    }

    #[derive(clap::Subcommand)]
    enum Command {
        Issue(Issue),
        Check(Check),
        Token(Token),
        ConfirmRemovals(ConfirmRemovals),
        San(San),
    }

    /// Runs a command line; returns whether it succeeded, or its error.
    fn run(words: &str) -> Result<bool, String> {
        let words = std::iter::once("identity").chain(words.split_whitespace());
        let done = |done: anyhow::Result<()>| done.map(|()| ExitCode::SUCCESS);
        let code = match CommandLine::parse_from(words).command {
            Command::Issue(issue) => done(issue.run()),
            Command::Check(check) => check.run(),
            Command::Token(token) => done(token.run()),
            Command::ConfirmRemovals(confirm) => done(confirm.run()),
            Command::San(san) => san.run(),
        };
        code.map(|code| code == ExitCode::SUCCESS)
            .map_err(|error| format!("{error:#}"))
    }

    const RECORDS: &str = r#"{"record_keys": ["id", "instance_group", "group_ids", "network", "network_id",
        "deployment", "ip", "domain"], "record_infos": [
        ["a", "web", ["7"], "net", "3", "dep", "10.0.0.1", "bosh"],
        ["b", "web", ["7"], "net", "3", "dep", "10.0.0.2", "bosh"],
        ["c", "db", ["8", "9"], "net", "3", "dep", "10.0.0.3", "bosh"],
        ["d", "web", ["5"], "other", "4", "dep", "10.0.0.4", "bosh"],
        ["e", "web", ["6"], "net", "3", "dep2", "10.0.0.5", "bosh"],
        ["f", "none", [], "net", "3", "dep", "10.0.0.6", "bosh"]]}"#;

    #[test]
    fn issued_folder_is_checked() {
        let place = tempfile::tempdir_in("/dev/shm").unwrap();
        let path = place.path().display().to_string();
        let files = TestCa::new("ca").write(place.path());
        fs::write(place.path().join("container.json"), r#"{"guid":"g1"}"#).unwrap();
        let issue = format!(
            "issue --ca {path}/ca.crt --ca-key {path}/ca.key --container {path}/container.json --folder {path}/g1 \
             --key-type p-256"
        );
        assert_eq!(run(&issue), Ok(true));
        for (check, expected) in [
            (format!("check --folder {path}/g1"), true),
            (format!("check --folder {path}/none"), false),
            (format!("check --ca {path}/ca.crt"), true),
            (
                format!("check --ca {path}/ca.crt --ca-key {path}/ca.key"),
                true,
            ),
            (format!("check --ca {path}/ca.key"), false),
            (
                format!("check --ca {path}/ca.crt --ca-key {path}/g1/instance.key"),
                false,
            ),
        ] {
            assert_eq!(run(&check), Ok(expected), "{check}");
        }
        fs::write(place.path().join("records.json"), RECORDS).unwrap();
        let names = format!("check --certificate {path}/x.crt --records {path}/records.json");
        for (name, strict, expected) in [
            ("a.web.net.dep.bosh", "--strict", true),
            ("x.web.net.dep.bosh", "", true),
            ("x.web.net.dep.bosh", "--strict", false),
        ] {
            let params = rcgen::CertificateParams::new(vec![name.to_owned()]).unwrap();
            let key = rcgen::KeyPair::generate().unwrap();
            let pem = params.self_signed(&key).unwrap().pem();
            fs::write(place.path().join("x.crt"), pem).unwrap();
            assert_eq!(run(&format!("{names} {strict}")), Ok(expected), "{name}");
        }
        // The description's mistakes name the file.
        fs::write(place.path().join("container.json"), "{").unwrap();
        assert_eq!(
            run(&issue),
            Err(format!(
                "{path}/container.json: EOF while parsing an object at line 1 column 1; correct the description"
            ))
        );
        drop(files);
    }

    #[test]
    fn tokens_are_for_known_instances() {
        let place = tempfile::tempdir_in("/dev/shm").unwrap();
        let path = place.path().display().to_string();
        let (state, _lock) = StateFolder::create(place.path().join("state")).unwrap();
        let files = TestCa::new("ca").write(place.path());
        let ca = state.import(&files, SystemTime::now()).unwrap();
        let trust = serde_json::json!({
            "generation": 1, "trusted": [ca], "issuing": ca, "origin": null, "rotation": null,
        });
        fs::write(place.path().join("state/trust.json"), trust.to_string()).unwrap();
        let count = || {
            let tokens = fs::read_dir(place.path().join("state/tokens")).unwrap();
            tokens.count()
        };
        let token = format!("token --state {path}/state --instance");
        // Without records, nothing can be compared.
        assert_eq!(run(&format!("{token} x")), Ok(true));
        let records = place.path().join("records.json");
        fs::write(&records, RECORDS).unwrap();
        let facts = crate::fleet::state::IssuerFacts {
            records: records.clone(),
        };
        state.set_facts(&facts).unwrap();
        assert_eq!(
            run(&format!("{token} x")),
            Err(format!(
                "no instance \"x\" in {}; correct the id, wait for the records, or add --allow-unknown",
                records.display()
            ))
        );
        assert_eq!(count(), 1);
        assert_eq!(run(&format!("{token} x --allow-unknown")), Ok(true));
        fs::remove_dir_all(place.path().join("state/tokens")).unwrap();
        fs::create_dir(place.path().join("state/tokens")).unwrap();
        let begun = crate::certificate::seconds(SystemTime::now());
        assert_eq!(run(&format!("{token} a --minutes 7")), Ok(true));
        let entry = fs::read_dir(place.path().join("state/tokens"))
            .unwrap()
            .next();
        let text = fs::read(entry.unwrap().unwrap().path()).unwrap();
        let stored: serde_json::Value = serde_json::from_slice(&text).unwrap();
        assert_eq!(stored["instance"], "a");
        let expires = stored["expires"].as_u64().unwrap();
        assert!((begun + 420..begun + 4000).contains(&expires), "{expires}");
        assert_eq!(
            run(&format!("confirm-removals 12 --state {path}/state")),
            Ok(true)
        );
        assert_eq!(state.take_confirmation(), Some(12));
        assert!(run(&format!("confirm-removals 12 --control {path}/none")).is_err());
    }

    #[test]
    fn provider_names_are_looked_up() {
        let place = tempfile::tempdir_in("/dev/shm").unwrap();
        let path = place.path().display().to_string();
        fs::write(place.path().join("records.json"), RECORDS).unwrap();
        let manifest = r"
name: dep
features: {use_short_dns_addresses: true}
instance_groups:
- {name: web, networks: [{name: net}], jobs: [{name: j, provides: {l: {as: link}}}]}
- {name: db, networks: [{name: net}], jobs: [{name: j, provides: {l: {as: two}}}]}
variables:
- {name: v, type: certificate, consumes: {alternative_name: {from: link}}}
";
        fs::write(place.path().join("m.yml"), manifest).unwrap();
        let other = manifest.replace("from: link", "from: two");
        fs::write(place.path().join("two.yml"), other).unwrap();
        let records = format!("--records {path}/records.json --strict");
        let ambiguous = format!(
            "{path}/two.yml: variable v: records.json has networks [3] and groups [8, 9] of db, and does not show which \
             group belongs to the link; add the ids: --ids two=NETWORK-ID/GROUP-ID"
        );
        for (words, expected) in [
            (
                format!("san --deployment dep --instance-group web --network net {records}"),
                Ok(true),
            ),
            (
                format!("san --deployment dep --instance-group x --network net {records}"),
                Ok(false),
            ),
            (
                format!(
                    "san --deployment dep --instance-group x --network net --records {path}/records.json"
                ),
                Ok(true),
            ),
            (
                format!("san --deployment dep --link web --network-id 3 --group-id 7 {records}"),
                Ok(true),
            ),
            (
                format!("san --deployment dep --link web --network-id 3 --group-id 99 {records}"),
                Ok(false),
            ),
            (
                format!("san --manual a.web.net.dep.bosh {records}"),
                Ok(true),
            ),
            (
                format!("san --manual x.web.net.dep.bosh {records}"),
                Ok(false),
            ),
            (format!("san --manifest {path}/m.yml {records}"), Ok(true)),
            (
                format!("san --manifest {path}/m.yml --ids link=3/99 {records}"),
                Ok(false),
            ),
            (
                format!("san --manifest {path}/two.yml {records}"),
                Err(ambiguous),
            ),
            (
                format!("san --manifest {path}/two.yml --ids link=1/1 --ids two=3/8 {records}"),
                Ok(true),
            ),
        ] {
            assert_eq!(run(&words), expected, "{words}");
        }
    }

    #[test]
    fn ids_belong_to_a_group() {
        let (records, _) = Records::parse(RECORDS.as_bytes()).unwrap();
        let fleet = Snapshot::build(records, &AliasFiles::default()).0;
        let ids = |instance_group: &str, network: &str, deployment: &str, uses_link_group| {
            let provider = Provider {
                instance_group: instance_group.to_owned(),
                network: network.to_owned(),
                deployment: deployment.to_owned(),
                uses_link_group,
            };
            recorded_ids(Some(&fleet), "l", &provider)
                .map(|ids| (ids.network, ids.group))
                .map_err(|error| error.to_string())
        };
        assert_eq!(ids("web", "net", "dep", false), Ok((3, 7)));
        assert_eq!(ids("Web", "Net", "Dep", false), Ok((3, 7)));
        assert_eq!(ids("web", "other", "dep", false), Ok((4, 5)));
        assert_eq!(ids("web", "net", "dep2", false), Ok((3, 6)));
        let ambiguous = |groups: &str, group: &str| {
            Err(format!(
                "records.json has networks [3] and groups [{groups}] of {group}, and does not show which group belongs \
                 to the link; add the ids: --ids l=NETWORK-ID/GROUP-ID"
            ))
        };
        assert_eq!(ids("web", "net", "dep", true), ambiguous("7", "web"));
        assert_eq!(ids("db", "net", "dep", false), ambiguous("8, 9", "db"));
        for group in ["x", "none"] {
            assert_eq!(
                ids(group, "net", "dep", false),
                Err(format!(
                    "records.json has no instance of {group}.net.dep with ids; deploy it, or add the ids: --ids \
                     l=NETWORK-ID/GROUP-ID"
                ))
            );
        }
        let provider = Provider {
            instance_group: String::new(),
            network: String::new(),
            deployment: String::new(),
            uses_link_group: false,
        };
        assert_eq!(
            recorded_ids(None, "l", &provider).unwrap_err().to_string(),
            "short names need ids, which a manifest does not contain; use --records, or add the ids: --ids \
             l=NETWORK-ID/GROUP-ID"
        );
        let parsed = |text| parse_ids(text).map(|(link, ids)| (link, ids.network, ids.group));
        assert_eq!(parsed("a-b=3/7"), Ok(("a-b".to_owned(), 3, 7)));
        for wrong in ["a", "a=3", "a=3/", "a=/7", "a=x/7", "a=3/-7"] {
            assert_eq!(
                parsed(wrong),
                Err("use LINK=NETWORK-ID/GROUP-ID, such as my-link=3/7")
            );
        }
    }
}
