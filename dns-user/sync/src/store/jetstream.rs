//! JetStream's object store. It needs more permissions than a director grants: `nats-config
//! --jetstream` grants agents direct reads of the bucket, but no consumers.

use std::time::Duration;

use async_nats::jetstream::{
    self,
    object_store::{Config, ObjectInfo},
};
use base64::{Engine, engine::general_purpose::URL_SAFE};
use bytes::Bytes;

use super::StoreError;
use crate::bus::Bus;

#[derive(Clone, Debug)]
pub(super) struct Objects {
    context: jetstream::Context,
    bucket: String,
}

fn failed(error: impl std::fmt::Display) -> StoreError {
    StoreError::JetStream(error.to_string())
}

/// Applies a timeout to a call.
async fn within<T>(
    limit: Duration,
    call: impl Future<Output = Result<T, StoreError>>,
) -> Result<T, StoreError> {
    match tokio::time::timeout(limit, call).await {
        Ok(result) => result,
        Err(_) => Err(failed(format!("not finished within {limit:?}"))),
    }
}

impl Objects {
    /// Refers to a bucket; each call opens it, because it may be created later.
    pub(super) fn new(bus: &Bus, bucket: &str) -> Self {
        Self { context: jetstream::new(bus.client.clone()), bucket: bucket.to_owned() }
    }

    /// Uploads a blob; creates the bucket if it is missing.
    pub(super) async fn put(&self, id: &str, bytes: &Bytes, limit: Duration) -> Result<(), StoreError> {
        within(limit, async {
            let store = match self.context.get_object_store(&self.bucket).await {
                Ok(store) => store,
                Err(_) => {
                    let config = Config { bucket: self.bucket.clone(), ..Config::default() };
                    self.context.create_object_store(config).await.map_err(failed)?
                }
            };
            store.put(id, &mut bytes.as_ref()).await.map_err(failed)?;
            Ok(())
        })
        .await
    }

    /// Downloads a blob by direct reads of its chunks, which need no consumer.
    pub(super) async fn get(&self, id: &str, longest: usize, limit: Duration) -> Result<Bytes, StoreError> {
        let Self { context, bucket } = self;
        within(limit, async {
            let stream = context.get_stream_no_info(format!("OBJ_{bucket}")).await.map_err(failed)?;
            let subject = format!("$O.{bucket}.M.{}", URL_SAFE.encode(id));
            let info = stream.direct_get_last_for_subject(subject).await.map_err(failed)?;
            let info: ObjectInfo = serde_json::from_slice(&info.payload).map_err(failed)?;
            if info.deleted {
                return Err(failed(format!("the blob {id} was deleted")));
            }
            if info.size > longest {
                return Err(StoreError::TooLong { blob: id.to_owned(), longest });
            }
            let chunks = format!("$O.{bucket}.C.{}", info.nuid);
            let mut bytes = Vec::with_capacity(info.size);
            let mut sequence = 0;
            while bytes.len() < info.size {
                let chunk = stream
                    .direct_get_next_for_subject(chunks.clone(), Some(sequence + 1))
                    .await
                    .map_err(failed)?;
                if chunk.sequence <= sequence || chunk.payload.len() > info.size - bytes.len() {
                    return Err(failed(format!("the chunks of blob {id} are inconsistent")));
                }
                sequence = chunk.sequence;
                bytes.extend_from_slice(&chunk.payload);
            }
            Ok(bytes.into())
        })
        .await
    }

    pub(super) async fn delete(&self, id: &str, limit: Duration) -> Result<(), StoreError> {
        within(limit, async {
            let store = self.context.get_object_store(&self.bucket).await.map_err(failed)?;
            store.delete(id).await.map_err(failed)
        })
        .await
    }
}
