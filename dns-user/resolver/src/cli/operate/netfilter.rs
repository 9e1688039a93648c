//! Whether the packet filter has something to say about queries: replies at an interface
//! are given before it is asked.
//!
//! As its own tools tell, where they are installed and may look: `nft list ruleset`,
//! `iptables-save`, `ip6tables-save`.

use std::{collections::BTreeMap, process::Command};

/// A command, and the reader of what it writes.
type Tool = (&'static [&'static str], fn(&str) -> Chains);

/// The tools.
const TOOLS: [Tool; 3] = [
    (&["nft", "list", "ruleset"], nft_chains),
    (&["iptables-save"], iptables_chains),
    (&["ip6tables-save"], iptables_chains),
];

/// What an operator should know of the filter, one line for each tool's rules.
pub(super) fn notes(ports: &[u16]) -> Vec<String> {
    let told = TOOLS.iter().filter_map(|(command, read)| {
        let output = Command::new(command[0]).args(&command[1..]).output().ok()?;
        let chains = read(&String::from_utf8_lossy(&output.stdout));
        let what = for_ports(&chains, ports)?;
        Some(format!(
            "{}: {what}; queries that interfaces answer do not pass through it (xdp.respect_filters \
             leaves interfaces to userspace)",
            command[0]
        ))
    });
    told.collect()
}

/// Chains by table and name.
type Chains = BTreeMap<(String, String), Chain>;

/// A chain of rules.
#[derive(Debug, Default, PartialEq)]
struct Chain {
    /// Packets to this machine begin here.
    is_input: bool,
    /// What no rule decides is dropped.
    drops: bool,
    /// Its rules, as they were written.
    rules: Vec<String>,
}

/// What the chains of packets to this machine have for these ports; `None`: nothing.
fn for_ports(chains: &Chains, ports: &[u16]) -> Option<String> {
    let inputs = || chains.iter().filter(|(_, chain)| chain.is_input);
    let mut ways: Vec<&(String, String)> = inputs().map(|(key, _)| key).collect();
    let mut next = 0;
    // Every chain that one of them leads to, each once.
    while let Some((table, name)) = ways.get(next).copied() {
        next += 1;
        let rules = chains.get(&(table.clone(), name.clone())).map_or(&[][..], |chain| &chain.rules);
        for word in rules.iter().flat_map(|rule| rule.split_whitespace()) {
            let key = chains.keys().find(|(other, name)| other == table && name == word);
            if let Some(key) = key.filter(|key| !ways.contains(key)) {
                ways.push(key);
            }
        }
    }
    let rules = ways.iter().filter_map(|key| chains.get(*key)).flat_map(|chain| &chain.rules);
    let named = rules.filter(|rule| ports.iter().any(|&port| names_port(rule, port))).count();
    let drops = inputs().any(|(_, chain)| chain.drops);
    match (named, drops) {
        (0, false) => None,
        (0, true) => Some("INPUT drops what no rule admits".to_owned()),
        (named, drops) => {
            let policy = if drops { ", and the policy is to drop" } else { "" };
            Some(format!("INPUT has {named} rules for our port{policy}"))
        }
    }
}

/// Whether a rule compares the destination port with this one, alone, in a list or a range.
fn names_port(rule: &str, port: u16) -> bool {
    let Some((_, after)) = rule.split_once("dport") else { return false };
    let numbers = after.split(|letter: char| !(letter.is_ascii_digit() || "-:".contains(letter)));
    numbers.filter(|text| !text.is_empty()).any(|text| {
        let mut ends = text.split(['-', ':']).map(str::parse::<u16>);
        match (ends.next(), ends.next()) {
            (Some(Ok(from)), Some(Ok(to))) => (from..=to).contains(&port),
            (Some(Ok(one)), None) => one == port,
            _ => false,
        }
    })
}

