//! Devices: what each can do, which is all that lowering knows of them, and how each runs plans.

use std::ops::RangeInclusive;
use std::sync::Arc;

use hypatia_core::ty::DType;

use crate::kernels::call::Call;
use crate::kernels::product::Activation;
use crate::step::Plan;

/// What a device can do. Lowering asks nothing else, so that a plan for a device holds no step that it cannot run.
#[derive(Debug)]
pub struct Abilities {
    /// The device's name, which its plans keep.
    pub name: &'static str,
    /// Element types of matrix products; products of others are calls into torch.
    pub products: &'static [DType],
    /// For which element types the step of a product applies an activation; otherwise it is a region of its own.
    pub activations: fn(Activation) -> &'static [DType],
    /// A product's step adds a residual after its activation; otherwise it adds one only if there is no activation.
    pub adds_after_activation: bool,
    /// Products of few rows whose step applies any activation, and then multiplies by a tensor if it does not add one.
    pub few_rows: Option<FewRows>,
    /// Weight and bias of a product may be any values; otherwise they are constants, which are packed when the plan is
    /// bound.
    pub live_weights: bool,
    /// The products for which a weight that changes is packed at each call, if there are some; see [`Packing`].
    pub packs_at_calls: Option<Packing>,
    /// A weight may be a value of more than two dimensions that lies as a matrix does; otherwise it is copied.
    pub weights_of_any_rank: bool,
    /// The rows of a product's left factor may lie as columns; otherwise they are copied.
    pub transposed_rows: bool,
    /// Products of 16 bits are faster over rows that begin at multiples of 16 bytes: values in between get such rows.
    pub pads_rows: bool,
    /// Rows of any number of dimensions times one matrix are a product; otherwise they are calls into torch.
    pub rows_by_matrix: bool,
    /// Element types of products of matrices of a batch, one factor of which is the same for all; others are calls into
    /// torch. Linear layers over places are made such products.
    pub batches: &'static [DType],
    /// A product may have no elements or no terms; otherwise it is a call into torch.
    pub empty_products: bool,
    /// A product may compute some of its columns only: parts of a merged layer that are results are steps of their own,
    /// which write them where they belong.
    pub columns_apart: bool,
    /// Sums over the first dimensions are steps, or come with a product that reads the same rows.
    pub column_sums: bool,
    /// A product may keep a bit for each element of a ReLU, and be masked by such bits: each row of them is filled up to
    /// a multiple of so many.
    pub relu_masks: Option<usize>,
    /// Norms of training steps, with their statistics, and their gradients are steps for rows of at most so many
    /// elements.
    pub norm_statistics: Option<usize>,
    /// Attention reads rows that begin at multiples of 16 bytes; others are copied before.
    pub aligned_attention: bool,
    /// Attention writes its result in the order in which its query lies in memory.
    pub attention_as_query: bool,
    /// Element types of attention with one query for each head that is a step; otherwise it is a call into torch.
    pub decodes: &'static [DType],
    /// Images of convolutions have their channels last.
    pub channels_last: Option<Images>,
    /// Convolutions and poolings of each channel by itself, of images with channels last, are steps for windows of at
    /// most so many elements along each dimension.
    pub depthwise: Option<usize>,
    /// Numbers that are added to 16-bit tensors, or subtracted, keep the precision of f32; otherwise they are rounded to
    /// 16 bits first, as eager torch does on this device.
    pub whole_addends: bool,
    /// Torch's kernels for this device multiply by a sixth where they could divide by six.
    pub multiplies_by_sixths: bool,
    /// Regions write into inputs that change, and small ones are put together.
    pub changes_inputs: bool,
    /// A region computes what it reads several times, if that is little work; otherwise that is a step of its own.
    pub computes_repeated: bool,
    /// Regions read within bounds and by index: paddings and gathers are parts of them; otherwise they are calls into
    /// torch.
    pub any_reads: bool,
    /// A few tensors of one size are put together by a region, which computes them where they are needed; otherwise that
    /// is a call into torch.
    pub puts_together: bool,
}

/// Products of few rows, which take as long as reading their weight does.
#[derive(Debug)]
pub struct FewRows {
    /// The most that are few.
    pub rows: usize,
    /// Elements that a weight has at least.
    pub elements: usize,
    /// What divides the columns of the left factor.
    pub unit: usize,
    /// Element types of such products.
    pub dtypes: &'static [DType],
}

