//! The load generator ([`dns_load::generator`]) in a lab: it sends from the client's CPU.

use std::net::IpAddr;

use anyhow::{Context, Result, ensure};
pub use dns_load::generator::Load;
use dns_load::{
    frames::Route,
    generator::{self, Settings},
    orders::Counts,
};
use hickory_proto::rr::RecordType;

use crate::{
    client,
    cpu::last_cpu,
    lab::{self, CLIENT_CPU, CLIENT_INTERFACE, Lab},
};

/// First source port of the queries, below the kernel's ephemeral range.
pub const FIRST_PORT: u16 = 2048;

/// Number of source ports.
pub const PORTS: u16 = 16;

/// Messages of queries in the order of sending, without ids.
#[derive(Debug)]
pub struct Queries(pub Vec<Vec<u8>>);

impl Queries {
    /// Builds queries from lines of `name type`; with `edns`, they have an OPT of that size.
    pub fn of_lines(lines: &[String], edns: Option<u16>) -> Result<Self> {
        let mut messages = Vec::with_capacity(lines.len());
        for line in lines {
            let (name, record_type) = line
                .trim()
                .split_once(' ')
                .context("no type after the name")?;
            let record_type: RecordType = record_type.parse()?;
            messages.push(client::query(name, record_type, edns)?.to_vec()?);
        }
        Ok(Self(messages))
    }
}

/// The generator, with its counting program on the client's end; detached when dropped.
pub struct Generator<'a> {
    lab: &'a Lab,
    inner: generator::Generator,
}

/// Reads the counters of sent and received packets.
pub struct Counter<'a>(&'a generator::Generator);

impl Counter<'_> {
    /// Returns the totals of all loads so far.
    pub fn read(&self) -> Result<Counts> {
        self.0.counts()
    }
}

impl<'a> Generator<'a> {
    /// Loads the generator with these queries and attaches the program that counts replies.
    pub fn new(lab: &'a Lab, queries: &Queries) -> Result<Self> {
        let route = Route {
            hardware: lab.hardware_addresses()?,
            source: lab.client_address(),
            server: lab.endpoint(),
        };
        let mut frames = Vec::with_capacity(queries.0.len());
        for message in &queries.0 {
            let frame = route.frame(message)?;
            frames.push(frame.context("a name that is too long for the generator")?);
        }
        let sequence: Vec<u32> = (0..u32::try_from(frames.len())?).collect();
        ensure!(!sequence.is_empty(), "nothing to ask");
        let cpu = CLIENT_CPU.min(last_cpu());
        let settings = Settings {
            interface: CLIENT_INTERFACE,
            cpus: &[cpu],
            ports: FIRST_PORT..=FIRST_PORT + PORTS - 1,
            addresses: 1,
            servers: [lab.endpoint().port(); 2],
            frames: &frames,
            sequence: &sequence,
        };
        let mut inner = lab.client.run(|| generator::Generator::new(&settings))??;
        if lab.has_small_tailroom {
            inner = inner.with_small_tailroom();
        }
        lab.pin_napi()?;
        Ok(Self { lab, inner })
    }

    /// Returns the packets sent and received in all loads so far.
    pub fn counts(&self) -> Result<Counts> {
        self.inner.counts()
    }

    /// Sends queries from the client's CPU while `meanwhile` runs, in the client's namespace.
    pub fn during<T: Send>(
        &mut self,
        load: Load,
        meanwhile: impl FnOnce(&Counter<'_>) -> Result<T> + Send,
    ) -> Result<T> {
        let replies_first = load != Load::Saturate;
        self.lab.let_client_napi_wait(!replies_first)?;
        let prepare = || -> Result<()> {
            // With a rate, the generator runs only while there are no replies to receive.
            if replies_first {
                lab::set_waiting(0, true)?;
            }
            Ok(())
        };
        let generator = &self.inner;
        let done = self.lab.client.run(|| {
            generator.order(load, generator.whole())?;
            generator.during(&prepare, || meanwhile(&Counter(generator)))
        });
        self.lab.let_client_napi_wait(false)?;
        done?
    }
}

/// Returns the length of all headers before the message.
pub fn headers_len(address: IpAddr) -> usize {
    if address.is_ipv6() {
        14 + 40 + 8
    } else {
        14 + 20 + 8
    }
}
