use std::{fs, path::Path};

use hyper::Method;
use serde_json::{Value, json};

use super::*;
use crate::provider::{GENERAL, Parameter, ParameterKind, ProviderKind};
use crate::{control, documents::Folder, status::Metrics, store::Store};

/// A publisher's API on a control socket.
struct Lab {
    folder: tempfile::TempDir,
    api_state: Arc<ApiState>,
}

impl Lab {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::open(&folder.path().join("store")).unwrap();
        let api_state = Arc::new(ApiState::new(store, Metrics::new().unwrap()));
        let socket = bind_control(&folder.path().join("control.sock"), None).unwrap();
        tokio::spawn(serve_control(socket, routes(api_state.clone())));
        Self { folder, api_state }
    }

    async fn call(&self, method: Method, path: &str, body: Value) -> (u16, Value) {
        let body = if body.is_null() {
            Bytes::new()
        } else {
            body.to_string().into()
        };
        let socket = self.folder.path().join("control.sock");
        let (status, body) = control::call(control::TIMEOUT, &socket, method, path, body)
            .await
            .unwrap();
        (
            status.as_u16(),
            serde_json::from_slice(&body).unwrap_or(Value::Null),
        )
    }

    async fn get(&self, path: &str) -> (u16, Value) {
        self.call(Method::GET, path, Value::Null).await
    }
}

fn record(name: &str, prefix: &str) -> Value {
    json!({
        "metadata": {"name": name, "userData1": "one"},
        "spec": {"provider": "coredns", "external-dns-parameters": {"coredns-prefix": prefix}},
    })
}

#[tokio::test]
async fn records_are_created_replaced_deleted() {
    let lab = Lab::new();
    let all = "/v2/projects/shop/dns-update-records";
    assert_eq!(lab.get(all).await, (200, json!([])));
    let (code, created) = lab.call(Method::POST, all, record("etcd", "skydns")).await;
    assert_eq!(code, 201);
    assert_eq!(
        created["metadata"],
        json!({"name": "etcd", "userdata1": "one"})
    );
    assert_eq!(created["spec"], record("etcd", "skydns")["spec"]);
    let (code, refusal) = lab.call(Method::POST, all, record("etcd", "skydns")).await;
    assert_eq!(code, 409);
    assert!(
        refusal["problems"][0]["remedy"]
            .as_str()
            .unwrap()
            .contains("PUT"),
        "{refusal}"
    );
    let one = format!("{all}/etcd");
    let (code, _) = lab.call(Method::PUT, &one, record("etcd", "other")).await;
    assert_eq!(code, 200);
    let (code, _) = lab
        .call(Method::PUT, &format!("{all}/second"), record("second", "p"))
        .await;
    assert_eq!(code, 201);
    let (code, refusal) = lab.call(Method::PUT, &one, record("renamed", "p")).await;
    assert_eq!(
        (code, &refusal["problems"][0]["path"]),
        (400, &json!("metadata.name"))
    );
    let (code, read) = lab.get(&one).await;
    assert_eq!(
        (
            code,
            &read["spec"]["external-dns-parameters"]["coredns-prefix"]
        ),
        (200, &json!("other"))
    );
    // Both spellings of the path work, with and without a final slash; other projects do not see
    // the resource.
    for path in [
        "/v2/project/shop/dns-update-records/",
        "/v2/project/shop/dns-update-records",
        all,
    ] {
        let (code, list) = lab.get(path).await;
        assert_eq!((code, list.as_array().unwrap().len()), (200, 2), "{path}");
    }
    assert_eq!(
        lab.get("/v2/projects/other/dns-update-records").await.1,
        json!([])
    );
    assert_eq!(
        lab.get("/v2/projects/other/dns-update-records/etcd")
            .await
            .0,
        404
    );
    assert_eq!(lab.call(Method::DELETE, &one, Value::Null).await.0, 204);
    assert_eq!(lab.call(Method::DELETE, &one, Value::Null).await.0, 404);
    assert_eq!(lab.call(Method::PATCH, &one, Value::Null).await.0, 405);
}

