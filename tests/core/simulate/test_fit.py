"""Properties every resolved layout has, whatever the model, the GPU count and what the user has set."""

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from canzona_cli.config.compose import compose_run
from canzona_cli.config.schema import RunConfig
from canzona_cli.core.costs.memory import estimate
from canzona_cli.core.errors import ConfigError, DoesNotFit
from canzona_cli.core.setup import Layout, ParallelConfig
from canzona_cli.core.setup.layout_rules import layout_problems
from canzona_cli.core.simulate import fit
from canzona_cli.core.simulate.possible import BATCH_TOLERANCE
from canzona_cli.core.simulate.search import any_fits, candidates
from tests.refusals import refused
from tests.sizes import Size, run

SIZES: tuple[Size, ...] = ("tiny", "0.6b", "1.7b", "4b", "8b", "14b", "32b")

runs = st.builds(
    run,
    st.sampled_from(SIZES),
    st.sampled_from((1, 2, 3, 4, 5, 6, 7, 8, 16, 24, 40, 64, 256, 1000, 1024)),
    strategy=st.sampled_from(("adamw", "sc", "layerwise", "asc", "paper", "canzona")),
    tp=st.sampled_from((None, None, 1, 2, 4)),
    pp=st.sampled_from((None, None, 1, 2, 4)),
    micro_batch_size=st.sampled_from((None, None, 1, 3)),
    recompute=st.sampled_from((None, None, "none", "selective", "full")),
)


