//! The context of one program run.

use dns_common::{control::Control, scope::Scope};

use crate::{
    bytes::Zero,
    maps::{self, Scratch},
};

/// The maps and values that every step uses.
pub struct Context {
    /// Settings written by the server.
    pub control: &'static Control,
    /// Served endpoints and interfaces, from the map `SCOPE`.
    pub scope: &'static Scope,
    /// This CPU's scratch space.
    pub scratch: *mut Scratch,
    /// Opaque zero for the verifier, see [`Zero`].
    pub zero: Zero,
}

impl Context {
    /// Looks up the maps. Never returns `None`, but the verifier requires the check.
    #[inline(always)]
    pub fn get() -> Option<Self> {
        let (control, scope, scratch) = (maps::control()?, maps::scope()?, maps::scratch()?);
        // SAFETY: this CPU's own element; the field is never written.
        let zero = unsafe { Zero::read(&raw const (*scratch).zero) };
        Some(Self { control, scope, scratch, zero })
    }
}
