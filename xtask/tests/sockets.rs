//! docs/security.md lists every socket that a program accepts or opens, with its limits.

#![expect(
    clippy::unwrap_used,
    reason = "a test that cannot read its input has failed"
)]

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
};

use crate::sources;

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

/// The constants that hold the figures of each row, which is named by its beginning: the figure as it is written, the
/// file below `dns-user`, and an expression over its constants or the name of a field with a default.
const KEPT: &[(&str, &[Figure])] = &[
    (
        "server: DNS by UDP",
        &[
            ("4,096", "resolver/src/server/udp.rs", "QUERY_SIZE"),
            ("32,768", "resolver/src/server/mod.rs", "MAX_WAITING"),
            ("4 MiB", "resolver/src/server/sockets.rs", "RECEIVE_BUFFER"),
            ("4 MiB", "resolver/src/server/answer_cache.rs", "HALF"),
            (
                "128 MiB",
                "resolver/src/server/answer_cache.rs",
                "ALL_HALVES",
            ),
        ],
    ),
    (
        "server: DNS by TCP",
        &[
            ("8 s", "resolver/src/server/mod.rs", "tcp_idle_timeout"),
            ("10 s", "resolver/src/server/tcp_limits.rs", "WRITE_TIMEOUT"),
            ("128 KiB", "resolver/src/server/tcp_limits.rs", "MAX_HELD"),
            ("1,024", "resolver/src/server/mod.rs", "MAX_TCP_CONNECTIONS"),
            ("64", "resolver/src/server/tcp_limits.rs", "MAX_WAITING"),
            (
                "16 MiB",
                "resolver/src/server/tcp_limits.rs",
                "MAX_HELD_BY_ALL",
            ),
        ],
    ),
    (
        "every HTTP server below",
        &[
            ("5 s", HTTP_SERVER, "handshake"),
            ("65 s", HTTP_SERVER, "idle"),
            ("20 s", HTTP_SERVER, "request"),
            ("20 s", HTTP_SERVER, "unread"),
            ("64 KiB", HTTP_SERVER, "head"),
            ("8 MiB", HTTP_SERVER, "body"),
            ("128", HTTP_SERVER, "connections"),
            ("16 MiB", HTTP_SERVER, "bodies"),
            ("16 MiB", "kit/src/http_server/unread.rs", "MAX_WAITING"),
        ],
    ),
    (
        "server: API",
        &[
            (
                "1,000",
                "core/src/resolve/addresses.rs",
                "MAX_ADDRESS_QUERIES",
            ),
            ("128", HTTP_SERVER, "connections"),
        ],
    ),
    ("server: metrics", &[("128", HTTP_SERVER, "connections")]),
    (
        "health server",
        &[
            ("75 s", "health/src/server/mod.rs", "IDLE_LIMIT"),
            ("16 KiB", "health/src/server/mod.rs", "head"),
            ("8,192", "health/src/server/mod.rs", "MAX_CONNECTIONS"),
            ("64", "health/src/server/mod.rs", "OTHER_FILES"),
        ],
    ),
    ("publisher: API", &[("128", HTTP_SERVER, "connections")]),
    ("sync: distributor", &[("128", HTTP_SERVER, "connections")]),
    (
        "identity: issuer | `identity/src/fleet/issuer.rs`",
        &[
            ("64 KiB", "identity/src/fleet/issuer.rs", "MAX_CALL"),
            ("1,024", "identity/src/fleet/issuer.rs", "MAX_CONNECTIONS"),
        ],
    ),
    (
        "identity: rotator",
        &[
            ("10 s", "identity/src/run.rs", "TIMEOUT"),
            ("120 s", "identity/src/run.rs", "MAX_WAIT"),
            ("1 MiB", "identity/src/run.rs", "MAX_COMMAND"),
            ("64 MiB", "identity/src/run.rs", "MAX_REPLY"),
            ("16", "identity/src/run.rs", "MAX_CONTROL"),
        ],
    ),
    (
        "attacher: servers",
        &[
            ("5 s", "attacher/src/service/session.rs", "TIMEOUT"),
            ("1 MiB", "fastpath/src/protocol/transport.rs", "MAX_LINE"),
            ("4", "attacher/src/service/mod.rs", "MAX_SESSIONS"),
        ],
    ),
    (
        "server: attacher",
        &[
            ("60 s", "fastpath/src/connection.rs", "LOAD_TIMEOUT"),
            ("20 s", "fastpath/src/connection.rs", "STOP_TIMEOUT"),
            ("1 s", "fastpath/src/connection.rs", "ROUND"),
            ("1 MiB", "fastpath/src/protocol/transport.rs", "MAX_LINE"),
        ],
    ),
    (
        "server: recursors by UDP",
        &[
            ("10 s", "upstream/src/udp.rs", "LIFETIME"),
            ("65,535", "upstream/src/udp.rs", "MAX_DATAGRAM"),
            ("8", "upstream/src/udp.rs", "SOCKETS"),
            ("16,384", "upstream/src/udp.rs", "MAX_IN_FLIGHT"),
            ("8,192", "upstream/src/cached.rs", "MAX_WAITING_FOR_DNS"),
            ("1 MiB", "upstream/src/udp.rs", "RECEIVE_BUFFER"),
        ],
    ),
    (
        "server: recursors by TCP",
        &[
            ("4 s", "upstream/src/tcp.rs", "MAX_IDLE"),
            ("20 s", "upstream/src/tcp.rs", "MAX_IDLE_TLS"),
            ("64", "upstream/src/tcp.rs", "MAX_CONNECTIONS"),
            ("64", "upstream/src/tcp.rs", "MAX_PIPELINED"),
            ("16", "upstream/src/slots.rs", "MIN_CONNECTIONS_OF_ALL"),
            ("4,096", "upstream/src/slots.rs", "MAX_CONNECTIONS_OF_ALL"),
        ],
    ),
    (
        "server: HTTP handlers",
        &[
            ("5 s", "upstream/src/connector.rs", "CONNECT_TIMEOUT"),
            ("30 s", "upstream/src/http.rs", "IDLE_TIMEOUT"),
            ("4 MiB", "upstream/src/http.rs", "MAX_DOCUMENT"),
            ("64", "upstream/src/connector.rs", "MAX_CONNECTIONS"),
            ("10", "upstream/src/http.rs", "MAX_REQUESTS"),
            ("1,024", "upstream/src/cached.rs", "MAX_WAITING_FOR_HTTP"),
        ],
    ),
    (
        "server: health checks",
        &[
            ("112 KiB", "health/src/check.rs", "MAX_RECEIVED"),
            ("1,024", "health/src/check.rs", "MAX_GROUPS"),
            ("2,048", "health/src/service.rs", "KEPT"),
        ],
    ),
    (
        "server: Consul",
        &[
            ("5 s", "consul-source/src/connections.rs", "CONNECT_TIMEOUT"),
            ("10 s", "consul-source/src/connections.rs", "BODY_SILENCE"),
            ("120 s", "consul-source/src/connections.rs", "BODY_TIMEOUT"),
            ("256 MiB", "consul-source/src/connections.rs", "MAX_BODY"),
            ("100", "consul-source/src/connections.rs", "MAX_STREAMS"),
        ],
    ),
    (
        "server: dnstap",
        &[
            ("5 s", "dnstap/src/writer.rs", "TIMEOUT"),
            ("256 KiB", "dnstap/src/writer.rs", "BATCH"),
            ("16 MiB", "dnstap/src/lib.rs", "MAX_QUEUED_BYTES"),
            ("16,384", "dnstap/src/lib.rs", "MAX_QUEUED"),
        ],
    ),
    (
        "server: self-checks",
        &[
            ("500 ms", "resolver/src/daemon/upcheck.rs", "TIMEOUT"),
            ("4,096", "resolver/src/daemon/upcheck.rs", "MAX_REPLY"),
        ],
    ),
    (
        "commands: server",
        &[
            ("30 s", "cli/src/operate/waiting.rs", "MAX_WAIT"),
            ("256 MiB", "cli/src/operate/client.rs", "MAX_BODY"),
        ],
    ),
    (
        "`shadow`: name servers",
        &[
            ("3 s", "shadow/src/ask.rs", "PATIENCE"),
            ("10 s", "cli/src/shadow/health.rs", "time"),
            ("64 MiB", "cli/src/shadow/health.rs", "body"),
            ("64", "shadow/src/ask.rs", "MAX_WAITING"),
        ],
    ),
    (
        "`shadow`: answers",
        &[("65,507", "core/src/wire/mod.rs", "MAX_UDP_SIZE")],
    ),
    (
        "publisher: fleet names",
        &[
            ("5 s", "publish/src/fleet/mod.rs", "time"),
            ("30 s", "publish/src/control.rs", "TIMEOUT"),
            ("64 MiB", "publish/src/fleet/mod.rs", "body"),
            ("64 MiB", "publish/src/control.rs", "MAX_RESPONSE"),
        ],
    ),
    (
        "publisher: providers by HTTP",
        &[
            ("30 s", "publish/src/provider/aws/api.rs", "TIMEOUT"),
            ("10 s", "publish/src/provider/coredns/mod.rs", "timeout"),
            ("256 MiB", "publish/src/provider/mod.rs", "MAX_BODY"),
            ("1,000", "publish/src/provider/mod.rs", "MAX_PAGES"),
            ("32 MiB", "publish/src/webhook.rs", "MAX_MESSAGE"),
            ("1", "publish/src/provider/mod.rs", "WINDOW"),
        ],
    ),
    (
        "publisher: name servers",
        &[
            ("10 s", "publish/src/provider/rfc2136/mod.rs", "TIMEOUT"),
            ("60", "publish/src/provider/rfc2136/mod.rs", "MAX_EXCHANGE"),
            ("16", "publish/src/provider/rfc2136/mod.rs", "WINDOW"),
            (
                "128",
                "publish/src/provider/rfc2136/mod.rs",
                "MAX_PIPELINED",
            ),
            (
                "256 MiB",
                "publish/src/provider/rfc2136/messages.rs",
                "MAX_ZONE",
            ),
        ],
    ),
    (
        "sync: NATS",
        &[
            ("60 s", "sync/src/bus.rs", "MAX_ATTEMPT"),
            ("10 s", "sync/src/bus.rs", "1000 * PING_EVERY"),
        ],
    ),
    (
        "sync: object stores",
        &[
            ("10 s", "sync/src/cli/inventory.rs", "time"),
            ("64 MiB", "sync/src/cli/inventory.rs", "body"),
            ("64 MiB", "sync/src/store/mod.rs", "MAX_BLOB"),
            ("1 MiB", "sync/src/store/mod.rs", "MAX_ANSWER"),
        ],
    ),
    (
        "identity: issuer | `identity/src/fleet/mod.rs`",
        &[
            ("30 s", "identity/src/fleet/mod.rs", "TIMEOUT"),
            ("1 MiB", "identity/src/fleet/mod.rs", "MAX_REPLY"),
        ],
    ),
    (
        "load generator: load",
        &[
            ("1 s", "load/src/sockets.rs", "MAX_AGE"),
            ("12", "load/src/sockets.rs", "HEADER_LEN"),
            ("64", "load/src/sockets.rs", "MAX_SOCKETS"),
        ],
    ),
    (
        "load generator: the",
        &[
            ("1 s", "load/src/consent.rs", "MAX_WAIT"),
            ("4,096", "load/src/consent.rs", "MAX_REPLY"),
        ],
    ),
    (
        "all: state",
        &[
            ("100 ms", "kit/src/connections.rs", "TIMEOUT"),
            ("512", "kit/src/connections.rs", "MAX_REPLY"),
        ],
    ),
];

