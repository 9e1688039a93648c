//! Topics that are requested from Consul.

use std::{fmt, time::Duration};

use dns_consul::catalog::Place;

/// A topic that can be requested, and watched if Consul supports blocking queries for it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Topic {
    /// Datacenter and node of the agent itself.
    Agent,
    /// Names of all datacenters.
    Datacenters,
    /// Nodes of a datacenter.
    Nodes(String),
    /// Names and tags of the services of a datacenter.
    Services(String),
    /// Instances of a service and their checks.
    Health {
        place: Place,
        /// Name of the service as registered.
        service: String,
    },
    /// Ingress gateways and the services bound to them.
    Ingress,
    /// Prepared queries stored in a datacenter.
    Queries(String),
    /// Peers and the services that each exports to us.
    Peerings,
    /// Network coordinates of the nodes of a datacenter.
    NodeCoordinates(String),
    /// Network coordinates of the servers of all datacenters.
    ServerCoordinates,
}

impl Topic {
    /// Returns whether a blocking query is used. All other topics are polled, including
    /// coordinates, which change constantly.
    pub(crate) fn can_be_watched(&self) -> bool {
        match self {
            Self::Nodes(_) | Self::Services(_) | Self::Health { .. } | Self::Ingress => true,
            Self::Agent
            | Self::Datacenters
            | Self::Queries(_)
            | Self::Peerings
            | Self::NodeCoordinates(_)
            | Self::ServerCoordinates => false,
        }
    }

    /// Returns the path of the request. `own` is the local datacenter; `index` holds the index and
    /// the maximum wait of a blocking query; if `stale`, any server may answer.
    pub(crate) fn path(&self, own: Option<&str>, index: Option<(u64, Duration)>, stale: bool) -> String {
        let (mut path, datacenter) = match self {
            Self::Agent => ("/v1/agent/self".to_owned(), None),
            Self::Datacenters => ("/v1/catalog/datacenters".to_owned(), None),
            Self::Nodes(datacenter) => ("/v1/catalog/nodes".to_owned(), Some(datacenter.as_str())),
            Self::Services(datacenter) => ("/v1/catalog/services".to_owned(), Some(datacenter.as_str())),
            Self::Health { place, service } => {
                let path = format!("/v1/health/service/{}", escaped(service));
                match place {
                    Place::Datacenter(datacenter) => (path, Some(&**datacenter)),
                    Place::Peer(peer) => (format!("{path}?peer={}", escaped(peer)), None),
                }
            }
            Self::Ingress => ("/v1/config/ingress-gateway".to_owned(), None),
            Self::Queries(datacenter) => ("/v1/query".to_owned(), Some(datacenter.as_str())),
            Self::Peerings => ("/v1/peerings".to_owned(), None),
            Self::NodeCoordinates(datacenter) => {
                ("/v1/coordinate/nodes".to_owned(), Some(datacenter.as_str()))
            }
            Self::ServerCoordinates => ("/v1/coordinate/datacenters".to_owned(), None),
        };
        let mut separator = if path.contains('?') { '&' } else { '?' };
        let mut add = |text: &str| {
            path.push(std::mem::replace(&mut separator, '&'));
            path.push_str(text);
        };
        if let Some(datacenter) = datacenter.filter(|datacenter| Some(*datacenter) != own) {
            add(&format!("dc={}", escaped(datacenter)));
        }
        if !self.can_be_watched() {
            return path;
        }
        if let Some((index, wait)) = index {
            add(&format!("index={index}"));
            add(&format!("wait={}ms", wait.as_millis()));
        }
        if stale {
            add("stale");
        }
        path
    }
}

impl fmt::Display for Topic {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Agent => out.write_str("the agent"),
            Self::Datacenters => out.write_str("datacenters"),
            Self::Nodes(datacenter) => write!(out, "nodes of {datacenter}"),
            Self::Services(datacenter) => write!(out, "services of {datacenter}"),
            Self::Health { place: Place::Datacenter(name), service } => {
                write!(out, "service {service} of {name}")
            }
            Self::Health { place: Place::Peer(name), service } => {
                write!(out, "service {service} of the peer {name}")
            }
            Self::Ingress => out.write_str("ingress gateways"),
            Self::Queries(datacenter) => write!(out, "prepared queries of {datacenter}"),
            Self::Peerings => out.write_str("peers"),
            Self::NodeCoordinates(datacenter) => write!(out, "coordinates of the nodes of {datacenter}"),
            Self::ServerCoordinates => out.write_str("coordinates of servers"),
        }
    }
}

/// Percent-encodes a text for use in a path or query (RFC 3986, section 2.3).
fn escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => escaped.push(byte.into()),
            _ => escaped.push_str(&format!("%{byte:02X}")),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_complete() {
        let topic =
            |service: &str| Topic::Health { place: Place::Datacenter("dc1".into()), service: service.into() };
        let wait = Some((7, Duration::from_secs(300)));
        assert_eq!(topic("a b/c").path(Some("dc1"), None, false), "/v1/health/service/a%20b%2Fc");
        assert_eq!(
            topic("web").path(Some("dc2"), wait, true),
            "/v1/health/service/web?dc=dc1&index=7&wait=300000ms&stale"
        );
        assert_eq!(Topic::Agent.path(None, wait, true), "/v1/agent/self");
        assert_eq!(Topic::Queries("dc2".into()).path(Some("dc1"), wait, true), "/v1/query?dc=dc2");
        let imported = Topic::Health { place: Place::Peer("east".into()), service: "web".into() };
        assert_eq!(
            imported.path(Some("dc1"), wait, false),
            "/v1/health/service/web?peer=east&index=7&wait=300000ms"
        );
    }
}
