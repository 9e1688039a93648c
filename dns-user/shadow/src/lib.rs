//! Compares the replies of a running DNS server with those that bosh-dns-xdp would give.
//!
//! - [`frames`], [`pairs`]: packets, and queries with their replies.
//! - [`question`], [`reply`], [`compare`]: messages in the form in which they are compared, and their differences.
//! - [`mod@reference`]: what is needed from our server, which is not started. [`rows`]: documented differences.
//! - [`filter`], [`capture`], [`watch`]: the packet socket, and the loop that watches within a limit of CPU.
//!   [`process`]: the observed process. These are the only parts that touch the system.
//! - [`ask`]: queries to the server itself.
//! - [`judge`]: verdicts. [`latency`], [`hide`], [`report`], [`html`]: the report.

pub mod ask;
pub mod capture;
pub mod compare;
pub mod filter;
pub mod frames;
pub mod hide;
pub mod html;
pub mod judge;
pub mod latency;
pub mod pairs;
pub mod process;
pub mod question;
pub mod reference;
pub mod reply;
pub mod report;
pub mod rows;
pub mod watch;
