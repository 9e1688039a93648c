//! `--nodes HOSTSFILE`: a minimal inventory in the format of `/etc/hosts`.

use std::{
    collections::{BTreeMap, HashMap},
    net::IpAddr,
};

use super::{
    InventoryError,
    file::{RawDeployment, RawGroup, RawInstance, RawInventory},
};

/// Deployment, instance group and network of all nodes.
const NAMES: [&str; 3] = ["fleet", "node", "default"];

/// Parses lines of the form `ADDRESS NAME...`; the first label of the first name, in lower case, is the
/// id of the instance and of its agent. Lines with the same name or address describe one instance.
/// Addresses that other machines cannot reach, such as loopback, multicast and link-local ones with
/// or without a zone index, are skipped: every hosts file has them.
pub fn read(text: &str) -> Result<RawInventory, InventoryError> {
    let [deployment, group, network] = NAMES.map(str::to_owned);
    let mut instances: Vec<RawInstance> = Vec::new();
    let mut owners: HashMap<IpAddr, usize> = HashMap::new();
    let mut positions: HashMap<String, usize> = HashMap::new();
    for (number, line) in text.lines().enumerate() {
        let place = format!("line {}", number + 1);
        let mut words = line.split('#').next().unwrap_or_default().split_whitespace();
        let Some(written) = words.next() else { continue };
        let address = written.split('%').next().unwrap_or(written);
        let address: IpAddr = address
            .parse()
            .map_err(|_| InventoryError::new(&place, format!("{written:?} is not an IP address")))?;
        if !is_reachable(address) {
            continue;
        }
        let Some(name) = words.next() else {
            return Err(InventoryError::new(place, format!("{address} has no name")));
        };
        let id = name.split('.').next().unwrap_or(name).to_ascii_lowercase();
        // A second line with an address has further names of the same machine.
        let Some(at) = owners.get(&address).or(positions.get(&id)).copied() else {
            owners.insert(address, instances.len());
            positions.insert(id.clone(), instances.len());
            instances.push(RawInstance {
                agent_id: Some(id.clone()),
                id,
                index: None,
                az: None,
                networks: BTreeMap::from([(network.clone(), address.into())]),
            });
            continue;
        };
        let addresses = instances[at].networks.entry(network.clone()).or_insert_with(|| address.into());
        if addresses.iter().any(|held| held != address && held.is_ipv4() == address.is_ipv4()) {
            let problem =
                format!("{id} has two addresses of one family, {addresses} and {address}; remove one");
            return Err(InventoryError::new(place, problem));
        }
        addresses.add(address);
        owners.insert(address, at);
    }
    let group = RawGroup { name: group, links: Vec::new(), instances };
    let deployment = RawDeployment { name: deployment, instance_groups: vec![group] };
    Ok(RawInventory { deployments: vec![deployment], ..RawInventory::default() })
}

/// Returns whether other machines can reach an address.
fn is_reachable(address: IpAddr) -> bool {
    let local = match address {
        IpAddr::V4(address) => address.is_link_local() || address.is_broadcast(),
        // fe00::0 is the "local network" of old hosts files.
        IpAddr::V6(address) => {
            address.is_unicast_link_local() || address.segments() == [0xfe00, 0, 0, 0, 0, 0, 0, 0]
        }
    };
    !(local || address.is_loopback() || address.is_multicast() || address.is_unspecified())
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

    #[test]
    fn usual_forms_of_lines_are_read() {
        let nodes = |text: &str| {
            let instances = read(text).unwrap().deployments.remove(0).instance_groups.remove(0).instances;
            let show = |one: &RawInstance| format!("{}={}", one.id, one.networks["default"]);
            instances.iter().map(show).collect::<Vec<_>>()
        };
        // Both families.
        let text = "127.0.0.1 localhost\n10.0.0.5 db.example.internal db\nfd00::5 db.example.internal db\n";
        assert_eq!(nodes(text), ["db=10.0.0.5 fd00::5"]);
        // An address on two lines.
        assert_eq!(
            nodes("10.0.0.7 cache\n10.0.0.7 cache.example.internal\n10.0.0.7 redis\n"),
            ["cache=10.0.0.7"]
        );
        // A zone index, and upper case.
        assert_eq!(nodes("fe80::1%lo0 localhost\n10.0.0.9 Web-01.Example.Internal\n"), ["web-01=10.0.0.9"]);
        let error = read("10.0.0.1 a\n10.0.0.2 A\n").unwrap_err().to_string();
        assert_eq!(error, "line 2: a has two addresses of one family, 10.0.0.1 and 10.0.0.2; remove one");
    }
}
