"""Command lines and logs of Megatron-LM become settings of canzona, or are refused by the names of their flags."""

import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import pytest

from canzona_cli.config.compose import compose_run
from canzona_cli.config.megatron_arguments import TYPED, default, defaults, meaning, parser, table
from canzona_cli.config.megatron_translation import MegatronRun, read_megatron_run
from canzona_cli.config.schema import RunConfig
from canzona_cli.config.settings import settings
from canzona_cli.config.unknown_keys import exact_key
from canzona_cli.core.errors import Problem
from tests.refusals import refused

FILES = Path(__file__).with_name("megatron")
SMALL = (
    "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 4 --hidden-size 512 --num-attention-heads 8 --swiglu"
    " --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --attention-dropout 0"
    " --hidden-dropout 0 --vocab-size 1000 --seq-length 256 --micro-batch-size 2 --global-batch-size 16 --bf16"
    " --train-iters 100 --lr 1e-3"
)


def read(tmp_path: Path, text: str, typed: Sequence[str] = ()) -> MegatronRun:
    path = tmp_path / "my run.txt"
    path.write_text(text)
    return read_megatron_run(str(path), typed)


def config_of(run: MegatronRun, typed: Sequence[str] = ()) -> RunConfig:
    return compose_run([*(f"{key}={value}" for key, value in run.overrides.items()), *typed], training=False).config


GPT = ("program=gpt", "model.vocab_size=1024")


def printed(tmp_path: Path, **changed: object) -> str:
    """The block that Megatron prints for `SMALL`, but for values that it derives."""
    values = vars(parser().parse_args(SMALL.partition(".py ")[2].split())) | {"world_size": 8, **changed}
    lines = [f"  {name} {'.' * (48 - len(name))} {value}" for name, value in sorted(values.items())]
    return "\n".join([f"{'-' * 24} arguments {'-' * 24}", *lines, f"{'-' * 20} end of arguments {'-' * 21}\n"])


def problems(tmp_path: Path, text: str, typed: Sequence[str] = ()) -> dict[str, Problem]:
    return {problem.key: problem for problem in refused(read, tmp_path, text, typed)}


PUBLISHED = {
    "llama3-8b.txt": "recipe=llama3-8b gpus=8 model.vocab_size=128256 model.rope_base=1000000 train.steps=15258789"
    " schedule.warmup_steps=30517 train.grad_reduce_dtype=bf16",
    "muon-621m.txt": "recipe=llama3-8b name=muon-621m model.gated=false engine.splitting=qkv",
    "qwen3-30b-a3b.txt": "recipe=qwen3-30b-a3b gpus=16 parallel.ep=16 parallel.dispatcher=flex schedule.decay=wsd"
    " model.balancing_loss=global schedule.warmup_steps=50 optimizer.scale_factor=0.2",
    "qwen3-32b.txt": "recipe=qwen3-32b gpus=256 parallel.tp=8 train.recompute=full optimizer.momentum=0.9"
    " data.path=/data/fineweb_text_document optimizer.nesterov=false",
    "llama3-70b.txt": "recipe=llama3-70b parallel.pp=4 parallel.vpp=5 model.vocab_size=128512",
}
"""Some of the settings that each comes to."""
GIVEN = {"muon-621m.txt": ("model.vocab_size=128256",), "qwen3-32b.txt": ("model.vocab_size=151936",)}
"""The sizes that a command line leaves to a tokenizer."""


@pytest.mark.parametrize(("name", "wanted"), PUBLISHED.items())
def test_published_command_lines_are_translated(name: str, wanted: str) -> None:
    typed = GIVEN.get(name, ())
    run = read_megatron_run(str(FILES / name), typed)
    assert set(wanted.split()) <= {f"{key}={value}" for key, value in run.overrides.items()}
    assert config_of(run, typed).gpus == int(run.overrides["gpus"])


