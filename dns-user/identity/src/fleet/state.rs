//! Files of the issuer: CAs, the fleet's trust, its members and bootstrap tokens.
//!
//! ```text
//! authorities/FINGERPRINT/ca.crt, ca.key
//! trust.json, members.jsonl, issuer.json, confirmed-removals.json
//! tokens/SHA-256-OF-THE-TOKEN.json
//! ```

use std::{
    collections::BTreeMap,
    fs::{self, DirBuilder, File, OpenOptions},
    io::{self, Write},
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use anyhow::{Context as _, anyhow, bail, ensure};
use aws_lc_rs::rand::{SecureRandom, SystemRandom};
use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use dns_kit::files::atomic::{self, Attributes};
use nix::fcntl::Flock;
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use zeroize::Zeroizing;

use super::{Member, Members, trust::Trust};
use crate::{
    authority::{Authority, CaFiles, Fingerprint},
    certificate::seconds,
    folder::lock,
};

/// The issuer's state folder.
#[derive(Clone, Debug)]
pub struct StateFolder {
    path: PathBuf,
}

/// Reason for which a bootstrap token is rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum TokenError {
    #[error("the bootstrap token is unknown or already used; create a new one")]
    Unknown,
    #[error("the bootstrap token belongs to another instance; create one for this instance")]
    OtherInstance,
    #[error("the bootstrap token expired; create a new one")]
    Expired,
}

/// Seconds for which an expired token is kept, so that a clock that is wrong for a while loses none.
const KEEP_TOKENS: u64 = 7 * 24 * 3600;

/// Stored data of a token; the file name is the token's hash.
#[derive(Debug, Serialize, Deserialize)]
struct StoredToken {
    instance: String,
    expires: u64,
}

/// Settings of the issuer that other commands need.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IssuerFacts {
    /// The fleet's records.json, an absolute path.
    pub records: PathBuf,
}

impl StateFolder {
    /// Opens the folder of an issuer; creates it with access for its owner only. The lock ends with
    /// the returned file.
    pub fn create(path: PathBuf) -> anyhow::Result<(Self, Flock<File>)> {
        let this = Self { path };
        for folder in [
            this.path.clone(),
            this.path.join("authorities"),
            this.path.join("tokens"),
        ] {
            make_private(&folder)?;
        }
        let locked = File::open(&this.path)
            .and_then(lock)
            .map_err(in_file(&this.path))?
            .with_context(|| {
                let folder = this.path.display();
                format!(
                    "{folder}: another issuer uses this folder; stop it, or choose another folder"
                )
            })?;
        this.sweep()?;
        Ok((this, locked))
    }

    /// Removes what killed issuers and commands left: unfinished files, among them copies of the CAs' keys.
    fn sweep(&self) -> anyhow::Result<()> {
        atomic::sweep_folder(&self.path);
        atomic::sweep_folder(&self.path.join("tokens"));
        let authorities = self.path.join("authorities");
        for authority in atomic::read_folder(&authorities).map_err(in_file(&authorities))? {
            atomic::sweep_folder(&authority);
        }
        Ok(())
    }

    /// Opens the folder of an existing issuer.
    pub fn open(path: PathBuf) -> anyhow::Result<Self> {
        let this = Self { path };
        if this.path.join("trust.json").exists() {
            return Ok(this);
        }
        // With members it is no wrong path: the file was lost, which needs another remedy.
        let members = MembersFile::open(&this).map_or(0, |file| file.held.len());
        if members > 0 {
            return Err(this.lost_trust(members));
        }
        bail!(
            "{}: not the state folder of an issuer: it has no trust.json; correct the path",
            this.path.display()
        )
    }

    /// Returns the error of a folder that has members, but no trust.
    pub(crate) fn lost_trust(&self, members: usize) -> anyhow::Error {
        anyhow!(
            "{}: trust.json is missing, but instances have certificates ({members}); restore it from a backup. \
             Without one, begin a new fleet: move this folder away, start the issuer with --ca and --ca-key, and \
             give every machine a token and this CA",
            self.path.display()
        )
    }

    /// Returns the settings of the last issuer; `None` before the first start of this version.
    pub fn facts(&self) -> anyhow::Result<Option<IssuerFacts>> {
        self.read("issuer.json")
    }

