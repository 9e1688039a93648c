//! The lab: a client's and a server's network namespace, joined by a veth pair.

use std::{
    fs::{self, File},
    io::{self, Read as _, Seek as _},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    process::Command,
};

use anyhow::{Context, Result, ensure};
use nix::unistd::Pid;

use crate::{
    cpu::{CpuTime, last_cpu, napi_threads, pin_thread, sleeps},
    namespace::Namespace,
    pair::Pair,
    process::{capture, run},
};

/// CPU of everything on the server's side.
pub const SERVER_CPU: usize = 0;

/// CPU of everything on the client's side; the same one on a machine with one.
pub const CLIENT_CPU: usize = 1;

/// Address of the server, the same as on every BOSH VM.
pub const SERVER_ADDRESS: Ipv4Addr = Ipv4Addr::new(169, 254, 0, 2);

/// Source address of the load.
pub const CLIENT_ADDRESS: Ipv4Addr = Ipv4Addr::new(169, 254, 0, 1);

/// The same with IPv6, see [`Lab::over_ipv6`].
const SERVER_ADDRESS_V6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 2);
const CLIENT_ADDRESS_V6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 1);

/// Interface on the server's side. Short: a NAPI thread's name holds 15 bytes.
pub const SERVER_INTERFACE: &str = "bdxs";

/// Interface on the client's side.
pub const CLIENT_INTERFACE: &str = "bdxc";

/// Two namespaces and the veth pair between them.
#[derive(Debug)]
pub struct Lab {
    /// The server's namespace, with the address 169.254.0.2.
    pub server: Namespace,
    /// The client's namespace, with the address 169.254.0.1.
    pub client: Namespace,
    /// Whether packets are processed on the receiver's CPU.
    pub split: bool,
    /// Whether the generator's frames have as little room behind them as frames of sockets.
    pub has_small_tailroom: bool,
    /// Addresses of server and client.
    addresses: [IpAddr; 2],
}

impl Lab {
    /// Creates a lab with default veth: the receive softirq, and with it the program, runs on the
    /// sender's CPU and is charged to no process. Suitable for latency; CPU figures of the fast
    /// path are meaningless.
    pub fn plain() -> Result<Self> {
        let Pair { server, client } = Pair::joined(
            "bench",
            (SERVER_INTERFACE, &["169.254.0.2/24"]),
            (CLIENT_INTERFACE, &["169.254.0.1/24"]),
        )?;
        let lab = Self::of(server, client);
        lab.introduce()?;
        Ok(lab)
    }

    /// Creates a lab with threaded NAPI: all work of a side is done on its CPU, in a kernel thread
    /// whose time can be read.
    ///
    /// GRO makes veth use NAPI; with TSO it would bypass NAPI for UDP.
    pub fn split() -> Result<Self> {
        let lab = Self {
            split: true,
            ..Self::plain()?
        };
        for (namespace, interface) in lab.ends() {
            for feature in [["gro", "on"], ["tso", "off"]] {
                run(namespace
                    .with_own_sysfs("ethtool")
                    .args(["-K", interface])
                    .args(feature))?;
            }
            let threaded = format!("echo 1 > /sys/class/net/{interface}/threaded");
            run(namespace.with_own_sysfs("sh").args(["-c", &threaded]))?;
        }
        lab.pin_napi()?;
        Ok(lab)
    }

    /// Returns the lab of two namespaces, however they are joined.
    pub fn of(server: Namespace, client: Namespace) -> Self {
        Self {
            server,
            client,
            split: false,
            has_small_tailroom: false,
            addresses: [SERVER_ADDRESS.into(), CLIENT_ADDRESS.into()],
        }
    }

    /// Makes server and client use IPv6, with addresses beside the IPv4 ones.
    pub fn over_ipv6(mut self) -> Result<Self> {
        self.addresses = [SERVER_ADDRESS_V6.into(), CLIENT_ADDRESS_V6.into()];
        for ((namespace, interface), address) in self.ends().into_iter().zip(self.addresses) {
            namespace.ip(&format!("addr add {address}/64 dev {interface} nodad"))?;
        }
        self.introduce()?;
        Ok(self)
    }

    /// Makes the generator's frames end where those of sockets do: an skb for a short datagram has a few hundred
    /// bytes, so a longer reply needs another one, but the generator's own frames have a page.
    pub fn with_small_tailroom(mut self) -> Self {
        self.has_small_tailroom = true;
        self
    }

