//! Compares observed replies with recorded expectations.

use std::{collections::BTreeMap, path::Path};

use anyhow::Result;

use super::{
    client::Observed,
    message::{Flags, Seen, canonical, class_name, class_number, type_name, type_number},
    scenario::{AnswersMode, Case, Expect, Opt, Query, Record, read_json},
};

/// Returns the differences from the recording; empty if the case passes. With several acceptable
/// answers, returns the differences from the closest.
///
/// `late` is the number of whole seconds by which the replay lags behind the recording: where TTLs
/// may differ ([`Expect::ttl_slack`]), they may be lower by that much more.
///
/// # Errors
///
/// Fails if the recording itself cannot be read.
pub fn differences(
    case: &Case,
    observed: &Observed,
    folder: &Path,
    late: u32,
) -> Result<Vec<String>> {
    let alternatives = case.expect_any.iter().flatten().chain(&case.expect);
    let mut nearest: Option<Vec<String>> = None;
    for expected in alternatives {
        let found = compare(&case.q, expected, observed, folder, late)?;
        if nearest
            .as_ref()
            .is_none_or(|nearest| found.len() < nearest.len())
        {
            nearest = Some(found);
        }
    }
    Ok(nearest.unwrap_or_else(|| vec!["the case expects nothing".to_owned()]))
}

/// Returns the differences from one expectation; for `late` see [`differences`].
///
/// # Errors
///
/// Fails if the recording itself cannot be read.
pub fn compare(
    query: &Query,
    expected: &Expect,
    observed: &Observed,
    folder: &Path,
    late: u32,
) -> Result<Vec<String>> {
    let no_reply =
        expected.no_response || expected.error.is_some() || expected.unparsable.is_some();
    let as_expected = match observed {
        Observed::Reply { message, id_echoed } if !no_reply => {
            let mut found = Differences {
                found: Vec::new(),
                slack: Slack::new(expected, late),
            };
            found.check(
                "the message id is echoed",
                expected.id_echoed.unwrap_or(true),
                *id_echoed,
            );
            found.message(query, expected, message, folder)?;
            return Ok(found.found);
        }
        Observed::Reply { .. } => false,
        Observed::NoResponse => expected.no_response,
        Observed::Error(error) => expected.error.as_ref() == Some(error),
        Observed::Unparsable(_) => expected.unparsable.is_some(),
    };
    if as_expected {
        return Ok(Vec::new());
    }
    let wanted = match expected {
        Expect {
            no_response: true, ..
        } => "no response".to_owned(),
        Expect {
            error: Some(error), ..
        } => error.clone(),
        Expect {
            unparsable: Some(_),
            ..
        } => "a reply that cannot be walked".to_owned(),
        _ => format!("{:?} {:?}", expected.rcode, expected.answers),
    };
    Ok(vec![format!("want {wanted}, got {observed:?}")])
}

/// Collects differences in readable form.
#[derive(Debug)]
struct Differences {
    /// One line per difference.
    found: Vec<String>,
    slack: Slack,
}

/// Allowed TTL difference in seconds.
#[derive(Clone, Copy, Debug)]
struct Slack {
    above: u32,
    below: u32,
}

impl Slack {
    /// Returns the slack that an expectation allows.
    fn new(expected: &Expect, late: u32) -> Self {
        let above = expected.ttl_slack;
        Self {
            above,
            below: if above == 0 { 0 } else { above + late },
        }
    }

    /// Returns whether a TTL is within the slack.
    fn holds(self, wanted: u32, got: u32) -> bool {
        (wanted.saturating_sub(self.below)..=wanted.saturating_add(self.above)).contains(&got)
    }
}

impl Differences {
    /// Records a difference unless the values are equal.
    fn check<T: PartialEq + std::fmt::Debug>(&mut self, what: &str, wanted: T, got: T) {
        if wanted != got {
            self.found
                .push(format!("{what}: want {wanted:?}, got {got:?}"));
        }
    }

