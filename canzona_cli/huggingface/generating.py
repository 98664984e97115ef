"""Generates text from a checkpoint, with a model class of transformers and the checkpoint's masters as
weights."""

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
    """The settings for choosing the next token."""

    max_new_tokens: int
    temperature: float
    """The sampling temperature; 0 means always the most likely token."""
    top_p: float
    """The next token is sampled from the most likely tokens that together have this probability."""
    seed: int


@dataclass(frozen=True, kw_only=True)
class Generated:
    """The text that the model has written."""

    text: str
    """The text after the prompt."""
    tokens: int
    """The number of tokens in the text."""
    ended: bool
    """True if the model has ended the document."""
    too_long: bool
    """True if prompt and text together are longer than the sequences that the model was trained on."""


class Writer:
    """A model with its tokenizer, which continues texts.

    Args:
        reader: The reader of a verified checkpoint.
        beside: The files of the run, with the tokenizer.
        dtype: The data type of the computation; weights are rounded to it as in training.
        device: The device of the computation; None for a GPU if there is one, otherwise the CPU.
        seq_length: The longest sequence of the model, in tokens.
        on_bytes: Called with the number of bytes of each weight that has been read.

    Raises:
        ConfigError: the run's tokenizer is unknown.
        CheckpointInvalid: the checkpoint lacks a weight, or a weight is not finite.
        EnvironmentProblem: this machine does not have the device.
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
        transformers.utils.logging.set_verbosity_error()  # canzona itself reports a text that is too long
        self._seq_length = seq_length
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
        """Continues the prompt. An empty prompt starts a new document.

        Args:
            aloud: True to print the text to standard output while it is generated.

        Raises:
            ConfigError: The prompt contains a token that the model does not have, or the prompt is empty and
                the tokenizer has no end-of-document token to start from.
        """
        ids: list[int] = self._tokenizer.encode(prompt, add_special_tokens=False) or self._end[:1]
        vocabulary = self._model.config.vocab_size
        if not ids or not 0 <= min(ids) <= max(ids) < vocabulary:
            reason = (
                f"has a token beyond the model's vocabulary of {vocabulary:,}"
                if ids
                else "is empty, and the tokenizer has no end-of-document token"
            )
            raise ConfigError(
                Problem(key="--prompt", value=prompt, reason=reason, fix="--tokenizer DIR, the run's own")
            )
        torch.manual_seed(how.seed)
        sampling = {"do_sample": True, "temperature": how.temperature, "top_p": how.top_p, "top_k": 0}
        settings = GenerationConfig(
            max_new_tokens=how.max_new_tokens,
            eos_token_id=self._end or None,
            pad_token_id=self._end[0] if self._end else 0,
            **(sampling if how.temperature else {"do_sample": False}),
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
        ended = bool(new) and new[-1] in self._end
        return Generated(text=text, tokens=len(new), ended=ended, too_long=tokens.shape[1] > self._seq_length)


def _tokenizer(beside: Beside) -> tuple[PreTrainedTokenizerFast, list[int]]:
    """Returns a run's tokenizer, and the ids of the tokens that end a document.

    Raises:
        ConfigError: there is no tokenizer.
    """
    path = next((path for path in beside.copies if path.name == TOKENIZER), None)
    text = beside.texts.get(TOKENIZER, "")
    if path is None and not text:
        reason = "the run's tokenizer is not known: another tool prepared its data, or the data was removed"
        raise ConfigError(
            Problem(key="--tokenizer", reason=reason, fix="--tokenizer DIR, a folder with tokenizer.json")
        )
    end = beside.settings.get("eos_token_id")
    ends = [each for each in (end if isinstance(end, list) else [end]) if isinstance(each, int)]
    backend = read_backend(path) if path is not None else RustTokenizer.from_str(text)
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False), ends


def _device(requested: Device | None) -> torch.device:
    """Returns the requested device; for None, a GPU if there is one.

    Raises:
        EnvironmentProblem: A GPU is requested, but there is none.
    """
    has_gpu = torch.cuda.is_available()
    if requested == "cuda" and not has_gpu:
        reason, fix = "torch sees no GPU on this machine", "--device cpu; `canzona doctor` shows what is missing"
        raise EnvironmentProblem(Problem(key="--device", value=requested, reason=reason, fix=fix))
    return torch.device("cuda" if has_gpu and requested != "cpu" else "cpu")
