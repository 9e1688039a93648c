//! Issued certificates, verified by openssl and by rustls.

use std::{
    fs,
    sync::Arc,
    time::{Duration, SystemTime},
};

use dns_identity::{
    authority::{Authority, certificates, parse_all, validity},
    certificate::Validity,
    keys::{KeyType, PrivateKey},
    profile::{Container, Profile},
};
use rustls::{
    ClientConfig, ClientConnection, RootCertStore, ServerConfig, ServerConnection,
    server::WebPkiClientVerifier,
};
use rustls_pki_types::{PrivateKeyDer, ServerName, pem::PemObject};

use crate::{
    authorities::{CaKey, SOUND, TestAuthority},
    tools::{openssl, text},
};

fn authority(key: CaKey) -> (TestAuthority, Authority) {
    let made = TestAuthority::with("authority", SOUND, key, 10);
    let loaded = Authority::parse(
        made.certificate().as_bytes(),
        &made.key(),
        SystemTime::now(),
    )
    .unwrap();
    (made, loaded)
}

fn container() -> Container {
    serde_json::from_str(
        r#"{"guid":"g1","ous":["organization:o","space:s","app:a"],"internal_ip":"10.255.0.7"}"#,
    )
    .unwrap()
}

#[test]
fn openssl_accepts_every_combination() {
    let folder = tempfile::tempdir().unwrap();
    for ca in [CaKey::Rsa, CaKey::P256, CaKey::P384] {
        let (made, loaded) = authority(ca);
        for kind in [KeyType::Rsa2048, KeyType::Rsa3072, KeyType::P256] {
            let key = PrivateKey::generate(kind).unwrap();
            let profile = container().identity().unwrap();
            let day = Duration::from_secs(24 * 3600);
            let issued = loaded
                .issue(
                    &profile,
                    key.public_key_info(),
                    Validity::starting(SystemTime::now(), day),
                )
                .unwrap();
            let leaf = folder.path().join("leaf.crt");
            fs::write(&leaf, &issued.pem).unwrap();
            let ca_file = made.certificate_path();
            for purpose in ["sslclient", "sslserver"] {
                let arguments = [
                    "verify",
                    "-x509_strict",
                    "-purpose",
                    purpose,
                    "-CAfile",
                    text(&ca_file),
                    text(&leaf),
                ];
                openssl(&arguments, b"").unwrap();
            }
            // The key matches the certificate.
            let of_key = openssl(&["pkey", "-pubout"], key.to_pem().unwrap().as_bytes()).unwrap();
            let of_certificate =
                openssl(&["x509", "-noout", "-pubkey"], issued.pem.as_bytes()).unwrap();
            assert_eq!(of_key, of_certificate, "{ca:?}, {kind:?}");
        }
    }
}

/// Both ends of a TLS connection with one certificate, in memory.
fn handshake(roots: &str, issued: &str, key: &str, server_name: &str) -> Result<(), rustls::Error> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut store = RootCertStore::empty();
    for root in certificates(roots.as_bytes()).unwrap() {
        store.add(root).unwrap();
    }
    let store = Arc::new(store);
    let chain = certificates(issued.as_bytes()).unwrap();
    let key = PrivateKeyDer::from_pem_slice(key.as_bytes()).unwrap();
    let clients = WebPkiClientVerifier::builder_with_provider(store.clone(), provider.clone())
        .build()
        .unwrap();
    let server = ServerConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()?
        .with_client_cert_verifier(clients)
        .with_single_cert(chain.clone(), key.clone_key())?;
    let client = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_root_certificates(store)
        .with_client_auth_cert(chain, key)?;
    let mut server = ServerConnection::new(Arc::new(server))?;
    let name = ServerName::try_from(server_name.to_owned()).unwrap();
    let mut client = ClientConnection::new(Arc::new(client), name)?;
    while client.is_handshaking() || server.is_handshaking() {
        let mut bytes = Vec::new();
        while client.wants_write() {
            client.write_tls(&mut bytes).unwrap();
        }
        server.read_tls(&mut bytes.as_slice()).unwrap();
        server.process_new_packets()?;
        let mut bytes = Vec::new();
        while server.wants_write() {
            server.write_tls(&mut bytes).unwrap();
        }
        client.read_tls(&mut bytes.as_slice()).unwrap();
        client.process_new_packets()?;
    }
    Ok(())
}

