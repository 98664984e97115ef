"""What a run's plan is for and computed from: its subject, its matrices and what their updates cost."""

import json
from collections.abc import Sequence
from types import MappingProxyType

from canzona_cli.config.execution import PLANNED
from canzona_cli.config.schema import Layout, RunConfig
from canzona_cli.config.settings import affecting
from canzona_cli.fields import PLAN
from canzona_cli.model.matrices import matrices as matrices_of
from canzona_cli.model.matrix import Matrix
from canzona_cli.model.shapes import ModelShapes
from canzona_cli.planner.buckets import bucket_elements
from canzona_cli.planner.cost import Implementation, algorithm, rounded, seconds
from canzona_cli.planner.paper import as_published
from canzona_cli.planner.parts import PlanSettings, Scalar, Subject


def subject(config: RunConfig, layout: Layout, shapes: ModelShapes | None = None) -> Subject:
    """The subject of the plan for a run.

    Args:
        shapes: the user's own, where these are planned instead of `config.model`.
    """
    model: dict[str, Scalar] = {name: getattr(config.model, name) for name in affecting(PLAN, "model")}
    return Subject(
        model=MappingProxyType(model if shapes is None else {"shapes": shapes.digest}),
        layout=layout.mesh,
        optimizer=algorithm(config),
        settings=settings(config),
        buffers=MappingProxyType(
            {
                "bucket_elements": bucket_elements(config, layout),
                "precision": config.train.precision,
                "grad_reduce_dtype": config.train.grad_reduce_dtype,
            }
        ),
        profile=MappingProxyType(
            {
                name: value if value is None or isinstance(value, str | int | float) else json.dumps(value)
                for name in affecting(PLAN, "cluster")
                for value in (getattr(config.cluster, name),)
                if value or name != "bf16_in_fp32"  # without it plans have the hash they had before there was one
            }
        ),
    )


def settings(config: RunConfig) -> PlanSettings:
    """What the planner is asked for. sc and layerwise have no plans; they are compared with canzona's."""
    engine = config.engine
    asked = PlanSettings(
        strategy=engine.strategy if engine.strategy in PLANNED else "canzona",
        layout=engine.layout,
        splitting=engine.splitting,
        alpha=engine.alpha,
        c_max_bytes=None if engine.c_max_mib is None else int(engine.c_max_mib * (1 << 20)),
        grouping=engine.grouping,
        reduction=engine.reduction,
        exchange_dtype=engine.exchange_dtype,
        mode=engine.mode,
    )
    return as_published(asked) if asked.strategy == "paper" else asked


def update_costs(
    config: RunConfig, members: Sequence[Matrix], implementation: Implementation = "canzona"
) -> tuple[float, ...]:
    """Seconds of each matrix's update, `rounded`.

    Raises:
        ConfigError: the profile has measurements that no such device could reach.
    """
    how = algorithm(config)
    by_shape = {
        shape: rounded(seconds(how, *shape, config.cluster, implementation))
        for shape in {(matrix.rows, matrix.cols): None for matrix in members}
    }
    return tuple(by_shape[matrix.rows, matrix.cols] for matrix in members)


def planned_matrices(config: RunConfig, layout: Layout, shapes: ModelShapes | None) -> tuple[Matrix, ...]:
    """What a plan of the run assigns, in its order."""
    if shapes is not None:
        return shapes.matrices(layout)
    return matrices_of(config.model, layout, config.engine.splitting)
