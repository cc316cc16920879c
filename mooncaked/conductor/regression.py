"""Recursive least squares on a few features: how the estimators learn from what really happened."""

from __future__ import annotations

from collections.abc import Sequence

_MEMORY = 25.0  # samples: what came longer ago has faded
_VARIANCE = 1e4  # of the prior, in squares of its own size: the first sample outweighs it
_SETTLED = 16  # samples after which an outlier is clipped
_CLIP = 8.0
_ERROR_WEIGHT = 0.1


class Regression:
    """y = c . x with y >= 0, fitted to the relative error, starting from a prior guess of c.

    The prior's uncertainty is proportional to its coefficients. So samples of one kind (say, prompts of one
    length only) scale all terms alike instead of putting everything on one of them, and predictions for
    other lengths stay sane. `error` tracks |predicted - actual| / max(predicted, actual), 0 to 1."""

    def __init__(self, prior: Sequence[float]) -> None:
        self.coefficients = [float(value) for value in prior]  # always the same list
        self.samples = 0
        self.error = 0.0
        size = len(self.coefficients)
        spread = [max(_VARIANCE * value * value, 1e-9) for value in self.coefficients]
        self._p = [[spread[i] if i == j else 0.0 for j in range(size)] for i in range(size)]

    def predict(self, x: Sequence[float]) -> float:
        """The estimate for `x`, never below zero."""
        return max(0.0, sum(c * v for c, v in zip(self.coefficients, x, strict=True)))

    def learn(self, x: Sequence[float], actual: float) -> None:
        """Take one sample into account. Nonsense (not a finite, positive number) is left out."""
        if not 0.0 < actual < 1e12:
            return
        predicted = self.predict(x)
        self._track(predicted, actual)
        if self.samples > _SETTLED and predicted > 0.0:
            actual = min(max(actual, predicted / _CLIP), predicted * _CLIP)
        scale = 1.0 / max(actual, predicted, 1e-3)
        self._update([v * scale for v in x], actual * scale)
        self.samples += 1

    def _track(self, predicted: float, actual: float) -> None:
        error = abs(predicted - actual) / max(predicted, actual)
        weight = max(_ERROR_WEIGHT, 1.0 / (self.samples + 1))
        self.error += weight * (error - self.error)

    def _update(self, x: list[float], y: float) -> None:
        px = [sum(a * b for a, b in zip(row, x, strict=True)) for row in self._p]
        spread = sum(a * b for a, b in zip(x, px, strict=True))  # how unsure the prediction for x was
        gain = [value / (1.0 + spread) for value in px]
        residual = y - sum(c * v for c, v in zip(self.coefficients, x, strict=True))
        self.coefficients[:] = [c + g * residual for c, g in zip(self.coefficients, gain, strict=True)]
        left = spread / (1.0 + spread)  # how unsure it is now
        # Forget in the direction of x alone, and only as much as keeps it open to change: forgetting in
        # directions that no sample visits would blow up what one odd sample does there later.
        forget = max(0.0, 1.0 / _MEMORY - left) / (left * left) if left > 0.0 else 0.0
        for i, row in enumerate(self._p):
            for j in range(len(row)):
                row[j] += forget * gain[i] * gain[j] - gain[i] * px[j]
