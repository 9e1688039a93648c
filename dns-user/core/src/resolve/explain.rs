//! Step-by-step explanation of a resolution, for `resolve NAME`.

use std::{fmt, net::IpAddr};

use serde::Serialize;

use super::{Existence, Health, HealthState, resolve, select};
use crate::{
    catalog::{InstanceIndex, PlaceholderFilter, Row, Snapshot, Target},
    name::Name,
    query::{Filter, Pattern, QueryCriteria, QueryTarget, Strategy},
};

/// The steps from a name to its answer; `Display` formats them as text.
#[derive(Clone, Debug, Serialize)]
pub struct Explanation {
    /// The resolved name in lower case.
    pub name: String,
    /// Zone that makes the name local: the domain, alias or agents' domain that contains it.
    /// `None`: the name is not local, and the other fields are hypothetical.
    pub zone: Option<String>,
    /// The matching alias, if any; `_.x` if it inserts the first label.
    pub alias: Option<String>,
    /// Targets of the alias, or the name itself.
    pub targets: Vec<TargetExplanation>,
    /// Result of the resolution; `None` if the name is not local.
    pub result: Option<ResultExplanation>,
}

/// The resolution of one target.
#[derive(Clone, Debug, Default, Serialize)]
pub struct TargetExplanation {
    /// The target: an address or name.
    pub target: String,
    /// Form of the target, in words.
    pub form: &'static str,
    /// The records' domain of the target.
    pub domain: Option<String>,
    /// Conditions on the instances, in words.
    pub criteria: Vec<String>,
    /// Name of the health filter.
    pub filter: Option<&'static str>,
    /// Reason why the target is malformed.
    pub problem: Option<String>,
    /// Instances that match the conditions.
    pub matches: Vec<MatchExplanation>,
}

/// An instance that matches the conditions.
#[derive(Clone, Debug, Serialize)]
pub struct MatchExplanation {
    /// Instance id as in the records.
    pub id: String,
    /// Instance group, network and deployment.
    pub place: String,
    /// Instance address, if the records have a valid one.
    pub ip: Option<IpAddr>,
    /// State of the instance, or of the requested group on it.
    pub health: &'static str,
    /// Whether the instance passes the health filter.
    pub kept: bool,
}

/// The result of a resolution.
#[derive(Clone, Debug, Serialize)]
pub struct ResultExplanation {
    /// RCODE for types A and AAAA: NOERROR, NXDOMAIN or FORMERR.
    pub rcode: &'static str,
    /// Addresses in the answer, of both families.
    pub addresses: Vec<IpAddr>,
    /// Whether a query for the name starts health checks.
    pub tracked: bool,
    /// Whether the first query waits for the first checks.
    pub synchronous: bool,
}

/// Resolves a name and records each step.
pub fn explain(snapshot: &Snapshot, health: &dyn Health, name: &Name) -> Explanation {
    let zone = snapshot.local_zone(name).map(|zone| zone.to_string());
    let (alias, targets) = targets(snapshot, name);
    let mut explained = Vec::new();
    for target in targets.iter() {
        explained.push(explain_target(snapshot, health, target));
    }
    // Resolved as a whole again, instead of put together from the targets: it is what a query gets.
    let result = resolve(snapshot, health, name).map(|resolution| {
        let mut addresses = Vec::new();
        addresses.extend(resolution.v4.into_iter().map(IpAddr::V4));
        addresses.extend(resolution.v6.into_iter().map(IpAddr::V6));
        ResultExplanation {
            rcode: match resolution.existence {
                Existence::Found => "NOERROR",
                Existence::NoSuchName => "NXDOMAIN",
                // As for A and AAAA, which are what operators ask about. Other types get NOERROR.
                Existence::Malformed => "FORMERR",
            },
            tracked: resolution.checks.tracked,
            synchronous: resolution.checks.synchronous,
            addresses,
        }
    });
    Explanation {
        name: name.to_string(),
        zone,
        alias,
        targets: explained,
        result,
    }
}