@pytest.mark.parametrize("name", ["qwen3-30b-a3b.txt", "qwen3-32b.txt", "llama3-70b.txt"])
def test_the_command_gives_the_run_that_all_settings_give(name: str) -> None:
    typed = GIVEN.get(name, ())
    run = read_megatron_run(str(FILES / name), typed)
    config = config_of(run, typed)
    command = run.command(config, typed)
    assert compose_run(command, training=True).config == config
    assert len(command) < len(run.overrides) - 5


def test_optimizers_are_told_apart() -> None:
    names = ("llama3-8b.txt", "qwen3-32b.txt", "llama3-70b.txt")
    runs = [read_megatron_run(str(FILES / name), GIVEN.get(name, ())) for name in names]
    assert [(run.optimizer, run.distributed, run.tp_mode) for run in runs] == [
        ("adamw", True, "blockwise"),
        ("muon", True, "blockwise"),
        ("muon", True, "distributed"),
    ]
    assert read_megatron_run(f"{FILES}/muon-621m.txt", GIVEN["muon-621m.txt"]).distributed


def test_a_log_is_read_in_any_prefix_and_all_that_a_run_prints_counts(tmp_path: Path) -> None:
    """A line between the arguments, such as another rank's, is not one of them."""
    lines = [f"[default0]:{line}" for line in printed(tmp_path).splitlines()]
    lines.insert(3, "[default3]:NCCL version 2.27.5+cuda12.9")
    lines.insert(-1, "[default3]: hidden_size  1024")
    lines += ["[default0]: > padded vocab (size: 50257) with 47 dummy tokens (new size: 50304)"]
    run = read(tmp_path, "\r\n".join(["setting up", *lines, "[default0]:building GPT model ..."]))
    assert (run.assumed, run.not_understood, run.overrides["model.vocab_size"]) == ((), (), "50304")
    config = config_of(run)
    assert (config.gpus, config.model.hidden_size) == (8, 512)


def test_arguments_that_a_log_does_not_have_are_listed(tmp_path: Path) -> None:
    """Another version of Megatron printed it, or a line is lost among those of other ranks."""
    text = re.sub(r"^  (muon_tp_mode|hidden_dropout) .*\n", "", printed(tmp_path), flags=re.MULTILINE)
    assert set(read(tmp_path, text, ("program=gpt", "model.vocab_size=1024")).assumed) == {
        "muon_tp_mode",
        "hidden_dropout",
    }


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda text: text[: len(text) // 2], "ends within the arguments"),
        (
            lambda text: text + re.sub(r"(hidden_size \.+) 512", r"\1 1024", text),
            "several runs, which differ in hidden_size",
        ),
        (lambda text: text.replace(f"{'-' * 20} end", "\n" * (1 << 20) + f"{'-' * 20} end"), "1 MiB"),
    ],
)
def test_a_log_that_is_not_of_one_run_is_refused(tmp_path: Path, change: Callable[[str], str], reason: str) -> None:
    assert reason in problems(tmp_path, change(printed(tmp_path)))["--from-megatron"].reason


def test_switches_of_a_log_are_true_or_false(tmp_path: Path) -> None:
    """Another rank wrote into the line."""
    text = re.sub(r"(swiglu \.+) True", r"\1 TrueWARNING:", printed(tmp_path))
    assert problems(tmp_path, text, GPT)["swiglu"].reason == "is neither True nor False"


def test_nothing_is_assumed_of_a_command_line(tmp_path: Path) -> None:
    """Neither of what Megatron has a default for nor of what it finds out when it starts; all at once."""
    text = SMALL.removeprefix("torchrun --nproc_per_node 8 pretrain_gpt.py ").replace(" --bf16", "")
    text = text.replace("--global-batch-size 16", "--tokenizer-type HuggingFaceTokenizer")
    keys = {"program", "--bf16", "--global-batch-size", "--padded-vocab-size", "gpus"}
    assert problems(tmp_path, text).keys() == keys
    given = ("program=gpt", "train.precision=fp32", "train.global_batch_size=32", "model.vocab_size=1024", "gpus=16")
    run = read(tmp_path, text, given)
    assert (run.overrides["recipe"], "gpus" in run.overrides) == ("llama3-8b", False)
    config = config_of(run, given[1:])
    assert (config.gpus, config.train.precision, config.train.global_batch_size) == (16, "fp32", 32)