impl Lab {
    /// Sends a request with headers as written; returns the head of the response and its body.
    async fn raw(&self, request: &str) -> (String, Value) {
        use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
        let mut stream = tokio::net::UnixStream::connect(self.folder.path().join("control.sock"))
            .await
            .unwrap();
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut response = String::new();
        stream.read_to_string(&mut response).await.unwrap();
        let (head, body) = response.split_once("\r\n\r\n").unwrap();
        (
            head.to_lowercase(),
            serde_json::from_str(body).unwrap_or(Value::Null),
        )
    }

    async fn send(&self, method: &str, path: &str, headers: &str, body: &Value) -> (String, Value) {
        let body = if body.is_null() {
            String::new()
        } else {
            body.to_string()
        };
        let request = format!(
            "{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{headers}content-length: {}\r\n\r\n{body}",
            body.len()
        );
        self.raw(&request).await
    }
}

fn header(head: &str, name: &str) -> String {
    let line = head
        .lines()
        .find_map(|line| line.strip_prefix(&format!("{name}: ")));
    line.unwrap_or_else(|| panic!("{name} is missing: {head}"))
        .to_owned()
}

#[tokio::test]
async fn preconditions_protect_writes() {
    let lab = Lab::new();
    let all = "/v2/projects/shop/dns-update-records";
    let one = format!("{all}/etcd");
    let (head, _) = lab.send("POST", all, "", &record("etcd", "skydns")).await;
    assert!(head.starts_with("http/1.1 201"), "{head}");
    assert_eq!(header(&head, "location"), one);
    let first = header(&head, "etag");
    let get = lab.send("GET", &one, "", &Value::Null).await.0;
    assert_eq!(header(&get, "etag"), first);
    let known = lab
        .send(
            "GET",
            &one,
            &format!("if-none-match: {first}\r\n"),
            &Value::Null,
        )
        .await
        .0;
    assert!(known.starts_with("http/1.1 304"), "{known}");
    let current = format!("if-match: {first}\r\n");
    let (head, _) = lab
        .send("PUT", &one, &current, &record("etcd", "second"))
        .await;
    assert!(
        head.starts_with("http/1.1 200") && header(&head, "etag") != first,
        "{head}"
    );
    for (method, headers) in [
        ("PUT", &*current),
        ("DELETE", &*current),
        ("PUT", "if-none-match: *\r\n"),
    ] {
        let (head, body) = lab
            .send(method, &one, headers, &record("etcd", "third"))
            .await;
        assert!(
            head.starts_with("http/1.1 412"),
            "{method} {headers}: {head}"
        );
        assert!(body["problems"][0]["remedy"] != "", "{body}");
    }
    let absent = format!("{all}/absent");
    assert!(
        lab.send("PUT", &absent, "if-match: *\r\n", &record("absent", "p"))
            .await
            .0
            .contains(" 412 ")
    );
    assert!(
        lab.send(
            "PUT",
            &absent,
            "if-none-match: *\r\n",
            &record("absent", "p")
        )
        .await
        .0
        .contains(" 201 ")
    );
    assert_eq!(
        lab.get(&one).await.1["spec"]["external-dns-parameters"]["coredns-prefix"],
        "second"
    );
}

#[tokio::test]
async fn lists_have_pages() {
    let lab = Lab::new();
    let all = "/v2/projects/shop/dns-update-records";
    for name in ["a", "b", "c", "d", "e"] {
        lab.call(Method::POST, all, record(name, "p")).await;
    }
    let mut path = format!("{all}?limit=2");
    let mut pages = Vec::new();
    loop {
        let (head, body) = lab.send("GET", &path, "", &Value::Null).await;
        pages.push(
            body.as_array()
                .unwrap()
                .iter()
                .map(|item| item["metadata"]["name"].clone())
                .collect::<Vec<_>>(),
        );
        let Some(link) = head.lines().find_map(|line| line.strip_prefix("link: <")) else {
            break;
        };
        link.split('>').next().unwrap().clone_into(&mut path);
    }
    assert_eq!(json!(pages), json!([["a", "b"], ["c", "d"], ["e"]]));
    assert_eq!(lab.get(&format!("{all}?limit=x")).await.0, 400);
}

