//! Records to the fleet: the real programs beside a real nats-server with the permissions that
//! we generate, and a real nginx as the blobstore.

mod certificates;
mod director;
mod faults;
mod lab;
mod nginx;
mod process;
mod s3;
mod security;
mod speaker;
mod spreading;
