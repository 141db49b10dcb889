//! Folders and files that nobody but their user may have written.
//!
//! What others could have put there is refused, by the descriptor that is read from, not by the name: links are not
//! followed, pipes are not waited for, and no more is read than asked for.

use rustix::fs::{self, AtFlags, CWD, Dir, FileType, Mode, OFlags, Stat, Timespec, Timestamps, UTIME_NOW};
use rustix::io::Errno;
use std::ffi::{OsStr, OsString};
use std::fs::{DirBuilder, File, TryLockError};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

const FOLDER: OFlags = flags(&[OFlags::RDONLY, OFlags::DIRECTORY, OFlags::NOFOLLOW]);
const READ: OFlags = flags(&[OFlags::RDONLY, OFlags::NOFOLLOW, OFlags::NONBLOCK]);
const LOCK: OFlags = flags(&[OFlags::WRONLY, OFlags::CREATE, OFlags::NOFOLLOW, OFlags::NONBLOCK]);
const WRITE: OFlags = flags(&[OFlags::WRONLY, OFlags::CREATE, OFlags::EXCL, OFlags::NOFOLLOW]);
const FOLDER_MODE: u32 = 0o700;
const FILE_MODE: u32 = 0o600;
/// How long to wait for another process that holds a lock.
const PATIENCE: Duration = Duration::from_secs(2);

const fn flags(all: &[OFlags]) -> OFlags {
    let (mut sum, mut at) = (OFlags::CLOEXEC, 0);
    while at < all.len() {
        sum = sum.union(all[at]);
        at += 1;
    }
    sum
}

/// Something that others may have written, or that is not what it should be.
pub(crate) fn refused(why: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::PermissionDenied, why.into())
}

/// A folder as a descriptor: nobody can exchange what it stands for.
#[derive(Debug)]
pub(crate) struct Folder(OwnedFd);

impl Folder {
    /// A folder that only its user may write.
    pub(crate) fn open(path: &Path) -> io::Result<Folder> {
        Folder::at(CWD, path)
    }

    /// The same, made if there is none.
    pub(crate) fn make(path: &Path) -> io::Result<Folder> {
        DirBuilder::new().recursive(true).mode(FOLDER_MODE).create(path)?;
        Folder::open(path)
    }

