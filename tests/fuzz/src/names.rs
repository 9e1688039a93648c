//! Round-trips names through wire format and text.

use dns_core::name::Name;

pub(crate) fn run(bytes: &[u8]) {
    if let Ok((name, length)) = Name::from_wire(bytes) {
        assert_eq!(name.as_wire(), bytes[..length].to_ascii_lowercase());
        assert_eq!(Name::from_text(&name.to_string()), Ok(name));
    }
    let Ok(text) = std::str::from_utf8(bytes) else {
        return;
    };
    if let Ok(name) = Name::from_text(text) {
        assert_eq!(
            Name::from_wire(name.as_wire()),
            Ok((name.clone(), name.as_wire().len()))
        );
        assert_eq!(name.suffixes().count(), name.label_count() + 1);
    }
}
