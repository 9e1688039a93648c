//! Places: the distinct combinations of instance group, network, deployment and domain, as in the
//! long form of a name.

use std::collections::HashMap;

use smallvec::SmallVec;

use super::columns::{Dictionary, Postings, Symbol};
use crate::query::Pattern;

/// The place of an instance; usually shared by many rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Place {
    pub(crate) instance_group: Symbol,
    pub(crate) network: Symbol,
    pub(crate) deployment: Symbol,
    /// Symbol in the fleet's domains.
    pub(crate) domain: Symbol,
}

/// Number of a place in [`Places`].
pub(crate) type PlaceNumber = u32;

/// Collects the places while rows are added; fields correspond to [`Places`].
#[derive(Debug, Default)]
pub(crate) struct PlacesBuilder {
    instance_groups: Dictionary,
    networks: Dictionary,
    deployments: Dictionary,
    list: Vec<Place>,
    numbers: HashMap<Place, PlaceNumber, foldhash::fast::FixedState>,
}

impl PlacesBuilder {
    /// Returns the number of a place, adding it if it is new.
    pub(crate) fn number(
        &mut self,
        instance_group: &str,
        network: &str,
        deployment: &str,
        domain: Symbol,
    ) -> PlaceNumber {
        let Self { instance_groups, networks, deployments, list, numbers } = self;
        let place = Place {
            instance_group: instance_groups.intern(instance_group),
            network: networks.intern(network),
            deployment: deployments.intern(deployment),
            domain,
        };
        *numbers.entry(place).or_insert_with(|| {
            list.push(place);
            (list.len() - 1) as PlaceNumber
        })
    }

    pub(crate) fn build(self) -> Places {
        let Self { instance_groups, networks, deployments, list, numbers } = self;
        let by = |symbols: usize, symbol: fn(&Place) -> Symbol| {
            let pairs = list.iter().enumerate();
            Postings::new(symbols, pairs.map(move |(number, place)| (symbol(place), number as PlaceNumber)))
        };
        Places {
            by_instance_group: by(instance_groups.len(), |place| place.instance_group),
            by_deployment: by(deployments.len(), |place| place.deployment),
            instance_groups,
            networks,
            deployments,
            list,
            numbers,
        }
    }
}

/// All places of the fleet, searchable by names and patterns.
#[derive(Debug)]
pub(crate) struct Places {
    pub(crate) instance_groups: Dictionary,
    pub(crate) networks: Dictionary,
    pub(crate) deployments: Dictionary,
    list: Vec<Place>,
    /// Number of each place, for lookups by three exact names.
    numbers: HashMap<Place, PlaceNumber, foldhash::fast::FixedState>,
    by_instance_group: Postings,
    by_deployment: Postings,
}

impl Places {
    /// Returns the number of places.
    pub(crate) fn len(&self) -> usize {
        self.list.len()
    }

    /// Returns the place with this number.
    pub(crate) fn get(&self, number: PlaceNumber) -> Place {
        self.list[number as usize]
    }

    /// Returns the places of a domain that match the patterns for instance group, network and
    /// deployment, in ascending order.
    ///
    /// Three exact names, the usual case, are found by hash. Otherwise the candidates come from the
    /// instance group or the deployment, whichever leaves fewer; only if both are `*` are all
    /// places scanned.
    pub(crate) fn find(&self, domain: Symbol, patterns: &[Pattern<'_>; 3]) -> SmallVec<[PlaceNumber; 4]> {
        let [instance_group, network, deployment] = patterns;
        if let (Pattern::Exact(instance_group), Pattern::Exact(network), Pattern::Exact(deployment)) =
            (instance_group, network, deployment)
        {
            let place = || {
                let instance_group = self.instance_groups.find(instance_group)?;
                let network = self.networks.find(network)?;
                let deployment = self.deployments.find(deployment)?;
                self.numbers.get(&Place { instance_group, network, deployment, domain }).copied()
            };
            return place().into_iter().collect();
        }
        let by_instance_group =
            Candidates::of(&self.instance_groups, &self.by_instance_group, instance_group);
        let by_deployment = Candidates::of(&self.deployments, &self.by_deployment, deployment);
        let candidates = match (by_instance_group, by_deployment) {
            (Some(one), Some(other)) => Some(if other.len() < one.len() { other } else { one }),
            (one, other) => one.or(other),
        };
        let fits = |number: &PlaceNumber| {
            let place = self.get(*number);
            place.domain == domain
                && instance_group.fits(self.instance_groups.text(place.instance_group).as_bytes())
                && network.fits(self.networks.text(place.network).as_bytes())
                && deployment.fits(self.deployments.text(place.deployment).as_bytes())
        };
        let mut found: SmallVec<[PlaceNumber; 4]> = match candidates {
            Some(Candidates { symbols, postings }) => {
                symbols.iter().flat_map(|&symbol| postings.rows(symbol)).copied().filter(fits).collect()
            }
            None => (0..self.list.len() as PlaceNumber).filter(fits).collect(),
        };
        found.sort_unstable();
        found
    }
}

/// The places that match one pattern.
struct Candidates<'p> {
    symbols: SmallVec<[Symbol; 1]>,
    postings: &'p Postings,
}

impl<'p> Candidates<'p> {
    /// Returns the places whose name matches; `None`: all match.
    fn of(names: &Dictionary, postings: &'p Postings, pattern: &Pattern<'_>) -> Option<Self> {
        let symbols = match *pattern {
            Pattern::Any => return None,
            Pattern::Nothing => SmallVec::new(),
            Pattern::Exact(name) => names.find(name).into_iter().collect(),
            Pattern::Prefix(prefix) => names.starting_with(prefix).into(),
            Pattern::Suffix(suffix) => names.ending_with(suffix).into(),
        };
        Some(Self { symbols, postings })
    }

    /// Returns the number of candidates.
    fn len(&self) -> usize {
        self.symbols.iter().map(|&symbol| self.postings.rows(symbol).len()).sum()
    }
}
