//! Registers the server with systemd-resolved for the domains of the fleet: a dummy interface with
//! the server's address and routing domains (`resolvectl(1)`), which follow the records and
//! handlers.

use std::net::IpAddr;

use super::{SystemError, run, run_while_stopping};

/// The interface, named as in bosh-dns, so that this server takes over an existing one.
const INTERFACE: &str = "bosh-dns";

/// Keeps systemd-resolved's configuration up to date.
#[derive(Debug)]
pub struct Resolved {
    /// Address of the server.
    address: IpAddr,
    /// Whether this process has created the interface.
    made: bool,
    /// The last domains set; `None` before the first call.
    told: Option<Vec<String>>,
}

impl Resolved {
    /// Prepares for a server at `address` without changing anything.
    pub fn new(address: IpAddr) -> Self {
        Self { address, made: false, told: None }
    }

    /// Creates the interface if it does not exist, and configures it and `domains` in
    /// systemd-resolved if they have changed. A restarted systemd-resolved is configured again.
    pub fn apply(&mut self, domains: &[String]) -> Result<(), SystemError> {
        let address = self.address.to_string();
        if run("ip", &["link", "show", "dev", INTERFACE]).is_err() {
            run("ip", &["link", "add", INTERFACE, "type", "dummy"])?;
            (self.made, self.told) = (true, None);
        }
        let shown = run("ip", &["-oneline", "address", "show", "dev", INTERFACE])?;
        if !shown.contains(&format!(" {address}/")) {
            let prefix = if self.address.is_ipv4() { 32 } else { 128 };
            run("ip", &["address", "add", &format!("{address}/{prefix}"), "dev", INTERFACE])?;
            run("ip", &["link", "set", INTERFACE, "up"])?;
        }
        let asked = run("resolvectl", &["dns", INTERFACE])?;
        let knows = asked.split_whitespace().any(|word| word == address);
        if knows && self.told.as_deref() == Some(domains) {
            return Ok(());
        }
        run("resolvectl", &["dns", INTERFACE, &address])?;
        run("resolvectl", &["default-route", INTERFACE, "no"])?;
        let routing: Vec<String> = domains.iter().map(|domain| format!("~{domain}")).collect();
        let mut arguments = vec!["domain", INTERFACE];
        arguments.extend(routing.iter().map(String::as_str));
        if routing.is_empty() {
            // Without a domain the command would only list the current ones.
            arguments.push("");
        }
        run("resolvectl", &arguments)?;
        self.told = Some(domains.to_vec());
        Ok(())
    }

    /// Removes the interface, with its configuration in systemd-resolved, if this process has
    /// created it.
    pub fn put_back(&mut self) -> Result<(), SystemError> {
        if !self.made {
            return run_while_stopping("resolvectl", &["revert", INTERFACE]);
        }
        run_while_stopping("ip", &["link", "delete", INTERFACE])
    }
}
