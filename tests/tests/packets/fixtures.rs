//! The table of packet fixtures.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use aya::{TestRunOptions, util::KernelVersion};
use dns_common::{
    counters::Outcome,
    entry::AnswerPolicy,
    object,
    scope::{LOOPBACK_IFINDEX, Probe, Scope},
};
use socket2::{Domain, Socket, Type};
use whole_system_tests::{
    checksum::{checksum, pseudo},
    program::{Hook, Program, Published, XDP_PASS},
};

use crate::{
    HOOKS, XDP_ROOM, XDP_TAIL, check, install, load,
    model::{Interface, World},
    packet::{
        A, AAAA, CLIENT, CLIENT6, Datagram, Opt, Query, SERVER, SERVER6, name_of_length, wire,
    },
};

/// Returns the state published for the fixtures.
pub(crate) fn world() -> World {
    let v4 = |count: u32| {
        (0..count)
            .map(|i| Ipv4Addr::from(0x0a00_0001 + i))
            .collect::<Vec<_>>()
    };
    let v6 = |count: u128| {
        (0..count)
            .map(|i| Ipv6Addr::from((0xfd00 << 112) + 0x1_0001 + i))
            .collect::<Vec<_>>()
    };
    let mut published = std::collections::HashMap::new();
    let mut publish = |name: Vec<u8>, entry: Published| drop(published.insert(name, entry));
    for count in [0, 1, 2, 3, 10, 24, 60, 200, 300, 1024] {
        publish(
            wire(&format!("v4-{count}.bosh")),
            Published {
                v4: v4(count),
                ..Default::default()
            },
        );
    }
    for count in [1, 2, 3, 17, 60, 200, 256] {
        publish(
            wire(&format!("v6-{count}.bosh")),
            Published {
                v6: v6(count),
                ..Default::default()
            },
        );
    }
    publish(
        wire("both.bosh"),
        Published {
            v4: v4(5),
            v6: v6(3),
            ..Default::default()
        },
    );
    publish(
        wire("missing.bosh"),
        Published {
            rcode: 3,
            rcode_other: 3,
            ..Default::default()
        },
    );
    publish(
        wire("malformed.bosh"),
        Published {
            rcode: 1,
            rcode_other: 0,
            ..Default::default()
        },
    );
    publish(
        wire(""),
        Published {
            v4: v4(1),
            ..Default::default()
        },
    );
    // Policies as for Consul's names: TTL, limits, TC or not, no RA.
    let with_policy = |count: u32, policy| Published {
        v4: v4(count),
        policy: Some(policy),
        ..Default::default()
    };
    publish(
        wire("one.node.consul"),
        with_policy(1, AnswerPolicy::new(30, 0, [3, 3], false, true)),
    );
    publish(
        wire("few.service.consul"),
        with_policy(3, AnswerPolicy::new(0x0102_0304, 0, [3, 3], false, true)),
    );
    publish(
        wire("ten.service.consul"),
        with_policy(10, AnswerPolicy::new(5, 0, [3, 3], false, true)),
    );
    publish(
        wire("told.service.consul"),
        with_policy(10, AnswerPolicy::new(5, 0, [8, 8], true, true)),
    );
    publish(
        wire("most.service.consul"),
        with_policy(300, AnswerPolicy::new(0, 6, [6, 6], true, false)),
    );
    publish(
        wire("less.service.consul"),
        with_policy(3, AnswerPolicy::new(5, 4, [4, 4], true, true)),
    );
    publish(
        wire("many.service.consul"),
        with_policy(1024, AnswerPolicy::new(0, 0, [8, 8], true, true)),
    );
    publish(
        wire("v6.service.consul"),
        Published {
            v6: v6(40),
            policy: Some(AnswerPolicy::new(0x7fff_fffe, 20, [3, 2], true, true)),
            ..Default::default()
        },
    );
    for len in 3..=255 {
        publish(
            name_of_length(len),
            Published {
                v4: v4(2),
                v6: v6(1),
                ..Default::default()
            },
        );
    }
    World {
        endpoints: vec![
            (SERVER, 53),
            (SERVER6, 53),
            (SERVER, 5353),
            ([127, 0, 0, 1].into(), 53),
        ],
        published,
        lease: true,
        max_reply: None,
        echo_opt: false,
        cookies: false,
        vlans: vec![5, 7],
        interface: Interface::LO,
        is_first: false,
    }
}

/// A row of the table.
pub(crate) struct Fixture {
    pub(crate) name: &'static str,
    pub(crate) frame: Vec<u8>,
    pub(crate) outcome: Outcome,
}

/// Returns a row with a query over IPv4.
fn query(name: &'static str, outcome: Outcome, query: Query) -> Fixture {
    Fixture {
        name,
        frame: Datagram::v4(query.bytes()).frame(),
        outcome,
    }
}

/// Returns a row with a frame modified after its construction.
fn changed(name: &'static str, outcome: Outcome, change: impl FnOnce(&mut Vec<u8>)) -> Fixture {
    let mut frame = Datagram::v4(Query::new("v4-3.bosh", A).bytes()).frame();
    change(&mut frame);
    Fixture {
        name,
        frame,
        outcome,
    }
}

/// Completes the checksum of a modified IPv4 header.
fn finish_header(frame: &mut [u8]) {
    frame[24..26].fill(0);
    let sum = checksum(&[&frame[14..34]]);
    frame[24..26].copy_from_slice(&sum.to_be_bytes());
}

/// Returns a row with a query from an address that cannot receive a reply.
fn from(name: &'static str, query: Query, sender: &str) -> Fixture {
    let sender: SocketAddr = sender.parse().expect("written well");
    let datagram = if sender.is_ipv4() {
        Datagram::v4(query.bytes())
    } else {
        Datagram::v6(query.bytes())
    };
    let datagram = Datagram {
        from: (sender.ip(), sender.port()),
        ..datagram
    };
    Fixture {
        name,
        frame: datagram.frame(),
        outcome: Outcome::BadSender,
    }
}

