//! TCP connections.

use super::*;

#[tokio::test]
async fn ready_replies_do_not_wait() {
    let recursors = Stalling::new();
    let routes = Routes {
        recursors: Some(recursors.clone()),
        ..upcheck_only()
    };
    let server = Running::start(local(snapshot(1, 1)), routes).await;
    let mut stream = TcpStream::connect(server.address()).await.unwrap();
    let rounds = 20;
    for round in 0..rounds {
        // The first query stalls until the end of the rounds; the others are answered before it.
        let queries = [
            query(3 * round, "example.com", TYPE_A, CLASS_IN),
            query(3 * round + 1, "q-s0.q-g1.bosh", TYPE_A, CLASS_IN),
            query(3 * round + 2, "upcheck.bosh-dns", TYPE_A, CLASS_IN),
        ];
        stream
            .write_all(
                &queries
                    .iter()
                    .flat_map(|query| framed(query))
                    .collect::<Vec<u8>>(),
            )
            .await
            .unwrap();
        for id in [3 * round + 1, 3 * round + 2] {
            assert_eq!(read_reply(&mut stream).await.unwrap().metadata.id, id);
        }
    }
    recursors.wait_for(rounds.into()).await;
    recursors.release();
    let mut late = Vec::new();
    for _ in 0..rounds {
        late.push(read_reply(&mut stream).await.unwrap().metadata.id);
    }
    late.sort_unstable();
    assert_eq!(late, (0..rounds).map(|round| 3 * round).collect::<Vec<_>>());
    server.stop().await;
}

#[tokio::test]
async fn unread_replies_are_bounded() {
    const QUERIES: u16 = 5_000;
    let stalled = Stalling::new();
    let routes = Routes {
        recursors: Some(stalled.clone()),
        ..upcheck_only()
    };
    // 250 addresses are 4 KiB, so all replies are 20 MiB: more than the buffers of the sockets hold.
    let server = Running::start(local(snapshot(1, 250)), routes).await;
    for behind_a_forwarded_name in [false, true] {
        let stream = TcpStream::connect(server.address()).await.unwrap();
        let (mut reader, mut writer) = stream.into_split();
        let writing = tokio::spawn(async move {
            if behind_a_forwarded_name {
                writer
                    .write_all(&framed(&query(0, "example.com", TYPE_A, CLASS_IN)))
                    .await
                    .unwrap();
            }
            for id in 0..QUERIES {
                writer
                    .write_all(&framed(&query(id, "q-s0.q-g1.bosh", TYPE_A, CLASS_IN)))
                    .await
                    .unwrap();
            }
            writer
        });
        let mut most = 0;
        for _ in 0..50 {
            most = most.max(tcp_limits::held_by_all());
            sleep(Duration::from_millis(10)).await;
        }
        assert!(most <= 300 << 10, "{most} bytes of replies were held");
        // All replies arrive once they are read.
        stalled.release();
        let expected = usize::from(QUERIES) + usize::from(behind_a_forwarded_name);
        for count in 0..expected {
            let length = timeout(TIMEOUT, reader.read_u16()).await.unwrap().unwrap();
            let mut reply = vec![0; usize::from(length)];
            reader.read_exact(&mut reply).await.unwrap();
            assert!(reply.len() > 12, "reply {count}");
        }
        drop(writing.await.unwrap());
    }
    server.stop().await;
}

#[tokio::test]
async fn pipelined_queries_are_answered() {
    let recursors = Stalling::new();
    recursors.release();
    let routes = Routes {
        recursors: Some(recursors),
        ..upcheck_only()
    };
    let server = Running::start(local(snapshot(1, 3)), routes).await;
    let mut stream = TcpStream::connect(server.address()).await.unwrap();
    let names = ["q-s0.q-g1.bosh", "example.com", "x.y.z.bosh"];
    let flood: Vec<u8> = (0..1000u16)
        .flat_map(|id| framed(&query(id, names[usize::from(id) % 3], TYPE_A, CLASS_IN)))
        .collect();
    let (mut reader, mut writer) = stream.split();
    let write = async { writer.write_all(&flood).await.unwrap() };
    let read = async {
        let mut missing: std::collections::HashSet<u16> = (0..1000).collect();
        while !missing.is_empty() {
            let length = reader.read_u16().await.unwrap();
            let mut reply = vec![0; length.into()];
            reader.read_exact(&mut reply).await.unwrap();
            let reply = Message::from_vec(&reply).unwrap();
            assert!(missing.remove(&reply.metadata.id), "{reply}");
            let asked = names[usize::from(reply.metadata.id) % 3];
            assert_eq!(reply.queries[0].name().to_string(), format!("{asked}."));
        }
    };
    timeout(TIMEOUT, async { tokio::join!(write, read) })
        .await
        .unwrap();

    stream.set_nodelay(true).unwrap();
    for byte in framed(&query(4711, "q-s0.q-g1.bosh", TYPE_A, CLASS_IN)) {
        stream.write_all(&[byte]).await.unwrap();
        sleep(Duration::from_millis(1)).await;
    }
    assert_eq!(read_reply(&mut stream).await.unwrap().metadata.id, 4711);
    // A message that is not a query gets no reply, and the connection stays open.
    stream.write_all(&framed(b"\x12")).await.unwrap();
    stream
        .write_all(&framed(&query(5, "q-s0.q-g1.bosh", TYPE_A, CLASS_IN)))
        .await
        .unwrap();
    assert_eq!(read_reply(&mut stream).await.unwrap().metadata.id, 5);
    server.stop().await;
}

#[tokio::test]
async fn idle_connections_are_closed() {
    let options = Options {
        connections: Connections::new(2, OwnConnections::default()),
        tcp_idle_timeout: Duration::from_millis(400),
        ..Options::default()
    };
    let server = Running::start_with(
        &["127.0.0.1:0"],
        local(snapshot(1, 1)),
        upcheck_only(),
        options,
    )
    .await;
    let mut silent = Vec::new();
    for _ in 0..2 {
        let mut stream = TcpStream::connect(server.address()).await.unwrap();
        // An incomplete query does not count.
        stream.write_all(&[0, 30, 1, 2]).await.unwrap();
        silent.push(stream);
    }
    // The idlest connection is closed for the new one.
    let reply = ask_tcp(
        server.address(),
        &query(1, "q-s0.q-g1.bosh", TYPE_A, CLASS_IN),
    )
    .await;
    assert_eq!(addresses(&reply).len(), 1);
    for mut stream in silent {
        assert!(read_reply(&mut stream).await.is_none());
    }
    server.stop().await;
}
