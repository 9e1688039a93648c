//! `cargo xtask mutants`: how strong the tests are. Changes the code in one place at a time, and names the
//! changes that no test notices.
//!
//! Everything happens in a copy of the project below `target/mutants`, so no change is ever left in the tree.
//! Rust crates are changed by cargo-mutants; the BPF programs, which it cannot build, by the table
//! [`CHANGES`] and judged by the packet tests, which run them in this kernel.

use std::{
    collections::BTreeSet,
    ffi::OsStr,
    fs,
    io::{self, BufRead as _, BufReader},
    os::unix::{ffi::OsStrExt as _, fs::symlink},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, ensure};
use fastrand::Rng;
use serde_json::Value;

use crate::{
    process::{build_test, capture, install, root, run},
    toolchain::{self, bpf_cargo},
};

/// Version of cargo-mutants to install below `.toolchain`.
const CARGO_MUTANTS_VERSION: &str = "27.1.0";

/// Tests that judge no packet, or need virtual machines or the server.
const OTHER_TESTS: [&str; 5] = [
    "other_kernel",
    "kernel_image",
    "network_cards",
    "differential",
    "helpers_exist",
];

/// The test that loads every program.
const LOADING: &str = "object::the_verifier_has_room_left";

/// Options of `cargo xtask mutants`.
#[derive(Debug, clap::Args)]
pub(crate) struct Mutants {
    /// The crate to change, judged by its own tests.
    #[arg(value_name = "CRATE", required_unless_present = "program")]
    package: Option<String>,
    /// Change the BPF programs instead, judged by the packet tests; needs root.
    #[arg(long, conflicts_with = "package")]
    program: bool,
    /// Seed of the choice among all changes; chosen at random and printed if not given.
    #[arg(long)]
    seed: Option<u64>,
    /// Number of changes.
    #[arg(long, default_value_t = 100)]
    count: usize,
    /// Only list the chosen changes.
    #[arg(long)]
    list: bool,
    /// Arguments of `cargo test` for a crate: --lib leaves out what needs real servers.
    #[arg(last = true, value_name = "ARGUMENT")]
    tests: Vec<String>,
}

impl Mutants {
    pub(crate) fn run(self) -> Result<()> {
        let Self {
            package,
            program: _,
            seed,
            count,
            list,
            tests,
        } = self;
        let seed = seed.unwrap_or_else(|| fastrand::u64(..));
        println!("seed: {seed}");
        toolchain::ensure()?;
        let copy = copy()?;
        let random = Rng::with_seed(seed);
        match package {
            Some(package) => {
                let changes = changes_of_crate(&copy, &package, random, count)?;
                if list {
                    changes.iter().for_each(|name| println!("{name}"));
                    return Ok(());
                }
                change_crate(&copy, &package, &changes, &tests)
            }
            None => {
                let changes = changes_of_programs(&copy, random, count)?;
                if list {
                    changes
                        .iter()
                        .for_each(|change| println!("{}", change.shown()));
                    return Ok(());
                }
                change_programs(&copy, &changes)
            }
        }
    }
}

//----------- Copy ------------------------------------------------------------

/// Brings the copy of the project up to date and returns its folder. Files that are the same stay as they
/// are, so that little is compiled again.
fn copy() -> Result<PathBuf> {
    let root = root();
    let copy = root.join("target/mutants/tree");
    fs::create_dir_all(&copy)?;
    let listed = Command::new("git")
        .args([
            "ls-files",
            "-z",
            "--cached",
            "--others",
            "--exclude-standard",
        ])
        .current_dir(root)
        .output()
        .context("git lists the project's files")?;
    ensure!(listed.status.success(), "git cannot list the files");
    let mut files = BTreeSet::new();
    for name in listed.stdout.split(|&byte| byte == 0) {
        let file = PathBuf::from(OsStr::from_bytes(name));
        if !name.is_empty() && copy_file(&root.join(&file), &copy.join(&file))? {
            files.insert(file);
        }
    }
    remove_others(&copy, &copy, &files)?;
    let toolchain = copy.join(".toolchain");
    // `exists` would follow the link, and miss one that leads nowhere.
    if fs::symlink_metadata(&toolchain).is_err() {
        symlink(root.join(".toolchain"), toolchain)?;
    }
    Ok(copy)
}

