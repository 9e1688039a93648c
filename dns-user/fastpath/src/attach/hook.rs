//! The hooks that programs are attached to.

use std::fmt;

use crate::bpf::LinkKind;

/// A hook that a program can be attached to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Hook {
    /// XDP in the driver.
    Native,
    /// XDP after the skb was made.
    Generic,
    /// tcx at ingress (kernel 6.6).
    Tcx,
    /// A classic filter of the clsact qdisc.
    Clsact,
}

impl Hook {
    /// Those of tc, the better one first.
    pub(super) const TC: [Self; 2] = [Self::Tcx, Self::Clsact];

    /// Label in metrics and status.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Native => "native",
            Self::Generic => "generic",
            Self::Tcx => "tcx",
            Self::Clsact => "clsact",
        }
    }

    /// Whether it is one of XDP's.
    pub(crate) const fn is_xdp(self) -> bool {
        matches!(self, Self::Native | Self::Generic)
    }

    /// The link that attaches to it; clsact has none.
    pub(crate) const fn link_kind(self) -> Option<LinkKind> {
        match self {
            Self::Native => Some(LinkKind::XdpNative),
            Self::Generic => Some(LinkKind::XdpGeneric),
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
