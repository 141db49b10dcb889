//! A network and a tangle to time extraction on.

use std::io::Write;
use std::time::Instant;

use super::tests::{graph, original, rewrite};
use super::*;

/// Transformer layers as saturation leaves them: merged query, key and value behind views, fused
/// epilogues, decomposed composites, folded weights.
pub(super) fn network(layers: usize) -> Graph {
    let mut network = Network {
        classes: Vec::new(),
        x: 0,
    };
    network.add(vec![original(0.0, &[])]);
    for _ in 0..layers {
        let heads = network.heads();
        let attention = network.attention(heads);
        network.linear_add_norm(attention);
        let hidden = network.linear_gelu();
        network.linear_add_norm(hidden);
    }
    graph(network.classes, network.x)
}

struct Network {
    classes: Vec<Vec<Node>>,
    /// The residual stream.
    x: usize,
}

impl Network {
    fn add(&mut self, nodes: Vec<Node>) -> usize {
        self.classes.push(nodes);
        self.classes.len() - 1
    }

    fn weight(&mut self) -> usize {
        self.add(vec![original(0.0, &[])])
    }

    /// Query, key and value; each a product of its own, or behind views a slice of the merged one.
    fn heads(&mut self) -> [usize; 3] {
        let x = self.x;
        let weights = [(); 3].map(|()| self.weight());
        let biases = [(); 3].map(|()| self.weight());
        let weight = self.add(vec![rewrite(0.0, &weights)]);
        let bias = self.add(vec![rewrite(0.0, &biases)]);
        let product = self.add(vec![rewrite(8.5, &[x, weight])]);
        let merged = self.add(vec![rewrite(9.0, &[x, weight, bias]), rewrite(1.5, &[product, bias])]);
        let wide = self.add(vec![rewrite(0.0, &[merged])]);
        [0, 1, 2].map(|at| {
            let (weight, bias) = (weights[at], biases[at]);
            let product = self.add(vec![original(4.0, &[x, weight])]);
            let slice = self.add(vec![rewrite(0.2, &[wide]), rewrite(0.2, &[merged])]);
            let linear = self.add(vec![
                original(1.0, &[product, bias]),
                rewrite(4.2, &[x, weight, bias]),
                rewrite(0.0, &[slice]),
            ]);
            let view = self.add(vec![original(0.0, &[linear]), rewrite(0.0, &[slice])]);
            let turned = self.add(vec![original(0.5, &[view])]);
            self.add(vec![original(0.0, &[turned]), rewrite(0.3, &[view])])
        })
    }

    fn attention(&mut self, [q, k, v]: [usize; 3]) -> usize {
        let scores = self.add(vec![original(3.0, &[q, k])]);
        let scaled = self.add(vec![original(1.0, &[scores]), rewrite(3.2, &[q, k])]);
        let exp = self.add(vec![rewrite(1.2, &[scaled])]);
        let sum = self.add(vec![rewrite(0.8, &[exp])]);
        let softmax = self.add(vec![original(2.0, &[scaled]), rewrite(1.0, &[exp, sum])]);
        let attention = self.add(vec![original(3.0, &[softmax, v]), rewrite(3.5, &[q, k, v])]);
        let turned = self.add(vec![original(0.5, &[attention])]);
        self.add(vec![original(0.0, &[turned]), rewrite(0.3, &[attention])])
    }

    fn linear_add_norm(&mut self, input: usize) {
        let [weight, bias, scale] = [(); 3].map(|()| self.weight());
        let x = self.x;
        let product = self.add(vec![original(4.0, &[input, weight])]);
        let linear = self.add(vec![
            original(1.0, &[product, bias]),
            rewrite(4.2, &[input, weight, bias]),
        ]);
        let sum = self.add(vec![
            original(1.0, &[x, linear]),
            rewrite(4.4, &[input, weight, bias, x]),
        ]);
        let mean = self.add(vec![rewrite(0.7, &[sum])]);
        let centred = self.add(vec![rewrite(0.7, &[sum, mean])]);
        self.x = self.add(vec![
            original(2.0, &[sum, scale]),
            rewrite(1.4, &[centred, scale]),
            rewrite(2.3, &[x, linear, scale]),
        ]);
    }

