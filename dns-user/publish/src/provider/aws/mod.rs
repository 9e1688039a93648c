//! Route 53.
//!
//! A deletion must name the exact set, and a batch is applied as a whole: deleting the listed set
//! and creating the new one in one batch is a compare-and-set.

mod api;
mod reach;
mod sets;

use std::{
    any::Any,
    collections::{BTreeMap, HashMap},
    path::PathBuf,
    time::Duration,
};

use dns_kit::aws_signature::Credentials;
use futures_util::future::BoxFuture;
use tokio::time::Instant;

pub use self::sets::BalancerRecords;
use self::{
    api::{Api, Element},
    sets::{MAX_CHANGES, SetChanges},
};
use super::{
    Batch, Definition, GroupSender, Parameter,
    ParameterKind::{Boolean, Choice, Duration as Time, Integer, List, Text},
    Parameters, Progress, Provider, ProviderError, ProviderSettings, Results, Step, TlsFiles,
    Transaction, TransactionResult, Visibility, Zone, bad_answer,
    definition::shared_root,
    send_groups, settings, unfit, webhook,
};
use crate::record::{DomainFilter, Key, Name, Record, RecordType};

const TAGS_PER_CALL: usize = 10;

pub(super) const DEFINITION: Definition = Definition {
    parameters: PARAMETERS,
    settings: &[
        "aws-access-key-id",
        "aws-endpoint",
        "aws-metadata-endpoint",
        "aws-profile",
        "aws-region",
        "aws-role-arn",
        "aws-secret-access-key",
        "aws-session-token",
        "aws-shared-credentials-file",
        "aws-sts-endpoint",
        "aws-web-identity-token-file",
    ],
    environment: &[
        ("AWS_ACCESS_KEY_ID", "aws-access-key-id"),
        ("AWS_SECRET_ACCESS_KEY", "aws-secret-access-key"),
        ("AWS_SESSION_TOKEN", "aws-session-token"),
        ("AWS_PROFILE", "aws-profile"),
        ("AWS_SHARED_CREDENTIALS_FILE", "aws-shared-credentials-file"),
        ("AWS_ROLE_ARN", "aws-role-arn"),
        ("AWS_WEB_IDENTITY_TOKEN_FILE", "aws-web-identity-token-file"),
        ("AWS_DEFAULT_REGION", "aws-region"),
        ("AWS_REGION", "aws-region"),
    ],
    remarks,
    ..Definition::new("aws", |parameters| {
        Ok(Box::new(AwsSettings::from_parameters(parameters)?))
    })
};

/// AWS Cloud Map, which external-dns serves.
pub(super) const SERVICE_DISCOVERY: Definition = Definition {
    parameters: PARAMETERS,
    remarks,
    ..webhook::peer("aws-sd")
};

const PARAMETERS: &[Parameter] = &[
    Parameter::new("aws-zone-type", Choice(&["public", "private"])),
    Parameter::new("aws-zone-tags", List),
    Parameter::new("aws-assume-role", Text),
    Parameter::new("aws-batch-change-size", Integer),
    Parameter::new("aws-batch-change-interval", Time),
    Parameter::new("aws-evaluate-target-health", Boolean),
    Parameter::new("no-aws-evaluate-target-health", Boolean),
    Parameter::new("aws-api-retries", Integer),
    Parameter::new("aws-prefer-cname", Boolean),
];

fn remarks(parameters: &Parameters) -> Vec<String> {
    for name in [
        "aws-evaluate-target-health",
        "no-aws-evaluate-target-health",
    ] {
        if parameters.text(name) != Some("true") {
            return Vec::new();
        }
    }
    let remark = "aws-evaluate-target-health and no-aws-evaluate-target-health are both true; the latter wins";
    vec![remark.to_owned()]
}

/// Settings of one account.
#[derive(Debug, Clone)]
pub struct AwsSettings {
    /// URL of Route 53.
    pub endpoint: String,
    /// URL of the token service.
    pub token_endpoint: String,
    /// URL of the machine's metadata service.
    pub metadata_endpoint: String,
    /// AWS region that signatures name.
    pub region: String,
    /// Credentials of the account; `None` to use a web identity, the shared file, or the machine's
    /// instance profile, in this order.
    pub credentials: Option<Credentials>,
    /// File with the token of a web identity, and the ARN of its role.
    pub web_identity: Option<(PathBuf, String)>,
    /// Shared credentials file, and the profile in it.
    pub shared_file: Option<(PathBuf, String)>,
    /// ARN of the role to assume.
    pub role: Option<String>,
    /// Restricts the zones by visibility.
    pub visibility: Option<Visibility>,
    /// Restricts the zones: each must have all these tags; without a value only the key is compared.
    pub tags: Vec<(String, Option<String>)>,
    /// Restricts the zones to ids with one of these suffixes.
    pub zone_ids: Vec<String>,
    /// Restricts the zones by domain.
    pub domains: DomainFilter,
    /// Maximum number of changes in a batch.
    pub batch_size: usize,
    /// Minimum pause between two batches of changes.
    pub batch_interval: Duration,
    /// Number of retries of a throttled call.
    pub retries: u32,
    /// Form of records that point to load balancers.
    pub balancers: BalancerRecords,
    /// Certificates for the connection to AWS.
    pub files: TlsFiles,
}

