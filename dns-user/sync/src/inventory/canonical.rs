//! Canonical names of instance groups, networks and deployments.

/// The name as it stands in domain names: lower case, `_` becomes `-`, everything but
/// `[a-z0-9-]` is dropped. A hyphen at either end is an error, and so is nothing left.
pub fn canonical(name: &str) -> Result<String, &'static str> {
    let kept = name.chars().filter_map(|letter| match letter.to_ascii_lowercase() {
        '_' => Some('-'),
        letter if letter.is_ascii_lowercase() || letter.is_ascii_digit() || letter == '-' => Some(letter),
        _ => None,
    });
    let kept: String = kept.collect();
    if kept.is_empty() {
        return Err("no letter, digit or hyphen is left of it");
    }
    if kept.starts_with('-') || kept.ends_with('-') {
        return Err("its canonical form has a hyphen at an end");
    }
    if kept.len() > 63 {
        return Err("its canonical form is longer than a label, 63 bytes");
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
