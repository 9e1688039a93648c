//! Credentials for signing: configured, from the machine's instance profile, or from an assumed
//! role.

use std::time::{Duration, SystemTime};

use bytes::Bytes;
use http_body_util::Full;
use hyper::{Request, StatusCode};
use serde::Deserialize;
use time::{OffsetDateTime, format_description::well_known::Rfc3339};

use super::{
    Settings,
    api::{exchange, signed},
    sign::{Credentials, Scope, encode_query},
};
use crate::provider::{ProviderError, http::Http};

/// Time before the expiration of temporary credentials at which they are renewed.
const RENEWAL: Duration = Duration::from_mins(5);

/// Lifetime of a metadata service token in seconds.
const METADATA_TOKEN_SECONDS: &str = "300";

/// Path of the instance profile's credentials.
const PROFILE: &str = "/latest/meta-data/iam/security-credentials/";

pub(super) struct Keys {
    given: Option<Credentials>,
    metadata_endpoint: String,
    token_endpoint: String,
    region: String,
    role: Option<String>,
    temporary: Option<(Credentials, SystemTime)>,
}

/// Response of the metadata service.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Profile {
    access_key_id: String,
    secret_access_key: String,
    token: String,
    expiration: String,
}

impl Keys {
    pub(super) fn new(settings: &Settings) -> Self {
        Self {
            given: settings.credentials.clone(),
            metadata_endpoint: settings.metadata_endpoint.clone(),
            token_endpoint: settings.token_endpoint.clone(),
            region: settings.region.clone(),
            role: settings.role.clone(),
            temporary: None,
        }
    }

    /// Returns credentials that remain valid for at least [`RENEWAL`].
    pub(super) async fn current(&mut self, http: &Http) -> Result<Credentials, ProviderError> {
        if let (Some(given), None) = (&self.given, &self.role) {
            return Ok(given.clone());
        }
        if let Some((credentials, until)) = &self.temporary
            && SystemTime::now() + RENEWAL < *until
        {
            return Ok(credentials.clone());
        }
        let base = match &self.given {
            Some(given) => (given.clone(), SystemTime::now()),
            None => self.of_machine(http).await?,
        };
        let temporary = match self.role.clone() {
            Some(role) => self.assume(http, &role, &base.0).await?,
            None => base,
        };
        let credentials = temporary.0.clone();
        self.temporary = Some(temporary);
        Ok(credentials)
    }

    /// Fetches the credentials of the machine's instance profile (IMDSv2).
    async fn of_machine(&self, http: &Http) -> Result<(Credentials, SystemTime), ProviderError> {
        let server = &self.metadata_endpoint;
        let missing = |reason: String| {
            ProviderError::Settings(format!(
                "Route 53 needs credentials: AWS_ACCESS_KEY_ID is not set, and this machine has no instance \
                 profile ({server}: {reason})"
            ))
        };
        let ask = async |request: hyper::http::request::Builder| {
            let request =
                request.body(Full::new(Bytes::new())).map_err(|error| missing(error.to_string()))?;
            let response = http.send(server, request).await.map_err(|error| missing(error.to_string()))?;
            match response.status {
                StatusCode::OK => Ok(String::from_utf8_lossy(&response.body).trim().to_owned()),
                status => Err(missing(status.to_string())),
            }
        };
        let token = Request::put(format!("{server}/latest/api/token"));
        let token = ask(token.header("x-aws-ec2-metadata-token-ttl-seconds", METADATA_TOKEN_SECONDS)).await?;
        let get = |path: String| Request::get(path).header("x-aws-ec2-metadata-token", &token);
        let name = ask(get(format!("{server}{PROFILE}"))).await?;
        let text = ask(get(format!("{server}{PROFILE}{name}"))).await?;
        let profile: Profile = serde_json::from_str(&text).map_err(|error| missing(error.to_string()))?;
        let until = OffsetDateTime::parse(&profile.expiration, &Rfc3339)
            .map_err(|error| missing(error.to_string()))?;
        let Profile { access_key_id: key_id, secret_access_key: secret, token, expiration: _ } = profile;
        Ok((Credentials { key_id, secret, token: Some(token) }, until.into()))
    }

    async fn assume(
        &self,
        http: &Http,
        role: &str,
        base: &Credentials,
    ) -> Result<(Credentials, SystemTime), ProviderError> {
        let form = [
            ("Action", "AssumeRole"),
            ("DurationSeconds", "3600"),
            ("RoleArn", role),
            ("RoleSessionName", "bosh-dns-publish"),
            ("Version", "2011-06-15"),
        ];
        let endpoint = &self.token_endpoint;
        let scope = Scope { region: self.region.clone(), service: "sts" };
        let content_type = "application/x-www-form-urlencoded";
        let request = signed(endpoint, "POST", "/", &[], content_type, &encode_query(&form), base, &scope)?;
        let answer =
            exchange(http, endpoint, request).await.map_err(|error| error.into_provider(endpoint))?;
        let bad = || ProviderError::BadAnswer {
            server: endpoint.clone(),
            reason: "AssumeRole returned no credentials".to_owned(),
        };
        let found = answer.find("Credentials").ok_or_else(bad)?;
        let credentials = Credentials {
            key_id: found.text_of("AccessKeyId").to_owned(),
            secret: found.text_of("SecretAccessKey").to_owned(),
            token: Some(found.text_of("SessionToken").to_owned()),
        };
        if credentials.key_id.is_empty() || credentials.secret.is_empty() {
            return Err(bad());
        }
        // `Expiration` matches the requested duration.
        Ok((credentials, SystemTime::now() + Duration::from_hours(1)))
    }
}
