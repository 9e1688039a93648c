//! Tests of the benches, in one program: each would link the same libraries.

mod agreement;
mod figures;
mod generator;
mod program;
mod reference;
mod yardsticks;
