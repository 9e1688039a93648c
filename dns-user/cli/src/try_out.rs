//! `try`: serves a small example without root, configuration or certificates.

use std::{
    fs,
    io::{self, Write as _},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, UdpSocket},
    path::{Path, PathBuf},
    process::ExitCode,
    time::Duration,
};

use clap::Args;
use dns_core::{catalog::RECORD_KEYS, name::Name};
use serde_json::{Value, json};

use super::{complain, resolver};
use dns_kit::logs::LogFormat;
use dns_resolver::daemon::{self, OnHangup, RunOptions};
use dns_shadow::process::Process;

/// A name in the example foundation.
const NAME: &str = "web.internal";

/// A name that every server answers.
const UPCHECK: &str = "upcheck.bosh-dns.";

/// Instances per group in the example foundation.
const INSTANCES: u8 = 3;

#[derive(Debug, Args)]
pub(super) struct Try {
    /// Your records.json instead of a small foundation
    #[arg(long, value_name = "FILE")]
    records: Option<PathBuf>,
    /// Alias files to serve with --records
    #[arg(long, value_name = "PATTERN")]
    aliases: Option<PathBuf>,
    /// Port on the loopback address [default: a free one]
    #[arg(long)]
    port: Option<u16>,
}

impl Try {
    /// Serves until Ctrl-C, then removes all of its files.
    pub(super) fn run(self) -> ExitCode {
        match self.prepare() {
            Ok((folder, config, welcome)) => {
                welcome.print_once_up();
                let options = RunOptions {
                    log_format: LogFormat::default(),
                    // A closed terminal must not leave a server behind.
                    on_hangup: OnHangup::End,
                };
                let code = daemon::run(&config, options);
                if let Err(problem) = folder.close() {
                    complain(&format_args!(
                        "cannot remove the files of this trial: {problem}"
                    ));
                }
                code
            }
            Err(problem) => {
                complain(&problem);
                ExitCode::FAILURE
            }
        }
    }

    /// Writes the files; returns their folder, the configuration in it, and the text to print once
    /// the server answers.
    fn prepare(self) -> io::Result<(tempfile::TempDir, PathBuf, Welcome)> {
        let Self {
            records,
            aliases,
            port,
        } = self;
        let folder = tempfile::Builder::new()
            .prefix("bosh-dns-xdp-try-")
            .tempdir()?;
        let own = records.is_some();
        let records = match records {
            // The configuration lies in another folder, from which a relative path would lead
            // elsewhere.
            Some(given) => fs::canonicalize(&given).map_err(|problem| {
                io::Error::new(problem.kind(), format!("{}: {problem}", given.display()))
            })?,
            None => {
                let file = folder.path().join("records.json");
                fs::write(&file, foundation().to_string())?;
                file
            }
        };
        let address = loopback();
        let port = match port {
            Some(port) => {
                // The server would report the port, but not who has it.
                is_free((address, port).into())?;
                port
            }
            None => free_port(address)?,
        };
        let root = nix::unistd::geteuid().is_root();
        let config = folder.path().join("config.json");
        let text = json!({
            "address": address,
            "port": port,
            "log_level": "WARN",
            "records_file": records,
            "alias_files_glob": aliases.unwrap_or_default(),
            "upcheck_domains": [UPCHECK],
        "control": {"socket": folder.path().join("control.sock")},
            // Only root may attach programs, which are detached when the server ends.
            "xdp": {"enabled": root, "interfaces": ["lo"], "on_stop": "detach"},
        });
        fs::write(&config, serde_json::to_vec_pretty(&text)?)?;
        let address = SocketAddr::from((address, port));
        let text = explanation(
            address,
            &config,
            if own {
                UPCHECK.trim_end_matches('.')
            } else {
                NAME
            },
            root,
        );
        Ok((folder, config, Welcome { address, text }))
    }
}

/// Text that explains how to use the server.
struct Welcome {
    address: SocketAddr,
    text: String,
}

impl Welcome {
    /// Prints the text once the server answers; gives up after a minute.
    fn print_once_up(self) {
        // The daemon occupies the main thread until it ends.
        std::thread::spawn(move || {
            if answers(self.address, Duration::from_secs(60)) {
                print!("{}", self.text);
                let _ = io::stdout().flush();
            }
        });
    }
}

/// Returns 127.0.0.1, or ::1 on a machine without IPv4.
fn loopback() -> IpAddr {
    let address = IpAddr::from(Ipv4Addr::LOCALHOST);
    if UdpSocket::bind((address, 0)).is_ok() {
        address
    } else {
        Ipv6Addr::LOCALHOST.into()
    }
}

/// Returns whether a DNS server answers the up-check name within `timeout`.
fn answers(server: SocketAddr, timeout: Duration) -> bool {
    let Ok(name) = Name::from_text(UPCHECK) else {
        return false;
    };
    resolver::until_resolved(
        Some(server.ip()),
        server.port(),
        &name,
        timeout,
        Duration::from_millis(20),
    )
    .is_ok()
}

/// Checks that an address is free for UDP and TCP; the error names the process that uses it.
fn is_free(address: SocketAddr) -> io::Result<()> {
    // One after the other; the port is free again when this returns.
    match TcpListener::bind(address).and_then(|_| UdpSocket::bind(address)) {
        Ok(_) => Ok(()),
        Err(problem) if problem.kind() == io::ErrorKind::AddrInUse => {
            let tables = ["udp", "udp6", "tcp", "tcp6"];
            let holder = match Process::with_socket(&tables, |own| own.port() == address.port()) {
                Some(Process { number, name }) => format!("{name} (pid {number})"),
                None => "another process".to_owned(),
            };
            Err(io::Error::new(
                problem.kind(),
                format!("{address} is in use by {holder}; choose another --port, or omit it"),
            ))
        }
        Err(problem) => Err(io::Error::new(
            problem.kind(),
            format!("{address}: {problem}"),
        )),
    }
}

