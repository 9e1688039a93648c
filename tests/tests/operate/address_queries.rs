//! `POST /addresses` over the control socket: many names of a large group take little memory.

use std::{
    io::{Read as _, Write as _},
    net::Ipv4Addr,
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
use whole_system_tests::{fleet, namespace::Namespace, process, requires, server};

use crate::running::Running;

/// Instances of the only group.
const INSTANCES: u32 = 5_000;
/// Maximum number of names in a request.
const MAX_NAMES: usize = 1_000;

/// A server with one large group.
struct Lab {
    running: Running,
    socket: PathBuf,
}

impl Lab {
    fn start(label: &str) -> Result<Self> {
        let namespace = Namespace::new(label)?;
        let instances = (0..INSTANCES).map(|index| (1, Ipv4Addr::from_bits(0x0a00_0000 + index)));
        let folder = server::folder(&fleet::records(1, instances), None)?;
        let socket = folder.path().join("control.sock");
        let settings = json!({"control": {"socket": socket}});
        let running = Running::start_with(namespace, folder, &settings)?;
        Ok(Self { running, socket })
    }

    /// Returns the largest memory of the server so far, in MiB.
    fn peak(&self) -> Result<u64> {
        Ok(process::memory(self.running.server.pid(), "VmHWM")? >> 20)
    }
}

/// Asks for the group's addresses as often as given; the response is unread.
fn ask(socket: &Path, names: usize) -> Result<UnixStream> {
    let query = json!({"name": "q-s0.q-g1.bosh", "withdrawn": []});
    let body = serde_json::to_string(&vec![query; names])?;
    let mut stream = UnixStream::connect(socket)?;
    // HTTP/1.0 has no chunks.
    let head = format!(
        "POST /addresses HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes())?;
    // A server that refuses may close the connection before it has read everything.
    let _ = stream.write_all(body.as_bytes());
    Ok(stream)
}

#[test]
fn many_names_of_a_group_take_little_memory() -> Result<()> {
    requires!(namespaces);
    let lab = Lab::start("addresses")?;
    let before = lab.peak()?;
    let mut response = String::new();
    ask(&lab.socket, MAX_NAMES)?.read_to_string(&mut response)?;
    let (head, body) = response.split_once("\r\n\r\n").context("no body")?;
    ensure!(head.contains("200 OK"), "{head}");
    let answers: Vec<Value> = serde_json::from_str(body)?;
    ensure!(answers.len() == MAX_NAMES, "{} answers", answers.len());
    for answer in answers {
        let addresses = answer["Ok"]["addresses"].as_array().map(Vec::len);
        ensure!(addresses == Some(INSTANCES as usize), "{addresses:?}");
    }
    let grown = lab.peak()?.saturating_sub(before);
    println!("{grown} MiB for a response of {} MiB", body.len() >> 20);
    ensure!(grown < 24, "{grown} MiB");
    Ok(())
}

#[test]
fn too_many_names_are_refused() -> Result<()> {
    requires!(namespaces);
    let lab = Lab::start("manynames")?;
    let before = lab.peak()?;
    // As many as fit into the largest body.
    for names in [MAX_NAMES + 1, 180_000] {
        let mut response = String::new();
        ask(&lab.socket, names)?.read_to_string(&mut response)?;
        ensure!(
            response.contains("422") && response.contains("more than 1000 names"),
            "{names}: {response}"
        );
    }
    let grown = lab.peak()?.saturating_sub(before);
    // The body itself has 8 MiB.
    ensure!(grown < 48, "{grown} MiB");
    Ok(())
}
