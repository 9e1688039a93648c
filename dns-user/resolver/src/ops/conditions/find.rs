//! Finds the conditions. Each function returns the finding while its condition holds; the table adds
//! consequence and remedy.

use std::time::Duration;

use dns_health::HealthOutage;
use dns_kit::tls::RotatingTls;
use dns_upstream::{RecursorOutage, RecursorStatus};

use super::{Facts, events::CountedEvent};
use crate::ops::service_status::{FastPathOff, Kind, Part};

/// Silence of the health checks from which on they stand still. Interfaces stop answering after half a
/// lease, 5 s by default.
const MAX_HEALTH_SILENCE: Duration = Duration::from_secs(5);

/// Time without a turn of the main loop from which on it stands still: longer than any reload, whatever hangs.
pub(in crate::ops) const MAX_LOOP_SILENCE: Duration = Duration::from_secs(60);

/// Share of the map of names that may be used.
const MAX_MAP_FILL: f64 = 0.9;

//----------- Sockets and files ----------------------------------------------

pub(super) fn silent_sockets(facts: &Facts<'_>) -> Option<String> {
    let problem = facts.report.upcheck_error.as_ref()?;
    Some(format!("no up-check is answered ({problem})"))
}

pub(super) fn loop_stalled(facts: &Facts<'_>) -> Option<String> {
    let silence = facts.report.last_turn?.elapsed();
    (silence >= MAX_LOOP_SILENCE)
        .then(|| format!("the main loop stands still ({} s)", silence.as_secs()))
}

pub(super) fn silent_address(facts: &Facts<'_>) -> Option<String> {
    let silent = &facts.report.silent_addresses;
    if silent.is_empty() {
        return None;
    }
    Some(format!("not every address answers ({})", silent.join("; ")))
}

pub(super) fn restart_pending(facts: &Facts<'_>) -> Option<String> {
    let pending = &facts.report.pending_restart;
    if pending.is_empty() {
        return None;
    }
    Some(format!("changed since the start ({})", pending.join(", ")))
}

pub(super) fn records_empty(facts: &Facts<'_>) -> Option<String> {
    let state = facts.report.files.get(Kind::Records.label())?;
    // An unreadable file is a condition of its own.
    if facts.report.instances > 0 || !state.errors.is_empty() {
        return None;
    }
    let file = state.files.first()?.display();
    Some(format!("{file} has no instance"))
}

pub(super) fn unusable(facts: &Facts<'_>, kind: Kind) -> Option<String> {
    let problem = facts.report.files.get(kind.label())?.problem()?;
    Some(format!("{problem}; the newest version is not in use"))
}

//----------- Fast path ------------------------------------------------------

pub(super) fn fast_path_off(facts: &Facts<'_>) -> Option<String> {
    match facts.report.fast_path_off.as_ref()? {
        FastPathOff::Intended(_) => None,
        FastPathOff::Failed(why) => Some(format!("off: {why}")),
    }
}

pub(super) fn fast_path_unserved(facts: &Facts<'_>) -> Option<String> {
    // A part that is off serves nothing, and its reason is given already.
    if facts.report.fast_path_off.is_some() {
        return None;
    }
    let why = facts.fast_path.unserved()?;
    Some(format!("on no interface: {why}"))
}

pub(super) fn attacher_lost(facts: &Facts<'_>) -> Option<String> {
    let problem = facts.report.attacher_problem.as_ref()?;
    Some(format!("attached programs have no attacher ({problem})"))
}

pub(super) fn too_many_addresses(facts: &Facts<'_>) -> Option<String> {
    let omitted = facts.fast_path.get()?.status().interfaces.omitted_endpoints;
    (omitted > 0).then(|| format!("too many listen addresses, {omitted} of them omitted"))
}

pub(super) fn map_nearly_full(facts: &Facts<'_>) -> Option<String> {
    let names = facts.fast_path.get()?.status().names;
    let used = names.published + names.learned;
    let fill = used as f64 / names.max_names.max(1) as f64;
    // A small map refuses names before it is full.
    let without_room = names.unfitting.no_room;
    if fill <= MAX_MAP_FILL && without_room == 0 {
        return None;
    }
    Some(format!(
        "the map of names is nearly full ({used} of {}, {without_room} without room)",
        names.max_names
    ))
}

pub(super) fn sheds(facts: &Facts<'_>) -> Option<String> {
    let dropped = facts.events.recent(CountedEvent::ShedQuery)?;
    Some(format!(
        "interfaces drop queries ({dropped} since the start)"
    ))
}

//----------- Health checks --------------------------------------------------

pub(super) fn health_stalled(facts: &Facts<'_>) -> Option<String> {
    let silence = facts.health?.silent_for();
    (silence >= MAX_HEALTH_SILENCE)
        .then(|| format!("the health checks stand still ({} s)", silence.as_secs()))
}

/// Returns the outage of health checks if it is of one kind.
pub(super) fn health_outage(facts: &Facts<'_>, is: fn(&HealthOutage) -> bool) -> Option<String> {
    let outage = facts.health_outage.as_ref()?;
    is(outage).then(|| outage.to_string())
}

//----------- Upstreams ------------------------------------------------------

pub(super) fn consul_outdated(facts: &Facts<'_>) -> Option<String> {
    let problem = facts.consul_problem.as_ref()?;
    Some(format!("not current: {problem}"))
}

