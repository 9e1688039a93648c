//! Read permissions on a catalog.

/// Read permissions of the token in use; unreadable entries count as unregistered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Visibility {
    /// Names of nodes; `*`: all.
    pub nodes: Vec<String>,
    /// Names of services; `*`: all.
    pub services: Vec<String>,
}

impl Visibility {
    /// Returns permissions for everything.
    pub fn all() -> Self {
        Self { nodes: vec!["*".to_owned()], services: vec!["*".to_owned()] }
    }

    /// Whether a node of this name may be read.
    pub(crate) fn node(&self, name: &str) -> bool {
        contains(&self.nodes, name)
    }

    /// Whether a service of this name may be read.
    pub fn service(&self, name: &str) -> bool {
        contains(&self.services, name)
    }
}

/// Whether `name` is in the list, or all are.
fn contains(list: &[String], name: &str) -> bool {
    list.iter().any(|listed| listed == "*" || listed.eq_ignore_ascii_case(name))
}