/// Copies a file unless the copy is the same; false if there is none.
fn copy_file(from: &Path, to: &Path) -> Result<bool> {
    // Listed, but removed from the tree.
    let Ok(kind) = fs::symlink_metadata(from) else {
        return Ok(false);
    };
    let folder = to.parent().context("every file is in the copy")?;
    fs::create_dir_all(folder)?;
    if kind.is_symlink() {
        let target = fs::read_link(from)?;
        if fs::read_link(to).ok().as_ref() != Some(&target) {
            let _ = fs::remove_file(to);
            symlink(target, to)?;
        }
        return Ok(true);
    }
    let content = fs::read(from).with_context(|| from.display().to_string())?;
    if fs::read(to).ok().as_ref() != Some(&content) {
        // With its permissions.
        fs::copy(from, to).with_context(|| to.display().to_string())?;
    }
    Ok(true)
}

/// Removes what an earlier copy left below `folder`, except for build results.
fn remove_others(copy: &Path, folder: &Path, files: &BTreeSet<PathBuf>) -> Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let path = entry.path();
        let kind = entry.file_type()?;
        let name = path.strip_prefix(copy)?;
        if kind.is_dir() {
            if !path.ends_with("target") {
                remove_others(copy, &path, files)?;
            }
        } else if !files.contains(name) && name != Path::new(".toolchain") {
            fs::remove_file(path)?;
        }
    }
    Ok(())
}

//----------- Rust crates -----------------------------------------------------

/// Returns a command of cargo-mutants for a crate.
fn cargo_mutants_for(copy: &Path, package: &str) -> Result<Command> {
    let mut command = Command::new(cargo_mutants()?);
    command
        .args(["mutants", "--package", package])
        .current_dir(copy)
        // An environment's folder belongs to the tree, and its builds must not be replaced by
        // changed ones.
        .env("CARGO_TARGET_DIR", copy.join("target"));
    Ok(command)
}

/// Chooses among all changes that cargo-mutants knows for a crate; returns their names.
fn changes_of_crate(
    copy: &Path,
    package: &str,
    mut random: Rng,
    count: usize,
) -> Result<Vec<String>> {
    let listed = capture(cargo_mutants_for(copy, package)?.args(["--list", "--json"]))?;
    let listed: Value = serde_json::from_str(&listed).context("cargo-mutants lists JSON")?;
    let all = listed.as_array().context("cargo-mutants lists mutants")?;
    let mut names: Vec<String> = all
        .iter()
        .filter_map(|mutant| mutant["name"].as_str())
        .map(str::to_owned)
        .collect();
    ensure!(!names.is_empty(), "{package} has nothing to change");
    let total = names.len();
    random.shuffle(&mut names);
    names.truncate(count);
    println!("{} of {total} changes of {package}", names.len());
    Ok(names)
}

/// Changes a crate with cargo-mutants; each change is judged by the crate's own tests.
fn change_crate(copy: &Path, package: &str, names: &[String], tests: &[String]) -> Result<()> {
    let results = copy.join("target/results");
    fs::create_dir_all(&results)?;
    let mut command = cargo_mutants_for(copy, package)?;
    command
        // The tree is a copy already; in a further one everything would be compiled again.
        .args(["--in-place", "--no-shuffle", "--colors", "never"])
        .arg("--output")
        .arg(&results);
    for name in names {
        // Names contain operators, which mean something else in a regular expression.
        command.args(["--re", &format!("^{}$", escape(name))]);
    }
    command.arg("--").args(tests);
    let status = command.status().context("cargo-mutants")?;
    // 2: a change survives; 3: one does not end. Otherwise the lists below would be of an earlier run, or empty.
    ensure!(
        matches!(status.code(), Some(0 | 2 | 3)),
        "cargo-mutants could not try the changes ({status})"
    );
    let results = results.join("mutants.out");
    // An endless loop is noticed too.
    let caught =
        lines(&results.join("caught.txt"))?.len() + lines(&results.join("timeout.txt"))?.len();
    let unviable = lines(&results.join("unviable.txt"))?.len();
    report(caught, unviable, &lines(&results.join("missed.txt"))?);
    Ok(())
}

