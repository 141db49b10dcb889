//! Hand-made cases.

use std::time::Duration;

use super::timings::network;
use super::*;

pub(super) fn original(cost: f64, children: &[usize]) -> Node {
    Node {
        cost,
        children: children.to_vec(),
        original: true,
    }
}

pub(super) fn rewrite(cost: f64, children: &[usize]) -> Node {
    Node {
        original: false,
        ..original(cost, children)
    }
}

pub(super) fn graph(classes: Vec<Vec<Node>>, root: usize) -> Graph {
    Graph {
        classes: classes.into_iter().map(|nodes| Class { nodes }).collect(),
        root,
    }
}

fn run(graph: &Graph) -> Solution {
    extract(graph, &patient()).expect("a valid graph")
}

/// Options under which a slow machine does not change a result.
pub(super) fn patient() -> Options {
    Options {
        ilp_deadline: Duration::from_secs(60),
        ..Options::default()
    }
}

pub(super) fn without_ilp() -> Options {
    Options {
        use_ilp: false,
        ..Options::default()
    }
}

/// Input 0, products 1..=3 that may be slices of the merged product 4, and their sum 5.
fn merged(cost: f64) -> Graph {
    let product = || vec![original(5.0, &[0]), rewrite(0.1, &[4])];
    let sum = vec![original(1.0, &[1, 2, 3])];
    let classes = vec![
        vec![original(0.0, &[])],
        product(),
        product(),
        product(),
        vec![rewrite(cost, &[0])],
        sum,
    ];
    graph(classes, 5)
}

#[test]
fn a_merged_product_that_greedy_rejects_is_taken_by_flip() {
    let solution = extract(&merged(9.0), &without_ilp()).unwrap();
    assert_eq!(solution.costs.tree_greedy, 16.0);
    assert_eq!(solution.costs.dag_greedy, 16.0);
    assert!((solution.cost - 10.3).abs() < 1e-9);
    assert_eq!(solution.method, Method::GroupFlip);
    assert_eq!(solution.choice, [Some(0), Some(1), Some(1), Some(1), Some(0), Some(0)]);
    assert!(solution.ilp_optimal, "the split bound is met without the solver");
}

#[test]
fn a_merged_product_that_does_not_pay_is_left() {
    let solution = run(&merged(15.0));
    assert_eq!(solution.method, Method::Original);
    assert_eq!(solution.cost, 16.0);
    assert_eq!(solution.choice[4], None);
}

#[test]
fn a_user_that_a_merge_does_not_serve_keeps_its_own_way() {
    let mut graph = merged(9.0);
    graph.classes[3].nodes[0].cost = 0.05;
    graph.classes[4].nodes[0].cost = 8.0;
    let solution = extract(&graph, &without_ilp()).unwrap();
    assert_eq!(solution.method, Method::GroupFlip);
    assert_eq!(solution.choice[1..4], [Some(1), Some(1), Some(0)]);
}

#[test]
fn all_users_leave_a_shared_class_together() {
    // The input is merged already; one user alone gains nothing by leaving.
    let product = || vec![original(0.0, &[4]), rewrite(5.0, &[0])];
    let classes = vec![
        vec![original(0.0, &[])],
        product(),
        product(),
        product(),
        vec![original(20.0, &[0])],
        vec![original(1.0, &[1, 2, 3])],
    ];
    let mut problem = Problem::new(&graph(classes, 5)).unwrap();
    reduce::reduce(&mut problem);
    let start: Vec<usize> = problem.backbone().collect();
    assert_eq!(problem.cost(&start), 21.0);
    let flipped = flip::flip(&problem, &problem.readers(), start);
    assert_eq!(problem.cost(&flipped), 16.0);
}

