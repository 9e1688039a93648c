//! JetStream's object store. It needs more permissions than a director gives:
//! `nats-config --jetstream` has them.

use std::time::Duration;

use async_nats::jetstream::{self, object_store::Config};
use bytes::Bytes;
use tokio::io::AsyncReadExt;

use super::{LONGEST_BLOB, StoreError};
use crate::bus::Bus;

/// A bucket.
#[derive(Clone, Debug)]
pub(super) struct Objects {
    /// JetStream.
    context: jetstream::Context,
    /// Name of the bucket.
    bucket: String,
}

/// An error in our own words.
fn failed(error: impl std::fmt::Display) -> StoreError {
    StoreError::JetStream(error.to_string())
}

impl Objects {
    /// A bucket; it is opened with every use, for it may come later than we.
    pub(super) fn new(bus: &Bus, bucket: &str) -> Self {
        Self { context: jetstream::new(bus.client.clone()), bucket: bucket.to_owned() }
    }

    /// Puts a blob; makes the bucket where it is missing.
    pub(super) async fn put(&self, id: &str, bytes: &Bytes) -> Result<(), StoreError> {
        let store = match self.context.get_object_store(&self.bucket).await {
            Ok(store) => store,
            Err(_) => {
                let config = Config { bucket: self.bucket.clone(), ..Config::default() };
                self.context.create_object_store(config).await.map_err(failed)?
            }
        };
        store.put(id, &mut bytes.as_ref()).await.map_err(failed)?;
        Ok(())
    }

    /// Gets a blob.
    pub(super) async fn get(&self, id: &str, limit: Duration) -> Result<Bytes, StoreError> {
        let get = async {
            let store = self.context.get_object_store(&self.bucket).await.map_err(failed)?;
            let object = store.get(id).await.map_err(failed)?;
            let mut bytes = Vec::new();
            object.take(LONGEST_BLOB as u64 + 1).read_to_end(&mut bytes).await.map_err(failed)?;
            Ok(bytes)
        };
        let bytes = tokio::time::timeout(limit, get).await;
        let bytes = bytes.unwrap_or_else(|_| Err(failed(format!("not done within {limit:?}"))))?;
        if bytes.len() > LONGEST_BLOB {
            return Err(StoreError::TooLong(id.to_owned()));
        }
        Ok(bytes.into())
    }

    /// Removes a blob.
    pub(super) async fn delete(&self, id: &str) -> Result<(), StoreError> {
        let store = self.context.get_object_store(&self.bucket).await.map_err(failed)?;
        store.delete(id).await.map_err(failed)
    }
}
