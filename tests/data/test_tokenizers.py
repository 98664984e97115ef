"""Every tokenizer gives back the text it was given, and text never ends a document."""

import json
import json.decoder
import json.encoder
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from canzona_cli.core.errors import ConfigError
from canzona_cli.data.tokenizers import (
    END_OF_TEXT,
    MIN_VOCAB_SIZE,
    ByteTokenizer,
    JsonTokenizer,
    bytes_by_id,
    load_json_tokenizer,
    token_dtype,
    train_bpe,
)
from tests.cli.commands.support import ran
from tests.refusals import refused

SAMPLE = [Path(json.decoder.__file__).read_bytes(), Path(json.encoder.__file__).read_bytes(), "größer 数\n".encode()]


@pytest.fixture(scope="module")
def bpe() -> JsonTokenizer:
    return train_bpe(SAMPLE, 400)


def save(tokenizer: JsonTokenizer, path: Path, *, rename_eod: str = END_OF_TEXT) -> Path:
    path.write_text(tokenizer.to_json().replace(END_OF_TEXT, rename_eod), encoding="utf-8")
    return path


@given(st.binary(max_size=200))
def test_byte_ids_are_the_bytes_themselves(data: bytes) -> None:
    (ids,) = ByteTokenizer().encode_batch([data])
    assert ids.dtype == np.uint16
    assert ids.tolist() == list(data)


@given(text=st.text(max_size=200))
def test_tokens_stand_for_as_many_bytes_as_the_text_has(bpe: JsonTokenizer, text: str) -> None:
    (ids,) = bpe.encode_batch([text.encode()])
    lengths = bytes_by_id(bpe)
    assert lengths is not None
    assert lengths[ids].sum() == len(text.encode())
    assert lengths[bpe.eod] == 0
    assert bpe.decode(ids.tolist()) == text


def test_bpe_compresses_what_it_learnt_from_and_has_the_size_asked_for(bpe: JsonTokenizer) -> None:
    ids = bpe.encode_batch(SAMPLE)
    assert bpe.vocab_size == 400
    assert sum(len(one) for one in ids) < sum(map(len, SAMPLE)) / 2


def test_bpe_training_is_the_same_in_another_process_with_other_hashes_and_threads(bpe: JsonTokenizer) -> None:
    code = "from tests.data.test_tokenizers import SAMPLE, train_bpe; print(train_bpe(SAMPLE, 400).name)"
    other = ran(sys.executable, "-c", code, environment={"PYTHONHASHSEED": "7"})
    assert other.stdout.strip() == bpe.name


def test_a_small_sample_yields_a_smaller_vocabulary_not_a_padded_one() -> None:
    tokenizer = train_bpe([b"ab ab ab"], 1000)
    assert MIN_VOCAB_SIZE <= tokenizer.vocab_size < 300


def test_text_that_spells_the_end_of_a_document_does_not_end_it(bpe: JsonTokenizer) -> None:
    text = f"before {END_OF_TEXT} after"
    (ids,) = bpe.encode_batch([text.encode()])
    assert bpe.eod not in ids.tolist()
    assert bpe.backend.decode(ids.tolist(), skip_special_tokens=False) == text


def test_invalid_utf8_is_replaced_and_counted(bpe: JsonTokenizer) -> None:
    before = bpe.replaced
    (ids,) = bpe.encode_batch([b"a\xffb\xfec \xef\xbf\xbd"])  # the last one is a genuine U+FFFD
    assert bpe.backend.decode(ids.tolist(), skip_special_tokens=False) == "a\ufffdb\ufffdc \ufffd"
    assert bpe.replaced - before == 2


