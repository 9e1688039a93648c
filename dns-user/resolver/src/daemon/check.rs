//! Checks a configuration without starting a server.

use std::{
    collections::BTreeMap,
    ffi::CString,
    fs::{self, File},
    net::SocketAddr,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    time::Instant,
};

use nix::unistd::{Uid, User, getgrouplist};
use serde::Serialize;

use super::{
    files::{Files, InitialFiles},
    followed_file::Sources,
    settings::{self, WholeConfig},
};
use crate::{
    ops::service_status::{FileState, Kind, ServiceStatus},
    server::ServerError,
};
use dns_core::config::{Config, Loaded, TlsFiles, all_addresses};
use dns_kit::accounts;
use dns_upstream::{Denial, HandlerConfig, HandlerSource, OwnAddresses, redacted};

/// Result of checking a configuration.
#[derive(Clone, Debug, Serialize)]
pub struct CheckReport {
    /// Whether a server would start and serve everything configured.
    pub ok: bool,
    /// Problems that would prevent it.
    pub errors: Vec<String>,
    /// Problems that would not.
    pub warnings: Vec<String>,
    /// Data the server would serve; `None` if it would not start with these files.
    pub serves: Option<Serves>,
}

/// Data and settings a server would serve with this configuration.
#[derive(Clone, Debug, Serialize)]
pub struct Serves {
    /// Listen addresses, for both UDP and TCP.
    pub listen: Vec<SocketAddr>,
    /// Version of the records.
    pub records_version: Option<u64>,
    /// Number of instances in the records.
    pub instances: usize,
    /// Domains of the records.
    pub domains: Vec<String>,
    /// Number of aliases, from alias files and records.
    pub aliases: usize,
    /// Number of names published to the fast path at start.
    pub published_names: usize,
    /// The files, by kind.
    pub files: BTreeMap<&'static str, FileState>,
    /// Handlers, each as domain and source.
    pub handlers: Vec<String>,
    /// Consul domain and number of registrations; `None` if Consul is not configured.
    pub consul_names: Option<String>,
    /// Configured recursors; if empty, /etc/resolv.conf is used.
    pub recursor_addresses: Vec<String>,
    /// Whether other names are forwarded.
    pub recursion: bool,
    /// Names answered with 127.0.0.1 or ::1.
    pub upcheck_domains: Vec<String>,
    /// Fast path mode; `off` if disabled.
    pub fast_path_mode: String,
    /// Port of the API on 127.0.0.1.
    pub api_port: Option<u16>,
    /// Whether health checks are enabled.
    pub health_checks: bool,
    /// Address of the metrics endpoint.
    pub metrics_address: Option<SocketAddr>,
}

/// Checks a configuration and every file it names.
pub fn check(path: &Path) -> CheckReport {
    let (errors, whole) = settings::check_config(path);
    let mut errors: Vec<String> = errors.iter().map(ToString::to_string).collect();
    let Some(whole) = whole else {
        return CheckReport {
            ok: false,
            errors,
            warnings: Vec::new(),
            serves: None,
        };
    };
    // Before `whole` is consumed; listed after the errors of the file, which may be their cause.
    let surroundings = surroundings(&whole.0.config);
    let mut report = examine(path, whole);
    if let Some(serves) = &mut report.serves {
        serves
            .files
            .entry(Kind::Config.label())
            .or_default()
            .errors
            .clone_from(&errors);
    }
    errors.extend(surroundings);
    // First, because errors of other files often follow from those of the configuration.
    report.errors.splice(0..0, errors);
    report.ok = report.errors.is_empty();
    report
}

impl CheckReport {
    /// Adds the error of start-up for each address on which a program listens, except for the addresses `own`,
    /// which a running server gives up.
    pub fn add_taken_addresses(&mut self, own: &[SocketAddr]) {
        let Some(serves) = &self.serves else { return };
        let others = serves
            .listen
            .iter()
            .filter(|address| !own.contains(address));
        let taken = others.filter_map(|&address| Some(ServerError::of_taken(address)?.to_string()));
        self.errors.extend(taken);
        self.ok = self.errors.is_empty();
    }
}

