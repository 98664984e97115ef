"""The engine in a bare loop over Megatron-core: what it is asked for, it does as Megatron, or refuses by name."""

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_standard_config_overrides
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.optimizer.optimizer_config import ParamKey
from megatron.core.optimizer_param_scheduler import get_canonical_lr_for_logging
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.utils import get_model_config

from canzona_cli import Engine
from canzona_cli.core.errors import CanzonaError, Unsupported
from canzona_cli.core.megatron.limits import BUCKETS, MODEL, OPTIMIZER, Limit
from canzona_cli.core.megatron.model import build_model
from canzona_cli.core.megatron.optimizer import Overrides
from canzona_cli.core.megatron.parallel import World
from tests.dist import jobs
from tests.dist.jobs import SMALL
from tests.library.loops import Trained, by_canzona, by_megatron, optimizer_config, train, trainee_of

FIXED = (*SMALL, "train.precision=fp32", "optimizer.lr=0.01", "schedule.warmup_steps=0", "gpus=2")
SETTINGS: dict[str, dict[str, Any]] = {
    "decoupled_lr": {"decoupled_lr": 0.002, "decoupled_min_lr": 0.001},
    "apply_wd_to_qk_layernorm": {"apply_wd_to_qk_layernorm": True},
    "muon_split_qkv": {"muon_split_qkv": False},
}
WORKS = {
    *("get_parameters", "prepare_model_params_for_param_sync", "get_grad_stats_parallel_group", "prepare_grads"),
    *("step_with_ready_grads", "get_grad_norm", "zero_grad", "get_loss_scale", "scale_loss", "reload_model_params"),
    *("state", "param_groups", "step", "grads_states_parallel_group_is_shared"),
    "optimizer",  # of a single child only, as Megatron's
}
REFUSED = {
    *("offload_to_cpu", "restore_from_cpu", "count_zeros", "clip_grad_norm", "get_grads_for_grad_norm"),
    *("has_grad_norm_group", "sharded_state_dict", "save_parameter_state", "load_parameter_state", "state_dict"),
    "load_state_dict",
}
OF_LAYER_WISE = {"save_state_dict_to_file", "load_state_dict_from_file"}
"""Methods that Megatron-LM calls on its layer-wise optimizer."""


OVERRIDES: dict[str, Callable[[OptimizerConfig], Overrides]] = {
    "standard": get_standard_config_overrides,
    "of the output": lambda config: {
        **get_standard_config_overrides(config),
        ParamKey(attr="is_embedding_or_output_parameter"): {"wd_mult": 3.0, "max_lr": 0.004, "min_lr": 0.0},
    },
}


@pytest.mark.parametrize(
    "cases",
    [
        {
            "standard": ("standard", {}),
            "decoupled": ("standard", SETTINGS["decoupled_lr"]),
            "fused": ("standard", SETTINGS["muon_split_qkv"]),
        },
        pytest.param(
            {"norms": ("standard", SETTINGS["apply_wd_to_qk_layernorm"]), "output": ("of the output", {})},
            marks=pytest.mark.sweep,
        ),
    ],
    ids=" ".join,
)
def test_settings_and_overrides_of_parameter_groups_are_megatrons(cases: dict[str, tuple[str, dict[str, Any]]]) -> None:
    """Rates, minima and weight decay of embedding, output layer and norms, and whether q, k and v are one matrix; a run
    with others is another."""
    config, layout = jobs.resolve(*FIXED)

    def work(case: str, world: World) -> tuple[Trained, Trained]:
        name, settings = cases[case]
        megatron = optimizer_config(config, **settings)
        overrides = OVERRIDES[name](megatron)

        def run(build: Any) -> Trained:
            return train(trainee_of(config, world, lambda chunks: build(chunks, megatron, world, dict(overrides))))

        return run(by_megatron), run(by_canzona)

    losses = {}
    for case, ranks in jobs.on_ranks(dict.fromkeys(cases, (config, layout)), work).items():
        for megatron, canzona in ranks:
            np.testing.assert_allclose(canzona.losses, megatron.losses, rtol=1e-6)
            np.testing.assert_allclose(canzona.norms, megatron.norms, rtol=3e-6)
            for name, weight in megatron.weights.items():
                apart = np.linalg.norm(canzona.weights[name] - weight) / np.linalg.norm(weight)
                assert apart < 5e-6, (case, name)
        losses[case] = ranks[0][0].losses[-1]
    assert len(set(losses.values())) == len(losses), "a setting without effect says nothing"


