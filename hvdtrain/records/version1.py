"""Records of schema hvdtrain/1, when accuracy was the only metric and captions' BLEU stood beside it."""

from __future__ import annotations

from typing import Any

SHARE = {"unit": "", "least": 0, "most": 1, "higher_is_better": True}
MORE = [f"{prefix}bleu{order}" for prefix in ("", "beam_") for order in range(1, 5)]


def brought_up(value: dict[str, Any]) -> dict[str, Any]:
    """The JSON value of a record as this version would have written it; one that is not of version 1 as it is."""
    kind = value.get("type")
    if kind == "epoch" and "train_accuracy" in value:
        validation = _scores(value.get("validation_accuracy"), value.get("scores", {}))
        return value | {"train_scores": _scores(value["train_accuracy"], {}), "validation_scores": validation}
    if kind == "summary" and isinstance(known := value.get("validation_accuracy"), list):
        given = value.get("validation_scores")
        more = given if given and isinstance(given, list) else [{}] * len(known)
        return value | {
            "test_scores": _scores(value.get("test_accuracy"), value.get("test_scores", {})),
            "validation_scores": [_scores(a, b) for a, b in zip(known, more, strict=False)],
        }
    if kind == "manifest" and value.get("schema") == "hvdtrain/1":
        captions = value.get("workload") == "captioning"
        scores = {"accuracy": {"label": "accuracy", "shown": True, **SHARE}}
        if captions:
            scores |= {name: {"label": name, "shown": name.endswith("4"), **SHARE} for name in MORE}
        return value | {"metric": {"primary": "bleu4" if captions else "accuracy", "scores": scores}}
    return value


def _scores(accuracy: Any, more: Any) -> Any:
    if not isinstance(more, dict):
        return more
    return more if accuracy is None else {"accuracy": accuracy, **more}
