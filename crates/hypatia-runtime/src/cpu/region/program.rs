//! From instructions to steps over tile registers.

use hypatia_core::ty::DType;

use super::access::Class;
use super::loops::{Kind, Loop};
use super::rounding::{InPlace, round};
use super::table;
use crate::kernels::region::{Instruction, Meaning, Op, Region, Rounding, Scalar};

/// Elements of a tile: eight registers of f32 fill two thirds of a first-level cache.
pub(crate) const TILE: usize = 1024;

/// One loop over a tile.
#[derive(Debug)]
pub(crate) enum Step {
    /// Brings a tile of an input into its register.
    Load { input: usize, value: usize },
    /// Computes a value.
    Compute { run: Loop, args: [usize; 3], value: usize },
    /// Rounds a value in place.
    Round { run: InPlace, value: usize },
}

/// Where a value is found.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Place {
    /// Nowhere: it is not needed.
    None,
    /// At this offset of the arena.
    Register(usize),
    /// In the list of constants.
    Constant(usize),
}

/// Steps, and the place of every value.
#[derive(Debug, Default)]
pub(crate) struct Program {
    pub(crate) steps: Vec<Step>,
    pub(crate) places: Vec<Place>,
    /// Bits of constants, in their class.
    pub(crate) constants: Vec<u64>,
    /// The value of each output, never a constant.
    pub(crate) outputs: Vec<usize>,
    /// Bytes of registers.
    pub(crate) arena: usize,
    /// About the nanoseconds an element takes.
    pub(crate) weight: f64,
    /// Whether there is one loop besides loads, and nothing but its result is an output.
    pub(crate) one_loop: bool,
    /// Whether the first two outputs are one value.
    pub(crate) begins_twice: bool,
    /// The first step that takes so long that other memory can be asked for meanwhile.
    pub(crate) asks: Option<usize>,
    classes: Vec<Class>,
    /// How often each value of the instructions is used.
    uses: Vec<usize>,
    /// The product that the last step has made, if a sum may swallow it.
    product: Option<usize>,
    /// The value of the same bits that stands for each value of the instructions.
    same: Vec<usize>,
}

impl Program {
    pub(crate) fn new(region: &Region) -> Program {
        let inputs = region.inputs().len();
        let Meaning {
            instructions,
            types,
            outputs,
            rounding,
        } = region.meaning();
        let mut program = Program {
            classes: types.iter().map(|&t| Class::of(t)).collect(),
            same: (0..types.len()).collect(),
            places: vec![Place::None; types.len()],
            ..Program::default()
        };
        let needed = region.meaning().needed();
        program.uses = vec![0; types.len()];
        for (_, instruction) in (inputs..).zip(instructions).filter(|(v, _)| needed[*v]) {
            instruction.args.iter().for_each(|a| program.uses[*a] += 1);
        }
        outputs.iter().for_each(|o| program.uses[*o] += 1);
        let mut loaded = vec![false; inputs];
        let mut slow = vec![false; types.len()];
        for (value, instruction) in (inputs..).zip(instructions).filter(|(v, _)| needed[*v]) {
            for &arg in &instruction.args {
                program.load(arg, &mut loaded);
            }
            program.instruction(value, instruction, types, outputs, *rounding);
            slow[value] = instruction.args.len() == 1 && transcendental(instruction.op) > 0.3;
        }
        for &output in outputs {
            program.load(output, &mut loaded);
            let source = program.same[output];
            let tile = program.tile(source);
            program.outputs.push(tile);
        }
        program.weight += 0.05 * (inputs + outputs.len()) as f64;
        let mut loops = program.steps.iter().filter(|s| !matches!(s, Step::Load { .. }));
        program.one_loop = match (loops.next(), loops.next(), &program.outputs[..]) {
            (Some(Step::Compute { value, .. }), None, [output]) => value == output,
            _ => false,
        };
        program.asks = program
            .steps
            .iter()
            .position(|s| matches!(s, Step::Compute { value, .. } if slow.get(*value) == Some(&true)));
        program.allocate();
        program.begins_twice =
            matches!(program.outputs[..], [a, b, ..] if a == b) && region.outputs()[0] == region.outputs()[1];
        program
    }

    fn load(&mut self, value: usize, loaded: &mut [bool]) {
        if let Some(seen) = loaded.get_mut(value)
            && !std::mem::replace(seen, true)
        {
            self.steps.push(Step::Load { input: value, value });
        }
    }