/// Returns the frame as a local sender emits it, with a partial checksum for the device to
/// complete.
fn unfinished(datagram: Datagram) -> Vec<u8> {
    let mut frame = datagram.frame();
    let sum = !checksum(&[&pseudo(
        datagram.from.0,
        datagram.to.0,
        8 + datagram.payload.len() as u16,
    )]);
    let at = frame.len() - datagram.payload.len() - 2;
    frame[at..at + 2].copy_from_slice(&sum.to_be_bytes());
    frame
}

/// Returns the table. A row states the expected counter; the model computes the reply.
pub(crate) fn table() -> Vec<Fixture> {
    use Outcome::*;
    let hit = |name| Query::new(name, A);
    let over_v6 = |query: Query| Datagram::v6(query.bytes());
    let opt = |change: fn(&mut Opt)| {
        let mut opt = Opt::new(1232);
        change(&mut opt);
        Query::new("v4-3.bosh", A).opt(opt)
    };
    vec![
        query("one address", Hit, hit("v4-1.bosh")),
        query("three addresses", Hit, hit("v4-3.bosh")),
        query("ten addresses", Hit, hit("v4-10.bosh")),
        query("24 addresses", Hit, hit("v4-24.bosh")),
        query("no address", Hit, hit("v4-0.bosh")),
        query("AAAA of an IPv4 name", Hit, Query::new("v4-3.bosh", AAAA)),
        query("AAAA", Hit, Query::new("v6-3.bosh", AAAA)),
        query("A of both", Hit, Query::new("both.bosh", A)),
        query("AAAA of both", Hit, Query::new("both.bosh", AAAA)),
        query("the root", Hit, hit("")),
        query("mixed case", Hit, hit("V4-3.bOsH")),
        query("a TTL", Hit, hit("one.node.consul")),
        query("a TTL of four bytes", Hit, hit("few.service.consul")),
        query(
            "a limit without EDNS, without TC",
            Hit,
            hit("ten.service.consul"),
        ),
        query(
            "no limit with EDNS",
            Hit,
            hit("ten.service.consul").opt(Opt::new(1232)),
        ),
        query(
            "512 bytes are as without EDNS",
            Hit,
            hit("ten.service.consul").opt(Opt::new(512)),
        ),
        query(
            "a limit without EDNS, with TC",
            HitTruncated,
            hit("told.service.consul"),
        ),
        query(
            "a limit with any EDNS, and no RA",
            Hit,
            hit("most.service.consul").opt(Opt::new(1232)),
        ),
        query(
            "a limit of one more than there are",
            Hit,
            hit("less.service.consul").opt(Opt::new(1232)),
        ),
        query(
            "a limit of one more than there are, without EDNS",
            Hit,
            hit("less.service.consul"),
        ),
        query(
            "bytes that stay free",
            HitTruncated,
            hit("many.service.consul").opt(Opt::new(1232)),
        ),
        query(
            "AAAA with a policy",
            Hit,
            Query::new("v6.service.consul", AAAA).opt(Opt::new(1232)),
        ),
        query(
            "AAAA with a policy, without EDNS",
            HitTruncated,
            Query::new("v6.service.consul", AAAA),
        ),
        query(
            "AAAA of an IPv4 name with a policy",
            NotPublished,
            Query::new("few.service.consul", AAAA),
        ),
        query(
            "another type of a name with a policy",
            NotPublished,
            Query::new("few.service.consul", 33),
        ),
        query(
            "an option to a name with a policy",
            NotPublished,
            hit("few.service.consul").opt(Opt {
                options: vec![0, 8, 0, 4, 0, 1, 0, 0],
                ..Opt::new(1232)
            }),
        ),
        query("a miss", NotPublished, hit("nobody.bosh")),
        query("a suffix of a published name", NotPublished, hit("bosh")),
        query("another type", Hit, Query::new("v4-3.bosh", 33)),
        query(
            "another type of a missing name",
            Hit,
            Query::new("missing.bosh", 16),
        ),
        query(
            "another type of a malformed name",
            Hit,
            Query::new("malformed.bosh", 16),
        ),
        query("NXDOMAIN", Hit, hit("missing.bosh")),
        query(
            "NXDOMAIN with OPT",
            Hit,
            hit("missing.bosh").opt(Opt::new(1232)),
        ),
        query("FORMERR", Hit, hit("malformed.bosh")),
        query("ANY of an IPv4 name", Hit, Query::new("v4-3.bosh", 255)),
        query(
            "ANY with EDNS",
            Hit,
            Query::new("v4-3.bosh", 255).opt(Opt::new(1232)),
        ),
        query(
            "ANY of a missing name",
            Hit,
            Query::new("missing.bosh", 255),
        ),
        query("ANY of both families", Hit, Query::new("both.bosh", 255)),
        query(
            "ANY of both families with EDNS",
            Hit,
            Query::new("both.bosh", 255).opt(Opt::new(1232)),
        ),
        query("ANY of an IPv6 name", Hit, Query::new("v6-3.bosh", 255)),
        query(
            "ANY of more IPv6 addresses than fit",
            NoRoom,
            Query::new("v6-60.bosh", 255),
        ),
        query(
            "ANY of 60 IPv6 addresses, 4096 bytes",
            Hit,
            Query::new("v6-60.bosh", 255).opt(Opt::new(4096)),
        ),
        query(
            "ANY of a name with a policy",
            NotPublished,
            Query::new("few.service.consul", 255),
        ),
        query("AXFR", BadType, Query::new("v4-3.bosh", 252)),
        query("DS", BadType, Query::new("v4-3.bosh", 43)),
        query(
            "class CH",
            BadType,
            Query {
                qclass: 3,
                ..hit("v4-3.bosh")
            },
        ),
        query(
            "class ANY",
            BadType,
            Query {
                qclass: 255,
                ..hit("v4-3.bosh")
            },
        ),
        query(
            "RD clear",
            Hit,
            Query {
                flags: 0,
                ..hit("v4-3.bosh")
            },
        ),
        query(
            "AD and CD",
            Hit,
            Query {
                flags: 0x0130,
                ..hit("v4-3.bosh")
            },
        ),
        query(
            "a response",
            Response,
            Query {
                flags: 0x8180,
                ..hit("v4-3.bosh")
            },
        ),
        query(
            "opcode NOTIFY",
            NotPlain,
            Query {
                flags: 0x2100,
                ..hit("v4-3.bosh")
            },
        ),
        query(
            "TC set",
            NotPlain,
            Query {
                flags: 0x0300,
                ..hit("v4-3.bosh")
            },
        ),
        query(
            "AA set",
            NotPlain,
            Query {
                flags: 0x0500,
                ..hit("v4-3.bosh")
            },
        ),
        query(
            "Z set",
            NotPlain,
            Query {
                flags: 0x0140,
                ..hit("v4-3.bosh")
            },
        ),
        query(
            "RCODE set",
            NotPlain,
            Query {
                flags: 0x0103,
                ..hit("v4-3.bosh")
            },
        ),
        query(
            "no question",
            NotPlain,
            Query {
                counts: [0, 0, 0],
                ..hit("v4-3.bosh")
            },
        ),
        query(
            "two questions",
            NotPlain,
            Query {
                counts: [2, 0, 0],
                ..hit("v4-3.bosh")
            },
        ),
        query(
            "256 questions",
            NotPlain,
            Query {
                counts: [256, 0, 0],
                ..hit("v4-3.bosh")
            },
        ),
        query(
            "an answer",
            NotPlain,
            Query {
                counts: [1, 1, 0],
                ..hit("v4-3.bosh")
            },
        ),
        query(
            "an authority",
            NotPlain,
            Query {
                counts: [1, 0, 1],
                ..hit("v4-3.bosh")
            },
        ),
        query(
            "two additional",
            NotPlain,
            Query {
                additional: Some(2),
                ..hit("v4-3.bosh")
            },
        ),
        query(
            "a missing OPT",
            BadEdns,
            Query {
                additional: Some(1),
                ..hit("v4-3.bosh")
            },
        ),
        query(
            "an uncounted OPT",
            BadType,
            Query {
                additional: Some(0),
                ..opt(|_| {})
            },
        ),
        query(
            "bytes after the question",
            BadType,
            Query {
                trailing: vec![1, 2, 3],
                ..hit("v4-3.bosh")
            },
        ),
        query("EDNS", Hit, opt(|_| {})),
        query("EDNS with DO", Hit, opt(|opt| opt.flags = 0x8000)),
        query("EDNS with all flags", Hit, opt(|opt| opt.flags = 0xffff)),
        query("EDNS size 0", Hit, opt(|opt| opt.size = 0)),
        query("EDNS size 65535", Hit, opt(|opt| opt.size = 0xffff)),
        query("EDNS version 1", BadEdns, opt(|opt| opt.version = 1)),
        query("extended RCODE", BadEdns, opt(|opt| opt.extended = 1)),
        query(
            "a cookie",
            Hit,
            opt(|opt| opt.options = vec![0, 10, 0, 8, 1, 2, 3, 4, 5, 6, 7, 8]),
        ),
        query(
            "400 bytes of padding",
            Hit,
            opt(|opt| opt.options = [&[0, 12, 1, 140][..], &[0; 396]].concat()),
        ),
        query(
            "a truncated option",
            BadEdns,
            opt(|opt| opt.options = vec![0, 10, 0]),
        ),
        query(
            "an option longer than the message",
            BadEdns,
            opt(|opt| opt.options = vec![0, 10, 0, 2, 1]),
        ),
        query(
            "two options",
            BadEdns,
            opt(|opt| opt.options = vec![0, 10, 0, 0, 0, 12, 0, 0]),
        ),
        query("NSID", BadEdns, opt(|opt| opt.options = vec![0, 3, 0, 0])),
        query(
            "options with excessive lengths",
            BadEdns,
            opt(|opt| opt.options_len = Some(1)),
        ),
        query(
            "an A record instead of an OPT",
            BadEdns,
            opt(|opt| opt.kind = 1),
        ),
        query("OPT below a name", BadEdns, opt(|opt| opt.owner = 1)),
        query(
            "bytes after the OPT",
            BadEdns,
            Query {
                trailing: vec![0],
                ..opt(|_| {})
            },
        ),
        query(
            "bytes after an OPT with an option",
            BadEdns,
            Query {
                trailing: vec![0],
                ..opt(|opt| opt.options = vec![0, 12, 0, 2, 0, 0])
            },
        ),
        query(
            "an OPT with an option, and another one",
            BadType,
            Query {
                trailing: vec![0, 0, 41, 4, 208, 0, 0, 0, 0, 0, 0],
                ..opt(|opt| opt.options = vec![0, 12, 0, 2, 0, 0])
            },
        ),
        query("60 addresses, 512 bytes", HitTruncated, hit("v4-60.bosh")),
        query(
            "60 addresses, 1232 bytes",
            Hit,
            hit("v4-60.bosh").opt(Opt::new(1232)),
        ),
        query(
            "60 addresses, EDNS 512",
            HitTruncated,
            hit("v4-60.bosh").opt(Opt::new(512)),
        ),
        query(
            "60 addresses, EDNS 100",
            HitTruncated,
            hit("v4-60.bosh").opt(Opt::new(100)),
        ),
        query(
            "200 addresses, 1232 bytes",
            HitTruncated,
            hit("v4-200.bosh").opt(Opt::new(1232)),
        ),
        query(
            "200 addresses, 4096 bytes",
            Hit,
            hit("v4-200.bosh").opt(Opt::new(4096)),
        ),
        query(
            "1024 addresses, 3000 bytes",
            HitTruncated,
            hit("v4-1024.bosh").opt(Opt::new(3000)),
        ),
        query(
            "300 addresses, 65535 bytes",
            NoRoom,
            hit("v4-300.bosh").opt(Opt::new(65535)),
        ),
        query(
            "60 IPv6 addresses, 512 bytes",
            HitTruncated,
            Query::new("v6-60.bosh", AAAA),
        ),
        query(
            "256 IPv6 addresses, 3000",
            HitTruncated,
            Query::new("v6-256.bosh", AAAA).opt(Opt::new(3000)),
        ),
        query(
            "a compression pointer",
            NotPublished,
            Query {
                name: vec![0xc0, 12],
                ..hit("")
            },
        ),
        query(
            "a pointer behind a label",
            NotPublished,
            Query {
                name: b"\x04v4-3\xc0\x0c".to_vec(),
                ..hit("")
            },
        ),
        query(
            "a name of 256 bytes",
            BadName,
            Query {
                name: name_of_length(256),
                ..hit("")
            },
        ),
        query(
            "no name at all",
            BadName,
            Query {
                name: vec![],
                ..hit("")
            },
        ),
        changed("Ethernet padding", Hit, |frame| {
            frame.resize(frame.len() + 7, 0)
        }),
        changed("more padding than the reply needs", Hit, |frame| {
            frame.resize(frame.len() + 60, 0)
        }),
        changed("another port", NotOurs, |frame| frame[37] = 54),
        changed("another address", NotOurs, |frame| frame[33] = 3),
        changed("TCP", NotOurs, |frame| frame[23] = 6),
        changed("ARP", NotOurs, |frame| {
            frame[12..14].copy_from_slice(&[8, 6])
        }),
        changed("the first fragment", Unsupported, |frame| frame[20] = 0x20),
        changed("a later fragment", Unsupported, |frame| frame[21] = 3),
        changed("IP options", Unsupported, |frame| frame[14] = 0x46),
        changed("IP version 5", Unsupported, |frame| frame[14] = 0x55),
        changed("an IP length too long", BadLength, |frame| frame[17] += 1),
        changed("an IP length too short", BadLength, |frame| frame[17] -= 1),
        changed("a UDP length too long", BadLength, |frame| frame[39] += 1),
        changed("a UDP length too short", BadLength, |frame| frame[39] -= 1),
        changed("consistent lengths beyond the frame", BadLength, |frame| {
            frame[17] += 1;
            frame[39] += 1;
            finish_header(frame);
        }),
        changed("a UDP length below its header", BadLength, |frame| {
            frame[17] = 20 + 7;
            frame[39] = 7;
        }),
        changed("two VLAN tags", Unsupported, |frame| {
            drop(frame.splice(12..12, [0x81, 0, 0, 5, 0x81, 0, 0, 6]));
        }),
        changed("a service tag", Unsupported, |frame| {
            drop(frame.splice(12..12, [0x88, 0xa8, 0, 5]))
        }),
        changed("no checksum", Hit, |frame| frame[40..42].fill(0)),
        changed("a wrong UDP checksum", BadChecksum, |frame| {
            frame[40] ^= 0x10
        }),
        changed("a wrong header checksum", BadChecksum, |frame| {
            frame[24] ^= 0x10
        }),
        changed("a multicast MAC address as sender", BadSender, |frame| {
            frame[6..12].fill(0xff)
        }),
        from("from port 0", hit("v4-3.bosh"), "10.1.2.3:0"),
        from("from 0.0.0.0/8", hit("v4-3.bosh"), "0.1.2.3:40000"),
        from(
            "from a multicast address",
            hit("v4-3.bosh"),
            "224.0.0.1:40000",
        ),
        from("from class E", hit("v4-3.bosh"), "240.0.0.1:40000"),
        from(
            "from the broadcast address",
            hit("v4-3.bosh"),
            "255.255.255.255:40000",
        ),
        from("IPv6, from no address", hit("v4-3.bosh"), "[::]:40000"),
        from(
            "IPv6, from a multicast address",
            hit("v4-3.bosh"),
            "[ff02::1]:40000",
        ),
        from(
            "IPv6, from a mapped address",
            hit("v4-3.bosh"),
            "[::ffff:10.1.2.3]:40000",
        ),
        from("IPv6, from port 0", hit("v4-3.bosh"), "[fd00::99]:0"),
        Fixture {
            name: "IPv6, no checksum",
            frame: {
                let mut frame = over_v6(hit("v4-3.bosh")).frame();
                frame[60..62].fill(0);
                frame
            },
            outcome: BadChecksum,
        },
        Fixture {
            name: "IPv6, a wrong checksum",
            frame: {
                let mut frame = over_v6(hit("v4-3.bosh")).frame();
                frame[61] ^= 0x10;
                frame
            },
            outcome: BadChecksum,
        },
        Fixture {
            name: "a VLAN tag",
            frame: Datagram {
                tags: vec![(0x8100, 0x2005)],
                ..Datagram::v4(hit("v4-3.bosh").bytes())
            }
            .frame(),
            outcome: Hit,
        },
        Fixture {
            name: "a foreign VLAN tag",
            frame: Datagram {
                tags: vec![(0x8100, 0x2006)],
                ..Datagram::v4(hit("v4-3.bosh").bytes())
            }
            .frame(),
            outcome: NotOurs,
        },
        Fixture {
            name: "a priority tag",
            frame: Datagram {
                tags: vec![(0x8100, 0x2000)],
                ..Datagram::v4(hit("v4-3.bosh").bytes())
            }
            .frame(),
            outcome: NotOurs,
        },
        changed("to another machine", NotOurs, |frame| frame[5] = 1),
        changed("to many", NotOurs, |frame| frame[..6].fill(0xff)),
        Fixture {
            name: "IPv6, to another machine",
            frame: {
                let mut frame = over_v6(hit("v4-3.bosh")).frame();
                frame[0] = 2;
                frame
            },
            outcome: NotOurs,
        },
        Fixture {
            name: "a loopback address, by lo",
            frame: Datagram {
                to: ([127, 0, 0, 1].into(), 53),
                ..Datagram::v4(hit("v4-3.bosh").bytes())
            }
            .frame(),
            outcome: Hit,
        },
        Fixture {
            name: "the second port",
            frame: Datagram {
                to: (SERVER, 5353),
                ..Datagram::v4(hit("v4-3.bosh").bytes())
            }
            .frame(),
            outcome: Hit,
        },
        Fixture {
            name: "a port of the other family",
            frame: Datagram {
                to: (SERVER6, 5353),
                ..Datagram::v6(hit("v4-3.bosh").bytes())
            }
            .frame(),
            outcome: NotOurs,
        },
        Fixture {
            name: "sent to the client",
            frame: Datagram {
                to: (CLIENT, 53),
                ..Datagram::v4(hit("v4-3.bosh").bytes())
            }
            .frame(),
            outcome: NotOurs,
        },
        Fixture {
            name: "an unfinished checksum",
            frame: unfinished(Datagram::v4(hit("v4-3.bosh").bytes())),
            outcome: Hit,
        },
        Fixture {
            name: "IPv6, an unfinished checksum",
            frame: unfinished(over_v6(hit("v4-3.bosh"))),
            outcome: Hit,
        },
        Fixture {
            name: "IPv6",
            frame: over_v6(hit("v4-3.bosh")).frame(),
            outcome: Hit,
        },
        Fixture {
            name: "IPv6, odd name",
            frame: over_v6(hit("v4-10.bosh")).frame(),
            outcome: Hit,
        },
        Fixture {
            name: "IPv6, AAAA",
            frame: over_v6(Query::new("v6-17.bosh", AAAA)).frame(),
            outcome: Hit,
        },
        Fixture {
            name: "IPv6, ANY of both families",
            frame: over_v6(Query::new("both.bosh", 255)).frame(),
            outcome: Hit,
        },
        Fixture {
            name: "IPv6, EDNS",
            frame: over_v6(hit("v4-60.bosh").opt(Opt::with_options(1232, &[0, 10, 0, 1, 7])))
                .frame(),
            outcome: Hit,
        },
        Fixture {
            name: "IPv6, cut",
            frame: over_v6(Query::new("v6-60.bosh", AAAA).opt(Opt::new(600))).frame(),
            outcome: HitTruncated,
        },
        Fixture {
            name: "IPv6, no data",
            frame: over_v6(hit("v6-3.bosh")).frame(),
            outcome: Hit,
        },
        Fixture {
            name: "IPv6, a VLAN tag",
            frame: Datagram {
                tags: vec![(0x8100, 7)],
                ..over_v6(hit("v4-10.bosh"))
            }
            .frame(),
            outcome: Hit,
        },
        Fixture {
            name: "IPv6, version 4",
            frame: {
                let mut frame = over_v6(hit("v4-3.bosh")).frame();
                frame[14] = 0x40;
                frame
            },
            outcome: Unsupported,
        },
        Fixture {
            name: "IPv6, version 7",
            frame: {
                let mut frame = over_v6(hit("v4-3.bosh")).frame();
                frame[14] |= 0x10;
                frame
            },
            outcome: Unsupported,
        },
        Fixture {
            name: "IPv6, a traffic class",
            frame: {
                let mut frame = over_v6(hit("v4-3.bosh")).frame();
                frame[14] = 0x6f;
                frame
            },
            outcome: Hit,
        },
    ]
}

