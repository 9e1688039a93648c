//! Where the API is, and with which certificates we go there.

use std::{
    env,
    ffi::OsString,
    path::{Path, PathBuf},
};

use clap::Args;

use super::Problem;
use dns_core::config::TlsFiles;

/// Where the configuration lies: that of the job on a VM, else that of the Debian package.
const CONFIGS: [&str; 2] = ["/var/vcap/jobs/bosh-dns/config/config.json", "/etc/bosh-dns-xdp/config.json"];

/// The one of [`CONFIGS`] that is there; the first of them if none is.
fn usual_config() -> &'static Path {
    Path::new(CONFIGS.into_iter().find(|file| Path::new(file).exists()).unwrap_or(CONFIGS[0]))
}

/// How to reach the server.
#[derive(Clone, Debug, Default, Args)]
pub(super) struct Connection {
    /// config.json of the server: says where the API is and where certificates lie
    /// [default: the environment variables DNS_API_*, else that of the bosh-dns job or of the Debian package]
    #[arg(long, value_name = "FILE", global = true)]
    pub(super) config: Option<PathBuf>,
    /// The server's control socket [default: that of its config.json]
    #[arg(long, value_name = "FILE")]
    socket: Option<PathBuf>,
    /// Address of the API [environment: DNS_API_ADDRESS]
    #[arg(long, value_name = "[https://]HOST:PORT")]
    api: Option<String>,
    /// CA of the API's certificate [environment: DNS_API_TLS_CA_CERT_PATH]
    #[arg(long, value_name = "FILE")]
    ca: Option<PathBuf>,
    /// Our client certificate [environment: DNS_API_TLS_CERTIFICATE_PATH or DNS_API_TLS_CERT_PATH]
    #[arg(long, value_name = "FILE")]
    cert: Option<PathBuf>,
    /// Its key [environment: DNS_API_TLS_PRIVATE_KEY_PATH or DNS_API_TLS_KEY_PATH]
    #[arg(long, value_name = "FILE")]
    key: Option<PathBuf>,
}

/// Where the API is and what to show there.
#[derive(Clone, Debug)]
pub(super) struct Target {
    /// `host:port`.
    pub(super) address: String,
    /// Our certificates.
    pub(super) files: TlsFiles,
}

impl Connection {
    /// Options first, then the configuration if one is named, then the
    /// environment, then the configuration of the bosh-dns job.
    pub(super) fn target(&self) -> Result<Target, Problem> {
        self.target_with(&|name| env::var_os(name), usual_config())
    }

    /// The server's control socket: the one that is named, else that of the configuration. None
    /// where options or variables lead to the API's port.
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
        let loaded = dns_platform::files::load_config(file)
            .map_err(|error| Problem::Unreachable(error.to_string()))?;
        // A configuration that names an API alone means that.
        let named =
            loaded.config.control.filter(|control| !control.is_default || loaded.config.api.is_none());
        Ok(named.map(|control| control.socket))
    }

    /// Whether there is a port to go to where the control socket is not to be had.
    pub(super) fn has_api(&self) -> bool {
        self.socket.is_none() && self.target().is_ok()
    }

    /// The same with an environment and a job of the caller's choice.
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

    /// As the configuration says.
    fn configured(&self, job_config: &Path) -> Result<Target, Problem> {
        let file = self.config.as_deref().unwrap_or(job_config);
        if self.config.is_none() && !file.exists() {
            return Err(Problem::Unreachable(format!(
                "where is the API? give --config FILE, or set DNS_API_ADDRESS, DNS_API_TLS_CA_CERT_PATH, \
                 DNS_API_TLS_CERTIFICATE_PATH and DNS_API_TLS_PRIVATE_KEY_PATH ({} is not there)",
                file.display()
            )));
        }
        let config = dns_platform::files::load_config(file)
            .map_err(|error| Problem::Unreachable(error.to_string()))?
            .config;
        let api = config.api.ok_or_else(|| {
            Problem::Unreachable(format!(
                "{}: there is neither \"control\" nor \"api\": the server cannot be asked",
                file.display()
            ))
        })?;
        Ok(Target { address: format!("127.0.0.1:{}", api.port), files: client_files(&api.tls) })
    }
}

/// The client's files that lie beside the server's: the same names with
/// `client` for `server` (and the other way round for the CA), as the
/// reference's job has them; where there are none, the server's own.
fn client_files(server: &TlsFiles) -> TlsFiles {
    let client = |path: &Path| sibling(path, "server", "client");
    let (certificate, private_key) = match (client(&server.certificate), client(&server.private_key)) {
        (Some(certificate), Some(private_key)) => (certificate, private_key),
        _ => (server.certificate.clone(), server.private_key.clone()),
    };
    let ca = sibling(&server.ca, "client", "server").unwrap_or_else(|| server.ca.clone());
    TlsFiles { certificate, private_key, ca }
}

/// The file beside `path` whose name has `new` where that of `path` has `old`, if it is there.
fn sibling(path: &Path, old: &str, new: &str) -> Option<PathBuf> {
    let name = path.file_name()?.to_str()?;
    let other = path.with_file_name(name.replace(old, new));
    (name.contains(old) && other.exists()).then_some(other)
}

/// `host:port` of an address that may be an URL.
fn host_and_port(address: &str) -> String {
    address.trim_start_matches("https://").trim_end_matches('/').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Environment variables from a list.
    fn environment<'a>(list: &'a [(&'a str, &'a str)]) -> impl Fn(&str) -> Option<OsString> + 'a {
        move |name| list.iter().find(|(key, _)| *key == name).map(|(_, value)| OsString::from(value))
    }

    #[test]
    fn the_reference_s_variables_are_enough() {
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
    fn a_configuration_is_enough_and_wins_over_variables() {
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
        // There is no server_ca.crt: one CA for both.
        assert_eq!(target.files.ca, file("client_ca.crt"));
    }

    #[test]
    fn without_anything_the_message_says_what_to_give() {
        let problem =
            Connection::default().target_with(&environment(&[]), Path::new("/nowhere")).unwrap_err();
        assert!(problem.to_string().contains("DNS_API_ADDRESS"), "{problem}");
    }
}
