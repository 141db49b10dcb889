//! Exact choice by elimination: one class after the other is decided for every state of its neighbours.
//!
//! To its readers a class is either computed or not. Once it is known which classes are, each takes
//! its cheapest node among those that read only computed ones. So the cost is a sum of terms, one
//! per class, in as many yes-or-no unknowns as the class has alternatives in what it reads; and the
//! unknowns can be minimised out in turn. Each step joins the terms that share the unknown, at a
//! price exponential in how many others they mention. A network is a chain of layers, so with a
//! good order these are few, however deep it is.
//!
//! A program has no cycle: it puts classes that can reach each other in an order. So where one of two
//! such classes can read the other, it is an unknown too which of them comes first. That these
//! unknowns agree has to be said for triangles only, once the pairs are completed to a graph in
//! which every longer cycle has a chord.
//!
//! Where they are many, terms are minimised separately instead of joined, which yields a bound only.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use smallvec::SmallVec;

use super::parts::Part;

/// How far to go for an answer.
#[derive(Debug)]
pub(super) struct Limits {
    /// Unknowns of a term made from one class; what else it depends on is taken to be as it likes.
    pub class: usize,
    /// Unknowns of joined terms where not everything can be joined.
    pub joined: usize,
    /// Neighbours of an unknown at its turn, beyond which even a bound would be of no use.
    pub neighbours: usize,
    /// Table entries that may be computed for an exact answer.
    pub entries: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            class: 12,
            joined: 6,
            neighbours: 14,
            entries: 1 << 18,
        }
    }
}

/// What elimination says of a part.
#[derive(Debug)]
pub(super) struct Eliminated {
    /// No program costs less.
    pub bound: f64,
    /// If all terms could be joined, a node per class: a cheapest program.
    pub nodes: Option<Vec<usize>>,
}

/// Eliminates all that is open in a part.
pub(super) fn eliminate(part: &Part, limits: &Limits) -> Eliminated {
    let nothing = Eliminated {
        bound: 0.0,
        nodes: None,
    };
    let Some(unknowns) = Unknowns::new(part, limits) else {
        return nothing;
    };
    let (terms, complete) = unknowns.terms(limits);
    let Some(steps) = steps(unknowns.len(), terms.iter().map(|term| &term.scope[..]), limits) else {
        return nothing;
    };
    let entries = steps.iter().map(|(_, near)| 2usize << near.len()).sum::<usize>();
    let exact = complete && entries <= limits.entries;
    let width = if exact { usize::MAX } else { limits.joined };
    let mut rank = vec![0; unknowns.len()];
    let order = steps.iter().map(|&(unknown, _)| unknown).enumerate();
    order.for_each(|(at, unknown)| rank[unknown] = at);

    let mut bound = 0.0;
    let mut buckets: Vec<Vec<Term>> = vec![Vec::new(); steps.len()];
    let mut put = |term: Term, buckets: &mut [Vec<Term>]| match term.scope.first() {
        Some(&first) => buckets[first].push(term),
        None => bound += term.table[0],
    };
    for term in terms {
        put(term.renamed(&rank), &mut buckets);
    }
    for at in 0..buckets.len() {
        let bucket = std::mem::take(&mut buckets[at]);
        let mut groups: SmallVec<[(Scope, Vec<&Term>); 2]> = SmallVec::new();
        for term in &bucket {
            let unions = groups.iter().map(|(scope, _)| union(scope, &term.scope));
            let fits = unions.enumerate().find(|(_, scope)| scope.len() <= width);
            if let Some((to, scope)) = fits {
                groups[to].0 = scope;
                groups[to].1.push(term);
            } else {
                groups.push((term.scope.clone(), vec![term]));
            }
        }
        for (scope, members) in groups {
            put(Term::minimised(scope, &members), &mut buckets);
        }
        buckets[at] = bucket;
    }
    let nodes = exact.then(|| {
        let ranked = states(&buckets);
        let states: Vec<bool> = rank.iter().map(|&rank| ranked.get(rank) == Some(&true)).collect();
        unknowns.nodes(&states)
    });
    Eliminated { bound, nodes }
}

/// The best states of the unknowns, last eliminated first; of equals, false.
fn states(buckets: &[Vec<Term>]) -> Vec<bool> {
    let mut states = vec![false; buckets.len()];
    for at in (0..buckets.len()).rev() {
        let cost = |states: &[bool]| buckets[at].iter().map(|term| term.at(states)).sum::<f64>();
        let without = cost(&states);
        states[at] = true;
        states[at] = cost(&states) < without;
    }
    states
}

/// Ascending unknowns.
type Scope = SmallVec<[usize; 8]>;

