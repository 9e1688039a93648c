//! A recursor that answers every query with the same address after a delay, as a distant one does.

use std::{
    collections::VecDeque,
    net::{SocketAddr, UdpSocket},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use whole_system_tests::cpu::stay_on;

use crate::lab::{Lab, SERVER_CPU};

/// Pause between two polls of the socket, and so the error of the delay.
const NAP: Duration = Duration::from_micros(500);

/// Size of the socket's receive queue in bytes.
const BUFFER: usize = 8 << 20;

/// A recursor on the server's CPU, stopped when dropped.
#[derive(Debug)]
pub struct SlowRecursor {
    ended: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl SlowRecursor {
    /// Starts the recursor in the server's namespace.
    pub fn start(lab: &Lab, address: SocketAddr, delay: Duration) -> Result<Self> {
        let ended = Arc::new(AtomicBool::new(false));
        let observed = Arc::clone(&ended);
        let thread = lab.server.run(|| -> Result<JoinHandle<()>> {
            let socket = socket2::Socket::from(UdpSocket::bind(address).context("the slow recursor")?);
            socket.set_recv_buffer_size(BUFFER)?;
            socket.set_nonblocking(true)?;
            Ok(thread::spawn(move || {
                // On a machine with one CPU there is no choice.
                let _ = stay_on(SERVER_CPU);
                serve(&socket.into(), delay, &observed);
            }))
        })??;
        Ok(Self { ended, thread: Some(thread) })
    }
}

impl Drop for SlowRecursor {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // A panic shows as missing replies.
            let _ = thread.join();
        }
    }
}

/// Answers queries until `ended`.
fn serve(socket: &UdpSocket, delay: Duration, ended: &AtomicBool) {
    let mut waiting: VecDeque<(Instant, SocketAddr, Vec<u8>)> = VecDeque::new();
    let mut buffer = [0; 1500];
    while !ended.load(Ordering::Relaxed) {
        while let Ok((length, client)) = socket.recv_from(&mut buffer) {
            if let Some(reply) = reply(&buffer[..length]) {
                waiting.push_back((Instant::now() + delay, client, reply));
            }
        }
        while let Some((_, client, reply)) = waiting.pop_front_if(|(due, ..)| *due <= Instant::now()) {
            let _ = socket.send_to(&reply, client);
        }
        thread::sleep(NAP);
    }
}

/// Builds the reply to a query: its question, and the address 192.0.2.1 with a TTL of a minute.
fn reply(query: &[u8]) -> Option<Vec<u8>> {
    let mut end = 12;
    while *query.get(end)? != 0 {
        end += 1 + usize::from(query[end]);
    }
    let question = query.get(12..end + 5)?;
    let mut reply = Vec::with_capacity(query.len() + 16);
    reply.extend_from_slice(&query[..2]);
    // QR, RD and RA; one question, one answer.
    reply.extend_from_slice(&[0x81, 0x80, 0, 1, 0, 1, 0, 0, 0, 0]);
    reply.extend_from_slice(question);
    reply.extend_from_slice(&[0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 60, 0, 4, 192, 0, 2, 1]);
    Some(reply)
}
