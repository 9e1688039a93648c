//! A recursor that follows the rules of a scenario, by UDP and TCP.

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpListener, TcpStream, UdpSocket},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use anyhow::Result;
use hickory_proto::{
    op::{Message, MessageType, OpCode, ResponseCode},
    rr::{
        Name, RData, Record,
        rdata::{CNAME, PTR, TXT},
    },
};
use serde_json::Value;

use crate::support::scenario::Rule;

#[derive(Debug)]
pub(crate) struct Recursor {
    pub(crate) address: SocketAddr,
    /// Set to end the threads.
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Recursor {
    /// Listens on `address`, in the caller's namespace.
    pub(crate) fn start(address: SocketAddr, rules: Vec<Rule>) -> Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let udp = UdpSocket::bind(address)?;
        udp.set_read_timeout(Some(Duration::from_millis(50)))?;
        let tcp = TcpListener::bind(address)?;
        tcp.set_nonblocking(true)?;
        let (rules, of_udp, of_tcp) = (Arc::new(rules), stop.clone(), stop.clone());
        let udp_rules = rules.clone();
        let udp = thread::spawn(move || {
            let mut buffer = [0; 4096];
            while !of_udp.load(Ordering::Relaxed) {
                let Ok((length, client)) = udp.recv_from(&mut buffer) else {
                    continue;
                };
                if let Some(reply) = reply(&udp_rules, &buffer[..length]) {
                    // The client may have gone.
                    let _ = udp.send_to(&reply, client);
                }
            }
        });
        let tcp = thread::spawn(move || {
            while !of_tcp.load(Ordering::Relaxed) {
                match tcp.accept() {
                    // The client may have disconnected.
                    Ok((stream, _)) => {
                        let rules = rules.clone();
                        thread::spawn(move || serve(stream, &rules));
                    }
                    Err(_) => thread::sleep(Duration::from_millis(10)),
                }
            }
        });
        Ok(Self {
            address,
            stop,
            threads: vec![udp, tcp],
        })
    }
}

impl Drop for Recursor {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            // An error is a panic, which is in the output already.
            let _ = thread.join();
        }
    }
}

/// Answers the queries of one connection.
fn serve(mut stream: TcpStream, rules: &[Rule]) -> Result<()> {
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(Duration::from_secs(10)))?;
    loop {
        let mut length = [0; 2];
        stream.read_exact(&mut length)?;
        let mut query = vec![0; usize::from(u16::from_be_bytes(length))];
        stream.read_exact(&mut query)?;
        let Some(reply) = reply(rules, &query) else {
            return Ok(());
        };
        stream.write_all(&[&u16::try_from(reply.len())?.to_be_bytes()[..], &reply].concat())?;
    }
}

/// Returns the reply of the first matching rule; `None` for no reply.
fn reply(rules: &[Rule], query: &[u8]) -> Option<Vec<u8>> {
    let query = Message::from_vec(query).ok()?;
    let question = query.queries.first()?;
    let (name, kind) = (
        question.name().to_ascii(),
        question.query_type().to_string(),
    );
    let fits = |rule: &&Rule| {
        rule.silent
            || (rule.q == "*" || rule.q.eq_ignore_ascii_case(&name))
                && (rule.kind == "*" || rule.kind == kind)
    };
    let mut reply = Message::new(query.metadata.id, MessageType::Response, OpCode::Query);
    reply.metadata.recursion_desired = query.metadata.recursion_desired;
    reply.add_query(question.clone());
    match rules.iter().find(fits) {
        Some(rule) if rule.silent => return None,
        Some(rule) => {
            reply.metadata.recursion_available = rule.ra;
            reply.metadata.truncation = rule.tc;
            reply.metadata.response_code = match rule.rcode.as_str() {
                "NXDOMAIN" => ResponseCode::NXDomain,
                "SERVFAIL" => ResponseCode::ServFail,
                "REFUSED" => ResponseCode::Refused,
                _ => ResponseCode::NoError,
            };
            reply.add_answers(rule.answers.iter().filter_map(record));
        }
        None => reply.metadata.response_code = ResponseCode::Refused,
    }
    reply.to_vec().ok()
}

fn record(record: &Value) -> Option<Record> {
    let text = |member: &str| record[member].as_str().unwrap_or_default();
    let name = |text: &str| Name::from_ascii(text).ok();
    let data = match text("type") {
        "A" => RData::A(text("data").parse().ok()?),
        "AAAA" => RData::AAAA(text("data").parse().ok()?),
        "CNAME" => RData::CNAME(CNAME(name(text("data"))?)),
        "PTR" => RData::PTR(PTR(name(text("data"))?)),
        "TXT" => {
            let strings = record["data"].as_array()?.iter().filter_map(Value::as_str);
            RData::TXT(TXT::new(strings.map(str::to_owned).collect()))
        }
        _ => return None,
    };
    Some(Record::from_rdata(
        name(text("name"))?,
        u32::try_from(record["ttl"].as_u64()?).ok()?,
        data,
    ))
}
