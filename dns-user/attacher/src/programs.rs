//! The programs of the object. A separate thread loads each program once an interface needs it.
//!
//! The verifier examines every path of a program before the kernel accepts it. That takes seconds
//! on a small machine, and longer if the verifier gives up; only the interface that needs the
//! program waits. A refused program makes its hooks unavailable and is not tried again, because
//! neither kernel nor object changes while this process lives.

use std::{
    collections::{BTreeMap, VecDeque},
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{Arc, Weak, mpsc},
    time::Instant,
};

use dns_common::object;
use dns_fastpath::protocol::{ProgramState, ProgramStatus};
use parking_lot::Mutex;

use crate::{
    bpf,
    image::{Image, Rejection},
    mailbox::{self, Ended, Notifier},
};
use dns_kit::{
    memory, priority,
    threads::{self, OnPanic},
};

/// Number of lines kept of the verifier's log after a refusal: the last ones hold the complaint.
const VERIFIER_LINES: usize = 6;

/// Maximum number of reports that wait to be collected: two for each program, several times.
const MAX_REPORTS: usize = 16;

/// Maximum number of consecutive attempts if signals interrupt a load.
const INTERRUPTED_TRIES: usize = 10;

//----------- Program ---------------------------------------------------------

/// A program of the object that is attached to hooks; both tc hooks share one program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Program {
    /// For XDP in the driver.
    Xdp,
    Tc,
}

impl Program {
    const fn name(self) -> &'static str {
        match self {
            Self::Xdp => object::XDP_PROGRAM,
            Self::Tc => object::TC_PROGRAM,
        }
    }

    /// Returns the program that answers from whole answers, and the map from which this one tail-calls it.
    const fn forwarded(self) -> Called {
        match self {
            Self::Xdp => (object::XDP_FORWARDED_PROGRAM, object::XDP_FORWARDED),
            Self::Tc => (object::TC_FORWARDED_PROGRAM, object::TC_FORWARDED),
        }
    }
}

/// Names of a program and of the map from which it is tail-called.
type Called = (&'static str, &'static str);

/// The program that gives every answer at tc.
const TC_ANSWER: Called = (object::TC_ANSWER_PROGRAM, object::TC_ANSWER);

//----------- ProgramStatus ---------------------------------------------------

fn loading(name: &'static str) -> ProgramStatus {
    ProgramStatus {
        name: name.into(),
        state: ProgramState::Loading,
        instructions: None,
        load_ms: None,
        why: None,
        verifier: Vec::new(),
    }
}

/// The programs needed so far, in order of first use.
#[derive(Clone, Debug)]
pub(crate) struct ProgramStatuses {
    programs: Arc<Mutex<Vec<ProgramStatus>>>,
    /// Rung at each change.
    changed: Notifier,
}

impl ProgramStatuses {
    pub(crate) fn new(changed: Notifier) -> Self {
        Self {
            programs: Arc::default(),
            changed,
        }
    }

    pub(crate) fn all(&self) -> Vec<ProgramStatus> {
        self.programs.lock().clone()
    }

    fn have_failures(&self) -> bool {
        let all = self.programs.lock();
        all.iter()
            .any(|program| program.state == ProgramState::Failed)
    }

    /// Removes a program that is not loaded after all.
    fn forget(&self, name: &str) {
        self.programs.lock().retain(|known| known.name != name);
        self.changed.notify();
    }

    fn note(&self, status: ProgramStatus) {
        let mut all = self.programs.lock();
        match all.iter_mut().find(|known| known.name == status.name) {
            Some(known) => *known = status,
            None => all.push(status),
        }
        self.changed.notify();
    }
}

//----------- Programs --------------------------------------------------------

/// The reason why a program cannot answer on a hook.
pub(crate) enum Missing<'a> {
    /// It is being loaded; [`Programs::reports`] becomes readable afterwards. The program that is already loaded can be
    /// attached, and passes every packet until the programs that it tail-calls are loaded.
    Loading(Option<BorrowedFd<'a>>),
    NotLoaded(String),
}

