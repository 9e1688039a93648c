//! Measures the CPU time of two cycles of renewals: `cargo bench -p dns-identity`, with
//! `IDENTITIES=10000 KEYS=rsa-2048` for another size or type of key.
//!
//! The clock is the bench's own, so a day takes seconds. The CPU time of the process is compared with
//! the time of the thread that generates keys.

use std::{
    env, fs,
    time::{Duration, Instant, SystemTime},
};

use anyhow::{Context as _, Result};
use dns_identity::{
    authority::CaFiles,
    keys::{KeyPool, KeyType, Priority, PrivateKey},
    profile::Container,
    rotator::{Next, Rotator, RotatorSettings},
};
use nix::time::{ClockId, clock_gettime};
use serde_json::json;

/// Keys that the pool holds.
const POOL: usize = 64;

/// Number of renewals of each identity.
const CYCLES: u32 = 2;

/// Longest wait for a key.
const KEY_LIMIT: Duration = Duration::from_secs(600);

/// Validity of the certificates.
const DAY: Duration = Duration::from_secs(24 * 3600);

/// Renews until there were `wanted` renewals, and prints what they took.
fn renew(rotator: &mut Rotator, mut now: SystemTime, wanted: u64) -> Result<()> {
    let used = cpu()?;
    let keys = rotator.pool.used();
    let begun = Instant::now();
    let mut shown = 0;
    loop {
        // The status is built seldom, because it lists all identities.
        for _ in 0..100 {
            match rotator.step(now) {
                // Keys are generated in real time.
                Next::Key => drop(rotator.pool.wait(1, KEY_LIMIT)),
                Next::At(at) if at > now => {
                    now = rotator.next_renewal().map_or(at, |next| next.max(at));
                }
                Next::At(_) => {}
            }
        }
        let done = rotator.status(now).renewals;
        if done >= wanted || done >= shown + wanted / 20 {
            shown = done;
            let all = cpu()? - used;
            let keys = rotator.pool.used() - keys;
            println!(
                "{done} of {wanted} renewals: {all:.2?} of CPU, {:.3} times the {keys:.2?} of the keys, within \
                 {:.2?}",
                all.as_secs_f64() / keys.as_secs_f64(),
                begun.elapsed()
            );
        }
        if done >= wanted {
            return Ok(());
        }
    }
}
fn main() -> Result<()> {
    // A tmpfs, as in production.
    let folder = tempfile::tempdir_in("/dev/shm")?;
    let ca = write_authority(folder.path())?;
    let now = SystemTime::now();
    let settings = RotatorSettings {
        folder: folder.path().join("identities"),
        validity: DAY,
        backdate: Duration::from_secs(300),
        envoy: false,
        also_trust: Vec::new(),
        keep_old_ca: DAY,
    };
    fs::create_dir(&settings.folder)?;
    let count: usize = env::var("IDENTITIES").map_or(Ok(1000), |text| text.parse())?;
    let kind = match env::var("KEYS").as_deref() {
        Ok("rsa-2048") => KeyType::Rsa2048,
        Ok("rsa-3072") => KeyType::Rsa3072,
        _ => KeyType::P256,
    };
    let pool = KeyPool::start(kind, POOL, Priority::Normal)?;
    let mut rotator = Rotator::open(settings, ca, pool, now)?;

    let used = cpu()?;
    for number in 0..count {
        let container: Container =
            serde_json::from_value(json!({"guid": format!("container-{number:05}")}))?;
        // A key generated on this thread would not count as the pool's.
        rotator.pool.wait(1, KEY_LIMIT);
        rotator.create(container, now)?;
    }
    println!(
        "{count} identities, {kind:?}: {:.2?} of CPU to create",
        cpu()? - used
    );

    renew(&mut rotator, now, u64::try_from(count)? * u64::from(CYCLES))?;
    time_of_keys(KeyType::Rsa2048, "RSA-2048")?;
    time_of_keys(KeyType::Rsa3072, "RSA-3072")
}

fn time_of_keys(kind: KeyType, name: &str) -> Result<()> {
    const KEYS: u32 = 20;
    let used = cpu()?;
    for _ in 0..KEYS {
        PrivateKey::generate(kind)?;
    }
    println!(
        "one {name} key: {:.2?} of CPU, mean of {KEYS}",
        (cpu()? - used) / KEYS
    );
    Ok(())
}

/// Writes a CA for two days.
fn write_authority(folder: &std::path::Path) -> Result<CaFiles> {
    let key = rcgen::KeyPair::generate()?;
    let mut params = rcgen::CertificateParams::default();
    params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    params.key_usages = vec![
        rcgen::KeyUsagePurpose::KeyCertSign,
        rcgen::KeyUsagePurpose::CrlSign,
    ];
    params
        .distinguished_name
        .push(rcgen::DnType::CommonName, "bench CA");
    let certificate = params.self_signed(&key).context("CA")?;
    let files = CaFiles {
        certificate: folder.join("ca.crt"),
        key: folder.join("ca.key"),
    };
    fs::write(&files.certificate, certificate.pem())?;
    fs::write(&files.key, key.serialize_pem())?;
    Ok(files)
}

/// Returns the CPU time of the process.
fn cpu() -> Result<Duration> {
    Ok(clock_gettime(ClockId::CLOCK_PROCESS_CPUTIME_ID)?.into())
}
