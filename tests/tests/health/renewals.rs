//! Health checks while every certificate of the fleet is renewed ten times and the CA is rotated.

use std::{
    collections::HashMap,
    env, fs, io,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, SystemTime},
};

use dns_core::{config::TlsFiles, name::Name};
use dns_fastpath::FastPathHandle;
use dns_health::{HEALTH_NAME, HealthService};
use dns_identity::{
    authority::{Authority, certificates},
    certificate::Validity,
    folder::{IdentityFolder, Pair, read_pair},
    keys::{KeyType, PrivateKey},
    profile::Profile,
};
use http_body_util::Full;
use hyper::{Response, body::Bytes, server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use rustls::{RootCertStore, ServerConfig, server::WebPkiClientVerifier};
use rustls_pki_types::{PrivateKeyDer, pem::PemObject};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;
use whole_system_tests::{
    health::{config, instance},
    pki,
    process::wait_until,
};

use crate::needs;

/// Number of machines, unless the environment variable [`MACHINES`] has another.
const USUAL: u32 = 200;

/// Environment variable with the number of machines.
const MACHINES: &str = "HEALTH_MACHINES";

/// Generous time limit for a busy machine.
const LIMIT: Duration = Duration::from_secs(600);

fn authority(name: &str) -> Authority {
    let pki::Authority {
        certificate, key, ..
    } = pki::Authority::new(name).unwrap();
    Authority::parse(certificate.as_bytes(), key.as_bytes(), SystemTime::now()).unwrap()
}

/// The machines of a fleet: folders as an agent keeps them.
struct Machines {
    folder: tempfile::TempDir,
}

impl Machines {
    fn path(&self, ip: IpAddr) -> PathBuf {
        self.folder.path().join(ip.to_string())
    }

    /// Renews the key pair of a machine; without `issuer`, only its trust bundle.
    fn write(&self, ip: IpAddr, issuer: Option<&Authority>, bundle: &str) {
        let path = self.path(ip);
        let pair = match issuer {
            None => read_pair(&path, "instance").unwrap(),
            Some(authority) => {
                let key = PrivateKey::generate(KeyType::P256).unwrap();
                let id = ip.to_string();
                let profile = Profile::new(HEALTH_NAME, &[], [id.as_str()], [ip]).unwrap();
                let day = Duration::from_secs(24 * 3600);
                let issued = authority
                    .issue(
                        &profile,
                        key.public_key_info(),
                        Validity::starting(SystemTime::now(), day),
                    )
                    .unwrap();
                Pair {
                    certificate: issued.pem,
                    key: key.to_pem().unwrap(),
                }
            }
        };
        IdentityFolder::new(path)
            .replace_pair(&pair, bundle, None)
            .unwrap();
    }
}

/// Health servers of all machines on one socket that is reachable over loopback only. Each
/// connection uses the machine's current key pair.
struct Servers {
    machines: Arc<Machines>,
    /// Answered checks by machine.
    answered: Mutex<HashMap<IpAddr, usize>>,
    handshakes: AtomicUsize,
    /// Causes of failed handshakes.
    failed: Mutex<Vec<String>>,
}

fn server_config(folder: &Path) -> ServerConfig {
    let pair = read_pair(folder, "instance").unwrap();
    let mut roots = RootCertStore::empty();
    for root in certificates(&fs::read(folder.join("ca.crt")).unwrap()).unwrap() {
        roots.add(root).unwrap();
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let clients = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider.clone())
        .build()
        .unwrap();
    ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_client_cert_verifier(clients)
        .with_single_cert(
            certificates(pair.certificate.as_bytes()).unwrap(),
            PrivateKeyDer::from_pem_slice(pair.key.as_bytes()).unwrap(),
        )
        .unwrap()
}

impl Servers {
    async fn serve(self: Arc<Self>, stream: TcpStream) -> Option<()> {
        let ip = stream.local_addr().ok()?.ip();
        let _ = stream.set_nodelay(true);
        let config = Arc::new(server_config(&self.machines.path(ip)));
        let stream = match TlsAcceptor::from(config).accept(stream).await {
            Ok(stream) => stream,
            // The watcher aborts a check that takes too long on a busy machine, and retries it.
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return None,
            Err(error) => {
                self.failed.lock().push(format!("{ip}: {error}"));
                return None;
            }
        };
        self.handshakes.fetch_add(1, Ordering::Relaxed);
        let service = service_fn(|_| async {
            *self.answered.lock().entry(ip).or_default() += 1;
            Ok::<_, std::convert::Infallible>(Response::new(Full::new(Bytes::from(
                r#"{"state":"running"}"#,
            ))))
        });
        http1::Builder::new()
            .serve_connection(TokioIo::new(stream), service)
            .await
            .ok()
    }
}

#[test]
fn identity_rotation_loses_no_check() {
    let count = env::var(MACHINES).map_or(USUAL, |text| text.parse().expect("a number"));
    let (old, new) = (authority("old"), authority("new"));
    let machines = Arc::new(Machines {
        folder: tempfile::tempdir_in("/dev/shm").unwrap(),
    });
    let all = || (0..count).map(instance);
    let client = IpAddr::V4(Ipv4Addr::LOCALHOST);
    for ip in all().chain([client]) {
        machines.write(ip, Some(&old), &old.chain_pem());
    }
    let (answered, handshakes, failed) = (Mutex::default(), AtomicUsize::new(0), Mutex::default());
    let servers = Arc::new(Servers {
        machines: machines.clone(),
        answered,
        handshakes,
        failed,
    });
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap();
    let listener = {
        let _inside = runtime.enter();
        let socket =
            socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
        socket.bind_device(Some(b"lo")).unwrap();
        socket.set_nonblocking(true).unwrap();
        socket
            .bind(&SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0)).into())
            .unwrap();
        socket.listen(4096).unwrap();
        TcpListener::from_std(socket.into()).unwrap()
    };
    let port = listener.local_addr().unwrap().port();
    let accepting = servers.clone();
    runtime.spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            tokio::spawn(accepting.clone().serve(stream));
        }
    });

    let file = |name: &str| machines.path(client).join(name);
    let tls = TlsFiles {
        certificate: file("instance.crt"),
        private_key: file("instance.key"),
        ca: file("ca.crt"),
    };
    let config = config(port, tls, Duration::from_secs(1));
    let service = HealthService::new(&config, LIMIT, FastPathHandle::default()).unwrap();
    service.start().unwrap();
    service
        .tracker()
        .track(&Name::from_text("all").unwrap(), &needs(all(), false));
    wait_until("first checks", LIMIT, || {
        service.states().counts()[0] == count as usize
    })
    .unwrap();
    let changes = service.states().changes();

    // Ten renewals, then the three steps of a rotation. The client renews last and therefore
    // reconnects to every machine.
    let both = old.chain_pem() + &new.chain_pem();
    let renewal = (Some(&old), old.chain_pem());
    let mut rounds = vec![renewal; 10];
    rounds.extend([
        (None, both.clone()),
        (Some(&new), both),
        (None, new.chain_pem()),
    ]);
    for (round, (issuer, bundle)) in rounds.into_iter().enumerate() {
        let generation = service.tls().current().generation;
        for ip in all().chain([client]) {
            machines.write(ip, issuer, &bundle);
        }
        wait_until("the client's new pair", LIMIT, || {
            service.tls().current().generation > generation && service.tls().last_error().is_none()
        })
        .unwrap();
        let before = servers.answered.lock().clone();
        wait_until("a check of every machine", LIMIT, || {
            let now = servers.answered.lock();
            all().all(|ip| {
                now.get(&ip).copied().unwrap_or(0) >= before.get(&ip).copied().unwrap_or(0) + 2
            })
        })
        .unwrap();
        let handshakes = servers.handshakes.load(Ordering::Relaxed);
        println!(
            "round {round}: {:?}, {} changes",
            servers.failed.lock().first(),
            service.states().changes() - changes
        );
        assert!(
            handshakes >= (round + 2) * count as usize,
            "{handshakes} handshakes after round {round}"
        );
    }
    println!("{} handshakes", servers.handshakes.load(Ordering::Relaxed));
    assert_eq!(*servers.failed.lock(), Vec::<String>::new());
    assert_eq!(service.states().changes(), changes, "no check was lost");
    assert_eq!(service.states().counts(), [count as usize, 0, 0, 0]);
    assert_eq!(service.tls().current().authorities.len(), 1);
}
