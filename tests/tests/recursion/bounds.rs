//! What is in flight is bounded: the oldest give way, and nobody is left without an answer.

use std::{
    collections::HashMap,
    net::{Ipv4Addr, UdpSocket},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use hickory_proto::{
    op::{Message, ResponseCode},
    rr::RecordType,
};
use serde_json::json;
use whole_system_tests::client;

use super::{
    lab::{LOCAL_NAME, Lab, OURS, loopback, namespace},
    scripted::Scripted,
};

/// What one recursor's sockets hold.
const BOUND: usize = 4096;
/// Queries: well past the bound.
const QUERIES: u16 = 6000;

#[test]
fn past_the_bound_the_oldest_get_servfail_and_nobody_silence() -> Result<()> {
    let Some(namespace) = namespace("bound")? else { return Ok(()) };
    let silent = Scripted::silent(&namespace, loopback(10))?;
    let lab = Lab::start(&namespace, &[loopback(10)], &json!({"recursor_timeout": "3s"}))?;
    // The number of each query in the order of their answers.
    let order = namespace.run(|| -> Result<Vec<u16>> {
        let socket = socket2::Socket::from(UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))?);
        socket.set_recv_buffer_size(4 << 20)?;
        let socket = UdpSocket::from(socket);
        socket.connect(OURS)?;
        for number in 0..QUERIES {
            let mut query = client::query(&format!("n{number}.test."), RecordType::A, None)?;
            query.metadata.id = number;
            socket.send(&query.to_vec()?)?;
            if number % 50 == 0 {
                // No faster than the server reads: lost datagrams would be missed below.
                std::thread::sleep(Duration::from_millis(3));
            }
        }
        // Local names do not mind.
        let reply = client::ask(OURS, &client::query(LOCAL_NAME, RecordType::A, None)?)?;
        ensure!(reply.metadata.response_code == ResponseCode::NoError, "{reply}");
        socket.set_read_timeout(Some(Duration::from_secs(5)))?;
        let mut buffer = [0; 512];
        (0..QUERIES)
            .map(|count| {
                let length = socket.recv(&mut buffer).with_context(|| format!("after {count} answers"))?;
                let reply = Message::from_vec(&buffer[..length])?;
                ensure!(reply.metadata.response_code == ResponseCode::ServFail, "{reply}");
                Ok(reply.metadata.id)
            })
            .collect()
    })??;
    let places: HashMap<u16, usize> = order.iter().enumerate().map(|(place, &id)| (id, place)).collect();
    ensure!(places.len() == usize::from(QUERIES), "a query was answered twice");
    let given_up = lab.metric("bosh_dns_xdp_recursor_failures_total", "reason=\"given_up\"")? as usize;
    let surplus = usize::from(QUERIES) - BOUND;
    // Queries are spread over the sockets by chance, so that one may be full before another.
    ensure!(
        (surplus..surplus + BOUND / 4).contains(&given_up),
        "{given_up} were given up, {surplus} were too many"
    );
    // Who gave way was answered first, and was among the oldest.
    let oldest = order[..given_up].iter().filter(|&&id| usize::from(id) < surplus + BOUND / 4).count();
    ensure!(oldest == given_up, "{} of {given_up} that gave way were not old", given_up - oldest);
    ensure!(silent.count() == usize::from(QUERIES), "{} were forwarded", silent.count());
    Ok(())
}
