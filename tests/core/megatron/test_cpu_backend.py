"""The promises of the CPU backend to Megatron-core: one contract per replaced name.

Each contract runs the Megatron code that needs the name, on real gloo ranks in processes of their own: with every
replacement it must work, with this one taken back it must fail. The second half tells when Megatron no longer needs
a name. Megatron-core 0.19.2 is what the contracts were written against.
"""

import logging
import warnings
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from canzona_cli.config.compose import compose_run
from canzona_cli.core.megatron import cpu_backend, parallel
from canzona_cli.core.megatron.model import build_model
from canzona_cli.core.megatron.parallel import World
from canzona_cli.core.setup import Layout
from canzona_cli.core.simulate import fit
from tests.dist.ranks import run_ranks
from tests.sizes import layout

Contract = Callable[[World], None]


def _rotary_embedding(world: World) -> None:
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    # [seq, 1, 1, dim]: the angles of each position.
    angles = RotaryEmbedding(kv_channels=8, rotary_percent=1.0, rotary_base=10_000)(4)
    assert angles.device.type == "cpu"
    expected = torch.arange(4.0)[:, None] * 10_000.0 ** -(torch.arange(0, 8, 2) / 8)
    torch.testing.assert_close(angles[:, 0, 0, :4], expected)


def _gradient_reduction(world: World) -> None:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    layer = torch.nn.Linear(4, 4, bias=False)
    wrapped = DistributedDataParallel(
        config=TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1),
        ddp_config=DistributedDataParallelConfig(overlap_grad_reduce=True),
        module=layer,
        pg_collection=world.groups,
    )
    wrapped.zero_grad_buffer()
    torch.autograd.backward(wrapped(torch.full((1, 4), 1.0 + world.rank)).sum())
    wrapped.finish_grad_sync()
    # Ranks 0 and 1 fed 1 and 2.
    assert torch.equal(getattr(layer.weight, "main_grad", torch.empty(0)), torch.full((4, 4), 1.5))


def _seeds_give_different_states(world: World) -> None:
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    tracker, again = CudaRNGStatesTracker(), CudaRNGStatesTracker()
    tracker.add("one", 1)
    tracker.add("two", 2)
    again.add("one", 1)
    assert not torch.equal(tracker.states_["one"], tracker.states_["two"]), "two seeds, one state"
    assert torch.equal(tracker.states_["one"], again.states_["one"]), "one seed, two states"


def _adding_a_seed_disturbs_nobody(world: World) -> None:
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    before = torch.get_rng_state()
    CudaRNGStatesTracker().add("one", 1)
    assert torch.equal(torch.get_rng_state(), before)


def _fork_draws_from_its_own_state(world: World) -> None:
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    tracker = CudaRNGStatesTracker()
    tracker.add("one", 1)
    before = torch.get_rng_state()
    draws = []
    for _ in range(2):
        with tracker.fork("one"):
            draws.append(torch.rand(4))
        assert torch.equal(torch.get_rng_state(), before), "the state outside the fork moved"
    generator = torch.Generator().manual_seed(1)
    # The second fork goes on where the first one stopped.
    assert torch.equal(torch.stack(draws), torch.stack([torch.rand(4, generator=generator) for _ in range(2)]))


def _optimizers_sort_parameters_by_type(world: World) -> None:
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

    half = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    full = torch.nn.Parameter(torch.ones(2))
    settings = OptimizerConfig(bf16=True, params_dtype=torch.bfloat16)
    optimizer = Float16OptimizerWithFloat16Params(torch.optim.AdamW([half, full]), settings, None, lambda *_: None)
    assert optimizer.float16_groups[0][0] is half
    assert optimizer.fp32_from_fp32_groups[0][0] is full
    full.grad = torch.full((2,), 3.0)
    clip_grad_by_total_norm_fp32([full], max_norm=1.0, total_norm=6.0)
    torch.testing.assert_close(full.grad, torch.full((2,), 0.5))


def _tied_embedding_of_a_pipeline(world: World) -> None:
    from megatron.core.transformer.module import Float16Module

    config, _ = fit.resolve(compose_run(["recipe=qwen3-tiny", "gpus=2", "parallel.pp=2"]).config.setup)
    model: object
    [model] = build_model(config, world)
    assert isinstance(model, Float16Module)
    total = model.module.shared_embedding_or_output_weight().detach().float().sum()
    torch.distributed.all_reduce(both := total.clone())
    assert torch.equal(both, 2 * total), "first and last stage hold different embeddings"


def _loss_scale_of_an_optimizer(world: World) -> None:
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer.optimizer import FP32Optimizer

    inner = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))])
    scale = FP32Optimizer(inner, OptimizerConfig(), lambda *_: None).get_loss_scale()
    assert (scale.device.type, scale.item()) == ("cpu", 1.0)


