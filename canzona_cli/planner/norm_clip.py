"""What comes between reduced gradients and the first update: their norm over all ranks, the clip, AdamW."""

from dataclasses import dataclass

from canzona_cli.config.schema import Layout, RunConfig
from canzona_cli.planner.activations import stage_weights
from canzona_cli.planner.cost import adamw_seconds, implementation, memory_rate, step_factor
from canzona_cli.planner.links import Groups, Links

NORM_BYTES, CLIP_BYTES = 4, 8
"""Memory traffic per fp32 gradient element: read for the norm; read and written by the clip."""


@dataclass(frozen=True, kw_only=True)
class NormClip:
    """Seconds, on ranks with a device each."""

    read_s: float
    """Of each element a rank has reduced."""
    agree_s: float
    """Of all ranks' agreement on a few numbers."""
    scaled_s: float
    """Of each element that is clipped in a pass of its own."""

    @classmethod
    def of(cls, config: RunConfig, layout: Layout) -> "NormClip":
        world = Groups.of(layout, config.cluster).world
        each = step_factor(config.cluster, "norm_clip", implementation(config)) / memory_rate(config.cluster)
        return cls(
            read_s=NORM_BYTES * each,
            agree_s=Links(cluster=config.cluster).all_reduce(8.0, world).seconds if world.size > 1 else 0.0,
            scaled_s=CLIP_BYTES * each,
        )

    def seconds(self, elements: float, clipped: float) -> float:
        """From a rank's reduced gradients to clipped ones, at least: others may be later."""
        return elements * self.read_s + self.agree_s + clipped * self.scaled_s


def least_before_updates(config: RunConfig, layout: Layout) -> float:
    """Seconds of norm, clip and AdamW on a mean owner's ranks, in a stage that has least: in the middle."""
    weights, own = stage_weights(config, layout, layout.pp // 2), implementation(config)
    others = weights.others / layout.owners
    update_s = step_factor(config.cluster, "adamw_update", own) * adamw_seconds(others, config.cluster)
    return NormClip.of(config, layout).seconds(weights.matrices / layout.owners + others, others) + update_s
