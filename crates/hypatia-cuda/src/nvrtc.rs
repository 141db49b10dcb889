//! CUDA C++ text becomes machine code for one architecture; no GPU and no toolkit are needed for that.
//!
//! What was compiled is handed to a [`KernelCache`] and asked of it the next time. Whatever a cache returns that is no machine
//! code counts as absent.

use std::collections::{BTreeMap, HashMap};
use std::ffi::{CString, c_int};
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use crate::sys::Nvrtc;
use crate::{Error, Result};

/// A compute capability, such as 9.0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Arch {
    /// Before the point.
    pub major: u32,
    /// After the point.
    pub minor: u32,
}

impl Arch {
    /// The oldest that kernels are written for: the first with bf16.
    pub const OLDEST: Arch = Arch::new(8, 0);

    /// The architecture of these numbers.
    pub const fn new(major: u32, minor: u32) -> Arch {
        Arch { major, minor }
    }
}

impl fmt::Display for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sm_{}{}", self.major, self.minor)
    }
}

/// A place that keeps machine code by a key, such as a folder.
pub trait KernelCache: Send + Sync {
    /// What was put under the key.
    fn get(&self, key: &str) -> Option<Vec<u8>>;
    /// Keeps something under a key; trouble is not reported.
    fn put(&self, key: &str, code: &[u8]);
}

static CACHE: Mutex<Option<Arc<dyn KernelCache>>> = Mutex::new(None);

/// What was compiled ahead while there is no cache, until it is asked for.
static AHEAD: Mutex<Option<HashMap<String, Vec<u8>>>> = Mutex::new(None);

/// Keeps compiled kernels there from now on.
pub fn keep_in(cache: Arc<dyn KernelCache>) {
    *CACHE.lock().unwrap_or_else(PoisonError::into_inner) = Some(cache);
}

/// Sums and products are written with intrinsics where their rounding matters, so contraction may stay on inside
/// functions, where torch's compiler does it, too.
const OPTIONS: [&str; 2] = ["--std=c++17", "--fmad=true"];

/// The compiler's version.
pub fn version() -> Result<(u32, u32)> {
    let (mut major, mut minor): (c_int, c_int) = (0, 0);
    // SAFETY: two places to write to.
    unsafe { Nvrtc::get()?.nvrtcVersion(&mut major, &mut minor)? };
    Ok((major.unsigned_abs(), minor.unsigned_abs()))
}

/// How the compiler was found.
pub fn origin() -> Result<&'static str> {
    Ok(&Nvrtc::get()?.origin)
}

/// Machine code of a source, from the cache if it has any.
pub fn machine_code(name: &str, source: &str, arch: Arch) -> Result<Vec<u8>> {
    let key = key(name, source, arch)?;
    let cache = cache();
    if let Some(code) = cache.as_ref().and_then(|s| kept(s.as_ref(), &key)) {
        return Ok(code);
    }
    if let Some(code) = ahead(|codes| codes.remove(&key)) {
        return Ok(code);
    }
    let code = compile(name, source, arch)?;
    if let Some(cache) = cache {
        cache.put(&key, &code);
    }
    Ok(code)
}

fn ahead<T>(then: impl FnOnce(&mut HashMap<String, Vec<u8>>) -> T) -> T {
    then(
        AHEAD
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get_or_insert_default(),
    )
}

/// Compiles sources, each with its name, at once, for [`machine_code`] to find: one after the other they would make a
/// user wait. What is wrong with one is said when it is asked for.
pub fn compile_ahead<'a>(sources: impl IntoIterator<Item = (&'a str, &'a str)>, arch: Arch) -> Result<()> {
    let cache = cache();
    let mut missing = BTreeMap::new();
    for (name, source) in sources {
        let key = key(name, source, arch)?;
        let is_there = || match &cache {
            Some(cache) => kept(cache.as_ref(), &key).is_some(),
            None => ahead(|codes| codes.contains_key(&key)),
        };
        if !missing.contains_key(&key) && !is_there() {
            missing.insert(key, (name, source));
        }
    }
    let missing: Vec<_> = missing.into_iter().collect();
    let workers = std::thread::available_parallelism().map_or(1, usize::from);
    let next = AtomicUsize::new(0);
    let take = || missing.get(next.fetch_add(1, Ordering::Relaxed));
    let work = || {
        let mut done = vec![];
        while let Some((key, (name, source))) = take() {
            done.push((key, compile(name, source, arch)));
        }
        done
    };
    // The cache may need what this thread holds, so only the compiler runs on others.
    let codes: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..workers.min(missing.len())).map(|_| scope.spawn(work)).collect();
        threads.into_iter().filter_map(|t| t.join().ok()).flatten().collect()
    });
    for (key, code) in codes {
        match (code, &cache) {
            (Ok(code), Some(cache)) => cache.put(key, &code),
            (Ok(code), None) => _ = ahead(|codes| codes.insert(key.clone(), code)),
            (Err(_), _) => {}
        }
    }
    Ok(())
}

fn cache() -> Option<Arc<dyn KernelCache>> {
    CACHE.lock().unwrap_or_else(PoisonError::into_inner).clone()
}

