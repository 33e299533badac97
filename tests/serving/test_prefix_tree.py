"""The cache against a model that knows only which prefixes are stored and what each page holds."""

import collections

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from serving.costs import ModelCost
from serving.hashing import HashChain, root_digest
from serving.prefix_cache import CacheOptions, PrefixCache

COST = ModelCost(flops_per_token=100.0, flops_per_pair=1.0, latent_bytes_per_token=1.0, state_bytes=50.0)


class Machine(RuleBasedStateMachine):
    """Requests come and go one at a time or stay for a while; contents of pages are token ids."""

    @initialize(
        unit=st.integers(1, 4),
        page=st.integers(1, 4),
        pages=st.integers(10, 24),
        slots=st.integers(4, 8),
        alpha=st.sampled_from([0.0, 0.5, 3.0]),
    )
    def begin(self, unit, page, pages, slots, alpha):
        self.unit, self.page = unit, page
        self.cache = PrefixCache(CacheOptions(pages=pages, slots=slots, page_size=page, unit=unit), COST, alpha=alpha)
        self.stored = {}  # digest -> the tokens of the prefix
        self.memory = collections.defaultdict(lambda: [None] * page)
        self.states = {}  # slot -> the tokens that its state has seen
        self.running = []
        self.now = 0.0
        self.cache.events.listen(self.follow)

    def follow(self, event):
        if type(event).__name__ == "Removed":
            assert self.stored.pop(event.name) is not None

    def longest(self, tokens, limit):
        fits = [s for s in self.stored.values() if len(s) <= limit and tuple(tokens[: len(s)]) == s]
        return max(map(len, fits), default=0)

    def reach(self, tokens):
        whole = len(tokens) // self.unit * self.unit
        for length in range(whole, 0, -self.unit):
            if any(s[:length] == tuple(tokens[:length]) for s in self.stored.values()):
                return length
        return 0

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=24),
        bounds=st.lists(st.integers(1, 24), max_size=3),
        stay=st.booleans(),
        salt=st.sampled_from(["", "tenant"]),
    )
    def request(self, tokens, bounds, stay, salt):
        tokens = [token + 2 * bool(salt) for token in tokens]  # the model tells tenants apart by their tokens
        self.now += 1
        chain = HashChain(root_digest("m", salt), self.unit, tokens)
        match = self.cache.match(chain, len(tokens) - 1)
        assert match.tokens == self.longest(tokens, len(tokens) - 1)
        assert max(match.reach, match.tokens) // self.unit * self.unit == self.reach(tokens)
        hit = self.cache.hold(match, self.now)
        table, start = ([], 0) if hit is None else (hit.pages, hit.tokens)
        if hit is not None:
            held = [token for page in table for token in self.memory[page]][:start]
            assert held == tokens[:start], "pages of another prefix"
            assert self.states[hit.slot] == tuple(tokens[:start]), "state of another prefix"
            self.cache.slots.release([hit.slot])
        self.run(chain, tokens, table, start, [b for b in sorted(set(bounds)) if start < b <= len(tokens)], stay)

    def run(self, chain, tokens, table, start, bounds, stay):
        whole = start // self.page
        needed = -(-len(tokens) // self.page) - whole
        fresh = self.cache.take_pages(needed, self.now)
        if fresh is None:
            self.cache.pages.release(table)
            return
        if start % self.page:
            self.memory[fresh[0]] = list(self.memory[table[whole]])
            self.cache.pages.release(table[whole:])
        table = table[:whole] + fresh
        for position in range(start, len(tokens)):
            self.memory[table[position // self.page]][position % self.page] = tokens[position]
        for bound in bounds:
            self.keep(chain, tokens, bound, table)
        if stay:
            self.running.append(table)
        else:
            self.cache.pages.release(table)

    def keep(self, chain, tokens, bound, table):
        slot = self.cache.take_slot(self.now)
        if slot is None:
            return
        self.states[slot] = tuple(tokens[:bound])
        known = tuple(tokens[:bound]) in self.stored.values()
        assert (self.cache.store(chain, bound, table, slot, self.now) is None) == known
        if known:
            self.cache.slots.release([slot])
            return
        depth, rest = divmod(bound, self.unit)
        self.stored[chain.tail(depth, rest) if rest else chain.units[depth - 1]] = tuple(tokens[:bound])

    @rule(index=st.integers(0, 9))
    def finish(self, index):
        if self.running:
            self.cache.pages.release(self.running.pop(index % len(self.running)))

    @rule(pages=st.integers(1, 6))
    def memory_is_short(self, pages):
        taken = self.cache.take_pages(pages, self.now)
        if taken is not None:
            self.cache.pages.release(taken)

    @rule(index=st.integers(0, 9))
    def purge(self, index):
        nodes = [node for node in self.cache.tree if node.slot]
        if nodes:
            self.cache.purge(nodes[index % len(nodes)], "non_finite")

    @invariant()
    def books(self):
        if hasattr(self, "cache"):
            self.cache.check_books([page for table in self.running for page in table])
            assert self.cache.entries == len(self.stored)
            assert sorted(self.stored.values()) == sorted(self.states[n.slot] for n in self.cache.tree if n.slot)

    def teardown(self):
        if hasattr(self, "cache"):
            for table in self.running:
                self.cache.pages.release(table)
            self.cache.flush()
            self.cache.check_books()
            assert self.cache.tree.nodes == 0
            assert not self.cache.pages.used
            assert not self.cache.slots.used


Machine.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestAgainstModel = Machine.TestCase


def chain(tokens, unit=2, salt=""):
    return HashChain(root_digest("m", salt), unit, tokens)


def admit(cache, tokens, bound, now=0.0):
    table = cache.take_pages(-(-len(tokens) // cache.options.page_size), now)
    slot = cache.take_slot(now)
    stored = cache.store(chain(tokens, cache.options.unit), bound, table, slot, now)
    cache.pages.release(table)
    if stored is None:
        cache.slots.release([slot])
    return stored is not None


def test_every_leaf_has_a_state_and_pages_go_with_it(make_cache):
    cache = make_cache()
    admit(cache, [1, 2, 3, 4, 5, 6], 6)
    admit(cache, [1, 2, 3, 4, 9, 9], 6)
    assert cache.tree.nodes == 3
    node = cache.match(chain([1, 2, 3, 4, 9, 9, 0]), 6).node
    cache.purge(node, "non_finite")
    assert cache.tree.nodes == 1
    cache.check_books()


def test_the_same_prefix_is_stored_once(make_cache):
    cache = make_cache()
    assert admit(cache, [1, 2, 3, 4], 4)
    assert not admit(cache, [1, 2, 3, 4], 4)
    cache.check_books()
    assert cache.slots.used == 1


def test_an_empty_prefix_is_refused(make_cache):
    cache = make_cache()
    with pytest.raises(ValueError, match="empty prefix"):
        cache.store(chain([]), 0, [], cache.take_slot(0.0), 0.0)


def test_salts_do_not_meet(make_cache):
    cache = make_cache()
    admit(cache, [1, 2, 3, 4], 4)
    other = cache.match(chain([1, 2, 3, 4, 5], salt="tenant"), 4)
    assert (other.tokens, other.reach) == (0, 0)