@pytest.mark.parametrize("program", ["pretrain_mamba.py", "pretrain_t5.py", "train.py"])
def test_programs_of_other_models_are_refused(tmp_path: Path, program: str) -> None:
    problem = problems(tmp_path, SMALL.replace("pretrain_gpt.py", program))["program"]
    assert problem.value == program
    log = f"{printed(tmp_path)}\nbuilding BERT model ...\n"
    assert problems(tmp_path, log, ("model.vocab_size=1024",))["program"].value == "BERT model"


SCRIPTS = {
    "arrays": "MODEL_ARGS=(\n    --num-layers 32\n)\ntorchrun pretrain_gpt.py ${MODEL_ARGS[@]} --bf16",
    "defaults": "torchrun --nproc-per-node=8 --nnodes=${NNODES:-32} pretrain_gpt.py --num-layers 64",
    "arithmetic": "torchrun --nproc_per_node $((8*4)) pretrain_gpt.py --num-layers 64",
    "command": "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers `nproc`",
    "condition": 'if [[ "$DTYPE" == "fp8" ]]; then\n    torchrun pretrain_gpt.py --fp8-format hybrid\nfi',
    "test": "[ -d data ] && torchrun pretrain_gpt.py --num-layers 64",
    "second": "torchrun pretrain_gpt.py --num-layers 64\ntorchrun pretrain_gpt.py --num-layers 32",
    "semicolon": "set -e; torchrun pretrain_gpt.py --num-layers 64",
    "pipe": "torchrun pretrain_gpt.py --num-layers 64 2>&1 | tee log.txt",
    "file": "torchrun pretrain_gpt.py --num-layers 64 > log.txt",
    "comment": "#SBATCH --nodes=4\nsrun python pretrain_gpt.py --num-layers 64",
    "document": "cat <<END\n--num-layers 64\nEND",
    "quoted": 'srun sh -c "python pretrain_gpt.py ${MODEL_ARGS}"',
    "in quotes": 'torchrun pretrain_gpt.py --data-path "$DATA"',
    "open quote": "torchrun pretrain_gpt.py --num-layers 64 --data-path 'x",
    "name": "run.py --num-layers {1,2}",
    "several": "A=x\n" + "A=$A$A\n" * 64,
    "deep": "${A:-" * 20_000,
    "long": "--num-layers 32 " + "--bf16 " * 20_000,
    "other": "echo hello",
    "words": "bash run.sh --num-layers 32",
    "unknown": f"{SMALL} --spike-skip-threshold 6",
    "nothing": "",
}


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_what_needs_a_shell_or_is_not_megatrons_is_refused_in_one_sentence(tmp_path: Path, script: str) -> None:
    (problem,) = problems(tmp_path, script).values()
    assert problem.key == "--from-megatron"
    assert problem.reason.count(". ") == 0
    assert "give a log of the run" in problem.fix


def test_nothing_is_run(tmp_path: Path) -> None:
    made = tmp_path / "made"
    for text in (f"touch {made}", f"$(touch {made})", f"`touch {made}`", f"--num-layers $(touch {made})"):
        assert problems(tmp_path, text)
    assert not made.exists()


def test_what_has_no_effect_is_listed_as_written() -> None:
    run = read_megatron_run(f"{FILES}/qwen3-32b.txt", GIVEN["qwen3-32b.txt"])
    assert {"--save", "--save-interval", "--log-interval", "--split", "--tokenizer-model"} <= {*run.no_effect}


def test_a_constant_rate_may_be_below_the_recipes_minimum(tmp_path: Path) -> None:
    config = config_of(read(tmp_path, f"{SMALL} --lr 1e-6 --lr-decay-style constant"))
    assert (config.schedule.decay, config.optimizer.lr) == ("constant", 1e-6)


