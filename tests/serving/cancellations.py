"""Requests that end at random moments."""


def cancel_at_random(core, items, rng, *, steps):
    """Submits `items`, up to six at a time, fewer than `steps` steps apart; none is left, and the books are right."""
    alive = []
    for number, item in enumerate(items):
        core.submit(item)
        alive.append(item.id)
        for _ in range(rng.randrange(steps)):
            core.step()
        if len(alive) > 5:
            core.cancel(alive.pop(rng.randrange(len(alive))))
        if number % 50 == 0:
            core.check_books()
    for id in alive:
        core.cancel(id)
    core.run()
    core.check_books()
