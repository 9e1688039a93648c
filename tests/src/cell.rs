//! A Diego cell without its containers: interfaces, packet filter rules and bandwidth limits as
//! silk's CNI plugins create them.
//!
//! In reality each container has its own network namespace. Here the containers' ends share one,
//! which saves a thousand namespaces; a container's queries leave through its own interface
//! (`SO_BINDTODEVICE`).

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    io::Write as _,
    mem::MaybeUninit,
    net::{Ipv4Addr, SocketAddr},
    ops::Range,
    process::Stdio,
    thread,
    time::{Duration, SystemTime},
};

use anyhow::{Context, Result, ensure};
use socket2::{Domain, Socket, Type};

use crate::namespace::Namespace;

/// Address of the server, on `lo` of the host.
const SERVER: Ipv4Addr = Ipv4Addr::new(169, 254, 0, 2);

/// Interfaces of the host that lead to no container: the uplink and the overlay.
pub const OTHER_INTERFACES: [&str; 2] = ["eth0", "silk-vtep"];

/// A host and the far ends of its containers' interfaces.
#[derive(Clone, Copy, Debug)]
pub struct Cell<'a> {
    host: &'a Namespace,
    containers: &'a Namespace,
}

impl<'a> Cell<'a> {
    /// Prepares the host: the server's address, an uplink and an overlay device.
    pub fn new(host: &'a Namespace, containers: &'a Namespace) -> Result<Self> {
        host.forward()?;
        host.ip(&format!("addr add {SERVER}/32 dev lo"))?;
        host.ip("link add eth0 type veth peer name far0")?;
        host.ip("addr add 10.0.16.5/24 dev eth0")?;
        host.ip("link set eth0 up")?;
        host.ip("link add silk-vtep type vxlan id 1 dstport 4789 dev eth0")?;
        host.ip("link set silk-vtep up")?;
        Ok(Self { host, containers })
    }

    /// Returns the name of a container's interface on the host.
    pub fn interface(number: usize) -> String {
        format!("s-{number}")
    }

    /// Creates a container as silk does: a veth, its chains, and limits by the bandwidth plugin.
    pub fn create(&self, number: usize) -> Result<()> {
        self.connect(number..number + 1)?;
        self.permit(number..number + 1)?;
        self.limit(number)
    }

    /// Creates the interfaces of containers.
    pub fn connect(&self, numbers: Range<usize>) -> Result<()> {
        let (mut near, mut far) = (String::new(), String::new());
        let containers = self.containers.name();
        for number in numbers {
            let (name, [gateway, address]) = (Self::interface(number), addresses(number));
            let [mac, far_mac] = ["aa", "bb"]
                .map(|end| format!("02:{end}:00:00:{:02x}:{:02x}", number / 256, number % 256));
            write!(
                near,
                "link add {name} address {mac} type veth peer name c{number} address {far_mac} netns {containers}\n\
                 addr add {gateway}/30 dev {name}\nlink set {name} up\n\
                 neigh replace {address} lladdr {far_mac} dev {name} nud permanent\n"
            )?;
            // Distinct metrics, so that each interface may have a route to the same address.
            write!(
                far,
                "addr add {address}/30 dev c{number}\nlink set c{number} up\n\
                 route add {SERVER}/32 dev c{number} metric {}\n\
                 neigh replace {SERVER} lladdr {mac} dev c{number} nud permanent\n",
                number + 1
            )?;
        }
        feed(self.host, &["ip", "-batch", "-"], &near)?;
        feed(self.containers, &["ip", "-batch", "-"], &far)
    }

    /// Waits until both ends of a container's interface can send.
    pub fn wait_for_link(&self, number: usize) -> Result<()> {
        self.host.wait_for_link(&Self::interface(number))?;
        self.containers.wait_for_link(&format!("c{number}"))
    }

