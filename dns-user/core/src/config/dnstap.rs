//! `dnstap`: the log of queries and replies in the format dnstap.

use std::{fmt, net::SocketAddr, path::PathBuf};

use super::{ConfigError, reader::Reader};

/// `dnstap`: the output and its content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DnstapConfig {
    /// `socket`, `tcp` or `file`.
    pub output: DnstapOutput,
    /// `identity`: name of this server; `None`: the machine's host name.
    pub identity: Option<String>,
    /// `version`: version of this server; `None`: its name and version.
    pub version: Option<String>,
    /// `messages`: types of messages.
    pub messages: DnstapMessages,
    /// `sample`: one query in this many.
    pub sample: u32,
    /// `interface_sample`: one query answered at an interface in this many; 0: none.
    pub interface_sample: u32,
}

/// The output of dnstap.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DnstapOutput {
    /// Unix socket of a reader.
    Socket(PathBuf),
    /// Address of a reader.
    Tcp(SocketAddr),
    /// File, begun at each start.
    File(PathBuf),
}

impl fmt::Display for DnstapOutput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Socket(path) | Self::File(path) => path.display().fmt(f),
            Self::Tcp(address) => address.fmt(f),
        }
    }
}

/// Types of dnstap messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DnstapMessages {
    /// Log queries as clients sent them.
    pub client_query: bool,
    /// Log replies as clients receive them.
    pub client_response: bool,
    /// Log queries as recursors receive them.
    pub forwarder_query: bool,
    /// Log replies as recursors sent them.
    pub forwarder_response: bool,
}

/// Reads `dnstap`; `None` if it is absent.
pub(super) fn dnstap(root: &Reader<'_>) -> Result<Option<DnstapConfig>, ConfigError> {
    let object = root.object("dnstap")?;
    let text = |name| Ok::<_, ConfigError>(object.text(name)?.filter(|text| !text.is_empty()));
    let (socket, file, tcp) = (text("socket")?, text("file")?, text("tcp")?);
    let (identity, version) = (text("identity")?.map(str::to_owned), text("version")?.map(str::to_owned));
    let messages = messages(&object)?;
    let sample = object.number("sample", 1, 1_000_000)?.unwrap_or(1) as u32;
    let interface_sample = object.number("interface_sample", 0, 1_000_000)?.unwrap_or(100) as u32;
    let output = match (socket, file, tcp) {
        (None, None, None) if object.entries().next().is_none() => return Ok(None),
        (Some(path), None, None) => DnstapOutput::Socket(absolute(&object, "socket", path)?),
        (None, Some(path), None) => DnstapOutput::File(absolute(&object, "file", path)?),
        (None, None, Some(address)) => DnstapOutput::Tcp(address.parse().map_err(|_| {
            object.error(
                "tcp",
                &format!("{address:?} is not an address with a port, such as \"10.0.0.5:6000\""),
            )
        })?),
        (None, None, None) => {
            return Err(object.error("socket", "is missing; dnstap needs one of socket, file and tcp"));
        }
        _ => return Err(object.error("socket", "more than one of socket, file and tcp is set; choose one")),
    };
    Ok(Some(DnstapConfig { output, identity, version, messages, sample, interface_sample }))
}

/// Reads the types of messages; absent: all.
fn messages(object: &Reader<'_>) -> Result<DnstapMessages, ConfigError> {
    let Some(listed) = object.texts("messages")? else {
        return Ok(DnstapMessages {
            client_query: true,
            client_response: true,
            forwarder_query: true,
            forwarder_response: true,
        });
    };
    let mut messages = DnstapMessages {
        client_query: false,
        client_response: false,
        forwarder_query: false,
        forwarder_response: false,
    };
    for name in listed {
        *match name {
            "client_query" => &mut messages.client_query,
            "client_response" => &mut messages.client_response,
            "forwarder_query" => &mut messages.forwarder_query,
            "forwarder_response" => &mut messages.forwarder_response,
            _ => {
                let problem = format!(
                    "{name:?} is unknown; expected client_query, client_response, forwarder_query or \
                     forwarder_response"
                );
                return Err(object.error("messages", &problem));
            }
        } = true;
    }
    Ok(messages)
}

fn absolute(object: &Reader<'_>, name: &str, path: &str) -> Result<PathBuf, ConfigError> {
    let path = PathBuf::from(path);
    if path.is_absolute() { Ok(path) } else { Err(object.error(name, "is not an absolute path")) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    fn read(object: &str) -> Result<Option<DnstapConfig>, String> {
        let text = format!(r#"{{"port": 53, "address": "127.0.0.1", "dnstap": {object}}}"#);
        let loaded = Config::parse("config.json", text.as_bytes()).map_err(|error| error.to_string())?;
        Ok(loaded.config.dnstap)
    }

    #[test]
    fn outputs_exclude_each_other() {
        assert_eq!(read("{}"), Ok(None));
        let socket = read(r#"{"socket": "/run/tap.sock"}"#).unwrap().unwrap();
        assert_eq!(socket.output, DnstapOutput::Socket("/run/tap.sock".into()));
        assert_eq!((socket.sample, socket.interface_sample), (1, 100));
        assert!(socket.messages.client_query && socket.messages.forwarder_response);
        let tcp = read(r#"{"tcp": "[::1]:6000", "messages": ["client_response"]}"#).unwrap().unwrap();
        assert_eq!(tcp.output, DnstapOutput::Tcp("[::1]:6000".parse().unwrap()));
        assert!(tcp.messages.client_response && !tcp.messages.client_query);
        for (object, expected) in [
            (r#"{"sample": 5}"#, "dnstap.socket: is missing"),
            (r#"{"socket": "/a", "file": "/b"}"#, "dnstap.socket: more than one"),
            (r#"{"file": "b"}"#, "dnstap.file: is not an absolute path"),
            (r#"{"tcp": "host:6000"}"#, "dnstap.tcp: \"host:6000\" is not an address"),
            (
                r#"{"tcp": "1.2.3.4:5", "messages": ["auth_query"]}"#,
                "dnstap.messages: \"auth_query\" is unknown",
            ),
            (r#"{"tcp": "1.2.3.4:5", "sample": 0}"#, "dnstap.sample: is 0"),
        ] {
            let error = read(object).unwrap_err();
            assert!(error.starts_with(&format!("config.json: {expected}")), "{object}: {error}");
        }
    }
}