    fn message(
        &mut self,
        query: &Query,
        expected: &Expect,
        seen: &Seen,
        folder: &Path,
    ) -> Result<()> {
        let Flags {
            qr,
            opcode,
            aa,
            tc,
            rd,
            ra,
            z,
            ad,
            cd,
        } = seen.flags;
        self.check("qr", true, qr);
        if let Some(rcode) = &expected.rcode {
            self.check("rcode", rcode, &seen.rcode);
        }
        let flags = [
            ("aa", expected.aa, aa),
            ("ra", expected.ra, ra),
            ("tc", expected.tc, tc),
            ("rd", expected.rd, rd),
            ("ad", expected.ad, ad),
            ("cd", expected.cd, cd),
        ];
        for (name, wanted, got) in flags {
            self.check(name, wanted.unwrap_or(got), got);
        }
        self.check("opcode", expected.opcode, opcode);
        self.check("z", expected.z, z);
        if let Some(wanted) = &expected.opt {
            self.opt(query, wanted.as_ref(), seen.opt.as_ref());
        }
        if let Some(question) = &expected.question {
            self.check("question", question, &seen.question);
        } else if expected.question_echoed_case {
            self.check("question", &vec![question(query)?], &seen.question);
        }
        self.answers(expected, seen, folder)?;
        let slack = self.slack;
        for (section, wanted, got) in [
            ("authority", &expected.authority, &seen.authority),
            ("additional", &expected.additional, &seen.additional),
        ] {
            if !are_alike(wanted, got, slack) {
                self.found.push(format!(
                    "{section}: want {wanted:?}, got {got:?} ({slack:?})"
                ));
            }
        }
        if let Some(most) = expected.size_max.filter(|most| seen.size > *most) {
            self.found
                .push(format!("{} bytes, more than {most}", seen.size));
        }
        self.check(
            "bytes after the end of the message",
            expected.trailing,
            seen.trailing,
        );
        Ok(())
    }

    /// Compares OPTs. An OPT in the reply to a query with OPT is accepted even if bosh-dns omits it
    /// (RFC 6891, section 6.1.1).
    fn opt(&mut self, query: &Query, wanted: Option<&Opt>, got: Option<&Opt>) {
        match (wanted, got) {
            (None, Some(_)) if query.edns.is_some() => {}
            (Some(wanted), Some(got)) => {
                self.check("opt.udp_size", wanted.udp_size, got.udp_size);
                self.check("opt.do", wanted.dnssec_ok.or(got.dnssec_ok), got.dnssec_ok);
                self.check("opt.version", wanted.version.or(got.version), got.version);
                self.check("opt.options", &wanted.options, &got.options);
            }
            _ => self.check("opt", wanted, got),
        }
    }

    fn answers(&mut self, expected: &Expect, seen: &Seen, folder: &Path) -> Result<()> {
        let got = &seen.answers;
        if expected.answers_mode == AnswersMode::None {
            self.check("answers", &Vec::new(), got);
            return Ok(());
        }
        let asked = seen.question.first().map_or(".", |(name, _, _)| name);
        let wanted = recorded_answers(expected, folder, asked)?;
        if expected.answers_mode == AnswersMode::ExactSet {
            if !are_alike(&wanted, got, self.slack) {
                let (missing, extra) = (without(&wanted, got), without(got, &wanted));
                self.found.push(format!(
                    "answers: want {}, got {}; missing {:?}; extra {:?} ({:?})",
                    wanted.len(),
                    got.len(),
                    &missing[..missing.len().min(4)],
                    &extra[..extra.len().min(4)],
                    self.slack,
                ));
            }
            return Ok(());
        }
        let stray = without(got, &wanted);
        if !stray.is_empty() {
            self.found.push(format!(
                "answers that are not allowed, or repeated: {stray:?}"
            ));
        }
        match expected.count {
            Some(count) if count.holds(got.len() as u64) => {}
            Some(count) => {
                self.found.push(format!(
                    "{} answers, not {} to {}",
                    got.len(),
                    count.min,
                    count.max
                ));
            }
            None => self
                .found
                .push("the recording does not state the number of correct answers".to_owned()),
        }
        Ok(())
    }
}

/// Returns the question that a reply must echo.
fn question(query: &Query) -> Result<(String, String, String)> {
    let number = |given, parse: fn(&serde_json::Value) -> Result<u16>| match given {
        Some(given) => parse(given),
        None => Ok(1),
    };
    let name = canonical(query.name.as_deref().unwrap_or("."))?;
    let qtype = type_name(number(query.qtype.as_ref(), type_number)?);
    Ok((
        name,
        qtype,
        class_name(number(query.class.as_ref(), class_number)?),
    ))
}

