"""Training text: Python source and documentation found on this machine under permissive licences.

The standard library, and installed packages whose metadata states BSD, MIT, Apache or PSF terms. Files
are taken in an order that depends on their names alone, near-duplicates are dropped in that order, and
every fiftieth or so is held out; so the split is the same on every run and no held-out file is trained on.
"""

import hashlib
import lzma
import re
import sysconfig
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

SMALLEST, LARGEST = 400, 300_000
"""Bytes of a usable file."""
LONGEST_LINE = 400
HELD_OUT_SHARE = 0.02
SEEN_SHARE = 0.5
"""A file with more than this share of its distinct lines in earlier files is a near-duplicate."""

_SUFFIXES = (".py", ".md", ".rst")
_PERMISSIVE = re.compile(
    r"(new |modified |simplified |\d[- ]clause )*"
    r"(0?bsd([- ]\d[- ]clause)?|mit|apache([- ]2(\.0)?)?|psf([- ]2\.0)?|python([- ]2\.0)?|python software foundation)"
    r"( software)?( license| licence)?(,? (version )?2\.0)?"
)
_GENERATED = re.compile(r"generated (file|by|from|code)|do not edit|automatically generated", re.IGNORECASE)

RECORD_COLUMNS = ("package", "licence", "split", "file", "sha256")
"""Columns of the list of files; of the text's hash the first eight digits."""


class Source(NamedTuple):
    """One file of the corpus."""

    package: str
    licence: str
    name: str
    """Path inside the package's root, with '/'."""
    text: str

    @property
    def key(self) -> str:
        """What ordering and splitting depend on."""
        return hashlib.sha256(f"{self.package}/{self.name}".encode()).hexdigest()

    @property
    def held_out(self) -> bool:
        """Whether the file is for validation only."""
        return int(self.key[8:16], 16) < HELD_OUT_SHARE * 0x1_0000_0000

    @property
    def record(self) -> tuple[str, ...]:
        """The entry of the stored list of files: `RECORD_COLUMNS`."""
        digest = hashlib.sha256(self.text.encode()).hexdigest()[:8]
        return self.package, self.licence, "validation" if self.held_out else "training", self.name, digest


def is_permissive(licence: str) -> bool:
    """Whether every part of a licence expression or classifier is BSD, MIT, Apache or PSF."""
    parts = re.split(r"\s+(?:and|or)\s+|[;/]", licence.strip(), flags=re.IGNORECASE)
    cleaned = [re.sub(r"[()]|^the ", "", part.strip().lower()).strip() for part in parts]
    return bool(licence.strip()) and all(_PERMISSIVE.fullmatch(part) for part in cleaned)


def licence_of(distribution: metadata.Distribution) -> str | None:
    """The stated licence if it is permissive; an expression or classifiers go before free text."""
    fields = distribution.metadata
    expression = fields.get("License-Expression")
    if expression:
        return expression if is_permissive(expression) else None
    prefix = "License :: OSI Approved :: "
    classifiers = [
        value.removeprefix(prefix) for value in fields.get_all("Classifier") or () if value.startswith(prefix)
    ]
    if classifiers:
        return " AND ".join(classifiers) if all(map(is_permissive, classifiers)) else None
    free = (fields.get("License") or "").strip()
    return free if is_permissive(free) else None


def installed_files(distributions: Iterable[metadata.Distribution]) -> Iterator[tuple[str, str, str, Path]]:
    """(package, licence, name, path) of every source and documentation file of the permissive packages."""
    for distribution in distributions:
        licence = licence_of(distribution)
        if licence is None:
            continue
        package = distribution.metadata["Name"].lower()
        for file in distribution.files or ():
            if file.suffix in _SUFFIXES and file.parts[0] != ".." and "_vendor" not in file.parts:
                yield package, licence, file.as_posix(), Path(str(distribution.locate_file(file)))


def library_files(root: Path) -> Iterator[tuple[str, str, str, Path]]:
    """The standard library below `root`."""
    for path in root.rglob("*.py"):
        name = path.relative_to(root)
        if not {"site-packages", "dist-packages", "_vendor", "lib2to3"} & set(name.parts):
            yield "python", "PSF-2.0", name.as_posix(), path


def readable(path: Path) -> str | None:
    """The text of a file that looks hand-written; None for the rest."""
    try:
        raw = path.read_bytes()
        text = raw.decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    lines = text.split("\n")
    if not SMALLEST <= len(raw) <= LARGEST or max(map(len, lines)) > LONGEST_LINE or "\x00" in text:
        return None
    letters = sum(map(str.isalpha, text[:4000])) / len(text[:4000])
    return None if _GENERATED.search(text[:1000]) or letters < 0.35 else text.replace("\r\n", "\n")


def without_duplicates(sources: Iterable[Source]) -> Iterator[Source]:
    """Drops files that share most of their lines with files before them, in the order of their keys."""
    seen: set[int] = set()
    for source in sorted(sources, key=lambda source: source.key):
        lines = {hash(line) for line in map(str.strip, source.text.split("\n")) if len(line) >= 16}
        if len(lines) >= 5 and len(lines & seen) <= SEEN_SHARE * len(lines):
            seen |= lines
            yield source


def collect(limit: int | None = None, root: Path | None = None, listed: Path | None = None) -> list[Source]:
    """The corpus of this machine, or of the Python files below `root`; at most about `limit` bytes.

    With `listed`, a stored list of files, exactly those of them that are here unchanged.
    """
    if root is None:
        files = [*library_files(Path(sysconfig.get_paths()["stdlib"])), *installed_files(metadata.distributions())]
    else:
        files = [("local", "unstated", name, path) for _, _, name, path in library_files(root)]
    unique = {path: (package, licence, name) for package, licence, name, path in files}
    # In the order of the keys, which depend on names alone: what lies behind `limit` need not be read.
    ordered = sorted(unique.items(), key=lambda item: Source(*item[1], "").key)
    texts = ((entry, readable(path)) for path, entry in ordered)
    found = (Source(*entry, text) for entry, text in texts if text is not None)
    sources = without_duplicates(found) if listed is None else _only(found, listed)
    return list(_up_to(sources, limit))


def _only(sources: Iterable[Source], listed: Path) -> Iterator[Source]:
    """The sources with an entry in a stored list, each once."""
    with lzma.open(listed, "rt", encoding="utf-8") as file:
        wanted = {tuple(row) for row in (line.split("\t") for line in file.read().splitlines()[1:])}
    for source in sources:
        if source.record in wanted:
            wanted.remove(source.record)
            yield source


def _up_to(sources: Iterable[Source], limit: int | None) -> Iterator[Source]:
    used = 0
    for source in sources:
        if limit is not None and used >= limit:
            return
        used += len(source.text)
        yield source