impl AwsSettings {
    /// Parses the parameters `aws-*`, `zone-id-filter` and `domain-filter`. Credentials are
    /// `aws-access-key-id`, `aws-secret-access-key` and `aws-session-token`, or come from
    /// `aws-web-identity-token-file`, `aws-shared-credentials-file` and `aws-profile`. `aws-region` only
    /// selects the partition: Route 53 is one service for all its regions.
    pub fn from_parameters(parameters: &Parameters) -> Result<Self, ProviderError> {
        // Route 53 has one endpoint in each partition, and signatures name its region. In GovCloud, only its name has
        // a suffix of its own (AWS General Reference, "Service endpoints").
        let (region, suffix, token_suffix) = match parameters.text("aws-region") {
            Some(region) if region.starts_with("cn-") => {
                ("cn-northwest-1", "amazonaws.com.cn", "amazonaws.com.cn")
            }
            Some(region) if region.starts_with("us-gov-") => {
                ("us-gov-west-1", "us-gov.amazonaws.com", "amazonaws.com")
            }
            _ => ("us-east-1", "amazonaws.com", "amazonaws.com"),
        };
        let domains = DomainFilter::new(
            parameters.list("domain-filter"),
            parameters.list("exclude-domains"),
        );
        let domains = domains.map_err(|error| settings(format!("domain-filter: {error}")))?;
        let web_identity = match parameters.path("aws-web-identity-token-file") {
            Some(file) => Some((file, parameters.required("aws-role-arn")?.to_owned())),
            None => None,
        };
        let mut zone_ids = Vec::new();
        for id in parameters.list("zone-id-filter") {
            zone_ids.push(id.trim_start_matches("/hostedzone/").to_owned());
        }
        let batch_size = parameters.number("aws-batch-change-size", 1_000)? as usize;
        let endpoint = format!("https://route53.{suffix}");
        let token_endpoint = format!("https://sts.{region}.{token_suffix}");
        Ok(Self {
            endpoint: url(parameters, "aws-endpoint", &endpoint),
            token_endpoint: url(parameters, "aws-sts-endpoint", &token_endpoint),
            metadata_endpoint: url(
                parameters,
                "aws-metadata-endpoint",
                "http://169.254.169.254",
            ),
            region: region.to_owned(),
            credentials: credentials(parameters)?,
            web_identity,
            shared_file: shared_file(parameters),
            role: parameters.text("aws-assume-role").map(str::to_owned),
            visibility: visibility(parameters)?,
            tags: tags(parameters),
            zone_ids,
            domains,
            // Above the limit Route 53 refuses each batch, and with 0 no change would fit.
            batch_size: batch_size.clamp(1, MAX_CHANGES),
            batch_interval: parameters
                .duration("aws-batch-change-interval", Duration::from_secs(1))?,
            retries: parameters.number("aws-api-retries", 3)?,
            balancers: balancers(parameters)?,
            files: TlsFiles::from_parameters(parameters)?,
        })
    }
}

/// Returns a URL without its final slashes.
fn url(parameters: &Parameters, name: &'static str, default: &str) -> String {
    let url = parameters.text(name).unwrap_or(default);
    url.trim_end_matches('/').to_owned()
}

fn visibility(parameters: &Parameters) -> Result<Option<Visibility>, ProviderError> {
    match parameters.text("aws-zone-type") {
        None => Ok(None),
        Some("public") => Ok(Some(Visibility::Public)),
        Some("private") => Ok(Some(Visibility::Private)),
        Some(other) => Err(settings(format!(
            "aws-zone-type is {other:?}; write public or private"
        ))),
    }
}

fn tags(parameters: &Parameters) -> Vec<(String, Option<String>)> {
    let mut tags = Vec::new();
    for tag in parameters.list("aws-zone-tags") {
        tags.push(match tag.split_once('=') {
            Some((key, value)) => (key.to_owned(), Some(value.to_owned())),
            None => (tag.to_owned(), None),
        });
    }
    tags
}

fn credentials(parameters: &Parameters) -> Result<Option<Credentials>, ProviderError> {
    let pair = parameters.pair("aws-access-key-id", "aws-secret-access-key")?;
    Ok(pair.map(|(key_id, secret)| Credentials {
        key_id,
        secret,
        token: parameters.text("aws-session-token").map(str::to_owned),
    }))
}

/// Parses `aws-prefer-cname` and `aws-evaluate-target-health`.
fn balancers(parameters: &Parameters) -> Result<BalancerRecords, ProviderError> {
    let evaluate_health = parameters.text("aws-evaluate-target-health") != Some("false")
        && !parameters.flag("no-aws-evaluate-target-health")?;
    Ok(if parameters.flag("aws-prefer-cname")? {
        BalancerRecords::Cname
    } else {
        BalancerRecords::Alias { evaluate_health }
    })
}

