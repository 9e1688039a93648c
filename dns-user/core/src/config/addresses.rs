//! Addresses files: additional addresses to listen on.

use std::net::SocketAddr;

use super::{ConfigError, json::Json, reader::Reader};

/// Parses the content of an addresses file; `file` is its path for error messages.
pub fn parse_addresses(file: &str, bytes: &[u8]) -> Result<Vec<SocketAddr>, ConfigError> {
    let json =
        Json::parse(bytes).map_err(|error| ConfigError::of_file(file, format!("is not JSON: {error}")))?;
    let list = match json {
        Json::List(_) | Json::Null => json,
        other => {
            return Err(ConfigError::of_file(
                file,
                format!("is {}; expected a list of {{\"address\": IP, \"port\": number}}", other.kind()),
            ));
        }
    };
    // Read through the parent, so that errors name `addresses[3].port`.
    let document = Json::Object(vec![("addresses".to_owned(), list)]);
    let entries = Reader::document(file, &document)?.objects("addresses")?;
    let parse = |entry: &Reader<'_>| {
        let missing = |name| entry.error(name, "is missing");
        let address = entry.address("address")?.ok_or_else(|| missing("address"))?;
        let port = entry.port("port")?.ok_or_else(|| missing("port"))?;
        Ok(SocketAddr::new(address, port))
    };
    entries.iter().map(parse).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read() {
        let text = br#"[{"address": "127.0.0.2", "port": 53}, {"Address": "::1", "PORT": 54}]"#;
        assert_eq!(
            parse_addresses("a.json", text).unwrap(),
            ["127.0.0.2:53".parse().unwrap(), "[::1]:54".parse().unwrap()]
        );
        assert_eq!(parse_addresses("a.json", b"[]").unwrap(), []);
        for (text, expected) in [
            (r#"[{"address": "127.0.0.1"}]"#, "addresses[0].port: is missing"),
            (r#"[{"address": "127.0.0.1", "port": 0}]"#, "addresses[0].port: is 0"),
            (
                r#"[{"address": "::1", "port": 53}, {"address": "x", "port": 53}]"#,
                "addresses[1].address: \"x\" is not an IP address",
            ),
            (r#"[{"port": 53}]"#, "addresses[0].address: is missing"),
            ("[53]", "addresses: is 53"),
            (r#"{"address": "127.0.0.1", "port": 53}"#, "is an object"),
            ("", "is not JSON"),
        ] {
            let error = parse_addresses("a.json", text.as_bytes()).unwrap_err().to_string();
            assert!(error.starts_with(&format!("a.json: {expected}")), "{text}: {error}");
        }
    }
}
