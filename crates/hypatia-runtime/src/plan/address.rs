//! Where values are during a call.

use super::chunks::Chunks;
use super::{Made, Memory, Operand, Place, Plan, ValueId, broken};
use crate::arena::{Block, place_in};
use crate::error::Result;

/// Where something starts during a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Address {
    /// Always there.
    Fixed(*mut u8),
    /// Bytes into one of the blocks of a call: that of the values in between, the inputs, the results.
    Within { block: usize, offset: usize },
}

// SAFETY: only an address; whoever uses it answers for the memory.
unsafe impl Send for Address {}
// SAFETY: as above.
unsafe impl Sync for Address {}

impl Address {
    /// The address, given where the blocks of a call start.
    #[inline]
    pub(super) fn of(self, blocks: &[*mut u8]) -> *mut u8 {
        match self {
            Address::Fixed(start) => start,
            Address::Within { block, offset } => blocks[block].wrapping_add(offset),
        }
    }

    fn further(self, bytes: usize) -> Address {
        match self {
            Address::Fixed(start) => Address::Fixed(start.wrapping_add(bytes)),
            Address::Within { block, offset } => Address::Within {
                block,
                offset: offset.wrapping_add(bytes),
            },
        }
    }
}

/// The addresses of all values of a plan.
pub(super) struct Addresses {
    of: Vec<Option<Address>>,
    /// Bytes of the block of values in between.
    pub(super) bytes: usize,
}

/// Where values are during a call, as far as that does not depend on constants.
pub(super) struct Layout {
    places: Vec<Place>,
    /// Values in between, by their number: the result whose memory they are in, if any, and bytes from its start.
    between: Vec<(ValueId, Option<usize>, usize)>,
    /// Bytes of the block of values in between.
    pub(super) bytes: usize,
}

impl Plan {
    /// Gives every value a place. Values in between lie in the memory of results that are not written yet, where they
    /// fit, and in a block of their own.
    pub(super) fn layout(&self, chunks: &Chunks, made: Option<&Made>) -> Result<Layout> {
        let (places, ids, lives) = self.lives(chunks, made)?;
        let results: Vec<Block> = (self.outputs.iter())
            .map(|id| Block {
                bytes: chunks.spare(self, *id),
                until: (self.steps.iter())
                    .position(|step| step.writes().contains(id))
                    .unwrap_or(0),
            })
            .collect();
        let (found, bytes) = place_in(&results, &lives);
        let between = ids.into_iter().zip(found).map(|(id, (block, at))| (id, block, at));
        Ok(Layout {
            places,
            between: between.collect(),
            bytes,
        })
    }

    /// The addresses of all values, given those of constants. What torch makes has blocks of its own behind the others.
    pub(super) fn addresses(&self, constants: &[Memory], chunks: &Chunks, made: &Made) -> Result<Addresses> {
        let layout = self.layout(chunks, Some(made))?;
        let (input, output) = (1, 1 + self.inputs.len());
        let within = |block, offset| Some(Address::Within { block, offset });
        let address = |place: &Place| match *place {
            Place::Input(i) => within(input + i, 0),
            Place::Output(i) => within(output + i, 0),
            Place::Constant(i) => Some(Address::Fixed(constants[i].0)),
            Place::Arena(_) | Place::Nowhere => None,
        };
        let mut of: Vec<Option<Address>> = layout.places.iter().map(address).collect();
        for (id, block, offset) in layout.between {
            of[id] = within(block.map_or(0, |b| output + b), offset);
        }
        let behind = output + self.outputs.len();
        for (id, address) in of.iter_mut().enumerate() {
            *address = made.number(id).map_or(*address, |number| within(behind + number, 0));
        }
        let bytes = layout.bytes;
        Ok(Addresses { of, bytes })
    }
}

impl Addresses {
    /// Where a value is.
    pub(super) fn value(&self, id: ValueId) -> Result<Address> {
        let known = self.of.get(id).copied().flatten();
        known.ok_or_else(|| broken(format!("value {id} is nowhere")))
    }

    /// Where an operand starts, whose elements have so many bytes.
    pub(super) fn operand(&self, operand: &Operand, size: usize) -> Result<Address> {
        Ok(self.value(operand.value)?.further(operand.offset.wrapping_mul(size)))
    }
}
