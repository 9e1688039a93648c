//! Domain filters: the names that a publisher may touch.

use regex::Regex;

use crate::record::{Name, NameError};

/// Label that no filter is likely to contain.
const PROBE: &str = "any-name-below";

/// Suffixes to include and to exclude. Exclusion wins; without inclusions everything else
/// is included.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DomainFilter {
    include: Vec<Suffix>,
    exclude: Vec<Suffix>,
    /// Regular expressions to include and to exclude, which replace the suffixes.
    patterns: Option<[Option<Pattern>; 2]>,
}

/// A regular expression on names in normalised form.
#[derive(Debug, Clone)]
struct Pattern(Regex);

impl PartialEq for Pattern {
    fn eq(&self, other: &Self) -> bool {
        self.0.as_str() == other.0.as_str()
    }
}

impl Eq for Pattern {}

impl DomainFilter {
    /// Parses suffixes. A leading dot excludes the apex itself; blank entries are ignored.
    pub fn new<'a>(
        include: impl IntoIterator<Item = &'a str>,
        exclude: impl IntoIterator<Item = &'a str>,
    ) -> Result<Self, NameError> {
        Ok(Self { include: suffixes(include)?, exclude: suffixes(exclude)?, patterns: None })
    }

    /// Returns the filter with regular expressions in place of the suffixes, if there are any.
    pub fn with_patterns(self, include: Option<&str>, exclude: Option<&str>) -> Result<Self, regex::Error> {
        let pattern = |text: Option<&str>| text.map(|text| Regex::new(text).map(Pattern)).transpose();
        let patterns = [pattern(include)?, pattern(exclude)?];
        Ok(Self { patterns: patterns.iter().any(Option::is_some).then_some(patterns), ..self })
    }

    /// Returns whether a zone may contain names that match.
    pub fn may_contain(&self, apex: &Name) -> bool {
        self.patterns.is_some()
            || self.include.is_empty()
            || self
                .include
                .iter()
                .any(|suffix| suffix.domain.is_within(apex) || apex.is_within(&suffix.domain))
    }

    /// Returns whether both filters match a name at or below one of `apexes`.
    pub fn overlaps(&self, other: &Self, apexes: &[Name]) -> bool {
        if self.patterns.is_some() || other.patterns.is_some() {
            // Whether two regular expressions match a common name cannot be decided by examples.
            return true;
        }
        let of_filters = self.include.iter().chain(&other.include).map(|suffix| &suffix.domain);
        let mut domains = apexes.iter().chain(of_filters);
        domains.any(|domain| {
            // Filters are suffixes, so an unlikely label stands for all names below a domain.
            let below = match domain.is_root() {
                true => Name::parse(PROBE),
                false => Name::parse(&format!("{PROBE}.{domain}")),
            };
            let names = [Some(domain.clone()), below.ok()];
            let is_in_zone = |name: &Name| apexes.iter().any(|apex| name.is_within(apex));
            let mut both = names.into_iter().flatten().filter(is_in_zone);
            both.any(|name| self.matches(&name) && other.matches(&name))
        })
    }

    /// Returns whether a name may be touched.
    pub fn matches(&self, name: &Name) -> bool {
        if let Some([include, exclude]) = &self.patterns {
            let is_matched = |pattern: &Pattern| pattern.0.is_match(name.as_str());
            return include.as_ref().is_none_or(is_matched) && !exclude.as_ref().is_some_and(is_matched);
        }
        let included = self.include.is_empty() || self.include.iter().any(|suffix| suffix.matches(name));
        included && !self.exclude.iter().any(|suffix| suffix.matches(name))
    }
}

/// One entry of a filter.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Suffix {
    domain: Name,
    below_only: bool,
}

impl Suffix {
    fn matches(&self, name: &Name) -> bool {
        name.is_within(&self.domain) && !(self.below_only && *name == self.domain)
    }
}

fn suffixes<'a>(entries: impl IntoIterator<Item = &'a str>) -> Result<Vec<Suffix>, NameError> {
    let entries = entries.into_iter().map(str::trim).filter(|entry| !entry.is_empty());
    let suffix = |entry: &str| match entry.strip_prefix('.') {
        Some(domain) if !domain.is_empty() => Ok(Suffix { domain: Name::parse(domain)?, below_only: true }),
        _ => Ok(Suffix { domain: Name::parse(entry)?, below_only: false }),
    };
    entries.map(suffix).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_replace_suffixes() {
        let plain = DomainFilter::new(["example.org"], []).unwrap();
        let filter = plain.clone().with_patterns(Some(r"^(a|b)\.example\.net$"), Some("^b")).unwrap();
        let matches = |name: &str| filter.matches(&Name::parse(name).unwrap());
        assert!(matches("A.example.net") && !matches("b.example.net") && !matches("x.example.org"));
        assert_eq!(plain.clone().with_patterns(None, None).unwrap(), plain);
        assert!(plain.with_patterns(Some("("), None).is_err());
    }

    #[test]
    fn common_names_make_filters_overlap() {
        let filter = |include: &[&str], exclude: &[&str]| {
            DomainFilter::new(include.iter().copied(), exclude.iter().copied()).unwrap()
        };
        let apexes = [Name::parse("example.org").unwrap()];
        for (one, other, expected) in [
            (filter(&[], &[]), filter(&[], &[]), true),
            (filter(&["a.example.org"], &[]), filter(&["b.example.org"], &[]), false),
            (filter(&["a.example.org"], &[]), filter(&["x.a.example.org"], &[]), true),
            (filter(&["a.example.org"], &[]), filter(&[], &["a.example.org"]), false),
            (filter(&[".a.example.org"], &[]), filter(&["a.example.org"], &[".a.example.org"]), false),
            (filter(&["example.net"], &[]), filter(&["example.net"], &[]), false),
        ] {
            assert_eq!(one.overlaps(&other, &apexes), expected, "{one:?} {other:?}");
            assert_eq!(other.overlaps(&one, &apexes), expected, "{other:?} {one:?}");
        }
    }
}
