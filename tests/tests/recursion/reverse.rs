//! Reverse lookups: known addresses from the records, others from the recursors.

use anyhow::{Result, ensure};
use hickory_proto::{
    op::{Message, ResponseCode},
    rr::{Name, RData, Record, RecordType, rdata::PTR},
};
use serde_json::json;

use super::{
    lab::{Lab, ensure_code, loopback},
    scripted::Scripted,
};
use whole_system_tests::{namespace::Namespace, requires};

/// Name of 10.0.0.1 in the records.
const OURS: &str = "a.web.net.dep.bosh.";
/// The recursor's name for every address.
const THEIRS: &str = "host.test.";

/// Returns the targets of a reply's PTR records.
fn targets(reply: &Message) -> Vec<String> {
    let target = |record: &Record| match &record.data {
        RData::PTR(PTR(name)) => Some(name.to_string()),
        _ => None,
    };
    reply.answers.iter().filter_map(target).collect()
}

#[test]
fn unknown_addresses_go_to_recursors() -> Result<()> {
    requires!(namespaces);
    let namespace = Namespace::new("reverse")?;
    let recursor = Scripted::start(&namespace, loopback(10), |asked| {
        let mut reply = asked.reply(ResponseCode::NoError);
        let name = Name::from_ascii(THEIRS).expect("a name");
        reply.add_answer(Record::from_rdata(
            asked.message.queries[0].name().clone(),
            300,
            RData::PTR(PTR(name)),
        ));
        vec![reply.into()]
    })?;
    let lab = Lab::start(&namespace, &[loopback(10)], &json!({}))?;
    let known = lab.ask_for("1.0.0.10.IN-ADDR.arpa.", RecordType::PTR)?;
    ensure!(targets(&known) == [OURS], "{known}");
    ensure!(
        known.metadata.authoritative && !known.metadata.recursion_available,
        "{known}"
    );
    let other_type = lab.ask_for("1.0.0.10.in-addr.arpa.", RecordType::TXT)?;
    ensure_code(&other_type, ResponseCode::NoError)?;
    ensure!(other_type.answers.is_empty(), "{other_type}");
    ensure!(recursor.count() == 0, "a known address was forwarded");
    let nibbles = format!("{}ip6.arpa.", "1.".repeat(32));
    for (count, name) in ["2.0.0.10.in-addr.arpa.", &nibbles, "home.arpa."]
        .into_iter()
        .enumerate()
    {
        let other = lab.ask_for(name, RecordType::PTR)?;
        ensure!(targets(&other) == [THEIRS], "{other}");
        ensure!(recursor.count() == count + 1, "{name}");
    }
    Ok(())
}

#[test]
fn known_addresses_need_no_recursor() -> Result<()> {
    requires!(namespaces);
    let namespace = Namespace::new("alone")?;
    let lab = Lab::start(&namespace, &[], &json!({"disable_recursors": true}))?;
    ensure!(targets(&lab.ask_for("1.0.0.10.in-addr.arpa.", RecordType::PTR)?) == [OURS]);
    let unknown = lab.ask_for("2.0.0.10.in-addr.arpa.", RecordType::PTR)?;
    ensure_code(&unknown, ResponseCode::Refused)?;
    Ok(())
}