/// Protocols that may precede UDP: hop-by-hop options, routing, fragment, ESP, authentication, destination
/// options.
const EXTENSIONS: [u8; 6] = [0, 43, 44, 50, 51, 60];

#[test]
fn extension_headers_are_passed() {
    let Some(mut program) = load() else { return };
    install(&mut program, &world());
    let mut frame = Datagram::v6(Query::new("v4-3.bosh", A).bytes()).frame();
    for protocol in 0..=u8::MAX {
        frame[20] = protocol;
        let expected = match protocol {
            17 => Outcome::Hit,
            _ if EXTENSIONS.contains(&protocol) => Outcome::Unsupported,
            _ => Outcome::NotOurs,
        };
        for hook in HOOKS {
            let (_, counted) = program.run_counted(hook, &frame).expect("the program runs");
            assert_eq!(counted, expected, "protocol {protocol} at {hook:?}");
        }
    }
}

/// The sum of a long reply after an odd question needs every fold for about one id of 65,536: at most these
/// are sent.
#[test]
fn checksum_needs_every_fold() {
    const ADDRESSES: usize = 140;
    let Some(mut program) = load() else { return };
    install(&mut program, &world());
    // The largest sums.
    let addresses = (0..ADDRESSES as u128).map(|last| Ipv6Addr::from(u128::MAX - last));
    let list = Published {
        v6: addresses.collect(),
        ..Published::default()
    };
    let mut tried = 0;
    for name in ["many6.bosh", "many66.bosh"] {
        program.publish(&wire(name), &list).expect("there is room");
        let query = Query {
            id: 0,
            ..Query::new(name, AAAA).opt(Opt::new(4096))
        };
        let reply = |id| {
            let query = Query {
                id,
                ..query.clone()
            };
            let frame = Datagram::v6(query.bytes()).frame();
            let run = program.run(Hook::Tc, &frame).expect("the program runs");
            run.packet[14 + 40..].to_vec()
        };
        let sum = program_sum(&reply(0), query.name.len() + 4);
        let differs = |&id: &u16| {
            let sum = sum + u64::from(id.to_be());
            folded(sum, &FOLDS) != folded(sum, &FOLDS[1..])
        };
        for id in (0..=u16::MAX).filter(differs).take(20) {
            let udp = reply(id);
            assert_eq!(udp.len(), 8 + query.bytes().len() + ADDRESSES * 28);
            let head = pseudo(SERVER6, CLIENT6, udp.len() as u16);
            assert_eq!(checksum(&[&head, &udp]), 0, "id {id} of {name}");
            tried += 1;
        }
    }
    assert!(tried > 0, "the sums are too small");
}

