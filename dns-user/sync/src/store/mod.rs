//! Blobstores: a folder, WebDAV, S3, JetStream's object store.
//!
//! JetStream's object store needs more permissions than a director grants: `nats-config
//! --jetstream` grants agents direct reads of the bucket, but no consumers.

use std::{
    fmt, fs, io,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, SystemTime},
};

use async_nats::jetstream::{
    self,
    object_store::{Config, ObjectInfo},
};
use base64::{Engine, engine::general_purpose::URL_SAFE};
use bytes::Bytes;
use dns_kit::{
    aws_signature::{Credentials, Signer},
    files::{
        atomic::{self, Attributes},
        bounded,
    },
    http_client::{ClientError, HttpClient, Limits},
    percent_encoded,
};
use hyper::Method;
use serde::Deserialize;
use serde_json::{Map, Value};
use tokio::sync::Semaphore;
use url::Url;

use crate::{
    bus::Bus,
    http::{self, HttpCall, HttpError},
};

/// Default of `--longest-blob`, in bytes; a dataset of 10,000 instances has 2.6 MB.
pub const MAX_BLOB: usize = 64 << 20;

/// Maximum size of a response to PUT and DELETE, in bytes.
const MAX_ANSWER: usize = 1 << 20;

/// Maximum number of concurrent calls to a shared folder, which may hang.
const FOLDER_CALLS: usize = 4;

/// Location of the blobs.
#[derive(Clone, Debug, clap::Args)]
pub struct StoreOptions {
    /// Blobstore: file:///FOLDER, https://HOST/PATH (WebDAV), s3+https://HOST/BUCKET?region=R (&style=virtual-host), nats:BUCKET (JetStream)
    #[arg(long, value_name = "URL")]
    pub blobstore: Option<String>,
    /// JSON file with the credentials that the blobstore needs: "user", "password", "signing_secret",
    /// "access_key", "secret_key"
    #[arg(long, value_name = "FILE")]
    pub blobstore_credentials: Option<PathBuf>,
    /// PEM file of the CA that signed the blobstore's certificate
    #[arg(long, value_name = "FILE")]
    pub blobstore_ca: Option<PathBuf>,
    /// Time limit for one attempt to get or put a blob, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    pub blobstore_timeout: u64,
    /// Maximum size of a blob in bytes, before and after decompression
    #[arg(long, value_name = "BYTES", default_value_t = MAX_BLOB)]
    pub longest_blob: usize,
}

/// Content of the credentials file.
#[derive(Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Secrets {
    user: Option<String>,
    password: Option<String>,
    /// Secret for signed WebDAV links; if set, links are signed.
    signing_secret: Option<String>,
    access_key: Option<String>,
    secret_key: Option<String>,
}

impl fmt::Debug for Secrets {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("Secrets(not shown)")
    }
}

/// Client of a blobstore of any kind.
#[derive(Clone, Debug)]
pub struct Store {
    kind: Kind,
    /// Used for HTTP stores, and for signed URLs with any store.
    http: HttpClient,
    /// Timeout of one attempt.
    limit: Duration,
    pub(crate) longest: usize,
    /// Permits for calls to a folder; a call that hangs keeps its permit.
    folder_calls: Arc<Semaphore>,
}

#[derive(Clone, Debug)]
enum Kind {
    /// No store is configured: only signed URLs work.
    None,
    /// A folder shared by all machines.
    Folder(PathBuf),
    Http(Remote),
    JetStream(Objects),
}

/// A store that speaks HTTP.
#[derive(Clone, Debug)]
enum Remote {
    Dav {
        /// URL without trailing slash.
        endpoint: String,
        /// Credentials for basic authentication and signatures.
        secrets: Secrets,
    },
    /// S3 or a compatible store.
    S3(Box<S3>),
}

impl Remote {
    /// Returns the URL for a request about a blob.
    fn url(&self, method: &Method, id: &str, good_for: Duration) -> String {
        match self {
            Self::Dav { endpoint, .. } => format!("{endpoint}/{}", http::blob_path(id)),
            Self::S3(s3) => s3.url(method, id, SystemTime::now(), good_for).into(),
        }
    }

    /// Returns user and password for basic authentication. The URLs of S3 are signed instead.
    fn basic(&self) -> Option<(&str, &str)> {
        match self {
            Self::Dav { secrets, .. } => {
                let password = secrets.password.as_deref().unwrap_or_default();
                Some((secrets.user.as_deref()?, password))
            }
            Self::S3(_) => None,
        }
    }
}

