//! Baseline programs that pass or answer packets without any lookup
//! (`benches/programs/ebpf/src/yardsticks`), to measure the minimum cost of an answer at an interface. They
//! are not part of the server.

use anyhow::{Context, Result, bail};
use aya::{
    Ebpf, EbpfLoader,
    programs::{SchedClassifier, TcAttachType, Xdp, XdpMode, tc},
};

use crate::namespace::Namespace;

/// Maximum answers of the constant reflector: as many as fit into the XDP headroom.
pub const MAX_ANSWERS: u32 = 13;

/// A baseline program without lookups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Yardstick {
    /// Passes every packet: for the client's end, because native `XDP_TX` on the server's end needs
    /// a program there.
    Pass,
    /// Swaps addresses and sends an empty reply.
    Reflector,
    /// Sends a constant reply with this number of answers.
    Constant { answers: u32 },
}

/// Attachment point of a baseline program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hook {
    /// XDP in the driver.
    Native,
    Tc,
}

/// Attaches a loaded program to an interface in a namespace; dropping the object detaches it.
pub fn attach(
    object: &mut Ebpf,
    name: &str,
    hook: Hook,
    namespace: &Namespace,
    interface: &str,
) -> Result<()> {
    let attached = namespace.run(|| -> Result<()> {
        let program = object
            .program_mut(name)
            .with_context(|| format!("no program {name}"))?;
        match hook {
            Hook::Tc => {
                // Kernels with tcx (6.6) use that instead.
                tc::qdisc_add_clsact(interface)?;
                <&mut SchedClassifier>::try_from(program)?
                    .attach(interface, TcAttachType::Ingress)?;
            }
            Hook::Native => {
                <&mut Xdp>::try_from(program)?.attach(interface, XdpMode::Driver)?;
            }
        }
        Ok(())
    })?;
    attached.with_context(|| format!("{name} on {interface}"))
}

impl Yardstick {
    /// Loads the program for `hook`, ready to be attached or run; also returns its name in the
    /// object.
    pub fn load(self, hook: Hook) -> Result<(Ebpf, &'static str)> {
        let name = match (self, hook) {
            (Self::Pass, Hook::Tc) => bail!("the program that only passes is one for XDP"),
            (Self::Pass, Hook::Native) => "pass",
            (Self::Reflector, Hook::Native) => "reflector_xdp",
            (Self::Reflector, Hook::Tc) => "reflector_tc",
            (Self::Constant { .. }, Hook::Native) => "constant_xdp",
            (Self::Constant { .. }, Hook::Tc) => "constant_tc",
        };
        let answers = self.answers();
        let mut object = EbpfLoader::new()
            .override_global("ANSWERS", &answers, true)
            .load(bench_programs::YARDSTICKS)?;
        let program = object
            .program_mut(name)
            .with_context(|| format!("no program {name}"))?;
        match hook {
            Hook::Tc => <&mut SchedClassifier>::try_from(program)?.load()?,
            Hook::Native => <&mut Xdp>::try_from(program)?.load()?,
        }
        Ok((object, name))
    }

    /// Attaches the program to an interface in a namespace; dropping the object detaches it.
    pub fn attach(self, hook: Hook, namespace: &Namespace, interface: &str) -> Result<Ebpf> {
        let (mut object, name) = self.load(hook)?;
        attach(&mut object, name, hook, namespace, interface)?;
        Ok(object)
    }

    const fn answers(self) -> u32 {
        match self {
            Self::Constant { answers } if answers < MAX_ANSWERS => answers,
            Self::Constant { .. } => MAX_ANSWERS,
            Self::Pass | Self::Reflector => 0,
        }
    }
}
