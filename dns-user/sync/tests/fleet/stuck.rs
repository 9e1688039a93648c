//! Blobstores, servers, disks and files that hang: announcements and SIGTERM do not wait for them.

use std::{
    fs,
    io::{BufRead, BufReader, Read, Write},
    net::TcpListener,
    path::PathBuf,
    thread,
    time::Duration,
};
use test_support::free_address;

use anyhow::{Context, Result, ensure};

use crate::{lab::Lab, process::wait_until};

/// Seconds that a component hangs: longer than a test waits for a version or for the end of a process.
const HANGS: u64 = 3600;

/// A WebDAV server in which DELETE hangs.
fn serve_dav_without_delete(folder: PathBuf) -> Result<u16> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let port = listener.local_addr()?.port();
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let folder = folder.clone();
            thread::spawn(move || {
                let mut reader = BufReader::new(stream);
                let (mut line, mut length) = (String::new(), 0);
                reader.read_line(&mut line)?;
                let mut words = line.split(' ').map(str::to_owned);
                let (method, path) = (
                    words.next().unwrap_or_default(),
                    words.next().unwrap_or_default(),
                );
                loop {
                    let mut header = String::new();
                    reader.read_line(&mut header)?;
                    if header.trim().is_empty() {
                        break;
                    }
                    let header = header.to_lowercase();
                    if let Some(value) = header.strip_prefix("content-length:") {
                        length = value.trim().parse().unwrap_or(0);
                    }
                }
                let file = folder.join(path.rsplit('/').next().unwrap_or_default());
                let mut body = vec![0; length];
                reader.read_exact(&mut body)?;
                let mut stream = reader.into_inner();
                match method.as_str() {
                    "PUT" => {
                        fs::write(file, body)?;
                        stream.write_all(b"HTTP/1.1 201 Created\r\nContent-Length: 0\r\n\r\n")
                    }
                    "GET" => {
                        let body = fs::read(file)?;
                        write!(
                            stream,
                            "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n",
                            body.len()
                        )?;
                        stream.write_all(&body)
                    }
                    _ => {
                        fs::write(folder.join("hangs"), "")?;
                        thread::sleep(Duration::from_secs(HANGS));
                        Ok(())
                    }
                }
            });
        }
    });
    Ok(port)
}

#[test]
fn hanging_delete_delays_no_version() -> Result<()> {
    let mut lab = Lab::new(1)?;
    let port = serve_dav_without_delete(lab.path("blobs"))?;
    lab.blobstore = [
        "--blobstore".to_owned(),
        format!("http://127.0.0.1:{port}/dav"),
        "--blobstore-timeout".to_owned(),
        HANGS.to_string(),
    ]
    .to_vec();
    let _agent = lab.agent("a0", &[])?;
    // Two versions are kept: every further one deletes a blob.
    let mut publisher = lab.watch(&["--keep-bytes", "1"])?;
    for version in 1..=5 {
        lab.wait_for("a0", version)?;
        lab.instance(&["move", "i0", &format!("10.9.9.{version}")])?;
        lab.wait_for("a0", version + 1)?;
    }
    ensure!(lab.path("blobs/hangs").exists(), "nothing was deleted");
    publisher.stop().map(drop)
}

#[test]
fn stuck_bus_delays_no_end() -> Result<()> {
    let lab = Lab::new(1)?;
    let mut publisher = lab.watch(&[])?;
    lab.wait_for_log("publisher", "publishing starts")?;
    lab.pause_nats(true)?;
    lab.write_inventory(20_000, |agent| {
        format!("10.{}.{}.1", agent / 250, agent % 250)
    })?;
    lab.wait_for_log("publisher", "rows=20000")?;
    thread::sleep(Duration::from_secs(1));
    publisher.stop()?;
    lab.pause_nats(false)
}

