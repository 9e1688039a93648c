//! Somebody who speaks on the bus by hand: a director, or an agent that loses its replies.

use std::time::Duration;

use anyhow::{Context, Result};
use async_nats::{Message, Subscriber};
use dns_sync::bus::{Bus, BusOptions};
use futures::StreamExt;
use serde_json::Value;
use tokio::runtime::Runtime;

use crate::lab::{Lab, PATIENCE};

/// A connection and what it hears.
pub(crate) struct Speaker {
    /// Where it runs.
    runtime: Runtime,
    /// The connection.
    bus: Bus,
    /// What it hears.
    heard: Subscriber,
}

impl Speaker {
    /// Connects with the certificate of `who` and listens on a subject.
    pub(crate) fn new(lab: &Lab, who: &str, subject: &str) -> Result<Self> {
        let runtime = Runtime::new()?;
        let options = BusOptions { nats: vec![lab.nats_url()], tls: lab.tls_files(who) };
        let (bus, heard) = runtime.block_on(async {
            let bus = Bus::connect(&options, "by-hand").await?;
            let heard = bus.client.subscribe(subject.to_owned()).await?;
            // What is published from now on is heard.
            bus.client.flush().await?;
            anyhow::Ok((bus, heard))
        })?;
        Ok(Self { runtime, bus, heard })
    }

    /// The next message.
    pub(crate) fn hear(&mut self) -> Result<Message> {
        let Self { runtime, heard, .. } = self;
        let next = runtime.block_on(async { tokio::time::timeout(PATIENCE, heard.next()).await });
        next.context("nothing is heard")?.context("the subscription ended")
    }

    /// The next call.
    pub(crate) fn hear_call(&mut self) -> Result<Value> {
        Ok(serde_json::from_slice(&self.hear()?.payload)?)
    }

    /// Says something.
    pub(crate) fn say(&self, subject: &str, body: &str) -> Result<()> {
        self.runtime.block_on(async {
            self.bus.client.publish(subject.to_owned(), body.to_owned().into()).await?;
            Ok(self.bus.client.flush().await?)
        })
    }

    /// Whether there is silence for so long.
    pub(crate) fn is_silent_for(&mut self, time: Duration) -> bool {
        let Self { runtime, heard, .. } = self;
        runtime.block_on(async { tokio::time::timeout(time, heard.next()).await }).is_err()
    }
}
