"""The Python door: load a checkpoint, generate, look inside.

model = k3jax.load()
for piece in k3jax.generate(model, "def main(", max_tokens=64):
    print(piece, end="", flush=True)
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Unpack

import jax.numpy as jnp
import numpy as np

from k3jax import params, sharding, tokenizer
from k3jax.cache import KvCacheDtype
from k3jax.config import ConfigError, K3Config
from k3jax.dspark import files, quantized
from k3jax.dspark.config import DSparkConfig
from k3jax.dspark.model import TARGET_IDS, DSpark
from k3jax.dspark.tensors import IGNORED, TARGET_OFFSETS, draft_specs
from k3jax.generation import prompt as prompt_module
from k3jax.generation.decoding import Decoding, Request
from k3jax.generation.prompt import Prompt, PromptError
from k3jax.generation.results import Result, Statistics
from k3jax.generation.text_stream import GenerationError, Stream, Writer
from k3jax.runtime import Model
from k3jax.sampling import Sampling, SamplingError, SamplingOptions
from k3jax.speculation.drafters import Draft, DSparkDrafter, NgramDrafter
from k3jax.speculation.widths import Widths, WidthsError
from k3jax.states import States
from pallas.dispatch import ORDER as BACKENDS
from pallas.dispatch import Implementation

__all__ = [
    "GenerationError",
    "Model",
    "PromptError",
    "Result",
    "SamplingError",
    "States",
    "Statistics",
    "Stream",
    "generate",
    "load",
    "load_draft",
]


NGRAM_BLOCK = 7
"""Tokens that prompt lookup proposes per step."""


def shipped_checkpoint() -> Path:
    """The small model that comes with the package."""
    import checkpoints

    return Path(checkpoints.__path__[0]) / "nano"


def load(
    path: str | Path | None = None,
    *,
    dtype: Any = jnp.bfloat16,
    mesh: str | None = None,
    implementation: Implementation = None,
    max_length: int | None = None,
    draft: str | Path | None = None,
    draft_widths: Sequence[int] = (),
    draft_weights: str = "auto",
    kv_cache_dtype: KvCacheDtype = "auto",
) -> Model:
    """Loads a checkpoint (default: the shipped nano) and the tokenizer in its directory, if there is one.

    `dtype` is that of activations and of the weights that are not fixed in float32 or MXFP4; float32 computes at full
    precision. `mesh` names a preset of `sharding.PRESETS`. `implementation` forces one kernel backend. `max_length`
    caps prompt and output together (default: the model's own limit). `draft` makes decoding speculative: a DSpark
    directory, "auto" for the one named NAME-dspark beside the checkpoint if it exists, or "ngram" for prompt lookup.
    `draft_widths` (ascending, e.g. 2, 4, 8) lets the draft's confidence choose how many tokens a step verifies.
    `draft_weights` "int8" keeps a DSpark draft's matrices in 8 bits, which changes how many of its tokens stand and not
    what is said; "model" keeps them in `dtype`; "auto" is int8 for bfloat16 on a GPU.
    `kv_cache_dtype` "fp8" keeps the latents of attention in 8 bits (e4m3): half the memory of bfloat16, less precise.
    Raises `CheckpointError`, `ConfigError`, `ShardingError` or `ValueError`, each naming what is wrong.
    """
    import checkpoints

    _require_backend(implementation)
    root = shipped_checkpoint() if path is None else Path(path)
    layout = None if mesh is None else sharding.layout(mesh)
    config: K3Config | None = None
    placement = None
    if layout is not None:
        from checkpoints.checking import read_config

        config = read_config(root)
        placement = layout.parameters(params.model_specs(config))
    config, tree = checkpoints.load(root, config, dtype=dtype, shardings=placement)
    model = Model.of(
        config,
        tree,
        tokenizer=_tokenizer(root),
        layout=layout,
        implementation=implementation,
        max_length=max_length,
        path=root,
        kv_cache_dtype=kv_cache_dtype,
    )
    widths = Widths(tuple(draft_widths)) if draft_widths else None
    return dataclasses.replace(model, draft=_draft(model, root, draft, widths, draft_weights))


def _require_backend(name: str | None) -> None:
    """Raises ValueError for a kernel backend that no op has."""
    if name not in (None, *BACKENDS):
        raise ValueError(f"implementation is {name!r}, expected {', '.join(BACKENDS)}, or None for the best")


def _draft(
    model: Model, root: Path, which: str | Path | None, widths: Widths | None = None, weights: str = "auto"
) -> Draft | None:
    """The draft that `load` was asked for."""
    if which in (None, "none", "ngram") and widths is not None:
        raise WidthsError("draft widths need a DSpark draft with a confidence head; leave them out")
    if which is None or which == "none":
        return None
    if which == "ngram":
        return Draft(NgramDrafter(block_size=NGRAM_BLOCK), ())
    if which == "auto":
        path = root.with_name(f"{root.name}-dspark")
        if widths is not None and not path.is_dir():
            raise WidthsError(f"draft widths need a draft, and there is none at {path}; leave them out")
        return load_draft(path, model, widths, weights) if path.is_dir() else None
    return load_draft(which, model, widths, weights)


def load_draft(path: str | Path, model: Model, widths: Widths | None = None, weights: str = "auto") -> Draft:
    """Loads a DSpark draft for `model`. `widths` makes the number of verified drafts adaptive; `weights`: see `load`.

    Raises `ConfigError` or `CheckpointError` with everything that is wrong, a draft of another target included.
    """
    config = DSparkConfig.from_file(path)
    if problems := list(config.misfits(model.config)):
        raise ConfigError(f"{path} is not a draft of this model", problems)
    if widths is not None:
        widths.require(config.block_size, confidence=config.confidence)
    head = model.graph.merge(model.leaves).head[...]
    change = functools.partial(quantized.quantize, head=head if model.graph.layout is None else None)
    change = change if quantized.chosen(weights, model.dtype) == "int8" else lambda tree: tree
    draft = read_draft(path, config, dtype=model.dtype, place=model.place, head=head, change=change)
    return Draft(*DSparkDrafter.of(draft), widths=widths)


def read_draft(
    path: str | Path,
    config: DSparkConfig,
    *,
    dtype: Any,
    place: Callable[[Any], Any] = lambda tree: tree,
    head: Any = None,
    change: Callable[[params.Tree], params.Tree] = lambda tree: tree,
) -> DSpark:
    """The draft at `path` as a module. `head` is the target's, for a reduced vocabulary without a head of its own.

    `change` is what becomes of the parameters before they are placed.
    Raises `ConfigError` or `CheckpointError` with everything that is wrong.
    """
    from checkpoints.checking import require, tensor_problems
    from checkpoints.source import find_source
    from checkpoints.streaming import load_tree

    source, problems = find_source(path)
    specs = draft_specs(config, set(source.tensors))
    expected = params.hf_tensors(specs)
    offsets = next((name for name in source.tensors if name.removeprefix("model.") == TARGET_OFFSETS), None)
    skipped = tuple(f"{prefix}{name}" for prefix in ("", "model.") for name in IGNORED)
    skipped = (*(name for name in skipped if name not in expected), *(() if offsets is None else (offsets,)))
    problems += list(tensor_problems(source, expected, skipped))
    reduced = config.draft_vocab_size < config.vocab_size
    if reduced and offsets is None:
        problems.append(f"{TARGET_OFFSETS}: missing, expected integers [{config.draft_vocab_size}] (draft_vocab_size)")
    require(path, source, problems)
    tree = load_tree(source, specs, dtype=dtype)
    if offsets is not None:
        ids = files.target_ids(source.directory / source.tensors[offsets][0], offsets, config)
        tree[TARGET_IDS] = jnp.asarray(ids)
        if "head" not in tree and head is not None:
            tree["head"] = head[ids]
    return DSpark(config, place(change(tree)))


def _tokenizer(root: Path) -> tokenizer.Tokenizer | None:
    """The tokenizer in a checkpoint's directory; None when there is none."""
    try:
        return tokenizer.load(root if root.is_dir() else root.parent)
    except FileNotFoundError:
        return None


def generate(
    model: Model,
    prompt: Prompt | Sequence[Prompt],
    *,
    max_tokens: int = 256,
    stop: str | Sequence[str] = (),
    stop_ids: Iterable[int] = (),
    ignore_eos: bool = False,
    as_ids: bool = False,
    **sampling: Unpack[SamplingOptions],
) -> Stream[Any]:
    """Continues a prompt, or several at once.

    Gives an iterator: of pieces of text for one prompt, of (row, piece) for a list of prompts; of token ids with
    `as_ids` or without a tokenizer. Its `result` (`results`) and `statistics` hold the final record.

    A row ends at an end-of-message or end-of-document id (unless `ignore_eos`), at one of `stop_ids`, before one of
    the `stop` strings, after `max_tokens`, or when `model.max_length` positions are full.
    Sampling settings (see `sampling.Sampling`: temperature, top_k, top_p, min_p, the penalties, seed) are one value or
    one per row; with a single seed, row `i` gets `seed + i`. The default is temperature 1.

    Raises `PromptError` and `SamplingError` at once; a row whose logits are not finite ends, and `GenerationError`
    names it when all other rows are through.
    """
    batch = prompt_module.is_batch(prompt)
    prompts = list(prompt) if batch else [prompt]
    names = [f"prompt {row}" for row in range(len(prompts))] if batch else ["prompt"]
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    if "" in stops:
        raise PromptError("a stop string is empty, expected at least one character")
    if stops and model.tokenizer is None:
        raise prompt_module.PromptError("stop strings need a tokenizer and the checkpoint has none; give stop_ids")
    ends = (*stop_ids, *(() if ignore_eos else model.stop_ids))
    requests = [_request(model, text, name, max_tokens, ends) for text, name in zip(prompts, names)]
    settings = Sampling.of(len(requests), **_row_seeds(sampling, len(requests)))
    writers = [Writer(model.tokenizer, stops, len(request.ids)) for request in requests]
    ids_only = as_ids or model.tokenizer is None
    return Stream(Decoding(model, requests, settings, model.draft), writers, as_ids=ids_only, batch=batch)


def _request(model: Model, text: Prompt, name: str, max_tokens: int, stop_ids: tuple[int, ...]) -> Request:
    """A checked row, its length cut to what the model can hold."""
    if max_tokens < 1:
        raise prompt_module.PromptError(f"max_tokens is {max_tokens}, expected at least 1")
    ids = prompt_module.read(text, model.tokenizer, model.config.vocab_size, name)
    prompt_module.require_room(ids, model.max_length, name, tokens=1)
    return Request(ids, min(max_tokens, model.max_length - len(ids)), stop_ids)


def _row_seeds(sampling: SamplingOptions, rows: int) -> SamplingOptions:
    """One seed per row, so that a repeated prompt gets different answers."""
    seed = sampling.get("seed", 0)
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or not 0 <= seed < 2**32:
        return sampling  # a list of seeds, or one that `Sampling.of` will refuse
    return {**sampling, "seed": [(int(seed) + row) % 2**32 for row in range(rows)]}
