//! The constant reflector answers with the configured number of records, on every hook, and so does the
//! socket echo. The skeleton sends the records that it looked up.

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
use dns_core::name::Name;
use hickory_proto::{
    op::{Message, MessageType, ResponseCode},
    rr::RData,
};
use whole_system_tests::{
    checksum, client,
    program::{self, Program, Published},
    requires,
};

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

/// Its jobs are those of the server's programs, except the five that it leaves out: it takes a wrong checksum, and never
/// changes the order.
#[test]
fn skeleton_sends_what_it_finds() -> Result<()> {
    requires!(bpf);
    let mut skeleton = Program::load_object(bench_programs::SKELETON, false)?;
    skeleton.set_endpoints(&[([169, 254, 0, 2], 53).into()]);
    for answers in [1, 7, 20] {
        let name = format!("q-s0.q-g{answers}.bosh.");
        let published = Published {
            v4: (0..answers).map(|last| [10, 0, 0, last].into()).collect(),
            ..Published::default()
        };
        skeleton.publish(Name::from_text(&name)?.as_wire(), &published)?;
        let mut query = query(&name)?;
        // The program runs on `lo`, whose address is zero.
        query[..6].fill(0);
        query[HEADERS - 1] ^= 1;
        for (hook, verdict) in [
            (program::Hook::Xdp, program::XDP_TX),
            (program::Hook::Tc, program::TC_ACT_REDIRECT),
        ] {
            for _ in 0..20 {
                let run = skeleton.run(hook, &query)?;
                assert_eq!(run.verdict, verdict, "{name} at {hook:?}");
                let message = Message::from_vec(&run.packet[HEADERS..])?;
                let mut sent = Vec::new();
                for record in &message.answers {
                    let RData::A(address) = record.data else {
                        panic!("{record:?}");
                    };
                    sent.push(address.0);
                }
                assert_eq!(sent, published.v4, "{name} at {hook:?}");
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
