import math

import pytest

from serving.admission import CLASSES, Budgets, FairShare, RequestClass, classify
from serving.plan import Shape
from serving.request import Request
from tests.serving.fake_runner import solo

SMALL = (
    RequestClass(name="short", longest=10, page_share=1.0, prefill_weight=6.0),
    RequestClass(name="long", longest=math.inf, page_share=0.4, prefill_weight=1.0),
)


def request(id, tokens, max_tokens=4, **options):
    return Request(id=id, tokens=list(tokens), max_tokens=max_tokens, **options)


@pytest.mark.parametrize(("tokens", "name"), [(1, "short"), (8192, "short"), (8193, "long"), (10**6, "ultra-long")])
def test_classes(tokens, name):
    assert classify(CLASSES, tokens).name == name


def test_the_last_class_takes_everything():
    with pytest.raises(ValueError, match="last request class has a limit"):
        Budgets(CLASSES[:1], 10)


def test_fair_share_gives_no_credit_for_idle_time():
    share = FairShare()
    share.join("busy")
    for _ in range(10):
        share.charge("busy", 1.0)
    share.join("late")
    assert share.time("late") >= 9.0


def finished_order(core, limit=2000):
    order = []
    for _ in range(limit):
        if core.idle:
            return order
        order += [output.id for output in core.step() if output.final]
        core.check_books()
    raise AssertionError("it never ends")


def test_short_prompts_pass_long_ones(make_core):
    """A long prompt is being prefilled in small chunks; a short one that comes later answers first."""
    core = make_core(shapes=(Shape(1, 4),), classes=SMALL, token_budget=8)
    core.submit(request("long", range(48)))
    for _ in range(2):
        core.step()
    core.submit(request("short", range(5)))
    assert finished_order(core) == ["short", "long"]


def test_a_class_keeps_to_its_share_of_the_pages(make_core):
    """31 pages of 4 tokens; long requests may reserve 12, one of them at a time then."""
    core = make_core(classes=SMALL, output_reserve=1.0)
    for name in ("a", "b"):
        core.submit(request(name, range(30), 10))
    core.submit(request("short", range(4)))
    core.step()
    assert sorted(s.request.id for s in core.scheduler.running) == ["a", "short"]
    assert set(finished_order(core)) == {"a", "b", "short"}


def test_tenants_take_turns(make_core):
    core = make_core(rows=1, token_budget=12, shapes=(Shape(1, 8),))
    for n in range(6):
        core.submit(request(f"greedy{n}", [n] * 8, tenant="greedy"))
    core.submit(request("modest0", [8] * 8, tenant="modest"))
    core.submit(request("modest1", [9] * 8, tenant="modest"))
    order = finished_order(core)
    assert order.index("modest0") <= 2
    assert order.index("modest1") <= 4


def test_priorities_come_first(make_core):
    core = make_core(rows=1, token_budget=12, shapes=(Shape(1, 8),))
    for n, priority in enumerate((2, 1, 0, 1)):
        core.submit(request(str(n), [n] * 8, priority=priority))
    assert finished_order(core) == ["2", "1", "3", "0"]


def test_equals_do_not_push_each_other_out(make_core):
    core = make_core(rows=1, token_budget=12, shapes=(Shape(1, 8),))
    for n in range(3):
        core.submit(request(str(n), [n] * 8))
    assert finished_order(core) == ["0", "1", "2"]
    assert core.counters.preemptions == 0


def test_token_budget_holds(make_core):
    core = make_core(rows=3, token_budget=14, shapes=(Shape(1, 4), Shape(2, 6)))
    plans = []
    dispatch = core.runner.dispatch
    core.runner.dispatch = lambda plan: plans.append(plan) or dispatch(plan)
    for n in range(9):
        core.submit(request(str(n), [n] * (3 + 4 * n), 6))
    outputs = core.run()
    for n in range(9):
        assert [t for o in outputs[str(n)] for t in o.tokens] == solo([n] * (3 + 4 * n), 6)
    assert all((plan.shape.size if plan.shape else 0) + len(plan.decode) <= 14 for plan in plans)
    assert any(plan.prefill and plan.decode for plan in plans)
    assert all(len(row.ids) <= plan.shape.tokens for plan in plans for row in plan.prefill)
