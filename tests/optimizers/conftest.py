"""The Gram form multiplies bf16 in these tests, as on processors that have it: elsewhere it has fp16 for that."""

from types import SimpleNamespace

import pytest

from canzona_cli.optimizers import cpu_matmuls, gram_form


@pytest.fixture(autouse=True)
def _with_units_for_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu_matmuls.install()  # as workers do
    monkeypatch.setattr(gram_form, "cpu_matmuls", SimpleNamespace(is_installed=lambda: False))