/// Returns the alias that matches a name, and the targets to look up.
fn targets(snapshot: &Snapshot, name: &Name) -> (Option<String>, Vec<Target>) {
    // In the order of `Found::read`, which answers queries.
    if let Some(targets) = snapshot.aliases().exact(name) {
        return (Some(name.to_string()), targets.to_vec());
    }
    match (snapshot.aliases().below(name), name.parent()) {
        (Some(targets), Some(parent)) => (Some(format!("_.{parent}")), targets),
        _ => (None, vec![Target::Name(name.clone())]),
    }
}

fn explain_target(snapshot: &Snapshot, health: &dyn Health, target: &Target) -> TargetExplanation {
    let instances = snapshot.instance_index();
    let (name, placeholder) = match target {
        Target::Address(address) => return TargetExplanation::new(address.to_string(), "address"),
        Target::Name(name) => (name, None),
        Target::Placeholder { base, filter } => (snapshot.aliases().base(*base), Some(*filter)),
    };
    let question = match QueryTarget::read(name, &instances.domain_names) {
        Ok(question) => question,
        Err(problem) => {
            let problem = Some(problem.to_string());
            return TargetExplanation {
                problem,
                ..TargetExplanation::new(name.to_string(), "malformed")
            };
        }
    };
    let mut explained = TargetExplanation::new(name.to_string(), form(&question));
    match &question {
        QueryTarget::Agent(agent) => explained.say("agent id", &[agent]),
        QueryTarget::Anywhere(id) => explained.say("instance id", id.as_slice()),
        QueryTarget::Within(domain, criteria) => {
            explained.domain = Some(instances.domains.text(*domain).to_owned());
            explained.say_criteria(criteria);
        }
    }
    if let Some(placeholder) = placeholder {
        explained
            .criteria
            .push(placeholder_criterion(instances, placeholder));
    }
    let matched = select(instances, &question, placeholder);
    explained.filter = Some(match matched.strategy {
        Strategy::Smart if matched.needs_checks() => {
            "smart: running and unchecked instances, or all if there are none"
        }
        Strategy::Smart => "smart: a single match is returned regardless of health",
        Strategy::Unhealthy => "unhealthy: failing",
        Strategy::Healthy => "healthy: running",
        Strategy::All => "all",
    });
    // A part of the matches in their order, so that no list is searched for each of them.
    let mut kept = matched.healthy(snapshot, health).into_iter().peekable();
    for row in &matched.rows {
        let mut explanation = explain_match(instances, health, *row, matched.group);
        explanation.kept = kept.next_if_eq(row).is_some();
        explained.matches.push(explanation);
    }
    explained
}

fn explain_match(
    instances: &InstanceIndex,
    health: &dyn Health,
    row: Row,
    group: Option<&str>,
) -> MatchExplanation {
    let instance = instances.instance(row);
    let state = match instance.ip {
        Some(ip) => health.state(ip, group),
        // As in the health filter: an instance without an address cannot be checked.
        None => HealthState::Unknown,
    };
    MatchExplanation {
        id: instance.id.to_owned(),
        place: format!(
            "{}.{}.{}",
            instance.instance_group, instance.network, instance.deployment
        ),
        ip: instance.ip,
        health: state.label(),
        kept: false,
    }
}

fn placeholder_criterion(instances: &InstanceIndex, placeholder: PlaceholderFilter) -> String {
    match placeholder {
        PlaceholderFilter::Number(number) => {
            format!("num_id {}", instances.num_id.dictionary.text(number))
        }
        PlaceholderFilter::Index(index) => format!("index {index}"),
        PlaceholderFilter::Zone(zone) => {
            format!("availability zone {}", instances.az.dictionary.text(zone))
        }
        PlaceholderFilter::Network(network) => {
            format!("network {}", instances.places.networks.text(network))
        }
    }
}