/// Returns problems outside the files: configured users, groups and interfaces missing on this
/// machine.
fn surroundings(config: &Config) -> Vec<String> {
    let has_fast_path = config.xdp.is_on();
    let mut users = vec![("xdp.user", &config.xdp.user)];
    if has_fast_path {
        users.push(("xdp.attach_user", &config.xdp.attach_user));
    }
    if let Some(control) = &config.control {
        users.push(("control.user", &control.user));
    }
    let mut errors = Vec::new();
    for (key, name) in users {
        if let Some(name) = name
            && let Err(error) = accounts::user(key, name)
        {
            errors.push(error.to_string());
        }
    }
    if let Some(control) = &config.control
        && let Some(name) = &control.group
        && let Err(error) = accounts::group("control.group", name)
    {
        errors.push(error.to_string());
    }
    if has_fast_path {
        for name in config.xdp.interfaces.iter().flatten() {
            // A pattern may match interfaces that appear later.
            let is_pattern = name.contains(['*', '?', '[']);
            if !is_pattern && nix::net::if_::if_nametoindex(name.as_str()).is_err() {
                errors.push(format!(
                    "xdp.interfaces: interface {name:?} does not exist on this machine; its queries would be \
                     answered in userspace"
                ));
            }
        }
    }
    errors
}

/// Returns an error for each recursor that is this server, which never asks itself.
fn own_recursors(
    config: &Config,
    handlers: &[HandlerConfig],
    consul: &[String],
    listen: &[SocketAddr],
) -> Vec<String> {
    let mut named = Vec::new();
    if !config.recursion.disabled {
        named.push(("recursors".to_owned(), &config.recursion.recursors[..]));
    }
    for handler in handlers {
        if let HandlerSource::Dns(recursors) = &handler.source {
            named.push((format!("the handler for {}", handler.domain), recursors));
        }
    }
    named.push(("consul.recursors".to_owned(), consul));
    let own = OwnAddresses::new(listen);
    let mut errors = Vec::new();
    for (place, recursors) in named {
        for recursor in recursors {
            // A host name is looked up by the running server only: what it leads to may change.
            if recursor.parse().is_ok_and(|address| own.contains(address)) {
                errors.push(format!(
                    "{place}: {recursor} is an address of this server: queries would come back, so it is never asked; \
                     name another server, or remove it"
                ));
            }
        }
    }
    errors
}

/// Returns that the server may not give its control socket to the configured group. Its user is
/// this process's, or the owner of the socket's folder, which a service manager creates for it.
fn foreign_group(config: &Config) -> Option<String> {
    let control = config.control.as_ref()?;
    let group = accounts::group("control.group", control.group.as_ref()?).ok()?;
    let own = Uid::effective();
    let owner = if own.is_root() {
        Uid::from_raw(fs::metadata(control.socket.parent()?).ok()?.uid())
    } else {
        own
    };
    // Root may give a socket to any group (chown(2)).
    if owner.is_root() {
        return None;
    }
    let user = User::from_uid(owner).ok()??;
    let name = CString::new(user.name.as_str()).ok()?;
    let groups = getgrouplist(&name, user.gid).ok()?;
    (!groups.contains(&group.gid)).then(|| {
        format!(
            "control.group: user {:?}, who owns the folder of the socket, is no member of group {:?}: the socket is \
             bound without it, unless the server's unit has SupplementaryGroups={}",
            user.name, group.name, group.name
        )
    })
}

/// Returns the error of start-up for each listen address that does not belong to this machine.
fn foreign_addresses(listen: &[SocketAddr]) -> impl Iterator<Item = String> {
    listen
        .iter()
        .filter_map(|&address| Some(ServerError::of_foreign(address)?.to_string()))
}

