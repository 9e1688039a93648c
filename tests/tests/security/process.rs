//! Privileges of the server's process, and access to its control socket.

use std::{fs, os::unix::process::CommandExt as _, process::Command, time::Duration};

use serde_json::json;
use whole_system_tests::{
    namespace::Namespace,
    process::{status_line, wait_until},
    requires,
    server::{self, Server},
};

const NOBODY: u32 = 65534;

#[test]
fn server_drops_privileges_permanently() {
    requires!(namespaces);
    Namespace::new("process").unwrap().run(inspect).unwrap();
}

fn inspect() {
    let folder = server::folder(&server::records_of_groups(&[1]), None).unwrap();
    let shared = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    fs::set_permissions(folder.path(), shared).unwrap();
    let socket = folder.path().join("run/control.sock");
    let settings = json!({"control": {"socket": socket}, "xdp": {"mode": "off", "user": "nobody"}});
    let server = Server::start(None, folder, ([127, 0, 0, 1], 53).into(), &settings).unwrap();
    let value = |name: &str| status_line(server.pid(), name).unwrap();
    assert_eq!(
        (value("NoNewPrivs"), value("Seccomp")),
        ("1".to_owned(), "2".to_owned())
    );
    confined_threads(server.pid());
    for set in ["CapEff", "CapPrm", "CapBnd"] {
        // CAP_NET_BIND_SERVICE.
        assert_eq!(
            u64::from_str_radix(&value(set), 16).unwrap(),
            1 << 10,
            "{set}"
        );
    }
    assert!(
        value("Uid")
            .split_whitespace()
            .all(|user| user == NOBODY.to_string())
    );
    // The server's user may operate it; other users may not.
    wait_until("the control socket", Duration::from_secs(120), || {
        socket.exists()
    })
    .unwrap();
    let ask_as = |user: u32| {
        let mut command = Command::new(server::program().unwrap());
        command
            .args(["flush", "--config"])
            .arg(server.folder.path().join("config.json"));
        command.uid(user).gid(user).output().unwrap()
    };
    let own = ask_as(NOBODY);
    assert!(
        own.status.success(),
        "{}",
        String::from_utf8_lossy(&own.stderr)
    );
    assert_eq!(ask_as(1).status.code(), Some(3));
}

/// Checks that every thread is confined. A thread that exists when another one enters its filter stays outside
/// (seccomp(2)).
fn confined_threads(pid: u32) {
    let mut threads = 0;
    for task in fs::read_dir(format!("/proc/{pid}/task")).unwrap() {
        let path = task.unwrap().path();
        // A thread may have ended since.
        let Ok(status) = fs::read_to_string(path.join("status")) else {
            continue;
        };
        assert!(status.contains("\nSeccomp:\t2\n"), "{}", path.display());
        threads += 1;
    }
    assert!(threads > 1, "{threads} threads were seen");
}

#[test]
fn root_is_noted_by_status() {
    requires!(namespaces);
    Namespace::new("asroot").unwrap().run(note).unwrap();
}

fn note() {
    for (user, is_root) in [("", true), ("nobody", false)] {
        let folder = server::folder(&server::records_of_groups(&[1]), None).unwrap();
        let shared = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        fs::set_permissions(folder.path(), shared).unwrap();
        let socket = folder.path().join("run/control.sock");
        let settings = json!({"control": {"socket": socket}, "xdp": {"mode": "off", "user": user}});
        let server = Server::start(None, folder, ([127, 0, 0, 1], 53).into(), &settings).unwrap();
        wait_until("the control socket", Duration::from_secs(120), || {
            socket.exists()
        })
        .unwrap();
        let mut command = Command::new(server::program().unwrap());
        command
            .args(["status", "--config"])
            .arg(server.folder.path().join("config.json"));
        let shown = command.output().unwrap();
        // A remark, not a problem.
        assert!(shown.status.success());
        let shown = String::from_utf8(shown.stdout).unwrap();
        assert_eq!(
            shown.contains("  note  the server runs as root"),
            is_root,
            "{user:?}: {shown}"
        );
        if is_root {
            server
                .wait_for_log("INFO  [main] the server runs as root")
                .unwrap();
        }
        let log = server.log();
        assert_eq!(
            log.contains("INFO  [main] the server runs as root"),
            is_root,
            "{user:?}: {log}"
        );
        assert!(!log.contains("WARN"), "{user:?}: {log}");
    }
}
