"""Reference counts of the two device pools. A reference has one owner; what nobody refers to is free.

References are of two kinds: those of users (running requests, states on their way) and those of the prefix cache. A
member that only the cache refers to is idle: it can be had by dropping cache entries.
"""

import collections
from collections.abc import Iterable


class Exhausted(Exception):
    """A pool has fewer free members than were asked for."""


class BooksError(AssertionError):
    """The references that a pool counts are not those that its owners hold."""


class Pool:
    """Members 1 to `size` - 1 of one resource: latent pages or state slots. Member 0 is the dummy, never handed out."""

    def __init__(self, name: str, size: int) -> None:
        if size < 2:
            raise ValueError(f"the pool of {name} has {size} members, expected at least 2 (number 0 is the dummy)")
        self.name = name
        self.size = size
        self.idle = 0
        """Members that only the cache refers to."""
        self._references = [0] * size
        self._cached = [0] * size
        self._free = list(range(size - 1, 0, -1))

    @property
    def capacity(self) -> int:
        """Members that can be handed out."""
        return self.size - 1

    @property
    def free(self) -> int:
        """Members that nobody refers to."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Members that somebody refers to."""
        return self.capacity - self.free

    @property
    def available(self) -> int:
        """Members that are free or can be made so."""
        return self.free + self.idle

    def take(self, count: int = 1) -> list[int]:
        """Hands out `count` free members with one reference each, all or none. Raises `Exhausted`."""
        if count > len(self._free):
            raise Exhausted(f"{count} {self.name} were asked for and {len(self._free)} of {self.capacity} are free")
        if not count:
            return []
        taken = self._free[-count:]
        del self._free[-count:]
        taken.reverse()
        for member in taken:
            self._references[member] = 1
        return taken

    def retain(self, members: Iterable[int]) -> None:
        """Adds a user's reference to members that are in use."""
        references, cached = self._references, self._cached
        for member in members:
            count = references[member]
            if count < 1:
                raise BooksError(f"{self.name} {member} gets a second owner but has no first one")
            self.idle -= count == cached[member]
            references[member] = count + 1

    def release(self, members: Iterable[int]) -> int:
        """Drops a user's reference of each member; returns how many became free."""
        references, cached, free, before = self._references, self._cached, self._free, len(self._free)
        for member in members:
            left = references[member] - 1
            if left < cached[member]:
                raise BooksError(f"{self.name} {member} is released but no user holds it")
            references[member] = left
            if not left:
                free.append(member)
            else:
                self.idle += left == cached[member]
        return len(free) - before

    def cache(self, members: Iterable[int]) -> None:
        """Adds a reference of the cache to members that are in use."""
        for member in members:
            if self._references[member] < 1:
                raise BooksError(f"{self.name} {member} is cached but has no owner")
            self._references[member] += 1
            self._cached[member] += 1

    def hand_over(self, member: int) -> None:
        """Turns a user's reference into one of the cache."""
        if self._references[member] <= self._cached[member]:
            raise BooksError(f"{self.name} {member} is handed over but no user holds it")
        self._cached[member] += 1
        self.idle += self._references[member] == self._cached[member]

    def uncache(self, members: Iterable[int]) -> int:
        """Drops a reference of the cache of each member; returns how many became free."""
        before = len(self._free)
        for member in members:
            if not self._cached[member]:
                raise BooksError(f"{self.name} {member} is dropped from the cache but is not in it")
            self._references[member] -= 1
            self._cached[member] -= 1
            if not self._references[member]:
                self.idle -= 1
                self._free.append(member)
        return len(self._free) - before

    def check_books(self, users: Iterable[int], cache: Iterable[int]) -> None:
        """Compares the counts with every reference that users and cache know of, repetitions included.

        Raises `BooksError` that names the members that differ.
        """
        kept = collections.Counter(cache)
        total = kept + collections.Counter(users)
        self._compare("references", self._references, total)
        self._compare("references of the cache", self._cached, kept)
        idle = sum(total[member] == count for member, count in kept.items())
        if idle != self.idle:
            raise BooksError(f"{self.idle} idle {self.name} are counted, expected {idle}")
        unreferenced = set(range(1, self.size)) - total.keys()
        if len(self._free) != len(unreferenced) or set(self._free) != unreferenced:
            raise BooksError(f"the free list of {self.name} has {len(self._free)} entries for {len(unreferenced)}")

    def _compare(self, what: str, counts: list[int], expected: collections.Counter[int]) -> None:
        wrong = {m: (n, expected[m]) for m, n in enumerate(counts) if n != expected[m]}
        if wrong:
            listing = ", ".join(f"{m}: counted {a}, held {b}" for m, (a, b) in list(wrong.items())[:8])
            raise BooksError(f"{len(wrong)} {self.name} have wrong counts of {what} ({listing})")
