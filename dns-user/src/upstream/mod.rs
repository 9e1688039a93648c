//! Everything that is not answered from the catalog: recursors, cache, handlers.
