//! Requests to the attacher from a compromised server.

use std::{
    io::{BufRead as _, BufReader, Read as _, Write as _},
    os::unix::net::UnixStream,
    path::PathBuf,
    process::Stdio,
    thread,
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use tempfile::TempDir;
use whole_system_tests::{
    bpffs::Bpffs,
    namespace::Namespace,
    process::{Kept, wait_until},
    requires, server,
};

/// Longer than programs take to load on a busy machine.
const LIMIT: Duration = Duration::from_secs(120);

/// The attacher of a server at 127.0.0.1:53.
struct Attacher {
    process: Kept,
    folder: TempDir,
    _bpffs: Bpffs,
    _namespace: Namespace,
}

impl Attacher {
    fn start(label: &str) -> Self {
        let (namespace, bpffs) = (Namespace::new(label).unwrap(), Bpffs::new().unwrap());
        let folder = server::folder(&server::records_of_groups(&[1]), None).unwrap();
        let mut config = server::config(folder.path(), ([127, 0, 0, 1], 53).into());
        let socket = folder.path().join("attach/attach.sock");
        server::merge(
            &mut config,
            &json!({"xdp": {"bpffs": bpffs.path(), "attach_socket": socket}}),
        );
        std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
        let mut command = namespace.command(server::program().unwrap()).unwrap();
        let log = std::fs::File::create(folder.path().join("log")).unwrap();
        command
            .args(["attach", "--config"])
            .arg(folder.path().join("config.json"));
        let process = Kept::spawn(command.stdin(Stdio::null()).stdout(log)).unwrap();
        wait_until("the attacher", LIMIT, || {
            UnixStream::connect(&socket).is_ok()
        })
        .unwrap();
        Self {
            process,
            folder,
            _bpffs: bpffs,
            _namespace: namespace,
        }
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join("attach/attach.sock")
    }

    /// Requests these addresses; returns the connection and the attacher's answer.
    fn ask(&self, listen: &[&str]) -> (BufReader<UnixStream>, Value) {
        let mut stream = UnixStream::connect(self.socket()).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        let wanted = json!({"layout": dns_common::LAYOUT_VERSION, "listen": listen});
        writeln!(stream, "{wanted}").unwrap();
        let mut answers = BufReader::new(stream);
        // The byte that carries the map descriptors.
        answers.read_exact(&mut [0]).unwrap();
        let answer = line(&mut answers);
        (answers, answer)
    }
}

fn line(answers: &mut BufReader<UnixStream>) -> Value {
    let mut line = String::new();
    answers.read_line(&mut line).unwrap();
    serde_json::from_str(&line).unwrap()
}

#[test]
fn foreign_addresses_are_refused() {
    requires!(namespaces, bpf);
    let attacher = Attacher::start("authority");
    for foreign in ["127.0.0.53:53", "127.0.0.1:54", "8.8.8.8:53", "0.0.0.0:53"] {
        let (_, answer) = attacher.ask(&[foreign]);
        assert!(answer["Refused"].is_string(), "{foreign}: {answer}");
    }
    // Also together with its own address, and in a later session.
    let (mut answers, answer) = attacher.ask(&["127.0.0.53:53", "127.0.0.1:53"]);
    assert!(answer["Maps"].is_object(), "{answer}");
    let mut say = |message: &Value| writeln!(answers.get_mut(), "{message}").unwrap();
    say(&json!("Filled"));
    say(&json!({"Listen": ["127.0.0.1:53", "8.8.8.8:53"]}));
    let end = Instant::now() + LIMIT;
    loop {
        let told = line(&mut answers);
        let endpoints = &told["Status"]["interfaces"]["endpoints"];
        assert!(
            *endpoints == json!(["127.0.0.1:53"]) || *endpoints == json!([]),
            "{told}"
        );
        if told["Status"]["ready"] == true {
            break;
        }
        assert!(Instant::now() < end, "the programs are not attached");
    }
}

#[test]
fn idle_sessions_give_way() {
    requires!(namespaces, bpf);
    let attacher = Attacher::start("starve");
    // They take their maps but never fill them.
    let idle: Vec<_> = (0..4).map(|_| attacher.ask(&["127.0.0.1:53"])).collect();
    assert!(idle.iter().all(|(_, answer)| answer["Maps"].is_object()));
    for _ in 0..3 {
        let (_kept, answer) = attacher.ask(&["127.0.0.1:53"]);
        assert!(answer["Maps"].is_object(), "{answer}");
    }
}

#[test]
fn hurried_sessions_hold_few_maps() {
    const CONNECTIONS: usize = 300;
    /// Those of the connected servers, and as many that are ending.
    const MAX_HOLDING: usize = 8;
    requires!(namespaces, bpf);
    let attacher = Attacher::start("hurry");
    // For each set of maps there is a thread that loads programs.
    let loading = || {
        let mut count = 0;
        let threads = format!("/proc/{}/task", attacher.process.pid());
        for thread in std::fs::read_dir(threads).unwrap().flatten() {
            // The thread may have ended by now.
            let name = std::fs::read_to_string(thread.path().join("comm")).unwrap_or_default();
            count += usize::from(name == "programs\n");
        }
        count
    };
    let wanted = json!({"layout": dns_common::LAYOUT_VERSION, "listen": ["127.0.0.1:53"]});
    thread::scope(|scope| {
        let flood = scope.spawn(|| {
            for _ in 0..CONNECTIONS {
                let mut stream = UnixStream::connect(attacher.socket()).unwrap();
                writeln!(stream, "{wanted}").unwrap();
            }
            // Behind all of them.
            attacher.ask(&["127.0.0.1:53"]).1
        });
        while !flood.is_finished() {
            let loading = loading();
            assert!(loading <= MAX_HOLDING, "{loading} sets of maps");
        }
        let answer = flood.join().unwrap();
        assert!(answer["Maps"].is_object(), "{answer}");
    });
}

#[test]
fn refused_requests_fill_no_log() {
    const REQUESTS: usize = 300;
    requires!(namespaces, bpf);
    let attacher = Attacher::start("refused");
    for _ in 0..REQUESTS {
        let mut stream = UnixStream::connect(attacher.socket()).unwrap();
        writeln!(stream, "{}", json!({"layout": 0, "listen": []})).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        assert!(answer.contains("Refused"), "{answer}");
    }
    let log = std::fs::read_to_string(attacher.folder.path().join("log")).unwrap();
    let lines = log.matches("server refused").count();
    // One a second after the first ones.
    assert!(lines < REQUESTS / 2, "{log}");
}

#[test]
fn churning_sessions_keep_descriptors_valid() {
    const SESSIONS: usize = 40;
    requires!(namespaces, bpf);
    let attacher = Attacher::start("churn");
    let descriptors = || {
        std::fs::read_dir(format!("/proc/{}/fd", attacher.process.pid()))
            .unwrap()
            .count()
    };
    // The socket appears before start-up is complete; a refusal shows that all other files are open.
    let (mut refused, answer) = attacher.ask(&["127.0.0.53:53"]);
    assert!(answer["Refused"].is_string(), "{answer}");
    assert_eq!(
        refused.read_line(&mut String::new()).unwrap(),
        0,
        "the session ends"
    );
    let before = descriptors();
    let mut predecessor = None;
    for session in 0..SESSIONS {
        let (mut answers, answer) = attacher.ask(&["127.0.0.1:53"]);
        assert!(answer["Maps"].is_object(), "{answer}");
        // Sessions end with empty maps, while programs are loaded, and with attached programs.
        if session % 2 == 0 {
            writeln!(answers.get_mut(), "{}", json!("Filled")).unwrap();
        }
        while session % 4 == 0 && line(&mut answers)["Status"]["ready"] != true {}
        // The previous one ends while this one loads its programs.
        predecessor = Some(answers);
    }
    drop(predecessor);
    wait_until("the sessions' descriptors to be closed", LIMIT, || {
        descriptors() <= before
    })
    .unwrap();
    let log = || std::fs::read_to_string(attacher.folder.path().join("log")).unwrap();
    let handed = || log().matches("maps handed to a server").count();
    wait_until("a line for each session", LIMIT, || handed() >= SESSIONS).unwrap();
    let log = log();
    assert_eq!(handed(), SESSIONS, "{log}");
    assert!(
        !log.contains("Bad file descriptor") && !log.contains("os error 9"),
        "{log}"
    );
}
