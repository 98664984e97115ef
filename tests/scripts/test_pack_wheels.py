"""`scripts/pack_wheels` packs what canzona requires and a machine with torch lacks."""

import subprocess
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]


def test_all_that_canzona_requires_is_packed_but_for_what_torch_brings_along() -> None:
    done = subprocess.run([ROOT / "scripts" / "pack_wheels", "--list"], capture_output=True, text=True, check=True)
    named = [line.split("==") for line in done.stdout.splitlines()]
    packed = {canonicalize_name(name): version for name, version in named}
    required = {
        canonicalize_name(Requirement(text).name)
        for text in metadata.requires("canzona") or ()
        if "extra ==" not in text
    }
    assert required - packed.keys() == {"torch", "numpy", "jinja2"}, "torch requires jinja2 itself"
    assert not [name for name in packed if name.startswith(("torch", "nvidia", "cuda", "triton"))]
    assert {"pydantic-core", "pyyaml", "antlr4-python3-runtime"} <= packed.keys(), "with what those require"
    for name, version in packed.items():
        assert version == metadata.version(name)
