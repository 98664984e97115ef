"""Whether a cluster profile could be of a real machine: nothing is faster than what it is made of."""

from collections.abc import Iterator

from canzona_cli.config.schema import ClusterConfig
from canzona_cli.errors import Problem

SCATTER = 1.1
"""How far a measured rate may be above a datasheet's: clocks go above the nominal one, and measurements scatter."""


def physics_problems(cluster: ClusterConfig) -> Iterator[Problem]:
    """Rates above the peak, links faster than the memory they end in, measurements of them that beat them.

    A processor's vector units may do fp32 faster than bf16, and its loopback is no link: a profile of CPU ranks answers
    for its bf16 products alone.
    """
    peak, memory = cluster.bf16_tflops, cluster.memory_gb_per_s
    fastest = max((rate for _, rate in cluster.matmul_tflops), default=0.0)
    yield from _above("matmul_tflops", fastest, "bf16_tflops", peak, "the dense peak, which no product exceeds")
    for name in ("intra_node_gb_per_s", "inter_node_gb_per_s"):
        why = "and what arrives has to be written to memory"
        yield from _above(name, getattr(cluster, name), "memory_gb_per_s", memory, why)
    if cluster.device == "cpu":
        return
    for name in ("fp32_tflops", "tf32_tflops", "qr_tflops", "eigh_tflops"):
        yield from _above(name, getattr(cluster, name) or 0.0, "bf16_tflops", peak, "the fastest that the GPU has")
    # A calibrated link is what two ranks reached in an all-to-all; others may do better, up to what memory takes.
    link = "memory_gb_per_s" if cluster.calibrated else "intra_node_gb_per_s"
    limit = float(getattr(cluster, link))
    for kind, ranks, size, seconds, _ in cluster.collectives:
        if ranks < 2:
            continue  # said elsewhere
        # What a rank must send or receive at least, also where the switch does the sums.
        through = size if kind in ("all_to_all", "send") else size * (ranks - 1) / ranks
        rate = through / seconds / 1e9
        if rate > SCATTER * limit:
            reason = f"moves {rate:.0f} GB/s through a rank's link, above cluster.{link}={limit:g}"
            row = [kind, ranks, size, seconds]
            yield Problem(key="cluster.collectives", value=row, reason=reason, fix="measure it: canzona calibrate")


def _above(name: str, rate: float, over: str, limit: float, why: str) -> Iterator[Problem]:
    if rate > SCATTER * limit:
        reason = f"is above cluster.{over}={limit:g}, {why}"
        yield Problem(key=f"cluster.{name}", value=rate, reason=reason, fix=f"correct it, or cluster.{over}")