    /// Replaces the settings if they differ.
    pub fn set_facts(&self, facts: &IssuerFacts) -> anyhow::Result<()> {
        // A damaged file is replaced as well.
        if self.facts().ok().flatten().as_ref() == Some(facts) {
            return Ok(());
        }
        self.write("issuer.json", facts)
    }

    /// Confirms that up to `number` members may be removed at once.
    pub fn confirm_removals(&self, number: usize) -> anyhow::Result<()> {
        self.write("confirmed-removals.json", &number)
    }

    /// Consumes a confirmation.
    pub fn take_confirmation(&self) -> Option<usize> {
        let number = self.read("confirmed-removals.json").ok().flatten()?;
        // Durably: a power failure must not bring back a confirmation that was used.
        let used = atomic::remove(&self.path.join("confirmed-removals.json"));
        used.is_ok_and(|removed| removed).then_some(number)
    }

    /// Removes the keys of CAs that are neither trusted nor the origin of the last rotation.
    pub fn forget_keys(&self, trust: &Trust) -> anyhow::Result<()> {
        let folder = self.path.join("authorities");
        let failed = in_file(&folder);
        let mut needed: Vec<&Fingerprint> = vec![&trust.issuing];
        needed.extend(&trust.trusted);
        needed.extend(&trust.origin);
        for entry in fs::read_dir(&folder).map_err(&failed)? {
            let entry = entry.map_err(&failed)?;
            let key = entry.path().join("ca.key");
            let is_needed = needed.iter().any(|ca| entry.file_name() == ca.as_str());
            if key.exists() && !is_needed {
                // Without its key, an imported CA is incomplete; importing it again restores it.
                for file in [entry.path().join("ca.crt"), key] {
                    // An import or an earlier removal that was interrupted has a key without a certificate.
                    atomic::remove(&file).map_err(in_file(&file))?;
                }
            }
        }
        Ok(())
    }

    /// Verifies a CA and copies it into the folder.
    pub fn import(&self, files: &CaFiles, now: SystemTime) -> anyhow::Result<Fingerprint> {
        let authority = files.load(now)?;
        let fingerprint = authority.fingerprint.clone();
        let folder = self.path.join("authorities").join(fingerprint.as_str());
        // The folder is named by the certificate, so it cannot be that of another CA.
        if folder.join("ca.crt").exists() {
            return Ok(fingerprint);
        }
        make_private(&folder)?;
        // What was verified: the files may have been replaced since. The certificate is written last: its presence
        // marks the CA as complete.
        let key = authority.key.to_pem()?;
        let chain = authority.chain_pem();
        for (text, name) in [(key.as_str(), "ca.key"), (chain.as_str(), "ca.crt")] {
            atomic::replace_own(&folder.join(name), text.as_bytes(), Attributes::PRIVATE)?;
        }
        Ok(fingerprint)
    }

    fn files(&self, fingerprint: &Fingerprint) -> CaFiles {
        let folder = self.path.join("authorities").join(fingerprint.as_str());
        CaFiles {
            certificate: folder.join("ca.crt"),
            key: folder.join("ca.key"),
        }
    }

    /// Loads an imported CA.
    pub fn authority(
        &self,
        fingerprint: &Fingerprint,
        now: SystemTime,
    ) -> anyhow::Result<Authority> {
        let files = self.files(fingerprint);
        let authority = files.load(now)?;
        // Agents report the CA that issued: with another one, no rotation would end.
        ensure!(
            authority.fingerprint == *fingerprint,
            "{}: it is another CA, {}; restore the folder from a backup",
            files.certificate.display(),
            authority.fingerprint
        );
        Ok(authority)
    }

    /// Returns the certificates of an imported CA, PEM; works even after it expired.
    pub fn chain(&self, fingerprint: &Fingerprint) -> anyhow::Result<String> {
        let path = self.files(fingerprint).certificate;
        fs::read_to_string(&path).map_err(in_file(&path))
    }

    /// Returns the fleet's trust; `None` before the first CA.
    pub fn trust(&self) -> anyhow::Result<Option<Trust>> {
        self.read("trust.json")
    }

    /// Replaces the fleet's trust; a running issuer picks it up within a second.
    pub fn set_trust(&self, trust: &Trust) -> anyhow::Result<()> {
        self.write("trust.json", trust)
    }

    /// Returns the members as last written by the issuer.
    pub fn members(&self) -> anyhow::Result<Members> {
        Ok(MembersFile::open(self)?.held)
    }

