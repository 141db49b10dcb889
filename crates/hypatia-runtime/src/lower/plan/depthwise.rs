//! Convolutions and poolings of each channel by itself, on devices that have a kernel for them, with the pointwise work
//! that follows.

use egg::Id;
use hypatia_core::attr::Attr;

use super::images::{ORDER, channels_last_strides};
use super::{Lowering, no_plan};
use crate::error::Result;
use crate::kernels::region::{Region, Rounding};
use crate::operand::Operand;
use crate::step::{DepthwiseStep, Pool, Task, Window, WindowOp};

/// The order in which the dimensions of the weight lie: the channels of each element of the window.
const TAPS: [usize; 4] = [2, 3, 0, 1];

impl Lowering<'_> {
    /// How the window of a node moves, if it is such a convolution.
    pub(super) fn depthwise(&self, id: Id) -> Option<Window> {
        let largest = self.can.depthwise?;
        if !self.has_channels_last(id) {
            return None;
        }
        let children = &self.program.node(id).children;
        let (x, dtype) = self.shape(children[0]).ok()?;
        let (w, _) = self.shape(children[1]).ok()?;
        let channels = x[1];
        let groups = self.attr(children[6])?.as_int()?;
        let alone = channels > 1 && groups == channels as i64 && w[..2] == [channels, 1];
        let fits = w[2..].iter().all(|n| *n <= largest) && self.is_attr(children[2]);
        (alone && self.can.turns_images_of(dtype) && fits).then_some(Window {
            size: [w[2], w[3]],
            stride: self.pair(children[3])?,
            padding: self.pair(children[4])?,
            dilation: self.pair(children[5])?,
        })
    }

    /// Lets such a convolution put zeros around the image that it reads, where only it reads what is padded.
    pub(super) fn absorb_zeros(&mut self, id: Id) {
        if !self.can.any_reads || self.depthwise(id).is_none() {
            return;
        }
        let x = self.program.node(id).children[0];
        let padded = match self.name(x) {
            "permute" => self.program.node(x).children[0],
            _ => x,
        };
        let alone = |id: Id| self.uses[usize::from(id)] == 1 && !self.source.weight[usize::from(id)];
        if alone(x) && alone(padded) && self.puts_zeros_around_images(x, padded) {
            self.inside[usize::from(x)] = true;
            self.inside[usize::from(padded)] = true;
        }
    }

    fn pair(&self, id: Id) -> Option<[usize; 2]> {
        let found = self.attr(id).and_then(Attr::known_ints)?;
        let found: Vec<usize> = found.into_iter().map(|n| n as usize).collect();
        found.try_into().ok()
    }

    /// What a node takes of the pixels under a window, if it is a pooling of images that lie with channels last. Its
    /// result would lie as they do.
    pub(super) fn pool(&self, id: Id) -> Option<(Pool, Window)> {
        let largest = self.can.depthwise?;
        let children = &self.program.node(id).children;
        let (pool, dilation) = match self.name(id) {
            "max_pool2d" => (Pool::Max, self.pair(children[4])?),
            "avg_pool2d" => {
                let counts_padding = *self.attr(children[5])? == Attr::Bool(true);
                (Pool::Mean { counts_padding }, [1; 2])
            }
            _ => return None,
        };
        let (shape, dtype) = self.shape(id).ok()?;
        let x = self.place.get(&children[0])?;
        let lies = self.source.images && shape.len() == 4 && shape[1] > 1 && x.strides[1] == 1;
        let size = self.pair(children[1])?;
        let fits = size.iter().all(|n| *n <= largest) && !shape.contains(&0);
        let strides = self.attr(children[2]).and_then(Attr::known_ints)?;
        (lies && self.can.turns_images_of(dtype) && fits).then_some((
            pool,
            Window {
                size,
                // One that names no stride moves by its size.
                stride: if strides.is_empty() {
                    size
                } else {
                    self.pair(children[2])?
                },
                padding: self.pair(children[3])?,
                dilation,
            },
        ))
    }

    pub(super) fn pool_step(&mut self, id: Id) -> Result<()> {
        let (pool, window) = self.pool(id).ok_or_else(|| no_plan("another pooling"))?;
        let x = self.operand(self.program.node(id).children[0])?;
        self.windowed(id, &x, WindowOp::Pool(pool), window)
    }

    pub(super) fn depthwise_step(&mut self, id: Id) -> Result<()> {
        let mut window = self.depthwise(id).ok_or_else(|| no_plan("another convolution"))?;
        let children = self.program.node(id).children.clone();
        let mut x = match self.is_inner_read(children[0]) {
            false => self.operand(children[0])?,
            true => {
                let (x, before) = self.unpadded(children[0])?;
                window.padding = [0, 1].map(|i| window.padding[i] + before[2 + i]);
                x
            }
        };
        if x.strides[1] != 1 {
            let wanted = channels_last_strides(&x.shape);
            x = self.as_wanted(children[0], x, Some(&wanted))?;
        }
        let w = self.kernel_of(children[1], &TAPS)?.permuted(&TAPS);
        let w = match w.is_dense() && w.offset == 0 {
            true => w.value,
            // A weight that changes from call to call.
            false => self.copied(children[1], &w)?,
        };
        self.windowed(id, &x, WindowOp::Conv(w), window)
    }

    fn windowed(&mut self, id: Id, x: &Operand, op: WindowOp, window: Window) -> Result<()> {
        let (shape, dtype) = self.shape(id)?;
        let y = self.laid(&shape, dtype, Some(&channels_last_strides(&shape)))?;
        self.plan.steps.push(Task::Depthwise(Box::new(DepthwiseStep {
            x: x.permuted(&ORDER),
            op,
            window,
            after: Region::new(&[dtype], vec![], &[0], Rounding::EveryOp)?,
            inputs: vec![None],
            shape: y.permuted(&ORDER).shape,
            output: y.value,
        })));
        self.place.insert(id, y);
        Ok(())
    }

    /// Lets such steps do the pointwise work for which alone they are read: they run where it ran.
    pub(super) fn merge_depthwise(&mut self) {
        let mut at = 0;
        while at < self.plan.steps.len() {
            let Some(reader) = self.following(at) else {
                at += 1;
                continue;
            };
            let (region, step) = (self.plan.steps.remove(reader), self.plan.steps.remove(at));
            if let (Task::Region(r), Task::Depthwise(mut d)) = (region, step) {
                let made = d.output;
                d.inputs = r.inputs.into_iter().map(|o| (o.value != made).then_some(o)).collect();
                (d.after, d.output) = (r.region, r.outputs[0]);
                self.plan.steps.insert(reader - 1, Task::Depthwise(d));
            }
        }
    }

    /// The region that can become a part of a step: nobody else reads what that writes.
    fn following(&self, at: usize) -> Option<usize> {
        let Task::Depthwise(d) = &self.plan.steps[at] else {
            return None;
        };
        if !d.after.is_input() || self.plan.outputs.contains(&d.output) {
            return None;
        }
        let steps = self.plan.steps.iter().enumerate();
        let mut readers = steps.filter(|(_, s)| s.reads().contains(&d.output) || s.weights().contains(&d.output));
        let (reader, task) = readers.next()?;
        let Task::Region(r) = task else {
            return None;
        };
        let whole = Operand::dense(d.output, &d.shape);
        let alike = |o: &Operand| o.value != d.output || o.lies_as(&whole.strides) && o.offset == 0;
        let one = readers.next().is_none() && r.outputs.len() == 1 && r.slices.is_empty() && r.reads.is_empty();
        (one && r.shape == d.shape && r.inputs.iter().all(alike)).then_some(reader)
    }
}
