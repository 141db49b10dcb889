//! Memory of weights that were split for products of pieces, from torch's allocator.

use std::collections::HashMap;

use hypatia_core::ty::DType;
use hypatia_cuda::{Error, Result};
use pyo3::prelude::*;

use crate::tensor::Exchange;

type Pieces = HashMap<u64, (Py<PyAny>, u64)>;

/// Pieces by the address of the weight that they are of, which lives as long.
#[derive(Default)]
pub struct SplitWeights {
    pieces: Pieces,
    /// Those of the same plan at other sizes.
    shared: Pieces,
    /// Bytes of those that were made for this plan.
    bytes: usize,
}

impl SplitWeights {
    /// None yet, but those of another plan can be used.
    pub fn like(py: Python<'_>, other: Option<&SplitWeights>) -> SplitWeights {
        let shared = other.iter().flat_map(|o| &o.pieces);
        SplitWeights {
            shared: shared
                .map(|(at, (object, to))| (*at, (object.clone_ref(py), *to)))
                .collect(),
            ..SplitWeights::default()
        }
    }

    /// Bytes that were made for this plan.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Forgets what only others use.
    pub fn settled(mut self) -> SplitWeights {
        self.shared.clear();
        self
    }

    /// Room for the pieces of a weight, and whether they are there already. At most so many bytes are made.
    pub fn room(
        &mut self,
        py: Python<'_>,
        (exchange, gpu): (Exchange, u32),
        most: Option<usize>,
        weight: u64,
        bytes: usize,
    ) -> Result<(u64, bool)> {
        if let Some((_, address)) = self.pieces.get(&weight) {
            return Ok((*address, true));
        }
        if let Some((object, address)) = self.shared.get(&weight) {
            let (object, address) = (object.clone_ref(py), *address);
            self.pieces.insert(weight, (object, address));
            return Ok((address, true));
        }
        if most.is_some_and(|most| self.bytes + bytes > most) {
            return Err(Error::Memory("no more copies of weights are allowed".into()));
        }
        let made = exchange.allocate(DType::U8, &[bytes as i64], Some(gpu));
        let made = made.and_then(|fresh| {
            let address = fresh.data() as u64;
            Ok((fresh.into_object(py)?.unbind(), address))
        });
        let (object, address) = made.map_err(|e| Error::Memory(e.to_string()))?;
        self.bytes += bytes;
        self.pieces.insert(weight, (object, address));
        Ok((address, false))
    }
}
