//! Handlers that create, read, replace, delete and list resources.

use std::collections::BTreeMap;

use axum::{
    Json,
    http::{HeaderMap, StatusCode, header},
    response::{IntoResponse, Response},
};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::{
    documents::{Content, Document, DocumentId, DocumentStatus, Kind},
    status::ApiState,
    store::{Resource, StoreError, Write, Written},
    text::{self, Problem, Problems, Reader},
    update_record::{Intent, ListOwner, RecordList, UpdateRecord, is_identifier},
};

const BODY: &str = "body";

/// Collection selected by a path.
pub(super) enum Scope {
    /// All resources of a kind in a project.
    Project(Kind, String),
    /// The one list of an owner.
    List(ListOwner),
}

impl Scope {
    fn kind(&self) -> Kind {
        match self {
            Self::Project(kind, _) => *kind,
            Self::List(_) => Kind::List,
        }
    }

    fn id(&self, name: &str) -> DocumentId {
        match self {
            Self::Project(kind, project) => DocumentId {
                kind: *kind,
                namespace: project.clone(),
                name: name.to_owned(),
            },
            Self::List(owner) => DocumentId::of_list(owner),
        }
    }

    fn problem(&self) -> Option<String> {
        let parts: Vec<&str> = match self {
            Self::Project(_, project) => vec![project],
            Self::List(ListOwner::LogicalCloud { project, name }) => vec![project, name],
            Self::List(ListOwner::Cluster { provider, name }) => vec![provider, name],
        };
        // Parts of a path become parts of a file's name in the store.
        let bad = parts.into_iter().find(|part| !is_identifier(part))?;
        Some(format!(
            "{bad:?} in the path is not a valid name; use up to 63 letters, digits, dashes, dots and \
             underscores"
        ))
    }

    fn includes(&self, id: &DocumentId) -> bool {
        *id == self.id(&id.name)
    }

    /// Returns whether the collection may have a resource of this name.
    fn allows(&self, name: &str) -> bool {
        matches!(self, Self::Project(..)) || name == RecordList::NAME
    }
}

/// Part of a collection to list.
#[derive(Debug, Default, Deserialize)]
pub(super) struct Page {
    limit: Option<usize>,
    /// Name of the last item of the page before.
    after: Option<String>,
}

/// Preconditions of a request (RFC 9110, section 13.1): entity tags, or `*`.
#[derive(Debug, Default)]
pub(super) struct Preconditions {
    matching: Option<String>,
    none_matching: Option<String>,
}

impl Preconditions {
    pub(super) fn of(headers: &HeaderMap) -> Self {
        Self {
            matching: joined(headers, header::IF_MATCH),
            none_matching: joined(headers, header::IF_NONE_MATCH),
        }
    }

    /// Returns whether a request may be carried out on a resource, if it exists.
    fn hold(&self, resource: Option<&Resource>) -> bool {
        let is_expected = match &self.matching {
            Some(tags) => are_of(tags, resource),
            None => true,
        };
        is_expected && !self.is_known(resource)
    }

    fn is_known(&self, resource: Option<&Resource>) -> bool {
        match &self.none_matching {
            Some(tags) => are_of(tags, resource),
            None => false,
        }
    }
}

/// Returns the values of a header as one list (RFC 9110, section 5.3).
fn joined(headers: &HeaderMap, name: header::HeaderName) -> Option<String> {
    let mut values = Vec::new();
    for value in headers.get_all(name) {
        // The tags of resources are ASCII, so another value matches none of them.
        values.extend(value.to_str().ok());
    }
    if values.is_empty() {
        return None;
    }
    Some(values.join(","))
}

/// Returns whether one of several tags is a resource's.
fn are_of(tags: &str, resource: Option<&Resource>) -> bool {
    // Not even `*` matches a resource that does not exist (RFC 9110, section 13.1).
    let Some(resource) = resource else {
        return false;
    };
    let tag = resource.tag();
    let mut tags = tags.split(',').map(str::trim);
    // Proxies weaken tags when they compress a response; the resource is the same.
    tags.any(|name| name == "*" || name.trim_start_matches("W/") == tag)
}

/// Lists a collection: documents of the folder and stored resources, sorted by name. A further page
/// is linked (RFC 8288).
pub(super) fn list(api_state: &ApiState, scope: &Scope, path: &str, page: &Page) -> Response {
    let mut found = BTreeMap::new();
    // Sorted by a map, so that `after` continues where the last page ended although resources were
    // added or removed.
    for (id, body) in bodies(api_state, |id| scope.includes(id)) {
        if page.after.as_ref().is_none_or(|after| id.name > *after) {
            found.insert(id, body);
        }
    }
    let mut rest = found.into_iter().peekable();
    let mut items = Vec::new();
    let mut last = None;
    // A page of no items would look like the end of the collection.
    for (id, body) in rest.by_ref().take(page.limit.unwrap_or(usize::MAX).max(1)) {
        items.push(with_status(body, api_state.status_of(&id)));
        last = Some(id.name);
    }
    let mut response = Json(items).into_response();
    if let (Some(last), Some(_), Some(limit)) = (last, rest.peek(), page.limit) {
        let after: String = url::form_urlencoded::byte_serialize(last.as_bytes()).collect();
        set(
            &mut response,
            header::LINK,
            &format!("<{path}?limit={limit}&after={after}>; rel=\"next\""),
        );
    }
    response
}

