//! Convolution and pooling: windows that slide over the last dimensions.

use super::{Args, Check, Row, Vals, known_shape, op};
use crate::dim::{Dim, product};
use crate::eval::{Arr, Val, for_each_index};
use crate::ty::{DType, TensorType, Ty};
use crate::work::Cost;

/// How a window moves along one dimension.
#[derive(Clone, Copy)]
struct Window {
    size: i64,
    stride: i64,
    padding: i64,
    dilation: i64,
}

impl Window {
    /// From the first to the last element that it covers.
    fn span(&self) -> i64 {
        self.dilation * (self.size - 1) + 1
    }

    /// How many places it has; the last may hang over the end if the count rounds up.
    fn places(&self, size: &Dim, up: bool) -> Check<Dim> {
        let room = size.add(&Dim::Const(2 * self.padding - self.span()));
        match (room.known(), size.known()) {
            (Some(room), _) if room < 0 => Err(format!("a window of {} does not fit into {size}", self.span())),
            (Some(room), Some(size)) => {
                let n = (room + if up { self.stride - 1 } else { 0 }) / self.stride + 1;
                // No window starts behind the elements and the padding before them.
                let behind = up && (n - 1) * self.stride >= size + self.padding;
                Ok(Dim::Const(n - i64::from(behind)))
            }
            _ if self.stride == 1 => Ok(room.add(&Dim::Const(1))),
            _ => Err(format!("places in size {size} are not known")),
        }
    }

    /// Where the element `k` of the window at a place lies; negative in the padding.
    fn element(&self, place: usize, k: usize) -> i64 {
        place as i64 * self.stride - self.padding + k as i64 * self.dilation
    }
}

/// The windows that lists of sizes, strides, paddings and dilations describe.
fn windows(sizes: &[i64], lists: [&[i64]; 3]) -> Check<Vec<Window>> {
    if lists.iter().any(|list| list.len() != sizes.len()) {
        return Err("strides, paddings and dilations must be one for each dimension".into());
    }
    let window = |(i, size): (usize, &i64)| {
        let [stride, padding, dilation] = lists.map(|list| list[i]);
        let good = *size > 0 && stride > 0 && padding >= 0 && dilation > 0;
        good.then_some(Window {
            size: *size,
            stride,
            padding,
            dilation,
        })
    };
    let all: Option<Vec<Window>> = sizes.iter().enumerate().map(window).collect();
    all.ok_or_else(|| "a window's size, stride, padding or dilation is too small".into())
}

/// Operands: `x w b stride padding dilation groups`.
fn conv_windows(a: &Args) -> Check<Vec<Window>> {
    let sizes: Option<Vec<i64>> = a.t(1)?.shape.iter().skip(2).map(Dim::known).collect();
    let sizes = sizes.ok_or("the kernel's size is not known")?;
    windows(&sizes, [&a.known(3)?, &a.known(4)?, &a.known(5)?])
}

fn conv(a: &Args) -> Check<Ty> {
    let (x, w, groups) = (a.t(0)?, a.t(1)?, a.int(6)?);
    let alike = |t: &TensorType| t.dtype == x.dtype && t.device == x.device;
    if !x.dtype.is_float() || !alike(w) || x.rank() != w.rank() || !(3..=5).contains(&x.rank()) {
        return Err(format!("{w} is no kernel for {x}"));
    }
    let grouped = groups > 0 && w.shape[0].div(&Dim::Const(groups)).is_some();
    let empty = w.shape.iter().chain([&x.shape[1]]).any(|d| d.is(0));
    if !grouped || empty || w.shape[1].scale(groups) != x.shape[1] {
        return Err(format!("{w} in {groups} groups does not fit {x}"));
    }
    if let Some(b) = a.opt(2)?
        && (!alike(b) || b.shape[..] != w.shape[..1])
    {
        return Err(format!("bias {b} does not fit {w}"));
    }
    let mut shape = vec![x.shape[0].clone(), w.shape[0].clone()];
    for (window, size) in conv_windows(a)?.iter().zip(&x.shape[2..]) {
        shape.push(window.places(size, false)?);
    }
    Ok(Ty::Tensor(x.with_shape(shape)))
}

