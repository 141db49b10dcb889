//! A small store on disk for compiled programs, kernels and measured times.
//!
//! Whatever cannot be read counts as absent. Every file carries a magic, the version of its form and a checksum. It is
//! written under another name and renamed, so that several processes can share a folder, and a killed one leaves nothing
//! that is ever read.
//!
//! Everything lies in one folder of our own, marked, and written by its user alone. No file outside of it is touched, and
//! none inside that is not named and made as ours are.

mod format;
pub(crate) mod private;

use private::Folder;
use rustix::fs::Stat;
use std::io::{self, ErrorKind};
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

const MARKER: &str = "HYPATIA-CACHE";
const MARK: &[u8] = b"This folder is Hypatia's cache. Files in it may be removed at any time.\n";
/// Bytes of an entry; more is neither read nor written.
const LARGEST: u64 = 64 << 20;
const STALE: Duration = Duration::from_secs(3600);
/// The folder of measured times.
const TUNING: &str = "tuning";
/// Their file, and how it begins.
pub(crate) const TUNING_FILE: &str = "tuning.jsonl";
pub(crate) const TUNING_HEAD: &[u8] = br#"{"hypatia tuning":"#;

/// A folder with entries, each under a kind and a key.
#[derive(Debug, Clone)]
pub struct Store {
    root: PathBuf,
    limit: u64,
}

/// What is kept under a key.
#[derive(Debug, Clone)]
pub struct Entry {
    /// Of what kind it is.
    pub kind: String,
    /// What it was put under.
    pub key: String,
    /// Bytes of its file.
    pub size: u64,
    /// When it was used last, in seconds since 1970.
    pub used: f64,
    /// Its file.
    pub path: PathBuf,
}

impl Store {
    /// A store in a folder whose files may take so many bytes together. Nothing is made before something is put.
    pub fn new(root: impl Into<PathBuf>, limit: u64) -> Store {
        let root = root.into();
        Store { root, limit }
    }

    /// What was put under the key, if it is still there and whole. An error if the folder is not to be trusted.
    pub fn get(&self, kind: &str, key: &str) -> io::Result<Option<Vec<u8>>> {
        let place = match self.opened(kind, false) {
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => return Ok(None),
            other => other?,
        };
        let name = format::name(key);
        let absent = |why: &dyn std::fmt::Display| tracing::debug!("cache file {name} counts as absent: {why}");
        let content = match place.read(&name, LARGEST.min(self.limit)) {
            Ok(content) => content,
            Err(error) => {
                if error.kind() != ErrorKind::NotFound {
                    absent(&error);
                }
                return Ok(None);
            }
        };
        match format::parse(&content) {
            Ok((found, data)) if found == key => {
                place.touch(&name);
                return Ok(Some(data.to_vec()));
            }
            Ok(_) => absent(&"it belongs to another key"),
            Err(broken) => absent(&broken),
        }
        place.remove(&name);
        Ok(None)
    }

    /// Keeps the bytes under the key, in place of what was there before. An error if nothing can be kept here.
    pub fn put(&self, kind: &str, key: &str, data: &[u8]) -> io::Result<()> {
        let content = format::packed(key, data);
        if content.len() as u64 > LARGEST.min(self.limit) {
            tracing::debug!("{} bytes are more than the cache may hold: not kept", content.len());
            return Ok(());
        }
        let name = format::name(key);
        if let Err(error) = self.opened(kind, true).and_then(|place| place.replace(&name, &content)) {
            // Another process may have cleared the folder meanwhile.
            let cleared = error.kind() == ErrorKind::NotFound && self.root.join(kind).is_dir();
            if !cleared && error.kind() != ErrorKind::IsADirectory {
                return Err(error);
            }
            tracing::debug!("not kept in the cache: {error}");
            return Ok(());
        }
        self.evict(kind, &name);
        Ok(())
    }

    /// Forgets what was put under the key: it turned out to be of no use.
    pub fn drop(&self, kind: &str, key: &str) {
        if let Ok(place) = self.opened(kind, false) {
            place.remove(&format::name(key));
        }
    }

    /// All that is kept, least recently used first.
    pub fn entries(&self) -> Vec<Entry> {
        let mut found = vec![];
        self.visit(is_entry, |kind, place, name, about| {
            let Ok(start) = place.start(name, format::MOST_OF_A_KEY) else {
                return;
            };
            if let Ok(key) = format::parse_key(&start) {
                found.push(Entry {
                    kind: kind.into(),
                    key: key.into(),
                    size: about.st_size.cast_unsigned(),
                    used: about.st_mtime as f64 + about.st_mtime_nsec as f64 * 1e-9,
                    path: self.root.join(kind).join(name),
                });
            }
        });
        found.sort_by(|a, b| a.used.total_cmp(&b.used).then_with(|| a.path.cmp(&b.path)));
        found
    }

    /// Removes all entries, measurements and unfinished writes; the number of entries removed.
    pub fn clear(&self) -> usize {
        let mut removed = 0;
        self.visit(is_entry, |_, place, name, _| {
            removed += usize::from(starts(place, name, format::MAGIC) && place.remove(name));
        });
        self.visit(is_unfinished, |_, place, name, _| {
            place.remove(name);
        });
        if let Ok(place) = self.opened(TUNING, false)
            && starts(&place, TUNING_FILE, TUNING_HEAD)
        {
            place.remove(TUNING_FILE);
        }
        removed
    }

