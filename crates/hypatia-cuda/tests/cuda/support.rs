//! Buffers with random elements, and results on both machines side by side.

use hypatia_core::ty::DType;
use hypatia_cuda::codegen::Operand;
use hypatia_cuda::driver::{Buffer, Device};
use hypatia_cuda::kernel::Kernel;
use hypatia_runtime::cpu::region::{View, ViewMut};

/// The first GPU; a line says so if there is none.
#[allow(clippy::print_stderr)]
pub fn device() -> Option<&'static Device> {
    match Device::get(0) {
        Ok(device) => Some(device),
        Err(e) => {
            eprintln!("skipped, no GPU: {e}");
            None
        }
    }
}

/// Random elements: floats of a moderate size, small whole numbers, truth values.
pub fn draw(dtype: DType, len: usize, seed: u32) -> Vec<u8> {
    let mut state = seed.wrapping_mul(2_654_435_761) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        f64::from(state) / f64::from(u32::MAX)
    };
    let mut bytes = vec![];
    for _ in 0..len {
        let x = next() * 8.0 - 4.0;
        match dtype {
            DType::Bool => bytes.push(u8::from(x > 0.0)),
            DType::U8 => bytes.push((x.abs() * 60.0) as u8),
            DType::I8 => bytes.push((x * 30.0) as i8 as u8),
            DType::I16 => bytes.extend(((x * 8000.0) as i16).to_ne_bytes()),
            DType::I32 => bytes.extend(((x * 5e8) as i32).to_ne_bytes()),
            DType::I64 => bytes.extend(((x * 2e18) as i64).to_ne_bytes()),
            DType::F16 => bytes.extend(half::f16::from_f64(x).to_ne_bytes()),
            DType::BF16 => bytes.extend(half::bf16::from_f64(x).to_ne_bytes()),
            DType::F32 => bytes.extend((x as f32).to_ne_bytes()),
            DType::F64 => bytes.extend(x.to_ne_bytes()),
            DType::C64 | DType::C128 => unreachable!("kernels have no complex numbers"),
        }
    }
    bytes
}

pub fn decode(dtype: DType, bytes: &[u8]) -> Vec<f64> {
    macro_rules! numbers {
        ($t:ty, $f:expr) => {
            bytes
                .chunks_exact(size_of::<$t>())
                .map(|b| $f(<$t>::from_ne_bytes(b.try_into().unwrap())))
                .collect()
        };
    }
    match dtype {
        DType::Bool | DType::U8 => bytes.iter().map(|b| f64::from(*b)).collect(),
        DType::I8 => numbers!(i8, f64::from),
        DType::I16 => numbers!(i16, f64::from),
        DType::I32 => numbers!(i32, f64::from),
        DType::I64 => numbers!(i64, |x| x as f64),
        DType::F16 => numbers!(half::f16, |x: half::f16| x.to_f64()),
        DType::BF16 => numbers!(half::bf16, |x: half::bf16| x.to_f64()),
        DType::F32 => numbers!(f32, f64::from),
        DType::F64 => numbers!(f64, |x| x),
        DType::C64 | DType::C128 => unreachable!("kernels have no complex numbers"),
    }
}

/// Elements that an operand reaches within a shape.
pub fn reach(operand: &Operand, shape: &[usize]) -> usize {
    let far: isize = shape
        .iter()
        .zip(&operand.strides)
        .map(|(n, s)| (*n as isize - 1).max(0) * s)
        .sum();
    far as usize + 1
}

