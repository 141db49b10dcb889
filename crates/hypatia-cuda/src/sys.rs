//! The parts of CUDA's C interfaces that are used: functions, and numbers from their headers.
//!
//! They are declared here rather than taken from a crate: the numbers and signatures are the same in CUDA 12 and 13,
//! where a crate of bindings is for one version and reads statuses into Rust enums.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use crate::loading::library;

pub(super) type Address = u64;
pub(super) type Handle = *mut c_void;

pub(super) const ATTRIBUTE_MULTIPROCESSORS: c_int = 16;
pub(super) const ATTRIBUTE_MAJOR: c_int = 75;
pub(super) const ATTRIBUTE_MINOR: c_int = 76;
pub(super) const STREAM_NON_BLOCKING: c_uint = 1;
pub(super) const CAPTURE_RELAXED: c_uint = 2;
pub(super) const NODE_KERNEL: c_uint = 0;
pub(super) const FUNCTION_MOST_SHARED: c_int = 8;
pub(super) const MAP_F16: c_uint = 6;
pub(super) const MAP_BF16: c_uint = 9;
pub(super) const MAP_SWIZZLE_128: c_uint = 3;
pub(super) const MAP_FETCHES_128: c_uint = 2;

/// `CUgraphExecUpdateResultInfo`.
#[repr(C)]
pub(super) struct UpdateResult {
    pub(super) result: c_uint,
    pub(super) error_node: Handle,
    pub(super) error_from_node: Handle,
}

/// `CUlaunchAttribute`, the value of which is a union of 64 bytes.
#[repr(C)]
pub(super) struct LaunchAttribute {
    pub(super) id: c_uint,
    pub(super) pad: c_uint,
    pub(super) value: [c_int; 16],
}

/// `CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION`.
pub(super) const LAUNCH_EARLY: c_uint = 6;

/// `CUlaunchConfig`.
#[repr(C)]
pub(super) struct LaunchConfig {
    pub(super) grid: [c_uint; 3],
    pub(super) block: [c_uint; 3],
    pub(super) shared: c_uint,
    pub(super) stream: Handle,
    pub(super) attributes: *mut LaunchAttribute,
    pub(super) count: c_uint,
}

/// `CUDA_KERNEL_NODE_PARAMS` since CUDA 12.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct KernelNodeParams {
    pub(super) function: Handle,
    pub(super) grid: [c_uint; 3],
    pub(super) block: [c_uint; 3],
    pub(super) shared: c_uint,
    pub(super) params: *mut *mut c_void,
    pub(super) extra: *mut *mut c_void,
    pub(super) kernel: Handle,
    pub(super) context: Handle,
}

