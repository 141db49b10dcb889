//! Activations that are several ops of a region.

use egg::Id;
use hypatia_core::attr::Attr;

use super::pointwise::Making;
use super::slopes::{Code, SIXTH, wide};
use super::{Lowering, no_plan};
use crate::error::Result;
use crate::kernels::region::{Instruction, Op as Lane};

/// Whether an op is such an activation. Each needs code below.
pub(super) fn is_activation(name: &str) -> bool {
    matches!(
        name,
        "hardswish" | "hardsigmoid" | "leaky_relu" | "elu" | "softplus" | "mish"
    )
}

impl Lowering<'_> {
    /// The code of such an op; its place.
    pub(super) fn activation(&self, id: Id, made: &mut Making) -> Result<usize> {
        let (_, dtype) = self.shape(id)?;
        let children = &self.program.node(id).children;
        let number = |c: &Id| self.attr(*c).and_then(Attr::number);
        let numbers: Option<Vec<f64>> = children[1..].iter().map(number).collect();
        let numbers = numbers.ok_or_else(|| no_plan("a number that is not known"))?;
        let x = self.code(children[0], made)?;
        // Rounded once, as torch does.
        let mut code = Code {
            wide: wide(dtype),
            made,
        };
        let x = code.cast(x, dtype, code.wide);
        let y = code.activation(self.name(id), x, &numbers, self.can.multiplies_by_sixths)?;
        let place = code.cast(y, code.wide, dtype);
        made.place.insert(id, place);
        Ok(place)
    }
}

impl Code<'_> {
    fn number(&mut self, number: f64) -> Result<usize> {
        self.made.constant(number, self.wide)
    }

    /// `x + 3` between 0 and 6.
    fn hard(&mut self, x: usize) -> Result<usize> {
        let (three, zero, six) = (self.number(3.0)?, self.number(0.0)?, self.number(6.0)?);
        let sum = self.two(Lane::Add, x, three);
        Ok(self.made.push(Instruction::new(Lane::Clamp, [sum, zero, six])))
    }

    /// `x / 6`, or times a sixth as torch writes it.
    fn by_six(&mut self, x: usize, sixths: bool) -> Result<usize> {
        let (op, number) = match sixths {
            true => (Lane::Mul, SIXTH),
            false => (Lane::Div, 6.0),
        };
        let number = self.number(number)?;
        Ok(self.two(op, x, number))
    }

    /// `a` where `x` is greater than a bound, else `b`.
    fn above(&mut self, x: usize, bound: f64, a: usize, b: usize) -> Result<usize> {
        let bound = self.number(bound)?;
        let above = self.two(Lane::Gt, x, bound);
        Ok(self.made.push(Instruction::new(Lane::Where, [above, a, b])))
    }

    /// In the order in which torch's kernels compute.
    fn activation(&mut self, name: &str, x: usize, numbers: &[f64], sixths: bool) -> Result<usize> {
        Ok(match (name, numbers) {
            ("hardswish", []) => {
                let hard = self.hard(x)?;
                let product = self.two(Lane::Mul, x, hard);
                self.by_six(product, sixths)?
            }
            ("hardsigmoid", []) => {
                let hard = self.hard(x)?;
                self.by_six(hard, sixths)?
            }
            ("leaky_relu", [slope]) => {
                let slope = self.number(*slope)?;
                let below = self.two(Lane::Mul, x, slope);
                self.above(x, 0.0, x, below)?
            }
            ("elu", [alpha]) => {
                let (curve, alpha) = (self.one(Lane::Expm1, x), self.number(*alpha)?);
                let below = self.two(Lane::Mul, curve, alpha);
                self.above(x, 0.0, x, below)?
            }
            ("softplus", [beta, threshold]) => {
                let beta = self.number(*beta)?;
                let scaled = self.two(Lane::Mul, x, beta);
                let log = self.log_of_exp(scaled);
                let below = self.two(Lane::Div, log, beta);
                self.above(scaled, *threshold, x, below)?
            }
            ("mish", []) => {
                let log = self.log_of_exp(x);
                let share = self.one(Lane::Tanh, log);
                self.two(Lane::Mul, x, share)
            }
            _ => return Err(no_plan(format!("the activation {name}"))),
        })
    }

    fn log_of_exp(&mut self, x: usize) -> usize {
        let exp = self.one(Lane::Exp, x);
        self.one(Lane::Log1p, exp)
    }
}
