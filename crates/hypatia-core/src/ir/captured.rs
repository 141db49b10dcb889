//! The form in which a captured FX graph crosses from Python: flat records, no op names known.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::attr::Attr;
use crate::dim::Dim;
use crate::ty::{DType, Device, TensorType, Ty};

/// A size: an integer, or terms of coefficient and symbols.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(untagged)]
pub enum CapturedDim {
    /// A known integer.
    Known(i64),
    /// A sum of products of symbols.
    Terms(Vec<(i64, Vec<String>)>),
}

impl CapturedDim {
    /// The size.
    pub fn dim(&self) -> Dim {
        match self {
            CapturedDim::Known(v) => Dim::Const(*v),
            CapturedDim::Terms(t) => Dim::from_terms(t.iter().map(|(c, s)| (s.clone(), *c))),
        }
    }

    /// The captured form of a size.
    pub fn of(dim: &Dim) -> CapturedDim {
        match dim.known() {
            Some(v) => CapturedDim::Known(v),
            None => CapturedDim::Terms(
                dim.terms()
                    .into_iter()
                    .map(|(s, c)| (c, s.into_iter().map(String::from).collect()))
                    .collect(),
            ),
        }
    }
}

/// What is known of a captured value.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CapturedType {
    /// A dense tensor: shape, torch dtype, device.
    Tensor(Vec<CapturedDim>, String, String),
    /// Several values.
    Tuple(Vec<CapturedType>),
    /// A symbolic or known integer.
    Int(CapturedDim),
    /// Anything else.
    #[default]
    Unknown,
}

/// An argument of a captured call.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CapturedArg {
    /// The value of another record.
    Node(u32),
    /// Python's `None`.
    None,
    /// A truth value.
    Bool(bool),
    /// An integer.
    Int(CapturedDim),
    /// A float, as text: JSON has no infinities.
    Float(String),
    /// A string.
    Str(String),
    /// A torch dtype.
    Dtype(String),
    /// A list.
    List(Vec<CapturedArg>),
    /// Something that has no form here.
    Other,
}

/// One node of the captured graph.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Record {
    /// Name of the FX node.
    pub name: String,
    /// The overload that is called, `aten.relu.default`; empty for inputs.
    #[serde(default)]
    pub target: String,
    /// Arguments in schema order, trailing defaults cut off; absent if the call has no such form.
    #[serde(default)]
    pub args: Option<Vec<CapturedArg>>,
    /// All records that it reads.
    #[serde(default)]
    pub reads: Vec<u32>,
    /// Type of its value.
    #[serde(default)]
    pub ty: CapturedType,
    /// A graph input or attribute.
    #[serde(default)]
    pub input: bool,
    /// A frozen parameter or buffer.
    #[serde(default)]
    pub weight: bool,
    /// Must run exactly once and in order.
    #[serde(default)]
    pub effect: bool,
    /// The effect is that it may draw random numbers: an op of the table that means this call
    /// draws none.
    #[serde(default)]
    pub random: bool,
    /// Changes an input in place: runs after everything else.
    #[serde(default)]
    pub mutates: bool,
    /// Which of `reads` it changes in place.
    #[serde(default)]
    pub changes: Vec<usize>,
}

/// A captured graph.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Captured {
    /// Nodes in order.
    pub records: Vec<Record>,
    /// Records that are results.
    pub outputs: Vec<u32>,
    /// The graph will be differentiated by torch: what stops gradients must stay.
    #[serde(default)]
    pub autograd: bool,
    /// Example values of symbols.
    #[serde(default)]
    pub hints: BTreeMap<String, i64>,
}

/// Devices by name; the CPU is number 0.
#[derive(Debug, Clone)]
pub struct Devices(Vec<String>);

impl Default for Devices {
    fn default() -> Self {
        Devices(vec!["cpu".into()])
    }
}

impl Devices {
    /// The number of a device, new if it was not in the table; none if the table is full.
    pub fn index(&mut self, name: &str) -> Option<Device> {
        let i = self.0.iter().position(|d| d == name).unwrap_or_else(|| {
            self.0.push(name.into());
            self.0.len() - 1
        });
        u8::try_from(i).ok().map(Device)
    }

    /// torch's name of a device, if it is in the table.
    pub fn name(&self, device: Device) -> Option<&str> {
        self.0.get(usize::from(device.0)).map(String::as_str)
    }

    /// The type that a captured one means.
    pub fn ty(&mut self, captured: &CapturedType) -> Ty {
        match captured {
            CapturedType::Tensor(shape, dtype, device) => match (DType::parse(dtype), self.index(device)) {
                (Some(dtype), Some(device)) => {
                    let shape: Vec<Dim> = shape.iter().map(CapturedDim::dim).collect();
                    Ty::Tensor(TensorType {
                        shape: shape.into(),
                        dtype,
                        device,
                    })
                }
                _ => Ty::Unknown,
            },
            CapturedType::Tuple(items) => Ty::Tuple(items.iter().map(|t| self.ty(t)).collect()),
            CapturedType::Int(d) => Ty::Attr(Attr::Int(d.dim())),
            CapturedType::Unknown => Ty::Unknown,
        }
    }
}
