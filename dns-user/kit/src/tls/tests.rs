//! Rotation step by step, with generated certificates.

use std::fs;

use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};

use super::*;
use crate::logs::logged;

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

/// A thread that reads files on a mount that hangs holds the attempt.
#[test]
fn handshake_waits_for_no_hung_reader() {
    let ca = Authority::new("ca");
    let folder = tempfile::tempdir().unwrap();
    let (old, new) = (ca.issue("health.bosh-dns"), ca.issue("health.bosh-dns"));
    let files = files(folder.path(), &old, &ca.pem);
    let tls = Arc::new(RotatingTls::load("t", "health.bosh-dns", &files).unwrap());
    fs::write(&files.certificate, &new.0).unwrap();
    fs::write(&files.private_key, &new.1).unwrap();
    let hung = tls.attempt.lock();
    handshake(Arc::new(tls.polling_client_config()), tls.server_config()).unwrap();
    assert_eq!(tls.current().generation, 1);
    drop(hung);
    // By this call, or by a thread of the handshake.
    while tls.current().generation == 1 {
        tls.poll();
    }
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

/// Issues a PEM certificate and key that end in these seconds.
fn issued_for(ca: &Authority, common_name: &str, seconds: u64) -> (String, String) {
    let key = KeyPair::generate().unwrap();
    let mut params = CertificateParams::default();
    params
        .distinguished_name
        .push(DnType::CommonName, common_name);
    params.not_after = (SystemTime::now() + Duration::from_secs(seconds)).into();
    let certificate = params.signed_by(&key, &ca.issuer).unwrap();
    (certificate.pem(), key.serialize_pem())
}

#[test]
fn ending_certificates_are_announced() {
    const HOUR: Duration = Duration::from_secs(3600);
    let ca = Authority::new("ca");
    let folder = tempfile::tempdir().unwrap();
    // Half an hour more, for a slow machine.
    let pair = issued_for(&ca, "health.bosh-dns", 50 * 3600 + 1800);
    let files = files(folder.path(), &pair, &ca.pem);
    let mut tls = None;
    let log = logged(|| {
        let loaded = RotatingTls::load("t", "health.bosh-dns", &files).unwrap();
        // Once a day.
        assert!(!loaded.poll());
        tls = Some(loaded);
    });
    let tls = tls.unwrap();
    let warning =
        "certificate expires soon; rotate it purpose=t subject=health.bosh-dns hours_left=50\n";
    assert!(log.ends_with(warning) && log.lines().count() == 1, "{log}");
    let now = SystemTime::now();
    for (hours_ago, is_repeated) in [(23, false), (25, true)] {
        tls.attempt.lock().warned = Some(now - hours_ago * HOUR);
        let log = logged(|| assert!(!tls.poll()));
        assert_eq!(!log.is_empty(), is_repeated, "{log}");
    }
    assert_eq!(
        tls.ends_soon(now).unwrap(),
        "t: the certificate of health.bosh-dns expires soon, in 50 hours"
    );
    assert_eq!((tls.problem(now), tls.invalid(now)), (None, None));
    let later = now + 60 * HOUR;
    let expected = format!(
        "t: {} is not valid now: it has expired",
        files.certificate.display()
    );
    assert_eq!(tls.invalid(later), Some(expected.clone()));
    assert_eq!(tls.problem(later), Some(expected));
    assert_eq!(tls.ends_soon(later), None, "too late for that");
    let early = SystemTime::UNIX_EPOCH;
    let problem = tls.invalid(early).unwrap();
    assert!(problem.ends_with("it is not valid yet (is this machine's clock right?)"));
    tls.attempt.lock().warned = None;
    let log = logged(|| tls.warn_of_expiry(later));
    let error = "certificate expired; rotate it purpose=t subject=health.bosh-dns\n";
    assert!(log.contains(" ERROR ") && log.ends_with(error), "{log}");
}

#[test]
fn unusable_files_report_causes_once() {
    let ca = Authority::new("ca");
    let folder = tempfile::tempdir().unwrap();
    let files = files(folder.path(), &ca.issue("health.bosh-dns"), &ca.pem);
    let tls = RotatingTls::load("t", "health.bosh-dns", &files).unwrap();
    assert_eq!((tls.unusable_files(), tls.failures()), (None, 0));
    fs::write(&files.private_key, "nothing").unwrap();
    let log = logged(|| assert!(!tls.poll()));
    let warning = "cannot use the new certificates; the last good ones stay in use: ";
    assert_eq!(log.matches(warning).count(), 1, "{log}");
    assert_eq!(logged(|| assert!(!tls.poll())), "");
    assert_eq!(tls.failures(), 2);
    let problem = tls.unusable_files().unwrap();
    let begin = format!(
        "t: the new files cannot be used: {}: ",
        files.private_key.display()
    );
    assert!(problem.starts_with(&begin), "{problem}");
    assert!(problem.ends_with("; a PEM file with a private key is needed"));
    assert_eq!(tls.problem(SystemTime::now()), Some(problem));
    fs::write(&files.certificate, "nothing").unwrap();
    let log = logged(|| assert!(!tls.poll()));
    assert_eq!(log.matches(warning).count(), 1, "{log}");
    assert_eq!(logged(|| assert!(!tls.poll())), "");
    let problem = tls.last_error().unwrap();
    let end = "holds no certificate; a PEM file with a certificate (and its chain) is needed";
    assert!(problem.ends_with(end), "{problem}");
}

#[test]
fn damaged_authorities_are_skipped() {
    let ca = Authority::new("ca");
    let folder = tempfile::tempdir().unwrap();
    let damaged = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
    for (bundle, ignored) in [
        (ca.pem.clone(), None),
        (format!("{damaged}{}{damaged}", ca.pem), Some("ignored=2\n")),
    ] {
        let files = files(folder.path(), &ca.issue("health.bosh-dns"), &bundle);
        let mut count = 0;
        let log = logged(|| {
            let tls = RotatingTls::load("t", "health.bosh-dns", &files).unwrap();
            count = tls.current().authorities.len();
        });
        assert_eq!(count, 1);
        match ignored {
            Some(end) => assert!(
                log.contains("unusable CA certificates skipped") && log.ends_with(end),
                "{log}"
            ),
            None => assert_eq!(log, ""),
        }
    }
}

#[test]
fn polling_client_presents_the_latest_certificate() {
    let (old_ca, new_ca) = (Authority::new("ca"), Authority::new("ca"));
    let folder = tempfile::tempdir().unwrap();
    let old = files(folder.path(), &old_ca.issue("health.bosh-dns"), &old_ca.pem);
    let tls = RotatingTls::load("t", "health.bosh-dns", &old).unwrap();
    let client = Arc::new(tls.polling_client_config());
    assert!(client.client_auth_cert_resolver.has_certs());
    handshake(client.clone(), tls.server_config()).unwrap();
    assert_eq!(tls.current().generation, 1);

    // Of another size: a write within the same tick of the clock would not be noticed.
    let bundle = format!("{}\n", new_ca.pem);
    files(folder.path(), &new_ca.issue("health.bosh-dns"), &bundle);
    let elsewhere = tempfile::tempdir().unwrap();
    let new = files(
        elsewhere.path(),
        &new_ca.issue("health.bosh-dns"),
        &new_ca.pem,
    );
    let server = RotatingTls::load("t", "health.bosh-dns", &new).unwrap();
    // On a busy machine, a handshake may go on before the files are read.
    while handshake(client.clone(), server.server_config()).is_err() {}
    assert_eq!(tls.current().generation, 2);
}

#[test]
fn only_hosts_are_named_to_servers() {
    let ca = Authority::new("ca");
    let folder = tempfile::tempdir().unwrap();
    let files = files(folder.path(), &ca.issue("health.bosh-dns"), &ca.pem);
    for (name, is_named) in [
        (AcceptedName::Fixed("health.bosh-dns"), false),
        (AcceptedName::Host, true),
        (AcceptedName::HostBelow("bosh.example"), true),
    ] {
        let tls = RotatingTls::load("t", name, &files).unwrap();
        assert_eq!(tls.client_config().enable_sni, is_named, "{name:?}");
    }
}

#[test]
fn common_names_match_whole_labels() {
    use rustls::client::danger::ServerCertVerifier as _;

    let ca = Authority::new("ca");
    let mut roots = RootCertStore::empty();
    let authority = CertificateDer::from_pem_slice(ca.pem.as_bytes()).unwrap();
    roots.add(authority).unwrap();
    let verifier = ServerVerifier::fixed(AcceptedName::HostBelow("bosh.example"), Arc::new(roots));
    let verify = |common_name: &str, host: &'static str| {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(vec!["nats.example".to_owned()]).unwrap();
        params
            .distinguished_name
            .push(DnType::CommonName, common_name);
        let certificate = params.signed_by(&key, &ca.issuer).unwrap();
        let host = rustls_pki_types::ServerName::try_from(host).unwrap();
        let now = rustls_pki_types::UnixTime::now();
        verifier
            .verify_server_cert(certificate.der(), &[], &host, &[], now)
            .map(drop)
            .map_err(|error| error.to_string())
    };
    for name in ["nats.bosh.example", "a.b.bosh.example"] {
        assert_eq!(verify(name, "nats.example"), Ok(()));
        assert!(verify(name, "other.example").is_err(), "another host");
    }
    for name in [
        "bosh.example",
        ".bosh.example",
        "evilbosh.example",
        "nats.bosh.example.org",
        "other",
    ] {
        let expected = format!(
            "unexpected error: the server's common name \"{name}\" is not below bosh.example"
        );
        assert_eq!(verify(name, "nats.example"), Err(expected));
    }
}

