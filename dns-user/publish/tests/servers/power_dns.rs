//! Publishing to PowerDNS, which changes a zone's serial number only on request.

use std::{fs, process::Command};

use dns_publish::record::RecordType;
use tempfile::TempDir;
use test_support::free_address;

use crate::{
    name_server::{SECRET, engine, names, parameters, quiet, record, wish},
    process::{Server, run},
};

pub(crate) struct PowerDns {
    pub(crate) address: std::net::SocketAddr,
    folder: TempDir,
    _process: Server,
}

impl PowerDns {
    pub(crate) fn start(is_signed: bool) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let address = free_address();
        let path = folder.path().display().to_string();
        let configuration = format!(
            "launch=gsqlite3\ngsqlite3-database={path}/zones.db\ngsqlite3-dnssec=yes\nlocal-address={}\nlocal-port={}\n\
             dnsupdate=yes\nallow-dnsupdate-from=127.0.0.0/8\nallow-axfr-ips=127.0.0.0/8\nsocket-dir={path}\n\
             guardian=no\ndaemon=no\nsetuid=\nsetgid=\ncache-ttl=0\nquery-cache-ttl=0\nnegquery-cache-ttl=0\n",
            address.ip(),
            address.port()
        );
        fs::write(folder.path().join("pdns.conf"), configuration).unwrap();
        let schema =
            fs::read_to_string("/usr/share/doc/pdns-backend-sqlite3/schema.sqlite3.sql").unwrap();
        run(
            Command::new("sqlite3").arg(folder.path().join("zones.db")),
            &schema,
        );
        let util = |arguments: &[&str]| {
            run(
                Command::new("pdnsutil")
                    .arg(format!("--config-dir={path}"))
                    .args(arguments),
                "",
            )
        };
        util(&["create-zone", "example.org", "ns.example.org"]);
        util(&["import-tsig-key", "publisher", "hmac-sha256", SECRET]);
        for kind in ["TSIG-ALLOW-AXFR", "TSIG-ALLOW-DNSUPDATE"] {
            util(&["set-meta", "example.org", kind, "publisher"]);
        }
        util(&["set-meta", "example.org", "SOA-EDIT-DNSUPDATE", "SOA-EDIT"]);
        if is_signed {
            util(&["secure-zone", "example.org"]);
        }
        let mut command = Command::new("pdns_server");
        command.arg(format!("--config-dir={path}"));
        let process = Server::start(&mut command, &folder.path().join("log"), address);
        Self {
            address,
            folder,
            _process: process,
        }
    }

    fn sql(&self, statement: &str) -> String {
        run(
            Command::new("sqlite3").arg(self.folder.path().join("zones.db")),
            statement,
        )
    }
}

#[tokio::test]
async fn power_dns_is_published_without_serial_numbers() {
    let server = PowerDns::start(false);
    let parameters = parameters(server.address, "example.org", "hmac-sha256");
    let mut engine = engine(
        dns_publish::provider::rfc2136::Rfc2136Settings::from_parameters(&parameters).unwrap(),
    );
    let report = engine.reconcile(&names(20), None, &quiet).await.unwrap();
    assert!(report.is_complete() && report.applied() == 20, "{report:?}");
    assert_eq!(
        engine
            .reconcile(&names(20), None, &quiet)
            .await
            .unwrap()
            .applied(),
        0
    );
    // Drift without another serial number is seen and repaired.
    let soa = "select content from records where type = 'SOA';";
    let serial = server.sql(soa);
    server.sql(
        "update records set content = '203.0.113.1' where name = 'n3.example.org' and type = 'A';",
    );
    assert_eq!(server.sql(soa), serial);
    let report = engine.reconcile(&names(20), None, &quiet).await.unwrap();
    assert!(report.is_complete() && report.applied() == 1, "{report:?}");
    let alias = record("n4.example.org", RecordType::CNAME, "n5.example.org");
    let mut changed = names(20);
    changed.records[4] = alias;
    let report = engine.reconcile(&changed, None, &quiet).await.unwrap();
    assert!(report.is_complete() && report.applied() == 1, "{report:?}");
    let report = engine.reconcile(&wish([]), Some(20), &quiet).await.unwrap();
    assert!(report.is_complete() && report.applied() == 20, "{report:?}");
    assert_eq!(
        server
            .sql("select count(*) from records where type in ('A', 'CNAME', 'TXT');")
            .trim(),
        "0"
    );
}
