//! BIND and Knot with dynamic zones, and queries to them.

use std::{
    fs,
    net::{SocketAddr, UdpSocket},
    path::Path,
    process::Command,
    thread,
    time::{Duration, Instant},
};
use test_support::free_address;

use dns_publish::{
    engine::Engine,
    ownership::Registry,
    plan::{Desired, PlanRules},
    provider::{
        Parameters, TlsFiles,
        rfc2136::{Rfc2136, Rfc2136Settings},
    },
    record::{Record, RecordType},
};
use tempfile::TempDir;

use crate::process::Server;

/// Secret of every key: any 64 octets do for all algorithms.
pub(crate) const SECRET: &str =
    "bG9vcGJhY2sgdGVzdHMgc2hhcmUgdGhpcyBzZWNyZXQsIHdoaWNoIGlzIDY0IG9jdGV0cyBsb25nISEhIQ==";

/// Programs that serve zones.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Program {
    Bind,
    Knot,
}

impl Program {
    pub(crate) const ALL: [Self; 2] = [Self::Bind, Self::Knot];
}

/// Variations of a server.
#[derive(Debug, Clone)]
pub(crate) struct Options {
    pub(crate) algorithm: &'static str,
    /// Zones that the key may transfer and update.
    pub(crate) zones: Vec<&'static str>,
    /// Zones that the key may not update.
    pub(crate) refused: Vec<&'static str>,
    /// Certificate and key for TLS (BIND).
    pub(crate) certificate: Option<(String, String)>,
    /// Primary of which the server is a secondary.
    pub(crate) primary: Option<SocketAddr>,
    /// The server signs the zones itself.
    pub(crate) is_signed: bool,
    /// Everybody may update and transfer without a key (BIND).
    pub(crate) is_open: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            algorithm: "hmac-sha256",
            zones: vec!["example.org"],
            refused: Vec::new(),
            certificate: None,
            primary: None,
            is_signed: false,
            is_open: false,
        }
    }
}

pub(crate) struct NameServer {
    pub(crate) address: SocketAddr,
    pub(crate) tls_address: SocketAddr,
    pub(crate) options: Options,
    _process: Server,
    _folder: TempDir,
}

/// Returns the parameters of a publisher that updates `zones` with the key of every test server.
pub(crate) fn parameters(address: SocketAddr, zones: &str, algorithm: &str) -> Parameters {
    let pairs = [
        ("rfc2136-host", address.to_string()),
        ("rfc2136-zone", zones.to_owned()),
        ("rfc2136-tsig-keyname", "publisher".to_owned()),
        ("rfc2136-tsig-secret", SECRET.to_owned()),
        ("rfc2136-tsig-secret-alg", algorithm.to_owned()),
    ];
    Parameters(pairs.map(|(name, value)| (name.to_owned(), value)).into())
}

impl NameServer {
    pub(crate) fn start(program: Program) -> Self {
        Self::with(program, Options::default())
    }

