//! Names to publish before the first query. Pure; above `resolve`, because instances of pattern
//! aliases are found by resolution.

use std::slice;

use smallvec::SmallVec;

use crate::{
    catalog::{FileTarget, InstanceIndex, NO_VALUE, PlaceNumber, Row, Snapshot, Symbol},
    name::Name,
    query::QueryTarget,
    resolve::select,
};

/// Returns the names to publish before the first query, most useful first and without duplicates:
/// aliases, groups, then instances.
pub fn published_names(snapshot: &Snapshot) -> impl Iterator<Item = Name> {
    let others = groups(snapshot)
        .chain(places(snapshot))
        .chain(long_instances(snapshot))
        .chain(short_instances(snapshot));
    // An alias takes precedence over any other meaning of its name.
    let others = others.filter(|name| !snapshot.aliases().covers(name));
    snapshot
        .aliases()
        .exact
        .keys()
        .cloned()
        .chain(aliases_below(snapshot))
        .chain(others)
}

/// Returns the names that are listed because of a row, aliases of placeholders excepted.
pub(crate) fn names_of_row(snapshot: &Snapshot, row: Row) -> Vec<Name> {
    let instances = snapshot.instance_index();
    let place = instances.row_places[row as usize];
    let id = plain(instances.id.text(row));
    // A first label with `q-` is a filter, so it names no instance.
    let own = id.filter(|id| !id.starts_with(b"q-"));
    let mut names: Vec<Name> = long(snapshot, b"q-s0", place).into_iter().collect();
    names.extend(own.and_then(|id| long(snapshot, id, place)));
    let number = (instances.num_id.values[row as usize] != NO_VALUE)
        .then(|| format!("q-m{}s0", instances.num_id.text(row)));
    if let Some(domain) = instances.domain_names.name(instances.place_of(row).domain) {
        let labels = [Some(&b"q-s0"[..]), number.as_deref().and_then(plain), own];
        for &group in instances.groups_of(row) {
            let group = format!("q-g{}", instances.groups.text(group));
            let Some(group) = plain(&group) else { continue };
            for label in labels.into_iter().flatten() {
                names.extend(domain.with_labels([label, group]));
            }
        }
    }
    for (parent, targets) in &snapshot.aliases().below {
        if targets
            .iter()
            .any(|target| selects(instances, target, id, row))
        {
            names.extend(id.and_then(|id| parent.with_labels([id])));
        }
    }
    names
}

/// Returns whether an alias with the instance's id as its first label has this row.
fn selects(instances: &InstanceIndex, target: &FileTarget, id: Option<&[u8]>, row: Row) -> bool {
    let FileTarget::Label(rest) = target else {
        return false;
    };
    let Some(name) = id.and_then(|id| rest.with_labels([id])) else {
        return false;
    };
    match QueryTarget::read(&name, &instances.domain_names) {
        Ok(question @ QueryTarget::Within(..)) => {
            select(instances, &question, None).rows.contains(&row)
        }
        _ => false,
    }
}

/// Returns the names below aliases `_.x`, with the instance ids found by their targets `_.y`.
fn aliases_below(snapshot: &Snapshot) -> impl Iterator<Item = Name> {
    let instances = snapshot.instance_index();
    snapshot
        .aliases()
        .below
        .iter()
        .flat_map(move |(parent, targets)| {
            let mut ids = Vec::new();
            for target in targets {
                ids.extend(ids_of(instances, target));
            }
            // An instance has a row for each of its networks.
            ids.sort_unstable();
            ids.dedup();
            ids.into_iter().filter_map(move |id| {
                let name = parent.with_labels([plain(instances.id.dictionary.text(id))?])?;
                (!snapshot.aliases().exact.contains_key(&name)).then_some(name)
            })
        })
}

/// Returns the ids of the instances that a target `_.y` may select.
fn ids_of(instances: &InstanceIndex, target: &FileTarget) -> Vec<Symbol> {
    let FileTarget::Label(rest) = target else {
        return Vec::new();
    };
    // `s4` keeps every instance: health changes later, the listed names do not.
    let Some(all) = rest.with_labels([&b"q-s4"[..]]) else {
        return Vec::new();
    };
    match QueryTarget::read(&all, &instances.domain_names) {
        // Outside the domains, ids of the whole fleet would match: too many to publish unasked.
        Ok(question @ QueryTarget::Within(..)) => {
            let mut ids = Vec::new();
            for row in select(instances, &question, None).rows {
                ids.push(instances.id.values[row as usize]);
            }
            ids
        }
        _ => Vec::new(),
    }
}

/// Returns `q-s0.q-g<id>.<domain>` for each group.
fn groups(snapshot: &Snapshot) -> impl Iterator<Item = Name> {
    let instances = snapshot.instance_index();
    instances.groups.iter().flat_map(move |(group, text)| {
        let mut domains = Vec::new();
        for &row in instances.by_group.rows(group) {
            domains.push(instances.place_of(row).domain);
        }
        domains.sort_unstable();
        domains.dedup();
        let label = format!("q-g{text}");
        domains.into_iter().filter_map(move |domain| {
            let domain = instances.domain_names.name(domain)?;
            domain.with_labels([b"q-s0", plain(&label)?])
        })
    })
}

