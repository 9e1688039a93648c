//! The fleet's own certificates: an issuer that knows the fleet, an agent on every machine, and
//! rotation of the CA across all of them.
//!
//! This file decides which names an instance may have in a certificate, according to the fleet's `records.json`.
//! [`trust`] has the steps of a rotation. With I/O: [`state`] (files of the issuer), [`issuer`], [`agent`], [`rotate`].

pub mod agent;
pub mod issuer;
pub mod protocol;
pub mod rotate;
pub mod state;
pub mod trust;

use std::{collections::BTreeSet, net::IpAddr};

use dns_core::catalog::Snapshot;

use self::protocol::PairRequest;
use crate::profile::{Profile, ProfileError};

/// Reason for which a request is rejected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NameRefusal {
    /// The instance is not in the records.
    #[error("no instance {0:?} in records.json; wait for the records, or correct the id")]
    UnknownInstance(String),
    /// The name belongs to another instance, or to none.
    #[error("{name:?} does not belong to instance {instance:?} in records.json; request its own names")]
    ForeignName {
        /// Id of the instance that sent the request.
        instance: String,
        /// The rejected name or address.
        name: String,
    },
    /// The name is not one of the issuer's roles.
    #[error("{0:?} is not a role; start the issuer with --role {0}")]
    UnknownRole(String),
    /// No valid certificate can have these names.
    #[error("{0}")]
    Profile(#[from] ProfileError),
}

/// Returns the profile of a pair if every requested name and address belongs to the instance.
pub fn permitted_profile(
    snapshot: &Snapshot,
    roles: &[String],
    request: &PairRequest,
) -> Result<Profile, NameRefusal> {
    let PairRequest { instance, role, names, addresses, request: _ } = request;
    let own = Own::of(snapshot, instance).filter(|_| !roles.contains(instance));
    let own = own.ok_or_else(|| NameRefusal::UnknownInstance(instance.clone()))?;
    let foreign = |name: String| NameRefusal::ForeignName { instance: instance.clone(), name };
    if let Some(name) = names.iter().find(|name| !own.names.contains(&name.to_ascii_lowercase())) {
        return Err(foreign(name.clone()));
    }
    let addresses = match addresses {
        None => own.addresses.iter().copied().collect(),
        Some(addresses) => match addresses.iter().find(|address| !own.addresses.contains(address)) {
            Some(address) => return Err(foreign(address.to_string())),
            None => addresses.clone(),
        },
    };
    let common_name = match role {
        None => instance,
        Some(role) if roles.contains(role) => role,
        Some(role) => return Err(NameRefusal::UnknownRole(role.clone())),
    };
    // A role's certificate also names its instance, to distinguish instances in a peer's log.
    let more = std::iter::once(instance).chain(names).map(String::as_str);
    Ok(Profile::new(common_name, &[], more, addresses)?)
}

/// Names and addresses of one instance, on all of its networks.
struct Own {
    names: BTreeSet<String>,
    addresses: BTreeSet<IpAddr>,
}

impl Own {
    fn of(snapshot: &Snapshot, id: &str) -> Option<Self> {
        let mut own = Self { names: BTreeSet::new(), addresses: BTreeSet::new() };
        for row in snapshot.instances().filter(|row| row.id == id) {
            own.names.insert(id.to_ascii_lowercase());
            let domain = row.domain.trim_end_matches('.');
            let parts = [row.id, row.instance_group, row.network, row.deployment, domain];
            if parts.iter().all(|part| !part.is_empty()) {
                own.names.insert(parts.join(".").to_ascii_lowercase());
            }
            if !row.agent_id.is_empty() {
                own.names.insert(format!("{}.bosh-agent-id", row.agent_id.to_ascii_lowercase()));
            }
            own.addresses.extend(row.ip);
        }
        (!own.names.is_empty()).then_some(own)
    }
}

#[cfg(test)]
mod tests {
    use dns_core::catalog::{AliasFiles, Records};

    use super::*;

    fn fleet() -> Snapshot {
        let text = r#"{"record_keys":["id","instance_group","network","deployment","ip","domain","agent_id"],
            "record_infos":[["i1","web","default","app","10.0.0.1","bosh","a1"],
                            ["i1","web","other","app","10.1.0.1","bosh","a1"],
                            ["i2","web","default","app","10.0.0.2","bosh","a2"],
                            ["health.bosh-dns","web","default","app","10.0.0.3","bosh","a3"]]}"#;
        let (records, _) = Records::parse(text.as_bytes()).unwrap();
        Snapshot::build(records, &AliasFiles::default()).0
    }

    fn ask(instance: &str, role: Option<&str>, names: &[&str]) -> PairRequest {
        PairRequest {
            instance: instance.to_owned(),
            role: role.map(str::to_owned),
            names: names.iter().map(|name| (*name).to_owned()).collect(),
            addresses: None,
            request: String::new(),
        }
    }

    #[test]
    fn own_names_are_granted() {
        let roles = ["health.bosh-dns".to_owned()];
        let names = ["i1.web.other.app.bosh", "a1.bosh-agent-id"];
        let granted = permitted_profile(&fleet(), &roles, &ask("i1", None, &names)).unwrap();
        assert_eq!(granted.common_name(), "i1");
        assert_eq!(granted.dns_names(), ["i1", "i1.web.other.app.bosh", "a1.bosh-agent-id"]);
        assert_eq!(granted.addresses().len(), 2);
        let granted = permitted_profile(&fleet(), &roles, &ask("i2", Some("health.bosh-dns"), &[])).unwrap();
        assert_eq!(granted.common_name(), "health.bosh-dns");
        assert_eq!(granted.dns_names(), ["health.bosh-dns", "i2"]);
    }

    #[test]
    fn foreign_names_are_refused() {
        let roles = ["health.bosh-dns".to_owned()];
        let refused = |request: &PairRequest| permitted_profile(&fleet(), &roles, request).unwrap_err();
        for name in [
            "i2",
            "i2.web.default.app.bosh",
            "*.web.default.app.bosh",
            "q-s0.web.default.app.bosh",
            "health.bosh-dns",
            "a2.bosh-agent-id",
            "example.org",
            "",
        ] {
            assert!(matches!(refused(&ask("i1", None, &[name])), NameRefusal::ForeignName { .. }), "{name}");
        }
        let mut request = ask("i1", None, &[]);
        request.addresses = Some(vec!["10.0.0.2".parse().unwrap()]);
        assert!(matches!(refused(&request), NameRefusal::ForeignName { .. }));
        assert!(matches!(refused(&ask("i1", Some("api.bosh-dns"), &[])), NameRefusal::UnknownRole(_)));
        assert!(matches!(refused(&ask("i9", None, &[])), NameRefusal::UnknownInstance(_)));
        // An instance named like a role could pose as any instance.
        assert!(matches!(refused(&ask("health.bosh-dns", None, &[])), NameRefusal::UnknownInstance(_)));
    }
}
