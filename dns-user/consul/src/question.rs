//! Parses the labels of a name into a question, without the catalog.

use std::net::IpAddr;

use dns_core::name::Name;

/// Type SRV (RFC 2782).
pub(crate) const TYPE_SRV: u16 = 33;

/// Meaning of a name in one of our domains. All texts are in lower case.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Question {
    /// `<node>.node`: addresses of a node.
    Node {
        /// Name of the node, or a prefix of its id.
        name: String,
        /// Labels to the right of `node`.
        locality: Locality,
    },
    /// `[tag.]<service>.service`, `_<service>._<tag>.service`, `<service>.connect`, `<service>.ingress`.
    Service {
        relation: Relation,
        service: String,
        /// Tag that instances must have.
        tag: Option<String>,
        locality: Locality,
    },
    /// `<service>.virtual`: the virtual address of a service.
    Virtual {
        service: String,
        /// Peer that the service was imported from.
        peer: Option<String>,
    },
    /// `<id or name>.query`.
    Query {
        /// Id, name, or a name that a template matches.
        name: String,
        /// Datacenter that stores the query.
        datacenter: Option<String>,
    },
    /// `<hex>.addr`: an address encoded in the name.
    Address(IpAddr),
    /// An empty non-terminal: a domain, a bare keyword, or a domain's `ns`.
    Empty,
    /// Not a valid name in our domains.
    Invalid,
}

/// The instances of a service that a name is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Relation {
    /// Registered under the service's name.
    Own,
    /// Those that represent it in a service mesh.
    Mesh,
    /// Ingress gateways that it is bound to.
    Gateway,
}

/// Labels to the right of the kind: datacenter, peer, port.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Locality {
    /// Datacenter; `None` for the local one.
    pub(crate) datacenter: Option<String>,
    /// Peer that the service was imported from.
    pub(crate) peer: Option<String>,
    pub(crate) port: Option<String>,
}

/// Labels that select the kind of lookup.
pub(crate) const KINDS: [&str; 7] = [
    "service", "connect", "virtual", "ingress", "node", "query", "addr",
];

impl Question {
    /// Parses a name in `domain`.
    ///
    /// The rightmost kind decides; for SRV without a kind further right, a label that begins with
    /// `_` ends the name of a service.
    pub(crate) fn read(name: &Name, domain: &Name, qtype: u16) -> Self {
        let labels = labels_within(name, domain);
        for (at, label) in labels.iter().enumerate().rev() {
            let before = &labels[..at];
            let after = &labels[at + 1..];
            if KINDS.contains(&label.as_str()) {
                return Self::of_kind(label, before, after);
            }
            // The form of RFC 2782, `_service._tag`, may omit `service`.
            if qtype == TYPE_SRV && label.starts_with('_') {
                return Self::of_kind("service", &labels[..=at], after);
            }
        }
        match labels.as_slice() {
            [] => Self::Empty,
            [only] if only == "ns" => Self::Empty,
            _ => Self::Invalid,
        }
    }

    /// Parses the labels before and after the kind.
    fn of_kind(kind: &str, before: &[String], after: &[String]) -> Self {
        let Some(last) = before.last() else {
            return if after.is_empty() {
                Self::Empty
            } else {
                Self::Invalid
            };
        };
        let service = last.clone();
        match (kind, before, after) {
            // Consul ignores the labels to the right, even of unknown datacenters.
            ("addr", [hex], _) => return read_hex(hex).map_or(Self::Invalid, Self::Address),
            ("query", _, [] | [_]) => {
                return Self::Query {
                    name: query_name(before),
                    datacenter: after.first().cloned(),
                };
            }
            // Prepared queries take a bare datacenter, not a pair with `dc` (tests/cases).
            ("addr" | "query", ..) => return Self::Invalid,
            // A single label is a peer here, and a datacenter for every other kind.
            ("virtual", _, [peer]) => {
                return Self::Virtual {
                    service,
                    peer: Some(peer.clone()),
                };
            }
            _ => {}
        }
        let Some(locality) = Locality::read(after) else {
            return Self::Invalid;
        };
        let relation = match kind {
            "virtual" => {
                return Self::Virtual {
                    service,
                    peer: locality.peer,
                };
            }
            "node" => {
                return Self::Node {
                    name: before.join("."),
                    locality,
                };
            }
            "connect" => Relation::Mesh,
            "ingress" => Relation::Gateway,
            _ => Relation::Own,
        };
        let (service, tag) = match relation {
            Relation::Own => service_and_tag(before, last),
            // Consul ignores labels before the service of these kinds.
            Relation::Mesh | Relation::Gateway => (service, None),
        };
        Self::Service {
            relation,
            service,
            tag,
            locality,
        }
    }
}