fn lines(file: &Path) -> Result<Vec<String>> {
    let text = fs::read_to_string(file).with_context(|| file.display().to_string())?;
    Ok(text.lines().map(str::to_owned).collect())
}

/// Returns the path of cargo-mutants, installing it if necessary.
fn cargo_mutants() -> Result<PathBuf> {
    let folder = root().join(".toolchain/mutants");
    let program = folder.join("bin/cargo-mutants");
    let installed =
        capture(Command::new(&program).args(["mutants", "--version"])).unwrap_or_default();
    if !installed.contains(CARGO_MUTANTS_VERSION) {
        run(install("cargo-mutants", CARGO_MUTANTS_VERSION)
            .arg("--root")
            .arg(folder))?;
    }
    Ok(program)
}

/// Escapes text for a regular expression.
fn escape(text: &str) -> String {
    let mut escaped = String::new();
    for letter in text.chars() {
        if r"\.+*?()|[]{}^$".contains(letter) {
            escaped.push('\\');
        }
        escaped.push(letter);
    }
    escaped
}

fn report(caught: usize, unviable: usize, survivors: &[String]) {
    let judged = caught + survivors.len();
    println!("{caught} of {judged} caught; {unviable} cannot be built or loaded");
    for survivor in survivors {
        println!("survived: {survivor}");
    }
}

//----------- BPF programs ----------------------------------------------------

/// Changes of a line: text, and what replaces it.
const CHANGES: [(&str, &str); 25] = [
    (" < ", " <= "),
    (" <= ", " < "),
    (" > ", " >= "),
    (" >= ", " > "),
    (" == ", " != "),
    (" != ", " == "),
    (" && ", " || "),
    (" || ", " && "),
    (" + ", " - "),
    (" - ", " + "),
    (" * ", " + "),
    (" & ", " | "),
    (" | ", " & "),
    (" << ", " >> "),
    (" >> ", " << "),
    (" += ", " -= "),
    ("if !", "if "),
    ("&& !", "&& "),
    ("(!", "("),
    ("= !", "= "),
    ("true", "false"),
    ("false", "true"),
    (".to_be()", ""),
    ("0xff", "0x7f"),
    ("wrapping_neg()", "wrapping_add(0)"),
];