/// A figure, a file, and what holds the figure there.
type Figure = (&'static str, &'static str, &'static str);

/// The file with the limits of every HTTP server.
const HTTP_SERVER: &str = "kit/src/http_server.rs";

/// Figures that no constant holds: a value instead of a list, nothing, and the longest message that a length of two
/// bytes announces.
const BY_FORM: [&str; 4] = ["1", "1 byte", "0", "65,535"];

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
    let root = sources::root().join("dns-user");
    let mut found = BTreeMap::new();
    for path in sources::rust_files(&root) {
        let name = path.strip_prefix(&root).unwrap().display().to_string();
        let is_test = sources::is_test(&name);
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
    let page = fs::read_to_string(sources::root().join("docs/security.md")).unwrap();
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

//----------- Figures --------------------------------------------------------

/// Returns the figures in a cell, each with its unit.
fn figures(cell: &str) -> Vec<String> {
    const UNITS: [&str; 6] = ["ms", "s", "KiB", "MiB", "GiB", "byte"];
    let mut found = Vec::new();
    let mut words = cell
        .split(|c: char| c.is_whitespace() || c == ';' || c == '(' || c == ')')
        .peekable();
    while let Some(word) = words.next() {
        // The name of a setting, or of another row.
        if word.starts_with('`') || !word.contains(|c: char| c.is_ascii_digit()) {
            continue;
        }
        let number = word.trim_end_matches(',');
        let unit = words
            .peek()
            .map(|unit| unit.trim_end_matches(','))
            .filter(|unit| UNITS.contains(unit));
        found.push(match unit {
            Some(unit) => format!("{number} {unit}"),
            None => number.to_owned(),
        });
    }
    found
}

/// Returns the value of a figure: milliseconds, bytes, or a number.
fn value_of_figure(figure: &str) -> u64 {
    let (number, unit) = figure.split_once(' ').unwrap_or((figure, ""));
    let number: u64 = number.replace(',', "").parse().unwrap();
    number
        * match unit {
            "s" => 1000,
            "KiB" => 1 << 10,
            "MiB" => 1 << 20,
            "GiB" => 1 << 30,
            _ => 1,
        }
}

/// Evaluates an expression of constants of a file: sums, products and shifts of numbers, durations in milliseconds,
/// and other constants of the file.
fn evaluate(expression: &str, code: &str) -> Option<u64> {
    let text = expression.trim().trim_start_matches("std::time::");
    for (operator, apply) in OPERATORS {
        if let Some((left, right)) = split_at(text, operator) {
            return Some(apply(evaluate(left, code)?, evaluate(right, code)?));
        }
    }
    if let Some(inner) = text
        .strip_prefix('(')
        .and_then(|text| text.strip_suffix(')'))
    {
        return evaluate(inner, code);
    }
    for (call, milliseconds) in [
        ("Duration::from_millis(", 1),
        ("Duration::from_secs(", 1000),
        ("Duration::from_mins(", 60_000),
    ] {
        if let Some(argument) = text.strip_prefix(call) {
            return Some(milliseconds * evaluate(argument.strip_suffix(')')?, code)?);
        }
    }
    text.replace('_', "")
        .parse()
        .ok()
        .or_else(|| value_in_code(text, code))
}

type Apply = fn(u64, u64) -> u64;

/// The operators of [`evaluate`], the weakest first.
const OPERATORS: [(&str, Apply); 3] = [
    (" << ", |left, right| left << right),
    (" + ", |left, right| left + right),
    (" * ", |left, right| left * right),
];

/// Splits an expression at an operator outside of parentheses.
fn split_at<'t>(text: &'t str, operator: &str) -> Option<(&'t str, &'t str)> {
    for (at, _) in text.match_indices(operator) {
        let (left, right) = (&text[..at], &text[at + operator.len()..]);
        if left.matches('(').count() == left.matches(')').count() {
            return Some((left, right));
        }
    }
    None
}

/// Returns the value of a constant, or of the first field of this name that has one.
fn value_in_code(name: &str, code: &str) -> Option<u64> {
    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
    if name.is_empty() || !name.chars().all(is_name) {
        return None;
    }
    let constant = format!("const {name}: ");
    let field = format!("{name}: ");
    code.lines().map(str::trim).find_map(|line| {
        if let Some((_, rest)) = line.split_once(&constant) {
            let (_, expression) = rest.strip_suffix(';')?.split_once(" = ")?;
            return evaluate(expression, code);
        }
        let expression = line.strip_prefix(&field)?.strip_suffix(',')?;
        // The declaration of a field has a type.
        if expression == name {
            return None;
        }
        evaluate(expression, code)
    })
}

#[test]
fn figures_equal_constants() {
    let sources = sources::root().join("dns-user");
    let mut wrong = Vec::new();
    let mut compared = 0;
    let mut named = BTreeSet::new();
    for row in table() {
        let begins = |&&(name, _): &&(&str, &[Figure])| row.text[2..].starts_with(name);
        let of_row = KEPT
            .iter()
            .filter(begins)
            .max_by_key(|(name, _)| name.len());
        let (name, kept) = of_row.copied().unwrap_or(("", &[]));
        named.insert(name);
        let written: Vec<String> = row.limits.iter().flat_map(|cell| figures(cell)).collect();
        for figure in &written {
            let is_kept = kept.iter().any(|(of, ..)| of == figure);
            if !is_kept && !BY_FORM.contains(&figure.trim_end_matches(" s")) {
                wrong.push(format!("no constant is named for {figure}: {}", row.text));
            }
        }
        for (figure, file, item) in kept {
            let code = fs::read_to_string(sources.join(file)).unwrap();
            let value = evaluate(item, &code);
            if value != Some(value_of_figure(figure)) {
                wrong.push(format!(
                    "{name}: {figure}, but {item} of {file} is {value:?}"
                ));
            }
            if !written.iter().any(|written| written == figure) {
                wrong.push(format!("{name}: {figure} ({item}) is not in the table"));
            }
            compared += 1;
        }
    }
    for (name, _) in KEPT {
        if !named.contains(name) {
            wrong.push(format!("no row begins with {name:?}"));
        }
    }
    assert!(
        wrong.is_empty(),
        "docs/security.md, \"Sockets and their limits\":\n{}",
        wrong.join("\n")
    );
    assert!(compared > 80, "{compared} figures");
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
