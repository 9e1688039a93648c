//! The screen of `top`, redrawn until a key ends it.

use std::time::Duration;

use ratatui::{
    Frame,
    crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers},
    layout::{Constraint, Layout, Rect},
    style::{Color, Modifier, Style},
    text::Line,
    widgets::{Block, Paragraph, Row, Sparkline, Table},
};
use tokio::{
    sync::mpsc,
    time::{MissedTickBehavior, interval},
};

use super::{
    Problem, Watch,
    model::{Model, Ranked, rate_text},
};
use crate::operate::table::{count, duration, lease, milliseconds, or_dash, percent};
use dns_resolver::ops::readiness::CheckResult;

/// Minimum time between two redraws.
const REDRAW: Duration = Duration::from_millis(100);

/// Shows the screen until `q`, Escape or Ctrl-C.
pub(super) async fn show(watch: &mut Watch) -> Result<(), Problem> {
    // Restores the terminal when dropped, also on a panic.
    let mut terminal = ratatui::try_init()
        .map_err(|error| Problem::BadAnswer(format!("cannot draw on this terminal: {error}")))?;
    let result = redraw(watch, &mut terminal).await;
    ratatui::restore();
    result
}

async fn redraw(watch: &mut Watch, terminal: &mut ratatui::DefaultTerminal) -> Result<(), Problem> {
    let mut keys = events();
    let ended = async { while !is_end(keys.recv().await) {} };
    tokio::select! {
        // Also while a server that hangs is waited for.
        () = ended => Ok(()),
        result = follow(watch, terminal) => result,
    }
}

async fn follow(watch: &mut Watch, terminal: &mut ratatui::DefaultTerminal) -> Result<(), Problem> {
    let mut ticks = interval(watch.period);
    // A process that was stopped for a while would otherwise ask the server in a burst.
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    // The first tick is immediate; the counters have just been read.
    ticks.tick().await;
    loop {
        terminal
            .draw(|frame| draw(frame, &watch.model, watch.every))
            // The terminal is gone, and with it the reader of an error.
            .map_err(|_| Problem::OutputClosed)?;
        let redraw = tokio::time::sleep(REDRAW);
        tokio::pin!(redraw);
        let mut is_new = false;
        loop {
            // Lines are read without a pause, because the server drops lines for slow readers.
            tokio::select! {
                line = watch.lines.next() => {
                    watch.take(&line?)?;
                    is_new = true;
                }
                () = &mut redraw, if is_new => break,
                _ = ticks.tick() => {
                    watch.refresh().await?;
                    break;
                }
            }
        }
    }
}

/// Returns the terminal's events, read on a dedicated thread until the receiver is dropped or the
/// terminal is closed.
fn events() -> mpsc::Receiver<Event> {
    let (sender, receiver) = mpsc::channel(16);
    std::thread::spawn(move || {
        while !sender.is_closed() {
            // With a limit, so that the thread ends soon after its receiver.
            match event::poll(Duration::from_millis(200)) {
                Ok(false) => {}
                Ok(true) => {
                    let Ok(event) = event::read() else { return };
                    if sender.blocking_send(event).is_err() {
                        return;
                    }
                }
                Err(_) => return,
            }
        }
    });
    receiver
}

/// Returns whether an event ends the program; so does a closed terminal.
fn is_end(event: Option<Event>) -> bool {
    match event {
        None => true,
        // Some terminals report a key twice: when it is pressed and when it is released.
        Some(Event::Key(key)) if key.kind != KeyEventKind::Release => {
            matches!(key.code, KeyCode::Char('q') | KeyCode::Esc)
                // In raw mode the terminal sends no SIGINT (termios(3), ISIG).
                || key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL)
        }
        Some(_) => false,
    }
}

//----------- Drawing -----------------------------------------------------------

/// Below this width some columns are left out, so that the others fit into 80.
const WIDE: u16 = 100;

/// Below this height the names get lines of the other parts.
const TALL: u16 = 30;

/// Width of the clients' columns: an IPv4 address and two figures, or one on a narrow screen.
const CLIENTS: u16 = 33;
const NARROW_CLIENTS: u16 = 25;

