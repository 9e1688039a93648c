use std::{path::Path, sync::OnceLock, time::Duration};

use http_body_util::{BodyExt, Full};
use hyper_util::rt::TokioIo;
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa,
    KeyPair,
};
use rustls_pki_types::ServerName;
use serde_json::Value;
use tokio::{
    net::TcpStream,
    sync::{mpsc, oneshot},
};

use super::*;
use crate::{
    ops::{
        metrics::Metrics,
        readiness::Readiness,
        service_status::{Reloaded, ServiceStatus},
        status::{OverloadSource, ServerStatus},
        tap::Tap,
    },
    state::ServerState,
};
use dns_core::{
    catalog::{AliasFiles, Records, Snapshot},
    config::{Config, TlsFiles},
    resolve::{AddressQuery, AllRunning, FleetAddresses, MAX_ADDRESS_QUERIES, NoAddresses},
};
use dns_fastpath::FastPathHandle;
use dns_kit::logs::{LogFormat, Logs, Request};
use dns_upstream::{
    CurrentUpstreams, Handlers, NoInterfaces, OwnAddresses, Upstream, admission::Admission,
};

/// A process has one log.
static LOGS: OnceLock<Logs> = OnceLock::new();

/// Builds a backend with one instance and without health checks, whose reloads fail.
fn backend(tap: Tap) -> Arc<Backend> {
    let records = br#"{"record_keys": ["id", "instance_group", "network", "deployment", "ip", "domain", "instance_index"],
        "record_infos": [["i", "g", "n", "d", "10.0.0.1", "bosh", 0]], "version": 7}"#;
    let (snapshot, _) = Snapshot::build(Records::parse(records).unwrap().0, &AliasFiles::default());
    let fast_path = FastPathHandle::default();
    let config = br#"{"port": 53, "recursors": ["127.0.0.1:1"], "cache": {"enabled": true}}"#;
    let config = Config::parse("config.json", config).unwrap().config;
    let (reloads, mut orders) = mpsc::channel::<oneshot::Sender<Reloaded>>(1);
    tokio::spawn(async move {
        while let Some(done) = orders.recv().await {
            let _ = done.send(Reloaded {
                done: vec![],
                failed: vec!["records".into()],
            });
        }
    });
    let upstreams = CurrentUpstreams::new(
        Upstream::new(&config, &OwnAddresses::default(), &NoInterfaces::shared()),
        Handlers::default(),
    );
    let overload = OverloadSource {
        waiting: Admission::new(1),
        upstreams: upstreams.clone(),
        fast_path: fast_path.clone(),
    };
    Arc::new(Backend {
        readiness: Readiness {
            service_status: ServiceStatus::default(),
            fast_path: fast_path.clone(),
            health: None,
            consul: None,
            upstreams,
            certificates: Vec::new(),
            events: Arc::default(),
        },
        logs: LOGS
            .get_or_init(|| Logs::init(&config.logging, LogFormat::default()).unwrap())
            .clone(),
        metrics: Metrics::new("dns://test".into(), fast_path.clone()).unwrap(),
        server_state: Arc::new(ServerState::new(
            snapshot,
            Arc::new(AllRunning),
            fast_path,
            None,
            None,
        )),
        jobs: None,
        reloads,
        overload,
        tap,
    })
}

/// Writes a CA (`ca.crt`) and server and client certificates issued by it, both for api.bosh-dns.
fn write_certificates(folder: &Path) {
    let mut authority = CertificateParams::default();
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = CertifiedIssuer::self_signed(authority, KeyPair::generate().unwrap()).unwrap();
    std::fs::write(folder.join("ca.crt"), authority.pem()).unwrap();
    for (name, purpose) in [
        ("server", ExtendedKeyUsagePurpose::ServerAuth),
        ("client", ExtendedKeyUsagePurpose::ClientAuth),
    ] {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(["api.bosh-dns".to_owned()]).unwrap();
        params
            .distinguished_name
            .push(DnType::CommonName, "api.bosh-dns");
        params.extended_key_usages = vec![purpose];
        let certificate = params.signed_by(&key, &authority).unwrap();
        std::fs::write(folder.join(format!("{name}.crt")), certificate.pem()).unwrap();
        std::fs::write(folder.join(format!("{name}.key")), key.serialize_pem()).unwrap();
    }
}

/// Returns the certificate files of one side.
fn files(folder: &Path, name: &str) -> TlsFiles {
    TlsFiles {
        certificate: folder.join(format!("{name}.crt")),
        private_key: folder.join(format!("{name}.key")),
        ca: folder.join("ca.crt"),
    }
}

