//! Reads changed sets back, because NOERROR is no proof: a server ignores a CNAME beside other data, among others
//! (RFC 2136, section 3.4.2.2).

use std::collections::BTreeSet;

use super::{
    Connection, Failure, MAX_PIPELINED, TsigKey,
    messages::{self, CLASS_IN, MessageReader, WireError, decode},
};
use crate::{
    provider::{Step, Transaction},
    record::{Name, RecordType, Target},
};

/// Number of record sets that a transfer brings in about the time of one query.
const RECORDS_PER_QUERY: usize = 4;

/// A changed set, and the data that it should have now.
pub(super) struct Question<'a> {
    /// Place of the transaction in its batch.
    pub(super) place: usize,
    name: &'a Name,
    record_type: RecordType,
    /// Empty for a deleted set.
    expected: &'a BTreeSet<Target>,
}

static NOTHING: BTreeSet<Target> = BTreeSet::new();

/// Returns the questions about a transaction: one for each changed set.
pub(super) fn questions(place: usize, transaction: &Transaction) -> Vec<Question<'_>> {
    let mut found = Vec::new();
    for step in &transaction.steps {
        let (record, expected) = match step {
            Step::Create(record) | Step::Replace { after: record, .. } => (record, &record.targets),
            Step::Delete(record) => (record, &NOTHING),
            Step::Require(_) | Step::RequireAbsent(..) => continue,
        };
        found.push(Question {
            place,
            name: &record.name,
            record_type: record.record_type,
            expected,
        });
    }
    found
}

/// Returns whether queries cost less than another transfer of a zone with this many records.
pub(super) fn is_cheaper_than_transfer(questions: usize, records: usize) -> bool {
    questions <= MAX_PIPELINED.max(records / RECORDS_PER_QUERY)
}

/// Asks the questions; returns the places of transactions that the answers do not prove.
pub(super) async fn unproven(
    connection: &mut Connection,
    key: Option<&TsigKey>,
    questions: &[Question<'_>],
) -> Result<BTreeSet<usize>, Failure> {
    let mut unproven = BTreeSet::new();
    for part in questions.chunks(MAX_PIPELINED) {
        let first = fastrand::u16(..);
        let queries = part.iter().zip(0_u16..).map(|(question, number)| {
            let id = first.wrapping_add(number);
            messages::question(id, 0, question.name, question.record_type.0)
        });
        let asked = connection.ask(queries, key, |number: usize, message: &[u8]| {
            let question = &part[number];
            // An answer that cannot be read proves nothing either.
            if !question.is_proven(message).unwrap_or(false) {
                unproven.insert(question.place);
            }
            Ok(true)
        });
        asked.await?;
    }
    Ok(unproven)
}

impl Question<'_> {
    /// Returns whether a response shows exactly the expected data.
    ///
    /// A wildcard may answer for a deleted name; then the next listing decides.
    fn is_proven(&self, message: &[u8]) -> Result<bool, WireError> {
        let mut reader = MessageReader::new(message);
        let header = reader.header()?;
        // NXDOMAIN proves a deletion as well.
        let is_answer = header.is_response() && matches!(header.rcode(), 0 | 3);
        if !is_answer {
            return Ok(false);
        }
        for _ in 0..header.counts[0] {
            reader.question()?;
        }
        let mut found = BTreeSet::new();
        for _ in 0..header.counts[1] {
            let record = reader.record()?;
            let is_asked = record.name == *self.name
                && record.record_type == self.record_type
                && record.class == CLASS_IN;
            if is_asked {
                found.insert(decode(message, &record)?);
            }
        }
        Ok(found == *self.expected)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_questions_are_left_to_a_transfer() {
        for (questions, records, expected) in [
            (1, 0, true),
            (MAX_PIPELINED, 0, true),
            (MAX_PIPELINED + 1, 0, false),
            (1_000, 20_000, true),
            (20_000, 20_000, false),
        ] {
            let is_cheaper = is_cheaper_than_transfer(questions, records);
            assert_eq!(is_cheaper, expected, "{questions} of {records}");
        }
    }
}
