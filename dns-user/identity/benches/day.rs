//! Measures the CPU time of a day of 1,000 identities: `cargo bench -p dns-identity`.
//!
//! The clock is the bench's own, so the day takes seconds. The CPU time covers the whole process and
//! therefore includes the generation of keys.

use std::{
    fs,
    time::{Duration, Instant, SystemTime},
};

use anyhow::{Context as _, Result, ensure};
use dns_identity::{
    ca_files::CaFiles,
    keys::{KeyType, PrivateKey},
    pool::KeyPool,
    profile::Container,
    rotator::{Rotator, Settings},
};
use nix::time::{ClockId, clock_gettime};
use serde_json::json;

const IDENTITIES: usize = 1000;

/// Keys that the pool holds.
const POOL: usize = 64;

/// Validity of the certificates.
const DAY: Duration = Duration::from_secs(24 * 3600);

fn main() -> Result<()> {
    // A tmpfs, as in production.
    let folder = tempfile::tempdir_in("/dev/shm")?;
    let ca = write_authority(folder.path())?;
    let mut now = SystemTime::now();
    let settings = Settings { folder: folder.path().join("identities"), validity: DAY, envoy: false };
    fs::create_dir(&settings.folder)?;
    let pool = KeyPool::start(KeyType::P256, POOL)?;
    let mut rotator = Rotator::open(settings, ca, pool, now)?;

    let used = cpu()?;
    for number in 0..IDENTITIES {
        let container: Container = serde_json::from_value(json!({"guid": format!("container-{number:04}")}))?;
        rotator.create(container, now)?;
    }
    println!("{IDENTITIES} identities, P-256: {:.2?} of CPU to create", cpu()? - used);

    let (used, begun, end) = (cpu()?, Instant::now(), now + DAY);
    while now < end {
        rotator.step(now);
        now = match rotator.next_renewal(now) {
            Some(next) if next > now => next.min(end),
            Some(_) => {
                // Keys are generated in real time.
                std::thread::sleep(Duration::from_millis(1));
                now + Duration::from_millis(1)
            }
            None => end,
        };
    }
    let renewals = rotator.status(now).renewals;
    ensure!(renewals == IDENTITIES as u64, "{renewals} renewals");
    println!("a day with one renewal of each: {:.2?} of CPU, within {:.2?}", cpu()? - used, begun.elapsed());
    for (kind, name) in [(KeyType::Rsa2048, "RSA-2048"), (KeyType::Rsa3072, "RSA-3072")] {
        const KEYS: u32 = 20;
        let used = cpu()?;
        for _ in 0..KEYS {
            PrivateKey::generate(kind)?;
        }
        println!("one {name} key: {:.2?} of CPU, mean of {KEYS}", (cpu()? - used) / KEYS);
    }
    Ok(())
}

/// Writes a CA for two days.
fn write_authority(folder: &std::path::Path) -> Result<CaFiles> {
    let key = rcgen::KeyPair::generate()?;
    let mut params = rcgen::CertificateParams::default();
    params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    params.key_usages = vec![rcgen::KeyUsagePurpose::KeyCertSign, rcgen::KeyUsagePurpose::CrlSign];
    params.distinguished_name.push(rcgen::DnType::CommonName, "bench CA");
    let certificate = params.self_signed(&key).context("CA")?;
    let files = CaFiles { certificate: folder.join("ca.crt"), key: folder.join("ca.key") };
    fs::write(&files.certificate, certificate.pem())?;
    fs::write(&files.key, key.serialize_pem())?;
    Ok(files)
}

/// Returns the CPU time of the process.
fn cpu() -> Result<Duration> {
    Ok(clock_gettime(ClockId::CLOCK_PROCESS_CPUTIME_ID)?.into())
}
