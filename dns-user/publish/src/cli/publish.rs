//! `plan`, `apply`, `check`, `render` and `status`.

use std::{
    collections::BTreeMap,
    fs,
    io::{self, IsTerminal as _},
    os::unix::net::UnixStream,
    path::PathBuf,
    process::ExitCode,
    time::Duration,
};

use anyhow::Context as _;
use hyper::{Method, StatusCode};
use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use serde_json::{Value, json};

use super::{Colour, Selection, complain, complain_of, exit_code, print, print_json, read_sources};
use crate::{
    api::ConfirmRequest,
    config::Config,
    control,
    engine::{Engine, Planned, ZoneListing},
    plan::Action,
    provider::ProviderError,
    publication::Target,
    render,
    runner::{LaunchOptions, alias_writer, launch, options_problems},
    status::{Confirmed, Overview, ProviderOverview, ProviderState},
};

#[derive(Debug, clap::Args)]
pub(super) struct PlanArguments {
    #[command(flatten)]
    selection: Selection,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    /// When to use colour
    #[arg(long, value_enum, default_value_t, value_name = "WHEN")]
    color: Colour,
}

#[derive(Debug, clap::Args)]
pub(super) struct Apply {
    #[command(flatten)]
    selection: Selection,
    /// Allow up to this many deletions per provider, even if no document wants a record
    #[arg(long, value_name = "N")]
    confirm_deletions: Option<usize>,
    /// Only show the changes, as `plan` does
    #[arg(long)]
    dry_run: bool,
}

/// The engine of a target and its listing.
pub(super) type Prepared = (Engine, Vec<ZoneListing>);

/// Maximum wait for the round of a running publisher.
const ROUND: Duration = Duration::from_mins(10);

/// Creates the engine of a target and lists its zones.
pub(super) async fn prepare(
    target: &Target,
    options: &LaunchOptions,
) -> Result<Prepared, ProviderError> {
    let mut engine = launch(target, options)?;
    let listing = engine.list().await?;
    engine.prepare(&target.desired).await?;
    Ok((engine, listing))
}

pub(super) fn unlisted(listing: &[ZoneListing]) -> Vec<String> {
    let mut failed = Vec::new();
    for zone in listing {
        if let Err(error) = &zone.content {
            failed.push(format!("zone {}: {error}", zone.id));
        }
    }
    failed
}

fn holds_back(planned: &Planned, target: &Target) -> bool {
    planned
        .notes()
        .any(|note| target.origins.contains_key(&note.name))
}

impl PlanArguments {
    pub(super) async fn run(self, config: &Config) -> anyhow::Result<ExitCode> {
        let Self {
            selection,
            json,
            color,
        } = self;
        let options = LaunchOptions::of(config)?;
        let (read, has_problems) = read_sources(config).await?;
        let mut failed = has_problems;
        let mut changes = false;
        let mut objects = BTreeMap::new();
        let mut text = String::new();
        for target in selection.of(&read)? {
            let (planned, failures) = match prepare(target, &options).await {
                Ok((engine, listing)) => {
                    (engine.plan(&listing, &target.desired), unlisted(&listing))
                }
                Err(problem) => (Planned::default(), vec![problem.to_string()]),
            };
            failed |= !failures.is_empty() || holds_back(&planned, target);
            changes |= !planned.is_empty();
            text.push_str(&plan_text(&target.name(), &planned, &failures, None, color));
            objects.insert(target.name(), plan_json(&planned, &failures));
        }
        // Both were made for all providers first: half a JSON document is none.
        if json {
            print_json(&objects)?
        } else {
            print(&text)?
        }
        // As with `terraform plan -detailed-exitcode`, a script tells changes from a failure.
        Ok(match (failed, changes) {
            (true, _) => ExitCode::FAILURE,
            (false, true) => ExitCode::from(2),
            (false, false) => ExitCode::SUCCESS,
        })
    }
}