#[tokio::test]
async fn every_refusal_lists_problems() {
    let lab = Lab::new();
    let all = "/v2/projects/shop/dns-update-records";
    let long = json!({"text": "x".repeat(1 << 20)});
    for (method, path, body, code) in [
        ("GET", "/v2/nothing", Value::Null, 404),
        (
            "GET",
            "/v2/projects/shop/dns-update-records/none",
            Value::Null,
            404,
        ),
        ("PATCH", all, Value::Null, 405),
        ("POST", all, long, 413),
    ] {
        let (head, body) = lab.send(method, path, "", &body).await;
        assert!(
            head.starts_with(&format!("http/1.1 {code}")),
            "{method} {path}: {head}"
        );
        assert!(
            body["problems"][0]["reason"].is_string(),
            "{method} {path}: {body}"
        );
        if code == 405 {
            assert_eq!(header(&head, "allow"), "get,head,post");
        }
    }
    let mut text = record("etcd", "p");
    text["spec"]["external-dns-parameters"]["txt-prefix"] = "x".repeat(900_000).into();
    let (code, body) = lab.call(Method::POST, all, text).await;
    assert_eq!(
        (code, &body["problems"][0]["path"]),
        (400, &json!("spec.external-dns-parameters.txt-prefix"))
    );
}

#[tokio::test]
async fn half_sent_bodies_block_nobody() {
    use tokio::io::AsyncWriteExt as _;
    let lab = Lab::new();
    let socket = lab.folder.path().join("control.sock");
    let mut stuck = Vec::new();
    for _ in 0..70 {
        let mut stream = tokio::net::UnixStream::connect(&socket).await.unwrap();
        let head = "POST /v2/projects/shop/dns-update-records HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{";
        stream.write_all(head.as_bytes()).await.unwrap();
        stuck.push(stream);
    }
    assert_eq!(
        lab.get("/v2/projects/shop/dns-update-records").await,
        (200, json!([]))
    );
}

#[tokio::test]
async fn bad_bodies_name_every_problem() {
    let lab = Lab::new();
    let all = "/v2/projects/shop/dns-update-records";
    let body = json!({
        "metadata": {"name": "a b"},
        "spec": {"provider": "coredns", "external-dns-parameters": {"coredns-prefx": "x", "once": 1}},
        "extra": 1,
    });
    let (code, refusal) = lab.call(Method::POST, all, body).await;
    let paths: Vec<_> = refusal["problems"]
        .as_array()
        .unwrap()
        .iter()
        .map(|problem| &problem["path"])
        .collect();
    assert_eq!(code, 400);
    assert_eq!(
        paths,
        [
            "metadata.name",
            "spec.external-dns-parameters.coredns-prefx",
            "spec.external-dns-parameters.once",
            "extra",
        ]
    );
    for problem in refusal["problems"].as_array().unwrap() {
        assert!(
            problem["line"] == 1 && problem["remedy"] != "" && problem["reason"] != "",
            "{problem}"
        );
    }
    for body in [json!([]), json!("text"), json!({})] {
        assert_eq!(lab.call(Method::POST, all, body).await.0, 400);
    }
    assert_eq!(lab.call(Method::POST, all, Value::Null).await.0, 400);
    assert_eq!(
        lab.call(
            Method::POST,
            "/v2/projects/a%20b/dns-update-records",
            record("r", "p")
        )
        .await
        .0,
        400
    );
    assert_eq!(lab.get(all).await.1, json!([]));
}