/// Returns the shared credentials file and its profile: the given ones, or the usual file if it exists.
fn shared_file(parameters: &Parameters) -> Option<(PathBuf, String)> {
    let profile = parameters.text("aws-profile");
    let file = parameters
        .path("aws-shared-credentials-file")
        .or_else(|| std::env::home_dir().map(|home| home.join(".aws/credentials")))?;
    let is_meant = profile.is_some() || parameters.text("aws-shared-credentials-file").is_some();
    // A file that the operator names must exist: another account would be changed without it.
    (is_meant || file.exists()).then(|| (file, profile.unwrap_or("default").to_owned()))
}

impl ProviderSettings for AwsSettings {
    fn open(self: Box<Self>) -> Result<Box<dyn Provider>, ProviderError> {
        Ok(Box::new(Aws::new(*self)?))
    }

    fn shared_zones(&self, other: &dyn Any) -> Vec<Name> {
        shared_root(self, other, Self::may_share_zones)
    }
}

/// Provider for one account.
pub struct Aws {
    api: Api,
    /// Sets as listed by Route 53, by zone.
    listed: HashMap<String, BTreeMap<Key, Element>>,
    last_batch: Option<Instant>,
}

impl Aws {
    /// Creates a provider without sending a request.
    pub fn new(settings: AwsSettings) -> Result<Self, ProviderError> {
        Ok(Self {
            api: Api::new(settings)?,
            listed: HashMap::new(),
            last_batch: None,
        })
    }

    async fn list_all(&mut self) -> Result<Vec<Zone>, ProviderError> {
        let mut zones = self.hosted_zones().await?;
        for zone in &mut zones {
            zone.content = self.list_zone(&zone.id, &zone.apex).await;
        }
        Ok(zones)
    }

    /// Lists the zones that pass the filters, without content.
    async fn hosted_zones(&mut self) -> Result<Vec<Zone>, ProviderError> {
        let mut hosted = Vec::new();
        let markers = [("marker", "NextMarker")];
        for page in self.api.pages("hostedzone", "100", &markers).await? {
            for zone in page.list("HostedZones") {
                hosted.extend(self.accept(zone)?);
            }
        }
        // Zones are listed without their tags, which cost further calls.
        if !self.api.settings.tags.is_empty() {
            hosted = self.with_tags(hosted).await?;
        }
        Ok(hosted)
    }

    /// Parses a zone; `None` if a filter excludes it.
    fn accept(&self, zone: &Element) -> Result<Option<Zone>, ProviderError> {
        let AwsSettings {
            visibility: wanted,
            zone_ids,
            domains,
            ..
        } = &self.api.settings;
        let id = zone
            .text_of("Id")
            .trim_start_matches("/hostedzone/")
            .to_owned();
        let apex = sets::read_name(zone.text_of("Name"))
            .map_err(|error| bad_answer(&self.api.settings.endpoint, error))?;
        let is_private = zone
            .find("PrivateZone")
            .is_some_and(|private| private.text.trim() == "true");
        let visibility = if is_private {
            Visibility::Private
        } else {
            Visibility::Public
        };
        let accepted = wanted.is_none_or(|wanted| wanted == visibility)
            && (zone_ids.is_empty() || zone_ids.iter().any(|suffix| id.ends_with(suffix.as_str())))
            // The listing of a zone takes a call for each 300 sets.
            && domains.may_contain(&apex);
        Ok(accepted.then(|| Zone {
            id,
            visibility,
            ..Zone::of(apex)
        }))
    }

    async fn with_tags(&mut self, mut hosted: Vec<Zone>) -> Result<Vec<Zone>, ProviderError> {
        let mut kept: Vec<String> = Vec::new();
        for zones in hosted.chunks(TAGS_PER_CALL) {
            let ids = zones
                .iter()
                .map(|zone| Element::text("ResourceId", &zone.id));
            let request = Element::of(
                "ListTagsForResourcesRequest",
                [Element::of("ResourceIds", ids)],
            );
            let answer = self.api.post("tags/hostedzone", &request).await?;
            for tagged in answer.list("ResourceTagSets") {
                let mut wanted = self.api.settings.tags.iter();
                if wanted.all(|(key, value)| has_tag(tagged, key, value.as_deref())) {
                    kept.push(tagged.text_of("ResourceId").to_owned());
                }
            }
        }
        hosted.retain(|zone| kept.contains(&zone.id));
        Ok(hosted)
    }

    /// Lists a zone without its SOA and its own NS records.
    async fn list_zone(&mut self, id: &str, apex: &Name) -> Result<Vec<Record>, ProviderError> {
        let mut records = Vec::new();
        let mut listed = BTreeMap::new();
        let path = format!("hostedzone/{id}/rrset");
        let markers = [
            ("name", "NextRecordName"),
            ("type", "NextRecordType"),
            ("identifier", "NextRecordIdentifier"),
        ];
        for page in self.api.pages(&path, "300", &markers).await? {
            for set in page.list("ResourceRecordSets") {
                if set.text_of("Type") == "SOA" {
                    continue;
                }
                match sets::read(set) {
                    // Route 53's own servers, which it manages itself.
                    Ok(record) if record.record_type == RecordType::NS && record.name == *apex => {}
                    Ok(record) => {
                        listed.insert(record.key(), set.clone());
                        records.push(record);
                    }
                    // Types in a text form specific to Route 53 are left unchanged.
                    Err(error) => {
                        let name = set.text_of("Name");
                        tracing::debug!(zone = id, name, %error, "record set left unchanged");
                    }
                }
            }
        }
        // A deletion has to repeat a set exactly as Route 53 lists it, with properties that a
        // record does not have.
        self.listed.insert(id.to_owned(), listed);
        Ok(records)
    }

