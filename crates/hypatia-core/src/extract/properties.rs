//! Random graphs against brute force.

use proptest::prelude::*;

use super::eliminate::{Limits, eliminate};
use super::tests::{patient, without_ilp};
use super::*;

/// The least cost over all choices.
fn brute_force(graph: &Graph) -> f64 {
    let mut choice: Vec<Option<usize>> = vec![Some(0); graph.classes.len()];
    let mut least = f64::INFINITY;
    loop {
        if let Ok(cost) = graph.dag_cost(&choice) {
            least = least.min(cost);
        }
        let mut class = 0;
        loop {
            let Some(Some(node)) = choice.get_mut(class) else {
                return least;
            };
            *node += 1;
            if *node < graph.classes[class].nodes.len() {
                break;
            }
            *node = 0;
            class += 1;
        }
    }
}

/// Per class: whether the input program has it, and cost and children (as random numbers) of nodes.
type Recipe = Vec<(bool, Vec<(f64, Vec<usize>)>)>;

fn recipe(classes: usize) -> impl Strategy<Value = Recipe> {
    let cost = prop_oneof![Just(0.0), (1..6u8).prop_map(f64::from), 0.0..5.0];
    let node = (cost, prop::collection::vec(any::<usize>(), 0..4));
    let class = (prop::bool::weighted(0.6), prop::collection::vec(node, 1..4));
    prop::collection::vec(class, 2..classes)
}

/// The first node of an original class reads original classes below it; the others read what they
/// like, below them or, if `cyclic`, anywhere.
fn cook(recipe: &Recipe, cyclic: bool) -> Graph {
    let count = recipe.len();
    let is_original = |class: usize| class == count - 1 || recipe[class].0;
    let classes = recipe.iter().enumerate().map(|(class, (_, nodes))| {
        let nodes = nodes.iter().enumerate().map(|(at, (cost, picks))| {
            let original = at == 0 && is_original(class);
            let readable: Vec<usize> = if original {
                (0..class).filter(|&below| is_original(below)).collect()
            } else if cyclic {
                (0..count).collect()
            } else {
                (0..class).collect()
            };
            let children = picks.iter().filter(|_| !readable.is_empty());
            let children = children.map(|pick| readable[pick % readable.len()]).collect();
            Node {
                cost: *cost,
                children,
                original,
            }
        });
        Class { nodes: nodes.collect() }
    });
    Graph {
        classes: classes.collect(),
        root: count - 1,
    }
}

const SLACK: f64 = 1e-6;

fn check(graph: &Graph) -> Result<(), TestCaseError> {
    let optimum = brute_force(graph);
    for options in [patient(), without_ilp()] {
        let solution = extract(graph, &options).unwrap();
        let cost = graph.dag_cost(&solution.choice).unwrap();
        prop_assert!((cost - solution.cost).abs() < SLACK);
        prop_assert!(cost <= solution.costs.original + SLACK);
        prop_assert!(cost >= optimum - SLACK);
        prop_assert!(solution.lower_bound <= optimum + SLACK, "{solution:?} {optimum}");
        prop_assert!(
            !solution.ilp_optimal || cost <= optimum + SLACK,
            "{solution:?} {optimum}"
        );
        prop_assert!(!options.use_ilp || solution.ilp_optimal);
        let needed = graph.schedule(&solution.choice).unwrap().len();
        prop_assert_eq!(needed, solution.choice.iter().flatten().count());
        prop_assert_eq!(extract(graph, &options).unwrap(), solution);
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(400) })]

    #[test]
    fn acyclic_graphs_agree_with_brute_force(recipe in recipe(9)) {
        check(&cook(&recipe, false))?;
    }

    #[test]
    fn cyclic_graphs_agree_with_brute_force(recipe in recipe(9)) {
        check(&cook(&recipe, true))?;
    }

    #[test]
    fn reduction_keeps_the_optimum(recipe in recipe(9), cyclic in any::<bool>()) {
        let graph = cook(&recipe, cyclic);
        let mut problem = Problem::new(&graph).unwrap();
        reduce::reduce(&mut problem);
        let class = |class| problem.nodes[problem.of(class)].iter().map(|node| Node {
            cost: node.cost,
            children: node.children.to_vec(),
            original: node.original,
        });
        let classes = (0..problem.len()).map(|at| Class { nodes: class(at).collect() });
        let reduced = Graph { classes: classes.collect(), root: problem.root };
        prop_assert!((brute_force(&graph) - brute_force(&reduced)).abs() < SLACK);
    }

    #[test]
    fn elimination_agrees_with_brute_force(recipe in recipe(9), cyclic in any::<bool>(), hasty in any::<bool>()) {
        let graph = cook(&recipe, cyclic);
        let optimum = brute_force(&graph);
        let mut problem = Problem::new(&graph).unwrap();
        reduce::arrange(&mut problem);
        let limits = if hasty {
            Limits { class: 3, joined: 4, neighbours: 5, entries: 64 }
        } else {
            Limits::default()
        };
        let (mut bound, mut cost, mut exact) = (0.0, 0.0, true);
        for (part, _) in parts::split(&problem) {
            let eliminated = eliminate(&part, &limits);
            bound += eliminated.bound;
            let program = eliminated.nodes.map(|nodes| part.program(|class| nodes[class]));
            match program {
                Some(Ok(program)) => cost += program.0,
                _ => exact = false,
            }
            prop_assert!(exact || hasty || cyclic);
        }
        prop_assert!(bound <= optimum + SLACK);
        if exact {
            prop_assert!((cost - optimum).abs() < SLACK, "{cost} {optimum}");
            prop_assert!((bound - optimum).abs() < SLACK, "{bound} {optimum}");
        }
    }

    #[test]
    fn larger_graphs_are_solved_alike_every_time(recipe in recipe(60), cyclic in any::<bool>()) {
        let graph = cook(&recipe, cyclic);
        let solution = extract(&graph, &without_ilp()).unwrap();
        prop_assert!(solution.lower_bound <= solution.cost);
        prop_assert!(solution.cost <= solution.costs.original + 1e-9);
        prop_assert_eq!(extract(&graph, &without_ilp()).unwrap(), solution);
    }
}