/// The programs, as used by the attaching thread.
pub(crate) struct Programs {
    /// Requested programs, with the state of each.
    ordered: BTreeMap<Program, Ordered>,
    /// Orders to the loading thread, which ends when this is dropped.
    orders: mpsc::Sender<Order>,
    statuses: ProgramStatuses,
    /// Reports from that thread.
    reports: mailbox::Receiver<(Program, Report)>,
    /// Dropped at the end of the session.
    _session: Arc<()>,
}

/// An order to the thread that loads.
enum Order {
    /// Load a program, and what it needs to answer.
    Load(Program),
    /// Load what the programs can work without, too.
    Complete,
    /// Load what could not be loaded for a reason that may have passed.
    TryAgain,
}

/// How far the thread that loads has come with a program.
pub(crate) enum Report {
    /// It is loaded, but the programs that it tail-calls are not.
    Attachable(OwnedFd),
    /// It answers.
    Answers,
    Problem(LoadProblem),
}

enum Ordered {
    Loading,
    /// Loaded, but it passes every packet, see [`Missing::Loading`].
    Attachable(OwnedFd),
    Loaded(OwnedFd),
    /// Refused or failed, with the cause.
    Problem(LoadProblem),
}

impl Programs {
    /// Starts the thread that loads the programs of `image` on request. Programs for forwarded
    /// answers are loaded only if `keeps_answers` is set. The thread drops `holding` after the maps.
    pub(crate) fn start(
        image: Image,
        statuses: ProgramStatuses,
        keeps_answers: bool,
        holding: impl Send + 'static,
    ) -> io::Result<Self> {
        let (orders, ordered) = mpsc::channel();
        let (sender, reports) = mailbox::channel(MAX_REPORTS)?;
        let session = Arc::new(());
        let mut loader = Loader {
            session: Arc::downgrade(&session),
            image,
            statuses: statuses.clone(),
            keeps_answers,
            completes: false,
            optional: Vec::new(),
        };
        threads::spawn("programs", OnPanic::EndProcess, move || {
            // The verifier takes seconds of a small machine's CPU, which userspace needs for
            // answers meanwhile.
            priority::lower("loading programs");
            for order in ordered {
                if loader.execute(order, &sender).is_err() {
                    // The session is over.
                    break;
                }
                // Reading the object leaves memory free in the allocator.
                memory::give_back();
                memory::forget_start();
            }
            drop(loader);
            drop(holding);
        })?;
        Ok(Self {
            ordered: BTreeMap::new(),
            orders,
            statuses,
            reports,
            _session: session,
        })
    }

    /// Requests a program unless it was requested before.
    pub(crate) fn order(&mut self, program: Program) {
        let Self {
            ordered, orders, ..
        } = self;
        ordered.entry(program).or_insert_with(|| {
            // An error: the thread has panicked, which ends the process.
            let _ = orders.send(Order::Load(program));
            Ordered::Loading
        });
    }

    /// Requests what the programs can work without, once interfaces answer: it takes the kernel many times as long.
    pub(crate) fn complete(&self) {
        // See `order`.
        let _ = self.orders.send(Order::Complete);
    }

    /// Returns a program that answers, requesting it if necessary.
    pub(crate) fn get(&mut self, program: Program) -> Result<BorrowedFd<'_>, Missing<'_>> {
        self.order(program);
        match self.ordered.get(&program) {
            Some(Ordered::Loaded(program)) => Ok(program.as_fd()),
            Some(Ordered::Problem(problem)) => Err(Missing::NotLoaded(problem.why.clone())),
            Some(Ordered::Attachable(program)) => Err(Missing::Loading(Some(program.as_fd()))),
            Some(Ordered::Loading) | None => Err(Missing::Loading(None)),
        }
    }

    /// Returns whether `id` belongs to one of our programs.
    pub(crate) fn are(&self, id: u32) -> bool {
        self.ordered.values().any(|ordered| {
            matches!(ordered, Ordered::Loaded(program)
                if bpf::program_info(program.as_fd()).is_ok_and(|info| info.id == id))
        })
    }

