//! Tests of the queries in flight on a socket, and of the replies that end them.

use test_support::own_process;

use super::*;

const QUESTION: &[u8] = b"\x02oK\0\0\x01\0\x01";

/// Returns a message with this id, flags, number of questions and further bytes.
fn message(id: u16, flags: [u8; 2], questions: u8, rest: &[u8]) -> Vec<u8> {
    let [id_high, id_low] = id.to_be_bytes();
    let [high, low] = flags;
    let header = [id_high, id_low, high, low, 0, questions, 0, 0, 0, 0, 0, 0];
    [&header[..], rest].concat()
}

/// Returns the relation of a message to [`QUESTION`], with and without exact letters.
fn relations(message: &[u8]) -> [&'static str; 2] {
    [true, false].map(|exact| match match_reply(message, QUESTION, exact) {
        ReplyMatch::Reply => "reply",
        ReplyMatch::CutShort => "cut",
        ReplyMatch::Unreadable => "unreadable",
        ReplyMatch::OtherQuestion => "other question",
        ReplyMatch::OtherLetters => "other letters",
        ReplyMatch::NoReply => "none",
    })
}

#[test]
fn replies_are_matched_by_their_question() {
    for (flags, questions, rest, expected) in [
        ([0x81, 0x80], 1, QUESTION, ["reply", "reply"]),
        ([0x81, 0x83], 1, QUESTION, ["reply", "reply"]),
        ([0x83, 0x80], 1, QUESTION, ["reply", "reply"]),
        (
            [0x81, 0x80],
            1,
            b"\x02ok\0\0\x01\0\x01",
            ["other letters", "reply"],
        ),
        (
            [0x81, 0x80],
            1,
            b"\x02ox\0\0\x01\0\x01",
            ["other question", "other question"],
        ),
        (
            [0x81, 0x80],
            1,
            b"\x02oK\0\0\x02\0\x01",
            ["other question", "other question"],
        ),
        // A query, NOTIFY and UPDATE.
        ([0x01, 0x80], 1, QUESTION, ["none", "none"]),
        ([0xa1, 0x80], 1, QUESTION, ["none", "none"]),
        ([0xa9, 0x80], 1, QUESTION, ["none", "none"]),
        // Cut inside the question.
        (
            [0x81, 0x80],
            1,
            &QUESTION[..6],
            ["unreadable", "unreadable"],
        ),
        ([0x83, 0x80], 1, &QUESTION[..6], ["cut", "cut"]),
        ([0x81, 0x80], 2, QUESTION, ["unreadable", "unreadable"]),
        // Without a question.
        ([0x83, 0x80], 0, b"", ["cut", "cut"]),
        ([0x81, 0x80], 0, b"", ["other question", "other question"]),
        ([0x81, 0x81], 0, b"", ["reply", "reply"]),
        ([0x81, 0x82], 0, b"", ["reply", "reply"]),
        ([0x81, 0x83], 0, b"", ["other question", "other question"]),
        ([0x81, 0x84], 0, b"", ["reply", "reply"]),
        ([0x81, 0x85], 0, b"", ["reply", "reply"]),
        ([0x81, 0x86], 0, b"", ["other question", "other question"]),
    ] {
        let message = message(7, flags, questions, rest);
        let found = relations(&message);
        assert_eq!(found, expected, "{flags:02x?} {questions} {rest:?}");
    }
    let bare = message(7, [0x83, 0x80], 0, b"");
    assert_eq!(relations(&bare[..11]), ["unreadable", "unreadable"]);
}

/// Returns a query for [`QUESTION`] in other letters, and the receiver of its outcome.
fn pending(exact_case: bool) -> (PendingQuery, oneshot::Receiver<QueryResult>) {
    let (sender, receiver) = oneshot::channel();
    let query = PendingQuery::new(QUESTION, exact_case, Recipient::Task(sender));
    (query, receiver)
}

/// Registers a query under this id, to expire at this time.
fn wait_for(queries: &mut PendingQueries, id: u16, deadline: Instant) {
    let (mut query, _receiver) = pending(true);
    query.serial = queries.next_serial;
    queries.next_serial += 1;
    queries.order.push_back((deadline, id, query.serial));
    queries.waiting.insert(id, query);
}

