"""The batch of each step of a ramp-up, compared with Megatron's own calculator of micro-batches."""

import json
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.num_microbatches_calculator import StepBatchsizeNumMicroBatchesCalculator

from canzona_cli.config.megatron_arguments import TYPED
from canzona_cli.config.megatron_translation import read_megatron_run
from canzona_cli.records.corpus import samples_needed
from tests.config.test_megatron_run import SMALL
from tests.records.runs import CONFIG

LENGTH = 256
"""The tokens of a sequence in `SMALL`."""


@settings(max_examples=40)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=2, max_size=5, unique=True).map(sorted),
    gaps=st.lists(st.integers(1, 300), min_size=4, max_size=4),
    beside=st.integers(0, LENGTH - 1),
)
def test_the_batches_and_samples_of_a_translated_schedule_are_megatrons(
    sizes: list[int], gaps: list[int], beside: int
) -> None:
    """Also where a batch ends beyond a threshold, where it skips one, and where a threshold is within a sequence."""
    tokens = [0, *(LENGTH * samples + beside for samples in accumulate(gaps[: len(sizes) - 1]))]
    text = " ".join(f"{start}:{16 * size}" for start, size in zip(tokens, sizes, strict=True))
    command = SMALL.replace("--global-batch-size 16", f'--step-batch-size-schedule "{text}"')
    command = command.replace("--train-iters 100", "--train-samples 4000")
    run = read_megatron_run(f"{TYPED}{command}", ("program=gpt",))
    rampup = json.loads(run.overrides["train.batch_rampup"])
    train = replace(CONFIG.train, batch_rampup=rampup, steps=int(run.overrides["train.steps"]))
    full = 16 * sizes[-1]
    assert run.overrides["train.global_batch_size"] == str(full)
    calculator = StepBatchsizeNumMicroBatchesCalculator(2, 8, False, 1, text, LENGTH)
    read = steps = 0
    while read < 4000:
        calculator.update(read, consistency_check=True)
        steps += 1
        batch = calculator.get_current_global_batch_size()
        assert train.sequences(full, steps, steps) == batch
        read += batch
        assert train.sequences(full, 1, steps) == read
    assert train.steps == steps, "as Megatron counts the iterations of so many samples"
    assert samples_needed(train, full) == read
    assert samples_needed(train, full, step=3, samples=7) == 7 + read - train.sequences(full, 1, 3)


def test_the_older_flag_is_read_as_megatron_read_it(tmp_path: Path) -> None:
    """Up to version 0.18, the batch was START + INCREMENT * int(samples / (RAMPUP / increments))."""
    path = tmp_path / "run.txt"
    for start, increment, full, samples in ((16, 16, 64, 1000), (8, 8, 80, 1234), (16, 16, 16, 1000), (8, 4, 16, 3)):
        path.write_text(
            SMALL.replace("--global-batch-size 16", f"--global-batch-size {full}")
            + f" --rampup-batch-size {start} {increment} {samples}"
        )
        rampup = json.loads(read_megatron_run(str(path), ()).overrides.get("train.batch_rampup", "[]"))
        train = replace(CONFIG.train, batch_rampup=rampup, steps=100)
        read = 0
        for step in range(1, 100):
            increments = (full - start) // increment
            ramped = start + increment * int(read / (samples / increments)) if increments and read <= samples else full
            assert train.sequences(full, step, step) == ramped, (start, step)
            read += ramped
