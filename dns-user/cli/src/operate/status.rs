//! `status`: shows the health of the server.

use std::{
    env,
    fmt::Write,
    io::{self, IsTerminal as _},
};

use dns_command_line::table::Table;
use dns_core::terminal;

use super::{
    Problem, WholeServer,
    client::get,
    print_json,
    table::{self, count, duration, lease, milliseconds, or_dash, percent},
    write,
};
use dns_fastpath::ProgramStatus;
use dns_kit::logs::time_of;
use dns_resolver::ops::{
    status::{
        Budget, CertificateStatus, FastPathView, InterfaceView, OverloadStatus, RecordsStatus,
        RepliesStatus, ServerStatus,
    },
    tap::seconds_since_1970,
};
use dns_upstream::RecursorStatus;

// Colours of lines: parameters of the escape sequence (ECMA-48, SGR).
const RED: u8 = 31;
const YELLOW: u8 = 33;
const GREEN: u8 = 32;

/// Prints the status; a server that is not ready is a negative result.
pub(super) fn run(server: WholeServer) -> Result<(), Problem> {
    let WholeServer { connection, json } = server;
    let answer = get(&connection, "/status")?;
    let status: ServerStatus = answer.json()?;
    if json {
        print_json(&(answer.text() + "\n"))?;
    } else {
        let plain = text(&status);
        let text = terminal::lines(&plain);
        if colours_wanted() {
            write(&coloured(&text))?;
        } else {
            write(&text)?;
        }
    }
    if status.ready {
        Ok(())
    } else {
        Err(Problem::BadAnswer("the server is not ready".to_owned()))
    }
}

/// Returns whether output may have colours: on a terminal, unless `NO_COLOR` is set (no-color.org).
fn colours_wanted() -> bool {
    // Set to nothing, the variable has no effect (no-color.org).
    let is_refused = env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    // Such a terminal, as in Emacs's shell, shows the sequences themselves.
    let is_dumb = env::var_os("TERM").is_some_and(|term| term == "dumb");
    io::stdout().is_terminal() && !is_refused && !is_dumb
}

/// Colours the lines that say how the server is. `text` is already escaped.
fn coloured(text: &str) -> String {
    let mut all = String::new();
    for line in text.split_inclusive('\n') {
        let Some(colour) = colour_of(line) else {
            all += line;
            continue;
        };
        // The end of the line stays outside, so that a terminal does not colour the rest of it.
        let bare = line.trim_end_matches('\n');
        let end = &line[bare.len()..];
        all += &format!("\x1b[{colour}m{bare}\x1b[0m{end}");
    }
    all
}

fn colour_of(line: &str) -> Option<u8> {
    if line.starts_with("bosh-dns-xdp ") {
        return Some(if line.trim_end().ends_with("NOT READY") {
            RED
        } else if line.contains("degraded") {
            YELLOW
        } else {
            GREEN
        });
    }
    // Lines of other sections are indented as well, but never begin with these words.
    match line.get(..6)? {
        "  FAIL" => Some(RED),
        "  warn" | "  note" => Some(YELLOW),
        _ => None,
    }
}