/// A bucket of S3 or of a compatible store.
#[derive(Clone, Debug)]
struct S3 {
    /// URL of the bucket.
    bucket: Url,
    region: String,
    /// Keys for signatures; `None` for anonymous access.
    credentials: Option<Credentials>,
}

impl S3 {
    /// Parses the URL after `s3+`; an error is the problem.
    fn parse(text: &str, credentials: Option<Credentials>) -> Result<Self, String> {
        let mut bucket = Url::parse(text).map_err(|error| error.to_string())?;
        let name = bucket.path().trim_matches('/').to_owned();
        if name.is_empty() || name.contains('/') {
            return Err("the path must be the bucket's name".to_owned());
        }
        let mut region = "us-east-1".to_owned();
        let mut is_virtual_host = false;
        for (member, value) in bucket.query_pairs() {
            match (&*member, &*value) {
                ("region", _) => region = value.into_owned(),
                ("style", "path") => is_virtual_host = false,
                ("style", "virtual-host") => is_virtual_host = true,
                ("style", _) => return Err("style must be path or virtual-host".to_owned()),
                _ => {}
            }
        }
        // The options are ours; in a signed URL they would be part of the signature.
        bucket.set_query(None);
        bucket.set_path(&name);
        if is_virtual_host {
            let host = format!("{name}.{}", bucket.host_str().unwrap_or_default());
            bucket
                .set_host(Some(&host))
                .map_err(|error| error.to_string())?;
            bucket.set_path("");
        }
        Ok(Self {
            bucket,
            region,
            credentials,
        })
    }

    /// Returns the URL of a blob, signed at `now` if there are keys.
    fn url(&self, method: &Method, id: &str, now: SystemTime, good_for: Duration) -> Url {
        let mut url = self.bucket.clone();
        url.set_path(&format!(
            "{}/{}",
            self.bucket.path().trim_end_matches('/'),
            // SigV4 signs S3's path as it is sent, with slashes.
            percent_encoded(id).replace("%2F", "/")
        ));
        match &self.credentials {
            Some(credentials) => Signer::new(credentials, &self.region, "s3", now).url(
                method.as_str(),
                url,
                good_for,
            ),
            None => url,
        }
    }
}

/// Errors of a blobstore.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum StoreError {
    #[error("{0}")]
    Options(String),
    #[error(transparent)]
    Tls(#[from] http::TlsError),
    #[error(transparent)]
    Http(#[from] HttpError),
    #[error("{}: {cause}", path.display())]
    File { path: PathBuf, cause: io::Error },
    #[error(transparent)]
    Replace(#[from] atomic::ReplaceError),
    #[error("JetStream: {0}")]
    JetStream(String),
    #[error("the blob {blob} is longer than {longest} bytes (--longest-blob)")]
    TooLong { blob: String, longest: usize },
    #[error(
        "{}: not finished within {limit:?}, the folder does not respond; if it is mounted, check its server, or \
         unmount it with `umount --lazy`", path.display()
    )]
    Hangs { path: PathBuf, limit: Duration },
}

impl StoreError {
    fn in_file(path: &Path) -> impl Fn(io::Error) -> Self {
        move |cause| Self::File {
            path: path.to_owned(),
            cause,
        }
    }

    /// Returns whether a retry can succeed.
    pub fn is_worth_retrying(&self) -> bool {
        match self {
            Self::Options(_) | Self::Tls(_) => false,
            // The content of a blob never changes, so it stays too long.
            Self::TooLong { .. } => false,
            Self::File { cause, .. } => cause.kind() != io::ErrorKind::FileTooLarge,
            Self::Http(HttpError::Exchange { cause, .. }) => {
                !matches!(cause, ClientError::TooLong(_))
            }
            Self::Http(_) | Self::Replace(_) | Self::JetStream(_) | Self::Hangs { .. } => true,
        }
    }
}

impl Store {
    /// Opens a blobstore; `bus` is needed for JetStream.
    pub fn open(options: &StoreOptions, bus: Option<&Bus>) -> Result<Self, StoreError> {
        let StoreOptions {
            blobstore,
            blobstore_credentials,
            blobstore_ca,
            blobstore_timeout,
            longest_blob,
        } = options;
        let secrets = match blobstore_credentials {
            Some(path) => read_secrets(path)?,
            None => Secrets::default(),
        };
        let tls = http::anonymous_client(blobstore_ca.as_deref())?;
        let kind = match blobstore.as_deref() {
            None => Kind::None,
            Some(text) => Kind::parse(text, secrets, bus)?,
        };
        Ok(Self {
            kind,
            // There is one connection per version; idle ones are not kept for hours.
            http: HttpClient::new(tls, 0),
            limit: Duration::from_secs(*blobstore_timeout),
            longest: *longest_blob,
            folder_calls: Arc::new(Semaphore::new(FOLDER_CALLS)),
        })
    }

