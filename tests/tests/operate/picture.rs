//! The picture of `top` in the README: twenty names, several clients, on a real terminal.
//!
//! `UPDATE_PICTURES=1 cargo nextest run -p whole-system-tests picture` writes `docs/terminal/top.svg` again. Clients
//! then arrive one after the other, until the chart is full. Without it the words of the picture must be those of
//! the screen.

use std::{
    collections::BTreeMap,
    env,
    fmt::Write as _,
    fs,
    net::{Ipv4Addr, SocketAddr, UdpSocket},
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use hickory_proto::rr::RecordType;
use serde_json::json;
use whole_system_tests::{
    client,
    metrics::wait_for_fast_path,
    namespace::Namespace,
    process::wait_until,
    requires,
    server::{self, Server},
    terminal::{Cell, Terminal},
};

use crate::dnsmasq;

const ROWS: usize = 42;
const COLUMNS: usize = 116;

/// Number of names, each with another number of queries.
const NAMES: u16 = 20;

const CLIENTS: u8 = 6;

/// Returns the screen as an SVG document.
fn svg(cells: &[Vec<Cell>]) -> Result<String> {
    let (width, height) = (COLUMNS * 8 + 24, ROWS * 17 + 24);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" viewBox=\"0 0 {width} {height}\">\n\
         <rect width=\"{width}\" height=\"{height}\" rx=\"8\" fill=\"#16181d\"/>\n\
         <g font-family=\"DejaVu Sans Mono, Menlo, Consolas, monospace\" font-size=\"13.3\" xml:space=\"preserve\">\n"
    );
    for (row, line) in cells.iter().enumerate() {
        let mut column = 0;
        for run in line.chunk_by(|one, other| (one.colour, one.bold) == (other.colour, other.bold))
        {
            let text: String = run.iter().map(|cell| cell.character).collect();
            let start = column + text.len() - text.trim_start().len();
            column += run.len();
            let text = text.trim();
            if text.is_empty() {
                continue;
            }
            let escaped = text.replace('&', "&amp;").replace('<', "&lt;");
            let weight = if run[0].bold {
                " font-weight=\"bold\""
            } else {
                ""
            };
            let (x, y, length) = (12 + start * 8, 25 + row * 17, text.chars().count() * 8);
            writeln!(
                svg,
                "<text x=\"{x}\" y=\"{y}\" textLength=\"{length}\" fill=\"{}\"{weight}>{escaped}</text>",
                run[0].colour
            )?;
        }
    }
    svg.push_str("</g>\n</svg>\n");
    Ok(svg)
}

/// Returns the words of the screen that do not depend on traffic: of the head, the frames, the headings and the foot.
///
/// A line of headings has one that is asked for here, because bold type is lost in text.
fn words(lines: &[String]) -> Vec<String> {
    let used = lines
        .iter()
        .rposition(|line| !line.trim().is_empty())
        .unwrap_or_default();
    let is_fixed = |(row, line): &(usize, &String)| {
        *row < 3
            || *row == used
            || ["┌", "CLIENT", "LATENCY"]
                .iter()
                .any(|mark| line.contains(mark))
    };
    let fixed = lines
        .iter()
        .enumerate()
        .filter(is_fixed)
        .map(|(row, line)| match row {
            // Version and time are before the state.
            0 => line
                .split_once(": ")
                .map_or(line.as_str(), |(_, state)| state),
            _ => line.as_str(),
        });
    fixed
        .flat_map(|line| line.split(|character: char| !character.is_alphabetic()))
        .filter(|word| word.len() > 1)
        .map(str::to_owned)
        .collect()
}

/// Returns the lines of text of a picture that [`svg`] wrote.
fn lines_of(svg: &str) -> Vec<String> {
    let mut lines = BTreeMap::<u32, String>::new();
    for element in svg.lines().filter_map(|line| line.strip_prefix("<text ")) {
        let place = element
            .split("y=\"")
            .nth(1)
            .and_then(|rest| rest.split('"').next()?.parse().ok());
        let text = element
            .split_once('>')
            .map_or("", |(_, text)| text.trim_end_matches("</text>"));
        let line = lines.entry(place.unwrap_or_default()).or_default();
        line.push(' ');
        line.push_str(text);
    }
    lines.into_values().collect()
}

/// Time between the arrivals of two clients, for the picture: together they fill the chart.
const ARRIVAL: Duration = Duration::from_secs(19);

/// Returns whether the picture is drawn again.
fn is_drawn() -> bool {
    env::var_os("UPDATE_PICTURES").is_some()
}

