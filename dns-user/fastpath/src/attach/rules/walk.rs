//! The possible fates of a packet in chains of rules, for legacy tables and nftables alike.
//!
//! Some matches cannot be decided outside the kernel (time, owners, contents). Both outcomes of such a
//! rule are followed, so the result contains every possible end of the packet.

/// Whether a packet meets a condition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Meets {
    No,
    /// Depends on facts unknown here; holds the name of the condition.
    Maybe(&'static str),
    /// Depends on the number of earlier packets.
    Rate,
    Yes,
}

impl Meets {
    /// Converts a known condition.
    pub(super) fn known(truth: bool) -> Self {
        if truth { Self::Yes } else { Self::No }
    }

    pub(super) fn inverted(self, invert: bool) -> Self {
        match self {
            Self::No if invert => Self::Yes,
            Self::Yes if invert => Self::No,
            other => other,
        }
    }

    pub(super) fn and(self, other: Self) -> Self {
        match (self, other) {
            (Self::No, _) | (_, Self::No) => Self::No,
            (Self::Rate, _) | (_, Self::Rate) => Self::Rate,
            (Self::Maybe(name), _) | (_, Self::Maybe(name)) => Self::Maybe(name),
            _ => Self::Yes,
        }
    }
}

/// The action of a rule on a packet that meets its conditions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// Continue with the next rule.
    Continue,
    Accept,
    Drop,
    /// Redirect the packet, so that our socket does not receive it.
    Divert,
    /// Deliver the packet with another source address.
    Translate,
    /// Decided elsewhere; holds the name of the target.
    Unknown(&'static str),
    /// Continue in this chain, then return.
    Jump(usize),
    /// Continue in this chain and do not return.
    Goto(usize),
    /// Return to the calling chain.
    Return,
}

/// The possible ends of a packet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Ends {
    pub(super) deliver: bool,
    pub(super) drop: bool,
    pub(super) divert: bool,
    /// Whether NAT may change the source address.
    pub(super) translated: bool,
    /// Whether any of these depends on the number of earlier packets.
    pub(super) rate: bool,
    /// Name of a condition or target on which any of these depends and that only the kernel can
    /// evaluate.
    pub(super) unsure: Option<&'static str>,
}

impl Ends {
    pub(super) const DELIVERED: Self =
        Self { deliver: true, drop: false, divert: false, translated: false, rate: false, unsure: None };

    fn or(self, other: Self) -> Self {
        Self {
            deliver: self.deliver || other.deliver,
            drop: self.drop || other.drop,
            divert: self.divert || other.divert,
            translated: self.translated || other.translated,
            rate: self.rate || other.rate,
            unsure: self.unsure.or(other.unsure),
        }
    }

    /// Combines the ends of two consecutive chains.
    pub(super) fn then(self, next: Self) -> Self {
        Self { deliver: self.deliver && next.deliver, ..self.or(next) }
    }

    /// Returns whether the packet is certainly not delivered.
    pub(super) fn is_held(self) -> bool {
        !self.deliver && (self.drop || self.divert)
    }

    /// Returns whether delivery is uncertain.
    pub(super) fn is_undecided(self) -> bool {
        self.deliver && (self.drop || self.divert)
    }
}

/// The chains of one table.
pub(super) trait Chains {
    /// Returns the actions of a rule on the packet of this walk, in order: a rule may hold several
    /// conditions, each with a separate action.
    fn decide(&mut self, chain: usize, rule: usize) -> Vec<(Meets, Action)>;

    fn rules(&mut self, chain: usize) -> usize;
}

/// Maximum depth of jumps: the kernel allows 16 in nft, and one per chain in x_tables.
const DEEPEST: usize = 64;

/// Maximum number of rules evaluated for one packet: uncertain jumps multiply the paths.
const MOST_RULES: usize = 200_000;

/// Returns the possible fates of a packet that enters this chain; `policy` applies at its end.
pub(super) fn walk(chains: &mut impl Chains, chain: usize, policy: Action) -> Ends {
    let mut left = MOST_RULES;
    let (ends, falls) = pass(chains, chain, DEEPEST, &mut left);
    if falls { ends.or(end(policy)) } else { ends }
}

/// Returns the end caused by a final action.
fn end(action: Action) -> Ends {
    let none = Ends::default();
    match action {
        Action::Drop => Ends { drop: true, ..none },
        Action::Divert => Ends { divert: true, ..none },
        Action::Translate => Ends { translated: true, ..Ends::DELIVERED },
        Action::Unknown(name) => Ends { deliver: true, drop: true, unsure: Some(name), ..none },
        _ => Ends::DELIVERED,
    }
}

/// Returns the ends in a chain, and whether the packet may return from it.
fn pass(chains: &mut impl Chains, chain: usize, depth: usize, left: &mut usize) -> (Ends, bool) {
    let mut ends = Ends::default();
    if depth == 0 {
        return (end(Action::Unknown("too many jumps")), true);
    }
    let mut may_return = false;
    for rule in 0..chains.rules(chain) {
        if *left == 0 {
            // Too many paths: the result is unknown.
            return (ends.or(end(Action::Unknown("too many rules"))), true);
        }
        *left -= 1;
        for (meets, action) in chains.decide(chain, rule) {
            let (found, falls, returns) = match (meets, action) {
                (Meets::No, _) => continue,
                (_, Action::Continue) => (Ends::default(), true, false),
                (_, Action::Return) => (Ends::default(), false, true),
                (_, Action::Jump(to)) => {
                    let (found, falls) = pass(chains, to, depth - 1, left);
                    (found, falls, false)
                }
                (_, Action::Goto(to)) => {
                    let (found, falls) = pass(chains, to, depth - 1, left);
                    (found, false, falls)
                }
                (_, Action::Unknown(_)) => (end(action), true, false),
                (_, last) => (end(last), false, false),
            };
            // The condition decides between this action and the following rules.
            let condition = match meets {
                Meets::Rate if action != Action::Continue => Ends { rate: true, ..Ends::default() },
                Meets::Maybe(name) if action != Action::Continue => {
                    Ends { unsure: Some(name), ..Ends::default() }
                }
                _ => Ends::default(),
            };
            ends = ends.or(found).or(condition);
            may_return |= returns;
            if meets == Meets::Yes {
                if !falls {
                    return (ends, may_return);
                }
                break;
            }
        }
    }
    (ends, true)
}
