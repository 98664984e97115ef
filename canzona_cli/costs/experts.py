"""The parts of an expert layer's time that dense layers do not have: matmuls of many experts, the transfer of
tokens to their experts' ranks and back, and the launches of the router's small kernels.

Tokens are assumed to be spread evenly over the experts, as the balancing loss intends. Let k of E experts be
chosen for each token, T be the tokens of a micro-batch on a TP group, t = tp, and the experts be divided
among e ranks (`Layout.ep`). Then a rank sends k T / t copies of tokens and receives as many: k T e / (t E)
for each of its E / e experts.
"""

from canzona_cli.config.execution import dispatcher_of
from canzona_cli.config.schema import ClusterConfig, Layout, RunConfig
from canzona_cli.costs.buffers import micro_batch_tokens
from canzona_cli.costs.links import Group, Groups, Link, Links, Transfer
from canzona_cli.costs.update import matmul_rate, rates
from canzona_cli.model.family import Weight, Work

STREAMS = 4
"""The number of expert GEMMs that run concurrently on the streams of Transformer Engine's grouped linear
layers. Concurrent GEMMs take less time than GEMMs one after another if a single GEMM leaves parts of the GPU
idle."""
EXPERT_LAUNCHES = 60
"""The number of kernel launches for which the GPU waits in one pass of an expert layer: router, sort and
permutation are about 40 small kernels, and the host loses its lead over the GPU when it waits for the token
counts. Fitted to published step times of Qwen3-30B-A3B (bench/published.yaml)."""
HOST_LAUNCHES = 400
"""The time that the host needs for one pass of an expert layer, as a number of kernel launches. Transformer
Engine's modules cost the host more than the launches of their kernels. Fitted to steps of Qwen3-30B-A3B with
few tokens, with and without CUDA graphs."""


def is_divided(layout: Layout, work: Work) -> bool:
    """Returns True if the module's experts are divided among ranks."""
    return work.experts > 1 and layout.ep > 1


def held_weight(layout: Layout, work: Work) -> Weight:
    """Returns the part of a module's weight, or of one expert's weight, that a rank stores."""
    return work.weight.stored(layout.expert_tp if work.experts > 1 else layout.tp)


def held_experts(layout: Layout, work: Work) -> int:
    """Counts a module's experts on one rank; 1 for a module without experts."""
    return work.experts // layout.ep if work.experts > 1 else 1


def products_seconds(config: RunConfig, layout: Layout, work: Work) -> float:
    """Returns the seconds that a module's matmuls take in the forward pass of a micro-batch."""
    cluster, weight, experts = config.cluster, held_weight(layout, work), held_experts(layout, work)
    copies = micro_batch_tokens(config, layout) * work.experts_per_token * layout.expert_tp // layout.tp
    tokens = max(1, copies // experts) if work.experts > 1 else micro_batch_tokens(config, layout)
    volume = float(tokens * weight.elements)
    side = volume ** (1 / 3)
    if cluster.device == "cuda" and experts > 1:
        # Concurrent GEMMs run at the rate of one GEMM of their total volume, but not faster than a
        # GEMM of the smallest size in the profile's table.
        smallest, _ = rates(cluster)[0]
        side = max(side, min(float(smallest), side * min(STREAMS, experts) ** (1 / 3)))
    return experts * 2.0 * volume / matmul_rate(cluster, side, config.train.precision)


def launch_seconds(cluster: ClusterConfig, seconds: float) -> float:
    """Returns the seconds that kernel launches add to a pass of an expert layer that keeps the GPU busy for
    `seconds`; 0 on CPUs, where a calibration's measurements include launches."""
    if cluster.device == "cpu":
        return 0.0
    waited_s, host_s = (launches * cluster.launch_us * 1e-6 for launches in (EXPERT_LAUNCHES, HOST_LAUNCHES))
    return max(waited_s, host_s - seconds)


def copy_passes(config: RunConfig, layout: Layout) -> float:
    """Returns how many times the elements in `Work.copied` pass through a rank's memory.

    Copies of tokens are sorted by expert. After `alltoall` they are in the order of their senders and must be
    sorted again.
    """
    sorts = 2 if layout.ep > 1 and dispatcher_of(config) == "alltoall" else 1
    return sorts * layout.expert_tp / layout.tp


def dispatch(config: RunConfig, layout: Layout) -> Transfer:
    """Returns the transfer of a micro-batch's tokens to their experts. The transfer back takes as long.

    - allgather: every rank receives all ranks' tokens;
    - alltoall: every copy of a token is sent separately;
    - flex (DeepEP): one copy of a token is sent over the network to each node that has an expert of the
      token, and from there to each rank with such an expert; both links work at the same time.
    """
    links, group = Links(cluster=config.cluster), Groups.of(layout, config.cluster).dispatch
    tokens = micro_batch_tokens(config, layout) // layout.tp
    size = float(tokens * config.model.hidden_size * config.train.weight_bytes)
    kind = dispatcher_of(config)
    if kind == "allgather":
        moved = links.all_gather(group.size * size, group)
    elif kind == "flex":
        moved = _flex_dispatch(links, group, size, config.model.experts_per_token)
    else:
        sent = [size * config.model.experts_per_token * (group.size - 1) / group.size] * group.size
        moved = links.all_to_all(sent, sent, group)
    # Count the cores of all groups that one owner's ranks are in, as for tensor-parallel collectives.
    return moved.with_cores(moved.cores * layout.tp / layout.ep)


def _flex_dispatch(links: Links, group: Group, size: float, chosen: int) -> Transfer:
    """Returns the transfer of tokens by `flex`, see `dispatch`.

    Experts are assumed to be chosen evenly and independently, so each of n nodes or ranks has none of a
    token's experts with probability (1 - 1/n)^chosen.

    Args:
        size: the bytes of tokens on each rank.
        chosen: the number of experts for each token.
    """

    def reached(parts: int) -> float:
        """Returns the expected number of nodes (or ranks), out of `parts`, that have at least one of a
        token's experts."""
        return parts * (1.0 - (1.0 - 1.0 / parts) ** chosen)

    outside = (group.machines - 1) / group.machines
    inside = (group.per_machine - 1) / group.per_machine
    times: dict[Link, float] = {
        "network": size * reached(group.machines) * outside / links.bandwidth("network"),
        "machine": size * reached(group.size) * inside / links.bandwidth("machine"),
    }
    link: Link = "network" if times["network"] > times["machine"] else "machine"
    return Transfer(latency_s=links.latency(group.link), link=link, link_s=times[link])
