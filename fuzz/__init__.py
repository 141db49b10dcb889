"""A fuzzer for the compiler: random programs, compiled by every entry, called again and again, and judged.

``python -m fuzz --seconds 180`` runs it; docs/testing.md tells how. A case follows from one integer alone. A
program is plain data that prints as a module (`program`), a case adds how it is compiled and called (`case`),
`oracle` decides whether a result is right, `minimise` makes a failing case small and `keep` writes it down.
"""

KINDS = ("wrong", "exception", "rolled back", "broken proof", "internal", "hang", "crash")
"""Kinds of findings: what else can become of a case is no fault of the compiler's."""