    /// Adds the packet filter rules of containers, in legacy tables as on a cell.
    pub fn permit(&self, numbers: Range<usize>) -> Result<()> {
        let (mut filter, mut nat) = (String::from("*filter\n"), String::from("*nat\n"));
        for number in numbers {
            let [_, address] = addresses(number);
            write!(
                filter,
                ":input--{number} - [0:0]\n:overlay--{number} - [0:0]\n\
                 -A INPUT -s {address}/32 -j input--{number}\n\
                 -A input--{number} -m state --state RELATED,ESTABLISHED -j ACCEPT\n\
                 -A input--{number} -d {SERVER}/32 -p tcp -m tcp --dport 53 -j ACCEPT\n\
                 -A input--{number} -d {SERVER}/32 -p udp -m udp --dport 53 -j ACCEPT\n\
                 -A input--{number} -j REJECT --reject-with icmp-port-unreachable\n\
                 -A FORWARD -j overlay--{number}\n\
                 -A overlay--{number} -d {address}/32 -m state --state RELATED,ESTABLISHED -j ACCEPT\n\
                 -A overlay--{number} -d {address}/32 -m limit --limit 1/sec --limit-burst 1 -j LOG\n\
                 -A overlay--{number} -d {address}/32 -j REJECT --reject-with icmp-port-unreachable\n"
            )?;
            writeln!(
                nat,
                "-A POSTROUTING -s {address}/32 ! -d 10.240.0.0/16 ! -o silk-vtep -j MASQUERADE"
            )?;
        }
        let rules = format!("{filter}COMMIT\n{nat}COMMIT\n");
        feed(
            self.host,
            &["iptables-legacy-restore", "--noflush", "-w"],
            &rules,
        )
    }

    /// Limits a container's bandwidth as the CNI plugin does: a `tbf` towards the container, and an
    /// `ingress` qdisc that redirects to an `ifb` with another.
    pub fn limit(&self, number: usize) -> Result<()> {
        let (name, ifb) = (Self::interface(number), format!("ifb-{number}"));
        let mac = format!("02:cc:00:00:{:02x}:{:02x}", number / 256, number % 256);
        feed(
            self.host,
            &["ip", "-batch", "-"],
            &format!("link add {ifb} address {mac} type ifb\nlink set {ifb} up\n"),
        )?;
        let limit = "root tbf rate 100mbit burst 256kb latency 25ms";
        let lines = format!(
            "qdisc add dev {name} {limit}\nqdisc add dev {ifb} {limit}\nqdisc add dev {name} ingress\n\
             filter add dev {name} parent ffff: protocol all prio 1 u32 match u32 0 0 action mirred egress \
             redirect dev {ifb}\n"
        );
        feed(self.host, &["tc", "-batch", "-"], &lines)
    }

    /// Removes the interfaces of containers.
    pub fn remove(&self, numbers: Range<usize>) -> Result<()> {
        let lines: String = numbers
            .map(|number| format!("link del {}\n", Self::interface(number)))
            .collect();
        feed(self.host, &["ip", "-batch", "-"], &lines)
    }

    /// Opens a socket of a container, connected to the server.
    pub fn socket(&self, number: usize, timeout: Duration) -> Result<Socket> {
        self.containers.run(|| socket(number, timeout))?
    }

    /// Calls `work` in the namespace of the containers with a function that opens a socket of a container,
    /// connected to the server.
    pub fn inside<T: Send>(
        &self,
        work: impl FnOnce(&(dyn Fn(usize) -> Result<Socket> + Sync)) -> T + Send,
    ) -> Result<T> {
        self.containers
            .run(|| work(&|number| socket(number, Duration::from_secs(1))))
    }

    /// Sends a query from a container, `times` one after the other; returns the number of replies.
    pub fn ask(
        &self,
        number: usize,
        query: &[u8],
        times: usize,
        timeout: Duration,
    ) -> Result<usize> {
        let socket = self.socket(number, timeout)?;
        let mut answered = 0;
        for _ in 0..times {
            socket.send(query)?;
            answered += usize::from(socket.recv(&mut [MaybeUninit::uninit(); 1500]).is_ok());
        }
        Ok(answered)
    }

    /// Sends six queries from each container in turn, which is enough evidence for its interface to be served.
    pub fn ask_enough(
        &self,
        numbers: Range<usize>,
        query: &[u8],
        timeout: Duration,
    ) -> Result<Asked> {
        let mut asked = Asked::new();
        for number in numbers {
            ensure!(
                self.ask(number, query, 6, timeout)? == 6,
                "container {number} lacks replies"
            );
            asked.insert(number, time_of_day_now()?);
        }
        Ok(asked)
    }
}

/// When each container had sent its last query, as time of day.
pub type Asked = BTreeMap<usize, Duration>;

