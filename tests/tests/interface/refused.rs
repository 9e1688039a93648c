//! A program that the kernel rejects disables only its own hooks.
//!
//! The server is the real one except for the first instructions of one program ([`Fault`]), which
//! the kernel really rejects.

use std::{fs, net::IpAddr, os::unix::fs::PermissionsExt as _, path::Path, time::Duration};

use anyhow::{Context, Result, ensure};
use dns_attacher::OBJECT;
use dns_common::object;
use dns_kit::metrics::names;
use serde_json::{Value, json};
use whole_system_tests::{
    bpffs::Bpffs,
    metrics::Metrics,
    pair::{Pair, TIMEOUT, addresses, v4},
    process::wait_until,
    requires,
    server::{self, Server},
};

/// A name in the records.
const NAME: &str = "q-s0.q-g3.bosh.";

/// The defect of a program.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Fault {
    /// Reads an uninitialised register: rejected immediately.
    Unreadable,
    /// Begins with a loop that exceeds the verifier's instruction limit.
    TooLong,
}

impl Fault {
    /// Returns the program's first instructions.
    pub(crate) const fn instructions(self) -> &'static [u8] {
        match self {
            // r0 = r9
            Self::Unreadable => &[0xbf, 0x90, 0, 0, 0, 0, 0, 0],
            // r0 = 0; r0 += 1; if r0 != 0x200000 goto -2
            Self::TooLong => &[
                0xb7, 0, 0, 0, 0, 0, 0, 0, 0x07, 0, 0, 0, 1, 0, 0, 0, 0x55, 0, 0xfe, 0xff, 0, 0,
                0x20, 0,
            ],
        }
    }

    /// Returns the verifier's message.
    const fn complaint(self) -> &'static str {
        match self {
            Self::Unreadable => "R9 !read_ok",
            Self::TooLong => "BPF program is too large",
        }
    }
}

/// A server with a defective program, on a veth.
struct Spoilt {
    server: Server,
    /// Dropped before the namespaces.
    _bpffs: Bpffs,
    /// Namespaces of the server and its clients.
    pair: Pair,
}

impl Spoilt {
    /// Starts the server with one defective program, see [`Self::start_without`].
    fn start(label: &str, mode: &str, spoilt: &str, fault: Fault) -> Result<Self> {
        Self::start_without(label, mode, &[spoilt], fault)
    }

    /// Starts the server with defective programs, and waits until it has tried to load all programs it needs.
    fn start_without(label: &str, mode: &str, spoilt: &[&str], fault: Fault) -> Result<Self> {
        let (pair, bpffs) = (Pair::new(label)?, Bpffs::new()?);
        let folder = server::folder(&server::records_of_groups(&[3]), None)?;
        let program = folder.path().join("bosh-dns-xdp");
        spoil_all(&server::program()?, &program, spoilt, fault.instructions())?;
        let settings = json!({
            "metrics": {"enabled": true},
            "control": {"socket": folder.path().join("control.sock")},
            "xdp": {"mode": mode, "bpffs": bpffs.path()},
        });
        let server =
            Server::start_program(program, Some(&pair.server), folder, v4(), &settings, |_| {})?;
        let spoilt = Self {
            server,
            _bpffs: bpffs,
            pair,
        };
        wait_until(
            "every interface to be dealt with",
            Duration::from_secs(300),
            || {
                let Ok(status) = spoilt.status() else {
                    return false;
                };
                let interfaces = status["interfaces"].as_array();
                interfaces.is_some_and(|interfaces| {
                    interfaces.len() == 2
                        && interfaces
                            .iter()
                            .all(|interface| interface["state"] != "waiting")
                })
            },
        )
        .with_context(|| spoilt.server.log())?;
        Ok(spoilt)
    }

    /// Returns the fast path section of `status --json`.
    fn status(&self) -> Result<Value> {
        Ok(self.whole_status()?["fast_path"].clone())
    }

    /// Returns the output of `status --json`.
    fn whole_status(&self) -> Result<Value> {
        self.server.status(&self.pair.server)
    }

