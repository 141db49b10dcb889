//! libtorch's C functions, found at run time in the library that Python loaded.

use std::ffi::{CStr, CString, c_char, c_void};
use std::path::Path;
use std::ptr::null_mut;
use std::sync::OnceLock;

use hypatia_core::ty::DType;
use libloading::Library;
use serde::Deserialize;

use crate::error::{Error, Result};
use crate::kernels::call::{Call, Kept, Strided};
use crate::pool::ParallelFor;

/// Kernels take addresses of values to be multiples of this.
const ALIGNMENT: usize = 16;

type Status = i32;
type Handle = *mut c_void;
/// A value on the dispatcher's stack: an integer, a float's bits, or a pointer.
type Item = u64;

fn broken(message: impl Into<String>) -> Error {
    Error::Malformed(message.into())
}

/// The functions that calls need.
pub struct Shim {
    call: unsafe extern "C" fn(*const c_char, *const c_char, *mut Item) -> Status,
    #[allow(clippy::type_complexity)]
    from_blob:
        unsafe extern "C" fn(*mut c_void, i64, *const i64, *const i64, i64, i32, i32, i32, *mut Handle) -> Status,
    copy: unsafe extern "C" fn(Handle, Handle, i32) -> Status,
    delete: unsafe extern "C" fn(Handle) -> Status,
    again: unsafe extern "C" fn(Handle, *mut Handle) -> Status,
    device: unsafe extern "C" fn(Handle, *mut i32) -> Status,
    device_index: unsafe extern "C" fn(Handle, *mut i32) -> Status,
    dtype_of: unsafe extern "C" fn(Handle, *mut i32) -> Status,
    data: unsafe extern "C" fn(Handle, *mut *mut c_void) -> Status,
    dim: unsafe extern "C" fn(Handle, *mut i64) -> Status,
    sizes: unsafe extern "C" fn(Handle, *mut *mut i64) -> Status,
    strides: unsafe extern "C" fn(Handle, *mut *mut i64) -> Status,
    offset: unsafe extern "C" fn(Handle, *mut i64) -> Status,
    new_list: unsafe extern "C" fn(usize, *mut Handle) -> Status,
    push: unsafe extern "C" fn(Handle, Item) -> Status,
    new_item: NewItem,
    message: Option<unsafe extern "C" fn() -> *const c_char>,
    cpu: i32,
    cuda: i32,
    dtypes: [i32; 12],
}

/// How an optional value gets its memory, which libtorch frees.
enum NewItem {
    Torch(unsafe extern "C" fn(*mut *mut Item) -> Status),
    /// C++'s `operator new`.
    Cpp(unsafe extern "C" fn(usize) -> *mut c_void),
}

const DTYPES: [(DType, &str); 12] = [
    (DType::F32, "float32"),
    (DType::F64, "float64"),
    (DType::F16, "float16"),
    (DType::BF16, "bfloat16"),
    (DType::I64, "int64"),
    (DType::I32, "int32"),
    (DType::I16, "int16"),
    (DType::I8, "int8"),
    (DType::U8, "uint8"),
    (DType::Bool, "bool"),
    (DType::C64, "complex64"),
    (DType::C128, "complex128"),
];

fn library(path: &Path) -> Result<&'static Library> {
    // SAFETY: the library is torch's own; it is loaded already, so that nothing of it runs here.
    let library = unsafe { Library::new(path) }.map_err(|e| broken(format!("libtorch: {e}")))?;
    // torch is never unloaded, and pointers into it are kept.
    Ok(Box::leak(Box::new(library)))
}

/// torch's own parallel loop, if this libtorch has one: work on its threads does not fight with torch's.
pub fn parallel_for(libtorch: &Path) -> Option<ParallelFor> {
    let library = library(libtorch).ok()?;
    // SAFETY: the type is the one of torch's header; torch is never unloaded.
    unsafe { library.get::<ParallelFor>(b"torch_parallel_for").ok().map(|f| *f) }
}

