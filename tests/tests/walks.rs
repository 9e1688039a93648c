//! The walks in docs/architecture.md list the source files that one event visits: a query, a new records.json, a
//! changed document. The tests trace such events in the debug builds of the programs and compare.

#![cfg(target_arch = "x86_64")]

use std::{
    collections::BTreeSet,
    fmt::Write as _,
    fs,
    net::{Ipv4Addr, SocketAddr, UdpSocket},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use dns_health::HEALTH_NAME;
use hickory_proto::{
    op::{Message, MessageType, ResponseCode},
    rr::{RData, Record, RecordType, rdata::A},
};
use serde_json::json;
use whole_system_tests::{
    bpffs::Bpffs,
    client, fleet,
    health::{Authority, Fleet, instance, write_files},
    metrics::wait_for_fast_path,
    namespace::Namespace,
    process::{Kept, wait_until},
    requires,
    server::{self, Server},
    visited::{Traced, Visits, workspace},
};

/// Time limit that is reached only on failure.
const LIMIT: Duration = Duration::from_secs(120);

/// Listen address of the server.
const SERVER: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 53);

/// Address of the recursor, or of the name server with the dynamic zone.
const PEER: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::new(127, 0, 0, 10)), 53);

/// Events of each kind. A name is asked for once.
const ROUNDS: usize = 12;

/// Files that a step uses like the standard library: the names of their functions say what they do.
const VOCABULARY: [(&str, &str); 24] = [
    ("core/catalog/columns.rs", "dictionaries and lists of rows"),
    ("core/config/values.rs", "reads a duration"),
    ("core/name.rs", "a domain name and its labels"),
    ("core/terminal.rs", "escapes control characters"),
    ("dns-common/name.rs", "the hash of a name"),
    (
        "core/catalog/outline/window.rs",
        "the next part of a file's text",
    ),
    ("kit/clock.rs", "reads a clock"),
    ("kit/files/atomic.rs", "like fs::write"),
    ("kit/files/bounded.rs", "like fs::read"),
    ("kit/files/denied.rs", "the words of a failed fs::read"),
    ("kit/foreign.rs", "cuts a log line"),
    ("kit/hex.rs", "writes bytes as hexadecimal digits"),
    ("kit/logs/requests.rs", "whether requests are logged"),
    ("kit/logs/tags.rs", "the tag of a log line"),
    ("kit/logs/writer.rs", "writes a log line"),
    ("kit/mmsg.rs", "recvmmsg and sendmmsg"),
    ("kit/threads.rs", "catches panics"),
    ("fastpath/map/words.rs", "loads and stores of one word"),
    (
        "fastpath/protocol/transport.rs",
        "writes a line to a socket",
    ),
    ("fastpath/publish/events.rs", "a channel"),
    ("publish/deletions.rs", "counts names, like a counter"),
    (
        "publish/provider/parameters.rs",
        "reads a parameter by its name",
    ),
    ("resolver/server/metrics.rs", "adds to counters"),
    ("upstream/own.rs", "whether an address is the server's own"),
];

/// Threads of other flows: the publisher follows later, health checks and log lines have their own time.
fn is_query_thread(name: &str) -> bool {
    !["publisher", "grace", "attacher", "health", "log"].contains(&name)
}

/// The threads that write to the maps.
fn is_publisher_thread(name: &str) -> bool {
    ["publisher", "grace"].contains(&name)
}

/// A walk of docs/architecture.md.
struct Walk {
    /// The words before its lists, each with the number of the list's first file.
    lists: &'static [(&'static str, usize)],
    most_files: usize,
}

const LOCAL: Walk = Walk {
    lists: &[
        ("A UDP query that no interface answered:", 1),
        ("A local name:", 9),
    ],
    most_files: 15,
};
const FORWARDED: Walk = Walk {
    lists: &[
        ("A UDP query that no interface answered:", 1),
        ("A forwarded name:", 9),
    ],
    most_files: 19,
};
const RECORDS: Walk = Walk {
    lists: &[("New records.json:", 1)],
    most_files: 20,
};
const INTERFACES: Walk = Walk {
    lists: &[("The interfaces follow:", 1)],
    most_files: 24,
};
const DOCUMENT: Walk = Walk {
    lists: &[("A changed document of `bosh-dns-publish`,", 1)],
    most_files: 17,
};