    fn linear_gelu(&mut self) -> usize {
        let [weight, bias, half] = [(); 3].map(|()| self.weight());
        let x = self.x;
        let product = self.add(vec![original(8.0, &[x, weight])]);
        let linear = self.add(vec![original(1.5, &[product, bias]), rewrite(8.4, &[x, weight, bias])]);
        self.add(vec![
            original(1.5, &[linear]),
            rewrite(8.6, &[x, weight, bias]),
            rewrite(4.0, &[linear, half]),
        ])
    }
}

/// Classes whose rewrites read anything near them, above or below: mostly one large cycle.
fn tangle(classes: usize) -> Graph {
    let mut state = 1u64;
    let mut random = move |below: usize| {
        state = state
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (state >> 33) as usize % below
    };
    let classes = (0..classes).map(|class| {
        let mut nodes = vec![original(9.0, &Vec::from_iter(class.checked_sub(1)))];
        for _ in 0..random(3) {
            let near = |offset: usize| (class + offset).saturating_sub(20).min(classes - 1);
            let children = [near(random(30)), near(random(30))];
            nodes.push(rewrite(random(100) as f64 / 10.0, &children));
        }
        nodes
    });
    let classes: Vec<Vec<Node>> = classes.collect();
    let root = classes.len() - 1;
    graph(classes, root)
}

/// The result, and the least of several times in milliseconds.
fn timed<T>(mut work: impl FnMut() -> T) -> (T, f64) {
    let mut once = || {
        let start = Instant::now();
        let result = work();
        (result, start.elapsed().as_secs_f64() * 1e3)
    };
    let (result, first) = once();
    (result, (0..4).map(|_| once().1).fold(first, f64::min))
}

#[test]
#[ignore = "prints timings; run in release with --ignored --nocapture"]
fn timings() {
    let mut out = std::io::stderr();
    let quick = Options {
        use_ilp: false,
        ..Options::default()
    };
    let networks = [1, 12, 48, 96, 192].map(|layers| (format!("{layers} layers"), network(layers)));
    let tangles = [500, 5000].map(|classes| (format!("tangle of {classes}"), tangle(classes)));
    for (name, graph) in networks.into_iter().chain(tangles) {
        let nodes: usize = graph.classes.iter().map(|class| class.nodes.len()).sum();
        let (_, build) = timed(|| Problem::new(&graph).unwrap());
        let (_, arrange) = timed(|| cycles::arrange(&mut Problem::new(&graph).unwrap()));
        let (problem, reduce) = timed(|| {
            let mut problem = Problem::new(&graph).unwrap();
            reduce::reduce(&mut problem);
            problem
        });
        let (_, tree) = timed(|| greedy::tree(&problem));
        let (start, dag) = timed(|| greedy::dag(&problem));
        let readers = problem.readers();
        let (flipped, flip) = timed(|| flip::flip(&problem, &readers, start.clone()));
        let (_, ilp) = timed(|| ilp::solve(&problem, flipped.clone(), &Options::default()));
        let (_, quick) = timed(|| extract(&graph, &quick).unwrap());
        let (solution, all) = timed(|| extract(&graph, &Options::default()).unwrap());
        writeln!(
            out,
            "{name}: {nodes} nodes, {} classes; reduced to {}, {}\n  ms: build {build:.2}, and \
             arrange {arrange:.2}, and reduce {reduce:.2}; tree {tree:.2} dag {dag:.2} \
             flip {flip:.2} ilp {ilp:.2}; all {all:.2}, without ilp {quick:.2}\n  {:?} {:.1}, \
             bound {:.1}; {:.1?}",
            graph.classes.len(),
            problem.nodes.len(),
            problem.len(),
            solution.method,
            solution.cost,
            solution.lower_bound,
            solution.costs
        )
        .unwrap();
    }
}