impl Shim {
    /// The functions of the libtorch at this path, the same for the whole process; an error says what is missing.
    pub fn get(libtorch: &Path) -> Result<&'static Shim> {
        static FOUND: OnceLock<Result<Shim, String>> = OnceLock::new();
        FOUND
            .get_or_init(|| Shim::load(libtorch).map_err(|e| e.to_string()))
            .as_ref()
            .map_err(|e| broken(e.clone()))
    }

    fn load(libtorch: &Path) -> Result<Shim> {
        let library = library(libtorch)?;
        // SAFETY: the types of the functions are those of torch's headers, which keep them stable.
        unsafe {
            let number = |name: String| -> Result<i32> {
                let f: extern "C" fn() -> i32 = find(library, &name)?;
                Ok(f())
            };
            let mut dtypes = [0; 12];
            for (code, (_, name)) in dtypes.iter_mut().zip(DTYPES) {
                *code = number(format!("aoti_torch_dtype_{name}"))?;
            }
            let new_item = match find(library, "torch_new_stable_ivalue") {
                Ok(f) => NewItem::Torch(f),
                Err(_) => NewItem::Cpp(find(library, "_Znwm")?),
            };
            Ok(Shim {
                call: find(library, "aoti_torch_call_dispatcher")?,
                from_blob: find(library, "aoti_torch_create_tensor_from_blob")?,
                copy: find(library, "aoti_torch_copy_")?,
                delete: find(library, "aoti_torch_delete_tensor_object")?,
                again: find(library, "aoti_torch_new_tensor_handle")?,
                device: find(library, "aoti_torch_get_device_type")?,
                device_index: find(library, "aoti_torch_get_device_index")?,
                dtype_of: find(library, "aoti_torch_get_dtype")?,
                data: find(library, "aoti_torch_get_data_ptr")?,
                dim: find(library, "aoti_torch_get_dim")?,
                sizes: find(library, "aoti_torch_get_sizes")?,
                strides: find(library, "aoti_torch_get_strides")?,
                offset: find(library, "aoti_torch_get_storage_offset")?,
                new_list: find(library, "torch_new_list_reserve_size")?,
                push: find(library, "torch_list_push_back")?,
                new_item,
                message: find(library, "torch_exception_get_what_without_backtrace").ok(),
                cpu: number("aoti_torch_device_type_cpu".into())?,
                cuda: number("aoti_torch_device_type_cuda".into())?,
                dtypes,
            })
        }
    }

    fn done(&self, status: Status, what: &str) -> Result<()> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: the message belongs to this thread and was just set.
        let text = self.message.and_then(|f| unsafe {
            let text = f();
            (!text.is_null()).then(|| CStr::from_ptr(text).to_string_lossy().trim().to_string())
        });
        Err(broken(match text {
            Some(text) if !text.is_empty() => format!("{what}: {text}"),
            _ => format!("{what} failed in torch"),
        }))
    }

    /// A torch tensor on memory that stays the caller's.
    ///
    /// # Safety
    /// The memory outlives the tensor.
    unsafe fn tensor(&self, t: &Strided<'_>) -> Result<Handle> {
        let sizes: smallvec::SmallVec<[i64; 6]> = t.shape.iter().map(|s| *s as i64).collect();
        let strides: smallvec::SmallVec<[i64; 6]> = t.strides.iter().map(|s| *s as i64).collect();
        let mut handle = null_mut();
        // SAFETY: sizes and strides have as many entries as dimensions.
        let status = unsafe {
            (self.from_blob)(
                t.data.cast(),
                sizes.len() as i64,
                sizes.as_ptr(),
                strides.as_ptr(),
                0,
                self.dtype(t.dtype)?,
                if t.gpu.is_some() { self.cuda } else { self.cpu },
                t.gpu.unwrap_or(0) as i32,
                &mut handle,
            )
        };
        self.done(status, "a tensor")?;
        Ok(handle)
    }

    /// Copies a tensor of torch's.
    ///
    /// # Safety
    /// The memory is there, and so is the tensor.
    unsafe fn copied(&self, write: &Strided<'_>, from: Handle) -> Result<()> {
        let mut device = 0;
        // SAFETY: a tensor, and a place to write to.
        self.done(unsafe { (self.device)(from, &mut device) }, "a device")?;
        if device != if write.gpu.is_some() { self.cuda } else { self.cpu } {
            // Fake tensors do not tell where random states lie.
            return Err(broken("a result is on another device"));
        }
        // SAFETY: both are tensors; the copy checks their sizes.
        unsafe {
            let to = self.tensor(write)?;
            let status = (self.copy)(to, from, 0);
            (self.delete)(to);
            self.done(status, "copying a result")
        }
    }

    /// Where a tensor of torch's is, if it lies as another is asked for, from the start of its memory on.
    ///
    /// # Safety
    /// The tensor is there.
    unsafe fn lying(&self, as_this: &Strided<'_>, tensor: Handle) -> Option<*mut u8> {
        if tensor.is_null() {
            return None;
        }
        let number = |f: unsafe extern "C" fn(Handle, *mut i32) -> Status| {
            let mut found = 0;
            // SAFETY: a tensor, and a place to write to.
            (unsafe { f(tensor, &mut found) } == 0).then_some(found)
        };
        let long = |f: unsafe extern "C" fn(Handle, *mut i64) -> Status| {
            let mut found = 0;
            // SAFETY: as above.
            (unsafe { f(tensor, &mut found) } == 0).then_some(found)
        };
        let rank = usize::try_from(long(self.dim)?).ok()?;
        let list = |f: unsafe extern "C" fn(Handle, *mut *mut i64) -> Status| {
            let mut found = null_mut();
            // SAFETY: as above; torch's list has as many numbers as the tensor has dimensions, and lives as long.
            unsafe {
                let known = f(tensor, &mut found) == 0 && !found.is_null();
                known.then(|| std::slice::from_raw_parts(found, rank).to_vec())
            }
        };
        if rank == 0 || rank != as_this.shape.len() || as_this.shape.contains(&0) {
            return None;
        }
        let (sizes, strides) = (list(self.sizes)?, list(self.strides)?);
        let wanted = as_this.shape.iter().zip(as_this.strides);
        let alike = (sizes.iter().zip(&strides))
            .zip(wanted)
            .all(|((n, s), (size, stride))| *n == *size as i64 && (*n == 1 || *s == *stride as i64));
        let device = match as_this.gpu {
            Some(gpu) => number(self.device)? == self.cuda && number(self.device_index)? == gpu as i32,
            None => number(self.device)? == self.cpu,
        };
        let dtype = number(self.dtype_of)? == self.dtype(as_this.dtype).ok()?;
        let mut data = null_mut();
        // SAFETY: as above.
        let known = unsafe { (self.data)(tensor, &mut data) } == 0 && !data.is_null();
        let data = data.cast::<u8>();
        let starts = long(self.offset)? == 0 && (data as usize).is_multiple_of(ALIGNMENT);
        (alike && device && dtype && known && starts).then_some(data)
    }

    fn dtype(&self, dtype: DType) -> Result<i32> {
        let at = DTYPES.iter().position(|(d, _)| *d == dtype);
        at.map(|i| self.dtypes[i])
            .ok_or_else(|| broken(format!("torch has no name for {dtype}")))
    }

    fn list(&self, items: impl ExactSizeIterator<Item = Result<Item>>) -> Result<Item> {
        let mut list = null_mut();
        // SAFETY: a new list; it takes its items over.
        unsafe {
            self.done((self.new_list)(items.len(), &mut list), "a list")?;
            for item in items {
                self.done((self.push)(list, item?), "a list")?;
            }
        }
        Ok(list as Item)
    }

    fn boxed(&self, item: Item) -> Result<Item> {
        let mut place: *mut Item = null_mut();
        // SAFETY: eight bytes that libtorch frees.
        unsafe {
            match self.new_item {
                NewItem::Torch(f) => self.done(f(&mut place), "an optional value")?,
                NewItem::Cpp(f) => place = f(size_of::<Item>()).cast(),
            }
            if place.is_null() {
                return Err(broken("no memory for an optional value"));
            }
            *place = item;
        }
        Ok(place as Item)
    }
}

