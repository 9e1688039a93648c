//! `/etc/hosts`: a marked block, or the whole file as a BOSH agent writes it.

use std::fmt::Write;

/// First line of our block.
const BEGIN: &str = "# BEGIN bosh-dns-sync";

/// Last line of our block.
const END: &str = "# END bosh-dns-sync";

/// Returns the whole file as a BOSH agent writes it (observed): fixed lines, then one line per
/// record.
pub fn replaced<'a>(hostname: &str, records: impl Iterator<Item = (&'a str, &'a str)>) -> String {
    let mut text = format!(
        "127.0.0.1 localhost {hostname}\n\n\
         # The following lines are desirable for IPv6 capable hosts\n\
         ::1 localhost ip6-localhost ip6-loopback {hostname}\n\
         fe00::0 ip6-localnet\n\
         ff00::0 ip6-mcastprefix\n\
         ff02::1 ip6-allnodes\n\
         ff02::2 ip6-allrouters\n\
         ff02::3 ip6-allhosts\n"
    );
    add(&mut text, records);
    text
}

/// Our block in the file has no end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the line `# END bosh-dns-sync` is missing; add it after the block of bosh-dns-sync")]
pub struct NoEnd;

/// Returns the file with our block added or replaced.
///
/// A block without an end is an error: the following lines may not be ours.
pub fn with_block<'a>(
    file: &str,
    records: impl Iterator<Item = (&'a str, &'a str)>,
) -> Result<String, NoEnd> {
    let (before, after) = match line_at(file, BEGIN) {
        None => (file, ""),
        Some(start) => {
            let rest = &file[start..];
            let end = line_at(rest, END).ok_or(NoEnd)?;
            let after = &rest[end + END.len()..];
            (&file[..start], after.strip_prefix('\n').unwrap_or(after))
        }
    };
    let mut text = before.to_owned();
    if !text.is_empty() && !text.ends_with('\n') {
        text.push('\n');
    }
    text.push_str(BEGIN);
    text.push('\n');
    add(&mut text, records);
    text.push_str(END);
    text.push('\n');
    text.push_str(after);
    Ok(text)
}

/// Appends a line for each record.
fn add<'a>(text: &mut String, records: impl Iterator<Item = (&'a str, &'a str)>) {
    for (address, name) in records {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "{address} {name}");
    }
}

/// Returns the offset of the first line that is exactly `line`.
fn line_at(text: &str, line: &str) -> Option<usize> {
    let mut at = 0;
    for found in text.split_inclusive('\n') {
        if found.trim_end() == line {
            return Some(at);
        }
        at += found.len();
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn records() -> impl Iterator<Item = (&'static str, &'static str)> {
        [("10.0.0.1", "a.g.n.d.bosh"), ("fd00::1", "b.g.n.d.bosh")].into_iter()
    }

    #[test]
    fn replaced_file_is_golden() {
        assert_eq!(
            replaced("vm-1", records()),
            "127.0.0.1 localhost vm-1\n\n# The following lines are desirable for IPv6 capable hosts\n\
             ::1 localhost ip6-localhost ip6-loopback vm-1\nfe00::0 ip6-localnet\nff00::0 ip6-mcastprefix\n\
             ff02::1 ip6-allnodes\nff02::2 ip6-allrouters\nff02::3 ip6-allhosts\n\
             10.0.0.1 a.g.n.d.bosh\nfd00::1 b.g.n.d.bosh\n"
        );
    }

    #[test]
    fn block_keeps_other_lines() {
        let block =
            "# BEGIN bosh-dns-sync\n10.0.0.1 a.g.n.d.bosh\nfd00::1 b.g.n.d.bosh\n# END bosh-dns-sync\n";
        let first = with_block("127.0.0.1 localhost", records()).unwrap();
        assert_eq!(first, format!("127.0.0.1 localhost\n{block}"));
        let grown = format!("{first}192.0.2.1 mine\n");
        assert_eq!(with_block(&grown, records()).unwrap(), grown);
        let emptied = with_block(&grown, std::iter::empty()).unwrap();
        assert_eq!(
            emptied,
            "127.0.0.1 localhost\n# BEGIN bosh-dns-sync\n# END bosh-dns-sync\n192.0.2.1 mine\n"
        );
        assert_eq!(with_block("", records()).unwrap(), block);
        assert!(with_block("# BEGIN bosh-dns-sync\n192.0.2.1 mine\n", records()).is_err());
    }
}