fn examine(
    path: &Path,
    (
        Loaded {
            config,
            mut warnings,
        },
        consul_config,
    ): WholeConfig,
) -> CheckReport {
    let service_status = ServiceStatus::default();
    let begun = Instant::now();
    warnings.extend(consul_config.iter().flat_map(unreadable_of_consul));
    warnings.extend(dnstap_problem(&config));
    let consul_recursors = consul_config
        .as_ref()
        .map_or_else(Vec::new, |consul| consul.recursors.clone());
    let started = Files::start(Sources::of(&config), consul_config, &service_status);
    service_status.loaded(
        Kind::Config,
        vec![path.to_owned()],
        Vec::new(),
        begun.elapsed(),
        "read",
    );
    let mut errors: Vec<String> = Vec::new();
    let state = service_status.state();
    for (kind, file_state) in &state.files {
        // Missing records may still appear; an invalid file stays invalid.
        let starts_without = *kind == Kind::Records.label()
            && config
                .records_file
                .as_ref()
                .is_some_and(|path| !path.exists());
        let target = if starts_without {
            &mut warnings
        } else {
            &mut errors
        };
        target.extend(file_state.errors.iter().cloned());
        warnings.extend(file_state.warnings.iter().cloned());
    }
    warnings.extend(parts_that_stay_off(&config));
    // The status has the errors that would end the start.
    let Ok((_files, initial)) = started else {
        errors.extend(foreign_addresses(&[config.listen]));
        return CheckReport {
            ok: false,
            errors,
            warnings,
            serves: None,
        };
    };
    let listen = all_addresses(config.listen, &initial.addresses);
    warnings.extend(config.long_replies(&listen));
    errors.extend(foreign_addresses(&listen));
    errors.extend(own_recursors(
        &config,
        &initial.handlers,
        &consul_recursors,
        &listen,
    ));
    CheckReport {
        ok: errors.is_empty(),
        errors,
        warnings,
        serves: Some(serves(&config, initial, listen, state.files)),
    }
}

/// Returns why the log of queries would not be written.
fn dnstap_problem(config: &Config) -> Option<String> {
    let dnstap = config.dnstap.as_ref()?;
    // The server opens the output as this user; one that does not exist is an error of its own.
    let user = match &config.xdp.user {
        Some(name) => accounts::user("xdp.user", name).ok(),
        None => None,
    };
    let problem = dns_dnstap::problem(&dnstap.output, user.as_ref())?;
    Some(format!("dnstap: {problem}"))
}

/// Returns why parts other than DNS would stay off.
fn parts_that_stay_off(config: &Config) -> Vec<String> {
    let mut warnings = Vec::new();
    if let Some(api) = &config.api {
        for problem in unreadable(&api.tls) {
            warnings.push(format!("the API stays off: {problem}"));
        }
    }
    if config.health.enabled
        && let Some(tls) = &config.health.tls
    {
        for problem in unreadable(tls) {
            warnings.push(format!("health checks stay off: {problem}"));
        }
    }
    warnings.extend(foreign_group(config));
    if let Some(folder) = &config.jobs_dir
        && !folder.is_dir()
    {
        warnings.push(format!(
            "{}: no such folder: /local-groups stays off",
            folder.display()
        ));
    }
    warnings
}

fn serves(
    config: &Config,
    initial: InitialFiles,
    listen: Vec<SocketAddr>,
    files: BTreeMap<&'static str, FileState>,
) -> Serves {
    let InitialFiles {
        snapshot,
        handlers,
        addresses: _,
        consul,
    } = initial;
    let xdp = &config.xdp;
    Serves {
        listen,
        records_version: snapshot.version(),
        instances: snapshot.instances().len(),
        domains: snapshot.domains().map(ToString::to_string).collect(),
        aliases: snapshot.alias_count(),
        published_names: dns_core::listing::published_names(&snapshot).count(),
        files,
        handlers: handlers.iter().map(handler_line).collect(),
        consul_names: consul.as_ref().map(|consul| consul_line(&consul.zone)),
        recursor_addresses: config.recursion.recursors.clone(),
        recursion: !config.recursion.disabled,
        upcheck_domains: config
            .upcheck_domains
            .iter()
            .map(ToString::to_string)
            .collect(),
        fast_path_mode: if xdp.enabled { xdp.mode.word() } else { "off" }.to_owned(),
        api_port: config.api.as_ref().map(|api| api.port),
        health_checks: config.health.enabled,
        metrics_address: config.metrics.enabled.then_some(config.metrics.listen),
    }
}

