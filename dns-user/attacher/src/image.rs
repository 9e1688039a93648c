//! The BPF object file: its maps, and its programs as the verifier gets them.
//!
//! aya's loader (0.14) first reads the kernel's types, five megabytes, which takes as long as verifying the program that
//! answers first. No program here needs them.

use std::{
    collections::{HashMap, HashSet},
    io, mem,
    os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd},
    slice,
};

use aya_obj::{
    EbpfSectionKind, Map, Object, ParseError, ProgramSection, relocation::EbpfRelocationError,
};

use crate::bpf::{self, ProgramType};

/// Size of the verifier's log, which holds statistics and a complaint.
const LOG_SIZE: usize = 64 << 10;

/// An object file whose maps exist.
pub(crate) struct Image {
    object: Object,
    /// By name. Instructions refer to them by the numbers of these descriptors.
    maps: HashMap<String, OwnedFd>,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum ImageError {
    #[error("the object file is damaged")]
    Parse(#[from] ParseError),
    #[error("the object file refers to something that it lacks")]
    Relocation(#[from] EbpfRelocationError),
    #[error("cannot create map {name}")]
    Map { name: String, source: io::Error },
}

/// The kernel has not loaded a program.
#[derive(Debug)]
pub(crate) struct Rejection {
    pub(crate) error: io::Error,
    /// The verifier's log.
    pub(crate) log: String,
}

impl Rejection {
    /// The object has no such program.
    fn missing() -> Self {
        Self {
            error: io::Error::from_raw_os_error(libc::ENOENT),
            log: String::new(),
        }
    }
}

impl Image {
    /// Creates the maps, with other numbers of elements and other values of globals than in the file.
    pub(crate) fn load(
        file: &[u8],
        elements: &[(&str, u32)],
        globals: &[(&str, u8)],
    ) -> Result<Self, ImageError> {
        let mut object = Object::parse(file)?;
        let mut values = HashMap::new();
        // `true`: a global that the object lacks is an error, or the programs would run without it.
        for (name, value) in globals {
            values.insert(*name, (slice::from_ref(value), true));
        }
        object.patch_map_data(values)?;
        for (name, elements) in elements {
            if let Some(map) = object.maps.get_mut(*name) {
                map.set_max_entries(*elements);
            }
        }

        // Taken out, because relocation borrows the object while it reads the definitions.
        let definitions = mem::take(&mut object.maps);
        let mut maps = HashMap::new();
        let mut places = Vec::new();
        for (name, definition) in &definitions {
            let map = create(name, definition).map_err(|source| ImageError::Map {
                name: name.clone(),
                source,
            })?;
            places.push((name.as_str(), map.as_raw_fd(), definition));
            maps.insert(name.clone(), map);
        }
        let code: HashSet<usize> = object
            .functions
            .keys()
            .map(|(section, _)| *section)
            .collect();
        // Maps before calls: linking a function copies its instructions, with the descriptors in
        // them.
        object.relocate_maps(places.into_iter(), &code)?;
        object.relocate_calls(&code)?;
        Ok(Self { object, maps })
    }

    pub(crate) fn map(&self, name: &str) -> Option<BorrowedFd<'_>> {
        self.maps.get(name).map(|map| map.as_fd())
    }

    /// Lets the kernel verify a program.
    pub(crate) fn load_program(&self, name: &str) -> Result<OwnedFd, Rejection> {
        let Some(program) = self.object.programs.get(name) else {
            return Err(Rejection::missing());
        };
        let Some(function) = self.object.functions.get(&program.function_key()) else {
            return Err(Rejection::missing());
        };
        let kind = match program.section {
            ProgramSection::Xdp { .. } => ProgramType::Xdp,
            // The object has programs for XDP and tc alone.
            _ => ProgramType::Tc,
        };
        let code = &function.instructions;
        let mut log = vec![0; LOG_SIZE];
        bpf::load_program(name, kind, code, &program.license, &mut log).map_err(|error| {
            let length = log.iter().position(|&byte| byte == 0).unwrap_or(LOG_SIZE);
            Rejection {
                error,
                log: String::from_utf8_lossy(&log[..length]).into_owned(),
            }
        })
    }
}

/// Creates a map; one that holds constants is filled and frozen, so that the verifier knows them.
fn create(name: &str, definition: &Map) -> io::Result<OwnedFd> {
    let map = bpf::create_map(name, definition)?;
    // The verifier then follows only the branch that a constant takes: `PREEMPTIBLE` costs other
    // kernels nothing.
    if definition.section_kind() == EbpfSectionKind::Rodata {
        bpf::set_element(map.as_fd(), &0_u32.to_ne_bytes(), definition.data())?;
        bpf::freeze(map.as_fd())?;
    }
    Ok(map)
}
