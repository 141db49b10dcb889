//! Instructions as statements.

use hypatia_core::ty::DType;
use hypatia_runtime::kernels::region::{Meaning, Op, Region, Rounding, Scalar};

/// The C++ type of elements in memory.
pub(super) fn stored(dtype: DType) -> &'static str {
    match dtype {
        DType::Bool => "bool",
        DType::U8 => "unsigned char",
        DType::I8 => "signed char",
        DType::I16 => "short",
        DType::I32 => "int",
        DType::I64 => "i64",
        DType::F16 => "f16",
        DType::BF16 => "bf16",
        DType::F32 => "float",
        DType::F64 => "double",
        DType::C64 => "float2",
        DType::C128 => "double2",
    }
}

/// The C++ type that values of a dtype are computed in.
pub(super) fn computed(dtype: DType) -> &'static str {
    match dtype {
        DType::Bool => "bool",
        DType::F64 => "double",
        d if d.is_float() => "float",
        _ => "i64",
    }
}

/// A value as an element to be written.
pub(super) fn kept(dtype: DType, value: &str) -> String {
    format!("As<{}>::of({value})", stored(dtype))
}

/// A region as statements.
pub(super) struct Body {
    pub(super) statements: String,
    /// The name of the value of each output.
    pub(super) outputs: Vec<String>,
}

/// Which of a region's inputs matter.
pub(super) fn inputs_used(region: &Region) -> Vec<bool> {
    let mut used = region.meaning().needed();
    used.truncate(region.inputs().len());
    used
}

/// Statements for one element. `input` is the text of an input's value, `prefix` what the values are called.
pub(super) fn body(region: &Region, prefix: &str, input: impl Fn(usize) -> String) -> Body {
    let meaning = region.meaning();
    let inputs = region.inputs().len();
    let needed = meaning.needed();
    let mut statements = String::new();
    let mut declare = |value: usize, text: String| {
        let class = computed(meaning.types[value]);
        statements += &format!("const {class} {prefix}{value} = {text};\n");
    };
    for value in (0..inputs).filter(|v| needed[*v]) {
        declare(value, input(value));
    }
    for (value, instruction) in (inputs..).zip(&meaning.instructions).filter(|(v, _)| needed[*v]) {
        let args: Vec<String> = instruction.args.iter().map(|a| format!("{prefix}{a}")).collect();
        let from = instruction.args.first().map(|a| meaning.types[*a]);
        let exponent = instruction.args.get(1).and_then(|a| constant(meaning, inputs, *a));
        let text = expression(instruction.op, &args, from, exponent);
        declare(value, rounded(meaning, instruction.op, meaning.types[value], text));
    }
    let outputs = meaning.outputs.iter().map(|o| format!("{prefix}{o}")).collect();
    Body { statements, outputs }
}

fn constant(meaning: &Meaning, inputs: usize, value: usize) -> Option<f64> {
    match meaning.instructions.get(value.checked_sub(inputs)?)?.op {
        Op::Constant(Scalar::Float(x), _) => Some(x),
        _ => None,
    }
}

/// Rounds to a dtype that has fewer values than what is computed in, when the region says so.
fn rounded(meaning: &Meaning, op: Op, dtype: DType, text: String) -> String {
    if op.is_exact() && dtype.is_float() || matches!(op, Op::Constant(..)) {
        return text;
    }
    let always = matches!(op, Op::Cast(_)) || meaning.rounding == Rounding::EveryOp;
    match dtype {
        DType::F16 | DType::BF16 if always => format!("rounded<{}>({text})", stored(dtype)),
        DType::U8 | DType::I8 | DType::I16 | DType::I32 => format!("(i64)({})({text})", stored(dtype)),
        _ => text,
    }
}

fn expression(op: Op, args: &[String], from: Option<DType>, exponent: Option<f64>) -> String {
    let infix = |sign: &str| format!("{} {sign} {}", args[0], args[1]);
    match op {
        Op::Constant(scalar, dtype) => literal(scalar, dtype),
        Op::Cast(to) => cast(&args[0], from.unwrap_or(to), to),
        Op::Pow => power(args, exponent),
        Op::Not => format!("!{}", args[0]),
        Op::Eq => infix("=="),
        Op::Ne => infix("!="),
        Op::Lt => infix("<"),
        Op::Le => infix("<="),
        Op::Gt => infix(">"),
        Op::Ge => infix(">="),
        Op::And => infix("&&"),
        Op::Or => infix("||"),
        Op::Where => format!("{} ? {} : {}", args[0], args[1], args[2]),
        Op::MaskedFill => format!("{} ? {} : {}", args[1], args[2], args[0]),
        _ => format!("{}({})", function(op), args.join(", ")),
    }
}

