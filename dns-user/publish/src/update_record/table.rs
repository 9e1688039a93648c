//! Table of parameters: names, types, enumerations and defaults of document 003.
//!
//! Parsing, validation, the OpenAPI document and the arguments of rendered Deployments are all
//! derived from this table.

use super::parameters::{
    Effect::{self, Fixed, KubernetesOnly, Process, Used},
    Group::{self, Aws, Azure, CoreDns, General, Rfc2136},
    Kind::{self, Boolean, Choice, Duration, Integer, Text, TextOrBoolean},
    Parameter,
};

/// All parameters, in the order of the document.
#[rustfmt::skip]
pub const PARAMETERS: &[Parameter] = &[
    general("request-timeout", Duration, "30s", KubernetesOnly,
        "Timeout of Kubernetes API calls; 0s: none"),
    general("contour-load-balancer", Text, "heptio-contour/contour", KubernetesOnly,
        "Namespace and name of Contour's load balancer service").by_default("heptio-contour/contour"),
    general("fqdn-template", Text, "template", KubernetesOnly,
        "Template of names for sources without a host name; several, separated by commas"),
    general("combine-fqdn-annotation", Boolean, "true", KubernetesOnly,
        "Combine the template's names with the names in annotations"),
    general("ignore-hostname-annotation", Boolean, "true", KubernetesOnly,
        "Ignore host names in annotations; needs fqdn-template").by_default("false"),
    general("compatibility", Choice(&["mate", "molecule"]), "mate", KubernetesOnly,
        "Accept the annotations of an older program"),
    general("publish-internal-services", Boolean, "true", KubernetesOnly,
        "Also publish services of type ClusterIP"),
    general("publish-host-ip", TextOrBoolean, "true", KubernetesOnly,
        "Publish the host's address of headless services"),
    general("service-type-filter", Choice(&["all", "ClusterIP", "NodePort", "LoadBalancer", "ExternalName"]),
        "all", KubernetesOnly, "Publish only services of this type").by_default("all"),
    general("domain-filter", Text, "example.com", Used,
        "Domains to manage, separated by commas; a leading dot excludes the domain itself"),
    general("exclude-domains", Text, "example.com", Used,
        "Domains to exclude, separated by commas; takes precedence over domain-filter"),
    general("zone-id-filter", Text, "zone filter", Used,
        "Ids of hosted zones to manage, separated by commas"),
    general("tls-ca", Text, "tls ca path", Used,
        "File of the CA that signed the provider's certificate"),
    general("tls-client-cert", Text, "tls client cert path", Used,
        "File of the client certificate presented to the provider"),
    general("tls-client-cert-key", Text, "tls client cert key path", Used,
        "File of the client certificate's private key"),
    general("policy", Choice(&["sync", "upsert-only", "create-only"]), "sync", Used,
        "Permitted changes: all, all but deletions, or only additions").by_default("sync"),
    general("registry", Choice(&["txt", "noop", "aws-sd"]), "txt", Used,
        "Where the ownership of records is kept").by_default("txt"),
    general("txt-owner-id", Text, "default", Used,
        "Owner written into ownership records").by_default("default"),
    general("txt-prefix", Text, "custom string", Used,
        "Prefix of the names of ownership records; %{record_type} is replaced by the type"),
    general("txt-cache-interval", Duration, "30s",
        Fixed("has no effect here: a zone is transferred again only if its serial number has changed"),
        "How long a listing of ownership records may be reused"),
    general("interval", Duration, "30s", Used,
        "Time between two rounds").by_default("1m"),
    general("once", Boolean, "true", Process,
        "Exit after the first round"),
    general("dry-run", Boolean, "true", Used,
        "Show changes without making them"),
    general("log-format", Choice(&["text", "json"]), "text", Process,
        "Format of log lines").by_default("text"),
    general("metrics-address", Text, ":7979", Process,
        "Address of the metrics and health endpoints"),
    general("log-level", Choice(&["panic", "debug", "info", "warning", "error", "fatal"]), "info", Process,
        "Minimum level of logged messages").by_default("info"),

    used(Aws, "aws-zone-type", Choice(&["public", "private"]), "public",
        "Manage only hosted zones of this type"),
    used(Aws, "aws-zone-tags", Text, "zone tags",
        "Manage only hosted zones with these tags, key=value separated by commas"),
    used(Aws, "aws-assume-role", Text, "arn:aws:iam::123455567:role/external-dns",
        "ARN of the IAM role to assume"),
    used(Aws, "aws-batch-change-size", Integer, "1000",
        "Maximum number of changes in a batch"),
    used(Aws, "aws-batch-change-interval", Duration, "1s",
        "Time between two batches"),
    used(Aws, "aws-evaluate-target-health", Boolean, "true",
        "Have Route 53 evaluate the health of alias targets; this is the default"),
    used(Aws, "no-aws-evaluate-target-health", Boolean, "true",
        "Do not have Route 53 evaluate the health of alias targets"),
    used(Aws, "aws-api-retries", Integer, "3",
        "Maximum number of attempts for an API call"),
    used(Aws, "aws-prefer-cname", Boolean, "true",
        "Publish CNAME records for load balancers instead of alias records"),

    used(Azure, "azure-config-file", Text, "/etc/kubernetes/azure.json",
        "File of Azure's configuration; required for the provider azure"),
    used(Azure, "azure-resource-group", Text, "resource group",
        "Resource group; required for the provider azure-private-dns"),
    used(Azure, "azure-subscription-id", Text, "subscription id",
        "Subscription; required for the provider azure-private-dns"),
    used(Azure, "azure-user-assigned-identity-client-id", Text, "client id",
        "Client id of a user-assigned identity"),

    used(CoreDns, "coredns-prefix", Text, "skydns",
        "Prefix of the keys in etcd"),

    used(Rfc2136, "rfc2136-host", Text, "host.sample.com",
        "DNS server that accepts updates, with an optional port"),
    used(Rfc2136, "rfc2136-zone", Text, "",
        "Zones to update, separated by commas"),
    used(Rfc2136, "rfc2136-insecure", Boolean, "false",
        "Send messages without TSIG"),
    used(Rfc2136, "rfc2136-tsig-keyname", Text, "tsig key",
        "Name of the TSIG key; required unless rfc2136-insecure is true"),
    used(Rfc2136, "rfc2136-tsig-secret", Text, "tsig secret",
        "Secret of the TSIG key in base64; required unless rfc2136-insecure is true"),
    used(Rfc2136, "rfc2136-tsig-secret-alg", Text, "tsig secret alg",
        "Algorithm of the TSIG key: hmac-sha1, -sha224, -sha256, -sha384 or -sha512"),
    used(Rfc2136, "rfc2136-tsig-axfr", Text, "axfr",
        "List the zone by signed AXFR")
        .with_effect(Fixed("has no effect here: zones are always listed by AXFR, signed if there is a key")),
];