/// Returns the expected answers, including those from `answers_ref`.
fn recorded_answers(expected: &Expect, folder: &Path, asked: &str) -> Result<Vec<Record>> {
    let Some(file) = &expected.answers_ref else {
        return Ok(expected.answers.clone());
    };
    let mut records: Vec<Record> = read_json(&folder.join(file))?;
    for record in records.iter_mut().filter(|record| record.0 == "@") {
        asked.clone_into(&mut record.0);
    }
    Ok(records)
}

/// Returns whether two lists hold the same records as multisets, with TTLs within `slack`.
fn are_alike(wanted: &[Record], got: &[Record], slack: Slack) -> bool {
    let sorted = |records: &[Record]| {
        let mut records = records.to_vec();
        records.sort_by(|one, other| {
            let key = |record: &Record| {
                let Record(name, rtype, ttl, rdata, class) = record.clone();
                (name, rtype, rdata, class, ttl)
            };
            key(one).cmp(&key(other))
        });
        records
    };
    let (wanted, got) = (sorted(wanted), sorted(got));
    let is_alike = |(one, other): (&Record, &Record)| {
        let mut other = other.clone();
        let near = slack.holds(one.2, other.2);
        other.2 = one.2;
        near && *one == other
    };
    wanted.len() == got.len() && wanted.iter().zip(&got).all(is_alike)
}

