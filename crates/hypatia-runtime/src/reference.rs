//! The reference device: every step of a plan in float64, by plain loops and by the op table's own evaluation.
//!
//! It is slow and there to be right: what another device computes can be compared with it, and it is the smallest
//! example of a device. Values in between are never rounded; results are, once. Whole numbers are exact up to 2⁵³.

use std::sync::Arc;

use half::{bf16, f16};
use hypatia_core::attr::Attr;
use hypatia_core::dim::Dim;
use hypatia_core::eval::{Arr, Mode, Val, for_each_index};
use hypatia_core::ir::define;
use hypatia_core::ops::op_id;
use hypatia_core::ty::{DType, TensorType, Ty};

use crate::device::{Abilities, Device};
use crate::error::{Error, Result};
use crate::kernels::call::Call;
use crate::kernels::region::{Instruction, Op, Read, Region, Scalar};
use crate::kernels::rowwise::RowOp;
use crate::plan::Memory;
use crate::step::{
    AttentionStep, BatchStep, ColumnKind, ColumnStep, DepthwiseStep, LinearStep, NormStep, Operand, Plan, Pool,
    RegionStep, RowStep, Task, ValueId, WindowOp,
};

/// The plainest abilities: products alone, of any values, and nothing that saves time.
pub const ABILITIES: Abilities = Abilities {
    name: "reference",
    products: &[DType::F16, DType::BF16, DType::F32, DType::F64],
    live_weights: true,
    rows_by_matrix: true,
    empty_products: true,
    ..Abilities::NONE
};

/// The device. It runs plans that were made for other devices, too, as far as they call no torch and keep no masks.
#[derive(Debug, Clone, Copy)]
pub struct Reference;

/// A plan with the numbers of its constants.
#[derive(Debug)]
pub struct Bound {
    plan: Arc<Plan>,
    constants: Vec<Vec<f64>>,
}

impl Device for Reference {
    type Address = Memory;
    type Setting<'a> = ();
    type Queue = ();
    type Bound = Bound;
    type Error = Error;

    fn abilities(&self) -> &'static Abilities {
        &ABILITIES
    }

    /// Constants are read here and not needed later.
    unsafe fn bind(&self, plan: Arc<Plan>, constants: &[Memory], calls: Vec<Box<dyn Call>>, (): ()) -> Result<Bound> {
        if let Some(step) = plan.steps.iter().find(|s| !is_served(s)) {
            return Err(unsupported(format!("the reference device has no {}", step.name())));
        }
        if constants.len() != plan.constants.len() || !calls.is_empty() {
            return Err(Error::Malformed("plan: other constants or calls".into()));
        }
        // SAFETY: promised by the caller.
        let constants = unsafe { read_all(&plan, &plan.constants, constants) };
        Ok(Bound { plan, constants })
    }

    unsafe fn run(&self, bound: &Bound, (): (), inputs: &[Memory], outputs: &[Memory]) -> Result<()> {
        let plan = &*bound.plan;
        if inputs.len() != plan.inputs.len() || outputs.len() != plan.outputs.len() {
            return Err(Error::Malformed("plan: another number of inputs or outputs".into()));
        }
        let mut values: Vec<Vec<f64>> = plan.values.iter().map(|v| vec![f64::NAN; v.numel()]).collect();
        for (id, constant) in plan.constants.iter().zip(&bound.constants) {
            values[*id].clone_from(constant);
        }
        // SAFETY: promised by the caller.
        let given = unsafe { read_all(plan, &plan.inputs, inputs) };
        for (id, input) in plan.inputs.iter().zip(given) {
            values[*id] = input;
        }
        let mut call = Running { plan, values };
        plan.steps.iter().try_for_each(|step| call.step(step))?;
        for (id, memory) in plan.outputs.iter().zip(outputs) {
            // SAFETY: promised by the caller.
            unsafe { write(&call.values[*id], plan.values[*id].dtype, *memory) };
        }
        Ok(())
    }
}

fn unsupported(why: impl Into<String>) -> Error {
    Error::Unsupported(why.into())
}