@settings(max_examples=8, deadline=None)
@given(config=runs)
def test_a_resolved_layout_is_whole_and_fits(config: RunConfig) -> None:
    try:
        resolved, layout = fit.resolve(config.setup)
    except (ConfigError, DoesNotFit):
        assume(False)
    assert layout.world_size == config.gpus
    assert layout.global_batch_size == layout.dp * layout.micro_batch_size * layout.num_microbatches
    assert layout.num_microbatches >= 1
    target = config.train.batch_tokens / config.train.seq_length
    assert abs(layout.global_batch_size - target) <= BATCH_TOLERANCE * target
    assert estimate(resolved, layout).fits
    # What the user set is kept, and nothing is left open.
    for ours, theirs in ((resolved.parallel, config.parallel), (resolved.train, config.train)):
        for name in ("tp", "pp", "sequence_parallel", "micro_batch_size", "global_batch_size", "recompute"):
            if hasattr(ours, name):
                assert getattr(ours, name) is not None
                assert getattr(theirs, name) in (None, getattr(ours, name))
    assert resolved.cluster.nodes == -(-config.gpus // 8)
    assert layout_problems(resolved) == []
    # The resolved values, set explicitly, are a fixed point; and the same question has the same answer.
    assert fit.resolve(resolved) == (resolved, layout)
    assert fit.resolve(config.setup) == (resolved, layout)


@settings(max_examples=4, deadline=None)
@given(
    config=st.builds(
        run,
        st.sampled_from(("4b", "8b", "14b", "32b")),
        st.sampled_from((1, 2, 7, 8)),
        strategy=st.sampled_from(("adamw", "sc", "layerwise")),
        tp=st.sampled_from((None, 1)),
        pp=st.sampled_from((None, 1)),
        recompute=st.sampled_from((None, "none")),
    )
)
def test_what_does_not_fit_says_what_would(config: RunConfig) -> None:
    try:
        fit.resolve(config.setup)
    except DoesNotFit as error:
        (problem,) = error.problems
    else:
        assume(False)
    assert not any(candidate.fits for candidate in candidates(config.setup))
    for override, changed in fit.suggestions(config.setup):
        assert override in problem.fix
        _, layout = fit.resolve(changed)
        assert estimate(changed, layout).fits


@pytest.mark.parametrize("size", ["8b", "14b", "32b"])
def test_more_gpus_are_suggested_and_the_fewest(size: Size) -> None:
    config = run(size, 1)
    counts = [changed.gpus for override, changed in fit.suggestions(config.setup) if override.startswith("gpus=")]
    assert len(counts) == 1
    for fewer in range(1, counts[0]):
        with pytest.raises(DoesNotFit):
            fit.resolve(replace(config, gpus=fewer).setup)


def test_the_layout_of_the_paper_is_found_for_32b_on_256_gpus() -> None:
    """Canzona (arXiv 2602.06079) trains Qwen3-32B on 256 GPUs with DP 32 x TP 8, without pipeline stages."""
    _, layout = fit.resolve(run("32b", 256, pp=1).setup)
    assert (layout.tp, layout.pp, layout.dp) == (8, 1, 32)
    assert layout.sequence_parallel


@pytest.mark.parametrize("gpus", [1, 2, 3, 4, 5, 6, 7, 8])
def test_tiny_prefers_data_parallelism_on_a_laptop(gpus: int) -> None:
    _, layout = fit.resolve(run("tiny", gpus).setup)
    assert (layout.tp, layout.pp, layout.dp) == (1, 1, gpus)


@pytest.mark.parametrize(("tp", "pp", "dp"), [(2, None, 2), (2, 2, 1), (4, 1, 1), (None, 2, 2), (1, 1, 4)])
def test_tiny_keeps_what_is_set(tp: int | None, pp: int | None, dp: int) -> None:
    _, layout = fit.resolve(run("tiny", 4, tp=tp, pp=pp).setup)
    assert (layout.tp, layout.pp, layout.dp) == (tp or 1, pp or 1, dp)


def test_tensor_parallelism_stays_inside_a_machine_unless_asked() -> None:
    pairs = replace(run("8b", 16).cluster, gpus_per_node=2)
    assert max(candidate.layout.tp for candidate in candidates(run("8b", 16, cluster=pairs).setup)) == 2
    assert fit.resolve(run("8b", 16, tp=4, cluster=pairs).setup)[1].tp == 4


def test_every_mistake_is_reported_at_once() -> None:
    problems = refused(fit.resolve, run("tiny", 4, tp=3, pp=5).setup)
    assert {problem.key for problem in problems} == {"parallel.tp", "parallel.pp", "gpus"}


def test_a_batch_that_cannot_be_shared_out_is_refused_with_one_that_can() -> None:
    only_dp = ParallelConfig(tp=1, pp=1, cp=1)
    (problem,) = refused(fit.resolve, replace(run("tiny", 64), parallel=only_dp).setup)
    assert problem.key == "train.batch_tokens"
    assert "train.global_batch_size=64" in problem.fix
    assert (
        fit.resolve(replace(run("tiny", 64, global_batch_size=64), parallel=only_dp).setup)[1].global_batch_size == 64
    )


def test_sequences_are_cut_where_there_are_more_gpus_than_sequences() -> None:
    """The README's recipe of 256 sequences a step; a machine of eight holds the ring."""
    _, layout = fit.resolve(run("0.6b", 512, strategy="canzona", tp=1, pp=1).setup)
    assert (layout.cp, layout.dp) == (2, 256)


def test_few_sequences_are_cut_over_several_nodes() -> None:
    """16 sequences on 1,024 GPUs without stages: a node of eight would leave 128 shares of the batch."""
    config = run("0.6b", 1024, strategy="canzona", pp=1)
    _, layout = fit.resolve(replace(config, train=replace(config.train, seq_length=65_536)).setup)
    assert layout.tp * layout.cp >= 64
    assert layout.dp <= 16


def test_a_long_sequence_fits_where_several_nodes_share_it() -> None:
    config = compose_run(["recipe=llama3-405b", "gpus=1024", "train.seq_length=65536"], training=False).config
    assert any_fits(config.setup)
    assert not any_fits(replace(config, parallel=ParallelConfig(cp=1)).setup)
    assert any_fits(replace(config, parallel=ParallelConfig(tp=8, cp=4)).setup)


def test_a_batch_no_layout_divides_is_refused() -> None:
    config = replace(run("tiny", 64, global_batch_size=3), parallel=ParallelConfig(tp=1, cp=1))
    problems = refused(fit.resolve, config.setup)
    assert problems[0].key == "train.global_batch_size"


def test_context_parallelism_takes_its_ranks() -> None:
    config = replace(run("8b", 16), parallel=ParallelConfig(cp=2))
    _, layout = fit.resolve(config.setup)
    assert layout.cp == 2
    assert layout.world_size == 16


@pytest.mark.sweep
def test_model_chunks_are_kept_as_typed_and_else_chosen() -> None:
    def chosen(vpp: int | None, cp: int | None = None) -> Layout:
        config = run("32b", 1024, strategy="canzona", micro_batch_size=1, recompute="none")
        return fit.resolve(replace(config, parallel=ParallelConfig(vpp=vpp, cp=cp)).setup)[1]

    assert chosen(None).vpp > 1
    assert chosen(1).vpp == 1
    both = chosen(4, 2)
    assert (both.vpp, both.cp) == (4, 2)
    assert both.pp > 1


def test_the_cores_of_this_machine_choose_no_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    config = run("tiny", 8, strategy="canzona")
    found = []
    for cores in (1, 64):
        monkeypatch.setattr("os.sched_getaffinity", lambda _, cores=cores: set(range(cores)), raising=False)
        found.append(fit.resolve(config.setup))
    assert found[0] == found[1]
