//! The operator's interfaces with real tools: curl with client certificates, Prometheus and
//! promtool, a pseudo-terminal, the command line.

mod address_queries;
mod addresses;
mod api;
mod check;
mod cli;
mod conditions;
mod dashboards;
mod degraded;
mod dnsmasq;
mod files;
mod hardship;
mod hogs;
mod json_types;
mod live_data;
mod metrics;
mod outages;
mod picture;
mod prometheus;
mod records_arrive;
mod running;
mod sessions;
mod symptoms;
mod terminal;
mod troubles;
mod try_out;
