//! Private keys: generated, parsed, written as PEM, and used to sign. Secrets are wiped from memory
//! on drop. [`KeyPool`] generates keys in advance on a thread of the lowest priority.

use std::{
    fmt,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use aws_lc_rs::{
    encoding::{AsDer, Pkcs8V1Der, PublicKeyX509Der},
    rand::SystemRandom,
    rsa,
    signature::{
        self, ECDSA_P256_SHA256_ASN1_SIGNING, ECDSA_P384_SHA384_ASN1_SIGNING, EcdsaKeyPair,
        EcdsaSigningAlgorithm, KeyPair as _, RSA_PKCS1_SHA256,
    },
};
use base64::{Engine, engine::general_purpose::STANDARD};
use der::{
    Decode, Sequence,
    asn1::{AnyRef, OctetStringRef},
    oid::{
        ObjectIdentifier,
        db::rfc5912::{ECDSA_WITH_SHA_256, ECDSA_WITH_SHA_384, SHA_256_WITH_RSA_ENCRYPTION},
    },
};
use parking_lot::{Condvar, Mutex};
use x509_cert::spki::AlgorithmIdentifierRef;
use zeroize::Zeroizing;

/// Type and size of a leaf's key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum KeyType {
    /// RSA with 2048 bits: the reference's default before November 2025.
    #[value(name = "rsa-2048")]
    Rsa2048,
    /// RSA with 3072 bits: the reference's default.
    #[value(name = "rsa-3072")]
    Rsa3072,
    /// ECDSA on P-256: thousands of times faster to generate than RSA.
    #[value(name = "p-256")]
    P256,
}

/// Private key of a leaf or a CA.
pub struct PrivateKey {
    pair: AlgorithmPair,
    public_key_info: Vec<u8>,
}

enum AlgorithmPair {
    Rsa(rsa::KeyPair),
    P256(EcdsaKeyPair),
    P384(EcdsaKeyPair),
}

/// Error when generating, parsing or using a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum KeyError {
    #[error("the cryptographic library failed")]
    Library,
    #[error(
        "no private key in PEM format; expected `-----BEGIN PRIVATE KEY-----` or an RSA or EC form"
    )]
    NoPem,
    #[error("the private key is encrypted; decrypt it with `openssl pkey`")]
    Encrypted,
    #[error("the private key is damaged: its PEM block cannot be decoded")]
    Damaged,
    #[error("the private key is neither RSA (2048 to 8192 bits) nor ECDSA on P-256 or P-384")]
    Unsupported,
}

impl From<der::Error> for KeyError {
    fn from(_: der::Error) -> Self {
        Self::Library
    }
}

impl From<aws_lc_rs::error::Unspecified> for KeyError {
    fn from(_: aws_lc_rs::error::Unspecified) -> Self {
        Self::Library
    }
}

impl fmt::Debug for PrivateKey {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.pair {
            AlgorithmPair::Rsa(_) => "RSA",
            AlgorithmPair::P256(_) => "P-256",
            AlgorithmPair::P384(_) => "P-384",
        };
        write!(out, "PrivateKey({kind}, secret)")
    }
}

impl PrivateKey {
    /// Generates a key. RSA takes tens to hundreds of milliseconds of CPU time.
    pub fn generate(kind: KeyType) -> Result<Self, KeyError> {
        let pair = match kind {
            KeyType::Rsa2048 => AlgorithmPair::Rsa(rsa::KeyPair::generate(rsa::KeySize::Rsa2048)?),
            KeyType::Rsa3072 => AlgorithmPair::Rsa(rsa::KeyPair::generate(rsa::KeySize::Rsa3072)?),
            KeyType::P256 => {
                AlgorithmPair::P256(EcdsaKeyPair::generate(&ECDSA_P256_SHA256_ASN1_SIGNING)?)
            }
        };
        Self::new(pair)
    }

    /// Parses the first private key of a PEM text: PKCS#1, SEC1 or PKCS#8.
    pub fn from_pem(text: &[u8]) -> Result<Self, KeyError> {
        let text = str::from_utf8(text).map_err(|_| KeyError::Damaged)?;
        let (label, der) = first_key_block(text)?;
        let pair = match label {
            "RSA PRIVATE KEY" => {
                AlgorithmPair::Rsa(rsa::KeyPair::from_der(&der).map_err(|_| KeyError::Unsupported)?)
            }
            "EC PRIVATE KEY" => ecdsa(&der, EcdsaKeyPair::from_private_key_der)?,
            // PKCS#8 states the algorithm, but the library only parses keys of an expected one.
            _ => match rsa::KeyPair::from_pkcs8(&der) {
                Ok(pair) => AlgorithmPair::Rsa(pair),
                Err(_) => ecdsa(&der, EcdsaKeyPair::from_pkcs8)?,
            },
        };
        Self::new(pair)
    }

