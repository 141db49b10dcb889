//! Pointwise regions: an expression over any number of inputs.
//!
//! A [`Region`] is a list of [`Instruction`]s over values: the inputs first, then one value an instruction.

use hypatia_core::ty::DType;
use smallvec::SmallVec;

use crate::{Error, Result};

/// A number known when the region is made.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Scalar {
    /// For floating types. 16-bit types see it in f32: whoever wants it rounded to 16 bits does that.
    Float(f64),
    /// For integers, and for bool, where all but zero is true.
    Int(i64),
}

/// The ops, with the rows of the op table that they are; constants and casts are none.
macro_rules! ops {
    ($($(#[$doc:meta])* $op:ident $name:literal;)*) => {
        /// What an instruction does, with torch's meaning, NaN included. Both operands of a binary op have the same dtype:
        /// promotion is written as [`Op::Cast`].
        #[derive(Debug, Clone, Copy, PartialEq)]
        #[allow(missing_docs)]
        pub enum Op {
            /// No operands.
            Constant(Scalar, DType),
            /// To another dtype: floats to integers by truncation, anything to bool by comparison with zero.
            Cast(DType),
            $($(#[$doc])* $op,)*
        }

        const NAMES: &[(&str, Op)] = &[$(($name, Op::$op)),*];
    };
}

ops! {
    Neg "neg";
    Abs "abs";
    Sign "sign";
    Exp "exp";
    Expm1 "expm1";
    Log "log";
    Log1p "log1p";
    Sqrt "sqrt";
    Rsqrt "rsqrt";
    Reciprocal "reciprocal";
    Square "square";
    Sin "sin";
    Cos "cos";
    Erf "erf";
    Tanh "tanh";
    Sigmoid "sigmoid";
    Relu "relu";
    Gelu "gelu";
    GeluTanh "gelu_tanh";
    Silu "silu";
    Floor "floor";
    Ceil "ceil";
    /// Of bool only.
    Not "logical_not";
    Add "add";
    Sub "sub";
    Mul "mul";
    /// Of floats only.
    Div "div";
    /// Of floats only.
    Pow "pow";
    Maximum "maximum";
    Minimum "minimum";
    Eq "eq";
    Ne "ne";
    Lt "lt";
    Le "le";
    Gt "gt";
    Ge "ge";
    /// Of bool only.
    And "logical_and";
    /// Of bool only.
    Or "logical_or";
    /// `Where(condition, a, b)`.
    Where "where";
    /// `MaskedFill(x, mask, value)`.
    MaskedFill "masked_fill";
    /// `Clamp(x, least, greatest)`; if they cross, the greatest. The bounds are no NaN.
    Clamp "clamp";
}

impl Op {
    /// The op of a row of the op table; none for rows that are something else, and for casts.
    pub fn named(name: &str) -> Option<Op> {
        NAMES.iter().find(|(row, _)| *row == name).map(|(_, op)| *op)
    }

    /// The row of the op table; none for constants and casts.
    pub fn name(self) -> Option<&'static str> {
        NAMES.iter().find(|(_, op)| *op == self).map(|(name, _)| *name)
    }

    /// Whether a result that is a float is one of its type, in whatever wider type it is computed: then it needs no
    /// rounding. Constants and casts are not asked for.
    pub fn is_exact(self) -> bool {
        matches!(self, Op::Neg | Op::Abs | Op::Sign | Op::Relu | Op::Floor | Op::Ceil)
    }
}

/// One op and the numbers of the values that it takes.
#[derive(Debug, Clone, PartialEq)]
pub struct Instruction {
    /// What is done.
    pub op: Op,
    /// To which values.
    pub args: SmallVec<[usize; 3]>,
}

impl Instruction {
    /// An instruction on the values of these numbers.
    pub fn new(op: Op, args: impl IntoIterator<Item = usize>) -> Instruction {
        Instruction {
            op,
            args: args.into_iter().collect(),
        }
    }
}

/// When values of 16-bit floating types are rounded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rounding {
    /// After every op, as eager torch does.
    EveryOp,
    /// At casts and when they are stored; in between they keep the precision of f32.
    AtStores,
}

/// How an input of a region is read.
#[derive(Debug, Clone, PartialEq)]
pub enum Read {
    /// Where its strides lead.
    Plain,
    /// What lies in memory is a part of what is read; outside of it is a number.
    Within {
        /// Positions before that part, along each dimension.
        before: Vec<usize>,
        /// Its sizes, all of them positive.
        sizes: Vec<usize>,
        /// The number, one of the input's dtype.
        outside: Scalar,
    },
    /// The same, but what is outside is another input's, which comes later and has the same dtype.
    Beside {
        /// Positions before that part, along each dimension.
        before: Vec<usize>,
        /// Its sizes, all of them positive.
        sizes: Vec<usize>,
        /// The other input.
        other: usize,
    },
    /// Moved along dimensions, of which the ends adjoin.
    Rolled {
        /// Positions along each dimension from what is read to where it lies.
        by: Vec<usize>,
    },
    /// Another input says where the element lies along a dimension, whose own stride is 0. What is out of range is NaN.
    At {
        /// That input, of whole numbers.
        index: usize,
        /// Elements from one place of the dimension to the next.
        stride: isize,
        /// So many places it has.
        size: usize,
    },
}

impl Read {
    /// The same of dimensions in another order.
    pub(crate) fn permuted(mut self, order: &[usize]) -> Read {
        let list = |of: &mut Vec<usize>| *of = order.iter().map(|d| of[*d]).collect();
        match &mut self {
            Read::Within { before, sizes, .. } | Read::Beside { before, sizes, .. } => {
                list(before);
                list(sizes);
            }
            Read::Rolled { by } => list(by),
            Read::Plain | Read::At { .. } => {}
        }
        self
    }

    /// The same where so many other inputs come before all that it refers to.
    pub(crate) fn behind(mut self, inputs: usize) -> Read {
        if let Read::At { index: other, .. } | Read::Beside { other, .. } = &mut self {
            *other += inputs;
        }
        self
    }
}

/// A typed region. Every machine makes of it what it can run.
#[derive(Debug)]
pub struct Region {
    inputs: Vec<DType>,
    outputs: Vec<DType>,
    meaning: Meaning,
}

/// A region as it was written.
#[derive(Debug, Clone)]
pub struct Meaning {
    /// One value each, after those of the inputs.
    pub instructions: Vec<Instruction>,
    /// The dtype of every value, those of the inputs first.
    pub types: Vec<DType>,
    /// The number of the value of each output.
    pub outputs: Vec<usize>,
    /// When 16-bit values are rounded.
    pub rounding: Rounding,
}

impl Meaning {
    /// Which values an output depends on.
    pub fn needed(&self) -> Vec<bool> {
        let mut needed = vec![false; self.types.len()];
        self.outputs.iter().for_each(|o| needed[*o] = true);
        let inputs = self.types.len() - self.instructions.len();
        for (i, instruction) in self.instructions.iter().enumerate().rev() {
            if needed[inputs + i] {
                instruction.args.iter().for_each(|a| needed[*a] = true);
            }
        }
        needed
    }
}

impl Region {
    /// Types a region with inputs of these dtypes; `outputs` are numbers of values.
    pub fn new(
        inputs: &[DType],
        instructions: Vec<Instruction>,
        outputs: &[usize],
        rounding: Rounding,
    ) -> Result<Region> {
        if inputs.iter().any(|d| d.is_complex()) {
            return Err(Error::Type {
                op: "region".into(),
                message: "only torch computes with complex numbers".into(),
            });
        }
        let mut types = inputs.to_vec();
        for (i, instruction) in instructions.iter().enumerate() {
            let args: SmallVec<[DType; 3]> = instruction
                .args
                .iter()
                .map(|&a| types.get(a).copied())
                .collect::<Option<_>>()
                .ok_or_else(|| type_error(instruction.op, i, "takes a value that is not there yet"))?;
            types.push(infer(instruction.op, &args).map_err(|message| type_error(instruction.op, i, &message))?);
        }
        if let Some(bad) = outputs.iter().find(|o| **o >= types.len()) {
            return Err(Error::Type {
                op: "region".into(),
                message: format!("output {bad} of {} values", types.len()),
            });
        }
        Ok(Region {
            inputs: inputs.to_vec(),
            outputs: outputs.iter().map(|&o| types[o]).collect(),
            meaning: Meaning {
                instructions,
                types,
                outputs: outputs.to_vec(),
                rounding,
            },
        })
    }

    /// What it computes.
    pub fn meaning(&self) -> &Meaning {
        &self.meaning
    }

    /// The dtypes of the inputs.
    pub fn inputs(&self) -> &[DType] {
        &self.inputs
    }

    /// Whether it is its only input, as it is.
    pub fn is_input(&self) -> bool {
        self.inputs.len() == 1 && self.meaning.outputs[..] == [0]
    }

    /// Several regions as one, which reads the inputs of all and has the outputs of all.
    pub fn beside(regions: &[&Region]) -> Result<Region> {
        let total: usize = regions.iter().map(|r| r.inputs.len()).sum();
        let (mut inputs, mut code, mut outputs) = (vec![], vec![], vec![]);
        let mut rounding = Rounding::EveryOp;
        for region in regions {
            let (before, made, own) = (inputs.len(), code.len(), region.inputs.len());
            let moved = |at: usize| if at < own { before + at } else { total + made + at - own };
            let instructions = region.meaning.instructions.iter();
            code.extend(instructions.map(|i| Instruction::new(i.op, i.args.iter().map(|a| moved(*a)))));
            outputs.extend(region.meaning.outputs.iter().map(|o| moved(*o)));
            inputs.extend(&region.inputs);
            rounding = region.meaning.rounding;
        }
        Region::new(&inputs, code, &outputs, rounding)
    }

    /// The same with another input that nothing is computed with.
    pub(crate) fn with_input(&self, dtype: DType) -> Result<Region> {
        let more = Region::new(&[dtype], vec![], &[], self.meaning.rounding)?;
        Region::beside(&[self, &more])
    }

    /// One input, in the type that its sums are made in.
    pub fn widening(dtype: DType) -> Result<Region> {
        let wide = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
        let code = match dtype == wide {
            true => vec![],
            false => vec![Instruction::new(Op::Cast(wide), [0])],
        };
        let result = code.len();
        Region::new(&[dtype], code, &[result], Rounding::EveryOp)
    }

    /// Whether it is its only input, perhaps in a wider type.
    pub(crate) fn only_widens(&self) -> bool {
        let Meaning {
            instructions, outputs, ..
        } = &self.meaning;
        let casts = matches!(&instructions[..], [cast] if matches!(cast.op, Op::Cast(_)) && cast.args[..] == [0]);
        self.is_input() || self.inputs.len() == 1 && casts && outputs[..] == [1]
    }

    /// Whether it is the sum of its two inputs and nothing else.
    pub(crate) fn is_sum(&self) -> bool {
        let Meaning {
            instructions, outputs, ..
        } = &self.meaning;
        matches!(&instructions[..], [add] if add.op == Op::Add && add.args[..] == [0, 1]) && outputs[..] == [2]
    }

    /// The dtypes of the outputs.
    pub fn outputs(&self) -> &[DType] {
        &self.outputs
    }
}

fn type_error(op: Op, index: usize, message: &str) -> Error {
    Error::Type {
        op: format!("{op:?}"),
        message: format!("instruction {index} {message}"),
    }
}

/// The dtype of a result.
fn infer(op: Op, args: &[DType]) -> Result<DType, String> {
    use Op::*;
    let arity = match op {
        Constant(..) => 0,
        Add | Sub | Mul | Div | Pow | Maximum | Minimum | Eq | Ne | Lt | Le | Gt | Ge | And | Or => 2,
        Where | MaskedFill | Clamp => 3,
        _ => 1,
    };
    if args.len() != arity {
        return Err(format!("takes {arity} operands, not {}", args.len()));
    }
    let same = |a: DType, b: DType| {
        if a == b {
            Ok(a)
        } else {
            Err(format!("takes {a} and {b}, which differ"))
        }
    };
    let demand = |ok: bool| {
        if ok {
            Ok(args[0])
        } else {
            Err(format!("is not defined for {}", args[0]))
        }
    };
    match op {
        Constant(Scalar::Float(_), dtype) if !dtype.is_float() => Err(format!("makes a {dtype} of a float")),
        Constant(_, dtype) | Cast(dtype) => Ok(dtype),
        Not => demand(args[0] == DType::Bool),
        And | Or => demand(args[0] == DType::Bool && args[1] == DType::Bool),
        Neg | Abs | Sign | Square | Relu => demand(args[0] != DType::Bool),
        Add | Sub | Mul | Maximum | Minimum => {
            demand(args[0] != DType::Bool)?;
            same(args[0], args[1])
        }
        Div | Pow => {
            demand(args[0].is_float())?;
            same(args[0], args[1])
        }
        Eq | Ne | Lt | Le | Gt | Ge => same(args[0], args[1]).map(|_| DType::Bool),
        Where => {
            demand(args[0] == DType::Bool)?;
            same(args[1], args[2])
        }
        MaskedFill if args[1] != DType::Bool => Err(format!("takes a mask of bool, not {}", args[1])),
        MaskedFill => same(args[0], args[2]),
        Clamp => {
            demand(args[0] != DType::Bool)?;
            same(same(args[0], args[1])?, args[2])
        }
        _ => demand(args[0].is_float()),
    }
}
