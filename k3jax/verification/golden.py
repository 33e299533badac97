"""Files of reference outputs: which quantities one holds, and what each is compared with.

`<prompt>.<quantity>` per prompt, `<prompt>.<quantity>.<layer>` (0-based) for states:

    input_ids                  [token]
    logits                     [token, vocabulary]
    layer_prefix               [layer, token, hidden]    running AttnRes prefix after each layer
    router_ids, router_weights [MoE layer, token, k]     ids ascending, weights in the same order
    kda_state                  [head, key, value]        after the prompt
    conv_state                 [q/k/v, 3, channel]       last three rows, oldest first
    decode_ids                 [step]                    fed one at a time after the prompt
    decode_logits              [step, vocabulary]
    kda_state_after_decode     [head, key, value]
"""

import dataclasses
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from k3jax.config import K3Config

WHOLE = ("input_ids", "logits", "layer_prefix", "router_ids", "router_weights", "decode_ids", "decode_logits")
BY_LAYER = ("kda_state", "conv_state", "kda_state_after_decode")
DECODE = ("decode_ids", "decode_logits", "kda_state_after_decode")
_NAME = re.compile(rf"(?P<prompt>[^.]+)\.(?:(?:{'|'.join(WHOLE)})|(?:{'|'.join(BY_LAYER)})\.\d+)")


class GoldenError(ValueError):
    """A file of reference outputs that cannot be used."""


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One prompt of a golden file."""

    name: str
    arrays: dict[str, np.ndarray]
    """By name without the prompt, e.g. 'logits' or 'kda_state.3'."""

    @property
    def input_ids(self) -> list[int]:
        """The prompt."""
        return self.arrays["input_ids"].tolist()

    @property
    def decode_ids(self) -> list[int]:
        """Tokens fed after the prompt; none when the file has no decode part."""
        return self.arrays["decode_ids"].tolist() if "decode_ids" in self.arrays else []

    def missing(self, config: K3Config) -> list[str]:
        """Quantities that a complete file would hold for this prompt and this one does not."""
        names = [*WHOLE, *(f"{kind}.{layer}" for kind in BY_LAYER for layer in config.kda_layers)]
        if not config.moe_layers:
            names = [name for name in names if not name.startswith("router")]
        return [name for name in names if name not in self.arrays]


@dataclasses.dataclass(frozen=True, slots=True)
class Golden:
    """The contents of a file."""

    cases: list[Case]
    unknown: list[str]
    """Names that mean nothing here."""


def arrays_of(path: str | Path) -> dict[str, np.ndarray]:
    """The arrays of an `.npz`. Raises `GoldenError` for a file that cannot be read."""
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (OSError, ValueError, zipfile.BadZipFile, EOFError, AttributeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise GoldenError(f"{path}: cannot be read ({reason}); expected an .npz of reference outputs") from error


def read(path: str | Path) -> Golden:
    """Reads an `.npz` of reference outputs.

    Raises `GoldenError` for an unreadable file, and for a prompt without `input_ids`.
    """
    arrays = arrays_of(path)
    matches = {name: match["prompt"] for name in arrays if (match := _NAME.fullmatch(name))}
    cases = [Case(prompt, dict(_of_prompt(arrays, matches, prompt))) for prompt in dict.fromkeys(matches.values())]
    for case in cases:
        _require_ids(path, case)
    if not cases:
        raise GoldenError(f"{path}: holds no prompt, expected names such as 0.input_ids and 0.logits")
    return Golden(cases, [name for name in arrays if name not in matches])


def _of_prompt(arrays: dict[str, np.ndarray], matches: dict[str, str], prompt: str) -> Iterator[tuple[str, np.ndarray]]:
    return ((name[len(prompt) + 1 :], arrays[name]) for name, owner in matches.items() if owner == prompt)


def _require_ids(path: str | Path, case: Case) -> None:
    for kind in ("input_ids", "decode_ids"):
        ids = case.arrays.get(kind)
        if ids is None and kind == "decode_ids" and not any(name.startswith(DECODE) for name in case.arrays):
            continue
        integers = ids is not None and (np.issubdtype(ids.dtype, np.integer) or ids.size == 0)
        if ids is None or ids.ndim != 1 or not integers:
            shown = "missing" if ids is None else f"{ids.dtype} {list(ids.shape)}"
            raise GoldenError(f"{path}: {case.name}.{kind} is {shown}, expected a list of integers")