/// Returns the multiset difference of `records` and `others`.
fn without(records: &[Record], others: &[Record]) -> Vec<Record> {
    let mut left: BTreeMap<&Record, usize> = BTreeMap::new();
    for record in others {
        *left.entry(record).or_default() += 1;
    }
    let mut missing = records.to_vec();
    missing.retain(|record| match left.get_mut(record) {
        Some(count) if *count > 0 => {
            *count -= 1;
            false
        }
        _ => true,
    });
    missing
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    /// Returns an expectation that [`reply`] meets.
    fn expectation() -> Value {
        json!({
            "rcode": "NOERROR", "aa": true, "ra": true, "tc": false, "rd": true, "ad": false, "cd": false,
            "opt": {"udp_size": 1232, "do": false},
            "question_echoed_case": true,
            "answers": [["Web.bosh.", "A", 5, "10.0.0.1"], ["Web.bosh.", "A", 5, "10.0.0.2"]],
            "answers_mode": "exact_set",
            "authority": [["bosh.", "NS", 7, "ns.bosh."]],
            "size_max": 512,
        })
    }

    /// Returns a reply whose answers are in another order than recorded, as after shuffling.
    fn reply() -> Observed {
        let record = |name: &str, rtype: &str, ttl, rdata: &str| {
            Record(
                name.to_owned(),
                rtype.to_owned(),
                ttl,
                rdata.to_owned(),
                None,
            )
        };
        let text = str::to_owned;
        let message = Seen {
            flags: Flags {
                qr: true,
                aa: true,
                ra: true,
                rd: true,
                ..Flags::default()
            },
            rcode: text("NOERROR"),
            question: vec![(text("Web.bosh."), text("A"), text("IN"))],
            answers: vec![
                record("Web.bosh.", "A", 5, "10.0.0.2"),
                record("Web.bosh.", "A", 5, "10.0.0.1"),
            ],
            authority: vec![record("bosh.", "NS", 7, "ns.bosh.")],
            opt: Some(Opt {
                udp_size: 1232,
                dnssec_ok: Some(false),
                version: Some(0),
                options: Vec::new(),
            }),
            size: 100,
            ..Seen::default()
        };
        Observed::Reply {
            message,
            id_echoed: true,
        }
    }

    /// Compares `observed` with an expectation in recorded form.
    fn found(expectation: Value, observed: &Observed) -> Vec<String> {
        let query = json!({"name": "Web.bosh", "type": "A", "edns": {"udp_size": 1232}});
        let query: Query = serde_json::from_value(query).unwrap();
        compare(
            &query,
            &serde_json::from_value(expectation).unwrap(),
            observed,
            Path::new("."),
            0,
        )
        .unwrap()
    }

    #[test]
    fn recorded_reply_passes() {
        assert_eq!(found(expectation(), &reply()), Vec::<String>::new());
    }

    #[test]
    fn every_member_is_compared() {
        let otherwise = [
            ("rcode", json!("NXDOMAIN")),
            ("aa", json!(false)),
            ("ra", json!(false)),
            ("tc", json!(true)),
            ("rd", json!(false)),
            ("ad", json!(true)),
            ("cd", json!(true)),
            ("z", json!(true)),
            ("opcode", json!(2)),
            ("id_echoed", json!(false)),
            ("no_response", json!(true)),
            ("error", json!("ConnectionRefusedError")),
            ("unparsable", json!("short message")),
            ("opt", json!({"udp_size": 4096})),
            ("opt", json!({"udp_size": 1232, "do": true})),
            ("opt", json!({"udp_size": 1232, "version": 1})),
            ("opt", json!({"udp_size": 1232, "options": [[3, "00"]]})),
            ("question", json!([["web.bosh.", "A", "IN"]])),
            ("question", json!([])),
            ("answers", json!([["Web.bosh.", "A", 5, "10.0.0.1"]])),
            (
                "answers",
                json!([
                    ["Web.bosh.", "A", 5, "10.0.0.1"],
                    ["Web.bosh.", "A", 5, "10.0.0.1"]
                ]),
            ),
            (
                "answers",
                json!([
                    ["Web.bosh.", "A", 5, "10.0.0.1"],
                    ["Web.bosh.", "A", 6, "10.0.0.2"]
                ]),
            ),
            (
                "answers",
                json!([
                    ["Web.bosh.", "A", 5, "10.0.0.1"],
                    ["web.bosh.", "A", 5, "10.0.0.2"]
                ]),
            ),
            (
                "answers",
                json!([
                    ["Web.bosh.", "A", 5, "10.0.0.1"],
                    ["Web.bosh.", "A", 5, "10.0.0.2", "CH"]
                ]),
            ),
            ("answers_mode", json!("none")),
            ("authority", json!([])),
            ("additional", json!([["bosh.", "A", 7, "10.0.0.1"]])),
            ("size_max", json!(99)),
            ("trailing", json!(1)),
        ];
        for (member, value) in otherwise {
            let mut changed = expectation();
            changed[member] = value.clone();
            assert!(
                !found(changed, &reply()).is_empty(),
                "{member}: {value} passes"
            );
        }
    }

    #[test]
    fn missing_reply_is_reported() {
        for observed in [
            Observed::NoResponse,
            Observed::Error("x".to_owned()),
            Observed::Unparsable("x".to_owned()),
        ] {
            assert!(!found(expectation(), &observed).is_empty(), "{observed:?}");
        }
    }

    #[test]
    fn answer_subsets_are_bounded() {
        let part = |count: Value, answers: Value| {
            let mut changed = expectation();
            changed["answers_mode"] = json!("subset_of");
            changed["count"] = count;
            changed["answers"] = answers;
            found(changed, &reply()).is_empty()
        };
        let address = |last: u8| json!(["Web.bosh.", "A", 5, format!("10.0.0.{last}")]);
        let all = json!([address(1), address(2), address(3)]);
        assert!(part(json!({"min": 2, "max": 2}), all.clone()));
        assert!(!part(json!({"min": 3, "max": 3}), all.clone()));
        assert!(!part(json!({"min": 1, "max": 1}), all));
        assert!(!part(
            json!({"min": 1, "max": 3}),
            json!([address(1), address(3)])
        ));
    }

    #[test]
    fn ttl_slack_is_enforced() {
        for (slack, passes) in [(0, false), (1, false), (2, true)] {
            let mut changed = expectation();
            changed["ttl_slack"] = json!(slack);
            changed["answers"][0][2] = json!(7);
            assert_eq!(found(changed, &reply()).is_empty(), passes, "slack {slack}");
        }
    }

    #[test]
    fn late_replay_may_lower_ttls() {
        let late = |slack: u32, wanted: u32, late| {
            let expected =
                json!({"ttl_slack": slack, "answers": [["a.", "A", wanted, "10.0.0.1"]]});
            let expected: Expect = serde_json::from_value(expected).unwrap();
            Slack::new(&expected, late).holds(wanted, 5)
        };
        assert!(!late(0, 6, 3));
        assert!(late(1, 6, 0) && late(1, 8, 2) && late(1, 4, 2));
        assert!(!late(1, 7, 0) && !late(1, 9, 2) && !late(1, 3, 2));
    }

    #[test]
    fn unknown_members_are_rejected() {
        let mut changed = expectation();
        changed["rcodes"] = json!("NOERROR");
        assert!(serde_json::from_value::<Expect>(changed).is_err());
    }
}
