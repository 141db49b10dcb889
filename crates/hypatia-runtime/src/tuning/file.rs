//! The file of the tuning database.

use super::{Entry, Key};
use crate::store::private::Folder;
use crate::store::{TUNING_FILE as FILE, TUNING_HEAD as HEAD};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

/// What follows in the first line: another one is another format.
const VERSION: &str = "2}";
/// Bytes of a file; the oldest entries give way.
pub(super) const LIMIT: usize = 4 << 20;

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
    let bytes = Folder::open(folder).and_then(|place| place.read(FILE, LIMIT as u64));
    bytes.map(|bytes| parse(folder, &bytes)).unwrap_or_else(|error| {
        if error.kind() != io::ErrorKind::NotFound {
            tracing::debug!("{} counts as absent: {error}", folder.join(FILE).display());
        }
        All::new()
    })
}

fn parse(folder: &Path, bytes: &[u8]) -> All {
    let mut lines = bytes.split(|byte| *byte == b'\n');
    if lines.next().and_then(|line| line.strip_prefix(HEAD)) != Some(VERSION.as_bytes()) {
        tracing::debug!("{} is no tuning database of this version", folder.join(FILE).display());
        return All::new();
    }
    let whole = |line: &[u8]| serde_json::from_slice::<Line<Key, Entry>>(line).ok();
    let lines = lines.filter_map(whole);
    lines.map(|line| (line.key, (line.entry, line.at))).collect()
}

/// Replaces the file by what `merge` makes of it, and returns what was kept. One process at a time.
pub(super) fn update(folder: &Path, merge: impl FnOnce(All) -> All) -> io::Result<All> {
    let place = Folder::make(folder)?;
    let _lock = place.lock("tuning.lock")?;
    let mut all = merge(read(folder));
    let bytes = text(&mut all)?;
    place.replace(FILE, &bytes).map(|()| all)
}

/// The newest entries that fit.
fn text(all: &mut All) -> io::Result<Vec<u8>> {
    let mut lines = vec![];
    for (key, (entry, at)) in all.iter() {
        let line = serde_json::to_string(&Line { key, entry, at: *at })?;
        lines.push((*at, line, key.clone()));
    }
    lines.sort_by(|a, b| b.0.cmp(&a.0).then_with(|| a.2.cmp(&b.2)));
    let mut bytes = [HEAD, VERSION.as_bytes()].concat();
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
