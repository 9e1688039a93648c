//! Publishing to Route 53: to moto, and to a strict double.

use std::{process::Command, time::Duration};
use test_support::free_address;

use dns_publish::{
    engine::{Engine, Report},
    ownership::Registry,
    plan::{Desired, PlanRules},
    provider::{
        OnConflict, Parameters,
        aws::{Aws, AwsSettings},
    },
    record::{Name, Record, RecordType},
};

use crate::{
    name_server::{names, quiet, record, wish},
    process::{Server, run},
    route53_double::{Double, KEY_ID, SECRET},
};

fn settings(url: &str, extra: &[(&str, &str)]) -> AwsSettings {
    let base = [
        ("aws-endpoint", url),
        ("aws-sts-endpoint", url),
        ("aws-metadata-endpoint", url),
        ("aws-access-key-id", KEY_ID),
        ("aws-secret-access-key", SECRET),
    ];
    let pairs = base
        .iter()
        .chain(extra)
        .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
    let mut settings = AwsSettings::from_parameters(&Parameters(pairs.collect())).unwrap();
    // Removes the service's limit of one batch per second, to save time.
    settings.batch_interval = Duration::from_millis(20);
    settings
}

fn engine(settings: AwsSettings) -> Engine {
    Engine::new(
        Box::new(Aws::new(settings).unwrap()),
        Registry::default(),
        PlanRules::of("me"),
    )
}

async fn publish(engine: &mut Engine, desired: &Desired) -> Report {
    let report = engine.reconcile(desired, None, &quiet).await.unwrap();
    assert!(report.is_complete(), "{report:?}");
    report
}

/// Returns wanted records of many kinds.
fn kinds() -> Desired {
    let mut weighted: Vec<Record> = ["blue", "green"]
        .into_iter()
        .zip(1..)
        .map(|(set, number)| {
            let mut one = record("w.example.org", RecordType::A, &format!("192.0.2.{number}"));
            one.set_identifier = set.to_owned();
            one.properties
                .insert("aws/weight".to_owned(), "10".to_owned());
            one
        })
        .collect();
    weighted.extend([
        record("*.wild.example.org", RecordType::A, "192.0.2.3"),
        record(
            "www.example.org",
            RecordType::CNAME,
            "lb.us-east-1.elb.amazonaws.com",
        ),
        record("plain.example.org", RecordType::CNAME, "target.example.net"),
        record("six.example.org", RecordType::AAAA, "2001:db8::1"),
    ]);
    wish(weighted)
}

#[tokio::test]
async fn double_takes_every_kind() {
    let double = Double::start(&[("Z1", "example.org", false)]).await;
    let mut engine = engine(settings(&double.url, &[]));
    publish(&mut engine, &kinds()).await;
    let sets: Vec<String> = double.with(|state| {
        state.zones[0]
            .3
            .keys()
            .map(|key| key.0.clone() + " " + &key.1)
            .collect()
    });
    assert!(
        sets.contains(&"a-www.example.org. TXT".to_owned()),
        "{sets:?}"
    );
    assert!(
        sets.contains(&"www.example.org. AAAA".to_owned()),
        "{sets:?}"
    );
    assert_eq!(publish(&mut engine, &kinds()).await.applied(), 0);
    // Changes of type, of TTL and of targets, and deletions.
    let changed = wish([
        record("plain.example.org", RecordType::A, "192.0.2.9"),
        record(
            "www.example.org",
            RecordType::CNAME,
            "elsewhere.example.net",
        ),
    ]);
    publish(&mut engine, &changed).await;
    assert_eq!(
        double.with(|state| state.zones[0].3.len()),
        4,
        "two records with their owner records"
    );
    assert_eq!(publish(&mut engine, &changed).await.applied(), 0);
}