    fn new(pair: AlgorithmPair) -> Result<Self, KeyError> {
        let public_key_info: PublicKeyX509Der<'_> = match &pair {
            AlgorithmPair::Rsa(pair) => pair.public_key().as_der()?,
            AlgorithmPair::P256(pair) | AlgorithmPair::P384(pair) => pair.public_key().as_der()?,
        };
        let public_key_info = public_key_info.as_ref().to_vec();
        Ok(Self {
            pair,
            public_key_info,
        })
    }

    /// Returns the `SubjectPublicKeyInfo` (RFC 5280), DER.
    pub fn public_key_info(&self) -> &[u8] {
        &self.public_key_info
    }

    /// Signs with SHA-256, or SHA-384 on P-384.
    pub fn sign(&self, message: &[u8]) -> Result<Vec<u8>, KeyError> {
        let random = SystemRandom::new();
        match &self.pair {
            AlgorithmPair::Rsa(pair) => {
                let mut signature = vec![0; pair.public_modulus_len()];
                // PKCS#1 v1.5 rather than PSS, as Go signs for the reference.
                pair.sign(&RSA_PKCS1_SHA256, &random, message, &mut signature)?;
                Ok(signature)
            }
            AlgorithmPair::P256(pair) | AlgorithmPair::P384(pair) => {
                Ok(pair.sign(&random, message)?.as_ref().to_vec())
            }
        }
    }

    /// Returns the algorithm of [`Self::sign`].
    pub(crate) fn signature_algorithm(&self) -> AlgorithmIdentifierRef<'static> {
        // Parameters are NULL for RSA (RFC 4055, section 5) and absent for ECDSA (RFC 5758, section 3.2).
        let (oid, parameters) = match self.pair {
            AlgorithmPair::Rsa(_) => (SHA_256_WITH_RSA_ENCRYPTION, Some(AnyRef::NULL)),
            AlgorithmPair::P256(_) => (ECDSA_WITH_SHA_256, None),
            AlgorithmPair::P384(_) => (ECDSA_WITH_SHA_384, None),
        };
        AlgorithmIdentifierRef { oid, parameters }
    }

    /// Formats the key as PEM: PKCS#1 for RSA, PKCS#8 for ECDSA.
    pub fn to_pem(&self) -> Result<Zeroizing<String>, KeyError> {
        match &self.pair {
            AlgorithmPair::Rsa(pair) => {
                // Containers are promised a PKCS#1 key; the library only writes PKCS#8, which
                // contains it.
                let pkcs8: Pkcs8V1Der<'_> = pair.as_der()?;
                let pkcs1 = pkcs1_of(pkcs8.as_ref())?;
                Ok(pem("RSA PRIVATE KEY", &pkcs1))
            }
            AlgorithmPair::P256(pair) | AlgorithmPair::P384(pair) => {
                Ok(pem("PRIVATE KEY", pair.to_pkcs8v1()?.as_ref()))
            }
        }
    }
}

/// Parses a key of one of the curves; `read` knows the form.
fn ecdsa<E>(
    der: &[u8],
    read: fn(&'static EcdsaSigningAlgorithm, &[u8]) -> Result<EcdsaKeyPair, E>,
) -> Result<AlgorithmPair, KeyError> {
    if let Ok(pair) = read(&ECDSA_P256_SHA256_ASN1_SIGNING, der) {
        return Ok(AlgorithmPair::P256(pair));
    }
    read(&ECDSA_P384_SHA384_ASN1_SIGNING, der)
        .map(AlgorithmPair::P384)
        .map_err(|_| KeyError::Unsupported)
}

/// Verifies the signature of a request against the key in it. `key` is the content of the bit
/// string in a `SubjectPublicKeyInfo`.
pub(crate) fn verify(
    algorithm: ObjectIdentifier,
    key: &[u8],
    message: &[u8],
    signature: &[u8],
) -> bool {
    let algorithm: &'static dyn signature::VerificationAlgorithm = match algorithm {
        SHA_256_WITH_RSA_ENCRYPTION => &signature::RSA_PKCS1_2048_8192_SHA256,
        ECDSA_WITH_SHA_256 => &signature::ECDSA_P256_SHA256_ASN1,
        ECDSA_WITH_SHA_384 => &signature::ECDSA_P384_SHA384_ASN1,
        // Agents sign with `PrivateKey::sign`, which has no other algorithm.
        _ => return false,
    };
    signature::UnparsedPublicKey::new(algorithm, key)
        .verify(message, signature)
        .is_ok()
}