fn handler_line(handler: &HandlerConfig) -> String {
    let source = match &handler.source {
        HandlerSource::Dns(recursors) => format!("dns {}", recursors.join(" ")),
        HandlerSource::Http(server) => format!("http {}", redacted(&server.url)),
        HandlerSource::Deny(Denial::Nxdomain) => "deny NXDOMAIN".to_owned(),
        HandlerSource::Deny(Denial::Refused) => "deny REFUSED".to_owned(),
    };
    let cached = if handler.cache { " (cached)" } else { "" };
    format!("{} -> {source}{cached}", handler.domain)
}

fn consul_line(zone: &dns_consul::Zone) -> String {
    let config = &zone.config;
    let catalog = &zone.catalog;
    let nodes = catalog.node_count();
    let instances = catalog.instance_count();
    let live = match &config.http {
        Some(api) => {
            let addresses: Vec<String> = api.addresses.iter().map(ToString::to_string).collect();
            format!(
                " from files, and the services of Consul at {}",
                addresses.join(", ")
            )
        }
        None => String::new(),
    };
    let datacenter = if config.http.is_some() && config.datacenter_is_default {
        "from the agent"
    } else {
        config.datacenter.as_str()
    };
    format!(
        "{} (datacenter {datacenter}): {nodes} nodes, {instances} instances{live}",
        config.domain
    )
}

/// Returns the unreadable files of the Consul client. Without them Consul is queried without
/// authentication or not at all.
fn unreadable_of_consul(config: &dns_consul::config::Config) -> Vec<String> {
    let Some(api) = &config.http else {
        return Vec::new();
    };
    let (certificate, key) = api
        .identity
        .as_ref()
        .map(|(certificate, key)| (certificate, key))
        .unzip();
    let files = [
        ("consul.token_file", config.token_file.as_ref()),
        ("consul.sources.http.ca_file", api.ca_file.as_ref()),
        ("consul.sources.http.cert_file", certificate),
        ("consul.sources.http.key_file", key),
    ];
    files
        .into_iter()
        .filter_map(|(member, path): (&str, Option<&PathBuf>)| {
            Some(format!("{member}: {}", unreadable_file(path?)?))
        })
        .collect()
}

fn unreadable(tls: &TlsFiles) -> Vec<String> {
    let TlsFiles {
        certificate,
        private_key,
        ca,
    } = tls;
    [certificate, private_key, ca]
        .into_iter()
        .filter_map(|path| unreadable_file(path))
        .collect()
}

fn unreadable_file(path: &Path) -> Option<String> {
    // Opened, not looked at: rights of folders and security modules count as well.
    let problem = File::open(path).err()?;
    Some(format!("{}: cannot be read: {problem}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the first indented block after a heading of docs/file-formats.md.
    fn documented(heading: &str) -> String {
        let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/file-formats.md");
        let page = fs::read_to_string(page).unwrap();
        let (_, section) = page.split_once(&format!("\n## {heading}")).unwrap();
        let lines = section.lines().skip_while(|line| !line.starts_with("    "));
        lines
            .take_while(|line| line.starts_with("    "))
            .collect::<Vec<_>>()
            .join("\n")
    }

    #[test]
    fn documented_formats_are_valid() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        for heading in ["records.json", "Alias files", "Handler files"] {
            fs::write(path(heading), documented(heading)).unwrap();
        }
        // The address in the documentation is not one of this machine.
        fs::write(
            path("Addresses files"),
            documented("Addresses files").replace("10.0.16.5", "127.0.0.2"),
        )
        .unwrap();
        let config = serde_json::json!({
            "address": "127.0.0.1", "port": 53, "records_file": path("records.json"),
            "alias_files_glob": path("Alias files"), "handlers_files_glob": path("Handler files"),
            "addresses_files_glob": path("Addresses files"), "xdp": {"mode": "off"},
        });
        fs::write(path("config.json"), config.to_string()).unwrap();
        let CheckReport {
            errors,
            warnings,
            serves,
            ..
        } = check(&path("config.json"));
        assert_eq!(errors, Vec::<String>::new());
        // Only about the configuration, which has no certificates.
        assert!(
            warnings
                .iter()
                .all(|warning| warning.contains("config.json: ")),
            "{warnings:?}"
        );
        let Serves {
            listen,
            instances,
            aliases,
            handlers,
            ..
        } = serves.unwrap();
        assert_eq!(
            (listen.len(), instances, aliases, handlers.len()),
            (2, 1, 4, 3)
        );
    }
}