@pytest.mark.parametrize(
    ("flags", "reasons"),
    [
        ("--position-embedding-type none", ["--position-embedding-type none: canzona's"]),
        ("--squared-relu", ["--squared-relu: canzona's layers without a gate have GELU"]),
        (
            "--num-experts 8 --moe-shared-expert-intermediate-size 2048 --moe-shared-expert-gate",
            ["--moe-shared-expert-gate: canzona's shared experts have no gate"],
        ),
    ],
)
def test_what_only_megatrons_loop_trains_is_planned_with_the_reason(
    tmp_path: Path, flags: str, reasons: list[str]
) -> None:
    run = read(tmp_path, f"{SMALL} {flags}")
    assert [each[: len(reason)] for each, reason in zip(run.plans_only, reasons, strict=True)] == reasons
    assert config_of(run).model.shared_ffn_hidden_size == (2048 if "shared" in flags else 0)


@pytest.mark.parametrize(
    ("pattern", "layers", "width"),
    [
        ("1", 1, 0),
        ("([1]*4)", 1, 0),
        ("2", 2, 2048),
        ("([0]*1+[1]*3)", (0, 1, 1, 1), 2048),
        ("([0]+[1]*1)*2", (0, 1, 0, 1), 2048),
    ],
)
def test_layers_with_experts_are_those_that_megatron_evaluates(
    tmp_path: Path, pattern: str, layers: int | tuple[int, ...], width: int
) -> None:
    flags = "--num-experts 8 --qk-layernorm --ffn-hidden-size 2048 --moe-ffn-hidden-size 256 --moe-layer-freq"
    model = config_of(read(tmp_path, f"{SMALL} {flags} '{pattern}'")).model
    assert (model.moe_layer_freq, model.dense_ffn_hidden_size, model.ffn_hidden_size) == (layers, width, 256)


def test_parts_of_gpt2_are_read_from_flags(tmp_path: Path) -> None:
    parts: dict[str, dict[str, bool | int]] = {
        "--normalization LayerNorm": {"layernorm": True},
        "--position-embedding-type learned_absolute --max-position-embeddings 8192": {"positions": 8192},
        "--num-experts 8": {},
    }
    for flags, expected in parts.items():
        run = read(tmp_path, f"{SMALL} {flags}")
        assert (config_of(run).model.parts_of_gpt2, run.plans_only) == (expected, ())
        assert ("model.rope_base" in run.overrides) is ("positions" not in expected), "it would have no effect"
    classic = SMALL.replace("--swiglu", "").replace("--disable-bias-linear", "")
    run = read(tmp_path, f"{classic} --normalization LayerNorm")
    assert config_of(run).model.parts_of_gpt2 == {"gated": False, "layernorm": True, "biases": True}
    command = run.command(config_of(run), ())
    assert {"model.gated=false", "model.layernorm=true", "model.biases=true"} <= {*command}
    assert read(tmp_path, f"{classic} --num-experts 8").plans_only == (
        "canzona trains experts only with --disable-bias-linear",
    )


def test_what_canzona_leaves_out_is_listed_with_its_value(tmp_path: Path) -> None:
    run = read(tmp_path, f"{SMALL} --cuda-graph-impl local --ddp-num-buckets 4 --no-align-param-gather")
    assert {*run.left_out} >= {"--cuda-graph-impl local", "--ddp-num-buckets 4"}


def test_what_is_no_ramp_up_is_refused_by_its_flag(tmp_path: Path) -> None:
    without = SMALL.replace(" --global-batch-size 16", "")
    for flags, key, words in (
        ("--step-batch-size-schedule 1M:16", "--step-batch-size-schedule", "begins with 0 tokens"),
        ("--step-batch-size-schedule '0:16 1X:32'", "--step-batch-size-schedule", "not a list of TOKENS:SEQUENCES"),
        ("--step-batch-size-schedule ''", "--global-batch-size", "is missing"),
        ("--global-batch-size 16 --rampup-batch-size 8 3 1000", "--rampup-batch-size", "the batch of 16 sequences"),
        ("--global-batch-size 16 --rampup-batch-size 32 8 1000", "--rampup-batch-size", "the batch of 16 sequences"),
    ):
        assert words in problems(tmp_path, f"{without} {flags}")[key].reason, flags


