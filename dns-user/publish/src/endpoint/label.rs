//! Labels, and selectors in the syntax of `kubectl -l` and external-dns's `--label-filter`.

use std::{collections::BTreeMap, fmt};

use crate::text::Reader;

/// Labels of a document.
pub type Labels = BTreeMap<String, String>;

/// Parses `metadata.labels`; reports malformed ones.
pub fn read_labels(reader: Option<Reader<'_>>) -> Labels {
    let Some(mut fields) = reader.and_then(|reader| reader.fields()) else { return Labels::new() };
    let label = |(name, value): (&str, Reader<'_>)| Some((name.to_owned(), value.text()?.to_owned()));
    fields.others().into_iter().filter_map(label).collect()
}

/// A label selector: `a=b,c!=d,e in (x,y),f notin (z),g,!h`. All requirements must hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Selector(Vec<Requirement>);

#[derive(Clone, Debug, PartialEq, Eq)]
struct Requirement {
    label: String,
    test: Test,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Test {
    Exists,
    Absent,
    In(Vec<String>),
    NotIn(Vec<String>),
}

impl Selector {
    /// Parses the text form from a document; reports errors.
    pub fn read(reader: &Reader<'_>) -> Option<Self> {
        match Self::parse(reader.text()?) {
            Ok(selector) => Some(selector),
            Err(reason) => {
                reader.problem(reason, "use the syntax of kubectl -l: app=router,tier in (a,b),!canary");
                None
            }
        }
    }

    /// Parses the text form; an empty text selects everything.
    pub fn parse(text: &str) -> Result<Self, String> {
        let parts =
            split_outside_parentheses(text).into_iter().map(str::trim).filter(|part| !part.is_empty());
        parts.map(Requirement::parse).collect::<Result<_, _>>().map(Self)
    }

    /// Returns whether all requirements hold. As in Kubernetes, `!=` and `notin` also hold for a
    /// missing label.
    pub fn matches(&self, labels: &Labels) -> bool {
        self.0.iter().all(|Requirement { label, test }| match (labels.get(label), test) {
            (value, Test::Exists) => value.is_some(),
            (value, Test::Absent) => value.is_none(),
            (Some(value), Test::In(values)) => values.contains(value),
            (None, Test::In(_)) => false,
            (Some(value), Test::NotIn(values)) => !values.contains(value),
            (None, Test::NotIn(_)) => true,
        })
    }
}

impl Requirement {
    fn parse(text: &str) -> Result<Self, String> {
        let set = |word: &str| {
            let (label, values) = text.split_once(word)?;
            let values = values.trim().strip_prefix('(')?.strip_suffix(')')?;
            Some((label, values.split(',').map(|value| value.trim().to_owned()).collect::<Vec<_>>()))
        };
        let (label, test) = if let Some((label, values)) = set(" notin ") {
            (label, Test::NotIn(values))
        } else if let Some((label, values)) = set(" in ") {
            (label, Test::In(values))
        } else if let Some((label, value)) = text.split_once("!=") {
            (label, Test::NotIn(vec![value.trim().to_owned()]))
        } else if let Some((label, value)) = text.split_once("==").or_else(|| text.split_once('=')) {
            (label, Test::In(vec![value.trim().to_owned()]))
        } else if let Some(label) = text.strip_prefix('!') {
            (label, Test::Absent)
        } else {
            (text, Test::Exists)
        };
        let label = label.trim();
        let is_key = |letter: char| letter.is_ascii_alphanumeric() || "-._/".contains(letter);
        if label.is_empty() || !label.chars().all(is_key) {
            return Err(format!("{text:?} is not a label requirement"));
        }
        Ok(Self { label: label.to_owned(), test })
    }
}

impl fmt::Display for Selector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, Requirement { label, test }) in self.0.iter().enumerate() {
            if index > 0 {
                f.write_str(",")?;
            }
            match test {
                Test::Exists => f.write_str(label)?,
                Test::Absent => write!(f, "!{label}")?,
                Test::In(values) if values.len() == 1 => write!(f, "{label}={}", values[0])?,
                Test::In(values) => write!(f, "{label} in ({})", values.join(","))?,
                Test::NotIn(values) if values.len() == 1 => write!(f, "{label}!={}", values[0])?,
                Test::NotIn(values) => write!(f, "{label} notin ({})", values.join(","))?,
            }
        }
        Ok(())
    }
}

fn split_outside_parentheses(text: &str) -> Vec<&str> {
    let (mut parts, mut start, mut depth) = (Vec::new(), 0, 0_u32);
    for (at, letter) in text.char_indices() {
        match letter {
            '(' => depth += 1,
            ')' => depth = depth.saturating_sub(1),
            ',' if depth == 0 => {
                parts.push(&text[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    parts.push(&text[start..]);
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(pairs: &[(&str, &str)]) -> Labels {
        pairs.iter().map(|(label, value)| ((*label).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn requirements_follow_kubernetes() {
        let router = labels(&[("app", "router"), ("tier", "a")]);
        for (text, wanted) in [
            ("", true),
            ("app=router", true),
            ("app == router, tier in (a, b)", true),
            ("app!=router", false),
            ("stage!=test", true),
            ("tier notin (a,b)", false),
            ("stage notin (test)", true),
            ("tier,!canary", true),
            ("canary", false),
            ("stage in (test)", false),
        ] {
            let selector = Selector::parse(text).unwrap();
            assert_eq!(selector.matches(&router), wanted, "{text}");
            assert_eq!(Selector::parse(&selector.to_string()).unwrap(), selector, "{text}");
        }
        for text in ["=router", "a b", "tier in a,b"] {
            assert!(Selector::parse(text).is_err(), "{text}");
        }
    }
}