/// Sends queries from a loopback address until `done`; the first names are the most frequent. A few are for names
/// outside the fleet, which userspace forwards.
fn query(client: u8, server: SocketAddr, done: &AtomicBool) -> Result<()> {
    if is_drawn() {
        thread::sleep(ARRIVAL * u32::from(client));
    }
    let socket = UdpSocket::bind((Ipv4Addr::new(127, 0, 0, 10 + client), 0))?;
    socket.connect(server)?;
    socket.set_read_timeout(Some(Duration::from_secs(1)))?;
    let names = (1..=NAMES).map(|size| {
        Ok(client::query(&format!("q-s0.q-g{size}.bosh."), RecordType::A, None)?.to_vec()?)
    });
    let names: Vec<Vec<u8>> = names.collect::<Result<_>>()?;
    let outside = client::query("www.example.org.", RecordType::A, None)?.to_vec()?;
    let mut reply = [0; 1500];
    while !done.load(Ordering::Relaxed) {
        for (rank, query) in names.iter().enumerate() {
            for _ in 0..=(usize::from(NAMES) - rank) / usize::from(1 + client) {
                socket.send(query)?;
                // A lost reply is not missed.
                let _ = socket.recv(&mut reply);
            }
        }
        socket.send(&outside)?;
        let _ = socket.recv(&mut reply);
        thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

#[test]
fn picture_shows_twenty_names() -> Result<()> {
    requires!(namespaces, bpf);
    let namespace = Namespace::new("picture")?;
    let sizes: Vec<u16> = (1..=NAMES).collect();
    let folder = server::folder(&server::records_of_groups(&sizes), None)?;
    let (_recursor, recursor) = dnsmasq::start(&namespace, 9)?;
    let settings = json!({
        "metrics": {"enabled": true}, "control": {"socket": folder.path().join("control.sock")},
        "xdp": {"interfaces": ["lo"]}, "disable_recursors": false, "recursors": [recursor],
    });
    let server = Server::start(
        Some(&namespace),
        folder,
        ([127, 0, 0, 1], 53).into(),
        &settings,
    )?;
    wait_for_fast_path(&namespace)?;
    let mut command = namespace.command(server::program()?)?;
    command
        .args(["top", "--seconds", "1", "--config", "config.json"])
        .env("TERM", "xterm-256color")
        .current_dir(server.folder.path());
    let done = AtomicBool::new(false);
    thread::scope(|scope| -> Result<()> {
        for client in 0..CLIENTS {
            let (namespace, done, address) = (&namespace, &done, server.address);
            scope.spawn(move || namespace.run(|| query(client, address, done)));
        }
        let result = (|| {
            let mut top = Terminal::start(command, (COLUMNS, ROWS))?;
            let shows_all = |lines: &[String]| {
                let shows = |text: &str| lines.iter().any(|line| line.contains(text));
                (1..=NAMES).all(|size| shows(&format!("q-s0.q-g{size}.bosh.")))
                    && (0..CLIENTS).all(|client| shows(&format!("127.0.0.{}", 10 + client)))
            };
            let limit = Duration::from_secs(if is_drawn() { 200 } else { 120 });
            let waited = wait_until("the screen", limit, || shows_all(&top.lines()));
            ensure!(waited.is_ok(), "{}", top.lines().join("\n"));
            // The panels of recursors and reasons are in use.
            let waited = wait_until("the panels", limit, || {
                let lines = top.lines();
                lines
                    .iter()
                    .any(|line| line.contains(&recursor.to_string()) && line.contains(" ms"))
                    && lines.iter().any(|line| line.contains("not_published"))
            });
            ensure!(waited.is_ok(), "{}", top.lines().join("\n"));
            // About 1000 sampled lines per second: after some seconds the estimate is narrow.
            let is_narrow = |lines: &[String]| {
                let error = lines.iter().find_map(|line| {
                    line.split('±')
                        .nth(1)?
                        .split_whitespace()
                        .next()?
                        .parse()
                        .ok()
                });
                error.is_some_and(|error: f64| error <= 12.0)
            };
            let waited = wait_until("a narrow estimate", Duration::from_secs(120), || {
                is_narrow(&top.lines())
            });
            ensure!(waited.is_ok(), "{}", top.lines().join("\n"));
            let picture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/terminal/top.svg");
            if is_drawn() {
                // The chart shows one column a second.
                thread::sleep(ARRIVAL);
                fs::write(&picture, svg(&top.screen())?)?;
            }
            let drawn = words(&lines_of(&fs::read_to_string(&picture)?));
            // The state may be "degraded" for a moment.
            wait_until("the words of the picture", limit, || {
                words(&top.lines()) == drawn
            })
            .with_context(|| {
                format!(
                    "docs/terminal/top.svg is stale: {drawn:?}\n{:?}",
                    words(&top.lines())
                )
            })?;
            top.press('q')?;
            ensure!(top.finish(Duration::from_secs(120))?.0.success());
            Ok(())
        })();
        done.store(true, Ordering::Relaxed);
        result
    })
}
