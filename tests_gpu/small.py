"""A few small cases for compute-sanitizer, under which everything is many times slower.

compute-sanitizer --tool memcheck python3 tests_gpu/small.py
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "python")]


def trained(model: Any, x: Any) -> None:
    """Three steps of training by plans, compared with float64."""
    import forms
    import test_training

    import hypatia

    call = hypatia.compile(model)
    with forms.winning("plain"):
        for _ in range(3):
            test_training._assert_right(model, call, (x,))


def main() -> int:
    """All of them; the exit code."""
    from hypatia.devices import cuda

    if reason := cuda.available():
        print(f"no GPU checks: {reason}")
        return 0
    import test_plans
    import test_training
    import torch
    from torch import nn

    import hypatia

    for dtype in (torch.float32, torch.bfloat16):
        for width, rows in ((7, 1), (33, 300), (768, 260), (1026, 7)):
            for norm in (nn.LayerNorm, nn.RMSNorm):
                model = test_training.Normed(width, norm).cuda().to(dtype)
                trained(model, torch.randn(rows, width, device="cuda").to(dtype))
        for between in list(test_plans.BETWEEN.values())[:12]:
            model = test_plans.Layers(between).cuda().to(dtype)
            x = torch.randn(8, 32, device="cuda").to(dtype)
            trained(model, x)
            model.eval()
            with torch.no_grad():
                compiled = hypatia.compile(model, x)
                for _ in range(4):
                    test_plans._assert_right(compiled(x), model, x)
    print("all right")
    return 0


if __name__ == "__main__":
    sys.exit(main())