/// Returns the form of a parsed name, in words.
fn form(question: &QueryTarget<'_>) -> &'static str {
    match question {
        QueryTarget::Agent(_) => "agent",
        QueryTarget::Anywhere(None) => "every instance",
        QueryTarget::Anywhere(Some(_)) => "outside all domains: an instance id anywhere",
        QueryTarget::Within(_, QueryCriteria { place: Some(_), .. }) => "long form",
        QueryTarget::Within(_, _) => "short form",
    }
}

impl TargetExplanation {
    fn new(target: String, form: &'static str) -> Self {
        Self {
            target,
            form,
            ..Self::default()
        }
    }

    /// Adds a criterion unless it has no values.
    fn say(&mut self, what: &str, values: &[&[u8]]) {
        if !values.is_empty() {
            let mut texts = Vec::new();
            for value in values {
                texts.push(String::from_utf8_lossy(value));
            }
            self.criteria.push(format!("{what} {}", texts.join(" or ")));
        }
    }

    fn say_criteria(&mut self, criteria: &QueryCriteria<'_>) {
        let QueryCriteria {
            id,
            filter,
            group,
            place,
        } = criteria;
        let Filter {
            az_ids,
            indexes,
            num_ids,
            network_ids,
            strategy: _,
            synchronous: _,
        } = filter;
        self.say("instance id", id.as_slice());
        self.say("group id", group.as_slice());
        if let Some([instance_group, network, deployment]) = place {
            self.say_pattern("instance group", instance_group);
            self.say_pattern("network", network);
            self.say_pattern("deployment", deployment);
        }
        self.say("az_id", az_ids);
        self.say("index", indexes);
        self.say("num_id", num_ids);
        self.say("network_id", network_ids);
    }

    fn say_pattern(&mut self, what: &str, pattern: &Pattern<'_>) {
        match pattern {
            Pattern::Any => {}
            Pattern::Exact(text) => self.say(what, &[text]),
            Pattern::Prefix(text) => self.say(&format!("{what} beginning with"), &[text]),
            Pattern::Suffix(text) => self.say(&format!("{what} ending in"), &[text]),
            Pattern::Nothing => self
                .criteria
                .push(format!("{what} with an inner star, which matches none")),
        }
    }
}

impl HealthState {
    /// Returns the state as a word, as used by the API.
    pub fn label(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Failing => "failing",
            Self::Unknown => "unknown",
            Self::Unchecked => "unchecked",
        }
    }
}

/// Maximum number of matches in the formatted text.
const MAX_SHOWN: usize = 20;

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.name)?;
        match &self.zone {
            Some(zone) => writeln!(f, "  ours, by {zone}")?,
            None => writeln!(
                f,
                "  not a local name: handlers and recursors are queried. In the records it would be:"
            )?,
        }
        if let Some(alias) = &self.alias {
            writeln!(f, "  alias {alias} with {} targets", self.targets.len())?;
        }
        for target in &self.targets {
            write!(f, "{target}")?;
        }
        // Of a name that is not local, only handlers and recursors know the result.
        let Some(result) = &self.result else {
            return Ok(());
        };
        write!(f, "  {}", result.rcode)?;
        for address in &result.addresses {
            write!(f, " {address}")?;
        }
        writeln!(f)?;
        match (result.tracked, result.synchronous) {
            (false, _) => writeln!(f, "  a query starts no health checks"),
            (true, false) => writeln!(f, "  a query starts health checks"),
            (true, true) => writeln!(
                f,
                "  a query starts health checks and waits for the first ones"
            ),
        }
    }
}

impl fmt::Display for TargetExplanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            target,
            form,
            domain,
            criteria,
            filter,
            problem,
            matches,
        } = self;
        write!(f, "  {target}: {form}")?;
        if let Some(domain) = domain {
            write!(f, " in {domain}")?;
        }
        writeln!(f)?;
        if let Some(problem) = problem {
            writeln!(f, "    {problem}")?;
        }
        if !criteria.is_empty() {
            writeln!(f, "    {}", criteria.join("; "))?;
        }
        if let Some(filter) = filter {
            writeln!(f, "    {} matches, health filter {filter}", matches.len())?;
        }
        for found in matches.iter().take(MAX_SHOWN) {
            let address = found
                .ip
                .map_or_else(|| "no address".to_owned(), |ip| ip.to_string());
            let sign = if found.kept { '+' } else { '-' };
            writeln!(
                f,
                "    {sign} {address} {} {} ({})",
                found.id, found.place, found.health
            )?;
        }
        if matches.len() > MAX_SHOWN {
            writeln!(f, "    and {} more", matches.len() - MAX_SHOWN)?;
        }
        Ok(())
    }
}
