"""Completion offers what can be typed, and joins what bash has split."""

import pytest

from canzona_cli.config.completion import complete_override, joined_words


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("recipe=qwen3-1", ["recipe=qwen3-1.7b", "recipe=qwen3-12m", "recipe=qwen3-14b"]),
        ("optimizer=s", ["optimizer=shampoo", "optimizer=soap"]),
        ("cluster=h", ["cluster=h100-80g", "cluster=h200"]),
        ("engine.strategy=l", ["engine.strategy=layerwise"]),
        ("train.non", ["train.non_finite="]),
        ("optimizer.options.momentum=", []),
        ("engine.plan=", []),
        ("checkpoint.at_end=", ["checkpoint.at_end=true", "checkpoint.at_end=false"]),
        ("train.recompute=n", ["train.recompute=none", "train.recompute=null"]),
        ("gp", ["gpus="]),
        ("train.steps=", []),
        ("optimizer.stack=", [f"optimizer.stack={value}" for value in ("auto", "true", "false")]),
        ("nonsense=", []),
    ],
)
def test_offers(typed: str, offered: list[str]) -> None:
    assert complete_override(typed) == offered


@pytest.mark.parametrize(
    ("words", "current", "expected"),
    [
        (["canzona", "train", "recipe", "="], 3, (["canzona", "train", "recipe="], 2, "recipe=")),
        (["canzona", "train", "recipe", "=", "qw"], 4, (["canzona", "train", "recipe=qw"], 2, "recipe=")),
        (["canzona", "train", "gpus", "=", "2", "re"], 5, (["canzona", "train", "gpus=2", "re"], 3, "")),
        (["canzona", "train", "recipe=qw"], 2, (["canzona", "train", "recipe=qw"], 2, "")),
        (["canzona", "train", "gpus", "=", "2", ""], 5, (["canzona", "train", "gpus=2", ""], 3, "")),
        (["canzona"], 1, (["canzona"], 1, "")),
    ],
)
def test_words_are_joined_as_typed(words: list[str], current: int, expected: tuple[list[str], int, str]) -> None:
    assert joined_words(words, current) == expected