/// Only one reply of a thousand million needs the last fold: here an address is chosen for the sum.
#[test]
fn checksum_needs_last_fold() {
    const ADDRESSES: u128 = 140;
    const NAME: &str = "many66.bosh";
    let Some(mut program) = load() else { return };
    install(&mut program, &world());
    let mut reply = |last_word: u32, id: u16| {
        let mut v6: Vec<Ipv6Addr> = (1..ADDRESSES)
            .map(|last| Ipv6Addr::from(u128::MAX - last))
            .collect();
        let [a, b, c, d] = last_word.to_le_bytes();
        v6.push([0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, a, b, c, d].into());
        let list = Published {
            v6,
            ..Published::default()
        };
        program.publish(&wire(NAME), &list).expect("there is room");
        let query = Query {
            id,
            ..Query::new(NAME, AAAA).opt(Opt::new(4096))
        };
        let frame = Datagram::v6(query.bytes()).frame();
        let run = program.run(Hook::Tc, &frame).expect("the program runs");
        (run.packet[14 + 40..].to_vec(), query.name.len() + 4)
    };
    let (udp, question_len) = reply(0, 0);
    assert_eq!(question_len % 2, 1, "only a shifted sum is large enough");
    let least = program_sum(&udp, question_len);
    // The lower half and what is carried into it become 2^32 + 65,535. The word counts 256-fold.
    let missing = (1 << 32) + 0xffff - (least >> 32) - (least & 0xffff_ffff);
    let (word, id) = ((missing >> 8) as u32, (missing as u16 & 0xff).to_be());
    assert_ne!(
        folded(least + missing, &FOLDS),
        folded(least + missing, &FOLDS[..3])
    );
    let (udp, _) = reply(word, id);
    let head = pseudo(SERVER6, CLIENT6, udp.len() as u16);
    assert_eq!(checksum(&[&head, &udp]), 0, "id {id}, word {word:#x}");
}

