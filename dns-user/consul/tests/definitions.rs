//! Reads sets of definition files as people publish them, with names and addresses replaced.

use std::{fs, path::Path};

use dns_consul::{catalog::registrations::Instance, config::Config, definition::Definitions};

#[test]
fn published_definitions_are_read() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/definitions");
    let text = br#"{"consul": {"node_name": "here", "advertise_addr": "10.40.0.1"}}"#;
    let (config, _) = Config::of_document("config.json", text)
        .whole()
        .unwrap()
        .unwrap();
    for set in ["mesh", "nomad", "prometheus", "spring", "vault"] {
        let mut files: Vec<(String, Vec<u8>)> = fs::read_dir(folder.join(set))
            .unwrap()
            .map(|entry| entry.unwrap())
            .map(|entry| {
                (
                    entry.file_name().into_string().unwrap(),
                    fs::read(entry.path()).unwrap(),
                )
            })
            .filter(|(name, _)| !name.ends_with(".txt"))
            .collect();
        files.sort();
        let files = files
            .iter()
            .map(|(name, bytes)| (name.as_str(), bytes.as_slice()));
        let definitions = Definitions::read(files, &config)
            .whole()
            .unwrap_or_else(|error| panic!("{set}: {error}"));
        assert_eq!(definitions.warnings, [""; 0], "{set}");
        let mut lines: Vec<String> = definitions
            .registrations
            .instances
            .iter()
            .map(|instance| line(instance))
            .collect();
        lines.sort();
        lines.extend(
            definitions
                .ignored
                .iter()
                .map(|line| format!("ignored: {line}")),
        );
        let expected = fs::read_to_string(folder.join(set).join("expected.txt")).unwrap();
        assert_eq!(lines, expected.lines().collect::<Vec<_>>(), "{set}");
    }
}

fn line(instance: &Instance) -> String {
    let Instance {
        node,
        service,
        id,
        address,
        port,
        tags,
        checks,
        ..
    } = instance;
    let address = if address.is_empty() { "-" } else { address };
    let status = checks
        .iter()
        .map(|check| check.status)
        .max()
        .unwrap_or_default();
    let status = format!("{status:?}").to_lowercase();
    format!(
        "{node} {service} {id} {address} {port} [{}] {status}",
        tags.join(" ")
    )
}