/// Changes that no packet can show: file, line, replacement, and the reason.
const EQUIVALENT: [(&str, &str, &str, &str); 15] = [
    (
        "reply.rs",
        "if ip + IPV4_LEN + UDP_LEN > end {",
        "if ip + IPV4_LEN + UDP_LEN >= end {",
        "a message of at least twelve bytes follows: `parse` has compared it with the end",
    ),
    (
        "reply.rs",
        "if ip + IPV6_LEN + UDP_LEN > end {",
        "if ip + IPV6_LEN + UDP_LEN >= end {",
        "as over IPv4",
    ),
    (
        "pipeline.rs",
        "if ip + IPV6_SOURCE_END > end {",
        "if ip + IPV6_SOURCE_END >= end {",
        "the destination follows",
    ),
    (
        "tc.rs",
        "(at + LEN <= self.data_end()).then_some(at)",
        "(at + LEN < self.data_end()).then_some(at)",
        "the message follows the checksum",
    ),
    (
        "filter.rs",
        "if hook.data() + len <= hook.data_end() {",
        "if false {",
        "the kernel is asked for bytes that are there already: only the time differs",
    ),
    (
        "hook.rs",
        "if !Self::IS_TC || self.length() < len || !self.pull(len) {",
        "if !Self::IS_TC && self.length() < len || !self.pull(len) {",
        "the kernel refuses to pull more than there is, and XDP pulls nothing",
    ),
    (
        "xdp.rs",
        "let before = if more < HEAD_ROOM { more } else { HEAD_ROOM };",
        "let before = if more <= HEAD_ROOM { more } else { HEAD_ROOM };",
        "both are the same number",
    ),
    (
        "xdp.rs",
        "|| data + FIRST_BYTES > end",
        "|| data + FIRST_BYTES >= end",
        "`source` is behind `data`, and was compared first",
    ),
    (
        "shuffle.rs",
        "const MAX_AAAA: usize = MAX_REPLY_LEN / AAAA_LEN + 1;",
        "const MAX_AAAA: usize = MAX_REPLY_LEN / AAAA_LEN + 2;",
        "a bound for the verifier that no list reaches",
    ),
    (
        "question.rs",
        "const AD: usize = usize::from_ne_bytes([0, 0, 0, 0x20, 0, 0, 0, 0]);",
        "const AD: usize = usize::from_ne_bytes([0, 0, 0, 0x20, 1, 0, 0, 0]);",
        "the upper half of QDCOUNT, which is 1",
    ),
    (
        "question.rs",
        "const AD: usize = usize::from_ne_bytes([0, 0, 0, 0x20, 0, 0, 0, 0]);",
        "const AD: usize = usize::from_ne_bytes([0, 0, 0, 0x20, 0, 0, 1, 0]);",
        "the upper half of ANCOUNT, which is 0",
    ),
    (
        "question.rs",
        "const DO: usize = usize::from_ne_bytes([0, 0, 0, 0, 0, 0, 0, 0x80]);",
        "const DO: usize = usize::from_ne_bytes([0, 0, 0, 0, 0, 0, 1, 0x80]);",
        "the version of EDNS, which is 0",
    ),
    (
        "forwarded.rs",
        "unsafe { store(answer.address + offset_of!(AnswerHeader, last_used_ns), now) };",
        "unsafe { store(answer.address - offset_of!(AnswerHeader, last_used_ns), now) };",
        "the offset is 0",
    ),
    (
        "maps.rs",
        "pub static COUNTERS: Array<CpuCounters> = Array::with_max_entries(1, BPF_F_MMAPABLE);",
        "pub static COUNTERS: Array<CpuCounters> = Array::with_max_entries(2, BPF_F_MMAPABLE);",
        "the loader sets the number",
    ),
    (
        "maps.rs",
        "pub static NAMES: Array<Pair> = Array::with_max_entries(2, BPF_F_MMAPABLE);",
        "pub static NAMES: Array<Pair> = Array::with_max_entries(3, BPF_F_MMAPABLE);",
        "as for counters",
    ),
];

/// One change of the programs.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Change {
    /// Name of the file below `dns-ebpf/src`.
    file: String,
    /// Index of the line.
    line: usize,
    before: String,
    after: String,
}

impl Change {
    fn shown(&self) -> String {
        let Self {
            file,
            line,
            before,
            after,
        } = self;
        format!("{file}:{}: {} -> {}", line + 1, before.trim(), after.trim())
    }

    fn is_equivalent(&self) -> bool {
        EQUIVALENT.iter().any(|(file, before, after, _)| {
            self.file == *file && self.before.trim() == *before && self.after.trim() == *after
        })
    }
}

/// Outcome of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    /// It does not compile, or the kernel does not load it.
    Unviable,
    Caught,
    Survived,
}

/// Chooses among all changes of the programs.
fn changes_of_programs(copy: &Path, mut random: Rng, count: usize) -> Result<Vec<Change>> {
    let sources = copy.join("dns-ebpf/src");
    let mut changes = Vec::new();
    for entry in fs::read_dir(&sources)? {
        let path = entry?.path();
        let name = path.file_name().context("a file has a name")?;
        let text = fs::read_to_string(&path)?;
        changes.extend(changes_of(&name.to_string_lossy(), &text));
    }
    // Before the choice, so that a seed chooses the same changes on every file system.
    changes.sort_by_key(|change| (change.file.clone(), change.line, change.after.clone()));
    changes.retain(|change| !change.is_equivalent());
    let total = changes.len();
    random.shuffle(&mut changes);
    changes.truncate(count);
    println!("{} of {total} changes of the programs", changes.len());
    Ok(changes)
}