/// Adds up the UDP datagram of a reply as the programs do, in words of four bytes in memory order, without a fold.
fn program_sum(udp: &[u8], question_len: usize) -> u64 {
    let words = |bytes: &[u8]| -> u64 {
        let word = |chunk: &[u8]| {
            let mut word = [0; 4];
            word[..chunk.len()].copy_from_slice(chunk);
            u64::from(u32::from_le_bytes(word))
        };
        bytes.chunks(4).map(word).sum()
    };
    let mut headers = udp[..20].to_vec();
    headers[6..8].fill(0);
    let (question, answers) = udp[20..].split_at(question_len);
    let is_odd = question_len % 2 == 1;
    let addresses = &pseudo(SERVER6, CLIENT6, 0)[..32];
    let (length, protocol) = ((udp.len() as u16).to_be(), u16::from_ne_bytes([0, 17]));
    words(addresses)
        + u64::from(length)
        + u64::from(protocol)
        + words(&headers)
        + words(question)
        + (words(answers) << (8 * u32::from(is_odd)))
}

/// The folds that the largest sum needs, in bits.
const FOLDS: [u32; 4] = [32, 16, 16, 16];

/// Folds a sum to 16 bits by some of the folds.
fn folded(sum: u64, folds: &[u32]) -> u64 {
    let mut folded = sum;
    for bits in folds {
        folded = (folded & ((1 << bits) - 1)) + (folded >> bits);
    }
    folded & 0xffff
}