    /// Runs a call to a folder, which may hang.
    async fn in_folder<T: Send + 'static>(
        &self,
        path: PathBuf,
        call: impl FnOnce(&Path) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, StoreError> {
        let folder = path.clone();
        let running = async {
            // The semaphore is never closed.
            let permit = self.folder_calls.clone().acquire_owned().await.ok()?;
            // A call to a mount that hangs cannot be cancelled. It keeps its thread and its permit,
            // of which four bound what a hung mount can take.
            let called = tokio::task::spawn_blocking(move || {
                let _permit = permit;
                call(&folder)
            });
            Some(called.await)
        };
        match tokio::time::timeout(self.limit, running).await {
            Ok(Some(called)) => called.map_err(|error| StoreError::Options(error.to_string()))?,
            Ok(None) | Err(_) => Err(StoreError::Hangs {
                path,
                limit: self.limit,
            }),
        }
    }

    /// Removes what killed publishers left unfinished in a shared folder; other stores keep nothing unfinished.
    pub async fn sweep(&self) {
        let Kind::Folder(folder) = &self.kind else {
            return;
        };
        let swept = self.in_folder(folder.clone(), |folder| {
            atomic::sweep_folder(folder);
            Ok(())
        });
        if let Err(error) = swept.await {
            tracing::warn!(
                "{error}; files that a killed publisher left unfinished stay until the next start"
            );
        }
    }

    /// Uploads a blob; replaces an existing one.
    pub async fn put(&self, id: &str, bytes: &Bytes) -> Result<(), StoreError> {
        match &self.kind {
            Kind::None => Err(no_store()),
            Kind::Folder(folder) => {
                let permissions = Attributes {
                    // Every machine reads the folder, mostly as another user.
                    mode: 0o644,
                    ..Attributes::PRIVATE
                };
                let bytes = bytes.clone();
                self.in_folder(folder.join(id), move |path| {
                    Ok(atomic::replace(path, &bytes, permissions).map(drop)?)
                })
                .await
            }
            Kind::Http(remote) => self
                .http(remote, Method::PUT, id, bytes.clone(), MAX_ANSWER)
                .await
                .map(drop),
            Kind::JetStream(objects) => objects.put(id, bytes, self.limit).await,
        }
    }

    /// Downloads a blob by its id. The size limit is the lower of `longest` and the options'.
    pub async fn get(&self, id: &str, longest: usize) -> Result<Bytes, StoreError> {
        // An announcement may lower the limit, but must not raise it.
        let longest = longest.min(self.longest);
        match &self.kind {
            Kind::None => Err(no_store()),
            Kind::Folder(folder) => {
                self.in_folder(
                    folder.join(id),
                    move |path: &Path| match bounded::read_at_most(path, longest as u64) {
                        Ok(bytes) => Ok(bytes.into()),
                        Err(cause) => Err(StoreError::in_file(path)(cause)),
                    },
                )
                .await
            }
            Kind::Http(remote) => {
                self.http(remote, Method::GET, id, Bytes::new(), longest)
                    .await
            }
            Kind::JetStream(objects) => objects.get(id, longest, self.limit).await,
        }
    }

    /// Downloads a blob by a signed URL. The size limit is the lower of `longest` and the options'.
    pub async fn get_signed(
        &self,
        url: &str,
        headers: &Map<String, Value>,
        longest: usize,
    ) -> Result<Bytes, StoreError> {
        let call = HttpCall {
            method: Method::GET,
            url,
            // A signed link may lead to another host, which must not see the credentials.
            basic: None,
            headers: Some(headers),
            body: Bytes::new(),
        };
        let limits = Limits {
            time: self.limit,
            body: longest.min(self.longest),
        };
        Ok(http::send(&self.http, call, limits).await?)
    }

