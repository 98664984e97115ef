"""Megatron-LM itself saves and loads the engine's optimizer, on any layout, and each goes on from the other's."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

if TYPE_CHECKING:  # Megatron-LM's training takes seconds to import
    from tests.library.pretraining import Pretrained

TP, PP = ("--tensor-model-parallel-size", "2"), ("--pipeline-model-parallel-size", "2")
SHARDED, RESHARDABLE = ("--use-distributed-optimizer",), ("--dist-ckpt-optim-fully-reshardable",)
FP32, BF16 = ("--muon-fp32-matmul-prec", "high"), ("--bf16", "--accumulate-allreduce-grads-in-fp32")
SAVED, STEPS = 4, 8


def _pretrain(
    root: Path, *flags: str, load: str = "", save: str = "", ranks: int = 2, canzona: tuple[str, ...] | None = ()
) -> "list[Pretrained]":
    """Trains to step 8 from the start or from the checkpoint of step 4; with both names, saves the loaded state again
    without a step."""
    from tests.library.pretraining import LOOP, MUON, QWEN3, pretrain

    moved = ("--train-iters", str(SAVED)) if load and save else ()
    loading = ("--load", str(root / load), "--ckpt-step", str(SAVED), "--override-opt-param-scheduler") if load else ()
    saving = ("--save", str(root / save), "--save-interval", "3" if moved else str(SAVED)) if save else ()
    return pretrain(*QWEN3, *LOOP, *MUON, *flags, *loading, *saving, *moved, ranks=ranks, canzona=canzona)


def _losses(ranks: "list[Pretrained]") -> np.ndarray:
    """Returns those of the steps after the checkpoint."""
    return np.array(next(rank.losses for rank in ranks if rank.losses)[-(STEPS - SAVED) :])


def _state(root: Path, name: str) -> dict[str, np.ndarray]:
    from tests.library.pretraining import tensors_of

    tensors = tensors_of(root / name / f"iter_{SAVED:07d}")
    return {key: tensor for key, tensor in tensors.items() if key.startswith("optimizer.")}


def _assert_equal(states: dict[str, np.ndarray], others: dict[str, np.ndarray]) -> None:
    assert states.keys() == others.keys()
    assert any("momentum_buffer" in key for key in states)
    for key, tensor in states.items():
        assert tensor.any(), key
        np.testing.assert_array_equal(tensor, others[key], err_msg=key)


@pytest.mark.sweep
def test_state_passes_through_every_layout_bit_for_bit(tmp_path: Path) -> None:
    """Saved and loaded by Megatron, hosted and shared; on the layout that saved it, the run itself is the same."""
    flags = (*FP32, *SHARDED)
    whole = _pretrain(tmp_path, *flags, save="start")
    for one, other in zip(whole, _pretrain(tmp_path, *flags, load="start"), strict=True):
        assert one.losses[SAVED:] == other.losses
        assert all(np.array_equal(one.weights[name], other.weights[name]) for name in one.weights)
    before = "start"
    for name, further, ranks, settings in (
        ("hosted", TP, 2, ("engine.mode=hosted",)),
        ("shared", TP, 2, ("optimizer.form=gram", "engine.mode=shared")),
        ("stages", PP, 2, ()),
        ("one", (), 1, ()),
    ):
        _pretrain(tmp_path, *flags, *further, load=before, save=name, ranks=ranks, canzona=settings)
        _assert_equal(_state(tmp_path, before), _state(tmp_path, name))
        before = name


def _experts(ep: int) -> tuple[str, ...]:
    from tests.library.test_pretrain import EXPERTS

    return (*EXPERTS, "--expert-model-parallel-size", str(ep), "--expert-tensor-parallel-size", "1")


def test_experts_go_on_with_another_number_of_expert_parallel_ranks(tmp_path: Path) -> None:
    flags = (*FP32, *SHARDED)
    losses = _losses(_pretrain(tmp_path, *flags, *_experts(2), save="ep2"))
    np.testing.assert_allclose(_losses(_pretrain(tmp_path, *flags, *_experts(1), load="ep2")), losses, rtol=1e-6)


@pytest.mark.sweep
def test_experts_pass_through_every_layout_bit_for_bit(tmp_path: Path) -> None:
    flags = (*FP32, *SHARDED)
    _pretrain(tmp_path, *flags, *_experts(2), save="ep2")
    before = "ep2"
    for name, further, ranks in (
        ("ep1", _experts(1), 2),
        ("ep4", _experts(4), 4),
        ("ep2 tp2", (*_experts(2), *TP, "--sequence-parallel"), 2),
        ("ep2 pp2", (*_experts(2), *PP), 4),
    ):
        _pretrain(tmp_path, *flags, *further, load=before, save=name, ranks=ranks)
        _assert_equal(_state(tmp_path, before), _state(tmp_path, name))
        before = name


@pytest.mark.sweep
@pytest.mark.parametrize("optimizer", ["optimizer=soap", "optimizer=shampoo"])
def test_state_that_is_not_laid_out_as_weights_is_resumed_on_another_layout(tmp_path: Path, optimizer: str) -> None:
    flags = (*FP32, *SHARDED)
    losses = _losses(_pretrain(tmp_path, *flags, save="dp2", canzona=(optimizer,)))
    resumed = _losses(_pretrain(tmp_path, *flags, *TP, load="dp2", canzona=(optimizer,)))
    np.testing.assert_allclose(resumed, losses, rtol=1e-5)


@pytest.mark.sweep
@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize("ours_first", [False, True])
def test_each_goes_on_from_the_others_layer_wise_checkpoint(tmp_path: Path, ours_first: bool, experts: bool) -> None:
    """A checkpoint that one saves, the other loads and saves again bit for bit. Losses differ as much as those of
    Megatron's layer-wise and duplicated Muon do in bf16 (1e-4)."""
    flags = (*BF16, *SHARDED, *RESHARDABLE, *(_experts(2) if experts else ()))
    first, second = (None, ()) if not ours_first else ((), None)
    losses = _losses(_pretrain(tmp_path, *flags, save="one", canzona=first))
    np.testing.assert_allclose(_losses(_pretrain(tmp_path, *flags, load="one", canzona=second)), losses, rtol=4e-4)
    _pretrain(tmp_path, *flags, load="one", save="other", canzona=second)
    _assert_equal(_state(tmp_path, "one"), _state(tmp_path, "other"))


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("saver", "apart"),
    [
        ((*FP32, "--muon-tp-mode", "duplicated"), 1e-6),
        ((*BF16, "--muon-tp-mode", "duplicated"), 4e-4),
        ((*BF16, *SHARDED, *RESHARDABLE, "--optimizer", "adam"), None),
    ],
    ids=["duplicated fp32", "duplicated bf16", "adamw"],
)
def test_the_engine_goes_on_from_other_optimizers(tmp_path: Path, saver: tuple[str, ...], apart: float | None) -> None:
    """The loss is continuous after AdamW: equal in the first step, and then another optimizer's."""
    losses = _losses(_pretrain(tmp_path, *saver, save="megatron", canzona=None))
    precision = BF16 if "--bf16" in saver else FP32
    ours = _losses(_pretrain(tmp_path, *precision, *SHARDED, load="megatron"))
    assert ours[0] == losses[0]
    np.testing.assert_allclose(ours, losses, rtol=0.05 if apart is None else apart)


