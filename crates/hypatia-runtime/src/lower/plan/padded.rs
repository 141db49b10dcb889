//! Rows that products read begin at multiples of 16 bytes: a value in between whose rows do not is written with longer
//! ones, and others are copied where that pays.
//!
//! Products of 16-bit numbers are several times as fast over such rows. What lies behind the columns of a row is never
//! read: products have the true sizes, and only the distance of rows is another one.

use hypatia_core::ty::DType;

use super::reads::zero;
use crate::error::Result;
use crate::kernels::region::{Read, Region, Rounding};
use crate::operand::dense_strides;
use crate::step::{LinearStep, Operand, Plan, RegionStep, Task, Value, ValueId};

/// Numbers of 16 bits in 16 bytes.
const UNIT: usize = 8;

/// Shorter rows are left as they are.
const COLUMNS: usize = 512;

/// Products of fewer multiplications together are not worth it.
const MULTIPLICATIONS: usize = 1 << 27;

/// Bytes per element that a copy moves, and what writing longer rows costs a kernel: it reads one number at a time.
const COPY: usize = 4;
const WRITE: usize = 2;

/// What a thousand multiplications save, in bytes that memory moves meanwhile, where rows begin at multiples of one, two
/// or four numbers. Measured for the first two on an H200, reckoned for the last.
const SAVED: [usize; 3] = [32, 19, 6];

/// A value whose rows begin anywhere, and the products that gain from others.
struct Odd {
    value: ValueId,
    columns: usize,
    /// Columns of longer rows.
    padded: usize,
    /// Numbers of their steps.
    products: Vec<usize>,
    /// Multiplications of all of them for each element.
    each: usize,
}

/// Gives products rows that begin at multiples of 16 bytes, where that pays.
pub(super) fn pad_rows(plan: &mut Plan) -> Result<()> {
    for value in 0..plan.values.len() {
        let Some(odd) = Odd::of(plan, value) else {
            continue;
        };
        let reads = if odd.pays(WRITE) && odd.can_be_longer(plan) {
            odd.write_longer(plan);
            value
        } else if odd.pays(COPY) {
            odd.copy(plan)?
        } else {
            continue;
        };
        tracing::debug!(value, columns = odd.columns, copied = reads != value, "rows padded");
    }
    Ok(())
}

impl Odd {
    fn of(plan: &Plan, value: ValueId) -> Option<Odd> {
        let Value { dtype, .. } = plan.values[value];
        if !matches!(dtype, DType::BF16 | DType::F16) {
            return None;
        }
        let reading = |step: &Task| match step {
            Task::Linear(l) if l.x.value == value => gain(plan, l),
            _ => None,
        };
        let (columns, _) = plan.steps.iter().find_map(reading)?;
        let steps = plan.steps.iter().enumerate();
        let found: Vec<(usize, usize)> = steps
            .filter_map(|(at, step)| reading(step).map(|(c, each)| (at, c, each)))
            .filter(|(_, c, _)| *c == columns)
            .map(|(at, _, each)| (at, each))
            .collect();
        Some(Odd {
            value,
            columns,
            padded: columns.next_multiple_of(UNIT),
            each: found.iter().map(|(_, each)| each).sum(),
            products: found.into_iter().map(|(at, _)| at).collect(),
        })
        .filter(|odd| odd.each * plan.values[value].numel() >= MULTIPLICATIONS)
    }

    /// Whether the products save twice what so many bytes for each element cost.
    fn pays(&self, bytes: usize) -> bool {
        let saved = SAVED[self.columns.trailing_zeros().min(2) as usize];
        self.each * saved >= 2 * bytes * 1000
    }

    /// Whether the value itself can have longer rows: its step can write them, all that read it can skip what lies
    /// behind them, and nobody else sees it.
    fn can_be_longer(&self, plan: &Plan) -> bool {
        let id = self.value;
        let known = [&plan.inputs, &plan.constants, &plan.outputs].into_iter().flatten();
        if known.into_iter().any(|v| *v == id) || plan.seen.contains_key(&id) {
            return false;
        }
        let reads = |(at, step): (usize, &Task)| {
            let count = step.reads().iter().filter(|v| **v == id).count();
            let whole = |o: &Operand| o.value != id || is_whole(plan, o, self.columns);
            match step {
                _ if step.weights().contains(&id) => false,
                _ if count == 0 => true,
                Task::Linear(_) => count == 1 && self.products.contains(&at),
                Task::Columns(c) => c.inputs.iter().all(whole),
                Task::Rows(r) => r.inputs.iter().all(whole),
                _ => false,
            }
        };
        let mut writers = plan.steps.iter().filter(|s| s.writes().contains(&id));
        let writes = match writers.next() {
            Some(Task::Region(r)) => {
                let bounded = |read: &Read| matches!(read, Read::Plain | Read::Within { .. });
                let bounded = r.reads.iter().all(bounded);
                r.outputs == [id] && r.slices.is_empty() && bounded && r.shape.last() == Some(&self.columns)
            }
            Some(Task::Rows(r)) => !r.rows.op().reduces() && r.shape.last() == Some(&self.columns),
            _ => false,
        };
        writes && plan.steps.iter().enumerate().all(reads)
    }