fn first_key_block(text: &str) -> Result<(&str, Zeroizing<Vec<u8>>), KeyError> {
    let mut rest = text;
    loop {
        let (_, after) = rest.split_once("-----BEGIN ").ok_or(KeyError::NoPem)?;
        let (label, after) = after.split_once("-----").ok_or(KeyError::NoPem)?;
        let (body, after) = after.split_once("-----END ").ok_or(KeyError::Damaged)?;
        match label {
            "ENCRYPTED PRIVATE KEY" => return Err(KeyError::Encrypted),
            "PRIVATE KEY" | "RSA PRIVATE KEY" | "EC PRIVATE KEY" => {
                // The traditional form has a header: `Proc-Type: 4,ENCRYPTED` (RFC 1421, section
                // 4.6.1.1).
                if body.contains("ENCRYPTED") {
                    return Err(KeyError::Encrypted);
                }
                // Never grows: growing would leave parts of the key in memory that is not wiped.
                let mut base64 = Zeroizing::new(Vec::with_capacity(body.len()));
                base64.extend(body.bytes().filter(|byte| !byte.is_ascii_whitespace()));
                let der = STANDARD.decode(&*base64).map_err(|_| KeyError::Damaged)?;
                return Ok((label, Zeroizing::new(der)));
            }
            // `openssl ecparam -genkey` writes the parameters of the curve before the key.
            _ => rest = after,
        }
    }
}

/// A private key with its algorithm (RFC 5208, section 5).
#[derive(Sequence)]
struct PrivateKeyInfo<'a> {
    version: u8,
    algorithm: AnyRef<'a>,
    key: &'a OctetStringRef,
}

/// Extracts the RSAPrivateKey.
fn pkcs1_of(pkcs8: &[u8]) -> Result<Zeroizing<Vec<u8>>, KeyError> {
    let PrivateKeyInfo { key, .. } = PrivateKeyInfo::from_der(pkcs8)?;
    Ok(Zeroizing::new(key.as_bytes().to_vec()))
}

/// Encodes DER as PEM. The text is allocated once, so that no copy of a secret stays behind.
pub(crate) fn pem(label: &str, der: &[u8]) -> Zeroizing<String> {
    let base64 = Zeroizing::new(STANDARD.encode(der));
    let mut text = Zeroizing::new(String::with_capacity(
        base64.len() * 65 / 64 + 2 * label.len() + 40,
    ));
    for part in ["-----BEGIN ", label, "-----\n"] {
        text.push_str(part);
    }
    let mut rest = base64.as_str();
    while !rest.is_empty() {
        let (line, after) = rest.split_at(rest.len().min(64));
        text.push_str(line);
        text.push('\n');
        rest = after;
    }
    for part in ["-----END ", label, "-----\n"] {
        text.push_str(part);
    }
    text
}

//----------- Pool -----------------------------------------------------------

/// Pause after contention, as a multiple of the CPU time used before it: the thread then uses at
/// most about 2 % of a core that other threads need.
const PAUSE_FACTOR: u32 = 50;

const MAX_PAUSE: Duration = Duration::from_secs(10);

/// Longest time over which contention is measured.
const MAX_WINDOW: Duration = Duration::from_secs(1);

/// Keys of one type, at most `size` of them.
pub struct KeyPool {
    kind: KeyType,
    shared: Arc<PoolShared>,
}

/// Priority of the thread that generates keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Priority {
    /// Behind all other threads of the machine.
    ///
    /// `SCHED_IDLE` ranks the thread below other threads of its scheduling group only: the kernel
    /// divides a core equally between sessions (autogroup) and between control groups. The thread
    /// therefore also pauses whenever it had to wait for its core.
    Idle,
    /// That of the process, for measurements beside other programs.
    Normal,
}