    /// Where measured times of kernels are kept, in a file of their own.
    pub fn tuning_folder(&self) -> io::Result<PathBuf> {
        self.opened(TUNING, true).map(|_| self.root.join(TUNING))
    }

    /// How many measured times are kept.
    pub fn measurements(&self) -> usize {
        let file = (self.opened(TUNING, false)).and_then(|place| place.read(TUNING_FILE, LARGEST));
        let times = |line: &&[u8]| line.starts_with(b"{") && line.windows(7).any(|part| part == b"\"times\"");
        file.map_or(0, |bytes| bytes.split(|byte| *byte == b'\n').filter(times).count())
    }

    /// An error that says why nothing can be written, if that is so.
    pub fn probe(&self) -> io::Result<()> {
        let (kind, name) = ("probe", format::name("probe"));
        let place = self.opened(kind, true)?;
        place.replace(&name, &format::packed(kind, b""))?;
        place.remove(&name);
        self.folder(false)?.remove_folder(kind);
        Ok(())
    }

    fn opened(&self, kind: &str, make: bool) -> io::Result<Folder> {
        self.folder(make)?.inner(kind, make)
    }

    /// Our folder, which has a marker.
    fn folder(&self, make: bool) -> io::Result<Folder> {
        if !self.root.is_absolute() {
            return Err(private::refused("there is no home folder"));
        }
        let opened = if make { Folder::make } else { Folder::open };
        let place = opened(&self.root)?;
        private::check_above(&self.root)?;
        if !is_marked(&place)? {
            if !make {
                return Err(io::Error::new(ErrorKind::NotFound, "it has no marker"));
            }
            let strange = |name: &std::ffi::OsString| !name.as_encoded_bytes().starts_with(MARKER.as_bytes());
            let strange = place.names()?.iter().any(strange);
            // Another process may have made it meanwhile.
            if strange && !is_marked(&place)? {
                let root = self.root.display();
                let why = format!("{root} is not empty and has no file {MARKER}: it is somebody else's");
                return Err(private::refused(why));
            }
            place.replace(MARKER, MARK)?;
        }
        Ok(place)
    }

    /// Calls with regular files of such names: kind, its folder, name, what is known of it. Another process may remove a
    /// file or a folder at any moment.
    fn visit(&self, wanted: fn(&str) -> bool, mut call: impl FnMut(&str, &Folder, &str, &Stat)) {
        let Ok(store) = self.folder(false) else { return };
        for kind in store.names().unwrap_or_default() {
            let Some(kind) = kind.to_str().filter(|kind| is_kind(kind)) else {
                continue;
            };
            let Ok(place) = store.inner(kind, false) else { continue };
            for name in place.names().unwrap_or_default() {
                if let Some(name) = name.to_str().filter(|name| wanted(name))
                    && let Some(about) = place.about(name)
                {
                    call(kind, &place, name, &about);
                }
            }
        }
    }

    /// Removes what was used least recently until the rest fits, and unfinished files that are old.
    fn evict(&self, kind: &str, keep: &str) {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let oldest = now.unwrap_or_default().saturating_sub(STALE).as_secs();
        self.visit(is_unfinished, |_, place, name, about| {
            if about.st_mtime < oldest.cast_signed() {
                place.remove(name);
            }
        });
        let (mut found, mut total) = (vec![], 0);
        self.visit(is_entry, |kind, _, name, about| {
            let size = about.st_size.cast_unsigned();
            total += size;
            found.push((
                about.st_mtime,
                about.st_mtime_nsec,
                kind.to_owned(),
                name.to_owned(),
                size,
            ));
        });
        if total <= self.limit {
            return;
        }
        found.sort();
        for (_, _, of, name, size) in found {
            // Down to a part of the limit, so that it is not needed again at the next write.
            if total <= self.limit / 10 * 9 {
                return;
            }
            if (of.as_str(), name.as_str()) != (kind, keep)
                && let Ok(place) = self.opened(&of, false)
                && starts(&place, &name, format::MAGIC)
                && place.remove(&name)
            {
                total -= size;
            }
        }
    }
}

/// Whether a text may be a kind: the name of a folder, and of no other.
pub fn is_kind(text: &str) -> bool {
    let letter = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    text.bytes().next().is_some_and(letter) && text.bytes().all(|b| letter(b) || b == b'-' || b == b'_')
}

fn is_entry(name: &str) -> bool {
    name.strip_suffix(".entry").is_some_and(is_stem)
}

fn is_unfinished(name: &str) -> bool {
    private::unfinished_of(name).is_some_and(|stem| stem == TUNING || is_stem(stem))
}

/// Names of before have more digits.
fn is_stem(stem: &str) -> bool {
    stem.len() >= 16 && private::is_hex(stem)
}

fn is_marked(place: &Folder) -> io::Result<bool> {
    match place.start(MARKER, MARK.len() as u64) {
        Ok(start) => Ok(start == MARK),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// Whether a file is one that we made.
fn starts(place: &Folder, name: &str, magic: &[u8]) -> bool {
    place.start(name, magic.len() as u64).is_ok_and(|start| start == magic)
}
