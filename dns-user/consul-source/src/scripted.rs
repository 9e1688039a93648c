//! An agent for tests that gives prepared replies, one after the other.

use std::{collections::VecDeque, sync::Arc};

use parking_lot::Mutex;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
};

use dns_consul::config::ApiAddress;

/// The agent; it serves until the test's runtime ends.
pub(crate) struct ScriptedAgent {
    pub(crate) address: ApiAddress,
    script: Arc<Mutex<Script>>,
}

struct Script {
    /// Status with further headers, and body, of the replies to come.
    replies: VecDeque<(String, String)>,
    /// Paths of the requests so far.
    paths: Vec<String>,
}

impl ScriptedAgent {
    /// Starts an agent with these replies; later requests get none.
    pub(crate) async fn start(replies: &[(&str, &str)]) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut script = Script {
            replies: VecDeque::new(),
            paths: Vec::new(),
        };
        for &(head, body) in replies {
            script.replies.push_back((head.to_owned(), body.to_owned()));
        }
        let script = Arc::new(Mutex::new(script));
        let address = ApiAddress {
            tls: false,
            host: "127.0.0.1".to_owned(),
            port: listener.local_addr().unwrap().port(),
        };
        let served = script.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(serve(stream, served.clone()));
            }
        });
        Self { address, script }
    }

    /// Returns the paths of the requests since the last call.
    pub(crate) fn take_paths(&self) -> Vec<String> {
        std::mem::take(&mut self.script.lock().paths)
    }
}

async fn serve(mut stream: TcpStream, script: Arc<Mutex<Script>>) {
    loop {
        let mut request = Vec::new();
        while !request.ends_with(b"\r\n\r\n") {
            // The client has closed the connection.
            let Ok(byte) = stream.read_u8().await else {
                return;
            };
            request.push(byte);
        }
        let request = String::from_utf8(request).unwrap();
        let path = request.split(' ').nth(1).unwrap().to_owned();
        let reply = {
            let mut script = script.lock();
            script.paths.push(path);
            script.replies.pop_front()
        };
        let Some((head, body)) = reply else {
            return std::future::pending().await;
        };
        let length = body.len();
        let reply = format!("HTTP/1.1 {head}\r\ncontent-length: {length}\r\n\r\n{body}");
        stream.write_all(reply.as_bytes()).await.unwrap();
    }
}
