//! Sharing an interface with foreign programs and with a second server.

use std::net::{IpAddr, SocketAddr};

use anyhow::{Context, Result};
use dns_core::config::HookMode;
use dns_fastpath::Hook;
use whole_system_tests::{
    bpffs::{Bpffs, config},
    pair::{Pair, SHORT, TIMEOUT, addresses, v4},
    requires,
};

use crate::lab::{List, pass_program, start};

/// Returns a list of one name with one address.
fn one(name: &str, last: u8) -> List {
    List::default().with(name, [IpAddr::from([10, 0, 0, last])])
}

#[test]
fn foreign_xdp_program_is_kept() -> Result<()> {
    requires!(namespaces, bpf);
    for mode in [HookMode::Native, HookMode::Auto] {
        let (pair, bpffs) = (Pair::new("alien")?, Bpffs::new()?);
        let foreign = pass_program(&pair.server, "srv")?;
        let id = xdp_program(&pair)?.context("the foreign program is missing")?;
        let fast_path = start(
            &pair.server,
            &config(mode, &bpffs),
            &[v4()],
            one("a.bosh", 1),
        )?;
        let status = fast_path.status().interfaces;
        let srv = status
            .interfaces
            .iter()
            .find(|found| found.name == "srv")
            .context("srv is missing")?;
        assert_eq!(srv.hook, Some(Hook::Tcx), "{mode:?}: {}", srv.why);
        if mode != HookMode::Auto {
            assert!(
                srv.why.contains("pass") && srv.why.contains(&format!("id {id}")),
                "{}",
                srv.why
            );
        }
        assert!(addresses(&pair.client, v4(), "a.bosh", TIMEOUT)?.is_some());
        assert_eq!(xdp_program(&pair)?, Some(id));
        fast_path.stop();
        assert_eq!(
            xdp_program(&pair)?,
            Some(id),
            "{mode:?}: still there after us"
        );
        drop(foreign);
    }
    Ok(())
}

#[test]
fn two_servers_share_interface() -> Result<()> {
    requires!(namespaces, bpf);
    let (first, second) = (v4(), SocketAddr::from(([169, 254, 0, 2], 5353)));
    let (pair, bpffs) = (Pair::new("two")?, Bpffs::new()?);
    let config = config(HookMode::Auto, &bpffs);
    let one_server = start(&pair.server, &config, &[first], one("a.bosh", 1))?;
    let other_server = start(&pair.server, &config, &[second], one("a.bosh", 2))?;
    let asked = |server, patience| addresses(&pair.client, server, "a.bosh", patience);
    assert_eq!(asked(first, TIMEOUT)?, Some(vec![[10, 0, 0, 1].into()]));
    assert_eq!(asked(second, TIMEOUT)?, Some(vec![[10, 0, 0, 2].into()]));
    one_server.stop();
    assert_eq!(asked(first, SHORT)?, None);
    assert_eq!(asked(second, TIMEOUT)?, Some(vec![[10, 0, 0, 2].into()]));
    other_server.stop();
    assert_eq!(asked(second, SHORT)?, None);
    Ok(())
}

/// Returns the id of the XDP program on the server's end.
fn xdp_program(pair: &Pair) -> Result<Option<u32>> {
    let shown = whole_system_tests::process::capture(std::process::Command::new("ip").args([
        "-n",
        pair.server.name(),
        "link",
        "show",
        "srv",
    ]))?;
    let mut words = shown
        .split_whitespace()
        .skip_while(|word| *word != "prog/xdp");
    Ok(match (words.next(), words.next(), words.next()) {
        (Some(_), Some("id"), Some(id)) => Some(id.parse()?),
        _ => None,
    })
}