    /// Returns the endpoint of the server.
    pub fn endpoint(&self) -> SocketAddr {
        (self.addresses[0], 53).into()
    }

    /// Returns the source address of the load.
    pub fn client_address(&self) -> IpAddr {
        self.addresses[1]
    }

    /// Sets permanent neighbour entries on both sides, because the generator sends neither ARP nor neighbour
    /// discovery.
    fn introduce(&self) -> Result<()> {
        let [server, client] = self.ends();
        for ((near, interface), (far, other), address) in [
            (client, server, self.addresses[0]),
            (server, client, self.addresses[1]),
        ] {
            let hardware = hardware_address(far, other)?;
            run(near
                .command("ip")?
                .args([
                    "neigh",
                    "replace",
                    &address.to_string(),
                    "lladdr",
                    hardware.trim(),
                ])
                .args(["dev", interface, "nud", "permanent"]))?;
        }
        Ok(())
    }

    /// Returns the hardware addresses of both ends, the server's first.
    pub fn hardware_addresses(&self) -> Result<[[u8; 6]; 2]> {
        let mut found = [[0; 6]; 2];
        for ((namespace, interface), address) in self.ends().into_iter().zip(&mut found) {
            let text = hardware_address(namespace, interface)?;
            for (byte, digits) in address.iter_mut().zip(text.trim().split(':')) {
                *byte = u8::from_str_radix(digits, 16)?;
            }
        }
        Ok(found)
    }

    /// Pins each side's NAPI threads to its CPU. Call again after a program was attached or
    /// detached, which may recreate them.
    pub fn pin_napi(&self) -> Result<()> {
        if !self.split {
            return Ok(());
        }
        for ((_, interface), cpu) in self.ends().into_iter().zip([SERVER_CPU, CLIENT_CPU]) {
            for thread in napi_threads(interface)? {
                pin(thread, cpu)?;
            }
        }
        Ok(())
    }

    /// Sets whether the receive thread of the client's interface runs only while its CPU is idle.
    /// Packets without room there are then dropped by the sender.
    pub fn let_client_napi_wait(&self, waits: bool) -> Result<()> {
        napi_threads(CLIENT_INTERFACE)?
            .into_iter()
            .try_for_each(|thread| set_waiting(thread, waits))
    }

    /// Returns a meter of the server's side for a load; `processes` are the server's.
    pub fn meter(&self, processes: &[u32]) -> Result<Meter> {
        let counters =
            |namespace: &Namespace| namespace.run(|| File::open("/proc/thread-self/net/dev"));
        let napi = if self.split {
            napi_threads(SERVER_INTERFACE)?
        } else {
            Vec::new()
        };
        Ok(Meter {
            server: counters(&self.server)??,
            client: counters(&self.client)??,
            processes: [processes, &napi].concat(),
            napi,
        })
    }

    /// Returns the words before a command that generates load, which run it in the client's
    /// namespace on its CPU.
    pub fn client_launcher(&self) -> Vec<String> {
        let cpu = CLIENT_CPU.min(last_cpu()).to_string();
        [
            "ip",
            "netns",
            "exec",
            self.client.name(),
            "taskset",
            "-c",
            &cpu,
        ]
        .map(str::to_owned)
        .to_vec()
    }

    /// Returns both ends, the server's first.
    fn ends(&self) -> [(&Namespace, &'static str); 2] {
        [
            (&self.server, SERVER_INTERFACE),
            (&self.client, CLIENT_INTERFACE),
        ]
    }
}

/// Returns the hardware address of an interface as text.
fn hardware_address(namespace: &Namespace, interface: &str) -> Result<String> {
    capture(
        namespace
            .with_own_sysfs("cat")
            .arg(format!("/sys/class/net/{interface}/address")),
    )
}

/// Reads the counters of a lab at little cost for the measured CPUs: files are kept open, and
/// threads are known. Invalid after NAPI threads change, as when a program is attached.
#[derive(Debug)]
pub struct Meter {
    /// `/proc/net/dev` of the server's namespace, kept open.
    server: File,
    /// `/proc/net/dev` of the client's namespace, kept open.
    client: File,
    /// Processes and NAPI threads whose CPU time counts.
    processes: Vec<u32>,
    /// The server's NAPI threads; empty without threaded NAPI.
    napi: Vec<u32>,
}

impl Meter {
    /// Returns the CPU time of the server's side: its processes and its NAPI threads.
    pub fn cpu(&self) -> Result<CpuTime> {
        Ok(CpuTime::of_processes(&self.processes)?)
    }

