//! The kernel inside a compressed image: a machine that starts it directly need not unpack it, which takes as long
//! as the rest of the boot when the processor is emulated.

use std::{
    fs::{self, File},
    io::ErrorKind,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, ensure};

/// Signature of the image's header, and its offset (Documentation/arch/x86/boot.rst of Linux).
const HEADER: (usize, &[u8]) = (0x202, b"HdrS");

/// Offset of the number of sectors before the part that contains the kernel, without the first sector.
const SECTORS: usize = 0x1f1;

const SECTOR: usize = 512;

/// Offset of the position and length of the compressed kernel.
const PAYLOAD: usize = 0x248;

/// First bytes of the formats, and programs that unpack them.
const FORMATS: [(&[u8], &str); 4] = [
    (b"\x1f\x8b", "gzip"),
    (b"\xfd7zXZ", "xz"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
    (b"\x02\x21\x4c\x18", "lz4"),
];

/// Name and type of the note with the entry point for machines that start the kernel directly
/// (`XEN_ELFNOTE_PHYS32_ENTRY`), after the lengths of name and content.
const ENTRY_NOTE: &[u8] = b"\x12\0\0\0Xen\0";

/// Unpacks the kernel of an x86 image into `folder`; `None` if it must start as an image.
pub(super) fn unpack(image: &Path, folder: &Path) -> Result<Option<PathBuf>> {
    let bytes = fs::read(image).with_context(|| image.display().to_string())?;
    let Some(compressed) = payload(&bytes) else {
        return Ok(None);
    };
    let Some((_, program)) = FORMATS
        .iter()
        .find(|(magic, _)| compressed.starts_with(magic))
    else {
        return Ok(None);
    };
    let (packed, unpacked) = (folder.join("vmlinux.packed"), folder.join("vmlinux"));
    fs::write(&packed, compressed)?;
    let mut command = Command::new(program);
    command
        .arg("-dc")
        .stdin(File::open(&packed)?)
        .stdout(File::create(&unpacked)?);
    match command.status() {
        Ok(status) => ensure!(status.success(), "{}: {program}: {status}", image.display()),
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error).context(*program),
    }
    fs::remove_file(packed)?;
    Ok(has_entry(&fs::read(&unpacked)?)
        .unwrap_or(false)
        .then_some(unpacked))
}

/// Returns the compressed kernel, without the length that follows it.
fn payload(image: &[u8]) -> Option<&[u8]> {
    let (at, signature) = HEADER;
    if !image.get(at..)?.starts_with(signature) {
        return None;
    }
    let begin = (1 + usize::from(*image.get(SECTORS)?)) * SECTOR + number(image, PAYLOAD, 4)?;
    let length = number(image, PAYLOAD + 4, 4)?;
    image.get(begin..begin + length.checked_sub(4)?)
}

/// Whether a segment of notes names an entry point.
fn has_entry(kernel: &[u8]) -> Option<bool> {
    const NOTES: usize = 4;
    let (headers, size, count) = (
        number(kernel, 32, 8)?,
        number(kernel, 54, 2)?,
        number(kernel, 56, 2)?,
    );
    for header in (0..count).map(|index| headers + index * size) {
        let (begin, length) = (
            number(kernel, header + 8, 8)?,
            number(kernel, header + 32, 8)?,
        );
        let notes = kernel.get(begin..begin + length)?;
        if number(kernel, header, 4)? == NOTES
            && notes
                .windows(ENTRY_NOTE.len())
                .any(|window| window == ENTRY_NOTE)
        {
            return Some(true);
        }
    }
    Some(false)
}

/// Reads a little-endian number.
fn number(bytes: &[u8], at: usize, length: usize) -> Option<usize> {
    let number = bytes.get(at..at + length)?;
    Some(
        number
            .iter()
            .rev()
            .fold(0, |number, &byte| (number << 8) | usize::from(byte)),
    )
}
