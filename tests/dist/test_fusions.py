"""The parts that Megatron fuses by torch.compile on GPUs have the same loss as without, and the same choice on every
rank."""

import importlib.util
import os
from dataclasses import replace
from types import SimpleNamespace
from typing import cast, get_args

import pytest
import torch
from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl
from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
from megatron.core.tensor_parallel import layers, vocab_parallel_cross_entropy

from canzona_cli.config.compose import compose_run
from canzona_cli.config.resolve import resolve
from canzona_cli.config.schema import RunConfig
from canzona_cli.core.megatron import model, parallel, quick_import
from canzona_cli.core.setup import Fp8Recipe, Precision
from canzona_cli.training.step import train_step
from tests.cuda_stand_in import DEVICE, cuda_stand_in
from tests.dist.engine_support import Digests, batches, heard, weights
from tests.dist.jobs import SMALL, build
from tests.dist.ranks import run_ranks
from tests.dist.synthetic import finish_gathering

CPU = torch.device("cpu")
CONFIG, LAYOUT = resolve(compose_run([*SMALL, "gpus=2", "parallel.tp=2"]).config)


def _start() -> parallel.World:
    return parallel.initialize(LAYOUT, "cpu", seed=1)


@pytest.mark.parametrize("lacking", [None, 0])
def test_all_ranks_compile_or_none_does(lacking: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused cross-entropy adds up in one collective what else takes two: ranks that differ would wait for ever."""
    monkeypatch.setattr(model, "missing_for_compiling", lambda: "gcc" if os.environ["RANK"] == str(lacking) else None)

    asked: list[bool] = []

    def described(config: RunConfig, world: parallel.World, *, compiled: bool) -> None:
        asked.append(compiled)
        raise InterruptedError  # nothing is built

    monkeypatch.setattr(model, "transformer_config", described)

    def rank() -> tuple[list[bool], list[str]]:
        world = _start()
        with heard(model.__name__) as lines, cuda_stand_in():
            for device in (CPU, DEVICE):
                with pytest.raises(InterruptedError):
                    model.build_model(CONFIG.setup, replace(world, device=device))
        return asked, lines

    (first, said), (second, silent) = run_ranks(2, rank)
    assert first == second == [False, lacking is None], "on CPU ranks nothing is compiled"
    assert len(said) == (lacking is not None)
    assert ("gcc" in "".join(said)) is (lacking == 0)
    assert silent == []


def test_the_fused_loss_and_swiglu_are_the_unfused_ones() -> None:
    """The loss' gradients in bf16. Run without compiling: what is compiled is this code."""

    def rank() -> tuple[float, float, torch.dtype]:
        world = _start()
        generator = torch.Generator().manual_seed(1)
        logits = torch.randn(8, 3, 64, generator=generator).bfloat16().chunk(2, dim=-1)[world.tp_rank]
        labels = torch.randint(64, (8, 3), generator=generator)
        found = []
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(quick_import, "_compile", lambda function, **_: function)
            for of in (fused_vocab_parallel_cross_entropy, vocab_parallel_cross_entropy):
                leaf = logits.clone().requires_grad_()
                loss = of(leaf, labels, tp_group=world.groups.tp)
                found.append((loss.detach(), *torch.autograd.grad(loss.mean(), leaf)))
            leaf = torch.randn(8, 3, 64, generator=generator).requires_grad_()
            gate, up = leaf.chunk(2, dim=-1)
            swiglu = [
                (made.detach(), torch.autograd.grad(made.square().mean(), leaf)[0])
                for made in (bias_swiglu_impl(leaf, None), torch.nn.functional.silu(gate) * up)
            ]
        # Of derivatives Megatron has its own formula.
        torch.testing.assert_close(*swiglu, rtol=1e-5, atol=1e-8)
        (fused, gradient), (plain, expected) = found
        return float((fused - plain).abs().max()), float((gradient - expected).abs().max()), gradient.dtype

    for loss, gradient, dtype in run_ranks(2, rank):
        assert loss == 0.0
        assert gradient == 0.0
        assert dtype is torch.bfloat16


def test_what_is_fused_depends_on_the_compiler_and_on_the_precision() -> None:
    """Gradients of the fused loss are rounded to bf16 whatever the logits are."""

    def rank() -> list[tuple[bool, bool]]:
        world = _start()
        found = []
        for precision in get_args(Precision):
            config = replace(CONFIG, train=replace(CONFIG.train, precision=precision))
            for compiled in (True, False):
                made = model.transformer_config(config.setup, world, compiled=compiled)
                found.append((made.bias_activation_fusion, made.cross_entropy_loss_fusion))
        return found

    assert run_ranks(2, rank)[0] == [(True, True), (False, False), (True, False), (False, False)]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("engine", [True, False])
def test_angles_are_applied_by_transformer_engine(device: str, engine: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron's own description of a model refuses it where Transformer Engine is not installed."""
    asked: dict[str, object] = {}
    monkeypatch.setattr(model, "TransformerConfig", lambda **settings: asked.update(settings))
    config = replace(CONFIG, cluster=replace(CONFIG.cluster, transformer_engine=engine))
    world = cast(parallel.World, SimpleNamespace(device=torch.device(device), layout=LAYOUT))
    model.transformer_config(config.setup, world, compiled=False)
    assert asked["apply_rope_fusion"] == (engine and device == "cuda")


@pytest.mark.parametrize(
    ("recipe", "form"), [("tensorwise", "hybrid"), ("delayed", "hybrid"), ("blockwise", "e4m3"), ("mxfp8", "e4m3")]
)
def test_megatron_gets_the_fp8_recipe(recipe: Fp8Recipe, form: str) -> None:
    config = replace(CONFIG, train=replace(CONFIG.train, fp8=recipe))

    def rank() -> tuple[object, ...]:
        made = model.transformer_config(config.setup, _start(), compiled=False)
        return made.fp8, made.fp8_recipe, made.fp8_param, made.fp8_amax_compute_algo, made.fp8_wgrad

    algorithm = "max" if recipe == "delayed" else "most_recent"
    assert run_ranks(2, rank)[0] == (form, recipe, False, algorithm, True)


def test_gradients_added_to_main_grad_by_the_layers_are_those_that_hooks_add() -> None:
    """Transformer Engine's setting switches Megatron's own fused path here, its kernel a product and an addition."""
    # Tied, the embedding's gradient is a sum of two, in another order.
    untied = replace(CONFIG.model, tied_embeddings=False)
    config = replace(CONFIG, model=untied, train=replace(CONFIG.train, precision="bf16"))

    def rank(fused: bool) -> tuple[list[float], Digests, int]:
        added: list[torch.Tensor] = []

        def kernel(inputs: torch.Tensor, gradients: torch.Tensor, main_grad: torch.Tensor) -> None:
            added.append(main_grad)
            main_grad.add_(gradients.t().matmul(inputs))

        def switch(layer: torch.nn.Module, on: bool) -> None:
            layer.gradient_accumulation_fusion = on  # type: ignore[assignment]

        with pytest.MonkeyPatch.context() as patched:
            for kind in (layers.ColumnParallelLinear, layers.RowParallelLinear):
                setting = property(lambda layer: layer.gradient_accumulation_fusion, switch)
                patched.setattr(kind, "fuse_wgrad_accumulation", setting, raising=False)
            kernels = SimpleNamespace(wgrad_gemm_accum_fp32=kernel)
            patched.setattr(layers, "fused_weight_gradient_mlp_cuda", kernels, raising=False)
            trainee = build(config, LAYOUT)
            if fused:
                model.fuse_weight_gradients(trainee.chunks[0])
            stream = batches(trainee)
            losses = [train_step(trainee, stream).loss for _ in range(2)]
            finish_gathering(trainee)
            return losses, weights(trainee), len(added)

    plain, fused = run_ranks(2, lambda: rank(False)), run_ranks(2, lambda: rank(True))
    for (losses, held, none), (same_losses, same, count) in zip(plain, fused, strict=True):
        assert (same_losses, same) == (losses, held)
        # Four products a layer and the output's, in each of two steps' micro-batches.
        assert (none, count) == (0, 2 * LAYOUT.num_microbatches * (4 * CONFIG.model.num_layers + 1))


def test_a_transformer_engine_without_the_setting_is_said(caplog: pytest.LogCaptureFixture) -> None:
    model.fuse_weight_gradients(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    [record] = caplog.records
    assert "weight gradients are not fused" in record.getMessage()


def test_megatrons_own_fused_kernel_is_used_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron's output layer would raise if the kernel were missing."""

    def rank() -> bool:
        world = replace(_start(), device=torch.device("cuda"))
        return bool(model.transformer_config(CONFIG.setup, world, compiled=False).gradient_accumulation_fusion)

    assert run_ranks(2, rank) == [False, False]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: object())
    assert run_ranks(2, rank) == [True, True]