/// Formats the status as text. Writing to a string cannot fail.
fn text(status: &ServerStatus) -> String {
    let mut out = String::new();
    let up = duration(status.uptime_seconds);
    let _ = writeln!(
        out,
        "bosh-dns-xdp {} ({}), pid {}, up {up}: {}",
        status.server_version,
        status.commit,
        status.pid,
        match (status.ready, status.degraded) {
            (true, false) => "ready",
            (true, true) => "ready, degraded",
            (false, _) => "NOT READY",
        }
    );
    for check in &status.checks {
        let _ = writeln!(
            out,
            "  {:<4}  {}: {}",
            if check.ok {
                check.result.word()
            } else {
                "FAIL"
            },
            check.name,
            terminal::line(&check.detail)
        );
    }
    for note in &status.notes {
        let _ = writeln!(out, "  note  {}", terminal::line(note));
    }
    let _ = writeln!(out, "\nlisten      {}", status.listen.join(", "));
    records_text(&mut out, &status.records);
    replies_text(&mut out, &status.replies);
    match (&status.fast_path, &status.fast_path_off) {
        (Some(fast_path), _) => fast_path_text(&mut out, fast_path),
        (None, Some(why)) => drop(writeln!(out, "fast path   off: {why}")),
        (None, None) => drop(writeln!(out, "fast path   off")),
    }
    overload_text(&mut out, &status.overload);
    recursors_text(&mut out, &status.recursors);
    for (title, value) in [
        ("Consul", &status.consul),
        ("cache", &status.cache),
        ("health", &status.health),
    ] {
        // The members of these sections are shown as the server sends them, so a newer server's
        // appear, too.
        if !value.is_null() && value.as_array().is_none_or(|items| !items.is_empty()) {
            let _ = write!(out, "\n{title}\n{}", table::value(value, 2));
        }
    }
    certificates_text(&mut out, &status.certificates);
    reloads_text(&mut out, status);
    if !status.problems.is_empty() {
        out.push_str("\nnewest warnings and errors\n");
        for problem in &status.problems {
            let time = time_of(problem.time);
            let _ = writeln!(
                out,
                "  {time} {} [{}] {}",
                problem.level, problem.tag, problem.text
            );
        }
    }
    out
}

fn records_text(out: &mut String, records: &RecordsStatus) {
    let version = or_dash(records.version);
    let age = match records.age_seconds {
        Some(age) => duration(age) + " ago",
        None => "never".to_owned(),
    };
    let _ = writeln!(
        out,
        "records     version {version}, read {age}: {} instances, {} aliases, domains {}",
        count(records.instances as u64),
        count(records.aliases as u64),
        if records.domains.is_empty() {
            "-".into()
        } else {
            terminal::line(&records.domains.join(" ")).into_owned()
        }
    );
}

fn replies_text(out: &mut String, replies: &RepliesStatus) {
    let all = replies.fast + replies.userspace;
    let _ = writeln!(
        out,
        "replies     {}: fast path {} ({}), userspace {}; for the fleet {}, to recursors {}",
        count(all),
        count(replies.fast),
        percent(replies.fast, all),
        count(replies.userspace),
        count(replies.internal),
        count(replies.external)
    );
}

fn certificates_text(out: &mut String, certificates: &[CertificateStatus]) {
    let mut lines = Table::new(["CERTIFICATE", "SUBJECT", "ENDS IN", "PROBLEM"]);
    for certificate in certificates {
        let left = certificate.not_after - seconds_since_1970();
        lines.line([
            certificate.purpose.clone(),
            or_dash(certificate.subject.as_ref()),
            if left > 0.0 {
                duration(left)
            } else {
                "EXPIRED".to_owned()
            },
            or_dash(certificate.error.as_ref()),
        ]);
    }
    lines.add_to(out, 0);
}

