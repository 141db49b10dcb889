//! Which copies of the CUDA libraries are used.
//!
//! torch brings its own. A second copy beside them would have its own state and could be of another version, so a copy
//! that the process has already loaded comes first, then the folders that [`search_in`] was given, then the linker.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

use crate::{Error, Result};

/// Folders in which libraries are looked for, separated as in `PATH`; used where nobody calls [`search_in`].
pub const FOLDERS_VARIABLE: &str = "HYPATIA_CUDA_LIBRARIES";

/// Finds a library that is loaded already and loads none; Linux's number for it.
const RTLD_NOLOAD: i32 = 4;

static FOLDERS: Mutex<Option<Vec<PathBuf>>> = Mutex::new(None);

/// Looks for libraries in these folders from now on; those in use stay. A relative one is left out: what lies in the
/// folder that somebody happens to work in is not to be run.
pub fn search_in(mut folders: Vec<PathBuf>) {
    folders.retain(|folder| folder.is_absolute());
    *FOLDERS.lock().unwrap_or_else(PoisonError::into_inner) = Some(folders);
}

fn folders() -> Vec<PathBuf> {
    let chosen = FOLDERS.lock().unwrap_or_else(PoisonError::into_inner).clone();
    chosen.unwrap_or_else(|| {
        let named = std::env::var_os(FOLDERS_VARIABLE).unwrap_or_default();
        std::env::split_paths(&named).filter(|f| f.is_absolute()).collect()
    })
}

/// A library in use and how it was found.
#[derive(Debug)]
pub(super) struct Opened {
    pub(super) library: Library,
    pub(super) origin: String,
}

/// Opens the first of several names of a library, newest first.
pub(super) fn open(name: &'static str, files: &[&str]) -> Result<Opened> {
    if !cfg!(target_os = "linux") {
        return Err(missing(name, "CUDA is only driven on Linux".into()));
    }
    let folders = folders();
    for file in files {
        if let Ok(library) = load(file.as_ref(), RTLD_NOLOAD) {
            let origin = "already loaded".into();
            return Ok(Opened { library, origin });
        }
    }
    let installed = || folders.iter().flat_map(|f| files.iter().map(move |file| f.join(file)));
    let mut reasons: Vec<String> = vec![];
    for path in installed().filter(|p| p.exists()) {
        match load(path.as_os_str(), RTLD_LOCAL) {
            Ok(library) => {
                let origin = path.display().to_string();
                return Ok(Opened { library, origin });
            }
            Err(e) => reasons.push(reason(&e)),
        }
    }
    for file in files {
        match load(file.as_ref(), RTLD_LOCAL) {
            Ok(library) => {
                let origin = "found by the linker".into();
                return Ok(Opened { library, origin });
            }
            Err(e) => reasons.push(reason(&e)),
        }
    }
    Err(missing(name, reasons.join("; ")))
}

/// Loads the companions of a library, which it would look for by name alone: files of its folders that start with one of
/// these names. What cannot be loaded is left for the library to complain about.
pub(super) fn open_companions(starts: &[&str]) {
    let wanted = |path: &Path| {
        let name = path.file_name().and_then(OsStr::to_str).unwrap_or_default();
        starts.iter().any(|s| name.starts_with(s))
    };
    for folder in folders() {
        let mut found: Vec<PathBuf> = std::fs::read_dir(folder)
            .into_iter()
            .flatten()
            .filter_map(|entry| Some(entry.ok()?.path()))
            .filter(|path| wanted(path))
            .collect();
        found.sort();
        for path in found {
            if let Ok(library) = load(path.as_os_str(), RTLD_LOCAL) {
                // Unloading it again would take it from the library that needs it.
                std::mem::forget(library);
            }
        }
    }
}

fn load(file: &OsStr, flags: i32) -> Result<Library, libloading::Error> {
    // SAFETY: NVIDIA's libraries do nothing on loading that the process could notice.
    unsafe { Library::open(Some(file), RTLD_NOW | flags) }
}

/// What the loader said, which it keeps behind its own error.
pub(super) fn reason(error: &libloading::Error) -> String {
    std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string)
}

pub(super) fn missing(library: &'static str, reason: String) -> Error {
    Error::Missing { library, reason }
}

/// A table of a library's functions, found once by name.
///
/// Functions under `checked` return a status and become methods that return a [`Result`]; statuses are read as numbers,
/// since a number that a Rust enum does not know would be undefined behaviour.
macro_rules! library {
    (
        $(#[$doc:meta])*
        $table:ident: $name:literal in $files:expr, companions $companions:expr, status $status:ident;
        checked { $(fn $f:ident($($arg:ident: $ty:ty),* $(,)?);)* }
        plain { $(fn $g:ident($($garg:ident: $gty:ty),* $(,)?) -> $out:ty;)* }
    ) => {
        $(#[$doc])*
        #[allow(non_snake_case)]
        pub(super) struct $table {
            $($f: unsafe extern "C" fn($($ty),*) -> u32,)*
            $(pub(super) $g: unsafe extern "C" fn($($gty),*) -> $out,)*
            /// How the library was found.
            pub(super) origin: String,
            /// Keeps the functions where they are.
            _library: libloading::os::unix::Library,
        }

        #[allow(non_snake_case, clippy::too_many_arguments)]
        impl $table {
            /// The library, opened at the first call that finds it.
            pub(super) fn get() -> $crate::Result<&'static $table> {
                static TABLE: std::sync::OnceLock<$table> = std::sync::OnceLock::new();
                if let Some(table) = TABLE.get() {
                    return Ok(table);
                }
                $crate::loading::open_companions($companions);
                let opened = $crate::loading::open($name, $files)?;
                let table = $table::load(opened)?;
                Ok(TABLE.get_or_init(|| table))
            }

            fn load(opened: $crate::loading::Opened) -> $crate::Result<$table> {
                let library = opened.library;
                let absent = |e: libloading::Error| {
                    let reason = $crate::loading::reason(&e);
                    $crate::loading::missing($name, reason)
                };
                // SAFETY: the signatures are those of the library's headers, which keep them for all versions.
                unsafe {
                    Ok($table {
                        $($f: *library.get(concat!(stringify!($f), "\0").as_bytes()).map_err(absent)?,)*
                        $($g: *library.get(concat!(stringify!($g), "\0").as_bytes()).map_err(absent)?,)*
                        origin: opened.origin,
                        _library: library,
                    })
                }
            }

            $(
                /// # Safety
                /// What the library asks for.
                pub(super) unsafe fn $f(&self, $($arg: $ty),*) -> $crate::Result<()> {
                    // SAFETY: promised by the caller.
                    let code = unsafe { (self.$f)($($arg),*) };
                    if code == 0 {
                        return Ok(());
                    }
                    Err($crate::Error::Call { call: stringify!($f), name: self.$status(code), code })
                }
            )*
        }
    };
}

pub(super) use library;

/// For tests of what may be missing.
#[cfg(test)]
pub(super) mod testing {
    use super::Error;

    /// Says that a test is skipped where a library is missing; any other failure is one of the test.
    #[allow(clippy::print_stderr)]
    pub(in super::super) fn has(library: &str, error: Option<Error>) -> bool {
        match error {
            None => true,
            Some(e @ (Error::Missing { .. } | Error::Call { call: "cuInit", .. })) => {
                eprintln!("skipped without {library}: {e}");
                false
            }
            Some(e) => panic!("{e}"),
        }
    }
}
