"""No plan is simulated faster than the bound, and the bound is near enough to be worth something."""

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from canzona_cli.cluster.layouts import candidates, fill
from canzona_cli.config.execution import Execution, execution_of
from canzona_cli.config.schema import Layout, RunConfig
from canzona_cli.errors import ConfigError, DoesNotFit
from canzona_cli.planner.planner import make_plan
from canzona_cli.simulate.bound import least_step_seconds
from canzona_cli.simulate.predict import simulate_run
from tests.sizes import CPU, H100, run

CLUSTERS = (
    H100,
    replace(H100, gpus_per_node=4, transformer_engine=False, grouped_collectives=False),
    replace(CPU, cores=2),
    # Collectives that were measured, and are not what the link's figures say.
    replace(CPU, collectives=tuple((kind, 4, 1e6, 1e-4, 1.0) for kind in ("reduce_scatter", "all_gather", "reduce"))),
)


def simulated(config: RunConfig, layout: Layout) -> float:
    resolved = fill(config, layout)
    plan = make_plan(resolved, layout) if execution_of(resolved) is Execution.PLANNED else None
    return simulate_run(resolved, layout, plan).iteration_s


@settings(max_examples=30, deadline=None)
@given(
    config=st.builds(
        run,
        st.sampled_from(("tiny", "0.6b", "1.7b")),
        st.sampled_from((1, 4, 8, 16, 64)),
        strategy=st.sampled_from(("adamw", "sc", "layerwise", "asc", "paper", "canzona")),
        grad_reduce_dtype=st.sampled_from(("fp32", "bf16")),
        cluster=st.sampled_from(CLUSTERS),
    ),
    overlap=st.sampled_from(((True, True), (True, False), (False, False))),
    buffers=st.sampled_from(("owner", "contiguous", "aligned")),
    mode=st.sampled_from(("auto", "shared", "hosted")),
    data=st.data(),
)
def test_no_step_is_shorter_than_its_bound(
    config: RunConfig, overlap: tuple[bool, bool], buffers: str, mode: str, data: st.DataObject
) -> None:
    parallel = replace(config.parallel, overlap_grad_reduce=overlap[0], overlap_param_gather=overlap[1])
    engine = replace(config.engine, layout=buffers, mode=mode)  # type: ignore[arg-type]
    config = replace(config, parallel=parallel, engine=engine)
    try:
        layout = data.draw(st.sampled_from(candidates(config))).layout
        seconds = simulated(config, layout)
    except (ConfigError, DoesNotFit):
        assume(False)
    assert least_step_seconds(config, layout) <= seconds


@pytest.mark.parametrize("tp", [1, 4, 8])
def test_it_is_within_a_tenth_of_the_step(tp: int) -> None:
    config = run("8b", 64, strategy="canzona", tp=tp, pp=1, micro_batch_size=1, recompute="full")
    layout = next(candidate.layout for candidate in candidates(config) if candidate.layout.cp == 1)
    assert least_step_seconds(config, layout) >= 0.9 * simulated(config, layout)
