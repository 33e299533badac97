"""Which states of a request are kept for later ones.

prompt       the last hash-unit boundary before the prompt's last token: the same prompt again, or continued
interval=N   every N tokens: any long prefix, at a fixed price
marconi      where a prompt leaves a known one (second hit at the junction; arXiv 2411.19379, section 4.1)
decode-end   after the last generated token: the next turn of a conversation
supersede    (with decode-end) of the states that one conversation has left, all but one go first when memory is short
"""

import dataclasses

DEFAULT_INTERVAL = 32768
"""About the tokens whose FP8 latents weigh as much as one state of K3."""

NAMES = ("prompt", "interval", "marconi", "decode-end", "supersede")


class RetentionError(ValueError):
    """A retention policy that cannot be read or does not fit the hash unit."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """A combination of the policies."""

    prompt: bool = True
    interval: int = 0
    """Tokens between kept states; 0 keeps none for this reason."""
    marconi: bool = True
    decode_end: bool = True
    supersede: bool = True

    @classmethod
    def parse(cls, text: str) -> "Retention":
        """Reads `"prompt,interval=4096,marconi,decode-end"`; the empty text keeps nothing."""
        parts = dict.fromkeys(part.strip() for part in text.split(",") if part.strip())
        values = {name: value for name, _, value in (part.partition("=") for part in parts)}
        unknown = sorted(values.keys() - set(NAMES)) + [n for n, v in values.items() if v and n != "interval"]
        if unknown:
            raise RetentionError(f"retention {text!r}: {unknown[0]!r} is not one of {', '.join(NAMES)} (interval=N)")
        interval = values.get("interval", "0") or str(DEFAULT_INTERVAL)
        if not interval.isdecimal() or ("interval" in values and int(interval) < 1):
            raise RetentionError(f"retention {text!r}: interval is {interval!r}, expected a positive number of tokens")
        return cls(
            prompt="prompt" in values,
            interval=int(interval),
            marconi="marconi" in values,
            decode_end="decode-end" in values,
            supersede="supersede" in values,
        )

    def __str__(self) -> str:
        """The text that `parse` reads."""
        chosen = (self.prompt, self.interval, self.marconi, self.decode_end, self.supersede)
        texts = (name if name != "interval" else f"interval={self.interval}" for name in NAMES)
        return ",".join(text for text, on in zip(texts, chosen) if on)

    def check(self, unit: int) -> None:
        """Raises `RetentionError` unless states at the interval can be found again in units of `unit` tokens."""
        if self.interval % unit:
            raise RetentionError(
                f"retention interval is {self.interval} tokens, expected a multiple of the hash unit ({unit})"
            )

    def boundaries(self, *, unit: int, tokens: int, cached: int, reach: int) -> list[int]:
        """Where a prompt of `tokens` tokens leaves a state, in ascending order, all in `cached` + 1 to `tokens` - 1.

        `cached` tokens are reused, and the tree knows the pages of the first `reach` tokens.
        """
        last = (tokens - 1) // unit * unit
        wanted = set(range(self.interval, last + 1, self.interval)) if self.interval else set()
        if self.prompt:
            wanted.add(last)
        if self.marconi and reach > cached:
            wanted.add(min(reach // unit * unit, last))
        return sorted(boundary for boundary in wanted if boundary > cached)
