//! Formats numbers and JSON for display.

use std::fmt::Display;

use dns_command_line::table::Table;
use dns_core::terminal;
use serde_json::Value;

/// Formats a value, or a dash in place of none.
pub(super) fn or_dash(value: Option<impl Display>) -> String {
    match value {
        Some(value) => value.to_string(),
        None => "-".to_owned(),
    }
}

/// Formats a time in milliseconds, or a dash in place of none.
pub(super) fn milliseconds(time: Option<f64>) -> String {
    or_dash(time.map(|time| format!("{time:.1} ms")))
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
    // Seconds do not matter after days.
    parts.truncate(2);
    parts.join(" ")
}

/// Formats what is left of a lease.
pub(super) fn lease(left: Option<f64>) -> String {
    left.map_or_else(|| "RUN OUT".to_owned(), duration)
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
            // Older and newer servers may leave out members.
            let mut keys = Vec::new();
            for item in items {
                for (key, _) in item.as_object().into_iter().flatten() {
                    if !keys.contains(&key) {
                        keys.push(key);
                    }
                }
            }
            let mut table = Table::new(keys.iter().map(|key| key.replace('_', " ")));
            for item in items {
                let mut cells = Vec::new();
                for &key in &keys {
                    cells.push(item.get(key).map_or_else(String::new, plain));
                }
                table.line(cells);
            }
            table.text(indent)
        }
        Value::Array(items) => {
            let mut text = String::new();
            for item in items {
                let item = self::value(item, indent + 2);
                // The first line starts with the dash.
                text.push_str(&format!("{:indent$}- {}", "", item.trim_start()));
            }
            text
        }
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
    fn nested_values_are_shown() {
        let shown = value(
            &json!({"a_b": 1, "list": [{"x": 1}, {"x": 2, "y": null}], "none": []}),
            0,
        );
        assert_eq!(shown, "a b: 1\nlist:\n  x  y\n  1\n  2  -\nnone: -\n");
    }
}
