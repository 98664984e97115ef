"""Matrices that break iterations: of rank one, condition 1e8 or one huge column, denormal, zero, not finite, thin."""

import random

import torch

KINDS = (
    *("gaussian", "rank-one", "low-rank", "condition", "step", "huge-column", "huge-row", "sparse", "constant"),
    *("repeated", "signs", "identity", "denormal", "huge", "tiny", "zero", "nan", "infinity"),
)


def adversarial(seed: int) -> tuple[str, torch.Tensor]:
    """Its kind, and a matrix in fp32, of sides up to 300."""
    generator, dice = torch.Generator().manual_seed(seed), random.Random(seed)
    kind = KINDS[seed % len(KINDS)]
    side = dice.choice((1, 2, 3, 7, 16, 33, 64, 96))
    long = dice.choice((side, side + 1, side * 2, side * 3))

    def gaussian(rows: int, cols: int) -> torch.Tensor:
        return torch.randn(rows, cols, generator=generator, dtype=torch.float64)

    x = gaussian(side, long)
    if kind in ("rank-one", "low-rank"):
        rank = 1 if kind == "rank-one" else 3
        x = gaussian(side, rank) @ gaussian(rank, long)
    elif kind in ("condition", "step"):
        u, _, v = torch.linalg.svd(x, full_matrices=False)
        decay = 10.0 ** -dice.choice((1, 2, 3, 4, 6, 8))
        values = torch.logspace(0, 1, side, base=decay, dtype=torch.float64)
        if kind == "step":
            values = torch.where(torch.arange(side) < dice.randint(1, side), 1.0, decay)
        x = (u * values) @ v
    elif kind == "huge-column":
        x[:, dice.randrange(long)] *= 10 ** dice.uniform(1, 8)
    elif kind == "huge-row":
        x[dice.randrange(side)] *= 10 ** dice.uniform(1, 8)
    elif kind == "sparse":
        x *= torch.rand(side, long, generator=generator) < 0.05
    elif kind == "constant":
        x = 1 + x * 10 ** -dice.uniform(0, 8)
    elif kind == "repeated":
        x[side // 2 :] = x[: side - side // 2] * (1 + 1e-4)
    elif kind == "signs":
        x = x.sign()
    elif kind == "identity":
        x = torch.eye(side, long) + x * 10 ** -dice.uniform(0, 8)
    elif kind == "denormal":
        x *= 1e-42
    elif kind in ("huge", "tiny"):
        x *= 1e37 if kind == "huge" else 1e-30
    elif kind in ("zero", "nan", "infinity"):
        x *= 0
        x[-1, -1] = {"zero": 0.0, "nan": torch.nan, "infinity": torch.inf}[kind]
    found = x.float()
    return kind, (found.T if dice.random() < 0.5 else found).contiguous()