fn is_served(step: &Task) -> bool {
    match step {
        Task::Linear(l) => l.gradient.keeps.is_none() && l.gradient.masked.is_none() && !l.multiplies,
        Task::Region(r) => r.placed.is_empty(),
        Task::Torch(_) => false,
        _ => true,
    }
}

/// A call: the numbers of all values so far.
struct Running<'a> {
    plan: &'a Plan,
    values: Vec<Vec<f64>>,
}

/// An array and its element type.
type Typed = (Arr, DType);

impl Running<'_> {
    fn step(&mut self, step: &Task) -> Result<()> {
        match step {
            Task::Linear(l) => self.linear(l),
            Task::Batch(b) => self.batch(b),
            Task::Region(r) => self.region(r),
            Task::Rows(r) => self.rows(r),
            Task::Columns(c) => self.columns(c),
            Task::Norm(n) => self.norm(n),
            Task::Depthwise(d) => self.depthwise(d),
            Task::Attention(a) => self.attention(a),
            Task::Torch(t) => Err(unsupported(format!("the reference device has no {}", t.name))),
        }
    }

    /// What an operand sees.
    fn read(&self, o: &Operand) -> Typed {
        let (data, dtype) = (&self.values[o.value], self.plan.values[o.value].dtype);
        (Arr::from_fn(o.shape.clone(), |i| data[place(o, i)]), dtype)
    }

    /// What a region sees of one of its inputs.
    fn read_as(&self, r: &RegionStep, input: usize) -> Typed {
        let o = &r.inputs[input];
        let element = |i: &[usize]| self.element_read(r, input, i);
        (Arr::from_fn(o.shape.clone(), element), self.plan.values[o.value].dtype)
    }

    fn element_read(&self, r: &RegionStep, input: usize, i: &[usize]) -> f64 {
        let o = &r.inputs[input];
        let data = &self.values[o.value];
        let inside = |before: &[usize], sizes: &[usize]| {
            let moved = i.iter().zip(before).map(|(i, b)| i.checked_sub(*b));
            let inside = moved.collect::<Option<Vec<_>>>();
            inside.filter(|i| i.iter().zip(sizes).all(|(i, n)| i < n))
        };
        match r.reads.get(input) {
            None | Some(Read::Plain) => data[place(o, i)],
            Some(Read::Within { before, sizes, outside }) => match (inside(before, sizes), outside) {
                (Some(i), _) => data[place(o, &i)],
                (None, Scalar::Float(x)) => *x,
                (None, Scalar::Int(i)) => *i as f64,
            },
            Some(Read::Beside { before, sizes, other }) => match inside(before, sizes) {
                Some(i) => data[place(o, &i)],
                None => self.element_read(r, *other, i),
            },
            Some(Read::Rolled { by }) => {
                let rolled = i.iter().zip(by).zip(&o.shape).map(|((i, by), n)| (i + by) % n);
                data[place(o, &rolled.collect::<Vec<_>>())]
            }
            Some(Read::At { index, stride, size }) => {
                let by = &r.inputs[*index];
                match self.values[by.value][place(by, i)] {
                    at if at >= 0.0 && at < *size as f64 => data[place(o, i).wrapping_add_signed(at as isize * stride)],
                    _ => f64::NAN,
                }
            }
        }
    }

    fn write(&mut self, o: &Operand, array: &Arr) {
        let mut elements = array.data.iter();
        let data = &mut self.values[o.value];
        for_each_index(&o.shape, &mut vec![0; o.shape.len()], &mut |i| {
            if let Some(element) = elements.next() {
                data[place(o, i)] = *element;
            }
        });
    }

    fn linear(&mut self, l: &LinearStep) -> Result<()> {
        let weight = &self.plan.values[l.w];
        let sizes = l.sizes(&weight.shape);
        let (n, k) = sizes.ok_or_else(|| unsupported("a weight that is no matrix"))?;
        let (x, w, columns) = (&self.values[l.x.value], &self.values[l.w], l.part(n));
        let (row_step, term_step) = if l.gradient.x_transposed {
            (1, l.x_stride)
        } else {
            (l.x_stride, 1)
        };
        let left = |row: usize, term: usize| x[l.x.offset + row * row_step + term * term_step];
        let (from_term, from_column) = if l.transposed { (n, 1) } else { (1, k) };
        let right = |term: usize, column: usize| w[term * from_term + column * from_column];
        let product = Arr::from_fn(vec![l.m, columns.len()], |at| {
            let (row, column) = (at[0], columns.start + at[1]);
            let bias = l.b.map_or(0.0, |b| self.values[b][column]);
            (0..k).map(|term| left(row, term) * right(term, column)).sum::<f64>() + bias
        });
        let sums = Arr::from_fn(vec![l.m], |at| (0..k).map(|term| left(at[0], term)).sum());
        let mut y = match l.activation.name() {
            Some(name) => eval(name, &[array(&(product, weight.dtype))])?.remove(0),
            None => product,
        };
        if let Some((r, stride)) = &l.r {
            for (at, element) in y.data.iter_mut().enumerate() {
                let (row, column) = (at / columns.len(), at % columns.len());
                *element += self.values[r.value][r.offset + row * stride + column];
            }
        }
        self.values[l.y] = y.data;
        if let Some(id) = l.gradient.sums {
            self.values[id] = sums.data;
        }
        Ok(())
    }

    fn batch(&mut self, b: &BatchStep) -> Result<()> {
        let factors = [array(&self.read(&b.left)), array(&self.read(&b.right))];
        self.values[b.y] = eval("matmul", &factors)?.remove(0).data;
        Ok(())
    }

    fn region(&mut self, r: &RegionStep) -> Result<()> {
        let inputs = (0..r.inputs.len()).map(|i| self.read_as(r, i)).collect();
        let results = region(&r.region, inputs, &r.shape)?;
        for (at, (result, _)) in results.iter().enumerate() {
            match r.slices.get(at) {
                Some(slice) => self.write(slice, result),
                None => self.values[r.outputs[at]].clone_from(&result.data),
            }
        }
        Ok(())
    }

    fn rows(&mut self, r: &RowStep) -> Result<()> {
        let mut inputs: Vec<Typed> = r.inputs.iter().map(|o| self.read(o)).collect();
        let before = r.rows.prologue().map_or(1, |region| region.inputs().len());
        let after = inputs.split_off(before.min(inputs.len()));
        let mut x = match r.rows.prologue() {
            Some(prologue) => region(prologue, inputs, &r.shape)?,
            None => inputs,
        };
        if x.len() != 1 || (r.rows.op().reduces() && r.rows.epilogue().is_some()) {
            return Err(unsupported("rows with several results"));
        }
        let x = array(&x.remove(0));
        let (last, keep) = (attr(Attr::int(-1)), attr(Attr::Bool(false)));
        let none = || attr(Attr::None);
        let reduced = &r.shape[r.shape.len() - r.reduced..];
        let sizes = ints(reduced.iter().map(|s| *s as i64));
        let dims = ints((0..r.reduced).map(|d| d as i64 - r.reduced as i64));
        let number = |v: f64| attr(Attr::float(v));
        let mut y = match r.rows.op() {
            RowOp::Softmax { .. } => eval("softmax", &[x, last])?,
            RowOp::LogSoftmax => eval("log_softmax", &[x, last])?,
            RowOp::LayerNorm { eps } => eval("layer_norm", &[x, sizes, none(), none(), number(eps)])?,
            RowOp::RmsNorm { eps } => eval("rms_norm", &[x, sizes, none(), number(eps)])?,
            RowOp::Sum => eval("sum", &[x, dims, keep])?,
            RowOp::Mean => eval("mean", &[x, dims, keep])?,
            RowOp::Amax => eval("amax", &[x, dims, keep])?,
        };
        let mut y = y.remove(0);
        if let Some(epilogue) = r.rows.epilogue() {
            let inputs = [vec![(y, epilogue.inputs()[0])], after].concat();
            y = region(epilogue, inputs, &r.shape)?.remove(0).0;
        }
        let output = Operand {
            value: r.output,
            offset: 0,
            shape: y.shape.clone(),
            strides: r.dense.clone(),
        };
        self.write(&output, &y);
        Ok(())
    }

    fn columns(&mut self, c: &ColumnStep) -> Result<()> {
        let rank = c.shape.len() as i64;
        let first = || ints((0..c.rows as i64).map(|d| d - rank));
        let keep = || attr(Attr::Bool(false));
        let inputs = c.inputs.iter().map(|o| self.read(o)).collect();
        let mut outputs = c.outputs.iter();
        for (x, kind) in region(&c.region, inputs, &c.shape)?.iter().zip(&c.kinds) {
            let mean = || eval("mean", &[array(x), first(), keep()]);
            let mut results = match kind {
                ColumnKind::Sum => eval("sum", &[array(x), first(), keep()])?,
                ColumnKind::Mean => mean()?,
                // The region squares.
                ColumnKind::Norm => {
                    let sums = eval("sum", &[array(x), first(), keep()])?.remove(0);
                    eval("sqrt", &[array(&(sums, x.1))])?
                }
                ColumnKind::Moments { correction } => {
                    let correction = attr(Attr::float(f64::from(*correction)));
                    let spread = eval("var", &[array(x), first(), correction, keep()])?;
                    [mean()?, spread].concat()
                }
            };
            for (result, output) in results.drain(..).zip(&mut outputs) {
                let dtype = self.plan.values[*output].dtype;
                self.values[*output] = result.data.into_iter().map(|v| dtype.round(v)).collect();
            }
        }
        Ok(())
    }

    fn depthwise(&mut self, d: &DepthwiseStep) -> Result<()> {
        let numbers = |list: [usize; 2]| ints(list.map(|n| n as i64));
        let [size, stride, padding, dilation] =
            [d.window.size, d.window.stride, d.window.padding, d.window.dilation].map(numbers);
        // As the op table has them: channels first.
        let x = self.read(&d.x.permuted(&[0, 3, 1, 2]));
        let image = array(&x);
        let up = d.window.places([d.x.shape[1], d.x.shape[2]]) != d.shape[1..3];
        let (up, flag) = (attr(Attr::Bool(up)), |flag: bool| attr(Attr::Bool(flag)));
        let (name, operands) = match d.op {
            WindowOp::Conv(w) => {
                let ([kh, kw], channels) = (d.window.size, d.shape[3]);
                let weight = self.read(&Operand::dense(w, &[kh, kw, channels, 1]).permuted(&[2, 3, 0, 1]));
                let pads = [1, 0].map(|i| {
                    let window = &d.window;
                    let reach = (d.shape[1 + i] - 1) * window.stride[i] + (window.size[i] - 1) * window.dilation[i] + 1;
                    let (before, pixels) = (window.padding[i] as i64, x.0.shape[2 + i] as i64);
                    [before, reach as i64 - before - pixels]
                });
                let padded = eval("pad", &[image, ints(pads.concat()), attr(Attr::float(0.0))])?.remove(0);
                let (none, groups) = (attr(Attr::None), attr(Attr::int(channels as i64)));
                let image = array(&(padded, x.1));
                let operands = vec![image, array(&weight), none, stride, numbers([0, 0]), dilation, groups];
                ("conv", operands)
            }
            WindowOp::Pool(Pool::Max) => ("max_pool2d", vec![image, size, stride, padding, dilation, up]),
            WindowOp::Pool(Pool::Mean { counts_padding }) => {
                let operands = vec![image, size, stride, padding, up, flag(counts_padding)];
                ("avg_pool2d", operands)
            }
        };
        let made = array(&(eval(name, &operands)?.remove(0), x.1));
        let last = eval("permute", &[made, ints([0, 2, 3, 1])])?.remove(0);
        let given = |o: &Option<Operand>| o.as_ref().map_or_else(|| (last.clone(), x.1), |o| self.read(o));
        let inputs = d.inputs.iter().map(given).collect();
        self.values[d.output] = region(&d.after, inputs, &d.shape)?.remove(0).0.data;
        Ok(())
    }

    fn attention(&mut self, a: &AttentionStep) -> Result<()> {
        // As the op table has it: a head of its own for each query, which sees the keys of its group.
        let &[batch, groups, heads, width] = &a.q.shape[..] else {
            return Err(unsupported("attention of other dimensions"));
        };
        let as_rows = |(values, dtype): Typed, rows: usize| {
            let shape = vec![
                batch,
                groups * heads,
                rows,
                values.data.len() / (batch * groups * heads * rows).max(1),
            ];
            array(&(Arr::new(shape, values.data), dtype))
        };
        let keys = a.k.shape[2];
        let shared = |o: &Operand| {
            let mut repeated = o.clone();
            repeated.shape.insert(2, heads);
            repeated.strides.insert(2, 0);
            as_rows(self.read(&repeated), keys)
        };
        let mask = a.mask.as_ref().map_or(attr(Attr::None), |m| as_rows(self.read(m), 1));
        let (flag, scale) = (attr(Attr::Bool(false)), attr(Attr::float(a.scale)));
        let operands = [
            as_rows(self.read(&a.q), 1),
            shared(&a.k),
            shared(&a.v),
            mask,
            flag,
            scale,
        ];
        debug_assert_eq!(self.plan.values[a.y].numel(), batch * groups * heads * width);
        self.values[a.y] = eval("attention", &operands)?.remove(0).data;
        Ok(())
    }

    fn norm(&mut self, n: &NormStep) -> Result<()> {
        // Rows, statistics and parameters, as their values lie.
        let shaped = |id: &ValueId, shape: &[usize]| {
            let value = Arr::new(shape.to_vec(), self.values[*id].clone());
            array(&(value, self.plan.values[*id].dtype))
        };
        let rows = |id: &ValueId| shaped(id, &[n.rows, n.width]);
        let one = |id: &ValueId| shaped(id, &[n.rows, 1]);
        let all = |id: &ValueId| shaped(id, &[n.width]);
        let width = ints([n.width as i64]);
        let eps = attr(Attr::float(n.eps.unwrap_or_default()));
        let (name, operands) = match (n.centered, n.eps.is_some(), &n.reads[..]) {
            (true, true, [x, w, b]) => ("native_layer_norm", vec![rows(x), width, all(w), all(b), eps]),
            (false, true, [x, w]) => ("native_rms_norm", vec![rows(x), width, all(w), eps]),
            (true, false, [g, x, mean, factor, w]) => {
                // Of the bias only the shape is asked, which is the weight's.
                let operands = vec![rows(g), rows(x), width, one(mean), one(factor), all(w), all(w)];
                ("layer_norm_backward", operands)
            }
            (false, false, [g, x, factor, w]) => {
                let operands = vec![rows(g), rows(x), width, one(factor), all(w)];
                ("rms_norm_backward", operands)
            }
            _ => return Err(unsupported("a norm of other operands")),
        };
        for (id, result) in n.writes.iter().zip(eval(name, &operands)?) {
            self.values[*id] = result.data;
        }
        Ok(())
    }
}