impl Apply {
    pub(super) async fn run(
        self,
        config: &Config,
        bars: &MultiProgress,
    ) -> anyhow::Result<ExitCode> {
        let Self {
            selection,
            confirm_deletions,
            dry_run,
        } = self;
        if dry_run {
            return PlanArguments {
                selection,
                json: false,
                color: Colour::Auto,
            }
            .run(config)
            .await;
        }
        let options = LaunchOptions::of(config)?;
        let (read, mut failed) = read_sources(config).await?;
        let targets = selection.of(&read)?;
        if let Some(deletions) = confirm_deletions
            // Without a running publisher the command publishes itself.
            && UnixStream::connect(&config.socket).is_ok()
        {
            let providers = targets.iter().map(|target| target.name()).collect();
            let request = ConfirmRequest {
                deletions,
                providers,
            };
            failed |= !confirm(config, request).await?;
            return Ok(exit_code(failed));
        }
        for target in targets {
            let name = target.name();
            let problems = match prepare(target, &options).await {
                // The record itself says so, to `run` as well.
                Ok((engine, listing)) if target.record.parameters.is_set("dry-run") => {
                    let planned = engine.plan(&listing, &target.desired);
                    let failures = unlisted(&listing);
                    print(&plan_text(&name, &planned, &failures, None, Colour::Auto))?;
                    eprintln!("{name}: nothing changed, because its parameter dry-run is true");
                    failures
                }
                Ok(prepared) => publish(target, prepared, confirm_deletions, bars).await?,
                Err(problem) => vec![problem.to_string()],
            };
            failed |= complain_of(&name, &problems);
        }
        Ok(exit_code(failed))
    }
}

/// Lets the running publisher make the deletions: it has the credentials, and would otherwise
/// compete with this process. Returns whether everything is published.
async fn confirm(config: &Config, request: ConfirmRequest) -> anyhow::Result<bool> {
    let body = serde_json::to_vec(&request)?;
    let (status, body) =
        control::call(ROUND, &config.socket, Method::POST, "/confirm", body.into()).await?;
    if status != StatusCode::OK {
        anyhow::bail!(
            "{}: {status}: {}",
            config.socket.display(),
            String::from_utf8_lossy(&body)
        );
    }
    let results: BTreeMap<String, Confirmed> =
        serde_json::from_slice(&body).context("cannot parse the response")?;
    let mut is_done = true;
    for (name, Confirmed { changed, problems }) in &results {
        print(&format!("{name}: {changed} names changed\n"))?;
        is_done &= !complain_of(name, problems);
    }
    Ok(is_done)
}

/// Publishes to one provider, with a progress bar on a terminal. Returns the problems.
async fn publish(
    target: &Target,
    (mut engine, listing): Prepared,
    confirmed: Option<usize>,
    bars: &MultiProgress,
) -> anyhow::Result<Vec<String>> {
    let style =
        ProgressStyle::with_template("{msg} {bar:40} {pos}/{len} names, {elapsed}, {eta} left")?;
    let bar = ProgressBar::hidden();
    // Only a visible bar needs the number of changes, which takes a plan.
    if io::stderr().is_terminal() {
        let planned = engine.plan(&listing, &target.desired);
        let changes: usize = planned
            .zones
            .iter()
            .map(|zone| zone.plan.changes.len())
            .sum();
        bar.set_length(changes as u64);
    }
    let bar = bars.add(bar.with_style(style).with_message(target.name()));
    let report = engine
        .reconcile_listed(listing, &target.desired, confirmed, &|done: usize| {
            bar.inc(done as u64)
        })
        .await;
    bar.finish_and_clear();
    Ok(match report {
        Ok(report) => {
            print(&format!(
                "{}: {} names changed\n",
                target.name(),
                report.applied()
            ))?;
            let state = ProviderState::of_report(&report, &ProviderState::default());
            // Remarks concern names that no document wants, so they fail nothing.
            complain_of(&target.name(), &state.remarks(target));
            state.problems(target)
        }
        Err(error) => vec![error.to_string()],
    })
}

#[derive(Debug, clap::Args)]
pub(super) struct Render {
    #[command(flatten)]
    selection: Selection,
    /// Folder for the manifests; default: standard output
    #[arg(long, value_name = "FOLDER")]
    output: Option<PathBuf>,
    /// Container image of external-dns
    #[arg(long, value_name = "IMAGE", default_value = render::IMAGE)]
    image: String,
}

