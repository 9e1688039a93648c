//! Consul's DNS interface without I/O: turns a catalog and a query into an answer.
//!
//! No socket, no clock, no runtime. Bottom-up:
//!
//! * [`config`]: the object `"consul"` of `config.json`.
//! * [`http_api`]: its section on access to a live Consul.
//! * [`source`]: configuration, snapshots and status of a live Consul.
//! * [`visibility`]: read permissions of a token.
//! * [`catalog`]: registrations with indexes; copies share unchanged parts.
//! * [`definition`]: definition files, HCL or JSON.
//! * [`question`]: meaning of a name's labels.
//! * `prepared`: prepared queries, evaluated here.
//! * `found`: result of a search.
//! * [`record`]: resource records, and names that Consul generates.
//! * [`Zone`]: current configuration and catalog; answers questions.
//! * [`Draft`]: an answer that may still need a recursor's records for host names.
//!
//! Consul's behaviour is taken from its documentation and from the cases in `tests/cases`, which
//! the tests replay. Where both are silent (limits of a chain of host names, spare bytes of a UDP
//! answer, order by `near`) the code follows general knowledge of Consul; it has not been compared
//! with a running Consul.

mod answer;
pub mod catalog;
pub mod config;
pub mod definition;
mod draft;
mod edns;
mod encode;
mod found;
pub mod http_api;
pub mod keys;
mod prepared;
pub mod question;
pub mod record;
pub mod source;
pub mod visibility;

pub use answer::{Asker, Explanation, Lack, Missing, Publishable, Zone};
pub use draft::{Draft, chain_of};
