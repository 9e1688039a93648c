//! Open-loop load by kxdpgun: the only generator here that keeps a rate of
//! 100,000 queries per second from one core.

use std::{path::Path, time::Duration};

use anyhow::Result;
use whole_system_tests::process::run;

use crate::lab::{CLIENT_INTERFACE, Lab, SERVER_ADDRESS};

/// Sends the queries of a file (`name type` lines) at `rate` per second.
///
/// It brings an XDP program of its own to the client's end, in native mode: so
/// native `XDP_TX` works at the server's end, too. Before and after it sends, it waits for
/// a second each.
pub fn send(lab: &Lab, queries: &Path, rate: u32, duration: Duration) -> Result<()> {
    let mut command = lab.client.with_own_sysfs("kxdpgun");
    command
        .args(["-t", &duration.as_secs_f64().to_string(), "-Q", &rate.to_string(), "-b", "10", "-F", "1s1"])
        .args(["-I", CLIENT_INTERFACE, "-i"])
        .arg(queries)
        .arg(SERVER_ADDRESS.to_string());
    run(&mut command)?;
    // It leaves its program behind.
    lab.client.ip(&["link", "set", "dev", CLIENT_INTERFACE, "xdp", "off"])
}
