"""Megatron-LM itself saves and loads the engine's optimizer, on any layout, and each goes on from the other's."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.cli.commands.support import canzona

if TYPE_CHECKING:  # Megatron-LM's training takes seconds to import
    from tests.library.pretraining import Pretrained

TP, PP = ("--tensor-model-parallel-size", "2"), ("--pipeline-model-parallel-size", "2")
SHARDED, RESHARDABLE = ("--use-distributed-optimizer",), ("--dist-ckpt-optim-fully-reshardable",)
FP32, BF16 = ("--muon-fp32-matmul-prec", "high"), ("--bf16", "--accumulate-allreduce-grads-in-fp32")
SAVED, STEPS = 4, 8


def _pretrain(
    root: Path, *flags: str, load: str = "", save: str = "", ranks: int = 2, engine: tuple[str, ...] | None = ()
) -> "list[Pretrained]":
    """Trains to step 8 from the start or from the checkpoint of step 4; with both names, saves the loaded state again
    without a step."""
    from tests.library.pretraining import LOOP, MUON, QWEN3, pretrain

    moved = ("--train-iters", str(SAVED)) if load and save else ()
    loading = ("--load", str(root / load), "--ckpt-step", str(SAVED), "--override-opt-param-scheduler") if load else ()
    saving = ("--save", str(root / save), "--save-interval", "3" if moved else str(SAVED)) if save else ()
    return pretrain(*QWEN3, *LOOP, *MUON, *flags, *loading, *saving, *moved, ranks=ranks, canzona=engine)


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
        _pretrain(tmp_path, *flags, *further, load=before, save=name, ranks=ranks, engine=settings)
        _assert_equal(_state(tmp_path, before), _state(tmp_path, name))
        before = name


def _experts(ep: int) -> tuple[str, ...]:
    from tests.library.test_pretrain import EXPERTS

    return (*EXPERTS, "--expert-model-parallel-size", str(ep), "--expert-tensor-parallel-size", "1")


@pytest.mark.parametrize("layers", [pytest.param("1", marks=pytest.mark.sweep), "[0,1]"], ids=["all", "second"])
def test_experts_go_on_with_another_number_of_expert_parallel_ranks(tmp_path: Path, layers: str) -> None:
    """Through a run of canzona's, which `canzona checkpoint import` and `export` make: it keeps every tensor bit for
    bit."""
    from tests.library.pretraining import tensors_of

    flags, folder = (*FP32, *SHARDED, "--moe-layer-freq", layers), f"iter_{SAVED:07d}"
    losses = _losses(_pretrain(tmp_path, *flags, *_experts(2), save="ep2"))
    canzona("checkpoint", "import", tmp_path / "ep2" / folder, "--out", tmp_path / "run", code=0)
    canzona("checkpoint", "export", tmp_path / "run", tmp_path / "back", "--to", "megatron", code=0)
    exported = tensors_of(tmp_path / "back" / folder)
    for key, tensor in tensors_of(tmp_path / "ep2" / folder).items():
        np.testing.assert_array_equal(exported[key], tensor, err_msg=key)
    np.testing.assert_allclose(_losses(_pretrain(tmp_path, *flags, *_experts(1), load="back")), losses, rtol=1e-6)


@pytest.mark.sweep
@pytest.mark.parametrize("layers", ["1", "[0,1]"], ids=["in every layer", "in the second layer"])
def test_experts_pass_through_every_layout_bit_for_bit(tmp_path: Path, layers: str) -> None:
    flags = (*FP32, *SHARDED, "--moe-layer-freq", layers)
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
def test_a_run_goes_on_from_a_checkpoint_that_is_not_kept(tmp_path: Path) -> None:
    """The newer of two is loaded. The older one has keys of another optimizer."""
    flags, kind = (*FP32, *SHARDED), ("--non-persistent-ckpt-type", "global")
    saving, older = ("--save", str(tmp_path), "--save-interval"), ("2", "--train-iters", "3")
    _pretrain(tmp_path, *flags, *saving, *older, engine=("optimizer=soap",))
    losses = _losses(_pretrain(tmp_path, *flags, *kind, *saving, "100", "--non-persistent-save-interval", "5"))
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    resumed = next(rank.losses for rank in _pretrain(tmp_path, *flags, *kind, "--load", str(tmp_path)) if rank.losses)
    np.testing.assert_array_equal(resumed, losses[-3:])


@pytest.mark.sweep
@pytest.mark.parametrize("optimizer", ["optimizer=soap", "optimizer=shampoo"])
def test_state_that_is_not_laid_out_as_weights_is_resumed_on_another_layout(tmp_path: Path, optimizer: str) -> None:
    flags = (*FP32, *SHARDED)
    losses = _losses(_pretrain(tmp_path, *flags, save="dp2", engine=(optimizer,)))
    resumed = _losses(_pretrain(tmp_path, *flags, *TP, load="dp2", engine=(optimizer,)))
    np.testing.assert_allclose(resumed, losses, rtol=1e-5)


@pytest.mark.sweep
@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize("ours_first", [False, True])
def test_each_goes_on_from_the_others_layer_wise_checkpoint(tmp_path: Path, ours_first: bool, experts: bool) -> None:
    """A checkpoint that one saves, the other loads and saves again bit for bit. Losses differ as much as those of
    Megatron's layer-wise and duplicated Muon do in bf16 (1e-4)."""
    flags = (*BF16, *SHARDED, *RESHARDABLE, *(_experts(2) if experts else ()))
    first, second = (None, ()) if not ours_first else ((), None)
    losses = _losses(_pretrain(tmp_path, *flags, save="one", engine=first))
    np.testing.assert_allclose(_losses(_pretrain(tmp_path, *flags, load="one", engine=second)), losses, rtol=4e-4)
    _pretrain(tmp_path, *flags, load="one", save="other", engine=second)
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
    losses = _losses(_pretrain(tmp_path, *saver, save="megatron", engine=None))
    precision = BF16 if "--bf16" in saver else FP32
    ours = _losses(_pretrain(tmp_path, *precision, *SHARDED, load="megatron"))
    assert ours[0] == losses[0]
    np.testing.assert_allclose(ours, losses, rtol=0.05 if apart is None else apart)


