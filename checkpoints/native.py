"""The orbax checkpoint of a model: saved and restored group by group, on any topology.

    checkpoint/
      config.json             the released layout of the configuration
      checkpoint.json         format, version, model dtype and groups; written last
      parameters/<group>/     one orbax tree per decoder layer, and `model` for the rest

Everything is built in `checkpoint.partial/` and renamed at the end, so a checkpoint that can be seen is
complete. One group is in flight at a time, which bounds the host memory of saving and converting.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from checkpoints import orbax_adapter
from checkpoints.assemble import scale_problems
from checkpoints.errors import CheckpointError
from checkpoints.source import CONFIG, NATIVE_MANIFEST
from checkpoints.streaming import (
    Keys,
    Progress,
    Shardings,
    dotted,
    model_dtype,
    nested,
    reported,
    targets,
    tree_bytes,
)
from k3jax import params
from k3jax.config import K3Config

PARAMETERS = "parameters"
CONVERSION = "conversion.json"
"""Names what a partial checkpoint is converted from, so that a resumed run cannot mix two sources."""
FORMAT = {"format": "k3jax-orbax", "version": 1}


def save(path: str | Path, config: K3Config, tree: Mapping[str, Any], *, progress: Progress | None = None) -> None:
    """Saves a parameter tree at `path`, which must not exist yet.

    The model dtype is that of the arrays. Raises `CheckpointError` for a tree that is not `config`'s.
    """
    dtype = tree_dtype(config, tree)
    flat = dict(params.flatten(tree))
    partial = begin(path, resume=False)
    write_groups(partial, config, dtype, lambda specs: select(flat, specs), progress)
    commit(partial, path, config, dtype)


def restore(
    path: str | Path,
    shardings: Shardings | None = None,
    *,
    config: K3Config | None = None,
    dtype: Any = None,
    progress: Progress | None = None,
) -> tuple[K3Config, params.Tree]:
    """Restores a saved checkpoint onto `shardings` (default: the default device), whatever it was saved from.

    `dtype` is the model's: None keeps the saved one; float32 casts bfloat16 exactly, the opposite is refused.
    `config`, if given, must be the stored one.
    Names, shapes and dtypes of all groups are compared before data is read, because orbax would cast silently.
    Scales with which a weight is not finite are refused.
    """
    root = Path(path)
    stored, saved = read_manifest(root)
    if config not in (None, stored):
        raise CheckpointError(f"{root}: was saved with another configuration than the one given")
    total = tree_bytes(params.model_specs(stored), saved if dtype is None else model_dtype(dtype))
    return stored, nested(reported(stream(root, shardings, dtype=dtype), total, progress))


def stream(root: Path, shardings: Shardings | None = None, *, dtype: Any = None) -> Iterator[tuple[Keys, jax.Array]]:
    """Yields the parameters of a saved checkpoint, one group in memory at a time; see `restore`."""
    config, saved = read_manifest(root)
    wanted = saved if dtype is None else model_dtype(dtype)
    if wanted.itemsize < saved.itemsize:
        raise CheckpointError(f"{root}: saved in {saved}, which {wanted} cannot hold exactly; restore without dtype")
    placement = targets(dict(params.flatten(params.model_specs(config))), shardings)
    check_stored(root, config, saved)
    for group, specs in groups(config).items():
        tree = dict(params.flatten(_read_group(root / PARAMETERS / group, specs, placement, wanted)))
        scales = [keys for keys, spec in params.flatten(specs) if spec.init == "scale"]
        if problems := scale_problems((dotted(keys), tree[keys]) for keys in scales):
            raise CheckpointError(f"{root / PARAMETERS / group} cannot be used", problems)
        yield from tree.items()


def groups(config: K3Config) -> dict[str, params.Tree]:
    """Specs by group: each decoder layer, and everything else as `model`."""
    specs = params.model_specs(config)
    layers = specs.pop("layers")
    return {"model": specs} | {f"layer_{int(layer):03d}": {"layers": {layer: tree}} for layer, tree in layers.items()}


def begin(path: str | Path, *, resume: bool) -> Path:
    """The directory in which the checkpoint at `path` is built; emptied unless `resume`, but no conversion is lost."""
    root, partial = Path(path), partial_path(path)
    if not resume and (partial / CONVERSION).exists():
        raise CheckpointError(f"{partial}: is an unfinished conversion; finish it, remove it or choose another path")
    if root.exists():
        raise CheckpointError(f"{root}: already exists; remove it or choose another path")
    try:
        if jax.process_index() == 0:
            if partial.exists() and not resume:
                shutil.rmtree(partial)
            (partial / PARAMETERS).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{partial}: cannot be written ({error.strerror})") from error
    orbax_adapter.barrier("checkpoint-begin")
    return partial


def partial_path(path: str | Path) -> Path:
    """Where a checkpoint lies until it is complete."""
    root = Path(path)
    return root.with_name(root.name + ".partial")


def write_groups(
    partial: Path,
    config: K3Config,
    dtype: np.dtype[Any],
    produce: Callable[[params.Tree], params.Tree],
    progress: Progress | None = None,
) -> None:
    """Writes every group that is not complete yet; `produce` turns a group's specs into its arrays."""
    members = groups(config)
    sizes = {name: tree_bytes(specs, dtype) for name, specs in members.items()}
    done = 0
    for name, specs in members.items():
        target = partial / PARAMETERS / name
        if not orbax_adapter.is_complete(target):
            try:
                orbax_adapter.write(target, produce(specs))
            except (OSError, orbax_adapter.StoredError) as error:
                raise CheckpointError(f"{target}: cannot be written ({error})") from error
        done += sizes[name]
        if progress is not None:
            progress(done, sum(sizes.values()))


