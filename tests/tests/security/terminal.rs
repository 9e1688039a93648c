//! Names that contain terminal escape sequences.

use std::process::Command;

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
    wait_until("the control socket", std::time::Duration::from_secs(30), || socket.exists()).unwrap();
    // A file whose name appears in an error.
    std::fs::write(server.folder.path().join(format!("aliases/{HOSTILE}.json")), "{").unwrap();
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
    ] {
        let output = Command::new(server::program().unwrap())
            .args(arguments)
            .arg("--config")
            .arg(server.folder.path().join("config.json"))
            .output()
            .unwrap();
        for bytes in [output.stdout, output.stderr] {
            let text = String::from_utf8(bytes).unwrap();
            let raw = text.chars().find(|c| {
                (c.is_control() && *c != '\n' && *c != '\t') || ('\u{202a}'..='\u{202e}').contains(c)
            });
            assert_eq!(raw, None, "{arguments:?}: {text:?}");
        }
    }
    let log = server.log();
    assert!(log.contains("\\u{9b}") || log.contains("\\u009b"), "nothing hostile was logged: {log}");
    assert!(!log.chars().any(|c| (c.is_control() && c != '\n') || c == '\u{202e}'), "{log:?}");
}
