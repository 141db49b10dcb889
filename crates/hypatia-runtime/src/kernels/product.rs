//! Matrix products: what follows one.

/// A function applied to every element of the product.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Activation {
    /// The product itself.
    #[default]
    None,
    /// `max(x, 0)`; NaN stays.
    Relu,
    /// GELU by the error function.
    Gelu,
    /// GELU by the hyperbolic tangent.
    GeluTanh,
    /// `x · sigmoid(x)`.
    Silu,
    /// The logistic function.
    Sigmoid,
    /// The hyperbolic tangent.
    Tanh,
}

/// The rows of the op table that activations are.
const NAMES: &[(&str, Activation)] = &[
    ("relu", Activation::Relu),
    ("gelu", Activation::Gelu),
    ("gelu_tanh", Activation::GeluTanh),
    ("silu", Activation::Silu),
    ("sigmoid", Activation::Sigmoid),
    ("tanh", Activation::Tanh),
];

impl Activation {
    /// The activation of a row of the op table.
    pub fn named(name: &str) -> Option<Activation> {
        NAMES.iter().find(|(row, _)| *row == name).map(|(_, a)| *a)
    }

    /// The row of the op table; none for the product itself.
    pub fn name(self) -> Option<&'static str> {
        NAMES.iter().find(|(_, a)| *a == self).map(|(name, _)| *name)
    }
}
