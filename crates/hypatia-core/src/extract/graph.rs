//! What extraction is given: classes of alternatives, and what a choice among them costs.

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

/// Why a graph or a choice is rejected.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Error {
    /// The root is not a class of the graph.
    #[error("root {root} is not among the {classes} classes")]
    Root {
        /// The root that was asked for.
        root: usize,
        /// How many classes there are.
        classes: usize,
    },
    /// A node reads a class that does not exist.
    #[error("node {node} of class {class} reads class {child}, which does not exist")]
    Child {
        /// The class of the node.
        class: usize,
        /// The node, by its index in the class.
        node: usize,
        /// The missing class.
        child: usize,
    },
    /// A cost is negative, infinite or not a number.
    #[error("node {node} of class {class} costs {cost}; a cost is finite and not negative")]
    Cost {
        /// The class of the node.
        class: usize,
        /// The node, by its index in the class.
        node: usize,
        /// The offending cost.
        cost: f64,
    },
    /// The nodes marked as original do not compute the root.
    #[error("the original nodes do not compute root {root}")]
    Original {
        /// The root that was asked for.
        root: usize,
    },
    /// A choice needs a class for which it names no existing node.
    #[error("class {class} is needed, but no node of it is chosen")]
    Incomplete {
        /// The class without a node.
        class: usize,
    },
    /// A choice makes a class depend on itself.
    #[error("class {class} depends on itself")]
    Cyclic {
        /// A class on the cycle.
        class: usize,
    },
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
