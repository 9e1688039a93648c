//! Calls to Route 53 and the token service, retried, with the XML of their replies; credentials for signing:
//! configured, from the machine's instance profile, or from an assumed role.

use std::{
    collections::BTreeMap,
    path::Path,
    time::{Duration, SystemTime},
};

use anyhow::{Context as _, bail};
use bytes::Bytes;
use dns_kit::{
    aws_signature::{Credentials, Signer, encode_query},
    backoff,
    files::bounded,
    http_client::Limits,
};
use hyper::{Request, StatusCode, http::request};
use quick_xml::{
    Reader,
    escape::{escape, resolve_predefined_entity},
    events::{BytesStart, Event},
};
use serde::Deserialize;
use time::{OffsetDateTime, format_description::well_known::Rfc3339};

use super::AwsSettings;
use crate::provider::{
    Http, Loading, MAX_BODY, Pages, ProviderError, bad_answer, is_temporary, load, settings,
};

/// API version in paths and in the XML namespace of requests.
pub(super) const VERSION: &str = "2013-04-01";

/// Time limit of a response.
const TIMEOUT: Duration = Duration::from_secs(30);

/// First pause after a throttled call; it doubles with each further one, up to [`LONG_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_millis(500);

/// Longest pause between two attempts of a throttled call.
const LONG_PAUSE: Duration = Duration::from_mins(1);

/// Codes of throttled calls.
const THROTTLING: [&str; 4] = [
    "Throttling",
    "ThrottlingException",
    "PriorRequestNotComplete",
    "TooManyRequestsException",
];

/// Codes of calls whose credentials are no longer valid.
const REJECTED: [&str; 3] = [
    "ExpiredToken",
    "InvalidClientTokenId",
    "SignatureDoesNotMatch",
];

pub(super) struct Api {
    pub(super) settings: AwsSettings,
    http: Http,
    loading: Loading<String>,
    /// Credentials that expire, and the time of their end.
    temporary: Option<(Credentials, SystemTime)>,
}

impl Api {
    pub(super) fn new(settings: AwsSettings) -> Result<Self, ProviderError> {
        let AwsSettings {
            endpoint,
            token_endpoint,
            metadata_endpoint,
            ..
        } = &settings;
        let urls = [endpoint, token_endpoint, metadata_endpoint].map(String::as_str);
        let http = Http::new(
            urls.into_iter(),
            &settings.files,
            Limits {
                time: TIMEOUT,
                body: MAX_BODY,
            },
        )?;
        Ok(Self {
            settings,
            http,
            loading: Loading::default(),
            temporary: None,
        })
    }

    /// Gets all pages of a list. `markers` are the parameters that select the next page, each with the element of a
    /// page that has its value.
    pub(super) async fn pages(
        &mut self,
        path: &str,
        max_items: &str,
        markers: &[(&str, &str)],
    ) -> Result<Vec<Element>, ProviderError> {
        let mut pages: Vec<Element> = Vec::new();
        let mut received = Pages::default();
        loop {
            let mut query = Vec::with_capacity(markers.len() + 1);
            for (parameter, element) in markers {
                let value = pages.last().map_or("", |page| page.text_of(element));
                if !value.is_empty() {
                    query.push((*parameter, value));
                }
            }
            query.push(("maxitems", max_items));
            let body = self.call("GET", path, &query, String::new()).await?;
            let page = Element::of_response(&self.settings.endpoint, &body)?;
            let is_last = page.text_of("IsTruncated") != "true";
            pages.push(page);
            if is_last {
                return Ok(pages);
            }
            received.add(&self.settings.endpoint, &body)?;
        }
    }

    pub(super) async fn post(
        &mut self,
        path: &str,
        body: &Element,
    ) -> Result<Element, ProviderError> {
        let namespace = format!("https://route53.amazonaws.com/doc/{VERSION}/");
        let body = body.document(&namespace);
        let answer = self.call("POST", path, &[], body).await?;
        Element::of_response(&self.settings.endpoint, &answer)
    }

