//! Wake-up after changes of files.

use std::path::{Path, PathBuf};

use notify::{RecommendedWatcher, RecursiveMode, Watcher as _};
use tokio::sync::mpsc;

use super::folder::is_document_file;

/// Reports changes of the documents and the fleet's files.
///
/// Events are only a hint: everything is also read at an interval, so a lost event only causes a
/// delay.
pub struct Watch {
    // Dropping it ends the watch.
    _watcher: Option<RecommendedWatcher>,
    events: mpsc::Receiver<()>,
}

impl Watch {
    /// Watches folders of documents, and the folders in which other files lie.
    pub fn start(documents: &[PathBuf], others: &[PathBuf]) -> Self {
        let (sender, events) = mpsc::channel(1);
        let watched: Vec<PathBuf> = others.to_vec();
        let single: Vec<PathBuf> = documents.iter().filter(|path| !path.is_dir()).cloned().collect();
        let concerns = move |path: &Path| {
            is_document_file(path) || watched.iter().chain(&single).any(|file| file == path)
        };
        let handler = move |event: notify::Result<notify::Event>| {
            let is_of_interest = match event {
                Ok(event) => !event.kind.is_access() && event.paths.iter().any(|path| concerns(path)),
                // Events may have been lost.
                Err(_) => true,
            };
            if is_of_interest {
                // One pending event is enough.
                let _ = sender.try_send(());
            }
        };
        let watcher = notify::recommended_watcher(handler).and_then(|mut watcher| {
            let mut folders: Vec<&Path> = Vec::new();
            for path in documents.iter().chain(others) {
                let folder = match path.parent() {
                    _ if path.is_dir() => path.as_path(),
                    Some(folder) if !folder.as_os_str().is_empty() => folder,
                    _ => Path::new("."),
                };
                if !folders.contains(&folder) && folder.is_dir() {
                    folders.push(folder);
                    watcher.watch(folder, RecursiveMode::NonRecursive)?;
                }
            }
            Ok(watcher)
        });
        let watcher = watcher.inspect_err(|error| {
            tracing::warn!(%error, "cannot watch files; changes are noticed at the next interval");
        });
        Self { _watcher: watcher.ok(), events }
    }

    /// Waits for a change.
    pub async fn changed(&mut self) {
        if self.events.recv().await.is_none() {
            std::future::pending::<()>().await;
        }
    }
}