fn eval_conv(v: &Vals) -> Check<Val> {
    let (x, w, b, args) = (v.a(0)?, v.a(1)?, v.opt(2)?, v.args());
    let windows = conv_windows(&args)?;
    let per_group = w.shape[0] / args.int(6)? as usize;
    Ok(Val::arr(Arr::from_fn(v.out_shape()?, |i| {
        let mut sum = b.map_or(0.0, |b| b.data[i[1]]);
        let mut at = i.to_vec();
        let mut k = vec![0; w.shape.len()];
        let mut kernel = w.shape.clone();
        kernel[0] = 1;
        for_each_index(&kernel, &mut k, &mut |k| {
            let mut wk = k.to_vec();
            wk[0] = i[1];
            at[1] = i[1] / per_group * w.shape[1] + k[1];
            let mut outside = false;
            for (d, window) in windows.iter().enumerate() {
                let e = window.element(i[d + 2], k[d + 2]);
                outside |= e < 0 || e >= x.shape[d + 2] as i64;
                at[d + 2] = e.max(0) as usize;
            }
            // Padding is made of zeros, which an infinite weight turns into NaN.
            sum += w.at(&wk) * if outside { 0.0 } else { x.at(&at) };
        });
        sum
    })))
}

fn conv_work(a: &Args, out: &Ty) -> Check<Dim> {
    let out = out.tensor().ok_or("no tensor")?;
    Ok(out.numel().mul(&product(&a.t(1)?.shape[1..])))
}

/// Checks the input of a pooling over the last two dimensions.
fn image<'a>(a: &Args<'a>) -> Check<&'a TensorType> {
    let x = a.t(0)?;
    let empty = x.shape.iter().skip(usize::from(x.rank() == 4)).any(|d| d.is(0));
    if !x.dtype.is_float() || empty || !(3..=4).contains(&x.rank()) {
        return Err(format!("{x} is no image"));
    }
    Ok(x)
}

fn pooled(x: &TensorType, windows: &[Window], up: bool) -> Check<TensorType> {
    let mut shape = x.shape.to_vec();
    let first = shape.len() - 2;
    for (size, window) in shape[first..].iter_mut().zip(windows) {
        if window.padding * 2 > window.size {
            return Err("more padding than half a window".into());
        }
        *size = window.places(size, up)?;
    }
    Ok(x.with_shape(shape))
}

/// The windows of `x kernel stride padding …`; one that names no stride moves by its size.
fn pool_windows(a: &Args, dilation: &[i64]) -> Check<[Window; 2]> {
    let (sizes, strides) = (a.known(1)?, a.known(2)?);
    let strides = if strides.is_empty() { &sizes } else { &strides };
    let all = windows(&sizes, [strides, &a.known(3)?, dilation])?;
    all.try_into().map_err(|_| "a window has two sizes".into())
}

/// Operands: `x kernel stride padding dilation ceil`.
fn max_windows(a: &Args) -> Check<[Window; 2]> {
    pool_windows(a, &a.known(4)?)
}

/// Operands: `x kernel stride padding ceil count_padding`.
fn avg_windows(a: &Args) -> Check<[Window; 2]> {
    pool_windows(a, &[1, 1])
}

fn max_pool(a: &Args) -> Check<TensorType> {
    pooled(image(a)?, &max_windows(a)?, a.flag(5)?)
}

/// The largest element of a window and its place in the image; the last NaN is larger.
fn window_max(x: &Arr, [wh, ww]: &[Window; 2], i: &[usize]) -> (f64, f64) {
    let r = i.len();
    let (height, width) = (x.shape[r - 2] as i64, x.shape[r - 1] as i64);
    let mut at = i.to_vec();
    let mut best: Option<(f64, f64)> = None;
    for kh in 0..wh.size as usize {
        for kw in 0..ww.size as usize {
            let (h, w) = (wh.element(i[r - 2], kh), ww.element(i[r - 1], kw));
            if (0..height).contains(&h) && (0..width).contains(&w) {
                (at[r - 2], at[r - 1]) = (h as usize, w as usize);
                let e = x.at(&at);
                if best.is_none_or(|(m, _)| e > m || e.is_nan()) {
                    best = Some((e, (h * width + w) as f64));
                }
            }
        }
    }
    best.unwrap_or((f64::NEG_INFINITY, 0.0))
}

