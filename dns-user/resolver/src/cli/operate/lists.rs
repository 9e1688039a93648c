//! The commands `instances` and `local-groups`.

use std::borrow::Cow;

use clap::Args;

use super::{
    Problem,
    client::{escaped, get},
    connection::Connection,
    print, print_json,
    table::Table,
};
use crate::ops::api::{Group, InstanceLine};

#[derive(Debug, Args)]
pub(in crate::cli) struct Instances {
    /// Where the server is.
    #[command(flatten)]
    connection: Connection,
    /// Only the instances behind this name, after the health filter
    #[arg(long, value_name = "NAME")]
    address: Option<String>,
    /// Print JSON lines, as the API returns them
    #[arg(long)]
    json: bool,
}

impl Instances {
    /// Lists the instances; an unknown name is a negative result.
    pub(super) fn run(self) -> Result<(), Problem> {
        let Self { connection, address, json } = self;
        let path = match address {
            Some(name) => format!("/instances?address={}", escaped(&name)),
            None => "/instances".to_owned(),
        };
        let answer = get(&connection, &path)?;
        if json {
            return print_json(&answer.text());
        }
        let mut table =
            Table::new(&["ID", "GROUP", "NETWORK", "DEPLOYMENT", "IP", "DOMAIN", "AZ", "INDEX", "HEALTH"]);
        for line in answer.json_lines::<InstanceLine<'static>>()? {
            let InstanceLine { id, group, network, deployment, ip, domain, az, index, health_state } = line;
            let texts = [id, group, network, deployment, ip.into(), domain, az, index.into(), health_state];
            table.line(texts.map(Cow::into_owned));
        }
        print(&table.text(0))
    }
}

#[derive(Debug, Args)]
pub(in crate::cli) struct LocalGroups {
    /// Where the server is.
    #[command(flatten)]
    connection: Connection,
    /// Print JSON lines, as the API returns them
    #[arg(long)]
    json: bool,
}

impl LocalGroups {
    /// Lists the links of this VM's jobs.
    pub(super) fn run(self) -> Result<(), Problem> {
        let Self { connection, json } = self;
        let answer = get(&connection, "/local-groups")?;
        if json {
            return print_json(&answer.text());
        }
        let mut table = Table::new(&["JOB", "LINK", "TYPE", "GROUP", "HEALTH"]);
        for Group { job_name, link_name, link_type, group_id, health_state } in
            answer.json_lines::<Group>()?
        {
            let job_name = if job_name.is_empty() { "(this VM)".to_owned() } else { job_name };
            table.line([job_name, link_name, link_type, group_id, health_state]);
        }
        print(&table.text(0))
    }
}
