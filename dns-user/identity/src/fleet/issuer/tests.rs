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
    tests::{START, TestCa, at, replace},
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
    write_records(folder, 0..MEMBERS);
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

/// Writes records of these instances.
fn write_records(folder: &Path, numbers: std::ops::Range<u32>) {
    let rows: Vec<_> = numbers
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
    replace(&folder.join("records.json"), &records);
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
        let report = Member {
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

//----------- Calls -----------------------------------------------------------

/// Status, reason and text of a refusal; `None` if there is none.
fn told<T>(result: Result<T, Refusal>) -> Option<(u16, &'static str, String)> {
    let refusal = result.err()?;
    Some((refusal.status.as_u16(), refusal.reason, refusal.error))
}

fn request(number: u32) -> PairRequest {
    let key = PrivateKey::generate(KeyType::P256).unwrap();
    PairRequest {
        instance: id(number),
        role: None,
        names: Vec::new(),
        addresses: None,
        request: STANDARD.encode(signing_request(&key, "agent").unwrap()),
    }
}

fn peer(number: u32) -> Peer {
    Peer(Some(id(number)))
}

fn service(folder: &Path) -> IssuerService {
    IssuerService::open(options(folder), at(START)).unwrap()
}

#[test]
fn calls_need_a_proof() {
    let own = request(1);
    let role = PairRequest {
        role: Some("health.bosh-dns".to_owned()),
        ..own.clone()
    };
    let (one, two) = (id(1), id(2));
    let foreign = format!("the certificate of {two:?} does not permit requests for {one:?}");
    let only_own = "a bootstrap token permits only the instance's own certificate".to_owned();
    let none = "present the instance's certificate, or a bootstrap token".to_owned();
    for (peer, token, request, expected) in [
        (peer(1), None, &own, None),
        (peer(1), None, &role, None),
        (peer(1), Some("t"), &role, None),
        (peer(2), Some("t"), &own, None),
        (Peer(None), Some("t"), &own, None),
        (
            peer(2),
            None,
            &own,
            Some((403, "identity", foreign.clone())),
        ),
        (peer(2), None, &role, Some((403, "identity", foreign))),
        (Peer(None), None, &own, Some((401, "identity", none))),
        (
            peer(2),
            Some("t"),
            &role,
            Some((403, "identity", only_own.clone())),
        ),
        (
            Peer(None),
            Some("t"),
            &role,
            Some((403, "identity", only_own)),
        ),
    ] {
        let found = told(check_proof(&peer, token, request));
        assert_eq!(found, expected, "{peer:?} {token:?}");
    }
    let mut headers = HeaderMap::new();
    assert_eq!(bearer_token(&headers), None);
    for (value, token) in [
        (&b"Bearer abc"[..], Some("abc")),
        (b"Basic abc", None),
        (b"Bearer \xff", None),
    ] {
        let value = value.try_into().unwrap();
        headers.insert(header::AUTHORIZATION, value);
        assert_eq!(bearer_token(&headers), token);
    }
}

#[test]
fn pair_costs_a_token() {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let service = service(folder.path());
    let now = at(START);
    let token = service.state.create_token(&id(1), now, HOUR).unwrap();
    let asked = request(1);
    let pair = |token: Option<&str>, request: &PairRequest, now| {
        service.pair(&Peer(None), token, request, now)
    };
    let refused =
        |token: &str, request: &PairRequest, now| told(pair(Some(token), request, now)).unwrap();
    assert!(service.state.knows_token(&token) && !service.state.knows_token("x"));
    // A refused request costs no token.
    let unknown = "the bootstrap token is unknown or already used; create a new one";
    assert_eq!(
        refused("x", &asked, now),
        (403, "token", unknown.to_owned())
    );
    assert_eq!(
        refused(&token, &request(2), now),
        (
            403,
            "token",
            "the bootstrap token belongs to another instance; create one for this instance"
                .to_owned()
        )
    );
    assert_eq!(
        refused(&token, &asked, now + HOUR),
        (
            403,
            "token",
            "the bootstrap token expired; create a new one".to_owned()
        )
    );
    let damaged = PairRequest {
        request: "x".to_owned(),
        ..asked.clone()
    };
    assert_eq!(
        refused(&token, &damaged, now),
        (
            400,
            "request",
            "the signing request is damaged or not signed with its key".to_owned()
        )
    );
    let foreign = PairRequest {
        names: vec!["x.example".to_owned()],
        ..asked.clone()
    };
    let text = format!(
        "\"x.example\" does not belong to instance {:?} in records.json; request its own names",
        id(1)
    );
    assert_eq!(refused(&token, &foreign, now), (403, "names", text));
    // 4096, the end of the CA.
    assert_eq!(
        refused(&token, &asked, at(67_090_118_401)),
        (
            503,
            "authority",
            "the CA expired; rotate to a new one".to_owned()
        )
    );
    assert_eq!(service.shared.lock().issued, 0);
    assert!(service.shared.lock().members.is_empty());

    let reply = pair(Some(&token), &asked, now).map_err(|refusal| refusal.error);
    let PairReply {
        certificate,
        desired,
    } = reply.unwrap();
    let ca = fs::read_to_string(folder.path().join("ca.crt")).unwrap();
    let ca = ca.replace("\r\n", "\n");
    let fingerprint = service.shared.lock().trust.issuing.clone();
    assert_eq!(
        desired,
        DesiredTrust {
            generation: 1,
            bundle: ca.clone(),
            issuing: fingerprint.clone(),
            now: Some(START),
        }
    );
    assert!(certificate.ends_with(&ca));
    let parsed = parse_all(&certificates(certificate.as_bytes()).unwrap()).unwrap();
    assert_eq!(
        validity(&parsed[0]),
        Validity {
            not_before: at(START - 300),
            not_after: at(START + 86_400)
        }
    );
    let member = Member {
        generation: 0,
        issuers: BTreeSet::from([fingerprint]),
        not_after: START + 86_400,
    };
    let members = Members::from([(id(1), member)]);
    assert_eq!(service.shared.lock().members, members);
    assert_eq!(service.state.members().unwrap(), members);
    assert_eq!(service.shared.lock().issued, 1);
    assert_eq!(
        refused(&token, &asked, now),
        (403, "token", unknown.to_owned())
    );
    // With its own certificate, an instance keeps the token that it also sends.
    let token = service.state.create_token(&id(1), now, HOUR).unwrap();
    let earlier = at(START - 1000);
    assert_eq!(
        told(service.pair(&peer(1), Some(&token), &asked, earlier)),
        None
    );
    assert!(service.state.knows_token(&token));
    // The member's last pair counts.
    assert_eq!(service.shared.lock().members, members);
    assert_eq!(
        told(service.pair(&peer(2), Some(&token), &asked, at(START + 10))),
        None
    );
    assert!(!service.state.knows_token(&token));
    let member = service.shared.lock().members[&id(1)].clone();
    assert_eq!(member.not_after, START + 10 + 86_400);
    assert_eq!(service.shared.lock().issued, 3);
}

#[test]
fn reports_have_limits() {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let service = service(folder.path());
    let now = at(START);
    let ca = |number: usize| Fingerprint::of(&[u8::try_from(number).unwrap()]);
    let report = |count: usize, not_after| Member {
        generation: 7,
        issuers: (0..count).map(ca).collect(),
        not_after,
    };
    let answer = |peer: &Peer, report| told(service.report(peer, report, now));
    assert_eq!(
        answer(&Peer(None), report(1, START)),
        Some((
            401,
            "identity",
            "present the instance's certificate".to_owned()
        ))
    );
    let stranger = Peer(Some("stranger".to_owned()));
    let text = "no instance \"stranger\" in records.json; wait for the records, or correct the id";
    assert_eq!(
        answer(&stranger, report(1, START)),
        Some((403, "identity", text.to_owned()))
    );
    let text = "a report names at most 8 CAs by their SHA-256; update the agent".to_owned();
    let long = Some((400, "report", text));
    assert_eq!(answer(&peer(1), report(9, START)), long);
    let malformed = serde_json::from_value(json!("x")).unwrap();
    let mut wrong = report(1, START);
    wrong.issuers.insert(malformed);
    assert_eq!(answer(&peer(1), wrong), long);
    assert!(service.shared.lock().members.is_empty());
    let end = |number: u32| service.shared.lock().members[&id(number)].not_after;
    // No pair ends later than the last one issued, or one issued now.
    for (not_after, expected) in [
        (START + 86_401, START + 86_400),
        (START + 86_400, START + 86_400),
        (START, START),
    ] {
        assert_eq!(answer(&peer(1), report(8, not_after)), None);
        assert_eq!(end(1), expected);
    }
    assert_eq!(
        told(service.pair(&peer(1), None, &request(1), at(START + 500))),
        None
    );
    assert_eq!(answer(&peer(1), report(8, u64::MAX)), None);
    assert_eq!(end(1), START + 500 + 86_400);
    let member = service.state.members().unwrap()[&id(1)].clone();
    assert_eq!((member.generation, member.issuers.len()), (7, 8));
    let reply = service
        .report(&peer(1), report(8, START), now)
        .ok()
        .unwrap();
    assert_eq!((reply.generation, reply.now), (1, Some(START)));
}

#[tokio::test]
async fn refusals_are_counted_by_reason() {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let service = service(folder.path());
    for (status, reason) in [
        (StatusCode::FORBIDDEN, "names"),
        (StatusCode::UNAUTHORIZED, "identity"),
        (StatusCode::FORBIDDEN, "names"),
        (StatusCode::FORBIDDEN, "names"),
    ] {
        let response = service.refused(Refusal::new(status, reason, "why"));
        assert_eq!(response.status(), status);
        let body = axum::body::to_bytes(response.into_body(), 1000)
            .await
            .unwrap();
        assert_eq!(&*body, br#"{"error":"why"}"#);
    }
    let refused = BTreeMap::from([("identity", 1), ("names", 3)]);
    assert_eq!(service.shared.lock().refused, refused);
    // Each reason has had its line of this minute.
    let shared = service.shared.lock();
    assert_eq!(shared.logged.len(), 2);
    let mut lines = shared.logged.values();
    assert!(lines.all(|line| line.admit_per_minute().is_none()));
}

#[test]
fn state_is_shown_in_metrics() {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let service = service(folder.path());
    let now = seconds(SystemTime::now());
    let mut shared = service.shared.lock();
    shared.issued = 9;
    shared.refused.insert("names", 4);
    let issuing = shared.trust.issuing.clone();
    for (number, generation, not_after) in [
        (1, 1, now + 1000),
        (2, 0, now + 1000),
        (3, 0, now + 1000),
        (4, 0, now - 1000),
    ] {
        let member = Member {
            generation,
            issuers: BTreeSet::from([issuing.clone()]),
            not_after,
        };
        shared.members.insert(id(number), member);
    }
    drop(shared);
    let values = || {
        let mut values = Vec::new();
        for family in service.metrics() {
            let metric = &family.get_metric()[0];
            let value = metric.get_gauge().get_value() + metric.get_counter().get_value();
            let name = family.name().strip_prefix("bosh_dns_identity_").unwrap();
            values.push((name.to_owned(), value));
        }
        values
    };
    let expected = [
        ("members", 3.0),
        ("lagging", 2.0),
        ("trusted_cas", 1.0),
        ("ca_expiry_timestamp_seconds", 67_090_118_400.0),
        ("files_usable", 1.0),
        ("issued_total", 9.0),
        ("refused_total", 4.0),
    ];
    let expected = expected.map(|(name, value)| (name.to_owned(), value));
    assert_eq!(values(), expected);
    let problem = || Some("x".to_owned());
    for (problem, save_problem) in [(problem(), None), (None, problem())] {
        let mut shared = service.shared.lock();
        (shared.problem, shared.save_problem) = (problem, save_problem);
        drop(shared);
        assert!(values().contains(&("files_usable".to_owned(), 0.0)));
    }
}

#[test]
fn records_are_followed_without_trust() {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let service = service(folder.path());
    fs::write(folder.path().join("state/trust.json"), "{").unwrap();
    write_records(folder.path(), 0..MEMBERS + 1);
    service.follow(at(START));
    let problem = service.shared.lock().problem.clone().unwrap();
    assert!(problem.contains("trust.json: EOF"), "{problem}");
    let done = service.pair(&peer(MEMBERS), None, &request(MEMBERS), at(START));
    assert_eq!(told(done), None);
}

#[tokio::test]
async fn waiting_calls_are_limited() {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let service = Arc::new(service(folder.path()));
    let free = || service.calls.available_permits();
    let (release, held) = std::sync::mpsc::channel::<()>();
    let call = tokio::spawn(reply(service.clone(), move |_: &IssuerService| {
        // Ends when the other side is dropped.
        let _ = held.recv();
        Ok(())
    }));
    while free() == MAX_CONNECTIONS {
        tokio::task::yield_now().await;
    }
    // The client disconnects; the call still waits for the disk.
    call.abort();
    assert!(call.await.unwrap_err().is_cancelled());
    assert_eq!(free(), MAX_CONNECTIONS - 1);
    let others = service.calls.clone();
    let others = others.try_acquire_many_owned(MAX_CONNECTIONS as u32 - 1);
    let answer = |_: &IssuerService| Ok(());
    let refused = reply(service.clone(), answer).await;
    assert_eq!(refused.status(), StatusCode::SERVICE_UNAVAILABLE);
    drop((release, others));
    // Once the disk answers.
    let all = service.calls.acquire_many(MAX_CONNECTIONS as u32).await;
    drop(all);
    let answered = reply(service.clone(), answer).await;
    assert_eq!(answered.status(), StatusCode::OK);
}

#[test]
fn members_follow_the_records() {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let service = service(folder.path());
    service.follow(at(START));
    assert_eq!(service.shared.lock().problem, None);
    for number in 0..30 {
        let done = service.pair(&peer(number), None, &request(number), at(START));
        assert_eq!(told(done), None);
    }
    let count = || service.state.members().unwrap().len();
    write_records(folder.path(), 10..MEMBERS);
    service.follow(at(START + 1));
    assert_eq!(count(), 20);
    assert_eq!(service.shared.lock().problem, None);
    // Those of the former records may report no more.
    let report = Member {
        generation: 1,
        issuers: BTreeSet::new(),
        not_after: 0,
    };
    let gone = told(service.report(&peer(9), report.clone(), at(START)));
    assert_eq!(gone.unwrap().0, 403);
    write_records(folder.path(), 21..MEMBERS);
    service.follow(at(START + 2));
    assert_eq!(count(), 20);
    let held = format!(
        "{}: instances with certificates: 11 of 20 disappeared at once; they stay for 10 minutes, in which they can \
         return: if this is meant, run `bosh-dns-identity confirm-removals 11`",
        folder.path().join("records.json").display()
    );
    assert_eq!(service.shared.lock().problem.as_ref(), Some(&held));
    // Until then they keep their names.
    assert_eq!(told(service.report(&peer(20), report, at(START))), None);
    service.state.confirm_removals(11).unwrap();
    service.follow(at(START + 3));
    assert_eq!(count(), 9);
    assert_eq!(service.shared.lock().problem, None);
    assert_eq!(service.state.take_confirmation(), None);
    // Damaged records are reported, and the last good ones stay.
    replace(&folder.path().join("records.json"), "{");
    service.follow(at(START + 4));
    let problem = service.shared.lock().problem.clone().unwrap();
    let path = folder.path().join("records.json").display().to_string();
    assert!(problem.starts_with(&path), "{problem}");
    assert_eq!(
        told(service.pair(&peer(25), None, &request(25), at(START))),
        None
    );
}

#[test]
fn trust_and_own_certificate_stay_current() {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let service = service(folder.path());
    let tls = || Arc::as_ptr(&service.shared.lock().tls) as usize;
    let half = 12 * 3600;
    for (now, is_renewed) in [
        (START + half - 1, false),
        (START + half, true),
        (START + half, false),
        // By a clock that was set back, agents would find a certificate of the future.
        (START + half - 12 * 3600, false),
        (START + half - 12 * 3600 - 1, true),
    ] {
        let before = tls();
        service.follow(at(now));
        assert_eq!(tls() != before, is_renewed, "{now}");
    }
    let place = tempfile::tempdir_in("/dev/shm").unwrap();
    let next = TestCa::new("next");
    let imported = service
        .state
        .import(&next.write(place.path()), at(START))
        .unwrap();
    let trust = service.state.trust().unwrap().unwrap();
    let (_, both) = trust.next(&imported).unwrap();
    service.state.set_trust(&both).unwrap();
    service.follow(at(START));
    let desired = service.desired_trust(at(START + 5));
    assert_eq!((desired.generation, desired.now), (2, Some(START + 5)));
    assert_eq!(desired.issuing, trust.issuing);
    assert!(desired.bundle.ends_with(&next.chain));
    let (_, issuing) = both.next(&imported).unwrap();
    service.state.set_trust(&issuing).unwrap();
    service.follow(at(START));
    let done = service.pair(&peer(1), None, &request(1), at(START));
    let reply = done.map_err(|refusal| refusal.error).unwrap();
    assert!(reply.certificate.ends_with(&next.chain));
    assert_eq!(reply.desired.issuing, imported);
    let path = folder.path().join("state/trust.json");
    fs::rename(&path, path.with_extension("away")).unwrap();
    service.follow(at(START));
    assert_eq!(
        service.shared.lock().problem.as_deref(),
        Some("trust.json is missing; restore it from a backup")
    );
    fs::rename(path.with_extension("away"), &path).unwrap();
    service.follow(at(START));
    assert_eq!(service.shared.lock().problem, None);
}

#[test]
fn issuer_needs_a_ca_once() {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let without = || IssuerOptions {
        ca: None,
        ca_key: None,
        ..options(folder.path())
    };
    let failed = |options| {
        let opened = IssuerService::open(options, at(START));
        opened.err().unwrap().to_string()
    };
    assert_eq!(
        failed(without()),
        "no CA is installed; start once with --ca and --ca-key"
    );
    let first = service(folder.path());
    assert_eq!(
        failed(without()),
        format!(
            "{}: another issuer uses this folder; stop it, or choose another folder",
            folder.path().join("state").display()
        )
    );
    let facts = IssuerFacts {
        records: folder.path().join("records.json"),
    };
    assert_eq!(first.state.facts().unwrap(), Some(facts));
    let issuing = first.shared.lock().trust.issuing.clone();
    assert_eq!(
        told(first.pair(&peer(1), None, &request(1), at(START))),
        None
    );
    drop(first);
    // A later start finds CA and members.
    let second = IssuerService::open(without(), at(START)).unwrap();
    assert_eq!(second.shared.lock().trust, Trust::new(issuing));
    assert_eq!(second.shared.lock().members.len(), 1);
    drop(second);
    let lost = format!(
        "{}: trust.json is missing, but instances have certificates (1); restore it from a backup. Without one, begin \
         a new fleet: move this folder away, start the issuer with --ca and --ca-key, and give every machine a token \
         and this CA",
        folder.path().join("state").display()
    );
    fs::remove_file(folder.path().join("state/trust.json")).unwrap();
    assert_eq!(failed(options(folder.path())), lost);
    let opened = StateFolder::open(folder.path().join("state"));
    assert_eq!(opened.unwrap_err().to_string(), lost);
}

#[test]
fn full_disk_delays_new_members() {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let service = service(folder.path());
    assert_eq!(
        told(service.pair(&peer(1), None, &request(1), at(START))),
        None
    );
    // A folder in the way of the file.
    let path = folder.path().join("state/members.jsonl");
    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    let text = "the issuer cannot save its members; see its log".to_owned();
    assert_eq!(
        told(service.pair(&peer(2), None, &request(2), at(START))),
        Some((503, "authority", text))
    );
    assert_eq!(
        told(service.pair(&peer(1), None, &request(1), at(START + 9))),
        None
    );
    assert!(service.shared.lock().save_problem.is_some());
    assert!(!service.save());
    fs::remove_dir(&path).unwrap();
    assert!(service.save());
    assert_eq!(service.shared.lock().save_problem, None);
    let ends: Vec<u64> = service
        .state
        .members()
        .unwrap()
        .values()
        .map(|member| member.not_after - START)
        .collect();
    assert_eq!(ends, [86_409, 86_400]);
}

/// An issuer at an address of its own, with the clock of the machine.
pub(in crate::fleet) struct Served {
    service: Arc<IssuerService>,
    pub(in crate::fleet) address: SocketAddr,
    task: tokio::task::JoinHandle<()>,
}

impl Served {
    pub(in crate::fleet) async fn start(folder: &Path) -> Self {
        let service = Arc::new(IssuerService::open(options(folder), SystemTime::now()).unwrap());
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        Self {
            address: listener.local_addr().unwrap(),
            task: tokio::spawn(accept(listener, service.clone())),
            service,
        }
    }

    pub(in crate::fleet) async fn stop(self) {
        self.task.abort();
        // Its listener is closed then.
        assert!(self.task.await.is_err());
    }

    pub(in crate::fleet) fn id() -> String {
        id(1)
    }

    pub(in crate::fleet) fn token(&self) -> String {
        let token = self
            .service
            .state
            .create_token(&id(1), SystemTime::now(), HOUR);
        token.unwrap().to_string()
    }

    /// Takes the next step to a CA.
    pub(in crate::fleet) fn rotate(&self, files: &CaFiles) {
        let now = SystemTime::now();
        let target = self.service.state.import(files, now).unwrap();
        let trust = self.service.state.trust().unwrap().unwrap();
        let (_, next) = trust.next(&target).unwrap();
        self.service.state.set_trust(&next).unwrap();
        self.service.follow(now);
    }

    /// Returns what is known of the instance, except the end of its pairs.
    pub(in crate::fleet) fn member(&self) -> (u64, BTreeSet<Fingerprint>) {
        let member = self.service.shared.lock().members[&id(1)].clone();
        (member.generation, member.issuers)
    }

    /// Returns generation, bundle and issuing CA of the fleet.
    pub(in crate::fleet) fn desired(&self) -> DesiredTrust {
        self.service.desired_trust(SystemTime::now())
    }
}

#[tokio::test]
async fn calls_are_answered_over_tls() {
    use crate::{
        fleet::{Credentials, IssuerClient, Proof},
        folder::Pair,
    };

    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let served = Served::start(folder.path()).await;
    let client = IssuerClient {
        address: served.address.to_string(),
        name: "issuer".to_owned(),
    };
    let roots = fs::read_to_string(folder.path().join("ca.crt")).unwrap();
    let with = |proof| Credentials {
        proof,
        roots: roots.clone(),
    };
    let by_token = |token: &str| with(Proof::Token(token.to_owned().into()));
    let key = PrivateKey::generate(KeyType::P256).unwrap();
    let asked = PairRequest {
        request: STANDARD.encode(signing_request(&key, "agent").unwrap()),
        ..request(1)
    };
    let address = served.address;
    let refused = client
        .call::<PairReply>("/v1/pair", &asked, &by_token("x"))
        .await;
    assert_eq!(
        format!("{:#}", refused.unwrap_err()),
        format!(
            "issuer {address}: 403 Forbidden: the bootstrap token is unknown or already used; create a new one"
        )
    );
    let token = served.token();
    let reply: PairReply = client
        .call("/v1/pair", &asked, &by_token(&token))
        .await
        .unwrap();
    let pair = with(Proof::Pair(Pair {
        certificate: reply.certificate,
        key: key.to_pem().unwrap(),
    }));
    let report = Member {
        generation: 1,
        issuers: BTreeSet::new(),
        not_after: 0,
    };
    let desired: DesiredTrust = client.call("/v1/report", &report, &pair).await.unwrap();
    assert_eq!(desired.generation, 1);
    assert_eq!(served.member(), (1, BTreeSet::new()));
    let mut extended = serde_json::to_value(&report).unwrap();
    extended["generaton"] = json!(2);
    let refused = client
        .call::<DesiredTrust>("/v1/report", &extended, &pair)
        .await;
    assert_eq!(
        format!("{:#}", refused.unwrap_err()),
        format!("issuer {address}: 422 Unprocessable Entity: no reason given")
    );
    let unknown = client
        .call::<DesiredTrust>("/v1/none", &report, &pair)
        .await;
    assert_eq!(
        format!("{:#}", unknown.unwrap_err()),
        format!("issuer {address}: 404 Not Found: no reason given")
    );
    let other = Credentials {
        roots: TestCa::new("other").chain,
        ..by_token(&token)
    };
    let stranger = client.call::<PairReply>("/v1/pair", &asked, &other).await;
    let text = format!("{:#}", stranger.unwrap_err());
    assert!(text.contains("invalid peer certificate: "), "{text}");
    let other_name = IssuerClient {
        name: "other".to_owned(),
        ..client.clone()
    };
    let misnamed = other_name
        .call::<PairReply>("/v1/pair", &asked, &by_token(&token))
        .await;
    let text = format!("{:#}", misnamed.unwrap_err());
    assert!(text.contains("certificate not valid for name"), "{text}");
    served.stop().await;
    let silent = client
        .call::<PairReply>("/v1/pair", &asked, &by_token(&token))
        .await;
    assert_eq!(
        format!("{:#}", silent.unwrap_err()),
        format!("issuer {address}: Connection refused (os error 111)")
    );
}
