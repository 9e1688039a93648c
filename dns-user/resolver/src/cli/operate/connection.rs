//! Determines the API's address and the client certificate.

use std::{
    env,
    ffi::OsString,
    path::{Path, PathBuf},
};

use clap::Args;

use super::Problem;
use crate::cli::complain;
use dns_core::config::{CONTROL_SOCKET, Config, ConfigError, Loaded, TlsFiles};

/// Usual locations of config.json: the bosh-dns job on a VM, then the Debian package.
const CONFIGS: [&str; 2] = ["/var/vcap/jobs/bosh-dns/config/config.json", "/etc/bosh-dns-xdp/config.json"];

/// Returns the first existing file of [`CONFIGS`], or the first one if there is none.
fn usual_config() -> &'static Path {
    Path::new(CONFIGS.into_iter().find(|file| Path::new(file).exists()).unwrap_or(CONFIGS[0]))
}

/// How to reach the server.
#[derive(Clone, Debug, Default, Args)]
pub(super) struct Connection {
    /// The server's config.json, which names the API and its certificates
    /// [default: the environment variables DNS_API_*, else the file of the bosh-dns job or the Debian package]
    #[arg(long, value_name = "FILE", global = true)]
    pub(super) config: Option<PathBuf>,
    /// The server's control socket [default: as configured]
    #[arg(long, value_name = "FILE")]
    socket: Option<PathBuf>,
    /// Address of the API [environment: DNS_API_ADDRESS]
    #[arg(long, value_name = "[https://]HOST:PORT")]
    api: Option<String>,
    /// CA of the API server's certificate [environment: DNS_API_TLS_CA_CERT_PATH]
    #[arg(long, value_name = "FILE")]
    ca: Option<PathBuf>,
    /// Client certificate [environment: DNS_API_TLS_CERTIFICATE_PATH or DNS_API_TLS_CERT_PATH]
    #[arg(long, value_name = "FILE")]
    cert: Option<PathBuf>,
    /// Key of the client certificate [environment: DNS_API_TLS_PRIVATE_KEY_PATH or DNS_API_TLS_KEY_PATH]
    #[arg(long, value_name = "FILE")]
    key: Option<PathBuf>,
}

/// Address of the API and the certificates to present.
#[derive(Clone, Debug)]
pub(super) struct Target {
    /// Host and port, separated by a colon.
    pub(super) address: String,
    pub(super) files: TlsFiles,
}

impl Connection {
    /// Leads to the server of a configuration.
    pub(super) fn with_config(config: &Path) -> Self {
        Self { config: Some(config.to_owned()), ..Self::default() }
    }

    /// Determines the target from, in order: options, a configuration given as option, the
    /// environment, the configuration of the bosh-dns job.
    pub(super) fn target(&self) -> Result<Target, Problem> {
        self.target_with(&|name| env::var_os(name), usual_config())
    }

    /// Returns the control socket: the given one or the one in the configuration. `None` if options
    /// or variables name the API's port.
    pub(super) fn socket(&self) -> Result<Option<PathBuf>, Problem> {
        let Self { config, socket, api, ca, cert, key } = self;
        if socket.is_some() {
            return Ok(socket.clone());
        }
        let by_port = api.is_some() || ca.is_some() || cert.is_some() || key.is_some();
        let by_variable = config.is_none() && env::var_os("DNS_API_ADDRESS").is_some();
        let file = config.as_deref().unwrap_or(usual_config());
        if by_port || by_variable || (config.is_none() && !file.exists()) {
            return Ok(None);
        }
        let config = match read(file) {
            Ok((config, problems)) => {
                for problem in problems {
                    complain(&format_args!("{problem}; the other settings are used to find the server"));
                }
                config
            }
            // The server may be running with the last good version. The client requires that it was started
            // with a file given as option.
            Err(error) if Path::new(CONTROL_SOCKET).exists() => {
                complain(&format_args!("{error}; trying the default control socket"));
                return Ok(Some(CONTROL_SOCKET.into()));
            }
            Err(error) => return Err(Problem::Unreachable(error.to_string())),
        };
        // A configuration that only names an API refers to its port.
        let named = config.control.filter(|control| !control.is_default || config.api.is_none());
        Ok(named.map(|control| control.socket))
    }