#[test]
fn rustls_accepts_both_ends() {
    for ca in [CaKey::Rsa, CaKey::P256, CaKey::P384] {
        let (made, loaded) = authority(ca);
        for kind in [KeyType::Rsa2048, KeyType::P256] {
            let key = PrivateKey::generate(kind).unwrap();
            let profile = container().identity().unwrap();
            let day = Duration::from_secs(24 * 3600);
            let issued = loaded
                .issue(
                    &profile,
                    key.public_key_info(),
                    Validity::starting(SystemTime::now(), day),
                )
                .unwrap();
            let key = key.to_pem().unwrap();
            for name in ["g1", "10.255.0.7"] {
                handshake(&made.certificate(), &issued.pem, &key, name).unwrap();
            }
            assert!(handshake(&made.certificate(), &issued.pem, &key, "g2").is_err());
        }
    }
}

#[test]
fn chain_follows_leaf() {
    let root = TestAuthority::new("root");
    let below = root.intermediate("below", SOUND);
    let loaded = Authority::parse(
        below.certificate().as_bytes(),
        &below.key(),
        SystemTime::now(),
    )
    .unwrap();
    let key = PrivateKey::generate(KeyType::P256).unwrap();
    let profile = container().identity().unwrap();
    let hour = Duration::from_secs(3600);
    let issued = loaded
        .issue(
            &profile,
            key.public_key_info(),
            Validity::starting(SystemTime::now(), hour),
        )
        .unwrap();
    assert!(issued.pem.ends_with(&below.certificate()), "{}", issued.pem);
    handshake(
        &root.certificate(),
        &issued.pem,
        &key.to_pem().unwrap(),
        "g1",
    )
    .unwrap();
}

#[test]
fn leaf_ends_with_authority() {
    let (_, loaded) = authority(CaKey::P256);
    let (now, year) = (SystemTime::now(), Duration::from_secs(365 * 24 * 3600));
    let key = PrivateKey::generate(KeyType::P256).unwrap();
    let issued = loaded
        .issue(
            &container().identity().unwrap(),
            key.public_key_info(),
            Validity::starting(now, year),
        )
        .unwrap();
    assert_eq!(issued.validity.not_after, loaded.validity.not_after);
    assert!(
        loaded
            .caution(now, year)
            .unwrap()
            .contains("before a new leaf would")
    );
    assert_eq!(loaded.caution(now, Duration::from_secs(3600)), None);
}

#[test]
fn dates_past_2050_are_encoded() {
    let made = TestAuthority::with("long", SOUND, CaKey::P256, 20_000);
    let now = SystemTime::now();
    let loaded = Authority::parse(made.certificate().as_bytes(), &made.key(), now).unwrap();
    let key = PrivateKey::generate(KeyType::P256).unwrap();
    let profile = Profile::new("späť_*", &[], [], []);
    assert!(profile.is_err(), "a common name is also a DNS name");
    let profile = Profile::new("g_1", &["org & space: ü*".to_owned()], [], []).unwrap();
    let length = Duration::from_secs(40 * 365 * 24 * 3600);
    let issued = loaded
        .issue(
            &profile,
            key.public_key_info(),
            Validity::starting(now, length),
        )
        .unwrap();
    let ders = certificates(issued.pem.as_bytes()).unwrap();
    let parsed = parse_all(&ders).unwrap();
    assert_eq!(validity(&parsed[0]), issued.validity);
    let subject = openssl(
        &["x509", "-noout", "-subject", "-nameopt", "utf8"],
        issued.pem.as_bytes(),
    )
    .unwrap();
    assert_eq!(subject.trim(), "subject=OU=org & space: ü*, CN=g_1");
}

#[test]
fn serials_are_random_uuids() {
    let (_, loaded) = authority(CaKey::P256);
    let key = PrivateKey::generate(KeyType::P256).unwrap();
    let profile = container().identity().unwrap();
    let mut lengths = [0; 18];
    for _ in 0..64 {
        let hour = Duration::from_secs(3600);
        let issued = loaded
            .issue(
                &profile,
                key.public_key_info(),
                Validity::starting(SystemTime::now(), hour),
            )
            .unwrap();
        let ders = certificates(issued.pem.as_bytes()).unwrap();
        let parsed = parse_all(&ders).unwrap();
        let serial = parsed[0].tbs_certificate().serial_number().as_bytes();
        lengths[serial.len()] += 1;
        let uuid = &serial[serial.len().saturating_sub(16)..];
        if uuid.len() == 16 {
            assert_eq!((uuid[6] >> 4, uuid[8] >> 6), (4, 2));
        }
    }
    assert!(lengths[16] > 0 && lengths[17] > 0, "{lengths:?}");
}
