"""From a model to an FX graph, and from an FX graph to the records that the search reads.

Also what is known of a graph without running it: how its tensors lie in memory, which state of the model it
reads, where in the source a node comes from. May import `devices`.
"""