    /// Returns the configuration given as option; `None` if another option names the server.
    pub(super) fn given_config(&self) -> Option<&Path> {
        let Self { config, socket, api, ca: _, cert: _, key: _ } = self;
        config.as_deref().filter(|_| socket.is_none() && api.is_none())
    }

    /// Returns whether the API's port can be used if the control socket is unavailable.
    pub(super) fn has_api(&self) -> bool {
        self.socket.is_none() && self.target().is_ok()
    }

    /// Implements [`Self::target`] with the given environment and job.
    fn target_with(
        &self,
        environment: &dyn Fn(&str) -> Option<OsString>,
        job_config: &Path,
    ) -> Result<Target, Problem> {
        let variable = |names: &[&str]| {
            let found = names.iter().find_map(|name| environment(name).filter(|value| !value.is_empty()));
            found.filter(|_| self.config.is_none())
        };
        let path = |option: &Option<PathBuf>, names: &[&str]| {
            option.clone().or_else(|| variable(names).map(PathBuf::from))
        };
        let address = self
            .api
            .clone()
            .or_else(|| variable(&["DNS_API_ADDRESS"]).map(|value| value.to_string_lossy().into_owned()));
        let ca = path(&self.ca, &["DNS_API_TLS_CA_CERT_PATH"]);
        let certificate = path(&self.cert, &["DNS_API_TLS_CERTIFICATE_PATH", "DNS_API_TLS_CERT_PATH"]);
        let private_key = path(&self.key, &["DNS_API_TLS_PRIVATE_KEY_PATH", "DNS_API_TLS_KEY_PATH"]);
        if let (Some(address), Some(ca), Some(certificate), Some(private_key)) =
            (&address, &ca, &certificate, &private_key)
        {
            let files = TlsFiles {
                certificate: certificate.clone(),
                private_key: private_key.clone(),
                ca: ca.clone(),
            };
            return Ok(Target { address: host_and_port(address), files });
        }
        let configured = self.configured(job_config)?;
        Ok(Target {
            address: address.map_or(configured.address, |address| host_and_port(&address)),
            files: TlsFiles {
                certificate: certificate.unwrap_or(configured.files.certificate),
                private_key: private_key.unwrap_or(configured.files.private_key),
                ca: ca.unwrap_or(configured.files.ca),
            },
        })
    }

    /// Returns the target described by a configuration.
    fn configured(&self, job_config: &Path) -> Result<Target, Problem> {
        let file = self.config.as_deref().unwrap_or(job_config);
        if self.config.is_none() && !file.exists() {
            return Err(Problem::Unreachable(format!(
                "no API is configured: use --config FILE, or set DNS_API_ADDRESS, DNS_API_TLS_CA_CERT_PATH, \
                 DNS_API_TLS_CERTIFICATE_PATH and DNS_API_TLS_PRIVATE_KEY_PATH ({} does not exist)",
                file.display()
            )));
        }
        let (config, _) = read(file).map_err(|error| Problem::Unreachable(error.to_string()))?;
        let api = config.api.ok_or_else(|| {
            Problem::Unreachable(format!(
                "{}: neither \"control\" nor \"api\" is configured: the server is not reachable",
                file.display()
            ))
        })?;
        Ok(Target { address: format!("127.0.0.1:{}", api.port), files: client_files(&api.tls) })
    }
}

/// Reads the valid part of a configuration, and its errors: the server runs with the last good
/// version, whose socket and port are probably the same. Fails if nothing can be read.
fn read(file: &Path) -> Result<(Config, Vec<ConfigError>), ConfigError> {
    let (mut errors, loaded) = dns_kit::files::check_config(file);
    match loaded {
        Some(Loaded { config, .. }) => Ok((config, errors)),
        None => Err(errors.swap_remove(0)),
    }
}

