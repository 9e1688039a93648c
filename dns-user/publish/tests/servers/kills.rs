//! `bosh-dns-publish run` killed at random moments while clients of its API and its webhook port write.

use std::{
    collections::BTreeMap,
    fs,
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    path::Path,
    thread,
    time::Duration,
};

use serde_json::{Value, json};
use test_support::free_address;

use crate::publisher::{Publisher, Running};

const RECORDS: &str = "/v2/projects/default/dns-update-records";

const MEDIA_TYPE: &str = "application/external.dns.webhook+json;version=1";

/// Ending of the names of aliases.
const DOMAIN: &str = ".apps.internal";

/// Clients of the API, each with names of its own.
const CLIENTS: usize = 3;

/// Names of a client.
const NAMES: usize = 3;

/// Longest time that the clients write before the kill.
const MAX_WRITING: Duration = Duration::from_millis(60);

/// States that a name may have after the kill: the acknowledged one, and one that was sent without an answer.
/// A state is the text that a client wrote; `None` for a deleted name.
type Possible = Vec<Option<String>>;

/// Possible states by name of a resource or an alias.
type Known = BTreeMap<String, Possible>;

#[test]
fn acknowledged_changes_survive_kills() {
    let rounds: usize = std::env::var("PUBLISH_KILLS").map_or(20, |text| text.parse().unwrap());
    let publisher = Publisher::new();
    let address = free_address();
    configure(&publisher, address);
    let mut known = Known::new();
    for round in 0..=rounds {
        let running = publisher.start();
        let found = state(&running, address);
        for (name, possible) in &known {
            let now = found.get(name).cloned();
            assert!(
                possible.contains(&now),
                "round {round}: {name} is {now:?} after the kill, and was one of {possible:?}"
            );
        }
        for (name, text) in &found {
            assert!(
                known.contains_key(name),
                "round {round}: {name} is {text:?} and was never written"
            );
        }
        assert_eq!(leftovers(publisher.folder.path()), [""; 0], "round {round}");
        for (name, possible) in &mut known {
            *possible = vec![found.get(name).cloned()];
        }
        if round < rounds {
            write_until_killed(running, round, address, &mut known);
        }
    }
}

fn configure(publisher: &Publisher, address: SocketAddr) {
    fs::create_dir(publisher.path("aliases")).unwrap();
    let server = json!({"port": 53, "alias_files_glob": publisher.path("aliases/*"), "control": {"socket": publisher.path("none.sock")}});
    publisher.write("config.json", &server.to_string());
    let config = json!({
        "documents": ["documents"],
        "store": "state/store",
        "control": {"socket": "control.sock"},
        "server": "config.json",
        "webhook": {
            "address": address.to_string(),
            "domains": ["apps.internal"],
            "alias_file": publisher.path("aliases/external-dns.json"),
        },
    });
    publisher.write("publish.yml", &config.to_string());
}

/// Returns the unfinished files below a folder.
fn leftovers(folder: &Path) -> Vec<String> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(leftovers(&path));
        } else if path.display().to_string().contains(".part-") {
            found.push(path.display().to_string());
        }
    }
    found
}

/// Returns the texts of all resources and aliases.
fn state(running: &Running, webhook: SocketAddr) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    let (code, resources) = running.get(RECORDS);
    assert_eq!(code, 200);
    for resource in resources.as_array().unwrap() {
        let metadata = &resource["metadata"];
        let text = |member: &str| metadata[member].as_str().unwrap().to_owned();
        found.insert(text("name"), text("description"));
    }
    // It opens after the control socket.
    running.wait_until("the webhook's port", || TcpStream::connect(webhook).is_ok());
    let listed = exchange(webhook, "GET", "/records", "").unwrap();
    let endpoints: Vec<Value> = serde_json::from_str(&listed.1).unwrap();
    for endpoint in endpoints {
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        found.insert(text(&endpoint["dnsName"]), text(&endpoint["targets"][0]));
    }
    // The server reads aliases from this file.
    let aliases = running.folder.join("aliases/external-dns.json");
    if let Ok(bytes) = fs::read(aliases) {
        let aliases: BTreeMap<String, Vec<String>> = serde_json::from_slice(&bytes).unwrap();
        for (name, targets) in &aliases {
            assert_eq!(found.get(name), targets.first(), "{name} in the alias file");
        }
    }
    found
}

/// A change that a client sent.
struct Sent {
    name: String,
    wanted: Option<String>,
    is_acknowledged: bool,
}

