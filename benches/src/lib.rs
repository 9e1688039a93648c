//! What the benches and the demo share.

pub mod cpu;
pub mod dnsperf;
pub mod fleet;
pub mod forwarders;
pub mod foundation;
pub mod kxdpgun;
pub mod lab;
pub mod peers;
pub mod report;
