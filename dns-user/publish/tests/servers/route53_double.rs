//! A double of Route 53, from its documentation, that is strict where moto is not: it checks
//! signatures, the limits of a batch, exact deletions and CNAMEs beside other sets; a batch
//! is applied as a whole, and calls can be throttled.

use std::{
    collections::{BTreeMap, BTreeSet},
    convert::Infallible,
    sync::{Arc, Mutex, PoisonError},
    time::Instant,
};

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper::{Request, Response, StatusCode, body::Incoming, service::service_fn};
use hyper_util::rt::TokioIo;
use ring::{digest, hmac};
use tokio::{net::TcpListener, task::JoinHandle};

pub(crate) const KEY_ID: &str = "AKIDDOUBLE";
pub(crate) const SECRET: &str = "double/secret";

/// State of the double.
#[derive(Default)]
pub(crate) struct State {
    /// Hosted zones: id, apex, private, and sets by name, type and identifier.
    pub(crate) zones: Vec<(String, String, bool, Sets)>,
    /// Calls that will be throttled.
    pub(crate) throttle: usize,
    /// Times of change batches.
    pub(crate) batches: Vec<Instant>,
    /// Keys that the last call was signed with.
    pub(crate) signed_by: BTreeSet<String>,
    /// Sets in a page.
    pub(crate) page: usize,
}

type SetKey = (String, String, String);
type Sets = BTreeMap<SetKey, String>;

pub(crate) struct Double {
    pub(crate) url: String,
    pub(crate) state: Arc<Mutex<State>>,
    task: JoinHandle<()>,
}

