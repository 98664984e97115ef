"""`canzona clusters`: profiles listed, shown with their sources, and copied."""

from pathlib import Path

from canzona_cli.config.compose import compose_run
from canzona_cli.config.recipes import builtin_recipes_dir
from tests.cli.commands.support import canzona


def test_list_names_every_profile_in_80_columns(tmp_path: Path) -> None:
    done = canzona("clusters", "list", code=0)
    assert max(map(len, done.stdout.splitlines())) <= 80
    names = {file.stem for file in (builtin_recipes_dir() / "cluster").glob("*.yaml")}
    assert all(any(line.startswith(f"{name} ") for line in done.stdout.splitlines()) for name in names)


def test_show_prints_the_file_with_its_sources() -> None:
    done = canzona("clusters", "show", "b200")
    assert done.stdout.partition("\n")[2] == (builtin_recipes_dir() / "cluster" / "b200.yaml").read_text()


def test_a_copy_is_a_profile_under_its_own_name_and_stays(tmp_path: Path) -> None:
    canzona("clusters", "copy", "a100-80g", "ours.yaml", cwd=tmp_path, code=0)
    copied = compose_run(["recipe=8b", f"cluster={tmp_path / 'ours.yaml'}"]).config.cluster
    assert (copied.name, copied.bf16_tflops) == ("ours", 312)
    assert canzona("clusters", "copy", "h200", "ours.yaml", cwd=tmp_path).returncode == 2


def test_an_impossible_profile_is_named_with_its_field(tmp_path: Path) -> None:
    canzona("clusters", "copy", "h200", "ours.yaml", cwd=tmp_path)
    text = (tmp_path / "ours.yaml").read_text()
    (tmp_path / "ours.yaml").write_text(text.replace("tf32_tflops: 412.0", "tf32_tflops: -412.0"))
    done = canzona("clusters", "show", "./ours.yaml", cwd=tmp_path, code=2)
    assert "cluster.tf32_tflops" in done.stderr
