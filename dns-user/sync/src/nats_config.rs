//! Configuration of nats-server: TLS, and the permissions that a director grants.

use std::{fmt::Write, path::Path};

use crate::{message::agent_subject, tls::TlsFiles};

/// Prefix of the subject of every certificate, in the form that nats-server uses for user names.
const SUBJECT: &str = "C=USA, O=Cloud Foundry, CN=";

/// Common name of the director's certificate, which the publisher uses.
pub const PUBLISHER: &str = "default.director.bosh-internal";

/// Returns the common name of an agent's certificate.
pub fn agent_name(agent: &str) -> String {
    format!("{agent}.agent.bosh-internal")
}

/// Part of a certificate that identifies a client to nats-server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum UsersBy {
    /// The subject, as in a director's certificates. nats-server (2.9 to 2.11) compares it with one
    /// user after the other, under one lock: 10,000 agents take minutes to connect.
    #[default]
    Subject,
    /// A DNS name among the alternative names; the lookup takes constant time.
    DnsName,
}

impl UsersBy {
    /// Returns the user name for a common name.
    fn user(self, common_name: &str) -> String {
        match self {
            Self::Subject => format!("{SUBJECT}{common_name}"),
            Self::DnsName => common_name.to_owned(),
        }
    }
}

/// Returns the configuration for a fleet. `jetstream` is the folder of JetStream's store and the
/// bucket of the blobs; a director's configuration has no JetStream.
pub fn write<'a>(
    listen: &str,
    files: &TlsFiles,
    jetstream: Option<(&Path, &str)>,
    users_by: UsersBy,
    agents: impl Iterator<Item = &'a str>,
) -> String {
    let TlsFiles { ca, certificate, key } = files;
    let [ca, certificate, key] = [ca, certificate, key].map(|path| path.display().to_string());
    let mut text = format!(
        "# Written by bosh-dns-sync nats-config. After a change: nats-server --signal reload\n\
         listen: {listen:?}\n\
         tls {{\n  ca_file: {ca:?}\n  cert_file: {certificate:?}\n  key_file: {key:?}\n  \
         verify_and_map: true\n  timeout: 60\n}}\n"
    );
    if let Some((folder, _)) = jetstream {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "jetstream {{ store_dir: {:?} }}", folder.display().to_string());
    }
    text.push_str("authorization {\n  users: [\n");
    let (mut publish, mut subscribe) = (vec![agent_subject("*")], vec!["director.>".to_owned()]);
    if jetstream.is_some() {
        publish.extend(["$JS.API.>", "$O.>"].map(str::to_owned));
        subscribe.push("_INBOX.bosh-dns-sync-publisher.>".to_owned());
    }
    user(&mut text, &users_by.user(PUBLISHER), &publish, &subscribe);
    for agent in agents {
        let (mut publish, mut subscribe) =
            (vec![format!("director.*.{agent}.*")], vec![agent_subject(agent)]);
        if let Some((_, bucket)) = jetstream {
            // Direct reads only. With a consumer, nats-server would deliver to any subject, and
            // agents could create consumers without limit.
            publish.push(format!("$JS.API.DIRECT.GET.OBJ_{bucket}"));
            publish.push(format!("$JS.API.DIRECT.GET.OBJ_{bucket}.>"));
            subscribe.push(format!("_INBOX.{agent}.>"));
        }
        user(&mut text, &users_by.user(&agent_name(agent)), &publish, &subscribe);
    }
    text.push_str("  ]\n}\n");
    text
}

fn user(text: &mut String, name: &str, publish: &[String], subscribe: &[String]) {
    let _ = write!(
        text,
        "    {{\n      user: {name:?}\n      permissions: {{\n        publish: {publish:?}\n        \
         subscribe: {subscribe:?}\n      }}\n    }}\n"
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn permissions_match_a_director() {
        let files = TlsFiles { ca: "/ca".into(), certificate: "/crt".into(), key: "/key".into() };
        let text = write("0.0.0.0:4222", &files, None, UsersBy::Subject, ["a1"].into_iter());
        assert_eq!(
            text,
            r#"# Written by bosh-dns-sync nats-config. After a change: nats-server --signal reload
listen: "0.0.0.0:4222"
tls {
  ca_file: "/ca"
  cert_file: "/crt"
  key_file: "/key"
  verify_and_map: true
  timeout: 60
}
authorization {
  users: [
    {
      user: "C=USA, O=Cloud Foundry, CN=default.director.bosh-internal"
      permissions: {
        publish: ["agent.*"]
        subscribe: ["director.>"]
      }
    }
    {
      user: "C=USA, O=Cloud Foundry, CN=a1.agent.bosh-internal"
      permissions: {
        publish: ["director.*.a1.*"]
        subscribe: ["agent.a1"]
      }
    }
  ]
}
"#
        );
        let by_name = write("0.0.0.0:4222", &files, None, UsersBy::DnsName, ["a1"].into_iter());
        assert_eq!(by_name, text.replace("C=USA, O=Cloud Foundry, CN=", ""));
        let jetstream = Some((Path::new("/js"), "dns"));
        let with_blobs = write("0.0.0.0:4222", &files, jetstream, UsersBy::Subject, ["a1"].into_iter());
        assert!(with_blobs.contains(r#"subscribe: ["agent.a1", "_INBOX.a1.>"]"#), "{with_blobs}");
        assert!(!with_blobs.contains("CONSUMER"), "{with_blobs}");
    }
}
