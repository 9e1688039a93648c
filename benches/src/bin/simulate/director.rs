//! The peer: the director's method, emulated from documented facts. It sends one message and one
//! whole blob to each agent, without patches, from one sender; agents that have not answered 10 s
//! after the last message are retried in rounds of 10 s.

use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use dns_sync::{
    bus::Bus,
    message::{self, Announcement, Reply, Source},
};
use futures::StreamExt;

use super::{
    fleet::Fleet,
    ground::{Ground, agent_id},
    newest,
};

/// Duration of a round.
const ROUND: Duration = Duration::from_secs(10);

/// Announces a further version to all agents; returns a description of the result.
pub(super) async fn announce(ground: &Ground, fleet: &Fleet, limit: Duration) -> Result<String> {
    let bus = Bus::connect(&ground.bus("publisher"), "bosh-dns-sync-peer").await?;
    let mut replies = bus.client.subscribe("director.peer.>").await?;
    let made = newest(ground)?;
    // The same bytes under another version number, so a blob costs the same. The sample verifies the number
    // inside the file, so it is excluded.
    let version = made.version + 1;
    let sample = fleet.sampled();
    let mut open: BTreeSet<String> = (sample..ground.agents()).map(agent_id).collect();
    let announcement =
        Announcement { source: Source::Blob(made.blob), digest: made.digest, version, extra: None };
    fleet.fetched();
    let begun = Instant::now();
    let mut rounds = 0;
    let mut bytes = 0;
    while !open.is_empty() {
        ensure!(begun.elapsed() < limit, "waited {limit:?} for the peer: {} agents lag", open.len());
        rounds += 1;
        for id in &open {
            let body = announcement.write(&message::reply_subject("peer", id, "r"));
            bytes += body.len();
            bus.client.publish(message::agent_subject(id), body.into()).await?;
        }
        let end = tokio::time::Instant::now() + ROUND;
        while !open.is_empty() {
            let Ok(Some(reply)) = tokio::time::timeout_at(end, replies.next()).await else { break };
            if let Some((agent, _)) = message::read_reply_subject(&reply.subject)
                && Reply::read(&reply.payload) == Reply::Synced(None)
            {
                open.remove(agent);
            }
        }
    }
    let blobs = fleet.fetched();
    Ok(format!("rounds: {rounds}; bytes of messages: {bytes}; {}", ground.blobs(blobs)?))
}