fn set(response: &mut Response, name: header::HeaderName, value: &str) {
    // Paths and tags are valid in headers.
    if let Ok(value) = value.parse() {
        response.headers_mut().insert(name, value);
    }
}

/// Writes a resource: creates the one in the body, or with a `name` replaces or creates that one. `path` is the
/// collection's.
pub(super) fn write(
    api_state: &ApiState,
    scope: &Scope,
    (path, name): (&str, Option<&str>),
    body: &[u8],
    preconditions: &Preconditions,
) -> Response {
    if let Some(problem) = scope.problem() {
        return refusal(StatusCode::BAD_REQUEST, &problem);
    }
    let (own, line, body) = match parse(scope.kind(), body) {
        Ok(parsed) => parsed,
        Err(problems) => return reply_with(StatusCode::BAD_REQUEST, problems),
    };
    // A PUT under another name would create a resource that the path does not lead to.
    if let Some(name) = name.filter(|name| *name != own) {
        let reason = format!("{own:?} differs from {name:?} in the path");
        let remedy = "write the same name in both places; a resource cannot be renamed";
        let problem = Problem::new(BODY, line, "metadata.name", reason, remedy);
        return reply_with(StatusCode::BAD_REQUEST, vec![problem]);
    }
    let id = scope.id(&own);
    // Two definitions of one document would be a problem in every scan.
    if let Some(file) = api_state.file_of(&id) {
        return conflict(&format!(
            "{id} is defined by the document {file}; change it there"
        ));
    }
    let how = if name.is_some() {
        Write::Put
    } else {
        Write::Create
    };
    match api_state
        .store
        .write(&id, body, how, &|before| preconditions.hold(before))
    {
        Ok((Written::Exists, _)) => conflict(&format!(
            "{id} exists; replace it with PUT, or choose another name"
        )),
        Ok((Written::Unmet, _)) => unmet(&id),
        Ok((written, resource)) => {
            api_state.change.notify_one();
            let mut response = acknowledgement(written, resource);
            // The path names the collection, so the client has to learn the new one's (RFC 9110, section 15.3.2).
            if name.is_none() {
                let location = format!("{}/{own}", path.trim_end_matches('/'));
                set(&mut response, header::LOCATION, &location);
            }
            response
        }
        Err(error) => failure(&error),
    }
}

fn acknowledgement(written: Written, resource: Resource) -> Response {
    let code = if written == Written::Created {
        StatusCode::CREATED
    } else {
        StatusCode::OK
    };
    let tag = resource.tag();
    let mut response = (code, Json(resource.body)).into_response();
    set(&mut response, header::ETAG, &tag);
    response
}

pub(super) fn read(
    api_state: &ApiState,
    scope: &Scope,
    name: &str,
    preconditions: &Preconditions,
) -> Response {
    let id = scope.id(name);
    let mut found = api_state.store.get(&id);
    for document in api_state.documents() {
        if document.id == id
            && let Some(body) = document_body(&document)
        {
            found = Some(Resource {
                id: id.clone(),
                // No stored resource has it, so a tag of a document never equals one of the store.
                generation: 0,
                body,
            });
        }
    }
    match found {
        Some(resource) if scope.allows(name) => {
            let tag = resource.tag();
            // A known version is answered by 304, and any other condition that does not hold by 412 (RFC 9110,
            // section 13.1).
            let mut response = if preconditions.is_known(Some(&resource)) {
                StatusCode::NOT_MODIFIED.into_response()
            } else if !preconditions.hold(Some(&resource)) {
                unmet(&id)
            } else {
                Json(with_status(resource.body, api_state.status_of(&id))).into_response()
            };
            set(&mut response, header::ETAG, &tag);
            response
        }
        _ => missing(&id),
    }
}

/// Deletes a resource. Its published records stay in their zones; `retire` deletes them.
pub(super) fn delete(
    api_state: &ApiState,
    scope: &Scope,
    name: &str,
    preconditions: &Preconditions,
) -> Response {
    let id = scope.id(name);
    if !scope.allows(name) {
        return missing(&id);
    }
    if let Some(file) = api_state.file_of(&id) {
        return conflict(&format!(
            "{id} is defined by the document {file}; remove it there"
        ));
    }
    // A list that names a missing record holds back its intents.
    if let Some(list) = user_of(api_state, &id) {
        return conflict(&format!(
            "{id} is named in {list}; remove it from that list first"
        ));
    }
    match api_state
        .store
        .delete(&id, &|before| preconditions.hold(before))
    {
        Ok(Written::Deleted) => {
            api_state.change.notify_one();
            StatusCode::NO_CONTENT.into_response()
        }
        Ok(Written::Unmet) => unmet(&id),
        Ok(_) => missing(&id),
        Err(error) => failure(&error),
    }
}

