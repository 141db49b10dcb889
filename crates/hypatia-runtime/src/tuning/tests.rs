use super::*;
use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A folder of a test, removed at its end.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Folder {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let name = format!(
            "hypatia-tuning-{}-{}",
            std::process::id(),
            COUNT.fetch_add(1, Ordering::Relaxed)
        );
        let path = std::env::temp_dir().join(name);
        let _ = fs::remove_dir_all(&path);
        Folder(path)
    }

    fn file(&self) -> PathBuf {
        self.0.join("tuning.jsonl")
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn key(op: &str) -> Key {
    Key {
        device: "a processor".into(),
        libraries: "1".into(),
        op: op.into(),
        shape: vec![1, 2, 3],
        dtype: "f32".into(),
        layout: String::new(),
        threads: 2,
    }
}

fn entry(chosen: &str) -> Entry {
    Entry {
        chosen: chosen.into(),
        times: [("a".to_string(), 1.5), ("b".to_string(), 0.25)].into(),
        data: vec![0, 255, 16],
    }
}

fn saved(folder: &Path, op: &str, chosen: &str) -> bool {
    let database = Database::open(folder);
    database.put(key(op), entry(chosen));
    database.save()
}

#[test]
fn what_is_saved_is_read_again() {
    let folder = Folder::new();
    assert!(saved(&folder.0, "linear", "a"));
    let again = Database::open(&folder.0);
    assert_eq!(again.get(&key("linear")), Some(entry("a")));
    assert_eq!(again.get(&key("other")), None);
    assert!(again.save(), "nothing to do");
    assert!(saved(&folder.0, "linear", "b"));
    assert_eq!(Database::open(&folder.0).get(&key("linear")), Some(entry("b")));
}

#[test]
fn in_memory_only() {
    let database = Database::in_memory();
    assert!(database.is_empty());
    database.put(key("linear"), entry("a"));
    assert_eq!(database.get(&key("linear")), Some(entry("a")));
    assert!(!database.save());
    assert_eq!(database.len(), 1);
}

#[test]
fn broken_and_foreign_files_are_absent_and_rebuilt() {
    let folder = Folder::new();
    assert!(saved(&folder.0, "linear", "a"));
    let good = fs::read(folder.file()).unwrap();
    let other = String::from_utf8(good.clone()).unwrap().replacen('2', "999", 1);
    let large = vec![b'x'; file::LIMIT + 1];
    for bytes in [
        &b"\xff\x00 no text"[..],
        b"",
        b"[1, 2]",
        other.as_bytes(),
        &good[..10],
        &large,
    ] {
        fs::write(folder.file(), bytes).unwrap();
        assert!(Database::open(&folder.0).is_empty());
        assert!(saved(&folder.0, "new", "b"));
        let again = Database::open(&folder.0);
        assert_eq!((again.len(), again.get(&key("new"))), (1, Some(entry("b"))));
    }
}

#[test]
fn a_broken_line_costs_only_itself() {
    let folder = Folder::new();
    assert!(saved(&folder.0, "one", "a") && saved(&folder.0, "two", "b"));
    let text = fs::read_to_string(folder.file()).unwrap();
    let broken = text.replacen("\"one\"", "\"one", 1);
    assert_ne!(text, broken);
    fs::write(folder.file(), broken).unwrap();
    let again = Database::open(&folder.0);
    assert_eq!(
        (again.get(&key("one")), again.get(&key("two"))),
        (None, Some(entry("b")))
    );
}

#[test]
fn writers_at_once_lose_nothing() {
    let folder = Folder::new();
    std::thread::scope(|scope| {
        for writer in 0..4 {
            let path = &folder.0;
            scope.spawn(move || {
                let database = Database::open(path);
                for i in 0..5 {
                    database.put(key(&format!("{writer} {i}")), entry("a"));
                    assert!(database.save());
                }
            });
        }
    });
    assert_eq!(Database::open(&folder.0).len(), 20);
    let names = fs::read_dir(&folder.0).unwrap().count();
    assert_eq!(names, 2, "the database and its lock");
}

#[test]
fn saving_takes_in_what_others_saved() {
    let folder = Folder::new();
    let mine = Database::open(&folder.0);
    assert!(saved(&folder.0, "theirs", "b") && saved(&folder.0, "both", "b"));
    mine.put(key("both"), entry("a"));
    assert!(mine.save());
    assert_eq!(mine.get(&key("theirs")), Some(entry("b")));
    assert_eq!(Database::open(&folder.0).get(&key("both")), Some(entry("a")));
}

#[test]
fn a_folder_that_cannot_be_written_is_no_error() {
    let folder = Folder::new();
    fs::create_dir_all(&folder.0).unwrap();
    // A file where the folder should be fails for every user, unlike a mode.
    let path = folder.0.join("file");
    fs::write(&path, "in the way").unwrap();
    let database = Database::open(&path);
    database.put(key("linear"), entry("a"));
    assert!(!database.save());
    assert_eq!(database.get(&key("linear")), Some(entry("a")));
    // So does a folder where the lock should be.
    fs::create_dir_all(folder.0.join("tuning.lock")).unwrap();
    assert!(!saved(&folder.0, "linear", "a"));
    assert!(Database::open(&folder.0).is_empty());
}

#[cfg(unix)]
#[test]
fn a_read_only_folder_is_read() {
    use std::os::unix::fs::PermissionsExt;
    let folder = Folder::new();
    assert!(saved(&folder.0, "linear", "a"));
    fs::set_permissions(&folder.0, fs::Permissions::from_mode(0o555)).unwrap();
    let database = Database::open(&folder.0);
    assert_eq!(database.get(&key("linear")), Some(entry("a")));
    database.put(key("new"), entry("b"));
    // Root may write anyway; nobody may fail.
    let _ = database.save();
    assert_eq!(database.get(&key("new")), Some(entry("b")));
    fs::set_permissions(&folder.0, fs::Permissions::from_mode(0o755)).unwrap();
}

#[test]
fn the_oldest_give_way() {
    let folder = Folder::new();
    let database = Database::open(&folder.0);
    let large = |chosen: &str| Entry {
        data: vec![7; file::LIMIT / 8],
        ..entry(chosen)
    };
    for i in 0..9u64 {
        let mut entries = database.entries();
        entries.new.insert(key(&i.to_string()));
        entries.all.insert(key(&i.to_string()), (large("a"), i));
    }
    assert!(database.save());
    assert_eq!(database.len(), 3);
    let again = Database::open(&folder.0);
    assert!((6..9).all(|i| again.get(&key(&i.to_string())) == Some(large("a"))));
    assert!(fs::metadata(folder.file()).unwrap().len() <= file::LIMIT as u64);
}

#[test]
fn files_and_folders_are_private() {
    use std::os::unix::fs::PermissionsExt;
    let folder = Folder::new();
    assert!(saved(&folder.0, "linear", "a"));
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&folder.0), 0o700);
    assert_eq!(mode(&folder.file()), 0o600);
    assert_eq!(mode(&folder.0.join("tuning.lock")), 0o600);
}