impl Walk {
    /// Returns the files that the document lists, relative to the workspace.
    fn listed(&self) -> Result<BTreeSet<PathBuf>> {
        let text = fs::read_to_string(workspace().join("docs/architecture.md"))?;
        let mut files = BTreeSet::new();
        for (beginning, first) in self.lists {
            let (_, rest) = text
                .split_once(&format!("\n{beginning}"))
                .with_context(|| (*beginning).to_owned())?;
            let list = rest.split("\n\n").nth(1).context("no list follows")?;
            let numbered = numbered_files(list);
            let numbers: Vec<usize> = numbered.iter().map(|(number, _)| *number).collect();
            ensure!(
                numbers.iter().copied().eq(*first..first + numbers.len()),
                "{beginning} {numbers:?}"
            );
            files.extend(numbered.iter().map(|(_, file)| in_crate(file)));
        }
        Ok(files)
    }

    /// Fails unless the document lists the files that events visited, and no other.
    fn compare(&self, visits: &Visits) -> Result<()> {
        let vocabulary: BTreeSet<PathBuf> =
            VOCABULARY.iter().map(|(file, _)| in_crate(file)).collect();
        let listed = self.listed()?;
        let mut problems = String::new();
        for file in visits
            .own
            .difference(&listed)
            .filter(|file| !vocabulary.contains(*file))
        {
            let functions = visits
                .functions
                .get(file)
                .into_iter()
                .flatten()
                .map(String::as_str);
            let functions: Vec<&str> = functions.take(40).collect();
            writeln!(
                problems,
                "not listed: {}: {}",
                file.display(),
                functions.join(", ")
            )?;
        }
        for file in listed.difference(&visits.all) {
            writeln!(problems, "not visited: {}", file.display())?;
        }
        let (what, files) = (self.lists.last().context("no list")?.0, listed.len());
        if files > self.most_files {
            writeln!(problems, "{files} files, more than {}", self.most_files)?;
        }
        ensure!(problems.is_empty(), "{what}\n{problems}");
        Ok(())
    }
}

/// Returns the files of a list with their numbers: `` 3. `core/wire/read.rs` ``.
fn numbered_files(list: &str) -> Vec<(usize, &str)> {
    let mut found = Vec::new();
    let mut parts = list.split('`');
    while let (Some(before), Some(file)) = (parts.next(), parts.next()) {
        let number = before.trim_end().strip_suffix('.').and_then(|text| {
            text.rsplit(|c: char| !c.is_ascii_digit())
                .next()
                .and_then(|digits| digits.parse().ok())
        });
        found.extend(number.map(|number| (number, file)));
    }
    found
}

/// Returns the path of a file named by its crate: `core/wire/read.rs` is `dns-user/core/src/wire/read.rs`.
fn in_crate(file: &str) -> PathBuf {
    let (crate_name, rest) = file.split_once('/').unwrap_or(("", file));
    match crate_name {
        "dns-common" => Path::new(crate_name).join("src").join(rest),
        _ => Path::new("dns-user")
            .join(crate_name)
            .join("src")
            .join(rest),
    }
}

/// Joins the results of several walks, so that one run shows all differences.
fn all(results: impl IntoIterator<Item = Result<()>>) -> Result<()> {
    let problems: Vec<String> = results
        .into_iter()
        .filter_map(Result::err)
        .map(|error| format!("{error:#}"))
        .collect();
    ensure!(problems.is_empty(), "{}", problems.join("\n"));
    Ok(())
}

/// Answers every query with an address until `ended`.
fn serve_as_recursor(socket: &UdpSocket, ended: &AtomicBool) -> Result<()> {
    socket.set_read_timeout(Some(Duration::from_millis(20)))?;
    let mut buffer = [0; 1500];
    while !ended.load(Ordering::Relaxed) {
        let Ok((length, from)) = socket.recv_from(&mut buffer) else {
            continue;
        };
        let mut message = Message::from_vec(&buffer[..length])?;
        message.metadata.message_type = MessageType::Response;
        message.metadata.recursion_available = true;
        let name = message
            .queries
            .first()
            .context("no question")?
            .name()
            .clone();
        message.add_answer(Record::from_rdata(
            name,
            300,
            RData::A(A(Ipv4Addr::new(192, 0, 2, 1))),
        ));
        socket.send_to(&message.to_vec()?, from)?;
    }
    Ok(())
}

/// A client whose query is in flight.
struct Client(UdpSocket);

impl Client {
    fn ask(&self, name: &str) -> Result<()> {
        self.0
            .send(&client::query(name, RecordType::A, None)?.to_vec()?)?;
        Ok(())
    }

    /// Returns whether the reply has arrived; fails unless it has an address.
    fn is_answered(&self) -> Result<bool> {
        let mut buffer = [0; 1500];
        let Ok(length) = self.0.recv(&mut buffer) else {
            return Ok(false);
        };
        let reply = Message::from_vec(&buffer[..length])?;
        ensure!(!client::addresses(&reply).is_empty(), "{reply}");
        Ok(true)
    }
}