/// How a device computes convolutions of images that have their channels last.
#[derive(Debug)]
pub struct Images {
    /// Element types of such images.
    pub dtypes: &'static [DType],
    /// Those of them whose convolutions with a window of one are linear layers over channels.
    pub linear: &'static [DType],
    /// Who computes the others.
    pub by: Convolutions,
}

/// A library for convolutions, as torch calls it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Convolutions {
    /// It writes where it is told, and biases are added by what follows.
    Cudnn,
    /// It adds the bias, and reads weights in a form of its own, which is made once.
    Onednn,
}

/// Products of fp32 whose weight changes from call to call and is worth packing each time. Others are calls into torch.
#[derive(Debug)]
pub struct Packing {
    /// The least number of rows.
    pub rows: usize,
    /// The least number of terms of a sum.
    pub terms: usize,
    /// How many columns.
    pub columns: RangeInclusive<usize>,
}

impl Abilities {
    /// A device that can do nothing but pointwise work and ops along rows; a new one says what it can do beside.
    pub const NONE: Abilities = Abilities {
        name: "none",
        products: &[],
        activations: |_| &[],
        adds_after_activation: false,
        few_rows: None,
        live_weights: false,
        packs_at_calls: None,
        weights_of_any_rank: false,
        transposed_rows: false,
        pads_rows: false,
        rows_by_matrix: false,
        batches: &[],
        empty_products: false,
        columns_apart: false,
        column_sums: false,
        relu_masks: None,
        norm_statistics: None,
        aligned_attention: false,
        attention_as_query: false,
        decodes: &[],
        channels_last: None,
        depthwise: None,
        whole_addends: false,
        multiplies_by_sixths: false,
        changes_inputs: false,
        computes_repeated: false,
        any_reads: false,
        puts_together: false,
    };

    /// Whether images of this element type have their channels last.
    pub fn turns_images_of(&self, dtype: DType) -> bool {
        (self.channels_last.as_ref()).is_some_and(|images| images.dtypes.contains(&dtype))
    }

    /// Whether the step of a product of this element type applies an activation.
    pub fn applies(&self, activation: Activation, dtype: DType) -> bool {
        (self.activations)(activation).contains(&dtype)
    }
}

/// A device that plans can be made for: the type of torch's devices that it stands for, and what it can do.
pub type Registered = (&'static str, &'static Abilities);

/// What the device of a torch name such as `cuda:0` can do, if it is in a list.
pub fn find(devices: &[Registered], torch: &str) -> Option<&'static Abilities> {
    let kind = torch.split(':').next();
    let mut known = devices.iter();
    known
        .find(|(name, _)| Some(*name) == kind)
        .map(|(_, abilities)| *abilities)
}

/// A device that plans run on.
pub trait Device {
    /// Where a value is in the device's memory.
    type Address: Copy;
    /// What binding depends on beside the constants.
    type Setting<'a>;
    /// What a run needs beside its values: threads, or a stream and memory for what is in between.
    type Queue;
    /// A plan with its constants, ready to run.
    type Bound;
    /// What can go wrong.
    type Error: std::error::Error;

    /// What it can do.
    fn abilities(&self) -> &'static Abilities;

    /// Its name, which its plans keep.
    fn name(&self) -> &'static str {
        self.abilities().name
    }

    /// Makes a plan ready to run: constants in the order of the plan's `constants`, and its calls into torch.
    ///
    /// # Safety
    /// Each address is that of its constant, densely, for as long as the result is used, if the device does not say
    /// otherwise.
    unsafe fn bind(
        &self,
        plan: Arc<Plan>,
        constants: &[Self::Address],
        calls: Vec<Box<dyn Call>>,
        setting: Self::Setting<'_>,
    ) -> Result<Self::Bound, Self::Error>;

    /// Runs all steps. Some devices are done when this returns, others when their queue is.
    ///
    /// # Safety
    /// Each address is that of its value, densely; outputs overlap nothing else; all of it lives until the run is done.
    unsafe fn run(
        &self,
        bound: &Self::Bound,
        queue: Self::Queue,
        inputs: &[Self::Address],
        outputs: &[Self::Address],
    ) -> Result<(), Self::Error>;
}