def _gradient_norm(world: World) -> None:
    from megatron.core.optimizer.clip_grads import get_grad_norm_fp32

    norm = get_grad_norm_fp32([torch.tensor([3.0]), torch.tensor([4.0])], grad_stats_parallel_group=world.groups.tp)
    assert float(norm) == pytest.approx(5.0)


def _norm_of_a_long_gradient(world: World) -> None:
    from megatron.core.optimizer.clip_grads import get_grad_norm_fp32

    long = torch.randn(20_000_000, generator=torch.Generator().manual_seed(1))
    norm = get_grad_norm_fp32([long, torch.ones(3)], grad_stats_parallel_group=world.groups.tp)
    assert float(norm) == pytest.approx(float((np.square(long.numpy(), dtype=np.float64).sum() + 3) ** 0.5), rel=1e-6)


def _gradient_of_a_frequent_token(world: World) -> None:
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.tensor_parallel.layers import VocabParallelEmbedding

    settings = ModelParallelConfig(params_dtype=torch.bfloat16, perform_initialization=False)
    embedding = VocabParallelEmbedding(
        8, 16, init_method=torch.nn.init.zeros_, config=settings, tp_group=world.groups.tp
    )
    torch.nn.init.normal_(embedding.weight)
    # 2,048 times token 3, and 16 others; with TP 2, tokens 4 to 7 are on the other rank.
    ids = torch.cat([torch.full((2048,), 3), torch.tensor([0, 1, 5, 7]).repeat(4)]).view(8, -1)
    grads = 1 + torch.randn(*ids.shape, 16, generator=torch.Generator().manual_seed(1)) / 4
    grads = grads.bfloat16()
    torch.autograd.backward(embedding(ids), grads)
    expected = np.zeros((8, 16))
    np.add.at(expected, ids.numpy(), grads.double().numpy())
    first, last = embedding.vocab_start_index, embedding.vocab_end_index
    gradient = embedding.weight.grad
    assert gradient is not None
    assert gradient.dtype == torch.bfloat16
    # bf16 has 8 significant bits, so rounding changes a number by at most 1/256 of it.
    np.testing.assert_allclose(gradient.double().numpy(), expected[first:last], rtol=2**-8, atol=0)


def _causal_mask(world: World) -> None:
    from megatron.core.transformer.utils import get_default_causal_mask

    assert torch.equal(get_default_causal_mask(4), torch.arange(4)[None, :] > torch.arange(4)[:, None])


def _tokens_reach_their_experts(world: World) -> None:
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=2,
        num_attention_heads=1,
        num_moe_experts=4,
        moe_router_topk=1,
        moe_router_pre_softmax=True,
        moe_token_dispatcher_type="alltoall",
        expert_model_parallel_size=2,
    )
    rank = torch.distributed.get_rank()
    dispatcher = MoEAlltoAllTokenDispatcher(2, [2 * rank, 2 * rank + 1], config, world.groups)
    # Two tokens a rank: rank 0 sends one to expert 0 and one to expert 3, rank 1 both to expert 3.
    chosen = torch.tensor([[0, 3], [3, 3]][rank])
    routing = torch.nn.functional.one_hot(chosen, 4).bool()
    tokens = torch.tensor([[10.0, 11.0], [20.0, 21.0]][rank])[:, None].expand(2, 2).contiguous()
    sent, probs = dispatcher.dispatch_preprocess(tokens, routing, routing.float())
    arrived, counts, _ = dispatcher.dispatch_postprocess(*dispatcher.token_dispatch(sent, probs))
    assert (arrived[:, 0].tolist(), counts.tolist()) == [([10.0], [1, 0]), ([11.0, 20.0, 21.0], [0, 3])][rank]
    back = dispatcher.combine_postprocess(dispatcher.token_combine(dispatcher.combine_preprocess(arrived)))
    assert torch.equal(back, tokens)


_DISPATCHER = "megatron.core.transformer.moe.token_dispatcher"
_RANDOM = "megatron.core.tensor_parallel.random"


def _layout(*, tp: int = 1, pp: int = 1, dp: int = 1, ep: int = 1) -> Layout:
    return replace(layout(tp=tp, pp=pp, dp=dp), ep=ep)