    /// Returns the text of the fast path check in `status`.
    fn fast_path_in_words(&self) -> Result<String> {
        let status = self.whole_status()?;
        let mut checks = status["checks"].as_array().context("checks")?.iter();
        let check = checks
            .find(|check| check["name"] == "fast path")
            .context("the fast path's check")?;
        Ok(check["detail"].as_str().context("in words")?.to_owned())
    }

    /// Sends ten queries from the client's namespace; returns whether interfaces answered all of them except
    /// probes.
    fn is_answered_by_the_interface(&self) -> Result<bool> {
        const QUERIES: u64 = 10;
        let before = Metrics::read(&self.pair.server)?;
        let expected: Vec<IpAddr> = (0..3).map(|last| [10, 0, 3, last].into()).collect();
        for _ in 0..QUERIES {
            let found = addresses(&self.pair.client, v4(), NAME, TIMEOUT)?.context("no reply")?;
            ensure!(found == expected, "{found:?}");
        }
        let after = Metrics::read(&self.pair.server)?;
        let replies = after.fast_path_replies() - before.fast_path_replies();
        let probes = after.probes() - before.probes();
        ensure!(
            replies == 0 || replies + probes == QUERIES,
            "{:?}",
            after.outcomes_since(&before)
        );
        Ok(replies > 0)
    }

    /// Returns the number of log lines about the rejection of this program.
    fn refusals(&self, program: &str) -> usize {
        let log = self.server.log();
        log.lines()
            .filter(|line| line.contains("the kernel rejected") && line.contains(program))
            .count()
    }
}

/// Copies the server, replacing the first instructions of a program.
pub(crate) fn spoil(server: &Path, copy: &Path, program: &str, instructions: &[u8]) -> Result<()> {
    spoil_all(server, copy, &[program], instructions)
}

/// Copies the server, replacing the first instructions of some programs.
fn spoil_all(server: &Path, copy: &Path, programs: &[&str], instructions: &[u8]) -> Result<()> {
    let mut bytes = fs::read(server)?;
    let places = places_of(&bytes, OBJECT);
    ensure!(
        !places.is_empty(),
        "{} holds another object than these tests: build it",
        server.display()
    );
    for program in programs {
        let at = first_instruction(OBJECT, program)
            .with_context(|| format!("no {program} in the object"))?;
        for &place in &places {
            let at = place + at;
            bytes[at..at + instructions.len()].copy_from_slice(instructions);
        }
    }
    fs::write(copy, bytes)?;
    Ok(fs::set_permissions(
        copy,
        fs::Permissions::from_mode(0o755),
    )?)
}

/// Returns the offsets of `wanted` in `bytes` that are multiples of eight.
fn places_of(bytes: &[u8], wanted: &[u8]) -> Vec<usize> {
    const ALIGNMENT: usize = 8;
    let places = (0..bytes.len()).step_by(ALIGNMENT);
    places
        .filter(|&place| bytes[place..].starts_with(wanted))
        .collect()
}

/// Returns the offset of a program's body in an ELF64 file of native byte order: of the function that
/// the program's entry point calls, if the compiler did not inline it.
fn first_instruction(elf: &[u8], program: &str) -> Option<usize> {
    // Mangled names (RFC 2603) end with the length and the name.
    let body = format!("{}{program}", program.len());
    symbol(elf, |name| name.ends_with(&body)).or_else(|| symbol(elf, |name| name == program))
}