#[tokio::test]
async fn lists_belong_to_clouds_and_clusters() {
    let lab = Lab::new();
    let list = json!({
        "metadata": {"name": "dns-update-record-list", "userData1": "u"},
        "spec": {"kv": [{"key1": "etcd"}]},
    });
    for path in [
        "/v2/projects/shop/logical-clouds/lc1/kv-pairs",
        "/v2/cluster-providers/p/clusters/edge/kv-pairs",
    ] {
        let (code, created) = lab.call(Method::POST, path, list.clone()).await;
        assert_eq!((code, created), (201, list.clone()));
        let one = format!("{path}/dns-update-record-list");
        assert_eq!(lab.get(&one).await, (200, list.clone()));
        assert_eq!(lab.get(&format!("{path}/other")).await.0, 404);
        assert_eq!(lab.get(path).await.1.as_array().unwrap().len(), 1);
    }
    let records = "/v2/projects/shop/dns-update-records";
    lab.call(Method::POST, records, record("etcd", "skydns"))
        .await;
    let (code, refusal) = lab
        .call(Method::DELETE, &format!("{records}/etcd"), Value::Null)
        .await;
    assert_eq!(code, 409, "{refusal}");
    for path in [
        "/v2/projects/shop/logical-clouds/lc1/kv-pairs/dns-update-record-list",
        "/v2/cluster-providers/p/clusters/edge/kv-pairs/dns-update-record-list",
    ] {
        assert_eq!(lab.call(Method::DELETE, path, Value::Null).await.0, 204);
    }
    assert_eq!(
        lab.call(Method::DELETE, &format!("{records}/etcd"), Value::Null)
            .await
            .0,
        204
    );
}

#[tokio::test]
async fn documents_win_over_the_api() {
    let lab = Lab::new();
    let documents = lab.folder.path().join("publish.d");
    fs::create_dir(&documents).unwrap();
    let text = "apiVersion: bosh-dns-publish/v1\nkind: DNSUpdateRecord\nmetadata: {name: etcd, namespace: shop}\n\
                spec: {provider: coredns}\n";
    fs::write(documents.join("a.yml"), text).unwrap();
    *lab.api_state.scan.lock() = Arc::new(Folder::new(vec![documents]).scan());
    let all = "/v2/projects/shop/dns-update-records";
    for (method, path) in [
        (Method::POST, all.to_owned()),
        (Method::PUT, format!("{all}/etcd")),
        (Method::DELETE, format!("{all}/etcd")),
    ] {
        let (code, refusal) = lab.call(method, &path, record("etcd", "p")).await;
        assert_eq!(code, 409);
        assert!(refusal.to_string().contains("a.yml:1"), "{refusal}");
    }
    assert_eq!(lab.get(all).await.1[0]["spec"]["provider"], "coredns");
}

#[tokio::test]
async fn openapi_describes_every_parameter() {
    let lab = Lab::new();
    let (code, document) = lab.get("/v2/openapi.json").await;
    assert_eq!((code, &document["openapi"]), (200, &json!("3.0.3")));
    let schemas = &document["components"]["schemas"];
    assert_describes(&schemas["extdns_general"], GENERAL);
    let mut names = Vec::new();
    for provider in ProviderKind::ALL {
        names.push(provider.name());
        let parameters = provider.definition().parameters;
        if let [first, ..] = parameters {
            let own = schemas.as_object().unwrap().values();
            let mut own = own.filter(|schema| schema["properties"].get(first.name).is_some());
            assert_describes(own.next().unwrap(), parameters);
        }
    }
    let described = &schemas["extdns_info"]["properties"]["provider"]["enum"];
    assert_eq!(*described, json!(names));
    let paths: Vec<&str> = document["paths"]
        .as_object()
        .unwrap()
        .keys()
        .map(String::as_str)
        .collect();
    for (path, _) in COLLECTIONS {
        assert!(
            paths.contains(&path) && paths.contains(&format!("{path}/{{name}}").as_str()),
            "{path}"
        );
    }
    assert_eq!(paths.len(), 2 * COLLECTIONS.len() + 1);
    assert_references_exist(&document, &document);
}

/// Asserts that a schema has these parameters and no others.
fn assert_describes(schema: &Value, parameters: &[Parameter]) {
    let schemas = schema["properties"].as_object().unwrap();
    assert_eq!(schemas.len(), parameters.len(), "{schema}");
    for parameter in parameters {
        let schema = &schemas[parameter.name];
        let wanted = match parameter.kind {
            ParameterKind::Boolean => "boolean",
            ParameterKind::Integer => "integer",
            _ => "string",
        };
        assert_eq!(schema["type"], wanted, "{}", parameter.name);
        assert_eq!(
            schema.get("default").is_some(),
            parameter.default.is_some(),
            "{}",
            parameter.name
        );
        assert_eq!(
            schema.get("enum").is_some(),
            matches!(parameter.kind, ParameterKind::Choice(_))
        );
        let description = schema["description"].as_str().unwrap();
        let remark = parameter
            .without_effect
            .map(|reason| format!("; {reason}"))
            .unwrap_or_default();
        assert!(
            description.ends_with(&remark) && schema.get("example").is_some(),
            "{}",
            parameter.name
        );
    }
}

