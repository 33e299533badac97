"""A device in plain Python whose next token depends on every cached token, so that any wrong page or slot shows."""

import hashlib

import numpy as np

from serving.plan import RowResult, StepResult
from serving.prefix_file import Prefix


def next_token(state, cached, vocab=50):
    """What the fake model says after `state` (what the recurrent state has seen) and `cached` (what the pages hold)."""
    text = repr((tuple(state), tuple(cached))).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:4]) % vocab


def solo(tokens, max_tokens, stop_ids=()):
    """The answer to a request that has the device to itself."""
    said = []
    while len(said) < max_tokens:
        known = [*tokens, *said]
        said.append(next_token(known, known))
        if said[-1] in stop_ids:
            break
    return said


class FakeRunner:
    def __init__(self, page_size, bad=(), drafting=False):
        self.drafting = drafting
        self.page_size = page_size
        self.bad = set(bad)
        """Tokens that turn a state into a NaN."""
        self.pages, self.states, self.token, self.alive = {}, {0: ()}, {}, {}
        self.dispatched = 0

    def dispatch(self, plan):
        self.dispatched += 1
        slots = [row.slot for row in (*plan.prefill, *plan.decode)]
        slots += [capture.slot for row in plan.prefill for capture in row.captures]
        assert len(slots) == len(set(slots)), "two rows write the same slot"
        assert 0 not in slots
        assert len({row.row for row in (*plan.prefill, *plan.decode)}) == len(plan.prefill) + len(plan.decode)
        for row in plan.prefill:
            if row.copy[1]:
                self.pages[row.copy[1]] = list(self.pages[row.copy[0]])
        starts = [() if row.start == 0 else self.states[row.source] for row in plan.prefill]
        prefill = [self.prefill(row, start) for row, start in zip(plan.prefill, starts)]
        finite = [[self.finite(self.states[c.slot]) for c in row.captures] for row in plan.prefill]
        return StepResult(prefill, finite, [self.decode(row) for row in plan.decode])

    def collect(self, ticket):
        return ticket

    def finite(self, state):
        return not self.bad & set(state)

    def prefill(self, row, state):
        assert row.ids, "an empty chunk"
        for offset, token in enumerate(row.ids):
            self.put(row.table, row.start + offset, token)
            state = (*state, token)
            for capture in row.captures:
                if capture.tokens == row.start + offset + 1:
                    self.states[capture.slot] = state
        self.states[row.slot] = state
        if not self.finite(state):
            self.alive[row.row] = False
            return RowResult([], [], False)
        return self.say(row, state) if row.final else RowResult([], [], True)

    def decode(self, row):
        if not self.alive[row.row]:
            return RowResult([], [], True)
        said = RowResult([], [], True)
        # As with drafts: some of the tokens that were asked for, and at least one.
        start = len(self.states[row.slot])
        assert start <= row.length
        count = 1 + next_token(self.states[row.slot], (), row.tokens)
        for step in range(count if self.drafting else row.tokens):
            if not self.alive[row.row]:
                break
            self.put(row.table, start + step, self.token[row.row])
            self.states[row.slot] = (*self.states[row.slot], self.token[row.row])
            more = self.say(row, self.states[row.slot])
            said = RowResult(said.tokens + more.tokens, said.logprobs + more.logprobs, True)
        return said

    def say(self, row, state):
        cached = [self.pages[row.table[i // self.page_size]][i % self.page_size] for i in range(len(state))]
        token = next_token(state, cached)
        self.token[row.row] = token
        self.alive[row.row] = token not in row.sequence.request.stops
        return RowResult([token], [-0.5], True)

    def put(self, table, position, token):
        page = self.pages.setdefault(table[position // self.page_size], [None] * self.page_size)
        page[position % self.page_size] = token

    def read(self, pages, slot):
        empty = [None] * self.page_size
        content = [[-1 if t is None else t for t in self.pages.get(page, empty)] for page in pages]
        return Reading(Prefix([np.asarray(content, np.int32)], [np.asarray(self.states[slot], np.int32)], []))

    def write(self, prefix, pages, slot):
        for page, content in zip(pages, prefix.latents[0].tolist(), strict=True):
            self.pages[page] = content
        self.states[slot] = tuple(prefix.states[0].tolist())


class Reading:
    def __init__(self, prefix):
        self.prefix = prefix

    def finish(self):
        return self.prefix
