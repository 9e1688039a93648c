//! The interface and userspace give the same answers: every published name is queried on both
//! paths. The BPF program answers UDP, userspace always answers TCP.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use anyhow::Result;
use bosh_dns_xdp_benches::{fleet::Fleet, foundation::Foundation};
use dns_core::name::Name;
use hickory_proto::rr::RecordType;
use serde_json::json;
use whole_system_tests::{
    client,
    metrics::{Metrics, wait_for_fast_path},
    namespace::Namespace,
    requirements,
    server::{self, Server},
};

/// Address of the server, in a separate namespace.
const ADDRESS: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 53);

#[test]
fn paths_agree_on_generated_foundation() {
    both_paths_agree(&Foundation::generate(500).unwrap()).unwrap();
}

#[test]
fn paths_agree_on_aliases() {
    let fleet = Fleet::generate(900, 7);
    let foundation =
        Foundation::parse(fleet.records_json(), Some(fleet.cell_aliases_json())).unwrap();
    both_paths_agree(&foundation).unwrap();
}

/// Starts a server with this foundation in a separate namespace; `None` if that is impossible here.
fn start(foundation: &Foundation) -> Result<Option<(Namespace, Server)>> {
    if !requirements::namespaces() || !requirements::bpf() {
        return Ok(None);
    }
    let namespace = Namespace::new("agree")?;
    let folder = server::folder(&foundation.records, foundation.aliases.as_deref())?;
    let extra = json!({"metrics": {"enabled": true}, "xdp": {"interfaces": ["lo"]}});
    let server = Server::start(Some(&namespace), folder, ADDRESS, &extra)?;
    wait_for_fast_path(&namespace)?;
    Ok(Some((namespace, server)))
}

/// Queries both paths for A and AAAA of every published name and compares the answers.
fn both_paths_agree(foundation: &Foundation) -> Result<()> {
    let Some((namespace, _server)) = start(foundation)? else {
        return Ok(());
    };
    let before = Metrics::read(&namespace)?;
    let asked = namespace.run(|| -> Result<u64> {
        let mut asked = 0;
        for name in foundation.names() {
            compare(&name)?;
            asked += 2;
        }
        Ok(asked)
    })??;
    let after = Metrics::read(&namespace)?;
    let by_interface = after.fast_path_replies() - before.fast_path_replies();
    let probes = after.probes() - before.probes();
    println!("{asked} queries by UDP, {by_interface} of them answered by the interface");
    // Besides probes, only replies of more than a page are passed to userspace.
    assert!(
        (by_interface + probes) * 100 >= asked * 99,
        "only {by_interface} of {asked} were answered by the interface"
    );
    Ok(())
}

/// Queries both paths for A and AAAA of a name, and compares the answers.
fn compare(name: &Name) -> Result<()> {
    for record_type in [RecordType::A, RecordType::AAAA] {
        let query = client::query(&name.to_string(), record_type, Some(4096))?;
        let (fast, slow) = (
            client::ask(ADDRESS, &query)?,
            client::ask_tcp(ADDRESS, &query)?,
        );
        assert_eq!(
            fast.metadata.response_code, slow.metadata.response_code,
            "{name} {record_type}"
        );
        let [fast_addresses, slow_addresses] = [&fast, &slow].map(client::addresses);
        if fast.metadata.truncation {
            assert!(
                !fast_addresses.is_empty(),
                "{name} {record_type}: cut down to nothing"
            );
            assert!(
                fast_addresses
                    .iter()
                    .all(|address| slow_addresses.contains(address)),
                "{name} {record_type}: {fast_addresses:?} are not all among {slow_addresses:?}"
            );
        } else {
            assert_eq!(fast_addresses, slow_addresses, "{name} {record_type}");
        }
    }
    Ok(())
}