fn write_until_killed(running: Running, round: usize, webhook: SocketAddr, known: &mut Known) {
    let aliases: BTreeMap<String, String> = known
        .iter()
        .filter(|(name, _)| name.ends_with(DOMAIN))
        .filter_map(|(name, possible)| Some((name.clone(), possible[0].clone()?)))
        .collect();
    let sent: Vec<Sent> = thread::scope(|scope| {
        let running = &running;
        let mut clients = Vec::new();
        for client in 0..CLIENTS {
            clients.push(scope.spawn(move || write_resources(running, client, round)));
        }
        clients.push(scope.spawn(move || write_aliases(webhook, aliases, round)));
        let limit = u64::try_from(MAX_WRITING.as_micros()).unwrap();
        thread::sleep(Duration::from_micros(fastrand::u64(0..limit)));
        running.kill_now();
        let mut sent = Vec::new();
        for client in clients {
            sent.extend(client.join().unwrap());
        }
        sent
    });
    running.kill();
    for Sent {
        name,
        wanted,
        is_acknowledged,
    } in sent
    {
        let possible = known.entry(name).or_insert_with(|| vec![None]);
        if is_acknowledged {
            possible.clear();
        }
        possible.push(wanted);
    }
}

/// Puts and deletes resources until the publisher is dead.
fn write_resources(running: &Running, client: usize, round: usize) -> Vec<Sent> {
    let mut sent = Vec::new();
    loop {
        let name = format!("c{client}-{}", fastrand::usize(..NAMES));
        let path = format!("{RECORDS}/{name}");
        let text = format!("round {round}, change {}", sent.len());
        let wanted = fastrand::bool().then_some(text);
        let answer = if let Some(text) = &wanted {
            let body = json!({
                "metadata": {"name": name, "description": text},
                "spec": {"provider": "coredns"},
            });
            running.ask("PUT", &path, Some(&body))
        } else {
            running.ask("DELETE", &path, None)
        };
        let code = answer.map(|(code, _)| code);
        assert!(
            matches!(code, None | Some(200 | 201 | 204 | 404)),
            "{name}: {code:?}"
        );
        sent.push(Sent {
            name,
            wanted,
            is_acknowledged: code.is_some(),
        });
        if code.is_none() {
            return sent;
        }
    }
}

/// Creates, changes and deletes aliases until the publisher is dead.
fn write_aliases(
    webhook: SocketAddr,
    mut current: BTreeMap<String, String>,
    round: usize,
) -> Vec<Sent> {
    let mut sent = Vec::new();
    loop {
        let name = format!("n{}{DOMAIN}", fastrand::usize(..NAMES));
        let turn = sent.len();
        let address = format!("10.{}.{}.{}", round % 256, turn / 256, turn % 256);
        let endpoint =
            |target: &str| json!({"dnsName": name, "recordType": "A", "targets": [target]});
        let before = current.get(&name);
        let wanted = (before.is_none() || fastrand::bool()).then_some(address);
        let message = match (before, &wanted) {
            (Some(before), Some(after)) => {
                json!({"updateOld": [endpoint(before)], "updateNew": [endpoint(after)]})
            }
            (Some(before), None) => json!({"delete": [endpoint(before)]}),
            (None, Some(after)) => json!({"create": [endpoint(after)]}),
            (None, None) => unreachable!("a missing name is created"),
        };
        let answer = exchange(webhook, "POST", "/records", &message.to_string());
        if let Some((head, body)) = &answer {
            assert!(head.starts_with("HTTP/1.1 204"), "{name}: {head}: {body}");
        }
        match &wanted {
            Some(address) => current.insert(name.clone(), address.clone()),
            None => current.remove(&name),
        };
        sent.push(Sent {
            name,
            wanted,
            is_acknowledged: answer.is_some(),
        });
        if answer.is_none() {
            return sent;
        }
    }
}

/// Sends a request; returns head and body of the response, or `None` if the publisher does not answer.
fn exchange(address: SocketAddr, method: &str, path: &str, body: &str) -> Option<(String, String)> {
    let mut stream = TcpStream::connect(address).ok()?;
    let request = format!(
        "{method} {path} HTTP/1.1\r\nhost: localhost\r\naccept: {MEDIA_TYPE}\r\ncontent-type: {MEDIA_TYPE}\r\n\
         content-length: {}\r\nconnection: close\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(request.as_bytes()).ok()?;
    let mut response = String::new();
    stream.read_to_string(&mut response).ok()?;
    let (head, body) = response.split_once("\r\n\r\n")?;
    Some((head.to_owned(), body.to_owned()))
}
