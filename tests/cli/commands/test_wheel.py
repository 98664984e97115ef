"""The wheel stands alone: it carries the recipes and works from any directory."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.commands.support import ran
from tests.waiting import PATIENCE_S

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.sweep  # only a change of the packaging can break the wheel


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with nothing but the installed wheel; what it depends on comes from the running environment."""
    built, site = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", str(built), str(ROOT)], check=True, timeout=PATIENCE_S)
    (wheel,) = built.glob("canzona-*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", str(site), str(wheel)], check=True, timeout=PATIENCE_S)
    return site


def _canzona(site: Path, cwd: Path, *arguments: str) -> str:
    # -P: the current directory must not stand in for the installed package.
    code = "import canzona_cli, canzona_cli.cli.app; print(canzona_cli.__file__); canzona_cli.cli.app.main()"
    of_the_wheel = {"PYTHONPATH": str(site), "COLUMNS": "120"}
    done = ran(sys.executable, "-P", "-c", code, *arguments, cwd=cwd, environment=of_the_wheel)
    location, output = done.stdout.split("\n", 1)
    assert location.startswith(str(site)), "the test ran the checkout, not the wheel"
    return output


def test_recipes_come_with_the_wheel(site: Path, tmp_path: Path) -> None:
    listed = _canzona(site, tmp_path, "recipes", "list")
    for recipe in (ROOT / "recipes" / "recipe").glob("*.yaml"):
        assert recipe.stem in listed


def test_a_recipe_of_the_wheel_resolves_into_a_command(site: Path, tmp_path: Path) -> None:
    printed = _canzona(site, tmp_path, "train", "recipe=qwen3-8b", "gpus=16", "--dry-run", "--config")
    assert "-m canzona_cli.training.worker" in printed
    assert not any(tmp_path.iterdir()), "a dry run writes nothing"


def test_the_sbatch_script_comes_with_the_wheel(site: Path, tmp_path: Path) -> None:
    printed = _canzona(site, tmp_path, "slurm", "recipe=qwen3-8b", "gpus=16")
    assert "#SBATCH --nodes=2\n" in printed


def test_the_manuals_come_with_the_wheel(site: Path) -> None:
    manuals = [path.relative_to(ROOT) for path in (ROOT / "canzona_cli").glob("*/README.md")]
    assert manuals
    assert not [path for path in manuals if not (site / path).is_file()]


def test_the_wheel_names_its_commands_and_its_rendezvous(site: Path) -> None:
    (metadata,) = site.glob("canzona-*.dist-info")
    entry_points = (metadata / "entry_points.txt").read_text(encoding="utf-8")
    assert "canzona = canzona_cli.cli.app:main" in entry_points
    assert "canzona-loopback = canzona_cli.training.rendezvous:handler" in entry_points


def test_the_template_of_pages_comes_with_the_wheel(site: Path, tmp_path: Path) -> None:
    _canzona(site, tmp_path, "plan", "recipe=qwen3-tiny", "--dry-run", "--html", "plan.html")
    assert "<title>Plan " in (tmp_path / "plan.html").read_text(encoding="utf-8")