/// Returns `q-s0.<instance-group>.<network>.<deployment>.<domain>` for each place.
fn places(snapshot: &Snapshot) -> impl Iterator<Item = Name> {
    (0..snapshot.instance_index().places.len() as PlaceNumber)
        .filter_map(move |place| long(snapshot, b"q-s0", place))
}

/// Returns `<id>.<instance-group>.<network>.<deployment>.<domain>` for each instance.
fn long_instances(snapshot: &Snapshot) -> impl Iterator<Item = Name> {
    let instances = snapshot.instance_index();
    distinct(snapshot, move |row| {
        slice::from_ref(&instances.row_places[row as usize])
    })
    .filter_map(move |(id, place)| {
        let label =
            plain(instances.id.dictionary.text(id)).filter(|label| !label.starts_with(b"q-"))?;
        long(snapshot, label, place)
    })
}

/// Returns `q-m<number>s0.q-g<group>.<domain>`, as in links, and `<id>.q-g<group>.<domain>`.
fn short_instances(snapshot: &Snapshot) -> impl Iterator<Item = Name> {
    let instances = snapshot.instance_index();
    // Buffers reused for every name.
    let mut number_label = String::new();
    let mut group_label = String::new();
    distinct(snapshot, move |row| instances.groups_of(row)).flat_map(move |(id, group)| {
        let rows = instances.id.rows(id);
        let row = rows
            .iter()
            .copied()
            .find(|&row| instances.groups_of(row).contains(&group));
        let names = row.map_or([None, None], |row| {
            let number = set(&mut number_label, ["q-m", instances.num_id.text(row), "s0"]);
            let number = plain(number).filter(|_| is_first_with_number(instances, row, group));
            let id = plain(instances.id.dictionary.text(id)).filter(|id| !id.starts_with(b"q-"));
            let group = plain(set(&mut group_label, ["q-g", instances.groups.text(group)]));
            let domain = instances.domain_names.name(instances.place_of(row).domain);
            [number, id].map(|label| domain?.with_labels([label?, group?]))
        });
        names.into_iter().flatten()
    })
}

/// Replaces the content of the buffer by the concatenation of `texts`.
fn set<'b, const N: usize>(buffer: &'b mut String, texts: [&str; N]) -> &'b str {
    buffer.clear();
    buffer.extend(texts);
    buffer
}

/// Returns whether this is the first row with its number in that group and domain. Directors assign
/// unique numbers, but the file is not checked for it.
fn is_first_with_number(instances: &InstanceIndex, row: Row, group: Symbol) -> bool {
    let number = instances.num_id.values[row as usize];
    if number == NO_VALUE {
        return false;
    }
    let domain = instances.place_of(row).domain;
    instances.num_id.rows(number).iter().find(|&&other: &&Row| {
        instances.place_of(other).domain == domain && instances.groups_of(other).contains(&group)
    }) == Some(&row)
}

/// Returns the distinct (id, value) pairs in the order of the rows.
fn distinct<'a>(
    snapshot: &'a Snapshot,
    values: impl Fn(Row) -> &'a [u32] + 'a,
) -> impl Iterator<Item = (u32, u32)> + 'a {
    let instances = snapshot.instance_index();
    (0..instances.id.dictionary.len() as u32).flat_map(move |id| {
        // An instance has a row for each of its networks, mostly with the same groups.
        let mut found: SmallVec<[u32; 8]> = SmallVec::new();
        for &row in instances.id.rows(id) {
            found.extend_from_slice(values(row));
        }
        found.sort_unstable();
        found.dedup();
        found.into_iter().map(move |value| (id, value))
    })
}

/// Builds the long form with this first label.
fn long(snapshot: &Snapshot, first: &[u8], place: PlaceNumber) -> Option<Name> {
    let instances = snapshot.instance_index();
    let place = instances.places.get(place);
    // `q-g...` would be parsed as a group id, so mostly nothing matches.
    let instance_group = plain(instances.places.instance_groups.text(place.instance_group))
        .filter(|name| !name.starts_with(b"q-g"))?;
    let labels = [
        first,
        instance_group,
        plain(instances.places.networks.text(place.network))?,
        plain(instances.places.deployments.text(place.deployment))?,
    ];
    instances
        .domain_names
        .name(place.domain)?
        .with_labels(labels)
}

/// Returns the text as a label that a query can contain. Strings with capitals, dots or an invalid
/// length are not reachable by these names.
fn plain(text: &str) -> Option<&[u8]> {
    let mut has_odd = false;
    // Without an early exit the loop is vectorised.
    for byte in text.bytes() {
        has_odd |= byte.is_ascii_uppercase() | (byte == b'.') | (byte == b'*');
    }
    ((1..=63).contains(&text.len()) && !has_odd).then_some(text.as_bytes())
}

#[cfg(test)]
mod tests;