/// Returns the offset of the first symbol with a matching name.
fn symbol(elf: &[u8], is_wanted: impl Fn(&str) -> bool) -> Option<usize> {
    const SYMTAB: u32 = 2;
    let u16_at = |at: usize| Some(u16::from_le_bytes(elf.get(at..at + 2)?.try_into().ok()?));
    let u32_at = |at: usize| Some(u32::from_le_bytes(elf.get(at..at + 4)?.try_into().ok()?));
    let u64_at =
        |at: usize| usize::try_from(u64::from_le_bytes(elf.get(at..at + 8)?.try_into().ok()?)).ok();
    let (table, entry_len, count) = (
        u64_at(40)?,
        usize::from(u16_at(58)?),
        usize::from(u16_at(60)?),
    );
    let header = |index: usize| table + index * entry_len;
    let symbols = (0..count)
        .map(header)
        .find(|&header| u32_at(header + 4) == Some(SYMTAB))?;
    let (offset, len) = (u64_at(symbols + 24)?, u64_at(symbols + 32)?);
    let texts = u64_at(header(u32_at(symbols + 40)? as usize) + 24)?;
    (offset..offset + len).step_by(24).find_map(|symbol| {
        let text = elf.get(texts + u32_at(symbol)? as usize..)?;
        let name = text.split(|byte| *byte == 0).next()?;
        let found = std::str::from_utf8(name).is_ok_and(&is_wanted);
        let section = header(usize::from(u16_at(symbol + 6)?));
        found.then_some(u64_at(section + 24)? + u64_at(symbol + 8)?)
    })
}

#[test]
fn rejected_program_disables_only_hook() -> Result<()> {
    requires!(namespaces, bpf);
    // The mode, the defective program, the hooks left on the veth.
    let cases = [
        (
            "native",
            object::XDP_PROGRAM,
            Fault::TooLong,
            &["tcx", "clsact"][..],
            None,
        ),
        (
            "native",
            object::XDP_PROGRAM,
            Fault::Unreadable,
            &["tcx", "clsact"],
            None,
        ),
        // The short one answers instead.
        (
            "auto",
            object::TC_ANSWER_PROGRAM,
            Fault::Unreadable,
            &["tcx", "clsact"],
            None,
        ),
        // The complete one answers from the start.
        (
            "auto",
            object::TC_FIRST_PROGRAM,
            Fault::Unreadable,
            &["tcx", "clsact"],
            None,
        ),
        (
            "auto",
            object::TC_PROGRAM,
            Fault::Unreadable,
            &["none"],
            None,
        ),
        // Not needed, so not even loaded.
        (
            "auto",
            object::XDP_PROGRAM,
            Fault::TooLong,
            &["tcx", "clsact"],
            Some(object::XDP_PROGRAM),
        ),
    ];
    for (number, (mode, program, fault, hooks, never_tried)) in cases.into_iter().enumerate() {
        let complaint = fault.complaint();
        let mut spoilt = Spoilt::start(&format!("spoilt{number}"), mode, program, fault)?;
        let case = format!("{mode} without {program}");
        // The programs for whole answers are loaded after the interface answers, and an interface may have to wait
        // for its turn to be attached.
        let mut status = spoilt.status().with_context(|| case.clone())?;
        wait_until(
            "the programs to be loaded and attached",
            Duration::from_secs(120),
            || {
                status = spoilt.status().unwrap_or_default();
                let loading = |program: &Value| program["state"] == "loading";
                let is_tried = |programs: &Vec<Value>| {
                    never_tried == Some(program)
                        || programs.iter().any(|found| found["name"] == program)
                };
                let is_as_expected = |interface: &Value| {
                    interface["hook"]
                        .as_str()
                        .is_some_and(|hook| hooks.contains(&hook))
                };
                let [programs, interfaces] =
                    ["programs", "interfaces"].map(|member| status[member].as_array());
                programs.is_some_and(|programs| is_tried(programs) && !programs.iter().any(loading))
                    && interfaces.is_some_and(|interfaces| interfaces.iter().all(is_as_expected))
            },
        )
        .with_context(|| format!("{case}: {status}"))?;
        ensure!(
            spoilt.is_answered_by_the_interface()? == (hooks != ["none"]),
            "{case}: {}",
            spoilt.server.log()
        );
        let on_no_interface = spoilt
            .fast_path_in_words()?
            .starts_with("on no interface: ");
        ensure!(
            on_no_interface == (hooks == ["none"]),
            "{case}: {}",
            spoilt.fast_path_in_words()?
        );
        let programs = status["programs"].as_array().context("programs")?;
        let named = |name: &str| programs.iter().find(|program| program["name"] == name);
        if let Some(never) = never_tried {
            ensure!(
                named(never).is_none(),
                "{case}: {never} was loaded needlessly: {programs:?}"
            );
        }
        if never_tried != Some(program) {
            let found = named(program).with_context(|| format!("{case}: {programs:?}"))?;
            let lines = found["verifier"]
                .as_array()
                .context("the verifier's lines")?;
            ensure!(found["state"] == "refused", "{case}: {found}");
            ensure!(
                lines
                    .iter()
                    .any(|line| line.as_str().is_some_and(|line| line.contains(complaint))),
                "{case}: {found}"
            );
            ensure!(
                found["why"]
                    .as_str()
                    .is_some_and(|why| why.contains(complaint)),
                "{case}: {found}"
            );
            let metrics = Metrics::read(&spoilt.pair.server)?;
            let refused = metrics.sum(
                names::FAST_PATH_PROGRAM_INFO,
                &format!("program=\"{program}\",reason=\""),
            );
            ensure!(refused == 1, "{case}");
            spoilt.server.wait_for_log(complaint)?;
            ensure!(spoilt.refusals(program) > 0, "{case}");
        }
        for program in programs.iter().filter(|found| found["name"] != program) {
            ensure!(program["state"] == "loaded", "{case}: {program}");
        }
        // Signals are still obeyed.
        spoilt
            .server
            .process()
            .stop(Duration::from_secs(120))
            .with_context(|| case)?;
    }
    Ok(())
}