/// Returns groups of one instance, all at the same three addresses. In each version after the first, another
/// instance belongs to the group of its predecessor.
fn records(version: usize) -> Vec<u8> {
    let moved = (version > 1).then_some(version % 8 + 2);
    let group = |number: usize| {
        if Some(number) == moved {
            number - 1
        } else {
            number
        }
    };
    let row = |number: usize| {
        (
            group(number),
            instance(u32::try_from(number % 3).unwrap_or(0)),
        )
    };
    fleet::records(version as u64, (1..=3 * ROUNDS).map(row))
}

#[test]
fn walks_list_files_visited_by_server() -> Result<()> {
    requires!(namespaces, bpf, programs(&["nm"]));
    let namespace = Namespace::new("walks")?;
    let (authority, bpffs) = (Authority::new("ca")?, Bpffs::new()?);
    let certificates = tempfile::tempdir()?;
    let tls = write_files(
        certificates.path(),
        &authority.issue(HEALTH_NAME)?,
        &authority.certificate,
    )?;
    let instances = namespace.run(|| Fleet::start(&tls))??;
    let extra = json!({
        "health": {
            "enabled": true,
            "port": instances.port,
            "certificate_file": tls.certificate,
            "private_key_file": tls.private_key,
            "ca_file": tls.ca,
            "check_interval": "1h",
        },
        "disable_recursors": false,
        "recursors": [PEER],
        "metrics": {"enabled": true},
        "control": {"socket": bpffs.path().with_extension("sock")},
        "xdp": {"mode": "tc", "interfaces": ["lo"], "bpffs": bpffs.path()},
    });
    let program = server::companion("bosh-dns-xdp")?;
    let folder = server::folder(&records(1), None)?;
    let server = Server::start_program(
        program.clone(),
        Some(&namespace),
        folder,
        SERVER,
        &extra,
        |_| {},
    )?;
    wait_for_fast_path(&namespace).with_context(|| server.log())?;
    let (recursor, ended) = (
        namespace.run(|| UdpSocket::bind(PEER))??,
        AtomicBool::new(false),
    );
    thread::scope(|scope| {
        let recursor = scope.spawn(|| serve_as_recursor(&recursor, &ended));
        let walked = namespace.run(|| walk_server(&server, &program));
        ended.store(true, Ordering::Relaxed);
        recursor
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        walked?
    })
}

/// Traces the events of a running server, on the thread that becomes its tracer.
fn walk_server(server: &Server, program: &Path) -> Result<()> {
    let client = Client(UdpSocket::bind("127.0.0.1:0")?);
    client.0.connect(SERVER)?;
    client.0.set_nonblocking(true)?;
    // A name of healthy instances is answered once all instances have been checked.
    for number in 0..3 {
        let name = format!("q-s3.q-g{}.bosh.", 3 * ROUNDS - number);
        let query = client::query(&name, RecordType::A, None)?;
        wait_until("healthy instances", LIMIT, || {
            client::ask(SERVER, &query).is_ok_and(|reply| !client::addresses(&reply).is_empty())
        })?;
    }
    let mut traced = Traced::attach(server.pid(), program)?;
    let ask_local = |round: usize| client.ask(&format!("q-s3.q-g{}.bosh.", round + 10));
    let local = traced.visits(ROUNDS, &is_query_thread, ask_local, || client.is_answered())?;
    let ask_elsewhere = |round| client.ask(&format!("n{round}.elsewhere.test."));
    let forwarded = traced.visits(ROUNDS, &is_query_thread, ask_elsewhere, || {
        client.is_answered()
    })?;
    let (file, next) = (
        server.folder.path().join("records.json"),
        server.folder.path().join("next"),
    );
    let version = std::cell::Cell::new(1);
    let replace = |_| {
        version.set(version.get() + 1);
        fs::write(&next, records(version.get()))?;
        Ok(fs::rename(&next, &file)?)
    };
    let is_served = || {
        Ok(server
            .log()
            .contains(&format!("serving records version {}:", version.get())))
    };
    let new_records = traced.visits(ROUNDS, &is_query_thread, &replace, &is_served)?;
    let interfaces = traced.visits(ROUNDS, &is_publisher_thread, replace, is_served)?;
    all([
        LOCAL.compare(&local),
        FORWARDED.compare(&forwarded),
        RECORDS.compare(&new_records),
        INTERFACES.compare(&interfaces),
    ])
}

const ZONE: &str = "$TTL 60\n@ SOA ns.example.org. admin.example.org. 1 3600 600 86400 60\n@ NS ns.example.org.\nns A 192.0.2.53\n";

