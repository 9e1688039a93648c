//! Read permissions on a catalog.

/// Read permissions of the token in use; unreadable entries are treated as unregistered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Visibility {
    /// Names of readable nodes; `*` for all.
    pub nodes: Vec<String>,
    /// Names of readable services; `*` for all.
    pub services: Vec<String>,
}

impl Visibility {
    /// Returns permissions for everything.
    pub fn all() -> Self {
        Self { nodes: vec!["*".to_owned()], services: vec!["*".to_owned()] }
    }

    /// Returns whether the node with this name is readable.
    pub(crate) fn node(&self, name: &str) -> bool {
        contains(&self.nodes, name)
    }

    /// Returns whether the service with this name is readable.
    pub fn service(&self, name: &str) -> bool {
        contains(&self.services, name)
    }
}

/// Returns whether the list contains `name` or `*`.
fn contains(list: &[String], name: &str) -> bool {
    list.iter().any(|listed| listed == "*" || listed.eq_ignore_ascii_case(name))
}