fn eval_max_pool(v: &Vals, out: &TensorType, part: fn((f64, f64)) -> f64) -> Check<Val> {
    let (x, windows) = (v.a(0)?, max_windows(&v.args())?);
    let shape = known_shape(&out.shape)?;
    Ok(Val::arr(Arr::from_fn(shape, |i| part(window_max(x, &windows, i)))))
}

fn eval_avg_pool(v: &Vals) -> Check<Val> {
    let (x, args) = (v.a(0)?, v.args());
    let (windows, count_padding) = (avg_windows(&args)?, args.flag(5)?);
    let r = x.shape.len();
    Ok(Val::arr(Arr::from_fn(v.out_shape()?, |i| {
        let mut count = 1;
        let ranges = [0, 1].map(|d| {
            let (w, size) = (windows[d], x.shape[r - 2 + d] as i64);
            let start = w.element(i[r - 2 + d], 0);
            // What hangs over the padding at the end is not counted even if padding is.
            let end = (start + w.size).min(size + w.padding);
            let inside = start.max(0)..end.min(size);
            let counted = if count_padding { start..end } else { inside.clone() };
            count *= counted.end - counted.start;
            inside.start as usize..inside.end.max(inside.start) as usize
        });
        window_sum(x, i, ranges) / count as f64
    })))
}

fn window_sum(x: &Arr, i: &[usize], [rows, columns]: [std::ops::Range<usize>; 2]) -> f64 {
    let (r, mut at, mut sum) = (i.len(), i.to_vec(), 0.0);
    for h in rows {
        for w in columns.clone() {
            (at[r - 2], at[r - 1]) = (h, w);
            sum += x.at(&at);
        }
    }
    sum
}

fn adaptive(a: &Args) -> Check<Ty> {
    let (x, sizes) = (image(a)?, a.known(1)?);
    if sizes.len() != 2 || sizes.iter().any(|s| *s < 1) {
        return Err("two sizes are needed".into());
    }
    let mut shape = x.shape[..x.rank() - 2].to_vec();
    shape.extend(sizes.into_iter().map(Dim::Const));
    Ok(Ty::Tensor(x.with_shape(shape)))
}

fn eval_adaptive(v: &Vals) -> Check<Val> {
    let (x, shape) = (v.a(0)?, v.out_shape()?);
    let r = shape.len();
    Ok(Val::arr(Arr::from_fn(shape.clone(), |i| {
        let ranges = [r - 2, r - 1].map(|d| {
            let (from, to) = (x.shape[d], shape[d]);
            i[d] * from / to..((i[d] + 1) * from).div_ceil(to)
        });
        let count: usize = ranges.iter().map(ExactSizeIterator::len).product();
        window_sum(x, i, ranges) / count as f64
    })))
}

/// torch's convolutions of one, two and three dimensions, which may leave out what is last.
macro_rules! convolutions {
    ($(($call:literal, $one:literal, $zero:literal)),*) => {
        &[
            // One zero stands for all dimensions; it matters to transposed convolutions only.
            "convolution.default(x, w, b, stride, padding, dilation, false, [0], groups)",
            "convolution.default(x, w, b, stride, padding, dilation, false, extra, groups) => (conv x w b stride padding dilation groups)",
            $(
                concat!($call, "(x, w, b, stride, padding, dilation, groups) => (conv x w b stride padding dilation groups)"),
                concat!($call, "(x, w, b, stride, padding, dilation) => (conv x w b stride padding dilation 1)"),
                concat!($call, "(x, w, b, stride, padding) => (conv x w b stride padding ", $one, " 1)"),
                concat!($call, "(x, w, b, stride) => (conv x w b stride ", $zero, " ", $one, " 1)"),
                concat!($call, "(x, w, b) => (conv x w b ", $one, " ", $zero, " ", $one, " 1)"),
                concat!($call, "(x, w) => (conv x w none ", $one, " ", $zero, " ", $one, " 1)"),
            )*
        ]
    };
}