def test_a_blend_is_read_with_its_weights(tmp_path: Path) -> None:
    run = read(tmp_path, f"{SMALL} --data-path 0.7 data/code_text 30 /corpora/web.v2")
    assert config_of(run).data.blend == {"data/code_text": 0.7, "/corpora/web.v2": 30.0}
    assert config_of(run).data.source == "prepared"
    assert "data.blend" in " ".join(run.command(config_of(run), ()))
    assert config_of(read(tmp_path, f"{SMALL} --data-path 1.0 data/code")).data.path == "data/code"


def test_a_blend_without_a_share_for_each_set_is_refused_with_what_to_do(tmp_path: Path) -> None:
    flag = "--data-path"
    for paths in ("data/code data/web", "1 data/code data/web", "1 data/code data/web 2"):
        problem = problems(tmp_path, f"{SMALL} {flag} {paths}")[flag]
        assert (problem.reason[:14], problem.value) == ("has no weights", paths)
        assert "data.blend='{PATH:WEIGHT,...}'" in problem.fix
        given = ["data.blend={data/code:2,data/web:1}"]
        assert config_of(read(tmp_path, f"{SMALL} {flag} {paths}", given), given).data.blend is not None
    assert "data/a twice" in problems(tmp_path, f"{SMALL} {flag} 1 data/a 2 data/a")[flag].reason


@pytest.mark.parametrize(
    ("flags", "key"),
    [
        ("--multi-latent-attention --q-lora-rank 1536", "--multi-latent-attention"),
        ("--qk-clip", "--qk-clip"),
        ("--moe-latent-size 512", "--moe-latent-size"),
        ("--num-experts 8 --qk-layernorm --moe-layer-freq '([0]*1+[1]*4)'", "--moe-layer-freq"),
        ("--num-experts 8 --qk-layernorm --moe-layer-freq [0]*4", "--moe-layer-freq"),
        ("--num-experts 8 --qk-layernorm --moe-layer-freq '[1]*(9**9**9)'", "--moe-layer-freq"),
        ("--num-experts 8 --qk-layernorm --moe-layer-freq '__import__(1)'", "--moe-layer-freq"),
        ("--mtp-num-layers 1", "--mtp-num-layers"),
        ("--fp8-format hybrid --fp8-param-gather", "--fp8-param-gather"),
        ("--use-megatron-fsdp", "--use-megatron-fsdp"),
        ("--decoder-last-pipeline-num-layers 2", "--decoder-last-pipeline-num-layers"),
        ("--optimizer soap", "--optimizer"),
        ("--window-size 128,0", "--window-size"),
        (
            "--tensor-model-parallel-size 2 --num-experts 8 --qk-layernorm --expert-model-parallel-size 4",
            "--expert-tensor-parallel-size",
        ),
        ("--recompute-granularity full --recompute-method block", "--recompute-method"),
        (
            "--pipeline-model-parallel-size 2 --account-for-embedding-in-pipeline-split "
            "--account-for-loss-in-pipeline-split",
            "--account-for-loss-in-pipeline-split",
        ),
        ("--train-samples 1000", "--train-iters"),
        ("--overlap-param-gather", "--overlap-param-gather"),
        ("--overlap-param-gather --overlap-grad-reduce", "--overlap-param-gather"),
        ("--optimizer muon --muon-tp-mode auto", "--muon-tp-mode"),
        ("--swiglu=yes", "--from-megatron"),
        ("--tensor-model-parallel-size 0", "--tensor-model-parallel-size"),
        ("--num-attention-heads -8", "--num-attention-heads"),
        ("--lr-warmup-fraction 1e400", "--lr-warmup-fraction"),
        ("--hidden-size 0 --ffn-hidden-size -1", "--hidden-size"),
        (
            "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 9",
            "--num-layers-per-virtual-pipeline-stage",
        ),
        ("--lr x --num-layers many", "--from-megatron"),
        (
            "--num-layers-per-virtual-pipeline-stage 3 --pipeline-model-parallel-size 2",
            "--num-layers-per-virtual-pipeline-stage",
        ),
    ],
)
def test_what_canzona_lacks_or_megatron_refuses_is_refused_by_name(tmp_path: Path, flags: str, key: str) -> None:
    assert key in problems(tmp_path, f"{SMALL} {shlex.join(flags.split())}")