#[test]
fn right_reply_ends_a_query() {
    let now = Instant::now();
    let other = message(7, [0x81, 0x80], 1, b"\x02ox\0\0\x01\0\x01");
    let another = message(7, [0x81, 0x80], 1, b"\x02oy\0\0\x01\0\x01");
    let letters = message(7, [0x81, 0x80], 1, b"\x02ok\0\0\x01\0\x01");
    let right = message(7, [0x81, 0x80], 1, QUESTION);
    let cut = message(7, [0x83, 0x80], 0, b"");
    let malformed = message(7, [0x81, 0x80], 1, b"");
    for (matching, kept) in [
        (Matching::Strict, None),
        // The first of several.
        (Matching::Lenient, Some(&other[..])),
    ] {
        for (last, expected) in [
            (&right, Ok(&right[..])),
            (&cut, Ok(&cut[..])),
            (&malformed, Err(TryError::Unreadable)),
        ] {
            let mut queries = PendingQueries::default();
            wait_for(&mut queries, 7, now);
            let query = message(7, [0x01, 0], 1, QUESTION);
            let stranger = message(8, [0x81, 0x80], 1, QUESTION);
            let short = vec![7];
            for wrong in [&other, &another, &letters, &query, &stranger, &short] {
                assert!(queries.take_answered(wrong, matching).is_none());
            }
            let (id, query, outcome) = queries.take_answered(last, matching).unwrap();
            assert_eq!((id, outcome), (7, expected));
            assert_eq!(query.second_best.as_deref(), kept, "{matching:?}");
            assert!(queries.take_answered(&right, matching).is_none(), "once");
        }
    }
}

#[test]
fn queries_expire_in_order() {
    let now = Instant::now();
    let ms = Duration::from_millis;
    let mut queries = PendingQueries::default();
    for (id, at) in [(1, 10), (2, 20), (3, 20), (4, 30)] {
        wait_for(&mut queries, id, now + ms(at));
    }
    let taken = |queries: &mut PendingQueries, at| {
        let mut ids = Vec::new();
        for (id, _) in queries.take_expired(now + ms(at)) {
            ids.push(id);
        }
        ids
    };
    assert_eq!(taken(&mut queries, 9), Vec::<u16>::new());
    assert_eq!(taken(&mut queries, 10), [1]);
    // Answered, and its id used again: the new one has its own time.
    queries.waiting.remove(&2);
    wait_for(&mut queries, 2, now + ms(40));
    assert_eq!(taken(&mut queries, 20), [3]);
    assert!(queries.has_question(b"\x02OK\0\0\x01\0\x01"));
    assert!(!queries.has_question(b"\x02OK\0\0\x02\0\x01"));
    assert_eq!(queries.order.len(), 2);
    assert_eq!(taken(&mut queries, 40), [4, 2]);
    assert!(queries.order.is_empty() && !queries.has_question(QUESTION));
    wait_for(&mut queries, 5, now);
    assert_eq!(queries.take_all().len(), 1);
    assert!(queries.order.is_empty() && queries.waiting.is_empty());
}

/// Returns a socket that nothing reads, opened this long ago, whose queries time out after a minute.
fn socket(age: Duration) -> Socket {
    let io = UdpSocket::bind("127.0.0.1:0").unwrap();
    io.connect(io.local_addr().unwrap()).unwrap();
    // A new one does not wear out during the test.
    let opened = if age.is_zero() {
        Instant::now() + Duration::from_secs(3600)
    } else {
        Instant::now().checked_sub(age).unwrap()
    };
    Socket {
        io,
        timeout: Duration::from_secs(60),
        matching: Matching::Strict,
        mismatched: Arc::default(),
        opened,
        pending: Mutex::default(),
    }
}

#[test]
fn worn_sockets_take_no_more_queries() {
    for (uses, age, ended, enforced, ignored) in [
        (0, 0, false, true, true),
        (MAX_USES - 1, 0, false, true, true),
        (MAX_USES, 0, false, false, true),
        (0, 11, false, false, true),
        (0, 0, true, false, false),
    ] {
        for (limits, expected) in [
            (ReuseLimits::Enforced, enforced),
            (ReuseLimits::Ignored, ignored),
        ] {
            let socket = socket(Duration::from_secs(age));
            {
                let mut pending = socket.pending.lock();
                pending.uses = uses;
                pending.ended = ended;
            }
            let (query, _receiver) = pending(false);
            let mut query = Some(query);
            let id = socket.enter(&mut query, limits);
            assert_eq!(id.is_some(), expected, "{uses} {age} {ended}");
            // A query that is not taken can go to another socket.
            assert_eq!(query.is_none(), expected);
            let pending = socket.pending.lock();
            assert_eq!(pending.retired, !expected);
            assert_eq!(pending.waiting.len(), usize::from(expected));
            assert_eq!(pending.uses, uses + u32::from(expected));
        }
    }
}

