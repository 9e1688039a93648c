//! A DNS client: real sockets, messages by hickory.

use std::{
    io::{self, Read, Write},
    net::{IpAddr, SocketAddr, TcpStream, UdpSocket},
    time::Duration,
};

use anyhow::{Context, Result};
use hickory_proto::{
    op::{Edns, Message, MessageType, OpCode, Query},
    rr::{Name, RData, RecordType},
};
use socket2::{Domain, Socket, Type};

/// How long a client waits for a reply: so long that a busy machine gives it.
const TIMEOUT: Duration = Duration::from_secs(20);

/// Builds a query with RD set and, with `edns`, an OPT of that size.
pub fn query(name: &str, record_type: RecordType, edns: Option<u16>) -> Result<Message> {
    let mut message = Message::new(fastrand::u16(..), MessageType::Query, OpCode::Query);
    message.metadata.recursion_desired = true;
    message.add_query(Query::query(Name::from_ascii(name)?, record_type));
    if let Some(size) = edns {
        let mut options = Edns::new();
        options.set_max_payload(size);
        message.set_edns(options);
    }
    Ok(message)
}

/// Queries by UDP from a fresh port.
pub fn ask(server: SocketAddr, message: &Message) -> Result<Message> {
    let bytes = ask_raw(server, &message.to_vec()?, TIMEOUT)?;
    Message::from_vec(&bytes).context("the reply cannot be read")
}

/// Sends raw bytes by UDP; returns the bytes of the reply.
pub fn ask_raw(server: SocketAddr, message: &[u8], patience: Duration) -> io::Result<Vec<u8>> {
    ask_raw_as(None, server, message, patience)
}

/// Like [`ask_raw`], from the local address `client` (`None`: any).
pub fn ask_raw_as(
    client: Option<IpAddr>,
    server: SocketAddr,
    message: &[u8],
    patience: Duration,
) -> io::Result<Vec<u8>> {
    ask_by(
        UdpSocket::bind(source(client, server))?,
        server,
        |_| message.to_vec(),
        patience,
    )
}

/// Like [`ask_raw`], with a message that depends on the source address and port.
pub fn ask_raw_from(
    server: SocketAddr,
    message: impl FnOnce(SocketAddr) -> Vec<u8>,
    patience: Duration,
) -> io::Result<Vec<u8>> {
    ask_by(
        UdpSocket::bind(source(None, server))?,
        server,
        message,
        patience,
    )
}

/// Returns the bind address of a client's socket, with any port.
fn source(client: Option<IpAddr>, server: SocketAddr) -> SocketAddr {
    let any = if server.is_ipv4() {
        IpAddr::from([0; 4])
    } else {
        IpAddr::from([0u16; 8])
    };
    (client.unwrap_or(any), 0).into()
}

fn ask_by(
    socket: UdpSocket,
    server: SocketAddr,
    message: impl FnOnce(SocketAddr) -> Vec<u8>,
    patience: Duration,
) -> io::Result<Vec<u8>> {
    socket.connect(server)?;
    socket.set_read_timeout(Some(patience))?;
    socket.send(&message(socket.local_addr()?))?;
    let mut buffer = vec![0; 65_535];
    let length = socket.recv(&mut buffer)?;
    buffer.truncate(length);
    Ok(buffer)
}

/// Queries by TCP on a fresh connection.
pub fn ask_tcp(server: SocketAddr, message: &Message) -> Result<Message> {
    let bytes = ask_tcp_raw(server, &message.to_vec()?)?;
    Message::from_vec(&bytes).context("the reply cannot be read")
}

/// Sends raw bytes by TCP; returns the bytes of the reply.
pub fn ask_tcp_raw(server: SocketAddr, message: &[u8]) -> Result<Vec<u8>> {
    ask_tcp_raw_from(None, server, message)
}

/// Like [`ask_tcp_raw`], from the local address `client` (`None`: any).
pub fn ask_tcp_raw_from(
    client: Option<IpAddr>,
    server: SocketAddr,
    message: &[u8],
) -> Result<Vec<u8>> {
    let socket = Socket::new(Domain::for_address(server), Type::STREAM, None)?;
    if client.is_some() {
        socket.bind(&source(client, server).into())?;
    }
    socket.connect_timeout(&server.into(), TIMEOUT)?;
    let mut stream = TcpStream::from(socket);
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.write_all(&[&u16::try_from(message.len())?.to_be_bytes()[..], message].concat())?;
    Ok(receive_tcp(&mut stream)?)
}

/// Receives one message by TCP.
pub fn receive_tcp(stream: &mut TcpStream) -> io::Result<Vec<u8>> {
    let mut length = [0; 2];
    stream.read_exact(&mut length)?;
    let mut reply = vec![0; usize::from(u16::from_be_bytes(length))];
    stream.read_exact(&mut reply)?;
    Ok(reply)
}

/// Returns the addresses in the answer section, sorted.
pub fn addresses(reply: &Message) -> Vec<IpAddr> {
    let address = |data: &RData| match data {
        RData::A(address) => Some(IpAddr::V4(address.0)),
        RData::AAAA(address) => Some(IpAddr::V6(address.0)),
        _ => None,
    };
    let mut found: Vec<IpAddr> = reply
        .answers
        .iter()
        .filter_map(|record| address(&record.data))
        .collect();
    found.sort();
    found
}