/// A launch: kernels with the numbers of their buffers.
pub type Launches<'a> = &'a [(&'a Kernel, Vec<usize>)];

/// Runs kernels over buffers and returns what is in them then.
pub fn run(device: &'static Device, launches: Launches, buffers: &[Vec<u8>]) -> Vec<Vec<u8>> {
    let _current = device.enter().unwrap();
    let stream = device.stream(0);
    let held: Vec<Buffer> = buffers.iter().map(|b| Buffer::of(device, b).unwrap()).collect();
    for (kernel, which) in launches {
        let addresses: Vec<u64> = which.iter().map(|i| held[*i].address()).collect();
        let loaded = kernel.load(device).unwrap_or_else(|e| panic!("{e}\n{}", kernel.source));
        // SAFETY: the buffers are as long as the operands reach, and are read back below.
        unsafe { loaded.launch(stream, &addresses).unwrap() };
    }
    stream.synchronize().unwrap();
    held.iter().map(|b| b.read().unwrap()).collect()
}

/// Results of both, side by side; floats may differ by a few units in the last place of the larger of the result and
/// `scale`.
pub fn compare(what: &str, dtype: DType, gpu: &[u8], cpu: &[u8], units: f64, scale: f64) {
    let (got, want) = (decode(dtype, gpu), decode(dtype, cpu));
    assert_eq!(got.len(), want.len());
    for (i, (g, w)) in got.iter().zip(&want).enumerate() {
        let allowed = units * 2.0 * dtype.epsilon() * w.abs().max(scale);
        let fine = g == w || g.is_nan() && w.is_nan() || (g - w).abs() <= allowed;
        assert!(fine, "{what}, element {i}: {g} on the GPU, {w} on the CPU");
    }
}

/// What a kernel makes of its inputs beside what the CPU does. Operands have as many of the shape's dimensions as they
/// have strides.
pub struct Case<'a> {
    pub what: String,
    pub kernel: &'a Kernel,
    pub shape: &'a [usize],
    pub inputs: &'a [Operand],
    pub outputs: &'a [Operand],
    /// How far floats may be apart.
    pub units: f64,
    pub scale: f64,
}

impl Case<'_> {
    /// On random inputs.
    pub fn check(
        &self,
        device: &'static Device,
        cpu: impl FnOnce(&[View], &mut [ViewMut]) -> hypatia_runtime::Result<()>,
    ) {
        let drawn = (1..)
            .zip(self.inputs)
            .map(|(seed, o)| draw(o.dtype, self.reach(o), seed));
        self.check_on(device, drawn.collect(), cpu);
    }

    /// On these inputs.
    pub fn check_on(
        &self,
        device: &'static Device,
        inputs: Vec<Vec<u8>>,
        cpu: impl FnOnce(&[View], &mut [ViewMut]) -> hypatia_runtime::Result<()>,
    ) {
        let mut expected: Vec<Vec<u8>> = self
            .outputs
            .iter()
            .map(|o| vec![0x5a; self.reach(o) * o.dtype.size()])
            .collect();
        let buffers: Vec<Vec<u8>> = inputs.iter().chain(&expected).cloned().collect();
        let made = run(device, &[(self.kernel, (0..buffers.len()).collect())], &buffers);
        let views: Vec<View> = inputs
            .iter()
            .zip(self.inputs)
            // SAFETY: as long as the operand reaches.
            .map(|(b, o)| unsafe { View::from_raw(b.as_ptr(), o.dtype, &o.strides) })
            .collect();
        let mut targets: Vec<ViewMut> = expected
            .iter_mut()
            .zip(self.outputs)
            // SAFETY: as above.
            .map(|(b, o)| unsafe { ViewMut::from_raw(b.as_mut_ptr(), o.dtype, &o.strides) })
            .collect();
        cpu(&views, &mut targets).unwrap();
        drop(targets);
        for (i, output) in self.outputs.iter().enumerate() {
            let what = format!("{}, output {i}", self.what);
            let (gpu, cpu) = (&made[inputs.len() + i], &expected[i]);
            compare(&what, output.dtype, gpu, cpu, self.units, self.scale);
        }
    }

    fn reach(&self, operand: &Operand) -> usize {
        reach(operand, &self.shape[..operand.strides.len()])
    }
}

pub fn strided(dtype: DType, strides: &[isize], alignment: usize) -> Operand {
    Operand {
        dtype,
        strides: strides.to_vec(),
        alignment,
    }
}
