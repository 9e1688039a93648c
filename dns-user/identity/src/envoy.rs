//! Files for Envoy's secret discovery service. Each file is one resource with its material inline,
//! so that Envoy cannot combine a certificate with a key of another generation.

use serde_json::json;
use zeroize::Zeroizing;

use crate::folder::Pair;

/// Type of the resources, Envoy API v3.
const SECRET: &str = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.Secret";

/// Returns a discovery response with a `tls_certificate`.
pub(crate) fn certificate(name: &str, pair: &Pair) -> Zeroizing<String> {
    // Formatted by hand around the key, because a JSON value would keep a copy that is not wiped.
    // In PEM only the line ends need escaping.
    let before = json!({
        "resources": [{
            "@type": SECRET,
            "name": name,
            "tls_certificate": { "certificate_chain": { "inline_string": pair.certificate } },
        }],
    })
    .to_string();
    let mut text = Zeroizing::new(String::with_capacity(before.len() + 2 * pair.key.len() + 64));
    let (head, tail) = before.split_at(before.find(r#"{"certificate_chain""#).unwrap_or(0) + 1);
    text.push_str(head);
    text.push_str(r#""private_key":{"inline_string":""#);
    for line in pair.key.lines() {
        text.push_str(line);
        text.push_str("\\n");
    }
    text.push_str("\"},");
    text.push_str(tail);
    text
}

/// Returns a discovery response with a `validation_context`.
pub(crate) fn validation(name: &str, bundle: &str) -> Zeroizing<String> {
    let resource = json!({
        "@type": SECRET,
        "name": name,
        "validation_context": { "trusted_ca": { "inline_string": bundle } },
    });
    Zeroizing::new(json!({ "resources": [resource] }).to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resources_carry_pair_inline() {
        let key = Zeroizing::new("-----BEGIN X-----\nAA==\n-----END X-----\n".to_owned());
        let pair = Pair { certificate: "-----BEGIN C-----\n".to_owned(), key };
        let text = certificate("id", &pair);
        let value: serde_json::Value = serde_json::from_str(&text).unwrap();
        let resource = &value["resources"][0];
        assert_eq!(resource["@type"], SECRET);
        assert_eq!(resource["name"], "id");
        let held = &resource["tls_certificate"];
        assert_eq!(held["private_key"]["inline_string"], pair.key.as_str());
        assert_eq!(held["certificate_chain"]["inline_string"], pair.certificate);
    }
}
