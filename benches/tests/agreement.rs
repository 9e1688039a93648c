//! The interface and userspace give the same answers: every published name is
//! asked of both. UDP is answered by the BPF program, TCP always by userspace.

use std::net::{Ipv4Addr, SocketAddr};

use anyhow::Result;
use bosh_dns_xdp_benches::foundation::Foundation;
use hickory_proto::rr::RecordType;
use serde_json::json;
use whole_system_tests::{
    client,
    metrics::{Metrics, wait_for_fast_path},
    namespace::Namespace,
    requirements,
    server::{self, Server},
    shared,
};

/// Where the server listens, in a namespace of its own.
const ADDRESS: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 53);

#[test]
fn both_paths_agree_on_a_generated_foundation() {
    both_paths_agree(&Foundation::generate(500).unwrap()).unwrap();
}

#[test]
fn both_paths_agree_on_a_real_foundation() {
    let Some(folder) = shared::prodlike() else { return };
    let aliases = folder.join("aliases.json");
    both_paths_agree(&Foundation::read(&folder.join("records.json"), Some(&aliases)).unwrap()).unwrap();
}

/// Asks both paths for A and AAAA of every published name and compares what they say.
fn both_paths_agree(foundation: &Foundation) -> Result<()> {
    if !requirements::namespaces() || !requirements::bpf() {
        return Ok(());
    }
    let namespace = Namespace::new("agree")?;
    let folder = server::folder(&foundation.records, foundation.aliases.as_deref())?;
    let extra = json!({"metrics": {"enabled": true}, "xdp": {"interfaces": ["lo"]}});
    let _server = Server::start(Some(&namespace), folder, ADDRESS, &extra)?;
    wait_for_fast_path(&namespace)?;
    let before = Metrics::read(&namespace)?;
    let asked = namespace.run(|| -> Result<u64> {
        let mut asked = 0;
        for name in foundation.names() {
            for record_type in [RecordType::A, RecordType::AAAA] {
                let query = client::query(&name.to_string(), record_type, Some(4096))?;
                let (fast, slow) = (client::ask(ADDRESS, &query)?, client::ask_tcp(ADDRESS, &query)?);
                assert_eq!(fast.metadata.response_code, slow.metadata.response_code, "{name} {record_type}");
                let [fast_addresses, slow_addresses] = [&fast, &slow].map(client::addresses);
                if fast.metadata.truncation {
                    assert!(!fast_addresses.is_empty(), "{name} {record_type}: cut down to nothing");
                    assert!(
                        fast_addresses.iter().all(|address| slow_addresses.contains(address)),
                        "{name} {record_type}: {fast_addresses:?} are not all among {slow_addresses:?}"
                    );
                } else {
                    assert_eq!(fast_addresses, slow_addresses, "{name} {record_type}");
                }
                asked += 1;
            }
        }
        Ok(asked)
    })??;
    let by_interface = Metrics::read(&namespace)?.fast_path_replies() - before.fast_path_replies();
    println!("{asked} queries by UDP, {by_interface} of them answered by the interface");
    // A reply of more than a page goes up; nothing else does.
    assert!(
        by_interface * 100 >= asked * 99,
        "only {by_interface} of {asked} were answered by the interface"
    );
    Ok(())
}
