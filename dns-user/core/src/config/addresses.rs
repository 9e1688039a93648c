//! Addresses files: additional addresses to listen on.

use std::net::SocketAddr;

use super::{
    ConfigError, ParsedFiles,
    reader::{Json, Reader},
};

/// Parses addresses files given by name and content; returns each address of the valid ones once.
pub fn parse_addresses<'a>(
    files: impl IntoIterator<Item = (&'a str, &'a [u8])>,
) -> ParsedFiles<Vec<SocketAddr>> {
    let (mut valid, mut errors) = (Vec::new(), Vec::new());
    for (file, bytes) in files {
        match parse_file(file, bytes) {
            Ok(addresses) => {
                for address in addresses {
                    if !valid.contains(&address) {
                        valid.push(address);
                    }
                }
            }
            Err(more) => errors.extend(more),
        }
    }
    ParsedFiles { valid, errors }
}

/// Parses one file and returns every error, not just the first.
fn parse_file(file: &str, bytes: &[u8]) -> Result<Vec<SocketAddr>, Vec<ConfigError>> {
    let error = |problem: String| vec![ConfigError::of_file(file, problem)];
    let json = Json::parse(bytes).map_err(|reason| error(format!("is not JSON: {reason}")))?;
    let list = match json {
        Json::List(_) | Json::Null => json,
        other => {
            let kind = other.kind();
            return Err(error(format!(
                "is {kind}; expected a list of {{\"address\": IP, \"port\": number}}"
            )));
        }
    };
    // Read through the parent, so that errors name `addresses[3].port`.
    let document = Json::Object(vec![("addresses".to_owned(), list)]);
    let document = Reader::document(file, &document).map_err(|error| vec![error])?;
    document.parse_objects("addresses", |entry| {
        let missing = |name| entry.error(name, "is missing");
        let address = entry.address("address").and_then(|found| found.ok_or_else(|| missing("address")));
        let port = entry.port("port").and_then(|found| found.ok_or_else(|| missing("port")));
        match (address, port) {
            (Ok(address), Ok(port)) => Ok(SocketAddr::new(address, port)),
            (address, port) => Err([address.err(), port.err()].into_iter().flatten().collect()),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Vec<SocketAddr>, String> {
        parse_addresses([("a.json", text.as_bytes())]).whole().map_err(|errors| errors.to_string())
    }

    #[test]
    fn addresses_are_read() {
        let text = r#"[{"address": "127.0.0.2", "port": 53}, {"Address": "::1", "PORT": 54}]"#;
        assert_eq!(parse(text), Ok(vec!["127.0.0.2:53".parse().unwrap(), "[::1]:54".parse().unwrap()]));
        assert_eq!(parse("[]"), Ok(vec![]));
        for (text, expected) in [
            (r#"[{"address": "127.0.0.1"}]"#, "addresses[0].port: is missing"),
            (r#"[{"address": "127.0.0.1", "port": 0}]"#, "addresses[0].port: is 0"),
            (
                r#"[{"address": "::1", "port": 53}, {"address": "x", "port": 53}]"#,
                "addresses[1].address: \"x\" is not an IP address",
            ),
            (r#"[{"port": 53}]"#, "addresses[0].address: is missing"),
            ("[53]", "addresses[0]: is 53; expected an object"),
            (r#"{"address": "127.0.0.1", "port": 53}"#, "is an object"),
            ("", "is not JSON"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.starts_with(&format!("a.json: {expected}")), "{text}: {error}");
        }
    }

    #[test]
    fn every_wrong_entry_is_reported() {
        let files = [
            ("a.json", &br#"[{"address": "x"}, {"address": "::1", "port": 53}, 7]"#[..]),
            ("b.json", br#"[{"address": "::1", "port": 53}, {"address": "::1", "port": 53}]"#),
            ("c.json", b"{"),
        ];
        let ParsedFiles { valid, errors } = parse_addresses(files);
        assert_eq!(valid, ["[::1]:53".parse().unwrap()]);
        let errors: Vec<String> = errors.iter().map(ToString::to_string).collect();
        let expected = [
            "a.json: addresses[0].address: \"x\" is not an IP address",
            "a.json: addresses[0].port: is missing",
            "a.json: addresses[2]: is 7; expected an object",
            "c.json: is not JSON: ",
        ];
        assert_eq!(errors.len(), expected.len(), "{errors:?}");
        for (error, expected) in errors.iter().zip(expected) {
            assert!(error.starts_with(expected), "{error}");
        }
    }
}
