"""Hugging Face's names of the units of model space (`canzona_cli.model.geometry`): one tensor each, the same rows."""

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType

from canzona_cli.config.schema import ModelConfig
from canzona_cli.model.families import EMBEDDING, FINAL_NORM, OUTPUT, family_of


@lru_cache(maxsize=4)
def tensor_names(model: ModelConfig) -> Mapping[str, str]:
    """Hugging Face's name by unit, in the order of the model: each weight once, so none of a tied output layer."""
    foreign = family_of(model).foreign
    names = {EMBEDDING: foreign.embedding}
    for layer in range(model.num_layers):
        names |= {
            f"layers.{layer}.{unit}": f"model.layers.{layer}.{name}.weight" for unit, name in foreign.layer.items()
        }
    names[FINAL_NORM.removeprefix("decoder.")] = foreign.final_norm
    if not model.tied_embeddings:
        names[OUTPUT] = foreign.output
    return MappingProxyType(names)
