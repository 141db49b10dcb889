//! How a thread gets at the elements of an operand that lie along the innermost dimension, and the frame of a kernel.

use hypatia_core::ty::DType;

use super::body::{kept, stored};

/// An operand inside a loop over packs.
#[derive(Debug, Clone)]
pub(super) struct Slot {
    /// The parameter.
    pub(super) pointer: String,
    /// What the thread's share of it is called.
    pub(super) local: String,
    pub(super) dtype: DType,
    /// From one element of a pack to the next.
    pub(super) stride: isize,
    /// Where the first element is.
    pub(super) offset: String,
}

impl Slot {
    /// Statement that reads the elements, or the one that they all are.
    pub(super) fn read(&self, width: usize) -> String {
        let Slot {
            pointer, local, offset, ..
        } = self;
        match self.stride {
            1 => format!("const auto {local} = read<{width}>({pointer} + {offset});\n"),
            0 => format!("const auto {local} = value({pointer}[{offset}]);\n"),
            _ => format!("const auto* {local} = {pointer} + {offset};\n"),
        }
    }

    /// The value of element `j`.
    pub(super) fn element(&self) -> String {
        let Slot { local, stride, .. } = self;
        match stride {
            1 => format!("value({local}.at[j])"),
            0 => local.clone(),
            _ => format!("value({local}[j * {stride}])"),
        }
    }

    /// Statement that makes room for what is written.
    pub(super) fn declare(&self, width: usize) -> String {
        let Slot {
            pointer, local, offset, ..
        } = self;
        match self.stride {
            1 => format!("Pack<{}, {width}> {local};\n", stored(self.dtype)),
            _ => format!("auto* {local} = {pointer} + {offset};\n"),
        }
    }

    /// Statement that sets element `j`.
    pub(super) fn assign(&self, value: &str) -> String {
        let Slot { local, stride, .. } = self;
        let value = kept(self.dtype, value);
        match stride {
            1 => format!("{local}.at[j] = {value};\n"),
            _ => format!("{local}[j * {stride}] = {value};\n"),
        }
    }

    /// Statement that writes what was set.
    pub(super) fn write(&self) -> String {
        let Slot {
            pointer, local, offset, ..
        } = self;
        match self.stride {
            1 => format!("write({pointer} + {offset}, {local});\n"),
            _ => String::new(),
        }
    }
}

/// A loop over the elements of a pack.
pub(super) fn each(width: usize, inner: &str) -> String {
    format!(
        "#pragma unroll\nfor (int j = 0; j < {width}; j++) {{\n{}}}\n",
        super::indent(inner, 1)
    )
}

/// All statements of a list of slots, in order.
pub(super) fn all(slots: &[Slot], statement: impl Fn(&Slot) -> String) -> String {
    slots.iter().map(statement).collect()
}

/// The sources and launch bounds that kernels share.
pub(super) struct Shell<'a> {
    pub(super) name: &'a str,
    /// What is computed, a line each.
    pub(super) comment: &'a [String],
    pub(super) parameters: String,
    pub(super) threads: u32,
    pub(super) body: String,
}

impl Shell<'_> {
    /// The text of the kernel, with all that it needs.
    pub(super) fn source(&self) -> String {
        self.source_with("")
    }

    /// The same, with functions of its own.
    pub(super) fn source_with(&self, functions: &str) -> String {
        let comment: String = self.comment.iter().map(|line| format!("// {line}\n")).collect();
        format!(
            "{}{functions}{comment}extern \"C\" __global__ void __launch_bounds__({}) {}({}) {{\n    begin();\n{}}}\n",
            super::PRELUDE,
            self.threads,
            self.name,
            self.parameters,
            super::indent(&self.body, 1),
        )
    }
}
