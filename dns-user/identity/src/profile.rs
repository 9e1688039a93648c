//! Contents of an instance's certificates, derived from the description of its container.

use std::{borrow::Cow, fmt, net::IpAddr};

use anyhow::ensure;
use serde::{Deserialize, Deserializer, Serialize, de::Error as _};

/// Maximum length of a common name, `ub-common-name` of RFC 5280, appendix A.1.
pub(crate) const MAX_COMMON_NAME: usize = 64;

/// Maximum length of an organizational unit, `ub-organizational-unit-name` of RFC 5280, appendix A.1.
const MAX_UNIT: usize = 64;

/// Id of an instance: a label that is safe in file names and certificates.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Guid(String);

/// A container or machine, as described in a file or a control command.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Container {
    /// Common name and first DNS name.
    pub guid: Guid,
    /// Organizational units, such as `app:5f0b...`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ous: Vec<String>,
    /// Address inside the platform; preferred for the address SAN.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        deserialize_with = "address"
    )]
    pub internal_ip: Option<IpAddr>,
    /// Address of the cell; used if the container has no internal one.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        deserialize_with = "address"
    )]
    pub external_ip: Option<IpAddr>,
    /// Names for container-to-container traffic; if present, a second pair carries them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub internal_routes: Option<Vec<String>>,
    /// User and group that own the private keys; the rotator's own if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<Owner>,
    /// Whether the container has stopped: its pairs then carry no identity, as the reference's do, so
    /// that a proxy that still runs cannot act as the instance.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub stopped: bool,
}

/// Deserialises an address; an empty text counts as none, as in the reference.
fn address<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<IpAddr>, D::Error> {
    let text = Option::<Cow<'de, str>>::deserialize(deserializer)?;
    match text.as_deref() {
        None | Some("") => Ok(None),
        Some(text) => match text.parse() {
            Ok(address) => Ok(Some(address)),
            Err(_) => Err(D::Error::custom(format!("{text:?} is not an IP address"))),
        },
    }
}

/// Numeric user and group of key files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Owner {
    /// User id of the files' owner.
    pub uid: u32,
    /// Group id of the files.
    pub gid: u32,
}

/// Identity fields of a leaf certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Profile {
    pub(crate) common_name: String,
    /// In the order of the description; the encoding sorts them.
    pub(crate) organizational_units: Vec<String>,
    /// The SANs of type dNSName, without duplicates; wildcards are possible.
    pub(crate) dns_names: Vec<String>,
    /// The SANs of type iPAddress.
    pub(crate) addresses: Vec<IpAddr>,
}

impl Guid {
    /// Returns the id as a string.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl TryFrom<String> for Guid {
    type Error = anyhow::Error;

    fn try_from(text: String) -> anyhow::Result<Self> {
        // The id is also the first label or labels of a DNS name in the certificate.
        let usable = text.len() <= MAX_COMMON_NAME && !text.starts_with('*') && is_dns_name(&text);
        // Without `/` and empty labels it is also a safe name of a folder, and never `.` or `..`.
        ensure!(
            usable,
            "guid {text:?} is not usable; use 1 to 64 letters, digits, `-`, `_` or `.`, with at most 63 between \
             two dots and no empty part"
        );
        Ok(Self(text))
    }
}

impl From<Guid> for String {
    fn from(guid: Guid) -> Self {
        guid.0
    }
}

impl fmt::Display for Guid {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.0)
    }
}

impl Container {
    /// Returns the profile of the identity pair: the id, and the internal or else the external address.
    pub fn identity(&self) -> anyhow::Result<Profile> {
        if self.stopped {
            return Profile::unnamed(&self.ous);
        }
        let address = self.internal_ip.or(self.external_ip);
        Profile::new(self.guid.as_str(), &self.ous, [], address)
    }

    /// Returns the profile of the second pair, for container-to-container traffic: no address, and
    /// the internal routes after the id. `None` if the description has no `internal_routes`.
    pub fn container_to_container(&self) -> Option<anyhow::Result<Profile>> {
        let routes = self.internal_routes.as_ref()?;
        if self.stopped {
            return Some(Profile::unnamed(&self.ous));
        }
        Some(Profile::new(
            self.guid.as_str(),
            &self.ous,
            routes.iter().map(String::as_str),
            [],
        ))
    }
}

