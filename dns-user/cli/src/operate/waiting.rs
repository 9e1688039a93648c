//! Messages of a command while a server does not answer.

use std::{
    fs,
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use bytes::Bytes;
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use tokio::{net::UnixStream, time::timeout};

use super::Problem;
use crate::complain;

/// Time limit for the start of a response and for each further part; reloading a large foundation takes a second.
const MAX_WAIT: Duration = Duration::from_secs(30);

/// Time after which a command says what it waits for.
const MAX_SILENCE: Duration = Duration::from_secs(2);

/// Whether the server has answered this process. Later requests are silent, because the screen of
/// `top` may be in use.
static HAS_ANSWERED: AtomicBool = AtomicBool::new(false);

/// Waits for an exchange with the server at a place, which is a control socket if `socket` names it.
pub(super) async fn answer<T>(
    place: &str,
    socket: Option<&Path>,
    exchange: impl Future<Output = Result<T, Problem>>,
) -> Result<T, Problem> {
    let mut exchange = std::pin::pin!(exchange);
    let mut result = timeout(MAX_SILENCE, &mut exchange).await;
    // A pause of a few hundred milliseconds is usual; silence for longer looks like a hang.
    if result.is_err() {
        if !HAS_ANSWERED.load(Ordering::Relaxed) {
            let server = described(place, socket).await;
            complain(&format_args!("waiting for an answer from {server}"));
        }
        result = timeout(MAX_WAIT - MAX_SILENCE, exchange).await;
    }
    match result {
        Ok(answer) => {
            HAS_ANSWERED.store(true, Ordering::Relaxed);
            answer
        }
        Err(_) => Err(Problem::Unreachable(format!(
            "no answer within {MAX_WAIT:?} from {}",
            described(place, socket).await
        ))),
    }
}

/// Returns the next part of a response; `None` at its end.
pub(super) async fn next_part(body: &mut Incoming) -> Result<Option<Bytes>, Problem> {
    // Even a stream without news has a line every five seconds.
    let Ok(frame) = timeout(MAX_WAIT, body.frame()).await else {
        return Err(Problem::Unreachable(format!(
            "the server has sent nothing for {MAX_WAIT:?}"
        )));
    };
    match frame {
        // Trailers are no part of the text.
        Some(Ok(frame)) => Ok(Some(frame.into_data().unwrap_or_default())),
        Some(Err(error)) => Err(Problem::Unreachable(format!(
            "the connection closed during the response: {error}"
        ))),
        None => Ok(None),
    }
}

/// Describes the server: the place where it was reached, and its process if the kernel tells it.
async fn described(place: &str, socket: Option<&Path>) -> String {
    let Some(socket) = socket else {
        return place.to_owned();
    };
    match process_at(socket).await {
        Some(process) => format!("{place}: {process}"),
        None => place.to_owned(),
    }
}

/// Describes the process that listens at a control socket, with its state.
async fn process_at(socket: &Path) -> Option<String> {
    // The credentials belong to the process that called listen(2) (unix(7)).
    let stream = UnixStream::connect(socket).await.ok()?;
    let pid = stream.peer_cred().ok()?.pid()?;
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (name, state) = name_and_state(&stat)?;
    Some(format!("process {pid} ({name}) {}", in_words(state)))
}

/// Parses `/proc/PID/stat` (proc_pid_stat(5)). The name may contain any character.
fn name_and_state(stat: &str) -> Option<(&str, char)> {
    // The last one, since the name may contain brackets itself.
    let (before, after) = stat.rsplit_once(')')?;
    let (_, name) = before.split_once('(')?;
    Some((name, after.trim_start().chars().next()?))
}

fn in_words(state: char) -> &'static str {
    match state {
        'T' => "is stopped by a signal (kill -CONT continues it)",
        't' => "is stopped by a debugger",
        'D' => "waits for a device or file system",
        'Z' | 'X' => "has ended",
        'R' => "runs and does not answer",
        _ => "sleeps and does not answer",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn odd_process_names_are_parsed() {
        assert_eq!(name_and_state("7 (a) (b) T 1 7 7"), Some(("a) (b", 'T')));
        assert_eq!(name_and_state("7"), None);
    }
}
