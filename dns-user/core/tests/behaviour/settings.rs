//! Settings reach their fields, at their limits and no further.

use std::{net::SocketAddr, time::Duration};

use dns_core::config::{
    ApiConfig, CacheConfig, Compat, Config, ControlConfig, CookiesConfig, DnstapConfig,
    DnstapMessages, DnstapOutput, HealthConfig, HookMode, Identity, Loaded, LogLevel,
    LoggingConfig, MetricsConfig, OnStop, RecursionConfig, RecursorSelection, SpecialNames,
    TlsFiles, XdpConfig, one_line,
    reader::{Json, ObjectReader},
};

use super::name;

fn parse(text: &str) -> Result<Loaded, String> {
    Config::parse("c.json", text.as_bytes()).map_err(|error| error.to_string())
}

/// Parses settings besides the required ones.
fn with(members: &str) -> Result<Config, String> {
    let comma = if members.is_empty() { "" } else { ", " };
    let text = format!(r#"{{"port": 53, "address": "127.0.0.2"{comma}{members}}}"#);
    Ok(parse(&text)?.config)
}

/// Returns the settings without any.
fn defaults() -> Config {
    Config {
        listen: "127.0.0.2:53".parse().unwrap(),
        timeout: Duration::from_secs(5),
        request_timeout: Duration::from_secs(5),
        recursion: RecursionConfig {
            disabled: false,
            recursors: Vec::new(),
            excluded: Vec::new(),
            selection: RecursorSelection::Smart,
            timeout: Duration::from_secs(2),
            max_retries: 0,
            client_subnet: false,
            randomise_case: false,
            special_names: SpecialNames::Forward,
        },
        records_file: None,
        alias_files_glob: String::new(),
        handlers_files_glob: String::new(),
        addresses_files_glob: String::new(),
        upcheck_domains: Vec::new(),
        internal_upcheck: None,
        jobs_dir: None,
        logging: LoggingConfig {
            level: LogLevel::Info,
            tags: Vec::new(),
        },
        control: Some(ControlConfig {
            socket: "/run/bosh-dns-xdp/control.sock".into(),
            user: None,
            group: None,
            is_default: true,
        }),
        api: None,
        health: HealthConfig {
            enabled: false,
            port: 0,
            tls: None,
            check_interval: Duration::from_secs(20),
            max_tracked_queries: 2000,
            synchronous_check_timeout: Duration::from_secs(1),
            tracked_query_ttl: None,
        },
        metrics: MetricsConfig {
            enabled: false,
            listen: "127.0.0.1:53088".parse().unwrap(),
            top_names: 0,
        },
        cache: CacheConfig {
            enabled: false,
            max_entries: 10_000,
            max_bytes: 67_108_864,
            serve_stale: None,
        },
        cookies: CookiesConfig {
            enabled: false,
            secrets: Vec::new(),
        },
        dnstap: None,
        configure_systemd_resolved: false,
        max_reply: None,
        identity: Identity::Edns,
        compat: Compat::default(),
        xdp: XdpConfig {
            enabled: true,
            vlans: Vec::new(),
            respect_filters: Vec::new(),
            shed: true,
            interfaces: None,
            mode: HookMode::Auto,
            max_names: 65_536,
            cache_entries: 8192,
            cache_bytes: 4_194_304,
            other_types: true,
            lease: Duration::from_secs(10),
            bpffs: "/run/bosh-dns-xdp-pins".into(),
            on_stop: OnStop::Detach,
            user: None,
            attach_socket: None,
            attach_user: None,
        },
    }
}

fn tls(letter: char) -> TlsFiles {
    TlsFiles {
        certificate: format!("/{letter}/crt").into(),
        private_key: format!("/{letter}/key").into(),
        ca: format!("/{letter}/ca").into(),
    }
}

#[test]
fn omitted_settings_have_defaults() {
    assert_eq!(with("").unwrap(), defaults());
    // Empty texts and durations of 0 are as good as none.
    let empty = r#""records_file": "", "alias_files_glob": "", "jobs_dir": "", "request_timeout": "0s",
        "recursor_timeout": "0s", "control": {"user": "", "group": ""}, "cache": {"serve_stale": "0s"},
        "health": {"tracked_query_ttl": "0s", "port": "x"}, "metrics": {"port": 99, "top_names": 5},
        "xdp": {"user": "", "attach_user": "", "attach_socket": "", "bpffs": ""}, "dnstap": {}"#;
    assert_eq!(with(empty).unwrap(), defaults());
    let Loaded { config, warnings } = parse(r#"{"port": 53, "api": {"port": 1}}"#).unwrap();
    assert_eq!(config.listen, "0.0.0.0:53".parse().unwrap());
    assert_eq!(
        warnings,
        [
            "c.json: address is missing: listening on every address (0.0.0.0)",
            "c.json: api.certificate_file is missing: the API stays off",
        ]
    );
    assert_eq!(
        parse(r#"{"port": 53, "address": ""}"#)
            .unwrap()
            .config
            .listen,
        config.listen
    );
}

#[test]
fn settings_reach_their_fields() {
    let text = r#"{"address": "[::1]", "port": 1053, "log_level": "warn", "records_file": "/r.json",
        "alias_files_glob": "/a/*.json", "handlers_files_glob": "/h/?.json", "addresses_files_glob": "/d/[ab].json",
        "upcheck_domains": ["up.bosh", "UP.bosh.", "two."], "disable_recursors": true,
        "recursors": ["10.0.0.1", "tls://9.9.9.9#dns.quad9.net"], "excluded_recursors": ["10.0.0.2:54"],
        "recursor_selection": "serial", "recursor_timeout": "300ms", "recursor_max_retries": 7,
        "recursor_client_subnet": true, "recursor_0x20": true, "special_names": "local", "request_timeout": "3s",
        "timeout": "9s", "max_reply": 1400, "identity": "always", "jobs_dir": "/jobs",
        "configure_systemd_resolved": true,
        "internal_upcheck_domain": {"enabled": true, "dns_query": "in.bosh."},
        "logging": {"format": {"timestamp": "rfc3339"}, "tags": [{"name": "x", "log_level": "Debug"},
            {"name": "y", "log_level": "NONE"}]},
        "api": {"port": 53080, "certificate_file": "/a/crt", "private_key_file": "/a/key", "ca_file": "/a/ca",
            "admins": ["ops"]},
        "health": {"enabled": true, "port": 8853, "certificate_file": "/h/crt", "private_key_file": "/h/key",
            "ca_file": "/h/ca", "check_interval": "7s", "max_tracked_queries": 9, "synchronous_check_timeout": "8s",
            "tracked_query_ttl": "1h"},
        "cache": {"enabled": true, "max_entries": 11, "max_bytes": 12, "serve_stale": "13s"},
        "compat": {"any_class": true, "echo_opt": true},
        "control": {"socket": "/s", "user": "u", "group": "g"},
        "metrics": {"enabled": true, "address": "10.0.0.3", "port": 9153, "top_names": 14},
        "cookies": {"enabled": true, "secrets": ["000102030405060708090a0b0c0d0eFF"]},
        "dnstap": {"file": "/t", "identity": "me", "version": "v", "messages": ["client_query", "forwarder_query"],
            "sample": 15, "interface_sample": 16},
        "xdp": {"enabled": false, "mode": "native", "interfaces": ["lo", "e*"], "respect_filters": ["eth0"],
            "vlans": [0, 4095], "shed": false, "max_names": 17, "cache_entries": 18, "cache_bytes": 2097152,
            "other_types": false, "lease": "20s", "bpffs": "/b", "on_stop": "keep", "attach_socket": "/k",
            "attach_user": "au", "user": "xu"}}"#;
    let Loaded { config, warnings } = parse(text).unwrap();
    assert_eq!(warnings, [] as [&str; 0]);
    let base = defaults();
    let expected = Config {
        listen: "[::1]:1053".parse().unwrap(),
        timeout: Duration::from_secs(9),
        request_timeout: Duration::from_secs(3),
        recursion: RecursionConfig {
            disabled: true,
            recursors: vec![
                "10.0.0.1:53".to_owned(),
                "tls://9.9.9.9:853#dns.quad9.net".to_owned(),
            ],
            excluded: vec!["10.0.0.2:54".to_owned()],
            selection: RecursorSelection::Serial,
            timeout: Duration::from_millis(300),
            max_retries: 7,
            client_subnet: true,
            randomise_case: true,
            special_names: SpecialNames::Local,
        },
        records_file: Some("/r.json".into()),
        alias_files_glob: "/a/*.json".to_owned(),
        handlers_files_glob: "/h/?.json".to_owned(),
        addresses_files_glob: "/d/[ab].json".to_owned(),
        upcheck_domains: vec![name("up.bosh"), name("two")],
        internal_upcheck: Some(name("in.bosh")),
        jobs_dir: Some("/jobs".into()),
        logging: LoggingConfig {
            level: LogLevel::Warn,
            tags: vec![
                ("x".to_owned(), LogLevel::Debug),
                ("y".to_owned(), LogLevel::None),
            ],
        },
        control: Some(ControlConfig {
            socket: "/s".into(),
            user: Some("u".to_owned()),
            group: Some("g".to_owned()),
            is_default: false,
        }),
        api: Some(ApiConfig {
            port: 53080,
            tls: tls('a'),
            admins: Some(vec!["ops".to_owned()]),
        }),
        health: HealthConfig {
            enabled: true,
            port: 8853,
            tls: Some(tls('h')),
            check_interval: Duration::from_secs(7),
            max_tracked_queries: 9,
            synchronous_check_timeout: Duration::from_secs(8),
            tracked_query_ttl: Some(Duration::from_secs(3600)),
        },
        metrics: MetricsConfig {
            enabled: true,
            listen: "10.0.0.3:9153".parse().unwrap(),
            top_names: 14,
        },
        cache: CacheConfig {
            enabled: true,
            max_entries: 11,
            max_bytes: 12,
            serve_stale: Some(Duration::from_secs(13)),
        },
        cookies: CookiesConfig {
            enabled: true,
            secrets: vec![[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 255]],
        },
        dnstap: Some(DnstapConfig {
            output: DnstapOutput::File("/t".into()),
            identity: Some("me".to_owned()),
            version: Some("v".to_owned()),
            messages: DnstapMessages {
                client_query: true,
                client_response: false,
                forwarder_query: true,
                forwarder_response: false,
            },
            sample: 15,
            interface_sample: 16,
        }),
        configure_systemd_resolved: true,
        max_reply: Some(1400),
        identity: Identity::Always,
        compat: Compat {
            any_class: true,
            echo_opt: true,
            ..base.compat
        },
        xdp: XdpConfig {
            enabled: false,
            vlans: vec![0, 4095],
            respect_filters: vec!["eth0".to_owned()],
            shed: false,
            interfaces: Some(vec!["lo".to_owned(), "e*".to_owned()]),
            mode: HookMode::Native,
            max_names: 17,
            cache_entries: 18,
            cache_bytes: 2_097_152,
            other_types: false,
            lease: Duration::from_secs(20),
            bpffs: "/b".into(),
            on_stop: OnStop::Keep,
            user: Some("xu".to_owned()),
            attach_socket: Some("/k".into()),
            attach_user: Some("au".to_owned()),
        },
    };
    assert_eq!(config, expected);
    assert_eq!(config.fast_path(), config.xdp);
    let uncached = Config {
        cache: base.cache,
        ..config.clone()
    };
    let expected = XdpConfig {
        cache_entries: 0,
        ..config.xdp
    };
    assert_eq!(uncached.fast_path(), expected);
}

#[test]
fn numbers_have_limits() {
    for (path, min, max) in [
        ("port", 1, 65_535),
        ("max_reply", 512, 65_507),
        ("recursor_max_retries", 0, 1000),
        ("cache.max_entries", 1, 100_000_000),
        ("cache.max_bytes", 1, 1 << 40),
        ("health.max_tracked_queries", 0, 10_000_000),
        ("xdp.max_names", 1, 1 << 24),
        ("xdp.cache_entries", 0, 1 << 20),
        ("xdp.cache_bytes", 1 << 20, 1 << 28),
        ("dnstap.sample", 1, 1_000_000),
        ("dnstap.interface_sample", 0, 1_000_000),
        ("metrics.top_names", 0, 100),
        ("metrics.port", 1, 65_535),
    ] {
        let parsed = |number: i64| {
            let (object, member) = path.split_once('.').unwrap_or(("", path));
            let more = match object {
                "dnstap" => r#""socket": "/s", "#,
                "metrics" => r#""enabled": true, "#,
                _ => "",
            };
            match object {
                "" => with(&format!(r#""{member}": {number}"#)),
                _ => with(&format!(r#""{object}": {{{more}"{member}": {number}}}"#)),
            }
        };
        for number in [min, max] {
            assert!(
                parsed(number).is_ok(),
                "{path} {number}: {:?}",
                parsed(number)
            );
        }
        for number in [min - 1, max + 1] {
            let error = parsed(number).unwrap_err();
            let expected =
                format!("c.json: {path}: is {number}; expected a whole number from {min} to {max}");
            assert_eq!(error, expected);
        }
    }
}

#[test]
fn unusable_settings_are_refused() {
    for (members, expected) in [
        (
            r#""xdp": {"lease": "999ms"}"#,
            "xdp.lease: is shorter than a second",
        ),
        (
            r#""xdp": {"lease": "0s"}"#,
            "xdp.lease: must be longer than 0",
        ),
        (
            r#""xdp": {"interfaces": ["lo", ""]}"#,
            "xdp.interfaces: contains an empty text",
        ),
        (
            r#""xdp": {"respect_filters": ["["]}"#,
            "xdp.respect_filters: \"[\" is not a file pattern",
        ),
        (
            r#""xdp": {"attach_socket": "s"}"#,
            "xdp.attach_socket: is not an absolute path",
        ),
        (
            r#""xdp": {"vlans": [1, 4096]}"#,
            "xdp.vlans: is 4096; expected a list of whole numbers from 0 to 4095",
        ),
        (r#""xdp": {"vlans": 1}"#, "xdp.vlans: is 1; expected a list"),
        (r#""xdp": 1"#, "xdp: is 1; expected an object"),
        (
            r#""control": {"socket": "s"}"#,
            "control.socket: is not an absolute path",
        ),
        (
            r#""cookies": {"secrets": ["00"]}"#,
            "cookies.secrets: contains a text other than 32",
        ),
        (
            r#""cookies": {"secrets": ["+00102030405060708090a0b0c0d0e0f"]}"#,
            "cookies.secrets: contains",
        ),
        (
            r#""cookies": {"secrets": ["000102030405060708090a0b0c0d0e0f00"]}"#,
            "cookies.secrets: contains",
        ),
        (
            r#""recursors": ["x"]"#,
            "recursors: \"x\" is not a recursor",
        ),
        (
            r#""recursors": [1]"#,
            "recursors: is 1; expected a list of texts",
        ),
        (
            r#""upcheck_domains": ["a..b"]"#,
            "upcheck_domains: \"a..b\" is not a domain name",
        ),
        (
            r#""upcheck_domains": ["a"], "internal_upcheck_domain": {"enabled": true, "dns_query": "a..b."}"#,
            "internal_upcheck_domain.dns_query: \"a..b.\" is not a domain name",
        ),
        (
            r#""logging": {"tags": [{"log_level": "INFO"}]}"#,
            "logging.tags[0].name: is missing",
        ),
        (
            r#""logging": {"tags": [{"name": "x"}]}"#,
            "logging.tags[0].log_level: is missing",
        ),
        (
            r#""health": {"enabled": true}"#,
            "health.port: is missing, but health is enabled",
        ),
        (
            r#""health": {"check_interval": "0s"}"#,
            "health.check_interval: must be longer than 0",
        ),
        (
            r#""disable_recursors": 1"#,
            "disable_recursors: is 1; expected true or false",
        ),
        (
            r#""records_file": ["x"]"#,
            "records_file: is a list; expected a text",
        ),
        (
            r#""metrics": {"enabled": true, "address": "x"}"#,
            "metrics.address: \"x\" is not an IP address",
        ),
        (r#""timeout": "5"#, "is not JSON"),
        (
            r#""timeout": "5""#,
            "timeout: \"5\" lacks a unit; expected a duration",
        ),
    ] {
        let error = with(members).unwrap_err();
        assert!(
            error.starts_with(&format!("c.json: {expected}")),
            "{members}: {error}"
        );
    }
    assert_eq!(
        with(r#""xdp": {"lease": "1s"}"#).unwrap().xdp.lease,
        Duration::from_secs(1)
    );
    assert_eq!(with(r#""control": {"socket": ""}"#).unwrap().control, None);
    let metrics = |address: &str| {
        let members = format!(r#""metrics": {{"enabled": true, "address": "{address}"}}"#);
        with(&members).unwrap().metrics.listen.to_string()
    };
    assert_eq!(
        ["", "localhost", "::1"].map(metrics),
        ["127.0.0.1:53088", "127.0.0.1:53088", "[::1]:53088"]
    );
    for timestamp in ["rfc3339", "rfc-3339", "RFC3339", "deprecated"] {
        let members = format!(r#""logging": {{"format": {{"timestamp": "{timestamp}"}}}}"#);
        assert!(with(&members).is_ok(), "{timestamp}");
    }
    assert!(with(r#""logging": {"format": {"timestamp": 3339}}"#).is_err());
}

#[test]
fn api_needs_all_its_files() {
    let files = ["certificate_file", "private_key_file", "ca_file"];
    for missing in ["port", files[0], files[1], files[2]] {
        let mut members = vec![r#""port": 1"#.to_owned()];
        members.extend(files.map(|file| format!(r#""{file}": "/f""#)));
        members.retain(|member| !member.contains(missing));
        let text = format!(
            r#"{{"port": 53, "address": "::1", "api": {{{}}}}}"#,
            members.join(", ")
        );
        let Loaded { config, warnings } = parse(&text).unwrap();
        assert_eq!(config.api, None);
        assert_eq!(
            warnings,
            [format!(
                "c.json: api.{missing} is missing: the API stays off"
            )]
        );
    }
    // Who names a control socket and no API wants none.
    for (members, warnings) in [
        (r#""control": {}"#, 0),
        (r#""control": {}, "api": {}"#, 1),
        (r#""cache": {}"#, 1),
    ] {
        let text = format!(r#"{{"port": 53, "address": "::1", {members}}}"#);
        assert_eq!(parse(&text).unwrap().warnings.len(), warnings, "{members}");
    }
}

#[test]
fn amplification_is_warned_of() {
    let routed: SocketAddr = "10.0.0.1:53".parse().unwrap();
    let near: [SocketAddr; 4] = ["127.0.0.1:53", "169.254.0.2:53", "[::1]:53", "[fe80::1]:53"]
        .map(|text| text.parse().unwrap());
    for (max_reply, listen, is_warned) in [
        (Some(1233), routed, true),
        (Some(1232), routed, false),
        (None, routed, false),
        (Some(4096), "[fd00::1]:53".parse().unwrap(), true),
    ] {
        let config = Config {
            max_reply,
            ..defaults()
        };
        let all = [&near[..], &[listen]].concat();
        let warning = config.long_replies(&all);
        assert_eq!(warning.is_some(), is_warned, "{max_reply:?} {listen}");
        assert!(warning.is_none_or(|text| text.contains(&listen.to_string())));
        assert_eq!(config.long_replies(&near), None);
    }
    assert_eq!(Config::max_reply_at(None, routed), Some(1232));
    assert_eq!(Config::max_reply_at(Some(600), routed), Some(600));
    for near in near {
        assert_eq!(Config::max_reply_at(None, near), None);
        assert_eq!(Config::max_reply_at(Some(600), near), Some(600));
    }
}

#[test]
fn many_errors_are_counted() {
    let errors: Vec<String> = (0..12).map(|number| format!("e{number}")).collect();
    assert_eq!(one_line(&errors[..2]), "e0; e1");
    assert_eq!(one_line(&errors[..10]).matches(';').count(), 9);
    assert!(one_line(&errors[..10]).ends_with("e9"));
    assert!(
        one_line(&errors[..11]).ends_with("e9; and 1 more errors, which bosh-dns-xdp check lists")
    );
    assert!(one_line(&errors).contains("and 2 more errors"));
}

#[test]
fn words_are_those_of_the_settings() {
    for (text, level) in [
        ("debug", LogLevel::Debug),
        ("INFO", LogLevel::Info),
        ("Warn", LogLevel::Warn),
        ("error", LogLevel::Error),
        ("none", LogLevel::None),
    ] {
        assert_eq!(LogLevel::named(text), Some(level));
        assert_eq!(level.name(), text.to_ascii_uppercase());
    }
    assert_eq!(LogLevel::named("loud"), None);
    for (output, shown) in [
        (DnstapOutput::Socket("/s".into()), "/s"),
        (DnstapOutput::File("/f".into()), "/f"),
        (
            DnstapOutput::Tcp("[::1]:6000".parse().unwrap()),
            "[::1]:6000",
        ),
    ] {
        assert_eq!(output.to_string(), shown);
    }
    let json =
        Json::parse(br#"{"a": null, "b": true, "c": 1.5, "d": "x", "e": [], "f": {}}"#).unwrap();
    let Json::Object(members) = &json else {
        panic!("{json:?}");
    };
    let shown: Vec<String> = members.iter().map(|(_, value)| value.to_string()).collect();
    assert_eq!(
        shown,
        ["null", "true", "1.5", "\"x\"", "a list", "an object"]
    );
    let kinds: Vec<&str> = members.iter().map(|(_, value)| value.kind()).collect();
    assert_eq!(
        kinds,
        [
            "null",
            "a boolean",
            "a number",
            "a text",
            "a list",
            "an object"
        ]
    );
    for (length, shown) in [(60, 62), (61, 65)] {
        assert_eq!(Json::Text("x".repeat(length)).to_string().len(), shown);
    }
}

#[test]
fn unread_members_are_unknown() {
    let json =
        Json::parse(br##"{"known": 1, "KNOWN": 2, "# comment": 3, "other": {"x": 1}, "more": 4}"##)
            .unwrap();
    let root = ObjectReader::document("f.json", &json).unwrap();
    assert_eq!(root.number("known", 0, 9).unwrap(), Some(2));
    assert!(root.has("more") && !root.has("less"));
    let inner = root.object("other").unwrap();
    assert_eq!(inner.boolean("y").unwrap(), None);
    assert_eq!(inner.entries().count(), 1);
    assert_eq!(root.unknown(), [] as [&str; 0]);
    assert_eq!(inner.unknown(), ["other.x"]);
    assert_eq!(
        inner.error("x", "is odd").to_string(),
        "f.json: other.x: is odd"
    );
    let leaves: Vec<String> = root.requested_leaves().into_iter().collect();
    assert_eq!(leaves, ["known", "less", "more", "other.y"]);
}
