"""What can be wrong with a constraint."""


class ConstraintError(ValueError):
    """A schema, grammar or tag that cannot be followed; one line that names the kind and the reason."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(f"{kind}: {' '.join(reason.split())}")
        self.kind = kind