impl Profile {
    /// Validates the identity fields. The common name is also the first DNS name.
    pub fn new<'a>(
        common_name: &'a str,
        organizational_units: &[String],
        more_names: impl IntoIterator<Item = &'a str>,
        addresses: impl IntoIterator<Item = IpAddr>,
    ) -> anyhow::Result<Self> {
        ensure!(
            // The bound counts characters, not octets.
            (1..=MAX_COMMON_NAME).contains(&common_name.chars().count()),
            "common name {common_name:?} is longer than 64 characters (X.520); use an alternative name"
        );
        let mut dns_names: Vec<String> = Vec::new();
        for name in std::iter::once(common_name).chain(more_names) {
            ensure!(
                is_dns_name(name),
                "{name:?} is not a DNS name; use letters, digits, `-`, `_` and `.`, at most 253 characters"
            );
            if !dns_names.iter().any(|held| held == name) {
                dns_names.push(name.to_owned());
            }
        }
        Ok(Self {
            common_name: common_name.to_owned(),
            dns_names,
            addresses: addresses.into_iter().collect(),
            ..Self::unnamed(organizational_units)?
        })
    }

    /// Validates the organizational units; the profile has no common name, and an empty DNS name.
    /// Equal units count once, because a SET has no duplicates.
    fn unnamed(organizational_units: &[String]) -> anyhow::Result<Self> {
        let mut units: Vec<String> = Vec::new();
        for unit in organizational_units {
            ensure!(
                !unit.is_empty(),
                "an organizational unit is empty; remove it from `ous`"
            );
            ensure!(
                unit.chars().count() <= MAX_UNIT && !unit.chars().any(char::is_control),
                "organizational unit {unit:?} is not usable; use at most 64 characters (RFC 5280), none of them a \
                 control character"
            );
            if !units.contains(unit) {
                units.push(unit.clone());
            }
        }
        Ok(Self {
            common_name: String::new(),
            organizational_units: units,
            // Diego's executor takes the id as the only name, and a stopped container has an empty one.
            dns_names: vec![String::new()],
            addresses: Vec::new(),
        })
    }
}

