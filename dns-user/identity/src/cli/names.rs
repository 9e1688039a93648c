//! `san`.

use std::{fs, path::PathBuf, process::ExitCode};

use anyhow::Context;
use dns_core::catalog::Snapshot;

use crate::{
    check::snapshot,
    manifest,
    names::unresolved,
    san::{Ids, Link, Names},
};

/// `san`.
#[derive(Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("provider").required(true)
    .args(["instance_group", "link", "manual", "manifest"]))]
pub(super) struct San {
    /// BOSH manifest: print the names of every variable of type certificate
    #[arg(long, value_name = "FILE")]
    manifest: Option<PathBuf>,
    /// Deployment of the provider
    #[arg(long, value_name = "NAME", default_value = "")]
    deployment: String,
    /// Instance group of the provider
    #[arg(long, value_name = "NAME", requires = "deployment")]
    instance_group: Option<String>,
    /// Link NAME-TYPE of the provider (use_link_dns_names); needs the ids
    #[arg(long, value_name = "NAME-TYPE", requires_all = ["network_id", "group_id"])]
    link: Option<String>,
    /// Address of a manual link
    #[arg(long, value_name = "NAME")]
    manual: Option<String>,
    /// Network of the provider
    #[arg(long, value_name = "NAME", default_value = "default")]
    network: String,
    /// Domain
    #[arg(long, value_name = "NAME", default_value = "bosh")]
    domain: String,
    /// Id of the network, for the short form
    #[arg(long, value_name = "ID", requires = "group_id")]
    network_id: Option<u64>,
    /// Id of the group, for the short form
    #[arg(long, value_name = "ID", requires = "network_id")]
    group_id: Option<u64>,
    /// Put `*` in place of the first label
    #[arg(long)]
    wildcard: bool,
    /// The fleet's records.json: report names that no instance answers to
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
            Some(records) => Some(snapshot(records, &self.aliases).map_err(|error| anyhow::anyhow!(error))?),
            None => None,
        };
        let mut missing = false;
        if let Some(path) = &self.manifest {
            let named = || path.display().to_string();
            let text = fs::read_to_string(path).with_context(named)?;
            for variable in manifest::variables(&text, &self.domain).with_context(named)? {
                print_variable(&variable);
                missing |= report(fleet.as_ref(), &variable.names);
            }
        } else {
            let name = self.link().name(self.wildcard)?;
            println!("{name}");
            missing = report(fleet.as_ref(), &Names { dns: vec![name], ..Names::default() });
        }
        Ok(if missing && self.strict { ExitCode::FAILURE } else { ExitCode::SUCCESS })
    }

    fn link(&self) -> Link {
        if let Some(address) = &self.manual {
            return Link::Manual(address.clone());
        }
        let ids = self.network_id.zip(self.group_id);
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

fn print_variable(variable: &manifest::Variable) {
    println!("{}", variable.name);
    let Names { common_name, dns, addresses } = &variable.names;
    if let Some(name) = common_name {
        println!("  CN   {name}");
    }
    for name in dns {
        println!("  DNS  {name}");
    }
    for address in addresses {
        println!("  IP   {address}");
    }
}

/// Prints the names that do not resolve; returns whether there is one.
fn report(fleet: Option<&Snapshot>, names: &Names) -> bool {
    let Some(fleet) = fleet else { return false };
    let mut dns = names.dns.clone();
    dns.extend(names.common_name.iter().filter(|name| name.contains('.') && !name.contains(' ')).cloned());
    let missing = unresolved(fleet, &dns, &names.addresses);
    for name in &missing {
        println!("warning: {name}");
    }
    !missing.is_empty()
}
