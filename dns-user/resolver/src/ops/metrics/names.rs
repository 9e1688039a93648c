//! The name of every metric family, with its labels. Units are in the names;
//! counters end in `_total`.

//----------- The reference's ------------------------------------------------

/// Requests for names of the fleet, both paths; no labels.
pub const REQUESTS_INTERNAL_TOTAL: &str = "boshdns_requests_internal_total";
/// Requests that went to recursors; no labels. Up-check, handler and reverse
/// requests count in neither.
pub const REQUESTS_EXTERNAL_TOTAL: &str = "boshdns_requests_external_total";

//----------- CoreDNS's, for dashboards that exist ---------------------------

/// Counter: `server`, `zone`, `view`, `proto`, `family`, `type`.
pub const COREDNS_REQUESTS_TOTAL: &str = "coredns_dns_requests_total";
/// Counter: `server`, `zone`, `view`, `rcode`, `plugin`.
pub const COREDNS_RESPONSES_TOTAL: &str = "coredns_dns_responses_total";
/// Histogram: `server`, `zone`, `view`. Userspace only.
pub const COREDNS_REQUEST_DURATION_SECONDS: &str = "coredns_dns_request_duration_seconds";
/// Histogram: `server`, `zone`, `view`, `proto`. Userspace only.
pub const COREDNS_REQUEST_SIZE_BYTES: &str = "coredns_dns_request_size_bytes";
/// Histogram: `server`, `zone`, `view`, `proto`. Userspace only.
pub const COREDNS_RESPONSE_SIZE_BYTES: &str = "coredns_dns_response_size_bytes";
/// Counter: `server`, `zone`, `view`. Userspace only.
pub const COREDNS_DO_REQUESTS_TOTAL: &str = "coredns_dns_do_requests_total";
/// Gauge: `server`, `type` (`success`, `denial`), `zones`, `view`.
pub const COREDNS_CACHE_ENTRIES: &str = "coredns_cache_entries";
/// Counter: `server`, `type` (`success`, `denial`), `zones`, `view`.
pub const COREDNS_CACHE_HITS_TOTAL: &str = "coredns_cache_hits_total";
/// Counter: `server`, `zones`, `view`.
pub const COREDNS_CACHE_MISSES_TOTAL: &str = "coredns_cache_misses_total";
/// Counter: `server`, `zones`, `view`.
pub const COREDNS_CACHE_REQUESTS_TOTAL: &str = "coredns_cache_requests_total";
/// Counter: `server`, `zones`, `view`.
pub const COREDNS_CACHE_SERVED_STALE_TOTAL: &str = "coredns_cache_served_stale_total";
/// Counter: `server`, `type`, `zones`, `view`.
pub const COREDNS_CACHE_EVICTIONS_TOTAL: &str = "coredns_cache_evictions_total";

//----------- Ours: the whole ------------------------------------------------

/// Gauge, always 1: `version`, `commit`.
pub const BUILD_INFO: &str = "bosh_dns_xdp_build_info";
/// Gauge: seconds since the start.
pub const UPTIME_SECONDS: &str = "bosh_dns_xdp_uptime_seconds";
/// Counter: `path` (`fast`, `userspace`).
pub const REPLIES_TOTAL: &str = "bosh_dns_xdp_replies_total";
/// Counter: log lines lost because nobody read the log.
pub const LOG_LINES_LOST_TOTAL: &str = "bosh_dns_xdp_log_lines_lost_total";
/// Counter: datagrams and TCP messages without a reply: `reason`.
pub const DROPPED_TOTAL: &str = "bosh_dns_xdp_dropped_total";
/// Gauge: open TCP sessions.
pub const TCP_SESSIONS: &str = "bosh_dns_xdp_tcp_sessions";
/// Counter: TCP sessions that were closed because there were too many, or too many of one client.
pub const TCP_CLOSED_FOR_OTHERS_TOTAL: &str = "bosh_dns_xdp_tcp_closed_for_others_total";
/// Counter: times that no TCP connection could be accepted, for lack of descriptors mostly.
pub const ACCEPT_FAILURES_TOTAL: &str = "bosh_dns_xdp_accept_failures_total";
/// Counter: panics of any part of the server; each is a mistake of ours and stands in the log.
pub const PANICS_TOTAL: &str = "bosh_dns_xdp_panics_total";
/// Gauge: requests being worked on in userspace.
pub const REQUESTS_IN_FLIGHT: &str = "bosh_dns_xdp_requests_in_flight";

