"""What a client wishes for, whatever the protocol: checked field by field, then made into the engine's requests."""

import asyncio
import dataclasses
import secrets
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

from k3jax.sampling import Sampling, SamplingError
from serving.request import Constraint, Request
from serving.retention import Retention, RetentionError
from serving.service.model_card import ModelCard
from serving.service.options import Limits
from serving.service.refusals import Refusal, invalid, unsupported
from serving.service.stops import StopStringChecker


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """One prompt to continue, once or several times."""

    id: str
    tokens: list[int]
    max_tokens: int | None = None
    """None fills the context."""
    n: int = 1
    sampling: Mapping[str, int | float] = dataclasses.field(default_factory=dict)
    """Only what the client has set."""
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logit_bias: Mapping[int, int | float] = dataclasses.field(default_factory=dict)
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    constraint: tuple[str, Any] | None = None
    """Kind and value for `serving.constraints.compile`."""
    from_first_token: bool = False
    """The constraint does not wait for the end of the reasoning."""
    salt: str = ""
    tenant: str | None = None
    priority: int = 0
    retention: str | None = None
    session: str | None = None
    pin_seconds: int | float = 0.0
    fields: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """What the client's protocol calls a field, where it differs from the name here."""

    def invalid(self, name: str, problem: str) -> Refusal:
        """A refusal that names the field as the client knows it."""
        return invalid(self.fields.get(name, name), problem)


def check(wish: Wish, card: ModelCard, limits: Limits) -> None:
    """Raises the `Refusal` of the first field that is wrong."""
    for name, wrong, problem in _problems(wish, card, limits):
        if wrong:
            raise wish.invalid(name, problem)
    if wish.stop and card.tokenizer is None:
        raise unsupported(wish.fields.get("stop", "stop"), "the checkpoint has no tokenizer; give stop token ids")
    for name, value in wish.sampling.items():
        try:
            Sampling.columns(1, **{name: value})
        except SamplingError as error:
            raise wish.invalid(name, str(error)) from error
    if wish.retention is not None:
        try:
            Retention.parse(wish.retention)
        except RetentionError as error:
            raise wish.invalid("retention", str(error)) from error


def _problems(wish: Wish, card: ModelCard, limits: Limits) -> Iterator[tuple[str, bool, str]]:
    vocab, longest = card.vocab_size, card.max_length
    ids = wish.tokens
    yield "tokens", not ids, "the prompt is empty, expected at least one token"
    yield "tokens", bool(ids) and not 0 <= min(ids) <= max(ids) < vocab, _out_of_range(ids, vocab)
    yield "tokens", len(ids) >= longest, f"{len(ids)} tokens leave no room in a context of {longest}"
    room = longest - len(ids)
    asked = wish.max_tokens
    yield "max_tokens", asked is not None and asked < 1, f"is {asked}, expected at least 1"
    yield "max_tokens", (asked or 1) > room, f"is {asked}, but {len(ids)} prompt tokens leave room for {room}"
    yield "n", not 1 <= wish.n <= limits.choices, f"is {wish.n}, expected 1 to {limits.choices}"
    most = room if asked is None else asked
    yield "min_tokens", wish.min_tokens > most, f"is {wish.min_tokens}, expected at most max_tokens ({most})"
    yield "stop", len(wish.stop) > limits.stop_strings, f"has {len(wish.stop)} strings, at most {limits.stop_strings}"
    yield "stop", any(not text for text in wish.stop), "has an empty string, expected at least one character"
    sizes = [len(text.encode("utf-8", "surrogatepass")) for text in wish.stop]
    yield "stop", max(sizes, default=0) > limits.stop_string_bytes, f"is longer than {limits.stop_string_bytes} bytes"
    yield "stop_ids", len(wish.stop_ids) > limits.stop_ids, f"has {len(wish.stop_ids)} ids, at most {limits.stop_ids}"
    yield "stop_ids", not _inside(wish.stop_ids, vocab), f"has an id outside 0 to {vocab - 1}"
    yield "logit_bias", len(wish.logit_bias) > limits.logit_bias, f"has {len(wish.logit_bias)} ids, too many"
    yield "logit_bias", not _inside(wish.logit_bias, vocab), f"has an id outside 0 to {vocab - 1}"
    yield (
        "logit_bias",
        not all(-100 <= value <= 100 for value in wish.logit_bias.values()),
        "has a value outside -100 to 100",
    )
    for name in ("logprobs", "prompt_logprobs"):
        count = getattr(wish, name)
        wrong = count is not None and not 0 <= count <= limits.alternatives
        yield name, wrong, f"is {count}, expected 0 to {limits.alternatives}"
    for name in ("id", "salt", "tenant", "session"):
        size = len((getattr(wish, name) or "").encode("utf-8", "surrogatepass"))
        yield name, size > limits.id_bytes, f"is {size} bytes long, at most {limits.id_bytes}"
    yield "constraint", _size(wish.constraint) > limits.constraint_bytes, f"is over {limits.constraint_bytes} bytes"
    yield "pin_seconds", not 0 <= wish.pin_seconds <= 86400, f"is {wish.pin_seconds}, expected 0 to 86400 seconds"