library! {
    /// libcuda.
    Driver: "libcuda" in &["libcuda.so.1"], companions &[], status status_name;
    checked {
        fn cuInit(flags: c_uint);
        fn cuDriverGetVersion(version: *mut c_int);
        fn cuDeviceGetCount(count: *mut c_int);
        fn cuDeviceGet(device: *mut c_int, ordinal: c_int);
        fn cuDeviceGetName(name: *mut c_char, len: c_int, device: c_int);
        fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, device: c_int);
        fn cuDevicePrimaryCtxRetain(context: *mut Handle, device: c_int);
        fn cuCtxGetCurrent(context: *mut Handle);
        fn cuCtxPushCurrent_v2(context: Handle);
        fn cuCtxPopCurrent_v2(context: *mut Handle);
        fn cuStreamCreate(stream: *mut Handle, flags: c_uint);
        fn cuStreamSynchronize(stream: Handle);
        fn cuStreamIsCapturing(stream: Handle, status: *mut c_uint);
        fn cuStreamBeginCapture_v2(stream: Handle, mode: c_uint);
        fn cuStreamEndCapture(stream: Handle, graph: *mut Handle);
        fn cuEventCreate(event: *mut Handle, flags: c_uint);
        fn cuEventDestroy_v2(event: Handle);
        fn cuEventRecord(event: Handle, stream: Handle);
        fn cuEventSynchronize(event: Handle);
        fn cuEventElapsedTime(milliseconds: *mut f32, start: Handle, end: Handle);
        fn cuModuleLoadData(module: *mut Handle, image: *const c_void);
        fn cuModuleUnload(module: Handle);
        fn cuModuleGetFunction(function: *mut Handle, module: Handle, name: *const c_char);
        fn cuFuncSetAttribute(function: Handle, attribute: c_int, value: c_int);
        fn cuLaunchKernel(
            function: Handle, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint, block_y: c_uint,
            block_z: c_uint, shared: c_uint, stream: Handle, params: *mut *mut c_void, extra: *mut *mut c_void,
        );
        fn cuLaunchKernelEx(
            config: *const LaunchConfig, function: Handle, params: *mut *mut c_void, extra: *mut *mut c_void,
        );
        fn cuMemAlloc_v2(address: *mut Address, bytes: usize);
        fn cuMemFree_v2(address: Address);
        fn cuMemcpyHtoD_v2(to: Address, from: *const c_void, bytes: usize);
        fn cuMemcpyDtoH_v2(to: *mut c_void, from: Address, bytes: usize);
        fn cuMemsetD8Async(at: Address, value: u8, bytes: usize, stream: Handle);
        fn cuGraphDestroy(graph: Handle);
        fn cuGraphGetNodes(graph: Handle, nodes: *mut Handle, count: *mut usize);
        fn cuGraphNodeGetType(node: Handle, kind: *mut c_uint);
        fn cuGraphKernelNodeGetParams_v2(node: Handle, params: *mut KernelNodeParams);
        fn cuGraphInstantiateWithFlags(executable: *mut Handle, graph: Handle, flags: u64);
        fn cuGraphExecKernelNodeSetParams_v2(executable: Handle, node: Handle, params: *const KernelNodeParams);
        fn cuGraphExecUpdate_v2(executable: Handle, graph: Handle, result: *mut UpdateResult);
        fn cuGraphExecDestroy(executable: Handle);
        fn cuGraphLaunch(executable: Handle, stream: Handle);
        fn cuGraphUpload(executable: Handle, stream: Handle);
        fn cuTensorMapEncodeTiled(
            map: *mut c_void, dtype: c_uint, rank: c_uint, address: Address, sizes: *const u64, strides: *const u64,
            part: *const c_uint, steps: *const c_uint, interleaved: c_uint, swizzle: c_uint, promotion: c_uint,
            outside: c_uint,
        );
    }
    plain {
        fn cuGetErrorName(code: u32, name: *mut *const c_char) -> u32;
    }
}

impl Driver {
    fn status_name(&self, code: u32) -> String {
        let mut name = std::ptr::null();
        // SAFETY: the name is a constant of the library; it stays null for numbers that it does not know.
        unsafe {
            (self.cuGetErrorName)(code, &mut name);
            text(name, code)
        }
    }
}

/// A constant of a library as text, or the number where there is none.
///
/// # Safety
/// `name` must be null or a C string that lives while this runs.
unsafe fn text(name: *const c_char, code: u32) -> String {
    if name.is_null() {
        return format!("status {code}");
    }
    // SAFETY: promised by the caller.
    unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
}

pub(super) const DESC_TRANSA: c_uint = 3;
pub(super) const DESC_TRANSB: c_uint = 4;
pub(super) const DESC_EPILOGUE: c_uint = 7;
pub(super) const DESC_BIAS_POINTER: c_uint = 8;
pub(super) const DESC_AUX_POINTER: c_uint = 11;
pub(super) const DESC_AUX_LD: c_uint = 12;
pub(super) const DESC_AUX_BATCH_STRIDE: c_uint = 13;
pub(super) const LAYOUT_BATCH_COUNT: c_uint = 5;
pub(super) const LAYOUT_BATCH_STRIDE: c_uint = 6;
pub(super) const PREFER_WORKSPACE: c_uint = 1;
pub(super) const PREFER_REDUCTIONS: c_uint = 3;
/// The first of four: A, B, C and D.
pub(super) const PREFER_ALIGNMENT_A: c_uint = 5;
/// Split sums are added in the type that is computed in, not in that of the result.
pub(super) const REDUCE_IN_COMPUTE_TYPE: u32 = 2;

/// Also in place and in the type of the result.
pub(super) const REDUCE_ANYHOW: u32 = 7;

/// The status of a product for which there is no algorithm.
pub(super) const BLAS_NOT_SUPPORTED: u32 = 15;