fn draw(frame: &mut Frame<'_>, model: &Model, every: u32) {
    let is_wide = frame.area().width >= WIDE;
    let head = if is_wide { 3 } else { 4 };
    // In 24 lines the names matter more than the figures around them.
    let (curve, bottom) = match frame.area().height {
        TALL.. if is_wide => (5, 9),
        TALL.. => (4, 9),
        _ => (3, 6),
    };
    let [head, curve, middle, bottom, foot] = Layout::vertical([
        Constraint::Length(head),
        Constraint::Length(curve),
        Constraint::Min(6),
        Constraint::Length(bottom),
        Constraint::Length(1),
    ])
    .areas(frame.area());
    heading(frame, head, model);
    let history: Vec<u64> = model.history.iter().copied().collect();
    let title = format!(
        " replies a second, newest right: {} ",
        count(model.rate() as u64)
    );
    let newest = history
        .len()
        // Without the borders: a sparkline draws from the left and would cut off the newest values.
        .saturating_sub(usize::from(curve.width.saturating_sub(2)));
    frame.render_widget(
        Sparkline::default()
            .block(Block::bordered().title(title))
            .data(&history[newest..])
            .style(Style::new().fg(Color::Green)),
        curve,
    );
    let refuses = model
        .clients()
        .iter()
        .any(|client| model.refused(*client.key) > 0);
    // Names are long, so on a narrow screen the clients' second figure has to have a reason.
    let clients = if is_wide {
        CLIENTS.max(middle.width * 35 / 100)
    } else if refuses {
        CLIENTS
    } else {
        NARROW_CLIENTS
    };
    let clients = Constraint::Length(clients);
    let [names, clients] = Layout::horizontal([Constraint::Min(0), clients]).areas(middle);
    hottest(frame, names, model, is_wide);
    busiest(frame, clients, model, is_wide || refuses);
    let parts = if is_wide {
        [28, 34, 38].map(Constraint::Percentage)
    } else {
        [
            Constraint::Min(0),
            Constraint::Length(21),
            Constraint::Length(37),
        ]
    };
    let [misses, interfaces, recursors] = Layout::horizontal(parts).areas(bottom);
    passed_on(frame, misses, model);
    by_interface(frame, interfaces, model);
    by_recursor(frame, recursors, model);
    let sample = if every > 1 {
        format!("names and clients: one query in {every}; ")
    } else {
        String::new()
    };
    let suppressed = if model.suppressed > 0 {
        format!("{} lines suppressed; ", count(model.suppressed))
    } else {
        String::new()
    };
    frame.render_widget(
        Paragraph::new(format!(" {sample}{suppressed}q: quit")),
        foot,
    );
}

fn heading(frame: &mut Frame<'_>, area: Rect, model: &Model) {
    let status = &model.status;
    let readiness = match (status.ready, status.degraded) {
        (true, false) => ("ready", Color::Green),
        (true, true) => ("ready, degraded", Color::Yellow),
        (false, _) => ("NOT READY", Color::Red),
    };
    let bad: Vec<String> = status
        .checks
        .iter()
        .filter(|check| check.result != CheckResult::Ok)
        .map(|check| format!("{}: {}", check.name, check.detail))
        .collect();
    let version = or_dash(status.records.version);
    let fast_path = match &status.fast_path {
        Some(fast) => format!(
            "published {}, learned {}, map {:.0} % full, lease {}",
            count(fast.published as u64),
            count(fast.learned as u64),
            fast.map_fill * 100.0,
            lease(fast.lease_seconds)
        ),
        None => "no fast path".to_owned(),
    };
    let records = format!(
        " records version {version}: {} instances, {} aliases",
        count(status.records.instances as u64),
        count(status.records.aliases as u64)
    );
    let mut lines = vec![
        Line::styled(
            format!(
                " bosh-dns-xdp {} up {}: {} {}",
                status.server_version,
                duration(status.uptime_seconds),
                readiness.0,
                bad.join("; ")
            ),
            Style::new().fg(readiness.1).add_modifier(Modifier::BOLD),
        ),
        Line::raw(format!(
            " fast path {}/s ({} of replies)   userspace {}/s   to recursors {}/s",
            count(model.rates.fast as u64),
            model.hit_ratio(),
            count(model.rates.userspace as u64),
            count(model.rates.external as u64)
        )),
    ];
    if area.width >= WIDE {
        lines.push(Line::raw(format!("{records}; {fast_path}")));
    } else {
        lines.extend([Line::raw(records), Line::raw(format!(" {fast_path}"))]);
    }
    frame.render_widget(Paragraph::new(lines), area);
}

