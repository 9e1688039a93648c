//! Runs the rounds of one provider.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

use parking_lot::Mutex;
use tokio::sync::{Notify, watch};

use super::{LaunchOptions, ProviderState, launch};
use crate::{
    api::Desk,
    engine::{Engine, Report},
    guard::Refusal,
    metrics::Metrics,
    plan::Reason,
    publication::Target,
    record::RecordType,
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
    pub(super) desk: Arc<Desk>,
    pub(super) board: Board,
    pub(super) options: LaunchOptions,
}

/// Reconciles until the sender of targets is dropped. A round in progress is completed.
pub(super) async fn work(shared: Arc<Shared>, name: String, mut targets: watch::Receiver<Arc<Target>>) {
    let mut launched: Option<(Arc<Target>, Engine)> = None;
    loop {
        let target = targets.borrow_and_update().clone();
        let begun = Instant::now();
        if launched.as_ref().is_some_and(|(before, _)| before.record != target.record) {
            launched = None;
        }
        if launched.is_none() {
            match launch(&target.record, &target.name(), &shared.options) {
                Ok(engine) => launched = Some((target.clone(), engine)),
                Err(problem) => shared.report(&name, ProviderState::failed(&problem), Err(problem)),
            }
        }
        if let Some((_, engine)) = &mut launched {
            shared.round(&name, engine, &target).await;
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
            () = tokio::time::sleep(pause) => {}
        }
    }
}

impl Shared {
    async fn round(&self, name: &str, engine: &mut Engine, target: &Target) {
        let metrics = self.desk.metrics();
        let is_dry = target.record.parameters.is_set("dry-run");
        let result = match is_dry {
            false => engine.reconcile(&target.desired, None, &|_| {}).await,
            true => dry_round(name, engine, target).await,
        };
        let labels = &[name];
        metrics.last_reconcile.with_label_values(labels).set(seconds_now());
        let counts = crate::runner::run::count_types(&target.desired.records);
        match result {
            Ok(report) => {
                let state = ProviderState::of_report(&report);
                self.count(name, &report);
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
            }
            Err(error) => {
                metrics.registry_errors.with_label_values(labels).inc();
                self.report(name, ProviderState::failed(&error), Err(error.to_string()));
            }
        }
    }

    fn count(&self, name: &str, report: &Report) {
        let metrics = self.desk.metrics();
        let labels = &[name];
        let sum = |count: &dyn Fn(&crate::engine::ZoneReport) -> usize| -> i64 {
            i64::try_from(report.zones.iter().map(count).sum::<usize>()).unwrap_or(i64::MAX)
        };
        metrics.registry_endpoints.with_label_values(labels).set(sum(&|zone| zone.records));
        metrics.registry_records.with_label_values(labels).set(sum(&|zone| zone.owned));
        let is_foreign = |zone: &crate::engine::ZoneReport| {
            zone.notes.iter().filter(|note| matches!(note.reason, Reason::Foreign { .. })).count()
        };
        metrics.skipped.with_label_values(labels).set(sum(&is_foreign));
        let waiting = |zone: &crate::engine::ZoneReport| match zone.refusal {
            Some(Refusal::EmptySource { deletions } | Refusal::TooMany { deletions, .. }) => deletions,
            None => 0,
        };
        metrics.awaiting_confirmation.with_label_values(labels).set(sum(&waiting));
        if report.applied() == 0 && report.is_complete() {
            metrics.no_op_runs.with_label_values(labels).inc();
        } else if report.applied() > 0 {
            tracing::info!(provider = name, changes = report.applied(), rounds = report.rounds, "published");
        }
    }

    fn report(&self, name: &str, state: ProviderState, health: Result<(), String>) {
        let errors = self.desk.metrics().soft_errors.with_label_values(&[name]);
        match &health {
            Ok(()) => errors.set(0),
            Err(_) => errors.inc(),
        }
        let mut states = self.board.states.lock();
        if states.get(name) != Some(&state) {
            for problem in &state.general {
                tracing::warn!(provider = name, "{problem}");
            }
            let known: BTreeSet<&String> = states
                .get(name)
                .into_iter()
                .flat_map(|state| &state.names)
                .map(|(_, problem)| problem)
                .collect();
            for (_, problem) in state.names.iter().filter(|(_, problem)| !known.contains(problem)) {
                tracing::warn!(provider = name, "{problem}");
            }
            states.insert(name.to_owned(), state);
        }
        drop(states);
        self.desk.note_round(name, health);
        self.board.changed.notify_one();
    }
}

/// Plans and logs without applying changes.
async fn dry_round(
    name: &str,
    engine: &mut Engine,
    target: &Target,
) -> Result<Report, crate::provider::ProviderError> {
    let survey = engine.survey().await?;
    let planned = engine.plan(&survey, &target.desired);
    for action in planned.zones.iter().flat_map(|zone| zone.plan.actions()) {
        tracing::info!(provider = name, "dry run: {}", crate::diff::line(action));
    }
    let zones = survey.iter().map(|zone| crate::engine::ZoneReport {
        id: zone.id.clone(),
        failure: zone.view.as_ref().err().cloned(),
        owned: planned.zones.iter().find(|plan| plan.id == zone.id).map_or(0, |plan| plan.owned),
        ..crate::engine::ZoneReport::default()
    });
    Ok(Report { zones: zones.collect(), notes: planned.notes, rounds: 1 })
}

pub(super) fn seconds_now() -> f64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0.0, |elapsed| elapsed.as_secs_f64())
}

/// Types whose gauges are exposed even at zero.
pub(super) const SHOWN_TYPES: [RecordType; 3] = RecordType::DEFAULT_MANAGED;