    /// Lets its step write longer rows.
    fn write_longer(&self, plan: &mut Plan) {
        let id = self.value;
        for step in &mut plan.steps {
            match step {
                Task::Linear(l) if l.x.value == id => self.point(l, id),
                Task::Columns(c) => {
                    let inputs = c.inputs.iter_mut().filter(|o| o.value == id);
                    inputs.for_each(|o| self.spread(o));
                }
                Task::Rows(r) => {
                    let inputs = r.inputs.iter_mut().filter(|o| o.value == id);
                    inputs.for_each(|o| self.spread(o));
                    if r.output == id {
                        plan.values[id].shape = longer(&r.shape, self.padded);
                        r.dense = dense_strides(&plan.values[id].shape);
                    }
                }
                Task::Region(r) if r.outputs == [id] => {
                    self.lengthen(r);
                    plan.values[id].shape = r.shape.clone();
                }
                _ => {}
            }
        }
    }

    /// Makes a region compute what lies behind its rows, too, of zeros.
    fn lengthen(&self, r: &mut RegionStep) {
        let sizes = r.shape.clone();
        r.reads.resize(r.inputs.len(), Read::Plain);
        for ((o, read), dtype) in r.inputs.iter_mut().zip(&mut r.reads).zip(r.region.inputs()) {
            o.shape = longer(&o.shape, self.padded);
            // What repeats along a row is there, and what is read within bounds ends before.
            if *read == Read::Plain && o.strides.last() != Some(&0) {
                *read = Read::Within {
                    before: vec![0; sizes.len()],
                    sizes: sizes.clone(),
                    outside: zero(*dtype),
                };
            }
        }
        r.shape = longer(&r.shape, self.padded);
        r.dense = dense_strides(&r.shape);
    }

    /// Lets the products read a copy with longer rows; its value.
    fn copy(&self, plan: &mut Plan) -> Result<ValueId> {
        let Value { dtype, .. } = plan.values[self.value];
        let rows = plan.values[self.value].numel() / self.columns;
        let shape = vec![rows, self.columns];
        plan.values.push(Value {
            shape: longer(&shape, self.padded),
            dtype,
        });
        let copy = plan.values.len() - 1;
        let mut step = RegionStep {
            region: Region::new(&[dtype], vec![], &[0], Rounding::EveryOp)?,
            inputs: vec![Operand::dense(self.value, &shape)],
            placed: vec![],
            reads: vec![],
            outputs: vec![copy],
            slices: vec![],
            dense: vec![],
            shape,
        };
        self.lengthen(&mut step);
        for at in &self.products {
            if let Task::Linear(l) = &mut plan.steps[*at] {
                self.point(l, copy);
            }
        }
        // What is read by sums, too, need not stay until then.
        for at in self.products[0]..plan.steps.len() {
            let summed = matches!(&plan.steps[at], Task::Columns(c)
                if c.inputs.iter().any(|o| o.value == self.value)
                    && c.inputs.iter().all(|o| o.value != self.value || is_whole(plan, o, self.columns)));
            if let Task::Columns(c) = &mut plan.steps[at]
                && summed
            {
                for o in c.inputs.iter_mut().filter(|o| o.value == self.value) {
                    o.value = copy;
                    self.spread(o);
                }
            }
        }
        plan.steps.insert(self.products[0], Task::Region(Box::new(step)));
        Ok(copy)
    }

    /// Lets a product read longer rows of a value.
    fn point(&self, l: &mut LinearStep, value: ValueId) {
        l.x.value = value;
        l.x_stride = self.padded;
        self.spread(&mut l.x);
    }

    /// An operand on longer rows.
    fn spread(&self, o: &mut Operand) {
        o.strides = dense_strides(&longer(&o.shape, self.padded));
    }
}

/// A shape with another size of its last dimension.
fn longer(shape: &[usize], last: usize) -> Vec<usize> {
    let mut shape = shape.to_vec();
    if let Some(size) = shape.last_mut() {
        *size = last;
    }
    shape
}

/// Whether an operand is a whole value in rows of so many columns.
fn is_whole(plan: &Plan, o: &Operand, columns: usize) -> bool {
    let all = o.shape.iter().product::<usize>() == plan.values[o.value].numel();
    all && o.offset == 0 && o.is_dense() && o.shape.last() == Some(&columns)
}

/// The columns of a product's left factor and the multiplications for each of its elements, if these rows are all that
/// keeps it from being fast.
fn gain(plan: &Plan, l: &LinearStep) -> Option<(usize, usize)> {
    let columns = *l.x.shape.last()?;
    let (n, k) = l.sizes(&plan.values[l.w].shape)?;
    let right = if l.transposed { n } else { k };
    let aligned = |elements: usize| elements.is_multiple_of(UNIT);
    let others = aligned(right) && aligned(n) && (l.r.iter()).all(|(r, stride)| aligned(*stride) && aligned(r.offset));
    let odd = columns >= COLUMNS && !aligned(columns) && l.x_stride == columns && is_whole(plan, &l.x, columns);
    (others && odd && l.columns.is_none() && l.w != l.x.value).then_some((columns, n))
}