/// The element of an operand at an index.
fn place(o: &Operand, index: &[usize]) -> usize {
    let steps = index.iter().zip(&o.strides);
    steps.fold(o.offset, |at, (i, stride)| at.wrapping_add_signed(*i as isize * stride))
}

/// The outputs of a region whose inputs have this shape.
fn region(region: &Region, inputs: Vec<Typed>, shape: &[usize]) -> Result<Vec<Typed>> {
    let meaning = region.meaning();
    let mut values = inputs;
    for (Instruction { op, args }, dtype) in meaning.instructions.iter().zip(&meaning.types[region.inputs().len()..]) {
        let value = |i: usize| array(&values[args[i]]);
        let mut results = match op {
            Op::Constant(Scalar::Float(v), _) => vec![Arr::from_fn(shape.to_vec(), |_| *v)],
            Op::Constant(Scalar::Int(v), d) => vec![Arr::from_fn(shape.to_vec(), |_| d.round(*v as f64))],
            Op::Cast(to) => eval("cast", &[value(0), attr(Attr::DType(*to))])?,
            // In the table the numbers of these two are known beforehand.
            Op::MaskedFill => eval("where", &[value(1), value(2), value(0)])?,
            Op::Clamp => {
                let low = eval("maximum", &[value(0), value(1)])?.remove(0);
                eval("minimum", &[array(&(low, *dtype)), value(2)])?
            }
            other => {
                let name = other.name().ok_or_else(|| unsupported(format!("{other:?}")))?;
                eval(name, &(0..args.len()).map(value).collect::<Vec<_>>())?
            }
        };
        values.push((results.remove(0), *dtype));
    }
    Ok(meaning.outputs.iter().map(|o| values[*o].clone()).collect())
}