pub(super) fn recursor_own(facts: &Facts<'_>) -> Option<String> {
    let own = addresses(&facts.recursors, |recursor| recursor.is_own)?;
    Some(format!("{own} is an address of this server"))
}

pub(super) fn recursors_unknown(facts: &Facts<'_>) -> Option<String> {
    (facts.recursor_outage == Some(RecursorOutage::Unknown))
        .then(|| "no recursor is known".to_owned())
}

pub(super) fn recursors_silent(facts: &Facts<'_>) -> Option<String> {
    match facts.recursor_outage.as_ref()? {
        RecursorOutage::Silent(addresses) => Some(format!("no recursor answers ({addresses})")),
        RecursorOutage::Unknown | RecursorOutage::Failing(_) => None,
    }
}

pub(super) fn recursors_failing(facts: &Facts<'_>) -> Option<String> {
    match facts.recursor_outage.as_ref()? {
        RecursorOutage::Failing(failures) => Some(format!("every recursor fails ({failures})")),
        RecursorOutage::Unknown | RecursorOutage::Silent(_) => None,
    }
}

pub(super) fn recursor_out(facts: &Facts<'_>) -> Option<String> {
    // If all are out, that is said instead.
    if facts.recursor_outage.is_some() {
        return None;
    }
    let out = addresses(&facts.recursors, RecursorStatus::is_out)?;
    // A handler with a single recursor has a condition of its own.
    facts
        .upstreams
        .handler_outages()
        .is_empty()
        .then(|| format!("some recursors fail ({out})"))
}

pub(super) fn recursor_drops_edns(facts: &Facts<'_>) -> Option<String> {
    let dropping = addresses(&facts.recursors, |recursor| recursor.drops_edns)?;
    Some(format!("{dropping} drops EDNS"))
}

/// Returns the addresses of the recursors that `is` selects; `None` without one.
fn addresses(recursors: &[RecursorStatus], is: fn(&RecursorStatus) -> bool) -> Option<String> {
    let selected: Vec<&str> = recursors
        .iter()
        .filter(|recursor| is(recursor))
        .map(|recursor| &*recursor.address)
        .collect();
    (!selected.is_empty()).then(|| selected.join(", "))
}

pub(super) fn handler_fails(facts: &Facts<'_>) -> Option<String> {
    let outages = facts.upstreams.handler_outages();
    if outages.is_empty() {
        return None;
    }
    let handlers: Vec<String> = outages
        .into_iter()
        .map(|(domain, why)| format!("{domain} ({why})"))
        .collect();
    Some(format!("no answer for {}", handlers.join(", ")))
}

pub(super) fn clients_limited(facts: &Facts<'_>) -> Option<String> {
    let mut clients = Vec::new();
    for (_, status) in facts.upstreams.admissions() {
        for client in status.limited {
            clients.push(client.client.to_string());
        }
    }
    let first = clients.first()?;
    Some(format!(
        "queries of {} clients are refused, among them {first}",
        clients.len()
    ))
}

//----------- Certificates ---------------------------------------------------

pub(super) fn certificate_invalid(facts: &Facts<'_>) -> Option<String> {
    of_certificates(facts, |tls| tls.invalid(facts.now))
}

pub(super) fn certificate_unusable(facts: &Facts<'_>) -> Option<String> {
    of_certificates(facts, RotatingTls::unusable_files)
}

pub(super) fn certificate_ends_soon(facts: &Facts<'_>) -> Option<String> {
    of_certificates(facts, |tls| tls.ends_soon(facts.now))
}

fn of_certificates(
    facts: &Facts<'_>,
    problem: impl Fn(&RotatingTls) -> Option<String>,
) -> Option<String> {
    let problems: Vec<String> = facts
        .certificates
        .iter()
        .filter_map(|tls| problem(tls))
        .collect();
    (!problems.is_empty()).then(|| problems.join("; "))
}

//----------- Parts for operators --------------------------------------------

pub(super) fn off(facts: &Facts<'_>, part: Part) -> Option<String> {
    let mut parts = facts.report.parts_off.iter();
    let (_, why) = parts.find(|(off, _)| *off == part)?;
    Some(why.clone())
}

pub(super) fn dnstap_closed(_: &Facts<'_>) -> Option<String> {
    let dnstap = dns_dnstap::get()?;
    if dnstap.is_open() {
        return None;
    }
    let lost = dnstap.lost();
    Some(match dnstap.problem() {
        Some(why) => format!("its output is not open ({why}; {lost} messages lost)"),
        None => format!("its output is not open ({lost} messages lost)"),
    })
}

pub(super) fn panicked(facts: &Facts<'_>) -> Option<String> {
    let panics = facts.events.recent(CountedEvent::Panic)?;
    Some(format!("a panic was caught ({panics} since the start)"))
}

pub(super) fn connections_refused(facts: &Facts<'_>) -> Option<String> {
    let refused = facts.events.recent(CountedEvent::RefusedConnection)?;
    Some(format!(
        "the kernel refused TCP connections ({refused} since the start)"
    ))
}

pub(super) fn log_lines_lost(facts: &Facts<'_>) -> Option<String> {
    let lost = facts.events.recent(CountedEvent::LostLogLine)?;
    Some(format!("log lines were lost ({lost} since the start)"))
}
