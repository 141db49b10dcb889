//! The file of the tuning database.

use super::{Entry, Key};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::{self, DirBuilder, File, Metadata, OpenOptions, TryLockError};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

const NAME: &str = "tuning.jsonl";
/// The first line: another one is another format.
const HEADER: &str = r#"{"hypatia tuning":1}"#;
/// Bytes of a file; the oldest entries give way.
pub(super) const LIMIT: usize = 4 << 20;
/// How long to wait for another process that writes.
const PATIENCE: Duration = Duration::from_secs(2);

pub(super) type All = BTreeMap<Key, (Entry, u64)>;

#[derive(Serialize, Deserialize)]
struct Line<K, E> {
    key: K,
    entry: E,
    /// Seconds since 1970.
    at: u64,
}

/// The age of an entry that is made now.
pub(super) fn now() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |time| time.as_secs())
}

/// All lines that can be read; nothing from a file that is too large or of another format.
pub(super) fn read(folder: &Path) -> All {
    let path = folder.join(NAME);
    let foreign = || tracing::debug!("{} is no tuning database of this version", path.display());
    let mut bytes = vec![];
    let mut read = || {
        check(folder)?;
        let file = open(&path, OpenOptions::new().read(true))?;
        file.take(LIMIT as u64 + 1).read_to_end(&mut bytes)
    };
    match read() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return All::new(),
        Err(error) => {
            tracing::debug!("{} counts as absent: {error}", path.display());
            return All::new();
        }
        Ok(size) if size > LIMIT => {
            foreign();
            return All::new();
        }
        Ok(_) => {}
    }
    let mut lines = bytes.split(|byte| *byte == b'\n');
    if lines.next() != Some(HEADER.as_bytes()) {
        foreign();
        return All::new();
    }
    let whole = |line: &[u8]| serde_json::from_slice::<Line<Key, Entry>>(line).ok();
    let lines = lines.filter_map(whole);
    lines.map(|line| (line.key, (line.entry, line.at))).collect()
}

/// Replaces the file by what `merge` makes of it, and returns what was kept. One process at a time.
pub(super) fn update(folder: &Path, merge: impl FnOnce(All) -> All) -> io::Result<All> {
    DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    check(folder)?;
    let _lock = lock(&folder.join("tuning.lock"))?;
    let mut all = merge(read(folder));
    let bytes = text(&mut all)?;
    // Readers see the old file or the new one.
    let part = unfinished(folder);
    let written = open(&part, OpenOptions::new().write(true).create_new(true))
        .and_then(|mut file| file.write_all(&bytes))
        .and_then(|()| fs::rename(&part, folder.join(NAME)));
    if written.is_err() {
        let _ = fs::remove_file(&part);
    }
    written.map(|()| all)
}

/// A file that nobody else writes.
fn unfinished(folder: &Path) -> PathBuf {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let time = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let (count, nanos) = (COUNT.fetch_add(1, Ordering::Relaxed), time.subsec_nanos());
    folder.join(format!("tuning-{}-{nanos:x}{count:x}.part", std::process::id()))
}

/// Opens a regular file, which nobody else may have written: no link is followed and no pipe waited for.
fn open(path: &Path, how: &mut OpenOptions) -> io::Result<File> {
    let file = how
        .mode(0o600)
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
        .open(path)?;
    let about = file.metadata()?;
    if about.is_file() && is_private(&about) {
        return Ok(file);
    }
    Err(io::Error::other("it is no regular file that only its user may write"))
}

/// An error if others may have put files into a folder.
fn check(folder: &Path) -> io::Result<()> {
    let about = fs::symlink_metadata(folder)?;
    if about.is_dir() && is_private(&about) {
        return Ok(());
    }
    Err(io::Error::other("it is no folder that only its user may write"))
}

/// Whether only this user, or root, may write it.
fn is_private(about: &Metadata) -> bool {
    // SAFETY: it has no conditions.
    let user = unsafe { libc::geteuid() };
    [0, user].contains(&about.uid()) && about.mode() & 0o022 == 0
}

/// The newest entries that fit.
fn text(all: &mut All) -> io::Result<Vec<u8>> {
    let mut lines = vec![];
    for (key, (entry, at)) in all.iter() {
        let line = serde_json::to_string(&Line { key, entry, at: *at })?;
        lines.push((*at, line, key.clone()));
    }
    lines.sort_by(|a, b| b.0.cmp(&a.0).then_with(|| a.2.cmp(&b.2)));
    let mut bytes = HEADER.as_bytes().to_vec();
    for (_, line, key) in lines {
        if bytes.len() + 1 + line.len() > LIMIT {
            all.remove(&key);
            continue;
        }
        bytes.push(b'\n');
        bytes.extend_from_slice(line.as_bytes());
    }
    Ok(bytes)
}

/// Freed when it is dropped, or when the process ends.
fn lock(path: &Path) -> io::Result<File> {
    let file = open(path, OpenOptions::new().create(true).truncate(false).write(true))?;
    let mut waited = Duration::ZERO;
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(TryLockError::WouldBlock) if waited < PATIENCE => {
                let pause = Duration::from_millis(5);
                std::thread::sleep(pause);
                waited += pause;
            }
            Err(error) => return Err(error.into()),
        }
    }
}

/// Bytes as text.
pub(super) mod hex {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub fn serialize<S: Serializer>(bytes: &[u8], to: S) -> Result<S::Ok, S::Error> {
        let digits = bytes.iter().map(|byte| format!("{byte:02x}"));
        to.serialize_str(&digits.collect::<String>())
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<u8>, D::Error> {
        let text = String::deserialize(from)?;
        let pair = |at: usize| text.get(at..at + 2).and_then(|pair| u8::from_str_radix(pair, 16).ok());
        let bytes = (0..text.len()).step_by(2).map(pair);
        bytes
            .collect::<Option<_>>()
            .ok_or_else(|| D::Error::custom("no hexadecimal digits"))
    }
}
