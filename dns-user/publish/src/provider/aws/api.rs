//! Calls to Route 53 and the token service, signed and retried.

use std::time::Duration;

use bytes::Bytes;
use http_body_util::Full;
use hyper::{Request, StatusCode};
use time::{OffsetDateTime, format_description::BorrowedFormatItem, macros::format_description};

use super::{
    Settings,
    credentials::Keys,
    sign::{self, Credentials, Scope, encode_query},
    xml::Element,
};
use crate::provider::{ProviderError, http::Http};

/// API version in paths and in the XML namespace of requests.
pub(super) const VERSION: &str = "2013-04-01";

/// First pause after a throttled call; it doubles with each further call.
const FIRST_PAUSE: Duration = Duration::from_millis(500);

/// Recommended pause if throttling does not end.
const LONG_PAUSE: Duration = Duration::from_mins(1);

const TIME: &[BorrowedFormatItem<'_>] = format_description!("[year][month][day]T[hour][minute][second]Z");

/// Client of Route 53.
pub(super) struct Api {
    http: Http,
    endpoint: String,
    region: String,
    keys: Keys,
    retries: u32,
}

/// Error of a call to Route 53.
#[derive(Debug)]
pub(super) enum CallError {
    /// The change conflicts with the current state of the zone.
    InvalidBatch(Vec<String>),
    Other(ProviderError),
}

impl From<ProviderError> for CallError {
    fn from(error: ProviderError) -> Self {
        Self::Other(error)
    }
}

impl CallError {
    pub(super) fn into_provider(self, server: &str) -> ProviderError {
        match self {
            Self::Other(error) => error,
            Self::InvalidBatch(messages) => {
                ProviderError::Refused { server: server.to_owned(), reason: messages.join("; ") }
            }
        }
    }
}

impl Api {
    pub(super) fn new(settings: &Settings) -> Result<Self, ProviderError> {
        let Settings { endpoint, token_endpoint, metadata_endpoint, .. } = settings;
        let urls = [endpoint, token_endpoint, metadata_endpoint].map(String::as_str);
        Ok(Self {
            http: Http::new(urls.into_iter(), &settings.files, settings.patience)?,
            endpoint: settings.endpoint.clone(),
            region: settings.region.clone(),
            keys: Keys::new(settings),
            retries: settings.retries,
        })
    }

    pub(super) fn server(&self) -> &str {
        &self.endpoint
    }

    pub(super) async fn get(&mut self, path: &str, query: &[(&str, &str)]) -> Result<Element, ProviderError> {
        let response = self.call("GET", path, query, None).await;
        response.map_err(|error| error.into_provider(&self.endpoint))
    }

    pub(super) async fn post(&mut self, path: &str, body: &Element) -> Result<Element, CallError> {
        let namespace = format!("https://route53.amazonaws.com/doc/{VERSION}/");
        self.call("POST", path, &[], Some(body.document(&namespace))).await
    }

    /// Repeats a call with growing random pauses while the service throttles.
    async fn call(
        &mut self,
        method: &str,
        path: &str,
        query: &[(&str, &str)],
        body: Option<String>,
    ) -> Result<Element, CallError> {
        let credentials = self.keys.current(&self.http).await?;
        let scope = Scope { region: self.region.clone(), service: "route53" };
        let path = format!("/{VERSION}/{path}");
        let mut pause = FIRST_PAUSE;
        for attempt in 0.. {
            let endpoint = &self.endpoint;
            let body = body.clone().unwrap_or_default();
            let request = signed(endpoint, method, &path, query, "text/xml", &body, &credentials, &scope)?;
            match exchange(&self.http, endpoint, request).await {
                Err(CallError::Other(ProviderError::Throttled { .. })) if attempt < self.retries => {
                    tokio::time::sleep(pause.mul_f64(0.5 + fastrand::f64())).await;
                    pause *= 2;
                }
                result => return result,
            }
        }
        // Unreachable: the loop is infinite.
        Err(ProviderError::Throttled { server: self.endpoint.clone(), wait: LONG_PAUSE }.into())
    }
}

pub(super) async fn exchange(
    http: &Http,
    server: &str,
    request: Request<Full<Bytes>>,
) -> Result<Element, CallError> {
    let response = http.send(server, request).await?;
    let parsed = Element::parse(&response.body);
    if response.status == StatusCode::OK {
        let bad = |reason| ProviderError::BadAnswer { server: server.to_owned(), reason };
        return Ok(parsed.map_err(bad)?);
    }
    let answer = parsed.unwrap_or_default();
    let code = answer.find("Code").map_or("", |code| code.text.trim());
    let message = answer.find("Message").map_or("no reason given", |message| message.text.trim());
    if answer.name == "InvalidChangeBatch" || code == "InvalidChangeBatch" {
        let mut messages: Vec<String> = answer
            .find("Messages")
            .into_iter()
            .flat_map(|list| &list.children)
            .map(|one| one.text.clone())
            .collect();
        if messages.is_empty() {
            messages.push(message.to_owned());
        }
        return Err(CallError::InvalidBatch(messages));
    }
    let server = server.to_owned();
    Err(CallError::Other(match code {
        "Throttling" | "ThrottlingException" | "PriorRequestNotComplete" | "TooManyRequestsException" => {
            ProviderError::Throttled { server, wait: LONG_PAUSE }
        }
        _ if response.status == StatusCode::TOO_MANY_REQUESTS => {
            ProviderError::Throttled { server, wait: LONG_PAUSE }
        }
        _ if response.status.is_server_error() => {
            ProviderError::Unreachable { server, reason: format!("{} {code}: {message}", response.status) }
        }
        _ => ProviderError::Refused { server, reason: format!("{code}: {message}") },
    }))
}

#[expect(clippy::too_many_arguments, reason = "they are the parts of one request")]
pub(super) fn signed(
    endpoint: &str,
    method: &str,
    path: &str,
    query: &[(&str, &str)],
    content_type: &str,
    body: &str,
    credentials: &Credentials,
    scope: &Scope,
) -> Result<Request<Full<Bytes>>, ProviderError> {
    let bad = |error: String| ProviderError::Settings(format!("endpoint {endpoint}: {error}"));
    let host = endpoint.split_once("://").map_or(endpoint, |(_, host)| host);
    let time = OffsetDateTime::now_utc().format(TIME).map_err(|error| bad(error.to_string()))?;
    let headers = [("content-type", content_type), ("host", host)];
    let request = sign::Request { method, path, query, headers: &headers, body: body.as_bytes() };
    let mut uri = format!("{endpoint}{path}");
    if !query.is_empty() {
        uri.push_str(&format!("?{}", encode_query(query)));
    }
    let mut builder = Request::builder().method(method).uri(uri);
    for (name, value) in headers {
        builder = builder.header(name, value);
    }
    for (name, value) in sign::sign(&request, credentials, scope, &time) {
        builder = builder.header(name, value);
    }
    builder.body(Full::new(Bytes::from(body.to_owned()))).map_err(|error| bad(error.to_string()))
}
