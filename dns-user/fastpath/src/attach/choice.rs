//! Which hooks serve an interface.

use std::fmt;

use crate::{
    attach::{
        attachment::{HookAttachment, HookError, Means, Stage, Standing},
        hook::Hook,
        netlink::{Link, Socket},
    },
    programs::{Missing, Programs},
};
use dns_core::config::HookMode;

/// Hooks to try on an interface, best first, and why.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Plan {
    /// The hooks.
    hooks: Vec<Hook>,
    /// Why the first one is the choice.
    why: String,
    /// Whether another hook than the first is worth a warning.
    wanted_first: bool,
}

impl Plan {
    /// Has the programs loaded that the best hook needs, before they are.
    pub(crate) fn order(&self, programs: &mut Programs) {
        if let Some(&hook) = self.hooks.first() {
            order(hook, programs);
        }
    }
}

/// Has the programs loaded that a hook needs.
fn order(hook: Hook, programs: &mut Programs) {
    programs.order(Stage::First.program(hook));
    if hook.is_xdp() {
        programs.order(Stage::Second.program(hook));
    }
}

/// Why nothing is attached to an interface.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NotServed {
    /// Its programs are being loaded; [`Programs::news`] tells when they are.
    #[error("its program is being loaded")]
    Loading,
    /// A tunnel, mostly.
    #[error("its packets have no Ethernet header")]
    NoEthernet,
    /// Nothing is to be attached.
    #[error("xdp.mode is off")]
    Off,
    /// None of the hooks takes a program.
    #[error(transparent)]
    Hooks(#[from] Refusals),
}

/// Hooks that were tried in vain, and why.
#[derive(Debug, Default, thiserror::Error)]
pub(crate) struct Refusals(Vec<HookError>);

impl Refusals {
    /// Adds one. What is wrong with a program is told once, though several hooks need it.
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

/// The hooks for an interface in this mode.
pub(crate) fn plan(mode: HookMode, link: &Link) -> Result<Plan, NotServed> {
    /// `ARPHRD_ETHER`.
    const ETHERNET: u16 = 1;
    /// `ARPHRD_LOOPBACK`: its packets have an Ethernet header, too.
    const LOOPBACK: u16 = 772;
    if !matches!(link.layer, ETHERNET | LOOPBACK) {
        return Err(NotServed::NoEthernet);
    }
    let plan = |hooks: &[Hook], why: String, wanted_first| Plan { hooks: hooks.into(), why, wanted_first };
    Ok(match mode {
        HookMode::Off => return Err(NotServed::Off),
        HookMode::Tc => plan(&Hook::TC, "mode is tc".into(), false),
        HookMode::Native => plan(&[Hook::Native, Hook::Tcx, Hook::Clsact], "mode is native".into(), true),
        HookMode::Generic => plan(&[Hook::Generic, Hook::Tcx, Hook::Clsact], "mode is generic".into(), true),
        HookMode::Auto if link.layer == LOOPBACK => {
            plan(&Hook::TC, "auto: XDP would slow down bulk traffic on the loopback".into(), false)
        }
        HookMode::Auto => match &link.kind {
            None => plan(
                &[Hook::Native, Hook::Tcx, Hook::Clsact],
                "auto: hardware whose driver takes XDP".into(),
                false,
            ),
            Some(kind) if kind == "veth" => plan(
                &Hook::TC,
                "auto: native XDP on a veth needs help from the container's end, generic slows down bulk traffic"
                    .into(),
                false,
            ),
            Some(kind) => plan(&Hook::TC, format!("auto: a {kind} has no XDP of its own"), false),
        },
    })
}

/// An interface that is served.
#[derive(Debug)]
pub(crate) struct Attachment {
    /// Interface.
    ifindex: u32,
    /// The program that answers.
    first: HookAttachment,
    /// Why there.
    why: String,
    /// The program behind it at tc; `None`: `first` is at tc itself, or it cannot be had.
    second: Option<HookAttachment>,
    /// Why `second` could not be had when it was last tried.
    refusal: Option<String>,
}

impl Attachment {
    /// Attaches to the best hook of the plan that takes the program, in the
    /// place of what a predecessor left there. [`Self::complete`] is next.
    ///
    /// Waits for all programs of a hook, so that both stages are attached together.
    pub(crate) fn make(plan: Plan, link: &Link, means: &mut Means<'_>) -> Result<Self, NotServed> {
        let Plan { hooks, why, wanted_first } = plan;
        let mut refusals = Refusals::default();
        for (index, &hook) in hooks.iter().enumerate() {
            order(hook, means.programs);
            match means.programs.get(Stage::First.program(hook)) {
                Ok(_) => {}
                Err(Missing::Loading) => return Err(NotServed::Loading),
                Err(missing) => {
                    refusals.push(missing.into());
                    continue;
                }
            }
            if hook.is_xdp() && means.programs.is_loading(Stage::Second.program(hook)) {
                return Err(NotServed::Loading);
            }
            let first = match HookAttachment::take(hook, Stage::First, link, means) {
                Ok(attachment) => attachment,
                Err(refusal) => {
                    refusals.push(refusal);
                    continue;
                }
            };
            let why = if refusals.0.is_empty() { why } else { format!("{why}; but {refusals}") };
            // Between tcx and clsact the kernel's age decides; nobody need act on it.
            if index > 0 && hooks[0].is_xdp() {
                if wanted_first {
                    tracing::warn!(interface = %link.name, %hook, why, "requested hook unavailable; falling back to tc");
                } else {
                    tracing::info!(interface = %link.name, %hook, why, "best hook unavailable; falling back to tc");
                }
            }
            return Ok(Self { ifindex: link.ifindex, first, why, second: None, refusal: None });
        }
        Err(refusals.into())
    }