/// Returns the bodies of some stored resources, then of documents, which win over a resource of the same id.
fn bodies(
    api_state: &ApiState,
    includes: impl Fn(&DocumentId) -> bool,
) -> Vec<(DocumentId, Value)> {
    let mut found = Vec::new();
    for resource in api_state.store.all() {
        if includes(&resource.id) {
            found.push((resource.id, resource.body));
        }
    }
    for document in api_state.documents() {
        if includes(&document.id)
            && let Some(body) = document_body(&document)
        {
            found.push((document.id, body));
        }
    }
    found
}

fn user_of(api_state: &ApiState, id: &DocumentId) -> Option<DocumentId> {
    if id.kind != Kind::UpdateRecord {
        return None;
    }
    let lists = bodies(api_state, |list: &DocumentId| {
        // The list of a cluster may apply to any project.
        list.kind == Kind::List && (list.namespace.is_empty() || list.namespace == id.namespace)
    });
    for (list, body) in lists {
        let pairs = body["spec"]["kv"].as_array().into_iter().flatten();
        for (_, record) in pairs.filter_map(Value::as_object).flatten() {
            if record.as_str() == Some(&id.name) {
                return Some(list);
            }
        }
    }
    None
}

/// Parses a body. Returns the resource's name, its line, and the body in normal form.
fn parse(kind: Kind, body: &[u8]) -> Result<(String, u64, Value), Vec<Problem>> {
    let problems = Problems::of(BODY);
    let text = std::str::from_utf8(body).unwrap_or_default();
    let parsed = match text::documents(text)[..] {
        [document] => text::parse(document, &problems),
        _ => None,
    };
    let Some(node) = parsed else {
        if problems.count() == 0 {
            problems.add(
                1,
                "",
                "the body is not a single JSON object",
                "send {\"metadata\": ..., \"spec\": ...}",
            );
        }
        return Err(problems.into_vec());
    };
    let found = read_spec(kind, &Reader::root(&node, &problems));
    let problems = problems.into_vec();
    match found {
        Some(body) if problems.is_empty() => {
            // `read_spec` requires the name.
            let name = body["metadata"]["name"].as_str().unwrap_or_default();
            Ok((name.to_owned(), node.line, body))
        }
        _ => Err(problems),
    }
}

/// Returns a resource of this kind in normal form.
fn read_spec(kind: Kind, root: &Reader<'_>) -> Option<Value> {
    let mut fields = root.fields()?;
    // A client may send back a body it has read, which includes the status.
    drop(fields.optional("status"));
    let found = match kind {
        Kind::UpdateRecord => UpdateRecord::read(&mut fields).map(|record| record.to_json()),
        Kind::List => RecordList::read(&mut fields).map(|list| list.to_json()),
        Kind::Intent => Intent::read(&mut fields).map(|intent| intent.to_json()),
        // No collection contains these kinds.
        Kind::Endpoint | Kind::Fleet => None,
    };
    fields.finish();
    found
}

fn document_body(document: &Document) -> Option<Value> {
    match document.content.as_ref()? {
        Content::UpdateRecord(record) => Some(record.to_json()),
        Content::List(_, list) => Some(list.to_json()),
        Content::Intent(intent) => Some(intent.to_json()),
        Content::Endpoints(_) | Content::Fleet(_) => None,
    }
}

fn with_status(mut body: Value, status: Option<DocumentStatus>) -> Value {
    if let Some(status) = status {
        let DocumentStatus {
            id: _,
            observed_generation,
            digest: _,
            providers,
            last_error,
            remarks,
        } = status;
        let is_published = providers.values().all(|result| result.synced);
        let problems: Vec<&String> = last_error
            .iter()
            .chain(providers.values().flat_map(|result| &result.problems))
            .collect();
        body["status"] = json!({
            "observedGeneration": observed_generation,
            "ready": is_published && problems.is_empty(),
            "problems": problems,
            "remarks": remarks,
        });
    }
    body
}

fn conflict(reason: &str) -> Response {
    refusal(StatusCode::CONFLICT, reason)
}

fn unmet(id: &DocumentId) -> Response {
    let reason =
        format!("{id} has another version than If-Match or If-None-Match allows; read it again");
    refusal(StatusCode::PRECONDITION_FAILED, &reason)
}

fn missing(id: &DocumentId) -> Response {
    refusal(
        StatusCode::NOT_FOUND,
        &format!("{id} does not exist; list the collection"),
    )
}

fn reply_with(code: StatusCode, problems: Vec<Problem>) -> Response {
    (code, Json(json!({ "problems": problems }))).into_response()
}

/// Returns an error response that refers to no position in the body.
pub(super) fn refusal(code: StatusCode, reason: &str) -> Response {
    // Messages are written as "cause; remedy", which every problem of the API has apart.
    let (reason, remedy) = reason.split_once("; ").unwrap_or((reason, ""));
    reply_with(code, vec![Problem::new(BODY, 1, "", reason, remedy)])
}

fn failure(error: &StoreError) -> Response {
    tracing::error!(%error, "the store failed; the change was not made");
    refusal(
        StatusCode::INTERNAL_SERVER_ERROR,
        &format!("{error}; check the log and the disk"),
    )
}
