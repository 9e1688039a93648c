//! Memory of the server while clients do not read their replies.

use std::{
    io::{self, Read as _, Write as _},
    net::TcpStream,
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use hickory_proto::rr::RecordType;
use serde_json::json;
use whole_system_tests::{
    client, fleet,
    namespace::Namespace,
    process::memory,
    requires,
    server::{self, Server},
};

use super::{
    lab::{OURS, loopback},
    scripted::Scripted,
};

/// Most resident memory of a server with these records and default limits.
const LIMIT: u64 = 128 << 20;

/// Instances of the group, whose replies by TCP have nearly 64 KiB.
const INSTANCES: usize = 4000;

/// Returns records with [`INSTANCES`] instances of one group.
fn records() -> Vec<u8> {
    fleet::records(
        1,
        (0..INSTANCES).map(|n| (1, [10, 1, (n >> 8) as u8, n as u8])),
    )
}

/// Starts a server with the silent recursor 127.0.0.10.
fn start(namespace: &Namespace) -> Result<Server> {
    let settings = json!({
        "xdp": {"mode": "off"}, "disable_recursors": false, "recursors": [loopback(10)], "recursor_timeout": "2s",
    });
    Server::start(
        Some(namespace),
        server::folder(&records(), None)?,
        OURS,
        &settings,
    )
}

/// Returns a framed query for the addresses of `name`.
fn framed(name: &str) -> Result<Vec<u8>> {
    let query = client::query(name, RecordType::A, None)?.to_vec()?;
    Ok([&u16::try_from(query.len())?.to_be_bytes()[..], &query].concat())
}

#[test]
fn unread_replies_take_bounded_memory() -> Result<()> {
    requires!(namespaces);
    let namespace = Namespace::new("unread")?;
    let server = start(&namespace)?;
    let queries = framed("q-s0.q-g1.bosh.")?.repeat(1000);
    // Sixteen connections that write as long as they can and read nothing.
    namespace.run(|| -> Result<()> {
        let connect = || -> io::Result<TcpStream> {
            let stream = TcpStream::connect(OURS)?;
            stream.set_nonblocking(true)?;
            Ok(stream)
        };
        // Each with the position from which the next bytes are written.
        let mut streams = (0..16)
            .map(|_| Ok((connect()?, 0)))
            .collect::<io::Result<Vec<(TcpStream, usize)>>>()?;
        let mut idle_rounds = 0;
        while idle_rounds < 50 {
            idle_rounds += 1;
            for (stream, position) in &mut streams {
                if let Ok(written) = stream.write(&queries[*position..]) {
                    *position = (*position + written) % queries.len();
                    idle_rounds = 0;
                }
            }
            thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    })??;
    let peak = memory(server.pid(), "VmHWM")?;
    ensure!(
        peak < LIMIT,
        "{} MiB for 16 connections that read nothing",
        peak >> 20
    );
    Ok(())
}

#[test]
fn replies_behind_silence_take_bounded_memory() -> Result<()> {
    const QUERIES: usize = 3000;
    requires!(namespaces);
    let namespace = Namespace::new("behind")?;
    let _silent = Scripted::silent(&namespace, loopback(10))?;
    let server = start(&namespace)?;
    let local = framed("q-s0.q-g1.bosh.")?.repeat(QUERIES);
    let forwarded = framed("www.test.")?;
    namespace.run(|| -> Result<()> {
        let mut reader = TcpStream::connect(OURS)?;
        reader.set_read_timeout(Some(Duration::from_secs(120)))?;
        let mut writer = reader.try_clone()?;
        let writing = thread::spawn(move || -> io::Result<()> {
            writer.write_all(&forwarded)?;
            writer.write_all(&local)
        });
        let mut reply = vec![0; 65_535];
        for number in 0..=QUERIES {
            let mut length = [0; 2];
            reader
                .read_exact(&mut length)
                .with_context(|| format!("reply {number}"))?;
            let length = usize::from(u16::from_be_bytes(length));
            reader.read_exact(&mut reply[..length])?;
        }
        writing.join().expect("no panic")?;
        Ok(())
    })??;
    let peak = memory(server.pid(), "VmHWM")?;
    ensure!(
        peak < LIMIT,
        "{} MiB for replies held behind a silent name",
        peak >> 20
    );
    Ok(())
}