    fn read<T: DeserializeOwned>(&self, name: &str) -> anyhow::Result<Option<T>> {
        let path = self.path.join(name);
        match fs::read(&path) {
            Ok(text) => Ok(Some(serde_json::from_slice(&text).map_err(in_json(&path))?)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(cause) => Err(in_file(&path)(cause)),
        }
    }

    fn write<T: Serialize>(&self, name: &str, value: &T) -> anyhow::Result<()> {
        let path = self.path.join(name);
        let text = serde_json::to_vec_pretty(value).map_err(in_json(&path))?;
        atomic::replace_own(&path, &text, Attributes::PRIVATE)?;
        Ok(())
    }

    /// Locks rotations, beside a running issuer; `None` if another command holds the lock.
    pub fn lock_rotation(&self) -> anyhow::Result<Option<Flock<File>>> {
        // Another lock than that of the folder, which the running issuer holds.
        let path = self.path.join("rotation.lock");
        let open = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(&path);
        let file = open.map_err(in_file(&path))?;
        lock(file).map_err(in_file(&path))
    }

    /// Creates a token with which one instance can request its first pair.
    pub fn create_token(
        &self,
        instance: &str,
        now: SystemTime,
        lifetime: Duration,
    ) -> anyhow::Result<Zeroizing<String>> {
        let mut bytes = Zeroizing::new([0; 32]);
        SystemRandom::new().fill(&mut *bytes).map_err(|_| {
            in_file(&self.path.join("tokens"))(io::Error::other("no random numbers"))
        })?;
        let token = Zeroizing::new(URL_SAFE_NO_PAD.encode(bytes.as_slice()));
        let stored = StoredToken {
            instance: instance.to_owned(),
            expires: seconds(now + lifetime),
        };
        self.forget_tokens(now);
        let path = self.token(&token);
        let text = serde_json::to_vec(&stored).map_err(in_json(&path))?;
        atomic::replace_own(&path, &text, Attributes::PRIVATE)?;
        Ok(token)
    }

    fn token(&self, token: &str) -> PathBuf {
        // A reader of the folder or its backup cannot use a hash, and no text of a client becomes a
        // path.
        let hash = Fingerprint::of(token.as_bytes());
        self.path.join("tokens").join(format!("{hash}.json"))
    }

    /// Returns whether a token would be accepted, without using it.
    pub(crate) fn check_token(
        &self,
        token: &str,
        instance: &str,
        now: SystemTime,
    ) -> Result<(), TokenError> {
        let text = fs::read(self.token(token)).map_err(|_| TokenError::Unknown)?;
        let stored: StoredToken = serde_json::from_slice(&text).map_err(|_| TokenError::Unknown)?;
        if stored.instance != instance {
            return Err(TokenError::OtherInstance);
        }
        // The file stays: this machine's clock may be wrong.
        if stored.expires <= seconds(now) {
            return Err(TokenError::Expired);
        }
        Ok(())
    }

    /// Consumes a token. Of several attempts with the same token, even concurrent ones, one succeeds.
    pub fn use_token(
        &self,
        token: &str,
        instance: &str,
        now: SystemTime,
    ) -> Result<(), TokenError> {
        self.check_token(token, instance, now)?;
        // A file can be removed only once, and durably: a power failure must not bring the token back.
        match atomic::remove(&self.token(token)) {
            Ok(true) => Ok(()),
            // A token that cannot be removed would work a second time.
            Ok(false) | Err(_) => Err(TokenError::Unknown),
        }
    }

    /// Returns whether a token exists, without using it.
    pub(crate) fn knows_token(&self, token: &str) -> bool {
        self.token(token).exists()
    }

    /// Removes tokens that expired long ago.
    fn forget_tokens(&self, now: SystemTime) {
        let Ok(paths) = atomic::read_folder(&self.path.join("tokens")) else {
            return;
        };
        for path in paths {
            if let Ok(text) = fs::read(&path)
                && let Ok(stored) = serde_json::from_slice::<StoredToken>(&text)
                && stored.expires + KEEP_TOKENS < seconds(now)
            {
                // The next token tries again.
                let _ = fs::remove_file(&path);
            }
        }
    }
}

//----------- MembersFile -----------------------------------------------------

/// Number of lines per member that the file of members may grow to: the renewals of two to three days.
const LINES_PER_MEMBER: usize = 8;

/// Number of lines that it may have beside those.
const MAX_SPARE_LINES: usize = 1000;

/// The file of the fleet's members, `members.jsonl`: changes are appended, so that the renewals of a day
/// cost less than a hundred bytes each. Only the issuer may write it.
///
/// A line that was cut off by a kill is the last one and is ignored: its change was not completed.
pub struct MembersFile {
    path: PathBuf,
    /// The members of the file.
    pub(crate) held: Members,
    /// Number of lines; `None` if the file must be replaced before anything is appended.
    lines: Option<usize>,
}

/// A change of the members. Later lines take precedence.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Change {
    /// The member is new, or takes part in a rotation.
    Member(String, Member),
    /// Later end of validity, in seconds since 1970.
    Renewed(String, u64),
    /// The member left the fleet, or its pairs expired.
    Removed(String),
}

