//! Numbers of a program in regions, as eager torch sees them.

use hypatia_core::attr::Attr;
use hypatia_core::ty::DType;

use crate::kernels::region::Scalar;

/// A number beside tensors of the dtype that an op computes in; none if torch must be asked.
///
/// torch makes the number one of that dtype, so that 0.7 equals bf16's 0.7. Products and quotients of 16-bit types take
/// it in f32, and on some devices so do sums and differences: there addends stay whole.
pub(super) fn as_eager(op: &str, number: &Attr, dtype: DType, whole_addends: bool) -> Option<Scalar> {
    let scalar = match number {
        Attr::Bool(b) => Scalar::Int(i64::from(*b)),
        Attr::Int(d) => Scalar::Int(d.known()?),
        Attr::Float(bits) => Scalar::Float(f64::from_bits(*bits)),
        _ => return None,
    };
    let value = number.number()?;
    if !dtype.is_float() {
        // What does not fit wraps, or is an error.
        let fits = op != "where" || dtype.round(value) == value;
        return (matches!(scalar, Scalar::Int(_)) && fits).then_some(scalar);
    }
    let single = match op {
        "mul" | "div" => true,
        "add" | "sub" => whole_addends,
        _ => false,
    };
    let rounded = dtype.round(value);
    match op {
        // An error in torch.
        "clamp" | "masked_fill" | "pow" if value.is_finite() && rounded.is_infinite() => None,
        // Every element is NaN then.
        "clamp" if value.is_nan() => None,
        _ if single || matches!(dtype, DType::F32 | DType::F64) => Some(scalar),
        _ => Some(Scalar::Float(rounded)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_the_dtype_that_eager_gives_them() {
        let seven = Attr::float(0.7);
        let seen = |op, dtype, whole_addends| as_eager(op, &seven, dtype, whole_addends);
        let whole = Some(Scalar::Float(0.7));
        let rounded = Some(Scalar::Float(0.69921875));
        for op in ["eq", "ge", "pow", "maximum", "clamp", "add", "sub"] {
            assert_eq!(seen(op, DType::BF16, false), rounded, "{op}");
            assert_eq!(seen(op, DType::F32, false), whole, "{op}");
        }
        for op in ["mul", "div"] {
            assert_eq!(seen(op, DType::BF16, false), whole, "{op}");
        }
        for (op, want) in [("add", whole), ("mul", whole), ("lt", rounded)] {
            assert_eq!(seen(op, DType::BF16, true), want, "{op}");
        }
        let large = (1 << 53) + 1;
        let exact = as_eager("eq", &Attr::int(large), DType::I64, false);
        assert_eq!(exact, Some(Scalar::Int(large)));
        assert_eq!(as_eager("clamp", &Attr::float(7e4), DType::F16, false), None);
        assert_eq!(as_eager("clamp", &Attr::float(f64::NAN), DType::F32, false), None);
        assert_eq!(as_eager("where", &Attr::int(300), DType::U8, false), None);
    }
}
