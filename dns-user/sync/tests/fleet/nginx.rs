//! nginx as the blobstore: WebDAV with basic authentication, links signed and checked by njs.

use std::{fs, net::TcpStream, process::Command};
use test_support::free_address;

use crate::process::{Kept, capture, wait_until};
use anyhow::{Context, Result, ensure};

use crate::{
    faults::bad_blobs,
    lab::{Lab, TIMEOUT},
    speaker::Speaker,
};

/// Secret of the signatures.
const SECRET: &str = "a secret";

/// Checks a signed link as a director's blobstore does.
const CHECK: &str = r#"
import crypto from 'crypto';
function check(r) {
    const a = r.args;
    const object = r.variables.object;
    const wanted = crypto.createHmac('sha256', 'a secret').update('GET' + object + a.ts + a.e).digest('base64url');
    const now = Date.now() / 1000;
    return (wanted === a.st && Number(a.ts) + Number(a.e) > now) ? '1' : '0';
}
export default { check };
"#;

pub(crate) struct Nginx {
    process: Option<Kept>,
    pub(crate) port: u16,
}

impl Nginx {
    /// Starts nginx with the lab's certificates and makes it the lab's blobstore.
    pub(crate) fn start(lab: &mut Lab, signed: bool) -> Result<Self> {
        let port = free_address().port();
        let root = lab.path("dav");
        fs::create_dir_all(&root)?;
        // nginx switches to an unprivileged user, but the test's folder is private.
        capture(
            Command::new("chmod")
                .args(["-R", "a+rwX"])
                .arg(lab.path("")),
        )?;
        lab.authority
            .issue(&lab.path(""), "blobs", "blobs.example")?;
        fs::write(lab.path("check.js"), CHECK)?;
        fs::write(lab.path("users"), "agent:{PLAIN}password\n")?;
        let folder = lab.path("").display().to_string();
        let folder = folder.trim_end_matches('/');
        let configuration = format!(
            r#"load_module /usr/lib/nginx/modules/ngx_http_js_module.so;
daemon off; worker_processes 1; pid {folder}/nginx.pid; error_log {folder}/nginx.log;
events {{}}
http {{
  access_log {folder}/access.log;
  client_body_temp_path {folder}/nginx-body; proxy_temp_path {folder}/nginx-p; fastcgi_temp_path {folder}/nginx-f;
  uwsgi_temp_path {folder}/nginx-u; scgi_temp_path {folder}/nginx-s;
  js_path {folder}; js_import signed from check.js; js_set $good signed.check;
  server {{
    listen 127.0.0.1:{port} ssl;
    ssl_certificate {folder}/blobs.crt; ssl_certificate_key {folder}/blobs.key;
    client_max_body_size 100m; root {folder}/dav;
    location ~ ^/signed/(?<object>[0-9a-f][0-9a-f]/[^/]+)$ {{
      if ($good != "1") {{ return 403; }}
      alias {folder}/dav/$object;
    }}
    location / {{
      auth_basic blobs; auth_basic_user_file {folder}/users;
      dav_methods PUT DELETE; create_full_put_path on;
    }}
  }}
}}
"#
        );
        fs::write(lab.path("nginx.conf"), configuration)?;
        let secret = if signed {
            format!(r#", "signing_secret": "{SECRET}""#)
        } else {
            String::new()
        };
        fs::write(
            lab.path("secrets.json"),
            format!(r#"{{"user": "agent", "password": "password"{secret}}}"#),
        )?;
        let option = |name: &str, value: String| [format!("--blobstore{name}"), value];
        lab.blobstore = [
            option("", format!("https://127.0.0.1:{port}")),
            option(
                "-credentials",
                lab.path("secrets.json").display().to_string(),
            ),
            option("-ca", lab.path("ca.crt").display().to_string()),
        ]
        .concat();
        let mut nginx = Self {
            process: None,
            port,
        };
        nginx.start_again(lab)?;
        Ok(nginx)
    }

    /// Starts nginx again after a kill.
    pub(crate) fn start_again(&mut self, lab: &Lab) -> Result<()> {
        let mut command = Command::new("/usr/sbin/nginx");
        command
            .arg("-p")
            .arg(lab.path(""))
            .arg("-c")
            .arg(lab.path("nginx.conf"));
        self.process = Some(lab.keep(command, "nginx-output.log")?);
        let port = self.port;
        wait_until("nginx", TIMEOUT, || {
            TcpStream::connect(("127.0.0.1", port)).is_ok()
        })
        .with_context(|| format!("{}{}", lab.log("nginx-output"), lab.log("nginx")))
    }

    /// Kills nginx and its worker.
    pub(crate) fn stop(&mut self) -> Result<()> {
        let mut process = self.process.take().context("nginx does not run")?;
        process.stop().map(drop)
    }

    /// Sends a request with curl; returns the status.
    fn get(&self, lab: &Lab, path: &str) -> Result<String> {
        let mut curl = Command::new("curl");
        curl.args(["-s", "-o", "/dev/null", "-w", "%{http_code}", "--cacert"])
            .arg(lab.path("ca.crt"));
        capture(curl.arg(format!("https://127.0.0.1:{}/{path}", self.port)))
    }
}

/// Basic authentication, for the publisher and the agents.
#[test]
fn blobs_by_webdav() -> Result<()> {
    let mut lab = Lab::new(2)?;
    let mut nginx = Nginx::start(&mut lab, false)?;
    let _agents = [lab.agent("a0", &[])?, lab.agent("a1", &[])?];
    let published = lab.publish(&[])?;
    ensure!(
        published.status.success(),
        "{}",
        String::from_utf8_lossy(&published.stderr)
    );
    assert_eq!(fs::read(lab.records("a1"))?, lab.dataset(1)?);
    let blob = lab.newest_blob()?;
    let access = fs::read_to_string(lab.path("access.log"))?;
    let path = dns_sync::http::blob_path(&blob);
    assert!(
        access.contains(&format!("\"PUT /{path} HTTP/1.1\" 201")),
        "{access}"
    );
    assert_eq!(nginx.get(&lab, &path)?, "401");
    nginx.stop()
}

/// Signed links: agents need no password, and others get no blob.
#[test]
fn blobs_by_signed_links() -> Result<()> {
    let mut lab = Lab::new(2)?;
    let nginx = Nginx::start(&mut lab, true)?;
    let publisher_store = std::mem::take(&mut lab.blobstore);
    lab.blobstore = publisher_store[4..].to_vec();
    let _agents = [lab.agent("a0", &[])?, lab.agent("a1", &[])?];
    lab.blobstore = publisher_store;
    let published = lab.publish(&[])?;
    ensure!(
        published.status.success(),
        "{}",
        String::from_utf8_lossy(&published.stderr)
    );
    assert_eq!(fs::read(lab.records("a1"))?, lab.dataset(1)?);
    let blob = lab.newest_blob()?;
    let now = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)?
        .as_secs();
    let signed = |secret: &str, at: u64| dns_sync::http::signed_blob_path(secret, &blob, at, 900);
    assert_eq!(nginx.get(&lab, &signed(SECRET, now))?, "200");
    assert_eq!(nginx.get(&lab, &signed("another", now))?, "403");
    assert_eq!(nginx.get(&lab, &signed(SECRET, now - 1000))?, "403");
    Ok(())
}

/// A link is valid for a limited time; a late agent gets a new one.
#[test]
fn late_agents_get_valid_links() -> Result<()> {
    let mut lab = Lab::new(2)?;
    let _nginx = Nginx::start(&mut lab, true)?;
    let publisher = lab.publisher(&["--watch", "--links-good-for", "8"])?;
    let _publisher = lab.keep(publisher, "publisher.log")?;
    let _agent = lab.agent("a0", &[])?;
    lab.wait_for("a0", 1)?;
    std::thread::sleep(std::time::Duration::from_secs(9));
    let _late = lab.agent("a1", &[])?;
    lab.wait_for("a1", 1)?;
    assert!(!lab.log("a1").contains("403"), "{}", lab.log("a1"));
    Ok(())
}

/// A blob that is missing, truncated or different in nginx.
#[test]
fn a_bad_blob_of_webdav_is_never_taken() -> Result<()> {
    let mut lab = Lab::new(1)?;
    let _nginx = Nginx::start(&mut lab, false)?;
    let dav = lab.path("dav");
    bad_blobs(
        &lab,
        |blob| dav.join(dns_sync::http::blob_path(blob)),
        "the blobstore replied 404",
    )
}

/// A publisher whose clock is hours behind signs links that have expired; with the right clock agents can
/// download.
#[test]
fn wrong_clock_is_reported() -> Result<()> {
    let mut lab = Lab::new(1)?;
    let _nginx = Nginx::start(&mut lab, true)?;
    let _agent = lab.agent("a0", &[])?;
    lab.wait_for_log("a0", "agent started")?;
    let right = lab.publisher(&["--timeout", "15"])?;
    // The test's certificates are valid since 1975.
    let mut wrong = Command::new("faketime");
    wrong
        .args(["-f", "-30h"])
        .arg(right.get_program())
        .args(right.get_args());
    let output = wrong
        .env("FAKETIME_DONT_FAKE_MONOTONIC", "1")
        .env("DONT_FAKE_MONOTONIC", "1")
        .output()?;
    assert!(
        !output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    lab.wait_for_log("a0", "the blobstore replied 403")?;
    assert_eq!(lab.version("a0")?, 0);
    ensure!(lab.publish(&[])?.status.success(), "{}", lab.log("a0"));
    assert_eq!(lab.version("a0")?, 1);
    Ok(())
}

/// An older BOSH agent knows no signed links: after its exception it gets the blob's id.
#[test]
fn agent_without_signed_links_gets_id() -> Result<()> {
    let mut lab = Lab::new(1)?;
    let _nginx = Nginx::start(&mut lab, true)?;
    let mut agent = Speaker::new(&lab, "a0", "agent.a0")?;
    let _publisher = lab.watch(&[])?;
    let mut methods = Vec::new();
    loop {
        let call: serde_json::Value = serde_json::from_slice(&agent.hear()?.payload)?;
        let (method, reply_to) = (
            call["method"].as_str().context("method")?,
            &call["reply_to"],
        );
        let reply = match method {
            "sync_dns" => r#"{"value":"synced"}"#,
            _ => r#"{"exception":{"message":"unknown message sync_dns_with_signed_url"}}"#,
        };
        agent.say(reply_to.as_str().context("reply_to")?, reply)?;
        let version = call["arguments"]
            .as_array()
            .and_then(|all| all.get(2))
            .and_then(|one| one.as_u64());
        methods.push(method.to_owned());
        if method == "sync_dns" && version.is_some_and(|version| version > 0) {
            break;
        }
        ensure!(methods.len() < 10, "{methods:?}");
    }
    let state = lab.path("state").display().to_string();
    wait_until("status", TIMEOUT, || {
        lab.run(&["status", "--state", &state]).is_ok()
    })
    .with_context(|| lab.log("publisher"))
}