/// `status`. Exit code 1 if something is not published.
#[derive(Debug, clap::Args)]
pub(super) struct Status {
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Checks everything that can be checked without contacting a provider.
pub(super) async fn check(config: &Config) -> anyhow::Result<ExitCode> {
    let options = LaunchOptions::of(config)?;
    let (read, mut failed) = read_sources(config).await?;
    let mut problems = options_problems(config, &read.publication);
    if let Some(webhook) = &config.webhook
        && let Err(problem) = alias_writer(config, webhook)
    {
        problems.push(problem.to_string());
    }
    for problem in &problems {
        complain(problem);
    }
    failed |= !problems.is_empty();
    for target in read.publication.targets.values() {
        let name = target.name();
        let problems = match launch(target, &options) {
            Ok(engine) => engine.unfit(&target.desired),
            Err(problem) => vec![problem.to_string()],
        };
        failed |= complain_of(&name, &problems);
        for remark in target.record.remarks() {
            print(&format!("{name}: {remark}\n"))?;
        }
        print(&format!(
            "{name}: {} record sets from {} documents\n",
            target.counts.values().sum::<usize>(),
            target.counts.len()
        ))?;
    }
    Ok(exit_code(failed))
}

impl Render {
    pub(super) async fn run(self, config: &Config) -> anyhow::Result<ExitCode> {
        let Self {
            selection,
            output,
            image,
        } = self;
        let (mut read, failed) = read_sources(config).await?;
        let selected = selection.of(&read)?;
        let selected: Vec<String> = selected.iter().map(|target| target.name()).collect();
        read.publication
            .targets
            .retain(|name, _| selected.contains(name));
        let manifests = render::manifests(&read.publication, &image)?;
        match output {
            None => print(&manifests.into_values().collect::<Vec<_>>().join("---\n"))?,
            Some(folder) => {
                fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
                for (name, text) in manifests {
                    let path = folder.join(name);
                    fs::write(&path, text).with_context(|| path.display().to_string())?;
                    print(&format!("{}\n", path.display()))?;
                }
            }
        }
        Ok(exit_code(failed))
    }
}

impl Status {
    pub(super) async fn run(self, config: &Config) -> anyhow::Result<ExitCode> {
        let body = control::get(&config.socket, "/status").await?;
        let overview: Overview =
            serde_json::from_slice(&body).context("cannot parse the response")?;
        let is_well = overview.problems.is_empty()
            && overview.providers.values().all(|provider| provider.synced)
            && overview
                .documents
                .iter()
                .all(|document| document.last_error.is_none());
        if self.json {
            print_json(&overview)?
        } else {
            print(&text(&overview))?
        }
        Ok(exit_code(!is_well))
    }
}

fn text(overview: &Overview) -> String {
    let Overview {
        providers,
        documents,
        problems,
    } = overview;
    let mut text = String::new();
    for (name, provider) in providers {
        let ProviderOverview {
            provider,
            synced,
            wanted,
            owned,
            problems,
            remarks,
        } = provider;
        let state = if *synced {
            "published"
        } else {
            "NOT PUBLISHED"
        };
        text.push_str(&format!(
            "{name} ({provider}): {state}, {wanted} record sets wanted, {owned} names owned\n"
        ));
        for problem in problems {
            text.push_str(&format!("  ! {problem}\n"));
        }
        for remark in remarks {
            text.push_str(&format!("  # {remark}\n"));
        }
    }
    for document in documents {
        let state = document.last_error.as_deref().unwrap_or("ok");
        text.push_str(&format!(
            "{} (generation {}): {state}\n",
            document.id, document.observed_generation
        ));
    }
    for problem in problems {
        text.push_str(&format!("! {problem}\n"));
    }
    if text.is_empty() {
        text.push_str("no documents; add some to the folder named in the configuration\n");
    }
    // Owners of other records have written a part of it.
    dns_core::terminal::lines(&text).into_owned()
}

/// Formats the plan of one provider as lines, coloured for terminals. `confirmed` is the number of
/// deletions that the operator allows.
pub(super) fn plan_text(
    name: &str,
    planned: &Planned,
    failures: &[String],
    confirmed: Option<usize>,
    colour: Colour,
) -> String {
    // Each with the code of its colour (ECMA-48).
    let mut lines = vec![("1", format!("{name}:"))];
    for zone in &planned.zones {
        for action in zone.plan.actions() {
            let code = match action {
                Action::Create(_) => "32",
                Action::Update { .. } => "33",
                Action::Delete(_) | Action::DropOrphan(_) => "31",
                Action::Release(_) => "36",
            };
            lines.push((code, format!("  {action}")));
        }
        for note in &zone.plan.notes {
            lines.push(("2", format!("  # {note}")));
        }
        if let Err(refusal) = planned.check(zone, confirmed) {
            lines.push(("1;31", format!("  ! {}: {refusal}", zone.id)));
        }
    }
    for note in &planned.notes {
        lines.push(("2", format!("  # {note}")));
    }
    for failure in failures {
        lines.push(("1;31", format!("  ! {failure}")));
    }
    let is_idle = lines.len() == 1;
    let is_coloured = colour.is_on();
    let mut shown = String::new();
    for (code, line) in lines {
        // Zones and servers belong to others, whose text must not reach the terminal raw.
        let line = dns_core::terminal::line(&line);
        shown.push_str(&if is_coloured {
            format!("\x1b[{code}m{line}\x1b[0m\n")
        } else {
            format!("{line}\n")
        });
    }
    if is_idle {
        shown.push_str("  nothing to do\n");
    }
    shown
}

fn plan_json(planned: &Planned, failures: &[String]) -> Value {
    let mut lines: BTreeMap<&str, Vec<Value>> = BTreeMap::new();
    // Each kind is in the document, also without actions.
    for kind in ["create", "update", "delete", "release", "drop_orphan"] {
        lines.insert(kind, Vec::new());
    }
    for action in planned.actions() {
        let (kind, line) = match action {
            Action::Create(record) => ("create", json!(record.to_string())),
            Action::Update { before, after } => {
                ("update", json!([before.to_string(), after.to_string()]))
            }
            Action::Delete(record) => ("delete", json!(record.to_string())),
            Action::Release(record) => ("release", json!(record.to_string())),
            Action::DropOrphan(record) => ("drop_orphan", json!(record.to_string())),
        };
        lines.entry(kind).or_default().push(line);
    }
    let mut refusals = Vec::new();
    for zone in &planned.zones {
        refusals.extend(planned.check(zone, None).err());
    }
    let mut document = json!(lines);
    document["notes"] = planned.notes().map(ToString::to_string).collect();
    document["needs_confirmation"] = refusals.iter().map(ToString::to_string).collect();
    document["errors"] = json!(failures);
    document
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::{
        documents::{DocumentId, DocumentStatus, Kind},
        engine::ZonePlan,
        plan::{NameChange, Note, Plan, Reason},
        provider::{Visibility, Zone},
        record::{Labels, Name, Record, RecordType},
    };

    fn record(name: &str) -> Record {
        let mut record = Record::parse(name, RecordType::A, ["192.0.2.1"]).unwrap();
        record.labels = Labels::of("me", "");
        record.ttl = Some(60);
        record
    }

    fn note(name: &str) -> Note {
        Note::on(&record(name), Reason::NoZone)
    }

    /// A plan with an action of each kind, notes, and deletions that need a confirmation.
    fn planned() -> Planned {
        let mut after = record("b.example.org");
        after.ttl = Some(61);
        let mut changes = Vec::new();
        for action in [
            Action::Create(record("a.example.org")),
            Action::Update {
                before: record("b.example.org"),
                after,
            },
            Action::Delete(record("c.example.org")),
            Action::Release(record("d.example.org")),
            Action::DropOrphan(record("e.example.org")),
        ] {
            let name = action.record().name.clone();
            let actions = vec![action];
            changes.push(NameChange { name, actions });
        }
        let zone = ZonePlan {
            id: "z1".to_owned(),
            plan: Plan {
                changes,
                notes: vec![note("f.example.org")],
            },
            owned: 5,
            recent: 0,
        };
        Planned {
            zones: vec![zone],
            notes: vec![note("g.example.org")],
            wanted: 0,
        }
    }

    const REFUSAL: &str = "the documents want no records, which would delete 1 names; check the documents, or allow \
                           it with `bosh-dns-publish apply --confirm-deletions 1`";

    #[test]
    fn plans_are_shown_as_lines() {
        let failures = ["zone z2: gone".to_owned()];
        let lines = [
            ("1", "shop/bind:".to_owned()),
            ("32", "  + a.example.org 60 A 192.0.2.1".to_owned()),
            ("33", "  ~ b.example.org A: ttl 60 -> 61".to_owned()),
            ("31", "  - c.example.org 60 A 192.0.2.1".to_owned()),
            (
                "36",
                "  = d.example.org 60 A 192.0.2.1: remains without an owner".to_owned(),
            ),
            (
                "31",
                "  - e.example.org A: owner record of \"me\"".to_owned(),
            ),
            (
                "2",
                "  # f.example.org A: none of the provider's zones contains the name".to_owned(),
            ),
            ("1;31", format!("  ! z1: {REFUSAL}")),
            (
                "2",
                "  # g.example.org A: none of the provider's zones contains the name".to_owned(),
            ),
            ("1;31", "  ! zone z2: gone".to_owned()),
        ];
        let mut plain = String::new();
        let mut coloured = String::new();
        for (code, line) in &lines {
            plain.push_str(&format!("{line}\n"));
            coloured.push_str(&format!("\x1b[{code}m{line}\x1b[0m\n"));
        }
        let planned = planned();
        let shown =
            |confirmed, colour| plan_text("shop/bind", &planned, &failures, confirmed, colour);
        assert_eq!(shown(None, Colour::Never), plain);
        assert_eq!(shown(None, Colour::Always), coloured);
        let confirmed = shown(Some(1), Colour::Never);
        assert_eq!(confirmed, plain.replace(&format!("{}\n", lines[7].1), ""));
        assert_eq!(shown(Some(0), Colour::Never), plain);
    }

    #[test]
    fn a_plan_without_changes_says_so() {
        let shown = |planned: &Planned, failures: &[String]| {
            plan_text("p", planned, failures, None, Colour::Never)
        };
        let nothing = Planned::default();
        assert_eq!(shown(&nothing, &[]), "p:\n  nothing to do\n");
        assert_eq!(shown(&nothing, &["x\ty".to_owned()]), "p:\n  ! x\\ty\n");
        let noted = Planned {
            notes: vec![note("g.example.org")],
            ..Planned::default()
        };
        assert!(!shown(&noted, &[]).contains("nothing to do"));
    }

    #[test]
    fn plans_have_a_form_for_programs() {
        let line = |name: &str| format!("{name}.example.org 60 A 192.0.2.1");
        assert_eq!(
            plan_json(&planned(), &["gone".to_owned()]),
            json!({
                "create": [line("a")],
                "update": [[line("b"), "b.example.org 61 A 192.0.2.1"]],
                "delete": [line("c")],
                "release": [line("d")],
                "drop_orphan": [line("e")],
                "notes": [
                    "f.example.org A: none of the provider's zones contains the name",
                    "g.example.org A: none of the provider's zones contains the name",
                ],
                "needs_confirmation": [REFUSAL],
                "errors": ["gone"],
            })
        );
        assert_eq!(
            plan_json(&Planned::default(), &[]),
            json!({
                "create": [], "update": [], "delete": [], "release": [], "drop_orphan": [], "notes": [],
                "needs_confirmation": [], "errors": [],
            })
        );
    }

    #[test]
    fn states_are_shown_as_lines() {
        let id = |name: &str| DocumentId {
            kind: Kind::Endpoint,
            namespace: "shop".to_owned(),
            name: name.to_owned(),
        };
        let document = |name: &str, last_error: Option<&str>| DocumentStatus {
            id: id(name),
            observed_generation: 3,
            digest: String::new(),
            providers: BTreeMap::new(),
            last_error: last_error.map(str::to_owned),
            remarks: Vec::new(),
        };
        let provider = |synced| ProviderOverview {
            provider: "rfc2136".to_owned(),
            synced,
            wanted: 4,
            owned: 5,
            problems: vec!["a problem".to_owned()],
            remarks: vec!["a remark".to_owned()],
        };
        let overview = Overview {
            providers: BTreeMap::from([
                ("shop/bind".to_owned(), provider(true)),
                ("shop/knot".to_owned(), provider(false)),
            ]),
            documents: vec![document("one", None), document("two", Some("a cause"))],
            problems: vec!["of a file".to_owned()],
        };
        assert_eq!(
            text(&overview),
            "shop/bind (rfc2136): published, 4 record sets wanted, 5 names owned\n  ! a problem\n  # a remark\n\
             shop/knot (rfc2136): NOT PUBLISHED, 4 record sets wanted, 5 names owned\n  ! a problem\n  # a remark\n\
             DNSEndpoint shop/one (generation 3): ok\nDNSEndpoint shop/two (generation 3): a cause\n! of a file\n"
        );
        assert_eq!(
            text(&Overview::default()),
            "no documents; add some to the folder named in the configuration\n"
        );
        let foreign = Overview {
            problems: vec!["owner \u{9b}2J".to_owned()],
            ..Overview::default()
        };
        assert_eq!(text(&foreign), "! owner \\u{9b}2J\n");
    }

    #[test]
    fn unlisted_zones_are_named() {
        let zone = |id: &str, content| Zone {
            id: id.to_owned(),
            apex: Name::parse("example.org").unwrap(),
            visibility: Visibility::Public,
            content,
            warnings: Vec::new(),
        };
        let view = crate::ownership::Registry::default()
            .read(&Name::parse("example.org").unwrap(), Vec::new());
        let error = ProviderError::Settings("the cause".to_owned());
        let listing = [zone("z1", Ok(view)), zone("z2", Err(error))];
        assert_eq!(unlisted(&listing), ["zone z2: the cause"]);
    }

    #[test]
    fn notes_on_wanted_names_block_plans() {
        let mut target = crate::cli::tests::target(Vec::new());
        let planned = planned();
        assert!(!holds_back(&planned, &target));
        for name in ["f.example.org", "g.example.org"] {
            target.origins = BTreeMap::from([(Name::parse(name).unwrap(), BTreeSet::new())]);
            assert!(holds_back(&planned, &target), "{name}");
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn failed_provider_fails_the_plan() {
        let folder = tempfile::tempdir().unwrap();
        let documents = folder.path().join("publish.d");
        fs::create_dir(&documents).unwrap();
        let url = ("etcd-urls".to_owned(), "http://127.0.0.1:1".to_owned());
        let config = Config {
            documents: vec![documents.clone()],
            store: folder.path().join("store"),
            provider_settings: [("default/etcd".to_owned(), [url].into())].into(),
            ..Config::default()
        };
        let plan = async || {
            let arguments = PlanArguments {
                selection: Selection {
                    providers: Vec::new(),
                },
                json: true,
                color: Colour::Never,
            };
            arguments.run(&config).await.unwrap()
        };
        assert_eq!(plan().await, ExitCode::SUCCESS, "nothing is wanted");
        let record = "apiVersion: bosh-dns-publish/v1\nkind: DNSUpdateRecord\nmetadata: {name: etcd}\n\
                      spec: {provider: coredns}\n";
        fs::write(documents.join("a.yml"), record).unwrap();
        assert_eq!(plan().await, ExitCode::FAILURE, "nobody listens there");
        assert_eq!(
            check(&config).await.unwrap(),
            ExitCode::SUCCESS,
            "nobody is asked"
        );
        fs::write(documents.join("a.yml"), record.replace("coredns", "core")).unwrap();
        assert_eq!(plan().await, ExitCode::FAILURE, "a document is damaged");
        assert_eq!(check(&config).await.unwrap(), ExitCode::FAILURE);
    }

    #[tokio::test]
    async fn status_with_problems_fails() {
        use std::sync::Arc;

        use crate::{
            api,
            status::{ApiState, Metrics},
            store::Store,
        };

        let folder = tempfile::tempdir().unwrap();
        let config = Config {
            socket: folder.path().join("control.sock"),
            ..Config::default()
        };
        let store = Store::open(&folder.path().join("store")).unwrap();
        let state = Arc::new(ApiState::new(store, Metrics::new().unwrap()));
        let socket = api::bind_control(&config.socket, None).unwrap();
        tokio::spawn(api::serve_control(socket, api::routes(state.clone())));
        let provider = |synced| ProviderOverview {
            synced,
            ..ProviderOverview::default()
        };
        let document = |last_error: Option<&str>| DocumentStatus {
            id: DocumentId {
                kind: Kind::Endpoint,
                namespace: "shop".to_owned(),
                name: "one".to_owned(),
            },
            observed_generation: 1,
            digest: String::new(),
            providers: BTreeMap::new(),
            last_error: last_error.map(str::to_owned),
            remarks: Vec::new(),
        };
        for (synced, last_error, problems, expected) in [
            (true, None, vec![], ExitCode::SUCCESS),
            (false, None, vec![], ExitCode::FAILURE),
            (true, Some("x"), vec![], ExitCode::FAILURE),
            (true, None, vec!["x".to_owned()], ExitCode::FAILURE),
        ] {
            *state.overview.lock() = Overview {
                providers: [("p".to_owned(), provider(synced))].into(),
                documents: vec![document(None), document(last_error)],
                problems,
            };
            for json in [false, true] {
                let found = Status { json }.run(&config).await.unwrap();
                assert_eq!(found, expected, "{synced} {last_error:?}");
            }
        }
    }
}