fn assert_references_exist(value: &Value, document: &Value) {
    match value {
        Value::Object(members) => {
            if let Some(reference) = members.get("$ref") {
                let pointer = reference.as_str().unwrap().trim_start_matches('#');
                assert!(document.pointer(pointer).is_some(), "{reference}");
            }
            members
                .values()
                .for_each(|member| assert_references_exist(member, document));
        }
        Value::Array(items) => items
            .iter()
            .for_each(|item| assert_references_exist(item, document)),
        _ => {}
    }
}

#[tokio::test]
async fn late_round_fails_health() {
    use std::time::Duration;
    let lab = Lab::new();
    let socket = lab.folder.path().join("control.sock");
    let code = || async {
        control::call(
            control::TIMEOUT,
            &socket,
            Method::GET,
            "/healthz",
            Bytes::new(),
        )
        .await
        .unwrap()
    };
    assert_eq!(code().await.0, StatusCode::OK);
    lab.api_state
        .expect([("default/bind".to_owned(), Duration::ZERO)]);
    tokio::time::sleep(Duration::from_millis(1)).await;
    let (status, reason) = code().await;
    assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
    assert!(
        String::from_utf8_lossy(&reason).starts_with("default/bind: no successful round for 0 s"),
        "{reason:?}"
    );
    lab.api_state.end_round(
        "default/bind",
        Some("192.0.2.1 refused: NOTAUTH".to_owned()),
    );
    assert!(String::from_utf8_lossy(&code().await.1).contains("NOTAUTH"));
    lab.api_state
        .expect([("default/bind".to_owned(), Duration::from_secs(3600))]);
    assert_eq!(code().await.0, StatusCode::OK);
    let metrics = control::get(&socket, "/metrics").await.unwrap();
    assert!(String::from_utf8_lossy(&metrics).contains("external_dns_source_endpoints_total"));
}

/// Writes a CA, and certificates of the server and of two clients, as PEM files.
fn certificates(folder: &Path) {
    use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};
    let ca_key = KeyPair::generate().unwrap();
    let mut ca = CertificateParams::new(Vec::new()).unwrap();
    ca.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    fs::write(
        folder.join("ca.pem"),
        ca.self_signed(&ca_key).unwrap().pem(),
    )
    .unwrap();
    let issuer = Issuer::new(ca, ca_key);
    for name in ["server", "operator", "stranger"] {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
        params.distinguished_name.push(DnType::CommonName, name);
        fs::write(
            folder.join(format!("{name}.pem")),
            params.signed_by(&key, &issuer).unwrap().pem(),
        )
        .unwrap();
        fs::write(folder.join(format!("{name}.key")), key.serialize_pem()).unwrap();
    }
}

/// Sends a request over TLS, with or without a client certificate; `None` if the server refuses it.
async fn ask(address: std::net::SocketAddr, folder: &Path, client: Option<&str>) -> Option<u16> {
    use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject as _};
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut roots = rustls::RootCertStore::empty();
    roots
        .add(CertificateDer::from_pem_file(folder.join("ca.pem")).unwrap())
        .unwrap();
    let builder = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots);
    let config = match client {
        None => builder.with_no_client_auth(),
        Some(name) => builder
            .with_client_auth_cert(
                vec![CertificateDer::from_pem_file(folder.join(format!("{name}.pem"))).unwrap()],
                PrivateKeyDer::from_pem_file(folder.join(format!("{name}.key"))).unwrap(),
            )
            .unwrap(),
    };
    let stream = tokio::net::TcpStream::connect(address).await.unwrap();
    let connector = tokio_rustls::TlsConnector::from(Arc::new(config));
    let stream = connector
        .connect(ServerName::try_from("localhost").unwrap(), stream)
        .await
        .ok()?;
    let io = hyper_util::rt::TokioIo::new(stream);
    let (mut sender, connection) = hyper::client::conn::http1::handshake(io).await.ok()?;
    tokio::spawn(connection);
    let request =
        hyper::Request::get("/v2/projects/shop/dns-update-records").header("host", "localhost");
    let request = request.body(http_body_util::Empty::<Bytes>::new()).unwrap();
    Some(sender.send_request(request).await.ok()?.status().as_u16())
}

