//! TLS is configured in one module, so that no server resumes sessions of clients whose certificates have ended, and
//! no client accepts other versions or algorithms than the rest.

#![expect(
    clippy::unwrap_used,
    reason = "a test that cannot read its input has failed"
)]

use std::{fs, path::Path};

use crate::sources;

/// The module with the constructors of all configurations.
const ONLY: &str = "dns-user/kit/src/tls/configuration.rs";

/// Text that only that module may contain, without spaces.
const BUILDERS: [&str; 5] = [
    "ServerConfig::builder",
    "ClientConfig::builder",
    ".with_safe_default_protocol_versions(",
    ".with_protocol_versions(",
    ".with_custom_certificate_verifier(",
];

/// Returns the code of a file without white space, up to its tests.
fn code(path: &Path) -> String {
    let text = fs::read_to_string(path).unwrap();
    let (code, _) = text.split_once("#[cfg(test)]").unwrap_or((&text, ""));
    code.chars()
        .filter(|character| !character.is_whitespace())
        .collect()
}

fn is_test(path: &str) -> bool {
    sources::is_test(path) || path.contains("/benches/")
}

#[test]
fn tls_is_configured_in_one_module() {
    let root = sources::root();
    let mut found = Vec::new();
    let mut only = 0;
    for folder in ["dns-user", "dns-common", "xtask/src"] {
        for file in sources::rust_files(&root.join(folder)) {
            let name = file.strip_prefix(root).unwrap().display().to_string();
            if is_test(&name) {
                continue;
            }
            let code = code(&file);
            let builders = BUILDERS.iter().filter(|builder| code.contains(**builder));
            if name == ONLY {
                only += builders.count();
            } else {
                found.extend(builders.map(|builder| format!("{name}: {builder}")));
            }
        }
    }
    assert!(
        found.is_empty(),
        "use dns_kit::tls::server_config or client_config:\n{}",
        found.join("\n")
    );
    assert!(only > 3, "{ONLY} has no constructors");
}
