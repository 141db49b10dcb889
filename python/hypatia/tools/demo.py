"""The main job on one page: compile a model, show what was done to it, prove it, check it."""

from __future__ import annotations

import time

import torch
from torch import nn
from torch.nn import functional as F

from ..frontend import dynamo


class Block(nn.Module):
    """A transformer block as people write it: three projections, residuals, norms, an MLP."""

    def __init__(self, width: int = 256, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Post-norm attention and MLP."""
        b, s, d = x.shape
        q, k, v = (f(x).view(b, s, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        a = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, s, d)
        x = self.norm1(x + self.out(a))
        return self.norm2(x + self.down(F.gelu(self.up(x))))


def main() -> None:
    """Run the demo on the GPU if there is one, else on the CPU."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mlp = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    show("MLP", mlp.to(device), torch.randn(64, 784, device=device))
    show("transformer block", Block().to(device), torch.randn(2, 64, 256, device=device))


def show(name: str, model: nn.Module, x: torch.Tensor) -> None:
    """Compile, run, compare with float64, replay the proof; then one training step."""
    model.eval()
    compiled = torch.compile(model, backend="hypatia")
    with torch.no_grad():
        start = time.perf_counter()
        y = compiled(x)
        first = time.perf_counter() - start
        report = dynamo.reports()[-1]
        eager = model(x)
        exact = model.double()(x.double())
        model.float()
    replay = report.replay()
    print(f"\n{name} on {x.device}: first call {first:.2f} s")
    print(report)
    print(
        f"  replay    {replay.evaluated} steps evaluated in float64, {replay.skipped} too large, "
        f"largest relative difference {replay.worst:.0e}: {'the proof holds' if replay.holds else 'BROKEN'}"
    )
    ours, theirs = (t.double().sub(exact).abs().max().item() for t in (y, eager))
    to_eager = (y - eager).abs().max().item()
    print(f"  error     {ours:.1e} to float64 (eager: {theirs:.1e}); {to_eager:.1e} to eager")

    compiled(x).square().mean().backward()
    ours_of = _gradients(model)
    model.zero_grad()
    model(x).square().mean().backward()
    worst = max((a - b).abs().max().item() for a, b in zip(ours_of, _gradients(model), strict=True))
    print(f"  training  largest difference of a gradient to eager's: {worst:.1e}")


def _gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


if __name__ == "__main__":
    main()
