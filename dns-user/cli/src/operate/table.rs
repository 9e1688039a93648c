//! Formats tables and numbers for display.

use std::fmt::Write;

use dns_core::terminal;
use serde_json::Value;

/// Text in aligned columns.
pub(super) struct Table {
    /// Rows, starting with the heading.
    lines: Vec<Vec<String>>,
}

impl Table {
    pub(super) fn new(heading: &[&str]) -> Self {
        Self {
            lines: vec![heading.iter().map(|&text| text.to_owned()).collect()],
        }
    }

    /// Adds a row; control characters are escaped, so that it stays on one line.
    pub(super) fn line(&mut self, cells: impl IntoIterator<Item = String>) {
        self.lines.push(
            cells
                .into_iter()
                .map(|cell| terminal::line(&cell).into_owned())
                .collect(),
        );
    }

    /// Adds an empty line and the table, unless it has only a heading.
    pub(super) fn add_to(&self, text: &mut String, indent: usize) {
        if self.lines.len() > 1 {
            text.push('\n');
            text.push_str(&self.text(indent));
        }
    }

    /// Returns the table as text, each line indented by `indent` spaces.
    pub(super) fn text(&self, indent: usize) -> String {
        let columns = self.lines.iter().map(Vec::len).max().unwrap_or(0);
        let width = |column: usize| {
            self.lines
                .iter()
                .filter_map(|line| line.get(column))
                .map(|cell| cell.chars().count())
                .max()
        };
        let widths: Vec<usize> = (0..columns)
            .map(|column| width(column).unwrap_or(0))
            .collect();
        let mut text = String::new();
        for line in &self.lines {
            let mut out = " ".repeat(indent);
            for (cell, width) in line.iter().zip(&widths) {
                // Writing to a string cannot fail.
                let _ = write!(out, "{cell:<width$}  ");
            }
            text.push_str(out.trim_end());
            text.push('\n');
        }
        text
    }
}

/// Formats a number with thousands separators: `12,345`.
pub(super) fn count(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (place, digit) in digits.chars().enumerate() {
        if place > 0 && (digits.len() - place).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Formats a duration with its two largest units: `3d 4h`, `5m 6s`, `0.3s`.
pub(super) fn duration(seconds: f64) -> String {
    if seconds < 10.0 {
        return format!("{seconds:.1}s");
    }
    let seconds = seconds as u64;
    let units = [("d", 86_400), ("h", 3_600), ("m", 60), ("s", 1)];
    let mut rest = seconds;
    let mut parts = Vec::new();
    for (unit, size) in units {
        if rest >= size || !parts.is_empty() {
            parts.push(format!("{}{unit}", rest / size));
            rest %= size;
        }
    }
    parts.truncate(2);
    parts.join(" ")
}

/// Formats a percentage: `97.3 %`, or a dash if `whole` is zero.
pub(super) fn percent(part: u64, whole: u64) -> String {
    if whole == 0 {
        "-".to_owned()
    } else {
        format!("{:.1} %", part as f64 * 100.0 / whole as f64)
    }
}

/// Formats any JSON value as indented text: objects as `key: value`, lists of objects as tables.
pub(super) fn value(value: &Value, indent: usize) -> String {
    match value {
        Value::Object(members) => {
            let mut text = String::new();
            for (key, member) in members {
                let key = key.replace('_', " ");
                if is_plain(member) {
                    text.push_str(&format!("{:indent$}{key}: {}\n", "", plain(member)));
                } else {
                    text.push_str(&format!(
                        "{:indent$}{key}:\n{}",
                        "",
                        self::value(member, indent + 2)
                    ));
                }
            }
            text
        }
        Value::Array(items) if !items.is_empty() && items.iter().all(is_flat_object) => {
            let mut keys: Vec<&str> = Vec::new();
            for item in items.iter().filter_map(Value::as_object) {
                keys.extend(
                    item.keys()
                        .map(String::as_str)
                        .filter(|key| !keys.contains(key))
                        .collect::<Vec<_>>(),
                );
            }
            let headings: Vec<String> = keys.iter().map(|key| key.replace('_', " ")).collect();
            let mut table = Table::new(&headings.iter().map(String::as_str).collect::<Vec<_>>());
            for item in items {
                table.line(
                    keys.iter()
                        .map(|key| item.get(key).map_or_else(String::new, plain)),
                );
            }
            table.text(indent)
        }
        Value::Array(items) => items
            .iter()
            .map(|item| {
                let text = self::value(item, indent + 2);
                // The first line starts with the dash.
                format!("{:indent$}- {}", "", text.trim_start())
            })
            .collect(),
        other => format!("{:indent$}{}\n", "", plain(other)),
    }
}

/// Returns whether a value fits on the line of its key.
fn is_plain(value: &Value) -> bool {
    match value {
        Value::Object(_) => false,
        Value::Array(items) => items
            .iter()
            .all(|item| !item.is_object() && !item.is_array()),
        _ => true,
    }
}

/// Returns whether a value is an object whose members fit into cells.
fn is_flat_object(value: &Value) -> bool {
    value
        .as_object()
        .is_some_and(|members| members.values().all(is_plain))
}

/// Formats a value on one line.
pub(super) fn plain(value: &Value) -> String {
    match value {
        Value::Null => "-".to_owned(),
        Value::Bool(true) => "yes".to_owned(),
        Value::Bool(false) => "no".to_owned(),
        Value::String(text) => terminal::line(text).into_owned(),
        Value::Number(number) => match number.as_f64().filter(|_| number.is_f64()) {
            Some(fraction) => format!("{fraction:.3}"),
            None => number.to_string(),
        },
        Value::Array(items) if items.is_empty() => "-".to_owned(),
        Value::Array(items) => items.iter().map(plain).collect::<Vec<_>>().join(", "),
        Value::Object(_) => value.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn figures_are_readable() {
        assert_eq!(count(7), "7");
        assert_eq!(count(1_234_567), "1,234,567");
        assert_eq!(duration(0.25), "0.2s");
        assert_eq!(duration(75.0), "1m 15s");
        assert_eq!(duration(90_061.0), "1d 1h");
        assert_eq!(percent(1, 0), "-");
        assert_eq!(percent(973, 1000), "97.3 %");
    }

    #[test]
    fn columns_are_aligned() {
        let mut table = Table::new(&["NAME", "N"]);
        table.line(["a\nb".into(), "1".into()]);
        table.line(["longer".into(), "2".into()]);
        assert_eq!(table.text(1), " NAME    N\n a\\nb    1\n longer  2\n");
    }

    #[test]
    fn nested_values_are_shown() {
        let shown = value(
            &json!({"a_b": 1, "list": [{"x": 1}, {"x": 2, "y": null}], "none": []}),
            0,
        );
        assert_eq!(shown, "a b: 1\nlist:\n  x  y\n  1\n  2  -\nnone: -\n");
    }
}
