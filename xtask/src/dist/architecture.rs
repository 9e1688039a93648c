//! The processor architectures of releases. An x86-64 machine builds both, arm64 with Debian's cross compiler.

use std::{
    fs::File,
    io::Read,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};

use crate::{arm64, packages};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Architecture {
    Amd64,
    Arm64,
}

impl Architecture {
    /// Returns the name in Debian packages and images.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Amd64 => packages::THIS_ARCHITECTURE,
            Self::Arm64 => "arm64",
        }
    }

    /// Returns the name that `uname -m` prints.
    pub(super) const fn machine(self) -> &'static str {
        match self {
            Self::Amd64 => "x86_64",
            Self::Arm64 => "aarch64",
        }
    }

    /// Returns the name of the target. It is also given for this machine's, so that cargo does not apply the flags to
    /// build scripts.
    pub(super) const fn target(self) -> &'static str {
        match self {
            Self::Amd64 => "x86_64-unknown-linux-gnu",
            Self::Arm64 => arm64::TARGET,
        }
    }

    /// Returns the name of Debian's library folders.
    pub(super) fn triplet(self) -> String {
        format!("{}-linux-gnu", self.machine())
    }

    pub(super) fn binutils(self, tool: &str) -> Command {
        match self {
            Self::Amd64 => Command::new(tool),
            Self::Arm64 => Command::new(format!("{}-{tool}", self.triplet())),
        }
    }

    pub(super) fn cargo(self) -> Result<Command> {
        match self {
            Self::Amd64 => Ok(Command::new("cargo")),
            Self::Arm64 => arm64::cargo(),
        }
    }

    pub(super) fn of(program: &Path) -> Result<Self> {
        let mut header = [0; 20];
        let read = File::open(program).and_then(|mut file| file.read_exact(&mut header));
        read.with_context(|| program.display().to_string())?;
        // `e_machine` of the ELF header, little-endian.
        match (&header[..4], header[18]) {
            // EM_X86_64 and EM_AARCH64 (elf.h).
            (b"\x7fELF", 62) => Ok(Self::Amd64),
            (b"\x7fELF", 183) => Ok(Self::Arm64),
            _ => bail!("{} is no program for x86-64 or arm64", program.display()),
        }
    }
}

/// Returns the command that runs a program of either architecture, with the C library of this machine or its cross
/// compiler.
pub(super) fn run_with_emulator(program: &Path) -> Result<Command> {
    Ok(match Architecture::of(program)? {
        Architecture::Amd64 => Command::new(program),
        Architecture::Arm64 => {
            let mut command = Command::new(arm64::EMULATOR);
            command.args(["-L", arm64::C_LIBRARY]).arg(program);
            command
        }
    })
}

/// The programs of one architecture, stripped.
pub(super) struct Built {
    pub(super) architecture: Architecture,
    pub(super) server: PathBuf,
    pub(super) publisher: PathBuf,
    pub(super) identity: PathBuf,
    pub(super) load: PathBuf,
    pub(super) sync: PathBuf,
}

impl Built {
    /// Returns the programs that have a job each in the BOSH release, beside the server's, by name.
    pub(super) fn jobs(&self) -> [(&'static str, &Path); 3] {
        let [sync, publisher] = self.companions();
        // The identity program has a Debian package of its own, because it holds CA keys.
        [sync, publisher, (crate::IDENTITY[1], &self.identity)]
    }

    /// Returns the programs that accompany the server in its Debian package, by name.
    pub(super) fn companions(&self) -> [(&'static str, &Path); 2] {
        [
            (crate::SYNC[1], &self.sync),
            (crate::PUBLISHER[1], &self.publisher),
        ]
    }
}