    pub(crate) fn with(program: Program, options: Options) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (address, tls_address) = (free_address(), free_address());
        for zone in options.zones.iter().chain(&options.refused) {
            let text = format!(
                "$TTL 60\n@ SOA ns.{zone}. admin.{zone}. 1 3600 600 86400 60\n@ NS ns.{zone}.\nns A 192.0.2.53\n"
            );
            fs::write(folder.path().join(format!("{zone}.zone")), text).unwrap();
        }
        let (configuration, program_name, arguments): (_, _, &[&str]) = match program {
            Program::Bind => (
                bind(folder.path(), address, tls_address, &options),
                "named",
                &["-g", "-c"],
            ),
            Program::Knot => (knot(folder.path(), address, &options), "knotd", &["-c"]),
        };
        let path = folder.path().join("server.conf");
        fs::write(&path, configuration).unwrap();
        let mut command = Command::new(program_name);
        command.args(arguments).arg(&path);
        let process = Server::start(&mut command, &folder.path().join("log"), address);
        let server = Self {
            address,
            tls_address,
            options,
            _process: process,
            _folder: folder,
        };
        // Zones are loaded, or transferred from the primary, after the server listens.
        let begin = Instant::now();
        for zone in server.options.zones.iter().chain(&server.options.refused) {
            while server.ask(zone, RecordType::SOA) != (0, 1) {
                assert!(
                    begin.elapsed() < Duration::from_secs(120),
                    "{program:?} does not serve {zone}"
                );
                thread::sleep(Duration::from_millis(20));
            }
        }
        server
    }

    pub(crate) fn parameters(&self) -> Parameters {
        let zones = [&self.options.zones[..], &self.options.refused].concat();
        parameters(self.address, &zones.join(","), self.options.algorithm)
    }

    pub(crate) fn settings(&self) -> Rfc2136Settings {
        Rfc2136Settings::from_parameters(&self.parameters()).unwrap()
    }

    /// Returns a publisher with owner `me`.
    pub(crate) fn engine(&self) -> Engine {
        engine(self.settings())
    }

    /// Runs nsupdate with these lines, which may contain `send`.
    pub(crate) fn nsupdate(&self, lines: &str) {
        let key = format!("{}:publisher:{SECRET}", self.options.algorithm);
        let head = format!("server {} {}\n", self.address.ip(), self.address.port());
        let input = format!("{head}{lines}send\n");
        crate::process::run(Command::new("nsupdate").args(["-v", "-y", &key]), &input);
    }

    /// Queries over UDP; returns the response code and the number of answers.
    pub(crate) fn ask(&self, name: &str, record_type: RecordType) -> (u8, u16) {
        ask(self.address, name, record_type)
    }

    /// Queries the same name repeatedly in one dig process; returns its output.
    pub(crate) fn dig(&self, question: &str, count: usize) -> String {
        let (server, port) = (
            format!("@{}", self.address.ip()),
            self.address.port().to_string(),
        );
        let mut command = Command::new("dig");
        command.args([&server, "-p", &port, "+tries=1", "+time=60", "-f", "-"]);
        crate::process::run(&mut command, &format!("{question}\n").repeat(count))
    }

    /// Returns all records as dig prints them.
    pub(crate) fn transfer(&self, zone: &str) -> String {
        let key = format!("{}:publisher:{SECRET}", self.options.algorithm);
        let server = format!("@{}", self.address.ip());
        let port = self.address.port().to_string();
        let arguments = [
            "-y", &key, &server, "-p", &port, zone, "AXFR", "+noall", "+answer",
        ];
        crate::process::run(Command::new("dig").args(arguments), "")
    }
}

pub(crate) fn engine(settings: Rfc2136Settings) -> Engine {
    Engine::new(
        Box::new(Rfc2136::new(settings)),
        Registry::default(),
        PlanRules::of("me"),
    )
}

/// Returns `count` wanted names of example.org.
pub(crate) fn names(count: usize) -> Desired {
    let record = |number: usize| {
        let name = format!("n{number}.example.org");
        let target = format!("198.51.{}.{}", number / 250 % 250, number % 250);
        Record {
            ttl: Some(60),
            ..Record::parse(&name, RecordType::A, [target]).unwrap()
        }
    };
    Desired {
        records: (0..count).map(record).collect(),
        ..Desired::default()
    }
}

pub(crate) fn record(name: &str, record_type: RecordType, target: &str) -> Record {
    Record {
        ttl: Some(1),
        ..Record::parse(name, record_type, [target]).unwrap()
    }
}

pub(crate) fn wish(records: impl IntoIterator<Item = Record>) -> Desired {
    Desired {
        records: records.into_iter().collect(),
        ..Desired::default()
    }
}

pub(crate) fn quiet(_: usize) {}