    /// Repeats a call with growing random pauses while the service throttles.
    async fn call(
        &mut self,
        method: &str,
        path: &str,
        query: &[(&str, &str)],
        body: String,
    ) -> Result<Bytes, ProviderError> {
        // They are valid for five minutes at least, longer than a call's attempts by default.
        let credentials = self.credentials().await?;
        let path = format!("/{VERSION}/{path}");
        let AwsSettings {
            endpoint,
            region,
            retries,
            ..
        } = &self.settings;
        let unsigned = Unsigned {
            service: "route53",
            region,
            method,
            path: &path,
            query,
            content_type: "text/xml",
            body: &body,
        };
        let mut attempt = 0;
        loop {
            // Each attempt anew: AWS accepts a signature for five minutes.
            let request = unsigned.sign(endpoint, &credentials);
            match self.exchange(endpoint, request, body.clone()).await {
                Err(ProviderError::Throttled { .. }) if attempt < *retries => {
                    attempt += 1;
                    let pause = backoff::pause(FIRST_PAUSE, LONG_PAUSE, attempt);
                    tokio::time::sleep(backoff::spread(pause)).await;
                }
                Err(ProviderError::Refused { server, reason }) => {
                    if REJECTED.iter().any(|code| reason.starts_with(code)) {
                        // They were revoked or replaced; the next call gets others.
                        self.temporary = None;
                    }
                    return Err(ProviderError::Refused { server, reason });
                }
                result => return result,
            }
        }
    }

    async fn exchange(
        &self,
        server: &str,
        request: request::Builder,
        body: String,
    ) -> Result<Bytes, ProviderError> {
        let response = self.http.send(server, request, body).await?;
        if response.status() == StatusCode::OK {
            return Ok(response.into_body());
        }
        // Errors have a body of XML as well, which names the cause.
        let answer = Element::parse(response.body()).unwrap_or_default();
        let code = answer.find("Code").map_or("", |code| code.text.trim());
        let message = answer
            .find("Message")
            .map_or("no reason given", |message| message.text.trim());
        let server = server.to_owned();
        // Route 53 answers this error in two forms: of its own, and as any other error.
        if answer.name == "InvalidChangeBatch" || code == "InvalidChangeBatch" {
            let mut messages = Vec::new();
            if let Some(list) = answer.find("Messages") {
                for message in &list.children {
                    messages.push(message.text.as_str());
                }
            }
            let reason = if messages.is_empty() {
                message.to_owned()
            } else {
                messages.join("; ")
            };
            return Err(ProviderError::Refused { server, reason });
        }
        let status = response.status();
        // The status of PriorRequestNotComplete is 400.
        if THROTTLING.contains(&code) || status == StatusCode::TOO_MANY_REQUESTS {
            return Err(ProviderError::Throttled { server });
        }
        Err(if is_temporary(status) {
            ProviderError::Unreachable {
                server,
                reason: format!("{status} {code}: {message}"),
            }
        } else {
            ProviderError::Refused {
                server,
                reason: format!("{code}: {message}"),
            }
        })
    }
}

/// Time before the expiration of temporary credentials at which they are renewed.
const RENEWAL: Duration = Duration::from_mins(5);

const FORM: &str = "application/x-www-form-urlencoded";

/// Lifetime of a metadata service token in seconds.
const METADATA_TOKEN_SECONDS: &str = "300";

const PROFILE: &str = "/latest/meta-data/iam/security-credentials/";

const METADATA_TOKEN: &str = "x-aws-ec2-metadata-token";

/// Reads a profile of a shared credentials file: sections of `name = value`.
fn of_shared_file(text: &str, file: &Path, profile: &str) -> Result<Credentials, ProviderError> {
    let mut is_profile = false;
    let mut values = BTreeMap::new();
    for line in text.lines().map(str::trim) {
        if let Some(section) = line.strip_prefix('[')
            && let Some(section) = section.strip_suffix(']')
        {
            is_profile = section.trim() == profile;
        } else if is_profile && let Some((name, value)) = line.split_once('=') {
            values.insert(name.trim().to_owned(), value.trim().to_owned());
        }
    }
    // A name without a value counts as absent, as an empty variable does.
    values.retain(|_, value| !value.is_empty());
    let key_id = values.remove("aws_access_key_id");
    let secret = values.remove("aws_secret_access_key");
    match (key_id, secret) {
        (Some(key_id), Some(secret)) => Ok(Credentials {
            key_id,
            secret,
            token: values.remove("aws_session_token"),
        }),
        _ => {
            let problem = format!("the profile {profile:?} has no access key; set AWS_PROFILE");
            Err(unreadable(file, problem))
        }
    }
}

fn read_text(file: &Path) -> Result<String, ProviderError> {
    let octets = bounded::read(file).map_err(|error| unreadable(file, error))?;
    String::from_utf8(octets).map_err(|error| unreadable(file, error))
}

