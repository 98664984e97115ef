"""The time of passes over a stage's gradients outside the forward and backward pass: zeroing, norm and
clipping."""

from dataclasses import dataclass

from canzona_cli.config.schema import Layout, RunConfig
from canzona_cli.costs.buffers import stage_weights
from canzona_cli.costs.links import Groups, Links
from canzona_cli.costs.update import adamw_seconds, implementation, memory_rate, step_factor


def zeroing_seconds(config: RunConfig, layout: Layout, stage: int, padding: int = 0) -> float:
    """Returns the seconds to set a stage's gradient buffers to zero, before the first forward pass.

    Args:
        padding: the elements of padding in the buffers.
    """
    weights = stage_weights(config, layout, stage)
    grad = config.train.gradient_bytes
    return (weights.matrices + weights.others + padding) * grad / memory_rate(config.cluster)


NORM_BYTES, CLIP_BYTES = 4, 8
"""The bytes of memory traffic per fp32 gradient element: the norm reads it; the clip reads and writes it."""


@dataclass(frozen=True, kw_only=True)
class NormClip:
    """The time of gradient norm and clip, if ranks do not share a device."""

    norm_element_s: float
    """The seconds that the norm takes for each gradient element that was reduced to a rank."""
    all_reduce_s: float
    """The seconds of the all-reduce of a few numbers over all ranks."""
    clip_element_s: float
    """The seconds for each element that is clipped in a separate pass."""

    @classmethod
    def of(cls, config: RunConfig, layout: Layout) -> "NormClip":
        world = Groups.of(layout, config.cluster).world
        byte_s = step_factor(config.cluster, "norm_clip", implementation(config)) / memory_rate(config.cluster)
        return cls(
            norm_element_s=NORM_BYTES * byte_s,
            all_reduce_s=Links(cluster=config.cluster).all_reduce(8.0, world).seconds if world.size > 1 else 0.0,
            clip_element_s=CLIP_BYTES * byte_s,
        )

    def seconds(self, elements: float, clipped: float) -> float:
        """Returns the seconds of norm and clip on one rank, without waiting for other ranks.

        Args:
            elements: the gradient elements that were reduced to the rank.
            clipped: the elements that are clipped in a separate pass.
        """
        return elements * self.norm_element_s + self.all_reduce_s + clipped * self.clip_element_s


def least_before_updates(config: RunConfig, layout: Layout) -> float:
    """Returns a lower bound on the seconds of norm, clip and AdamW: those of an average owner of the middle
    stage, which has the fewest parameters that AdamW updates."""
    weights, implemented = stage_weights(config, layout, layout.pp // 2), implementation(config)
    others = weights.others / layout.owners
    reduced = weights.reduced(layout)
    update_s = step_factor(config.cluster, "adamw_update", implemented) * adamw_seconds(others, config.cluster)
    return NormClip.of(config, layout).seconds(reduced + others, others) + update_s
