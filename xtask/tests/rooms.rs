//! No cycles between rooms: the top-level modules of a crate depend on each other in one direction.
//! Dependencies are read from the source as paths that start with `crate::`.

#![expect(clippy::unwrap_used, reason = "a test that cannot read its input has failed")]

mod sources;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

/// Known cycles: a crate, and the rooms in its cycles. The list only shrinks: a resolved cycle must
/// be removed from it.
const KNOWN: &[(&str, &[&str])] = &[];

/// Dependencies of each room.
type Uses = BTreeMap<String, BTreeSet<String>>;

#[test]
fn rooms_have_no_cycles() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut known: BTreeMap<&str, &[&str]> = KNOWN.iter().copied().collect();
    let mut new = Vec::new();
    for (name, sources) in crates(&root) {
        let uses = uses(&sources);
        let known = known.remove(name.as_str());
        let circles = find_circles(&uses);
        assert!(
            known.is_none() || !circles.is_empty(),
            "{name} has no cycle any more: remove it from the list"
        );
        for rooms in circles {
            if !known.is_some_and(|known| rooms.iter().all(|room| known.contains(&room.as_str()))) {
                new.push(format!("{name}: {}", describe(&rooms, &uses)));
            }
        }
    }
    assert!(new.is_empty(), "rooms in a dependency cycle:\n{}", new.join("\n"));
    assert!(known.is_empty(), "these crates no longer exist; remove them from the list: {known:?}");
}

/// Returns the crates of the product with their source folders.
fn crates(root: &Path) -> BTreeMap<String, PathBuf> {
    let mut crates = BTreeMap::new();
    let below_user = fs::read_dir(root.join("dns-user")).unwrap().map(|entry| entry.unwrap().path());
    for folder in [root.join("dns-common"), root.join("dns-ebpf")].into_iter().chain(below_user) {
        if folder.join("Cargo.toml").exists() {
            let name = folder.strip_prefix(root).unwrap().display().to_string();
            crates.insert(name, folder.join("src"));
        }
    }
    assert!(crates.len() >= 4, "{crates:?}");
    crates
}

/// Returns the dependencies between the rooms of a crate. A room is a file or folder of `src`,
/// except for the crate's root files, which join the rooms.
fn uses(sources: &Path) -> Uses {
    let mut uses = Uses::new();
    for entry in fs::read_dir(sources).unwrap() {
        let path = entry.unwrap().path();
        let room = path.file_stem().unwrap().to_str().unwrap().to_owned();
        if ["lib", "main", "bin"].contains(&room.as_str()) {
            continue;
        }
        let used = sources::rust_files(&path).iter().flat_map(|file| uses_of(file)).collect();
        uses.insert(room, used);
    }
    let rooms: BTreeSet<String> = uses.keys().cloned().collect();
    for (room, used) in &mut uses {
        used.retain(|other| other != room && rooms.contains(other));
    }
    uses
}

/// Returns the dependencies of a file; test modules have none.
fn uses_of(path: &Path) -> BTreeSet<String> {
    let is_test = path.components().any(|part| part.as_os_str() == "tests")
        || path.file_stem().is_some_and(|stem| stem.to_string_lossy().ends_with("tests"));
    if is_test {
        return BTreeSet::new();
    }
    let text = fs::read_to_string(path).unwrap();
    let code: String = text
        .lines()
        // Tests are at the end of a file.
        .take_while(|line| line.trim() != "#[cfg(test)]")
        .filter(|line| !line.trim_start().starts_with("//"))
        .flat_map(|line| [line, "\n"])
        .collect();
    paths(&code)
}

/// Returns the first path segments after `crate::`, also inside `crate::{...}`.
fn paths(code: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for (at, prefix) in code.match_indices("crate::") {
        let rest = &code[at + prefix.len()..];
        match rest.strip_prefix('{') {
            Some(list) => found.extend(heads_of_list(list)),
            None => drop(found.insert(word(rest))),
        }
    }
    found
}

/// Returns the first path segments in `{a::b, c::{d, e}, f}`, after its opening brace.
fn heads_of_list(list: &str) -> Vec<String> {
    let mut heads = Vec::new();
    let (mut depth, mut begins) = (1, true);
    for (at, character) in list.char_indices() {
        match character {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 1 => begins = true,
            _ if begins && !character.is_whitespace() => {
                heads.push(word(&list[at..]));
                begins = false;
            }
            _ => {}
        }
        if depth == 0 {
            break;
        }
    }
    heads
}

/// Returns the word at the start of a text.
fn word(text: &str) -> String {
    text.chars().take_while(|character| character.is_alphanumeric() || *character == '_').collect()
}

/// Returns the strongly connected sets of two or more rooms.
fn find_circles(uses: &Uses) -> BTreeSet<BTreeSet<String>> {
    let reached: BTreeMap<&String, BTreeSet<String>> =
        uses.keys().map(|room| (room, reachable(uses, room))).collect();
    let circle_of = |room: &String| -> BTreeSet<String> {
        let back = |other: &&String| reached[room].contains(*other) && reached[*other].contains(room);
        uses.keys().filter(back).cloned().collect()
    };
    uses.keys().map(circle_of).filter(|circle| circle.len() > 1).collect()
}

/// Returns the direct and indirect dependencies of a room.
fn reachable(uses: &Uses, from: &str) -> BTreeSet<String> {
    let mut reached = BTreeSet::new();
    let mut waiting = vec![from.to_owned()];
    while let Some(room) = waiting.pop() {
        for other in &uses[&room] {
            if reached.insert(other.clone()) {
                waiting.push(other.clone());
            }
        }
    }
    reached
}

/// Describes the dependencies within a cycle.
fn describe(rooms: &BTreeSet<String>, uses: &Uses) -> String {
    let ways = rooms.iter().flat_map(|room| {
        let within = uses[room].intersection(rooms);
        within.map(move |other| format!("{room} uses {other}"))
    });
    ways.collect::<Vec<_>>().join(", ")
}

#[test]
fn cycles_and_paths_are_found() {
    let code = "use crate::{a::b, c::{d, e},\n f};\nuse crate::g::h;\nlet x = crate::i();\n";
    assert_eq!(paths(code), BTreeSet::from(["a", "c", "f", "g", "i"].map(str::to_owned)));
    let uses = |pairs: &[(&str, &[&str])]| -> Uses {
        let owned = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        pairs.iter().map(|(room, used)| ((*room).to_owned(), owned(used))).collect()
    };
    assert!(find_circles(&uses(&[("a", &["b", "c"]), ("b", &["c"]), ("c", &[])])).is_empty());
    let circle = uses(&[("a", &["b"]), ("b", &["c"]), ("c", &["a"]), ("d", &["a"])]);
    assert_eq!(Vec::from_iter(find_circles(&circle)), [BTreeSet::from(["a", "b", "c"].map(str::to_owned))]);
}
