//! Addresses files: additional addresses to listen on.

use std::net::SocketAddr;

use super::{ConfigError, json::Json, reader::Reader};

/// Parses the content of an addresses file; `file` is its path for error messages.
pub fn parse_addresses(file: &str, bytes: &[u8]) -> Result<Vec<SocketAddr>, ConfigError> {
    let problem = |problem: String| ConfigError { file: file.to_owned(), problem };
    let json = Json::parse(bytes).map_err(|error| problem(format!("is not JSON: {error}")))?;
    let list = match &json {
        Json::List(list) => list.as_slice(),
        Json::Null => &[],
        other => {
            return Err(problem(format!(
                "is {}; allowed is a list of {{\"address\": IP, \"port\": number}}",
                other.kind()
            )));
        }
    };
    let mut addresses = Vec::new();
    for (index, item) in list.iter().enumerate() {
        let entry = Reader::document(file, item)
            .map_err(|_| problem(format!("[{index}] is {}; allowed is an object", item.kind())))?;
        let address =
            entry.address("address")?.ok_or_else(|| problem(format!("[{index}]: address is missing")))?;
        let port = entry.port("port")?.ok_or_else(|| problem(format!("[{index}]: port is missing")))?;
        addresses.push(SocketAddr::new(address, port));
    }
    Ok(addresses)
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
        for text in [
            &br#"[{"address": "127.0.0.1"}]"#[..],
            br#"[{"address": "127.0.0.1", "port": 0}]"#,
            br#"[{"address": "x", "port": 53}]"#,
            br#"[{"port": 53}]"#,
            br#"{"address": "127.0.0.1", "port": 53}"#,
            b"",
        ] {
            let error = parse_addresses("a.json", text).unwrap_err();
            assert_eq!(error.file, "a.json");
        }
    }
}