#[test]
fn changed_authority_files_are_read() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ca.pem");
    let verifier = ServerVerifier::of_file(&path);
    let problem = verifier.roots().unwrap_err().to_string();
    assert!(
        problem.starts_with(&path.display().to_string()),
        "{problem}"
    );
    // Nor is a FIFO read, whose writer might never come.
    nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRUSR).unwrap();
    assert!(verifier.roots().is_err());
    fs::remove_file(&path).unwrap();
    fs::write(&path, Authority::new("ca").pem).unwrap();
    // On a busy machine, a call may return before the file is read.
    let first = loop {
        if let Ok(roots) = verifier.roots() {
            break roots.unwrap();
        }
    };
    assert_eq!(first.len(), 1);
    assert!(Arc::ptr_eq(&first, &verifier.roots().unwrap().unwrap()));
    // The last good ones stay in use.
    fs::write(&path, "").unwrap();
    assert!(Arc::ptr_eq(&first, &verifier.roots().unwrap().unwrap()));
    fs::remove_file(&path).unwrap();
    assert!(Arc::ptr_eq(&first, &verifier.roots().unwrap().unwrap()));
    let two = Authority::new("ca").pem + &Authority::new("ca").pem;
    fs::write(&path, two).unwrap();
    while verifier.roots().unwrap().unwrap().len() != 2 {}
    assert!(ServerVerifier::unverified().roots().unwrap().is_none());
}

#[tokio::test]
async fn running_task_polls_files() {
    let ca = Authority::new("ca");
    let folder = tempfile::tempdir().unwrap();
    let files = files(folder.path(), &ca.issue("health.bosh-dns"), &ca.pem);
    let tls = RotatingTls::load("t", "health.bosh-dns", &files).unwrap();
    let (sender, mut polled) = tokio::sync::mpsc::unbounded_channel();
    let after = move |tls: &RotatingTls| {
        let _ = sender.send(tls.current().generation);
    };
    let task = tokio::spawn(tls.watch(after));
    assert_eq!(polled.recv().await, Some(1));
    task.abort();
}