def test_a_rate_of_adamw_yields_to_the_callers_overrides_and_megatron_logs_that_of_matrices() -> None:
    config, layout = jobs.resolve(*FIXED)
    own = (
        "optimizer=soap",
        "optimizer.adamw_lr=0.003",
        "optimizer.adamw_weight_decay=0.02",
        "optimizer.adamw_beta2=0.9",
    )
    where = "cluster=cpu"

    def work(_: str, world: World) -> tuple[float, set[Any]]:
        megatron = optimizer_config(config, decoupled_lr=0.004, min_lr=0.0)

        def build(chunks: list[torch.nn.Module]) -> Any:
            return by_canzona(chunks, megatron, world, None, where, *own)

        optimizer: Any = trainee_of(config, world, build).optimizer
        adamw, _ = optimizer.chained_optimizers
        groups = {
            (round(group["lr"], 12), group["weight_decay"], group["betas"])
            for group in adamw.param_groups
            if "lr" in group and "betas" in group
        }
        logged = get_canonical_lr_for_logging(optimizer.param_groups)
        assert all(group["lr"] == logged for group in optimizer.matrices.param_groups)
        return round(logged, 12), groups

    # The embedding has Megatron's decoupled rate; norms have no decay.
    expected = {(0.003, 0.0, (0.9, 0.9)), (0.004, 0.02, (0.9, 0.9))}
    assert jobs.on_ranks({"": (config, layout)}, work) == {"": [(0.01, expected)] * 2}


def test_every_public_member_works_or_is_refused_by_name() -> None:
    config, layout = jobs.resolve(*FIXED, "parallel.tp=2")
    public = {name for name in dir(ChainedOptimizer) if not name.startswith("_")}
    assert public == WORKS | REFUSED, "Megatron's optimizers have other members: decide about them"

    def work(_: str, world: World) -> list[str]:
        trainee = trainee_of(config, world, lambda chunks: by_canzona(chunks, optimizer_config(config), world))
        train(trainee, steps=1)
        optimizer: Any = trainee.optimizer
        wrong = []
        for name in REFUSED | OF_LAYER_WISE:
            for each in (optimizer, optimizer.matrices):
                if each is optimizer.matrices and name in ("state_dict", "load_state_dict"):
                    continue  # canzona's own checkpoints use them
                try:
                    getattr(each, name)({})
                except Unsupported as error:
                    wrong += [] if f"{name}: " in str(error) else [f"{name}: {error}"]
                else:
                    wrong.append(name)
        assert {id(master) for master in optimizer.matrices.masters.values()} == {
            id(key) for key in optimizer.matrices.optimizer.state
        }
        assert len(optimizer.state) == sum(len(child.state) for child in optimizer.chained_optimizers)
        assert all("lr" in group for child in optimizer.chained_optimizers for group in child.optimizer.param_groups)
        assert float(optimizer.scale_loss(torch.tensor(2.0))) == 2.0
        assert optimizer.get_grad_stats_parallel_group() is world.groups.intra_dist_opt
        with pytest.raises(Unsupported, match="load-main-params-from-ckpt"):
            optimizer.reload_model_params(state_dict={"model": {}})
        return wrong

    assert jobs.on_ranks({"": (config, layout)}, work) == {"": [[], []]}


def test_weights_loaded_after_the_optimizer_was_built_are_trained() -> None:
    config, layout = jobs.resolve(*FIXED)

    def work(how: str, world: World) -> Trained:
        def build(chunks: list[torch.nn.Module]) -> Any:
            def load() -> None:
                with torch.no_grad():
                    for chunk in chunks:
                        for param in chunk.parameters():
                            param.mul_(1.5)

            if how == "before":
                load()
            built = by_canzona(chunks, optimizer_config(config), world)
            if how == "after":
                load()
            return built

        return train(trainee_of(config, world, build))

    ranks = jobs.on_ranks({"before": (config, layout), "after": (config, layout)}, work)
    for before, after in zip(ranks["before"], ranks["after"], strict=True):
        assert before.losses == after.losses
        assert all(np.array_equal(before.weights[name], after.weights[name]) for name in before.weights)


def test_a_step_above_megatrons_threshold_of_the_norm_is_skipped() -> None:
    config, layout = jobs.resolve(*FIXED)

    def work(_: str, world: World) -> tuple[bool, bool]:
        megatron = optimizer_config(config, grad_norm_skip_threshold=1e-3)
        trainee = trainee_of(config, world, lambda chunks: by_canzona(chunks, megatron, world))
        before = {name: param.detach().clone() for name, param in trainee.chunks[0].named_parameters()}
        train(trainee, steps=1)
        same = all(torch.equal(before[name], param) for name, param in trainee.chunks[0].named_parameters())
        assert isinstance(trainee.optimizer, ChainedOptimizer)
        return same, trainee.optimizer.skipped == 1

    assert jobs.on_ranks({"": (config, layout)}, work) == {"": [(True, True)] * 2}


