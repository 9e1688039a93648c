//! The folder of documents: read completely after every change, each document independently.
//!
//! An unreadable document affects only itself. Records that it published stay unchanged (*held*),
//! and a DNS Update Record, list or intent that was valid before stays in use.

mod document;
mod folder;
mod status;
mod watch;

pub use self::{
    document::{Content, Document, DocumentId, Kind},
    folder::{FileState, Folder, Scan},
    status::{DocumentStatus, ProviderResult, StatusFile},
    watch::Watch,
};

#[cfg(test)]
mod tests;