    /// Returns a descriptor that becomes readable once programs were loaded or refused.
    pub(crate) fn reports(&self) -> BorrowedFd<'_> {
        self.reports.as_fd()
    }

    /// Collects the reports of the thread that loads.
    pub(crate) fn collect(&mut self) {
        // `Ended` follows them only after a panic, see `order`.
        for (program, report) in self.reports.waiting().flatten() {
            let state = match report {
                Report::Attachable(loaded) => Ordered::Attachable(loaded),
                Report::Answers => match self.ordered.remove(&program) {
                    Some(Ordered::Attachable(loaded)) => Ordered::Loaded(loaded),
                    // A problem with it has been reported before.
                    _ => continue,
                },
                Report::Problem(problem) => Ordered::Problem(problem),
            };
            self.ordered.insert(program, state);
        }
    }

    /// Clears failures whose cause may have passed, such as lack of memory, so that these programs
    /// are requested again.
    pub(crate) fn try_again(&mut self) {
        self.ordered.retain(
            |_, ordered| !matches!(ordered, Ordered::Problem(problem) if problem.state == ProgramState::Failed),
        );
        if self.statuses.have_failures() {
            // See `order`.
            let _ = self.orders.send(Order::TryAgain);
        }
    }
}

//----------- LoadProblem -----------------------------------------------------

/// The reason why a program could not be loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LoadProblem {
    state: ProgramState,
    why: String,
    /// The last lines of the verifier's log.
    verifier: Vec<String>,
}

impl LoadProblem {
    /// The program is not needed any more.
    fn of_ended_session() -> Self {
        Self {
            state: ProgramState::Failed,
            why: "the session is over".to_owned(),
            verifier: Vec::new(),
        }
    }

    fn of(name: &str, rejection: &Rejection) -> Self {
        let kernel = &rejection.error;
        let code = kernel.raw_os_error();
        let verifier = last_lines(&rejection.log);
        let complaint = complaint(&verifier);
        let why = match (code, complaint) {
            (_, Some(complaint)) => {
                format!("the kernel rejected program {name}: {kernel}: {complaint}")
            }
            (Some(libc::EPERM | libc::EACCES), None) => format!(
                "loading program {name} is not permitted: needs root, or CAP_BPF, CAP_NET_ADMIN and CAP_PERFMON ({kernel})"
            ),
            (_, None) => format!("program {name} cannot be loaded: {kernel}"),
        };
        // Lack of memory or descriptors, and signals, pass. What the verifier refuses once, it
        // refuses again.
        let may_come = matches!(
            code,
            Some(libc::EAGAIN | libc::EINTR | libc::ENOMEM | libc::EMFILE | libc::ENFILE)
        );
        let state = if may_come {
            ProgramState::Failed
        } else {
            ProgramState::Refused
        };
        Self {
            state,
            why,
            verifier,
        }
    }
}

fn last_lines(log: &str) -> Vec<String> {
    let mut last = VecDeque::new();
    for line in log.lines() {
        let line = line.trim();
        if line.is_empty() {
            continue;
        }
        if last.len() == VERIFIER_LINES {
            last.pop_front();
        }
        last.push_back(line.to_owned());
    }
    last.into()
}

/// Returns the line with the verifier's complaint: the last one that is not part of its statistics.
fn complaint(lines: &[String]) -> Option<&String> {
    const STATISTICS: [&str; 3] = ["verification time", "stack depth", "processed "];
    lines
        .iter()
        .rev()
        .find(|line| !STATISTICS.iter().any(|start| line.starts_with(start)))
}

//----------- Loader ----------------------------------------------------------

struct Loader {
    /// Dangling once the session is over.
    session: Weak<()>,
    image: Image,
    statuses: ProgramStatuses,
    keeps_answers: bool,
    /// Whether [`Order::Complete`] has come.
    completes: bool,
    /// Programs without which the others work, to be loaded. Until then userspace gives their answers; log and status
    /// report why.
    optional: Vec<Called>,
}

impl Loader {
    fn execute(
        &mut self,
        order: Order,
        reports: &mailbox::Sender<(Program, Report)>,
    ) -> Result<(), Ended> {
        match order {
            Order::Load(program) => self.load(program, reports)?,
            Order::Complete => self.completes = true,
            Order::TryAgain => {}
        }
        // Interfaces may need a program before or after the first pass has ended.
        if self.completes {
            for called in std::mem::take(&mut self.optional) {
                if let Err(problem) = self.load_called(called)
                    && problem.state == ProgramState::Failed
                {
                    self.optional.push(called);
                }
            }
        }
        Ok(())
    }

