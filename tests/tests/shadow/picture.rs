//! The pictures of a report in README.md and docs/migration.md, drawn from a run on this machine.
//!
//! `UPDATE_PICTURES=1 cargo nextest run -p whole-system-tests --test shadow picture` writes `docs/terminal/shadow.svg`
//! and, by Debian's packages `chromium-headless-shell` and `fonts-dejavu-core`, `docs/terminal/shadow.png` again. The test
//! compares the words of the first column: the numbers differ from run to run.

use std::{
    fmt::Write,
    fs,
    net::{Ipv4Addr, SocketAddr},
    path::Path,
    process::Command,
};

use anyhow::{Result, ensure};
use serde_json::{Value, json};
use whole_system_tests::{
    namespace::Namespace,
    process::run,
    requires,
    server::{self, Server},
};

/// Size of a character in pixels.
const WIDTH: usize = 8;
const HEIGHT: usize = 17;

/// Draws lines of text on a dark ground.
fn svg(lines: &[&str]) -> String {
    let columns = lines.iter().map(|line| line.chars().count()).max();
    let width = (columns.unwrap_or(0) + 2) * WIDTH;
    let height = (lines.len() + 1) * HEIGHT;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" viewBox=\"0 0 {width} {height}\">\n\
         <rect width=\"100%\" height=\"100%\" rx=\"6\" fill=\"#1c1c1c\"/>\n\
         <g font-family=\"monospace\" font-size=\"13\" fill=\"#d0d0d0\" xml:space=\"preserve\">\n"
    );
    for (number, line) in lines.iter().enumerate() {
        let text = line
            .replace('&', "&amp;")
            .replace('<', "&lt;")
            .replace('>', "&gt;");
        let (x, y) = (WIDTH, (number + 1) * HEIGHT);
        let length = line.chars().count() * WIDTH;
        if length > 0 {
            // Writing to a string cannot fail.
            let _ = writeln!(
                svg,
                "<text x=\"{x}\" y=\"{y}\" textLength=\"{length}\">{text}</text>"
            );
        }
    }
    svg + "</g>\n</svg>\n"
}

/// Takes a picture of a page.
fn take_screenshot(page: &Path, picture: &Path) -> Result<()> {
    run(Command::new("chromium-headless-shell")
        .args([
            "--no-sandbox",
            "--hide-scrollbars",
            "--window-size=860,1240",
        ])
        .arg(format!("--screenshot={}", picture.display()))
        .arg(format!("file://{}", page.display())))
}

/// Returns the words at the beginning of each line, without numbers.
fn labels(lines: &[&str]) -> Vec<String> {
    lines
        .iter()
        // Which queries are examples is a matter of chance.
        .filter(|line| !line.starts_with("    ") && !line.contains("EDNS"))
        .map(|line| {
            let first: String = line.chars().take(26).collect();
            first
                .split_whitespace()
                .filter(|word| !word.contains(|letter: char| letter.is_ascii_digit()))
                .collect::<Vec<_>>()
                .join(" ")
        })
        .filter(|label| !label.is_empty() && !label.contains('.'))
        .collect()
}

#[test]
fn picture_shows_a_report() -> Result<()> {
    requires!(namespaces);
    let namespace = Namespace::new("shadowpicture")?;
    let folder = server::folder(&server::records_of_groups(&[3, 7]), None)?;
    let address = SocketAddr::from((Ipv4Addr::new(169, 254, 0, 2), 53));
    namespace.ip("addr add 169.254.0.2/32 dev lo")?;
    // Answers as bosh-dns does, where they differ.
    let extra = json!({"xdp": {"mode": "off"}, "recursor_errors": "nxdomain"});
    let server = Server::start(Some(&namespace), folder, address, &extra)?;
    let folder = server.folder.path();
    let mut config = server.settings()?;
    config["recursor_errors"] = Value::Null;
    config["xdp"] = json!({"mode": "auto"});
    let path = folder.join("shadow.json");
    fs::write(&path, config.to_string())?;
    let mut command = namespace.command(server::program()?)?;
    command.args([
        "shadow",
        "--ask",
        "169.254.0.2",
        "--rate",
        "1000",
        "--config",
    ]);
    let page = folder.join("shadow.html");
    command.arg(&path).arg("--html").arg(&page);
    let output = command.output()?;
    let text = String::from_utf8(output.stdout)?;
    ensure!(output.status.code() == Some(0), "{text}");
    // A path of this machine is in the remarks.
    let lines: Vec<&str> = text
        .lines()
        .filter(|line| !line.starts_with("remark") && !line.contains("stays off"))
        .collect();
    let long = lines.iter().find(|line| line.chars().count() > 80);
    ensure!(long.is_none(), "wider than 80 columns: {long:?}");
    let picture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/terminal/shadow.svg");
    if std::env::var_os("UPDATE_PICTURES").is_some() {
        fs::write(&picture, svg(&lines))?;
        take_screenshot(&page, &picture.with_extension("png"))?;
    }
    let drawn = fs::read_to_string(&picture)?;
    let drawn: Vec<String> = drawn
        .lines()
        .filter_map(|line| line.strip_prefix("<text ")?.split_once('>'))
        .map(|(_, text)| {
            text.trim_end_matches("</text>")
                .replace("&lt;", "<")
                .replace("&gt;", ">")
                .replace("&amp;", "&")
        })
        .collect();
    let drawn: Vec<&str> = drawn.iter().map(String::as_str).collect();
    ensure!(
        labels(&drawn) == labels(&lines),
        "docs/terminal/shadow.svg is stale: {:?}\n{:?}",
        labels(&drawn),
        labels(&lines)
    );
    Ok(())
}
