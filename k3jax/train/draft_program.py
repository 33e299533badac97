"""`python -m k3jax.train draft`: the target writes texts, a draft learns to foresee them."""

import dataclasses
import json
import time
from pathlib import Path

import jax
import numpy as np
from jaxtyping import Int32

from k3jax import params
from k3jax.config import K3Config
from k3jax.dspark import files as draft_files
from k3jax.dspark.config import DraftGqa, DSparkConfig, MarkovKind, Rope
from k3jax.dspark.tensors import draft_specs
from k3jax.generation.decoding import Decoding, Request
from k3jax.runtime import Model
from k3jax.sampling import Sampling
from k3jax.train import draft_run
from k3jax.train.draft_data import Prepared
from k3jax.train.report import Journal
from k3jax.train.run import Load, Save, restore, state_tree
from k3jax.train.specs import parameter_count

TEXTS = "texts.npy"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan(draft_run.Recipe):
    """What to train, how, and on how much text; `seconds` include writing the texts."""

    out: Path
    rows: int = 16
    """Texts per step."""
    texts: int = 2048
    """Texts that the target writes."""
    length: int = 256
    """Tokens per text, the prompt included."""
    prompt: int = 32
    """Tokens of real text that each one starts with."""
    together: int = 1024
    """Texts written at a time."""
    corpus: int = 0
    """Texts of the prepared data that are trained on beside those that the target wrote."""
    save_every: int = 500


def draft_config(
    target: K3Config,
    *,
    block_size: int = 7,
    num_layers: int = 2,
    markov_rank: int = 64,
    markov_kind: MarkovKind = "vanilla",
    num_taps: int = 3,
    width: int = 2,
) -> DSparkConfig:
    """A small draft for a small target: taps at even steps of its depth, MLPs `width` times as wide as the stream."""
    head_dim = 32
    heads = max(1, target.hidden_size // head_dim)
    return DSparkConfig(
        vocab_size=target.vocab_size,
        draft_vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        target_hidden_size=target.hidden_size,
        intermediate_size=width * target.hidden_size,
        num_layers=num_layers,
        attention=DraftGqa(num_heads=heads, num_kv_heads=3 if heads % 3 == 0 else 1, head_dim=head_dim),
        rope=Rope(theta=1e4, interleaved=False),
        norm_eps=target.norm_eps,
        target_layer_ids=tuple(sorted({(i + 1) * target.num_layers // (num_taps + 1) for i in range(num_taps)})),
        mask_token_id=target.pad_token_id,
        block_size=block_size,
        markov_rank=markov_rank,
        markov_kind=markov_kind,
        confidence=True,
        confidence_with_markov=True,
    )


def write_texts(model: Model, prompts: Int32[np.ndarray, "N P"], plan: Plan) -> Int32[np.ndarray, "N S"]:
    """Continues each prompt at temperature 1 to `plan.length` tokens; ends of documents do not stop a text."""
    texts = np.zeros((len(prompts), plan.length), np.int32)
    texts[:, : prompts.shape[1]] = prompts
    filled = np.full(len(prompts), prompts.shape[1])
    for first in range(0, len(prompts), plan.together):
        rows = range(first, min(first + plan.together, len(prompts)))
        requests = [Request(prompts[row].tolist(), plan.length - prompts.shape[1], ()) for row in rows]
        sampling = Sampling.of(len(requests), temperature=1.0, seed=[plan.seed * 1_000_003 + row for row in rows])
        for event in Decoding(model, requests, sampling):
            row = first + event.row
            texts[row, filled[row]] = event.token
            filled[row] += 1
    return texts


def gather_texts(model: Model, prepared: Prepared, plan: Plan, journal: Journal) -> Int32[np.ndarray, "N S"]:
    """Texts that the target wrote, stored once in `plan.out`, and those of the data: the same when a run goes on."""
    stored = plan.out / TEXTS
    if stored.is_file():
        texts = np.load(stored)
    else:
        started = time.monotonic()
        prompts = prepared.mixed(np.random.default_rng(plan.seed), plan.texts, plan.prompt)
        texts = write_texts(model, prompts, plan)
        np.save(stored, texts)
        journal.write("texts", rows=len(texts), tokens=int(texts.size), took=round(time.monotonic() - started, 1))
    if not plan.corpus:
        return texts
    return np.concatenate([texts, prepared.texts(np.random.default_rng((plan.seed, 1)), plan.corpus, plan.length)])


def run(
    model: Model,
    config: DSparkConfig,
    prepared: Prepared,
    plan: Plan,
    save: Save,
    load: Load,
    initial: params.Tree | None = None,
) -> draft_run.DraftState:
    """Writes the texts (once), trains, and saves the draft; progress goes to `log.jsonl`.

    Goes on from the latest saved state in `plan.out`, if there is one, otherwise from the parameters `initial`.
    """
    begin = time.monotonic()
    with Journal(plan.out / "log.jsonl") as journal:
        texts = gather_texts(model, prepared, plan, journal)
        fresh = draft_run.create(config, plan.seed)
        fresh = fresh if initial is None else fresh._replace(masters=initial)
        state = start = _resume(plan, fresh, load)
        step = int(state.step)
        left = None if plan.seconds is None else max(1.0, plan.seconds - (time.monotonic() - begin))
        recipe = dataclasses.replace(plan, seconds=left)
        for state, result in draft_run.train(model, config, start, texts, recipe, plan.rows):
            step += 1
            if step % 20 == 0:
                journal.write("step", step=step, total=plan.steps, **_figures(result))
            if step % plan.save_every == 0:
                _save(plan, config, step, state, save)
        _save(plan, config, step, state, save)
    return state


def _save(plan: Plan, config: DSparkConfig, step: int, state: draft_run.DraftState, save: Save) -> None:
    path = plan.out / f"state-{step:06d}"
    if not path.exists():
        save(path, state_tree(state))
    draft_files.save(plan.out / "draft", config, state.masters)


def _resume(plan: Plan, fresh: draft_run.DraftState, load: Load) -> draft_run.DraftState:
    """The latest complete state of the run, otherwise `fresh`."""
    saved = sorted(path for path in plan.out.glob("state-*") if path.name.removeprefix("state-").isdigit())
    return restore(load, saved[-1], fresh) if saved else fresh


def _figures(result: draft_run.DraftLosses) -> dict[str, float]:
    values = jax.device_get(result)
    names = ("loss", "cross_entropy", "variation", "confidence")
    figures = {name: round(float(getattr(values, name)), 4) for name in names}
    return figures | {"acceptance_length": round(float(1 + np.sum(values.survival)), 3)}


def summary(plan: Plan, state: draft_run.DraftState, config: DSparkConfig) -> str:
    """One line for the terminal."""
    count = parameter_count(draft_specs(config))
    return json.dumps({"draft": str(plan.out / "draft"), "steps": int(state.step), "parameters": count})