#[tokio::test]
async fn batches_stay_within_limits() {
    let double = Double::start(&[("Z1", "example.org", false)]).await;
    let mut limits = settings(&double.url, &[]);
    limits.batch_interval = Duration::from_millis(100);
    let mut engine = engine(limits);
    let mut desired = names(1_200);
    // Too many values for one batch: an error of this name alone.
    let many = (0..600).map(|number| format!("10.0.{}.{}", number / 250, number % 250));
    let huge = Record::parse("huge.example.org", RecordType::A, many.clone()).unwrap();
    let huger = Record::parse(
        "huger.example.org",
        RecordType::A,
        many.chain((0..600).map(|n| format!("10.1.{}.{}", n / 250, n % 250))),
    )
    .unwrap();
    desired.records.extend([huge, huger]);
    let report = engine.reconcile(&desired, None, &quiet).await.unwrap();
    assert_eq!(report.applied(), 1_201, "{:?}", report.zones[0].failures);
    assert_eq!(report.zones[0].failures.len(), 1);
    assert_eq!(
        report.zones[0].failures[0].0,
        Name::parse("huger.example.org").unwrap()
    );
    let batches = double.with(|state| state.batches.clone());
    assert!(batches.len() >= 3, "{}", batches.len());
    assert!(
        batches
            .windows(2)
            .all(|pair| pair[1] - pair[0] >= Duration::from_millis(100))
    );
    double.with(|state| state.page = 7);
    let again = engine.reconcile(&desired, None, &quiet).await.unwrap();
    assert_eq!(again.applied(), 0, "pages join to the same zone");
}

#[tokio::test]
async fn foreign_change_is_a_conflict() {
    let double = Double::start(&[("Z1", "example.org", false)]).await;
    let mut engine = engine(settings(&double.url, &[]));
    publish(&mut engine, &names(3)).await;
    let listing = engine.list().await.unwrap();
    let wanted = wish((0..3).map(|number| {
        record(
            &format!("n{number}.example.org"),
            RecordType::A,
            "192.0.2.77",
        )
    }));
    let planned = engine.plan(&listing, &wanted);
    let changed = double.with(|state| {
        let sets = &mut state.zones[0].3;
        let key = sets
            .keys()
            .find(|key| key.0 == "n1.example.org.")
            .cloned()
            .unwrap();
        let set = sets[&key].replace("198.51.", "203.0.");
        sets.insert(key, set);
        sets.clone()
    });
    let report = engine
        .apply(&listing, &planned, None, OnConflict::ListAgain, &quiet)
        .await;
    assert_eq!(
        (report.applied(), report.zones[0].conflicts),
        (0, 3),
        "a batch is one transaction"
    );
    assert_eq!(double.with(|state| state.zones[0].3.clone()), changed);
    // In the next round only the changed name is sent separately.
    assert_eq!(publish(&mut engine, &wanted).await.applied(), 3);
}

#[tokio::test]
async fn throttling_is_waited_out_or_reported() {
    let double = Double::start(&[("Z1", "example.org", false)]).await;
    let mut patient = engine(settings(&double.url, &[("aws-api-retries", "2")]));
    double.with(|state| state.throttle = 2);
    assert_eq!(publish(&mut patient, &names(2)).await.applied(), 2);
    double.with(|state| state.throttle = 3);
    let error = patient
        .reconcile(&names(3), None, &quiet)
        .await
        .unwrap_err()
        .to_string();
    assert!(error.contains("is throttling"), "{error}");
    assert_eq!(
        double.with(|state| state.zones[0].3.len()),
        4,
        "the run ended without writing"
    );
}

