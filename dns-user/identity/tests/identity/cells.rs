//! Several cells, each with its own CA, under mutual TLS: the documented order of steps changes all
//! CAs without a failed handshake.

use std::{
    error::Error,
    fs,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, SystemTime},
};

use dns_identity::{
    authority::certificates,
    folder::read_pair,
    rotator::{Rotator, RotatorSettings},
};
use rustls::{
    ClientConfig, ClientConnection, RootCertStore, ServerConfig, ServerConnection,
    server::WebPkiClientVerifier,
};
use rustls_pki_types::{PrivateKeyDer, pem::PemObject};
use tempfile::TempDir;

use crate::{
    authorities::TestAuthority,
    rotator::{container, files, filled_pool, memory, replace, settings},
};

const CELLS: usize = 3;

const CONTAINERS: usize = 4;

struct Cell {
    folder: TempDir,
    authority: TestAuthority,
    peers: PathBuf,
    rotator: Rotator,
}

impl Cell {
    fn identity(&self, number: usize) -> PathBuf {
        self.folder.path().join(format!("g{number}"))
    }
}

fn roots(folder: &Path) -> Result<Arc<RootCertStore>, Box<dyn Error>> {
    let mut store = RootCertStore::empty();
    for root in certificates(&fs::read(folder.join("ca.crt"))?)? {
        store.add(root)?;
    }
    Ok(Arc::new(store))
}

/// One handshake in memory, in which both ends verify the other by their own bundle.
pub(crate) fn handshake(server: &Path, client: &Path) -> Result<(), Box<dyn Error>> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let material = |folder: &Path| {
        let pair = read_pair(folder, "instance")?;
        let key = PrivateKeyDer::from_pem_slice(pair.key.as_bytes())?;
        Ok::<_, Box<dyn Error>>((certificates(pair.certificate.as_bytes())?, key))
    };
    let (chain, key) = material(server)?;
    let clients =
        WebPkiClientVerifier::builder_with_provider(roots(server)?, provider.clone()).build()?;
    let accepting = ServerConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()?
        .with_client_cert_verifier(clients)
        .with_single_cert(chain, key)?;
    let (chain, key) = material(client)?;
    let connecting = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots(client)?)
        .with_client_auth_cert(chain, key)?;
    // Both an identity's folder and a role's have a name of the certificate.
    let name = server
        .file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .into_owned();
    let mut connecting = ClientConnection::new(Arc::new(connecting), name.try_into()?)?;
    let mut accepting = ServerConnection::new(Arc::new(accepting))?;
    while connecting.is_handshaking() || accepting.is_handshaking() {
        let mut sent = Vec::new();
        connecting.write_tls(&mut sent)?;
        accepting.read_tls(&mut &sent[..])?;
        accepting.process_new_packets()?;
        sent.clear();
        accepting.write_tls(&mut sent)?;
        connecting.read_tls(&mut &sent[..])?;
        connecting.process_new_packets()?;
    }
    Ok(())
}

/// All pairs of cells in both directions; returns the number of handshakes.
fn meet(cells: &[Cell], when: &str) -> usize {
    let mut met = 0;
    for (one, server) in cells.iter().enumerate() {
        for (other, client) in cells.iter().enumerate() {
            let number = met % CONTAINERS;
            let done = handshake(
                &server.identity(number),
                &client.identity((number + 1) % CONTAINERS),
            );
            assert!(done.is_ok(), "{when}: cell {other} to cell {one}: {done:?}");
            met += 1;
        }
    }
    met
}

