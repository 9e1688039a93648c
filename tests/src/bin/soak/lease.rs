//! Reads the lease from the pinned map, as the programs see it; the server need not be running.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use aya::maps::{Array, Map, MapData};
use dns_common::{control::Control, object};
use nix::time::{ClockId, clock_gettime};
use whole_system_tests::bpffs::Bpffs;
use zerocopy::FromBytes as _;

/// Returns when interfaces stop answering unless the lease is renewed. During a takeover, several
/// servers' maps exist and the earliest expiry counts. `None` if there is no map.
pub(crate) fn ends(bpffs: &Bpffs) -> Result<Option<Instant>> {
    let pinned = bpffs
        .pinned()
        .into_iter()
        .filter(|path| path.ends_with(object::CONTROL));
    let deadlines = pinned.map(|path| -> Result<u64> {
        let map = MapData::from_pin(&path).with_context(|| path.display().to_string())?;
        let control: Array<_, [u8; size_of::<Control>()]> = Map::Array(map).try_into()?;
        let control = control.get(&0, 0)?;
        Ok(Control::read_from_bytes(&control)
            .expect("as long as it is")
            .lease_deadline_ns)
    });
    let Some(deadline) = deadlines.collect::<Result<Vec<u64>>>()?.into_iter().min() else {
        return Ok(None);
    };
    let now = Duration::from(clock_gettime(ClockId::CLOCK_MONOTONIC)?);
    Ok(Some(
        Instant::now() + Duration::from_nanos(deadline).saturating_sub(now),
    ))
}