fn time_of_day_now() -> Result<Duration> {
    const DAY: u64 = 86_400;
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?;
    Ok(Duration::new(now.as_secs() % DAY, now.subsec_nanos()))
}

/// Parses the time of a log line, such as `2026-01-02T03:04:05.678901Z`.
pub fn time_of_day(line: &str) -> Result<Duration> {
    let time = line
        .split(' ')
        .next()
        .and_then(|stamp| stamp.split('T').nth(1))
        .context("a time stamp")?;
    let mut parts = time.trim_end_matches('Z').split(':').map(str::parse::<f64>);
    let mut part = || {
        parts
            .next()
            .context("hours, minutes, seconds")?
            .context("a number")
    };
    Ok(Duration::from_secs_f64(
        part()? * 3600.0 + part()? * 60.0 + part()?,
    ))
}

/// Waits for the quiet time after which no CNI plugin is expected at an interface.
pub fn wait_for_grace() {
    // Twenty seconds in the attacher (`attach/rtnl_throttle.rs`), which nothing reports.
    thread::sleep(Duration::from_secs(22));
}

/// How containers got their programs, according to the server's log; sorted.
#[derive(Debug)]
pub struct Attaches {
    /// Times from each container's last query to its program.
    pub delays: Vec<Duration>,
    /// Times that each attach took, which count as holding the RTNL lock.
    pub took: Vec<Duration>,
    /// How many are filters of clsact.
    pub filters: usize,
}

impl Attaches {
    /// Reads the lines of the log from `start` on; an error unless each container got a program, and only one.
    pub fn read(log: &str, start: usize, asked: &Asked) -> Result<Self> {
        let (mut delays, mut took, mut filters) = (BTreeMap::new(), Vec::new(), 0);
        let field = |line: &str, name: &str| -> Result<String> {
            let rest = line.split(name).nth(1).with_context(|| name.to_owned())?;
            Ok(rest.split(' ').next().unwrap_or_default().to_owned())
        };
        for line in log
            .lines()
            .skip(start)
            .filter(|line| line.contains("program attached"))
        {
            let interface = field(line, "interface=")?;
            let number = interface
                .strip_prefix("s-")
                .and_then(|number| number.parse().ok());
            let Some((number, asked)) = number.and_then(|number| asked.get_key_value(&number))
            else {
                continue;
            };
            let delay = time_of_day(line)?.saturating_sub(*asked);
            ensure!(
                delays.insert(*number, delay).is_none(),
                "attached twice: {line}"
            );
            filters += usize::from(field(line, "hook=")? == "clsact");
            took.push(Duration::from_micros(
                field(line, "took_us=")?.trim().parse()?,
            ));
        }
        ensure!(
            delays.len() == asked.len(),
            "{} attaches of {}",
            delays.len(),
            asked.len()
        );
        let mut delays: Vec<Duration> = delays.into_values().collect();
        delays.sort_unstable();
        took.sort_unstable();
        Ok(Self {
            delays,
            took,
            filters,
        })
    }
}

/// Returns the addresses of a container's interface on the host, and of the container.
fn addresses(number: usize) -> [Ipv4Addr; 2] {
    let network = 0x0af0_0000 + 4 * u32::try_from(number).unwrap_or(u32::MAX / 8);
    [network + 1, network + 2].map(Ipv4Addr::from_bits)
}

fn socket(number: usize, timeout: Duration) -> Result<Socket> {
    let socket = Socket::new(Domain::IPV4, Type::DGRAM, None)?;
    socket.bind_device(Some(format!("c{number}").as_bytes()))?;
    socket.set_read_timeout(Some(timeout))?;
    socket.connect(&SocketAddr::from((SERVER, 53)).into())?;
    Ok(socket)
}

/// Runs a command inside a namespace with `input`.
pub fn feed(namespace: &Namespace, command: &[&str], input: &str) -> Result<()> {
    let (program, arguments) = command.split_first().context("a command")?;
    let mut child = namespace.command(program)?;
    let child = child
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = child.spawn().with_context(|| (*program).to_owned())?;
    child
        .stdin
        .take()
        .context("piped")?
        .write_all(input.as_bytes())?;
    let output = child.wait_with_output()?;
    let said = [output.stdout, output.stderr].concat();
    ensure!(
        output.status.success(),
        "{command:?} failed on:\n{input}{}",
        String::from_utf8_lossy(&said)
    );
    Ok(())
}
