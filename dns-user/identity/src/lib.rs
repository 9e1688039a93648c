//! `bosh-dns-identity`: certificates that state who an instance is and renew themselves.
//!
//! Pure, without I/O or a clock of their own:
//!
//! * [`profile`]: contents of a certificate, from the description of a container.
//! * [`window`]: the renewal window and an instance's moment in it.
//! * [`keys`], [`certificate`], [`authority`]: keys, DER, and the CA that signs.
//! * [`san`], [`names`]: names of link providers, and certificates compared with a fleet.

pub mod authority;
pub mod certificate;
pub mod keys;
pub mod names;
pub mod profile;
pub mod san;
pub mod window;
