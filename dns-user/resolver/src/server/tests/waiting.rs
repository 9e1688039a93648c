//! Queries that wait for recursors or first checks, and panics.

use super::*;

#[tokio::test]
async fn stalled_upstream_delays_only_forwarding() {
    let recursors = Stalling::new();
    let routes = Routes {
        recursors: Some(recursors.clone()),
        ..upcheck_only()
    };
    let options = Options {
        request_timeout: Duration::from_secs(8),
        // One client gets half of these slots.
        waiting: Admission::new(16),
        workers: NonZeroUsize::new(1),
        ..Options::default()
    };
    let server =
        Running::start_with(&["127.0.0.1:0"], local(snapshot(1, 1)), routes, options).await;
    let address = server.address();
    let outside = query(1, "example.com", TYPE_A, CLASS_IN);
    let stalled: Vec<_> = (0..8)
        .map(|_| {
            let outside = outside.clone();
            tokio::spawn(async move { ask_udp(address, &outside).await })
        })
        .collect();
    recursors.wait_for(8).await;
    // No slot is left: the next query fails immediately, and local names are still answered.
    let reply = ask_udp(address, &outside).await;
    assert_eq!(reply.metadata.response_code, ResponseCode::ServFail);
    assert_eq!(recursors.asked.load(Ordering::SeqCst), 8);
    let web = query(1, "q-s0.q-g1.bosh", TYPE_A, CLASS_IN);
    assert_eq!(addresses(&ask_udp(address, &web).await).len(), 1);
    for reply in stalled {
        assert_eq!(
            reply.await.unwrap().metadata.response_code,
            ResponseCode::ServFail
        );
    }
    server.stop().await;
}

#[tokio::test]
async fn shutdown_answers_queries_in_flight() {
    let recursors = Stalling::new();
    let routes = Routes {
        recursors: Some(recursors.clone()),
        ..upcheck_only()
    };
    let server = Running::start(local(snapshot(1, 1)), routes).await;
    let address = server.address();
    let by_udp =
        tokio::spawn(
            async move { ask_udp(address, &query(1, "example.com", TYPE_A, CLASS_IN)).await },
        );
    let by_tcp =
        tokio::spawn(
            async move { ask_tcp(address, &query(1, "example.com", TYPE_A, CLASS_IN)).await },
        );
    recursors.wait_for(2).await;
    let release = async {
        sleep(Duration::from_millis(50)).await;
        recursors.release();
    };
    tokio::join!(server.stop(), release);
    assert_eq!(
        by_udp.await.unwrap().metadata.response_code,
        ResponseCode::NoError
    );
    assert_eq!(
        by_tcp.await.unwrap().metadata.response_code,
        ResponseCode::NoError
    );
    assert!(TcpStream::connect(address).await.is_err());
}

#[tokio::test]
async fn y1_waits_for_first_checks() {
    let limits = Limits {
        names: 9,
        first_checks: TIMEOUT,
        ttl: None,
    };
    let states = Arc::new(HealthStates::default());
    let (tracker, _orders) = Tracker::new(limits, states.clone(), FastPathHandle::default());
    let tracker = Arc::new(tracker);
    let local = Arc::new(ServerState::new(
        snapshot(1, 2),
        states.clone(),
        FastPathHandle::default(),
        Some(tracker.clone()),
        None,
    ));
    let server = Running::start(local, upcheck_only()).await;
    let plain = query(1, "q-s0.q-g1.bosh", TYPE_A, CLASS_IN);
    for _ in 0..3 {
        assert_eq!(addresses(&ask_udp(server.address(), &plain).await).len(), 2);
        assert!(tracker.is_tracked(&Name::from_text("q-s0.q-g1.bosh").unwrap()));
    }
    let waits = query(1, "q-s0y1.q-g1.bosh", TYPE_A, CLASS_IN);
    let watcher = tokio::spawn(async move {
        let y1 = Name::from_text("q-s0y1.q-g1.bosh").unwrap();
        while !tracker.is_tracked(&y1) {
            sleep(Duration::from_millis(1)).await;
        }
        sleep(Duration::from_millis(20)).await;
        for (last, state) in [(0, HealthState::Failing), (1, HealthState::Running)] {
            let health = InstanceHealth {
                state,
                groups: Box::default(),
            };
            assert!(tracker.checked(IpAddr::from([10, 0, 1, last]), health));
        }
    });
    assert_eq!(
        addresses(&ask_udp(server.address(), &waits).await),
        [IpAddr::from([10, 0, 1, 1])]
    );
    watcher.await.unwrap();
    // Entries cached before the checks are invalid.
    assert_eq!(
        addresses(&ask_udp(server.address(), &plain).await),
        [IpAddr::from([10, 0, 1, 1])]
    );
    server.stop().await;
}

#[tokio::test]
async fn panic_costs_single_reply() {
    /// Panics while the flag is set.
    struct Panics(AtomicBool);
    impl Health for Panics {
        fn state(&self, _ip: IpAddr, _group: Option<&str>) -> HealthState {
            assert!(
                !self.0.load(Ordering::SeqCst),
                "a defect, made for this test"
            );
            HealthState::Running
        }
    }
    let health = Arc::new(Panics(AtomicBool::new(true)));
    let local = with_health(snapshot(1, 1), health.clone());
    let options = Options {
        workers: NonZeroUsize::new(1),
        ..Options::default()
    };
    let server = Running::start_with(&["127.0.0.1:0"], local, upcheck_only(), options).await;
    let web = query(1, "q-s0.q-g1.bosh", TYPE_A, CLASS_IN);
    let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    socket.send_to(&web, server.address()).await.unwrap();
    // Answered by the only worker after it has started the other query.
    ask_udp(
        server.address(),
        &query(2, "upcheck.bosh-dns", TYPE_A, CLASS_IN),
    )
    .await;
    health.0.store(false, Ordering::SeqCst);
    assert_eq!(addresses(&ask_udp(server.address(), &web).await).len(), 1);
    server.stop().await;
}