    /// Attaches the second stage where XDP answers and has none behind it yet.
    ///
    /// After the first one: until then what a predecessor left at tc answers.
    pub(crate) fn complete(&mut self, link: &Link, means: &mut Means<'_>) {
        if !self.is_xdp() || self.second.is_some() {
            return;
        }
        let program = Stage::Second.program(Hook::Tcx);
        if means.programs.get(program).is_err_and(|missing| missing == Missing::Loading) {
            return;
        }
        let mut refusals = Refusals::default();
        for hook in Hook::TC {
            match HookAttachment::take(hook, Stage::Second, link, means) {
                Ok(attachment) => {
                    tracing::debug!(interface = %link.name, %hook, "attached the second stage: it answers what finds no room at XDP");
                    (self.second, self.refusal) = (Some(attachment), None);
                    return;
                }
                Err(refusal) => refusals.push(refusal),
            }
        }
        let why = refusals.to_string();
        // Tried again and again, but said once.
        if self.refusal.as_ref() != Some(&why) {
            tracing::warn!(interface = %link.name, why, "cannot attach the second stage at tc: queries whose replies find no room at XDP are answered from userspace");
        }
        self.refusal = Some(why);
    }

    /// The hook that answers.
    pub(crate) fn hook(&self) -> Hook {
        self.first.hook
    }

    /// The hook behind it that answers what finds no room.
    pub(crate) fn second_hook(&self) -> Option<Hook> {
        self.second.as_ref().map(|attachment| attachment.hook)
    }

    /// Whether XDP answers.
    pub(crate) fn is_xdp(&self) -> bool {
        self.first.hook.is_xdp()
    }

    /// Why these hooks.
    pub(crate) fn why(&self) -> String {
        let why = &self.why;
        match (&self.second, &self.refusal) {
            (Some(second), _) => format!("{why}; behind it {} for replies without room", second.hook),
            (None, Some(refusal)) => format!("{why}; nothing behind it for replies without room: {refusal}"),
            (None, None) => why.clone(),
        }
    }

    /// Whether our programs are still there. A second stage that is gone is
    /// forgotten: [`Self::complete`] brings it back.
    pub(crate) fn look_after(&mut self, programs: &Programs, netlink: &mut Socket) -> Standing {
        let second =
            self.second.as_ref().map(|attachment| attachment.standing(self.ifindex, programs, netlink));
        match second {
            Some(Standing::TakenOver) => return Standing::TakenOver,
            Some(Standing::Gone) => self.second = None,
            Some(Standing::Ours) | None => {}
        }
        self.first.standing(self.ifindex, programs, netlink)
    }

    /// Takes off what is behind a first program that is gone, so that both can be
    /// attached anew. The pin of what is gone stays: another server may have pinned
    /// its own there, and ours is put in its place otherwise.
    pub(crate) fn give_up(self, programs: &Programs, netlink: &mut Socket) {
        if let Some(second) = self.second {
            second.leave(self.ifindex, programs, netlink);
        }
    }

    /// Takes the programs off the interface, unless a successor's are there by now.
    pub(crate) fn detach(self, programs: &Programs, netlink: &mut Socket) {
        let Self { ifindex, first, why: _, second, refusal: _ } = self;
        // XDP first: it leaves to the second what it cannot answer.
        first.leave(ifindex, programs, netlink);
        if let Some(second) = second {
            second.leave(ifindex, programs, netlink);
        }
    }

    /// Whether it outlives the process.
    pub(crate) fn is_kept(&self) -> bool {
        self.first.is_kept() && self.second.as_ref().is_none_or(HookAttachment::is_kept)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An interface of this kind.
    fn link(layer: u16, kind: Option<&str>) -> Link {
        Link {
            ifindex: 7,
            name: "x".into(),
            layer,
            kind: kind.map(str::to_owned),
            part_of: None,
            address: [0; 6],
            master: None,
            xdp_program: None,
        }
    }

    #[test]
    fn auto_takes_native_only_on_hardware() {
        let first = |layer, kind| plan(HookMode::Auto, &link(layer, kind)).unwrap().hooks[0];
        assert_eq!(first(1, None), Hook::Native);
        assert_eq!(first(772, None), Hook::Tcx);
        for kind in ["veth", "bridge", "dummy", "vlan"] {
            assert_eq!(first(1, Some(kind)), Hook::Tcx);
        }
    }

    #[test]
    fn every_mode_falls_back_to_tc() {
        for mode in [HookMode::Auto, HookMode::Native, HookMode::Generic, HookMode::Tc] {
            assert_eq!(plan(mode, &link(1, None)).unwrap().hooks.last(), Some(&Hook::Clsact));
        }
        assert_eq!(plan(HookMode::Generic, &link(1, None)).unwrap().hooks[0], Hook::Generic);
    }

    #[test]
    fn interfaces_without_ethernet_headers_are_left_alone() {
        // ARPHRD_NONE: a tun or WireGuard device.
        assert!(plan(HookMode::Tc, &link(0xfffe, Some("wireguard"))).is_err());
    }
}