pub(crate) fn ask(server: SocketAddr, name: &str, record_type: RecordType) -> (u8, u16) {
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    socket
        .set_read_timeout(Some(Duration::from_secs(10)))
        .unwrap();
    socket.connect(server).unwrap();
    let mut query = vec![0, 7, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    for label in name.split('.') {
        query.push(u8::try_from(label.len()).unwrap());
        query.extend(label.as_bytes());
    }
    query.push(0);
    query.extend(record_type.0.to_be_bytes());
    query.extend([0, 1]);
    socket.send(&query).unwrap();
    let mut reply = [0; 512];
    let length = socket.recv(&mut reply).unwrap();
    assert!(length >= 12);
    (reply[3] & 0xf, u16::from_be_bytes([reply[6], reply[7]]))
}

fn bind(folder: &Path, address: SocketAddr, tls_address: SocketAddr, options: &Options) -> String {
    let folder = folder.display();
    let Options {
        algorithm,
        zones,
        refused,
        certificate,
        primary,
        is_signed,
        is_open,
    } = options;
    let (ip, port) = (address.ip(), address.port());
    let mut text = format!(
        "key publisher {{ algorithm {algorithm}; secret \"{SECRET}\"; }};\ncontrols {{}};\n\
         options {{ directory \"{folder}\"; pid-file none; session-keyfile none; recursion no; notify no; \
         dnssec-validation no; listen-on-v6 {{ none; }}; listen-on port {port} {{ {ip}; }}; "
    );
    if certificate.is_some() {
        let (ip, port) = (tls_address.ip(), tls_address.port());
        text.push_str(&format!("listen-on port {port} tls local {{ {ip}; }}; "));
    }
    text.push_str("};\n");
    if let Some((certificate, key)) = certificate {
        text.push_str(&format!(
            "tls local {{ cert-file \"{certificate}\"; key-file \"{key}\"; }};\n"
        ));
    }
    let clients = if *is_open { "any" } else { "key publisher" };
    let signing = if *is_signed {
        "dnssec-policy default; "
    } else {
        ""
    };
    for zone in zones {
        let role = match primary {
            Some(primary) => {
                let (ip, port) = (primary.ip(), primary.port());
                format!("type secondary; primaries {{ {ip} port {port} key publisher; }}")
            }
            None => format!("type primary; allow-update {{ {clients}; }}"),
        };
        text.push_str(&format!(
            "zone \"{zone}\" {{ {role}; file \"{zone}.zone\"; allow-transfer {{ {clients}; }}; {signing}}};\n"
        ));
    }
    for zone in refused {
        text.push_str(&format!(
            "zone \"{zone}\" {{ type primary; file \"{zone}.zone\"; allow-transfer {{ none; }}; }};\n"
        ));
    }
    text
}

fn knot(folder: &Path, address: SocketAddr, options: &Options) -> String {
    let folder = folder.display();
    let Options {
        algorithm,
        zones,
        refused,
        primary,
        is_signed,
        ..
    } = options;
    let (ip, port) = (address.ip(), address.port());
    // By default, Knot closes the connection of a client that does not read for half a second.
    let mut text = format!(
        "server:\n    rundir: {folder}\n    listen: {ip}@{port}\n    tcp-io-timeout: 0\n    tcp-idle-timeout: 600\n\
         database:\n    storage: {folder}\n\
         key:\n  - id: publisher\n    algorithm: {algorithm}\n    secret: {SECRET}\n"
    );
    if let Some(primary) = primary {
        let (ip, port) = (primary.ip(), primary.port());
        text.push_str(&format!(
            "remote:\n  - id: primary\n    address: {ip}@{port}\n    key: publisher\n"
        ));
    }
    text.push_str("acl:\n  - id: publisher\n    key: publisher\n    action: [transfer, update]\n");
    text.push_str("  - id: read\n    key: publisher\n    action: transfer\n");
    text.push_str(&format!(
        "template:\n  - id: default\n    storage: {folder}\n    file: \"%s.zone\"\nzone:\n"
    ));
    for zone in zones {
        let role = if primary.is_some() {
            "master: primary\n    acl: read"
        } else {
            "acl: publisher"
        };
        let signing = if *is_signed { "on" } else { "off" };
        text.push_str(&format!(
            "  - domain: {zone}\n    {role}\n    dnssec-signing: {signing}\n"
        ));
    }
    for zone in refused {
        text.push_str(&format!("  - domain: {zone}\n"));
    }
    text
}

/// Files of a TLS client that trusts one certificate.
pub(crate) fn trusting(ca: &Path) -> TlsFiles {
    TlsFiles {
        ca: Some(ca.to_owned()),
        identity: None,
    }
}