fn unreadable(file: &Path, reason: impl std::fmt::Display) -> ProviderError {
    settings(format!("{}: {reason}", file.display()))
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Profile {
    access_key_id: String,
    secret_access_key: String,
    token: String,
    expiration: String,
}

impl Api {
    /// Returns credentials that remain valid for at least [`RENEWAL`].
    async fn credentials(&mut self) -> Result<Credentials, ProviderError> {
        let AwsSettings {
            credentials: given,
            web_identity,
            shared_file,
            role,
            ..
        } = &self.settings;
        if let (Some(given), None) = (given, role) {
            return Ok(given.clone());
        }
        if let Some((credentials, until)) = &self.temporary
            // The token may be used by the calls of a long round after this check.
            && SystemTime::now() + RENEWAL < *until
        {
            return Ok(credentials.clone());
        }
        let base = match (given, web_identity, shared_file) {
            // With a role, they only sign the request for its credentials; nothing keeps them.
            (Some(given), _, _) => (given.clone(), SystemTime::now()),
            (None, Some((file, role)), _) => self.of_web_identity(file, role).await?,
            // Read again from time to time, because other programs renew it.
            (None, None, Some((file, profile))) => {
                let text = self.read(file).await?;
                let until = SystemTime::now() + 2 * RENEWAL;
                (of_shared_file(&text, file, profile)?, until)
            }
            (None, None, None) => self.of_machine().await?,
        };
        let temporary = match role {
            Some(role) => self.assume(role, &base.0).await?,
            None => base,
        };
        let credentials = temporary.0.clone();
        self.temporary = Some(temporary);
        Ok(credentials)
    }

    async fn read(&self, file: &Path) -> Result<String, ProviderError> {
        let path = file.to_owned();
        let shown = path.display().to_string();
        load(&self.loading, &shown, move || read_text(&path)).await
    }

    /// Fetches the credentials of the machine's instance profile (IMDSv2).
    async fn of_machine(&self) -> Result<(Credentials, SystemTime), ProviderError> {
        // The last source, so its failure is mostly a missing setting and not one of the service.
        self.fetch_profile().await.map_err(|error| {
            settings(format!(
                "Route 53 needs credentials: AWS_ACCESS_KEY_ID is not set, and this machine has no instance \
                 profile ({}: {error})",
                self.settings.metadata_endpoint
            ))
        })
    }

    async fn fetch_profile(&self) -> anyhow::Result<(Credentials, SystemTime)> {
        let server = &self.settings.metadata_endpoint;
        // An instance may refuse requests without a token, which a deceived proxy cannot get (IMDSv2).
        let token = Request::put(format!("{server}/latest/api/token")).header(
            "x-aws-ec2-metadata-token-ttl-seconds",
            METADATA_TOKEN_SECONDS,
        );
        let token = self.metadata(token).await?;
        let get = |name: &str| {
            let request = Request::get(format!("{server}{PROFILE}{name}"));
            request.header(METADATA_TOKEN, &token)
        };
        let name = self.metadata(get("")).await?;
        let profile = self.metadata(get(&name)).await?;
        let profile: Profile = serde_json::from_str(&profile)?;
        let until = OffsetDateTime::parse(&profile.expiration, &Rfc3339)?;
        let credentials = Credentials {
            key_id: profile.access_key_id,
            secret: profile.secret_access_key,
            token: Some(profile.token),
        };
        Ok((credentials, until.into()))
    }

    /// Sends a request to the machine's metadata service, and returns the text of its response.
    async fn metadata(&self, request: request::Builder) -> anyhow::Result<String> {
        let server = &self.settings.metadata_endpoint;
        let response = self.http.send(server, request, "").await?;
        if response.status() != StatusCode::OK {
            bail!("{}", response.status());
        }
        Ok(String::from_utf8_lossy(response.body()).trim().to_owned())
    }

    async fn assume(
        &self,
        role: &str,
        base: &Credentials,
    ) -> Result<(Credentials, SystemTime), ProviderError> {
        let AwsSettings {
            token_endpoint,
            region,
            ..
        } = &self.settings;
        let form = role_form("AssumeRole", role, None);
        let unsigned = Unsigned {
            service: "sts",
            region,
            method: "POST",
            path: "/",
            query: &[],
            content_type: FORM,
            body: &form,
        };
        let request = unsigned.sign(token_endpoint, base);
        self.credentials_of(request, form).await
    }

    /// Exchanges the token of a web identity for credentials of its role.
    async fn of_web_identity(
        &self,
        file: &Path,
        role: &str,
    ) -> Result<(Credentials, SystemTime), ProviderError> {
        // Read each time: Kubernetes replaces the file before the token expires.
        let token = self.read(file).await?;
        let form = role_form("AssumeRoleWithWebIdentity", role, Some(token.trim()));
        let request = Request::post(format!("{}/", self.settings.token_endpoint))
            .header("content-type", FORM);
        self.credentials_of(request, form).await
    }

    /// Sends a request to the token service, and returns the credentials in its response.
    async fn credentials_of(
        &self,
        request: request::Builder,
        form: String,
    ) -> Result<(Credentials, SystemTime), ProviderError> {
        let endpoint = &self.settings.token_endpoint;
        let body = self.exchange(endpoint, request, form).await?;
        let answer = Element::of_response(endpoint, &body)?;
        let no_credentials = "the token service returned no credentials";
        let Some(found) = answer.find("Credentials") else {
            return Err(bad_answer(endpoint, no_credentials));
        };
        let credentials = Credentials {
            key_id: found.text_of("AccessKeyId").to_owned(),
            secret: found.text_of("SecretAccessKey").to_owned(),
            token: Some(found.text_of("SessionToken").to_owned()),
        };
        if credentials.key_id.is_empty() || credentials.secret.is_empty() {
            return Err(bad_answer(endpoint, no_credentials));
        }
        // `Expiration` matches the requested duration.
        Ok((credentials, SystemTime::now() + Duration::from_hours(1)))
    }
}

/// Returns the body of a request to assume a role, for an hour.
fn role_form(action: &str, role: &str, token: Option<&str>) -> String {
    let mut form = vec![
        ("Action", action),
        // A role that another role assumes cannot have more (IAM User Guide, "Role chaining").
        ("DurationSeconds", "3600"),
        ("RoleArn", role),
        ("RoleSessionName", "bosh-dns-publish"),
        ("Version", "2011-06-15"),
    ];
    if let Some(token) = token {
        form.push(("WebIdentityToken", token));
    }
    encode_query(&form)
}

const MAX_DEPTH: usize = 32;

/// An element without attributes: either text or children.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Element {
    pub(super) name: String,
    pub(super) text: String,
    pub(super) children: Vec<Element>,
}

