//! S3, by a strict double: a small server that computes the signature (SigV4) of every request
//! by itself, and refuses what differs in anything. No real S3 server is among these tests.

use std::{
    collections::BTreeMap,
    fs,
    io::{BufRead, BufReader, Read, Write},
    net::{TcpListener, TcpStream},
    process::Command,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use bytes::Bytes;
use dns_sync::{
    digest::hex,
    store::{Store, StoreOptions, unix_now},
};
use jiff::{civil::DateTime, tz::TimeZone};
use ring::{digest, hmac};
use tokio::runtime::Runtime;

use crate::{lab::Lab, process::capture};

/// Access key of the publisher.
const KEY: &str = "AKIAIOSFODNN7EXAMPLE";

/// Its secret.
const SECRET: &str = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY";

/// What the double keeps.
type Blobs = Arc<Mutex<BTreeMap<String, Vec<u8>>>>;

/// A running double with one bucket, `dns`, of the region `eu-1`.
struct Double {
    /// Where it listens.
    port: u16,
    /// Its blobs, by path.
    blobs: Blobs,
    /// Tells its thread to end.
    ended: Arc<AtomicBool>,
    /// Its thread.
    thread: Option<thread::JoinHandle<()>>,
}

impl Double {
    /// Starts one; the lab's blobs are there from now on.
    fn start(lab: &mut Lab) -> Result<Self> {
        let mut double = Self { port: 0, blobs: Blobs::default(), ended: Arc::default(), thread: None };
        double.start_again()?;
        let credentials = format!(r#"{{"access_key": "{KEY}", "secret_key": "{SECRET}"}}"#);
        fs::write(lab.path("secrets.json"), credentials)?;
        let secrets = lab.path("secrets.json").display().to_string();
        lab.blobstore =
            vec!["--blobstore".to_owned(), double.url(), "--blobstore-credentials".to_owned(), secrets];
        Ok(double)
    }

    /// Starts it, after it was stopped.
    fn start_again(&mut self) -> Result<()> {
        let listener = TcpListener::bind(("127.0.0.1", self.port))?;
        self.port = listener.local_addr()?.port();
        self.ended = Arc::default();
        let (blobs, ended, host) = (self.blobs.clone(), self.ended.clone(), self.host());
        self.thread = Some(thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                if ended.load(Ordering::Relaxed) {
                    return;
                }
                // Whoever hangs up in the middle gets no answer.
                let _ = answer(stream, &host, &blobs);
            }
        }));
        Ok(())
    }

    /// Ends it.
    fn stop(&mut self) {
        self.ended.store(true, Ordering::Relaxed);
        // It waits for a connection.
        let _ = TcpStream::connect(("127.0.0.1", self.port));
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }

    /// Host and port, as requests name them.
    fn host(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// Where the bucket is.
    fn url(&self) -> String {
        format!("s3+http://{}/dns?region=eu-1", self.host())
    }
}

impl Drop for Double {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Reads one request and answers it.
fn answer(mut stream: TcpStream, host: &str, blobs: &Blobs) -> Result<()> {
    stream.set_read_timeout(Some(Duration::from_secs(10)))?;
    let mut reader = BufReader::new(stream.try_clone()?);
    let mut line = String::new();
    reader.read_line(&mut line)?;
    let mut words = line.split_whitespace();
    let (method, target) = (words.next().context("a method")?, words.next().context("a target")?);
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let mut headers = BTreeMap::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line)?;
        let Some((name, value)) = line.trim_end().split_once(": ") else { break };
        headers.insert(name.to_ascii_lowercase(), value.to_owned());
    }
    let length = headers.get("content-length").map_or(Ok(0), |length| length.parse())?;
    let mut body = vec![0; length];
    reader.read_exact(&mut body)?;
    // Nothing panics while it is locked.
    let mut blobs = blobs.lock().unwrap_or_else(PoisonError::into_inner);
    let signed =
        headers.get("host").is_some_and(|named| named == host) && is_signed(method, path, query, host);
    let (status, body) = match (signed && path.starts_with("/dns/"), method) {
        (false, _) => ("403 Forbidden", Vec::new()),
        (true, "PUT") => {
            blobs.insert(path.to_owned(), body);
            ("200 OK", Vec::new())
        }
        (true, "GET") => match blobs.get(path) {
            Some(blob) => ("200 OK", blob.clone()),
            None => ("404 Not Found", Vec::new()),
        },
        (true, "DELETE") => {
            blobs.remove(path);
            ("204 No Content", Vec::new())
        }
        (true, _) => ("405 Method Not Allowed", Vec::new()),
    };
    let head = format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n", body.len());
    stream.write_all(&[head.as_bytes(), &body].concat())?;
    Ok(())
}