    /// Loads a program, and then the programs that it tail-calls. Interfaces take it meanwhile, because the kernel waits for an
    /// RCU grace period at each of them.
    fn load(
        &mut self,
        program: Program,
        reports: &mailbox::Sender<(Program, Report)>,
    ) -> Result<(), Ended> {
        if program == Program::Tc {
            // Before `dns_tc` is loaded, or the fast path would seem complete in between.
            self.statuses.note(loading(object::TC_ANSWER_PROGRAM));
        }
        let loaded = match self.load_named(program.name()) {
            Ok(loaded) => loaded,
            Err(problem) => {
                if program == Program::Tc {
                    self.statuses.forget(object::TC_ANSWER_PROGRAM);
                }
                return reports.send((program, Report::Problem(problem)));
            }
        };
        reports.send((program, Report::Attachable(loaded)))?;
        let answers = match program {
            Program::Xdp => Ok(()),
            Program::Tc => self.load_answer(),
        };
        if self.keeps_answers && answers.is_ok() {
            self.optional.push(program.forwarded());
        }
        let report = match answers {
            Ok(()) => Report::Answers,
            Err(problem) => Report::Problem(problem),
        };
        reports.send((program, report))
    }

    /// Loads a program that answers at tc: the short one, or the complete one if the kernel refuses that.
    fn load_answer(&mut self) -> Result<(), LoadProblem> {
        let first = self.load_called((object::TC_FIRST_PROGRAM, object::TC_ANSWER));
        if first.is_ok() {
            self.optional.push(TC_ANSWER);
            return first;
        }
        self.load_called(TC_ANSWER)
    }

    /// Loads a program and puts it into the map from which it is tail-called, which keeps it.
    fn load_called(&mut self, (name, map): Called) -> Result<(), LoadProblem> {
        // Each program takes the kernel up to a second, and the maps as long, which the next session may need.
        if self.session.strong_count() == 0 {
            return Err(LoadProblem::of_ended_session());
        }
        let program = self.load_named(name)?;
        let put = match self.image.map(map) {
            Some(map) => bpf::set_called(map, program.as_fd()),
            None => Err(io::Error::from_raw_os_error(libc::ENOENT)),
        };
        put.map_err(|error| {
            let why = format!(
                "cannot put program {name} into the tail-call map (BPF_MAP_TYPE_PROG_ARRAY): {error}"
            );
            tracing::warn!("{why}");
            self.statuses.note(ProgramStatus {
                state: ProgramState::Refused,
                why: Some(why.clone()),
                ..loading(name)
            });
            LoadProblem {
                state: ProgramState::Refused,
                why,
                verifier: Vec::new(),
            }
        })
    }

