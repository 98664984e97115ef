"""The Gram form multiplies bf16 in these tests, as on processors that have it: elsewhere it has fp16 for that."""

from types import SimpleNamespace

import pytest
import torch

from canzona_cli.core.optimizers import cpu_matmuls, gram_form

# As in ranks. Of these small matrices each thread computes less than it waits for the others, without sleeping.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _with_units_for_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu_matmuls.install()  # as workers do
    monkeypatch.setattr(gram_form, "cpu_matmuls", SimpleNamespace(is_installed=lambda: False))
