"""Data as JSON knows it."""

from __future__ import annotations

import json
import math
from typing import Any


def plain(value: object) -> Any:
    """The same data of lists, dictionaries, texts and numbers; numbers that are not finite are texts."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def as_json(value: object) -> str:
    """JSON that every reader takes: it has no word for infinity."""
    return json.dumps(plain(value), indent=1, allow_nan=False)