    async fn apply_all(&mut self, batch: &Batch, progress: Progress<'_>) -> Vec<TransactionResult> {
        let nothing = BTreeMap::new();
        let listed = self.listed.get(&batch.zone).unwrap_or(&nothing);
        let max_changes = self.api.settings.batch_size;
        let mut changes = Vec::with_capacity(batch.transactions.len());
        for transaction in &batch.transactions {
            let converted = convert(transaction, listed, max_changes);
            changes.push(converted.map_err(TransactionResult::Failed));
        }
        let mut sender = BatchSender {
            aws: self,
            zone: &batch.zone,
        };
        send_groups(&mut sender, changes, batch.on_conflict, progress).await
    }
}

/// Returns whether a zone has a tag; without a value any one is right.
fn has_tag(tagged: &Element, key: &str, value: Option<&str>) -> bool {
    for tag in tagged.list("Tags") {
        let own = tag.text_of("Value");
        if tag.text_of("Key") == key && value.unwrap_or(own) == own {
            return true;
        }
    }
    false
}

/// Converts a transaction; `listed` are the sets as Route 53 listed them.
fn convert(
    transaction: &Transaction,
    listed: &BTreeMap<Key, Element>,
    max_changes: usize,
) -> Result<SetChanges, ProviderError> {
    for step in &transaction.steps {
        // Only what is written: a listed set may have properties that Route 53 knows and this
        // program does not.
        if let Step::Create(record) | Step::Replace { after: record, .. } = step
            && let Some(reason) = sets::unfit(record)
        {
            return Err(unfit(&transaction.name, reason));
        }
    }
    let changes = SetChanges::new(transaction, |record| match listed.get(&record.key()) {
        Some(set) => set.clone(),
        None => sets::write(record),
    });
    if changes.size.fits(max_changes) {
        return Ok(changes);
    }
    // External-dns leaves such a name out with a warning.
    let reason = "its change exceeds Route 53's limit of 32,000 characters or 1,000 values in a batch; \
                  use fewer targets";
    Err(unfit(&transaction.name, reason))
}

impl Provider for Aws {
    fn adjust(&self, desired: &mut Vec<Record>) {
        sets::adjust(desired, self.api.settings.balancers);
    }

    fn unfit(&self, record: &Record) -> Option<String> {
        sets::unfit(record)
    }

    fn list(&mut self) -> BoxFuture<'_, Result<Vec<Zone>, ProviderError>> {
        Box::pin(self.list_all())
    }

    fn apply<'a>(&'a mut self, batch: &'a Batch, progress: Progress<'a>) -> Results<'a> {
        Box::pin(self.apply_all(batch, progress))
    }
}

/// Sends batches to one zone, at most one per interval.
struct BatchSender<'a> {
    aws: &'a mut Aws,
    zone: &'a str,
}

impl GroupSender for BatchSender<'_> {
    type Item = SetChanges;

    fn fitting(&self, transactions: &[SetChanges]) -> usize {
        sets::fitting(transactions, self.aws.api.settings.batch_size)
    }

    async fn send(&mut self, groups: &[&[SetChanges]]) -> Vec<TransactionResult> {
        // Route 53 refuses more than five requests a second from one account, from all programs together.
        if let Some(last) = self.aws.last_batch {
            tokio::time::sleep_until(last + self.aws.api.settings.batch_interval).await;
        }
        let path = format!("hostedzone/{}/rrset", self.zone);
        let result = self.aws.api.post(&path, &sets::request(groups[0])).await;
        // Also after an error, which Route 53 counts as a request.
        self.aws.last_batch = Some(Instant::now());
        vec![match result {
            Ok(_) => TransactionResult::Applied,
            Err(ProviderError::Refused { reason, .. }) if is_conflict(&reason) => {
                TransactionResult::Conflict
            }
            Err(error) => TransactionResult::Failed(error),
        }]
    }
}