    fn load_named(&mut self, name: &'static str) -> Result<OwnedFd, LoadProblem> {
        let begun = Instant::now();
        self.statuses.note(loading(name));
        let mut result = self.image.load_program(name);
        // The verifier gives up with EAGAIN as soon as a signal is pending (`do_check`).
        for _ in 1..INTERRUPTED_TRIES {
            match &result {
                Err(rejection) if rejection.error.raw_os_error() == Some(libc::EAGAIN) => {
                    result = self.image.load_program(name);
                }
                _ => break,
            }
        }
        let load_ms = begun.elapsed().as_secs_f64() * 1000.0;
        let mut status = ProgramStatus {
            state: ProgramState::Loaded,
            load_ms: Some(load_ms),
            ..loading(name)
        };
        let loaded = match result {
            Ok(program) => {
                // Only a figure for operators, so the program is good without it.
                status.instructions = bpf::program_info(program.as_fd())
                    .ok()
                    .map(|info| info.verified)
                    .filter(|&verified| verified != 0);
                tracing::debug!(
                    program = name,
                    milliseconds = load_ms,
                    instructions = status.instructions,
                    "the kernel has loaded a program"
                );
                Ok(program)
            }
            Err(rejection) => {
                let problem = LoadProblem::of(name, &rejection);
                let why = &problem.why;
                let last_lines = problem.verifier.join(" / ");
                tracing::warn!(
                    program = name,
                    milliseconds = load_ms,
                    verifier = last_lines,
                    "{why}"
                );
                status.state = problem.state;
                status.why = Some(why.clone());
                status.verifier = problem.verifier.clone();
                Err(problem)
            }
        };
        self.statuses.note(status);
        loaded
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use dns_core::config::Config;
    use test_support::own_process;

    use super::*;
    use crate::object::Object;

    impl Programs {
        /// Returns programs of which [`Program::Tc`] is being loaded, and reports instead of the thread that loads.
        pub(crate) fn told(reports: mailbox::Receiver<(Program, Report)>) -> Self {
            Self {
                ordered: BTreeMap::from([(Program::Tc, Ordered::Loading)]),
                orders: mpsc::channel().0,
                statuses: ProgramStatuses::new(mailbox::notifications().unwrap().0),
                reports,
                _session: Arc::default(),
            }
        }
    }

    impl LoadProblem {
        pub(crate) fn refusal() -> Self {
            Self {
                state: ProgramState::Refused,
                why: "refused".to_owned(),
                verifier: Vec::new(),
            }
        }
    }

    #[test]
    fn the_complaint_is_found_before_the_statistics() {
        let log = "BPF program is too large. Processed 1000001 insn\nverification time 3200000 usec\n\
                   stack depth 400+0\nprocessed 1000001 insns (limit 1000000) max_states_per_insn 40\n\n";
        let lines = last_lines(log);
        assert_eq!(lines.len(), 4);
        assert_eq!(
            complaint(&lines),
            Some(&"BPF program is too large. Processed 1000001 insn".to_owned())
        );
        assert_eq!(last_lines(&"line\n".repeat(100)).len(), VERIFIER_LINES);
        assert_eq!(complaint(&last_lines("")), None);
    }

    /// Returns a thread's state that has yet to load a program which others can work without.
    fn loader(session: &Arc<()>) -> (Loader, Object) {
        let text = br#"{"address": "127.0.0.1", "port": 53}"#;
        let config = Config::check("config.json", text).1.unwrap().config;
        let (image, object) = Object::load(&config.fast_path()).unwrap();
        let loader = Loader {
            session: Arc::downgrade(session),
            image,
            statuses: ProgramStatuses::new(mailbox::notifications().unwrap().0),
            keeps_answers: true,
            completes: true,
            optional: vec![Program::Tc.forwarded()],
        };
        (loader, object)
    }

    #[test]
    fn nothing_is_verified_after_the_session() {
        if !test_support::requirements::root() {
            return;
        }
        let session = Arc::new(());
        let (mut loader, _object) = loader(&session);
        drop(session);
        let (reports, _told) = mailbox::channel(1).unwrap();
        loader.execute(Order::TryAgain, &reports).unwrap();
        assert_eq!(loader.statuses.all(), []);
    }

    #[test]
    fn optional_program_is_tried_again() {
        if !test_support::requirements::root() {
            return;
        }
        // The limit on open files belongs to the whole process.
        if !own_process::is_here() {
            let mut test = own_process::command(module_path!(), "optional_program_is_tried_again");
            return own_process::run(&mut test);
        }
        let session = Arc::new(());
        let (mut loader, _object) = loader(&session);
        let (reports, _told) = mailbox::channel(1).unwrap();
        let states = |loader: &Loader| {
            let all = loader.statuses.all();
            all.iter().map(|program| program.state).collect::<Vec<_>>()
        };
        // Without a descriptor for it the kernel hands no program out.
        own_process::without_descriptors(|| loader.execute(Order::TryAgain, &reports)).unwrap();
        assert_eq!(states(&loader), [ProgramState::Failed]);
        assert!(loader.statuses.have_failures());

        loader.execute(Order::TryAgain, &reports).unwrap();
        assert_eq!(states(&loader), [ProgramState::Loaded]);
        assert!(loader.optional.is_empty());
    }

    #[test]
    fn only_transient_failures_are_retried() {
        let load = |code| {
            let rejection = Rejection {
                error: io::Error::from_raw_os_error(code),
                log: String::new(),
            };
            LoadProblem::of("dns_tc", &rejection)
        };
        assert_eq!(load(libc::ENOMEM).state, ProgramState::Failed);
        assert_eq!(load(libc::EINVAL).state, ProgramState::Refused);
        let denied = load(libc::EPERM);
        assert_eq!(denied.state, ProgramState::Refused);
        assert!(denied.why.contains("CAP_BPF"), "{denied:?}");
    }
}