#[tokio::test]
async fn tls_admits_listed_clients() {
    let lab = Lab::new();
    let (folder, others) = (lab.folder.path(), tempfile::tempdir().unwrap());
    certificates(folder);
    certificates(others.path());
    let files = dns_core::config::TlsFiles {
        certificate: folder.join("server.pem"),
        private_key: folder.join("server.key"),
        ca: folder.join("ca.pem"),
    };
    let tls = RotatingTls::load("test", "localhost", &files).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let names = Some(vec!["operator".to_owned()]);
    tokio::spawn(serve_tls(
        listener,
        tls,
        names,
        routes(lab.api_state.clone()),
    ));
    assert_eq!(ask(address, folder, Some("operator")).await, Some(200));
    assert_eq!(ask(address, folder, Some("stranger")).await, Some(403));
    assert_eq!(ask(address, folder, None).await, None);
    fs::copy(folder.join("ca.pem"), others.path().join("ca.pem")).unwrap();
    assert_eq!(ask(address, others.path(), Some("operator")).await, None);
}

#[tokio::test]
async fn unknown_members_are_refused() {
    let lab = Lab::new();
    let all = "/v2/projects/shop/dns-update-records";
    let mut body = record("etcd", "p");
    body["status"] = json!({"ready": true});
    assert_eq!(lab.call(Method::POST, all, body.clone()).await.0, 201);
    body["metadata"]["name"] = "second".into();
    body["extra"] = 1.into();
    let (code, refusal) = lab.call(Method::POST, all, body).await;
    assert_eq!(
        (code, &refusal["problems"][0]["path"]),
        (400, &json!("extra"))
    );
    assert_eq!(refusal["problems"].as_array().unwrap().len(), 1);
    assert_eq!(lab.get(all).await.1.as_array().unwrap().len(), 1);
}

#[tokio::test]
async fn foreign_lists_hold_no_record() {
    let lab = Lab::new();
    let records = "/v2/projects/shop/dns-update-records";
    lab.call(Method::POST, records, record("etcd", "p")).await;
    let list = json!({
        "metadata": {"name": "dns-update-record-list"},
        "spec": {"kv": [{"a": "other", "b": "etcd"}]},
    });
    let elsewhere = "/v2/projects/other/logical-clouds/lc1/kv-pairs";
    assert_eq!(lab.call(Method::POST, elsewhere, list.clone()).await.0, 201);
    let cluster = "/v2/cluster-providers/p/clusters/edge/kv-pairs";
    assert_eq!(lab.call(Method::POST, cluster, list).await.0, 201);
    let one = format!("{records}/etcd");
    // The list of a cluster may apply to any project.
    let (code, refusal) = lab.call(Method::DELETE, &one, Value::Null).await;
    assert_eq!(code, 409);
    assert_eq!(
        refusal["problems"][0],
        json!({
            "file": "body", "line": 1, "path": "",
            "reason": "DNSUpdateRecord shop/etcd is named in DNSUpdateRecordList /cluster/p/edge",
            "remedy": "remove it from that list first",
        })
    );
    let named = format!("{cluster}/dns-update-record-list");
    assert_eq!(lab.call(Method::DELETE, &named, Value::Null).await.0, 204);
    assert_eq!(lab.call(Method::DELETE, &one, Value::Null).await.0, 204);
}

