//! A NATS server for one client, without TLS, that shows what the client publishes.

use async_nats::ConnectOptions;
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    net::TcpListener,
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
    let mut reader = BufReader::new(reader);
    writer
        .write_all(format!("{INFO}\r\n").as_bytes())
        .await
        .unwrap();
    let mut subscription: Option<String> = None;
    let mut line = String::new();
    loop {
        tokio::select! {
            // Only whole lines are taken, because the client writes them at once.
            read = reader.read_line(&mut line) => {
                if read.unwrap_or(0) == 0 {
                    return;
                }
            }
            body = outgoing.recv(), if subscription.is_some() => {
                let (Some(body), Some(place)) = (body, &subscription) else {
                    return;
                };
                let message = format!("MSG {place} {}\r\n{body}\r\n", body.len());
                writer.write_all(message.as_bytes()).await.unwrap();
                continue;
            }
        }
        let text = std::mem::take(&mut line);
        let words: Vec<&str> = text.split_whitespace().collect();
        match words[..] {
            ["PING"] => writer.write_all(b"PONG\r\n").await.unwrap(),
            ["SUB", subject, id] => subscription = Some(format!("{subject} {id}")),
            ["PUB", subject, length] => {
                let length: usize = length.parse().unwrap();
                let mut body = vec![0; length + 2];
                reader.read_exact(&mut body).await.unwrap();
                body.truncate(length);
                let message = (subject.to_owned(), String::from_utf8(body).unwrap());
                let _ = said.send(message);
            }
            _ => {}
        }
    }
}

#[test]
fn time_begins_in_1970() {
    let year_2020 = 1_577_836_800_000;
    assert!(now_ms() > year_2020);
}
