//! The choice of hooks for an interface.

use dns_core::config::HookMode;
use dns_fastpath::protocol::Hook;

use crate::{
    attach::{
        attachment::{AttachContext, Attachment, NotServed, program_of},
        netlink::{ETHERNET, LOOPBACK, Link},
    },
    programs::Programs,
};

/// Hooks to try on an interface, best first, and the reason.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Plan {
    hooks: Vec<Hook>,
    /// The reason for choosing the first one.
    why: String,
}

impl Plan {
    /// Requests the best hook's programs in advance.
    pub(crate) fn order(&self, programs: &mut Programs) {
        if let Some(&hook) = self.hooks.first() {
            programs.order(program_of(hook));
        }
    }
}

/// The tc hook to try first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TcOrder {
    /// tcx ends with its process and replaces its program atomically, but attaching and detaching hold
    /// the RTNL lock for an RCU grace period: 11 to 13 ms.
    Tcx,
    /// A classic filter holds the lock for 0.1 ms; before its qdisc is added or removed, the kernel takes the
    /// interface's queues out of service, so what it sends for some milliseconds is lost.
    Clsact,
}

pub(crate) fn plan(mode: HookMode, link: &Link, order: TcOrder) -> Result<Plan, NotServed> {
    if !matches!(link.layer, ETHERNET | LOOPBACK) {
        return Err(NotServed::Refused(
            "its packets have no Ethernet header".to_owned(),
        ));
    }
    let [first, second] = match order {
        TcOrder::Tcx => [Hook::Tcx, Hook::Clsact],
        TcOrder::Clsact => [Hook::Clsact, Hook::Tcx],
    };
    let plan = |hooks: &[Hook], why: &str| {
        let why = match order {
            TcOrder::Tcx => why.to_owned(),
            TcOrder::Clsact => {
                format!("{why}; clsact does not hold up other network configuration")
            }
        };
        Plan {
            hooks: hooks.into(),
            why,
        }
    };
    Ok(match mode {
        HookMode::Off => return Err(NotServed::Refused("xdp.mode is off".to_owned())),
        HookMode::Tc => plan(&[first, second], "mode is tc"),
        HookMode::Native => plan(&[Hook::Native, first, second], "mode is native"),
        // Native XDP slows other traffic with every driver: virtio_net loses its guest's offloads,
        // jumbo frames do not fit, i40e, ice and mlx5 restart their queues, and a veth needs a
        // program at its other end.
        HookMode::Auto => plan(&[first, second], "auto: tc does not slow other traffic"),
    })
}

/// Attaches to the best hook of the plan that accepts the program, replacing a predecessor's.
pub(crate) fn attach(
    plan: Plan,
    link: &Link,
    context: &mut AttachContext<'_>,
) -> Result<Attachment, NotServed> {
    let Plan { hooks, why } = plan;
    let mut refusals = Vec::<String>::new();
    let mut is_unsettled = false;
    for (index, &hook) in hooks.iter().enumerate() {
        let reason = if refusals.is_empty() {
            why.clone()
        } else {
            format!("{why}; but {}", refusals.join("; "))
        };
        let attachment = match Attachment::make(hook, link, reason, context) {
            Ok(attachment) => attachment,
            // No other hook in the meantime: an interface keeps the hook that it has got.
            Err(NotServed::Loading) => return Err(NotServed::Loading),
            Err(NotServed::Unsettled) => {
                // Another hook may still take it now; waiting is the last choice.
                is_unsettled = true;
                continue;
            }
            Err(NotServed::Refused(refusal)) => {
                // Several hooks may need one program.
                if !refusals.contains(&refusal) {
                    refusals.push(refusal);
                }
                continue;
            }
        };
        let why = &attachment.why;
        // A fallback from tcx to clsact only means an older kernel, about which nothing can be done.
        if index > 0 && hooks[0] == Hook::Native {
            tracing::warn!(interface = %link.name, %hook, why, "requested hook unavailable; falling back to tc");
        }
        return Ok(attachment);
    }
    Err(if is_unsettled {
        NotServed::Unsettled
    } else {
        NotServed::Refused(refusals.join("; "))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns an interface of this kind.
    fn link(layer: u16, kind: Option<&str>) -> Link {
        Link {
            layer,
            kind: kind.map(str::to_owned),
            ..Link::named(7, "x")
        }
    }

    #[test]
    fn auto_takes_tc_everywhere() {
        for (layer, kind) in [(ETHERNET, None), (LOOPBACK, None), (ETHERNET, Some("veth"))] {
            let first = |order| {
                plan(HookMode::Auto, &link(layer, kind), order)
                    .unwrap()
                    .hooks[0]
            };
            assert_eq!(
                (first(TcOrder::Tcx), first(TcOrder::Clsact)),
                (Hook::Tcx, Hook::Clsact)
            );
        }
    }

    #[test]
    fn every_mode_falls_back_to_tc() {
        for mode in [HookMode::Auto, HookMode::Native, HookMode::Tc] {
            let last = plan(mode, &link(1, None), TcOrder::Tcx)
                .unwrap()
                .hooks
                .last()
                .copied();
            assert_eq!(last, Some(Hook::Clsact));
        }
        assert_eq!(
            plan(HookMode::Native, &link(1, None), TcOrder::Clsact)
                .unwrap()
                .hooks[0],
            Hook::Native
        );
    }

    #[test]
    fn interfaces_without_ethernet_headers_are_left_alone() {
        // ARPHRD_NONE: a tun or WireGuard device.
        assert!(plan(HookMode::Tc, &link(0xfffe, Some("wireguard")), TcOrder::Tcx).is_err());
    }
}
