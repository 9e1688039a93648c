//! A scripted recursor on 127.0.0.1: UDP and TCP on one port.

use std::{
    collections::{BTreeMap, HashMap},
    net::{Ipv4Addr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use anyhow::{Context, Result};
use parking_lot::{Mutex, MutexGuard};
use serde_json::{Value, json};
use socket2::{Domain, Socket, Type};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream, UdpSocket},
    runtime::Runtime,
    time::{sleep, timeout},
};

use super::{
    message::{
        Flags, Seen, canonical, class_number, from_hex, rcode_number, type_number, write_header,
        write_name, write_opt, write_record,
    },
    scenario::{Action, Opt, Proto, Record, RecursorScript, ScriptedOpt},
};

/// Idle timeout of a connection.
const IDLE: Duration = Duration::from_secs(60);

/// A running recursor; its tasks end with the runtime.
#[derive(Debug)]
pub struct Recursor(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared(Mutex<State>);

/// The script and the queries seen so far.
#[derive(Debug, Default)]
struct State {
    script: RecursorScript,
    /// Number of uses of each rule with a sequence, by its index.
    used: HashMap<usize, usize>,
    counts: BTreeMap<String, u64>,
    /// The last query in the format of recordings.
    last: Option<Value>,
    /// Last error found in the script.
    problem: Option<String>,
}

impl Recursor {
    /// Starts a recursor.
    ///
    /// # Errors
    ///
    /// Fails if the port is in use.
    pub fn start(runtime: &Runtime, script: RecursorScript, port: u16) -> Result<Self> {
        let shared = Arc::new(Shared(Mutex::new(State {
            script,
            ..State::default()
        })));
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        let _inside = runtime.enter();
        let socket = |kind| -> Result<Socket> {
            let socket = Socket::new(Domain::IPV4, kind, None)?;
            socket.set_reuse_address(kind == Type::STREAM)?;
            socket.set_nonblocking(true)?;
            socket
                .bind(&address.into())
                .with_context(|| format!("{address} is not free"))?;
            Ok(socket)
        };
        let (udp, tcp) = (socket(Type::DGRAM)?, socket(Type::STREAM)?);
        udp.set_send_buffer_size(1 << 20)?;
        tcp.listen(64)?;
        let udp = UdpSocket::from_std(udp.into())?;
        let tcp = TcpListener::from_std(tcp.into())?;
        runtime.spawn(serve_udp(Arc::clone(&shared), Arc::new(udp)));
        runtime.spawn(serve_tcp(Arc::clone(&shared), tcp));
        Ok(Self(shared))
    }

    /// Replaces the script for later queries.
    pub fn set_script(&self, script: RecursorScript) {
        let mut state = self.0.state();
        state.script = script;
        state.used.clear();
    }

    /// Returns the number of queries so far, by transport.
    pub fn counts(&self) -> BTreeMap<String, u64> {
        let state = self.0.state();
        let count = |proto: &str| {
            (
                proto.to_owned(),
                state.counts.get(proto).copied().unwrap_or(0),
            )
        };
        BTreeMap::from(["udp", "tcp"].map(count))
    }

    /// Returns the last query in the format of recordings.
    pub fn last(&self) -> Option<Value> {
        self.0.state().last.clone()
    }

    /// Returns the last error found in the script.
    pub fn problem(&self) -> Option<String> {
        self.0.state().problem.clone()
    }
}

async fn serve_udp(shared: Arc<Shared>, socket: Arc<UdpSocket>) {
    let mut buffer = vec![0; 65_535];
    loop {
        // An error belongs to an earlier reply, whose client has gone.
        let Ok((length, client)) = socket.recv_from(&mut buffer).await else {
            continue;
        };
        let Some((delay, reply)) = shared.answer(&buffer[..length], Proto::Udp) else {
            continue;
        };
        let socket = Arc::clone(&socket);
        let send = async move {
            if !delay.is_zero() {
                sleep(delay).await;
            }
            // Fails if the client has stopped waiting.
            let _ = socket.send_to(&reply, client).await;
        };
        if delay.is_zero() {
            send.await;
        } else {
            tokio::spawn(send);
        }
    }
}

async fn serve_tcp(shared: Arc<Shared>, listener: TcpListener) {
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            continue;
        };
        tokio::spawn(converse(Arc::clone(&shared), stream));
    }
}

/// Answers the queries of a connection; a query without a reply ends it.
async fn converse(shared: Arc<Shared>, mut stream: TcpStream) -> Option<()> {
    loop {
        let length = timeout(IDLE, stream.read_u16()).await.ok()?.ok()?;
        let mut query = vec![0; usize::from(length)];
        timeout(IDLE, stream.read_exact(&mut query))
            .await
            .ok()?
            .ok()?;
        let (delay, reply) = shared.answer(&query, Proto::Tcp)?;
        sleep(delay).await;
        let length = u16::try_from(reply.len()).ok()?;
        stream
            .write_all(&[&length.to_be_bytes()[..], &reply].concat())
            .await
            .ok()?;
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock()
    }

    /// Records a query; returns the reply and its delay.
    fn answer(&self, query: &[u8], proto: Proto) -> Option<(Duration, Vec<u8>)> {
        let query = Seen::parse(query).ok()?;
        let (name, qtype, class) = query.question.first()?.clone();
        let mut state = self.state();
        *state.counts.entry(proto.to_string()).or_default() += 1;
        let Flags {
            opcode, rd, ad, cd, ..
        } = query.flags;
        state.last = Some(json!({
            "proto": proto.to_string(), "id": query.id, "name": name, "type": qtype, "class": class,
            "rd": rd, "ad": ad, "cd": cd, "opcode": opcode, "opt": query.opt.as_ref().map(shown),
        }));
        let action = state.choose(&name, &qtype, proto);
        if action.drop {
            return None;
        }
        match write_reply(&query, &action) {
            Ok(reply) => Some((Duration::from_millis(action.delay_ms), reply)),
            Err(error) => {
                state.problem = Some(format!("{name} {qtype}: {error:#}"));
                None
            }
        }
    }
}