fn key(name: &str, source: &str, arch: Arch) -> Result<String> {
    let (major, minor) = version()?;
    let print = fingerprint(source);
    Ok(format!("{name} {arch} nvrtc {major}.{minor} {print:032x}"))
}

fn kept(cache: &dyn KernelCache, key: &str) -> Option<Vec<u8>> {
    let code = cache.get(key)?;
    let is_code = code.starts_with(b"\x7fELF");
    if !is_code {
        tracing::debug!("what is kept of kernel {key} is no machine code and counts as absent");
    }
    is_code.then_some(code)
}

/// Machine code of a source, compiled now.
pub fn compile(name: &str, source: &str, arch: Arch) -> Result<Vec<u8>> {
    let start = Instant::now();
    let nvrtc = Nvrtc::get()?;
    let plain = |text: String| CString::new(text).map_err(|e| Error::malformed(format!("kernel {name}: {e}")));
    let (text, file) = (plain(source.into())?, plain(format!("{name}.cu"))?);
    // Products by warp groups are for one architecture and none after it.
    let only = if source.contains("wgmma") { "a" } else { "" };
    let options = [format!("--gpu-architecture={arch}{only}")];
    let options = options.into_iter().chain(OPTIONS.map(String::from)).map(plain);
    let options: Vec<CString> = options.collect::<Result<_>>()?;
    let pointers: Vec<_> = options.iter().map(|o| o.as_ptr()).collect();
    let mut program = std::ptr::null_mut();
    // SAFETY: all strings and places live through the calls; buffers have the sizes that the library asked for.
    unsafe {
        let none = std::ptr::null();
        nvrtc.nvrtcCreateProgram(&mut program, text.as_ptr(), file.as_ptr(), 0, none, none)?;
        let compiled = nvrtc.nvrtcCompileProgram(program, pointers.len() as c_int, pointers.as_ptr());
        let result = match compiled {
            Ok(()) => (|| {
                let mut size = 0;
                nvrtc.nvrtcGetCUBINSize(program, &mut size)?;
                let mut code = vec![0u8; size];
                nvrtc.nvrtcGetCUBIN(program, code.as_mut_ptr().cast())?;
                Ok(code)
            })(),
            Err(e) => Err(refused(nvrtc, program, name, &e)),
        };
        nvrtc.nvrtcDestroyProgram(&mut program)?;
        let ms = start.elapsed().as_secs_f64() * 1e3;
        tracing::debug!(name, %arch, compiled = result.is_ok(), ms, "kernel compiled by NVRTC");
        result
    }
}

/// # Safety
/// `program` must be one of the library's that lives.
unsafe fn refused(nvrtc: &Nvrtc, program: *mut std::ffi::c_void, name: &str, error: &Error) -> Error {
    let mut size = 0;
    // SAFETY: promised by the caller; the buffer has the size that was asked for.
    let log = unsafe {
        let asked = nvrtc.nvrtcGetProgramLogSize(program, &mut size);
        let mut log = vec![0u8; size.max(1)];
        match asked.and_then(|()| nvrtc.nvrtcGetProgramLog(program, log.as_mut_ptr().cast())) {
            Ok(()) => String::from_utf8_lossy(&log).trim_end_matches('\0').trim().to_owned(),
            Err(e) => e.to_string(),
        }
    };
    let log = if log.is_empty() { error.to_string() } else { log };
    let kernel = name.to_owned();
    Error::Compile { kernel, log }
}

/// FNV-1a over the source and the options, 128 bits wide: the same in every build, and wide enough never to meet twice.
fn fingerprint(source: &str) -> u128 {
    const START: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
    const PRIME: u128 = 0x0000_0000_0100_0000_0000_0000_0000_013b;
    let bytes = OPTIONS.iter().flat_map(|o| o.bytes()).chain(source.bytes());
    bytes.fold(START, |hash, byte| (hash ^ u128::from(byte)).wrapping_mul(PRIME))
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;
    use crate::loading::testing::has;

    #[derive(Default)]
    struct Memory(Mutex<HashMap<String, Vec<u8>>>);

    impl KernelCache for Memory {
        fn get(&self, key: &str) -> Option<Vec<u8>> {
            self.0.lock().unwrap().get(key).cloned()
        }

        fn put(&self, key: &str, code: &[u8]) {
            self.0.lock().unwrap().insert(key.into(), code.into());
        }
    }

    #[test]
    fn what_is_compiled_ahead_is_in_the_cache() {
        if !has("NVRTC", version().err()) {
            return;
        }
        let cache = Arc::new(Memory::default());
        keep_in(cache.clone());
        let arch = Arch::new(9, 0);
        let mut sources: Vec<String> = (0..3)
            .map(|n| format!("extern \"C\" __global__ void ahead(int* x) {{ x[0] = {n}; }}"))
            .collect();
        sources.push("not a kernel".into());
        compile_ahead(sources.iter().map(|s| ("ahead", s.as_str())), arch).unwrap();
        let in_cache = |source| cache.get(&key("ahead", source, arch).unwrap());
        for source in &sources[..3] {
            assert_eq!(in_cache(source), Some(machine_code("ahead", source, arch).unwrap()));
        }
        assert_eq!(in_cache(&sources[3]), None);
        assert!(matches!(
            machine_code("ahead", &sources[3], arch),
            Err(Error::Compile { .. })
        ));
    }
}