/// The function of an op, for all types that it is computed in: CUDA's own, or one of the library's here.
pub(super) fn function(op: Op) -> &'static str {
    match op {
        Op::Constant(..) => "constant",
        Op::Cast(_) => "cast",
        // Those of C++ have other types.
        Op::Abs => "abs_",
        Op::Not => "not",
        Op::And => "and",
        Op::Or => "or",
        other => other.name().unwrap_or("op"),
    }
}

/// Powers with exponents that torch treats by themselves.
fn power(args: &[String], exponent: Option<f64>) -> String {
    let x = &args[0];
    match exponent {
        Some(1.0) => x.clone(),
        Some(0.5) => format!("sqrt({x})"),
        Some(-0.5) => format!("rsqrt({x})"),
        Some(-1.0) => format!("reciprocal({x})"),
        Some(2.0) => format!("square({x})"),
        Some(3.0) => format!("cube({x})"),
        Some(-2.0) => format!("reciprocal(square({x}))"),
        _ => format!("pow({})", args.join(", ")),
    }
}

fn cast(x: &str, from: DType, to: DType) -> String {
    match to {
        DType::Bool => format!("{x} != 0"),
        // Conversions of their own: what is out of range is not what is left of 64 bits.
        DType::I8 | DType::I16 | DType::I32 if from.is_float() => format!("({}){x}", stored(to)),
        _ => format!("({}){x}", computed(to)),
    }
}

pub(super) fn literal(scalar: Scalar, dtype: DType) -> String {
    let (float, int) = match scalar {
        Scalar::Float(x) => (x, x as i64),
        Scalar::Int(i) => (i as f64, i),
    };
    match dtype {
        DType::Bool => (int != 0).to_string(),
        DType::F64 if float.is_finite() => format!("{float:?}"),
        DType::F64 => format!("__longlong_as_double({:#x}ll)", float.to_bits()),
        d if d.is_float() => {
            let single = match scalar {
                Scalar::Float(x) => x as f32,
                Scalar::Int(i) => i as f32,
            };
            if single.is_finite() {
                format!("{single:?}f")
            } else {
                format!("__int_as_float({:#x})", single.to_bits())
            }
        }
        DType::I64 if int == i64::MIN => "(-9223372036854775807ll - 1)".into(),
        DType::I64 => format!("{int}ll"),
        // A store and a load would leave this of it.
        _ => format!("(i64)({}){int}ll", stored(dtype)),
    }
}

/// What a region computes, for a comment.
pub(super) fn describe(region: &Region, names: impl Fn(usize) -> String) -> Vec<String> {
    let meaning = region.meaning();
    let inputs = region.inputs().len();
    let mut texts: Vec<String> = (0..inputs).map(names).collect();
    for (value, instruction) in (inputs..).zip(&meaning.instructions) {
        let args: Vec<&str> = instruction.args.iter().map(|a| texts[*a].as_str()).collect();
        let text = match instruction.op {
            Op::Constant(Scalar::Float(x), _) => format!("{x:?}"),
            Op::Constant(Scalar::Int(i), _) => i.to_string(),
            Op::Cast(to) => format!("{to}({})", args.join(", ")),
            op => format!("{}({})", function(op).trim_end_matches('_'), args.join(", ")),
        };
        // What is used several times would be written out each time.
        texts.push(if text.len() > 120 { format!("v{value}") } else { text });
    }
    meaning.outputs.iter().map(|o| texts[*o].clone()).collect()
}

/// A name for a kernel: what it does, in at most four words.
pub(super) fn kernel_name(kind: &str, regions: &[Option<&Region>]) -> String {
    let ops = regions.iter().flatten().flat_map(|r| &r.meaning().instructions);
    let words = ops
        .map(|i| i.op)
        .filter(|op| !matches!(op, Op::Constant(..) | Op::Cast(_)));
    let words: Vec<&str> = words.take(4).map(|op| function(op).trim_end_matches('_')).collect();
    [kind].into_iter().chain(words).collect::<Vec<_>>().join("_")
}
