"""`canzona train`'s launcher around the stand-in worker: RUN_DIR BEHAVIOUR GRACE_S RANKS HANG_TIMEOUT_S DEVICE. Exits
as the run ended. Beside GPUs the workers are started in another way, which needs none."""

import sys
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from canzona_cli.cli.views.train import PlainView
from canzona_cli.core.setup.cluster import Device
from canzona_cli.launch import torchrun
from canzona_cli.launch.run_dir import RunDirectory
from canzona_cli.launch.supervisor import Supervision
from tests.faults.support import LAYOUT, run_config
from tests.records.runs import CORPUS


def main(
    run_dir: Path, behaviour: str, grace_s: float, ranks: int, hang_timeout_s: float | None, device: Device
) -> int:
    config = run_config(run_dir=run_dir, gpus=ranks)
    config = replace(config, cluster=replace(config.cluster, device=device))
    layout = replace(LAYOUT, dp=ranks, global_batch_size=ranks)
    run = RunDirectory.create(config)
    command = torchrun.build(config, run.path, module="tests.faults.worker")
    run.write_inputs(config_yaml="", layout=layout, corpus=CORPUS, command=command)
    (run.path / "behaviour").write_text(behaviour)
    view = PlainView(config, layout, Console(width=120))
    outcome = Supervision(
        run.files,
        command,
        view,
        ranks=range(ranks),
        grace_s=grace_s,
        hang_timeout_s=hang_timeout_s,
        say=lambda text: print(text, flush=True),
    ).run()
    print(outcome)
    return outcome.exit_code


if __name__ == "__main__":
    run_dir, behaviour, grace_s, ranks, limit_s, device = sys.argv[1:]
    chosen: Device = "cuda" if device == "cuda" else "cpu"
    sys.exit(main(Path(run_dir), behaviour, float(grace_s), int(ranks), float(limit_s) or None, chosen))
