"""The rules for valid layouts: the sizes that must divide each other in Megatron-core 0.19 and torchrun.

Null values are not checked here; `canzona_cli.core.simulate.fit` later chooses values that follow these rules.
Sources: `TransformerConfig.__post_init__` (heads and query groups over tp), `get_num_layers_to_build`
(pipeline stages, see `canzona_cli.core.setup.stages`), `MoELayer.forward` (experts need sequence parallelism),
`get_batch_on_this_cp_rank` (2 * cp slices of a sequence), `forward_backward_pipelining_with_interleaving`
(micro-batches in groups of pp).
"""

import math
from collections.abc import Collection, Iterator

from canzona_cli.core.errors import Problem
from canzona_cli.core.setup import ModelConfig, Setup
from canzona_cli.core.setup.stages import number_list, pipeline_problems


def divisors(number: int) -> tuple[int, ...]:
    """Returns all divisors of a positive number in ascending order."""
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return tuple(small + [number // n for n in reversed(small) if n * n != number])


def possible_tp(model: ModelConfig, *, whole_experts: bool = False) -> tuple[int, ...]:
    """Returns the tensor-parallel sizes that divide heads, query groups, ffn rows and vocabulary, in
    ascending order.

    Args:
        whole_experts: True if tp need not divide the ffn rows, because expert parallelism keeps experts
            whole.
    """
    return divisors(math.gcd(*(count for count, _ in _cut_by_tp(model, whole_experts=whole_experts))))


def may_have_whole_experts(setup: Setup) -> bool:
    """Returns True if the run may have a layout that distributes whole experts over ranks (`parallel.ep`
    above 1). Unless the user sets `parallel.ep`, this is possible only on GPUs."""
    ep, experts = setup.parallel.ep, setup.model.num_experts
    if experts == 0 or ep is not None:
        return experts > 0 and (ep or 1) > 1
    return setup.cluster.device == "cuda" and math.gcd(experts, setup.gpus // (setup.parallel.pp or 1)) > 1


def uneven_problems(key: str, parts: int, counts: Collection[tuple[int, str]]) -> Iterator[Problem]:
    """Yields a problem if `parts`, the value of `key`, does not divide every count.

    Args:
        counts: (count, name) pairs, such as (36, "layers").
    """
    uneven = " or ".join(f"{count} {name}" for count, name in counts if count % parts)
    if uneven:
        fix = f"use one of {number_list(divisors(math.gcd(*(count for count, _ in counts))))}"
        yield Problem(key, f"cannot split {uneven} into {parts} equal parts", fix, value=parts)


def layout_problems(setup: Setup) -> list[Problem]:
    """Returns the problems with the parallelism, the machines and the batch of a run. Some problems lack the
    value of their setting, which `problems.with_own_values` fills in."""
    return [
        *_parallelism_problems(setup),
        *_machine_problems(setup),
        *_batch_problems(setup),
    ]


def _cut_by_tp(model: ModelConfig, *, whole_experts: bool) -> list[tuple[int, str]]:
    """Returns the counts that a tensor-parallel size must divide, as (count, name) pairs."""
    counts = [
        (model.num_attention_heads, "attention heads"),
        (model.num_query_groups, "key/value heads"),
        (model.ffn_hidden_size, "ffn rows"),
        (model.vocab_size, "vocabulary entries"),
    ]
    if model.num_experts and model.moe_layer_freq != 1:
        counts.append((model.dense_width, "ffn rows of layers without experts"))
    return [(count, name) for count, name in counts if not (whole_experts and name == "ffn rows")]


def _parallelism_problems(setup: Setup) -> Iterator[Problem]:
    model, parallel, train = setup.model, setup.parallel, setup.train
    if model.num_attention_heads % model.num_query_groups:
        reason = f"does not divide the {model.num_attention_heads} attention heads"
        fix = f"use one of {number_list(divisors(model.num_attention_heads))}"
        yield Problem("model.num_query_groups", reason, fix)
    tp, pp, cp = parallel.tp, parallel.pp, parallel.cp or 1
    if tp is not None:
        counts = _cut_by_tp(model, whole_experts=may_have_whole_experts(setup))
        yield from uneven_problems("parallel.tp", tp, counts)
    yield from pipeline_problems(model.num_layers, pp, parallel.vpp)
    copy_ranks = (tp or 1) * (pp or 1) * cp
    if setup.gpus % copy_ranks:
        factors = [f"{name} {size}" for name, size in (("tp", tp), ("pp", pp), ("cp", cp)) if size not in (None, 1)]
        product = " * ".join(factors) + (f" = {copy_ranks}" if len(factors) > 1 else "")
        above = -(-setup.gpus // copy_ranks) * copy_ranks
        below = above - copy_ranks
        reason = f"is not a multiple of {product}, the number of ranks that hold one copy of the model"
        fix = f"use gpus={above}" + (f" or gpus={below}" if below else "") + ", or a smaller parallel size"
        yield Problem("gpus", reason, fix)
    yield from _expert_parallelism_problems(setup)
    if cp > 1 and train.seq_length % (2 * cp):
        reason = f"must be a multiple of 2 * cp = {2 * cp}: each rank has two slices, to balance causal attention"
        fix = f"use train.seq_length={-(-train.seq_length // (2 * cp)) * 2 * cp}"
        yield Problem("train.seq_length", reason, fix)
    if parallel.sequence_parallel is False and model.num_experts and (tp or 1) > 1:
        reason = "Megatron trains experts on several TP ranks only with sequence parallelism"
        fix = "leave it null, or use parallel.tp=1"
        yield Problem("parallel.sequence_parallel", reason, fix, value=False)
    if parallel.sequence_parallel or model.num_experts:
        if tp == 1 and parallel.sequence_parallel:
            reason = "needs more than one TP rank, and parallel.tp is 1"
            fix = "set parallel.sequence_parallel=false, or a larger parallel.tp"
            yield Problem("parallel.sequence_parallel", reason, fix)
        if tp is not None and tp > 1 and train.seq_length % (tp * cp):
            reason = f"must be a multiple of tp * cp = {tp * cp} for sequence parallelism"
            fix = f"use train.seq_length={-(-train.seq_length // (tp * cp)) * tp * cp}"
            yield Problem("train.seq_length", reason, fix)


def _expert_parallelism_problems(setup: Setup) -> Iterator[Problem]:
    ep, experts = setup.parallel.ep or 1, setup.model.num_experts
    if ep == 1:
        return
    if experts == 0:
        reason = "divides the experts of a layer among ranks, but the model has no experts"
        yield Problem("parallel.ep", reason, "leave it null, or set model.num_experts", value=ep)
        return
    yield from uneven_problems("parallel.ep", ep, [(experts, "experts")])
    cells = setup.gpus // (setup.parallel.pp or 1)
    if cells % ep:
        reason = f"does not divide the {cells} ranks of a pipeline stage"
        possible = [size for size in divisors(cells) if experts % size == 0]
        yield Problem("parallel.ep", reason, f"use one of {number_list(possible)}", value=ep)
    if setup.parallel.dispatcher != "flex":
        return
    if setup.cluster.device == "cpu":
        yield Problem("parallel.dispatcher", "DeepEP's kernels need GPUs", "leave it null", value="flex")
    elif setup.train.precision == "fp32":
        reason = "DeepEP's kernels send bf16, and train.precision is fp32"
        yield Problem("parallel.dispatcher", reason, "leave it null, or train in bf16", value="flex")


def _machine_problems(setup: Setup) -> Iterator[Problem]:
    gpus, per_node, nodes = setup.gpus, setup.cluster.gpus_per_node, setup.cluster.nodes
    ranks = "GPUs" if setup.cluster.device == "cuda" else "CPU ranks"
    if nodes is None:
        if gpus > per_node and gpus % per_node:
            below = gpus // per_node * per_node
            fix = f"use gpus={below} or gpus={below + per_node}, or set cluster.nodes and cluster.gpus_per_node"
            yield Problem("gpus", f"is not a whole number of machines with {per_node} {ranks} each", fix)
    elif gpus % nodes:
        fix = "torchrun starts the same number of ranks on every machine: use a divisor of gpus, or leave it null"
        yield Problem("cluster.nodes", f"does not divide {gpus} {ranks} evenly", fix)
    elif gpus // nodes > per_node:
        reason = f"puts {gpus // nodes} ranks on a machine that has {per_node}"
        fix = f"use cluster.nodes={-(-gpus // per_node)} or leave it null"
        yield Problem("cluster.nodes", reason, fix)


def _batch_problems(setup: Setup) -> Iterator[Problem]:
    parallel, train = setup.parallel, setup.train
    micro = train.micro_batch_size
    if parallel.tp is not None and parallel.pp is not None and parallel.cp is not None:
        copy_ranks = parallel.tp * parallel.pp * parallel.cp
        dp = setup.gpus // copy_ranks if setup.gpus % copy_ranks == 0 else 1
    else:
        dp = 1  # unknown until `canzona_cli.core.simulate.fit` chooses a dp that divides the batch
    pp = parallel.pp if (parallel.vpp or 1) > 1 else None
    sizes = {"dp": dp, "micro-batch": micro or 1, "pp (with vpp > 1)": pp or 1}
    divisor = math.prod(sizes.values())
    product = " * ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
    multiple = f"is not a multiple of {product}" + (f" = {divisor}" if " * " in product else "")
    batch = train.global_batch_size
    if batch is not None and batch % divisor:
        above = -(-batch // divisor) * divisor
        fix = f"use train.global_batch_size={above}" + (f" or {above - divisor}" if above > divisor else "")
        yield Problem("train.global_batch_size", multiple, fix)
    if uneven := [str(size) for size, _ in train.batch_rampup if size % divisor]:
        reason = f"its batch of {', '.join(uneven)} sequences {multiple}"
        yield Problem("train.batch_rampup", reason, f"use multiples of {divisor} sequences")
