//! The questions to Consul.

use std::{fmt, time::Duration};

/// One thing that can be asked for, and watched if Consul lets it be waited for.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Topic {
    /// The agent itself: its datacenter and its node.
    Agent,
    /// Names of all datacenters.
    Datacenters,
    /// Nodes of a datacenter.
    Nodes(String),
    /// Names and tags of the services of a datacenter.
    Services(String),
    /// Instances of a service and their checks.
    Health {
        datacenter: String,
        /// The service, as it is registered.
        service: String,
    },
    /// Which services are bound to ingress gateways.
    Ingress,
    Queries,
}

impl Topic {
    /// Whether an answer can be waited for. All others are asked again now and then.
    pub(crate) fn can_be_watched(&self) -> bool {
        !matches!(self, Self::Agent | Self::Datacenters | Self::Queries)
    }

    /// The request's path. `own`: our datacenter; `index`: to wait behind, for so long;
    /// `stale`: any server may answer.
    pub(crate) fn path(&self, own: Option<&str>, index: Option<(u64, Duration)>, stale: bool) -> String {
        let (mut path, datacenter) = match self {
            Self::Agent => ("/v1/agent/self".to_owned(), None),
            Self::Datacenters => ("/v1/catalog/datacenters".to_owned(), None),
            Self::Nodes(datacenter) => ("/v1/catalog/nodes".to_owned(), Some(datacenter)),
            Self::Services(datacenter) => ("/v1/catalog/services".to_owned(), Some(datacenter)),
            Self::Health { datacenter, service } => {
                (format!("/v1/health/service/{}", escaped(service)), Some(datacenter))
            }
            Self::Ingress => ("/v1/config/ingress-gateway".to_owned(), None),
            Self::Queries => ("/v1/query".to_owned(), None),
        };
        let mut separator = '?';
        let mut add = |text: &str| {
            path.push(std::mem::replace(&mut separator, '&'));
            path.push_str(text);
        };
        if let Some(datacenter) = datacenter.filter(|datacenter| Some(datacenter.as_str()) != own) {
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
            Self::Health { datacenter, service } => write!(out, "service {service} of {datacenter}"),
            Self::Ingress => out.write_str("ingress gateways"),
            Self::Queries => out.write_str("prepared queries"),
        }
    }
}

/// The text as it can stand in a path or a query (RFC 3986, section 2.3).
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
        let topic = |service: &str| Topic::Health { datacenter: "dc1".into(), service: service.into() };
        let wait = Some((7, Duration::from_secs(300)));
        assert_eq!(topic("a b/c").path(Some("dc1"), None, false), "/v1/health/service/a%20b%2Fc");
        assert_eq!(
            topic("web").path(Some("dc2"), wait, true),
            "/v1/health/service/web?dc=dc1&index=7&wait=300000ms&stale"
        );
        assert_eq!(Topic::Agent.path(None, wait, true), "/v1/agent/self");
    }
}