// The op table's evaluation.

fn array((array, dtype): &Typed) -> (Val, Ty) {
    let shape: Vec<Dim> = array.shape.iter().map(|s| Dim::Const(*s as i64)).collect();
    (Val::arr(array.clone()), Ty::Tensor(TensorType::new(shape, *dtype)))
}

fn attr(attr: Attr) -> (Val, Ty) {
    (Val::Attr(attr.clone()), Ty::Attr(attr))
}

fn ints(numbers: impl IntoIterator<Item = i64>) -> (Val, Ty) {
    attr(Attr::ints(&numbers.into_iter().collect::<Vec<_>>()))
}

/// What a row of the op table makes of operands, in real numbers: one array, or several.
fn eval(name: &str, operands: &[(Val, Ty)]) -> Result<Vec<Arr>> {
    let (values, types): (Vec<Val>, Vec<Ty>) = operands.iter().cloned().unzip();
    let results = match define::eval(op_id(name), &values, &types, Mode::Real)? {
        Val::Tuple(items) => items,
        one => vec![one],
    };
    let arrays = results.into_iter().map(|result| match result {
        Val::Arr(a) => Ok(Arc::unwrap_or_clone(a)),
        _ => Err(unsupported(format!("{name} that gives no tensor"))),
    });
    arrays.collect()
}

