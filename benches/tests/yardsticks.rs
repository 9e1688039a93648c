//! The constant reflector answers with the configured number of records, on every hook, and so does the
//! socket echo.

use std::{
    net::{Ipv4Addr, SocketAddrV4},
    thread,
    time::Duration,
};

use anyhow::Result;
use aya::{
    TestRun as _, TestRunOptions,
    programs::{SchedClassifier, Xdp},
};
use bosh_dns_xdp_benches::{
    echo,
    yardstick::{Hook, MAX_ANSWERS, Yardstick},
};
use hickory_proto::op::{Message, MessageType, ResponseCode};
use whole_system_tests::{checksum, client, requires};

/// Length of the Ethernet, IPv4 and UDP headers.
const HEADERS: usize = 14 + 20 + 8;

#[test]
fn constant_reflector_answers_on_every_hook() -> Result<()> {
    requires!(bpf);
    for name in [
        "a.bosh.",
        "q-s0.q-g1234.bosh.",
        "q-s0.diego-cell-99.default.cf-12.bosh.",
    ] {
        let query = query(name)?;
        for hook in [Hook::Native, Hook::Tc] {
            for answers in [0, 1, 8, MAX_ANSWERS] {
                let reply = run(hook, answers, &query)?;
                assert_eq!(reply[..6], query[6..12], "{name} at {hook:?}");
                let total = usize::from(u16::from_be_bytes([reply[16], reply[17]]));
                assert_eq!(reply.len(), 14 + total);
                assert_eq!(
                    checksum::checksum(&[&reply[14..34]]),
                    0,
                    "IPv4 header at {hook:?}"
                );
                assert_eq!(
                    usize::from(u16::from_be_bytes([reply[38], reply[39]])),
                    total - 20
                );
                let message = Message::from_vec(&reply[HEADERS..])?;
                assert_eq!(message.metadata.message_type, MessageType::Response);
                assert_eq!(message.metadata.response_code, ResponseCode::NoError);
                assert_eq!(message.queries[0].name().to_string(), name);
                assert_eq!(
                    client::addresses(&message).len(),
                    answers as usize,
                    "{name} at {hook:?}"
                );
            }
        }
    }
    Ok(())
}

#[test]
fn socket_echo_answers_every_query() -> Result<()> {
    let socket = echo::open(SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0))?;
    let address = socket.local_addr()?.as_socket().expect("a socket of IPv4");
    // Ends with this process.
    thread::spawn(move || echo::serve(&socket, 7));
    // Of falling length: no reply may contain bytes of an earlier one.
    for name in [
        "q-s0.diego-cell-99.default.cf-12.bosh.",
        "q-s0.q-g1234.bosh.",
        "a.bosh.",
    ] {
        let query = client::query(name, hickory_proto::rr::RecordType::A, None)?.to_vec()?;
        let reply = client::ask_raw(address, &query, Duration::from_secs(10))?;
        assert_eq!(reply.len(), query.len() + 7 * 16);
        let message = Message::from_vec(&reply)?;
        assert_eq!(message.metadata.message_type, MessageType::Response);
        assert_eq!(message.queries[0].name().to_string(), name);
        assert_eq!(client::addresses(&message).len(), 7);
    }
    Ok(())
}

/// Runs the constant reflector once.
fn run(hook: Hook, answers: u32, packet: &[u8]) -> Result<Vec<u8>> {
    let (object, name) = Yardstick::Constant { answers }.load(hook)?;
    let program = object.program(name).expect("just loaded");
    let mut out = vec![0; 4096];
    let options = TestRunOptions {
        data_in: Some(packet),
        data_out: Some(&mut out),
        ..Default::default()
    };
    let result = match hook {
        Hook::Tc => <&SchedClassifier>::try_from(program)?.test_run(options)?,
        Hook::Native => <&Xdp>::try_from(program)?.test_run(options)?,
    };
    out.truncate(result.data_size_out as usize);
    Ok(out)
}

/// Returns the frame of an A query.
fn query(name: &str) -> Result<Vec<u8>> {
    let message = client::query(name, hickory_proto::rr::RecordType::A, None)?.to_vec()?;
    let [from, to] = [([169, 254, 0, 1], 40_000), ([169, 254, 0, 2], 53)]
        .map(|(address, port)| SocketAddrV4::new(address.into(), port));
    Ok(checksum::udp_frame(
        [[0; 6], [2, 0, 0, 0, 0, 2]],
        from,
        to,
        &message,
    ))
}
