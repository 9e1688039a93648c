//! The issuer's writes in a simulated day.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
};

use serde_json::json;

use super::*;
use crate::{
    authority::{parse_all, validity},
    certificate::signing_request,
    schedule::{RenewalWindow, Share},
};

const MEMBERS: u32 = 1000;

const HOUR: Duration = Duration::from_secs(3600);

const ROLES: [Option<&str>; 3] = [None, Some("health.bosh-dns"), Some("api.bosh-dns")];

fn options(folder: &Path) -> IssuerOptions {
    let key = rcgen::KeyPair::generate().unwrap();
    let mut params = rcgen::CertificateParams::default();
    params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    params.key_usages = vec![
        rcgen::KeyUsagePurpose::KeyCertSign,
        rcgen::KeyUsagePurpose::CrlSign,
    ];
    fs::write(
        folder.join("ca.crt"),
        params.self_signed(&key).unwrap().pem(),
    )
    .unwrap();
    fs::write(folder.join("ca.key"), key.serialize_pem()).unwrap();
    let rows: Vec<_> = (0..MEMBERS)
        .map(|number| {
            json!([
                id(number),
                "web",
                "default",
                "app",
                format!("10.0.{}.{}", number / 250, number % 250),
                "bosh"
            ])
        })
        .collect();
    let keys = json!([
        "id",
        "instance_group",
        "network",
        "deployment",
        "ip",
        "domain"
    ]);
    let records = json!({"record_keys": keys, "record_infos": rows}).to_string();
    fs::write(folder.join("records.json"), records).unwrap();
    IssuerOptions {
        state: folder.join("state"),
        ca: Some(folder.join("ca.crt")),
        ca_key: Some(folder.join("ca.key")),
        records: folder.join("records.json"),
        listen: SocketAddr::from(([127, 0, 0, 1], 0)),
        name: "issuer".to_owned(),
        roles: ROLES.into_iter().flatten().map(str::to_owned).collect(),
        validity: 24 * HOUR,
        backdate: Duration::from_secs(300),
        metrics: None,
    }
}

fn id(number: u32) -> String {
    format!("6ca2be4f-7f27-4c4a-9f1c-{number:012}")
}

fn written() -> u64 {
    let text = fs::read_to_string("/proc/thread-self/io").unwrap();
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("wchar: "))
        .unwrap();
    line.parse().unwrap()
}

/// The agents of a fleet, each with three pairs that it renews.
struct Agents {
    service: IssuerService,
    request: String,
    /// Due pairs: instance, and position in [`ROLES`].
    due: BTreeMap<SystemTime, Vec<(u32, usize)>>,
    ends: BTreeMap<u32, u64>,
    renewals: u32,
}

impl Agents {
    /// Requests a pair and reports it.
    fn renew(&mut self, number: u32, role: usize, now: SystemTime) {
        let request = PairRequest {
            instance: id(number),
            role: ROLES[role].map(str::to_owned),
            names: Vec::new(),
            addresses: None,
            request: self.request.clone(),
        };
        let peer = Peer(Some(id(number)));
        let reply = self
            .service
            .pair(&peer, None, &request, now)
            .map_err(|refusal| refusal.error)
            .unwrap();
        let ders = certificates(reply.certificate.as_bytes()).unwrap();
        let validity = validity(&parse_all(&ders).unwrap()[0]);
        let window = RenewalWindow::of(validity.length());
        let share = Share::of(&format!("{}/{role}", id(number)));
        let due = validity.not_before + window.moment(share);
        self.due.entry(due).or_default().push((number, role));
        let end = self.ends.entry(number).or_default();
        *end = seconds(validity.not_after).max(*end);
        self.renewals += 1;
        self.report(number, now);
    }

    fn report(&self, number: u32, now: SystemTime) {
        let issuers = BTreeSet::from([self.service.shared.lock().authority.fingerprint.clone()]);
        let report = Report {
            generation: 1,
            issuers,
            not_after: self.ends[&number],
        };
        let reply = self.service.report(&Peer(Some(id(number))), report, now);
        assert_eq!(
            reply.map_err(|refusal| refusal.error).unwrap().generation,
            1
        );
    }
}

#[test]
fn quiet_day_writes_little() {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let start = SystemTime::now();
    let key = PrivateKey::generate(KeyType::P256).unwrap();
    let mut agents = Agents {
        service: IssuerService::open(options(folder.path()), start).unwrap(),
        request: STANDARD.encode(signing_request(&key, "agent").unwrap()),
        due: BTreeMap::new(),
        ends: BTreeMap::new(),
        renewals: 0,
    };
    // The members join over a day, as machines do.
    for number in 0..MEMBERS {
        let now = start + 23 * HOUR * number / MEMBERS;
        (0..ROLES.len()).for_each(|role| agents.renew(number, role, now));
        agents.service.follow(now);
    }
    let begun = start + 23 * HOUR;
    let (before, renewed) = (written(), agents.renewals);
    for tick in 0..24 * 360 {
        let now = begun + Duration::from_secs(10) * tick;
        while let Some(due) = agents.due.first_entry().filter(|due| *due.key() <= now) {
            due.remove()
                .into_iter()
                .for_each(|(number, role)| agents.renew(number, role, now));
        }
        // Each member reports; the issuer reads its files.
        agents.report(tick % MEMBERS, now);
        agents.service.follow(now);
    }
    let (bytes, renewed) = (written() - before, agents.renewals - renewed);
    println!("{bytes} bytes for {renewed} renewals of {MEMBERS} members in a day");
    assert!(renewed >= 3 * MEMBERS);
    assert!((50_000..300_000).contains(&bytes), "{bytes} bytes");

    // A restarted issuer and `rotate-ca` wait for each member at least until its last pair ends.
    let saved = agents.service.state.members().unwrap();
    assert_eq!(saved.len(), agents.ends.len());
    for (number, end) in agents.ends {
        let saved = saved[&id(number)].not_after;
        assert_eq!(saved, end, "{number}");
    }
}