/// Returns the client's files next to the server's: the same names with `client` in place of
/// `server` (the reverse for the CA), as in the bosh-dns job. Falls back to the server's own files
/// if they do not exist.
fn client_files(server: &TlsFiles) -> TlsFiles {
    let client = |path: &Path| sibling(path, "server", "client");
    let (certificate, private_key) = match (client(&server.certificate), client(&server.private_key)) {
        (Some(certificate), Some(private_key)) => (certificate, private_key),
        _ => (server.certificate.clone(), server.private_key.clone()),
    };
    let ca = sibling(&server.ca, "client", "server").unwrap_or_else(|| server.ca.clone());
    TlsFiles { certificate, private_key, ca }
}

/// Returns the file next to `path` with `old` replaced by `new` in its name, if it exists.
fn sibling(path: &Path, old: &str, new: &str) -> Option<PathBuf> {
    let name = path.file_name()?.to_str()?;
    let other = path.with_file_name(name.replace(old, new));
    (name.contains(old) && other.exists()).then_some(other)
}

/// Returns host and port of an address that may be a URL.
fn host_and_port(address: &str) -> String {
    address.trim_start_matches("https://").trim_end_matches('/').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns environment variables from a list.
    fn environment<'a>(list: &'a [(&'a str, &'a str)]) -> impl Fn(&str) -> Option<OsString> + 'a {
        move |name| list.iter().find(|(key, _)| *key == name).map(|(_, value)| OsString::from(value))
    }

    #[test]
    fn bosh_dns_variables_suffice() {
        let variables = [
            ("DNS_API_ADDRESS", "https://127.0.0.1:53080/"),
            ("DNS_API_TLS_CA_CERT_PATH", "/ca"),
            ("DNS_API_TLS_CERTIFICATE_PATH", "/cert"),
            ("DNS_API_TLS_PRIVATE_KEY_PATH", "/key"),
        ];
        let target =
            Connection::default().target_with(&environment(&variables), Path::new("/nowhere")).unwrap();
        assert_eq!(target.address, "127.0.0.1:53080");
        assert_eq!(target.files.ca, Path::new("/ca"));
        assert_eq!(target.files.certificate, Path::new("/cert"));
        assert_eq!(target.files.private_key, Path::new("/key"));
    }

    #[test]
    fn options_win_over_variables() {
        let variables = [
            ("DNS_API_ADDRESS", "127.0.0.1:1"),
            ("DNS_API_TLS_CA_CERT_PATH", "/ca"),
            ("DNS_API_TLS_CERT_PATH", "/cert"),
            ("DNS_API_TLS_KEY_PATH", "/key"),
        ];
        let connection = Connection { api: Some("127.0.0.1:2".into()), ..Connection::default() };
        let target = connection.target_with(&environment(&variables), Path::new("/nowhere")).unwrap();
        assert_eq!(target.address, "127.0.0.1:2");
    }

    #[test]
    fn configuration_overrides_variables() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str| folder.path().join(name);
        for name in ["server.crt", "server.key", "client.crt", "client.key", "client_ca.crt"] {
            std::fs::write(file(name), "").unwrap();
        }
        let config = serde_json::json!({
            "address": "127.0.0.1", "port": 53,
            "api": {
                "port": 53080, "certificate_file": file("server.crt"),
                "private_key_file": file("server.key"), "ca_file": file("client_ca.crt"),
            },
        });
        std::fs::write(file("config.json"), config.to_string()).unwrap();
        let connection = Connection { config: Some(file("config.json")), ..Connection::default() };
        let variables = [("DNS_API_ADDRESS", "127.0.0.1:1")];
        let target = connection.target_with(&environment(&variables), Path::new("/nowhere")).unwrap();
        assert_eq!(target.address, "127.0.0.1:53080");
        assert_eq!(target.files.certificate, file("client.crt"));
        assert_eq!(target.files.private_key, file("client.key"));
        // Without a server_ca.crt both sides use the same CA.
        assert_eq!(target.files.ca, file("client_ca.crt"));
    }

    #[test]
    fn missing_target_error_lists_options() {
        let problem =
            Connection::default().target_with(&environment(&[]), Path::new("/nowhere")).unwrap_err();
        assert!(problem.to_string().contains("DNS_API_ADDRESS"), "{problem}");
    }
}