impl Locality {
    /// Parses the labels to the right of a kind: none, a datacenter, or pairs of a value and `dc`,
    /// `peer` or `port`; the last value of each counts. `None` for anything else, such as the
    /// namespaces of Consul Enterprise.
    pub(crate) fn read(labels: &[String]) -> Option<Self> {
        let mut locality = Self::default();
        if let [datacenter] = labels {
            locality.datacenter = Some(datacenter.clone());
            return Some(locality);
        }
        for pair in labels.chunks(2) {
            // An odd number of labels is denied (tests/cases).
            let [value, kind] = pair else { return None };
            let field = match kind.as_str() {
                "dc" => &mut locality.datacenter,
                "peer" => &mut locality.peer,
                "port" => &mut locality.port,
                _ => return None,
            };
            *field = Some(value.clone());
        }
        // An imported service has no datacenter of ours.
        if locality.datacenter.is_some() && locality.peer.is_some() {
            return None;
        }
        Some(locality)
    }
}

/// Returns the labels of a name to the left of its domain.
pub(crate) fn labels_within(name: &Name, domain: &Name) -> Vec<String> {
    let count = name.label_count() - domain.label_count();
    let mut labels = Vec::with_capacity(count);
    for label in name.labels().take(count) {
        labels.push(String::from_utf8_lossy(label).into_owned());
    }
    labels
}

/// Returns service and tag. `_service._tag` contains both, where the tag `tcp` is no filter;
/// otherwise the last label is the service and all others together are the tag.
fn service_and_tag(labels: &[String], last: &str) -> (String, Option<String>) {
    // Exactly two labels: with three, the last is the service's name, with its underscore
    // (tests/cases).
    if let [service, tag] = labels
        && let (Some(service), Some(tag)) = (service.strip_prefix('_'), tag.strip_prefix('_'))
    {
        let tag = if tag == "tcp" { "" } else { tag };
        return (service.to_owned(), filter_by(tag.to_owned()));
    }
    // Two tags are not two filters: all labels before the service form one (tests/cases).
    let tag = labels[..labels.len() - 1].join(".");
    (last.to_owned(), filter_by(tag))
}

/// Returns the tag that instances must have; `None` if it is empty.
fn filter_by(tag: String) -> Option<String> {
    if tag.is_empty() { None } else { Some(tag) }
}

/// Returns the name of a prepared query: all labels, or the part between `_` and `._<protocol>`.
fn query_name(labels: &[String]) -> String {
    if let [name @ .., protocol] = labels
        && let Some(first) = name.first()
        && first.starts_with('_')
        && protocol.starts_with('_')
    {
        return name.join(".").split_off(1);
    }
    labels.join(".")
}

