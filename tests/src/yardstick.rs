//! Programs that pass or answer without knowing anything (`dns-ebpf/src/bin/yardsticks`):
//! what every answer at an interface costs. They are not part of the server.

use anyhow::{Context, Result, bail};
use aya::{
    Ebpf, EbpfLoader,
    programs::{SchedClassifier, TcAttachType, Xdp, XdpMode, tc},
};

use crate::namespace::Namespace;

/// The object; the server's build script builds it together with the server's.
const OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../dns-ebpf/target/bpfel-unknown-none/release/yardsticks"
));

/// Most answers of the constant reflector: what finds room before a packet at XDP.
pub const MAX_ANSWERS: u32 = 13;

/// A program to hold others against.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Yardstick {
    /// Lets every packet go up: for the client's end, where native `XDP_TX` on the
    /// server's end needs a program.
    Pass,
    /// Swaps addresses and sends an empty reply.
    Reflector,
    /// Sends this number of answers, always the same.
    Constant { answers: u32 },
}

/// Where a yardstick is attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hook {
    /// XDP in the driver.
    Native,
    /// XDP in generic mode.
    Generic,
    Tc,
}

impl Yardstick {
    /// Loads it for `hook`, ready to be attached or run; returns its name in the object too.
    pub fn load(self, hook: Hook) -> Result<(Ebpf, &'static str)> {
        let name = match (self, hook) {
            (Self::Pass, Hook::Tc) => bail!("the program that only passes is one for XDP"),
            (Self::Pass, Hook::Native | Hook::Generic) => "pass",
            (Self::Reflector, Hook::Native | Hook::Generic) => "reflector_xdp",
            (Self::Reflector, Hook::Tc) => "reflector_tc",
            (Self::Constant { .. }, Hook::Native) => "constant_xdp",
            (Self::Constant { .. }, Hook::Generic) => "constant_xdp_generic",
            (Self::Constant { .. }, Hook::Tc) => "constant_tc",
        };
        let answers = self.answers();
        let mut object = EbpfLoader::new().override_global("ANSWERS", &answers, true).load(OBJECT)?;
        let program = object.program_mut(name).with_context(|| format!("no program {name}"))?;
        match hook {
            Hook::Tc => <&mut SchedClassifier>::try_from(program)?.load()?,
            Hook::Native | Hook::Generic => <&mut Xdp>::try_from(program)?.load()?,
        }
        Ok((object, name))
    }

    /// Attaches it to an interface in a namespace; it is detached when the object is dropped.
    pub fn attach(self, hook: Hook, namespace: &Namespace, interface: &str) -> Result<Ebpf> {
        let (mut object, name) = self.load(hook)?;
        let attached = namespace.run(|| -> Result<Ebpf> {
            let program = object.program_mut(name).with_context(|| format!("no program {name}"))?;
            match hook {
                Hook::Tc => {
                    // Where the kernel has tcx (6.6), that is used instead.
                    tc::qdisc_add_clsact(interface)?;
                    <&mut SchedClassifier>::try_from(program)?.attach(interface, TcAttachType::Ingress)?;
                }
                Hook::Native | Hook::Generic => {
                    let mode = if hook == Hook::Native { XdpMode::Driver } else { XdpMode::Skb };
                    <&mut Xdp>::try_from(program)?.attach(interface, mode)?;
                }
            }
            Ok(object)
        })?;
        attached.with_context(|| format!("{name} on {interface}"))
    }

    /// How many answers it sends.
    const fn answers(self) -> u32 {
        match self {
            Self::Constant { answers } if answers < MAX_ANSWERS => answers,
            Self::Constant { .. } => MAX_ANSWERS,
            Self::Pass | Self::Reflector => 0,
        }
    }
}
