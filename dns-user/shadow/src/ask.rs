//! Asks a server itself, politely, and yields its replies.

use std::{
    io,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use dns_core::{
    name::Name,
    wire::{FLAG_RD, HEADER_LEN, Transport, opt_record, query_message, u16_at},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpStream, UdpSocket},
    sync::{Semaphore, mpsc},
    time::{MissedTickBehavior, interval, timeout},
};

use crate::pairs::Exchange;

/// Time limit of a query.
const PATIENCE: Duration = Duration::from_secs(3);
/// Maximum number of queries that wait for their replies.
const MAX_WAITING: usize = 64;
/// Queries in a row without a reply after which the server counts as gone.
const MAX_SILENT: u32 = 64;
/// Datagrams of others that are skipped before a query counts as unanswered.
const MAX_STRAY: usize = 16;

/// More than the judge needs to call an order fixed.
const REPETITIONS: usize = 48;

/// The form of a query: its transport and the size in its OPT.
pub type Form = (Transport, Option<u16>);

/// The forms in which names are asked.
pub const FORMS: [Form; 6] = [
    (Transport::Udp, None),
    (Transport::Udp, Some(512)),
    (Transport::Udp, Some(1232)),
    (Transport::Udp, Some(4096)),
    (Transport::Tcp, None),
    (Transport::Tcp, Some(1232)),
];

/// A question in a form.
#[derive(Clone, Debug)]
pub struct PlannedQuery {
    /// Name of the question.
    pub name: Name,
    /// Type of the question.
    pub qtype: u16,
    /// Transport and EDNS of the query.
    pub form: Form,
}

/// Plans the queries: each question in each form, or in turns in one form if that were more than `most`.
pub fn plan(questions: &[(Name, u16)], most: usize) -> Vec<PlannedQuery> {
    // Every name in one form tells more than a few names in all of them.
    let has_room = questions.len() * FORMS.len() <= most;
    let mut planned = Vec::new();
    for (number, (name, qtype)) in questions.iter().enumerate() {
        let forms = if has_room {
            &FORMS[..]
        } else {
            &FORMS[number % FORMS.len()..][..1]
        };
        for &form in forms {
            planned.push(PlannedQuery {
                name: name.clone(),
                qtype: *qtype,
                form,
            });
        }
    }
    planned
}

/// Returns a question often enough to tell a fixed order of its answers from a random one.
pub fn repeated(name: &Name, qtype: u16) -> Vec<PlannedQuery> {
    let query = PlannedQuery {
        name: name.clone(),
        qtype,
        form: FORMS[0],
    };
    vec![query; REPETITIONS]
}

/// How a server is asked.
#[derive(Clone, Copy, Debug)]
pub struct Manner {
    /// Address of the server.
    pub server: SocketAddr,
    /// Maximum number of queries per second.
    pub rate: u32,
    /// Time limit of all queries.
    pub time: Duration,
}

/// How the asking ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// Every query was sent.
    Complete,
    /// The time was over, or the user ended it; so many queries were not sent.
    Early(usize),
    /// The server stopped answering; so many queries were not sent.
    Silent(usize),
}

/// Sends the queries and passes each with its reply, or without one, to `exchanges`.
pub async fn ask(
    planned: Vec<PlannedQuery>,
    manner: Manner,
    stop: Arc<AtomicBool>,
    exchanges: mpsc::Sender<Exchange>,
) -> Ending {
    let begin = Instant::now();
    let slots = Arc::new(Semaphore::new(MAX_WAITING));
    let silent = Arc::new(AtomicU32::new(0));
    let mut pace = interval(Duration::from_secs(1) / manner.rate.max(1));
    // A delay is not made up for by a burst.
    pace.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let total = planned.len();
    let mut ending = Ending::Complete;
    for (number, query) in planned.into_iter().enumerate() {
        pace.tick().await;
        let Ok(slot) = slots.clone().acquire_owned().await else {
            break;
        };
        if stop.load(Ordering::Relaxed) || begin.elapsed() >= manner.time {
            ending = Ending::Early(total - number);
            break;
        }
        // A server that has stopped answering may be overloaded: it is left alone.
        if silent.load(Ordering::Relaxed) >= MAX_SILENT {
            ending = Ending::Silent(total - number);
            break;
        }
        let exchanges = exchanges.clone();
        let silent = silent.clone();
        tokio::spawn(async move {
            let exchange = exchange(&query, manner.server).await;
            if exchange.reply.is_empty() {
                silent.fetch_add(1, Ordering::Relaxed);
            } else {
                silent.store(0, Ordering::Relaxed);
            }
            // The receiver ends only with the process.
            let _ = exchanges.send(exchange).await;
            drop(slot);
        });
    }
    // Waits for the replies that are due; each is bounded in time.
    let _all = slots.acquire_many(MAX_WAITING as u32).await;
    ending
}