#[test]
fn full_sockets_take_no_more_queries() {
    let socket = socket(Duration::ZERO);
    let later = Instant::now() + Duration::from_secs(3600);
    for id in 1..MAX_IN_FLIGHT as u16 {
        wait_for(&mut socket.pending.lock(), id, later);
    }
    for is_taken in [true, false] {
        let (query, _receiver) = pending(false);
        let mut query = Some(query);
        let id = socket.enter(&mut query, ReuseLimits::Enforced);
        assert_eq!((id.is_some(), query.is_none()), (is_taken, is_taken));
    }
    let pending = socket.pending.lock();
    assert_eq!(pending.waiting.len(), MAX_IN_FLIGHT);
    assert!(!pending.retired, "answers make room");
    let serials: Vec<u64> = pending.order.iter().map(|(.., serial)| *serial).collect();
    assert!(serials.is_sorted() && serials.len() == MAX_IN_FLIGHT);
}

#[test]
fn useful_sockets_are_read() {
    let minute = Duration::from_secs(60);
    let new = socket(Duration::ZERO);
    let now = Instant::now();
    assert_eq!(new.expire(now), Some(now + minute), "nothing waits");
    let (query, mut receiver) = pending(false);
    let id = new.enter(&mut Some(query), ReuseLimits::Enforced).unwrap();
    let (deadline, ..) = new.pending.lock().order[0];
    assert!(deadline >= now + minute);
    assert_eq!(new.expire(now), Some(deadline));
    assert!(receiver.try_recv().is_err());
    // In time for the last one, whatever comes later.
    new.expire(deadline);
    assert_eq!(receiver.try_recv(), Ok(Err(TryError::TimedOut)));
    assert!(!new.pending.lock().waiting.contains_key(&id));

    // A reply to another question is better than none, where it is accepted.
    let new = socket(Duration::ZERO);
    let (query, mut receiver) = pending(false);
    new.enter(&mut Some(query), ReuseLimits::Enforced).unwrap();
    for query in new.pending.lock().waiting.values_mut() {
        query.second_best = Some(b"other".as_slice().into());
    }
    let (deadline, ..) = new.pending.lock().order[0];
    new.expire(deadline);
    assert_eq!(receiver.try_recv(), Ok(Ok(b"other".to_vec())));

    // An old or retired one goes with its last query.
    let second = Duration::from_secs(1);
    for (age, retired, next) in [
        (0, false, Some(now + second + minute)),
        (0, true, None),
        (11, false, None),
    ] {
        let socket = socket(Duration::from_secs(age));
        socket.pending.lock().retired = retired;
        wait_for(&mut socket.pending.lock(), 7, now + second);
        assert_eq!(socket.expire(now), Some(now + second));
        assert!(!socket.pending.lock().ended);
        assert_eq!(socket.expire(now + second), next, "{age} {retired}");
        assert_eq!(socket.pending.lock().ended, next.is_none());
    }
}

#[test]
fn equal_questions_are_spread_over_sockets() {
    let address = SocketAddr::from(([127, 0, 0, 1], 9));
    let minute = Duration::from_secs(60);
    let sockets = UdpSockets::new(address, minute, Matching::Strict, Arc::default());
    let open: [Arc<Socket>; SOCKETS] = std::array::from_fn(|_| Arc::new(socket(Duration::ZERO)));
    for (slot, socket) in sockets.slots.iter().zip(&open) {
        *slot.lock() = Arc::downgrade(socket);
    }
    let mut receivers = Vec::new();
    for used in 0..SOCKETS {
        let (query, receiver) = pending(false);
        receivers.push(receiver);
        let choice = SocketChoice::WithoutQuestion;
        let (_, id) = sockets.register(choice, &mut Some(query)).unwrap();
        let counts: Vec<usize> = open
            .iter()
            .map(|socket| socket.pending.lock().waiting.len())
            .collect();
        assert!(counts.iter().all(|count| *count <= 1), "{counts:?}");
        assert_eq!(counts.iter().sum::<usize>(), used + 1, "{id}");
    }
    assert_eq!(sockets.without(QUESTION), Err(TryError::Busy));
    let other = b"\x02ok\0\0\x1c\0\x01";
    assert!(sockets.without(other).is_ok_and(|chosen| chosen < SOCKETS));
    let (query, _receiver) = pending(false);
    let mut query = Some(query);
    let refused = sockets.register(SocketChoice::WithoutQuestion, &mut query);
    assert!(refused.is_err() && query.is_some());
    // Without a new socket, a worn one must do.
    for socket in &open {
        socket.pending.lock().uses = MAX_USES;
    }
    assert!(sockets.register_anywhere(&mut query).is_some() && query.is_none());
    assert_eq!(open[0].pending.lock().waiting.len(), 2);
    for socket in &open {
        socket.pending.lock().ended = true;
    }
    let (query, _receiver) = pending(false);
    assert!(sockets.register_anywhere(&mut Some(query)).is_none());
}