impl MembersFile {
    /// Reads the file of a state folder.
    pub fn open(state: &StateFolder) -> anyhow::Result<Self> {
        let path = state.path.join("members.jsonl");
        let text = match fs::read(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Ok(Self {
                    path,
                    held: Members::new(),
                    lines: None,
                });
            }
            Err(cause) => return Err(in_file(&path)(cause)),
        };
        let mut held = Members::new();
        let mut lines = 0;
        let mut damaged = None;
        for line in text.split_inclusive(|byte| *byte == b'\n') {
            match (serde_json::from_slice(line), damaged.take()) {
                (Ok(change), None) if line.ends_with(b"\n") => apply(&mut held, change),
                // Damage before a complete line is not the trace of a kill.
                (Ok::<Change, _>(_), Some(cause)) => return Err(in_json(&path)(cause)),
                (Ok(_), None) => damaged = Some(serde::de::Error::custom("incomplete line")),
                (Err(cause), before) => damaged = before.or(Some(cause)),
            }
            lines += 1;
        }
        let lines = damaged.is_none().then_some(lines);
        Ok(Self { path, held, lines })
    }

    /// Saves members that may have changed; `None` for one that left.
    pub fn save(&mut self, members: &BTreeMap<String, Option<Member>>) -> anyhow::Result<()> {
        let mut changes = Vec::new();
        for (id, member) in members {
            match (self.held.get(id), member) {
                (Some(held), Some(member)) if held == member => {}
                (Some(held), Some(member))
                    if (held.generation, &held.issuers) == (member.generation, &member.issuers) =>
                {
                    changes.push(Change::Renewed(id.clone(), member.not_after));
                }
                (_, Some(member)) => changes.push(Change::Member(id.clone(), member.clone())),
                (Some(_), None) => changes.push(Change::Removed(id.clone())),
                (None, None) => {}
            }
        }
        if changes.is_empty() && self.lines.is_some() {
            return Ok(());
        }
        let added = changes.len();
        let mut text = lines_of(&changes);
        for change in changes {
            apply(&mut self.held, change);
        }
        let max_lines = LINES_PER_MEMBER * self.held.len() + MAX_SPARE_LINES;
        // After an error, it is unknown how much was written.
        match self.lines.take() {
            Some(lines) if lines + added <= max_lines => {
                append(&self.path, &text).map_err(in_file(&self.path))?;
                self.lines = Some(lines + added);
            }
            Some(_) | None => {
                text = lines_of(
                    self.held
                        .iter()
                        .map(|(id, member)| Change::Member(id.clone(), member.clone())),
                );
                atomic::replace_own(&self.path, &text, Attributes::PRIVATE)?;
                self.lines = Some(self.held.len());
            }
        }
        Ok(())
    }
}

/// Creates a folder, and its missing ancestors, with access for its owner only.
fn make_private(folder: &Path) -> anyhow::Result<()> {
    let mut builder = DirBuilder::new();
    let created = builder.recursive(true).mode(0o700).create(folder);
    created.map_err(in_file(folder))
}

fn append(path: &Path, text: &[u8]) -> io::Result<()> {
    // Without `create`: a file that was removed would begin again without the earlier members.
    // After the error, the caller writes all of them.
    let mut file = OpenOptions::new().append(true).open(path)?;
    file.write_all(text)?;
    // The caller replies next, and what an agent knows must survive a power failure.
    file.sync_data()
}

fn in_file(path: &Path) -> impl Fn(io::Error) -> anyhow::Error {
    move |cause| {
        anyhow!(
            "{}: {cause}; check the issuer's folder of state",
            path.display()
        )
    }
}

