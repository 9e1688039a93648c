//! The choice of hooks for an interface.

use std::fmt;

use dns_core::config::HookMode;

use crate::{
    attach::{
        attachment::{AttachContext, AttachState, ClsactError, Hook, HookAttachment, HookError},
        netlink::{ETHERNET, LOOPBACK, Link, Socket},
    },
    programs::{Missing, Program, Programs},
};

/// Hooks to try on an interface, best first, and the reason.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Plan {
    hooks: Vec<Hook>,
    /// The reason for choosing the first one.
    why: String,
    /// Whether a fallback from the first hook is logged as a warning.
    wanted_first: bool,
}

impl Plan {
    /// Requests the best hook's programs in advance.
    pub(crate) fn order(&self, programs: &mut Programs) {
        if let Some(&hook) = self.hooks.first() {
            programs.order(Program::of(hook));
        }
    }
}

/// The reason why nothing is attached to an interface.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NotServed {
    /// Its programs are being loaded; [`Programs::news`] becomes readable afterwards.
    #[error("its program is being loaded")]
    Loading,
    /// The interface may still change; attaching is tried again once it has settled.
    #[error("{}", ClsactError::Unsettled)]
    Unsettled,
    #[error("its packets have no Ethernet header")]
    NoEthernet,
    #[error("xdp.mode is off")]
    Off,
    #[error(transparent)]
    Hooks(#[from] Refusals),
}

/// Hooks that refused the program, with the reasons.
#[derive(Debug, Default, thiserror::Error)]
pub(crate) struct Refusals(Vec<HookError>);

impl Refusals {
    /// Adds a refusal. An error of a program is listed once, even if several hooks need that
    /// program.
    fn push(&mut self, refusal: HookError) {
        let is_same = |known: &HookError| match (known, &refusal) {
            (HookError::NoProgram(known), HookError::NoProgram(missing)) => known == missing,
            _ => false,
        };
        if !self.0.iter().any(is_same) {
            self.0.push(refusal);
        }
    }
}

impl fmt::Display for Refusals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().enumerate().try_for_each(|(number, refusal)| {
            let separator = if number == 0 { "" } else { "; " };
            write!(f, "{separator}{refusal}")
        })
    }
}

/// The tc hook to try first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TcOrder {
    /// tcx ends with its process and replaces its program atomically, but attaching and detaching hold
    /// the RTNL lock for an RCU grace period: 11 to 13 ms.
    Tcx,
    /// A classic filter holds the lock for 0.1 ms.
    Clsact,
}

/// Returns the hooks for an interface in this mode.
pub(crate) fn plan(mode: HookMode, link: &Link, order: TcOrder) -> Result<Plan, NotServed> {
    if !matches!(link.layer, ETHERNET | LOOPBACK) {
        return Err(NotServed::NoEthernet);
    }
    let [first, second] = match order {
        TcOrder::Tcx => [Hook::Tcx, Hook::Clsact],
        TcOrder::Clsact => [Hook::Clsact, Hook::Tcx],
    };
    let plan = |hooks: &[Hook], why: &str, wanted_first| {
        let why = match order {
            TcOrder::Tcx => why.to_owned(),
            TcOrder::Clsact => format!("{why}; clsact does not hold up other network configuration"),
        };
        Plan { hooks: hooks.into(), why, wanted_first }
    };
    Ok(match mode {
        HookMode::Off => return Err(NotServed::Off),
        HookMode::Tc => plan(&[first, second], "mode is tc", false),
        HookMode::Native => plan(&[Hook::Native, first, second], "mode is native", true),
        // Native XDP slows other traffic with every driver: virtio_net loses its guest's offloads,
        // jumbo frames do not fit, i40e, ice and mlx5 restart their queues, and a veth needs a
        // program at its other end.
        HookMode::Auto => plan(&[first, second], "auto: tc does not slow other traffic", false),
    })
}

