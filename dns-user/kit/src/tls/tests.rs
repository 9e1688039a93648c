//! Rotation step by step, with generated certificates.

use std::fs;

use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};

use super::*;

/// A CA that issues certificates.
struct Authority {
    issuer: Issuer<'static, KeyPair>,
    /// PEM certificate of the CA.
    pem: String,
}

impl Authority {
    fn new(name: &str) -> Self {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let pem = params.self_signed(&key).unwrap().pem();
        Self {
            issuer: Issuer::new(params, key),
            pem,
        }
    }

    /// Issues a PEM certificate and key with a common name only.
    fn issue(&self, common_name: &str) -> (String, String) {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::default();
        params
            .distinguished_name
            .push(DnType::CommonName, common_name);
        (
            params.signed_by(&key, &self.issuer).unwrap().pem(),
            key.serialize_pem(),
        )
    }
}

/// Writes a set of files into a new folder.
fn files(folder: &Path, (certificate, key): &(String, String), ca: &str) -> TlsFiles {
    let files = TlsFiles {
        certificate: folder.join("certificate.pem"),
        private_key: folder.join("key.pem"),
        ca: folder.join("ca.pem"),
    };
    fs::write(&files.certificate, certificate).unwrap();
    fs::write(&files.private_key, key).unwrap();
    fs::write(&files.ca, ca).unwrap();
    files
}

/// Performs a handshake in memory; returns both sides' errors as one text.
fn handshake(
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
) -> Result<rustls::HandshakeKind, String> {
    let name = rustls_pki_types::ServerName::try_from("health.bosh-dns").unwrap();
    let mut client = rustls::ClientConnection::new(client, name).map_err(|e| e.to_string())?;
    let mut server = rustls::ServerConnection::new(server).map_err(|e| e.to_string())?;
    for _ in 0..10 {
        let mut wire = Vec::new();
        while client.wants_write() {
            client.write_tls(&mut wire).unwrap();
        }
        let mut bytes = &wire[..];
        while !bytes.is_empty() {
            server.read_tls(&mut bytes).unwrap();
            server
                .process_new_packets()
                .map_err(|e| format!("server: {e}"))?;
        }
        let mut wire = Vec::new();
        while server.wants_write() {
            server.write_tls(&mut wire).unwrap();
        }
        let mut bytes = &wire[..];
        while !bytes.is_empty() {
            client.read_tls(&mut bytes).unwrap();
            client
                .process_new_packets()
                .map_err(|e| format!("client: {e}"))?;
        }
    }
    if client.is_handshaking() {
        Err("not done".to_owned())
    } else {
        server.handshake_kind().ok_or("not done".to_owned())
    }
}

#[test]
fn sessions_are_not_resumed() {
    let ca = Authority::new("ca");
    let folder = tempfile::tempdir().unwrap();
    let files = files(folder.path(), &ca.issue("health.bosh-dns"), &ca.pem);
    let tls = RotatingTls::load("t", "health.bosh-dns", &files).unwrap();
    for version in [&rustls::version::TLS12, &rustls::version::TLS13] {
        // A client that stores sessions, as browsers and Go's clients do.
        let mut roots = RootCertStore::empty();
        roots
            .add_parsable_certificates(CertificateDer::pem_file_iter(&files.ca).unwrap().flatten());
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let verifier = ServerVerifier::fixed("health.bosh-dns".into(), Arc::new(roots));
        let client = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[version])
            .unwrap()
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(verifier))
            .with_client_auth_cert(
                CertificateDer::pem_file_iter(&files.certificate)
                    .unwrap()
                    .flatten()
                    .collect(),
                PrivateKeyDer::from_pem_file(&files.private_key).unwrap(),
            )
            .unwrap();
        let client = Arc::new(client);
        for _ in 0..3 {
            let kind = handshake(client.clone(), tls.server_config()).unwrap();
            assert_eq!(kind, rustls::HandshakeKind::Full, "{version:?}");
        }
    }
}

#[test]
fn warning_of_a_wrong_clock_counts_no_longer() {
    let now = SystemTime::now();
    assert!(is_recent(now, now) && is_recent(now - WARNING_INTERVAL / 2, now));
    assert!(!is_recent(now - WARNING_INTERVAL, now));
    assert!(!is_recent(now + 40 * WARNING_INTERVAL, now));
}

#[test]
fn common_name_suffices() {
    let ca = Authority::new("ca");
    let folder = tempfile::tempdir().unwrap();
    let right = RotatingTls::load(
        "t",
        "health.bosh-dns",
        &files(folder.path(), &ca.issue("health.bosh-dns"), &ca.pem),
    );
    let right = right.unwrap();
    handshake(right.client_config(), right.server_config()).unwrap();

    let folder = tempfile::tempdir().unwrap();
    let wrong = files(folder.path(), &ca.issue("somebody.else"), &ca.pem);
    let wrong = RotatingTls::load("t", "health.bosh-dns", &wrong).unwrap();
    let refused = handshake(right.client_config(), wrong.server_config()).unwrap_err();
    assert!(refused.contains("client: "), "{refused}");
    assert_eq!(
        wrong.current().certificate.common_name.as_deref(),
        Some("somebody.else")
    );
}

