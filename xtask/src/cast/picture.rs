//! A terminal's screen as an SVG picture.

use std::fmt::Write as _;

use vt100::Color;

/// Width of a character in pixels, at the size of the font that is asked for.
const WIDTH: f64 = 8.0;

/// Height of a line.
const HEIGHT: f64 = 17.0;

const MARGIN: f64 = 12.0;

/// What is behind everything.
const BACKGROUND: &str = "#16181d";

/// What is written without a colour.
const FOREGROUND: &str = "#d8dce4";

/// The sixteen colours of a terminal.
const COLOURS: [&str; 16] = [
    "#3b4048", "#e06c75", "#98c379", "#e5c07b", "#61afef", "#c678dd", "#56b6c2", "#d8dce4", "#6b717d",
    "#ef8a92", "#b2d99b", "#f0d49a", "#8cc6f5", "#d9a0ea", "#86d0d9", "#ffffff",
];

/// How characters look that stand together.
#[derive(Clone, Copy, PartialEq)]
struct Look {
    colour: Color,
    behind: Color,
    is_bold: bool,
    is_dim: bool,
}

/// Draws what is on the screen, without the empty lines at its end.
pub(super) fn draw(terminal: &vt100::Parser) -> String {
    let screen = terminal.screen();
    let (rows, columns) = screen.size();
    let (rows, columns): (u16, u16) = (rows.get(), columns.get());
    let shown = screen.contents().trim_end().lines().count();
    let (width, height) = (f64::from(columns) * WIDTH + 2.0 * MARGIN, shown as f64 * HEIGHT + 2.0 * MARGIN);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" viewBox=\"0 0 {width} {height}\">\n\
         <rect width=\"{width}\" height=\"{height}\" rx=\"8\" fill=\"{BACKGROUND}\"/>\n\
         <g font-family=\"DejaVu Sans Mono, Menlo, Consolas, monospace\" font-size=\"13.3\" xml:space=\"preserve\">\n"
    );
    for row in 0..rows.min(shown as u16) {
        let mut column = 0;
        while column < columns {
            let (look, text, next) = run(screen, row, column, columns);
            draw_run(&mut svg, row, column, next, look, &text);
            column = next;
        }
    }
    svg.push_str("</g>\n</svg>\n");
    svg
}

/// The characters from a column on that look the same, and the column after them.
fn run(screen: &vt100::Screen, row: u16, first: u16, columns: u16) -> (Look, String, u16) {
    let look = look(screen, row, first);
    let mut text = String::new();
    let mut column = first;
    while column < columns && self::look(screen, row, column) == look {
        let contents = screen.cell(row, column).map_or("", vt100::Cell::contents);
        text.push_str(if contents.is_empty() { " " } else { contents });
        column += 1;
    }
    (look, text, column)
}

/// How a character looks.
fn look(screen: &vt100::Screen, row: u16, column: u16) -> Look {
    let Some(cell) = screen.cell(row, column) else {
        return Look { colour: Color::Default, behind: Color::Default, is_bold: false, is_dim: false };
    };
    let (mut colour, mut behind) = (cell.fgcolor(), cell.bgcolor());
    if cell.inverse() {
        (colour, behind) = (
            if behind == Color::Default { Color::Idx(0) } else { behind },
            if colour == Color::Default { Color::Idx(7) } else { colour },
        );
    }
    Look { colour, behind, is_bold: cell.bold(), is_dim: cell.dim() }
}

/// Draws characters that look the same.
fn draw_run(svg: &mut String, row: u16, first: u16, next: u16, look: Look, text: &str) {
    let Look { colour, behind, is_bold, is_dim } = look;
    let (x, top) = (MARGIN + f64::from(first) * WIDTH, MARGIN + f64::from(row) * HEIGHT);
    let width = f64::from(next - first) * WIDTH;
    // Writing to a string does not fail.
    if behind != Color::Default {
        let fill = css(behind, BACKGROUND);
        let _ = writeln!(
            svg,
            "<rect x=\"{x}\" y=\"{top}\" width=\"{width}\" height=\"{HEIGHT}\" fill=\"{fill}\"/>"
        );
    }
    let trimmed = text.trim_end();
    if trimmed.is_empty() {
        return;
    }
    let leading = trimmed.chars().take_while(|character| *character == ' ').count();
    let trimmed = trimmed.trim_start();
    // Whatever font there is: each run is as wide as its columns.
    let length = trimmed.chars().count() as f64 * WIDTH;
    let (x, y, fill) = (x + leading as f64 * WIDTH, top + 13.0, css(colour, FOREGROUND));
    let _ = write!(svg, "<text x=\"{x}\" y=\"{y}\" textLength=\"{length}\" fill=\"{fill}\"");
    if is_bold {
        svg.push_str(" font-weight=\"bold\"");
    }
    if is_dim {
        svg.push_str(" opacity=\"0.7\"");
    }
    let text = trimmed.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    let _ = writeln!(svg, ">{text}</text>");
}

/// A colour in CSS.
fn css(colour: Color, default: &str) -> String {
    match colour {
        Color::Default => default.to_owned(),
        Color::Idx(index @ 0..16) => COLOURS[usize::from(index)].to_owned(),
        Color::Idx(index @ 16..232) => {
            // A cube of six steps a colour.
            let step = |part: u8| if part == 0 { 0 } else { 55 + 40 * part };
            let index = index - 16;
            format!("#{:02x}{:02x}{:02x}", step(index / 36), step(index / 6 % 6), step(index % 6))
        }
        Color::Idx(index) => {
            let grey = 8 + 10 * (index - 232);
            format!("#{grey:02x}{grey:02x}{grey:02x}")
        }
        Color::Rgb(red, green, blue) => format!("#{red:02x}{green:02x}{blue:02x}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_of_one_look_are_drawn_at_their_columns() {
        let mut terminal = vt100::Parser::new(3.try_into().unwrap(), 10.try_into().unwrap(), 0);
        terminal.process(b"a <\x1b[1;32mgo\x1b[0m\r\n\x1b[48;5;255m \x1b[38;5;16mx\x1b[0m");
        let svg = draw(&terminal);
        for golden in [
            "<text x=\"12\" y=\"25\" textLength=\"24\" fill=\"#d8dce4\">a &lt;</text>",
            "<text x=\"36\" y=\"25\" textLength=\"16\" fill=\"#98c379\" font-weight=\"bold\">go</text>",
            "<rect x=\"20\" y=\"29\" width=\"8\" height=\"17\" fill=\"#eeeeee\"/>",
            "<text x=\"20\" y=\"42\" textLength=\"8\" fill=\"#000000\">x</text>",
            "height=\"58\"",
        ] {
            assert!(svg.contains(golden), "{golden}\n{svg}");
        }
    }
}
