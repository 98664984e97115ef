"""Text from a checkpoint, by transformers' own generation: its class of the family,
with our masters as its weights."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import transformers
from tokenizers import Tokenizer as RustTokenizer
from transformers import GenerationConfig, PreTrainedTokenizerFast, TextStreamer

from canzona_cli.checkpoint.reader import Reader
from canzona_cli.config.schema import Device
from canzona_cli.data.tokenizers import read_backend
from canzona_cli.errors import ConfigError, EnvironmentProblem, Problem
from canzona_cli.huggingface.folder import DTYPES, TOKENIZER, Beside, Dtype
from canzona_cli.huggingface.foreign import config_json, tensor_names
from canzona_cli.model.families import family_of


@dataclass(frozen=True, kw_only=True)
class Choosing:
    """The choice of the next token."""

    max_new_tokens: int
    temperature: float
    """0: the likeliest."""
    top_p: float
    """Only of the likeliest tokens that together have this probability."""
    seed: int


@dataclass(frozen=True, kw_only=True)
class Generated:
    """The text that the model has written."""

    text: str
    """The text after the prompt."""
    tokens: int
    """The number of its tokens."""
    ended: bool
    """True where the model ended the document itself."""


class Writer:
    """A model that goes on with texts.

    Args:
        reader: the reader of a checkpoint that has been verified.
        beside: with the tokenizer.
        dtype: to compute in; weights are rounded to it as training rounds them.
        device: None: a GPU where there is one.
        on_bytes: told how many further bytes of weights have been read.

    Raises:
        ConfigError: the run's tokenizer is not known; the model is no Qwen3 of Hugging Face.
        CheckpointInvalid: the checkpoint lacks a weight, or has one that is no number.
        EnvironmentProblem: there is no such device here.
    """

    def __init__(
        self,
        reader: Reader,
        beside: Beside,
        *,
        dtype: Dtype,
        device: Device | None,
        seq_length: int,
        on_bytes: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._device = _device(device)
        self._tokenizer, self._end = _tokenizer(beside)
        kind: torch.dtype = getattr(torch, DTYPES[dtype][1])
        transformers.utils.logging.disable_progress_bar()
        foreign = family_of(reader.model).foreign
        settings = config_json(reader.model, dtype=DTYPES[dtype][1], max_positions=seq_length)
        config = getattr(transformers, foreign.config)(**settings)
        weights: dict[str, torch.Tensor] = {}
        for unit, name in tensor_names(reader.model).items():
            weights[name] = reader.master(unit).to(kind)
            on_bytes(weights[name].nbytes)
        model_class = getattr(transformers, foreign.architecture)
        self._model = model_class.from_pretrained(None, config=config, state_dict=weights, dtype=kind)
        self._model.to(self._device).eval()

    def go_on(self, prompt: str, how: Choosing, *, aloud: bool = False) -> Generated:
        """Continues the prompt; an empty one is the beginning of a document.

        Args:
            aloud: print it to standard output as it comes.

        Raises:
            ConfigError: there is nothing to begin with; or the prompt has a token that the model has not.
        """
        ids: list[int] = self._tokenizer.encode(prompt, add_special_tokens=False) or self._end[:1]
        vocabulary = self._model.config.vocab_size
        if not ids or not 0 <= min(ids) <= max(ids) < vocabulary:
            reason = (
                f"has a token beyond the model's {vocabulary:,}" if ids else "is empty, and no token ends documents"
            )
            raise ConfigError(
                Problem(key="--prompt", value=prompt, reason=reason, fix="--tokenizer DIR, the run's own")
            )
        torch.manual_seed(how.seed)
        drawn = {"do_sample": True, "temperature": how.temperature, "top_p": how.top_p, "top_k": 0}
        settings = GenerationConfig(
            max_new_tokens=how.max_new_tokens,
            eos_token_id=self._end or None,
            pad_token_id=self._end[0] if self._end else 0,
            **(drawn if how.temperature else {"do_sample": False}),
        )
        given = torch.tensor([ids], device=self._device)
        tokens = self._model.generate(
            given,
            attention_mask=torch.ones_like(given),
            generation_config=settings,
            streamer=TextStreamer(self._tokenizer, skip_prompt=True, skip_special_tokens=True) if aloud else None,
        )
        new: list[int] = tokens[0, len(ids) :].tolist()
        text: str = self._tokenizer.decode(new, skip_special_tokens=True)
        return Generated(text=text, tokens=len(new), ended=bool(new) and new[-1] in self._end)


def _tokenizer(beside: Beside) -> tuple[PreTrainedTokenizerFast, list[int]]:
    """Returns a run's tokenizer, and the ids that end a document."""
    path = next((path for path in beside.copies if path.name == TOKENIZER), None)
    text = beside.texts.get(TOKENIZER, "")
    if path is None and not text:
        reason = "the run's tokenizer is not known: another tool made its data, or the data has gone"
        raise ConfigError(
            Problem(key="--tokenizer", reason=reason, fix="--tokenizer DIR, a folder with tokenizer.json")
        )
    end = beside.settings.get("eos_token_id")
    ends = [each for each in (end if isinstance(end, list) else [end]) if isinstance(each, int)]
    whole = read_backend(path) if path is not None else RustTokenizer.from_str(text)
    return PreTrainedTokenizerFast(tokenizer_object=whole, clean_up_tokenization_spaces=False), ends


def _device(asked: Device | None) -> torch.device:
    """Raises EnvironmentProblem where it is not here."""
    here = torch.cuda.is_available()
    if asked == "cuda" and not here:
        reason, fix = "torch sees no GPU here", "--device cpu; `canzona doctor` says what is missing"
        raise EnvironmentProblem(Problem(key="--device", value=asked, reason=reason, fix=fix))
    return torch.device("cuda" if here and asked != "cpu" else "cpu")
