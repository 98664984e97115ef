"""Messages of a rank do not decide how the rank ends."""

import os
import sys
from io import FileIO, TextIOWrapper

import canzona_cli.core.megatron.quick_import  # noqa: F401 - which the rank, a fork of this process, need not import then
from canzona_cli.records.files import RunFiles
from canzona_cli.records.records import Ending, read_rank
from canzona_cli.training.process import run_rank
from canzona_cli.training.records import RankRecord
from tests.attacks.victim import FULL, Streams, Victim, become


def talkative(files: RunFiles, record: RankRecord, rank: int) -> Ending:
    with (files.root / "own").open("w") as own:
        assert own.fileno() > 2, "a file of the run has become the output"
        for line in range(100):
            print("a library says something", line, flush=True)
    return "done"


def test_a_rank_whose_log_lies_on_a_full_disk_works_on(files: RunFiles) -> None:
    files.ranks.mkdir(parents=True)
    disk = os.open(FULL, os.O_WRONLY)
    pid = os.fork()
    if pid == 0:
        try:
            ranked = {"RANK": "0", "WORLD_SIZE": "1", "CANZONA_AGENT_PID": None}
            become([], Streams(stdin=disk, stdout=disk, stderr=disk), files.root, ranked)
            # As `canzona_cli.training.agent` leaves them.
            sys.stdout, sys.stderr = (TextIOWrapper(FileIO(number, "w"), write_through=True) for number in (1, 2))
            run_rank(files.root, talkative)
        finally:
            os._exit(120)
    os.close(disk)
    rank = Victim(pid)
    assert rank.finish() == 0
    assert read_rank(files, 0).status == "done"
    assert not (files.root / "own").read_bytes()