//----------- Ours: records --------------------------------------------------

/// Gauge: version of records.json in force; 0: none, or it names none.
pub const RECORDS_VERSION: &str = "bosh_dns_xdp_records_version";
/// Gauge: seconds since the records in force were read.
pub const RECORDS_AGE_SECONDS: &str = "bosh_dns_xdp_records_age_seconds";
/// Gauge: instances in the records.
pub const RECORDS_INSTANCES: &str = "bosh_dns_xdp_records_instances";
/// Gauge: aliases, of files and records.
pub const RECORDS_ALIASES: &str = "bosh_dns_xdp_records_aliases";
/// Counter: `kind` (`records`, `aliases`, `handlers`, `config`, `certificates`).
pub const RELOADS_TOTAL: &str = "bosh_dns_xdp_reloads_total";
/// Counter: `kind`; the last good state stays in force.
pub const RELOAD_FAILURES_TOTAL: &str = "bosh_dns_xdp_reload_failures_total";
/// Histogram: `kind`; from noticing the file to answering from it in userspace.
pub const RELOAD_DURATION_SECONDS: &str = "bosh_dns_xdp_reload_duration_seconds";

//----------- Ours: fast path ------------------------------------------------

/// Counter: packets by `outcome` (`hit`, `hit_truncated`, or why they went up). Those
/// with `handed_on` count once more, by what the tc program behind XDP made of them.
pub const FAST_PATH_PACKETS_TOTAL: &str = "bosh_dns_xdp_fast_path_packets_total";
/// Counter: replies by `type` and `rcode`.
pub const FAST_PATH_REPLIES_TOTAL: &str = "bosh_dns_xdp_fast_path_replies_total";
/// Counter: replies by `interface`.
pub const FAST_PATH_INTERFACE_REPLIES_TOTAL: &str = "bosh_dns_xdp_fast_path_interface_replies_total";
/// Counter: bytes of DNS messages by `direction` (`in`, `out`).
pub const FAST_PATH_BYTES_TOTAL: &str = "bosh_dns_xdp_fast_path_bytes_total";
/// Gauge, 1 for each: `interface`, `hook` (`native`, `generic`, `tcx`, `clsact`, `none`).
pub const FAST_PATH_INTERFACE_INFO: &str = "bosh_dns_xdp_fast_path_interface_info";
/// Gauge, 1 for each program that was needed: `program`, `state` (`loading`, `loaded`,
/// `refused`, `failed`), `reason` (empty for those that are loaded; else the verifier's words).
pub const FAST_PATH_PROGRAM_INFO: &str = "bosh_dns_xdp_fast_path_program_info";
/// Gauge: seconds that the kernel took for a `program`.
pub const FAST_PATH_PROGRAM_LOAD_SECONDS: &str = "bosh_dns_xdp_fast_path_program_load_seconds";
/// Gauge: instructions that the verifier looked at for a `program` (kernel 5.16).
pub const FAST_PATH_PROGRAM_VERIFIED_INSTRUCTIONS: &str =
    "bosh_dns_xdp_fast_path_program_verified_instructions";
/// Gauge: entries by `kind` (`published`, `learned`, `negative`).
pub const FAST_PATH_ENTRIES: &str = "bosh_dns_xdp_fast_path_entries";
/// Gauge: share of the map in use, 0 to 1.
pub const FAST_PATH_MAP_FILL_RATIO: &str = "bosh_dns_xdp_fast_path_map_fill_ratio";
/// Gauge: share of the store in use, 0 to 1.
pub const FAST_PATH_ARENA_FILL_RATIO: &str = "bosh_dns_xdp_fast_path_arena_fill_ratio";
/// Gauge: seconds that the lease still has.
pub const FAST_PATH_LEASE_SECONDS: &str = "bosh_dns_xdp_fast_path_lease_seconds";
/// Gauge: 1 while the fast path is attached to some interface.
pub const FAST_PATH_UP: &str = "bosh_dns_xdp_fast_path_up";
/// Counter: learned entries that had to make room.
pub const FAST_PATH_EVICTIONS_TOTAL: &str = "bosh_dns_xdp_fast_path_evictions_total";
/// Counter: elements written to the map.
pub const FAST_PATH_WRITES_TOTAL: &str = "bosh_dns_xdp_fast_path_writes_total";
/// Gauge: names of the snapshot that are not in the map.
pub const FAST_PATH_UNFITTING_NAMES: &str = "bosh_dns_xdp_fast_path_unfitting_names";

