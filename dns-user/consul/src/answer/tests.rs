use std::{collections::BTreeMap, sync::Arc};

use dns_core::wire::{Parsed, parse_by};
use hickory_proto::{op::Message, rr};

use super::*;
use crate::{
    catalog::live::{Live, LivePlace, LiveService, ServiceInstances},
    catalog::registrations::{Datacenter, Registrations},
    definition::Definitions,
};

const CATALOG: &str = r#"{
    "nodes": [
        {"node": "n1", "id": "11111111-aa", "address": "10.0.0.1", "meta": {"rack": "r1"}},
        {"node": "n2", "id": "11222222-bb", "address": "2001:db8::2"},
        {"node": "n3", "address": "host.example"},
        {"node": "n_4", "address": "10.0.0.4"},
        {"node": "far", "datacenter": "dc2", "address": "10.2.0.1"},
        {"node": "lost", "datacenter": "dc3", "address": "10.4.0.1"},
        {"node": "p1", "peer": "east", "address": "10.3.0.1"}],
    "services": [
        {"node": "n1", "name": "consul", "port": 8300},
        {"node": "n2", "name": "consul", "port": 8300, "check": {"status": "warning"}},
        {"node": "n_4", "name": "consul", "port": 8300},
        {"node": "n3", "name": "consul", "port": 8300, "check": {"status": "critical"}},
        {"node": "n1", "name": "web", "port": 80, "tags": ["v1"], "weights": {"passing": 3}},
        {"node": "n2", "name": "web", "id": "w2", "port": 81, "weights": {"passing": 9, "warning": 2},
         "check": {"status": "warning"}},
        {"node": "n1", "name": "web", "id": "w3", "address": "10.0.0.9", "check": {"status": "critical"}},
        {"node": "n1", "name": "sick", "check": {"status": "critical"}},
        {"node": "n1", "name": "ext", "address": "ext.example", "port": 1},
        {"node": "n1", "name": "api", "address": "10.9.0.9", "port": 443,
         "ports": [{"name": "HTTP", "port": 8080}, {"name": "admin", "port": 9000, "default": true}]},
        {"node": "n1", "name": "web-proxy", "port": 21000, "proxy": {"destination_service_name": "web"}},
        {"node": "n1", "name": "gw", "port": 8443},
        {"node": "p1", "peer": "east", "name": "db", "port": 5432},
        {"node": "far", "name": "web", "port": 82}],
    "queries": [{"id": "1", "name": "q", "service": "web", "tags": ["v1"], "dns_ttl": "11s"}],
    "virtual_ips": [{"service": "web", "ip": "240.0.0.1"}, {"service": "db", "peer": "east", "ip": "240.0.0.2"}],
    "ingress": [{"gateway": "gw", "services": ["web"]}],
    "datacenters": [{"name": "dc2"}, {"name": "dc3", "reachable": false}]}"#;

/// Returns the zone of a definition file; `members` are further ones of the object `"consul"`.
fn zone_of(catalog: &str, members: &str, dns: &str) -> Zone {
    let text = format!(
        r#"{{"consul": {{"alt_domain": "alt"{members}, "dns_config":
            {{"node_ttl": "5s", "service_ttl": {{"*": "7s"}}, "soa": {{"min_ttl": 9}}{dns}}}}}}}"#
    );
    let read = Config::of_document("config.json", text.as_bytes());
    let (config, warnings) = read.whole().unwrap().unwrap();
    assert_eq!(warnings, [""; 0]);
    let definitions = Definitions::read([("a.json", catalog.as_bytes())], &config);
    let visibility = config.visibility.clone();
    let registrations = definitions.whole().unwrap().registrations;
    let catalog = Catalog::build(registrations, &config, visibility);
    Zone { config, catalog }
}

/// Returns a query by TCP for a name in presentation format.
fn message(name: &str, qtype: u16) -> Vec<u8> {
    let mut message = b"\0\x01\x01\0\0\x01\0\0\0\0\0\0".to_vec();
    message.extend(Name::wire_as_written(name).unwrap());
    message.extend(qtype.to_be_bytes());
    message.extend([0, 1]);
    message
}

fn asker() -> Asker {
    Asker {
        client: [127, 0, 0, 1].into(),
        recursion: false,
        serial: 4,
    }
}

fn parsed(message: &[u8], transport: Transport) -> Query<'_> {
    let Parsed::Query(query) = parse_by(transport, message) else {
        panic!("a query")
    };
    query
}

fn shown(zone: &Zone, query: &Query<'_>, answer: PendingAnswer) -> String {
    lines(&answer.finish(query, &zone.config.dns, &Default::default()))
}

/// Returns RCODE and sorted records of a reply: `=` marks answers, `-` the authority, `+` additional records.
fn lines(reply: &[u8]) -> String {
    let message = Message::from_vec(reply).unwrap();
    assert!(message.metadata.authoritative);
    let mut lines = Vec::new();
    for (mark, records) in [
        ("=", &message.answers),
        ("-", &message.authorities),
        ("+", &message.additionals),
    ] {
        for rr::Record {
            name, ttl, data, ..
        } in records
        {
            lines.push(format!("{mark} {name} {ttl} {} {data}", data.record_type()));
        }
    }
    lines.sort();
    lines.insert(0, format!("{:?}", message.metadata.response_code));
    lines.join("\n")
}

