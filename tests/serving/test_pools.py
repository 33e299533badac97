import pytest

from serving.pools import BooksError, Exhausted, Pool


def test_dummy_is_never_handed_out_and_nothing_is_lost():
    pool = Pool("pages", 5)
    taken = pool.take(4)
    assert sorted(taken) == [1, 2, 3, 4]
    with pytest.raises(Exhausted, match="1 pages were asked for and 0 of 4 are free"):
        pool.take(1)
    assert pool.release(taken[:2]) == 2
    pool.check_books(taken[2:], [])


def test_take_is_all_or_nothing():
    pool = Pool("pages", 4)
    pool.take(2)
    with pytest.raises(Exhausted):
        pool.take(2)
    assert pool.free == 1


def test_shared_members_are_freed_by_the_last_owner():
    pool = Pool("pages", 3)
    (page,) = pool.take()
    pool.retain([page])
    assert pool.release([page]) == 0
    assert pool.release([page]) == 1


def test_idle_counts_members_that_only_the_cache_holds():
    pool = Pool("slots", 4)
    first, second = pool.take(2)
    pool.hand_over(first)
    pool.cache([second])
    assert (pool.free, pool.idle) == (1, 1)
    pool.retain([first])
    assert pool.idle == 0
    pool.release([first, second])
    assert (pool.free, pool.idle, pool.available) == (1, 2, 3)
    assert pool.uncache([first]) == 1
    pool.check_books([], [second])


@pytest.mark.parametrize("operation", ["retain", "release", "cache", "uncache"])
def test_errors_name_the_member(operation):
    with pytest.raises(BooksError, match="pages 2 "):
        getattr(Pool("pages", 4), operation)([2])


def test_check_books_names_what_differs():
    pool = Pool("pages", 4)
    (page,) = pool.take()
    with pytest.raises(BooksError, match=f"{page}: counted 1, held 0"):
        pool.check_books([], [])
    with pytest.raises(BooksError, match="references of the cache"):
        pool.check_books([], [page])


def test_a_pool_needs_a_member_beside_the_dummy():
    with pytest.raises(ValueError, match="pool of slots has 1 members"):
        Pool("slots", 1)
