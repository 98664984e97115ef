"""`canzona train`'s launcher around the stand-in worker: RUN_DIR BEHAVIOUR GRACE_S RANKS HANG_TIMEOUT_S. Exits as the
run ended."""

import sys
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from canzona_cli.launch import torchrun
from canzona_cli.launch.run_dir import RunDirectory
from canzona_cli.launch.supervisor import Supervision
from canzona_cli.report.train_views import PlainView
from tests.faults.support import LAYOUT, run_config
from tests.run.runs import CORPUS


def main(run_dir: Path, behaviour: str, grace_s: float, ranks: int, hang_timeout_s: float | None) -> int:
    config = run_config(run_dir=run_dir, gpus=ranks)
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
    limit = float(sys.argv[5])
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]), int(sys.argv[4]), limit or None))
