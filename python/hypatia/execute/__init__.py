"""From a compiled graph to results: one call is one call of a plan.

Plans are bound to weights and sizes, recorded as CUDA graphs, timed beside other forms of a graph, and run.
May import `capture` and `devices`.
"""
