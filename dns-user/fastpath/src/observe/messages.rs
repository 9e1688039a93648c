//! Messages from inside the BPF programs, by aya-log, handed on to our own log.

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
};

use aya::Ebpf;
use aya_log::EbpfLogger;
use log::{Log, Metadata, Record};
use parking_lot::Mutex;

/// Size of the map that the messages pass through, in bytes: the programs write
/// one a second on each CPU at most. A multiple of every machine's page size.
pub(crate) const BUFFER_SIZE: u32 = 1 << 16;

/// Most detailed level that the programs write, as `AYA_LOG_LEVEL` has it. The
/// rest is decided when a message is read: levels may change while they run.
pub(crate) const LEVEL: u8 = aya_log::Level::Warn as u8;

/// Name of the map, given by aya-log.
pub(crate) const MAP: &str = "AYA_LOGS";

/// The reader's end.
pub(crate) struct Messages {
    logger: Arc<Mutex<EbpfLogger<Handover>>>,
    /// The map once more, to wait for messages.
    readable: OwnedFd,
}

/// Keeps the map open under its number.
pub(crate) type MessagesMap = Arc<dyn Send + Sync>;

impl Messages {
    /// Reads the messages of a loaded object; none if it has no map for them.
    pub(crate) fn of(ebpf: &mut Ebpf) -> Option<Self> {
        let logger = EbpfLogger::init_with_logger(ebpf, Handover).ok()?;
        let readable = logger.as_fd().try_clone_to_owned().ok()?;
        Some(Self { logger: Arc::new(Mutex::new(logger)), readable })
    }

    /// For whoever loads programs later: their instructions name the map by its number, and aya takes
    /// it out of the object that holds the others.
    pub(crate) fn map(&self) -> MessagesMap {
        self.logger.clone()
    }

    /// Hands on what there is.
    pub(crate) fn hand_on(&mut self) {
        self.logger.lock().flush();
    }
}

/// Readable when there are messages.
impl AsFd for Messages {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.readable.as_fd()
    }
}

/// Makes records of `log`, which aya-log writes, events of `tracing`.
struct Handover;

impl Log for Handover {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        // Decided by tracing, below.
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
