"""Text from a stream of token ids, a piece at a time."""

import codecs
from collections.abc import Iterable

from k3jax.tokenizer import Tokenizer


class Detokenizer:
    """Turns ids into text as they arrive, holding back a character whose bytes are not all there.

    The pieces joined equal `tokenizer.decode(all_ids, skip_special)`.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: int | Iterable[int]) -> str:
        """The text that `ids` complete; empty while a character is incomplete. ValueError out of range."""
        ids = [ids] if isinstance(ids, int) else list(ids)
        if self._skip_special:
            ids = [id_ for id_ in ids if not self._tokenizer.is_control(id_)]
        return self._decoder.decode(self._tokenizer.decode_bytes(ids))

    def finish(self) -> str:
        """What was held back, as U+FFFD; the detokenizer then starts anew."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text
