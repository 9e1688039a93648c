//! The screen of `top`, redrawn until a key ends it.

use std::time::Duration;

use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use tokio::{
    sync::mpsc,
    time::{MissedTickBehavior, interval},
};

use super::{Problem, Watch, draw};

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

/// Redraws until `q`, Escape or Ctrl-C.
async fn redraw(watch: &mut Watch, terminal: &mut ratatui::DefaultTerminal) -> Result<(), Problem> {
    let mut keys = events();
    let mut ticks = interval(watch.period);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks.tick().await;
    loop {
        terminal
            .draw(|frame| draw::draw(frame, &watch.model, watch.every))
            .map_err(|_| Problem::OutputClosed)?;
        let redraw = tokio::time::sleep(REDRAW);
        tokio::pin!(redraw);
        let mut is_new = false;
        loop {
            // Lines are read without a pause, because the server drops lines for slow readers.
            tokio::select! {
                line = watch.lines.next() => {
                    watch.take(line.as_deref())?;
                    is_new = true;
                }
                () = &mut redraw, if is_new => break,
                _ = ticks.tick() => {
                    watch.refresh().await?;
                    break;
                }
                key = keys.recv() => if is_end(key) { return Ok(()) },
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
        Some(Event::Key(key)) if key.kind != KeyEventKind::Release => {
            matches!(key.code, KeyCode::Char('q') | KeyCode::Esc)
                || key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL)
        }
        Some(_) => false,
    }
}
