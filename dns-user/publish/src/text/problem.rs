//! Problems of documents, with their remedies.

use std::{cell::RefCell, fmt, sync::Arc};

use serde::{Deserialize, Serialize};

/// A problem in a document. `Display` writes `file:line: path: reason; remedy`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Problem {
    /// File name, or `body` for the body of a request.
    pub file: Arc<str>,
    /// Line in the file, from 1.
    pub line: u64,
    /// Member within the document, such as `spec.endpoints[2].dnsName`; empty for the whole
    /// document.
    pub path: String,
    /// Cause of the problem, in lower case.
    pub reason: String,
    /// Remedy, as an instruction to the operator.
    pub remedy: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { file, line, path, reason, remedy } = self;
        write!(f, "{file}:{line}: ")?;
        if !path.is_empty() {
            write!(f, "{path}: ")?;
        }
        write!(f, "{reason}; {remedy}")
    }
}

impl std::error::Error for Problem {}

/// Collects the problems of one file or request.
#[derive(Debug)]
pub struct Problems {
    file: Arc<str>,
    found: RefCell<Vec<Problem>>,
}

impl Problems {
    /// Creates an empty list for a file.
    pub fn of(file: impl Into<Arc<str>>) -> Self {
        Self { file: file.into(), found: RefCell::default() }
    }

    /// Adds a problem at a position of the file.
    pub fn add(&self, line: u64, path: &str, reason: impl Into<String>, remedy: impl Into<String>) {
        self.found.borrow_mut().push(Problem {
            file: self.file.clone(),
            line,
            path: path.to_owned(),
            reason: reason.into(),
            remedy: remedy.into(),
        });
    }

    /// Returns the number of problems so far, so that a caller can detect whether a step found any.
    pub fn count(&self) -> usize {
        self.found.borrow().len()
    }

    /// Returns all problems in the order of discovery.
    pub fn into_vec(self) -> Vec<Problem> {
        self.found.into_inner()
    }
}
