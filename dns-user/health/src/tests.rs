//! Certificates and health servers for tests.

use std::{fs, net::IpAddr, net::SocketAddr, path::Path, time::Duration};

use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};
use tempfile::TempDir;

use crate::{
    HEALTH_NAME,
    server::{HealthServer, HealthServerConfig},
};
use dns_core::{
    config::{HealthConfig, TlsFiles},
    name::Name,
    resolve::{Checks, Existence, Resolution},
};

/// A CA that issues certificates.
pub(crate) struct Authority {
    issuer: Issuer<'static, KeyPair>,
    /// PEM certificate of the CA.
    pub(crate) pem: String,
}

impl Authority {
    pub(crate) fn new() -> Self {
        Self::until(4096)
    }

    /// Creates a CA that is valid until the first day of the given year.
    pub(crate) fn until(year: i32) -> Self {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::default();
        params.not_after = rcgen::date_time_ymd(year, 1, 1);
        params.distinguished_name.push(DnType::CommonName, "ca");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let pem = params.self_signed(&key).unwrap().pem();
        Self {
            issuer: Issuer::new(params, key),
            pem,
        }
    }

    /// Issues a certificate to `common_name`, and writes it with its key and this CA into a new folder.
    pub(crate) fn issue(&self, folder: &Path, common_name: &str) -> TlsFiles {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::default();
        params
            .distinguished_name
            .push(DnType::CommonName, common_name);
        let certificate = params.signed_by(&key, &self.issuer).unwrap().pem();
        fs::create_dir(folder).unwrap();
        let files = TlsFiles {
            certificate: folder.join("certificate.pem"),
            private_key: folder.join("key.pem"),
            ca: folder.join("ca.pem"),
        };
        fs::write(&files.certificate, certificate).unwrap();
        fs::write(&files.private_key, key.serialize_pem()).unwrap();
        fs::write(&files.ca, &self.pem).unwrap();
        files
    }
}

/// A machine with a health server on 127.0.0.1, whose agent says `running` at first.
pub(crate) struct Machine {
    pub(crate) folder: TempDir,
    pub(crate) address: SocketAddr,
}

impl Machine {
    /// Starts the server on the runtime of the test.
    pub(crate) async fn start(authority: &Authority) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let text = r#"{"port": 8853, "ca_file": "a", "certificate_file": "b", "private_key_file": "c",
            "health_file_name": "d", "request_timeout": "60s"}"#;
        let mut config = HealthServerConfig::parse("health.json", text.as_bytes()).unwrap();
        config.listen = SocketAddr::from(([127, 0, 0, 1], 0));
        config.tls = authority.issue(&folder.path().join("server"), HEALTH_NAME);
        config.health_file = folder.path().join("health.json");
        let server = HealthServer::bind(&config).await.unwrap();
        let address = server.address().unwrap();
        tokio::spawn(server.run(std::future::pending()));
        let machine = Self { folder, address };
        machine.say("running");
        machine
    }

    /// Makes the agent report this state.
    pub(crate) fn say(&self, state: &str) {
        let text = format!(r#"{{"state": "{state}"}}"#);
        fs::write(self.folder.path().join("health.json"), text).unwrap();
    }

    pub(crate) fn ip(&self) -> IpAddr {
        self.address.ip()
    }
}

/// Returns the settings of checks at this port, 20 ms apart, of at most ten names.
pub(crate) fn health_config(tls: TlsFiles, port: u16) -> HealthConfig {
    HealthConfig {
        enabled: true,
        port,
        tls: Some(tls),
        check_interval: Duration::from_millis(20),
        max_tracked_queries: 10,
        synchronous_check_timeout: Duration::from_secs(600),
        tracked_query_ttl: None,
    }
}

pub(crate) fn name(text: &str) -> Name {
    Name::from_text(text).unwrap()
}

/// Returns a resolution that needs these instances checked.
pub(crate) fn needs(instances: &[IpAddr]) -> Resolution {
    Resolution {
        existence: Existence::Found,
        v4: Vec::new(),
        v6: Vec::new(),
        checks: Checks {
            instances: instances.to_vec(),
            tracked: true,
            synchronous: true,
        },
    }
}

/// Waits until a condition holds.
pub(crate) async fn until(condition: impl Fn() -> bool) {
    let holding = async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let limit = Duration::from_secs(120);
    let held = tokio::time::timeout(limit, holding).await;
    held.expect("the condition holds within two minutes");
}