fn explanation(server: SocketAddr, config: &Path, name: &str, root: bool) -> String {
    let program = std::env::current_exe().unwrap_or_else(|_| "bosh-dns-xdp".into());
    let program = program.display();
    let config = config.display();
    let address = server.ip();
    let port = server.port();
    let path = if root {
        "Hot names are answered at the interface lo; the FAST column of `top` counts them."
    } else {
        "All answers come from userspace; run as root for the fast path."
    };
    format!(
        "bosh-dns-xdp answers on {address}, port {port}, until Ctrl-C. In another terminal:\n\n  \
         dig @{address} -p {port} {name}\n  \
         {program} resolve {name} --config {config}\n  \
         {program} top --config {config}\n\n{path}\n"
    )
}

/// Returns a port that is free for UDP and TCP.
fn free_port(address: IpAddr) -> io::Result<u16> {
    // If another process takes the port before the server binds it, the server reports that.
    for _ in 0..16 {
        let tcp = TcpListener::bind((address, 0))?;
        let address = tcp.local_addr()?;
        if UdpSocket::bind(address).is_ok() {
            return Ok(address.port());
        }
    }
    Err(io::Error::new(
        io::ErrorKind::AddrInUse,
        "no port of the loopback address is free for UDP and TCP; choose one with --port",
    ))
}

/// Returns a records.json with two groups of a deployment and an alias for one of them.
fn foundation() -> Value {
    let mut rows = Vec::new();
    let mut names = Vec::new();
    for (group, number) in [("web", 1), ("db", 2)] {
        for index in 0..INSTANCES {
            let id = format!("{group}-{index}");
            let zone = format!("z{}", index + 1);
            let address = format!("10.0.{number}.{}", index + 10);
            // For reverse names.
            names.push(json!([address, format!("{id}.{group}.default.demo.bosh")]));
            rows.push(json!([
                id,
                id,
                group,
                [number.to_string()],
                zone,
                (index + 1).to_string(),
                "default",
                "1",
                "demo",
                address,
                "bosh",
                id,
                index
            ]));
        }
    }
    json!({
        "record_keys": RECORD_KEYS,
        "record_infos": rows,
        "records": names,
        "aliases": {NAME: [{"group_id": "1", "root_domain": "bosh"}]},
        "version": 1,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use dns_resolver::daemon::check::check;

    #[test]
    fn example_foundation_is_valid() {
        let (folder, config, _) = Try {
            records: None,
            aliases: None,
            port: Some(5353),
        }
        .prepare()
        .unwrap();
        let report = check(&config);
        assert!(report.ok, "{:?}", report.errors);
        let written: Value =
            serde_json::from_slice(&fs::read(folder.path().join("records.json")).unwrap()).unwrap();
        let index = RECORD_KEYS
            .iter()
            .position(|key| *key == "instance_index")
            .unwrap();
        assert!(written["record_infos"][0][index].is_number(), "{written}");
        let serves = report.serves.unwrap();
        assert_eq!(
            (serves.instances, serves.aliases),
            (usize::from(2 * INSTANCES), 1)
        );
        folder.close().unwrap();
    }

    #[test]
    fn port_conflict_names_holder() {
        let taken = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let problem = is_free(taken.local_addr().unwrap())
            .unwrap_err()
            .to_string();
        assert!(
            problem.contains(&format!("(pid {})", std::process::id())),
            "{problem}"
        );
    }

    #[test]
    fn silent_port_is_not_announced() {
        const ANSWER: &[u8] = b"\xc0\x0c\0\x01\0\x01\0\0\0\0\0\x04\x7f\0\0\x01";
        let server = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = server.local_addr().unwrap();
        assert!(!answers(address, Duration::ZERO));
        let replies = std::thread::spawn(move || {
            // The call above sent the first query.
            for _ in 0..2 {
                let mut message = [0; 512];
                let (length, client) = server.recv_from(&mut message).unwrap();
                message[2] |= 0x80;
                message[7] = 1;
                let reply = [&message[..length], ANSWER].concat();
                server.send_to(&reply, client).unwrap();
            }
        });
        assert!(answers(address, Duration::from_secs(60)));
        replies.join().unwrap();
    }

    #[test]
    fn own_records_need_no_known_name() {
        let records = tempfile::NamedTempFile::new().unwrap();
        let given = Try {
            records: Some(records.path().into()),
            aliases: None,
            port: None,
        };
        let (_folder, _, welcome) = given.prepare().unwrap();
        let resolve = welcome
            .text
            .lines()
            .find(|line| line.contains(" resolve "))
            .unwrap();
        // A name that every server answers.
        assert!(
            resolve.contains(" resolve upcheck.bosh-dns --config "),
            "{}",
            welcome.text
        );
    }

    #[test]
    fn missing_records_are_named() {
        let given = Try {
            records: Some("/nowhere/records.json".into()),
            aliases: None,
            port: None,
        };
        assert!(
            given
                .prepare()
                .err()
                .unwrap()
                .to_string()
                .contains("/nowhere/records.json")
        );
    }
}
