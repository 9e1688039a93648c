//! HTTPS handlers against a real TLS server.

use std::{
    fs,
    net::{Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use anyhow::{Context, Result, ensure};
use hickory_proto::{
    op::ResponseCode,
    rr::{RData, RecordType},
};
use http_body_util::Full;
use hyper::{Request, Response, body::Bytes, server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use rcgen::SanType;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::{
    net::{TcpListener, TcpStream},
    runtime::Runtime,
};
use tokio_rustls::TlsAcceptor;
use whole_system_tests::{client, namespace::Namespace, pki::Authority, requires};

use super::{
    lab::{Lab, ensure_code},
    scripted::Scripted,
};

/// Listen address of the HTTPS server.
const HTTPS: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::new(127, 0, 0, 20)), 8443);

/// Serves JSON over TLS until dropped.
struct JsonServer {
    seen: Arc<Seen>,
    _runtime: Runtime,
}

/// Requests seen by a server.
#[derive(Default)]
struct Seen {
    /// Connections with a successful handshake.
    connections: AtomicUsize,
    /// Query strings of the requested URLs.
    requests: Mutex<Vec<String>>,
}

impl JsonServer {
    /// Starts the server in `namespace`, with the key and certificate in `folder`.
    fn start(namespace: &Namespace, folder: &Path) -> Result<Self> {
        let chain = vec![CertificateDer::from_pem_file(folder.join("server.crt"))?];
        let key = PrivateKeyDer::from_pem_file(folder.join("server.key"))?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = rustls::ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .with_no_client_auth()
            .with_single_cert(chain, key)?;
        let acceptor = TlsAcceptor::from(Arc::new(config));
        let seen = Arc::new(Seen::default());
        let listener = namespace.run(|| std::net::TcpListener::bind(HTTPS))??;
        listener.set_nonblocking(true)?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()?;
        let shared = Arc::clone(&seen);
        runtime.spawn(async move {
            let listener = TcpListener::from_std(listener)?;
            loop {
                let (stream, _) = listener.accept().await?;
                tokio::spawn(serve(stream, acceptor.clone(), Arc::clone(&shared)));
            }
            #[expect(unreachable_code, reason = "gives the block its type")]
            std::io::Result::Ok(())
        });
        Ok(Self {
            seen,
            _runtime: runtime,
        })
    }

    /// Returns the query strings of all URLs so far.
    fn requests(&self) -> Vec<String> {
        self.seen.requests.lock().clone()
    }

    /// Returns the number of connections so far.
    fn connections(&self) -> usize {
        self.seen.connections.load(Ordering::Relaxed)
    }
}

async fn serve(stream: TcpStream, acceptor: TlsAcceptor, seen: Arc<Seen>) -> Option<()> {
    let stream = acceptor.accept(stream).await.ok()?;
    seen.connections.fetch_add(1, Ordering::Relaxed);
    let service = service_fn(|request: Request<hyper::body::Incoming>| {
        let query = request.uri().query().unwrap_or_default().to_owned();
        seen.requests.lock().push(query.clone());
        let response = Response::new(Full::new(Bytes::from(document(&query).to_string())));
        async move { Ok::<_, std::convert::Infallible>(response) }
    });
    http1::Builder::new()
        .serve_connection(TokioIo::new(stream), service)
        .await
        .ok()
}

/// Returns the answer to `type=N&name=X`.
fn document(query: &str) -> Value {
    let name = query.rsplit_once("name=").map_or("", |(_, name)| name);
    let answer = |record_type: u16, data: &str| json!({"name": name, "type": record_type, "TTL": 60, "data": data});
    let answers = match query.split(['=', '&']).nth(1) {
        _ if name.starts_with("nowhere.") => return json!({"Status": 3}),
        Some("1") if name.starts_with("alias.") => {
            vec![answer(5, "www.json.test."), answer(1, "192.0.2.1")]
        }
        Some("1") => vec![answer(1, "192.0.2.1"), answer(1, "192.0.2.2")],
        Some("28") => vec![answer(28, "2001:db8::1")],
        Some("16") => vec![answer(16, "\"one\" \"and two\"")],
        Some("33") => vec![answer(33, "1 2 5060 www.json.test.")],
        Some("15") => vec![answer(15, "10 mail.json.test.")],
        _ => vec![],
    };
    json!({"Status": 0, "TC": false, "Answer": answers})
}

/// Writes a CA and a certificate of it for [`HTTPS`]; returns the path of the CA file.
fn write_certificates(folder: &Path) -> Result<PathBuf> {
    let authority = Authority::new("ca")?;
    authority.write(folder)?;
    let identity = authority.issue_with("https", |params| {
        params.subject_alt_names = vec![SanType::IpAddress(HTTPS.ip())];
    })?;
    identity.write(folder, "server")?;
    Ok(folder.join("ca.crt"))
}

/// Starts a server with a handler for `json.test` that trusts the CAs in `ca`.
fn start<'a>(namespace: &'a Namespace, ca: &Path) -> Result<Lab<'a>> {
    let settings = json!({"handlers": [{
        "domain": "json.test",
        "source": {"type": "http", "url": format!("https://{HTTPS}/dns")},
        "cache": {"enabled": false},
    }]});
    Lab::start_prepared(namespace, &[], &settings, |command| {
        command.env("SSL_CERT_FILE", ca).env_remove("SSL_CERT_DIR");
    })
}

