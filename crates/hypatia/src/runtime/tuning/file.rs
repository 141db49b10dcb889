//! The file of the tuning database.

use super::{Entry, Key};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::{self, File, TryLockError};
use std::io::{self, Read, Write};
use std::path::Path;
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
    let mut bytes = vec![];
    let path = folder.join(NAME);
    let read = File::open(&path).and_then(|file| file.take(2 * LIMIT as u64).read_to_end(&mut bytes));
    let foreign = || tracing::debug!("{} is no tuning database of this version", path.display());
    match read {
        Err(_) => return All::new(),
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
    fs::create_dir_all(folder)?;
    let _lock = lock(&folder.join("tuning.lock"))?;
    let mut all = merge(read(folder));
    let bytes = text(&mut all)?;
    // Nobody else writes this file while the lock is held; readers see the old file or the new one.
    let part = folder.join("tuning.part");
    let written = File::create(&part)
        .and_then(|mut file| file.write_all(&bytes))
        .and_then(|()| fs::rename(&part, folder.join(NAME)));
    if written.is_err() {
        let _ = fs::remove_file(&part);
    }
    written.map(|()| all)
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
    let file = File::options().create(true).truncate(false).write(true).open(path)?;
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
