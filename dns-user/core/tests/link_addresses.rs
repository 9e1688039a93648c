//! Link addresses as created by a director: cases in `link_addresses.json`.

use dns_core::link_address::{AddressGroup, Criteria, FirstLabel, LinkAddress, LinkStatus};
use serde_json::Value;

/// Returns the numbers in the list `member`.
fn numbers(case: &Value, member: &str) -> Vec<u64> {
    case[member]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(Value::as_u64)
        .collect()
}

/// Returns the strings in the list `member`.
fn texts(case: &Value, member: &str) -> Vec<String> {
    case[member]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
        .map(str::to_owned)
        .collect()
}

/// Builds the link address of a case.
fn address(case: &Value) -> LinkAddress {
    let text = |member: &str| case[member].as_str();
    let first = match text("instance") {
        Some(id) => FirstLabel::Instance(id.to_owned()),
        None => FirstLabel::Query(Criteria {
            zones: texts(case, "zones"),
            indexes: numbers(case, "indexes"),
            numbers: numbers(case, "numbers"),
            networks: numbers(case, "networks"),
            status: match text("status") {
                None => LinkStatus::Smart,
                Some("unhealthy") => LinkStatus::Unhealthy,
                Some("healthy") => LinkStatus::Healthy,
                Some("all") => LinkStatus::All,
                Some(other) => panic!("no status {other}"),
            },
            synchronous: case["synchronous"].as_bool(),
        }),
    };
    let group = match (text("group"), texts(case, "long").as_slice()) {
        (Some(id), []) => AddressGroup::Id(id.to_owned()),
        (None, [instance_group, network, deployment]) => AddressGroup::Names {
            instance_group: instance_group.clone(),
            network: network.clone(),
            deployment: deployment.clone(),
        },
        other => panic!("neither short nor long: {other:?}"),
    };
    let address = LinkAddress {
        group,
        first,
        domain: text("domain").unwrap_or("bosh").to_owned(),
    };
    match text("certificate") {
        None => address,
        Some("plain") => address.san(false),
        Some("wildcard") => address.san(true),
        Some(other) => panic!("no certificate {other}"),
    }
}

#[test]
fn names_match_the_director() {
    let cases: Vec<Value> = serde_json::from_str(include_str!("link_addresses.json")).unwrap();
    assert!(!cases.is_empty());
    for case in cases {
        assert_eq!(
            Some(address(&case).to_string().as_str()),
            case["name"].as_str(),
            "{}",
            case["why"]
        );
    }
}