/// torch's calls of a max pooling, which may leave out what is last.
macro_rules! max_pools {
    ($($op:literal, $call:literal)*) => {
        &[
            $(
                concat!($call, "(x, kernel, stride, padding, dilation, ceil)"),
                concat!($call, "(x, kernel, stride, padding, dilation) => (", $op, " x kernel stride padding dilation false)"),
                concat!($call, "(x, kernel, stride, padding) => (", $op, " x kernel stride padding [1,1] false)"),
                concat!($call, "(x, kernel, stride) => (", $op, " x kernel stride [0,0] [1,1] false)"),
                concat!($call, "(x, kernel) => (", $op, " x kernel kernel [0,0] [1,1] false)"),
            )*
        ]
    };
}

pub(super) fn rows() -> Vec<Row> {
    let max_operands = "x:T kernel:ints stride:ints padding:ints dilation:ints ceil:bool";
    vec![
        op(
            "conv",
            "x:T w:T b:T? stride:ints padding:ints dilation:ints groups:int",
            convolutions!(
                ("conv1d.default", "[1]", "[0]"),
                ("conv2d.default", "[1,1]", "[0,0]"),
                ("conv3d.default", "[1,1,1]", "[0,0,0]")
            ),
            conv,
            eval_conv,
            Cost::Matrix(conv_work),
        ),
        op(
            "max_pool2d",
            max_operands,
            max_pools!("max_pool2d", "max_pool2d.default"),
            |a| max_pool(a).map(Ty::Tensor),
            |v| eval_max_pool(v, v.out_tensor()?, |best| best.0),
            Cost::Reduce(2.0),
        ),
        op(
            "native_max_pool2d",
            max_operands,
            max_pools!("native_max_pool2d", "max_pool2d_with_indices.default"),
            |a| {
                let out = max_pool(a)?;
                let places = out.with_dtype(DType::I64);
                Ok(Ty::Tuple([Ty::Tensor(out), Ty::Tensor(places)].into()))
            },
            |v| {
                let out = max_pool(&v.args())?;
                Ok(Val::Tuple(vec![
                    eval_max_pool(v, &out, |best| best.0)?,
                    eval_max_pool(v, &out, |best| best.1)?,
                ]))
            },
            Cost::Reduce(2.0),
        ),
        op(
            "avg_pool2d",
            "x:T kernel:ints stride:ints padding:ints ceil:bool count_padding:bool",
            &[
                "avg_pool2d.default(x, kernel, stride, padding, ceil, count_padding)",
                "avg_pool2d.default(x, kernel, stride, padding, ceil) => (avg_pool2d x kernel stride padding ceil true)",
                "avg_pool2d.default(x, kernel, stride, padding) => (avg_pool2d x kernel stride padding false true)",
                "avg_pool2d.default(x, kernel, stride) => (avg_pool2d x kernel stride [0,0] false true)",
                "avg_pool2d.default(x, kernel) => (avg_pool2d x kernel kernel [0,0] false true)",
            ],
            |a| pooled(image(a)?, &avg_windows(a)?, a.flag(4)?).map(Ty::Tensor),
            eval_avg_pool,
            Cost::Reduce(2.0),
        ),
        op(
            "adaptive_avg_pool2d",
            "x:T size:ints",
            &[
                "_adaptive_avg_pool2d.default(x, size)",
                "adaptive_avg_pool2d.default(x, size) => (adaptive_avg_pool2d x size)",
            ],
            adaptive,
            eval_adaptive,
            Cost::Reduce(1.0),
        ),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_of_a_window() {
        let w = Window {
            size: 2,
            stride: 2,
            padding: 1,
            dilation: 1,
        };
        assert_eq!(w.places(&Dim::Const(5), false), Ok(Dim::Const(3)));
        // A fourth would start in the padding at the end.
        assert_eq!(w.places(&Dim::Const(5), true), Ok(Dim::Const(3)));
        assert!(w.places(&Dim::symbol("s0"), false).is_err());
        let w = Window {
            stride: 1,
            dilation: 3,
            ..w
        };
        assert_eq!(
            w.places(&Dim::symbol("s0"), false),
            Ok(Dim::symbol("s0").sub(&Dim::Const(1)))
        );
        assert!(w.places(&Dim::Const(1), false).is_err());
    }
}