struct PoolShared {
    size: usize,
    state: Mutex<PoolState>,
    changed: Condvar,
}

#[derive(Default)]
struct PoolState {
    ready: Vec<PrivateKey>,
    stopped: bool,
    /// CPU time of the thread that generates keys.
    used: Duration,
    /// Number of keys that [`KeyPool::on_key`]'s function waits for.
    wanted: Option<usize>,
    on_key: Option<Arc<dyn Fn() + Send + Sync>>,
}

impl KeyPool {
    /// Starts filling a pool with this priority.
    pub fn start(kind: KeyType, size: usize, priority: Priority) -> std::io::Result<Self> {
        let shared = Arc::new(PoolShared {
            size,
            state: Mutex::default(),
            changed: Condvar::new(),
        });
        let of_thread = shared.clone();
        thread::Builder::new()
            .name("key-pool".to_owned())
            .spawn(move || of_thread.fill(kind, priority))?;
        Ok(Self { kind, shared })
    }

    /// Returns a pool without a thread, so that no key is ever ready.
    #[cfg(test)]
    pub(crate) fn never_filled(kind: KeyType, size: usize) -> Self {
        let shared = Arc::new(PoolShared {
            size,
            state: Mutex::default(),
            changed: Condvar::new(),
        });
        Self { kind, shared }
    }

    /// Takes a key if one is ready.
    pub fn try_take(&self) -> Option<PrivateKey> {
        let key = self.shared.state.lock().ready.pop();
        // All, because callers of `wait` share the variable with the thread that fills the pool.
        self.shared.changed.notify_all();
        key
    }

    /// Takes a key, or generates one on this thread if none is ready.
    pub fn take(&self) -> Result<PrivateKey, KeyError> {
        match self.try_take() {
            Some(key) => Ok(key),
            None => PrivateKey::generate(self.kind),
        }
    }

    /// Sets the function that is called when a wanted key is ready.
    pub fn on_key(&self, ready: impl Fn() + Send + Sync + 'static) {
        self.shared.state.lock().on_key = Some(Arc::new(ready));
    }

    /// Returns whether `count` keys are ready; if not, the function of [`Self::on_key`] is called once
    /// they are.
    pub fn call_when(&self, count: usize) -> bool {
        let mut state = self.shared.state.lock();
        // Under the same lock as the wish, so that no key arrives unnoticed in between.
        let ready = state.ready.len() >= count;
        state.wanted = (!ready).then_some(count);
        ready
    }

    /// Returns the CPU time that the generation of keys took so far.
    pub fn used(&self) -> Duration {
        self.shared.state.lock().used
    }

    /// Returns the number of keys that are ready.
    pub fn ready(&self) -> usize {
        self.shared.state.lock().ready.len()
    }

    /// Returns the number of keys that the pool keeps ready.
    pub fn size(&self) -> usize {
        self.shared.size
    }

    /// Waits until `count` keys are ready; returns whether they are.
    pub fn wait(&self, count: usize, timeout: Duration) -> bool {
        let mut state = self.shared.state.lock();
        !self
            .shared
            .changed
            .wait_while_for(
                &mut state,
                |state: &mut PoolState| state.ready.len() < count,
                timeout,
            )
            .timed_out()
    }
}

impl Drop for KeyPool {
    fn drop(&mut self) {
        self.shared.state.lock().stopped = true;
        self.shared.changed.notify_all();
    }
}

impl PoolShared {
    fn fill(&self, kind: KeyType, priority: Priority) {
        if priority == Priority::Idle
            && let Err(error) = be_idle()
        {
            tracing::warn!(%error, "key pool runs at normal priority: SCHED_IDLE is not permitted");
        }
        let mut window = Window::begin();
        loop {
            {
                let mut state = self.state.lock();
                // Time spent waiting for a taker is no contention, so the window begins anew.
                while !state.stopped && state.ready.len() >= self.size {
                    self.changed.wait(&mut state);
                    window = Window::begin();
                }
                if state.stopped {
                    return;
                }
            }
            let generated = PrivateKey::generate(kind);
            let pause = match &generated {
                Ok(_) => window.pause().filter(|_| priority == Priority::Idle),
                Err(error) => {
                    tracing::error!(%error, "key pool cannot generate a key; retrying in 10 s");
                    Some(Duration::from_secs(10))
                }
            };
            let call = {
                let mut state = self.state.lock();
                state.ready.extend(generated);
                state.used = thread_time();
                let ready = state.ready.len();
                let wanted = state.wanted.take_if(|wanted| *wanted <= ready);
                wanted.and(state.on_key.clone())
            };
            self.changed.notify_all();
            // Without the lock, because the function may ask the pool.
            if let Some(call) = call {
                call();
            }
            if let Some(pause) = pause {
                let mut state = self.state.lock();
                // Unlike a sleep, this ends with the pool.
                self.changed
                    .wait_while_for(&mut state, |state| !state.stopped, pause);
                window = Window::begin();
            }
        }
    }
}

