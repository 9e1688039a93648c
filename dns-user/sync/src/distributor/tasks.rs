//! The publisher's I/O on bus and blobstore, as tasks with deadlines.

use std::time::{Duration, Instant};

use anyhow::Context;
use async_nats::Client;
use bytes::Bytes;
use tokio::task::{AbortHandle, JoinSet};

use super::{plan::Outgoing, registry::Call, state::Made};
use crate::{
    message::{self, Announcement, Source},
    store::Store,
};

/// Time limit for a batch of messages, in addition to the time that the bandwidth requires.
const SEND_DEADLINE: Duration = Duration::from_secs(10);

/// Attempts to delete a blob.
const DELETIONS: u32 = 3;

/// Pause between two attempts.
const DELETE_PAUSE: Duration = Duration::from_secs(2);

/// Lead over the bandwidth limit below which the sender does not pause.
const SLACK: Duration = Duration::from_millis(5);

/// The result of a task.
#[derive(Debug)]
pub(super) enum Done {
    Put { version: u64, result: anyhow::Result<()> },
    Deleted(anyhow::Result<()>),
    Asked,
    Sent { version: u64, messages: u64, bytes: u64, result: anyhow::Result<()> },
}

#[derive(Debug)]
pub(super) struct Tasks {
    client: Client,
    store: Store,
    process: String,
    bandwidth: u64,
    running: JoinSet<Done>,
    putting: Option<AbortHandle>,
    sending: Option<AbortHandle>,
}

impl Tasks {
    /// Creates an empty set. `process` is the second token of the reply subjects.
    pub(super) fn new(client: Client, store: Store, process: String, bandwidth: u64) -> Self {
        let running = JoinSet::new();
        Self { client, store, process, bandwidth: bandwidth.max(1), running, putting: None, sending: None }
    }

    pub(super) fn process(&self) -> &str {
        &self.process
    }

    /// Waits for the next result; never returns without tasks.
    pub(super) async fn next(&mut self) -> Done {
        loop {
            match self.running.join_next().await {
                None => std::future::pending().await,
                Some(Ok(done)) => return done,
                // Aborted in favour of a newer version.
                Some(Err(_)) => {}
            }
        }
    }

    /// Uploads a blob; aborts an older upload.
    pub(super) fn put(&mut self, made: Made, bytes: Bytes) {
        if let Some(older) = self.putting.take() {
            older.abort();
        }
        let store = self.store.clone();
        self.putting = Some(self.running.spawn(async move {
            let result = store.put(&made.blob, &bytes).await.map_err(Into::into);
            Done::Put { version: made.version, result }
        }));
    }

    pub(super) fn delete(&mut self, gone: Vec<Made>) {
        let store = self.store.clone();
        self.running.spawn(async move {
            let mut result = Ok(());
            for Made { version, blob, .. } in gone {
                for attempt in 1..=DELETIONS {
                    let deleted = store.delete(&blob).await;
                    let Err(error) = deleted else { break };
                    if attempt == DELETIONS {
                        result = Err(error).with_context(|| format!("version {version}, blob {blob}"));
                    }
                    tokio::time::sleep(DELETE_PAUSE).await;
                }
            }
            Done::Deleted(result)
        });
    }

    /// Requests reports from agents by announcing version 0, which every agent has.
    pub(super) fn ask(&mut self, questions: Vec<(String, Call)>) {
        let (client, process) = (self.client.clone(), self.process.clone());
        self.running.spawn(async move {
            let question = Announcement {
                source: Source::Blob("-".to_owned()),
                digest: crate::digest::sha256(b""),
                version: 0,
                extra: None,
            };
            let asked = async {
                for (agent, call) in questions {
                    let body = question.write(&message::reply_subject(&process, &agent, &call.token()));
                    // The agent reports on its next connection anyway.
                    let _ = client.publish(message::agent_subject(&agent), body.into()).await;
                }
            };
            let _ = tokio::time::timeout(SEND_DEADLINE, asked).await;
            Done::Asked
        });
    }

    /// Sends a batch at the configured bandwidth; aborts an older batch.
    pub(super) fn send(&mut self, batch: Vec<Outgoing>) {
        if let Some(older) = self.sending.take() {
            older.abort();
        }
        let (client, process, bandwidth) = (self.client.clone(), self.process.clone(), self.bandwidth);
        let time = move |bytes: u64| Duration::from_secs_f64(bytes as f64 / bandwidth as f64);
        self.sending = Some(self.running.spawn(async move {
            let version = batch.first().map_or(0, |first| first.call.version);
            let (mut messages, mut bytes) = (0_u64, 0_u64);
            let sent = async {
                let begun = Instant::now();
                for Outgoing { agent, call, announcement } in batch {
                    let body = announcement.write(&message::reply_subject(&process, &agent, &call.token()));
                    let length = body.len() as u64;
                    let publish = client.publish(message::agent_subject(&agent), body.into());
                    let published = tokio::time::timeout(SEND_DEADLINE, publish).await;
                    published
                        .context("NATS accepts no messages")?
                        .with_context(|| format!("to agent {agent}"))?;
                    (messages, bytes) = (messages + 1, bytes + length);
                    let ahead = time(bytes).saturating_sub(begun.elapsed());
                    if ahead > SLACK {
                        tokio::time::sleep(ahead).await;
                    }
                }
                Ok(())
            };
            let result = sent.await;
            Done::Sent { version, messages, bytes, result }
        }));
    }
}