impl State {
    /// Returns the action that the script defines for a query.
    fn choose(&mut self, name: &str, qtype: &str, proto: Proto) -> Action {
        let name = name.to_lowercase();
        for (place, rule) in self.script.rules.iter().enumerate() {
            let wanted = rule.name.to_lowercase();
            let below = wanted.strip_prefix('*');
            let is_named = wanted == "*"
                || wanted == name
                || below.is_some_and(|below| below.starts_with('.') && name.ends_with(below));
            let is_typed = rule.qtype == "*" || rule.qtype == qtype;
            if !(is_named && is_typed && (rule.proto == "*" || rule.proto == proto.to_string())) {
                continue;
            }
            if let Some(last) = rule
                .seq
                .as_ref()
                .and_then(|sequence| sequence.len().checked_sub(1))
            {
                let used = self.used.entry(place).or_default();
                let now = (*used).min(last);
                *used += 1;
                return rule
                    .seq
                    .as_ref()
                    .map(|sequence| sequence[now].clone())
                    .unwrap_or_default();
            }
            return rule.action.clone().unwrap_or_default();
        }
        let nxdomain = || Action {
            rcode: Some("NXDOMAIN".to_owned()),
            ..Action::default()
        };
        self.script.default.clone().unwrap_or_else(nxdomain)
    }
}

/// Returns an OPT in the format of recordings.
fn shown(opt: &Opt) -> Value {
    let Opt {
        udp_size,
        dnssec_ok,
        version,
        options,
    } = opt;
    let mut shown = json!({"udp_size": udp_size, "do": dnssec_ok, "version": version});
    if !options.is_empty() {
        shown["options"] = json!(options);
    }
    shown
}

/// Encodes the reply that an action describes.
fn write_reply(query: &Seen, action: &Action) -> Result<Vec<u8>> {
    let (name, qtype, class) = query.question.first().context("no question")?;
    if let Some(raw) = &action.raw {
        let raw = from_hex(raw)?;
        let rest = raw.get(2..).unwrap_or_default();
        return Ok([&query.id.to_be_bytes()[..], rest].concat());
    }
    let (name, qtype) = action
        .question
        .as_ref()
        .map_or((name, qtype), |(name, qtype)| (name, qtype));
    let records = |section: &[Record]| -> Vec<Record> {
        let mut records = section.to_vec();
        for record in records.iter_mut().filter(|record| record.0 == "@") {
            record.0.clone_from(&query.question[0].0);
        }
        records
    };
    let mut answers = records(&action.answers);
    if let Some(many) = &action.many_a {
        let address = |number: u32| Ipv4Addr::from_bits(many.base.to_bits() + number).to_string();
        answers.extend((0..many.count).map(|number| {
            Record(
                query.question[0].0.clone(),
                "A".to_owned(),
                many.ttl,
                address(number),
                None,
            )
        }));
    }
    let (authority, additional) = (records(&action.authority), records(&action.additional));
    let opt = match &action.opt {
        Some(ScriptedOpt::Echo(_)) => query.opt.as_ref().map(|asked| Opt {
            udp_size: 1232,
            dnssec_ok: asked.dnssec_ok,
            ..Opt::default()
        }),
        Some(ScriptedOpt::Given(opt)) => Some(opt.clone()),
        None => None,
    };
    let Flags { opcode, rd, cd, .. } = query.flags;
    let flags = Flags {
        qr: true,
        opcode,
        aa: action.aa,
        tc: action.tc,
        rd: action.rd.unwrap_or(rd),
        ra: action.ra.unwrap_or(true),
        z: false,
        ad: action.ad,
        cd: action.cd.unwrap_or(cd),
    };
    let rcode = rcode_number(action.rcode.as_deref().unwrap_or("NOERROR"))? & 15;
    let id = if action.wrong_id {
        query.id ^ 0x5555
    } else {
        query.id
    };
    let counts = [
        usize::from(!action.no_question),
        answers.len(),
        authority.len(),
        additional.len() + usize::from(opt.is_some()),
    ];
    let mut reply = write_header(id, flags.write() | rcode, counts.map(|count| count as u16));
    let question = (!action.no_question).then(|| canonical(name)).transpose()?;
    if question.is_some() {
        write_name(&mut reply, name)?;
        reply.extend(type_number(&Value::from(qtype.as_str()))?.to_be_bytes());
        reply.extend(class_number(&Value::from(class.as_str()))?.to_be_bytes());
    }
    for record in answers.iter().chain(&authority).chain(&additional) {
        write_record(&mut reply, record, question.as_deref())?;
    }
    if let Some(opt) = opt {
        write_opt(&mut reply, &opt)?;
    }
    if let Some(bytes) = action.cut {
        reply.truncate(bytes);
    }
    Ok(reply)
}
