"""Generates text with a model class of transformers, whose weights are the masters of a checkpoint."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import transformers
from tokenizers import Tokenizer as RustTokenizer
from transformers import GenerationConfig, PreTrainedTokenizerFast, TextStreamer

from canzona_cli.checkpoint.huggingface.folder import DTYPES, TOKENIZER, Dtype, ExtraFiles
from canzona_cli.checkpoint.huggingface.foreign import config_json, tensor_names
from canzona_cli.checkpoint.reader import Reader
from canzona_cli.core.errors import ConfigError, EnvironmentProblem, Problem
from canzona_cli.core.model.families import family_of
from canzona_cli.core.setup import Device
from canzona_cli.data.tokenizers import read_backend


@dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """The settings that determine how tokens are chosen, and how many."""

    max_new_tokens: int
    temperature: float
    """The sampling temperature; 0 means always the most likely token."""
    top_p: float
    """The total probability of the most likely tokens, from which the next token is sampled."""
    seed: int


@dataclass(frozen=True, kw_only=True)
class GeneratedText:
    """The text that the model wrote after a prompt."""

    text: str
    """The text, without the prompt."""
    tokens: int
    """The number of generated tokens, including the end-of-document token."""
    ended: bool
    """True if the model ended the document."""
    too_long: bool
    """True if prompt and text together are longer than the sequences that the model was trained on."""


class Writer:
    """A model with its tokenizer, for generating text.

    Args:
        reader: The reader of a verified checkpoint.
        extra_files: The run's files for an export, which contain the tokenizer.
        dtype: The data type of the computation, to which weights are rounded as in training.
        device: The device of the computation; None for a GPU if there is one, otherwise the CPU.
        seq_length: The length of the sequences that the model was trained on, in tokens.
        on_bytes: Called with the number of bytes of each weight that has been read.

    Raises:
        ConfigError: the run's tokenizer is not known, or cannot be used.
        CheckpointInvalid: the checkpoint lacks a weight, or a weight is not finite.
        EnvironmentProblem: this machine does not have the device.
    """

    def __init__(
        self,
        reader: Reader,
        extra_files: ExtraFiles,
        *,
        dtype: Dtype,
        device: Device | None,
        seq_length: int,
        on_bytes: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._device = _device(device)
        self._tokenizer, self._end = _tokenizer(extra_files)
        torch_dtype: torch.dtype = getattr(torch, DTYPES[dtype][1])
        transformers.utils.logging.disable_progress_bar()
        transformers.utils.logging.set_verbosity_error()  # canzona itself reports a text that is too long
        self._seq_length = seq_length
        foreign = family_of(reader.model).foreign
        settings = config_json(reader.model, dtype=DTYPES[dtype][1], max_positions=seq_length)
        config = getattr(transformers, foreign.config)(**settings)
        weights: dict[str, torch.Tensor] = {}
        for unit, name in tensor_names(reader.model).items():
            weights[name] = reader.master(unit).to(torch_dtype)
            on_bytes(weights[name].nbytes)
        model_class = getattr(transformers, foreign.architecture)
        self._model = model_class.from_pretrained(None, config=config, state_dict=weights, dtype=torch_dtype)
        self._model.to(self._device).eval()

    def continue_text(self, prompt: str, sampling: SamplingSettings, *, stream: bool = False) -> GeneratedText:
        """Generates text that continues the prompt. An empty prompt starts a new document.

        Args:
            stream: True to print the text to standard output while it is generated.

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
                Problem(key="--prompt", value=prompt, reason=reason, fix="use the run's tokenizer: --tokenizer DIR")
            )
        torch.manual_seed(sampling.seed)
        random_choice = {"do_sample": True, "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0}
        settings = GenerationConfig(
            max_new_tokens=sampling.max_new_tokens,
            eos_token_id=self._end or None,
            pad_token_id=self._end[0] if self._end else 0,
            **(random_choice if sampling.temperature else {"do_sample": False}),
        )
        prompt_ids = torch.tensor([ids], device=self._device)
        tokens = self._model.generate(
            prompt_ids,
            attention_mask=torch.ones_like(prompt_ids),
            generation_config=settings,
            streamer=TextStreamer(self._tokenizer, skip_prompt=True, skip_special_tokens=True) if stream else None,
        )
        new_ids: list[int] = tokens[0, len(ids) :].tolist()
        text: str = self._tokenizer.decode(new_ids, skip_special_tokens=True)
        ended = bool(new_ids) and new_ids[-1] in self._end
        return GeneratedText(text=text, tokens=len(new_ids), ended=ended, too_long=tokens.shape[1] > self._seq_length)


def _tokenizer(extra_files: ExtraFiles) -> tuple[PreTrainedTokenizerFast, list[int]]:
    """Returns the tokenizer among a run's files, and the ids of the tokens that end a document.

    Raises:
        ConfigError: there is no tokenizer among the files.
    """
    path = next((path for path in extra_files.copies if path.name == TOKENIZER), None)
    text = extra_files.texts.get(TOKENIZER, "")
    if path is None and not text:
        reason = "the run's tokenizer is not known: another tool prepared its data, or the data was removed"
        raise ConfigError(
            Problem(key="--tokenizer", reason=reason, fix="--tokenizer DIR, a folder with tokenizer.json")
        )
    eos = extra_files.settings.get("eos_token_id")
    end_ids = [token for token in (eos if isinstance(eos, list) else [eos]) if isinstance(token, int)]
    backend = read_backend(path) if path is not None else RustTokenizer.from_str(text)
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False), end_ids


def _device(requested: Device | None) -> torch.device:
    """Returns the requested device; if `requested` is None, a GPU if this machine has one, otherwise the CPU.

    Raises:
        EnvironmentProblem: A GPU is requested, but there is none.
    """
    has_gpu = torch.cuda.is_available()
    if requested == "cuda" and not has_gpu:
        reason, fix = "torch sees no GPU on this machine", "--device cpu; `canzona doctor` shows what is missing"
        raise EnvironmentProblem(Problem(key="--device", value=requested, reason=reason, fix=fix))
    return torch.device("cuda" if has_gpu and requested != "cpu" else "cpu")