/// Changes the programs; each change is judged by the packet tests.
fn change_programs(copy: &Path, changes: &[Change]) -> Result<()> {
    let sources = copy.join("dns-ebpf/src");
    let tests = packet_tests()?;
    ensure!(
        build_programs(copy)?,
        "the unchanged programs do not compile"
    );
    ensure!(
        // Otherwise every change would seem to be caught.
        judge(copy, &tests)? == Fate::Survived,
        "the packet tests fail for the unchanged programs"
    );
    let mut caught = 0;
    let mut unviable = 0;
    let mut survivors = Vec::new();
    for (number, change) in changes.iter().enumerate() {
        let file = sources.join(&change.file);
        let text = fs::read_to_string(&file)?;
        fs::write(&file, apply(&text, change))?;
        let fate = if build_programs(copy)? {
            judge(copy, &tests)
        } else {
            Ok(Fate::Unviable)
        };
        // Before the error of the judgement is returned: the next run relies on an unchanged copy.
        fs::write(&file, text)?;
        let fate = fate?;
        println!("{} {fate:?}: {}", number + 1, change.shown());
        match fate {
            Fate::Unviable => unviable += 1,
            Fate::Caught => caught += 1,
            Fate::Survived => survivors.push(change.shown()),
        }
    }
    report(caught, unviable, &survivors);
    Ok(())
}

/// Returns all changes of a source file.
fn changes_of(file: &str, text: &str) -> Vec<Change> {
    let mut changes = Vec::new();
    for (line, before) in text.lines().enumerate() {
        // A change of a comment would always survive.
        let code = before.split("//").next().unwrap_or_default();
        for after in lines_instead_of(code) {
            changes.push(Change {
                file: file.to_owned(),
                line,
                before: code.to_owned(),
                after,
            });
        }
    }
    changes
}

/// Returns the lines that may replace a line of code.
fn lines_instead_of(code: &str) -> Vec<String> {
    let trimmed = code.trim();
    let is_declaration = [
        "use ", "#", "pub use ", "mod ", "pub mod ", "const _", "impl", "fn ",
    ]
    .iter()
    .any(|start| trimmed.starts_with(start));
    if is_declaration {
        return Vec::new();
    }
    let mut lines = Vec::new();
    for (from, to) in CHANGES {
        for (at, _) in code.match_indices(from) {
            lines.push([&code[..at], to, &code[at + from.len()..]].concat());
        }
    }
    for (start, number) in numbers(code) {
        let rest = &code[start + number.to_string().len()..];
        lines.push(format!("{}{}{rest}", &code[..start], number + 1));
    }
    let is_condition =
        trimmed.starts_with("if ") && trimmed.ends_with(" {") && !trimmed.contains(" let ");
    if is_condition {
        lines.push("if true {".to_owned());
        lines.push("if false {".to_owned());
    }
    let is_call = trimmed.starts_with(|letter: char| letter.is_ascii_lowercase())
        && trimmed.ends_with(");")
        && !trimmed.starts_with("let ")
        && !trimmed.starts_with("return ");
    if is_call {
        lines.push(String::new());
    }
    lines
}

/// Returns the decimal numbers that stand alone in a line, with their positions.
fn numbers(code: &str) -> Vec<(usize, u64)> {
    let mut found = Vec::new();
    let mut at = 0;
    for word in code.split(is_separator) {
        if let Ok(number) = word.parse::<u64>()
            // Numbers with leading zeros or a suffix are left alone.
            && word == number.to_string()
        {
            found.push((at, number));
        }
        at += word.len() + 1;
    }
    found
}

fn is_separator(letter: char) -> bool {
    !letter.is_ascii_alphanumeric() && letter != '_' && letter != '.'
}

/// Returns the text with one line changed.
fn apply(text: &str, change: &Change) -> String {
    let mut lines: Vec<&str> = text.lines().collect();
    lines[change.line] = &change.after;
    lines.join("\n") + "\n"
}