impl Double {
    pub(crate) async fn start(zones: &[(&str, &str, bool)]) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let zones = zones.iter().map(|(id, apex, private)| {
            ((*id).to_owned(), (*apex).to_owned(), *private, Sets::new())
        });
        let state = Arc::new(Mutex::new(State {
            zones: zones.collect(),
            page: 300,
            ..State::default()
        }));
        let shared = state.clone();
        let task = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let state = shared.clone();
                tokio::spawn(async move {
                    let service = service_fn(|request| answer(state.clone(), request));
                    // The client may close the connection at any time.
                    let _ = hyper::server::conn::http1::Builder::new()
                        .serve_connection(TokioIo::new(stream), service)
                        .await;
                });
            }
        });
        Self { url, state, task }
    }

    /// Runs `work` on the state.
    pub(crate) fn with<T>(&self, work: impl FnOnce(&mut State) -> T) -> T {
        work(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Drop for Double {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn answer(
    state: Arc<Mutex<State>>,
    request: Request<Incoming>,
) -> Result<Response<Full<Bytes>>, Infallible> {
    let (head, body) = request.into_parts();
    let body = body
        .collect()
        .await
        .map(|body| body.to_bytes())
        .unwrap_or_default();
    if let Some(text) = metadata(&head) {
        return Ok(Response::new(Full::new(Bytes::from(text))));
    }
    let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
    // A web identity proves itself by its token.
    let form = String::from_utf8_lossy(&body).into_owned();
    if form.contains("Action=AssumeRoleWithWebIdentity")
        && form.contains("WebIdentityToken=identity-token")
    {
        let text = state.answer("POST", "/", "", &form).unwrap_or_default();
        return Ok(Response::new(Full::new(Bytes::from(text))));
    }
    let answered = check_signature(&head, &body).and_then(|key| {
        state.signed_by.insert(key);
        let text = String::from_utf8(body.to_vec()).unwrap();
        state.answer(
            head.method.as_str(),
            head.uri.path(),
            head.uri.query().unwrap_or(""),
            &text,
        )
    });
    let (status, text) = match answered {
        Ok(text) => (StatusCode::OK, text),
        Err((code, messages)) => (StatusCode::BAD_REQUEST, failure(&code, &messages)),
    };
    Ok(Response::builder()
        .status(status)
        .body(Full::new(Bytes::from(text)))
        .unwrap())
}

/// Answers as a machine's metadata service does (IMDSv2).
fn metadata(head: &hyper::http::request::Parts) -> Option<String> {
    let path = head.uri.path().strip_prefix("/latest/")?;
    let has = |name: &str, value: &str| head.headers.get(name).is_some_and(|found| found == value);
    let profile = "meta-data/iam/security-credentials/";
    match (head.method.as_str(), path) {
        ("PUT", "api/token")
            if head
                .headers
                .contains_key("x-aws-ec2-metadata-token-ttl-seconds") =>
        {
            Some("imds".to_owned())
        }
        ("GET", path) if path == profile && has("x-aws-ec2-metadata-token", "imds") => {
            Some("publisher".to_owned())
        }
        ("GET", path)
            if path == format!("{profile}publisher") && has("x-aws-ec2-metadata-token", "imds") =>
        {
            Some(format!(
                r#"{{"Code":"Success","AccessKeyId":"ASIAROLE","SecretAccessKey":"{SECRET}","Token":"token","Expiration":"2999-01-01T00:00:00Z"}}"#
            ))
        }
        _ => None,
    }
}

/// Code and messages of an error.
type Failure = (String, Vec<String>);

fn failure(code: &str, messages: &[String]) -> String {
    let list: String = messages
        .iter()
        .map(|message| format!("<Message>{message}</Message>"))
        .collect();
    if code == "InvalidChangeBatch" {
        return format!("<InvalidChangeBatch><Messages>{list}</Messages></InvalidChangeBatch>");
    }
    format!("<ErrorResponse><Error><Code>{code}</Code>{list}</Error></ErrorResponse>")
}

impl State {
    fn answer(
        &mut self,
        method: &str,
        path: &str,
        query: &str,
        body: &str,
    ) -> Result<String, Failure> {
        if self.throttle > 0 {
            self.throttle -= 1;
            return Err(("Throttling".to_owned(), vec!["Rate exceeded".to_owned()]));
        }
        if body.contains("Action=AssumeRole") {
            return Ok(format!(
                "<AssumeRoleResponse><AssumeRoleResult><Credentials><AccessKeyId>ASIAROLE</AccessKeyId>\
                 <SecretAccessKey>{SECRET}</SecretAccessKey><SessionToken>token</SessionToken>\
                 </Credentials></AssumeRoleResult></AssumeRoleResponse>"
            ));
        }
        let parts: Vec<&str> = path.trim_start_matches("/2013-04-01/").split('/').collect();
        match (method, &parts[..]) {
            ("GET", ["hostedzone"]) => Ok(self.list_zones()),
            ("POST", ["tags", "hostedzone"]) => Ok(self.tags(body)),
            ("GET", ["hostedzone", id, "rrset"]) => Ok(self.list_sets(id, query)),
            ("POST", ["hostedzone", id, "rrset"]) => self.change(id, body),
            _ => Err(("NoSuchOperation".to_owned(), vec![path.to_owned()])),
        }
    }

    fn list_zones(&self) -> String {
        let zone = |(id, apex, private, _): &(String, String, bool, Sets)| {
            format!(
                "<HostedZone><Id>/hostedzone/{id}</Id><Name>{apex}.</Name>\
                 <Config><PrivateZone>{private}</PrivateZone></Config></HostedZone>"
            )
        };
        let zones: String = self.zones.iter().map(zone).collect();
        format!(
            "<ListHostedZonesResponse><HostedZones>{zones}</HostedZones>\
             <IsTruncated>false</IsTruncated></ListHostedZonesResponse>"
        )
    }

    /// Every zone has the tag `zone` with its id.
    fn tags(&self, body: &str) -> String {
        let ids = all(body, "ResourceId");
        assert!(ids.len() <= 10, "ListTagsForResources takes 10 zones");
        let set = |id: &String| {
            format!(
                "<ResourceTagSet><ResourceId>{id}</ResourceId><Tags><Tag><Key>zone</Key><Value>{id}</Value></Tag>\
                 </Tags></ResourceTagSet>"
            )
        };
        let sets: String = ids.iter().map(set).collect();
        format!(
            "<ListTagsForResourcesResponse><ResourceTagSets>{sets}</ResourceTagSets></ListTagsForResourcesResponse>"
        )
    }

    fn sets(&mut self, id: &str) -> &mut Sets {
        &mut self.zones.iter_mut().find(|zone| zone.0 == id).unwrap().3
    }

    fn list_sets(&mut self, id: &str, query: &str) -> String {
        let page = self.page;
        let parameter = |name: &str| {
            let pair = query
                .split('&')
                .find_map(|pair| pair.strip_prefix(&format!("{name}=")));
            pair.unwrap_or("").to_owned()
        };
        let start = (
            parameter("name").replace("%2A", "*"),
            parameter("type"),
            parameter("identifier"),
        );
        let from = self.sets(id).range(start..);
        let taken: Vec<(SetKey, String)> = from
            .take(page + 1)
            .map(|(key, set)| (key.clone(), set.clone()))
            .collect();
        let sets: String = taken
            .iter()
            .take(page)
            .map(|(_, set)| set.replace("<Name>*.", "<Name>\\052."))
            .collect();
        let next = taken.get(page).map(|((name, record_type, identifier), _)| {
            format!(
                "<IsTruncated>true</IsTruncated><NextRecordName>{name}</NextRecordName>\
                 <NextRecordType>{record_type}</NextRecordType>\
                 <NextRecordIdentifier>{identifier}</NextRecordIdentifier>"
            )
        });
        let next = next.unwrap_or_else(|| "<IsTruncated>false</IsTruncated>".to_owned());
        format!(
            "<ListResourceRecordSetsResponse><ResourceRecordSets>{sets}</ResourceRecordSets>{next}\
             </ListResourceRecordSetsResponse>"
        )
    }

    fn change(&mut self, id: &str, body: &str) -> Result<String, Failure> {
        self.batches.push(Instant::now());
        let changes = all(body, "Change");
        let values: usize = changes
            .iter()
            .map(|change| all(change, "Value").len())
            .sum();
        let values_of = |change: &String| {
            all(change, "Value")
                .into_iter()
                .map(|value| value.replace("&quot;", "\""))
        };
        let characters: usize = changes
            .iter()
            .flat_map(values_of)
            .map(|value| value.len())
            .sum();
        let invalid = |message: String| ("InvalidChangeBatch".to_owned(), vec![message]);
        if changes.len() > 1_000 || values > 1_000 || characters > 32_000 {
            return Err((
                "InvalidInput".to_owned(),
                vec!["the batch exceeds a limit".to_owned()],
            ));
        }
        let mut after = self.sets(id).clone();
        for change in &changes {
            let set = one(change, "ResourceRecordSet").replace("<Name>\\052.", "<Name>*.");
            let set = format!("<ResourceRecordSet>{set}</ResourceRecordSet>");
            let key = (
                one(&set, "Name"),
                one(&set, "Type"),
                one(&set, "SetIdentifier"),
            );
            let about = format!("resource record set [name='{}', type='{}']", key.0, key.1);
            match one(change, "Action").as_str() {
                "CREATE" if after.contains_key(&key) => {
                    return Err(invalid(format!(
                        "Tried to create {about} but it already exists"
                    )));
                }
                "CREATE" => {
                    after.insert(key, set);
                }
                "DELETE" => match after.get(&key) {
                    None => {
                        return Err(invalid(format!(
                            "Tried to delete {about} but it was not found"
                        )));
                    }
                    Some(here) if *here != set => {
                        return Err(invalid(format!(
                            "Tried to delete {about} but the values provided do not match the current values"
                        )));
                    }
                    Some(_) => {
                        after.remove(&key);
                    }
                },
                other => return Err(("InvalidInput".to_owned(), vec![format!("action {other}")])),
            }
        }
        for (name, record_type, _) in after.keys().filter(|key| key.1 == "CNAME") {
            if after
                .keys()
                .any(|other| other.0 == *name && other.1 != *record_type)
            {
                return Err(invalid(format!(
                    "RRSet of type CNAME with DNS name {name} is not permitted"
                )));
            }
        }
        *self.sets(id) = after;
        Ok(
            "<ChangeResourceRecordSetsResponse><ChangeInfo><Status>PENDING</Status></ChangeInfo>\
            </ChangeResourceRecordSetsResponse>"
                .to_owned(),
        )
    }
}

/// Returns the content of all elements of a name, which do not nest.
fn all(xml: &str, name: &str) -> Vec<String> {
    let (open, close) = (format!("<{name}>"), format!("</{name}>"));
    xml.split(&open)
        .skip(1)
        .filter_map(|rest| rest.split_once(&close))
        .map(|(text, _)| text.to_owned())
        .collect()
}

fn one(xml: &str, name: &str) -> String {
    all(xml, name).into_iter().next().unwrap_or_default()
}

/// Checks the signature (AWS General Reference, "Signature Version 4"), and returns the key
/// id.
fn check_signature(head: &hyper::http::request::Parts, body: &[u8]) -> Result<String, Failure> {
    let denied = |reason: &str| ("SignatureDoesNotMatch".to_owned(), vec![reason.to_owned()]);
    let header = |name: &str| {
        head.headers
            .get(name)
            .and_then(|value| value.to_str().ok())
            .unwrap_or("")
    };
    let authorization = header("authorization");
    let part = |name: &str| {
        let rest = authorization
            .split_once(&format!("{name}="))
            .map_or("", |(_, rest)| rest);
        rest.split(',').next().unwrap_or("").to_owned()
    };
    let (credential, names, signature) =
        (part("Credential"), part("SignedHeaders"), part("Signature"));
    let mut scope = credential.splitn(2, '/');
    let (key_id, scope) = (
        scope.next().unwrap_or("").to_owned(),
        scope.next().unwrap_or("").to_owned(),
    );
    if !["host", "x-amz-date"]
        .iter()
        .all(|needed| names.split(';').any(|name| name == *needed))
    {
        return Err(denied("host and x-amz-date must be signed"));
    }
    if key_id == "ASIAROLE" && header("x-amz-security-token") != "token" {
        return Err(denied("temporary keys need their token"));
    }
    let mut query: Vec<&str> = head
        .uri
        .query()
        .unwrap_or("")
        .split('&')
        .filter(|pair| !pair.is_empty())
        .collect();
    query.sort_unstable();
    let hex =
        |octets: &[u8]| -> String { octets.iter().map(|octet| format!("{octet:02x}")).collect() };
    let hash = |octets: &[u8]| hex(digest::digest(&digest::SHA256, octets).as_ref());
    let mut canonical = format!(
        "{}\n{}\n{}\n",
        head.method,
        head.uri.path(),
        query.join("&")
    );
    for name in names.split(';') {
        canonical.push_str(&format!("{name}:{}\n", header(name)));
    }
    canonical.push_str(&format!("\n{names}\n{}", hash(body)));
    let text = format!(
        "AWS4-HMAC-SHA256\n{}\n{scope}\n{}",
        header("x-amz-date"),
        hash(canonical.as_bytes())
    );
    let mut key = format!("AWS4{SECRET}").into_bytes();
    for part in scope.split('/').chain([text.as_str()]) {
        key = hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, &key), part.as_bytes())
            .as_ref()
            .to_vec();
    }
    let known = key_id == KEY_ID || key_id == "ASIAROLE";
    if known && hex(&key) == signature {
        Ok(key_id)
    } else {
        Err(denied("the signature differs"))
    }
}
