//! No cycles between modules: the files and folders of every folder depend on each other in one direction.
//! Dependencies are read from the source as paths that start with `crate::`, `super::` or `self::`.

#![expect(
    clippy::unwrap_used,
    reason = "a test that cannot read its input has failed"
)]

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

use crate::sources;

/// Segments of a path.
type Segments = Vec<String>;

/// Dependencies of each module of a folder.
type Uses = BTreeMap<String, BTreeSet<String>>;

#[test]
fn modules_have_no_cycles() {
    let mut found = Vec::new();
    for (name, sources) in crates(sources::root()) {
        for (folder, uses) in uses(&Crate::read(&sources)) {
            let folder = folder.join("::");
            for modules in find_circles(&uses) {
                found.push(format!("{name} {folder}: {}", describe(&modules, &uses)));
            }
        }
    }
    assert!(
        found.is_empty(),
        "modules in a dependency cycle:\n{}",
        found.join("\n")
    );
}

/// Returns the crates of the product with their source folders.
fn crates(root: &Path) -> BTreeMap<String, PathBuf> {
    let mut crates = BTreeMap::new();
    let below_user = fs::read_dir(root.join("dns-user"))
        .unwrap()
        .map(|entry| entry.unwrap().path());
    for folder in [root.join("dns-common"), root.join("dns-ebpf")]
        .into_iter()
        .chain(below_user)
    {
        if folder.join("Cargo.toml").exists() {
            let name = folder.strip_prefix(root).unwrap().display().to_string();
            crates.insert(name, folder.join("src"));
        }
    }
    assert!(crates.len() >= 4, "{crates:?}");
    crates
}

/// Code of a crate by module; root files are the empty path.
struct Crate(BTreeMap<Segments, String>);

impl Crate {
    fn read(sources: &Path) -> Self {
        let mut modules = BTreeMap::new();
        for file in sources::rust_files(sources) {
            let below = file.strip_prefix(sources).unwrap().with_extension("");
            let mut module: Segments = below
                .iter()
                .map(|part| part.to_str().unwrap().to_owned())
                .collect();
            if module[0] == "bin" || is_test(&file) {
                continue;
            }
            if ["mod", "lib", "main"].contains(&module.last().unwrap().as_str()) {
                module.pop();
            }
            modules
                .entry(module)
                .or_insert_with(String::new)
                .push_str(&code(&fs::read_to_string(file).unwrap()));
        }
        Self(modules)
    }

    /// Returns the module below `folder` that a name in it stands for: a module, or what the folder's own file
    /// imports from one.
    fn module_of(&self, folder: &[String], name: &str) -> Option<String> {
        let child = [folder, &[name.to_owned()]].concat();
        if self.0.contains_key(&child) {
            return Some(name.to_owned());
        }
        let imports = self
            .0
            .get(folder)
            .map(|code| imports(code))
            .unwrap_or_default();
        let import = imports
            .into_iter()
            .find(|path| path.last().is_some_and(|last| last == name))?;
        let begin = import.iter().find(|segment| *segment != "self")?;
        self.0
            .contains_key(&[folder, std::slice::from_ref(begin)].concat())
            .then(|| begin.clone())
    }
}

fn is_test(path: &Path) -> bool {
    path.components().any(|part| part.as_os_str() == "tests")
        || path
            .file_stem()
            .is_some_and(|stem| stem.to_string_lossy().ends_with("tests"))
}

/// Returns a file without comments and tests, which are at its end.
fn code(text: &str) -> String {
    text.lines()
        .take_while(|line| line.trim() != "#[cfg(test)]")
        .filter(|line| !line.trim_start().starts_with("//"))
        .flat_map(|line| [line, "\n"])
        .collect()
}

/// Returns the dependencies within each folder of a crate.
fn uses(all: &Crate) -> BTreeMap<Segments, Uses> {
    let mut found: BTreeMap<Segments, Uses> = BTreeMap::new();
    for (module, code) in &all.0 {
        for used in paths(code, module) {
            let same = module
                .iter()
                .zip(&used)
                .take_while(|(one, other)| one == other)
                .count();
            let (Some(from), Some(name)) = (module.get(same), used.get(same)) else {
                continue;
            };
            let folder = module[..same].to_vec();
            if let Some(to) = all.module_of(&folder, name).filter(|to| to != from) {
                let uses = found.entry(folder).or_default();
                uses.entry(to.clone()).or_default();
                uses.entry(from.clone()).or_default().insert(to);
            }
        }
    }
    found
}

/// Returns the paths in the code of a module that start at the crate's root, at a parent or at the module itself,
/// from the root.
fn paths(code: &str, module: &[String]) -> BTreeSet<Segments> {
    let mut found = BTreeSet::new();
    for begin in ["crate::", "super::", "self::"] {
        for (at, _) in code.match_indices(begin) {
            let before = code[..at].chars().next_back();
            // The path goes on from another one, or this is the end of another word.
            if before.is_some_and(|c| c.is_alphanumeric() || c == '_' || c == ':') {
                continue;
            }
            found.extend(
                tree(&code[at..])
                    .0
                    .into_iter()
                    .map(|path| from_root(path, module)),
            );
        }
    }
    found
}

/// Makes a path start at the crate's root.
fn from_root(path: Segments, module: &[String]) -> Segments {
    let mut absolute = module.to_vec();
    let mut rest = path.into_iter().peekable();
    while let Some(word) = rest.next_if(|word| ["crate", "super", "self"].contains(&word.as_str()))
    {
        match word.as_str() {
            "crate" => absolute.clear(),
            "super" => drop(absolute.pop()),
            _ => {}
        }
    }
    absolute.extend(rest);
    absolute
}

