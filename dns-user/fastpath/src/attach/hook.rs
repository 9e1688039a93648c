//! The hooks to which programs are attached.

use std::fmt;

use crate::bpf::LinkKind;

/// A hook to which a program can be attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Hook {
    /// XDP in the driver.
    Native,
    /// tcx at ingress (kernel 6.6).
    Tcx,
    /// A classic filter at the clsact qdisc.
    Clsact,
}

impl Hook {
    /// Returns the label used in metrics and in the status.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Native => "native",
            Self::Tcx => "tcx",
            Self::Clsact => "clsact",
        }
    }

    /// Returns whether this is an XDP hook.
    pub(crate) const fn is_xdp(self) -> bool {
        matches!(self, Self::Native)
    }

    /// Returns the kind of link for this hook; clsact has none.
    pub(crate) const fn link_kind(self) -> Option<LinkKind> {
        match self {
            Self::Native => Some(LinkKind::XdpNative),
            Self::Tcx => Some(LinkKind::Tcx),
            Self::Clsact => None,
        }
    }
}

impl fmt::Display for Hook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.label())
    }
}
