import numpy as np
import pytest

MERGES = (
    *(b"th", b"in", b"nk", b"re", b"sp", b"on", b"se", b"me", b"ss", b"ag", b"to", b"ol", b"ca", b"ke", b"ey", b"ar"),
    *(b'{"', b'":', b'",', b"fa", b"ls", b"tr", b"ue", b"nu", b"ll", b"ty", b"pe", b"gu", b"nt", b"  ", b"\n ", b'="'),
)


class StillSpeaking(AssertionError):
    """The limit of tokens is reached and nothing has ended."""


@pytest.fixture(scope="session")
def tokenizer():
    """Single bytes, a few pairs, and the control tokens: 544 ids."""
    from k3jax.tokenizer import Tokenizer, control, convert

    tokens = [bytes([byte]) for byte in range(256)] + list(MERGES)
    return Tokenizer(convert.build(tokens), tokens, control.default_names(len(tokens)))


@pytest.fixture(scope="session")
def speak(tokenizer):
    """What a model without any sense says under a constraint: random tokens, some of them that end things."""

    def draw(mask, rng):
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits)
        assert len(allowed), "nothing may be said and nothing has ended"
        wanted = [*tokenizer.eos_ids, tokenizer.control_id("<|close|>"), *tokenizer.encode('"')]
        likely = [token for token in wanted if bits[token]]
        return int(rng.choice(likely if likely and rng.random() < 0.4 else allowed))

    def run(constraint, seed, limit=2000):
        rng, said = np.random.default_rng(seed), []
        while not constraint.ended:
            if len(said) >= limit:
                raise StillSpeaking(tokenizer.decode(said))
            said.append(draw(constraint.mask(), rng))
            constraint.advance(said[-1:])
        return said

    return run
