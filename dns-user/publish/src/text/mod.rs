//! Parses YAML and JSON to trees whose nodes know their lines, with readers that collect all
//! problems instead of stopping at the first. Pure.
//!
//! Files and API bodies share one reader, so errors have the same wording: position, cause and
//! remedy.

mod node;
mod problem;
mod reader;

pub use node::{Document, Member, Node, Value, documents, parse};
pub use problem::{Problem, Problems};
pub use reader::{Fields, Reader, remedy_for_unknown};

#[cfg(test)]
mod tests;
