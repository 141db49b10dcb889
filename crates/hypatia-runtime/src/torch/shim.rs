//! libtorch's C functions, found at run time in the library that Python loaded.

use std::ffi::{CStr, CString, c_char, c_void};
use std::path::Path;
use std::ptr::null_mut;
use std::sync::{Arc, OnceLock};

use hypatia_core::ty::DType;
use libloading::Library;
use serde::Deserialize;

use super::handed::{Looks, Tensor};
use crate::error::{Error, Result};
use crate::kernels::call::{Call, Handed, Prepared, Strided};
use crate::pool::ParallelFor;

pub(super) type Status = i32;
pub(super) type Handle = *mut c_void;
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
    pub(super) delete: unsafe extern "C" fn(Handle) -> Status,
    again: unsafe extern "C" fn(Handle, *mut Handle) -> Status,
    pub(super) looks: Looks,
    new_list: unsafe extern "C" fn(usize, *mut Handle) -> Status,
    push: unsafe extern "C" fn(Handle, Item) -> Status,
    new_item: NewItem,
    new_string: unsafe extern "C" fn(*const c_char, usize, *mut Handle) -> Status,
    message: Option<unsafe extern "C" fn() -> *const c_char>,
    pub(super) cpu: i32,
    pub(super) cuda: i32,
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
                looks: Looks::load(library)?,
                new_list: find(library, "torch_new_list_reserve_size")?,
                push: find(library, "torch_list_push_back")?,
                new_item,
                new_string: find(library, "torch_new_string_handle")?,
                message: find(library, "torch_exception_get_what_without_backtrace").ok(),
                cpu: number("aoti_torch_device_type_cpu".into())?,
                cuda: number("aoti_torch_device_type_cuda".into())?,
                dtypes,
            })
        }
    }

    pub(super) fn done(&self, status: Status, what: &str) -> Result<()> {
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
        let (kind, index) = self.device(t.gpu);
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
                kind,
                index,
                &mut handle,
            )
        };
        self.done(status, "a tensor")?;
        Ok(handle)
    }

    /// Copies a tensor of torch's.
    ///
    /// # Safety
    /// The memory is there.
    pub(super) unsafe fn copied(&self, write: &Strided<'_>, from: &Tensor) -> Result<()> {
        if from.is_on_gpu() != Some(write.gpu.is_some()) {
            // Fake tensors do not tell where random states lie.
            return Err(broken("a result is on another device"));
        }
        // SAFETY: both are tensors; the copy checks their sizes.
        unsafe {
            let to = self.tensor(write)?;
            let status = (self.copy)(to, from.handle(), 0);
            (self.delete)(to);
            self.done(status, "copying a result")
        }
    }

    /// Copies a tensor of torch's onto another one.
    ///
    /// # Safety
    /// The memory of both is there.
    pub(super) unsafe fn onto(&self, to: &Tensor, from: &Tensor) -> Result<()> {
        // SAFETY: both are tensors; the copy checks their sizes.
        let status = unsafe { (self.copy)(to.handle(), from.handle(), 0) };
        self.done(status, "copying a result")
    }

    /// Another handle of a tensor.
    ///
    /// # Safety
    /// The handle is of a tensor.
    unsafe fn another(&self, handle: Handle) -> Result<Handle> {
        let mut again = null_mut();
        // SAFETY: by the caller, and a place for the other.
        self.done(unsafe { (self.again)(handle, &mut again) }, "a tensor")?;
        Ok(again)
    }

    /// Torch's numbers for a device.
    pub(super) fn device(&self, gpu: Option<u32>) -> (i32, i32) {
        gpu.map_or((self.cpu, 0), |ordinal| (self.cuda, ordinal as i32))
    }

    pub(super) fn dtype(&self, dtype: DType) -> Result<i32> {
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

    fn string(&self, text: &str) -> Result<Item> {
        let mut string = null_mut();
        // SAFETY: so many bytes, which are copied; libtorch frees the copy.
        let status = unsafe { (self.new_string)(text.as_ptr().cast(), text.len(), &mut string) };
        self.done(status, "a string")?;
        Ok(string as Item)
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
pub(super) unsafe fn find<T: Copy>(library: &Library, name: &str) -> Result<T> {
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
    /// A string.
    Str(String),
    /// A dtype.
    Dtype(String),
    /// One of the tensors that the step reads, in another form if it can be prepared.
    Prepared(Preparation),
    /// A list.
    List(Vec<Argument>),
    /// An optional argument that is given.
    Some(Box<Argument>),
    /// An optional argument that is not.
    None,
}

/// How a constant gets the form in which an op reads it fastest: by another op, which returns that form.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Preparation {
    /// One of the tensors that the step reads.
    tensor: usize,
    /// The op, its overload and its arguments.
    op: String,
    overload: String,
    arguments: Vec<Argument>,
}

impl Preparation {
    /// The other form of a constant.
    ///
    /// # Safety
    /// The constant is where it says.
    unsafe fn made(&self, shim: &'static Shim, constant: &Strided<'_>) -> Result<Tensor> {
        let call = DispatcherCall::new(shim, &self.op, &self.overload, self.arguments.clone(), 1)?;
        // SAFETY: by the caller; the op reads nothing else.
        let made = unsafe { call.made(&[*constant], &[])? }.pop();
        made.ok_or_else(|| broken(format!("{} returns nothing", self.op)))
    }
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
    /// Constants in the forms that they are read in, by their numbers among the tensors that are read.
    prepared: Vec<(usize, Arc<Tensor>)>,
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
            prepared: vec![],
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
            Argument::Str(text) => self.shim.string(text)?,
            Argument::Prepared(how) => match self.prepared.iter().find(|(tensor, _)| *tensor == how.tensor) {
                // SAFETY: a tensor that lives as long as this.
                Some((_, tensor)) => unsafe { self.shim.another(tensor.handle())? as Item },
                None => at(reads, how.tensor)?,
            },
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
    unsafe fn prepare(
        &mut self,
        constants: &[Option<Strided<'_>>],
        known: &[Prepared],
        mut room: usize,
    ) -> Result<Vec<Prepared>> {
        let mut read = vec![];
        for argument in &self.arguments {
            let Argument::Prepared(preparation) = argument else {
                continue;
            };
            let Some(Some(constant)) = constants.get(preparation.tensor) else {
                continue;
            };
            let (from, bytes) = (constant.data as usize, constant.extent().len());
            let how = format!("{preparation:?} of {:?} by {:?}", constant.shape, constant.strides);
            let found = known.iter().find(|k| (k.from, &k.how) == (from, &how)).cloned();
            let prepared = match found {
                Some(prepared) => prepared,
                None if bytes > room => continue,
                None => {
                    // SAFETY: by the caller.
                    let form = unsafe { preparation.made(self.shim, constant)? };
                    room -= bytes;
                    Prepared {
                        from,
                        how,
                        bytes,
                        form: Arc::new(form),
                    }
                }
            };
            if let Ok(tensor) = prepared.form.clone().downcast() {
                self.prepared.push((preparation.tensor, tensor));
                read.push(prepared);
            }
        }
        Ok(read)
    }

    unsafe fn call(&self, reads: &[Strided<'_>], writes: &[Strided<'_>]) -> Result<Handed> {
        // SAFETY: by the caller.
        let made = unsafe { self.made(reads, writes)? };
        let mut handed = vec![];
        if self.out {
            for (write, tensor) in writes.iter().zip(made) {
                if !tensor.lies_as(write) {
                    let copy = Tensor::empty(self.shim, write)?;
                    // SAFETY: by the caller; the copy is new memory.
                    unsafe {
                        self.shim.onto(&copy, &tensor)?;
                        self.shim.copied(write, &copy)?;
                    }
                }
            }
            return Ok(handed);
        }
        let placed = writes.iter().filter(|w| !w.is_open());
        let mut others: Vec<_> = if writes.iter().any(Strided::is_open) {
            reads.iter().chain(placed).map(Strided::extent).collect()
        } else {
            vec![]
        };
        for (i, (write, tensor)) in writes.iter().zip(made).enumerate() {
            if write.is_open() {
                handed.push((i, tensor.handed(write, &mut others)?));
            } else {
                // SAFETY: by the caller.
                unsafe { self.shim.copied(write, &tensor)? };
            }
        }
        Ok(handed)
    }

    fn makes(&self) -> bool {
        !self.out
    }
}

impl DispatcherCall {
    /// What the op returns.
    ///
    /// # Safety
    /// As for the call.
    unsafe fn made(&self, reads: &[Strided<'_>], writes: &[Strided<'_>]) -> Result<smallvec::SmallVec<[Tensor; 4]>> {
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
                // SAFETY: a handle that was just made.
                owned.handles.push(unsafe { shim.another(item as Handle)? });
            }
        }
        stack.resize(stack.len().max(self.returns), 0);
        // SAFETY: the stack holds what the schema says; torch takes it over and leaves new handles.
        let status = unsafe { (shim.call)(self.op.as_ptr(), self.overload.as_ptr(), stack.as_mut_ptr()) };
        shim.done(status, &self.op.to_string_lossy())?;
        let made = stack.iter().take(self.returns);
        // SAFETY: handles that nobody else has.
        Ok(made.map(|item| unsafe { Tensor::new(shim, *item as Handle) }).collect())
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
