//! Inventory files in YAML or JSON (a subset of YAML), one file or a folder of them; and `--nodes HOSTSFILE`, a
//! minimal inventory in the format of `/etc/hosts`.

use std::{
    collections::{BTreeMap, HashMap},
    fmt, fs,
    net::IpAddr,
    path::{Path, PathBuf},
};

use anyhow::{Context, anyhow, bail, ensure};
use dns_kit::files::{atomic, bounded};
use serde::{
    Deserialize, Deserializer, Serialize, Serializer,
    de::{self, SeqAccess, Visitor},
};

use super::{Alias, InventoryError};

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RawInventory {
    #[serde(default)]
    pub domain: Option<String>,
    /// Whether `/etc/hosts` also gets names with the index.
    #[serde(default)]
    pub index_records: Option<bool>,
    /// Deployments; equal names in several files are merged.
    #[serde(default)]
    pub deployments: Vec<RawDeployment>,
}

impl RawInventory {
    pub(crate) fn instances(&self) -> impl Iterator<Item = &RawInstance> {
        self.deployments
            .iter()
            .flat_map(|deployment| &deployment.instance_groups)
            .flat_map(|group| &group.instances)
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RawDeployment {
    pub name: String,
    #[serde(default)]
    pub instance_groups: Vec<RawGroup>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RawGroup {
    pub name: String,
    #[serde(default)]
    pub links: Vec<RawLink>,
    /// Instances; their position is their default index.
    #[serde(default)]
    pub instances: Vec<RawInstance>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RawLink {
    /// Name of the link, unique in its group.
    pub name: String,
    #[serde(rename = "type")]
    pub kind: String,
    #[serde(default)]
    pub aliases: Vec<Alias>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RawInstance {
    pub id: String,
    /// Index of the instance; its position in the list by default.
    #[serde(default)]
    pub index: Option<u64>,
    #[serde(default)]
    pub az: Option<String>,
    #[serde(default)]
    pub agent_id: Option<String>,
    /// Addresses by network name.
    #[serde(default)]
    pub networks: BTreeMap<String, Addresses>,
}

/// Addresses of an instance on one network: usually one, or one of each family. Written as a text or a
/// list of texts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Addresses(Vec<IpAddr>);

impl From<IpAddr> for Addresses {
    fn from(address: IpAddr) -> Self {
        Self(vec![address])
    }
}

impl Addresses {
    /// Returns the addresses in the order of the file.
    pub(crate) fn iter(&self) -> impl Iterator<Item = IpAddr> {
        self.0.iter().copied()
    }

    /// Adds an address unless it is present.
    pub(crate) fn add(&mut self, address: IpAddr) {
        if !self.0.contains(&address) {
            self.0.push(address);
        }
    }

    /// Replaces the address of the same family, or the only one.
    pub(crate) fn replace(&mut self, address: IpAddr) {
        let same = self
            .0
            .iter()
            .position(|held| held.is_ipv4() == address.is_ipv4());
        match same {
            Some(at) => self.0[at] = address,
            // A machine that moves to the other family has left its old address.
            None if self.0.len() == 1 => self.0[0] = address,
            None => self.0.push(address),
        }
    }
}

impl fmt::Display for Addresses {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let texts: Vec<String> = self.iter().map(|address| address.to_string()).collect();
        out.write_str(&texts.join(" "))
    }
}

impl Serialize for Addresses {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match &self.0[..] {
            [only] => only.serialize(serializer),
            all => all.serialize(serializer),
        }
    }
}

impl<'de> Deserialize<'de> for Addresses {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct OneOrMore;
        impl<'de> Visitor<'de> for OneOrMore {
            type Value = Addresses;

            fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
                out.write_str("an IP address or a list of them")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Addresses, E> {
                let address: IpAddr = text
                    .parse()
                    .map_err(|_| E::custom(format_args!("{text:?} is not an IP address")))?;
                Ok(address.into())
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut texts: A) -> Result<Addresses, A::Error> {
                let mut all = Addresses(Vec::new());
                while let Some(address) = texts.next_element()? {
                    all.add(address);
                }
                if all.0.is_empty() {
                    Err(de::Error::invalid_length(0, &self))
                } else {
                    Ok(all)
                }
            }
        }
        deserializer.deserialize_any(OneOrMore)
    }
}

pub(crate) fn read(text: &[u8]) -> anyhow::Result<RawInventory> {
    let is_empty = text.iter().all(u8::is_ascii_whitespace);
    // An editor may truncate a file before it writes; that must not mean an empty fleet.
    ensure!(
        !is_empty,
        "the file is empty; an empty fleet is `deployments: []`"
    );
    // JSON is also YAML, but `serde_json` is several times as fast; mistakes are reported by the YAML parser,
    // which states their position.
    match serde_json::from_slice(text) {
        Ok(raw) => Ok(raw),
        Err(_) => serde_saphyr::from_slice(text).map_err(|error| anyhow!("{error}")),
    }
}

/// Reads a file, or all `*.yml`, `*.yaml` and `*.json` of a folder in order of their names;
/// deployments of the same name are merged.
pub(crate) fn load(path: &Path) -> anyhow::Result<RawInventory> {
    let mut all = RawInventory::default();
    for file in files(path)? {
        let text = bounded::read(&file).with_context(|| file.display().to_string())?;
        let read = read(&text).map_err(|problem| anyhow!("{}: {problem}", file.display()))?;
        let RawInventory {
            domain,
            index_records,
            deployments,
        } = read;
        // The order of the files must not decide about the names of the whole fleet.
        if all.domain.is_some() && domain.is_some() && all.domain != domain {
            bail!(
                "{}: another file has a different `domain`; set it once",
                file.display()
            );
        }
        all.domain = all.domain.or(domain);
        all.index_records = all.index_records.or(index_records);
        // Each file may have a part of a deployment.
        for deployment in deployments {
            match all
                .deployments
                .iter_mut()
                .find(|known| known.name == deployment.name)
            {
                Some(known) => known.instance_groups.extend(deployment.instance_groups),
                None => all.deployments.push(deployment),
            }
        }
    }
    Ok(all)
}

pub(crate) fn files(path: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let facts = fs::metadata(path).with_context(|| path.display().to_string())?;
    if !facts.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let mut found = atomic::read_folder(path).with_context(|| path.display().to_string())?;
    found.retain(|file| {
        let extension = file.extension().and_then(|extension| extension.to_str());
        matches!(extension, Some("yml" | "yaml" | "json"))
    });
    ensure!(
        !found.is_empty(),
        "{}: the folder has no *.yml, *.yaml or *.json",
        path.display()
    );
    Ok(found)
}

/// Deployment, instance group and network of all nodes.
const NAMES: [&str; 3] = ["fleet", "node", "default"];

/// Parses lines of the form `ADDRESS NAME...`; the first label of the first name, in lower case, is the
/// id of the instance and of its agent. Lines with the same name or address describe one instance.
/// Addresses that other machines cannot reach, such as loopback, multicast and link-local ones with
/// or without a zone index, are skipped: every hosts file has them.
pub(crate) fn read_nodes(text: &str) -> Result<RawInventory, InventoryError> {
    let [deployment, group, network] = NAMES.map(str::to_owned);
    let mut instances: Vec<RawInstance> = Vec::new();
    let mut owners: HashMap<IpAddr, usize> = HashMap::new();
    let mut positions: HashMap<String, usize> = HashMap::new();
    for (number, line) in text.lines().enumerate() {
        let place = format!("line {}", number + 1);
        let mut words = line
            .split('#')
            .next()
            .unwrap_or_default()
            .split_whitespace();
        let Some(written) = words.next() else {
            continue;
        };
        // A zone index (`fe80::1%eth0`, RFC 4007) means nothing on another machine.
        let address = written.split('%').next().unwrap_or(written);
        let address: IpAddr = address.parse().map_err(|_| {
            InventoryError::new(&place, format!("{written:?} is not an IP address"))
        })?;
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
        let network = instances[at].networks.entry(network.clone());
        let addresses = network.or_insert_with(|| address.into());
        for held in addresses.iter() {
            // Which of the two other machines should use cannot be known.
            if held != address && held.is_ipv4() == address.is_ipv4() {
                let problem = format!(
                    "{id} has two addresses of one family, {addresses} and {address}; remove one"
                );
                return Err(InventoryError::new(place, problem));
            }
        }
        addresses.add(address);
        owners.insert(address, at);
    }
    Ok(of_one_group(deployment, group, instances))
}

fn of_one_group(deployment: String, group: String, instances: Vec<RawInstance>) -> RawInventory {
    let group = RawGroup {
        name: group,
        links: Vec::new(),
        instances,
    };
    let deployment = RawDeployment {
        name: deployment,
        instance_groups: vec![group],
    };
    RawInventory {
        deployments: vec![deployment],
        ..RawInventory::default()
    }
}

fn is_reachable(address: IpAddr) -> bool {
    let local = match address {
        // The hosts file of macOS has 255.255.255.255 as `broadcasthost`.
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
    fn yaml_equals_json() {
        let yaml = "deployments:\n- name: d\n  instance_groups:\n  - name: g\n    instances:\n    - {id: a, networks: {n: 10.0.0.1}}\n";
        let json = r#"{"deployments":[{"name":"d","instance_groups":[{"name":"g","instances":[{"id":"a","networks":{"n":"10.0.0.1"}}]}]}]}"#;
        assert_eq!(
            read(yaml.as_bytes()).unwrap(),
            read(json.as_bytes()).unwrap()
        );
    }

    #[test]
    fn mistakes_have_a_place() {
        let error = read(b"deployments:\n- name: d\n  instance_group: []\n")
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("instance_group") && error.contains('3'),
            "{error}"
        );
        assert!(read(b" \n").is_err());
    }

    #[test]
    fn a_folder_is_read_in_the_order_of_names() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(folder.path().join(name), text).unwrap();
        write(
            "b.yml",
            "deployments: [{name: d, instance_groups: [{name: two}]}]",
        );
        write(
            "a.json",
            r#"{"domain": "x", "deployments": [{"name": "d", "instance_groups": [{"name": "one"}]}]}"#,
        );
        write("note.txt", "not read");
        let raw = load(folder.path()).unwrap();
        let groups: Vec<_> = raw.deployments[0]
            .instance_groups
            .iter()
            .map(|group| group.name.as_str())
            .collect();
        assert_eq!((raw.deployments.len(), groups), (1, vec!["one", "two"]));
        write("c.yml", "domain: y");
        assert!(
            load(folder.path())
                .unwrap_err()
                .to_string()
                .contains("c.yml")
        );
    }

    #[test]
    fn a_hosts_file_is_an_inventory() {
        let raw = read_nodes(
            "127.0.0.1 localhost\n::1 ip6-localhost\n\n10.0.0.1 web1.example web1 # first\n10.0.0.2\tweb2\n",
        );
        let instances = &raw.unwrap().deployments[0].instance_groups[0].instances;
        let ids: Vec<_> = instances
            .iter()
            .map(|instance| instance.id.as_str())
            .collect();
        assert_eq!(ids, ["web1", "web2"]);
        assert_eq!(
            read_nodes("10.0.0.1 a\nten b\n").unwrap_err().to_string(),
            "line 2: \"ten\" is not an IP address"
        );
    }

    #[test]
    fn usual_forms_of_lines_are_read() {
        let nodes = |text: &str| {
            let instances = read_nodes(text)
                .unwrap()
                .deployments
                .remove(0)
                .instance_groups
                .remove(0)
                .instances;
            instances
                .iter()
                .map(|one: &RawInstance| format!("{}={}", one.id, one.networks["default"]))
                .collect::<Vec<_>>()
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
        assert_eq!(
            nodes("fe80::1%lo0 localhost\n10.0.0.9 Web-01.Example.Internal\n"),
            ["web-01=10.0.0.9"]
        );
        let error = read_nodes("10.0.0.1 a\n10.0.0.2 A\n")
            .unwrap_err()
            .to_string();
        assert_eq!(
            error,
            "line 2: a has two addresses of one family, 10.0.0.1 and 10.0.0.2; remove one"
        );
    }

    #[test]
    fn addresses_of_one_machine_reach_nobody() {
        for (address, expected) in [
            ("192.0.2.1", true),
            ("169.254.1.1", false),
            ("255.255.255.255", false),
            ("127.0.0.1", false),
            ("224.0.0.1", false),
            ("0.0.0.0", false),
            ("2001:db8::1", true),
            ("fe80::1", false),
            ("fe00::", false),
            ("fe00::1", true),
            ("::1", false),
            ("ff02::1", false),
            ("::", false),
        ] {
            assert_eq!(
                is_reachable(address.parse().unwrap()),
                expected,
                "{address}"
            );
        }
    }

    #[test]
    fn addresses_are_text_or_list() {
        let addresses = |text: &str| serde_json::from_str::<Addresses>(text);
        for (text, shown, written) in [
            (r#""10.0.0.1""#, "10.0.0.1", r#""10.0.0.1""#),
            (r#"["10.0.0.1"]"#, "10.0.0.1", r#""10.0.0.1""#),
            (
                r#"["10.0.0.1","fd00::1"]"#,
                "10.0.0.1 fd00::1",
                r#"["10.0.0.1","fd00::1"]"#,
            ),
            (
                r#"["fd00::1","10.0.0.1","fd00::1"]"#,
                "fd00::1 10.0.0.1",
                r#"["fd00::1","10.0.0.1"]"#,
            ),
        ] {
            let read = addresses(text).unwrap();
            assert_eq!(read.to_string(), shown);
            assert_eq!(serde_json::to_string(&read).unwrap(), written);
        }
        for (text, error) in [
            (r#""x""#, "\"x\" is not an IP address at line 1 column 3"),
            (
                "[]",
                "invalid length 0, expected an IP address or a list of them at line 1 column 2",
            ),
            (
                "7",
                "invalid type: integer `7`, expected an IP address or a list of them at line 1 column 1",
            ),
        ] {
            assert_eq!(addresses(text).unwrap_err().to_string(), error);
        }
        for (before, address, after) in [
            (r#""10.0.0.1""#, "10.0.0.2", "10.0.0.2"),
            // A machine that moves to the other family.
            (r#""10.0.0.1""#, "fd00::2", "fd00::2"),
            (r#"["10.0.0.1","fd00::1"]"#, "fd00::2", "10.0.0.1 fd00::2"),
            (r#"["10.0.0.1","fd00::1"]"#, "10.0.0.2", "10.0.0.2 fd00::1"),
            (
                r#"["10.0.0.1","10.0.0.3"]"#,
                "fd00::2",
                "10.0.0.1 10.0.0.3 fd00::2",
            ),
        ] {
            let mut held = addresses(before).unwrap();
            held.replace(address.parse().unwrap());
            assert_eq!(held.to_string(), after, "{before} {address}");
        }
    }

    #[test]
    fn settings_may_be_in_any_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path();
        let empty = load(path).unwrap_err().to_string();
        assert_eq!(
            empty,
            format!(
                "{}: the folder has no *.yml, *.yaml or *.json",
                path.display()
            )
        );
        let write = |name: &str, text: &str| fs::write(path.join(name), text).unwrap();
        write("a.yaml", "deployments: []");
        write("b.json", r#"{"domain": "x", "index_records": true}"#);
        write(
            "c.yml",
            "domain: x\nindex_records: false\ndeployments: [{name: d}]",
        );
        let loaded = load(path).unwrap();
        assert_eq!(
            (loaded.domain.as_deref(), loaded.index_records),
            (Some("x"), Some(true))
        );
        assert_eq!(loaded.deployments.len(), 1);
        assert_eq!(files(&path.join("a.yaml")).unwrap(), [path.join("a.yaml")]);
        write("d.yml", "domain: y");
        assert_eq!(
            load(path).unwrap_err().to_string(),
            format!(
                "{}: another file has a different `domain`; set it once",
                path.join("d.yml").display()
            )
        );
        write("d.yml", "");
        assert_eq!(
            load(path).unwrap_err().to_string(),
            format!(
                "{}: the file is empty; an empty fleet is `deployments: []`",
                path.join("d.yml").display()
            )
        );
        let none = path.join("none");
        assert_eq!(
            format!("{:#}", load(&none).unwrap_err()),
            format!("{}: No such file or directory (os error 2)", none.display())
        );
        assert_eq!(
            read_nodes("10.0.0.1 # web").unwrap_err().to_string(),
            "line 1: 10.0.0.1 has no name"
        );
    }
}