/// Adds the section of queries dropped and refused under overload, with the affected clients.
fn overload_text(out: &mut String, overload: &OverloadStatus) {
    let OverloadStatus { shed, budgets } = overload;
    let refused: u64 = budgets.iter().map(|budget| budget.status.refused).sum();
    // The first one is the whole server's, in which the queries of all others wait, too.
    let waiting = budgets.first().map_or(0, |budget| budget.status.waiting);
    let _ = writeln!(
        out,
        "overload    {} queries wait, {} refused, {} dropped by interfaces",
        count(waiting as u64),
        count(refused),
        count(*shed)
    );
    let mut lines = Table::new([
        "WAITING FOR",
        "QUERIES",
        "LIMIT",
        "CLIENTS",
        "MOST BY",
        "REFUSED",
    ]);
    for Budget { name, status } in budgets {
        // There is a budget for each handler; those that refuse nothing would hide the others.
        if status.refused == 0 {
            continue;
        }
        let most = match status.heaviest {
            Some((client, queries)) => format!("{client} ({})", count(queries as u64)),
            None => "-".to_owned(),
        };
        lines.line([
            terminal::line(name).into_owned(),
            count(status.waiting as u64),
            count(status.limit as u64),
            count(status.clients as u64),
            most,
            count(status.refused),
        ]);
    }
    lines.add_to(out, 2);
    let mut lines = Table::new([
        "LIMITED CLIENT",
        "WAITING FOR",
        "QUERIES",
        "REFUSED",
        "LAST",
    ]);
    for (budget, client) in overload.limited() {
        lines.line([
            client.client.to_string(),
            terminal::line(budget).into_owned(),
            count(client.waiting as u64),
            count(client.refused),
            duration(client.seconds_ago) + " ago",
        ]);
    }
    lines.add_to(out, 2);
}

fn fast_path_text(out: &mut String, fast_path: &FastPathView) {
    let lease = lease(fast_path.lease_seconds);
    let _ = writeln!(
        out,
        "fast path   {} names published, {} learned, {} negative, {} left to userspace; map {:.0} % full, \
         memory {:.0} %; {} of {} forwarded answers; {} of {} other types; lease {lease}",
        count(fast_path.published as u64),
        count(fast_path.learned as u64),
        count(fast_path.negative as u64),
        count(fast_path.unfitting as u64),
        fast_path.map_fill * 100.0,
        fast_path.memory_fill * 100.0,
        count(fast_path.forwarded_answers as u64),
        count(fast_path.max_forwarded_answers as u64),
        count(fast_path.local_replies as u64),
        count(fast_path.max_local_replies as u64),
    );
    // By state, since an operator looks for interfaces that are not served, and why.
    for (state, title) in [
        ("served", "INTERFACES SERVED"),
        ("waiting", "WAITING FOR QUERIES"),
        ("refused", "LEFT TO USERSPACE"),
    ] {
        let mut lines = Table::new([title, "HOOK", "REPLIES", "WHY"]);
        for group in InterfaceGroup::all(&fast_path.interfaces, state) {
            lines.line([
                group.names(),
                group.hook.to_owned(),
                count(group.replies),
                group.why.to_owned(),
            ]);
        }
        lines.add_to(out, 2);
    }
    programs_text(out, &fast_path.programs);
    let mut lines = Table::new(["OUTCOME", "PACKETS"]);
    for (outcome, packets) in &fast_path.outcomes {
        if *packets > 0 {
            lines.line([outcome.clone(), count(*packets)]);
        }
    }
    lines.add_to(out, 2);
}

/// Adds the section of programs, and what the verifier said of those that it refused.
fn programs_text(out: &mut String, programs: &[ProgramStatus]) {
    let mut lines = Table::new(["PROGRAM", "STATE", "INSTRUCTIONS", "TOOK", "WHY"]);
    for program in programs {
        lines.line([
            program.name.to_string(),
            program.state.label().to_owned(),
            or_dash(program.instructions.map(|number| count(number.into()))),
            milliseconds(program.load_ms),
            program.why.clone().unwrap_or_default(),
        ]);
    }
    lines.add_to(out, 2);
    for program in programs {
        // Only a program that the kernel refused has any.
        if program.verifier.is_empty() {
            continue;
        }
        let _ = writeln!(out, "\n  the verifier's last lines on {}", program.name);
        for line in &program.verifier {
            let _ = writeln!(out, "    {line}");
        }
    }
}

/// Interfaces with the same hook and reason.
struct InterfaceGroup<'a> {
    hook: &'a str,
    /// Reason for the hook, or for the lack of one.
    why: &'a str,
    names: Vec<&'a str>,
    /// Total number of replies.
    replies: u64,
}

