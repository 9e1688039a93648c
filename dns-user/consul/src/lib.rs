//! Consul's DNS interface without I/O: turns a catalog and a query into an answer.
//!
//! No socket, no clock, no runtime. Bottom-up:
//!
//! * [`config`]: the object `"consul"` of `config.json`.
//! * [`source`]: configuration, snapshots and status of a live Consul.
//! * [`catalog`]: registrations with indexes; copies share unchanged parts.
//! * [`definition`]: definition files, HCL or JSON.
//! * `question`: meaning of a name's labels.
//! * `prepared`: prepared queries, evaluated here.
//! * [`record`]: resource records, names that Consul generates, and the result of a search.
//! * [`Zone`]: current configuration and catalog; answers questions.
//! * [`PendingAnswer`]: an answer that may still need a recursor's records for host names.
//!
//! Consul's behaviour is taken from its documentation and from the cases in `tests/cases`, which the tests
//! replay. Where both are silent (limits of a chain of host names, spare bytes of a UDP answer, order by
//! `near`) the code follows general knowledge of Consul; it has not been compared with a running Consul.

mod answer;
pub mod catalog;
pub mod config;
pub mod definition;
mod encode;
mod pending;
mod prepared;
mod question;
pub mod record;
pub mod source;

pub use answer::{Asker, Explanation, Lack, Missing, Publishable, Zone};
pub use pending::{PendingAnswer, chain_of};
