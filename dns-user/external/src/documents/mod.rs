//! The folder of documents: read completely at every change, each document on its own.
//!
//! A document that cannot be read affects only itself. Records that it published stay as they are
//! (*held*), and a DNS Update Record, list or intent that was good before stays in use.

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
