//! `top`: shows the most frequent names and clients.
//!
//! Rates come from the counters of `/status` and are exact for both paths. Names and clients come
//! from the tap, sampled to about [`LINES_PER_SECOND`] lines per second regardless of traffic; the
//! server counts nothing by name while there is no viewer.

mod draw;
mod model;

use std::{io::IsTerminal, time::Duration};

use clap::Args;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use tokio::sync::mpsc;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until};

use self::model::Model;
use super::{
    Problem,
    client::{Client, Lines, wait_for},
    connection::Connection,
    print, print_json,
    tap::{Filter, Sent},
};
use crate::ops::status::Status;

/// Target rate of tap lines per second: enough to rank names, cheap for the server.
const LINES_PER_SECOND: f64 = 1000.0;

/// Minimum time between two redraws of the screen.
const REDRAW: Duration = Duration::from_millis(100);

#[derive(Debug, Args)]
pub(in crate::cli) struct Top {
    /// Where the server is.
    #[command(flatten)]
    connection: Connection,
    /// Which queries are counted by name and client.
    #[command(flatten)]
    filter: Filter,
    /// Observe for --seconds, print once and exit; the default if the output is no terminal
    #[arg(long)]
    once: bool,
    /// Seconds between two updates
    #[arg(long, value_name = "S", default_value_t = 2, value_parser = clap::value_parser!(u64).range(1..=3600))]
    seconds: u64,
    /// Print once, as one JSON object
    #[arg(long)]
    json: bool,
}

impl Top {
    /// Shows the screen until `q`, or prints the result once.
    pub(super) fn run(self) -> Result<(), Problem> {
        let once = self.once || self.json || !std::io::stdout().is_terminal();
        wait_for(async {
            let mut watch = Watch::begin(&self).await?;
            if once {
                watch.poll().await?;
                return match self.json {
                    true => print_json(&watch.model.json()),
                    false => print(&watch.model.text()),
                };
            }
            // Restores the terminal when dropped, also on a panic.
            let mut terminal = ratatui::try_init()
                .map_err(|error| Problem::BadAnswer(format!("cannot draw on this terminal: {error}")))?;
            let result = watch.show(&mut terminal).await;
            ratatui::restore();
            result
        })
    }
}

/// Collects the data periodically.
struct Watch {
    client: Client,
    filter: Filter,
    period: Duration,
    model: Model,
    lines: Lines,
    /// Current sampling: one query in this many.
    every: u32,
}

impl Watch {
    /// Reads the counters for the first time and opens the tap.
    async fn begin(top: &Top) -> Result<Self, Problem> {
        let client = Client::new(&top.connection)?;
        let mut model = Model::new(status(&client).await?);
        tokio::time::sleep(Duration::from_millis(200)).await;
        model.counters(status(&client).await?);
        let every = sampling(model.rate());
        let lines = client.lines(&top.filter.path(every, LINES_PER_SECOND as u32 * 4, false)).await?;
        let period = Duration::from_secs(top.seconds);
        Ok(Self { client, filter: top.filter.clone(), period, model, lines, every })
    }

    /// Reads tap lines for one period, then the counters.
    async fn poll(&mut self) -> Result<(), Problem> {
        let end = Instant::now() + self.period;
        loop {
            tokio::select! {
                line = self.lines.next() => self.take(line.as_deref())?,
                () = sleep_until(end) => break,
            }
        }
        self.refresh().await
    }

    fn take(&mut self, line: Option<&[u8]>) -> Result<(), Problem> {
        let line = line.ok_or_else(|| Problem::Unreachable("the server ended the stream".to_owned()))?;
        match serde_json::from_slice(line) {
            Ok(Sent::Line(line)) => self.model.line(&line),
            Ok(Sent::Suppressed { suppressed }) => self.model.suppressed(suppressed),
            Err(error) => return Err(Problem::BadAnswer(format!("cannot parse a line: {error}"))),
        }
        Ok(())
    }

    /// Reads the counters and adjusts the sampling to the traffic.
    async fn refresh(&mut self) -> Result<(), Problem> {
        self.model.counters(status(&self.client).await?);
        let wanted = sampling(self.model.rate());
        if wanted > self.every * 4 || wanted * 4 < self.every {
            let path = self.filter.path(wanted, LINES_PER_SECOND as u32 * 4, false);
            self.lines = self.client.lines(&path).await?;
            self.every = wanted;
        }
        Ok(())
    }

    /// Redraws until `q`, Escape or Ctrl-C.
    async fn show(&mut self, terminal: &mut ratatui::DefaultTerminal) -> Result<(), Problem> {
        let mut keys = events();
        let mut ticks = interval(self.period);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        ticks.tick().await;
        loop {
            terminal
                .draw(|frame| draw::draw(frame, &self.model, self.every))
                .map_err(|_| Problem::OutputClosed)?;
            let redraw = tokio::time::sleep(REDRAW);
            tokio::pin!(redraw);
            let mut is_new = false;
            loop {
                // Lines are read without a pause, because the server drops lines for slow readers.
                tokio::select! {
                    line = self.lines.next() => {
                        self.take(line.as_deref())?;
                        is_new = true;
                    }
                    () = &mut redraw, if is_new => break,
                    _ = ticks.tick() => {
                        self.refresh().await?;
                        break;
                    }
                    key = keys.recv() => if is_end(key) { return Ok(()) },
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

/// Requests the server's status.
async fn status(client: &Client) -> Result<Status, Problem> {
    client.get("/status").await?.good()?.json()
}

/// Returns the sampling (one query in how many) for `rate` queries per second.
fn sampling(rate: f64) -> u32 {
    (rate / LINES_PER_SECOND).clamp(1.0, 10_000.0) as u32
}
