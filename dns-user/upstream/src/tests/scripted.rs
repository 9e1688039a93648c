//! A recursor with scripted replies.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpSocket, UdpSocket},
    task::JoinHandle,
};

use crate::message;
use dns_core::wire::{ReplyFlags, begin_reply};

/// The replies of a scripted recursor to a query, in order.
type Script = dyn Fn(&[u8]) -> Vec<Vec<u8>> + Send + Sync;

/// A recursor on a port of 127.0.0.1 or ::1 over UDP and TCP; runs until dropped.
pub(super) struct Scripted {
    pub(super) address: SocketAddr,
    /// Number of queries by UDP so far.
    pub(super) udp: Arc<AtomicUsize>,
    /// Number of queries by TCP so far.
    pub(super) tcp: Arc<AtomicUsize>,
    /// Number of TCP connections.
    pub(super) connections: Arc<AtomicUsize>,
    tasks: Vec<JoinHandle<()>>,
}

impl Scripted {
    /// Starts on 127.0.0.1. Over TCP, an empty script closes the connection.
    pub(super) async fn start(
        script: impl Fn(&[u8]) -> Vec<Vec<u8>> + Send + Sync + 'static,
    ) -> Self {
        Self::start_on("127.0.0.1:0", script).await
    }

    /// Starts on a given address; port 0 selects any.
    pub(super) async fn start_on(
        address: &str,
        script: impl Fn(&[u8]) -> Vec<Vec<u8>> + Send + Sync + 'static,
    ) -> Self {
        let script: Arc<Script> = Arc::new(script);
        let (udp_socket, listener) = loop {
            let udp = UdpSocket::bind(address)
                .await
                .expect("loopback has free ports");
            let local = udp.local_addr().expect("it is bound");
            if let Ok(tcp) = TcpListener::bind(local).await {
                break (udp, tcp);
            }
        };
        let address = udp_socket.local_addr().expect("it is bound");
        let counters: [Arc<AtomicUsize>; 3] = Default::default();
        let [udp, tcp, connections] = counters.clone();
        let tasks = vec![
            tokio::spawn(serve_udp(udp_socket, Arc::clone(&script), Arc::clone(&udp))),
            tokio::spawn(serve_tcp(
                listener,
                script,
                Arc::clone(&tcp),
                Arc::clone(&connections),
            )),
        ];
        Self {
            address,
            udp,
            tcp,
            connections,
            tasks,
        }
    }

    /// Returns the address in the form in which recursors are configured.
    pub(super) fn name(&self) -> String {
        self.address.to_string()
    }

    /// Returns the number of queries by UDP and by TCP so far.
    pub(super) fn counts(&self) -> (usize, usize) {
        (
            self.udp.load(Ordering::Relaxed),
            self.tcp.load(Ordering::Relaxed),
        )
    }
}

/// Holds a TCP port without listening: connections are refused, and no other process takes it.
pub(super) fn refusing() -> TcpSocket {
    let socket = TcpSocket::new_v4().expect("there are sockets");
    let any = SocketAddr::from(([127, 0, 0, 1], 0));
    socket.bind(any).expect("loopback has free ports");
    socket
}

impl Drop for Scripted {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

async fn serve_udp(socket: UdpSocket, script: Arc<Script>, count: Arc<AtomicUsize>) {
    let mut buffer = vec![0; 65_535];
    while let Ok((length, client)) = socket.recv_from(&mut buffer).await {
        count.fetch_add(1, Ordering::Relaxed);
        for reply in script(&buffer[..length]) {
            let _ = socket.send_to(&reply, client).await;
        }
    }
}

async fn serve_tcp(
    listener: TcpListener,
    script: Arc<Script>,
    count: Arc<AtomicUsize>,
    connections: Arc<AtomicUsize>,
) {
    while let Ok((mut stream, _)) = listener.accept().await {
        connections.fetch_add(1, Ordering::Relaxed);
        let (script, count) = (Arc::clone(&script), Arc::clone(&count));
        tokio::spawn(async move {
            while let Ok(length) = stream.read_u16().await {
                let mut query = vec![0; usize::from(length)];
                if stream.read_exact(&mut query).await.is_err() {
                    return;
                }
                count.fetch_add(1, Ordering::Relaxed);
                let replies = script(&query);
                if replies.is_empty() {
                    return;
                }
                for reply in replies {
                    let length = u16::try_from(reply.len()).expect("scripts keep to 16 bits");
                    let frame = [&length.to_be_bytes()[..], &reply].concat();
                    if stream.write_all(&frame).await.is_err() {
                        return;
                    }
                }
            }
        });
    }
}

/// Returns a NOERROR reply with the given addresses, TTL 300.
pub(super) fn answer(query: &[u8], addresses: &[[u8; 4]]) -> Vec<u8> {
    let mut reply = refuse(query, message::NOERROR);
    for address in addresses {
        assert!(message::push_answer(
            &mut reply,
            &message::QUESTION_NAME,
            1,
            300,
            address
        ));
    }
    reply
}

/// Returns a reply without records.
pub(super) fn refuse(query: &[u8], rcode: u8) -> Vec<u8> {
    begin_reply(&super::parsed(query), rcode, ReplyFlags::RECURSION)
}

/// Returns an NXDOMAIN reply with an SOA of TTL 900 and minimum 120 in the authority section.
pub(super) fn nxdomain(query: &[u8]) -> Vec<u8> {
    let mut reply = refuse(query, message::NXDOMAIN);
    reply[9] = 1;
    reply.extend_from_slice(b"\0\0\x06\0\x01\0\0\x03\x84\0\x16\0\0");
    for number in [7u32, 3600, 600, 86_400, 120] {
        reply.extend_from_slice(&number.to_be_bytes());
    }
    reply
}