#[test]
fn small_max_payload_is_respected() -> Result<()> {
    let mut lab = Lab::new(1)?;
    lab.kill_nats()?;
    let config = fs::read_to_string(lab.path("nats.conf"))?;
    fs::write(
        lab.path("nats.conf"),
        format!("max_payload: 6000\n{config}"),
    )?;
    lab.start_nats_again()?;
    let write = |net: u32| {
        lab.write_inventory(600, |agent| {
            let mixed = (agent as u32 + 1)
                .wrapping_mul(0x9e37_79b9)
                .wrapping_add(net.wrapping_mul(0x85eb_ca6b));
            let [.., high, low] = mixed.to_be_bytes();
            format!("10.{}.{high}.{low}", agent / 250 + net as usize)
        })
    };
    write(0)?;
    let _agent = lab.agent("a0", &[])?;
    let mut publisher = lab.watch(&[])?;
    lab.wait_for("a0", 1)?;
    // The patch is larger than a message.
    write(100)?;
    lab.wait_for("a0", 2)?;
    assert!(!lab.log("a0").contains("by=\"patch\""), "{}", lab.log("a0"));
    ensure!(publisher.stop()?.success(), "{}", lab.log("publisher"));
    Ok(())
}

#[test]
fn fifo_records_are_survived() -> Result<()> {
    let lab = Lab::new(1)?;
    nix::unistd::mkfifo(&lab.records("a0"), nix::sys::stat::Mode::S_IRWXU)?;
    let mut agent = lab.agent("a0", &[])?;
    let _publisher = lab.watch(&[])?;
    // The FIFO is replaced like any unusable file.
    wait_until("the file", crate::lab::TIMEOUT, || {
        lab.records("a0").is_file()
    })
    .with_context(|| lab.log("a0"))?;
    lab.wait_for("a0", 1)?;
    agent.stop().map(drop)
}

#[test]
fn fifo_blob_is_refused() -> Result<()> {
    let lab = Lab::new(1)?;
    let mut agent = lab.agent("a0", &[])?;
    let _publisher = lab.watch(&["--no-patches"])?;
    lab.wait_for("a0", 1)?;
    lab.make_newest_blob_a_fifo()?;
    fs::remove_file(lab.records("a0"))?;
    lab.wait_for_log("a0", "not a regular file")?;
    agent.stop().map(drop)
}

#[test]
fn hung_server_is_abandoned() -> Result<()> {
    let lab = Lab::new(6)?;
    let other_port = free_address().port();
    let config = fs::read_to_string(lab.path("nats.conf"))?;
    let first = lab.nats_url();
    let second = format!("tls://127.0.0.1:{other_port}");
    let listen = |url: &str| url.replace("tls://", "");
    ensure!(config.contains(&listen(&first)));
    fs::write(
        lab.path("other.conf"),
        config.replace(&listen(&first), &listen(&second)),
    )?;
    let mut command = std::process::Command::new("nats-server");
    command.arg("-c").arg(lab.path("other.conf"));
    let _other = lab.keep(command, "other.log")?;
    let both = format!("{first},{second}");
    let mut agents = Vec::new();
    for agent in 0..6 {
        let id = format!("a{agent}");
        let mut command =
            lab.command(&["agent", "--id", &id, "--nats", &both, "--ping-every", "1"])?;
        command
            .args(lab.tls(&id))
            .args(&lab.blobstore)
            .arg("--records")
            .arg(lab.records(&id));
        agents.push(lab.keep(command, &format!("{id}.log"))?);
        lab.wait_for_log(&id, "agent started")?;
    }
    thread::sleep(Duration::from_secs(1));
    lab.pause_nats(true)?;
    let mut publisher = lab.command(&["publish", "--watch", "--nats", &second])?;
    publisher
        .arg("--state")
        .arg(lab.path("state"))
        .args(lab.source());
    publisher.args(lab.tls("director")).args(&lab.blobstore);
    let _publisher = lab.keep(publisher, "publisher.log")?;
    for agent in 0..6 {
        lab.wait_for(&format!("a{agent}"), 1)?;
    }
    lab.pause_nats(false)
}