/// Time spent generating without sleeping. Wall time in excess of CPU time went to other threads.
struct Window {
    begun: Instant,
    used: Duration,
}

impl Window {
    fn begin() -> Self {
        Self {
            begun: Instant::now(),
            used: thread_time(),
        }
    }

    /// Returns the pause that is due if other threads needed the core; a long window is reset.
    fn pause(&mut self) -> Option<Duration> {
        let passed = self.begun.elapsed();
        let pause = pause_after(passed, thread_time().saturating_sub(self.used));
        // A long quiet time would otherwise hide that other threads begin to need the core.
        if pause.is_none() && passed > MAX_WINDOW {
            *self = Self::begin();
        }
        pause
    }
}

/// Returns the pause after a time in which the thread had the core for `used`; `None` if nothing else needed it.
fn pause_after(passed: Duration, used: Duration) -> Option<Duration> {
    // SCHED_IDLE ranks within a scheduling group; between control groups and sessions (autogroup) a core is shared
    // equally (sched(7)).
    if passed > used + used / 4 {
        Some((used * PAUSE_FACTOR).min(MAX_PAUSE))
    } else {
        None
    }
}

/// Returns the CPU time used by the calling thread; zero if the kernel does not provide it.
pub fn thread_time() -> Duration {
    let clock = nix::time::ClockId::CLOCK_THREAD_CPUTIME_ID;
    clock.now().map(Duration::from).unwrap_or_default()
}