fn in_json(path: &Path) -> impl Fn(serde_json::Error) -> anyhow::Error {
    move |cause| {
        anyhow!(
            "{}: {cause}; restore the file from a backup",
            path.display()
        )
    }
}

fn apply(members: &mut Members, change: Change) {
    match change {
        Change::Member(id, member) => drop(members.insert(id, member)),
        Change::Renewed(id, not_after) => {
            members
                .entry(id)
                .and_modify(|member| member.not_after = not_after);
        }
        Change::Removed(id) => drop(members.remove(&id)),
    }
}

fn lines_of(changes: impl IntoIterator<Item = impl Serialize>) -> Vec<u8> {
    let mut text = Vec::new();
    for change in changes {
        serde_json::to_writer(&mut text, &change).expect("a change has text keys");
        text.push(b'\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, thread};

    use dns_kit::files::FileStamp;

    use super::*;
    use crate::tests::{START, TestCa, at};

    /// Returns what [`MembersFile::save`] needs to turn some members into others.
    fn changes(from: &Members, to: &Members) -> BTreeMap<String, Option<Member>> {
        let ids = from.keys().chain(to.keys());
        ids.map(|id| (id.clone(), to.get(id).cloned())).collect()
    }

    /// A state folder in which one of two members left, was replaced, and the other was renewed.
    fn written() -> (tempfile::TempDir, StateFolder, Vec<Members>) {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let state = StateFolder::create(folder.path().join("state")).unwrap().0;
        let member = |generation, not_after| Member {
            generation,
            issuers: BTreeSet::from([Fingerprint::of(b"ca")]),
            not_after,
        };
        let mut file = MembersFile::open(&state).unwrap();
        let mut states = vec![Members::from([("a".to_owned(), member(1, 50))])];
        file.save(&changes(&Members::new(), &states[0])).unwrap();
        let last = states[0].clone();
        for (id, next) in [
            ("b", Some(member(0, 90))),
            ("a", Some(member(1, 99))),
            ("a", None),
        ] {
            let mut members = states.last().unwrap_or(&last).clone();
            match next {
                Some(member) => drop(members.insert(id.to_owned(), member)),
                None => drop(members.remove(id)),
            }
            file.save(&changes(states.last().unwrap(), &members))
                .unwrap();
            states.push(members);
        }
        (folder, state, states)
    }

    #[test]
    fn interrupted_append_loses_itself_only() {
        let (_folder, state, states) = written();
        let path = state.path.join("members.jsonl");
        let text = fs::read(&path).unwrap();
        for length in 0..=text.len() {
            fs::write(&path, &text[..length]).unwrap();
            let complete = text[..length].iter().filter(|byte| **byte == b'\n').count();
            let expected = complete
                .checked_sub(1)
                .map(|at| states[at].clone())
                .unwrap_or_default();
            let mut file = MembersFile::open(&state).unwrap();
            assert_eq!(file.held, expected, "{length} bytes");
            // The next change is readable, whatever it follows.
            let next = changes(&file.held, &states[1]);
            file.save(&next).unwrap();
            assert_eq!(state.members().unwrap(), states[1], "{length} bytes");
        }
        // After a power failure, the end may also be a block of zeros.
        fs::write(&path, [&text[..], &[0; 100]].concat()).unwrap();
        assert_eq!(state.members().unwrap(), states[3]);
        fs::write(&path, [b"{\n", &text[..]].concat()).unwrap();
        assert!(state.members().is_err(), "damage in the middle");
    }

    #[test]
    fn failed_append_is_repaired() {
        let (_folder, state, states) = written();
        let path = state.path.join("members.jsonl");
        let mut file = MembersFile::open(&state).unwrap();
        fs::remove_file(&path).unwrap();
        let next = changes(&file.held, &states[0]);
        assert!(file.save(&next).is_err());
        file.save(&next).unwrap();
        assert_eq!(state.members().unwrap(), states[0]);
    }

    #[test]
    fn long_file_is_written_anew() {
        let (_folder, state, states) = written();
        let mut file = MembersFile::open(&state).unwrap();
        let path = state.path.join("members.jsonl");
        let mut longest = 0;
        let mut member = states[1]["b"].clone();
        for end in 0..3000 {
            member.not_after = 100 + end;
            let members = Members::from([("b".to_owned(), member.clone())]);
            let next = changes(&file.held, &members);
            file.save(&next).unwrap();
            longest = longest.max(fs::metadata(&path).unwrap().len());
            assert_eq!(file.held, members);
        }
        assert!(longest < 40_000, "{longest}");
        assert_eq!(state.members().unwrap(), file.held);
    }

    #[test]
    fn token_works_once() {
        let folder = tempfile::tempdir().unwrap();
        let state = StateFolder::create(folder.path().join("state")).unwrap().0;
        let now = SystemTime::now();
        let hour = Duration::from_secs(3600);
        let token = state.create_token("i1", now, hour).unwrap();
        assert_eq!(
            state.use_token(&token, "i2", now),
            Err(TokenError::OtherInstance)
        );
        let used = thread::scope(|scope| {
            let racers: Vec<_> = (0..8)
                .map(|_| scope.spawn(|| state.use_token(&token, "i1", now).is_ok()))
                .collect();
            racers
                .into_iter()
                .map(|racer| racer.join().unwrap())
                .filter(|won| *won)
                .count()
        });
        assert_eq!(used, 1);
        assert_eq!(state.use_token(&token, "i1", now), Err(TokenError::Unknown));
        let late = state.create_token("i1", now, hour).unwrap();
        for _ in 0..2 {
            assert_eq!(
                state.use_token(&late, "i1", now + hour),
                Err(TokenError::Expired)
            );
        }
        assert_eq!(state.use_token(&late, "i1", now), Ok(()));
        state.create_token("i1", now, hour).unwrap();
        state
            .create_token("i1", now + 30 * 24 * hour, hour)
            .unwrap();
        let tokens = fs::read_dir(state.path.join("tokens")).unwrap();
        assert_eq!(tokens.count(), 1);
        assert_eq!(
            state.use_token("../trust", "i1", now),
            Err(TokenError::Unknown)
        );
    }

    #[test]
    fn needed_keys_stay() {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let state = StateFolder::create(folder.path().join("state")).unwrap().0;
        let ca = |name: &str| Fingerprint::of(name.as_bytes());
        let mut trust = Trust::new(ca("issuing"));
        trust.trusted.push(ca("trusted"));
        trust.origin = Some(ca("origin"));
        let path = |name: &str| state.path.join("authorities").join(ca(name).as_str());
        let names = ["issuing", "trusted", "origin", "other", "public"];
        for name in names {
            fs::create_dir_all(path(name)).unwrap();
            fs::write(path(name).join("ca.crt"), "x").unwrap();
            if name != "public" {
                fs::write(path(name).join("ca.key"), "x").unwrap();
            }
        }
        state.forget_keys(&trust).unwrap();
        let kept =
            names.map(|name| ["ca.crt", "ca.key"].map(|file| path(name).join(file).exists()));
        let whole = [true, true];
        assert_eq!(kept, [whole, whole, whole, [false, false], [true, false]]);
    }

    #[test]
    fn exchanged_ca_is_refused() {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let state = StateFolder::create(folder.path().join("state")).unwrap().0;
        let [first, second] = ["first", "second"].map(|name| {
            let files = TestCa::new(name).write(folder.path());
            state.import(&files, at(START)).unwrap()
        });
        for name in ["ca.crt", "ca.key"] {
            let path = |ca: &Fingerprint| {
                let authorities = state.path.join("authorities");
                authorities.join(ca.as_str()).join(name)
            };
            fs::copy(path(&second), path(&first)).unwrap();
        }
        let error = state.authority(&first, at(START)).unwrap_err().to_string();
        let text = format!("ca.crt: it is another CA, {second}; restore the folder from a backup");
        assert!(error.ends_with(&text), "{error}");
        assert!(state.authority(&second, at(START)).is_ok());
    }

    #[test]
    fn only_a_missing_file_is_empty() {
        let (_folder, state, _) = written();
        assert_eq!(state.read::<u64>("none.json").unwrap(), None);
        fs::create_dir(state.path.join("folder.json")).unwrap();
        assert!(state.read::<u64>("folder.json").is_err());
    }

    #[test]
    fn lines_of_the_file_are_counted() {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let state = StateFolder::create(folder.path().join("state")).unwrap().0;
        let mut file = MembersFile::open(&state).unwrap();
        for generation in 1..=3 {
            let member = Member {
                generation,
                issuers: BTreeSet::new(),
                not_after: 0,
            };
            let changes = BTreeMap::from([("a".to_owned(), Some(member))]);
            file.save(&changes).unwrap();
            assert_eq!(file.lines, Some(generation as usize));
            assert_eq!(MembersFile::open(&state).unwrap().lines, file.lines);
        }
    }

    fn mode(path: &Path) -> u32 {
        use std::os::unix::fs::PermissionsExt;
        fs::metadata(path).unwrap().permissions().mode() & 0o777
    }

    #[test]
    fn imported_ca_is_private_and_complete() {
        let place = tempfile::tempdir_in("/dev/shm").unwrap();
        let path = place.path().join("state");
        let (state, locked) = StateFolder::create(path.clone()).unwrap();
        for folder in ["", "authorities", "tokens"] {
            assert_eq!(mode(&path.join(folder)), 0o700, "{folder}");
        }
        let ca = TestCa::new("ca");
        let files = ca.write(place.path());
        let imported = state.import(&files, at(START)).unwrap();
        let folder = path.join("authorities").join(imported.as_str());
        assert_eq!(mode(&folder), 0o700);
        for name in ["ca.crt", "ca.key"] {
            assert_eq!(mode(&folder.join(name)), 0o600);
        }
        assert_eq!(state.chain(&imported).unwrap(), ca.chain);
        let authority = state.authority(&imported, at(START)).unwrap();
        assert_eq!(authority.fingerprint, imported);
        // A complete CA is not written again.
        fs::write(folder.join("ca.key"), "x").unwrap();
        assert_eq!(state.import(&files, at(START)).unwrap(), imported);
        assert_eq!(fs::read_to_string(folder.join("ca.key")).unwrap(), "x");
        fs::remove_file(folder.join("ca.crt")).unwrap();
        let missing = format!(
            "{}: No such file or directory (os error 2); check the issuer's folder of state",
            folder.join("ca.crt").display()
        );
        assert_eq!(state.chain(&imported).unwrap_err().to_string(), missing);
        state.import(&files, at(START)).unwrap();
        assert!(state.authority(&imported, at(START)).is_ok());
        // A faulty CA is not imported.
        fs::write(&files.key, TestCa::new("other").key).unwrap();
        assert!(state.import(&files, at(START)).is_err());
        let another = StateFolder::create(path.clone()).unwrap_err().to_string();
        assert_eq!(
            another,
            format!(
                "{}: another issuer uses this folder; stop it, or choose another folder",
                path.display()
            )
        );
        drop(locked);
        // Files that a killed command left are gone at the next start.
        let left = [path.clone(), path.join("tokens"), folder];
        let left = left.map(|folder| folder.join(".x.json.~Ab3k2Z"));
        for path in &left {
            fs::write(path, "").unwrap();
        }
        let swept = left
            .clone()
            .map(|path| atomic::is_unfinished(path.file_name().unwrap()));
        StateFolder::create(path).unwrap();
        assert_eq!(left.map(|path| !path.exists()), swept);
    }

    #[test]
    fn state_is_kept_in_files() {
        let place = tempfile::tempdir_in("/dev/shm").unwrap();
        let path = place.path().join("state");
        let (state, _lock) = StateFolder::create(path.clone()).unwrap();
        assert_eq!(
            StateFolder::open(path.clone()).unwrap_err().to_string(),
            format!(
                "{}: not the state folder of an issuer: it has no trust.json; correct the path",
                path.display()
            )
        );
        assert_eq!(state.trust().unwrap(), None);
        let trust = Trust::new(Fingerprint::of(b"ca"));
        state.set_trust(&trust).unwrap();
        assert_eq!(state.trust().unwrap(), Some(trust));
        assert_eq!(StateFolder::open(path.clone()).unwrap().path, path);
        assert_eq!(mode(&path.join("trust.json")), 0o600);
        assert_eq!(state.facts().unwrap(), None);
        let facts = |records: &str| IssuerFacts {
            records: records.into(),
        };
        state.set_facts(&facts("/a")).unwrap();
        assert_eq!(state.facts().unwrap(), Some(facts("/a")));
        let file = path.join("issuer.json");
        let before = FileStamp::of(&file);
        state.set_facts(&facts("/a")).unwrap();
        assert_eq!(FileStamp::of(&file), before, "without a change");
        state.set_facts(&facts("/b")).unwrap();
        assert_eq!(state.facts().unwrap(), Some(facts("/b")));
        fs::write(&file, "{").unwrap();
        assert_eq!(
            state.facts().unwrap_err().to_string(),
            format!(
                "{}: EOF while parsing an object at line 1 column 1; restore the file from a backup",
                file.display()
            )
        );
        state.set_facts(&facts("/b")).unwrap();
        assert_eq!(state.facts().unwrap(), Some(facts("/b")));
        assert_eq!(state.take_confirmation(), None);
        state.confirm_removals(7).unwrap();
        assert_eq!(state.take_confirmation(), Some(7));
        assert_eq!(state.take_confirmation(), None);
        let first = state.lock_rotation().unwrap();
        assert!(first.is_some() && state.lock_rotation().unwrap().is_none());
        drop(first);
        assert!(state.lock_rotation().unwrap().is_some());
        assert_eq!(mode(&path.join("rotation.lock")), 0o600);
    }

    #[test]
    fn tokens_are_forgotten_after_a_week() {
        let place = tempfile::tempdir_in("/dev/shm").unwrap();
        let (state, _lock) = StateFolder::create(place.path().join("state")).unwrap();
        let hour = Duration::from_secs(3600);
        let token = state.create_token("i1", at(START), hour).unwrap();
        assert_eq!(token.len(), 43);
        assert_eq!(mode(&state.token(&token)), 0o600);
        let end = START + 3600;
        for (now, expected) in [(end - 1, Ok(())), (end, Err(TokenError::Expired))] {
            assert_eq!(state.check_token(&token, "i1", at(now)), expected);
        }
        for (now, is_kept) in [(end + 7 * 86_400, true), (end + 7 * 86_400 + 1, false)] {
            state.forget_tokens(at(now));
            assert_eq!(state.knows_token(&token), is_kept);
        }
        let unknown = Err(TokenError::Unknown);
        assert_eq!(state.check_token(&token, "i1", at(START)), unknown);
        fs::write(state.token("damaged"), "{").unwrap();
        assert_eq!(state.use_token("damaged", "i1", at(START)), unknown);
        state.forget_tokens(at(2 * START));
        assert!(state.knows_token("damaged"));
    }

    #[test]
    fn members_are_written_as_lines() {
        let (_folder, state, states) = written();
        let path = state.path.join("members.jsonl");
        let text = fs::read_to_string(&path).unwrap();
        let ca = Fingerprint::of(b"ca");
        let member = |generation, not_after| {
            format!(r#"{{"generation":{generation},"issuers":["{ca}"],"not_after":{not_after}}}"#)
        };
        assert_eq!(
            text,
            [
                format!("{{\"member\":[\"a\",{}]}}\n", member(1, 50)),
                format!("{{\"member\":[\"b\",{}]}}\n", member(0, 90)),
                "{\"renewed\":[\"a\",99]}\n".to_owned(),
                "{\"removed\":\"a\"}\n".to_owned(),
            ]
            .concat()
        );
        // Nothing is written without a change.
        let mut file = MembersFile::open(&state).unwrap();
        file.save(&changes(&states[3], &states[3])).unwrap();
        file.save(&BTreeMap::from([("x".to_owned(), None)]))
            .unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), text);
        // Another generation or CA is more than a renewal.
        let mut other = states[3].clone();
        other.get_mut("b").unwrap().generation = 5;
        file.save(&changes(&states[3], &other)).unwrap();
        assert_eq!(state.members().unwrap(), other);
        other.get_mut("b").unwrap().issuers.clear();
        file.save(&changes(&states[3], &other)).unwrap();
        assert_eq!(state.members().unwrap(), other);
        // A renewal of a member that is not known is none.
        let mut members = Members::new();
        apply(&mut members, Change::Renewed("x".to_owned(), 7));
        assert_eq!(members, Members::new());
    }

    #[test]
    fn number_of_lines_is_limited() {
        let (_folder, state, _) = written();
        let mut file = MembersFile::open(&state).unwrap();
        let path = state.path.join("members.jsonl");
        let lines = || fs::read_to_string(&path).unwrap().lines().count();
        // One member: 1008 lines.
        for end in 1000..2004 {
            let mut member = file.held["b"].clone();
            member.not_after = end;
            file.save(&BTreeMap::from([("b".to_owned(), Some(member))]))
                .unwrap();
        }
        assert_eq!(lines(), 1008);
        let mut member = file.held["b"].clone();
        member.not_after = 3000;
        let held = Members::from([("b".to_owned(), member.clone())]);
        file.save(&BTreeMap::from([("b".to_owned(), Some(member))]))
            .unwrap();
        assert_eq!(lines(), 1);
        assert_eq!(state.members().unwrap(), held);
    }
}
