//! Saturation in phases, limited by the number of nodes: the same program gives the same
//! e-graph on every machine.

use std::collections::BTreeMap;

use rustc_hash::FxHashSet;

use super::pattern::{Rewrite, Tried};
use super::{Action, Numerics, Phase, Rule, rules};
use crate::egraph::EGraph;

/// How far to search.
#[derive(Debug, Clone, PartialEq)]
pub struct Limits {
    /// Nodes in the e-graph beyond those of the program.
    pub nodes: usize,
    /// Rounds of one phase.
    pub rounds: usize,
    /// The loosest numerics that a rule may have.
    pub numerics: Numerics,
    /// Autograd differentiates the program: rules must keep the gradient.
    pub autograd: bool,
    /// Rules that are switched off, by name.
    pub without: Vec<String>,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            nodes: 20_000,
            rounds: 12,
            numerics: Numerics::Reassoc,
            autograd: false,
            without: vec![],
        }
    }
}

impl Limits {
    fn allows(&self, rule: &Rule) -> bool {
        rule.numerics <= self.numerics
            && (rule.gradient || !self.autograd)
            && !self.without.iter().any(|n| n == rule.name)
    }
}

/// Places at which a rewrite may match in a round, in a small program.
const MOST_MATCHES: usize = 20_000;

/// What happened.
#[derive(Debug, Clone, Default)]
pub struct Stats {
    /// New equalities by rule.
    pub fired: BTreeMap<&'static str, usize>,
    /// Rounds over all phases.
    pub rounds: usize,
    /// The node limit stopped the search, or a rule matched too often.
    pub limited: bool,
}

/// Phases in order: what runs, how many rounds at most (none: as the limits say), and the share
/// of the node limit that it may fill, so that fusion always has room.
const SCHEDULE: [(&[Phase], Option<usize>, f64); 4] = [
    (&[Phase::Canon], None, 0.5),
    (&[Phase::Canon, Phase::Algebra], Some(6), 0.7),
    (&[Phase::Merge], Some(1), 0.8),
    (&[Phase::Canon, Phase::Fuse], Some(6), 1.0),
];

/// Grows the e-graph by the rules of this build.
pub fn saturate(egraph: &mut EGraph, limits: &Limits) -> Stats {
    saturate_with(egraph, limits, &rules().iter().collect::<Vec<_>>())
}

/// What is known from round to round.
struct Known {
    tried: Tried,
    /// Places at which a rewrite may match in a round.
    most: usize,
    /// Rewrites that matched at more: they feed on themselves, and would take all time and memory.
    wild: FxHashSet<*const Rewrite>,
}

impl Known {
    fn new(egraph: &EGraph) -> Known {
        Known {
            tried: Tried::default(),
            most: MOST_MATCHES.max(4 * egraph.total_size()),
            wild: FxHashSet::default(),
        }
    }
}

/// Grows the e-graph by the given rules.
pub fn saturate_with(egraph: &mut EGraph, limits: &Limits, rules: &[&Rule]) -> Stats {
    let mut stats = Stats::default();
    let start = egraph.total_size();
    let mut known = Known::new(egraph);
    egraph.rebuild();
    for (phases, rounds, share) in SCHEDULE {
        let limit = start + (limits.nodes as f64 * share) as usize;
        let active: Vec<&&Rule> = rules
            .iter()
            .filter(|r| phases.contains(&r.phase) && limits.allows(r))
            .collect();
        for _ in 0..rounds.unwrap_or(limits.rounds) {
            stats.rounds += 1;
            let fired = round(egraph, &active, limit, &mut known, &mut stats);
            egraph.rebuild();
            if egraph.total_size() > limit {
                stats.limited = true;
                break;
            }
            if fired == 0 {
                break;
            }
        }
    }
    stats
}

/// One round: all rules search the same e-graph, then all apply. Rebuilding after each rule
/// would cost more than everything else.
fn round(egraph: &mut EGraph, rules: &[&&Rule], limit: usize, known: &mut Known, stats: &mut Stats) -> usize {
    let mut found = vec![];
    for rule in rules {
        if let Action::Pattern(rewrites) = &rule.action {
            for rewrite in rewrites {
                if known.wild.contains(&std::ptr::from_ref(rewrite)) {
                    continue;
                }
                let matches = rewrite.search(egraph, known.most);
                if matches.iter().map(|m| m.substs.len()).sum::<usize>() >= known.most {
                    known.wild.insert(rewrite);
                    stats.limited = true;
                    continue;
                }
                found.push((rule.name, rewrite, matches));
            }
        }
    }
    let mut total = 0;
    let mut note = |name, n| {
        if n > 0 {
            *stats.fired.entry(name).or_default() += n;
            total += n;
        }
    };
    for (name, rewrite, matches) in &found {
        note(*name, rewrite.apply(egraph, name, limit, matches, &mut known.tried));
    }
    for rule in rules {
        if let Action::Program(f) = &rule.action {
            if !egraph.clean {
                egraph.rebuild();
            }
            note(rule.name, f(egraph, rule));
        }
    }
    total
}

/// Applies one rule once; returns how many equalities are new.
pub fn apply(egraph: &mut EGraph, rule: &Rule, limit: usize) -> usize {
    egraph.rebuild();
    let mut known = Known::new(egraph);
    round(egraph, &[&rule], limit, &mut known, &mut Stats::default())
}
