//! Targets for everything that reads bytes from the network or from files. Each must accept any input
//! without a panic.
//!
//! `tests/smoke.rs` runs each on its corpus and on inputs derived from it. `cargo xtask fuzz` runs them under
//! libFuzzer (feature `libfuzzer`), whose new inputs depend on the code that they reach.

mod aliases;
mod config;
mod forward;
mod handlers;
mod http;
mod message;
mod names;
mod query;
mod records;
mod table;

/// A function under test.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// The name, also of the folder below `corpus`.
    pub name: &'static str,
    /// Handles an input; panics if the result is wrong.
    pub run: fn(&[u8]),
}

/// Targets by name, in the order of their runs.
pub const TARGETS: &[Target] = &[
    Target {
        name: "aliases",
        run: aliases::run,
    },
    Target {
        name: "config",
        run: config::run,
    },
    Target {
        name: "forward",
        run: forward::run,
    },
    Target {
        name: "handlers",
        run: handlers::run,
    },
    Target {
        name: "http",
        run: http::run,
    },
    Target {
        name: "message",
        run: message::run,
    },
    Target {
        name: "names",
        run: names::run,
    },
    Target {
        name: "query",
        run: query::run,
    },
    Target {
        name: "records",
        run: records::run,
    },
    Target {
        name: "table",
        run: table::run,
    },
];