#[test]
fn users_are_found_through_views() {
    // As above, but each slice is a view of a view: 1 ← 5 ← 4 and so on.
    let product = |view| vec![original(5.0, &[0]), rewrite(0.0, &[view])];
    let views = |a, b| [vec![rewrite(0.0, &[b])], vec![rewrite(a, &[4])]];
    let [v5, v6] = views(0.0, 6);
    let [v7, v8] = views(0.0, 8);
    let [v9, v10] = views(0.0, 10);
    let sum = vec![original(1.0, &[1, 2, 3])];
    let classes = vec![
        vec![original(0.0, &[])],
        product(5),
        product(7),
        product(9),
        vec![rewrite(9.0, &[0])],
        v5,
        v6,
        v7,
        v8,
        v9,
        v10,
        sum,
    ];
    let solution = extract(&graph(classes, 11), &without_ilp()).unwrap();
    assert_eq!(solution.cost, 10.0);
    assert_eq!(solution.method, Method::GroupFlip);
}

#[test]
fn shared_work_counts_once() {
    // Two readers of one expensive class, and an alternative that avoids it for one of them.
    let classes = vec![
        vec![original(10.0, &[])],
        vec![original(1.0, &[0]), rewrite(8.0, &[])],
        vec![original(1.0, &[0])],
        vec![original(1.0, &[1, 2, 1])],
    ];
    let solution = run(&graph(classes, 3));
    assert_eq!(solution.cost, 13.0);
    assert_eq!(solution.method, Method::Original);
    assert!(solution.ilp_optimal);
}

#[test]
fn cycles_are_broken_and_the_cheapest_way_around_them_is_found() {
    // 1 and 2 are transposes of each other; the input computes 2 from 1, but 2 has a cheaper source.
    let classes = vec![
        vec![original(0.0, &[])],
        vec![original(9.0, &[0]), rewrite(1.0, &[2])],
        vec![original(1.0, &[1]), rewrite(2.0, &[0])],
        vec![original(0.0, &[1, 2])],
    ];
    let solution = run(&graph(classes, 3));
    assert_eq!(solution.cost, 3.0);
    assert_eq!(solution.choice[1..3], [Some(1), Some(1)]);
    assert!(solution.ilp_optimal);
}

#[test]
fn a_free_cycle_is_no_program() {
    let classes = vec![
        vec![original(5.0, &[]), rewrite(0.0, &[1]), rewrite(0.0, &[0])],
        vec![original(5.0, &[]), rewrite(0.0, &[0])],
        vec![original(0.0, &[0, 1])],
    ];
    let solution = run(&graph(classes, 2));
    assert_eq!(solution.cost, 5.0);
    assert_eq!(solution.lower_bound, 5.0);
}

#[test]
fn original_nodes_may_lie_on_cycles() {
    // x + 0 merged with x: the addition is original, and reads its own class.
    let classes = vec![
        vec![original(1.0, &[0, 1]), original(2.0, &[])],
        vec![original(0.0, &[])],
        vec![original(1.0, &[0])],
    ];
    let solution = run(&graph(classes, 2));
    assert_eq!(solution.choice, [Some(1), None, Some(0)]);
}

#[test]
fn of_equal_costs_the_original_stays() {
    let classes = vec![
        vec![original(0.0, &[])],
        vec![rewrite(3.0, &[0]), original(3.0, &[0]), rewrite(3.0, &[])],
        vec![original(1.0, &[1]), rewrite(1.0, &[1])],
    ];
    let solution = run(&graph(classes, 2));
    assert_eq!(solution.method, Method::Original);
    assert_eq!(solution.choice, [Some(0), Some(1), Some(0)]);
}

#[test]
fn the_solver_finds_what_local_search_misses() {
    // Two merges that pay only together: a set cover on which switching one group never helps.
    let covers: [&[usize]; 4] = [&[0, 1, 2], &[3, 4, 5], &[0, 3, 1, 4], &[2, 5]];
    let prices = [4.0, 4.0, 3.9, 4.2];
    let mut classes: Vec<Vec<Node>> = prices.iter().map(|&price| vec![rewrite(price, &[])]).collect();
    for element in 0..6 {
        let mut nodes = vec![original(3.0, &[])];
        let sets = (0..4).filter(|&set| covers[set].contains(&element));
        nodes.extend(sets.map(|set| rewrite(0.0, &[set])));
        classes.push(nodes);
    }
    classes.push(vec![original(0.0, &(4..10).collect::<Vec<_>>())]);
    let graph = graph(classes, 10);
    let solution = run(&graph);
    assert_eq!(solution.cost, 8.0);
    assert!(solution.ilp_optimal);
    assert_eq!(solution.lower_bound, 8.0);
}

