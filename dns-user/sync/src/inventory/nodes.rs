//! `--nodes HOSTSFILE`: a minimal inventory in the format of `/etc/hosts`.

use std::collections::BTreeMap;

use super::{
    InventoryError,
    file::{RawDeployment, RawGroup, RawInstance, RawInventory},
};

/// Deployment, instance group and network of all nodes.
const NAMES: [&str; 3] = ["fleet", "node", "default"];

/// Parses lines of the form `ADDRESS NAME...`; the first label of the first name is the id of the
/// instance and of its agent. Loopback and multicast lines, which every hosts file has, are
/// skipped.
pub fn read(text: &str) -> Result<RawInventory, InventoryError> {
    let [deployment, group, network] = NAMES.map(str::to_owned);
    let mut instances = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let place = format!("line {}", number + 1);
        let mut words = line.split('#').next().unwrap_or_default().split_whitespace();
        let Some(address) = words.next() else { continue };
        let address: std::net::IpAddr = address
            .parse()
            .map_err(|_| InventoryError::new(&place, format!("{address:?} is not an IP address")))?;
        if address.is_loopback() || address.is_multicast() || address.to_string() == "fe00::" {
            continue;
        }
        let Some(name) = words.next() else {
            return Err(InventoryError::new(place, format!("{address} has no name")));
        };
        let id = name.split('.').next().unwrap_or(name).to_owned();
        instances.push(RawInstance {
            agent_id: Some(id.clone()),
            id,
            index: None,
            az: None,
            networks: BTreeMap::from([(network.clone(), address)]),
        });
    }
    let group = RawGroup { name: group, links: Vec::new(), instances };
    let deployment = RawDeployment { name: deployment, instance_groups: vec![group] };
    Ok(RawInventory { deployments: vec![deployment], ..RawInventory::default() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hosts_file_is_an_inventory() {
        let raw = read(
            "127.0.0.1 localhost\n::1 ip6-localhost\n\n10.0.0.1 web1.example web1 # first\n10.0.0.2\tweb2\n",
        );
        let instances = &raw.unwrap().deployments[0].instance_groups[0].instances;
        let ids: Vec<_> = instances.iter().map(|instance| instance.id.as_str()).collect();
        assert_eq!(ids, ["web1", "web2"]);
        assert_eq!(
            read("10.0.0.1 a\nten b\n").unwrap_err().to_string(),
            "line 2: \"ten\" is not an IP address"
        );
    }
}
