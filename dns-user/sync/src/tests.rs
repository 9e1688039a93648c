//! A NATS server for one client, without TLS, that shows what the client publishes.

use async_nats::ConnectOptions;
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    net::{TcpListener, tcp::OwnedReadHalf},
    sync::{mpsc, watch},
};

use crate::{bus::Bus, now_ms};

/// First line of the server.
const INFO: &str = r#"INFO {"server_id":"x","server_name":"x","version":"2.10.0","go":"x","host":"x","port":1,"proto":1,"max_payload":1048576,"headers":true,"client_id":1}"#;

pub(crate) struct FakeBus {
    pub(crate) bus: Bus,
    /// Subject and body of each message of the client.
    pub(crate) published: mpsc::UnboundedReceiver<(String, String)>,
    /// Bodies of messages to the client's last subscription.
    pub(crate) deliver: mpsc::UnboundedSender<String>,
}

impl FakeBus {
    pub(crate) async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let (said, published) = mpsc::unbounded_channel();
        let (deliver, outgoing) = mpsc::unbounded_channel();
        tokio::spawn(serve(listener, said, outgoing));
        Self {
            bus: Bus {
                client: ConnectOptions::new().connect(address).await.unwrap(),
                connected: watch::channel(0).1,
            },
            published,
            deliver,
        }
    }

    /// Waits for the next message of the client.
    pub(crate) async fn next(&mut self) -> (String, String) {
        self.published.recv().await.unwrap()
    }
}

async fn serve(
    listener: TcpListener,
    said: mpsc::UnboundedSender<(String, String)>,
    mut outgoing: mpsc::UnboundedReceiver<String>,
) {
    let (stream, _) = listener.accept().await.unwrap();
    let (reader, mut writer) = stream.into_split();
    writer
        .write_all(format!("{INFO}\r\n").as_bytes())
        .await
        .unwrap();
    let (command, mut commands) = mpsc::unbounded_channel();
    // Part of a line would be lost with a read that is called off.
    tokio::spawn(read(reader, command));
    let mut subscription: Option<String> = None;
    loop {
        let (line, body) = tokio::select! {
            command = commands.recv() => {
                let Some(command) = command else {
                    return;
                };
                command
            }
            body = outgoing.recv(), if subscription.is_some() => {
                let (Some(body), Some(place)) = (body, &subscription) else {
                    return;
                };
                let message = format!("MSG {place} {}\r\n{body}\r\n", body.len());
                writer.write_all(message.as_bytes()).await.unwrap();
                continue;
            }
        };
        let words: Vec<&str> = line.split_whitespace().collect();
        match words[..] {
            ["PING"] => writer.write_all(b"PONG\r\n").await.unwrap(),
            ["SUB", subject, id] => subscription = Some(format!("{subject} {id}")),
            ["PUB", subject, _] => {
                let _ = said.send((subject.to_owned(), body));
            }
            _ => {}
        }
    }
}

/// Passes on the client's commands, each with the body of a message.
async fn read(reader: OwnedReadHalf, commands: mpsc::UnboundedSender<(String, String)>) {
    let mut reader = BufReader::new(reader);
    let mut line = String::new();
    while reader.read_line(&mut line).await.unwrap_or(0) > 0 {
        let mut body = Vec::new();
        if let ["PUB", _, length] = line.split_whitespace().collect::<Vec<_>>()[..] {
            let length: usize = length.parse().unwrap();
            body.resize(length + 2, 0);
            reader.read_exact(&mut body).await.unwrap();
            body.truncate(length);
        }
        let body = String::from_utf8(body).unwrap();
        let _ = commands.send((std::mem::take(&mut line), body));
    }
}

#[test]
fn time_begins_in_1970() {
    let year_2020 = 1_577_836_800_000;
    assert!(now_ms() > year_2020);
}