#[test]
fn fixtures_hold_at_every_hook() {
    let Some(mut program) = load() else { return };
    let world = world();
    install(&mut program, &world);
    let mut failures = Vec::new();
    for Fixture {
        name,
        frame,
        outcome,
    } in table()
    {
        for hook in HOOKS {
            let counted = match program.run_counted(hook, &frame) {
                Ok((_, counted)) => counted,
                Err(error) => {
                    failures.push(format!("{name} at {hook:?}: {error:#}"));
                    continue;
                }
            };
            if counted != outcome {
                failures.push(format!(
                    "{name} at {hook:?}: counted {counted:?} instead of {outcome:?}"
                ));
            }
            if let Err(problem) = check(&program, &world, hook, &frame) {
                failures.push(format!("{name} at {hook:?}: {problem}"));
            }
        }
    }
    assert!(
        failures.is_empty(),
        "{} failures:\n{}",
        failures.len(),
        failures.join("\n")
    );
}

/// The program of the first moments answers as the complete one, or passes what it lacks.
#[test]
fn fixtures_hold_at_first_program() {
    let Some(mut program) = load() else { return };
    let mut world = world();
    install(&mut program, &world);
    let mut hits = [0; 2];
    let mut failures = Vec::new();
    for (hits, name) in hits
        .iter_mut()
        .zip([object::TC_ANSWER_PROGRAM, object::TC_FIRST_PROGRAM])
    {
        program
            .answer_at_tc_by(name)
            .expect("the program is loaded");
        world.is_first = name == object::TC_FIRST_PROGRAM;
        for fixture in table() {
            match check(&program, &world, Hook::Tc, &fixture.frame) {
                Ok(hit) => *hits += usize::from(hit),
                Err(problem) => failures.push(format!("{} by {name}: {problem}", fixture.name)),
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    println!("answered by the complete and the first program: {hits:?}");
    assert!(hits[1] * 2 > hits[0] && hits[1] < hits[0], "{hits:?}");
}

#[test]
fn enabled_cookies_go_to_userspace() {
    let Some(mut program) = load() else { return };
    let world = World {
        cookies: true,
        ..world()
    };
    install(&mut program, &world);
    let cookie = vec![0, 10, 0, 8, 1, 2, 3, 4, 5, 6, 7, 8];
    let padding = vec![0, 12, 0, 2, 0, 0];
    for (options, expected) in [
        (vec![], Outcome::Hit),
        (padding, Outcome::Hit),
        (cookie, Outcome::BadEdns),
    ] {
        let query = Query::new("v4-10.bosh", A).opt(Opt {
            options,
            ..Opt::new(1232)
        });
        for datagram in [Datagram::v4(query.bytes()), Datagram::v6(query.bytes())] {
            let frame = datagram.frame();
            for hook in HOOKS {
                let (_, counted) = program.run_counted(hook, &frame).expect("the program runs");
                assert_eq!(counted, expected, "{query:?} at {hook:?}");
                check(&program, &world, hook, &frame).expect("as in the model");
            }
        }
    }
}

#[test]
fn tc_distinguishes_ambiguous_checksums() {
    let Some(mut program) = load() else { return };
    let world = world();
    install(&mut program, &world);
    let cookie = Opt::with_options(1232, &[0, 10, 0, 8, 1, 2, 3, 4, 5, 6, 7, 8]);
    let odd = Opt::with_options(1232, &[0, 10, 0, 3, 1, 2, 3]);
    for opt in [None, Some(Opt::new(1232)), Some(cookie), Some(odd)] {
        for over in [Datagram::v4, Datagram::v6] {
            let with_id = |id| {
                over(
                    Query {
                        id,
                        opt: opt.clone(),
                        ..Query::new("v4-10.bosh", A)
                    }
                    .bytes(),
                )
            };
            // The checksum of a datagram whose checksum field holds the pseudo-header's sum.
            let finished = |datagram: &Datagram| {
                let frame = unfinished(datagram.clone());
                let udp = &frame[frame.len() - datagram.payload.len() - 8..];
                checksum(&[
                    &pseudo(datagram.from.0, datagram.to.0, udp.len() as u16),
                    udp,
                ])
            };
            // With the missing amount as id, that sum is the correct checksum.
            let datagram = with_id(finished(&with_id(0)));
            assert_eq!(finished(&datagram), 0);
            let frame = unfinished(datagram);
            for hook in HOOKS {
                let (_, counted) = program.run_counted(hook, &frame).expect("the program runs");
                assert_eq!(counted, Outcome::Hit, "{opt:?} at {hook:?}");
                check(&program, &world, hook, &frame).expect("as in the model");
            }
        }
    }
}

/// Address count of a name whose reply ends at, or beyond, the end of the buffer in an XDP test
/// run.
const LONG_LIST: u32 = 214;

#[test]
fn long_replies_find_room() {
    let Some(mut program) = load() else { return };
    let mut world = world();
    let list = Published {
        v4: (0..LONG_LIST)
            .map(|i| Ipv4Addr::from(0x0a00_0001 + i))
            .collect(),
        ..Default::default()
    };
    for len in (1..=255).filter(|&len| len != 2) {
        world.published.insert(name_of_length(len), list.clone());
    }
    install(&mut program, &world);
    // An emulated machine takes 15 ms for each packet. The first lengths with and without room always count.
    let is_sample = std::env::var_os("BOSH_DNS_SAMPLE").is_some();
    let is_limit = |reply_len: usize| {
        [XDP_TAIL, XDP_ROOM]
            .iter()
            .any(|room| reply_len.abs_diff(*room) <= 1)
    };
    let (mut answered, mut without_room) = (0, 0);
    for len in (1..=255).filter(|&len| len != 2) {
        let query = Query {
            name: name_of_length(len),
            ..Query::new("", A)
        }
        .opt(Opt::new(4096));
        for datagram in [Datagram::v4(query.bytes()), Datagram::v6(query.bytes())] {
            let tagged = Datagram {
                tags: vec![(0x8100, 5)],
                ..datagram.clone()
            };
            for datagram in [datagram, tagged] {
                let grows_by = 16 * LONG_LIST as usize;
                // Without padding the headroom alone does not suffice; with this much it does.
                for padding in [0, grows_by - 200] {
                    if datagram.frame().len() + padding > XDP_TAIL {
                        continue; // Exceeds the input size of a test run.
                    }
                    let frame = Datagram {
                        padding,
                        ..datagram.clone()
                    }
                    .frame();
                    let reply_len = frame.len() - padding + grows_by;
                    if is_sample && len % 8 != 7 && !is_limit(reply_len) {
                        continue;
                    }
                    let what = format!("a reply of {reply_len} bytes to {}", frame.len());
                    let outcome = if reply_len <= XDP_ROOM {
                        Outcome::Hit
                    } else {
                        Outcome::NoRoom
                    };
                    let (_, counted) = program
                        .run_counted(Hook::Xdp, &frame)
                        .expect("the program runs");
                    assert_eq!(counted, outcome, "{what}");
                    let held = check(&program, &world, Hook::Xdp, &frame);
                    assert_eq!(held, Ok(reply_len <= XDP_ROOM), "{what}");
                    answered += u32::from(reply_len > XDP_TAIL && reply_len <= XDP_ROOM);
                    without_room += u32::from(reply_len > XDP_ROOM);
                }
            }
        }
    }
    let (least_answered, least_without) = if is_sample { (100, 5) } else { (1000, 50) };
    assert!(
        answered > least_answered && without_room > least_without,
        "{answered} beyond the tail, {without_room} beyond both"
    );
}

#[test]
fn packet_without_room_is_passed() {
    /// Metadata bytes of a driver before the packet, which the kernel moves along with its start:
    /// the maximum of older kernels (Linux 6.1).
    const METADATA: usize = 32;
    let Some(mut program) = load() else { return };
    // Before Linux 5.18 the kernel's own part of the head room is 8 bytes shorter, and the room suffices.
    if KernelVersion::current().unwrap() >= KernelVersion::new(5, 18, 0) {
        // Metadata prevents growth at the start.
        let query = long_query(&mut program, 40);
        let input = [vec![0x5a; METADATA], Datagram::v4(query).frame()].concat();
        let (output, counted) = run_with_metadata(&mut program, &input, METADATA);
        assert_eq!(counted, Outcome::NoRoom);
        assert!(output == input);
    }

    // Exceeds the room at both ends in an XDP test run.
    let query = long_query(&mut program, 255);
    let frame = Datagram {
        tags: vec![(0x8100, 5)],
        ..Datagram::v6(query)
    }
    .frame();
    let (output, counted) = run_with_metadata(&mut program, &frame, 0);
    assert_eq!(counted, Outcome::NoRoom);
    assert!(output == frame);
}

/// Publishes [`LONG_LIST`] under a name of this length; returns a query for all of it.
fn long_query(program: &mut Program, name_len: usize) -> Vec<u8> {
    let mut world = world();
    let name = name_of_length(name_len);
    let list = (0..LONG_LIST)
        .map(|i| Ipv4Addr::from(0x0a00_0001 + i))
        .collect();
    world.published.insert(
        name.clone(),
        Published {
            v4: list,
            ..Default::default()
        },
    );
    install(program, &world);
    Query {
        name,
        ..Query::new("", A)
    }
    .opt(Opt::new(4096))
    .bytes()
}

/// Runs the XDP program over a packet preceded by `metadata` bytes; returns metadata and packet
/// after the run, and the outcome.
fn run_with_metadata(program: &mut Program, input: &[u8], metadata: usize) -> (Vec<u8>, Outcome) {
    // `struct xdp_md`: data, data_end, data_meta, two numbers of the receiver, one of the sender.
    let context = [metadata as u32, input.len() as u32, 0, 0, 0, 0]
        .map(u32::to_ne_bytes)
        .concat();
    let mut output = vec![0; 8192];
    let before = program.counters().outcomes;
    let options = TestRunOptions {
        data_in: Some(input),
        data_out: Some(&mut output),
        ctx_in: Some(&context),
        ..Default::default()
    };
    let run = program
        .test_run(Hook::Xdp, options)
        .expect("the program runs");
    output.truncate(run.data_size_out as usize);
    assert_eq!(run.return_value, XDP_PASS);
    let after = program.counters().outcomes;
    let mut counted = Outcome::ALL
        .iter()
        .copied()
        .filter(|&outcome| after[outcome as usize] != before[outcome as usize]);
    (output, counted.next().expect("every packet is counted"))
}

#[test]
fn only_admitted_endpoints_are_answered() {
    let Some(mut program) = load() else { return };
    install(&mut program, &world());
    let query = Query::new("v4-3.bosh", A).bytes();
    let (first, third) = (
        Datagram::v4(query.clone()),
        Datagram {
            to: (SERVER, 5353),
            ..Datagram::v4(query)
        },
    );
    let admit = |program: &mut Program, endpoints: u64| {
        program.set_scope(|scope| {
            scope.interfaces[Scope::first_slot(LOOPBACK_IFINDEX)].endpoints = endpoints
        });
    };
    for hook in HOOKS {
        for (endpoints, outcomes) in [
            (0b0000, [Outcome::NotServed, Outcome::NotServed]),
            (0b0001, [Outcome::Hit, Outcome::NotServed]),
            (0b0100, [Outcome::NotServed, Outcome::Hit]),
        ] {
            admit(&mut program, endpoints);
            let counted = [&first, &third].map(|datagram| {
                program
                    .run_counted(hook, &datagram.frame())
                    .expect("the program runs")
                    .1
            });
            assert_eq!(counted, outcomes, "{endpoints:b} at {hook:?}");
        }
    }
}

#[test]
fn probe_rate_is_limited() {
    let Some(mut program) = load() else { return };
    install(&mut program, &world());
    let query = Query::new("v4-3.bosh", A).bytes();
    for (slot, datagram, client, server) in [
        (0, Datagram::v4(query.clone()), CLIENT, SERVER),
        (1, Datagram::v6(query), CLIENT6, SERVER6),
    ] {
        let frame = datagram.frame();
        // Reads the record of the probes, and makes the next one due.
        let probe = |program: &mut Program| {
            let mut found = Probe {
                due_ns: 0,
                count: 0,
                client: [0; 16],
            };
            program.set_scope(|scope| {
                let record =
                    &mut scope.interfaces[Scope::first_slot(LOOPBACK_IFINDEX)].probes[slot];
                found = *record;
                record.due_ns = 0;
            });
            found
        };
        let listening = listener(server);
        for (round, hook) in HOOKS.into_iter().enumerate() {
            program.set_control(|control| control.probe_until_ns = u64::MAX);
            // One in four queries on each CPU may be a probe.
            let mut tries = 0;
            loop {
                let (run, counted) = program.run_counted(hook, &frame).expect("the program runs");
                tries += 1;
                if counted == Outcome::Probe {
                    assert_eq!(run.packet, frame, "{hook:?}");
                    break;
                }
                assert!(
                    counted == Outcome::Hit && tries < 1000,
                    "{counted:?} at {hook:?}"
                );
            }
            for _ in 0..3 {
                assert_eq!(
                    program
                        .run_counted(hook, &frame)
                        .expect("the program runs")
                        .1,
                    Outcome::Hit
                );
            }
            let Probe {
                due_ns,
                count,
                client: seen,
            } = probe(&mut program);
            assert_eq!(
                (count, IpAddr::from(seen).to_canonical()),
                (round as u64 + 1, client)
            );
            assert!(due_ns > 0);
            // Without reports from the server there are no probes.
            program.set_control(|control| control.probe_until_ns = 1);
            for _ in 0..8 {
                assert_eq!(
                    program
                        .run_counted(hook, &frame)
                        .expect("the program runs")
                        .1,
                    Outcome::Hit
                );
            }
        }
        // A killed server has no sockets, and loses no probe.
        drop(listening);
        program.set_control(|control| control.probe_until_ns = u64::MAX);
        for hook in HOOKS {
            probe(&mut program);
            for _ in 0..8 {
                assert_eq!(
                    program
                        .run_counted(hook, &frame)
                        .expect("the program runs")
                        .1,
                    Outcome::Hit
                );
            }
        }
    }
}

/// Returns a socket on port 53 of an address that this machine need not have.
fn listener(address: IpAddr) -> Socket {
    let socket = Socket::new(Domain::for_address((address, 53).into()), Type::DGRAM, None);
    let socket = socket.expect("a socket can be opened");
    match address {
        IpAddr::V4(_) => socket.set_freebind_v4(true),
        IpAddr::V6(_) => socket.set_freebind_v6(true),
    }
    .and_then(|()| socket.set_reuse_port(true))
    .and_then(|()| socket.bind(&SocketAddr::from((address, 53)).into()))
    .expect("the address is free");
    socket
}