    fn instruction(
        &mut self,
        value: usize,
        instruction: &Instruction,
        types: &[DType],
        outputs: &[usize],
        rounding: Rounding,
    ) {
        let (op, dtype) = (instruction.op, types[value]);
        let args: Vec<usize> = instruction.args.iter().map(|&a| self.same[a]).collect();
        let from = instruction.args.first().map(|&a| types[a]);
        let mut exact = op.is_exact() && dtype.is_float();
        match (op, &args[..]) {
            (Op::Constant(scalar, dtype), _) => {
                self.places[value] = Place::Constant(self.constants.len());
                self.constants.push(bits(scalar, dtype));
                return;
            }
            (Op::Cast(to), &[a]) => {
                let from = from.unwrap_or(to);
                if self.constant(a).is_none() && widens(from, to) && Class::of(from) == Class::of(to) {
                    self.same[value] = a;
                    if let Some(uses) = self.uses.get_mut(a) {
                        *uses += types.len();
                    }
                    return;
                }
                let a = self.tile(a);
                self.compute(value, table::cast(Class::of(from), to), &[a]);
                exact = widens(from, to);
            }
            (Op::Where, &[c, a, b]) => self.select(value, c, a, b),
            (Op::MaskedFill, &[x, mask, fill]) => self.select(value, mask, fill, x),
            (Op::Clamp, &[x, least, greatest]) => {
                let inner = self.temporary(self.classes[value]);
                self.bound(inner, true, x, least);
                self.bound(value, false, inner, greatest);
            }
            (Op::Pow, &[x, exponent]) => {
                let known = self.constant(exponent).map(|bits| self.float(bits, exponent));
                match known.and_then(|e| table::power(e, self.classes[x])) {
                    Some(run) => {
                        let x = self.tile(x);
                        self.compute(value, run, &[x]);
                    }
                    None => {
                        self.binary(value, op, x, exponent);
                        self.weight += 10.0;
                    }
                }
            }
            (Op::Add, &[a, b]) if self.mul_add(value, a, b) || self.mul_add(value, b, a) => {}
            (_, &[a, b]) => {
                self.binary(value, op, a, b);
                // With a rounding in between, the product is needed by itself.
                let plain =
                    matches!(dtype, DType::F32 | DType::F64) || rounding == Rounding::AtStores && dtype.is_float();
                self.product = (op == Op::Mul && plain).then_some(value);
            }
            (_, &[a]) => {
                let a = self.tile(a);
                if let Some(run) = table::unary(op, self.classes[a]) {
                    self.compute(value, run, &[a]);
                }
                self.weight += transcendental(op);
            }
            _ => {}
        }
        let explicit = matches!(op, Op::Cast(_)) || !dtype.is_float();
        // What is only stored is rounded by that.
        let stored = self.uses[value] == 1 && outputs.contains(&value);
        if !exact
            && !stored
            && (explicit || rounding == Rounding::EveryOp)
            && let Some(run) = round(dtype)
        {
            self.steps.push(Step::Round { run, value });
            self.weight += 0.05;
        }
    }

    /// Makes one loop of a sum and the product just before it, if nothing else needs that.
    fn mul_add(&mut self, value: usize, product: usize, other: usize) -> bool {
        if self.product != Some(product) || self.uses[product] != 1 || other == product {
            return false;
        }
        // Loads of the other operand may stand in between.
        let Some(at) = self.steps.iter().rposition(|s| !matches!(s, Step::Load { .. })) else {
            return false;
        };
        let (a, b) = match self.steps[at] {
            Step::Compute { args, value, .. } if value == product => (args[0], args[1]),
            _ => return false,
        };
        let (a, b) = if self.constant(a).is_some() { (b, a) } else { (a, b) };
        let constants = (self.constant(b).is_some(), self.constant(other).is_some());
        let Some(run) = table::mul_add(self.classes[value], constants.0, constants.1) else {
            return false;
        };
        self.steps.remove(at);
        self.compute(value, run, &[a, b, other]);
        true
    }

    fn compute(&mut self, value: usize, run: Loop, from: &[usize]) {
        let mut args = [from[0]; 3];
        args[..from.len()].copy_from_slice(from);
        self.steps.push(Step::Compute { run, args, value });
        self.weight += 0.06;
    }

    fn binary(&mut self, value: usize, op: Op, a: usize, b: usize) {
        let (a, b, kind) = self.pair(a, b);
        if let Some(run) = table::binary(op, self.classes[a], kind) {
            self.compute(value, run, &[a, b]);
        }
    }

    fn bound(&mut self, value: usize, below: bool, x: usize, limit: usize) {
        let (x, limit, kind) = self.pair(x, limit);
        if let Some(run) = table::bound(below, self.classes[x], kind) {
            self.compute(value, run, &[x, limit]);
        }
    }

    fn select(&mut self, value: usize, condition: usize, a: usize, b: usize) {
        let condition = self.tile(condition);
        let (a, b, kind) = self.pair(a, b);
        self.compute(value, table::select(self.classes[value], kind), &[condition, a, b]);
    }

