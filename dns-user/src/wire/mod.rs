//! DNS messages in and out: parsing, encoding, truncation, EDNS. Pure.
