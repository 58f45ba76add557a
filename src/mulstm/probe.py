"""Which units know a label: a sparse linear classifier on representations."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mulstm.checkpoint import Checkpoint
from mulstm.embedding import embed
from mulstm.errors import DataError, ExtraError
from mulstm.records import Record

STRENGTHS = tuple(2.0**k for k in range(-8, 3))  # of the data against the penalty
REPRESENTATIONS = ("h_mean", "h_final", "c_final")


@dataclass(frozen=True)
class UnitFound:
    """A unit, its weight in the classifier of all units, and how well it separates the labels alone."""

    unit: int
    label: str  # which label it speaks for, where there are more than two
    weight: float
    separation: float  # area under the ROC curve of all records, 0.5 ... 1, whichever way it points


@dataclass(frozen=True)
class Probe:
    """What the classifier came to."""

    labels: list[str]
    records: int
    held_out: int
    accuracy: float  # on the records held out
    majority: float  # what always giving the commonest label would reach there
    units_used: int
    strength: float
    units: list[UnitFound]


def find(
    loaded: Checkpoint,
    records: Sequence[Record],
    *,
    of: str = "",
    top: int = 10,
    seed: int = 1,
    tell: Callable[[str], None] | None = None,  # is told what is being done
) -> Probe:
    """Fits on four fifths of the different texts, measures on the rest; `of` is which representation to read.

    Reviews' models were made to be read from c at the end; others are read from the mean of h. Equal texts
    are held out together, or the classifier would know them.
    """
    linear, selection, metrics = _sklearn()
    tell = tell or (lambda _: None)
    labels = sorted({record.label for record in records})
    if len(labels) < 2:
        raise DataError(f"The records carry {len(labels)} label(s). Give at least two different ones.")
    of = of or ("c_final" if loaded.convention.name.endswith("-review") else "h_mean")
    if of not in REPRESENTATIONS:
        raise DataError(f'There is no representation "{of}". Choose one of: {", ".join(REPRESENTATIONS)}.')
    y = np.array([labels.index(record.label) for record in records])
    cleaned = [loaded.convention.cleaned(record.text) for record in records]
    _, first, texts = np.unique(np.array(cleaned, dtype=object), return_index=True, return_inverse=True)
    kinds = y[first]  # of each different text: the label that it has first
    counts = np.bincount(kinds, minlength=len(labels))
    if counts.min() < 5:
        raise DataError(
            f'Too few different records ({counts.min()}) carry the label "{labels[int(counts.argmin())]}". '
            "Give at least five of each."
        )
    tell(f"reading {len(records):,} records")
    X = getattr(embed(loaded, [record.text for record in records]), of)
    if not X.shape[1]:
        raise DataError(f"The cell {loaded.model.recipe.cell} has no c. Read h_mean or h_final (--of).")
    known, unseen = selection.train_test_split(
        np.arange(len(kinds)), test_size=0.2, random_state=seed, stratify=kinds
    )
    learn, test = (np.flatnonzero(np.isin(texts, part)) for part in (known, unseen))
    X = (X - X[learn].mean(axis=0)) / (X[learn].std(axis=0) + 1e-6)
    parts = selection.StratifiedKFold(
        min(5, int(np.bincount(kinds[known]).min())), shuffle=True, random_state=seed
    ).split(known, kinds[known])
    folds = [tuple(np.flatnonzero(np.isin(texts[learn], known[part])) for part in pair) for pair in parts]
    tried = {C: _classifier(linear, C, seed, len(labels)) for C in STRENGTHS}
    mean_accuracy: dict[float, float] = {}
    for k, (C, model) in enumerate(tried.items(), 1):
        tell(f"choosing units, penalty {k} of {len(tried)}")
        mean_accuracy[C] = float(selection.cross_val_score(model, X[learn], y[learn], cv=folds).mean())
    # Of the equally good the sparsest.
    C = min(C for C in STRENGTHS if mean_accuracy[C] >= max(mean_accuracy.values()) - 1e-9)
    model = tried[C].fit(X[learn], y[learn])
    weights: npt.NDArray[np.float64] = model.coef_  # one row a label; with two labels, one for the second
    return Probe(
        labels,
        len(y),
        len(test),
        float(model.score(X[test], y[test])),
        float(np.bincount(y[test]).max() / len(test)),
        int((weights != 0).any(axis=0).sum()),
        C,
        _ranked(weights, X, y, labels, top, metrics),
    )


def _classifier(linear: Any, C: float, seed: int, labels: int) -> Any:
    """A sparse one, not fitted yet."""
    solver = "liblinear" if labels == 2 else "saga"
    settings: dict[str, Any] = {"C": C, "solver": solver, "random_state": seed, "max_iter": 5000, "tol": 1e-3}
    # Since scikit-learn 1.8 a ratio says which penalty it is; the old word is on its way out.
    word = inspect.signature(linear.LogisticRegression).parameters.get("penalty")
    if word is None or word.default == "deprecated":
        return linear.LogisticRegression(l1_ratio=1.0, **settings)
    return linear.LogisticRegression(penalty="l1", **settings)


def _ranked(
    weights: npt.NDArray[np.float64],
    X: npt.NDArray[np.float32],
    y: npt.NDArray[np.int64],
    labels: list[str],
    top: int,
    metrics: Any,
) -> list[UnitFound]:
    found = []
    order = np.argsort(-np.abs(weights), axis=None, kind="stable")[:top]
    for row, unit in zip(*np.unravel_index(order, weights.shape), strict=True):
        if weights[row, unit] == 0:
            break
        label = int(row) if len(labels) > 2 else 1
        area = float(metrics.roc_auc_score(y == label, X[:, unit]))
        found.append(UnitFound(int(unit), labels[label], float(weights[row, unit]), max(area, 1 - area)))
    return found


def _sklearn() -> tuple[Any, Any, Any]:
    try:
        from sklearn import linear_model, metrics, model_selection
    except ImportError as error:
        what = "Finding units needs scikit-learn, which is not installed"
        raise ExtraError(what, "neurons") from error
    return linear_model, model_selection, metrics
