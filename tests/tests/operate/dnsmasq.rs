//! dnsmasq as a recursor: it answers names below `example.org` and refuses all others.

use std::{
    net::{Ipv4Addr, SocketAddr},
    process::Stdio,
    time::Duration,
};

use anyhow::Result;
use hickory_proto::rr::RecordType;
use whole_system_tests::{
    client,
    namespace::Namespace,
    process::{Kept, wait_until},
};

/// Starts dnsmasq on a loopback address of `namespace`, port 53, and waits for its first answer.
pub(crate) fn start(namespace: &Namespace, last: u8) -> Result<(Kept, SocketAddr)> {
    let address = Ipv4Addr::new(127, 0, 0, last);
    let mut command = namespace.command("dnsmasq")?;
    command
        .args([
            "--keep-in-foreground",
            "--no-resolv",
            "--no-hosts",
            "--bind-interfaces",
        ])
        .args([
            "--conf-file=/dev/null",
            "--pid-file=",
            "--local-ttl=300",
            "--address=/example.org/192.0.2.80",
        ])
        .arg(format!("--listen-address={address}"))
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    let process = Kept::spawn(&mut command)?;
    let address = SocketAddr::from((address, 53));
    let query = client::query("www.example.org.", RecordType::A, None)?.to_vec()?;
    let answers = || client::ask_raw(address, &query, Duration::from_millis(200)).is_ok();
    wait_until("dnsmasq", Duration::from_secs(120), || {
        namespace.run(answers).unwrap_or(false)
    })?;
    Ok((process, address))
}