/// # Safety
/// `T` is the type of the function.
unsafe fn find<T: Copy>(library: &Library, name: &str) -> Result<T> {
    // SAFETY: by the caller.
    unsafe { library.get::<T>(name.as_bytes()) }
        .map(|f| *f)
        .map_err(|_| broken(format!("libtorch has no {name}")))
}

/// An argument of a call, in the form that the op's schema wants.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Argument {
    /// One of the tensors that the step reads.
    Tensor(usize),
    /// One of them, which the op changes.
    Changed(usize),
    /// A result, for ops that write where they are told.
    Out(usize),
    /// An integer.
    Int(i64),
    /// A float, as text: JSON has no infinities.
    Float(String),
    /// A truth value.
    Bool(bool),
    /// A dtype.
    Dtype(String),
    /// A list.
    List(Vec<Argument>),
    /// An optional argument that is given.
    Some(Box<Argument>),
    /// An optional argument that is not.
    None,
}

/// A call through torch's dispatcher.
pub struct DispatcherCall {
    shim: &'static Shim,
    op: CString,
    overload: CString,
    arguments: Vec<Argument>,
    /// Tensors that the op returns; those beyond the results are dropped.
    returns: usize,
    /// Results are written by the op itself.
    out: bool,
}

impl DispatcherCall {
    /// A call of an op, `aten::mm` with the overload `out`.
    pub fn new(
        shim: &'static Shim,
        op: &str,
        overload: &str,
        arguments: Vec<Argument>,
        returns: usize,
    ) -> Result<DispatcherCall> {
        let text = |s: &str| CString::new(s).map_err(|_| broken(format!("{s:?} is no name of an op")));
        Ok(DispatcherCall {
            op: text(op)?,
            overload: text(overload)?,
            out: arguments.iter().any(|a| matches!(a, Argument::Out(_))),
            shim,
            arguments,
            returns,
        })
    }