/// Reads what `nft list ruleset` writes.
fn nft_chains(text: &str) -> Chains {
    let mut chains = Chains::new();
    let (mut table, mut chain): (String, Option<String>) = Default::default();
    for line in text.lines().map(str::trim) {
        let words: Vec<&str> = line.split_whitespace().collect();
        match (words.as_slice(), &chain) {
            (["table", family, name, ..], _) => table = format!("{family} {name}"),
            (["chain", name, "{", ..], _) => {
                chain = Some((*name).to_owned());
                chains.entry((table.clone(), (*name).to_owned())).or_default();
            }
            (["}"], _) => chain = None,
            (words, Some(name)) => {
                let entry = chains.entry((table.clone(), name.clone())).or_default();
                if words.first() == Some(&"type") {
                    entry.is_input = words.windows(2).any(|pair| pair == ["hook", "input"]);
                    entry.drops = line.contains("policy drop");
                } else if !words.is_empty() {
                    entry.rules.push(line.to_owned());
                }
            }
            _ => {}
        }
    }
    chains
}

/// Reads what `iptables-save` writes.
fn iptables_chains(text: &str) -> Chains {
    let mut chains = Chains::new();
    let mut table = String::new();
    for line in text.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words.as_slice() {
            [first, ..] if first.starts_with('*') => table = first[1..].to_owned(),
            [first, policy, ..] if first.starts_with(':') => {
                let name = first[1..].to_owned();
                let entry = chains.entry((table.clone(), name.clone())).or_default();
                entry.is_input = name == "INPUT";
                entry.drops = entry.is_input && *policy == "DROP";
            }
            ["-A", name, ..] => {
                let entry = chains.entry((table.clone(), (*name).to_owned())).or_default();
                entry.rules.push(words[2..].join(" "));
            }
            _ => {}
        }
    }
    chains
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_of_nft_for_the_port_are_found_also_behind_a_jump() {
        let text = "table inet filter {\n\tset blocked {\n\t\ttype ipv4_addr\n\t}\n\n\tchain input {\n\
            \t\ttype filter hook input priority filter; policy accept;\n\t\tct state established accept\n\
            \t\tjump dns\n\t}\n\n\tchain dns {\n\t\tip saddr 10.0.0.0/8 udp dport { 53, 853 } accept\n\
            \t\tudp dport 50-60 drop\n\t}\n\n\tchain other {\n\t\tudp dport 53 drop\n\t}\n\n\tchain forward {\n\
            \t\ttype filter hook forward priority filter; policy drop;\n\t}\n}\n";
        let chains = nft_chains(text);
        assert_eq!(for_ports(&chains, &[53]).unwrap(), "INPUT has 2 rules for our port");
        assert_eq!(for_ports(&chains, &[853]).unwrap(), "INPUT has 1 rules for our port");
        assert_eq!(for_ports(&chains, &[5353]), None, "other chains are not passed by");
    }

    #[test]
    fn a_policy_of_dropping_is_told() {
        let nft =
            "table ip filter {\n chain INPUT {\n type filter hook input priority 0; policy drop;\n }\n}\n";
        assert_eq!(for_ports(&nft_chains(nft), &[53]).unwrap(), "INPUT drops what no rule admits");
        let iptables = "*filter\n:INPUT DROP [0:0]\n:FORWARD ACCEPT [0:0]\n:DNS - [0:0]\n\
            -A INPUT -j DNS\n-A DNS -p udp -m udp --dport 53 -j ACCEPT\n-A FORWARD -p udp --dport 54 -j DROP\nCOMMIT\n";
        let chains = iptables_chains(iptables);
        assert_eq!(
            for_ports(&chains, &[53]).unwrap(),
            "INPUT has 1 rules for our port, and the policy is to drop"
        );
        assert_eq!(for_ports(&chains, &[54]).unwrap(), "INPUT drops what no rule admits");
    }

    #[test]
    fn without_rules_nothing_is_told() {
        for text in ["", "table ip nat {\n}\n", "*filter\n:INPUT ACCEPT [0:0]\nCOMMIT\n"] {
            assert_eq!(for_ports(&nft_chains(text), &[53]), None);
            assert_eq!(for_ports(&iptables_chains(text), &[53]), None);
        }
    }
}
