//! Each target on its corpus, and on inputs derived from it: the same inputs every time, unless `SEED` is set.

#![expect(
    clippy::unwrap_used,
    reason = "a test that cannot read its input has failed"
)]

use std::{
    env, fs,
    panic::{self, AssertUnwindSafe},
    path::Path,
    time::{Duration, Instant},
};

use bosh_dns_xdp_fuzz::TARGETS;
use fastrand::Rng;
use nix::sys::resource::{Resource, setrlimit};

/// Derived inputs for each target.
const INPUTS: usize = 20_000;

/// Limit for each target on a slow machine, if its corpus is done.
const TIMEOUT: Duration = Duration::from_secs(6);

/// Address space in bytes: a small input that needs more is a defect.
const MEMORY: u64 = 4 << 30;

/// Numbers at which lengths and counters overflow.
const CORNERS: [u8; 6] = [0, 1, 0x7f, 0x80, 0xc0, 0xff];

macro_rules! smoke {
    ($($target:ident)*) => {
        $(
            #[test]
            fn $target() {
                try_inputs(stringify!($target));
            }
        )*

        #[test]
        fn every_target_is_tried() {
            let tried = [$(stringify!($target)),*];
            assert_eq!(TARGETS.iter().map(|target| target.name).collect::<Vec<_>>(), tried);
        }
    };
}

smoke!(aliases config forward handlers http message names query records table);

fn try_inputs(name: &str) {
    setrlimit(Resource::RLIMIT_AS, MEMORY, MEMORY).unwrap();
    let target = TARGETS.iter().find(|target| target.name == name).unwrap();
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("corpus")
        .join(name);
    let mut files: Vec<_> = fs::read_dir(&folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    files.sort();
    let corpus: Vec<Vec<u8>> = files.iter().map(|file| fs::read(file).unwrap()).collect();
    assert!(!corpus.is_empty(), "{} is empty", folder.display());
    let seed = env::var("SEED")
        .ok()
        .and_then(|seed| seed.parse().ok())
        .unwrap_or(1);
    let mut random = Rng::with_seed(seed);
    for input in &corpus {
        attempt(name, target.run, input);
    }
    let begin = Instant::now();
    for _ in 0..INPUTS {
        if begin.elapsed() > TIMEOUT {
            break;
        }
        attempt(name, target.run, &derive(&corpus, &mut random));
    }
}

/// Runs a target; keeps the input in a file if it panics.
fn attempt(name: &str, run: fn(&[u8]), input: &[u8]) {
    if let Err(cause) = panic::catch_unwind(AssertUnwindSafe(|| run(input))) {
        let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("fuzz-{name}"));
        fs::write(&file, input).unwrap();
        eprintln!(
            "the input is in {}: add it to corpus/{name} with the fix",
            file.display()
        );
        panic::resume_unwind(cause);
    }
}

/// Returns an input of the corpus after a few random changes.
fn derive(corpus: &[Vec<u8>], random: &mut Rng) -> Vec<u8> {
    let mut input = random.choice(corpus).unwrap().clone();
    for _ in 0..random.usize(1..=4) {
        change(&mut input, corpus, random);
    }
    input
}

fn change(input: &mut Vec<u8>, corpus: &[Vec<u8>], random: &mut Rng) {
    let at = random.usize(0..=input.len());
    let end = (at + random.usize(1..=8)).min(input.len());
    match random.u8(0..8) {
        0 if at < end => input[at] ^= 1 << random.u8(0..8),
        1 if at < end => input[at] = random.u8(..),
        2 if at < end => input[at] = *random.choice(&CORNERS).unwrap(),
        3 => drop(input.drain(at..end)),
        4 => input.insert(at, random.u8(..)),
        5 => {
            let part = input[at..end].to_vec();
            let place = random.usize(0..=input.len());
            drop(input.splice(place..place, part));
        }
        6 => {
            let other = random.choice(corpus).unwrap();
            input.truncate(at);
            input.extend(&other[random.usize(0..=other.len())..]);
        }
        _ => input.truncate(at),
    }
}