    /// # Safety
    /// As for the call.
    unsafe fn item(&self, argument: &Argument, reads: &[Strided<'_>], writes: &[Strided<'_>]) -> Result<Item> {
        let at = |list: &[Strided<'_>], i: usize| {
            let tensor = list.get(i).ok_or_else(|| broken(format!("there is no tensor {i}")))?;
            // SAFETY: by the caller.
            unsafe { self.shim.tensor(tensor) }.map(|h| h as Item)
        };
        Ok(match argument {
            Argument::Tensor(i) | Argument::Changed(i) => at(reads, *i)?,
            Argument::Out(i) => at(writes, *i)?,
            Argument::Int(i) => *i as Item,
            Argument::Float(text) => text
                .parse::<f64>()
                .map_err(|_| broken(format!("{text} is no number")))?
                .to_bits(),
            Argument::Bool(b) => Item::from(*b),
            Argument::Dtype(name) => {
                let dtype = DType::parse(name).ok_or_else(|| broken(format!("{name} is no dtype")))?;
                self.shim.dtype(dtype)? as u32 as Item
            }
            Argument::List(items) => {
                // SAFETY: by the caller.
                let one = |a: &Argument| unsafe { self.item(a, reads, writes) };
                self.shim.list(items.iter().map(one))?
            }
            // SAFETY: by the caller.
            Argument::Some(inner) => self.shim.boxed(unsafe { self.item(inner, reads, writes)? })?,
            Argument::None => 0,
        })
    }
}

impl Call for DispatcherCall {
    unsafe fn call(&self, reads: &[Strided<'_>], writes: &[Strided<'_>]) -> Result<()> {
        // SAFETY: by the caller.
        unsafe { self.keep(reads, writes, &[]) }.map(|_| ())
    }

    unsafe fn keep(
        &self,
        reads: &[Strided<'_>],
        writes: &[Strided<'_>],
        anywhere: &[bool],
    ) -> Result<Vec<Option<Kept>>> {
        let shim = self.shim;
        let mut stack: Vec<Item> = Vec::with_capacity(self.arguments.len().max(self.returns));
        // Ops return references to the tensors that they write, and torch drops its arguments before it takes what they
        // return: somebody else must own those tensors.
        let mut owned = Owned {
            shim,
            handles: smallvec::SmallVec::new(),
        };
        for argument in &self.arguments {
            // SAFETY: by the caller.
            let item = unsafe { self.item(argument, reads, writes)? };
            stack.push(item);
            if let Argument::Out(_) | Argument::Changed(_) = argument {
                let mut again = null_mut();
                // SAFETY: a handle that was just made, and a place for another.
                shim.done(unsafe { (shim.again)(item as Handle, &mut again) }, "a tensor")?;
                owned.handles.push(again);
            }
        }
        stack.resize(stack.len().max(self.returns), 0);
        // SAFETY: the stack holds what the schema says; torch takes it over and leaves new handles.
        let status = unsafe { (shim.call)(self.op.as_ptr(), self.overload.as_ptr(), stack.as_mut_ptr()) };
        shim.done(status, &self.op.to_string_lossy())?;
        let returned: Vec<Returned> = stack[..self.returns]
            .iter()
            .map(|item| Returned {
                shim,
                handle: *item as Handle,
            })
            .collect();
        let mut kept = vec![];
        for (i, (tensor, write)) in returned.into_iter().zip(writes).enumerate().filter(|_| !self.out) {
            let may = anywhere.get(i) == Some(&true);
            // SAFETY: by the caller; a tensor of torch's.
            let data = unsafe { may.then(|| shim.lying(write, tensor.handle)).flatten() };
            // What is a view of an operand lives as long as that.
            let data = data.filter(|data| !reads.iter().any(|r| r.holds(*data)));
            kept.push(match data {
                Some(data) => Some(Kept {
                    data,
                    owner: Box::new(tensor),
                }),
                None => {
                    // SAFETY: by the caller; a tensor of torch's.
                    unsafe { shim.copied(write, tensor.handle)? };
                    None
                }
            });
        }
        Ok(kept)
    }
}

/// A tensor that an op returned, or nothing.
struct Returned {
    shim: &'static Shim,
    handle: Handle,
}

impl Drop for Returned {
    fn drop(&mut self) {
        if !self.handle.is_null() {
            // SAFETY: a handle that nobody else has; a failure could not be handled.
            unsafe { (self.shim.delete)(self.handle) };
        }
    }
}

/// Tensors that live to the end of a call.
struct Owned<'a> {
    shim: &'a Shim,
    handles: smallvec::SmallVec<[Handle; 3]>,
}

impl Drop for Owned<'_> {
    fn drop(&mut self) {
        for handle in &self.handles {
            // SAFETY: handles that nobody else has; a failure could not be handled.
            unsafe { (self.shim.delete)(*handle) };
        }
    }
}
