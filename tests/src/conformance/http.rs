//! A scripted DNS-over-JSON server on 127.0.0.1.

use std::{convert::Infallible, net::Ipv4Addr, sync::Arc, time::Duration};

use anyhow::{Context, Result};
use http_body_util::Full;
use hyper::{Response, Uri, body::Bytes, header, server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::{net::TcpListener, runtime::Runtime, time::sleep};

use super::scenario::{HttpAction, HttpScript};

/// A running server; its tasks end with the runtime.
#[derive(Debug)]
pub struct HttpServer(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    script: HttpScript,
    /// Requests in the format of recordings.
    seen: Mutex<Vec<Value>>,
}

impl HttpServer {
    /// Starts a server.
    ///
    /// # Errors
    ///
    /// Fails if the port is in use.
    pub fn start(runtime: &Runtime, script: HttpScript, port: u16) -> Result<Self> {
        let shared = Arc::new(Shared {
            script,
            seen: Mutex::default(),
        });
        let listener = runtime
            .block_on(TcpListener::bind((Ipv4Addr::LOCALHOST, port)))
            .with_context(|| format!("port {port} is not free"))?;
        let tasks = Arc::clone(&shared);
        runtime.spawn(async move {
            loop {
                let Ok((stream, _)) = listener.accept().await else {
                    continue;
                };
                let shared = Arc::clone(&tasks);
                let service = service_fn(move |request: hyper::Request<hyper::body::Incoming>| {
                    let shared = Arc::clone(&shared);
                    async move { Ok::<_, Infallible>(shared.respond(request.uri()).await) }
                });
                tokio::spawn(http1::Builder::new().serve_connection(TokioIo::new(stream), service));
            }
        });
        Ok(Self(shared))
    }

    /// Returns the number of requests so far.
    pub fn count(&self) -> u64 {
        self.0.seen.lock().len() as u64
    }

    /// Returns the last request in the format of recordings.
    pub fn last(&self) -> Option<Value> {
        self.0.seen.lock().last().cloned()
    }
}

impl Shared {
    /// Records a request and responds according to the script.
    async fn respond(&self, uri: &Uri) -> Response<Full<Bytes>> {
        let query = uri.query().unwrap_or_default();
        let parameter = |name: &str| {
            let mut pairs = query.split('&').filter_map(|pair| pair.split_once('='));
            pairs
                .find(|(key, _)| *key == name)
                .map(|(_, value)| unescape(value))
                .unwrap_or_default()
        };
        let (name, qtype) = (parameter("name"), parameter("type"));
        let seen = json!({"method": "GET", "path": uri.path(), "name": name, "type": qtype});
        self.seen.lock().push(seen);
        let lower = name.to_lowercase();
        let rule = self.script.rules.iter().find(|rule| {
            let wanted = rule
                .qtype
                .as_str()
                .map_or_else(|| rule.qtype.to_string(), str::to_owned);
            let rule = rule.name.to_lowercase();
            (rule == "*" || rule == lower) && (wanted == "*" || wanted == qtype)
        });
        let not_found = || HttpAction {
            status: Some(404),
            ..HttpAction::default()
        };
        let action = rule
            .map(|rule| rule.action.clone())
            .or_else(|| self.script.default.clone());
        let HttpAction {
            status,
            json,
            body,
            many_a,
            delay_ms,
        } = action.unwrap_or_else(not_found);
        sleep(Duration::from_millis(delay_ms)).await;
        let addresses = many_a.map(|many| {
            let row = |number| {
                let address = Ipv4Addr::from_bits(many.base.to_bits() + number);
                json!({"name": name, "type": 1, "TTL": many.ttl, "data": address})
            };
            json!({"Answer": (0..many.count).map(row).collect::<Vec<_>>()})
        });
        let text = addresses
            .or(json)
            .map(|document| document.to_string())
            .or(body)
            .unwrap_or_default();
        let mut response = Response::new(Full::new(Bytes::from(text)));
        // An invalid status in a script becomes 200.
        *response.status_mut() = status.unwrap_or(200).try_into().unwrap_or_default();
        response.headers_mut().insert(
            header::CONTENT_TYPE,
            header::HeaderValue::from_static("application/json"),
        );
        response
    }
}

/// Decodes the escapes of a query string.
fn unescape(text: &str) -> String {
    let mut bytes = Vec::new();
    let mut rest = text.as_bytes();
    while let Some((&byte, after)) = rest.split_first() {
        rest = after;
        let escaped = (byte == b'%').then(|| after.get(..2)).flatten();
        let escaped = escaped
            .and_then(|digits| u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok());
        match (byte, escaped) {
            (_, Some(escaped)) => {
                bytes.push(escaped);
                rest = &after[2..];
            }
            (b'+', None) => bytes.push(b' '),
            (byte, None) => bytes.push(byte),
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}