/// Sends a query and returns it with its reply, which is empty if there was none.
async fn exchange(planned: &PlannedQuery, server: SocketAddr) -> Exchange {
    let query = message(planned);
    let asked = Instant::now();
    let (transport, _) = planned.form;
    let answered = async {
        match transport {
            Transport::Udp => ask_udp(server, &query).await,
            Transport::Tcp => ask_tcp(server, &query).await,
        }
    };
    let result = timeout(PATIENCE, answered).await;
    let (reply, client) = match result {
        Ok(Ok(answered)) => answered,
        // Unreachable, closed or silent: a client sees no difference.
        Ok(Err(_)) | Err(_) => (Vec::new(), SocketAddr::from(([0, 0, 0, 0], 0))),
    };
    let replied = Instant::now();
    Exchange {
        client,
        transport,
        query,
        reply,
        asked,
        replied,
        latency: Some(replied.duration_since(asked)),
    }
}

/// Returns the message of a query, with its name in a random letter case: replies have to repeat it.
fn message(planned: &PlannedQuery) -> Vec<u8> {
    let mut name = planned.name.as_wire().to_vec();
    for byte in &mut name {
        // Lengths of labels are below 64, so none of them is a letter.
        if byte.is_ascii_lowercase() && rand::random() {
            byte.make_ascii_uppercase();
        }
    }
    let mut message = query_message(rand::random(), FLAG_RD, &name, planned.qtype);
    if let (_, Some(size)) = planned.form {
        message.extend_from_slice(&opt_record(size, 0, false));
        // ARCOUNT, of which there is none yet.
        message[11] = 1;
    }
    message
}

async fn ask_udp(server: SocketAddr, query: &[u8]) -> io::Result<(Vec<u8>, SocketAddr)> {
    let any = if server.is_ipv4() {
        "0.0.0.0:0"
    } else {
        "[::]:0"
    };
    let socket = UdpSocket::bind(any).await?;
    // The kernel drops datagrams of other addresses from now on.
    socket.connect(server).await?;
    socket.send(query).await?;
    // A server may send more than the OPT permits, which is a finding and must not be cut off.
    let mut reply = vec![0; 65_535];
    for _ in 0..MAX_STRAY {
        let length = socket.recv(&mut reply).await?;
        // A datagram with the server's address may be forged.
        if is_reply(query, &reply[..length]) {
            reply.truncate(length);
            return Ok((reply, socket.local_addr()?));
        }
    }
    Err(io::ErrorKind::InvalidData.into())
}

async fn ask_tcp(server: SocketAddr, query: &[u8]) -> io::Result<(Vec<u8>, SocketAddr)> {
    let mut stream = TcpStream::connect(server).await?;
    let length = u16::try_from(query.len()).map_err(io::Error::other)?;
    let framed = [&length.to_be_bytes()[..], query].concat();
    stream.write_all(&framed).await?;
    let length = stream.read_u16().await?;
    let mut reply = vec![0; usize::from(length)];
    stream.read_exact(&mut reply).await?;
    // The connection has only this query, so no other reply is due.
    if !is_reply(query, &reply) {
        return Err(io::ErrorKind::InvalidData.into());
    }
    Ok((reply, stream.local_addr()?))
}

/// Returns whether a message is a reply with the id of the query. Its question is compared later.
fn is_reply(query: &[u8], message: &[u8]) -> bool {
    /// QR of the flags.
    const QR: u8 = 0x80;
    message.len() >= HEADER_LEN && u16_at(message, 0) == u16_at(query, 0) && message[2] & QR != 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_names_take_turns() {
        let name = Name::from_text("web.bosh.").unwrap();
        let questions = vec![(name, 1); 10];
        assert_eq!(plan(&questions, 60).len(), 60);
        let turns = plan(&questions, 59);
        assert_eq!(turns.len(), 10);
        let forms: Vec<Form> = turns.iter().map(|query| query.form).collect();
        assert_eq!(&forms[..6], FORMS);
    }

    #[tokio::test]
    async fn a_forged_or_hung_server_costs_bounded_time() {
        let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let server = socket.local_addr().unwrap();
        // Replies to every query many times, always with another id.
        tokio::spawn(async move {
            let mut buffer = [0; 512];
            loop {
                let (length, peer) = socket.recv_from(&mut buffer).await.unwrap();
                buffer[0] ^= 1;
                buffer[2] |= 0x80;
                for _ in 0..2 * MAX_STRAY {
                    let _ = socket.send_to(&buffer[..length], peer).await;
                }
            }
        });
        let name = Name::from_text("web.bosh.").unwrap();
        let planned: Vec<PlannedQuery> = (0..1000)
            .map(|_| PlannedQuery {
                name: name.clone(),
                qtype: 1,
                form: FORMS[0],
            })
            .collect();
        let manner = Manner {
            server,
            rate: 100_000,
            time: Duration::from_secs(60),
        };
        let (sender, mut receiver) = mpsc::channel(2000);
        let ending = ask(planned, manner, Arc::default(), sender).await;
        let Ending::Silent(left) = ending else {
            panic!("{ending:?}");
        };
        let mut asked = 0;
        while let Ok(exchange) = receiver.try_recv() {
            assert!(exchange.reply.is_empty());
            asked += 1;
        }
        assert_eq!(asked + left, 1000);
        assert!(asked <= 2 * MAX_WAITING + MAX_SILENT as usize, "{asked}");
    }
}
