"""`canzona train`'s launcher around the stand-in worker: RUN_DIR BEHAVIOUR GRACE_S. Exits as the run ended."""

import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from canzona_cli.launch import supervisor, torchrun
from canzona_cli.launch.run_dir import RunDirectory
from canzona_cli.report.plain import PlainView
from tests.faults.support import LAYOUT, run_config


@dataclass(frozen=True)
class StandInCorpus:
    tokenizer: str


def main(run_dir: Path, behaviour: str, grace_s: float) -> int:
    config = run_config(run_dir=run_dir)
    run = RunDirectory.create(config)
    command = torchrun.build(config, LAYOUT, run.path, module="tests.faults.worker")
    run.write_inputs(config_yaml="", layout=LAYOUT, corpus=StandInCorpus("byte"), command=command)
    (run.path / "behaviour").write_text(behaviour)
    view = PlainView(config, LAYOUT, Console(width=120))
    outcome = supervisor.supervise(
        run.files, command, view, ranks=range(2), grace_s=grace_s, say=lambda text: print(text, flush=True)
    )
    print(outcome)
    return outcome.exit_code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])))
