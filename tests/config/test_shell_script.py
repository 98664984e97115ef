"""Scripts are read as bash would execute them; results of commands stay unknown."""

import os
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from canzona_cli.config.reading import Unreadable
from canzona_cli.config.shell_script import read_script, unknown

BASH = shutil.which("bash")
SAMPLES = sorted(Path(__file__).with_name("megatron").glob("*.sh"))
DECIDED = [
    "A=1; show $A ${A} \"$A\" '$A' \\$A ${B:-two} ${A:-three} ${B-} ${A:+yes} ${B:+no} ${C:=4}",
    "D=/a; D+=/b; show $D",
    'A="--x 1 \\\n --y \'2\'"; show $A; A+=" --z"; show $A',
    'A=(--x 1 # a comment \\\n --y "a b"\n\n --z); A+=(--w); show ${A[@]} "${A[@]}" ${A[*]}',
    "G=8; N=${NODES:-4}; W=$(($G*$N)); show $W $((W / 3 + G % 3 - 1)) $(( (W+1) * 2 ))",
    'G=8; show $((G*${N:-2})) $(("$G" + $(( G / 2 )))); if (( ${N:-2} > 1 )); then show a; fi',
    'T=fp8; if [[ "$T" == "fp8" ]]; then show a; elif [ $T = x ]; then show b; else show c; fi',
    'T=x; if [[ "$T" == "fp8" ]] || [[ -z "$U" ]]; then show a; else show c; fi',
    'T=x; if [[ "$T" == f* && -n $T ]]; then show a; else show c; fi; if [ ! -n "$U" ]; then show d; fi',
    "N=4; if [ $N -gt 2 ]; then show a; fi; if (( N > 8 )); then show b; fi; if ((N>1 && N<8)); then show c; fi",
    "while [[ $# -gt 0 ]]; do A=$1; shift; done; show ${A:-none} $#",
    "export A=1 B=2; local_() { echo; }; show $A$B; A=3 show $A",
    "show a > /dev/null; show b 2>&1 | cat; show c && show d",
    "cat <<END > /dev/null\nit's --not a command\nEND\nshow after",
    'OPTS=" --a 1 \\\n  --b 2"; CMD="show ${OPTS}"; sh_() { :; }; show "${CMD}"',
    'T=2; [ "$M" = big ] && T=8; [ -z "$M" ] && U=1; [ -n "$M" ] || V=2; false && T=9; true || T=9; show $T $U $V',
    "N=4; [[ $N -gt 8 ]] && A=1 || A=2; [ $N = 4 ] &&\n [ 1 = 2 ] ||\n B=3; cd / && export C=5; show $A $B $C",
    'F=; [ "$F" = 1 ] && { A=x; B=x; }; [ -z "$F" ] && { A=y; B=y; } || A=z; show $A $B',
    'F=; [ -n "$F" ] && if true; then A=x; fi; [ -n "$F" ] || for i in 1; do B=y; done; show ${A:-none} $B',
    "if [ 1 = 2 ] ||\n [ 1 = 1 ]; then show a; fi; function f { A=1; }; f; { B=2; }; show $A $B",
    "if [ 1 = 1 ]; then if [ 1 = 2 ]; then show a; else show b; fi; fi; show `true`",
    "if show a; then show b; fi; if [ 1 = 1 ]; then show c; elif show d; then show e; fi",
    "if [ 1 = 2 ]; then show a; elif show b; then show c; fi; if A=x; then show $A; fi",
]


def words(commands: tuple[tuple[str, ...], ...], name: str) -> list[str]:
    return [word for command in commands if command[0] == name for part in command[1:] for word in part.split()]


