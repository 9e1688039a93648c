//! Blobs in S3: a real server of that protocol (s3s with its folder as storage), independent of this
//! project's signatures.

use std::{fs, net::SocketAddr, path::PathBuf, process::Command, time::Duration};

use anyhow::{Context, Result, ensure};
use bytes::Bytes;
use dns_sync::store::{MAX_BLOB, Store, StoreOptions, unix_now};
use hyper_util::rt::TokioIo;
use s3s::{auth::SimpleAuth, service::S3ServiceBuilder};
use s3s_fs::FileSystem;
use tokio::{net::TcpListener, runtime::Runtime};

use crate::{faults::bad_blobs, lab::Lab, process::capture};

/// Access key of the publisher.
pub(crate) const KEY: &str = "AKIAIOSFODNN7EXAMPLE";

pub(crate) const SECRET: &str = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY";

/// A server with one bucket, `dns`.
struct S3 {
    /// Port of the server, closed while it is stopped.
    address: SocketAddr,
    folder: PathBuf,
    /// Runs the server; dropping it aborts all requests.
    runtime: Option<Runtime>,
}

impl S3 {
    /// Starts a server with its files in the lab and makes it the publisher's blobstore.
    fn start(lab: &mut Lab) -> Result<Self> {
        let folder = lab.path("s3");
        fs::create_dir_all(folder.join("dns"))?;
        let mut s3 = Self {
            address: test_support::free_address(),
            folder,
            runtime: None,
        };
        s3.start_again()?;
        fs::write(lab.path("secrets.json"), credentials(KEY, SECRET))?;
        let secrets = lab.path("secrets.json").display().to_string();
        lab.blobstore = vec![
            "--blobstore".to_owned(),
            s3.url(),
            "--blobstore-credentials".to_owned(),
            secrets,
        ];
        Ok(s3)
    }

    /// Starts the server again after a stop.
    fn start_again(&mut self) -> Result<()> {
        let files = FileSystem::new(&self.folder).map_err(|error| anyhow::anyhow!("{error:?}"))?;
        let mut service = S3ServiceBuilder::new(files);
        service.set_auth(SimpleAuth::from_single(KEY, SECRET));
        let service = service.build();
        let runtime = Runtime::new()?;
        let listener = runtime.block_on(TcpListener::bind(self.address))?;
        runtime.spawn(async move {
            loop {
                let Ok((stream, _)) = listener.accept().await else {
                    continue;
                };
                let connection = hyper::server::conn::http1::Builder::new()
                    .serve_connection(TokioIo::new(stream), service.clone());
                // A client that disconnects early gets no answer.
                tokio::spawn(connection);
            }
        });
        self.runtime = Some(runtime);
        Ok(())
    }

    /// Stops the server and aborts all requests.
    fn stop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }

    /// Returns the URL of the bucket.
    fn url(&self) -> String {
        format!("s3+http://{}/dns?region=eu-1", self.address)
    }
}

