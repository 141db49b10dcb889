"""Options of a compilation, parsed strictly."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from typing import Any, get_args, get_type_hints

from . import _native, faults

MODES = ("strict", "soft", "off")
MODE_VARIABLE = "HYPATIA_CHECKSUM_MODE"

TORCH_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
"""Modes of ``torch.compile``. All are one here: kernels are measured and calls recorded where that pays."""


class OptionError(ValueError):
    """An option that does not exist or has a value that it cannot have."""


@dataclasses.dataclass(frozen=True)
class Options:
    """What ``torch.compile(model, backend="hypatia", options={...})`` understands."""

    target: str | None = dataclasses.field(
        default=None,
        metadata={"doc": "machine of the cost model: cpu, h200 or gpu; None: the inputs' device"},
    )
    costs: str = dataclasses.field(
        default="shipped",
        metadata={
            "doc": "numbers of the cost model where no target is named: shipped, or measured on this machine "
            "once and kept on disk (without a cache on disk: shipped)"
        },
    )
    freeze: bool | None = dataclasses.field(
        default=None,
        metadata={"doc": "fold and merge weights; None: in inference only. Changed weights are folded again"},
    )
    numerics: str = dataclasses.field(
        default="reassoc",
        metadata={"doc": "loosest numerics class of a rule: exact, wider, reassoc or approx"},
    )
    node_limit: int = dataclasses.field(
        default=20_000, metadata={"doc": "nodes that the search may add to the e-graph"}
    )
    ilp_deadline_ms: int = dataclasses.field(
        default=100, metadata={"doc": "time for exact extraction, in milliseconds; 0: heuristics only"}
    )
    disabled_rules: tuple[str, ...] = dataclasses.field(
        default=(), metadata={"doc": "names of rules that are not to be used"}
    )
    proof: bool = dataclasses.field(default=True, metadata={"doc": "keep the proof of every compiled graph"})
    verify: str | None = dataclasses.field(
        default=None,
        metadata={
            "doc": "check the first call against float64: strict (roll back what is wrong), soft (warn) or "
            "off; None: HYPATIA_CHECKSUM_MODE, else strict"
        },
    )

    weight_copies: int | None = dataclasses.field(
        default=None,
        metadata={"doc": "bytes that packed, folded and merged copies of weights may take; None: no limit"},
    )
    backward_in_caller: bool = dataclasses.field(
        default=False,
        metadata={
            "doc": "on a GPU, run backward passes of `hypatia.compile` in the thread that asks for them, not "
            "in autograd's, which saves two switches between threads a step; from then on that holds for all "
            "backward passes of that thread"
        },
    )
    fp32_products: str = dataclasses.field(
        default="auto",
        metadata={
            "doc": "products of fp32 on a GPU: auto (by bf16 pieces where that is as exact and faster), plain"
        },
    )

    @classmethod
    def parse(cls, options: Mapping[str, object] | None = None, mode: str | None = None) -> Options:
        """Options from ``torch.compile``'s arguments; unknown keys and wrong types are errors."""
        if mode not in (None, *TORCH_MODES):
            raise OptionError(
                f"backend 'hypatia' has no mode {mode!r}; it knows {', '.join(map(repr, TORCH_MODES))}"
            )
        fields = {f.name: f for f in dataclasses.fields(cls)}
        hints = get_type_hints(cls)
        values: dict[str, Any] = {}
        for key, value in (options or {}).items():
            if key not in fields:
                raise OptionError(
                    f"backend 'hypatia' has no option {key!r}; it has: {', '.join(sorted(fields))}"
                )
            if key == "disabled_rules" and isinstance(value, (list, set, tuple)):
                value = tuple(value)
            allowed = tuple(
                t if isinstance(t, type) else tuple for t in get_args(hints[key]) or (hints[key],)
            )
            if key == "disabled_rules":
                allowed = (tuple,)
            if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
                names = " or ".join("None" if t is type(None) else t.__name__ for t in allowed)
                raise OptionError(f"option {key!r} must be {names}, not {value!r}")
            values[key] = value
        return cls(**values)._checked()

    def _checked(self) -> Options:
        choices: dict[str, list[str | None]] = {
            "numerics": ["exact", "wider", "reassoc", "approx"],
            "target": [None, *_native.targets()],
            "costs": ["shipped", "measured"],
            "verify": [None, *MODES],
            "fp32_products": ["auto", "plain"],
        }
        for key, allowed in choices.items():
            if getattr(self, key) not in allowed:
                raise OptionError(f"option {key!r} must be one of {allowed}, not {getattr(self, key)!r}")
        known = {rule["name"] for rule in json.loads(_native.rules())} if self.disabled_rules else set()
        known.update(faults.planted_rules)
        unknown = [name for name in self.disabled_rules if name not in known]
        if unknown:
            raise OptionError(f"option 'disabled_rules': there is no rule {unknown[0]!r}; see docs/rules.md")
        if self.node_limit < 0 or self.ilp_deadline_ms < 0 or (self.weight_copies or 0) < 0:
            raise OptionError("limits must not be negative")
        return self

    def native(self, target: str | dict[str, str | float]) -> str:
        """Options for the Rust core, as JSON, with a device's target or its numbers if they name none."""
        return json.dumps(
            {
                "target": self.target or target,
                "node_limit": self.node_limit,
                "numerics": self.numerics,
                "disabled_rules": list(self.disabled_rules),
                "ilp_deadline_ms": self.ilp_deadline_ms,
                "proof": self.proof,
                "planted": list(faults.planted_rules),
                "random_costs": faults.random_costs,
            }
        )

    @property
    def checksum_mode(self) -> str:
        """How compiled graphs are verified."""
        mode = self.verify or os.environ.get(MODE_VARIABLE, "").strip().lower() or MODES[0]
        if mode not in MODES:
            raise OptionError(f"{MODE_VARIABLE} must be one of {list(MODES)}, not {mode!r}")
        return mode