/// A running API with its certificates and tap.
struct Running {
    folder: tempfile::TempDir,
    address: SocketAddr,
    tap: Tap,
}

impl Running {
    /// Starts the API; it ends with the test's runtime.
    async fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        write_certificates(folder.path());
        let tls =
            RotatingTls::load("api", "api.bosh-dns", &files(folder.path(), "server")).unwrap();
        let tap = Tap::default();
        let backend = backend(tap.clone());
        let address = test_support::free_address();
        let server = ApiServer::bind(address, tls, backend, None).await.unwrap();
        tokio::spawn(server.run());
        Self {
            folder,
            address,
            tap,
        }
    }

    /// Sends a request with the client certificate; the body of the response is left unread.
    async fn send(
        &self,
        method: &str,
        path: &str,
        body: &str,
    ) -> hyper::Response<hyper::body::Incoming> {
        let tls =
            RotatingTls::load("cli", "api.bosh-dns", &files(self.folder.path(), "client")).unwrap();
        let stream = TcpStream::connect(self.address).await.unwrap();
        let name = ServerName::try_from("api.bosh-dns").unwrap();
        let stream = tokio_rustls::TlsConnector::from(tls.client_config())
            .connect(name, stream)
            .await
            .unwrap();
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
            .await
            .unwrap();
        tokio::spawn(connection);
        let request = hyper::Request::builder()
            .method(method)
            .uri(path)
            .header("host", "api.bosh-dns")
            .header("content-type", "application/json")
            .body(Full::new(bytes::Bytes::from(body.to_owned())))
            .unwrap();
        let response = sender.send_request(request).await.unwrap();
        // The connection is open as long as its sender.
        tokio::spawn(async move {
            tokio::time::sleep(Duration::from_secs(30)).await;
            drop(sender);
        });
        response
    }

    /// Sends a request and returns status and body.
    async fn ask(&self, method: &str, path: &str, body: &str) -> (u16, String) {
        let response = self.send(method, path, body).await;
        let status = response.status().as_u16();
        let body = response.into_body().collect().await.unwrap().to_bytes();
        (status, String::from_utf8(body.to_vec()).unwrap())
    }
}

#[tokio::test]
async fn instances_match_bosh_dns() {
    let api = Running::start().await;
    let line = r#"{"id":"i","group":"g","network":"n","deployment":"d","ip":"10.0.0.1","domain":"bosh.","az":"","index":"0","health_state":"running"}"#;
    for (method, path) in [
        ("GET", "/instances"),
        ("POST", "/instances?address=i.g.n.d.bosh"),
        ("GET", "/instances?address="),
        ("GET", "/instances?foo=bar"),
        ("GET", "/instances?address=i.g.n.d.bosh&address=bad.bosh"),
    ] {
        assert_eq!(
            api.ask(method, path, "").await,
            (200, format!("{line}\n")),
            "{path}"
        );
    }
    assert_eq!(
        api.ask("GET", "/instances?address=bad.bosh", "").await.0,
        422
    );
    assert_eq!(api.ask("GET", "/instances/", "").await.0, 404);
    assert_eq!(api.ask("GET", "/nothing", "").await.0, 404);
}

#[tokio::test]
async fn addresses_come_by_name() {
    let api = Running::start().await;
    let query = |name: &str| AddressQuery {
        name: name.to_owned(),
        withdrawn: ["10.0.0.1".parse().unwrap()].into(),
    };
    let queries = ["i.g.n.d.bosh", "q-s0.q-g1.bosh", "example.org"].map(query);
    let (status, text) = api
        .ask(
            "POST",
            "/addresses",
            &serde_json::to_string(&queries).unwrap(),
        )
        .await;
    assert_eq!(status, 200, "{text}");
    let found: Vec<Result<FleetAddresses, NoAddresses>> = serde_json::from_str(&text).unwrap();
    let one = FleetAddresses {
        addresses: ["10.0.0.1".parse().unwrap()].into(),
        ..FleetAddresses::default()
    };
    assert_eq!(
        found,
        [
            Ok(one),
            Err(NoAddresses::NoInstance),
            Err(NoAddresses::Foreign)
        ]
    );
    let (status, text) = api
        .ask(
            "POST",
            "/addresses",
            r#"[{"name": "a..b", "withdrawn": []}]"#,
        )
        .await;
    assert_eq!(
        (status, text.contains("is not a domain name")),
        (422, true),
        "{text}"
    );
    assert_eq!(api.ask("GET", "/addresses", "").await.0, 405);
    assert_eq!(api.ask("POST", "/addresses", "[]").await.1, "[]");
    let many = vec![query("i.g.n.d.bosh"); MAX_ADDRESS_QUERIES];
    let (status, text) = api
        .ask("POST", "/addresses", &serde_json::to_string(&many).unwrap())
        .await;
    assert_eq!(
        (status, text.matches("10.0.0.1").count()),
        (200, MAX_ADDRESS_QUERIES)
    );
    let one_more = vec![query("i.g.n.d.bosh"); MAX_ADDRESS_QUERIES + 1];
    let (status, text) = api
        .ask(
            "POST",
            "/addresses",
            &serde_json::to_string(&one_more).unwrap(),
        )
        .await;
    assert_eq!(
        (status, text.contains("more than 1000 names")),
        (422, true),
        "{text}"
    );
}

