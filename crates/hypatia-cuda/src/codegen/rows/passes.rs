//! What the threads of a row do, pass by pass.

use hypatia_runtime::kernels::rowwise::RowOp;

use super::super::body::{body, kept};
use super::super::indent;
use super::super::pack::{Slot, all, each};
use super::{Plan, Stages};

impl Stages<'_> {
    /// A loop over the thread's elements as they come from the prologue; `inner` uses them as `x`.
    pub(super) fn visit(&self, first: bool, inner: &str) -> String {
        let (read, write) = self.before();
        let slots = |which: &[usize]| which.iter().map(|i| self.slot(*i)).collect::<Vec<_>>();
        let (read, write) = (slots(&read), if first { slots(&write) } else { vec![] });
        let pack = self.plan.pack;
        let element = self.element(&write) + inner;
        let coordinates = self
            .column_space
            .coordinates("c", self.before().0.into_iter().chain(self.before().1));
        let statements = [
            coordinates,
            all(&read, |s| s.read(pack)),
            all(&write, |s| s.declare(pack)),
            each(pack, &element),
            all(&write, Slot::write),
        ];
        self.plan.over_packs(&statements.concat())
    }

    /// Statements that make `x` of what was read, and set what the prologue writes.
    fn element(&self, write: &[Slot]) -> String {
        let Some(region) = self.rowwise.prologue() else {
            return format!("const auto x = {};\n", self.slot(0).element());
        };
        let body = body(region, "v", |i| self.slot(i).element());
        let assign: String = write.iter().zip(&body.outputs[1..]).map(|(s, v)| s.assign(v)).collect();
        format!("{}{assign}const auto x = {};\n", body.statements, body.outputs[0])
    }

    /// A pass over the elements, from registers where they are kept.
    fn pass(&self, first: bool, inner: &str) -> String {
        if self.plan.kept == 0 {
            return self.visit(first, inner);
        }
        let element = format!("const auto x = kept[p][j];\n{inner}");
        self.plan.over_packs(&each(self.plan.pack, &element))
    }

    /// A pass that makes one number of the row: `step` makes a new `{name}_part` of the old one and `x`.
    fn fold(&self, first: bool, name: &str, start: &str, step: &str, join: &str) -> String {
        let (threads, number) = (self.plan.threads, self.number());
        let part = self.pass(first, &format!("{name}_part = {step};\n"));
        format!("{number} {name}_part = {start};\n{part}const {number} {name} = {join}<{threads}>({name}_part);\n")
    }

    /// The greatest element, and the sum of the exponentials of how far the others are below it.
    pub(super) fn exponentials(&self) -> String {
        self.fold(true, "most", "-INFINITE", "x > most_part ? x : most_part", "greatest")
            + &self.fold(false, "sum", "0", "sum_part + exp(x - most)", "total")
    }

    /// All passes: what is needed of the row, then what becomes of it.
    pub(super) fn passes(&self) -> String {
        let number = self.number();
        let Plan { width, .. } = self.plan;
        let fold =
            |first: bool, name: &str, start: &str, step: &str, join: &str| self.fold(first, name, start, step, join);
        match self.rowwise.op() {
            RowOp::Sum => fold(true, "sum", "0", "sum_part + x", "total") + &self.one("sum"),
            RowOp::Mean => fold(true, "sum", "0", "sum_part + x", "total") + &self.one(&format!("sum / {width}")),
            RowOp::Amax => {
                fold(true, "most", "-INFINITE", "maximum(most_part, x)", "greatest_or_nan") + &self.one("most")
            }
            RowOp::Softmax { .. } => self.exponentials() + &self.each("exp(x - most) / sum"),
            RowOp::LogSoftmax => {
                self.exponentials()
                    + &format!("const {number} log_sum = log(sum);\n")
                    + &self.each("(x - most) - log_sum")
            }
            RowOp::RmsNorm { eps } => {
                fold(true, "squares", "0", "squares_part + x * x", "total")
                    + &format!("const {number} scale = rsqrt(squares / {width} + ({number}){eps:?});\n")
                    + &self.each("x * scale")
            }
            RowOp::LayerNorm { eps } => {
                // The mean is taken twice: what the first leaves matters where it is far from zero.
                fold(true, "sum", "0", "sum_part + x", "total")
                    + &format!("const {number} rough = sum / {width};\n")
                    + &fold(false, "rest", "0", "rest_part + (x - rough)", "total")
                    + &format!("const {number} low = rest / {width};\n")
                    + &fold(
                        false,
                        "squares",
                        "0",
                        "squares_part + ((x - rough) - low) * ((x - rough) - low)",
                        "total",
                    )
                    + &format!("const {number} scale = rsqrt(squares / {width} + ({number}){eps:?});\n")
                    + &self.each("((x - rough) - low) * scale")
            }
        }
    }

    /// What becomes of a row that is one number.
    fn one(&self, result: &str) -> String {
        let number = self.number();
        let slot = |i: usize| Slot {
            offset: "0".into(),
            stride: 0,
            ..self.slot(i)
        };
        let (_, write) = self.after();
        let values = match self.rowwise.epilogue() {
            None => (String::new(), vec!["result".to_owned()]),
            Some(region) => {
                let input = |i: usize| match i {
                    0 => "result".into(),
                    _ => format!("value({}[0])", slot(self.taken + i - 1).pointer),
                };
                let body = body(region, "w", input);
                (body.statements, body.outputs)
            }
        };
        let store = write.iter().zip(&values.1).map(|(i, v)| {
            let slot = slot(*i);
            format!("{}[0] = {};\n", slot.pointer, kept(slot.dtype, v))
        });
        let store: String = store.collect();
        let inner = format!("const {number} result = {result};\n{}{store}", values.0);
        format!("if (lane == 0) {{\n{}}}\n", indent(&inner, 1))
    }

    /// What becomes of every element of a row.
    fn each(&self, result: &str) -> String {
        let number = self.number();
        let (read, write) = self.after();
        let slots = |which: &[usize]| which.iter().map(|i| self.slot(*i)).collect::<Vec<_>>();
        let (read, write) = (slots(&read), slots(&write));
        let (statements, values) = match self.rowwise.epilogue() {
            None => (String::new(), vec!["result".to_owned()]),
            Some(region) => {
                let input = |i: usize| match i {
                    0 => "result".into(),
                    _ => self.slot(self.taken + i - 1).element(),
                };
                let body = body(region, "w", input);
                (body.statements, body.outputs)
            }
        };
        let assign: String = write.iter().zip(&values).map(|(s, v)| s.assign(v)).collect();
        let inner = format!("const {number} result = {result};\n{statements}{assign}");
        let pack = self.plan.pack;
        let mut needed: Vec<usize> = self.after().0.into_iter().chain(self.after().1).collect();
        let (mut before, mut source) = (String::new(), "const auto x = kept[p][j];\n".to_owned());
        if self.plan.kept == 0 {
            let taken = self.before().0;
            before = all(&slots(&taken), |s| s.read(pack));
            needed.extend(taken);
            source = self.element(&[]);
        }
        let parts = [
            self.column_space.coordinates("c", needed.into_iter()),
            before,
            all(&read, |s| s.read(pack)),
            all(&write, |s| s.declare(pack)),
            each(pack, &(source + &inner)),
            all(&write, Slot::write),
        ];
        self.plan.over_packs(&parts.concat())
    }
}