#[tokio::test]
async fn failed_socket_fails_its_queries() {
    let socket = socket(Duration::ZERO);
    let mut receivers = Vec::new();
    for _ in 0..3 {
        let (query, receiver) = pending(false);
        socket
            .enter(&mut Some(query), ReuseLimits::Enforced)
            .unwrap();
        receivers.push(receiver);
    }
    socket.fail_all(TryError::Refused);
    for receiver in receivers {
        assert_eq!(receiver.await, Ok(Err(TryError::Refused)));
    }
    assert!(socket.pending.lock().order.is_empty());
}

#[tokio::test]
async fn datagrams_without_a_query_are_counted() {
    // It is connected to itself.
    let socket = socket(Duration::ZERO);
    let (query, receiver) = pending(false);
    let id = socket
        .enter(&mut Some(query), ReuseLimits::Enforced)
        .unwrap();
    let reply = message(id, [0x81, 0x80], 1, QUESTION);
    socket
        .send(&message(!id, [0x81, 0x80], 1, QUESTION))
        .await
        .unwrap();
    socket.send(b"j").await.unwrap();
    socket.send(&reply).await.unwrap();
    // It was late.
    socket.send(&reply).await.unwrap();
    socket.io.set_nonblocking(true).unwrap();
    assert!(!socket.read(false), "no more");
    assert_eq!(receiver.await, Ok(Ok(reply)));
    assert_eq!(socket.mismatched.load(Ordering::Relaxed), 3);
    assert!(socket.pending.lock().waiting.is_empty());
}

#[tokio::test]
async fn opened_sockets_have_room_for_bursts() {
    let closed = UdpSocket::bind("127.0.0.1:0").unwrap();
    let address = closed.local_addr().unwrap();
    drop(closed);
    let minute = Duration::from_secs(60);
    let sockets = UdpSockets::new(address, minute, Matching::Lenient, Arc::default());
    let socket = Socket::open(&sockets).unwrap();
    assert_eq!(socket.io.peer_addr().unwrap(), address);
    assert_eq!(
        (socket.timeout, socket.matching),
        (minute, Matching::Lenient)
    );
    let room = socket2::SockRef::from(&socket.io).recv_buffer_size();
    assert!(room.unwrap() >= 64 << 10);
    assert_eq!(socket.descriptor(), socket.io.as_raw_fd());
}

#[test]
fn earlier_errors_spare_later_queries() {
    let closed = UdpSocket::bind("127.0.0.1:0").unwrap();
    let address = closed.local_addr().unwrap();
    let socket = socket(Duration::ZERO);
    socket.io.connect(address).unwrap();
    drop(closed);
    // From the second one on, the kernel reports that the port is closed before it sends.
    for _ in 0..5 {
        assert_eq!(socket.try_send(b"query").unwrap(), 5);
    }
}

#[test]
fn lack_of_descriptors_is_no_fault_of_the_recursor() {
    // The limit on open files belongs to the whole process.
    if !own_process::is_here() {
        let name = "lack_of_descriptors_is_no_fault_of_the_recursor";
        return own_process::run(&mut own_process::command(module_path!(), name));
    }
    let address = SocketAddr::from(([127, 0, 0, 1], 9));
    let minute = Duration::from_secs(60);
    let sockets = UdpSockets::new(address, minute, Matching::Strict, Arc::default());
    let (query, _receiver) = pending(false);
    let registered =
        own_process::without_descriptors(|| sockets.register(SocketChoice::Any, &mut Some(query)));
    assert_eq!(registered.map(drop), Err(TryError::NoSocket));
}
