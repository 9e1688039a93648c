//! Declarations of all metric families: name, type, labels and help. Names contain the unit;
//! counters end in `_total`.
//!
//! The [`families`] serve only to be exposed; `xtask/tests/metrics.rs` fails on a family that no
//! crate exposes.

use super::{Counter, Family, Gauge, Histogram};

/// A declared family, for the metrics reference.
#[derive(Clone, Copy, Debug)]
pub struct Declared {
    /// Full name, including the unit.
    pub name: &'static str,
    /// Type: `Counter`, `Gauge` or `Histogram`.
    pub kind: &'static str,
    /// Label names, in the order of the exposition.
    pub labels: &'static [&'static str],
    /// Help text of the exposition.
    pub help: &'static str,
    /// Values of the labels, and remarks.
    pub note: &'static str,
}

/// Declares families: a constant with the name, for readers of an exposition, and one to expose it.
macro_rules! declare {
    ($(
        $(#[doc = $note:literal])*
        $family:ident: $kind:ident = $name:literal [$($label:literal),*] $help:literal;
    )*) => {
        $(
            #[doc = $help]
            $(#[doc = $note])*
            pub const $family: &str = $name;
        )*

        /// Every family, for the metrics reference.
        pub const DECLARED: &[Declared] = &[$(
            Declared {
                name: $name,
                kind: stringify!($kind),
                labels: &[$($label),*],
                help: $help,
                note: concat!($($note),*),
            }
        ),*];

        /// The families, for exposing them.
        pub mod families {
            use super::{Counter, Family, Gauge, Histogram};
            $(
                #[doc = $help]
                pub const $family: Family<$kind, { <[&str]>::len(&[$($label),*]) }> =
                    Family::new($name, $help, [$($label),*]);
            )*
        }
    };
}

declare! {
    //----------- bosh-dns ---------------------------------------------------
    /// Counts requests on both paths.
    REQUESTS_INTERNAL_TOTAL: Counter = "boshdns_requests_internal_total"
        [] "Requests for names of the fleet.";
    /// Up-check, handler and reverse requests count neither as internal nor as external.
    REQUESTS_EXTERNAL_TOTAL: Counter = "boshdns_requests_external_total"
        [] "Requests that went to recursors.";

    //----------- CoreDNS, for existing dashboards ---------------------------
    COREDNS_REQUESTS_TOTAL: Counter = "coredns_dns_requests_total"
        ["server", "zone", "view", "proto", "family", "type"] "Requests.";
    COREDNS_RESPONSES_TOTAL: Counter = "coredns_dns_responses_total"
        ["server", "zone", "view", "rcode", "plugin"] "Responses.";
    /// Measured on the userspace path only.
    COREDNS_REQUEST_DURATION_SECONDS: Histogram = "coredns_dns_request_duration_seconds"
        ["server", "zone", "view"] "Time from receiving a query to sending its reply.";
    /// Measured on the userspace path only.
    COREDNS_REQUEST_SIZE_BYTES: Histogram = "coredns_dns_request_size_bytes"
        ["server", "zone", "view", "proto"] "Bytes of queries.";
    /// Measured on the userspace path only.
    COREDNS_RESPONSE_SIZE_BYTES: Histogram = "coredns_dns_response_size_bytes"
        ["server", "zone", "view", "proto"] "Bytes of replies.";
    /// Counted on the userspace path only.
    COREDNS_DO_REQUESTS_TOTAL: Counter = "coredns_dns_do_requests_total"
        ["server", "zone", "view"] "Requests with DO set.";
    /// Label `type` is `success` or `denial`.
    COREDNS_CACHE_ENTRIES: Gauge = "coredns_cache_entries"
        ["server", "type", "zones", "view"] "Entries in the cache.";
    /// Label `type` is `success` or `denial`.
    COREDNS_CACHE_HITS_TOTAL: Counter = "coredns_cache_hits_total"
        ["server", "type", "zones", "view"] "Answers from the cache.";
    COREDNS_CACHE_MISSES_TOTAL: Counter = "coredns_cache_misses_total"
        ["server", "zones", "view"] "Queries not answered from the cache.";
    COREDNS_CACHE_REQUESTS_TOTAL: Counter = "coredns_cache_requests_total"
        ["server", "zones", "view"] "Cache lookups.";
    COREDNS_CACHE_SERVED_STALE_TOTAL: Counter = "coredns_cache_served_stale_total"
        ["server", "zones", "view"] "Stale answers served.";
    COREDNS_CACHE_EVICTIONS_TOTAL: Counter = "coredns_cache_evictions_total"
        ["server", "type", "zones", "view"] "Entries evicted for lack of space.";

    //----------- Server -----------------------------------------------------
    BUILD_INFO: Gauge = "bosh_dns_xdp_build_info"
        ["version", "commit"] "Version and commit of this build; always 1.";
    UPTIME_SECONDS: Gauge = "bosh_dns_xdp_uptime_seconds"
        [] "Seconds since startup.";
    /// Label `path` is `fast` or `userspace`.
    REPLIES_TOTAL: Counter = "bosh_dns_xdp_replies_total"
        ["path"] "Replies by path.";
    LOG_LINES_LOST_TOTAL: Counter = "bosh_dns_xdp_log_lines_lost_total"
        [] "Log lines lost because the reader was too slow.";
    /// Counts datagrams and TCP messages.
    DROPPED_TOTAL: Counter = "bosh_dns_xdp_dropped_total"
        ["reason"] "Messages dropped without a reply.";
    TCP_SESSIONS: Gauge = "bosh_dns_xdp_tcp_sessions"
        [] "Open TCP connections.";
    /// Either the total or one client's limit was exceeded.
    TCP_CLOSED_FOR_OTHERS_TOTAL: Counter = "bosh_dns_xdp_tcp_closed_for_others_total"
        [] "TCP connections closed to make room for new ones.";
    /// `reason`: `bytes` of unsent replies, `queries` that wait. Queries on the connection are not read until
    /// it ends.
    TCP_PAUSED_TOTAL: Counter = "bosh_dns_xdp_tcp_paused_total"
        ["reason"] "Number of times a TCP connection reached its limit of unsent replies or waiting queries.";
    TCP_UNREAD_CLOSED_TOTAL: Counter = "bosh_dns_xdp_tcp_unread_closed_total"
        [] "TCP connections closed because the client did not read its replies.";
    TCP_REPLY_BYTES: Gauge = "bosh_dns_xdp_tcp_reply_bytes"
        [] "Bytes of replies queued on TCP connections.";
    /// Usually caused by a lack of file descriptors.
    ACCEPT_FAILURES_TOTAL: Counter = "bosh_dns_xdp_accept_failures_total"
        [] "Failed attempts to accept a TCP connection.";
    /// `condition`: see docs/troubleshooting.md. `status` shows the same conditions with their causes.
    CONDITION: Gauge = "bosh_dns_xdp_condition"
        ["condition"] "1 while the condition holds, of which an operator must know.";
    /// Every panic is a bug and is logged.
    PANICS_TOTAL: Counter = "bosh_dns_xdp_panics_total"
        [] "Panics of any part of the server.";
    REQUESTS_IN_FLIGHT: Gauge = "bosh_dns_xdp_requests_in_flight"
        [] "Requests waiting for recursors, handlers or first health checks.";
    /// `resource`: the rows of the table of limits (docs/operating.md) that hold for the process.
    LIMIT: Gauge = "bosh_dns_xdp_limit"
        ["resource"] "Limits on resources that clients occupy.";
    API_REFUSED_CONNECTIONS_TOTAL: Counter = "bosh_dns_xdp_api_refused_connections_total"
        [] "Connections to the API closed for a new one: of the user with the most connections.";

    //----------- dnstap -----------------------------------------------------
    DNSTAP_MESSAGES_TOTAL: Counter = "bosh_dns_xdp_dnstap_messages_total"
        [] "Messages written to dnstap.";
    /// `reason`: `queue` if the reader is slow or absent, `interface` beyond 5,000 sampled queries a second of
    /// interfaces.
    DNSTAP_LOST_TOTAL: Counter = "bosh_dns_xdp_dnstap_lost_total"
        ["reason"] "Messages lost for dnstap.";
    DNSTAP_UP: Gauge = "bosh_dns_xdp_dnstap_up"
        [] "1 while the output of dnstap is open.";

    //----------- Names ------------------------------------------------------
    /// The `metrics.top_names` names asked most, counted from one query in 200 (estimates), at most 5,000 of these
    /// a second. A name that displaced another one has its count as well.
    TOP_NAME_QUERIES_TOTAL: Counter = "bosh_dns_xdp_top_name_queries_total"
        ["name"] "Queries that interfaces answered for a name.";

    //----------- Overload ---------------------------------------------------
    /// `reason`: `shed` by interfaces (no reply), or refused with SERVFAIL because the client had its share
    /// of the slots for `recursors`, for a `handler` or of the whole `server`.
    OVERLOAD_QUERIES_TOTAL: Counter = "bosh_dns_xdp_overload_queries_total"
        ["reason"] "Queries dropped or refused under overload.";
    /// `budget`: `server`, `recursors`, or the domain of a handler.
    LIMITED_CLIENTS: Gauge = "bosh_dns_xdp_limited_clients"
        ["budget"] "Clients that had queries refused within the last minute.";
    /// The five clients with the most refusals within the last minute; `status` lists more.
    LIMITED_CLIENT_REFUSALS: Gauge = "bosh_dns_xdp_limited_client_refusals"
        ["budget", "client"] "Queries of a limited client refused since the limit applied.";

    //----------- Records ----------------------------------------------------
    /// 0 without records, or if the file has no version.
    RECORDS_VERSION: Gauge = "bosh_dns_xdp_records_version"
        [] "Version of the records in use.";
    /// Absent without records.
    RECORDS_AGE_SECONDS: Gauge = "bosh_dns_xdp_records_age_seconds"
        [] "Seconds since the records were read.";
    RECORDS_INSTANCES: Gauge = "bosh_dns_xdp_records_instances"
        [] "Instances in the records.";
    RECORDS_ALIASES: Gauge = "bosh_dns_xdp_records_aliases"
        [] "Aliases from files and records.";
    /// `kind`: `config`, `records`, `aliases`, `handlers`, `addresses`, `consul`.
    RELOADS_TOTAL: Counter = "bosh_dns_xdp_reloads_total"
        ["kind"] "File reloads.";
    RELOAD_FAILURES_TOTAL: Counter = "bosh_dns_xdp_reload_failures_total"
        ["kind"] "Failed file reloads; the last good state stays in use.";
    RELOAD_DURATION_SECONDS: Histogram = "bosh_dns_xdp_reload_duration_seconds"
        ["kind"] "Time from noticing a changed file to serving it in userspace.";

    //----------- Fast path --------------------------------------------------
    /// `outcome`: `hit`, `hit_truncated`, or the reason for passing the packet to the network
    /// stack; `shed` packets were dropped.
    FAST_PATH_PACKETS_TOTAL: Counter = "bosh_dns_xdp_fast_path_packets_total"
        ["outcome"] "Packets by outcome.";
    FAST_PATH_REPLIES_TOTAL: Counter = "bosh_dns_xdp_fast_path_replies_total"
        ["type", "rcode"] "Fast-path replies by type and rcode.";
    FAST_PATH_INTERFACE_REPLIES_TOTAL: Counter = "bosh_dns_xdp_fast_path_interface_replies_total"
        ["interface"] "Fast-path replies by interface.";
    /// Label `direction` is `in` or `out`.
    FAST_PATH_BYTES_TOTAL: Counter = "bosh_dns_xdp_fast_path_bytes_total"
        ["direction"] "Bytes of DNS messages: answered queries and their replies.";
    /// `hook`: `native`, `tcx`, `clsact`, `none`.
    FAST_PATH_INTERFACE_INFO: Gauge = "bosh_dns_xdp_fast_path_interface_info"
        ["interface", "hook"] "Hook of each interface; always 1.";
    /// `state`: `loading`, `loaded`, `refused`, `failed`; `reason`: the verifier's message, empty if loaded.
    FAST_PATH_PROGRAM_INFO: Gauge = "bosh_dns_xdp_fast_path_program_info"
        ["program", "state", "reason"] "State of each required program; always 1.";
    FAST_PATH_PROGRAM_LOAD_SECONDS: Gauge = "bosh_dns_xdp_fast_path_program_load_seconds"
        ["program"] "Seconds that the kernel took to load a program.";
    /// Reported by kernels from 5.16 on.
    FAST_PATH_PROGRAM_VERIFIED_INSTRUCTIONS: Gauge = "bosh_dns_xdp_fast_path_program_verified_instructions"
        ["program"] "Instructions that the verifier processed for a program.";
    /// `kind`: `published`, `learned`, `negative`.
    FAST_PATH_ENTRIES: Gauge = "bosh_dns_xdp_fast_path_entries"
        ["kind"] "Names in the fast-path map.";
    /// The range is 0 to 1.
    FAST_PATH_MAP_FILL_RATIO: Gauge = "bosh_dns_xdp_fast_path_map_fill_ratio"
        [] "Share of the map in use.";
    /// The range is 0 to 1.
    FAST_PATH_ARENA_FILL_RATIO: Gauge = "bosh_dns_xdp_fast_path_arena_fill_ratio"
        [] "Share of the entries' memory in use.";
    FAST_PATH_LEASE_SECONDS: Gauge = "bosh_dns_xdp_fast_path_lease_seconds"
        [] "Seconds until the lease expires.";
    FAST_PATH_UP: Gauge = "bosh_dns_xdp_fast_path_up"
        [] "1 while at least one interface answers.";
    /// Waiting for queries at an interface that the configuration selects by wildcard, or by default,
    /// is no degradation.
    FAST_PATH_DEGRADED: Gauge = "bosh_dns_xdp_fast_path_degraded"
        [] "1 while the fast path is configured but serves no interface.";
    /// `operation`: `round` (the thread that follows interfaces wakes up), `links`, `addresses` and `routes` (lists of them),
    /// `route` (one), `filters` (qdisc or filters of one interface), `attach`, `detach`, `rules` (reads the packet filter),
    /// `walk` (through the rules, for an interface or a client).
    FAST_PATH_ATTACHER_OPERATIONS_TOTAL: Counter = "bosh_dns_xdp_fast_path_attacher_operations_total"
        ["operation"] "Operations of the attacher.";
    /// Waiting for locks included. `links`, `filters`, `attach` and `detach` hold the kernel's RTNL lock.
    FAST_PATH_ATTACHER_MICROSECONDS_TOTAL: Counter = "bosh_dns_xdp_fast_path_attacher_microseconds_total"
        ["operation"] "Microseconds that the operations of the attacher took.";
    FAST_PATH_EVICTIONS_TOTAL: Counter = "bosh_dns_xdp_fast_path_evictions_total"
        [] "Learned names evicted for lack of space.";
    FAST_PATH_WRITES_TOTAL: Counter = "bosh_dns_xdp_fast_path_writes_total"
        [] "Elements written to the map.";
    FAST_PATH_FORWARDED_ANSWERS: Gauge = "bosh_dns_xdp_fast_path_forwarded_answers"
        [] "Forwarded answers in the map.";
    FAST_PATH_FORWARDED_EVICTIONS_TOTAL: Counter = "bosh_dns_xdp_fast_path_forwarded_evictions_total"
        [] "Forwarded answers evicted from the map for lack of space.";
    FAST_PATH_FORWARDED_UNFITTING_TOTAL: Counter = "bosh_dns_xdp_fast_path_forwarded_unfitting_total"
        [] "Forwarded answers left to userspace because they are too long or have too many records.";
    FAST_PATH_FORWARDED_RENEWALS_TOTAL: Counter = "bosh_dns_xdp_fast_path_forwarded_renewals_total"
        [] "Forwarded answers in the map that were refreshed before they expired.";
    FAST_PATH_LOCAL_REPLIES: Gauge = "bosh_dns_xdp_fast_path_local_replies"
        [] "Local replies of other types, such as SRV, in the map.";
    FAST_PATH_LOCAL_EVICTIONS_TOTAL: Counter = "bosh_dns_xdp_fast_path_local_evictions_total"
        [] "Local replies evicted from the map for lack of space.";
    FAST_PATH_LOCAL_WITHDRAWN_TOTAL: Counter = "bosh_dns_xdp_fast_path_local_withdrawn_total"
        [] "Local replies withdrawn from the map by a change; they are computed again.";
    FAST_PATH_LOCAL_UNFITTING_TOTAL: Counter = "bosh_dns_xdp_fast_path_local_unfitting_total"
        [] "Local replies left to userspace because they are too long or depend on the client.";
    FAST_PATH_UNFITTING_NAMES: Gauge = "bosh_dns_xdp_fast_path_unfitting_names"
        [] "Names of the records that do not fit in the map; userspace answers them.";

    //----------- Health -----------------------------------------------------
    /// `result`: `running`, `failing`, `other`, or for checks without a report `unreachable`, `tls`
    /// (the instance is not trusted), `refused` (the instance refuses this machine's certificate),
    /// `status`, `malformed`, `timeout`.
    HEALTH_CHECKS_TOTAL: Counter = "bosh_dns_xdp_health_checks_total"
        ["result"] "Health checks of instances, by result.";
    HEALTH_CHECK_DURATION_SECONDS: Histogram = "bosh_dns_xdp_health_check_duration_seconds"
        [] "Duration of health checks.";
    HEALTH_TRACKED_NAMES: Gauge = "bosh_dns_xdp_health_tracked_names"
        [] "Names whose instances are checked.";
    HEALTH_INSTANCES: Gauge = "bosh_dns_xdp_health_instances"
        ["state"] "Checked instances, by state.";
    HEALTH_BLIND: Gauge = "bosh_dns_xdp_health_blind"
        [] "1 while certificate problems prevent all health checks.";
    HEALTH_CHECKS_IN_FLIGHT: Gauge = "bosh_dns_xdp_health_checks_in_flight"
        [] "Health checks under way.";

    //----------- Certificates -----------------------------------------------
    /// `use`: `api`, `health_client`; `part`: `certificate`, or `authority` for the first CA to expire.
    CERTIFICATE_EXPIRY_SECONDS: Gauge = "bosh_dns_xdp_certificate_expiry_timestamp_seconds"
        ["use", "part"] "Expiry of the certificates in use, in seconds since 1970.";
    CERTIFICATE_WARNING_SECONDS: Gauge = "bosh_dns_xdp_certificate_warning_timestamp_seconds"
        ["use", "part"] "Time at which the expiry warning of a certificate starts, in seconds since 1970.";
    CERTIFICATE_LOAD_FAILURES_TOTAL: Counter = "bosh_dns_xdp_certificate_load_failures_total"
        ["use"] "Attempts to load changed certificate files that failed; the last good ones stay in use.";

    //----------- Recursors --------------------------------------------------
    CACHE_BYTES: Gauge = "bosh_dns_xdp_cache_bytes"
        ["zones"] "Bytes of the entries in the cache.";
    RECURSOR_MISMATCHED_TOTAL: Counter = "bosh_dns_xdp_recursor_strays_total"
        ["recursor", "handler"] "Datagrams that match no query: late, wrong or forged.";
    /// `handler`: domain of the handler, empty for recursors of the configuration.
    RECURSOR_QUERIES_TOTAL: Counter = "bosh_dns_xdp_recursor_queries_total"
        ["recursor", "handler"] "Queries sent to recursors.";
    /// `reason`: `timeout`, `no_address`, `unreachable`, `reset`, `closed`, `wrong_reply`, `malformed`,
    /// `servfail`, `refused`, `rcode` (any other error), `given_up` (too many in flight), `no_socket` (this machine has
    /// no descriptor, port or memory for one).
    RECURSOR_FAILURES_TOTAL: Counter = "bosh_dns_xdp_recursor_failures_total"
        ["recursor", "handler", "reason"] "Queries to recursors without a usable reply.";
    /// Measured for answered queries only.
    RECURSOR_DURATION_SECONDS: Histogram = "bosh_dns_xdp_recursor_duration_seconds"
        ["recursor", "handler"] "Response time of recursors.";
    RECURSOR_PREFERRED: Gauge = "bosh_dns_xdp_recursor_preferred"
        ["recursor", "handler"] "1 for the recursor that is tried first.";
    WAITING_QUERIES: Gauge = "bosh_dns_xdp_waiting_queries"
        ["handler"] "Queries waiting for the recursors or a handler.";
    WAITING_QUERIES_LIMIT: Gauge = "bosh_dns_xdp_waiting_queries_limit"
        ["handler"] "Maximum number of waiting queries; one client may occupy as many slots as are free.";
    /// The reply to them is SERVFAIL.
    REFUSED_QUERIES_TOTAL: Counter = "bosh_dns_xdp_refused_queries_total"
        ["handler"] "Queries refused because their client had too many waiting.";
    FAILURE_CACHE_HITS_TOTAL: Counter = "bosh_dns_xdp_failure_cache_hits_total"
        ["handler"] "Queries answered with a cached failure, less than a second old.";

    //----------- Consul -----------------------------------------------------
    /// Nodes from files and agents.
    CONSUL_NODES: Gauge = "bosh_dns_xdp_consul_nodes"
        [] "Known nodes.";
    /// Instances from files and agents.
    CONSUL_INSTANCES: Gauge = "bosh_dns_xdp_consul_instances"
        [] "Known instances.";
    /// 0 if no agent answers, or requests for nodes or services of the local datacenter have failed for
    /// `stale_after` (a revoked token). This and the following families are only exposed if agents are
    /// queried (`consul.sources.http`).
    CONSUL_UP: Gauge = "bosh_dns_xdp_consul_up"
        [] "1 while an agent answers and requests for nodes and services succeed.";
    /// Missing until an agent has answered. Without changes it grows up to `wait`, 5 minutes by default.
    CONSUL_CATALOG_AGE_SECONDS: Gauge = "bosh_dns_xdp_consul_catalog_age_seconds"
        [] "Seconds since a server in touch with a leader answered.";
    /// `state`: `known` by name, `told` if their instances are known, `watched`.
    CONSUL_SERVICES: Gauge = "bosh_dns_xdp_consul_services"
        ["state"] "Services by state.";
    CONSUL_CONNECTIONS: Gauge = "bosh_dns_xdp_consul_connections"
        [] "Connections to the agent.";
    /// Reset when a reload changes the agents or the request settings.
    CONSUL_REQUESTS_TOTAL: Counter = "bosh_dns_xdp_consul_requests_total"
        [] "Requests to agents.";
    CONSUL_REQUEST_FAILURES_TOTAL: Counter = "bosh_dns_xdp_consul_request_failures_total"
        [] "Requests to agents without an answer.";
    /// Indicates that Consul's servers were restored from a snapshot.
    CONSUL_INDEX_RESETS_TOTAL: Counter = "bosh_dns_xdp_consul_index_resets_total"
        [] "Replies whose index went backwards.";
    /// Questions that have failed for longer than `stale_after`; their last answers are served.
    CONSUL_STALE_QUESTIONS: Gauge = "bosh_dns_xdp_consul_stale_questions"
        [] "Failing requests whose last results are still served.";
    CONSUL_INVALID_ENTRIES: Gauge = "bosh_dns_xdp_consul_invalid_entries"
        [] "Invalid entries in Consul's replies, skipped.";
}