#[tokio::test]
async fn zones_are_chosen_and_filtered() {
    let zones = [
        ("ZPUB", "example.org", false),
        ("ZDEV", "dev.example.org", false),
        ("ZPRIV", "example.org", true),
        ("ZOTHER", "example.net", false),
    ];
    let double = Double::start(&zones).await;
    let desired = wish([record("a.dev.example.org", RecordType::A, "192.0.2.1")]);
    let counts = |double: &Double| {
        double.with(|state| {
            state
                .zones
                .iter()
                .map(|zone| zone.3.len())
                .collect::<Vec<_>>()
        })
    };
    publish(&mut engine(settings(&double.url, &[])), &desired).await;
    assert_eq!(
        counts(&double),
        [0, 2, 2, 0],
        "the longest public zone, and the private one"
    );

    let double = Double::start(&zones).await;
    publish(
        &mut engine(settings(&double.url, &[("aws-zone-tags", "zone=ZPUB")])),
        &desired,
    )
    .await;
    assert_eq!(counts(&double), [2, 0, 0, 0]);
    let double = Double::start(&zones).await;
    publish(
        &mut engine(settings(&double.url, &[("aws-zone-type", "private")])),
        &desired,
    )
    .await;
    assert_eq!(counts(&double), [0, 0, 2, 0]);
    let double = Double::start(&zones).await;
    publish(
        &mut engine(settings(&double.url, &[("zone-id-filter", "DEV")])),
        &desired,
    )
    .await;
    assert_eq!(counts(&double), [0, 2, 0, 0]);
}

#[tokio::test]
async fn role_is_assumed() {
    let double = Double::start(&[("Z1", "example.org", false)]).await;
    let role = [(
        "aws-assume-role",
        "arn:aws:iam::123455567:role/external-dns",
    )];
    publish(&mut engine(settings(&double.url, &role)), &names(1)).await;
    let keys = double.with(|state| state.signed_by.clone());
    assert_eq!(keys.into_iter().collect::<Vec<_>>(), [KEY_ID, "ASIAROLE"]);
    let mut wrong = settings(&double.url, &[]);
    wrong.credentials.as_mut().unwrap().secret = "wrong".to_owned();
    let error = engine(wrong).list().await.err().unwrap().to_string();
    assert!(error.contains("SignatureDoesNotMatch"), "{error}");
}

#[tokio::test]
async fn instance_profile_signs() {
    let double = Double::start(&[("Z1", "example.org", false)]).await;
    let mut profile = settings(&double.url, &[]);
    profile.credentials = None;
    publish(&mut engine(profile.clone()), &names(1)).await;
    assert_eq!(
        double
            .with(|state| state.signed_by.clone())
            .into_iter()
            .collect::<Vec<_>>(),
        ["ASIAROLE"]
    );
    profile.metadata_endpoint = "http://127.0.0.1:1".to_owned();
    let error = engine(profile).list().await.err().unwrap().to_string();
    assert!(error.contains("AWS_ACCESS_KEY_ID is not set"), "{error}");
}

#[tokio::test]
async fn files_hold_credentials() {
    let double = Double::start(&[("Z1", "example.org", false)]).await;
    let folder = tempfile::tempdir().unwrap();
    let (shared, token) = (
        folder.path().join("credentials"),
        folder.path().join("token"),
    );
    let text = format!(
        "[default]\naws_access_key_id = other\naws_secret_access_key = wrong\n\n[publisher]\n\
         aws_access_key_id = {KEY_ID}\naws_secret_access_key={SECRET}\n"
    );
    std::fs::write(&shared, text).unwrap();
    std::fs::write(&token, "identity-token\n").unwrap();
    let with = |extra: &[(&str, &str)]| {
        let mut settings = settings(&double.url, extra);
        settings.credentials = None;
        engine(settings)
    };
    let shared = shared.to_str().unwrap();
    let file = ("aws-shared-credentials-file", shared);
    publish(&mut with(&[file, ("aws-profile", "publisher")]), &names(1)).await;
    assert_eq!(
        double
            .with(|state| std::mem::take(&mut state.signed_by))
            .into_iter()
            .collect::<Vec<_>>(),
        [KEY_ID]
    );
    let error = with(&[file, ("aws-profile", "missing")])
        .list()
        .await
        .err()
        .unwrap()
        .to_string();
    assert!(
        error.contains("the profile \"missing\" has no access key"),
        "{error}"
    );
    let identity = [
        file,
        ("aws-web-identity-token-file", token.to_str().unwrap()),
        ("aws-role-arn", "arn:aws:iam::123455567:role/external-dns"),
    ];
    publish(&mut with(&identity), &names(2)).await;
    assert_eq!(
        double
            .with(|state| state.signed_by.clone())
            .into_iter()
            .collect::<Vec<_>>(),
        ["ASIAROLE"]
    );
}