def test_every_problem_is_reported_at_once(tmp_path: Path) -> None:
    text = "python pretrain_gpt.py --hidden-size 512 --fp16 --multi-latent-attention --window-size 128,0"
    keys = problems(tmp_path, text)
    assert {"--num-layers", "--num-attention-heads", "--seq-length", "--micro-batch-size", "gpus"} < keys.keys()
    assert {"--fp16", "--multi-latent-attention", "--window-size"} < keys.keys()


def test_what_the_user_types_counts_more_than_the_file(tmp_path: Path) -> None:
    given = ("gpus=16", "model.vocab_size=1024", "train.micro_batch_size=4", "train.global_batch_size=64")
    config = config_of(read(tmp_path, SMALL, given), given)
    assert (config.gpus, config.train.micro_batch_size, config.train.global_batch_size) == (16, 4, 64)
    assert config.model.vocab_size == 1024


def test_impossible_layouts_are_reported_by_the_flags_that_ask_for_them(tmp_path: Path) -> None:
    run = read(tmp_path, f"{SMALL} --tensor-model-parallel-size 3")
    problems = refused(config_of, run)
    keys = {run.by_argument(problem).key for problem in problems}
    assert "--tensor-model-parallel-size (parallel.tp)" in keys
    assert any(key.endswith("(gpus)") for key in keys)


@pytest.mark.parametrize(
    ("launcher", "gpus"),
    [
        ("torchrun --nproc-per-node=4 --nnodes=3", "12"),
        ("CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun --nproc_per_node 8", "8"),
        ("python -m torch.distributed.run --nproc-per-node 2", "2"),
        ("torchrun --nproc_per_node gpu", None),
        ("torchrun --nproc_per_node 8 --nnodes 1:4", None),
        ("srun torchrun --nproc_per_node 8", None),
        ("WORLD_SIZE=8 python", None),
    ],
)
def test_the_number_of_gpus_is_what_torchrun_says(tmp_path: Path, launcher: str, gpus: str | None) -> None:
    text = SMALL.replace("torchrun --nproc_per_node 8", launcher)
    if gpus is None:
        assert problems(tmp_path, text).keys() == {"gpus"}
    else:
        assert read(tmp_path, text).overrides["gpus"] == gpus


def test_a_file_may_contain_nothing_but_arguments_and_so_may_the_command(tmp_path: Path) -> None:
    arguments = SMALL.partition(".py ")[2]
    given = ("gpus=8", "program=gpt")
    of_file, of_lines = read(tmp_path, arguments, given), read(tmp_path, arguments.replace(" --", "\n--"), given)
    typed = read_megatron_run(TYPED + arguments, given)
    continued = read(tmp_path, SMALL.replace(" --", " \\\n  --"))
    assert of_file.overrides == of_lines.overrides
    for run in (of_file, typed):
        assert {**run.overrides, "gpus": "8"} == {**continued.overrides} | {
            key: run.overrides[key] for key in ("name", "model.name")
        }


def test_every_translated_argument_has_a_setting_of_its_kind() -> None:
    """Megatron's default is a value of the setting."""
    for name in (*table()["same"], *table()["muon"]):
        key = exact_key(name)
        assert key is not None
        kinds = {bool: "boolean", int: "integer", float: "number", str: "choice"}
        value = defaults()[name]
        assert value is None or settings()[key].kind in (kinds[type(value)], "number"), name


def test_names_are_in_one_section() -> None:
    names = [name for section, entries in table().items() if section != "no_effect" for name in entries]
    assert len(names) == len(set(names))
    assert meaning("no_such_thing") is None
    assert (default("bf16"), default("lr")) == ("false", None)
    assert asdict(read_megatron_run(f"{FILES}/llama3-70b.txt", ()))["left_out"] == ()
