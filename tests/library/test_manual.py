"""The example of the manual trains."""

import re
from pathlib import Path
from typing import Any

from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config

import canzona_cli
from canzona_cli.core.megatron.model import build_model
from canzona_cli.core.megatron.parallel import World
from tests.dist import jobs
from tests.dist.samples import samples_of
from tests.library.loops import optimizer_config
from tests.library.test_engine import FIXED

MANUAL = Path(canzona_cli.__file__).parent / "LIBRARY.md"
STEPS = 4
STILL = {
    "lr_warmup_steps": 0,
    "lr_decay_steps": STEPS,
    "lr_decay_style": "linear",
    "start_wd": 0.1,
    "end_wd": 0.1,
    "wd_incr_steps": 0,
    "wd_incr_style": "constant",
}


def test_the_example_of_the_manual_trains_a_model() -> None:
    [example] = re.findall(r"^```python\n(.*?)^```$", MANUAL.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert "cluster=h100-80g" in example
    config, layout = jobs.resolve(*FIXED)

    def work(_: str, world: World) -> list[float]:
        chunks, losses = build_model(config.setup, world), []
        get_model_config(chunks[0]).finalize_model_grads_func = finalize_model_grads
        samples = samples_of(config.setup, 1)

        def forward_step(batches: Any, model: Any) -> tuple[Any, Any]:
            batch = {name: value.unsqueeze(0) for name, value in samples[0].items()}
            output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])

            def loss(output: Any) -> tuple[Any, dict[str, float]]:
                losses.append(float(output.mean()))
                return output.mean(), {}

            return output, loss

        exec(
            example.replace("cluster=h100-80g", "cluster=cpu"),
            {
                "optimizer_config": optimizer_config(config),
                "ddp_config": DistributedDataParallelConfig(use_distributed_optimizer=True),
                "chunks": chunks,
                "OptimizerParamScheduler": OptimizerParamScheduler,
                "rates": {"init_lr": 0.01, "max_lr": 0.01, "min_lr": 0.001, **STILL},
                "steps": STEPS,
                "forward_backward": get_forward_backward_func(),
                "forward_step": forward_step,
                "batches": iter(()),
                "micro_batches": 1,
                "length": config.train.seq_length,
                "size": 1,
            },
        )
        return losses

    for losses in jobs.on_ranks({"": (config, layout)}, work)[""]:
        assert len(losses) == STEPS
        assert losses[-1] < 0.8 * losses[0]