/// Builds the programs of the copy; false if they do not compile.
fn build_programs(copy: &Path) -> Result<bool> {
    let settings = fs::read_to_string(copy.join(".toolchain/env"))?;
    let mut cargo = bpf_cargo("cargo", "build", &copy.join("dns-ebpf"), &settings)
        .map_err(anyhow::Error::msg)?;
    let status = cargo
        .arg("--target-dir")
        .arg(copy.join("dns-ebpf/target"))
        .stderr(Stdio::null())
        .status()?;
    Ok(status.success())
}

/// Builds the packet tests of the tree and returns their program.
fn packet_tests() -> Result<PathBuf> {
    let mut cargo = Command::new("cargo");
    cargo
        .args(["test", "--package", "whole-system-tests"])
        .args(["--test", "packets"])
        .current_dir(root());
    build_test(&mut cargo, "packets")
}

/// Runs the packet tests with the programs of the copy.
fn judge(copy: &Path, tests: &Path) -> Result<Fate> {
    // The kernel's verifier refuses many changes, and then every packet test would fail, which
    // proves nothing.
    if !all_pass(test_command(copy, tests).args(["--exact", LOADING]))? {
        return Ok(Fate::Unviable);
    }
    let mut all = test_command(copy, tests);
    for test in OTHER_TESTS {
        all.args(["--skip", test]);
    }
    if all_pass(&mut all)? {
        Ok(Fate::Survived)
    } else {
        Ok(Fate::Caught)
    }
}

fn test_command(copy: &Path, tests: &Path) -> Command {
    let mut command = Command::new(tests);
    command
        .env(
            "DNS_EBPF_OBJECT",
            copy.join("dns-ebpf/target/bpfel-unknown-none/release/dns-ebpf"),
        )
        // Without BPF the tests must fail rather than be skipped.
        .env("CI", "1")
        .current_dir(copy.join("tests"));
    command
}

/// Runs a test program until it ends or a test has failed.
fn all_pass(command: &mut Command) -> io::Result<bool> {
    let mut running = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()?;
    let mut has_failed = false;
    if let Some(output) = running.stdout.take() {
        for line in BufReader::new(output).lines() {
            if line?.ends_with("... FAILED") {
                has_failed = true;
                // The others, some of which last long, would tell no more.
                running.kill()?;
                break;
            }
        }
    }
    Ok(running.wait()?.success() && !has_failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_operator_is_changed() {
        assert_eq!(
            lines_instead_of("    if count == 0 {"),
            [
                "    if count != 0 {",
                "    if count == 1 {",
                "if true {",
                "if false {"
            ]
        );
        assert_eq!(lines_instead_of("    sum.add(word);"), [""]);
        assert_eq!(lines_instead_of("use a::{b, c};"), [] as [&str; 0]);
        assert_eq!(
            lines_instead_of("let a = b + 12;"),
            ["let a = b - 12;", "let a = b + 13;"]
        );
    }

    #[test]
    fn comments_stay() {
        let changes = changes_of("a.rs", "// a < b\nlet c = d < e; // f < g\n");
        assert_eq!(changes.len(), 1);
        assert_eq!(
            changes[0].shown(),
            "a.rs:2: let c = d < e; -> let c = d <= e;"
        );
        let changed = apply("// a < b\nlet c = d < e; // f < g\n", &changes[0]);
        assert_eq!(changed, "// a < b\nlet c = d <= e; \n");
    }

    #[test]
    fn names_are_no_patterns() {
        assert_eq!(escape("a.rs:1: b -> (c)"), r"a\.rs:1: b -> \(c\)");
    }

    #[test]
    fn equivalent_changes_are_still_possible() {
        for (file, before, after, _) in EQUIVALENT {
            let path = root().join("dns-ebpf/src").join(file);
            let text = fs::read_to_string(path).expect("the file exists");
            let found = changes_of(file, &text)
                .iter()
                .any(|change| change.before.trim() == before && change.after.trim() == after);
            assert!(found, "{file}: {before}");
        }
    }
}