@pytest.mark.sweep
def test_what_megatrons_muon_took_for_matrices_goes_on_with_adamw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss is continuous: equal in the first step, and then that of another optimizer of these parameters, which
    the engine names."""
    from tests.library import pretraining
    from tests.library.test_pretrain import SHARED

    flags = (*FP32, *_experts(2), *SHARED, "--position-embedding-type", "learned_absolute")
    with monkeypatch.context() as unmarked:
        unmarked.setattr(pretraining, "leave_to_adamw", lambda _: None)
        losses = _losses(_pretrain(tmp_path, *flags, save="muon", engine=None))
    monkeypatch.setattr(pretraining.Refusing, "emit", lambda _, record: print(record.getMessage()))
    ours = _pretrain(tmp_path, *flags, *SHARDED, load="muon")
    assert _losses(ours)[0] == losses[0]
    np.testing.assert_allclose(_losses(ours), losses, rtol=0.05)
    [said] = [line for line in ours[0].printed.splitlines() if "begin at zero" in line]
    named = said.partition(" begin")[0].removeprefix("AdamW's moments of ").split(", ")
    assert sorted(named) == [
        "decoder.layers.mlp.router.weight",
        "decoder.layers.mlp.shared_experts.gate_weight",
        "embedding.position_embeddings.weight",
    ]


@pytest.mark.sweep
def test_an_import_takes_routers_from_megatrons_muon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.library import pretraining

    monkeypatch.setattr(pretraining, "leave_to_adamw", lambda _: None)
    _pretrain(tmp_path, *FP32, *_experts(2), "--train-iters", str(SAVED), save="muon", engine=None)
    folder = tmp_path / "muon"
    told = canzona("checkpoint", "import", folder, "--out", tmp_path / "run", code=0)
    assert f"the state of muon at step {SAVED}" in told.stdout
    assert "AdamW's moments of decoder.layers.mlp.router.weight begin at zero" in " ".join(told.stderr.split())


@pytest.mark.sweep
def test_states_tied_to_a_layout_and_of_other_optimizers_are_refused_by_name(tmp_path: Path) -> None:
    flags = (*BF16, *SHARDED)
    _pretrain(tmp_path, *flags, save="tied", engine=None)
    with pytest.raises(AssertionError, match="--dist-ckpt-optim-fully-reshardable"):
        _pretrain(tmp_path, *flags, load="tied")
    _pretrain(tmp_path, *flags, save="muon")
    with pytest.raises(AssertionError, match="it was saved by another optimizer"):
        _pretrain(tmp_path, *flags, load="muon", engine=("optimizer=soap",))