impl Element {
    pub(super) fn text(name: &str, text: &str) -> Self {
        Self {
            name: name.to_owned(),
            text: text.to_owned(),
            children: Vec::new(),
        }
    }

    pub(super) fn of(name: &str, children: impl IntoIterator<Item = Self>) -> Self {
        Self {
            name: name.to_owned(),
            text: String::new(),
            children: children.into_iter().collect(),
        }
    }

    fn begun(start: &BytesStart<'_>) -> Self {
        Self::text(&String::from_utf8_lossy(start.local_name().as_ref()), "")
    }

    /// Parses a response with the status 200.
    fn of_response(server: &str, body: &[u8]) -> Result<Self, ProviderError> {
        let found = Self::parse(body).map_err(|error| bad_answer(server, error))?;
        // A proxy may answer with a document of its own, which would be an empty list.
        if !found.name.ends_with("Response") || found.name == "ErrorResponse" {
            let reason = format!(
                "it has the root {:?}; a proxy may have answered",
                found.name
            );
            return Err(bad_answer(server, reason));
        }
        Ok(found)
    }

    pub(super) fn parse(document: &[u8]) -> anyhow::Result<Self> {
        let mut reader = Reader::from_reader(document);
        let mut open: Vec<Self> = vec![Self::default()];
        loop {
            match reader.read_event()? {
                Event::Start(start) => {
                    // Elements are dropped and searched recursively, so a reply of a hostile peer
                    // could overflow the stack.
                    if open.len() > MAX_DEPTH {
                        bail!("elements are nested too deeply");
                    }
                    open.push(Self::begun(&start));
                }
                Event::Empty(start) => innermost(&mut open)?.children.push(Self::begun(&start)),
                Event::End(_) => {
                    let mut closed = open.pop().context(CLOSED_TWICE)?;
                    if !closed.children.is_empty() {
                        // Text between children is indentation.
                        closed.text.clear();
                    }
                    innermost(&mut open)?.children.push(closed);
                }
                Event::Text(text) => {
                    innermost(&mut open)?.text.push_str(&text.decode()?);
                }
                Event::CData(data) => {
                    innermost(&mut open)?
                        .text
                        .push_str(&String::from_utf8_lossy(&data));
                }
                Event::GeneralRef(reference) => {
                    let text = &mut innermost(&mut open)?.text;
                    match (reference.resolve_char_ref()?, &*reference.decode()?) {
                        (Some(character), _) => text.push(character),
                        // Other entities than XML's five need a document type, which no reply has.
                        (None, name) => text.push_str(
                            resolve_predefined_entity(name)
                                .with_context(|| format!("unknown entity {name}"))?,
                        ),
                    }
                }
                Event::Eof => break,
                Event::Comment(_) | Event::Decl(_) | Event::PI(_) | Event::DocType(_) => {}
            }
        }
        // The first entry is no element: it collects the document's root.
        let [root] = &mut open[..] else {
            bail!("it is truncated")
        };
        root.children.pop().context("it has no element")
    }

