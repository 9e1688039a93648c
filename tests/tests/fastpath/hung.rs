//! A publisher that hangs while everything goes on.

use std::{
    net::IpAddr,
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

use anyhow::{Result, ensure};
use dns_core::{
    config::HookMode,
    name::Name,
    resolve::{Health, Resolution},
};
use dns_fastpath::NameSource;
use whole_system_tests::{
    bpffs::{Bpffs, config},
    pair::{Pair, addresses, v4},
    process::wait_until,
    requires,
};

use super::lab::{List, handle_of, name_of, start, wait};

const LIMIT: Duration = Duration::from_secs(120);

/// A list that gives no answer while it hangs.
struct Hanging {
    list: List,
    hangs: Arc<AtomicBool>,
    /// Number of answers that somebody has asked for.
    asked: Arc<AtomicUsize>,
}

impl NameSource for Hanging {
    fn published_names(&self) -> Box<dyn Iterator<Item = Name> + '_> {
        self.list.published_names()
    }

    fn resolve(&self, health: &dyn Health, name: &Name) -> Option<Resolution> {
        self.asked.fetch_add(1, Ordering::Relaxed);
        while self.hangs.load(Ordering::Relaxed) {
            thread::sleep(Duration::from_millis(1));
        }
        self.list.resolve(health, name)
    }
}

/// Returns a list in which `a.bosh` has this address.
fn list(last: u8) -> List {
    List::default().with("a.bosh", [IpAddr::from([10, 0, 0, last])])
}

#[test]
fn hung_publisher_holds_bounded_changes_and_loses_none() -> Result<()> {
    /// Snapshots that may wait, and those that the publisher itself holds.
    const MAX_LIVING: usize = 32 + 3;
    requires!(namespaces, bpf);
    let pair = Pair::new("hung")?;
    let bpffs = Bpffs::new()?;
    let config = config(HookMode::Auto, &bpffs);
    let fast_path = start(&pair.server, &config, &[v4()], list(1))?;
    let handle = handle_of(&fast_path);
    let answer = |last| {
        let found = addresses(&pair.client, v4(), "a.bosh", Duration::from_millis(300));
        found.is_ok_and(|found| found == Some(vec![[10, 0, 0, last].into()]))
    };
    wait_until("the first answer", LIMIT, || answer(1))?;

    let hangs = Arc::new(AtomicBool::new(true));
    let asked = Arc::<AtomicUsize>::default();
    let hanging: Arc<dyn NameSource> = Arc::new(Hanging {
        list: list(2),
        hangs: Arc::clone(&hangs),
        asked: Arc::clone(&asked),
    });
    handle.install(&hanging);
    wait_until("the publisher to hang", LIMIT, || {
        asked.load(Ordering::Relaxed) > 0
    })?;
    let mut sources: Vec<Weak<dyn NameSource>> = Vec::new();
    for number in 0..1000 {
        // The last one counts.
        let source: Arc<dyn NameSource> = Arc::new(list(if number == 999 { 4 } else { 3 }));
        sources.push(Arc::downgrade(&source));
        handle.install(&source);
        handle.refresh(&source, &[name_of("bosh")]);
        handle.withdraw(&[name_of("gone.bosh")]);
        for _ in 0..100 {
            handle.health_changed(&[[10, 0, 0, 9].into()]);
        }
        let living = sources.iter().filter(|source| source.strong_count() > 0);
        let living = living.count();
        ensure!(living <= MAX_LIVING, "{living} snapshots after {number}");
    }
    hangs.store(false, Ordering::Relaxed);
    wait(handle.flushed());
    wait_until("the newest answer", LIMIT, || answer(4))?;
    drop(hanging);
    let living = sources.iter().filter(|source| source.strong_count() > 0);
    ensure!(living.count() == 1, "only the newest snapshot is left");
    Ok(())
}
