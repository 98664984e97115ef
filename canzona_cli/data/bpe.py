"""Trains a byte-level byte-pair encoding on a sample of the corpus, in a process of its own.

Training is one long call into Rust during which Python cannot act on a signal, so Ctrl-C would wait for its end; a
child can be killed at once. The sample goes in through its standard input, each text after its length, and the
tokenizer.json comes out of its standard output, so an aborted training leaves no file.
"""

import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterable, Iterator
from typing import BinaryIO

from canzona_cli.data.tokenizers import BYTE_VALUES, END_OF_TEXT, JsonTokenizer, bpe_from_json
from canzona_cli.errors import EnvironmentProblem, Problem

SAMPLE_BYTES = 64 << 20
"""Text a vocabulary is learnt from. More hardly changes the merges, and time and memory grow with it."""
MIN_VOCAB_SIZE = BYTE_VALUES + 1
"""Every byte and the end of a document."""

SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""The expression by which text is cut into words before merging, from the tokenizer.json of Qwen3."""

_LENGTH = struct.Struct("<Q")


def train_bpe(sample: Iterable[bytes], vocab_size: int, *, workers: int | None = None) -> JsonTokenizer:
    """Train on `sample`; the same texts give the same tokenizer.

    Args:
        sample: UTF-8 texts, best no more than `SAMPLE_BYTES` in all.
        vocab_size: entries to reach, at least `MIN_VOCAB_SIZE`; a small sample may give fewer.
        workers: threads; None: one per core.

    Raises:
        EnvironmentProblem: the training process died.
    """
    env = dict(os.environ)
    if workers is not None:
        env["RAYON_NUM_THREADS"] = str(workers)
    command = [sys.executable, "-m", "canzona_cli.data.bpe", str(vocab_size)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env)
    try:
        assert child.stdin is not None
        try:
            for text in sample:
                child.stdin.write(_LENGTH.pack(len(text)) + text)
        except BrokenPipeError:
            pass  # it died; communicate() below has its last words
        out, err = child.communicate()
    finally:
        if child.poll() is None:
            child.kill()
            child.wait()
    if child.returncode != 0:
        last = err.decode(errors="replace").strip().splitlines() or [f"it ended with {child.returncode}"]
        reason = f"the process that trains it died: {last[-1]}"
        fix = "-9 means the machine ran out of memory: try a smaller --vocab-size, or a ready tokenizer.json"
        raise EnvironmentProblem(Problem(key="--tokenizer", value="bpe", reason=reason, fix=fix))
    return bpe_from_json(out.decode())


def _read_texts(stream: BinaryIO) -> Iterator[str]:
    while header := stream.read(_LENGTH.size):
        (length,) = _LENGTH.unpack(header)
        yield stream.read(length).decode("utf-8", errors="replace")


def _train(texts: Iterable[str], vocab_size: int) -> str:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        # All 256 bytes, so that any text can be encoded; sorted, so that ids do not depend on a hash order.
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    text: str = tokenizer.to_str()
    return text


def main() -> None:
    """Entry of the child process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides; a traceback here would only confuse
    trained = _train(_read_texts(sys.stdin.buffer), int(sys.argv[1]))
    sys.stdout.buffer.write(trained.encode())


if __name__ == "__main__":
    main()
