//! `try`: a server to look around in, without root, configuration or certificates.

use std::{
    fs, io,
    net::{Ipv4Addr, SocketAddr, TcpListener, UdpSocket},
    path::{Path, PathBuf},
    process::ExitCode,
};

use clap::Args;
use dns_core::catalog::RECORD_KEYS;
use serde_json::{Value, json};

use super::complain;
use crate::daemon;
use dns_platform::logs::LogFormat;

/// A name that the small foundation has.
const NAME: &str = "web.internal";

/// Instances of each group of the small foundation.
const INSTANCES: u8 = 3;

/// Arguments of `try`.
#[derive(Debug, Args)]
pub(super) struct Try {
    /// Your records.json instead of a small foundation
    #[arg(long, value_name = "FILE")]
    records: Option<PathBuf>,
    /// Your alias files
    #[arg(long, value_name = "PATTERN")]
    aliases: Option<PathBuf>,
    /// Port on 127.0.0.1 [default: a free one]
    #[arg(long)]
    port: Option<u16>,
}

impl Try {
    /// Serves until Ctrl-C; all of its files go then.
    pub(super) fn run(self) -> ExitCode {
        match self.prepare() {
            Ok((folder, config)) => {
                let code = daemon::run(&config, daemon::RunOptions { log_format: LogFormat::default() });
                if let Err(problem) = folder.close() {
                    complain(&format_args!("the files of this try are left behind: {problem}"));
                }
                code
            }
            Err(problem) => {
                complain(&problem);
                ExitCode::FAILURE
            }
        }
    }

    /// Writes the files and says what can be done; the folder and the configuration in it.
    fn prepare(self) -> io::Result<(tempfile::TempDir, PathBuf)> {
        let Self { records, aliases, port } = self;
        let folder = tempfile::Builder::new().prefix("bosh-dns-xdp-try-").tempdir()?;
        let file = |name: &str| folder.path().join(name);
        let own = records.is_some();
        let records = match records {
            Some(given) => fs::canonicalize(&given).map_err(|problem| {
                io::Error::new(problem.kind(), format!("{}: {problem}", given.display()))
            })?,
            None => {
                fs::write(file("records.json"), foundation().to_string())?;
                file("records.json")
            }
        };
        let port = port.map_or_else(free_port, Ok)?;
        let root = nix::unistd::geteuid().is_root();
        let config = file("config.json");
        let text = json!({
            "address": Ipv4Addr::LOCALHOST,
            "port": port,
            "log_level": "WARN",
            "records_file": records,
            "alias_files_glob": aliases.unwrap_or_default(),
            "upcheck_domains": ["upcheck.bosh-dns."],
            "control": {"socket": file("control.sock")},
            // Only root may attach programs to interfaces; what is attached goes with the server.
            "xdp": {"enabled": root, "interfaces": ["lo"], "on_stop": "detach"},
        });
        fs::write(&config, serde_json::to_vec_pretty(&text)?)?;
        print!("{}", explanation(port, &config, if own { "upcheck.bosh-dns" } else { NAME }, root));
        Ok((folder, config))
    }
}

/// What to do now.
fn explanation(port: u16, config: &Path, name: &str, root: bool) -> String {
    let program = std::env::current_exe().unwrap_or_else(|_| "bosh-dns-xdp".into());
    let (program, config) = (program.display(), config.display());
    let path = match root {
        true => "Hot names are answered at the interface lo; the column FAST of `top` counts them.",
        false => "All answers come from userspace: for the fast path run this as root.",
    };
    format!(
        "bosh-dns-xdp answers on 127.0.0.1, port {port}, until Ctrl-C. In another terminal:\n\n  \
         dig @127.0.0.1 -p {port} {name}\n  \
         {program} resolve {name} --config {config}\n  \
         {program} top --config {config}\n\n{path}\n"
    )
}

/// A port of loopback that is free for UDP and TCP.
fn free_port() -> io::Result<u16> {
    // The next process may take the port before the server does: the server says so then.
    for _ in 0..16 {
        let tcp = TcpListener::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)))?;
        let address = tcp.local_addr()?;
        if UdpSocket::bind(address).is_ok() {
            return Ok(address.port());
        }
    }
    Err(io::Error::new(
        io::ErrorKind::AddrInUse,
        "no port of 127.0.0.1 is free for UDP and TCP; name one by --port",
    ))
}

/// records.json of two groups of a deployment, with an alias for one of them.
fn foundation() -> Value {
    let groups = ["web", "db"].into_iter().zip(1u8..);
    let rows: Vec<Value> = groups
        .flat_map(|(group, number)| {
            (0..INSTANCES).map(move |index| {
                let id = format!("{group}-{index}");
                let zone = format!("z{}", index + 1);
                let address = format!("10.0.{number}.{}", index + 10);
                json!([
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
                    index.to_string()
                ])
            })
        })
        .collect();
    json!({
        "record_keys": RECORD_KEYS,
        "record_infos": rows,
        "aliases": {NAME: [{"group_id": "1", "root_domain": "bosh"}]},
        "version": 1,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::daemon::check::check;

    #[test]
    fn the_small_foundation_is_sound() {
        let (folder, config) = Try { records: None, aliases: None, port: Some(5353) }.prepare().unwrap();
        let report = check(&config);
        assert!(report.ok, "{:?}", report.errors);
        let serves = report.serves.unwrap();
        assert_eq!((serves.instances, serves.aliases), (usize::from(2 * INSTANCES), 1));
        folder.close().unwrap();
    }

    #[test]
    fn records_that_are_not_there_are_named() {
        let given = Try { records: Some("/nowhere/records.json".into()), aliases: None, port: None };
        assert!(given.prepare().unwrap_err().to_string().contains("/nowhere/records.json"));
    }
}