    /// A folder in this one.
    pub(crate) fn inner(&self, name: &str, make: bool) -> io::Result<Folder> {
        if make {
            match fs::mkdirat(&self.0, name, Mode::from_raw_mode(FOLDER_MODE)) {
                Err(Errno::EXIST) | Ok(()) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Folder::at(&self.0, Path::new(name))
    }

    fn at(above: impl AsFd, path: &Path) -> io::Result<Folder> {
        let found = fs::openat(&above, path, FOLDER, Mode::empty()).map_err(|error| {
            // Linux says "not a directory" of a link that is not to be followed.
            let about = fs::statat(&above, path, AtFlags::SYMLINK_NOFOLLOW);
            let is_link = about.is_ok_and(|about| FileType::from_raw_mode(about.st_mode) == FileType::Symlink);
            match is_link {
                true => refused(format!("{} is a link", path.display())),
                false => error.into(),
            }
        })?;
        let about = fs::fstat(&found)?;
        let path = path.display();
        if !is_ours(about.st_uid) {
            return Err(refused(format!("{path} belongs to user {}", about.st_uid)));
        }
        if !is_private(&about) {
            let mode = about.st_mode & 0o7777;
            return Err(refused(format!("others may write {path} (mode {mode:o})")));
        }
        Ok(Folder(found))
    }

    /// The names of what is in it.
    pub(crate) fn names(&self) -> io::Result<Vec<OsString>> {
        let mut names = vec![];
        for entry in Dir::read_from(&self.0)? {
            let entry = entry?;
            let name = entry.file_name().to_bytes();
            if name != b"." && name != b".." {
                names.push(OsStr::from_bytes(name).to_owned());
            }
        }
        names.sort();
        Ok(names)
    }

    /// What is known of a regular file that only its user may write.
    pub(crate) fn about(&self, name: &str) -> Option<Stat> {
        let about = fs::statat(&self.0, name, AtFlags::SYMLINK_NOFOLLOW).ok()?;
        is_file(&about).then_some(about)
    }

    /// All of a file, if it has at most so many bytes.
    pub(crate) fn read(&self, name: &str, most: u64) -> io::Result<Vec<u8>> {
        let file = self.opened(name, READ)?;
        let size = file.metadata()?.len();
        if size > most {
            return Err(refused(format!("it has {size} bytes, more than {most}")));
        }
        content(file, most)
    }

    /// The first bytes of a file.
    pub(crate) fn start(&self, name: &str, count: u64) -> io::Result<Vec<u8>> {
        content(self.opened(name, READ)?, count)
    }

    /// Makes a file, in place of one that is there: written under another name, of which nothing is left.
    pub(crate) fn replace(&self, name: &str, content: &[u8]) -> io::Result<()> {
        let part = unfinished(name);
        let written = (self.opened(&part, WRITE))
            .and_then(|mut file| file.write_all(content))
            .and_then(|()| Ok(fs::renameat(&self.0, &part, &self.0, name)?));
        if written.is_err() {
            self.remove(&part);
        }
        written
    }

    /// Whether a file was there and is gone now.
    pub(crate) fn remove(&self, name: &str) -> bool {
        let removed = fs::unlinkat(&self.0, name, AtFlags::empty());
        if let Err(error) = removed
            && error != Errno::NOENT
        {
            tracing::debug!("{name} cannot be removed: {error}");
        }
        removed.is_ok()
    }

    /// Removes an empty folder in it.
    pub(crate) fn remove_folder(&self, name: &str) {
        let _ = fs::unlinkat(&self.0, name, AtFlags::REMOVEDIR);
    }

    /// Marks a file as used now.
    pub(crate) fn touch(&self, name: &str) {
        let now = Timespec {
            tv_sec: 0,
            tv_nsec: UTIME_NOW,
        };
        let times = Timestamps {
            last_access: now,
            last_modification: now,
        };
        let _ = fs::utimensat(&self.0, name, &times, AtFlags::SYMLINK_NOFOLLOW);
    }

    /// Keeps other processes out that lock the same file, until it is dropped or the process ends.
    pub(crate) fn lock(&self, name: &str) -> io::Result<File> {
        let file = self.opened(name, LOCK)?;
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

    fn opened(&self, name: &str, how: OFlags) -> io::Result<File> {
        let file = fs::openat(&self.0, name, how, Mode::from_raw_mode(FILE_MODE)).map_err(|error| match error {
            Errno::LOOP => refused("it is a link"),
            other => other.into(),
        })?;
        if !is_file(&fs::fstat(&file)?) {
            return Err(refused("it is no regular file that only its user may write"));
        }
        Ok(file.into())
    }
}

fn content(file: File, most: u64) -> io::Result<Vec<u8>> {
    let mut bytes = vec![];
    file.take(most).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// A name that nobody else writes, from which the name of the file can be seen.
fn unfinished(name: &str) -> String {
    static COUNT: AtomicU16 = AtomicU16::new(0);
    let time = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    let stem = name.split('.').next().unwrap_or_default();
    let number = (u64::from(time.subsec_nanos()) << 16) | u64::from(count);
    format!("{stem}-{}-{number:012x}.tmp", std::process::id())
}

/// Of which file a name is an unfinished one, if it is.
pub(crate) fn unfinished_of(name: &str) -> Option<&str> {
    let mut parts = name.strip_suffix(".tmp")?.rsplitn(3, '-');
    let (number, process, stem) = (parts.next()?, parts.next()?, parts.next()?);
    let digits = !process.is_empty() && process.bytes().all(|b| b.is_ascii_digit());
    (digits && number.len() == 12 && is_hex(number)).then_some(stem)
}

/// Whether a name is made of hexadecimal digits.
pub(crate) fn is_hex(name: &str) -> bool {
    name.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
}

fn is_file(about: &Stat) -> bool {
    FileType::from_raw_mode(about.st_mode) == FileType::RegularFile && is_private(about)
}

fn is_private(about: &Stat) -> bool {
    is_ours(about.st_uid) && about.st_mode & 0o022 == 0
}

/// Root may do anything anyway, and makes folders that others only read.
fn is_ours(user: u32) -> bool {
    user == 0 || user == rustix::process::geteuid().as_raw()
}

/// An error if somebody may exchange a folder: who may write one above it. Not so where everybody has only his own.
pub(crate) fn check_above(path: &Path) -> io::Result<()> {
    let Some(parent) = path.parent() else { return Ok(()) };
    let real = parent.canonicalize()?;
    for above in real.ancestors() {
        let mode = fs::stat(above)?.st_mode;
        let mode = Mode::from_raw_mode(mode);
        if mode.contains(Mode::WOTH) && !mode.contains(Mode::SVTX) {
            let mode = mode.bits() & 0o7777;
            return Err(refused(format!(
                "everybody may write {} (mode {mode:o})",
                above.display()
            )));
        }
    }
    Ok(())
}