OTHER_VALUES: dict[str, object] = {
    "optimizer": "adam",
    "loss_scale": 128.0,
    "muon_scalar_optimizer": "lion",
    "num_distributed_optimizer_instances": 2,
    "param_name_patterns_for_fp32_local_accumulation": ("all",),
    "moe_shared_expert_glu_interleave_size": 16,
    "moe_latent_size": 32,
    "moe_mlp_glu_interleave_size": 16,
    "experimental_attention_variant": "dsa",
    "mtp_num_layers": 1,
    "fp4": "e2m1",
    "cuda_graph_impl": "local",
}


EXPERTS = ("model.ffn_hidden_size=64", "model.num_experts=4", "optimizer.eps=0.001", "parallel.ep=2")
"""Experts that are divided among two ranks. At the usual eps AdamW makes steps of the rounding of tiny gradients."""


@pytest.mark.parametrize(
    "layout",
    [
        ("gpus=2",),
        pytest.param(("gpus=4", "parallel.cp=2"), marks=pytest.mark.sweep),
        pytest.param(("gpus=4", "parallel.tp=2"), marks=pytest.mark.sweep),
    ],
    ids=" ".join,
)
def test_experts_in_grouped_layers_train_as_with_megatrons_muon(layout: tuple[str, ...]) -> None:
    """Layers have the names and the order of Transformer Engine's grouped ones."""
    config, resolved = jobs.resolve(*FIXED, *EXPERTS, *layout)

    def work(_: str, world: World) -> tuple[Trained, Trained]:
        megatron = optimizer_config(config, adam_eps=1e-3)

        def run(build: Any) -> Trained:
            return train(trainee_of(config, world, lambda chunks: build(chunks, megatron, world)))

        return run(by_megatron), run(by_canzona)

    for megatron, canzona in jobs.on_ranks({"": (config, resolved)}, work)[""]:
        np.testing.assert_allclose(canzona.losses, megatron.losses, rtol=1e-6)
        np.testing.assert_allclose(canzona.norms, megatron.norms, rtol=3e-6)
        for name, weight in megatron.weights.items():
            assert np.linalg.norm(canzona.weights[name] - weight) / np.linalg.norm(weight) < 5e-6, name


def test_experts_and_stages_that_a_plan_cannot_have_are_refused_by_name() -> None:
    cases = {
        "experts": jobs.resolve(*FIXED, *EXPERTS),
        "stages": jobs.resolve(*FIXED, "parallel.pp=2", "model.num_layers=4"),
    }
    changes: dict[str, dict[str, object]] = {
        "experts": {"add_bias_linear": True, "expert_tensor_parallel_size": 2},
        "stages": {
            "num_layers_in_first_pipeline_stage": 3,
            "num_layers_in_last_pipeline_stage": 1,
            "pipeline_model_parallel_layout": PipelineParallelLayerLayout("Et|tttL", 2),
            "num_layers": 1,
        },
    }

    def work(case: str, world: World) -> dict[str, str]:
        [chunk] = build_model(cases[case][0].setup, world)
        mcore, answers = get_model_config(chunk), {}
        for name, value in changes[case].items():
            before, groups = getattr(mcore, name), copy(world.groups)
            setattr(mcore, name, value)
            if name == "expert_tensor_parallel_size":  # which is the size of a group
                groups.expt_tp = world.groups.ep
            with pytest.raises(Unsupported) as refused:
                Engine(optimizer_config(cases[case][0]), groups=groups).wrap(
                    [chunk], DistributedDataParallelConfig(use_distributed_optimizer=True)
                )
            answers[name] = str(refused.value)
            setattr(mcore, name, before)
        return answers

    for case, run in cases.items():
        for answers in jobs.on_ranks({case: run}, work)[case]:
            assert answers.keys() == changes[case].keys()
            for name, answer in answers.items():
                assert f"{'num_layers' if case == 'stages' else name}: " in answer, answer


def _other(limit: Limit) -> object:
    return OTHER_VALUES.get(limit.name, not limit.value)


