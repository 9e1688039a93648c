//! Runs the rounds of one provider.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

use parking_lot::Mutex;
use tokio::sync::{Notify, watch};

use super::{LaunchOptions, ProviderState, launch, report::shortened};
use crate::{
    api::{ApiState, Confirmation, Confirmed},
    engine::{Engine, Report},
    guard::Refusal,
    metrics::Metrics,
    plan::Reason,
    publication::Target,
};

/// Minimum pause between two rounds.
const SHORTEST_PAUSE: Duration = Duration::from_secs(1);

/// Results of all providers, and a signal of changes.
#[derive(Debug, Default)]
pub(super) struct Board {
    pub(super) states: Mutex<BTreeMap<String, ProviderState>>,
    pub(super) changed: Notify,
}

pub(super) struct Shared {
    pub(super) api_state: Arc<ApiState>,
    pub(super) board: Board,
    pub(super) options: LaunchOptions,
}

/// Reconciles until the sender of targets is dropped. A round in progress is completed.
pub(super) async fn work(shared: Arc<Shared>, name: String, mut targets: watch::Receiver<Arc<Target>>) {
    let mut launched: Option<(Arc<Target>, Engine)> = None;
    let mut confirmations = shared.api_state.receive_confirmations(&name);
    let mut confirmation: Option<Confirmation> = None;
    loop {
        let target = targets.borrow_and_update().clone();
        let begun = Instant::now();
        let is_outdated = |before: &Target| before.record != target.record || before.rival != target.rival;
        if launched.as_ref().is_some_and(|(before, _)| is_outdated(before)) {
            launched = None;
        }
        if launched.is_none() {
            match launch(&target, &shared.options) {
                Ok(engine) => launched = Some((target.clone(), engine)),
                Err(problem) => {
                    let state = ProviderState::failed(&problem, &shared.state(&name));
                    shared.report(&name, state, Err(problem));
                }
            }
        }
        let mut changed = 0;
        if let Some((_, engine)) = &mut launched {
            let confirmed = confirmation.as_ref().map(|confirmation| confirmation.deletions);
            changed = shared.round(&name, engine, &target, confirmed).await;
        }
        if let Some(Confirmation { deletions: _, reply }) = confirmation.take() {
            let problems = shared.state(&name).problems(&target);
            // The client may have gone.
            let _ = reply.send(Confirmed { changed, problems });
        }
        let interval = target.record.parameters.duration("interval").unwrap_or(Duration::from_secs(60));
        // Spreads publishers that started together.
        let pause = interval.max(SHORTEST_PAUSE).mul_f64(0.9 + 0.2 * fastrand::f64());
        tokio::select! {
            changed = targets.changed() => {
                if changed.is_err() {
                    return;
                }
                tokio::time::sleep(SHORTEST_PAUSE.saturating_sub(begun.elapsed())).await;
            }
            received = confirmations.recv() => confirmation = received,
            () = tokio::time::sleep(pause) => {}
        }
    }
}

impl Shared {
    fn state(&self, name: &str) -> ProviderState {
        self.board.states.lock().get(name).cloned().unwrap_or_default()
    }

    /// Runs one round. Returns the number of changed names.
    async fn round(
        &self,
        name: &str,
        engine: &mut Engine,
        target: &Target,
        confirmed: Option<usize>,
    ) -> usize {
        let metrics = self.api_state.metrics();
        let is_dry = target.record.parameters.is_set("dry-run");
        let result = match is_dry {
            false => engine.reconcile(&target.desired, confirmed, &|_| {}).await,
            true => dry_round(name, engine, target).await,
        };
        self.options.save_deletions(name, &engine.deletions);
        let labels = &[name];
        metrics.last_reconcile.with_label_values(labels).set(seconds_now());
        // Without a zero the first failure would be no increase.
        metrics.registry_errors.with_label_values(labels);
        let counts = Metrics::count_types(&target.desired.records);
        match result {
            Ok(report) => {
                let state = ProviderState::of_report(&report, &self.state(name));
                self.count(name, &report, &state);
                let health = match report.is_complete() {
                    true => {
                        metrics.last_sync.with_label_values(labels).set(seconds_now());
                        Metrics::set_types(&metrics.verified_records, Some(name), &counts);
                        Ok(())
                    }
                    false => Err(state
                        .general
                        .first()
                        .or(state.names.first().map(|(_, problem)| problem))
                        .cloned()
                        .unwrap_or_default()),
                };
                self.report(name, state, health);
                report.applied()
            }
            Err(error) => {
                metrics.registry_errors.with_label_values(labels).inc();
                let state = ProviderState::failed(&error, &self.state(name));
                self.report(name, state, Err(error.to_string()));
                0
            }
        }
    }

