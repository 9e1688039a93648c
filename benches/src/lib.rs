//! What the benches and the demo share.
