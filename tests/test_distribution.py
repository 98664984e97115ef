"""What is around the code, for those who adopt it: the image, versions, templates and the list of changes are true."""

import re
import tomllib
from pathlib import Path

import canzona_cli
from canzona_cli.cli.app import COMMANDS
from canzona_cli.config.unknown_keys import hints

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
CHANGES = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def _image(instruction: str) -> list[str]:
    return re.findall(rf"^{instruction} (.*)$", (ROOT / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE)


def test_the_image_is_installed_by_the_line_of_the_manual() -> None:
    manual = (ROOT / "canzona_cli" / "launch" / "README.md").read_text(encoding="utf-8")
    assert _image("RUN")
    assert [line for line in _image("RUN") if line not in manual.splitlines()] == []


def test_the_image_has_all_files_that_an_installation_reads() -> None:
    copied = {path for line in _image("COPY") for path in line.split()[:-1]}
    build = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    read = {"pyproject.toml", PROJECT["project"]["readme"], *build["packages"], *build["force-include"]}
    read |= {word for line in _image("RUN") for word in line.split() if "/" in word}
    assert {path.split("/")[0] for path in read} == copied


def test_the_version_is_one() -> None:
    version = PROJECT["project"]["version"]
    assert canzona_cli.__version__ == version
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\n## {version}" in CHANGES


def test_every_removed_setting_is_in_the_list_of_changes() -> None:
    sections = re.findall(r"`(\w+)(\.\w+)`|`(\.\w+)`", CHANGES.partition("### Removed")[2])
    listed, current = set(), ""
    for section, name, more in sections:
        current = section or current
        listed.add(f"{current}{name or more}")
    assert hints("settings").keys() <= listed, "add the setting under Removed in CHANGELOG.md"


def test_templates_name_commands_and_targets_that_exist() -> None:
    texts = "".join(path.read_text(encoding="utf-8") for path in (ROOT / ".github").rglob("*.md"))
    commands = set(re.findall(r"`canzona ([a-z]+)", texts))
    assert commands
    assert commands <= set(COMMANDS)
    targets = {target for line in re.findall(r"`make ([a-z ]+)`", texts) for target in line.split()}
    phony = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)[0].split()
    assert targets
    assert targets <= set(phony)