#[test]
fn cells_change_cas_one_after_another() {
    let authorities: Vec<TestAuthority> = (0..CELLS)
        .map(|cell| TestAuthority::new(&format!("cell {cell}")))
        .collect();
    let bundle: String = authorities.iter().map(TestAuthority::certificate).collect();
    // Within the tolerance of the pairs, because handshakes take place in real time.
    let mut now = SystemTime::now();
    let mut cells: Vec<Cell> = authorities
        .into_iter()
        .map(|authority| {
            let folder = memory();
            let peers = folder.path().join("peers.crt");
            fs::write(&peers, &bundle).unwrap();
            let settings = RotatorSettings {
                backdate: Duration::from_secs(4 * 3600),
                also_trust: vec![peers.clone()],
                keep_old_ca: Duration::from_secs(1800),
                ..settings(folder.path())
            };
            let pool = filled_pool(4);
            let mut rotator = Rotator::open(settings, files(&authority), pool, now).unwrap();
            for number in 0..CONTAINERS {
                let container = container(serde_json::json!({ "guid": format!("g{number}") }));
                rotator.create(container, now).unwrap();
            }
            Cell {
                folder,
                authority,
                peers,
                rotator,
            }
        })
        .collect();
    let mut handshakes = meet(&cells, "at the start");
    for changed in 0..CELLS {
        let new = TestAuthority::new(&format!("cell {changed}, new"));
        // Step 1: all cells trust the new CA as well.
        for cell in 0..CELLS {
            let peers = fs::read_to_string(&cells[cell].peers).unwrap() + &new.certificate();
            fs::write(&cells[cell].peers, peers).unwrap();
            cells[cell].rotator.step(now);
            handshakes += meet(
                &cells,
                &format!("cell {cell} trusts the new CA of cell {changed}"),
            );
        }
        // Step 2: the cell issues from it.
        replace(&cells[changed].authority, &new);
        let begun = now;
        while now < begun + Duration::from_secs(330) {
            now += Duration::from_secs(10);
            for cell in &mut cells {
                assert!(cell.rotator.pool.wait(1, Duration::from_secs(600)));
                cell.rotator.step(now);
            }
            handshakes += meet(&cells, &format!("cell {changed} reissues"));
        }
        for number in 0..CONTAINERS {
            let pair = read_pair(&cells[changed].identity(number), "instance").unwrap();
            assert!(
                pair.certificate.ends_with(&new.certificate()),
                "cell {changed}, container {number}"
            );
        }
    }
    // Step 3: after the configured time, former CAs leave the bundles.
    now += Duration::from_secs(1900);
    let bundle: String = cells
        .iter()
        .map(|cell| cell.authority.certificate())
        .collect();
    for cell in 0..CELLS {
        fs::write(&cells[cell].peers, &bundle).unwrap();
        cells[cell].rotator.step(now);
        handshakes += meet(&cells, "former CAs are dropped");
        let held = fs::read(cells[cell].identity(0).join("ca.crt")).unwrap();
        assert_eq!(certificates(&held).unwrap().len(), CELLS);
    }
    println!("{handshakes} handshakes, none failed");
}

#[test]
fn former_ca_stays_trusted_after_restart() {
    let (authority, folder) = (TestAuthority::new("old"), memory());
    let now = SystemTime::now();
    let with_time = |time: Duration| RotatorSettings {
        keep_old_ca: time,
        ..settings(folder.path())
    };
    let open = |now: SystemTime| {
        let pool = filled_pool(1);
        Rotator::open(
            with_time(Duration::from_secs(3600)),
            files(&authority),
            pool,
            now,
        )
        .unwrap()
    };
    let mut rotator = open(now);
    rotator
        .create(container(serde_json::json!({ "guid": "g1" })), now)
        .unwrap();
    let (old, new) = (authority.certificate(), TestAuthority::new("new"));
    replace(&authority, &new);
    // While no rotator runs.
    drop(rotator);
    let mut rotator = open(SystemTime::now());
    let mut now = SystemTime::now() + Duration::from_secs(310);
    let bundle = || fs::read_to_string(folder.path().join("g1/ca.crt")).unwrap();
    while !read_pair(&folder.path().join("g1"), "instance")
        .unwrap()
        .certificate
        .ends_with(&new.certificate())
    {
        assert!(rotator.pool.wait(1, Duration::from_secs(600)));
        rotator.step(now);
    }
    rotator.step(now);
    assert!(bundle().contains(&old) && bundle().contains(&new.certificate()));
    now += Duration::from_secs(3600);
    rotator.step(now);
    assert_eq!(bundle(), new.certificate());
}
