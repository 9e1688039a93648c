//! The order of answers: every order must be equally likely.

use std::collections::HashMap;

use whole_system_tests::program::Hook;

use crate::{
    fixtures::world,
    install, load,
    packet::{A, AAAA, Datagram, Opt, Query},
};

/// Number of sampled replies.
const REPLIES: usize = 20_000;

/// Returns the chi-square of counts against a uniform distribution as an equivalent normal deviate
/// (Wilson and Hilferty), because chi-square's own tail is much heavier.
fn unevenness(counts: &[usize]) -> f64 {
    let total: usize = counts.iter().sum();
    let even = total as f64 / counts.len() as f64;
    let chi_square: f64 = counts
        .iter()
        .map(|&count| (count as f64 - even).powi(2) / even)
        .sum();
    let freedom = counts.len() as f64 - 1.0;
    let variance = 2.0 / (9.0 * freedom);
    ((chi_square / freedom).cbrt() - (1.0 - variance)) / variance.sqrt()
}

/// Returns the answers of many replies, each as the last byte of its address, minus one.
fn orders(name: &str, qtype: u16, opt: Option<Opt>) -> Option<Vec<Vec<usize>>> {
    let mut program = load()?;
    install(&mut program, &world());
    let query = Datagram::v4(
        Query {
            opt: opt.clone(),
            ..Query::new(name, qtype)
        }
        .bytes(),
    )
    .frame();
    let record_len = if qtype == A { 16 } else { 28 };
    let question_end = query.len() - opt.as_ref().map_or(0, |_| 11);
    let replies = (0..REPLIES).map(|_| {
        let reply = program
            .run(Hook::Xdp, &query)
            .expect("the program runs")
            .packet;
        let answers = &reply[question_end..reply.len() - opt.as_ref().map_or(0, |_| 11)];
        answers
            .chunks(record_len)
            .map(|record| usize::from(record[record_len - 1]) - 1)
            .collect()
    });
    Some(replies.collect())
}

/// Six standard deviations: exceeded by chance about once in a hundred million counts.
const BOUND: f64 = 6.0;

#[test]
fn shuffle_is_uniform_by_position() {
    for (name, qtype, count) in [
        ("v4-3.bosh", A, 3),
        ("v4-10.bosh", A, 10),
        ("v6-3.bosh", AAAA, 3),
    ] {
        let Some(orders) = orders(name, qtype, None) else {
            return;
        };
        let mut at_place = vec![vec![0; count]; count];
        let mut pairs: HashMap<(usize, usize), usize> = HashMap::new();
        for order in &orders {
            for (place, &address) in order.iter().enumerate() {
                at_place[place][address] += 1;
            }
            for pair in order.windows(2) {
                *pairs.entry((pair[0], pair[1])).or_default() += 1;
            }
        }
        for (place, counts) in at_place.iter().enumerate() {
            assert!(
                unevenness(counts) < BOUND,
                "{name}, place {place}: {counts:?}"
            );
        }
        assert_eq!(
            pairs.len(),
            count * (count - 1),
            "{name}: every ordered pair occurs"
        );
        let counts: Vec<_> = pairs.values().copied().collect();
        assert!(
            unevenness(&counts) < BOUND,
            "{name}, adjacent pairs: {pairs:?}"
        );
    }
}

#[test]
fn orders_of_three_are_uniform() {
    let Some(orders) = orders("v4-3.bosh", A, None) else {
        return;
    };
    let mut counts: HashMap<Vec<usize>, usize> = HashMap::new();
    for order in orders {
        *counts.entry(order).or_default() += 1;
    }
    assert_eq!(counts.len(), 6, "{counts:?}");
    assert!(
        unevenness(&counts.values().copied().collect::<Vec<_>>()) < BOUND,
        "{counts:?}"
    );
}

#[test]
fn truncated_replies_sample_uniformly() {
    let Some(orders) = orders("v4-60.bosh", A, Some(Opt::new(512))) else {
        return;
    };
    let mut counts = vec![0; 60];
    for order in &orders {
        assert!(order.len() < 60, "cut");
        for &address in order {
            counts[address] += 1;
        }
    }
    assert!(unevenness(&counts) < BOUND, "{counts:?}");
}

#[test]
fn successive_shuffles_are_independent() {
    let Some(orders) = orders("v4-3.bosh", A, None) else {
        return;
    };
    // Counts pairs of first address and previous reply's first address.
    let mut counts = [0; 9];
    for pair in orders.windows(2) {
        counts[pair[0][0] * 3 + pair[1][0]] += 1;
    }
    assert!(unevenness(&counts) < BOUND, "{counts:?}");
}
