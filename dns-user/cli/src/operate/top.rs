//! `top`: shows the most frequent names and clients.
//!
//! Rates come from the counters of `/status` and are exact for both paths. Names and clients come
//! from the tap, sampled to about [`LINES_PER_SECOND`] lines per second regardless of traffic; the
//! server counts nothing by name while there is no viewer.

mod model;
#[cfg(feature = "screen")]
mod screen;

use std::time::Duration;

use clap::Args;
use tokio::time::{Instant, sleep_until};

use self::model::Model;
use super::{
    Problem,
    client::{Client, Connection, Lines, wait_for},
    print, print_json,
    tap::{Filter, ReceivedLine},
};
use dns_resolver::ops::status::ServerStatus;

/// Target rate of tap lines per second: enough to rank names, cheap for the server.
const LINES_PER_SECOND: f64 = 1000.0;

#[derive(Debug, Args)]
pub(crate) struct Top {
    #[command(flatten)]
    connection: Connection,
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
        wait_for(async {
            let mut watch = Watch::begin(&self).await?;
            #[cfg(feature = "screen")]
            // A pipe or a file gets one page of text instead of escape sequences without end.
            if !self.once && !self.json && std::io::IsTerminal::is_terminal(&std::io::stdout()) {
                return screen::show(&mut watch).await;
            }
            watch.poll().await?;
            if self.json {
                print_json(&watch.model.json())
            } else {
                print(&watch.model.text())
            }
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
        let client = Client::new(&top.connection).await?;
        let mut model = Model::new(status(&client).await?);
        // Sampling depends on the rate, which two readings give.
        tokio::time::sleep(Duration::from_millis(200)).await;
        model.update(status(&client).await?);
        let every = sampling(model.rate());
        let lines = client
            // Four times the target, because the traffic may grow before the sampling follows.
            .lines(&top.filter.path(every, LINES_PER_SECOND as u32 * 4, false))
            .await?;
        let period = Duration::from_secs(top.seconds);
        Ok(Self {
            client,
            filter: top.filter.clone(),
            period,
            model,
            lines,
            every,
        })
    }

    /// Reads tap lines for one period, then the counters.
    async fn poll(&mut self) -> Result<(), Problem> {
        let end = Instant::now() + self.period;
        loop {
            tokio::select! {
                line = self.lines.next() => self.take(&line?)?,
                () = sleep_until(end) => break,
            }
        }
        self.refresh().await
    }

    fn take(&mut self, line: &[u8]) -> Result<(), Problem> {
        match ReceivedLine::parse(line)? {
            ReceivedLine::Query(line) => self.model.count_line(&line),
            ReceivedLine::Suppressed { suppressed } => self.model.suppressed += suppressed,
        }
        Ok(())
    }

    /// Reads the counters and adjusts the sampling to the traffic.
    async fn refresh(&mut self) -> Result<(), Problem> {
        self.model.update(status(&self.client).await?);
        let wanted = sampling(self.model.rate());
        // A new stream loses the lines in between, so small changes are not worth one.
        if wanted > self.every * 4 || wanted * 4 < self.every {
            let path = self.filter.path(wanted, LINES_PER_SECOND as u32 * 4, false);
            self.lines = self.client.lines(&path).await?;
            self.every = wanted;
        }
        Ok(())
    }
}

async fn status(client: &Client) -> Result<ServerStatus, Problem> {
    client.get("/status").await?.good()?.json()
}

/// Returns the sampling (one query in how many) for `rate` queries per second.
fn sampling(rate: f64) -> u32 {
    (rate / LINES_PER_SECOND).clamp(1.0, 10_000.0) as u32
}