#[test]
fn a_folder_or_file_that_others_may_write_is_not_read() {
    use std::os::unix::fs::PermissionsExt;
    let folder = Folder::new();
    assert!(saved(&folder.0, "linear", "a"));
    for path in [folder.file(), folder.0.clone()] {
        let was = fs::metadata(&path).unwrap().permissions();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o777)).unwrap();
        assert!(Database::open(&folder.0).is_empty(), "{}", path.display());
        if path == folder.0 {
            assert!(!saved(&folder.0, "new", "b"));
        }
        fs::set_permissions(&path, was).unwrap();
    }
    assert_eq!(Database::open(&folder.0).len(), 1);
}

#[test]
fn links_and_folders_in_the_place_of_files_are_left_alone() {
    use std::os::unix::fs::symlink;
    let folder = Folder::new();
    let outside = folder.0.join("outside");
    fs::create_dir_all(&folder.0).unwrap();
    fs::write(&outside, "of somebody else").unwrap();
    for name in ["tuning.part", "tuning.lock", "tuning.jsonl"] {
        let _ = fs::remove_file(folder.0.join(name));
        symlink(&outside, folder.0.join(name)).unwrap();
        let _ = saved(&folder.0, "linear", "a");
        assert_eq!(fs::read_to_string(&outside).unwrap(), "of somebody else", "{name}");
    }
    let _ = fs::remove_file(folder.file());
    let _ = fs::remove_file(folder.0.join("tuning.lock"));
    fs::create_dir(folder.file()).unwrap();
    assert!(!saved(&folder.0, "linear", "a"));
    assert!(Database::open(&folder.0).is_empty());
    assert!(folder.file().is_dir());
}

#[test]
fn a_pipe_is_not_waited_for_and_a_huge_file_is_not_read() {
    let folder = Folder::new();
    assert!(saved(&folder.0, "linear", "a"));
    fs::File::options()
        .write(true)
        .open(folder.file())
        .unwrap()
        .set_len(60 << 30)
        .unwrap();
    assert!(Database::open(&folder.0).is_empty());
    fs::remove_file(folder.file()).unwrap();
    rustix::fs::mkfifoat(rustix::fs::CWD, folder.file(), 0o600.into()).unwrap();
    assert!(Database::open(&folder.0).is_empty());
}
