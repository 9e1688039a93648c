//! Binds one TCP listener and several UDP sockets per address.

use std::{
    io,
    net::{IpAddr, SocketAddr, TcpListener, UdpSocket},
    os::fd::AsRawFd,
};

use socket2::{Domain, Protocol, Socket, Type};

use super::{Options, ServerError, udp};

/// Receive buffer of each UDP socket in bytes: room for a burst of several thousand queries (the
/// kernel accounts about 800 bytes for a small one). An unprivileged process is limited by
/// `net.core.rmem_max`.
const RECEIVE_BUFFER: usize = 4 << 20;
/// Send buffer of each UDP socket, in bytes.
const SEND_BUFFER: usize = 1 << 20;
/// Maximum number of connections waiting to be accepted.
const TCP_BACKLOG: i32 = 1024;
/// Number of attempts to find a port that is free for both TCP and UDP.
const FREE_PORT_TRIES: usize = 16;

/// The sockets of one listen address.
pub(super) struct Endpoint {
    /// The address, with the port selected for port 0.
    pub(super) address: SocketAddr,
    pub(super) tcp: tokio::net::TcpListener,
    /// One socket per worker; the kernel steers a client to one of them.
    pub(super) udp: Vec<udp::Socket>,
}

impl Endpoint {
    pub(super) fn bind(address: SocketAddr, options: &Options, workers: usize) -> Result<Self, ServerError> {
        let tries = if address.port() == 0 { FREE_PORT_TRIES } else { 1 };
        let mut tries_left = tries;
        loop {
            tries_left -= 1;
            match Self::try_bind(address, options, workers) {
                Err(error) if tries_left > 0 && error.source.kind() == io::ErrorKind::AddrInUse => {}
                result => return result,
            }
        }
    }

    fn try_bind(address: SocketAddr, options: &Options, workers: usize) -> Result<Self, ServerError> {
        let only_v6 = options.ipv4_apart;
        let failed = |address, transport| {
            move |source: io::Error| ServerError { address, transport, remedy: remedy(&source), source }
        };
        let tcp = bind_tcp(address, only_v6).map_err(failed(address, "TCP"))?;
        let address = tcp.local_addr().map_err(failed(address, "TCP"))?;
        let with_pktinfo =
            address.ip().is_unspecified() || options.max_reply.is_some() || options.arrivals.is_on();
        let udp = bind_udp(address, only_v6, with_pktinfo, workers).map_err(failed(address, "UDP"))?;
        Ok(Self { address, tcp, udp })
    }
}

/// Binds the listener. It does not share its port, so binding detects another server on the same
/// address, including a second instance of this one.
fn bind_tcp(address: SocketAddr, only_v6: bool) -> io::Result<tokio::net::TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    if address.is_ipv6() {
        socket.set_only_v6(only_v6)?;
    }
    // Permits binding while connections of an earlier run are in TIME_WAIT.
    socket.set_reuse_address(true)?;
    socket.bind(&address.into())?;
    socket.listen(TCP_BACKLOG)?;
    socket.set_nonblocking(true)?;
    tokio::net::TcpListener::from_std(TcpListener::from(socket))
}

/// Binds one socket per worker. If `with_pktinfo` is set, the kernel reports the destination address and
/// the interface of each datagram.
fn bind_udp(
    address: SocketAddr,
    only_v6: bool,
    with_pktinfo: bool,
    workers: usize,
) -> io::Result<Vec<udp::Socket>> {
    // Sockets with SO_REUSEPORT would silently share the port with another server of the same user;
    // a first bind without it detects that server.
    drop(udp_socket(address, only_v6, false)?);
    let bind = |_| -> io::Result<Socket> {
        let socket = udp_socket(address, only_v6, true)?;
        if with_pktinfo {
            ask_for_destination(&socket, address.ip())?;
        }
        grow_buffers(&socket);
        Ok(socket)
    };
    let sockets = (0..workers).map(bind).collect::<io::Result<Vec<_>>>()?;
    if let [first, _, ..] = &sockets[..] {
        // Otherwise the kernel distributes clients by a hash of their addresses.
        let _by_hash = steer_by_cpu(first, workers);
    }
    Ok(sockets
        .into_iter()
        .map(|socket| udp::Socket::new(socket.into(), with_pktinfo, address.port()))
        .collect())
}

/// Lets the kernel deliver each datagram to the socket with the number of the CPU that received it, of
/// `count` sockets that share a port with this one. A client on this machine is received on its own CPU,
/// so its worker runs there as well, and no other CPU must be woken up.
fn steer_by_cpu(socket: &Socket, count: usize) -> io::Result<()> {
    /// Kernel 4.5.
    const SO_ATTACH_REUSEPORT_CBPF: i32 = 51;
    let instruction = |code: u32, k: u32| libc::sock_filter { code: code as u16, jt: 0, jf: 0, k };
    // The number of the CPU modulo `count`. A socket that has been closed meanwhile has no number, and the
    // kernel then chooses by the hash.
    let mut program = [
        instruction(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, (libc::SKF_AD_OFF + libc::SKF_AD_CPU) as u32),
        instruction(libc::BPF_ALU | libc::BPF_MOD | libc::BPF_K, count as u32),
        instruction(libc::BPF_RET | libc::BPF_A, 0),
    ];
    let program = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    set_option(socket, libc::SOL_SOCKET, SO_ATTACH_REUSEPORT_CBPF, &program)
}