def test_a_tokenizer_file_that_truncates_and_pads_does_neither_here(bpe: JsonTokenizer, tmp_path: Path) -> None:
    from tokenizers import Tokenizer as RustTokenizer

    hub_like = RustTokenizer.from_str(bpe.to_json())
    hub_like.enable_truncation(max_length=4)
    hub_like.enable_padding(length=64)
    hub_like.save(str(tmp_path / "tokenizer.json"))
    loaded = load_json_tokenizer(str(tmp_path))  # the folder is enough
    assert loaded.name == f"{tmp_path.name}/tokenizer.json"
    (tmp_path / "config.json").write_text("{}")
    assert load_json_tokenizer(str(tmp_path)).name == tmp_path.name, "a folder of a model"
    for ours, theirs in zip(bpe.encode_batch(SAMPLE[:3]), loaded.encode_batch(SAMPLE[:3]), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_hugging_face_folder_means_what_transformers_reads_in_it(bpe: JsonTokenizer, tmp_path: Path) -> None:
    """Ids of text, and the id that ends a document, also of a token that only tokenizer_config.json has."""
    from transformers import PreTrainedTokenizerFast

    save(bpe, tmp_path / "bare.json")
    kept = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "bare.json"), eos_token="<|stop|>", bos_token="<s>")
    kept.save_pretrained(tmp_path / "kept")
    folder = tmp_path / "added"
    kept.save_pretrained(folder)
    save(bpe, folder / "tokenizer.json")  # without the added tokens, as folders of older versions are
    added = {400: "<|stop|>", 401: "<s>"}
    said = json.loads((folder / "tokenizer_config.json").read_text()) | {
        "added_tokens_decoder": {str(number): {"content": text, "special": True} for number, text in added.items()},
        "eos_token": {"content": "<|stop|>", "__type": "AddedToken"},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(said))
    for place in (tmp_path / "kept", folder):
        ours, theirs = load_json_tokenizer(str(place)), PreTrainedTokenizerFast.from_pretrained(place)
        assert (ours.eod, ours.vocab_size) == (theirs.convert_tokens_to_ids("<|stop|>"), len(theirs))
        for text in SAMPLE:
            assert ours.encode_batch([text])[0].tolist() == theirs.encode(text.decode(), add_special_tokens=False)
    assert load_json_tokenizer(str(folder), END_OF_TEXT).eod == bpe.eod, "what is typed counts"
    (folder / "tokenizer_config.json").write_text(json.dumps(said).replace('"400"', '"500"'))
    with pytest.raises(ConfigError, match="the id 401"):
        load_json_tokenizer(str(folder))


@pytest.mark.parametrize("token", ["</s>", "<|im_end|>", "<eos>"])
def test_the_end_of_a_document_is_found_by_its_usual_names(bpe: JsonTokenizer, tmp_path: Path, token: str) -> None:
    path = save(bpe, tmp_path / "t.json", rename_eod=token)
    assert load_json_tokenizer(str(path)).eod == bpe.eod


def test_an_unusual_end_of_document_is_named_and_accepted_with_eod(bpe: JsonTokenizer, tmp_path: Path) -> None:
    path = save(bpe, tmp_path / "t.json", rename_eod="<stop-here>")
    problems = refused(load_json_tokenizer, str(path))
    assert "--eod" in problems[0].fix
    assert "<stop-here>" in problems[0].fix
    assert load_json_tokenizer(str(path), "<stop-here>").eod == bpe.eod


def test_a_misspelt_eod_is_answered_with_the_right_one(bpe: JsonTokenizer, tmp_path: Path) -> None:
    path = save(bpe, tmp_path / "t.json")
    problems = refused(load_json_tokenizer, str(path), "<|endoftxt|>")
    assert END_OF_TEXT in problems[0].fix


@pytest.mark.parametrize("content", ["", "{}", "not json", '{"model": 3}'])
def test_a_file_that_is_no_tokenizer_is_a_config_error(tmp_path: Path, content: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match="not a tokenizer file"):
        load_json_tokenizer(str(path))


def test_a_hub_name_is_told_that_nothing_is_downloaded() -> None:
    with pytest.raises(ConfigError, match="nothing is downloaded") as caught:
        load_json_tokenizer("Qwen/Qwen3-0.6B")
    assert "hf download Qwen/Qwen3-0.6B" in caught.value.problems[0].fix


@pytest.mark.parametrize(("vocab_size", "dtype"), [(257, "uint16"), (65_499, "uint16"), (65_500, "int32")])
def test_ids_are_stored_as_narrow_as_megatron_does(vocab_size: int, dtype: str) -> None:
    assert token_dtype(vocab_size).__name__ == dtype


def test_bytes_that_are_no_text_are_shown_as_such() -> None:
    assert ByteTokenizer().decode([72, 105, 0xC3, 256, 500, 0xC3, 0xA9]) == "Hi\ufffd\ufffd\ufffd\u00e9"
