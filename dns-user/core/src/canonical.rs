//! Canonical names of instance groups, networks and deployments.

/// The reason why a name has no canonical form.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotCanonical {
    /// No valid character remains.
    #[error("it has no letter, digit or hyphen")]
    Empty,
    /// The canonical form starts with a hyphen, which is invalid for a label.
    #[error("its canonical form cannot start with a hyphen")]
    LeadingHyphen,
    /// The canonical form ends with a hyphen, which is invalid for a label.
    #[error("its canonical form cannot end with a hyphen")]
    TrailingHyphen,
    /// The canonical form exceeds a label (RFC 1035, section 2.3.4).
    #[error("its canonical form is longer than a label, 63 bytes")]
    TooLong,
}

/// Returns the form of a name that directors use in domain names: lower case, `_` replaced by `-`,
/// other characters outside `[a-z0-9-]` dropped.
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
    if kept.starts_with('-') {
        return Err(NotCanonical::LeadingHyphen);
    }
    if kept.ends_with('-') {
        return Err(NotCanonical::TrailingHyphen);
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
    }

    #[test]
    fn unusable_names_are_refused() {
        for (name, error) in [
            ("_x", NotCanonical::LeadingHyphen),
            ("x-", NotCanonical::TrailingHyphen),
            ("...", NotCanonical::Empty),
            ("", NotCanonical::Empty),
        ] {
            assert_eq!(canonical(name), Err(error), "{name}");
        }
    }
}