/// Draws the names; `has_errors` adds the standard errors of their rates.
fn hottest(frame: &mut Frame<'_>, area: Rect, model: &Model, has_errors: bool) {
    let rows = model
        .names()
        .into_iter()
        .take(usize::from(area.height))
        .map(
            |Ranked {
                 key,
                 queries,
                 per_second,
             }| {
                let (name, query_type) = key;
                let fast = percent(queries.fast, queries.total());
                let mut cells = vec![rate_text(per_second)];
                if has_errors {
                    cells.push(queries.error_text());
                }
                cells.extend([fast, query_type.clone(), name.clone()]);
                Row::new(cells)
            },
        );
    let (widths, header) = columns_of_names(has_errors);
    let table = Table::new(rows, widths)
        .header(Row::new(header).style(Modifier::BOLD))
        .block(Block::bordered().title(" hottest names "));
    frame.render_widget(table, area);
}

/// Returns the widths and titles of the columns of names.
fn columns_of_names(has_errors: bool) -> (Vec<Constraint>, Vec<&'static str>) {
    let name = Constraint::Min(12);
    let length = Constraint::Length;
    if has_errors {
        let widths = vec![length(7), length(6), length(7), length(5), name];
        (widths, vec!["/S", "", "FAST", "TYPE", "NAME"])
    } else {
        let widths = vec![length(7), length(5), length(5), name];
        (widths, vec!["/S", "FAST", "TYPE", "NAME"])
    }
}

/// Draws the clients; `has_second` adds refused queries, or the standard errors of the rates.
fn busiest(frame: &mut Frame<'_>, area: Rect, model: &Model, has_second: bool) {
    let clients = model.clients();
    let refuses = clients.iter().any(|client| model.refused(*client.key) > 0);
    let rows = clients.into_iter().take(usize::from(area.height)).map(
        |Ranked {
             key,
             queries,
             per_second,
         }| {
            let second = match (refuses, model.refused(*key)) {
                (false, _) => queries.error_text(),
                (true, 0) => String::new(),
                (true, refused) => count(refused),
            };
            let mut cells = vec![rate_text(per_second)];
            if has_second {
                cells.push(second);
            }
            cells.push(key.to_string());
            Row::new(cells)
        },
    );
    let mut widths = vec![Constraint::Length(7)];
    let mut header = vec!["/S"];
    if has_second {
        widths.push(Constraint::Length(7));
        header.push(if refuses { "REFUSED" } else { "" });
    }
    widths.push(Constraint::Min(15));
    header.push("CLIENT");
    let table = Table::new(rows, widths)
        .header(Row::new(header).style(Modifier::BOLD))
        .block(Block::bordered().title(" busiest clients "));
    frame.render_widget(table, area);
}

fn passed_on(frame: &mut Frame<'_>, area: Rect, model: &Model) {
    let rows = model
        .misses()
        .into_iter()
        .map(|(reason, rate)| Row::new([format!("{rate:.0}/s"), reason.to_owned()]));
    let table = Table::new(rows, [Constraint::Max(9), Constraint::Min(12)])
        .block(Block::bordered().title(" passed on by reason "));
    frame.render_widget(table, area);
}

fn by_interface(frame: &mut Frame<'_>, area: Rect, model: &Model) {
    let widths = [
        Constraint::Min(10),
        Constraint::Length(7),
        Constraint::Length(8),
    ];
    // A narrow table has no room for the hook beside a long name.
    let widths = &widths[..if area.width < 30 { 2 } else { 3 }];
    let interfaces = model
        .status
        .fast_path
        .iter()
        .flat_map(|fast| &fast.interfaces);
    let rows = interfaces.map(|interface| {
        let rate = model
            .rates
            .interfaces
            .get(&interface.name)
            .copied()
            .unwrap_or(0.0);
        let cells = [
            interface.name.clone(),
            format!("{rate:.0}/s"),
            interface.hook.clone(),
        ];
        Row::new(cells.into_iter().take(widths.len()))
    });
    let table = Table::new(rows, widths).block(Block::bordered().title(" interfaces "));
    frame.render_widget(table, area);
}

fn by_recursor(frame: &mut Frame<'_>, area: Rect, model: &Model) {
    let rows = model.status.recursors.iter().map(|recursor| {
        let mark = if recursor.preferred { "*" } else { " " };
        Row::new([
            format!("{mark} {}", recursor.address),
            milliseconds(recursor.latency_ms),
            recursor.recent_failures.to_string(),
        ])
    });
    let table = Table::new(
        rows,
        [
            Constraint::Min(18),
            Constraint::Length(9),
            Constraint::Length(6),
        ],
    )
    .header(Row::new(["", "LATENCY", "FAILED"]).style(Modifier::BOLD))
    .block(Block::bordered().title(" recursors "));
    frame.render_widget(table, area);
}
