//! `shadow`: what this server would have answered differently from the one in use. Binds, attaches and changes nothing.

mod answers;
mod health;
mod names;
#[cfg(test)]
mod tests;

use std::{
    fs,
    io::{self, IsTerminal, Write as _},
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    process::ExitCode,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::Context as _;
use clap::Args;
use tokio::{
    runtime::{Builder, Runtime},
    sync::mpsc,
};

use self::{
    answers::{OurServer, States},
    health::{FollowedHealth, HealthSource},
};
use super::{complain, operate::usual_config};
use dns_command_line::print_or_fail;
use dns_core::{config::values::parse_duration, terminal, wire::TYPE_A};
use dns_kit::until_ended;
use dns_resolver::{
    daemon::shadow::{FollowedFleet, give_up_privileges, listen_address},
    ops::version::VERSION,
};
use dns_shadow::{
    ask::{Ending, Manner, PlannedQuery, ask, plan, repeated},
    capture::Capture,
    hide::Disclosure,
    html,
    judge::{Judge, Verdicts},
    latency::Latencies,
    process::Process,
    report::{Cpu, InterfaceShare, Outcome, Report, Seen},
    watch::{Limits, Watched, settle_all, thread_cpu, watch},
};

/// Exit code of a report that does not prove equality: differences without an explanation, or nothing to compare.
const DIFFERENT: u8 = 3;

/// Part of the time that `--ask` plans for, as queries: an answer within a minute on an idle machine.
const ASKING_TIME: u32 = 50;
/// Exchanges of `--ask` that wait for the comparison.
const MAX_QUEUED: usize = 256;

#[derive(Debug, Args)]
pub(super) struct Shadow {
    /// config.json of the observed server [default: the file of the bosh-dns job or the Debian package]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// How long to watch or ask
    #[arg(long = "for", value_name = "TIME", default_value = "10m", value_parser = duration)]
    time: Duration,
    /// Ask the server at this address for every name that the files define, instead of watching its clients
    #[arg(long, value_name = "ADDRESS", value_parser = server_address)]
    ask: Option<SocketAddr>,
    /// Queries per second with --ask
    #[arg(long, value_name = "QUERIES", default_value = "200", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    rate: u32,
    /// Where the health of instances comes from
    #[arg(long, value_enum, default_value = "none")]
    health: HealthSource,
    /// Share of a core for receiving and comparing, in percent; beyond it queries are sampled
    #[arg(long, value_name = "PERCENT", default_value = "5", value_parser = clap::value_parser!(u8).range(1..=100))]
    cpu: u8,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    /// Also write the report as an HTML page
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Show addresses of clients
    #[arg(long)]
    clients: bool,
    /// Replace names and addresses by hashes, so that the report can be shared
    #[arg(long)]
    hash_names: bool,
}

fn duration(text: &str) -> Result<Duration, String> {
    parse_duration(text)
        .map_err(|reason| format!("{reason}; expected a duration such as 10m or 24h"))
}

fn server_address(text: &str) -> Result<SocketAddr, String> {
    if let Ok(address) = text.parse::<IpAddr>() {
        return Ok(SocketAddr::new(address, 53));
    }
    text.parse().map_err(|_| {
        "expected an address with or without a port, such as 169.254.0.2:53".to_owned()
    })
}

impl Shadow {
    /// Compares and prints the report; exits with 0 if queries were compared and every difference has an explanation.
    pub(super) fn run(self) -> ExitCode {
        let report = match self.observe() {
            Ok(report) => report,
            Err(problem) => {
                complain(&format_args!("{problem:#}"));
                return ExitCode::FAILURE;
            }
        };
        let text = if self.json {
            let text =
                serde_json::to_string_pretty(&report).expect("texts and numbers are valid JSON");
            terminal::json(&text).into_owned() + "\n"
        } else {
            terminal::lines(&report.text()).into_owned()
        };
        // Hours of watching may be in it: it is printed before the page is written, which may fail.
        if let Err(code) = print_or_fail("bosh-dns-xdp", &text) {
            return code;
        }
        if let Some(path) = &self.html
            && let Err(problem) = fs::write(path, html::page(&report))
        {
            complain(&format_args!("{}: {problem}", path.display()));
            return ExitCode::FAILURE;
        }
        if report.outcome() == Outcome::Equal {
            ExitCode::SUCCESS
        } else {
            ExitCode::from(DIFFERENT)
        }
    }

    fn observe(&self) -> anyhow::Result<Report> {
        let begin = Instant::now();
        let (mut session, source) = self.begin()?;
        let watched = match source {
            Source::Packets(capture) => self.watch(capture, &mut session),
            Source::Questions(server, planned) => {
                let manner = Manner {
                    server,
                    rate: self.rate,
                    time: self.time,
                };
                ask_all(&mut session, planned, manner)
            }
        };
        end_progress();
        Ok(self.report(session, watched, begin.elapsed()))
    }

    /// Reads the files, opens the packet socket unless the server is asked, and begins to follow files and health.
    fn begin(&self) -> anyhow::Result<(Observation, Source)> {
        let path = self.config.as_deref().unwrap_or(usual_config());
        let observed = match self.ask {
            Some(address) => address,
            None => listen_address(path)?,
        };
        // Looking at other users' processes needs more privileges than the rest.
        let process = Process::of(&[observed]);
        // Before the runtime starts: capabilities belong to a thread, and later ones inherit them
        // (capabilities(7)).
        give_up_privileges()?;
        // Follows files and health; the thread of the packets is the main one.
        let runtime = Builder::new_multi_thread()
            .worker_threads(1)
            .max_blocking_threads(2)
            .enable_all()
            .build()
            .context("cannot start a thread")?;
        let stop = stopped_by_signals(&runtime);
        let fleet = {
            let _inside = runtime.enter();
            FollowedFleet::of(path)?
        };
        let mut remarks = remarks(&fleet);
        let (addresses, source) = match self.ask {
            Some(address) => {
                let planned = planned(&fleet, self.rate, &mut remarks);
                (vec![address], Source::Questions(address, planned))
            }
            None => {
                let addresses = fleet.addresses();
                let capture = Capture::open(&addresses)?;
                (addresses, Source::Packets(capture))
            }
        };
        let health = {
            let _inside = runtime.enter();
            FollowedHealth::begin(self.health, &fleet.config)?
        };
        let states = States::default();
        states.install(&fleet, &health);
        let has_interfaces = fleet.config.xdp.is_on();
        let ours = OurServer::new(states.clone(), health.clone(), has_interfaces);
        let session = Observation {
            stop,
            addresses,
            health: health.clone(),
            states: states.clone(),
            judge: Judge::new(ours),
            cpu_before: process.as_ref().and_then(Process::cpu),
            process,
            warnings: fleet.warnings.clone(),
            remarks,
            runtime,
        };
        follow(&session.runtime, fleet, states, health);
        Ok((session, source))
    }

    fn report(&self, session: Observation, watched: Watched, time: Duration) -> Report {
        let Observation {
            judge,
            mut remarks,
            warnings,
            ..
        } = session;
        let mut mode = match self.ask {
            Some(address) => format!("ask {address}, {} queries/s", self.rate),
            None => "watch".to_owned(),
        };
        let mut addresses = session.addresses;
        let mut health = session.health.text();
        if self.hash_names {
            // Both may contain paths, names and addresses.
            addresses.clear();
            mode.truncate(mode.find(' ').unwrap_or(mode.len()));
            // The text after the colon is an error, with addresses in it.
            health.truncate(health.find(':').unwrap_or(health.len()));
        } else {
            remarks.extend(warnings);
        }
        let mut seen = watched.seen;
        seen.unanswered = seen.unanswered.max(judge.tally.unanswered);
        // After watching, so that measuring takes no time from the packets.
        let (cost, method) = judge.reference.cost().unzip();
        let cpu_after = session.process.as_ref().and_then(Process::cpu);
        let observed = session.cpu_before.zip(cpu_after);
        let cpu = Cpu {
            observed_seconds: observed
                .map(|(before, after)| after.saturating_sub(before).as_secs_f64()),
            process: session
                .process
                .map(|Process { number, name }| (number, name)),
            estimated_seconds: cost.map(|cost| cost.as_secs_f64() * seen.estimated_queries as f64),
            method: method.unwrap_or_default(),
            own_share: watched.cpu.as_secs_f64() / watched.time.as_secs_f64().max(0.001),
        };
        let mut report = Report {
            program: format!("bosh-dns-xdp {VERSION} shadow"),
            mode,
            seconds: time.as_secs_f64(),
            addresses,
            health,
            instances: session.states.instances(),
            seen,
            verdicts: Verdicts::default(),
            differences: Vec::new(),
            routes: Vec::new(),
            interface: InterfaceShare::default(),
            latency: watched.latencies.report(),
            cpu,
            remarks,
            failure: watched.failure,
        };
        let disclosure = Disclosure::new(self.clients, self.hash_names);
        report.add_tally(&judge.tally, &disclosure);
        report
    }

    /// Watches the server's packets.
    fn watch(&self, capture: Capture, session: &mut Observation) -> Watched {
        let limits = Limits {
            time: self.time,
            cpu: f64::from(self.cpu) / 100.0,
        };
        watch(
            capture,
            &session.addresses,
            &mut session.judge,
            limits,
            &session.stop,
            show_progress,
        )
    }
}

/// A comparison in progress.
struct Observation {
    /// Set by SIGINT and SIGTERM.
    stop: Arc<AtomicBool>,
    /// Addresses of the observed server.
    addresses: Vec<SocketAddr>,
    health: FollowedHealth,
    states: States,
    judge: Judge<OurServer>,
    /// The observed process, if it is visible, and its CPU time at the beginning.
    process: Option<Process>,
    cpu_before: Option<Duration>,
    /// Warnings about the configuration, which contain paths.
    warnings: Vec<String>,
    remarks: Vec<String>,
    runtime: Runtime,
}

/// Where queries and replies come from.
enum Source {
    /// Packets of the server's clients.
    Packets(Capture),
    /// Questions to the server at this address.
    Questions(SocketAddr, Vec<PlannedQuery>),
}

/// Returns a flag that SIGINT and SIGTERM set from now on.
fn stopped_by_signals(runtime: &Runtime) -> Arc<AtomicBool> {
    let stop = Arc::new(AtomicBool::new(false));
    let stopping = stop.clone();
    let ended = {
        let _inside = runtime.enter();
        until_ended()
    };
    runtime.spawn(async move {
        ended.await;
        stopping.store(true, Ordering::Relaxed);
    });
    stop
}

/// Follows the files until the process ends.
fn follow(runtime: &Runtime, mut fleet: FollowedFleet, states: States, health: FollowedHealth) {
    runtime.spawn(async move {
        loop {
            if fleet.follow().await {
                states.install(&fleet, &health);
            }
        }
    });
}

/// Returns what a comparison with this configuration cannot show.
fn remarks(fleet: &FollowedFleet) -> Vec<String> {
    let mut remarks = Vec::new();
    if fleet.config.max_reply.is_some() {
        remarks.push(
            "max_reply: replies are compared as for near clients, without this limit".to_owned(),
        );
    }
    if fleet.has_consul() {
        let remark = "Consul's names: compared by route only, because their answers come from its agents, which are not asked";
        remarks.push(remark.to_owned());
    }
    remarks
}

/// Returns the queries for everything that the files define.
fn planned(fleet: &FollowedFleet, rate: u32, remarks: &mut Vec<String>) -> Vec<PlannedQuery> {
    let questions = names::questions(fleet);
    let most = usize::try_from(rate.saturating_mul(ASKING_TIME)).unwrap_or(usize::MAX);
    let mut planned = plan(&questions, most);
    if planned.len() < questions.len() * dns_shadow::ask::FORMS.len() {
        remarks.push(format!(
            "{} questions, each in one form of query in turns: all forms would take longer than a minute at this rate",
            questions.len()
        ));
    }
    for name in names::shuffled(fleet) {
        planned.extend(repeated(&name, TYPE_A));
    }
    planned
}

/// Asks the server and judges its replies.
fn ask_all(session: &mut Observation, planned: Vec<PlannedQuery>, manner: Manner) -> Watched {
    let begin = Instant::now();
    let before = thread_cpu();
    let Observation {
        runtime,
        judge,
        stop,
        remarks,
        ..
    } = session;
    let total = planned.len();
    // Bounded: if comparing is slower than the server, asking waits.
    let (sender, mut receiver) = mpsc::channel(MAX_QUEUED);
    let asking = runtime.spawn(ask(planned, manner, stop.clone(), sender));
    let mut seen = Seen {
        sampled_share: 1.0,
        ..Seen::default()
    };
    let mut latencies = Latencies::default();
    let mut shown = Instant::now();
    while let Some(exchange) = receiver.blocking_recv() {
        seen.queries += 1;
        seen.estimated_queries += 1;
        match exchange.latency {
            Some(latency) if !exchange.reply.is_empty() => latencies.add(latency),
            _ => seen.unanswered += 1,
        }
        judge.judge(exchange);
        judge.settle(Instant::now());
        if shown.elapsed() >= Duration::from_secs(1) {
            shown = Instant::now();
            show_progress(&seen, judge);
        }
    }
    let mut failure = None;
    match runtime.block_on(asking) {
        Ok(Ending::Complete) => {}
        Ok(Ending::Early(left)) => {
            remarks.push(format!(
                "ended early: {left} of {total} queries were not sent"
            ));
        }
        // The replies so far are still worth a report.
        Ok(Ending::Silent(left)) => {
            failure = Some(format!(
                "the server stopped answering: {left} of {total} queries were not sent"
            ));
        }
        Err(_) => failure = Some("the asking failed: see standard error".to_owned()),
    }
    settle_all(judge, stop);
    Watched {
        failure,
        seen,
        latencies,
        cpu: thread_cpu().saturating_sub(before),
        time: begin.elapsed(),
    }
}

/// Shows the counts in one line of a terminal.
fn show_progress(seen: &Seen, judge: &Judge<OurServer>) {
    let mut error = io::stderr().lock();
    // Escape sequences in a log file would only disturb.
    if !error.is_terminal() {
        return;
    }
    // The line is only for the eye.
    let _ = write!(
        error,
        "\r\x1b[K{}",
        progress_line(seen, &judge.tally.verdicts)
    );
    let _ = error.flush();
}

/// Returns the counts with the gravest first: a line that wraps could not be overwritten, so its end is cut.
fn progress_line(seen: &Seen, verdicts: &Verdicts) -> String {
    const MAX_COLUMNS: usize = 79;
    let mut line = format!(
        "{} unexplained, {} documented, {} in transition, {} equal of {} queries",
        verdicts.unexplained,
        verdicts.documented,
        verdicts.in_transition,
        verdicts.equal + verdicts.same_route,
        seen.estimated_queries
    );
    line.truncate(MAX_COLUMNS);
    line
}

fn end_progress() {
    let mut error = io::stderr().lock();
    if error.is_terminal() {
        let _ = write!(error, "\r\x1b[K");
    }
}