CONTRACTS: dict[str, tuple[Contract, Layout]] = {
    "torch.cuda.current_device": (_rotary_embedding, _layout()),
    "torch.cuda.current_stream": (_gradient_reduction, _layout(dp=2)),
    "MoEAlltoAllTokenDispatcher.cuda_dtoh_stream": (_tokens_reach_their_experts, _layout(dp=2, ep=2)),
    f"{_DISPATCHER}.maybe_move_tensor_to_cpu": (_tokens_reach_their_experts, _layout(dp=2, ep=2)),
    "torch.cuda.manual_seed": (_seeds_give_different_states, _layout()),
    "torch.cuda.get_rng_state": (_adding_a_seed_disturbs_nobody, _layout()),
    f"{_RANDOM}._get_cuda_rng_state": (_fork_draws_from_its_own_state, _layout()),
    f"{_RANDOM}._set_cuda_rng_state": (_fork_draws_from_its_own_state, _layout()),
    "megatron.core.optimizer.clip_grads.l2_norm_impl": (_norm_of_a_long_gradient, _layout()),
    "torch.nn.functional.embedding": (_gradient_of_a_frequent_token, _layout(tp=2)),
    "Tensor.type": (_optimizers_sort_parameters_by_type, _layout()),
    "Tensor.cuda": (_tied_embedding_of_a_pipeline, _layout(pp=2)),
    "torch.tensor": (_loss_scale_of_an_optimizer, _layout()),
    "torch.zeros": (_gradient_norm, _layout()),
    "torch.ones": (_causal_mask, _layout()),
}


def _outcome(contract: Contract, layout: Layout, *, without: str | None) -> str | None:
    """Run a contract on the ranks of `layout`; the first rank's error, None when it was kept on every rank."""

    def rank() -> str | None:
        logging.disable(logging.WARNING)
        warnings.simplefilter("ignore")
        world = parallel.initialize(layout, "cpu", seed=1)
        for item in cpu_backend._replacements():
            if item.label == without:
                setattr(item.owner, item.name, cpu_backend._originals[item.label])
        try:
            contract(world)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return None

    errors = run_ranks(layout.world_size, rank)
    return next((error for error in errors if error is not None), None)


def test_every_replaced_name_has_a_contract() -> None:
    assert sorted(CONTRACTS) == sorted(item.label for item in cpu_backend._replacements())


@pytest.mark.parametrize(("contract", "layout"), dict.fromkeys(CONTRACTS.values()))
def test_megatron_runs_with_the_cpu_meanings(contract: Contract, layout: Layout) -> None:
    error = _outcome(contract, layout, without=None)
    uses = [f"{name} ({_used_by(name)})" for name, (needs, _) in CONTRACTS.items() if needs is contract]
    assert error is None, f"Megatron-core's use of {uses} changed: {error}"


@pytest.mark.parametrize("name", CONTRACTS)
def test_megatron_still_needs(name: str) -> None:
    contract, layout = CONTRACTS[name]
    error = _outcome(contract, layout, without=name)
    assert error is not None, f"Megatron-core no longer needs {name} in {_used_by(name)}: drop the replacement"


def _used_by(name: str) -> str:
    return next(item.used_by for item in cpu_backend._replacements() if item.label == name)


def _in_child[T](function: Callable[[], T]) -> T:
    """Call `function` in a process of its own, so that nothing stays replaced here."""
    (result,) = run_ranks(1, function)
    return result


def _current() -> dict[str, object]:
    return {item.label: getattr(item.owner, item.name) for item in cpu_backend._replacements()}


def test_it_refuses_to_act_where_cuda_is_available() -> None:
    def child() -> None:
        torch.cuda.is_available = lambda: True
        before = _current()
        with pytest.raises(RuntimeError, match="CUDA is available"):
            cpu_backend.install()
        assert _current() == before

    _in_child(child)


def test_only_megatron_hears_that_a_tensor_is_on_cuda() -> None:
    def child() -> None:
        cpu_backend.install()
        tensor = torch.ones(2)
        told: dict[str, object] = {"__name__": "megatron.core.somewhere", "tensor": tensor}
        exec("name, half = tensor.type(), tensor.type('torch.HalfTensor')", told)
        assert told["name"] == "torch.cuda.FloatTensor"
        converted = told["half"]
        assert isinstance(converted, torch.Tensor)
        assert converted.dtype == torch.float16
        assert tensor.type() == "torch.FloatTensor"
        assert tensor.bfloat16().type() == "torch.BFloat16Tensor"

    _in_child(child)


def test_every_way_to_say_cuda_is_the_cpu_and_other_devices_are_what_they_were() -> None:
    cuda: list[str | torch.device] = ["cuda", "cuda:0", torch.device("cuda"), torch.device("cuda", 0)]
    wanted = [*((device, "cpu") for device in (*cuda, "cpu", None)), ("meta", "meta"), (torch.device("meta"), "meta")]

    def child() -> None:
        cpu_backend.install()
        for device, got in wanted:
            made = (torch.zeros(2, device=device), torch.ones(2, device=device), torch.tensor([1.0], device=device))
            assert {tensor.device for tensor in made} == {torch.device(got)}, device

    _in_child(child)
