//! A scripted recursor.

use std::{
    collections::HashMap,
    io::{self, Read, Write},
    net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use hickory_proto::{
    op::{Edns, Message, MessageType, ResponseCode},
    rr::{
        Name, RData, Record,
        rdata::{A, SOA},
    },
};
use parking_lot::{Mutex, MutexGuard};
use whole_system_tests::namespace::Namespace;

/// Polling interval of a thread for its end.
const NAP: Duration = Duration::from_millis(20);

/// Serves UDP and TCP until dropped.
pub(crate) struct Scripted {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

struct Shared {
    /// Computes the messages sent in response to a query.
    script: Box<Script>,
    asked: Mutex<Vec<Asked>>,
    ended: AtomicBool,
}

/// Reaction to a query.
type Script = dyn Fn(&Asked) -> Vec<Say> + Send + Sync;

#[derive(Clone, Debug)]
pub(crate) struct Asked {
    pub(crate) bytes: Vec<u8>,
    pub(crate) message: Message,
    pub(crate) from: SocketAddr,
    pub(crate) by_tcp: bool,
    /// When it was received.
    pub(crate) at: Instant,
}

/// A message to send.
#[derive(Clone, Debug)]
pub(crate) struct Say {
    pub(crate) bytes: Vec<u8>,
    /// Source address of a UDP message, if other than the recursor's.
    pub(crate) from: Option<SocketAddr>,
}

impl From<Message> for Say {
    fn from(message: Message) -> Self {
        let bytes = message
            .to_vec()
            .expect("scripts produce encodable messages");
        Self { bytes, from: None }
    }
}

impl Asked {
    /// Parses a query; `None` if it is not one.
    pub(crate) fn parse(bytes: &[u8], from: SocketAddr, by_tcp: bool) -> Option<Self> {
        Some(Self {
            bytes: bytes.to_vec(),
            message: Message::from_vec(bytes).ok()?,
            from,
            by_tcp,
            at: Instant::now(),
        })
    }

    /// Returns the queried name in the letter case of the query.
    pub(crate) fn name(&self) -> String {
        self.message
            .queries
            .first()
            .map(|query| query.name().to_string())
            .unwrap_or_default()
    }

    /// Returns a reply without records; with an OPT if the query had one.
    pub(crate) fn reply(&self, rcode: ResponseCode) -> Message {
        let mut reply = self.message.clone();
        reply.metadata.message_type = MessageType::Response;
        reply.metadata.recursion_available = true;
        reply.metadata.response_code = rcode;
        reply.edns = self.message.edns.as_ref().map(|asked| {
            let mut edns = Edns::new();
            edns.set_max_payload(1400)
                .set_dnssec_ok(asked.flags().dnssec_ok);
            edns
        });
        reply
    }

    /// Returns NOERROR with one address.
    pub(crate) fn answer(&self, address: Ipv4Addr, ttl: u32) -> Message {
        let mut reply = self.reply(ResponseCode::NoError);
        if let Some(query) = self.message.queries.first() {
            reply.add_answer(Record::from_rdata(
                query.name().clone(),
                ttl,
                RData::A(A(address)),
            ));
        }
        reply
    }

    /// Returns NXDOMAIN, or NOERROR without data, with an SOA.
    pub(crate) fn deny(&self, rcode: ResponseCode, soa_ttl: u32, minimum: u32) -> Message {
        let mut reply = self.reply(rcode);
        let name = |text| Name::from_ascii(text).expect("a name built by the test");
        let soa = SOA::new(
            name("ns.test."),
            name("admin.test."),
            7,
            3600,
            600,
            86_400,
            minimum,
        );
        reply.add_authority(Record::from_rdata(name("test."), soa_ttl, RData::SOA(soa)));
        reply
    }
}

impl Scripted {
    /// Starts a recursor in `namespace`. A script that returns nothing sends no reply; a script
    /// that blocks also delays all later UDP queries.
    pub(crate) fn start(
        namespace: &Namespace,
        address: SocketAddr,
        script: impl Fn(&Asked) -> Vec<Say> + Send + Sync + 'static,
    ) -> Result<Self> {
        let shared = Arc::new(Shared {
            script: Box::new(script),
            asked: Mutex::default(),
            ended: AtomicBool::new(false),
        });
        let sockets = namespace.run(|| -> io::Result<_> {
            let udp = socket2::Socket::from(UdpSocket::bind(address)?);
            let _ = udp.set_recv_buffer_size(4 << 20);
            Ok((UdpSocket::from(udp), TcpListener::bind(address)?))
        })?;
        let (udp, tcp) = sockets.with_context(|| format!("a recursor at {address}"))?;
        udp.set_read_timeout(Some(NAP))?;
        tcp.set_nonblocking(true)?;
        // The threads inherit the namespace, from which forged replies must be sent.
        let threads = namespace.run(|| {
            let (one, other) = (Arc::clone(&shared), Arc::clone(&shared));
            vec![
                thread::spawn(move || one.serve_udp(&udp)),
                thread::spawn(move || other.serve_tcp(&tcp)),
            ]
        })?;
        Ok(Self { shared, threads })
    }

    /// Starts a recursor that answers every name with `address`, TTL 300.
    pub(crate) fn answering(
        namespace: &Namespace,
        at: SocketAddr,
        address: Ipv4Addr,
    ) -> Result<Self> {
        Self::start(namespace, at, move |asked| {
            vec![asked.answer(address, 300).into()]
        })
    }

    /// Starts a recursor that never answers.
    pub(crate) fn silent(namespace: &Namespace, at: SocketAddr) -> Result<Self> {
        Self::start(namespace, at, |_| Vec::new())
    }

    /// Returns the queries received so far.
    pub(crate) fn asked(&self) -> Vec<Asked> {
        self.shared.asked().clone()
    }

    /// Returns the number of queries received so far.
    pub(crate) fn count(&self) -> usize {
        self.shared.asked().len()
    }

    /// Returns the number of queries with EDNS so far. A silent recursor also gets single ones without.
    pub(crate) fn count_with_edns(&self) -> usize {
        self.shared
            .asked()
            .iter()
            .filter(|asked| asked.message.edns.is_some())
            .count()
    }
}

impl Drop for Scripted {
    fn drop(&mut self) {
        self.shared.ended.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            // A panic of the script shows as a missing reply in the test.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn asked(&self) -> MutexGuard<'_, Vec<Asked>> {
        self.asked.lock()
    }

    /// Returns whether the threads should continue.
    fn goes_on(&self) -> bool {
        !self.ended.load(Ordering::Relaxed)
    }

    /// Returns the messages for a query; empty for a message that is not a query.
    fn consider(&self, bytes: &[u8], from: SocketAddr, by_tcp: bool) -> Vec<Say> {
        let Some(asked) = Asked::parse(bytes, from, by_tcp) else {
            return Vec::new();
        };
        self.asked().push(asked.clone());
        (self.script)(&asked)
    }

    fn serve_udp(&self, socket: &UdpSocket) {
        let mut buffer = vec![0; 65_535];
        let mut elsewhere: HashMap<SocketAddr, UdpSocket> = HashMap::new();
        while self.goes_on() {
            let Ok((length, client)) = socket.recv_from(&mut buffer) else {
                continue;
            };
            for Say { bytes, from } in self.consider(&buffer[..length], client, false) {
                let sender = match from {
                    None => socket,
                    Some(address) => elsewhere.entry(address).or_insert_with(|| {
                        UdpSocket::bind(address).expect("a free address in the test's namespace")
                    }),
                };
                let _ = sender.send_to(&bytes, client);
            }
        }
    }

    /// Serves connections one after the other; a query without a reply closes its connection.
    fn serve_tcp(&self, listener: &TcpListener) {
        while self.goes_on() {
            match listener.accept() {
                Ok((stream, client)) => drop(self.converse(stream, client)),
                Err(_) => thread::sleep(Duration::from_millis(2)),
            }
        }
    }

    /// Answers the queries of one connection.
    fn converse(&self, mut stream: TcpStream, client: SocketAddr) -> io::Result<()> {
        stream.set_nonblocking(false)?;
        stream.set_read_timeout(Some(Duration::from_secs(1)))?;
        while self.goes_on() {
            let mut length = [0; 2];
            stream.read_exact(&mut length)?;
            let mut query = vec![0; usize::from(u16::from_be_bytes(length))];
            stream.read_exact(&mut query)?;
            let says = self.consider(&query, client, true);
            if says.is_empty() {
                return Ok(());
            }
            for Say { bytes, .. } in says {
                let length = u16::try_from(bytes.len()).map_err(io::Error::other)?;
                stream.write_all(&[&length.to_be_bytes()[..], &bytes].concat())?;
            }
        }
        Ok(())
    }
}
