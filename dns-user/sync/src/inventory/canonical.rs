//! Canonical names of instance groups, networks and deployments.

/// A name that has no canonical form.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotCanonical {
    /// All of it was dropped.
    #[error("no letter, digit or hyphen is left of it")]
    Empty,
    /// A label neither begins nor ends with one.
    #[error("its canonical form has a hyphen at an end")]
    HyphenAtEnd,
    /// RFC 1035, section 2.3.4.
    #[error("its canonical form is longer than a label, 63 bytes")]
    TooLong,
}

/// The name as it stands in domain names: lower case, `_` becomes `-`, everything but
/// `[a-z0-9-]` is dropped. A hyphen at either end is an error, and so is nothing left.
pub fn canonical(name: &str) -> Result<String, NotCanonical> {
    let kept = name.chars().filter_map(|letter| match letter.to_ascii_lowercase() {
        '_' => Some('-'),
        letter if letter.is_ascii_lowercase() || letter.is_ascii_digit() || letter == '-' => Some(letter),
        _ => None,
    });
    let kept: String = kept.collect();
    if kept.is_empty() {
        return Err(NotCanonical::Empty);
    }
    if kept.starts_with('-') || kept.ends_with('-') {
        return Err(NotCanonical::HyphenAtEnd);
    }
    if kept.len() > 63 {
        return Err(NotCanonical::TooLong);
    }
    Ok(kept)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_become_labels() {
        assert_eq!(canonical("Diego_Cell.2"), Ok("diego-cell2".to_owned()));
        assert_eq!(canonical("a b/c"), Ok("abc".to_owned()));
        for bad in ["_x", "x-", "...", ""] {
            assert!(canonical(bad).is_err(), "{bad}");
        }
    }
}
