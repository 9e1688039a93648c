//! The API, tested with curl.

use std::{
    fs,
    io::{Read as _, Write as _},
    net::{Ipv4Addr, TcpStream},
    os::unix::net::UnixStream,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use nix::unistd::{Uid, setfsuid};
use serde_json::{Value, json};
use whole_system_tests::{
    fleet,
    namespace::Namespace,
    process::{self, wait_until},
    requires, server,
};

use super::running::{API_PORT, Running, write_certificates};

#[test]
fn curl_output_matches_reference() -> Result<()> {
    requires!(namespaces);
    let running = Running::start("api", &json!({}))?;
    let certificates = running.folder().join("certificates");
    let lines = |text: &str| -> Result<Vec<Value>> {
        Ok(text
            .lines()
            .map(serde_json::from_str)
            .collect::<Result<_, _>>()?)
    };
    let (body, status) = running.curl_api("/instances?address=WEB.Alias", &certificates, &[])?;
    assert_eq!(status, 200);
    let instances = lines(&body)?;
    assert_eq!(instances.len(), 3);
    assert_eq!(
        instances[0],
        json!({
            "id": "a", "group": "web", "network": "net", "deployment": "dep", "ip": "10.0.0.1",
            "domain": "bosh.", "az": "z1", "index": "0", "health_state": "running",
        })
    );
    let (body, status) = running.curl_api("/local-groups", &certificates, &["-X", "POST"])?;
    assert_eq!(status, 200);
    assert_eq!(lines(&body)?[1]["job_name"], "web");
    for (path, expected) in [
        ("/instances?address=nosuch.web.net.dep.bosh", 422),
        ("/instances?address=q-x.q-g1.bosh", 422),
        ("/instances?address=a..b", 422),
        ("/nothing", 404),
    ] {
        assert_eq!(
            running.curl_api(path, &certificates, &[])?.1,
            expected,
            "{path}"
        );
    }
    Ok(())
}

#[test]
fn api_certificates_rotate_without_restart() -> Result<()> {
    requires!(namespaces);
    let running = Running::start("apitls", &json!({}))?;
    let certificates = running.folder().join("certificates");
    let strangers = running.folder().join("strangers");
    fs::create_dir(&strangers)?;
    write_certificates(&strangers)?;
    // The stranger trusts the server but presents a certificate of another CA.
    fs::copy(certificates.join("ca.crt"), strangers.join("ca.crt"))?;
    assert!(running.curl_api("/instances", &strangers, &[]).is_err());

    let old = running.folder().join("old");
    fs::create_dir(&old)?;
    for name in ["ca.crt", "client.crt", "client.key"] {
        fs::copy(certificates.join(name), old.join(name))?;
    }
    write_certificates(&certificates)?;
    let mut refusal = None;
    let accepted = wait_until("new certificates", Duration::from_secs(120), || {
        refusal = running.curl_api("/instances", &certificates, &[]).err();
        refusal.is_none()
    });
    accepted.with_context(|| format!("at last: {refusal:?}"))?;
    assert!(running.curl_api("/instances", &old, &[]).is_err());
    Ok(())
}

#[test]
fn administrators_alone_may_operate() -> Result<()> {
    requires!(namespaces);
    let flush_all = [
        "-H",
        "Content-Type: application/json",
        "-d",
        "{\"all\": true}",
    ];
    let posts = [
        ("/flush", &["-X", "POST"][..]),
        ("/reload", &["-X", "POST"]),
        ("/log", &[]),
        ("/cache", &[]),
        ("/cache/flush", &flush_all),
    ];
    for (admins, status) in [
        (&["somebody.else"][..], 403),
        (&["somebody.else", "api.bosh-dns"], 200),
    ] {
        let running = Running::start("admins", &json!({"api": {"admins": admins}}))?;
        let certificates = running.folder().join("certificates");
        for (path, more) in posts {
            let (body, got) = running.curl_api(path, &certificates, more)?;
            assert_eq!(got, status, "{path} with {admins:?}: {body}");
        }
        if status == 403 {
            let (body, got) = running.curl_api("/tap", &certificates, &[])?;
            assert_eq!(got, 403, "/tap: {body}");
            assert!(body.contains("api.admins"), "{body}");
        }
        // bosh-dns's own paths and read-only requests are open to every client.
        for path in [
            "/instances",
            "/local-groups",
            "/status",
            "/resolve?name=web.alias",
        ] {
            assert_eq!(
                running.curl_api(path, &certificates, &[])?.1,
                200,
                "{path} with {admins:?}"
            );
        }
    }
    Ok(())
}

#[test]
fn users_cannot_lock_operators_out() -> Result<()> {
    requires!(namespaces);
    let running = Running::start("apilock", &json!({}))?;
    let certificates = running.folder().join("certificates");
    // Connections of another user that never start a TLS handshake. A socket's owner is the file
    // system user id of the thread.
    let flood = || -> Result<Vec<TcpStream>> {
        let own = setfsuid(Uid::from_raw(65_534));
        let all = (0..200)
            .map(|_| TcpStream::connect((Ipv4Addr::LOCALHOST, API_PORT)))
            .collect();
        setfsuid(own);
        Ok(std::io::Result::from(all)?)
    };
    let flood = running.namespace.run(flood)??;
    for _ in 0..10 {
        // Curl's timeout is far shorter than the handshake timeout.
        let (body, status) = running.curl_api("/instances", &certificates, &["--max-time", "3"])?;
        assert_eq!(status, 200, "{body}");
    }
    drop(flood);
    Ok(())
}

/// Every route of the API: path, method, and whether it is reserved for administrators.
const ROUTES: [(&str, &str, bool); 10] = [
    ("/instances", "GET", false),
    ("/local-groups", "GET", false),
    ("/status", "GET", false),
    ("/resolve?name=web.alias", "GET", false),
    ("/addresses", "POST", false),
    ("/log", "GET", true),
    ("/log", "POST", true),
    ("/reload", "POST", true),
    ("/flush", "POST", true),
    ("/tap?name=none.test", "GET", true),
];

#[test]
fn routes_check_client_role() -> Result<()> {
    requires!(namespaces);
    let running = Running::start("roles", &json!({"api": {"admins": ["somebody.else"]}}))?;
    let certificates = running.folder().join("certificates");
    let strangers = running.folder().join("strangers");
    fs::create_dir(&strangers)?;
    write_certificates(&strangers)?;
    fs::copy(certificates.join("ca.crt"), strangers.join("ca.crt"))?;
    let ca = certificates.join("ca.crt").display().to_string();
    let resolve = format!("api.bosh-dns:{API_PORT}:127.0.0.1");
    for (path, method, reserved) in ROUTES {
        let message = if path == "/addresses" { "[]" } else { "{}" };
        let body = [
            "-X",
            method,
            "-H",
            "content-type: application/json",
            "-d",
            message,
        ];
        let more = if method == "POST" { &body[..] } else { &[] };
        // No certificate, and one of another CA.
        let url = format!("https://api.bosh-dns:{API_PORT}{path}");
        let without =
            running.curl(&[&["--cacert", &ca, "--resolve", &resolve], more, &[&url]].concat());
        assert!(without.is_err(), "{method} {path} without a certificate");
        assert!(
            running.curl_api(path, &strangers, more).is_err(),
            "{method} {path} with a foreign certificate"
        );
        // A client that is no administrator.
        let (body, status) = running.curl_api(path, &certificates, more)?;
        assert_eq!(
            status,
            if reserved { 403 } else { 200 },
            "{method} {path}: {body}"
        );
    }
    // Other spellings of a reserved path reach nothing.
    for path in [
        "/flush/",
        "//flush",
        "/./flush",
        "/FLUSH",
        "/%66lush",
        "/status/../flush",
        "/flush%00",
        "/flush;x",
    ] {
        let (body, status) =
            running.curl_api(path, &certificates, &["--path-as-is", "-X", "POST"])?;
        assert!(matches!(status, 403 | 404), "{path}: {status} {body}");
    }
    Ok(())
}

#[test]
fn oversized_requests_are_refused() -> Result<()> {
    requires!(namespaces);
    let running = Running::start("oversized", &json!({}))?;
    let certificates = running.folder().join("certificates");
    let large = running.folder().join("large");
    fs::write(&large, vec![b'x'; 16 << 20])?;
    let body = format!("@{}", large.display());
    let header = format!("x-large: {}", "x".repeat(120_000));
    let path = format!("/resolve?name={}", "a.".repeat(40_000));
    let json = [
        "-X",
        "POST",
        "-H",
        "content-type: application/json",
        "--data-binary",
        &body,
    ];
    for (path, more) in [
        ("/log", &json[..]),
        ("/status", &["-H", &header][..]),
        (path.as_str(), &[]),
    ] {
        // A status of refusal, or a connection closed before the whole request was sent.
        if let Ok((body, status)) = running.curl_api(path, &certificates, more) {
            assert!(
                (400..500).contains(&status),
                "{}: {status} {body}",
                &path[..path.len().min(20)]
            );
        }
        assert_eq!(running.curl_api("/status", &certificates, &[])?.1, 200);
    }
    Ok(())
}

#[test]
fn unread_instances_take_little_memory() -> Result<()> {
    requires!(namespaces);
    const INSTANCES: u32 = 20_000;
    let namespace = Namespace::new("unread")?;
    let instances = (0..INSTANCES).map(|index| (1, Ipv4Addr::from_bits(0x0a00_0000 + index)));
    let folder = server::folder(&fleet::records(1, instances), None)?;
    let socket = folder.path().join("control.sock");
    let running = Running::start_with(namespace, folder, &json!({"control": {"socket": socket}}))?;
    let memory = || process::memory(running.server.pid(), "RssAnon");
    let ask = || -> Result<UnixStream> {
        let mut stream = UnixStream::connect(&socket)?;
        // HTTP/1.0 has no chunks, whose sizes would stand between the lines.
        stream.write_all(b"GET /instances HTTP/1.0\r\n\r\n")?;
        Ok(stream)
    };
    // A client that reads gets everything.
    let mut text = String::new();
    ask()?.read_to_string(&mut text)?;
    ensure!(
        text.matches("\"health_state\"").count() == INSTANCES as usize,
        "{} bytes",
        text.len()
    );
    let before = memory()?;
    let mut silent = Vec::new();
    for _ in 0..100 {
        let mut stream = ask()?;
        // The response has begun.
        stream.read_exact(&mut [0; 12])?;
        silent.push(stream);
    }
    let grown = memory()?.saturating_sub(before) >> 20;
    println!("{grown} MiB for {} clients that do not read", silent.len());
    ensure!(grown < 32, "{grown} MiB");
    drop(silent);
    Ok(())
}
