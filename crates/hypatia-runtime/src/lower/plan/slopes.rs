//! Gradients of functions of one number inside of pointwise regions.

use egg::Id;
use hypatia_core::ty::DType;

use super::pointwise::Making;
use super::{Lowering, no_plan};
use crate::error::Result;
use crate::kernels::region::{Instruction, Op as Lane};

/// A number of fp32 in torch's kernels, those of fp64 among them.
pub(super) const SIXTH: f64 = (1.0_f32 / 6.0) as f64;

/// Whether an op takes a gradient, and what its function was given or gave. Each needs a slope below.
pub(super) fn is_gradient(name: &str) -> bool {
    matches!(
        name,
        "relu_backward"
            | "gelu_backward"
            | "gelu_tanh_backward"
            | "hardsigmoid_backward"
            | "hardswish_backward"
            | "silu_backward"
            | "sigmoid_backward"
            | "tanh_backward"
    )
}

impl Lowering<'_> {
    /// The code of such an op; its place.
    pub(super) fn slope(&self, id: Id, g: Id, x: Id, made: &mut Making) -> Result<usize> {
        let (_, dtype) = self.shape(id)?;
        let (g, x) = (self.code(g, made)?, self.code(x, made)?);
        let place = if self.name(id) == "relu_backward" {
            let zero = made.constant(0.0, dtype)?;
            let off = made.push(Instruction::new(Lane::Le, [x, zero]));
            made.push(Instruction::new(Lane::Where, [off, zero, g]))
        } else {
            // Rounded once, as torch does.
            let wide = wide(dtype);
            let mut code = Code { made, wide };
            let (g, x) = (code.cast(g, dtype, wide), code.cast(x, dtype, wide));
            let slope = code.slope(self.name(id), x)?;
            let mut result = code.two(Lane::Mul, g, slope);
            // Outside of these it is zero, whatever the gradient is.
            let bounds: &[(Lane, f64)] = match self.name(id) {
                "hardsigmoid_backward" => &[(Lane::Gt, -3.0), (Lane::Lt, 3.0)],
                _ => &[],
            };
            for (inside, bound) in bounds {
                result = code.where_is(*inside, x, *bound, result, 0.0)?;
            }
            if self.name(id) == "hardswish_backward" {
                // NaN is not outside.
                let (zero, bound) = (code.made.constant(0.0, wide)?, code.made.constant(-3.0, wide)?);
                let outside = code.two(Lane::Le, x, bound);
                result = code.made.push(Instruction::new(Lane::Where, [outside, zero, result]));
            }
            code.cast(result, wide, dtype)
        };
        made.place.insert(id, place);
        Ok(place)
    }
}

/// The type in which functions of a type are computed.
pub(super) fn wide(dtype: DType) -> DType {
    if dtype == DType::F64 { DType::F64 } else { DType::F32 }
}

/// Code on numbers of one type.
pub(super) struct Code<'a> {
    pub(super) made: &'a mut Making,
    pub(super) wide: DType,
}

impl Code<'_> {
    pub(super) fn one(&mut self, op: Lane, x: usize) -> usize {
        self.made.push(Instruction::new(op, [x]))
    }

    pub(super) fn two(&mut self, op: Lane, x: usize, y: usize) -> usize {
        self.made.push(Instruction::new(op, [x, y]))
    }

    pub(super) fn cast(&mut self, x: usize, from: DType, to: DType) -> usize {
        if from == to { x } else { self.one(Lane::Cast(to), x) }
    }

    /// `x * a + b`.
    fn line(&mut self, x: usize, a: f64, b: f64) -> Result<usize> {
        let (a, b) = (self.made.constant(a, self.wide)?, self.made.constant(b, self.wide)?);
        let product = self.two(Lane::Mul, x, a);
        Ok(self.two(Lane::Add, product, b))
    }

    /// `y` where `x` compares so with a bound, and else this number.
    fn where_is(&mut self, op: Lane, x: usize, bound: f64, y: usize, other: f64) -> Result<usize> {
        let bound = self.made.constant(bound, self.wide)?;
        let other = self.made.constant(other, self.wide)?;
        let condition = self.two(op, x, bound);
        Ok(self.made.push(Instruction::new(Lane::Where, [condition, y, other])))
    }

    fn slope(&mut self, name: &str, x: usize) -> Result<usize> {
        Ok(match name {
            "hardsigmoid_backward" => self.made.constant(SIXTH, self.wide)?,
            "hardswish_backward" => {
                let three = self.made.constant(3.0, self.wide)?;
                let third = self.two(Lane::Div, x, three);
                let slope = self.line(third, 1.0, 0.5)?;
                self.where_is(Lane::Lt, x, 3.0, slope, 1.0)?
            }
            "gelu_backward" => {
                let scaled = self.line(x, std::f64::consts::FRAC_1_SQRT_2, 0.0)?;
                let erf = self.one(Lane::Erf, scaled);
                let share = self.line(erf, 0.5, 0.5)?;
                let square = self.one(Lane::Square, x);
                let exponent = self.line(square, -0.5, 0.0)?;
                let bell = self.one(Lane::Exp, exponent);
                let density = self.line(bell, 1.0 / (2.0 * std::f64::consts::PI).sqrt(), 0.0)?;
                let more = self.two(Lane::Mul, x, density);
                self.two(Lane::Add, share, more)
            }
            "gelu_tanh_backward" => {
                let scale = (2.0 / std::f64::consts::PI).sqrt();
                let square = self.one(Lane::Square, x);
                let inner = self.line(square, 0.044715 * scale, scale)?;
                let inner = self.two(Lane::Mul, x, inner);
                let t = self.one(Lane::Tanh, inner);
                let share = self.line(t, 0.5, 0.5)?;
                let square_t = self.one(Lane::Square, t);
                let flat = self.line(square_t, -0.5, 0.5)?;
                let inner_slope = self.line(square, 3.0 * 0.044715 * scale, scale)?;
                let more = self.two(Lane::Mul, flat, inner_slope);
                let more = self.two(Lane::Mul, x, more);
                self.two(Lane::Add, share, more)
            }
            "silu_backward" => {
                let s = self.one(Lane::Sigmoid, x);
                let rest = self.line(s, -1.0, 1.0)?;
                let more = self.two(Lane::Mul, x, rest);
                let more = self.line(more, 1.0, 1.0)?;
                self.two(Lane::Mul, s, more)
            }
            "sigmoid_backward" => {
                let rest = self.line(x, -1.0, 1.0)?;
                self.two(Lane::Mul, rest, x)
            }
            "tanh_backward" => {
                let square = self.one(Lane::Square, x);
                self.line(square, -1.0, 1.0)?
            }
            _ => return Err(no_plan(format!("the slope of {name}"))),
        })
    }
}