/// Parses an address of 8 or 32 hexadecimal digits.
fn read_hex(text: &str) -> Option<IpAddr> {
    // `from_str_radix` would accept a sign.
    if !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return None;
    }
    match text.len() {
        8 => Some(IpAddr::V4(u32::from_str_radix(text, 16).ok()?.into())),
        32 => Some(IpAddr::V6(u128::from_str_radix(text, 16).ok()?.into())),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str, qtype: u16) -> Question {
        let name = Name::from_text(text).unwrap();
        Question::read(&name, &Name::from_text("consul").unwrap(), qtype)
    }

    #[test]
    fn srv_names_may_leave_the_kind_out() {
        let Question::Service {
            relation: Relation::Own,
            service,
            tag,
            locality,
        } = read("_web._http.dc2.consul", TYPE_SRV)
        else {
            panic!("a service");
        };
        assert_eq!((service.as_str(), tag.as_deref()), ("web", Some("http")));
        assert_eq!(locality.datacenter.as_deref(), Some("dc2"));
        assert_eq!(read("_web._http.dc2.consul", 1), Question::Invalid);
    }

    #[test]
    fn enterprise_forms_are_no_names() {
        for text in [
            "web.service.default.ns.consul",
            "web.service.default.ns.default.ap.dc1.dc.consul",
            "a.node.default.ap.dc1.dc.consul",
            "web.service.group.sg.consul",
            "web.service.dc1.dc.west.peer.consul",
        ] {
            assert_eq!(read(text, 1), Question::Invalid, "{text}");
        }
    }

    fn locality(datacenter: &str, peer: &str, port: &str) -> Locality {
        let filled = |text: &str| (!text.is_empty()).then(|| text.to_owned());
        Locality {
            datacenter: filled(datacenter),
            peer: filled(peer),
            port: filled(port),
        }
    }

    fn service(service: &str, tag: &str, locality: Locality) -> Question {
        Question::Service {
            relation: Relation::Own,
            service: service.to_owned(),
            tag: (!tag.is_empty()).then(|| tag.to_owned()),
            locality,
        }
    }

    #[test]
    fn names_have_a_single_meaning() {
        let here = Locality::default;
        let node = |name: &str, locality| Question::Node {
            name: name.to_owned(),
            locality,
        };
        let query = |name: &str, datacenter: Option<&str>| Question::Query {
            name: name.to_owned(),
            datacenter: datacenter.map(str::to_owned),
        };
        let related = |relation, service: &str, locality| Question::Service {
            relation,
            service: service.to_owned(),
            tag: None,
            locality,
        };
        let connect = |service: &str, locality| related(Relation::Mesh, service, locality);
        let ingress = |service: &str, locality| related(Relation::Gateway, service, locality);
        let virtual_of = |service: &str, peer: Option<&str>| Question::Virtual {
            service: service.to_owned(),
            peer: peer.map(str::to_owned),
        };
        let v6 = "2001:db8::1".parse().unwrap();
        for (name, expected) in [
            ("web.service", service("web", "", here())),
            ("WEB.Service", service("web", "", here())),
            (
                "web.service.dc2",
                service("web", "", locality("dc2", "", "")),
            ),
            (
                "web.service.dc2.dc",
                service("web", "", locality("dc2", "", "")),
            ),
            (
                "web.service.east.peer",
                service("web", "", locality("", "east", "")),
            ),
            (
                "web.service.http.port",
                service("web", "", locality("", "", "http")),
            ),
            (
                "web.service.http.port.dc2.dc",
                service("web", "", locality("dc2", "", "http")),
            ),
            (
                "web.service.http.port.east.peer",
                service("web", "", locality("", "east", "http")),
            ),
            // The last pair of a kind counts.
            (
                "web.service.dc2.dc.dc3.dc.a.port.b.port",
                service("web", "", locality("dc3", "", "b")),
            ),
            ("v1.web.service", service("web", "v1", here())),
            // All labels in front are one tag, dots included.
            (
                "v1.0.web.service.dc2",
                service("web", "v1.0", locality("dc2", "", "")),
            ),
            ("_web._tcp.service", service("web", "", here())),
            (
                "_web._tcp.service.dc2",
                service("web", "", locality("dc2", "", "")),
            ),
            ("_web._v1.service", service("web", "v1", here())),
            ("_web._.service", service("web", "", here())),
            // Only with two underscores it is the form of RFC 2782.
            ("_web.tcp.service", service("tcp", "_web", here())),
            ("web._tcp.service", service("_tcp", "web", here())),
            ("_a._b._c.service", service("_c", "_a._b", here())),
            ("a.b.node", node("a.b", here())),
            ("n1.node.dc2", node("n1", locality("dc2", "", ""))),
            ("n1.node.east.peer", node("n1", locality("", "east", ""))),
            // The rightmost kind decides.
            ("n1.node.x.service", service("x", "n1.node", here())),
            ("web.service.x.node", node("web.service.x", here())),
            ("q.query", query("q", None)),
            ("a.b.query.dc2", query("a.b", Some("dc2"))),
            ("_q._tcp.query", query("q", None)),
            ("_a.b._tcp.query", query("a.b", None)),
            ("_q.tcp.query", query("_q.tcp", None)),
            ("q._tcp.query", query("q._tcp", None)),
            ("_q.query", query("_q", None)),
            ("web.connect", connect("web", here())),
            (
                "ignored.web.connect.dc2",
                connect("web", locality("dc2", "", "")),
            ),
            ("ignored.web.ingress", ingress("web", here())),
            ("web.ingress.dc2", ingress("web", locality("dc2", "", ""))),
            ("web.virtual", virtual_of("web", None)),
            ("ignored.web.virtual.east", virtual_of("web", Some("east"))),
            ("web.virtual.east.peer", virtual_of("web", Some("east"))),
            ("web.virtual.dc2.dc", virtual_of("web", None)),
            ("0a000001.addr", Question::Address([10, 0, 0, 1].into())),
            (
                "C0A80102.addr.dc1",
                Question::Address([192, 168, 1, 2].into()),
            ),
            // The suffix of an address is ignored.
            (
                "0a000001.addr.no.such.place",
                Question::Address([10, 0, 0, 1].into()),
            ),
            (
                "20010db8000000000000000000000001.addr",
                Question::Address(v6),
            ),
            ("", Question::Empty),
            ("ns", Question::Empty),
            ("service", Question::Empty),
            ("query", Question::Empty),
        ] {
            let name = if name.is_empty() {
                "consul".to_owned()
            } else {
                format!("{name}.consul")
            };
            assert_eq!(read(&name, 1), expected, "{name}");
        }
        for name in [
            "a",
            "a.b",
            "ns.ns",
            "service.dc1",
            "web.service.a.b",
            "web.service.a.b.c",
            "web.service.dc2.dc.x",
            "n1.node.a.ns",
            "q.query.dc2.dc",
            "q.query.a.b.c",
            "0a00001.addr",
            "0a0000011.addr",
            "+a000001.addr",
            "0a00000g.addr",
            "x.0a000001.addr",
            "20010db800000000000000000000001.addr",
            "web.virtual.dc2.dc.east.peer",
        ] {
            assert_eq!(
                read(&format!("{name}.consul"), 1),
                Question::Invalid,
                "{name}"
            );
        }
    }

    #[test]
    fn rightmost_underscore_ends_srv_names() {
        let here = Locality::default;
        for (name, qtype, expected) in [
            ("_web._tcp", TYPE_SRV, service("web", "", here())),
            ("_web._v1", TYPE_SRV, service("web", "v1", here())),
            ("a._web", TYPE_SRV, service("_web", "a", here())),
            (
                "_web._v1.dc2.dc.http.port",
                TYPE_SRV,
                service("web", "v1", locality("dc2", "", "http")),
            ),
            // A kind further right precedes an underscore, and one further left does not.
            (
                "_web._tcp.service.dc2",
                TYPE_SRV,
                service("web", "", locality("dc2", "", "")),
            ),
            (
                "n.node._web._tcp",
                TYPE_SRV,
                service("_tcp", "n.node._web", here()),
            ),
            ("_web._tcp", 1, Question::Invalid),
            ("_web._tcp", 28, Question::Invalid),
            ("_web._tcp.a.b", TYPE_SRV, Question::Invalid),
            ("web.tcp", TYPE_SRV, Question::Invalid),
        ] {
            assert_eq!(
                read(&format!("{name}.consul"), qtype),
                expected,
                "{name} {qtype}"
            );
        }
    }

    #[test]
    fn labels_precede_the_domain() {
        let labels = |name: &str, domain: &str| {
            let [name, domain] = [name, domain].map(|text| Name::from_text(text).unwrap());
            labels_within(&name, &domain)
        };
        assert_eq!(labels("a.b.example.org", "example.org"), ["a", "b"]);
        assert_eq!(labels("a.b.example.org", "org"), ["a", "b", "example"]);
        assert_eq!(labels("example.org", "example.org"), [""; 0]);
    }
}
