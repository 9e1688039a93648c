//! YAML and JSON read into trees whose nodes know their lines, and readers that collect every
//! problem instead of stopping at the first. Pure.
//!
//! One reader serves files and API bodies, so a mistake is reported in the same words by both:
//! where it is, what is wrong, and how to put it right.

mod node;
mod problem;
mod reader;

pub use node::{Document, Node, Value, documents, parse};
pub use problem::{Problem, Problems};
pub use reader::{Fields, Reader, remedy_for_unknown};

#[cfg(test)]
mod tests;