const SECRET: &str = "c2VjcmV0IG9mIHRoZSB0dXRvcmlhbCwgMzIgb2N0ZXRzIQ==";

#[test]
fn walk_lists_files_visited_by_publisher() -> Result<()> {
    requires!(namespaces, programs(&["nm", "knotd"]));
    let namespace = Namespace::new("walkp")?;
    let folder = tempfile::tempdir()?;
    let path = |name: &str| folder.path().join(name);
    fs::write(path("example.org.zone"), ZONE)?;
    let storage = folder.path().display();
    let knot = format!(
        "server:\n    rundir: {storage}\n    listen: {}@53\ndatabase:\n    storage: {storage}\n\
         key:\n  - id: publisher\n    algorithm: hmac-sha256\n    secret: {SECRET}\n\
         acl:\n  - id: publisher\n    key: publisher\n    action: [transfer, update]\n\
         template:\n  - id: default\n    storage: {storage}\n    file: \"%s.zone\"\n\
         zone:\n  - domain: example.org\n    acl: publisher\n",
        PEER.ip()
    );
    fs::write(path("knot.conf"), knot)?;
    let log = fs::File::create(path("log"))?;
    let mut knotd = namespace.command("knotd")?;
    knotd
        .arg("-c")
        .arg(path("knot.conf"))
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log.try_clone()?);
    let _knotd = Kept::spawn(&mut knotd)?;
    let is_serving = || {
        let query = client::query("ns.example.org.", RecordType::A, None);
        query
            .and_then(|query| client::ask(PEER, &query))
            .is_ok_and(|reply| !client::addresses(&reply).is_empty())
    };
    namespace.run(|| wait_until("the name server", LIMIT, is_serving))??;
    fs::create_dir(path("documents"))?;
    fs::write(path("documents/knot.yml"), provider())?;
    fs::write(path("documents/web.yml"), document(0))?;
    let config = json!({
        "documents": [path("documents")],
        "store": path("store"),
        "control": {"socket": path("control.sock")},
    });
    fs::write(path("publish.yml"), config.to_string())?;
    let program = server::companion("bosh-dns-publish")?;
    let mut publisher: Command = namespace.command(&program)?;
    publisher
        .arg("--config")
        .arg(path("publish.yml"))
        .arg("run");
    let publisher = Kept::spawn(
        publisher
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log),
    )?;
    let address =
        |round: usize| Ipv4Addr::from_bits(0xc633_6400 + u32::try_from(round).unwrap_or(0));
    let is_published = |round| -> Result<bool> {
        let query = client::query("www.example.org.", RecordType::A, None)?;
        let Ok(reply) = client::ask(PEER, &query) else {
            return Ok(false);
        };
        Ok(reply.metadata.response_code == ResponseCode::NoError
            && client::addresses(&reply) == [address(round)])
    };
    let walked = namespace.run(|| -> Result<()> {
        let first = wait_until("the first record", LIMIT, || {
            is_published(0).unwrap_or(false)
        });
        first.with_context(|| fs::read_to_string(path("log")).unwrap_or_default())?;
        let mut traced = Traced::attach(publisher.pid(), &program)?;
        let current = std::cell::Cell::new(0);
        let change = |round| {
            current.set(round + 1);
            fs::write(path("next"), document(round + 1))?;
            Ok(fs::rename(path("next"), path("documents/web.yml"))?)
        };
        let visits = traced.visits(ROUNDS, &|_| true, change, || is_published(current.get()))?;
        DOCUMENT.compare(&visits)
    });
    walked?
}

/// Returns the document of the provider.
fn provider() -> String {
    format!(
        "apiVersion: bosh-dns-publish/v1\nkind: DNSUpdateRecord\nmetadata: {{name: knot}}\nspec:\n  provider: rfc2136\n  \
         external-dns-parameters:\n    rfc2136-host: {PEER}\n    rfc2136-zone: example.org\n    \
         rfc2136-tsig-keyname: publisher\n    rfc2136-tsig-secret: {SECRET}\n    \
         rfc2136-tsig-secret-alg: hmac-sha256\n    txt-owner-id: me\n"
    )
}

/// Returns a document of one name, whose address depends on `round`.
fn document(round: usize) -> String {
    format!(
        "apiVersion: externaldns.k8s.io/v1alpha1\nkind: DNSEndpoint\n\
         metadata: {{name: web, labels: {{dnsprovider: knot}}}}\nspec:\n  endpoints:\n  \
         - {{dnsName: www.example.org, recordTTL: 60, recordType: A, targets: [198.51.100.{round}]}}\n"
    )
}