#[test]
fn mismatched_key_is_never_used() {
    let ca = Authority::new("ca");
    let folder = tempfile::tempdir().unwrap();
    let (old, new) = (ca.issue("health.bosh-dns"), ca.issue("health.bosh-dns"));
    let files = files(folder.path(), &old, &ca.pem);
    let tls = RotatingTls::load("t", "health.bosh-dns", &files).unwrap();
    assert!(!tls.poll());

    fs::write(&files.certificate, &new.0).unwrap();
    assert!(!tls.poll());
    assert_eq!(tls.current().generation, 1);
    assert!(
        tls.last_error()
            .unwrap()
            .contains("does not match the certificate"),
        "{:?}",
        tls.last_error()
    );
    handshake(tls.client_config(), tls.server_config()).unwrap();

    fs::write(&files.private_key, &new.1).unwrap();
    assert!(tls.poll());
    assert_eq!(tls.current().generation, 2);
    assert_eq!(tls.last_error(), None);
    handshake(tls.client_config(), tls.server_config()).unwrap();
}

#[test]
fn broken_file_keeps_last_set() {
    let ca = Authority::new("ca");
    let folder = tempfile::tempdir().unwrap();
    let files = files(folder.path(), &ca.issue("health.bosh-dns"), &ca.pem);
    let tls = RotatingTls::load("t", "health.bosh-dns", &files).unwrap();
    for content in [
        "",
        "no PEM at all",
        "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
    ] {
        fs::write(&files.ca, content).unwrap();
        assert!(!tls.poll());
        assert!(tls.last_error().is_some(), "{content:?}");
    }
    fs::remove_file(&files.ca).unwrap();
    assert!(!tls.poll());
    fs::write(&files.ca, &ca.pem).unwrap();
    assert!(tls.poll());
    assert!(
        RotatingTls::load(
            "t",
            "n",
            &TlsFiles {
                ca: folder.path().join("none"),
                ..files
            }
        )
        .is_err()
    );
}

#[test]
fn staggered_ca_rotation_never_fails() {
    let (old_ca, new_ca) = (Authority::new("ca"), Authority::new("ca"));
    let both = format!("{}{}", old_ca.pem, new_ca.pem);
    let (old, new) = (
        old_ca.issue("health.bosh-dns"),
        new_ca.issue("health.bosh-dns"),
    );
    let steps = [
        (&old, &old_ca.pem),
        (&old, &both),
        (&new, &both),
        (&new, &new_ca.pem),
    ];
    let load = |(pair, ca): (&(String, String), &String)| {
        let folder = tempfile::tempdir().unwrap();
        RotatingTls::load("t", "health.bosh-dns", &files(folder.path(), pair, ca)).unwrap()
    };
    let ends: Vec<_> = steps.into_iter().map(load).collect();
    // Two machines are at most one step apart.
    for pair in ends.windows(2) {
        handshake(pair[0].client_config(), pair[1].server_config()).unwrap();
        handshake(pair[1].client_config(), pair[0].server_config()).unwrap();
    }
    assert_eq!(ends[1].current().authorities.len(), 2);
    // At the end the old CA is no longer accepted.
    handshake(ends[0].client_config(), ends[3].server_config()).unwrap_err();
}

#[test]
fn certificate_expiry_is_known() {
    let ca = Authority::new("ca");
    let key = KeyPair::generate().unwrap();
    let mut params = CertificateParams::new(vec!["a.example".to_owned()]).unwrap();
    params.not_after = rcgen::date_time_ymd(2031, 2, 3);
    let certificate = params.signed_by(&key, &ca.issuer).unwrap();
    let facts = CertificateFacts::parse(certificate.der()).unwrap();
    assert_eq!(
        facts.not_after,
        SystemTime::UNIX_EPOCH + Duration::from_secs(1_927_843_200)
    );
    assert!(facts.is_issued_to("A.example") && !facts.is_issued_to("b.example"));
}

#[test]
fn both_dates_belong_to_the_validity() {
    let moment = |milliseconds| SystemTime::UNIX_EPOCH + Duration::from_millis(milliseconds);
    let facts = CertificateFacts {
        common_name: None,
        dns_names: Vec::new(),
        not_before: moment(1_000_000),
        not_after: moment(2_000_000),
    };
    for (at, is_valid) in [
        (999_999, false),
        (1_000_000, true),
        (2_000_000, true),
        (2_000_999, true),
        (2_001_000, false),
    ] {
        assert_eq!(facts.invalid_at(moment(at)).is_none(), is_valid, "{at}");
    }
}

#[test]
fn warnings_are_relative_to_validity() {
    let hour = Duration::from_secs(3600);
    let start = SystemTime::UNIX_EPOCH + Duration::from_secs(2_000_000_000);
    for (validity, warned) in [
        (hour, hour / 12),
        (4 * hour, hour / 3),
        (24 * hour, hour / 3),
        (7 * 24 * hour, hour / 3),
        (90 * 24 * hour, 180 * hour),
        (365 * 24 * hour, 720 * hour),
        (3650 * 24 * hour, 720 * hour),
    ] {
        let facts = CertificateFacts {
            common_name: None,
            dns_names: Vec::new(),
            not_before: start,
            not_after: start + validity,
        };
        assert_eq!(
            facts.not_after.duration_since(facts.warns_from()).unwrap(),
            warned,
            "{validity:?}"
        );
    }
}

#[test]
fn first_warning_about_an_authority_is_known() {
    let day = Duration::from_secs(24 * 3600);
    let place = tempfile::tempdir().unwrap();
    let ca = Authority::new("ca");
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.not_before = rcgen::date_time_ymd(2024, 1, 1);
    params.not_after = rcgen::date_time_ymd(2090, 1, 31);
    let other = params.self_signed(&KeyPair::generate().unwrap()).unwrap();
    let bundle = format!("{}{}", ca.pem, other.pem());
    let files = files(place.path(), &ca.issue("a"), &bundle);
    let material = TlsMaterial::load("a".into(), &files, 1).unwrap();
    let ends = SystemTime::from(params.not_after);
    assert_eq!(material.authorities_not_after(), Some(ends));
    assert_eq!(material.authorities_warn_from(), Some(ends - 30 * day));
}