/// Returns whether a message reports that the zone differs from the listed state.
fn is_conflict(message: &str) -> bool {
    // The code is InvalidChangeBatch for every defect of a batch, so only the text tells them apart.
    [
        "but it already exists",
        "but it was not found",
        "but the values provided do not match",
    ]
    .iter()
    .any(|text| message.contains(text))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::provider::{MAX_PAGES, tests::Scripted};

    fn settings_of(pairs: &[(&str, &str)]) -> Result<AwsSettings, String> {
        let mut parameters = Parameters::default();
        for (name, value) in pairs {
            parameters.0.insert((*name).to_owned(), (*value).to_owned());
        }
        AwsSettings::from_parameters(&parameters).map_err(|error| error.to_string())
    }

    #[test]
    fn regions_select_a_partition() {
        for (region, expected) in [
            (
                "eu-west-1",
                [
                    "us-east-1",
                    "https://route53.amazonaws.com",
                    "https://sts.us-east-1.amazonaws.com",
                ],
            ),
            (
                "cn-north-1",
                [
                    "cn-northwest-1",
                    "https://route53.amazonaws.com.cn",
                    "https://sts.cn-northwest-1.amazonaws.com.cn",
                ],
            ),
            (
                "us-gov-east-1",
                [
                    "us-gov-west-1",
                    "https://route53.us-gov.amazonaws.com",
                    "https://sts.us-gov-west-1.amazonaws.com",
                ],
            ),
        ] {
            let found = settings_of(&[("aws-region", region)]).unwrap();
            let found = [found.region, found.endpoint, found.token_endpoint];
            assert_eq!(found, expected, "{region}");
        }
        let given = settings_of(&[
            ("aws-endpoint", "http://a//"),
            ("aws-sts-endpoint", "http://b/"),
            ("aws-metadata-endpoint", "http://c"),
        ])
        .unwrap();
        assert_eq!(
            [
                given.endpoint,
                given.token_endpoint,
                given.metadata_endpoint
            ],
            ["http://a", "http://b", "http://c"]
        );
    }

    #[test]
    fn settings_are_read_from_parameters() {
        let found = settings_of(&[
            ("aws-access-key-id", "id"),
            ("aws-secret-access-key", "secret"),
            ("aws-session-token", "token"),
            ("aws-assume-role", "arn"),
            ("aws-zone-type", "private"),
            ("aws-zone-tags", "env=a=b, x"),
            ("zone-id-filter", "/hostedzone/Z1,Z2"),
            ("domain-filter", "example.org"),
            ("exclude-domains", "x.example.org"),
            ("aws-batch-change-size", "7"),
            ("aws-batch-change-interval", "3s"),
            ("aws-api-retries", "4"),
            ("aws-prefer-cname", "true"),
            ("aws-profile", "p"),
            ("aws-shared-credentials-file", "/f"),
            ("aws-web-identity-token-file", "/token"),
            ("aws-role-arn", "role"),
        ])
        .unwrap();
        let credentials = found.credentials.unwrap();
        assert_eq!(
            (
                &*credentials.key_id,
                &*credentials.secret,
                credentials.token.as_deref()
            ),
            ("id", "secret", Some("token"))
        );
        assert_eq!(found.role.as_deref(), Some("arn"));
        assert_eq!(found.visibility, Some(Visibility::Private));
        assert_eq!(
            found.tags,
            [
                ("env".to_owned(), Some("a=b".to_owned())),
                ("x".to_owned(), None)
            ]
        );
        assert_eq!(found.zone_ids, ["Z1", "Z2"]);
        let matches = |name: &str| found.domains.matches(&Name::parse(name).unwrap());
        assert!(matches("a.example.org") && !matches("x.example.org") && !matches("example.net"));
        assert_eq!((found.batch_size, found.retries), (7, 4));
        assert_eq!(found.batch_interval, Duration::from_secs(3));
        assert_eq!(found.balancers, BalancerRecords::Cname);
        assert_eq!(
            found.shared_file,
            Some((PathBuf::from("/f"), "p".to_owned()))
        );
        assert_eq!(
            found.web_identity,
            Some((PathBuf::from("/token"), "role".to_owned()))
        );
        let usual = settings_of(&[]).unwrap();
        assert!(
            usual.credentials.is_none() && usual.role.is_none() && usual.web_identity.is_none()
        );
        assert_eq!(
            (usual.visibility, usual.tags.len(), usual.zone_ids.len()),
            (None, 0, 0)
        );
        assert_eq!((usual.batch_size, usual.retries), (1_000, 3));
        assert_eq!(usual.batch_interval, Duration::from_secs(1));
        assert_eq!(usual.metadata_endpoint, "http://169.254.169.254");
        for (size, expected) in [("0", 1), ("1", 1), ("1000", 1_000), ("1001", 1_000)] {
            let found = settings_of(&[("aws-batch-change-size", size)]).unwrap();
            assert_eq!(found.batch_size, expected);
        }
    }

    #[test]
    fn health_is_evaluated_by_default() {
        for (given, evaluate_health) in [
            (&[][..], true),
            (&[("aws-evaluate-target-health", "true")], true),
            (&[("aws-evaluate-target-health", "false")], false),
            (&[("no-aws-evaluate-target-health", "true")], false),
            (
                &[
                    ("aws-evaluate-target-health", "true"),
                    ("no-aws-evaluate-target-health", "true"),
                ],
                false,
            ),
            (&[("no-aws-evaluate-target-health", "false")], true),
        ] {
            let expected = BalancerRecords::Alias { evaluate_health };
            assert_eq!(settings_of(given).unwrap().balancers, expected, "{given:?}");
            let mut parameters = Parameters::default();
            for (name, value) in given {
                parameters.0.insert((*name).to_owned(), (*value).to_owned());
            }
            let expected: &[&str] = match given {
                [(_, "true"), (_, "true")] => &[
                    "aws-evaluate-target-health and no-aws-evaluate-target-health are both true; the latter wins",
                ],
                _ => &[],
            };
            assert_eq!(remarks(&parameters), expected);
        }
    }

    #[test]
    fn contradictory_settings_are_refused() {
        for (given, expected) in [
            (
                ("aws-zone-type", "both"),
                "aws-zone-type is \"both\"; write public or private",
            ),
            (
                ("aws-access-key-id", "id"),
                "aws-access-key-id and aws-secret-access-key require each other; set both or neither",
            ),
            (
                ("aws-secret-access-key", "s"),
                "aws-access-key-id and aws-secret-access-key require each other; set both or neither",
            ),
            (
                ("aws-web-identity-token-file", "/f"),
                "aws-role-arn is missing; set it",
            ),
            (
                ("domain-filter", "a..b"),
                "domain-filter: \"a..b\" is not a domain name: it has an empty label; remove the extra dot",
            ),
            (
                ("aws-prefer-cname", "x"),
                "aws-prefer-cname is \"x\"; write true or false",
            ),
        ] {
            assert_eq!(settings_of(&[given]).unwrap_err(), expected);
        }
        assert_eq!(
            settings_of(&[("aws-zone-type", "public")])
                .unwrap()
                .visibility,
            Some(Visibility::Public)
        );
    }

    fn zone(id: &str, name: &str, private: &str) -> Element {
        let config = Element::of("Config", [Element::text("PrivateZone", private)]);
        Element::of(
            "HostedZone",
            [
                Element::text("Id", &format!("/hostedzone/{id}")),
                Element::text("Name", name),
                config,
            ],
        )
    }

    #[test]
    fn zones_pass_the_filters() {
        let accepted = |filters: &[(&str, &str)], zone: &Element| {
            let aws = Aws::new(settings_of(filters).unwrap()).unwrap();
            aws.accept(zone).map_err(|error| error.to_string())
        };
        let public = zone("Z1A", "example.org.", "false");
        let private = zone("Z2B", "example.org.", "true");
        let found = accepted(&[], &private).unwrap().unwrap();
        assert_eq!(
            (&*found.id, found.apex.as_str(), found.visibility),
            ("Z2B", "example.org", Visibility::Private)
        );
        let found = accepted(&[], &public).unwrap().unwrap();
        assert_eq!((&*found.id, found.visibility), ("Z1A", Visibility::Public));
        // Route 53 escapes the slash of a delegated part of a network (RFC 2317).
        let part = zone("Z3", "0\\05725.2.0.192.in-addr.arpa.", "false");
        let found = accepted(&[], &part).unwrap().unwrap();
        assert_eq!(found.apex.as_str(), "0/25.2.0.192.in-addr.arpa");
        for (filter, passes) in [
            (("aws-zone-type", "public"), [true, false]),
            (("aws-zone-type", "private"), [false, true]),
            (("zone-id-filter", "1A"), [true, false]),
            (("zone-id-filter", "Z1,Z2B"), [false, true]),
            (("domain-filter", "a.example.org"), [true, true]),
            (("domain-filter", "example.net"), [false, false]),
        ] {
            let found =
                [&public, &private].map(|zone| accepted(&[filter], zone).unwrap().is_some());
            assert_eq!(found, passes, "{filter:?}");
        }
        assert_eq!(
            accepted(&[], &zone("Z", "a..b", "false")).unwrap_err(),
            "https://route53.amazonaws.com: invalid response: \"a..b\" is not a domain name: it has an empty label; \
             remove the extra dot"
        );
    }

    #[test]
    fn tag_values_are_optional() {
        let tag = |key: &str, value: &str| {
            Element::of(
                "Tag",
                [Element::text("Key", key), Element::text("Value", value)],
            )
        };
        let tagged = Element::of(
            "Set",
            [Element::of("Tags", [tag("env", "a"), tag("x", "")])],
        );
        for (key, value, expected) in [
            ("env", Some("a"), true),
            ("env", Some("b"), false),
            ("env", None, true),
            ("x", Some(""), true),
            ("x", None, true),
            ("a", None, false),
        ] {
            assert_eq!(has_tag(&tagged, key, value), expected, "{key} {value:?}");
        }
    }

    #[test]
    fn unfit_changes_are_left_out() {
        let record = |targets: usize| {
            let targets: Vec<String> = (0..targets)
                .map(|n| format!("10.0.{}.{}", n / 256, n % 256))
                .collect();
            Record::parse("a.example.org", RecordType::A, targets).unwrap()
        };
        let converted = |steps: Vec<Step>, max_changes: usize| {
            let name = Name::parse("a.example.org").unwrap();
            let transaction = Transaction { name, steps };
            convert(&transaction, &BTreeMap::new(), max_changes).map_err(|error| error.to_string())
        };
        assert!(converted(vec![Step::Create(record(1_000))], 1).is_ok());
        let limit = "a.example.org: its change exceeds Route 53's limit of 32,000 characters or 1,000 values in a batch; \
                     use fewer targets";
        assert_eq!(
            converted(vec![Step::Create(record(1_001))], 1).unwrap_err(),
            limit
        );
        let mut weighed = record(1);
        weighed.set_property("aws/weight", "heavy");
        let reason =
            "a.example.org: its property aws/weight is \"heavy\"; write a number from 0 to 255";
        let replaced = Step::Replace {
            before: record(1),
            after: weighed.clone(),
        };
        assert_eq!(converted(vec![replaced], 10).unwrap_err(), reason);
        assert_eq!(
            converted(vec![Step::Create(weighed.clone())], 10).unwrap_err(),
            reason
        );
        // A listed set may have members that this program does not know.
        assert!(converted(vec![Step::Delete(weighed)], 10).is_ok());
    }

    #[test]
    fn conflicts_are_told_by_text() {
        for (message, expected) in [
            (
                "[Tried to create resource record set [...] but it already exists]",
                true,
            ),
            (
                "[Tried to delete resource record set [...] but it was not found]",
                true,
            ),
            (
                "[Tried to delete ... but the values provided do not match the current values]",
                true,
            ),
            (
                "[RRSet of type CNAME with DNS name a. is not permitted]",
                false,
            ),
        ] {
            assert_eq!(is_conflict(message), expected, "{message}");
        }
    }

    async fn route53(responses: &[(u16, &str)], more: &[(&str, &str)]) -> (Aws, Scripted) {
        let server = Scripted::new(responses).await;
        let given = [
            ("aws-endpoint", server.url.as_str()),
            ("aws-access-key-id", "id"),
            ("aws-secret-access-key", "secret"),
            ("aws-api-retries", "0"),
        ];
        let settings = settings_of(&[&given[..], more].concat()).unwrap();
        (Aws::new(settings).unwrap(), server)
    }

    #[tokio::test]
    async fn route_53_errors_are_distinguished() {
        let error =
            |code: &str| format!("<E><Error><Code>{code}</Code><Message>why</Message></Error></E>");
        let messages =
            "<InvalidChangeBatch><Messages><Message>one</Message><Message>two</Message></Messages>\
                        </InvalidChangeBatch>"
                .to_owned();
        let throttled = " is throttling; the next round tries again";
        for (code, body, expected) in [
            (400, messages, " refused: one; two"),
            (400, error("InvalidChangeBatch"), " refused: why"),
            (400, error("Throttling"), throttled),
            (400, error("ThrottlingException"), throttled),
            (400, error("PriorRequestNotComplete"), throttled),
            (400, error("TooManyRequestsException"), throttled),
            (429, "x".to_owned(), throttled),
            (403, error("AccessDenied"), " refused: AccessDenied: why"),
            (403, "<E/>".to_owned(), " refused: : no reason given"),
            (
                503,
                error("ServiceUnavailable"),
                ": 503 Service Unavailable ServiceUnavailable: why",
            ),
            (200, "<A>".to_owned(), ": invalid response: it is truncated"),
            (
                200,
                error("AccessDenied"),
                ": invalid response: it has the root \"E\"; a proxy may have answered",
            ),
            (
                200,
                "<ErrorResponse/>".to_owned(),
                ": invalid response: it has the root \"ErrorResponse\"; a proxy may have answered",
            ),
        ] {
            let (mut aws, server) = route53(&[(code, &body)], &[]).await;
            let error = aws.api.pages("x", "1", &[]).await.unwrap_err();
            assert_eq!(error.to_string(), format!("{}{expected}", server.url));
            assert_eq!(server.asked(), ["GET /2013-04-01/x?maxitems=1"]);
        }
    }

    #[tokio::test]
    async fn endless_listing_is_given_up() {
        let page = "<ListHostedZonesResponse><IsTruncated>true</IsTruncated><NextMarker>m</NextMarker>\
                    </ListHostedZonesResponse>";
        let (mut aws, server) = route53(&vec![(200, page); MAX_PAGES + 1], &[]).await;
        let error = aws.list().await.err().unwrap().to_string();
        assert_eq!(
            error,
            format!(
                "{}: invalid response: its listing does not end after 1000 pages",
                server.url
            )
        );
        assert_eq!(server.asked().len(), MAX_PAGES);
    }

    #[tokio::test]
    async fn zones_and_sets_are_paged() {
        let zone = |id: &str, name: &str| {
            format!(
                "<HostedZone><Id>/hostedzone/{id}</Id><Name>{name}.</Name><Config><PrivateZone>false</PrivateZone>\
                 </Config></HostedZone>"
            )
        };
        let document =
            |root: &str, content: String| format!("<{root}Response>{content}</{root}Response>");
        let zones = |zones: String, rest: &str| {
            document(
                "ListHostedZones",
                format!("<HostedZones>{zones}</HostedZones>{rest}"),
            )
        };
        let first = zones(
            zone("Z1", "example.org") + &zone("Z2", "example.net"),
            "<IsTruncated>true</IsTruncated><NextMarker>m 1</NextMarker>",
        );
        let second = zones(
            zone("Z3", "example.com"),
            "<IsTruncated>false</IsTruncated>",
        );
        let tag = |id: &str, value: &str| {
            format!(
                "<ResourceTagSet><ResourceId>{id}</ResourceId><Tags><Tag><Key>env</Key><Value>{value}</Value></Tag>\
                 </Tags></ResourceTagSet>"
            )
        };
        let tags = tag("Z1", "a") + &tag("Z2", "b") + &tag("Z3", "b");
        let tags = format!("<ResourceTagSets>{tags}</ResourceTagSets>");
        let tags = document("ListTagsForResources", tags);
        let set = |name: &str, record_type: &str, value: &str| {
            format!(
                "<ResourceRecordSet><Name>{name}.example.org.</Name><Type>{record_type}</Type><TTL>60</TTL>\
                 <ResourceRecords><ResourceRecord><Value>{value}</Value></ResourceRecord></ResourceRecords>\
                 </ResourceRecordSet>"
            )
        };
        let apex = |record_type: &str, value: &str| {
            set("", record_type, value).replace("<Name>.", "<Name>")
        };
        let sets = |sets: String, rest: &str| {
            let content = format!("<ResourceRecordSets>{sets}</ResourceRecordSets>{rest}");
            document("ListResourceRecordSets", content)
        };
        let sets1 = sets(
            apex("SOA", "x")
                + &apex("NS", "ns.")
                + &set("a", "A", "192.0.2.1")
                + &set("u", "NEW", "x"),
            "<IsTruncated>true</IsTruncated><NextRecordName>b.example.org.</NextRecordName>\
             <NextRecordType>A</NextRecordType>",
        );
        let sets2 = sets(
            set("b", "A", "192.0.2.2") + &set("c", "NS", "ns."),
            "<IsTruncated>true</IsTruncated><NextRecordName>d.example.org.</NextRecordName>\
             <NextRecordType>A</NextRecordType><NextRecordIdentifier>eu</NextRecordIdentifier>",
        );
        let sets3 = sets(set("d", "A", "192.0.2.4"), "");
        let responses =
            [&first, &second, &tags, &sets1, &sets2, &sets3].map(|body| (200, body.as_str()));
        let (mut aws, server) = route53(&responses, &[("aws-zone-tags", "env=a")]).await;
        let listed = aws.list().await.unwrap();
        assert_eq!(listed.len(), 1);
        assert_eq!(
            (listed[0].id.as_str(), listed[0].apex.as_str()),
            ("Z1", "example.org")
        );
        let lines: Vec<String> = listed[0]
            .content
            .as_ref()
            .unwrap()
            .iter()
            .map(ToString::to_string)
            .collect();
        assert_eq!(
            lines,
            [
                "a.example.org 60 A 192.0.2.1",
                "b.example.org 60 A 192.0.2.2",
                "c.example.org 60 NS ns",
                "d.example.org 60 A 192.0.2.4",
            ]
        );
        assert_eq!(aws.listed["Z1"].len(), 4);
        let asked = server.asked();
        let rrset = "GET /2013-04-01/hostedzone/Z1/rrset?";
        assert_eq!(
            [&asked[..2], &asked[3..]].concat(),
            [
                "GET /2013-04-01/hostedzone?maxitems=100".to_owned(),
                "GET /2013-04-01/hostedzone?marker=m%201&maxitems=100".to_owned(),
                format!("{rrset}maxitems=300"),
                format!("{rrset}maxitems=300&name=b.example.org.&type=A"),
                format!("{rrset}identifier=eu&maxitems=300&name=d.example.org.&type=A"),
            ]
        );
        assert!(
            asked[2].starts_with("POST /2013-04-01/tags/hostedzone ")
                && asked[2].ends_with(
                    "<ResourceIds><ResourceId>Z1</ResourceId><ResourceId>Z2</ResourceId><ResourceId>Z3</ResourceId>\
                     </ResourceIds></ListTagsForResourcesRequest>"
                ),
            "{}",
            asked[2]
        );
    }

    #[tokio::test]
    async fn batches_are_sent_to_their_zone() {
        let record = Record::parse("a.example.org", RecordType::A, ["192.0.2.1"]).unwrap();
        let batch = Batch {
            zone: "Z1".to_owned(),
            transactions: vec![Transaction {
                name: record.name.clone(),
                steps: vec![Step::Create(record)],
            }],
            ..Batch::default()
        };
        let conflict = "<InvalidChangeBatch><Messages><Message>... but it already exists</Message></Messages>\
                        </InvalidChangeBatch>";
        for (code, body, expected) in [
            (
                200,
                "<ChangeResourceRecordSetsResponse/>",
                Some(TransactionResult::Applied),
            ),
            // Accepted by something else.
            (200, "<html/>", None),
            (400, conflict, Some(TransactionResult::Conflict)),
            (400, "<InvalidChangeBatch/>", None),
        ] {
            let (mut aws, server) = route53(&[(code, body)], &[]).await;
            let results = aws.apply(&batch, &|_| {}).await;
            match expected {
                Some(expected) => assert_eq!(results, [expected]),
                None => assert!(matches!(results[..], [TransactionResult::Failed(_)])),
            }
            let asked = server.asked();
            assert_eq!(asked.len(), 1);
            assert!(
                asked[0].starts_with("POST /2013-04-01/hostedzone/Z1/rrset <?xml"),
                "{asked:?}"
            );
            assert!(aws.last_batch.is_some());
        }
    }
}