    /// Returns the replies that the server's interface has sent, if it sends nothing else: replies
    /// received by the client's interface, and replies that it had no room for.
    pub fn replies(&self) -> Result<u64> {
        Ok(read_column(&self.client, CLIENT_INTERFACE, RECEIVED)? + self.lost_replies()?)
    }

    /// Returns the replies without room in the ring of the client's interface.
    pub fn lost_replies(&self) -> Result<u64> {
        read_column(&self.server, SERVER_INTERFACE, SENT_DROPPED)
    }

    /// Returns the packets received by the server's interface: queries, if nothing else is sent to
    /// it.
    pub fn arrivals(&self) -> Result<u64> {
        read_column(&self.server, SERVER_INTERFACE, RECEIVED)
    }

    /// Returns the packets to the server's interface without room in its ring.
    pub fn lost(&self) -> Result<u64> {
        read_column(&self.client, CLIENT_INTERFACE, SENT_DROPPED)
    }

    /// Returns how often the server's NAPI threads have gone to sleep.
    pub fn sleeps(&self) -> Result<u64> {
        Ok(self
            .napi
            .iter()
            .map(|&thread| sleeps(thread))
            .sum::<io::Result<u64>>()?)
    }
}

/// Reads a current number from an open `/proc/net/dev`.
fn read_column(mut file: &File, interface: &str, number: usize) -> Result<u64> {
    let mut text = String::new();
    file.rewind()?;
    file.read_to_string(&mut text)?;
    column(&text, interface, number).with_context(|| format!("no counters of {interface}"))
}

/// Column of `/proc/net/dev`: packets received.
const RECEIVED: usize = 1;

/// Column of `/proc/net/dev`: packets dropped while sending.
const SENT_DROPPED: usize = 11;

/// Finds the number of an interface in this column of `/proc/net/dev`.
fn column(text: &str, interface: &str, number: usize) -> Option<u64> {
    let line = text
        .lines()
        .find_map(|line| line.trim().strip_prefix(interface)?.strip_prefix(':'))?;
    line.split_whitespace().nth(number)?.parse().ok()
}

/// Pins all threads of a process to one CPU, and with them their future threads.
pub fn pin(process: u32, cpu: usize) -> Result<()> {
    let cpu = cpu.min(last_cpu());
    for task in fs::read_dir(format!("/proc/{process}/task"))? {
        let id = task?.file_name().to_string_lossy().parse()?;
        pin_thread(Pid::from_raw(id), cpu).context("cannot pin a thread")?;
    }
    Ok(())
}

/// Sets whether a thread (0 for the calling one) runs only while its CPU is idle (`SCHED_IDLE`), or
/// with the default policy.
pub fn set_waiting(thread: u32, waits: bool) -> Result<()> {
    let policy = if waits {
        libc::SCHED_IDLE
    } else {
        libc::SCHED_OTHER
    };
    // SAFETY: a structure of plain numbers; zeros are valid for both policies.
    let nothing = unsafe { std::mem::zeroed() };
    // SAFETY: the structure outlives the call.
    let done =
        unsafe { libc::sched_setscheduler(thread.cast_signed(), policy, &raw const nothing) };
    ensure!(
        done == 0,
        "cannot set a thread's priority: {}",
        io::Error::last_os_error()
    );
    Ok(())
}

/// Returns one line about the machine: kernel, CPU, cores.
pub fn machine() -> String {
    let text = |command: &mut Command| {
        let output = command
            .output()
            .map(|output| output.stdout)
            .unwrap_or_default();
        String::from_utf8_lossy(&output).trim().to_owned()
    };
    let kernel = text(Command::new("uname").args(["-sr"]));
    let cpu = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let cpu = cpu
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    let cpu = cpu.map_or("unknown CPU", |(_, name)| name.trim());
    format!("{kernel}, {cpu}, {} cores", last_cpu() + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interface_counters_are_parsed() {
        let text = "Inter-|   Receive                    |  Transmit\n face |bytes    packets errs\n                    bdxc: 81346     905    0    0    0     0          0         0    81346     905    0    7    0     0       0          0\n                    bdxc2:    70       1    0    0    0     0          0         0        0       0\n";
        let received = |interface| column(text, interface, RECEIVED);
        assert_eq!(
            (received("bdxc"), received("bdxc2"), received("bdx")),
            (Some(905), Some(1), None)
        );
        assert_eq!(column(text, "bdxc", SENT_DROPPED), Some(7));
    }
}
