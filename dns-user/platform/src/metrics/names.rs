//! Declarations of all metric families: name, type, labels and help. Names contain the unit;
//! counters end in `_total`.
//!
//! The [`families`] serve only to be exposed; `xtask/tests/metrics.rs` fails on a family that no
//! crate exposes.

use super::family::{Counter, Family, Gauge, Histogram};

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
            Declared { name: $name, kind: stringify!($kind), labels: &[$($label),*], help: $help }
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
        ["server", "zone", "view"] "From taking a query from its socket to its reply.";
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
        ["server", "zones", "view"] "Queries put to the cache.";
    COREDNS_CACHE_SERVED_STALE_TOTAL: Counter = "coredns_cache_served_stale_total"
        ["server", "zones", "view"] "Answers given past their time.";
    COREDNS_CACHE_EVICTIONS_TOTAL: Counter = "coredns_cache_evictions_total"
        ["server", "type", "zones", "view"] "Entries that had to make room.";

    //----------- Server -----------------------------------------------------
    BUILD_INFO: Gauge = "bosh_dns_xdp_build_info"
        ["version", "commit"] "What this server was built from; always 1.";
    UPTIME_SECONDS: Gauge = "bosh_dns_xdp_uptime_seconds"
        [] "Seconds since the start.";
    /// Label `path` is `fast` or `userspace`.
    REPLIES_TOTAL: Counter = "bosh_dns_xdp_replies_total"
        ["path"] "Replies by the path that gave them.";
    LOG_LINES_LOST_TOTAL: Counter = "bosh_dns_xdp_log_lines_lost_total"
        [] "Log lines lost because the reader was too slow.";
    /// Counts datagrams and TCP messages.
    DROPPED_TOTAL: Counter = "bosh_dns_xdp_dropped_total"
        ["reason"] "Messages without a reply.";
    TCP_SESSIONS: Gauge = "bosh_dns_xdp_tcp_sessions"
        [] "Open TCP connections.";
    /// Either the total or one client's limit was exceeded.
    TCP_CLOSED_FOR_OTHERS_TOTAL: Counter = "bosh_dns_xdp_tcp_closed_for_others_total"
        [] "TCP connections closed because there were too many.";
    /// `reason`: `bytes` of unsent replies, `queries` that wait. Queries on the connection are not
    /// read until it is over.
    TCP_PAUSED_TOTAL: Counter = "bosh_dns_xdp_tcp_paused_total"
        ["reason"] "Times that a TCP connection reached its limit of unsent replies or waiting queries.";
    TCP_UNREAD_CLOSED_TOTAL: Counter = "bosh_dns_xdp_tcp_unread_closed_total"
        [] "TCP connections closed because the client did not read its replies.";
    TCP_REPLY_BYTES: Gauge = "bosh_dns_xdp_tcp_reply_bytes"
        [] "Bytes of replies that TCP connections hold.";
    /// Usually caused by a lack of file descriptors.
    ACCEPT_FAILURES_TOTAL: Counter = "bosh_dns_xdp_accept_failures_total"
        [] "Times that no TCP connection could be accepted.";
    /// Every panic is a bug and is logged.
    PANICS_TOTAL: Counter = "bosh_dns_xdp_panics_total"
        [] "Panics of any part of the server.";
    REQUESTS_IN_FLIGHT: Gauge = "bosh_dns_xdp_requests_in_flight"
        [] "Requests that wait for recursors, handlers or first checks.";
    /// `resource`: the rows of the table of limits (docs/operating.md) that hold for the process.
    LIMIT: Gauge = "bosh_dns_xdp_limit"
        ["resource"] "Limits on what clients can occupy.";
    API_REFUSED_CONNECTIONS_TOTAL: Counter = "bosh_dns_xdp_api_refused_connections_total"
        [] "Connections to the API closed because their user had too many unfinished handshakes.";

    //----------- Overload ---------------------------------------------------
    /// `reason`: `shed` by interfaces (no reply), or refused with SERVFAIL because the client had
    /// its share of the places for `recursors`, for a `handler` or of the whole `server`.
    OVERLOAD_QUERIES_TOTAL: Counter = "bosh_dns_xdp_overload_queries_total"
        ["reason"] "Queries dropped or refused under overload.";
    /// `budget`: `server`, `recursors`, or the domain of a handler.
    LIMITED_CLIENTS: Gauge = "bosh_dns_xdp_limited_clients"
        ["budget"] "Clients of which queries were refused within the last minute.";
    /// The five clients with the most refusals within the last minute; `status` lists more.
    LIMITED_CLIENT_REFUSALS: Gauge = "bosh_dns_xdp_limited_client_refusals"
        ["budget", "client"] "Refused queries of a client since it became limited.";

    //----------- Records ----------------------------------------------------
    /// 0 without records, or if the file has no version.
    RECORDS_VERSION: Gauge = "bosh_dns_xdp_records_version"
        [] "Version of the records in force.";
    RECORDS_AGE_SECONDS: Gauge = "bosh_dns_xdp_records_age_seconds"
        [] "Seconds since the records were read.";
    RECORDS_INSTANCES: Gauge = "bosh_dns_xdp_records_instances"
        [] "Instances in the records.";
    RECORDS_ALIASES: Gauge = "bosh_dns_xdp_records_aliases"
        [] "Aliases of files and records.";
    /// `kind`: `records`, `aliases`, `handlers`, `config`, `certificates`.
    RELOADS_TOTAL: Counter = "bosh_dns_xdp_reloads_total"
        ["kind"] "Files read again.";
    RELOAD_FAILURES_TOTAL: Counter = "bosh_dns_xdp_reload_failures_total"
        ["kind"] "Files that could not be used; the last good state stays.";
    RELOAD_DURATION_SECONDS: Histogram = "bosh_dns_xdp_reload_duration_seconds"
        ["kind"] "From noticing a file to answering from it in userspace.";

    //----------- Fast path --------------------------------------------------
    /// `outcome`: `hit`, `hit_truncated`, or the reason for passing the packet to the network
    /// stack; `shed` packets were dropped.
    FAST_PATH_PACKETS_TOTAL: Counter = "bosh_dns_xdp_fast_path_packets_total"
        ["outcome"] "Packets by what became of them.";
    FAST_PATH_REPLIES_TOTAL: Counter = "bosh_dns_xdp_fast_path_replies_total"
        ["type", "rcode"] "Replies of the interface by type and rcode.";
    FAST_PATH_INTERFACE_REPLIES_TOTAL: Counter = "bosh_dns_xdp_fast_path_interface_replies_total"
        ["interface"] "Replies by interface.";
    /// Label `direction` is `in` or `out`.
    FAST_PATH_BYTES_TOTAL: Counter = "bosh_dns_xdp_fast_path_bytes_total"
        ["direction"] "Bytes of DNS messages, of answered queries and their replies.";
    /// `hook`: `native`, `generic`, `tcx`, `clsact`, `none`.
    FAST_PATH_INTERFACE_INFO: Gauge = "bosh_dns_xdp_fast_path_interface_info"
        ["interface", "hook"] "Hook of each interface; always 1.";
    /// `state`: `loading`, `loaded`, `refused`, `failed`; `reason`: the verifier's message, empty
    /// if loaded.
    FAST_PATH_PROGRAM_INFO: Gauge = "bosh_dns_xdp_fast_path_program_info"
        ["program", "state", "reason"] "Programs that were needed, and how they fare; always 1.";
    FAST_PATH_PROGRAM_LOAD_SECONDS: Gauge = "bosh_dns_xdp_fast_path_program_load_seconds"
        ["program"] "Seconds that the kernel took for a program.";
    /// Reported by kernels from 5.16 on.
    FAST_PATH_PROGRAM_VERIFIED_INSTRUCTIONS: Gauge = "bosh_dns_xdp_fast_path_program_verified_instructions"
        ["program"] "Instructions that the verifier looked at for a program.";
    /// `kind`: `published`, `learned`, `negative`.
    FAST_PATH_ENTRIES: Gauge = "bosh_dns_xdp_fast_path_entries"
        ["kind"] "Names in the map.";
    /// The range is 0 to 1.
    FAST_PATH_MAP_FILL_RATIO: Gauge = "bosh_dns_xdp_fast_path_map_fill_ratio"
        [] "Share of the map in use.";
    /// The range is 0 to 1.
    FAST_PATH_ARENA_FILL_RATIO: Gauge = "bosh_dns_xdp_fast_path_arena_fill_ratio"
        [] "Share of the entries' memory in use.";
    FAST_PATH_LEASE_SECONDS: Gauge = "bosh_dns_xdp_fast_path_lease_seconds"
        [] "Seconds that the lease still has.";
    FAST_PATH_UP: Gauge = "bosh_dns_xdp_fast_path_up"
        [] "1 while some interface answers.";
    /// Waiting for queries at an interface that the configuration selects by wildcard, or by default,
    /// is no degradation.
    FAST_PATH_DEGRADED: Gauge = "bosh_dns_xdp_fast_path_degraded"
        [] "1 while the configured fast path serves no interface although it should.";
    FAST_PATH_EVICTIONS_TOTAL: Counter = "bosh_dns_xdp_fast_path_evictions_total"
        [] "Learned names that had to make room.";
    FAST_PATH_WRITES_TOTAL: Counter = "bosh_dns_xdp_fast_path_writes_total"
        [] "Elements written to the map.";
    FAST_PATH_FORWARDED_ANSWERS: Gauge = "bosh_dns_xdp_fast_path_forwarded_answers"
        [] "Answers of recursors and handlers in the map.";
    FAST_PATH_FORWARDED_EVICTIONS_TOTAL: Counter = "bosh_dns_xdp_fast_path_forwarded_evictions_total"
        [] "Answers of recursors and handlers that had to make room in the map.";
    FAST_PATH_FORWARDED_UNFITTING_TOTAL: Counter = "bosh_dns_xdp_fast_path_forwarded_unfitting_total"
        [] "Answers of recursors and handlers left to userspace: too long, or with too many records.";
    FAST_PATH_FORWARDED_RENEWALS_TOTAL: Counter = "bosh_dns_xdp_fast_path_forwarded_renewals_total"
        [] "Answers in the map that were fetched again before their TTL ended.";
    FAST_PATH_UNFITTING_NAMES: Gauge = "bosh_dns_xdp_fast_path_unfitting_names"
        [] "Names of the snapshot that are not in the map; userspace answers them.";

    //----------- Health -----------------------------------------------------
    /// `result`: `running`, `failing`, `other`, or for checks without a reply `unreachable`, `tls`,
    /// `status`, `malformed`, `timeout`.
    HEALTH_CHECKS_TOTAL: Counter = "bosh_dns_xdp_health_checks_total"
        ["result"] "Health checks of instances, by result.";
    HEALTH_CHECK_DURATION_SECONDS: Histogram = "bosh_dns_xdp_health_check_duration_seconds"
        [] "How long health checks took.";
    HEALTH_TRACKED_NAMES: Gauge = "bosh_dns_xdp_health_tracked_names"
        [] "Names whose instances are checked.";
    HEALTH_INSTANCES: Gauge = "bosh_dns_xdp_health_instances"
        ["state"] "Checked instances, by state.";
    HEALTH_BLIND: Gauge = "bosh_dns_xdp_health_blind"
        [] "1 while no instance can be checked because of certificates.";
    HEALTH_CHECKS_IN_FLIGHT: Gauge = "bosh_dns_xdp_health_checks_in_flight"
        [] "Health checks under way.";

    //----------- Certificates -----------------------------------------------
    /// `use`: `api`, `health_client`; `part`: `certificate`, or `authority` for the first CA to
    /// expire.
    CERTIFICATE_EXPIRY_SECONDS: Gauge = "bosh_dns_xdp_certificate_expiry_timestamp_seconds"
        ["use", "part"] "End of certificates in use, seconds since 1970.";
    CERTIFICATE_WARNING_SECONDS: Gauge = "bosh_dns_xdp_certificate_warning_timestamp_seconds"
        ["use", "part"] "Moment from which the end of a certificate deserves a warning, seconds since 1970.";
    CERTIFICATE_LOAD_FAILURES_TOTAL: Counter = "bosh_dns_xdp_certificate_load_failures_total"
        ["use"] "Attempts to load changed certificate files that failed; the last good ones stay in use.";

    //----------- Recursors --------------------------------------------------
    CACHE_BYTES: Gauge = "bosh_dns_xdp_cache_bytes"
        ["zones"] "Bytes of the entries in the cache.";
    RECURSOR_MISMATCHED_TOTAL: Counter = "bosh_dns_xdp_recursor_strays_total"
        ["recursor", "handler"] "Datagrams that were no reply to any query: late, wrong or forged.";
    /// `handler`: domain of the handler, empty for recursors of the configuration.
    RECURSOR_QUERIES_TOTAL: Counter = "bosh_dns_xdp_recursor_queries_total"
        ["recursor", "handler"] "Queries sent to recursors.";
    /// `reason`: `timeout`, `no_address`, `unreachable`, `reset`, `closed`, `wrong_reply`, `malformed`,
    /// `servfail`, `refused`, `rcode` (any other error), `given_up` (too many in flight).
    RECURSOR_FAILURES_TOTAL: Counter = "bosh_dns_xdp_recursor_failures_total"
        ["recursor", "handler", "reason"] "Queries to recursors that brought no usable reply.";
    /// Measured for answered queries only.
    RECURSOR_DURATION_SECONDS: Histogram = "bosh_dns_xdp_recursor_duration_seconds"
        ["recursor", "handler"] "Time to the replies of recursors.";
    RECURSOR_PREFERRED: Gauge = "bosh_dns_xdp_recursor_preferred"
        ["recursor", "handler"] "1 for the recursor that is asked first.";
    WAITING_QUERIES: Gauge = "bosh_dns_xdp_waiting_queries"
        ["handler"] "Queries that wait for the recursors or for a handler.";
    WAITING_QUERIES_LIMIT: Gauge = "bosh_dns_xdp_waiting_queries_limit"
        ["handler"] "Most queries that may wait; one client may hold as many places as are free.";
    /// The reply to them is SERVFAIL.
    REFUSED_QUERIES_TOTAL: Counter = "bosh_dns_xdp_refused_queries_total"
        ["handler"] "Queries refused because their client had too many waiting.";
    FAILURE_CACHE_HITS_TOTAL: Counter = "bosh_dns_xdp_failure_cache_hits_total"
        ["handler"] "Queries answered with a failure of less than a second ago.";

    //----------- Consul -----------------------------------------------------
    /// Nodes from files and agents.
    CONSUL_NODES: Gauge = "bosh_dns_xdp_consul_nodes"
        [] "Nodes that are known.";
    /// Instances from files and agents.
    CONSUL_INSTANCES: Gauge = "bosh_dns_xdp_consul_instances"
        [] "Instances that are known.";
    /// 0 if no agent answers. This and the following families are only exposed if agents are
    /// queried (`consul.sources.http`).
    CONSUL_UP: Gauge = "bosh_dns_xdp_consul_up"
        [] "1 while some agent answers.";
    /// Missing until an agent has answered. Without changes it grows up to `wait`, 5 minutes by
    /// default.
    CONSUL_CATALOG_AGE_SECONDS: Gauge = "bosh_dns_xdp_consul_catalog_age_seconds"
        [] "Seconds since a server in touch with a leader answered.";
    /// `state`: `known` by name, `told` if their instances are known, `watched`.
    CONSUL_SERVICES: Gauge = "bosh_dns_xdp_consul_services"
        ["state"] "Services by what is known of them.";
    CONSUL_CONNECTIONS: Gauge = "bosh_dns_xdp_consul_connections"
        [] "Connections to the agent.";
    /// Reset when a reload changes the agents or the request settings.
    CONSUL_REQUESTS_TOTAL: Counter = "bosh_dns_xdp_consul_requests_total"
        [] "Requests to agents.";
    CONSUL_REQUEST_FAILURES_TOTAL: Counter = "bosh_dns_xdp_consul_request_failures_total"
        [] "Requests to agents without an answer.";
    /// Indicates that Consul's servers were restored from a snapshot.
    CONSUL_INDEX_RESETS_TOTAL: Counter = "bosh_dns_xdp_consul_index_resets_total"
        [] "Answers whose index was smaller than the one before.";
    /// Questions that have failed for longer than `stale_after`; their last answers are served.
    CONSUL_STALE_QUESTIONS: Gauge = "bosh_dns_xdp_consul_stale_questions"
        [] "Failing questions whose old answers are served.";
    CONSUL_INVALID_ENTRIES: Gauge = "bosh_dns_xdp_consul_invalid_entries"
        [] "Entries of Consul's answers that are invalid and left out.";
}
