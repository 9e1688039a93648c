//! What may become of a packet in chains of rules, whichever kind of table they are of.
//!
//! Not every match can be decided from outside the kernel (sets, time, owners). Such a rule is
//! followed both ways, so the result is every end that the packet may come to.

/// Whether a packet meets a condition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Meets {
    /// It does not.
    No,
    /// It depends on what is not known here.
    Maybe,
    /// It depends on how many packets came before.
    Rate,
    /// It does.
    Yes,
}

impl Meets {
    /// By a truth that is known.
    pub(super) fn known(truth: bool) -> Self {
        if truth { Self::Yes } else { Self::No }
    }

    /// Both conditions.
    pub(super) fn and(self, other: Self) -> Self {
        match (self, other) {
            (Self::No, _) | (_, Self::No) => Self::No,
            (Self::Rate, _) | (_, Self::Rate) => Self::Rate,
            (Self::Maybe, _) | (_, Self::Maybe) => Self::Maybe,
            _ => Self::Yes,
        }
    }
}

/// What a rule does with a packet that meets its conditions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// Goes on with the next rule.
    Continue,
    /// Leaves the table.
    Accept,
    /// Drops it.
    Drop,
    /// Changes where it goes, so that our socket does not get it.
    Divert,
    /// A program or target decides that is not known here.
    Unknown,
    /// Goes through this chain, then on.
    Jump(usize),
    /// Goes through this chain and not back.
    Goto(usize),
    /// Goes back to the chain before.
    Return,
}

/// The ends that a packet may come to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Ends {
    /// It goes on.
    pub(super) deliver: bool,
    /// It is dropped.
    pub(super) drop: bool,
    /// It goes elsewhere.
    pub(super) divert: bool,
    /// One of these depends on how many packets came before.
    pub(super) rate: bool,
}

impl Ends {
    /// It goes on for certain.
    pub(super) const DELIVERED: Self = Self { deliver: true, drop: false, divert: false, rate: false };

    /// Either of both.
    fn or(self, other: Self) -> Self {
        Self {
            deliver: self.deliver || other.deliver,
            drop: self.drop || other.drop,
            divert: self.divert || other.divert,
            rate: self.rate || other.rate,
        }
    }

    /// Of two chains one after the other.
    pub(super) fn then(self, next: Self) -> Self {
        Self { deliver: self.deliver && next.deliver, ..self.or(next) }
    }

    /// It does not go on for certain.
    pub(super) fn is_held(self) -> bool {
        !self.deliver && (self.drop || self.divert)
    }

    /// Whether it goes on depends on how many packets came before.
    pub(super) fn is_limited(self) -> bool {
        self.rate && self.deliver && (self.drop || self.divert)
    }
}

/// Chains of one table.
pub(super) trait Chains {
    /// What the rules of a chain do with the packet of this walk, one after the other: each may
    /// meet several conditions with an action of their own.
    fn decide(&mut self, chain: usize, rule: usize) -> Vec<(Meets, Action)>;

    /// Rules of a chain.
    fn rules(&mut self, chain: usize) -> usize;
}

/// Deepest jump: the kernel allows 16 in nft, and as many as there are chains in x_tables.
const DEEPEST: usize = 64;

/// Most rules that are looked at for one packet: jumps that may or may not be taken multiply.
const MOST_RULES: usize = 200_000;

/// What may become of a packet that enters this chain; `policy`: what becomes of it at the end.
pub(super) fn walk(chains: &mut impl Chains, chain: usize, policy: Action) -> Ends {
    let mut left = MOST_RULES;
    let (ends, falls) = pass(chains, chain, DEEPEST, &mut left);
    if falls { ends.or(end(policy)) } else { ends }
}

/// The end that a last action is.
fn end(action: Action) -> Ends {
    let none = Ends::default();
    match action {
        Action::Drop => Ends { drop: true, ..none },
        Action::Divert => Ends { divert: true, ..none },
        Action::Unknown => Ends { deliver: true, drop: true, ..none },
        _ => Ends::DELIVERED,
    }
}

/// The ends in a chain, and whether the packet may come out of it again.
fn pass(chains: &mut impl Chains, chain: usize, depth: usize, left: &mut usize) -> (Ends, bool) {
    let mut ends = Ends::default();
    if depth == 0 {
        return (ends, true);
    }
    let mut may_return = false;
    for rule in 0..chains.rules(chain) {
        if *left == 0 {
            // Too many ways: nothing is known.
            return (ends.or(end(Action::Unknown)), true);
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
                (_, Action::Unknown) => (end(action), true, false),
                (_, last) => (end(last), false, false),
            };
            let is_rated = meets == Meets::Rate && found != Ends::default();
            ends = ends.or(found).or(Ends { rate: is_rated, ..Ends::default() });
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