    pub(super) fn child(&self, name: &str) -> Option<&Self> {
        self.children.iter().find(|child| child.name == name)
    }

    /// Returns the text of the first child with this name; empty without one.
    pub(super) fn text_of(&self, name: &str) -> &str {
        self.child(name).map_or("", |child| child.text.trim())
    }

    pub(super) fn list(&self, name: &str) -> impl Iterator<Item = &Self> {
        self.child(name).into_iter().flat_map(|list| &list.children)
    }

    pub(super) fn find(&self, name: &str) -> Option<&Self> {
        if self.name == name {
            return Some(self);
        }
        self.children.iter().find_map(|child| child.find(name))
    }

    pub(super) fn write(&self, xml: &mut String) {
        let Self {
            name,
            text,
            children,
        } = self;
        xml.push_str(&format!("<{name}>{}", escape(text.as_str())));
        for child in children {
            child.write(xml);
        }
        xml.push_str(&format!("</{name}>"));
    }

    pub(super) fn document(&self, namespace: &str) -> String {
        let mut xml = String::new();
        self.write(&mut xml);
        let head = format!("<{}", self.name);
        // The root's start tag comes first.
        let rest = xml.strip_prefix(&head).unwrap_or(&xml);
        format!("<?xml version=\"1.0\" encoding=\"UTF-8\"?>{head} xmlns=\"{namespace}\"{rest}")
    }
}

const CLOSED_TWICE: &str = "an element is closed twice";

fn innermost(open: &mut [Element]) -> anyhow::Result<&mut Element> {
    open.last_mut().context(CLOSED_TWICE)
}

/// A request, and the service and region that its signature covers.
struct Unsigned<'a> {
    service: &'a str,
    region: &'a str,
    method: &'a str,
    path: &'a str,
    query: &'a [(&'a str, &'a str)],
    content_type: &'a str,
    body: &'a str,
}