    /// Deletes a blob; a missing one is not an error.
    pub async fn delete(&self, id: &str) -> Result<(), StoreError> {
        let gone = match &self.kind {
            Kind::None => Err(no_store()),
            Kind::Folder(folder) => {
                self.in_folder(folder.join(id), |path: &Path| {
                    fs::remove_file(path).map_err(StoreError::in_file(path))
                })
                .await
            }
            Kind::Http(remote) => self
                .http(remote, Method::DELETE, id, Bytes::new(), MAX_ANSWER)
                .await
                .map(drop),
            Kind::JetStream(objects) => objects.delete(id, self.limit).await,
        };
        match gone {
            // An attempt that timed out may have succeeded, and the next one finds nothing.
            Err(StoreError::File { cause, .. }) if cause.kind() == io::ErrorKind::NotFound => {
                Ok(())
            }
            Err(StoreError::Http(HttpError::Status { status, .. }))
                if status == hyper::StatusCode::NOT_FOUND =>
            {
                Ok(())
            }
            other => other,
        }
    }

    /// Returns a URL that gives access to a blob for a time, if the store can sign. `now` is the
    /// time since 1970.
    pub fn signed_url(&self, id: &str, now: Duration, good_for: Duration) -> Option<String> {
        let Kind::Http(remote) = &self.kind else {
            return None;
        };
        match remote {
            Remote::Dav { endpoint, secrets } => {
                // Without a secret, agents get the blob's id and use credentials of their own.
                let secret = secrets.signing_secret.as_ref()?;
                let path = http::signed_blob_path(secret, id, now.as_secs(), good_for.as_secs());
                Some(format!("{endpoint}/{path}"))
            }
            Remote::S3(s3) => {
                s3.credentials.as_ref()?;
                let now = SystemTime::UNIX_EPOCH + now;
                Some(s3.url(&Method::GET, id, now, good_for).into())
            }
        }
    }

    /// Sends an HTTP request to the store.
    async fn http(
        &self,
        remote: &Remote,
        method: Method,
        id: &str,
        body: Bytes,
        longest: usize,
    ) -> Result<Bytes, StoreError> {
        let url = remote.url(&method, id, self.limit);
        let call = HttpCall {
            method,
            url: &url,
            basic: remote.basic(),
            headers: None,
            body,
        };
        let limits = Limits {
            time: self.limit,
            body: longest,
        };
        Ok(http::send(&self.http, call, limits).await?)
    }
}

impl Kind {
    /// Parses the URL of a blobstore.
    fn parse(text: &str, secrets: Secrets, bus: Option<&Bus>) -> Result<Self, StoreError> {
        if let Some(bucket) = text.strip_prefix("nats:") {
            let bus = bus.ok_or_else(|| wrong(text, "JetStream needs --nats"))?;
            return Ok(Self::JetStream(Objects::new(bus, bucket)));
        }
        if let Some(rest) = text.strip_prefix("s3+") {
            let credentials = match (secrets.access_key, secrets.secret_key) {
                (Some(key_id), Some(secret)) => Some(Credentials {
                    key_id,
                    secret,
                    token: None,
                }),
                _ => None,
            };
            let s3 = S3::parse(rest, credentials).map_err(|problem| wrong(text, problem))?;
            return Ok(Self::Http(Remote::S3(Box::new(s3))));
        }
        let url = Url::parse(text).map_err(|error| wrong(text, error))?;
        match url.scheme() {
            "file" => {
                Ok(Self::Folder(url.to_file_path().map_err(|()| {
                    wrong(text, "a folder needs file:///PATH")
                })?))
            }
            "http" | "https" => {
                let endpoint = text.trim_end_matches('/').to_owned();
                Ok(Self::Http(Remote::Dav { endpoint, secrets }))
            }
            _ => Err(wrong(
                text,
                "it must begin with file, http, https, s3+https or nats:",
            )),
        }
    }
}

fn wrong(blobstore: &str, problem: impl fmt::Display) -> StoreError {
    StoreError::Options(format!("blobstore {blobstore:?}: {problem}"))
}

/// Returns the error for a missing `--blobstore`.
fn no_store() -> StoreError {
    StoreError::Options("no blobstore is configured; use --blobstore URL".to_owned())
}

/// Reads the credentials file.
fn read_secrets(path: &Path) -> Result<Secrets, StoreError> {
    let text = bounded::read_at_most(path, 1 << 20).map_err(StoreError::in_file(path))?;
    serde_json::from_slice(&text)
        .map_err(|error| StoreError::Options(format!("{}: {error}", path.display())))
}

