//! Files of one generation.

use crate::{
    envoy,
    folder::{Entry, FolderError, IdentityFolder, Pair},
    profile::Container,
};

/// The description that the pair was issued for; a restarted rotator continues from it.
pub(super) const CONTAINER: &str = "container.json";

/// CAs that a peer's certificate may be issued by, PEM.
pub(super) const BUNDLE: &str = "ca.crt";

/// Contents of an identity's folder.
pub(super) struct Contents<'a> {
    pub(super) pair: &'a Pair,
    /// Pair for container-to-container traffic.
    pub(super) second: Option<&'a Pair>,
    pub(super) bundle: &'a str,
    pub(super) container: &'a Container,
    /// Whether to write Envoy's files.
    pub(super) envoy: bool,
}

impl Contents<'_> {
    /// Replaces the folder's files atomically.
    pub(super) fn write(&self, folder: &IdentityFolder) -> Result<(), FolderError> {
        let Self { pair, second, bundle, container, envoy } = self;
        let description = serde_json::to_vec(container).expect("a description has text keys");
        let joined = pair.joined();
        let joined_second = second.map(Pair::joined);
        let secret = |name, contents| Entry { name, contents, secret: true };
        let public = |name, contents| Entry { name, contents, secret: false };
        let mut entries = vec![
            public("instance.crt", pair.certificate.as_bytes()),
            secret("instance.key", pair.key.as_bytes()),
            secret("instance.pem", joined.as_bytes()),
            public(BUNDLE, bundle.as_bytes()),
            public(CONTAINER, &description),
        ];
        if let (Some(second), Some(joined)) = (second, &joined_second) {
            entries.push(public("c2c.crt", second.certificate.as_bytes()));
            entries.push(secret("c2c.key", second.key.as_bytes()));
            entries.push(secret("c2c.pem", joined.as_bytes()));
        }
        let identity_secret = envoy.then(|| envoy::certificate("id-cert-and-key", pair));
        let second_secret =
            second.filter(|_| *envoy).map(|second| envoy::certificate("c2c-cert-and-key", second));
        let validation = envoy.then(|| envoy::validation("id-validation-context", bundle));
        for (name, contents) in [
            ("sds-id-cert-and-key.json", &identity_secret),
            ("sds-c2c-cert-and-key.json", &second_secret),
            ("sds-id-validation-context.json", &validation),
        ] {
            entries.extend(contents.as_ref().map(|contents| secret(name, contents.as_bytes())));
        }
        folder.replace(&entries, container.owner)
    }
}