def from_bash(script: str, name: str) -> list[str]:
    """The words that bash calls `name` with, without the user's environment."""
    assert BASH is not None
    text = f"{name}() {{ printf '%s\\n' \"$@\" >&3; }}\n{script}"
    reader, writer = os.pipe()
    with open(reader) as shown:
        command = f'exec 3>&{writer}; eval "$1"'
        subprocess.run(
            [BASH, "-c", command, "bash", text.replace(" | tee log.txt", "")],
            env={"PATH": os.environ["PATH"]},
            pass_fds=[writer],
            cwd="/",
            capture_output=True,
            check=False,
        )
        os.close(writer)
        return shown.read().split()


@pytest.mark.parametrize("script", DECIDED)
def test_words_are_those_of_bash(script: str) -> None:
    ours = words(read_script(script).commands, "show")
    assert [word for word in ours if unknown(word) is None] == from_bash(f"set --\n{script}", "show")


@pytest.mark.parametrize("name", ["llama3-8b.sh", "muon-621m.sh", "mixtral-8x7b.sh", "gpt3-175b.sh", "qwen3-32b.sh"])
def test_command_lines_are_those_of_bash(name: str, tmp_path: Path) -> None:
    """Values that only a run knows are an empty word for bash, and are marked here."""
    script = next(path for path in SAMPLES if path.name == name).read_text().replace("mkdir -p", "true")
    script = script.replace('[ ! -f "pretrain_gpt.py" ]', "false").replace("exit 1", "true")
    ours = words(read_script(script).commands, "torchrun")
    assert len(ours) > 60
    assert [word for word in ours if unknown(word) is None] == from_bash(f"set --\n{script}", "torchrun")


@pytest.mark.parametrize(
    ("script", "part"),
    [
        ("show --x $TP", "$TP"),
        ("show ${1}", "$1"),
        ("show a$(nproc)b", "$(...)"),
        ("show `nproc`", "`...`"),
        ("show ${A%%.*}", "${A%%.*}"),
        ("for LR in 1 2; do show $LR; done", "$LR"),
        ("if [ -f /tmp/x ]; then TP=4; fi; show $TP", "$TP"),
        ("TP=2; case $MODEL in a) TP=4;; esac; show $TP", "$TP"),
        ("show $((NODES * 8))", "$(...)"),
        ("TP=2; [ -d /data ] && TP=4; show $TP", "$TP"),
        ("TP=2; [ -d /data ] || { TP=4; PP=2; }; show $TP", "$TP"),
        ("TP=2; if { [ -d /data ]; }; then TP=4; fi; show $TP", "$TP"),
    ],
)
def test_what_a_script_does_not_say_is_unknown(script: str, part: str) -> None:
    assert [unknown(word) for word in words(read_script(script).commands, "show") if unknown(word)] == [part]


@pytest.mark.parametrize("condition", ["if [ -d /data ]; then {}; fi", "[ -d /data ] && {}"])
def test_additions_under_a_condition_that_cannot_be_decided_are_kept_apart(condition: str) -> None:
    addition = condition.format("A+=(--real --data 1)")
    script = read_script(f"A=(--x); {addition}; show ${{A[@]}}")
    assert words(script.commands, "show") == ["--x"]
    assert script.undecided == ("--real", "--data", "1")


@pytest.mark.parametrize(
    "script",
    ["show 'x", 'show "x', "A=(1 2", "show ${A", "show $((1", "A=x\n" + "A=$A$A\n" * 64, "${A:-" * 20_000],
)
def test_what_cannot_be_read_is_refused(script: str) -> None:
    with pytest.raises(Unreadable):
        read_script(script)


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.stem)
def test_every_beginning_of_a_script_is_read_or_refused(path: Path) -> None:
    text = path.read_text()
    read = 0
    for length in range(0, len(text), 17):
        with suppress(Unreadable):
            read += len(read_script(text[:length]).commands)
    assert read > 0


def test_nothing_is_run(tmp_path: Path) -> None:
    made = tmp_path / "made"
    read_script(f"touch {made}; A=$(touch {made}); B=`touch {made}`; echo > {made}")
    assert not made.exists()