/// A cost for each state of some unknowns; the first is the lowest bit of the index.
#[derive(Debug, Clone)]
struct Term {
    scope: Scope,
    table: Vec<f64>,
}

impl Term {
    /// The term with its unknowns under other names.
    fn renamed(self, name: &[usize]) -> Self {
        let mut scope: Scope = self.scope.iter().map(|&unknown| name[unknown]).collect();
        scope.sort_unstable();
        let mut table = vec![0.0; self.table.len()];
        let index = gather(&self.scope, |unknown| scope.binary_search(&name[unknown]).ok());
        for (at, &cost) in index.iter().zip(&self.table) {
            table[*at] = cost;
        }
        Self { scope, table }
    }

    /// The sum of terms over a scope that holds all of theirs, minimised over its first unknown.
    fn minimised(scope: Scope, terms: &[&Term]) -> Self {
        let mut sum = vec![0.0; 1 << scope.len()];
        for term in terms {
            let index = gather(&scope, |unknown| term.scope.binary_search(&unknown).ok());
            for (sum, at) in sum.iter_mut().zip(index) {
                *sum += term.table[at];
            }
        }
        Self {
            table: sum.chunks_exact(2).map(|pair| pair[0].min(pair[1])).collect(),
            scope: Scope::from_slice(&scope[1..]),
        }
    }

    fn at(&self, states: &[bool]) -> f64 {
        let bits = self.scope.iter().enumerate();
        self.table[bits.fold(0, |index, (bit, &unknown)| index | usize::from(states[unknown]) << bit)]
    }
}

/// For each state of `scope` the index in a table that has its unknowns at the given bits, if at all.
fn gather(scope: &[usize], bit: impl Fn(usize) -> Option<usize>) -> Vec<usize> {
    let mut index = Vec::with_capacity(1 << scope.len());
    index.push(0);
    for &unknown in scope {
        let set = bit(unknown).map_or(0, |bit| 1 << bit);
        for at in 0..index.len() {
            index.push(index[at] | set);
        }
    }
    index
}

/// The items of either of two ascending lists, ascending.
fn union(mut a: &[usize], mut b: &[usize]) -> Scope {
    let mut all = Scope::with_capacity(a.len() + b.len());
    while let (Some(&first), Some(&second)) = (a.first(), b.first()) {
        all.push(first.min(second));
        a = &a[usize::from(first <= second)..];
        b = &b[usize::from(second <= first)..];
    }
    all.extend_from_slice(a);
    all.extend_from_slice(b);
    all
}

/// What is open in a part. First, for each class, whether it is computed (nothing mentions those that
/// always are); then, for each pair, whether the lower class comes first.
struct Unknowns<'a> {
    part: &'a Part,
    pairs: Vec<(usize, usize)>,
    /// Unknowns of pairs that must not be a cycle: of lower and middle, middle and upper, lower and upper.
    triangles: Vec<[usize; 3]>,
}

impl<'a> Unknowns<'a> {
    fn new(part: &'a Part, limits: &Limits) -> Option<Self> {
        let classes = part.forced.len();
        let mut reads = Vec::new();
        for class in 0..classes {
            let children = part.of(class).flat_map(|node| part.children[node].iter());
            let linked = children.filter(|&&child| part.group[child] == part.group[class]);
            reads.extend(linked.map(|&child| [class, child]));
        }
        let steps = steps(classes, reads.iter().map(|pair| &pair[..]), limits)?;
        let mut unknowns = Self {
            part,
            pairs: Vec::new(),
            triangles: Vec::new(),
        };
        let sides = steps
            .iter()
            .flat_map(|(a, near)| near.iter().map(|&b| (*a.min(&b), *a.max(&b))));
        unknowns.pairs = sides.collect();
        unknowns.pairs.sort_unstable();
        for (a, near) in &steps {
            for (at, b) in near.iter().enumerate() {
                for c in &near[at + 1..] {
                    let mut corners = [*a, *b, *c];
                    corners.sort_unstable();
                    let [a, b, c] = corners;
                    let sides = [(a, b), (b, c), (a, c)].map(|(a, b)| unknowns.before(a, b));
                    if let [Some((ab, _)), Some((bc, _)), Some((ac, _))] = sides {
                        unknowns.triangles.push([ab, bc, ac]);
                    }
                }
            }
        }
        Some(unknowns)
    }

    fn len(&self) -> usize {
        self.part.forced.len() + self.pairs.len()
    }

    /// The unknown, and its state, by which `first` comes before `second`; none if that is no matter.
    fn before(&self, first: usize, second: usize) -> Option<(usize, bool)> {
        let pair = (first.min(second), first.max(second));
        let at = self.pairs.binary_search(&pair).ok()?;
        Some((self.part.forced.len() + at, first < second))
    }

