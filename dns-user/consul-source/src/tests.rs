use std::collections::VecDeque;

use dns_consul::{Missing, config::ApiAddress};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
};

use super::*;

/// An agent that gives prepared replies, one after the other; it serves until the test's runtime ends.
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

#[tokio::test]
async fn handle_forwards_demands_and_ends() {
    let (demands, mut demanded) = mpsc::channel(3);
    let (_views, views) = watch::channel(Arc::new(CatalogView::default()));
    let task = tokio::spawn(std::future::pending::<()>());
    let source = LiveConsul {
        demands,
        views,
        status: Arc::default(),
        watches_all: Arc::default(),
        _task: Running(task.abort_handle()),
    };
    let place = || Place::Datacenter("dc1".into());
    let lack = || Lack {
        place: place(),
        missing: Missing::Queries,
    };
    source.demand(lack());
    source.asked(place(), "web".to_owned());
    source.used(vec![(place(), "db".to_owned())]);
    // The queue is full: none of these waits.
    source.demand(lack());
    source.asked(place(), "web".to_owned());
    source.used(Vec::new());
    let mut found = Vec::new();
    while let Ok(demand) = demanded.try_recv() {
        found.push(format!("{demand:?}"));
    }
    let place = r#"Datacenter("dc1")"#;
    let expected = [
        format!("Lack(Lack {{ place: {place}, missing: Queries }})"),
        format!("Queried(({place}, \"web\"))"),
        format!("Used([({place}, \"db\")])"),
    ];
    assert_eq!(found, expected);
    for watches_all in [true, false] {
        source.watches_all.store(watches_all, Ordering::Relaxed);
        assert_eq!(source.watches_all(), watches_all);
    }
    let status = LiveStatus {
        services: 7,
        ..LiveStatus::default()
    };
    *source.status.lock() = status.clone();
    assert_eq!(source.status(), status);
    drop(source);
    assert!(task.await.unwrap_err().is_cancelled());
}
