//! The generator's threads: they allocate nothing for a query, and a load ends with any of them.

use std::{
    net::UdpSocket,
    panic::{AssertUnwindSafe, catch_unwind},
    thread,
    time::Duration,
};

use anyhow::{Result, ensure};
use dns_load::{
    frames::Route,
    generator::{Generator, Load, Responder, Settings},
    orders::Counts,
};
use test_lab::{
    lab::{CLIENT_INTERFACE, Lab, SERVER_INTERFACE},
    process::wait_until,
};
use test_support::allocations::Counting;
use whole_system_tests::requirements;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Queries that the load has at least: more than a thousand times the allocations that its start may take.
const MIN_QUERIES: u64 = 100_000;

/// Loads whose end is tried. When the fields of an order were all cleared at its end, one of so many sent a query from port 0.
const ENDED_LOADS: u64 = 500;

/// A query for a.bosh.
const QUERY: &[u8] = b"\0\0\x01\0\0\x01\0\0\0\0\0\0\x01a\x04bosh\0\0\x01\0\x01";

/// Allocations of a thread that starts: its place in a list, and the system call's arguments.
const MAX_ALLOCATIONS: u64 = 100;

/// Runs `with` in the client's namespace with a generator whose queries are answered; not without the requirements.
fn with_generator<T: Send>(with: impl FnOnce(&Generator) -> Result<T> + Send) -> Result<Option<T>> {
    if !requirements::namespaces() || !requirements::bpf() {
        return Ok(None);
    }
    let lab = Lab::split()?;
    let _responder = lab
        .server
        .run(|| Responder::new(SERVER_INTERFACE, [53; 2], false))??;
    let route = Route {
        hardware: lab.hardware_addresses()?,
        source: lab.client_address(),
        server: lab.endpoint(),
    };
    let frame = route.frame(QUERY)?.expect("a short query");
    let settings = Settings {
        interface: CLIENT_INTERFACE,
        cpus: &[0],
        ports: 2048..=2063,
        addresses: 1,
        servers: [53; 2],
        frames: &[frame],
        sequence: &[0],
    };
    let done = lab.client.run(|| with(&Generator::new(&settings)?))??;
    Ok(Some(done))
}

/// Sends many queries at full speed.
fn load(generator: &Generator) -> Result<Counts> {
    generator.order(Load::Saturate, generator.whole())?;
    let count = || -> Result<()> {
        Counting::count_thread();
        Ok(())
    };
    generator.during(&count, || {
        wait_until("many queries", Duration::from_secs(120), || {
            generator.counts().is_ok_and(|counts| {
                counts.sent > MIN_QUERIES && counts.received() > MIN_QUERIES / 100
            })
        })
    })?;
    generator.counts()
}

#[test]
fn queries_need_no_allocation() -> Result<()> {
    match with_generator(load)? {
        Some(counts) => ensure_few_allocations(counts),
        None => Ok(()),
    }
}

/// A load through sockets needs no privilege either.
#[test]
fn queries_through_sockets_need_no_allocation() -> Result<()> {
    let server = UdpSocket::bind("127.71.2.1:0")?;
    let endpoint = server.local_addr()?;
    let route = Route {
        hardware: [[0; 6]; 2],
        source: [127, 71, 2, 2].into(),
        server: endpoint,
    };
    let frame = route.frame(QUERY)?.expect("a short query");
    let settings = Settings {
        interface: "lo",
        cpus: &[0],
        ports: 2048..=2063,
        addresses: 1,
        servers: [53; 2],
        frames: &[frame],
        sequence: &[0],
    };
    let counts = thread::scope(|scope| {
        scope.spawn(|| {
            let mut message = [0; 64];
            // The test ends the server with an empty message.
            while let Ok((length @ 1.., from)) = server.recv_from(&mut message) {
                message[2] |= 0x80;
                let _sent = server.send_to(&message[..length], from);
            }
        });
        let generator =
            Generator::through_sockets(&settings, &[route], None, Duration::from_secs(1));
        let counts = generator.and_then(|generator| load(&generator));
        let ending = UdpSocket::bind("127.71.2.2:0")?;
        ending.send_to(&[], endpoint)?;
        counts
    })?;
    ensure_few_allocations(counts)
}

fn ensure_few_allocations(counts: Counts) -> Result<()> {
    let allocations = Counting::take();
    ensure!(
        (1..=MAX_ALLOCATIONS).contains(&allocations),
        "{allocations} allocations for {} queries",
        counts.sent
    );
    Ok(())
}

/// The program reads its order while userspace ends it.
#[test]
fn end_of_a_load_sends_nothing() -> Result<()> {
    let rate = Load::Rate { rate: 1, burst: 1 };
    with_generator(|generator| {
        let end_loads = || {
            for load in 1..=ENDED_LOADS {
                // The first query is due at once, the second one in a second.
                generator.order(rate, generator.whole())?;
                wait_until("a query", Duration::from_secs(120), || {
                    generator.counts().is_ok_and(|counts| counts.sent >= load)
                })?;
                generator.pause()?;
                wait_until("its reply", Duration::from_secs(120), || {
                    generator
                        .counts()
                        .is_ok_and(|counts| counts.received() == counts.sent)
                })?;
            }
            Ok(())
        };
        generator.during(&|| Ok(()), end_loads)
    })?;
    Ok(())
}

/// A load without its generator would take all of its time, and send nothing.
#[test]
fn load_ends_with_its_thread() -> Result<()> {
    with_generator(|generator| {
        let panics = || -> Result<()> { panic!("on purpose") };
        let ended = generator.during(&panics, || {
            wait_until("the end", Duration::from_secs(120), || {
                generator.ensure_sending().is_err()
            })
        });
        let ended = ended.expect_err("a thread panicked");
        ensure!(ended.to_string().contains("panicked"), "{ended}");
        let fails = || anyhow::bail!("no CPU");
        let ended = generator.during(&fails, || {
            wait_until("the end", Duration::from_secs(120), || {
                generator.ensure_sending().is_err()
            })?;
            generator.ensure_sending()
        });
        let ended = ended.expect_err("a thread failed");
        // The reason, not what followed from it.
        ensure!(ended.to_string() == "no CPU", "{ended}");
        // The next load has other threads.
        generator.during(&|| Ok(()), || generator.ensure_sending())
    })?;
    Ok(())
}

/// The threads wait for nobody who is no more.
#[test]
fn threads_end_with_the_measurement() -> Result<()> {
    with_generator(|generator| {
        let measurement = || -> Result<()> { panic!("on purpose") };
        let panicked = catch_unwind(AssertUnwindSafe(|| {
            generator.during(&|| Ok(()), measurement)
        }));
        ensure!(panicked.is_err(), "the panic was lost");
        Ok(())
    })?;
    Ok(())
}
