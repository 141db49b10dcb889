//! The tuning database: what was measured on a machine, kept for the next process.
//!
//! A key says what was measured where; an entry has the time of each candidate and the one that was chosen. The file
//! has one line for each entry. What cannot be read counts as absent, what cannot be written stays in memory, and
//! neither is an error.

mod file;
#[cfg(test)]
mod tests;

use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// What was measured, and where.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Key {
    /// The processor or accelerator, in words.
    pub device: String,
    /// Versions of the libraries whose kernels were measured.
    pub libraries: String,
    /// The op with what is fused to it.
    pub op: String,
    /// Its sizes.
    pub shape: Vec<usize>,
    /// Its element type.
    pub dtype: String,
    /// How its operands lie in memory, if there is a choice.
    pub layout: String,
    /// Threads, or 0 where they mean nothing.
    pub threads: usize,
}

/// What came out.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Entry {
    /// The candidate to use.
    pub chosen: String,
    /// Microseconds of each candidate that was measured.
    pub times: BTreeMap<String, f64>,
    /// What the chosen candidate needs beside its name, such as a serialized algorithm.
    #[serde(default, skip_serializing_if = "Vec::is_empty", with = "file::hex")]
    pub data: Vec<u8>,
}

/// Entries with their age, and those that the file does not have.
#[derive(Debug, Default)]
struct Entries {
    all: BTreeMap<Key, (Entry, u64)>,
    new: BTreeSet<Key>,
}

/// Measurements of this process and of those before it.
#[derive(Debug, Default)]
pub struct Database {
    folder: Option<PathBuf>,
    entries: Mutex<Entries>,
}

impl Database {
    /// Keeps nothing on disk.
    pub fn in_memory() -> Database {
        Database::default()
    }

    /// Reads what is in a folder. A folder that does not exist is made when something is saved.
    pub fn open(folder: impl Into<PathBuf>) -> Database {
        let folder = folder.into();
        let all = file::read(&folder);
        Database {
            folder: Some(folder),
            entries: Mutex::new(Entries {
                all,
                new: BTreeSet::new(),
            }),
        }
    }

    /// What is known for a key.
    pub fn get(&self, key: &Key) -> Option<Entry> {
        self.entries().all.get(key).map(|(entry, _)| entry.clone())
    }

    /// What is known for a key, or else is measured now and known from then on.
    pub fn known_or<E>(&self, key: Key, measure: impl FnOnce() -> Result<Entry, E>) -> Result<Entry, E> {
        if let Some(entry) = self.get(&key) {
            return Ok(entry);
        }
        let entry = measure()?;
        self.put(key, entry.clone());
        Ok(entry)
    }

    /// Adds or replaces an entry, in memory.
    pub fn put(&self, key: Key, entry: Entry) {
        tracing::debug!(op = key.op, shape = ?key.shape, dtype = key.dtype, chosen = entry.chosen, times = ?entry.times, "tuned");
        let mut entries = self.entries();
        entries.new.insert(key.clone());
        entries.all.insert(key, (entry, file::now()));
    }

    /// How many entries there are.
    pub fn len(&self) -> usize {
        self.entries().all.len()
    }

    /// True if nothing is known.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Writes new entries into the folder, beside what other processes wrote there meanwhile, and takes those in. False
    /// if that failed or there is no folder; the entries stay, and a later call tries again.
    pub fn save(&self) -> bool {
        let Some(folder) = &self.folder else { return false };
        let mut entries = self.entries();
        if entries.new.is_empty() {
            return true;
        }
        let Entries { all, new } = &mut *entries;
        let written = file::update(folder, |on_disk| {
            for (key, entry) in on_disk {
                if !new.contains(&key) {
                    all.insert(key, entry);
                }
            }
            all.clone()
        });
        match written {
            Ok(kept) => {
                *all = kept;
                new.clear();
                true
            }
            Err(error) => {
                tracing::debug!("tuning database not saved in {}: {error}", folder.display());
                false
            }
        }
    }

    fn entries(&self) -> MutexGuard<'_, Entries> {
        // Entries are whole between statements, also where a thread panicked.
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
