//! What extraction is given: classes of alternatives, and what a choice among them costs.

pub use crate::error::ExtractError as Error;

/// One alternative of a class.
#[derive(Debug, Clone, PartialEq)]
pub struct Node {
    /// Time of this node alone, in microseconds; finite and not negative.
    pub cost: f64,
    /// The classes this node reads; a class may repeat.
    pub children: Vec<usize>,
    /// Whether the node is part of the input program.
    pub original: bool,
}

/// Alternatives that compute the same value.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Class {
    /// The alternatives; a class without any cannot be chosen.
    pub nodes: Vec<Node>,
}

/// A saturated e-graph, reduced to costs and edges. Cycles are allowed.
#[derive(Debug, Clone, PartialEq)]
pub struct Graph {
    /// All classes; a class is named by its index here.
    pub classes: Vec<Class>,
    /// The class whose value is wanted.
    pub root: usize,
}

impl Graph {
    /// Checks what the types cannot say: indices in range, costs finite and not negative.
    ///
    /// # Errors
    /// The first violation, by class and node.
    pub fn validate(&self) -> Result<(), Error> {
        let count = self.classes.len();
        if self.root >= count {
            return Err(Error::Root {
                root: self.root,
                classes: count,
            });
        }
        for (class, Class { nodes }) in self.classes.iter().enumerate() {
            for (node, Node { cost, children, .. }) in nodes.iter().enumerate() {
                if !(cost.is_finite() && *cost >= 0.0) {
                    return Err(Error::Cost {
                        class,
                        node,
                        cost: *cost,
                    });
                }
                if let Some(&child) = children.iter().find(|&&child| child >= count) {
                    return Err(Error::Child { class, node, child });
                }
            }
        }
        Ok(())
    }

    /// Cost of the program that `choice` (a node per class) computes the root with; every class counts once.
    ///
    /// # Errors
    /// [`Error::Incomplete`] or [`Error::Cyclic`] where the choice is no program.
    pub fn dag_cost(&self, choice: &[Option<usize>]) -> Result<f64, Error> {
        Ok(self
            .schedule(choice)?
            .iter()
            .map(|&(class, node)| self.classes[class].nodes[node].cost)
            .sum())
    }

    /// The chosen nodes that the root needs, as (class, node), children first.
    ///
    /// # Errors
    /// [`Error::Incomplete`] or [`Error::Cyclic`] where the choice is no program.
    pub fn schedule(&self, choice: &[Option<usize>]) -> Result<Vec<(usize, usize)>, Error> {
        #[derive(Clone, Copy, PartialEq)]
        enum Mark {
            New,
            Open,
            Done,
        }
        let mut marks = vec![Mark::New; self.classes.len()];
        let mut done = Vec::new();
        // A frame is a class, its chosen node and how many of its children were entered.
        let mut frames: Vec<(usize, usize, usize)> = Vec::new();
        let mut entering = Some(self.root);
        loop {
            if let Some(class) = entering.take() {
                let nodes = self.classes.get(class).map_or(0, |class| class.nodes.len());
                match choice.get(class).copied().flatten().filter(|&node| node < nodes) {
                    Some(node) => frames.push((class, node, 0)),
                    None => return Err(Error::Incomplete { class }),
                }
                marks[class] = Mark::Open;
            }
            let Some((class, node, entered)) = frames.last_mut() else {
                return Ok(done);
            };
            if let Some(&child) = self.classes[*class].nodes[*node].children.get(*entered) {
                *entered += 1;
                match marks[child] {
                    Mark::New => entering = Some(child),
                    Mark::Open => return Err(Error::Cyclic { class: child }),
                    Mark::Done => {}
                }
            } else {
                marks[*class] = Mark::Done;
                done.push((*class, *node));
                frames.pop();
            }
        }
    }
}
