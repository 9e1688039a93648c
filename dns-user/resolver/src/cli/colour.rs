//! Colours of text output.

use std::{env, io::IsTerminal};

/// Colour of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Colour {
    Red,
    Yellow,
    Green,
}

impl Colour {
    /// Returns the parameter of the escape sequence (ECMA-48, SGR).
    fn code(self) -> u8 {
        match self {
            Self::Red => 31,
            Self::Yellow => 33,
            Self::Green => 32,
        }
    }
}

/// Returns whether output may have colours: on a terminal, unless `NO_COLOR` is set (no-color.org).
pub(super) fn wanted() -> bool {
    let is_set = |name| env::var_os(name).is_some_and(|value| !value.is_empty());
    let is_dumb = env::var_os("TERM").is_some_and(|term| term == "dumb");
    std::io::stdout().is_terminal() && !is_set("NO_COLOR") && !is_dumb
}

/// Colours the lines for which `colour` returns one. `text` is already escaped.
pub(super) fn lines(text: &str, colour: impl Fn(&str) -> Option<Colour>) -> String {
    let line = |line: &str| match colour(line) {
        Some(colour) => {
            let (text, end) = line.strip_suffix('\n').map_or((line, ""), |text| (text, "\n"));
            format!("\x1b[{}m{text}\x1b[0m{end}", colour.code())
        }
        None => line.to_owned(),
    };
    text.split_inclusive('\n').map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_chosen_lines_are_coloured() {
        let red = |line: &str| line.starts_with("FAIL").then_some(Colour::Red);
        assert_eq!(lines("ok\nFAIL x\nend", red), "ok\n\x1b[31mFAIL x\x1b[0m\nend");
    }
}