fn reply(zone: &Zone, name: &str, qtype: u16) -> String {
    let message = message(name, qtype);
    let query = parsed(&message, Transport::Tcp);
    let random = &mut fastrand::Rng::with_seed(1);
    let answer = zone.answer(&query, &asker(), random);
    shown(zone, &query, answer.unwrap())
}

const A: u16 = 1;
const AAAA: u16 = 28;
const TXT: u16 = 16;
const MX: u16 = 15;

const NXDOMAIN: &str = "NXDomain\n- consul. 9 SOA ns.consul. hostmaster.consul. 4 3600 600 86400 9";
const NODATA: &str = "NoError\n- consul. 9 SOA ns.consul. hostmaster.consul. 4 3600 600 86400 9";

#[test]
fn nodes_answer_with_address_and_metadata() {
    let zone = zone_of(CATALOG, "", "");
    for (name, qtype, expected) in [
        (
            "n1.node.consul.",
            A,
            "NoError\n+ n1.node.consul. 5 TXT rack=r1\n= n1.node.consul. 5 A 10.0.0.1",
        ),
        // Without an SOA, as in Consul.
        (
            "n1.node.consul.",
            AAAA,
            "NoError\n+ n1.node.consul. 5 TXT rack=r1",
        ),
        (
            "n1.node.consul.",
            TXT,
            "NoError\n= n1.node.consul. 5 TXT rack=r1",
        ),
        (
            "n1.node.dc1.consul.",
            TYPE_ANY,
            "NoError\n= n1.node.dc1.consul. 5 A 10.0.0.1\n= n1.node.dc1.consul. 5 TXT rack=r1",
        ),
        ("n1.node.consul.", MX, "NoError"),
        ("none.node.consul.", MX, "NoError"),
        ("none.node.consul.", A, NXDOMAIN),
        (
            "n2.node.consul.",
            AAAA,
            "NoError\n= n2.node.consul. 5 AAAA 2001:db8::2",
        ),
        ("n2.node.consul.", A, "NoError"),
        (
            "n3.node.consul.",
            A,
            "NoError\n= n3.node.consul. 5 CNAME host.example.",
        ),
        // A unique beginning of an id.
        (
            "1122.node.consul.",
            AAAA,
            "NoError\n= 1122.node.consul. 5 AAAA 2001:db8::2",
        ),
        ("11.node.consul.", AAAA, NXDOMAIN),
        ("1.node.consul.", AAAA, NXDOMAIN),
        (
            "11222222-bb.node.consul.",
            AAAA,
            "NoError\n= 11222222-bb.node.consul. 5 AAAA 2001:db8::2",
        ),
        ("11222222-bbc.node.consul.", AAAA, NXDOMAIN),
        (
            "far.node.dc2.consul.",
            A,
            "NoError\n= far.node.dc2.consul. 5 A 10.2.0.1",
        ),
        ("far.node.consul.", A, NXDOMAIN),
        ("lost.node.dc3.consul.", A, "ServFail"),
        ("lost.node.dc4.consul.", A, NXDOMAIN),
        (
            "p1.node.east.peer.consul.",
            A,
            "NoError\n= p1.node.east.peer.consul. 5 A 10.3.0.1",
        ),
        ("p1.node.consul.", A, NXDOMAIN),
        ("n1.node.east.peer.consul.", A, NXDOMAIN),
    ] {
        assert_eq!(reply(&zone, name, qtype), expected, "{name} {qtype}");
    }
    let zone = zone_of(CATALOG, "", r#", "enable_additional_node_meta_txt": false"#);
    let plain = "NoError\n= n1.node.consul. 5 A 10.0.0.1";
    assert_eq!(reply(&zone, "n1.node.consul.", A), plain);
    let text = "NoError\n= n1.node.consul. 5 TXT rack=r1";
    assert_eq!(reply(&zone, "n1.node.consul.", TXT), text);
}

#[test]
fn services_answer_with_healthy_instances() {
    let zone = zone_of(CATALOG, "", "");
    let both =
        "NoError\n= web.service.consul. 7 A 10.0.0.1\n= web.service.consul. 7 AAAA 2001:db8::2";
    for (name, qtype, expected) in [
        (
            "web.service.consul.",
            A,
            "NoError\n= web.service.consul. 7 A 10.0.0.1",
        ),
        (
            "web.service.consul.",
            AAAA,
            "NoError\n= web.service.consul. 7 AAAA 2001:db8::2",
        ),
        ("web.service.consul.", TYPE_ANY, both),
        ("web.service.consul.", TXT, both),
        ("web.service.consul.", MX, NODATA),
        (
            "V1.web.service.consul.",
            A,
            "NoError\n= V1.web.service.consul. 7 A 10.0.0.1",
        ),
        ("v2.web.service.consul.", A, NXDOMAIN),
        (
            "_web._v1.service.consul.",
            A,
            "NoError\n= _web._v1.service.consul. 7 A 10.0.0.1",
        ),
        ("sick.service.consul.", A, NXDOMAIN),
        ("none.service.consul.", A, NXDOMAIN),
        (
            "web.service.dc2.consul.",
            A,
            "NoError\n= web.service.dc2.consul. 7 A 10.2.0.1",
        ),
        ("web.service.dc3.consul.", A, "ServFail"),
        ("web.service.dc4.consul.", A, NXDOMAIN),
        (
            "db.service.east.peer.consul.",
            A,
            "NoError\n= db.service.east.peer.consul. 7 A 10.3.0.1",
        ),
        (
            "ext.service.consul.",
            A,
            "NoError\n= ext.service.consul. 7 CNAME ext.example.",
        ),
        (
            "web.connect.consul.",
            A,
            "NoError\n= web.connect.consul. 7 A 10.0.0.1",
        ),
        ("gw.connect.consul.", A, NXDOMAIN),
        (
            "web.ingress.consul.",
            A,
            "NoError\n= web.ingress.consul. 7 A 10.0.0.1",
        ),
        ("gw.ingress.consul.", A, NXDOMAIN),
        (
            "q.query.consul.",
            A,
            "NoError\n= q.query.consul. 11 A 10.0.0.1",
        ),
        ("q.query.dc2.consul.", A, NXDOMAIN),
        // Addresses of one kind have the TTL of nodes; another family is an additional record.
        (
            "web.virtual.consul.",
            A,
            "NoError\n= web.virtual.consul. 5 A 240.0.0.1",
        ),
        (
            "web.virtual.consul.",
            AAAA,
            "NoError\n+ web.virtual.consul. 5 A 240.0.0.1",
        ),
        ("db.virtual.consul.", A, "NoError"),
        (
            "db.virtual.east.consul.",
            A,
            "NoError\n= db.virtual.east.consul. 5 A 240.0.0.2",
        ),
        (
            "0a000007.addr.consul.",
            A,
            "NoError\n= 0a000007.addr.consul. 5 A 10.0.0.7",
        ),
        (
            "0a000007.addr.consul.",
            AAAA,
            "NoError\n+ 0a000007.addr.consul. 5 A 10.0.0.7",
        ),
        (
            "0a000007.addr.consul.",
            TXT,
            "NoError\n+ 0a000007.addr.consul. 5 A 10.0.0.7",
        ),
        (
            "0a000007.addr.consul.",
            TYPE_ANY,
            "NoError\n= 0a000007.addr.consul. 5 A 10.0.0.7",
        ),
        ("0a0000.addr.consul.", A, NXDOMAIN),
    ] {
        assert_eq!(reply(&zone, name, qtype), expected, "{name} {qtype}");
    }
    let strict = zone_of(CATALOG, "", r#", "only_passing": true"#);
    let passing = "NoError\n= web.service.consul. 7 A 10.0.0.1";
    assert_eq!(reply(&strict, "web.service.consul.", TYPE_ANY), passing);
}

#[test]
fn srv_records_lead_to_addresses() {
    let zone = zone_of(CATALOG, "", "");
    for (name, expected) in [
        (
            "web.service.consul.",
            &[
                "+ n1.node.dc1.consul. 7 A 10.0.0.1",
                "+ n1.node.dc1.consul. 7 TXT rack=r1",
                "+ n2.node.dc1.consul. 7 AAAA 2001:db8::2",
                "= web.service.consul. 7 SRV 1 2 81 n2.node.dc1.consul.",
                "= web.service.consul. 7 SRV 1 3 80 n1.node.dc1.consul.",
            ][..],
        ),
        (
            "_web._v1.consul.",
            &[
                "+ n1.node.dc1.consul. 7 A 10.0.0.1",
                "+ n1.node.dc1.consul. 7 TXT rack=r1",
                "= _web._v1.consul. 7 SRV 1 3 80 n1.node.dc1.consul.",
            ],
        ),
        // Targets are below the domain that was asked for.
        (
            "v1.web.service.alt.",
            &[
                "+ n1.node.dc1.alt. 7 A 10.0.0.1",
                "+ n1.node.dc1.alt. 7 TXT rack=r1",
                "= v1.web.service.alt. 7 SRV 1 3 80 n1.node.dc1.alt.",
            ],
        ),
        // An address of its own has a name of its own; the default port precedes the main one.
        (
            "api.service.consul.",
            &[
                "+ 0a090009.addr.dc1.consul. 7 A 10.9.0.9",
                "+ n1.node.dc1.consul. 7 TXT rack=r1",
                "= api.service.consul. 7 SRV 1 1 9000 0a090009.addr.dc1.consul.",
            ],
        ),
        (
            "api.service.http.port.consul.",
            &[
                "+ 0a090009.addr.dc1.consul. 7 A 10.9.0.9",
                "+ n1.node.dc1.consul. 7 TXT rack=r1",
                "= api.service.http.port.consul. 7 SRV 1 1 8080 0a090009.addr.dc1.consul.",
            ],
        ),
        (
            "ext.service.consul.",
            &[
                "+ n1.node.dc1.consul. 7 TXT rack=r1",
                "= ext.service.consul. 7 SRV 1 1 1 ext.example.",
            ],
        ),
        (
            "db.service.east.peer.consul.",
            &[
                "+ p1.node.east.peer.consul. 7 A 10.3.0.1",
                "= db.service.east.peer.consul. 7 SRV 1 1 5432 p1.node.east.peer.consul.",
            ],
        ),
    ] {
        let expected = format!("NoError\n{}", expected.join("\n"));
        assert_eq!(reply(&zone, name, TYPE_SRV), expected, "{name}");
    }
    // A name of a port that no instance has denies the whole name.
    assert_eq!(
        reply(&zone, "web.service.http.port.consul.", TYPE_SRV),
        NXDOMAIN
    );
    let plain = zone_of(CATALOG, "", r#", "enable_additional_node_meta_txt": false"#);
    let expected = "NoError\n+ n1.node.dc1.consul. 7 A 10.0.0.1\n= _web._v1.consul. 7 SRV 1 3 80 n1.node.dc1.consul.";
    assert_eq!(reply(&plain, "_web._v1.consul.", TYPE_SRV), expected);
}

#[test]
fn zone_has_servers_and_reverse_names() {
    let zone = zone_of(CATALOG, "", "");
    let servers = [
        "consul. 5 NS n1.node.dc1.consul.",
        "consul. 5 NS n2.node.dc1.consul.",
    ];
    let addresses = "+ n1.node.dc1.consul. 5 A 10.0.0.1\n+ n2.node.dc1.consul. 5 AAAA 2001:db8::2";
    // For any name, whether it exists or not; names of nodes that are no host names are left out.
    for name in ["consul.", "none.service.consul."] {
        let expected = format!("NoError\n{addresses}\n= {}\n= {}", servers[0], servers[1]);
        assert_eq!(reply(&zone, name, TYPE_NS), expected);
        let soa = "= consul. 9 SOA ns.consul. hostmaster.consul. 4 3600 600 86400 9";
        let expected = format!(
            "NoError\n{addresses}\n- {}\n- {}\n{soa}",
            servers[0], servers[1]
        );
        assert_eq!(reply(&zone, name, TYPE_SOA), expected);
    }
    let strict = zone_of(CATALOG, "", r#", "only_passing": true"#);
    let expected = format!(
        "NoError\n+ n1.node.dc1.consul. 5 A 10.0.0.1\n= {}",
        servers[0]
    );
    assert_eq!(reply(&strict, "consul.", TYPE_NS), expected);
    assert_eq!(reply(&zone, "web.service.consul.", TYPE_AXFR), "NotImp");
    for name in ["consul.", "ns.consul.", "service.consul.", "a.b.consul."] {
        assert_eq!(reply(&zone, name, A), NXDOMAIN, "{name}");
    }

    let reverse = |name: &str| {
        let message = message(name, 12);
        let query = parsed(&message, Transport::Tcp);
        let answer = zone.reverse(&query, &asker())?;
        Some(shown(&zone, &query, answer))
    };
    for (name, target) in [
        ("1.0.0.10.in-addr.arpa.", Some("n1.node.dc1.consul.")),
        ("9.0.9.10.in-addr.arpa.", Some("api.service.dc1.consul.")),
        (
            "2.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.8.b.d.0.1.0.0.2.ip6.arpa.",
            Some("n2.node.dc1.consul."),
        ),
        // Nodes of other places have no reverse names.
        ("1.0.2.10.in-addr.arpa.", None),
        ("1.0.3.10.in-addr.arpa.", None),
        ("0.0.10.in-addr.arpa.", None),
    ] {
        let expected = target.map(|target| format!("NoError\n= {name} 0 PTR {target}"));
        assert_eq!(reverse(name), expected);
    }
    let message = message("1.0.2.10.in-addr.arpa.", 12);
    let query = parsed(&message, Transport::Tcp);
    assert_eq!(
        shown(&zone, &query, zone.no_such_address(&asker())),
        NXDOMAIN
    );
    let outside = self::message("a.example.", A);
    let query = parsed(&outside, Transport::Tcp);
    let random = &mut fastrand::Rng::with_seed(1);
    assert!(zone.answer(&query, &asker(), random).is_none());
}

#[test]
fn three_servers_at_most_are_named() {
    let mut members = Vec::new();
    for number in 1..=5 {
        members.push(format!(
            r#"{{"node": "n{number}", "address": "10.0.0.{number}"}}"#
        ));
    }
    let nodes = members.join(",");
    let services = members
        .join(",")
        .replace("\"address\"", "\"name\": \"consul\", \"id\"");
    let zone = zone_of(
        &format!(r#"{{"nodes": [{nodes}], "services": [{services}]}}"#),
        "",
        "",
    );
    let text = reply(&zone, "consul.", TYPE_NS);
    assert_eq!(
        (text.matches(" NS ").count(), text.matches(" A ").count()),
        (3, 3)
    );
}

#[test]
fn unreadable_entries_do_not_exist() {
    let acl = r#", "acl": {"nodes": ["n1", "n2"], "services": ["web", "consul"]}"#;
    let zone = zone_of(CATALOG, acl, "");
    for (name, expected) in [
        (
            "web.service.consul.",
            "NoError\n= web.service.consul. 7 A 10.0.0.1",
        ),
        ("api.service.consul.", NXDOMAIN),
        ("n3.node.consul.", NXDOMAIN),
        ("far.node.dc2.consul.", NXDOMAIN),
        ("web.service.dc2.consul.", NXDOMAIN),
        // Its proxy may not be read.
        ("web.connect.consul.", NXDOMAIN),
        ("web.ingress.consul.", NXDOMAIN),
        ("api.ingress.consul.", NXDOMAIN),
        // An error, not a denial.
        ("api.connect.consul.", "ServFail"),
        ("api.virtual.consul.", "ServFail"),
        (
            "web.virtual.consul.",
            "NoError\n= web.virtual.consul. 5 A 240.0.0.1",
        ),
    ] {
        assert_eq!(reply(&zone, name, A), expected, "{name}");
    }
}

#[test]
fn empty_non_terminals_exist_if_configured() {
    let zone = zone_of(CATALOG, r#", "empty_non_terminals": true"#, "");
    for (name, expected) in [
        ("service.consul.", NODATA),
        ("consul.", NODATA),
        ("ns.consul.", NODATA),
        ("none.service.consul.", NXDOMAIN),
        ("lost.node.dc3.consul.", "ServFail"),
    ] {
        assert_eq!(reply(&zone, name, A), expected, "{name}");
    }
}

#[test]
fn transport_bounds_built_answers() {
    let most = |dns: &str, transport, qtype, size: Option<u16>| {
        let zone = zone_of("{}", "", dns);
        let mut message = message("web.service.consul.", qtype);
        if let Some(size) = size {
            message[11] = 1;
            let [high, low] = size.to_be_bytes();
            message.extend([0, 0, 41, high, low, 0, 0, 0, 0, 0, 0]);
        }
        zone.most_answers(&parsed(&message, transport))
    };
    for (dns, transport, qtype, size, expected) in [
        ("", Transport::Tcp, A, None, 4096),
        ("", Transport::Tcp, TYPE_SRV, None, 1024),
        // One more than is sent shows that something was left out.
        ("", Transport::Udp, A, None, 4),
        (r#", "udp_answer_limit": 8"#, Transport::Udp, A, None, 9),
        (
            r#", "udp_answer_limit": 9"#,
            Transport::Udp,
            TYPE_SRV,
            Some(512),
            9,
        ),
        ("", Transport::Udp, A, Some(100), 4),
        ("", Transport::Udp, A, Some(513), 33),
        ("", Transport::Udp, A, Some(1232), 78),
    ] {
        assert_eq!(
            most(dns, transport, qtype, size),
            expected,
            "{dns} {qtype} {size:?}"
        );
    }
}

#[test]
fn generated_names_keep_the_asked_domain() {
    let zone = zone_of("{}", "", "");
    for (name, expected) in [
        ("a.alt.", "alt."),
        ("a.consul.", "consul."),
        // As in Consul, the primary domain serves the apex and names in other letters.
        ("alt.", "consul."),
        ("a.Alt.", "consul."),
        ("A.alt.", "alt."),
    ] {
        let raw = Name::wire_as_written(name).unwrap();
        let lower = Name::from_text(name).unwrap();
        let found = zone.config.domain_of(&lower).unwrap();
        let domain = zone.response_domain(&lower, found, &raw);
        assert_eq!(domain.to_string(), expected, "{name}");
    }
}

#[test]
fn queries_name_service_and_place() {
    let zone = zone_of("{}", "", "");
    let datacenter = |name: &str| Place::Datacenter(name.into());
    for (name, qtype, expected) in [
        (
            "v1.Web.service.consul.",
            A,
            Some((datacenter("dc1"), "web")),
        ),
        ("web.service.dc2.alt.", A, Some((datacenter("dc2"), "web"))),
        (
            "web.service.east.peer.consul.",
            A,
            Some((Place::Peer("east".into()), "web")),
        ),
        (
            "_web._tcp.consul.",
            TYPE_SRV,
            Some((datacenter("dc1"), "web")),
        ),
        ("_web._tcp.consul.", A, None),
        ("n1.node.consul.", A, None),
        ("web.connect.consul.", A, None),
        ("web.service.example.", A, None),
    ] {
        let message = message(name, qtype);
        let found = zone.service_of(&parsed(&message, Transport::Udp));
        let expected = expected.map(|(place, service)| (place, service.to_owned()));
        assert_eq!(found, expected, "{name}");
    }
}

//----------- Live -----------------------------------------------------------

/// Returns a loaded place with these services; `false` for those whose instances are not loaded.
fn loaded(services: &[(&str, bool)]) -> LivePlace {
    let mut place = LivePlace {
        nodes: Some(Arc::default()),
        ..LivePlace::default()
    };
    let list = place.services.get_or_insert_default();
    for &(name, is_loaded) in services {
        place.unloaded += usize::from(!is_loaded);
        let service = LiveService {
            name: name.to_owned(),
            tags: Vec::new(),
            instances: is_loaded.then(|| Arc::new(ServiceInstances::default())),
        };
        list.insert(name.into(), Arc::new(service));
    }
    place
}

fn live_zone(live: Live) -> Zone {
    let mut zone = zone_of("{}", "", "");
    zone.catalog = Catalog::build(
        Registrations::default(),
        &zone.config,
        zone.config.visibility.clone(),
    );
    zone.catalog.update(Some(live));
    zone
}

/// Returns the lack of a name, as text.
fn lack(zone: &Zone, name: &str, qtype: u16) -> String {
    let Some(Lack { place, missing }) = zone.lacks_for(&Name::from_text(name).unwrap(), qtype)
    else {
        return String::new();
    };
    let place = match place {
        Place::Datacenter(name) => name,
        Place::Peer(name) => format!("peer {name}").into(),
    };
    let missing = match missing {
        Missing::Lists => "lists".to_owned(),
        Missing::Service(service) => format!("service {service}"),
        Missing::Queries => "queries".to_owned(),
    };
    format!("{missing} of {place}")
}

#[test]
fn unloaded_names_are_not_denied() {
    let zone = live_zone(Live::unknown("dc1"));
    for (name, expected) in [
        ("v1.web.service.consul.", "service web of dc1"),
        ("n1.node.consul.", "lists of dc1"),
        ("web.connect.consul.", "lists of dc1"),
        ("web.ingress.consul.", "lists of dc1"),
        ("web.virtual.consul.", "lists of dc1"),
        ("q.query.consul.", "queries of dc1"),
        // No datacenter and no peer is known yet.
        ("web.service.dc2.consul.", ""),
        ("q.query.dc2.consul.", ""),
        ("web.service.east.peer.consul.", ""),
        ("n1.node.east.peer.consul.", ""),
        ("web.virtual.east.consul.", ""),
        ("0a000001.addr.consul.", ""),
        ("service.consul.", ""),
        ("a.b.consul.", ""),
        ("web.service.example.", ""),
    ] {
        assert_eq!(lack(&zone, name, A), expected, "{name}");
        for qtype in [TYPE_SOA, TYPE_NS, TYPE_AXFR] {
            assert_eq!(lack(&zone, name, qtype), "", "{name}");
        }
    }
    assert_eq!(reply(&zone, "web.service.consul.", A), "ServFail");
    assert_eq!(reply(&zone, "a.b.consul.", A), NXDOMAIN);
    assert_eq!(
        lack(&zone_of("{}", "", ""), "web.service.consul.", A),
        "",
        "files are complete"
    );
}

#[test]
fn names_decide_the_lack() {
    let mut live = Live::unknown("dc1");
    for (name, reachable) in [("dc1", true), ("dc2", true), ("dc3", false), ("dc4", true)] {
        let name = name.to_owned();
        live.datacenters.push(Datacenter { name, reachable });
    }
    live.queries.insert("dc1".to_owned(), Arc::default());
    let mut with_address = loaded(&[("db", false), ("web", true)]);
    let proxies = ServiceInstances {
        virtual_addresses: vec![("web".to_owned(), [240, 0, 0, 1].into())],
        ..ServiceInstances::default()
    };
    let proxy = LiveService {
        name: "proxy".to_owned(),
        tags: Vec::new(),
        instances: Some(Arc::new(proxies)),
    };
    let services = with_address.services.as_mut().unwrap();
    services.insert("proxy".into(), Arc::new(proxy));
    let datacenter = |name: &str| Place::Datacenter(name.into());
    let peer = |name: &str| Place::Peer(name.into());
    live.places = BTreeMap::from([
        (datacenter("dc1"), with_address),
        (datacenter("dc4"), loaded(&[("db", false), ("web", true)])),
        (peer("east"), loaded(&[("db", false), ("web", true)])),
        (peer("west"), loaded(&[("web", true)])),
    ]);
    let zone = live_zone(live.clone());
    for (name, expected) in [
        ("web.service.consul.", ""),
        ("db.service.consul.", "service db of dc1"),
        ("none.service.consul.", ""),
        ("n1.node.consul.", ""),
        ("q.query.consul.", ""),
        // Mesh instances are registered under other names.
        ("web.connect.consul.", "lists of dc1"),
        ("web.ingress.consul.", "lists of dc1"),
        // Its address is known, and so are its instances.
        ("web.virtual.consul.", ""),
        ("db.virtual.consul.", "lists of dc1"),
        ("web.service.dc2.consul.", "service web of dc2"),
        ("n1.node.dc2.consul.", "lists of dc2"),
        ("web.connect.dc2.consul.", "lists of dc2"),
        ("q.query.dc2.consul.", "queries of dc2"),
        ("web.service.dc3.consul.", ""),
        ("q.query.dc3.consul.", ""),
        ("web.service.dc5.consul.", ""),
        // Of other datacenters only the services in use are loaded.
        ("web.connect.dc4.consul.", ""),
        ("db.service.dc4.consul.", "service db of dc4"),
        ("web.service.east.peer.consul.", ""),
        ("db.service.east.peer.consul.", "service db of peer east"),
        ("n1.node.east.peer.consul.", "lists of peer east"),
        ("web.connect.east.peer.consul.", "lists of peer east"),
        ("x.virtual.east.consul.", "lists of peer east"),
        ("n1.node.west.peer.consul.", ""),
        ("web.connect.west.peer.consul.", ""),
        ("x.virtual.west.consul.", ""),
        ("n1.node.south.peer.consul.", ""),
    ] {
        assert_eq!(lack(&zone, name, A), expected, "{name}");
    }
    let explained = zone.explain(&Name::from_text("db.service.east.peer.consul.").unwrap());
    let text = "db.service.east.peer.consul. is one of Consul's names (domain consul.)\n  asks for: instances of \
                the service \"db\" of the peer \"east\"\n  instances of \"db\" of the peer \"east\" not yet \
                received from Consul: SERVFAIL\n";
    let expected = Explanation {
        domain: "consul.".to_owned(),
        text: text.to_owned(),
        rcode: "SERVFAIL",
    };
    assert_eq!(explained, Some(expected));
    for (name, line) in [
        (
            "web.connect.consul.",
            "  nodes and services of the datacenter \"dc1\" not yet received",
        ),
        (
            "q.query.dc2.consul.",
            "  prepared queries of the datacenter \"dc2\" not yet received",
        ),
    ] {
        let explained = zone.explain(&Name::from_text(name).unwrap()).unwrap();
        assert!(explained.text.contains(line), "{}", explained.text);
    }

    // A service is still missing, but no other.
    live.places
        .insert(datacenter("dc1"), loaded(&[("db", true)]));
    let zone = live_zone(live);
    for name in [
        "web.connect.consul.",
        "web.ingress.consul.",
        "db.virtual.consul.",
        "db.service.consul.",
    ] {
        assert_eq!(lack(&zone, name, A), "", "{name}");
    }
}

#[test]
fn interfaces_answer_names_of_addresses_alone() {
    let published = |zone: &Zone, name: &str| {
        let Publishable {
            v4,
            v6,
            ttl,
            most,
            plain_v4,
            plain_v6,
            truncates,
        } = zone.publishable(&Name::from_text(name).unwrap())?;
        Some(format!(
            "{v4:?} {v6:?} {ttl} {most} {plain_v4} {plain_v6} {truncates}"
        ))
    };
    let zone = zone_of(CATALOG, "", "");
    for (name, expected) in [
        (
            "web.service.consul.",
            Some("[10.0.0.1] [2001:db8::2] 7 0 1 1 false"),
        ),
        ("v1.web.service.alt.", Some("[10.0.0.1] [] 7 0 1 0 false")),
        ("n2.node.consul.", Some("[] [2001:db8::2] 5 0 0 1 false")),
        ("web.connect.consul.", Some("[10.0.0.1] [] 7 0 1 0 false")),
        ("web.virtual.consul.", Some("[240.0.0.1] [] 5 0 1 0 false")),
        // Its metadata is an additional record.
        ("n1.node.consul.", None),
        // Its order depends on the client.
        ("q.query.consul.", None),
        ("ext.service.consul.", None),
        ("sick.service.consul.", None),
        ("none.node.consul.", None),
        ("service.consul.", None),
        ("a.b.consul.", None),
        ("a.example.", None),
    ] {
        assert_eq!(published(&zone, name).as_deref(), expected, "{name}");
    }
    let dns = r#", "disable_compression": true"#;
    assert_eq!(
        published(&zone_of(CATALOG, "", dns), "web.service.consul."),
        None
    );
    assert_eq!(
        published(&live_zone(Live::unknown("dc1")), "web.service.consul."),
        None
    );

    let mut services = Vec::new();
    for number in 1..=10 {
        services.push(format!(
            r#"{{"name": "many", "node": "n", "id": "{number}", "address": "10.0.0.{number}"}}"#
        ));
    }
    let services = services.join(",");
    let many = format!(
        r#"{{"nodes": [{{"node": "n", "address": "10.0.0.1"}}], "services": [{services}]}}"#
    );
    for (dns, expected) in [
        ("", "7 0 3 0 false"),
        (r#", "a_record_limit": 2"#, "7 2 2 0 false"),
        (
            r#", "a_record_limit": 65536, "enable_truncate": true"#,
            "7 0 3 0 true",
        ),
        (
            r#", "udp_answer_limit": 20, "a_record_limit": 65535"#,
            "7 65535 8 0 false",
        ),
    ] {
        let found = published(&zone_of(&many, "", dns), "many.service.consul.").unwrap();
        // All of them: the interface draws from the whole list.
        assert_eq!(found.matches("10.0.0.").count(), 10, "{found}");
        assert!(found.ends_with(expected), "{found}");
    }
    let none = zone_of(&many, "", r#", "udp_answer_limit": 0"#);
    assert_eq!(published(&none, "many.service.consul."), None);
}

#[test]
fn address_limits_cover_every_type() {
    let mut services = Vec::new();
    for number in 1..=10 {
        services.push(format!(
            r#"{{"name": "many", "node": "n", "id": "{number}", "address": "10.0.0.{number}"}}"#
        ));
    }
    // Instances of one address are one answer.
    services.push(r#"{"name": "many", "node": "n", "id": "11", "address": "10.0.0.1"}"#.to_owned());
    let services = services.join(",");
    let many = format!(
        r#"{{"nodes": [{{"node": "n", "address": "10.0.0.1"}}], "services": [{services}]}}"#
    );
    let distinct = many.replace(
        r#""id": "11", "address": "10.0.0.1""#,
        r#""id": "11", "address": "10.0.0.11""#,
    );
    for (catalog, all) in [(&many, 10), (&distinct, 11)] {
        for (limit, expected) in [(0, all), (1, 1), (4, 4), (20, all)] {
            let zone = zone_of(catalog, "", &format!(r#", "a_record_limit": {limit}"#));
            for qtype in [A, TYPE_ANY] {
                let text = reply(&zone, "many.service.consul.", qtype);
                let found = text.matches("= many.service.consul. 7 A 10.0.0.").count();
                assert_eq!(
                    (found, text.lines().count()),
                    (expected, expected + 1),
                    "{text}"
                );
            }
            // It is no limit of SRV records: each instance has its own.
            let text = reply(&zone, "many.service.consul.", TYPE_SRV);
            assert_eq!(text.matches(" SRV ").count(), all, "{text}");
        }
    }
}

#[test]
fn gateways_of_a_service_are_listed() {
    let zone = zone_of(CATALOG, "", "");
    for (name, line) in [
        (
            "web.ingress.consul.",
            "    gw on n1, 10.0.0.1 port 8443: passing\n",
        ),
        (
            "web.connect.consul.",
            "    web-proxy on n1, 10.0.0.1 port 21000: passing\n",
        ),
        (
            "api.service.consul.",
            "    api on n1, 10.9.0.9 port 443: passing\n",
        ),
    ] {
        let explained = zone.explain(&Name::from_text(name).unwrap()).unwrap();
        assert!(explained.text.contains(line), "{}", explained.text);
    }
    let acl = r#", "acl": {"nodes": ["*"], "services": ["web"]}"#;
    let hidden = zone_of(CATALOG, acl, "");
    let explained = hidden.explain(&Name::from_text("api.connect.consul.").unwrap());
    assert_eq!(explained.unwrap().rcode, "SERVFAIL");
}

#[test]
fn targets_bring_five_addresses() {
    let mut services = Vec::new();
    for number in 1..=7 {
        services.push(format!(
            r#"{{"name": "many", "node": "n", "id": "{number}", "address": "10.0.0.{number}"}}"#
        ));
    }
    services.push(
        r#"{"name": "alias", "node": "n", "address": "many.service.consul", "port": 1}"#.to_owned(),
    );
    let services = services.join(",");
    let catalog = format!(
        r#"{{"nodes": [{{"node": "n", "address": "10.0.0.1"}}], "services": [{services}]}}"#
    );
    let zone = zone_of(&catalog, "", "");
    let message = message("alias.service.consul.", TYPE_SRV);
    for transport in [Transport::Udp, Transport::Tcp] {
        let query = parsed(&message, transport);
        let random = &mut fastrand::Rng::with_seed(1);
        let answer = zone.answer(&query, &asker(), random).unwrap();
        let text = shown(&zone, &query, answer);
        assert_eq!(
            text.matches("+ many.service.consul. 7 A 10.0.0.").count(),
            5,
            "{text}"
        );
        assert!(
            text.ends_with("= alias.service.consul. 7 SRV 1 1 1 many.service.consul."),
            "{text}"
        );
    }
}

#[test]
fn family_and_own_name_select_addresses() {
    let catalog = r#"{
        "nodes": [
            {"node": "two", "address": "10.0.0.6", "tagged_addresses": {"lan_ipv6": "fd00::6"}},
            {"node": "six", "address": "fd00::7"}],
        "services": [
            {"node": "six", "name": "six"},
            {"node": "two", "name": "itself", "address": "itself.service.consul", "port": 1},
            {"node": "two", "name": "both", "id": "1"},
            {"node": "two", "name": "both", "id": "2"}]}"#;
    let zone = zone_of(catalog, "", "");
    for (name, qtype, expected) in [
        (
            "two.node.consul.",
            A,
            "NoError\n= two.node.consul. 5 A 10.0.0.6",
        ),
        (
            "two.node.consul.",
            AAAA,
            "NoError\n= two.node.consul. 5 AAAA fd00::6",
        ),
        // Either family serves: IPv6 first, as in Consul.
        (
            "two.node.consul.",
            TYPE_ANY,
            "NoError\n= two.node.consul. 5 AAAA fd00::6",
        ),
        ("six.service.consul.", A, NODATA),
        (
            "six.service.consul.",
            AAAA,
            "NoError\n= six.service.consul. 7 AAAA fd00::7",
        ),
        (
            "both.service.consul.",
            A,
            "NoError\n= both.service.consul. 7 A 10.0.0.6",
        ),
        (
            "both.service.consul.",
            AAAA,
            "NoError\n= both.service.consul. 7 AAAA fd00::6",
        ),
        // A name that is its own address would lead in a circle; its node's address replaces it.
        (
            "itself.service.consul.",
            A,
            "NoError\n= itself.service.consul. 7 A 10.0.0.6",
        ),
    ] {
        assert_eq!(reply(&zone, name, qtype), expected, "{name} {qtype}");
    }
}

/// The last host of a chain keeps what the question's name keeps: a node's records have the recursor's TTLs.
#[test]
fn chains_leave_the_domain_at_their_end() {
    let catalog = r#"{"nodes": [{"node": "n1", "address": "10.0.0.1"}, {"node": "n2", "address": "ext.service.consul"}],
        "services": [{"node": "n1", "name": "ext", "address": "ext.example"},
                     {"node": "n1", "name": "outer", "address": "ext.service.consul"}]}"#;
    let zone = zone_of(catalog, "", "");
    let host = Name::from_text("ext.example").unwrap();
    let found = Record {
        owner: Some(host.clone()),
        ttl: 100,
        data: Data::A([192, 0, 2, 1].into()),
    };
    let chains = [(host.clone(), vec![found])].into_iter().collect();
    let recursing = Asker {
        recursion: true,
        ..asker()
    };
    for (name, expected) in [
        (
            "outer.service.consul.",
            "= ext.example. 7 A 192.0.2.1\n= ext.service.consul. 7 CNAME ext.example.\n= outer.service.consul. 7 CNAME \
             ext.service.consul.",
        ),
        (
            "n2.node.consul.",
            "= ext.example. 100 A 192.0.2.1\n= ext.service.consul. 7 CNAME ext.example.\n= n2.node.consul. 5 CNAME \
             ext.service.consul.",
        ),
    ] {
        let message = message(name, A);
        let query = parsed(&message, Transport::Tcp);
        let answer = zone.answer(&query, &recursing, &mut fastrand::Rng::with_seed(1));
        let answer = answer.unwrap();
        assert_eq!(answer.hosts(), std::slice::from_ref(&host), "{name}");
        let reply = answer.finish(&query, &zone.config.dns, &chains);
        assert_eq!(lines(&reply), format!("NoError\n{expected}"), "{name}");
    }
}