    /// At most one of two operands stays a constant.
    fn pair(&mut self, a: usize, b: usize) -> (usize, usize, Kind) {
        match (self.constant(a), self.constant(b)) {
            (None, None) => (a, b, Kind::TileTile),
            (Some(_), None) => (a, b, Kind::ConstantTile),
            _ => (self.tile(a), b, Kind::TileConstant),
        }
    }

    fn constant(&self, value: usize) -> Option<u64> {
        match self.places[value] {
            Place::Constant(index) => Some(self.constants[index]),
            _ => None,
        }
    }

    fn float(&self, bits: u64, value: usize) -> f64 {
        match self.classes[value] {
            Class::F32 => f64::from(f32::from_bits(bits as u32)),
            _ => f64::from_bits(bits),
        }
    }

    fn temporary(&mut self, class: Class) -> usize {
        self.classes.push(class);
        self.places.push(Place::None);
        self.classes.len() - 1
    }

    /// The value itself, or a tile full of it if it is a constant.
    fn tile(&mut self, value: usize) -> usize {
        if self.constant(value).is_none() {
            return value;
        }
        let filled = self.temporary(self.classes[value]);
        self.compute(filled, table::fill(self.classes[value]), &[value]);
        filled
    }

    /// Gives every value a register, apart from those of its operands, and takes it back after the last use.
    fn allocate(&mut self) {
        let mut last = vec![0; self.places.len()];
        for (at, step) in self.steps.iter().enumerate() {
            match step {
                Step::Compute { args, value, .. } => args.iter().chain([value]).for_each(|a| last[*a] = at),
                Step::Load { value, .. } | Step::Round { value, .. } => last[*value] = at,
            }
        }
        for &output in &self.outputs {
            last[output] = usize::MAX;
        }
        let mut free: [Vec<usize>; 9] = Default::default();
        for (at, step) in self.steps.iter().enumerate() {
            if let Step::Compute { value, .. } | Step::Load { value, .. } = *step {
                let size = self.classes[value].size();
                let register = free[size].pop().unwrap_or_else(|| {
                    self.arena += size * TILE;
                    self.arena - size * TILE
                });
                self.places[value] = Place::Register(register);
            }
            let (used, count) = match *step {
                Step::Compute { args, value, .. } => ([args[0], args[1], args[2], value], 4),
                Step::Load { value, .. } | Step::Round { value, .. } => ([value; 4], 1),
            };
            for (i, &value) in used[..count].iter().enumerate() {
                if let Place::Register(register) = self.places[value]
                    && last[value] == at
                    && !used[..i].contains(&value)
                {
                    free[self.classes[value].size()].push(register);
                }
            }
        }
    }
}

/// True if every value of one dtype is one of the other.
fn widens(from: DType, to: DType) -> bool {
    use DType::*;
    from == to
        || match to {
            F32 => matches!(from, F16 | BF16 | Bool | U8 | I8 | I16),
            F64 => !matches!(from, I64),
            I64 => from.is_int() || from == Bool,
            I32 => matches!(from, I16 | I8 | U8 | Bool),
            I16 => matches!(from, I8 | U8 | Bool),
            U8 | I8 | F16 | BF16 => from == Bool,
            Bool => true,
            C64 | C128 => false,
        }
}

/// About the nanoseconds an element takes beyond loading and storing it.
fn transcendental(op: Op) -> f64 {
    match op {
        op if op.is_exact() => 0.0,
        Op::Square | Op::Not | Op::Cast(_) => 0.0,
        Op::Sqrt | Op::Rsqrt | Op::Reciprocal => 0.3,
        _ => 0.6,
    }
}

fn bits(scalar: Scalar, dtype: DType) -> u64 {
    let float = match scalar {
        Scalar::Float(x) => x,
        Scalar::Int(i) => i as f64,
    };
    let int = match scalar {
        Scalar::Float(x) => x as i64,
        Scalar::Int(i) => i,
    };
    match dtype {
        // A whole number is rounded once.
        DType::F16 | DType::BF16 | DType::F32 => u64::from(match scalar {
            Scalar::Float(x) => (x as f32).to_bits(),
            Scalar::Int(i) => (i as f32).to_bits(),
        }),
        DType::F64 => float.to_bits(),
        DType::Bool => u64::from(int != 0),
        DType::U8 => i64::from(int as u8) as u64,
        DType::I8 => i64::from(int as i8) as u64,
        DType::I16 => i64::from(int as i16) as u64,
        DType::I32 => i64::from(int as i32) as u64,
        DType::I64 | DType::C64 | DType::C128 => int as u64,
    }
}
