//! A scripted client of the bus: a director, or an agent that loses its replies.

use std::time::Duration;

use anyhow::{Context, Result};
use async_nats::{Message, Subscriber};
use dns_sync::bus::{Bus, BusOptions};
use futures_util::StreamExt;
use serde_json::Value;
use tokio::runtime::Runtime;

use crate::lab::{Lab, TIMEOUT};

/// A connection with its subscription.
pub(crate) struct Speaker {
    runtime: Runtime,
    bus: Bus,
    heard: Subscriber,
}

impl Speaker {
    /// Connects with the certificate of a party and subscribes to a subject.
    pub(crate) fn new(lab: &Lab, who: &str, subject: &str) -> Result<Self> {
        let runtime = Runtime::new()?;
        let options = BusOptions {
            nats: vec![lab.nats_url()],
            tls: lab.tls_files(who),
            ping_every: 10,
        };
        let (bus, heard) = runtime.block_on(async {
            let bus = Bus::connect(&options, "by-hand", "the test fails").await?;
            let heard = bus.client.subscribe(subject.to_owned()).await?;
            // Later messages are received.
            bus.client.flush().await?;
            anyhow::Ok((bus, heard))
        })?;
        Ok(Self {
            runtime,
            bus,
            heard,
        })
    }

    pub(crate) fn hear(&mut self) -> Result<Message> {
        let Self { runtime, heard, .. } = self;
        let next = runtime.block_on(async { tokio::time::timeout(TIMEOUT, heard.next()).await });
        next.context("nothing is heard")?
            .context("the subscription ended")
    }

    /// Returns the next message that is not an agent's report.
    pub(crate) fn hear_reply(&mut self) -> Result<Message> {
        loop {
            let message = self.hear()?;
            if !message.subject.ends_with(".hello") {
                return Ok(message);
            }
        }
    }

    /// Returns the next announcement; answers questions as a BOSH agent does.
    pub(crate) fn hear_call(&mut self) -> Result<Value> {
        loop {
            let call: Value = serde_json::from_slice(&self.hear()?.payload)?;
            if call["arguments"][2] != 0 {
                return Ok(call);
            }
            let reply_to = call["reply_to"].as_str().context("reply_to")?;
            self.say(reply_to, r#"{"value":"synced"}"#)?;
        }
    }

    pub(crate) fn say(&self, subject: &str, body: &str) -> Result<()> {
        self.runtime.block_on(async {
            self.bus
                .client
                .publish(subject.to_owned(), body.to_owned().into())
                .await?;
            Ok(self.bus.client.flush().await?)
        })
    }

    /// Returns whether only agents' reports arrive during this time.
    pub(crate) fn is_silent_for(&mut self, time: Duration) -> bool {
        let Self { runtime, heard, .. } = self;
        runtime.block_on(async {
            let other = async {
                while heard
                    .next()
                    .await
                    .is_some_and(|message| message.subject.ends_with(".hello"))
                {}
            };
            tokio::time::timeout(time, other).await.is_err()
        })
    }
}
