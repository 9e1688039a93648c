//! Tables for people: text in aligned columns.

use std::fmt::Write as _;

use dns_core::terminal;

/// Text in aligned columns.
pub struct Table {
    /// Rows, starting with the heading.
    lines: Vec<Vec<String>>,
}

impl Table {
    /// Creates a table with this heading and no rows.
    pub fn new(heading: impl IntoIterator<Item = impl Into<String>>) -> Self {
        Self {
            lines: vec![heading.into_iter().map(Into::into).collect()],
        }
    }

    /// Adds a row; control characters are escaped, so that it stays on one line.
    pub fn line(&mut self, cells: impl IntoIterator<Item = String>) {
        let mut line = Vec::new();
        for cell in cells {
            line.push(terminal::line(&cell).into_owned());
        }
        self.lines.push(line);
    }

    /// Adds an empty line and the table, unless it has only a heading.
    pub fn add_to(&self, text: &mut String, indent: usize) {
        if self.lines.len() > 1 {
            text.push('\n');
            text.push_str(&self.text(indent));
        }
    }

    /// Returns the table as text, each line indented by `indent` spaces.
    pub fn text(&self, indent: usize) -> String {
        let mut widths: Vec<usize> = Vec::new();
        for line in &self.lines {
            widths.resize(widths.len().max(line.len()), 0);
            for (cell, width) in line.iter().zip(&mut widths) {
                // Characters, since a byte count would misalign names with letters beyond ASCII.
                *width = (*width).max(cell.chars().count());
            }
        }
        let mut text = String::new();
        for line in &self.lines {
            let mut out = " ".repeat(indent);
            for (cell, width) in line.iter().zip(&widths) {
                // Writing to a string cannot fail.
                let _ = write!(out, "{cell:<width$}  ");
            }
            // Spaces at the end would wrap on a narrow terminal and get into copied texts.
            text.push_str(out.trim_end());
            text.push('\n');
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned() {
        let mut table = Table::new(["NAME", "N"]);
        table.line(["a\nb".into(), "1".into()]);
        table.line(["longer".into(), "2".into()]);
        assert_eq!(table.text(1), " NAME    N\n a\\nb    1\n longer  2\n");
    }
}
