//! Table of all keys of the object `"consul"`, from which the reference is generated. A test
//! compares the table with the keys that the parser reads.

use dns_core::config::keys::{Key, Origin};

/// Declares keys: path within the object, origin, form, default, example, meaning.
macro_rules! keys {
    ($($path:literal $origin:ident $form:literal = $default:literal, $example:literal: $about:literal;)*) => {
        &[$(Key {
            path: concat!("consul.", $path), form: $form, default: $default, example: $example, about: $about,
            origin: Origin::$origin, starter: "",
        }),*]
    };
}

/// All keys. [`Origin::BoshDns`] marks Consul's own keys, [`Origin::Ours`] extensions.
pub const KEYS: &[Key] = keys! {
    "domain" BoshDns "domain name" = "\"consul.\"", "\"consul.example.\"": "Domain of the names";
    "alt_domain" BoshDns "domain name; empty: none" = "\"\"", "\"cf.internal.\"": "Second domain with the same names";
    "datacenter" BoshDns "letters, digits, - and _" = "\"dc1\"", "\"z1\"":
        "Local datacenter; default with sources.http: the agent's";
    "node_name" BoshDns "text" = "\"\"", "\"vm-1\"": "Node that this server runs on, for services without a node and for near";
    "advertise_addr" BoshDns "IP address" = "", "\"10.0.0.1\"": "Address of that node";
    "translate_wan_addrs" BoshDns "boolean" = "false", "true": "Return WAN addresses for nodes of other datacenters";
    "recursors" BoshDns "list of IP or IP:port" = "[]", "[\"10.0.0.2\"]":
        "Servers that resolve host names registered as addresses; empty: the server's recursors";
    "token_file" BoshDns "path; empty: none" = "", "\"/etc/consul.d/dns-token\"": "File with the token for Consul's HTTP API";
    "empty_non_terminals" Ours "boolean" = "false", "true":
        "NOERROR without data, instead of NXDOMAIN, for empty non-terminals (RFC 8020)";
    "acl.nodes" Ours "list of names" = "", "[\"*\"]": "Nodes that may be looked up; none if acl is present without this list";
    "acl.services" Ours "list of names" = "", "[\"web\"]":
        "Services that may be looked up; none if acl is present without this list";
    "dns_config.allow_stale" BoshDns "boolean" = "true", "false": "Let any of Consul's servers answer the live source";
    "dns_config.max_stale" BoshDns "duration" = "\"87600h\"", "\"10m\"": "How long the last data of an unavailable live source is served";
    "dns_config.use_cache" BoshDns "boolean" = "", "true": "Accepted, without effect";
    "dns_config.cache_max_age" BoshDns "duration" = "", "\"10s\"": "Accepted, without effect";
    "dns_config.node_ttl" BoshDns "duration" = "\"0s\"", "\"5s\"": "TTL of node records";
    "dns_config.service_ttl" BoshDns "object of durations by service name, or prefix with *" = "{}", "{\"*\": \"5s\"}":
        "TTL of service records";
    "dns_config.only_passing" BoshDns "boolean" = "false", "true": "Also exclude instances in state warning";
    "dns_config.enable_truncate" BoshDns "boolean" = "false", "true": "Set TC if answers were omitted";
    "dns_config.udp_answer_limit" BoshDns "number, 0 to 1048576" = "3", "8": "Maximum number of records in UDP replies to clients without EDNS";
    "dns_config.a_record_limit" BoshDns "number, 0 to 1048576; 0: none" = "0", "4": "Maximum number of addresses in an answer";
    "dns_config.enable_additional_node_meta_txt" BoshDns "boolean" = "true", "false":
        "Metadata of nodes as TXT records in the additional section";
    "dns_config.disable_compression" BoshDns "boolean" = "false", "true": "Do not compress names";
    "dns_config.recursor_timeout" BoshDns "duration above 0" = "\"2s\"", "\"500ms\"": "Time limit of one query to a recursor";
    "dns_config.recursor_strategy" BoshDns "sequential or random" = "\"sequential\"", "\"random\"": "Order of the recursors";
    "dns_config.soa.refresh" BoshDns "seconds" = "3600", "7200": "Refresh of the SOA record";
    "dns_config.soa.retry" BoshDns "seconds" = "600", "300": "Retry of the SOA record";
    "dns_config.soa.expire" BoshDns "seconds" = "86400", "43200": "Expire of the SOA record";
    "dns_config.soa.min_ttl" BoshDns "seconds" = "0", "10": "Minimum and TTL of the SOA record";
    "sources.files" Ours "list of paths with * ? [a-z]" = "[]", "[\"/etc/consul.d/*.hcl\"]": "Definition files, reloaded when they change";
    "sources.http.addresses" Ours "list of http://host:port or https://host:port" = "[\"http://127.0.0.1:8500\"]",
        "[\"https://consul.example:8501\"]": "Consul agents, tried in order until one answers";
    "sources.http.ca_file" Ours "path" = "", "\"/etc/consul.d/ca.pem\"": "CAs to trust instead of the system's";
    "sources.http.cert_file" Ours "path" = "", "\"/etc/consul.d/client.pem\"": "Client certificate; needs key_file";
    "sources.http.key_file" Ours "path" = "", "\"/etc/consul.d/client.key\"": "Key of cert_file";
    "sources.http.tls_server_name" Ours "host name" = "", "\"server.dc1.consul\"":
        "Name that the agent's certificate must contain; default: the host of its address";
    "sources.http.wait" Ours "duration up to 10m" = "\"5m\"", "\"1m\"": "Maximum duration of a blocking query";
    "sources.http.rate" Ours "requests per second, 1 to 100000" = "500", "50": "Maximum request rate to Consul";
    "sources.http.stale_after" Ours "duration above 0" = "\"1m\"", "\"5m\"":
        "How long requests must fail before a part of the catalog is reported as stale";
    "sources.http.expire_after" Ours "duration above 0" = "", "\"1h\"":
        "How long requests for nodes or services must fail before names get SERVFAIL; default: never";
    "sources.http.max_connections" Ours "number, 8 to 10000" = "150", "20": "Maximum number of TCP connections to one agent";
};

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use dns_core::config::{json::Json, reader::Reader};

    use super::*;
    use crate::config::Config;

    #[test]
    fn table_equals_parsed_keys() {
        let text = br#"{"consul": {"acl": {}, "sources": {"http": {}}}}"#;
        let json = Json::parse(text).expect("JSON");
        let root = Reader::document("config.json", &json).expect("an object");
        Config::read(&root.object("consul").expect("an object")).expect("a configuration");
        let asked: BTreeSet<String> = root.leaves_asked();
        let listed: BTreeSet<String> = KEYS.iter().map(|key| key.path.to_owned()).collect();
        assert_eq!(asked, listed);
    }

    #[test]
    fn examples_are_accepted() {
        for key in KEYS.iter().filter(|key| !key.path.ends_with("_file")) {
            let mut text = key.example.to_owned();
            for member in key.path.rsplit('.') {
                text = format!("{{{member:?}: {text}}}");
            }
            let read = Config::of_document("config.json", text.as_bytes());
            let (_, warnings) = read.whole().unwrap_or_else(|error| panic!("{error}")).expect("an object");
            assert!(warnings.is_empty(), "{}: {warnings:?}", key.path);
        }
    }
}
