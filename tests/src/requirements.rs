//! What a test needs of the machine. Without it the test says that it is
//! skipped; in CI (variable `CI` set) that is a failure.

use std::fmt::Display;

/// Whether a test can go on: namespaces can be made. Says why not.
///
/// # Panics
///
/// In CI, where nothing may be skipped.
pub fn namespaces() -> bool {
    met("network namespaces", crate::namespace::available())
}

/// Whether a test can go on: BPF programs can be loaded. Says why not.
///
/// # Panics
///
/// In CI, where nothing may be skipped.
pub fn bpf() -> bool {
    let loaded = aya::EbpfLoader::new().load(dns_user::fastpath::OBJECT).and_then(|mut object| {
        let program = object.program_mut(dns_common::object::PASS_PROGRAM).ok_or_else(|| {
            // The object is ours: it always holds this program.
            aya::EbpfError::FileError {
                path: dns_common::object::PASS_PROGRAM.into(),
                error: std::io::ErrorKind::NotFound.into(),
            }
        })?;
        let program: &mut aya::programs::Xdp = program.try_into()?;
        Ok(program.load()?)
    });
    met("BPF programs", loaded)
}

/// Reports a requirement that is not met.
///
/// # Panics
///
/// In CI, where nothing may be skipped.
pub fn met<E: Display>(what: &str, found: Result<(), E>) -> bool {
    match found {
        Ok(()) => true,
        Err(problem) if std::env::var_os("CI").is_some() => panic!("{what} are needed in CI: {problem}"),
        Err(problem) => {
            println!("skipped: {what} are not available here: {problem}");
            false
        }
    }
}
