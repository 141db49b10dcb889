//! Tensors across the border, by DLPack's table of C functions: no Python call, no copy.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ops::Range;
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;

use hypatia_core::ty::DType;
use hypatia_runtime::kernels::call::{Kept, Strided};
use pyo3::exceptions::{PyRuntimeError, PyTypeError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::{ffi, intern};
use smallvec::SmallVec;

use crate::results::{Block, Spares};

/// DLPack's numbers of kinds of devices.
const CPU: i32 = 1;
const CUDA: i32 = 2;

/// DLPack's kind and number of a device.
fn device(gpu: Option<u32>) -> (i32, i32) {
    gpu.map_or((CPU, 0), |ordinal| (CUDA, ordinal as i32))
}

/// DLPack's description of a tensor.
#[repr(C)]
#[derive(Clone, Copy)]
struct DlTensor {
    data: *mut c_void,
    device_type: i32,
    device_id: i32,
    ndim: i32,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

impl DlTensor {
    /// A tensor of these sizes and strides, which must outlive the description.
    fn new(data: *mut u8, dtype: DType, shape: &mut [i64], strides: &mut [i64], gpu: Option<u32>) -> DlTensor {
        let (device_type, device_id) = device(gpu);
        let (code, bits) = code_of(dtype);
        DlTensor {
            data: data.cast(),
            device_type,
            device_id,
            ndim: shape.len() as i32,
            code,
            bits,
            lanes: 1,
            shape: shape.as_mut_ptr(),
            strides: strides.as_mut_ptr(),
            byte_offset: 0,
        }
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Version {
    major: u32,
    minor: u32,
}

#[repr(C)]
struct Managed {
    version: Version,
    manager_ctx: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Managed)>,
    flags: u64,
    tensor: DlTensor,
}

type SetError = unsafe extern "C" fn(*mut c_void, *const c_char, *const c_char);

/// DLPack's table of functions, version 1.
#[repr(C)]
struct Table {
    version: Version,
    previous: *mut c_void,
    allocate: unsafe extern "C" fn(*mut DlTensor, *mut *mut Managed, *mut c_void, SetError) -> c_int,
    managed_from_object: Option<unsafe extern "C" fn(*mut c_void, *mut *mut Managed) -> c_int>,
    object_from_managed: unsafe extern "C" fn(*mut Managed, *mut *mut c_void) -> c_int,
    tensor_from_object: Option<unsafe extern "C" fn(*mut c_void, *mut DlTensor) -> c_int>,
    current_stream: *const c_void,
}

/// torch's functions for exchanging tensors.
#[derive(Clone, Copy)]
pub struct Exchange(NonNull<Table>);

// SAFETY: a pointer to a constant table in torch.
unsafe impl Send for Exchange {}
// SAFETY: as above.
unsafe impl Sync for Exchange {}

/// A tensor as it lies in memory; valid as long as the Python object is.
pub struct Borrowed {
    tensor: DlTensor,
}

/// So many elements are looked at.
const TAKEN: usize = 8;

/// Bits that spread what they are multiplied by.
const SPREAD: u64 = 0x9e37_79b9_7f4a_7c15;

/// How a tensor was when it was looked at: where it lies and how, and a sum over some elements in the CPU's memory.
pub struct Look {
    data: usize,
    bits: u8,
    dimensions: SmallVec<[(i64, i64); 4]>,
    /// Where those elements are. Finding that takes longer than looking at them.
    places: SmallVec<[isize; TAKEN]>,
    sum: u64,
}

impl Look {
    /// The address, and one number of the sum, sizes and strides.
    pub fn numbers(&self) -> (usize, u64) {
        let mixed = |sum: u64, number: i64| sum.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(number as u64);
        let dimensions = self.dimensions.iter().flat_map(|(size, stride)| [*size, *stride]);
        (self.data, dimensions.fold(self.sum, mixed))
    }
}

/// A new dense tensor that belongs to torch once it is an object.
pub struct Fresh {
    managed: NonNull<Managed>,
    exchange: Exchange,
}

// SAFETY: nobody else has it yet, and torch allocates and frees on any thread.
unsafe impl Send for Fresh {}

impl Exchange {
    /// The table of `torch.Tensor`.
    pub fn get(py: Python<'_>) -> PyResult<Exchange> {
        static FOUND: PyOnceLock<Exchange> = PyOnceLock::new();
        FOUND
            .get_or_try_init(py, || {
                let tensor = py.import("torch")?.getattr("Tensor")?;
                let capsule = tensor.getattr("__dlpack_c_exchange_api__")?;
                // SAFETY: a capsule of this name holds a pointer to the table.
                let pointer = unsafe { ffi::PyCapsule_GetPointer(capsule.as_ptr(), c"dlpack_exchange_api".as_ptr()) };
                let table: NonNull<Table> = NonNull::new(pointer.cast()).ok_or_else(|| PyErr::fetch(py))?;
                // SAFETY: the header is the same in all versions.
                let version = unsafe { table.as_ref().version };
                // SAFETY: version 1 has this field.
                if version.major != 1 || unsafe { table.as_ref().tensor_from_object.is_none() } {
                    return Err(PyRuntimeError::new_err(format!(
                        "torch exchanges tensors by DLPack {}.{}, which is not known here",
                        version.major, version.minor
                    )));
                }
                Ok(Exchange(table))
            })
            .copied()
    }

    fn table(&self) -> &Table {
        // SAFETY: the table lives as long as torch does.
        unsafe { self.0.as_ref() }
    }

    /// Looks at a tensor.
    pub fn borrow(&self, object: &Bound<'_, PyAny>) -> PyResult<Borrowed> {
        let Some(look) = self.table().tensor_from_object else {
            return Err(PyRuntimeError::new_err("torch cannot show its tensors"));
        };
        let mut tensor = DlTensor {
            data: null_mut(),
            device_type: 0,
            device_id: 0,
            ndim: 0,
            code: 0,
            bits: 0,
            lanes: 0,
            shape: null_mut(),
            strides: null_mut(),
            byte_offset: 0,
        };
        // SAFETY: the GIL is held; torch checks that the object is a tensor.
        if unsafe { look(object.as_ptr().cast(), &mut tensor) } != 0 {
            return Err(PyErr::take(object.py()).unwrap_or_else(|| PyTypeError::new_err("not a tensor")));
        }
        Ok(Borrowed { tensor })
    }

    /// A new dense tensor in the CPU's memory, or in that of a GPU.
    pub fn allocate(&self, dtype: DType, shape: &[i64], gpu: Option<u32>) -> PyResult<Fresh> {
        let (mut sizes, mut strides) = (shape.to_vec(), dense(shape));
        let mut prototype = DlTensor::new(null_mut(), dtype, &mut sizes, &mut strides, gpu);
        let mut message = String::new();
        let mut made: *mut Managed = null_mut();
        // SAFETY: the prototype and the string outlive the call.
        let failed =
            unsafe { (self.table().allocate)(&mut prototype, &mut made, (&raw mut message).cast(), note_error) };
        match NonNull::new(made) {
            Some(managed) if failed == 0 => Ok(Fresh {
                managed,
                exchange: *self,
            }),
            _ => Err(no_memory(&message)),
        }
    }
}

/// Torch's own error where a GPU has no memory left: callers catch it to try something smaller.
fn no_memory(message: &str) -> PyErr {
    let text = format!("no memory for a result: {message}");
    let torchs = |py: Python<'_>| -> PyResult<PyErr> {
        let kind = py.import("torch")?.getattr("OutOfMemoryError")?;
        Ok(PyErr::from_value(kind.call1((&text,))?))
    };
    if !message.contains("CUDA out of memory") {
        return PyRuntimeError::new_err(text);
    }
    Python::attach(torchs).unwrap_or_else(|_| PyRuntimeError::new_err(text.clone()))
}

type Sizes = SmallVec<[i64; 5]>;

/// A tensor on memory of ours, with all that it refers to.
struct Ours {
    managed: Managed,
    shape: Sizes,
    strides: Sizes,
    /// Memory that goes back when torch is done with it.
    block: Option<(Block, Arc<Spares>)>,
    /// Memory that a call handed over.
    taken: Option<Kept>,
}

unsafe extern "C" fn free_ours(managed: *mut Managed) {
    // SAFETY: made by `Ours::make`, which put its box behind this pointer.
    let ours = unsafe { Box::from_raw((*managed).manager_ctx.cast::<Ours>()) };
    if let Some((block, spares)) = ours.block {
        spares.give(block);
    }
}

impl Ours {
    fn make(data: *mut u8, dtype: DType, shape: Sizes, strides: Sizes, gpu: Option<u32>) -> Box<Ours> {
        let mut ours = Box::new(Ours {
            managed: Managed {
                version: Version { major: 1, minor: 0 },
                manager_ctx: null_mut(),
                deleter: Some(free_ours),
                flags: 0,
                tensor: DlTensor::new(data, dtype, &mut [], &mut [], gpu),
            },
            shape,
            strides,
            block: None,
            taken: None,
        });
        // Sizes may lie within, so that they have their place only now.
        ours.managed.tensor.ndim = ours.shape.len() as i32;
        ours.managed.tensor.shape = ours.shape.as_mut_ptr();
        ours.managed.tensor.strides = ours.strides.as_mut_ptr();
        ours.managed.manager_ctx = (&raw mut *ours).cast();
        ours
    }

    fn into_fresh(self: Box<Ours>, exchange: Exchange) -> Fresh {
        Fresh {
            managed: NonNull::from(&mut Box::leak(self).managed),
            exchange,
        }
    }
}

impl Exchange {
    /// A torch tensor on memory of ours.
    ///
    /// # Safety
    /// The memory outlives the tensor.
    pub unsafe fn wrap<'py>(&self, py: Python<'py>, t: &Strided<'_>) -> PyResult<Bound<'py, PyAny>> {
        let shape = t.shape.iter().map(|s| *s as i64).collect();
        let strides = t.strides.iter().map(|s| *s as i64).collect();
        Ours::make(t.data, t.dtype, shape, strides, t.gpu)
            .into_fresh(*self)
            .into_object(py)
    }

    /// A dense tensor in memory that a call handed over.
    ///
    /// # Safety
    /// The memory holds the tensor.
    pub unsafe fn adopt(&self, dtype: DType, shape: &[i64], taken: Kept, gpu: Option<u32>) -> Fresh {
        let mut ours = Ours::make(taken.data(), dtype, shape.into(), dense(shape), gpu);
        ours.taken = Some(taken);
        ours.into_fresh(*self)
    }

    /// The tensor of an object, which then lives without it.
    pub fn owned(&self, object: &Bound<'_, PyAny>) -> PyResult<Fresh> {
        let Some(hand_over) = self.table().managed_from_object else {
            return Err(PyRuntimeError::new_err("torch does not hand over its tensors"));
        };
        let mut made: *mut Managed = null_mut();
        // SAFETY: the GIL is held; torch checks that the object is a tensor.
        let failed = unsafe { hand_over(object.as_ptr().cast(), &mut made) };
        match NonNull::new(made) {
            Some(managed) if failed == 0 => Ok(Fresh {
                managed,
                exchange: *self,
            }),
            _ => Err(PyErr::take(object.py()).unwrap_or_else(|| PyTypeError::new_err("not a tensor"))),
        }
    }

    /// A new dense tensor in memory that is used again when torch is done with it; none if there is no memory.
    pub fn reuse(&self, dtype: DType, shape: &[i64], bytes: usize, spares: &Arc<Spares>) -> Option<Fresh> {
        let block = spares.take(bytes)?;
        let mut ours = Ours::make(block.data(), dtype, shape.into(), dense(shape), None);
        ours.block = Some((block, spares.clone()));
        Some(ours.into_fresh(*self))
    }
}

fn dense(shape: &[i64]) -> Sizes {
    let mut steps = Sizes::from_elem(1, shape.len());
    for i in (1..shape.len()).rev() {
        steps[i - 1] = steps[i] * shape[i].max(1);
    }
    steps
}

unsafe extern "C" fn note_error(context: *mut c_void, _kind: *const c_char, message: *const c_char) {
    if context.is_null() || message.is_null() {
        return;
    }
    // SAFETY: the context is the string that `allocate` gave, the message a C string.
    unsafe { (*context.cast::<String>()).push_str(&CStr::from_ptr(message).to_string_lossy()) };
}

fn code_of(dtype: DType) -> (u8, u8) {
    let bits = (8 * dtype.size()) as u8;
    match dtype {
        DType::Bool => (6, 8),
        DType::U8 => (1, bits),
        DType::I8 | DType::I16 | DType::I32 | DType::I64 => (0, bits),
        DType::F16 | DType::F32 | DType::F64 => (2, bits),
        DType::BF16 => (4, bits),
        DType::C64 | DType::C128 => (5, bits),
    }
}

impl Borrowed {
    /// Whether it is a tensor of this dtype and rank in the CPU's memory, or in that of a GPU.
    fn is_like(&self, dtype: DType, rank: usize, gpu: Option<u32>) -> bool {
        let t = &self.tensor;
        (t.device_type, t.device_id) == device(gpu)
            && (t.code, t.bits, t.lanes) == (code_of(dtype).0, code_of(dtype).1, 1)
            && t.ndim as usize == rank
    }

    /// The GPU that has it, or none if the CPU has it; an error says that it is elsewhere.
    pub fn gpu(&self) -> PyResult<Option<u32>> {
        match self.tensor.device_type {
            CPU => Ok(None),
            CUDA => Ok(Some(self.tensor.device_id as u32)),
            _ => Err(PyTypeError::new_err("a tensor on an unknown device")),
        }
    }

    /// Whether a call may hand it over as this result; see [`Strided::stands_for`].
    pub fn stands_for(&self, wanted: &Strided<'_>, others: &[Range<usize>]) -> bool {
        let rank = wanted.shape.len();
        if !self.is_like(wanted.dtype, rank, wanted.gpu) {
            return false;
        }
        let (shape, strides): (Vec<usize>, Vec<isize>) = (0..rank)
            .map(|i| self.dimension(i))
            .map(|(size, stride)| (size as usize, stride as isize))
            .unzip();
        let found = Strided {
            data: self.data(),
            shape: &shape,
            strides: &strides,
            ..*wanted
        };
        found.stands_for(wanted, others)
    }

    /// Its size in a dimension, and from there to the next element.
    fn dimension(&self, i: usize) -> (i64, i64) {
        debug_assert!(i < self.tensor.ndim as usize);
        // SAFETY: shape and strides have `ndim` entries.
        unsafe { (*self.tensor.shape.add(i), *self.tensor.strides.add(i)) }
    }

    /// Whether it is a dense tensor of this dtype and shape in the CPU's memory, or in that of a GPU.
    pub fn is(&self, dtype: DType, shape: &[i64], gpu: Option<u32>) -> bool {
        if !self.is_like(dtype, shape.len(), gpu) {
            return false;
        }
        // Without elements, strides say nothing: torch calls such a tensor contiguous.
        let empty = shape.contains(&0);
        let mut step = 1;
        for (i, expected) in shape.iter().enumerate().rev() {
            let (size, stride) = self.dimension(i);
            if size != *expected || (size > 1 && stride != step && !empty) {
                return false;
            }
            step *= size.max(1);
        }
        true
    }

    /// Whether it is a tensor of this dtype and shape with these strides.
    pub fn lies(&self, dtype: DType, shape: &[i64], strides: &[i64], gpu: Option<u32>) -> bool {
        let fits = |(i, (expected, step)): (usize, (&i64, &i64))| {
            let (size, stride) = self.dimension(i);
            size == *expected && (size <= 1 || stride == *step)
        };
        self.is_like(dtype, shape.len(), gpu) && shape.iter().zip(strides).enumerate().all(fits)
    }

    /// What tells whether it is what it is now. Other values have other sums, but for changes of few elements.
    pub fn look(&self) -> Look {
        let rank = self.tensor.ndim as usize;
        let mut look = Look {
            data: self.data() as usize,
            bits: self.tensor.bits,
            dimensions: (0..rank).map(|i| self.dimension(i)).collect(),
            places: SmallVec::new(),
            sum: 0,
        };
        let count = look.dimensions.iter().map(|(size, _)| *size as u64).product::<u64>();
        if look.data != 0 && self.tensor.device_type == CPU && count > 0 && self.tensor.bits <= 128 {
            look.places = places(&look.dimensions, count, isize::from(self.tensor.bits / 8));
        }
        look.sum = self.sum(&look.places);
        look
    }

    /// Whether it is what it was.
    pub fn is_as(&self, look: &Look) -> bool {
        self.data() as usize == look.data
            && (self.tensor.bits, self.tensor.ndim as usize) == (look.bits, look.dimensions.len())
            && (look.dimensions.iter().enumerate()).all(|(i, dimension)| self.dimension(i) == *dimension)
            && self.sum(&look.places) == look.sum
    }

    /// A sum over the bits of the elements that lie so many bytes behind the first.
    fn sum(&self, places: &[isize]) -> u64 {
        let (data, mut sum) = (self.data(), 0u64);
        for place in places {
            // SAFETY: the offsets are of elements of this tensor, or of one of the same sizes and strides.
            let (low, high) = unsafe {
                let from = data.offset(*place);
                match self.tensor.bits {
                    8 => (u64::from(from.read()), 0),
                    16 => (u64::from(from.cast::<u16>().read_unaligned()), 0),
                    32 => (u64::from(from.cast::<u32>().read_unaligned()), 0),
                    64 => (from.cast::<u64>().read_unaligned(), 0),
                    _ => {
                        let wide = from.cast::<u128>().read_unaligned();
                        (wide as u64, (wide >> 64) as u64)
                    }
                }
            };
            for half in [low, high] {
                sum = (sum.rotate_left(5) ^ half).wrapping_mul(SPREAD);
            }
        }
        sum
    }

    /// Where its first element is.
    pub fn data(&self) -> *mut u8 {
        if self.tensor.data.is_null() {
            return null_mut();
        }
        // SAFETY: the offset is within the tensor.
        unsafe { self.tensor.data.cast::<u8>().add(self.tensor.byte_offset as usize) }
    }
}

/// Where some elements lie, in bytes behind the first: the first and the last one, and others in between as if by
/// chance.
fn places(dimensions: &[(i64, i64)], count: u64, bytes: isize) -> SmallVec<[isize; TAKEN]> {
    let place = |i: usize| {
        let mut at = match i {
            0 => 0,
            1 => count - 1,
            _ => ((u128::from(SPREAD.wrapping_mul(i as u64)) * u128::from(count)) >> 64) as u64,
        };
        let mut offset = 0;
        for (size, stride) in dimensions.iter().rev() {
            offset += (at % *size as u64) as isize * *stride as isize;
            at /= *size as u64;
        }
        offset * bytes
    };
    (0..TAKEN).map(place).collect()
}

/// Whether a tensor is a lazy negation or a lazy conjugate: its memory has other signs.
pub fn is_lazy(tensor: &Bound<'_, PyAny>, dtype: DType) -> PyResult<bool> {
    let negated = tensor.call_method0(intern!(tensor.py(), "is_neg"))?.extract()?;
    Ok(negated || dtype.is_complex() && tensor.call_method0(intern!(tensor.py(), "is_conj"))?.extract()?)
}

impl Fresh {
    /// Where its first element is.
    pub fn data(&self) -> *mut u8 {
        // SAFETY: it is valid until it is handed over.
        unsafe { self.managed.as_ref().tensor.data.cast() }
    }

    /// Hands it over to Python.
    pub fn into_object(self, py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
        let mut object: *mut c_void = null_mut();
        // SAFETY: the GIL is held; torch takes the tensor over.
        let failed = unsafe { (self.exchange.table().object_from_managed)(self.managed.as_ptr(), &mut object) };
        if failed != 0 || object.is_null() {
            return Err(PyErr::take(py).unwrap_or_else(|| PyRuntimeError::new_err("torch did not take a result")));
        }
        std::mem::forget(self);
        // SAFETY: a new reference.
        Ok(unsafe { Bound::from_owned_ptr(py, object.cast()) })
    }
}

impl Drop for Fresh {
    fn drop(&mut self) {
        // SAFETY: it was never handed over.
        unsafe {
            if let Some(deleter) = self.managed.as_ref().deleter {
                deleter(self.managed.as_ptr());
            }
        }
    }
}