#[test]
fn https_handlers_return_every_type() -> Result<()> {
    requires!(namespaces);
    let namespace = Namespace::new("https")?;
    let folder = TempDir::with_prefix("bdx-https-")?;
    let ca = write_certificates(folder.path())?;
    let server = JsonServer::start(&namespace, folder.path())?;
    let lab = start(&namespace, &ca)?;
    let shown = |name: &str, record_type| -> Result<Vec<String>> {
        let query = client::query(name, record_type, Some(1232))?;
        let reply = lab.ask(&query)?;
        ensure!(
            reply.metadata.response_code == ResponseCode::NoError,
            "{reply}\n{}",
            lab.server.log()
        );
        ensure!(
            reply.queries == query.queries && reply.edns.is_some(),
            "{reply}"
        );
        let text = |data: &RData| match data {
            RData::CNAME(name) => format!("CNAME {}", name.0),
            other => other.to_string(),
        };
        Ok(reply
            .answers
            .iter()
            .map(|record| text(&record.data))
            .collect())
    };
    ensure!(shown("www.json.test.", RecordType::A)? == ["192.0.2.1", "192.0.2.2"]);
    ensure!(shown("www.json.test.", RecordType::AAAA)? == ["2001:db8::1"]);
    ensure!(shown("alias.json.test.", RecordType::A)? == ["CNAME www.json.test.", "192.0.2.1"]);
    ensure!(shown("_sip._tcp.json.test.", RecordType::SRV)? == ["1 2 5060 www.json.test."]);
    ensure!(shown("json.test.", RecordType::MX)? == ["10 mail.json.test."]);
    ensure!(shown("www.json.test.", RecordType::CAA)?.is_empty());
    let text = lab.ask_for("www.json.test.", RecordType::TXT)?;
    let Some(RData::TXT(text)) = text.answers.first().map(|record| &record.data) else {
        anyhow::bail!("no text: {text}")
    };
    ensure!(
        text.txt_data
            .iter()
            .map(|part| &part[..])
            .eq([&b"one"[..], b"and two"]),
        "{text:?}"
    );
    let nowhere = lab.ask_for("nowhere.json.test.", RecordType::A)?;
    ensure_code(&nowhere, ResponseCode::NXDomain)?;

    let requests = server.requests();
    ensure!(
        requests.first().context("no request")? == "type=1&name=www.json.test.",
        "{requests:?}"
    );
    ensure!(requests.len() == 8, "{requests:?}");
    ensure!(
        server.connections() == 1,
        "{} connections for {requests:?}",
        server.connections()
    );
    Ok(())
}

#[test]
fn untrusted_https_servers_are_rejected() -> Result<()> {
    requires!(namespaces);
    let namespace = Namespace::new("untrusted")?;
    let (folder, other) = (
        TempDir::with_prefix("bdx-https-")?,
        TempDir::with_prefix("bdx-https-")?,
    );
    write_certificates(folder.path())?;
    let server = JsonServer::start(&namespace, folder.path())?;
    let lab = start(&namespace, &write_certificates(other.path())?)?;
    let reply = lab.ask_for("www.json.test.", RecordType::A)?;
    ensure_code(&reply, ResponseCode::ServFail)?;
    ensure!(server.requests().is_empty(), "{:?}", server.requests());
    // The log says why.
    lab.server
        .wait_for_log("client error (Connect): invalid peer certificate: ")
}

