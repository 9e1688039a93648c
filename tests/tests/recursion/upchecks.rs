//! Up-check names, and the server's self-checks.

use std::net::IpAddr;

use anyhow::{Context, Result, ensure};
use hickory_proto::{op::ResponseCode, rr::RecordType};
use serde_json::json;
use whole_system_tests::{client, namespace::Namespace, requires};

use super::{
    lab::{Lab, OURS, ensure_code, loopback},
    scripted::Scripted,
};

#[test]
fn upcheck_names_precede_records() -> Result<()> {
    requires!(namespaces);
    let namespace = Namespace::new("upcheck")?;
    let recursor = Scripted::answering(&namespace, loopback(10), [192, 0, 2, 1].into())?;
    let settings = json!({
        "upcheck_domains": ["upcheck.bosh-dns.", "Health.Test"],
        "handlers": [{"domain": "health.test", "source": {"type": "deny"}, "cache": {"enabled": false}}],
    });
    let lab = Lab::start(&namespace, &[loopback(10)], &settings)?;
    let (v4, v6): (IpAddr, IpAddr) = ("127.0.0.1".parse()?, "::1".parse()?);
    for name in ["upcheck.bosh-dns.", "health.test.", "HEALTH.test."] {
        for (record_type, expected) in [
            (RecordType::A, vec![v4]),
            (RecordType::AAAA, vec![v6]),
            (RecordType::TXT, vec![]),
        ] {
            let reply = lab.ask_for(name, record_type)?;
            ensure_code(&reply, ResponseCode::NoError)?;
            ensure!(client::addresses(&reply) == expected, "{reply}");
        }
    }
    ensure!(recursor.count() == 0, "an up-check was forwarded");
    Ok(())
}

#[test]
fn failed_self_check_ends_server() -> Result<()> {
    requires!(namespaces);
    let namespace = Namespace::new("ends")?;
    // A name that does not exist, so that the self-check gets no address.
    let settings = json!({
        "timeout": "1s",
        // Otherwise the start would wait for metrics of a server that has ended.
        "metrics": {"enabled": false},
        "internal_upcheck_domain": {"enabled": true, "dns_query": "nowhere.q-g9.bosh."},
    });
    // The server answers other queries until it gives up, so it may be reachable at first.
    let started = Lab::start(&namespace, &[], &settings);
    let log = match started {
        Ok(mut lab) => {
            let status = lab
                .server
                .process()
                .wait(std::time::Duration::from_secs(120))?;
            ensure!(status.code() == Some(1), "{status}");
            lab.server.log()
        }
        Err(error) => format!("{error:#}"),
    };
    ensure!(
        log.contains("nowhere.q-g9.bosh."),
        "the reason is not in the log: {log}"
    );
    let silent = namespace.run(|| {
        client::ask(
            OURS,
            &client::query("upcheck.bosh-dns.", RecordType::A, None)?,
        )
    })?;
    silent.err().map(drop).context("it still answers")
}
