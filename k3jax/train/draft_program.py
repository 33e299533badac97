"""`python -m k3jax.train draft`: the target writes texts, a draft learns to foresee them."""

import dataclasses
import functools
import json
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from k3jax import params
from k3jax.config import K3Config
from k3jax.dspark import files as draft_files
from k3jax.dspark.config import DraftGqa, DSparkConfig, MarkovKind, Rope
from k3jax.dspark.tensors import draft_specs
from k3jax.program import UsageError
from k3jax.runtime import Model
from k3jax.train import draft_run, draft_texts
from k3jax.train.draft_data import Prepared
from k3jax.train.draft_texts import Texts, join
from k3jax.train.report import Journal
from k3jax.train.run import Load, Save, restore, state_tree
from k3jax.train.specs import parameter_count

TOGETHER = 4096
"""Texts written at a time."""
PROMPT_SHARES = (16, 2, 8, 4)
"""A text starts with a 16th to a half of real text, batch by batch in turn: drafts work in short and long contexts."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan(draft_run.Recipe):
    """What to train, how, and on how much text; `seconds` include writing the texts."""

    out: Path
    length: tuple[int, ...] = (256,)
    """Tokens per text, the prompt included, of each kind of texts."""
    texts: tuple[int, ...] = (2048,)
    """Texts that the target writes, of each kind."""
    corpus: int = 0
    """Texts of the prepared data of each kind that are trained on beside those that the target wrote."""
    save_every: int = 500

    def __post_init__(self) -> None:
        if len(self.length) != len(self.texts):
            raise UsageError(f"{len(self.length)} lengths and {len(self.texts)} numbers of texts; give one for each")
        if len(set(self.length)) != len(self.length):  # each has a file of its own
            raise UsageError(f"lengths {self.length} repeat; add their numbers of texts up")
        if self.rounds < 1:
            raise UsageError(f"rounds is {self.rounds}, expected at least 1")
        if not self.corpus and not any(self.texts):
            raise UsageError("no texts to train on; give numbers of texts, or texts of the data (corpus)")


def draft_config(
    target: K3Config,
    *,
    block_size: int = 7,
    num_layers: int = 2,
    markov_rank: int = 64,
    markov_kind: MarkovKind = "vanilla",
    num_taps: int = 3,
    tap_layers: Sequence[int] = (),
    width: int = 2,
    kv_heads: int | None = None,
) -> DSparkConfig:
    """A small draft for a small target, with MLPs `width` times as wide as the stream.

    Taps are at even steps of its depth unless `tap_layers` names them; a third of the heads are for keys and values
    unless `kv_heads` says how many.
    """
    head_dim = 32
    heads = max(1, target.hidden_size // head_dim)
    even = sorted({(i + 1) * target.num_layers // (num_taps + 1) for i in range(num_taps)})
    return DSparkConfig(
        vocab_size=target.vocab_size,
        draft_vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        target_hidden_size=target.hidden_size,
        intermediate_size=width * target.hidden_size,
        num_layers=num_layers,
        attention=DraftGqa(num_heads=heads, num_kv_heads=kv_heads or (3 if heads % 3 == 0 else 1), head_dim=head_dim),
        rope=Rope(theta=1e4, interleaved=False),
        norm_eps=target.norm_eps,
        target_layer_ids=tuple(tap_layers) or tuple(even),
        mask_token_id=target.pad_token_id,
        block_size=block_size,
        markov_rank=markov_rank,
        markov_kind=markov_kind,
        confidence=True,
        confidence_with_markov=True,
    )


def gather_texts(model: Model, prepared: Prepared, plan: Plan, journal: Journal, turn: int = 0) -> list[Texts]:
    """Texts of each length of round `turn`: those that the target wrote, stored once in `plan.out`, and the data's.

    The same when a run goes on.
    """
    kinds = [kind for kind, count in enumerate(plan.texts) if count or plan.corpus]
    return [_texts(model, prepared, plan, journal, kind, turn) for kind in kinds]


def _texts(model: Model, prepared: Prepared, plan: Plan, journal: Journal, kind: int, turn: int) -> Texts:
    length = plan.length[kind]
    stored, parts = plan.out / f"texts-{length}-{turn}.npz", []
    if stored.is_file():
        with np.load(stored) as file:
            parts.append(Texts(file["ids"].astype(np.int32), file["begin"]))
    elif plan.texts[kind]:
        started = time.monotonic()
        parts.append(_written(model, prepared, plan, kind, turn))
        np.savez(stored, ids=parts[0].ids.astype(np.uint16), begin=parts[0].begin)
        size, took = int(parts[0].ids.size), round(time.monotonic() - started, 1)
        journal.write("texts", rows=len(parts[0].ids), length=length, tokens=size, took=took)
    if plan.corpus:
        ids = prepared.texts(np.random.default_rng((plan.seed, 1, length, turn)), plan.corpus, length)
        parts.append(Texts(ids, np.zeros(len(ids), np.int32)))
    return join(parts)


def _written(model: Model, prepared: Prepared, plan: Plan, kind: int, turn: int) -> Texts:
    length, total, parts = plan.length[kind], plan.texts[kind], []
    firsts = range(0, total, TOGETHER)
    for batch, first in enumerate(firsts, turn * len(firsts)):
        seed = (plan.seed, length, batch)
        begin = max(1, length // PROMPT_SHARES[batch % len(PROMPT_SHARES)])
        prompts = prepared.texts(np.random.default_rng(seed), min(TOGETHER, total - first), begin)
        noise = int(np.random.default_rng((*seed, 1)).integers(1 << 31))
        parts.append(draft_texts.write(model, prompts, length, noise))
    return join(parts)


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
    with Journal(plan.out / "log.jsonl") as journal:
        fresh = draft_run.create(config, plan.seed)
        fresh = fresh if initial is None else fresh._replace(masters=initial)
        state = start = _resume(plan, fresh, load)
        step = int(state.step)
        texts = functools.partial(gather_texts, model, prepared, plan, journal)
        for state, result in draft_run.train(model, config, start, texts, plan):
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
    lengths = {"acceptance_length": 1 + np.sum(values.survival), "tokens_per_step": 1 / values.pace}
    return figures | {name: round(float(length), 3) for name, length in lengths.items()}


def summary(plan: Plan, state: draft_run.DraftState, config: DSparkConfig) -> str:
    """One line for the terminal."""
    count = parameter_count(draft_specs(config))
    return json.dumps({"draft": str(plan.out / "draft"), "steps": int(state.step), "parameters": count})
