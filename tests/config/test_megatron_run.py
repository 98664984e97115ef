"""Command lines of Megatron-LM become settings of canzona, or are refused by the names of their flags."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pytest

from canzona_cli.config.compose import compose_run
from canzona_cli.config.megatron_arguments import argument_of, default, meaning, table
from canzona_cli.config.megatron_run import MegatronRun
from canzona_cli.config.megatron_translation import read_megatron_run
from canzona_cli.config.schema import RunConfig
from canzona_cli.config.settings import settings
from canzona_cli.config.unknown_keys import exact_key
from canzona_cli.errors import Problem
from tests.refusals import refused

FILES = Path(__file__).with_name("megatron")
SMALL = (
    "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 4 --hidden-size 512 --num-attention-heads 8 --swiglu"
    " --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --attention-dropout 0"
    " --hidden-dropout 0 --vocab-size 1000 --seq-length 256 --micro-batch-size 2 --bf16 --train-iters 100 --lr 1e-3"
)


def read(tmp_path: Path, text: str, typed: Sequence[str] = ()) -> MegatronRun:
    path = tmp_path / "my run.sh"
    path.write_text(text)
    return read_megatron_run(path, typed)


def config_of(run: MegatronRun, typed: Sequence[str] = ()) -> RunConfig:
    return compose_run([*(f"{key}={value}" for key, value in run.overrides.items()), *typed], training=False).config


def problems(tmp_path: Path, text: str, typed: Sequence[str] = ()) -> dict[str, Problem]:
    return {problem.key: problem for problem in refused(read, tmp_path, text, typed)}


PUBLISHED = {
    "llama3-8b.sh": "recipe=llama3-8b gpus=8 model.vocab_size=128256 model.rope_base=1000000 train.steps=15258789"
    " schedule.warmup_steps=30517 train.grad_reduce_dtype=bf16",
    "muon-621m.sh": "recipe=llama3-8b name=muon-621m model.gated=false engine.splitting=qkv",
    "qwen3-30b-a3b.sh": "recipe=qwen3-30b-a3b gpus=16 parallel.ep=16 parallel.dispatcher=flex schedule.decay=wsd"
    " model.balancing_loss=global schedule.warmup_steps=50 optimizer.scale_factor=0.2",
    "qwen3-32b.sh": "recipe=qwen3-32b gpus=256 parallel.tp=8 train.recompute=full optimizer.momentum=0.9"
    " data.path=/data/fineweb_text_document optimizer.nesterov=false",
    "llama3-70b.txt": "recipe=llama3-70b parallel.pp=4 parallel.vpp=5 model.vocab_size=128512",
}
"""Some of the settings that each comes to."""
TYPED = {"muon-621m.sh": ("model.vocab_size=128256",)}


@pytest.mark.parametrize(("name", "wanted"), PUBLISHED.items())
def test_published_command_lines_are_translated(name: str, wanted: str) -> None:
    typed = TYPED.get(name, ())
    run = read_megatron_run(FILES / name, typed)
    assert set(wanted.split()) <= {f"{key}={value}" for key, value in run.overrides.items()}
    assert config_of(run, typed).gpus == int(run.overrides["gpus"])


@pytest.mark.parametrize("name", ["qwen3-30b-a3b.sh", "qwen3-32b.sh", "llama3-70b.txt"])
def test_the_command_gives_the_run_that_all_settings_give(name: str) -> None:
    run = read_megatron_run(FILES / name, ())
    config = config_of(run)
    command = run.command(config, ())
    assert compose_run(command, training=True).config == config
    assert len(command) < len(run.overrides) - 5


def test_optimizers_are_told_apart() -> None:
    runs = [read_megatron_run(FILES / name, ()) for name in ("llama3-8b.sh", "qwen3-32b.sh", "llama3-70b.txt")]
    assert [(run.optimizer, run.distributed, run.tp_mode) for run in runs] == [
        ("adamw", True, "blockwise"),
        ("muon", True, "blockwise"),
        ("muon", True, "distributed"),
    ]
    assert read_megatron_run(FILES / "muon-621m.sh", TYPED["muon-621m.sh"]).distributed


def test_a_batch_that_is_not_given_is_a_micro_batch_on_each_data_parallel_rank(tmp_path: Path) -> None:
    flags = "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2"
    assert config_of(read(tmp_path, f"{SMALL} {flags}")).train.global_batch_size == 2 * 2


def test_what_is_not_known_is_listed_as_written() -> None:
    run = read_megatron_run(FILES / "qwen3-32b.sh", ())
    assert run.not_understood == ("--spike-skip-threshold", "$EXTRA_ARGS", "--enable-telemetry")
    assert {"--save", "--save-interval", "--log-interval", "--split", "--tokenizer-model"} <= {*run.no_effect}


def test_what_stands_under_an_undecided_condition_is_listed(tmp_path: Path) -> None:
    text = f"ARGS=(--manual-gc)\nif [ -d /data ]; then ARGS+=(--mtp-num-layers 1); fi\n{SMALL} ${{ARGS[@]}}"
    assert read(tmp_path, text).not_understood == ("--mtp-num-layers",)


def test_a_constant_rate_may_be_below_the_recipes_minimum(tmp_path: Path) -> None:
    config = config_of(read(tmp_path, f"{SMALL} --lr 1e-6 --lr-decay-style constant"))
    assert (config.schedule.decay, config.optimizer.lr) == ("constant", 1e-6)


def test_what_canzona_leaves_out_is_listed_with_its_value(tmp_path: Path) -> None:
    run = read(tmp_path, f"{SMALL} --cuda-graph-impl local --rampup-batch-size 16 16 1000 --no-align-param-gather")
    assert {*run.left_out} >= {"--cuda-graph-impl local", "--rampup-batch-size 16 16 1000"}


@pytest.mark.parametrize(
    ("flags", "key"),
    [
        ("--multi-latent-attention --q-lora-rank 1536", "--multi-latent-attention"),
        ("--moe-shared-expert-intermediate-size 2048", "--moe-shared-expert-intermediate-size"),
        ("--num-experts 8", "--qk-layernorm"),
        ("--num-experts 8 --qk-layernorm --moe-layer-freq ([0]*1+[1]*3)", "--moe-layer-freq"),
        ("--num-experts 8 --qk-layernorm --moe-layer-freq 2", "--moe-layer-freq"),
        ("--mtp-num-layers 1", "--mtp-num-layers"),
        ("--fp8-format hybrid", "--fp8-format"),
        ("--use-megatron-fsdp", "--use-megatron-fsdp"),
        ("--position-embedding-type yarn", "--position-embedding-type"),
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
        ("--tensor-model-parallel-size 0 --lr-warmup-fraction x", "--tensor-model-parallel-size"),
        ("--num-attention-heads -8", "--num-attention-heads"),
        ("--lr-warmup-fraction 1e400", "--lr-warmup-fraction"),
        ("--hidden-size inf --ffn-hidden-size nan", "--hidden-size"),
        (
            "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 9",
            "--num-layers-per-virtual-pipeline-stage",
        ),
        ("--lr x --num-layers many", "--num-layers"),
        ("--num-layers $LAYERS", "--num-layers"),
        (
            "--num-layers-per-virtual-pipeline-stage 3 --pipeline-model-parallel-size 2",
            "--num-layers-per-virtual-pipeline-stage",
        ),
    ],
)
def test_what_canzona_lacks_or_megatron_refuses_is_refused_by_name(tmp_path: Path, flags: str, key: str) -> None:
    assert key in problems(tmp_path, f"{SMALL} {flags.replace('(', chr(92) + '(').replace(')', chr(92) + ')')}")


def test_scripts_that_a_script_sources_are_named_where_something_is_missing(tmp_path: Path) -> None:
    text = 'source "$(dirname "$0")/models/qwen3.sh"\n' + SMALL.replace("--num-layers 4", "${MODEL_ARGS[@]}")
    reason = problems(tmp_path, text)["--num-layers"].reason
    assert reason == "is missing; /models/qwen3.sh, which the file sources, is not read"


def test_every_problem_is_reported_at_once(tmp_path: Path) -> None:
    text = "python pretrain_gpt.py --hidden-size 512 --fp16 --multi-latent-attention"
    keys = problems(tmp_path, text)
    assert {"--num-layers", "--num-attention-heads", "--seq-length", "--micro-batch-size", "gpus"} < keys.keys()
    assert {"--fp16", "--multi-latent-attention", "--position-embedding-type"} < keys.keys()


def test_what_the_user_types_counts_more_than_the_file(tmp_path: Path) -> None:
    text = SMALL.replace("--vocab-size 1000", "").replace("--nproc_per_node 8", "--nproc_per_node $GPUS")
    assert {"gpus", "--vocab-size"} == problems(tmp_path, text).keys()
    typed = ("gpus=16", "model.vocab_size=1024", "train.micro_batch_size=4")
    run = read(tmp_path, text, typed)
    config = config_of(run, typed)
    assert (config.gpus, config.train.micro_batch_size, config.train.global_batch_size) == (16, 4, 64)


def test_impossible_layouts_are_reported_by_the_flags_that_ask_for_them(tmp_path: Path) -> None:
    run = read(tmp_path, f"{SMALL} --tensor-model-parallel-size 3")
    problems = refused(config_of, run)
    keys = {run.by_argument(problem).key for problem in problems}
    assert "--tensor-model-parallel-size (parallel.tp)" in keys
    assert any(key.endswith("(gpus)") for key in keys)


@pytest.mark.parametrize(
    ("text", "gpus"),
    [
        ("WORLD_SIZE=32\n" + SMALL.replace("torchrun --nproc_per_node 8", "python"), "32"),
        (
            "#SBATCH --nodes=4\n#SBATCH --gpus-per-node=8\n" + SMALL.replace("torchrun --nproc_per_node 8", "srun"),
            "32",
        ),
        ("#SBATCH -N 2\n" + SMALL.replace("8 pre", "8 --nnodes $SLURM_NNODES pre"), "16"),
        (SMALL.replace("--nproc_per_node 8", "--nproc-per-node=4 --nnodes=3"), "12"),
        (f"if ! {SMALL}; then exit 1; fi", "8"),
    ],
)
def test_the_number_of_gpus_is_the_launchers_or_slurms(tmp_path: Path, text: str, gpus: str) -> None:
    assert read(tmp_path, text).overrides["gpus"] == gpus


def test_a_file_may_contain_nothing_but_arguments(tmp_path: Path) -> None:
    arguments = SMALL.partition(".py ")[2].replace(" --", "\n--")
    assert read(tmp_path, arguments, ("gpus=8",)).overrides["model.num_layers"] == "4"


def test_every_translated_argument_has_a_setting_of_its_kind() -> None:
    """The default in the table is a value of the setting."""
    for name in (*table()["same"], *table()["muon"]):
        key = exact_key(name)
        assert key is not None
        kinds = {bool: "boolean", int: "integer", float: "number", str: "choice"}
        value = default(name)
        assert value is None or settings()[key].kind in (kinds[type(value)], "number"), name


def test_names_are_in_one_section() -> None:
    names = [name for section, entries in table().items() if section not in ("flags", "no_effect") for name in entries]
    assert len(names) == len(set(names))
    assert argument_of("--no-rope-fusion") == ("apply_rope_fusion", "false")
    assert meaning("no_such_thing") is None
    assert asdict(read_megatron_run(FILES / "llama3-70b.txt", ()))["left_out"] == ()
