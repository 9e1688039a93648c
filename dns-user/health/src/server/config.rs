//! The health server's configuration file, compatible with bosh-dns's.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    time::Duration,
};

use dns_core::config::{
    ConfigError, LoggingConfig, TlsFiles,
    json::Json,
    parse::{NoFile, logging, tls_files},
    reader::Reader,
};

/// Settings of the health server.
#[derive(Clone, Debug)]
pub struct HealthServerConfig {
    /// Listen address (`address`, `port`), TCP.
    pub listen: SocketAddr,
    /// Server certificate, key and the CA of clients.
    pub tls: TlsFiles,
    /// Folder of the jobs (`jobs_dir`); `None` without jobs.
    pub jobs_dir: Option<PathBuf>,
    /// Path of a job's script below the job's folder (`health_executable_path`).
    pub executable_path: PathBuf,
    /// Time between two runs of a script (`health_executable_interval`).
    pub executable_interval: Duration,
    /// The agent's file (`health_file_name`).
    pub health_file: PathBuf,
    /// Time limit of a client's handshake and of a request (`request_timeout`).
    pub request_timeout: Duration,
    /// Log levels and format.
    pub logging: LoggingConfig,
}

impl HealthServerConfig {
    /// Reads and parses a file.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        let file = path.display().to_string();
        match std::fs::read(path) {
            Ok(bytes) => Self::parse(&file, &bytes),
            Err(error) => Err(ConfigError::of_file(file, format!("cannot be read: {error}"))),
        }
    }

    /// Parses the text of a file; `file` is used in messages.
    pub fn parse(file: &str, bytes: &[u8]) -> Result<Self, ConfigError> {
        let json = Json::parse(bytes)
            .map_err(|error| ConfigError::of_file(file, format!("is not JSON: {error}")))?;
        let root = Reader::document(file, &json)?;
        let address = root.address("address")?.unwrap_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED));
        let port =
            root.port("port")?.ok_or_else(|| root.error("port", "is missing; the usual port is 8853"))?;
        let tls =
            tls_files(&root)?.map_err(|NoFile(name)| root.error(name, "is missing; set it to a PEM file"))?;
        let path = |name| Ok(root.text(name)?.filter(|text| !text.is_empty()).map(PathBuf::from));
        let or_default =
            |time: Option<Duration>, default| time.filter(|time| !time.is_zero()).unwrap_or(default);
        Ok(Self {
            listen: SocketAddr::new(address, port),
            tls,
            jobs_dir: path("jobs_dir")?,
            executable_path: path("health_executable_path")?
                .unwrap_or_else(|| PathBuf::from("bin/dns/healthy")),
            executable_interval: or_default(
                root.duration("health_executable_interval")?,
                Duration::from_secs(5),
            ),
            health_file: path("health_file_name")?
                .ok_or_else(|| root.error("health_file_name", "is missing; name the agent's health.json"))?,
            request_timeout: or_default(root.duration("request_timeout")?, Duration::from_secs(5)),
            logging: logging(&root)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bosh_dns_config_is_read() {
        let text = r#"{"address": "127.0.0.1", "port": 8853, "ca_file": "/c/ca", "certificate_file": "/c/crt",
            "private_key_file": "/c/key", "health_executable_interval": "500ms",
            "health_executable_path": "bin/dns/healthy", "health_file_name": "/i/health.json",
            "jobs_dir": "/jobs", "request_timeout": "3s", "log_level": "ERROR", "more": 1}"#;
        let config = HealthServerConfig::parse("health.json", text.as_bytes()).unwrap();
        assert_eq!(config.listen, "127.0.0.1:8853".parse().unwrap());
        assert_eq!(config.executable_interval, Duration::from_millis(500));
        assert_eq!(config.request_timeout, Duration::from_secs(3));
        assert_eq!(config.jobs_dir.as_deref(), Some(Path::new("/jobs")));
    }

    #[test]
    fn missing_keys_are_named() {
        let error = HealthServerConfig::parse("h.json", br#"{"port": 1, "ca_file": "a"}"#).unwrap_err();
        assert!(
            error.to_string().contains("h.json") && error.to_string().contains("certificate_file"),
            "{error}"
        );
        assert!(HealthServerConfig::parse("h.json", b"{").is_err());
    }
}