#[test]
fn malformed_graphs_are_named() {
    let leaf = || vec![original(1.0, &[])];
    let fails = |graph| extract(&graph, &Options::default()).unwrap_err();
    assert_eq!(fails(graph(vec![], 0)), Error::Root { root: 0, classes: 0 });
    let child = graph(vec![vec![original(1.0, &[7])]], 0);
    assert_eq!(
        fails(child),
        Error::Child {
            class: 0,
            node: 0,
            child: 7
        }
    );
    let cost = graph(vec![leaf(), vec![original(-1.0, &[])]], 0);
    assert_eq!(
        fails(cost),
        Error::Cost {
            class: 1,
            node: 0,
            cost: -1.0
        }
    );
    let no_program = graph(vec![vec![rewrite(1.0, &[])]], 0);
    assert_eq!(fails(no_program), Error::Original { root: 0 });
    let valid = graph(vec![leaf(), vec![original(1.0, &[0]), rewrite(1.0, &[1])]], 1);
    assert_eq!(valid.dag_cost(&[None, Some(0)]), Err(Error::Incomplete { class: 0 }));
    assert_eq!(valid.dag_cost(&[Some(0), Some(1)]), Err(Error::Cyclic { class: 1 }));
    assert_eq!(valid.dag_cost(&[Some(0), Some(0)]), Ok(2.0));
}

#[test]
fn without_time_the_incumbent_stands() {
    let options = Options {
        ilp_deadline: Duration::ZERO,
        ..Options::default()
    };
    let network = network(4);
    let (hurried, exact) = (extract(&network, &options).unwrap(), run(&network));
    assert!(hurried.lower_bound <= exact.cost && exact.cost <= hurried.cost);
    assert!(hurried.cost <= hurried.costs.original);
}

#[test]
fn layers_are_solved_alike() {
    let (one, twelve) = (run(&network(1)), run(&network(12)));
    assert!(one.ilp_optimal && twelve.ilp_optimal);
    assert!((twelve.cost - 12.0 * one.cost).abs() < 1e-6);
    assert!(one.cost < one.costs.dag_greedy, "the merge pays: {one:?}");
}

#[test]
fn a_node_that_reads_only_what_another_needs_further_down_replaces_it() {
    // 3 comes from 2, or no dearer from 1, which 2 needs; none of them is forced.
    let classes = vec![
        vec![original(9.0, &[])],
        vec![original(0.5, &[0])],
        vec![original(4.5, &[1])],
        vec![original(4.0, &[2]), rewrite(4.0, &[1])],
        vec![original(1.0, &[3]), rewrite(6.0, &[0])],
    ];
    let mut problem = Problem::new(&graph(classes, 4)).unwrap();
    reduce::reduce(&mut problem);
    let left: Vec<f64> = problem.nodes.iter().map(|node| node.cost).collect();
    assert_eq!(left, [9.0, 0.5, 4.0, 1.0, 6.0]);
}

#[test]
fn a_free_class_is_read_for_nothing() {
    // The weights 1 and 2 cost nothing, so the product of both is no worse than that of one.
    let classes = vec![
        vec![original(9.0, &[])],
        vec![original(0.0, &[])],
        vec![rewrite(0.0, &[1])],
        vec![original(4.0, &[0, 1]), rewrite(3.0, &[0, 1, 2])],
    ];
    let mut problem = Problem::new(&graph(classes, 3)).unwrap();
    reduce::reduce(&mut problem);
    assert!(problem.forced.iter().all(|&forced| forced));
    assert_eq!(problem.nodes.len(), 4);
}

#[test]
fn deep_networks_are_proven_optimal_without_the_clock() {
    let options = Options {
        ilp_deadline: Duration::ZERO,
        ..Options::default()
    };
    assert!(extract(&network(48), &options).unwrap().ilp_optimal);
}