/// Sets the calling thread's scheduling policy to `SCHED_IDLE` (Linux 2.6.23).
fn be_idle() -> std::io::Result<()> {
    // SAFETY: the structure is plain data, for which zero is valid; musl has more members than glibc.
    let parameters: libc::sched_param = unsafe { std::mem::zeroed() };
    // SAFETY: 0 is the calling thread; the pointer is valid for the call.
    let result = unsafe { libc::sched_setscheduler(0, libc::SCHED_IDLE, &raw const parameters) };
    if result == 0 {
        Ok(())
    } else {
        Err(std::io::Error::last_os_error())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn written_keys_are_read_again() {
        for (kind, label) in [
            (KeyType::Rsa2048, "-----BEGIN RSA PRIVATE KEY-----\n"),
            (KeyType::P256, "-----BEGIN PRIVATE KEY-----\n"),
        ] {
            let key = PrivateKey::generate(kind).unwrap();
            let text = key.to_pem().unwrap();
            assert!(text.starts_with(label), "{kind:?}");
            let again = PrivateKey::from_pem(text.as_bytes()).unwrap();
            assert_eq!(again.public_key_info(), key.public_key_info());
        }
    }

    #[test]
    fn unusable_keys_are_explained() {
        let block = |label: &str, body: &str| {
            format!("-----BEGIN {label}-----\n{body}\n-----END {label}-----\n")
        };
        for (text, error) in [
            (String::new(), KeyError::NoPem),
            (block("CERTIFICATE", "AAAA"), KeyError::NoPem),
            (block("ENCRYPTED PRIVATE KEY", "AAAA"), KeyError::Encrypted),
            (
                block("RSA PRIVATE KEY", "Proc-Type: 4,ENCRYPTED\n\nAAAA"),
                KeyError::Encrypted,
            ),
            (block("PRIVATE KEY", "!"), KeyError::Damaged),
            (block("PRIVATE KEY", "AAAA"), KeyError::Unsupported),
        ] {
            assert_eq!(
                PrivateKey::from_pem(text.as_bytes()).unwrap_err(),
                error,
                "{text}"
            );
        }
    }

    #[test]
    fn debug_output_hides_secret() {
        let key = PrivateKey::generate(KeyType::P256).unwrap();
        assert_eq!(format!("{key:?}"), "PrivateKey(P-256, secret)");
    }

    fn generated(algorithm: &'static rcgen::SignatureAlgorithm) -> PrivateKey {
        let key = rcgen::KeyPair::generate_for(algorithm).unwrap();
        PrivateKey::from_pem(key.serialize_pem().as_bytes()).unwrap()
    }

    #[test]
    fn every_algorithm_signs_and_is_verified() {
        let null = Some(AnyRef::NULL);
        for (key, name, oid, parameters) in [
            (
                PrivateKey::generate(KeyType::Rsa2048).unwrap(),
                "RSA",
                SHA_256_WITH_RSA_ENCRYPTION,
                null,
            ),
            (
                PrivateKey::generate(KeyType::P256).unwrap(),
                "P-256",
                ECDSA_WITH_SHA_256,
                None,
            ),
            (
                generated(&rcgen::PKCS_ECDSA_P384_SHA384),
                "P-384",
                ECDSA_WITH_SHA_384,
                None,
            ),
        ] {
            assert_eq!(format!("{key:?}"), format!("PrivateKey({name}, secret)"));
            let algorithm = key.signature_algorithm();
            assert_eq!((algorithm.oid, algorithm.parameters), (oid, parameters));
            let signature = key.sign(b"message").unwrap();
            let info =
                x509_cert::spki::SubjectPublicKeyInfoRef::from_der(key.public_key_info()).unwrap();
            let public = info.subject_public_key.raw_bytes();
            assert!(verify(oid, public, b"message", &signature), "{name}");
            assert!(!verify(oid, public, b"massage", &signature));
            assert!(!verify(oid, public, b"message", &signature[1..]));
            for other in [
                SHA_256_WITH_RSA_ENCRYPTION,
                ECDSA_WITH_SHA_256,
                ECDSA_WITH_SHA_384,
                der::oid::db::rfc5912::ECDSA_WITH_SHA_512,
            ] {
                let accepted = verify(other, public, b"message", &signature);
                assert_eq!(accepted, other == oid, "{name} {other}");
            }
            let again = PrivateKey::from_pem(key.to_pem().unwrap().as_bytes()).unwrap();
            assert_eq!(again.public_key_info(), key.public_key_info());
        }
    }

    #[test]
    fn sizes_of_rsa_keys_differ() {
        let bits = |kind| {
            let key = PrivateKey::generate(kind).unwrap();
            8 * key.sign(b"").unwrap().len()
        };
        assert_eq!(bits(KeyType::Rsa2048), 2048);
        assert_eq!(bits(KeyType::Rsa3072), 3072);
    }

    #[test]
    fn first_key_is_read() {
        let [one, other] = [KeyType::P256; 2].map(|kind| PrivateKey::generate(kind).unwrap());
        let [first, second] = [&one, &other].map(|key| key.to_pem().unwrap().to_string());
        let parameters =
            "-----BEGIN EC PARAMETERS-----\nBggqhkjOPQMBBw==\n-----END EC PARAMETERS-----\n";
        let spaced = first.replace('\n', " \r\n\t");
        for text in [
            first.clone(),
            format!("{first}{second}"),
            format!("{parameters}{first}"),
            format!("Subject: x\n{spaced}"),
        ] {
            let read = PrivateKey::from_pem(text.as_bytes()).unwrap();
            assert_eq!(read.public_key_info(), one.public_key_info(), "{text}");
        }
        for (text, error) in [
            (b"\xff".to_vec(), KeyError::Damaged),
            (b"-----BEGIN PRIVATE KEY".to_vec(), KeyError::NoPem),
            (
                b"-----BEGIN PRIVATE KEY-----\nAAAA".to_vec(),
                KeyError::Damaged,
            ),
            (parameters.into(), KeyError::NoPem),
            (
                b"-----BEGIN EC PRIVATE KEY-----\nAAAA\n-----END EC PRIVATE KEY-----\n".to_vec(),
                KeyError::Unsupported,
            ),
            (
                b"-----BEGIN RSA PRIVATE KEY-----\nAAAA\n-----END RSA PRIVATE KEY-----\n".to_vec(),
                KeyError::Unsupported,
            ),
        ] {
            assert_eq!(PrivateKey::from_pem(&text).unwrap_err(), error);
        }
        assert_eq!(
            KeyError::Encrypted.to_string(),
            "the private key is encrypted; decrypt it with `openssl pkey`"
        );
        let damaged = AnyRef::from_der(&[]).unwrap_err();
        assert_eq!(KeyError::from(damaged), KeyError::Library);
        assert_eq!(
            KeyError::from(aws_lc_rs::error::Unspecified),
            KeyError::Library
        );
    }

    #[test]
    fn pem_lines_have_64_characters() {
        let full = "A".repeat(64);
        for (length, lines, reserved) in [
            (0, [].as_slice(), 42),
            (1, &["AA=="], 46),
            (48, &[&full], 107),
            (49, &[&full, "AA=="], 111),
            (97, &[&full, &full, "AA=="], 176),
        ] {
            let mut expected = "-----BEGIN X-----\n".to_owned();
            for line in lines {
                expected.push_str(line);
                expected.push('\n');
            }
            expected.push_str("-----END X-----\n");
            let text = pem("X", &vec![0; length]);
            assert_eq!(*text, expected, "{length}");
            // A text that grows leaves a copy of the secret behind.
            assert_eq!(text.capacity(), reserved, "{length}");
        }
    }

    #[test]
    fn contention_is_followed_by_a_pause() {
        let micros = Duration::from_micros;
        for (passed, used, pause) in [
            (100, 100, None),
            (125, 100, None),
            (126, 100, Some(5000)),
            (1_000_000, 100, Some(5000)),
            (1_000_000, 200_000, Some(10_000_000)),
            (1_000_000, 199_999, Some(9_999_950)),
            (1, 0, Some(0)),
            (0, 0, None),
        ] {
            assert_eq!(
                pause_after(micros(passed), micros(used)),
                pause.map(micros),
                "{passed} {used}"
            );
        }
        let begun = Window::begin();
        assert!(begun.used <= thread_time());
        // A window in which the thread got no time is followed by a pause, not by the next window.
        let an_hour_ago = Instant::now().checked_sub(Duration::from_secs(3600));
        if let Some(begun) = an_hour_ago {
            let mut window = Window {
                begun,
                used: Duration::from_secs(u32::MAX.into()),
            };
            assert_eq!(window.pause(), Some(Duration::ZERO));
            assert_eq!(window.begun, begun);
        }
    }

    #[test]
    fn pool_keeps_its_number_of_keys() {
        let pool = KeyPool::start(KeyType::P256, 2, Priority::Normal).unwrap();
        let all = || while !pool.wait(2, Duration::from_secs(60)) {};
        all();
        assert_eq!(
            (pool.ready(), pool.size(), pool.kind),
            (2, 2, KeyType::P256)
        );
        assert!(pool.used() > Duration::ZERO);
        assert!(!pool.wait(3, Duration::ZERO));
        assert!(pool.call_when(2));
        let one = pool.try_take().unwrap();
        let other = pool.take().unwrap();
        assert_ne!(one.public_key_info(), other.public_key_info());
        all();
        assert_eq!(pool.ready(), 2);
        // A pool of none generates at once.
        let none = KeyPool::start(KeyType::P256, 0, Priority::Idle).unwrap();
        assert!(none.try_take().is_none() && none.wait(0, Duration::ZERO));
        assert_eq!(
            format!("{:?}", none.take().unwrap()),
            "PrivateKey(P-256, secret)"
        );
    }

    #[test]
    fn wanted_keys_are_announced_once() {
        let pool = KeyPool::start(KeyType::P256, 2, Priority::Normal).unwrap();
        while !pool.wait(2, Duration::from_secs(60)) {}
        let (announce, announced) = std::sync::mpsc::channel();
        pool.on_key(move || announce.send(()).unwrap());
        // Generated without a wish: nobody is called.
        drop(pool.try_take().unwrap());
        while !pool.wait(2, Duration::from_secs(60)) {}
        assert!(announced.try_recv().is_err());
        assert!(!pool.call_when(3));
        assert_eq!(pool.shared.state.lock().wanted, Some(3));
        pool.shared.state.lock().wanted = Some(2);
        drop(pool.try_take().unwrap());
        announced.recv().unwrap();
        assert_eq!(pool.shared.state.lock().wanted, None);
        assert!(announced.try_recv().is_err());
        let shared = pool.shared.clone();
        drop(pool);
        assert!(shared.state.lock().stopped);
    }
}
