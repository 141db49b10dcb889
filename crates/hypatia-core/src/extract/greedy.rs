//! One pass bottom-up: each class takes the node that looks cheapest from below.
//!
//! Both variants charge nothing for forced classes, which are paid for whatever is chosen. That
//! keeps the sums local to a layer: with everything charged, the tree cost of a deep network
//! doubles per layer until it swallows every difference.

use super::problem::{Problem, improves};

/// Charges a shared class to each of its readers in full.
pub(super) fn tree(problem: &Problem) -> Vec<usize> {
    let mut totals: Vec<f64> = Vec::with_capacity(problem.len());
    let mut choice = Vec::with_capacity(problem.len());
    for class in 0..problem.len() {
        // An overflow would be infinite, and of infinite costs the first node wins.
        let (total, id) = cheapest(problem, class, |id| {
            let node = &problem.nodes[id];
            node.cost + node.children.iter().map(|&child| totals[child]).sum::<f64>()
        });
        totals.push(if problem.forced[class] { 0.0 } else { total });
        choice.push(id);
    }
    choice
}

/// Charges a class once, however many nodes below read it.
pub(super) fn dag(problem: &Problem) -> Vec<usize> {
    let mut sets = Sets::new(problem);
    let mut choice = Vec::with_capacity(problem.len());
    for class in 0..problem.len() {
        let (total, id) = cheapest(problem, class, |id| sets.load(problem, id));
        if !problem.forced[class] {
            sets.load(problem, id);
            sets.store(class, problem.nodes[id].cost, total);
        }
        choice.push(id);
    }
    choice
}

/// The first of the cheapest forward nodes of a class, with its total.
fn cheapest(problem: &Problem, class: usize, mut total: impl FnMut(usize) -> f64) -> (f64, usize) {
    let mut best: Option<(f64, usize)> = None;
    for id in problem.forward(class) {
        let total = total(id);
        if best.is_none_or(|(least, _)| improves(total, least)) {
            best = Some((total, id));
        }
    }
    best.expect("every class keeps a forward node")
}

/// For each class that is not forced, the set of such classes that its choice brings in, as bits.
/// Classes are numbered bottom-up, so a set is a short span of words near its own class.
struct Sets {
    /// The bit of each class that is not forced.
    bit: Vec<usize>,
    /// By bit: the price of the class alone, and of its whole set.
    price: Vec<f64>,
    total: Vec<f64>,
    /// By bit: where the set lies in `words`, how many words, and which word is its first.
    span: Vec<(usize, usize, usize)>,
    words: Vec<u64>,
    /// The set being formed, in the words `low..high`.
    union: Vec<u64>,
    low: usize,
    high: usize,
}

impl Sets {
    fn new(problem: &Problem) -> Self {
        let mut next = 0;
        let bit = problem.forced.iter().map(|&forced| {
            next += usize::from(!forced);
            next.wrapping_sub(1)
        });
        let bit = bit.collect();
        let words = next.div_ceil(64);
        Self {
            bit,
            price: Vec::with_capacity(next),
            total: Vec::with_capacity(next),
            span: Vec::with_capacity(next),
            words: Vec::new(),
            union: vec![0; words],
            low: words,
            high: 0,
        }
    }

    /// Forms the union of the sets below a node; answers what it costs together with the node.
    fn load(&mut self, problem: &Problem, id: usize) -> f64 {
        if self.low < self.high {
            self.union[self.low..self.high].fill(0);
        }
        (self.low, self.high) = (self.union.len(), 0);
        let node = &problem.nodes[id];
        let below = node.children.iter().filter(|&&child| !problem.forced[child]);
        let below = below.map(|&child| self.bit[child]);
        // The dearest set is taken as it is; only what the others add is summed.
        let Some(dearest) = below.clone().max_by(|&a, &b| self.total[a].total_cmp(&self.total[b])) else {
            return node.cost;
        };
        let below: smallvec::SmallVec<[usize; 8]> = below.collect();
        let mut total = node.cost + self.total[dearest];
        self.absorb(dearest);
        for bit in below.into_iter().filter(|&bit| bit != dearest) {
            total += self.absorb(bit);
        }
        total
    }

    /// Adds a set to the union; answers the price of what was not there yet.
    fn absorb(&mut self, bit: usize) -> f64 {
        let (start, len, first) = self.span[bit];
        self.low = self.low.min(first);
        self.high = self.high.max(first + len);
        let mut added = 0.0;
        for (at, &word) in self.words[start..start + len].iter().enumerate() {
            let mut new = word & !self.union[first + at];
            self.union[first + at] |= word;
            while new != 0 {
                added += self.price[(first + at) * 64 + new.trailing_zeros() as usize];
                new &= new - 1;
            }
        }
        added
    }

    /// Keeps the union, with the class itself, as the set of the class.
    fn store(&mut self, class: usize, price: f64, total: f64) {
        let bit = self.bit[class];
        self.union[bit / 64] |= 1 << (bit % 64);
        self.low = self.low.min(bit / 64);
        self.high = self.high.max(bit / 64 + 1);
        self.span.push((self.words.len(), self.high - self.low, self.low));
        self.words.extend_from_slice(&self.union[self.low..self.high]);
        self.price.push(price);
        self.total.push(total);
    }
}
