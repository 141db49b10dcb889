"""Is it right, and if not, what is to blame?

A compiled graph, the captured one and a set of inputs come in; a verdict goes out, or a graph without the
rule or kernel that was wrong. `first_call` does this at the first call of every graph, `verify` is
`hypatia.verify`. May import `compiler`, `execute`, `capture` and `devices`.
"""
