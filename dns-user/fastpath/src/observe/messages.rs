//! Messages from the BPF programs, sent by aya-log and forwarded to our log.

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
};

use aya::Ebpf;
use aya_log::EbpfLogger;
use log::{Log, Metadata, Record};
use parking_lot::Mutex;

/// Size of the messages' map in bytes: the programs write at most one message per second and CPU. A
/// multiple of every architecture's page size.
pub(crate) const BUFFER_SIZE: u32 = 1 << 16;

/// Most verbose level written by the programs, for `AYA_LOG_LEVEL`. Messages are filtered again
/// when read, because levels may change at run time.
pub(crate) const LEVEL: u8 = aya_log::Level::Warn as u8;

/// Name of the map, chosen by aya-log.
pub(crate) const MAP: &str = "AYA_LOGS";

/// The reading end of the messages.
pub(crate) struct Messages {
    logger: Arc<Mutex<EbpfLogger<Handover>>>,
    /// A duplicate of the map's descriptor, used to wait for messages.
    readable: OwnedFd,
}

/// Keeps the map open under its descriptor.
pub(crate) type MessagesMap = Arc<dyn Send + Sync>;

impl Messages {
    /// Returns the messages of a loaded object; `None` if it has no map for them.
    pub(crate) fn of(ebpf: &mut Ebpf) -> Option<Self> {
        let logger = EbpfLogger::init_with_logger(ebpf, Handover).ok()?;
        let readable = logger.as_fd().try_clone_to_owned().ok()?;
        Some(Self { logger: Arc::new(Mutex::new(logger)), readable })
    }

    /// Returns a handle that keeps the map open. Programs loaded later refer to the map by its
    /// number, and aya takes it out of the object that holds the other maps.
    pub(crate) fn map(&self) -> MessagesMap {
        self.logger.clone()
    }

    /// Forwards the pending messages.
    pub(crate) fn hand_on(&mut self) {
        self.logger.lock().flush();
    }
}

/// Readable while messages are pending.
impl AsFd for Messages {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.readable.as_fd()
    }
}

/// Converts the `log` records of aya-log to `tracing` events.
struct Handover;

impl Log for Handover {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        // `tracing` filters the events below.
        true
    }

    fn log(&self, record: &Record<'_>) {
        let text = record.args();
        match record.level() {
            log::Level::Error => tracing::error!("{text}"),
            log::Level::Warn => tracing::warn!("{text}"),
            log::Level::Info => tracing::info!("{text}"),
            log::Level::Debug => tracing::debug!("{text}"),
            log::Level::Trace => tracing::trace!("{text}"),
        }
    }

    fn flush(&self) {}
}
