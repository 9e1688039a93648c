//! docs/security.md lists every socket that a program accepts or opens, with its limits.

#![expect(
    clippy::unwrap_used,
    reason = "a test that cannot read its input has failed"
)]

mod sources;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

/// Calls and types that make a socket, accept connections or connect.
const CONSTRUCTORS: [&str; 16] = [
    "TcpListener::bind(",
    "TcpListener::from_std(",
    "TcpStream::connect(",
    "TcpStream::connect_timeout(",
    "UdpSocket::bind(",
    "UnixListener::bind(",
    "UnixListener::from_std(",
    "UnixStream::connect(",
    "UnixStream::pair(",
    "UnixDatagram::",
    "Socket::new(",
    "AddressFamily::Unix",
    "unix_socket::bind(",
    "ControlSocket::bind(",
    "HttpConnector",
    "HttpClient::new(",
];

/// Constructors that libraries hide, and the clients of protocols.
const LIBRARIES: [&str; 2] = ["ConnectOptions::", "http_server::Server"];

/// Headings of the columns with limits.
const LIMITS: [&str; 4] = ["Time", "Bytes", "Count", "Memory"];

/// Returns the code of a file without its tests.
fn without_tests(text: &str) -> String {
    let mut code = String::new();
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        if line.trim_start() != "#[cfg(test)]" {
            code.push_str(line);
            code.push('\n');
            continue;
        }
        // A module of tests is the end of its file; an item of one line is left out.
        let item = lines.next().unwrap_or_default();
        if item.starts_with("mod ") && item.ends_with('{') {
            break;
        }
    }
    code
}

/// Returns the files that make sockets, as `crate/src/file.rs`, with what they use.
fn files_with_sockets() -> BTreeMap<String, Vec<&'static str>> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../dns-user");
    let mut found = BTreeMap::new();
    for path in sources::rust_files(&root) {
        let name = path.strip_prefix(&root).unwrap().display().to_string();
        let is_test = name.contains("/tests/") || name.ends_with("/tests.rs");
        if is_test || !name.contains("/src/") {
            continue;
        }
        let code = without_tests(&fs::read_to_string(&path).unwrap());
        let mut used = Vec::new();
        for constructor in CONSTRUCTORS.into_iter().chain(LIBRARIES) {
            if code.contains(constructor) {
                used.push(constructor);
            }
        }
        if !used.is_empty() {
            found.insert(name, used);
        }
    }
    found
}

/// A row of the table.
struct Row {
    text: String,
    /// Files named in the row.
    files: Vec<String>,
    /// The cells below [`LIMITS`].
    limits: Vec<String>,
}

/// Reads the table of the section "Sockets and their limits".
fn table() -> Vec<Row> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let page = fs::read_to_string(root.join("docs/security.md")).unwrap();
    let (_, section) = page.split_once("## Sockets and their limits").unwrap();
    let section = section.split("\n## ").next().unwrap();
    let mut rows = Vec::new();
    for line in section.lines().filter(|line| line.starts_with("| ")) {
        let cells: Vec<&str> = line.trim_matches('|').split(" | ").map(str::trim).collect();
        if cells.last() == Some(&LIMITS[3]) {
            assert_eq!(cells[2..], LIMITS, "the headings");
            continue;
        }
        assert_eq!(cells.len(), 2 + LIMITS.len(), "{line}");
        let files = cells[1].split('`').skip(1).step_by(2);
        rows.push(Row {
            text: line.to_owned(),
            files: files.map(str::to_owned).collect(),
            limits: cells[2..].iter().map(|&cell| cell.to_owned()).collect(),
        });
    }
    rows
}

#[test]
fn every_socket_has_limits() {
    let rows = table();
    assert!(rows.len() > 20, "{} rows", rows.len());
    for Row {
        text,
        files,
        limits,
    } in &rows
    {
        assert!(!files.is_empty(), "no file is named: {text}");
        for (limit, heading) in limits.iter().zip(LIMITS) {
            // A limit is a number, the setting that has one, or the row whose limit holds.
            let is_limit = limit.contains(|c: char| c.is_ascii_digit())
                || limit.contains('`')
                || limit.starts_with("as ");
            assert!(is_limit, "{heading} has no limit: {text}");
        }
    }
}

#[test]
fn every_socket_is_listed() {
    let sockets = files_with_sockets();
    assert!(sockets.len() > 20, "{sockets:?}");
    let listed: BTreeSet<String> = table().into_iter().flat_map(|row| row.files).collect();
    let missing: Vec<_> = sockets
        .iter()
        .filter(|(file, _)| !listed.contains(*file))
        .collect();
    assert!(
        missing.is_empty(),
        "add rows to \"Sockets and their limits\" in docs/security.md: {missing:#?}"
    );
    let stale: Vec<_> = listed
        .iter()
        .filter(|file| !sockets.contains_key(*file))
        .collect();
    assert!(stale.is_empty(), "listed without a socket: {stale:?}");
}
