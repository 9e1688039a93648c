//! Renews forwarded answers in use by interfaces shortly before they expire, so that no query waits
//! for the renewal.

use std::{sync::Arc, time::Duration};

use tokio::{
    sync::{Semaphore, mpsc::Receiver},
    time::timeout,
};

use crate::state::{Route, ServerState};
use dns_core::wire::{CLASS_IN, OPT_LEN, Parsed, UDP_PAYLOAD_SIZE, opt_record, parse};
use dns_fastpath::AnswerQuestion;

/// Maximum number of concurrent renewals; further ones wait.
const AT_ONCE: usize = 16;

/// Time limit of a renewal. Afterwards the answer expires, and a query fetches it.
const PATIENCE: Duration = Duration::from_secs(5);

/// Executes renewals until the fast path is gone.
pub(super) async fn follow(server_state: Arc<ServerState>, mut requested: Receiver<AnswerQuestion>) {
    let places = Arc::new(Semaphore::new(AT_ONCE));
    while let Some(renewal) = requested.recv().await {
        let Ok(place) = places.clone().acquire_owned().await else { return };
        let server_state = server_state.clone();
        tokio::spawn(async move {
            // The old answer stays until it expires.
            let _ = timeout(PATIENCE, renew(&server_state, &renewal)).await;
            drop(place);
        });
    }
}

/// Fetches an answer from the currently responsible server; its cache publishes it.
async fn renew(server_state: &ServerState, renewal: &AnswerQuestion) {
    let state = server_state.state_full();
    let message = query(renewal);
    let Parsed::Query(query) = parse(&message) else { return };
    if let Route::Handler(answer) | Route::Recursors(answer) = Route::of(&state, &renewal.name, renewal.qtype)
    {
        answer.refresh(&query).await;
    }
}

/// Returns the query that a client with these flags and RD would send.
fn query(renewal: &AnswerQuestion) -> Vec<u8> {
    const RD: u8 = 0x01;
    const CD: u8 = 0x10;
    let AnswerQuestion { name, qtype, dnssec_ok, checking_disabled } = renewal;
    let mut message = Vec::with_capacity(12 + name.as_wire().len() + 4 + OPT_LEN);
    message.extend_from_slice(&[0, 0, RD, if *checking_disabled { CD } else { 0 }]);
    message.extend_from_slice(&[0, 1, 0, 0, 0, 0, 0, u8::from(*dnssec_ok)]);
    message.extend_from_slice(name.as_wire());
    message.extend_from_slice(&qtype.to_be_bytes());
    message.extend_from_slice(&CLASS_IN.to_be_bytes());
    if *dnssec_ok {
        message.extend_from_slice(&opt_record(UDP_PAYLOAD_SIZE, 0, true));
    }
    message
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn renewal_asks_the_same_question() {
        for (dnssec_ok, checking_disabled) in [(false, false), (true, false), (false, true), (true, true)] {
            let renewal = AnswerQuestion {
                name: "www.example".parse().unwrap(),
                qtype: 257,
                dnssec_ok,
                checking_disabled,
            };
            let message = query(&renewal);
            let Parsed::Query(query) = parse(&message) else { panic!("a query: {message:02x?}") };
            assert_eq!((query.question.name(), query.question.qtype), (renewal.name, 257));
            assert_eq!((query.dnssec_ok(), query.checking_disabled()), (dnssec_ok, checking_disabled));
            assert!(query.recursion_desired());
        }
    }
}
