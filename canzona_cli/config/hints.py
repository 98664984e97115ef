"""What the user probably meant."""

from collections.abc import Iterable
from difflib import SequenceMatcher, get_close_matches

from canzona_cli.config.settings import settings


def closest(word: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The known word most like `word`, or None when nothing is near."""
    names = {name.lower(): name for name in known}
    found = get_close_matches(word.lower(), names, n=1, cutoff=cutoff)
    return names[found[0]] if found else None


def closest_key(key: str) -> str | None:
    """The setting the user probably meant by `key`.

    `tp` means `parallel.tp`, `train.lr` means `optimizer.lr`: the last word counts most, then the whole. Words left
    out are forgiven: `num_heads` means `num_attention_heads`, though it looks more like `num_layers`.
    """
    flat = key.strip("/").replace("/", ".").replace("-", "_").lower()
    last = flat.rpartition(".")[2]
    known = settings()
    best, best_score = None, 0.0
    for name in known:
        section, _, own = name.rpartition(".")
        whole = SequenceMatcher(None, flat, name).ratio()
        word = SequenceMatcher(None, last, own).ratio()
        left_out = set(own.split("_")) - set(last.split("_"))
        if set(last.split("_")) < set(own.split("_")):
            word = max(word, 0.95 - 0.05 * len(left_out))
        score = max(whole, 0.9 * word + 0.1 * SequenceMatcher(None, flat.rpartition(".")[0], section).ratio())
        if score > best_score:
            best, best_score = name, score
    return best if best_score >= 0.7 else None