#[tokio::test]
async fn state_is_shown_with_resources() {
    let lab = Lab::new();
    let all = "/v2/projects/shop/dns-update-records";
    lab.call(Method::POST, all, record("etcd", "p")).await;
    let documents = vec![lab.folder.path().join("store")];
    let scan = Folder::new(documents).scan();
    let publication = crate::publication::publish(&scan, &|_| Ok(Vec::new()));
    let mut state = crate::status::ProviderState::failed("cause", &Default::default());
    let overview = |state: &crate::status::ProviderState| {
        let states = [("shop/etcd".to_owned(), state.clone())].into();
        crate::status::statuses(&scan, &publication, &states, &Default::default())
    };
    *lab.api_state.overview.lock() = overview(&state);
    let (code, shown) = lab.get("/status").await;
    assert_eq!(code, 200);
    assert_eq!(
        shown["providers"]["shop/etcd"],
        json!({"provider": "coredns", "synced": false, "wanted": 0, "owned": 0, "problems": ["cause"], "remarks": []})
    );
    let one = lab.get(&format!("{all}/etcd")).await.1;
    assert_eq!(
        one["status"],
        json!({"observedGeneration": 1, "ready": false, "problems": ["cause"], "remarks": []})
    );
    assert_eq!(lab.get(all).await.1[0]["status"], one["status"]);
    state.general.clear();
    *lab.api_state.overview.lock() = overview(&state);
    let one = lab.get(&format!("{all}/etcd")).await.1;
    assert_eq!(one["status"]["ready"], true);
    assert_eq!(lab.call(Method::POST, "/reload", Value::Null).await.0, 202);
    // The reload has woken the main loop.
    lab.api_state.change.notified().await;
    let (code, refusal) = lab
        .call(
            Method::POST,
            "/confirm",
            json!({"deletions": 1, "providers": ["x"]}),
        )
        .await;
    assert_eq!(
        (code, &refusal["problems"][0]["reason"]),
        (404, &json!("provider \"x\" is not running"))
    );
    assert_eq!(
        lab.call(Method::POST, "/confirm", json!({"deletion": 1}))
            .await
            .0,
        400
    );
    assert_eq!(
        lab.call(Method::POST, "/confirm", json!({"deletions": 1}))
            .await,
        (200, json!({}))
    );
}

/// An external-dns at the webhook of a publisher.
struct ExternalDns {
    address: std::net::SocketAddr,
    folder: tempfile::TempDir,
}