def test_each_setting_that_is_not_supported_is_refused_by_name() -> None:
    """Whatever Megatron's own checks would say of the combination: the value is put into a valid configuration."""
    config, layout = jobs.resolve(*FIXED)

    def refusal(engine: Engine, chunk: torch.nn.Module, ddp: DistributedDataParallelConfig | None = None) -> str:
        try:
            engine.wrap([chunk], ddp or DistributedDataParallelConfig(use_distributed_optimizer=True))
        except CanzonaError as error:
            return str(error)
        return "nothing"

    def work(_: str, world: World) -> dict[str, str]:
        answers = {}
        [chunk] = build_model(config.setup, world)
        for limits, place in ((OPTIMIZER, "optimizer"), (BUCKETS, "buckets"), (MODEL, "model")):
            for limit in limits:
                optimizer = optimizer_config(config)
                ddp = DistributedDataParallelConfig(use_distributed_optimizer=True)
                mcore = get_model_config(chunk)
                changed: object = {"optimizer": optimizer, "buckets": ddp, "model": mcore}[place]
                before = getattr(changed, limit.name)
                setattr(changed, limit.name, _other(limit))
                answers[f"{place} {limit.name}"] = refusal(Engine(optimizer, groups=world.groups), chunk, ddp)
                setattr(changed, limit.name, before)
        megatron, groups = optimizer_config(config), world.groups
        answers["setting optimizer.lr"] = refusal(Engine(megatron, "optimizer.lr=3", groups=groups), chunk)
        answers["setting cluster"] = refusal(Engine(megatron, "cluster=h100-80g", groups=groups), chunk)
        answers["setting engine.strategy"] = refusal(Engine(megatron, "engine=sc", groups=groups), chunk)
        answers["setting optimizer"] = refusal(Engine(replace(megatron, optimizer="soap"), groups=groups), chunk)
        with pytest.raises(Unsupported, match="Engine: "):
            assert Engine(megatron, groups=groups).plan
        dict(chunk.named_parameters())["decoder.layers.0.mlp.linear_fc1.weight"].requires_grad_(False)
        answers["model plan"] = refusal(Engine(megatron, groups=groups), chunk)
        return answers

    for answers in jobs.on_ranks({"": (config, layout)}, work)[""]:
        assert len(answers) > 30
        for case, answer in answers.items():
            assert f"{case.split()[1]}: " in answer, (case, answer)


def test_only_the_chunks_that_wrap_returned_are_trained() -> None:
    """Other chunks have other buffers: with Megatron's, over two data-parallel ranks, losses differ from the second
    step on, without a word."""
    config, layout = jobs.resolve(*FIXED)

    def refusal(call: Callable[[], object]) -> str:
        with pytest.raises(Unsupported) as error:
            call()
        return str(error.value)

    def work(_: str, world: World) -> list[str]:
        megatron, groups = optimizer_config(config), world.groups
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=True)
        engine, other = Engine(megatron, groups=groups), Engine(megatron, groups=groups)
        bare = build_model(config.setup, world)
        by_hand = [DistributedDataParallel(get_model_config(bare[0]), ddp, bare[0], pg_collection=groups)]
        wrapped, of_other = engine.wrap(bare, ddp), other.wrap(build_model(config.setup, world), ddp)
        wrong: list[Any] = [[], bare, by_hand, of_other]
        answers = [
            *(refusal(lambda chunks=chunks: engine.wrap(chunks, ddp)) for chunks in ([], by_hand)),  # type: ignore[misc]
            *(refusal(lambda chunks=chunks: engine.optimizer(chunks)) for chunks in wrong),  # type: ignore[misc]
        ]
        assert engine.optimizer(tuple(wrapped)).matrices is not None, "another sequence of the same chunks is as good"
        return answers

    expected = [
        ("Engine.wrap", "nothing to train"),
        ("Engine.wrap", "chunk 0 is already wrapped"),
        *(
            ("Engine.optimizer", f"got {kind}", "only the 1")
            for kind in ("no chunk", "GPTModel", "DistributedDataParallel", "DistributedDataParallel")
        ),
    ]
    for answers in jobs.on_ranks({"": (config, layout)}, work)[""]:
        for words, answer in zip(expected, answers, strict=True):
            assert all(word in answer for word in words), (words, answer)


def test_overrides_that_no_parameter_group_can_have_are_refused() -> None:
    config, layout = jobs.resolve(*FIXED)
    refused: dict[str, Overrides] = {
        "it applies to matrices": {ParamKey(name="*linear_fc1.weight"): {"wd_mult": 0.5}},
        "canzona updates the matrices": {ParamKey(name="*embedding*"): {"optimizer": "lion"}},
    }

    def work(case: str, world: World) -> str:
        [chunk] = build_model(config.setup, world)
        with pytest.raises(Unsupported, match="config_overrides") as error:
            by_canzona([chunk], optimizer_config(config), world, refused[case])
        return str(error.value)

    for case, ranks in jobs.on_ranks(dict.fromkeys(refused, (config, layout)), work).items():
        assert all(case in answer for answer in ranks)
