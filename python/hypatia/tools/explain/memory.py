"""Memory of a call, eager's beside ours: counted from the graphs, and from the plan where one runs."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import fx

from ..._torch import pytree
from ...capture.layout import storage_of
from ...capture.records import value_of
from ...capture.source_names import called
from ...compiler.report import GraphReport


def memory(report: GraphReport, weights: Collection[str]) -> dict[str, dict[str, int]]:
    """Bytes of weights, copies of them, values in between and results, in eager and here.

    ``weights`` are the names of the model's parameters and buffers. Values in between are the most that live
    at the same time.
    """
    given = [*report.before.find_nodes(op="placeholder"), *report.before.find_nodes(op="get_attr")]
    frozen = {n["name"] for n in report.graphs["before"] if n["kind"] == "weight"}
    kept = [n for n in given if n.name in frozen or called(n, report.inputs) in weights]
    own, others = _bytes(kept), _bytes(n for n in given if n not in kept)
    results = _bytes(_results(report.before))
    planned = report.memory if report.kept == "plan" else None
    eager = report.kept == "eager"
    ours = planned[0] if planned else between(report.before if eager else report.after)
    return {
        "weights": {"eager": own, "hypatia": own},
        "packed copies of weights": {"eager": 0, "hypatia": planned[1] if planned else 0},
        "folded and merged copies": {"eager": 0, "hypatia": 0 if eager else report.folded},
        "inputs": {"eager": others, "hypatia": others},
        "values in between": {"eager": between(report.before), "hypatia": ours},
        "results": {"eager": results, "hypatia": results},
    }


def between(graph: fx.Graph) -> int:
    """The most bytes that values live in at the same time, without inputs, results and folded weights."""
    nodes = [n for n in graph.nodes if n.op in ("call_function", "call_module")]
    given = (n for n in graph.nodes if n.op in ("placeholder", "get_attr") or _is_folded(n))
    apart = {storage_of(n) for n in (*given, *_results(graph))}
    last: dict[object, int] = {}
    size: dict[object, int] = {}
    for at, node in enumerate(nodes):
        for read in (node, *node.all_input_nodes):
            storage = storage_of(read)
            if storage not in apart and storage is not None:
                size.setdefault(storage, _size(read))
                last[storage] = at
    live: dict[object, int] = {}
    most = 0
    for at, node in enumerate(nodes):
        made = storage_of(node)
        if made in size:
            live[made] = size[made]
        most = max(most, sum(live.values()))
        live = {s: count for s, count in live.items() if last[s] > at}
    return most


def _is_folded(node: fx.Node) -> bool:
    source = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else node
    return any(n.op == "call_module" and str(n.target).startswith("folded") for n in (node, source))


def _results(graph: fx.Graph) -> list[fx.Node]:
    (output,) = graph.find_nodes(op="output")
    return [n for n in pytree.arg_tree_leaves(*output.args) if isinstance(n, fx.Node)]


def _bytes(nodes: Iterable[fx.Node]) -> int:
    """What lies in the same memory counts once."""
    return sum({storage_of(n): _size(n) for n in nodes}.values())


def _size(node: fx.Node) -> int:
    """Bytes of a tensor; none of what is no tensor, such as tuples, whose parts are nodes."""
    value = value_of(node)
    if not isinstance(value, torch.Tensor):
        return 0
    count = value.element_size()
    for size in value.shape:
        count *= size if isinstance(size, int) else int(size.node.hint or 1)
    return count