@pytest.mark.sweep
def test_routers_that_megatrons_muon_updated_go_on_with_adamw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss is continuous: equal in the first step, and then that of another optimizer of routers."""
    from tests.library import pretraining

    flags = (*FP32, *_experts(2))
    with monkeypatch.context() as unmarked:
        unmarked.setattr(pretraining, "leave_to_adamw", lambda _: None)
        losses = _losses(_pretrain(tmp_path, *flags, save="muon", canzona=None))
    monkeypatch.setattr(pretraining.Refusing, "emit", lambda *_: None)  # the engine warns of it
    ours = _losses(_pretrain(tmp_path, *flags, *SHARDED, load="muon"))
    assert ours[0] == losses[0]
    np.testing.assert_allclose(ours, losses, rtol=0.05)


@pytest.mark.sweep
def test_states_tied_to_a_layout_and_of_other_optimizers_are_refused_by_name(tmp_path: Path) -> None:
    flags = (*BF16, *SHARDED)
    _pretrain(tmp_path, *flags, save="tied", canzona=None)
    with pytest.raises(AssertionError, match="--dist-ckpt-optim-fully-reshardable"):
        _pretrain(tmp_path, *flags, load="tied")
    _pretrain(tmp_path, *flags, save="muon")
    with pytest.raises(AssertionError, match="it was saved by another optimizer"):
        _pretrain(tmp_path, *flags, load="muon", canzona=("optimizer=soap",))
