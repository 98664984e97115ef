"""The screen of `canzona eval`."""

from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import RenderableType

from canzona_cli.report.page import Page, Screen, labelled
from canzona_cli.run.records import Evaluation
from canzona_cli.run.words import clean, count, layout_words, number


@dataclass(frozen=True, kw_only=True)
class EvaluationView(Page):
    """The three numbers, and what they are of."""

    evaluation: Evaluation

    def parts(self, screen: Screen) -> Iterator[RenderableType]:
        found = self.evaluation
        bits = number(found.bits_per_byte, ".4f")
        if found.text_bytes is None:
            bits += " (the data's tokenizer is not known)"
        elif not found.bytes_counted:
            bits += " (from the corpus' mean bytes a token: its tokenizer does not tell the bytes of each)"
        times = f", read {found.epochs:.2g} times" if found.epochs > 1 else ""
        yield from labelled(
            (
                ("loss", f"{number(found.loss, '.4f')} nats a token"),
                *((f"  {clean(name)}", number(loss, ".4f")) for name, loss in found.sets.items()),
                ("perplexity", number(found.perplexity, ".4g")),
                ("bits a byte", bits),
                ("checkpoint", str(found.checkpoint)),
                ("data", f"{found.data} ({found.tokenizer}), {_DOCUMENTS[found.documents]}{times}"),
                ("read", f"{count(found.tokens)} tokens in batches of {found.layout.global_batch_size} sequences"),
                ("layout", layout_words(found.layout)),
            )
        )


_DOCUMENTS = {"held-out": "documents held out", "all": "all documents"}
