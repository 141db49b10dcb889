//! Packed weights of every kind behind one call.

use hypatia_core::ty::DType;

use super::kind::{AnyPack, Kind, Pack};
use super::{Element, Epilogue, Mismatch, Rows, RowsMut, Sink};
use half::bf16;
use std::fmt;

/// Weights in the order in which a kernel reads them.
pub trait Layer<T: Element>: Send + Sync {
    /// The size in memory, without what is borrowed.
    fn bytes(&self) -> usize;

    /// Computes `m` > 0 rows of the layer on at most `threads` threads.
    ///
    /// # Safety
    /// The operands are as long as `m` and the sizes of the weights say, and borrowed weights are still there.
    unsafe fn run(&self, threads: usize, m: usize, x: Rows<T>, sink: Sink<T>);
}

/// Why weights were not packed, or a layer not run.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LinearError {
    /// An operand is too short.
    #[error(transparent)]
    Mismatch(#[from] Mismatch),
    /// The machine lacks what the kind needs.
    #[error("linear: this machine does not run {0:?}")]
    Unavailable(&'static Kind),
    /// Some weights are infinite, NaN, or too large or small for the kind, or there is no memory for a copy.
    #[error("linear: {0:?} cannot stand for these weights, or there is no memory for them")]
    Weights(&'static Kind),
    /// Elements of another type than the kind's.
    #[error("linear: {0:?} was given elements of {name}", name = .1.name())]
    Type(&'static Kind, DType),
    /// No kind was given.
    #[error("linear: no kind to choose from")]
    NoKind,
    /// The kind would borrow the weights: see [`Packed::in_place`].
    #[error("linear: {0:?} holds no copy of the weights")]
    Borrows(&'static Kind),
}

/// A layer of either type.
pub enum AnyLayer {
    F32(Box<dyn Layer<f32>>),
    Bf16(Box<dyn Layer<bf16>>),
}

/// Weights of a linear layer, ready to be used.
pub struct Packed {
    layer: AnyLayer,
    kind: &'static Kind,
    n: usize,
    k: usize,
}

/// Elements that linear layers are computed in.
pub trait LinearElement: Element {
    /// Their type.
    const DTYPE: DType;
    #[doc(hidden)]
    fn pack(kind: &Kind) -> Option<Pack<Self>>;
    #[doc(hidden)]
    fn wrap(layer: Box<dyn Layer<Self>>) -> AnyLayer;
    #[doc(hidden)]
    fn layer(packed: &AnyLayer) -> Option<&dyn Layer<Self>>;
}

macro_rules! linear_element {
    ($t:ty, $variant:ident, $dtype:expr) => {
        impl LinearElement for $t {
            const DTYPE: DType = $dtype;
            fn pack(kind: &Kind) -> Option<Pack<$t>> {
                match kind.pack {
                    AnyPack::$variant(pack) => Some(pack),
                    _ => None,
                }
            }
            fn wrap(layer: Box<dyn Layer<$t>>) -> AnyLayer {
                AnyLayer::$variant(layer)
            }
            fn layer(packed: &AnyLayer) -> Option<&dyn Layer<$t>> {
                match packed {
                    AnyLayer::$variant(layer) => Some(&**layer),
                    _ => None,
                }
            }
        }
    };
}
linear_element!(f32, F32, DType::F32);
linear_element!(bf16, Bf16, DType::BF16);

impl Packed {
    /// Packs `n` rows of `k` weights.
    pub fn pack<T: LinearElement>(
        kind: &'static Kind,
        weight: Rows<T>,
        n: usize,
        k: usize,
    ) -> Result<Packed, LinearError> {
        if kind.in_place() {
            return Err(LinearError::Borrows(kind));
        }
        // SAFETY: the kind keeps nothing of the weights.
        unsafe { Packed::in_place(kind, weight, n, k) }
    }

    /// As [`Packed::pack`], also for kinds that keep the address of the weights instead of a copy.
    ///
    /// # Safety
    /// If the kind is in place, the memory of the weights outlives the result, and nobody writes it during a run.
    pub unsafe fn in_place<T: LinearElement>(
        kind: &'static Kind,
        weight: Rows<T>,
        n: usize,
        k: usize,
    ) -> Result<Packed, LinearError> {
        let pack = T::pack(kind).ok_or(LinearError::Type(kind, T::DTYPE))?;
        if !kind.available() {
            return Err(LinearError::Unavailable(kind));
        }
        weight.check("weight", n, k)?;
        let layer = T::wrap(pack(weight, n, k).ok_or(LinearError::Weights(kind))?);
        Ok(Packed { layer, kind, n, k })
    }

    /// The first of several kinds that can stand for the weights, such as [`super::rank`] gives.
    ///
    /// # Safety
    /// As for [`Packed::in_place`].
    pub unsafe fn first<T: LinearElement>(
        kinds: &[&'static Kind],
        weight: Rows<T>,
        n: usize,
        k: usize,
    ) -> Result<Packed, LinearError> {
        let mut failed = LinearError::NoKind;
        for kind in kinds {
            // SAFETY: handed on.
            match unsafe { Packed::in_place(kind, weight, n, k) } {
                Err(LinearError::Weights(kind)) => failed = LinearError::Weights(kind),
                other => return other,
            }
        }
        Err(failed)
    }

    /// How it is computed.
    pub fn kind(&self) -> &'static Kind {
        self.kind
    }

    /// The size in memory, without what is borrowed.
    pub fn bytes(&self) -> usize {
        match &self.layer {
            AnyLayer::F32(layer) => layer.bytes(),
            AnyLayer::Bf16(layer) => layer.bytes(),
        }
    }

    /// The lengths of a row of the result and of a row of the operand.
    pub fn sizes(&self) -> (usize, usize) {
        (self.n, self.k)
    }

    /// Computes `m` rows of the layer on at most `threads` threads.
    pub fn run<T: LinearElement>(
        &self,
        threads: usize,
        x: Rows<T>,
        m: usize,
        y: RowsMut<T>,
        epilogue: &Epilogue<T>,
    ) -> Result<(), LinearError> {
        let layer = T::layer(&self.layer).ok_or(LinearError::Type(self.kind, T::DTYPE))?;
        x.check("operand", m, self.k)?;
        y.check(m, self.n)?;
        epilogue.check(m, self.n)?;
        if m > 0 && self.n > 0 {
            // SAFETY: checked just now; who packed vouches for borrowed weights.
            unsafe { layer.run(threads, m, x, Sink::new(y, epilogue)) };
        }
        Ok(())
    }
}

impl fmt::Debug for Packed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}×{} weights, {:?}", self.n, self.k, self.kind)
    }
}
