"""What comes back from the device, as Python numbers. Converted at once: row by row costs ten times as much."""

from collections.abc import Iterator

import jax
import numpy as np

from serving.device import Decoded, Prefilled
from serving.plan import Plan, RowResult, StepResult
from serving.request import Alternatives


def wanted(plan: Plan, prefill: Prefilled | None, decode: Decoded | None) -> Iterator[jax.Array]:
    """The arrays of a step that somebody will read."""
    if prefill is not None:
        yield prefill.answer
        if any(row.final and row.sequence.request.logprobs for row in plan.prefill):
            yield prefill.top
        if any(row.sequence.wants_prompt for row in plan.prefill):
            yield prefill.prompt
    if decode is not None:
        yield decode.answer
        if any(row.sequence.request.logprobs for row in plan.decode):
            yield decode.top


def read(plan: Plan, prefill: Prefilled | None, decode: Decoded | None, *, blocks: bool, top: int) -> StepResult:
    """Waits for the answers to `plan`. `blocks`: whether `decode` comes from `device.speculate`."""
    first, captures = ([], []) if prefill is None else _prefill(plan, prefill)
    if decode is None:
        return StepResult(first, captures, [])
    host = np.asarray(decode.answer)
    known = _blocks(plan, host) if blocks else tokens(plan, host)
    best = None
    for index, row in enumerate(plan.decode):
        if row.sequence.request.logprobs and known[index].tokens:
            best = np.asarray(decode.top).reshape(len(host), -1, 2 * top) if best is None else best
            count = len(known[index].tokens)
            known[index] = known[index]._replace(top=[_alternatives(best[row.row, n]) for n in range(count)])
    return StepResult(first, captures, known)


def tokens(plan: Plan, host: np.ndarray) -> list[RowResult]:
    """Rows of `device.decode`: token, bits of its log-probability, valid, finite."""
    token, _, valid, finite = host.T.tolist()
    logprob = np.ascontiguousarray(host[:, 1]).view(np.float32).tolist()
    said = []
    for row in plan.decode:
        at = row.row
        here = ([token[at]], [logprob[at]]) if valid[at] else ([], [])
        said.append(RowResult(*here, finite[at] != 0))
    return said


def _blocks(plan: Plan, host: np.ndarray) -> list[RowResult]:
    """Rows of `device.speculate`: count, finite, tokens, bits of their log-probabilities."""
    width = host.shape[1] // 2 - 1
    flags, tokens = host[:, :2].tolist(), host[:, 2 : 2 + width].tolist()
    logprobs = np.ascontiguousarray(host[:, 2 + width :]).view(np.float32).tolist()
    said = []
    for row in plan.decode:
        count, finite = flags[row.row]
        said.append(RowResult(tokens[row.row][:count], logprobs[row.row][:count], finite != 0))
    return said


def _prefill(plan: Plan, answer: Prefilled) -> tuple[list[RowResult], list[list[bool]]]:
    """Rows of `device.prefill`, and which of their captured states are finite."""
    host = np.asarray(answer.answer)
    numbers, logprobs = host.tolist(), np.ascontiguousarray(host[:, 1]).view(np.float32).tolist()
    said, captures = [], []
    for index, row in enumerate(plan.prefill):
        token, _, valid, finite, *states = numbers[index]
        result = RowResult([token], [logprobs[index]], finite != 0) if valid else RowResult([], [], finite != 0)
        if valid and row.sequence.request.logprobs:
            result = result._replace(top=[_alternatives(np.asarray(answer.top)[index])])
        if row.sequence.wants_prompt:
            result = result._replace(prompt=_prompt(np.asarray(answer.prompt)[index, : len(row.ids)]))
        said.append(result)
        captures.append([state != 0 for state in states[: len(row.captures)]])
    return said, captures


def _alternatives(packed: np.ndarray) -> Alternatives:
    """One row of `logprobs.alternatives`."""
    ids, bits = np.split(packed, 2)
    return Alternatives(ids.tolist(), bits.view(np.float32).tolist())


def _prompt(packed: np.ndarray) -> list[tuple[float, Alternatives]]:
    """One row of `logprobs.of_prompt`."""
    own = np.ascontiguousarray(packed[:, 0]).view(np.float32).tolist()
    return [(value, _alternatives(row)) for value, row in zip(own, packed[:, 1:], strict=True)]
