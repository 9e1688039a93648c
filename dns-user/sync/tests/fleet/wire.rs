//! A connection between a client and a server that can be cut, like a network partition.

use std::{
    io::{ErrorKind, Read, Write},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use anyhow::Result;

/// Interval at which a copying thread checks the state.
const LOOK: Duration = Duration::from_millis(100);

/// Forwards TCP connections to one server. While cut, it accepts connections and bytes but delivers none in
/// either direction and closes nothing, so both ends must detect it themselves.
pub(crate) struct Wire {
    address: SocketAddr,
    state: Arc<State>,
}

#[derive(Default)]
struct State {
    cut: AtomicBool,
    ended: AtomicBool,
}

impl Wire {
    pub(crate) fn to(server: SocketAddr) -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let address = listener.local_addr()?;
        let state = Arc::new(State::default());
        let shared = state.clone();
        thread::spawn(move || {
            for client in listener.incoming().flatten() {
                if shared.ended.load(Ordering::Relaxed) {
                    return;
                }
                // If the server is down, the wire refuses connections like the server.
                let Ok(server) = TcpStream::connect(server) else {
                    continue;
                };
                let pairs = [
                    (client.try_clone(), server.try_clone()),
                    (Ok(server), Ok(client)),
                ];
                for (from, to) in pairs {
                    let (Ok(from), Ok(to)) = (from, to) else {
                        continue;
                    };
                    let state = shared.clone();
                    thread::spawn(move || copy(from, to, &state));
                }
            }
        });
        Ok(Self { address, state })
    }

    /// Address that clients use instead of the server's.
    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    pub(crate) fn cut(&self, cut: bool) {
        self.state.cut.store(cut, Ordering::Relaxed);
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        self.state.ended.store(true, Ordering::Relaxed);
        // Wakes the accepting thread.
        let _ = TcpStream::connect(self.address);
    }
}

/// Copies one direction until either end closes it.
fn copy(mut from: TcpStream, mut to: TcpStream, state: &State) {
    let mut buffer = [0; 16 << 10];
    if from.set_read_timeout(Some(LOOK)).is_err() {
        return;
    }
    while !state.ended.load(Ordering::Relaxed) {
        let read = match from.read(&mut buffer) {
            Ok(0) => break,
            Ok(read) => read,
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                continue;
            }
            Err(_) => break,
        };
        while state.cut.load(Ordering::Relaxed) && !state.ended.load(Ordering::Relaxed) {
            thread::sleep(LOOK);
        }
        if to.write_all(&buffer[..read]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Both);
    let _ = from.shutdown(Shutdown::Both);
}
