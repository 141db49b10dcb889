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