/// Writes a credentials file; returns its path.
pub(crate) fn credentials(key: &str, secret: &str) -> String {
    format!(r#"{{"access_key": "{key}", "secret_key": "{secret}"}}"#)
}

/// Opens the store with these credentials.
pub(crate) fn open(lab: &Lab, url: &str, credentials: &str) -> Result<Store> {
    let file = lab.path("some-secrets.json");
    fs::write(&file, credentials)?;
    let options = StoreOptions {
        blobstore: Some(url.to_owned()),
        blobstore_credentials: Some(file),
        blobstore_ca: None,
        blobstore_timeout: 20,
        longest_blob: MAX_BLOB,
    };
    Ok(Store::open(&options, None)?)
}

/// Returns the status of a request without credentials.
pub(crate) fn status(url: &str) -> Result<String> {
    capture(Command::new("curl").args(["-s", "-o", "/dev/null", "-w", "%{http_code}", url]))
}

/// Only the publisher has the keys; agents have no blobstore and get presigned links. The store becomes
/// unavailable and returns.
#[test]
fn blobs_by_s3() -> Result<()> {
    let mut lab = Lab::new(2)?;
    let mut s3 = S3::start(&mut lab)?;
    let of_publisher = std::mem::take(&mut lab.blobstore);
    let _agents = [lab.agent("a0", &[])?, lab.agent("a1", &[])?];
    lab.blobstore = of_publisher;
    let published = lab.publish(&[])?;
    ensure!(
        published.status.success(),
        "{}",
        String::from_utf8_lossy(&published.stderr)
    );
    assert_eq!(fs::read(lab.records("a1"))?, lab.dataset(1)?);
    assert!(lab.log("a1").contains("by=\"blob\""), "{}", lab.log("a1"));
    assert_eq!(
        fs::read(s3.folder.join("dns").join(lab.newest_blob()?))?,
        lab.dataset(1)?
    );

    s3.stop();
    let _publisher = lab.watch(&["--no-patches"])?;
    lab.instance(&["move", "i0", "10.9.9.9"])?;
    lab.wait_for_log(
        "publisher",
        "cannot store the blob; the fleet keeps the previous version",
    )?;
    assert_eq!(lab.version("a0")?, 1);
    s3.start_again()?;
    lab.wait_for("a0", 2)?;
    lab.wait_for("a1", 2)
}

/// Every request is signed; requests with a wrong, premature or missing signature are refused.
#[test]
fn s3_refuses_unsigned_requests() -> Result<()> {
    let mut lab = Lab::new(0)?;
    let s3 = S3::start(&mut lab)?;
    is_for_signers_alone(&lab, &s3.url())
}

/// A blob that is missing, truncated or different in S3.
#[test]
fn a_bad_blob_of_s3_is_never_taken() -> Result<()> {
    let mut lab = Lab::new(1)?;
    let s3 = S3::start(&mut lab)?;
    bad_blobs(
        &lab,
        |blob| s3.folder.join("dns").join(blob),
        "the blobstore replied 404",
    )
}

/// Sends all kinds of requests to a bucket, with correct and wrong signatures.
pub(crate) fn is_for_signers_alone(lab: &Lab, url: &str) -> Result<()> {
    let store = open(lab, url, &credentials(KEY, SECRET))?;
    let strangers = [
        open(lab, url, &credentials(KEY, "another"))?,
        open(lab, url, &credentials("ANOTHER", SECRET))?,
        open(lab, url, "{}")?,
    ];
    let runtime = Runtime::new()?;
    let blob = Bytes::from_static(b"a blob");
    runtime.block_on(store.put("one", &blob))?;
    assert_eq!(runtime.block_on(store.get("one", MAX_BLOB))?, blob);
    for stranger in &strangers {
        for error in [
            runtime
                .block_on(stranger.put("two", &blob))
                .err()
                .context("put")?,
            runtime
                .block_on(stranger.get("one", MAX_BLOB))
                .err()
                .context("get")?,
            runtime
                .block_on(stranger.delete("one"))
                .err()
                .context("delete")?,
        ] {
            assert!(
                error.to_string().contains("the blobstore replied 403"),
                "{error}"
            );
        }
    }
    let (now, hour) = (unix_now(), Duration::from_secs(3600));
    let good = store.signed_url("one", now, hour).context("a link")?;
    assert_eq!(status(&good)?, "200");
    assert_eq!(status(&good.replace("/one?", "/two?"))?, "403");
    assert_eq!(
        status(&good.replace("X-Amz-Expires=3600", "X-Amz-Expires=7200"))?,
        "403"
    );
    assert_eq!(status(good.split('?').next().context("a path")?)?, "403");
    let over = store
        .signed_url("one", now.saturating_sub(2 * hour), hour)
        .context("a link")?;
    assert_eq!(status(&over)?, "403");
    let early = store
        .signed_url("one", now + hour, hour)
        .context("a link")?;
    assert_eq!(status(&early)?, "403");
    runtime.block_on(store.delete("one"))?;
    runtime.block_on(store.delete("one"))?;
    let gone = runtime
        .block_on(store.get("one", MAX_BLOB))
        .err()
        .context("it is gone")?;
    assert!(
        gone.to_string().contains("the blobstore replied 404"),
        "{gone}"
    );
    Ok(())
}
