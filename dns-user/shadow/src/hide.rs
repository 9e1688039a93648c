//! Names and addresses in reports that are shared.

use std::hash::Hasher;

use siphasher::sip::SipHasher13;

/// The names and addresses that a report may show.
#[derive(Clone, Debug)]
pub struct Disclosure {
    /// Whether addresses of clients are shown.
    pub shows_clients: bool,
    /// Key of the hashes; `None` shows names and addresses as they are.
    key: Option<(u64, u64)>,
}

impl Disclosure {
    /// Creates the choice. With `hashes`, names and addresses are replaced by hashes with a random key, so
    /// equal names stay equal within a report, and no list of likely names reveals them.
    pub fn new(shows_clients: bool, hashes: bool) -> Self {
        Self {
            shows_clients,
            key: if hashes { Some(rand::random()) } else { None },
        }
    }

    /// Returns whether names and addresses are hashed.
    pub fn is_hashed(&self) -> bool {
        self.key.is_some()
    }

    /// Returns a name, with hashes for its labels. Labels of the query language stay: they identify nothing.
    pub fn name(&self, name: &str) -> String {
        let Some(key) = self.key else {
            return name.to_owned();
        };
        let mut hidden = String::new();
        for label in name.trim_end_matches('.').split('.') {
            // The same name in another letter case has the same hash.
            let lower = label.to_ascii_lowercase();
            if is_query(&lower) {
                hidden += label;
            } else {
                hidden += &format!("x{}", short_hash(key, &lower));
            }
            hidden.push('.');
        }
        hidden
    }

    /// Returns data of a record, an address or another text, or its hash.
    pub fn data(&self, data: &str) -> String {
        match self.key {
            Some(key) => format!("#{}", short_hash(key, data)),
            None => data.to_owned(),
        }
    }

    /// Returns free text, such as the values of a finding, or nothing if it may contain names.
    pub fn text<'a>(&self, text: &'a str) -> &'a str {
        if self.is_hashed() { "" } else { text }
    }
}

/// Returns whether a label is a query (`q-s0`, `q-m1s0`) without a value that someone chose.
fn is_query(label: &str) -> bool {
    let Some(criteria) = label.strip_prefix("q-") else {
        return false;
    };
    for (at, byte) in criteria.bytes().enumerate() {
        match byte {
            b'a' | b'g' | b'i' | b'm' | b'n' | b's' | b'y' => {}
            b'0'..=b'9' if at > 0 => {}
            _ => return false,
        }
    }
    !criteria.is_empty()
}

fn short_hash((first, second): (u64, u64), text: &str) -> String {
    let mut hasher = SipHasher13::new_with_keys(first, second);
    hasher.write(text.as_bytes());
    // Long enough to tell the names of a report apart, and short enough to read.
    format!("{:08x}", hasher.finish() as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashed_names_show_only_queries() {
        let hidden = Disclosure::new(false, true);
        let name = hidden.name("q-m12s0.web.NET.dep.bosh.");
        assert!(name.starts_with("q-m12s0.x"), "{name}");
        for part in ["web", "net", "dep", "bosh", "NET"] {
            assert!(!name.contains(part), "{name}");
        }
        assert_eq!(hidden.name("Web."), hidden.name("web."));
        assert!(hidden.name("Q-S0.q-G1.bosh.").starts_with("Q-S0.q-G1.x"));
        assert_eq!(hidden.text("A 10.0.0.1"), "");
        assert_ne!(hidden.data("10.0.0.1"), "10.0.0.1");
        // A name that only looks like a query is hashed.
        assert!(!hidden.name("q-secret.bosh.").contains("secret"));
        let open = Disclosure::new(false, false);
        assert_eq!(open.name("Web."), "Web.");
        // Two reports cannot be joined by their hashes.
        let other = Disclosure::new(false, true);
        assert_ne!(hidden.name("web."), other.name("web."));
    }
}
