"""Importing Megatron loads no compiler, and what it decorated is compiled all the same once it is called."""

import subprocess
import sys
from collections.abc import Callable
from typing import cast

import torch

from canzona_cli.megatron import compile_when_called
from tests.commands.support import importable


def test_a_worker_starts_without_the_compiler() -> None:
    script = (
        "import sys, canzona_cli.megatron, canzona_cli.training.assemble, canzona_cli.training.loop\n"
        "print([name for name in ('torch._inductor.compile_fx', 'torch._dynamo') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], env=importable(), capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_function_is_compiled_when_it_is_called_and_once() -> None:
    compilations = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        compilations.append(len(inputs))
        return graph

    def compiled(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
        found = compile_when_called(function, backend=backend, fullgraph=True)
        return cast(Callable[[torch.Tensor], torch.Tensor], found)

    inner = compiled(lambda x: x * 2)
    outer = compiled(lambda x: inner(x) + 1)

    assert not compilations
    for _ in range(2):
        assert outer(torch.ones(3)).tolist() == [3.0, 3.0, 3.0]
    assert compilations == [1], "one graph, the inner function inside of it"
    assert inner(torch.ones(3)).tolist() == [2.0, 2.0, 2.0]
    assert compilations == [1, 1]
