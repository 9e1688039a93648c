//! The sockets of an address: one TCP listener and several UDP sockets, each with a worker.

use std::{
    io, mem,
    net::{IpAddr, SocketAddr, TcpListener, UdpSocket},
    os::fd::{AsRawFd, OwnedFd, RawFd},
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use nix::sys::socket::{
    Shutdown, setsockopt, shutdown,
    sockopt::{AttachReusePortCbpf, Ipv4PacketInfo, Ipv6RecvPacketInfo, RcvBufForce},
};
use socket2::{Domain, Protocol, Socket, Type};

use super::{Options, ServerError};
use dns_kit::mmsg::ControlMessages;

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

/// Time that a task waits for room in the socket's send buffer, and the number of retries.
const SEND_RETRY: (Duration, usize) = (Duration::from_millis(1), 20);

/// The sockets of one listen address.
pub(super) struct Endpoint {
    /// The address, with the port selected for port 0.
    pub(super) address: SocketAddr,
    pub(super) tcp: tokio::net::TcpListener,
    /// One socket per worker; the kernel steers a client to one of them.
    pub(super) udp: Vec<WorkerSocket>,
}

impl Endpoint {
    pub(super) fn bind(
        address: SocketAddr,
        options: &Options,
        workers: usize,
    ) -> Result<Self, ServerError> {
        let tries = if address.port() == 0 {
            FREE_PORT_TRIES
        } else {
            1
        };
        // Port 0 is chosen for TCP; another process may have the same port by UDP.
        for _ in 1..tries {
            match Self::try_bind(address, options, workers) {
                Err(error) if error.source.kind() == io::ErrorKind::AddrInUse => {}
                result => return result,
            }
        }
        Self::try_bind(address, options, workers)
    }

    fn try_bind(
        address: SocketAddr,
        options: &Options,
        workers: usize,
    ) -> Result<Self, ServerError> {
        let only_v6 = options.ipv4_apart;
        let tcp = bind_tcp(address, only_v6)
            .map_err(|source| ServerError::new(address, "TCP", source))?;
        let address = tcp
            .local_addr()
            .map_err(|source| ServerError::new(address, "TCP", source))?;
        let with_pktinfo = address.ip().is_unspecified()
            || options.max_reply.is_some()
            || options.arrivals.is_on();
        let udp = bind_udp(address, only_v6, with_pktinfo, workers)
            .map_err(|source| ServerError::new(address, "UDP", source))?;
        Ok(Self { address, tcp, udp })
    }
}

/// Binds the listener. It does not share its port, so binding detects another server on the same
/// address, including a second instance of this one.
fn bind_tcp(address: SocketAddr, only_v6: bool) -> io::Result<tokio::net::TcpListener> {
    let socket = Socket::new(
        Domain::for_address(address),
        Type::STREAM,
        Some(Protocol::TCP),
    )?;
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
) -> io::Result<Vec<WorkerSocket>> {
    // Sockets with SO_REUSEPORT would silently share the port with another server of the same user;
    // a first bind without it detects that server.
    drop(udp_socket(address, only_v6, false)?);
    let sockets = (0..workers)
        .map(|_| -> io::Result<Socket> {
            let socket = udp_socket(address, only_v6, true)?;
            if with_pktinfo {
                ask_for_destination(&socket, address.ip())?;
            }
            grow_buffers(&socket);
            Ok(socket)
        })
        .collect::<io::Result<Vec<_>>>()?;
    if let [first, _, ..] = &sockets[..] {
        // Otherwise the kernel distributes clients by a hash of their addresses.
        let _by_hash = steer_by_cpu(first, workers);
    }
    Ok(sockets
        .into_iter()
        .map(|socket| WorkerSocket::new(socket.into(), with_pktinfo, address.port()))
        .collect())
}

/// Lets the kernel deliver each datagram to the socket with the number of the CPU that received it, of
/// `count` sockets that share a port with this one. A client on this machine is received on its own CPU,
/// so its worker runs there as well, and no other CPU must be woken up.
fn steer_by_cpu(socket: &Socket, count: usize) -> io::Result<()> {
    let instruction = |code: u32, k: u32| libc::sock_filter {
        code: code as u16,
        jt: 0,
        jf: 0,
        k,
    };
    // The number of the CPU modulo `count`. A socket that has been closed meanwhile has no number, and the
    // kernel then chooses by the hash.
    let mut program = [
        instruction(
            libc::BPF_LD | libc::BPF_W | libc::BPF_ABS,
            (libc::SKF_AD_OFF + libc::SKF_AD_CPU) as u32,
        ),
        instruction(libc::BPF_ALU | libc::BPF_MOD | libc::BPF_K, count as u32),
        instruction(libc::BPF_RET | libc::BPF_A, 0),
    ];
    let program = libc::sock_fprog {
        len: program.len() as u16,
        filter: program.as_mut_ptr(),
    };
    // Kernel 4.5.
    Ok(setsockopt(socket, AttachReusePortCbpf, &program)?)
}

fn udp_socket(address: SocketAddr, only_v6: bool, share: bool) -> io::Result<Socket> {
    let socket = Socket::new(
        Domain::for_address(address),
        Type::DGRAM,
        Some(Protocol::UDP),
    )?;
    if address.is_ipv6() {
        socket.set_only_v6(only_v6)?;
    }
    // SO_REUSEPORT, kernel 3.9.
    socket.set_reuse_port(share)?;
    socket.bind(&address.into())?;
    Ok(socket)
}

fn ask_for_destination(socket: &Socket, bound_to: IpAddr) -> io::Result<()> {
    match bound_to {
        IpAddr::V4(_) => setsockopt(socket, Ipv4PacketInfo, &true)?,
        IpAddr::V6(_) => setsockopt(socket, Ipv6RecvPacketInfo, &true)?,
    }
    Ok(())
}

/// Requests large buffers; smaller ones also work.
fn grow_buffers(socket: &Socket) {
    // CAP_NET_ADMIN permits sizes above the limit.
    if setsockopt(socket, RcvBufForce, &RECEIVE_BUFFER).is_err() {
        let _smaller = socket.set_recv_buffer_size(RECEIVE_BUFFER);
    }
    let _smaller = socket.set_send_buffer_size(SEND_BUFFER);
}

impl ServerError {
    fn new(address: SocketAddr, transport: &'static str, source: io::Error) -> Self {
        Self {
            address,
            transport,
            remedy: remedy(&source),
            source,
        }
    }

    /// Returns the error of listening on an address that this machine does not have; `None` if it has it.
    pub fn of_foreign(address: SocketAddr) -> Option<Self> {
        // Port 0 is always free, so a failure means that the address is wrong.
        let source = TcpListener::bind((address.ip(), 0)).err()?;
        let is_foreign = source.kind() == io::ErrorKind::AddrNotAvailable;
        is_foreign.then(|| Self::new(address, "TCP", source))
    }

    /// Returns the error of listening on an address on which another program listens; `None` if it is free,
    /// or if that cannot be found out.
    pub fn of_taken(address: SocketAddr) -> Option<Self> {
        let udp = UdpSocket::bind(address).err().map(|source| ("UDP", source));
        let (transport, source) =
            udp.or_else(|| Some(("TCP", TcpListener::bind(address).err()?)))?;
        let is_taken = source.kind() == io::ErrorKind::AddrInUse;
        is_taken.then(|| Self::new(address, transport, source))
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

//----------- WorkerSocket ---------------------------------------------------

/// A bound UDP socket, shared by its worker and the tasks that reply later.
pub(super) struct WorkerSocket {
    descriptor: OwnedFd,
    /// Whether the kernel reports the destination of datagrams, from which replies are then sent.
    pub(super) with_pktinfo: bool,
    pub(super) port: u16,
    /// Set when the worker should stop.
    pub(super) stopping: AtomicBool,
}

impl WorkerSocket {
    /// Wraps a bound, blocking socket.
    pub(super) fn new(descriptor: OwnedFd, with_pktinfo: bool, port: u16) -> Self {
        Self {
            descriptor,
            with_pktinfo,
            port,
            stopping: AtomicBool::new(false),
        }
    }

    /// Stops the worker after it has answered its queued queries.
    pub(super) fn stop(&self) {
        self.stopping.store(true, Ordering::Release);
        // Wakes the worker: further `recvmmsg` calls return the queued datagrams, then empty ones
        // without a sender. An unconnected socket returns ENOTCONN although it is shut down
        // (inet_shutdown, kernel 2.6 and later).
        let _not_connected = shutdown(self.raw(), Shutdown::Read);
    }

    #[cfg(test)]
    pub(super) fn into_descriptor(self) -> OwnedFd {
        self.descriptor
    }

    pub(super) fn raw(&self) -> RawFd {
        self.descriptor.as_raw_fd()
    }

    /// Returns the fill level of the receive queue: 0 to about 1 (`SO_MEMINFO`, kernel 4.12).
    pub(super) fn queue_fill(&self) -> io::Result<f64> {
        const SO_MEMINFO: libc::c_int = 55;
        /// The first two words: `SK_MEMINFO_RMEM_ALLOC`, `SK_MEMINFO_RCVBUF` (`linux/sock_diag.h`).
        const WORDS: usize = 2;
        let mut words = [0_u32; WORDS];
        let mut size = size_of_val(&words) as libc::socklen_t;
        // SAFETY: the kernel writes at most `size` bytes to `words`.
        let result = unsafe {
            libc::getsockopt(
                self.raw(),
                libc::SOL_SOCKET,
                SO_MEMINFO,
                words.as_mut_ptr().cast(),
                &raw mut size,
            )
        };
        if result != 0 {
            return Err(io::Error::last_os_error());
        }
        let [used, allowed] = words;
        Ok(f64::from(used) / f64::from(allowed.max(1)))
    }

    /// Sends one reply without blocking.
    pub(super) fn try_send(&self, reply: &mut [u8], peer: &mut ReturnPath) -> io::Result<()> {
        let mut slice = libc::iovec {
            iov_base: reply.as_mut_ptr().cast(),
            iov_len: reply.len(),
        };
        // SAFETY: all-zero bytes are a valid header.
        let mut header: libc::msghdr = unsafe { mem::zeroed() };
        header.msg_name = (&raw mut peer.peer).cast();
        header.msg_namelen = peer.address_len();
        header.msg_iov = &raw mut slice;
        header.msg_iovlen = 1;
        if self.with_pktinfo {
            header.msg_control = peer.control.as_mut_ptr();
            header.msg_controllen = peer.control_len;
        }
        // SAFETY: the header points to buffers that outlive the call.
        let sent = unsafe { libc::sendmsg(self.raw(), &raw const header, libc::MSG_DONTWAIT) };
        if sent < 0 {
            Err(io::Error::last_os_error())
        } else {
            Ok(())
        }
    }

    /// Sends one reply from a task; returns whether the kernel accepted it.
    pub(super) async fn send(&self, mut reply: Vec<u8>, mut peer: ReturnPath) -> bool {
        let (pause, tries) = SEND_RETRY;
        for _ in 0..tries {
            match self.try_send(&mut reply, &mut peer) {
                Ok(()) => return true,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    tokio::time::sleep(pause).await
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return false,
            }
        }
        false
    }
}

/// Destination of a reply, and the local address from which it is sent.
#[derive(Clone)]
pub(super) struct ReturnPath {
    peer: libc::sockaddr_storage,
    /// The local address, as a control message.
    control: ControlMessages,
    control_len: usize,
}

impl ReturnPath {
    /// Returns the way back of a datagram with this sender and these control messages.
    pub(super) fn new(
        peer: &libc::sockaddr_storage,
        control: &ControlMessages,
        control_len: usize,
    ) -> Self {
        let mut control = *control;
        control.clear_interface(control_len);
        Self {
            peer: *peer,
            control,
            control_len,
        }
    }

    fn address_len(&self) -> libc::socklen_t {
        let length = if i32::from(self.peer.ss_family) == libc::AF_INET {
            size_of::<libc::sockaddr_in>()
        } else {
            size_of::<libc::sockaddr_in6>()
        };
        length as libc::socklen_t
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
        thread::spawn(move || {
            let mut only = CpuSet::new();
            only.set(cpu).unwrap();
            sched_setaffinity(Pid::from_raw(0), &only).unwrap();
            for _ in 0..count {
                let client = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
                client.send_to(&[cpu as u8], to).unwrap();
            }
        })
        .join()
        .unwrap();
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
            socket
                .set_read_timeout(Some(Duration::from_secs(10)))
                .unwrap();
            for _ in 0..EACH * cpus.iter().filter(|&&cpu| cpu % WORKERS == number).count() {
                let mut cpu = [0];
                socket.recv(&mut cpu).unwrap();
                assert_eq!(usize::from(cpu[0]) % WORKERS, number);
            }
        }
    }

    #[test]
    fn kernel_reports_queue_fill() {
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = socket.local_addr().unwrap();
        let receiver = WorkerSocket::new(socket.try_clone().unwrap().into(), false, address.port());
        assert_eq!(receiver.queue_fill().unwrap(), 0.0);
        for _ in 0..10 {
            socket.send_to(&[0; 1000], address).unwrap();
        }
        let fill = receiver.queue_fill().unwrap();
        assert!(0.0 < fill && fill < 1.0, "{fill}");
    }
}
