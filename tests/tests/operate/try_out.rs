//! The `try` command, following its own output.

use std::{
    io::{BufRead as _, BufReader},
    net::SocketAddr,
    process::Stdio,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use hickory_proto::rr::RecordType;
use nix::sys::signal::Signal;
use serde_json::Value;
use whole_system_tests::{
    client,
    namespace::Namespace,
    process::{Kept, capture, wait_until},
    requires, server,
};

#[test]
fn try_as_root_uses_interface() -> Result<()> {
    requires!(namespaces, bpf);
    let namespace = Namespace::new("try")?;
    let mut command = namespace.command(server::program()?)?;
    let mut child =
        command.arg("try").stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn()?;
    let said = child.stdout.take().context("no standard output")?;
    let mut tried = Kept::from(child);
    // The printed commands: dig, resolve, top.
    let lines: Vec<String> = BufReader::new(said).lines().take(6).collect::<Result<_, _>>()?;
    let pasted =
        |word: &str| lines.iter().find(|line| line.contains(word)).map(|line| line.trim().to_owned());
    let dig = pasted("dig @").with_context(|| format!("{lines:?}"))?;
    let mut words = dig.split_whitespace().skip(3);
    let (port, name) =
        (words.next().context("no port")?.parse()?, words.next().context("no name")?.to_owned());
    let top = pasted(" top ").context("no top")?;
    let config = top.rsplit(' ').next().context("no configuration")?.to_owned();

    let server = SocketAddr::from(([127, 0, 0, 1], port));
    let query = client::query(&format!("{name}."), RecordType::A, None)?.to_vec()?;
    let done = AtomicBool::new(false);
    let shown = thread::scope(|scope| {
        scope.spawn(|| {
            namespace.run(|| {
                while !done.load(Ordering::Relaxed) {
                    // The server may still be starting.
                    let _ = client::ask_raw(server, &query, Duration::from_millis(200));
                    thread::sleep(Duration::from_millis(1));
                }
            })
        });
        let shown = wait_until("top to show the fast path", Duration::from_secs(60), || {
            let looked = namespace.command(server::program().unwrap_or_default());
            let looked = looked
                .and_then(|mut top| capture(top.args(["top", "--once", "--json", "--config", &config])));
            let looked =
                looked.ok().and_then(|text| serde_json::from_str::<Value>(&text).ok()).unwrap_or_default();
            let names = looked["names"].as_array().cloned().unwrap_or_default();
            names.iter().any(|asked| {
                asked["name"].as_str().is_some_and(|asked| asked.trim_end_matches('.') == name)
                    && asked["fast"].as_u64() > Some(0)
            })
        });
        done.store(true, Ordering::Relaxed);
        shown
    });
    shown?;
    tried.signal(Signal::SIGINT)?;
    ensure!(tried.wait(Duration::from_secs(20))?.success());
    ensure!(!std::fs::exists(&config)?, "{config} is left behind");
    Ok(())
}