/// Returns whether `name` is valid as a SAN of type dNSName; wildcards are.
pub fn is_dns_name(name: &str) -> bool {
    let name = name.strip_prefix("*.").unwrap_or(name);
    // In wire form, with a length before each label and the root, that is 255 octets (RFC 1035,
    // section 2.3.4).
    name.len() <= 253
        && name.split('.').all(|label| {
            (1..=63).contains(&label.len())
                && label
                    .bytes()
                    // No host name has `_` (RFC 952), but names of services do (RFC 2782), and Go's
                    // verifier accepts it.
                    .all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte))
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn container(text: &str) -> Result<Container, serde_json::Error> {
        serde_json::from_str(text)
    }

    #[test]
    fn internal_address_is_preferred() {
        let both = container(r#"{"guid":"g","internal_ip":"10.0.0.1","external_ip":"192.0.2.1"}"#)
            .unwrap();
        assert_eq!(
            both.identity().unwrap().addresses,
            ["10.0.0.1".parse::<IpAddr>().unwrap()]
        );
        let external = container(r#"{"guid":"g","external_ip":"2001:db8::1"}"#).unwrap();
        assert_eq!(
            external.identity().unwrap().addresses,
            ["2001:db8::1".parse::<IpAddr>().unwrap()]
        );
    }

    #[test]
    fn unsafe_guids_are_refused() {
        let long = "x".repeat(65);
        let label = "x".repeat(64);
        for bad in [
            "",
            "..",
            ".hidden",
            "a/b",
            "a b",
            "é",
            "a..b",
            "a.",
            "*.a",
            &label,
            long.as_str(),
        ] {
            let text = serde_json::json!({ "guid": bad }).to_string();
            let error = container(&text).unwrap_err().to_string();
            assert!(error.contains("is not usable"), "{bad}: {error}");
        }
    }

    #[test]
    fn routes_must_be_names() {
        let bad = container(r#"{"guid":"g","internal_routes":["a b.apps.internal"]}"#).unwrap();
        let error = bad.container_to_container().unwrap().unwrap_err();
        assert!(
            error
                .to_string()
                .starts_with("\"a b.apps.internal\" is not a DNS name")
        );
    }

    #[test]
    fn empty_address_counts_as_none() {
        let read = container(r#"{"guid":"g","internal_ip":"","external_ip":"192.0.2.1"}"#).unwrap();
        assert_eq!(
            read.identity().unwrap().addresses,
            ["192.0.2.1".parse::<IpAddr>().unwrap()]
        );
        let error = container(r#"{"guid":"g","internal_ip":"10.0.0"}"#)
            .unwrap_err()
            .to_string();
        assert!(error.contains("\"10.0.0\" is not an IP address"), "{error}");
    }

    #[test]
    fn units_are_limited_and_distinct() {
        let with = |units: &[&str]| {
            let text = serde_json::json!({ "guid": "g", "ous": units }).to_string();
            container(&text).unwrap().identity()
        };
        let long = "x".repeat(65);
        let fits = "é".repeat(64);
        for bad in [long.as_str(), "app:a\0", "app:a\nspace:b"] {
            let error = with(&[bad]).unwrap_err().to_string();
            assert!(
                error.starts_with(&format!("organizational unit {bad:?} is not usable")),
                "{error}"
            );
        }
        assert_eq!(
            with(&["app:a", &fits, "app:a"])
                .unwrap()
                .organizational_units,
            ["app:a", &fits]
        );
    }

    #[test]
    fn stopped_container_has_no_name() {
        let text = r#"{"guid":"g","ous":["app:a"],"internal_ip":"10.0.0.1","internal_routes":["r.x"],"stopped":true}"#;
        let stopped = container(text).unwrap();
        for profile in [
            stopped.identity().unwrap(),
            stopped.container_to_container().unwrap().unwrap(),
        ] {
            assert_eq!(profile.common_name, "");
            assert_eq!(profile.organizational_units, ["app:a"]);
            assert_eq!(profile.dns_names, [""]);
            assert!(profile.addresses.is_empty());
        }
    }

    #[test]
    fn guid_is_its_text() {
        for text in ["a", "6f2a9c1e-0000-4000-8000-000000000001", "a.b_c"] {
            let guid = Guid::try_from(text.to_owned()).unwrap();
            assert_eq!(guid.as_str(), text);
        }
        for wrong in ["", ".", "..", "a/b", "*.a", "a..b", &"a".repeat(65)] {
            assert!(Guid::try_from(wrong.to_owned()).is_err(), "{wrong}");
        }
    }

    #[test]
    fn dns_names_have_exact_bounds() {
        let label = "a".repeat(63);
        let longest = [&*label, &label, &label, &label[2..]].join(".");
        assert_eq!(longest.len(), 253);
        for (name, expected) in [
            ("a", true),
            ("A-b_9.x", true),
            (&label, true),
            (&longest, true),
            ("*.a", true),
            (&format!("*.{longest}"), true),
            ("", false),
            ("*", false),
            ("*.", false),
            ("*.*.a", false),
            ("a.*.b", false),
            ("a..b", false),
            (".a", false),
            ("a.", false),
            ("a b", false),
            ("a/b", false),
            ("a\u{e9}", false),
            (&format!("{label}a"), false),
            (&format!("{longest}a"), false),
        ] {
            assert_eq!(is_dns_name(name), expected, "{name}");
        }
        // A guid is a common name, too: 64 characters at most.
        for (parts, usable) in [((32, 31), true), ((32, 32), false)] {
            let name = format!("{}.{}", "a".repeat(parts.0), "b".repeat(parts.1));
            let guid = Guid::try_from(name.clone());
            assert_eq!(guid.is_ok(), usable);
            let profile = Profile::new(&name, &[], [], []);
            let error = profile.err().map(|error| error.to_string());
            let expected = format!(
                "common name {name:?} is longer than 64 characters (X.520); use an alternative name"
            );
            assert_eq!(error, (!usable).then_some(expected));
        }
        assert!(Profile::new("", &[], [], []).is_err());
        assert_eq!(
            Guid::try_from("*".to_owned()).unwrap_err().to_string(),
            "guid \"*\" is not usable; use 1 to 64 letters, digits, `-`, `_` or `.`, with at most 63 between two \
             dots and no empty part"
        );
    }

    #[test]
    fn descriptions_become_profiles() {
        let text = r#"{"guid":"g","ous":["app:a","space:b"],"internal_ip":"10.0.0.1","external_ip":null,
            "internal_routes":["r.x","g","*.r.x","r.x"],"owner":{"uid":7,"gid":8}}"#;
        let read = container(text).unwrap();
        let units = vec!["app:a".to_owned(), "space:b".to_owned()];
        let identity = Profile {
            common_name: "g".to_owned(),
            organizational_units: units.clone(),
            dns_names: vec!["g".to_owned()],
            addresses: vec!["10.0.0.1".parse().unwrap()],
        };
        assert_eq!(read.identity().unwrap(), identity);
        let second = Profile {
            dns_names: ["g", "r.x", "*.r.x"].map(str::to_owned).to_vec(),
            addresses: Vec::new(),
            ..identity
        };
        assert_eq!(read.container_to_container().unwrap().unwrap(), second);
        // The description is saved with the pair; absent fields stay absent.
        let text = r#"{"guid":"g","ous":["app:a","space:b"],"internal_ip":"10.0.0.1","internal_routes":["r.x","g","*.r.x","r.x"],"owner":{"uid":7,"gid":8}}"#;
        assert_eq!(serde_json::to_string(&read).unwrap(), text);
        assert_eq!(container(text).unwrap(), read);
        for text in [
            r#"{"guid":"g"}"#,
            r#"{"guid":"g","external_ip":"10.0.0.1","internal_routes":[],"stopped":true}"#,
        ] {
            let read = container(text).unwrap();
            assert_eq!(serde_json::to_string(&read).unwrap(), text);
        }
        let bare = container(r#"{"guid":"g"}"#).unwrap();
        assert!(bare.container_to_container().is_none());
        assert_eq!(bare.identity().unwrap().addresses, [] as [IpAddr; 0]);
        let none = container(r#"{"guid":"g","internal_routes":[]}"#).unwrap();
        assert_eq!(
            none.container_to_container().unwrap().unwrap().dns_names,
            ["g"]
        );
        for wrong in [
            r#"{"guid":"g","routes":[]}"#,
            r#"{"guid":"g","owner":{"uid":7}}"#,
            r#"{"guid":"g","owner":{"uid":7,"gid":8,"user":9}}"#,
            r#"{"guid":"g","internal_ip":7}"#,
            r#"{"ous":[]}"#,
        ] {
            assert!(container(wrong).is_err(), "{wrong}");
        }
    }
}
