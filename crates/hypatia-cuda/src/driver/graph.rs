//! Graphs: launches that were recorded, and are run again by one call.

use std::ffi::c_void;
use std::sync::PoisonError;

use super::{Device, Stream, driver};
use crate::Result;
use crate::sys::{self, Handle, KernelNodeParams, UpdateResult};

/// Recorded launches.
#[derive(Debug)]
pub struct Graph {
    device: &'static Device,
    handle: Handle,
}

// SAFETY: a graph may be used from any thread, by one at a time.
unsafe impl Send for Graph {}

/// A kernel in a graph.
#[derive(Debug, Clone, Copy)]
pub struct Node(Handle);

// SAFETY: as of graphs.
unsafe impl Send for Node {}
// SAFETY: a node is a name; what uses it asks for the executable exclusively.
unsafe impl Sync for Node {}

impl Graph {
    /// Records what `record` launches on the stream that it is given; nothing of it is run.
    pub fn record(device: &'static Device, record: impl FnOnce(Stream) -> Result<()>) -> Result<Graph> {
        let _one = device.recording.lock().unwrap_or_else(PoisonError::into_inner);
        let (graph, done) = Graph::record_on(device.recorder()?, record)?;
        done.map(|()| graph)
    }

    /// Records what `record` launches on a stream that nobody else uses, and what that returns. No other thread
    /// notices.
    pub fn record_on<T>(stream: Stream, record: impl FnOnce(Stream) -> T) -> Result<(Graph, T)> {
        let _current = stream.device().enter()?;
        let driver = driver()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: a stream that nobody else uses, and a place to write to. Relaxed: a kernel may be loaded at its first
        // launch, which the other modes forbid.
        let (done, ended) = unsafe {
            driver.cuStreamBeginCapture_v2(stream.raw(), sys::CAPTURE_RELAXED)?;
            (record(stream), driver.cuStreamEndCapture(stream.raw(), &mut handle))
        };
        let graph = Graph {
            device: stream.device(),
            handle,
        };
        ended.map(|()| (graph, done))
    }

    /// Its kernels, in the order of recording.
    pub fn kernels(&self) -> Result<Vec<Node>> {
        let driver = driver()?;
        let mut count = 0;
        // SAFETY: a graph that lives; the second call has room for what the first has counted.
        unsafe {
            driver.cuGraphGetNodes(self.handle, std::ptr::null_mut(), &mut count)?;
            let mut nodes = vec![std::ptr::null_mut(); count];
            driver.cuGraphGetNodes(self.handle, nodes.as_mut_ptr(), &mut count)?;
            let mut kernels = vec![];
            for node in nodes {
                let mut kind = 0;
                driver.cuGraphNodeGetType(node, &mut kind)?;
                if kind == sys::NODE_KERNEL {
                    kernels.push(Node(node));
                }
            }
            Ok(kernels)
        }
    }

    /// A form of it that can be launched.
    pub fn instantiate(&self) -> Result<Executable> {
        let _current = self.device.enter()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: a graph that lives, and a place to write to.
        unsafe { driver()?.cuGraphInstantiateWithFlags(&mut handle, self.handle, 0)? };
        Ok(Executable {
            device: self.device,
            handle,
        })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if let Ok(driver) = driver()
            && !self.handle.is_null()
        {
            // SAFETY: ours.
            let _ = unsafe { driver.cuGraphDestroy(self.handle) };
        }
    }
}

/// A graph that can be launched.
#[derive(Debug)]
pub struct Executable {
    device: &'static Device,
    handle: Handle,
}

// SAFETY: as of graphs.
unsafe impl Send for Executable {}

impl Executable {
    /// Moves it to the device now, so that its first launch does not have to.
    pub fn upload(&mut self, stream: Stream) -> Result<()> {
        // SAFETY: both live.
        unsafe { driver()?.cuGraphUpload(self.handle, stream.raw()) }
    }

    /// Runs it, within [`Device::enter`].
    ///
    /// # Safety
    /// All memory that was recorded must live until it is done.
    pub unsafe fn launch(&mut self, stream: Stream) -> Result<()> {
        // SAFETY: promised by the caller.
        unsafe { driver()?.cuGraphLaunch(self.handle, stream.raw()) }
    }

    /// Takes the arguments of a new recording of the same launches; an error if they are not the same.
    pub fn update(&mut self, graph: &Graph) -> Result<()> {
        let mut result = UpdateResult {
            result: 0,
            error_node: std::ptr::null_mut(),
            error_from_node: std::ptr::null_mut(),
        };
        // SAFETY: both live, and a place to write to.
        unsafe { driver()?.cuGraphExecUpdate_v2(self.handle, graph.handle, &mut result) }
    }

    /// Gives one of our kernels other arguments, of eight bytes each and as many as it takes.
    ///
    /// # Safety
    /// As for launching the kernel with these; the node must be one of the graph that this was made from, which must
    /// live.
    pub unsafe fn set_arguments(&mut self, node: Node, arguments: &[u64]) -> Result<()> {
        let driver = driver()?;
        let mut pointers: smallvec::SmallVec<[*mut c_void; 16]> = arguments
            .iter()
            .map(|a| std::ptr::from_ref(a).cast_mut().cast())
            .collect();
        let mut params = KernelNodeParams {
            function: std::ptr::null_mut(),
            grid: [0; 3],
            block: [0; 3],
            shared: 0,
            params: std::ptr::null_mut(),
            extra: std::ptr::null_mut(),
            kernel: std::ptr::null_mut(),
            context: std::ptr::null_mut(),
        };
        // SAFETY: promised by the caller.
        unsafe {
            driver.cuGraphKernelNodeGetParams_v2(node.0, &mut params)?;
            params.params = pointers.as_mut_ptr();
            params.extra = std::ptr::null_mut();
            driver.cuGraphExecKernelNodeSetParams_v2(self.handle, node.0, &params)
        }
    }

    /// Its device.
    pub fn device(&self) -> &'static Device {
        self.device
    }
}

impl Drop for Executable {
    fn drop(&mut self) {
        if let Ok(driver) = driver() {
            // SAFETY: ours; the driver waits for a launch that still runs.
            let _ = unsafe { driver.cuGraphExecDestroy(self.handle) };
        }
    }
}