#[test]
fn handlers_choose_trusted_servers() -> Result<()> {
    requires!(namespaces);
    let namespace = Namespace::new("trusted")?;
    let (folder, other) = (
        TempDir::with_prefix("bdx-https-")?,
        TempDir::with_prefix("bdx-https-")?,
    );
    let ca = write_certificates(folder.path())?;
    let _server = JsonServer::start(&namespace, folder.path())?;
    let unrelated = write_certificates(other.path())?;
    let handler = |domain: &str, trust: &Value| {
        let mut source = json!({"type": "http", "url": format!("https://{HTTPS}/dns")});
        whole_system_tests::server::merge(&mut source, trust);
        json!({"domain": domain, "source": source})
    };
    let changing = folder.path().join("changing.crt");
    fs::copy(&unrelated, &changing)?;
    let settings = json!({"handlers": [
        handler("private.test", &json!({"ca_file": ca})),
        handler("anyone.test", &json!({"insecure_skip_verify": true})),
        handler("other.test", &json!({"ca_file": unrelated})),
        handler("system.test", &json!({})),
        handler("changing.test", &json!({"ca_file": changing})),
    ]});
    let lab = Lab::start(&namespace, &[], &settings)?;
    for (domain, expected) in [
        ("private", ResponseCode::NoError),
        ("anyone", ResponseCode::NoError),
        ("other", ResponseCode::ServFail),
        ("system", ResponseCode::ServFail),
        ("changing", ResponseCode::ServFail),
    ] {
        let reply = lab.ask_for(&format!("www.{domain}.test."), RecordType::A)?;
        ensure!(
            reply.metadata.response_code == expected,
            "{domain}: {reply}\n{}",
            lab.server.log()
        );
    }
    // A changed file takes effect without a reload.
    fs::copy(&ca, &changing)?;
    let reply = lab.ask_for("other-name.changing.test.", RecordType::A)?;
    ensure!(
        reply.metadata.response_code == ResponseCode::NoError,
        "{reply}\n{}",
        lab.server.log()
    );
    Ok(())
}

#[test]
fn handlers_follow_a_reloaded_configuration() -> Result<()> {
    requires!(namespaces);
    let namespace = Namespace::new("reloaded")?;
    const NAME: &str = "many-letters-in-one-name.test.";
    let sockets = TempDir::new()?;
    let address = super::lab::loopback(10);
    let recursor = Scripted::answering(&namespace, address, [192, 0, 2, 10].into())?;
    let settings = json!({
        "disable_recursors": true,
        "control": {"socket": sockets.path().join("control.sock")},
        "recursor_0x20": false,
        "handlers": [{"domain": "test", "source": {"type": "dns", "recursors": [address]}}],
    });
    let lab = Lab::start(&namespace, &[], &settings)?;
    lab.ask_for(NAME, RecordType::A)?;
    let asked = recursor.asked();
    ensure!(asked.iter().all(|asked| asked.name() == NAME), "{asked:?}");

    lab.server
        .change_settings(|settings| settings["recursor_0x20"] = json!(true))?;
    let (code, _, errors) = lab.cli(&["reload"])?;
    ensure!(code == 0, "{errors}");
    lab.ask_for(NAME, RecordType::A)?;
    let asked = recursor.asked();
    // All letters are small by chance once in a million times.
    let last = asked.last().context("a query")?;
    ensure!(last.name() != NAME, "{asked:?}\n{}", lab.server.log());
    Ok(())
}

#[test]
fn longest_handler_domain_wins() -> Result<()> {
    requires!(namespaces);
    let namespace = Namespace::new("longest")?;
    let wide = Scripted::answering(&namespace, super::lab::loopback(10), [192, 0, 2, 10].into())?;
    let narrow = Scripted::answering(&namespace, super::lab::loopback(11), [192, 0, 2, 11].into())?;
    let dns = |domain: &str, last: u8, cache: bool| {
        json!({
            "domain": domain,
            "source": {"type": "dns", "recursors": [super::lab::loopback(last)]},
            "cache": {"enabled": cache},
        })
    };
    let deny = |domain: &str, source: Value| json!({"domain": domain, "source": source});
    let settings = json!({"disable_recursors": true, "handlers": [
        dns("test", 10, true),
        dns("narrow.test", 11, false),
        deny("denied.test", json!({"type": "deny"})),
        deny("refused.test", json!({"type": "deny", "response": "REFUSED"})),
    ]});
    let lab = Lab::start(&namespace, &[], &settings)?;
    for _ in 0..2 {
        for (name, last) in [
            ("www.test.", 10),
            ("deep.in.NARROW.test.", 11),
            ("denarrow.test.", 10),
        ] {
            let reply = lab.ask_for(name, RecordType::A)?;
            ensure!(
                client::addresses(&reply) == [Ipv4Addr::new(192, 0, 2, last)],
                "{reply}"
            );
        }
    }
    // Each handler has a separate cache.
    ensure!(
        (wide.count(), narrow.count()) == (2, 2),
        "{} and {} queries",
        wide.count(),
        narrow.count()
    );
    for (name, rcode) in [
        ("x.denied.test.", ResponseCode::NXDomain),
        ("x.refused.test.", ResponseCode::Refused),
    ] {
        let reply = lab.ask_for(name, RecordType::A)?;
        ensure!(
            reply.metadata.response_code == rcode && reply.answers.is_empty(),
            "{reply}"
        );
    }
    Ok(())
}