impl Unsigned<'_> {
    /// Signs a request to `endpoint` at this time.
    fn sign(&self, endpoint: &str, credentials: &Credentials) -> request::Builder {
        let host = endpoint
            .split_once("://")
            .map_or(endpoint, |(_, host)| host);
        // In alphabetical order, as the canonical request lists them (SigV4).
        let headers = [("content-type", self.content_type), ("host", host)];
        let mut uri = format!("{endpoint}{}", self.path);
        if !self.query.is_empty() {
            uri.push_str(&format!("?{}", encode_query(self.query)));
        }
        let mut builder = Request::builder().method(self.method).uri(uri);
        for (name, value) in headers {
            builder = builder.header(name, value);
        }
        let signer = Signer::new(credentials, self.region, self.service, SystemTime::now());
        let body = self.body.as_bytes();
        for (name, value) in signer.headers(self.method, self.path, self.query, &headers, body) {
            builder = builder.header(name, value);
        }
        builder
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn roles_are_assumed_for_an_hour() {
        let whole = "Action=AssumeRole&DurationSeconds=3600&RoleArn=arn%3Aaws%3Aiam%3A%3A1%3Arole%2Fdns&\
             RoleSessionName=bosh-dns-publish&Version=2011-06-15";
        let role = "arn:aws:iam::1:role/dns";
        assert_eq!(role_form("AssumeRole", role, None), whole);
        let with_token = role_form("AssumeRole", role, Some("a b"));
        assert!(
            with_token.contains("WebIdentityToken=a%20b"),
            "{with_token}"
        );
    }

    fn parse(text: &str) -> Element {
        Element::parse(text.as_bytes()).unwrap()
    }

    #[test]
    fn documents_are_read_as_trees() {
        let document = parse(
            "<?xml version=\"1.0\"?>\n<!-- c --><x:A xmlns=\"urn:x\">\n <B> t &amp; &#65;&lt; <![CDATA[<c>]]></B>\n <C/>\n \
             <D><E>1</E>lost<E>2</E></D>\n</x:A>\n",
        );
        let expected = Element::of(
            "A",
            [
                Element::text("B", " t & A< <c>"),
                Element::text("C", ""),
                Element::of("D", [Element::text("E", "1"), Element::text("E", "2")]),
            ],
        );
        assert_eq!(document, expected);
        assert_eq!(document.text_of("B"), "t & A< <c>");
        assert_eq!((document.text_of("C"), document.text_of("X")), ("", ""));
        let texts: Vec<&str> = document.list("D").map(|one| one.text.as_str()).collect();
        assert_eq!(texts, ["1", "2"]);
        assert_eq!(document.list("X").count(), 0);
        assert_eq!(document.find("E").map(|one| one.text.as_str()), Some("1"));
        assert_eq!(document.find("A"), Some(&document));
        assert_eq!(document.find("X"), None);
        assert_eq!(document.child("E"), None, "of a child");
    }

    #[test]
    fn broken_documents_are_refused() {
        let error = |text: &str| Element::parse(text.as_bytes()).unwrap_err().to_string();
        assert_eq!(error(""), "it has no element");
        assert_eq!(error("<a><b></b>"), "it is truncated");
        assert_eq!(error("<a>&x;</a>"), "unknown entity x");
        let nested = |depth: usize| "<a>".repeat(depth) + &"</a>".repeat(depth);
        assert!(Element::parse(nested(32).as_bytes()).is_ok());
        assert_eq!(error(&nested(33)), "elements are nested too deeply");
        assert!(Element::parse(b"<a></b>").is_err());
        assert!(Element::parse(b"</a>").is_err());
    }

    #[test]
    fn documents_carry_the_namespace() {
        let element = Element::of("A", [Element::text("B", "<&>"), Element::text("C", "")]);
        assert_eq!(
            element.document("urn:x"),
            "<?xml version=\"1.0\" encoding=\"UTF-8\"?><A xmlns=\"urn:x\"><B>&lt;&amp;&gt;</B><C></C></A>"
        );
    }

    #[test]
    fn shared_profiles_have_keys() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("credentials");
        fs::write(
            &file,
            "aws_access_key_id = none\n[default]\naws_access_key_id = id\n aws_secret_access_key=secret\n# x = y\n\
             [ other ]\naws_access_key_id = id2\naws_secret_access_key = secret2\naws_session_token = token2\n\
             region = here\n[empty]\naws_access_key_id = id3\naws_secret_access_key =\n[half\naws_secret_access_key = s\n",
        )
        .unwrap();
        for (profile, key_id, secret, token) in [
            ("default", "id", "secret", None),
            ("other", "id2", "secret2", Some("token2")),
        ] {
            let found = of_shared_file(&read_text(&file).unwrap(), &file, profile).unwrap();
            assert_eq!(
                (&*found.key_id, &*found.secret, found.token.as_deref()),
                (key_id, secret, token)
            );
        }
        for profile in ["none", "half"] {
            assert_eq!(
                of_shared_file(&read_text(&file).unwrap(), &file, profile)
                    .unwrap_err()
                    .to_string(),
                format!(
                    "{}: the profile {profile:?} has no access key; set AWS_PROFILE",
                    file.display()
                )
            );
        }
        let missing = read_text(Path::new("/nowhere/credentials")).unwrap_err();
        assert_eq!(
            missing.to_string(),
            "/nowhere/credentials: No such file or directory (os error 2)"
        );
    }

    #[test]
    fn requests_are_signed_for_their_host() {
        let credentials = Credentials {
            key_id: "ID".to_owned(),
            secret: "secret".to_owned(),
            token: Some("a-token".to_owned()),
        };
        let query = [("marker", "a b"), ("maxitems", "100")];
        let mut unsigned = Unsigned {
            service: "route53",
            region: "us-east-1",
            method: "POST",
            path: "/2013-04-01/hostedzone",
            query: &query,
            content_type: "text/xml",
            body: "<a/>",
        };
        let signed =
            |unsigned: &Unsigned<'_>, endpoint| unsigned.sign(endpoint, &credentials).body(());
        let request = signed(&unsigned, "https://route53.example.org:8443").unwrap();
        assert_eq!(request.method(), "POST");
        assert_eq!(
            request.uri().to_string(),
            "https://route53.example.org:8443/2013-04-01/hostedzone?marker=a%20b&maxitems=100"
        );
        let header = |name: &str| request.headers()[name].to_str().unwrap();
        assert_eq!(header("host"), "route53.example.org:8443");
        assert_eq!(header("content-type"), "text/xml");
        assert_eq!(header("x-amz-security-token"), "a-token");
        let authorization = header("authorization");
        assert!(
            authorization.starts_with("AWS4-HMAC-SHA256 Credential=ID/")
                && authorization.contains("/us-east-1/route53/aws4_request"),
            "{authorization}"
        );
        unsigned.query = &[];
        let request = signed(&unsigned, "http://h").unwrap();
        assert_eq!(request.uri().to_string(), "http://h/2013-04-01/hostedzone");
    }

    #[tokio::test]
    async fn broken_endpoint_is_named() {
        let parameters = [
            ("aws-endpoint", "http://a b"),
            ("aws-access-key-id", "ID"),
            ("aws-secret-access-key", "secret"),
        ];
        let parameters = parameters.map(|(name, value)| (name.to_owned(), value.to_owned()));
        let parameters = crate::provider::Parameters(parameters.into());
        let mut api = Api::new(AwsSettings::from_parameters(&parameters).unwrap()).unwrap();
        let error = api.pages("hostedzone", "1", &[]).await.unwrap_err();
        let shown = error.to_string();
        assert!(shown.starts_with("http://a b: invalid uri"), "{shown}");
    }

    #[tokio::test]
    async fn credentials_are_renewed_before_expiry() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("credentials");
        let text = "[default]\naws_access_key_id = new\naws_secret_access_key = secret\n";
        fs::write(&file, text).unwrap();
        let path = file.display().to_string();
        let name = "aws-shared-credentials-file".to_owned();
        let parameters = crate::provider::Parameters(BTreeMap::from([(name, path)]));
        let mut api = Api::new(AwsSettings::from_parameters(&parameters).unwrap()).unwrap();
        let known = Credentials {
            key_id: "known".to_owned(),
            secret: "secret".to_owned(),
            token: None,
        };
        // A round may use them for five minutes.
        for (minutes, expected) in [(6, "known"), (4, "new")] {
            let until = SystemTime::now() + Duration::from_mins(minutes);
            api.temporary = Some((known.clone(), until));
            assert_eq!(api.credentials().await.unwrap().key_id, expected);
        }
        let (_, until) = api.temporary.unwrap();
        let now = SystemTime::now();
        assert!(until > now + RENEWAL && until <= now + 2 * RENEWAL);
    }

    #[tokio::test]
    async fn rejected_credentials_are_renewed_at_once() {
        let error = |code: &str| format!("<E><Error><Code>{code}</Code></Error></E>");
        for (code, is_renewed) in [
            ("ExpiredToken", true),
            ("InvalidClientTokenId", true),
            ("SignatureDoesNotMatch", true),
            ("AccessDenied", false),
        ] {
            let server = crate::provider::tests::Scripted::new(&[(403, &error(code))]).await;
            let folder = tempfile::tempdir().unwrap();
            let file = folder.path().join("credentials");
            let text = "[default]\naws_access_key_id = a\naws_secret_access_key = secret\n";
            fs::write(&file, text).unwrap();
            let parameters = BTreeMap::from([
                (
                    "aws-shared-credentials-file".to_owned(),
                    file.display().to_string(),
                ),
                ("aws-endpoint".to_owned(), server.url.clone()),
            ]);
            let parameters = crate::provider::Parameters(parameters);
            let mut api = Api::new(AwsSettings::from_parameters(&parameters).unwrap()).unwrap();
            assert!(api.pages("hostedzone", "1", &[]).await.is_err());
            // Another program has replaced the keys.
            fs::write(&file, text.replace("= a", "= b")).unwrap();
            let used = api.credentials().await.unwrap().key_id;
            assert_eq!(used == "b", is_renewed, "{code}");
        }
    }
}
