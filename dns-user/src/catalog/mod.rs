//! The catalog: records and aliases as one immutable snapshot, with the indexes
//! that make a look-up cost what its answer costs. Pure.
