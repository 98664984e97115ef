"""A function that Megatron decorates while no compiler is loaded is compiled all the same once it is called.

That a run loads none is seen where one starts: tests/faults/test_train.py."""

from collections.abc import Callable
from typing import cast

import torch

from canzona_cli.core.megatron.quick_import import compile_at_first_call


def test_a_function_is_compiled_when_it_is_called_and_once() -> None:
    compilations = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        compilations.append(len(inputs))
        return graph

    def compiled(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
        found = compile_at_first_call(function, backend=backend, fullgraph=True)
        return cast(Callable[[torch.Tensor], torch.Tensor], found)

    inner = compiled(lambda x: x * 2)
    outer = compiled(lambda x: inner(x) + 1)

    assert not compilations
    for _ in range(2):
        assert outer(torch.ones(3)).tolist() == [3.0, 3.0, 3.0]
    assert compilations == [1], "one graph, the inner function inside of it"
    assert inner(torch.ones(3)).tolist() == [2.0, 2.0, 2.0]
    assert compilations == [1, 1]
