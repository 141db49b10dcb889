"""From a captured graph to an optimized one.

Records of a graph go to the search in Rust, and an FX graph is rebuilt of the program that comes back, with a
native plan and a report. May import `execute`, `capture` and `devices`.
"""