#[derive(Debug)]
pub(crate) struct Attachment {
    ifindex: u32,
    /// The program on it.
    program: HookAttachment,
    why: String,
}

impl Attachment {
    /// Attaches to the best hook of the plan that accepts the program, replacing a predecessor's.
    pub(crate) fn make(plan: Plan, link: &Link, context: &mut AttachContext<'_>) -> Result<Self, NotServed> {
        let Plan { hooks, why, wanted_first } = plan;
        let (mut refusals, mut is_unsettled) = (Refusals::default(), false);
        for (index, &hook) in hooks.iter().enumerate() {
            match context.programs.get(Program::of(hook)) {
                Ok(_) => {}
                Err(Missing::Loading) => return Err(NotServed::Loading),
                Err(missing) => {
                    refusals.push(missing.into());
                    continue;
                }
            }
            let program = match HookAttachment::take(hook, link, context) {
                Ok(attachment) => attachment,
                Err(HookError::Clsact(ClsactError::Unsettled)) => {
                    is_unsettled = true;
                    continue;
                }
                Err(refusal) => {
                    refusals.push(refusal);
                    continue;
                }
            };
            let why = if refusals.0.is_empty() { why } else { format!("{why}; but {refusals}") };
            // A fallback from tcx to clsact only means an older kernel, about which nothing can be
            // done.
            if index > 0 && hooks[0].is_xdp() {
                if wanted_first {
                    tracing::warn!(interface = %link.name, %hook, why, "requested hook unavailable; falling back to tc");
                } else {
                    tracing::info!(interface = %link.name, %hook, why, "best hook unavailable; falling back to tc");
                }
            }
            return Ok(Self { ifindex: link.ifindex, program, why });
        }
        Err(if is_unsettled { NotServed::Unsettled } else { refusals.into() })
    }

    pub(crate) fn hook(&self) -> Hook {
        self.program.hook
    }

    pub(crate) fn why(&self) -> &str {
        &self.why
    }

    pub(crate) fn state(&self, programs: &Programs, netlink: &mut Socket) -> AttachState {
        self.program.state(self.ifindex, programs, netlink)
    }

    /// Detaches the program, unless a successor has replaced it.
    pub(crate) fn detach(self, programs: &Programs, netlink: &mut Socket) {
        self.program.leave(self.ifindex, programs, netlink);
    }

    /// Returns whether the attachment outlives the process.
    pub(crate) fn is_kept(&self) -> bool {
        self.program.is_kept()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns an interface of this kind.
    fn link(layer: u16, kind: Option<&str>) -> Link {
        Link { layer, kind: kind.map(str::to_owned), ..Link::named(7, "x") }
    }

    #[test]
    fn auto_takes_tc_everywhere() {
        for (layer, kind) in [(ETHERNET, None), (LOOPBACK, None), (ETHERNET, Some("veth"))] {
            let first = |order| plan(HookMode::Auto, &link(layer, kind), order).unwrap().hooks[0];
            assert_eq!((first(TcOrder::Tcx), first(TcOrder::Clsact)), (Hook::Tcx, Hook::Clsact));
        }
    }

    #[test]
    fn every_mode_falls_back_to_tc() {
        for mode in [HookMode::Auto, HookMode::Native, HookMode::Tc] {
            let last = plan(mode, &link(1, None), TcOrder::Tcx).unwrap().hooks.last().copied();
            assert_eq!(last, Some(Hook::Clsact));
        }
        assert_eq!(plan(HookMode::Native, &link(1, None), TcOrder::Clsact).unwrap().hooks[0], Hook::Native);
    }

    #[test]
    fn interfaces_without_ethernet_headers_are_left_alone() {
        // ARPHRD_NONE: a tun or WireGuard device.
        assert!(plan(HookMode::Tc, &link(0xfffe, Some("wireguard")), TcOrder::Tcx).is_err());
    }
}