fn udp_socket(address: SocketAddr, only_v6: bool, share: bool) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(address), Type::DGRAM, Some(Protocol::UDP))?;
    if address.is_ipv6() {
        socket.set_only_v6(only_v6)?;
    }
    // SO_REUSEPORT, kernel 3.9.
    socket.set_reuse_port(share)?;
    socket.bind(&address.into())?;
    Ok(socket)
}

fn ask_for_destination(socket: &Socket, bound_to: IpAddr) -> io::Result<()> {
    let (level, option) = match bound_to {
        IpAddr::V4(_) => (libc::IPPROTO_IP, libc::IP_PKTINFO),
        IpAddr::V6(_) => (libc::IPPROTO_IPV6, libc::IPV6_RECVPKTINFO),
    };
    set_option(socket, level, option, &1_i32)
}

/// Requests large buffers; smaller ones also work.
fn grow_buffers(socket: &Socket) {
    // CAP_NET_ADMIN permits sizes above the limit.
    let forced = set_option(socket, libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, &(RECEIVE_BUFFER as i32));
    if forced.is_err() {
        let _smaller = socket.set_recv_buffer_size(RECEIVE_BUFFER);
    }
    let _smaller = socket.set_send_buffer_size(SEND_BUFFER);
}

/// Calls `setsockopt` with a value of the type that the option requires.
fn set_option<T>(socket: &Socket, level: i32, option: i32, value: &T) -> io::Result<()> {
    // SAFETY: the descriptor is open, and the kernel reads as many bytes as the value has. The pointer in a
    // program leads to its instructions, which outlive the call.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            level,
            option,
            (&raw const *value).cast(),
            size_of_val(value) as libc::socklen_t,
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

impl ServerError {
    /// Returns the error of listening on an address that this machine does not have; `None` if it has it.
    pub fn of_foreign(address: SocketAddr) -> Option<Self> {
        // Port 0 is always free, so a failure means that the address is wrong.
        let source = TcpListener::bind((address.ip(), 0)).err()?;
        let is_foreign = source.kind() == io::ErrorKind::AddrNotAvailable;
        is_foreign.then(|| Self { address, transport: "TCP", remedy: remedy(&source), source })
    }

    /// Returns the error of listening on an address on which another program listens; `None` if it is free,
    /// or if that cannot be found out.
    pub fn of_taken(address: SocketAddr) -> Option<Self> {
        let udp = UdpSocket::bind(address).err().map(|source| ("UDP", source));
        let (transport, source) = udp.or_else(|| Some(("TCP", TcpListener::bind(address).err()?)))?;
        let is_taken = source.kind() == io::ErrorKind::AddrInUse;
        is_taken.then(|| Self { address, transport, remedy: remedy(&source), source })
    }
}

fn remedy(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::AddrInUse => {
            "another process listens there; stop it, or change address or port in the configuration"
        }
        io::ErrorKind::AddrNotAvailable => {
            "no interface has this address; add it, or change the configuration"
        }
        io::ErrorKind::PermissionDenied => "ports below 1024 need CAP_NET_BIND_SERVICE",
        _ => "check address and port in the configuration",
    }
}

#[cfg(test)]
mod tests {
    use std::{net::Ipv4Addr, thread, time::Duration};

    use nix::{
        sched::{CpuSet, sched_getaffinity, sched_setaffinity},
        unistd::Pid,
    };

    use super::*;

    /// Sends as many datagrams, from different ports, from a thread on one CPU.
    fn send_on(cpu: usize, to: SocketAddr, count: usize) {
        let send = move || {
            let mut only = CpuSet::new();
            only.set(cpu).unwrap();
            sched_setaffinity(Pid::from_raw(0), &only).unwrap();
            for _ in 0..count {
                let client = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
                client.send_to(&[cpu as u8], to).unwrap();
            }
        };
        thread::spawn(send).join().unwrap();
    }

    #[tokio::test]
    async fn datagrams_reach_worker_of_their_cpu() {
        const EACH: usize = 20;
        const WORKERS: usize = 2;
        let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        let endpoint = Endpoint::bind(any, &Options::default(), WORKERS).unwrap();
        let allowed = sched_getaffinity(Pid::from_raw(0)).unwrap();
        let cpus = (0..CpuSet::count()).filter(|&cpu| allowed.is_set(cpu).unwrap());
        let cpus: Vec<usize> = cpus.take(4).collect();
        for &cpu in &cpus {
            send_on(cpu, endpoint.address, EACH);
        }
        for (number, socket) in endpoint.udp.into_iter().enumerate() {
            let socket = UdpSocket::from(socket.into_descriptor());
            socket.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
            for _ in 0..EACH * cpus.iter().filter(|&&cpu| cpu % WORKERS == number).count() {
                let mut cpu = [0];
                socket.recv(&mut cpu).unwrap();
                assert_eq!(usize::from(cpu[0]) % WORKERS, number);
            }
        }
    }
}
