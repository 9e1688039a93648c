//! Servers and yardsticks behind one interface, and the loads that they get.

use std::{any::Any, path::PathBuf, time::Duration};

use anyhow::{Context, Result, bail};
use aya::Ebpf;
use bosh_dns_xdp_benches::{
    dnsperf::{self, percentile},
    echo,
    foundation::Foundation,
    lab::{CLIENT_INTERFACE, Lab, SERVER_CPU, SERVER_INTERFACE},
    load::Loaded,
    report::Rounds,
    servers::{Forwarder, Peer, start_reference},
    skeleton,
    yardstick::{Hook, Yardstick},
};
use serde_json::{Value, json};
use whole_system_tests::{
    cpu::on_cpu,
    metrics::wait_for_fast_path,
    server::{self, Server},
};

use crate::part::{Queries, Setting, is_shared};

/// Queries per second for latency measurements, low enough for every subject.
pub(crate) const LATENCY_RATE: u32 = 20_000;
/// Reported percentiles of latency.
pub(crate) const PERCENTILES: [f64; 3] = [0.5, 0.99, 0.999];
/// Duration of the warm-up at that rate: some thousands of queries fill caches and tables, and
/// learn the names beyond the publisher's list of a huge foundation.
const WARM_UP: Duration = Duration::from_millis(300);
/// Number of parts into which the latencies of a load are divided.
// Even a single round shows a spread then.
const LATENCY_PARTS: usize = 4;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Subject {
    /// This server, with this mode of the fast path.
    Ours(&'static str),
    /// This server with something that is off by default, and the mode of the fast path.
    With(Extra, &'static str),
    /// Another build of this server, with this mode of the fast path.
    Build(PathBuf, &'static str),
    Peer(Peer),
    Reference(PathBuf),
    Forwarder(Forwarder),
    /// Another build of this server that only forwards, in userspace.
    ForwardingBuild {
        program: PathBuf,
        /// Cache answers for their TTL.
        cache: bool,
    },
    /// The program that only swaps addresses, on this hook.
    Reflector(Hook),
    /// The program that sends a constant number of answers, on this hook.
    Constant(Hook),
    /// The server's programs without the jobs that a mere lookup could do without, on this hook; it knows shared names.
    Skeleton(Hook),
    /// The server behind a socket that sends a constant number of answers.
    Echo,
    /// No server at all.
    Nothing,
}

/// A feature that is off by default. Logs of dnstap are in the server's folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Extra {
    Dnstap,
    Cookies,
    TopNames,
}

impl Extra {
    pub(crate) const ALL: [Self; 3] = [Self::Dnstap, Self::Cookies, Self::TopNames];

    /// Returns its label and its configuration.
    fn parts(self) -> (&'static str, Value) {
        match self {
            Self::Dnstap => ("dnstap, defaults", json!({"dnstap": {}})),
            Self::Cookies => ("cookies", json!({"cookies": {"enabled": true}})),
            Self::TopNames => ("20 top names", json!({"metrics": {"top_names": 20}})),
        }
    }
}

/// A subject that answers in a lab.
pub(crate) struct Cell<'a> {
    pub(crate) subject: &'a Subject,
    /// Processes whose CPU time and memory count.
    pub(crate) processes: Vec<u32>,
    /// The subject and its files, stopped before the lab is removed.
    pub(crate) running: Running,
    pub(crate) lab: Lab,
}

pub(crate) enum Running {
    Server(Server),
    Other(#[expect(dead_code, reason = "dropping it ends the subject")] Box<dyn Any>),
}

impl Subject {
    pub(crate) fn label(&self) -> String {
        let hook = |hook: &Hook| {
            if *hook == Hook::Native {
                "native"
            } else {
                "tc"
            }
        };
        match self {
            Self::Ours("off") => "ours, userspace only".to_owned(),
            Self::Ours(mode) => format!("ours, {mode}"),
            Self::With(extra, mode) => format!("{}, {}", Self::Ours(mode).label(), extra.parts().0),
            Self::Build(program, mode) => format!("{}, {mode}", program.display()),
            Self::Peer(peer) => peer.label().to_owned(),
            Self::Reference(_) => "bosh-dns".to_owned(),
            Self::Forwarder(forwarder) => forwarder.label().to_owned(),
            Self::ForwardingBuild {
                program,
                cache: true,
            } => program.display().to_string(),
            Self::ForwardingBuild {
                program,
                cache: false,
            } => format!("{}, cache off", program.display()),
            Self::Reflector(at) => format!("bare reflector, {}", hook(at)),
            Self::Constant(at) => format!("constant answers, {}", hook(at)),
            Self::Skeleton(at) => format!("skeleton, {}", hook(at)),
            Self::Echo => "socket echo".to_owned(),
            Self::Nothing => "nothing attached".to_owned(),
        }
    }

    /// Returns the mode of the fast path, if the subject is a build of this server.
    pub(crate) fn mode(&self) -> Option<&'static str> {
        match self {
            Self::Ours(mode) | Self::With(_, mode) | Self::Build(_, mode) => Some(mode),
            _ => None,
        }
    }

    /// Attaches the program that a client with sockets needs on its end, if any.
    ///
    /// Without one, native XDP_TX on the server's end loses its packets, because the veth driver
    /// needs a program on both ends, or NAPI. The in-kernel generator brings its own.
    pub(crate) fn program_of_client(&self, lab: &Lab) -> Result<Option<Ebpf>> {
        let is_native = match self {
            Self::Reflector(hook) | Self::Constant(hook) | Self::Skeleton(hook) => {
                *hook == Hook::Native
            }
            _ => self.mode() == Some("native"),
        };
        if !is_native {
            return Ok(None);
        }
        Yardstick::Pass
            .attach(Hook::Native, &lab.client, CLIENT_INTERFACE)
            .map(Some)
    }

    /// Returns a build of this server as one that only forwards, in userspace.
    pub(crate) fn forwarding(&self, cache: bool) -> Option<Self> {
        match self {
            Self::Ours(_) => Some(Self::Forwarder(Forwarder::Ours { cache })),
            Self::Build(program, _) => Some(Self::ForwardingBuild {
                program: program.clone(),
                cache,
            }),
            _ => None,
        }
    }

    /// Returns whether a program on the interface answers all queries.
    fn answers_at_interface(&self) -> bool {
        match self {
            Self::Reflector(_)
            | Self::Constant(_)
            | Self::Skeleton(_)
            | Self::Forwarder(Forwarder::Interface) => true,
            _ => self.mode().is_some_and(|mode| mode != "off"),
        }
    }
}

/// Returns a subject of which the kernel runs all.
fn without_process(attached: impl Any) -> (Vec<u32>, Running) {
    (Vec::new(), Running::Other(Box::new(attached)))
}

impl<'a> Cell<'a> {
    /// Starts the subject on the server's CPU and waits for its first answer; with a fast path, for
    /// the first one from the interface.
    pub(crate) fn start(lab: Lab, subject: &'a Subject, setting: &Setting) -> Result<Self> {
        let cell = Self::begin(lab, subject, &setting.foundation, setting.answers)?;
        if subject.mode().is_some_and(|mode| mode != "off") {
            wait_for_fast_path(&cell.lab.server).with_context(|| subject.label())?;
        }
        // A program that is attached at XDP may bring new NAPI threads.
        cell.lab.pin_napi()?;
        Ok(cell)
    }

    /// Like [`Self::start`], but waits for the first answer from any path.
    pub(crate) fn begin(
        lab: Lab,
        subject: &'a Subject,
        foundation: &Foundation,
        answers: u32,
    ) -> Result<Self> {
        let attach =
            |yardstick: Yardstick, hook| yardstick.attach(hook, &lab.server, SERVER_INTERFACE);
        let running = |server: Server| (vec![server.pid()], Running::Server(server));
        let (processes, running) = match subject {
            Subject::Ours(mode) => {
                running(start_build(server::program()?, &lab, foundation, mode)?)
            }
            Subject::With(extra, mode) => {
                let (_, configuration) = extra.parts();
                running(start_configured(
                    server::program()?,
                    &lab,
                    foundation,
                    mode,
                    &configuration,
                )?)
            }
            Subject::Build(program, mode) => {
                running(start_build(program.clone(), &lab, foundation, mode)?)
            }
            Subject::Peer(peer) => {
                let running = peer.start(&lab, &foundation.entries(usize::MAX))?;
                (running.processes(), Running::Other(Box::new(running)))
            }
            Subject::Reference(program) => running(start_reference(program, &lab, foundation)?),
            Subject::Forwarder(forwarder) => {
                let running = forwarder.start(&lab, Some(foundation))?;
                (vec![running.pid], Running::Other(Box::new(running)))
            }
            Subject::ForwardingBuild { program, cache } => {
                let forwarder = Forwarder::Ours { cache: *cache };
                let running = forwarder.start_build(program.clone(), &lab, Some(foundation))?;
                (vec![running.pid], Running::Other(Box::new(running)))
            }
            Subject::Reflector(hook) => without_process(attach(Yardstick::Reflector, *hook)?),
            Subject::Constant(hook) => {
                without_process(attach(Yardstick::Constant { answers }, *hook)?)
            }
            Subject::Skeleton(hook) => {
                let mut names = foundation.entries(usize::MAX);
                // Only what the load queries: the skeleton has no publisher that would choose among
                // more names.
                names.retain(|(name, _)| is_shared(name));
                without_process(skeleton::start(&lab, *hook, &names)?)
            }
            Subject::Echo => {
                let process = echo::start(&lab, answers)?;
                (vec![process.pid()], Running::Other(Box::new(process)))
            }
            Subject::Nothing => bail!("nothing cannot be started"),
        };
        Ok(Self {
            subject,
            processes,
            running,
            lab,
        })
    }

    /// Returns the in-kernel load, which measures throughput and cost. Drop it before
    /// [`Self::client`].
    pub(crate) fn loaded(&self, queries: &Queries) -> Result<Loaded<'_>> {
        Loaded::new(&self.lab, &self.processes, &queries.lines, queries.edns)
    }

    /// Measures a full core for `duration`.
    pub(crate) fn fill(
        &self,
        loaded: &mut Loaded<'_>,
        duration: Duration,
    ) -> Result<bosh_dns_xdp_benches::load::Offered> {
        loaded.fill(self.subject.answers_at_interface(), duration)
    }

    /// Prepares the client's end for sockets; the program that it needs there ends with the value.
    pub(crate) fn client(&self) -> Result<Option<Ebpf>> {
        let program = self.subject.program_of_client(&self.lab)?;
        self.lab.pin_napi()?;
        Ok(program)
    }

    /// Queries with dnsperf until all caches and tables are filled.
    pub(crate) fn warm_up(&self, queries: &Queries) -> Result<()> {
        let load = dnsperf::Load {
            rate: Some(LATENCY_RATE),
            ..dnsperf::Load::new(&queries.path, WARM_UP)
        };
        load.run(&self.lab.client_launcher()).map(drop)
    }

    /// Returns latencies in microseconds for each of [`PERCENTILES`], part by part.
    pub(crate) fn latencies(&self, queries: &Queries, duration: Duration) -> Result<[Rounds; 3]> {
        let load = dnsperf::Load {
            rate: Some(LATENCY_RATE),
            percentiles: true,
            ..dnsperf::Load::new(&queries.path, duration)
        };
        let seen = load.run(&self.lab.client_launcher())?;
        let parts = || {
            seen.latencies
                // `chunks` panics at 0, which is a part of an empty list.
                .chunks(seen.latencies.len().div_ceil(LATENCY_PARTS).max(1))
        };
        let within = |part, share| percentile(part, share).unwrap_or_default().as_secs_f64() * 1e6;
        Ok(PERCENTILES.map(|share| Rounds(parts().map(|part| within(part, share)).collect())))
    }
}

/// Starts a build of this server, with one worker for one CPU, as configured for the peers.
pub(crate) fn start_build(
    program: PathBuf,
    lab: &Lab,
    foundation: &Foundation,
    mode: &str,
) -> Result<Server> {
    start_configured(program, lab, foundation, mode, &json!({}))
}

/// Like [`start_build`], with further configuration.
pub(crate) fn start_configured(
    program: PathBuf,
    lab: &Lab,
    foundation: &Foundation,
    mode: &str,
    configuration: &Value,
) -> Result<Server> {
    let folder = server::folder(&foundation.records, foundation.aliases.as_deref())?;
    let mut extra = json!({
        "log_level": "WARN",
        "xdp": {"mode": mode, "interfaces": [SERVER_INTERFACE, "lo"], "max_names": foundation.max_names},
        // Metrics tell when the interface answers.
        "metrics": {"enabled": true},
    });
    server::merge(&mut extra, configuration);
    if let Some(dnstap) = extra.get_mut("dnstap") {
        dnstap["file"] = json!(folder.path().join("queries.tap"));
    }
    let listen = lab.endpoint();
    on_cpu(SERVER_CPU, || {
        Server::start_program(program, Some(&lab.server), folder, listen, &extra, |_| {})
    })
}