/// Returns the imports of a module as paths: `use a::{b, c::d};` is `a::b` and `a::c::d`.
fn imports(code: &str) -> Vec<Segments> {
    let uses = code.match_indices("use ").filter(|(at, _)| {
        let line = code[..*at].rsplit('\n').next().unwrap_or_default().trim();
        line.is_empty() || line.starts_with("pub")
    });
    uses.flat_map(|(at, word)| tree(&code[at + word.len()..]).0)
        .collect()
}

/// Returns the paths of a tree such as `a::{b, c::{d, e}}` at the start of a text, and the text after it.
fn tree(text: &str) -> (Vec<Segments>, &str) {
    let name = word(text);
    let mut rest = &text[name.len()..];
    let mut path: Segments = if name.is_empty() {
        Vec::new()
    } else {
        vec![name.to_owned()]
    };
    if let Some(after) = rest.strip_prefix("::") {
        let (below, after) = tree(after);
        let paths = below
            .into_iter()
            .map(|below| path.iter().cloned().chain(below).collect());
        return (paths.collect(), after);
    }
    if let Some(mut list) = rest.strip_prefix('{').filter(|_| name.is_empty()) {
        let mut paths = Vec::new();
        loop {
            list = list.trim_start();
            if let Some(after) = list.strip_prefix('}') {
                return (paths, after);
            }
            let (found, after) = tree(list);
            paths.extend(found);
            let after = after.trim_start();
            match after.strip_prefix(',') {
                Some(after) => list = after,
                // The end, or no list of names after all.
                None => return (paths, after.strip_prefix('}').unwrap_or(after)),
            }
        }
    }
    if let Some(after) = rest.trim_start().strip_prefix("as ") {
        let alias = word(after.trim_start());
        path.pop();
        path.push(alias.to_owned());
        rest = &after.trim_start()[alias.len()..];
    }
    (vec![path], rest)
}

/// Returns the word at the start of a text.
fn word(text: &str) -> &str {
    let end = text
        .find(|c: char| !(c.is_alphanumeric() || c == '_'))
        .unwrap_or(text.len());
    &text[..end]
}

/// Returns the strongly connected sets of two or more modules.
fn find_circles(uses: &Uses) -> BTreeSet<BTreeSet<String>> {
    let reached: BTreeMap<&String, BTreeSet<String>> = uses
        .keys()
        .map(|module| (module, reachable(uses, module)))
        .collect();
    let circle_of = |module: &String| -> BTreeSet<String> {
        let back =
            |other: &&String| reached[module].contains(*other) && reached[*other].contains(module);
        uses.keys().filter(back).cloned().collect()
    };
    uses.keys()
        .map(circle_of)
        .filter(|circle| circle.len() > 1)
        .collect()
}

/// Returns the direct and indirect dependencies of a module.
fn reachable(uses: &Uses, from: &str) -> BTreeSet<String> {
    let mut reached = BTreeSet::new();
    let mut waiting = vec![from.to_owned()];
    while let Some(module) = waiting.pop() {
        for other in &uses[&module] {
            if reached.insert(other.clone()) {
                waiting.push(other.clone());
            }
        }
    }
    reached
}

/// Describes the dependencies within a cycle.
fn describe(modules: &BTreeSet<String>, uses: &Uses) -> String {
    let ways = modules.iter().flat_map(|module| {
        let within = uses[module].intersection(modules);
        within.map(move |other| format!("{module} uses {other}"))
    });
    ways.collect::<Vec<_>>().join(", ")
}

#[test]
fn cycles_and_paths_are_found() {
    let owned =
        |names: &[&str]| -> Segments { names.iter().map(|name| (*name).to_owned()).collect() };
    let code = "use crate::{a::b, c::{d, e as f},\n g};\nuse super::h;\nlet x = self::i::j(k::super_::l);\n";
    let expected = [
        &["a", "b"][..],
        &["c", "d"],
        &["c", "f"],
        &["g"],
        &["m", "h"],
        &["m", "n", "i", "j"],
    ];
    let expected: BTreeSet<Segments> = expected.iter().map(|path| owned(path)).collect();
    assert_eq!(paths(code, &owned(&["m", "n"])), expected);

    // `b` takes from `a` what the folder imports from it.
    let files = [
        (&[][..], "mod m;"),
        (&["m"], "mod a;\nmod b;\npub use self::a::{Thing, other};"),
        (&["m", "a"], "use super::b::f;"),
        (&["m", "b"], "use super::Thing;"),
    ];
    let all = Crate(
        files
            .iter()
            .map(|(module, code)| (owned(module), (*code).to_owned()))
            .collect(),
    );
    let found = uses(&all);
    let circles = find_circles(&found[&owned(&["m"])]);
    assert_eq!(
        Vec::from_iter(circles),
        [BTreeSet::from(["a", "b"].map(str::to_owned))]
    );

    let uses = |pairs: &[(&str, &[&str])]| -> Uses {
        let set = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        pairs
            .iter()
            .map(|(module, used)| ((*module).to_owned(), set(used)))
            .collect()
    };
    assert!(find_circles(&uses(&[("a", &["b", "c"]), ("b", &["c"]), ("c", &[])])).is_empty());
    let circle = uses(&[("a", &["b"]), ("b", &["c"]), ("c", &["a"]), ("d", &["a"])]);
    assert_eq!(
        Vec::from_iter(find_circles(&circle)),
        [BTreeSet::from(["a", "b", "c"].map(str::to_owned))]
    );
}