#[tokio::test]
async fn mutations_require_post() {
    let api = Running::start().await;
    assert_eq!(api.ask("GET", "/reload", "").await.0, 405);
    assert_eq!(
        api.ask("POST", "/reload", "").await,
        (409, r#"{"done":[],"failed":["records"]}"#.into())
    );
    assert_eq!(
        api.ask("POST", "/flush", "").await,
        (200, r#"{"flushed":0}"#.into())
    );
    for (body, status) in [
        (r#"{"all": true}"#, 200),
        (r#"{"zone": "example.", "type": "A"}"#, 200),
        ("{}", 400),
        (r#"{"all": true, "zone": "example."}"#, 400),
        // A misspelt criterion must not select more.
        (r#"{"zone": "example.", "typ": "A"}"#, 422),
    ] {
        let answered = api.ask("POST", "/cache/flush", body).await;
        assert_eq!(answered.0, status, "{body}: {}", answered.1);
    }
    assert_eq!(api.ask("GET", "/cache?nmae=a.example", "").await.0, 400);
    assert_eq!(api.ask("POST", "/log", "{}").await.0, 200);
    let (status, text) = api.ask("GET", "/status", "").await;
    assert_eq!(status, 200);
    assert_eq!(
        serde_json::from_str::<ServerStatus>(&text)
            .unwrap()
            .records
            .version,
        Some(7)
    );
}

#[tokio::test(start_paused = true)]
async fn stalled_main_loop_ends_reload_requests() {
    let mut backend = Arc::into_inner(backend(Tap::default())).unwrap();
    // Nothing takes the orders.
    let (reloads, _orders) = mpsc::channel(1);
    backend.reloads = reloads;
    for _ in 0..3 {
        let answer = tokio::time::timeout(Duration::from_secs(600), backend.reload()).await;
        let problem = answer.unwrap().unwrap_err().to_string();
        assert!(problem.contains("takes longer than 25s"), "{problem}");
    }
}

#[tokio::test]
async fn tap_filters_queries() {
    let api = Running::start().await;
    let names = ["a.bosh", "b.bosh"].map(|text| dns_core::name::Name::from_text(text).unwrap());
    let response = api.send("GET", "/tap?name=B.", "").await;
    let mut body = response.into_body();
    let tap = api.tap.clone();
    let feeding = tokio::spawn(async move {
        loop {
            for name in &names {
                tap.observe(&Request {
                    name,
                    query_type: 1,
                    rcode: 0,
                    answers: 1,
                    bytes: 50,
                    client: "10.1.1.1:1000".parse().unwrap(),
                    transport: "udp",
                    answered_by: "local",
                    took: Duration::from_micros(1),
                });
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    });
    let frame = body.frame().await.unwrap().unwrap().into_data().unwrap();
    let line: Value = serde_json::from_slice(&frame).unwrap();
    assert_eq!(line["name"], "b.bosh.");
    assert_eq!(line["path"], "userspace");
    feeding.abort();
}

#[tokio::test]
async fn client_certificate_is_required() {
    let api = Running::start().await;
    let authority = std::fs::read(api.folder.path().join("ca.crt")).unwrap();
    let mut roots = rustls::RootCertStore::empty();
    use rustls_pki_types::pem::PemObject;
    roots
        .add(rustls_pki_types::CertificateDer::from_pem_slice(&authority).unwrap())
        .unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let stream = TcpStream::connect(api.address).await.unwrap();
    let name = ServerName::try_from("api.bosh-dns").unwrap();
    // In TLS 1.3 the client's handshake completes before the server rejects the certificate.
    if let Ok(mut stream) = tokio_rustls::TlsConnector::from(Arc::new(config))
        .connect(name, stream)
        .await
    {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        let _ = stream
            .write_all(b"GET /instances HTTP/1.1\r\nhost: x\r\n\r\n")
            .await;
        let mut answer = Vec::new();
        let error = stream.read_to_end(&mut answer).await;
        assert!(answer.is_empty() && error.is_err(), "{answer:?} {error:?}");
    }
}