/// Interfaces take `dns_tc` while the kernel verifies the program that it tail-calls.
#[test]
fn rejected_answers_leave_nothing_attached() -> Result<()> {
    requires!(namespaces, bpf);
    let spoilt = Spoilt::start_without(
        "unanswered",
        "auto",
        &[object::TC_FIRST_PROGRAM, object::TC_ANSWER_PROGRAM],
        Fault::Unreadable,
    )?;
    let status = spoilt.status()?;
    let programs = status["programs"].as_array().context("programs")?;
    for (name, state) in [
        (object::TC_PROGRAM, "loaded"),
        (object::TC_FIRST_PROGRAM, "refused"),
        (object::TC_ANSWER_PROGRAM, "refused"),
    ] {
        let found = programs.iter().find(|program| program["name"] == name);
        let found = found.with_context(|| format!("no {name}: {programs:?}"))?;
        ensure!(found["state"] == state, "{found}");
    }
    let attached = spoilt.pair.server.attached_programs()?;
    ensure!(attached.is_empty(), "{attached:?}");
    ensure!(!spoilt.is_answered_by_the_interface()?, "{status}");
    let in_words = spoilt.fast_path_in_words()?;
    ensure!(in_words.starts_with("on no interface: "), "{in_words}");
    Ok(())
}

#[test]
fn rejected_programs_are_not_retried() -> Result<()> {
    requires!(namespaces, bpf);
    let spoilt = Spoilt::start("again", "native", object::XDP_PROGRAM, Fault::Unreadable)?;
    spoilt.server.wait_for_log("program=dns_xdp")?;
    let tried = spoilt.refusals("program=dns_xdp");
    spoilt
        .pair
        .server
        .ip("link add late type veth peer name etal")?;
    wait_until(
        "the late interface to be served by the next best hook",
        Duration::from_secs(300),
        || {
            Metrics::read(&spoilt.pair.server).is_ok_and(|metrics| {
                ["tcx", "clsact"].iter().any(|hook| {
                    let serves = format!("hook=\"{hook}\",interface=\"late\"");
                    metrics.sum(names::FAST_PATH_INTERFACE_INFO, &serves) == 1
                })
            })
        },
    )?;
    ensure!(
        spoilt.refusals("program=dns_xdp") == tried,
        "tried again: {}",
        spoilt.server.log()
    );
    let status = spoilt.status()?;
    let programs = status["programs"].as_array().context("programs")?;
    // The program of another hook was refused.
    ensure!(
        programs
            .iter()
            .any(|program| program["name"] == object::TC_ANSWER_PROGRAM),
        "{programs:?}"
    );
    Ok(())
}
