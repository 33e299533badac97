import pytest

from serving.hashing import HashChain, ImageSpan, root_digest

ROOT = root_digest("k3")


@pytest.mark.parametrize("pieces", [[10], [1] * 10, [3, 7], [4, 4, 2]])
def test_pieces_make_the_same_chain(pieces):
    tokens = list(range(100, 110))
    whole = HashChain(ROOT, 4, tokens)
    grown = HashChain(ROOT, 4)
    for piece in pieces:
        grown.extend(tokens[len(grown) : len(grown) + piece])
    assert grown.units == whole.units
    assert len(whole.units) == 2


def test_a_digest_covers_everything_before_it():
    base = HashChain(ROOT, 2, [1, 2, 3, 4, 5, 6]).units
    changed = HashChain(ROOT, 2, [1, 9, 3, 4, 5, 6]).units
    assert not set(base) & set(changed)
    later = HashChain(ROOT, 2, [1, 2, 3, 4, 5, 9]).units
    assert later[:2] == base[:2]
    assert later[2] != base[2]


def test_models_and_tenants_have_chains_of_their_own():
    roots = [root_digest("k3"), root_digest("k3", "a"), root_digest("k3", "b"), root_digest("k3a"), root_digest("nano")]
    assert len({HashChain(root, 2, [1, 2]).units[0] for root in roots}) == len(roots)


def test_images_with_the_same_placeholders_differ():
    tokens = [7] * 12

    def units(digest, start):
        return HashChain(ROOT, 4, tokens, [ImageSpan(start, 3, digest)]).units

    cat, dog, moved, none = units(b"cat", 5), units(b"dog", 5), units(b"cat", 4), HashChain(ROOT, 4, tokens).units
    assert cat[0] == dog[0] == moved[0] == none[0]
    assert len({cat[1], dog[1], moved[1], none[1]}) == 4


def test_an_image_across_a_unit_border_marks_both_units():
    tokens = [7] * 8
    a, b = (HashChain(ROOT, 4, tokens, [ImageSpan(3, 2, digest)]).units for digest in (b"a", b"b"))
    assert a[0] != b[0]
    assert a[1] != b[1]


def test_tails_are_not_units():
    chain = HashChain(ROOT, 4, [1, 2, 3, 4, 5, 6, 7])
    names = {chain.tail(0, 3), chain.tail(0, 4), chain.tail(1, 1), chain.tail(1, 2), chain.tail(1, 3)}
    assert len(names) == 5
    assert chain.tail(0, 4) == chain.units[0]  # a whole unit, whose name `tail` is never asked for
    assert HashChain(ROOT, 4, [1, 2, 3, 4, 5, 6]).tail(1, 2) == chain.tail(1, 2)