/// Returns the time since 1970, for signatures.
pub fn unix_now() -> Duration {
    // A clock before 1970 signs for 1970, which every store rejects.
    SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default()
}

#[derive(Clone, Debug)]
struct Objects {
    context: jetstream::Context,
    bucket: String,
}

fn failed(error: impl fmt::Display) -> StoreError {
    StoreError::JetStream(error.to_string())
}

/// Applies a timeout to a call.
async fn within<T>(
    limit: Duration,
    call: impl Future<Output = Result<T, StoreError>>,
) -> Result<T, StoreError> {
    tokio::time::timeout(limit, call)
        .await
        .unwrap_or_else(|_| Err(failed(format!("not finished within {limit:?}"))))
}

impl Objects {
    /// Refers to a bucket; each call opens it, because it may be created later.
    fn new(bus: &Bus, bucket: &str) -> Self {
        Self {
            context: jetstream::new(bus.client.clone()),
            bucket: bucket.to_owned(),
        }
    }

    /// Uploads a blob; creates the bucket if it is missing.
    async fn put(&self, id: &str, bytes: &Bytes, limit: Duration) -> Result<(), StoreError> {
        within(limit, async {
            let store = match self.context.get_object_store(&self.bucket).await {
                Ok(store) => store,
                // Any error may be harmless: to create a bucket that exists already, with the same
                // settings, succeeds.
                Err(_) => {
                    let config = Config {
                        bucket: self.bucket.clone(),
                        ..Config::default()
                    };
                    self.context
                        .create_object_store(config)
                        .await
                        .map_err(failed)?
                }
            };
            store.put(id, &mut bytes.as_ref()).await.map_err(failed)?;
            Ok(())
        })
        .await
    }

    /// Downloads a blob by direct reads of its chunks, which need no consumer.
    async fn get(&self, id: &str, longest: usize, limit: Duration) -> Result<Bytes, StoreError> {
        let Self { context, bucket } = self;
        within(limit, async {
            let stream = context
                .get_stream_no_info(format!("OBJ_{bucket}"))
                .await
                .map_err(failed)?;
            let subject = format!("$O.{bucket}.M.{}", URL_SAFE.encode(id));
            let info = stream
                .direct_get_last_for_subject(subject)
                .await
                .map_err(failed)?;
            let info: ObjectInfo = serde_json::from_slice(&info.payload).map_err(failed)?;
            // JetStream keeps a deleted object's entry, with its name and without chunks.
            if info.deleted {
                return Err(failed(format!("the blob {id} was deleted")));
            }
            if info.size > longest {
                return Err(StoreError::TooLong {
                    blob: id.to_owned(),
                    longest,
                });
            }
            let chunks = format!("$O.{bucket}.C.{}", info.nuid);
            // Below `longest`, as checked above: a forged entry cannot take more memory.
            let mut bytes = Vec::with_capacity(info.size);
            let mut sequence = 0;
            while bytes.len() < info.size {
                let chunk = stream
                    .direct_get_next_for_subject(chunks.clone(), Some(sequence + 1))
                    .await
                    .map_err(failed)?;
                // Without progress the loop would never end, and a surplus would exceed the memory
                // that was admitted.
                if chunk.sequence <= sequence || chunk.payload.len() > info.size - bytes.len() {
                    return Err(failed(format!("the chunks of blob {id} are inconsistent")));
                }
                sequence = chunk.sequence;
                bytes.extend_from_slice(&chunk.payload);
            }
            Ok(bytes.into())
        })
        .await
    }