impl<'a> InterfaceGroup<'a> {
    /// Maximum number of names listed.
    const MAX_NAMES: usize = 4;

    /// Groups the interfaces in this state, largest group first.
    fn all(interfaces: &'a [InterfaceView], state: &str) -> Vec<Self> {
        let mut groups: Vec<Self> = Vec::new();
        for interface in interfaces {
            if interface.state != state {
                continue;
            }
            let InterfaceView {
                name,
                hook,
                why,
                replies,
                ..
            } = interface;
            // A node with a thousand containers has as many interfaces, most of them alike.
            match groups
                .iter_mut()
                .find(|group| group.hook == hook && group.why == why)
            {
                Some(group) => {
                    group.names.push(name);
                    group.replies += replies;
                }
                None => groups.push(Self {
                    hook,
                    why,
                    names: vec![name],
                    replies: *replies,
                }),
            }
        }
        groups.sort_by_key(|group| std::cmp::Reverse(group.names.len()));
        groups
    }

    /// Returns the first names and the number of the others.
    fn names(&self) -> String {
        let listed = self.names[..self.names.len().min(Self::MAX_NAMES)].join(" ");
        match self.names.len().saturating_sub(Self::MAX_NAMES) {
            0 => listed,
            more => format!("{listed} and {more} more"),
        }
    }
}

/// Adds the section of recursors, in the order in which they are queried.
fn recursors_text(out: &mut String, recursors: &[RecursorStatus]) {
    let mut lines = Table::new([
        "RECURSOR",
        "ASKED",
        "QUERIES",
        "FAILED",
        "OF LAST 25",
        "LATENCY",
        "REASONS",
    ]);
    for recursor in recursors {
        let mut failures: Vec<_> = recursor.failures.iter().collect();
        // The table may be cut off on the right: the most usual reason must be readable.
        failures.sort_by_key(|(_, count)| std::cmp::Reverse(**count));
        let mut reasons = Vec::new();
        for (reason, failed) in failures {
            reasons.push(format!("{reason} {}", count(*failed)));
        }
        if recursor.drops_edns {
            reasons.push("drops EDNS".to_owned());
        }
        let address = match recursor.resolved.map(|address| address.to_string()) {
            // Configured by host name.
            Some(resolved) if recursor.address != resolved => {
                format!("{} ({resolved})", recursor.address)
            }
            _ => recursor.address.clone(),
        };
        lines.line([
            address,
            if recursor.preferred { "first" } else { "next" }.to_owned(),
            count(recursor.tries),
            count(recursor.failures.values().sum()),
            recursor.recent_failures.to_string(),
            milliseconds(recursor.latency_ms),
            reasons.join(", "),
        ]);
    }
    lines.add_to(out, 0);
}

/// Adds the section of reloads and failures. Failures followed by a successful reload are omitted.
fn reloads_text(out: &mut String, status: &ServerStatus) {
    let now = seconds_since_1970();
    let mut lines = Table::new(["FILES", "RESULT", "WHEN", "TOOK", "DETAIL"]);
    for (result, events) in [
        ("read", &status.last_reload),
        ("FAILED", &status.last_failure),
    ] {
        for (kind, event) in events {
            let is_cured = status
                .last_reload
                .get(kind)
                .is_some_and(|reload| reload.time > event.time);
            if result == "FAILED" && is_cured {
                continue;
            }
            lines.line([
                kind.clone(),
                result.to_owned(),
                // The server may be another machine, whose clock is ahead of this one's.
                duration((now - event.time).max(0.0)) + " ago",
                milliseconds(event.took_ms),
                event.detail.clone(),
            ]);
        }
    }
    lines.add_to(out, 0);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_bad_lines_are_coloured() {
        assert_eq!(
            coloured("ok\n  FAIL x\nend"),
            "ok\n\x1b[31m  FAIL x\x1b[0m\nend"
        );
    }
}
