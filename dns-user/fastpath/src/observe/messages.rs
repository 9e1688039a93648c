//! Messages from inside the BPF programs, by aya-log, handed on to our own log.

use std::os::fd::{AsFd, BorrowedFd};

use aya::Ebpf;
use aya_log::EbpfLogger;
use log::{Log, Metadata, Record};

/// Size of the map that the messages pass through, in bytes: the programs write
/// one a second on each CPU at most. A multiple of every machine's page size.
pub(crate) const BUFFER_SIZE: u32 = 1 << 16;

/// Most detailed level that the programs write, as `AYA_LOG_LEVEL` has it. The
/// rest is decided when a message is read: levels may change while they run.
pub(crate) const LEVEL: u8 = aya_log::Level::Warn as u8;

/// Name of the map, given by aya-log.
pub(crate) const MAP: &str = "AYA_LOGS";

/// The reader's end.
pub(crate) struct Messages(EbpfLogger<Handover>);

impl Messages {
    /// Reads the messages of a loaded object; none if it has no map for them.
    pub(crate) fn of(ebpf: &mut Ebpf) -> Option<Self> {
        EbpfLogger::init_with_logger(ebpf, Handover).ok().map(Self)
    }

    /// Hands on what there is.
    pub(crate) fn hand_on(&mut self) {
        self.0.flush();
    }
}

/// Readable when there are messages.
impl AsFd for Messages {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
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
