//! Names that contain terminal escape sequences.

use std::{
    net::UdpSocket,
    process::Command,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use serde_json::json;
use whole_system_tests::{
    namespace::Namespace,
    process::wait_until,
    requires,
    server::{self, Server},
};

/// Clears the screen by C0 and C1 sequences; reverses the text direction.
const HOSTILE: &str = "web\u{1b}[2J\u{9b}2J\u{202e}x\u{7}";

#[test]
fn commands_strip_escape_sequences() {
    requires!(namespaces);
    Namespace::new("escape").unwrap().run(commands).unwrap();
}

fn commands() {
    let records = json!({
        "record_keys": ["id", "instance_group", "group_ids", "az", "az_id", "network", "deployment", "ip", "domain"],
        "record_infos": [[HOSTILE, HOSTILE, ["1"], HOSTILE, "1", "net", HOSTILE, "10.0.0.1", HOSTILE],
            ["fine", "web", ["1"], "z1", "1", "net", "dep", "10.0.0.2", "bosh"]],
    });
    let folder = server::folder(&serde_json::to_vec(&records).unwrap(), None).unwrap();
    let settings = json!({
        "control": {"socket": folder.path().join("control.sock")}, "xdp": {"mode": "off"},
    });
    let server = Server::start(None, folder, ([127, 0, 0, 1], 53).into(), &settings).unwrap();
    let socket = server.folder.path().join("control.sock");
    wait_until("the control socket", Duration::from_secs(120), || {
        socket.exists()
    })
    .unwrap();
    // A file whose name appears in an error.
    std::fs::write(
        server.folder.path().join(format!("aliases/{HOSTILE}.json")),
        "{",
    )
    .unwrap();
    let resolved = format!("q-s0.web.net.dep.{HOSTILE}.");
    for arguments in [
        &["status"][..],
        &["status", "--json"],
        &["instances"],
        &["instances", "--json"],
        &["local-groups"],
        &["resolve", "q-s0.q-g1.bosh."],
        &["resolve", &resolved],
        &["resolve", "--json", &resolved],
        &["instances", "--address", &resolved],
        &["reload"],
        &["reload", "--json"],
        &["check"],
        &["check", "--json"],
        &["log", "--tag", HOSTILE, "--level", "debug"],
        &["status", HOSTILE],
        &[HOSTILE],
    ] {
        stripped(arguments, &server);
    }
    // Names of queries come from the network.
    let queries = UdpSocket::bind("127.0.0.1:0").unwrap();
    queries.connect(server.address).unwrap();
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                queries.send(&query(HOSTILE)).unwrap();
                thread::sleep(Duration::from_millis(5));
            }
        });
        for arguments in [
            &["tap", "--count", "1", "--name", "web"][..],
            &["top", "--once", "--seconds", "1"],
        ] {
            for json in [&[][..], &["--json"]] {
                let arguments = [arguments, json].concat();
                let shown = stripped(&arguments, &server);
                assert!(shown.contains("web"), "{arguments:?}: {shown}");
            }
        }
        done.store(true, Ordering::Relaxed);
    });
    let log = server.log();
    assert!(
        log.contains("\\u{9b}") || log.contains("\\u009b"),
        "nothing hostile was logged: {log}"
    );
    assert!(
        !log.chars()
            .any(|c| (c.is_control() && c != '\n') || c == '\u{202e}'),
        "{log:?}"
    );
}

/// Runs a command that must not print control characters; returns its standard output.
fn stripped(arguments: &[&str], server: &Server) -> String {
    let mut command = Command::new(server::program().unwrap());
    let config = server.folder.path().join("config.json");
    let output = command
        .args(arguments)
        .arg("--config")
        .arg(config)
        .output()
        .unwrap();
    let [shown, _] = [output.stdout, output.stderr].map(|bytes| {
        let text = String::from_utf8(bytes).unwrap();
        let raw = text
            .chars()
            .find(|&c| dns_core::terminal::is_active(c) && c != '\n' && c != '\t');
        assert_eq!(raw, None, "{arguments:?}: {text:?}");
        text
    });
    shown
}

/// Returns a query (A) for a name of one label with these bytes.
fn query(label: &str) -> Vec<u8> {
    let head = [
        0x17,
        0x2a,
        1,
        0,
        0,
        1,
        0,
        0,
        0,
        0,
        0,
        0,
        u8::try_from(label.len()).unwrap(),
    ];
    [&head[..], label.as_bytes(), &[4], b"bosh", &[0, 0, 1, 0, 1]].concat()
}