/// Whether a request is signed by the key, for this very time.
fn is_signed(method: &str, path: &str, query: &str, host: &str) -> bool {
    let Some((canonical, signature)) = query.rsplit_once("&X-Amz-Signature=") else { return false };
    let parts: Vec<_> = canonical.split('&').filter_map(|part| part.split_once('=')).collect();
    let [
        ("X-Amz-Algorithm", "AWS4-HMAC-SHA256"),
        ("X-Amz-Credential", credential),
        ("X-Amz-Date", date),
        ("X-Amz-Expires", expires),
        ("X-Amz-SignedHeaders", "host"),
    ] = parts[..]
    else {
        return false;
    };
    let Some(day) = date.get(..8) else { return false };
    let scope = format!("{day}/eu-1/s3/aws4_request");
    if credential != format!("{KEY}/{scope}").replace('/', "%2F") {
        return false;
    }
    let Some(begun) = DateTime::strptime("%Y%m%dT%H%M%SZ", date)
        .and_then(|begun| begun.to_zoned(TimeZone::UTC))
        .ok()
        .and_then(|begun| u64::try_from(begun.timestamp().as_second()).ok())
    else {
        return false;
    };
    let now = unix_now().as_secs();
    let good = expires.parse().is_ok_and(|expires: u64| expires <= 604_800 && begun + expires > now);
    let request = format!("{method}\n{path}\n{canonical}\nhost:{host}\n\nhost\nUNSIGNED-PAYLOAD");
    let hash = hex(digest::digest(&digest::SHA256, request.as_bytes()).as_ref());
    let text = format!("AWS4-HMAC-SHA256\n{date}\n{scope}\n{hash}");
    let mac = |key: &[u8], text: &str| {
        hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, key), text.as_bytes()).as_ref().to_vec()
    };
    let key = scope.split('/').fold(format!("AWS4{SECRET}").into_bytes(), |key, part| mac(&key, part));
    good && begun <= now + 60 && hex(&mac(&key, &text)) == signature
}

/// The publisher alone has the keys; agents know no blobstore and get signed links. The store
/// goes away and comes back.
#[test]
fn blobs_by_a_double_of_s3() -> Result<()> {
    let mut lab = Lab::new(2)?;
    let mut s3 = Double::start(&mut lab)?;
    let of_publisher = std::mem::take(&mut lab.blobstore);
    let _agents = [lab.agent("a0", &[])?, lab.agent("a1", &[])?];
    lab.blobstore = of_publisher;
    let published = lab.publish(&[])?;
    ensure!(published.status.success(), "{}", String::from_utf8_lossy(&published.stderr));
    assert_eq!(fs::read(lab.records("a1"))?, lab.dataset(1)?);
    assert!(lab.log("a1").contains("by=\"blob\""), "{}", lab.log("a1"));
    let path = format!("/dns/{}", lab.newest_blob()?);
    let kept = s3.blobs.lock().unwrap_or_else(PoisonError::into_inner).get(&path).cloned();
    assert_eq!(kept, Some(lab.dataset(1)?));

    s3.stop();
    let _publisher = lab.watch(&["--no-patches"])?;
    lab.instance(&["move", "i0", "10.9.9.9"])?;
    lab.wait_for_log("publisher", "the blob cannot be put, the fleet keeps the version before")?;
    assert_eq!(lab.version("a0")?, 1);
    s3.start_again()?;
    lab.wait_for("a0", 2)?;
    lab.wait_for("a1", 2)
}

/// Every request is signed; what is signed otherwise, too early or not at all is refused.
#[test]
fn a_double_of_s3_takes_what_is_signed_and_nothing_else() -> Result<()> {
    let mut lab = Lab::new(0)?;
    let s3 = Double::start(&mut lab)?;
    let open = |credentials: &str| {
        let file = lab.path("some-secrets.json");
        fs::write(&file, credentials)?;
        let options = StoreOptions {
            blobstore: Some(s3.url()),
            blobstore_credentials: Some(file),
            blobstore_ca: None,
            blobstore_timeout: 20,
        };
        anyhow::Ok(Store::open(&options, None)?)
    };
    let store = open(&format!(r#"{{"access_key": "{KEY}", "secret_key": "{SECRET}"}}"#))?;
    let stranger = open(&format!(r#"{{"access_key": "{KEY}", "secret_key": "another"}}"#))?;
    let nobody = open("{}")?;
    let runtime = Runtime::new()?;
    let blob = Bytes::from_static(b"a blob");
    runtime.block_on(store.put("one", &blob))?;
    assert_eq!(runtime.block_on(store.get("one"))?, blob);
    for other in [&stranger, &nobody] {
        for error in [
            runtime.block_on(other.put("two", &blob)).err().context("put")?,
            runtime.block_on(other.get("one")).err().context("get")?,
            runtime.block_on(other.delete("one")).err().context("delete")?,
        ] {
            assert!(error.to_string().contains("the blobstore says 403"), "{error}");
        }
    }
    let (now, hour) = (unix_now(), Duration::from_secs(3600));
    let status =
        |url: &str| capture(Command::new("curl").args(["-s", "-o", "/dev/null", "-w", "%{http_code}", url]));
    let good = store.signed_url("one", now, hour).context("a link")?;
    assert_eq!(status(&good)?, "200");
    assert_eq!(status(&good.replace("/one?", "/two?"))?, "403");
    assert_eq!(status(&good.replace("X-Amz-Expires=3600", "X-Amz-Expires=7200"))?, "403");
    assert_eq!(status(good.split('?').next().context("a path")?)?, "403");
    let over = store.signed_url("one", now.saturating_sub(2 * hour), hour).context("a link")?;
    assert_eq!(status(&over)?, "403");
    runtime.block_on(store.delete("one"))?;
    runtime.block_on(store.delete("one"))?;
    let gone = runtime.block_on(store.get("one")).err().context("it is gone")?;
    assert!(gone.to_string().contains("the blobstore says 404"), "{gone}");
    Ok(())
}