#[test]
fn partition_follows_region() {
    let of = |region: &str| {
        let parameters = Parameters([("aws-region".to_owned(), region.to_owned())].into());
        let settings = AwsSettings::from_parameters(&parameters).unwrap();
        (settings.region, settings.endpoint)
    };
    assert_eq!(
        of("eu-central-1"),
        (
            "us-east-1".to_owned(),
            "https://route53.amazonaws.com".to_owned()
        )
    );
    assert_eq!(
        of("cn-north-1"),
        (
            "cn-northwest-1".to_owned(),
            "https://route53.amazonaws.com.cn".to_owned()
        )
    );
    assert_eq!(
        of("us-gov-east-1").1,
        "https://route53.us-gov.amazonaws.com"
    );
}

/// moto, with the hosted zone example.org.
pub(crate) struct Moto {
    pub(crate) url: String,
    /// URL of the zone.
    zone: String,
    _server: Server,
    _folder: tempfile::TempDir,
}

impl Moto {
    pub(crate) fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let address = free_address();
        let port = address.port().to_string();
        let mut command = Command::new("moto_server");
        command.args(["-H", "127.0.0.1", "-p", &port]);
        let server = Server::start(&mut command, &folder.path().join("log"), address);
        let url = format!("http://{address}");
        let body = "<CreateHostedZoneRequest xmlns=\"https://route53.amazonaws.com/doc/2013-04-01/\"><Name>example.org</Name>\
                    <CallerReference>1</CallerReference></CreateHostedZoneRequest>";
        let created = Self::curl(&[
            "-H",
            "Content-Type: text/xml",
            "-d",
            body,
            &format!("{url}/2013-04-01/hostedzone"),
        ]);
        let (_, id) = created.split_once("<Id>/hostedzone/").unwrap();
        let (id, _) = id.split_once('<').unwrap();
        let zone = format!("{url}/2013-04-01/hostedzone/{id}");
        Self {
            url,
            zone,
            _server: server,
            _folder: folder,
        }
    }

    /// Returns all record sets of the zone, in XML.
    pub(crate) fn record_sets(&self) -> String {
        Self::curl(&[&format!("{}/rrset", self.zone)])
    }

    fn curl(arguments: &[&str]) -> String {
        let authorization = "Authorization: AWS4-HMAC-SHA256 Credential=AK/20260101/us-east-1/route53/aws4_request, \
                             SignedHeaders=host, Signature=0";
        run(
            Command::new("curl")
                .args(["-sf", "-H", authorization])
                .args(arguments),
            "",
        )
    }
}

#[tokio::test]
async fn moto_takes_every_kind() {
    let moto = Moto::start();
    let mut engine = engine(settings(&moto.url, &[]));
    publish(&mut engine, &kinds()).await;
    assert_eq!(publish(&mut engine, &kinds()).await.applied(), 0);
    let desired = wish(kinds().records.into_iter().chain(names(700).records));
    assert_eq!(
        publish(&mut engine, &desired).await.applied(),
        700,
        "several pages and batches"
    );
    assert_eq!(publish(&mut engine, &desired).await.applied(), 0);
    let fewer = wish(desired.records[..690].iter().cloned());
    let report = engine.reconcile(&fewer, None, &quiet).await.unwrap();
    assert!(report.is_complete(), "{report:?}");
    assert_eq!(publish(&mut engine, &fewer).await.applied(), 0);
}
