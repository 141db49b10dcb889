//! Where the elements that a step reads are: in a value, from an element on, with strides. Views of a
//! value are other operands on the same value; nothing is copied.

/// A value of a plan, by its place in the list of values.
pub type ValueId = usize;

/// Elements of a value as a step sees them.
#[derive(Debug, Clone, PartialEq)]
pub struct Operand {
    /// The value.
    pub value: ValueId,
    /// Elements before the first.
    pub offset: usize,
    /// Sizes.
    pub shape: Vec<usize>,
    /// Elements from one index to the next, for each dimension.
    pub strides: Vec<isize>,
}

/// Strides of a value without gaps.
pub fn dense_strides(shape: &[usize]) -> Vec<isize> {
    let mut strides = vec![1; shape.len()];
    for i in (1..shape.len()).rev() {
        strides[i - 1] = strides[i] * shape[i].max(1) as isize;
    }
    strides
}

impl Operand {
    /// A whole value, without gaps.
    pub fn dense(value: ValueId, shape: &[usize]) -> Operand {
        Operand {
            value,
            offset: 0,
            shape: shape.to_vec(),
            strides: dense_strides(shape),
        }
    }

    /// So many different elements it has: what is repeated counts once.
    pub fn elements(&self) -> usize {
        let own = self.shape.iter().zip(&self.strides).filter(|(_, stride)| **stride != 0);
        match self.shape.contains(&0) {
            true => 0,
            false => own.map(|(size, _)| size).product(),
        }
    }

    /// True if the elements follow each other without gaps.
    pub fn is_dense(&self) -> bool {
        if self.shape.contains(&0) {
            return true;
        }
        let mut step = 1;
        for (size, stride) in self.shape.iter().zip(&self.strides).rev() {
            if *size > 1 && *stride != step {
                return false;
            }
            step *= *size as isize;
        }
        true
    }

    /// Whether these strides lead to the same elements.
    pub fn lies_as(&self, strides: &[isize]) -> bool {
        let mut steps = self.shape.iter().zip(self.strides.iter().zip(strides));
        let alike = steps.all(|(size, (a, b))| *size <= 1 || a == b);
        strides.len() == self.shape.len() && (alike || self.shape.contains(&0))
    }

    /// Whether the elements of the last dimension follow each other.
    pub fn has_dense_rows(&self) -> bool {
        let last = self.shape.last().zip(self.strides.last());
        last.is_none_or(|(size, stride)| *size <= 1 || *stride == 1)
    }

    /// Whether rows of elements of so many bytes begin at multiples of 16, or cannot: a copy would not do better.
    pub fn has_aligned_rows(&self, bytes: usize) -> bool {
        let whole = |elements: usize| (elements * bytes).is_multiple_of(16);
        let mut steps = self.shape.iter().zip(&self.strides);
        !self.shape.last().is_some_and(|size| whole(*size))
            || whole(self.offset) && steps.all(|(size, step)| *size <= 1 || *step == 1 || whole(step.unsigned_abs()))
    }

    /// Strides of another shape of as many dimensions, without gaps and in the order in which its own lie in memory.
    pub fn strides_like(&self, shape: &[usize]) -> Vec<isize> {
        let order = self.memory_order();
        let lying: Vec<usize> = order.iter().map(|d| shape[*d]).collect();
        let mut strides = vec![0; shape.len()];
        for (dim, stride) in order.iter().zip(dense_strides(&lying)) {
            strides[*dim] = stride;
        }
        strides
    }

    /// The order in which its dimensions lie in memory, the outermost first; those of one element stay where they are.
    fn memory_order(&self) -> Vec<usize> {
        let rank = self.shape.len();
        let movable: Vec<usize> = (0..rank).filter(|d| self.shape[*d] > 1).collect();
        let mut sorted = movable.clone();
        sorted.sort_by_key(|d| (std::cmp::Reverse(self.strides[*d].unsigned_abs()), *d));
        let mut order: Vec<usize> = (0..rank).collect();
        for (place, dim) in movable.iter().zip(sorted) {
            order[*place] = dim;
        }
        order
    }