def commit(partial: Path, path: str | Path, config: K3Config, dtype: np.dtype[Any]) -> None:
    """Turns a finished partial directory into the checkpoint at `path`."""
    orbax_adapter.barrier("checkpoint-written")
    if jax.process_index() == 0:
        names = list(groups(config))
        for leftover in set((partial / PARAMETERS).iterdir()) - {partial / PARAMETERS / name for name in names}:
            shutil.rmtree(leftover)  # a group that was being written when an earlier run was killed
        manifest = {**FORMAT, "dtype": str(dtype), "groups": names}
        (partial / CONFIG).write_text(json.dumps(config.to_hf(), indent=2) + "\n", encoding="utf-8")
        (partial / NATIVE_MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        partial.rename(path)
    orbax_adapter.barrier("checkpoint-committed")


def read_manifest(root: Path) -> tuple[K3Config, np.dtype[Any]]:
    """Configuration and model dtype of a saved checkpoint."""
    if not (root / NATIVE_MANIFEST).is_file():
        unfinished = partial_path(root).exists() and not root.exists()
        hint = "a conversion that has not finished; run it again" if unfinished else f"no {NATIVE_MANIFEST} there"
        raise CheckpointError(f"{root}: is not a saved checkpoint ({hint})")
    try:
        manifest = json.loads((root / NATIVE_MANIFEST).read_text(encoding="utf-8"))
        seen = {key: manifest[key] for key in FORMAT}
        dtype = model_dtype(manifest["dtype"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{root / NATIVE_MANIFEST}: cannot be used ({error})") from error
    if seen != FORMAT:
        raise CheckpointError(f"{root / NATIVE_MANIFEST}: is {seen}, expected {FORMAT}")
    return K3Config.from_file(root / CONFIG), dtype


def tree_dtype(config: K3Config, tree: Mapping[str, Any]) -> np.dtype[Any]:
    """The model dtype of a complete tree of `config`; raises `CheckpointError` with everything that differs."""
    flat = dict(params.flatten(tree))
    embedding = flat.get(("embedding",))
    dtype = model_dtype(jnp.bfloat16 if embedding is None else embedding.dtype)
    found = {keys: (tuple(leaf.shape), jnp.dtype(leaf.dtype)) for keys, leaf in flat.items()}
    if problems := _differences(dict(params.flatten(params.model_specs(config))), found, dtype):
        raise CheckpointError("the parameters do not fit the configuration", problems)
    return dtype


def select(flat: Mapping[Keys, Any], specs: Mapping[str, Any]) -> params.Tree:
    """The part of a flat tree that `specs` describes, nested."""
    return nested((keys, flat[keys]) for keys, _ in params.flatten(specs))


def _differences(
    specs: Mapping[Keys, params.ParamSpec], found: Mapping[Keys, tuple[tuple[int, ...], Any]], dtype: np.dtype[Any]
) -> list[str]:
    problems = [f"{dotted(keys)}: missing" for keys in specs if keys not in found]
    problems += [f"{dotted(keys)}: unexpected parameter" for keys in found if keys not in specs]
    for keys in (keys for keys in specs if keys in found):
        (shape, seen), spec = found[keys], specs[keys]
        if shape != spec.shape:
            problems.append(f"{dotted(keys)}: shape is {list(shape)}, expected {list(spec.shape)}")
        if seen != (expected := spec.array_dtype(dtype)):
            problems.append(f"{dotted(keys)}: dtype is {seen}, expected {expected}")
    return problems


def check_stored(root: Path, config: K3Config, dtype: np.dtype[Any]) -> None:
    """Compares every stored name, shape and dtype with `config`; reads metadata only, raises `CheckpointError`."""
    problems: list[str] = []
    for group, members in groups(config).items():
        directory = root / PARAMETERS / group
        if not orbax_adapter.is_complete(directory):
            problems.append(f"{PARAMETERS}/{group}: missing or incomplete")
            continue
        try:
            found = orbax_adapter.describe(directory)
        except orbax_adapter.StoredError as error:
            problems.append(f"{PARAMETERS}/{group}: metadata cannot be read ({error})")
            continue
        problems += _differences(dict(params.flatten(members)), found, dtype)
    if problems:
        raise CheckpointError(f"{root} cannot be used", problems)


def _read_group(
    directory: Path, specs: Mapping[str, Any], placement: Mapping[Keys, Any], dtype: np.dtype[Any]
) -> params.Tree:
    default = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    abstract = nested(
        (keys, jax.ShapeDtypeStruct(spec.shape, spec.array_dtype(dtype), sharding=placement[keys] or default))
        for keys, spec in params.flatten(specs)
    )
    try:
        return orbax_adapter.read(directory, abstract)
    except orbax_adapter.StoredError as error:
        raise CheckpointError(f"{directory}: cannot be read ({error})") from error