    async fn delete(&self, id: &str, limit: Duration) -> Result<(), StoreError> {
        within(limit, async {
            let store = self
                .context
                .get_object_store(&self.bucket)
                .await
                .map_err(failed)?;
            store.delete(id).await.map_err(failed)
        })
        .await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Opens a store by its URL.
    fn open(url: &str) -> Result<Store, StoreError> {
        open_as(url, None)
    }

    /// Opens a store by its URL, with a credentials file.
    fn open_as(url: &str, credentials: Option<PathBuf>) -> Result<Store, StoreError> {
        let options = StoreOptions {
            blobstore: Some(url.to_owned()),
            blobstore_credentials: credentials,
            blobstore_ca: None,
            blobstore_timeout: 5,
            longest_blob: MAX_BLOB,
        };
        Store::open(&options, None)
    }

    #[tokio::test]
    async fn folder_keeps_blobs() {
        let folder = tempfile::tempdir().unwrap();
        let store = open(&format!("file://{}", folder.path().display())).unwrap();
        store.put("a", &Bytes::from_static(b"blob")).await.unwrap();
        for longest in [4, 5, MAX_BLOB] {
            assert_eq!(store.get("a", longest).await.unwrap(), "blob");
        }
        let error = store.get("a", 3).await.unwrap_err();
        assert!(!error.is_worth_retrying(), "one byte more: {error}");
        store.delete("a").await.unwrap();
        store.delete("a").await.unwrap();
        let error = store.get("a", MAX_BLOB).await.unwrap_err();
        assert!(error.is_worth_retrying(), "it may appear: {error}");
        assert_eq!(
            store.signed_url("a", Duration::ZERO, Duration::from_secs(1)),
            None
        );
    }

    /// Links as computed by independent SigV4 implementations. The first is the example in Amazon's
    /// documentation ("Authenticating Requests: Using Query Parameters"); the others were computed
    /// from the same description with Python's hmac.
    #[test]
    fn s3_links_are_golden() {
        let folder = tempfile::tempdir().unwrap();
        let credentials = folder.path().join("credentials.json");
        fs::write(
            &credentials,
            r#"{"access_key": "AKIAIOSFODNN7EXAMPLE", "secret_key": "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"}"#,
        )
        .unwrap();
        for (url, blob, now, golden) in [
            (
                "s3+https://s3.amazonaws.com/examplebucket?region=us-east-1&style=virtual-host",
                "test.txt",
                1_369_353_600,
                "https://examplebucket.s3.amazonaws.com/test.txt?X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=AKIAIOSFODNN7EXAMPLE%2F20130524%2Fus-east-1%2Fs3%2Faws4_request&X-Amz-Date=20130524T000000Z&X-Amz-Expires=86400&X-Amz-SignedHeaders=host&X-Amz-Signature=aeeed9bbccd4d02ee5c0109b86d86835f995330da4c265957d157751f604d404",
            ),
            (
                "s3+https://s3.amazonaws.com/examplebucket",
                "test.txt",
                1_369_353_600,
                "https://s3.amazonaws.com/examplebucket/test.txt?X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=AKIAIOSFODNN7EXAMPLE%2F20130524%2Fus-east-1%2Fs3%2Faws4_request&X-Amz-Date=20130524T000000Z&X-Amz-Expires=86400&X-Amz-SignedHeaders=host&X-Amz-Signature=733255ef022bec3f2a8701cd61d4b371f3f28c9f193a1f02279211d48d5193d7",
            ),
            (
                "s3+https://s3.example/dns?region=eu-1",
                "0f5a1f0c-0000-4000-8000-000000000001",
                1_700_000_000,
                "https://s3.example/dns/0f5a1f0c-0000-4000-8000-000000000001?X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=AKIAIOSFODNN7EXAMPLE%2F20231114%2Feu-1%2Fs3%2Faws4_request&X-Amz-Date=20231114T221320Z&X-Amz-Expires=86400&X-Amz-SignedHeaders=host&X-Amz-Signature=814348cf0fe7d103b994181c65fc0d46b15bd8eaac6630e158c17644f35b0226",
            ),
        ] {
            let store = open_as(url, Some(credentials.clone())).unwrap();
            let signed =
                store.signed_url(blob, Duration::from_secs(now), Duration::from_secs(86_400));
            assert_eq!(signed.as_deref(), Some(golden), "{url}");
        }
        let without = open("s3+https://s3.example/dns").unwrap();
        assert_eq!(
            without.signed_url("a", Duration::ZERO, Duration::from_secs(1)),
            None
        );
    }

    #[test]
    fn invalid_urls_are_refused() {
        for url in [
            "ftp://x",
            "nats:b",
            "s3+https://h/",
            "s3+https://h/a/b",
            "s3+https://h/b?style=x",
            "file://host/x",
            "x",
        ] {
            assert!(open(url).is_err(), "{url}");
        }
        assert!(open("s3+https://h/bucket?region=r").is_ok());
    }

    /// Starts a server that gives these replies, a connection each; returns its URL and the requests.
    fn server(replies: &'static [&str]) -> (String, std::thread::JoinHandle<Vec<String>>) {
        use std::io::{Read as _, Write as _};

        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let served = std::thread::spawn(move || {
            let mut requests = Vec::new();
            for reply in replies {
                let (mut stream, _) = listener.accept().unwrap();
                let mut request = String::new();
                let mut part = [0; 4096];
                // The bodies of these requests end with a full stop.
                while !(request.ends_with("\r\n\r\n") && !request.starts_with("PUT")
                    || request.ends_with('.'))
                {
                    let length = stream.read(&mut part).unwrap();
                    request.push_str(str::from_utf8(&part[..length]).unwrap());
                }
                stream.write_all(reply.as_bytes()).unwrap();
                requests.push(request);
            }
            requests
        });
        (url, served)
    }

    async fn requests(served: std::thread::JoinHandle<Vec<String>>) -> Vec<String> {
        tokio::task::spawn_blocking(|| served.join().unwrap())
            .await
            .unwrap()
    }

    const OK: &str = "HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nblob";
    const CREATED: &str = "HTTP/1.1 201 Created\r\nContent-Length: 0\r\n\r\n";
    const NOT_FOUND: &str = "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n";
    const FORBIDDEN: &str = "HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n";

    #[tokio::test]
    async fn webdav_gets_credentials_and_spread_paths() {
        let folder = tempfile::tempdir().unwrap();
        let credentials = folder.path().join("credentials.json");
        fs::write(&credentials, r#"{"user": "agent", "password": "password"}"#).unwrap();
        let (url, served) = server(&[CREATED, OK, OK, CREATED, NOT_FOUND, FORBIDDEN, OK]);
        let store = open_as(&format!("{url}/dav/"), Some(credentials)).unwrap();
        store
            .put("abc", &Bytes::from_static(b"blob."))
            .await
            .unwrap();
        assert_eq!(store.get("abc", MAX_BLOB).await.unwrap(), "blob");
        let long = store.get("abc", 3).await.unwrap_err();
        assert!(!long.is_worth_retrying(), "{long}");
        store.delete("abc").await.unwrap();
        store.delete("abc").await.unwrap();
        let refused = store.delete("abc").await.unwrap_err();
        assert_eq!(
            refused.to_string(),
            format!("{url}/dav/a9/abc: the blobstore replied 403 Forbidden")
        );
        assert!(refused.is_worth_retrying());
        let headers = Map::from_iter([("x-k".to_owned(), Value::from("v"))]);
        let signed = format!("{url}/other?secret");
        assert_eq!(
            store.get_signed(&signed, &headers, MAX_BLOB).await.unwrap(),
            "blob"
        );
        let requests = requests(served).await;
        let lines: Vec<&str> = requests
            .iter()
            .map(|request| request.lines().next().unwrap())
            .collect();
        assert_eq!(
            lines,
            [
                "PUT /dav/a9/abc HTTP/1.1",
                "GET /dav/a9/abc HTTP/1.1",
                "GET /dav/a9/abc HTTP/1.1",
                "DELETE /dav/a9/abc HTTP/1.1",
                "DELETE /dav/a9/abc HTTP/1.1",
                "DELETE /dav/a9/abc HTTP/1.1",
                "GET /other?secret HTTP/1.1",
            ]
        );
        let authorization = "authorization: Basic YWdlbnQ6cGFzc3dvcmQ=\r\n";
        for request in &requests[..6] {
            assert!(request.contains(authorization), "{request}");
        }
        assert!(requests[0].ends_with("\r\n\r\nblob."));
        // The host of a signed link must not see the credentials.
        assert!(!requests[6].contains("authorization: "));
        assert!(requests[6].contains("x-k: v\r\n"));
    }

    #[tokio::test]
    async fn anonymous_buckets_get_plain_requests() {
        let (url, served) = server(&[CREATED, OK, NOT_FOUND]);
        let store = open(&format!("s3+{url}/bucket?region=r")).unwrap();
        store.put("a/b c", &Bytes::from_static(b".")).await.unwrap();
        assert_eq!(store.get("a", 4).await.unwrap(), "blob");
        store.delete("a").await.unwrap();
        for (request, line) in requests(served).await.iter().zip([
            "PUT /bucket/a/b%20c HTTP/1.1\r\n",
            "GET /bucket/a HTTP/1.1\r\n",
            "DELETE /bucket/a HTTP/1.1\r\n",
        ]) {
            assert!(request.starts_with(line), "{request}");
            assert!(!request.contains("authorization"), "{request}");
        }
    }

    #[test]
    fn secret_signs_webdav_links() {
        let folder = tempfile::tempdir().unwrap();
        let credentials = folder.path().join("credentials.json");
        let now = Duration::from_secs(1_700_000_000);
        let link = |text: &str| {
            fs::write(&credentials, text).unwrap();
            let store = open_as("https://h/dav/", Some(credentials.clone())).unwrap();
            store.signed_url("abc", now, Duration::from_secs(900))
        };
        assert_eq!(
            link(r#"{"signing_secret": "secret"}"#).as_deref(),
            Some(
                "https://h/dav/signed/a9/abc?e=900&st=U6ru7hxdGD515dgIX0hCDSDNBJbFNsRlEdbNlP1nuQA&ts=1700000000"
            )
        );
        assert_eq!(link(r#"{"user": "a", "password": "b"}"#), None);
        let secrets = read_secrets(&credentials).unwrap();
        assert_eq!(format!("{secrets:?}"), "Secrets(not shown)");
        let error = |text: &str| {
            fs::write(&credentials, text).unwrap();
            let opened = open_as("https://h/", Some(credentials.clone()));
            opened.err().unwrap().to_string()
        };
        let place = credentials.display();
        assert!(error(r#"{"name": 1}"#).starts_with(&format!("{place}: unknown field `name`")));
        fs::remove_file(&credentials).unwrap();
        let missing = open_as("https://h/", Some(credentials.clone()));
        assert_eq!(
            missing.err().unwrap().to_string(),
            format!("{place}: No such file or directory (os error 2)")
        );
        for (url, problem) in [
            (
                "ftp://x",
                "blobstore \"ftp://x\": it must begin with file, http, https, s3+https or nats:",
            ),
            ("nats:b", "blobstore \"nats:b\": JetStream needs --nats"),
            (
                "s3+https://h/",
                "blobstore \"s3+https://h/\": the path must be the bucket's name",
            ),
            (
                "s3+https://h/b?style=x",
                "blobstore \"s3+https://h/b?style=x\": style must be path or virtual-host",
            ),
            (
                "file://host/x",
                "blobstore \"file://host/x\": a folder needs file:///PATH",
            ),
        ] {
            assert_eq!(open(url).err().unwrap().to_string(), problem);
        }
    }

    #[tokio::test]
    async fn calls_without_a_store_are_refused() {
        let options = StoreOptions {
            blobstore: None,
            blobstore_credentials: None,
            blobstore_ca: None,
            blobstore_timeout: 5,
            longest_blob: 10,
        };
        let store = Store::open(&options, None).unwrap();
        let text = "no blobstore is configured; use --blobstore URL";
        for error in [
            store.put("a", &Bytes::new()).await.unwrap_err(),
            store.get("a", 1).await.unwrap_err(),
            store.delete("a").await.unwrap_err(),
        ] {
            assert_eq!(error.to_string(), text);
            assert!(!error.is_worth_retrying());
        }
        let second = Duration::from_secs(1);
        assert_eq!(store.signed_url("a", second, second), None);
        store.sweep().await;
        // Nobody raises the limit of the options.
        let folder = tempfile::tempdir().unwrap();
        let options = StoreOptions {
            blobstore: Some(format!("file://{}", folder.path().display())),
            ..options
        };
        let store = Store::open(&options, None).unwrap();
        for (length, is_got) in [(10, true), (11, false)] {
            store.put("a", &vec![b'x'; length].into()).await.unwrap();
            assert_eq!(store.get("a", 100).await.is_ok(), is_got);
        }
        let facts = fs::metadata(folder.path().join("a")).unwrap();
        let mode = std::os::unix::fs::PermissionsExt::mode(&facts.permissions());
        assert_eq!(mode & 0o777, 0o644);
        for (error, is_worth) in [
            (StoreError::JetStream("x".to_owned()), true),
            (
                StoreError::TooLong {
                    blob: "a".to_owned(),
                    longest: 3,
                },
                false,
            ),
            (
                StoreError::Hangs {
                    path: "/x".into(),
                    limit: second,
                },
                true,
            ),
            (
                StoreError::File {
                    path: "/x".into(),
                    cause: io::ErrorKind::FileTooLarge.into(),
                },
                false,
            ),
            (
                StoreError::File {
                    path: "/x".into(),
                    cause: io::ErrorKind::NotFound.into(),
                },
                true,
            ),
        ] {
            assert_eq!(error.is_worth_retrying(), is_worth, "{error}");
        }
        let late = within(Duration::ZERO, std::future::pending::<Result<(), _>>()).await;
        assert_eq!(
            late.unwrap_err().to_string(),
            "JetStream: not finished within 0ns"
        );
    }
}