impl ExternalDns {
    async fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let server = json!({"port": 53, "alias_files_glob": path("*.aliases")}).to_string();
        fs::write(path("config.json"), server).unwrap();
        let config = crate::config::WebhookConfig {
            address: "127.0.0.1:0".parse().unwrap(),
            domains: crate::webhook::Domains {
                include: vec!["apps.internal".to_owned()],
                ..Default::default()
            },
            alias_file: path("own.aliases"),
        };
        let opened = AliasWriter::new(&config, &path("config.json"), path("webhook.json"));
        let (writer, client) = opened.unwrap();
        let listener = TcpListener::bind(config.address).await.unwrap();
        let address = listener.local_addr().unwrap();
        let routes = webhook_routes(writer, client);
        let server = Server::new("the webhook", Listener::Plain(listener));
        tokio::spawn(server.run(move |_| routes.clone(), std::future::pending()));
        Self { address, folder }
    }

    /// Sends a request with headers as written; returns the head of the response and its body.
    async fn ask(&self, request: &str, headers: &str, body: &Value) -> (String, String) {
        use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
        let body = if body.is_null() {
            String::new()
        } else {
            body.to_string()
        };
        let head = format!(
            "{request} HTTP/1.1\r\nhost: h\r\nconnection: close\r\n{headers}content-length: {}\r\n\r\n{body}",
            body.len()
        );
        let mut stream = tokio::net::TcpStream::connect(self.address).await.unwrap();
        stream.write_all(head.as_bytes()).await.unwrap();
        let mut response = String::new();
        stream.read_to_string(&mut response).await.unwrap();
        let (head, body) = response.split_once("\r\n\r\n").unwrap();
        (head.to_ascii_lowercase(), body.to_owned())
    }

    /// Sends a message of the protocol; returns the code and the body.
    async fn send(&self, request: &str, body: &Value) -> (String, Value) {
        let headers = format!("accept: {MEDIA_TYPE}\r\ncontent-type: {MEDIA_TYPE}\r\n");
        let (head, body) = self.ask(request, &headers, body).await;
        let code = head.split(' ').nth(1).unwrap().to_owned();
        (code, serde_json::from_str(&body).unwrap_or_default())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn external_dns_writes_fleet_names() {
    let external_dns = ExternalDns::new().await;
    let (head, body) = external_dns
        .ask("GET /", &format!("accept: {MEDIA_TYPE}\r\n"), &Value::Null)
        .await;
    assert!(head.starts_with("http/1.1 200"), "{head}");
    assert!(
        head.contains(&format!("content-type: {MEDIA_TYPE}")),
        "{head}"
    );
    assert!(head.contains("vary: content-type"), "{head}");
    assert_eq!(body, r#"{"include":["apps.internal"]}"#);
    let entry = |name: &str| json!({"dnsName": name, "recordType": "A", "targets": ["192.0.2.1"]});
    let wanted = json!([entry("a.apps.internal"), entry("a.example.org")]);
    let (code, adjusted) = external_dns.send("POST /adjustendpoints", &wanted).await;
    assert_eq!(
        (&*code, adjusted),
        ("200", json!([entry("a.apps.internal")]))
    );
    let create = json!({"create": [entry("a.apps.internal")]});
    assert_eq!(
        external_dns.send("GET /records", &Value::Null).await.1,
        json!([])
    );
    assert_eq!(external_dns.send("POST /records", &create).await.0, "204");
    let listed = external_dns.send("GET /records", &Value::Null).await;
    assert_eq!(
        listed,
        ("200".to_owned(), json!([entry("a.apps.internal")]))
    );
    let aliases = fs::read_to_string(external_dns.folder.path().join("own.aliases")).unwrap();
    assert_eq!(
        serde_json::from_str::<Value>(&aliases).unwrap(),
        json!({"a.apps.internal": ["192.0.2.1"]})
    );
    // external-dns lists again after a conflict, and gives up after what is unfit.
    assert_eq!(external_dns.send("POST /records", &create).await.0, "503");
    let unfit = json!({"create": [entry("a.example.org")]});
    assert_eq!(external_dns.send("POST /records", &unfit).await.0, "400");
    let (code, refusal) = external_dns.send("POST /records", &json!([1])).await;
    assert_eq!(
        (&*code, &refusal["problems"][0]["remedy"]),
        ("400", &json!("correct it"))
    );
    fs::write(external_dns.folder.path().join("webhook.json"), "x").unwrap();
    assert_eq!(
        external_dns.send("GET /records", &Value::Null).await.0,
        "200",
        "it knows them"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn unsupported_webhook_versions_are_refused() {
    let external_dns = ExternalDns::new().await;
    for (headers, code, reason, remedy) in [
        (
            "accept: text/html\r\n",
            "406",
            "Accept is \"text/html\"",
            "accept",
        ),
        (
            "content-type: text/html\r\n",
            "415",
            "Content-Type is \"text/html\"",
            "send",
        ),
        (
            "accept: a/b\r\ncontent-type: c/d\r\n",
            "406",
            "Accept is \"a/b\"",
            "accept",
        ),
    ] {
        let (head, body) = external_dns
            .ask("GET /records", headers, &Value::Null)
            .await;
        assert!(head.starts_with(&format!("http/1.1 {code}")), "{head}");
        let problem = &serde_json::from_str::<Value>(&body).unwrap()["problems"][0];
        assert_eq!(problem["reason"], reason);
        assert_eq!(problem["remedy"], format!("{remedy} {MEDIA_TYPE}"));
    }
    let (head, _) = external_dns.ask("GET /records", "", &Value::Null).await;
    assert!(head.starts_with("http/1.1 200"), "{head}");
    let (head, body) = external_dns
        .ask("GET /healthz", "accept: text/html\r\n", &Value::Null)
        .await;
    assert!(head.starts_with("http/1.1 200"), "{head}");
    assert_eq!(body, "OK\n");
}
