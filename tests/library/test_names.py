"""Importing canzona into somebody else's process changes nothing in it."""

import sys

import pytest

from tests.cli.commands.support import ran

NOTHING_HEAVY = """
import sys
import canzona_cli
from canzona_cli import __version__
assert not {"torch", "megatron", "hydra", "numpy"} & set(sys.modules)
"""
NO_SIDE_EFFECTS = """
import os, signal, sys, warnings
import torch
from torch.distributed import distributed_c10d

def state():
    return dict(
        environment=dict(os.environ),
        compile=torch.compile,
        streams=(sys.stdout, sys.stderr, sys.excepthook, sys.displayhook),
        threads=torch.get_num_threads(),
        cuda={name: value for name, value in vars(torch.cuda).items() if callable(value)},
        tensors={name: getattr(torch.Tensor, name) for name in ("type", "cuda")},
        factories=(torch.tensor, torch.zeros, torch.ones),
        collectives=(torch.distributed.all_gather_object, distributed_c10d._unpickler, torch.distributed.Work.wait),
        signals={number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)},
        matmul=(torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.allow_tf32),
    )

import megatron.training.training as training, megatron.core.parallel_state as parallel_state
before, functions, groups = state(), dict(vars(training)), dict(vars(parallel_state))
import canzona_cli
from canzona_cli import Engine, use_in_megatron_lm
from tests.cli.commands.support import ran
after = state()
for name in before:
    assert before[name] == after[name], name
assert functions == dict(vars(training)) and groups == dict(vars(parallel_state))
assert "wandb" not in sys.modules or sys.modules["wandb"] is not None
assert "canzona_cli.core.megatron.quick_import" not in sys.modules
assert {"Engine", "use_in_megatron_lm"} <= set(canzona_cli.__all__)
"""


def test_the_package_imports_nothing_heavy() -> None:
    ran(sys.executable, "-c", NOTHING_HEAVY)


@pytest.mark.sweep
def test_the_public_names_patch_nothing_and_set_no_variable() -> None:
    ran(sys.executable, "-c", NO_SIDE_EFFECTS)