/// Returns a parameter that the publisher uses.
const fn used(
    group: Group,
    name: &'static str,
    kind: Kind,
    example: &'static str,
    summary: &'static str,
) -> Parameter {
    Parameter { name, group, kind, default: None, example, summary, effect: Used }
}

/// Returns a general parameter with another effect.
const fn general(
    name: &'static str,
    kind: Kind,
    example: &'static str,
    effect: Effect,
    summary: &'static str,
) -> Parameter {
    Parameter { name, group: General, kind, default: None, example, summary, effect }
}

impl Parameter {
    const fn by_default(self, default: &'static str) -> Self {
        Self { default: Some(default), ..self }
    }

    const fn with_effect(self, effect: Effect) -> Self {
        Self { effect, ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dns_core::config::duration::parse_duration;

    #[test]
    fn names_are_unique_and_examples_fit() {
        let mut names: Vec<_> = PARAMETERS.iter().map(|parameter| parameter.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), PARAMETERS.len());
        for Parameter { name, kind, default, example, .. } in PARAMETERS {
            for text in [*example].into_iter().chain(*default) {
                let fits = match kind {
                    Text | TextOrBoolean => true,
                    Duration => parse_duration(text).is_ok(),
                    Boolean => text.parse::<bool>().is_ok(),
                    Integer => text.parse::<u32>().is_ok(),
                    Choice(words) => words.contains(&text),
                };
                assert!(fits, "{name}: {text}");
            }
        }
    }
}