    /// What must hold for a class to take a node.
    fn requires(&self, class: usize, node: usize) -> impl Iterator<Item = (usize, bool)> {
        let open = |&child: &usize| (!self.part.forced[child]).then_some((child, true));
        let order = move |&child: &usize| self.before(child, class);
        let children = &self.part.children[node];
        children
            .iter()
            .filter_map(open)
            .chain(children.iter().filter_map(order))
    }

    /// The terms of all classes and triangles, and whether they say all.
    fn terms(&self, limits: &Limits) -> (Vec<Term>, bool) {
        let part = self.part;
        let mut terms = Vec::new();
        let mut complete = true;
        for class in 0..part.forced.len() {
            let requires = part.of(class).flat_map(|node| self.requires(class, node));
            let mut scope: Scope = requires.map(|(unknown, _)| unknown).collect();
            scope.sort_unstable();
            scope.dedup();
            if !part.forced[class] {
                // What every node reads needs no table: the class is not computed without it.
                scope.retain(|&mut unknown| {
                    let common = part.of(class).all(|node| part.children[node].contains(&unknown));
                    if common {
                        terms.push(Term {
                            scope: Scope::from_slice(&[class, unknown]),
                            table: vec![0.0, f64::INFINITY, 0.0, 0.0],
                        });
                    }
                    !common
                });
            }
            complete &= scope.len() <= limits.class;
            scope.truncate(limits.class);
            let mut table = vec![f64::INFINITY; 1 << scope.len()];
            for node in part.of(class) {
                let (mut mask, mut wanted) = (0, 0);
                for (unknown, state) in self.requires(class, node) {
                    if let Ok(bit) = scope.binary_search(&unknown) {
                        mask |= 1 << bit;
                        wanted |= usize::from(state) << bit;
                    }
                }
                let fit = table.iter_mut().enumerate().filter(|(index, _)| index & mask == wanted);
                fit.for_each(|(_, cost)| *cost = part.cost(node).min(*cost));
            }
            if !part.forced[class] {
                scope.push(class);
                let computed = std::mem::replace(&mut table, vec![0.0; 1 << (scope.len() - 1)]);
                table.extend(computed);
            }
            terms.push(Term { scope, table });
        }
        // Both shorter sides one way and the longest the other way is a cycle.
        let mut table = vec![0.0; 8];
        (table[0b011], table[0b100]) = (f64::INFINITY, f64::INFINITY);
        terms.extend(self.triangles.iter().map(|sides| Term {
            scope: Scope::from_slice(sides),
            table: table.clone(),
        }));
        (terms, complete)
    }

    /// The cheapest node of each class in the given states.
    fn nodes(&self, states: &[bool]) -> Vec<usize> {
        let part = self.part;
        let nodes = (0..part.forced.len()).map(|class| {
            let possible = part.of(class).filter(|&node| {
                self.requires(class, node)
                    .all(|(unknown, state)| states[unknown] == state)
            });
            let cheapest = possible.min_by(|&a, &b| part.cost(a).total_cmp(&part.cost(b)));
            cheapest.unwrap_or(part.of(class).start)
        });
        nodes.collect()
    }
}

/// An order of elimination in which each unknown has few neighbours when its turn comes, with these
/// neighbours, ascending; none if one has too many.
fn steps<'a>(
    unknowns: usize,
    scopes: impl Iterator<Item = &'a [usize]>,
    limits: &Limits,
) -> Option<Vec<(usize, Scope)>> {
    let mut near: Vec<Scope> = vec![Scope::new(); unknowns];
    for scope in scopes {
        for &unknown in scope {
            near[unknown].extend(scope.iter().copied().filter(|&other| other != unknown));
        }
    }
    let mut next = BinaryHeap::new();
    let mut gone = vec![false; unknowns];
    for (unknown, near) in near.iter_mut().enumerate() {
        near.sort_unstable();
        near.dedup();
        next.push(Reverse((near.len(), unknown)));
    }
    let mut steps = Vec::with_capacity(unknowns);
    while let Some(Reverse((len, unknown))) = next.pop() {
        if gone[unknown] || len != near[unknown].len() {
            continue;
        }
        if len > limits.neighbours {
            return None;
        }
        gone[unknown] = true;
        let clique = std::mem::take(&mut near[unknown]);
        for &other in &clique {
            near[other] = union(&near[other], &clique);
            near[other].retain(|third| *third != unknown && *third != other);
            next.push(Reverse((near[other].len(), other)));
        }
        steps.push((unknown, clique));
    }
    Some(steps)
}
