use std::collections::VecDeque;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::*;

/// Starts a server whose `/` returns `body`; it ends with the test's runtime.
async fn server(limits: Limits, body: Vec<u8>) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let router = Router::new().route("/", get(|| async { body }));
    let server = Server::new("the test", Listener::Plain(listener)).with_limits(limits);
    tokio::spawn(server.run(move |_| router.clone(), std::future::pending()));
    address
}

/// Sends a request whose response ends the connection.
async fn request(address: SocketAddr) -> TcpStream {
    let mut client = TcpStream::connect(address).await.unwrap();
    client
        .write_all(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        .await
        .unwrap();
    client
}

#[tokio::test]
async fn new_connection_replaces_oldest() {
    let limits = Limits {
        connections: 8,
        ..Limits::default()
    };
    let address = server(limits, b"up 1\n".to_vec()).await;
    let mut idle = Vec::new();
    for _ in 0..3 * limits.connections {
        idle.push(TcpStream::connect(address).await.unwrap());
    }
    let mut reply = String::new();
    request(address)
        .await
        .read_to_string(&mut reply)
        .await
        .unwrap();
    assert!(
        reply.starts_with("HTTP/1.1 200") && reply.ends_with("up 1\n"),
        "{reply}"
    );
    // The oldest was closed for a newer one.
    assert_eq!(idle[0].read(&mut [0]).await.unwrap(), 0);
}

#[test]
fn peer_with_most_connections_gives_way() {
    let connections = Arc::new(Mutex::new(Connections::default()));
    let take = |user| Place::take(&connections, Peer::User(user));
    let (quiet, _) = take(1);
    let busy: Vec<_> = (0..3).map(|_| take(2)).collect();
    busy[0].0.established();
    assert_eq!(connections.lock().make_room(4), None);
    let late = take(3);
    // A handshake without progress goes before an older connection.
    connections.lock().peers.get_mut(&Peer::User(2)).unwrap()[1].since -= HANDSHAKE_GRACE;
    assert_eq!(connections.lock().make_room(4), Some(Peer::User(2)));
    assert_eq!(connections.lock().count, 4);
    let numbers = |peer| -> Vec<u64> {
        let table = connections.lock();
        table
            .peers
            .get(&Peer::User(peer))
            .into_iter()
            .flatten()
            .map(|connection| connection.number)
            .collect()
    };
    assert_eq!(numbers(2), [1, 3]);
    // Among peers with one connection each, the oldest gives way.
    drop(busy);
    assert_eq!(connections.lock().make_room(1), Some(Peer::User(1)));
    assert_eq!(numbers(3), [late.0.number]);
    drop((quiet, late));
    assert_eq!(connections.lock().count, 0);
}

#[tokio::test]
async fn unread_reply_closes_connection() {
    const BODY: usize = 64 << 20;
    let limits = Limits {
        unread: Duration::from_millis(200),
        ..Limits::default()
    };
    let address = server(limits, vec![b'x'; BODY]).await;
    let mut client = request(address).await;
    // Long enough for the server to time out even on a busy machine.
    tokio::time::sleep(Duration::from_secs(2)).await;
    let mut read = Vec::new();
    // A reset also proves that the connection was closed.
    let _ = client.read_to_end(&mut read).await;
    assert!(read.len() < BODY, "{}", read.len());
}

#[tokio::test]
async fn reader_survives_silent_clients() {
    const BODY: usize = 4 << 20;
    let address = server(Limits::default(), vec![b'x'; BODY]).await;
    // Twelve at a time, renewed for as long as the reader reads.
    let silent = async {
        let mut silent = VecDeque::new();
        loop {
            silent.push_back(request(address).await);
            if silent.len() > 12 {
                silent.pop_front();
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let reader = async {
        loop {
            let (mut client, mut part, mut read) =
                (request(address).await, vec![0; 16 << 10], Vec::new());
            loop {
                let count = client.read(&mut part).await.unwrap();
                if count == 0 {
                    break;
                }
                read.extend_from_slice(&part[..count]);
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            if read.starts_with(b"HTTP/1.1 200") {
                return read.len();
            }
            assert!(read.starts_with(b"HTTP/1.1 503"), "{}", read.len());
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    let read = tokio::select! {
        () = silent => unreachable!("it never ends"),
        read = reader => read,
    };
    assert!(read > BODY, "cut off after {read} bytes");
}