    fn count(&self, name: &str, report: &Report, state: &ProviderState) {
        let metrics = self.api_state.metrics();
        let labels = &[name];
        let sum = |count: &dyn Fn(&crate::engine::ZoneReport) -> usize| -> i64 {
            i64::try_from(report.zones.iter().map(count).sum::<usize>()).unwrap_or(i64::MAX)
        };
        // An unavailable zone keeps its last counts.
        let records: usize = state.zones.values().map(|counts| counts.records).sum();
        let gauge = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
        metrics.registry_endpoints.with_label_values(labels).set(gauge(records));
        metrics.registry_records.with_label_values(labels).set(gauge(state.owned()));
        if report.zones.iter().any(|zone| zone.failure.is_some()) {
            metrics.registry_errors.with_label_values(labels).inc();
        }
        let is_foreign = |zone: &crate::engine::ZoneReport| {
            zone.notes.iter().filter(|note| matches!(note.reason, Reason::Foreign { .. })).count()
        };
        metrics.skipped.with_label_values(labels).set(sum(&is_foreign));
        let waiting = |zone: &crate::engine::ZoneReport| zone.refusal.as_ref().map_or(0, Refusal::deletions);
        metrics.awaiting_confirmation.with_label_values(labels).set(sum(&waiting));
        if report.applied() == 0 && report.is_complete() {
            metrics.no_op_runs.with_label_values(labels).inc();
        } else if report.applied() > 0 {
            tracing::info!(provider = name, changes = report.applied(), rounds = report.rounds, "published");
        }
    }

    fn report(&self, name: &str, state: ProviderState, health: Result<(), String>) {
        let errors = self.api_state.metrics().soft_errors.with_label_values(&[name]);
        match &health {
            Ok(()) => errors.set(0),
            Err(_) => errors.inc(),
        }
        let mut states = self.board.states.lock();
        if states.get(name) != Some(&state) {
            let before = states.remove(name).unwrap_or_default();
            let known: BTreeSet<&String> =
                before.general.iter().chain(before.names.iter().map(|(_, problem)| problem)).collect();
            let names = state.names.iter().map(|(_, problem)| problem);
            let new = state.general.iter().chain(names).filter(|problem| !known.contains(problem));
            // One line for each of 10,000 names would bury the cause.
            for problem in shortened(new) {
                tracing::warn!(provider = name, "{problem}");
            }
            states.insert(name.to_owned(), state);
        }
        drop(states);
        self.api_state.note_round(name, health);
        self.board.changed.notify_one();
    }
}

/// Plans and logs without applying changes.
async fn dry_round(
    name: &str,
    engine: &mut Engine,
    target: &Target,
) -> Result<Report, crate::provider::ProviderError> {
    let listing = engine.list().await?;
    engine.prepare(&target.desired).await?;
    let planned = engine.plan(&listing, &target.desired);
    for action in planned.zones.iter().flat_map(|zone| zone.plan.actions()) {
        tracing::info!(provider = name, "dry run: {}", crate::diff::line(action));
    }
    let zones = listing.iter().map(|zone| {
        let plan = planned.zones.iter().find(|plan| plan.id == zone.id);
        crate::engine::ZoneReport {
            id: zone.id.clone(),
            failure: zone.view.as_ref().err().cloned(),
            records: zone.view.as_ref().map_or(0, |view| view.records.len()),
            owned: plan.map_or(0, |plan| plan.owned),
            notes: plan.map_or_else(Vec::new, |plan| plan.plan.notes.clone()),
            ..crate::engine::ZoneReport::default()
        }
    });
    Ok(Report { zones: zones.collect(), notes: planned.notes, rounds: 1 })
}

pub(super) fn seconds_now() -> f64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0.0, |elapsed| elapsed.as_secs_f64())
}
