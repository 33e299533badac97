"""Comparison of two arrays: relative RMS and the worst pair."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """How far `ours` is from `theirs`; one line of a report."""

    name: str
    error: float
    """Relative RMS; infinite where either side is not finite or the shapes differ."""
    detail: str
    passed: bool

    def __str__(self) -> str:
        return f"{'ok  ' if self.passed else 'FAIL'} {self.name:<34} {self.error:9.2e}  {self.detail}"


def compare(name: str, ours: np.ndarray, theirs: np.ndarray, tolerance: float) -> Comparison:
    """Relative RMS, sqrt(mean |ours - theirs|^2 / mean |theirs|^2), and the pair that differs most."""
    if ours.shape != theirs.shape:
        return Comparison(name, np.inf, f"shape: ours {list(ours.shape)}, theirs {list(theirs.shape)}", False)
    if theirs.size == 0:
        return Comparison(name, 0.0, "empty", True)
    wide, reference = ours.astype(np.float64), theirs.astype(np.float64)
    difference = np.abs(wide - reference)
    finite = np.isfinite(difference)
    error = relative_rms(wide, reference)
    worst = np.unravel_index(np.argmax(np.where(finite, difference, np.inf)), difference.shape)
    index = ", ".join(str(int(i)) for i in worst)
    detail = f"worst [{index}]: ours {wide[worst]:.6g}, theirs {reference[worst]:.6g}"
    return Comparison(name, error, detail, bool(error <= tolerance))


def relative_rms(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Relative RMS of `ours` against `theirs`; infinite when either holds a NaN or an infinity."""
    ours, theirs = ours.astype(np.float64), theirs.astype(np.float64)
    if not (np.isfinite(ours).all() and np.isfinite(theirs).all()):
        return float("inf")
    difference, scale = float(np.mean(np.square(ours - theirs))), float(np.mean(np.square(theirs)))
    if difference == 0:
        return 0.0
    return float("inf") if scale == 0 else float(np.sqrt(difference / scale))