//----------- Ours: health ---------------------------------------------------

/// Counter: checks by `result` (`running`, `failing`, `other`, and without an
/// answer `unreachable`, `tls`, `status`, `malformed`, `timeout`).
pub const HEALTH_CHECKS_TOTAL: &str = "bosh_dns_xdp_health_checks_total";
/// Histogram: how long a check took.
pub const HEALTH_CHECK_DURATION_SECONDS: &str = "bosh_dns_xdp_health_check_duration_seconds";
/// Gauge: names that are tracked.
pub const HEALTH_TRACKED_NAMES: &str = "bosh_dns_xdp_health_tracked_names";
/// Gauge: instances by `state`.
pub const HEALTH_INSTANCES: &str = "bosh_dns_xdp_health_instances";
/// Gauge: checks under way.
pub const HEALTH_CHECKS_IN_FLIGHT: &str = "bosh_dns_xdp_health_checks_in_flight";

//----------- Ours: certificates ---------------------------------------------

/// Gauge: end of a certificate, seconds since 1970: `use` (`api`, `health_client`),
/// `part` (`certificate`, or `authority`: the first CA to end).
pub const CERTIFICATE_EXPIRY_SECONDS: &str = "bosh_dns_xdp_certificate_expiry_timestamp_seconds";
/// Counter: attempts to load changed files that failed, by `use`.
pub const CERTIFICATE_LOAD_FAILURES_TOTAL: &str = "bosh_dns_xdp_certificate_load_failures_total";

//----------- Ours: recursors ------------------------------------------------

/// Gauge: bytes of the entries in the cache of `zones`.
pub const CACHE_BYTES: &str = "bosh_dns_xdp_cache_bytes";
/// Counter: datagrams of a `recursor` that were no reply to any query; `handler`.
pub const RECURSOR_MISMATCHED_TOTAL: &str = "bosh_dns_xdp_recursor_strays_total";
/// Counter: queries by `recursor`; `handler`: the domain that it is for, empty
/// for those of the configuration.
pub const RECURSOR_QUERIES_TOTAL: &str = "bosh_dns_xdp_recursor_queries_total";
/// Counter: by `recursor`, `handler` and `reason` (`network`: timeouts and broken
/// connections, `rcode`: errors as replies, `given_up`: too many in flight).
pub const RECURSOR_FAILURES_TOTAL: &str = "bosh_dns_xdp_recursor_failures_total";
/// Histogram: by `recursor`, of the queries that were answered.
pub const RECURSOR_DURATION_SECONDS: &str = "bosh_dns_xdp_recursor_duration_seconds";
/// Gauge: 1 for the preferred `recursor`, 0 for the others.
pub const RECURSOR_PREFERRED: &str = "bosh_dns_xdp_recursor_preferred";

//----------- Ours: Consul's names -------------------------------------------

/// Gauge: nodes of Consul's that are known, by files and by agents.
pub const CONSUL_NODES: &str = "bosh_dns_xdp_consul_nodes";
/// Gauge: the same of instances.
pub const CONSUL_INSTANCES: &str = "bosh_dns_xdp_consul_instances";
/// Gauge: 1 while some agent answers, 0 while none does. This and what follows: only where agents
/// are asked (`consul.sources.http`).
pub const CONSUL_UP: &str = "bosh_dns_xdp_consul_up";
/// Gauge: seconds since a server in touch with a leader answered; missing until one did. With
/// nothing new it grows to `wait`, that is 5 minutes.
pub const CONSUL_CATALOG_AGE_SECONDS: &str = "bosh_dns_xdp_consul_catalog_age_seconds";
/// Gauge: services by `state` (`known` by name, `told`: so are their instances, `watched`).
pub const CONSUL_SERVICES: &str = "bosh_dns_xdp_consul_services";
/// Gauge: connections to the agent.
pub const CONSUL_CONNECTIONS: &str = "bosh_dns_xdp_consul_connections";
/// Counter: requests to agents. Begins anew when a reload changes whom or how to ask.
pub const CONSUL_REQUESTS_TOTAL: &str = "bosh_dns_xdp_consul_requests_total";
/// Counter: those without an answer.
pub const CONSUL_REQUEST_FAILURES_TOTAL: &str = "bosh_dns_xdp_consul_request_failures_total";
/// Counter: answers whose index was smaller than the one before: Consul's servers were restored.
pub const CONSUL_INDEX_RESETS_TOTAL: &str = "bosh_dns_xdp_consul_index_resets_total";
