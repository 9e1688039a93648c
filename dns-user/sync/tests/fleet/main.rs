//! Record distribution: the real programs with a real nats-server, with generated permissions, and real
//! blobstores: nginx, S3, JetStream.

mod alone;
mod certificates;
mod connecting;
mod director;
mod faults;
mod floods;
mod hung_mount;
mod kills;
mod lab;
mod nginx;
mod oracle;
mod page;
mod process;
mod s3;
mod s3_double;
mod security;
mod seen;
mod speaker;
mod spreading;
mod stuck;
mod truth;
mod wire;