// Memory.

/// # Safety
/// Each memory holds its value, densely.
unsafe fn read_all(plan: &Plan, ids: &[ValueId], memories: &[Memory]) -> Vec<Vec<f64>> {
    let values = ids.iter().map(|id| &plan.values[*id]);
    // SAFETY: by the caller.
    let read = values
        .zip(memories)
        .map(|(v, memory)| unsafe { read(v.numel(), v.dtype, *memory) });
    read.collect()
}

/// # Safety
/// The memory holds so many elements.
unsafe fn read(count: usize, dtype: DType, memory: Memory) -> Vec<f64> {
    let element = |i: usize| {
        let at = memory.0.wrapping_add(i * dtype.size());
        // SAFETY: by the caller.
        unsafe {
            match dtype {
                DType::Bool | DType::U8 => f64::from(*at),
                DType::I8 => f64::from(at.cast::<i8>().read_unaligned()),
                DType::I16 => f64::from(at.cast::<i16>().read_unaligned()),
                DType::I32 => f64::from(at.cast::<i32>().read_unaligned()),
                DType::I64 => at.cast::<i64>().read_unaligned() as f64,
                DType::F16 => at.cast::<f16>().read_unaligned().to_f64(),
                DType::BF16 => at.cast::<bf16>().read_unaligned().to_f64(),
                DType::F32 => f64::from(at.cast::<f32>().read_unaligned()),
                DType::F64 => at.cast::<f64>().read_unaligned(),
                // Only torch computes with those.
                DType::C64 | DType::C128 => f64::NAN,
            }
        }
    };
    (0..count).map(element).collect()
}

/// # Safety
/// The memory has room for the elements, and nobody else uses it.
unsafe fn write(data: &[f64], dtype: DType, memory: Memory) {
    for (i, element) in data.iter().enumerate() {
        let at = memory.0.wrapping_add(i * dtype.size());
        let v = dtype.round(*element);
        // SAFETY: by the caller.
        unsafe {
            match dtype {
                DType::Bool | DType::U8 => *at = v as u8,
                DType::I8 => at.cast::<i8>().write_unaligned(v as i8),
                DType::I16 => at.cast::<i16>().write_unaligned(v as i16),
                DType::I32 => at.cast::<i32>().write_unaligned(v as i32),
                DType::I64 => at.cast::<i64>().write_unaligned(v as i64),
                DType::F16 => at.cast::<f16>().write_unaligned(f16::from_f64(v)),
                DType::BF16 => at.cast::<bf16>().write_unaligned(bf16::from_f64(v)),
                DType::F32 => at.cast::<f32>().write_unaligned(v as f32),
                DType::F64 => at.cast::<f64>().write_unaligned(v),
                DType::C64 | DType::C128 => (),
            }
        }
    }
}