    /// With dimensions in another order.
    pub fn permuted(&self, order: &[usize]) -> Operand {
        Operand {
            shape: order.iter().map(|d| self.shape[*d]).collect(),
            strides: order.iter().map(|d| self.strides[*d]).collect(),
            ..*self
        }
    }

    /// Windows of a size over a dimension, `step` apart, as rows of a new last dimension.
    pub fn unfolded(&self, dim: usize, size: usize, step: usize) -> Operand {
        let mut windows = self.clone();
        windows.shape[dim] = (self.shape[dim] - size) / step + 1;
        windows.strides[dim] *= step as isize;
        windows.shape.push(size);
        windows.strides.push(self.strides[dim]);
        windows
    }

    /// Every `step`th of the indices of a dimension from `start` on.
    pub fn sliced(&self, dim: usize, start: usize, length: usize, step: usize) -> Operand {
        let mut slice = self.clone();
        if length > 0 {
            slice.offset = slice.offset.wrapping_add_signed(start as isize * self.strides[dim]);
        }
        slice.shape[dim] = length;
        slice.strides[dim] *= step as isize;
        slice
    }

    /// One index of a dimension, which is gone.
    pub fn selected(&self, dim: usize, index: usize) -> Operand {
        let mut one = self.sliced(dim, index, 1, 1);
        one.shape.remove(dim);
        one.strides.remove(dim);
        one
    }

    /// Repeated to a larger shape, as broadcasting does; none if that is not possible.
    pub fn broadcast(&self, shape: &[usize]) -> Option<Operand> {
        let extra = shape.len().checked_sub(self.shape.len())?;
        let mut strides = vec![0; shape.len()];
        for (i, size) in self.shape.iter().enumerate() {
            if *size == shape[i + extra] {
                strides[i + extra] = if *size == 1 { 0 } else { self.strides[i] };
            } else if *size != 1 {
                return None;
            }
        }
        Some(Operand {
            value: self.value,
            offset: self.offset,
            shape: shape.to_vec(),
            strides,
        })
    }

    /// The same elements in another shape; none if they would have to be copied.
    pub fn reshaped(&self, shape: &[usize]) -> Option<Operand> {
        let count: usize = self.shape.iter().product();
        if count != shape.iter().product::<usize>() {
            return None;
        }
        let mut view = Operand {
            value: self.value,
            offset: self.offset,
            shape: shape.to_vec(),
            strides: dense_strides(shape),
        };
        if count == 0 || self.is_dense() {
            return Some(view);
        }
        // Dimensions that lie in memory like one make a run, which is cut anew.
        let mut runs: Vec<(usize, isize)> = vec![];
        for (size, stride) in self.shape.iter().zip(&self.strides).filter(|(s, _)| **s != 1) {
            match runs.last_mut() {
                Some((length, step)) if *step == stride * *size as isize => {
                    (*length, *step) = (*length * size, *stride)
                }
                _ => runs.push((*size, *stride)),
            }
        }
        let (mut left, mut stride) = runs.pop().unwrap_or((1, 1));
        for (size, place) in shape.iter().zip(&mut view.strides).rev() {
            if *size > 1 && left == 1 {
                (left, stride) = runs.pop()?;
            }
            if !left.is_multiple_of(*size) {
                return None;
            }
            *place = stride;
            stride *= *size as isize;
            left /= size;
        }
        Some(view)
    }