/// `cublasLtMatmulAlgo_t`, whose meaning is the library's own.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Algorithm {
    pub(super) data: [u64; 8],
}

/// `cublasLtMatmulHeuristicResult_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Candidate {
    pub(super) algorithm: Algorithm,
    pub(super) workspace: usize,
    pub(super) state: u32,
    pub(super) waves: f32,
    pub(super) reserved: [c_int; 4],
}

library! {
    /// libcublasLt.
    Blas: "cuBLASLt" in &["libcublasLt.so.13", "libcublasLt.so.12"], companions &[], status status_name;
    checked {
        fn cublasLtCreate(handle: *mut Handle);
        fn cublasLtMatmulDescCreate(desc: *mut Handle, compute: c_uint, scale: c_uint);
        fn cublasLtMatmulDescDestroy(desc: Handle);
        fn cublasLtMatmulDescSetAttribute(desc: Handle, attribute: c_uint, value: *const c_void, size: usize);
        fn cublasLtMatrixLayoutCreate(layout: *mut Handle, dtype: c_uint, rows: u64, columns: u64, ld: i64);
        fn cublasLtMatrixLayoutDestroy(layout: Handle);
        fn cublasLtMatrixLayoutSetAttribute(layout: Handle, attribute: c_uint, value: *const c_void, size: usize);
        fn cublasLtMatmulPreferenceCreate(preference: *mut Handle);
        fn cublasLtMatmulPreferenceDestroy(preference: Handle);
        fn cublasLtMatmulPreferenceSetAttribute(
            preference: Handle, attribute: c_uint, value: *const c_void, size: usize,
        );
        fn cublasLtMatmulAlgoGetHeuristic(
            handle: Handle, desc: Handle, a: Handle, b: Handle, c: Handle, d: Handle, preference: Handle,
            asked: c_int, found: *mut Candidate, count: *mut c_int,
        );
        fn cublasLtMatmulAlgoCheck(
            handle: Handle, desc: Handle, a: Handle, b: Handle, c: Handle, d: Handle, algorithm: *const Algorithm,
            result: *mut Candidate,
        );
        fn cublasLtMatmul(
            handle: Handle, desc: Handle, alpha: *const c_void, a: Address, a_layout: Handle, b: Address,
            b_layout: Handle, beta: *const c_void, c: Address, c_layout: Handle, d: Address, d_layout: Handle,
            algorithm: *const Algorithm, workspace: Address, workspace_bytes: usize, stream: Handle,
        );
    }
    plain {
        fn cublasLtGetStatusName(code: u32) -> *const c_char;
        fn cublasLtGetVersion() -> usize;
    }
}

impl Blas {
    fn status_name(&self, code: u32) -> String {
        // SAFETY: the name is a constant of the library.
        unsafe { text((self.cublasLtGetStatusName)(code), code) }
    }
}

library! {
    /// libnvrtc, which looks for its built-in functions by name at the first compilation.
    Nvrtc: "NVRTC" in &["libnvrtc.so.13", "libnvrtc.so.12"], companions &["libnvrtc-builtins.so"], status status_name;
    checked {
        fn nvrtcVersion(major: *mut c_int, minor: *mut c_int);
        fn nvrtcCreateProgram(
            program: *mut Handle, source: *const c_char, name: *const c_char, count: c_int,
            headers: *const *const c_char, names: *const *const c_char,
        );
        fn nvrtcCompileProgram(program: Handle, count: c_int, options: *const *const c_char);
        fn nvrtcGetProgramLogSize(program: Handle, size: *mut usize);
        fn nvrtcGetProgramLog(program: Handle, log: *mut c_char);
        fn nvrtcGetCUBINSize(program: Handle, size: *mut usize);
        fn nvrtcGetCUBIN(program: Handle, cubin: *mut c_char);
        fn nvrtcDestroyProgram(program: *mut Handle);
    }
    plain {
        fn nvrtcGetErrorString(code: u32) -> *const c_char;
    }
}

impl Nvrtc {
    fn status_name(&self, code: u32) -> String {
        // SAFETY: the text is a constant of the library.
        unsafe { text((self.nvrtcGetErrorString)(code), code) }
    }
}