def _inside(ids: Any, vocab: int) -> bool:
    return not ids or 0 <= min(ids) <= max(ids) < vocab


def _size(constraint: tuple[str, Any] | None) -> int:
    value = constraint[1] if constraint is not None else ""
    texts = value if isinstance(value, tuple) else (value if isinstance(value, str) else "",)
    return sum(map(len, texts))


def _out_of_range(ids: list[int], vocab: int) -> str:
    at = next((i for i, token in enumerate(ids) if not 0 <= token < vocab), 0)
    return f"token {at} is {ids[at]}, expected an id below {vocab}" if ids else ""


async def requests_of(wish: Wish, card: ModelCard, deadline: int | float | None) -> list[Request]:
    """The engine's requests of a checked wish, one per choice."""
    constraints = await _constraints(wish, card)
    base = {name: value for name, value in card.default_sampling.items() if name not in wish.sampling}
    seed = int(wish.sampling.get("seed", secrets.randbits(32)))
    most = card.max_length - len(wish.tokens) if wish.max_tokens is None else wish.max_tokens
    retention = None if wish.retention is None else Retention.parse(wish.retention)
    return [
        Request(
            id=wish.id if wish.n == 1 else f"{wish.id}#{choice}",
            tokens=wish.tokens,
            max_tokens=most,
            sampling={**base, **wish.sampling, "seed": (seed + choice) % 2**32},
            stop_ids=wish.stop_ids,
            eos_ids=card.stop_ids,
            ignore_eos=wish.ignore_eos,
            min_tokens=wish.min_tokens,
            logit_bias=dict(wish.logit_bias),
            logprobs=wish.logprobs,
            prompt_logprobs=wish.prompt_logprobs if choice == 0 else None,
            constraint=constraints[choice],
            stop_checker=_stop_checker(wish, card),
            salt=wish.salt,
            tenant=wish.tenant,
            priority=wish.priority,
            deadline=deadline,
            retention=retention,
            session=wish.session,
            pin_seconds=wish.pin_seconds,
        )
        for choice in range(wish.n)
    ]


def _stop_checker(wish: Wish, card: ModelCard) -> StopStringChecker | None:
    if not wish.stop or card.tokenizer is None:
        return None
    return StopStringChecker(card.tokenizer, wish.stop, wish.min_tokens)


async def _constraints(wish: Wish, card: ModelCard) -> list[Constraint | None]:
    """One compiled constraint per choice, made in a worker thread: a large grammar takes milliseconds."""
    if wish.constraint is None:
        return [None] * wish.n
    kind, value = wish.constraint
    place = wish.fields.get("constraint", "constraint")
    if card.tokenizer is None:
        raise unsupported(f"{place}.{kind}", "the checkpoint has no tokenizer")
    constraints = structured(f"{place}.{kind}")

    def compiled() -> list[Constraint | None]:
        given, options = (kind, value, card.tokenizer, wish.tokens), {"from_first_token": wish.from_first_token}
        return [constraints.after(*given, **options) for _ in range(wish.n)]

    try:
        return await asyncio.to_thread(compiled)
    except ValueError as error:
        raise invalid(f"{place}.{kind}", str(error)) from error


def structured(field: str) -> ModuleType:
    """`serving.constraints`, an extra. Raises a `Refusal` that names the field when it is not installed."""
    try:
        from serving import constraints
    except ImportError as error:
        text = f"needs the extra 'structured' ({error}); install k3jax[structured]"
        raise unsupported(field, text) from error
    return constraints
