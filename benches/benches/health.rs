//! Cost of health checks with 1,000 instances: checks per second, CPU time per check, and memory
//! per tracked instance. The instances run in another process.
//!
//!     cargo bench -p bosh-dns-xdp-benches --bench health

use std::{
    env,
    io::{BufRead, BufReader, Write},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use bosh_dns_xdp_benches::cpu::CpuTime;
use dns_core::{
    config::{HealthConfig, TlsFiles},
    name::Name,
    resolve::{Checks, Existence, Resolution},
};
use dns_fastpath::FastPathHandle;
use dns_health::{HEALTH_NAME, HealthService};
use whole_system_tests::{
    health::{Authority, Fleet, instance, write_files},
    process::memory,
};

const COUNT: u32 = 1000;

/// Environment variable that passes the folder of the instances' certificates to the other process.
const FLEET: &str = "HEALTH_BENCH_FLEET";

fn main() -> Result<()> {
    if let Some(folder) = env::var_os(FLEET) {
        return be_the_fleet(Path::new(&folder));
    }
    // Arguments that cargo adds for other harnesses are ignored.
    let authority = Authority::new("ca")?;
    let folders = [tempfile::tempdir()?, tempfile::tempdir()?];
    let mut files = Vec::new();
    for folder in &folders {
        files.push(write_files(folder.path(), &authority.issue(HEALTH_NAME)?, &authority.certificate)?);
    }
    let fleet = OtherProcess::start(folders[0].path())?;
    println!("{COUNT} instances, one CA, ECDSA P-256; the instances run in another process\n");
    println!("| what | checks/s | CPU per check |");
    println!("|---|---|---|");

    let own = std::process::id();
    let before = memory(own, "VmRSS")?;
    let service = service(&fleet, &files[1], Duration::from_secs(2))?;
    let (begun, cpu) = (Instant::now(), CpuTime::of_process(own)?);
    service.tracker().asked(&name()?, &all());
    all_checked(&service)?;
    row("first checks, with handshake", COUNT.into(), begun.elapsed(), CpuTime::of_process(own)?, cpu);

    thread::sleep(Duration::from_secs(4));
    let used = memory(own, "VmRSS")?.saturating_sub(before) / u64::from(COUNT);
    measure("500 checks/s, kept connections", &service, Duration::from_secs(10))?;
    service.stop();
    drop(service);

    // More than one thread can handle, so it checks without a pause.
    let service = self::service(&fleet, &files[1], Duration::from_millis(100))?;
    service.tracker().asked(&name()?, &all());
    all_checked(&service)?;
    thread::sleep(Duration::from_secs(1));
    measure("as many as possible", &service, Duration::from_secs(5))?;
    println!("\nmemory per tracked instance, its connection and TLS state included: {used} bytes");
    Ok(())
}

/// Waits until every instance is known to be running.
fn all_checked(service: &HealthService) -> Result<()> {
    let begun = Instant::now();
    while service.states().counts()[0] < COUNT as usize {
        ensure!(begun.elapsed() < Duration::from_secs(60), "{:?} after a minute", service.states().counts());
        thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

/// Counts the work of a running service for a fixed time.
fn measure(what: &str, service: &HealthService, time: Duration) -> Result<()> {
    let own = std::process::id();
    let (checks, cpu, begun) = (service.metrics().checks(), CpuTime::of_process(own)?, Instant::now());
    thread::sleep(time);
    let done = service.metrics().checks() - checks;
    row(what, done, begun.elapsed(), CpuTime::of_process(own)?, cpu);
    let [_, failing, unknown, _] = service.states().counts();
    ensure!(failing + unknown == 0, "{:?}", service.states().counts());
    Ok(())
}

/// Prints a line of the table.
fn row(what: &str, checks: u64, took: Duration, now: CpuTime, before: CpuTime) {
    let cpu = now.0.saturating_sub(before.0).as_secs_f64() / checks as f64;
    println!("| {what} | {:.0} | {:.0} µs |", checks as f64 / took.as_secs_f64(), cpu * 1e6);
}

/// Returns a service that checks the other process's instances.
fn service(fleet: &OtherProcess, files: &TlsFiles, check_interval: Duration) -> Result<HealthService> {
    let config = HealthConfig {
        enabled: true,
        port: fleet.port,
        tls: Some(files.clone()),
        check_interval,
        max_tracked_queries: 2000,
        synchronous_check_timeout: Duration::from_secs(1),
        tracked_query_ttl: None,
    };
    let service = HealthService::new(&config, Duration::from_secs(5), FastPathHandle::default())?;
    service.start()?;
    Ok(service)
}

/// A name that needs all instances.
fn name() -> Result<Name> {
    Ok(Name::from_text("q-s0.q-g1.bosh")?)
}

/// The resolution of that name.
fn all() -> Resolution {
    let instances = (0..COUNT).map(instance).collect();
    let checks = Checks { instances, tracked: true, synchronous: false };
    Resolution { existence: Existence::Found, v4: Vec::new(), v6: Vec::new(), checks }
}

/// The process of the instances, stopped when dropped.
struct OtherProcess {
    child: Child,
    /// Addresses of the instances.
    port: u16,
}

impl OtherProcess {
    /// Starts this program again, in the role of the instances.
    fn start(folder: &Path) -> Result<Self> {
        let mut child = Command::new(env::current_exe()?)
            .env(FLEET, folder)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let mut line = String::new();
        let stdout = child.stdout.take().context("the pipe was asked for")?;
        BufReader::new(stdout).read_line(&mut line)?;
        Ok(Self { child, port: line.trim().parse().context("the instances did not start")? })
    }
}

impl Drop for OtherProcess {
    fn drop(&mut self) {
        // It may have exited already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Serves as the instances until standard input is closed.
fn be_the_fleet(folder: &Path) -> Result<()> {
    let file = |name: &str| -> PathBuf { folder.join(name) };
    let files =
        TlsFiles { certificate: file("certificate.pem"), private_key: file("key.pem"), ca: file("ca.pem") };
    let fleet = Fleet::start(&files)?;
    let mut out = std::io::stdout();
    writeln!(out, "{}", fleet.port)?;
    out.flush()?;
    std::io::stdin().lines().for_each(drop);
    Ok(())
}
