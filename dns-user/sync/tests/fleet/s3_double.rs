//! A strict double of S3: a small server that computes the signature (SigV4) of every request itself. It
//! checks what the real server of these tests ([`crate::s3`]) accepts: another region, another host, a link
//! that is valid for more than a week.

use std::{
    collections::BTreeMap,
    io::{BufRead, BufReader, Read, Write},
    net::{TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use anyhow::{Context, Result};
use dns_kit::hex;
use dns_sync::store::unix_now;
use parking_lot::Mutex;
use ring::{digest, hmac};
use time::{PrimitiveDateTime, macros::format_description};

use crate::{
    lab::Lab,
    s3::{KEY, SECRET, credentials, is_for_signers_alone, open, status},
};

/// State of the double.
type Blobs = Arc<Mutex<BTreeMap<String, Vec<u8>>>>;

/// A running double with one bucket, `dns`, of the region `eu-1`.
struct Double {
    port: u16,
    blobs: Blobs,
    ended: Arc<AtomicBool>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Double {
    fn start() -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let port = listener.local_addr()?.port();
        let mut double = Self {
            port,
            blobs: Blobs::default(),
            ended: Arc::default(),
            thread: None,
        };
        let (blobs, ended, host) = (double.blobs.clone(), double.ended.clone(), double.host());
        double.thread = Some(thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                if ended.load(Ordering::Relaxed) {
                    return;
                }
                // A client that disconnects early gets no answer.
                let _ = answer(stream, &host, &blobs);
            }
        }));
        Ok(double)
    }

    /// Host and port, as named in requests.
    fn host(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// URL of the bucket with the region that the client assumes.
    fn url(&self, region: &str) -> String {
        format!("s3+http://{}/dns?region={region}", self.host())
    }
}

impl Drop for Double {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Relaxed);
        // The thread waits for a connection.
        let _ = TcpStream::connect(("127.0.0.1", self.port));
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Reads one request and answers it.
fn answer(mut stream: TcpStream, host: &str, blobs: &Blobs) -> Result<()> {
    stream.set_read_timeout(Some(Duration::from_secs(10)))?;
    let mut reader = BufReader::new(stream.try_clone()?);
    let mut line = String::new();
    reader.read_line(&mut line)?;
    let mut words = line.split_whitespace();
    let (method, target) = (
        words.next().context("a method")?,
        words.next().context("a target")?,
    );
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let mut headers = BTreeMap::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line)?;
        let Some((name, value)) = line.trim_end().split_once(": ") else {
            break;
        };
        headers.insert(name.to_ascii_lowercase(), value.to_owned());
    }
    let length = headers
        .get("content-length")
        .map_or(Ok(0), |length| length.parse())?;
    let mut body = vec![0; length];
    reader.read_exact(&mut body)?;
    // No thread panics while holding the lock.
    let mut blobs = blobs.lock();
    let signed = headers.get("host").is_some_and(|named| named == host)
        && is_signed(method, path, query, host);
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
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    stream.write_all(&[head.as_bytes(), &body].concat())?;
    Ok(())
}

/// Returns whether a request is signed with the key for the current time.
fn is_signed(method: &str, path: &str, query: &str, host: &str) -> bool {
    let Some((canonical, signature)) = query.rsplit_once("&X-Amz-Signature=") else {
        return false;
    };
    let parts: Vec<_> = canonical
        .split('&')
        .filter_map(|part| part.split_once('='))
        .collect();
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
    let Some(day) = date.get(..8) else {
        return false;
    };
    let scope = format!("{day}/eu-1/s3/aws4_request");
    if credential != format!("{KEY}/{scope}").replace('/', "%2F") {
        return false;
    }
    let form = format_description!("[year][month][day]T[hour][minute][second]Z");
    let Ok(begun) = PrimitiveDateTime::parse(date, form) else {
        return false;
    };
    let begun = begun.assume_utc().unix_timestamp().cast_unsigned();
    let now = unix_now().as_secs();
    let good = expires
        .parse()
        .is_ok_and(|expires: u64| expires <= 604_800 && begun + expires > now);
    let request = format!("{method}\n{path}\n{canonical}\nhost:{host}\n\nhost\nUNSIGNED-PAYLOAD");
    let hash = hex(digest::digest(&digest::SHA256, request.as_bytes()).as_ref());
    let text = format!("AWS4-HMAC-SHA256\n{date}\n{scope}\n{hash}");
    let mac = |key: &[u8], text: &str| {
        hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, key), text.as_bytes())
            .as_ref()
            .to_vec()
    };
    let key = scope
        .split('/')
        .fold(format!("AWS4{SECRET}").into_bytes(), |key, part| {
            mac(&key, part)
        });
    good && begun <= now + 60 && hex(&mac(&key, &text)) == signature
}

/// The double refuses everything that the real server refuses: another region, another host, a lifetime that
/// is too long.
#[test]
fn a_strict_double_of_s3_agrees() -> Result<()> {
    let lab = Lab::new(0)?;
    let s3 = Double::start()?;
    is_for_signers_alone(&lab, &s3.url("eu-1"))?;
    let (now, hour) = (unix_now(), Duration::from_secs(3600));
    let owner = credentials(KEY, SECRET);
    let store = open(&lab, &s3.url("eu-1"), &owner)?;
    s3.blobs
        .lock()
        .insert("/dns/one".to_owned(), b"a blob".to_vec());
    let good = store.signed_url("one", now, hour).context("a link")?;
    assert_eq!(status(&good)?, "200");
    assert_eq!(status(&good.replace("127.0.0.1", "localhost"))?, "403");
    let elsewhere = open(&lab, &s3.url("eu-2"), &owner)?
        .signed_url("one", now, hour)
        .context("a link")?;
    assert_eq!(status(&elsewhere)?, "403");
    let long = store
        .signed_url("one", now, 24 * 8 * hour)
        .context("a link")?;
    assert_eq!(status(&long)?, "403");
    Ok(())
}
