//! `publish --local`: writes a single file on this machine, without bus or blobstore.

use std::path::Path;

use dns_kit::files::atomic::{self, Attributes};

use super::{
    PublishOptions,
    state_writer::{StateWriter, TICK, is_of_the_disk},
};

/// Writes the dataset to a file whenever the inventory changes.
pub(super) async fn run(
    options: &PublishOptions,
    mut writer: StateWriter,
    file: &Path,
) -> anyhow::Result<()> {
    let permissions = Attributes { mode: 0o640, ..Attributes::PRIVATE };
    atomic::sweep(file);
    let mut ended = std::pin::pin!(dns_kit::signals::ended());
    let mut done = false;
    loop {
        let written = writer.poll().map(|read| {
            read.and_then(|_| {
                let committed = writer.commit(options.above)?;
                if std::fs::read(file).ok().as_deref() != Some(&committed.bytes) {
                    atomic::replace(file, &committed.bytes, permissions)?;
                    let version = committed.made.version;
                    tracing::info!(version, file = %file.display(), "records written");
                }
                Ok(())
            })
        });
        match written {
            Some(Ok(())) => done = true,
            Some(Err(error)) if options.watch && writer.newest().is_some() => {
                tracing::error!("cannot use the inventory; the last good version stays in use: {error:#}");
                if is_of_the_disk(&error) {
                    writer.retry();
                }
            }
            Some(Err(error)) => return Err(error),
            None => {}
        }
        if done && !options.watch {
            return Ok(());
        }
        tokio::select! {
            () = tokio::time::sleep(TICK) => {}
            () = &mut ended => return Ok(()),
        }
    }
}