    /// How many rows of the last dimension there are and how far apart, if that is one distance and rows
    /// have no gaps.
    pub fn rows(&self) -> Option<(usize, usize)> {
        let (columns, leading) = self.shape.split_last()?;
        let count = leading.iter().product();
        if *columns > 1 && *self.strides.last()? != 1 {
            return None;
        }
        if count <= 1 || *columns == 0 {
            return Some((count, *columns));
        }
        let mut distance: Option<isize> = None;
        let mut step = 0;
        for (size, stride) in leading.iter().zip(&self.strides).rev() {
            if *size == 1 {
                continue;
            }
            match distance {
                None => distance = Some(*stride),
                Some(_) if *stride == step => {}
                Some(_) => return None,
            }
            step = stride * *size as isize;
        }
        Some((count, usize::try_from(distance?).ok()?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The places of all elements, in order.
    fn places(o: &Operand) -> Vec<isize> {
        let count: usize = o.shape.iter().product();
        (0..count)
            .map(|mut i| {
                let mut at = o.offset as isize;
                for (size, stride) in o.shape.iter().zip(&o.strides).rev() {
                    at += (i % size) as isize * stride;
                    i /= size;
                }
                at
            })
            .collect()
    }

    #[test]
    fn rows_that_begin_anywhere_are_not_aligned() {
        let rows = |offset, strides: [isize; 4], last| Operand {
            value: 0,
            offset,
            shape: vec![1, 4, 1, last],
            strides: strides.to_vec(),
        };
        assert!(rows(16, [48, 4, 48, 1], 4).has_aligned_rows(4));
        // A part of a merged product.
        assert!(!rows(17, [49, 4, 49, 1], 4).has_aligned_rows(4));
        // No copy would change it.
        assert!(rows(17, [51, 3, 51, 1], 3).has_aligned_rows(4));
    }

    #[test]
    fn a_reshaped_view_has_the_same_elements_in_the_same_order() {
        let base = Operand::dense(0, &[4, 3, 6, 5]);
        let views = [
            base.clone(),
            base.permuted(&[0, 2, 1, 3]),
            base.permuted(&[1, 0, 2, 3]),
            base.permuted(&[3, 2, 1, 0]),
            base.sliced(3, 1, 3, 1),
            base.sliced(2, 0, 3, 2),
            base.sliced(0, 1, 1, 1),
            base.selected(1, 2),
            base.selected(1, 2).broadcast(&[7, 4, 6, 5]).unwrap(),
            base.sliced(1, 1, 2, 1).sliced(0, 0, 1, 1),
        ];
        let mut seen = 0;
        for view in &views {
            let count: usize = view.shape.iter().product();
            for a in 1..=count {
                for b in (1..=count / a).filter(|b| count.is_multiple_of(a * b)) {
                    if !count.is_multiple_of(a) {
                        continue;
                    }
                    for shape in [
                        vec![a, b, count / a / b],
                        vec![a, 1, count / a],
                        vec![1, a, count / a, 1],
                    ] {
                        if let Some(new) = view.reshaped(&shape) {
                            assert_eq!(places(&new), places(view), "{view:?} as {shape:?}");
                            seen += 1;
                        }
                    }
                }
            }
            assert_eq!(view.reshaped(&view.shape).map(|v| places(&v)), Some(places(view)));
        }
        assert!(seen > 100, "{seen}");
    }

    #[test]
    fn heads_are_cut_from_merged_rows_without_a_copy() {
        // Rows of q, k and v side by side: k, as heads.
        let merged = Operand::dense(0, &[2, 5, 36]);
        let k = merged.sliced(2, 12, 12, 1);
        assert_eq!(k.rows(), Some((10, 36)));
        let heads = k.reshaped(&[2, 5, 3, 4]).unwrap().permuted(&[0, 2, 1, 3]);
        assert_eq!((heads.offset, &heads.strides[..]), (12, &[180, 4, 36, 1][..]));
        assert_eq!(heads.reshaped(&[2, 3, 20]), None);
        assert_eq!(heads.rows(), None);
        assert_eq!(
            heads.permuted(&[0, 2, 1, 3]).reshaped(&[10, 12]).unwrap().rows(),
            Some((10, 36))
        );
    }

    #[test]
    fn rows_of_few_elements() {
        assert_eq!(Operand::dense(0, &[7]).rows(), Some((1, 7)));
        assert_eq!(Operand::dense(0, &[]).rows(), None);
        assert_eq!(Operand::dense(0, &[3, 1]).rows(), Some((3, 1)));
        assert_eq!(Operand::dense(0, &[3, 4]).permuted(&[1, 0]).rows(), None);
    }
}
